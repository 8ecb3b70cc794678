"""What both sides of a link record of where records come from, simulated: leaders move, proxies die, connections go.

Each side's list says of every offset the cluster, topic and leader epoch that wrote it, as the log of the source has
it, and the walk along both lists ends where the logs do. In the end the follower is promoted, or fails over, whoever
dies meanwhile, and the former source follows it: from its end, or, where it has records of its own, with a topic made
anew.
"""

from __future__ import annotations

import asyncio
import random
import uuid

import pytest
from support.fake_cluster import Topic, run_simulated, simulated_now
from support.replicas import LINK, Replicas, records_of
from support.seeds import seeds

from isthmus_control.commands import AttachNamespace, DetachNamespace, RaiseLevel
from isthmus_control.levels import ORIGINS
from isthmus_control.model import NamespaceKey, ResourceType, Role
from isthmus_control.origins import Ended, PartitionOrigins, at, epoch_at
from isthmus_control.outcome import Accepted
from isthmus_control.shared_prefix import PartitionLog, shared_prefix
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.links import NamespaceRef, OperationError, Promote
from isthmus_plugins.replication.operations.promotion import RESUME_INTERVAL_S

PARTITIONS = 2
FOLLOWER = NamespaceKey(ResourceType.TOPIC, "remote-")


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
        for index, source in enumerate(self.source.partitions):
            a, b = self.known("A", index), self.known("B", index)
            for known in (a, b):
                self.check_origins(known, "A", self.source, index, 0, source.end)
            end = self.replicas.b.partition("remote-t", index).end
            logs = [PartitionLog(name, known, 0, end) for name, known in (("A", a), ("B", b))]
            found_end = shared_prefix(*logs)
            assert (found_end.offset, found_end.unknown) == (end, None)

    @staticmethod
    def check_origins(known: PartitionOrigins, cluster_id: str, topic: Topic, index: int, start: int, end: int) -> None:
        """A list says of ``[start, end)`` in which epochs a topic's partition was written."""
        topic_id = str(uuid.UUID(bytes=topic.topic_id))
        for header in topic.partitions[index].headers:
            for offset in {header.base_offset, header.last_offset}.intersection(range(start, end)):
                found = at(known.ranges, offset)
                assert found is not None, f"{index}: nothing is known of {offset}: {known}"
                assert found.origin[:2] == (cluster_id, topic_id), f"{index}: {offset}: {known}"
                in_force = epoch_at(found, offset)
                assert in_force is not None, f"{index}: no epoch at {offset}: {known}"
                assert in_force.epoch == header.leader_epoch, f"{index}: {offset}: {known}"

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
        how = self.random.choice((Ended.PROMOTED, Ended.FAILED_OVER))
        await self.lead(how)
        self.check_led(how)
        await self.turn_around()
        await replicas.stop()

    # --- the follower becomes the one that writes

    async def lead(self, how: Ended) -> None:
        """The follower is promoted, or fails over, while the source has more; its proxy may die on the way."""
        replicas = self.replicas
        if how is Ended.FAILED_OVER:
            replicas.cut()
            await self.write_for(self.random.uniform(0, 3))
            self.random.choice(self.source.partitions).move(self.random.choice(replicas.a.brokers))
            await self.write_for(self.random.uniform(0, 3))
        self.target = replicas.b.found["remote-t"]
        self.ends = [partition.end for partition in self.target.partitions]
        for partition in self.target.partitions:
            partition.on_append = lambda partition: None  # what comes is no copy
        while not self.leads():
            await self.asked_to_lead(how)
        for _ in range(self.random.randint(1, 3)):
            for partition in self.target.partitions:
                if self.random.random() < 0.7:
                    partition.write_values(b"own", b"too")
                partition.move(self.random.choice(replicas.b.brokers))

    def leads(self) -> bool:
        state = self.replicas.controls["B"].state
        return not state.promotions and not state.namespaces[FOLLOWER].reserved

    async def asked_to_lead(self, how: Ended) -> None:
        replicas, service = self.replicas, self.replicas.ends["B"].parts.service
        if how is Ended.FAILED_OVER:
            asked = service.fail_over(LINK, Failover(), lambda done, total: None)
        else:
            asked = service.promote(LINK, Promote(namespaces=[NamespaceRef(local="remote-")]), lambda done, total: None)
        dies_after = self.random.choice((None, self.random.uniform(0, 1)))
        try:
            async with asyncio.timeout(dies_after):
                await asked
        except TimeoutError:
            await replicas.stop("B")
            await asyncio.sleep(self.random.uniform(0, 3))
            replicas.start("B")
            if how is Ended.PROMOTED:
                await replicas.connect()
            await asyncio.sleep(RESUME_INTERVAL_S * self.random.choice((0, 3)))
        except OperationError as error:
            if error.code not in ("CONFLICT", "NOT_DRAINED", "NOT_FOUND", "UNAVAILABLE"):
                raise
            await asyncio.sleep(0.1)  # somebody goes on with it

    def check_led(self, how: Ended) -> None:
        """What was followed ends as it did, and this cluster's term begins there, before anybody has written."""
        topic_id = str(uuid.UUID(bytes=self.target.topic_id))
        for index, end in enumerate(self.ends):
            a, b = self.known("A", index), self.known("B", index)
            followed, own = b.ranges[-2:]
            assert (followed.origin.cluster_id, followed.end_offset, followed.ended) == ("A", end, how)
            assert (own.origin[:2], own.start_offset, own.end_offset) == (("B", topic_id), end, None)
            logs = [
                PartitionLog(name, known, 0, topic.partitions[index].end)
                for name, known, topic in (("A", a, self.source), ("B", b, self.target))
            ]
            found = shared_prefix(*logs)
            assert (found.offset, found.unknown) == (end, None)

    async def turn_around(self) -> None:
        """The former source follows, and says of its log what its source does.

        What it may lose it keeps where that is its source's, and nothing is copied again.
        """
        replicas, topic = self.replicas, ResourceType.TOPIC
        a, b = replicas.controls["A"], replicas.controls["B"]
        ends = [partition.end for partition in self.source.partitions]
        lost = str(uuid.UUID(bytes=self.source.topic_id))
        a.apply(DetachNamespace(LINK, topic, "local-"))
        for control, *pair, role in ((a, "local-", "remote-", Role.FOLLOWER), (b, "remote-", "local-", Role.LEADER)):
            agreed = (lost,) if role is Role.FOLLOWER else ()
            body = AttachNamespace(LINK, topic, *pair, role, create_missing=True, truncate_topic_ids=agreed)
            assert isinstance(control.apply(body), Accepted)
        await replicas.connect()

        def copied() -> bool:
            found, history = replicas.a.found.get("local-t"), a.state.histories.get("local-t")
            if found is None or history is None or history.topic_id != str(uuid.UUID(bytes=found.topic_id)):
                return False
            follows = all(history.open_range(index) is not None for index in range(PARTITIONS))
            return follows and all(
                (mine.start, mine.end) == (theirs.start, theirs.end)
                for mine, theirs in zip(found.partitions, self.target.partitions, strict=True)
            )

        await replicas.until("copied back", copied)
        found = replicas.a.found["local-t"]
        assert (found is self.source) == (ends == self.ends)
        for index, cut in enumerate(self.ends):
            mine, theirs = found.partitions[index], self.target.partitions[index]
            assert records_of(mine, 0, mine.end) == records_of(theirs, 0, theirs.end)
            both = self.known("A", index), self.known("B", index)
            logs = [PartitionLog(name, known, 0, mine.end) for name, known in zip("AB", both, strict=True)]
            same = shared_prefix(*logs)
            assert (same.offset, same.unknown) == (mine.end, None)
            written = at(both[0].ranges, cut - 1)
            # An empty term has come again from the new source, which says how it ended there.
            if found is self.source and written is not None and written.origin.term:
                assert (written.via, written.end_offset, written.ended) == ("", cut, Ended.FOLLOWS)
            for known in both:
                self.check_origins(known, "A", self.source, index, 0, cut)
                self.check_origins(known, "B", self.target, index, cut, self.target.partitions[index].end)


@pytest.mark.parametrize("seed", seeds(20))
def test_both_sides_know_who_wrote_what(seed: int) -> None:
    run_simulated(Scene(seed).run())
