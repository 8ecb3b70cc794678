"""Kafka's own tools (the Java clients) through the proxy, of the cluster's version.

Every start of a tool takes over a second: the tests ask much of each.
"""

from __future__ import annotations

import re

import pytest
from support.kafka import unique
from support.proxies import Proxied

pytestmark = pytest.mark.brokers


def produce_lines(proxied: Proxied, topic: str, lines: list[str], *arguments: str) -> None:
    proxied.tool("kafka-console-producer", "--topic", topic, *arguments, stdin="".join(line + "\n" for line in lines))


def consume_lines(proxied: Proxied, topic: str, count: int, *arguments: str) -> list[str]:
    """What a console consumer prints; it fails when nothing comes for 30 s."""
    options = ("--from-beginning", "--max-messages", str(count), "--timeout-ms", "30000")
    return proxied.tool("kafka-console-consumer", "--topic", topic, *options, *arguments).splitlines()


def property_option(proxied: Proxied, role: str) -> str:
    """The option for client settings, renamed by KIP-1147."""
    return "--command-property" if proxied.kafka.version >= "4.2" else f"--{role}-property"


def transactional_perf(proxied: Proxied, topic: str, records: int) -> str:
    return proxied.kafka.tool(
        "kafka-producer-perf-test",
        *("--topic", topic, "--num-records", str(records), "--record-size", "100", "--throughput", "-1"),
        *("--transactional-id", unique("txn-"), "--transaction-duration-ms", "50"),
        *("--producer-props", f"bootstrap.servers={proxied.bootstrap}", "linger.ms=1"),
    ).stdout


def test_every_version(proxied_of_each_version: Proxied) -> None:
    """Topic, records, group and transactions, with brokers and tools of each version."""
    proxied = proxied_of_each_version
    topic, group = unique("topic-"), unique("group-")
    proxied.tool("kafka-topics", "--create", "--topic", topic, "--partitions", "2")
    lines = [f"line {number}" for number in range(100)]
    produce_lines(proxied, topic, lines, "--compression-codec", "zstd")
    setting = property_option(proxied, "consumer")
    protocol = "classic" if proxied.kafka.version < "4" else "consumer"
    member = ("--group", group, setting, f"group.protocol={protocol}")
    assert sorted(consume_lines(proxied, topic, 100, *member)) == sorted(lines)
    described = proxied.tool("kafka-consumer-groups", "--describe", "--group", group)
    assert sum(int(offset) for offset in re.findall(rf"{topic}\s+\d\s+(\d+)", described)) == 100
    assert "2000 records sent" in transactional_perf(proxied, topic, 2000)
    assert len(consume_lines(proxied, topic, 2100, setting, "isolation.level=read_committed")) == 2100


def test_topics_and_configs(proxied_of_clients: Proxied) -> None:
    topic = unique("topic-")
    own_ports = {str(port) for _, port in proxied_of_clients.kafka.addresses().values()}
    proxied_of_clients.tool(
        "kafka-topics", "--create", "--topic", topic, "--partitions", "3", "--replication-factor", "3"
    )
    proxied_of_clients.tool("kafka-topics", "--alter", "--topic", topic, "--partitions", "5")
    described = proxied_of_clients.tool("kafka-topics", "--describe", "--topic", topic)
    assert "PartitionCount: 5" in described
    assert "ReplicationFactor: 3" in described
    proxied_of_clients.tool(
        "kafka-configs", "--alter", "--topic", topic, "--add-config", "retention.ms=7200000,cleanup.policy=[compact]"
    )
    configs = proxied_of_clients.tool("kafka-configs", "--describe", "--topic", topic)
    assert "retention.ms=7200000" in configs
    versions = proxied_of_clients.tool("kafka-broker-api-versions")
    assert versions.count("(id: ") == 3
    assert not own_ports & set(re.findall(r":(\d+) \(id", versions))
    proxied_of_clients.tool("kafka-topics", "--delete", "--topic", topic)
    assert topic not in proxied_of_clients.tool("kafka-topics", "--list").split()


@pytest.mark.one_in_ci("clients")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_groups(proxied_of_clients: Proxied, protocol: str) -> None:
    """A group of the old and the new protocol (KIP-848): its offsets are described, reset, and used."""
    topic, group = unique("topic-"), unique("group-")
    proxied_of_clients.tool("kafka-topics", "--create", "--topic", topic, "--partitions", "3")
    lines = [f"k{number}:v{number}" for number in range(90)]
    keys = ("--reader-property", "parse.key=true", "--reader-property", "key.separator=:")
    produce_lines(proxied_of_clients, topic, lines, *keys)
    member = ("--group", group, "--command-property", f"group.protocol={protocol}")
    values = [line.split(":")[1] for line in lines]
    assert sorted(consume_lines(proxied_of_clients, topic, 90, *member)) == sorted(values)
    described = proxied_of_clients.tool("kafka-consumer-groups", "--describe", "--group", group)
    assert sum(int(offset) for offset in re.findall(rf"{topic}\s+\d\s+(\d+)", described)) == 90
    proxied_of_clients.tool(
        "kafka-consumer-groups", "--reset-offsets", "--group", group, "--topic", topic, "--to-earliest", "--execute"
    )
    assert sorted(consume_lines(proxied_of_clients, topic, 90, *member)) == sorted(values)


def test_performance_tools(proxied_of_clients: Proxied) -> None:
    topic, records = unique("topic-"), 50_000
    proxied_of_clients.tool(
        "kafka-topics", "--create", "--topic", topic, "--partitions", "6", "--replication-factor", "3"
    )
    produced = proxied_of_clients.kafka.tool(
        "kafka-producer-perf-test",
        *("--topic", topic, "--num-records", str(records), "--record-size", "500", "--throughput", "-1"),
        *("--producer-props", f"bootstrap.servers={proxied_of_clients.bootstrap}", "acks=all"),
    ).stdout
    assert f"{records} records sent" in produced
    consumed = proxied_of_clients.tool(
        "kafka-consumer-perf-test", "--topic", topic, "--num-records", str(records), "--timeout", "30000"
    )
    assert int(consumed.splitlines()[1].split(",")[4]) >= records


def test_share_group(proxied_of_clients: Proxied) -> None:
    """ShareFetch and ShareAcknowledge (KIP-932): each record goes to one member, once it is acknowledged."""
    topic, group = unique("topic-"), unique("share-")
    proxied_of_clients.tool("kafka-topics", "--create", "--topic", topic, "--partitions", "3")
    proxied_of_clients.tool(
        "kafka-configs", "--alter", "--group", group, "--add-config", "share.auto.offset.reset=earliest"
    )
    lines = [f"line {number}" for number in range(60)]
    produce_lines(proxied_of_clients, topic, lines)
    consumed = proxied_of_clients.tool(
        "kafka-console-share-consumer",
        "--topic",
        topic,
        "--group",
        group,
        "--max-messages",
        "60",
        "--timeout-ms",
        "30000",
    )
    assert sorted(consumed.splitlines()) == sorted(lines)
    described = proxied_of_clients.tool("kafka-share-groups", "--describe", "--group", group)
    assert topic in described
