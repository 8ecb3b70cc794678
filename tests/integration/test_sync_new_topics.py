"""A synchronous link without topics, and topics that come: In-Sync all the time, and truly so."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from confluent_kafka import Producer
from support.kafka import unique
from support.links import Linked, linked, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("stories", of="topics that are new on a synchronous link")]


@pytest.fixture
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """A synchronous link with an empty namespace. The source is up again at the end."""
    source, _ = kafka_pair
    with linked(*kafka_pair) as pair:
        pair.raise_levels()
        pair.attach(None, None, "--disable-transaction-verification")
        until("it follows", lambda: states(pair) == ["Following", "Following"], 20)
        set_mode = "link", "set-mode", pair.name, "synchronous", "--confirm-timeout-ms", "10000"
        until("accepted", lambda: pair.a.proxy.cli(*set_mode))
        until("In-Sync", lambda: states(pair) == ["In-Sync", "In-Sync"], 20)
        try:
            yield pair
        finally:
            if not source.alive(source.broker_ids[0]):
                source.start_broker(source.broker_ids[0])


def states(link: Linked) -> list[str]:
    return [str(side.link(link.name)["state"]) for side in (link.a, link.b)]


class Watching:
    """Asks both sides again and again in which state the link is."""

    def __init__(self, link: Linked) -> None:
        self.seen: list[list[str]] = []
        self._link = link
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        until("it looks", lambda: self.seen)

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self.seen.append(states(self._link))
            except (OSError, httpx.HTTPError):
                return  # the source was killed

    def end(self) -> list[list[str]]:
        self._stop.set()
        self._thread.join(30)
        return self.seen


def fail_over(link: Linked) -> None:
    """When the target has heard nothing for a while of a source that was killed."""
    until("disconnected", lambda: link.b.link(link.name)["last_heard_seconds"] > 1)
    until("failed over", lambda: link.b.proxy.cli("link", "failover", link.name)["namespaces"][0]["promoted"])


def test_a_topic_that_its_producer_makes_is_in_sync_from_its_first_ack(link: Linked) -> None:
    """It is created by its first record, and the source is killed when that was acked."""
    source, target = link.names("made-by-its-producer")
    watching = Watching(link)
    acked: list[str] = []
    producer = Producer({"bootstrap.servers": link.a.bootstrap, "acks": "all"})
    producer.produce(source, b"first", on_delivery=lambda error, _: acked.append(str(error)))
    until("acked", lambda: producer.poll(0.01) is not None and acked, 60, 0)
    before = list(watching.seen)
    link.a.kafka.kill(link.a.kafka.broker_ids[0])
    link.a.proxy.kill()
    assert acked == ["None"]
    watching.end()
    assert before
    assert {tuple(each) for each in before} == {("In-Sync", "In-Sync")}
    fail_over(link)
    assert [record.value for record in link.b.read(target)] == [b"first"], "and once"


def test_a_topic_that_is_made_again_is_in_sync_from_its_first_ack(link: Linked) -> None:
    """It is written as soon as it is there, when no look has shown yet that it is another one than was confirmed."""
    source, target = link.names("made-again")
    link.a.proxy.cli("link", "alter", link.name, "--local", link.local, "--on-source-delete", "delete")
    link.a.create_topic(source)
    link.a.produce(source, [b"old"] * 5)
    until("the target has a lease", lambda: not link.a.partitions(link.name)[0]["sync"]["from_first"])
    acked: list[str] = []
    producer = link.a.producer()
    link.a.delete_topic(source)
    link.a.create_topic(source)
    producer.produce(source, b"new", on_delivery=lambda error, _: acked.append(str(error)))
    until("acked", lambda: producer.poll(0.01) is not None and acked, 60, 0)
    link.a.kafka.kill(link.a.kafka.broker_ids[0])
    link.a.proxy.kill()
    assert acked == ["None"]
    fail_over(link)
    assert [record.value for record in link.b.read(target)] == [b"new"], "and nothing else"


def test_a_transaction_in_a_topic_that_it_makes_is_there_when_its_commit_was_acked(link: Linked) -> None:
    source, target = link.names("made-by-a-transaction")
    producer = link.a.producer(transactional_id=unique("tx"))
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(source, b"first")
    producer.commit_transaction(30)
    link.a.kafka.kill(link.a.kafka.broker_ids[0])
    link.a.proxy.kill()
    fail_over(link)
    read = link.b.read(target, isolation="read_committed")
    assert [record.value for record in read] == [b"first"]


def test_the_link_remains_in_sync_while_topics_and_partitions_come(link: Linked) -> None:
    watching = Watching(link)
    names = [link.names(unique("new"))[0] for _ in range(3)]
    for name in names:
        link.a.create_topic(name, 3)
        link.a.produce(name, [b"%d" % number for number in range(10)])
    link.a.add_partitions(names[0], 5)
    link.a.produce(names[0], [b"more"] * 10)

    def leased() -> bool:
        found = [each for side in (link.a, link.b) for each in side.partitions(link.name)]
        return len(found) == 2 * 11 and not any(each["sync"]["from_first"] for each in found)

    until("the target has leases of all", leased, 30)
    assert {tuple(each) for each in watching.end()} == {("In-Sync", "In-Sync")}
    assert link.verify()["equal"]
