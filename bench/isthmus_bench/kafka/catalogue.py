"""Where Kafka's command line tools are in each version."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from isthmus_bench.kafka.distribution import Distribution
from isthmus_bench.kafka.errors import EmbeddedKafkaError

# Newest place first: tools moved from Scala to Java one by one.
TOOLS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "kafka-acls": ("org.apache.kafka.tools.AclCommand", "kafka.admin.AclCommand"),
        "kafka-broker-api-versions": (
            "org.apache.kafka.tools.BrokerApiVersionsCommand",
            "kafka.admin.BrokerApiVersionsCommand",
        ),
        "kafka-client-metrics": ("org.apache.kafka.tools.ClientMetricsCommand",),
        "kafka-cluster": ("org.apache.kafka.tools.ClusterTool", "kafka.tools.ClusterTool"),
        "kafka-configs": ("org.apache.kafka.tools.ConfigCommand", "kafka.admin.ConfigCommand"),
        "kafka-console-consumer": ("org.apache.kafka.tools.consumer.ConsoleConsumer", "kafka.tools.ConsoleConsumer"),
        "kafka-console-producer": ("org.apache.kafka.tools.ConsoleProducer", "kafka.tools.ConsoleProducer"),
        "kafka-console-share-consumer": ("org.apache.kafka.tools.consumer.ConsoleShareConsumer",),
        "kafka-consumer-groups": (
            "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
            "kafka.admin.ConsumerGroupCommand",
        ),
        "kafka-consumer-perf-test": ("org.apache.kafka.tools.ConsumerPerformance",),
        "kafka-delegation-tokens": ("org.apache.kafka.tools.DelegationTokenCommand",),
        "kafka-delete-records": ("org.apache.kafka.tools.DeleteRecordsCommand",),
        "kafka-dump-log": ("org.apache.kafka.tools.DumpLogSegments", "kafka.tools.DumpLogSegments"),
        "kafka-e2e-latency": ("org.apache.kafka.tools.EndToEndLatency", "kafka.tools.EndToEndLatency"),
        "kafka-features": ("org.apache.kafka.tools.FeatureCommand", "kafka.admin.FeatureCommand"),
        "kafka-get-offsets": ("org.apache.kafka.tools.GetOffsetShell",),
        "kafka-groups": ("org.apache.kafka.tools.GroupsCommand",),
        "kafka-leader-election": ("org.apache.kafka.tools.LeaderElectionCommand",),
        "kafka-log-dirs": ("org.apache.kafka.tools.LogDirsCommand",),
        "kafka-metadata-quorum": ("org.apache.kafka.tools.MetadataQuorumCommand",),
        "kafka-producer-perf-test": ("org.apache.kafka.tools.ProducerPerformance",),
        "kafka-reassign-partitions": ("org.apache.kafka.tools.reassign.ReassignPartitionsCommand",),
        "kafka-replica-verification": ("org.apache.kafka.tools.ReplicaVerificationTool",),
        "kafka-share-groups": ("org.apache.kafka.tools.consumer.group.ShareGroupCommand",),
        "kafka-storage": ("kafka.tools.StorageTool",),
        "kafka-streams-groups": ("org.apache.kafka.tools.streams.StreamsGroupCommand",),
        "kafka-topics": ("org.apache.kafka.tools.TopicCommand", "kafka.admin.TopicCommand"),
        "kafka-transactions": ("org.apache.kafka.tools.TransactionsCommand",),
        "kafka-verifiable-consumer": ("org.apache.kafka.tools.VerifiableConsumer",),
        "kafka-verifiable-producer": ("org.apache.kafka.tools.VerifiableProducer",),
    }
)
"""Script name to main classes. Transactions are measured with ``kafka-producer-perf-test --transactional-id``."""

_CLASS: Final = re.compile(r"\w+(\.\w+)+")


def main_class(distribution: Distribution, name: str) -> str:
    """The main class of a tool in this version: by the script's name, or the class itself.

    Raises EmbeddedKafkaError with what there is, for a tool that this version does not have.
    """
    if name in TOOLS:
        present = _classes(distribution)
        for candidate in TOOLS[name]:
            if candidate in present:
                return candidate
        raise EmbeddedKafkaError(f"Kafka {distribution.version} has no {name}")
    if _CLASS.fullmatch(name):
        return name
    raise EmbeddedKafkaError(f"there is no tool {name!r}: name a main class, or one of {', '.join(TOOLS)}")


@cache
def _classes(distribution: Distribution) -> frozenset[str]:
    found: set[str] = set()
    for jar in distribution.jars:
        if jar.name.startswith(("kafka_", "kafka-tools-")):
            with zipfile.ZipFile(jar) as archive:
                found.update(entry[:-6].replace("/", ".") for entry in archive.namelist() if entry.endswith(".class"))
    return frozenset(found)
