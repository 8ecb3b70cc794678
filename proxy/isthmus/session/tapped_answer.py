"""An answer that a tap notes, and of which its first bytes, as they came, do not say all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_plugins.api import TAP_BYTES, TAP_HEAD, TAP_MORE
from isthmus_plugins.clock import monotonic
from isthmus_protocol.fetch_scan import FetchScan
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame

if TYPE_CHECKING:
    from isthmus.session.dispatch import Route


class TappedAnswer:
    """Has the tap note more first bytes of one as they come and, of a Fetch, all partitions."""

    __slots__ = ("_correlation_id", "_route", "_scan", "_seen", "_session", "_size")

    def __init__(self, route: Route, session: int, correlation_id: int, asked: float, size: int) -> None:
        """``asked``: when the request was forwarded. ``size``: of the answer, without its size prefix."""
        self._route = route
        self._session = session
        self._correlation_id = correlation_id
        self._size = size + 4
        self._seen = 0
        self._scan: FetchScan | None = None
        is_scanned = route.api_key == ApiKey.FETCH and self._size > TAP_BYTES
        if is_scanned and route.tap is not None and route.tap.wants_parts(session, asked, correlation_id):
            self._scan = FetchScan(route.version)

    def feed(self, data: bytes) -> bool:
        """Take the next bytes from the broker, which may reach into the next answer; whether more are wanted.

        The first ones were noted."""
        tap, seen, noted = self._route.tap, self._seen, self._route.tap_bytes
        if tap is None:
            return False
        if len(data) > self._size - seen:
            data = data[: self._size - seen]
        self._seen += len(data)
        if 0 < seen < noted:
            more = TAP_HEAD.pack(0, self._correlation_id) + data[: noted - seen]
            now = monotonic()
            tap.note((TAP_MORE, self._session, now, now, self._route.key, more))
        if self._scan is not None and not self._scanned(self._scan, data):
            self._scan = None
        return self._seen < self._size and (self._seen < noted or self._scan is not None)

    def _scanned(self, scan: FetchScan, data: bytes) -> bool:
        """Whether there is more to be found."""
        tap = self._route.tap
        assert tap is not None
        try:
            scan.feed(data)
        except MalformedFrame:  # the client will say so
            return False
        if scan.done:
            tap.parts(self._session, self._route.key, self._correlation_id, scan.parts, len(scan.parts))
        return not scan.done
