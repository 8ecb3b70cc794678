"""Real clients of a real broker whose answers wait at gates: nothing changes for them but the time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import pytest
import uvloop
from confluent_kafka import Consumer as RdConsumer
from confluent_kafka import KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec
from support.kafka import unique
from support.links import until

from isthmus.session.dispatch import compile_routes
from isthmus.session.endpoint import Endpoint
from isthmus.session.listener import Gateway, Limits, Listener
from isthmus_bench.kafka import KafkaCluster
from isthmus_plugins.api import Gate, Replace, RequestHook
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

RECORDS = 200
GATE_MAX_S = 0.04


class _Late:
    """Opens the gate of each Produce answer after a while of its own, so that they open out of order."""

    def __init__(self) -> None:
        self.opened = 0
        self._random = random.Random(1)

    def answered(self, frame: bytes) -> Gate:
        gate = Gate()
        asyncio.get_running_loop().call_later(self._random.uniform(0, GATE_MAX_S), self._open, gate, frame)
        return gate

    def _open(self, gate: Gate, frame: bytes) -> None:
        self.opened += 1
        gate.open(frame)

    def hook(self) -> RequestHook:
        return RequestHook(ApiKey.PRODUCE, lambda request: Replace(request.frame, self.answered), whole=True)


@contextlib.asynccontextmanager
async def gated(kafka: KafkaCluster, late: _Late) -> AsyncIterator[tuple[Gateway, str]]:
    """A proxy's listener in front of the only broker, and its address."""
    host, _, port = kafka.bootstrap_servers.rpartition(":")
    listening: list[int] = []
    gateway = Gateway(compile_routes([late.hook()], lambda *_: (b"127.0.0.1", listening[0])), Limits(), Supervision())
    listener = Listener(gateway, 1, Endpoint("127.0.0.1", 0), lambda: [Endpoint(host, int(port))])
    await listener.start()
    listening.append(listener.bind.port)
    await listener.accept()
    try:
        yield gateway, str(listener.bind)
    finally:
        await listener.stop()
        await gateway.drain(5)


def _produce(bootstrap: str, topic: str, transactional_id: str | None) -> tuple[list[int], float]:
    """The offsets of records, one a request, in the order of their acks, and how long all took, in seconds."""
    settings: dict[str, str | int | bool] = {
        "bootstrap.servers": bootstrap,
        "enable.idempotence": True,
        "linger.ms": 0,
        "batch.num.messages": 1,
    }
    if transactional_id is not None:
        settings["transactional.id"] = transactional_id
    producer = Producer(settings)
    offsets: list[int] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        offset = message.offset()
        assert offset is not None
        offsets.append(offset)

    if transactional_id is not None:
        producer.init_transactions(30)
        producer.begin_transaction()
    started = time.monotonic()
    for number in range(RECORDS):
        producer.produce(topic, str(number).encode(), on_delivery=delivered)
    assert producer.flush(30) == 0
    took = time.monotonic() - started
    if transactional_id is not None:
        producer.commit_transaction(30)
    return offsets, took


def _topic(kafka: KafkaCluster) -> str:
    """A topic that has a leader: one that is made by its first record has that sent again until it has one."""
    topic, admin = unique("gated-"), AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    place = TopicPartition(topic, 0)
    until("it is led", lambda: admin.list_offsets({place: OffsetSpec.latest()})[place].result(10))
    return topic


def _stored(kafka: KafkaCluster, topic: str) -> list[bytes]:
    consumer = RdConsumer(
        {"bootstrap.servers": kafka.bootstrap_servers, "group.id": unique("g-"), "enable.partition.eof": True}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    stored: list[bytes] = []
    while (message := consumer.poll(20)) is not None and message.error() is None:
        value = message.value()
        assert isinstance(value, bytes)
        stored.append(value)
    consumer.close()
    return stored


@pytest.mark.parametrize("transactional", [False, True])
def test_a_producer_with_several_requests_in_flight_is_answered_in_order_and_does_not_wait_for_each_gate(
    kafka: KafkaCluster, transactional: bool
) -> None:
    topic = _topic(kafka)

    async def main() -> None:
        late = _Late()
        async with gated(kafka, late) as (gateway, bootstrap):
            produced = asyncio.to_thread(_produce, bootstrap, topic, unique("t-") if transactional else None)
            offsets, took = await produced
            assert offsets == list(range(RECORDS))
            assert late.opened == gateway.gates.time.total == RECORDS
            assert gateway.gates.waiting == 0
            assert took < gateway.gates.time.seconds_sum, "gates of one connection are waited for together"
        assert gateway.closed_by_cause.keys() <= {"client closed", "drained"}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert _stored(kafka, topic) == [str(number).encode() for number in range(RECORDS)]
