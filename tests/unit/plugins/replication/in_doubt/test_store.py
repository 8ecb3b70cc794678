"""The store of decisions on a cluster that loses requests and has them land late: the latest of each stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated
from support.replicas import LINK, LINK_ID
from support.seeds import seeds

from isthmus_control.commands import AttachNamespace, CreateLink, DetachNamespace
from isthmus_control.model import ResourceType, Role
from isthmus_control.sealing import Sealer, Secret
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.in_doubt.store import (
    DECISION,
    TOPIC,
    Entry,
    PlaceDecision,
    TransactionStore,
    merged,
)
from isthmus_plugins.replication.in_doubt.sweep import TransactionSweep
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkRejected
from isthmus_plugins.replication.link.features import FEATURES
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol.producer_ids import ProducerIdRange
from isthmus_protocol.records import TRANSACTIONAL_BIT

X = 4711


class _Connection:
    def __init__(self) -> None:
        self.link_name = LINK
        self.peer = {"proxy": "a"}
        self.peer_features = frozenset(FEATURES)


class Scene:
    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.cluster = FakeCluster(rng, [1, 2])
        self.control = FakeControl("B", rng)
        secret = Sealer(None).seal(Secret(b"secret"), LINK_ID)
        self.control.apply(CreateLink(LINK, LINK_ID, "A", False, ("127.0.0.1:1",), (), secret))
        topics = AttachNamespace(LINK, ResourceType.TOPIC, "", "", Role.FOLLOWER, create_missing=True)
        self.control.apply(topics)
        self.connection: Any = _Connection()

    def store(self, name: str = "p") -> TransactionStore:
        context: Any = FakeContext(self.cluster, self.control, name)
        return TransactionStore(context, lambda connection: None)


def decision(number: int, *places: tuple[str, int, int], producer_id: int = X) -> calls.Decision:
    decided = tuple(calls.DecidedPlace(*place) for place in places)
    return calls.Decision("app", producer_id, 3, 3, calls.LogPlace(5, number), decided)


async def decide(store: TransactionStore, connection: Any, *decisions: calls.Decision) -> calls.DecideAnswer:
    question = calls.Decide(decisions)
    store.announced(connection, question)
    return await store.on_decide(connection, question)


def run(test: Callable[[Scene], Awaitable[None]], seed: int = 1) -> None:
    run_simulated(test(Scene(seed)))


def test_a_decision_is_there_for_every_partition_and_a_later_one_replaces_what_it_touches() -> None:
    async def main(scene: Scene) -> None:
        store = scene.store()
        store.start()
        await decide(store, scene.connection, decision(1, ("t", 0, 10), ("t", 1, 20)))
        await decide(store, scene.connection, decision(2, ("t", 1, 30)), decision(2, ("t", 1, 9), producer_id=1))
        found = await store.read(LINK_ID)
        assert found.decisions == {
            (X, "t", 0): PlaceDecision("app", (5, -1, 1), 3, 3, 10),
            (X, "t", 1): PlaceDecision("app", (5, -1, 2), 3, 3, 30),
            (1, "t", 1): PlaceDecision("app", (5, -1, 2), 3, 3, 9),
        }
        assert found.commits(X, 3, ("t", 0), 9)
        assert not found.commits(X, 3, ("t", 0), 10), "of the next transaction"
        assert not found.commits(X, 2, ("t", 0), 9), "of another epoch"
        assert not found.commits(X, 3, ("t", 2), 9)
        assert not (await store.read("another")).decisions
        await store.put([Entry(("o", LINK_ID, X, "group"), {"positions": [1]}), Entry(("o", LINK_ID, X, "g"), {})])
        await store.put([Entry(("o", LINK_ID, X, "g"), None)])
        assert (await store.read(LINK_ID)).others == {("o", LINK_ID, X, "group"): {"positions": [1]}}
        assert scene.cluster.found[TOPIC].configs["cleanup.policy"] == "compact"
        await store.stop()

    run(main)


def test_what_is_under_way_is_known_from_its_arrival_on() -> None:
    async def main(scene: Scene) -> None:
        durable: list[Any] = []
        context: Any = FakeContext(scene.cluster, scene.control)
        store = TransactionStore(context, durable.append)
        store.start()
        connection = scene.connection
        first, later = (calls.Decide((decision(number, ("t", 0, 10)),)) for number in (1, 2))
        store.announced(connection, first)
        store.announced(connection, later)
        assert store.awaits(connection, X)
        assert not store.awaits(connection, X + 1)
        await store.on_decide(connection, first)
        assert store.awaits(connection, X)
        await store.on_decide(connection, later)
        assert not store.awaits(connection, X)
        assert durable == [connection] * 2
        store.announced(connection, first)
        store.connection_lost(connection)
        assert not store.awaits(connection, X)
        await store.stop()

    run(main)


def test_what_was_refused_is_under_way_until_the_connection_ends() -> None:
    async def main(scene: Scene) -> None:
        context: Any = FakeContext(scene.cluster, scene.control)
        store = TransactionStore(context, lambda connection: None)
        store.start()
        connection, first = scene.connection, calls.Decide((decision(1, ("t", 0, 10)),))
        context.lease_deadline = 0.0
        store.announced(connection, first)
        with pytest.raises(LinkRejected, match="lease"):
            await store.on_decide(connection, first)
        assert store.awaits(connection, X), "its marker may be behind it on the connection"
        store.connection_lost(connection)
        assert not store.awaits(connection, X)
        await store.stop()

    run(main)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_what_follows_no_more_is_not_told_to_be_durable(meanwhile: bool) -> None:
    """A failover that every proxy knows of may have read the store already."""

    async def main(scene: Scene) -> None:
        store = scene.store()
        store.start()
        put = store.put

        async def detached(entries: Any = ()) -> None:
            await put(entries)
            scene.control.apply(DetachNamespace(LINK, ResourceType.TOPIC, ""))

        if meanwhile:
            store.put = detached  # type: ignore[method-assign]
        else:
            await detached()
        answer = await decide(store, scene.connection, decision(1, ("t", 0, 10)))
        assert answer.unfollowed == ("t",)
        assert not store.awaits(scene.connection, X)
        assert bool((await store.read(LINK_ID)).decisions) == meanwhile
        scene.connection.peer_features = frozenset()
        with pytest.raises(LinkRejected, match="does not follow"):  # a peer of before would take it for stored
            await decide(store, scene.connection, decision(2, ("t", 0, 10)))
        await store.stop()

    run(main)


@pytest.mark.parametrize("seed", seeds(30))
def test_the_latest_decision_is_the_one_that_stays(seed: int) -> None:
    """Requests get lost and land late, brokers move, the process is killed: of what was durable, nothing is undone."""

    async def main(scene: Scene) -> None:
        rng = random.Random(seed)
        scene.cluster.trouble = 0.3
        names = ["p", "q"]
        stores = {name: scene.store(name) for name in names}
        for store in stores.values():
            store.start()
        durable = [0, 0, 0]
        for number in range(1, 25):
            name = rng.choice(names)
            if rng.random() < 0.15:  # killed, with an append under way or not, and started again
                tasks = Tasks("lost", Supervision())
                tasks.start("decide", decide(stores[name], scene.connection, decision(number, ("t", 0, number))))
                await asyncio.sleep(rng.uniform(0, 0.05))
                await tasks.close()
                await stores[name].stop()
                stores[name] = scene.store(name)
                stores[name].start()
            partitions = rng.sample(range(3), rng.randint(1, 3))
            places = [("t", partition, number) for partition in partitions]
            await decide(stores[name], scene.connection, decision(number, *places))
            for partition in partitions:
                durable[partition] = number
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0, 3))
            # As a cleaner would leave it: the last of each key. What lands late must not come after.
            if TOPIC in scene.cluster.found:
                scene.cluster.trouble = 0.0
                found = (await stores[name].read(LINK_ID)).decisions
                scene.cluster.trouble = 0.3
                for partition, at_least in enumerate(durable):
                    known = found.get((X, "t", partition))
                    assert (0 if known is None else known.identity[2]) >= at_least
        for store in stores.values():
            await store.stop()

    run(main, seed)


def test_copies_are_put_together() -> None:
    def entry(sender: str, at: int, end: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        value = {"id": "app", "epoch": 1, "data_epoch": 0, "at": [0, at], "end": end}
        return (DECISION, LINK_ID, X, "t", 0, sender, "q"), value

    carried = entry("e", 7, 14)
    carried[1]["earlier"] = [[9, 8, 5]]
    stale = entry("f", 6, 1)
    stale[1]["earlier"] = [[2, 1, 3]]
    entries = [entry("a", 7, 12), entry("b", 7, 11), carried, entry("c", 7, 13), stale]
    for order in (entries, entries[::-1]):
        found = merged(order)
        decided = PlaceDecision("app", (0, -1, 7), 1, 0, 11, ((2, 1, 3), (9, 8, 5)))
        assert found.decisions == {(X, "t", 0): decided}
    older = entry("a", 5, 4)
    older[1].update(epoch=5, data_epoch=5)
    (found_older,) = merged([older, entry("a (again)", 7, 9)]).decisions.values()
    assert found_older.earlier == ((5, 5, 4),)


def test_a_later_leader_epoch_is_later_at_whatever_offset() -> None:
    """The source's transaction log lost its end, and uses offsets again."""

    def entry(sender: str, at: list[int], epoch: int, end: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        value = {"id": "app", "epoch": epoch, "data_epoch": epoch, "at": at, "end": end}
        return (DECISION, LINK_ID, X, "t", 0, sender, "q"), value

    lost, later = entry("a", [0, 9, 4], 1, 10), entry("b", [0, 7, 6], 2, 20)
    for order in ([lost, later], [later, lost]):
        (found,) = merged(order).decisions.values()
        assert (found.identity, found.producer_epoch, found.end) == ((0, 6, 7), 2, 20)

    async def main(scene: Scene) -> None:
        store = scene.store()
        store.start()
        for place, end in ((calls.LogPlace(5, 9, 4), 10), (calls.LogPlace(5, 7, 6), 20)):
            await decide(store, scene.connection, replace(decision(0, ("t", 0, end)), at=place))
        (found,) = (await store.read(LINK_ID)).decisions.values()
        assert (found.identity, found.end) == ((5, 6, 7), 20)
        await store.stop()

    run(main)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_peer_of_before_decides_after_a_downgrade_is_later(restarted: bool) -> None:
    """It says no leader epoch of its transaction log, as what is stored already did."""

    async def main(scene: Scene) -> None:
        store = scene.store()
        store.start()
        await decide(store, scene.connection, replace(decision(0, ("t", 0, 10)), at=calls.LogPlace(5, 9, 4)))
        if restarted:
            await store.stop()
            store = scene.store("another")
            store.start()
        await decide(store, scene.connection, replace(decision(0, ("t", 0, 20)), at=calls.LogPlace(5, 12)))
        (found,) = (await store.read(LINK_ID)).decisions.values()
        assert (found.identity[2], found.end) == (12, 20)
        # And after an upgrade what says one is later again; what was before it is no later for saying none.
        await decide(store, scene.connection, replace(decision(0, ("t", 0, 30)), at=calls.LogPlace(5, 15, 6)))
        await decide(store, scene.connection, replace(decision(0, ("t", 0, 5)), at=calls.LogPlace(5, 7)))
        (found,) = (await store.read(LINK_ID)).decisions.values()
        assert (found.identity, found.end) == ((5, 6, 15), 30)
        await store.stop()

    run(main)


def test_earlier_decisions_count_until_they_are_carried_out() -> None:
    async def main(scene: Scene) -> None:
        store = scene.store()
        store.start()
        earlier = calls.Earlier(4, 3, 20), calls.Earlier(6, 5, 30)
        place = calls.DecidedPlace("t", 0, 50, earlier)
        await decide(store, scene.connection, replace(decision(9), epoch=8, data_epoch=7, places=(place,)))
        found = await store.read(LINK_ID)
        for epoch, end in ((7, 50), (5, 30), (3, 20)):
            commit = found.commits(X, epoch, ("t", 0), end - 1)
            assert commit is not None
            assert (commit.producer_epoch, commit.end) == (epoch + 1, end)
            assert not found.commits(X, epoch, ("t", 0), end)
        await store.stop()

    run(main)


@pytest.mark.parametrize("idle", [True, False])
def test_what_a_power_loss_took_is_stored_again(idle: bool) -> None:
    """Before anything is read, or appended: what comes later may replace it."""

    async def main(scene: Scene) -> None:
        store = scene.store()
        store.start()
        for number in range(1, 5):
            await decide(store, scene.connection, decision(number, ("t", number % 2, 10 * number)))
        assert store.is_whole()
        before = await store.read(LINK_ID)
        scene.cluster.lose_ends(1, lambda partition: 3)
        other = scene.store("other")  # another proxy stores its own before this one has looked
        other.start()
        for number in range(5):
            await decide(other, scene.connection, decision(1, ("u", 0, 1), producer_id=100 + number))
        await other.stop()
        assert not store.is_whole()
        if not idle:
            await decide(store, scene.connection, decision(5, ("t", 0, 50), producer_id=X + 1))
        after = await store.read(LINK_ID)
        assert {key: after.decisions[key] for key in before.decisions} == before.decisions
        assert store.is_whole()
        assert ((X + 1, "t", 0) in after.decisions) is not idle
        end = scene.cluster.partition(TOPIC).end
        scene.cluster.lose_ends(1, lambda partition: 0)
        assert (await store.read(LINK_ID)).decisions == after.decisions
        assert scene.cluster.partition(TOPIC).end == end, "nothing is stored again that was not lost"
        await store.stop()

    run(main)


def test_a_topic_that_is_not_fit_for_it_is_not_used() -> None:
    async def main(scene: Scene) -> None:
        scene.cluster.add_topic(TOPIC, 1, {"cleanup.policy": "delete"})
        store = scene.store()
        with pytest.raises(OperationError, match="delete"):
            await store.prepare()
        await store.stop()

    run(main)


def test_entries_of_producers_that_are_gone_are_taken_out() -> None:
    async def main(scene: Scene) -> None:
        store = scene.store()
        store.start()
        target = scene.cluster.add_topic("t").partitions[0]
        open_id = ProducerIdRange(3).start + 5
        target.write_values(*[b"x"] * 10)
        target.write_values(b"y", producer_id=open_id, producer_epoch=3, base_sequence=0, attributes=TRANSACTIONAL_BIT)
        count = 10_000
        for start in range(0, count, 1000):
            some = range(start, start + 1000)
            await decide(store, scene.connection, *(decision(1, ("t", 0, 10), producer_id=each) for each in some))
        await decide(store, scene.connection, decision(1, ("t", 0, 12), producer_id=count), decision(2, ("t", 0, 5)))
        later = decision(3, ("t", 0, 10), producer_id=2)
        another = scene.store("q")
        another.start()
        await decide(another, scene.connection, decision(0, ("t", 0, 3), producer_id=1))
        sweep = TransactionSweep(store._context, store, lambda link, partition: -1)
        assert await sweep.sweep() == 0, "it was not there before"
        await decide(store, scene.connection, later)
        assert await sweep.sweep() == count - 3
        left = {key[2] for key in await store.entries()}
        assert left == {1, 2, 5, count}, "an older copy, decided again, open, and not all there"
        assert len(store._latest) == 4
        await another.stop()
        await store.stop()

    run(main)


def test_of_copies_those_with_a_larger_end_are_taken_out_first() -> None:
    """Alone they would commit what comes behind the decision's own end."""

    async def main(scene: Scene) -> None:
        scene.cluster.add_topic("t").partitions[0].write_values(*[b"x"] * 10)
        stores = {name: scene.store(name) for name in "pqr"}
        sweeps = {}
        for (name, store), end in zip(stores.items(), (10, 20, calls.OPEN_END), strict=True):
            store.start()
            await decide(store, scene.connection, decision(1, ("t", 0, end)))
            sweeps[name] = TransactionSweep(store._context, store, lambda link, partition: -1)
        for sweep in sweeps.values():
            await sweep.sweep()
        taken_out = []
        for _ in range(3):
            for name, sweep in sweeps.items():
                taken_out += [name] * await sweep.sweep()
                found = (await stores["p"].read(LINK_ID)).commits(X, 3, ("t", 0), 10)
                assert found is None, "of the next transaction"
        assert taken_out == ["r", "q", "p"]
        for store in stores.values():
            await store.stop()

    run(main)


def test_a_decision_without_an_end_commits_what_is_open_until_its_end_is_known() -> None:
    async def main(scene: Scene) -> None:
        store, other = scene.store(), scene.store("q")
        for each in (store, other):
            each.start()
            await decide(each, scene.connection, decision(1, ("t", 0, 10), ("u", 0, calls.OPEN_END)))
        found = await store.read(LINK_ID)
        assert found.commits(X, 3, ("u", 0), 1_000_000)
        assert not found.commits(X, 2, ("u", 0), 0), "of another epoch"
        await decide(other, scene.connection, decision(1, ("t", 0, 10), ("u", 0, 7)))
        found = await store.read(LINK_ID)
        assert found.commits(X, 3, ("u", 0), 6)
        assert not found.commits(X, 3, ("u", 0), 7)
        for each in (store, other):
            await each.stop()

    run(main)
