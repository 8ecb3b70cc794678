"""Whether a hole in the source's log may have been a tombstone that the follower should have got.

A tombstone that is gone before it was copied does harm only where the follower has an older record of its key, which
is gone at the source as well: the follower would keep a deleted key. The cleaner takes a tombstone
``delete.retention.ms`` after it first came by, so what was written after the source's log was last seen to end where
the stream is now cannot be missing before that time has passed since. ``docs/adr/0005-missed-deletions.md`` has the
whole argument, and what is done about a hole that is late.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from isthmus_protocol.records import BatchError, Frame, walk

DELETE_RETENTION: Final = "delete.retention.ms"
CLEANING_MAX_S: Final = 3600.0
"""So long a round of the cleaner over one log is expected to take at most."""


class TombstoneWindow:
    """Of one led partition, over all its streams of this process. Times are monotonic seconds."""

    __slots__ = ("_begun_in", "_configs", "_least", "_mark", "_position", "_retention", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        """What the source has at ``_position`` or after was written, or its copying begun, after this. None: unknown"""
        self._position = 0
        self._begun_in: int | None = None
        """The source's leader epoch in which copying into an empty follower began, as long as it never caught up."""
        self._mark: tuple[int, float] | None = None
        """Where the log ended at some time, if the follower is not there yet."""
        self._configs: Mapping[str, str] | None = None
        self._retention: float | None = None
        self._least: float | None = None
        """The least ``delete.retention.ms`` that was seen since then, in seconds."""

    def opened(self, end_offset: int, empty: bool, leader_epoch: int, now: float) -> None:
        """A stream begins at the follower's log end. ``empty``: the follower has no records before that."""
        self._mark = None
        caught_up = self._since is not None and self._begun_in is None and end_offset >= self._position
        # Each replica is cleaned by its own broker: what one has still, another one may have lost long ago.
        goes_on = self._since is not None and self._begun_in == leader_epoch and end_offset >= self._position
        if caught_up or (goes_on and not empty):
            return
        self._since, self._position, self._least = (now if empty else None), 0, self._retention
        self._begun_in = leader_epoch if empty else None

    def saw_end(self, high_watermark: int, asked_at: float, acked: int) -> None:
        """The log ended at ``high_watermark`` some time after ``asked_at``; the follower has all before ``acked``."""
        if self._mark is None or acked >= high_watermark:
            self._mark = high_watermark, asked_at
        self.confirmed(acked)

    def confirmed(self, acked: int) -> None:
        """The follower has all before ``acked``."""
        if self._mark is not None and acked >= self._mark[0]:
            self._position, self._since = self._mark
            self._begun_in, self._mark, self._least = None, None, self._retention

    def learn(self, configs: Mapping[str, str] | None) -> None:
        """The source topic's effective settings, as last read."""
        if configs is None or configs is self._configs:
            return
        self._configs = configs
        value = configs.get(DELETE_RETENTION)
        self._retention = None if value is None else int(value) / 1000
        if self._least is None or self._retention is None:
            self._least = self._retention
        else:
            self._least = min(self._least, self._retention)

    def late(self, now: float) -> bool:
        """Whether a tombstone may be gone that stood where the stream is, or after that. In doubt it is."""
        if self._since is None or self._least is None:
            return True
        in_time = self._least / 2  # brokers have clocks of their own
        if self._begun_in is not None:
            in_time = min(in_time, self._least - CLEANING_MAX_S)
        return now - self._since > in_time


def hole_end(records: Frame, offset: int, known: int) -> int | None:
    """Where the last batch ends that has a hole in it, or before it, at ``offset`` or after. None: there is none.

    Holes before ``known`` do not count.
    """
    found, expected = None, offset
    try:
        for _, _, header in walk(records):
            if header.next_offset <= expected:
                continue
            if (header.base_offset > expected or header.has_holes) and header.next_offset > known:
                found = header.next_offset
            expected = header.next_offset
    except BatchError:
        pass  # it is reported when it is to be sent
    return found
