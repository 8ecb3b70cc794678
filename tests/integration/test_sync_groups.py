"""Commits of groups over a synchronous link, on real brokers with unmodified consumers: what their acks mean."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import Consumer, TopicPartition
from support.groups import Member, group_status, member, offsets
from support.kafka import unique
from support.links import Linked, linked, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, partition_of

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(180)]

RECORDS = 50
STORE = "__isthmus_transactions"


class Groups:
    """A link whose topic has records at both sides, and namespaces of groups."""

    def __init__(self, pair: Linked) -> None:
        self.pair = pair
        self.local, self.remote = unique("app-") + "-", unique("far-") + "-"
        pair.attach()
        pair.attach(self.local, self.remote, "--type", "consumer-group", "--disable-transaction-verification")
        self.topic, self.far_topic = pair.names("t")
        pair.a.create_topic(self.topic)
        pair.a.produce(self.topic, [b"x"] * RECORDS)
        pair.wait_end(self.far_topic, RECORDS)
        pair.wait_following()
        command = "link", "set-mode", pair.name, "synchronous", "--confirm-timeout-ms", "6000"
        until("accepted", lambda: pair.a.proxy.cli(*command))

    def state(self, group: str) -> str | None:
        """What A says of a group's acks."""
        status = group_status(self.pair.a, self.pair.name, self.local + group)
        return None if status is None or status["sync"] is None else str(status["sync"]["state"])

    def at_b(self, group: str) -> int | None:
        """A group's committed offset, as the coordinator of B has it."""
        return offsets(self.pair.b, self.remote + group).get((self.far_topic, 0))

    def prepared_at_b(self, group: str) -> list[Any]:
        """What transactions have committed in a group that have not ended, as B's store has it."""
        latest: dict[bytes | None, bytes | None] = {}
        for record in self.pair.b.read(STORE, direct=True):
            latest[record.key] = record.value
        entries = [(json.loads(key or b"[]"), json.loads(value)) for key, value in latest.items() if value]
        return [value["positions"] for key, value in entries if key[0] == "o" and key[3] == self.remote + group]

    @contextmanager
    def in_sync(self, group: str, **settings: object) -> Iterator[Member]:
        """A member of a group whose commits wait for B."""
        with member(self.pair.a, self.local + group, self.topic, **settings) as joined:
            joined.commit({(self.topic, 0): 0})
            until(f"{group} is In-Sync", lambda: self.state(group) == "In-Sync")
            yield joined


@pytest.fixture(scope="module")
def groups(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Groups]:
    with linked(*kafka_pair) as pair:
        yield Groups(pair)


def test_an_acked_commit_is_at_the_other_cluster(groups: Groups) -> None:
    with groups.in_sync("1") as joined:
        for offset in range(1, RECORDS):
            joined.commit({(groups.topic, 0): offset})
            assert groups.at_b("1") == offset


def test_an_acked_commit_of_aiokafka_is_at_the_other_cluster(groups: Groups) -> None:
    async def run() -> None:
        consumer = AIOKafkaConsumer(
            groups.topic,
            bootstrap_servers=groups.pair.a.bootstrap,
            group_id=groups.local + "aio",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        await consumer.start()
        try:
            place = AioPartition(groups.topic, 0)
            await consumer.getone()
            await consumer.commit({place: 1})
            await asyncio.to_thread(until, "In-Sync", lambda: groups.state("aio") == "In-Sync")
            for offset in range(2, 20):
                await consumer.commit({place: offset})
                assert await asyncio.to_thread(groups.at_b, "aio") == offset
        finally:
            await consumer.stop()

    asyncio.run(run())


def test_commits_wait_while_the_other_side_stands_still_and_the_group_goes_on(groups: Groups) -> None:
    with groups.in_sync("2", session_timeout_ms=10_000, heartbeat_interval_ms=500) as joined:
        assigned = joined.assignments
        groups.pair.b.proxy.signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            # Commits are answered "not yet" every 3 s, and clients commit again.
            until("committed", lambda: joined.commit({(groups.topic, 0): 20}) or True)
            assert time.monotonic() - stopped_at > 3, "acked although the other side could not have it"
            assert groups.state("2") == "Out-Of-Sync"
            joined.commit({(groups.topic, 0): 21})
        finally:
            groups.pair.b.proxy.signal(signal.SIGCONT)
        until("In-Sync again, by itself", lambda: groups.state("2") == "In-Sync")
        assert groups.at_b("2") == 21
        joined.commit({(groups.topic, 0): 22})
        assert groups.at_b("2") == 22
        assert joined.assignments == assigned == 1, "the group rebalanced"


def test_java_consumers_go_on_while_the_other_side_stands_still(groups: Groups, tmp_path: Path) -> None:
    """Their automatic commits are answered late, or that they are to be tried again; nobody leaves the group."""
    first, more, last = 20, 40, 10
    topic, far_topic = groups.pair.names("java")
    groups.pair.a.create_topic(topic)
    groups.pair.wait_end(far_topic, 0)
    settings = tmp_path / "consumer.properties"
    settings.write_text("auto.commit.interval.ms=200\n")

    def consume(protocol: str) -> list[dict[str, Any]]:
        """What a consumer tells of all records, until it has read and committed the last."""
        told = groups.pair.a.kafka.tool(
            "kafka-verifiable-consumer",
            *("--bootstrap-server", groups.pair.a.bootstrap, "--topic", topic, "--group-id", groups.local + protocol),
            *("--group-protocol", protocol, "--enable-autocommit", "--max-messages", str(first + more + last)),
            *("--command-config", str(settings)),
        ).stdout
        return [json.loads(line) for line in told.splitlines() if line.startswith("{")]

    def committed_at(protocol: str) -> int:
        return offsets(groups.pair.a, groups.local + protocol).get((topic, 0), 0)

    def all_in_sync() -> bool:
        return all(groups.state(protocol) == "In-Sync" for protocol in protocols)

    protocols = "classic", "consumer"
    producer = groups.pair.a.producer()
    groups.pair.a.produce(topic, [b"x"] * first)
    with ThreadPoolExecutor(len(protocols)) as pool:
        consumers = {protocol: pool.submit(consume, protocol) for protocol in protocols}
        until("both have read", lambda: all(committed_at(protocol) == first for protocol in protocols))
        until("In-Sync", all_in_sync)
        groups.pair.b.proxy.pause()
        stopped_at = time.monotonic()
        try:
            for _ in range(more):  # acks wait as well; consumers see the records at once
                producer.produce(topic, b"x", partition=0)
                producer.poll(0)
                time.sleep(5 / more)  # the other side stands still for this long
            until("both have read on", lambda: all(committed_at(protocol) == first + more for protocol in protocols))
        finally:
            groups.pair.b.proxy.resume()
        assert time.monotonic() - stopped_at > 5
        assert producer.flush(60) == 0
        until("In-Sync again", all_in_sync)
        groups.pair.a.produce(topic, [b"x"] * last)
        for protocol, consumer in consumers.items():
            events = [str(each["name"]) for each in consumer.result(60)]
            assert events.count("partitions_assigned") == 1, "the group rebalanced"
            assert committed_at(protocol) == first + more + last
            # It may have got Out-Of-Sync after it was asked: then the last commits were acked without B.
            at_b = partial(offsets, groups.pair.b, groups.remote + protocol)
            until("B has them", lambda at_b=at_b: at_b() == {(far_topic, 0): first + more + last})


def test_what_a_transaction_commits_in_a_group_is_stored_at_the_other_cluster(groups: Groups) -> None:
    producer = groups.pair.a.producer(transactional_id=unique("app"), linger_ms=0)
    producer.init_transactions(30)
    with groups.in_sync("tx") as joined:
        metadata = until("the member is known", lambda: joined.group_metadata)
        for number, ends in enumerate((producer.commit_transaction, producer.abort_transaction), 1):
            producer.begin_transaction()
            producer.produce(groups.topic, b"in a transaction", partition=0)
            producer.flush(30)
            position = TopicPartition(groups.topic, 0, number)
            producer.send_offsets_to_transaction([position], metadata, 30)
            (stored,) = groups.prepared_at_b("tx")
            assert [each[:3] for each in stored] == [[groups.far_topic, 0, number]]
            assert groups.at_b("tx") == number - 1
            ends(30)
            until("nothing is pending at B", lambda: not groups.prepared_at_b("tx"))
            assert groups.at_b("tx") == 1


@contextmanager
def committing_in_transactions(groups: Groups, group: str) -> Iterator[None]:
    """An application commits offsets of a group that is not replicated, one transaction after another."""
    ended = threading.Event()

    def commit() -> None:
        producer = groups.pair.a.producer(transactional_id=unique("other-"))
        consumer = Consumer({"bootstrap.servers": groups.pair.a.bootstrap, "group.id": group})
        producer.init_transactions(30)
        metadata = consumer.consumer_group_metadata()
        while not ended.is_set():
            producer.begin_transaction()
            producer.send_offsets_to_transaction([TopicPartition(groups.topic, 0, 1)], metadata, 30)
            producer.commit_transaction(30)
        consumer.close()

    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit)
        try:
            yield
        finally:
            ended.set()
            committing.result(60)


def test_transactions_of_other_groups_keep_nobody_out_of_sync(groups: Groups) -> None:
    client = groups.pair.a.producer()
    partitions = len(client.list_topics(OFFSETS_TOPIC).topics[OFFSETS_TOPIC].partitions)
    at = partition_of(groups.local + "5", partitions)
    other = next(name for number in range(1000) if partition_of(name := f"other-{number}", partitions) == at)
    with groups.in_sync("5") as joined, committing_in_transactions(groups, other):
        groups.pair.b.proxy.pause()
        try:
            until("committed without B", lambda: joined.commit({(groups.topic, 0): 20}) or True)
            assert groups.state("5") == "Out-Of-Sync"
        finally:
            groups.pair.b.proxy.resume()
        until("In-Sync again", lambda: groups.state("5") == "In-Sync", 40)
        joined.commit({(groups.topic, 0): 21})
        assert groups.at_b("5") == 21


def test_transactions_of_other_groups_wait_for_nobody(groups: Groups) -> None:
    """Their committed offsets are in the same partition of the offsets topic, which a decision names in the group's
    place."""
    client = groups.pair.a.producer()
    partitions = len(client.list_topics(OFFSETS_TOPIC).topics[OFFSETS_TOPIC].partitions)
    at = partition_of(groups.local + "6", partitions)
    other = next(name for number in range(1000) if partition_of(name := f"other-{number}", partitions) == at)
    producer = groups.pair.a.producer(transactional_id=unique("other-"))
    producer.init_transactions(30)
    with groups.in_sync("6"):
        consumer = Consumer({"bootstrap.servers": groups.pair.a.bootstrap, "group.id": other})
        groups.pair.b.proxy.pause()
        try:
            for number in range(5):
                producer.begin_transaction()
                position = TopicPartition(groups.topic, 0, number)
                producer.send_offsets_to_transaction([position], consumer.consumer_group_metadata(), 30)
                producer.commit_transaction(30)
            assert groups.state("6") == "In-Sync", "they waited until it was not"
        finally:
            groups.pair.b.proxy.resume()
            consumer.close()
