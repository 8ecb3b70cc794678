"""Which connection appends what: together while answers come soon, past a request that takes long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest
from support.fake_cluster import FakeProduceConnection, run_simulated
from support.partition_log import Partition
from support.replicas import Replicas

from isthmus_plugins.cluster import ProduceResult, TopicPartition
from isthmus_plugins.replication.follower import writers
from isthmus_plugins.replication.follower.writers import PATIENCE_S

PARTITIONS = 3


class Broker:
    """Holds its answers until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[set[int]] = []
        """The partitions of each request, in order."""
        self._held: list[asyncio.Event] = []
        self._hold = False
        produce = FakeProduceConnection.produce

        async def held(
            connection: FakeProduceConnection,
            requests: Sequence[Mapping[TopicPartition, bytes]],
            timeout_ms: int,
            transactional_id: str | None = None,
        ) -> list[dict[TopicPartition, ProduceResult]]:
            answers = await produce(connection, requests, timeout_ms, transactional_id)
            self.requests.append({partition for _, partition in requests[0]})
            if self._hold:
                self._held.append(event := asyncio.Event())
                await event.wait()
            return answers

        monkeypatch.setattr(FakeProduceConnection, "produce", held)

    def hold(self) -> None:
        self._hold = True
        self.requests.clear()

    async def held(self, replicas: Replicas, count: int) -> None:
        await replicas.until("requests are held", lambda: len(self._held) >= count)

    def release(self, number: int) -> None:
        self._held[number].set()

    def release_all(self) -> None:
        self._hold = False
        for event in self._held:
            event.set()


def on_partitions(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Replicas, list[Partition], Broker], Awaitable[None]]
) -> None:
    """Some partitions that are copied, each with a record."""
    broker = Broker(monkeypatch)

    async def run() -> None:
        replicas = Replicas(random.Random(3), 1)
        replicas.start()
        await replicas.connect()
        partitions = replicas.a.add_topic("local-t", PARTITIONS).partitions
        for partition in partitions:
            partition.write_values(b"first")
        await replicas.until("copied", replicas.equal)
        streams = replicas.ends["B"].follower.streams()
        await replicas.until("answered", lambda: not any(each.follower_log.queued for each in streams))
        await work(replicas, partitions, broker)
        broker.release_all()
        await replicas.until("all is copied", replicas.equal)
        await replicas.stop()

    run_simulated(run())


def test_what_comes_while_a_request_is_under_way_goes_together_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "PATIENCE_S", 5.0)  # however long they take to come

    async def work(replicas: Replicas, partitions: list[Partition], broker: Broker) -> None:
        broker.hold()
        partitions[0].write_values(b"second")
        await broker.held(replicas, 1)
        partitions[1].write_values(b"second")
        partitions[2].write_values(b"second")
        streams = replicas.ends["B"].follower.streams()
        await replicas.until("all have come", lambda: all(each.follower_log.queued for each in streams))
        assert broker.requests == [{0}]
        broker.release(0)
        await broker.held(replicas, 2)
        assert broker.requests == [{0}, {1, 2}]

    on_partitions(monkeypatch, work)


def test_a_request_that_takes_long_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas, partitions: list[Partition], broker: Broker) -> None:
        broker.hold()
        for number, partition in enumerate(partitions):  # each goes past those before it
            partition.write_values(b"second")
            await broker.held(replicas, number + 1)
        assert broker.requests == [{0}, {1}, {2}]
        partitions[0].write_values(b"third")  # never while its last one is under way
        await asyncio.sleep(2 * PATIENCE_S)
        assert len(broker.requests) == PARTITIONS
        broker.release(0)
        await broker.held(replicas, PARTITIONS + 1)
        assert broker.requests[PARTITIONS:] == [{0}]

    on_partitions(monkeypatch, work)


def test_a_large_batch_goes_alone_and_leaves_a_connection_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas, partitions: list[Partition], broker: Broker) -> None:
        small, *others = partitions
        large = others + replicas.a.add_topic("local-u", writers.WRITERS_PER_BROKER).partitions
        await replicas.until("follows", replicas.equal)
        broker.hold()
        for partition in large:
            partition.write_values(bytes(writers.LARGE_BYTES + 1))
        await broker.held(replicas, writers.LARGE_AT_ONCE)
        await asyncio.sleep(10 * PATIENCE_S)
        assert [len(request) for request in broker.requests] == [1] * writers.LARGE_AT_ONCE
        small.write_values(b"x")
        await broker.held(replicas, writers.LARGE_AT_ONCE + 1)
        assert broker.requests[-1] == {0}

    on_partitions(monkeypatch, work)
