"""What clients wait for while another cluster is to lead what this one leads (a reversal).

==============================  ========================================  ============================================
                                announced                                 held
==============================  ========================================  ============================================
Produce                         goes on                                   waits, ``hold_ms`` at most; then
                                                                          NOT_LEADER_OR_FOLLOWER
OffsetCommit, TxnOffsetCommit   go on                                     are answered after 3 s at most:
                                                                          COORDINATOR_LOAD_IN_PROGRESS
AddPartitionsToTxn,             COORDINATOR_LOAD_IN_PROGRESS              the same
AddOffsetsToTxn
all else                        goes on                                   as of any reserved namespace
==============================  ========================================  ============================================

A Produce that waited goes to the broker if the reversal is taken back, and not before this proxy has applied that;
no time that is over lets it pass. A commit never does: it is answered, so that heartbeats behind it reach the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from isthmus_control.lookup import Lookup
from isthmus_control.model import ResourceType
from isthmus_plugins.api import Answer, Gate, Verdict
from isthmus_plugins.aside import on_loop
from isthmus_plugins.clock import monotonic

COMMITS_HELD_S: Final = 3.0
"""Heartbeats on the same connection are answered behind a commit."""
MESSAGE: Final = "another cluster is about to lead this: try again"


class Reversing:
    """Whom reversals keep waiting. ``lookup`` is that of now."""

    def __init__(self, lookup: Callable[[], Lookup]) -> None:
        self._lookup = lookup
        self._changed = asyncio.Event()
        self._commits: dict[Gate, tuple[str, bytes, asyncio.TimerHandle]] = {}
        """By the answer that waits: the group, what it says in the end, and when."""

    def changed(self) -> None:
        """The lookup is another one."""
        self._changed.set()
        self._changed = asyncio.Event()
        for gate, (group, _, _) in list(self._commits.items()):
            if not self.holds(ResourceType.CONSUMER_GROUP, group):
                self._let_go(gate)

    def holds(self, kind: ResourceType, name: str) -> bool:
        """Whether writes to it wait."""
        reversal = self._lookup().reversing(kind, name)
        return reversal is not None and reversal.holds

    def held_s(self, topics: Iterable[str]) -> float | None:
        """How long a Produce to these topics may wait, in seconds from when it came; None: it is not to wait."""
        found = [self._lookup().reversing(ResourceType.TOPIC, topic) for topic in topics]
        waits = [each.hold_ms / 1000 for each in found if each is not None and each.holds]
        return min(waits, default=None)

    async def until_decided(self, topics: Iterable[str], until: float) -> None:
        """Return when none of the topics is held any more, or at ``until`` (monotonic seconds)."""
        named = tuple(topics)
        while self.held_s(named) is not None and (left := until - monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def answered_later(self, group: str, refused: Verdict) -> Verdict:
        """``refused``, the answer to a commit, when its group is held no more, or after :data:`COMMITS_HELD_S`."""
        if not isinstance(refused, Answer) or isinstance(refused.frame, Gate):
            return refused
        gate = Gate()
        on_loop(self._keep, gate, group, refused.frame)
        return Answer(gate, refused.cause)

    def _keep(self, gate: Gate, group: str, frame: bytes) -> None:
        timer = asyncio.get_running_loop().call_later(COMMITS_HELD_S, self._let_go, gate)
        self._commits[gate] = group, frame, timer

    def _let_go(self, gate: Gate) -> None:
        _, frame, timer = self._commits.pop(gate)
        timer.cancel()
        gate.open(frame)
