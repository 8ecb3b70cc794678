"""Which requests are recorded where not all are: the proxy and the process that writes come to the same."""

from __future__ import annotations

import zlib


def is_chosen(sampling: float, session: int, correlation_id: int, at: float) -> bool:
    """Whether a request, as a whole, belongs to a part of all. ``at``: when it arrived (monotonic)."""
    return sampling >= 1 or is_in(sampling, b"%d %d %d" % (session, correlation_id, int(at * 1e9)))


def is_in(sampling: float, which: bytes) -> bool:
    """Whether something belongs to a part of all, by a number that any proxy would come to."""
    return zlib.crc32(which) < sampling * 2**32
