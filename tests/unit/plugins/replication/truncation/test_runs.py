"""Which truncations a proxy begins, carries out, takes over and leaves, on a model cluster and a simulated clock."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from support.fake_cluster import run_simulated, simulated_now
from support.peers import CalledAtOnce
from support.replicas import INDEX, LINK, Peers
from support.truncating import OTHER, SOURCE, SOURCE_ID, TOPIC, FollowedTopic

from isthmus_control.commands import (
    BeginTruncation,
    Body,
    DetachNamespace,
    ReleaseLease,
    SetFollowerTopic,
    SetOffsetsTopic,
    TakeOverTruncation,
)
from isthmus_control.model import OffsetsCopy, OffsetsForm, Reason, ResourceType, Role, TopicState
from isthmus_control.outcome import Outcome
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import PartitionView, Succession, Truncation, TruncationPhase
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.log import FollowerLog, Numbering, StopReason
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions
from isthmus_plugins.replication.follower.replicas import FollowerReplicas
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.connection import LinkLost, LinkRejected
from isthmus_plugins.replication.logs.topic_settings import FROZEN, MESSAGE_BYTES_MAX
from isthmus_plugins.replication.traffic import Traffic
from isthmus_plugins.replication.truncation.ownership import HeldUp
from isthmus_plugins.replication.truncation.runs import (
    HELD_UP_RETRY_S,
    LOOK_INTERVAL_S,
    RETRY_S,
    SHOWN_AFTER,
    Truncations,
)
from isthmus_plugins.replication.truncation.spool import SpoolDamaged
from isthmus_plugins.replication.truncation.steps import TruncationSteps
from isthmus_protocol.offsets_copy import COPY_PREFIX
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

P = TruncationPhase
LATER_S = 20.0
"""When whatever is going to happen has happened."""
SUCCESSOR = str(uuid.UUID(int=11, version=4))


class Steps(TruncationSteps):
    """Meets troubles before it does anything. What is to be compared, nobody ever compares."""

    def __init__(self, context: Any) -> None:
        unused: Any = None
        super().__init__(context, unused, unused, unused, unused, unused, unused)
        self.troubles: list[Exception] = []
        self.seen: list[tuple[TruncationPhase, float]] = []
        self.on_step: Callable[[], Awaitable[Any]] = asyncio.Event().wait
        """What comes before it does what it does."""

    async def carry_out(self, truncation: Truncation) -> None:
        self.seen.append((truncation.phase, simulated_now()))
        if self.troubles:
            raise self.troubles.pop(0)
        await self.on_step()
        await super().carry_out(truncation)


async def at_once() -> None:
    """Nothing comes before a step."""


class Streams(FollowerEnd):
    """A follower end whose streams are the test's."""

    def __init__(self, context: Any) -> None:
        super().__init__(context, Traffic())
        self.found: list[FollowerStream] = []

    def streams(self) -> list[FollowerStream]:
        return self.found


class Proxy:
    """One process: what it sees of streams, links and sources, and the truncations that it carries out."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.context = scene.context(name)
        self.peers: Any = Peers(self.context)
        self.follower_end = Streams(self.context)
        self.topics = FollowerTopics(self.context, FollowerReplicas(self.context), OwnTransactions(self.context))
        self.steps = Steps(self.context)
        self.truncations = Truncations(self.context, self.peers, self.follower_end, self.topics, self.steps)

    async def has_begun(self, steps: int) -> None:
        """Wait until it has."""
        deadline = simulated_now() + LATER_S
        while len(self.steps.seen) < steps:
            assert simulated_now() < deadline
            await asyncio.sleep(0.01)

    def connect(self) -> None:
        self.peers.live.append(CalledAtOnce(LINK, ()))

    def diverged(self, topic_id: str, topic: str = TOPIC) -> FollowerStream:
        """Partition 1 has ended since somebody wrote it."""
        stream = self.stream(topic_id, topic)
        stream.follower_log.diverge("the log ends at 13")
        return stream

    def stream(self, topic_id: str, topic: str = TOPIC) -> FollowerStream:
        unused: Any = None
        peer: Any = CalledAtOnce(LINK, ())
        follower_log = FollowerLog(Numbering(INDEX["A"], INDEX["B"]))
        stream = FollowerStream(peer, 1, topic, topic_id, SOURCE, 1, 1, follower_log, unused, self.context.clock)
        self.follower_end.found.append(stream)
        return stream


class Scene(FollowedTopic):
    """A topic of two partitions that follows, and the proxies of its cluster."""

    def __init__(self) -> None:
        super().__init__(2)
        self.proxies: list[Proxy] = []

    def proxy(self, name: str = "p") -> Proxy:
        """One that has begun to look."""
        self.proxies.append(proxy := Proxy(self, name))
        proxy.truncations.start()
        return proxy

    @property
    def begun(self) -> list[BeginTruncation]:
        return [body for body in self.control.commands if isinstance(body, BeginTruncation)]

    @property
    def over(self) -> bool:
        return not self.control.state.truncations


def on_scene(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        await work(scene)
        for proxy in scene.proxies:
            await proxy.truncations.stop()

    run_simulated(run())


@pytest.fixture(autouse=True)
def no_task_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """It is begun again a moment later, so nobody would notice."""
    yield
    assert not [record.exc_text for record in caplog.get_records("call") if record.getMessage() == "task failed"]


# ---- which ones begin ----


@pytest.mark.parametrize("tried_again", [False, True])
def test_a_topic_that_diverged_is_truncated_once_its_link_is_connected(tried_again: bool) -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        stream = proxy.diverged(scene.topic_id)
        if tried_again:
            proxy.follower_end.found.remove(stream)
            proxy.stream(scene.topic_id).held = stream.reason
        await asyncio.sleep(LATER_S)
        assert scene.over, "without the source nobody knows what is to be cut"
        proxy.connect()
        await asyncio.sleep(LATER_S)
        why = Reason(ReasonCode.TARGET_WRITTEN_BY_OTHERS, "partition 1: the log ends at 13")
        owner = proxy.context.incarnation
        views = (PartitionView(1, 0),) * 2
        assert scene.begun == [BeginTruncation(LINK, TOPIC, scene.topic_id, why, views, None, "p", owner)]
        assert [phase for phase, _ in proxy.steps.seen] == [P.COMPARING]

    on_scene(work)


def test_what_is_no_divergence_begins_nothing() -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.connect()
        proxy.stream(scene.topic_id)
        proxy.stream(scene.topic_id).follower_log.stop(StopReason(reasons.MOVED, "it is led by broker 2 now"))
        await asyncio.sleep(LATER_S)
        assert not scene.begun

    on_scene(work)


def test_a_copy_of_an_offsets_topic_is_never_truncated() -> None:
    """Nothing of the source's can be compared with it: the operator has it made anew."""

    async def work(scene: Scene) -> None:
        copy = COPY_PREFIX + "A"
        topic_id = str(uuid.UUID(bytes=scene.cluster.add_topic(copy, 2).topic_id))
        scene.apply(SetOffsetsTopic(LINK, Role.FOLLOWER, OffsetsCopy(OffsetsForm.WHOLE)))
        scene.apply(SetFollowerTopic(LINK, copy, OFFSETS_TOPIC, SOURCE_ID, TopicState.FOLLOWING, topic_id))
        proxy = scene.proxy()
        proxy.connect()
        proxy.diverged(topic_id, copy)
        await asyncio.sleep(LATER_S)
        assert not scene.begun

    on_scene(work)


@pytest.mark.parametrize("since", ["another id", "made anew", "detached"])
def test_what_does_not_follow_as_it_did_is_not_truncated(since: str) -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.connect()
        proxy.diverged(OTHER if since == "another id" else scene.topic_id)
        if since == "made anew":
            scene.cluster.add_topic(TOPIC, 2)
        elif since == "detached":
            scene.apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
        await asyncio.sleep(LATER_S)
        assert not scene.begun

    on_scene(work)


@pytest.mark.parametrize("error", [BrokerUnavailable("no answer"), KafkaRefused(29, "NOT_YOURS", "ask somebody")])
def test_a_truncation_that_could_not_be_begun_is_begun_later(error: Exception) -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.connect()
        proxy.diverged(scene.topic_id)
        read = scene.cluster.topic_configs

        async def fail(topic: str) -> Mapping[str, tuple[str | None, str | None]]:
            scene.cluster.topic_configs = read  # type: ignore[method-assign]
            raise error

        scene.cluster.topic_configs = fail  # type: ignore[method-assign]
        await asyncio.sleep(LATER_S)
        assert len(scene.begun) == 1

    on_scene(work)


@pytest.mark.parametrize(("set_to", "own"), [("5000", "5000"), (FROZEN, None), (None, None)])
def test_what_a_topic_gets_back_at_the_end_is_recorded_and_never_that_it_is_frozen(
    set_to: str | None, own: str | None
) -> None:
    async def work(scene: Scene) -> None:
        if set_to is not None:
            scene.topic.configs[MESSAGE_BYTES_MAX] = set_to
        proxy = scene.proxy()
        proxy.connect()
        proxy.diverged(scene.topic_id)
        await asyncio.sleep(LATER_S)
        assert scene.now.message_bytes_max == own

    on_scene(work)


def test_a_source_that_was_truncated_has_what_follows_it_truncated_and_no_other_topic() -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.topics.succeeded = {
            TOPIC: Succession(SUCCESSOR, SOURCE_ID, (10, 10)),  # what follows its successor already
            "remote-gone": Succession(SOURCE_ID, SUCCESSOR, (10, 10)),
        }
        await asyncio.sleep(LATER_S)
        assert not scene.begun
        proxy.topics.succeeded[TOPIC] = succession = Succession(SOURCE_ID, SUCCESSOR, (10, 10))
        await asyncio.sleep(LATER_S)
        assert [(body.topic, body.source) for body in scene.begun] == [(TOPIC, succession)]
        assert scene.now.reason == Reason(ReasonCode.SOURCE_TRUNCATED, reasons.source_truncated(SOURCE, succession))

    on_scene(work)


def test_who_has_no_lease_begins_nothing_and_goes_on_with_nothing() -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.connect()
        proxy.diverged(scene.topic_id)
        proxy.context.lease_deadline = simulated_now() - 1
        await asyncio.sleep(LATER_S)
        assert not scene.begun
        proxy.context.lease_deadline = float("inf")
        proxy.steps.troubles = [BrokerUnavailable("no answer")]
        await proxy.has_begun(1)
        proxy.context.lease_deadline = simulated_now() - 1
        await asyncio.sleep(LATER_S)
        assert len(proxy.steps.seen) == 1
        proxy.context.lease_deadline = float("inf")
        await asyncio.sleep(LATER_S)
        assert len(proxy.steps.seen) == 2
        assert len(scene.begun) == 1

    on_scene(work)


# ---- whose they are ----


def test_a_process_that_was_killed_is_followed_by_one_that_goes_on_where_it_was() -> None:
    async def work(scene: Scene) -> None:
        killed = scene.proxy()
        scene.begin(killed.context.incarnation)
        scene.at(P.CLEANING)
        spool = scene.now.spool("1")
        scene.cluster.add_topic(spool)
        await killed.has_begun(1)
        await killed.truncations.stop()
        following = scene.proxy()
        following.steps.on_step = at_once
        await asyncio.sleep(LATER_S)
        assert scene.over
        assert spool not in scene.cluster.found
        assert [phase for phase, _ in following.steps.seen] == [P.CLEANING]
        assert (following.truncations.ended, following.truncations.records_cut) == ({LINK: 1}, {LINK: 6})
        assert not killed.truncations.ended, "each counts what it brought to its end"
        following.truncations.control_changed(scene.control.state)
        assert following.truncations.ended == {LINK: 1}
        following.truncations.control_changed(scene.control.state.evolve(links={}))
        assert not following.truncations.ended, "nobody asks of a link that is gone"
        assert not following.truncations.records_cut

    on_scene(work)


def test_a_truncation_that_is_cancelled_is_none_that_was_brought_to_its_end() -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.steps.on_step = at_once
        scene.topic.configs[MESSAGE_BYTES_MAX] = FROZEN
        scene.begin(proxy.context.incarnation)
        scene.apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
        await asyncio.sleep(LATER_S)
        assert scene.over
        assert MESSAGE_BYTES_MAX not in scene.topic.configs
        assert not proxy.truncations.ended
        assert not proxy.truncations.records_cut

    on_scene(work)


def test_of_those_who_find_the_owner_gone_one_goes_on() -> None:
    async def work(scene: Scene) -> None:
        scene.claim("q", OTHER, 1)
        scene.begin(OTHER, "q")
        scene.at(P.CLEANING)
        proxies = [scene.proxy(name) for name in ("p", "r")]
        for broker, proxy in enumerate(proxies, 2):
            scene.claim(proxy.context.proxy_name, proxy.context.incarnation, broker)
        await asyncio.sleep(LATER_S)
        assert not [proxy.steps.seen for proxy in proxies if proxy.steps.seen], "its lease may still run"
        scene.apply(ReleaseLease("q", OTHER))
        await asyncio.sleep(LATER_S)
        assert len([body for body in scene.control.commands if isinstance(body, TakeOverTruncation)]) == 2
        (owner,) = [proxy for proxy in proxies if proxy.steps.seen]
        assert scene.now.owner == owner.context.incarnation

    on_scene(work)


def test_who_is_taken_over_in_a_step_leaves_it() -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()

        async def slept() -> None:
            scene.claim("q", OTHER, 1)
            scene.take_over()

        proxy.steps.on_step = slept
        scene.begin(proxy.context.incarnation)
        scene.at(P.CLEANING)
        await asyncio.sleep(LATER_S)
        assert len(proxy.steps.seen) == 1
        assert (scene.now.owner, scene.now.phase, scene.now.trouble) == (OTHER, P.CLEANING, None)
        assert not proxy.truncations.ended

    on_scene(work)


# ---- what keeps them ----


HELD_UP = HeldUp(ReasonCode.SALVAGE_FAILED, "there is no room")
TRUNCATING = LinkRejected(ReasonCode.SOURCE_TRUNCATING, "wait for it")


@pytest.mark.parametrize(
    ("error", "shown_after", "every_s", "code", "message"),
    [
        (HELD_UP, 1, HELD_UP_RETRY_S, ReasonCode.SALVAGE_FAILED, "there is no room"),
        (TRUNCATING, 1, RETRY_S, ReasonCode.SOURCE_TRUNCATING, "wait for it"),
        (LinkRejected("SOME_CODE", "no"), SHOWN_AFTER, RETRY_S, reasons.BROKER_UNAVAILABLE, "no"),
        (LinkLost("gone"), SHOWN_AFTER, RETRY_S, reasons.BROKER_UNAVAILABLE, "gone"),
        (BrokerUnavailable("down"), SHOWN_AFTER, RETRY_S, reasons.BROKER_UNAVAILABLE, "down"),
        (TimeoutError(), SHOWN_AFTER, RETRY_S, reasons.BROKER_UNAVAILABLE, "TimeoutError"),
        (SpoolDamaged("out of order"), SHOWN_AFTER, RETRY_S, ReasonCode.SPOOL_LOST, "out of order"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_somebody_has_to_mend_is_shown_at_once_and_what_may_pass_when_it_has_not(
    error: Exception, shown_after: int, every_s: float, code: str, message: str
) -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.steps.on_step = at_once
        proxy.steps.troubles = [error] * SHOWN_AFTER
        shown: list[tuple[int, Reason | None]] = []
        scene.control.subscribe(lambda state: shown.append((len(proxy.steps.seen), trouble(scene))))
        scene.begin(proxy.context.incarnation)
        scene.at(P.CLEANING)
        await asyncio.sleep(LATER_S)
        first = next(each for each in shown if each[1] is not None)
        assert first == (shown_after, Reason(code, message))
        times = [at for _, at in proxy.steps.seen]
        assert len(times) == SHOWN_AFTER + 1
        waited = [later - earlier for earlier, later in pairwise(times)]
        assert all(every_s <= each < every_s + LOOK_INTERVAL_S for each in waited)
        assert scene.over, "it passed"
        assert scene.control.state.past_truncations[-1].trouble is None

    on_scene(work)


def trouble(scene: Scene) -> Reason | None:
    found = scene.control.state.truncations.get(TOPIC)
    return None if found is None else found.trouble


def test_trouble_that_cannot_be_told_keeps_nothing_from_going_on() -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.steps.on_step = at_once
        proxy.steps.troubles = [HELD_UP]
        scene.begin(proxy.context.incarnation)
        scene.at(P.CLEANING)
        append = scene.control.append

        async def lost(body: Body) -> Outcome:
            scene.control.append = append  # type: ignore[method-assign]
            raise BrokerUnavailable("the control log does not answer")

        scene.control.append = lost  # type: ignore[method-assign]
        await asyncio.sleep(LATER_S)
        assert scene.over
        assert proxy.truncations.ended == {LINK: 1}

    on_scene(work)


def test_a_spool_that_stays_damaged_is_lost_and_gone_on_without() -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.steps.on_step = at_once
        proxy.steps.troubles = [SpoolDamaged("gone")] * SHOWN_AFTER
        scene.begin(proxy.context.incarnation)
        scene.at(P.RESTORING)
        await asyncio.sleep(LATER_S)
        assert [phase for phase, _ in proxy.steps.seen] == [P.RESTORING] * SHOWN_AFTER + [P.CLEANING]
        (over,) = scene.control.state.past_truncations
        assert over.positions_lost

    on_scene(work)


def test_a_truncation_whose_end_was_recorded_but_not_answered_counts() -> None:
    async def work(scene: Scene) -> None:
        proxy = scene.proxy()
        proxy.steps.on_step = at_once
        scene.begin(proxy.context.incarnation)
        scene.at(P.CLEANING)
        append = scene.control.append

        async def unanswered(body: Body) -> Outcome:
            await append(body)
            raise BrokerUnavailable("the control log did not answer")

        scene.control.append = unanswered  # type: ignore[method-assign]
        await asyncio.sleep(LATER_S)
        assert scene.over
        assert proxy.truncations.ended == {LINK: 1}

    on_scene(work)
