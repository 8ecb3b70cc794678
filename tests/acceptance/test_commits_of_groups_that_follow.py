"""User story: applications read on the follower in groups that follow over a link: their commits are refused, with a
typed error for each partition that the link looks after, and they go on consuming.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import TopicAuthorizationFailedError
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition
from support.kafka import unique
from support.links import Linked, linked, until
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster, ToolFailed
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

TOPIC_AUTHORIZATION_FAILED = KafkaError.TOPIC_AUTHORIZATION_FAILED
POLICY_VIOLATION = KafkaError.POLICY_VIOLATION
COUNT = 40
"""Records of each half: there before the consumers start, and produced while they run."""


class Setup(NamedTuple):
    link: Linked
    groups: str
    """Prefix of the groups that follow, the same on both sides."""
    followed: str
    """A topic of B that follows."""
    free: str
    """A topic of B's own."""

    def group(self) -> str:
        return unique(self.groups)

    def produce_more(self) -> None:
        self.link.a.produce(self.link.local + "t", [b"x"] * COUNT)

    def committed(self, group: str) -> dict[str, int]:
        """By topic, what B's coordinator has."""
        asked = ConsumerGroupTopicPartitions(group)
        admin = self.link.b.admin(direct=True)
        found = admin.list_consumer_group_offsets([asked])[group].result(30).topic_partitions
        return {each.topic: each.offset for each in found}

    def refused(self) -> float:
        """How many requests B's proxy refused for this reason."""
        text = httpx.get(f"{self.link.b.proxy.url}/metrics", timeout=10, trust_env=False).text
        wanted = 'isthmus_requests_refused_total{cause="replicated_group"} '
        return sum(float(line.removeprefix(wanted)) for line in text.splitlines() if line.startswith(wanted))


@pytest.fixture(scope="module")
def setup(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Setup]:
    with linked(*kafka_pair) as link:
        groups = unique("app-") + "-"
        link.attach()
        attached = ("--type", "consumer-group", "--local", groups, "--remote", groups, "--role", "leader")
        link.a.proxy.cli("link", "attach", link.name, *attached, "--disable-transaction-verification")
        link.a.create_topic(link.local + "t")
        free = unique("free-")
        link.b.create_topic(free)
        link.b.produce(free, [b"x"])
        setup = Setup(link, groups, link.remote + "t", free)
        setup.produce_more()
        link.wait_end(setup.followed, COUNT)
        yield setup


@pytest.mark.one_in_ci("clients")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_librdkafka(setup: Setup, protocol: str) -> None:
    group = setup.group()
    told: list[int | None] = []

    def on_commit(error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        told.extend(each.error and each.error.code() for each in partitions if each.topic == setup.followed)

    consumer = Consumer(
        {
            "bootstrap.servers": setup.link.b.bootstrap,
            "group.id": group,
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 100,
            "on_commit": on_commit,
        }
    )
    consumer.subscribe([setup.followed, setup.free])
    before, read = setup.refused(), {setup.followed: 0, setup.free: 0}

    def reads(count: int) -> bool:
        message = consumer.poll(0.1)
        if message is not None:
            assert message.error() is None, message.error()
            read[message.topic()] += 1
        return read[setup.followed] >= count and read[setup.free] >= 1

    try:
        start = setup.link.b.end(setup.followed)
        until("all is read", lambda: reads(start), interval_s=0)
        until("it was told twice", lambda: reads(start) and len(told) >= 2, interval_s=0)
        setup.produce_more()
        until("it goes on", lambda: reads(start + COUNT), interval_s=0)
        assert set(told) == {TOPIC_AUTHORIZATION_FAILED}
        with pytest.raises(KafkaException) as refused:
            consumer.commit(offsets=[TopicPartition(setup.followed, 0, 1)], asynchronous=False)
        assert refused.value.args[0].code() == TOPIC_AUTHORIZATION_FAILED
    finally:
        consumer.close()
    assert setup.committed(group) == {setup.free: 1}
    assert setup.refused() > before
    assert f"group request refused api='offset_commit' group='{group}'" in setup.link.b.proxy.log


def test_aiokafka(setup: Setup) -> None:
    """It raises whatever is final where records are read, too: whoever catches it and reads on at once misses nothing.

    No more is promised: see docs/adr/0004-code-of-refused-commits.md.
    """
    group = setup.group()

    async def scenario() -> list[int]:
        consumer = AIOKafkaConsumer(
            setup.followed,
            bootstrap_servers=setup.link.b.bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            auto_commit_interval_ms=100,
        )
        offsets: list[int] = []
        told = 0

        async def read(until_offset: int, told_min: int) -> None:
            nonlocal told
            while told < told_min or not offsets or offsets[-1] < until_offset - 1:
                try:
                    for records in (await consumer.getmany(timeout_ms=100)).values():
                        offsets.extend(record.offset for record in records)
                except TopicAuthorizationFailedError:
                    told += 1

        await consumer.start()
        try:
            start = setup.link.b.end(setup.followed)
            await read(start, told_min=2)
            await asyncio.to_thread(setup.produce_more)
            await read(start + COUNT, told_min=3)
            with pytest.raises(TopicAuthorizationFailedError):
                await consumer.commit()
        finally:
            await consumer.stop()
        return offsets

    offsets = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert offsets == list(range(len(offsets)))
    assert setup.committed(group) == {}


@pytest.mark.one_in_ci("clients")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_java(setup: Setup, protocol: str) -> None:
    """It reads to the end and waits there for more, committing all the time."""
    group = setup.group()
    before = setup.refused()
    done = setup.link.b.kafka.tool(
        "kafka-console-consumer",
        *("--bootstrap-server", setup.link.b.bootstrap, "--topic", setup.followed, "--group", group),
        *("--command-property", "auto.commit.interval.ms=200", "--command-property", f"group.protocol={protocol}"),
        *("--from-beginning", "--timeout-ms", "4000"),
    )
    assert done.stdout.count("x") == setup.link.b.end(setup.followed)
    assert setup.committed(group) == {}
    assert setup.refused() > before + 2


def test_a_mixed_commit_by_hand_and_by_topic_id(setup: Setup) -> None:
    group = setup.group()
    ids: dict[str, Any] = {}
    with Wire(setup.link.b.bootstrap) as wire:
        asked = {"topics": [{"name": name} for name in (setup.followed, setup.free)]}
        for topic in wire.request(ApiKey.METADATA, 12, asked).topics:
            ids[topic.name] = topic.topic_id
        for version in (2, 8, 10):
            topics = [
                {
                    "name": name,
                    "topic_id": topic_id,
                    "partitions": [{"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}],
                }
                for name, topic_id in ids.items()
            ]
            for topic in topics:
                del topic["name" if version >= 10 else "topic_id"]
            values = {"group_id": group, "generation_id_or_member_epoch": -1, "member_id": "", "topics": topics}
            answer = wire.request(ApiKey.OFFSET_COMMIT, version, values)
            codes = [[int(each.error_code) for each in topic.partitions] for topic in answer.topics]
            assert codes == [[TOPIC_AUTHORIZATION_FAILED], [0]], version
    assert setup.committed(group) == {setup.free: 1}


def test_transactions_do_not_move_committed_offsets(setup: Setup) -> None:
    group = setup.group()
    producer = Producer({"bootstrap.servers": setup.link.b.bootstrap, "transactional.id": unique("txn-")})
    producer.init_transactions(30)
    consumer = Consumer({"bootstrap.servers": setup.link.b.bootstrap, "group.id": group})
    consumer.subscribe([setup.free])
    until("it has joined", lambda: consumer.poll(0.1) is None and consumer.assignment())
    producer.begin_transaction()
    producer.produce(setup.free, b"y")
    positions = [TopicPartition(setup.followed, 0, 1), TopicPartition(setup.free, 0, 1)]
    with pytest.raises(KafkaException) as refused:
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 30)
    assert refused.value.args[0].code() == TOPIC_AUTHORIZATION_FAILED
    consumer.close()
    assert setup.committed(group) == {}


def test_a_java_application_of_transactions_ends(setup: Setup) -> None:
    """It reads, writes and commits in transactions: it fails instead of hanging, and nothing is committed."""
    group, output = setup.group(), unique("output-")
    setup.link.b.create_topic(output)
    with pytest.raises(ToolFailed) as failed:
        setup.link.b.kafka.tool(
            "org.apache.kafka.tools.TransactionalMessageCopier",
            *("--broker-list", setup.link.b.bootstrap, "--transactional-id", unique("txn-"), "--use-group-metadata"),
            *("--input-topic", setup.followed, "--input-partition", "0", "--output-topic", output),
            *("--consumer-group", group, "--transaction-size", "10"),
            timeout_s=30,
        )
    assert "Unexpected error in TxnOffsetCommitResponse: Topic authorization failed" in failed.value.stderr
    assert '"totalProcessed":0' in failed.value.stdout
    assert setup.link.b.read(output, isolation="read_committed") == []
    assert setup.committed(group) == {}


def test_groups_and_their_committed_offsets_are_not_deleted(setup: Setup) -> None:
    group = setup.group()
    admin = setup.link.b.admin()
    free = ConsumerGroupTopicPartitions(group, [TopicPartition(setup.free, 0, 1)])
    admin.alter_consumer_group_offsets([free])[group].result(30)
    with pytest.raises(KafkaException) as refused:
        admin.delete_consumer_groups([group])[group].result(30)
    assert refused.value.args[0].code() == POLICY_VIOLATION
    with Wire(setup.link.b.bootstrap) as wire:
        topics = [{"name": name, "partitions": [{"partition_index": 0}]} for name in (setup.followed, setup.free)]
        answer = wire.request(ApiKey.OFFSET_DELETE, 0, {"group_id": group, "topics": topics})
        codes = {topic.name: [int(each.error_code) for each in topic.partitions] for topic in answer.topics}
        assert codes == {setup.followed: [POLICY_VIOLATION], setup.free: [0]}
    assert setup.committed(group) == {}
