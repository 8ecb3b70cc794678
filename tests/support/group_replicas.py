"""A pair of replicas with a consumer group, for unit tests: ``app-1`` at A is ``far-app-1`` at B."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from isthmus_plugins.cluster import CommittedOffset, TopicPartition
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from support.fake_cluster import run_simulated
from support.offsets import commit, group_made, offsets_batch
from support.replicas import LINK, Replicas

PLACE: Final = ("remote-t", 0)


def committed_at(offset: int, metadata: str = "") -> CommittedOffset:
    return CommittedOffset(offset, metadata)


def in_replicas(monkeypatch: pytest.MonkeyPatch, test: Callable[[Replicas], Awaitable[None]]) -> None:
    """Run a test between two model clusters; ``app-1`` is at 5 in ``local-t``, whose follower ends at 10."""

    async def run() -> None:
        replicas = Replicas(random.Random(1))
        replicas.attach_groups()
        replicas.a.add_topic("local-t").partitions[0].write_values(*[b"x"] * 10)
        replicas.a.add_topic(OFFSETS_TOPIC)
        log(replicas, group_made("app-1"), commit("app-1", "local-t", 5))
        replicas.start()
        await replicas.connect()
        await until_at(replicas, {PLACE: committed_at(5)})
        await test(replicas)
        await replicas.stop()

    run_simulated(run())


def log(replicas: Replicas, *records: tuple[bytes, bytes | None]) -> None:
    """Write to the source's offsets topic."""
    partition = replicas.a.partition(OFFSETS_TOPIC)
    partition.write(offsets_batch(partition.end, records))


async def until_at(replicas: Replicas, expected: dict[TopicPartition, CommittedOffset], timeout_s: float = 10) -> None:
    await replicas.until(f"at {expected}", lambda: replicas.b.offsets.get("far-app-1", {}) == expected, timeout_s)


def status(replicas: Replicas, end: str = "B") -> Any:
    """What one end tells of the group."""
    statuses = replicas.ends[end].parts.group_statuses
    found = statuses.of(replicas.controls[end].state.links[LINK], connected=True)
    return found[0] if found else None
