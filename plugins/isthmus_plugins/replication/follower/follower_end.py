"""The follower end of links: takes batches from leader ends and appends them to this cluster's topics.

A stream is one partition over one connection. It is opened by the leader end, which is told where the follower's log
ends and sends what comes after. Batches are appended by the ``writers`` of the partition's broker.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, Metric

from isthmus_control.commands import (
    CompactFollowerTopic,
    DoubtDeletions,
    PartitionEpoch,
    PartitionOffset,
    RecordSourceEpochs,
)
from isthmus_control.control_state import ControlState
from isthmus_control.lookup import Counterpart
from isthmus_control.model import (
    TRANSACTION_VERIFICATION,
    FollowerTopic,
    NamespaceMapping,
    ResourceType,
    TopicState,
)
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.comparison.last_batch import last_batch
from isthmus_plugins.replication.follower.log import (
    FollowerLog,
    LogState,
    Numbering,
    Step,
    StopReason,
)
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.follower.transaction_verification import ASK
from isthmus_plugins.replication.follower.writers import Writers
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected, Peer
from isthmus_plugins.replication.link.part import Part, not_joined
from isthmus_plugins.replication.logs.topic_settings import CLEANUP_POLICY, OVERRIDES, is_compacted
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import link
from isthmus_protocol.error_codes import NOT_ENOUGH_REPLICAS
from isthmus_protocol.link import MessageType
from isthmus_protocol.records import BatchError
from isthmus_protocol.wire import MalformedFrame

log = logging.getLogger("isthmus_plugins.replication")

PRODUCER_EXPIRATION: Final = "producer.id.expiration.ms"
"""How old a producer's latest record is when brokers forget the producer: a day by default."""
RECENT_S: Final = 3 * 3600.0
"""Batches with older records wait for each other's answers: those of a source whose clock is an hour behind do not.
Brokers must remember producers for twice as long at least, or all do."""
EXPIRATION_INTERVAL_S: Final = 60.0
LOST_REQUEST_MARGIN_S: Final = 2.0
"""After its connection broke, a request may still be taken up by the broker. From when the broker answers again, it is
not sent again before this time."""
SETTINGS_SPREAD_S: Final = 0.2
"""A broker hears of a topic's new settings a moment after they were made."""
RETRY_S: Final = 5.0
"""After a trim, or a question about transactions, that failed."""
COMMIT_WAIT_S: Final = 10.0
"""How long the in-sync replicas may take to have a log end that was found."""
COMMIT_POLL_S: Final = 0.05
QUEUED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of one stream. A leader end keeps far below (its limit, and one read more); one that does not is cut off."""
CHECK_INTERVAL_S: Final = 5.0
"""How often the ends of logs on which nothing happens are looked at: nobody else may write them."""
EPOCHS_AT_ONCE: Final = 1000
"""In one command of the control log, which must stay below a record's size."""
EPOCH_MAX: Final = 2**31 - 1


class FollowerEnd(Part):
    """All partitions that follow on the brokers that this proxy fronts."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._clock = context.clock
        self._tasks = Tasks("follower-end")
        self._streams: dict[tuple[Peer, int], FollowerStream] = {}
        self._partitions: dict[tuple[str, int], FollowerStream] = {}
        """The latest stream of each partition; one that has ended stays, for what it can tell."""
        self._dropped: dict[tuple[str, int], FollowerStream] = {}
        """Streams of what follows no more, of which a request may be under way, or of unknown fate."""
        self._opening: dict[tuple[str, int], asyncio.Lock] = {}
        self._writers: dict[int, Writers] = {}
        self._epochs_due: dict[FollowerStream, None] = {}
        self._epoch_task: asyncio.Task[None] | None = None
        self._seen: tuple[object, ...] = (None, None, None)
        self._alone_from = context.clock.monotonic() + LOST_REQUEST_MARGIN_S
        """From then on no request of a process that was here before can land any more."""
        self._producers_remembered = False
        """Whether all brokers remember producers long enough for bursts, as far as is known."""
        self.on_stored: Callable[[tuple[str, int], int], None] = not_joined
        """Called when a partition (topic and index) has more: where what its in-sync replicas have ends."""
        self.awaits: Callable[[Peer, int], bool] = not_joined
        """Whether the decision of a producer's transaction came over a connection and is not durable yet."""
        self.batches_appended = 0
        self.bytes_appended = 0

    def start(self) -> None:
        self._tasks.start("check", self._check_for_ever())
        self._tasks.start("expiration", self._read_expiration_for_ever())

    async def stop(self) -> None:
        await self._tasks.close()
        for writers in self._writers.values():
            await writers.stop()

    def answers(self) -> Sequence[Answering]:
        return (
            calls.OpenStream.by(self.open_stream),
            calls.CloseStream.by(self.close_stream),
            calls.DoubtDeletions.by(self.doubt_deletions),
        )

    def metrics(self) -> Iterable[Metric]:
        batches = CounterMetricFamily("isthmus_link_appended_batches", "Batches appended to follower topics")
        batches.add_metric((), self.batches_appended)
        size = CounterMetricFamily("isthmus_link_appended_bytes", "Bytes appended to follower topics")
        size.add_metric((), self.bytes_appended)
        return batches, size

    def streams(self) -> list[FollowerStream]:
        """The latest stream of each partition that was ever opened here."""
        return list(self._partitions.values())

    # ---- the leader end's calls ----

    async def open_stream(self, connection: LinkConnection, question: calls.OpenStream) -> calls.OpenStreamAnswer:
        """Open a stream for one partition: says where its log ends, and what stands last in it.

        An older stream of the partition ends first; of two that are opened at once the later one lasts.
        """
        async with self._opening.setdefault((question.topic, question.partition), asyncio.Lock()):
            return await self._open(connection, question)

    async def _open(self, connection: LinkConnection, question: calls.OpenStream) -> calls.OpenStreamAnswer:
        topic, partition, source_topic_id = question.topic, question.partition, question.source_topic_id
        self._following(connection, topic, source_topic_id)
        leader = await self._context.cluster.leader_of(topic, partition)
        if leader is None or not self._context.fronts(leader):
            raise LinkRejected(
                reasons.NOT_LEADER,
                f"{topic}-{partition} has no leader"
                if leader is None
                else f"{topic}-{partition} is led by broker {leader}, which another proxy fronts",
            )
        old, dropped = self._partitions.get((topic, partition)), self._dropped.get((topic, partition))
        for before in (dropped, old):
            if before is not None:
                await self._end(before, StopReason(reasons.CLOSED, "another stream of the partition was opened"))
        record, counterpart = self._following(connection, topic, source_topic_id)
        state = self._context.control.state
        follower_log = FollowerLog(
            Numbering(
                state.producer_id_ranges[counterpart.link.remote_cluster_id],
                state.producer_id_ranges[self._context.cluster_id],
                counterpart.link.number,
            ),
            compacted=counterpart.mapping.offsets is not None,
            awaits=lambda producer_id: self.awaits(connection, producer_id),
        )
        epochs = state.source_epochs(topic, partition)
        follower_log.epoch = epochs[-1].epoch if epochs else -1
        stream = FollowerStream(
            connection,
            question.stream,
            topic,
            record.topic_id or "",
            record.source_topic,
            partition,
            leader,
            follower_log,
            self._writers_of(leader),
            self._clock,
        )
        uncertain = any(before is not None and before.follower_log.uncertain for before in (dropped, old))
        await self._read_position(stream, uncertain or self._clock.monotonic() < self._alone_from)
        if self._dropped.get((topic, partition)) is dropped:
            self._dropped.pop((topic, partition), None)
        if old is not None:
            follower_log.source_end = old.follower_log.source_end
            if old.reason is not None and reasons.waiting_state(old.reason.code) is not None:
                stream.held = old.reason
        topic_id = uuid.UUID(record.topic_id).bytes if record.topic_id else b""
        last = await last_batch(self._context, topic_id, partition, leader, follower_log.end)
        self._following(connection, topic, source_topic_id)  # it may have been detached meanwhile
        if connection.lost:
            raise LinkRejected(reasons.LINK_LOST, "the connection went meanwhile")
        self._streams[connection, stream.stream_id] = stream
        self._partitions[topic, partition] = stream
        self.on_stored(stream.place, 0)  # where the data ends now, it does not know
        return calls.OpenStreamAnswer(
            follower_log.start, end_offset=follower_log.end, last=last, epoch=follower_log.epoch
        )

    def _following(
        self, connection: LinkConnection, topic: str, source_topic_id: str
    ) -> tuple[FollowerTopic, Counterpart]:
        """What a topic follows over the connection's link. Raises LinkRejected."""
        if self._clock.monotonic() > self._context.lease_deadline:
            raise LinkRejected(reasons.NO_LEASE, "this proxy has no lease now: another one may front its brokers")
        state = self._context.control.state
        record = state.follower_topics.get(topic)
        counterpart = state.lookup.following(ResourceType.TOPIC, topic)
        if record is None or record.state is not TopicState.FOLLOWING or record.link != connection.link_name:
            raise LinkRejected(reasons.NOT_FOLLOWING, f"{topic} does not follow over this link")
        if counterpart is None or counterpart.link.name != record.link:
            raise LinkRejected(reasons.NOT_FOLLOWING, f"{topic} is in no namespace that follows over this link")
        truncation = state.truncations.get(topic)
        if truncation is not None and not truncation.follows:
            raise LinkRejected(ReasonCode.TRUNCATING, truncation.describe())
        if record.source_topic_id != source_topic_id:
            raise LinkRejected(
                ReasonCode.SOURCE_TOPIC_ID_CHANGED,
                f"the source's {record.source_topic} was deleted and created again; {topic} has the old one's records",
            )
        return record, counterpart

    async def _read_position(self, stream: FollowerStream, uncertain: bool) -> None:
        """Read the log's limits and the states of its producers from the partition's leader.

        ``uncertain``: a request of ours may still be on its way into the log. The broker has it by the time that it
        answers anything, and a while later it has either appended or dropped it. Raises BrokerUnavailable.
        """
        cluster = self._context.cluster
        if uncertain:
            await cluster.log_end(stream.topic, stream.partition)
            await asyncio.sleep(LOST_REQUEST_MARGIN_S)
        log_end = await self._committed_end(stream)
        log_start = await cluster.log_start(stream.topic, stream.partition)
        stream.follower_log.resume(log_start, log_end, await cluster.producers(stream.topic, stream.partition))

    async def _committed_end(self, stream: FollowerStream) -> int:
        """The log end, once all before it is in the in-sync replicas: a new leader may have more than it can keep."""
        cluster = self._context.cluster
        deadline = self._clock.monotonic() + COMMIT_WAIT_S
        while True:
            log_end = await cluster.log_end(stream.topic, stream.partition)
            if await cluster.high_watermark(stream.topic, stream.partition) >= log_end:
                return log_end
            if self._clock.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"{stream.topic}-{stream.partition} ends at {log_end}, and its in-sync replicas do not get there"
                )
            await asyncio.sleep(COMMIT_POLL_S)

    async def _end(self, stream: FollowerStream, reason: StopReason) -> None:
        """End a stream; when this returns, none of its requests is under way."""
        self._streams.pop((stream.connection, stream.stream_id), None)
        stream.closed = True
        stream.follower_log.stop(reason)
        self._tell_stopped(stream)
        await stream.writers.leave(stream)
        if (changing := stream.under_way.get(Step.TAKE_KEYLESS)) is not None:
            # Else its settings might come after a promotion's.
            await asyncio.wait([changing])

    async def close_stream(self, connection: LinkConnection, question: calls.CloseStream) -> calls.CloseStreamAnswer:
        """Close a stream: the leader moved, the namespace was detached, or the leader end cannot go on (``code``)."""
        stream = self._streams.get((connection, question.stream))
        if stream is None:
            return calls.CloseStreamAnswer()
        code, message = question.code or reasons.CLOSED, question.message or "the stream was closed"
        stream.told_stopped = True
        if code == ReasonCode.TARGET_WRITTEN_BY_OTHERS:
            stream.follower_log.diverge(message)
            self._log_stopped(stream)
        await self._end(stream, StopReason(code, message))
        return calls.CloseStreamAnswer(stream.follower_log.end)

    async def doubt_deletions(self, connection: LinkConnection, question: calls.DoubtDeletions) -> calls.Done:
        """Record that deletions before an offset may be missing, before the leader end sends what comes after them."""
        stream = self._streams.get((connection, question.stream))
        if stream is None or stream.follower_log.ended:
            raise LinkRejected(reasons.CLOSED, "the stream was closed")
        entry = PartitionOffset(stream.topic, stream.topic_id, stream.partition, question.offset)
        outcome = await self._context.control.append(DoubtDeletions((entry,)))
        if isinstance(outcome, Rejected):
            raise LinkRejected(reasons.NOT_FOLLOWING, outcome.message)
        log.info("deletions doubted", extra={"topic": entry.topic, "partition": entry.partition, "until": entry.offset})
        return calls.Done()

    async def open_refill(
        self, connection: Peer, topic: str, topic_id: str, partition: int, uncertain: bool
    ) -> FollowerStream:
        """Open a stream whose source is this cluster: it puts back what a truncated topic held.

        Its epochs are this cluster's, and not recorded. Raises BrokerUnavailable.
        """
        leader = await self._context.cluster.leader_of(topic, partition)
        if leader is None:
            raise BrokerUnavailable(f"{topic}-{partition} has no leader")
        state = self._context.control.state
        own_index = state.producer_id_ranges[self._context.cluster_id]
        link_ = state.links.get(connection.link_name)
        follower_log = FollowerLog(Numbering(own_index, own_index, 0 if link_ is None else link_.number))
        follower_log.epoch = EPOCH_MAX
        writers = self._writers_of(leader)
        stream = FollowerStream(
            connection, partition, topic, topic_id, topic, partition, leader, follower_log, writers, self._clock
        )
        await self._read_position(stream, uncertain)
        self._streams[connection, partition] = stream
        return stream

    async def close_refill(self, stream: FollowerStream) -> None:
        """End it; when this returns, none of its requests is under way."""
        await self._end(stream, StopReason(reasons.CLOSED, "refilled, or given up"))

    async def end_mapping(self, link_name: str, mapping: NamespaceMapping) -> None:
        """End the streams of a namespace: nothing of the link is appended to it any more."""
        reason = StopReason(reasons.CLOSED, "the namespace was detached")
        for stream in list(self._partitions.values()):
            if stream.link_name == link_name and mapping.remote_name(stream.topic) is not None:
                await self._end(stream, reason)
                if self._partitions.get(stream.place) is stream:
                    del self._partitions[stream.place]
                    if stream.follower_log.uncertain:
                        self._dropped[stream.place] = stream

    def control_changed(self, state: ControlState) -> None:
        """End the streams of what does not follow any more: another proxy may have detached it."""
        seen = (state.follower_topics, state.lookup, state.truncations)
        if all(now is before for now, before in zip(seen, self._seen, strict=True)):
            return
        self._seen = seen
        for stream in list(self._partitions.values()):
            record = state.follower_topics.get(stream.topic)
            truncation = state.truncations.get(stream.topic)
            if truncation is not None and not truncation.follows:
                self._drop(stream, StopReason(ReasonCode.TRUNCATING, "the topic is being truncated"))
            elif (
                record is None
                or record.state is not TopicState.FOLLOWING
                or record.link != stream.link_name
                or record.topic_id != stream.topic_id
            ):
                self._drop(stream, StopReason(reasons.CLOSED, "the topic does not follow any more"))

    def _drop(self, stream: FollowerStream, reason: StopReason) -> None:
        """End a stream of what does not follow any more, now; one that is opened again waits for its last request."""
        stream.follower_log.stop(reason)
        del self._partitions[stream.place]
        self._dropped[stream.place] = stream
        self._tasks.start(f"end-{stream.topic}-{stream.partition}", self._end_dropped(stream, reason))

    async def _end_dropped(self, stream: FollowerStream, reason: StopReason) -> None:
        await self._end(stream, reason)
        if not stream.follower_log.uncertain and self._dropped.get(stream.place) is stream:
            del self._dropped[stream.place]

    def connection_lost(self, connection: LinkConnection) -> None:
        """The leader end is gone: its streams take nothing more. What is under way is still awaited."""
        for key, stream in list(self._streams.items()):
            if key[0] is connection:
                del self._streams[key]
                stream.closed = True
                stream.follower_log.stop(StopReason(reasons.DISCONNECTED, "the peer is not connected"))

    # ---- how long brokers remember producers ----

    @property
    def recent(self) -> int | None:
        """What is recent enough for bursts, in ms since the epoch; None: nothing is."""
        return int((self._clock.time() - RECENT_S) * 1000) if self._producers_remembered else None

    async def _read_expiration_for_ever(self) -> None:
        while True:
            try:
                found = await self._context.cluster.broker_configs(PRODUCER_EXPIRATION)
                kept = [int(value) / 1000 for value in found.values() if value is not None]
                self._producers_remembered = len(kept) == len(found) > 0 and min(kept) >= 2 * RECENT_S
            except (BrokerUnavailable, KafkaRefused, ValueError):
                self._producers_remembered = False  # then one batch waits for the other
            await asyncio.sleep(EXPIRATION_INTERVAL_S if self._producers_remembered else CHECK_INTERVAL_S)

    # ---- nobody else writes ----

    async def _check_for_ever(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self._check_ends()
            except (BrokerUnavailable, KafkaRefused) as error:
                log.warning("follower log ends not checked", extra={"detail": str(error)})

    async def _check_ends(self) -> None:
        """Find what somebody who bypasses the proxies wrote to a follower, before the source's next batch meets it."""
        idle = {
            stream: stream.follower_log.end
            for stream in self._streams.values()
            if stream.follower_log.state is LogState.WRITING and not stream.follower_log.queued
        }
        if not idle:
            return
        ends = await self._context.cluster.log_ends([stream.place for stream in idle])
        for stream, end in idle.items():
            found = ends.get(stream.place)
            if found is not None and found != end and stream.follower_log.end == end:
                stream.follower_log.checked(found)
                self.proceed(stream)

    # ---- records ----

    def on_append(self, connection: Peer, append: link.Append) -> None:
        """Take batches of a stream. What comes for a stream that has ended is dropped: its leader end knows."""
        stream = self._streams.get((connection, append.stream))
        if stream is None or stream.follower_log.ended:
            return
        follower_log = stream.follower_log
        if follower_log.queued_bytes > QUEUED_BYTES_MAX:
            raise MalformedFrame(f"{stream.source_topic}-{stream.partition}: more is sent than was confirmed for")
        if append.from_offset > follower_log.accepted_end:
            raise MalformedFrame(
                f"{stream.source_topic}-{stream.partition}: what goes on at {append.from_offset} follows "
                f"{follower_log.accepted_end}"
            )
        follower_log.source_end = append.source_end
        stream.told_end = True
        stream.end_age_ms, stream.end_age_noted = append.source_end_age_ms, self._clock.monotonic()
        try:
            follower_log.offer(memoryview(append.records), append.source_start)
        except BatchError as error:
            raise MalformedFrame(f"records of {stream.source_topic}-{stream.partition}: {error}") from error
        if stream.held is not None and follower_log.reason is None and not stream.lag:
            stream.held = None
        self.proceed(stream)

    def proceed(self, stream: FollowerStream) -> None:
        """Do what the stream's log asks for next, unless that is under way."""
        match stream.follower_log.next_step():
            case Step.WRITE:
                stream.writers.wake(stream)
            case Step.REPORT_END:
                self._tell_stopped(stream)
            case Step.RECORD_EPOCH:
                self._epochs_due[stream] = None
                if self._epoch_task is None or self._epoch_task.done():
                    self._epoch_task = self._tasks.start("epochs", self._record_epochs())
            case Step.RESUME:
                self._start_once(stream, Step.RESUME, self._resume)
            case Step.TAKE_KEYLESS:
                self._start_once(stream, Step.TAKE_KEYLESS, self._uncompact)
            case Step.TRIM:
                self._start_once(stream, Step.TRIM, self._trim)
            case Step.ASK_ENDED:
                self._start_once(stream, Step.ASK_ENDED, self._ask_ended)
            case Step.AWAIT_DECISION | Step.WAIT:
                pass

    def decided(self, connection: LinkConnection) -> None:
        """Decisions that came over a connection are durable: markers that waited for them may be written."""
        for stream in self._streams.values():
            if stream.connection is connection and stream.follower_log.queued:
                self.proceed(stream)

    def _start_once(
        self, stream: FollowerStream, step: Step, work: Callable[[FollowerStream], Coroutine[Any, Any, None]]
    ) -> None:
        """Have ``work`` done for a stream, unless that is under way, and go on with the stream after."""
        if step in stream.under_way:
            return

        async def once() -> None:
            try:
                await work(stream)
            finally:
                del stream.under_way[step]
            self.proceed(stream)

        name = f"{step.value}-{stream.topic}-{stream.partition}"
        stream.under_way[step] = self._tasks.start(name, once())

    async def _record_epochs(self) -> None:
        """Store leader epochs of the source before their first append: the target's log has only its own.

        Whatever is due at the same time goes into one command, and if that is refused each into its own.
        """
        while self._epochs_due:
            due = [
                (stream, epoch) for stream in self._epochs_due if (epoch := stream.follower_log.due_epoch) is not None
            ]
            self._epochs_due.clear()
            try:
                for start in range(0, len(due), EPOCHS_AT_ONCE):
                    some = due[start : start + EPOCHS_AT_ONCE]
                    if await self._append_epochs(some) is not None:
                        for one in some:
                            await self._append_epochs([one], final=True)
            except BrokerUnavailable as error:
                log.warning("source epochs not recorded", extra={"detail": str(error)})
                await asyncio.sleep(LOST_REQUEST_MARGIN_S)
                self._epochs_due |= {stream: None for stream, _ in due if not stream.follower_log.ended}

    async def _append_epochs(
        self, due: Sequence[tuple[FollowerStream, tuple[int, int]]], final: bool = False
    ) -> Rejected | None:
        """Record epochs in one command, and go on with their streams. ``final``: stop those that are refused."""
        entries = tuple(
            PartitionEpoch(stream.topic, stream.topic_id, stream.partition, epoch, start)
            for stream, (epoch, start) in due
            if stream.follower_log.epoch < epoch
        )
        outcome = await self._context.control.append(RecordSourceEpochs(entries)) if entries else None
        if isinstance(outcome, Rejected) and not final:
            return outcome
        for stream, (epoch, _) in due:
            if isinstance(outcome, Rejected):
                stream.follower_log.stop(StopReason(ReasonCode.INTERNAL_ERROR, outcome.message))
            else:
                stream.follower_log.epoch = max(stream.follower_log.epoch, epoch)
            self.proceed(stream)
        return None

    async def _ask_ended(self, stream: FollowerStream) -> None:
        """Ask the leader end which transactions have ended without a marker, before a gap is filled."""
        follower_log = stream.follower_log
        while (began := follower_log.doubtful) and not stream.connection.lost:
            try:
                answer = await stream.connection.call(
                    calls.EndedTransactions(
                        stream.stream_id, tuple(calls.Began(*each) for each in began.items()), follower_log.end
                    )
                )
                follower_log.settle(began, answer.ended)
            except Exception as error:  # also what a peer answers that it should not: nothing goes on before
                log.warning(
                    "ended transactions not known",
                    extra={"topic": stream.topic, "partition": stream.partition, "detail": str(error)},
                )
                await asyncio.sleep(RETRY_S)

    async def _trim(self, stream: FollowerStream) -> None:
        """Delete what the source has expired: a follower has no retention of its own."""
        follower_log = stream.follower_log
        while (before := follower_log.trim_to) is not None:
            try:
                log_start = await self._context.cluster.delete_records(stream.topic, stream.partition, before)
                follower_log.trimmed(log_start)
                stream.trouble = None
            except (BrokerUnavailable, KafkaRefused) as error:
                stream.trouble = StopReason(reasons.BROKER_UNAVAILABLE, f"not trimmed to {before}: {error}")
                log.warning(
                    "follower not trimmed",
                    extra={"topic": stream.topic, "partition": stream.partition, "detail": str(error)},
                )
                await asyncio.sleep(RETRY_S)

    async def _uncompact(self, stream: FollowerStream) -> None:
        """Have a topic take records without a key, which its source has from before it was compacted.

        That it is not compacted is recorded first: it will be again when it has all that the source had since then.
        """
        cluster, control = self._context.cluster, self._context.control
        while stream.follower_log.next_step() is Step.TAKE_KEYLESS:
            try:
                record = control.state.follower_topics.get(stream.topic)
                if record is None or record.state is not TopicState.FOLLOWING or record.topic_id != stream.topic_id:
                    stream.follower_log.stop(StopReason(reasons.CLOSED, "the topic does not follow any more"))
                    return
                if record.compacts:
                    body = CompactFollowerTopic(stream.topic, stream.topic_id, False, record.compacts_since_offset)
                    await control.append(body)
                    log.info("follower topic compaction", extra={"topic": stream.topic, "compacts": False})
                    continue
                policy = (await cluster.topic_configs(stream.topic))[CLEANUP_POLICY][0]
                if is_compacted({CLEANUP_POLICY: policy}):
                    await cluster.alter_topic_configs(stream.topic, {CLEANUP_POLICY: OVERRIDES[CLEANUP_POLICY]})
                await asyncio.sleep(SETTINGS_SPREAD_S)
                stream.follower_log.takes_keyless()
            except (BrokerUnavailable, KafkaRefused) as error:
                why = str(error)
                if isinstance(error, KafkaRefused):
                    why = reasons.refused(error, "AlterConfigs", f"topic {stream.topic}")
                stream.trouble = StopReason(
                    ReasonCode.TARGET_REFUSES_SETTINGS,
                    f"offset {stream.follower_log.end} has no key, which a compacted topic does not take, and "
                    f"{CLEANUP_POLICY}={OVERRIDES[CLEANUP_POLICY]} cannot be set: {why}",
                )
                await asyncio.sleep(RETRY_S)

    async def _resume(self, stream: FollowerStream) -> None:
        """The fate of a request is unknown: wait until it can no longer land, read the log end, go on from there."""
        follower_log = stream.follower_log
        try:
            while follower_log.state is LogState.RESUMING and not stream.connection.lost:
                try:
                    leader = await self._context.cluster.leader_of(stream.topic, stream.partition)
                    if leader != stream.broker_id:
                        where = "has no leader now" if leader is None else f"is led by broker {leader} now"
                        follower_log.stop(StopReason(reasons.MOVED, f"the partition {where}"))
                        break
                    if stream.unverified is not None and (objection := await self._objection(stream)) is not None:
                        follower_log.stop(objection)
                        break
                    await self._read_position(stream, follower_log.uncertain or stream.trouble is not None)
                    if not follower_log.queued:
                        stream.trouble = None
                except BrokerUnavailable as error:
                    stream.trouble = StopReason(reasons.BROKER_UNAVAILABLE, str(error))
                    log.warning(
                        "follower position not read",
                        extra={"topic": stream.topic, "partition": stream.partition, "detail": str(error)},
                    )
                    await asyncio.sleep(LOST_REQUEST_MARGIN_S)
        except KafkaRefused as error:
            follower_log.stop(StopReason(ReasonCode.TARGET_REFUSES_RECORDS, f"its position cannot be read: {error}"))
        if not follower_log.ended:
            self.tell_appended(stream)

    async def _objection(self, stream: FollowerStream) -> StopReason | None:
        """Why the target refuses transactional batches again and again, None if that passes. Raises BrokerUnavailable.

        NOT_ENOUGH_REPLICAS is what brokers say that cannot verify a transaction, and those that lack replicas.
        """
        assert stream.unverified is not None
        end = stream.follower_log.end
        try:
            verifies = (await self._context.cluster.broker_configs(TRANSACTION_VERIFICATION)).get(stream.broker_id)
        except KafkaRefused as error:
            return StopReason(
                ReasonCode.TARGET_REFUSES_RECORDS,
                f"offset {end} is part of a transaction; the target refuses it, and {TRANSACTION_VERIFICATION} cannot "
                f"be read: {error}",
            )
        if verifies == "true":
            return StopReason(
                ReasonCode.TRANSACTION_VERIFICATION_ENABLED,
                f"offset {end} is part of a transaction, and the target's brokers verify transactions: {ASK}",
            )
        code, stream.unverified, stream.refusals = stream.unverified, None, 0
        if code == NOT_ENOUGH_REPLICAS or stream.trouble is None:
            return None
        return stream.trouble

    def tell_appended(self, stream: FollowerStream) -> None:
        self.on_stored(stream.place, stream.follower_log.end)
        stream.connection.send(link.encode_appended(stream.stream_id, stream.follower_log.end))

    def _tell_stopped(self, stream: FollowerStream) -> None:
        reason = stream.follower_log.reason
        if stream.told_stopped or reason is None:
            return
        stream.told_stopped = True
        self._log_stopped(stream)
        stream.connection.send(
            link.encode_json(
                MessageType.STOPPED,
                {
                    "stream": stream.stream_id,
                    "end_offset": stream.follower_log.end,
                    "code": reason.code,
                    "message": reason.message,
                },
            )
        )

    def _log_stopped(self, stream: FollowerStream) -> None:
        reason = stream.follower_log.reason
        assert reason is not None
        if stream.held is not None and stream.held.code == reason.code:
            return  # tried again, with the same result
        log.log(
            logging.ERROR if stream.follower_log.state is LogState.DIVERGED else logging.INFO,
            "follower partition stopped",
            extra={
                "topic": stream.topic,
                "partition": stream.partition,
                "offset": stream.follower_log.end,
                "code": str(reason.code),
                "detail": reason.message,
            },
        )

    def _writers_of(self, broker_id: int) -> Writers:
        writers = self._writers.get(broker_id)
        if writers is None:
            writers = self._writers[broker_id] = Writers(self, self._context, broker_id)
        return writers
