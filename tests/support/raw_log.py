"""Logs of real brokers, as raw batches: for what consumers hide.

Everything here asks a partition's leader directly, over a :class:`support.wire.Wire` to the only broker of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from isthmus_plugins.cluster import TransactionMarkers
from isthmus_protocol.records import BatchHeader, walk
from isthmus_protocol.schema import ApiKey
from support.wire import Wire

TIMEOUT_MS: Final = 10_000
FETCH_BYTES: Final = 16 * 1024 * 1024
BROKER: Final = 4
"""The type of a broker among resources that have configurations."""


class RawBatch(NamedTuple):
    header: BatchHeader
    data: bytes


@dataclass(frozen=True)
class RawLog:
    """A partition's whole log, and its limits."""

    start: int
    high_watermark: int
    last_stable_offset: int
    batches: tuple[RawBatch, ...]
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of aborted transactions; only a read_committed reading has them."""

    def __iter__(self) -> Iterator[RawBatch]:
        return iter(self.batches)


class ProducerEntry(NamedTuple):
    """What a broker knows of a producer."""

    epoch: int
    last_sequence: int
    coordinator_epoch: int
    transaction_start: int


def fetch(wire: Wire, topic: str, offset: int, partition: int = 0, committed: bool = False) -> Any:
    """One Fetch answer's partition."""
    answer = wire.request(
        ApiKey.FETCH,
        11,
        {
            "replica_id": -1,
            "max_wait": 0,
            "min_bytes": 0,
            "max_bytes": FETCH_BYTES,
            "isolation_level": int(committed),
            "session_id": 0,
            "session_epoch": -1,
            "topics": [
                {
                    "topic": topic,
                    "partitions": [
                        {
                            "partition": partition,
                            "current_leader_epoch": -1,
                            "fetch_offset": offset,
                            "log_start_offset": -1,
                            "partition_max_bytes": FETCH_BYTES,
                        }
                    ],
                }
            ],
        },
    )
    return answer.responses[0].partitions[0]


def log_start(wire: Wire, topic: str, partition: int = 0, local: bool = False) -> int:
    """Where a partition starts; ``local``: what the broker has of it on its own disk (KIP-405)."""
    at = {"partition_index": partition, "current_leader_epoch": -1, "timestamp": -4 if local else -2}
    question = {"replica_id": -1, "isolation_level": 0, "topics": [{"name": topic, "partitions": [at]}]}
    answer = wire.request(ApiKey.LIST_OFFSETS, 8 if local else 5, question)
    found = answer.topics[0].partitions[0]
    assert not found.error_code, found
    return int(found.offset)


def read_log(wire: Wire, topic: str, partition: int = 0, committed: bool = False, offset: int | None = None) -> RawLog:
    """All batches of a partition, from its start (or ``offset``) on."""
    at = log_start(wire, topic, partition) if offset is None else offset
    batches: list[RawBatch] = []
    aborted: dict[tuple[int, int], None] = {}
    while True:
        part = fetch(wire, topic, at, partition, committed)
        assert not part.error_code, (topic, partition, at, part.error_code)
        before = at
        records = bytes(part.records or b"")
        for start, end, header in walk(records):
            if header.next_offset > at:
                batches.append(RawBatch(header, records[start:end]))
                at = header.next_offset
        for each in part.aborted_transactions or ():
            aborted[int(each.producer_id), int(each.first_offset)] = None
        if at == before:
            return RawLog(
                int(part.log_start_offset),
                int(part.high_watermark),
                int(part.last_stable_offset),
                tuple(batches),
                tuple(aborted),
            )


def produce(
    wire: Wire, topic: str, data: bytes, partition: int = 0, transactional: bool = False, acks: int = -1
) -> tuple[int, int]:
    """Append one batch: (error code, base offset)."""
    answer = wire.request(
        ApiKey.PRODUCE,
        11,
        {
            "transactional_id": "raw" if transactional else None,
            "acks": acks,
            "timeout": TIMEOUT_MS,
            "topic_data": [{"name": topic, "partition_data": [{"index": partition, "records": data}]}],
        },
    )
    result = answer.responses[0].partition_responses[0]
    return int(result.error_code), int(result.base_offset)


def write_markers(wire: Wire, markers: Sequence[TransactionMarkers]) -> list[int]:
    """Write transaction markers: error codes."""
    answer = wire.request(
        ApiKey.WRITE_TXN_MARKERS,
        1,
        {
            "markers": [
                {
                    "producer_id": marker.producer_id,
                    "producer_epoch": marker.producer_epoch,
                    "transaction_result": marker.committed,
                    "coordinator_epoch": marker.coordinator_epoch,
                    "topics": [{"name": marker.topic, "partition_indexes": [marker.partition]}],
                }
                for marker in markers
            ]
        },
    )
    return [int(entry.topics[0].partitions[0].error_code) for entry in answer.markers]


def delete_records(wire: Wire, topic: str, before: int, partition: int = 0) -> tuple[int, int]:
    """Error code and where the log starts now."""
    answer = wire.request(
        ApiKey.DELETE_RECORDS,
        2,
        {
            "topics": [{"name": topic, "partitions": [{"partition_index": partition, "offset": before}]}],
            "timeout": TIMEOUT_MS,
        },
    )
    result = answer.topics[0].partitions[0]
    return int(result.error_code), int(result.low_watermark)


def producers(wire: Wire, topic: str, partition: int = 0) -> Mapping[int, ProducerEntry]:
    """What the broker knows of producers, by id."""
    answer = wire.request(ApiKey.DESCRIBE_PRODUCERS, 0, {"topics": [{"name": topic, "partition_indexes": [partition]}]})
    found = answer.topics[0].partitions[0]
    assert not found.error_code, found
    return {
        int(each.producer_id): ProducerEntry(
            int(each.producer_epoch),
            int(each.last_sequence),
            int(each.coordinator_epoch),
            int(each.current_txn_start_offset),
        )
        for each in found.active_producers
    }


def alter_brokers(wire: Wire, configs: Mapping[str, str | None]) -> None:
    """Set dynamic settings of all brokers; None: back to what it was."""
    answer = wire.request(
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        1,
        {
            "resources": [
                {
                    "resource_type": BROKER,
                    "resource_name": "",
                    "configs": [
                        {"name": name, "config_operation": int(value is None), "value": value}
                        for name, value in configs.items()
                    ],
                }
            ],
            "validate_only": False,
        },
    )
    assert not answer.responses[0].error_code, answer
