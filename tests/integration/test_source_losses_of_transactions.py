"""A source whose transaction log loses its end after the target had what was decided there, on real brokers.

Offsets of that log are used again by later decisions, which must count as later at the target all the same: a failover
commits what was acked, in all partitions and in the group, whether its markers came or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from support.groups import offsets
from support.kafka import unique
from support.links import Linked, until
from support.power_loss import in_sync, lose_end
from support.raw_log import read_log
from support.source_topics import alter_topic
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_plugins.replication.in_doubt.store import TOPIC as STORE
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, partition_of

pytestmark = [
    pytest.mark.brokers,
    pytest.mark.timeout(240),
    pytest.mark.one_in_ci("stories", of="source losses"),
]

BROKER = 1
PARTITIONS = 2
BEFORE, AFTER = 5, 1
"""Transactions before the loss, and after it before the one whose markers do not come."""


@pytest.fixture(scope="module")
def source() -> Iterator[KafkaCluster]:
    """A cluster of this module's own: it loses power."""
    with KafkaCluster(name="undecided", brokers=1) as cluster:
        yield cluster


class Application:
    """A transactional id, and a group: each transaction writes its number to all partitions, and commits it."""

    def __init__(self, link: Linked, topic: str, group: str) -> None:
        self.name = unique("txn-")
        self.committed = 0
        """The last transaction; all of them were acked."""
        self._link, self._topic = link, topic
        consumer = Consumer({"bootstrap.servers": link.a.bootstrap, "group.id": group})
        self._group = consumer.consumer_group_metadata()
        consumer.close()
        self._producer: Producer
        self.begin_anew()

    def begin_anew(self) -> None:
        self._producer = self._link.a.producer(transactional_id=self.name, linger_ms=0)
        self._producer.init_transactions(60)

    def write(self, with_offset: bool = True) -> None:
        """Write what the next transaction has; it is acked, and not committed."""
        self._producer.begin_transaction()
        for partition in range(PARTITIONS):
            self._producer.produce(self._topic, b"%d" % (self.committed + 1), partition=partition)
        assert self._producer.flush(60) == 0
        if with_offset:
            position = TopicPartition(self._topic, 0, self.committed + 1)
            self._producer.send_offsets_to_transaction([position], self._group, 60)

    def commit(self) -> None:
        self._producer.commit_transaction(60)
        self.committed += 1


def decided(link: Linked, transactional_id: str) -> set[tuple[int, int]]:
    """(Leader epoch, offset) of the decisions that the target has stored of an id."""
    with Wire(link.b.kafka.bootstrap_servers) as wire:
        stored = [record for _, data in read_log(wire, STORE) for record in decode_records(data)]
    values: list[dict[str, Any]] = [json.loads(record.value or b"{}") for record in stored]
    return {(value["at"][2], value["at"][1]) for value in values if value.get("id") == transactional_id}


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "begins anew"])
@pytest.mark.parametrize("lost", [2, 12], ids=["the last decision", "several decisions"])
def test_what_is_decided_after_its_log_lost_its_end_is_committed_everywhere(
    lost: int, goes_on: bool, source: KafkaCluster, kafka_pair: tuple[KafkaCluster, KafkaCluster]
) -> None:
    """``lost``: batches of the log; of each transaction it has four or five, the decision and its completion last."""
    with in_sync(source, kafka_pair[1]) as (link, _, _):
        local, remote = unique("app-") + "-", unique("far-") + "-"
        link.attach(local, remote, "--type", "consumer-group")
        here, there = link.names("decided")
        link.a.create_topic(here, PARTITIONS)
        application = Application(link, here, local + "g")
        until("the topic is In-Sync", lambda: states(link, here) == ["In-Sync"] * PARTITIONS)
        for _ in range(BEFORE):
            # librdkafka 2.x asks no group's coordinator again that it had before the broker was restarted, and hangs.
            application.write(with_offset=not goes_on)
            application.commit()
        until("the groups are In-Sync", lambda: link.a.link(link.name)["state"] == "In-Sync")
        level(link, here, there)
        before = max(decided(link, application.name))

        partition = partition_of(application.name, link.a.topics()[TRANSACTION_TOPIC])
        source.kill(BROKER)
        lose_end(source, BROKER, TRANSACTION_TOPIC, partition, batches=lost)
        source.start_broker(BROKER)
        if not goes_on:
            application.begin_anew()
        for _ in range(AFTER):
            application.write()
            application.commit()
        level(link, here, there)
        until("all is In-Sync", lambda: states(link, here) == ["In-Sync"] * PARTITIONS)

        application.write()
        alter_topic(link.b, there, {"max.message.bytes": "1"})  # markers do not come any more
        application.commit()
        link.a.proxy.kill()
        source.kill(BROKER)
        try:
            later = {each for each in decided(link, application.name) if each > before}
            assert lost == 2 or all(offset < before[1] for _, offset in later), "offsets are not used again"
            open_ends = [link.b.end(there, index, "read_committed") < link.b.end(there, index) for index in (0, 1)]
            assert all(open_ends), "its markers came"
            alter_topic(link.b, there, {"max.message.bytes": "1048588"})
            link.b.proxy.cli("link", "failover", link.name)
            wanted = [b"%d" % number for number in range(1, application.committed + 1)]
            for index in range(PARTITIONS):
                read = link.b.read(there, index, isolation="read_committed")
                assert [each.value for each in read] == wanted, f"partition {index}"
            assert offsets(link.b, remote + "g") == {(there, 0): application.committed}
        finally:
            source.start_broker(BROKER)


def states(link: Linked, topic: str) -> list[str]:
    return [each["state"] for each in link.a.partitions(link.name, topic)]


def level(link: Linked, here: str, there: str) -> None:
    """Wait until the target has all, markers included."""
    for index in range(PARTITIONS):
        end = link.a.decided_end(here, index)
        until("all is there", lambda index=index, end=end: link.b.end(there, index) == end)
