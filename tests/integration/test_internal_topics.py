"""Consumers of everything get everything, and nothing of the proxies' own topics."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import httpx
import pytest
from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from support.kafka import unique
from support.links import until
from support.proxies import HEARTBEATS, Proxied
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from isthmus_protocol.schema import ApiKey

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("clients", of="consumers of everything")]

RECORDS = 20
LATER_S = 3.0
"""Ten heartbeats of a member, and three reconnects of one whose connections end."""
SETTLED_S = 20.0
NO_COORDINATOR_YET = (14, 15, 16)
"""COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR."""


@pytest.fixture(scope="module")
def everything() -> Iterator[Proxied]:
    """A cluster whose topics are all of them of these tests."""
    with (
        KafkaCluster(name="everything", settings=HEARTBEATS) as cluster,
        ProxyProcess(cluster.bootstrap_servers, name="proxy-1") as proxy,
    ):
        yield Proxied(cluster, proxy)


def made(bootstrap: str, topic: str) -> str:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, replication_factor=1)])[topic].result(30)
    return topic


def produced(bootstrap: str, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(count):
        producer.produce(topic, str(number))
    assert producer.flush(20) == 0


def ended(proxied: Proxied) -> int:
    """How many connections of clients the proxy has seen end; these may open more of them whenever they like."""
    metrics = httpx.get(f"{proxied.proxy.url}/metrics", timeout=30, trust_env=False).text
    counts = re.findall(r"^isthmus_connections_closed_total(?:{.*})? (\S+)$", metrics, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_a_pattern_that_matches_everything(everything: Proxied, protocol: str) -> None:
    topic = made(everything.bootstrap, unique("topic-"))
    produced(everything.bootstrap, topic, RECORDS)
    # Made behind the proxy's back: it knows no name of its id.
    spool = made(everything.kafka.bootstrap_servers, f"__isthmus_spool_{unique('')}")
    produced(everything.kafka.bootstrap_servers, spool, RECORDS)
    errors: list[KafkaError] = []
    settings: dict[str, Any] = {
        "group.id": unique("group-"),
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
        "error_cb": errors.append,
    }
    with closing(Consumer(everything.librdkafka | settings)) as consumer:
        consumer.subscribe(["^.*"])
        read: list[str] = []
        while read.count(topic) < RECORDS:
            (message,) = consumer.consume(1, timeout=30)
            assert message.error() is None
            read.append(message.topic())
        before = ended(everything)
        deadline = time.monotonic() + LATER_S
        while time.monotonic() < deadline:
            read += [message.topic() for message in consumer.consume(10, timeout=0.2)]
        assert not [each for each in read if each.startswith("__isthmus_")]
        assert {topic} <= {each.topic for each in consumer.assignment()}
        assert not [each for each in consumer.assignment() if each.topic.startswith("__isthmus_")]
        assert ended(everything) == before
        assert errors == []
        consumer.commit(asynchronous=False)
    assert "__isthmus_" not in everything.tool("kafka-consumer-groups", "--describe", "--all-groups")


def test_members_give_up_what_they_never_heard_of(everything: Proxied) -> None:
    """A coordinator waits for that, until the rebalance timeout: a member without news says nothing, as Java's."""
    prefix = f"__isthmus_spool_{unique('')}"
    for number in range(2):
        made(everything.kafka.bootstrap_servers, f"{prefix}-{number}")
    group = unique("group-")
    direct = AdminClient({"bootstrap.servers": everything.kafka.bootstrap_servers})
    epochs: dict[str, int] = {}
    with Wire(everything.bootstrap) as wire:

        def heartbeat(member: str, **more: Any) -> bool:
            values: dict[str, Any] = {"group_id": group, "member_id": member, "topic_partitions": None}
            values["member_epoch"] = epochs.get(member, 0)
            answer = wire.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, {**values, **more})
            if answer.error_code in NO_COORDINATOR_YET:
                return False
            assert answer.error_code == 0, answer
            assert answer.assignment is None or not answer.assignment.topic_partitions
            epochs[member] = answer.member_epoch
            return True

        def settled(count: int) -> bool:
            for member in epochs:
                heartbeat(member)
            described = direct.describe_consumer_groups([group])[group].result(30)
            found = [len(member.assignment.topic_partitions) for member in described.members]
            return described.state is ConsumerGroupState.STABLE and found == [2 // count] * count

        for count in (1, 2):
            joins = partial(
                heartbeat,
                str(uuid.uuid4()),
                rebalance_timeout=300_000,
                subscribed_topic_regex=f"{re.escape(prefix)}.*",
                topic_partitions=[],
            )
            until("it has joined", joins)
            until(f"a group of {count} is stable", partial(settled, count), SETTLED_S)


def test_one_partition_that_nobody_may_read(everything: Proxied) -> None:
    topic = made(everything.bootstrap, unique("topic-"))
    produced(everything.bootstrap, topic, RECORDS)
    settings = {"group.id": unique("group-"), "auto.offset.reset": "earliest"}
    with closing(Consumer(everything.librdkafka | settings)) as consumer:
        consumer.assign([TopicPartition("__isthmus_control", 0, 0), TopicPartition(topic, 0, 0)])
        read, refused = 0, 0
        while read < RECORDS or not refused:  # librdkafka says it once
            for message in consumer.consume(1, timeout=20):
                error = message.error()
                if error is None:
                    assert message.topic() == topic
                    read += 1
                else:
                    assert (error.code(), message.topic()) == (
                        KafkaError.TOPIC_AUTHORIZATION_FAILED,
                        "__isthmus_control",
                    )
                    refused += 1
        before = ended(everything)
        produced(everything.kafka.bootstrap_servers, topic, 1)
        messages = consumer.consume(10, timeout=LATER_S)
        assert [each.error() for each in messages if each.topic() == topic] == [None]
        assert ended(everything) == before


def test_no_tool_lists_them(everything: Proxied) -> None:
    topic = made(everything.bootstrap, unique("topic-"))
    for tool, arguments in {
        "kafka-topics": ["--list"],
        "kafka-log-dirs": ["--describe"],
        "kafka-get-offsets": [],
    }.items():
        listed = everything.tool(tool, *arguments)
        assert topic in listed
        assert "__isthmus_" not in listed
