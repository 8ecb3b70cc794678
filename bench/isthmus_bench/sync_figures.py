"""What ``isthmus bench sync`` found, and the targets that it is judged by."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from isthmus_bench.sync_plan import (
    ASYNC,
    BESIDE,
    BESIDE_LOADS,
    BESIDE_STANDSTILL,
    LOADS,
    PROXIED,
    SCENARIOS,
    STRETCHED,
    SYNC,
    Load,
)
from isthmus_bench.wan import RoundTrips


@dataclass(frozen=True, slots=True)
class Figure:
    """One load in one scenario: medians over the rounds."""

    rtt_ms: float
    scenario: str
    load: str
    requests: float
    per_s: float
    p50_ms: float
    p90_ms: float | None
    p99_ms: float
    p999_ms: float
    max_ms: float
    late_p99_ms: float | None
    """How late the load generator sent; the latencies count from when requests were due and so have it in them."""
    cpu: Mapping[str, float]
    """Shares of one core: ``brokers``, ``proxies``, ``wan``, ``load``."""
    rounds: int


@dataclass(frozen=True, slots=True)
class WanFigure:
    """What the WAN did."""

    rtt_ms: float
    """What it was to be."""
    measured: RoundTrips
    """Of a few bytes, alone on it: medians over the rounds."""
    late_p99_us: float
    """How late packets were under the loads: the median of all loads and rounds."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What was not measured, and why."""

    rtt_ms: float | None
    scenario: str
    load: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured. ``met`` is None where it was not."""

    target: str
    limit: float | None
    measured: float | None
    met: bool | None
    least: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    machine: Mapping[str, str]
    version: str
    rounds: int
    seconds: float
    wans: list[WanFigure]
    figures: list[Figure]
    missing: list[Missing]
    verdicts: list[Verdict] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return {
            **asdict(self),
            "scenarios": [asdict(each) for each in SCENARIOS],
            "loads": [asdict(each) for each in LOADS],
        }


def figure_of(rtt_ms: float, scenario: str, load: str, said: Sequence[Mapping[str, Any]]) -> Figure:
    """Medians of what the rounds said; what one of them did not say is None."""

    def median(name: str) -> Any:
        values = [each.get(name) for each in said]
        return None if None in values else statistics.median(values)  # type: ignore[type-var]

    cpu = {name: statistics.median(each["cpu"].get(name, 0.0) for each in said) for name in said[0]["cpu"]}
    names = ("requests", "per_s", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms", "late_p99_ms")
    medians: dict[str, Any] = {name: median(name) for name in names}
    return Figure(rtt_ms=rtt_ms, scenario=scenario, load=load, cpu=cpu, rounds=len(said), **medians)


# ---- targets ----

TARGET_RTT_MS: Final = 20.0
MEDIAN_OVER_RTT_MS: Final[Mapping[str, float]] = {"depth-1": 1.5, "depth-5": 1.5, "open-500": 1.5, "open-2000": 3.0}
P99_OVER_RTT_MS: Final[Mapping[str, float]] = {"depth-1": 8.0, "depth-5": 8.0, "open-500": 8.0}
JAVA_OVER_RTT_MS: Final = 8.0
ASYNC_OVER_PROXIED_MS: Final = 0.2
SATURATING: Final = ("depth-5-8p", "open-5000-8p")
"""Both sites on one machine of two cores take all of it under these: what an asynchronous link adds is then the
machine's limit, which is reported and not judged."""
EQUAL_MS: Final = 1.0
"""At depth 1 (of commits, too) a synchronous link need not be ahead of a stretched cluster; so much counts as equal."""
STANDSTILL_ADDS_MS: Final[Mapping[str, float]] = {"p50": 0.2, "p99": 2.0}
"""What a link's other side that stands still may add to another namespace's latency, so that it "does not move"."""
DEPTH_ONE: Final = ("depth-1", "commit")
SUSTAINED: Final = 0.99
"""Of the rate that was asked for."""


def verdicts_of(figures: Iterable[Figure]) -> Iterator[Verdict]:
    """The targets, at a round trip of 20 ms."""
    found = {(each.scenario, each.load): each for each in figures if each.rtt_ms == TARGET_RTT_MS}
    titles = {each.name: each.title for each in LOADS}
    for name, limits in (("p50", MEDIAN_OVER_RTT_MS), ("p99", P99_OVER_RTT_MS)):
        for each, over in limits.items():
            figure = found.get((SYNC, each))
            measured = getattr(figure, f"{name}_ms") if figure else None
            yield _at_most(f"synchronous, {titles[each]}: {name}, ms", TARGET_RTT_MS + over, measured)
    java = found.get((SYNC, "java-linger-0"))
    limit = TARGET_RTT_MS + JAVA_OVER_RTT_MS
    yield _at_most(f"synchronous, {titles['java-linger-0']}: p50, ms", limit, java.p50_ms if java else None)
    fast = found.get((SYNC, "open-5000-8p"))
    least, per_s = 5_000 * SUSTAINED, fast.per_s if fast else None
    met = None if per_s is None else per_s >= least
    yield Verdict(f"synchronous, {titles['open-5000-8p']}: answered a second", least, per_s, met, least=True)
    for load in LOADS:
        yield from _ahead(found, load)
    for load in LOADS:
        if load.kind in ("closed", "open") and load.name not in SATURATING:
            asynchronous, proxied = found.get((ASYNC, load.name)), found.get((PROXIED, load.name))
            added = asynchronous.p50_ms - proxied.p50_ms if asynchronous and proxied else None
            yield _at_most(f"asynchronous link, {load.title}: added to the p50, ms", ASYNC_OVER_PROXIED_MS, added)
    yield from _apart(found)


def _apart(found: Mapping[tuple[str, str], Figure]) -> Iterator[Verdict]:
    """Another namespace, beside a link whose other side stands still: as beside one that is well."""
    for load in BESIDE_LOADS:
        beside, standstill = found.get((BESIDE, load)), found.get((BESIDE_STANDSTILL, load))
        for name, limit in STANDSTILL_ADDS_MS.items():
            measured = [getattr(each, f"{name}_ms") for each in (beside, standstill) if each is not None]
            added = measured[1] - measured[0] if len(measured) == 2 else None
            target = f"another namespace, the link's other side stands still: added to the {name}, ms"
            yield _at_most(target, limit, added)


def _ahead(found: Mapping[tuple[str, str], Figure], load: Load) -> Iterator[Verdict]:
    """A synchronous link against the best of the stretched clusters: ahead of it, or within 1 ms at depth 1."""
    ours = found.get((SYNC, load.name))
    theirs = [each for name in STRETCHED if (each := found.get((name, load.name))) is not None]
    for name in ("p50_ms", "p99_ms"):
        limit = min((getattr(each, name) for each in theirs), default=None)
        measured = getattr(ours, name) if ours else None
        target = f"synchronous against the best stretched, {load.title}: {name.removesuffix('_ms')}, ms"
        if limit is not None and load.name in DEPTH_ONE:
            limit += EQUAL_MS
        met = None if measured is None or limit is None else measured < limit
        yield Verdict(target, limit, measured, met)


def _at_most(target: str, limit: float, measured: float | None) -> Verdict:
    return Verdict(target, limit, measured, None if measured is None else measured <= limit)
