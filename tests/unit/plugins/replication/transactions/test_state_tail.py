"""The transaction log, as a proxy reads it while its leaders come and go."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated, simulated_now
from support.partition_log import Partition
from support.transaction_state import state_batch, state_key, state_value

from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.replication.link.calls import LogPlace
from isthmus_plugins.replication.transactions.state_tail import TransactionTail
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, Change, Transaction, TransactionState

DECIDED = Transaction(7, 0, TransactionState.PREPARE_COMMIT, (("t", 0),), 1)


class Scene:
    def __init__(self) -> None:
        rng = random.Random(1)
        self.cluster = FakeCluster(rng, (1, 2))
        self.log: Partition = self.cluster.add_topic(TRANSACTION_TOPIC, 2).partitions[0]
        self.changes: list[tuple[str, int, int]] = []
        """(Transactional id, offset, leader epoch) of each that was reported."""
        context: Any = FakeContext(self.cluster, FakeControl("A", rng))
        self.tail = TransactionTail(context, self._changed, lambda: None, lambda: None)

    def _changed(self, partition: int, change: Change) -> None:
        self.changes.append((change.transactional_id, change.offset, change.epoch))

    def decide(self, *transactional_ids: str) -> None:
        for each in transactional_ids:
            self.record(each, DECIDED)

    def record(self, transactional_id: str, transaction: Transaction) -> None:
        records = [(state_key(transactional_id), state_value(transaction))]
        self.log.write(state_batch(self.log.end, records, self.log.leader_epoch))

    async def read(self) -> None:
        deadline = simulated_now() + 30
        while self.tail.reached(0) < self.log.end or not self.tail.loaded:
            assert simulated_now() < deadline
            await self.tail.more_is_read()


def on_log(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        scene.tail.start()
        scene.tail.follow(True)
        await work(scene)
        await scene.tail.stop()

    run_simulated(run())


def test_what_was_there_is_reported_and_then_what_comes() -> None:
    async def work(scene: Scene) -> None:
        scene.decide("a", "b", "a")
        await scene.read()
        assert sorted(scene.changes) == [("a", 2, 0), ("b", 1, 0)]
        scene.decide("c")
        await scene.read()
        assert scene.changes[2:] == [("c", 3, 0)]
        assert scene.tail.is_old(LogPlace(0, 2, 0))
        assert not scene.tail.is_old(LogPlace(0, 3, 0))

    on_log(work)


@pytest.mark.parametrize(("client_version", "epoch", "left"), [(1, 0, 0), (1, 1, 1), (2, 0, 1)])
@pytest.mark.parametrize("loaded", [False, True])
def test_what_was_decided_is_forgotten_when_its_producer_goes_on_in_its_epoch(
    client_version: int, epoch: int, left: int, loaded: bool
) -> None:
    async def work(scene: Scene) -> None:
        scene.record("a", DECIDED._replace(client_version=client_version))
        scene.record("a", Transaction(7, 0, TransactionState.COMPLETE_COMMIT, (), client_version))
        if loaded:
            await scene.read()
            assert len(scene.tail.decided(7)) == 1
        scene.record("a", Transaction(7, epoch, TransactionState.ONGOING, (("t", 0),), client_version))
        await scene.read()
        assert len(scene.tail.decided(7)) == left

    on_log(work)


def test_another_leader_has_what_was_read() -> None:
    async def work(scene: Scene) -> None:
        scene.decide("a", "b")
        await scene.read()
        scene.log.move(3 - scene.log.leader)
        scene.decide("c")
        await scene.read()
        assert scene.changes[2:] == [("c", 2, 1)], "nothing is reported twice"

    on_log(work)


@pytest.mark.parametrize("more", [0, 5])
def test_a_log_that_lost_its_end_is_read_again(more: int) -> None:
    """Whether it is shorter than what was read, or has others by now at the offsets that were lost."""

    async def work(scene: Scene) -> None:
        scene.decide("a", "b", "lost", "lost, too")
        await scene.read()
        scene.log.cut(2)
        scene.log.move(3 - scene.log.leader)
        scene.decide("c", *[f"c-{number}" for number in range(more)])
        scene.changes.clear()
        while ("c", 2, 1) not in scene.changes:
            await scene.tail.more_is_read()
        assert {each[0] for each in scene.changes} == {"a", "b", "c", *[f"c-{number}" for number in range(more)]}

    on_log(work)


def test_one_that_cannot_be_asked_keeps_no_other_from_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader is gone, and nobody leads it for now."""

    async def work(scene: Scene) -> None:
        other = scene.cluster.partition(TRANSACTION_TOPIC, 1)
        other.write(state_batch(0, [(state_key("x"), state_value(DECIDED))], 0))
        scene.decide("a")
        await scene.read()
        epoch_end = scene.cluster.epoch_end
        gone = True

        async def asked(topic: str, partition: int, epoch: int) -> tuple[int, int]:
            if partition == 1 and gone:
                raise BrokerUnavailable("it has no leader")
            return await epoch_end(topic, partition, epoch)

        monkeypatch.setattr(scene.cluster, "epoch_end", asked)
        for log in (scene.log, other):
            log.move(3 - log.leader)
        scene.decide("b")
        other.write(state_batch(1, [(state_key("y"), state_value(DECIDED))], 1))
        await scene.read()
        assert ("b", 1, 1) in scene.changes
        assert scene.tail.coordinator(1) == -1
        assert not [each for each in scene.changes if each[0] == "y"]
        gone = False
        while ("y", 1, 1) not in scene.changes:
            await scene.tail.more_is_read()

    on_log(work)


def test_an_id_that_has_expired_is_forgotten() -> None:
    async def work(scene: Scene) -> None:
        scene.decide("a", "b")
        await scene.read()
        part = scene.tail._parts[0]
        assert set(part.stands_at) == set(part.log.latest) == {"a", "b"}
        scene.log.write(state_batch(scene.log.end, [(state_key("a"), None)], scene.log.leader_epoch))
        await scene.read()
        assert set(part.stands_at) == set(part.log.latest) == {"b"}

    on_log(work)
