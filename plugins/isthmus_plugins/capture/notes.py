"""What a proxy's sessions note of traffic, for the process that makes events of it (see docs/adr/0010).

A note is a tuple (``api.TapNote``) in a list where the traffic is, and that is all that it costs there. Many are packed
at a time: the size of what follows (4 bytes), and the list as ``marshal`` writes it, since both run the same Python.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from isthmus_plugins.api import TAP_ANSWER, TAP_GATED, TAP_MORE, TAP_OWN_ANSWER, TAP_REQUEST, TapNote
from isthmus_protocol.partition_scan import ScannedPartition

_SIZE: Final = struct.Struct(">I")


class Kind(IntEnum):
    REQUEST = TAP_REQUEST
    ANSWER = TAP_ANSWER
    """The broker's first bytes have come, and the answer goes out."""
    GATED = TAP_GATED
    """The broker's first bytes have come, and the answer waits at a gate: SENT says until when."""
    OWN_ANSWER = TAP_OWN_ANSWER
    """The proxy answered in the broker's place."""
    MORE = TAP_MORE
    """More first bytes of an answer."""
    SENT = 4
    """An answer that had waited at a gate has gone out."""
    OPENED = 5
    """A connection: its client's address, and the broker's id as ``size``."""
    CLOSED = 6
    PRINCIPAL = 7
    """Who authenticated on the connection."""
    SETTINGS = 8
    """JSON: what is to be captured from here on. Also the first note."""
    TOPIC = 10
    """A topic's id (16 bytes) and name."""
    PARTS = 13
    """Partitions of a request or answer (:func:`pack_parts`); ``size`` of the last note of them: how many there are."""
    LINK = 12
    """What a link does: :func:`pack_link`."""


_PART: Final = struct.Struct(">HBiiiih")


def pack_parts(parts: Iterable[ScannedPartition]) -> bytes:
    """Partitions, with the headers of their first batches."""
    return b"".join(
        _PART.pack(
            len(part.topic),
            len(part.header),
            part.partition,
            part.size,
            part.batches,
            part.records,
            part.error_code,
        )
        + part.topic
        + part.header
        for part in parts
    )


def unpack_parts(said: bytes) -> Iterator[ScannedPartition]:
    position = 0
    while position < len(said):
        named, headed, partition, size, *counts = _PART.unpack_from(said, position)
        topic_at, header_at = position + _PART.size, position + _PART.size + named
        position = header_at + headed
        yield ScannedPartition(said[topic_at:header_at], partition, size, said[header_at:position], *counts)


_LINK_NUMBERS: Final = struct.Struct(">iqqqqiqqqq")
_LINK_TEXTS: Final = 7


def pack_link(texts: Iterable[str | None], numbers: Iterable[int]) -> bytes:
    """What a note of a link says: the fields of ``blocks.LINK_FIELDS`` that stand for texts, and the others."""
    return _LINK_NUMBERS.pack(*numbers) + "\0".join(each or "" for each in texts).encode()


def unpack_link(said: bytes) -> tuple[list[str | None], tuple[int, ...]]:
    """The texts, and the numbers but the time."""
    texts: list[str | None] = [each or None for each in said[_LINK_NUMBERS.size :].decode().split("\0", _LINK_TEXTS)]
    return texts, _LINK_NUMBERS.unpack_from(said)


class Note(NamedTuple):
    kind: int
    session: int
    at_ns: int
    took_ns: int
    key: int
    correlation_id: int
    size: int
    first: bytes


def pack(notes: Sequence[TapNote]) -> bytes:
    """Of plain integers: no member of an enumeration."""
    said = marshal.dumps(list(notes))
    return _SIZE.pack(len(said)) + said


def unpack(data: bytes) -> Iterator[tuple[int, Note]]:
    """(Where what it was packed with ends, note) of all that was packed and is there as a whole."""
    position = 0
    while position + _SIZE.size <= len(data):
        (size,) = _SIZE.unpack_from(data, position)
        position += _SIZE.size
        end = position + size
        if end > len(data):
            return
        for kind, session, at, noted, *rest in marshal.loads(data[position:end]):
            yield end, Note(kind, session, int(at * 1e9), int((noted - at) * 1e9), *rest)
        position = end
