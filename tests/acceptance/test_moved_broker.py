"""User story: a broker gets another address and keeps its id. Clients and links see nothing of that."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final, Self

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition
from support.kafka import unique
from support.links import Side, relayed, until
from support.runbooks import Kill, Runbook, Victim

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

PARTITIONS: Final = 4
MOVED: Final = 2
EVERY_S: Final = 0.02


class Application:
    """One producer and one consumer of a topic of A, which run from the beginning to the end of the block."""

    def __init__(self, side: Side, topic: str) -> None:
        self.sent = 0
        self.acked = 0
        self.read: list[bytes] = []
        self.errors: list[KafkaError] = []
        self._side = side
        self._topic = topic
        self._ended, self._all_read = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._produce, self._consume)]

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if error is not None:
            self._all_read.set()
        for each in self._threads:
            each.join(90)

    def goes_on(self) -> None:
        """Wait until what is sent from now on is acked and read, in all partitions."""
        sent = self.sent
        until("it goes on", lambda: min(self.acked, len(self.read)) > sent + 2 * PARTITIONS)

    def _produce(self) -> None:
        producer = self._side.producer(enable_idempotence=True)

        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is None:
                self.acked += 1
            else:
                self.errors.append(error)

        while not self._ended.wait(EVERY_S):
            producer.produce(self._topic, b"%d" % self.sent, partition=self.sent % PARTITIONS, on_delivery=delivered)
            self.sent += 1
            producer.poll(0)
        producer.flush(60)
        until("all is read", lambda: len(self.read) >= self.acked or self._all_read.is_set())
        self._all_read.set()

    def _consume(self) -> None:
        settings = {"bootstrap.servers": self._side.bootstrap, "group.id": unique("app-"), "enable.auto.commit": False}
        consumer = Consumer(settings)
        consumer.assign([TopicPartition(self._topic, each, OFFSET_BEGINNING) for each in range(PARTITIONS)])
        while not self._all_read.is_set():
            message = consumer.poll(0.1)
            if message is None:
                continue
            if message.error() is None:
                self.read.append(message.value())
            else:
                self.errors.append(message.error())
        consumer.close()


@pytest.mark.parametrize(
    "victim",
    [pytest.param(each, id=str(each), marks=pytest.mark.one_in_ci("stories", of="a moved broker")) for each in Victim],
)
def test_clients_and_links_go_on(kafka: KafkaCluster, victim: Victim) -> None:
    """The broker is killed, or stopped, and a proxy is killed or the link is cut while it is away."""
    with (
        KafkaCluster(name="moved", brokers=2) as moved,
        relayed(moved, kafka) as (link, relay),
        Runbook("moved-broker", link, relay, {}, Kill(victim, 0, 0), {"Following"}) as book,
    ):
        link.attach()
        source, target = link.names("t")
        link.a.create_topic(source, PARTITIONS)
        link.wait_following()
        before = served(link.a)
        with Application(link.a, source) as application:
            application.goes_on()
            book.step("Stop the broker")
            if victim is Victim.BROKER:
                moved.kill(MOVED)
            else:
                moved.stop_broker(MOVED)
            former = moved.addresses()[MOVED]
            if victim is Victim.PROXY:
                link.a.proxy.kill()
                link.a.proxy.start()
            elif victim is Victim.LINK:
                relay.cut()
            book.step("Start it at its new address")
            moved.move_broker(MOVED)
            assert moved.addresses()[MOVED] != former
            book.step("See that the proxy serves it")
            application.goes_on()
        assert served(link.a) == before, "clients see the same addresses"
        assert not application.errors
        assert application.acked == application.sent
        assert sorted(map(int, application.read)) == list(range(application.sent))
        for partition in range(PARTITIONS):
            link.wait_end(target, link.a.end(source, partition), partition)
            assert link.b.read(target, partition) == link.a.read(source, partition)


def served(side: Side) -> dict[int, tuple[str, int]]:
    """The brokers' addresses as clients of the proxy see them, by id."""
    found = side.admin().list_topics(timeout=20).brokers
    return {broker_id: (each.host, each.port) for broker_id, each in found.items()}
