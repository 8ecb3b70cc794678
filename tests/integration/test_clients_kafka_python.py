"""kafka-python through the proxy."""

from __future__ import annotations

import threading

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewPartitions, NewTopic
from support.kafka import unique
from support.links import until
from support.proxies import Proxied

pytestmark = pytest.mark.brokers

CODECS = (None, "gzip")


def create_topic(proxied: Proxied, partitions: int = 1) -> str:
    topic = unique("topic-")
    admin = KafkaAdminClient(bootstrap_servers=proxied.bootstrap)
    try:
        admin.create_topics([NewTopic(topic, partitions, 1)])
    finally:
        admin.close()
    return topic


def test_producer_of_every_codec_and_a_group(proxied_of_each_version: Proxied) -> None:
    proxied = proxied_of_each_version
    topic, group = create_topic(proxied), unique("group-")
    for codec in CODECS:
        producer = KafkaProducer(bootstrap_servers=proxied.bootstrap, acks="all", compression_type=codec)
        sent = [producer.send(topic, str(codec).encode() * 100, key=b"k", headers=[("codec", b"h")]) for _ in range(20)]
        producer.flush(30)
        assert all(each.succeeded() for each in sent)
        producer.close()
    settings = {"group_id": group, "auto_offset_reset": "earliest", "enable_auto_commit": False}
    consumer = KafkaConsumer(topic, bootstrap_servers=proxied.bootstrap, consumer_timeout_ms=30_000, **settings)
    found = {}  # a member that is slow joins again, and begins at the start: nothing is committed yet
    for record in consumer:
        found[record.offset] = record
        if len(found) == 40:
            break
    assert sorted(found) == list(range(40))
    values = [found[offset].value for offset in range(40)]
    assert values == [str(codec).encode() * 100 for codec in CODECS for _ in range(20)]
    assert found[39].headers == [("codec", b"h")]
    consumer.commit()
    consumer.close()

    other = KafkaConsumer(bootstrap_servers=proxied.bootstrap, **settings)
    place = TopicPartition(topic, 0)
    assert other.committed(place) == 40
    other.assign([place])
    assert (other.beginning_offsets([place]), other.end_offsets([place])) == ({place: 0}, {place: 40})
    other.seek(place, 10)
    assert next(iter(other)).offset == 10
    other.close()


class Member(threading.Thread):
    """A member of a group in a thread of its own: while it joins, it waits for the others."""

    def __init__(self, proxied: Proxied, topic: str, group: str) -> None:
        super().__init__(daemon=True)
        settings = {"group_id": group, "auto_offset_reset": "earliest", "heartbeat_interval_ms": 500}
        self._consumer = KafkaConsumer(topic, bootstrap_servers=proxied.bootstrap, **settings)
        self._left = threading.Event()
        self.assigned = 0
        self.start()

    def run(self) -> None:
        while not self._left.is_set():
            self._consumer.poll(100)
            self.assigned = len(self._consumer.assignment())
        self._consumer.close()

    def leave(self) -> None:
        self._left.set()
        self.join(30)


@pytest.mark.suite("clients")
def test_a_member_that_joins_gets_partitions(proxied_of_clients: Proxied) -> None:
    topic, group = create_topic(proxied_of_clients, 4), unique("group-")
    members = [Member(proxied_of_clients, topic, group) for _ in range(2)]
    until("both have partitions", lambda: [member.assigned for member in members] == [2, 2])
    members[0].leave()
    until("the other one has all", lambda: members[1].assigned == 4)
    members[1].leave()


def test_administration(proxied_of_clients: Proxied) -> None:
    proxied = proxied_of_clients
    topic = create_topic(proxied, 2)
    admin = KafkaAdminClient(bootstrap_servers=proxied.bootstrap)
    try:
        until("it is listed", lambda: topic in admin.list_topics())
        admin.create_partitions({topic: NewPartitions(4)})
        until("it has four partitions", lambda: len(admin.describe_topics([topic])[0]["partitions"]) == 4)
        admin.delete_topics([topic])
        until("it is gone", lambda: topic not in admin.list_topics())
    finally:
        admin.close()
