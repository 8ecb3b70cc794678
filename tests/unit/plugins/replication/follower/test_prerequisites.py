"""What comes before a stream's next record: nothing is written until it is done, and it is tried again until it is.

Prerequisites by themselves, against a model cluster on a simulated clock; the test is the follower end that goes on.
"""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from support.fake_cluster import (
    LATE_MAX_S,
    FakeCluster,
    FakeContext,
    FakeControl,
    FakeProduceConnection,
    run_simulated,
    simulated_now,
)
from support.partition_log import Partition, batch
from support.peers import CalledAtOnce
from support.records import MIB, large_inside
from support.replicas import INDEX, LINK, Replicas, on_replicas

from isthmus_control.commands import (
    Body,
    CompactFollowerTopic,
    DetachNamespace,
    OpenProvenance,
    PartitionOffset,
    RecordSourceEpochs,
    SetFollowerTopic,
)
from isthmus_control.model import TRANSACTION_VERIFICATION, FollowerTopic, ResourceType, SourceEpoch, TopicState
from isthmus_control.outcome import Accepted, Outcome
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, ProducerState
from isthmus_plugins.replication.follower.log import Append, FollowerLog, LogState, Mark, Numbering, Step, StopReason
from isthmus_plugins.replication.follower.position import LOST_REQUEST_MARGIN_S
from isthmus_plugins.replication.follower.prerequisites import RETRY_S, Prerequisites
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.connection import LinkLost, LinkRejected
from isthmus_plugins.replication.logs.topic_settings import CLEANUP_POLICY, COMPACTED
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import Compression

TOPIC, SOURCE = "remote-t", "local-t"
SOURCE_ID = str(uuid.UUID(int=9, version=4))
PRODUCER = 7
NOT_ASKED_FOR = frozenset({Step.WRITE, Step.WAIT, Step.REPORT_END})
"""What is somebody else's to do."""
MOVED = StopReason(reasons.MOVED, "another proxy's from now on")


class Connected:
    """In the place of what appends."""

    alive_since = 0.0

    async def connect(self) -> None:
        pass


class Scene:
    """Partitions of a topic that follows, whose logs ask for something; nobody writes them."""

    def __init__(self, partitions: int) -> None:
        self.replicas = Replicas(random.Random(6), 2)
        self.replicas.a.add_topic(SOURCE, partitions)
        self.cluster: FakeCluster = self.replicas.b
        self.cluster.on_new_partition = lambda *made: None
        self.control: FakeControl = self.replicas.controls["B"]
        self.topic = self.cluster.add_topic(TOPIC, partitions)
        for partition in self.topic.partitions:
            partition.leader = 1
        self.topic_id = str(uuid.UUID(bytes=self.topic.topic_id))
        self.apply(SetFollowerTopic(LINK, TOPIC, SOURCE, SOURCE_ID, TopicState.FOLLOWING, self.topic_id))
        self.context: Any = FakeContext(self.cluster, self.control)
        self.failed: list[tuple[str, BaseException]] = []
        self.tasks = Tasks("test", self.context.supervision, lambda name, error: self.failed.append((name, error)))
        self.answers: list[Exception | Any] = []
        """What the leader end answers, one time after the other, to what it is asked of transactions."""
        self.peer: Any = CalledAtOnce(LINK, [calls.EndedTransactions.by(self._answer)])
        self.peer.lost = False
        self.went_on: list[tuple[int, Step]] = []
        """By partition: what was next when something was done, or could not be."""
        self.resumed: list[FollowerStream] = []
        self.prerequisites = Prerequisites(
            self.context,
            self.tasks,
            self.proceed,
            self.resumed.append,
            lambda topic, limits: self.raised.append((topic, limits)),
        )
        self.raised: list[Any] = []

    async def _answer(self, connection: object, question: calls.EndedTransactions) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def apply(self, body: Body) -> None:
        outcome = self.control.apply(body)
        assert isinstance(outcome, Accepted), outcome

    def provenance(self, *partitions: int) -> None:
        """These follow the source from their start."""
        at = tuple(PartitionOffset(TOPIC, self.topic_id, partition, 0) for partition in partitions)
        self.apply(OpenProvenance(LINK, at))

    @property
    def record(self) -> FollowerTopic:
        return self.control.state.follower_topics[TOPIC]

    def stream(self, partition: int = 0) -> FollowerStream:
        """One of which nothing is known yet, but the source's leader epoch."""
        follower_log = FollowerLog(Numbering(INDEX["A"], INDEX["B"], 1))
        follower_log.epoch = 0
        writers: Any = Connected()
        where = (TOPIC, self.topic_id, SOURCE, partition, 1)
        return FollowerStream(self.peer, partition, *where, follower_log, writers, self.context.clock)

    def proceed(self, stream: FollowerStream) -> None:
        """Have done what a stream's log asks for, as the follower end does."""
        step = stream.follower_log.next_step()
        self.went_on.append((stream.partition, step))
        if step not in NOT_ASKED_FOR:
            self.prerequisites.begin(stream, step)

    def begin(self, *streams: FollowerStream, step: Step) -> None:
        """Have it done: it is what their logs ask for."""
        for stream in streams:
            assert stream.follower_log.next_step() is step
            self.prerequisites.begin(stream, step)

    async def until(self, what: str, ready: Callable[[], Any]) -> float:
        """Wait; how long that was."""
        began = simulated_now()
        await self.replicas.until(what, ready)
        return simulated_now() - began

    async def told(self, stream: FollowerStream, why: str) -> StopReason:
        """Wait until it is told what keeps a stream, in these words among others."""
        await self.until(why, lambda: stream.trouble is not None and why in stream.trouble.message)
        assert stream.trouble is not None
        return stream.trouble

    async def went(self, *expected: tuple[int, Step]) -> float:
        """Wait until streams have gone on so often; each with what was expected."""
        took = await self.until("went on", lambda: len(self.went_on) >= len(expected))
        assert self.went_on == list(expected)
        return took


def on_scene(work: Callable[[Scene], Awaitable[None]], partitions: int = 1) -> None:
    async def run() -> None:
        scene = Scene(partitions)
        await work(scene)
        await scene.tasks.close()
        assert not scene.failed

    run_simulated(run())


# ---- the source's leader epochs ----


def test_nothing_is_written_before_its_leader_epoch_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        written: list[tuple[int, int]] = []
        watch = replicas.b.on_new_partition

        def made(topic: str, index: int, partition: Partition) -> None:
            watch(topic, index, partition)
            if topic != TOPIC:
                return
            check = partition.on_append

            def appended(target: Partition) -> None:
                check(target)
                written.append((target.end, replicas.controls["B"].state.source_epochs(TOPIC, 0)[-1].epoch))

            partition.on_append = appended

        replicas.b.on_new_partition = made
        source = replicas.a.add_topic(SOURCE).partitions[0]
        source.write_values(b"of epoch 0")
        source.move(1)
        source.write_values(b"of epoch 1", b"as well")
        source.move(1)
        source.move(1)
        source.write_values(b"of epoch 3")
        await replicas.until("copied", replicas.equal)
        assert written == [(1, 0), (3, 1), (4, 3)]
        epochs = (SourceEpoch(0, 0), SourceEpoch(1, 1), SourceEpoch(3, 3))
        assert replicas.controls["B"].state.source_epochs(TOPIC, 0) == epochs

    on_replicas(monkeypatch, work)


def of_a_new_epoch(scene: Scene, partition: int = 0) -> FollowerStream:
    """A stream with a batch whose leader epoch is to be recorded."""
    stream = scene.stream(partition)
    stream.follower_log.resume(0, 0, {})
    stream.follower_log.offer(memoryview(batch(0, [b"a"], leader_epoch=5)))
    return stream


def recorded(scene: Scene) -> list[list[int]]:
    """The partitions of each command that records epochs."""
    commands = [body for body in scene.control.commands if isinstance(body, RecordSourceEpochs)]
    return [[each.partition for each in body.epochs] for body in commands]


def test_epochs_that_are_due_at_once_are_one_command_and_what_comes_meanwhile_the_next() -> None:
    async def work(scene: Scene) -> None:
        scene.provenance(0, 1, 2)
        streams = [of_a_new_epoch(scene, partition) for partition in range(3)]
        scene.begin(*streams[:2], step=Step.RECORD_EPOCH)
        await asyncio.sleep(0.001)  # it is under way
        scene.begin(streams[2], step=Step.RECORD_EPOCH)
        await scene.went((0, Step.WRITE), (1, Step.WRITE), (2, Step.WRITE))
        assert recorded(scene) == [[0, 1], [2]]
        epochs = [scene.control.state.source_epochs(TOPIC, partition) for partition in range(3)]
        assert epochs == [(SourceEpoch(5, 0),)] * 3

    on_scene(work, 3)


def test_of_epochs_that_are_due_at_once_the_one_that_is_refused_stops_its_stream_alone() -> None:
    async def work(scene: Scene) -> None:
        scene.provenance(0, 2)
        streams = [of_a_new_epoch(scene, partition) for partition in range(3)]
        scene.begin(*streams, step=Step.RECORD_EPOCH)
        await scene.went((0, Step.WRITE), (1, Step.REPORT_END), (2, Step.WRITE))
        assert recorded(scene) == [[0, 1, 2], [0], [1], [2]]
        reason = StopReason(ReasonCode.INTERNAL_ERROR, f"{TOPIC}-1 follows nothing")
        assert [stream.reason for stream in streams] == [None, reason, None]

    on_scene(work, 3)


def test_an_epoch_of_which_nobody_knows_whether_it_is_recorded_is_recorded_again() -> None:
    async def work(scene: Scene) -> None:
        scene.provenance(0, 1)
        append, lost = scene.control.append, ["the first answer"]

        async def lose(body: Body) -> Outcome:
            outcome = await append(body)
            if lost:
                raise BrokerUnavailable(f"{lost.pop()} was lost")
            return outcome

        scene.control.append = lose  # type: ignore[method-assign]
        stream, ended = of_a_new_epoch(scene), of_a_new_epoch(scene, 1)
        scene.begin(stream, ended, step=Step.RECORD_EPOCH)
        await scene.until("the answer is lost", lambda: not lost)
        assert stream.follower_log.take() is None
        ended.follower_log.stop(MOVED)
        assert await scene.went((0, Step.WRITE)) >= LOST_REQUEST_MARGIN_S
        assert recorded(scene) == [[0, 1], [0]], "of what has ended meanwhile nothing is due"
        assert scene.control.state.source_epochs(TOPIC, 0) == (SourceEpoch(5, 0),)
        assert ended.reason == MOVED

    on_scene(work, 2)


# ---- the position ----


def test_a_position_that_cannot_be_read_is_told_and_waited_for() -> None:
    async def work(scene: Scene) -> None:
        scene.topic.partitions[0].write_values(b"a", b"b")
        scene.cluster.down.add(1)
        stream = scene.stream()
        scene.begin(stream, step=Step.RESUME)
        assert (await scene.told(stream, "is down")).code == reasons.BROKER_UNAVAILABLE
        assert stream.follower_log.next_step() is Step.RESUME
        await asyncio.sleep(3 * LOST_REQUEST_MARGIN_S - 0.1)  # right before it is asked again
        assert not scene.went_on
        scene.cluster.down.clear()
        # What was in the broker's hands may land after it has answered something.
        asyncio.get_running_loop().call_later(LATE_MAX_S, scene.topic.partitions[0].produce, batch(0, [b"late"]))
        await scene.went((0, Step.WAIT))
        assert (stream.follower_log.state, stream.follower_log.end) == (LogState.WRITING, 3)
        assert stream.reason is None
        assert scene.resumed == [stream]

    on_scene(work)


@pytest.mark.parametrize(("leader", "told"), [(2, "is led by broker 2 now"), (-1, "has no leader now")])
def test_a_partition_that_is_somewhere_else_by_now_is_not_read_here(leader: int, told: str) -> None:
    async def work(scene: Scene) -> None:
        scene.topic.partitions[0].leader = leader
        stream = scene.stream()
        scene.begin(stream, step=Step.RESUME)
        await scene.went((0, Step.REPORT_END))
        assert stream.reason == StopReason(reasons.MOVED, f"the partition {told}")
        assert not scene.resumed

    on_scene(work)


def test_whether_transactions_are_verified_has_to_be_known() -> None:
    """What answers for the brokers' setting is no "false" when it fails."""

    async def work(scene: Scene) -> None:
        answers: list[Exception] = [BrokerUnavailable("no answer"), KafkaRefused(31, "NOT_YOURS", "ask somebody")]

        async def describe(name: str) -> Mapping[int, str | None]:
            raise answers.pop(0)

        scene.cluster.broker_configs = describe  # type: ignore[method-assign]
        stream = scene.stream()
        stream.unverified = 19
        scene.begin(stream, step=Step.RESUME)
        assert await scene.went((0, Step.REPORT_END)) >= LOST_REQUEST_MARGIN_S
        assert not answers
        reason = stream.reason
        assert reason is not None
        assert reason.code == ReasonCode.TARGET_REFUSES_RECORDS
        assert TRANSACTION_VERIFICATION in reason.message
        assert "NOT_YOURS: ask somebody" in reason.message
        assert not scene.resumed

    on_scene(work)


# ---- transactions that ended without a marker ----


def before_a_gap(scene: Scene) -> FollowerStream:
    """A stream that has a transaction open, and a batch behind a gap."""
    stream = scene.stream()
    stream.follower_log.resume(0, 1, {PRODUCER: ProducerState(0, 0, -1, 0)})
    stream.follower_log.offer(memoryview(batch(5, [b"behind a gap"])))
    return stream


@pytest.mark.parametrize("ended", [(PRODUCER,), ()])
def test_no_gap_is_filled_before_it_is_known_what_has_ended(ended: tuple[int, ...]) -> None:
    async def work(scene: Scene) -> None:
        answer, malformed = calls.EndedTransactionsAnswer(ended), calls.EndedTransactionsAnswer(("seven",))  # type: ignore[arg-type]
        scene.answers = [LinkRejected("SOURCE_UNAVAILABLE", "wait"), TimeoutError(), malformed, answer]
        stream = before_a_gap(scene)
        scene.begin(stream, step=Step.ASK_ENDED)
        await scene.until("it was asked three times", lambda: len(scene.answers) == 1)
        assert stream.follower_log.take() is None
        await scene.went((0, Step.WRITE))
        assert scene.peer.asked == [calls.EndedTransactions(0, (calls.Began(PRODUCER, 0),), 1)] * 4
        operation = stream.follower_log.take()
        assert isinstance(operation, Mark)
        assert not operation.committed
        assert (operation.producer_id == PRODUCER) is bool(ended), "what goes on at the source stays open"

    on_scene(work)


def test_a_leader_end_that_is_gone_is_not_asked_again() -> None:
    async def work(scene: Scene) -> None:
        scene.answers = [LinkLost("it went")]
        stream = before_a_gap(scene)
        scene.begin(stream, step=Step.ASK_ENDED)
        await scene.until("it was asked", lambda: not scene.answers)
        scene.peer.lost = True
        stream.follower_log.stop(StopReason(reasons.DISCONNECTED, "the peer is not connected"))
        assert await scene.went((0, Step.REPORT_END)) <= RETRY_S
        assert len(scene.peer.asked) == 1

    on_scene(work)


# ---- what the source has expired ----


def to_trim(scene: Scene) -> FollowerStream:
    """A stream of a log of five records, of which the source has two left, and a batch more."""
    scene.topic.partitions[0].write_values(*[b"x"] * 5)
    stream = scene.stream()
    stream.follower_log.resume(0, 5, {})
    stream.follower_log.offer(memoryview(batch(5, [b"next"])), source_start=3)
    return stream


def test_what_the_source_has_expired_is_deleted_before_more_is_written() -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.down.add(1)
        scene.topic.configs[CLEANUP_POLICY] = "compact"  # which is refused, for another reason
        stream = to_trim(scene)
        scene.begin(stream, step=Step.TRIM)
        for why in ("is down", "POLICY_VIOLATION"):
            told = await scene.told(stream, why)
            assert told.code == reasons.BROKER_UNAVAILABLE
            assert told.message.startswith("not trimmed to 3: ")
            assert stream.follower_log.take() is None
            scene.cluster.down.clear()
        assert scene.topic.partitions[0].start == 0
        del scene.topic.configs[CLEANUP_POLICY]
        assert await scene.went((0, Step.WRITE)) <= RETRY_S + 1
        assert scene.topic.partitions[0].start == stream.follower_log.start == 3
        assert stream.trouble is None

    on_scene(work)


def test_what_is_under_way_for_a_stream_is_not_begun_twice_nor_left_when_all_is_stopped() -> None:
    async def work(scene: Scene) -> None:
        asked: list[int] = []

        async def never(topic: str, partition: int, before: int) -> int:
            asked.append(before)
            await asyncio.Event().wait()
            return 0

        scene.cluster.delete_records = never  # type: ignore[method-assign]
        stream = to_trim(scene)
        scene.begin(stream, stream, step=Step.TRIM)
        await scene.until("it is asked", lambda: asked)
        scene.begin(stream, step=Step.TRIM)
        await asyncio.sleep(1)
        assert asked == [3]
        assert list(stream.under_way) == [Step.TRIM]
        await scene.tasks.close()
        assert not stream.under_way
        assert not scene.went_on

    on_scene(work)


# ---- records without a key ----


def keyless(scene: Scene, partition: int = 0) -> FollowerStream:
    """A stream whose topic is compacted, and refused a record without a key."""
    if not scene.record.compacts:
        scene.apply(CompactFollowerTopic(TOPIC, scene.topic_id, True, scene.record.compacts_since_offset))
        scene.topic.configs[CLEANUP_POLICY] = COMPACTED
    stream = scene.stream(partition)
    stream.follower_log.resume(0, 0, {})
    stream.follower_log.offer(memoryview(batch(0, [b"without a key"])))
    assert stream.follower_log.take() is not None
    stream.follower_log.refused_keyless()
    return stream


class Settings:
    """What is set of the topic, and what the control log says of it just then."""

    def __init__(self, scene: Scene) -> None:
        self.set: list[tuple[bool, Mapping[str, str | None]]] = []
        self.refusals: list[Exception] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        alter = scene.cluster.alter_topic_configs

        async def watched(topic: str, configs: Mapping[str, str | None]) -> None:
            self.set.append((scene.record.compacts, configs))
            await self.may_answer.wait()
            if self.refusals:
                raise self.refusals.pop(0)
            await alter(topic, configs)

        scene.cluster.alter_topic_configs = watched  # type: ignore[method-assign]


def test_that_a_topic_takes_records_without_a_key_is_recorded_before_it_does() -> None:
    async def work(scene: Scene) -> None:
        settings = Settings(scene)
        streams = [keyless(scene), keyless(scene, 1)]
        scene.begin(streams[0], step=Step.TAKE_KEYLESS)
        await scene.went((0, Step.WRITE))
        assert settings.set == [(False, {CLEANUP_POLICY: "delete"})]
        assert not scene.record.compacts
        assert scene.record.cleaned
        scene.begin(streams[1], step=Step.TAKE_KEYLESS)
        await scene.went((0, Step.WRITE), (1, Step.WRITE))
        assert len(settings.set) == 1, "it does already"

    on_scene(work, 2)


def test_a_topic_that_cannot_take_records_without_a_key_is_told_of_and_tried_again() -> None:
    async def work(scene: Scene) -> None:
        settings = Settings(scene)
        stream = keyless(scene)
        settings.refusals = [KafkaRefused(29, "TOPIC_AUTHORIZATION_FAILED", ""), BrokerUnavailable("no answer")]
        scene.begin(stream, step=Step.TAKE_KEYLESS)
        for why in ("ALLOW AlterConfigs on topic remote-t", "no answer"):
            told = await scene.told(stream, why)
            assert told.code == ReasonCode.TARGET_REFUSES_SETTINGS
            assert "offset 0 has no key" in told.message
            assert stream.follower_log.take() is None
        await scene.went((0, Step.WRITE))
        assert stream.follower_log.take() is not None
        assert [compacts for compacts, _ in settings.set] == [False] * 3
        assert scene.topic.configs[CLEANUP_POLICY] == "delete"

    on_scene(work)


def test_a_topic_that_follows_no_more_keeps_its_settings() -> None:
    async def work(scene: Scene) -> None:
        settings = Settings(scene)
        stream = keyless(scene)
        scene.apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
        scene.begin(stream, step=Step.TAKE_KEYLESS)
        await scene.went((0, Step.REPORT_END))
        assert stream.reason == StopReason(reasons.CLOSED, "the topic does not follow any more")
        assert not settings.set
        assert scene.topic.configs[CLEANUP_POLICY] == COMPACTED

    on_scene(work)


def test_who_ends_a_stream_waits_until_nobody_changes_the_settings_for_it() -> None:
    async def work(scene: Scene) -> None:
        settings = Settings(scene)
        settings.may_answer.clear()
        stream = keyless(scene)
        await scene.prerequisites.leave(stream)
        scene.begin(stream, step=Step.TAKE_KEYLESS)
        await scene.until("they are being changed", lambda: settings.set)
        stream.follower_log.stop(MOVED)
        left = asyncio.get_running_loop().create_task(scene.prerequisites.leave(stream), name="leave")
        await asyncio.sleep(60)
        assert not left.done()
        settings.may_answer.set()
        await left
        assert scene.topic.configs[CLEANUP_POLICY] == "delete", "what a promotion sets comes after"
        assert not stream.under_way
        assert stream.reason == MOVED

    on_scene(work)


@pytest.mark.parametrize("since", ["detached", "without a lease"])
def test_settings_are_not_changed_for_a_stream_that_ended_while_they_were_read(since: str) -> None:
    async def work(scene: Scene) -> None:
        settings, stream, read = Settings(scene), keyless(scene), scene.cluster.topic_configs

        async def and_then(topic: str) -> Any:
            found = await read(topic)
            if since == "detached":  # by another proxy: the follower end drops the stream at once
                scene.apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
                stream.follower_log.stop(MOVED)
            else:
                scene.context.lease_deadline = simulated_now() - 1
            return found

        scene.cluster.topic_configs = and_then  # type: ignore[method-assign]
        scene.begin(stream, step=Step.TAKE_KEYLESS)
        await asyncio.sleep(10)
        assert not settings.set

    on_scene(work)


# ---- batches that are larger than the topic's limits ----


def large(scene: Scene, size: int = 3000) -> FollowerStream:
    """A stream whose next batch the topic does not take."""
    stream = scene.stream(0)
    stream.follower_log.resume(0, 0, {})
    stream.follower_log.offer(memoryview(batch(0, [b"x" * size])))
    operation = stream.follower_log.take()
    assert isinstance(operation, Append)
    stream.trouble = StopReason(ReasonCode.TARGET_REFUSES_RECORDS, "MESSAGE_TOO_LARGE")
    stream.follower_log.refused_large(len(operation.data))
    assert stream.follower_log.take() is None
    return stream


def test_the_limits_that_a_batch_needs_are_raised_and_no_others() -> None:
    async def work(scene: Scene) -> None:
        scene.topic.configs |= {"max.message.bytes": "1000", "segment.bytes": "1073741824"}
        scene.cluster.defaults["segment.bytes"] = "1073741824"
        stream = large(scene)
        scene.begin(stream, step=Step.RAISE_LIMITS)
        await scene.went((0, Step.WRITE))
        assert scene.topic.configs["max.message.bytes"] == "4096"
        assert scene.topic.configs["segment.bytes"] == "1073741824"
        assert scene.raised == [(TOPIC, {"max.message.bytes": "4096"})]
        assert stream.follower_log.take() is not None

    on_scene(work)


def test_limits_that_the_source_has_by_now_are_waited_for_before_any_are_raised() -> None:
    """What is raised beyond the source's limit stays so: brokers that were late made it so."""

    async def work(scene: Scene) -> None:
        scene.topic.configs["max.message.bytes"] = "1000"
        settings = {"max.message.bytes": "5000"}
        following = SetFollowerTopic(
            LINK, TOPIC, SOURCE, SOURCE_ID, TopicState.FOLLOWING, scene.topic_id, settings=settings
        )
        scene.apply(following)
        stream = large(scene)
        for _ in range(2):
            stream.refusals += 1
            scene.begin(stream, step=Step.RAISE_LIMITS)
            await scene.went((0, Step.WRITE))
            assert not scene.raised
            operation = stream.follower_log.take()
            assert isinstance(operation, Append)
            stream.follower_log.refused_large(len(operation.data))
            scene.went_on.clear()
        stream.refusals += 1
        scene.begin(stream, step=Step.RAISE_LIMITS)
        await scene.went((0, Step.WRITE))
        assert scene.topic.configs["max.message.bytes"] == "4096", "somebody lowered it"

    on_scene(work)


def test_limits_that_cannot_be_raised_are_told_of_and_tried_again() -> None:
    async def work(scene: Scene) -> None:
        scene.topic.configs["max.message.bytes"] = "1000"
        scene.cluster.policy = lambda topic, name, value: "at most 2000"
        stream = large(scene)
        scene.begin(stream, step=Step.RAISE_LIMITS)
        told = await scene.told(stream, "at most 2000")
        assert told.code == ReasonCode.TARGET_REFUSES_SETTINGS
        assert "max.message.bytes=4096" in told.message
        scene.cluster.policy = lambda topic, name, value: None
        await scene.went((0, Step.WRITE))

    on_scene(work)


def test_a_frozen_topic_stays_frozen() -> None:
    """Another proxy truncates it, and this one has not heard of that."""

    async def work(scene: Scene) -> None:
        scene.topic.configs["max.message.bytes"] = "0"
        stream = large(scene)
        scene.begin(stream, step=Step.RAISE_LIMITS)
        await scene.went((0, Step.REPORT_END))
        assert stream.reason is not None
        assert stream.reason.code == ReasonCode.TARGET_REFUSES_RECORDS
        assert scene.topic.configs["max.message.bytes"] == "0"

    on_scene(work)


# ---- batches that are taken apart ----


def test_a_large_batch_is_taken_apart_also_where_there_was_no_descriptor_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(scene: Scene) -> None:
        def none_left() -> tuple[int, int]:
            raise OSError(24, "Too many open files")

        stream = scene.stream(0)
        stream.follower_log.resume(0, 0, {})
        stream.follower_log.offer(memoryview(large_inside(Compression.ZSTD, size=4 * MIB)))
        stream.follower_log.epoch = 0
        with monkeypatch.context() as patched:
            patched.setattr(os, "pipe", none_left)
            scene.begin(stream, step=Step.DIVIDE)
            told = await scene.told(stream, "Too many open files")
            assert told.code == ReasonCode.INTERNAL_ERROR
            assert "the batch at offset 0" in told.message
        await scene.went((0, Step.WRITE))
        operation = stream.follower_log.take()
        assert isinstance(operation, Append)
        assert operation.next_offset == 1

    on_scene(work)


def test_an_answer_that_comes_while_the_follower_end_stops_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic(SOURCE).partitions[0]
        source.write_values(b"first")
        await replicas.until("copied", replicas.equal)
        answer, asked, produce = asyncio.Event(), [], FakeProduceConnection.produce

        async def held(connection: FakeProduceConnection, *arguments: Any) -> Any:
            answers = await produce(connection, *arguments)
            asked.append(1)
            await answer.wait()
            return answers

        monkeypatch.setattr(FakeProduceConnection, "produce", held)
        source.write_values(b"second")
        source.move(1)
        source.write_values(b"third")  # whose epoch is to be recorded first
        await replicas.until("asked", lambda: asked)
        await asyncio.sleep(1)
        answer.set()
        await replicas.ends["B"].follower.stop()  # conftest fails the test for "write failed" in the log

    on_replicas(monkeypatch, work)
