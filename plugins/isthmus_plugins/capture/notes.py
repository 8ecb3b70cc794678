"""What a proxy's sessions note of traffic, for the process that makes events of it (see docs/adr/0010).

Where the traffic is, notes (``api.TapNote``) are values one behind the other in a list, and that is all that it costs
there. Many are packed at a time: the size of what follows (4 bytes), and the list as ``marshal`` writes it, since both
run the same Python.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple

from isthmus_plugins.api import (
    TAP_ANSWER,
    TAP_GATED,
    TAP_HEAD,
    TAP_MORE,
    TAP_OWN_ANSWER,
    TAP_REQUEST,
    TapNote,
)
from isthmus_plugins.clock import monotonic
from isthmus_protocol.partition_scan import ScannedPartition

_SIZE: Final = struct.Struct(">I")
_REQUEST_HEAD: Final = struct.Struct(">i4xi")
"""Size and correlation id."""
ANSWERS: Final = frozenset((TAP_ANSWER, TAP_GATED, TAP_OWN_ANSWER))
"""Kinds of notes that have an answer's first bytes."""
VALUES: Final = 6
"""Of a note, in a list."""


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
    """A connection: its client's address, NUL, the listener; the broker's id is its number."""
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


def told(
    kind: Kind, session: int, said: bytes = b"", *, number: int = 0, key: int = 0, correlation_id: int = 0
) -> TapNote:
    """A note of something else than a frame, which says ``said`` and a number."""
    now = monotonic()
    return int(kind), session, now, now, key, TAP_HEAD.pack(number, correlation_id) + said


class Note(NamedTuple):
    """A note as it is read: the values of ``api.TapNote``, and what they say."""

    kind: int
    session: int
    at: float
    """Monotonic seconds, as ``noted``."""
    noted: float
    key: int
    first: bytes

    @property
    def head(self) -> tuple[int, int]:
        """Of a frame its size without the prefix, of another note a number; the correlation id."""
        size, correlation_id = (_REQUEST_HEAD if self.kind == TAP_REQUEST else TAP_HEAD).unpack_from(self.first)
        return size, correlation_id

    @property
    def said(self) -> bytes:
        """What a note says that has no frame's first bytes, and those that come later."""
        return self.first[TAP_HEAD.size :]


_note: Final[Callable[[tuple[Any, ...]], Note]] = partial(tuple.__new__, Note)
"""Of all its values at once: half of what calling the class takes."""


def pack(values: list[Any]) -> bytes:
    """Of the values of notes, one behind the other. Plain integers: no member of an enumeration."""
    said = marshal.dumps(values)
    return _SIZE.pack(len(said)) + said


def unpack(data: bytes) -> Iterator[tuple[int, Iterable[Note]]]:
    """Notes that were packed together, and where they end, as far as they are there as a whole."""
    position = 0
    while position + _SIZE.size <= len(data):
        (packed,) = _SIZE.unpack_from(data, position)
        position += _SIZE.size
        end = position + packed
        if end > len(data):
            return
        values = iter(marshal.loads(data[position:end]))
        yield end, map(_note, zip(*[values] * VALUES, strict=True))
        position = end
