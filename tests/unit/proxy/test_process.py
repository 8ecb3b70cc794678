"""A proxy starts while the brokers of its cluster do."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.scripted_broker import ScriptedBroker, metadata_of

from isthmus import control_topic, process
from isthmus.config import parse_config
from isthmus.errors import ConfigurationError
from isthmus.process import Process
from isthmus_protocol.error_codes import LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC_OR_PARTITION
from isthmus_protocol.schema import ApiKey

CONFIG = """
[cluster]
bootstrap_servers = "{broker}"
broker_id = 1
[client_listener]
bind = "127.0.0.1:0"
[admin_listener]
bind = "127.0.0.1:0"
"""


WAITS = f"the brokers do not serve the control topic {control_topic.TOPIC} yet:"
UNKNOWN = "the cluster has no broker 1 yet, but 2"
NEVER = "never"


class World:
    """A broker that has a control topic without records, and a proxy of it.

    ``known_when``, ``led_when``: the cluster knows the broker, and that leads the topic, once the proxy has said that
    it waits for this.
    """

    def __init__(self, broker: ScriptedBroker, known_when: str, led_when: str) -> None:
        self._known_when = known_when
        self._led_when = led_when
        self.told: list[str] = []
        """What the proxy says it waits for, each time that it reads the metadata."""
        self.read = asyncio.Event()
        """It has the topic, and waits for records; or it has ended."""
        self.proxy = Process(parse_config(CONFIG.format(broker=broker.address), Path(), {}))
        self._broker = broker
        self._topic_id = uuid.uuid4()
        broker.answers(ApiKey.METADATA, self._metadata)
        broker.answers(ApiKey.DESCRIBE_CONFIGS, self._configs)
        broker.answers(ApiKey.LIST_OFFSETS, self._limits)
        broker.on(ApiKey.FETCH, self._fetched)

    def _metadata(self, request: Any) -> dict[str, Any]:
        self.told += self.proxy._not_ready()
        topic: dict[str, Any] = {"topic_id": self._topic_id, "leaders": {0: (1, 1)}}
        if not self._has_said(self._led_when):
            topic |= {"error_code": LEADER_NOT_AVAILABLE, "leaders": {0: (-1, 0)}}
        known = {control_topic.TOPIC: topic}
        asked = list(known) if request.topics is None else [each.name for each in request.topics]
        none = {"error_code": UNKNOWN_TOPIC_OR_PARTITION}
        broker: Any = self._broker
        if not self._has_said(self._known_when):  # it is another one's address
            broker = SimpleNamespace(node_id=2, host=broker.host, port=broker.port)
        return metadata_of([broker], {name: known.get(name, none) for name in asked})

    def _has_said(self, what: str) -> bool:
        return not what or any(each.startswith(what) for each in self.told)

    def _configs(self, request: Any) -> dict[str, Any]:
        entries = [{"name": name, "value": value} for name, value in control_topic.settings(1).items()]
        (asked,) = request.resources
        result = {"resource_type": asked.resource_type, "resource_name": asked.resource_name, "configs": entries}
        return {"results": [result]}

    def _limits(self, request: Any) -> dict[str, Any]:
        (topic,) = request.topics
        return {"topics": [{"name": topic.name, "partitions": [{"partition_index": 0, "offset": 0}]}]}

    async def _fetched(self, *_: Any) -> None:
        self.read.set()
        await asyncio.Event().wait()


def starting(
    work: Callable[[World, asyncio.Task[None]], Awaitable[None]], known_when: str = "", led_when: str = ""
) -> None:
    """``work`` gets the proxy's start."""

    async def run() -> None:
        async with asyncio.timeout(30), ScriptedBroker() as broker:
            world = World(broker, known_when, led_when)
            start = asyncio.get_running_loop().create_task(world.proxy.start(), name="start")
            start.add_done_callback(lambda _: world.read.set())
            try:
                await work(world, start)
            finally:
                start.cancel()
                await asyncio.wait((start,))
                await world.proxy.stop()

    asyncio.run(run())


def test_a_control_topic_that_has_no_leader_yet_is_waited_for() -> None:
    """The proxy ended with INVALID_CONFIG."""

    async def work(world: World, start: asyncio.Task[None]) -> None:
        await world.read.wait()
        assert not start.done(), start.exception()
        assert any(each.startswith(f"{WAITS} LEADER_NOT_AVAILABLE") for each in world.told)
        assert world.proxy._not_ready() == ["the proxy is starting"]

    starting(work, led_when=WAITS)


def test_a_control_topic_that_has_no_leader_for_long_is_told_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SERVED_WITHIN_S", 0.2)

    async def work(world: World, start: asyncio.Task[None]) -> None:
        with pytest.raises(ConfigurationError, match="cannot be used: LEADER_NOT_AVAILABLE"):
            await start

    starting(work, led_when=NEVER)


def test_a_sidecar_waits_for_a_broker_that_the_cluster_does_not_know_yet() -> None:
    """It ended with INVALID_CONFIG."""

    async def work(world: World, start: asyncio.Task[None]) -> None:
        await world.read.wait()
        assert not start.done(), start.exception()
        assert UNKNOWN in world.told
        assert world.proxy._not_ready() == ["the proxy is starting"]

    starting(work, known_when=UNKNOWN)


def test_a_broker_that_the_cluster_does_not_know_for_long_is_told_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SERVED_WITHIN_S", 0.2)

    async def work(world: World, start: asyncio.Task[None]) -> None:
        told = r"cluster\.broker_id: the cluster has no broker 1\. It has 2: name"
        with pytest.raises(ConfigurationError, match=told):
            await start

    starting(work, known_when=NEVER)
