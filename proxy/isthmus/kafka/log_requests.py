"""What the proxy asks the leaders of partitions: their logs' limits, records, producers; appends and deletions."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from isthmus.errors import KafkaError
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus.kafka.cluster_connections import ClusterConnections, is_stale_metadata
from isthmus.kafka.joined_requests import JoinedRequests
from isthmus.kafka.results import (
    DeletedRecords,
    EpochEnd,
    Fetched,
    FetchFrom,
    ListedOffset,
    PartitionInfo,
    Produced,
    Producers,
    ProducerState,
    RawFetch,
    TopicPartition,
    as_error,
)
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import NETWORK_EXCEPTION, THROTTLING_QUOTA_EXCEEDED, UNKNOWN_TOPIC_OR_PARTITION
from isthmus_protocol.messages import build_request, decode_response
from isthmus_protocol.record_requests import LIST_OFFSETS_VERSIONS, list_offsets_body
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import Frame

EARLIEST: Final = -2
LATEST: Final = -1
MAX_TIMESTAMP: Final = -3
"""Special timestamps of ListOffsets."""

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1
LOG_END: Final = -1
"""For ``list_offsets`` only: the leader's log end, which may be above the high watermark."""
_DEBUGGING_REPLICA: Final = -2
"""A ``replica_id`` that is no consumer's, so that ListOffsets is not limited to the high watermark."""


class LogRequests(ClusterConnections):
    """Logs of partitions, each at its leader."""

    async def list_offsets(
        self,
        timestamps: Mapping[TopicPartition, int],
        *,
        isolation: int = READ_UNCOMMITTED,
        deadline_s: float | None = None,
    ) -> dict[TopicPartition, ListedOffset]:
        """Offsets by timestamp (milliseconds, or EARLIEST, LATEST, MAX_TIMESTAMP), asked of the leaders.

        LATEST is the high watermark, with READ_COMMITTED the last stable offset, and with LOG_END the log end.
        """

        async def ask(
            connection: BrokerConnection, asked: Sequence[TopicPartition]
        ) -> Mapping[TopicPartition, ListedOffset]:
            # Without its epoch, a broker that is no longer the leader would answer LOG_END, too.
            wanted = {one: (timestamps[one], self._known_epoch(one)) for one in asked}

            async def send(together: Mapping[TopicPartition, tuple[int, int]]) -> Mapping[TopicPartition, ListedOffset]:
                return await self._list_offsets(connection, isolation, together)

            times = {timestamps[one] for one in asked}
            if len(times) > 1 or max(times) >= 0:
                return await send(wanted)
            joined: JoinedRequests[TopicPartition, tuple[int, int], ListedOffset] = self._joined(
                connection, ApiKey.LIST_OFFSETS, isolation, *times
            )
            return await joined.ask(wanted, send)

        return await self.at_leaders(
            timestamps.keys(), ask, lambda error: ListedOffset(-1, -1, -1, error), deadline_s=deadline_s
        )

    def _known_epoch(self, place: TopicPartition) -> int:
        """The leader epoch of a partition as last read. Raises KafkaError."""
        topic = self._topics.get(place.topic)
        info = topic.partitions.get(place.partition) if topic is not None else None
        if info is None:
            raise KafkaError(UNKNOWN_TOPIC_OR_PARTITION, f"{place.topic}-{place.partition}")
        return info.leader_epoch

    async def _list_offsets(
        self, connection: BrokerConnection, isolation: int, asked: Mapping[TopicPartition, tuple[int, int]]
    ) -> dict[TopicPartition, ListedOffset]:
        """``asked``: by partition, the time and the leader epoch."""

        topics: dict[str, list[tuple[int, int, int]]] = {}
        for one, (timestamp, epoch) in asked.items():
            topics.setdefault(one.topic, []).append((one.partition, epoch, timestamp))
        version = connection.version(ApiKey.LIST_OFFSETS, LIST_OFFSETS_VERSIONS[1])
        body = list_offsets_body(
            version,
            topics,
            replica_id=_DEBUGGING_REPLICA if isolation == LOG_END else -1,
            isolation=max(isolation, READ_UNCOMMITTED),
            timeout_ms=int(self.request_timeout_s * 1000),
        )
        frame = await connection.send_body(ApiKey.LIST_OFFSETS, version, (body,), timeout=self.request_timeout_s)
        return {
            TopicPartition(topic, partition): ListedOffset(offset, timestamp, epoch, as_error(error_code))
            for topic, listed in connection.read(lambda: _listed(version, frame))
            for partition, offset, timestamp, epoch, error_code in listed
        }

    async def fetch_raw(
        self,
        node_id: int,
        wanted: Sequence[FetchFrom],
        *,
        wait_ms_max: int = 500,
        bytes_min: int = 1,
        bytes_max: int = 50 << 20,
        isolation: int = READ_UNCOMMITTED,
        lane: str = "fetch",
        at_most: int | None = None,
    ) -> RawFetch:
        """Fetch partitions of one leader, without a fetch session and without decoding. Not repeated."""
        connection = await self.to(node_id, lane)
        version = connection.version(ApiKey.FETCH, at_most)
        topics: dict[str, list[dict[str, int]]] = {}
        for one in wanted:
            topics.setdefault(one.topic, []).append(
                {
                    "partition": one.partition,
                    "current_leader_epoch": one.leader_epoch,
                    "fetch_offset": one.offset,
                    "last_fetched_epoch": one.fetched_epoch,
                    "partition_max_bytes": one.bytes_max,
                }
            )
        ids = {name: (await self.topic(name)).topic_id for name in topics} if version >= 13 else {}
        payload = build_request(
            ApiKey.FETCH,
            version,
            {
                "replica_id": -1,
                "max_wait": wait_ms_max,
                "min_bytes": bytes_min,
                "max_bytes": bytes_max,
                "isolation_level": isolation,
                "session_id": 0,
                "session_epoch": -1,
                "topics": [
                    {"topic": name, "topic_id": ids.get(name), "partitions": partitions}
                    for name, partitions in topics.items()
                ],
            },
        )
        frame = await connection.request_raw(payload, timeout=self.request_timeout_s + wait_ms_max / 1000)
        return RawFetch(version, frame, {topic_id: name for name, topic_id in ids.items() if topic_id is not None})

    async def fetch(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        bytes_max: int = 1 << 20,
        wait_ms_max: int = 500,
        isolation: int = READ_UNCOMMITTED,
        lane: str = "fetch",
        fetched_epoch: int = -1,
        deadline_s: float | None = None,
    ) -> Fetched:
        """Fetch one partition from its leader, wherever that moves. Other errors are in the result."""

        async def attempt() -> Fetched:
            info = await self.leader(topic, partition)
            raw = await self.fetch_raw(
                info.leader,
                [FetchFrom(topic, partition, offset, bytes_max, info.leader_epoch, fetched_epoch)],
                wait_ms_max=wait_ms_max,
                isolation=isolation,
                lane=lane,
            )
            fetched = decode_fetch(raw).get(TopicPartition(topic, partition))
            if fetched is None:  # a quota has nothing read now
                raise KafkaError(THROTTLING_QUOTA_EXCEEDED, f"broker {info.leader} answers without the partition")
            if fetched.error is not None and is_stale_metadata(fetched.error):
                raise fetched.error
            return fetched

        return await self.retrying(attempt, topics=[topic], deadline_s=deadline_s)

    async def produce_raw(
        self,
        batches: Mapping[TopicPartition, bytes | bytearray | memoryview],
        *,
        acks: int = -1,
        transactional_id: str | None = None,
        timeout_s: float | None = None,
        at_most: int = 11,
        lane: str = "produce",
    ) -> dict[TopicPartition, Produced]:
        """Append one record batch (base offset 0) to each partition. Never repeated.

        ``acks`` is -1 or 1. ``at_most`` keeps to topic names (v13 has ids), and to versions that do not add partitions
        to transactions (v12). NETWORK_EXCEPTION and REQUEST_TIMED_OUT leave open whether a batch was appended.
        """
        if acks == 0:
            raise ValueError("acks=0 has no answer")
        timeout_s = timeout_s or self.request_timeout_s

        async def ask(connection: BrokerConnection, asked: Sequence[TopicPartition]) -> dict[TopicPartition, Produced]:
            version = connection.version(ApiKey.PRODUCE, at_most)
            ids = {one.topic: (await self.topic(one.topic)).topic_id for one in asked} if version >= 13 else {}
            names = {topic_id: name for name, topic_id in ids.items()}
            topics = _by_topic(
                asked,
                lambda one: {"index": one.partition, "records": bytes(batches[one])},
                array="partition_data",
            )
            answer = await connection.request(
                build_request(
                    ApiKey.PRODUCE,
                    version,
                    {
                        "transactional_id": transactional_id,
                        "acks": acks,
                        "timeout": int(timeout_s * 1000),
                        "topic_data": [{**topic, "topic_id": ids.get(topic["name"])} for topic in topics],
                    },
                ),
                timeout=timeout_s + 5,
            )
            return {
                TopicPartition(topic.name if version < 13 else names[topic.topic_id], result.index): Produced(
                    result.base_offset,
                    -1 if result.log_append_time is None else _milliseconds(result.log_append_time),
                    getattr(result, "log_start_offset", -1),
                    as_error(result.error_code, getattr(result, "error_message", None)),
                )
                for topic in answer.responses
                for result in topic.partition_responses
            }

        return await self.at_leaders(
            batches.keys(), ask, lambda error: Produced(-1, -1, -1, error), lane=lane, repeat=False
        )

    async def epoch_end(
        self, topic: str, partition: int, epoch: int, *, deadline_s: float | None = None
    ) -> tuple[int, int]:
        """(Largest leader epoch of the log up to ``epoch``, where it ends), (-1, -1) if there is none (KIP-101)."""

        place = TopicPartition(topic, partition)

        async def ask(connection: BrokerConnection, info: PartitionInfo) -> tuple[int, int]:
            async def send(together: Mapping[TopicPartition, tuple[int, int]]) -> Mapping[TopicPartition, EpochEnd]:
                return await self._epoch_ends(connection, together)

            joined: JoinedRequests[TopicPartition, tuple[int, int], EpochEnd] = self._joined(
                connection, ApiKey.OFFSET_FOR_LEADER_EPOCH
            )
            found = (await joined.ask({place: (info.leader_epoch, epoch)}, send)).get(place)
            if found is None:
                raise KafkaError(NETWORK_EXCEPTION, f"{connection.address} says nothing of it in its answer")
            if found.error is not None:
                raise found.error
            return found.epoch, found.end_offset

        return await self.request_leader(topic, partition, ask, deadline_s=deadline_s)

    async def _epoch_ends(
        self, connection: BrokerConnection, asked: Mapping[TopicPartition, tuple[int, int]]
    ) -> dict[TopicPartition, EpochEnd]:
        """``asked``: by partition, its leader epoch and the one that is asked for."""
        topics: dict[str, list[dict[str, int]]] = {}
        for one, (current, epoch) in asked.items():
            entry = {"partition": one.partition, "current_leader_epoch": current, "leader_epoch": epoch}
            topics.setdefault(one.topic, []).append(entry)
        answer = await connection.call(
            ApiKey.OFFSET_FOR_LEADER_EPOCH,
            {
                "replica_id": _DEBUGGING_REPLICA,
                "topics": [{"topic": name, "partitions": entries} for name, entries in topics.items()],
            },
            timeout=self.request_timeout_s,
        )
        return {
            TopicPartition(topic.topic, found.partition): EpochEnd(
                found.leader_epoch, found.end_offset, as_error(found.error_code)
            )
            for topic in answer.topics
            for found in topic.partitions
        }

    async def describe_producers(
        self, partitions: Collection[TopicPartition], *, deadline_s: float | None = None
    ) -> dict[TopicPartition, Producers]:
        """The producer states of partitions, as their leaders have them (KIP-664)."""

        async def ask(
            connection: BrokerConnection, asked: Sequence[TopicPartition]
        ) -> Mapping[TopicPartition, Producers]:
            async def send(together: Mapping[TopicPartition, None]) -> Mapping[TopicPartition, Producers]:
                return await self._describe_producers(connection, together)

            joined: JoinedRequests[TopicPartition, None, Producers] = self._joined(
                connection, ApiKey.DESCRIBE_PRODUCERS
            )
            return await joined.ask(dict.fromkeys(asked), send)

        return await self.at_leaders(partitions, ask, lambda error: Producers((), error), deadline_s=deadline_s)

    async def _describe_producers(
        self, connection: BrokerConnection, asked: Iterable[TopicPartition]
    ) -> dict[TopicPartition, Producers]:
        topics: dict[str, list[int]] = {}
        for one in asked:
            topics.setdefault(one.topic, []).append(one.partition)
        answer = await connection.call(
            ApiKey.DESCRIBE_PRODUCERS,
            {"topics": [{"name": name, "partition_indexes": indexes} for name, indexes in topics.items()]},
            timeout=self.request_timeout_s,
        )
        return {
            TopicPartition(topic.name, result.partition_index): Producers(
                tuple(
                    ProducerState(
                        state.producer_id,
                        state.producer_epoch,
                        state.last_sequence,
                        state.last_timestamp,
                        state.coordinator_epoch,
                        state.current_txn_start_offset,
                    )
                    for state in result.active_producers
                ),
                as_error(result.error_code, result.error_message),
            )
            for topic in answer.topics
            for result in topic.partitions
        }

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, deadline_s: float | None = None
    ) -> dict[TopicPartition, DeletedRecords]:
        """Delete records below an offset (-1: all below the high watermark). Doing it twice changes nothing."""

        async def ask(
            connection: BrokerConnection, asked: Sequence[TopicPartition]
        ) -> dict[TopicPartition, DeletedRecords]:
            answer = await connection.call(
                ApiKey.DELETE_RECORDS,
                {
                    "topics": _by_topic(asked, lambda one: {"partition_index": one.partition, "offset": before[one]}),
                    "timeout": int(self.request_timeout_s * 1000),
                },
                timeout=self.request_timeout_s + 5,
            )
            return {
                TopicPartition(topic.name, result.partition_index): DeletedRecords(
                    result.low_watermark, as_error(result.error_code)
                )
                for topic in answer.topics
                for result in topic.partitions
            }

        return await self.at_leaders(before.keys(), ask, lambda error: DeletedRecords(-1, error), deadline_s=deadline_s)


def decode_fetch(raw: RawFetch) -> dict[TopicPartition, Fetched]:
    """The partitions of a Fetch response. Raises KafkaError for an error of the whole request, MalformedFrame."""
    answer: Any = decode_response(ApiKey.FETCH, raw.version, raw.frame)[1]
    if getattr(answer, "error_code", 0):
        raise KafkaError(answer.error_code)
    return {
        TopicPartition(
            topic.topic if raw.version < 13 else raw.topic_names[topic.topic_id], partition.partition_index
        ): Fetched(
            partition.records or b"",
            partition.high_watermark,
            partition.last_stable_offset,
            getattr(partition, "log_start_offset", -1),
            tuple((aborted.producer_id, aborted.first_offset) for aborted in partition.aborted_transactions or ()),
            as_error(partition.error_code),
            _diverging(getattr(partition, "diverging_epoch", None)),
        )
        for topic in answer.responses
        for partition in topic.partitions
    }


def _listed(version: int, frame: Frame) -> list[tuple[str, list[tuple[int, int, int, int, int]]]]:
    return [(name.decode(), listed) for name, listed in peeks.listed_offsets(version, frame)]


def _diverging(said: Any) -> tuple[int, int] | None:
    return None if said is None or said.end_offset < 0 else (said.epoch, said.end_offset)


def _by_topic(
    partitions: Iterable[TopicPartition], entry: Callable[[TopicPartition], dict[str, Any]], array: str = "partitions"
) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for one in partitions:
        topics.setdefault(one.topic, []).append(entry(one))
    return [{"name": name, array: entries} for name, entries in topics.items()]


def _milliseconds(moment: datetime.datetime) -> int:
    return round(moment.timestamp() * 1000)
