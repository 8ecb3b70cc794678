"""Lists of topics that are gone, and epochs that nothing is compared with, do not stay for ever."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from support.fake_cluster import FakeCluster, FakeContext, FakeControl, Topic, run_simulated

from isthmus_control.commands import (
    AttachNamespace,
    BeginTerm,
    ClaimBrokers,
    CreateLink,
    DetachNamespace,
    LogEpochs,
    OpenProvenance,
    PartitionOffset,
    RecordLogEpochs,
    SetFollowerTopic,
    TermStart,
    TopicEpochs,
    TopicTerms,
)
from isthmus_control.levels import with_known_level
from isthmus_control.model import BrokerClaim, ResourceType, Role, TopicState
from isthmus_control.origins import OriginEpoch
from isthmus_control.outcome import Accepted
from isthmus_plugins.replication.leader.deleted_topics import DeletedTopics
from isthmus_plugins.replication.leader.history_upkeep import EPOCHS_KEPT, LOOK_INTERVAL_S, HistoryUpkeep

LINK_ID, OTHER = (str(uuid.UUID(int=number, version=4)) for number in (1, 2))
LEASE_S = 10.0


class Scene:
    """A cluster that leads ``led``, and follows ``r-t``."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self.cluster, self.control = FakeCluster(rng), FakeControl("A", rng)
        self.context: Any = FakeContext(self.cluster, self.control)
        self.claim("p", self.context.incarnation)
        self.do(CreateLink("l", LINK_ID, "B", False))
        self.do(AttachNamespace("l", ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, create_missing=True))
        self.led, self.followed = self.cluster.add_topic("led"), self.cluster.add_topic("r-t")
        self.do(BeginTerm((TopicTerms("led", text(self.led), {0: TermStart(0, 0)}),)))
        topic_id = text(self.followed)
        self.do(SetFollowerTopic("l", "r-t", "l-t", OTHER, TopicState.FOLLOWING, topic_id))
        self.do(OpenProvenance("l", (PartitionOffset("r-t", topic_id, 0, 0),)))
        self.upkeep = HistoryUpkeep(self.context, DeletedTopics(self.context))

    def claim(self, name: str, incarnation: str, broker_id: int = 1) -> None:
        brokers = (BrokerClaim(broker_id, name, 1),)
        self.do(ClaimBrokers(name, incarnation, brokers, False, None, int(LEASE_S * 1000), with_known_level("0"), -1))

    def do(self, body: Any) -> None:
        assert isinstance(self.control.apply(body), Accepted)

    @property
    def recorded(self) -> set[str]:
        return {*self.control.state.origins, *self.control.state.histories}


def text(topic: Topic) -> str:
    return str(uuid.UUID(bytes=topic.topic_id))


def on_scene(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        await work(Scene())

    run_simulated(run())


def test_the_list_of_a_topic_goes_when_it_is_gone_for_longer_than_a_lease() -> None:
    async def work(scene: Scene) -> None:
        await scene.upkeep.look()
        assert scene.recorded == {"led", "r-t"}
        del scene.cluster.found["led"]
        began = asyncio.get_running_loop().time()
        await scene.upkeep.look()
        assert scene.recorded == {"r-t"}
        assert asyncio.get_running_loop().time() > began + LEASE_S

    on_scene(work)


def test_a_topic_that_is_only_hidden_keeps_its_list() -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.hidden["led"] = scene.cluster.found.pop("led")
        await scene.upkeep.look()
        assert scene.recorded == {"led", "r-t"}

    on_scene(work)


def test_of_what_follows_an_operator_decides_before() -> None:
    async def work(scene: Scene) -> None:
        del scene.cluster.found["r-t"]
        await scene.upkeep.look()
        assert scene.recorded == {"led", "r-t"}
        scene.do(DetachNamespace("l", ResourceType.TOPIC, "r-"))
        await scene.upkeep.look()
        assert scene.recorded == {"led"}

    on_scene(work)


def test_a_topic_that_took_the_name_has_its_own_list() -> None:
    async def work(scene: Scene) -> None:
        del scene.cluster.found["led"]
        again = scene.cluster.add_topic("led")
        await scene.upkeep.look()
        assert scene.recorded == {"r-t"}
        scene.do(BeginTerm((TopicTerms("led", text(again), {0: TermStart(0, 0)}),)))
        await scene.upkeep.look()
        assert scene.recorded == {"led", "r-t"}

    on_scene(work)


def test_epochs_below_the_start_of_the_log_are_dropped_where_there_are_many() -> None:
    async def work(scene: Scene) -> None:
        log = scene.led.partitions[0]
        log.write_values(*[b"x"] * 40)
        log.write_values(*[b"x"] * 40)
        log.delete_records(40)

        def record(*epochs: int) -> None:
            entry = LogEpochs(0, tuple(OriginEpoch(epoch, 2 * epoch) for epoch in epochs))
            scene.do(RecordLogEpochs((TopicEpochs("led", text(scene.led), (entry,)),)))

        def kept() -> list[int]:
            (range_,) = scene.control.state.origins_of("led", text(scene.led), 0).ranges
            return [epoch.start_offset for epoch in range_.epochs]

        record(*range(EPOCHS_KEPT))
        requests = scene.cluster.requests
        await scene.upkeep.look()
        assert (len(kept()), scene.cluster.requests - requests) == (EPOCHS_KEPT, 1), "nobody asks"
        record(*range(EPOCHS_KEPT, 30))
        await scene.upkeep.look()
        assert kept() == list(range(40, 60, 2))
        commands = len(scene.control.commands)
        await scene.upkeep.look()
        assert len(scene.control.commands) == commands

    on_scene(work)


def test_one_proxy_of_the_cluster_looks_and_rarely() -> None:
    async def work(scene: Scene) -> None:
        del scene.cluster.found["led"]
        scene.claim("a", str(uuid.UUID(int=7, version=4)), 2)
        scene.upkeep.start()
        await asyncio.sleep(2 * LOOK_INTERVAL_S)
        assert scene.recorded == {"led", "r-t"}, "another one does"
        scene.context.proxy_name = "a"
        scene.context.incarnation = str(uuid.UUID(int=7, version=4))
        await asyncio.sleep(LOOK_INTERVAL_S + 2 * LEASE_S)
        assert scene.recorded == {"r-t"}
        await scene.upkeep.stop()

    on_scene(work)
