"""How the wall time of the latency job grows with rows and cores: the same session for all rows of a number of cores.

Traffic is generated, and deleted afterwards. A session first warms up on the fewest rows.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from isthmus_bench.captured import bytes_of, generate
from isthmus_bench.children import Child, tree_cpu_seconds
from isthmus_bench.command import machine
from isthmus_bench.sync_figures import Verdict

Say = Callable[[str], None]

ONCE: Final = 20_000_000
"""More rows than these are read once."""
LINEAR_WITHIN: Final = 0.2
EVENTS_PER_S: Final = 500_000
TARGET_CORES: Final = 2


class NoRoom(Exception):
    """The traffic does not fit on the disk."""


@dataclass(frozen=True, slots=True)
class Plan:
    rows: Sequence[int] = (1_000_000, 3_000_000, 10_000_000, 30_000_000)
    cores: Sequence[int] = (1, 2)
    rounds: int = 3
    warm_ups: int = 3
    directory: Path | None = None
    """Where traffic is written, in a directory of its own; None: where temporary files go."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Warm."""

    rows: int
    cores: int
    seconds: float
    """The median."""
    cpu_s: float
    """The median of what Spark's processes used: on a machine that others use as well, wall time is theirs, too."""
    runs: int
    load: float
    """The machine's, of the last minute, at the end."""

    @property
    def per_s(self) -> float:
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True)
class Line:
    """What is nearest to the times of a number of cores, by their ratios."""

    cores: int
    time: str
    """``wall`` or ``CPU``."""
    begins_s: float
    per_million_s: float
    farthest: float
    """How far a time is from it at most, as a share of that."""


@dataclass(frozen=True, slots=True)
class Report:
    machine: dict[str, str]
    figures: list[Figure]
    lines: list[Line]
    verdicts: list[Verdict]

    def as_dict(self) -> dict[str, Any]:
        figures = [{**asdict(each), "per_s": each.per_s} for each in self.figures]
        return {**asdict(self), "figures": figures}


def run(plan: Plan, say: Say) -> Report:
    """Measure. Raises ChildFailed, GeneratorError, NoRoom, OSError."""
    needed = sum(map(bytes_of, plan.rows))
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-", dir=plan.directory) as name:
        free = shutil.disk_usage(name).free
        if needed > free:
            raise NoRoom(f"{needed / 1e9:.1f} GB are needed, {name} has {free / 1e9:.1f}: --in, or fewer --rows")
        traffic = {rows: Path(name, str(rows)) for rows in sorted(plan.rows)}
        for rows, directory in traffic.items():
            generate(directory, rows, 1, False, say)
        figures = [figure for cores in plan.cores for figure in _measured(traffic, cores, plan, say)]
    lines = [line for cores in plan.cores for line in lines_of(cores, figures)]
    return Report(machine(), figures, lines, verdicts_of(figures, lines))


def _measured(traffic: dict[int, Path], cores: int, plan: Plan, say: Say) -> list[Figure]:
    figures = []
    with Child("isthmus_bench.spark_load", str(cores)) as child:
        for _ in range(plan.warm_ups):
            child.ask(directory=str(next(iter(traffic.values()))))
        for rows, directory in traffic.items():
            runs = 1 if rows > ONCE else plan.rounds
            measured = [_run(child, directory) for _ in range(runs)]
            seconds, cpu_s = (statistics.median(each) for each in zip(*measured, strict=True))
            figure = Figure(rows, cores, seconds, cpu_s, runs, os.getloadavg()[0])
            say(f"{rows:,} rows, local[{cores}]: {seconds:.1f} s, {figure.per_s / 1e6:.2f} M/s, CPU {cpu_s:.1f} s")
            figures.append(figure)
    return figures


def _run(child: Child, directory: Path) -> tuple[float, float]:
    before = tree_cpu_seconds(child.pid)
    seconds = float(child.ask(directory=str(directory))["seconds"])
    return seconds, tree_cpu_seconds(child.pid) - before


def lines_of(cores: int, figures: Sequence[Figure]) -> list[Line]:
    """Of wall time and of CPU time."""
    chosen = [each for each in figures if each.cores == cores]
    rows = [each.rows for each in chosen]
    return [
        line_of(cores, "wall", rows, [each.seconds for each in chosen]),
        line_of(cores, "CPU", rows, [each.cpu_s for each in chosen]),
    ]


def line_of(cores: int, time: str, rows: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line whose ratios to the times are nearest to 1. Of one time: from nothing to it."""
    x, y = np.array(rows, float), np.array(seconds)
    slope, begins = np.polyfit(x, y, 1, w=1 / y) if len(rows) > 1 else (y[0] / x[0], 0.0)
    farthest = float(np.max(np.abs(slope * x + begins - y) / y))
    return Line(cores, time, float(begins), float(slope * 1e6), farthest)


def verdicts_of(figures: Sequence[Figure], lines: Sequence[Line]) -> list[Verdict]:
    of_two = [each for each in figures if each.cores == TARGET_CORES]
    fast = max(of_two, key=lambda each: each.rows).per_s if of_two else None
    met = None if fast is None else fast >= EVENTS_PER_S
    verdicts = [Verdict(f"events/s on {TARGET_CORES} cores, most rows", EVENTS_PER_S, fast, met, least=True)]
    for line in lines:
        known = sum(each.cores == line.cores for each in figures) > 2
        name = f"{line.time} time is linear in rows, local[{line.cores}]: farthest from a line"
        farthest = line.farthest if known else None
        verdicts.append(
            Verdict(name, LINEAR_WITHIN, farthest, farthest <= LINEAR_WITHIN if farthest is not None else None)
        )
    return verdicts
