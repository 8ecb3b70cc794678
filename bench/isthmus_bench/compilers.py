"""What the compilers of JVMs are doing: a broker is as fast as it will be when they have little left to do."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

COMPILING_MAX: Final = 0.1
"""Cores that all the brokers' compilers together take when brokers are warm."""
_NAMES: Final = ("C1 Compiler", "C2 Compiler")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class Compilers:
    """Those of some processes. Threads that compile come and go, so each counts by itself."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._at = time.monotonic()
        self._ticks = self._used()

    def share(self) -> float:
        """How busy they were since they were looked at last, in cores."""
        before, since = self._ticks, self._at
        self._at, self._ticks = time.monotonic(), self._used()
        used = sum(ticks - before.get(thread, 0) for thread, ticks in self._ticks.items())
        return used / _TICKS_PER_S / max(self._at - since, 1e-9)

    def give_way(self) -> None:
        """From now on they run where a core has nothing else to do.

        What is called 45 times a second is compiled minutes later than what is called 2,000 times. Being nice was not
        enough: with 10 they still ran for up to 16 ms at a time, and commits were 1 ms later at p99.
        """
        for _, thread in self._used():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))  # those that it starts inherit it

    def _used(self) -> Mapping[tuple[int, int], int]:
        """Clock ticks by process and thread."""
        found = {}
        for pid in self._pids:
            for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
                try:
                    text = stat.read_text()
                except OSError:  # it ended meanwhile
                    continue
                head, _, rest = text.rpartition(")")
                if head.partition("(")[2].startswith(_NAMES):
                    fields = rest.split()
                    found[pid, int(stat.parent.name)] = int(fields[11]) + int(fields[12])
        return found
