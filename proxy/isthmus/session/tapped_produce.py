"""A Produce request that a tap notes, and of which it does not see all in the first bytes.

Its partitions are found as its bytes come, before these go on to the broker: so they are noted behind the request, and
before its answer can be. What has many is taken in slices, between which the loop does other things.
"""

from __future__ import annotations

from typing import Final

from isthmus_control.model import TOPIC_NAME_CHARS_MAX
from isthmus_plugins.api import TAP_BYTES, Tap
from isthmus_plugins.aside import aside
from isthmus_protocol.produce_scan import ProduceScan
from isthmus_protocol.wire import MalformedFrame

UNITS_AT_ONCE: Final = 400
"""Topics and partitions that are read of what has come, before the loop does other things: a millisecond."""
_BEHIND_IDS: Final = 12
"""Where the bytes begin that requests of one kind have in common: behind size, key, version and correlation id."""


class TappedProduces:
    """Those of one connection."""

    __slots__ = (
        "_ahead",
        "_at",
        "_correlation_id",
        "_elements_max",
        "_found",
        "_key",
        "_left",
        "_lone_head",
        "_scan",
        "_session",
        "_tap",
        "wants_more",
    )

    def __init__(self, session: int, elements_max: int) -> None:
        """``elements_max``: a request with more topics and partitions is noted by its first bytes alone."""
        self._session = session
        self._elements_max = elements_max
        self._lone_head = b"\0" * TAP_BYTES
        """The head of its last request of one partition: of others like it the first bytes say all."""
        self._scan: ProduceScan | None = None
        self._tap: Tap | None = None
        self._ahead: tuple[bytes, ProduceScan | None] | None = None
        """A frame that was scanned before it is noted; no scan: nothing is to be told of it."""
        self._key = self._correlation_id = 0
        self._found = 0
        """Partitions that were told of."""
        self._at = 0.0
        self._left = UNITS_AT_ONCE
        """Of what arrived then, to be read before the loop does other things."""
        self.wants_more = False
        """Of the request that was taken last."""

    # ---- one that is forwarded as a whole ----

    async def look_ahead(self, version: int, frame: bytes) -> None:
        """Scan a request that is to be taken next: in the thread, if it has many partitions."""
        if frame.startswith(self._lone_head, _BEHIND_IDS):
            return
        scan = ProduceScan(version)
        self._ahead = frame, scan
        try:
            taken = scan.feed(frame, UNITS_AT_ONCE)
            if taken < len(frame):
                await aside(scan.feed, frame[taken:], self._elements_max)
        except MalformedFrame:
            self._ahead = frame, None

    def take_whole(self, tap: Tap, key: int, correlation_id: int, at: float, frame: bytes) -> None:
        """Take a request that was noted."""
        ahead, self._ahead = self._ahead, None
        if frame.startswith(self._lone_head, _BEHIND_IDS) or not self._wanted(tap, key, correlation_id, at):
            return
        if ahead is None or ahead[0] is not frame:
            left, self._left = self._left, self._elements_max  # whoever let it pass has looked at each of them
            self._begin(key, frame)
            self._left = left
        elif ahead[1] is not None:
            self._learn(ahead[1], frame)
            self._tell_last(ahead[1])

    # ---- one that streams through ----

    def begin(self, tap: Tap, key: int, correlation_id: int, at: float, data: bytes, start: int, end: int) -> int:
        """Take a request that was noted, ``data[start:end]`` as far as it is there; ``at``: when that arrived.

        How many bytes were taken. The others are to be fed when the loop has done other things.
        """
        self.wants_more = False
        # Nearly all are of one partition, and like one before: no call is made for these.
        if data.startswith(self._lone_head, start + _BEHIND_IDS) or not self._wanted(tap, key, correlation_id, at):
            return min(end, len(data)) - start
        if at != self._at:
            self._at, self._left = at, UNITS_AT_ONCE
        return self._begin(key, data[start:end])

    def feed(self, data: bytes) -> int:
        """Take the next bytes of a request that wants more; how many were taken, as of :meth:`begin`."""
        assert self._scan is not None
        self._left = UNITS_AT_ONCE
        return self._take(self._scan, data)

    # ---- of either ----

    def _wanted(self, tap: Tap, key: int, correlation_id: int, at: float) -> bool:
        """Whether partitions of a request are to be told of."""
        self._tap, self._key, self._correlation_id, self._found = tap, key, correlation_id, 0
        return tap.wants_parts(self._session, at, correlation_id)

    def _begin(self, key: int, frame: bytes) -> int:
        scan = self._scan = ProduceScan(key & 0xFFFF)
        taken = self._take(scan, frame)
        self._learn(scan, frame)
        return taken

    def _learn(self, scan: ProduceScan, frame: bytes) -> None:
        """Remember the head of a request of one partition."""
        if scan.lone_head_end is not None and scan.lone_head_end < TAP_BYTES:
            self._lone_head = frame[_BEHIND_IDS : scan.lone_head_end]
            self.wants_more = False

    def _take(self, scan: ProduceScan, data: bytes) -> int:
        """Read what has come, as much as may be at once."""
        self.wants_more = True
        if self._left <= 0:
            return 0
        before = scan.units
        try:
            taken = scan.feed(data, self._left)
        except MalformedFrame:  # the broker will say so
            self.wants_more = False
            return len(data)
        self._left -= scan.units - before
        if scan.done or not self._counts(scan):
            self.wants_more = False
            self._tell_last(scan)
            return len(data)
        if len(scan.parts) >= UNITS_AT_ONCE:
            self._tell(scan, last=False)
        return taken

    def _tell_last(self, scan: ProduceScan) -> None:
        if scan.done and self._counts(scan):
            self._tell(scan, last=True)

    def _counts(self, scan: ProduceScan) -> bool:
        """Whether partitions are told of: no broker would take others, and what is kept of them is bounded."""
        return scan.units <= self._elements_max and scan.name_bytes_max <= TOPIC_NAME_CHARS_MAX

    def _tell(self, scan: ProduceScan, last: bool) -> None:
        """Tell of the partitions that were found since the last time."""
        assert self._tap is not None
        if scan.lone_head_end is None:
            found, scan.parts = scan.parts, []
            self._found += len(found)
            total = self._found if last else 0
            self._tap.parts(self._session, self._key, self._correlation_id, found, total)
