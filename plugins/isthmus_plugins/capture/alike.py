"""Exchanges like one before: Produce requests of one partition, and answers to them without an error.

Most of what a producer sends differs from what it has sent before in a few numbers that stand in the same places. What
stands elsewhere is compared as bytes, and is read once. Pure: no I/O, no clock.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from isthmus_plugins.api import TAP_HEAD
from isthmus_plugins.capture.events import Common, Event, event_of, times
from isthmus_plugins.capture.notes import Note
from isthmus_protocol.records import HEADER_SIZE
from isthmus_protocol.schema import ApiKey, request_flexible
from isthmus_protocol.wire import MalformedFrame, read_uvarint

CLIENT_ID_AT: Final = 12
"""Before it a request has its size, key, version and correlation id."""
ANSWERS_MAX: Final = 100
"""Partitions, and producers, of which is known what answers have in common."""
_INT32: Final = struct.Struct(">i")
_BATCH: Final = struct.Struct(">21xh20xqhii")
"""Of a batch's header: attributes, producer id and epoch, first sequence, count of records."""
assert _BATCH.size == HEADER_SIZE
_APPENDED: Final = struct.Struct(">ihq")
"""Of a partition in an answer: index, error code, base offset. The log append time is next."""
_OFFSET_AND_TIME: Final = struct.Struct(">q8x")
_OFFSET_IN_APPENDED: Final = 6

_Which = tuple[int, int, int, int]
"""Partition, attributes of the batch, producer id and epoch."""


class _Answers(NamedTuple):
    """What answers to requests for one partition by one producer have in common."""

    size: int
    head: bytes
    """From behind the correlation id up to the base offset."""
    tail: bytes
    """From behind the log append time on."""
    common: Common


class Alike:
    """Requests of a session that are the same from the client id up to the partition, and answers to them."""

    def __init__(self, key: int, head: bytes) -> None:
        """``key``: API key << 16 | version."""
        self.key = key
        self.head = head
        self._part_at = CLIENT_ID_AT + len(head)
        self._flexible = request_flexible(ApiKey.PRODUCE, key & 0xFFFF)
        self._answers: dict[_Which, _Answers] = {}

    def event(self, asked: Note, answer: Note, sent: float | None) -> Event | None:
        """What one of these requests says with its answer; None: it is not like one before."""
        read = self._read(asked.first)
        if read is None:
            return None
        which, batch_bytes, sequence, records = read
        known = self._answers.get(which)
        if known is None:
            return None
        answered = answer.first
        size, head, tail, common = known
        if len(answered) != size or not answered.startswith(head, TAP_HEAD.size) or not answered.endswith(tail):
            return None
        request_size, correlation_id = asked.head
        (base_offset,) = _OFFSET_AND_TIME.unpack_from(answered, TAP_HEAD.size + len(head))
        counts = (correlation_id, request_size + 4, size, records, 1, batch_bytes, sequence, base_offset)
        return event_of((asked.at, *counts, *times(asked, answer, sent), common))

    def learn(self, asked: Note, answer: Note, sent: float | None, event: Event) -> None:
        """Know exchanges like this one, of which ``event`` is what it says, if they can be recognized."""
        read, answered = self._read(asked.first), answer.first
        if read is None or event.common.error_code != 0 or isinstance(event.common.topic, bytes):
            return
        appended = _APPENDED.pack(event.common.partition, 0, event.base_offset)
        at = answered.find(appended, TAP_HEAD.size)
        if at < 0 or at != answered.rfind(appended):  # what is there twice is something else once
            return
        offset_at = at + _OFFSET_IN_APPENDED
        tail_at = offset_at + _OFFSET_AND_TIME.size
        if tail_at > len(answered):
            return
        head, tail = answered[TAP_HEAD.size : offset_at], answered[tail_at:]
        which, *_ = read
        if len(self._answers) >= ANSWERS_MAX:
            self._answers.clear()
        self._answers[which] = _Answers(len(answered), head, tail, event.common)
        if self.event(asked, answer, sent) != event:  # it has more to it, or was not seen whole
            del self._answers[which]

    def _read(self, request: bytes) -> tuple[_Which, int, int, int] | None:
        """Which these are of; size of the batch, its first sequence, count of its records. None: there is no batch."""
        position = self._part_at
        try:
            (partition,) = _INT32.unpack_from(request, position)
            if self._flexible:
                size, position = read_uvarint(request, position + 4)
                size -= 1
            else:
                (size,) = _INT32.unpack_from(request, position + 4)
                position += 8
            attributes, producer_id, epoch, sequence, records = _BATCH.unpack_from(request, position)
        except (struct.error, IndexError, MalformedFrame):
            return None
        return None if size < HEADER_SIZE else ((partition, attributes, producer_id, epoch), size, sequence, records)
