"""What the admin listener answers of plugins of namespaces."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final

import httpx
import pytest
from support.admin import MemoryLog, ModelLog, make_services
from support.fake_cluster import FakeCluster, FakeContext, FakeControl

from isthmus.admin.app import create_app
from isthmus_control.commands import CreateNamespace, EnablePlugin
from isthmus_control.model import ResourceType
from isthmus_plugins.namespace_host import NamespaceHost
from isthmus_plugins.namespace_plugins import Enabled, NamespaceHook, NamespacePlugin, Policy, Scope, Settings

TOPIC: Final = ResourceType.TOPIC
PATH: Final = "/v1/namespaces/topic/plugins/slow?prefix=pay-"


class Slow(NamespacePlugin):
    """Stops when it may."""

    about = "stops slowly"
    types = frozenset({TOPIC})
    settings = Settings
    version = 1
    policy = Policy.CLOSED

    def __init__(self) -> None:
        self.stopping, self.may_stop = asyncio.Event(), asyncio.Event()

    def enabled(self, scope: Scope) -> Enabled:
        return Work(self)


class Work(Enabled):
    def __init__(self, plugin: Slow) -> None:
        self._plugin = plugin

    def hooks(self) -> Sequence[NamespaceHook]:
        return ()

    async def stop(self) -> None:
        self._plugin.stopping.set()
        await self._plugin.may_stop.wait()


@pytest.mark.parametrize(("wait", "in_time"), [(True, True), (True, False), (False, False)])
def test_a_plugin_is_disabled_when_it_has_ended(monkeypatch: pytest.MonkeyPatch, wait: bool, in_time: bool) -> None:
    monkeypatch.setattr("isthmus.admin.plugin_routes.ENDS_TIMEOUT_S", 60 if in_time else 0.01)

    async def test() -> None:
        rng, plugin = random.Random(1), Slow()
        control = FakeControl("A", rng)
        context: Any = FakeContext(FakeCluster(rng, [1]), control)
        host = NamespaceHost(context, {"slow": plugin}, lambda: None)
        host.start()
        control.apply(CreateNamespace(TOPIC, "pay-"))
        control.apply(EnablePlugin(TOPIC, "pay-", "slow", "{}", 1))
        services = make_services(MemoryLog())
        services.control, services.plugins = ModelLog(control), host
        transport = httpx.ASGITransport(create_app(services))
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://admin") as client,
            asyncio.TaskGroup() as group,
        ):
            answer = group.create_task(client.delete(f"{PATH}&wait={wait}"))
            await plugin.stopping.wait()
            if in_time:
                assert not answer.done()
                plugin.may_stop.set()
                assert (await answer).status_code == 204
            else:
                said = await answer
                assert said.status_code == 202
                assert said.json() == {"plugin": "slow", "waiting_for": [], "ended": False}
        plugin.may_stop.set()
        await host.stop()

    asyncio.run(test())
