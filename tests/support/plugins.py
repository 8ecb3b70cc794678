"""Whole replication plugins on model clusters, joined over a loopback interface in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from isthmus_control.commands import ClaimBrokers
from isthmus_control.levels import with_known_level
from isthmus_control.model import BrokerClaim
from isthmus_plugins import links
from isthmus_plugins.process import LinkListenerSpec
from isthmus_plugins.replication.plugin import ReplicationPlugin
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, LoopClock, simulated_now
from support.loopback import LoopbackAcceptor, run_on_loopback


class Proxy:
    """One proxy's replication plugin, with a link listener."""

    def __init__(
        self,
        cluster: FakeCluster,
        control: FakeControl,
        name: str,
        brokers: frozenset[int] | None = None,
    ) -> None:
        self.context = FakeContext(cluster, control, name, brokers)
        self.context.link_listener = LinkListenerSpec("127.0.0.1", 0, None, LoopbackAcceptor)
        self.plugin = ReplicationPlugin()

    async def start(self) -> None:
        context: Any = self.context
        await self.plugin.isthmus_start(context)
        incarnation = self.context.incarnation
        brokers = self.context.fronted_brokers
        claim = ClaimBrokers(
            self.context.proxy_name,
            incarnation,
            tuple(BrokerClaim(broker, "127.0.0.1", 9) for broker in sorted(brokers or {1})),
            brokers is None,
            self.context.link_address,
            10_000,
            with_known_level("0"),
            -1,
        )
        self.context.control.apply(claim)

    async def stop(self) -> None:
        await self.plugin.isthmus_stop()

    @property
    def links(self) -> Any:
        return self.plugin.isthmus_link_operations()

    @property
    def address(self) -> str:
        assert self.context.link_address is not None
        return self.context.link_address

    def status(self, name: str = "a-to-b") -> links.LinkStatus:
        found: links.LinkStatus = self.links.status(name)
        return found


class Two:
    """Clusters A and B with a proxy each. ``ids``: of clusters whose id is not their name."""

    def __init__(
        self, brokers: int = 1, cluster: type[FakeCluster] = FakeCluster, ids: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        rng = random.Random(3)
        self.clusters = {name: cluster(rng, range(1, brokers + 1)) for name in "AB"}
        self.controls = {name: FakeControl(ids.get(name, name), rng) for name in "AB"}
        for cluster in self.clusters.values():
            cluster.add_topic("__isthmus_control")
        for control in self.controls.values():
            control.wall_ms = int((LoopClock().time() - simulated_now()) * 1000)
        self.a, self.b = (Proxy(self.clusters[name], self.controls[name], name.lower()) for name in "AB")

    @property
    def now_ms(self) -> int:
        """What their wall clocks tell."""
        return int(LoopClock().time() * 1000)

    async def create(self, name: str = "a-to-b", **more: Any) -> links.LinkStatus:
        request = links.CreateLink(link_name=name, remote=more.pop("remote", self.b.address), **more)
        status: links.LinkStatus = await self.a.links.create(request)
        return status

    async def until(self, what: str, ready: Callable[[], Any], timeout_s: float = 10.0) -> None:
        await until(what, ready, timeout_s)

    async def connected(self, name: str = "a-to-b") -> None:
        await self.until("connected", lambda: self.a.status(name).state == self.b.status(name).state == "Following")


async def until(what: str, ready: Callable[[], Any], timeout_s: float) -> None:
    """Wait for something on a simulated clock."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not ready():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.01)


def raise_if_to_end(error: BaseException) -> None:
    """Raise ``error`` where the task itself was cancelled, and not a proxy that it asked and that was killed."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def on_two(
    work: Callable[[Two], Awaitable[None]],
    timeout_s: float = 30,
    cluster: type[FakeCluster] = FakeCluster,
    ids: Mapping[str, str] = MappingProxyType({}),
) -> None:
    async def run() -> None:
        two = Two(cluster=cluster, ids=ids)
        await two.a.start()
        await two.b.start()
        try:
            async with asyncio.timeout(timeout_s):
                await work(two)
        finally:
            await two.a.stop()
            await two.b.stop()

    run_on_loopback(run())
