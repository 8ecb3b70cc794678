"""Offsets by time through a follower's proxy are the source's, on real brokers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec
from support.kafka import unique
from support.links import Linked, Side, linked, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

THEN = 1_600_000_000_000
"""Years before the markers are written."""


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        yield pair


def by_time(
    side: Side, topic: str, times: list[int], direct: bool = False, isolation: str = "read_uncommitted"
) -> list[int]:
    servers = side.kafka.bootstrap_servers if direct else side.bootstrap
    consumer = Consumer({"bootstrap.servers": servers, "group.id": unique("times"), "isolation.level": isolation})
    try:
        return [consumer.offsets_for_times([TopicPartition(topic, 0, time)], 30)[0].offset for time in times]
    finally:
        consumer.close()


def latest_time(side: Side, topic: str, direct: bool = False) -> tuple[int, int]:
    place = TopicPartition(topic, 0)
    asked = side.admin(direct).list_offsets(
        {place: OffsetSpec.max_timestamp()}, isolation_level=IsolationLevel.READ_UNCOMMITTED
    )
    found = asked[place].result(30)
    return found.offset, found.timestamp


def test_the_same_as_at_the_source(link: Linked) -> None:
    local, remote = unique("times-") + "-", unique("times-") + "-"
    source, target = local + "t", remote + "t"
    link.a.create_topic(source, config={"message.timestamp.before.max.ms": str(2**63 - 1)})
    producer = Producer({"bootstrap.servers": link.a.bootstrap, "transactional.id": unique("times")})
    producer.init_transactions(30)
    for number in range(5):
        producer.begin_transaction()
        for record in range(3):
            producer.produce(source, b"x", partition=0, timestamp=THEN + 10 * number + record)
        producer.commit_transaction(30)
    end = link.a.end(source)
    link.attach(local, remote, "--disable-transaction-verification")
    link.wait_end(target, end)

    last = link.a.read(source)[-1].timestamp[1]
    times = [0, *range(THEN - 1, THEN + 60, 3), last, latest_time(link.a, source, direct=True)[1] + 1]
    wanted = by_time(link.a, source, times, direct=True)
    assert by_time(link.b, target, times) == wanted
    assert by_time(link.b, target, times, isolation="read_committed") == wanted
    assert latest_time(link.b, target) == latest_time(link.a, source, direct=True)
    # Who bypasses the proxy finds a marker with the target's time first, which is never later than what was asked for.
    beside = by_time(link.b, target, times, direct=True)
    assert all(early <= right or right < 0 for early, right in zip(beside, wanted, strict=True))

    # Without the source: its records are found, and what follows a marker stands for it.
    link.detach(local)
    until("B knows", lambda: link.b.proxy.get(f"/v1/topics/{target}")["state"] == "detached")
    records = [(record.offset, record.timestamp[1]) for record in link.b.read(target)]
    expected = [next((offset for offset, time in records if time >= asked), -1) for asked in times]
    assert by_time(link.b, target, times) == expected
