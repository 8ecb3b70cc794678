"""Failover on real brokers: the source is killed under acked load, and the other cluster goes on with all of that."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaException, Message, Producer
from support.kafka import unique
from support.links import Linked, Read, Side, linked, until
from support.raw_log import producers
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed
from isthmus_protocol.producer_ids import IDS_PER_CLUSTER

pytestmark = pytest.mark.brokers

STORE = "__isthmus_transactions"
TOPICS = "t", "u"
PLAIN = 0
"""The partition of plain producers; the other one is for transactional ones."""
IN_TRANSACTIONS = 1
PARTITIONS = PLAIN, IN_TRANSACTIONS


@pytest.fixture
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """A synchronous link with two topics of two partitions, all In-Sync. The source is up again at the end."""
    source, _ = kafka_pair
    with linked(*kafka_pair) as pair:
        pair.raise_levels()  # where records come from is recorded from level 5 on, and the way back goes by that
        pair.attach(None, None, "--disable-transaction-verification")
        for topic in TOPICS:
            pair.a.create_topic(pair.local + topic, 2)
        pair.wait_following(len(TOPICS))
        set_mode = "link", "set-mode", pair.name, "synchronous", "--confirm-timeout-ms", "2000"
        until("accepted", lambda: pair.a.proxy.cli(*set_mode))
        until("In-Sync", lambda: pair.a.link(pair.name)["state"] == pair.b.link(pair.name)["state"] == "In-Sync")
        try:
            yield pair
        finally:
            if not source.alive(source.broker_ids[0]):
                source.start_broker(source.broker_ids[0])


class Load:
    """Producers at the source, and what they were told."""

    def __init__(self, pair: Linked) -> None:
        self._pair = pair
        self._stop = threading.Event()
        self.acked: dict[tuple[str, int], bytes] = {}
        """By (topic, offset) of partition PLAIN."""
        self.begun: list[bytes] = []
        self.committed: list[bytes] = []
        """Transactions of one record in each topic, by its value: the last one begun may not be told."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._transact)]
        for thread in self._threads:
            thread.start()

    def _delivered(self, error: Any, message: Message) -> None:
        if error is None:
            self.acked[message.topic(), message.offset()] = message.value()

    def _write(self) -> None:
        producer = self._pair.a.producer(enable_idempotence=True, linger_ms=0)
        number = 0
        while not self._stop.is_set():
            for topic in TOPICS:
                producer.produce(
                    self._pair.local + topic, b"plain %d" % number, partition=PLAIN, on_delivery=self._delivered
                )
            producer.poll(0.002)
            number += 1
        producer.purge()

    def _transact(self) -> None:
        producer = self._pair.a.producer(transactional_id=unique("load-"), linger_ms=0)
        producer.init_transactions(30)
        number = 0
        try:
            while not self._stop.is_set():
                value = b"transaction %d" % number
                self.begun.append(value)
                producer.begin_transaction()
                for topic in TOPICS:
                    producer.produce(self._pair.local + topic, value, partition=IN_TRANSACTIONS)
                producer.commit_transaction(10)
                self.committed.append(value)
                number += 1
        except KafkaException:
            pass  # the cluster is gone
        producer.purge()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def opened(pair: Linked, *values: bytes) -> tuple[Producer, int]:
    """A transaction with a record in each topic, which the other cluster has; the source's producer id."""
    producer = pair.a.producer(transactional_id=unique("open-"), linger_ms=0)
    producer.init_transactions(30)
    producer.begin_transaction()
    ends = [pair.b.end(pair.remote + topic, IN_TRANSACTIONS) for topic in TOPICS]
    for topic in TOPICS:
        for value in values:
            producer.produce(pair.local + topic, value, partition=IN_TRANSACTIONS)
    assert producer.flush(30) == 0
    with Wire(pair.b.kafka.bootstrap_servers) as wire:
        known = producers(wire, pair.remote + TOPICS[0], IN_TRANSACTIONS)
    (producer_id,) = (each for each, entry in known.items() if entry.transaction_start >= ends[0])
    return producer, producer_id % IDS_PER_CLUSTER


def decided(pair: Linked, producer_id: int) -> None:
    """The source had decided to commit, told so, and was killed before it had written a marker."""
    link_id = pair.b.link(pair.name)["link_id"]
    value = {"id": "app", "epoch": 0, "data_epoch": 0, "at": [0, 10**9]}
    writer = pair.b.producer(direct=True)
    for topic in TOPICS:
        key = ["d", link_id, producer_id, pair.remote + topic, IN_TRANSACTIONS, "a", "test"]
        end = pair.b.end(pair.remote + topic, IN_TRANSACTIONS)
        writer.produce(STORE, json.dumps({**value, "end": end}).encode(), json.dumps(key).encode())
    assert writer.flush(30) == 0


def kill_source(pair: Linked) -> None:
    """Brokers and proxies at once."""
    for broker_id in pair.a.kafka.broker_ids:
        pair.a.kafka.kill(broker_id)
    pair.a.proxy.kill()


def records(side: Side, prefix: str) -> dict[str, int]:
    """Of each topic, with its markers."""
    return {topic: sum(side.end(prefix + topic, partition) for partition in PARTITIONS) for topic in TOPICS}


def committed(side: Side, prefix: str) -> list[list[Read]]:
    """What consumers of each partition read, when no transaction is open."""
    return [side.read_decided(prefix + topic, partition) for topic in TOPICS for partition in PARTITIONS]


def fail_over(pair: Linked, *more: str) -> Any:
    return until("failed over", lambda: pair.b.proxy.cli("link", "failover", pair.name, *more))


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_what_was_acked_is_there_after_the_source_was_killed(link: Linked) -> None:
    with pytest.raises(ProxyFailed, match="SOURCE_REACHABLE"):
        link.b.proxy.cli("link", "failover", link.name)
    _, committed_id = opened(link, b"decided")
    decided(link, committed_id)
    still_open, _ = opened(link, b"not decided")
    load = Load(link)
    until("there is load", lambda: len(load.acked) > 300 and len(load.committed) > 5)
    kill_source(link)
    killed_ms = time.time() * 1000
    load.stop()

    until("B says until when", lambda: link.b.link(link.name)["partitions"][0]["sync"]["state"] == "Unknown")
    planned = fail_over(link, "--dry-run")
    assert planned["namespaces"][0]["transactions_decided"] >= 2
    report = fail_over(link)
    (namespace,) = report["namespaces"]
    assert namespace["promoted"]
    assert not report["reachable"]
    assert len(namespace["claims"]) == 4
    assert all(abs(claim["in_sync_until_ms"] - killed_ms) < 10_000 for claim in namespace["claims"])
    assert namespace["transactions_committed"] >= 2
    assert namespace["transactions_ended"] >= namespace["transactions_committed"] + 2, "one was not decided"

    for topic in TOPICS:
        found = {each.offset: each.value for each in link.b.read(link.remote + topic, PLAIN)}
        acked = {offset: value for (name, offset), value in load.acked.items() if name == link.local + topic}
        assert {offset: found.get(offset) for offset in acked} == acked
    seen: dict[bytes | None, int] = defaultdict(int)
    for topic in TOPICS:
        for record in link.b.read(link.remote + topic, IN_TRANSACTIONS, isolation="read_committed"):
            seen[record.value] += 1
    assert [value for value in load.committed if seen[value] != len(TOPICS)] == [], "an acked commit is not there"
    assert {count for value, count in seen.items()} == {len(TOPICS)}, f"a transaction is torn: {dict(seen)}"
    assert seen.keys() - {b"decided"} <= set(load.begun)
    assert seen[b"decided"] == len(TOPICS)
    end = link.b.end(link.remote + "t", PLAIN)
    assert link.b.produce(link.remote + "t", [b"here now"], PLAIN) == [end]
    assert link.b.topic_config(link.remote + "t")["message.timestamp.type"] == "CreateTime"
    still_open.purge()

    # The source comes back: it is not followed any more, says so, and writes nothing over here.
    link.a.kafka.start_broker(link.a.kafka.broker_ids[0])
    link.a.proxy.start()

    def told() -> tuple[str, set[str]]:
        status = link.a.link(link.name)
        return status["state"], {each["reason"] for each in status["partitions"]}

    until("A says that nothing follows", lambda: told() == ("Out-Of-Sync", {"NOT_FOLLOWING"}))
    assert link.b.link(link.name)["mappings"] == []
    assert link.a.produce(link.local + "t", [b"apart"], PLAIN), "plain producers go on: footnote 1"
    assert link.b.end(link.remote + "t", PLAIN) == end + 1

    # The way back, as docs/operations.md has it: what A has apart is lost, which is said before. In `u` that may be no
    # more than the markers of what is open there, of which the decided one is committed at B.
    link.a.proxy.cli("link", "set-mode", link.name, "asynchronous")
    link.a.proxy.cli("link", "detach", link.name, "--local", link.local)
    back = ("link", "attach", link.name, "--local", link.remote, "--remote", link.local, "--role", "leader")
    consents = "--truncate-target", "--disable-transaction-verification"
    before = records(link.a, link.local)
    planned = link.b.proxy.cli(*back, *consents, "--dry-run")
    after = records(link.a, link.local)  # A's coordinator may have written markers meanwhile
    lost = {plan["topic"].removeprefix(link.local): plan["records_lost"] for plan in planned["topics"]}
    assert {plan["action"] for plan in planned["topics"]} == {"truncate"}, planned["topics"]
    assert all(before[topic] <= lost[topic] <= after[topic] for topic in TOPICS), (before, lost, after)
    link.b.proxy.cli(*back, *consents)
    there = committed(link.b, link.remote)
    until("A has what B has", lambda: committed(link.a, link.local) == there, interval_s=0.5)
    with pytest.raises(KafkaException):
        link.a.produce(link.local + "t", [b"it follows now"], PLAIN)


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_a_failover_that_is_killed_goes_on(link: Linked) -> None:
    opened(link, b"never committed")
    link.a.proxy.kill()
    until("lost", lambda: link.b.link(link.name)["partitions"][0]["sync"]["state"] == "Unknown")

    def ask() -> None:
        try:
            link.b.proxy.cli("link", "failover", link.name)
        except ProxyFailed:
            pass  # it was killed

    def state() -> str:
        return str(link.b.proxy.get(f"/v1/namespaces/topic?prefix={link.remote}")["state"])

    asked = threading.Thread(target=ask)
    asked.start()
    until("begun", lambda: link.b.link(link.name)["promoting"] or state() == "open", interval_s=0.005)
    link.b.proxy.kill()
    asked.join(60)
    link.b.proxy.start()
    until("it is promoted", lambda: state() == "open")
    assert link.b.read(link.remote + "t", IN_TRANSACTIONS, isolation="read_committed") == []
    assert link.b.produce(link.remote + "t", [b"here now"], IN_TRANSACTIONS) == [2]
