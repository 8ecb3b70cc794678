"""What plugins may ask of this proxy's cluster: :class:`isthmus_plugins.api.ClusterApi` over the Kafka client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Final
from uuid import UUID

from isthmus.errors import AuthenticationFailed, ConnectionLost, KafkaError, OurBug, RequestTimedOut, UnsupportedVersion
from isthmus.kafka import results
from isthmus.kafka.acls import AclClient
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus.kafka.client import (
    EARLIEST,
    LATEST,
    LOG_END,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    ClusterClient,
    is_stale_metadata,
)
from isthmus.kafka.fetch_session import FORGOTTEN, NO_SESSION, FetchSession, SessionRequest, by_topic
from isthmus.kafka.group_existence import group_exists
from isthmus.kafka.groups import GroupClient
from isthmus.kafka.results import ProducerIdentity, ResourceType, TopicPartition, as_error
from isthmus.kafka.security import SecuritySpec
from isthmus.kafka.transactional_producer import TransactionalProducer
from isthmus_control.acls import EVERY_ACL, AclBinding, AclFilter
from isthmus_control.model import is_internal_topic
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    CommittedOffset,
    Fetched,
    FetchPartition,
    KafkaRefused,
    NewTopic,
    PartitionInfo,
    ProduceResult,
    ProducerFenced,
    ProducerState,
    Refused,
    TopicInfo,
    TransactionMarkers,
)
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import (
    NETWORK_EXCEPTION,
    THROTTLING_QUOTA_EXCEEDED,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_ID,
)
from isthmus_protocol.messages import build_request
from isthmus_protocol.record_requests import fetch_body, produce_body
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.throttling import throttle_ms
from isthmus_protocol.wire import Frame, MalformedFrame

POSITION_DEADLINE_S: Final = 10.0
"""How long positions in logs are asked for while leaders move: whoever needs them asks again."""
THROTTLED_MAX_S: Final = 60.0
"""A read that quotas hold up for longer fails: whoever waits for it is to know."""
PRODUCE_VERSION_MAX: Final = 11
"""Later ones add partitions to transactions implicitly, and name topics by id."""
MARKERS_VERSION_MAX: Final = 1
"""Later ones ask for epochs that rise with each transaction, which those of older clients do not."""
PRODUCE_MARGIN_S: Final = 5.0
ACKS_ALL: Final = -1
ACKS_LEADER: Final = 1
COMPLETING: Final = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")
"""States of transactions at their coordinator (KIP-664)."""
CLUSTER_WIDE: Final = ""
"""The BROKER resource that stands for all brokers."""
OFFSETS_RETENTION: Final = "offsets.retention.minutes"
TOPIC_SOURCE: Final = 1
"""ConfigSource of a topic's own settings."""


log = logging.getLogger("isthmus.cluster")


class _Errors:
    """The client's errors as plugins know them. Entered for every append and read, so it makes nothing."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(
            error, ConnectionLost | RequestTimedOut | AuthenticationFailed | UnsupportedVersion | MalformedFrame
        ):
            raise BrokerUnavailable(str(error)) from error
        if isinstance(error, KafkaError):
            if error.retriable or is_stale_metadata(error):
                raise BrokerUnavailable(str(error)) from error
            raise KafkaRefused(error.code, error.name, error.message or "") from error
        if isinstance(error, Exception) and not isinstance(
            error, TimeoutError | OurBug | BrokerUnavailable | KafkaRefused | ProducerFenced
        ):
            # It is all made of what a broker said: an answer that nobody foresaw must not end who asked.
            log.error("answer not understood", extra={"error": repr(error)}, exc_info=error)
            raise BrokerUnavailable(f"a broker's answer was not understood: {error!r}") from error


_ERRORS: Final = _Errors()


class ClusterAccess:
    """The cluster behind this proxy, under the proxy's own identity."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._groups = GroupClient(client)
        self._acls = AclClient(client)
        self._fetching: dict[tuple[int, str], FetchOverConnection] = {}
        self._topics: dict[str, tuple[results.TopicInfo, TopicInfo]] = {}
        """All topics as last read, by the client and for plugins."""

    # ---- topics ----

    @property
    def brokers_changed_at(self) -> float:
        return self._client.brokers_changed_at

    def throttled(self) -> str | None:
        """What quotas of the cluster keep this proxy waiting for, in words; None: nothing."""
        asked: dict[str, list[str]] = {}
        for address, api_key in self._client.throttled():
            asked.setdefault(address, []).append(ApiKey(api_key).name)
        if not asked:
            return None
        where = "; ".join(f"broker {address} on {', '.join(apis)}" for address, apis in asked.items())
        return (
            f"quotas throttle this proxy: {where}. Raise what applies to its user, or to client id "
            f"{self._client.client_id} (kafka-configs --entity-type clients)"
        )

    async def topics(self) -> Mapping[str, TopicInfo]:
        """All topics, read now."""
        with _ERRORS:
            found = await self._client.refresh()
        self._topics = {name: (info, self._as_read(info)) for name, info in found.items() if info.topic_id is not None}
        return MappingProxyType({name: topic for name, (_, topic) in self._topics.items()})

    def topic_name(self, topic_id: bytes) -> str | None:
        """The name of a topic id, as last read."""
        return self._client.topic_name(UUID(bytes=topic_id))

    async def topic(self, name: str) -> TopicInfo | None:
        """One topic, read now; None if there is none. KafkaRefused where that is not for this proxy to know."""
        with _ERRORS:
            info = (await self._client.refresh([name])).get(name)
            if info is None and not self._client.may_describe(name):
                raise KafkaError(TOPIC_AUTHORIZATION_FAILED, name)
        return None if info is None or info.topic_id is None else self._as_read(info)

    async def topics_named(self, names: Collection[str]) -> Mapping[str, TopicInfo]:
        """Those of some topics that there are, read now."""
        if not names:
            return {}
        with _ERRORS:
            found = await self._client.refresh(names)
        return {name: self._as_read(info) for name, info in found.items() if info.topic_id is not None}

    def _as_read(self, info: results.TopicInfo) -> TopicInfo:
        """A topic for plugins: the same object as long as it is the same, and all topics are read now and then."""
        before = self._topics.get(info.name)
        return before[1] if before is not None and before[0] is info else _topic(info)

    async def unknown_topics(self, topic_ids: Collection[bytes], cluster_id: str) -> frozenset[bytes]:
        """Of these topics, those that no broker of the cluster has any more."""
        with _ERRORS:
            await self._client.refresh(())
            asked = frozenset(UUID(bytes=topic_id) for topic_id in topic_ids)
            found = [
                await self._client.unknown_topic_ids(broker_id, asked, cluster_id) for broker_id in self._client.brokers
            ]
        return frozenset(topic_id.bytes for topic_id in frozenset.intersection(*found)) if found else frozenset()

    async def leader_of(self, topic: str, partition: int) -> int | None:
        """The partition's leader, read now; None if it has none."""
        with _ERRORS:
            info = (await self._client.refresh([topic])).get(topic)
        known = info.partitions.get(partition) if info is not None else None
        return known.leader if known is not None and known.leader >= 0 else None

    async def broker_racks(self) -> Mapping[int, str | None]:
        """The racks of the brokers that are there, by id; as last read."""
        return {broker_id: broker.rack for broker_id, broker in self._client.brokers.items()}

    async def reassigned(self) -> Collection[tuple[str, int]]:
        """Partitions whose replicas are being changed now, by whomever."""
        with _ERRORS:
            return {(place.topic, place.partition) for place in await self._client.list_partition_reassignments()}

    async def reassign(
        self, replicas: Mapping[tuple[str, int], Sequence[int]]
    ) -> Mapping[tuple[str, int], KafkaRefused]:
        """Have partitions get these replicas; those for which that is refused, and why."""
        if not replicas:
            return {}
        with _ERRORS:
            answers = await self._client.alter_partition_reassignments(
                {TopicPartition(*place): wanted for place, wanted in replicas.items()}
            )
        return {
            (place.topic, place.partition): KafkaRefused(error.code, error.name, error.message or "")
            for place, error in answers.items()
            if error is not None
        }

    async def topic_configs(
        self, topic: str, names: Collection[str] | None = None
    ) -> Mapping[str, tuple[str | None, str | None]]:
        """By setting: (effective value, what it would be without the topic's own). ``names``: of these alone."""
        with _ERRORS:
            keys = None if names is None else sorted(names)
            answer = (await self._client.describe_configs(ResourceType.TOPIC, [topic], keys))[topic]
            if answer.error is not None:
                raise answer.error
        found = {}
        for entry in answer.entries.values():
            inherited = next((each.value for each in entry.synonyms if each.source != TOPIC_SOURCE), None)
            found[entry.name] = (entry.value, entry.value if entry.source != TOPIC_SOURCE else inherited)
        return found

    async def effective_configs(
        self, topics: Sequence[str], known: bytes | None = None
    ) -> tuple[bytes, Mapping[str, Mapping[str, str | None]] | None]:
        """The effective settings of many topics, with a digest; None in their place if that is ``known`` still."""
        if not topics:
            return b"", {}
        with _ERRORS:
            digest, answer = await self._client.describe_configs_raw(ResourceType.TOPIC, topics, known)
        if answer is None:
            return digest, None
        return digest, {
            result.resource_name: {entry.name: entry.value for entry in result.configs}
            for result in answer.results
            if not result.error_code
        }

    async def create_topic(
        self, topic: str, partitions: int, replication_factor: int, configs: Mapping[str, str]
    ) -> bytes:
        """Create a topic; its id."""
        with _ERRORS:
            wanted = results.NewTopic(topic, partitions, replication_factor, configs)
            created = (await self._client.create_topics([wanted]))[topic]
            if created.error is not None:
                raise created.error
            if created.topic_id is None:
                raise BrokerUnavailable(f"{topic} was created, but the broker did not tell its id")
        return created.topic_id.bytes

    async def try_topics(self, topics: Collection[NewTopic]) -> Mapping[str, KafkaRefused]:
        """By name: the topics that the brokers would not create, and why."""
        if not topics:
            return {}
        with _ERRORS:
            asked = [results.NewTopic(*topic) for topic in topics]
            answers = await self._client.create_topics(asked, validate_only=True)
        refused = {}
        for topic in topics:
            try:
                with _ERRORS:
                    if (error := answers[topic.name].error) is not None:
                        raise error
            except KafkaRefused as error:
                refused[topic.name] = error
        return refused

    async def delete_topic_id(self, topic_id: bytes) -> None:
        """Delete the topic that has this id. Gone already is no error."""
        with _ERRORS:
            error = await self._client.delete_topic_id(UUID(bytes=topic_id))
            if error is not None and error.code != UNKNOWN_TOPIC_ID:
                raise error

    async def create_partitions(self, topic: str, total: int) -> None:
        with _ERRORS:
            error = (await self._client.create_partitions({topic: total}))[topic]
            if error is not None:
                raise error

    async def alter_topic_configs(
        self, topic: str, configs: Mapping[str, str | None], validate_only: bool = False
    ) -> None:
        """Set these (None: back to the default), leave the others. ``validate_only`` asks whether the brokers would."""
        with _ERRORS:
            await self._client.incremental_alter_configs(
                ResourceType.TOPIC, topic, configs, validate_only=validate_only
            )

    # ---- settings of brokers ----

    async def broker_configs(self, name: str) -> Mapping[int, str | None]:
        """The effective value of a broker setting at each broker, None where it does not know the setting."""
        with _ERRORS:
            await self._client.refresh(())
            found = await self._client.describe_configs(
                ResourceType.BROKER,
                [str(broker_id) for broker_id in self._client.brokers],
                [name],
                deadline_s=POSITION_DEADLINE_S,
            )
            for described in found.values():
                if described.error is not None:
                    raise described.error
        return {
            int(broker_id): described.entries[name].value if name in described.entries else None
            for broker_id, described in found.items()
        }

    async def cluster_config(self, name: str) -> str | None:
        """The cluster-wide dynamic value of a broker setting, None if it is not set."""
        with _ERRORS:
            described = (await self._client.describe_configs(ResourceType.BROKER, [CLUSTER_WIDE], [name]))[CLUSTER_WIDE]
            if described.error is not None:
                raise described.error
        entry = described.entries.get(name)
        return None if entry is None else entry.value

    async def alter_cluster_config(self, name: str, value: str | None, validate_only: bool = False) -> None:
        """Set it (None: remove it). ``validate_only`` asks whether the brokers would."""
        with _ERRORS:
            await self._client.incremental_alter_configs(
                ResourceType.BROKER, CLUSTER_WIDE, {name: value}, validate_only=validate_only
            )

    # ---- logs ----

    async def log_end(self, topic: str, partition: int) -> int:
        """The leader's log end offset, which may be above the high watermark."""
        return await self._offset(topic, partition, LATEST, LOG_END)

    async def high_watermark(self, topic: str, partition: int) -> int:
        return await self._offset(topic, partition, LATEST)

    async def last_stable_offset(self, topic: str, partition: int) -> int:
        """All transactions that began before it have ended."""
        return await self._offset(topic, partition, LATEST, READ_COMMITTED)

    async def offsets_for_times(
        self, asked: Mapping[tuple[str, int], int]
    ) -> Mapping[tuple[str, int], tuple[int, int]]:
        """By (topic, partition) and time: the broker's (offset, time), (-1, -1) for none."""
        with _ERRORS:
            found = await self._client.list_offsets(
                {TopicPartition(*place): time for place, time in asked.items()}, deadline_s=POSITION_DEADLINE_S
            )
        return {
            (place.topic, place.partition): (listed.offset, listed.timestamp_ms)
            for place, listed in found.items()
            if listed.error is None
        }

    async def log_start(self, topic: str, partition: int) -> int:
        return await self._offset(topic, partition, EARLIEST)

    async def _offset(self, topic: str, partition: int, timestamp: int, isolation: int = READ_UNCOMMITTED) -> int:
        place = TopicPartition(topic, partition)
        with _ERRORS:
            found = await self._client.list_offsets(
                {place: timestamp}, isolation=isolation, deadline_s=POSITION_DEADLINE_S
            )
            if (error := found[place].error) is not None:
                raise error
        return found[place].offset

    async def log_ends(self, partitions: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        """The log ends of many partitions; those that cannot be read now are left out."""
        return await self._ends(partitions, LOG_END)

    async def high_watermarks(self, partitions: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        """The high watermarks of many partitions; those that cannot be read now are left out."""
        return await self._ends(partitions, READ_UNCOMMITTED)

    async def _ends(self, partitions: Collection[tuple[str, int]], isolation: int) -> Mapping[tuple[str, int], int]:
        with _ERRORS:
            found = await self._client.list_offsets(
                {TopicPartition(*place): LATEST for place in partitions},
                isolation=isolation,
                deadline_s=POSITION_DEADLINE_S,
            )
        return {
            (place.topic, place.partition): listed.offset for place, listed in found.items() if listed.error is None
        }

    async def epoch_end(self, topic: str, partition: int, epoch: int) -> tuple[int, int]:
        """The leader's largest leader epoch up to ``epoch``, and where it ends; (-1, -1) if it has none."""
        with _ERRORS:
            return await self._client.epoch_end(topic, partition, epoch, deadline_s=POSITION_DEADLINE_S)

    async def delete_records(self, topic: str, partition: int, before: int) -> int:
        """Delete the records below an offset; returns where the log starts now."""
        place = TopicPartition(topic, partition)
        with _ERRORS:
            deleted = (await self._client.delete_records({place: before}, deadline_s=POSITION_DEADLINE_S))[place]
            if deleted.error is not None:
                raise deleted.error
        return deleted.low_watermark

    async def producers(self, topic: str, partition: int) -> Mapping[int, ProducerState]:
        """What the partition's leader knows of producers, by their ids."""
        place = TopicPartition(topic, partition)
        with _ERRORS:
            producers = (await self._client.describe_producers([place], deadline_s=POSITION_DEADLINE_S))[place]
            if producers.error is not None:
                raise producers.error
        return {
            state.producer_id: ProducerState(
                state.producer_epoch, state.last_sequence, state.coordinator_epoch, state.current_txn_start_offset
            )
            for state in producers.states
        }

    async def completing_transactions(self) -> Sequence[str]:
        """Transactional ids of the transactions that were decided, and whose markers may not all be written yet."""
        with _ERRORS:
            return await self._client.list_transactions(COMPLETING)

    async def fence_transaction(self, transactional_id: str, producer_id: int, producer_epoch: int) -> None:
        """Have the coordinator abort what a producer has open, unless the id is another producer's by now."""
        producer = ProducerIdentity(producer_id, producer_epoch)
        with _ERRORS:
            await self._client.fence_transaction(transactional_id, producer, deadline_s=POSITION_DEADLINE_S)

    async def prepare_transactions(self) -> None:
        """Have the brokers make their topic of transactions, as the first transactional client does."""
        with _ERRORS:
            await self._client.coordinator("isthmus", transaction=True, deadline_s=POSITION_DEADLINE_S)

    # ---- consumer groups ----

    async def groups(self) -> Collection[str]:
        """The ids of all groups that some coordinator knows."""
        with _ERRORS:
            return await self._groups.ids()

    async def committed_offsets(
        self, groups: Collection[str], stable: bool = False
    ) -> Mapping[str, Mapping[tuple[str, int], CommittedOffset]]:
        """What groups have committed; those that cannot be asked now are left out."""
        with _ERRORS:
            return await self._groups.committed(groups, stable)

    async def commit_offsets(
        self, group: str, offsets: Mapping[tuple[str, int], CommittedOffset], retention_ms: int | None = None
    ) -> Mapping[tuple[str, int], Refused]:
        """Commit in a group's place; what was not committed, and why."""
        with _ERRORS:
            return await self._groups.commit(group, offsets, retention_ms)

    async def delete_offsets(
        self, group: str, partitions: Collection[tuple[str, int]]
    ) -> Mapping[tuple[str, int], Refused]:
        """Delete positions; what was not deleted, and why."""
        with _ERRORS:
            return await self._groups.delete_offsets(group, partitions)

    async def delete_group(self, group: str) -> None:
        with _ERRORS:
            await self._groups.delete(group)

    async def group_exists(self, group: str) -> bool:
        """Whether there is a group of this name, of whatever type."""
        with _ERRORS:
            return await group_exists(self._client, group)

    # ---- access control ----

    async def acls(self, matching: AclFilter = EVERY_ACL) -> frozenset[AclBinding]:
        """The bindings that a filter matches, read now."""
        with _ERRORS:
            return await self._acls.matching(matching)

    async def create_acls(self, bindings: Collection[AclBinding]) -> None:
        with _ERRORS:
            await self._acls.create(bindings)

    async def delete_acls(self, bindings: Collection[AclBinding]) -> None:
        with _ERRORS:
            await self._acls.delete(bindings)

    # ---- connections of a plugin's own ----

    async def produce_connection(self, broker_id: int, lane: str) -> ProduceOverConnection:
        with _ERRORS:
            return ProduceOverConnection(await self._client.to(broker_id, lane))

    async def fetch_connection(self, broker_id: int, lane: str) -> FetchOverConnection:
        with _ERRORS:
            connection = await self._client.to(broker_id, lane)
        known = self._fetching.get((broker_id, lane))
        if known is None or known.connection is not connection:
            known = self._fetching[broker_id, lane] = FetchOverConnection(connection)
        return known

    def transactions(self, transactional_id: str) -> Transactions:
        """The producer of a transactional id."""
        return Transactions(self._client, transactional_id)


class Transactions:
    """Transactions of one transactional id."""

    def __init__(self, client: ClusterClient, transactional_id: str) -> None:
        self._producer = TransactionalProducer(client, transactional_id)

    async def begin(self) -> None:
        """Fence whoever had the id before."""
        with _ERRORS:
            await self._producer.begin()

    async def open(self, places: Collection[tuple[str, int]], group: str) -> None:
        """Have the transaction that :meth:`commit` ends begin, with these partitions."""
        with _ERRORS:
            await self._producer.open(places, group)

    async def commit(
        self,
        batches: Mapping[tuple[str, int], Sequence[bytes]],
        group: str,
        offsets: Mapping[tuple[str, int], CommittedOffset],
    ) -> Mapping[tuple[str, int], int]:
        """Append batches and commit a group's offsets, all or nothing; where logs go on behind what was appended."""
        with _ERRORS:
            return await self._producer.commit(batches, group, offsets)


class OtherCluster(ClusterAccess):
    """Another cluster, over a client of its own."""

    def __init__(self, client: ClusterClient) -> None:
        super().__init__(client)
        assert client.cluster_id is not None
        self.cluster_id = client.cluster_id

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()


async def other_cluster(bootstrap: Sequence[str], security: SecuritySpec) -> OtherCluster:
    """Raises BrokerUnavailable."""
    client = ClusterClient(bootstrap, security)
    try:
        with _ERRORS:
            await client.start()
    except BaseException:
        await client.close()
        raise
    return OtherCluster(client)


def _topic(info: results.TopicInfo) -> TopicInfo:
    assert info.topic_id is not None
    partitions = [info.partitions[index] for index in sorted(info.partitions)]
    return TopicInfo(
        info.name,
        info.topic_id.bytes,
        tuple(PartitionInfo(each.leader, each.leader_epoch, each.replicas, each.isr) for each in partitions),
        len(partitions[0].replicas) if partitions else 1,
        info.is_internal or is_internal_topic(info.name),
    )


class ProduceOverConnection:
    """Appends whole batches over one connection."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection

    @property
    def opened_at(self) -> float:
        return self._connection.opened_at

    @property
    def is_open(self) -> bool:
        return self._connection.is_open

    async def produce(
        self,
        requests: Sequence[Mapping[tuple[str, int], bytes]],
        timeout_ms: int,
        transactional_id: str | None = None,
    ) -> list[dict[tuple[str, int], ProduceResult]]:
        """Append batches, in each request one for each (topic, partition). Raises BrokerUnavailable: fate unknown.

        All but the last have acks=1.
        """
        with _ERRORS:
            version = self._connection.version(ApiKey.PRODUCE, PRODUCE_VERSION_MAX)
            bodies = []
            for number, batches in enumerate(requests, 1):
                topics: dict[str, dict[int, Frame]] = {}
                for (topic, partition), batch in batches.items():
                    topics.setdefault(topic, {})[partition] = batch
                acks = ACKS_ALL if number == len(requests) else ACKS_LEADER
                bodies.append(produce_body(topics, timeout_ms, transactional_id, acks))
            timeout = timeout_ms / 1000 + PRODUCE_MARGIN_S
            answers = self._connection.send_bodies(ApiKey.PRODUCE, version, bodies, timeout=timeout)
            return [self._results(version, await answer) for answer in answers]

    def _results(self, version: int, frame: bytes | bytearray) -> dict[tuple[str, int], ProduceResult]:
        answered = [
            (name.decode(), *result) for name, results in peeks.produce_response(version, frame) for result in results
        ]
        if any(code for _, _, code, _ in answered):
            return _refused(self._connection.decode(ApiKey.PRODUCE, version, frame))
        return {
            (topic, partition): ProduceResult(0, "NONE", base_offset, "")
            for topic, partition, _, base_offset in answered
        }

    async def write_markers(
        self, markers: Sequence[TransactionMarkers], timeout_ms: int
    ) -> dict[tuple[str, int], ProduceResult]:
        """Write transaction markers, for each partition those of one producer. Raises BrokerUnavailable: fate unknown.

        The broker answers for each entry when the in-sync replicas have it.
        """
        # Entries of one producer share their place in the answer, so each reports the last of them alone: what was
        # really written shows in the log's end.
        entries = [
            {
                "producer_id": marker.producer_id,
                "producer_epoch": marker.producer_epoch,
                "transaction_result": marker.committed,
                "coordinator_epoch": marker.coordinator_epoch,
                "topics": [{"name": marker.topic, "partition_indexes": [marker.partition]}],
            }
            for marker in markers
            for _ in range(marker.times)
        ]
        with _ERRORS:
            version = self._connection.version(ApiKey.WRITE_TXN_MARKERS, MARKERS_VERSION_MAX)
            answer = await self._connection.request(
                build_request(ApiKey.WRITE_TXN_MARKERS, version, {"markers": entries}),
                timeout=timeout_ms / 1000 + PRODUCE_MARGIN_S,
            )
        results: dict[tuple[str, int], ProduceResult] = {}
        for entry in answer.markers:
            for topic in entry.topics:
                for result in topic.partitions:
                    place = (topic.name, result.partition_index)
                    error = as_error(result.error_code)
                    if error is not None:
                        results[place] = ProduceResult(error.code, error.name, -1, error.message or "")
                    else:
                        results.setdefault(place, ProduceResult(0, "NONE", -1, ""))
        return results

    def close(self) -> None:
        self._connection.abort()


def _refused(answer: Any) -> dict[tuple[str, int], ProduceResult]:
    """The results of a Produce of which some partition was refused, with what the broker says of it."""
    results = {}
    for topic in answer.responses:
        for result in topic.partition_responses:
            error = as_error(result.error_code, getattr(result, "error_message", None))
            results[topic.name, result.index] = ProduceResult(
                0 if error is None else error.code,
                "NONE" if error is None else error.name,
                result.base_offset,
                "" if error is None else error.message or "",
            )
    return results


class FetchOverConnection:
    """Reads whole batches over one connection, one request at a time."""

    def __init__(self, connection: BrokerConnection) -> None:
        self.connection = connection
        self._session = FetchSession()

    async def fetch(
        self,
        partitions: Sequence[FetchPartition],
        wait_max_ms: int,
        bytes_max: int,
        read_committed: bool = False,
        only_changes: bool = False,
    ) -> list[Fetched]:
        """Read each of the partitions from its offset on; ``only_changes``: those of which there is something new.

        Waits while a quota throttles this connection. Raises BrokerUnavailable.
        """
        wanted = {(each.topic_id, each.partition): each for each in partitions}
        isolation = READ_COMMITTED if read_committed else READ_UNCOMMITTED
        with _ERRORS:
            version = self.connection.version(ApiKey.FETCH)
            throttled_s = 0.0
            while True:
                asked = (
                    self._session.request(wanted) if only_changes else SessionRequest(*NO_SESSION, by_topic(wanted), {})
                )
                frame = await self.connection.send_body(
                    ApiKey.FETCH,
                    version,
                    (
                        fetch_body(
                            version,
                            asked.topics,
                            asked.forgotten,
                            wait_max_ms=wait_max_ms,
                            bytes_max=bytes_max,
                            isolation=isolation,
                            session_id=asked.session_id,
                            session_epoch=asked.epoch,
                        ),
                    ),
                    timeout=wait_max_ms / 1000 + 30,
                )
                error_code, session_id, found = peeks.fetch_response(version, frame)
                if only_changes and error_code in FORGOTTEN:
                    self._session.forget()
                    continue
                error = as_error(error_code or 0)
                if error is not None:
                    raise error
                if only_changes:
                    self._session.answered(session_id or 0)
                answered = sum(len(fetched) for _, fetched in found)
                if not answered and (throttled_ms := throttle_ms(ApiKey.FETCH, version, frame)):
                    # It has read nothing, which says nothing of the logs (KIP-219).
                    throttled_s += throttled_ms / 1000
                    if throttled_s > THROTTLED_MAX_S:
                        where = self.connection.address
                        raise KafkaError(THROTTLING_QUOTA_EXCEEDED, f"a quota has had {where} read nothing for so long")
                    await asyncio.sleep(throttled_ms / 1000)
                    continue
                if answered < len(wanted) and not only_changes:
                    raise KafkaError(NETWORK_EXCEPTION, f"{self.connection.address} answers without some partitions")
                break
        return [
            Fetched(
                topic_id,
                index,
                code,
                high_watermark,
                log_start or 0,
                memoryview(b"") if records is None else records,
                stable,
                tuple(aborted or ()),
            )
            for topic_id, fetched in found
            for index, code, high_watermark, stable, log_start, aborted, records in fetched
        ]

    def close(self) -> None:
        self.connection.abort()
