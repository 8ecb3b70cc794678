"""A seeded simulation of a link under faults.

The plugin's own ends, from the handshake to the writers, between two model clusters: appends are lost, answered late or
never, land after they were taken for lost; connections break in the middle of a frame; leaders move, brokers and
proxies go and come back, the control log does not answer. After every append to a follower:

- its log is a prefix of the source's, batch by batch: nothing twice, no gap, nothing shifted.

And when everything works again, the follower gets all of it.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from support.fake_cluster import FakeCluster, run_simulated
from support.replicas import Replicas, simulate_clock

SEEDS = 20
STEPS = 120
TROUBLE = (0.0, 0.05, 0.3)


class Storm:
    """What happens to a pair of replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.random = replicas.random
        self.sequences: dict[tuple[str, int, int], int] = {}
        self.topics = 0
        self.violation: AssertionError | None = None

    def write(self) -> None:
        names = [name for name in self.replicas.a.found if name.startswith("local-")]
        name = self.random.choice(names)
        index = self.random.randrange(len(self.replicas.a.found[name].partitions))
        partition = self.replicas.a.partition(name, index)
        for _ in range(self.random.randint(1, 8)):
            values = [self.random.randbytes(self.random.randint(0, 40)) for _ in range(self.random.randint(1, 5))]
            producer_id = self.random.choice((-1, -1, 0, 1))
            if producer_id < 0:
                partition.write_values(*values, attributes=self.random.randint(0, 4))
                continue
            key = (name, index, producer_id)
            sequence = self.sequences.get(key, 0)
            self.sequences[key] = sequence + len(values)
            partition.write_values(*values, producer_id=producer_id, producer_epoch=0, base_sequence=sequence)

    def add_topic(self) -> None:
        if self.topics < 4:
            self.topics += 1
            self.replicas.a.add_topic(f"local-{self.topics}", self.random.randint(1, 3))

    def add_partitions(self) -> None:
        names = [name for name in self.replicas.a.found if name.startswith("local-")]
        topic = self.replicas.a.found[self.random.choice(names)]
        if len(topic.partitions) < 4:
            self.replicas.a._grow(topic, len(topic.partitions) + 1)

    def move_leader(self) -> None:
        cluster = self.random.choice((self.replicas.a, self.replicas.b))
        topic = self.random.choice(list(cluster.found.values()))
        partition = self.random.choice(topic.partitions)
        alive = [broker for broker in cluster.brokers if broker not in cluster.down]
        partition.move(self.random.choice(alive))

    def stop_broker(self) -> None:
        cluster = self.random.choice((self.replicas.a, self.replicas.b))
        if cluster.down:
            return
        broker = self.random.choice(cluster.brokers)
        cluster.down.add(broker)
        for topic in cluster.found.values():
            for partition in topic.partitions:
                if partition.leader == broker and self.random.random() < 0.8:
                    partition.move(next(each for each in cluster.brokers if each != broker))

    def start_brokers(self) -> None:
        for cluster in (self.replicas.a, self.replicas.b):
            cluster.down.clear()

    def forget_producers(self) -> None:
        """Producer states expire by the records' timestamps: then brokers tell no duplicates."""
        for topic in self.replicas.b.found.values():
            for partition in topic.partitions:
                partition.producers.clear()

    def uncommitted(self) -> None:
        """A broker whose replicas are slow."""
        for topic in self.replicas.a.found.values():
            for partition in topic.partitions:
                if partition.headers and self.random.random() < 0.3:
                    partition.lag = partition.end - partition.headers[-1].base_offset

    def trouble(self) -> None:
        for cluster in (self.replicas.a, self.replicas.b):
            cluster.trouble = self.random.choice(TROUBLE)
        for control in self.replicas.controls.values():
            control.trouble = self.random.choice(TROUBLE)

    async def cut(self) -> None:
        self.write()
        await asyncio.sleep(self.random.choice((0.0, 0.02)))
        self.replicas.cut()
        await asyncio.sleep(self.random.choice((0.0, 0.1, 3.0)))
        await self.replicas.connect()

    async def kill(self) -> None:
        for _ in range(self.random.choice((0, 5))):  # often with appends under way
            self.write()
        await asyncio.sleep(self.random.choice((0.0, 0.02)))
        which = self.random.choice(("A", "B", "AB"))
        await self.replicas.stop(which)
        await asyncio.sleep(self.random.choice((0.0, 0.3, 5.0)))
        self.replicas.start(which)
        await self.replicas.connect()

    async def blow(self) -> None:
        for _ in range(STEPS):
            await asyncio.sleep(self.random.choice((0.001, 0.01, 0.1, 1.0)))
            action = self.random.choices(
                (
                    self.write,
                    self.cut,
                    self.kill,
                    self.move_leader,
                    self.stop_broker,
                    self.start_brokers,
                    self.trouble,
                    self.forget_producers,
                    self.uncommitted,
                    self.add_topic,
                    self.add_partitions,
                ),
                (60, 6, 3, 8, 3, 6, 6, 3, 6, 2, 2),
            )[0]
            done = action()
            if done is not None:
                await done
            self.check()

    def check(self) -> None:
        for name, topic in self.replicas.b.found.items():
            if name.startswith("remote-"):
                for index in range(len(topic.partitions)):
                    self.replicas.check(name, index)

    def calm(self) -> None:
        self.start_brokers()
        for cluster in (self.replicas.a, self.replicas.b):
            calm(cluster)
        for control in self.replicas.controls.values():
            control.trouble = 0.0


def calm(cluster: FakeCluster) -> None:
    cluster.trouble = 0.0
    for topic in cluster.found.values():
        for partition in topic.partitions:
            partition.lag = 0
            grew, partition.grew = partition.grew, asyncio.Event()
            grew.set()


async def simulate(seed: int) -> None:
    replicas = Replicas(random.Random(seed))
    storm = Storm(replicas)
    storm.add_topic()
    replicas.start()
    await replicas.connect()
    await storm.blow()
    storm.calm()
    await replicas.connect()
    await replicas.until("the follower has everything", replicas.equal)
    storm.check()
    await replicas.until(
        "every stream follows",
        lambda: all(
            stream.reason is None and not stream.closed and not stream.lag
            for stream in replicas.ends["B"].follower.streams()
        ),
    )
    await replicas.stop()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_follower_is_a_prefix_of_the_source_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_clock(monkeypatch)
    run_simulated(simulate(seed))
