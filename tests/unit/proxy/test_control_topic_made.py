"""The control topic is made in a cluster whose brokers hear of it one after the other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from support import control_cluster
from support.control_cluster import Client, ControlCluster

from isthmus.control_topic import ControlTopic
from isthmus.kafka.client import TopicInfo


class LaggingClient(Client):
    """Asks another broker each time, of which every second one has not heard of the topic yet."""

    asked = 0

    async def refresh(self, topics: Iterable[str] | None = None) -> Mapping[str, TopicInfo]:
        self.asked += 1
        return await super().refresh(topics) if self.asked % 2 else {}


@pytest.mark.parametrize("asked", [0, 1])
def test_it_is_known_once_it_is_made(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was seen, then looked for at a broker that had not heard of it, and the proxy that made it ended."""
    monkeypatch.setattr(control_cluster, "LATENCY_S", 0.0001)

    class Calm(random.Random):
        def random(self) -> float:
            return 0.5

    async def work() -> None:
        cluster = ControlCluster(Calm(1))
        client: Any = LaggingClient(cluster)
        client.asked = asked
        topic = ControlTopic(client)
        await topic.make()
        assert topic.topic_id == cluster.topic_id

    asyncio.run(work())
