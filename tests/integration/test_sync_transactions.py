"""Transactions over a synchronous link, on real brokers with unmodified clients: what the ack of a commit means."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import Consumer, Producer, TopicPartition
from support.groups import commit as commit_alone
from support.groups import group_status
from support.java_steps import TransactionSteps, java_compiles
from support.kafka import unique
from support.links import Linked, Side, linked, until
from support.raw_log import read_log
from support.source_topics import alter_topic
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed
from isthmus_protocol.record_codec import decode_records

pytestmark = pytest.mark.brokers

STORE = "__isthmus_transactions"
PARTITIONS = 2


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        pair.attach(None, None, "--disable-transaction-verification")
        yield pair
        pair.a.proxy.cli("link", "set-mode", pair.name, "asynchronous")
        pair.detach()


@pytest.fixture(scope="module")
def topic(link: Linked) -> str:
    """A topic of which all partitions are In-Sync."""
    name, remote = link.names("t")
    link.a.create_topic(name, PARTITIONS)
    for partition in range(PARTITIONS):
        link.wait_end(remote, 0, partition)
    link.wait_following()
    until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"), 20)
    wait_in_sync(link, name)
    return name


def wait_in_sync(link: Linked, topic: str) -> None:
    def in_sync() -> bool:
        found = link.a.partitions(link.name, topic)
        return len(found) == PARTITIONS and all(each["state"] == "In-Sync" for each in found)

    until("all partitions are In-Sync", in_sync)


def transactional(link: Linked, transactional_id: str) -> Producer:
    producer = link.a.producer(transactional_id=transactional_id, linger_ms=0)
    producer.init_transactions(30)
    return producer


def write(producer: Producer, topic: str, value: bytes) -> None:
    """One record to each partition, all acked."""
    for partition in range(PARTITIONS):
        producer.produce(topic, value, partition=partition)
    assert producer.flush(30) == 0


def decisions(link: Linked, transactional_id: str) -> dict[tuple[str, int], int]:
    """What the target has stored of an id: by partition the end."""
    found: dict[tuple[str, int], int] = {}
    with Wire(link.b.kafka.bootstrap_servers) as wire:
        for _, data in read_log(wire, STORE):
            for record in decode_records(data):
                key, value = json.loads(record.key or b""), json.loads(record.value or b"{}")
                if value.get("id") == transactional_id:
                    found[key[3], key[4]] = value["end"]
    return found


def test_the_ack_of_a_commit_waits_for_the_other_side(link: Linked, topic: str) -> None:
    mine, other = unique("txn-"), unique("elsewhere-")
    producer, elsewhere = transactional(link, mine), transactional(link, other)
    alone = unique("not-linked-")
    link.a.create_topic(alone, PARTITIONS)
    producer.begin_transaction()
    write(producer, topic, b"x")
    committed = threading.Event()
    link.b.proxy.pause()
    try:
        with ThreadPoolExecutor(1) as pool:
            commit = pool.submit(lambda: (producer.commit_transaction(60), committed.set()))
            elsewhere.begin_transaction()
            write(elsewhere, alone, b"x")
            elsewhere.commit_transaction(30)
            assert not committed.wait(4), "acked, and the other side cannot have it"
            assert not decisions(link, mine)
            link.b.proxy.resume()
            commit.result(60)
    finally:
        link.b.proxy.resume()
    remote = topic.replace(link.local, link.remote)
    ends = decisions(link, mine)
    assert ends.keys() == {(remote, partition) for partition in range(PARTITIONS)}
    for (_, partition), end in ends.items():
        assert link.a.end(topic, partition) - end in (0, 1), "the marker may be there when the end is read"
    assert not decisions(link, other)
    wait_in_sync(link, topic)
    producer.begin_transaction()
    write(producer, topic, b"aborted")
    before = decisions(link, mine)
    producer.abort_transaction(30)
    assert decisions(link, mine) == before


def test_clients_that_are_told_to_ask_again_commit_once(link: Linked, topic: str) -> None:
    """Also those of KIP-890, whose epoch rises with each transaction."""
    going = threading.Event()
    sent: Counter[bytes] = Counter()
    before = {partition: link.a.end(topic, partition) for partition in range(PARTITIONS)}

    def with_librdkafka() -> None:
        producer = transactional(link, unique("librdkafka-"))
        number = 0
        while going.is_set():
            producer.begin_transaction()
            value = b"librdkafka %d" % number
            write(producer, topic, value)
            producer.commit_transaction(60)
            sent[value] += PARTITIONS
            number += 1

    async def with_aiokafka() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=link.a.bootstrap, transactional_id=unique("aiokafka-"))
        await producer.start()
        try:
            number = 0
            while going.is_set():
                value = b"aiokafka %d" % number
                async with producer.transaction():
                    for partition in range(PARTITIONS):
                        await producer.send_and_wait(topic, value, partition=partition)
                sent[value] += PARTITIONS
                number += 1
        finally:
            await producer.stop()

    def with_java() -> str:
        return link.a.kafka.tool(
            "kafka-producer-perf-test",
            *("--topic", topic, "--num-records", "60", "--record-size", "10", "--throughput", "10"),
            *("--transactional-id", unique("java-"), "--transaction-duration-ms", "50"),
            *("--producer-props", f"bootstrap.servers={link.a.bootstrap}", "linger.ms=0"),
        ).stdout

    going.set()
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(with_librdkafka), pool.submit(lambda: asyncio.run(with_aiokafka()))]
        java = pool.submit(with_java)
        try:
            until("all of them write", lambda: len({value.split()[0] for value in list(sent)}) == 2)
            until("Java, too", lambda: any(len(each.value or b"") == 10 for each in link.a.read(topic, direct=True)))
            link.b.proxy.pause()
            time.sleep(4)  # longer than an answer is held
        finally:
            link.b.proxy.resume()
            written = len(sent)
            try:
                until("they go on", lambda: len(sent) > written + 4)
            finally:
                going.clear()
        assert "60 records sent" in java.result(120)
        for each in others:
            each.result(120)
    found: Counter[Any] = Counter()
    for partition in range(PARTITIONS):
        records = link.a.read_decided(topic, partition)
        found.update(each.value for each in records if each.offset >= before[partition])
    assert {value: found[value] for value in sent} == dict(sent)
    assert sum(count for value, count in found.items() if value not in sent) == 60, "of Java"
    until("both sides are equal", lambda: link.verify(check=False)["equal"])


def test_java_asks_again_for_a_commit_that_is_not_stored_and_commits_once(link: Linked, topic: str) -> None:
    """The other side stores records, and no decision, for longer than an answer is held: EndTxn v5 (KIP-890)."""
    mine = unique("java-")
    before = [link.a.end(topic, partition) for partition in range(PARTITIONS)]

    def with_java() -> str:
        return link.a.kafka.tool(
            "kafka-producer-perf-test",
            *("--topic", topic, "--num-records", "60", "--record-size", "10", "--throughput", "10"),
            *("--transactional-id", mine, "--transaction-duration-ms", "50"),
            *("--producer-props", f"bootstrap.servers={link.a.bootstrap}", "linger.ms=0"),
        ).stdout

    def reasons_at(side: Side) -> set[str | None]:
        return {each["reason"] for each in side.partitions(link.name)}

    def asked_again() -> bool:
        return any("not confirmed in time" in line and mine in line for line in link.a.proxy.log.splitlines())

    with ThreadPoolExecutor(1) as pool:
        java = pool.submit(with_java)
        try:
            until("it commits", lambda: bool(decisions(link, mine)), 60)
            alter_topic(link.b, STORE, {"max.message.bytes": "1"})
            until("it was told to ask again", asked_again, 60)
            until("its markers say what they wait for", lambda: "DECISION_NOT_STORED" in reasons_at(link.b), 60)
        finally:
            alter_topic(link.b, STORE, {"max.message.bytes": "16777216"})
        assert "60 records sent" in java.result(120)
    found = [link.a.read_decided(topic, index) for index in range(PARTITIONS)]
    assert sum(each.offset >= end for end, records in zip(before, found, strict=True) for each in records) == 60
    with Wire(link.b.kafka.bootstrap_servers) as wire:
        values = [json.loads(each.value or b"{}") for _, data in read_log(wire, STORE) for each in decode_records(data)]
    epochs = {value["epoch"] - value["data_epoch"] for value in values if value.get("id") == mine}
    assert epochs == {1}, "each decision raised the epoch"
    until("both sides are equal", lambda: link.verify(check=False)["equal"])
    assert "DECISION_NOT_STORED" not in reasons_at(link.b) | reasons_at(link.a)


def test_a_java_commit_that_was_given_up_is_done_once_when_it_is_asked_for_again(link: Linked, topic: str) -> None:
    """``commitTransaction`` raises TimeoutException after ``max.block.ms``, and then may only be called again."""
    version = link.a.kafka.version
    if not java_compiles(version):
        pytest.skip("Java comes without a compiler here")
    wait_in_sync(link, topic)
    settings = {"bootstrap_servers": link.a.bootstrap, "transactional_id": unique("java-"), "max_block_ms": "5000"}
    value = unique("given-up-").encode()
    with TransactionSteps(version, **settings) as java:
        for step in ("init", "begin", f"send {topic} {value.decode()}"):
            assert java.ask(step) == "done"
        link.b.proxy.pause()
        try:
            assert "org.apache.kafka.common.errors.TimeoutException" in java.ask("commit")
        finally:
            link.b.proxy.resume()
        assert java.ask("commit") == "done"
    for side, name in ((link.a, topic), (link.b, topic.replace(link.local, link.remote))):

        def found(side: Side = side, name: str = name) -> int:
            read = side.read(name, direct=True, isolation="read_committed")
            return [each.value for each in read].count(value)

        until("the marker is there", found)
        assert found() == 1
    until("both sides are equal", lambda: link.verify(check=False)["equal"])


def test_an_application_whose_groups_no_link_leads_commits_its_offsets(link: Linked, topic: str) -> None:
    """It reads, writes what follows, and commits where it has read in the same transaction."""
    link.a.proxy.cli("link", "set-mode", link.name, "synchronous")
    wait_in_sync(link, topic)
    group = Consumer({"bootstrap.servers": link.a.bootstrap, "group.id": unique("free-")})
    try:
        producer = transactional(link, unique("txn-"))
        for number in range(4):
            producer.begin_transaction()
            write(producer, topic, b"x")
            offsets = [TopicPartition(topic, 0, number + 1)]
            producer.send_offsets_to_transaction(offsets, group.consumer_group_metadata(), 30)
            producer.commit_transaction(10)
    finally:
        group.close()
    assert link.a.link(link.name)["state"] == "In-Sync", "what it was told of the commits ends no connection"


def test_a_link_that_is_down_holds_no_commit_of_groups_that_it_does_not_lead(link: Linked, topic: str) -> None:
    """Groups of several links, and of none, share the partitions of the offsets topic."""
    led, alone = unique("led-") + "-", unique("not-linked-")
    link.attach(led, led, "--type", "consumer-group", "--disable-transaction-verification")
    link.a.create_topic(alone, PARTITIONS)
    link.a.proxy.cli("link", "set-mode", link.name, "synchronous", "--confirm-timeout-ms", "2000")
    groups = [f"{led}{number}" for number in range(8)]

    def states() -> set[str]:
        """What acks of the led groups' commits mean."""
        found = [group_status(link.a, link.name, group) for group in groups]
        return {str(each["sync"]["state"]) for each in found if each is not None and each["sync"] is not None}

    def commit(number: int) -> None:
        """A transaction of a group in some partition of the offsets topic."""
        group = Consumer({"bootstrap.servers": link.a.bootstrap, "group.id": unique(f"free-{number}-")})
        try:
            producer = transactional(link, unique("txn-"))
            producer.begin_transaction()
            write(producer, alone, b"x")
            offsets = [TopicPartition(alone, 0, 1)]
            producer.send_offsets_to_transaction(offsets, group.consumer_group_metadata(), 30)
            producer.commit_transaction(30)
        finally:
            group.close()

    for group in groups:
        commit_alone(link.a, group, {(topic, 0): 0})
    until("commits are in sync", lambda: states() == {"In-Sync"})
    link.b.proxy.kill()
    try:
        until("commits are out of sync", lambda: states() == {"Out-Of-Sync"})
        for number in range(6):
            commit(number)
    finally:
        link.b.proxy.start()
        detach = "link", "detach", link.name, "--local", led, "--type", "consumer-group"

        def detached() -> bool:
            try:
                link.a.proxy.cli(*detach)
            except ProxyFailed as error:  # the answer of the time before was lost
                return "NOT_FOUND" in str(error)
            return True

        until("detached", detached)
    wait_in_sync(link, topic)
