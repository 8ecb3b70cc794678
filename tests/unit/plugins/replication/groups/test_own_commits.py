"""What this cluster's own transactions have committed in groups that follow is not put over what the source has."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.coordinators import Coordinators
from support.fake_cluster import FakeContext, run_simulated
from support.group_replicas import PLACE, committed_at, log, status, until_at
from support.offsets import commit, group_made, marker_batch, offsets_batch
from support.replicas import LINK, Replicas

from isthmus_control.commands import AttachNamespace, CreateNamespace
from isthmus_control.model import ResourceType, Role
from isthmus_control.states import ReasonCode
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions
from isthmus_plugins.replication.groups.own_commits import AGAIN_S, OwnCommits
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.record_codec import Marker
from isthmus_protocol.transaction_log import Transaction, TransactionState

S = TransactionState
APP, OTHER = 7, 8
"""Producers."""


class Scene:
    """B was led by its own clients: its offsets topic, and coordinators."""

    def __init__(self) -> None:
        self.replicas = Replicas(random.Random(1))
        self.replicas.attach_groups()
        self.cluster = self.replicas.b
        self.log = self.cluster.add_topic(OFFSETS_TOPIC).partitions[0]
        self.coordinators = Coordinators(self.cluster)
        self.coordinators.completed = self._complete
        self.control = self.replicas.controls["B"]

    def look(self) -> OwnCommits:
        """One process of B that does nothing else."""
        context: Any = FakeContext(self.cluster, self.control)
        own = OwnTransactions(context)
        own.start()
        self.changes = 0
        return OwnCommits(context, own, Tasks("looks", context.supervision), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    @property
    def mapping(self) -> Any:
        pairs = self.control.state.links[LINK].pairs(Role.FOLLOWER, ResourceType.CONSUMER_GROUP)
        return pairs[0]

    def commits(self, producer_id: int, *keys: tuple[str, str], epoch: int = 0) -> None:
        """Commits of an open transaction, by group and topic."""
        records = [commit(group, topic, 3) for group, topic in keys]
        self.log.write(offsets_batch(self.log.end, records, producer_id, epoch))

    def _complete(self, transactional_id: str, transaction: Transaction) -> None:
        kind = Marker.COMMIT if transaction.state is S.COMPLETE_COMMIT else Marker.ABORT
        self.log.write(marker_batch(self.log.end, transaction.producer_id, kind, transaction.producer_epoch))
        if kind is Marker.COMMIT:
            self.cluster.offsets.setdefault("far-app-1", {})[PLACE] = committed_at(3)


def on_scene(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(600):
            await work(Scene())

    run_simulated(run())


async def over(scene: Scene, looks: OwnCommits, timeout_s: float = 10.0) -> None:
    await scene.replicas.until("it is over", lambda: looks.wait(LINK, scene.mapping) is None, timeout_s)


def reason(replicas: Replicas) -> str | None:
    told = status(replicas)
    return None if told is None else told.reason


def test_it_is_not_known_at_first_and_nothing_is_there_mostly() -> None:
    async def work(scene: Scene) -> None:
        scene.commits(-1, ("far-app-1", "remote-t"))
        looks = scene.look()
        first = looks.wait(LINK, scene.mapping)
        assert first is not None
        assert first.code == ReasonCode.TRANSACTIONS_ENDING
        await over(scene, looks)
        assert scene.changes == 1
        assert not scene.coordinators.fenced

    on_scene(work)


def test_of_all_that_commit_in_transactions_only_those_are_aborted_that_do_in_what_follows() -> None:
    async def work(scene: Scene) -> None:
        scene.coordinators.has("app", S.ONGOING, OFFSETS_TOPIC, producer_id=APP)
        scene.coordinators.has("other", S.ONGOING, OFFSETS_TOPIC, producer_id=OTHER)
        scene.commits(OTHER, ("elsewhere", "remote-t"), ("far-app-1", "not-followed"))
        scene.commits(APP, ("elsewhere", "remote-t"), ("far-app-1", "remote-t"))
        scene.commits(9, ("far-app-1", "remote-t"))
        scene.log.write(marker_batch(scene.log.end, 9, Marker.COMMIT, 0))
        await over(scene, scene.look())
        assert scene.coordinators.fenced == ["app"]

    on_scene(work)


def test_what_is_decided_is_waited_for_and_a_producer_that_nobody_knows_is_shown() -> None:
    async def work(scene: Scene) -> None:
        scene.coordinators.has("app", S.PREPARE_COMMIT, OFFSETS_TOPIC, producer_id=APP)
        scene.commits(APP, ("far-app-1", "remote-t"))
        looks = scene.look()
        looks.wait(LINK, scene.mapping)
        await asyncio.sleep(5)
        why = looks.wait(LINK, scene.mapping)
        assert why is not None
        assert "the transaction of 'app' in group far-app-1 to be completed: PrepareCommit" in why.message
        scene.commits(9, ("far-app-1", "remote-t"))
        scene.coordinators.has("app", S.COMPLETE_COMMIT, producer_id=APP)
        await asyncio.sleep(5)
        why = looks.wait(LINK, scene.mapping)
        assert why is not None
        assert why.message == "producer 9 has offsets of group far-app-1 in a transaction that no coordinator knows"
        scene.log.write(marker_batch(scene.log.end, 9, Marker.ABORT, 0))
        await over(scene, looks)
        assert not scene.coordinators.fenced

    on_scene(work)


@pytest.mark.parametrize("what", ["a partition without a leader", "a record of a newer broker"])
def test_what_cannot_be_read_is_waited_for(what: str) -> None:
    async def work(scene: Scene) -> None:
        if what == "a partition without a leader":
            scene.log.leader = -1
        else:
            scene.log.write(offsets_batch(scene.log.end, [(b"\x00\x7f", b"")], APP, 0))
        looks = scene.look()
        looks.wait(LINK, scene.mapping)
        await asyncio.sleep(2 * AGAIN_S)
        why = looks.wait(LINK, scene.mapping)
        assert why is not None
        assert why.message.startswith("__consumer_offsets cannot be read: ")
        if what == "a partition without a leader":
            scene.log.leader = 1
        else:
            scene.log.write(marker_batch(scene.log.end, APP, Marker.ABORT, 0))
        await over(scene, looks)

    on_scene(work)


def test_when_the_link_has_other_topics_it_is_looked_at_again() -> None:
    async def work(scene: Scene) -> None:
        looks = scene.look()
        await over(scene, looks)
        scene.coordinators.has("app", S.ONGOING, OFFSETS_TOPIC, producer_id=APP)
        scene.commits(APP, ("far-app-1", "more-t"))
        assert looks.wait(LINK, scene.mapping) is None
        scene.control.apply(CreateNamespace(ResourceType.TOPIC, "more-"))
        scene.control.apply(AttachNamespace(LINK, ResourceType.TOPIC, "more-", "lots-", Role.FOLLOWER))
        assert looks.wait(LINK, scene.mapping) is not None
        await over(scene, looks)
        assert scene.coordinators.fenced == ["app"]

    on_scene(work)


def test_what_a_decided_transaction_commits_late_is_put_right_before_anything_counts_as_certain() -> None:
    async def work(scene: Scene) -> None:
        replicas = scene.replicas
        scene.coordinators.has("app", S.PREPARE_COMMIT, OFFSETS_TOPIC, producer_id=APP)
        scene.commits(APP, ("far-app-1", "remote-t"))
        replicas.a.add_topic("local-t").partitions[0].write_values(*[b"x"] * 10)
        replicas.a.add_topic(OFFSETS_TOPIC)
        log(replicas, group_made("app-1"), commit("app-1", "local-t", 5))
        replicas.start()
        await replicas.connect()
        follower = replicas.ends["B"].parts.group_follower
        await replicas.until("it waits", lambda: reason(replicas) == ReasonCode.TRANSACTIONS_ENDING, 15)
        (group,) = follower.groups(LINK)
        await until_at(replicas, {PLACE: committed_at(5)})
        await asyncio.sleep(15)
        assert not group.certain
        assert not group.has_as_wanted(PLACE)

        scene.coordinators.has("app", S.COMPLETE_COMMIT, producer_id=APP)
        assert scene.cluster.offsets["far-app-1"][PLACE] == committed_at(3)
        await replicas.until("it is certain", lambda: group.settled, 15)
        assert scene.cluster.offsets["far-app-1"][PLACE] == committed_at(5)
        assert reason(replicas) is None
        await replicas.stop()

    on_scene(work)
