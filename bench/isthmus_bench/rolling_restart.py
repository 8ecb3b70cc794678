"""What it costs a link that the brokers of its source are restarted, one after the other.

Each partition gets another leader, and a record in that one's epoch: both sides open its stream again, and record the
epoch in their control logs. What is written there otherwise meanwhile (leases) counts as well.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from isthmus.kafka.client import ClusterClient, TopicPartition
from isthmus_bench.children import cpu_seconds
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.load import batch
from isthmus_bench.proxies import ProxyFailed

CONTROL_TOPIC: Final = "__isthmus_control"
WRITTEN_AT_ONCE: Final = 1_000
"""Partitions in a Produce request."""
RECORD_BYTES: Final = 100

Until = Callable[[ClusterClient, Sequence[TopicPartition], int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RollingRestart:
    """What was measured. ``source_bytes``, ``target_bytes``: that the control logs have grown by."""

    took_s: float
    cpu_s: float
    source_bytes: int
    target_bytes: int


async def measure(
    source: KafkaCluster,
    target: KafkaCluster,
    pids: Sequence[int],
    places: Sequence[TopicPartition],
    until: Until,
    timeout_s: float,
) -> RollingRestart:
    """Write a record to each partition, and after the restart of each broker of the source another one.

    ``pids``: of the proxies, whose CPU counts. ``until``: returns when partitions end at an offset, or beyond it.
    Raises ProxyFailed, EmbeddedKafkaError.
    """
    await _round(source, target, places, 1, until, timeout_s)
    began = time.monotonic()
    cpu_s, logs = sum(map(cpu_seconds, pids)), (_log_bytes(source), _log_bytes(target))
    for number, broker_id in enumerate(source.broker_ids, 2):
        source.restart(broker_id)
        await _round(source, target, places, number, until, timeout_s)
    grown = [after - before for before, after in zip(logs, (_log_bytes(source), _log_bytes(target)), strict=True)]
    return RollingRestart(time.monotonic() - began, sum(map(cpu_seconds, pids)) - cpu_s, *grown)


async def _round(
    source: KafkaCluster,
    target: KafkaCluster,
    places: Sequence[TopicPartition],
    end: int,
    until: Until,
    timeout_s: float,
) -> None:
    """Write a record to each partition, up to ``end``, and return when the target has them."""
    # A broker that was just restarted may not be the first that is asked.
    a, b = (ClusterClient(each.bootstrap_servers.split(",")) for each in (source, target))
    async with a, b:
        await until(a, places, end - 1)
        left, deadline = iter(places), time.monotonic() + timeout_s
        while some := list(islice(left, WRITTEN_AT_ONCE)):
            while some:
                written = await a.produce_raw(dict.fromkeys(some, batch(1, RECORD_BYTES)))
                some = [place for place in some if written[place].error is not None]
                if some:
                    if time.monotonic() > deadline:
                        raise ProxyFailed(f"{some[0].topic} takes no records: {written[some[0]].error}")
                    await a.refresh(_names(some))
        await until(b, places, end)


def _names(places: Iterable[TopicPartition]) -> set[str]:
    return {place.topic for place in places}


def _log_bytes(kafka: KafkaCluster) -> int:
    """How long the control log is, as the broker has it that has most of it."""
    return max(
        sum(segment.stat().st_size for segment in data.glob(f"{CONTROL_TOPIC}-0/*.log"))
        for data in kafka.log_directories
    )
