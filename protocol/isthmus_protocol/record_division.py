"""Batches that a broker would not store as they are, taken apart a little at a time.

A batch of some kilobytes may hold gigabytes, or a million records. So its records come decompressed in pieces, go
into new batches as they come, and nothing is kept of them but what is not compressed yet: some hundred kilobytes beside
the new batch, whatever the old one holds. Whoever takes a batch apart may do something else between two steps.

What cannot be stored as it is: a batch with holes, or to be cut at its front; LogAppendTime, since brokers refuse that
bit from producers (INVALID_TIMESTAMP), or clear it and show the producers' times (it becomes CreateTime with the append
time on each record); the cleaner's delete horizon, which stands where the base timestamp does. Bodies of records are
copied byte by byte without reading them, so keys, values and headers cannot change on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from isthmus_protocol.record_codec import STEP_RECORDS
from isthmus_protocol.record_compression import Compressing, compress
from isthmus_protocol.records import (
    COMPRESSION_MASK,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    BatchHeader,
    Compression,
    Frame,
    MalformedBatch,
    add_sequence,
    seal,
    verify_crc,
    whole_header,
)
from isthmus_protocol.varints import VARINT_BITS, VARLONG_BITS, read_varint, varint

STEP_BYTES: Final = 1024 * 1024
"""After so many bytes of records a step ends, or after STEP_RECORDS of them."""
UNCOMPRESSED_BYTES: Final = 256 * 1024
"""More that a new batch holds is compressed as it comes."""
HEAD_BYTES_MAX: Final = 5 + 1 + 10 + 5
"""Length, attributes, timestamp delta and offset delta of a record."""
RECORD_BYTES_MIN: Final = 6
"""Attributes, timestamp delta, offset delta, key length, value length, header count: a byte each."""
TIMESTAMP_MIN: Final = -(2**63)
TIMESTAMP_MAX: Final = 2**63 - 1


class Run(NamedTuple):
    """Consecutive offsets of a batch that hold a record each (`batch` has them), or none (`batch` is None)."""

    first_offset: int
    length: int
    batch: bytes | None

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.length


def divided(
    batch: Frame, pieces: Iterable[bytes], *, from_offset: int = 0, records_max: int | None = None
) -> Iterator[Run | None]:
    """The batch from `from_offset` on as a broker takes it from a producer: runs of consecutive offsets.

    There is a batch for each run of records (of at most `records_max`), and None for each hole between them. Runs
    follow one another from the batch's base offset, or `from_offset` if that is later, to its last. Each comes when it
    is known, and None, in its place, after a step without one. `pieces`: the batch's records, decompressed.

    A run keeps its own offsets (rebase it to send it), timestamps, and the sequences that its records had: where
    compaction left gaps in those, brokers refuse them (OUT_OF_ORDER_SEQUENCE) and it has to be restamped.

    Raises MalformedBatch (CorruptBatch), UnsupportedBatch, and what ``pieces`` raises.
    """
    header = whole_header(batch)
    verify_crc(batch)  # a new CRC would bless bytes that were damaged on the way
    covered = first = max(header.base_offset, from_offset)
    append_time = header.max_timestamp if header.is_log_append_time else None
    source = iter(pieces)
    buffer, position, last_delta = b"", 0, -1
    records = size = 0
    run: _Open | None = None
    for number in range(header.record_count):
        while len(buffer) - position < HEAD_BYTES_MAX and (piece := next(source, None)) is not None:
            buffer, position = buffer[position:] + piece, 0
        try:
            length, position = read_varint(buffer, position, VARINT_BITS)
            begin = position
            attributes = buffer[position]
            timestamp_delta, position = read_varint(buffer, position + 1, VARLONG_BITS)
            delta, position = read_varint(buffer, position, VARINT_BITS)
        except IndexError:
            raise _cut(number) from None
        left = begin + length - position
        if length < RECORD_BYTES_MIN or left < 0:
            raise MalformedBatch(f"a record of {length} bytes cannot be")
        if not last_delta < delta <= header.last_offset_delta:
            raise MalformedBatch(
                f"offset delta {delta} follows {last_delta}, and the batch's last is {header.last_offset_delta}"
            )
        last_delta = delta
        offset = header.base_offset + delta
        timestamp = header.base_timestamp + timestamp_delta if append_time is None else append_time
        if not TIMESTAMP_MIN <= timestamp <= TIMESTAMP_MAX:
            raise MalformedBatch(f"timestamp {timestamp} does not fit 64 bits")
        if offset >= first:
            if run is not None and (offset != covered or run.records == records_max):
                yield run.closed()
                run = None
            if run is None:
                if offset > covered:
                    yield Run(covered, offset - covered, None)
                run = _Open(header, offset, timestamp)
            run.begin_record(timestamp, attributes, left)
            covered = offset + 1
        size += left
        while True:
            taken = min(left, len(buffer) - position)
            if offset >= first:
                run.add(buffer[position : position + taken])  # type: ignore[union-attr]
            position += taken
            left -= taken
            if not left:
                break
            if (piece := next(source, None)) is None:
                raise _cut(number)
            buffer, position = piece, 0
            yield None
        records += 1
        if records == STEP_RECORDS or size >= STEP_BYTES:
            yield None
            records = size = 0
    left_over = len(buffer) - position or len(next(source, b""))
    if left_over:
        raise MalformedBatch(f"{left_over} bytes or more are left after the last record")
    if run is not None:
        yield run.closed()
    if covered < header.next_offset:
        yield Run(covered, header.next_offset - covered, None)


def _cut(number: int) -> MalformedBatch:
    return MalformedBatch(f"the batch ends within its record number {number}")


class _Open:
    """A run that is being made: a new batch without its header."""

    __slots__ = ("_base_timestamp", "_compressing", "_like", "_max_timestamp", "_out", "first_offset", "records")

    def __init__(self, like: BatchHeader, first_offset: int, timestamp: int) -> None:
        self._like = like
        self.first_offset = first_offset
        self.records = 0
        self._base_timestamp = self._max_timestamp = timestamp
        self._out = bytearray()
        """What is not compressed yet."""
        self._compressing: Compressing | None = None

    def begin_record(self, timestamp: int, attributes: int, body_size: int) -> None:
        """A record of the next offset; its body is added after."""
        timestamp_delta, offset_delta = varint(timestamp - self._base_timestamp), varint(self.records)
        out = self._out
        out += varint(1 + len(timestamp_delta) + len(offset_delta) + body_size)
        out.append(attributes)
        out += timestamp_delta
        out += offset_delta
        if timestamp > self._max_timestamp:
            self._max_timestamp = timestamp
        self.records += 1

    def add(self, data: bytes) -> None:
        self._out += data
        if len(self._out) > UNCOMPRESSED_BYTES:
            if self._compressing is None:
                self._compressing = Compressing(self._like.compression)
            self._compressing.add(self._out)
            self._out = bytearray()

    def closed(self) -> Run:
        like, compression = self._like, self._like.compression
        header = like._replace(
            base_offset=self.first_offset,
            attributes=like.attributes & ~(COMPRESSION_MASK | LOG_APPEND_TIME_BIT | DELETE_HORIZON_BIT) | compression,
            last_offset_delta=self.records - 1,
            base_timestamp=self._base_timestamp,
            max_timestamp=self._max_timestamp,
            base_sequence=add_sequence(like.base_sequence, self.first_offset - like.base_offset),
            record_count=self.records,
        )
        return Run(self.first_offset, self.records, seal(header, self._payload(compression)))

    def _payload(self, compression: Compression) -> bytes:
        if self._compressing is None:
            return compress(self._out, compression)
        self._compressing.add(self._out)
        return self._compressing.finish()
