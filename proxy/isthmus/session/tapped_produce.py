"""A Produce request that a tap notes, and of which it does not see all in the first bytes."""

from __future__ import annotations

from typing import Final

from isthmus_plugins.api import TAP_BYTES, Tap
from isthmus_protocol.produce_scan import ProduceScan
from isthmus_protocol.wire import MalformedFrame

_BEHIND_IDS: Final = 12
"""Where the bytes begin that requests of one kind have in common: behind size, key, version and correlation id."""


class TappedProduces:
    """Those of one connection."""

    __slots__ = ("_correlation_id", "_key", "_lone_head", "_scan", "_session", "_tap")

    def __init__(self, session: int) -> None:
        self._session = session
        self._lone_head = b"\0" * TAP_BYTES
        """The head of its last request of one partition: of others like it the first bytes say all."""
        self._scan: ProduceScan | None = None
        self._tap: Tap | None = None
        self._key = self._correlation_id = 0

    def begin(self, tap: Tap, key: int, correlation_id: int, at: float, data: bytes, start: int, end: int) -> bool:
        """Take a request that was noted, ``data[start:end]`` as far as it is there; whether more is wanted of it."""
        if data.startswith(self._lone_head, start + _BEHIND_IDS):
            return False
        if not tap.wants_parts(self._session, at, correlation_id):
            return False
        frame = data[start:end]
        self._tap, self._key, self._correlation_id = tap, key, correlation_id
        scan = self._scan = ProduceScan(key & 0xFFFF)
        wanted = self.feed(frame)
        if scan.lone_head_end is not None and scan.lone_head_end < TAP_BYTES:
            self._lone_head = frame[_BEHIND_IDS : scan.lone_head_end]
            return False
        return wanted

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; whether more are wanted."""
        scan, tap = self._scan, self._tap
        assert scan is not None
        assert tap is not None
        try:
            scan.feed(data)
        except MalformedFrame:  # the broker will say so
            return False
        if scan.done and scan.lone_head_end is None:
            tap.parts(self._session, self._key, self._correlation_id, scan.parts)
        return not scan.done
