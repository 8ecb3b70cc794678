"""Partitions and batch headers of Produce requests, found in whatever pieces they come."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest

from isthmus_protocol import peeks, schema
from isthmus_protocol.messages import build_request, encode_request
from isthmus_protocol.partition_scan import ScannedPartition
from isthmus_protocol.produce_scan import ProduceScan
from isthmus_protocol.records import HEADER_SIZE
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame

LOWEST, HIGHEST = schema.supported()[ApiKey.PRODUCE]
VERSIONS = range(max(3, LOWEST), HIGHEST + 1)


def request(
    version: int, topics: list[tuple[int, list[tuple[int, bytes | None]]]], transactional: bool = False
) -> bytes:
    by_id = peeks.topics_are_ids(ApiKey.PRODUCE, version)
    values: dict[str, Any] = {
        "transactional_id": "tx" if transactional else None,
        "acks": -1,
        "timeout": 30_000,
        "topic_data": [
            {
                **({"topic_id": UUID(int=number)} if by_id else {"name": f"topic-{number}"}),
                "partition_data": [{"index": index, "records": records} for index, records in partitions],
            }
            for number, partitions in topics
        ],
    }
    return encode_request(build_request(ApiKey.PRODUCE, version, values), 7, "client")


def expected(version: int, frame: bytes) -> list[ScannedPartition]:
    *_, topics = peeks.produce_batches(version, frame)
    return [
        ScannedPartition(
            bytes(topic),
            partition,
            -1 if records is None else len(records),
            b"" if records is None else bytes(records[:HEADER_SIZE]),
        )
        for topic, partitions in topics
        for partition, records in partitions
    ]


def scanned(version: int, frame: bytes, cuts: list[int]) -> ProduceScan:
    scan = ProduceScan(version)
    for start, end in zip([0, *cuts], [*cuts, len(frame)], strict=True):
        scan.feed(frame[start:end])
    return scan


def random_topics(source: random.Random) -> list[tuple[int, list[tuple[int, bytes | None]]]]:
    sizes = (0, 1, HEADER_SIZE - 1, HEADER_SIZE, 200, 5000)
    return [
        (
            number,
            [
                (index, None if source.random() < 0.1 else source.randbytes(source.choice(sizes)))
                for index in range(source.randint(0, 4))
            ],
        )
        for number in range(1, source.randint(1, 5))
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_pieces_of_any_size_say_what_the_whole_frame_says(version: int) -> None:
    source = random.Random(version)
    for _ in range(60):
        frame = request(version, random_topics(source), source.random() < 0.5)
        wanted = expected(version, frame)
        for pieces in (1, 2, 3, 40):
            cuts = sorted(source.randint(0, len(frame)) for _ in range(pieces - 1))
            scan = scanned(version, frame, cuts)
            assert scan.parts == wanted
            assert scan.done
            assert scan.acks == -1
            assert scan.transactional_id == peeks.transactional_id(ApiKey.PRODUCE, version, frame)
    frame = request(version, [(1, [(0, source.randbytes(90)), (1, source.randbytes(90))])])
    scan = scanned(version, frame, list(range(1, len(frame))))
    assert scan.parts == expected(version, frame)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_request_of_one_partition_says_where_its_head_ends(version: int) -> None:
    frame, other = (request(version, [(1, [(index, b"x" * 900)])]) for index in (3, 4))
    scan = scanned(version, frame, [])
    assert scan.lone_head_end is not None
    assert frame[12 : scan.lone_head_end] == other[12 : scan.lone_head_end]
    index = int.from_bytes(frame[scan.lone_head_end : scan.lone_head_end + 4], "big")
    assert index == 3, "its partition stands right behind"
    several = request(version, [(1, [(0, b"x" * 900), (1, b"y")])])
    assert scanned(version, several, []).lone_head_end is None
    topics = request(version, [(1, [(0, b"x" * 900)]), (2, [(1, b"y")])])
    assert scanned(version, topics, []).lone_head_end is None


def test_bytes_that_are_no_request_end() -> None:
    source = random.Random(1)
    for _ in range(300):
        frame = bytearray(request(9, random_topics(source)))
        frame[source.randrange(12, len(frame))] = source.randrange(256)
        scan = ProduceScan(9)
        try:
            for start in range(0, len(frame), 100):
                scan.feed(bytes(frame[start : start + 100]))
        except MalformedFrame:
            continue


@pytest.mark.parametrize("version", [3, 9])
def test_a_topic_without_a_name_ends(version: int) -> None:
    """A classic length below null would lead back to the same topic, two billion times."""
    frame = request(version, [(1, []), (2, [])])
    named = (b"\x08" if version >= 9 else b"\x00\x07") + b"topic-1"
    nameless = b"\x00" if version >= 9 else b"\xff\xfa"
    scan = ProduceScan(version)
    with pytest.raises(MalformedFrame):
        scan.feed(frame.replace(named, nameless))


def test_what_is_kept_is_bounded() -> None:
    head = request(9, [])[:12] + b"\xff\xff" + b"\xe8\x07"  # no client id, and a thousand tags
    tags = (b"\x01\xac\x02" + bytes(300)) * 330
    scan = ProduceScan(9)
    scan.feed(head + tags)
    with pytest.raises(MalformedFrame):
        scan.feed(tags)


def test_tags_that_come_in_pieces_count_once() -> None:
    head = request(9, [])[:12] + b"\xff\xff" + b"\x00"  # no client id, and no tags
    body = b"\x00\xff\xff" + (30_000).to_bytes(4, "big")  # no transactional id, acks, a timeout
    tags = b"\x03\x01\x01x\x02\x01y\x03\x01z"
    topic = b"\x02a\x02" + (0).to_bytes(4, "big") + b"\x05abcd"
    frame = head + body + b"\x03" + topic + tags + tags + topic + b"\x00\x00\x00"
    whole, pieces = ProduceScan(9), ProduceScan(9)
    whole.feed(frame)
    for byte in frame:
        pieces.feed(bytes((byte,)))
    assert (whole.done, pieces.done) == (True, True)
    assert pieces.units == whole.units
