"""What a plugin may ask of its own cluster's brokers."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, TypeAlias

from isthmus_control.acls import EVERY_ACL, AclBinding, AclFilter
from isthmus_protocol import error_codes as codes

TopicPartition: TypeAlias = tuple[str, int]
"""A partition of the cluster: the topic's name, and its number."""


class BrokerUnavailable(Exception):
    """A broker did not answer, or not in time. What was asked may have happened."""


class KafkaRefused(Exception):
    """A broker answered with an error that trying again does not mend."""

    def __init__(self, error_code: int, error_name: str, message: str) -> None:
        super().__init__(f"{error_name}: {message}" if message else error_name)
        self.error_code = error_code
        self.error_name = error_name
        self.message = message


class Refusal(NamedTuple):
    """Why a partition was not appended to."""

    error: KafkaRefused
    records: int = 0
    """Of the batch that was refused; 0: there was none yet."""
    size: int = 0
    """Its bytes."""


NOT_APPENDED: Final = frozenset(
    {
        codes.CORRUPT_MESSAGE,
        codes.INVALID_RECORD,
        codes.INVALID_TIMESTAMP,
        codes.INVALID_TOPIC_EXCEPTION,
        codes.LEADER_NOT_AVAILABLE,
        codes.MESSAGE_TOO_LARGE,
        codes.NOT_ENOUGH_REPLICAS,
        codes.POLICY_VIOLATION,
        codes.RECORD_LIST_TOO_LARGE,
        codes.TOPIC_AUTHORIZATION_FAILED,
        codes.UNKNOWN_TOPIC_OR_PARTITION,
        codes.UNSUPPORTED_COMPRESSION_TYPE,
        codes.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    }
)
"""What brokers answer for one partition of a Produce or AddPartitionsToTxn, and have done nothing there.

Not NOT_LEADER_OR_FOLLOWER: a leader that has appended and loses its place before all replicas have it says so, too.
What came next with the same sequence, in the same epoch, would be taken for that and be lost.
"""


class PartitionsRefused(KafkaRefused):
    """Brokers did not append to some partitions of several.

    ``ends``: where logs go on behind what was appended to others and stays, which in a transaction nothing does.
    """

    def __init__(
        self, refused: Mapping[TopicPartition, Refusal], ends: Mapping[TopicPartition, int] | None = None
    ) -> None:
        (topic, partition), (error, _, _) = next(iter(refused.items()))
        super().__init__(error.error_code, error.error_name, f"{topic}-{partition}: {error.message}")
        self.refused = refused
        self.ends = ends or {}


class ProducerFenced(Exception):
    """Another producer has begun with the same transactional id: what this one has open was aborted."""


class NewTopic(NamedTuple):
    """A topic that may be created."""

    name: str
    partitions: int
    replication_factor: int
    configs: Mapping[str, str]


class ProduceResult(NamedTuple):
    """A broker's answer for one partition."""

    error_code: int
    error_name: str
    base_offset: int
    message: str


class TransactionMarkers(NamedTuple):
    """The end of a transaction of one producer, to be written to one partition: ``times`` that control record."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    committed: bool
    coordinator_epoch: int
    times: int = 1


class ProduceConnection(Protocol):
    """A connection of a plugin's own to one broker, for appending whole batches."""

    @property
    def opened_at(self) -> float:
        """Monotonic seconds. The broker that it reaches has not been restarted since."""

    @property
    def is_open(self) -> bool: ...

    async def produce(
        self,
        requests: Sequence[Mapping[TopicPartition, bytes]],
        timeout_ms: int,
        transactional_id: str | None = None,
    ) -> list[dict[TopicPartition, ProduceResult]]:
        """Append batches, in each request one for each (topic, partition). Raises BrokerUnavailable: fate unknown.

        The requests go out without waiting, and the broker takes them up one after the other, also after it refused
        one. The last has acks=all, those before acks=1: where it stored all, the in-sync replicas have all.

        Transactional batches need a ``transactional_id``, of whatever transaction; one request can hold those of one
        producer id only.
        """

    async def write_markers(
        self, markers: Sequence[TransactionMarkers], timeout_ms: int
    ) -> dict[TopicPartition, ProduceResult]:
        """Write transaction markers, for each partition those of one producer. Raises BrokerUnavailable: fate unknown.

        Answers have no offset (-1). The broker stamps markers with its own time.
        """

    def close(self) -> None: ...


class Transactions(Protocol):
    """A producer of one transactional id, which whoever uses the id next fences: one transaction at a time."""

    async def begin(self) -> None:
        """Fence whoever had the id before: what that left open is aborted by then. Raises BrokerUnavailable."""

    async def open(self, places: Collection[TopicPartition], group: str) -> None:
        """Have the transaction that :meth:`commit` ends begin before it is known what exactly it has.

        Waits until the one before is complete. Raises what :meth:`commit` raises.
        """

    async def commit(
        self,
        batches: Mapping[TopicPartition, Sequence[bytes]],
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
    ) -> Mapping[TopicPartition, int]:
        """Append batches of no producer, in their order, and commit a group's offsets, all or nothing; where logs go on
        behind what was appended.

        Raises PartitionsRefused: it was aborted, and the next one may follow. ProducerFenced; BrokerUnavailable and
        KafkaRefused, which leave open whether it was committed: :meth:`begin` again, and read what was committed.
        """


class FetchPartition(NamedTuple):
    """What to read of one partition. ``topic_id``: 16 bytes."""

    topic_id: bytes
    partition: int
    offset: int
    bytes_max: int
    leader_epoch: int = -1
    """If given, the answer is an error unless this is the broker's own (FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH)."""


class Fetched(NamedTuple):
    """What was read of one partition."""

    topic_id: bytes
    partition: int
    error_code: int
    high_watermark: int
    log_start: int
    records: memoryview
    last_stable_offset: int = -1
    """All transactions that began before it have ended."""
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of aborted transactions with records here; only read_committed has them."""


class FetchConnection(Protocol):
    """A connection of a plugin's own to one broker, for reading whole batches."""

    async def fetch(
        self,
        partitions: Sequence[FetchPartition],
        wait_max_ms: int,
        bytes_max: int,
        read_committed: bool = False,
        only_changes: bool = False,
    ) -> list[Fetched]:
        """Read up to the high watermark, or up to the last stable offset. Raises BrokerUnavailable.

        ``only_changes``: partitions in which nothing happened since the last such answer are left out of it.
        """

    def close(self) -> None: ...


class ProducerState(NamedTuple):
    """What a partition's leader knows of a producer (KIP-664)."""

    epoch: int
    last_sequence: int
    """-1: none since the last marker of a newer epoch."""
    coordinator_epoch: int
    """Of the last marker; -1 if there was none."""
    transaction_start: int
    """Offset of the first record of the open transaction, -1 without one."""


class PartitionInfo(NamedTuple):
    leader: int
    """-1: none."""
    leader_epoch: int
    replicas: tuple[int, ...] = ()
    """The brokers that are to have it, the preferred leader first; some may be away, or not have all of it yet."""
    in_sync: tuple[int, ...] = ()
    """Those of them that have all of it."""


@lru_cache(maxsize=2**15)
def id_as_text(topic_id: bytes) -> str:
    """The UUID that the 16 bytes of a topic id are: of all topics every few seconds, so it is kept."""
    return str(uuid.UUID(bytes=topic_id))


class TopicInfo(NamedTuple):
    name: str
    topic_id: bytes
    """16 bytes."""
    partitions: tuple[PartitionInfo, ...]
    replication_factor: int
    internal: bool
    """Kafka's own, or the proxies': in no namespace."""
    pinned: bool = False
    """Whether it is read from these leaders in these epochs only: each replica is cleaned by itself."""

    @property
    def id_text(self) -> str:
        """The topic id as records of the control log, and calls, have it."""
        return id_as_text(self.topic_id)


class CommittedOffset(NamedTuple):
    """A consumer group's committed offset in one partition."""

    offset: int
    metadata: str


class Refused(NamedTuple):
    """A coordinator's error for one partition of a request."""

    error_code: int
    error_name: str


class ClusterApi(Protocol):
    """This proxy's own access to its cluster, under the proxy's identity.

    Every method raises :class:`BrokerUnavailable` and, where the broker refuses for good, :class:`KafkaRefused`.
    """

    def throttled(self) -> str | None:
        """What quotas of the cluster keep this proxy waiting for, in words; None: nothing."""

    @property
    def brokers_changed_at(self) -> float:
        """Monotonic seconds: when a broker was last lost, or found. What was read of it before may not be so
        now: it may have been restarted, and a power loss takes the ends of logs."""

    async def topics(self) -> Mapping[str, TopicInfo]:
        """All topics, read now."""

    async def topic(self, name: str) -> TopicInfo | None:
        """One topic, read now; None if there is none. KafkaRefused where that is not for this proxy to know."""

    async def topics_named(self, names: Collection[str]) -> Mapping[str, TopicInfo]:
        """Those of some topics that there are, read now."""

    async def unknown_topics(self, topic_ids: Collection[bytes], cluster_id: str) -> frozenset[bytes]:
        """Of these topics, those that no broker of the cluster has any more: each that is there was asked, by id.

        A topic that this proxy may not describe counts as one that there is. Raises BrokerUnavailable where a broker
        does not answer, or is of another cluster than ``cluster_id``.
        """

    async def leader_of(self, topic: str, partition: int) -> int | None:
        """The partition's leader, read now."""

    async def broker_racks(self) -> Mapping[int, str | None]:
        """The racks of the brokers that are there, by id; as last read."""

    async def reassigned(self) -> Collection[TopicPartition]:
        """Partitions whose replicas are being changed now, by whomever."""

    async def reassign(self, replicas: Mapping[TopicPartition, Sequence[int]]) -> Mapping[TopicPartition, KafkaRefused]:
        """Have partitions get these replicas, the preferred leader first; those for which that is refused, and why."""

    async def log_end(self, topic: str, partition: int) -> int:
        """The leader's log end offset, which may be above the high watermark."""

    async def log_ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """The same for many at once; those that cannot be read now are left out."""

    async def high_watermark(self, topic: str, partition: int) -> int: ...

    async def last_stable_offset(self, topic: str, partition: int) -> int:
        """All transactions that began before it have ended."""

    async def high_watermarks(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """The same for many at once; those that cannot be read now are left out."""

    async def offsets_for_times(self, asked: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, tuple[int, int]]:
        """By (topic, partition) and time (ms; -3: the latest there is): the broker's (offset, time), (-1, -1) for none.

        Those that cannot be read now are left out.
        """

    async def log_start(self, topic: str, partition: int) -> int: ...

    async def epoch_end(self, topic: str, partition: int, epoch: int) -> tuple[int, int]:
        """The leader's largest leader epoch up to ``epoch``, and where it ends: (-1, -1) if it has none.

        The log's end is that of its newest epoch (OffsetForLeaderEpoch, KIP-101).
        """

    async def delete_records(self, topic: str, partition: int, before: int) -> int:
        """Delete the records below an offset; returns where the log starts now."""

    async def producers(self, topic: str, partition: int) -> Mapping[int, ProducerState]:
        """What the partition's leader knows of producers, by their ids."""

    async def completing_transactions(self) -> Sequence[str]:
        """Transactional ids of the transactions that were decided, and whose markers may not all be written yet."""

    async def fence_transaction(self, transactional_id: str, producer_id: int, producer_epoch: int) -> None:
        """Have the coordinator abort what a producer has open, unless the id is another producer's by now.

        The producer is fenced. When it is aborted the transaction log says so. What is decided, or has ended, stays.
        """

    async def prepare_transactions(self) -> None:
        """Have the brokers make their topic of transactions, as the first transactional client does.

        Without it they refuse transactional records with a code that clients try again upon.
        """

    async def topic_configs(
        self, topic: str, names: Collection[str] | None = None
    ) -> Mapping[str, tuple[str | None, str | None]]:
        """By setting, of these ``names`` or of all: (effective value, what it would be without the topic's own)."""

    async def effective_configs(
        self, topics: Sequence[str], known: bytes | None = None
    ) -> tuple[bytes, Mapping[str, Mapping[str, str | None]] | None]:
        """The effective settings of many topics, with a digest of all that the broker said.

        None in their place if that is ``known`` still; topics that cannot be described are left out.
        """

    async def create_topic(
        self, topic: str, partitions: int, replication_factor: int, configs: Mapping[str, str]
    ) -> bytes:
        """The new topic's id. KafkaRefused with TOPIC_ALREADY_EXISTS (36) if there is one."""

    async def try_topics(self, topics: Collection[NewTopic]) -> Mapping[str, KafkaRefused]:
        """By name: the topics that the brokers would not create, and why. Nothing changes."""

    async def delete_topic_id(self, topic_id: bytes) -> None:
        """Delete the topic that has this id, and never one that was made in its place. Gone already is no error."""

    async def create_partitions(self, topic: str, total: int) -> None: ...

    async def alter_topic_configs(
        self, topic: str, configs: Mapping[str, str | None], validate_only: bool = False
    ) -> None:
        """Set these (None: back to the default), leave the others. ``validate_only`` asks whether the brokers would."""

    async def broker_configs(self, name: str) -> Mapping[int, str | None]:
        """The effective value of a broker setting at each broker, None where it does not know the setting."""

    async def cluster_config(self, name: str) -> str | None:
        """The cluster-wide dynamic value of a broker setting, None if it is not set."""

    async def alter_cluster_config(self, name: str, value: str | None, validate_only: bool = False) -> None:
        """Set it (None: remove it). ``validate_only`` asks whether the brokers would."""

    async def groups(self) -> Collection[str]:
        """The ids of all consumer groups that some coordinator knows, of whatever kind."""

    async def committed_offsets(
        self, groups: Collection[str], stable: bool = False
    ) -> Mapping[str, Mapping[TopicPartition, CommittedOffset]]:
        """What groups have committed, by (topic, partition). Groups that cannot be asked now are left out.

        ``stable``: so are those of which a transaction that commits offsets has not ended.
        """

    async def commit_offsets(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset], retention_ms: int | None = None
    ) -> Mapping[TopicPartition, Refused]:
        """Commit in a group's place, also while it has members; what was not committed, and why.

        Needs ``transaction.partition.verification.enable=false`` (COORDINATOR_NOT_AVAILABLE otherwise). With
        ``retention_ms`` the offsets expire after that time and not before, whatever becomes of the group; it must
        have no members then (UNKNOWN_MEMBER_ID otherwise), and the setting does not matter.
        """

    async def delete_offsets(
        self, group: str, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, Refused]:
        """Delete committed offsets; what was not deleted, and why (GROUP_SUBSCRIBED_TO_TOPIC: members are there)."""

    async def delete_group(self, group: str) -> None:
        """Delete a group without members. KafkaRefused with NON_EMPTY_GROUP (68) or GROUP_ID_NOT_FOUND (69)."""

    async def group_exists(self, group: str) -> bool:
        """Whether there is a group of this name, of whatever type, as its coordinator knows now."""

    async def acls(self, matching: AclFilter = EVERY_ACL) -> frozenset[AclBinding]:
        """The bindings that a filter matches, read now. The same object as before where none has changed.

        KafkaRefused with SECURITY_DISABLED (54) by a cluster without an authorizer.
        """

    async def create_acls(self, bindings: Collection[AclBinding]) -> None:
        """Create bindings; those that exist stay. KafkaRefused: some may have been created."""

    async def delete_acls(self, bindings: Collection[AclBinding]) -> None:
        """Delete exactly these bindings, those that there are. KafkaRefused: some may have been deleted."""

    async def produce_connection(self, broker_id: int, lane: str) -> ProduceConnection:
        """The connection of this ``lane`` to a broker: made if there is none that is open."""

    async def fetch_connection(self, broker_id: int, lane: str) -> FetchConnection: ...

    def transactions(self, transactional_id: str) -> Transactions:
        """The producer of a transactional id. It has not begun yet."""


class OtherCluster(ClusterApi, Protocol):
    """Access to another cluster, as its own brokers give it."""

    @property
    def cluster_id(self) -> str: ...

    async def close(self) -> None: ...
