"""One partition's log as its leader has it: a model of a broker, for simulations and unit tests without brokers.

What a broker checks of a batch, what it keeps of producers and transactions, what it answers: as measured on real ones.
``tests/integration/test_partition_log.py`` runs the same operations on this model and on brokers and compares.
The errors that a broker answers are returned as codes, as on the wire.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

from isthmus_plugins.cluster import TransactionMarkers
from isthmus_plugins.decompression import decompressed
from isthmus_protocol.record_codec import (
    Marker,
    Record,
    decode_control,
    decode_records,
    encode_batch,
    nullable,
)
from isthmus_protocol.record_compression import compress
from isthmus_protocol.record_division import Run, divided
from isthmus_protocol.records import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    SEQUENCE_MAX,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Compression,
    add_sequence,
    rebase,
    seal,
    verify_crc,
    whole_header,
)
from isthmus_protocol.varints import varint

NONE, OUT_OF_RANGE, INVALID_TIMESTAMP = 0, 1, 32
OUT_OF_ORDER, INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, COORDINATOR_FENCED = 45, 47, 48, 52
INVALID_RECORD: Final = 87
TIMESTAMP: Final = 1_700_000_000_000


def batch(
    base_offset: int,
    values: Sequence[bytes | None],
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    leader_epoch: int = 0,
    attributes: int = 0,
    timestamp: int = TIMESTAMP,
    keys: Sequence[bytes | None] | None = None,
) -> bytes:
    """A batch as it stands in a log."""
    header = BatchHeader(
        base_offset=base_offset,
        length=0,
        leader_epoch=leader_epoch,
        magic=2,
        crc=0,
        attributes=attributes,
        last_offset_delta=len(values) - 1,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(values),
    )
    records = [
        Record(base_offset + index, timestamp, None if keys is None else keys[index], value)
        for index, value in enumerate(values)
    ]
    return encode_batch(records, header)


def control_batch(
    base_offset: int,
    committed: bool,
    *,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int = 0,
    leader_epoch: int = 0,
    timestamp: int = TIMESTAMP,
) -> bytes:
    """A transaction marker as a broker writes it."""
    like = BatchHeader(
        base_offset,
        0,
        leader_epoch,
        2,
        0,
        CONTROL_BIT | TRANSACTIONAL_BIT,
        0,
        timestamp,
        timestamp,
        producer_id,
        producer_epoch,
        -1,
        1,
    )
    key = (0).to_bytes(2, "big") + int(committed).to_bytes(2, "big")
    value = (0).to_bytes(2, "big") + coordinator_epoch.to_bytes(4, "big")
    return encode_batch([Record(base_offset, timestamp, key, value)], like)


@dataclass
class Producer:
    """What a broker knows of a producer in a partition."""

    epoch: int = -1
    last_sequence: int = -1
    recent: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=5))
    """First sequence, last sequence, base offset of its last batches."""
    coordinator_epoch: int = -1
    transaction_start: int = -1
    """First offset of its open transaction, -1 without one."""
    timestamp: int = -1
    """Of its last batch's latest record: brokers forget producers by that."""

    def enter(self, epoch: int) -> None:
        """Go on with this epoch: a new one begins without batches."""
        if epoch != self.epoch:
            self.epoch, self.last_sequence = epoch, -1
            self.recent.clear()


class Aborted(NamedTuple):
    """A transaction that ended with an abort marker, as brokers tell it to read_committed consumers."""

    producer_id: int
    first_offset: int
    last_offset: int
    """Of its marker."""


@lru_cache(maxsize=4096)
def decoded(batch: bytes) -> Sequence[Record]:
    """The records of a batch: what must hold of logs is asked of all their batches again and again."""
    return decode_records(batch)


class Partition:
    """One partition's log."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.leader_epoch = 0
        self.log: list[bytes] = []
        self.headers: list[BatchHeader] = []
        self.end = 0
        self.start = 0
        self.lag = 0
        """How far the high watermark is behind the end."""
        self.producers: dict[int, Producer] = {}
        self.aborted: list[Aborted] = []
        self.log_append_time = False
        self.compacted = False
        """Whether records without a key are refused."""
        self.cleaned = False
        """Whether the cleaner has been here."""
        self.grew = asyncio.Event()
        self.on_append: Callable[[Partition], None] = lambda partition: None

    @property
    def high_watermark(self) -> int:
        return self.end - self.lag

    @property
    def last_stable_offset(self) -> int:
        """All before it is decided: up to here reads a read_committed consumer."""
        open_from = [each.transaction_start for each in self.producers.values() if each.transaction_start >= 0]
        return max(self.start, min([self.high_watermark, *open_from]))

    def move(self, leader: int, lossy: bool = False) -> None:
        """Another leader, with the same log, or (``lossy``) without what its replicas did not have."""
        if lossy and self.lag:
            self.cut(self.high_watermark)
        self.leader = leader
        self.leader_epoch += 1
        self.lag = 0

    def replicated(self, end: int, leader_epoch: int) -> None:
        """The in-sync replicas have all before ``end`` of that leader's log."""
        if leader_epoch == self.leader_epoch:
            self.lag = self.end - max(self.high_watermark, end)

    # ---- writing ----

    def write(self, data: bytes, replicated: bool = True) -> None:
        """Put a batch at the end, as the log's own leader would have made it: nothing is checked."""
        header = whole_header(data)
        assert header.base_offset >= self.end
        if not replicated:
            self.lag += header.next_offset - self.end
        self._learn(header, data)
        self.log.append(data)
        self.headers.append(header)
        self.end = header.next_offset
        grew, self.grew = self.grew, asyncio.Event()
        grew.set()
        self.on_append(self)

    def offset_for_time(self, time: int) -> tuple[int, int]:
        """The first record or marker with such a time (-3: with the latest there is), as brokers tell it."""
        found = (
            (record.offset, record.timestamp)
            for data in self.log
            for record in decoded(data)
            if record.offset >= self.start
        )
        if time == -3:
            return max(found, key=lambda each: (each[1], -each[0]), default=(-1, -1))
        return next((each for each in found if each[1] >= time), (-1, -1))

    def write_values(self, *values: bytes | None, **more: Any) -> None:
        self.write(batch(self.end, values, leader_epoch=self.leader_epoch, **more))

    def _learn(self, header: BatchHeader, data: bytes) -> None:
        """What a broker keeps of a batch that it appends, or finds in its log."""
        if not header.is_idempotent:
            return
        known = self.producers.setdefault(header.producer_id, Producer())
        known.enter(header.producer_epoch)
        known.timestamp = header.max_timestamp
        if header.is_control:
            if header.record_count:
                control = decode_control(data)
                known.coordinator_epoch = control.coordinator_epoch
                if known.transaction_start >= 0 and control.marker is Marker.ABORT:
                    self.aborted.append(Aborted(header.producer_id, known.transaction_start, header.base_offset))
            known.transaction_start = -1
            return
        known.last_sequence = header.last_sequence
        known.recent.append((header.base_sequence, header.last_sequence, header.base_offset))
        if header.is_transactional and known.transaction_start < 0:
            known.transaction_start = header.base_offset

    def transact(self, producer_id: int, values: Sequence[bytes], committed: bool) -> None:
        """A whole transaction of one batch, whose values are its keys, too."""
        known = self.producers.get(producer_id, Producer())
        sequence = max(0, add_sequence(known.last_sequence, 1)) if known.last_sequence >= 0 else 0
        code, _ = self.produce(
            batch(
                0,
                values,
                keys=values,
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=sequence,
                leader_epoch=self.leader_epoch,
                attributes=TRANSACTIONAL_BIT,
            )
        )
        assert code == NONE
        assert self.mark(TransactionMarkers("", 0, producer_id, 0, committed, 0)) == NONE

    def produce(self, data: bytes, replicated: bool = True) -> tuple[int, int]:
        """What a broker does with a client's batch (KIP-890 verification off): (error code, base offset)."""
        verify_crc(data)
        header = whole_header(data)
        assert not header.is_control, "brokers refuse control batches of clients"
        if header.base_offset and header.compression is not Compression.NONE:
            return INVALID_RECORD, -1
        if header.is_log_append_time:
            return INVALID_TIMESTAMP, -1
        if header.record_count != header.last_offset_delta + 1:
            return INVALID_RECORD, -1
        if self.compacted and any(record.key is None for record in decode_records(data)):
            return INVALID_RECORD, -1
        if header.is_idempotent and (known := self.producers.get(header.producer_id)) is not None:
            if header.producer_epoch == known.epoch:
                for first, last, base_offset in known.recent:
                    if (first, last) == (header.base_sequence, header.last_sequence):
                        return NONE, base_offset
            if code := self._objection(known, header):
                return code, -1
        base_offset = self.end
        self.write(self._stamped(rebase(data, base_offset)), replicated)
        return NONE, base_offset

    @staticmethod
    def _objection(known: Producer, header: BatchHeader) -> int:
        if header.producer_epoch < known.epoch:
            return INVALID_PRODUCER_EPOCH
        if header.producer_epoch != known.epoch:
            if known.epoch >= 0 and header.base_sequence != 0:
                return OUT_OF_ORDER
        elif known.epoch >= 0:
            following = known.last_sequence + 1 if known.last_sequence < SEQUENCE_MAX else 0
            if header.base_sequence != following:
                return OUT_OF_ORDER
        if known.transaction_start >= 0 and not header.is_transactional:
            return INVALID_TXN_STATE
        return NONE

    def _stamped(self, data: bytes) -> bytes:
        """With this leader's epoch and, where the topic says so, the time of the append."""
        header = whole_header(data)._replace(leader_epoch=self.leader_epoch)
        if self.log_append_time:
            header = header._replace(
                attributes=header.attributes | LOG_APPEND_TIME_BIT, max_timestamp=TIMESTAMP + 1000 + self.end
            )
        return seal(header, data[len(header.pack()) :])

    def mark(self, marker: TransactionMarkers, replicated: bool = True) -> int:
        """What a broker does with one entry of WriteTxnMarkers (v1): the error code. One sent twice stands twice."""
        known = self.producers.get(marker.producer_id)
        if known is not None:
            if marker.producer_epoch < known.epoch:
                return INVALID_PRODUCER_EPOCH
            if marker.coordinator_epoch < known.coordinator_epoch:
                return COORDINATOR_FENCED
        self.write(
            control_batch(
                self.end,
                marker.committed,
                producer_id=marker.producer_id,
                producer_epoch=marker.producer_epoch,
                coordinator_epoch=marker.coordinator_epoch,
                leader_epoch=self.leader_epoch,
            ),
            replicated,
        )
        return NONE

    def cut(self, end: int) -> None:
        """Lose the records from ``end`` on; what is known of producers is what the rest of the log tells."""
        while self.headers and self.headers[-1].base_offset >= end:
            self.headers.pop()
            self.log.pop()
        self.end = self.headers[-1].next_offset if self.headers else self.start
        self.producers.clear()
        self.aborted.clear()
        for header, data in zip(self.headers, self.log, strict=True):
            self._learn(header, data)

    def delete_records(self, before: int) -> tuple[int, int]:
        """What DeleteRecords does: (error code, where the log starts now). -1: up to the high watermark."""
        if before > self.high_watermark:
            return OUT_OF_RANGE, -1
        self.start = max(self.start, self.high_watermark if before < 0 else before)
        return NONE, self.start

    def describe(self) -> str:
        """Limits, batches and producers, for messages of failures."""
        lines = [f"{self.start} to {self.end}, stable up to {self.last_stable_offset}, {self.aborted=}"]
        lines += [
            f"  {header.base_offset}..{header.last_offset} n={header.record_count} {header.attributes:#x} "
            f"{header.producer_id:#x} epoch {header.producer_epoch} sequence {header.base_sequence}"
            for header in self.headers
        ]
        return "\n".join([*lines, *(f"  {each:#x}: {known}" for each, known in self.producers.items())])

    # ---- reading ----

    def records(self, committed: bool = False) -> dict[int, Record]:
        """What a consumer sees, by offset: read_uncommitted, or only what is not part of an aborted transaction."""
        found: dict[int, Record] = {}
        end = self.last_stable_offset if committed else self.end
        for header, data in zip(self.headers, self.log, strict=True):
            if not header.is_control and header.next_offset <= end and not (committed and self._is_aborted(header)):
                found |= {record.offset: record for record in decoded(data) if record.offset >= self.start}
        return found

    def read(self, offset: int, bytes_max: int, end: int) -> bytes:
        """Whole batches before ``end``, from the one on that holds ``offset``; one at least."""
        found: list[bytes] = []
        size = 0
        # Logs grow long, and are read at their end over and over.
        first = bisect_right(self.headers, offset, key=lambda header: header.next_offset)
        for number in range(first, len(self.log)):
            data = self.log[number]
            if self.headers[number].next_offset > end or (found and size + len(data) > bytes_max):
                break
            found.append(data)
            size += len(data)
        return b"".join(found)

    def aborted_from(self, offset: int) -> tuple[tuple[int, int], ...]:
        """(producer id, first offset) of the aborted transactions that an answer from ``offset`` on lists.

        Brokers look up to an index entry after what was read, which in a short log is its end: transactions after the
        records may be listed, too.
        """
        return tuple((each.producer_id, each.first_offset) for each in self.aborted if each.last_offset >= offset)

    # ---- the cleaner ----

    def clean(self, offsets: Collection[int]) -> None:
        """Take out these records and markers, and batches of which nothing is left."""
        log: list[bytes] = []
        for header, data in zip(self.headers, self.log, strict=True):
            kept = [record for record in decode_records(data) if record.offset not in offsets]
            if len(kept) == header.record_count:
                log.append(data)
            elif kept:
                log.append(encode_batch(kept, header, last_offset=header.last_offset))
        self.log = log
        self.headers = [whole_header(data) for data in log]

    def compact(self, up_to: int, drop_tombstones: bool) -> None:
        """What compaction makes of the log before ``up_to``, never of its last batch or of open transactions.

        The batches left keep their offsets, with holes inside; a producer's last batch stays, emptied; aborted records
        and those without a key go, and markers with ``drop_tombstones`` and tombstones, too, where nothing of their
        transaction is left.
        """
        self.cleaned = True
        up_to = min(up_to, self.last_stable_offset, self.headers[-1].base_offset if self.headers else 0)
        latest: dict[bytes | None, int] = {}
        kept: list[tuple[BatchHeader, bytes, list[Record] | None]] = []
        for header, data in zip(self.headers, self.log, strict=True):
            if header.next_offset > up_to or header.is_control:
                kept.append((header, data, None))
                continue
            records = [] if self._is_aborted(header) else decode_records(data) if header.record_count else []
            kept.append((header, data, records))
            latest |= {record.key: record.offset for record in records}
        last = {header.producer_id: header.base_offset for header in self.headers}
        last_data = {header.producer_id: header.base_offset for header in self.headers if not header.is_control}
        left = set()  # producers with records before this batch, since their last marker
        log: list[bytes] = []
        for header, data, records in kept:
            own_last = header.is_idempotent and header.base_offset in (
                last_data.get(header.producer_id, -1),
                last[header.producer_id] if header.producer_id not in last_data else -1,
            )
            if header.next_offset > up_to:
                log.append(data)
            elif records is None:
                if header.producer_id in left or not drop_tombstones or not header.record_count:
                    log.append(data if header.record_count else _emptied(header))
                elif own_last:
                    log.append(_emptied(header))
                left.discard(header.producer_id)
            else:
                rest = [
                    record
                    for record in records
                    if record.key is not None
                    and latest[record.key] == record.offset
                    and not (drop_tombstones and record.value is None)
                ]
                if rest:
                    left.add(header.producer_id)
                    horizon = any(record.value is None for record in rest)
                    log.append(data if len(rest) == header.record_count else _with_holes(header, rest, horizon))
                elif own_last:
                    log.append(_emptied(header))
        self.log = log
        self.headers = [whole_header(data) for data in log]

    def _is_aborted(self, header: BatchHeader) -> bool:
        return header.is_transactional and any(
            each.producer_id == header.producer_id and each.first_offset <= header.base_offset < each.last_offset
            for each in self.aborted
        )


def _emptied(header: BatchHeader) -> bytes:
    attributes = header.attributes & (TRANSACTIONAL_BIT | CONTROL_BIT | LOG_APPEND_TIME_BIT)
    return seal(header._replace(attributes=attributes, base_timestamp=-1, record_count=0), b"")


def _with_holes(header: BatchHeader, records: Sequence[Record], horizon: bool) -> bytes:
    """The batch with only these records: offsets, sequence and codec stay. ``horizon``: with a delete horizon."""
    base_timestamp = header.max_timestamp + 86_400_000 if horizon else records[0].timestamp
    payload = bytearray()
    for record in records:
        headers = b"".join(
            part for name, content in record.headers for part in (*nullable(name.encode()), *nullable(content))
        )
        body = b"".join(
            (
                b"\x00",
                varint(record.timestamp - base_timestamp),
                varint(record.offset - header.base_offset),
                *nullable(record.key),
                *nullable(record.value),
                varint(len(record.headers)),
                headers,
            )
        )
        payload += varint(len(body)) + body
    attributes = header.attributes & ~DELETE_HORIZON_BIT | (DELETE_HORIZON_BIT if horizon else 0)
    return seal(
        header._replace(
            attributes=attributes,
            base_timestamp=base_timestamp,
            max_timestamp=max(record.timestamp for record in records)
            if not header.is_log_append_time
            else header.max_timestamp,
            record_count=len(records),
        ),
        compress(bytes(payload), header.compression),
    )


def runs_of(batch: bytes, *, from_offset: int = 0, records_max: int | None = None) -> list[Run]:
    """A batch taken apart, all at once."""
    runs = divided(batch, decompressed(batch), from_offset=from_offset, records_max=records_max)
    return [run for run in runs if run is not None]
