"""What a link does, measured beside MirrorMaker 2 on the same two clusters, in one run.

Contestants copy from cluster A to cluster B, each topics of its own, in turns, round after round, so that what the
machine does besides hits all alike; figures are medians over the rounds, and ratios are formed within a round first. A
turn is, for each contestant:

1. a topic is filled at A, and the contestant asked to copy it: the link by attaching a namespace, MirrorMaker 2 by
   being started. *First record* is the time from there until a record is on B;
2. the *catch-up*: records/s, MB/s and CPU from when a part of the backlog is there (compilers have warmed up) on;
3. the *lag* at several rates, a few seconds later: from the ack of a batch at A until a consumer of B has it.

CPU and memory are those of the processes that copy: both proxies together, or MirrorMaker's JVM. Brokers are embedded
and real, one for each cluster. Clients use the brokers directly. Afterwards the CPU of many idle partitions.

Then *small batches*: how many a second several producers write to one partition, and how many the link copies of them,
between clusters of one broker and of three. Only the link's: MirrorMaker makes larger ones of them.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from isthmus_bench import turn_topics
from isthmus_bench.children import Child, cpu_seconds, resident_bytes
from isthmus_bench.command import python_build
from isthmus_bench.contestants import LINK, MIRROR, TUNED, Contestant, Say, contestants
from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster
from isthmus_bench.load import Target
from isthmus_bench.replication_load import Pace
from isthmus_bench.small_load import KINDS

Figures = TypeVar("Figures")

LAG_TARGETS_MS: Final[Mapping[int, Mapping[str, float]]] = {
    500: {"p50": 3.0, "p99": 15.0},
    5_000: {"p99": 50.0},
}
"""By records/s: the lag that a link must keep below."""
FIRST_RECORD_MAX_S: Final = 1.0
RESIDENT_MB_MAX: Final = 200.0
IDLE_CORE_MAX: Final = 0.02

RECORDS: Final = 16
RECORD_BYTES: Final = 1024
"""The backlog's batches: 16 KB, as producers make them by default."""
WARM_SHARE: Final = 0.25
"""So much of the backlog is copied before the catch-up is measured."""
BATCHES_PER_S_MAX: Final = 1000
FOLLOW_INTERVAL_S: Final = 0.01
FOLLOW_TIMEOUT_S: Final = 180.0
IDLE_FOLLOW_INTERVAL_S: Final = 0.5
SMALL_FOLLOW_INTERVAL_S: Final = 0.05
CLUSTER_SETTINGS: Final = {
    "log.retention.check.interval.ms": "2000",
    "transaction.partition.verification.enable": "false",  # as on every target of transactions
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    version: str = DEFAULT_VERSION
    rounds: int = 5
    contestants: tuple[str, ...] = (LINK, MIRROR, TUNED)
    partitions: int = 4
    backlog_mb: int = 512
    rates: tuple[int, ...] = (500, 5_000, 50_000)
    settle_s: float = 3.0
    """Records go at the first rate for so long before lag is measured: brokers write out what the catch-up left."""
    lag_s: float = 4.0
    idle_partitions: int = 1_000
    """0: their CPU is not measured."""
    idle_settle_s: float = 5.0
    """From when all idle partitions are copied until their CPU is measured."""
    idle_s: float = 10.0
    small_brokers: tuple[int, ...] = (1, 3)
    """Of the clusters between which small batches are copied."""
    small_producers: int = 8
    small_s: float = 2.0

    @classmethod
    def quick(cls, version: str) -> Plan:
        """To see that it works; the figures mean nothing."""
        return cls(
            version,
            1,
            backlog_mb=16,
            rates=(500,),
            settle_s=0.2,
            lag_s=0.5,
            idle_partitions=20,
            idle_settle_s=0.5,
            idle_s=0.5,
            small_brokers=(1,),
            small_s=0.2,
        )

    @property
    def batches(self) -> int:
        """Of a partition's backlog."""
        return max(1, self.backlog_mb * 1_000_000 // (self.partitions * RECORDS * RECORD_BYTES))


# ---- figures ----


@dataclass(frozen=True, slots=True)
class CatchUp:
    """How fast a backlog was copied. MB are a million bytes of records' values."""

    first_record_s: float
    records_per_s: float
    mb_per_s: float
    cpu_ms_per_mb: float
    cpu_share: float
    """Of one core."""


@dataclass(frozen=True, slots=True)
class Lag:
    """From the ack at the source until a consumer of the target has it."""

    records_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    ack_p50_ms: float
    """How long the source took to ack: what the copying costs those who write."""
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What one contestant did in one round."""

    catch_up: CatchUp
    lags: Mapping[int, Lag]
    """By the rate that was asked for."""
    resident_mb: float


@dataclass(frozen=True, slots=True)
class CatchUpFigure:
    """A contestant's catch-up and memory: medians over the rounds."""

    contestant: str
    catch_up: CatchUp
    resident_mb: float
    speed_ratio: float | None
    """MB/s against tuned MirrorMaker's in the same round."""
    cpu_ratio: float | None
    """CPU for a MB, likewise."""


@dataclass(frozen=True, slots=True)
class LagFigure:
    """A contestant's lag at one rate: medians over the rounds."""

    contestant: str
    rate: int
    lag: Lag


@dataclass(frozen=True, slots=True)
class IdleFigure:
    """What partitions cost in which nothing happens."""

    contestant: str
    partitions: int
    cpu_share: float
    """Of one core, all of the contestant's processes."""
    without: float | None
    """The same before there were these partitions."""


@dataclass(frozen=True, slots=True)
class Small:
    """Small batches of one partition, each a record or marker of its own, acks=all: how many a second."""

    written_per_s: float
    """By several producers at once."""
    written_by_one_per_s: float
    """By one, which waits for each answer: what one request takes to be answered is the inverse."""
    copied_per_s: float
    cpu_ms_per_batch: float
    """Of both proxies."""


@dataclass(frozen=True, slots=True)
class SmallFigure:
    """What the link does with one kind of small batches: medians over the rounds."""

    kind: str
    brokers: int
    """Of each cluster; with three, every partition has three replicas, of which two must be in sync."""
    small: Small


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured; ``least``: the limit is a lower one."""

    target: str
    limit: float
    measured: float
    met: bool
    least: bool = False


@dataclass(frozen=True, slots=True)
class Contest:
    """What is said of every run of a contest."""

    machine: str
    broker: str
    rounds: int
    backlog_mb: int
    partitions: int
    catch_up: list[CatchUpFigure]
    lags: list[LagFigure]

    def as_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Report(Contest):
    """One run."""

    idle: list[IdleFigure]
    small: list[SmallFigure]
    verdicts: list[Verdict] = field(default_factory=list)


def catch_up_of(asked_at: float, samples: Sequence[Sequence[float]], total: int, record_bytes: int) -> CatchUp:
    """From samples (time, records on the target, CPU time in s) of a backlog of ``total`` records."""
    first = next(at for at, there, _ in samples if there)
    warm = next(index for index, sample in enumerate(samples) if sample[1] >= total * WARM_SHARE)
    if warm == len(samples) - 1:
        warm = max(0, warm - 1)  # it was all there between two looks
    (begin, begin_records, begin_cpu), (end, end_records, end_cpu) = samples[warm], samples[-1]
    seconds, records, cpu = max(end - begin, FOLLOW_INTERVAL_S), end_records - begin_records, end_cpu - begin_cpu
    mb = max(records, 1) * record_bytes / 1e6
    return CatchUp(first - asked_at, records / seconds, mb / seconds, cpu * 1000 / mb, cpu / seconds)


def medians(samples: Sequence[Figures]) -> Figures:
    """Field by field, of instances of one dataclass of numbers."""
    kind = type(samples[0])
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: statistics.median(getattr(each, name) for each in samples) for name in names})


def catch_up_figures(turns: Mapping[str, Sequence[Turn]]) -> list[CatchUpFigure]:
    """Medians over the rounds, and ratios to tuned MirrorMaker's of the same round."""
    floor = [turn.catch_up for turn in turns.get(TUNED, ())]
    figures = []
    for contestant, rounds in turns.items():
        own = [turn.catch_up for turn in rounds]
        pairs = list(zip(own, floor, strict=False))
        figures.append(
            CatchUpFigure(
                contestant,
                medians(own),
                statistics.median(turn.resident_mb for turn in rounds),
                statistics.median(mine.mb_per_s / theirs.mb_per_s for mine, theirs in pairs) if pairs else None,
                statistics.median(mine.cpu_ms_per_mb / theirs.cpu_ms_per_mb for mine, theirs in pairs)
                if pairs
                else None,
            )
        )
    return figures


def lag_figures(turns: Mapping[str, Sequence[Turn]], rates: Sequence[int]) -> list[LagFigure]:
    """Medians over the rounds."""
    return [
        LagFigure(contestant, rate, medians([turn.lags[rate] for turn in rounds]))
        for rate in rates
        for contestant, rounds in turns.items()
    ]


def verdicts_of(
    catch_up: Sequence[CatchUpFigure], lags: Sequence[LagFigure], idle: Sequence[IdleFigure]
) -> Iterator[Verdict]:
    """The targets that apply to what was measured."""
    for lag in lags:
        if lag.contestant == LINK:
            for name, limit in LAG_TARGETS_MS.get(lag.rate, {}).items():
                measured = getattr(lag.lag, f"{name}_ms")
                yield Verdict(f"lag {name} at {lag.rate}/s, ms", limit, measured, measured < limit)
    for figure in catch_up:
        if figure.contestant != LINK:
            continue
        if figure.speed_ratio is not None and figure.cpu_ratio is not None:
            faster = figure.speed_ratio > 1
            yield Verdict("catch-up against tuned MirrorMaker's, MB/s", 1.0, figure.speed_ratio, faster, least=True)
            cheaper = figure.cpu_ratio < 1
            yield Verdict("CPU for a MB against tuned MirrorMaker's", 1.0, figure.cpu_ratio, cheaper)
        first = figure.catch_up.first_record_s
        yield Verdict("first record, s", FIRST_RECORD_MAX_S, first, first < FIRST_RECORD_MAX_S)
        small = figure.resident_mb < RESIDENT_MB_MAX
        yield Verdict("memory of both proxies, MB", RESIDENT_MB_MAX, figure.resident_mb, small)
    for each in idle:
        if each.contestant == LINK:
            cost = each.cpu_share - (each.without or 0.0)
            name = f"CPU of {each.partitions} idle partitions, of a core"
            yield Verdict(name, IDLE_CORE_MAX, cost, cost < IDLE_CORE_MAX)


# ---- what is measured ----


def run(plan: Plan, say: Say) -> Report:
    """Measure. Progress goes to ``say``. Raises EmbeddedKafkaError, ProxyFailed, ChildFailed, LoadError, HTTPError."""
    ordered, idle = run_contest(plan, say) if plan.contestants else ({}, [])
    catch_up, lags = catch_up_figures(ordered), lag_figures(ordered, plan.rates)
    return Report(
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {python_build()}",
        f"Kafka {plan.version}, one broker for each cluster",
        plan.rounds,
        plan.backlog_mb,
        plan.partitions,
        catch_up,
        lags,
        idle,
        run_small(plan, say),
        list(verdicts_of(catch_up, lags, idle)),
    )


def run_contest(plan: Plan, say: Say) -> tuple[dict[str, list[Turn]], list[IdleFigure]]:
    """What each contestant did in each round, and what idle partitions cost. Raises what :func:`run` raises."""
    with ExitStack() as stack:
        directory = FilePath(stack.enter_context(TemporaryDirectory(prefix="isthmus-bench-")))
        say(f"starting two clusters of Kafka {plan.version}")
        bench = Bench(plan, say, stack, directory)
        turns: dict[str, list[Turn]] = {}
        for number in range(plan.rounds):
            for step in range(len(bench.contestants)):  # another one first in each round
                contestant = bench.contestants[(number + step) % len(bench.contestants)]
                say(f"round {number + 1} of {plan.rounds}: {contestant.name}")
                turns.setdefault(contestant.name, []).append(bench.turn(contestant, f"turn-{number}-{step}"))
        idle = [
            bench.idle(contestant, f"idle-{number}")
            for number, contestant in enumerate(bench.contestants)
            if plan.idle_partitions and contestant.name != TUNED
        ]
        return {name: turns[name] for name in plan.contestants}, idle


def run_small(plan: Plan, say: Say) -> list[SmallFigure]:
    """Measure small batches alone. Raises what :func:`run` raises."""
    figures = []
    for brokers in plan.small_brokers:
        with ExitStack() as stack:
            directory = FilePath(stack.enter_context(TemporaryDirectory(prefix="isthmus-bench-")))
            say(f"small batches: starting two clusters of {brokers}")
            bench = Bench(replace(plan, contestants=(LINK,)), say, stack, directory, brokers)
            rounds: dict[str, list[Small]] = {}
            for number in range(plan.rounds):
                for kind in KINDS:
                    say(f"round {number + 1} of {plan.rounds}: {kind}")
                    rounds.setdefault(kind, []).append(bench.small(kind, f"small-{kind}-{number}"))
            figures += [SmallFigure(kind, brokers, medians(found)) for kind, found in rounds.items()]
    return figures


class Bench:
    """Two clusters, the contestants, and the process that writes and watches. ``stack`` ends what it starts."""

    def __init__(self, plan: Plan, say: Say, stack: ExitStack, directory: FilePath, brokers: int = 1) -> None:
        self._plan = plan
        self._brokers = brokers
        self._a, self._b = (self._cluster(stack, name) for name in ("a", "b"))
        self.contestants = contestants(plan.contestants, (self._a, self._b), plan.partitions, stack, directory, say)
        self._load = stack.enter_context(Child("isthmus_bench.replication_load"))

    def _cluster(self, stack: ExitStack, name: str) -> KafkaCluster:
        return stack.enter_context(
            KafkaCluster(
                name=name,
                version=self._plan.version,
                brokers=self._brokers,
                settings=CLUSTER_SETTINGS,
                heap_mb=512,
                jvm_flags=("-XX:TieredStopAtLevel=4",),
                say=lambda _: None,
            )
        )

    def turn(self, contestant: Contestant, topic: str) -> Turn:
        """Copy a backlog, then write at each rate."""
        plan = self._plan
        with self._copied(contestant, topic, plan.partitions, plan.batches, RECORDS, RECORD_BYTES) as catch_up:
            resident = self._resident_mb(contestant)
            contestant.wait_caught_up()
            self._lag(contestant, topic, plan.rates[0], plan.settle_s)
            lags = {rate: self._lag(contestant, topic, rate, plan.lag_s) for rate in plan.rates}
            return Turn(catch_up, lags, max(resident, self._resident_mb(contestant)))

    @contextmanager
    def _copied(
        self,
        contestant: Contestant,
        topic: str,
        partitions: int,
        batches: int,
        records: int,
        record_bytes: int,
        interval_s: float = FOLLOW_INTERVAL_S,
    ) -> Iterator[CatchUp]:
        """A topic that is filled at A and copied to B, for a while."""
        source = self._topic(self._a, topic)
        turn_topics.create(source, partitions)
        size = {"partitions": partitions, "batches": batches, "records": records, "record_bytes": record_bytes}
        total = self._load.ask(do="fill", target=asdict(source), **size)["records"]
        try:
            asked_at, samples = self._follow(contestant, topic, partitions, total, interval_s)
            yield catch_up_of(asked_at, samples, total, record_bytes)
        finally:
            contestant.end()
            turn_topics.delete(source)
            turn_topics.delete(self._topic(self._b, contestant.target_topic(topic)))

    def _follow(
        self, contestant: Contestant, topic: str, partitions: int, total: int, interval_s: float
    ) -> tuple[float, list[list[float]]]:
        """Have a topic copied that holds ``total`` records: when that was asked, and what was seen from then on."""
        asked_at = contestant.begin(topic)
        self._load.tell(
            do="follow",
            target=asdict(self._topic(self._b, contestant.target_topic(topic))),
            partitions=partitions,
            records=total,
            interval_s=interval_s,
            timeout_s=FOLLOW_TIMEOUT_S,
            pids=contestant.pids,
        )
        contestant.begun()
        try:
            samples: list[list[float]] = self._load.read()["samples"]
        except Exception as error:
            error.add_note(f"{contestant.name} said:\n{contestant.log()}")
            raise
        return asked_at, samples

    def small(self, kind: str, topic: str) -> Small:
        """Small batches, written by several producers, then copied by the link."""
        plan = self._plan
        (link,) = self.contestants
        source, target = self._topic(self._a, topic), self._topic(self._b, topic)
        for each in (source, target):  # led by the first brokers, which are those that the load asks
            turn_topics.create(each, 1, range(1, self._brokers + 1))
        size = {"target": asdict(source), "kind": kind}
        alone = self._load.ask(do="small", **size, producers=1, seconds=plan.small_s)
        several = self._load.ask(do="small", **size, producers=plan.small_producers, seconds=plan.small_s)
        total = alone["batches"] + several["batches"]
        try:
            asked_at, samples = self._follow(link, topic, 1, total, SMALL_FOLLOW_INTERVAL_S)
        finally:
            link.end()
            turn_topics.delete(source)
            turn_topics.delete(target)
        copied = catch_up_of(asked_at, samples, total, 1)
        return Small(
            several["batches_per_s"],
            alone["batches_per_s"],
            copied.records_per_s,
            copied.cpu_share * 1000 / max(copied.records_per_s, 1),
        )

    def _lag(self, contestant: Contestant, topic: str, rate: int, seconds: float) -> Lag:
        plan = self._plan
        pace = Pace(rate, min(rate, BATCHES_PER_S_MAX), partitions=plan.partitions, seconds=seconds)
        said = self._load.ask(
            do="pace",
            pace=asdict(pace),
            source=asdict(self._topic(self._a, topic)),
            sink=asdict(self._topic(self._b, contestant.target_topic(topic))),
            equal_offsets=contestant.equal_offsets,
            pids=contestant.pids,
        )
        return Lag(**said)

    def idle(self, contestant: Contestant, topic: str) -> IdleFigure:
        """CPU while nothing happens in many partitions, each with a record."""
        plan = self._plan
        without = None
        if contestant.name == LINK:
            time.sleep(plan.idle_settle_s)
            without = self._cpu_share(contestant.pids)
        with self._copied(contestant, topic, plan.idle_partitions, 1, 1, 100, IDLE_FOLLOW_INTERVAL_S):
            time.sleep(plan.idle_settle_s)
            return IdleFigure(contestant.name, plan.idle_partitions, self._cpu_share(contestant.pids), without)

    def _cpu_share(self, pids: Sequence[int]) -> float:
        started, before = time.monotonic(), sum(map(cpu_seconds, pids))
        time.sleep(self._plan.idle_s)
        return (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - started)

    @staticmethod
    def _resident_mb(contestant: Contestant) -> float:
        return sum(map(resident_bytes, contestant.pids)) / 1e6

    @staticmethod
    def _topic(cluster: KafkaCluster, topic: str) -> Target:
        return Target(*cluster.addresses()[1], topic)
