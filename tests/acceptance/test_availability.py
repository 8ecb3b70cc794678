"""User story: who can work while a link is in which state. The availability table of the specification, cell by cell.

Each state is one of a real link between real clusters, each kind of client an unmodified one. The names of tests are
the table's rows, their parameters its columns. A producer or consumer that has to wait is followed until the link is
well again: then what it waited for happens, once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from support.groups import group_status, offsets
from support.kafka import unique
from support.links import Linked, relayed, until
from support.relay import Relay

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers

DISCONNECTED: Final = "Disconnected"
CATCHING_UP: Final = "Catching Up"
FOLLOWING: Final = "Following"
SYNCING: Final = "Syncing"
IN_SYNC: Final = "In-Sync"
OUT_OF_SYNC: Final = "Out-Of-Sync"

CONFIRM_TIMEOUT_MS: Final = 3000
SLOW_S: Final = 0.004
"""The relay's delay of each chunk of 4 KB: about 1 MB/s."""
BACKLOG: Final = [os.urandom(50_000)] * 1600
WAITS_S: Final = 3.0
"""Who has to wait is watched for so long."""
NOT_ALLOWED: Final = KafkaError.TOPIC_AUTHORIZATION_FAILED


@dataclass
class State:
    """A link in one state of the table."""

    name: str
    link: Linked
    source: str
    """A topic of A that the link leads. Its first record is at B, too, unless that is Syncing."""
    target: str
    groups: str
    """Prefix of consumer groups that the link leads, the same at both sides."""
    mend: Callable[[], None] = lambda: None
    """Make the link Following, or In-Sync."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """What clients that had to wait see when the link is well again."""

    @property
    def synchronous(self) -> bool:
        return self.name in (SYNCING, IN_SYNC, OUT_OF_SYNC)


def partition_states(link: Linked, topic: str) -> set[str]:
    return {str(each["state"]) for each in link.a.partitions(link.name, topic)}


def has_state(link: Linked, topic: str, state: str) -> Callable[[], bool]:
    return lambda: partition_states(link, topic) == {state}


class Scene:
    """One link through a relay, and a pair of topic namespaces for each state that needs its own."""

    def __init__(self, link: Linked, relay: Relay) -> None:
        self.link = link
        self.relay = relay
        self.groups = unique("app-") + "-"

    def attach(self, before: Callable[[str], object] = lambda source: None) -> tuple[str, str]:
        """A new topic at A and its name at B, attached after ``before``, with one record."""
        prefix = unique("table-") + "-"
        source, target = prefix + "t", "at-b-" + prefix + "t"
        self.link.a.create_topic(source)
        self.link.a.produce(source, [b"first"])
        before(source)
        self.link.attach(prefix, "at-b-" + prefix, "--disable-transaction-verification")
        return source, target

    def detach(self, source: str) -> None:
        self.link.detach(source.removesuffix("t"))

    def set_mode(self, mode: str) -> None:
        options = ("--confirm-timeout-ms", str(CONFIRM_TIMEOUT_MS)) if mode == "synchronous" else ()
        command = ("link", "set-mode", self.link.name, mode, *options)
        until(f"{mode} is accepted", lambda: self.link.a.proxy.cli(*command))


@contextmanager
def following(scene: Scene) -> Iterator[State]:
    source, target = scene.attach()
    scene.link.wait_end(target, 1)
    until("it follows", has_state(scene.link, source, FOLLOWING))
    yield State(FOLLOWING, scene.link, source, target, scene.groups)
    scene.detach(source)


@contextmanager
def catching_up(scene: Scene) -> Iterator[State]:
    source, target = scene.attach()
    scene.link.wait_end(target, 1)
    scene.relay.delay_s = SLOW_S

    def mend() -> None:
        scene.relay.delay_s = 0.0
        until("it follows", has_state(scene.link, source, FOLLOWING))

    scene.link.a.produce(source, BACKLOG)
    until("it is behind", has_state(scene.link, source, CATCHING_UP))
    yield State(CATCHING_UP, scene.link, source, target, scene.groups, mend)
    scene.detach(source)


@contextmanager
def in_sync(scene: Scene) -> Iterator[State]:
    source, target = scene.attach()
    scene.link.wait_end(target, 1)
    scene.set_mode("synchronous")
    until("it is in sync", has_state(scene.link, source, IN_SYNC))
    # Until B was told so itself, its consumers wait: it cannot know what a part of a transaction is.
    until("B knows it, too", lambda: scene.link.follower_state(target) == IN_SYNC)
    yield State(IN_SYNC, scene.link, source, target, scene.groups)
    scene.set_mode("asynchronous")
    scene.detach(source)


@contextmanager
def out_of_sync(scene: Scene) -> Iterator[State]:
    with in_sync(scene) as state:
        scene.relay.cut(refuse=True)
        producer = scene.link.a.producer(acks="all")
        producer.produce(state.source, b"unconfirmed", partition=0)
        until("it is recorded", has_state(scene.link, state.source, OUT_OF_SYNC))
        assert producer.flush(30) == 0

        def mend() -> None:
            scene.relay.mend()
            until("it is in sync again", has_state(scene.link, state.source, IN_SYNC))

        yield State(OUT_OF_SYNC, scene.link, state.source, state.target, scene.groups, mend)


@contextmanager
def syncing(scene: Scene) -> Iterator[State]:
    with in_sync(scene) as other:
        scene.relay.delay_s = SLOW_S
        source, target = scene.attach(lambda source: scene.link.a.produce(source, BACKLOG))
        until("it is syncing", has_state(scene.link, source, SYNCING))
        assert other.source != source

        def mend() -> None:
            scene.relay.delay_s = 0.0
            until("it is in sync", has_state(scene.link, source, IN_SYNC))

        yield State(SYNCING, scene.link, source, target, scene.groups, mend)
        scene.detach(source)


@contextmanager
def disconnected(scene: Scene) -> Iterator[State]:
    """By an operator, for good: each side is on its own."""
    source, target = scene.attach()
    scene.link.wait_end(target, 1)
    scene.detach(source)
    prefix = target.removesuffix("t")
    scene.link.b.proxy.cli("namespace", "alter", prefix, "--no-reserved")
    scene.link.a.proxy.cli("link", "detach", scene.link.name, "--type", "consumer-group", "--local", scene.groups)
    scene.link.b.proxy.cli("namespace", "alter", scene.groups, "--no-reserved", "--type", "consumer-group")
    yield State(DISCONNECTED, scene.link, source, target, scene.groups)


STATES: Final = {
    FOLLOWING: following,
    CATCHING_UP: catching_up,
    IN_SYNC: in_sync,
    OUT_OF_SYNC: out_of_sync,
    SYNCING: syncing,
    DISCONNECTED: disconnected,  # at last: the groups are attached no more
}


@pytest.fixture(scope="module")
def scene(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Scene]:
    with relayed(*kafka_pair) as (link, relay):
        scene = Scene(link, relay)
        groups = ("--type", "consumer-group", "--local", scene.groups, "--remote", scene.groups, "--role", "leader")
        link.a.proxy.cli("link", "attach", link.name, *groups, "--disable-transaction-verification")
        yield scene


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(state, marks=pytest.mark.one_in_ci("stories", of="states of a link", case=state))
        for state in STATES
    ],
)
def state(request: pytest.FixtureRequest, scene: Scene) -> Iterator[State]:
    with STATES[request.param](scene) as state:
        yield state
        if state.later:
            state.mend()
        for check in state.later:
            check()


# ---- clients ----


class Delivery:
    """What became of records: offsets, and errors."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.errors: list[KafkaError] = []

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(error)
        else:
            self.offsets.append(message.offset())


def first_record(servers: str, group: str, topic: str, timeout_s: float) -> Consumer | None:
    """A consumer of this group that has read the topic's first record; None if it got nothing, and no error."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([topic])
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None:
            assert message.error() is None, message.error()
            assert (message.offset(), message.value()) == (0, b"first")
            return consumer
    consumer.close()
    return None


def reads_and_commits(servers: str, group: str, topic: str) -> None:
    consumer = first_record(servers, group, topic, 60)
    assert consumer is not None, "nothing was read"
    try:
        (committed,) = consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
        assert committed.error is None
    finally:
        consumer.close()


# ---- the table ----


def commits_are_in_sync(state: State, group: str) -> bool:
    status = group_status(state.link.a, state.link.name, group)
    return status is not None and status["sync"] is not None and status["sync"]["state"] == IN_SYNC


def test_source_consumers(state: State) -> None:
    """Available, in every state: those in groups of their own, and those in groups that the link leads."""
    reads_and_commits(state.link.a.bootstrap, unique("own-"), state.source)
    group = unique(state.groups)
    reads_and_commits(state.link.a.bootstrap, group, state.source)
    if state.name == IN_SYNC:  # an ack means both sides, once the group's own partition of the offsets topic is In-Sync
        until("its commits are in sync", lambda: commits_are_in_sync(state, group))
        assert offsets(state.link.b, group) == {(state.target, 0): 1}


def test_source_plain_producers(state: State) -> None:
    """Available, in every state (footnote 1). In-Sync, an ack means both sides."""
    deliveries = Delivery()
    producer = state.link.a.producer(acks="all", enable_idempotence=True)
    before = state.link.a.end(state.source)
    for _ in range(5):
        producer.produce(state.source, b"plain", partition=0, on_delivery=deliveries)
        assert producer.flush(20) == 0
        if state.name == IN_SYNC:
            assert state.link.b.end(state.target) > deliveries.offsets[-1]
    assert not deliveries.errors
    assert deliveries.offsets == [before + number for number in range(5)]
    if state.name == OUT_OF_SYNC:
        assert state.link.b.end(state.target) <= before

        def flowed() -> None:
            until("they are there", lambda: state.link.b.end(state.target) >= before + 5)

        state.later.append(flowed)


def test_source_transactional_producers(state: State) -> None:
    """Available in asynchronous mode and while Syncing; consistent while In-Sync or Out-Of-Sync (footnotes 2 to 5)."""
    deliveries = Delivery()
    producer = state.link.a.producer(transactional_id=unique("tx-"), transaction_timeout_ms=120_000)
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(state.source, b"transactional", partition=0, on_delivery=deliveries)
    if state.name == OUT_OF_SYNC:
        assert producer.flush(WAITS_S) == 1, "acked while the other side does not have it"
        with pytest.raises(KafkaException) as waiting:
            producer.commit_transaction(WAITS_S)
        assert waiting.value.args[0].retriable()
        state.later.append(lambda: committed_once(state, producer, deliveries))
    else:
        producer.commit_transaction(60)
        if state.name == IN_SYNC:
            assert state.link.b.end(state.target) > deliveries.offsets[0]
        assert len(deliveries.offsets) == 1


def committed_once(state: State, producer: Producer, deliveries: Delivery) -> None:
    """A transaction that had to wait for the link ends as its producer wanted, and both sides have it once."""
    until("committed", lambda: producer.commit_transaction(10) is None)
    assert (len(deliveries.offsets), deliveries.errors) == (1, [])
    for side, topic in ((state.link.a, state.source), (state.link.b, state.target)):
        until(
            "its records are read",
            lambda side=side, topic=topic: (
                [each.value for each in side.read(topic, isolation="read_committed")].count(b"transactional") == 1
            ),
        )


def test_target_consumers_in_groups_of_their_own(state: State) -> None:
    """Available, but while a synchronous link is Syncing: then they wait (footnote 7)."""
    group = unique("own-")
    if state.name != SYNCING:
        reads_and_commits(state.link.b.bootstrap, group, state.target)
        return
    assert first_record(state.link.b.bootstrap, group, state.target, WAITS_S) is None
    state.later.append(lambda: reads_and_commits(state.link.b.bootstrap, group, state.target))


def test_target_consumers_in_groups_that_follow(state: State) -> None:
    """They read what the others do, and cannot commit until the link is disconnected (footnote 9)."""
    group = unique(state.groups)
    if state.name == DISCONNECTED:
        reads_and_commits(state.link.b.bootstrap, group, state.target)
        return
    consumer = first_record(state.link.b.bootstrap, group, state.target, WAITS_S if state.name == SYNCING else 60)
    assert (consumer is None) == (state.name == SYNCING)
    consumer = consumer or Consumer({"bootstrap.servers": state.link.b.bootstrap, "group.id": group})
    try:
        with pytest.raises(KafkaException) as refused:
            consumer.commit(offsets=[TopicPartition(state.target, 0, 1)], asynchronous=False)
        assert refused.value.args[0].code() == NOT_ALLOWED
    finally:
        consumer.close()


def test_target_producers(state: State) -> None:
    """They fail until the link is disconnected (footnote 10)."""
    deliveries = Delivery()
    producer = state.link.b.producer(acks="all")
    producer.produce(state.target, b"not of the source", partition=0, on_delivery=deliveries)
    assert producer.flush(30) == 0
    if state.name == DISCONNECTED:
        assert len(deliveries.offsets) == 1
    else:
        assert [error.code() for error in deliveries.errors] == [KafkaError.INVALID_REQUEST]


def test_what_is_said_of_it(state: State) -> None:
    """Both sides name the state, and since when the other was not heard of."""
    if state.name == DISCONNECTED:
        with pytest.raises(ProxyFailed):
            state.link.a.proxy.cli("link", "detach", state.link.name, "--local", state.source.removesuffix("t"))
        return
    assert partition_states(state.link, state.source) == {state.name}
    told: dict[str, Any] = state.link.b.link(state.link.name)
    assert told["mode"] == ("synchronous" if state.synchronous else "asynchronous")
    assert told["last_heard_seconds"] is not None
