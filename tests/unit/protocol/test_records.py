"""Batches by their headers: known bytes, other people's builders, every cut, and surgery against full recomputation."""

from __future__ import annotations

import struct

import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from isthmus_protocol.producer_ids import ProducerIdRange, carry
from isthmus_protocol.records import (
    HEADER_SIZE,
    SEQUENCE_MAX,
    BatchError,
    BatchHeader,
    Compression,
    CorruptBatch,
    MalformedBatch,
    UnsupportedBatch,
    add_sequence,
    as_committed,
    in_transaction,
    read_header,
    rebase,
    restamp,
    restamped_header,
    seal,
    verify_crc,
    walk,
    whole_header,
)

# A batch laid out by hand from the message format's documentation; the CRC is computed below, bit by bit.
GOLDEN_HEAD = bytes.fromhex(
    "0000000000000064"  # base offset 100
    "0000004b"  # length 75
    "00000007"  # partition leader epoch 7
    "02"  # magic
)
GOLDEN_COVERED = bytes.fromhex(
    "0010"  # attributes: transactional
    "00000001"  # last offset delta
    "0000018bcfe56800"  # base timestamp 1700000000000
    "0000018bcfe56805"  # max timestamp, 5 ms later
    "00000000000003e9"  # producer id 1001
    "0002"  # producer epoch
    "0000000a"  # base sequence 10
    "00000002"  # two records
    "10" "00" "00" "00" "02" "6b" "02" "76" "00"  # 8 bytes: no attributes, deltas 0 and 0, key k, value v, no headers
    "10" "00" "0a" "02" "01" "04" "7777" "00"  # 8 bytes: deltas 5 and 1, null key, value ww, no headers
)  # fmt: skip


def crc32c_bit_by_bit(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def golden() -> bytes:
    assert crc32c_bit_by_bit(b"123456789") == 0xE3069283  # RFC 3720's check value
    head = GOLDEN_HEAD[:8] + struct.pack(">i", 9 + len(GOLDEN_COVERED)) + GOLDEN_HEAD[12:]
    return head + struct.pack(">I", crc32c_bit_by_bit(GOLDEN_COVERED)) + GOLDEN_COVERED


def aiokafka_batch(
    count: int = 3,
    *,
    compression: int = 0,
    transactional: bool = False,
    producer: tuple[int, int, int] = (-1, -1, -1),
    value_size: int = 20,
) -> bytes:
    builder = DefaultRecordBatchBuilder(2, compression, transactional, *producer, 1 << 24)
    for i in range(count):
        builder.append(i, 1_700_000_000_000 + i, b"k%d" % i, bytes([i % 256]) * value_size, [("h", b"%d" % i)])
    return bytes(builder.build())


def header(**changes: int) -> BatchHeader:
    plain = BatchHeader(0, 49, -1, 2, 0, 0, 0, 0, 0, -1, -1, -1, 1)
    return plain._replace(**changes)


# -- Headers -----------------------------------------------------------------------------------------------------------


def test_every_field_of_a_header_is_where_the_format_says() -> None:
    batch = golden()
    read = whole_header(batch)
    assert read == BatchHeader(
        base_offset=100,
        length=len(batch) - 12,
        leader_epoch=7,
        magic=2,
        crc=crc32c_bit_by_bit(GOLDEN_COVERED),
        attributes=0x10,
        last_offset_delta=1,
        base_timestamp=1_700_000_000_000,
        max_timestamp=1_700_000_000_005,
        producer_id=1001,
        producer_epoch=2,
        base_sequence=10,
        record_count=2,
    )
    assert (read.last_offset, read.next_offset, read.size) == (101, 102, len(batch))
    assert (read.last_sequence, read.compression) == (11, Compression.NONE)
    assert read.is_transactional
    assert read.is_idempotent
    assert not read.has_holes
    assert read.pack() == batch[:HEADER_SIZE]
    verify_crc(batch)


@pytest.mark.parametrize(
    ("bit", "name"),
    [
        (3, "is_log_append_time"),
        (4, "is_transactional"),
        (5, "is_control"),
        (6, "has_delete_horizon"),
    ],
)
def test_attributes_are_the_bits_of_the_format(bit: int, name: str) -> None:
    assert getattr(header(attributes=1 << bit), name) is True
    assert getattr(header(attributes=~(1 << bit) & 0x7F), name) is False


def test_a_batch_is_as_produced_unless_broker_or_cleaner_changed_it() -> None:
    produced = header(attributes=0b0110111, last_offset_delta=4, record_count=5)
    assert produced.is_as_produced
    assert not produced._replace(record_count=4).is_as_produced
    assert not produced._replace(attributes=1 << 3).is_as_produced
    assert not produced._replace(attributes=1 << 6).is_as_produced


def test_codecs_are_the_lowest_three_bits() -> None:
    names = [header(attributes=0b1111000 | codec).compression.name for codec in range(5)]
    assert names == ["NONE", "GZIP", "SNAPPY", "LZ4", "ZSTD"]
    for codec in (5, 6, 7):
        with pytest.raises(UnsupportedBatch, match=f"codec {codec}"):
            _ = header(attributes=codec).compression


def test_sequences_wrap_after_the_largest_number() -> None:
    assert add_sequence(SEQUENCE_MAX, 1) == 0
    assert add_sequence(SEQUENCE_MAX - 1, 5) == 3
    assert add_sequence(0, SEQUENCE_MAX) == SEQUENCE_MAX
    assert add_sequence(-1, 10) == -1
    assert header(base_sequence=SEQUENCE_MAX - 1, last_offset_delta=3).last_sequence == 1
    assert header(base_sequence=-1, last_offset_delta=3).last_sequence == -1


def test_holes_are_offsets_without_records() -> None:
    assert not header(last_offset_delta=9, record_count=10).has_holes
    assert header(last_offset_delta=9, record_count=9).has_holes
    assert header(last_offset_delta=0, record_count=0).has_holes


@pytest.mark.parametrize("compression", range(5))
def test_headers_of_another_builder(compression: int) -> None:
    batch = aiokafka_batch(200, compression=compression, transactional=True, producer=(77, 3, 500))
    other = DefaultRecordBatch(batch)
    read = whole_header(batch)
    assert read.size == len(batch)
    assert read.compression == other.compression_type == compression
    assert (read.crc, read.attributes) == (other.crc, other.attributes)
    assert (read.last_offset, read.next_offset) == (199, other.next_offset)
    assert (read.base_timestamp, read.max_timestamp) == (other.first_timestamp, other.max_timestamp)
    assert (read.producer_id, read.producer_epoch, read.base_sequence) == (77, 3, 500)
    assert read.last_sequence == 699
    verify_crc(batch)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"magic": 0}, UnsupportedBatch, "format 0 is older"),
        ({"magic": 1}, UnsupportedBatch, "format 1 is older"),
        ({"magic": 3}, MalformedBatch, "format 3 is not known"),
        ({"length": 48}, MalformedBatch, "length 48"),
        ({"length": -1}, MalformedBatch, "length -1"),
        ({"base_offset": -1}, MalformedBatch, "base offset -1"),
        ({"last_offset_delta": -1, "record_count": 0}, MalformedBatch, "delta -1"),
        ({"base_offset": 2**63 - 1, "last_offset_delta": 1}, MalformedBatch, "delta 1"),
        ({"record_count": -1}, MalformedBatch, "-1 records"),
        ({"record_count": 2}, MalformedBatch, "2 records do not fit 1 offsets"),
    ],
)
def test_headers_that_cannot_be(changes: dict[str, int], error: type[BatchError], message: str) -> None:
    packed = header(**changes).pack()
    with pytest.raises(error, match=message):
        read_header(packed)
    with pytest.raises(error, match=message):
        list(walk(packed))
    with pytest.raises(error, match=message):
        rebase(packed, 0)


def test_one_batch_is_neither_cut_nor_followed() -> None:
    batch = golden()
    for wrong in (batch[:-1], batch + b"\0", batch[:60], b""):
        with pytest.raises(MalformedBatch):
            whole_header(wrong)


# -- Walking -----------------------------------------------------------------------------------------------------------


def log(*counts: int) -> tuple[bytes, list[int]]:
    """Batches of so many records one after another, and where each begins."""
    buffer, starts, offset = bytearray(), [], 1000
    for count in counts:
        starts.append(len(buffer))
        buffer += rebase(aiokafka_batch(count), offset)
        offset += count
    return bytes(buffer), starts


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_walk_finds_every_batch(kind: type) -> None:
    buffer, starts = log(1, 5, 3)
    walked = list(walk(kind(buffer)))
    assert [start for start, _, _ in walked] == starts
    assert [end for _, end, _ in walked] == [*starts[1:], len(buffer)]
    assert [(h.base_offset, h.record_count) for _, _, h in walked] == [(1000, 1), (1001, 5), (1006, 3)]
    for start, end, read in walked:
        assert whole_header(buffer[start:end]) == read


def test_a_walk_of_nothing() -> None:
    assert list(walk(b"")) == []


def test_a_walk_leaves_out_a_last_batch_cut_anywhere() -> None:
    buffer, starts = log(2, 2, 2)
    for cut in range(len(buffer) + 1):
        whole = sum(end <= cut for end in [*starts[1:], len(buffer)])
        assert len(list(walk(buffer[:cut]))) == whole, cut


def test_a_walk_does_not_need_consecutive_offsets_but_rising_ones() -> None:
    batch = aiokafka_batch(3)
    gap = rebase(batch, 10) + rebase(batch, 500)
    assert [h.base_offset for _, _, h in walk(gap)] == [10, 500]
    for again in (10, 12):
        walker = walk(rebase(batch, 10) + rebase(batch, again))
        assert next(walker)[2].base_offset == 10
        with pytest.raises(MalformedBatch, match=f"offset {again} follows one that ends at 12"):
            next(walker)


def test_a_walk_meets_old_messages() -> None:
    # An empty message of magic 1 (34 bytes with its offset and size) is smaller than a header of today.
    old = struct.pack(">qiIbbqii", 5, 22, 0, 1, 0, 0, -1, -1)
    assert len(old) == 34
    with pytest.raises(UnsupportedBatch, match="format 1"):
        list(walk(old))
    buffer, _ = log(1)
    walker = walk(buffer + old)
    next(walker)
    with pytest.raises(UnsupportedBatch, match="format 1"):
        next(walker)


def test_an_emptied_batch_is_walked_as_one_hole() -> None:
    emptied = seal(header(base_offset=7, last_offset_delta=4, record_count=0, base_timestamp=-1, max_timestamp=-1), b"")
    ((_, _, read),) = walk(emptied)
    assert read.has_holes
    assert (read.next_offset, read.size) == (12, HEADER_SIZE)
    verify_crc(emptied)


@given(st.binary(max_size=300))
def test_a_walk_of_garbage_ends_or_raises_a_batch_error(garbage: bytes) -> None:
    try:
        for start, end, read in walk(garbage):
            assert 0 <= start < end <= len(garbage)
            assert end - start == read.size
    except (MalformedBatch, UnsupportedBatch):
        pass


@given(st.data())
def test_a_walk_of_damaged_batches_ends_or_raises_a_batch_error(data: st.DataObject) -> None:
    buffer = bytearray(log(1, 2, 3)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert len(list(walk(buffer))) <= 3 + len(buffer) // HEADER_SIZE
    except (MalformedBatch, UnsupportedBatch):
        pass


# -- Surgery -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", range(5))
def test_rebase_changes_the_base_offset_and_nothing_else(compression: int) -> None:
    batch = aiokafka_batch(20, compression=compression)
    moved = rebase(batch, 2**62)
    assert whole_header(moved) == whole_header(batch)._replace(base_offset=2**62)
    assert moved[8:] == batch[8:]
    verify_crc(moved)


@pytest.mark.parametrize("compression", range(5))
def test_restamp_against_another_builder(compression: int) -> None:
    stamped = restamp(
        aiokafka_batch(200, compression=compression, transactional=True, producer=(5, 0, 0)),
        producer_id=2**62 + 9,
        producer_epoch=12,
        base_sequence=SEQUENCE_MAX - 3,
    )
    # That builder computes the CRC over the whole batch.
    expected = aiokafka_batch(
        200, compression=compression, transactional=True, producer=(2**62 + 9, 12, SEQUENCE_MAX - 3)
    )
    assert stamped == expected
    assert DefaultRecordBatch(stamped).validate_crc()


stamps = st.fixed_dictionaries(
    {
        "base_offset": st.integers(0, 2**63 - 200),
        "producer_id": st.integers(-1, 2**63 - 1),
        "producer_epoch": st.integers(-1, 2**15 - 1),
        "base_sequence": st.integers(-1, SEQUENCE_MAX),
    }
)


@given(stamps, st.integers(1, 100), st.integers(0, 600))
def test_all_ways_to_restamp_agree_with_recomputing_everything(
    stamp: dict[str, int], count: int, value_size: int
) -> None:
    batch = aiokafka_batch(count, value_size=value_size)
    expected = seal(whole_header(batch)._replace(**stamp), batch[HEADER_SIZE:])
    assert restamp(batch, **stamp) == expected
    assert restamp(memoryview(batch), **stamp) == expected
    assert restamped_header(batch, **stamp) + batch[HEADER_SIZE:] == expected
    verify_crc(expected)


def test_the_golden_batch_restamped_by_hand() -> None:
    stamped = restamp(golden(), producer_id=-1, producer_epoch=-1, base_sequence=-1)
    covered = GOLDEN_COVERED[:22] + b"\xff" * 14 + GOLDEN_COVERED[36:]
    assert stamped[:8] == bytes(8)
    assert stamped[21:] == covered
    assert stamped[17:21] == struct.pack(">I", crc32c_bit_by_bit(covered))


def test_a_batch_is_carried_there_and_back() -> None:
    batch = aiokafka_batch(3, producer=(11, 4, 70))
    there = restamp(batch, producer_id=carry(11, 0, 1), producer_epoch=4, base_sequence=70)
    assert whole_header(there).producer_id in ProducerIdRange(0)
    back = restamp(there, producer_id=carry(whole_header(there).producer_id, 1, 0), producer_epoch=4, base_sequence=70)
    assert back == batch


@pytest.mark.parametrize("compression", range(5))
def test_a_batch_in_a_transaction_is_the_same_but_for_who_wrote_it(compression: int) -> None:
    batch = aiokafka_batch(3, compression=compression)
    made = in_transaction(batch, producer_id=7, producer_epoch=2, base_sequence=40)
    header = whole_header(made)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 2, 40)
    assert header.is_transactional
    verify_crc(made)
    assert made[HEADER_SIZE:] == batch[HEADER_SIZE:]
    assert restamp(as_committed(made), producer_id=-1, producer_epoch=-1, base_sequence=-1) == restamp(
        batch, producer_id=-1, producer_epoch=-1, base_sequence=-1
    )


def test_damage_is_never_blessed_with_a_new_crc() -> None:
    batch = aiokafka_batch(3)
    for position in (21, 40, HEADER_SIZE, len(batch) - 1):
        damaged = bytearray(batch)
        damaged[position] ^= 0x40
        as_it_was = bytes(damaged)
        with pytest.raises(BatchError):
            verify_crc(damaged)
        with pytest.raises(BatchError):
            restamp(damaged, producer_id=1, producer_epoch=0, base_sequence=0)
        assert damaged == as_it_was
    payload_bit = bytearray(batch)
    payload_bit[-1] ^= 1
    with pytest.raises(CorruptBatch, match="offset 0 does not match its CRC"):
        restamp(payload_bit, producer_id=1, producer_epoch=0, base_sequence=0)


def test_leader_epoch_and_base_offset_are_not_covered() -> None:
    batch = bytearray(aiokafka_batch(1))
    struct.pack_into(">i", batch, 12, 99)
    verify_crc(rebase(batch, 5))


def test_surgery_refuses_what_is_not_one_batch() -> None:
    batch = aiokafka_batch(1)
    for wrong in (b"", batch[:-1], batch + batch):
        with pytest.raises(MalformedBatch):
            rebase(wrong, 0)
        with pytest.raises(MalformedBatch):
            restamp(wrong, producer_id=1, producer_epoch=0, base_sequence=0)
        with pytest.raises(MalformedBatch):
            verify_crc(wrong)
