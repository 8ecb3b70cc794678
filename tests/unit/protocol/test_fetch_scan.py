"""Partitions, batches and records of answers to Fetch, found in whatever pieces they come."""

from __future__ import annotations

import random
import struct
from typing import Any
from uuid import UUID

import pytest

from isthmus_protocol import peeks, schema
from isthmus_protocol.bodies import build
from isthmus_protocol.fetch_scan import FetchScan
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.partition_scan import ScannedPartition
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import HEADER_SIZE, BatchHeader, Compression, walk
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame

LOWEST, HIGHEST = schema.supported()[ApiKey.FETCH]
VERSIONS = range(LOWEST, HIGHEST + 1)
Partition = dict[str, Any]


def batch(base_offset: int, count: int, value: bytes = b"v", compression: int = 0) -> bytes:
    records = [Record(base_offset + number, 1, b"key", value) for number in range(count)]
    header = BatchHeader(base_offset, 0, 0, 2, 0, compression, 0, 1, 1, 9, 3, 40, count)
    return encode_batch(records, header)


def old_message(offset: int, magic: int, attributes: int = 0, value: bytes = b"value") -> bytes:
    time = bytes(8) if magic else b""
    said = struct.pack(">IbB", 0, magic, attributes) + time + struct.pack(">ii", -1, len(value)) + value
    return struct.pack(">qi", offset, len(said)) + said


def answer(version: int, topics: list[tuple[int, list[Partition]]], error_code: int = 0) -> bytes:
    by_id = peeks.topics_are_ids(ApiKey.FETCH, version)
    values: dict[str, Any] = {
        "responses": [
            {**({"topic_id": UUID(int=number)} if by_id else {"topic": f"topic-{number}"}), "partitions": partitions}
            for number, partitions in topics
        ]
    }
    if version >= 7:
        values["error_code"] = error_code
    if version >= 16:
        values["node_endpoints"] = [{"node_id": 1, "host": "broker", "port": 9092}]
    return encode_response(build(schema.response_type(ApiKey.FETCH, version), values), 7)


def expected(version: int, frame: bytes) -> list[ScannedPartition]:
    """What kio and ``walk`` make of it."""
    _, said = decode_response(ApiKey.FETCH, version, frame)
    found = []
    for topic in said.responses:
        name = topic.topic_id.bytes if version >= 13 else topic.topic.encode()
        for part in topic.partitions:
            batches = [] if not part.records else list(walk(part.records))
            found.append(
                ScannedPartition(
                    name,
                    part.partition_index,
                    batches[-1][1] if batches else 0,
                    bytes(part.records[:HEADER_SIZE]) if batches else b"",
                    len(batches),
                    sum(header.record_count for *_, header in batches),
                    int(part.error_code),
                )
            )
    return found


def scanned(version: int, frame: bytes, cuts: list[int]) -> FetchScan:
    scan = FetchScan(version)
    for start, end in zip([0, *cuts], [*cuts, len(frame)], strict=True):
        scan.feed(frame[start:end])
    return scan


def random_partition(source: random.Random, version: int, index: int) -> Partition:
    count, offset, batches = source.choice((0, 0, 1, 2, 9)), 100, b""
    for _ in range(count):
        of_batch = source.randint(1, 5)
        value = source.randbytes(source.choice((0, 30, 3000)))
        batches += batch(offset, of_batch, value, source.choice((Compression.NONE, Compression.GZIP)))
        offset += of_batch
    if source.random() < 0.5:
        cut = batch(offset, 3, bytes(300))
        batches += cut[: source.choice((1, 12, 17, 18, 60, 61, 62, len(cut) - 1))]
    records = batches or source.choice((None, b""))
    aborted = source.choice((None, *([{"producer_id": 9, "first_offset": 1}] * count for count in (0, 1, 20))))
    part = {
        "partition_index": index,
        "error_code": source.choice((0, 0, 6)),
        "records": records,
        "aborted_transactions": aborted,
    }
    if version >= 12 and source.random() < 0.5:
        part |= {"current_leader": {"leader_id": 3, "leader_epoch": 5}, "diverging_epoch": {"epoch": 1}}
    return part


def random_answer(source: random.Random, version: int) -> bytes:
    topics = [
        (number, [random_partition(source, version, index) for index in range(source.randint(0, 4))])
        for number in range(1, source.randint(1, 5))
    ]
    return answer(version, topics, source.choice((0, 70)))


@pytest.mark.parametrize("version", VERSIONS)
def test_pieces_of_any_size_say_what_the_whole_answer_says(version: int) -> None:
    source = random.Random(version)
    for _ in range(40):
        frame = random_answer(source, version)
        wanted = expected(version, frame)
        for pieces in (1, 2, 3, 40):
            cuts = sorted(source.randint(0, len(frame)) for _ in range(pieces - 1))
            scan = scanned(version, frame, cuts)
            assert scan.parts == wanted
            assert scan.done
            if version >= 7:
                assert scan.error_code == decode_response(ApiKey.FETCH, version, frame)[1].error_code
    frame = random_answer(source, version)
    while not any(part.batches for part in expected(version, frame)):
        frame = random_answer(source, version)
    assert scanned(version, frame, list(range(1, len(frame)))).parts == expected(version, frame)


@pytest.mark.parametrize("version", [4, 11, 12, 17])
def test_tagged_fields_that_nobody_knows_are_skipped(version: int) -> None:
    records = batch(5, 2, b"x" * 200)
    frame = answer(version, [(1, [{"partition_index": number, "records": records} for number in range(3)])])
    if version >= 12:  # the partition's tags are the one byte behind its records
        frame = frame.replace(records + b"\x00", records + b"\x02\x63\x03abc\x64\x00")
    for step in (1, 7, 1000):
        scan = scanned(version, frame, list(range(step, len(frame), step)))
        assert scan.done
        assert [(part.partition, part.records, part.size) for part in scan.parts] == [
            (number, 2, len(records)) for number in range(3)
        ]


@pytest.mark.parametrize("version", [4, 11, 12, 17])
def test_messages_of_old_formats_are_counted_as_far_as_they_say(version: int) -> None:
    plain = b"".join(old_message(10 + number, number % 2) for number in range(4))
    cases = [
        (plain, 4, 4),
        (plain + batch(14, 3), 5, 7),
        (plain + old_message(14, 1)[:-1], 4, 4),
        (old_message(12, 1, attributes=Compression.GZIP, value=bytes(900)) + plain, 5, -1),
    ]
    parts = [{"partition_index": number, "records": records} for number, (records, _, _) in enumerate(cases)]
    frame = answer(version, [(1, parts)])
    for step in (1, 5, 1000):
        scan = scanned(version, frame, list(range(step, len(frame), step)))
        assert scan.done
        assert [(part.batches, part.records) for part in scan.parts] == [(made, count) for _, made, count in cases]
        assert {part.header[16] for part in scan.parts} == {0, 1}
    assert scan.parts[0].header == plain[:18]
    assert scan.parts[0].size == len(plain)


@pytest.mark.parametrize("version", [4, 17])
def test_what_is_no_batch_does_not_keep_the_next_partitions_from_being_found(version: int) -> None:
    good = batch(5, 2)
    bad = [
        good[:16] + b"\x03" + good[17:],  # an unknown magic
        good[:8] + struct.pack(">i", 20) + good[12:],  # shorter than its header
        good[:8] + struct.pack(">i", -1000) + good[12:],
        good[:57] + struct.pack(">i", -1) + good[61:],  # fewer records than none
        old_message(1, 1)[:8] + struct.pack(">i", 3) + old_message(1, 1)[12:],
    ]
    parts = [{"partition_index": number, "records": good + each + good} for number, each in enumerate((*bad, good))]
    frame = answer(version, [(1, parts)])
    for step in (1, 1000):
        scan = scanned(version, frame, list(range(step, len(frame), step)))
        assert scan.done
        assert [(part.batches, part.records, part.size) for part in scan.parts] == [
            *[(1, -1, len(good))] * len(bad),
            (3, 6, 3 * len(good)),
        ]


def test_contents_are_neither_kept_nor_walked() -> None:
    frame = answer(17, [(1, [{"partition_index": 0, "records": batch(0, 1, bytes(1 << 20))}])])
    scan = FetchScan(17)
    scan.feed(frame[:200])
    assert scan.done, "nothing behind the last header is needed"
    several = answer(17, [(1, [{"partition_index": 0, "records": batch(0, 1, bytes(1 << 20)) + batch(1, 1)}])])
    scan = FetchScan(17)
    for start in range(0, len(several), 1000):
        scan.feed(several[start : start + 1000])
        assert len(scan._kept) < 100
    assert scan.done


@pytest.mark.parametrize("version", [4, 11, 12, 17])
def test_bytes_that_are_no_answer_end(version: int) -> None:
    source = random.Random(1)
    for _ in range(300):
        frame = bytearray(random_answer(source, version))
        for _ in range(source.randint(1, 3)):
            frame[source.randrange(8, len(frame))] = source.choice((0, 0x7F, 0x80, 0xFF, source.randrange(256)))
        scan = FetchScan(version)
        try:
            for start in range(0, len(frame), 100):
                scan.feed(bytes(frame[start : start + 100]))
        except MalformedFrame:
            continue


def test_counts_that_no_field_holds_are_not_known() -> None:
    """Each batch says that it has 2^31 - 1 records."""
    one = batch(5, 1)
    many = one[:57] + b"\x7f\xff\xff\xff" + one[61:]
    scan = FetchScan(17)
    scan.feed(answer(17, [(1, [{"partition_index": 0, "records": many * 2}])]))
    assert [(part.batches, part.records) for part in scan.parts] == [(2, -1)]
    frame = answer(17, [(1, [{"partition_index": 0, "records": one}])])
    size = bytes((len(one) + 1,))
    with pytest.raises(MalformedFrame):
        FetchScan(17).feed(frame.replace(size + one, b"\xff\xff\xff\xff\x7f" + one))


@pytest.mark.parametrize("version", [4, 12])
def test_a_topic_without_a_name_ends(version: int) -> None:
    names = b"\x00" if version >= 12 else struct.pack(">h", -6)
    frame = answer(version, [(1, []), (2, [])])
    named = (b"\x08" if version >= 12 else b"\x00\x07") + b"topic-1"
    scan = FetchScan(version)
    with pytest.raises(MalformedFrame):
        scan.feed(frame.replace(named, names))
