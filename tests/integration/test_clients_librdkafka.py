"""confluent-kafka (librdkafka) through the proxy: it must notice nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from support.kafka import NOW_MS, unique
from support.proxies import Proxied
from support.wire import Wire

from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def create_topic(proxied: Proxied, partitions: int = 1, **more: int) -> str:
    topic = unique("topic-")
    admin = AdminClient(proxied.librdkafka)  # lives until it is answered
    admin.create_topics([NewTopic(topic, partitions, **more)])[topic].result(30)
    eventually(lambda: all(knows(address, topic) for address in proxied.kafka.bootstrap_servers.split(",")))
    return topic


def knows(address: str, topic: str) -> bool:
    """Whether a broker has heard of a topic: what clients ask of one that has not is answered with an error."""
    with Wire(address) as wire:
        answer = wire.request(ApiKey.METADATA, 12, {"topics": [{"name": topic}], "allow_auto_topic_creation": False})
    return not answer.topics[0].error_code


@contextmanager
def subscribed(proxied: Proxied, topic: str, **settings: str) -> Iterator[Consumer]:
    chosen = {key.replace("_", "."): value for key, value in settings.items()}
    defaults = {"group.id": unique("group-"), "auto.offset.reset": "earliest", "enable.auto.commit": "false"}
    consumer = Consumer(proxied.librdkafka | defaults | chosen)
    consumer.subscribe([topic])
    try:
        yield consumer
    finally:
        consumer.close()


def eventually(condition: Callable[[], bool]) -> None:
    """Any broker may answer, and each hears of a change in its time."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def take(consumer: Consumer, count: int) -> list[Message]:
    """The next ``count`` messages."""
    messages: list[Message] = []
    while len(messages) < count:
        found = consumer.consume(count - len(messages), timeout=20)
        assert found, f"{len(messages)} of {count} messages came"
        for message in found:
            assert message.error() is None, message.error()
        messages += found
    return messages


def consume(proxied: Proxied, topic: str, count: int, **settings: str) -> list[Message]:
    with subscribed(proxied, topic, **settings) as consumer:
        return take(consumer, count)


def test_idempotent_producer_and_every_codec(proxied_of_each_version: Proxied) -> None:
    topic = create_topic(proxied_of_each_version)
    for codec in CODECS:
        producer = Producer(
            proxied_of_each_version.librdkafka | {"enable.idempotence": True, "compression.type": codec, "linger.ms": 5}
        )
        for number in range(50):
            producer.produce(
                topic,
                key=str(number),
                value=codec.encode() * 100,
                headers={"codec": codec, "none": None},
                timestamp=NOW_MS + number,
            )
        assert producer.flush(30) == 0
    messages = consume(proxied_of_each_version, topic, 250)
    assert [message.offset() for message in messages] == list(range(250))
    assert [message.value() for message in messages] == [c.encode() * 100 for c in CODECS for _ in range(50)]
    assert [message.key() for message in messages[:50]] == [str(number).encode() for number in range(50)]
    assert messages[60].headers() == [("codec", b"gzip"), ("none", None)]
    assert messages[60].timestamp()[1] == NOW_MS + 10


def test_producer_that_asks_for_no_answer(proxied: Proxied) -> None:
    topic = create_topic(proxied)
    producer = Producer(proxied.librdkafka | {"acks": 0, "linger.ms": 0})
    for number in range(200):
        producer.produce(topic, str(number))
        producer.poll(0)
    assert producer.flush(30) == 0
    assert [int(message.value()) for message in consume(proxied, topic, 200)] == list(range(200))


def test_large_messages(proxied: Proxied) -> None:
    topic = create_topic(proxied)
    producer = Producer(proxied.librdkafka | {"acks": "all", "message.max.bytes": 1_000_000})
    values = [bytes([65 + number]) * 900_000 for number in range(12)]
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(60) == 0
    assert [message.value() for message in consume(proxied, topic, 12)] == values


def test_transactions(proxied_of_each_version: Proxied) -> None:
    """Consume, transform, produce: outputs and the group's offsets appear with the commit, or not at all."""
    proxied = proxied_of_each_version
    source, target, group = create_topic(proxied), create_topic(proxied, 2), unique("group-")
    feeder = Producer(proxied.librdkafka)
    for number in range(20):
        feeder.produce(source, str(number))
    assert feeder.flush(30) == 0
    producer = Producer(proxied.librdkafka | {"transactional.id": unique("txn-"), "transaction.timeout.ms": 20_000})
    producer.init_transactions(30)

    def transform(consumer: Consumer, end: Callable[[float], None]) -> None:
        producer.begin_transaction()
        for message in take(consumer, 10):
            producer.produce(target, message.value(), partition=int(message.value()) % 2)
        positions = consumer.position(consumer.assignment())
        producer.flush(30)  # an abort drops what was not sent
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 30)
        end(30)

    with subscribed(proxied, source, group_id=group) as consumer:
        transform(consumer, producer.commit_transaction)
        transform(consumer, producer.abort_transaction)
        [committed] = consumer.committed([TopicPartition(source, 0)], 10)
        assert committed.offset == 10
    with subscribed(proxied, source, group_id=group) as consumer:  # the aborted ones again
        transform(consumer, producer.commit_transaction)
    values = [int(message.value()) for message in consume(proxied, target, 20, isolation_level="read_committed")]
    assert sorted(values) == list(range(20))
    everything = consume(proxied, target, 30, isolation_level="read_uncommitted")
    assert len(everything) == 30


def test_a_producer_is_fenced_by_its_successor(proxied: Proxied) -> None:
    topic = create_topic(proxied)
    settings = proxied.librdkafka | {"transactional.id": unique("txn-")}
    first, second = Producer(settings), Producer(settings)
    first.init_transactions(30)
    first.begin_transaction()
    first.produce(topic, "lost")
    first.flush(30)
    second.init_transactions(30)
    with pytest.raises(KafkaException) as fenced:
        first.commit_transaction(30)
    assert fenced.value.args[0].code() in (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
    second.begin_transaction()
    second.produce(topic, "kept")
    second.commit_transaction(30)
    assert [m.value() for m in consume(proxied, topic, 1, isolation_level="read_committed")] == [b"kept"]


@pytest.mark.one_in_ci("clients")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_group_rebalances(proxied_of_clients: Proxied, protocol: str) -> None:
    """Two members share the partitions; the one that stays takes over all, and nothing is read twice."""
    topic, group = create_topic(proxied_of_clients, 6), unique("group-")
    settings = {"group_id": group, "group_protocol": protocol}
    if protocol == "classic":
        settings |= {"session_timeout_ms": "6000", "heartbeat_interval_ms": "200"}
    producer = Producer(proxied_of_clients.librdkafka | {"acks": "all"})
    seen: list[int] = []

    def feed(first: int) -> None:
        for number in range(first, first + 60):
            producer.produce(topic, str(number), partition=number % 6)
        assert producer.flush(30) == 0

    def read_until(done: Callable[[], bool], *consumers: Consumer) -> None:
        deadline = time.monotonic() + 45
        while not done():
            assert time.monotonic() < deadline, [consumer.assignment() for consumer in consumers]
            for consumer in consumers:
                for message in consumer.consume(20, timeout=0.1):
                    assert message.error() is None, message.error()
                    seen.append(int(message.value()))
                    consumer.commit(message, asynchronous=False)

    with subscribed(proxied_of_clients, topic, **settings) as staying:
        feed(0)
        read_until(lambda: len(seen) == 60, staying)
        with subscribed(proxied_of_clients, topic, **settings) as leaving:
            read_until(lambda: len(leaving.assignment()) == len(staying.assignment()) == 3, staying, leaving)
            feed(60)
            read_until(lambda: len(seen) == 120, staying, leaving)
        read_until(lambda: len(staying.assignment()) == 6, staying)
        feed(120)
        read_until(lambda: len(seen) == 180, staying)
    assert sorted(seen) == list(range(180))


def test_administration(proxied_of_clients: Proxied) -> None:
    admin = AdminClient(proxied_of_clients.librdkafka)
    topic, group = create_topic(proxied_of_clients, 2, replication_factor=3), unique("group-")

    cluster = admin.describe_cluster().result(30)
    own_ports = {port for _, port in proxied_of_clients.kafka.addresses().values()}
    assert cluster.cluster_id == proxied_of_clients.kafka.cluster_id
    assert {node.id for node in cluster.nodes} == {1, 2, 3}
    assert not own_ports & {node.port for node in cluster.nodes}
    eventually(lambda: topic in admin.list_topics(timeout=30).topics)

    admin.create_partitions([NewPartitions(topic, 4)])[topic].result(30)
    resource = ConfigResource(ResourceType.TOPIC, topic)
    resource.add_incremental_config(ConfigEntry("retention.ms", "7200000", incremental_operation=AlterConfigOpType.SET))
    admin.incremental_alter_configs([resource])[resource].result(30)
    resource = ConfigResource(ResourceType.TOPIC, topic)
    eventually(lambda: admin.describe_configs([resource])[resource].result(30)["retention.ms"].value == "7200000")
    broker = ConfigResource(ResourceType.BROKER, "2")
    assert admin.describe_configs([broker])[broker].result(30)["node.id"].value == "2"

    producer = Producer(proxied_of_clients.librdkafka)
    for number in range(40):
        producer.produce(topic, str(number), partition=number % 4)
    assert producer.flush(30) == 0
    with subscribed(proxied_of_clients, topic, group_id=group) as consumer:
        take(consumer, 40)
        consumer.commit(asynchronous=False)
        described = admin.describe_consumer_groups([group])[group].result(30)
        assert (described.state.name, len(described.members)) == ("STABLE", 1)
        assert described.coordinator.port not in own_ports
    assert group in {listed.group_id for listed in admin.list_consumer_groups().result(30).valid}

    first = TopicPartition(topic, 0)
    assert admin.list_offsets({first: OffsetSpec.latest()})[first].result(30).offset == 10
    deleted = admin.delete_records([TopicPartition(topic, 0, 5)])[TopicPartition(topic, 0, 5)].result(30)
    assert deleted.low_watermark == 5
    positions = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 7)])
    admin.alter_consumer_group_offsets([positions])[group].result(30)
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
    [position] = admin.list_consumer_group_offsets([asked])[group].result(30).topic_partitions
    assert position.offset == 7
    admin.delete_consumer_groups([group])[group].result(30)

    [described_topic] = [admin.describe_topics(TopicCollection([topic]))[topic].result(30)]
    assert [len(partition.replicas) for partition in described_topic.partitions] == [3] * 4
    assert not own_ports & {p.leader.port for p in described_topic.partitions}
    admin.delete_topics([topic])[topic].result(30)
    eventually(lambda: topic not in admin.list_topics(timeout=30).topics)
    with pytest.raises(KafkaException) as gone:
        admin.delete_topics([topic])[topic].result(30)
    assert gone.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
