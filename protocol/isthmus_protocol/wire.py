"""Bytes of the Kafka protocol that every module here reads or writes: lengths, varints, tagged fields, headers.

A *frame* is one message with its four-byte size prefix. Positions count from the frame's first byte. ``end`` is where
the frame ends by its size prefix, which may be more than the bytes at hand.
"""

from __future__ import annotations

import struct
from typing import Final

Frame = bytes | bytearray | memoryview

VARINT_BYTES_MAX: Final = 5
"""An UNSIGNED_VARINT holds 32 bits (KIP-482)."""

TAGS_MAX: Final = 1000
"""Tagged fields of one struct. The schemas know a handful, and each that is skipped takes time."""

_INT16: Final = struct.Struct(">h")


class MalformedFrame(ValueError):
    """These bytes are not the message that they claim to be. The connection that sent them must be closed."""


class NeedMore(Exception):
    """The message is fine so far, and the bytes at hand end before the wanted field: come again with more."""


def read_uvarint(frame: Frame, position: int) -> tuple[int, int]:
    """Read an UNSIGNED_VARINT: the value, and the position behind it.

    Raises IndexError where the bytes end inside it and MalformedFrame where it is longer than five bytes.
    """
    value = frame[position]
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    shift = 7
    while True:
        byte = frame[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift == 7 * VARINT_BYTES_MAX:
            raise MalformedFrame(f"A varint at {position - VARINT_BYTES_MAX} is longer than {VARINT_BYTES_MAX} bytes")


def read_string(data: bytes, position: int) -> tuple[str, int]:
    """A string behind its size in 16 bits, and where it ends.

    Raises MalformedFrame, and struct.error or UnicodeDecodeError for other bytes that are none.
    """
    (size,) = _INT16.unpack_from(data, position)
    return _text(data, position + 2, size)


def read_compact_string(data: bytes, position: int) -> tuple[str, int]:
    """The same behind its size as an unsigned varint, which is one more than that."""
    size, position = read_uvarint(data, position)
    return _text(data, position, size - 1)


def _text(data: bytes, position: int, size: int) -> tuple[str, int]:
    end = position + size
    if size < 0 or end > len(data):
        raise MalformedFrame(f"a string of {size} bytes, {len(data) - position} are left")
    return data[position:end].decode(), end


def write_uvarint(value: int) -> bytes:
    """An UNSIGNED_VARINT in its shortest form. ``value`` must be in 0..2^32-1."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def check_tags(count: int) -> None:
    """Raises MalformedFrame where a struct announces so many tagged fields that nobody meant them."""
    if count > TAGS_MAX:
        raise MalformedFrame(f"{count} tagged fields of one struct")


def skip_tags(frame: Frame, position: int) -> int:
    """The position behind a section of tagged fields (a count, then tag, size and bytes of each).

    Raises IndexError where the bytes end inside it, MalformedFrame on bad varints. Where a size lies, the result may be
    behind the frame's end: the caller compares.
    """
    count, position = read_uvarint(frame, position)
    check_tags(count)
    while count:
        _, position = read_uvarint(frame, position)
        size, position = read_uvarint(frame, position)
        position += size
        count -= 1
    return position


def response_body(frame: Frame, header_flexible: bool) -> int:
    """Where a response's body starts: behind the size, the correlation id and, in header v1, the header's tags.

    Raises MalformedFrame where the frame ends before.
    """
    try:
        position = skip_tags(frame, 8) if header_flexible else 8
    except IndexError:
        position = len(frame) + 1
    if position > len(frame):
        raise MalformedFrame(f"A response of {len(frame)} bytes ends inside its header")
    return position
