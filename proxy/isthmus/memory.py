"""Gives the memory of closed connections back to the system.

What a connection took is free when it closes, but free inside the allocator: many connections that came and went leave
pages behind that hold nothing. glibc returns them when asked (``malloc_trim``). That takes a millisecond for each 50 MB
of heap or so, so it is asked after many connections, and a moment later.

Left to itself, glibc gives back too early what the next large answer needs again, page by page, each by a page fault.
So it is set to keep some.

Python's collector now and then looks through every object there is, most of which are code and schemas: a pause of
50 ms or more for all clients. So what is there after the start is left out for good. What comes after is collected
when there is much of it: some hundred acks that wait for the other cluster are thousands of objects, and each time that
they are looked through is in vain. Loading modules leaves free pages, too (3 MB): they are returned then.

What stays is moved into huge pages then, where the kernel can (Linux 6.1): a proxy that sleeps between requests finds
its caches used by others, and looks up fewer addresses. Synchronous mode at depth 1 saves 0.1 ms by it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

log = logging.getLogger("isthmus.memory")

YOUNG_OBJECTS_MAX: Final = 20_000
"""Objects more than there were before the collector looks for cycles among them; it takes a millisecond or less."""
CLOSED_MIN: Final = 200
"""Connections that have closed since the last time."""
DELAY_S: Final = 1.0
"""They seldom close alone."""

KEPT_BYTES: Final = 16 * 1024 * 1024
"""Free memory at the heap's end that stays with the process between large answers."""
HEAP_BLOCK_BYTES_MAX: Final = 4 * 1024 * 1024
"""Up to this size, memory comes from the heap; beyond, it is mapped and unmapped each time."""
HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
_MADV_COLLAPSE: Final = 25
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def keep_heap() -> None:
    """Set how much glibc keeps. Nothing happens where the C library is another one."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES_MAX)


def leave_out_what_is_there() -> None:
    """Collect once more, leave out of all later collections what is left, and have these seldom: it stays for the
    process's life.

    What only the start needed goes back to the system, what is left goes into huge pages.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
        _into_huge_pages()


def _into_huge_pages() -> None:
    """Move the process's own writable memory. Where the kernel refuses, it stays as it is."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _own_ranges(Path("/proc/self/maps").read_text()):
        madvise(start, end - start, _MADV_COLLAPSE)


def _own_ranges(maps: str) -> Iterator[tuple[int, int]]:
    """Of a process's memory (``/proc/PID/maps``) what is writable and in no file: whole huge pages of it."""
    for line in maps.splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if rights.startswith("rw") and inode == "0":
            first, last = (int(each, 16) for each in addresses.split("-"))
            start, end = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, last // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if start < end:
                yield start, end


def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function, None where the C library is another one."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_size_t]
    function.restype = ctypes.c_int

    def trim(keep: int) -> int:
        return int(function(keep))

    return trim


class Trimmer:
    """Counts closed connections, and trims the heap after many."""

    __slots__ = ("_closed", "_timer", "_trim")

    def __init__(self) -> None:
        self._closed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._trim = _malloc_trim()

    def closed(self) -> None:
        """A connection has closed. Called on the loop."""
        self._closed += 1
        if self._closed >= CLOSED_MIN and self._timer is None and self._trim is not None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._now)

    def _now(self) -> None:
        assert self._trim is not None
        self._timer = None
        closed, self._closed = self._closed, 0
        self._trim(0)
        log.debug("memory trimmed", extra={"closed": closed})

    def stop(self) -> None:
        """Forget it: the process ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
