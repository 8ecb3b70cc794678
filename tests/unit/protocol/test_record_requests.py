"""Produce and Fetch requests written by hand, compared with kio's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from isthmus_protocol import schema
from isthmus_protocol.messages import build_request, encode_request
from isthmus_protocol.record_requests import (
    FETCH_VERSIONS,
    LIST_OFFSETS_VERSIONS,
    PRODUCE_VERSIONS,
    fetch_body,
    list_offsets_body,
    one_batch_each,
    produce_body,
)
from isthmus_protocol.schema import ApiKey


class From(NamedTuple):
    partition: int
    leader_epoch: int
    offset: int
    bytes_max: int


BATCHES = {
    "t": {0: b"\x01" * 61, 7: b"\x02" * 20_000},
    "a-topic-with-a-long-name-" * 9: {2**31 - 1: b"\x03" * 3_000_000},
    "ü": {1: b"\x04" * 127},
}
WANTED = {
    bytes(range(16)): [From(index, 5, 2**40 + index, 1 << 20) for index in range(300)],
    bytes(range(1, 17)): [From(3, -1, 0, 1)],
}
FORGOTTEN = {bytes(range(2, 18)): [0, 200]}


def kio_body(api_key: ApiKey, version: int, values: Mapping[str, Any]) -> bytes:
    frame = encode_request(build_request(api_key, version, values), 5, "client")
    return frame[4 + 10 + len("client") + 1 :]


def test_each_request_has_one_batch_of_a_partition() -> None:
    batches = {("t", 0): [b"a", b"b", b"c"], ("t", 1): [], ("u", 0): [b"d"], ("u", 1): [b"", b"e"]}
    assert list(one_batch_each(batches)) == [
        {("t", 0): b"a", ("u", 0): b"d", ("u", 1): b""},
        {("t", 0): b"b", ("u", 1): b"e"},
        {("t", 0): b"c"},
    ]
    assert list(one_batch_each({})) == []


@pytest.mark.parametrize("transactional_id", [None, "isthmus-ü"])
@pytest.mark.parametrize("version", range(PRODUCE_VERSIONS[0], PRODUCE_VERSIONS[1] + 1))
def test_a_produce_is_what_kio_writes(version: int, transactional_id: str | None) -> None:
    values = {
        "transactional_id": transactional_id,
        "acks": -1,
        "timeout": 30_000,
        "topic_data": [
            {
                "name": topic,
                "partition_data": [{"index": index, "records": batch} for index, batch in partitions.items()],
            }
            for topic, partitions in BATCHES.items()
        ],
    }
    expected = kio_body(ApiKey.PRODUCE, version, values)
    assert b"".join(produce_body(BATCHES, 30_000, transactional_id)) == expected


def test_batches_are_not_copied() -> None:
    batch = b"\x01" * 100
    assert any(piece is batch for piece in produce_body({"t": {0: batch}}, 1, None))


@pytest.mark.parametrize("topics", [{}, WANTED])
@pytest.mark.parametrize("version", range(FETCH_VERSIONS[0], FETCH_VERSIONS[1] + 1))
def test_a_fetch_is_what_kio_writes(version: int, topics: Mapping[bytes, list[From]]) -> None:
    if version > schema.supported()[ApiKey.FETCH][1]:
        pytest.skip("kio does not know the version")
    values = {
        "replica_id": -1,
        "max_wait": 250,
        "min_bytes": 1,
        "max_bytes": 16 << 20,
        "isolation_level": 1,
        "session_id": 77,
        "session_epoch": 3,
        "topics": [
            {
                "topic_id": UUID(bytes=topic_id),
                "partitions": [
                    {
                        "partition": each.partition,
                        "current_leader_epoch": each.leader_epoch,
                        "fetch_offset": each.offset,
                        "partition_max_bytes": each.bytes_max,
                    }
                    for each in wanted
                ],
            }
            for topic_id, wanted in topics.items()
        ],
        "forgotten_topics_data": [
            {"topic_id": UUID(bytes=topic_id), "partitions": indexes} for topic_id, indexes in FORGOTTEN.items()
        ],
    }
    body = fetch_body(
        version,
        topics,
        FORGOTTEN,
        wait_max_ms=250,
        bytes_max=16 << 20,
        isolation=1,
        session_id=77,
        session_epoch=3,
    )
    assert body == kio_body(ApiKey.FETCH, version, values)


@pytest.mark.parametrize("version", range(LIST_OFFSETS_VERSIONS[0], LIST_OFFSETS_VERSIONS[1] + 1))
def test_a_list_offsets_is_what_kio_writes(version: int) -> None:
    topics = {"t": [(0, 3, -1), (2**31 - 1, -1, 2**40)], "ü" * 200: [(index, index, -2) for index in range(200)]}
    values = {
        "replica_id": -2,
        "isolation_level": 1,
        "topics": [
            {
                "name": topic,
                "partitions": [
                    {"partition_index": index, "current_leader_epoch": epoch, "timestamp": timestamp}
                    for index, epoch, timestamp in wanted
                ],
            }
            for topic, wanted in topics.items()
        ],
        "timeout": 30_000,
    }
    body = list_offsets_body(version, topics, replica_id=-2, isolation=1, timeout_ms=30_000)
    assert body == kio_body(ApiKey.LIST_OFFSETS, version, values)
