"""Steps of truncations, each for itself, against a model cluster on a simulated clock."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.coordinators import Coordinators
from support.fake_cluster import FakeCluster, FakeContext, run_simulated
from support.partition_log import batch
from support.peers import CalledAtOnce
from support.replicas import LINK, Replicas

from isthmus_control.commands import (
    AdvanceTruncation,
    BeginTruncation,
    OpenProvenance,
    PartitionOffset,
    SetFollowerTopic,
    TakeOverTruncation,
)
from isthmus_control.model import Reason, TopicState
from isthmus_control.outcome import Accepted
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import (
    PartitionCut,
    PartitionView,
    SalvageFile,
    Succession,
    Truncation,
    TruncationPhase,
)
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, TopicPartition
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.comparison.digests import Verification
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.log import StopReason
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions
from isthmus_plugins.replication.follower.replicas import FollowerReplicas
from isthmus_plugins.replication.follower.settings import FollowerSettings, Found
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.logs.topic_settings import FROZEN, MESSAGE_BYTES_MAX
from isthmus_plugins.replication.status.truncations import truncation_metrics, truncation_statuses
from isthmus_plugins.replication.traffic import Traffic
from isthmus_plugins.replication.truncation.common_log import CommonLog, SourceReplaced
from isthmus_plugins.replication.truncation.ownership import HeldUp, NotOwner
from isthmus_plugins.replication.truncation.runs import Truncations
from isthmus_plugins.replication.truncation.spool import SpoolDamaged
from isthmus_plugins.replication.truncation.steps import FREEZING, TruncationSteps
from isthmus_protocol.transaction_log import TransactionState

TOPIC = "remote-t"
P = TruncationPhase
SOURCE_ID = str(uuid.UUID(int=9, version=4))


class Unordered(FakeCluster):
    """A cluster of several brokers, which answer in any order."""

    async def delete_topic_id(self, topic_id: bytes) -> None:
        await self._request()
        self.found = {name: topic for name, topic in self.found.items() if topic.topic_id != topic_id}

    async def log_ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        ends = list((await super().log_ends(partitions)).items())
        return dict(ends[1:] + ends[:1])


class OneLess(CommonLog):
    """Every log has one record that the source has not."""

    async def end(self, *arguments: Any) -> int:
        log_end: int = arguments[-2]
        return log_end - 1


class Scene:
    """A topic of three partitions whose truncation has begun, and who carries it out."""

    def __init__(self) -> None:
        replicas = Replicas(random.Random(4), 1)
        self.control = replicas.controls["B"]
        self.cluster = Unordered(random.Random(4))
        self.topic = self.cluster.add_topic(TOPIC, 3)
        for index, partition in enumerate(self.topic.partitions):
            partition.write(batch(0, [b"old"] * (10 * index)) if index else batch(0, [b"old"]))
            partition.start = partition.end if index else 0
            partition.write_values(b"a")
            partition.write_values(b"rogue")
        self.context: Any = FakeContext(self.cluster, self.control)
        verification = Verification(self.context)
        common_log: Any = OneLess(self.context, verification)
        unused: Any = None
        self.own_transactions = OwnTransactions(self.context)
        self.steps = TruncationSteps(
            self.context, unused, unused, verification, common_log, unused, self.own_transactions
        )
        peer: Any = CalledAtOnce(LINK, ())
        self.steps._connection = lambda truncation: peer  # type: ignore[method-assign]
        topic_id = str(uuid.UUID(bytes=self.topic.topic_id))
        self.apply(SetFollowerTopic(LINK, TOPIC, "local-t", SOURCE_ID, TopicState.FOLLOWING, topic_id))
        self.apply(OpenProvenance(LINK, tuple(PartitionOffset(TOPIC, topic_id, p, 0) for p in range(3))))
        views = tuple(PartitionView(1, 0) for _ in range(3))
        why = Reason("TARGET_WRITTEN_BY_OTHERS", "somebody wrote")
        owner = self.context.incarnation
        self.apply(BeginTruncation(LINK, TOPIC, topic_id, why, views, None, "p", owner))

    def apply(self, body: Any) -> None:
        outcome = self.control.apply(body)
        assert outcome is None or isinstance(outcome, Accepted), outcome

    @property
    def now(self) -> Truncation:
        return self.control.state.truncations[TOPIC]

    def take_over(self) -> None:
        """Another proxy goes on with it."""
        self.apply(TakeOverTruncation(TOPIC, self.now.topic_id, "q", OTHER))

    def at(self, phase: TruncationPhase) -> Truncation:
        """Go there on the straight way."""
        for step, found in WAY:
            if self.now.phase is not phase:
                self.advance(step, **found)
        assert self.now.phase is phase
        return self.now

    def advance(self, phase: TruncationPhase, **found: Any) -> None:
        self.apply(AdvanceTruncation(TOPIC, self.now.topic_id, self.now.owner, phase, **found))


def on_scene(monkeypatch: pytest.MonkeyPatch, work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(600):
            await work(Scene())

    run_simulated(run())


OTHER = str(uuid.UUID(int=10, version=4))
CUTS = (PartitionCut(0, 0, 2, 3), PartitionCut(1, 10, 11, 12), PartitionCut(2, 20, 21, 22))

VIEWS = tuple(PartitionView(1, 0) for _ in CUTS)
SAFE = tuple(SalvageFile(cut.partition, "p", "/salvage/x", 1) for cut in CUTS)
WAY: tuple[tuple[TruncationPhase, dict[str, Any]], ...] = (
    (P.SALVAGING, {"cuts": CUTS, "compared_at": VIEWS}),
    (P.SPOOLING, {"salvaged": SAFE}),
    (P.RECREATING, {"attempt": "1"}),
    (P.REFILLING, {"new_topic_id": SOURCE_ID}),
    (P.RESTORING, {}),
    (P.CLEANING, {}),
)


def test_each_log_is_cut_within_its_own_limits_whichever_broker_answers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        await scene.steps._compare(scene.now)
        assert scene.now.phase is P.SALVAGING
        assert scene.now.cuts == CUTS

    on_scene(monkeypatch, work)


def test_a_topic_is_not_frozen_while_a_coordinator_of_this_cluster_has_markers_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(scene: Scene) -> None:
        coordinators = Coordinators(scene.cluster)
        coordinators.has("rogue", TransactionState.PREPARE_ABORT, TOPIC)
        coordinators.has("elsewhere", TransactionState.ONGOING, "else")
        scene.own_transactions.start()
        with pytest.raises(HeldUp, match="'rogue' in remote-t-0 to be completed: PrepareAbort") as held:
            await scene.steps._compare(scene.now)
        assert held.value.code == ReasonCode.TRANSACTIONS_ENDING
        assert scene.now.phase is P.COMPARING
        assert MESSAGE_BYTES_MAX not in scene.topic.configs

        coordinators.has("rogue", TransactionState.COMPLETE_ABORT)
        await scene.steps._compare(scene.now)
        assert scene.now.phase is P.SALVAGING
        assert not coordinators.fenced
        await scene.own_transactions.stop()

    on_scene(monkeypatch, work)


def test_a_topic_that_got_a_partition_just_then_is_begun_with_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        scene.cluster._grow(scene.topic, 4)
        await scene.steps._compare(scene.now)
        assert scene.now.phase is P.CANCELLING
        await scene.steps._cancel(scene.now)
        assert MESSAGE_BYTES_MAX not in scene.topic.configs

    on_scene(monkeypatch, work)


@pytest.mark.parametrize("moved", [PartitionCut(1, 9, 11, 12), PartitionCut(1, 10, 11, 13)])
def test_a_log_that_does_not_start_or_end_where_it_was_compared_is_compared_again(
    monkeypatch: pytest.MonkeyPatch, moved: PartitionCut
) -> None:
    async def work(scene: Scene) -> None:
        scene.advance(P.SALVAGING, cuts=(CUTS[0], moved, CUTS[2]), compared_at=VIEWS)
        await scene.steps._salvage(scene.now)
        assert scene.now.phase is P.COMPARING

    on_scene(monkeypatch, work)


@pytest.mark.parametrize("frozen", [{}, {MESSAGE_BYTES_MAX: FROZEN}])
def test_who_slept_through_a_take_over_neither_freezes_nor_unfreezes(
    monkeypatch: pytest.MonkeyPatch, frozen: dict[str, str]
) -> None:
    async def work(scene: Scene) -> None:
        scene.topic.configs |= frozen
        slept = scene.now
        scene.take_over()
        step = scene.steps._cancel if frozen else scene.steps._compare
        with pytest.raises(NotOwner):
            await step(slept)
        assert scene.topic.configs == frozen

    on_scene(monkeypatch, work)


@pytest.mark.parametrize("phase", [P.SPOOLING, P.CLEANING])
def test_who_slept_through_a_take_over_leaves_the_next_owners_spool_and_committed_offsets(
    monkeypatch: pytest.MonkeyPatch, phase: TruncationPhase
) -> None:
    async def work(scene: Scene) -> None:
        place = (TOPIC, 0)
        scene.cluster.offsets = {"g": {place: CommittedOffset(1, "")}}
        scene.topic.configs[MESSAGE_BYTES_MAX] = FROZEN
        slept = scene.at(phase)
        read = scene.cluster.committed_offsets

        async def and_sleep(groups: Collection[str]) -> Any:
            found = await read(groups)
            scene.take_over()
            scene.cluster.add_topic(slept.spool("2"))
            scene.cluster.offsets["g"][place] = CommittedOffset(2, "")
            return found

        monkeypatch.setattr(scene.cluster, "committed_offsets", and_sleep)
        if phase is P.CLEANING:
            await and_sleep(())
        with pytest.raises(NotOwner):
            await scene.steps.carry_out(slept)
        assert slept.spool("2") in scene.cluster.found
        assert scene.cluster.offsets == {"g": {place: CommittedOffset(2, "")}}

    on_scene(monkeypatch, work)


@pytest.mark.parametrize("when", ["before the spool is filled", "before its digest is made"])
def test_a_log_whose_leader_moved_is_compared_again(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Each replica of a compacted topic is cleaned by itself: what is spooled is what was compared."""

    async def work(scene: Scene) -> None:
        scene.topic.configs[MESSAGE_BYTES_MAX] = FROZEN
        before = scene.at(P.SPOOLING)
        partition = scene.topic.partitions[0]
        digest = scene.steps._digest

        async def moved(*arguments: Any) -> str:
            if partition.leader_epoch == 0:
                partition.move(1)
                partition.clean({0})
            return await digest(*arguments)

        if when == "before its digest is made":
            monkeypatch.setattr(scene.steps, "_digest", moved)
            with pytest.raises(OperationError, match="another leader"):
                await scene.steps._spool(before)
        else:
            partition.move(1)
        await scene.steps._spool(before)
        assert scene.now.phase is P.COMPARING
        await scene.steps._compare(scene.now)
        assert scene.now.compared_at == (PartitionView(1, 1), *VIEWS[1:])

    on_scene(monkeypatch, work)


def test_a_log_that_is_cleaned_while_it_is_spooled_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner that was at it already ends later than the freezing."""

    async def work(scene: Scene) -> None:
        scene.topic.configs[MESSAGE_BYTES_MAX] = FROZEN
        before = scene.at(P.SPOOLING)
        digest = scene.steps._digest

        async def cleaned(*arguments: Any) -> str:
            scene.topic.partitions[0].clean({0})
            return await digest(*arguments)

        monkeypatch.setattr(scene.steps, "_digest", cleaned)
        await scene.steps._spool(before)
        assert scene.now.phase is P.COMPARING

    on_scene(monkeypatch, work)


def test_what_cannot_be_made_again_is_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        scene.topic.configs |= {MESSAGE_BYTES_MAX: FROZEN, "retention.ms": "-1", "delete.retention.ms": "5"}
        before = scene.at(P.SPOOLING)
        scene.cluster.policy = lambda topic, name, value: (
            "not for ever" if value == "-1" and not topic.startswith("__") else None
        )
        with pytest.raises(HeldUp, match="is not deleted: POLICY_VIOLATION: not for ever"):
            await scene.steps._spool(before)
        assert scene.now.phase is P.SPOOLING
        assert scene.cluster.found[TOPIC] is scene.topic
        # What it can do without keeps it from nothing.
        scene.cluster.policy = lambda topic, name, value: "too short" if value == "5" else None
        await scene.steps._spool(scene.now)
        assert scene.now.phase is P.RECREATING
        assert scene.now.layout is not None
        assert scene.now.layout.configs == {"retention.ms": "-1", MESSAGE_BYTES_MAX: "1048588"}

    on_scene(monkeypatch, work)


def test_it_is_made_anew_with_limits_that_its_largest_batch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        scene.topic.configs[MESSAGE_BYTES_MAX] = FROZEN
        scene.cluster.defaults |= {MESSAGE_BYTES_MAX: "50", "segment.bytes": "1048576"}
        await scene.steps._spool(scene.at(P.SPOOLING))
        layout = scene.now.layout
        assert layout is not None
        assert layout.configs[MESSAGE_BYTES_MAX] == "128"
        assert "segment.bytes" not in layout.configs

    on_scene(monkeypatch, work)


@pytest.mark.parametrize("own", [None, "5000"])
def test_it_is_not_frozen_again_by_brokers_that_start_anew(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They gave it the settings that the one before had when it was deleted: nobody could write, for good."""

    async def work(scene: Scene) -> None:
        before = await scene.cluster.topic_configs(TOPIC)
        await scene.cluster.alter_topic_configs(TOPIC, FREEZING)
        await scene.steps._spool(replace(scene.at(P.SPOOLING), message_bytes_max=own))
        await scene.steps._recreate(replace(scene.now, message_bytes_max=own))
        assert scene.now.phase is P.REFILLING
        assert scene.cluster.found[TOPIC].configs.get(MESSAGE_BYTES_MAX) == own
        scene.cluster.start_brokers_anew()
        assert scene.cluster.found[TOPIC].configs.get(MESSAGE_BYTES_MAX) == own
        if own is None:
            assert await scene.cluster.topic_configs(TOPIC) == before

    on_scene(monkeypatch, work)


def test_a_refill_in_vain_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        scene.topic.configs[MESSAGE_BYTES_MAX] = FROZEN
        await scene.steps._spool(scene.at(P.SPOOLING))
        scene.steps._follower_end = FollowerEnd(scene.context, Traffic())
        scene.steps._follower_end.on_stored = lambda place, end: None
        scene.steps._follower_end.awaits = lambda connection, producer_id: False
        scene.steps._follower_end.start()
        for number in (1, 2):
            await scene.steps._recreate(scene.now)
            scene.cluster.partition(TOPIC, 0).write_values(b"somebody", b"else's", b"records")
            await scene.steps._refill(scene.now)
            assert scene.now.phase is P.RECREATING
            assert scene.now.refills_failed == number
        await scene.steps._follower_end.stop()
        (told,) = truncation_statuses(scene.control.state, LINK)
        assert told.refills_failed == 2
        assert told.refill_failure is not None
        assert told.refill_failure in scene.now.describe()
        metrics = {metric.name: metric for metric in truncation_metrics(scene.control.state, {}, {})}
        (sample,) = metrics["isthmus_link_truncation_refills_failed"].samples
        assert (sample.labels, sample.value) == ({"link": LINK, "topic": TOPIC}, 2)

    on_scene(monkeypatch, work)


def test_each_attempt_fills_a_spool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        scene.topic.configs[MESSAGE_BYTES_MAX] = FROZEN
        before = scene.at(P.SPOOLING)
        scene.cluster.add_topic(before.spool("killed"))
        await scene.steps._spool(before)
        assert scene.now.phase is P.RECREATING
        assert scene.now.attempt is not None
        assert [name for name in scene.cluster.found if before.is_spool(name)] == [before.spool(scene.now.attempt)]

    on_scene(monkeypatch, work)


def test_a_topic_that_was_given_its_settings_back_is_frozen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another proxy, which had not heard of the truncation, had it follow the source's settings."""

    async def work(scene: Scene) -> None:
        await scene.steps._spool(scene.at(P.SPOOLING))
        assert scene.now.phase is P.RECREATING
        assert scene.topic.configs[MESSAGE_BYTES_MAX] == FROZEN

    on_scene(monkeypatch, work)


def test_settings_do_not_follow_into_a_topic_that_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        scene.topic.configs[MESSAGE_BYTES_MAX] = FROZEN
        existing = (await scene.cluster.topics())[TOPIC]
        found = Found({TOPIC: {MESSAGE_BYTES_MAX: FROZEN}}, {})
        assert await FollowerSettings(scene.context).follow({MESSAGE_BYTES_MAX: "5000"}, existing, found) is None
        assert scene.topic.configs[MESSAGE_BYTES_MAX] == FROZEN

    on_scene(monkeypatch, work)


def test_a_spool_is_lost_when_it_stays_so_whatever_failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers that come back after a while may not know of it at once."""

    async def work(scene: Scene) -> None:
        failures = [BrokerUnavailable("down")] * 4 + [SpoolDamaged("gone")] * 2 + [BrokerUnavailable("down")]
        failures += [SpoolDamaged("gone")] * 2
        seen = []

        async def restore(truncation: Truncation) -> None:
            seen.append(truncation.phase)
            if not failures:
                raise NotOwner("enough was seen")
            raise failures.pop(0)

        scene.at(P.RESTORING)
        scene.steps._steps[P.RESTORING] = restore
        unused: Any = None
        truncations = Truncations(scene.context, unused, unused, unused, scene.steps)
        await truncations._run(TOPIC, scene.now.topic_id)
        assert len(seen) == 10
        assert scene.now.phase is P.RESTORING
        assert not scene.now.positions_lost

    on_scene(monkeypatch, work)


def test_a_topic_that_diverges_on_another_proxy_while_it_catches_up_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one proxy for each broker, a partition's stream is at the proxy of its leader, the truncation at any."""

    async def work(scene: Scene) -> None:
        class Diverged(FollowerEnd):
            topic_id = SOURCE_ID

            def streams(self) -> list[Any]:
                follower_log = SimpleNamespace(reason=StopReason("TARGET_WRITTEN_BY_OTHERS", "somebody wrote"))
                return [SimpleNamespace(topic=TOPIC, topic_id=self.topic_id, follower_log=follower_log, held=None)]

        scene.at(P.RECREATING)
        del scene.cluster.found[TOPIC]
        scene.topic = scene.cluster.add_topic(TOPIC, 3)
        new_id = str(uuid.UUID(bytes=scene.topic.topic_id))
        scene.advance(P.REFILLING, new_topic_id=new_id)
        scene.advance(P.CATCHING_UP)
        for partition, end in zip(scene.topic.partitions, (2, 3, 21), strict=True):
            for _ in range(end):
                partition.write_values(b"from the source")
        await scene.steps._catch_up(scene.now)
        assert scene.now.phase is P.CATCHING_UP

        other: Any = FakeContext(scene.cluster, scene.control)
        nothing: Any = None
        streams = Diverged(other, Traffic())
        elsewhere = Truncations(
            other, nothing, streams, FollowerTopics(other, FollowerReplicas(other), OwnTransactions(other)), nothing
        )
        elsewhere._may_run = lambda state, truncation: False  # type: ignore[method-assign]
        elsewhere._look()
        await asyncio.sleep(1)
        assert scene.now.stuck is None  # that was the topic before
        streams.topic_id = new_id
        elsewhere._look()
        await asyncio.sleep(1)
        assert scene.now.stuck is not None
        await scene.steps._catch_up(scene.now)
        assert scene.now.phase is P.RESTORING
        assert [cut.offset for cut in scene.now.cuts] == [2, 3, 21]
        await elsewhere.stop()

    on_scene(monkeypatch, work)


def test_a_succession_that_is_out_of_date_is_told_again_before_a_topic_is_frozen_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(scene: Scene) -> None:
        class Replaced(CommonLog):
            async def end(self, *arguments: Any) -> int:
                raise SourceReplaced("the source's local-t is another topic by now")

        topics = FollowerTopics(scene.context, FollowerReplicas(scene.context), OwnTransactions(scene.context))
        topics.succeeded[TOPIC] = Succession(SOURCE_ID, str(uuid.UUID(int=11, version=4)), (1, 1, 1))
        scene.steps._follower_topics = topics
        scene.steps._common_log = Replaced(scene.context, Verification(scene.context))
        await scene.steps._compare(scene.now)
        assert scene.now.phase is P.CANCELLING
        assert not topics.succeeded

    on_scene(monkeypatch, work)
