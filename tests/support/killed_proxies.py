"""Whole plugins of several clusters that are linked, under clients, with proxies killed and links cut.

Of each cluster there are a topic and a consumer group in namespaces of its own (``a-t``, ``ga-g``), which are to be the
same everywhere. Where a cluster's control log lets clients write, one writes, and the group goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from isthmus_control.commands import Body, ReleaseLease
from isthmus_control.control_state import ControlState
from isthmus_control.model import NamespaceMapping, ResourceType, ReversalStep, Role
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, TopicPartition
from isthmus_plugins.links import NamespaceRef, OperationError
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from support.fake_cluster import FakeCluster, FakeControl, LoopClock, simulated_now
from support.offsets import commit, group_made, offsets_batch
from support.plugins import Proxy, raise_if_to_end, until

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
PARTITIONS: Final = 2
FAILS: Final = (OperationError, AttributeError, RuntimeError, asyncio.CancelledError)
"""What who asks a proxy gets that is killed meanwhile, or refuses."""


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


class KilledProxies:
    """``kills``: so many times a proxy is killed at one of its commands, before or after that stands in the log.

    With ``sidecars`` each cluster has two brokers, and a proxy for each.
    """

    def __init__(
        self, rng: random.Random, names: str, sidecars: bool = False, cluster: type[FakeCluster] = FakeCluster
    ) -> None:
        self.random = rng
        self.names = names
        self.sidecars = sidecars
        self.clusters = {name: cluster(rng, (1, 2) if sidecars else (1,)) for name in names}
        self.controls = {name: FakeControl(name, rng) for name in names}
        for name in names:
            self.clusters[name].add_topic("__isthmus_control")
            self.clusters[name].add_topic(OFFSETS_TOPIC)
            self.clusters[name].on_commit = partial(self.log_commit, name)
            self.controls[name].wall_ms = int((LoopClock().time() - simulated_now()) * 1000)
        self.kills = 0
        self.dying: dict[str, asyncio.Task[None]] = {}
        self.acked: list[bytes] = []
        self.committed = 0
        self.seen = Counter[str]()
        self.clients: list[asyncio.Task[None]] = []
        self.proxies = {
            name + which: self.made(name + which)
            for name in names.lower()
            for which in (("", "2") if sidecars else ("",))
        }

    def made(self, name: str) -> Proxy:
        """The next process of a proxy."""
        cluster = name[0].upper()

        async def append(body: Body) -> Any:
            return await self.append(name, body)

        own: Any = Own(self.controls[cluster], append)
        fronted = frozenset({2 if name.endswith("2") else 1}) if self.sidecars else None
        return Proxy(self.clusters[cluster], own, name, fronted)

    async def start(self) -> None:
        for proxy in self.proxies.values():
            await proxy.start()

    async def stop(self) -> None:
        for client in self.clients:
            client.cancel()
        for proxy in self.proxies.values():
            await proxy.stop()

    # ---- what is ----

    def proxies_of(self, name: str) -> list[Proxy]:
        return [proxy for each, proxy in self.proxies.items() if each[0] == name.lower()]

    def side(self, name: str) -> Proxy:
        """A proxy of a cluster that runs, if one does."""
        found = [each for each in self.proxies if each[0] == name.lower() and each not in self.dying]
        return self.proxies[self.random.choice(found or [name.lower()])]

    def state(self, name: str) -> ControlState:
        return self.controls[name].state

    def prefix(self, name: str, kind: ResourceType = TOPIC) -> str:
        return f"{name.lower()}-" if kind is TOPIC else f"g{name.lower()}-"

    def refs(self, name: str) -> list[NamespaceRef]:
        return [NamespaceRef(type=kind.value, local=self.prefix(name, kind)) for kind in (TOPIC, GROUP)]

    def writable(self, name: str, kind: ResourceType = TOPIC) -> bool:
        lookup = self.state(name).lookup
        if kind is TOPIC:
            return lookup.topic_reservation(self.prefix(name) + "t") is None
        return lookup.reservation(kind, self.prefix(name, kind) + "g") is None

    def mapping(self, name: str, link: str, kind: ResourceType = TOPIC) -> NamespaceMapping | None:
        found = self.state(name).links.get(link)
        return None if found is None else found.mapping(kind, self.prefix(name, kind))

    def follows_over(self, name: str, kind: ResourceType = TOPIC) -> str | None:
        """The link over which a cluster follows."""
        found = [each for each in self.state(name).links if self._role(name, each, kind) is Role.FOLLOWER]
        assert len(found) <= 1
        return found[0] if found else None

    def _role(self, name: str, link: str, kind: ResourceType) -> Role | None:
        mapping = self.mapping(name, link, kind)
        return None if mapping is None else mapping.role

    def values(self, name: str) -> list[list[bytes | None]]:
        topic = self.clusters[name].found.get(self.prefix(name) + "t")
        return [[each.value for each in log.records().values()] for log in topic.partitions] if topic else []

    def are_equal(self) -> bool:
        first, *others = [self.values(name) for name in self.names]
        return bool(first) and all(each == first for each in others)

    def under_way(self) -> bool:
        """Whether a proxy is dead, or something is being reversed, promoted or truncated."""
        states = [self.state(name) for name in self.names]
        # What was taken back may leave the other cluster drained, which means nothing any more.
        reversals = [each for state in states for each in state.reversals.values()]
        if self.dying or any(each.step is not ReversalStep.DRAINED for each in reversals):
            return True
        return any(each.promotions or each.truncations for each in states)

    async def until(self, what: str, ready: Callable[[], Any], timeout_s: float = 120.0) -> None:
        await until(what, ready, timeout_s)

    # ---- faults ----

    async def append(self, name: str, body: Body) -> Any:
        """What a process records, which may be the last that it does."""
        control = self.controls[name[0].upper()]
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
        await self.killed(name)
        await asyncio.sleep(self.random.choice((0.0, 0.5, 3.0)))
        await self.started(name)
        del self.dying[name]

    async def killed(self, name: str) -> None:
        """A proxy is gone. Its lease is over for the others by then, or in a while."""
        before = self.proxies[name]
        control = self.controls[name[0].upper()]
        await before.stop()
        before.context.control.unsubscribe_all()
        over = ReleaseLease(before.context.proxy_name, before.context.incarnation)
        if self.random.random() < 0.7:
            control.apply(over)
        else:
            asyncio.get_running_loop().call_later(10, control.apply, over)

    async def started(self, name: str) -> None:
        """The next process of a proxy, at the address of the one before."""
        before, after = self.proxies[name], self.made(name)
        listener = after.context.link_listener
        assert listener is not None
        assert before.context.port is not None
        after.context.link_listener = replace(listener, port=before.context.port)
        after.context.data_directory = before.context.data_directory
        self.proxies[name] = after
        await after.start()

    def cut(self) -> None:
        """Connections of links break."""
        for name, proxy in self.proxies.items():
            if name in self.dying:
                continue
            for link in self.state(name[0].upper()).links:
                for connection in proxy.plugin.parts.peers.connections(link):
                    connection.close("a fault of the simulation")
                    self.seen["cuts"] += 1

    # ---- clients ----

    def begin_clients(self) -> None:
        loop = asyncio.get_running_loop()
        self.clients = [loop.create_task(self.write_on()), loop.create_task(self.commit_on())]

    async def end_clients(self) -> None:
        """Raises what they saw that must not be."""
        for client in self.clients:
            client.cancel()
        for client in await asyncio.gather(*self.clients, return_exceptions=True):
            if isinstance(client, Exception):
                raise client

    async def write_on(self) -> None:
        """A client that writes wherever it may, and knows what was acked."""
        number = 0
        while True:
            await asyncio.sleep(self.random.uniform(0.02, 0.2))
            for name in self.names:
                topic = self.clusters[name].found.get(self.prefix(name) + "t")
                if topic is None or not self.writes(name):
                    continue
                value = b"%s %d" % (name.encode(), number)
                number += 1
                topic.partitions[self.random.randrange(PARTITIONS)].write_values(value)
                self.acked.append(value)

    def writes(self, name: str) -> bool:
        """Whether a client writes to a cluster now."""
        return self.writable(name)

    def commits(self, name: str) -> bool:
        """Whether the group is at a cluster."""
        return self.writable(name, GROUP) and self.writable(name)

    async def commit_on(self) -> None:
        """A consumer group that goes on where it was, wherever that is."""
        while True:
            await asyncio.sleep(self.random.uniform(0.1, 0.5))
            for name in self.names:
                if not self.commits(name):
                    continue
                assert self.committed_at(name) == self.committed, "the group goes on where it was"
                place = self.prefix(name) + "t", 0
                if self.clusters[name].partition(*place).end > self.committed:
                    self.committed += 1
                    committed = CommittedOffset(self.committed, "")
                    group = self.prefix(name, GROUP) + "g"
                    self.clusters[name].offsets.setdefault(group, {})[place] = committed
                    self.log_commit(name, group, place, committed)

    def log_commit(self, name: str, group: str, place: TopicPartition, committed: CommittedOffset) -> None:
        """Write it to the cluster's offsets topic, as its coordinator does."""
        partition = self.clusters[name].partition(OFFSETS_TOPIC)
        records = [group_made(group), commit(group, place[0], committed.offset, place[1])]
        partition.write(offsets_batch(partition.end, records))

    def committed_at(self, name: str) -> int:
        group = self.clusters[name].offsets.get(self.prefix(name, GROUP) + "g", {})
        found = group.get((self.prefix(name) + "t", 0))
        return 0 if found is None else found.offset

    # ---- operators ----

    async def tried(self, asked: Callable[[], Awaitable[Any]]) -> bool:
        """Whether what an operator asked for was done. Who is asked may be dead already."""
        try:
            await asked()
        except FAILS as error:
            raise_if_to_end(error)
            self.seen[f"failed {getattr(error, 'code', type(error).__name__)}"] += 1
            return False
        return True
