"""Consumers of a follower that is truncated meanwhile: they wait, and go on at their positions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import pytest
from confluent_kafka import Consumer
from support import groups
from support.kafka import unique
from support.links import Linked, linked, taking_transactions, truncated, until
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.error_codes import COORDINATOR_LOAD_IN_PROGRESS
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """One link for all tests of this module, with a pair of namespaces attached."""
    with linked(*kafka_pair) as pair, taking_transactions(pair.b):
        pair.attach()
        yield pair


def committed(link: Linked, group: str, topic: str) -> dict[int, int]:
    """A group's positions in a topic, as B's coordinator has them."""
    return {partition: offset for (name, partition), offset in groups.offsets(link.b, group).items() if name == topic}


class Reader:
    """A consumer in a group of its own, subscribed through B's proxy, that goes on in a thread until it has enough."""

    def __init__(self, link: Linked, topic: str, **settings: Any) -> None:
        self.group = unique("readers-")
        self.read: list[tuple[int, int, bytes]] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": link.b.bootstrap,
                "group.id": self.group,
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 500,
                **{name.replace("_", "."): value for name, value in settings.items()},
            }
        )
        self._consumer.subscribe([topic])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            message = self._consumer.poll(0.2)
            if message is None:
                continue
            if message.error() is not None:
                self.errors.append(str(message.error()))
            else:
                self.read.append((message.partition(), message.offset(), message.value()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30)
        self._consumer.close()


@pytest.mark.one_in_ci("stories", of="clients of what is cut")
def test_consumers_that_run_meanwhile_wait_and_go_on_at_their_positions(link: Linked) -> None:
    source, target = link.names("consumed")
    link.a.create_topic(source, 2)
    link.a.produce(source, [b"%d" % number for number in range(100)])
    link.a.produce(source, [b"%d" % number for number in range(50)], partition=1)
    link.wait_end(target, 100)
    link.wait_end(target, 50, partition=1)
    setting, group = "--formatter-property", unique("java-")
    lines: list[str] = []
    java = threading.Thread(
        target=lambda: lines.extend(
            link.b.kafka.tool(
                "kafka-console-consumer",
                *("--bootstrap-server", link.b.bootstrap, "--topic", target, "--group", group),
                *("--from-beginning", "--max-messages", "175", "--timeout-ms", "60000"),
                *(setting, "print.offset=true", setting, "print.partition=true"),
                *("--command-property", "auto.commit.interval.ms=500"),
            ).stdout.splitlines()
        ),
        daemon=True,
    )
    java.start()
    with Reader(link, target) as reader:
        until("the consumer has read all", lambda: len(reader.read) == 150)
        until("the Java consumer, too", lambda: committed(link, group, target) == {0: 100, 1: 50})
        link.b.produce(target, [b"rogue-%d" % number for number in range(5)], direct=True)
        until("they have read that", lambda: committed(link, group, target)[0] == len(reader.read) - 50 == 105)
        truncated(link, target)
        assert committed(link, group, target) == {0: 100, 1: 50}
        link.a.produce(source, [b"more-%d" % number for number in range(10)])
        link.a.produce(source, [b"last-%d" % number for number in range(10)])
        until("the consumer goes on", lambda: any(value == b"last-9" for _, _, value in reader.read), 60)
    assert [value for partition, _, value in reader.read if partition == 1] == [b"%d" % number for number in range(50)]
    mine = [(offset, value) for partition, offset, value in reader.read if partition == 0]
    expected = [(record.offset, record.value) for record in link.a.read(source)]
    assert mine[:100] == expected[:100]
    assert [value for _, value in mine[100:105]] == [b"rogue-%d" % number for number in range(5)]
    assert mine[105:] == expected[100:]
    java.join(90)
    told = [line.split("\t") for line in lines]
    assert [line[2] for line in told if line[0] == "Partition:1"] == [str(number) for number in range(50)]
    ours = [(int(line[1].removeprefix("Offset:")), line[2].encode()) for line in told if line[0] == "Partition:0"]
    assert ours == mine


@pytest.mark.one_in_ci("stories", of="clients of what is cut")
def test_a_java_consumer_of_a_kip_848_group_that_read_what_is_cut_goes_on_at_the_cut(link: Linked) -> None:
    source, target = link.names("java-848")
    link.a.create_topic(source)
    link.a.produce(source, [b"%d" % number for number in range(100)])
    link.wait_end(target, 100)
    setting, group = "--formatter-property", unique("java-848-")
    lines: list[str] = []
    java = threading.Thread(
        target=lambda: lines.extend(
            link.b.kafka.tool(
                "kafka-console-consumer",
                *("--bootstrap-server", link.b.bootstrap, "--topic", target, "--group", group),
                *("--from-beginning", "--max-messages", "115", "--timeout-ms", "60000"),
                *(setting, "print.offset=true", "--command-property", "group.protocol=consumer"),
                *("--command-property", "auto.commit.interval.ms=500"),
            ).stdout.splitlines()
        ),
        daemon=True,
    )
    java.start()
    until("it has read all", lambda: committed(link, group, target) == {0: 100})
    link.b.produce(target, [b"rogue-%d" % number for number in range(5)], direct=True)
    until("it has read that", lambda: committed(link, group, target) == {0: 105})
    truncated(link, target)
    link.a.produce(source, [b"more-%d" % number for number in range(10)])
    java.join(120)
    read = [line.split("\t") for line in lines if line.startswith("Offset:")]
    mine = [(int(line[0].removeprefix("Offset:")), line[1].encode()) for line in read]
    expected = [(record.offset, record.value) for record in link.a.read(source)]
    rogue = [(100 + number, b"rogue-%d" % number) for number in range(5)]
    assert mine == [*expected[:100], *rogue, *expected[100:]]


def test_a_group_commits_and_asks_under_the_id_that_the_topic_had(link: Linked) -> None:
    source, target = link.names("former-id")
    link.a.create_topic(source)
    link.a.produce(source, [b"%d" % number for number in range(10)])
    link.wait_end(target, 10)
    group = unique("by-id-")
    with Wire(link.b.bootstrap) as wire:
        (topic,) = wire.request(ApiKey.METADATA, 12, {"topics": [{"name": target}]}).topics
        former = topic.topic_id
        link.b.produce(target, [b"rogue-%d" % number for number in range(5)], direct=True)
        truncated(link, target)

        def commit(offset: int) -> int:
            """Commit as one does who has not heard of the new id; the error code."""
            partition = {"partition_index": 0, "committed_offset": offset}
            values = {"group_id": group, "topics": [{"topic_id": former, "partitions": [partition]}]}
            (answered,) = wire.request(ApiKey.OFFSET_COMMIT, 10, values).topics
            assert answered.topic_id == former
            return int(answered.partitions[0].error_code)

        until("whole", lambda: commit(7) != COORDINATOR_LOAD_IN_PROGRESS)  # this proxy hears of it a moment later
        assert committed(link, group, target) == {0: 7}
        assert commit(13) == 0
        assert committed(link, group, target) == {0: 10}, "beyond the cut"
        asked = {"group_id": group, "topics": [{"topic_id": former, "partition_indexes": [0]}]}
        (told,) = wire.request(ApiKey.OFFSET_FETCH, 10, {"groups": [asked]}).groups
        assert [(each.topic_id, each.partitions[0].committed_offset) for each in told.topics] == [(former, 10)]
