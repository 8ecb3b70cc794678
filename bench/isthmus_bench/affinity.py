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
            run_on(alone, [pid])
            run_on(rest, everybody[1:])
        yield
    finally:
        run_on(cores, everybody)


def two_sites() -> tuple[set[int], set[int]]:
    """The cores of each of two sites: half of them, or the only one for both."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return set(cores[:half] or cores), set(cores[half:])


@contextmanager
def started_on(cores: Collection[int]) -> Iterator[None]:
    """What is started meanwhile runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def children_of(pid: int) -> list[int]:
    """The processes that one has started and that have not been waited for."""
    found: list[int] = []
    for task in _tasks(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def run_on(cores: Collection[int], pids: Iterable[int]) -> None:
    """Have processes run on these cores, with all their threads and what those will start."""
    for pid in pids:
        for task in _tasks(pid):
            with contextlib.suppress(ProcessLookupError):  # a thread ended meanwhile
                os.sched_setaffinity(int(task.name), cores)


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return []
