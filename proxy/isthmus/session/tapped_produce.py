"""A Produce request that a tap notes, and of which it does not see all in the first bytes."""

from __future__ import annotations

from typing import Final

from isthmus_plugins.api import TAP_BYTES, Tap
from isthmus_plugins.aside import aside
from isthmus_protocol.produce_scan import ProduceScan
from isthmus_protocol.wire import MalformedFrame

_BEHIND_IDS: Final = 12
"""Where the bytes begin that requests of one kind have in common: behind size, key, version and correlation id."""


class TappedProduces:
    """Those of one connection."""

    __slots__ = ("_ahead", "_correlation_id", "_key", "_lone_head", "_scan", "_session", "_tap")

    def __init__(self, session: int) -> None:
        self._session = session
        self._lone_head = b"\0" * TAP_BYTES
        """The head of its last request of one partition: of others like it the first bytes say all."""
        self._scan: ProduceScan | None = None
        self._tap: Tap | None = None
        self._ahead: tuple[bytes, ProduceScan | None] | None = None
        """A frame that was scanned before it is noted; no scan: it is malformed."""
        self._key = self._correlation_id = 0

    async def look_ahead(self, version: int, frame: bytes) -> None:
        """Scan a whole frame in the thread, which is to be taken next."""
        scan = await aside(_scanned, version, frame)
        if scan is None or scan.lone_head_end is None:  # of one partition the loop needs no help
            self._ahead = frame, scan

    def begin(self, tap: Tap, key: int, correlation_id: int, at: float, data: bytes, start: int, end: int) -> bool:
        """Take a request that was noted, ``data[start:end]`` as far as it is there; whether more is wanted of it."""
        if data.startswith(self._lone_head, start + _BEHIND_IDS):
            return False
        ahead, self._ahead = self._ahead, None
        if not tap.wants_parts(self._session, at, correlation_id):
            return False
        frame = data[start:end]
        self._tap, self._key, self._correlation_id = tap, key, correlation_id
        if ahead is not None and ahead[0] is frame:
            self._scan = ahead[1]
            return self._scan is not None and self._told(self._scan)
        scan = self._scan = ProduceScan(key & 0xFFFF)
        wanted = self.feed(frame)
        if scan.lone_head_end is not None and scan.lone_head_end < TAP_BYTES:
            self._lone_head = frame[_BEHIND_IDS : scan.lone_head_end]
            return False
        return wanted

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; whether more are wanted."""
        scan = self._scan
        assert scan is not None
        try:
            scan.feed(data)
        except MalformedFrame:  # the broker will say so
            return False
        return self._told(scan)

    def _told(self, scan: ProduceScan) -> bool:
        """Tell of all partitions once they are found; whether more bytes are wanted for that."""
        assert self._tap is not None
        if scan.done and scan.lone_head_end is None:
            self._tap.parts(self._session, self._key, self._correlation_id, scan.parts)
        return not scan.done


def _scanned(version: int, frame: bytes) -> ProduceScan | None:
    scan = ProduceScan(version)
    try:
        scan.feed(frame)
    except MalformedFrame:
        return None
    return scan
