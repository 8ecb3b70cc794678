"""Quotas of brokers, by client id, pass through the proxy: clients write and read more slowly, and all of it, once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, Producer
from kafka import KafkaConsumer, KafkaProducer
from support.kafka import unique
from support.proxies import Proxied

pytestmark = [pytest.mark.brokers, pytest.mark.suite("clients"), pytest.mark.timeout(240)]

CLIENT: Final = "throttled"
BYTES_PER_S: Final = 20_000
COUNT: Final = 60
RECORD_BYTES: Final = 5_000
THROTTLED_S_MIN: Final = 3.0
"""Brokers look at ten seconds: 300 KB in less are 30 KB a second, so one waits five."""
BATCH_BYTES: Final = 16_384
"""As others have it: a batch of more than ten seconds' quota is never read, at a broker either (with librdkafka)."""
WAIT_S: Final = 90


def value_of(number: int) -> bytes:
    return b"%d" % number + bytes(RECORD_BYTES)


def java_writes(proxied: Proxied, topic: str) -> None:
    settings = f"bootstrap.servers={proxied.bootstrap}", f"client.id={CLIENT}"
    sized = "--num-records", str(COUNT), "--record-size", str(RECORD_BYTES), "--throughput", "-1"
    proxied.kafka.tool("kafka-producer-perf-test", "--topic", topic, *sized, "--producer-props", *settings)


def java_reads(proxied: Proxied, topic: str) -> int:
    option = "--command-property" if proxied.kafka.version >= "4.2" else "--consumer-property"
    read = ("--topic", topic, "--from-beginning", "--max-messages", str(COUNT), "--timeout-ms", "60000")
    return len(proxied.tool("kafka-console-consumer", *read, option, f"client.id={CLIENT}").splitlines())


def librdkafka_writes(proxied: Proxied, topic: str) -> None:
    producer = Producer({**proxied.librdkafka, "client.id": CLIENT, "batch.size": BATCH_BYTES})
    for number in range(COUNT):
        producer.produce(topic, value_of(number))
    assert producer.flush(WAIT_S) == 0


def librdkafka_reads(proxied: Proxied, topic: str) -> int:
    settings = {"client.id": CLIENT, "group.id": unique("group-"), "auto.offset.reset": "earliest"}
    consumer = Consumer({**proxied.librdkafka, **settings})
    consumer.subscribe([topic])
    found: set[int] = set()
    ends = time.monotonic() + WAIT_S
    while len(found) < COUNT and time.monotonic() < ends:
        message = consumer.poll(1)
        if message is not None and message.error() is None:
            offset = message.offset()
            assert offset is not None
            found.add(offset)
    consumer.close()
    return len(found)


def aiokafka_writes(proxied: Proxied, topic: str) -> None:
    async def run() -> None:
        async with AIOKafkaProducer(bootstrap_servers=proxied.bootstrap, client_id=CLIENT) as producer:
            sent = [await producer.send(topic, value_of(number)) for number in range(COUNT)]
            await asyncio.wait_for(asyncio.gather(*sent), WAIT_S)

    asyncio.run(run())


def aiokafka_reads(proxied: Proxied, topic: str) -> int:
    async def run() -> int:
        settings = {"client_id": CLIENT, "auto_offset_reset": "earliest"}
        async with (
            AIOKafkaConsumer(topic, bootstrap_servers=proxied.bootstrap, **settings) as consumer,
            asyncio.timeout(WAIT_S),
        ):
            return len({(await consumer.getone()).offset for _ in range(COUNT)})

    return asyncio.run(run())


def kafka_python_writes(proxied: Proxied, topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=proxied.bootstrap, client_id=CLIENT)
    sent = [producer.send(topic, value_of(number)) for number in range(COUNT)]
    producer.flush(WAIT_S)
    assert all(each.succeeded() for each in sent)
    producer.close()


def kafka_python_reads(proxied: Proxied, topic: str) -> int:
    settings = {"client_id": CLIENT, "auto_offset_reset": "earliest", "consumer_timeout_ms": 60_000}
    consumer = KafkaConsumer(topic, bootstrap_servers=proxied.bootstrap, **settings)
    found = len({next(consumer).offset for _ in range(COUNT)})
    consumer.close()
    return found


Client = tuple[Callable[[Proxied, str], None], Callable[[Proxied, str], int]]
CLIENTS: Final[dict[str, Client]] = {
    "java": (java_writes, java_reads),
    "librdkafka": (librdkafka_writes, librdkafka_reads),
    "aiokafka": (aiokafka_writes, aiokafka_reads),
    "kafka-python": (kafka_python_writes, kafka_python_reads),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_who_is_throttled_goes_on(proxied: Proxied, client: str) -> None:
    writes, reads = CLIENTS[client]
    topic = unique("throttled-")
    proxied.tool("kafka-topics", "--create", "--topic", topic)
    quota = "--alter", "--entity-type", "clients", "--entity-name", CLIENT
    rates = "producer_byte_rate", "consumer_byte_rate"
    proxied.tool("kafka-configs", *quota, "--add-config", ",".join(f"{rate}={BYTES_PER_S}" for rate in rates))
    try:
        began = time.monotonic()
        writes(proxied, topic)
        assert reads(proxied, topic) == COUNT
        assert time.monotonic() - began > THROTTLED_S_MIN
    finally:
        proxied.tool("kafka-configs", *quota, "--delete-config", ",".join(rates))
    ends = proxied.tool("kafka-get-offsets", "--topic", topic)
    assert ends.strip().endswith(f":{COUNT}"), "each once"
