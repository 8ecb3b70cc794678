"""Reversals back and forth with proxies killed, links cut and control logs in trouble, under clients that write on.

Each cluster's log says who may write there: never both, whatever was killed when. What was acked is in both logs in
the end, once, in one order.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.fake_cluster import FakeControl
from support.loopback import run_on_loopback
from support.offsets import commit, group_made, offsets_batch
from support.plugins import Proxy, Two
from support.seeds import seeds

from isthmus_control.commands import AbandonReversal, Body, HandOver, ReleaseLease, TakeBack
from isthmus_control.control_state import ControlState
from isthmus_control.model import LinkMode, ResourceType, ReversalStep, Role
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, TopicPartition
from isthmus_plugins.links import NamespaceRef, OperationError
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
LINK = "a-to-b"
LEADS = links.Attach(local="a-", remote="b-", role="leader")
GROUPS = links.Attach(
    type="consumer-group", local="ga-", remote="gb-", role="leader", disable_transaction_verification=True
)
PREFIXES = {"A": ("a-", "ga-"), "B": ("b-", "gb-")}
PARTITIONS = 2


class Own:
    """A control log as one process has it: what it does when it is dead nobody hears."""

    def __init__(self, shared: FakeControl, append: Callable[[Body], Awaitable[Any]]) -> None:
        self._shared = shared
        self.append = append
        self._subscribers: list[Callable[[ControlState], None]] = []
        shared.subscribe(self._changed)

    async def append_all(self, bodies: Sequence[Body]) -> list[Any]:
        return [await self.append(body) for body in bodies]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    def subscribe(self, changed: Callable[[ControlState], None]) -> None:
        self._subscribers.append(changed)

    def unsubscribe_all(self) -> None:
        self._subscribers.clear()

    def _changed(self, state: ControlState) -> None:
        for changed in self._subscribers:
            changed(state)


class Scene:
    """``kills``: so many times a proxy is killed at one of its commands, before or after that stands in the log.

    With ``sidecars`` each cluster has two brokers, and a proxy for each.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.synchronous = self.random.random() < 0.4
        self.sidecars = self.random.random() < 0.5
        self.two = Two(brokers=2 if self.sidecars else 1)
        self.kills = 0
        self.dying: dict[str, asyncio.Task[None]] = {}
        self.acked: list[bytes] = []
        self.committed = 0
        self.seen = Counter[str]()
        self.clients: list[asyncio.Task[None]] = []
        self.proxies: dict[str, Proxy] = {}
        for name in ("a", "b", "a2", "b2") if self.sidecars else ("a", "b"):
            self.proxies[name] = self.made(name)
        self.two.a, self.two.b = self.proxies["a"], self.proxies["b"]

    def made(self, name: str) -> Proxy:
        cluster = name[0].upper()

        async def append(body: Body) -> Any:
            return await self.append(name, body)

        own: Any = Own(self.two.controls[cluster], append)
        fronted = frozenset({2 if name.endswith("2") else 1}) if self.sidecars else None
        return Proxy(self.two.clusters[cluster], own, name, fronted)

    def side(self, name: str) -> Proxy:
        """A proxy of a cluster that runs."""
        found = [each for each in self.proxies if each[0] == name.lower() and each not in self.dying]
        return self.proxies[self.random.choice(found or [name.lower()])]

    def state(self, name: str) -> ControlState:
        return self.two.controls[name].state

    def writable(self, name: str, kind: ResourceType = TOPIC) -> bool:
        prefix = PREFIXES[name][kind is GROUP]
        lookup = self.state(name).lookup
        if kind is TOPIC:
            return lookup.topic_reservation(prefix + "t") is None
        return lookup.reservation(kind, prefix + "g") is None

    def values(self, name: str) -> list[list[bytes | None]]:
        topic = self.two.clusters[name].found.get(PREFIXES[name][0] + "t")
        return [[each.value for each in log.records().values()] for log in topic.partitions] if topic else []

    def are_equal(self) -> bool:
        return bool(self.values("A")) and self.values("A") == self.values("B")

    def leader(self) -> str | None:
        found = [
            name
            for name in "AB"
            if (mapping := self.state(name).links[LINK].mapping(TOPIC, PREFIXES[name][0])) is not None
            and mapping.role is Role.LEADER
        ]
        return found[0] if len(found) == 1 else None

    # ---- what is watched ----

    def watch(self, name: str) -> None:
        control = self.two.controls[name]
        apply = control.apply

        def applied(body: Any) -> Any:
            outcome = apply(body)
            for kind in (TOPIC, GROUP):
                assert not (self.writable("A", kind) and self.writable("B", kind)), f"two lead after {body}"
            if isinstance(body, HandOver | TakeBack | AbandonReversal):
                self.seen[f"{type(body).__name__} {type(outcome).__name__}"] += 1
            return outcome

        control.apply = applied  # type: ignore[method-assign]

    async def append(self, name: str, body: Body) -> Any:
        """What a process records, which may be the last that it does."""
        control = self.two.controls[name[0].upper()]
        dies = self.kills and name not in self.dying and self.random.random() < 0.15
        if dies and self.random.random() < 0.5:
            self.die(name)
            raise BrokerUnavailable("killed before it was recorded")
        outcome = await control.append(body)
        if dies:
            self.die(name)
        return outcome

    def die(self, name: str) -> None:
        if name in self.dying:
            return
        self.kills -= 1
        self.seen["kills"] += 1
        self.dying[name] = asyncio.get_running_loop().create_task(self._die(name))

    async def _die(self, name: str) -> None:
        before = self.proxies[name]
        control = self.two.controls[name[0].upper()]
        await before.stop()
        before.context.control.unsubscribe_all()
        await asyncio.sleep(self.random.choice((0.0, 0.5, 3.0)))
        # The others find that its lease has run out before the next process starts, or a while after.
        over = ReleaseLease(before.context.proxy_name, before.context.incarnation)
        if self.random.random() < 0.7:
            control.apply(over)
        else:
            asyncio.get_running_loop().call_later(10, control.apply, over)
        after = self.made(name)
        listener = after.context.link_listener
        assert listener is not None
        assert before.context.port is not None
        after.context.link_listener = replace(listener, port=before.context.port)
        self.proxies[name] = after
        if name in ("a", "b"):
            setattr(self.two, name, after)
        await after.start()
        del self.dying[name]

    def cut(self) -> None:
        for name, proxy in self.proxies.items():
            if name not in self.dying:
                for connection in proxy.plugin.parts.peers.connections(LINK):
                    connection.close("a fault of the simulation")
                    self.seen["cuts"] += 1

    # ---- clients ----

    async def write_on(self) -> None:
        """A client that writes wherever it may, and knows what was acked."""
        number = 0
        while True:
            await asyncio.sleep(self.random.uniform(0.02, 0.2))
            for name in "AB":
                topic = self.two.clusters[name].found.get(PREFIXES[name][0] + "t")
                if topic is None or not self.writable(name):
                    continue
                value = b"%s %d" % (name.encode(), number)
                number += 1
                topic.partitions[self.random.randrange(PARTITIONS)].write_values(value)
                self.acked.append(value)

    async def commit_on(self) -> None:
        """A consumer group that goes on where it was, on either side."""
        while True:
            await asyncio.sleep(self.random.uniform(0.1, 0.5))
            for name in "AB":
                if self.writable(name, GROUP) and self.writable(name):
                    topics, groups = PREFIXES[name]
                    cluster = self.two.clusters[name]
                    place = topics + "t", 0
                    here = cluster.offsets.get(groups + "g", {}).get(place)
                    assert (0 if here is None else here.offset) == self.committed, "the group goes on where it was"
                    if cluster.partition(*place).end > self.committed:
                        self.committed += 1
                        committed = CommittedOffset(self.committed, "")
                        cluster.offsets.setdefault(groups + "g", {})[place] = committed
                        self.log_commit(name, groups + "g", place, committed)

    def log_commit(self, name: str, group: str, place: TopicPartition, committed: CommittedOffset) -> None:
        """Write it to the cluster's offsets topic, as its coordinator does."""
        partition = self.two.clusters[name].partition(OFFSETS_TOPIC)
        records = [group_made(group), commit(group, place[0], committed.offset, place[1])]
        partition.write(offsets_batch(partition.end, records))

    def committed_at(self, name: str) -> int:
        topics, groups = PREFIXES[name]
        found = self.two.clusters[name].offsets.get(groups + "g", {}).get((topics + "t", 0))
        return 0 if found is None else found.offset

    # ---- operators ----

    async def begin(self) -> None:
        two = self.two
        two.clusters["A"].add_topic("a-t", PARTITIONS)
        for name in "AB":
            two.clusters[name].add_topic(OFFSETS_TOPIC)
            two.clusters[name].on_commit = partial(self.log_commit, name)
        for index in range(PARTITIONS):
            two.clusters["A"].partition("a-t", index).write_values(b"first")
        await two.create()
        await two.connected()
        await two.a.links.attach(LINK, LEADS)
        await two.a.links.attach(LINK, GROUPS)
        await two.until("copied", self.are_equal, 60)
        if self.synchronous:
            await two.until(
                "ready", lambda: all(each.status().state == "Following" for each in self.proxies.values()), 60
            )
            await two.a.links.set_mode(LINK, links.SetMode(mode="synchronous"))
        for name in "AB":
            self.watch(name)
        self.kills = self.random.randint(0, 4)

    async def reverse(self) -> bool:
        name = self.leader()
        if name is None:
            return False
        refs = [NamespaceRef(local=PREFIXES[name][0]), NamespaceRef(type="consumer-group", local=PREFIXES[name][1])]
        request = links.Reverse(
            namespaces=refs, disable_transaction_verification=True, transactions_wait_seconds=0, hold_seconds=3
        )
        try:
            await self.side(name).links.reverse(LINK, request)
        except (OperationError, AttributeError, RuntimeError, asyncio.CancelledError) as error:
            self.seen[f"failed {getattr(error, 'code', type(error).__name__)}"] += 1
            return False
        self.seen["reversed"] += 1
        return True

    async def abandon(self) -> None:
        name = self.random.choice("AB")
        try:
            await self.side(name).links.abandon_reversal(LINK, links.AbandonReversal())
        except (OperationError, AttributeError, RuntimeError, asyncio.CancelledError):
            return
        self.seen["abandoned"] += 1

    async def operate(self) -> None:
        for _ in range(self.random.randint(2, 4)):
            self.two.controls["A"].trouble, self.two.controls["B"].trouble = (
                self.random.choice((0.0, 0.0, 0.1)) for _ in "AB"
            )
            if self.random.random() < 0.3:
                asyncio.get_running_loop().call_later(self.random.uniform(0, 0.6), self.cut)
            work = asyncio.get_running_loop().create_task(self.reverse())
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.uniform(0, 1))
                await self.abandon()
            await work
            await asyncio.sleep(self.random.choice((0.1, 1.0, 5.0)))

    def is_in_sync(self, name: str) -> bool:
        """As every proxy of a cluster has it."""
        found = [proxy for each, proxy in self.proxies.items() if each[0] == name.lower()]
        return not self.dying and all(each.status().state == "In-Sync" for each in found)

    def is_over(self) -> bool:
        """Nothing is under way, and one cluster leads what the other one follows."""
        states = [self.state(name) for name in "AB"]
        under_way = [each for state in states for each in state.reversals.values()]
        # What was taken back may leave the other cluster drained, which means nothing any more.
        if self.dying or any(each.step is not ReversalStep.DRAINED for each in under_way):
            return False
        if any(each.promotions for each in states):
            return False
        return [self.writable(name) for name in "AB"].count(True) == 1 and self.leader() is not None

    async def run(self) -> None:
        await self.begin()
        loop = asyncio.get_running_loop()
        self.clients = [loop.create_task(self.write_on()), loop.create_task(self.commit_on())]
        await self.operate()
        self.kills = 0
        for control in self.two.controls.values():
            control.trouble = 0.0
        await self.two.until("over", self.is_over, 120)
        while not await self.reverse():
            await asyncio.sleep(1)
            await self.two.until("over", self.is_over, 120)
        for client in self.clients:
            client.cancel()
        for client in await asyncio.gather(*self.clients, return_exceptions=True):
            if isinstance(client, Exception):
                raise client
        await self.two.until("equal", self.are_equal, 120)
        here = [self.committed_at(name) for name in "AB"]
        assert here[self.leader() == "B"] == self.committed, (here, self.committed)
        await self.two.until("groups", lambda: {self.committed_at(name) for name in "AB"} == {self.committed}, 60)
        assert self.is_over()
        counted = Counter(value for log in self.values("A") for value in log)
        assert all(counted[value] == 1 for value in self.acked), "what was acked is there, once"
        assert sum(counted.values()) == len(self.acked) + PARTITIONS, "and nothing else"
        leader = self.leader()
        assert leader is not None
        if self.synchronous:
            for name in "AB":
                link = self.state(name).links[LINK]
                assert link.mode is LinkMode.SYNCHRONOUS
            await self.two.until("in sync", lambda: self.is_in_sync(str(leader)), 120)


@pytest.mark.parametrize("seed", seeds(20))
def test_one_leads_and_nothing_that_was_acked_is_lost(seed: int) -> None:
    async def run() -> None:
        scene = Scene(seed)
        for proxy in scene.proxies.values():
            await proxy.start()
        try:
            async with asyncio.timeout(3000):
                await scene.run()
        finally:
            print("seen", dict(scene.seen), "acked", len(scene.acked), "committed", scene.committed)
            if not scene.is_over():
                print({name: (scene.state(name).reversals, scene.state(name).promotions) for name in "AB"})
            for client in scene.clients:
                client.cancel()
            for proxy in scene.proxies.values():
                await proxy.stop()

    run_on_loopback(run())
