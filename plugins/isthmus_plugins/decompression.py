"""The records of batches, decompressed in pieces: whatever a batch holds, little of it is in memory.

zlib gives out as much as it is asked for. The decompressors of zstd and LZ4 write all that they have to a file: to a
pipe here, from which pieces are read. So they wait for whoever reads, in a thread that holds no lock of Python's. What
fits one piece is decompressed at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
import zlib
from collections.abc import Iterator
from typing import Any, Final

import cramjam

from isthmus_protocol.record_compression import GZIP, GZIP_MEMBERS_MAX, decompress, decompressed_blocks
from isthmus_protocol.records import (
    HEADER_SIZE,
    BatchTooLarge,
    Compression,
    Frame,
    MalformedBatch,
    UnsupportedBatch,
    whole_header,
)

PIECE_BYTES: Final = 256 * 1024
INPUT_BYTES: Final = 16 * 1024
"""Of gzip, at a time: what it has not looked at yet is copied for each piece."""


def decompressed(batch: Frame) -> Iterator[bytes]:
    """The records of one whole batch. Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.

    A block of snappy is decompressed as one piece: the batch is too large if that is more than
    :data:`~isthmus_protocol.record_compression.DECOMPRESSED_MAX`. Raises OSError where there is no descriptor, or no
    thread, for a large one now.
    """
    header = whole_header(batch)
    payload = memoryview(batch)[HEADER_SIZE:]
    compression = header.compression
    if not header.record_count or compression is Compression.NONE:
        # A batch that the cleaner emptied has no payload at all, not a compressed nothing.
        for start in range(0, len(payload), PIECE_BYTES):
            yield bytes(payload[start : start + PIECE_BYTES])
        return
    if compression is Compression.SNAPPY:
        yield from decompressed_blocks(payload)
        return
    try:
        yield decompress(payload, compression, limit=PIECE_BYTES)
        return
    except BatchTooLarge:
        pass
    if compression is Compression.GZIP:
        yield from _gunzipped(payload)
    else:
        yield from _piped(cramjam.lz4 if compression is Compression.LZ4 else cramjam.zstd, payload, compression)


def _gunzipped(payload: memoryview) -> Iterator[bytes]:
    members = position = 0
    while position < len(payload):
        members += 1
        if members > GZIP_MEMBERS_MAX:
            raise UnsupportedBatch(f"a gzip stream of more than {GZIP_MEMBERS_MAX} members")
        member = zlib.decompressobj(GZIP)
        while not member.eof:
            data = member.unconsumed_tail
            if not data:
                data = bytes(payload[position : position + INPUT_BYTES])
                position += len(data)
            try:
                piece = member.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise MalformedBatch(f"not gzip: {error}") from None
            if piece:
                yield piece
            elif not data:
                raise MalformedBatch("not gzip: the stream is cut")
        position -= len(member.unused_data)


def _piped(codec: Any, payload: memoryview, compression: Compression) -> Iterator[bytes]:
    reading, writing = os.pipe()
    failed: list[Exception] = []
    with open(reading, "rb", PIECE_BYTES) as pieces:
        try:
            outputs = [cramjam.File(f"/dev/fd/{writing}", read=False, write=True)]
        finally:
            os.close(writing)

        def write_all() -> None:
            try:
                codec.decompress_into(payload, outputs[0])
            except cramjam.DecompressionError as error:
                failed.append(error)
            finally:
                outputs.clear()  # which closes it: the end for who reads

        thread = threading.Thread(target=write_all, name=f"decompress-{compression.name.lower()}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(str(error)) from error
        try:
            while piece := pieces.read(PIECE_BYTES):
                yield piece
        finally:
            pieces.close()  # so that a thread which still writes ends
            thread.join()
    if failed:
        raise MalformedBatch(f"not {compression.name.lower()}: {failed[0]}")


async def in_steps(work: Iterator[None]) -> None:
    """Do what is done a step at a time, with everything else of the loop between two steps."""
    next(work, None)  # most are a single one
    for _ in work:
        await asyncio.sleep(0)
