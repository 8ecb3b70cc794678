"""What clients in Python do at a follower that others' tests do not say: docs/clients.md has all of it as a table.

kafka-python is refused writes and commits; it and aiokafka read a topic that is truncated meanwhile, and gets a new id.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AiokafkaTopic
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.admin import NewTopic
from kafka.errors import InvalidRequestError, TopicAlreadyExistsError, TopicAuthorizationFailedError
from support import groups
from support.kafka import unique
from support.links import Linked, linked, truncated, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.suite("clients")]

COMMIT_MS = 300


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """One link, whose target follows a namespace of topics and one of groups."""
    with linked(*kafka_pair) as pair:
        pair.attach()
        attached = ("--type", "consumer-group", "--local", "app-", "--remote", "app-", "--role", "leader")
        pair.a.proxy.cli("link", "attach", pair.name, *attached, "--disable-transaction-verification")
        yield pair


def test_kafka_python_is_refused_writes_and_goes_on_reading_without_commits(link: Linked) -> None:
    source, target = link.names("python")
    link.a.create_topic(source)
    link.a.produce(source, [b"%d" % number for number in range(10)])
    link.wait_end(target, 10)
    producer = KafkaProducer(bootstrap_servers=link.b.bootstrap)
    with pytest.raises(InvalidRequestError):
        producer.send(target, b"x").get(30)
    producer.close()

    group = unique("app-")
    consumer = KafkaConsumer(
        target,
        bootstrap_servers=link.b.bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        auto_commit_interval_ms=COMMIT_MS,
    )
    read: list[int] = []

    def reads(count: int) -> bool:
        for records in consumer.poll(200).values():
            read.extend(record.offset for record in records)
        return len(read) >= count

    until("it reads", lambda: reads(10))
    link.a.produce(source, [b"%d" % number for number in range(10, 20)])
    until("it goes on", lambda: reads(20))
    assert read == list(range(20))
    with pytest.raises(TopicAuthorizationFailedError):
        consumer.commit()
    consumer.close()
    assert not [place for place in groups.offsets(link.b, group) if place[0] == target]


def test_both_are_told_of_a_topic_that_there_is_when_they_make_it(link: Linked) -> None:
    source, target = link.names("there")
    link.a.create_topic(source)
    link.wait_end(target, 0)
    admin = KafkaAdminClient(bootstrap_servers=link.b.bootstrap)
    with pytest.raises(TopicAlreadyExistsError):
        admin.create_topics([NewTopic(target, 1, 1)])
    admin.close()

    async def make() -> Any:
        client = AIOKafkaAdminClient(bootstrap_servers=link.b.bootstrap)
        await client.start()
        try:
            return await client.create_topics([AiokafkaTopic(target, 1, 1)])
        finally:
            await client.close()

    answer = asyncio.run(make())
    assert [(topic, code) for topic, code, *_ in answer.topic_errors] == [(target, TopicAlreadyExistsError.errno)]


class KafkaPython:
    """Offsets and values that a consumer of kafka-python reads, in a thread of its own."""

    def __init__(self, link: Linked, topic: str) -> None:
        self.read: list[tuple[int, bytes]] = []
        self._settings = {"bootstrap_servers": link.b.bootstrap, "group_id": unique("reader-")}
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        consumer = KafkaConsumer(
            self._topic, auto_offset_reset="earliest", auto_commit_interval_ms=COMMIT_MS, **self._settings
        )
        while not self._stop.is_set():
            for records in consumer.poll(200).values():
                self.read.extend((record.offset, record.value) for record in records)
        consumer.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


class Aiokafka(KafkaPython):
    """The same of aiokafka."""

    def _run(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        consumer = AIOKafkaConsumer(
            self._topic, auto_offset_reset="earliest", auto_commit_interval_ms=COMMIT_MS, **self._settings
        )
        await consumer.start()
        while not self._stop.is_set():
            for records in (await consumer.getmany(timeout_ms=200)).values():
                self.read.extend((record.offset, record.value) for record in records)
        await consumer.stop()


@pytest.mark.parametrize(("client", "again"), [(KafkaPython, 0), (Aiokafka, 50)])
def test_python_consumers_that_read_what_is_cut(
    link: Linked, client: Callable[[Linked, str], KafkaPython], again: int
) -> None:
    """aiokafka does not ask where its leader epoch ends (KIP-320): it is out of range, and begins as it is set to."""
    source, target = link.names("cut")
    link.a.create_topic(source)
    link.a.produce(source, [b"%d" % number for number in range(50)])
    link.wait_end(target, 50)
    reader = client(link, target)
    until("it has read all", lambda: len(reader.read) == 50)
    link.b.produce(target, [b"rogue"], direct=True)
    until("it has read what is cut", lambda: len(reader.read) == 51)
    truncated(link, target)
    until("it has heard of it", lambda: len(reader.read) >= 51 + again)
    link.a.produce(source, [b"last-%d" % number for number in range(10)])
    until("it goes on", lambda: any(value == b"last-9" for _, value in reader.read), 60)
    reader.stop()
    first, last = [b"%d" % number for number in range(50)], [b"last-%d" % number for number in range(10)]
    assert [value for _, value in reader.read] == [*first, b"rogue", *first[:again], *last]
