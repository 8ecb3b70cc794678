"""One follower partition's log, as a state machine without I/O: what may be appended next, and what an answer means.

Theory of operation
-------------------
The source's batches come in offset order. Exactly one Produce request is under way for a partition at any time, so
that a refused batch can never be overtaken by the next one, which would then land at its offset. Each answer's base
offset is checked. Where the fate of a request is not known, nothing is sent until the target's log end and the
producer's last sequence have been read again (:meth:`FollowerLog.resume`).

::

    RESUMING --log end read--> APPENDING --answer at the right offset--> APPENDING
                                   |--fate unknown, broker not ready--> RESUMING
                                   |--a batch that cannot be copied exactly, a log that was cut--> STOPPED
                                   +--an answer at another offset, a log end where none of ours is--> DIVERGED
    STOPPED, DIVERGED: only a new stream goes on

Plain batches have no sequence, and a request that got lost could still land after its batch was sent again. So they are
stamped with a producer id of the link's own and a sequence that counts on by partition: whatever lands second is
answered as a duplicate. Batches of idempotent producers keep epoch and sequence, under a translated id.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from isthmus_control.states import ReasonCode
from isthmus_plugins.replication import reasons
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
    if header.base_offset > expected_offset:
        return StopReason(
            ReasonCode.COMPACTION_NOT_SUPPORTED,
            f"the source has no records from offset {expected_offset} to {header.base_offset - 1} (compaction, aborted "
            "or expired records): gaps are not copied yet",
        )
    if header.base_offset < expected_offset:
        return StopReason(
            ReasonCode.UNSUPPORTED_MESSAGE_FORMAT,
            f"the follower's log ends at {expected_offset}, inside the source's batch of offsets {header.base_offset} "
            f"to {header.last_offset}: batches are not cut yet",
        )
    if header.is_transactional or header.is_control:
        return StopReason(
            ReasonCode.TRANSACTIONS_NOT_SUPPORTED,
            f"offset {header.base_offset} is part of a transaction: they are not copied yet",
        )
    if header.has_holes:
        return StopReason(
            ReasonCode.COMPACTION_NOT_SUPPORTED,
            f"compaction took records out of the batch at offset {header.base_offset}: not copied yet",
        )
    if header.is_log_append_time:
        return StopReason(
            ReasonCode.UNSUPPORTED_MESSAGE_FORMAT,
            f"the batch at offset {header.base_offset} has the broker's timestamps (LogAppendTime): not copied yet",
        )
    if header.has_delete_horizon:
        return StopReason(
            ReasonCode.COMPACTION_NOT_SUPPORTED,
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
        "_positioned",
        "_queue",
        "accepted_end",
        "end",
        "epoch",
        "numbering",
        "queued_bytes",
        "reason",
        "source_end",
        "stamp_sequence",
        "state",
        "uncertain",
    )

    def __init__(self, numbering: Numbering) -> None:
        self.numbering = numbering
        self._queue: deque[Batch] = deque()
        self._in_flight: Batch | None = None
        self._positioned = False
        self.state = LogState.RESUMING
        self.reason: StopReason | None = None
        self.end = 0
        self.accepted_end = 0
        self.source_end = 0
        self.stamp_sequence = 0
        """The sequence of the next stamped record."""
        self.epoch = -1
        """The source's leader epoch up to which epochs are recorded durably."""
        self.queued_bytes = 0
        """Size of the batches that wait or are under way."""
        self.uncertain = False
        """Whether a request was sent of which nobody knows if it landed, or will."""

    @property
    def queued(self) -> int:
        """Batches that wait or are under way."""
        return len(self._queue) + (self._in_flight is not None)

    @property
    def ended(self) -> bool:
        """Whether only a new stream goes on."""
        return self.state in (LogState.STOPPED, LogState.DIVERGED)

    def resume(self, log_end: int, last_stamp_sequence: int | None) -> None:
        """Go on from the target's log end and the last sequence of the link's stamp there (None: it has none).

        The first call takes the log end for granted. Later, batches that landed are dropped from the queue; a log end
        where no batch of ours ends is a divergence, one below what was confirmed means that the target lost records:
        the stream ends, and a new one goes on from there.
        """
        if self.ended:
            return
        if self._in_flight is not None:
            self._queue.appendleft(self._in_flight)
            self._in_flight = None
        self.uncertain = False
        self.stamp_sequence = 0 if last_stamp_sequence is None else add_sequence(last_stamp_sequence, 1)
        if not self._positioned:
            self._positioned = True
            self.end = self.accepted_end = log_end
            self.state = LogState.APPENDING
            return
        while self._queue and self._queue[0].header.next_offset <= log_end:
            self.queued_bytes -= len(self._queue.popleft().data)
        next_offset = self._queue[0].header.base_offset if self._queue else self.accepted_end
        if log_end > next_offset:
            self.diverge(f"the log ends at {log_end}, and what the source sent at {next_offset}")
        elif log_end < next_offset:
            self.stop(StopReason(reasons.MOVED, f"the log was cut from {next_offset} to {log_end}"))
        else:
            self.end = log_end
            self.state = LogState.APPENDING
            self._stop_if_done()

    def checked(self, log_end: int) -> None:
        """The target's log ended here while nothing of ours was under way or waiting."""
        if self.state is not LogState.APPENDING or self.queued:
            return
        if log_end > self.end:
            self.diverge(f"the log ends at {log_end}, and what the source sent at {self.end}")
        elif log_end < self.end:
            self.stop(StopReason(reasons.MOVED, f"the log was cut from {self.end} to {log_end}"))

    def offer(self, records: memoryview) -> StopReason | None:
        """Take batches of the source. What the log has already is left out.

        Returns the reason if one of them cannot be copied: those before it still are, nothing after it is taken.
        Raises MalformedBatch, UnsupportedBatch.
        """
        if self.ended or self.reason is not None:
            return self.reason
        for start, end, header in walk(records):
            if header.last_offset < self.accepted_end:
                continue
            self.reason = not_copyable(header, self.accepted_end)
            if self.reason is not None:
                self._stop_if_done()
                return self.reason
            self._queue.append(Batch(header, records[start:end]))
            self.queued_bytes += end - start
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
        """The next batch as the target's broker is to get it; it is under way from now on. None: nothing to send.

        Raises CorruptBatch, ProducerIdOverflow: the batch cannot be prepared, and is still the next one.
        """
        if self.state is not LogState.APPENDING or self._in_flight is not None or not self._queue:
            return None
        batch = self._queue[0]
        if batch.header.leader_epoch > self.epoch:
            return None
        prepared = self._prepared(batch)
        self._in_flight = self._queue.popleft()
        return prepared

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
        batch = self._landed()
        header = batch.header
        if base_offset != header.base_offset:
            self.diverge(f"the batch of offset {header.base_offset} was stored at {base_offset}")
            return
        self.queued_bytes -= len(batch.data)
        if not header.is_idempotent:
            self.stamp_sequence = add_sequence(self.stamp_sequence, header.last_offset_delta + 1)
        self.end = header.next_offset
        self._stop_if_done()

    def not_appended(self) -> None:
        """The broker refused the batch that was under way, and did not store it: it is next again."""
        self._queue.appendleft(self._landed())

    def unknown(self) -> None:
        """The fate of the batch that was under way is not known: nothing is sent before :meth:`resume`."""
        self.uncertain = self._in_flight is not None
        if self.state is LogState.APPENDING:
            self.state = LogState.RESUMING

    def stop(self, reason: StopReason) -> None:
        """Go no further, for a reason that only the operator or a new stream can remove. The first reason stays."""
        if not self.ended:
            self.state, self.reason = LogState.STOPPED, reason
            self._drop_queue()

    def diverge(self, message: str) -> None:
        """The target's log holds what is not the source's."""
        self.state, self.reason = LogState.DIVERGED, StopReason(ReasonCode.TARGET_WRITTEN_BY_OTHERS, message)
        self._drop_queue()

    def _landed(self) -> Batch:
        batch, self._in_flight = self._in_flight, None
        assert batch is not None
        return batch

    def _stop_if_done(self) -> None:
        if self.reason is not None and not self._queue and self._in_flight is None:
            self.state = LogState.STOPPED

    def _drop_queue(self) -> None:
        self._queue.clear()
        self.queued_bytes = 0 if self._in_flight is None else len(self._in_flight.data)
