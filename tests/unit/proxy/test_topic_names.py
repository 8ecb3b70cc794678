"""Whoever makes up topic ids has all topics read no more often than anybody else."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping

from isthmus.topic_names import PAUSE_S, TopicNames
from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo


class Cluster:
    def __init__(self) -> None:
        self.there: dict[bytes, str] = {}
        self.known: dict[bytes, str] = {}
        self.reads = 0
        self.reachable = True

    async def topics(self) -> Mapping[str, TopicInfo]:
        self.reads += 1
        await asyncio.sleep(0.01)
        if not self.reachable:
            raise BrokerUnavailable("no broker answers")
        self.known.update(self.there)
        return {}

    def topic_name(self, topic_id: bytes) -> str | None:
        return self.known.get(topic_id)


def test_one_read_answers_all_and_the_next_begins_a_while_later() -> None:
    cluster = Cluster()
    names = TopicNames(cluster)
    new = uuid.uuid4().bytes
    cluster.there[new] = "new"

    async def test() -> None:
        start = time.monotonic()
        assert await names.of((new,)) == {new: "new"}
        assert time.monotonic() - start < PAUSE_S / 2, "who asks alone waits for nobody"
        assert await names.of((new,)) == {new: "new"}
        assert cluster.reads == 1, "what is known is not read again"
        unknown = [[uuid.uuid4().bytes for _ in range(100)] for _ in range(100)]
        assert not any(await asyncio.gather(*map(names.of, unknown)))
        assert cluster.reads <= 3
        gone = (asyncio.wait_for(names.of(each), PAUSE_S / 100) for each in unknown)
        assert {type(each) for each in await asyncio.gather(*gone, return_exceptions=True)} == {TimeoutError}
        await asyncio.sleep(2 * PAUSE_S)
        assert cluster.reads <= 3, "nobody waits for it any more"

    asyncio.run(test())


def test_a_read_that_fails_fails_for_all_who_asked() -> None:
    cluster = Cluster()
    cluster.reachable = False
    names = TopicNames(cluster)

    async def test() -> None:
        asked = [names.of((uuid.uuid4().bytes,)) for _ in range(3)]
        assert [type(each) for each in await asyncio.gather(*asked, return_exceptions=True)] == [BrokerUnavailable] * 3
        assert cluster.reads == 1
        cluster.reachable = True
        assert await names.of((uuid.uuid4().bytes,)) == {}

    asyncio.run(test())
