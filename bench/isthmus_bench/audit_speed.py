"""How many records a second ``isthmus spark audit`` compares: two clusters with equal topics, and a warm session."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

from isthmus_bench.children import Child, ChildFailed, tree_cpu_seconds
from isthmus_bench.command import machine
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.load import Target
from isthmus_bench.spark_scale import TARGET_CORES
from isthmus_bench.sync_environment import HEAP_MB, JVM_FLAGS, create_topic
from isthmus_bench.sync_figures import Verdict
from isthmus_bench.sync_report import verdict_rows
from isthmus_bench.tables import Table, number

Say = Callable[[str], None]

RECORDS_PER_S: Final = 400_000
"""Of each side."""
BATCH_RECORDS: Final = 500
SIDES: Final = ("left", "right")


@dataclass(frozen=True, slots=True)
class Plan:
    records: Sequence[int] = (1_000_000, 4_000_000)
    """Of each side, a topic for each of these."""
    rounds: int = 3
    warm_ups: int = 3
    partitions: int = 4
    record_bytes: int = 100


@dataclass(frozen=True, slots=True)
class Figure:
    """Warm, medians."""

    records: int
    """Of each side."""
    seconds: float
    spark_cpu_s: float
    brokers_cpu_s: float
    runs: int
    load: float
    """The machine's, of the last minute, at the end."""

    @property
    def per_s(self) -> float:
        return self.records / self.seconds


@dataclass(frozen=True, slots=True)
class Report:
    machine: dict[str, str]
    figures: list[Figure]
    verdicts: list[Verdict]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "figures": [{**asdict(each), "per_s": each.per_s} for each in self.figures]}


def run(plan: Plan, say: Say) -> Report:
    """Measure. Raises ChildFailed, EmbeddedKafkaError, LoadError."""
    with ExitStack() as stack:
        clusters = []
        for side in SIDES:
            say(f"starting {side}")
            cluster = KafkaCluster(name=side, heap_mb=HEAP_MB, jvm_flags=JVM_FLAGS, say=lambda _: None)
            clusters.append(stack.enter_context(cluster))
        topics: dict[str, int] = {}
        with Child("isthmus_bench.replication_load") as filling:
            for records in sorted(plan.records):
                say(f"writing {records:,} records to each side")
                topic, now_ms = f"audited-{records}", int(time.time() * 1000)
                for cluster in clusters:
                    topics[topic] = _fill(filling, Target(*cluster.addresses()[1], topic), records, now_ms, plan)
        servers = [cluster.bootstrap_servers for cluster in clusters]
        brokers = [pid for cluster in clusters for pid in cluster.pids]
        auditing = stack.enter_context(Child("isthmus_bench.audit_load", str(TARGET_CORES), *servers))
        say("warming up")
        smallest = next(iter(topics))
        for _ in range(plan.warm_ups):
            _audit(auditing, smallest, topics[smallest])
        figures = list(_measured(auditing, topics, brokers, plan, say))
    return Report(machine(), figures, verdicts_of(figures))


def _fill(filling: Child, target: Target, records: int, now_ms: int, plan: Plan) -> int:
    """A topic of about so many records; how many."""
    create_topic(target, plan.partitions, (1,))
    said = filling.ask(
        do="fill",
        target=asdict(target),
        partitions=plan.partitions,
        batches=max(1, records // plan.partitions // BATCH_RECORDS),
        records=BATCH_RECORDS,
        record_bytes=plan.record_bytes,
        now_ms=now_ms,
    )
    return int(said["records"])


def _measured(
    auditing: Child, topics: dict[str, int], brokers: Sequence[int], plan: Plan, say: Say
) -> Iterator[Figure]:
    for topic, records in topics.items():
        runs = []
        for _ in range(plan.rounds):
            before = _cpu(auditing, brokers)
            seconds = _audit(auditing, topic, records)
            runs.append((seconds, *(now - then for now, then in zip(_cpu(auditing, brokers), before, strict=True))))
        seconds, spark_cpu_s, brokers_cpu_s = (statistics.median(each) for each in zip(*runs, strict=True))
        figure = Figure(records, seconds, spark_cpu_s, brokers_cpu_s, plan.rounds, os.getloadavg()[0])
        say(f"{records:,} records of each side: {figure.seconds:.1f} s, {figure.per_s / 1e6:.2f} M/s of each side")
        yield figure


def _cpu(auditing: Child, brokers: Sequence[int]) -> tuple[float, float]:
    return tree_cpu_seconds(auditing.pid), sum(map(tree_cpu_seconds, brokers))


def _audit(auditing: Child, topic: str, records: int) -> float:
    """Seconds. Raises ChildFailed, also where it says anything but that all of them are equal."""
    said = auditing.ask(topic=topic)
    if said["findings"] or said["records"] != [records, records]:
        raise ChildFailed(f"of {records:,} equal records the audit said {said}")
    return float(said["seconds"])


def verdicts_of(figures: Sequence[Figure]) -> list[Verdict]:
    fast = max(figures, key=lambda each: each.records).per_s
    name = f"records/s of each side, {TARGET_CORES} cores, most records"
    return [Verdict(name, RECORDS_PER_S, fast, fast >= RECORDS_PER_S, least=True)]


def headline(report: Report) -> str:
    """What was measured on what, in one line."""
    host = report.machine
    return f"audit, warm, medians; {host['cores']} cores, {host['processor']}, Python {host['Python']}"


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    heads = ["records of each side", "s", "M records/s of each side", "CPU s: Spark", "brokers", "runs", "load average"]
    rows = [
        [
            f"{each.records:,}",
            number(each.seconds, 2),
            number(each.per_s / 1e6, 2),
            number(each.spark_cpu_s, 2),
            number(each.brokers_cpu_s, 2),
            str(each.runs),
            number(each.load, 1),
        ]
        for each in report.figures
    ]
    yield "Audit", heads, rows
    yield "Targets", ["target", "limit", "measured", "met"], verdict_rows(report.verdicts)
