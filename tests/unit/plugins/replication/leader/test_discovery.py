"""What a proxy is to push: of which topics and partitions, and what it asks of their targets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
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
from isthmus_plugins.api import Client, Replace, Request
from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo, TopicPartition
from isthmus_plugins.replication.follower.topics import NEW_SAID_S
from isthmus_plugins.replication.leader.discovery import (
    DISCOVERY_INTERVAL_S,
    LOOKS_SHARE,
    MADE_S,
    REST_MAX_S,
    SETTLED_MAX_S,
    SETTLED_S,
    SETTLED_SHARE,
    Discovery,
)
from isthmus_plugins.replication.leader.target_topics import PREPARE_INTERVAL_S, PreparedTopic
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.schema import ApiKey

LINK = "link"
SOON_S = 3 * DISCOVERY_INTERVAL_S


class Look(NamedTuple):
    """What was found at some time."""

    topics: Mapping[str, TopicInfo]
    led: Mapping[LinkPartition, PreparedTopic | None]


class Connection:
    """The other side: has every topic that it is asked for, led by broker 9, but for those that it refuses."""

    def __init__(self) -> None:
        self.asked: list[calls.PrepareTopics] = []
        self.refused: set[str] = set()

    async def call(self, question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
        self.asked.append(question)
        return calls.PrepareTopicsAnswer(
            {
                each.topic: calls.PreparedTopic(False, None, "REFUSED", "it is")
                if each.topic in self.refused
                else calls.PreparedTopic(
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
            successions={},
            sync_records={},
            level=0,
            predecessors=lambda name, topic_id: (),
            links={},
        )
        self.link(mappings=(self.mapping("l-", "r-"),))
        control: Any = SimpleNamespace(state=self.state, anchors=FakeAnchors())
        context: Any = FakeContext(self.cluster, control, brokers=frozenset({1, 2}))
        self.context = context
        peers: Any = SimpleNamespace(connections=lambda link_name: [self.connection])
        self.looks: list[Look] = []
        self.looked = asyncio.Event()
        self.all_pushed = False
        self.prepared: list[LinkPartition] = []
        """That may be pushed by now, without another whole look."""
        self.discovery = Discovery(
            context, peers, self.found, self.note, lambda link_name, topic: False, lambda *begun: None
        )

    def link(self, **attached: Any) -> None:
        """What is attached from now on."""
        settings = LinkSettings(Register(LinkMode.ASYNCHRONOUS, ZERO), {}, {})
        self.state.links[LINK] = Link(LINK, "id", 1, "A", "B", True, settings, 0, **attached)

    async def whole_look(self) -> None:
        """Return right after a look at all topics."""
        self.looked.clear()
        self.discovery.wake()
        await self.looked.wait()

    def found(self, topics: Mapping[str, TopicInfo]) -> bool:
        self.looked.set()
        self.looks.append(Look(topics, dict(self.discovery.led)))
        return self.all_pushed

    def have_looks_take(self, busy_s: float) -> None:
        """Whole looks keep the process busy for so long from now on."""
        took_s, clock = [0.0], self.context.clock
        self.context.clock = SimpleNamespace(monotonic=lambda: clock.monotonic() + sum(took_s))

        def long_found(topics: Mapping[str, TopicInfo]) -> bool:
            took_s.append(busy_s)
            return self.found(topics)

        self.discovery._found = long_found

    def note(self, keys: Collection[LinkPartition]) -> None:
        self.prepared += keys

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


@pytest.mark.parametrize("api_key", [ApiKey.CREATE_TOPICS, ApiKey.CREATE_PARTITIONS])
def test_what_a_client_makes_is_found_at_once(api_key: ApiKey) -> None:
    async def work(scene: Scene) -> None:
        scene.all_pushed = True
        await asyncio.sleep(SOON_S + DISCOVERY_INTERVAL_S / 2)
        (hook,) = [each for each in scene.discovery.hooks() if each.api_key == api_key]
        request = Request(b"request", True, api_key, 7, 1, 0.0, Client(1, "here:1", 1, "PLAINTEXT"))

        async def make(name: str | None) -> None:
            verdict = hook.on_request(request)
            assert isinstance(verdict, Replace)
            assert verdict.frame == b"request"
            assert verdict.on_response is not None
            if name is not None:
                scene.add(name, 1)
            assert verdict.on_response(b"answer") == b"answer"

        await make("l-t")
        await asyncio.sleep(MADE_S + 0.01)
        assert ("l-t", 0) in scene.led
        await asyncio.sleep(SOON_S)
        whole, looks = len(scene.looks), scene.discovery.looks
        for _ in range(40):  # nothing came of them
            await make(None)
            await asyncio.sleep(MADE_S)
        assert len(scene.looks) <= whole + 1
        assert 4 <= scene.discovery.looks - looks <= 12, "as many again at most as are due anyhow"
        scene.state.links.clear()
        assert hook.on_request(request) is None

    on_scene(work)


def test_a_topic_without_any_leader_is_told_of_by_a_proxy_that_fronts_all_brokers() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", -1)
        await asyncio.sleep(SOON_S)
        assert scene.led == {}
        scene.context.fronted_brokers = None
        await asyncio.sleep(SETTLED_S + SOON_S)
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
        await asyncio.sleep(SETTLED_S + SOON_S)
        assert scene.led == {(OFFSETS_TOPIC, 0): copy}

    on_scene(work)


def test_what_is_truncated_itself_waits_and_its_target_is_asked_for_nothing() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", 1, 3)
        await asyncio.sleep(SOON_S)
        scene.state.truncations = {"l-t": object(), "l-not-there-now": object()}
        scene.connection.asked.clear()
        await asyncio.sleep(SOON_S)
        (told,) = scene.discovery.led.values()
        assert told is not None
        assert (told.ready, told.code) == (False, ReasonCode.SOURCE_TRUNCATING)
        assert scene.connection.asked[-1] == calls.PrepareTopics(
            (), ("l-not-there-now", "l-t"), ("l-not-there-now", "l-t")
        )
        scene.state.truncations = {}
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


# ---- many topics ----


@pytest.mark.parametrize("meanwhile", ["nothing", "lease", "truncated", "detached", "deleted"])
def test_what_a_target_says_counts_without_another_look(meanwhile: str) -> None:
    """Among thousands of topics a look takes long, and the next one comes late."""

    async def work(scene: Scene) -> None:
        answered = asyncio.Event()
        told = scene.connection.call

        async def call(question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
            await answered.wait()
            return await told(question, timeout_s)

        scene.connection.call = call  # type: ignore[method-assign]
        scene.add("l-t", 1, 3, 2)
        await asyncio.sleep(SOON_S)
        assert scene.led == {("l-t", 0): None, ("l-t", 2): None}
        if meanwhile == "lease":
            scene.context.lease_deadline = 0.0
        elif meanwhile == "truncated":
            scene.state.truncations["l-t"] = object()
        elif meanwhile == "detached":
            scene.link()
        elif meanwhile == "deleted":
            scene.discovery.topics = {}
        answered.set()
        scene.prepared.clear()
        looks = len(scene.looks)
        await asyncio.sleep(0.01)
        assert len(scene.looks) == looks
        prepared = [key.place for key in scene.prepared]
        assert prepared == ([("l-t", 0), ("l-t", 2)] if meanwhile == "nothing" else [])
        assert scene.led[("l-t", 0)] == ("r-t" if meanwhile == "nothing" else None)

    on_scene(work)


@pytest.mark.parametrize("all_pushed", [True, False])
@pytest.mark.parametrize("what", ["nothing", "another state", "topics", "links", "woken", "a stream", "lease"])
def test_nothing_is_looked_at_whole_until_something_has_changed(what: str, all_pushed: bool) -> None:
    """Among thousands of topics that take a minute to be made, most looks find all as it was."""

    async def work(scene: Scene) -> None:
        scene.add("l-t", 1)
        await asyncio.sleep(2 * SETTLED_S)
        scene.all_pushed = all_pushed
        scene.discovery.control_changed(scene.state)
        scene.discovery.wake()
        await asyncio.sleep(DISCOVERY_INTERVAL_S / 4)
        scene.prepared.clear()
        whole, looks = len(scene.looks), scene.discovery.looks
        if what == "topics":
            scene.add("l-u", 1)
        elif what == "another state":
            scene.context.control.state = scene.state = copy(scene.state)
            scene.discovery.control_changed(scene.state)
        elif what == "links":
            scene.context.control.state = scene.state = copy(scene.state)
            scene.state.links = dict(scene.state.links)
            scene.discovery.control_changed(scene.state)
        elif what == "woken":
            scene.discovery.wake()
        elif what == "a stream":
            scene.discovery.unsettle()
        elif what == "lease":
            scene.context.lease_deadline = 0.0
        await asyncio.sleep(1.5 * DISCOVERY_INTERVAL_S)
        assert scene.discovery.looks > looks or what == "lease"
        assert (len(scene.looks) > whole) == (what not in ("nothing", "another state"))
        may_be_pushed = {LinkPartition(LINK, "l-t", 0)} if what in ("nothing", "another state") else set()
        assert set(scene.prepared) >= (set() if all_pushed else may_be_pushed), "it is tried again"
        scene.context.lease_deadline = float("inf")
        await asyncio.sleep(1.5 * DISCOVERY_INTERVAL_S)
        assert scene.led.keys() >= {("l-t", 0)}, "led again"
        await asyncio.sleep(SETTLED_S + DISCOVERY_INTERVAL_S)
        assert len(scene.looks) > whole, "from time to time it is"

    on_scene(work)


def test_whole_looks_come_less_often_where_they_take_long() -> None:
    async def work(scene: Scene) -> None:
        scene.have_looks_take(SETTLED_MAX_S * SETTLED_SHARE)
        scene.all_pushed = True
        scene.add("l-t", 1)
        await asyncio.sleep(SOON_S)
        whole, looks = len(scene.looks), scene.discovery.looks
        for _ in range(int(2 * SETTLED_MAX_S / NEW_SAID_S)):
            scene.connection.asked.clear()
            await asyncio.sleep(NEW_SAID_S)
            assert scene.connection.asked, "the target is told of its topics as often as it expects"
        assert 1 <= len(scene.looks) - whole <= 2
        assert scene.discovery.looks - looks > SETTLED_MAX_S, "topics are read all the same"
        scene.add("l-u", 1)
        await asyncio.sleep(SOON_S)
        assert ("l-u", 0) in scene.led

    on_scene(work)


def test_many_topics_are_asked_for_some_at_a_time_and_those_that_are_there_are_pushed_meanwhile() -> None:
    async def work(scene: Scene) -> None:
        answered = asyncio.Event()
        told = scene.connection.call

        async def call(question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
            answer = await told(question, timeout_s)
            if len(scene.connection.asked) > 1:
                await answered.wait()
            return answer

        scene.connection.call = call  # type: ignore[method-assign]
        for number in range(350):
            scene.add(f"l-{number}", 1)
        described = scene.cluster.effective_configs
        asked_of_brokers: list[int] = []

        async def effective(topics: Sequence[str], known: bytes | None = None) -> Any:
            asked_of_brokers.append(len(topics))
            return await described(topics, known)

        scene.cluster.effective_configs = effective  # type: ignore[method-assign]
        await asyncio.sleep(SOON_S)
        assert list(scene.led.values()).count(None) == 250, "the first ones are pushed"
        answered.set()
        await asyncio.sleep(SOON_S)
        assert None not in scene.led.values()
        assert sorted(len(asked.topics) for asked in scene.connection.asked)[:4] == [50, 100, 100, 100]
        assert len(scene.connection.asked) <= 5, "each once, and maybe all again after a while"
        assert all(len(asked.all) == 350 for asked in scene.connection.asked), "none was deleted"
        assert sum(asked_of_brokers) <= 3 * 350, "settings are read of many in a request"
        assert len(asked_of_brokers) <= 20

    on_scene(work)


def test_new_topics_do_not_wait_for_looks_at_all_others_which_take_long() -> None:
    async def work(scene: Scene) -> None:
        scene.have_looks_take(REST_MAX_S * LOOKS_SHARE)
        scene.add("l-t", 1)
        await asyncio.sleep(5 * REST_MAX_S)
        for number in range(20):
            scene.discovery.wake()
            await asyncio.sleep(number * REST_MAX_S / 10)  # whenever it comes
            scene.add(f"l-{number}", 1, 3)
            scene.add(f"other-{number}", 1)
            asked = len(scene.connection.asked)
            await asyncio.sleep(DISCOVERY_INTERVAL_S + 0.01)
            assert scene.led[f"l-{number}", 0] == f"r-{number}", "found, asked for and answered"
            assert scene.discovery.new_for_s(LinkPartition(LINK, f"l-{number}", 0)) is not None
            assert scene.discovery.leaders[f"l-{number}", 1] == 3
            assert f"l-{number}" in scene.connection.asked[-1].all
            assert len(scene.connection.asked) > asked
        whole = len(scene.looks)
        for number in range(100):
            scene.add(f"l-more-{number}", 1)
            await asyncio.sleep(REST_MAX_S / 10)
        assert len(scene.looks) - whole <= 11, "as they may"
        await asyncio.sleep(REST_MAX_S + DISCOVERY_INTERVAL_S)
        assert list(scene.looks[-1].topics) == list(scene.cluster.found)
        assert {place[0] for place in scene.led} == {name for name in scene.cluster.found if name.startswith("l-")}

    on_scene(work)


def test_what_has_changed_while_looks_rest_is_found_when_they_may_come_again_and_not_later() -> None:
    async def work(scene: Scene) -> None:
        scene.have_looks_take(REST_MAX_S * LOOKS_SHARE)
        scene.add("l-t", 1)
        await asyncio.sleep(5 * REST_MAX_S)
        for number in range(10):
            await asyncio.sleep(number * REST_MAX_S / 7)
            await scene.whole_look()  # looks rest from then on
            await asyncio.sleep(number * REST_MAX_S / 20)
            looks = scene.discovery.looks
            scene.cluster.found["l-t"].partitions[0].leader = leader = 2 - number % 2
            scene.add(f"l-{number}", 1)
            await asyncio.sleep((1 - number / 20) * REST_MAX_S - 0.01)
            assert ("l-t", 0) in scene.led
            assert scene.discovery.leaders["l-t", 0] != leader
            assert (f"l-{number}", 0) not in scene.led, "what is new comes with what has changed"
            assert scene.discovery.looks - looks <= 1
            await asyncio.sleep(0.1)
            assert scene.discovery.leaders["l-t", 0] == leader
            assert (f"l-{number}", 0) in scene.led

    on_scene(work)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_led_is_always_of_the_topics_that_a_look_has_shown(seed: int) -> None:
    """Whoever goes by the number of looks has seen each topic of which something is to be pushed."""

    async def work(scene: Scene) -> None:
        rng, kept = random.Random(seed), frozenset[str]()
        scene.have_looks_take(REST_MAX_S * LOOKS_SHARE * (seed % 3) / 2)
        scene.discovery.wake()
        looks, topics = -1, scene.discovery.topics
        for number in range(1500):
            what, some = rng.random(), sorted(scene.cluster.found)
            if what < 0.03:
                scene.add(f"l-{number}", rng.choice([-1, 1, 2, 3]))
            elif what < 0.04 and some:
                del scene.cluster.found[rng.choice(some)]
            elif what < 0.05 and some:
                scene.cluster.found[rng.choice(some)].partitions[0].leader = rng.choice([-1, 1, 2, 3])
            elif what < 0.06:
                scene.discovery.wake()
            elif what < 0.065:
                scene.context.lease_deadline = 0.0
            elif what < 0.07:
                scene.link()
            elif what < 0.1:
                scene.context.lease_deadline = float("inf")
            elif what < 0.13 and not scene.state.links[LINK].mappings:
                scene.link(mappings=(scene.mapping("l-", "r-"),))
            await asyncio.sleep(rng.uniform(0, 0.05))
            discovery, led = scene.discovery, frozenset(topic for topic, _ in scene.led)
            assert led <= discovery.topics.keys()
            if discovery.looks == looks:
                assert discovery.topics is topics
                assert led in (kept, frozenset()), "none without a look; all go with the lease or the namespace"
            looks, topics, kept = discovery.looks, discovery.topics, led
        scene.context.lease_deadline = float("inf")
        scene.link(mappings=(scene.mapping("l-", "r-"),))
        scene.discovery.wake()
        await asyncio.sleep(3 * REST_MAX_S)
        assert looks > 20
        led_by = {topic: info for topic, info in scene.cluster.found.items() if info.partitions[0].leader in (1, 2)}
        assert {topic for topic, _ in scene.led} == led_by.keys()

    on_scene(work)


@pytest.mark.parametrize("name", ["l-{}", "elsewhere-{}"])
@pytest.mark.parametrize("takes_s", [0.0, REST_MAX_S * LOOKS_SHARE])
def test_topics_that_come_again_and_again_do_not_delay_what_targets_are_asked_of_all(name: str, takes_s: float) -> None:
    async def work(scene: Scene) -> None:
        scene.have_looks_take(takes_s)
        scene.all_pushed = True
        scene.add("l-t", 1)
        asked_at = [0.0]
        told = scene.connection.call

        async def call(question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
            if any(each.topic == "l-t" for each in question.topics):
                asked_at.append(asyncio.get_running_loop().time())
            return await told(question, timeout_s)

        scene.connection.call = call  # type: ignore[method-assign]
        asked_at[0] = asyncio.get_running_loop().time()
        for number in range(600):
            scene.add(name.format(number), 1)
            await asyncio.sleep(0.1)
        gaps = [later - before for before, later in pairwise(asked_at)]
        assert max(gaps) < NEW_SAID_S, "so long counts there what was said"
        assert len(gaps) >= 8

    on_scene(work)


def test_topics_that_come_again_and_again_do_not_delay_those_that_are_not_ready() -> None:
    async def work(scene: Scene) -> None:
        scene.connection.refused.add("l-refused")
        scene.add("l-refused", 1)
        await asyncio.sleep(SOON_S)
        scene.connection.asked.clear()
        for number in range(100):
            scene.add(f"l-{number}", 1)
            await asyncio.sleep(0.1)
        asked = [each.topic for asked in scene.connection.asked for each in asked.topics]
        assert asked.count("l-refused") >= 10

    on_scene(work)


def test_new_topics_of_which_calls_fail_do_not_delay_what_is_asked_of_all() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", 1)
        await asyncio.sleep(SOON_S)
        told = scene.connection.call

        async def call(question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
            if any(each.topic.startswith("l-new") for each in question.topics):
                raise TimeoutError
            return await told(question, timeout_s)

        scene.connection.call = call  # type: ignore[method-assign]
        scene.connection.asked.clear()
        for number in range(150):
            scene.add(f"l-new-{number}", 1)
            if number % 5 == 4:
                for name in [name for name in scene.cluster.found if name.startswith("l-new")]:
                    del scene.cluster.found[name]
            await asyncio.sleep(0.2)
        asked = [each.topic for asked in scene.connection.asked for each in asked.topics]
        assert asked.count("l-t") >= 30 / NEW_SAID_S

    on_scene(work)


def test_who_waits_for_a_look_while_topics_cannot_be_read_does_not_have_them_read_all_the_time() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", 1)
        await asyncio.sleep(SOON_S)
        topics, read = scene.cluster.topics, 0

        async def unavailable() -> Mapping[str, TopicInfo]:
            nonlocal read
            read += 1
            raise BrokerUnavailable("not now")

        scene.cluster.topics = unavailable  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scene.discovery.look_again(), 10 * DISCOVERY_INTERVAL_S)
        assert 8 <= read <= 12
        scene.cluster.topics = topics  # type: ignore[method-assign]
        await asyncio.wait_for(scene.discovery.look_again(), SOON_S)

    on_scene(work)


def test_who_waits_for_a_look_that_cannot_come_keeps_nobody_else_waiting() -> None:
    async def work(scene: Scene) -> None:
        scene.add("l-t", 1)
        await asyncio.sleep(SOON_S)
        scene.context.lease_deadline = 0.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scene.discovery.look_again(), SOON_S)
        scene.context.lease_deadline = float("inf")
        await asyncio.wait_for(scene.discovery.look_again(), SOON_S)
        assert scene.led == {("l-t", 0): "r-t"}

    on_scene(work)


@pytest.mark.parametrize("meanwhile", ["lease", "detached", "attached", "truncated"])
def test_what_is_new_while_looks_rest_is_pushed_as_a_look_would_have_it(meanwhile: str) -> None:
    async def work(scene: Scene) -> None:
        scene.have_looks_take(REST_MAX_S * LOOKS_SHARE)
        scene.add("l-t", 1)
        await asyncio.sleep(5 * REST_MAX_S)
        await scene.whole_look()  # looks rest from then on
        if meanwhile == "lease":
            scene.context.lease_deadline = 0.0
        elif meanwhile == "detached":
            scene.link()
        elif meanwhile == "attached":
            scene.link(mappings=(scene.mapping("l-", "r-"), scene.mapping("m-", "n-")))
        else:
            scene.state.truncations["l-new"] = object()
        scene.add("l-new", 1)
        scene.add("m-new", 1)
        scene.connection.asked.clear()
        await asyncio.sleep(DISCOVERY_INTERVAL_S + 0.01)
        led = scene.led
        assert ("m-new", 0) not in led, "namespaces that come wait for the next look"
        assert (("l-new", 0) in led) == (meanwhile == "truncated"), "the list of all would lack some"
        asked = {each.topic for asked in scene.connection.asked for each in asked.topics}
        assert "l-new" not in asked
        scene.context.lease_deadline = float("inf")
        scene.discovery.wake()
        await asyncio.sleep(2 * REST_MAX_S)
        names = {"detached": set[str](), "attached": {"l-t", "l-new", "m-new"}}.get(meanwhile, {"l-t", "l-new"})
        assert {name for name, _ in scene.led} == names
        assert set(scene.looks[-1].led) == set(scene.discovery.led), "a look at all finds the same"

    on_scene(work)


def test_a_new_topic_is_asked_for_without_all_others() -> None:
    async def work(scene: Scene) -> None:
        for number in range(350):
            scene.add(f"l-{number}", 1)
        await asyncio.sleep(2 * PREPARE_INTERVAL_S)
        scene.connection.asked.clear()
        scene.add("l-new", 1)
        await asyncio.sleep(DISCOVERY_INTERVAL_S + 0.1)
        asked = next(asked for asked in scene.connection.asked if any(each.topic == "l-new" for each in asked.topics))
        assert [each.topic for each in asked.topics] == ["l-new"]
        assert scene.led["l-new", 0] == "r-new"
        scene.connection.asked.clear()
        await asyncio.sleep(2 * PREPARE_INTERVAL_S)
        assert {each.topic for asked in scene.connection.asked for each in asked.topics} == scene.cluster.found.keys()
        assert len(scene.connection.asked) <= 3, "all others in one call, now and then"

    on_scene(work)


def test_a_new_topic_does_not_wait_for_the_answer_about_all_others() -> None:
    async def work(scene: Scene) -> None:
        for number in range(20):
            scene.add(f"l-{number}", 1)
        await asyncio.sleep(SOON_S)
        answered, told = asyncio.Event(), scene.connection.call

        async def call(question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
            answer = await told(question, timeout_s)
            if len(question.topics) == 20:
                await answered.wait()
            return answer

        scene.connection.call = call  # type: ignore[method-assign]
        await asyncio.sleep(2 * PREPARE_INTERVAL_S)
        scene.connection.asked.clear()
        scene.add("l-new", 1)
        await scene.cluster.create_partitions("l-0", 2)
        scene.cluster.found["l-0"].partitions[1].leader = 2
        await asyncio.sleep(SOON_S)
        assert {each.topic for asked in scene.connection.asked for each in asked.topics} == {"l-new", "l-0"}
        assert scene.led["l-new", 0] == "r-new"
        leaders = scene.discovery.led[LinkPartition(LINK, "l-0", 1)].leaders  # type: ignore[union-attr]
        assert leaders == (9, 9)
        answered.set()
        await asyncio.sleep(0.1)
        leaders = scene.discovery.led[LinkPartition(LINK, "l-0", 1)].leaders  # type: ignore[union-attr]
        assert leaders == (9, 9), "what was asked before says nothing of it"

    on_scene(work)


def test_a_list_of_all_topics_that_is_sent_later_lacks_none_that_one_before_had() -> None:
    """The target forgets topics that its source does not have any more."""

    async def work(scene: Scene) -> None:
        told, ends, read, waited = scene.connection.call, scene.cluster.log_ends, asyncio.Event(), False

        async def call(question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
            answer = await told(question, timeout_s)
            filled = answer.topics.get("l-t")
            if filled is None or filled.made is None:
                return answer
            return calls.PrepareTopicsAnswer({**answer.topics, "l-t": replace(filled, made=calls.ReadyTopic("r-t", 1))})

        async def late_ends(places: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
            nonlocal waited
            if not waited:
                waited = True
                await read.wait()
            return await ends(places)

        scene.connection.call = call  # type: ignore[method-assign]
        scene.add("l-t", 1)
        scene.cluster.found["l-t"].configs["cleanup.policy"] = "compact"
        await asyncio.sleep(SOON_S)
        scene.cluster.log_ends = late_ends  # type: ignore[method-assign]
        await asyncio.sleep(2 * PREPARE_INTERVAL_S)
        scene.connection.asked.clear()
        scene.add("l-new", 1)
        await asyncio.sleep(SOON_S)
        assert waited
        assert ("l-new", 0) in scene.led
        before = len(scene.connection.asked)
        read.set()
        await asyncio.sleep(0.01)
        later = scene.connection.asked[before:]
        assert "l-t" in {each.topic for asked in later for each in asked.topics}
        assert [asked.all for asked in later] == [("l-new", "l-t")] * len(later)

    on_scene(work)


def test_a_topic_that_is_not_ready_is_asked_for_again_without_all_others() -> None:
    async def work(scene: Scene) -> None:
        scene.connection.refused.add("l-refused")
        for number in range(20):
            scene.add(f"l-{number}", 1)
        scene.add("l-refused", 1)
        await asyncio.sleep(2 * PREPARE_INTERVAL_S)
        scene.connection.asked.clear()
        await asyncio.sleep(PREPARE_INTERVAL_S)
        again = [asked for asked in scene.connection.asked if [each.topic for each in asked.topics] == ["l-refused"]]
        assert len(again) >= 3
        assert len(scene.connection.asked) - len(again) <= 2
        assert all(len(asked.all) == 21 for asked in again)
        scene.connection.refused.clear()
        await asyncio.sleep(SOON_S)
        assert scene.led["l-refused", 0] == "r-refused"

    on_scene(work)


def test_a_topic_whose_leaders_are_not_known_there_yet_is_asked_for_again_soon() -> None:
    async def work(scene: Scene) -> None:
        told, leaders = scene.connection.call, (9, -1)

        async def call(question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
            answer = await told(question, timeout_s)
            return calls.PrepareTopicsAnswer(
                {name: replace(each, leaders=leaders) for name, each in answer.topics.items()}
            )

        scene.connection.call = call  # type: ignore[method-assign]
        scene.add("l-t", 1, 1)
        await asyncio.sleep(SOON_S)
        leaders = (9, 9)
        await asyncio.sleep(SOON_S)
        assert SOON_S < PREPARE_INTERVAL_S
        (found,) = set(scene.discovery.led.values())
        assert found is not None
        assert found.leaders == (9, 9)

    on_scene(work)


def test_who_was_not_answered_asks_again_a_moment_later() -> None:
    async def work(scene: Scene) -> None:
        told, failures = scene.connection.call, 0

        async def call(question: calls.PrepareTopics, timeout_s: float) -> calls.PrepareTopicsAnswer:
            nonlocal failures
            if failures < 3:
                failures += 1
                raise TimeoutError
            return await told(question, timeout_s)

        scene.connection.call = call  # type: ignore[method-assign]
        scene.add("l-t", 1)
        await asyncio.sleep(1.0)
        assert failures <= 3, "not without a pause"
        await asyncio.sleep(2.0)
        assert scene.led == {("l-t", 0): "r-t"}

    on_scene(work)
