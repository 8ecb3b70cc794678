"""One header of each record of a batch, read and written without decoding the records.

For records that are produced again elsewhere with one header set (docs/adr/0033). Of a record its lengths are read, and
everything but that header is copied as it is: attributes, timestamp, key, value, other headers in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from isthmus_protocol.record_codec import nullable
from isthmus_protocol.record_compression import DECOMPRESSED_MAX, compress, decompress
from isthmus_protocol.records import (
    HEADER_SIZE,
    PLAIN_HEADER,
    Compression,
    Frame,
    MalformedBatch,
    seal,
    verify_crc,
    whole_header,
)
from isthmus_protocol.varints import VARINT_BITS, VARLONG_BITS, read_varint, varint

PAYLOAD_BYTES_MAX: Final = 1_000_000
"""Of a new batch's records, not compressed: a broker's ``message.max.bytes``. One record alone may be larger."""

Values: TypeAlias = tuple[bytes | None, ...]
"""Of the headers of one record that have the name: mostly none or one."""
Change: TypeAlias = Callable[[Values], bytes | None]
"""What the header is to be, given what it is; None: the record is left out. Asked once for the same values."""

_TIMESTAMP_MIN, _TIMESTAMP_MAX = -(2**63), 2**63 - 1
_Others: TypeAlias = tuple[bytes, bytes, bytes]
"""Headers of one record but ours: their count with one of ours, those before ours, those behind."""
_NO_VALUES: Final[Values] = ()
_NO_HEADERS: Final[_Others] = (varint(1), b"", b"")
_varint = lru_cache(maxsize=16 * 1024)(varint)
"""Lengths and small deltas come again and again."""


class Found(NamedTuple):
    """Records of a batch that have the same values."""

    first_offset: int
    records: int
    """0: the first is for a second batch, and only one is made."""


class HeaderRewriter:
    """Makes batches with another value of the header ``name`` in each record, of whole batches one after the other.

    It stands where the first of that name did, else behind the others, and is the only one of its name then. Timestamps
    are those that consumers see, so with append time they become the records' own. Records of several batches that are
    compressed alike are joined, up to ``payload_max`` bytes. ``one_batch``: no more than one is made.
    """

    def __init__(self, name: bytes, payload_max: int = PAYLOAD_BYTES_MAX, one_batch: bool = False) -> None:
        self._named = b"".join(nullable(name))
        self._payload_max = payload_max
        self._one_batch = one_batch
        self._closed: list[bytes] = []
        self._new: _NewBatch | None = None
        self.rest: int | None = None
        """Offset of the first record that is for a second batch, where only one is made: nothing is taken from there
        on. None: all that was added was taken."""

    def add(self, batch: Frame, change: Change, from_offset: int = 0) -> dict[Values, Found]:
        """The records of one batch from ``from_offset`` on, before :attr:`rest`; what was found in them.

        Raises MalformedBatch (CorruptBatch), UnsupportedBatch, BatchTooLarge: nothing of this can be used then.
        """
        if self.rest is not None:
            return {}
        header = whole_header(batch)
        verify_crc(batch)  # a new CRC would bless bytes that were damaged on the way
        if not header.record_count:
            return {}
        payload = decompress(memoryview(batch)[HEADER_SIZE:], header.compression, limit=DECOMPRESSED_MAX)
        payload_end = len(payload)
        named, payload_max = self._named, self._payload_max
        headers_of: dict[Values, bytes | None] = {}
        first_offsets: dict[Values, int] = {}
        counts: dict[Values, int] = {}
        if self._new is not None and self._new.compression != header.compression:
            self._close()
        new = self._new or _NewBatch(header.compression)
        base_offset, base_timestamp, last_offset_delta = (
            header.base_offset,
            header.base_timestamp,
            header.last_offset_delta,
        )
        append_time = header.max_timestamp if header.is_log_append_time else None
        position, last_delta = 0, -1
        try:
            for _ in range(header.record_count):
                # Most numbers take one byte, which is read here: a call costs more.
                begin, byte = position + 1, payload[position]
                if byte < 0x80:
                    length = (byte >> 1) ^ -(byte & 1)
                else:
                    length, begin = _read(payload, position)
                end = begin + length
                if length < 1 or end > payload_end:
                    raise MalformedBatch(f"a record of {length} bytes cannot be, {payload_end - begin} are left")
                position, byte = begin + 2, payload[begin + 1]
                if byte < 0x80:
                    timestamp = base_timestamp + ((byte >> 1) ^ -(byte & 1))
                else:
                    delta, position = read_varint(payload, begin + 1, VARLONG_BITS)
                    timestamp = base_timestamp + delta
                body, byte = position + 1, payload[position]
                if byte < 0x80:
                    delta = (byte >> 1) ^ -(byte & 1)
                else:
                    delta, body = _read(payload, position)
                if not last_delta < delta <= last_offset_delta:
                    raise MalformedBatch(
                        f"offset delta {delta} follows {last_delta}, the batch's last is {last_offset_delta}"
                    )
                last_delta = delta
                position, byte = body + 1, payload[body]
                if byte < 0x80:
                    length = (byte >> 1) ^ -(byte & 1)
                else:
                    length, position = _read(payload, body)
                if length > 0:
                    position += length
                elif length < -1:
                    raise MalformedBatch(f"a key of {length} bytes")
                length, position = _read(payload, position)
                if length > 0:
                    position += length
                elif length < -1:
                    raise MalformedBatch(f"a value of {length} bytes")
                headers, position, offset = position, end, base_offset + delta
                if headers + 1 == end and not payload[headers]:
                    values, others = _NO_VALUES, _NO_HEADERS
                elif payload.find(named, headers, end) < 0:
                    values, others = _NO_VALUES, _all_headers(payload, headers, end)
                else:
                    values, others = _headers(payload, headers, end, named)
                if offset < from_offset:
                    continue
                if values in counts:
                    counts[values] += 1
                else:
                    first_offsets[values], counts[values] = offset, 1
                    content = change(values)
                    headers_of[values] = None if content is None else named + b"".join(nullable(content))
                ours = headers_of[values]
                if ours is None:
                    continue
                if append_time is not None:
                    timestamp = append_time
                elif not _TIMESTAMP_MIN <= timestamp <= _TIMESTAMP_MAX:
                    raise MalformedBatch(f"timestamp {timestamp} does not fit 64 bits")
                if new.records and new.size + end - begin + len(ours) > payload_max:
                    self._closed.append(new.closed())
                    new = _NewBatch(header.compression)
                if not new.records:
                    if self._one_batch and self._closed:
                        self.rest = offset
                        counts[values] -= 1
                        break
                    new.base_timestamp = new.max_timestamp = timestamp
                elif timestamp > new.max_timestamp:
                    new.max_timestamp = timestamp
                if delta == new.records and new.base_timestamp == base_timestamp and append_time is None:
                    unchanged = payload[begin:headers]
                else:
                    head = _varint(timestamp - new.base_timestamp) + _varint(new.records)
                    unchanged = payload[begin : begin + 1] + head + payload[body:headers]
                count, before, behind = others
                tail = count + before + ours + behind
                length = len(unchanged) + len(tail)
                new.parts += (_varint(length), unchanged, tail)
                new.records += 1
                new.size += length + 3
        except IndexError:
            raise MalformedBatch("a record ends beyond its batch") from None
        if position != payload_end and self.rest is None:
            raise MalformedBatch(f"{payload_end - position} bytes are left after the last record")
        self._new = new
        return {values: Found(first_offsets[values], count) for values, count in counts.items()}

    def batches(self) -> list[bytes]:
        """What is left of all that was added, each at base offset 0 and of no producer, compressed as it was."""
        self._close()
        made, self._closed = self._closed, []
        return made

    def _close(self) -> None:
        if self._new is not None and self._new.records:
            self._closed.append(self._new.closed())
        self._new = None


def without_header(batch: Frame, name: bytes) -> bytes | None:
    """The same batch with no header ``name`` in any record, of the same producer; None where no record has one.

    Raises MalformedBatch (CorruptBatch), UnsupportedBatch, BatchTooLarge.
    """
    header = whole_header(batch)
    if not header.record_count:
        return None
    payload = decompress(memoryview(batch)[HEADER_SIZE:], header.compression, limit=DECOMPRESSED_MAX)
    named = b"".join(nullable(name))
    if payload.find(named) < 0:
        return None
    verify_crc(batch)
    parts: list[bytes] = []
    position, taken = 0, False
    try:
        for _ in range(header.record_count):
            length, begin = _read(payload, position)
            end = begin + length
            if length < 1 or end > len(payload):
                raise MalformedBatch(f"a record of {length} bytes cannot be, {len(payload) - begin} are left")
            _, at = read_varint(payload, begin + 1, VARLONG_BITS)
            _, at = _read(payload, at)
            for what in ("key", "value"):
                length, at = _read(payload, at)
                if length < -1:
                    raise MalformedBatch(f"a {what} of {length} bytes")
                at += max(length, 0)
            values, (count, before, behind) = _headers(payload, at, end, named)
            others = read_varint(count, 0, VARINT_BITS)[0] - 1
            record = payload[begin:at] + varint(others) + before + behind if values else payload[begin:end]
            parts += (varint(len(record)), record)
            taken |= bool(values)
            position = end
    except IndexError:
        raise MalformedBatch("a record ends beyond its batch") from None
    if position != len(payload):
        raise MalformedBatch(f"{len(payload) - position} bytes are left after the last record")
    return seal(header, compress(b"".join(parts), header.compression)) if taken else None


def _read(payload: bytes, position: int) -> tuple[int, int]:
    """As :func:`read_varint` of 32 bits, sooner where it is of two bytes."""
    byte = payload[position]
    if byte >= 0x80 and (high := payload[position + 1]) < 0x80:
        byte = byte & 0x7F | high << 7
        return (byte >> 1) ^ -(byte & 1), position + 2
    return read_varint(payload, position, VARINT_BITS)


def _all_headers(payload: bytes, position: int, end: int) -> _Others:
    """Of one record that has no header of ours, whatever is in the others."""
    count, begin = read_varint(payload, position, VARINT_BITS)
    if not 0 <= count <= end - begin or begin > end:
        raise MalformedBatch(f"a record of {end - begin} more bytes says it has {count} headers")
    return _varint(count + 1), payload[begin:end], b""


def _headers(payload: bytes, position: int, end: int, named: bytes) -> tuple[Values, _Others]:
    """Of one record: the values of headers with the name, and the other headers."""
    count, position = read_varint(payload, position, VARINT_BITS)
    if not 0 <= count <= end - position:
        raise MalformedBatch(f"a record of {end - position} more bytes says it has {count} headers")
    values: list[bytes | None] = []
    before = behind = b""
    for _ in range(count):
        begin = position
        length, position = _read(payload, position)
        if length < 0:
            raise MalformedBatch("a header without a key")
        position += length
        is_ours = payload[begin:position] == named
        length, content = _read(payload, position)
        if length < -1:
            raise MalformedBatch(f"a length of {length}")
        position = content + max(length, 0)
        if is_ours:
            values.append(None if length < 0 else payload[content:position])
        elif values:
            behind += payload[begin:position]
        else:
            before += payload[begin:position]
    if position != end:
        raise MalformedBatch(f"a record ends {abs(end - position)} bytes from where its length says")
    return tuple(values), (_varint(count - len(values) + 1), before, behind)


class _NewBatch:
    """A batch that is being made."""

    __slots__ = ("base_timestamp", "compression", "max_timestamp", "parts", "records", "size")

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.parts: list[bytes] = []
        self.records = self.base_timestamp = self.max_timestamp = 0
        self.size = 0
        """Bytes of the records, about."""

    def closed(self) -> bytes:
        header = PLAIN_HEADER._replace(
            attributes=self.compression,
            last_offset_delta=self.records - 1,
            base_timestamp=self.base_timestamp,
            max_timestamp=self.max_timestamp,
            record_count=self.records,
        )
        return seal(header, compress(b"".join(self.parts), self.compression))
