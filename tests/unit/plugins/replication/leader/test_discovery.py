"""What a proxy is to push: of which topics and partitions, and what it asks of their targets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from support.fake_cluster import FakeAnchors, FakeCluster, FakeContext, run_simulated

from isthmus_control.clock import ZERO, Register
from isthmus_control.model import (
    Link,
    LinkMode,
    LinkSettings,
    NamespaceMapping,
    OffsetsCopy,
    OffsetsForm,
    ResourceType,
    Role,
)
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo, TopicPartition
from isthmus_plugins.replication.leader.discovery import DISCOVERY_INTERVAL_S, Discovery
from isthmus_plugins.replication.leader.target_topics import PREPARE_INTERVAL_S, PreparedTopic
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

LINK = "link"
SOON_S = 3 * DISCOVERY_INTERVAL_S


class Look(NamedTuple):
    """What was found at some time."""

    topics: Mapping[str, TopicInfo]
    led: Mapping[LinkPartition, PreparedTopic | None]


class Connection:
    """The other side: has every topic that it is asked for, led by broker 9."""

    def __init__(self) -> None:
        self.asked: list[calls.PrepareTopics] = []

    async def call(self, question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
        self.asked.append(question)
        return calls.PrepareTopicsAnswer(
            {
                each.topic: calls.PreparedTopic(
                    True, calls.ReadyTopic(each.remote_topic or ""), leaders=(9,) * each.partitions
                )
                for each in question.topics
            }
        )


class Scene:
    """A proxy that fronts brokers 1 and 2 of three; topics ``l-*`` are led as ``r-*``."""

    def __init__(self) -> None:
        self.cluster = FakeCluster(random.Random(1), range(1, 4))
        self.connection = Connection()
        self.state: Any = SimpleNamespace(
            cluster_id="A",
            truncations={},
            predecessors=lambda name, topic_id: (),
            links={},
        )
        self.link(mappings=(self.mapping("l-", "r-"),))
        control: Any = SimpleNamespace(state=self.state, anchors=FakeAnchors())
        context: Any = FakeContext(self.cluster, control, brokers=frozenset({1, 2}))
        self.context = context
        peers: Any = SimpleNamespace(connections=lambda link_name: [self.connection])
        self.looks: list[Look] = []
        self.discovery = Discovery(context, peers, self.found, lambda link_name, topic: False)

    def link(self, **attached: Any) -> None:
        """What is attached from now on."""
        settings = LinkSettings(Register(LinkMode.ASYNCHRONOUS, ZERO), {}, {})
        self.state.links[LINK] = Link(LINK, "id", 1, "A", "B", True, settings, 0, **attached)

    def found(self, topics: Mapping[str, TopicInfo]) -> None:
        self.looks.append(Look(topics, dict(self.discovery.led)))

    @staticmethod
    def mapping(local: str, remote: str, role: Role = Role.LEADER) -> NamespaceMapping:
        return NamespaceMapping(ResourceType.TOPIC, local, remote, role, 0, 0)

    def add(self, name: str, *leaders: int) -> None:
        for partition, leader in zip(self.cluster.add_topic(name, len(leaders)).partitions, leaders, strict=True):
            partition.leader = leader

    @property
    def led(self) -> dict[TopicPartition, str | None]:
        """By topic and partition: as what the target has it; None: it does not say yet."""
        found = self.discovery.led.items()
        assert all(key.link == LINK for key, _ in found)
        return {key.place: told.remote_topic if told is not None else None for key, told in found}


def on_scene(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        scene.discovery.start()
        await work(scene)
        await scene.discovery.stop()

    run_simulated(run())


def test_since_when_a_leader_is_known_to_lead() -> None:
    """Whoever leads again has not led all the time."""

    async def work(scene: Scene) -> None:
        scene.add("l-t", 1, 3)
        await asyncio.sleep(SOON_S)
        assert scene.discovery.leads_since == {}, "it may have led for as long as anybody asks"
        moved = scene.cluster.found["l-t"].partitions[0]
        moved.move(2)
        moved.move(1)
        before = scene.context.clock.monotonic()
        await asyncio.sleep(SOON_S)
        assert scene.discovery.leaders["l-t", 0] == 1
        since = scene.discovery.leads_since.pop(("l-t", 0))
        assert before < since <= scene.context.clock.monotonic()
        assert scene.discovery.leads_since == {}

    on_scene(work)


def test_partitions_of_led_topics_are_pushed_by_who_fronts_their_leaders() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", 1, 3, 2, -1)
        scene.add("l-other", 3)
        scene.add("mine", 1)
        scene.add("r-t", 1)
        await asyncio.sleep(SOON_S)
        assert scene.led == {("l-t", 0): "r-t", ("l-t", 2): "r-t"}
        assert scene.discovery.led[LinkPartition(LINK, "l-t", 0)].leaders == (9,) * 4  # type: ignore[union-attr]
        assert scene.discovery.topic_ids == {"l-t": scene.cluster.found["l-t"].topic_id}
        assert {place[0] for place in scene.discovery.leader_epochs} == {"l-t", "l-other"}, "whoever fronts them"
        asked = scene.connection.asked[0]
        assert [each.topic for each in asked.topics] == ["l-t"]
        assert asked.all == ("l-other", "l-t"), "the target is told of all, or it would take them for deleted"

    on_scene(work)


def test_a_topic_is_found_soon_and_a_change_at_once() -> None:
    async def work(scene: Scene) -> None:
        await asyncio.sleep(SOON_S)
        scene.add("l-t", 1)
        await asyncio.sleep(DISCOVERY_INTERVAL_S + 0.05)
        assert ("l-t", 0) in scene.led
        scene.add("l-u", 1)
        scene.discovery.wake()
        await asyncio.sleep(0.05)
        assert ("l-u", 0) in scene.led
        assert scene.looks[-1].topics.keys() == {"l-t", "l-u"}

    on_scene(work)


def test_a_topic_without_any_leader_is_told_of_by_a_proxy_that_fronts_all_brokers() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", -1)
        await asyncio.sleep(SOON_S)
        assert scene.led == {}
        scene.context.fronted_brokers = None
        await asyncio.sleep(SOON_S)
        assert scene.led == {("l-t", 0): "r-t"}

    on_scene(work)


def test_settings_are_told_by_who_fronts_the_first_partition_that_has_a_leader() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-mine", -1, 1, 3)
        scene.add("l-theirs", 3, 1)
        await asyncio.sleep(SOON_S)
        scene.connection.asked.clear()
        for topic in scene.cluster.found.values():
            topic.configs["retention.ms"] = "5"
        await asyncio.sleep(PREPARE_INTERVAL_S + SOON_S)
        told = {each.topic for asked in scene.connection.asked for each in asked.topics if each.configs is not None}
        assert told == {"l-mine"}

    on_scene(work)


def test_internal_topics_are_pushed_in_a_mapping_of_their_own_alone() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", 1)
        scene.add(OFFSETS_TOPIC, 1)
        topics = scene.cluster.topics

        async def internal() -> Mapping[str, TopicInfo]:
            return {name: info._replace(internal=True) for name, info in (await topics()).items()}

        scene.cluster.topics = internal  # type: ignore[method-assign]
        await asyncio.sleep(SOON_S)
        assert scene.led == {}
        copy = "__consumer_offsets_A"
        offsets = OffsetsCopy(OffsetsForm.REDACTED)
        scene.link(offsets_topics=(replace(scene.mapping(OFFSETS_TOPIC, copy), offsets=offsets),))
        await asyncio.sleep(SOON_S)
        assert scene.led == {(OFFSETS_TOPIC, 0): copy}

    on_scene(work)


def test_what_is_truncated_itself_waits_and_its_target_is_asked_for_nothing() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", 1, 3)
        await asyncio.sleep(SOON_S)
        scene.state.truncations["l-t"] = scene.state.truncations["l-not-there-now"] = object()
        scene.connection.asked.clear()
        await asyncio.sleep(SOON_S)
        (told,) = scene.discovery.led.values()
        assert told is not None
        assert (told.ready, told.code) == (False, ReasonCode.SOURCE_TRUNCATING)
        assert scene.connection.asked[-1] == calls.PrepareTopics(
            (), ("l-not-there-now", "l-t"), ("l-not-there-now", "l-t")
        )
        scene.state.truncations.clear()
        seen = len(scene.looks)
        await asyncio.sleep(SOON_S)
        assert list(scene.looks[seen].led.values()) == [None], "what the target said before it does not count any more"
        assert scene.led == {("l-t", 0): "r-t"}
        assert all(told is not None and told.ready for told in scene.discovery.led.values())

    on_scene(work)


def test_nothing_is_led_without_a_lease_or_a_led_namespace() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", 1)
        await asyncio.sleep(SOON_S)
        scene.context.lease_deadline = 0.0
        await asyncio.sleep(SOON_S)
        assert scene.led == scene.discovery.topic_ids == {}
        assert scene.looks[-1] == ({}, {})
        scene.context.lease_deadline = float("inf")
        await asyncio.sleep(SOON_S)
        assert scene.led != {}
        scene.link(mappings=(scene.mapping("l-", "r-", Role.FOLLOWER),))
        await asyncio.sleep(SOON_S)
        assert scene.led == {}

    on_scene(work)


def test_what_was_found_stays_while_brokers_do_not_answer() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", 1)
        await asyncio.sleep(SOON_S)
        topics, before = scene.cluster.topics, len(scene.looks)

        async def unavailable() -> Mapping[str, TopicInfo]:
            raise BrokerUnavailable("not now")

        scene.cluster.topics = unavailable  # type: ignore[method-assign]
        await asyncio.sleep(SOON_S)
        assert len(scene.looks) == before
        assert scene.led == {("l-t", 0): "r-t"}
        scene.cluster.topics = topics  # type: ignore[method-assign]
        await asyncio.sleep(SOON_S)
        assert len(scene.looks) > before

    on_scene(work)
