"""What stands before a decision in partitions that another proxy pushes, and partitions that cannot be read."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, run_simulated
from support.partition_log import batch

from isthmus_control.model import SyncRecord, SyncState
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.logs.log_end_reader import LogEndReader
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.transactions import abort_coverage
from isthmus_plugins.replication.transactions.abort_coverage import AbortCoverage
from isthmus_plugins.replication.transactions.decision import Decision
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.transaction_log import Change, Transaction, TransactionState

LINK, X = "link", 7
P, Q = ("t", 0), ("t", 1)


class Cluster(FakeCluster):
    """Partitions in ``leaderless`` are asked for in vain, for as long as the proxy's client does."""

    leaderless: Collection[TopicPartition] = ()

    async def log_ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        for _ in range(1000):
            if not any(place in self.leaderless or place[0] not in self.found for place in partitions):
                break
            await asyncio.sleep(0.01)
        return await super().log_ends(
            [place for place in partitions if place not in self.leaderless and place[0] in self.found]
        )


class Scene:
    """One proxy that pushes nothing. It is all that :class:`AbortCoverage` uses, and the other side."""

    def __init__(self) -> None:
        self.cluster = Cluster(random.Random(1), [1])
        self.make(0)
        self.there = 0
        self.calls = 0
        self.more = asyncio.Event()
        self.led: dict[LinkPartition, None] = {}
        self.links = {LINK: object()}
        self.control = self.state = self.discovery = self
        self.supervision = Supervision()
        me: Any = self
        self.reader = LogEndReader(me, "test")
        self.aborts = AbortCoverage(me, me, me, me, me, me, self.more.set, self.reader)

    def make(self, end: int) -> None:
        """The topic is made, anew if it was there, and recorded In-Sync."""
        topic = self.cluster.add_topic("t", 2)
        self.write(end)
        self.record = SyncRecord(str(uuid.UUID(bytes=topic.topic_id)), SyncState.IN_SYNC, 0, 0, None, 1)

    def write(self, end: int) -> None:
        if end:
            self.cluster.found["t"].partitions[0].write(batch(end - 1, [b"x"]))

    # ---- what is used ----

    def stream(self, key: LinkPartition) -> None:
        return None

    def connections(self, link_name: str) -> list[Any]:
        return [self]

    async def call(self, question: calls.HighWatermarks) -> calls.HighWatermarksAnswer:
        self.calls += 1
        await asyncio.sleep(0.001)
        return calls.HighWatermarksAnswer(
            tuple(calls.PartitionEnd(*place, self.there) for place in question.partitions)
        )

    def concerns(self, topic: str) -> bool:
        return True

    def sent_to(self, place: TopicPartition) -> set[LinkPartition]:
        return {LinkPartition(LINK, *place)}

    def records(self, place: TopicPartition) -> dict[str, SyncRecord]:
        return {LINK: self.record}

    # ---- what happens ----

    async def abort(self) -> None:
        for state in (TransactionState.PREPARE_ABORT, TransactionState.COMPLETE_ABORT):
            self.aborts.take(Change("app", Transaction(X, 0, state, (P,), 1), 0))
        await asyncio.sleep(0.1)

    def decide(self, end: int) -> Decision:
        decision = Decision("app", X, 0, 0, (0, 1), (P,), frozenset({LINK}), 0.0)
        decision.ends, decision.unread = {P: end}, set()
        self.aborts.ended(decision, self.aborts.readings)
        return decision

    async def is_sent(self, decision: Decision, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while self.aborts.missing(decision, LINK, lambda place: False):
                    self.more.clear()
                    await self.more.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        await self.aborts.stop()
        await self.reader.stop()


def simulated(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        scene = Scene()
        try:
            await main(scene)
        finally:
            await scene.stop()

    monkeypatch.setattr(abort_coverage, "remote_topic", lambda link, topic: topic)
    run_simulated(run())


def test_the_other_side_is_asked_now_and_then_until_it_has_what_was_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(scene: Scene) -> None:
        scene.write(1000)
        await scene.abort()
        decision = scene.decide(1001)
        assert not await scene.is_sent(decision, 3)
        assert 20 < scene.calls < 65
        scene.there = 1000
        assert await scene.is_sent(decision, 0.5)
        calls = scene.calls
        assert await scene.is_sent(scene.decide(1002), 0)
        assert scene.calls == calls

    simulated(main, monkeypatch)


@pytest.mark.parametrize("partitions", [0, 1])
def test_nothing_is_waited_for_in_a_partition_that_is_gone(partitions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(scene: Scene) -> None:
        scene.write(1000)
        await scene.abort()
        decision = scene.decide(1001)
        assert not await scene.is_sent(decision, 1)
        topic = scene.cluster.found.pop("t")
        if partitions:  # made anew, with fewer
            scene.cluster.add_topic("t", partitions).topic_id = topic.topic_id
            del scene.cluster.found["t"].partitions[0]
        assert await scene.is_sent(decision, 1)

    simulated(main, monkeypatch)


def test_ends_of_a_log_count_no_more_when_its_topic_was_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(scene: Scene) -> None:
        scene.write(1000)
        await scene.abort()
        scene.there = 1000
        decision = scene.decide(1001)
        assert await scene.is_sent(decision, 1)
        scene.make(5)  # and has joined again
        scene.there = 4
        assert await scene.is_sent(scene.decide(4), 1)
        await scene.abort()
        decision = scene.decide(6)
        assert not await scene.is_sent(decision, 1)
        scene.there = 5
        assert await scene.is_sent(decision, 1)

    simulated(main, monkeypatch)


def test_a_partition_that_cannot_be_read_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(scene: Scene) -> None:
        scene.write(3)
        scene.cluster.leaderless = {Q}
        told: list[Mapping[TopicPartition, int | None]] = []
        async with asyncio.timeout(0.5):
            await scene.reader.read([P, Q, ("t", 9), ("other", 0)], told.append)
        async with asyncio.timeout(0.1):
            await scene.reader.read([P, Q], told.append)
        await asyncio.sleep(0.1)
        assert {P: 3} in told
        assert {("t", 9): None} in told
        assert {("other", 0): None} in told
        assert not any(Q in each for each in told)
        scene.cluster.leaderless = ()
        await asyncio.sleep(2)
        assert told.count({Q: 0}) == 2
        assert not scene.reader._alone

    simulated(main, monkeypatch)
