"""Acks of a synchronous link, on real brokers with unmodified producers: what they mean, and when they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from support.kafka import unique
from support.links import Linked, linked, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

CONFIRM_TIMEOUT_S = 10.0


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        yield pair


class Acks:
    """A producer that notes when each of its records is acked, and at which offset."""

    def __init__(self, pair: Linked, topic: str, **settings: Any) -> None:
        self._topic = topic
        self._producer = Producer(
            {
                "bootstrap.servers": pair.a.bootstrap,
                "linger.ms": 0,
                "acks": "all",
                "enable.idempotence": True,
                **settings,
            }
        )
        self.acked: list[tuple[int, float]] = []
        self.errors: list[KafkaError] = []

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(error)
        else:
            self.acked.append((message.offset(), time.monotonic()))

    def send(self, value: bytes) -> None:
        self._producer.produce(self._topic, value, partition=0, on_delivery=self._delivered)
        self._producer.poll(0)

    def poll(self) -> None:
        self._producer.poll(0.1)

    def wait(self, timeout_s: float = 30.0) -> None:
        assert self._producer.flush(timeout_s) == 0, f"not acked within {timeout_s:.0f} s; {self.errors}"


class Reader:
    """A consumer of one partition, through A's proxy."""

    def __init__(self, pair: Linked, topic: str, isolation: str) -> None:
        settings = {"bootstrap.servers": pair.a.bootstrap, "group.id": "r", "isolation.level": isolation}
        self._consumer = Consumer({**settings, "enable.auto.commit": False})
        self._place = TopicPartition(topic, 0, 0)
        self._consumer.assign([self._place])
        self._values: list[bytes | None] = []

    def read(self) -> list[bytes | None]:
        """What it has read by now."""
        for message in self._consumer.consume(100, 0.5):
            assert message.error() is None, message.error()
            self._values.append(message.value())
        return self._values

    def end(self) -> int:
        return int(self._consumer.get_watermark_offsets(self._place, timeout=30)[1])

    def close(self) -> None:
        self._consumer.close()


def synchronous(pair: Linked, topic: str) -> None:
    """Switch, as soon as the link follows, and wait until the topic's partition is In-Sync."""
    until("accepted", lambda: pair.a.proxy.cli("link", "set-mode", pair.name, "synchronous"), 20)
    until("A says In-Sync", lambda: partition_state(pair, topic) == "In-Sync", 20)


def partition_state(pair: Linked, topic: str) -> str:
    partitions = pair.a.link(pair.name)["partitions"]
    (found,) = (each for each in partitions if each["topic"] == topic)
    return str(found["state"])


@pytest.fixture
def topic(link: Linked) -> Iterator[str]:
    yield from followed(link)


@pytest.fixture
def strict_topic(link: Linked) -> Iterator[str]:
    yield from followed(link, "--consistency", "strict", "--visibility", "confirmed")


def followed(link: Linked, *options: str) -> Iterator[str]:
    """A topic in a namespace of its own, that B follows."""
    prefix = unique("sync-") + "-"
    link.a.proxy.cli("namespace", "create", prefix, "--type", "topic", *options)
    link.b.proxy.cli("namespace", "create", prefix, "--type", "topic")
    link.attach(prefix, prefix)
    name = prefix + "t"
    link.a.create_topic(name)
    link.wait_end(name, 0)
    link.wait_following()
    yield name
    link.a.proxy.cli("link", "set-mode", link.name, "asynchronous")
    link.a.proxy.cli("link", "detach", link.name, "--local", prefix)


def test_an_ack_means_that_both_clusters_have_it(link: Linked, topic: str) -> None:
    synchronous(link, topic)
    producer = Acks(link, topic)
    for number in range(200):
        producer.send(b"%d" % number)
        producer.wait()
        offset, _ = producer.acked[-1]
        assert link.b.end(topic) > offset
    assert [offset for offset, _ in producer.acked] == list(range(200))


def test_acks_wait_while_the_other_side_stands_still_and_go_out_when_it_is_recorded(
    link: Linked, topic: str, strict_topic: str
) -> None:
    synchronous(link, topic)
    until("In-Sync", lambda: partition_state(link, strict_topic) == "In-Sync", 20)
    producer, strict = Acks(link, topic), Acks(link, strict_topic)
    for each in (producer, strict):
        each.send(b"before")
        each.wait()
    readers = [Reader(link, strict_topic, isolation) for isolation in ("read_uncommitted", "read_committed")]
    until("read", lambda: all(reader.read() == [b"before"] for reader in readers), 30)
    link.b.proxy.pause()
    stopped_at = time.monotonic()
    try:
        strict.send(b"meanwhile")
        producer.send(b"meanwhile")
        producer.wait(CONFIRM_TIMEOUT_S + 10)
        (_, acked_at) = producer.acked[-1]
        assert acked_at - stopped_at > CONFIRM_TIMEOUT_S - 2, "acked although the other side could not have it"
        assert partition_state(link, topic) == "Out-Of-Sync"
        producer.send(b"not waited for")
        producer.wait(6)
        assert partition_state(link, strict_topic) == "Out-Of-Sync"
        strict.poll()
        assert len(strict.acked) == 1, "strict, and acked without the other side"
        assert link.a.end(strict_topic) == 2
        assert [(reader.read(), reader.end()) for reader in readers] == [([b"before"], 1)] * 2, "seen, and not acked"
    finally:
        link.b.proxy.resume()
    until("In-Sync again, by itself", lambda: partition_state(link, topic) == "In-Sync", 30)
    link.wait_end(topic, 3)
    strict.wait()
    until("read", lambda: all(reader.read() == [b"before", b"meanwhile"] for reader in readers), 30)
    assert [reader.end() for reader in readers] == [2, 2]
    for reader in readers:
        reader.close()
    assert ([offset for offset, _ in strict.acked], strict.errors) == ([0, 1], [])
    assert (link.a.end(strict_topic), link.b.end(strict_topic)) == (2, 2)
    producer.send(b"after")
    producer.wait()
    assert link.b.end(topic) == 4
    assert not producer.errors


def test_the_way_into_synchronous_under_load_loses_no_ack(link: Linked, topic: str) -> None:
    producer = Acks(link, topic)
    going = threading.Event()
    going.set()

    def load() -> None:
        number = 0
        while going.is_set():
            producer.send(b"%d" % number)
            number += 1
            time.sleep(0.001)  # the load's pace

    thread = threading.Thread(target=load)
    thread.start()
    try:
        synchronous(link, topic)
        link.a.proxy.cli("link", "set-mode", link.name, "asynchronous")
        synchronous(link, topic)
    finally:
        going.clear()
        thread.join()
    producer.wait()
    assert not producer.errors
    assert [offset for offset, _ in producer.acked] == list(range(len(producer.acked)))
    assert link.b.end(topic) == len(producer.acked)
    assert link.verify()["equal"]
