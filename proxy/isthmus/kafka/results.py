"""What the proxy's Kafka client returns and takes: plain tuples, errors beside the results that they are about."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

from isthmus.errors import KafkaError


class TopicPartition(NamedTuple):
    """What :data:`isthmus_plugins.cluster.TopicPartition` is, with names for its two parts."""

    topic: str
    partition: int


class Broker(NamedTuple):
    node_id: int
    host: str
    port: int
    rack: str | None


class PartitionInfo(NamedTuple):
    partition: int
    leader: int
    """Node id; -1 while there is none."""
    leader_epoch: int
    """-1 where the broker's version does not report it."""
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


class TopicInfo(NamedTuple):
    name: str
    topic_id: UUID | None
    is_internal: bool
    partitions: Mapping[int, PartitionInfo]


class NewTopic(NamedTuple):
    name: str
    partitions: int = -1
    """-1: the broker's default (KIP-464)."""
    replication_factor: int = -1
    configs: Mapping[str, str] = MappingProxyType({})


class CreatedTopic(NamedTuple):
    name: str
    topic_id: UUID | None
    partitions: int
    """-1 where the answer does not say (an error, or brokers before 2.4)."""
    replication_factor: int
    error: KafkaError | None


class ResourceType(IntEnum):
    """ConfigResource.Type."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class ConfigSynonym(NamedTuple):
    name: str
    value: str | None
    source: int


class ConfigEntry(NamedTuple):
    name: str
    value: str | None
    """None for sensitive ones."""
    source: int
    """1 topic, 2 broker (dynamic), 3 cluster-wide dynamic, 4 broker (static file), 5 default (ConfigSource)."""
    read_only: bool
    sensitive: bool
    synonyms: tuple[ConfigSynonym, ...]
    """Where the value could come from, the effective one first."""

    @property
    def is_default(self) -> bool:
        return self.source == 5


class ResourceConfigs(NamedTuple):
    entries: Mapping[str, ConfigEntry]
    error: KafkaError | None


class ListedOffset(NamedTuple):
    offset: int
    """-1 where no record matches the timestamp."""
    timestamp_ms: int
    leader_epoch: int
    error: KafkaError | None


class EpochEnd(NamedTuple):
    """The largest leader epoch of a log up to the one that was asked for, and where it ends; -1 each: none."""

    epoch: int
    end_offset: int
    error: KafkaError | None


class Produced(NamedTuple):
    base_offset: int
    log_append_time_ms: int
    """-1 for topics with CreateTime."""
    log_start_offset: int
    error: KafkaError | None


class FetchFrom(NamedTuple):
    """One partition to fetch."""

    topic: str
    partition: int
    offset: int
    bytes_max: int = 1 << 20
    leader_epoch: int = -1
    fetched_epoch: int = -1
    """Of the record before the offset, as it was read: the leader says where its log is another one (KIP-595)."""


class RawFetch(NamedTuple):
    """A Fetch response, not decoded."""

    version: int
    frame: bytes | bytearray
    topic_names: Mapping[UUID, str]
    """Names for the topic ids of v13 and later; empty below."""


class Fetched(NamedTuple):
    """One partition of a Fetch response."""

    records: bytes
    """Whole batches, the first of which may start before the offset, and possibly a cut one at the end."""
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...]
    """(producer id, first offset) of aborted transactions; read_committed alone has them."""
    error: KafkaError | None
    diverging: tuple[int, int] | None = None
    """(Leader epoch, its end): from there on the log is not the one that was read up to the offset."""


class ProducerState(NamedTuple):
    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    current_txn_start_offset: int
    """-1 without an open transaction."""


class Producers(NamedTuple):
    states: tuple[ProducerState, ...]
    error: KafkaError | None


class DeletedRecords(NamedTuple):
    low_watermark: int
    error: KafkaError | None


class ProducerIdentity(NamedTuple):
    producer_id: int
    producer_epoch: int


class ClusterDescription(NamedTuple):
    cluster_id: str
    controller_id: int
    brokers: Mapping[int, Broker]


def as_error(code: int, message: str | None = None) -> KafkaError | None:
    """None for code 0."""
    return KafkaError(code, message) if code else None
