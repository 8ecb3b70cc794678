"""aiokafka through the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import UnknownTopicOrPartitionError
from support.kafka import unique
from support.proxies import Proxied

pytestmark = pytest.mark.brokers

CODECS = (None, "gzip", "snappy", "lz4", "zstd")


@asynccontextmanager
async def administrator(proxied: Proxied) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=proxied.bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def create_topic(proxied: Proxied, partitions: int = 1) -> str:
    topic = unique("topic-")
    async with administrator(proxied) as admin:
        answer = await admin.create_topics([NewTopic(topic, partitions, 1)])
        assert [error[1] for error in answer.topic_errors] == [0]
    return topic


@asynccontextmanager
async def producer_of(proxied: Proxied, **settings: Any) -> AsyncIterator[AIOKafkaProducer]:
    async with AIOKafkaProducer(bootstrap_servers=proxied.bootstrap, **settings) as producer:
        yield producer


@asynccontextmanager
async def consumer_of(proxied: Proxied, topic: str, **settings: Any) -> AsyncIterator[AIOKafkaConsumer]:
    chosen = {"group_id": unique("group-"), "auto_offset_reset": "earliest", "enable_auto_commit": False} | settings
    async with AIOKafkaConsumer(topic, bootstrap_servers=proxied.bootstrap, **chosen) as consumer:
        yield consumer


async def take(consumer: AIOKafkaConsumer, count: int) -> list[ConsumerRecord]:
    records: list[ConsumerRecord] = []
    async with asyncio.timeout(30):
        while len(records) < count:
            found = await consumer.getmany(timeout_ms=1000, max_records=count - len(records))
            records += [record for partition in found.values() for record in partition]
    return records


def test_idempotent_producer_and_every_codec(proxied_of_each_version: Proxied) -> None:
    proxied = proxied_of_each_version

    async def scenario() -> None:
        topic = await create_topic(proxied)
        for codec in CODECS:
            async with producer_of(proxied, enable_idempotence=True, compression_type=codec) as producer:
                sent = [
                    await producer.send(topic, str(codec).encode() * 100, key=b"k", headers=[("codec", b"h")])
                    for _ in range(20)
                ]
                await asyncio.gather(*sent)
        async with consumer_of(proxied, topic) as consumer:
            records = await take(consumer, 100)
        assert [record.offset for record in records] == list(range(100))
        assert [record.value for record in records] == [str(c).encode() * 100 for c in CODECS for _ in range(20)]
        assert records[-1].headers == (("codec", b"h"),)

    asyncio.run(scenario())


def test_transactions_with_offsets_of_a_group(proxied_of_each_version: Proxied) -> None:
    proxied = proxied_of_each_version

    async def scenario() -> None:
        source, target, group = await create_topic(proxied), await create_topic(proxied), unique("group-")
        async with producer_of(proxied) as feeder:
            for number in range(10):
                await feeder.send_and_wait(source, str(number).encode())
        partition = TopicPartition(source, 0)
        async with (
            consumer_of(proxied, source, group_id=group) as consumer,
            producer_of(proxied, transactional_id=unique("txn-")) as producer,
        ):
            for abort in (True, False):
                await consumer.seek_to_beginning(partition)
                records = await take(consumer, 10)
                await producer.begin_transaction()
                for record in records:
                    await producer.send(target, record.value)
                await producer.send_offsets_to_transaction({partition: records[-1].offset + 1}, group)
                if abort:
                    await producer.abort_transaction()
                    assert await consumer.committed(partition) is None
                else:
                    await producer.commit_transaction()
                    async with asyncio.timeout(10):  # the answer to EndTxn comes before the markers are written
                        while await consumer.committed(partition) != 10:  # noqa: ASYNC110
                            await asyncio.sleep(0.02)
        async with consumer_of(proxied, target, isolation_level="read_committed") as reader:
            assert [int(record.value) for record in await take(reader, 10)] == list(range(10))

    asyncio.run(scenario())


def test_group_rebalances(proxied_of_clients: Proxied) -> None:
    async def scenario() -> None:
        topic, group = await create_topic(proxied_of_clients, 6), unique("group-")
        settings = {"group_id": group, "heartbeat_interval_ms": 200, "session_timeout_ms": 6000}

        async def assigned(consumer: AIOKafkaConsumer, count: int) -> None:
            async with asyncio.timeout(30):
                while len(consumer.assignment()) != count:  # noqa: ASYNC110 - aiokafka tells it to listeners only
                    await asyncio.sleep(0.05)

        async with consumer_of(proxied_of_clients, topic, **settings) as staying:
            await assigned(staying, 6)
            async with consumer_of(proxied_of_clients, topic, **settings) as leaving:
                await asyncio.gather(assigned(staying, 3), assigned(leaving, 3))
            await assigned(staying, 6)
            async with producer_of(proxied_of_clients, acks="all") as producer:
                for number in range(30):
                    await producer.send_and_wait(topic, str(number).encode(), partition=number % 6)
            assert sorted(int(record.value) for record in await take(staying, 30)) == list(range(30))
            await staying.commit()

    asyncio.run(scenario())


def test_administration(proxied_of_clients: Proxied) -> None:
    async def scenario() -> None:
        topic = await create_topic(proxied_of_clients, 2)
        own_ports = {port for _, port in proxied_of_clients.kafka.addresses().values()}
        async with administrator(proxied_of_clients) as admin:
            cluster = await admin.describe_cluster()
            assert {broker["node_id"] for broker in cluster["brokers"]} == {1, 2, 3}
            assert not own_ports & {broker["port"] for broker in cluster["brokers"]}
            await admin.create_partitions({topic: NewPartitions(4)})
            await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"retention.ms": "7200000"})])
            async with asyncio.timeout(20):  # any broker answers, and hears of it in its time
                values, partitions = {}, []
                while values.get("retention.ms") != "7200000" or len(partitions) != 4:
                    [described] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
                    values = {entry[0]: entry[1] for entry in described.resources[0][4]}
                    [found] = await admin.describe_topics([topic])
                    partitions = found["partitions"]
            async with consumer_of(proxied_of_clients, topic, group_id=(group := unique("group-"))) as consumer:
                await consumer.seek_to_beginning()
                assert group in {listed[0] for listed in await admin.list_consumer_groups()}
                await admin.describe_consumer_groups([group])
            await admin.delete_topics([topic])
            async with asyncio.timeout(20):
                gone: dict[str, Any] = {}
                while gone.get("error_code") != UnknownTopicOrPartitionError.errno:
                    [gone] = await admin.describe_topics([topic])

    asyncio.run(scenario())
