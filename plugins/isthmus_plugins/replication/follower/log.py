"""One follower partition's log, as a state machine without I/O: what may be written next, and what an answer means.

Theory of operation
-------------------
The source's batches come in offset order. What the target's log needs for them is a sequence of *operations*, each of
which takes the log from one offset to a later one:

- :class:`Append`, a batch to be produced: the source's as it is, or a run of its records encoded again;
- :class:`Mark`, transaction markers: the source's commit or abort, or aborts of a producer that does not exist, which
  fill the offsets of records that the source has no more (compaction).

One operation is under way for a partition at any time, so that a refused batch can never be overtaken by the next one,
which would then land at its offset. But for a *burst*: batches whose sequences go on from the one that was confirmed
last, of the same producer, may follow each other without waiting (:meth:`FollowerLog.take_more`), since a broker that
does not have the one refuses the next. The answer to an append has its base offset, which is checked; markers
are answered without one, so the next append's offset shows it, or the log end while nothing comes. Where the fate of an
operation is not known, nothing is written until the target's log end and its producers' states have been read again
(:meth:`FollowerLog.resume`).

::

    RESUMING --log end read--> WRITING --answer at the right offset--> WRITING
                                  |--fate unknown, broker not ready--> RESUMING
                                  |--a batch that cannot be copied, a log that was cut--> STOPPED
                                  +--an answer at another offset, a log end where none of ours is--> DIVERGED
    STOPPED, DIVERGED: only a new stream goes on

Plain batches have no sequence, and a request that got lost could still land after its batch was sent again. So they are
stamped with a producer id of the link's own and a sequence that counts on by partition: whatever lands second is
answered as a duplicate. Batches of idempotent producers keep epoch and sequence, under a translated id; where the
cleaner left holes in those, or the source has a batch twice, the sequence goes on from what the target knows instead.

Markers have no such net. One that is sent again carries a higher coordinator epoch than the one whose fate is unknown:
as soon as it is written, the other one is refused.

Offsets below the source's log start are filled with tombstones, many to a batch, and deleted at once (*trim*);
transactions that are open at the target are aborted there, since their end may have been among what is deleted.
Further up the cleaner may have taken a transaction's marker with the last of its records: before a gap is filled, the
leader end is asked which of the open ones that is true of (*doubtful*), and those are aborted in the gap. A long gap is
filled with tombstones in a transaction that is aborted: one batch for half a million offsets. In a copy of an offsets
topic they need no transaction, hence no consent to copies of transactions. Whatever fills has a key: the target's own
cleaner may compact the topic, and brokers refuse records without a key then.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import ProducerState
from isthmus_plugins.decompression import decompressed
from isthmus_plugins.replication.link import reasons
from isthmus_protocol import producer_ids
from isthmus_protocol.record_codec import Marker, decode_control
from isthmus_protocol.record_division import Run, divided
from isthmus_protocol.record_fillers import filler_batch
from isthmus_protocol.records import BatchError, BatchHeader, add_sequence, restamp, walk

STAMP_EPOCH: Final = 0
FILLER_EPOCH: Final = 0
MARKERS_AT_ONCE: Final = 1000
"""In one request: they are written one by one, in about 0.1 ms each."""
GAP_OF_MARKERS_MAX: Final = 10_000
"""A longer gap is filled with tombstones: an offset costs a byte there, and 78 bytes as a marker."""
FILLER_KEY: Final = b"isthmus-filler"
"""The tombstones' key. Only read_uncommitted consumers ever see them, until the cleaner has come by."""
FILLER_TOMBSTONES_MAX: Final = 500_000
"""So many fit a batch of a megabyte."""
RUNS_AT_ONCE: Final = 1000
RUNS_BYTES_AT_ONCE: Final = 8 * 1024 * 1024
"""When so much of a batch that is taken apart waits to be written, the rest is begun again behind that."""
BURST_BATCHES_MAX: Final = 32
BURST_BYTES_MAX: Final = 128 * 1024
"""Bursts are for small batches: large ones keep brokers and network busy one by one."""


class LogState(enum.Enum):
    RESUMING = "resuming"
    WRITING = "writing"
    STOPPED = "stopped"
    DIVERGED = "diverged"


class Step(enum.Enum):
    """What is to be done next with a follower's log."""

    REPORT_END = "report end"
    """It has ended: the leader end is to know why."""
    RESUME = "resume"
    """Read the target's log end, and its producers' states."""
    RECORD_EPOCH = "record epoch"
    """Record :attr:`FollowerLog.due_epoch`."""
    TAKE_KEYLESS = "take keyless"
    """Have the topic take records without a key, which a compacted one refuses."""
    RAISE_LIMITS = "raise limits"
    """Have the topic take a batch of :attr:`FollowerLog.refused_bytes`, which is larger than it may have now."""
    TRIM = "trim"
    """Delete what is before :attr:`FollowerLog.trim_to`."""
    DIVIDE = "divide"
    """Take the next batch apart, a little at a time (:meth:`FollowerLog.divide`): it is large."""
    ASK_ENDED = "ask ended"
    """Ask the leader end about the transactions in :attr:`FollowerLog.doubtful`."""
    AWAIT_DECISION = "await decision"
    """The next batch is a marker whose decision has to be durable before."""
    WRITE = "write"
    """Write what :meth:`FollowerLog.take` gives."""
    WAIT = "wait"
    """Nothing, before an answer or a batch of the source comes."""


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

    @property
    def filler_id(self) -> int:
        return producer_ids.ProducerIdRange(self.source_index).filler_id(self.link_number)


class Append(NamedTuple):
    """A batch to be produced. Its answer must say ``first_offset``."""

    first_offset: int
    next_offset: int
    data: bytes
    producer_id: int
    """Under which it is stored."""
    producer_epoch: int
    last_sequence: int
    timestamp: int
    """Of its latest record, in ms since the epoch: brokers forget producers by that."""
    transactional: bool
    divisible: bool
    """Whether fewer records could be sent at once: the batch was made here."""
    filler: bool = False
    """The source has no records here."""


class Mark(NamedTuple):
    """Transaction markers to be written, one for each offset."""

    first_offset: int
    next_offset: int
    producer_id: int
    producer_epoch: int
    committed: bool
    coordinator_epoch: int
    filler: bool = False


Operation: TypeAlias = Append | Mark


class FollowerLog:
    """The follower's log of one partition.

    ``end`` is the confirmed log end: all before it is in the target's in-sync replicas. ``accepted_end`` is where the
    batches end that were taken from the source; what the source sends next goes on there.
    """

    __slots__ = (
        "_asked_before",
        "_awaits",
        "_compacted",
        "_dividing",
        "_division",
        "_ended",
        "_filler_generation",
        "_filler_sequence",
        "_filling",
        "_in_flight",
        "_keyless",
        "_known",
        "_last",
        "_marker_proved",
        "_open",
        "_positioned",
        "_queue",
        "_records_max",
        "_resent",
        "_runs",
        "accepted_end",
        "end",
        "epoch",
        "filled",
        "numbering",
        "queued_bytes",
        "reason",
        "refused_bytes",
        "renumbering",
        "source_end",
        "source_start",
        "stamp_sequence",
        "start",
        "state",
        "uncertain",
    )

    def __init__(
        self, numbering: Numbering, compacted: bool = False, awaits: Callable[[int], bool] | None = None
    ) -> None:
        """``compacted``: it is of a copy of an offsets topic, compacted from its beginning and read by tools alone.

        Tombstones that fill it need no transaction. ``awaits``: whether markers of a producer of the source have to
        wait.
        """
        self.numbering = numbering
        self._compacted = compacted
        self._awaits = awaits
        self._queue: deque[Batch] = deque()
        self._runs: deque[Run] = deque()
        """What comes next of the queue's first batch, if it cannot be stored as it is."""
        self._dividing = False
        """Whether that is to be taken apart before anything is written, or is being..."""
        self._division: Iterator[Run | None] | None = None
        """...and where more of them come from, then."""
        self._in_flight: list[Operation] = []
        """The operations under way: one, or a burst of appends."""
        self._last: Append | None = None
        """What was confirmed last, if it was an append: the last of what the log holds."""
        self._positioned = False
        self._known: dict[int, ProducerState] = {}
        """The target's states of producers, where they matter for what is written next."""
        self.renumbering = False
        """Whether sequences do not go on as the target wants: the states of all producers matter then."""
        self._marker_proved = False
        """Whether the log end was read after the first marker: one of an owner before may have landed late, too."""
        self._open: dict[int, tuple[int, int]] = {}
        """Producer id to (epoch, first offset) of the transactions open in the target's log, the oldest first."""
        self._ended: set[int] = set()
        """Those of them whose marker the source has no more."""
        self._asked_before = 0
        """The gap up to this offset has been asked about."""
        self._resent: int | None = None
        """The producer id of a marker whose fate was unknown."""
        self._filler_sequence = 0
        self._filler_generation = 0
        self._filling = False
        """Whether a transaction of tombstones is open."""
        self._keyless = False
        """Whether the next record has no key, and the topic does not take it."""
        self.refused_bytes = 0
        """Size of the next batch, if the topic does not take one so large."""
        self._records_max = FILLER_TOMBSTONES_MAX
        """Of a batch that is made here: fewer, where the target finds more too large."""
        self.state = LogState.RESUMING
        self.reason: StopReason | None = None
        self.start = 0
        self.end = 0
        self.accepted_end = 0
        self.source_start = 0
        self.source_end = 0
        self.stamp_sequence = 0
        """The sequence of the next stamped record."""
        self.epoch = -1
        """The source's leader epoch up to which epochs are recorded durably."""
        self.queued_bytes = 0
        """Size of the source's batches that are not written yet."""
        self.filled = 0
        """Offsets without a record that were written."""
        self.uncertain = False
        """Whether an operation was sent of which nobody knows if it landed, or will."""

    @property
    def queued(self) -> int:
        """Batches that wait or are under way, and what is to be filled."""
        return len(self._queue) + (self._gap_end() > self.end)

    @property
    def next_bytes(self) -> int:
        """Size of the source's batch that is written next; 0 if none waits."""
        return len(self._queue[0].data) if self._queue else 0

    @property
    def ended(self) -> bool:
        """Whether only a new stream goes on."""
        return self.state in (LogState.STOPPED, LogState.DIVERGED)

    # ---- the target's position ----

    def resume(self, log_start: int, log_end: int, producers: Mapping[int, ProducerState]) -> None:
        """Go on from the target's log end, and what it knows of producers.

        The first call takes the log end for granted. Later, what landed is dropped from the queue; a log end where no
        operation of ours ends is a divergence, one below what was confirmed means that the target lost records: the
        stream ends, and a new one goes on from there.
        """
        if self.ended:
            return
        operations, uncertain = self._in_flight, self.uncertain
        self._last = None
        self.start = log_start
        if uncertain:
            self._marker_proved = False
        self._take_states(producers, operations if uncertain else ())
        self._in_flight, self.uncertain = [], False
        if not self._positioned:
            self._positioned = True
            self.end = self.accepted_end = log_end
            self.state = LogState.WRITING
            return
        if log_end < self.end:
            self.stop(StopReason(reasons.MOVED, f"the log was cut from {self.end} to {log_end}"))
        elif log_end > self.end and not any(_may_end(each, log_end, producers) for each in operations):
            self.diverge(f"the log ends at {log_end}, and what the source sent at {self.end}")
        elif log_end > self.end and len(operations) > 1 and operations[0].producer_id not in producers:
            self.stop(StopReason(reasons.MOVED, "the target does not know the producer of what it stored"))
        else:
            self.state = LogState.WRITING
            self._written(log_end)

    def _take_states(self, producers: Mapping[int, ProducerState], doubtful: Sequence[Operation]) -> None:
        """What matters of the producers' states. ``doubtful``: operations of unknown fate."""
        stamp = producers.get(self.numbering.stamp_id)
        self.stamp_sequence = 0 if stamp is None else _following(stamp)
        filler = producers.get(self.numbering.filler_id)
        self._filling = filler is not None and filler.transaction_start >= 0
        self._filler_sequence = 0 if filler is None else _following(filler)
        self._filler_generation = 0 if filler is None else max(0, filler.coordinator_epoch + 1)
        begun = sorted(
            (state.transaction_start, producer_id, state.epoch)
            for producer_id, state in producers.items()
            if state.transaction_start >= 0 and producer_id != self.numbering.filler_id
        )
        self._open = {producer_id: (epoch, start) for start, producer_id, epoch in begun}
        self._ended &= self._open.keys()
        self._known = dict(producers) if self.renumbering else {}
        for operation in doubtful:
            if isinstance(operation, Mark):
                self._resent = operation.producer_id
        if self._resent is not None and self._resent in producers:
            self._known[self._resent] = producers[self._resent]

    def checked(self, log_end: int) -> None:
        """The target's log ended here while nothing of ours was under way or waiting."""
        if self.state is not LogState.WRITING or self.queued:
            return
        if log_end > self.end:
            self.diverge(f"the log ends at {log_end}, and what the source sent at {self.end}")
        elif log_end < self.end:
            self.stop(StopReason(reasons.MOVED, f"the log was cut from {self.end} to {log_end}"))

    # ---- the source's batches ----

    def offer(self, records: memoryview, source_start: int = 0) -> None:
        """Take batches of the source, which follow what it sent before. What the log has already is left out.

        ``source_start``: the source's log has nothing before that. Raises MalformedBatch, UnsupportedBatch.
        """
        if self.ended:
            return
        self.source_start = max(self.source_start, source_start)
        for start, end, header in walk(records):
            if header.last_offset < self.accepted_end:
                continue
            self._queue.append(Batch(header, records[start:end]))
            self.queued_bytes += end - start
            self.accepted_end = header.next_offset
        self.accepted_end = max(self.accepted_end, self.source_start)

    # ---- what comes next ----

    def next_step(self) -> Step:
        """What is to be done next, and the only place that decides it. One thing at a time: what was begun ends first.

        A batch that cannot be taken apart stops the log.
        """
        if self.ended:
            return Step.REPORT_END
        if self.state is LogState.RESUMING:
            return Step.RESUME
        if self._in_flight:
            return Step.WAIT
        if self.due_epoch is not None:
            return Step.RECORD_EPOCH
        if self._keyless:
            return Step.TAKE_KEYLESS
        if self.refused_bytes:
            return Step.RAISE_LIMITS
        if self.trim_to is not None:
            return Step.TRIM
        if self._dividing:
            return Step.DIVIDE
        has_gap = self._gap_end() > self.end
        if self._queue and not has_gap and not self._runs and self._is_to_be_divided(self._queue[0].header):
            self._begin_dividing()
            return self.next_step()
        if has_gap:
            return Step.ASK_ENDED if self.doubtful else Step.WRITE
        if not self._queue:
            return Step.WAIT
        header = self._queue[0].header
        if self._awaits is not None and header.is_control and self._awaits(header.producer_id):
            return Step.AWAIT_DECISION
        return Step.WRITE

    @property
    def due_epoch(self) -> tuple[int, int] | None:
        """(leader epoch, start offset) that must be recorded before the next append; None if there is nothing to do."""
        if self.state is LogState.WRITING and self._queue and not self._in_flight:
            header = self._queue[0].header
            if header.leader_epoch > self.epoch:
                return header.leader_epoch, max(header.base_offset, self.end)
        return None

    @property
    def trim_to(self) -> int | None:
        """Where the log is to start now, if that is later than it does: a follower has no retention of its own."""
        if self.state is LogState.WRITING and not self._in_flight and self.start < self.source_start <= self.end:
            return self.source_start
        return None

    def trimmed(self, log_start: int) -> None:
        """The target's log starts here now."""
        self.start = max(self.start, log_start)

    @property
    def doubtful(self) -> dict[int, int]:
        """Transactions that may have ended without a marker, before a gap is filled: producer id to first offset.

        Whoever asks the leader end about them says so by :meth:`resolve`; nothing is written before.
        """
        gap_end = self._gap_end()
        if (
            not self._open
            or self.state is not LogState.WRITING
            or self._in_flight
            or max(self.end, self.source_start, self._asked_before) >= gap_end
        ):
            return {}
        return {producer_id: begun for producer_id, (_, begun) in self._open.items() if producer_id not in self._ended}

    def resolve(self, asked: Collection[int], ended: Collection[int]) -> None:
        """Of the transactions ``asked`` about, the source has the markers but of those ``ended``."""
        self._ended |= self._open.keys() & set(ended)
        if self._open.keys() <= set(asked) | self._ended:
            self._asked_before = self._gap_end()

    # ---- operations ----

    @property
    def transaction_of(self) -> int | None:
        """The producer id of the next operation if it is a transactional append: a request can hold those of one."""
        if self._queue and self._gap_end() <= self.end:
            header = self._queue[0].header
            return self._carried(header.producer_id) if header.is_transactional and not header.is_control else None
        in_transaction = self._gap_end() - self.end > GAP_OF_MARKERS_MAX and not self._compacted
        return self.numbering.filler_id if in_transaction else None

    def take(self) -> Operation | None:
        """What is to be written next; it is under way from now on. None: the next step is another one.

        A batch that cannot be prepared stops the log.
        """
        if self.next_step() is not Step.WRITE:
            return None
        gap_end = self._gap_end()
        try:
            operation = self._fill(gap_end) if gap_end > self.end else self._next(self._queue[0])
        except (BatchError, producer_ids.ProducerIdOverflow) as error:
            self._refuse_batch(error)
            return None
        self._in_flight.append(operation)
        return operation

    def _refuse_batch(self, error: Exception) -> None:
        message = (
            f"the batch at offset {self.end} cannot be copied: {error}. What comes behind it is copied once the "
            "source's log starts there (kafka-delete-records)"
        )
        self.stop(StopReason(ReasonCode.UNSUPPORTED_MESSAGE_FORMAT, message))

    def take_more(self, recent: int) -> list[Append]:
        """What may be sent right after the append that was taken, before its answer; all of it is under way then.

        Only what can never land at an offset that is not its own, whatever becomes of those before it: whole batches
        that go on the sequence of the last confirmed one. The partition knows their producer, from a batch that the
        in-sync replicas have and that stands last in the log, so it refuses each that comes without the one before.
        It may forget a producer whose latest record is old, so all of them have records not older than ``recent`` (ms
        since the epoch).
        """
        more: list[Append] = []
        before = self._last
        operation = self._in_flight[0]
        if before is None or self._runs or not isinstance(operation, Append) or self.renumbering:
            return more
        if len(self._queue) == 1:  # the one that was taken
            return more
        if operation.filler or before.next_offset != operation.first_offset or self.start >= self.end:
            return more
        size = 0
        for number, (header, data) in enumerate(islice(self._queue, BURST_BATCHES_MAX)):
            size += len(data)
            if before.timestamp < recent or size > BURST_BYTES_MAX or not self._goes_on(header, before):
                break
            if number == 0:
                before = operation
                continue
            try:
                before = self._append(header, data, divisible=False, stamp_sequence=_after(before))
            except BatchError:
                break  # it is reported when it is the first
            more.append(before)
        self._in_flight += more
        return more

    def _goes_on(self, header: BatchHeader, before: Append) -> bool:
        """Whether a batch can be stored as it is right after ``before``, and only there."""
        if (
            header.base_offset != before.next_offset
            or header.is_control
            or header.is_transactional != before.transactional
            or header.leader_epoch > self.epoch
            or self._is_to_be_divided(header)
        ):
            return False
        if not header.is_idempotent:
            return before.producer_id == self.numbering.stamp_id
        followed = (before.producer_id, before.producer_epoch, _after(before))
        return (self._carried(header.producer_id), header.producer_epoch, header.base_sequence) == followed

    def _gap_end(self) -> int:
        """Up to where the source has no record from ``end`` on, as far as that is known."""
        if self._runs:
            return self._runs[0].next_offset if self._runs[0].batch is None else self._runs[0].first_offset
        return self._queue[0].header.base_offset if self._queue else max(self.source_start, self.end)

    def _begin_dividing(self) -> None:
        """Take the next batch apart, if it is a small one. What a large one takes it does not hold while it waits."""
        self._dividing = True
        try:
            self.divide()
        except OSError:
            pass  # it is tried again, by itself
        if self._dividing:
            self._division = None
            self._runs.clear()

    def divide(self) -> None:
        """Take the next batch apart, for some milliseconds. One that cannot be taken apart stops the log.

        Raises OSError: it cannot be now.
        """
        if not self._dividing:
            return
        if self._division is None:
            self._division = self._divided(self._queue[0])
        try:
            size = sum(len(run.batch or b"") for run in self._runs)
            for run in self._division:
                if run is None:
                    return
                self._runs.append(run)
                size += len(run.batch or b"")
                if len(self._runs) >= RUNS_AT_ONCE or size >= RUNS_BYTES_AT_ONCE:
                    break
        except BatchError as error:
            self._refuse_batch(error)
        except OSError:
            self._division = None
            self._runs.clear()
            raise
        self._dividing, self._division = False, None

    def _divided(self, batch: Batch) -> Iterator[Run | None]:
        """The runs of a batch that cannot be stored as it is, and the holes between them."""
        return divided(batch.data, decompressed(batch.data), from_offset=self.end, records_max=self._records_max)

    def _forget_runs(self) -> None:
        self._runs.clear()
        self._dividing, self._division = False, None

    def _is_to_be_divided(self, header: BatchHeader) -> bool:
        if header.is_control and header.record_count:
            return False
        return not header.is_as_produced or header.base_offset < self.end

    def _next(self, batch: Batch) -> Operation:
        """The next operation of the queue's first batch, which holds ``end``."""
        if not self._runs:
            if batch.header.is_control:
                return self._marker(batch)
            return self._append(batch.header, batch.data, divisible=False)
        run = self._runs[0]
        if run.batch is None:
            return self._fill(run.next_offset)
        (_, _, run_header) = next(walk(run.batch))
        return self._append(run_header, memoryview(run.batch), divisible=True)

    def _append(
        self, header: BatchHeader, data: memoryview, divisible: bool, stamp_sequence: int | None = None
    ) -> Append:
        """``stamp_sequence``: of a plain batch, if it is not the next one to be written."""
        if header.is_idempotent:
            producer_id, epoch, sequence = (
                self._carried(header.producer_id),
                header.producer_epoch,
                self._sequence(header),
            )
        else:
            producer_id, epoch = self.numbering.stamp_id, STAMP_EPOCH
            sequence = self.stamp_sequence if stamp_sequence is None else stamp_sequence
        return Append(
            header.base_offset,
            header.next_offset,
            restamp(data, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence),
            producer_id,
            epoch,
            add_sequence(sequence, header.last_offset_delta),
            header.max_timestamp,
            header.is_transactional,
            divisible and header.record_count > 1,
        )

    def _sequence(self, header: BatchHeader) -> int:
        """The base sequence that the target takes from a producer: its own, unless what came before is not there."""
        known = self._known.get(self._carried(header.producer_id)) if self.renumbering else None
        if known is None:
            return header.base_sequence
        return _following(known) if header.producer_epoch == known.epoch else 0

    def _carried(self, producer_id: int) -> int:
        return producer_ids.carry(producer_id, self.numbering.source_index, self.numbering.target_index)

    def _marker(self, batch: Batch) -> Mark:
        marker = decode_control(batch.data)
        producer_id = self._carried(marker.producer_id)
        epoch = marker.coordinator_epoch
        if producer_id == self._resent:
            known = self._known.get(producer_id)
            epoch = max(epoch, epoch if known is None else known.coordinator_epoch) + 1
        header = batch.header
        return Mark(
            header.base_offset,
            header.next_offset,
            producer_id,
            marker.producer_epoch,
            marker.marker is Marker.COMMIT,
            epoch,
        )

    def _fill(self, gap_end: int) -> Operation:
        """Write offsets for which the source has no record."""
        length = gap_end - self.end
        head = min(gap_end, self.source_start) - self.end
        timestamp = self._queue[0].header.max_timestamp if self._queue else 0
        if head > 0 and not self._filling and self._open:
            # The source has deleted the end of a transaction with its records, or all before it goes on: nobody sees
            # what it held, and it would stay open for ever.
            return self._abort(next(iter(self._open)))
        if head <= 0 and not self._filling and self._ended:
            return self._abort(min(self._ended))
        if head > 0 and not self._filling:
            count = min(head, self._records_max)
            data = filler_batch(
                count,
                timestamp=timestamp,
                key=FILLER_KEY,  # the topic may be compacted, or become that
                producer_id=self.numbering.stamp_id,
                producer_epoch=STAMP_EPOCH,
                base_sequence=self.stamp_sequence,
            )
            last = add_sequence(self.stamp_sequence, count - 1)
            return Append(
                self.end,
                self.end + count,
                data,
                self.numbering.stamp_id,
                STAMP_EPOCH,
                last,
                timestamp,
                False,
                count > 1,
                filler=True,
            )
        if length > GAP_OF_MARKERS_MAX and head <= 0:
            # One offset at least is left for the marker that aborts them.
            count = min(length if self._compacted else length - 1, self._records_max)
            data = filler_batch(
                count,
                timestamp=timestamp,
                key=FILLER_KEY,
                producer_id=self.numbering.filler_id,
                producer_epoch=FILLER_EPOCH,
                base_sequence=self._filler_sequence,
                transactional=not self._compacted,
            )
            last = add_sequence(self._filler_sequence, count - 1)
            return Append(
                self.end,
                self.end + count,
                data,
                self.numbering.filler_id,
                FILLER_EPOCH,
                last,
                timestamp,
                not self._compacted,
                count > 1,
                filler=True,
            )
        times = 1 if head > 0 else min(length, MARKERS_AT_ONCE)
        return Mark(
            self.end, self.end + times, self.numbering.filler_id, FILLER_EPOCH, False, self._filler_generation, True
        )

    def _abort(self, producer_id: int) -> Mark:
        producer_epoch, _ = self._open[producer_id]
        known = self._known.get(producer_id)
        coordinator_epoch = 0 if known is None else max(0, known.coordinator_epoch)
        if producer_id == self._resent:
            coordinator_epoch += 1
        return Mark(self.end, self.end + 1, producer_id, producer_epoch, False, coordinator_epoch, True)

    # ---- answers ----

    def appended(self, *base_offsets: int) -> None:
        """The broker has the batches that were under way in its in-sync replicas, each at its base offset."""
        operations = self._in_flight
        if self._held_before(operations, base_offsets):
            self.out_of_sequence()
        elif not self._misplaced(operations, base_offsets):
            for operation in operations:
                assert isinstance(operation, Append)
                self._appended(operation)
        # Last: what fails before leaves them under way, and then the log's end tells what became of them.
        self._in_flight = []

    def partly_appended(self, base_offsets: Sequence[int | None]) -> None:
        """The broker stored those of a burst that have a base offset; the fate of the others is not known."""
        if not self._misplaced(self._in_flight, base_offsets):
            self.unknown()

    def _held_before(self, operations: Sequence[Operation], base_offsets: Sequence[int]) -> bool:
        """Whether the target took a batch for an earlier one of its producer, and appended nothing.

        The source's log has that batch twice: its broker had forgotten the producer in between
        (``producer.id.expiration.ms``), and the target's has not. A burst begins behind a batch of the same producer.
        """
        operation, base_offset = operations[0], base_offsets[0]
        assert isinstance(operation, Append)
        own = operation.producer_id in (self.numbering.stamp_id, self.numbering.filler_id)
        return len(operations) == 1 and base_offset < self.end and not own and not self.renumbering

    def _misplaced(self, operations: Sequence[Operation], base_offsets: Sequence[int | None]) -> bool:
        for operation, base_offset in zip(operations, base_offsets, strict=True):
            if base_offset is not None and base_offset != operation.first_offset:
                self.diverge(f"the batch of offset {operation.first_offset} was stored at {base_offset}")
                return True
        return False

    def _appended(self, operation: Append) -> None:
        following = _after(operation)
        if operation.producer_id == self.numbering.stamp_id:
            self.stamp_sequence = following
        elif operation.producer_id == self.numbering.filler_id:
            self._filler_sequence = following
            self._filling = self._filling or operation.transactional
        elif self.renumbering:
            self._note_sequence(operation)
        if operation.transactional and operation.producer_id != self.numbering.filler_id:
            begun = self._open.get(operation.producer_id, (0, operation.first_offset))[1]
            self._open[operation.producer_id] = (operation.producer_epoch, begun)
            self._ended.discard(operation.producer_id)
        self._last = operation
        self._filled(operation)
        self._written(operation.next_offset)

    def _note_sequence(self, operation: Append) -> None:
        before = self._known.get(operation.producer_id)
        coordinator_epoch = -1 if before is None else before.coordinator_epoch
        self._known[operation.producer_id] = ProducerState(
            operation.producer_epoch, operation.last_sequence, coordinator_epoch, -1
        )

    def marked(self) -> None:
        """The broker has the markers that were under way in its in-sync replicas."""
        (operation,) = self._in_flight
        assert isinstance(operation, Mark)
        self._last = None
        self._open.pop(operation.producer_id, None)
        self._ended.discard(operation.producer_id)
        if operation.producer_id == self.numbering.filler_id:
            self._filling = False
        elif self.renumbering:
            known = self._known.get(operation.producer_id)
            newer = known is None or operation.producer_epoch > known.epoch
            last_sequence = -1 if known is None or newer else known.last_sequence
            self._known[operation.producer_id] = ProducerState(
                operation.producer_epoch, last_sequence, operation.coordinator_epoch, -1
            )
        self._filled(operation)
        self._written(operation.next_offset)
        self._in_flight = []
        if not self._marker_proved:
            self._marker_proved = True
            self._read_again()

    def _filled(self, operation: Operation) -> None:
        if operation.filler:
            self.filled += operation.next_offset - operation.first_offset

    def _written(self, end: int) -> None:
        """The target's log ends here, and it is ours up to there."""
        if end != self.end:
            self._dividing, self._division = False, None
        self.end = end
        while self._runs and self._runs[0].next_offset <= end:
            self._runs.popleft()
        while self._queue and self._queue[0].header.next_offset <= end:
            self.queued_bytes -= len(self._queue.popleft().data)
            self._forget_runs()
        if self._runs and self._runs[0].first_offset < end:
            self._forget_runs()  # in the middle of a run: cut it anew
        self.accepted_end = max(self.accepted_end, end)

    def not_written(self) -> None:
        """Nothing was done of what was under way: it is next again."""
        self._in_flight.clear()

    def out_of_sequence(self) -> None:
        """The broker refused a batch for its sequence, or takes it for one before: it does not have what the producer
        sent before, since the cleaner took that out, or it remembers what the source had forgotten.

        The states of the target's producers show what it takes.
        """
        self.not_written()
        self.renumbering = True
        self._read_again()

    def fenced(self) -> None:
        """The broker refused a marker for its coordinator epoch: one that was sent again had a higher one."""
        operation = self._landed()
        self._resent = operation.producer_id
        self._read_again()

    def _read_again(self) -> None:
        if not self.ended:  # it may have been stopped while the request was under way
            self.state = LogState.RESUMING

    def doubt_end(self) -> None:
        """Where the target's log ends may not be so any more: it is read before anything is sent.

        What is under way answers that by itself.
        """
        if self.state is LogState.WRITING and not self._in_flight:
            self.state = LogState.RESUMING

    def refused_keyless(self) -> None:
        """The broker refused the batch that was under way for a record without a key: nothing is sent before
        :meth:`takes_keyless`."""
        self.not_written()
        self._keyless = True

    def takes_keyless(self) -> None:
        """The topic is not compacted any more."""
        self._keyless = False

    def too_large(self) -> None:
        """The broker finds the batch that was under way too large: send fewer records at once."""
        operation = self._landed()
        self._records_max = max(1, (operation.next_offset - operation.first_offset) // 2)
        self._forget_runs()

    def refused_large(self, size: int) -> None:
        """The broker finds the batch that was under way too large, and it cannot be divided: nothing is sent before
        :meth:`takes_large`. ``size``: its bytes."""
        self.not_written()
        self.refused_bytes = size

    def takes_large(self) -> None:
        """The topic takes larger batches now."""
        self.refused_bytes = 0

    def unknown(self) -> None:
        """The fate of what was under way is not known: nothing is sent before :meth:`resume`."""
        self.uncertain = bool(self._in_flight)
        if self.state is LogState.WRITING:
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

    def _landed(self) -> Operation:
        (operation,), self._in_flight = self._in_flight, []
        return operation

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._forget_runs()
        self.queued_bytes = 0


def _after(operation: Append) -> int:
    """The sequence that comes after a batch."""
    return add_sequence(operation.last_sequence, 1)


def _may_end(operation: Operation, log_end: int, producers: Mapping[int, ProducerState]) -> bool:
    """Whether the log may end there with the operation: of markers, some may have been written.

    A batch that stands last is its producer's last one; brokers forget producers with old records.
    """
    if isinstance(operation, Append):
        known = producers.get(operation.producer_id)
        stored = (operation.producer_epoch, operation.last_sequence)
        return log_end == operation.next_offset and (known is None or (known.epoch, known.last_sequence) == stored)
    return operation.first_offset < log_end <= operation.next_offset


def _following(state: ProducerState) -> int:
    """The sequence that comes after a producer's last one."""
    return 0 if state.last_sequence < 0 else add_sequence(state.last_sequence, 1)
