"""Messages go by their keys where partition counts differ: the same partition for a key, and nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.records import PLAIN, record_lists

from isthmus_plugins.distribution.by_key import by_key, murmur2, partition_of
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import Compression, read_header


@pytest.mark.parametrize(
    ("key", "hashed"),
    [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536),
     (b"a-little-bit-longer-string", -1486304829), (b"abc", 479470107),
     (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971)],
)  # fmt: skip
def test_keys_are_hashed_as_kafka_does(key: bytes, hashed: int) -> None:
    assert murmur2(key) == hashed % 2**32


def test_a_message_without_a_key_keeps_its_number_as_far_as_there_is_one() -> None:
    assert [partition_of(None, 5, count) for count in (1, 3, 6, 9)] == [0, 2, 5, 5]
    assert partition_of(b"", 5, 3) == (murmur2(b"") & 0x7FFFFFFF) % 3


@settings(deadline=None)
@given(
    st.lists(record_lists(holes=False), min_size=1, max_size=3),
    st.integers(0, 9),
    st.integers(1, 7),
    st.sampled_from((Compression.NONE, Compression.ZSTD)),
)
def test_every_message_is_in_one_partition_in_its_order(
    lists: list[list[Record]], partition: int, partitions: int, compression: Compression
) -> None:
    def without_offset(records: list[Record]) -> list[Record]:
        return [record._replace(offset=0) for record in records]

    batches = [
        encode_batch(
            [each._replace(offset=number) for number, each in enumerate(records)], PLAIN, compression=compression
        )
        for records in lists
    ]
    divided = by_key(batches, partition, partitions)
    all_of_them = [record for records in lists for record in without_offset(records)]
    for number, found in divided.items():
        there = [record for batch in found for record in without_offset(decode_records(batch))]
        assert there == [each for each in all_of_them if partition_of(each.key, partition, partitions) == number]
        for batch in found:
            header = read_header(batch)
            assert (header.base_offset, header.producer_id, header.compression) == (0, -1, compression)
            assert header.record_count == header.last_offset_delta + 1
    assert sum(read_header(batch).record_count for found in divided.values() for batch in found) == len(all_of_them)
