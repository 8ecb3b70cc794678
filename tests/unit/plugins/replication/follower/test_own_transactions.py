"""What this cluster's own producers have open ends before their topics follow, or it is told what is waited for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.coordinators import Coordinators
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated, simulated_now
from support.plugins import Proxy, Two, on_two
from support.replicas import LINK, Replicas
from support.transaction_state import state_key

from isthmus_control.commands import AttachNamespace, DetachNamespace
from isthmus_control.model import NamespaceMapping, Reason, ResourceType, Role
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import Attach
from isthmus_plugins.replication.follower.own_transactions import LOOK_S, OwnTransactions
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, TransactionState

S = TransactionState


class Scene(Coordinators):
    """A cluster that led topics which are to follow, its coordinators, and one process of it."""

    def __init__(self) -> None:
        replicas = Replicas(random.Random(1), 1)
        self.cluster: FakeCluster = replicas.b
        self.cluster.on_new_partition = lambda *made: None
        self.cluster.brokers = [1, 2]
        self.control: FakeControl = replicas.controls["B"]
        super().__init__(self.cluster)
        for partition in self.partitions:
            partition.move(1)
        self.restart()

    def restart(self) -> None:
        """Another process."""
        self.context: Any = FakeContext(self.cluster, self.control)
        self.own = OwnTransactions(self.context)
        self.own.start()

    @property
    def mapping(self) -> NamespaceMapping:
        (mapping,) = self.control.state.links[LINK].mappings
        return mapping

    async def ask(self) -> Reason | None:
        return await self.own.keeps_from_following(LINK, self.mapping)


def on_scene(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        async with asyncio.timeout(600):
            await work(scene)
        await scene.own.stop()

    run_simulated(run())


def test_a_cluster_without_transactions_is_not_kept_waiting() -> None:
    async def work(scene: Scene) -> None:
        del scene.cluster.found[TRANSACTION_TOPIC]
        assert await scene.ask() is None
        assert scene.own.are_over(LINK, scene.mapping)

    on_scene(work)


def test_what_is_ongoing_in_the_namespace_is_aborted_and_waited_for_and_nothing_else() -> None:
    async def work(scene: Scene) -> None:
        scene.has("spans", S.ONGOING, "remote-t", "else")
        scene.has("elsewhere", S.ONGOING, "else")
        scene.has("offsets", S.ONGOING, "__consumer_offsets")
        scene.has("done", S.COMPLETE_COMMIT)
        assert not scene.own.are_over(LINK, scene.mapping)
        assert await scene.ask() is None
        assert scene.fenced == ["spans"]
        assert scene.latest["spans"].state is S.COMPLETE_ABORT
        assert scene.own.are_over(LINK, scene.mapping)

    on_scene(work)


def test_what_is_decided_is_waited_for_and_its_producer_left_alone() -> None:
    async def work(scene: Scene) -> None:
        scene.has("decided", S.PREPARE_COMMIT, "remote-t")
        waits = await scene.ask()
        assert waits == Reason(
            ReasonCode.TRANSACTIONS_ENDING,
            "the topic namespace 'remote-' waits for the transaction of 'decided' in remote-t-0 to be completed: "
            "PrepareCommit since 2023-11-14 22:13:20 UTC, coordinated by broker 1",
        )
        assert await scene.ask() == waits, "the words stay while nothing changes"
        scene.has("decided", S.COMPLETE_COMMIT)
        assert await scene.ask() is None
        assert not scene.fenced

    on_scene(work)


def test_an_abort_that_cannot_end_is_shown_and_found_again_by_the_next_process() -> None:
    async def work(scene: Scene) -> None:
        scene.aborts_in_s = None
        scene.has("stuck", S.ONGOING, "remote-t")
        scene.has("later", S.PREPARE_ABORT, "remote-u")
        waits = await scene.ask()
        assert waits is not None
        assert "'later' in remote-u-0 to be completed: PrepareAbort" in waits.message
        assert waits.message.endswith(", and 1 more")
        await scene.own.stop()

        scene.restart()
        assert await scene.ask() == waits
        assert scene.fenced == ["stuck"], "once it is decided nobody fences it again"
        scene.has("later", S.COMPLETE_ABORT)
        scene.has("stuck", S.COMPLETE_ABORT)
        assert await scene.ask() is None

    on_scene(work)


def test_a_producer_that_begins_anew_elsewhere_is_not_fenced() -> None:
    async def work(scene: Scene) -> None:
        scene.has("app", S.ONGOING, "remote-t")
        scene.has("app", S.COMPLETE_ABORT, epoch=1)
        scene.has("app", S.ONGOING, "else", epoch=1)
        assert await scene.ask() is None
        assert not scene.fenced

    on_scene(work)


def test_a_coordinator_that_is_away_is_waited_for() -> None:
    async def work(scene: Scene) -> None:
        scene.has("app", S.ONGOING, "remote-t")
        scene.log_of("app").move(2)
        scene.cluster.down.add(2)
        waits = await scene.ask()
        assert waits is not None
        assert waits.message == (
            "the topic namespace 'remote-' waits for __transaction_state to be read: not all partitions of "
            "__transaction_state can be read"
        )
        scene.cluster.down.clear()
        assert await scene.ask() is None
        assert scene.fenced == ["app"]

    on_scene(work)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KafkaRefused(53, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", ""), "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"),
        (BrokerUnavailable("no answer"), "no answer"),
    ],
)
def test_a_producer_that_cannot_be_fenced_is_waited_for(error: Exception, said: str) -> None:
    async def work(scene: Scene) -> None:
        def refuse(*producer: object) -> None:
            raise error

        scene.cluster.fence = refuse
        scene.has("app", S.ONGOING, "remote-t")
        waits = await scene.ask()
        assert waits is not None
        assert waits.message.startswith(
            "the topic namespace 'remote-' waits for the transaction of 'app' in remote-t-0"
        )
        assert waits.message.endswith(f": {said}")
        scene.has("app", S.COMPLETE_COMMIT)
        assert await scene.ask() is None

    on_scene(work)


@pytest.mark.parametrize("whose", ["a key", "a value"])
def test_what_cannot_be_read_is_waited_for_and_not_guessed(whose: str) -> None:
    async def work(scene: Scene) -> None:
        newer = (b"\x00\x09", b"") if whose == "a key" else (state_key("app"), b"\x00\x09")
        scene.write(scene.partitions[0], *newer)
        waits = await scene.ask()
        assert waits is not None
        assert "__transaction_state-0 has what this version cannot read" in waits.message
        assert "version 9" in waits.message
        if whose == "a value":
            scene.write(scene.partitions[0], state_key("app"), None)
            assert await scene.ask() is None

    on_scene(work)


def test_nothing_is_read_before_every_proxy_refuses_writes() -> None:
    async def work(scene: Scene) -> None:
        enforced = asyncio.Event()

        async def wait(offset: int) -> None:
            assert offset == scene.mapping.attached_at_offset
            await enforced.wait()

        scene.control.enforced = wait  # type: ignore[method-assign]
        scene.has("app", S.ONGOING, "remote-t")
        waits = await scene.ask()
        assert waits is not None
        assert waits.message == "the topic namespace 'remote-' waits for every proxy to refuse clients' writes to it"
        assert not scene.fenced
        enforced.set()
        assert await scene.ask() is None

    on_scene(work)


def test_nobody_is_fenced_by_a_proxy_without_a_lease_or_for_a_namespace_that_follows_no_more() -> None:
    async def work(scene: Scene) -> None:
        scene.has("app", S.ONGOING, "remote-t")
        scene.context.lease_deadline = 0.0
        waits = await scene.ask()
        assert waits is not None
        assert waits.message.endswith("this proxy has no lease now")
        scene.context.lease_deadline = float("inf")

        mapping = scene.mapping
        scene.control.apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
        waits = await scene.own.keeps_from_following(LINK, mapping)
        assert waits is not None
        assert waits.message.endswith("it does not follow any more")
        assert not scene.fenced

    on_scene(work)


def test_what_is_attached_again_is_looked_at_again() -> None:
    async def work(scene: Scene) -> None:
        assert await scene.ask() is None
        scene.control.subscribe(scene.own.control_changed)
        scene.control.apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
        scene.has("app", S.ONGOING, "remote-t")
        scene.control.apply(
            AttachNamespace(LINK, ResourceType.TOPIC, "remote-", "local-", Role.FOLLOWER, create_missing=True)
        )
        assert not scene.own.are_over(LINK, scene.mapping)
        assert await scene.ask() is None
        assert scene.fenced == ["app"]

    on_scene(work)


def test_who_asks_at_the_same_time_waits_for_the_same() -> None:
    async def work(scene: Scene) -> None:
        scene.has("decided", S.PREPARE_ABORT, "remote-t")
        began, before = simulated_now(), scene.cluster.requests
        alone = await scene.ask()
        cost = scene.cluster.requests - before
        assert simulated_now() - began == pytest.approx(LOOK_S, abs=0.1)
        before = scene.cluster.requests
        assert await asyncio.gather(*(scene.ask() for _ in range(100))) == [alone] * 100
        assert scene.cluster.requests - before < 2 * cost

    on_scene(work)


def test_a_topic_that_is_cut_is_looked_at_anew_each_time_and_alone() -> None:
    """Who writes past the proxies to a follower may do so in a transaction."""

    async def work(scene: Scene) -> None:
        assert await scene.ask() is None
        scene.has("rogue", S.ONGOING, "remote-t")
        scene.has("other", S.ONGOING, "remote-u")
        assert await scene.own.keeps_from_cutting("remote-t") is None
        assert scene.fenced == ["rogue"]
        scene.has("rogue", S.ONGOING, "remote-t", epoch=1)
        assert await scene.own.keeps_from_cutting("remote-t") is None
        assert scene.fenced == ["rogue", "rogue"]
        assert await scene.own.keeps_from_cutting("in-no-namespace") is None

    on_scene(work)


def test_topics_into_which_markers_come_are_told_and_nothing_is_done_about_them() -> None:
    async def work(scene: Scene) -> None:
        assert await scene.own.open_topics() == set()
        scene.has("spans", S.ONGOING, "remote-t", "else")
        scene.has("decided", S.PREPARE_COMMIT, "remote-u")
        scene.has("done", S.ONGOING, "remote-v")
        scene.has("done", S.COMPLETE_COMMIT)
        assert await scene.own.open_topics() == {"remote-t", "else", "remote-u"}
        assert not scene.fenced
        scene.log_of("spans").move(2)
        scene.cluster.down.add(2)
        with pytest.raises(BrokerUnavailable, match="can be read"):
            await scene.own.open_topics()
        scene.cluster.down.clear()
        scene.write(scene.partitions[0], state_key("newer"), b"\x00\x09")
        with pytest.raises(BrokerUnavailable, match=r"which transactions are open is not known: .* version 9"):
            await scene.own.open_topics()

    on_scene(work)


def test_both_sides_show_what_a_topic_waits_for() -> None:
    async def work(two: Two) -> None:
        await two.create()
        coordinators = Coordinators(two.clusters["B"])
        coordinators.has("app", S.PREPARE_COMMIT, "r-t")
        two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"1")
        await two.a.links.attach("a-to-b", Attach(local="l-", remote="r-", role="leader"))

        def shown(proxy: Proxy) -> tuple[str, int, str] | None:
            told = (each for each in proxy.status().partitions if each.reason == ReasonCode.TRANSACTIONS_ENDING)
            return next(((each.topic, each.partition, each.state) for each in told), None)

        await two.until("it is shown", lambda: shown(two.a) and shown(two.b))
        assert shown(two.a) == ("l-t", 0, "Catching Up")
        assert shown(two.b) == ("r-t", -1, "Catching Up")
        coordinators.has("app", S.COMPLETE_COMMIT)
        await two.until("it follows", lambda: "r-t" in two.clusters["B"].found)
        await two.until("it is shown no more", lambda: not shown(two.a) and not shown(two.b))

    on_two(work, 60)


def test_a_plan_to_truncate_counts_what_is_open() -> None:
    async def work(two: Two) -> None:
        await two.create()
        coordinators = Coordinators(two.clusters["B"])
        for topic in ("t", "u"):
            two.clusters["A"].add_topic(f"l-{topic}")
            two.clusters["B"].add_topic(f"r-{topic}")
        coordinators.has("app", S.ONGOING, "r-t")
        asked = Attach(local="l-", remote="r-", role="leader", truncate_target=True, dry_run=True)
        planned = await two.a.links.attach("a-to-b", asked)
        assert {each.topic: each.action for each in planned.topics} == {"r-t": "truncate", "r-u": "follow"}

    on_two(work, 60)
