"""Batches taken apart: runs and holes, append time, cuts; batches that hold far more than they are long."""

from __future__ import annotations

import threading
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.partition_log import runs_of
from support.records import MIB, NOW, PLAIN, batch_of, large_inside, minimal, record_lists
from support.seeds import quarters

from isthmus_plugins.decompression import PIECE_BYTES, decompressed
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.record_compression import compress
from isthmus_protocol.record_division import STEP_RECORDS, Run, divided
from isthmus_protocol.records import (
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    SEQUENCE_MAX,
    TRANSACTIONAL_BIT,
    BatchTooLarge,
    Compression,
    CorruptBatch,
    MalformedBatch,
    seal,
    verify_crc,
    whole_header,
)
from isthmus_protocol.varints import varint


def offsets_of(run: Run) -> list[int]:
    return [] if run.batch is None else [r.offset for r in decode_records(run.batch)]


@pytest.mark.parametrize("compression", list(Compression))
def test_runs_and_holes_of_a_compacted_batch(compression: Compression) -> None:
    like = PLAIN._replace(
        base_offset=100, last_offset_delta=19, producer_id=8, producer_epoch=2, base_sequence=50, leader_epoch=6,
        attributes=TRANSACTIONAL_BIT | compression,
    )  # fmt: skip
    records = [Record(o, NOW + o, b"k%d" % o, b"v" * 50, (("h", b""),)) for o in (102, 103, 104, 110, 118)]
    # The cleaner keeps base offset, last offset and base sequence of a batch, whatever it takes out.
    payload = b"".join(
        varint(len(body)) + body
        for body in (
            b"".join(
                (b"\0", varint(r.timestamp - NOW), varint(r.offset - 100), b"\x08", r.key or b"", b"\x64", b"v" * 50)
            )
            + b"\x02\x02h\x00"
            for r in records
        )
    )
    batch = seal(
        like._replace(record_count=5, base_timestamp=NOW, max_timestamp=NOW + 118), compress(payload, compression)
    )
    assert decode_records(batch) == records
    runs = runs_of(batch)
    expected = [(100, 2), (102, 3), (105, 5), (110, 1), (111, 7), (118, 1), (119, 1)]
    assert [(r.first_offset, r.length) for r in runs] == expected
    assert all(a.next_offset == b.first_offset for a, b in pairwise(runs))
    assert [r for run in runs if run.batch for r in decode_records(run.batch)] == records
    for run in runs:
        if run.batch is None:
            continue
        verify_crc(run.batch)
        header = whole_header(run.batch)
        assert not header.has_holes
        assert (header.base_offset, header.last_offset_delta + 1) == (run.first_offset, run.length)
        assert header.compression is compression
        assert header.is_transactional
        assert (header.producer_id, header.producer_epoch, header.leader_epoch) == (8, 2, 6)
        # The sequence that the record had when it was produced.
        assert header.base_sequence == 50 + run.first_offset - 100
        assert header.base_timestamp == NOW + run.first_offset


def test_a_batch_without_holes_is_one_run_as_it_is() -> None:
    batch = encode_batch([Record(o, NOW, None, b"v") for o in range(5, 9)], PLAIN)
    assert runs_of(batch) == [Run(5, 4, batch)]


def test_an_emptied_batch_is_one_hole() -> None:
    emptied = seal(PLAIN._replace(base_offset=7, last_offset_delta=4, record_count=0), b"")
    assert runs_of(emptied) == [Run(7, 5, None)]
    assert decode_records(emptied) == []


def test_sequences_of_runs_wrap() -> None:
    like = PLAIN._replace(last_offset_delta=9, producer_id=1, producer_epoch=0, base_sequence=SEQUENCE_MAX - 2)
    batch = encode_batch([Record(o, NOW, None, b"v") for o in (0, 1, 6)], like)
    assert [whole_header(r.batch).base_sequence for r in runs_of(batch) if r.batch] == [SEQUENCE_MAX - 2, 3]


@settings(deadline=None)
@given(record_lists(), st.integers(0, 5), st.sampled_from(list(Compression)))
def test_runs_cover_every_offset_once_and_keep_every_record(
    records: list[Record], after: int, compression: Compression
) -> None:
    batch = encode_batch(records, PLAIN, compression=compression, last_offset=records[-1].offset + after)
    runs = runs_of(batch)
    header = whole_header(batch)
    covered = [o for run in runs for o in range(run.first_offset, run.next_offset)]
    assert covered == list(range(header.base_offset, header.next_offset))
    assert [r for run in runs if run.batch for r in decode_records(run.batch)] == records
    for run in runs:
        assert offsets_of(run) == ([] if run.batch is None else list(range(run.first_offset, run.next_offset)))
    # Neighbours differ: a run is as long as it can be.
    assert all((a.batch is None) != (b.batch is None) for a, b in pairwise(runs))


@settings(deadline=None)
@given(record_lists(), st.sampled_from(list(Compression)), st.integers(NOW, NOW + 10_000))
def test_append_time_becomes_each_records_own_time(
    records: list[Record], compression: Compression, append_time: int
) -> None:
    source = batch_of(records, LOG_APPEND_TIME_BIT | compression, max_timestamp=append_time)
    expected = [r._replace(timestamp=append_time) for r in records]
    assert decode_records(source) == expected
    runs = [run.batch for run in runs_of(source) if run.batch is not None]
    for run in runs:
        verify_crc(run)
        header = whole_header(run)
        assert not header.is_log_append_time
        assert header.compression is compression
        assert header.base_timestamp == header.max_timestamp == append_time
        assert runs_of(run) == [Run(header.base_offset, header.last_offset_delta + 1, run)]
    assert [r for run in runs for r in decode_records(run)] == expected


def test_append_time_with_holes() -> None:
    records = [Record(o, NOW - o, b"k", b"v") for o in (10, 11, 15)]
    batch = batch_of(records, LOG_APPEND_TIME_BIT, max_timestamp=NOW + 7)
    runs = runs_of(batch)
    assert [(r.first_offset, r.length, r.batch is None) for r in runs] == [
        (10, 2, False),
        (12, 3, True),
        (15, 1, False),
    ]
    for run in runs:
        if run.batch:
            assert not whole_header(run.batch).is_log_append_time
            assert {r.timestamp for r in decode_records(run.batch)} == {NOW + 7}


def test_a_batch_is_cut_at_its_front() -> None:
    records = [Record(o, NOW + o, b"k", b"v") for o in (10, 11, 15, 16)]
    batch = batch_of(records, producer_id=1, producer_epoch=0, base_sequence=100)
    for offset, kept in ((11, records[1:]), (12, records[2:]), (16, records[3:])):
        runs = runs_of(batch, from_offset=offset)
        assert (runs[0].first_offset, runs[-1].next_offset) == (offset, 17)
        assert [r for run in runs if run.batch for r in decode_records(run.batch)] == kept
    assert [whole_header(r.batch).base_sequence for r in runs_of(batch, from_offset=11) if r.batch] == [101, 105]


def test_runs_of_so_many_records_at_most() -> None:
    records = [Record(o, NOW, b"k", b"v") for o in range(10, 20)]
    batch = batch_of(records)
    runs = runs_of(batch, records_max=4)
    assert [(r.first_offset, r.length) for r in runs] == [(10, 4), (14, 4), (18, 2)]
    assert [r for run in runs if run.batch for r in decode_records(run.batch)] == records
    assert runs_of(batch, records_max=10) == [Run(10, 10, batch)]


def test_the_delete_horizon_is_left_out() -> None:
    batch = batch_of([Record(5, NOW, b"k", None)], DELETE_HORIZON_BIT)
    (run,) = runs_of(batch)
    assert run.batch is not None
    assert not whole_header(run.batch).has_delete_horizon
    assert decode_records(run.batch) == decode_records(batch)


# -- Much in little ----------------------------------------------------------------------------------------------------


def peak_bytes_of(batch: bytes, **how: int) -> tuple[list[Run], int, int]:
    """The runs of a batch, the most bytes that Python held at a time meanwhile, and steps."""
    tracemalloc.start()
    try:
        runs, steps = [], 0
        for run in divided(batch, decompressed(batch), **how):
            steps += 1
            if run is not None:
                runs.append(run)
        return runs, tracemalloc.get_traced_memory()[1], steps
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("compression", "values"),
    quarters([(Compression.ZSTD, 1), (Compression.ZSTD, 1000), (Compression.LZ4, 1), (Compression.GZIP, 9)]),
)
def test_little_of_a_batch_is_in_memory_however_much_it_holds(compression: Compression, values: int) -> None:
    batch = large_inside(compression, values)
    assert len(batch) < MIB
    with pytest.raises(BatchTooLarge):
        decode_records(batch)
    ((first, length, again),), peak, steps = peak_bytes_of(batch)
    assert (first, length) == (0, values)
    assert again is not None
    assert peak < 4 * MIB + 2 * len(batch), "some pieces, and the new batch"
    assert steps > 140 // 2, "others go on meanwhile"
    header = whole_header(again)
    assert (header.base_timestamp, header.max_timestamp) == (NOW + 9, NOW + 9)
    assert header.record_count == values
    size = sum(map(len, decompressed(again)))
    assert size == sum(map(len, decompressed(batch))), "no byte more, no byte less"


def test_very_many_records_are_taken_apart_in_steps() -> None:
    count = 20 * STEP_RECORDS
    payload = b"".join(minimal(number, b"") for number in range(count))
    header = PLAIN._replace(
        last_offset_delta=count - 1, record_count=count, base_timestamp=NOW, attributes=LOG_APPEND_TIME_BIT
    )
    runs, peak, steps = peak_bytes_of(seal(header, payload), records_max=count // 4)
    assert [(run.first_offset, run.length) for run in runs] == [
        (number * count // 4, count // 4) for number in range(4)
    ]
    assert steps >= 20
    assert peak < 2 * MIB, "not an object for each"
    assert [each.offset for run in runs if run.batch for each in decode_records(run.batch)] == list(range(count))


@pytest.mark.parametrize("compression", list(Compression))
def test_a_batch_of_many_pieces_is_the_same_to_the_byte_of_each_record(compression: Compression) -> None:
    records = [Record(2 * n, NOW + n, b"k%d" % n, bytes([n]) * (n * 9000), (("h", b"x"),), 3) for n in range(90)]
    batch = encode_batch(records, PLAIN, compression=compression)
    assert sum(map(len, decompressed(batch))) > 10 * PIECE_BYTES
    runs = runs_of(batch)
    assert [each for run in runs if run.batch for each in decode_records(run.batch)] == records
    appended = seal(
        whole_header(batch)._replace(attributes=LOG_APPEND_TIME_BIT | compression, last_offset_delta=178),
        batch[HEADER_SIZE:],
    )
    assert sum(run.length for run in runs_of(appended)) == 179
    one = [Record(n, NOW, b"k", bytes([n]) * 100_000) for n in range(60)]
    (whole,) = runs_of(batch_of(one, LOG_APPEND_TIME_BIT | compression, max_timestamp=NOW))
    assert whole.batch is not None
    assert decode_records(whole.batch) == one, "compressed as it came"


def test_who_stops_in_the_middle_leaves_nothing_behind() -> None:
    batch = large_inside(Compression.ZSTD, size=4 * MIB)
    threads = threading.active_count()
    dividing = divided(batch, decompressed(batch))
    assert next(dividing) is None
    assert threading.active_count() == threads + 1
    del dividing
    assert threading.active_count() == threads


@pytest.mark.parametrize("compression", [Compression.ZSTD, Compression.LZ4, Compression.GZIP])
def test_a_large_batch_that_is_cut_is_malformed(compression: Compression) -> None:
    batch = large_inside(compression, size=4 * MIB)
    header = whole_header(batch)
    cut = seal(header, batch[HEADER_SIZE : HEADER_SIZE + (len(batch) - HEADER_SIZE) // 2])
    with pytest.raises(MalformedBatch, match=f"not {compression.name.lower()}"):
        list(divided(cut, decompressed(cut)))
    wrong = seal(header._replace(record_count=2, last_offset_delta=1), batch[HEADER_SIZE:])
    with pytest.raises(MalformedBatch, match="ends within its record number 1"):
        list(divided(wrong, decompressed(wrong)))


def test_damaged_bytes_get_no_new_checksum() -> None:
    batch = bytearray(batch_of([Record(5, NOW, b"k", b"value")], LOG_APPEND_TIME_BIT))
    batch[-3] ^= 1
    with pytest.raises(CorruptBatch):
        runs_of(bytes(batch))
