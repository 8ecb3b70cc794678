"""Audit lines on their way into a topic that is not always to be had: none waited for, none told twice."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from isthmus import audit_topic
from isthmus.audit_topic import PLACE, WAITING_MAX, AuditTopic
from isthmus.errors import ConnectionLost, KafkaError, PeerFault
from isthmus.kafka.client import EARLIEST, CreatedTopic, Fetched, ListedOffset, NewTopic, Produced, TopicInfo
from isthmus_control.model import AUDIT_TOPIC
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.error_codes import INVALID_REPLICATION_FACTOR, TOPIC_AUTHORIZATION_FAILED
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import PLAIN_HEADER

TOPIC_ID = uuid.UUID(int=7)


class Cluster:
    """Two brokers of a cluster without the topic."""

    def __init__(self) -> None:
        self.brokers = {1: None, 2: None}
        self.there = False
        self.factor = 0
        self.log: list[bytes | None] = []
        self.refuses: KafkaError | None = None
        """What comes of every request."""
        self.loses_answers = 0
        self.asked = 0

    async def _answer(self) -> None:
        self.asked += 1
        await asyncio.sleep(0)
        if self.refuses is not None:
            raise self.refuses

    async def refresh(self, topics: list[str]) -> Mapping[str, TopicInfo]:
        await self._answer()
        return {AUDIT_TOPIC: TopicInfo(AUDIT_TOPIC, TOPIC_ID, False, {})} if self.there else {}

    async def create_topics(self, topics: list[NewTopic]) -> dict[str, CreatedTopic]:
        await self._answer()
        self.factor = topics[0].replication_factor
        few = KafkaError(INVALID_REPLICATION_FACTOR) if self.factor > len(self.brokers) else None
        self.there = few is None
        return {AUDIT_TOPIC: CreatedTopic(AUDIT_TOPIC, TOPIC_ID, 1, self.factor, few)}

    async def produce_raw(self, batches: Mapping[Any, bytes], **more: Any) -> Mapping[Any, Produced]:
        await self._answer()
        assert self.there
        base = len(self.log)
        self.log += [record.value for record in decode_records(batches[PLACE])]
        if self.loses_answers:
            self.loses_answers -= 1
            raise ConnectionLost("the answer is lost")
        return {PLACE: Produced(base, -1, 0, None)}

    async def list_offsets(self, timestamps: Mapping[Any, int]) -> Mapping[Any, ListedOffset]:
        await self._answer()
        return {PLACE: ListedOffset(0 if timestamps[PLACE] == EARLIEST else len(self.log), -1, 0, None)}

    async def fetch(self, topic: str, partition: int, offset: int, **more: Any) -> Fetched:
        await self._answer()
        start = offset - offset % 3  # batches begin before what is asked for
        records = [Record(at, 0, None, value) for at, value in enumerate(self.log[start : start + 3], start)]
        return Fetched(encode_batch(records, PLAIN_HEADER), len(self.log), len(self.log), 0, (), None)


def line(number: int, outcome: str = "done") -> dict[str, Any]:
    return {"change": str(number), "outcome": outcome}


def with_topic(test: Callable[[AuditTopic, Cluster], Awaitable[None]]) -> None:
    async def run() -> None:
        topic, cluster = AuditTopic(Supervision()), Cluster()
        hidden: list[bytes] = []
        client: Any = cluster
        topic.start(client, hidden.append)
        try:
            await test(topic, cluster)
        finally:
            await topic.stop()
        if cluster.there and cluster.log:
            assert TOPIC_ID.bytes in hidden

    asyncio.run(run())


async def sent(topic: AuditTopic) -> None:
    async with asyncio.timeout(10):
        while topic.waiting:  # noqa: ASYNC110 - as status asks
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_topic, "RETRY_MIN_S", 0.01)
    monkeypatch.setattr(audit_topic, "STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(audit_topic, "LOOKED_FOR_S", 0.01)


def test_the_topic_is_made_with_the_first_line_and_with_the_brokers_that_there_are() -> None:
    async def test(topic: AuditTopic, cluster: Cluster) -> None:
        assert await topic.read(10) == []
        assert not cluster.there
        topic.put(line(1))
        topic.put(line(2))
        await sent(topic)
        assert (cluster.there, cluster.factor) == (True, 2)
        assert await topic.read(10) == [line(1), line(2)]
        assert topic.trouble is None

    with_topic(test)


def test_a_topic_that_others_made_is_found_without_a_line() -> None:
    """Clients could read it by its id, else."""

    async def run() -> None:
        topic, cluster = AuditTopic(Supervision()), Cluster()
        found = asyncio.Event()
        client: Any = cluster
        topic.start(client, lambda topic_id: found.set())
        await asyncio.sleep(0.02)
        cluster.there = True
        async with asyncio.timeout(10):
            await found.wait()
        await topic.stop()

    asyncio.run(run())


def test_lines_wait_while_the_topic_takes_none_and_are_bounded() -> None:
    async def test(topic: AuditTopic, cluster: Cluster) -> None:
        cluster.refuses = KafkaError(TOPIC_AUTHORIZATION_FAILED)
        for number in range(WAITING_MAX + 5):
            topic.put(line(number))
        await asyncio.sleep(0.05)
        assert (topic.waiting, topic.left_out) == (WAITING_MAX, 5)
        assert "TOPIC_AUTHORIZATION_FAILED" in str(topic.trouble)
        with pytest.raises(PeerFault):
            await topic.read(10)
        cluster.refuses = None
        await sent(topic)
        assert topic.trouble is None
        assert [json.loads(value or b"")["change"] for value in cluster.log] == [str(n) for n in range(WAITING_MAX)]
        assert await topic.read(7) == [line(number) for number in range(WAITING_MAX - 7, WAITING_MAX)]

    with_topic(test)


def test_a_line_whose_fate_was_unknown_is_told_once() -> None:
    async def test(topic: AuditTopic, cluster: Cluster) -> None:
        cluster.loses_answers = 2
        topic.put(line(1, "started"))
        await sent(topic)
        topic.put(line(1))
        await sent(topic)
        assert len(cluster.log) == 4
        assert await topic.read(10) == [line(1, "started"), line(1)]

    with_topic(test)


def test_what_somebody_else_wrote_is_passed_over() -> None:
    async def test(topic: AuditTopic, cluster: Cluster) -> None:
        topic.put(line(1))
        await sent(topic)
        cluster.log += [None, b"x", b"[1]", b"[" * 50_000, b"\xff"]
        topic.put(line(2))
        await sent(topic)
        assert await topic.read(100) == [line(1), line(2)]

    with_topic(test)


def test_the_end_of_the_process_waits_a_moment_for_the_last_lines() -> None:
    async def run() -> None:
        topic, cluster = AuditTopic(Supervision()), Cluster()
        client: Any = cluster
        topic.start(client, lambda topic_id: None)
        topic.put(line(1))
        await topic.stop()
        assert len(cluster.log) == 1
        away = AuditTopic(Supervision())
        cluster.refuses = KafkaError(TOPIC_AUTHORIZATION_FAILED)
        away.start(client, lambda topic_id: None)
        away.put(line(2))
        await away.stop()
        assert away.waiting == 1
        never = AuditTopic(Supervision())
        never.put(line(3))
        assert await never.read(5) == [line(3)]
        await never.stop()

    asyncio.run(run())
