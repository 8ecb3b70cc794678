"""Records in and out of batches: round trips, other people's codecs, markers, and garbage."""

from __future__ import annotations

import datetime
import io
import struct

import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.records.readers import read_batch
from kio.records.schema import NewRecordBatch, RecordHeader
from kio.records.schema import Record as KioRecord
from kio.records.writers import write_batch
from kio.static.primitive import TZAwareMicros, i8, i16, i32, i64
from support.partition_log import runs_of
from support.records import NOW, PLAIN, batch_of, record_lists
from support.seeds import examples

from isthmus_protocol.record_codec import Marker, Record, decode_control, decode_records, encode_batch, timestamps
from isthmus_protocol.records import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    BatchTooLarge,
    Compression,
    MalformedBatch,
    UnsupportedBatch,
    rebase,
    seal,
    verify_crc,
    whole_header,
)
from isthmus_protocol.varints import varint


def payload_batch(payload: bytes, records: int = 1, **changes: int) -> bytes:
    return seal(PLAIN._replace(record_count=records, last_offset_delta=records - 1)._replace(**changes), payload)


# -- Round trips, and other codecs -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(record_lists(), st.sampled_from(list(Compression)))
def test_records_survive_a_round_trip(records: list[Record], compression: Compression) -> None:
    like = PLAIN._replace(producer_id=5, producer_epoch=1, base_sequence=9, leader_epoch=3, attributes=1 << 4)
    batch = encode_batch(records, like, compression=compression)
    verify_crc(batch)
    header = whole_header(batch)
    assert decode_records(batch) == records
    assert header.compression is compression
    assert header.is_transactional
    assert (header.base_offset, header.last_offset) == (records[0].offset, records[-1].offset)
    assert header.record_count == len(records)
    assert header.base_timestamp == records[0].timestamp
    assert header.max_timestamp == max(r.timestamp for r in records)
    assert (header.producer_id, header.producer_epoch, header.leader_epoch) == (5, 1, 3)


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("count", [1, 500])
def test_reads_another_clients_batches(compression: Compression, count: int) -> None:
    builder = DefaultRecordBatchBuilder(2, compression, 0, -1, -1, -1, 1 << 24)
    expected = []
    for i in range(count):
        key = None if i % 3 else b"key-%d" % i
        value = None if i % 7 == 6 else b"value " * (i % 50)
        headers = [("trace", b"%d" % i), ("äöü", None)] if i % 2 else []
        builder.append(i, NOW + i * 37, key, value, headers)
        expected.append(Record(i, NOW + i * 37, key, value, tuple(headers)))
    batch = bytes(builder.build())
    assert decode_records(batch) == expected
    assert decode_records(memoryview(rebase(batch, 900))) == [r._replace(offset=r.offset + 900) for r in expected]


@settings(deadline=None)
@given(record_lists(), st.sampled_from(list(Compression)))
def test_another_client_reads_what_is_written(records: list[Record], compression: Compression) -> None:
    # That client reads the attributes byte as a varint, so it has to be one.
    records = [r._replace(attributes=0) for r in records]
    batch = encode_batch(records, PLAIN, compression=compression)
    other = DefaultRecordBatch(batch)
    assert other.validate_crc()
    assert [Record(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in other] == records


def test_byte_for_byte_what_another_client_writes() -> None:
    builder = DefaultRecordBatchBuilder(2, 0, 1, 7, 1, 33, 1 << 20)
    records = [Record(i, NOW + i * i, b"k" * i, None if i == 5 else b"v" * 100, (("h", b"x"),)) for i in range(100)]
    for r in records:
        builder.append(r.offset, r.timestamp, r.key, r.value, list(r.headers))
    like = PLAIN._replace(attributes=TRANSACTIONAL_BIT, producer_id=7, producer_epoch=1, base_sequence=33)
    assert encode_batch(records, like) == bytes(builder.build())


def test_byte_for_byte_what_kio_writes() -> None:
    # kio's times are whole seconds.
    records = [Record(40 + i, NOW + 1000 * i, b"k%d" % i, b"v" * i, (("h", None), ("i", b"j"))) for i in range(70)]
    new = NewRecordBatch(
        producer_id=i64(7),
        producer_epoch=i16(1),
        partition_leader_epoch=i32(-1),
        base_sequence=i32(33),
        attributes=i16(0),
        records=tuple(
            KioRecord(
                attributes=i8(0),
                timestamp=TZAwareMicros.parse(datetime.datetime.fromtimestamp(r.timestamp // 1000, datetime.UTC)),
                offset=i64(r.offset),
                key=r.key,
                value=r.value,
                headers=tuple(RecordHeader(key=k.encode(), value=v) for k, v in r.headers),
            )
            for r in records
        ),
    )
    buffer = io.BytesIO()
    write_batch(buffer, new)
    written = buffer.getvalue()
    like = PLAIN._replace(producer_id=7, producer_epoch=1, base_sequence=33)
    assert encode_batch(records, like) == written
    assert decode_records(written) == records
    read, size = read_batch(written, 0)
    assert size == len(written)
    assert [(r.offset, r.key, r.value) for r in read.records] == [(r.offset, r.key, r.value) for r in records]


def test_bytes_written_by_hand() -> None:
    # Length 8; attributes 0x80; timestamp delta -1; offset delta 0; key k; null value; one header h with null.
    payload = bytes.fromhex("14" "80" "01" "00" "02" "6b" "01" "02" "02" "68" "01")  # fmt: skip
    batch = payload_batch(payload, base_timestamp=NOW, max_timestamp=NOW)
    assert decode_records(batch) == [Record(0, NOW - 1, b"k", None, (("h", None),), 0x80)]


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        (0, "00"), (-1, "01"), (1, "02"), (-64, "7f"), (64, "8001"), (-65, "8101"), (8191, "fe7f"), (8192, "808001"),
        (2**31 - 1, "feffffff0f"), (-(2**31), "ffffffff0f"), (2**63 - 1, "feffffffffffffffff01"),
        (-(2**63), "ffffffffffffffffff01"),
    ],
)  # fmt: skip
def test_varints(number: int, encoded: str) -> None:
    assert varint(number).hex() == encoded


def test_header_keys_that_are_not_utf8_come_out_as_they_went_in() -> None:
    # Brokers store what a producer sends; a copy must not replace what it cannot read.
    payload = bytes.fromhex("14" "00" "00" "00" "01" "01" "02" "04" "fffe" "01")  # fmt: skip
    batch = payload_batch(payload, max_timestamp=NOW, base_timestamp=NOW)
    (record,) = decode_records(batch)
    assert record.headers[0][0].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert encode_batch([record], PLAIN)[HEADER_SIZE:] == payload


def test_encoding_refuses_what_is_no_batch() -> None:
    with pytest.raises(ValueError, match="needs a record"):
        encode_batch([], PLAIN)
    record = Record(5, NOW, None, None)
    for second in (5, 4):
        with pytest.raises(ValueError, match="follows 5"):
            encode_batch([record, record._replace(offset=second)], PLAIN)
    with pytest.raises(ValueError, match="cannot be"):
        encode_batch([record, record._replace(offset=5 + 2**31)], PLAIN)
    with pytest.raises(ValueError, match="cannot be"):
        encode_batch([record], PLAIN, last_offset=4)


def test_a_batch_may_end_after_its_last_record() -> None:
    batch = encode_batch([Record(5, NOW, None, b"v")], PLAIN, last_offset=9)
    assert (whole_header(batch).next_offset, whole_header(batch).record_count) == (10, 1)
    assert [r.offset for r in decode_records(batch)] == [5]


def test_a_delete_horizon_is_the_base_of_timestamps() -> None:
    # The cleaner (KIP-534) puts the horizon in place of the base timestamp and writes deltas from it.
    records = [Record(3, NOW, b"k", None), Record(4, NOW + 5, b"l", None)]
    payload = b"".join(
        varint(len(body)) + body
        for body in (
            b"\0" + varint(r.timestamp - (NOW + 86_400_000)) + varint(i) + b"\x02" + (r.key or b"") + b"\x01\0"
            for i, r in enumerate(records)
        )
    )
    batch = payload_batch(
        payload, 2, base_offset=3, attributes=DELETE_HORIZON_BIT, base_timestamp=NOW + 86_400_000, max_timestamp=NOW + 5
    )
    assert decode_records(batch) == records
    assert timestamps(batch) == ([(each.offset, each.timestamp) for each in records], NOW + 5)
    # Encoded anew it has no horizon: the target's cleaner decides on its own.
    anew = whole_header(encode_batch(decode_records(batch), whole_header(batch)))
    assert not anew.has_delete_horizon
    assert anew.base_timestamp == NOW


def test_the_limit_holds_for_the_records_of_a_batch() -> None:
    batch = encode_batch([Record(0, NOW, None, bytes(1 << 20))], PLAIN, compression=Compression.ZSTD)
    assert len(batch) < 1000
    with pytest.raises(BatchTooLarge):
        decode_records(batch, limit=1 << 20)
    assert len(decode_records(batch, limit=(1 << 20) + 100)) == 1


def test_unknown_codecs_are_unsupported() -> None:
    with pytest.raises(UnsupportedBatch, match="codec 6"):
        decode_records(payload_batch(b"", attributes=6))


# -- Markers -----------------------------------------------------------------------------------------------------------


def control_batch(key: bytes | None, value: bytes | None, **changes: int) -> bytes:
    return batch_of(
        [Record(40, NOW, key, value)],
        CONTROL_BIT | TRANSACTIONAL_BIT,
        **{"producer_id": 99, "producer_epoch": 3, **changes},
    )


@pytest.mark.parametrize(("kind", "marker"), [(0, Marker.ABORT), (1, Marker.COMMIT)])
def test_markers(kind: int, marker: Marker) -> None:
    batch = control_batch(struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 17))
    control = decode_control(batch)
    assert control == (40, NOW, 99, 3, marker, 17)
    # Later versions may add fields behind those.
    newer = control_batch(struct.pack(">hhq", 1, kind, 5), struct.pack(">hiq", 1, 17, 5))
    assert decode_control(newer) == control


def test_control_records_that_are_no_markers() -> None:
    marker = struct.pack(">hi", 0, 17)
    with pytest.raises(UnsupportedBatch, match="type 2"):
        decode_control(control_batch(struct.pack(">hh", 0, 2), marker))
    for key in (None, b"", b"\0\0\0"):
        with pytest.raises(MalformedBatch, match="no type"):
            decode_control(control_batch(key, marker))
    for value in (None, b"", marker[:-1]):
        with pytest.raises(MalformedBatch, match="coordinator epoch"):
            decode_control(control_batch(bytes(4), value))
    with pytest.raises(MalformedBatch, match="no control batch"):
        decode_control(batch_of([Record(0, NOW, bytes(4), marker)]))
    emptied = seal(PLAIN._replace(record_count=0, attributes=CONTROL_BIT), b"")
    with pytest.raises(MalformedBatch, match="holds no marker"):
        decode_control(emptied)
    two = batch_of([Record(o, NOW, bytes(4), marker) for o in (0, 1)], CONTROL_BIT)
    with pytest.raises(UnsupportedBatch, match="2 records"):
        decode_control(two)


# -- Garbage -----------------------------------------------------------------------------------------------------------

EMPTY = "0c" "00" "00" "00" "01" "01" "00"  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "records", "message"),
    [
        ("", 1, "ends within its record number 0"),
        (EMPTY, 2, "ends within its record number 1"),
        (EMPTY + "00", 1, "1 bytes are left"),
        ("0a" "00" "00" "00" "01" "01", 1, "record of 5 bytes"),
        ("0b" "00" "00" "00" "01" "01" "00", 1, "record of -6 bytes"),
        ("0e" "00" "00" "00" "01" "01" "00", 1, "ends within its record number 0"),
        (EMPTY + EMPTY, 2, "offset delta 0 follows 0"),
        ("0c" "00" "00" "01" "01" "01" "00", 1, "offset delta -1 follows -1"),
        ("0c" "00" "00" "02" "01" "01" "00", 1, "offset delta 1 is beyond"),
        ("0c" "00" "00" "00" "03" "01" "00", 1, "length of -2"),
        ("0c" "00" "00" "00" "01" "01" "01", 1, "has -1 headers"),
        ("0c" "00" "00" "00" "01" "01" "7e", 1, "has 63 headers"),
        ("10" "00" "00" "00" "01" "01" "02" "01" "01", 1, "header without a key"),
        ("0c" "00" "00" "00" "02" "01" "01", 1, "beyond its batch"),
        ("0e" "00" "00" "00" "01" "01" "00" "00", 1, "1 bytes from where"),
        ("0c" "00" "00" "00" "01" "7e" "00", 1, "beyond its batch"),
        ("16" "00" "00" "8080808080" "00" "01" "01" "00", 1, "more than 32 bits"),
        ("16" "00" "00" "ffffffff1f" "01" "01" "00" "00", 1, "more than 32 bits"),
        ("20" "00" "80808080808080808002" "00" "01" "01" "00" "00", 1, "more than 64 bits"),
    ],
)  # fmt: skip
def test_records_that_cannot_be(payload: str, records: int, message: str) -> None:
    with pytest.raises(MalformedBatch, match=message):
        decode_records(payload_batch(bytes.fromhex(payload), records))


@settings(deadline=None)
@given(record_lists(), st.sampled_from(list(Compression)))
def test_the_least_timestamp_and_the_last(records: list[Record], compression: Compression) -> None:
    batch = encode_batch(records, PLAIN, compression=compression)
    assert timestamps(batch) == ([(each.offset, each.timestamp) for each in records], records[-1].timestamp)


def test_of_a_large_batch_the_least_timestamps_of_runs_of_records() -> None:
    records = [Record(offset, NOW + (offset * 7919) % 1000, None, b"") for offset in range(1_000)]
    found = timestamps(encode_batch(records, PLAIN))
    assert found is not None
    runs, last = found
    assert last == records[-1].timestamp
    assert 256 <= len(runs) <= 512
    first = 0
    for offset, least in runs:
        assert least == min(each.timestamp for each in records[first : offset + 1])
        first = offset + 1
    assert first == 1_000


def test_a_timestamp_beyond_64_bits_is_malformed() -> None:
    payload = bytes.fromhex("0c" "00" "02" "00" "01" "01" "00")  # fmt: skip
    with pytest.raises(MalformedBatch, match="64 bits"):
        decode_records(payload_batch(payload, base_timestamp=2**63 - 1))


def test_an_emptied_batch_holds_nothing() -> None:
    with pytest.raises(MalformedBatch, match="7 bytes are left"):
        decode_records(seal(PLAIN._replace(record_count=0), bytes.fromhex(EMPTY)))


def check_everything(batch: bytes) -> None:
    for read in (decode_records, runs_of, decode_control):
        try:
            read(batch)
        except (MalformedBatch, UnsupportedBatch):
            pass


@settings(deadline=None, max_examples=examples(300))
@given(st.data(), record_lists(size_max=5), st.sampled_from(list(Compression)))
def test_damaged_batches_raise_batch_errors_only(
    data: st.DataObject, records: list[Record], compression: Compression
) -> None:
    batch = bytearray(
        batch_of(records, data.draw(st.sampled_from([0, LOG_APPEND_TIME_BIT, CONTROL_BIT])) | compression)
    )
    for _ in range(data.draw(st.integers(1, 4))):
        batch[data.draw(st.integers(16, len(batch) - 1))] = data.draw(st.integers(0, 255))
    check_everything(bytes(batch))
    check_everything(bytes(batch[: data.draw(st.integers(0, len(batch)))]))


@settings(deadline=None, max_examples=examples(300))
@given(st.binary(max_size=100), st.integers(0, 0x7F), st.integers(1, 5), st.integers(0, 9), st.booleans())
def test_garbage_payloads_raise_batch_errors_only(
    payload: bytes, attributes: int, records: int, missing: int, plausible: bool
) -> None:
    if plausible:  # a length that fits, so that more of the garbage is looked at
        payload = varint(len(payload)) + b"\0\0\0" + payload[3:]
    check_everything(payload_batch(payload, records, attributes=attributes, last_offset_delta=records - 1 + missing))
