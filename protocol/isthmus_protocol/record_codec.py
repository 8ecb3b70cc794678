"""The records inside a batch: decoding and encoding them, with compression.

Hot paths copy batches whole (records.py), and what cannot be copied whole is taken apart a little at a time
(record_division.py); this is for control records, and for whatever is read or compared record by record.

    record   length varint | attributes (1) | timestamp delta varlong | offset delta varint | body
    body     key length varint, key | value length varint, value | header count varint, (key, value)...

Varints are zigzag (signed) as in Protocol Buffers; a length of -1 is null. Timestamps are milliseconds.

Whatever the bytes, decoding raises MalformedBatch or UnsupportedBatch (BatchTooLarge past the limit) and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from isthmus_protocol.record_compression import DECOMPRESSED_MAX, compress, decompress
from isthmus_protocol.records import (
    COMPRESSION_MASK,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    BatchHeader,
    BatchTooLarge,
    Compression,
    Frame,
    MalformedBatch,
    UnsupportedBatch,
    add_sequence,
    seal,
    whole_header,
)
from isthmus_protocol.varints import VARINT_BITS, VARLONG_BITS, read_varint, varint

_TIMESTAMP_MIN, _TIMESTAMP_MAX = -(2**63), 2**63 - 1
# Attributes, timestamp delta, offset delta, key length, value length, header count: a byte each.
_RECORD_MIN = 6
# Of a batch whose timestamps are read.
RUNS = 256
# Records that are read at a time, in some milliseconds.
STEP_RECORDS = 1000
# A record that is read has to fit memory; one that is only taken out of a batch has not (record_division.py).
RECORD_BYTES_MAX = 1 << 30
# Bytes of a record's length.
_LENGTH_MAX = 5
# A record's (offset, timestamp, attributes, start of the body, end of the body).
_Span = tuple[int, int, int, int, int]


class Record(NamedTuple):
    """One record. `attributes` is its own attributes byte, which no version of Kafka gave a meaning so far.

    Header keys are UTF-8 by convention only: brokers never check, so bytes that are not UTF-8 come as surrogate
    escapes (PEP 383) and are encoded to the same bytes again.
    """

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    attributes: int = 0


class Marker(IntEnum):
    """How a transaction ended (KIP-98: the type in a control record's key)."""

    ABORT = 0
    COMMIT = 1


class ControlRecord(NamedTuple):
    """A transaction marker, which takes one offset in the log and is seen by no consumer."""

    offset: int
    timestamp: int
    producer_id: int
    producer_epoch: int
    marker: Marker
    coordinator_epoch: int


# -- Decoding ----------------------------------------------------------------------------------------------------------


def decode_records(batch: Frame, *, limit: int = DECOMPRESSED_MAX) -> list[Record]:
    """The records of one whole batch; at most `limit` bytes of them. The CRC is not looked at.

    Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.
    """
    header = whole_header(batch)
    some = _decoded(header, (_payload(batch, header, limit),), header.record_count)
    return [record for records in some for record in records]


def decode_in_steps(batch: Frame, pieces: Iterable[bytes]) -> Iterator[list[Record]]:
    """The same of a batch whose records come decompressed, in `pieces`: some records at a time.

    It holds a piece and the largest record, twice each. Raises MalformedBatch, UnsupportedBatch, BatchTooLarge (of a
    record of more than RECORD_BYTES_MAX), and what `pieces` raises.
    """
    return _decoded(whole_header(batch), pieces, STEP_RECORDS)


def timestamps(batch: Frame, *, limit: int = DECOMPRESSED_MAX) -> tuple[list[tuple[int, int]], int] | None:
    """Of one whole batch: (last offset, least timestamp) of runs of its records, and the last one's timestamp.

    A run is one record, in batches of many so many that there are about :data:`RUNS`. None: it has no records. The
    records' keys, values and headers are not looked at. Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.
    """
    header = whole_header(batch)
    if not header.record_count:
        return None
    if header.is_log_append_time:
        return [(header.last_offset, header.max_timestamp)], header.max_timestamp
    spans, _ = _spans(header, _payload(batch, header, limit), 0, header.record_count, -1)
    if len(spans) < header.record_count:
        raise MalformedBatch(f"the batch ends within its record number {len(spans)}")
    length = max(1, len(spans) // RUNS)
    runs = [spans[first : first + length] for first in range(0, len(spans), length)]
    return [(run[-1][0], min(span[1] for span in run)) for run in runs], spans[-1][1]


def _decoded(header: BatchHeader, pieces: Iterable[bytes], at_once: int) -> Iterator[list[Record]]:
    source = iter(pieces)
    buffer, position = b"", 0
    left, last_delta = header.record_count, -1
    while left:
        spans, end = _spans(header, buffer, position, min(left, at_once), last_delta)
        if not spans:
            size = len(buffer) - position
            buffer, position = _with_a_whole_record(buffer[position:], source), 0
            if len(buffer) == size:
                raise MalformedBatch(f"the batch ends within its record number {header.record_count - left}")
            continue
        position = end
        left, last_delta = left - len(spans), spans[-1][0] - header.base_offset
        yield _records(buffer, spans)
    left_over = len(buffer) - position or len(next(source, b""))
    if left_over:
        raise MalformedBatch(f"{left_over} bytes are left after the last record")
    if last_delta > header.last_offset_delta:
        raise MalformedBatch(f"offset delta {last_delta} is beyond the batch's last, {header.last_offset_delta}")


def _with_a_whole_record(rest: bytes, source: Iterator[bytes]) -> bytes:
    """``rest``, which begins with a record, and what comes until that is whole, or nothing comes any more."""
    while len(rest) < _LENGTH_MAX and (piece := next(source, None)) is not None:
        rest += piece
    try:
        length, position = read_varint(rest, 0, VARINT_BITS)
    except IndexError:
        return rest
    if length > RECORD_BYTES_MAX:
        raise BatchTooLarge(f"a record of {length} bytes: more than {RECORD_BYTES_MAX} are not read")
    parts, size = [rest], len(rest)
    while size < position + length and (piece := next(source, None)) is not None:
        parts.append(piece)  # a large record is put together once
        size += len(piece)
    return rest if len(parts) == 1 else b"".join(parts)


def _records(payload: bytes, spans: Iterable[_Span]) -> list[Record]:
    records = []
    offset = 0
    try:
        for offset, timestamp, attributes, position, end in spans:
            key, position = _read_bytes(payload, position)
            value, position = _read_bytes(payload, position)
            count, position = read_varint(payload, position, VARINT_BITS)
            headers: tuple[tuple[str, bytes | None], ...] = ()
            if count:
                headers, position = _read_headers(payload, position, end, count)
            if position != end:
                raise MalformedBatch(f"record {offset} ends {abs(end - position)} bytes from where its length says")
            records.append(Record(offset, timestamp, key, value, headers, attributes))
    except IndexError:
        raise MalformedBatch(f"record {offset} ends beyond its batch") from None
    return records


def decode_control(batch: Frame) -> ControlRecord:
    """The transaction marker of a control batch.

    Raises MalformedBatch for a batch that holds no marker (the cleaner may have taken it out: `record_count` is 0
    then), and UnsupportedBatch for control records other than commit and abort.
    """
    header = whole_header(batch)
    if not header.is_control:
        raise MalformedBatch(f"the batch at offset {header.base_offset} is no control batch")
    records = decode_records(batch)
    if not records:
        raise MalformedBatch(f"the control batch at offset {header.base_offset} holds no marker")
    if len(records) > 1:
        raise UnsupportedBatch(f"the control batch at offset {header.base_offset} holds {len(records)} records")
    record = records[0]
    # Newer versions of key and value may only add fields, so the version in front of each is not looked at.
    if record.key is None or len(record.key) < 4:
        raise MalformedBatch(f"the control record at offset {record.offset} has no type")
    kind = int.from_bytes(record.key[2:4], "big", signed=True)
    if kind not in (Marker.ABORT, Marker.COMMIT):
        raise UnsupportedBatch(f"the control record at offset {record.offset} has type {kind}, which is not handled")
    if record.value is None or len(record.value) < 6:
        raise MalformedBatch(f"the marker at offset {record.offset} has no coordinator epoch")
    return ControlRecord(
        record.offset,
        record.timestamp,
        header.producer_id,
        header.producer_epoch,
        Marker(kind),
        int.from_bytes(record.value[2:6], "big", signed=True),
    )


def _payload(batch: Frame, header: BatchHeader, limit: int) -> bytes:
    payload = memoryview(batch)[HEADER_SIZE:]
    # A batch that the cleaner emptied has no payload at all, not a compressed nothing.
    return decompress(payload, header.compression, limit=limit) if header.record_count else bytes(payload)


def _spans(header: BatchHeader, payload: bytes, position: int, count: int, last_delta: int) -> tuple[list[_Span], int]:
    """Where the records of ``payload`` from ``position`` on are that are whole, at most ``count``, and where they end.

    ``last_delta``: the offset delta of the record before them.
    """
    spans: list[_Span] = []
    append = spans.append
    begin, size = position, len(payload)
    base_offset, base_timestamp = header.base_offset, header.base_timestamp
    append_time = header.max_timestamp if header.is_log_append_time else None
    try:
        for _ in range(count):
            # Most varints are one byte, and a call costs more than reading it.
            byte = payload[position]
            if byte < 0x80:
                length = (byte >> 1) ^ -(byte & 1)
                position += 1
            else:
                length, position = read_varint(payload, position, VARINT_BITS)
            end = position + length
            if length < _RECORD_MIN:
                raise MalformedBatch(f"a record of {length} bytes cannot be, {size - position} are left")
            if end > size:
                break
            attributes = payload[position]
            byte = payload[position + 1]
            if byte < 0x80:
                timestamp = base_timestamp + ((byte >> 1) ^ -(byte & 1))
                position += 2
            else:
                delta, position = read_varint(payload, position + 1, VARLONG_BITS)
                timestamp = base_timestamp + delta
            byte = payload[position]
            if byte < 0x80:
                delta = (byte >> 1) ^ -(byte & 1)
                position += 1
            else:
                delta, position = read_varint(payload, position, VARINT_BITS)
            if delta <= last_delta:
                raise MalformedBatch(f"offset delta {delta} follows {last_delta}")
            last_delta = delta
            if append_time is not None:
                timestamp = append_time
            elif not _TIMESTAMP_MIN <= timestamp <= _TIMESTAMP_MAX:
                raise MalformedBatch(f"timestamp {timestamp} does not fit 64 bits")
            append((base_offset + delta, timestamp, attributes, position, end))
            position = begin = end
    except IndexError:
        pass  # a record of which the rest has not come
    return spans, begin


def _read_headers(
    payload: bytes, position: int, end: int, count: int
) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    if not 0 <= count <= end - position:
        raise MalformedBatch(f"a record of {end - position} more bytes says it has {count} headers")
    headers = []
    for _ in range(count):
        name, position = _read_bytes(payload, position)
        if name is None:
            raise MalformedBatch("a header without a key")
        content, position = _read_bytes(payload, position)
        headers.append((name.decode("utf-8", "surrogateescape"), content))
    return tuple(headers), position


def _read_bytes(payload: bytes, position: int) -> tuple[bytes | None, int]:
    byte = payload[position]
    if byte < 0x80:
        length = (byte >> 1) ^ -(byte & 1)
        position += 1
    else:
        length, position = read_varint(payload, position, VARINT_BITS)
    if length < 0:
        if length < -1:
            raise MalformedBatch(f"a length of {length}")
        return None, position
    end = position + length
    return payload[position:end], end


# -- Encoding ----------------------------------------------------------------------------------------------------------


def encode_batch(
    records: Sequence[Record],
    like: BatchHeader,
    *,
    compression: Compression | None = None,
    last_offset: int | None = None,
) -> bytes:
    """One batch of `records`, which have rising offsets, with a new CRC.

    Base offset is the first record's offset; base sequence is what that record had in `like`, if its offset is within
    `like`, else `like`'s. Codec (unless given), transactional and control bits, producer and leader epoch are `like`'s.
    The timestamp type is CreateTime, and no delete horizon is kept: the base timestamp is the first record's time.
    `last_offset` (default: the last record's) may be later, as after compaction.

    Raises ValueError for no records, or offsets that do not rise or do not fit a batch.
    """
    if not records:
        raise ValueError("a batch needs a record")
    compression = like.compression if compression is None else compression
    base_offset, base_timestamp = records[0].offset, records[0].timestamp
    payload = bytearray()
    previous = base_offset - 1
    for record in records:
        if record.offset <= previous:
            raise ValueError(f"offset {record.offset} follows {previous}")
        previous = record.offset
        timestamp_delta, offset_delta = varint(record.timestamp - base_timestamp), varint(previous - base_offset)
        body = _body(record)
        payload += varint(1 + len(timestamp_delta) + len(offset_delta) + len(body))
        payload.append(record.attributes)
        payload += timestamp_delta
        payload += offset_delta
        payload += body
    last_offset = previous if last_offset is None else last_offset
    if not previous <= last_offset <= base_offset + 2**31 - 1:
        raise ValueError(f"a batch from offset {base_offset} to {last_offset} with a record at {previous} cannot be")
    skipped = base_offset - like.base_offset
    within = 0 <= skipped <= like.last_offset_delta
    header = like._replace(
        base_offset=base_offset,
        attributes=like.attributes & ~(COMPRESSION_MASK | LOG_APPEND_TIME_BIT | DELETE_HORIZON_BIT) | compression,
        last_offset_delta=last_offset - base_offset,
        base_timestamp=base_timestamp,
        max_timestamp=max(record.timestamp for record in records),
        base_sequence=add_sequence(like.base_sequence, skipped) if within else like.base_sequence,
        record_count=len(records),
    )
    return seal(header, compress(payload, compression))


def _body(record: Record) -> bytes:
    parts = [
        *nullable(record.key),
        *nullable(record.value),
        varint(len(record.headers)),
    ]
    for name, content in record.headers:
        parts += nullable(name.encode("utf-8", "surrogateescape"))
        parts += nullable(content)
    return b"".join(parts)


def nullable(content: bytes | None) -> tuple[bytes, bytes]:
    return (b"\x01", b"") if content is None else (varint(len(content)), content)
