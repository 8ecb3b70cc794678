"""The codecs of record batches, written as Java clients and brokers read them, and read within a bound.

Formats: gzip (RFC 1952), snappy in snappy-java's stream or raw, LZ4 frames (KIP-57), zstd frames (KIP-110).
"""

from __future__ import annotations

import mmap
import struct
import zlib

import cramjam

from isthmus_protocol.records import BatchTooLarge, Compression, Frame, MalformedBatch, UnsupportedBatch

# What a batch may decompress to. Brokers take batches of 1 MB (message.max.bytes) unless set otherwise; a filler of a
# million records, the most compressible batch that is made here, holds 10 MB.
DECOMPRESSED_MAX = 128 << 20

# snappy-java's stream (xerial), as Java producers write it: this, then blocks of 32 KiB, each behind its size.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK = 32 << 10
_INT32 = struct.Struct(">i")
# zlib's "wbits" for a gzip member.
_GZIP = 31
# A gzip stream may consist of several members, though nobody writes such batches. Each costs a copy of what follows it,
# so a megabyte of empty ones would keep a core busy for a minute.
_GZIP_MEMBERS_MAX = 64
_ZSTD_LEVEL = 3


def compress(payload: bytes | bytearray, compression: Compression) -> bytes:
    """`payload` as Java clients and brokers read it; the levels are the codecs' defaults."""
    if compression is Compression.NONE:
        return bytes(payload)
    if compression is Compression.GZIP:
        return zlib.compress(payload, wbits=_GZIP)
    if compression is Compression.SNAPPY:
        view = memoryview(payload)
        parts = [_XERIAL_HEADER]
        for start in range(0, len(payload), _XERIAL_BLOCK):
            block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK]))
            parts += (_INT32.pack(len(block)), block)
        return b"".join(parts)
    if compression is Compression.LZ4:
        # Java reads frames of independent blocks only (KIP-57).
        compressor = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
        compressor.compress(bytes(payload))  # it takes nothing else
        return bytes(compressor.finish())
    return bytes(cramjam.zstd.compress(payload, level=_ZSTD_LEVEL))


def decompress(payload: Frame, compression: Compression, *, limit: int = DECOMPRESSED_MAX) -> bytes:
    """What `payload` holds, if it is at most `limit` bytes: never more than that is written, whatever it claims.

    Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.
    """
    if compression is Compression.NONE:
        if len(payload) > limit:
            raise _too_large(limit)
        return bytes(payload)
    if compression is Compression.GZIP:
        return _gunzip(payload, limit)
    try:
        if compression is Compression.SNAPPY:
            return _unsnappy(payload, limit)
        return _decompress_frames(payload, compression, limit)
    except cramjam.DecompressionError as error:
        raise MalformedBatch(f"not {compression.name.lower()}: {error}") from None


def _too_large(limit: int) -> BatchTooLarge:
    return BatchTooLarge(f"the batch's records are more than {limit} bytes")


def _gunzip(payload: Frame, limit: int) -> bytes:
    parts: list[bytes] = []
    left = limit
    rest = bytes(payload)
    while rest:
        if len(parts) == _GZIP_MEMBERS_MAX:
            raise UnsupportedBatch(f"a gzip stream of more than {_GZIP_MEMBERS_MAX} members")
        member = zlib.decompressobj(_GZIP)
        try:
            # One byte more than allowed, to distinguish a full buffer from one that overflows; 0 would mean no limit.
            part = member.decompress(rest, left + 1)
        except zlib.error as error:
            raise MalformedBatch(f"not gzip: {error}") from None
        left -= len(part)
        if left < 0:
            raise _too_large(limit)
        if not member.eof:
            raise MalformedBatch("not gzip: the stream is cut")
        parts.append(part)
        rest = member.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unsnappy(payload: Frame, limit: int) -> bytes:
    stream = bytes(payload)
    if not stream.startswith(_XERIAL_MAGIC):
        return _unsnappy_block(stream, limit, limit)
    view = memoryview(stream)
    parts: list[bytes] = []
    left = limit
    position = 0
    while position < len(stream):
        # Streams may be concatenated, each with its header.
        if stream.startswith(_XERIAL_MAGIC, position):
            position += len(_XERIAL_HEADER)
            continue
        if len(stream) - position < _INT32.size:
            raise MalformedBatch("not snappy: the stream is cut")
        size = _INT32.unpack_from(stream, position)[0]
        position += _INT32.size
        if not 0 <= size <= len(stream) - position:
            raise MalformedBatch(f"not snappy: a block of {size} bytes where {len(stream) - position} are left")
        part = _unsnappy_block(view[position : position + size], left, limit)
        left -= len(part)
        parts.append(part)
        position += size
    if position > len(stream):
        raise MalformedBatch("not snappy: the stream is cut")
    return b"".join(parts)


def _unsnappy_block(block: bytes | memoryview, left: int, limit: int) -> bytes:
    if cramjam.snappy.decompress_raw_len(block) > left:
        raise _too_large(limit)
    return bytes(cramjam.snappy.decompress_raw(block))


def _decompress_frames(payload: Frame, compression: Compression, limit: int) -> bytes:
    codec = cramjam.lz4 if compression is Compression.LZ4 else cramjam.zstd
    # Neither format says reliably how much is inside. Memory that is mapped but not touched costs nothing, so the
    # output is as large as the limit, and the decompressor stops at its end.
    with mmap.mmap(-1, limit + 1) as output:
        try:
            size = codec.decompress_into(payload, output)
        except cramjam.DecompressionError as error:
            if "write whole buffer" in str(error):
                raise _too_large(limit) from None
            raise
        if size > limit:
            raise _too_large(limit)
        return output[:size]
