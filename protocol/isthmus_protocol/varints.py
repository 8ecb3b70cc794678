"""Signed numbers as records have them: zigzag varints, as in Protocol Buffers."""

from __future__ import annotations

from typing import Final

from isthmus_protocol.records import MalformedBatch

VARINT_BITS: Final = 32
VARLONG_BITS: Final = 64


def read_varint(payload: bytes, position: int, bits: int) -> tuple[int, int]:
    """The number at ``position``, and where it ends. Raises MalformedBatch, and IndexError where the bytes end."""
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
