"""Reads the ends of the logs that one broker leads, for one link, and pushes what is new.

One long poll for the streams in which nothing happens, and a second one for those that are busy, so that a record costs
a read of the busy partitions and not of all. Batches go out as the log has them, without waiting for the answers to
earlier ones. Where reads follow each other all the time, what comes within 2 ms is read together: a read for each
record takes cores from the clients that wait for the broker. Over a synchronous link clients wait for the copy, too:
there it is a twentieth of the round trip at most.

Where the cleaner comes by, a committed transaction may lose its marker and keep records. Below the last stable offset
of a compacted topic, records of committed transactions are therefore sent as plain ones (a *read committed* stream,
which reads read_committed for the list of aborted ones); those of aborted ones still have their markers. What is at
or above the last stable offset is sent as it is: nothing there has been cleaned.

The offsets topic itself is read up to the last stable offset only, and leaves in the form that the operator chose
(``offsets_topic.leaving``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, Protocol

from isthmus_control.model import LinkMode
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, FetchConnection, Fetched, FetchPartition, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.stream import REOPEN_DELAY_S, STOPPED_RETRY_S, Lane, LeaderStream, Wait
from isthmus_plugins.replication.leader.tombstone_window import hole_end
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.connection import written_together
from isthmus_plugins.replication.offsets_topic.leaving import OffsetsSource
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import link
from isthmus_protocol.error_codes import (
    FENCED_LEADER_EPOCH,
    INCONSISTENT_TOPIC_ID,
    LEADER_NOT_AVAILABLE,
    NOT_LEADER_OR_FOLLOWER,
    OFFSET_OUT_OF_RANGE,
    REPLICA_NOT_AVAILABLE,
    UNKNOWN_LEADER_EPOCH,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
    UNSUPPORTED_COMPRESSION_TYPE,
)
from isthmus_protocol.offsets_cipher import KeyringError
from isthmus_protocol.records import BatchError, BatchHeader, Frame, as_committed, walk
from isthmus_protocol.transactions import AbortedTransactions

log = logging.getLogger("isthmus_plugins.replication")

TAIL_WAIT_MS: Final = 500
"""An idle link costs one read a broker in this time."""
LEFT_OUT_WAIT_MS: Final = 20
"""A read that leaves out a stream which waits for something waits no longer: by then that one may go on."""
DECISION_SHORT_S: Final = 0.5
"""But not after this time if it waits for a decision, which may take as long as a transaction."""
BUSY_WAIT_MS: Final = 100
"""Nor does a read of busy streams, which a new one is among, wait longer: the next one has what came meanwhile, as the
partitions of a new topic do one after the other."""
BUSY_S: Final = 1.0
"""A partition is busy from a record on for this time."""
GATHERING_S: Final = 0.002
"""From the beginning of a read of busy streams to that of the next one, on average."""
GATHERING_OF_ROUND_TRIP: Final = 1 / 20
"""No more than this, where acks wait for the link."""
READS_AT_ONCE: Final = 8
"""So many may follow each other without a pause: a producer's requests that come together."""
FETCH_BYTES_MAX: Final = 16 * 1024 * 1024
_GONE: Final = frozenset({UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID})
_RESOLVE_AGAIN: Final = _GONE | {
    LEADER_NOT_AVAILABLE,
    NOT_LEADER_OR_FOLLOWER,
    REPLICA_NOT_AVAILABLE,
    FENCED_LEADER_EPOCH,
    UNKNOWN_LEADER_EPOCH,
    UNSUPPORTED_COMPRESSION_TYPE,
    INCONSISTENT_TOPIC_ID,
}
"""Errors of a Fetch after which the partition's leader is looked for again."""


class TailOwner(Protocol):
    """What tails ask of, and report to, the leader end that has them."""

    may_pass: Callable[[LeaderStream, BatchHeader, Frame, bool], bool]
    offsets_source: OffsetsSource

    def wake(self) -> None: ...

    def on_confirmed(self, stream: LeaderStream) -> None: ...

    def on_gone(self, stream: LeaderStream) -> None: ...

    def caught_up(self, stream: LeaderStream) -> None: ...

    def stop_stream(self, stream: LeaderStream, code: str, message: str, retry_s: float) -> None: ...

    def block(self, stream: LeaderStream, end: Callable[[], None]) -> None: ...

    def doubt(self, stream: LeaderStream, until: int) -> None: ...

    def out_of_range(self, stream: LeaderStream) -> None: ...

    def knows_origins(self, stream: LeaderStream, header: BatchHeader) -> bool: ...


class Tail:
    """Reads the ends of the logs that one broker leads, for one link."""

    def __init__(self, end: TailOwner, context: PluginContext, broker_id: int, link_name: str) -> None:
        self._end = end
        self._context = context
        self._clock = context.clock
        self._broker_id = broker_id
        self._link_name = link_name
        self._tasks = Tasks(f"tail-{broker_id}-{link_name}", context.supervision)
        self._streams: dict[tuple[bytes, int], LeaderStream] = {}
        self._stirring: dict[LeaderStream, None] = {}
        """Those of other lanes than that of idle ones, and some that may be idle: there can be thousands of idle ones,
        and hundreds of reads of the others in a second."""
        self._wake = {lane: asyncio.Event() for lane in Lane}
        self._ways = {
            Lane.IDLE: self._found,
            Lane.BUSY: self._found,
            Lane.READ_COMMITTED: self._committed,
            Lane.OFFSETS: self._offsets,
        }
        """What leaves of what a lane has read."""
        self._busy_read = False
        """Whether a read of busy streams is under way."""
        self._quiet: tuple[float, dict[LeaderStream, FetchPartition]] = (0.0, {})
        """When the last read of idle streams began, and those of which it returned nothing, with what was asked."""
        for lane in Lane:
            self._tasks.keep(lane.value, partial(self._read_for_ever, lane))

    async def stop(self) -> None:
        await self._tasks.close()

    def add(self, stream: LeaderStream) -> None:
        if not self._streams:
            self._wake[Lane.IDLE].set()  # that read finds out which are idle
        self._streams[stream.topic_id, stream.key.partition] = stream
        self.stir(stream)

    def stir(self, stream: LeaderStream) -> None:
        """A stream that is read is not idle, or in another lane than before."""
        if self._streams.get((stream.topic_id, stream.key.partition)) is stream:
            self._stirring[stream] = None
            self._wake[stream.lane].set()

    def remove(self, stream: LeaderStream) -> None:
        key = (stream.topic_id, stream.key.partition)
        if self._streams.get(key) is stream:
            self._note_quiet(stream)
            del self._streams[key]
        self._stirring.pop(stream, None)

    def resume(self) -> None:
        """A stream can be read on."""
        for event in self._wake.values():
            event.set()

    async def _read_for_ever(self, lane: Lane) -> None:
        turn = 0
        decided = 0.0
        """When no stream was left out for want of a decision."""
        paced = 0.0
        """When the last read would have begun at the pace that they may have in the long run."""
        while True:
            wake = self._wake[lane]
            wake.clear()
            if lane is Lane.IDLE:
                self._take_over_idle(self._clock.monotonic())
            elif lane is Lane.BUSY:
                self._take_over_stirred()
            streams, left_out = [], set[Wait]()
            for stream in self._streams.values() if lane is Lane.IDLE else self._stirring:
                if stream.lane is lane:
                    if (wait := stream.wait) is None:
                        streams.append(stream)
                    else:
                        left_out.add(wait)
            if lane is Lane.BUSY:
                self._busy_read = bool(streams)
            if not streams:
                try:
                    async with asyncio.timeout(BUSY_S if self._streams and lane is Lane.IDLE else None):
                        await wake.wait()
                except TimeoutError:
                    pass  # a busy stream may be idle by now
                if Wait.DECISION not in left_out:
                    decided = self._clock.monotonic()
                continue
            turn = (turn + 1) % len(streams)
            connection: FetchConnection | None = None
            began = self._clock.monotonic()
            if Wait.DECISION not in left_out:
                decided = began
            short = left_out - {Wait.DECISION} or (left_out and began - decided < DECISION_SHORT_S)
            try:
                connection = await self._context.cluster.fetch_connection(
                    self._broker_id, f"tail-{self._link_name}-{lane.value}"
                )
                wait_ms = LEFT_OUT_WAIT_MS if short else BUSY_WAIT_MS if lane is Lane.BUSY else TAIL_WAIT_MS
                await self._read(connection, streams[turn:] + streams[:turn], lane, wait_ms)
            except (BrokerUnavailable, KafkaRefused) as error:
                log.warning("source not read", extra={"broker": self._broker_id, "detail": str(error)})
                if connection is not None:
                    connection.close()
                self._end.wake()
                await asyncio.sleep(REOPEN_DELAY_S)
            else:
                if lane is Lane.BUSY:
                    gathering_s = self._gathering_s(streams)
                    paced = max(paced, began - READS_AT_ONCE * gathering_s) + gathering_s
                    if (rest := paced - self._clock.monotonic()) > 0:
                        await asyncio.sleep(rest)

    def _gathering_s(self, streams: Iterable[LeaderStream]) -> float:
        found = self._context.control.state.links.get(self._link_name)
        if found is None or found.mode is not LinkMode.SYNCHRONOUS:
            return GATHERING_S
        round_trip_s = min(stream.flow.round_trip_s for stream in streams)
        return min(GATHERING_S, round_trip_s * GATHERING_OF_ROUND_TRIP)

    def _take_over_idle(self, now: float) -> None:
        """The read that begins now has the streams in which nothing happened lately; the busy one drops them after."""
        for stream in list(self._stirring):
            if stream.busy and stream.at_end and now - stream.last_read > BUSY_S:
                stream.busy = False
            if stream.lane is Lane.IDLE and not stream.stirred:
                del self._stirring[stream]

    def _take_over_stirred(self) -> None:
        """The busy read that begins now has the streams that the idle one found busy meanwhile."""
        for stream in self._stirring:
            if stream.stirred:
                stream.busy, stream.stirred = True, False

    async def _read(self, connection: FetchConnection, streams: list[LeaderStream], lane: Lane, wait_ms: int) -> None:
        asked = {stream: stream.wanted() for stream in streams}
        asked_at = self._clock.monotonic()
        fetched = await connection.fetch(
            list(asked.values()),
            0 if lane is Lane.READ_COMMITTED else wait_ms,  # what has ended is there, or nothing is
            FETCH_BYTES_MAX,
            read_committed=lane in (Lane.READ_COMMITTED, Lane.OFFSETS),
            only_changes=lane is Lane.IDLE,
        )
        now = self._clock.monotonic()
        for each in asked:
            each.end_seen_at = asked_at
        places = [(part.topic_id, part.partition) for part in fetched]
        with written_together({self._streams[place].connection for place in places if place in self._streams}):
            for place, part in zip(places, fetched, strict=True):
                stream = self._streams.get(place)
                if stream is None or (wanted := asked.pop(stream, None)) is None:
                    continue  # the one that was read has ended meanwhile
                if stream.next_offset == wanted.offset:  # it may go on elsewhere in the log by now
                    try:
                        self._take(stream, part, lane, asked_at, now)
                    except Exception as error:  # a bug of ours must not end this lane, which other streams share
                        log.exception("read not taken", extra={"topic": stream.key.topic, "partition": place[1]})
                        self._end.stop_stream(stream, ReasonCode.INTERNAL_ERROR, repr(error), STOPPED_RETRY_S)
        if lane is Lane.IDLE:
            self._quiet = asked_at, asked

    def _note_quiet(self, stream: LeaderStream) -> None:
        """What the last read of idle streams says of one of which it returned nothing: that its log has not grown."""
        asked_at, asked = self._quiet
        wanted = asked.get(stream)
        if wanted is not None and wanted.offset == stream.next_offset and stream.at_end:
            stream.tombstone_window.saw_end(stream.source_end, asked_at, stream.acked)

    def _take(self, stream: LeaderStream, part: Fetched, lane: Lane, asked_at: float, now: float) -> None:
        if part.error_code:
            self._refused(stream, part)
            return
        self._note_quiet(stream)
        stream.saw_end(part.high_watermark, now)
        if stream.saw_stable(part.high_watermark, part.last_stable_offset):
            self._end.on_confirmed(stream)
        if stream.copy is None and stream.tombstone_window.late(now):
            hole = hole_end(part.records, stream.next_offset, stream.doubted)
            if hole is not None:
                self._end.doubt(stream, max(hole, part.last_stable_offset))  # the cleaner works below that
                return
        stream.tombstone_window.saw_end(part.high_watermark, asked_at, stream.acked)
        try:
            records, next_offset, broken = self._ways[lane](stream, part)
        except KeyringError as error:
            self._end.stop_stream(stream, ReasonCode.KEYRING_UNUSABLE, str(error), STOPPED_RETRY_S)
            return
        bounds = (part.log_start, stream.source_end)
        if records or stream.sent_bounds != bounds:
            stream.sent_bounds = bounds
            stream.connection.send(
                link.encode_append_head(stream.stream_id, stream.read_from, *bounds, stream.age_ms(now), len(records)),
                records,
            )
            stream.read_from = next_offset
        if records:
            stream.last_read = now
            stream.sent(next_offset, len(records))
        elif broken is not None:
            code, message = ReasonCode.UNSUPPORTED_MESSAGE_FORMAT, str(broken)
            self._end.block(stream, lambda: self._end.stop_stream(stream, code, message, STOPPED_RETRY_S))
            return
        elif lane is Lane.READ_COMMITTED and next_offset == stream.next_offset:
            stream.read_committed = False  # nothing that has ended is left
            self.resume()
        stream.at_end = next_offset >= part.high_watermark
        if stream.at_end and not stream.lag:
            self._end.caught_up(stream)
        if (records or not stream.at_end) and not stream.busy:
            stream.busy, stream.stirred = not self._busy_read, self._busy_read
            self.stir(stream)

    def _found(self, stream: LeaderStream, part: Fetched) -> tuple[bytes | memoryview, int, BatchError | None]:
        """What is to be sent of what was read, where it ends, and why it does not go further."""
        end, next_offset = 0, stream.next_offset
        try:
            for start, batch_end, header in walk(part.records):
                if not stream.is_told_of(header) and not self._end.knows_origins(stream, header):
                    return part.records[:start], next_offset, None
                # Where the log's start was moved into the middle of a batch, what is open begins in the middle, too.
                has_ended = header.next_offset <= part.last_stable_offset
                if stream.compacted and has_ended and header.is_transactional and not header.is_control:
                    stream.read_committed = True
                    self.stir(stream)
                    return part.records[:start], next_offset, None
                if header.is_transactional and not self._end.may_pass(
                    stream, header, part.records[start:batch_end], False
                ):
                    return part.records[:start], next_offset, None
                end, next_offset = batch_end, header.next_offset
        except BatchError as error:
            return part.records[:end], next_offset, error
        return part.records[:end], next_offset, None

    def _committed(self, stream: LeaderStream, part: Fetched) -> tuple[bytes | memoryview, int, BatchError | None]:
        """Records of transactions that have ended: the committed ones as plain, the aborted ones as they are."""
        found: list[Frame] = []
        next_offset = stream.next_offset
        broken: BatchError | None = None
        try:
            for batch, header, aborted in _with_outcomes(part):
                if not stream.is_told_of(header) and not self._end.knows_origins(stream, header):
                    break
                if header.is_transactional and not self._end.may_pass(stream, header, batch, not aborted):
                    break
                committed = header.is_transactional and not header.is_control and not aborted
                found.append(as_committed(batch) if committed else batch)
                next_offset = header.next_offset
        except BatchError as error:
            broken = error
        return b"".join(found), next_offset, broken

    def _offsets(self, stream: LeaderStream, part: Fetched) -> tuple[bytes | memoryview, int, BatchError | None]:
        """What leaves of the offsets topic. Raises KeyringError."""
        assert stream.copy is not None
        return self._end.offsets_source.batches(stream.copy, stream.next_offset, _with_outcomes(part))

    def _refused(self, stream: LeaderStream, part: Fetched) -> None:
        if part.error_code == OFFSET_OUT_OF_RANGE:
            self._end.block(stream, lambda: self._end.out_of_range(stream))
        else:
            code, message = reasons.SOURCE_UNAVAILABLE, f"the source's broker answered error {part.error_code}"
            if part.error_code in _GONE:
                code = ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED
                message = reasons.deleted(stream.key.topic, stream.remote_topic)
                self._end.on_gone(stream)
            known = part.error_code in _RESOLVE_AGAIN
            self._end.stop_stream(stream, code, message, REOPEN_DELAY_S if known else STOPPED_RETRY_S)


def _with_outcomes(part: Fetched) -> Iterator[tuple[Frame, BatchHeader, bool]]:
    """The batches of a read of what has ended: (batch, header, whether it is of an aborted transaction)."""
    aborted = AbortedTransactions(part.aborted)
    for start, end, header in walk(part.records):
        yield part.records[start:end], header, aborted.hold(header)
