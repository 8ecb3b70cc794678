"""What both sides of a link record of where records come from, simulated: leaders move, proxies die, connections go.

Each side's list says of every offset the cluster, topic and leader epoch that wrote it, as the log of the source has
it, and the walk along both lists ends where the logs do.
"""

from __future__ import annotations

import asyncio
import random
import uuid

import pytest
from support.fake_cluster import run_simulated, simulated_now
from support.replicas import Replicas
from support.seeds import seeds

from isthmus_control.commands import RaiseLevel
from isthmus_control.levels import ORIGINS
from isthmus_control.origins import PartitionOrigins, at, epoch_at
from isthmus_control.shared_prefix import PartitionLog, shared_prefix

PARTITIONS = 2


class Scene:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.replicas = Replicas(self.random)
        self.source = self.replicas.a.add_topic("local-t", PARTITIONS)
        for name in "AB":
            self.replicas.controls[name].apply(RaiseLevel(ORIGINS))

    def known(self, name: str, partition: int) -> PartitionOrigins:
        cluster, topic = (self.replicas.a, "local-t") if name == "A" else (self.replicas.b, "remote-t")
        topic_id = str(uuid.UUID(bytes=cluster.found[topic].topic_id))
        return self.replicas.controls[name].state.origins_of(topic, topic_id, partition)

    def are_told(self) -> bool:
        known = [self.known("B", index).ranges for index in range(PARTITIONS)]
        return all(ranges and not ranges[-1].assumed for ranges in known)

    def check(self) -> None:
        """Both lists say what the source's log has."""
        topic_id = str(uuid.UUID(bytes=self.source.topic_id))
        for index, source in enumerate(self.source.partitions):
            a, b = self.known("A", index), self.known("B", index)
            for known in (a, b):
                for header in source.headers:
                    for offset in (header.base_offset, header.last_offset):
                        found = at(known.ranges, offset)
                        assert found is not None, f"{index}: nothing is known of {offset}: {known}"
                        assert found.origin[:2] == ("A", topic_id)
                        in_force = epoch_at(found, offset)
                        assert in_force is not None, f"{index}: no epoch at {offset}: {known}"
                        assert in_force.epoch == header.leader_epoch, f"{index}: {offset}: {known}"
            end = self.replicas.b.partition("remote-t", index).end
            logs = [PartitionLog(name, known, 0, end) for name, known in (("A", a), ("B", b))]
            found_end = shared_prefix(*logs)
            assert (found_end.offset, found_end.unknown) == (end, None)

    async def write_for(self, seconds: float) -> None:
        until = simulated_now() + seconds
        while simulated_now() < until:
            self.random.choice(self.source.partitions).write_values(*[b"x"] * self.random.randint(1, 3))
            await asyncio.sleep(self.random.uniform(0.01, 0.3))

    async def fault(self) -> None:
        what = self.random.choice(("leader", "leader", "leaders", "cut", "kill A", "kill B", "nothing"))
        replicas = self.replicas
        if what == "leader":
            self.random.choice(self.source.partitions).move(self.random.choice(replicas.a.brokers))
        elif what == "leaders":  # without a record in between
            for _ in range(3):
                self.source.partitions[0].move(self.random.choice(replicas.a.brokers))
                await asyncio.sleep(self.random.uniform(0, 1.5))
        elif what == "cut":
            replicas.cut()
        elif what.startswith("kill"):
            await replicas.stop(what[-1])
            await self.write_for(self.random.uniform(0, 2))
            replicas.start(what[-1])
        if replicas.wire is None or not replicas.wire.open:
            await replicas.connect()

    async def run(self) -> None:
        replicas = self.replicas
        for partition in self.source.partitions:
            for _ in range(self.random.randint(0, 3)):
                partition.write_values(*[b"before"] * 3)
                partition.move(self.random.choice(replicas.a.brokers))
        replicas.start()
        await replicas.connect()
        await replicas.until("copied", lambda: replicas.equal() and self.are_told())
        self.check()
        terms = {self.known("A", index).ranges[-1].origin for index in range(PARTITIONS)}
        for _ in range(self.random.randint(1, 5)):
            await self.fault()
            await self.write_for(self.random.uniform(0, 4))
        await replicas.until("copied", replicas.equal)
        self.check()
        assert {self.known("A", index).ranges[-1].origin for index in range(PARTITIONS)} == terms, "a term goes on"
        await replicas.stop()


@pytest.mark.parametrize("seed", seeds(20))
def test_both_sides_know_who_wrote_what(seed: int) -> None:
    run_simulated(Scene(seed).run())
