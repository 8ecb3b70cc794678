"""A link under real faults: processes killed and stopped, brokers killed and stopped, connections cut in mid-frame.

While an idempotent and a plain producer write through the source's proxy. At the end the follower is equal, and has
every acknowledged record, once, at the offset that its producer was told.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import pytest
from confluent_kafka import KafkaError, Message, Producer
from support.kafka import unique
from support.links import Linked, Side, relayed, until
from support.relay import Relay

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(180)]

PARTITIONS: Final = 3
RATE: Final = 300
"""Records a second of each producer."""
REPLICATED: Final = {"min.insync.replicas": "2"}


class Writers:
    """An idempotent and a plain producer, writing until the block ends; then everything is flushed."""

    def __init__(self, side: Side, topic: str) -> None:
        self._topic = topic
        self.acked: dict[tuple[int, int], bytes] = {}
        self.sent: Counter[str] = Counter()
        self.refused: list[KafkaError] = []
        self._stop = threading.Event()
        common = {"message.timeout.ms": 120_000, "compression.type": "lz4", "batch.num.messages": 50}
        settings = ({"enable.idempotence": True}, {"enable.idempotence": False, "acks": "all"})
        self._threads = [
            threading.Thread(target=self._write, args=(kind, side.producer(**{**common, **more})), daemon=True)
            for kind, more in zip(("idempotent", "plain"), settings, strict=True)
        ]

    def _write(self, kind: str, producer: Producer) -> None:
        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self.refused.append(error)
            else:
                self.acked[message.partition(), message.offset()] = message.value()

        while not self._stop.is_set():
            number = self.sent[kind]
            producer.produce(self._topic, f"{kind}-{number}", partition=number % PARTITIONS, on_delivery=delivered)
            self.sent[kind] += 1
            producer.poll(1 / RATE)
        producer.flush(120)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until("the producers write", lambda: len(self.acked) > 50)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)
        assert error is not None or not any(thread.is_alive() for thread in self._threads)


class Scene:
    """Three brokers that lead, one that follows, a proxy each, a relay between the proxies."""

    def __init__(self, pair: Linked, relay: Relay) -> None:
        self.pair = pair
        self.relay = relay


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Clusters of this module's own: their brokers are killed."""
    with ExitStack() as stack:
        a = stack.enter_context(KafkaCluster(name="faults-a", brokers=3))
        b = stack.enter_context(KafkaCluster(name="faults-b"))
        pair, relay = stack.enter_context(relayed(a, b))
        pair.attach()
        yield Scene(pair, relay)


def leader(pair: Linked, topic: str) -> int:
    return int(pair.a.admin(direct=True).list_topics(topic, timeout=20).topics[topic].partitions[0].leader)


def kill_source_proxy(scene: Scene, topic: str) -> None:
    scene.pair.a.proxy.kill()
    scene.pair.a.proxy.start()


def kill_target_proxy(scene: Scene, topic: str) -> None:
    scene.pair.b.proxy.kill()
    scene.pair.b.proxy.start()


def kill_both_proxies(scene: Scene, topic: str) -> None:
    proxies = (scene.pair.a.proxy, scene.pair.b.proxy)
    for proxy in proxies:
        proxy.kill()
    for proxy in proxies:
        proxy.spawn()
    for proxy in proxies:
        proxy.wait_ready()


def kill_source_broker(scene: Scene, topic: str) -> None:
    broker = leader(scene.pair, topic)
    scene.pair.a.kafka.kill(broker)
    time.sleep(1)
    scene.pair.a.kafka.start_broker(broker)


def kill_target_broker(scene: Scene, topic: str) -> None:
    scene.pair.b.kafka.kill(1)
    scene.pair.b.kafka.start_broker(1)


def stop_source_proxy(scene: Scene, topic: str) -> None:
    scene.pair.a.proxy.pause()
    time.sleep(5)  # longer than its lease
    scene.pair.a.proxy.resume()


def stop_target_proxy(scene: Scene, topic: str) -> None:
    """For so long that the source takes it for dead."""
    scene.pair.b.proxy.pause()
    try:
        until(
            "the source notices",
            lambda: scene.pair.a.link(scene.pair.name)["reason"] in ("PEER_SILENT", "TIMEOUT_ERROR"),
            30,
        )
    finally:
        scene.pair.b.proxy.resume()


def stop_source_broker(scene: Scene, topic: str) -> None:
    broker = leader(scene.pair, topic)
    scene.pair.a.kafka.pause(broker)
    time.sleep(4)
    scene.pair.a.kafka.resume(broker)


def stop_target_broker(scene: Scene, topic: str) -> None:
    scene.pair.b.kafka.pause(1)
    time.sleep(4)
    scene.pair.b.kafka.resume(1)


def cut_connections(scene: Scene, topic: str) -> None:
    """At any byte, also while the handshake is under way or streams are opened."""
    rng = random.Random(topic)
    for _ in range(12):
        before = scene.relay.accepted
        scene.relay.cut_after(rng.choice((1, 100, 1000, 5000, 20_000)))
        until("the link connects again", lambda before=before: scene.relay.accepted > before, 20)
        time.sleep(rng.choice((0.0, 0.1, 0.7)))


Fault = Callable[[Scene, str], None]


@pytest.mark.one_in_ci("stories", of="faults of records")
@pytest.mark.parametrize(
    "fault",
    [
        kill_source_proxy,
        kill_target_proxy,
        kill_both_proxies,
        kill_source_broker,
        kill_target_broker,
        stop_source_proxy,
        stop_target_proxy,
        stop_source_broker,
        stop_target_broker,
        cut_connections,
    ],
    ids=lambda fault: fault.__name__,
)
def test_every_acked_record_once_at_its_offset(scene: Scene, fault: Fault) -> None:
    pair = scene.pair
    name = unique(fault.__name__.replace("_", "-"))
    topic, follower = pair.local + name, pair.remote + name
    pair.a.create_topic(topic, PARTITIONS, REPLICATED, direct=True, replicas=3)
    with Writers(pair.a, topic) as writers:
        fault(scene, topic)
        time.sleep(0.5)
    assert not writers.refused
    for partition in range(PARTITIONS):
        pair.wait_end(follower, pair.a.end(topic, partition), partition)
    pair.wait_following()

    values: Counter[bytes] = Counter()
    for partition in range(PARTITIONS):
        theirs, ours = pair.a.read(topic, partition, direct=True), pair.b.read(follower, partition, direct=True)
        assert ours == theirs
        by_offset = {record.offset: record.value for record in ours}
        told = {offset: value for (index, offset), value in writers.acked.items() if index == partition}
        assert told.items() <= by_offset.items()
        values.update(record.value for record in ours if record.value is not None)
    for number in range(writers.sent["idempotent"]):
        assert values[b"idempotent-%d" % number] == 1
    report = pair.verify()
    assert report["equal"], [each for each in report["partitions"] if not each["equal"]]
    pair.a.delete_topic(topic, direct=True)
    pair.b.delete_topic(follower, direct=True)
