"""Links on real brokers: whatever a source's log holds, the follower's is equal, also past the proxies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from confluent_kafka import Producer, TopicPartition
from support.kafka import unique
from support.links import Linked, linked, taking_transactions, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair, taking_transactions(pair.b):
        pair.attach()
        yield pair


def transactional(link: Linked, **settings: object) -> Producer:
    producer = Producer(
        {"bootstrap.servers": link.a.bootstrap, "transactional.id": unique("tx"), "linger.ms": 0, **settings}
    )
    producer.init_transactions(30)
    return producer


def transact(producer: Producer, topic: str, values: Sequence[bytes], commit: bool = True) -> None:
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, key=value[:1], partition=0)
    assert producer.flush(30) == 0
    if commit:
        producer.commit_transaction(30)
    else:
        producer.abort_transaction(30)


def same(link: Linked, source: str, target: str) -> None:
    """Both sides' consumers read the same, in both isolation levels, through the proxies and past them."""
    link.wait_end(target, link.a.decided_end(source))
    for isolation in ("read_uncommitted", "read_committed"):
        expected = link.a.read(source, isolation=isolation)
        for direct in (False, True):
            assert link.b.read(target, direct=direct, isolation=isolation) == expected
    verdict = next(each for each in link.verify(check=False)["partitions"] if each["topic"] == source)
    assert verdict["equal"], verdict


def test_transactions_of_several_producers(link: Linked) -> None:
    source, target = link.names("transactional")
    link.a.create_topic(source)
    first, second = transactional(link), transactional(link)
    link.a.produce(source, [b"plain"] * 5)
    for number in range(4):
        transact(first, source, [b"a%d" % number] * 3, commit=number % 2 == 0)
        second.begin_transaction()
        second.produce(source, b"interleaved", partition=0)
        assert second.flush(30) == 0
        transact(first, source, [b"b%d" % number] * 2)
        second.produce(source, b"and more", partition=0)
        if number % 2:
            second.commit_transaction(30)
        else:
            second.abort_transaction(30)
    link.a.produce(source, [b"after"] * 3)
    same(link, source, target)


def test_an_open_transaction_is_open_on_the_other_side(link: Linked) -> None:
    source, target = link.names("open")
    link.a.create_topic(source)
    producer = transactional(link)
    producer.begin_transaction()
    producer.produce(source, b"open", partition=0)
    assert producer.flush(30) == 0
    link.a.produce(source, [b"behind it"] * 3)
    link.wait_end(target, 4)
    assert link.b.read(target, isolation="read_committed") == []
    producer.commit_transaction(30)
    same(link, source, target)
    assert len(link.b.read(target, isolation="read_committed")) == 4


def test_log_append_time(link: Linked) -> None:
    source, target = link.names("appendtime")
    link.a.create_topic(source, config={"message.timestamp.type": "LogAppendTime"})
    link.a.produce(source, [b"x"] * 50, compression_type="lz4")
    link.wait_end(target, 50)
    assert link.b.topic_config(target)["message.timestamp.type"] == "CreateTime"
    # A consumer sees the same time, and that it is another kind of time.
    assert [each.timestamp[1] for each in link.b.read(target)] == [each.timestamp[1] for each in link.a.read(source)]


def test_a_log_that_starts_later(link: Linked) -> None:
    source, target = link.names("headless")
    link.detach()
    link.a.create_topic(source)
    link.a.produce(source, [b"x"] * 20)
    link.a.admin(direct=True).delete_records([TopicPartition(source, 0, 12)])
    until("the log starts at 12", lambda: link.a.read(source)[0].offset == 12)
    link.attach()
    link.wait_end(target, 20)
    until("the follower starts at 12", lambda: link.b.read(target)[0].offset == 12)
    same(link, source, target)


def test_a_log_that_is_empty_but_for_its_start(link: Linked) -> None:
    source, target = link.names("expired")
    link.detach()
    link.a.create_topic(source)
    link.a.produce(source, [b"x"] * 20)
    link.a.admin(direct=True).delete_records([TopicPartition(source, 0, 20)])
    link.attach()
    link.wait_end(target, 20)
    link.a.produce(source, [b"y"])
    same(link, source, target)
    assert [each.offset for each in link.b.read(target)] == [20]


def test_a_compacted_topic(link: Linked) -> None:
    source, target = link.names("compacted")
    link.detach()
    config = {
        "cleanup.policy": "compact",
        "segment.bytes": "1048576",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "0",
        "min.compaction.lag.ms": "0",
    }
    link.a.create_topic(source, config=config)
    producer = transactional(link)
    for number in range(6):
        transact(producer, source, [b"%d-%d" % (key, number) for key in range(5)], commit=number != 3)
    transact(producer, source, [b"last"])
    end = link.a.decided_end(source)

    def cleaned() -> bool:
        transact(producer, source, [b"roll"])  # what is in the active segment is not cleaned
        found = [each.offset for each in link.a.read(source)]
        return len([offset for offset in found if offset < end]) < 12

    until("the cleaner has come by", cleaned, 60, interval_s=0.5)
    link.attach()
    link.wait_end(target, link.a.decided_end(source))
    transact(producer, source, [b"and on"])
    link.wait_end(target, link.a.decided_end(source))
    latest = {}
    for side, topic in ((link.a, source), (link.b, target)):
        for isolation in ("read_uncommitted", "read_committed"):
            latest[side is link.a, isolation] = {
                each.key: each for each in side.read(topic, isolation=isolation) if each.key is not None
            }
    assert latest[True, "read_committed"] == latest[False, "read_committed"]
    verdict = next(each for each in link.verify(check=False)["partitions"] if each["topic"] == source)
    assert verdict["equal"], verdict
