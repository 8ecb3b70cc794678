"""The codecs: streams written by hand from their specifications, round trips, and bounds that hold."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import cramjam
import pytest
from aiokafka import codec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples

from isthmus_protocol.record_compression import compress, decompress
from isthmus_protocol.records import BatchTooLarge, Compression, MalformedBatch, UnsupportedBatch

CODECS = [c for c in Compression if c is not Compression.NONE]

# "hello" in each format, stored as it is, laid out by hand.
SNAPPY_HELLO = bytes.fromhex("0510") + b"hello"  # length 5, a literal of 5
HELLO = {
    "snappy, raw": (Compression.SNAPPY, SNAPPY_HELLO),
    "snappy, Java": (
        Compression.SNAPPY,
        b"\x82SNAPPY\0" + bytes.fromhex("00000001" "00000001" "00000007") + SNAPPY_HELLO,
    ),
    "lz4": (
        Compression.LZ4,
        # Magic, independent blocks, 64 KiB, header checksum; a stored block of 5; the end.
        bytes.fromhex("04224d18" "60" "40" "82" "05000080") + b"hello" + bytes(4),
    ),
    "zstd": (
        Compression.ZSTD,
        # Magic, single segment with a size of one byte, 5; the last block, stored, of 5.
        bytes.fromhex("28b52ffd" "20" "05" "290000") + b"hello",
    ),
    "gzip": (
        Compression.GZIP,
        # Magic, deflate, no flags or time; the last block, stored, of 5.
        bytes.fromhex("1f8b0800000000000003" "01" "0500" "faff")
        + b"hello"
        + zlib.crc32(b"hello").to_bytes(4, "little")
        + bytes.fromhex("05000000"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HELLO)
def test_streams_written_by_hand(name: str) -> None:
    compression, stream = HELLO[name]
    assert decompress(stream, compression) == b"hello"
    assert decompress(memoryview(stream), compression) == b"hello"
    # A limit is what is allowed, not one less.
    assert decompress(stream, compression, limit=5) == b"hello"
    with pytest.raises(BatchTooLarge, match="more than 4 bytes"):
        decompress(stream, compression, limit=4)


@pytest.mark.parametrize("name", HELLO)
def test_a_stream_cut_anywhere_is_malformed(name: str) -> None:
    compression, stream = HELLO[name]
    # The empty stream is no cut: an empty gzip or snappy-java stream is nothing, compressed.
    for cut in range(1, len(stream)):
        if name == "snappy, Java" and cut == 16:
            continue  # its header alone, without blocks: an empty stream
        with pytest.raises(MalformedBatch):
            decompress(stream[:cut], compression)


@settings(deadline=None)
@given(st.binary(max_size=5000), st.integers(1, 60), st.sampled_from(list(Compression)))
def test_round_trips(unit: bytes, repeats: int, compression: Compression) -> None:
    payload = unit * repeats
    assert decompress(compress(payload, compression), compression) == payload
    assert decompress(compress(bytearray(payload), compression), compression, limit=len(payload)) == payload


@pytest.mark.parametrize("payload", [b"x", b"kafka " * 50_000, bytes(range(256)) * 400])
def test_another_client_reads_what_is_written_and_the_other_way_round(payload: bytes) -> None:
    written = {c: compress(payload, c) for c in CODECS}
    assert codec.gzip_decode(written[Compression.GZIP]) == payload
    assert codec.snappy_decode(written[Compression.SNAPPY]) == payload
    assert codec.lz4_decode(written[Compression.LZ4]) == payload
    assert codec.zstd_decode(written[Compression.ZSTD]) == payload
    assert decompress(codec.gzip_encode(payload), Compression.GZIP) == payload
    assert decompress(codec.snappy_encode(payload), Compression.SNAPPY) == payload
    assert decompress(codec.snappy_encode(payload, xerial_compatible=False), Compression.SNAPPY) == payload
    assert decompress(codec.lz4_encode(payload), Compression.LZ4) == payload
    assert decompress(codec.zstd_encode(payload), Compression.ZSTD) == payload


def test_lz4_frames_are_what_java_reads() -> None:
    frame = compress(b"kafka " * 50_000, Compression.LZ4)
    assert frame[:4] == bytes.fromhex("04224d18")
    assert frame[4] >> 6 == 1  # version
    assert frame[4] & 0x20  # independent blocks: Java refuses linked ones (KIP-57)
    # Frames of linked blocks, which other encoders write by default, are read nevertheless.
    linked = cramjam.lz4.Compressor(block_linked=True)
    linked.compress(b"kafka " * 50_000)
    assert decompress(bytes(linked.finish()), Compression.LZ4) == b"kafka " * 50_000


def test_snappy_is_written_in_blocks_of_32_kib() -> None:
    stream = compress(bytes(100_000), Compression.SNAPPY)
    assert stream[:16] == b"\x82SNAPPY\0" + bytes.fromhex("0000000100000001")
    position, sizes = 16, []
    while position < len(stream):
        size = int.from_bytes(stream[position : position + 4], "big")
        sizes.append(cramjam.snappy.decompress_raw_len(stream[position + 4 : position + 4 + size]))
        position += 4 + size
    assert sizes == [32_768, 32_768, 32_768, 1_696]


def test_streams_of_several_parts() -> None:
    first, second = b"one" * 100, b"two" * 100
    for compression in CODECS:
        both = compress(first, compression) + compress(second, compression)
        assert decompress(both, compression) == first + second
        with pytest.raises(BatchTooLarge):
            decompress(both, compression, limit=len(first + second) - 1)


def test_gzip_streams_of_very_many_members_are_refused() -> None:
    with pytest.raises(UnsupportedBatch, match="members"):
        decompress(gzip.compress(b"") * 1000, Compression.GZIP)


@pytest.mark.parametrize("compression", CODECS)
def test_a_bomb_takes_no_more_memory_than_the_limit(compression: Compression) -> None:
    bomb = compress(bytes(64 << 20), compression)
    tracemalloc.start()
    try:
        with pytest.raises(BatchTooLarge, match="more than 1048576 bytes"):
            decompress(bomb, compression, limit=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < (5 << 20) + len(bomb)
    finally:
        tracemalloc.stop()


def test_a_size_that_is_only_claimed_is_not_believed() -> None:
    # 4 GiB by its first bytes, nothing behind them.
    with pytest.raises(BatchTooLarge):
        decompress(bytes.fromhex("ffffffff0f"), Compression.SNAPPY)
    # A zstd frame whose header claims 2^62 bytes.
    with pytest.raises((MalformedBatch, BatchTooLarge)):
        decompress(bytes.fromhex("28b52ffd" "e0" "0000000000000040" "290000") + b"hello", Compression.ZSTD)  # fmt: skip


def test_uncompressed_records_have_the_same_limit() -> None:
    assert decompress(b"hello", Compression.NONE, limit=5) == b"hello"
    with pytest.raises(BatchTooLarge):
        decompress(b"hello", Compression.NONE, limit=4)


@settings(deadline=None, max_examples=examples(300))
@given(st.data(), st.sampled_from(CODECS))
def test_damaged_streams_raise_batch_errors_only(data: st.DataObject, compression: Compression) -> None:
    stream = bytearray(compress(b"some records, some records, more records" * 30, compression))
    for _ in range(data.draw(st.integers(1, 6))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    stream = stream[: data.draw(st.integers(0, len(stream)))]
    try:
        decompress(stream, compression, limit=1 << 20)
    except (MalformedBatch, UnsupportedBatch):
        pass


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from(CODECS), st.booleans())
def test_garbage_raises_batch_errors_only(garbage: bytes, compression: Compression, with_head: bool) -> None:
    head = compress(b"", compression)[:16] if with_head else b""
    try:
        decompress(head + garbage, compression, limit=1 << 20)
    except (MalformedBatch, UnsupportedBatch):
        pass
