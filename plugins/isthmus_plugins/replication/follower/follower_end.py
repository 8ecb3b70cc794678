"""The follower end of links: takes batches from leader ends and appends them to this cluster's topics.

A stream is one partition over one connection. The leader end opens it, is answered with where the follower's log
ends, and sends what comes after. Batches are appended by the ``writers`` of the partition's broker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from prometheus_client.core import CounterMetricFamily, Metric

from isthmus_control.commands import DoubtDeletions, PartitionOffset, TruncateProvenance
from isthmus_control.control_state import ControlState, changed_keys
from isthmus_control.lookup import Counterpart
from isthmus_control.model import FollowerTopic, NamespaceMapping, OnSourceDelete, ResourceType, Role, TopicState
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.comparison.last_batch import last_batch
from isthmus_plugins.replication.follower.log import FollowerLog, LogState, Numbering, Step, StopReason
from isthmus_plugins.replication.follower.origins import FollowerOrigins
from isthmus_plugins.replication.follower.position import LOST_REQUEST_MARGIN_S, read_position
from isthmus_plugins.replication.follower.prerequisites import Prerequisites
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.follower.topic_plans import another_source
from isthmus_plugins.replication.follower.writers import Writers
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected, Peer
from isthmus_plugins.replication.link.histories import Parted
from isthmus_plugins.replication.link.part import Part, not_joined
from isthmus_plugins.replication.traffic import Place, Traffic
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import link
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
QUEUED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of one stream. A leader end keeps far below (its limit, and one read more); one that does not is cut off."""
CHECK_INTERVAL_S: Final = 5.0
"""How often the ends of logs on which nothing happens are looked at: nobody else may write them."""
EPOCH_MAX: Final = 2**31 - 1


class FollowerEnd(Part):
    """All partitions that follow on the brokers that this proxy fronts."""

    def __init__(self, context: PluginContext, traffic: Traffic) -> None:
        self._context = context
        self._traffic = traffic
        self._clock = context.clock
        self._tasks = Tasks("follower-end", context.supervision)
        self._lost_ends = rare_lines(log, "log lost its end")
        self._doubted = rare_lines(log, "deletions doubted", logging.INFO)
        self._streams: dict[tuple[Peer, int], FollowerStream] = {}
        self._partitions: dict[TopicPartition, FollowerStream] = {}
        """The latest stream of each partition; one that has ended stays, for what it can show."""
        self._by_topic: dict[str, dict[int, FollowerStream]] = {}
        """The same by topic, then partition."""
        self._dropped: dict[TopicPartition, FollowerStream] = {}
        """Streams of what follows no more, of which a request may be under way, or of unknown fate."""
        self._opening: WeakValueDictionary[TopicPartition, asyncio.Lock] = WeakValueDictionary()
        self._leaving: list[tuple[str, NamespaceMapping]] = []
        """Links' namespaces that are just being detached."""
        self._writers: dict[int, Writers] = {}
        self._origins = FollowerOrigins(context, self._tasks)
        self._prerequisites = Prerequisites(
            context,
            self._tasks,
            self.proceed,
            self.report_appended,
            lambda topic, limits: self.on_limits_raised(topic, limits),
        )
        self._seen: tuple[Mapping[str, FollowerTopic], object] = ({}, None)
        """Follower topics and truncations, as of the control log's last change."""
        self._alone_from = context.clock.monotonic() + LOST_REQUEST_MARGIN_S
        """From then on no request of a process that was here before can land any more."""
        self._others_until = self._alone_from
        """When another proxy of this cluster may have sent something last that can still land; inf: there is one."""
        self._producers_remembered = False
        """Whether all brokers remember producers long enough for bursts, as far as is known."""
        self.on_stored: Callable[[TopicPartition, int], None] = not_joined
        """Called when a partition (topic and index) has more: where what its in-sync replicas have ends."""
        self.on_limits_raised: Callable[[str, Mapping[str, str]], None] = not_joined
        """Called before a topic gets larger limits of batches than its source has: with these."""
        self.awaits: Callable[[Peer, int], bool] = not_joined
        """Whether the decision of a producer's transaction came over a connection and is not durable yet."""
        self.batches_appended = 0
        self.bytes_appended = 0

    def start(self) -> None:
        self._tasks.keep("check", self._check_for_ever)
        self._tasks.keep("expiration", self._read_expiration_for_ever)

    async def stop(self) -> None:
        for writers in self._writers.values():  # first: what they append has streams begin tasks
            await writers.stop()
        await self._tasks.close()

    def answers(self) -> Sequence[Answering]:
        return (
            calls.OpenStream.by(self.open_stream),
            calls.CloseStream.by(self.close_stream),
            calls.DoubtDeletions.by(self.doubt_deletions),
            calls.StreamOrigins.by(self.stream_origins),
            calls.EndsSeen.by(self.ends_seen),
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

    def confirmed(self, topic: str, topic_id: str, partition: int) -> int:
        """The furthest that this process has confirmed of a partition of the topic with this id; 0: nothing."""
        stream = self._partitions.get((topic, partition))
        return stream.confirmed if stream is not None and stream.topic_id == topic_id else 0

    def lacks(self, topic: str, partition: int) -> bool:
        """Whether a log ends before what was confirmed of it: the target has lost its end, and gets it again."""
        stream = self._partitions.get((topic, partition))
        return stream is not None and stream.lacks

    def read_again(self, stream: FollowerStream) -> None:
        """Read where a log ends, of which it is not known whether it still ends there."""
        stream.follower_log.doubt_end()
        self.proceed(stream)

    # ---- the leader end's calls ----

    async def open_stream(self, connection: LinkConnection, question: calls.OpenStream) -> calls.OpenStreamAnswer:
        """Open a stream for one partition: says where its log ends, and what stands last in it.

        An older stream of the partition ends first; of two that are opened at once the later one lasts.
        """
        async with self._opening.setdefault((question.topic, question.partition), asyncio.Lock()):
            return await self._open(connection, question)

    async def _open(self, connection: LinkConnection, question: calls.OpenStream) -> calls.OpenStreamAnswer:
        topic, partition, source_topic_id = question.topic, question.partition, question.source_topic_id
        self._following(connection, topic, source_topic_id, partition)
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
        record, counterpart = self._following(connection, topic, source_topic_id, partition)
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
        writers = self._writers_of(leader)
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
            writers,
            self._clock,
        )
        place = Place(connection.link_name, Role.FOLLOWER, topic, partition)
        stream.count = partial(self._traffic.add, place)
        uncertain = any(before is not None and before.follower_log.uncertain for before in (dropped, old))
        await read_position(self._context, stream, uncertain or self._clock.monotonic() < self._alone_from)
        if epochs and epochs[-1].start_offset > follower_log.end:
            follower_log.epoch = await self._lost_epochs(stream)
        parted = None
        if question.origins is not None:
            parted = await self._origins.record(stream, source_topic_id, question.origins)
        if self._dropped.get((topic, partition)) is dropped:
            self._dropped.pop((topic, partition), None)
        if old is not None:
            follower_log.source_end = old.follower_log.source_end
            if old.reason is not None and reasons.waiting_state(old.reason.code) is not None:
                stream.held = old.reason
        topic_id = uuid.UUID(record.topic_id).bytes if record.topic_id else b""
        last = await last_batch(self._context, topic_id, partition, leader, follower_log.end)
        self._following(connection, topic, source_topic_id, partition)  # it may have been detached meanwhile
        if connection.lost:
            raise LinkRejected(reasons.LINK_LOST, "the connection went meanwhile")
        for before in (dropped, old):
            if before is not None and before.topic_id == stream.topic_id:
                stream.confirmed_before = max(stream.confirmed_before, before.confirmed)
        self._streams[connection, stream.stream_id] = stream
        self._partitions[topic, partition] = stream
        self._by_topic.setdefault(topic, {})[partition] = stream
        self.on_stored(stream.place, 0)  # where the data ends now, it does not know
        if parted is not None:
            await self._end(stream, _not_its_sources(stream, parted))
        return calls.OpenStreamAnswer(
            follower_log.start, end_offset=follower_log.end, last=last, epoch=follower_log.epoch
        )

    async def _lost_epochs(self, stream: FollowerStream) -> int:
        """The log has lost where the source's last leader epochs began, and what came after: forget that they did.

        The source may have lost that, too. The latest epoch that is left, -1 for none. Raises LinkRejected,
        BrokerUnavailable.
        """
        entry = PartitionOffset(stream.topic, stream.topic_id, stream.partition, stream.follower_log.end)
        outcome = await self._context.control.append(TruncateProvenance((entry,)))
        if isinstance(outcome, Rejected):
            raise LinkRejected(reasons.NOT_FOLLOWING, outcome.message)
        said = {"topic": entry.topic, "partition": entry.partition, "end": entry.offset}
        self._lost_ends.one(f"{entry.topic}-{entry.partition}", said)
        epochs = self._context.control.state.source_epochs(stream.topic, stream.partition)
        return epochs[-1].epoch if epochs else -1

    def _following(
        self, connection: LinkConnection, topic: str, source_topic_id: str | None, partition: int
    ) -> tuple[FollowerTopic, Counterpart]:
        """What a topic follows over the connection's link; ``source_topic_id``: which one that is to be.

        Raises LinkRejected, also where the operator decides.
        """
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
        if source_topic_id is not None and record.source_topic_id != source_topic_id:
            why = another_source(record, counterpart.mapping.on_source_delete is OnSourceDelete.DELETE)
            raise LinkRejected(why.code, str(why))
        if (held := state.held(topic, record.topic_id, partition)) is not None:
            raise LinkRejected(ReasonCode.SOURCE_LOST_RECORDS, held.describe())
        return record, counterpart

    async def _end(self, stream: FollowerStream, reason: StopReason) -> None:
        """End a stream; when this returns, none of its requests is under way."""
        self._streams.pop((stream.connection, stream.stream_id), None)
        stream.closed = True
        stream.follower_log.stop(reason)
        self._report_stopped(stream)
        await stream.writers.leave(stream)
        await self._prerequisites.leave(stream)

    async def close_stream(self, connection: LinkConnection, question: calls.CloseStream) -> calls.CloseStreamAnswer:
        """Close a stream: the leader moved, the namespace was detached, or the leader end cannot go on (``code``)."""
        stream = self._streams.get((connection, question.stream))
        if stream is None:
            return calls.CloseStreamAnswer()
        code, message = question.code or reasons.CLOSED, question.message or "the stream was closed"
        stream.reported_stopped = True
        if code == ReasonCode.TARGET_WRITTEN_BY_OTHERS:
            stream.follower_log.diverge(message)
            self._log_stopped(stream)
        await self._end(stream, StopReason(code, message))
        return calls.CloseStreamAnswer(stream.follower_log.end)

    async def stream_origins(self, connection: LinkConnection, question: calls.StreamOrigins) -> calls.Done:
        """Record where the records come from that the leader end sends next."""
        stream = self._streams.get((connection, question.stream))
        if stream is None or stream.follower_log.ended:
            raise LinkRejected(reasons.CLOSED, "the stream was closed")
        record, _ = self._following(connection, stream.topic, None, stream.partition)
        parted = await self._origins.record(stream, record.source_topic_id, question.origins)
        if parted is not None:
            await self._end(stream, _not_its_sources(stream, parted))
        return calls.Done()

    async def doubt_deletions(self, connection: LinkConnection, question: calls.DoubtDeletions) -> calls.Done:
        """Record that deletions before an offset may be missing, before the leader end sends what comes after them."""
        stream = self._streams.get((connection, question.stream))
        if stream is None or stream.follower_log.ended:
            raise LinkRejected(reasons.CLOSED, "the stream was closed")
        entry = PartitionOffset(stream.topic, stream.topic_id, stream.partition, question.offset)
        outcome = await self._context.control.append(DoubtDeletions((entry,)))
        if isinstance(outcome, Rejected):
            raise LinkRejected(reasons.NOT_FOLLOWING, outcome.message)
        said = {"topic": entry.topic, "partition": entry.partition, "until": entry.offset}
        self._doubted.one(f"{entry.topic}-{entry.partition}", said)
        return calls.Done()

    async def ends_seen(self, connection: LinkConnection, question: calls.EndsSeen) -> calls.Done:
        """Note how fresh is what the leader end has said of where its logs end."""
        seen_at = self._clock.monotonic() - question.age_ms / 1000
        unknown = set(question.unknown)
        for stream in self._partitions.values():
            if stream.connection is connection and stream.stream_id not in unknown:
                stream.end_seen_at = seen_at
        for said in question.ends:
            told = self._streams.get((connection, said.stream))
            if told is not None:
                told.note_source_end(said.end, said.age_ms)
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
        await read_position(self._context, stream, uncertain)
        self._streams[connection, partition] = stream
        return stream

    async def close_refill(self, stream: FollowerStream) -> None:
        """End it; when this returns, none of its requests is under way."""
        await self._end(stream, StopReason(reasons.CLOSED, "refilled, or given up"))

    @asynccontextmanager
    async def mapping_ended(self, link_name: str, mapping: NamespaceMapping) -> AsyncIterator[None]:
        """Inside nothing of the link is appended to a namespace any more, until its streams are opened again: it is
        about to be detached."""
        leaving = link_name, mapping
        self._leaving.append(leaving)
        try:
            await self._end_mapping(link_name, mapping)
            yield
        finally:
            self._leaving.remove(leaving)

    def is_leaving(self, link_name: str, topic: str) -> bool:
        """Whether a topic's namespace is just being detached."""
        return any(link == link_name and mapping.remote_name(topic) is not None for link, mapping in self._leaving)

    async def _end_mapping(self, link_name: str, mapping: NamespaceMapping) -> None:
        reason = StopReason(reasons.CLOSED, "the namespace was detached")
        for stream in list(self._partitions.values()):
            if stream.link_name == link_name and mapping.remote_name(stream.topic) is not None:
                await self._end(stream, reason)
                if self._partitions.get(stream.place) is stream:
                    self._forget(stream)
                    if stream.follower_log.uncertain:
                        self._dropped[stream.place] = stream

    def may_land(self, place: TopicPartition) -> bool:
        """Whether something that was sent to a partition's log, by whichever proxy, may still land there.

        What is under way at another proxy, or of unknown fate there, is not known here.
        """
        now = self._clock.monotonic()
        return now < self._alone_from or now < self._others_until or place in self._dropped or place in self._partitions

    def control_changed(self, state: ControlState) -> None:
        """End the streams of what does not follow any more: another proxy may have detached it."""
        processes = (*state.proxies.values(), *state.superseded.values())
        if any(each.incarnation != self._context.incarnation for each in processes):
            self._others_until = math.inf
        elif self._others_until == math.inf:
            self._others_until = self._clock.monotonic() + LOST_REQUEST_MARGIN_S
        before, self._seen = self._seen, (state.follower_topics, state.truncations)
        if before[1] is not state.truncations:
            looked_at = list(self._partitions.values())
        elif before[0] is not state.follower_topics:  # of thousands mostly one, again and again
            looked_at = [
                stream
                for topic in changed_keys(before[0], state.follower_topics)
                for stream in self._by_topic.get(topic, {}).values()
            ]
        else:
            return
        for stream in looked_at:
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
        self._forget(stream)
        self._dropped[stream.place] = stream
        self._tasks.start(f"end-{stream.topic}-{stream.partition}", self._end_dropped(stream, reason))

    def _forget(self, stream: FollowerStream) -> None:
        """It is no partition's latest one any more."""
        del self._partitions[stream.place]
        of_topic = self._by_topic[stream.topic]
        del of_topic[stream.partition]
        if not of_topic:
            del self._by_topic[stream.topic]

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
        """Find what somebody who bypasses the proxies wrote to a follower, before the source's next batch meets it; and
        what logs have lost that nobody pushes."""
        idle = {
            stream: stream.follower_log.end
            for stream in self._partitions.values()
            if stream.follower_log.ended
            or (stream.follower_log.state is LogState.WRITING and not stream.follower_log.queued)
        }
        if not idle:
            return
        ends = await self._context.cluster.log_ends([stream.place for stream in idle])
        for stream, end in idle.items():
            found = ends.get(stream.place)
            if found is None or stream.follower_log.end != end:
                continue
            if stream.follower_log.ended:
                stream.found_end = found
            elif found != end:
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
        stream.note_source_end(append.source_end, append.source_end_age_ms)
        try:
            follower_log.offer(memoryview(append.records), append.source_start)
        except BatchError as error:
            raise MalformedFrame(f"records of {stream.source_topic}-{stream.partition}: {error}") from error
        if stream.held is not None and follower_log.reason is None and not stream.lag:
            stream.held = None
        self.proceed(stream)

    def proceed(self, stream: FollowerStream) -> None:
        """Do what the stream's log asks for next."""
        next_step = stream.follower_log.next_step()
        stream.note_next(next_step)
        match next_step:
            case Step.WRITE:
                stream.writers.wake(stream)
            case Step.REPORT_END:
                self._report_stopped(stream)
            case Step.AWAIT_DECISION | Step.WAIT:
                pass
            case step:
                self._prerequisites.begin(stream, step)

    def decided(self, connection: LinkConnection) -> None:
        """Decisions that came over a connection are durable: markers that waited for them may be written."""
        for stream in self._streams.values():
            if stream.connection is connection and stream.follower_log.queued:
                self.proceed(stream)

    def report_appended(self, stream: FollowerStream) -> None:
        self.on_stored(stream.place, stream.follower_log.end)
        stream.connection.send(link.encode_appended(stream.stream_id, stream.follower_log.end))

    def _report_stopped(self, stream: FollowerStream) -> None:
        reason = stream.follower_log.reason
        if stream.reported_stopped or reason is None:
            return
        stream.reported_stopped = True
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


def _not_its_sources(stream: FollowerStream, parted: Parted) -> StopReason:
    """Why a stream ends whose log is another one than the source's, by what is recorded of both."""
    return StopReason(
        ReasonCode.UNEXPECTED_TRUNCATION,
        f"by what both clusters have recorded of who wrote which offsets first, the follower's log, which ends at "
        f"{stream.follower_log.end}, is not the source's from offset {parted.offset} on: the source has lost records, "
        "or has others there",
    )
