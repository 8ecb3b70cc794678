"""Produces again what a salvage file holds: in order, each record once, however often the command is killed and given.

A replay is one idempotent producer, whose sequence numbers count the file's records: the one with number *n* has
sequence *n*. So the target's log itself says how far it got: the last batch of that producer in it. Producer id, what
brokers have acked, and the offset from which on the log is to be looked at stand in a *note* beside the file, which is
on the disk before the first record is sent. A late request of a killed command carries sequences that the broker knows.

Why not transactions, with the progress committed in them: what a killed command had sent would stay in the log as an
aborted transaction, which every consumer reads that does not ask for ``read_committed``. And committed offsets expire.

::

    no note ──note written──► begun ──chunk after chunk acked──► done
                                │                                 │
              killed: the log is read from where the note says    nothing is sent again
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from isthmus.errors import KafkaError, PeerFault
from isthmus.kafka.client import EARLIEST, LATEST, LOG_END, Backoff, ClusterClient
from isthmus.kafka.results import Produced, TopicInfo, TopicPartition
from isthmus.salvage_files import Note, note_path, read_note, write_note
from isthmus_plugins.clock import monotonic
from isthmus_plugins.decompression import decompressed
from isthmus_protocol.error_codes import (
    DUPLICATE_SEQUENCE_NUMBER,
    MESSAGE_TOO_LARGE,
    OFFSET_NOT_AVAILABLE,
    OUT_OF_ORDER_SEQUENCE_NUMBER,
    RECORD_LIST_TOO_LARGE,
)
from isthmus_protocol.record_codec import Record, decode_in_steps, encode_batch
from isthmus_protocol.records import (
    PLAIN_HEADER,
    Compression,
    add_sequence,
    walk,
)
from isthmus_protocol.salvage import Salvage, identity
from isthmus_protocol.salvaged_records import CONSUMED, Fate, fates

CHUNK_RECORDS: Final = 5_000
CHUNK_BYTES: Final = 256 * 1024
"""Of keys, values and headers: what one request carries, unless a single record is larger."""
STALLED_S: Final = 60.0
"""So long a chunk is tried while brokers answer that it may be tried again."""
NOTED_EVERY_S: Final = 1.0
READ_TRIES: Final = 20
"""Of half a second: for records that the log's end promises, and a new leader does not show yet."""
NONE: Final = -1

_TOO_LARGE: Final = frozenset({MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE})
_ELSEWHERE: Final = frozenset({DUPLICATE_SEQUENCE_NUMBER, OUT_OF_ORDER_SEQUENCE_NUMBER})
"""The log has another part of the file than was thought."""


class ReplayRefused(Exception):
    """Nothing is produced. ``code`` is a constant for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Plan(NamedTuple):
    """What a replay would do. ``fates``: how many records of the file are what; ``end``: of the target's log."""

    records: int
    fates: Mapping[Fate, int]
    already: int
    end: int
    note: Note | None


class Outcome(NamedTuple):
    """What it has done. Offsets of the target's log, of what was appended now; -1: nothing was, or it is not known."""

    plan: Plan
    appended: int
    first_offset: int
    last_offset: int


class SalvageReplay:
    """One file, to one partition. Methods raise PeerFault, ReplayRefused, BatchError, MalformedSalvage, OSError."""

    def __init__(
        self, client: ClusterClient, salvage: Salvage, topic: str, partition: int | None, directory: Path
    ) -> None:
        """``client`` is the caller's and stays open. ``partition``: None for the one that was cut. ``directory``:
        where notes stand."""
        self._client = client
        self._salvage = salvage
        self._identity = identity(salvage.head, salvage.tail)
        self._fates = fates(salvage)
        self._place = TopicPartition(topic, salvage.head.partition if partition is None else partition)
        self._topic_id = ""
        self._path = note_path(directory, self._identity, client.cluster_id or "", *self._place)

    async def plan(self, again: bool = False) -> Plan:
        """What :meth:`run` would do, as of now. ``again``: from the beginning, whatever was done before."""
        self._topic_id = _checked(await self._client.refresh([self._place.topic]), self._place)
        counts = self._counts()
        records = sum(count for fate, count in counts.items() if fate in CONSUMED)
        note = None if again else read_note(self._path)
        already, end = 0, await self._end(LATEST)
        if note is not None:
            if note.topic_id != self._topic_id:
                message = (
                    f"topic {self._place.topic} was made anew since {note.acked} of {note.records} records were "
                    f"replayed to it: --again begins from the first one"
                )
                raise ReplayRefused("TOPIC_REPLACED", message)
            already = note.records if note.done_ms else await self._found(note, end)
        return Plan(records, MappingProxyType(counts), already, end, note)

    async def run(self, progressed: Callable[[int, int], None], again: bool = False) -> Outcome:
        """Produce what is not there yet. ``progressed`` is told how many records are there, and of how many."""
        plan = await self.plan(again)
        if plan.note is not None and plan.note.done_ms:
            return Outcome(plan, 0, NONE, NONE)
        note = replace(plan.note, acked=plan.already) if plan.note else await self._begun(plan)
        write_note(self._path, note)
        first, last, noted_at = NONE, NONE, monotonic()
        chunks = _Chunks(self._records(note.acked))
        try:
            while chunk := chunks.take():
                progressed(note.acked, note.records)
                produced = await self._produced(chunk, note)
                if produced.error is None:
                    count = len(chunk)
                    note = replace(note, acked=note.acked + count)
                    if produced.base_offset >= 0:  # brokers may not know where a batch stands that they had
                        note = replace(note, look_from=produced.base_offset + count)
                        first = produced.base_offset if first == NONE else first
                        last = produced.base_offset + count - 1
                elif produced.error.code in _TOO_LARGE:
                    if len(chunk) == 1:
                        raise produced.error
                    chunks.smaller(chunk)
                else:
                    found = await self._found(note, await self._end(LATEST))
                    if found <= note.acked:
                        raise produced.error
                    note = replace(note, acked=found)
                    chunks = _Chunks(self._records(found), chunks.bytes_max)
                if monotonic() - noted_at >= NOTED_EVERY_S:
                    write_note(self._path, note)
                    noted_at = monotonic()
            note = replace(note, done_ms=int(time.time() * 1000))
        finally:
            write_note(self._path, note)
        progressed(note.acked, note.records)
        return Outcome(plan, note.records - plan.already, first, last)

    async def _begun(self, plan: Plan) -> Note:
        identity_ = await self._client.init_producer_id()
        return Note(
            salvage=self._identity,
            cluster_id=self._client.cluster_id or "",
            topic=self._place.topic,
            topic_id=self._topic_id,
            partition=self._place.partition,
            producer_id=identity_.producer_id,
            producer_epoch=identity_.producer_epoch,
            records=plan.records,
            acked=0,
            look_from=plan.end,
            begun_ms=int(time.time() * 1000),
            done_ms=0,
        )

    # ---- the file ----

    def _counts(self) -> dict[Fate, int]:
        counts: Counter[Fate] = Counter()
        for (batch, header), fate in zip(self._salvage.batches(), self._fates, strict=True):
            counts[fate] += header.record_count
            if header.base_offset < self._salvage.head.from_offset:
                counts[fate] -= sum(each.offset < self._salvage.head.from_offset for each in _decoded(batch))
        return counts

    def _records(self, skipped: int) -> Iterator[tuple[Record, Compression]]:
        """The records to be produced from number ``skipped`` on, with the codec that they had."""
        begin = self._salvage.head.from_offset
        for (batch, header), fate in zip(self._salvage.batches(), self._fates, strict=True):
            if fate not in CONSUMED:
                continue
            if header.base_offset >= begin and header.record_count <= skipped:
                skipped -= header.record_count
                continue
            for record in _decoded(batch):
                if record.offset < begin:
                    continue
                if skipped:
                    skipped -= 1
                    continue
                yield record, header.compression

    # ---- the target ----

    async def _end(self, which: int, isolation: int = 0) -> int:
        listed = (await self._client.list_offsets({self._place: which}, isolation=isolation))[self._place]
        if listed.error is not None:
            raise listed.error
        return listed.offset

    async def _found(self, note: Note, end: int) -> int:
        """How many records of the file stand in the target's log below ``end``: more than noted, where it was killed.

        Raises ReplayRefused where that cannot be known any more.
        """
        start = await self._end(EARLIEST)
        position, offset, tries = note.acked, max(note.look_from, start), 0
        while offset < end:
            before = offset
            fetched = await self._client.fetch(*self._place, offset)
            if fetched.error is not None:
                raise fetched.error
            for _, _, header in walk(fetched.records):
                offset = max(offset, header.next_offset)
                if header.producer_id == note.producer_id:
                    position = max(position, header.last_sequence + 1)
            tries = 0 if offset > before else tries + 1
            if tries == READ_TRIES:
                raise PeerFault(f"{self._place.topic}-{self._place.partition} shows nothing from offset {offset} on")
        if start <= note.look_from or position > note.acked or note.acked == note.records:
            return position
        return max(position, await self._known_to_leader(note, start))

    async def _known_to_leader(self, note: Note, start: int) -> int:
        """The same where that part of the log is deleted: brokers remember producers longer than records."""
        producers = (await self._client.describe_producers([self._place]))[self._place]
        if producers.error is not None:
            raise producers.error
        known = [each.last_sequence for each in producers.states if each.producer_id == note.producer_id]
        if not known:
            message = (
                f"offsets {note.look_from} to {start - 1} of {self._place.topic}-{self._place.partition} were deleted, "
                f"so it is not known whether more than {note.acked} of {note.records} records were replayed: look at "
                "the topic; --again begins from the first one"
            )
            raise ReplayRefused("PROGRESS_UNKNOWN", message)
        end = await self._end(LATEST, LOG_END)

        async def replicated() -> None:
            if await self._end(LATEST) < end:
                raise KafkaError(OFFSET_NOT_AVAILABLE, "what only the leader has may be lost yet")

        await self._client.retrying(replicated, topics=[self._place.topic])
        return known[0] + 1

    async def _produced(self, chunk: list[tuple[Record, Compression]], note: Note) -> Produced:
        """Append a chunk, again and again while that may help. Too large, or elsewhere: the error is in the result."""
        batch = _batch(chunk, note)
        deadline, backoff = monotonic() + STALLED_S, Backoff()
        while True:
            produced = (await self._client.produce_raw({self._place: batch}))[self._place]
            error = produced.error
            if error is None or error.code in _TOO_LARGE | _ELSEWHERE:
                return produced
            if not error.retriable or monotonic() > deadline:
                raise error
            await asyncio.sleep(backoff.next_s())
            try:
                topics = await self._client.refresh([self._place.topic])
            except PeerFault:
                continue  # the next attempt says what is wrong
            if self._place.topic in topics and _checked(topics, self._place) != self._topic_id:
                raise ReplayRefused("TOPIC_REPLACED", f"topic {self._place.topic} was made anew meanwhile")


def _checked(topics: Mapping[str, TopicInfo], place: TopicPartition) -> str:
    """The id of the topic. Raises ReplayRefused where there is no such partition."""
    topic = topics.get(place.topic)
    if topic is None:
        raise ReplayRefused("NO_SUCH_TOPIC", f"there is no topic {place.topic} there, or it may not be seen: make it")
    if place.partition not in topic.partitions:
        count = len(topic.partitions)
        message = f"topic {place.topic} has {count} partitions, no partition {place.partition}: say --partition"
        raise ReplayRefused("NO_SUCH_PARTITION", message)
    return str(topic.topic_id or "")


def _decoded(batch: memoryview) -> Iterator[Record]:
    for some in decode_in_steps(batch, decompressed(batch)):
        yield from some


def _batch(chunk: list[tuple[Record, Compression]], note: Note) -> bytes:
    """One batch at base offset 0, with the sequences of its records."""
    like = PLAIN_HEADER._replace(
        producer_id=note.producer_id, producer_epoch=note.producer_epoch, base_sequence=add_sequence(0, note.acked)
    )
    records = [record._replace(offset=number) for number, (record, _) in enumerate(chunk)]
    return encode_batch(records, like, compression=chunk[0][1])


class _Chunks:
    """Records in chunks of one request each.

    They depend on where the first one begins and on nothing else, so a command that goes on where another one was
    killed makes the same.
    """

    def __init__(self, source: Iterator[tuple[Record, Compression]], bytes_max: int = CHUNK_BYTES) -> None:
        self._source = source
        self._given_back: deque[tuple[Record, Compression]] = deque()
        self.bytes_max = bytes_max

    def take(self) -> list[tuple[Record, Compression]]:
        """The next ones; none: that was all."""
        taken: list[tuple[Record, Compression]] = []
        size = 0
        while len(taken) < CHUNK_RECORDS:
            one = self._given_back.popleft() if self._given_back else next(self._source, None)
            if one is None:
                break
            size += _size(one[0])
            if taken and (one[1] is not taken[0][1] or size > self.bytes_max):
                self._given_back.appendleft(one)
                break
            taken.append(one)
        return taken

    def smaller(self, chunk: list[tuple[Record, Compression]]) -> None:
        """The broker takes no such chunk: give it back, and make smaller ones."""
        self._given_back.extendleft(reversed(chunk))
        self.bytes_max = sum(_size(record) for record, _ in chunk) // 2


def _size(record: Record) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers
