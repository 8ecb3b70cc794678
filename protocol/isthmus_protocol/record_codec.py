"""The records inside a batch: decoding, encoding and re-encoding them, with compression.

Hot paths copy batches whole (records.py); this is for what cannot be copied whole: batches that compaction left with
holes, batches stamped with the append time, control records, and whatever is compared record by record.

    record   length varint | attributes (1) | timestamp delta varlong | offset delta varint | body
    body     key length varint, key | value length varint, value | header count varint, (key, value)...

Varints are zigzag (signed) as in Protocol Buffers; a length of -1 is null. Re-encoding copies bodies byte by byte
without reading them, so keys, values and headers cannot change on the way. Timestamps are milliseconds.

Whatever the bytes, decoding raises MalformedBatch or UnsupportedBatch (BatchTooLarge past the limit) and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from isthmus_protocol.record_compression import DECOMPRESSED_MAX, compress, decompress
from isthmus_protocol.records import (
    COMPRESSION_MASK,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    BatchHeader,
    Compression,
    Frame,
    MalformedBatch,
    UnsupportedBatch,
    add_sequence,
    seal,
    whole_header,
)

_VARINT_BITS = 32
_VARLONG_BITS = 64
_TIMESTAMP_MIN, _TIMESTAMP_MAX = -(2**63), 2**63 - 1
# Attributes, timestamp delta, offset delta, key length, value length, header count: a byte each.
_RECORD_MIN = 6


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


class Run(NamedTuple):
    """Consecutive offsets of a batch that hold a record each (`batch` has them), or none (`batch` is None)."""

    first_offset: int
    length: int
    batch: bytes | None

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.length


class _RawRecord(NamedTuple):
    timestamp: int
    offset: int
    attributes: int
    body: bytes


# -- Decoding ----------------------------------------------------------------------------------------------------------


def decode_records(batch: Frame, *, limit: int = DECOMPRESSED_MAX) -> list[Record]:
    """The records of one whole batch; at most `limit` bytes of them. The CRC is not looked at.

    Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.
    """
    header = whole_header(batch)
    payload = _payload(batch, header, limit)
    records = []
    offset = header.base_offset
    try:
        for offset, timestamp, attributes, position, end in _spans(header, payload):
            key, position = _read_bytes(payload, position)
            value, position = _read_bytes(payload, position)
            count, position = _read_varint(payload, position, _VARINT_BITS)
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


def _spans(header: BatchHeader, payload: bytes) -> list[tuple[int, int, int, int, int]]:
    """Each record's (offset, timestamp, attributes, start of the body, end of the body)."""
    spans: list[tuple[int, int, int, int, int]] = []
    append = spans.append
    position, size = 0, len(payload)
    base_offset, base_timestamp = header.base_offset, header.base_timestamp
    append_time = header.max_timestamp if header.is_log_append_time else None
    last_delta = -1
    try:
        for _ in range(header.record_count):
            # Most varints are one byte, and a call costs more than reading it.
            byte = payload[position]
            if byte < 0x80:
                length = (byte >> 1) ^ -(byte & 1)
                position += 1
            else:
                length, position = _read_varint(payload, position, _VARINT_BITS)
            end = position + length
            if length < _RECORD_MIN or end > size:
                raise MalformedBatch(f"a record of {length} bytes cannot be, {size - position} are left")
            attributes = payload[position]
            byte = payload[position + 1]
            if byte < 0x80:
                timestamp = base_timestamp + ((byte >> 1) ^ -(byte & 1))
                position += 2
            else:
                delta, position = _read_varint(payload, position + 1, _VARLONG_BITS)
                timestamp = base_timestamp + delta
            byte = payload[position]
            if byte < 0x80:
                delta = (byte >> 1) ^ -(byte & 1)
                position += 1
            else:
                delta, position = _read_varint(payload, position, _VARINT_BITS)
            if delta <= last_delta:
                raise MalformedBatch(f"offset delta {delta} follows {last_delta}")
            last_delta = delta
            if append_time is not None:
                timestamp = append_time
            elif not _TIMESTAMP_MIN <= timestamp <= _TIMESTAMP_MAX:
                raise MalformedBatch(f"timestamp {timestamp} does not fit 64 bits")
            append((base_offset + delta, timestamp, attributes, position, end))
            position = end
    except IndexError:
        raise MalformedBatch(f"the batch ends within its record number {len(spans)}") from None
    if position != size:
        raise MalformedBatch(f"{size - position} bytes are left after the last record")
    if last_delta > header.last_offset_delta:
        raise MalformedBatch(f"offset delta {last_delta} is beyond the batch's last, {header.last_offset_delta}")
    return spans


def _raw_records(batch: Frame, header: BatchHeader, limit: int) -> list[_RawRecord]:
    payload = _payload(batch, header, limit)
    return [
        _RawRecord(timestamp, offset, attributes, payload[start:end])
        for offset, timestamp, attributes, start, end in _spans(header, payload)
    ]


def _read_varint(payload: bytes, position: int, bits: int) -> tuple[int, int]:
    byte = payload[position]
    value = byte & 0x7F
    shift = 7
    while byte >= 0x80:
        if shift >= bits:
            raise MalformedBatch(f"a number of more than {bits} bits")
        position += 1
        byte = payload[position]
        value |= (byte & 0x7F) << shift
        shift += 7
    if value >> bits:
        raise MalformedBatch(f"a number of more than {bits} bits")
    return (value >> 1) ^ -(value & 1), position + 1


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
        length, position = _read_varint(payload, position, _VARINT_BITS)
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
    raw = [_RawRecord(r.timestamp, r.offset, r.attributes, _body(r)) for r in records]
    if not raw:
        raise ValueError("a batch needs a record")
    return _assemble(
        raw,
        like,
        base_offset=raw[0].offset,
        last_offset=raw[-1].offset if last_offset is None else last_offset,
        compression=like.compression if compression is None else compression,
    )


def split_runs(
    batch: Frame, *, from_offset: int = 0, records_max: int | None = None, limit: int = DECOMPRESSED_MAX
) -> list[Run]:
    """The batch from `from_offset` on as a broker takes it from a producer: runs of consecutive offsets.

    There is a batch for each run of records (of at most `records_max`), and None for each hole between them. Runs
    follow one another from the batch's base offset, or `from_offset` if that is later, to its last. A batch that can
    be stored as it is stays one run, unchanged. What is encoded again:

    - what has holes, or is cut at its front;
    - LogAppendTime: brokers refuse that bit from producers (INVALID_TIMESTAMP), or clear it and show the producers'
      times. It becomes CreateTime with the append time on each record;
    - what carries the cleaner's delete horizon, which stands where the base timestamp does.

    A run keeps its own offsets (rebase it to send it), timestamps, and the sequences that its records had: where
    compaction left gaps in those, brokers refuse them (OUT_OF_ORDER_SEQUENCE) and it has to be restamped.

    Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.
    """
    header = whole_header(batch)
    covered = max(header.base_offset, from_offset)
    whole = covered == header.base_offset and (records_max is None or header.record_count <= records_max)
    if whole and header.is_as_produced:
        return [Run(header.base_offset, header.last_offset_delta + 1, bytes(batch))]
    records = [record for record in _raw_records(batch, header, limit) if record.offset >= covered]
    runs = []
    first = 0
    while first < len(records):
        offset = records[first].offset
        if offset > covered:
            runs.append(Run(covered, offset - covered, None))
        end = first + 1
        stop = len(records) if records_max is None else min(len(records), first + records_max)
        while end < stop and records[end].offset == offset + end - first:
            end += 1
        covered = offset + end - first
        encoded = _assemble(
            records[first:end], header, base_offset=offset, last_offset=covered - 1, compression=header.compression
        )
        runs.append(Run(offset, end - first, encoded))
        first = end
    if covered < header.next_offset:
        runs.append(Run(covered, header.next_offset - covered, None))
    return runs


def _assemble(
    records: Sequence[_RawRecord], like: BatchHeader, *, base_offset: int, last_offset: int, compression: Compression
) -> bytes:
    base_timestamp = records[0].timestamp if records else like.max_timestamp
    payload = bytearray()
    previous = base_offset - 1
    for timestamp, offset, attributes, body in records:
        if offset <= previous:
            raise ValueError(f"offset {offset} follows {previous}")
        previous = offset
        timestamp_delta, offset_delta = varint(timestamp - base_timestamp), varint(offset - base_offset)
        payload += varint(1 + len(timestamp_delta) + len(offset_delta) + len(body))
        payload.append(attributes)
        payload += timestamp_delta
        payload += offset_delta
        payload += body
    if not previous <= last_offset <= base_offset + 2**31 - 1:
        raise ValueError(f"a batch from offset {base_offset} to {last_offset} with a record at {previous} cannot be")
    skipped = base_offset - like.base_offset
    within = 0 <= skipped <= like.last_offset_delta
    header = like._replace(
        base_offset=base_offset,
        attributes=like.attributes & ~(COMPRESSION_MASK | LOG_APPEND_TIME_BIT | DELETE_HORIZON_BIT) | compression,
        last_offset_delta=last_offset - base_offset,
        base_timestamp=base_timestamp,
        max_timestamp=max((r.timestamp for r in records), default=base_timestamp),
        base_sequence=add_sequence(like.base_sequence, skipped) if within else like.base_sequence,
        record_count=len(records),
    )
    return seal(header, compress(payload, compression) if records else b"")


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


def varint(value: int) -> bytes:
    """A signed number as zigzag varint (or varlong: the two differ in length only)."""
    rest = value << 1 if value >= 0 else ~(value << 1)
    if rest < 0x80:
        return _ONE_BYTE[rest]
    encoded = bytearray()
    while rest >= 0x80:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


_ONE_BYTE = [bytes((value,)) for value in range(0x80)]
