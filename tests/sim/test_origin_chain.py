"""Who wrote what, through a cluster in the middle, which says what its source says before it pushes what comes of it.

A leads to B, and B to C. C's list says of every offset in which leader epoch of A it was written, which nothing in B's
log shows; in the end B is failed over, and C's list says from where on B wrote.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Final

import pytest
from support.fake_cluster import FakeCluster, FakeControl, Topic, run_simulated, simulated_now
from support.replicas import INDEX, LINK, SECRET, End, Replicas, Wire, connected
from support.seeds import seeds

from isthmus_control.commands import AttachNamespace, CreateLink, RegisterProducerIds
from isthmus_control.grants import EVERYTHING
from isthmus_control.model import NamespaceKey, ResourceType, Role
from isthmus_control.origins import PartitionOrigins, at, epoch_at
from isthmus_control.sealing import Sealer, Secret
from isthmus_control.shared_prefix import PartitionLog, shared_prefix
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.tasks import Supervision, Tasks

SECOND: Final = "b-to-c"
SECOND_ID: Final = str(uuid.UUID(int=8, version=4))
INDEX_OF_C: Final = 33
TOPICS: Final = {"A": "local-t", "B": "remote-t", "C": "last-t"}


class Chain(Replicas):
    """As :class:`Replicas`, and C's ``last-*`` follows B's ``remote-*``."""

    def __init__(self, seed: int) -> None:
        super().__init__(random.Random(seed))
        self.c = FakeCluster(self.random, (1, 2))
        self.c.add_topic("__isthmus_control")
        self.controls["C"] = FakeControl("C", self.random)
        self.second: Wire | None = None
        self.controls["B"].apply(RegisterProducerIds("C", INDEX_OF_C))
        for cluster_id, index in {"B": INDEX["B"], "C": INDEX_OF_C}.items():
            self.controls["C"].apply(RegisterProducerIds(cluster_id, index))
        secret, topic = Sealer(None).seal(Secret(SECRET), SECOND_ID), ResourceType.TOPIC
        for name, remote, *pair, role in (
            ("B", "C", "remote-", "last-", Role.LEADER),
            ("C", "B", "last-", "remote-", Role.FOLLOWER),
        ):
            link = CreateLink(SECOND, SECOND_ID, remote, name == "B", ("127.0.0.1:1",), (), secret, grants=EVERYTHING)
            self.controls[name].apply(link)
            self.controls[name].apply(AttachNamespace(SECOND, topic, *pair, role, create_missing=True))
        self.source = self.a.add_topic("local-t", 1)
        self.log = self.source.partitions[0]

    @property
    def clusters(self) -> dict[str, FakeCluster]:
        return {"A": self.a, "B": self.b, "C": self.c}

    def begin(self, name: str) -> None:
        self.ends[name] = End(self.clusters[name], self.controls[name])

    async def kill(self, name: str) -> None:
        if name in "BC" and self.second is not None:
            self.second.cut()
        if name in "AB":
            self.cut()
        self.controls[name].unsubscribe_all()
        await self.ends.pop(name).stop()

    def join(self) -> None:
        """Connect what is not connected."""
        if self.wire is None or not self.wire.open:
            self.wire = connected(self.random, self.ends["A"], self.ends["B"])
        if self.second is None or not self.second.open:
            self.second = connected(self.random, self.ends["B"], self.ends["C"], SECOND)

    def topic(self, name: str) -> Topic | None:
        return self.clusters[name].found.get(TOPICS[name])

    def known(self, name: str) -> PartitionOrigins:
        topic = self.topic(name)
        assert topic is not None
        topic_id = str(uuid.UUID(bytes=topic.topic_id))
        return self.controls[name].state.origins_of(topic.name, topic_id, 0)

    def have(self, end: int, names: str = "BC") -> bool:
        found = [self.topic(name) for name in names]
        return all(topic is not None and topic.partitions[0].end == end for topic in found)

    async def write_for(self, seconds: float) -> None:
        until = simulated_now() + seconds
        while simulated_now() < until:
            self.log.write_values(*[b"x"] * self.random.randint(1, 3))
            await asyncio.sleep(self.random.uniform(0.01, 0.3))

    async def fault(self) -> None:
        what = self.random.choice(("leader", "leader", "leader", "middle", "cut", "cut", "A", "B", "B", "C"))
        if what == "leader":
            self.log.move(self.random.choice(self.a.brokers))
        elif what == "middle":
            self.b.partition("remote-t").move(self.random.choice(self.b.brokers))
        elif what == "cut":
            wire = self.random.choice((self.wire, self.second))
            assert wire is not None
            wire.cut()
        else:
            await self.kill(what)
            await self.write_for(self.random.uniform(0, 2))
            self.begin(what)
        self.join()

    def check_lists(self) -> None:
        """All three lists say what A's log has."""
        topic_id, end = str(uuid.UUID(bytes=self.source.topic_id)), self.log.end
        for name in "ABC":
            known = self.known(name)
            for header in self.log.headers:
                for offset in (header.base_offset, header.last_offset):
                    found = at(known.ranges, offset)
                    assert found is not None, f"{name}: nothing is known of {offset}: {known}"
                    assert (found.origin[:2], found.assumed) == (("A", topic_id), False), f"{name}: {offset}: {known}"
                    in_force = epoch_at(found, offset)
                    assert in_force is not None, f"{name}: {offset}: {known}"
                    assert in_force.epoch == header.leader_epoch, f"{name}: {offset}: {known}"
        for one, other in (("A", "B"), ("B", "C"), ("A", "C")):
            found_end = shared_prefix(*(PartitionLog(name, self.known(name), 0, end) for name in (one, other)))
            assert (found_end.offset, found_end.unknown) == (end, None), f"{one}, {other}"

    async def run(self) -> None:
        for _ in range(self.random.randint(0, 3)):
            self.log.write_values(*[b"before"] * 3)
            self.log.move(self.random.choice(self.a.brokers))
        for name in "ABC":
            self.begin(name)
        self.join()
        await self.until("copied", lambda: self.have(self.log.end))
        for _ in range(self.random.randint(1, 6)):
            await self.fault()
            await self.write_for(self.random.uniform(0, 3))
        await self.until("copied", lambda: self.have(self.log.end))
        self.check_lists()
        await self.fail_over()
        for name in "ABC":
            await self.kill(name)

    async def fail_over(self) -> None:
        """B writes, and C follows it on; A goes on as well."""
        self.cut()
        end, middle = self.log.end, self.b.partition("remote-t")
        await self.write_for(1)
        middle.on_append = lambda partition: None  # what comes is no copy
        await self.ends["B"].parts.service.fail_over(LINK, Failover(), lambda done, total: None)
        assert not self.controls["B"].state.namespaces[NamespaceKey(ResourceType.TOPIC, "remote-")].reserved
        for _ in range(self.random.randint(1, 3)):
            middle.write_values(b"own", b"too")
            if self.random.random() < 0.5:
                middle.move(self.random.choice(self.b.brokers))
        await self.until("C has it", lambda: self.have(middle.end, "C"))
        logs = {"A": self.log.end, "B": middle.end, "C": middle.end}
        for one, other, shared in (("A", "B", end), ("A", "C", end), ("B", "C", middle.end)):
            found = shared_prefix(*(PartitionLog(name, self.known(name), 0, logs[name]) for name in (one, other)))
            assert (found.offset, found.unknown) == (shared, None), f"{one}, {other}"


@pytest.mark.parametrize("seed", seeds(12))
def test_the_last_one_of_a_chain_knows_who_wrote_what(seed: int) -> None:
    run_simulated(Chain(seed).run())


def test_a_cluster_in_the_middle_writes_nothing_before_all_of_its_proxies_know_that_it_does() -> None:
    """One that has not read of the term would push the first of it on as the source's."""

    async def work(chain: Chain) -> None:
        for name in "ABC":
            chain.begin(name)
        chain.join()
        chain.log.write_values(b"shared")
        await chain.until("copied", lambda: chain.have(chain.log.end))
        chain.cut()
        control, all_know = chain.controls["B"], asyncio.Event()
        enforced = control.enforced

        def is_written() -> bool:
            goes_on = chain.known("B").open_range
            return goes_on is not None and not goes_on.via

        async def waits(offset: int) -> None:
            await enforced(offset)
            if is_written():
                await all_know.wait()

        control.enforced = waits  # type: ignore[method-assign]
        service = chain.ends["B"].parts.service
        tasks = Tasks("test", Supervision())
        failover = tasks.start("failover", service.fail_over(LINK, Failover(), lambda done, total: None))
        await chain.until("its term is recorded", is_written)
        await asyncio.sleep(5)
        assert not failover.done()
        assert control.state.namespaces[NamespaceKey(ResourceType.TOPIC, "remote-")].reserved
        all_know.set()
        await failover
        assert not control.state.namespaces[NamespaceKey(ResourceType.TOPIC, "remote-")].reserved
        for name in "ABC":
            await chain.kill(name)

    run_simulated(work(Chain(1)))
