"""Files of blocks: written, sealed, bounded. What cannot be written (a full disk) is dropped and counted."""

from __future__ import annotations

import errno
import io
import os
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from isthmus_plugins.capture.blocks import LINKS, REQUESTS, Block, Layout, whole_blocks
from isthmus_plugins.clock import monotonic, time
from isthmus_plugins.private_files import for_owner, make_directory

BLOCK_ROWS: Final = 16_384
BLOCK_S: Final = 1.0
"""An event is on the disk after this time."""
OPEN: Final = ".open"
SEALED: Final = ".capture"
SEALED_LINKS: Final = ".links"
SUFFIXES: Final = {REQUESTS: SEALED, LINKS: SEALED_LINKS}


@dataclass(slots=True)
class Counts:
    events: int = 0
    """In files."""
    sent: int = 0
    """To topics."""
    dropped: int = 0
    """Events that could not be written."""
    bytes: int = 0
    files: int = 0
    unpaired: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """When files are sealed, and how much of them is kept."""

    roll_bytes: int
    roll_s: float
    keep_bytes: int


class BlockFiles:
    """The files of one kind of rows in one directory."""

    def __init__(
        self, directory: Path, source: Mapping[str, Any], layout: Layout, bounds: Bounds, counts: Counts
    ) -> None:
        self.bounds = bounds
        self._directory = directory
        self._source = source
        self._layout = layout
        self._counts = counts
        self._block = Block(source, layout)
        self._block_at = 0.0
        self._file: io.FileIO | None = None
        self._path = Path()
        self._begun_at = 0.0
        self._size = 0

    def add(self, own: Iterable[int], common: tuple[Any, ...]) -> None:
        """Add a row: see :meth:`Block.add`."""
        rows = self._block.add(own, common)
        if rows == 1:
            self._block_at = monotonic()
        elif rows >= BLOCK_ROWS:
            self.write()

    def write(self) -> None:
        """Write what there is."""
        block, self._block = self._block, Block(self._source, self._layout)
        if not len(block):
            return
        data = block.sealed()
        before = self._size
        try:
            if self._file is None:
                self._begin()
            assert self._file is not None
            _write_all(self._file, data)
            self._size += len(data)
            self._counts.events += len(block)
            self._counts.bytes += len(data)
        except OSError as error:
            self._counts.dropped += len(block)
            if self._file is not None:  # half a block at the end would hide those behind it
                self._file.truncate(before)
                self._file.seek(before)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                print(f"capture: {error}", file=sys.stderr, flush=True)

    def _begin(self) -> None:
        make_directory(self._directory)
        name = f"{int(time() * 1000)}-{self._source['proxy']}-{random.getrandbits(32):08x}"
        self._path = self._directory / f"{name}{SUFFIXES[self._layout]}{OPEN}"
        self._file = io.FileIO(self._path, "x", opener=for_owner)
        self._begun_at, self._size = monotonic(), 0

    def tend(self, now: float) -> None:
        """Write and seal what has waited for long enough."""
        if len(self._block) and now > self._block_at + BLOCK_S:
            self.write()
        old = now > self._begun_at + self.bounds.roll_s
        if self._file is not None and self._size and (old or self._size >= self.bounds.roll_bytes):
            self.seal()

    def seal(self) -> None:
        """End the file."""
        self.write()
        file, self._file = self._file, None
        if file is None:
            return
        try:
            os.fsync(file.fileno())
            file.close()
            _seal(self._path, self._size)
            self._counts.files += 1
            _make_room(self._directory, self.bounds.keep_bytes)
        except OSError as error:
            print(f"capture: {self._path} not sealed: {error}", file=sys.stderr, flush=True)


def _write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of ``data``: a disk that is nearly full, or a limit, takes a part of it and says so by its count."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _make_room(directory: Path, keep_bytes: int) -> None:
    """Delete the oldest sealed files beyond what is to be kept."""
    files = sorted(each for suffix in SUFFIXES.values() for each in directory.glob(f"*{suffix}"))
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    for file, size in zip(files[:-1], sizes, strict=False):
        if total <= keep_bytes:
            break
        file.unlink()
        total -= size


def _seal(path: Path, size: int) -> None:
    """Give a file its last name; one without events goes."""
    if size:
        path.rename(path.with_suffix(""))
    else:
        path.unlink()


def seal_left_over(root: Path, proxy: str) -> None:
    """Seal what a process before this one left open, as far as its blocks are whole."""
    for path in root.glob(f"*/*-{proxy}-*{OPEN}"):
        data = path.read_bytes()
        end = max((end for end, _, _ in whole_blocks(data)), default=0)
        os.truncate(path, end)
        _seal(path, end)
