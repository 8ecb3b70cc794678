"""The codecs of record batches, written as Java clients and brokers read them, and read within a bound.

Formats: gzip (RFC 1952), snappy in snappy-java's stream or raw, LZ4 frames (KIP-57), zstd frames (KIP-110).
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from typing import Any

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
GZIP = 31
# A gzip stream may consist of several members, though nobody writes such batches. Each costs a copy of what follows it,
# so a megabyte of empty ones would keep a core busy for a minute.
GZIP_MEMBERS_MAX = 64
_ZSTD_LEVEL = 3


def compress(payload: bytes | bytearray, compression: Compression) -> bytes:
    """`payload` as Java clients and brokers read it; the levels are the codecs' defaults."""
    if compression is Compression.NONE:
        return bytes(payload)
    if compression is Compression.GZIP:
        return zlib.compress(payload, wbits=GZIP)
    if compression is Compression.SNAPPY:
        return b"".join((_XERIAL_HEADER, *_xerial_blocks(memoryview(payload))))
    if compression is Compression.LZ4:
        # Java reads frames of independent blocks only (KIP-57).
        compressor = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
        compressor.compress(bytes(payload))  # it takes nothing else
        return bytes(compressor.finish())
    return bytes(cramjam.zstd.compress(payload, level=_ZSTD_LEVEL))


class Compressing:
    """The same as :func:`compress` of what comes in parts, of which it keeps what is compressed."""

    def __init__(self, compression: Compression) -> None:
        self._compression = compression
        self._parts: list[bytes] = [_XERIAL_HEADER] if compression is Compression.SNAPPY else []
        self._rest = b""
        """Of snappy: less than a block."""
        self._codec: Any = None
        if compression is Compression.GZIP:
            self._codec = zlib.compressobj(wbits=GZIP)
        elif compression is Compression.LZ4:
            self._codec = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
        elif compression is Compression.ZSTD:
            self._codec = cramjam.zstd.Compressor(level=_ZSTD_LEVEL)

    def add(self, data: bytes | bytearray) -> None:
        if self._compression is Compression.NONE:
            self._parts.append(bytes(data))
        elif self._compression is Compression.GZIP:
            self._parts.append(self._codec.compress(data))
        elif self._compression is Compression.SNAPPY:
            self._add_blocks(self._rest + data, last=False)
        else:
            self._codec.compress(bytes(data))

    def finish(self) -> bytes:
        """What all that was added is, compressed."""
        if self._compression is Compression.GZIP:
            self._parts.append(self._codec.flush())
        elif self._compression is Compression.SNAPPY:
            self._add_blocks(self._rest, last=True)
        elif self._codec is not None:
            self._parts.append(bytes(self._codec.finish()))
        return b"".join(self._parts)

    def _add_blocks(self, data: bytes, last: bool) -> None:
        end = len(data) if last else len(data) - len(data) % _XERIAL_BLOCK
        self._parts += _xerial_blocks(memoryview(data)[:end])
        self._rest = data[end:]


def _xerial_blocks(payload: memoryview) -> Iterator[bytes]:
    for start in range(0, len(payload), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(payload[start : start + _XERIAL_BLOCK]))
        yield _INT32.pack(len(block)) + block


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
        if len(parts) == GZIP_MEMBERS_MAX:
            raise UnsupportedBatch(f"a gzip stream of more than {GZIP_MEMBERS_MAX} members")
        member = zlib.decompressobj(GZIP)
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
    return b"".join(decompressed_blocks(payload, limit=limit))


def decompressed_blocks(payload: Frame, *, limit: int | None = None) -> Iterator[bytes]:
    """The blocks of snappy, each decompressed: at most `limit` bytes in all, if given, and DECOMPRESSED_MAX in each.

    Raises MalformedBatch, BatchTooLarge.
    """
    stream = bytes(payload)
    left = DECOMPRESSED_MAX if limit is None else limit
    if not stream.startswith(_XERIAL_MAGIC):
        yield _unsnappy_block(stream, left, left)
        return
    view = memoryview(stream)
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
        part = _unsnappy_block(view[position : position + size], left, limit or DECOMPRESSED_MAX)
        if limit is not None:
            left -= len(part)
        yield part
        position += size
    if position > len(stream):
        raise MalformedBatch("not snappy: the stream is cut")


def _unsnappy_block(block: bytes | memoryview, left: int, limit: int) -> bytes:
    try:
        if cramjam.snappy.decompress_raw_len(block) > left:
            raise _too_large(limit)
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise MalformedBatch(f"not snappy: {error}") from None


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
