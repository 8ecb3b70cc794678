"""Topics get the replicas that they are to have when there are brokers for them, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, Topic, run_simulated
from support.peers import CalledAtOnce
from support.replicas import LINK, Replicas

from isthmus_control.commands import AlterLink
from isthmus_plugins.cluster import KafkaRefused
from isthmus_plugins.replication.follower import replicas as module
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions
from isthmus_plugins.replication.follower.replicas import OWN_TOPICS, FollowerReplicas
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.link import calls

LOCAL, SOURCE = "remote-t", "local-t"
CONTROL = OWN_TOPICS[0]
WANTED = calls.WantedTopic(
    SOURCE,
    "00000000-0000-4000-8000-000000000001",
    None,
    2,
    3,
    configs={"min.insync.replicas": "2", "retention.ms": "5"},
    in_sync_min=2,
)


class Scene:
    """A target of three brokers, all of which have a replica of some topic, and one process of it."""

    def __init__(self) -> None:
        replicas = Replicas(random.Random(1), 1)
        self.cluster: FakeCluster = replicas.b
        self.cluster.on_new_partition = lambda *made: None
        self.cluster.brokers = [1]
        self.control: FakeControl = replicas.controls["B"]
        self.control_topic = self.cluster.found[CONTROL]
        self.control_topic.replicas = {0: (1, 2, 3)}
        self.restart()

    def restart(self) -> None:
        """Another process, which knows what the control log and the cluster have."""
        self.context: Any = FakeContext(self.cluster, self.control)
        self.replicas = FollowerReplicas(self.context)
        topics = FollowerTopics(self.context, self.replicas, OwnTransactions(self.context))
        self.peer = CalledAtOnce(LINK, topics.answers())

    async def prepare(self, wanted: calls.WantedTopic = WANTED) -> calls.PreparedTopic:
        return (await self.peer.call(calls.PrepareTopics((wanted,), (wanted.topic,)))).topics[wanted.topic]

    async def look(self) -> str | None:
        """What is told of the topic then: replicas are given where two looks have seen the same."""
        await self.replicas.look()
        await self.replicas.look()
        reason = self.replicas.reason(LOCAL)
        return None if reason is None else f"{reason.code}: {reason.message}"

    def set(self, **config: str | None) -> None:
        names = {name.replace("_", "."): value for name, value in config.items()}
        self.control.apply(AlterLink(LINK, config={f"follower.{name}": value for name, value in names.items()}))

    @property
    def found(self) -> Topic:
        return self.cluster.found[LOCAL]

    @property
    def in_sync_min(self) -> str | None:
        return self.found.configs.get("min.insync.replicas")


def on_cluster(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        await work(Scene())

    run_simulated(run())


def test_a_topic_that_was_made_with_few_replicas_gets_the_others_when_there_are_brokers() -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        assert scene.found.replicas == {0: (1,), 1: (1,)}
        assert scene.in_sync_min == "1"
        lacks = "TARGET_LACKS_REPLICAS: remote-t has 1 of 3 replicas: "
        assert await scene.look() == f"{lacks}1 brokers of this cluster are there; it gets the others when more are"
        scene.cluster.brokers.append(2)
        assert await scene.look() == f"{lacks}the others are being filled"
        assert scene.found.replicas == {0: (1, 2), 1: (1, 2)}
        scene.cluster.brokers.append(3)
        assert await scene.look() == f"{lacks}the others are being filled"
        assert scene.found.replicas[0] == (1, 2), "left alone while that goes on"
        await scene.prepare()
        assert scene.in_sync_min == "1", "no more than have all records"
        scene.cluster.growing.clear()
        scene.restart()  # who saw that is gone
        await scene.prepare()
        await scene.look()
        assert scene.found.replicas == {0: (1, 2, 3), 1: (1, 2, 3)}
        scene.cluster.growing.clear()
        assert await scene.look() is None
        assert scene.in_sync_min == "2"

    on_cluster(work)


def test_brokers_that_are_away_are_no_reason_not_to_have_a_replica_there() -> None:
    """As brokers make topics: one that is registered and away is filled when it comes back."""

    async def work(scene: Scene) -> None:
        scene.cluster.brokers = [1, 2, 3]
        scene.cluster.down.add(3)
        assert (await scene.prepare()).ready
        assert set(scene.found.replicas[0]) == {1, 2, 3}
        assert scene.in_sync_min == "2"
        assert await scene.look() is None

    on_cluster(work)


def test_what_the_link_says_comes_before_what_the_source_has() -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.brokers = [1, 2, 3]
        scene.set(replication_factor="2", min_insync_replicas="1")
        await scene.prepare()
        assert len(scene.found.replicas[0]) == 2
        assert scene.in_sync_min == "1"
        assert await scene.look() is None
        scene.set(min_insync_replicas="2")
        await scene.look()
        assert scene.in_sync_min == "2"
        scene.set(replication_factor="3", min_insync_replicas="3")
        await scene.look()
        assert len(scene.found.replicas[0]) == 3
        scene.cluster.growing.clear()
        assert await scene.look() is None
        assert scene.in_sync_min == "3"
        scene.set(replication_factor=None, min_insync_replicas=None)
        await scene.look()
        assert (len(scene.found.replicas[0]), scene.in_sync_min) == (3, "2"), "it never shrinks"
        scene.set(replication_factor="5")
        assert "3 of 5 replicas: 3 brokers of this cluster are there" in (await scene.look() or "")

    on_cluster(work)


def test_a_source_with_more_replicas_than_this_cluster_has_brokers_is_no_reason() -> None:
    async def work(scene: Scene) -> None:
        scene.control_topic.replicas = {0: (1,)}
        await scene.prepare(replace(WANTED, replication_factor=9))
        assert await scene.look() is None

    on_cluster(work)


def test_a_topic_that_somebody_filled_before_has_the_replicas_that_its_owner_gave_it() -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.brokers = [1, 2, 3]
        scene.cluster.add_topic(LOCAL, 2)
        await scene.prepare()
        await scene.look()
        assert len(scene.found.replicas[0]) == 3, "an empty one is like one that is made"
        scene.cluster.growing.clear()
        scene.found.replicas = {0: (1,), 1: (1,)}
        history = scene.control.state.histories[LOCAL]
        (first,) = history.partitions[0]
        ranges = (replace(first, end_offset=3), replace(first, start_offset=3))
        histories = {LOCAL: replace(history, partitions={0: ranges, 1: history.partitions[1]})}
        scene.control.state = scene.control.state.evolve(histories=histories)
        assert await scene.look() is None
        assert len(scene.found.replicas[0]) == 1
        scene.found.replicas[0] = (1, 2)
        assert await scene.look() is None
        assert len(scene.found.replicas[1]) == 1, "nor as many of each partition"
        scene.set(replication_factor="2")
        assert "has 1 of 2 replicas" in (await scene.look() or "")
        assert [len(each) for each in scene.found.replicas.values()] == [2, 2]

    on_cluster(work)


def test_what_the_brokers_refuse_is_told_and_stops_nothing() -> None:
    async def work(scene: Scene) -> None:
        await scene.prepare()
        scene.cluster.brokers = [1, 2, 3]
        scene.cluster.may_reassign = False
        told = await scene.look()
        assert told is not None
        assert "the proxy's own identity needs ALLOW Alter and Describe on the cluster" in told
        assert (await scene.prepare()).ready
        scene.cluster.may_reassign = True
        await scene.look()

        async def refused(*asked: Any) -> Any:
            return {(LOCAL, 0): KafkaRefused(39, "INVALID_REPLICA_ASSIGNMENT", "no")}

        scene.cluster.growing.clear()
        scene.cluster.policy = lambda topic, name, value: "no" if name == "min.insync.replicas" else None
        for _ in range(2):
            assert (await scene.look() or "").startswith("TARGET_REFUSES_SETTINGS: ")
        scene.found.replicas = {0: (1,), 1: (1,)}
        scene.cluster.reassign = refused  # type: ignore[method-assign]
        told = await scene.look()
        assert told is not None
        assert "1 of 3 replicas: the brokers refuse to add some: INVALID_REPLICA_ASSIGNMENT: no" in told

    on_cluster(work)


@pytest.mark.parametrize("topic", OWN_TOPICS)
def test_the_proxies_own_topics(topic: str) -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.found[topic] = scene.cluster.found.pop(CONTROL)
        scene.control_topic.name = topic
        scene.control_topic.replicas = {0: (1,)}
        scene.control_topic.configs["min.insync.replicas"] = "1"
        scene.cluster.add_topic("some").replicas = {0: (1, 2, 3)}
        await scene.replicas.look()
        told = scene.replicas.of_own_topics()
        assert told is not None
        assert told.message.startswith(f"{topic} has 1 of 3 replicas: 1 brokers")
        scene.cluster.brokers = [1, 2, 3]
        await scene.replicas.look()
        assert scene.control_topic.configs["min.insync.replicas"] == "1"
        assert scene.control_topic.replicas == {0: (1, 2, 3)}
        scene.cluster.growing.clear()
        await scene.replicas.look()
        assert scene.control_topic.configs["min.insync.replicas"] == "2"
        assert scene.replicas.of_own_topics() is None
        scene.control_topic.configs["min.insync.replicas"] = "3"
        await scene.replicas.look()
        assert scene.control_topic.configs["min.insync.replicas"] == "3", "what an operator has raised stays"

    on_cluster(work)


def test_brokers_that_are_lost_while_replicas_are_moved_lower_no_min_insync_replicas() -> None:
    """Acks with one copy, just when the link is Out-Of-Sync for lack of replicas, are not what was asked for."""

    async def work(scene: Scene) -> None:
        scene.cluster.brokers = [1, 2, 3]
        await scene.prepare()
        await scene.look()
        assert scene.in_sync_min == "2"
        scene.cluster.growing[LOCAL, 0] = 3  # somebody reassigns it
        scene.cluster.down |= {2, 3}
        await scene.look()
        await scene.prepare()
        assert scene.in_sync_min == "2"

    on_cluster(work)


def test_what_somebody_has_just_moved_is_looked_at_once_more_before_it_gets_replicas() -> None:
    async def work(scene: Scene) -> None:
        await scene.prepare()
        scene.cluster.brokers = [1, 2, 3]
        await scene.replicas.look()
        scene.found.replicas = {0: (3,), 1: (3,)}
        await scene.replicas.look()
        assert scene.found.replicas == {0: (3,), 1: (3,)}
        await scene.replicas.look()
        assert [each[0] for each in scene.found.replicas.values()] == [3, 3]
        assert len(scene.found.replicas[0]) == 3

    on_cluster(work)


def test_what_is_refused_is_not_asked_for_at_each_look_and_keeps_no_other_topic_from_its_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)

    async def work(scene: Scene) -> None:
        other = replace(WANTED, topic="local-u", topic_id="00000000-0000-4000-8000-000000000002")
        await scene.prepare()
        await scene.prepare(other)
        scene.cluster.brokers = [1, 2, 3]
        reassign, asked = scene.cluster.reassign, list[str]()

        async def refused_of_one(wanted: Any) -> Any:
            asked.extend(sorted({topic for topic, _ in wanted}))
            taken = {place: replicas for place, replicas in wanted.items() if place[0] != LOCAL}
            no = KafkaRefused(39, "INVALID_REPLICA_ASSIGNMENT", "no")
            return {**await reassign(taken), **{place: no for place in wanted if place[0] == LOCAL}}

        scene.cluster.reassign = refused_of_one  # type: ignore[method-assign]
        for _ in range(4):
            told = await scene.look()
        assert asked == [LOCAL, "remote-u"]
        assert "the brokers refuse to add some: INVALID_REPLICA_ASSIGNMENT: no" in (told or "")
        assert len(scene.cluster.found["remote-u"].replicas[0]) == 3
        scene.cluster.growing.clear()
        await asyncio.sleep(61)
        await scene.look()
        assert asked == [LOCAL, "remote-u", LOCAL]

    on_cluster(work)


def test_a_setting_that_is_refused_is_not_set_at_each_look() -> None:
    async def work(scene: Scene) -> None:
        await scene.prepare()
        scene.cluster.brokers = [1, 2, 3]
        await scene.look()
        scene.cluster.growing.clear()
        asked = list[str | None]()

        def policy(topic: str, name: str, value: str | None) -> str | None:
            asked.extend([value] if name == "min.insync.replicas" else [])
            return "no" if name == "min.insync.replicas" else None

        scene.cluster.policy = policy
        for _ in range(4):
            assert (await scene.look() or "").startswith("TARGET_REFUSES_SETTINGS: ")
        assert asked == ["2"]
        scene.cluster.policy = lambda topic, name, value: None
        await asyncio.sleep(61)
        await scene.prepare()
        assert await scene.look() is None
        assert scene.in_sync_min == "2"

    on_cluster(work)


def test_of_topics_that_come_one_after_the_other_each_has_its_settings_read_by_itself() -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.brokers += [2, 3]
        asked = list[tuple[str, ...]]()
        effective_configs = scene.cluster.effective_configs

        async def noted(topics: Sequence[str], known: bytes | None = None) -> Any:
            asked.append(tuple(topics))
            return await effective_configs(topics, known)

        async def add(number: int) -> None:
            topic = replace(WANTED, topic=f"local-{number}", topic_id=str(uuid.uuid5(uuid.NAMESPACE_OID, str(number))))
            assert (await scene.prepare(topic)).ready

        await add(0)
        await scene.look()
        scene.cluster.effective_configs = noted  # type: ignore[method-assign]
        for number in (1, 2):
            await add(number)
            asked.clear()
            await scene.replicas.look()
            assert asked == [(f"remote-{number}",)]
        await asyncio.sleep(module.SETTINGS_INTERVAL_S)
        for number in (0, 1, 2):
            await add(number)
        asked.clear()
        await scene.replicas.look()
        assert [name for name in asked[0] if name.startswith("remote-")] == ["remote-0", "remote-1", "remote-2"]

    on_cluster(work)
