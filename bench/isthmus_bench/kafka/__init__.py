"""Embedded Kafka: real brokers for the demo, tests and benchmarks. See docs/embedded-clusters.md."""

from isthmus_bench.kafka.cluster import ClusterState, KafkaCluster
from isthmus_bench.kafka.errors import EmbeddedKafkaError
from isthmus_bench.kafka.jars import DEFAULT_VERSION, TESTED_VERSIONS
from isthmus_bench.kafka.security import Authority, Security
from isthmus_bench.kafka.settings import ClusterSpec
from isthmus_bench.kafka.tools import JavaTool, ToolFailed, java_tool, run_tool

__all__ = (
    "DEFAULT_VERSION",
    "TESTED_VERSIONS",
    "Authority",
    "ClusterSpec",
    "ClusterState",
    "EmbeddedKafkaError",
    "JavaTool",
    "KafkaCluster",
    "Security",
    "ToolFailed",
    "java_tool",
    "run_tool",
)
