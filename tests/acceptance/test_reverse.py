"""User story: the cluster that follows leads from one command on, under clients that write, and back again."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from support.groups import commit, offsets
from support.kafka import unique
from support.links import Linked, Side, relayed, taking_transactions, until
from support.relay import Relay
from support.runbooks import Kill, Runbook, delete_link, kills

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

WELL = {"Following", "In-Sync", "Catching Up"}
"""An asynchronous link is behind for a moment at each record."""
BETWEEN_S = 0.02
"""So long a writer waits after each ack. Without it the asynchronous link had nothing left to do in one look of sixteen
(on a busy machine), and pages wait until it is Following."""


@pytest.fixture(scope="module")
def pair(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[tuple[Linked, Relay]]:
    with relayed(*kafka_pair) as (pair, relay), taking_transactions(pair.a, pair.b):
        pair.raise_levels()
        yield pair, relay


@pytest.fixture(scope="module")
def link(pair: tuple[Linked, Relay]) -> Linked:
    return pair[0]


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

    def goes_on(self) -> None:
        now = self.count()
        until("it goes on", lambda: self.count() > now + 50)

    def _run(self) -> None:
        names, number = list(self._producers), 0
        while not self._stop.is_set():
            value = b"%d" % number
            error = self._write(names[0], value, number % 2)
            if error is None:
                self.acked.append((value, time.monotonic()))
                number += 1
                self._stop.wait(BETWEEN_S)
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


def roles(side: Side, name: str, other: str) -> set[str]:
    """Of what a link has, but for one namespace."""
    return {each["role"] for each in side.link(name)["mappings"] if each["local"] != other}


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
    other = unique("other-") + "-"  # goes the other way all the time
    link.b.proxy.cli("link", "attach", name, "--local", other, "--remote", other, "--role", "leader")
    link.b.create_topic(other + "t")
    until("A has the other topic", lambda: link.a.topics().get(other + "t") == 1)
    if mode == "synchronous":
        until("it follows", lambda: link.a.link(name)["state"] == "Following")
        link.a.proxy.cli("link", "set-mode", name, mode)
        until("in sync", lambda: {side.link(name)["state"] for side in (link.a, link.b)} == {"In-Sync"})
    topics = {"A": local + "t", "B": remote + "t"}
    sides = {"A": link.a, "B": link.b}
    open_ = Producer({"bootstrap.servers": link.a.bootstrap, "transactional.id": unique("open")})
    open_.init_transactions(30)
    open_.begin_transaction()
    open_.produce(topics["A"], b"never committed", partition=0)
    open_.flush(30)
    commit(link.a, group, {(topics["A"], 0): 1})

    with Writer({each: (sides[each], topics[each]) for each in "AB"}) as writer:
        for number, (leader, follower) in enumerate(("AB", "BA")):
            since = writer.count()
            until("it writes", lambda since=since: writer.count() > since + 50)
            # At A both times: the other cluster is to lead, then it itself.
            named = ("--local", local, "--local-group", group, *(["--here"] if leader == "B" else []))
            plan = link.a.proxy.cli("link", "reverse", name, *named, "--dry-run")
            assert plan["refused"] == []
            # Where many tests run a broker may take seconds for what takes milliseconds.
            report = link.a.proxy.cli("link", "reverse", name, *named, "--hold", "45")
            assert report["reversed"]
            writer.goes_on()
            print(f"{mode}: {leader} to {follower}: no ack for {writer.pause_s(since):.3f} s")
            assert roles(sides[leader], name, other) == {"follower"}
            assert roles(sides[follower], name, other) == {"leader"}
            assert sides[leader].link(name)["mode"] == sides[follower].link(name)["mode"] == mode
            assert offsets(sides[follower], group)[topics[follower], 0] == 1
            if mode == "synchronous":  # an ack of what went on the other way means both, whoever leads the rest
                assert link.b.produce(other + "t", [b"acked"], acks="all") == [number]
                assert link.a.end(other + "t") == number + 1
                (there,) = link.b.partitions(name, other + "t")
                assert there["sync"]["state"] == "In-Sync"
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
    link.a.proxy.cli("link", "delete", name)


class Led(NamedTuple):
    """A leads a namespace and a group to B, which has all of it."""

    link: Linked
    relay: Relay
    mode: str
    orders: str
    group: str

    @property
    def topic(self) -> str:
        return self.orders + "t"

    def book(self, page: str, kill: Kill) -> Runbook:
        state = "Following" if self.mode == "asynchronous" else "In-Sync"
        names = {"orders-": self.orders, "app-": self.group, "Following": state}
        return Runbook(page, self.link, self.relay, names, kill, WELL)

    def writer(self) -> Writer:
        return Writer({"A": (self.link.a, self.topic), "B": (self.link.b, self.topic)})

    def check_leads(self, leader: Side, follower: Side) -> None:
        for side, role in ((leader, "leader"), (follower, "follower")):
            link = side.link(self.link.name)
            assert ([each["role"] for each in link["mappings"]], link["mode"]) == ([role, role], self.mode)
        position = offsets(leader, self.group)[self.topic, 0]
        commit(leader, self.group, {(self.topic, 0): position + 1})
        until("the position comes", lambda: offsets(follower, self.group)[self.topic, 0] == position + 1)
        with pytest.raises(KafkaException):
            follower.produce(self.topic, [b"refused"])

    def check_written(self, writer: Writer) -> None:
        """Both sides have what was acked; of what was under way as something died it may not be known where it was
        stored: that was written again."""
        assert not writer.failed, writer.failed
        a, b = self.link.a, self.link.b
        if self.mode == "synchronous":  # until then consumers of the follower wait
            until("In-Sync", lambda: {side.link(self.link.name)["state"] for side in (a, b)} == {"In-Sync"})
        for partition in range(2):
            until("as long", lambda partition=partition: a.end(self.topic, partition) == b.end(self.topic, partition))
        reads = [[record for each in range(2) for record in side.read(self.topic, each)] for side in (a, b)]
        assert reads[0] == reads[1]
        found = Counter(record.value for record in reads[0])
        acked = Counter(value for value, _ in writer.acked)
        assert acked <= found
        assert sum((found - acked).values()) <= 2
        for side in (a, b):
            partitions = side.proxy.cli("verify", self.link.name)["partitions"]
            assert all(each["equal"] for each in partitions if each["topic"] == self.topic)


@pytest.fixture(params=["asynchronous", "synchronous"])
def led(pair: tuple[Linked, Relay], request: pytest.FixtureRequest) -> Iterator[Led]:
    both, relay = pair
    a, b = both.a, both.b
    scene = Led(Linked(a, b, unique("to")), relay, request.param, unique("orders-") + "-", unique("app-"))
    link, name = scene.link, scene.link.name
    a.proxy.cli("link", "create", name, "--remote", relay.address)
    link.raise_levels()
    try:
        link.attach(scene.orders, scene.orders)
        link.attach(scene.group, scene.group, "--type", "consumer-group")
        a.create_topic(scene.topic, 2)
        commit(a, scene.group, {(scene.topic, 0): 0})
        until("the position is there", lambda: offsets(b, scene.group) == {(scene.topic, 0): 0})
        link.wait_following()
        if scene.mode == "synchronous":
            a.proxy.cli("link", "set-mode", name, scene.mode)
            until("In-Sync", lambda: {side.link(name)["state"] for side in (a, b)} == {"In-Sync"})
        yield scene
    finally:
        delete_link(link, name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kill", kills("reversal"))
def test_by_one_command(led: Led, kill: Kill) -> None:
    """While something dies under it, and clients write to whoever takes it."""
    link = led.link
    with led.writer() as writer, led.book("reversal", kill) as book:
        writer.goes_on()
        book.step("See what keeps A from following, or B from leading")
        book.step("Reverse")
        writer.goes_on()
        led.check_leads(link.b, link.a)
        assert "equal" in book.step("See that A follows")
        book.step("And back")
        writer.goes_on()
        led.check_leads(link.a, link.b)
    led.check_written(writer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kill", kills("reversal-by-hand"))
def test_by_the_eight_steps(led: Led, kill: Kill) -> None:
    """One after the other, as KIP-986 has them."""
    link = led.link
    with led.writer() as writer, led.book("reversal-by-hand", kill) as book:
        writer.goes_on()
        book.step("See the link")
        book.step("See that it is well")
        book.step("Reserve what A leads")
        ends = [link.a.end(led.topic, each) for each in range(2)]
        assert "reserved" in book.step("See that nobody writes there, and that B has all")
        assert [link.b.end(led.topic, each) for each in range(2)] == ends
        book.step("Detach")
        book.step("Attach the other way round")
        assert not [each for each in link.b.link(link.name)["mappings"] if each["role"] == "follower"]
        assert [link.b.end(led.topic, each) for each in range(2)] == ends, "it is reserved still"
        book.step("Clear the reservation at B")
        book.step("See that B leads")
        writer.goes_on()
        led.check_leads(link.b, link.a)
    led.check_written(writer)
