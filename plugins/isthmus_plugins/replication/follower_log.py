"""One follower partition's log, as a state machine without I/O: what may be appended next, and what an answer means.

Theory of operation
-------------------
The source's batches come in offset order. Exactly one Produce request is under way for a partition at any time, so
that a refused batch can never be overtaken by the next one, which would then land at its offset. Each answer's base
offset is checked. Where the fate of a request is not known, nothing is sent until the target's log end and the
producer's last sequence have been read again (:meth:`FollowerLog.resume`).

::

    RESUMING --log end read--> APPENDING --answer at the right offset--> APPENDING
        ^                          |--fate unknown, broker not ready--> RESUMING
        |                          |--a batch that cannot be copied exactly--> STOPPED
        |                          +--an answer at another offset, a log end inside a batch--> DIVERGED
        +------------------------------------------------------- STOPPED, DIVERGED: only a new stream goes on

Plain batches have no sequence, and a request that got lost could still land after its batch was sent again. So they are
stamped with a producer id of the link's own and a sequence that counts on by partition: whatever lands second is
answered as a duplicate. Batches of idempotent producers keep epoch and sequence, under a translated id.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from isthmus_protocol import producer_ids
from isthmus_protocol.records import BatchHeader, add_sequence, restamp, walk

STAMP_EPOCH: Final = 0


class LogState(enum.Enum):
    RESUMING = "resuming"
    APPENDING = "appending"
    STOPPED = "stopped"
    DIVERGED = "diverged"


class StopReason(NamedTuple):
    """Why a partition does not go on. ``code`` is a constant, ``message`` for people."""

    code: str
    message: str


class Batch(NamedTuple):
    """A batch of the source that waits for its append."""

    header: BatchHeader
    data: memoryview


@dataclass(frozen=True, slots=True)
class Numbering:
    """How a source's producer ids become those of a target: both clusters' registered indexes, and the link's stamp."""

    source_index: int
    target_index: int
    link_number: int = 0

    @property
    def stamp_id(self) -> int:
        return producer_ids.ProducerIdRange(self.source_index).stamp_id(self.link_number)


def not_copyable(header: BatchHeader, expected_offset: int) -> StopReason | None:
    """Why a batch that should begin at ``expected_offset`` cannot be copied exactly (yet); None if it can."""
    if header.base_offset != expected_offset:
        return StopReason(
            "OFFSET_GAP",
            f"the source has no records from offset {expected_offset} to {header.base_offset - 1} (compaction, aborted "
            "or expired records): gaps are not copied yet",
        )
    if header.is_transactional or header.is_control:
        return StopReason(
            "TRANSACTIONAL_BATCH", f"offset {header.base_offset} is part of a transaction: they are not copied yet"
        )
    if header.has_holes:
        return StopReason(
            "COMPACTED_BATCH",
            f"compaction took records out of the batch at offset {header.base_offset}: not copied yet",
        )
    if header.is_log_append_time:
        return StopReason(
            "LOG_APPEND_TIME_BATCH",
            f"the batch at offset {header.base_offset} has the broker's timestamps (LogAppendTime): not copied yet",
        )
    if header.has_delete_horizon:
        return StopReason(
            "DELETE_HORIZON_BATCH",
            f"the batch at offset {header.base_offset} carries the cleaner's delete horizon: not copied yet",
        )
    return None


class FollowerLog:
    """The follower's log of one partition.

    ``end`` is the confirmed log end: all before it is in the target's in-sync replicas. ``accepted_end`` is where the
    batches end that were taken from the source; the source's next batch must begin there.
    """

    __slots__ = (
        "_in_flight",
        "_queue",
        "accepted_end",
        "end",
        "epoch",
        "numbering",
        "reason",
        "source_end",
        "stamp_sequence",
        "state",
    )

    def __init__(self, numbering: Numbering) -> None:
        self.numbering = numbering
        self._queue: deque[Batch] = deque()
        self._in_flight: Batch | None = None
        self.state = LogState.RESUMING
        self.reason: StopReason | None = None
        self.end = 0
        self.accepted_end = 0
        self.source_end = 0
        self.stamp_sequence = 0
        """The sequence of the next stamped record."""
        self.epoch = -1
        """The source's leader epoch up to which epochs are recorded durably."""

    @property
    def queued(self) -> int:
        """Batches that wait or are under way."""
        return len(self._queue) + (self._in_flight is not None)

    def resume(self, log_end: int, last_stamp_sequence: int | None) -> None:
        """Go on from the target's log end and the last sequence of the link's stamp there (None: it has none).

        Batches that landed are dropped from the queue. A log end inside one of them is a divergence.
        """
        if self.state in (LogState.STOPPED, LogState.DIVERGED):
            return
        if self._in_flight is not None:
            self._queue.appendleft(self._in_flight)
            self._in_flight = None
        first = not self._queue and self.accepted_end == 0
        self.stamp_sequence = 0 if last_stamp_sequence is None else add_sequence(last_stamp_sequence, 1)
        while self._queue and self._queue[0].header.next_offset <= log_end:
            self._queue.popleft()
        if self._queue and self._queue[0].header.base_offset != log_end:
            self._diverge(
                f"the log ends at {log_end}, inside or before the batch at {self._queue[0].header.base_offset}"
            )
            return
        if not first and not self._queue and log_end != self.accepted_end:
            self._diverge(f"the log ends at {log_end}, the last batch of the source ended at {self.accepted_end}")
            return
        self.end = log_end
        if first:
            self.accepted_end = log_end
        self.state = LogState.APPENDING

    def offer(self, records: memoryview) -> StopReason | None:
        """Take batches of the source. What the log has already is left out.

        Returns the reason if one of them cannot be copied: those before it still are, nothing after it is taken.
        Raises MalformedBatch, UnsupportedBatch.
        """
        if self.state in (LogState.STOPPED, LogState.DIVERGED) or self.reason is not None:
            return self.reason
        for start, end, header in walk(records):
            if header.last_offset < self.accepted_end:
                continue
            self.reason = not_copyable(header, self.accepted_end)
            if self.reason is not None:
                self._stop_if_done()
                return self.reason
            self._queue.append(Batch(header, records[start:end]))
            self.accepted_end = header.next_offset
        return None

    def next_epoch(self) -> tuple[int, int] | None:
        """(leader epoch, start offset) that must be recorded before the next append; None if there is nothing to do."""
        if self.state is LogState.APPENDING and self._queue and self._in_flight is None:
            header = self._queue[0].header
            if header.leader_epoch > self.epoch:
                return header.leader_epoch, header.base_offset
        return None

    def take(self) -> bytes | None:
        """The next batch as the target's broker is to get it; it is under way from now on. None: nothing to send."""
        if self.state is not LogState.APPENDING or self._in_flight is not None or not self._queue:
            return None
        batch = self._queue[0]
        if batch.header.leader_epoch > self.epoch:
            return None
        self._in_flight = self._queue.popleft()
        return self._prepared(batch)

    def _prepared(self, batch: Batch) -> bytes:
        header, numbering = batch.header, self.numbering
        if header.is_idempotent:
            producer_id = producer_ids.carry(header.producer_id, numbering.source_index, numbering.target_index)
            return restamp(
                batch.data,
                producer_id=producer_id,
                producer_epoch=header.producer_epoch,
                base_sequence=header.base_sequence,
            )
        return restamp(
            batch.data,
            producer_id=numbering.stamp_id,
            producer_epoch=STAMP_EPOCH,
            base_sequence=self.stamp_sequence,
        )

    def appended(self, base_offset: int) -> None:
        """The broker has the batch that was under way in its in-sync replicas, at ``base_offset``."""
        batch = self._in_flight
        assert batch is not None
        header = batch.header
        if base_offset != header.base_offset:
            self._diverge(f"the batch of offset {header.base_offset} was stored at {base_offset}")
            return
        self._in_flight = None
        if not header.is_idempotent:
            self.stamp_sequence = add_sequence(self.stamp_sequence, header.last_offset_delta + 1)
        self.end = header.next_offset
        self._stop_if_done()

    def not_appended(self) -> None:
        """The broker refused the batch that was under way, and did not store it: it is next again."""
        batch = self._in_flight
        assert batch is not None
        self._in_flight = None
        self._queue.appendleft(batch)

    def unknown(self) -> None:
        """The fate of the batch that was under way is not known: nothing is sent before :meth:`resume`."""
        if self.state is LogState.APPENDING:
            self.state = LogState.RESUMING

    def stop(self, reason: StopReason) -> None:
        """Go no further, for a reason that only the operator or a new stream can remove."""
        if self.state is not LogState.DIVERGED:
            self.state, self.reason = LogState.STOPPED, reason
            self._queue.clear()

    def _stop_if_done(self) -> None:
        if self.reason is not None and not self._queue and self._in_flight is None:
            self.state = LogState.STOPPED

    def _diverge(self, message: str) -> None:
        self.state, self.reason = LogState.DIVERGED, StopReason("DIVERGED", message)
        self._queue.clear()
        self._in_flight = None
