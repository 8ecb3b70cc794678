"""An answer that a tap notes, and of which its first bytes, as they came, do not say all.

Of one that streams through, its partitions are found as its bytes come, before these go on to the client. One that
hooks see as a whole, or that the proxy gives itself, is scanned before they do, and before it is noted. Either way what
has many is taken in slices, between which the loop does other things. What comes behind it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from isthmus.session.tapped_produce import UNITS_AT_ONCE
from isthmus_plugins.api import TAP_BYTES, TAP_HEAD, TAP_MORE, Tap
from isthmus_plugins.clock import monotonic
from isthmus_protocol.fetch_scan import FetchScan
from isthmus_protocol.partition_scan import ScannedPartition
from isthmus_protocol.wire import MalformedFrame

if TYPE_CHECKING:
    from isthmus.session.dispatch import Route

BYTES_AT_ONCE: Final = 256 * 1024
"""Of an answer that is there as a whole: as much as comes at once of one that streams."""


class TappedAnswers:
    """Those of one connection."""

    __slots__ = (
        "_at",
        "_correlation_id",
        "_found",
        "_left",
        "_noted",
        "_route",
        "_scan",
        "_seen",
        "_session",
        "_size",
        "wants_more",
    )

    _route: Route

    def __init__(self, session: int) -> None:
        self._session = session
        self._correlation_id = 0
        self._size = 0
        self._noted = 0
        """So many of its first bytes were."""
        self._seen = 0
        """So many of its bytes were taken."""
        self._scan: FetchScan | None = None
        self._found = 0
        """Partitions that were told of."""
        self._at = 0.0
        """When what is taken now had arrived."""
        self._left = UNITS_AT_ONCE
        """Of that, to be read before the loop does other things."""
        self.wants_more = False
        """Of the answer that streams."""

    # ---- one that streams through ----

    def begin(self, route: Route, correlation_id: int, asked: float, size: int, data: bytes, at: float) -> int:
        """Take an answer that was noted, as far as it is there; how many of these bytes were taken.

        The others are to be fed when the loop has done other things. ``asked``: when the request was forwarded.
        ``size``: of the answer, with its size prefix. ``at``: when ``data`` arrived.
        """
        self._start(route, correlation_id, asked, size, at)
        self._noted = min(len(data), route.tap_bytes)
        return self._take(data)

    def feed(self, data: bytes) -> int:
        """Take the next bytes from the broker, which may reach into the next answer; how many were taken, as of
        :meth:`begin`."""
        self._left = UNITS_AT_ONCE
        size = len(data)
        if size > self._size - self._seen:
            data = data[: self._size - self._seen]
        self._note_more(data)
        taken = self._take(data)
        return size if taken == len(data) else taken

    def _note_more(self, data: bytes) -> None:
        """Note more of its first bytes."""
        tap, wanted = self._route.tap, self._route.tap_bytes
        more = data[self._noted - self._seen : wanted - self._seen] if self._noted < wanted else b""
        if more and tap is not None:
            self._noted += len(more)
            now = monotonic()
            said = TAP_HEAD.pack(0, self._correlation_id) + more
            tap.note((TAP_MORE, self._session, now, now, self._route.key, said))

    def _take(self, data: bytes) -> int:
        taken = len(data) if self._scan is None else self._scanned(self._scan, data)
        self._seen += taken
        if self._seen >= self._size or self._route.tap is None:
            self._scan = None
            self.wants_more = False
        else:
            self.wants_more = self._scan is not None or self._noted < self._route.tap_bytes
        return taken

    # ---- one that is there as a whole ----

    def look_ahead(self, route: Route, correlation_id: int, asked: float, frame: bytes, at: float) -> bool:
        """Take more of an answer that is to be noted next; whether it may be. If not, this is to be called again after
        :meth:`go_on`."""
        if self._scan is None:
            self._start(route, correlation_id, asked, len(frame), at)
        if self._scan is None:
            return True
        self._seen += self._scanned(self._scan, frame[self._seen : self._seen + BYTES_AT_ONCE])
        if self._seen >= self._size:
            self._scan = None
        return self._scan is None

    def go_on(self) -> None:
        """The loop has done other things."""
        self._left = UNITS_AT_ONCE

    # ---- of either ----

    def _start(self, route: Route, correlation_id: int, asked: float, size: int, at: float) -> None:
        self._route, self._correlation_id, self._size = route, correlation_id, size
        self._seen = self._found = 0
        self._scan = None
        tap = route.tap if route.scans_answers and size > TAP_BYTES else None
        if tap is not None and tap.wants_parts(self._session, asked, correlation_id):
            self._scan = FetchScan(route.version)
        if at != self._at:
            self._at, self._left = at, UNITS_AT_ONCE

    def _scanned(self, scan: FetchScan, data: bytes) -> int:
        """Look for partitions in what is there, as much as may be at once. How many of its bytes were taken."""
        tap = self._route.tap
        if tap is None:
            self._scan = None
            return len(data)
        if self._left <= 0:
            return 0
        before = scan.units
        try:
            taken = scan.feed(data, self._left)
        except MalformedFrame:  # the client will say so
            self._scan = None
            return len(data)
        self._left -= scan.units - before
        if scan.done:
            self._scan = None
            self._tell(tap, scan.parts, last=True)
            return len(data)
        if len(scan.parts) > UNITS_AT_ONCE:
            self._tell(tap, scan.parts[:-1], last=False)
            del scan.parts[:-1]  # there may be more of the last one
        return taken

    def _tell(self, tap: Tap, found: Sequence[ScannedPartition], last: bool) -> None:
        """Tell of the partitions that were found since the last time."""
        self._found += len(found)
        tap.parts(self._session, self._route.key, self._correlation_id, found, self._found if last else 0)
