"""Fillers: the records that a loop would have written, made at once."""

from __future__ import annotations

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples

from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.record_compression import decompress
from isthmus_protocol.record_fillers import FILLER_RECORDS_MAX, filler_batch
from isthmus_protocol.records import HEADER_SIZE, Compression, restamp, verify_crc, whole_header

NOW = 1_700_000_000_000
# Where offset deltas get one byte longer, and their neighbours.
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 8191, 8192, 8193, 16_384, 20_000]


def by_the_codec(count: int, key: bytes | None) -> bytes:
    filler = filler_batch(count, timestamp=NOW, key=key)
    return encode_batch([Record(i, NOW, key, None) for i in range(count)], whole_header(filler))


@pytest.mark.parametrize("count", EDGES)
@pytest.mark.parametrize("key", [None, b"", b"filler", b"k" * 70])
def test_a_filler_is_what_the_codec_would_write(count: int, key: bytes | None) -> None:
    assert filler_batch(count, timestamp=NOW, key=key) == by_the_codec(count, key)


@settings(deadline=None, max_examples=examples(20))
@given(st.integers(1, 40_000), st.none() | st.binary(max_size=10))
def test_a_filler_of_any_size_is_what_the_codec_would_write(count: int, key: bytes | None) -> None:
    assert filler_batch(count, timestamp=NOW, key=key) == by_the_codec(count, key)


def test_the_largest_filler_fits_a_brokers_default_limit() -> None:
    batch = filler_batch(FILLER_RECORDS_MAX, timestamp=NOW)
    assert len(batch) < 1_048_588  # message.max.bytes
    verify_crc(batch)
    header = whole_header(batch)
    assert (header.base_offset, header.next_offset, header.record_count) == (0, 1_000_000, 1_000_000)
    assert not header.has_holes
    payload = decompress(batch[HEADER_SIZE:], Compression.ZSTD)
    # The last record: length 8, deltas 0 and 999,999, nothing inside.
    assert payload.endswith(bytes.fromhex("10" "00" "00" "fe887a" "01" "01" "00"))  # fmt: skip
    # Its records, counted by their sizes: 64 with an offset of one byte, 8,128 with two, the others with three.
    assert len(payload) == 64 * 7 + 8_128 * 8 + (1_000_000 - 8_192) * 9


def test_another_client_reads_a_filler() -> None:
    other = DefaultRecordBatch(filler_batch(9000, timestamp=NOW))
    assert other.validate_crc()
    assert [r.offset for r in other] == list(range(9000))


def test_tombstones_for_a_transaction_that_will_be_aborted() -> None:
    batch = filler_batch(
        100, timestamp=NOW, key=b"gap", producer_id=2**62, producer_epoch=4, base_sequence=7, transactional=True
    )
    header = whole_header(batch)
    assert header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (2**62, 4, 7)
    assert header.last_sequence == 106
    assert {(r.key, r.value, r.timestamp) for r in decode_records(batch)} == {(b"gap", None, NOW)}


def test_the_next_filler_of_a_long_gap_is_a_restamped_one() -> None:
    first = filler_batch(500, timestamp=NOW, producer_id=9, producer_epoch=0, base_sequence=0)
    second = filler_batch(500, timestamp=NOW, producer_id=9, producer_epoch=0, base_sequence=500)
    assert restamp(first, producer_id=9, producer_epoch=0, base_sequence=500) == second


@pytest.mark.parametrize("count", [0, -1, FILLER_RECORDS_MAX + 1])
def test_fillers_that_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"not {count}"):
        filler_batch(count, timestamp=NOW)


def test_a_key_that_makes_a_filler_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        filler_batch(FILLER_RECORDS_MAX, timestamp=NOW, key=bytes(1000))
