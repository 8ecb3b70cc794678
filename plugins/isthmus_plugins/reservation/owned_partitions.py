"""What members of consumer groups own (KIP-848), who are not told of all topics that they are assigned.

A coordinator that takes a partition from a member waits until the member says what it still owns, and lets it have
nothing new before; after the rebalance timeout it expels it. Members say so when they give something up. One that had
never heard of the partition gives nothing up, and says nothing. So for such members the proxy says again, in each
heartbeat, what the member has said last: that holds until the member says something else.

Members say what they own when they join, when that changes, and when they have lost their connection.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from isthmus_plugins.api import Request
from isthmus_protocol import peeks
from isthmus_protocol.splicing import edited_frame

MEMBERS_MAX: Final = 10_000
"""Beyond that the ones that said something longest ago are forgotten: they wait for a rebalance timeout, as above."""
SAID_BYTES_MAX: Final = 64 * 1024
"""What a member says that takes more is not kept: thousands of topics."""
_NOTHING_SAID: Final = b"\x00"
"""Null, in place of an array."""
_STAYS: Final = 0
"""The least member epoch of a member that does not leave."""
_Member: TypeAlias = tuple[int, bytes, bytes]
"""The version that it speaks, its group and its id."""


class OwnedPartitions:
    """Of all members, as far as their coordinators have taken what they said."""

    def __init__(self) -> None:
        self._said: dict[_Member, bytes] = {}
        """What each has said last that it owns, as it stands in a request."""
        self._untold: set[_Member] = set()
        """Those of them that were not told of all topics once."""

    def heartbeat(self, request: Request) -> bytes:
        """The frame to forward of a ConsumerGroupHeartbeat."""
        if not self._untold:
            return request.frame
        group, member_id, epoch, (start, end) = peeks.group_member(request.version, request.frame)
        member = (request.version, group, member_id)
        said = self._said.get(member) if member in self._untold else None
        if said is None or epoch < _STAYS or request.frame[start:end] != _NOTHING_SAID:
            return request.frame
        return edited_frame(request.frame, [(start, end, said)])

    def answered(self, version: int, asked: bytes, answer: bytes, untold: bool) -> None:
        """A coordinator has answered a heartbeat. ``untold``: the member is not told of a topic in that."""
        code, given_id = peeks.heartbeat_answer(version, answer)
        if code:
            return
        group, member_id, epoch, (start, end) = peeks.group_member(version, asked)
        member = (version, group, member_id or given_id or b"")
        if epoch < _STAYS:
            self._forget(member)
            return
        if asked[start:end] != _NOTHING_SAID:
            self._said.pop(member, None)
            self._said[member] = asked[start:end]
            if end - start > SAID_BYTES_MAX:
                self._forget(member)
            elif len(self._said) > MEMBERS_MAX:
                self._forget(next(iter(self._said)))
        if untold and member in self._said:
            self._untold.add(member)

    def _forget(self, member: _Member) -> None:
        self._said.pop(member, None)
        self._untold.discard(member)
