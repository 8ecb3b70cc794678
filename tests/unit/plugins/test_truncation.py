"""Steps of truncations, each for itself, against a model cluster on a simulated clock."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, run_simulated, simulated_now
from support.partition_log import batch
from support.replicas import LINK, Replicas, simulate_clock

from isthmus_control.commands import (
    AdvanceTruncation,
    BeginTruncation,
    OpenProvenance,
    PartitionOffset,
    SetFollowerTopic,
)
from isthmus_control.model import Reason, TopicState
from isthmus_control.outcome import Accepted
from isthmus_control.truncations import PartitionCut, PartitionView, Truncation, TruncationPhase
from isthmus_plugins.replication import truncation as module
from isthmus_plugins.replication.common_log import CommonLog
from isthmus_plugins.replication.truncation import Truncations
from isthmus_plugins.replication.verify import Verification

TOPIC = "remote-t"
SOURCE_ID = str(uuid.UUID(int=9, version=4))


class Unordered(FakeCluster):
    """A cluster of several brokers, which answer in any order."""

    async def log_ends(self, partitions: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        ends = list((await super().log_ends(partitions)).items())
        return dict(ends[1:] + ends[:1])


class OneLess(CommonLog):
    """Every log has one record that the source has not."""

    async def end(self, *arguments: Any) -> int:
        log_end: int = arguments[-1]
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
            partition.write(batch(partition.end, [b"a", b"rogue"]))
        self.context: Any = FakeContext(self.cluster, self.control)
        verification = Verification(self.context)
        common_log: Any = OneLess(self.context, verification)
        unused: Any = None
        self.truncations = Truncations(self.context, unused, unused, verification, common_log)
        self.truncations._connection = lambda truncation: unused  # type: ignore[method-assign]
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

    def advance(self, phase: TruncationPhase, **found: Any) -> None:
        self.apply(AdvanceTruncation(TOPIC, self.now.topic_id, self.now.owner, phase, **found))


def on_scene(monkeypatch: pytest.MonkeyPatch, work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(600):
            await work(Scene())

    simulate_clock(monkeypatch)
    monkeypatch.setattr(module, "monotonic", simulated_now)
    run_simulated(run())


CUTS = (PartitionCut(0, 0, 2, 3), PartitionCut(1, 10, 11, 12), PartitionCut(2, 20, 21, 22))


def test_each_log_is_cut_within_its_own_limits_whichever_broker_answers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        await scene.truncations._compare(scene.now)
        assert scene.now.phase is TruncationPhase.SALVAGING
        assert scene.now.cuts == CUTS

    on_scene(monkeypatch, work)


@pytest.mark.parametrize("moved", [PartitionCut(1, 9, 11, 12), PartitionCut(1, 10, 11, 13)])
def test_a_log_that_does_not_start_or_end_where_it_was_compared_is_compared_again(
    monkeypatch: pytest.MonkeyPatch, moved: PartitionCut
) -> None:
    async def work(scene: Scene) -> None:
        scene.advance(TruncationPhase.SALVAGING, cuts=(CUTS[0], moved, CUTS[2]))
        await scene.truncations._salvage(scene.now)
        assert scene.now.phase is TruncationPhase.COMPARING

    on_scene(monkeypatch, work)
