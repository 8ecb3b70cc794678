"""Which cores processes run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def core_of_its_own(pid: int, others: Iterable[int]) -> Iterator[None]:
    """Meanwhile a process has one core to itself as far as these others go, which share the rest.

    Where there is but one core, nothing changes.
    """
    cores = os.sched_getaffinity(0)
    alone, rest = {min(cores)}, cores - {min(cores)}
    everybody = (pid, *others)
    try:
        if rest:
            _run_on(alone, [pid])
            _run_on(rest, everybody[1:])
        yield
    finally:
        _run_on(cores, everybody)


def children_of(pid: int) -> list[int]:
    """The processes that one has started and that have not been waited for."""
    found: list[int] = []
    for task in _tasks(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def _run_on(cores: Collection[int], pids: Iterable[int]) -> None:
    for pid in pids:
        for task in _tasks(pid):
            with contextlib.suppress(ProcessLookupError):  # a thread ended meanwhile
                os.sched_setaffinity(int(task.name), cores)


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return []
