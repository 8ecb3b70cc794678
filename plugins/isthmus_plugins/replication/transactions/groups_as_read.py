"""Which groups transactions commit offsets in, as the offsets topic has it.

A transaction lists the partition of the offsets topic, and other groups share that. So that a link keeps nobody waiting
but those whose groups it leads, each proxy reads the whole topic while a synchronous link leads groups: not from its
start, but from where transactions may be open, and of its batches those of transactions alone.

A producer that was seen with the epoch of a transaction's records has all of the transaction seen: what is read has no
gaps, and with one epoch a producer begins the next one when the one before was acked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs.topic_tail import TailPart, TopicTail
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, UnknownRecord, decode_key
from isthmus_protocol.record_codec import decode_control, decode_records
from isthmus_protocol.records import BatchHeader, Frame
from isthmus_protocol.wire import MalformedFrame

LANE: Final = "transaction-groups"
REST_S: Final = 0.5
"""Each plain commit is in the topic, too, and its client waits for this broker and this process. Decisions ask."""
KEPT_S: Final = 120.0
"""How long the groups of a transaction are known after its marker was read."""
ASKED_WITHIN_S: Final = 60.0
"""They are asked for within this time from its decision."""
SEEN_WITHIN_S: Final = 60.0
"""A decision is read within this time from when it was made."""
NOT_KNOWN: Final = None
"""In place of a group's name, where a record cannot be read."""
Producer = tuple[int, int]
"""(Producer id, epoch)."""


def groups_in(batch: Frame) -> set[str | None]:
    """The groups that records of the offsets topic are about. Raises BatchError."""
    groups: set[str | None] = set()
    for record in decode_records(batch):
        try:
            groups.add(decode_key(record.key or b"").group)
        except (UnknownRecord, MalformedFrame):
            groups.add(NOT_KNOWN)
    return groups


class _Producer:
    """A producer, in one partition."""

    __slots__ = ("ended_at", "groups")

    def __init__(self) -> None:
        self.groups: dict[int, set[str | None]] = {}
        """By its epoch; also those of earlier transactions."""
        self.ended_at: float | None = None
        """When its last marker was read; None: records came since."""


class _Part(TailPart):
    __slots__ = ("began_at", "ended", "producers")

    def __init__(self, partition: int) -> None:
        super().__init__(partition)
        self.began_at = 0.0
        """When it was known from where on it is read."""
        self.producers: dict[int, _Producer] = {}
        self.ended: deque[tuple[float, int]] = deque()
        """(When, which producer): markers that were read, in their order."""


class GroupsAsRead(TopicTail[_Part]):
    """The groups of transactions that are open, or ended a short time ago."""

    def __init__(self, context: PluginContext, on_progress: Callable[[], None]) -> None:
        self._clock = context.clock
        super().__init__(context, OFFSETS_TOPIC, LANE, _Part, on_progress, REST_S)

    def has_read(self, partition: int, end: int) -> bool:
        """Whether all is read below an offset."""
        part = self._parts.get(partition)
        return part is not None and part.begun and part.next_offset >= end

    def groups_of(self, partition: int, producer: Producer) -> frozenset[str | None]:
        """In which groups a producer has committed offsets with this epoch, as far as is read, or in more of them.

        Empty: it was not seen. Holds :data:`NOT_KNOWN` where something of it cannot be read.
        """
        part, (producer_id, epoch) = self._parts.get(partition), producer
        known = None if part is None else part.producers.get(producer_id)
        return frozenset() if known is None else frozenset(known.groups.get(epoch, ()))

    def may_have_missed(self, partition: int, decided_at: float) -> bool:
        """Whether reading began so late that what was decided then, as this process saw it, may have ended before."""
        part = self._parts.get(partition)
        return part is None or not part.begun or decided_at < part.began_at + SEEN_WITHIN_S

    # ---- reading ----

    async def begin(self, parts: Sequence[_Part]) -> None:
        """What began before the last stable offset has ended."""
        cluster = self._context.cluster
        stable = await asyncio.gather(*(cluster.last_stable_offset(OFFSETS_TOPIC, part.partition) for part in parts))
        for part, offset in zip(parts, stable, strict=True):
            part.next_offset, part.began_at, part.begun = offset, self._clock.monotonic(), True

    def take(self, part: _Part, batch: Frame, header: BatchHeader) -> None:
        if not header.is_transactional or not header.record_count:
            return
        if header.is_control:
            producer_id = decode_control(batch).producer_id
            known = part.producers.get(producer_id)
            if known is not None:
                known.ended_at = self._clock.monotonic()
                part.ended.append((known.ended_at, producer_id))
            return
        known = part.producers.setdefault(header.producer_id, _Producer())
        known.ended_at = None
        known.groups.setdefault(header.producer_epoch, set()).update(groups_in(batch))

    def was_read(self, parts: Sequence[_Part]) -> None:
        until = self._clock.monotonic() - KEPT_S
        for part in parts:
            part.loaded = True
            while part.ended and part.ended[0][0] < until:
                ended_at, producer_id = part.ended.popleft()
                known = part.producers.get(producer_id)
                if known is not None and known.ended_at == ended_at:  # it has not gone on since
                    del part.producers[producer_id]
