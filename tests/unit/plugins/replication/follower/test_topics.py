"""The follower's topics: what is made, adopted or refused, whoever dies in between, and that nothing is lost unasked.

The source's end is the test's; cluster and control log are models, with the real rules.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.coordinators import Coordinators
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, Topic, run_simulated
from support.peers import CalledAtOnce
from support.replicas import LINK, Replicas

from isthmus_control.commands import (
    AttachNamespace,
    BeginTerm,
    Body,
    CloseProvenance,
    DetachNamespace,
    NoteSourceLog,
    PartitionEpoch,
    RecordSourceEpochs,
    RecreateFollowerTopic,
    SetFollowerTopic,
    TermStart,
    TopicTerms,
)
from isthmus_control.levels import ORIGINS, SOURCE_DELETIONS
from isthmus_control.model import FollowerTopic, ProvenanceRange, ResourceType, Role, TopicState
from isthmus_control.origins import Ended
from isthmus_control.outcome import Accepted
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, TransactionMarkers
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions
from isthmus_plugins.replication.follower.replicas import FollowerReplicas
from isthmus_plugins.replication.follower.topics import IDLE_S, FollowerTopics
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.logs.topic_settings import OVERRIDES
from isthmus_protocol.transaction_log import TransactionState

LOCAL, SOURCE = "remote-t", "local-t"
SOURCE_ID, ANOTHER_ID, THIRD_ID = (str(uuid.UUID(int=number, version=4)) for number in (1, 2, 3))
CONFIGS = {"retention.ms": "5", "cleanup.policy": "delete", "max.message.bytes": "1048588"}


def wanted(topic: str = SOURCE, partitions: int = 1, **more: Any) -> calls.WantedTopic:
    return calls.WantedTopic(
        topic,
        more.pop("topic_id", SOURCE_ID),
        None,
        partitions,
        more.pop("replication_factor", 1),
        configs=more.pop("configs", CONFIGS),
        **more,
    )


class Killed(BrokerUnavailable):
    """The process ended here."""


class Scene:
    """The follower's cluster, and one process of it."""

    def __init__(self) -> None:
        replicas = Replicas(random.Random(1), 1)
        self.cluster: FakeCluster = replicas.b
        self.cluster.on_new_partition = lambda *made: None
        self.control: FakeControl = replicas.controls["B"]
        self.may_land = True
        self.restart()

    def restart(self) -> None:
        """Another process, which knows what the control log has."""
        self.context: Any = FakeContext(self.cluster, self.control)
        self.own_transactions = OwnTransactions(self.context)
        self.topics = FollowerTopics(self.context, FollowerReplicas(self.context), self.own_transactions)
        self.topics.may_land = lambda _: self.may_land
        self.peer = CalledAtOnce(LINK, self.topics.answers())

    async def prepare(self, *topics: calls.WantedTopic, all_: Collection[str] | None = None) -> calls.PreparedTopic:
        """What the source is told of the first of some topics; ``all_``: of those that it has."""
        asked = topics or (wanted(),)
        names = tuple(sorted(all_ if all_ is not None else {each.topic for each in asked}))
        answer = await self.peer.call(calls.PrepareTopics(asked, names))
        assert answer.topics.keys() == {each.topic for each in asked}
        return answer.topics[asked[0].topic]

    @property
    def record(self) -> FollowerTopic:
        return self.control.state.follower_topics[LOCAL]

    @property
    def found(self) -> Topic:
        return self.cluster.found[LOCAL]

    def provenance(self, partition: int = 0, topic: str = LOCAL) -> list[tuple[str, int, int | None]]:
        """Where the records of a partition came from: (the source's topic, from, to)."""
        ranges: tuple[ProvenanceRange, ...] = self.control.state.histories[topic].partitions.get(partition, ())
        return [(each.source_topic_id, each.start_offset, each.end_offset) for each in ranges]

    def detach(self) -> None:
        self.control.apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))

    def attach(self, **more: Any) -> None:
        body = AttachNamespace(
            LINK, ResourceType.TOPIC, "remote-", "local-", Role.FOLLOWER, create_missing=True, **more
        )
        self.control.apply(body)

    def origins(self) -> list[tuple[str, int, int | None, Ended | None]]:
        """Which clusters wrote partition 0 first: (cluster, from, to, how that ended)."""
        ranges = self.control.state.origins_of(LOCAL, text(self.found), 0).ranges
        return [(each.origin.cluster_id, each.start_offset, each.end_offset, each.ended) for each in ranges]

    async def detached(self, ended: Ended = Ended.DETACHED) -> None:
        (mapping,) = self.control.state.links[LINK].mappings
        self.detach()
        await self.topics.detached(LINK, mapping, ended)


def on_cluster(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        await work(Scene())

    run_simulated(run())


def text(topic: Topic) -> str:
    return str(uuid.UUID(bytes=topic.topic_id))


# ---- making ----


def test_a_topic_is_made_like_the_sources_and_follows_from_its_start() -> None:
    async def work(scene: Scene) -> None:
        answer = await scene.prepare(wanted(partitions=3, replication_factor=9))
        assert answer.ready
        assert answer.leaders == (1, 1, 1)
        assert (len(scene.found.partitions), scene.found.replication_factor) == (3, 1), "as many as there are brokers"
        assert scene.found.configs["retention.ms"] == "-1", "nothing expires by itself while it follows"
        assert scene.record.settings["retention.ms"] == "5", "what it gets back is known"
        assert (scene.record.state, scene.record.topic_id) == (TopicState.FOLLOWING, text(scene.found))
        assert [scene.provenance(partition) for partition in range(3)] == [[(SOURCE_ID, 0, None)]] * 3
        before = len(scene.control.commands)
        assert (await scene.prepare(wanted(partitions=3, replication_factor=9))).ready
        assert len(scene.control.commands) == before, "again: nothing happens"
        assert (await scene.prepare(wanted(partitions=3, configs={**CONFIGS, "retention.ms": "6"}))).ready
        assert scene.record.settings["retention.ms"] == "6"
        assert scene.found.configs["retention.ms"] == "-1"

    on_cluster(work)


def test_what_is_about_to_be_made_is_recorded_before_it_is_there() -> None:
    async def work(scene: Scene) -> None:
        create, states = scene.cluster.create_topic, []

        async def noted(*args: Any) -> bytes:
            states.append(scene.record.state)
            return await create(*args)

        scene.cluster.create_topic = noted  # type: ignore[method-assign]
        assert (await scene.prepare()).ready
        assert states == [TopicState.CREATING]

    on_cluster(work)


def killing(scene: Scene, at: int) -> None:
    """The process ends at its ``at``-th change: before that, or (of odd numbers) after it."""
    left = at

    def wrap(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        async def step(*args: Any) -> Any:
            nonlocal left
            left -= 2
            if left == -2:
                raise Killed("before")
            done = await work(*args)
            if left == -1:
                raise Killed("after")
            return done

        setattr(owner, name, step)

    for name in ("create_topic", "delete_topic_id", "create_partitions", "alter_topic_configs"):
        wrap(scene.cluster, name)
    wrap(scene.control, "append")


def spared(scene: Scene) -> None:
    for owner in (scene.cluster, scene.control):
        for name in [name for name, value in vars(owner).items() if getattr(value, "__name__", "") == "step"]:
            delattr(owner, name)


def of_nothing(scene: Scene) -> None:
    pass


def of_an_empty_topic(scene: Scene) -> None:
    scene.cluster.add_topic(LOCAL, configs={"cleanup.policy": "compact"})


def of_one_to_be_lost(scene: Scene) -> None:
    scene.cluster.add_topic(LOCAL).partitions[0].write_values(b"somebody's")
    scene.detach()
    scene.attach(truncate_topic_ids=(text(scene.found),))


@pytest.mark.parametrize("at", range(14))
@pytest.mark.parametrize("begin", [of_nothing, of_an_empty_topic, of_one_to_be_lost])
def test_killed_anywhere_the_next_process_ends_with_one_topic_that_follows_whole(
    begin: Callable[[Scene], None], at: int
) -> None:
    async def work(scene: Scene) -> None:
        begin(scene)
        killing(scene, at)
        await scene.prepare(wanted(partitions=2))
        spared(scene)
        scene.restart()
        for _ in range(3):
            answer = await scene.prepare(wanted(partitions=2))
        assert answer.ready, answer
        assert (scene.record.state, scene.record.topic_id) == (TopicState.FOLLOWING, text(scene.found))
        assert [scene.provenance(partition) for partition in range(2)] == [[(SOURCE_ID, 0, None)]] * 2
        assert all(not each.log for each in scene.found.partitions)
        assert scene.found.configs["cleanup.policy"] == "delete"

    on_cluster(work)


def test_two_proxies_of_the_cluster_make_each_topic_once_and_neither_says_that_it_was_deleted() -> None:
    """What a proxy has seen of the cluster is older than what the control log says when it comes to its last topic."""

    async def run(seed: int) -> None:
        scene = Scene()
        scene.cluster.random = scene.control.random = random.Random(seed)
        other: Any = FakeContext(scene.cluster, scene.control, "q")
        peers = (
            scene.peer,
            CalledAtOnce(LINK, FollowerTopics(other, FollowerReplicas(other), OwnTransactions(other)).answers()),
        )
        names = [SOURCE, "local-u", "local-v"]

        async def ask(peer: CalledAtOnce, topics: Iterable[str], after_s: float = 0.0) -> list[calls.PreparedTopic]:
            await asyncio.sleep(after_s)
            question = calls.PrepareTopics(tuple(wanted(name) for name in topics), tuple(names))
            return list((await peer.call(question)).topics.values())

        later = scene.cluster.random.uniform(0, 0.05)
        answers = await asyncio.gather(ask(peers[0], names), ask(peers[1], reversed(names), later))
        for told in itertools.chain(*answers):
            assert told.ready or told.code in (ReasonCode.TARGET_TOPIC_NOT_CREATED, "CONFLICT"), told
            assert told.leaders == ((1,) if told.ready else None)
        for peer in peers:
            assert all(told.ready for told in await ask(peer, names))
        for name in (LOCAL, "remote-u", "remote-v"):
            assert scene.control.state.follower_topics[name].topic_id == text(scene.cluster.found[name])
            assert scene.provenance(topic=name) == [(SOURCE_ID, 0, None)]

    for seed in range(20):
        run_simulated(run(seed))


@pytest.mark.parametrize("led_after_s", [0.0, 0.5])
def test_two_proxies_of_the_source_are_told_of_the_same_topics(led_after_s: float) -> None:
    async def run(seed: int) -> None:
        scene = Scene()
        scene.cluster.random = scene.control.random = random.Random(seed)
        made = scene.cluster.add_topic

        def led_later(name: str, *args: Any) -> Topic:
            topic = made(name, *args)
            for partition in topic.partitions if led_after_s else ():
                partition.leader = -1
                asyncio.get_running_loop().call_later(led_after_s, partition.move, 1)
            return topic

        scene.cluster.add_topic = led_later  # type: ignore[method-assign]
        names = [SOURCE, "local-u", "local-v"]

        async def ask(topics: Iterable[str]) -> list[calls.PreparedTopic]:
            question = calls.PrepareTopics(tuple(wanted(name) for name in topics), tuple(names))
            return list((await scene.peer.call(question)).topics.values())

        for told in itertools.chain(*await asyncio.gather(ask(names), ask(reversed(names)))):
            assert (told.ready, told.leaders) == (True, (1,)), told

    for seed in range(20):
        run_simulated(run(seed))


def test_a_topic_without_leaders_is_waited_for_a_moment_and_told_as_it_is() -> None:
    async def work(scene: Scene) -> None:
        made = scene.cluster.add_topic

        def without(name: str, *args: Any) -> Topic:
            topic = made(name, *args)
            for partition in topic.partitions:
                partition.leader = -1
            return topic

        scene.cluster.add_topic = without  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        answer = await scene.prepare()
        assert answer.ready
        assert answer.leaders == (-1,)
        assert 2 < asyncio.get_running_loop().time() - began < 3
        asyncio.get_running_loop().call_later(0.5, scene.found.partitions[0].move, 1)
        await asyncio.sleep(1)
        assert (await scene.prepare()).leaders == (1,)

    on_cluster(work)


@pytest.mark.parametrize("trouble", [BrokerUnavailable("it is away"), KafkaRefused(29, "DENIED", "not yours")])
def test_a_topic_whose_leaders_cannot_be_read_is_recorded_before_that_is_answered(trouble: Exception) -> None:
    async def work(scene: Scene) -> None:
        named = scene.cluster.topics_named

        async def refused(names: Collection[str]) -> Mapping[str, TopicInfo]:
            if LOCAL in names and LOCAL in scene.cluster.found:
                raise trouble
            return await named(names)

        scene.cluster.topics_named = refused  # type: ignore[method-assign]
        assert not (await scene.prepare()).ready
        assert scene.record.state is TopicState.FOLLOWING
        assert scene.provenance() == [(SOURCE_ID, 0, None)]
        scene.cluster.topics_named = named  # type: ignore[method-assign]
        assert (await scene.prepare()).ready

    on_cluster(work)


def test_many_topics_are_made_at_the_same_time_and_each_is_recorded_before() -> None:
    """What is asked of brokers at the same time goes in one request, and what is recorded in one append."""

    async def work(scene: Scene) -> None:
        create, under_way, most = scene.cluster.create_topic, 0, 0
        looks = 0

        async def counted(topic: str, *args: Any) -> bytes:
            nonlocal under_way, most
            assert scene.control.state.follower_topics[topic].state is TopicState.CREATING
            under_way += 1
            most = max(most, under_way)
            try:
                return await create(topic, *args)
            finally:
                under_way -= 1

        async def looked(read: Any = scene.cluster.topics) -> Any:
            nonlocal looks
            looks += 1
            return await read()

        scene.cluster.create_topic = counted  # type: ignore[method-assign]
        scene.cluster.topics = looked  # type: ignore[method-assign]
        names = [f"local-{number}" for number in range(100)]
        began = asyncio.get_running_loop().time()
        assert (await scene.prepare(*map(wanted, names))).ready
        assert len(scene.control.state.follower_topics) == len(scene.control.state.histories) == 100
        assert most > 20
        assert asyncio.get_running_loop().time() - began < 0.5
        assert looks == 1, "all topics of the cluster are read once, by brokers() of replicas"

    on_cluster(work)


def test_trouble_with_one_topic_keeps_no_other_from_following() -> None:
    async def work(scene: Scene) -> None:
        create = scene.cluster.create_topic

        async def failing(topic: str, *args: Any) -> bytes:
            if topic == "remote-refused":
                raise KafkaRefused(44, "POLICY_VIOLATION", "names must be pretty")
            if topic == "remote-away":
                raise BrokerUnavailable("the controller does not answer")
            return await create(topic, *args)

        scene.cluster.create_topic = failing  # type: ignore[method-assign]
        asked = [wanted(f"local-{name}") for name in ("refused", "away", "t")] + [wanted("elsewhere-t")]
        answer = await scene.peer.call(calls.PrepareTopics(tuple(asked), tuple(each.topic for each in asked)))
        told = {name: (each.ready, each.code) for name, each in answer.topics.items()}
        assert told == {
            "local-refused": (False, ReasonCode.TARGET_TOPIC_NOT_CREATED),
            "local-away": (False, reasons.BROKER_UNAVAILABLE),
            "local-t": (True, None),
            "elsewhere-t": (False, reasons.NOT_FOLLOWING),
        }
        assert "names must be pretty" in str(answer.topics["local-refused"].message)

    on_cluster(work)


# ---- topics that were there ----


def test_what_somebody_else_wrote_is_not_touched_and_the_operator_is_told_what_to_do() -> None:
    async def work(scene: Scene) -> None:
        topic = scene.cluster.add_topic(LOCAL, configs={"retention.ms": "7"})
        topic.partitions[0].write_values(b"a", b"b")
        for _ in range(2):
            answer = await scene.prepare()
            assert not answer.ready
            assert answer.code == ReasonCode.TARGET_TOPIC_NOT_EMPTY
            assert "holds 2 records" in str(answer.message)
            assert f"`isthmus topic recreate {LOCAL}`" in str(answer.message)
        assert scene.found is topic
        assert (topic.partitions[0].end, topic.configs) == (2, {"retention.ms": "7"})
        assert scene.record.state is TopicState.REFUSED
        assert len([each for each in scene.control.commands if isinstance(each, SetFollowerTopic)]) == 1, "once"
        assert LOCAL not in scene.control.state.histories
        assert scene.topics.refused[LOCAL].code == ReasonCode.TARGET_TOPIC_NOT_EMPTY
        del scene.cluster.found[LOCAL]  # the operator found a place for it
        assert (await scene.prepare()).ready
        assert LOCAL not in scene.topics.refused

    on_cluster(work)


def test_a_topic_that_was_emptied_by_deleting_its_records_is_not_one_that_holds_nothing() -> None:
    """Its offsets are not the source's."""

    async def work(scene: Scene) -> None:
        log = scene.cluster.add_topic(LOCAL).partitions[0]
        log.write_values(b"a", b"b")
        log.delete_records(2)
        answer = await scene.prepare()
        assert answer.code == ReasonCode.TARGET_TOPIC_NOT_EMPTY
        assert "holds 0 records" in str(answer.message)

    on_cluster(work)


def test_an_empty_topic_is_adopted_with_the_sources_partitions_and_settings() -> None:
    async def work(scene: Scene) -> None:
        topic = scene.cluster.add_topic(LOCAL, configs={"retention.ms": "7", "max.message.bytes": "9"})
        assert (await scene.prepare(wanted(partitions=2))).ready
        assert scene.found is topic
        assert len(topic.partitions) == 2
        assert topic.configs["retention.ms"] == "-1"
        assert "max.message.bytes" not in topic.configs, "the source's is what the brokers have by themselves"
        assert [scene.provenance(partition) for partition in range(2)] == [[(SOURCE_ID, 0, None)]] * 2

    on_cluster(work)


def test_one_with_more_partitions_than_the_sources_is_not() -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.add_topic(LOCAL, 3)
        answer = await scene.prepare(wanted(partitions=2))
        assert answer.code == ReasonCode.TARGET_TOPIC_NOT_EMPTY
        assert "has 3 partitions, the source's topic 2" in str(answer.message)

    on_cluster(work)


def test_consent_to_lose_a_topic_is_for_that_one_and_for_none_that_comes_by_its_name() -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.add_topic(LOCAL).partitions[0].write_values(b"agreed")
        scene.detach()
        scene.attach(truncate_topic_ids=(text(scene.found),))
        del scene.cluster.found[LOCAL]
        scene.cluster.add_topic(LOCAL).partitions[0].write_values(b"never agreed")
        answer = await scene.prepare()
        assert answer.code == ReasonCode.TARGET_TOPIC_NOT_EMPTY
        assert scene.found.partitions[0].end == 1

    on_cluster(work)


@pytest.mark.parametrize("agreed", [True, False])
def test_a_topic_that_the_operator_gives_up_is_made_anew_and_no_other(agreed: bool) -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        given_up = scene.found
        given_up.partitions[0].write_values(b"x")
        scene.control.apply(RecreateFollowerTopic(LINK, LOCAL, text(given_up)))
        if not agreed:
            del scene.cluster.found[LOCAL]
            scene.cluster.add_topic(LOCAL).partitions[0].write_values(b"never agreed")
        there = scene.found
        answer = await scene.prepare(wanted(topic_id=ANOTHER_ID))
        assert answer.ready == agreed
        assert (scene.found is there) != agreed
        if agreed:
            assert scene.found.partitions[0].end == 0
            assert scene.provenance() == [(ANOTHER_ID, 0, None)]
        else:
            assert answer.code == ReasonCode.TARGET_TOPIC_NOT_EMPTY
            assert scene.found.partitions[0].end == 1

    on_cluster(work)


def test_leaders_of_what_was_given_up_are_not_those_of_what_is_made_in_its_place() -> None:
    """A broker that lags behind the controller still has the one before."""

    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        given_up, named = scene.found, scene.cluster.topics_named
        scene.control.apply(RecreateFollowerTopic(LINK, LOCAL, text(given_up)))
        lagged = 0

        async def once_behind(names: Collection[str]) -> Mapping[str, TopicInfo]:
            nonlocal lagged
            found = await named(names)
            if LOCAL in found and scene.found is not given_up and not lagged:
                lagged += 1
                return {LOCAL: scene.cluster._info(given_up)}
            return found

        scene.cluster.topics_named = once_behind  # type: ignore[method-assign]
        assert (await scene.prepare(wanted(partitions=2, topic_id=ANOTHER_ID))).leaders == (1, 1)
        assert lagged

    on_cluster(work)


@pytest.mark.parametrize(
    ("begin", "then"),
    [
        (of_nothing, None),
        (of_an_empty_topic, ReasonCode.TARGET_TOPIC_NOT_EMPTY),  # by then it holds a marker that is not the source's
        (of_one_to_be_lost, None),
    ],
)
def test_what_this_cluster_has_open_in_a_topic_ends_before_it_is_looked_at(
    begin: Callable[[Scene], None], then: ReasonCode | None
) -> None:
    async def work(scene: Scene) -> None:
        begin(scene)
        before = scene.cluster.found.get(LOCAL)
        coordinators = Coordinators(scene.cluster)
        coordinators.has("app", TransactionState.PREPARE_COMMIT, LOCAL)
        scene.own_transactions.start()
        waits = await scene.prepare()
        assert (waits.ready, waits.code) == (False, ReasonCode.TRANSACTIONS_ENDING)
        assert "'app' in remote-t-0 to be completed" in (waits.message or "")
        assert LOCAL not in scene.control.state.follower_topics
        assert scene.cluster.found.get(LOCAL) is before

        if before is not None:
            before.partitions[0].mark(TransactionMarkers(LOCAL, 0, 7, 0, True, 0))
        coordinators.has("app", TransactionState.COMPLETE_COMMIT)
        told = await scene.prepare()
        assert (told.ready, told.code) == (then is None, then)
        assert scene.found.partitions[0].end == (0 if then is None else 1)
        await scene.own_transactions.stop()

    on_cluster(work)


async def agreed_to_lose(scene: Scene, how: str) -> None:
    """An operator has agreed that the topic goes, for one that follows."""
    if how == "consent":
        of_one_to_be_lost(scene)
    else:
        assert (await scene.prepare()).ready
        scene.control.apply(RecreateFollowerTopic(LINK, LOCAL, text(scene.found)))


@pytest.mark.parametrize("how", ["consent", "recreate"])
def test_a_topic_that_took_the_name_since_the_cluster_was_looked_at_is_not_deleted(how: str) -> None:
    """Another proxy's, which follows already, or anybody's."""

    async def work(scene: Scene) -> None:
        await agreed_to_lose(scene, how)
        (mapping,) = scene.control.state.links[LINK].mappings
        assert await scene.own_transactions.keeps_from_following(LINK, mapping) is None
        topics = scene.cluster.topics_named

        async def then_replaced(names: Collection[str]) -> Mapping[str, TopicInfo]:
            found = await topics(names)
            scene.cluster.topics_named = topics  # type: ignore[method-assign]
            del scene.cluster.found[LOCAL]
            scene.cluster.add_topic(LOCAL).partitions[0].write_values(b"never agreed")
            return found

        scene.cluster.topics_named = then_replaced  # type: ignore[method-assign]
        assert (await scene.prepare()).code == ReasonCode.TARGET_TOPIC_NOT_CREATED
        assert scene.found.partitions[0].end == 1
        assert (await scene.prepare()).code == ReasonCode.TARGET_TOPIC_NOT_EMPTY

    on_cluster(work)


@pytest.mark.parametrize("how", ["consent", "recreate"])
def test_a_proxy_whose_lease_is_over_loses_no_topic(how: str) -> None:
    """Another one may have given it to clients since."""

    async def work(scene: Scene) -> None:
        await agreed_to_lose(scene, how)
        there = scene.found
        scene.context.lease_deadline = 0.0
        answer = await scene.prepare()
        assert (answer.ready, answer.code) == (False, reasons.BROKER_UNAVAILABLE)
        assert scene.found is there
        scene.context.lease_deadline = float("inf")
        assert (await scene.prepare()).ready
        assert scene.found is not there

    on_cluster(work)


# ---- attached again ----


async def followed(scene: Scene, records: int = 3) -> None:
    """A topic that has followed, and does not any more."""
    assert (await scene.prepare()).ready
    scene.found.partitions[0].write_values(*[b"x"] * records)
    await scene.detached()
    assert scene.provenance() == [(SOURCE_ID, 0, records)]


def test_what_came_from_the_same_topic_follows_again_with_its_records() -> None:
    async def work(scene: Scene) -> None:
        await followed(scene)
        scene.attach()
        assert (await scene.prepare()).ready
        assert scene.found.partitions[0].end == 3
        assert scene.provenance() == [(SOURCE_ID, 0, 3), (SOURCE_ID, 3, None)]

    on_cluster(work)


@pytest.mark.parametrize("change", ["written", "cut", "another source", "made anew"])
def test_what_is_not_known_to_be_the_sources_does_not_follow_again(change: str) -> None:
    async def work(scene: Scene) -> None:
        await followed(scene)
        log, asked = scene.found.partitions[0], wanted()
        if change == "written":
            log.write_values(b"here")
        elif change == "cut":
            log.end = 2
        elif change == "another source":
            asked = wanted(topic_id=ANOTHER_ID)
        else:
            del scene.cluster.found[LOCAL]
            log = scene.cluster.add_topic(LOCAL).partitions[0]
            log.write_values(b"x", b"x", b"x")
        end = log.end
        scene.attach()
        answer = await scene.prepare(asked)
        assert answer.code == ReasonCode.TARGET_TOPIC_NOT_EMPTY
        assert (scene.found.partitions[0].end, scene.record.state) == (end, TopicState.REFUSED)

    on_cluster(work)


@pytest.mark.parametrize(("kept", "follows"), [(3, True), (5, True), (2, False)])
def test_what_came_from_a_topic_that_the_sources_succeeded_counts_where_the_source_has_it(
    kept: int, follows: bool
) -> None:
    async def work(scene: Scene) -> None:
        await followed(scene)
        scene.attach()
        chain = (calls.Predecessor(SOURCE_ID, ANOTHER_ID, (kept,)),)
        answer = await scene.prepare(wanted(topic_id=ANOTHER_ID, predecessors=chain))
        assert answer.ready == follows
        assert scene.found.partitions[0].end == 3

    on_cluster(work)


# ---- while it follows ----


def test_brokers_that_are_busy_may_take_a_while_to_know_what_they_have_made() -> None:
    async def work(scene: Scene) -> None:
        make = scene.cluster.create_topic

        async def made_and_not_known(topic: str, *args: Any) -> bytes:
            topic_id = await make(topic, *args)
            scene.cluster.hidden[topic] = scene.cluster.found.pop(topic)
            return topic_id

        scene.cluster.create_topic = made_and_not_known  # type: ignore[method-assign]
        await scene.prepare()
        answer = await scene.prepare()
        assert (answer.ready, answer.code) == (False, reasons.BROKER_UNAVAILABLE)
        assert "which they have just made" in str(answer.message)
        assert LOCAL not in scene.topics.refused
        scene.cluster.found[LOCAL] = scene.cluster.hidden.pop(LOCAL)
        assert (await scene.prepare()).ready
        del scene.cluster.found[LOCAL]
        assert (await scene.prepare()).code == ReasonCode.TARGET_TOPIC_MAY_BE_DELETED, "it was there"

    on_cluster(work)


def test_a_topic_that_brokers_never_come_to_know_is_gone() -> None:
    async def work(scene: Scene) -> None:
        await scene.prepare()
        del scene.cluster.found[LOCAL]
        scene.restart()
        assert (await scene.prepare()).code == reasons.BROKER_UNAVAILABLE
        await asyncio.sleep(61)
        assert (await scene.prepare()).code == ReasonCode.TARGET_TOPIC_MAY_BE_DELETED

    on_cluster(work)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("deleted here", ReasonCode.TARGET_TOPIC_MAY_BE_DELETED),
        ("made anew here", ReasonCode.TARGET_TOPIC_ID_CHANGED),
        ("made anew at the source", ReasonCode.SOURCE_TOPIC_ID_CHANGED),
        ("fewer partitions", ReasonCode.SOURCE_PARTITIONS_DECREASED),
        ("truncated at the source", ReasonCode.SOURCE_TRUNCATED),
        ("succeeded by what never followed it", ReasonCode.SOURCE_TOPIC_ID_CHANGED),
    ],
)
def test_a_topic_that_is_not_what_it_was_stops_and_nothing_is_changed_before_somebody_decides(
    change: str, code: str
) -> None:
    async def work(scene: Scene) -> None:
        asked = wanted(partitions=2)
        assert (await scene.prepare(asked)).ready
        scene.found.partitions[0].write_values(b"x", b"y")
        record = scene.record
        if change.endswith("here"):
            del scene.cluster.found[LOCAL]
        if change == "made anew here":
            scene.cluster.add_topic(LOCAL, 2).partitions[0].write_values(b"somebody's")
        elif change == "fewer partitions":
            asked = wanted(partitions=1)
        elif change == "made anew at the source":
            asked = wanted(partitions=2, topic_id=ANOTHER_ID)
        elif change == "truncated at the source":
            chain = (calls.Predecessor(SOURCE_ID, ANOTHER_ID, (1, 0)),)
            asked = wanted(partitions=2, topic_id=ANOTHER_ID, predecessors=chain)
        elif change == "succeeded by what never followed it":
            chain = (calls.Predecessor(THIRD_ID, ANOTHER_ID, (1, 0)),)
            asked = wanted(partitions=2, topic_id=ANOTHER_ID, predecessors=chain)
        there = dict(scene.cluster.found)
        for _ in range(2):
            answer = await scene.prepare(asked)
            assert (answer.ready, answer.code) == (False, code), answer
            assert scene.topics.refused[LOCAL].code == code
            assert scene.record == record
            assert scene.cluster.found == there
            assert (LOCAL in scene.topics.succeeded) == (code is ReasonCode.SOURCE_TRUNCATED)
        assert scene.provenance() == [(SOURCE_ID, 0, None)]

    on_cluster(work)


def test_partitions_that_the_source_gets_follow_from_their_start() -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        scene.found.partitions[0].write_values(b"x")
        answer = await scene.prepare(wanted(partitions=3))
        assert answer.ready
        assert answer.leaders == (1, 1, 1)
        assert [scene.provenance(partition) for partition in range(3)] == [[(SOURCE_ID, 0, None)]] * 3

    on_cluster(work)


def test_a_proxy_that_died_between_a_partition_and_its_provenance_is_made_up_for() -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        killing(scene, 1)  # the partition is there, and nothing says where its records come from
        await scene.prepare(wanted(partitions=2))
        assert len(scene.found.partitions) == 2
        assert not scene.provenance(1)
        spared(scene)
        scene.restart()
        assert (await scene.prepare(wanted(partitions=2))).ready
        assert scene.provenance(1) == [(SOURCE_ID, 0, None)]

    on_cluster(work)


def test_settings_that_the_brokers_refuse_keep_no_record_from_following() -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        alter = scene.cluster.alter_topic_configs

        async def refuse(topic: str, configs: Mapping[str, str | None], validate_only: bool = False) -> None:
            raise KafkaRefused(44, "POLICY_VIOLATION", "too large")

        scene.cluster.alter_topic_configs = refuse  # type: ignore[method-assign]
        larger = wanted(configs={**CONFIGS, "max.message.bytes": "9000000"})
        answer = await scene.prepare(larger)
        assert (answer.ready, answer.code) == (True, ReasonCode.TARGET_REFUSES_SETTINGS)
        assert "max.message.bytes" in str(answer.message)
        assert scene.topics.settings.refused[LOCAL].code == ReasonCode.TARGET_REFUSES_SETTINGS
        scene.cluster.alter_topic_configs = alter  # type: ignore[method-assign]
        answer = await scene.prepare(larger)
        assert (answer.ready, answer.code) == (True, None)
        assert not scene.topics.settings.refused
        assert scene.found.configs["max.message.bytes"] == "9000000"

    on_cluster(work)


def test_a_topic_is_made_without_what_the_brokers_refuse() -> None:
    """What it is needed with while it follows is never left out."""

    async def work(scene: Scene) -> None:
        scene.cluster.defaults |= {"segment.bytes": "1073741824"}
        scene.cluster.policy = lambda topic, name, value: (
            "at least 1048576" if (name, value) == ("segment.bytes", "100000") else None
        )
        small = wanted(configs={**CONFIGS, "max.message.bytes": "9000000", "segment.bytes": "100000"})
        for _ in range(2):  # that it is told once does not end it
            answer = await scene.prepare(small)
            assert (answer.ready, answer.code) == (True, ReasonCode.TARGET_REFUSES_SETTINGS)
            assert "segment.bytes" in str(answer.message)
            assert "at least 1048576" in str(answer.message)
            assert scene.topics.settings.reason(LOCAL) is not None
        assert "segment.bytes" not in scene.found.configs
        assert scene.found.configs["max.message.bytes"] == "9000000"
        assert OVERRIDES.keys() & scene.cluster.defaults.keys() <= scene.found.configs.keys()
        assert scene.record.state is TopicState.FOLLOWING
        scene.cluster.policy = lambda topic, name, value: None
        assert (await scene.prepare(small)).code is None
        assert scene.found.configs["segment.bytes"] == "100000"

    on_cluster(work)


def test_limits_of_batches_that_were_raised_stay_whoever_raised_them() -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        scene.found.configs["max.message.bytes"] = "8388608"
        scene.restart()
        assert (await scene.prepare()).ready
        assert scene.found.configs["max.message.bytes"] == "8388608"
        assert scene.topics.settings.overrides(LOCAL)["max.message.bytes"] == "8388608"
        scene.restart()
        lowered = wanted(configs={**CONFIGS, "max.message.bytes": "1000"})
        assert (await scene.prepare(lowered)).ready
        assert scene.found.configs["max.message.bytes"] == "1000"
        assert "max.message.bytes" not in scene.topics.settings.overrides(LOCAL)
        higher = wanted(configs={**CONFIGS, "max.message.bytes": "9999999"})
        assert (await scene.prepare(higher)).ready
        assert scene.found.configs["max.message.bytes"] == "9999999"

    on_cluster(work)


def test_limits_of_batches_that_were_raised_are_the_sources_when_it_has_others() -> None:
    """A batch comes before the larger limit that its source was given for it."""

    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        scene.topics.settings.raised(LOCAL, {"max.message.bytes": "8388608"})
        scene.found.configs["max.message.bytes"] = "8388608"
        assert (await scene.prepare(wanted(configs={**CONFIGS, "retention.ms": "77"}))).ready
        assert scene.found.configs["max.message.bytes"] == "8388608"
        assert (await scene.prepare(wanted(configs={**CONFIGS, "max.message.bytes": "5000000"}))).ready
        assert scene.found.configs["max.message.bytes"] == "5000000"
        assert "max.message.bytes" not in scene.topics.settings.overrides(LOCAL)

    on_cluster(work)


def test_a_topic_that_is_there_follows_without_what_the_brokers_refuse() -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.add_topic(LOCAL, configs={"max.message.bytes": "5000000"})
        scene.cluster.policy = lambda topic, name, value: "not smaller" if name == "max.message.bytes" else None
        for _ in range(2):
            answer = await scene.prepare(wanted(configs={**CONFIGS, "max.message.bytes": "1000"}))
            assert (answer.ready, answer.code) == (True, ReasonCode.TARGET_REFUSES_SETTINGS)
        assert scene.found.configs["max.message.bytes"] == "5000000"
        assert scene.found.configs["retention.ms"] == "-1"

    on_cluster(work)


@pytest.mark.parametrize("name", ["retention.ms", "cleanup.policy"])
def test_a_topic_is_not_made_without_what_a_follower_needs(name: str) -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.policy = lambda topic, setting, value: "not for you" if setting == name else None
        answer = await scene.prepare()
        assert (answer.ready, answer.code) == (False, ReasonCode.TARGET_TOPIC_NOT_CREATED)
        assert "not for you" in str(answer.message)
        assert LOCAL not in scene.cluster.found
        shown = scene.topics.refused[LOCAL]
        assert (shown.code, shown.message) == (answer.code, answer.message)
        recorded = scene.control.state.applied_offset
        assert not (await scene.prepare()).ready
        assert scene.control.state.applied_offset == recorded, (
            "what is meant is recorded once, however often it is tried"
        )
        scene.cluster.policy = lambda topic, setting, value: None
        assert (await scene.prepare()).ready
        assert LOCAL not in scene.topics.refused

    on_cluster(work)


def test_a_topic_is_compacted_here_when_it_has_what_the_source_had_and_not_before() -> None:
    """Records without a key may be among that, which a compacted topic takes no more."""

    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        log = scene.found.partitions[0]
        log.write_values(b"x", b"y")
        compacted = {**CONFIGS, "cleanup.policy": "compact"}
        answer = await scene.prepare(wanted(configs=compacted))
        assert answer.made is not None
        since = answer.made.filling
        assert since is not None
        for fill, compacts in (
            (calls.ToFill(since, (3,)), False),
            (calls.ToFill(since - 1, (2,)), False),
            (calls.ToFill(since, (2, 2)), False),
            (calls.ToFill(since, (2,)), True),
        ):
            assert (await scene.prepare(wanted(configs=compacted, to_fill=fill))).ready
            assert scene.record.compacts == compacts, fill
            assert ("compact" in scene.found.configs["cleanup.policy"]) == compacts
        assert (await scene.prepare(wanted(configs=CONFIGS))).ready
        assert not scene.record.compacts
        assert scene.record.cleaned, "its cleaner was here"
        assert scene.found.configs["cleanup.policy"] == "delete"
        assert (await scene.prepare(wanted(configs=compacted))).ready
        assert scene.topics.settings.waiting[LOCAL].code == ReasonCode.NOT_COMPACTED_YET

    on_cluster(work)


def test_in_which_log_the_source_has_a_topic_is_recorded_before_anything_of_it_is_copied() -> None:
    """And once, of all topics together; a log of an older level does not hold it."""

    async def work(scene: Scene) -> None:
        def notes() -> list[NoteSourceLog]:
            return [body for body in scene.control.commands if isinstance(body, NoteSourceLog)]

        async def says(log: str | None) -> None:
            topics = wanted(), wanted("local-u")
            answer = await scene.peer.call(calls.PrepareTopics(topics, (SOURCE, "local-u"), log=log))
            assert all(each.ready for each in answer.topics.values())

        scene.control.state = scene.control.state.evolve(level=SOURCE_DELETIONS - 1)
        await says("log/0")
        scene.control.state = scene.control.state.evolve(level=SOURCE_DELETIONS)
        await says(None)
        assert notes() == []
        for _ in range(2):
            await says("log/0")
        assert [len(note.topics) for note in notes()] == [2]
        assert scene.record.source_log == "log/0"
        await says("log/1")
        assert scene.record.source_log == "log/1"

    on_cluster(work)


def test_what_neither_side_has_is_forgotten_and_what_one_has_is_not() -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare(wanted("local-other"), wanted())).ready
        assert (await scene.prepare(wanted("local-other"))).ready  # the source's is gone, the copy is here
        assert LOCAL in scene.control.state.follower_topics
        assert scene.topics.source_is_gone(scene.record)
        del scene.cluster.found[LOCAL]
        assert (await scene.prepare(wanted("local-other"), all_=("local-other", SOURCE))).ready
        assert not scene.topics.source_is_gone(scene.record)
        assert LOCAL in scene.control.state.follower_topics, "the source has it"
        assert (await scene.prepare(wanted("local-other"))).ready
        assert LOCAL not in scene.control.state.follower_topics
        assert "remote-other" in scene.control.state.follower_topics

    on_cluster(work)


# ---- where it stopped ----


def test_a_log_end_that_moves_is_recorded_when_it_does_not_any_more() -> None:
    """The last request of a proxy that is gone may be in the broker's hands."""

    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        log = scene.found.partitions[0]
        for number in range(3):
            asyncio.get_running_loop().call_later(0.1 + 1.7 * number, log.write_values, b"x")
        await scene.detached()
        assert scene.provenance() == [(SOURCE_ID, 0, 3)]

    on_cluster(work)


@pytest.mark.parametrize("ended", [Ended.DETACHED, Ended.PROMOTED])
def test_a_log_end_behind_which_nothing_can_land_is_recorded_at_once(ended: Ended) -> None:
    """The process knows that nothing is on its way; or the log ends as its source's does."""

    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        scene.found.partitions[0].write_values(b"x")
        scene.may_land = ended is Ended.PROMOTED
        began = asyncio.get_running_loop().time()
        await scene.detached(ended)
        assert scene.provenance() == [(SOURCE_ID, 0, 1)]
        assert asyncio.get_running_loop().time() - began < IDLE_S

    on_cluster(work)


@pytest.mark.parametrize("trouble", ["unread", "moves"])
def test_an_end_that_is_not_known_is_an_error_that_names_it_and_the_others_are_recorded(trouble: str) -> None:
    async def work(scene: Scene) -> None:
        asked = [wanted(partitions=2), wanted("local-u")]
        assert (await scene.prepare(*asked)).ready
        for name in (LOCAL, "remote-u"):
            scene.cluster.partition(name).write_values(b"x")
        read, reads = scene.cluster.log_ends, 0

        async def ends(places: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
            nonlocal reads
            reads += 1
            found = {**await read(places)}
            if (LOCAL, 1) in found:
                if trouble == "unread":
                    del found[LOCAL, 1]
                else:
                    found[LOCAL, 1] = reads
            return found

        scene.cluster.log_ends = ends  # type: ignore[method-assign]
        with pytest.raises(BrokerUnavailable, match=rf"{LOCAL}-1 cannot be read, or still move"):
            await scene.detached()
        assert scene.provenance(0) == scene.provenance(0, "remote-u") == [(SOURCE_ID, 0, 1)]
        assert scene.provenance(1) == [(SOURCE_ID, 0, None)], "nobody guesses"
        scene.cluster.log_ends = read  # type: ignore[method-assign]
        infos: dict[str, TopicInfo] = dict(await scene.cluster.topics())
        await scene.topics.close_provenance([(scene.record, infos[LOCAL])])
        assert scene.provenance(1) == [(SOURCE_ID, 0, 0)]
        closed = [each for each in scene.control.commands if isinstance(each, CloseProvenance)]
        await scene.topics.close_provenance([(scene.record, infos[LOCAL])])
        assert [each for each in scene.control.commands if isinstance(each, CloseProvenance)] == closed, "once"

    on_cluster(work)


def test_a_log_that_lost_where_epochs_began_is_closed_where_it_ends_now() -> None:
    """Nothing that is recorded of what is gone stands in the way of a promotion."""

    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        begun = ((0, 0), (1, 5), (2, 8))
        epochs = tuple(PartitionEpoch(LOCAL, text(scene.found), 0, *each) for each in begun)
        assert isinstance(scene.control.apply(RecordSourceEpochs(epochs)), Accepted)
        scene.found.partitions[0].write_values(*[b"x"] * 3)
        await scene.detached(Ended.FAILED_OVER)
        assert scene.provenance() == [(SOURCE_ID, 0, 3)]
        assert scene.origins() == [("A", 0, 3, Ended.CUT)]

    on_cluster(work)


def test_how_it_ended_is_recorded_from_the_level_on_that_knows_it() -> None:
    for level, ended in ((ORIGINS - 1, None), (ORIGINS, Ended.PROMOTED)):

        async def work(scene: Scene, level: int = level, ended: Ended | None = ended) -> None:
            scene.control.state = scene.control.state.evolve(level=level)
            assert (await scene.prepare()).ready
            scene.found.partitions[0].write_values(b"x")
            await scene.detached(Ended.PROMOTED)
            assert scene.provenance() == [(SOURCE_ID, 0, 1)]
            assert scene.origins() == [("A", 0, 1, ended)]

        on_cluster(work)


def test_what_a_killed_proxy_left_open_ends_before_another_source_is_followed() -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        scene.detach()  # and nobody has recorded where it ended
        scene.attach()
        assert (await scene.prepare(wanted(topic_id=ANOTHER_ID))).ready
        assert scene.provenance() == [(SOURCE_ID, 0, 0), (ANOTHER_ID, 0, None)]

    on_cluster(work)


def test_what_a_killed_proxy_had_on_its_way_is_seen_before_another_source_is_followed() -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        scene.detach()
        scene.attach()
        asyncio.get_running_loop().call_later(0.1, scene.found.partitions[0].write_values, b"late")
        told = await scene.prepare(wanted(topic_id=ANOTHER_ID))
        assert (told.ready, told.code) == (False, reasons.BROKER_UNAVAILABLE)
        told = await scene.prepare(wanted(topic_id=ANOTHER_ID))
        assert (told.ready, told.code) == (False, ReasonCode.TARGET_TOPIC_NOT_EMPTY)
        assert scene.provenance() == [(SOURCE_ID, 0, None)]

    on_cluster(work)


def test_what_this_cluster_wrote_ends_before_it_follows() -> None:
    async def work(scene: Scene) -> None:
        topic = scene.cluster.add_topic(LOCAL)
        begun = BeginTerm((TopicTerms(LOCAL, text(topic), {0: TermStart(0, 0)}),))
        assert isinstance(scene.control.apply(begun), Accepted)
        assert (await scene.prepare()).ready
        assert scene.origins() == [("B", 0, 0, Ended.FOLLOWS)]
        kinds = [type(each) for each in scene.control.commands]
        assert kinds.index(CloseProvenance) < kinds.index(SetFollowerTopic)

    on_cluster(work)


def test_the_ends_of_a_topic_that_took_its_name_are_nobodys_provenance() -> None:
    async def work(scene: Scene) -> None:
        assert (await scene.prepare()).ready
        del scene.cluster.found[LOCAL]
        scene.cluster.add_topic(LOCAL).partitions[0].write_values(b"somebody's")
        await scene.detached()
        assert scene.provenance() == [(SOURCE_ID, 0, None)]

    on_cluster(work)


# ---- plans ----


def test_a_plan_says_what_would_happen_and_what_would_be_lost_and_changes_nothing() -> None:
    async def work(scene: Scene) -> None:
        (mapping,) = scene.control.state.links[LINK].mappings
        scene.cluster.add_topic("remote-empty")
        scene.cluster.add_topic("remote-full").partitions[0].write_values(b"a", b"b")
        scene.cluster.partition("remote-full").delete_records(1)
        agreed = replace(mapping, truncate_topic_ids=(text(scene.cluster.found["remote-full"]),))
        topics = await scene.cluster.topics()
        before: list[Body] = list(scene.control.commands)

        async def plan(name: str, mapping_: Any = mapping, truncate: bool = False) -> tuple[str, int]:
            local = f"remote-{name}"
            led = calls.LedTopic(f"local-{name}", SOURCE_ID, 1)
            info = topics.get(local)
            planned, _ = await scene.topics.plan(mapping_, led, local, info, truncate, peer=scene.peer)
            return planned.action, planned.records_lost

        assert await plan("new") == ("create", 0)
        assert await plan("empty") == ("follow", 0)
        assert await plan("full") == ("refuse", 1)
        assert await plan("full", truncate=True) == ("truncate", 1)
        assert await plan("full", agreed) == ("truncate", 1)
        assert scene.control.commands == before
        assert scene.cluster.partition("remote-full").end == 2

    on_cluster(work)
