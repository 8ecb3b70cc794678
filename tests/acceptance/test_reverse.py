"""User story: the cluster that follows leads from one command on, under clients that write, and back again."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from support.groups import commit, offsets
from support.kafka import unique
from support.links import Linked, Side, linked, taking_transactions, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair, taking_transactions(pair.a, pair.b):
        pair.raise_levels()
        yield pair


class Writer:
    """One idempotent producer for each side, and one record after the other: at the side that takes it."""

    def __init__(self, sides: dict[str, tuple[Side, str]]) -> None:
        self.acked: list[tuple[bytes, float]] = []
        self.failed: list[KafkaError] = []
        self._producers = {
            name: (side.producer(enable_idempotence=True, linger_ms=0, retry_backoff_ms=20), topic)
            for name, (side, topic) in sides.items()
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        names, number = list(self._producers), 0
        while not self._stop.is_set():
            value = b"%d" % number
            error = self._write(names[0], value, number % 2)
            if error is None:
                self.acked.append((value, time.monotonic()))
                number += 1
            elif error.code() == KafkaError.INVALID_REQUEST:
                names.reverse()  # it was not stored: this side does not lead
            else:
                self.failed.append(error)
                return

    def _write(self, name: str, value: bytes, partition: int) -> KafkaError | None:
        producer, topic = self._producers[name]
        told: list[KafkaError | None] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            told.append(error)

        producer.produce(topic, value, partition=partition, on_delivery=delivered)
        while not told:
            producer.poll(0.05)
        return told[0]

    def count(self) -> int:
        return len(self.acked)

    def pause_s(self, since: int) -> float:
        """The longest time between two acks that follow each other, from an ack on."""
        moments = [at for _, at in self.acked[since:]]
        return max(later - earlier for earlier, later in itertools.pairwise(moments))


@pytest.mark.one_in_ci("stories", of="reversals")
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_there_and_back_under_clients_that_write(link: Linked, mode: str) -> None:
    name, group = unique(f"{mode}-to"), unique("app")
    link.a.proxy.cli("link", "create", name, "--remote", link.b.proxy.link_address)
    local, remote = unique("here-") + "-", unique("there-") + "-"
    for each in (link.a, link.b):
        each.proxy.cli("link", "grant", name, "--may", "follow:,lead:,follow:consumer-group:,lead:consumer-group:")
    link.a.proxy.cli("link", "attach", name, "--local", local, "--remote", remote, "--role", "leader")
    link.a.proxy.cli(
        *("link", "attach", name, "--type", "consumer-group", "--local", group, "--remote", group, "--role", "leader")
    )
    link.a.create_topic(local + "t", 2)
    until("B has the topic", lambda: link.b.topics().get(remote + "t") == 2)
    if mode == "synchronous":
        until("it follows", lambda: link.a.link(name)["state"] == "Following")
        link.a.proxy.cli("link", "set-mode", name, mode)
        until("in sync", lambda: link.a.link(name)["state"] == "In-Sync")
    topics = {"A": local + "t", "B": remote + "t"}
    sides = {"A": link.a, "B": link.b}
    open_ = Producer({"bootstrap.servers": link.a.bootstrap, "transactional.id": unique("open")})
    open_.init_transactions(30)
    open_.begin_transaction()
    open_.produce(topics["A"], b"never committed", partition=0)
    open_.flush(30)
    commit(link.a, group, {(topics["A"], 0): 1})

    with Writer({each: (sides[each], topics[each]) for each in "AB"}) as writer:
        for leader, prefix, follower in (("A", local, "B"), ("B", remote, "A")):
            since = writer.count()
            until("it writes", lambda since=since: writer.count() > since + 50)
            named = ("--local", prefix, "--local-group", group)
            plan = sides[leader].proxy.cli("link", "reverse", name, *named, "--dry-run")
            assert plan["refused"] == []
            # Where many tests run a broker may take seconds for what takes milliseconds.
            report = sides[leader].proxy.cli("link", "reverse", name, *named, "--hold", "45")
            assert report["reversed"]
            now = writer.count()
            until("it goes on", lambda now=now: writer.count() > now + 50)
            print(f"{mode}: {leader} to {follower}: no ack for {writer.pause_s(since):.3f} s")
            assert [each["role"] for each in sides[leader].link(name)["mappings"]] == ["follower", "follower"]
            assert [each["role"] for each in sides[follower].link(name)["mappings"]] == ["leader", "leader"]
            assert sides[leader].link(name)["mode"] == sides[follower].link(name)["mode"] == mode
            assert offsets(sides[follower], group)[topics[follower], 0] == 1
    assert not writer.failed, writer.failed
    with pytest.raises(KafkaException):
        open_.commit_transaction(30)

    if mode == "synchronous":  # until then consumers of the follower wait
        until("in sync the first way again", lambda: link.a.link(name)["state"] == "In-Sync")
        until("and known there", lambda: link.b.link(name)["state"] == "In-Sync")
    for partition in range(2):
        end = link.a.decided_end(topics["A"], partition)
        until("B has all", lambda end=end, partition=partition: link.b.end(topics["B"], partition) == end)
    reads = [
        [record for partition in range(2) for record in side.read(topics[each], partition, isolation="read_committed")]
        for each, side in sides.items()
    ]
    assert reads[0] == reads[1]
    found = Counter(record.value for record in reads[0])
    assert found == Counter(value for value, _ in writer.acked), "what was acked, once"
    verdicts = link.a.proxy.cli("verify", name)["partitions"]
    assert all(each["equal"] for each in verdicts if each["topic"] == topics["A"])
    # Whoever writes at the wrong side is refused, and what is not led is not reversed there.
    with pytest.raises(ProxyFailed, match="not led"):
        link.b.proxy.cli("link", "reverse", name, "--local", remote)
    link.a.proxy.cli("link", "delete", name)
