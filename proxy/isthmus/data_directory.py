"""What the files of a proxy take on its disk, looked at now and then: nobody deletes salvage files but operators."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

log = logging.getLogger("isthmus.data")

LOOK_S: Final = 60.0


class DataDirectory:
    """``[data] directory``."""

    def __init__(self, path: Path, warn_bytes: int) -> None:
        self._path = path
        self._warn_bytes = warn_bytes
        self.sizes: Mapping[str, int] = MappingProxyType({})
        """Bytes of the files below each of its directories, when it was looked at last."""
        self.free: int | None = None
        """Bytes that the disk has left; None: not known."""

    async def watch(self) -> None:
        """Look again and again. Raises OSError where it cannot be read."""
        while True:
            before = self.warning()
            self.sizes, self.free = await asyncio.to_thread(_measure, self._path)
            if (now := self.warning()) is not None and before is None:
                log.warning("data directory is large", extra={"detail": now})
            await asyncio.sleep(LOOK_S)

    def warning(self) -> str | None:
        """What an operator is to be told; None: nothing."""
        if sum(self.sizes.values()) <= self._warn_bytes:
            return None
        sizes = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sorted(self.sizes.items()))
        return (
            f"the files in {self._path} take more than data.warn_bytes ({sizes}): delete salvage files that nobody "
            f"needs any more, or move them elsewhere"
        )


def _measure(path: Path) -> tuple[Mapping[str, int], int | None]:
    """Sizes by directory, and what is free. Files may come and go meanwhile."""
    sizes: Counter[str] = Counter()
    if not path.exists():  # nothing was kept yet
        return sizes, None
    for directory, _, files in os.walk(path):
        first, *_ = (*Path(directory).relative_to(path).parts, "")
        for file in files:
            try:
                sizes[first] += os.stat(Path(directory) / file, follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
    return sizes, shutil.disk_usage(path).free
