"""Certificates and keys in files, used anew when the files change, and never worse than before.

Whoever renews them writes the files anew, moves others in their place, or swaps a symbolic link in their path, as
Kubernetes does. Connections that are made go on as they are; those to come get what is new. Files that cannot be used
as they are now leave what was in use before, and status, a metric and the log say so. SIGHUP has all of them read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from isthmus.errors import ConfigurationError
from isthmus_plugins.tasks import Supervision, Tasks

T = TypeVar("T")

log = logging.getLogger("isthmus.reloading")

LOOK_S: Final = 2.0
"""How often files are looked at."""
RELOADED, UNUSABLE = "reloaded", "unusable"


class _Stamp(NamedTuple):
    """What shows that a file is another one, wherever links in its path lead."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    """Also when its permissions are others."""


class _Kept:
    """What is made of some files."""

    def __init__(self, what: str, files: Sequence[Path], make: Callable[[], Any], use: Callable[[Any], None]) -> None:
        self.what = what
        self.make = make
        self.use = use
        self.trouble: str | None = None
        """Why the files cannot be used as they are now."""
        self.stamps: list[_Stamp | None] | None = None
        """Of the files when they were read last."""
        self._files = files

    def found(self) -> list[_Stamp | None]:
        """The files as they are now; None: there is no such file, or nobody may look at it."""
        return [_stamp(file) for file in self._files]


class Reloads:
    """Watches files for a process. ``counts``: how often, by what is made of them, and what came of it."""

    def __init__(self, supervision: Supervision) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._kept: list[_Kept] = []
        self._asked = asyncio.Event()
        self._tasks = Tasks("reloads", supervision)

    def keep(self, what: str, files: Sequence[Path | None], make: Callable[[], T], use: Callable[[T], None]) -> None:
        """Have ``make`` called anew when a file changes, and what it returns used.

        ``what`` names it for people: a table or a key of the configuration. ``make`` runs in a thread, and raises
        ConfigurationError where the files cannot be used.
        """
        if existing := [file for file in files if file is not None]:
            self._kept.append(_Kept(what, existing, make, use))

    def start(self) -> None:
        self._tasks.keep("watch", self._watch)

    async def stop(self) -> None:
        await self._tasks.close()

    def ask(self) -> None:
        """Read all files now, as an operator asks."""
        self._asked.set()

    def warnings(self) -> Iterator[str]:
        """What cannot be used as it is now."""
        for kept in self._kept:
            if kept.trouble is not None:
                yield f"{kept.what}: the files of before are used, since those of now cannot be: {kept.trouble}"

    async def _watch(self) -> None:
        while True:
            asked = self._asked.is_set()
            self._asked.clear()
            for kept in self._kept:
                await self._look(kept, asked)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._asked.wait()
            except TimeoutError:
                pass

    async def _look(self, kept: _Kept, asked: bool) -> None:
        stamps = await asyncio.to_thread(kept.found)
        if stamps == kept.stamps and not asked:
            return
        first, kept.stamps = kept.stamps is None, stamps
        try:
            made = await asyncio.to_thread(kept.make)
        except (ConfigurationError, OSError) as error:
            self.counts[kept.what, UNUSABLE] += 1
            if kept.trouble != str(error):
                log.warning("files not reloaded", extra={"what": kept.what, "detail": str(error)})
            kept.trouble = str(error)
            return
        kept.use(made)
        kept.trouble = None
        if not first:  # else they are what the process began with, or changed while it did
            self.counts[kept.what, RELOADED] += 1
            log.info("files reloaded", extra={"what": kept.what})


def _stamp(file: Path) -> _Stamp | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
