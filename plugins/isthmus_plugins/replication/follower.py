"""The follower end of links: takes batches from leader ends and appends them to this cluster's topics.

A stream is one partition over one connection. It is opened by the leader end, which is told where the follower's log
ends and sends what comes after. Batches are appended by writers, several connections to each broker that this proxy
fronts: a writer sends one request at a time, with the next batch of every stream of its that has one; or a few in a
row, where a stream has small batches that no fate of those before them can shift (``FollowerLog.take_more``).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
import zlib
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic, time
from typing import Any, Final, TypeAlias

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
from isthmus_plugins.api import (
    BrokerUnavailable,
    KafkaRefused,
    PluginContext,
    ProduceConnection,
    ProduceResult,
    TransactionMarkers,
)
from isthmus_plugins.replication import reasons
from isthmus_plugins.replication.connection import LinkConnection, LinkRejected
from isthmus_plugins.replication.follower_configs import CLEANUP_POLICY, OVERRIDES, is_compacted
from isthmus_plugins.replication.follower_log import (
    Append,
    FollowerLog,
    LogState,
    Mark,
    Numbering,
    Operation,
    StopReason,
)
from isthmus_plugins.replication.log_ends import last_batch
from isthmus_plugins.replication.transaction_verification import ASK
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import link
from isthmus_protocol.link import MessageType
from isthmus_protocol.offsets_copy import COPY_PREFIX
from isthmus_protocol.producer_ids import ProducerIdOverflow
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import BatchError
from isthmus_protocol.wire import MalformedFrame

log = logging.getLogger("isthmus_plugins.replication")

WRITERS_PER_BROKER: Final = 2
"""A broker reads a connection's next request only when it has answered the last: several connections overlap."""
REQUEST_BYTES_MAX: Final = 8 * 1024 * 1024
PRODUCER_EXPIRATION: Final = "producer.id.expiration.ms"
"""How old a producer's latest record is when brokers forget the producer: a day by default."""
RECENT_S: Final = 3600.0
"""Batches with older records wait for each other's answers. Brokers must remember producers for twice as long at least,
or all do."""
EXPIRATION_INTERVAL_S: Final = 60.0
PRODUCE_TIMEOUT_MS: Final = 30_000
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
REFUSALS_MAX: Final = 5
"""A broker that answers a batch so often with an error that may pass, with nothing stored, does not want it."""

UNVERIFIED_MAX: Final = 3
"""How often a transactional batch is refused before the target is asked whether it verifies transactions (KIP-890): the
error that says so may pass, too."""
TRANSACTIONAL_ID_PREFIX: Final = "isthmus-"
"""Brokers want a transactional id with transactional batches, and ask for WRITE on it; they do nothing else with it."""

MESSAGE_TOO_LARGE: Final = 10
NOT_ENOUGH_REPLICAS: Final = 19
INVALID_RECORD: Final = 87
OUT_OF_ORDER_SEQUENCE: Final = 45
TRANSACTION_COORDINATOR_FENCED: Final = 52
_UNVERIFIED: Final = frozenset({NOT_ENOUGH_REPLICAS, 48, 49})
"""NOT_ENOUGH_REPLICAS, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING: what the verification of KIP-890 answers."""
_NOT_STORED: Final = frozenset(
    {
        NOT_ENOUGH_REPLICAS,  # refused before the append
        5,  # LEADER_NOT_AVAILABLE
        89,  # THROTTLING_QUOTA_EXCEEDED
    }
)
_MOVED: Final = frozenset({3, 6, 100})
"""UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_ID: the leader end looks for the leader again."""
_FATE_UNKNOWN: Final = frozenset({7, 13, 20, 56, -1})
"""Timed out, connection trouble, too few replicas after the append, storage error."""
_DOUBTFUL: Final = frozenset({45, 46, 59})
"""Sequence trouble: passes if a request of ours landed that we took for lost, else it is an objection."""


class FollowerStream:
    """One partition that follows over one connection."""

    __slots__ = (
        "broker_id",
        "closed",
        "connection",
        "end_age_ms",
        "end_age_noted",
        "follower_log",
        "held",
        "keyless",
        "link_name",
        "partition",
        "refusals",
        "source_topic",
        "stream_id",
        "told_end",
        "told_stopped",
        "topic",
        "topic_id",
        "trouble",
        "unverified",
        "waits_for",
        "writer",
    )

    def __init__(
        self,
        connection: LinkConnection,
        stream_id: int,
        topic: str,
        topic_id: str,
        source_topic: str,
        partition: int,
        broker_id: int,
        follower_log: FollowerLog,
        writer: Writer,
    ) -> None:
        self.connection = connection
        self.link_name = connection.link_name
        self.stream_id = stream_id
        self.topic = topic
        self.topic_id = topic_id
        self.source_topic = source_topic
        self.partition = partition
        self.broker_id = broker_id
        self.follower_log = follower_log
        self.writer = writer
        self.closed = False
        """The leader end pushes it no more."""
        self.held: StopReason | None = None
        """Why the partition's stream before this one stopped, until this one has come further."""
        self.trouble: StopReason | None = None
        """What keeps it from appending right now, if it is expected to pass."""
        self.refusals = 0
        self.unverified: int | None = None
        """The error that may say that the target verifies transactions, until it was asked whether it does."""
        self.keyless = False
        """The next record has no key, and the topic is compacted: it cannot be, for now."""
        self.waits_for: dict[str, asyncio.Task[None]] = {}
        """What is under way before the next record can be written: see ``FollowerEnd.proceed``."""
        self.told_end = False
        """Whether the leader end has said where the source's log ends."""
        self.told_stopped = False
        self.end_age_ms = 0
        self.end_age_noted = monotonic()

    @property
    def place(self) -> tuple[str, int]:
        return self.topic, self.partition

    @property
    def is_copy(self) -> bool:
        """Whether it is of a copy of an offsets topic."""
        return self.topic.startswith(COPY_PREFIX)

    @property
    def lag(self) -> int:
        """Offsets that are not here, as far as the source has told."""
        return max(0, self.follower_log.source_end - self.follower_log.end)

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest record of the source that is not here, as far as the source has told."""
        return self.end_age_ms / 1000 + monotonic() - self.end_age_noted if self.lag else 0.0

    @property
    def reason(self) -> StopReason | None:
        """Why it does not go on, or has not come further than the stream before it."""
        return self.follower_log.reason or self.held or self.trouble


class FollowerEnd:
    """All partitions that follow on the brokers that this proxy fronts."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._tasks = Tasks("follower-end")
        self._streams: dict[tuple[LinkConnection, int], FollowerStream] = {}
        self._partitions: dict[tuple[str, int], FollowerStream] = {}
        """The latest stream of each partition; one that has ended stays, for what it can tell."""
        self._dropped: dict[tuple[str, int], FollowerStream] = {}
        """Streams of what follows no more, of which a request may be under way, or of unknown fate."""
        self._opening: dict[tuple[str, int], asyncio.Lock] = {}
        self._writers: dict[tuple[int, int], Writer] = {}
        self._epochs_due: dict[FollowerStream, None] = {}
        self._epoch_task: asyncio.Task[None] | None = None
        self._seen: tuple[object, ...] = (None, None, None)
        self._alone_from = monotonic() + LOST_REQUEST_MARGIN_S
        """From then on no request of a process that was here before can land any more."""
        self._producers_remembered = False
        """Whether all brokers remember producers long enough for bursts, as far as is known."""
        self.batches_appended = 0
        self.bytes_appended = 0

    def start(self) -> None:
        self._tasks.start("check", self._check_for_ever())
        self._tasks.start("expiration", self._read_expiration_for_ever())

    async def stop(self) -> None:
        await self._tasks.close()
        for writer in self._writers.values():
            await writer.stop()

    def streams(self) -> list[FollowerStream]:
        """The latest stream of each partition that was ever opened here."""
        return list(self._partitions.values())

    # ---- the leader end's calls ----

    async def open_stream(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """Open a stream for one partition: says where its log ends, and what stands last in it.

        An older stream of the partition ends first; of two that are opened at once the later one lasts.
        """
        place = str(params["topic"]), int(params["partition"])
        async with self._opening.setdefault(place, asyncio.Lock()):
            return await self._open(connection, params, *place)

    async def _open(
        self, connection: LinkConnection, params: dict[str, Any], topic: str, partition: int
    ) -> dict[str, Any]:
        self._following(connection, topic, params)
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
        record, counterpart = self._following(connection, topic, params)
        state = self._context.control.state
        follower_log = FollowerLog(
            Numbering(
                state.producer_id_ranges[counterpart.link.remote_cluster_id],
                state.producer_id_ranges[self._context.cluster_id],
                counterpart.link.number,
            ),
            compacted=counterpart.mapping.offsets is not None,
        )
        epochs = state.source_epochs(topic, partition)
        follower_log.epoch = epochs[-1].epoch if epochs else -1
        stream = FollowerStream(
            connection,
            int(params["stream"]),
            topic,
            record.topic_id or "",
            record.source_topic,
            partition,
            leader,
            follower_log,
            self._writer(leader, topic, partition),
        )
        uncertain = any(before is not None and before.follower_log.uncertain for before in (dropped, old))
        await self._read_position(stream, uncertain or monotonic() < self._alone_from)
        if self._dropped.get((topic, partition)) is dropped:
            self._dropped.pop((topic, partition), None)
        if old is not None:
            follower_log.source_end = old.follower_log.source_end
            if old.reason is not None and reasons.waiting_state(old.reason.code) is not None:
                stream.held = old.reason
        topic_id = uuid.UUID(record.topic_id).bytes if record.topic_id else b""
        last = await last_batch(self._context, topic_id, partition, leader, follower_log.end)
        self._following(connection, topic, params)  # it may have been detached meanwhile
        if connection.lost:
            raise LinkRejected(reasons.LINK_LOST, "the connection went meanwhile")
        self._streams[connection, stream.stream_id] = stream
        self._partitions[topic, partition] = stream
        return {
            "start_offset": follower_log.start,
            "end_offset": follower_log.end,
            "last": None if last is None else list(last),
            "epoch": follower_log.epoch,
        }

    def _following(
        self, connection: LinkConnection, topic: str, params: dict[str, Any]
    ) -> tuple[FollowerTopic, Counterpart]:
        """What a topic follows over the connection's link. Raises LinkRejected."""
        if monotonic() > self._context.lease_deadline:
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
        if record.source_topic_id != params["source_topic_id"]:
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
        deadline = monotonic() + COMMIT_WAIT_S
        while True:
            log_end = await cluster.log_end(stream.topic, stream.partition)
            if await cluster.high_watermark(stream.topic, stream.partition) >= log_end:
                return log_end
            if monotonic() > deadline:
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
        await stream.writer.leave(stream)
        if (changing := stream.waits_for.get("uncompact")) is not None:  # or it might come after a promotion's settings
            await asyncio.wait([changing])

    async def close_stream(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """Close a stream: the leader moved, the namespace was detached, or the leader end cannot go on (``code``)."""
        stream = self._streams.get((connection, int(params["stream"])))
        if stream is None:
            return {}
        code, message = str(params.get("code") or reasons.CLOSED), str(params.get("message") or "the stream was closed")
        stream.told_stopped = True
        if code == ReasonCode.TARGET_WRITTEN_BY_OTHERS:
            stream.follower_log.diverge(message)
            self._log_stopped(stream)
        await self._end(stream, StopReason(code, message))
        return {"end_offset": stream.follower_log.end}

    async def doubt_deletions(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """Record that deletions before an offset may be missing, before the leader end sends what comes after them."""
        stream = self._streams.get((connection, int(params["stream"])))
        if stream is None or stream.follower_log.ended:
            raise LinkRejected(reasons.CLOSED, "the stream was closed")
        entry = PartitionOffset(stream.topic, stream.topic_id, stream.partition, int(params["offset"]))
        outcome = await self._context.control.append(DoubtDeletions((entry,)))
        if isinstance(outcome, Rejected):
            raise LinkRejected(reasons.NOT_FOLLOWING, outcome.message)
        log.info("deletions doubted", extra={"topic": entry.topic, "partition": entry.partition, "until": entry.offset})
        return {}

    async def open_refill(
        self, connection: LinkConnection, topic: str, topic_id: str, partition: int, uncertain: bool
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
        writer = self._writer(leader, topic, partition)
        stream = FollowerStream(connection, partition, topic, topic_id, topic, partition, leader, follower_log, writer)
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
        return int((time() - RECENT_S) * 1000) if self._producers_remembered else None

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

    def on_append(self, connection: LinkConnection, append: link.Append) -> None:
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
        stream.end_age_ms, stream.end_age_noted = append.source_end_age_ms, monotonic()
        try:
            follower_log.offer(memoryview(append.records), append.source_start)
        except BatchError as error:
            raise MalformedFrame(f"records of {stream.source_topic}-{stream.partition}: {error}") from error
        if stream.held is not None and follower_log.reason is None and not stream.lag:
            stream.held = None
        self.proceed(stream)

    def proceed(self, stream: FollowerStream) -> None:
        """Do what the log's state asks for: write, trim, record an epoch, read the position again, tell of its end."""
        follower_log = stream.follower_log
        if follower_log.ended:
            self._tell_stopped(stream)
        elif follower_log.next_epoch() is not None:
            self._epochs_due[stream] = None
            if self._epoch_task is None or self._epoch_task.done():
                self._epoch_task = self._tasks.start("epochs", self._record_epochs())
        elif follower_log.state is LogState.RESUMING:
            self._start_once(stream, "resume", self._resume)
        elif stream.keyless:
            self._start_once(stream, "uncompact", self._uncompact)
        elif follower_log.trim_to is not None:
            self._start_once(stream, "trim", self._trim)
        elif follower_log.doubtful:
            self._start_once(stream, "ask", self._ask_ended)
        elif follower_log.queued:
            stream.writer.wake(stream)

    def _start_once(
        self, stream: FollowerStream, what: str, work: Callable[[FollowerStream], Coroutine[Any, Any, None]]
    ) -> None:
        """Have ``work`` done for a stream, unless that is under way, and go on with the stream after."""
        if what in stream.waits_for:
            return

        async def once() -> None:
            try:
                await work(stream)
            finally:
                del stream.waits_for[what]
            self.proceed(stream)

        stream.waits_for[what] = self._tasks.start(f"{what}-{stream.topic}-{stream.partition}", once())

    async def _record_epochs(self) -> None:
        """Store leader epochs of the source before their first append: the target's log has only its own.

        Whatever is due at the same time goes into one command, and if that is refused each into its own.
        """
        while self._epochs_due:
            due = [
                (stream, epoch)
                for stream in self._epochs_due
                if (epoch := stream.follower_log.next_epoch()) is not None
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
                    "ended_transactions",
                    {"stream": stream.stream_id, "began": list(began.items()), "before": follower_log.end},
                )
                follower_log.settle(began, [int(producer_id) for producer_id in answer["ended"]])
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
        while stream.keyless and not stream.follower_log.ended:
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
                stream.keyless = False
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

    # ---- writers ----

    def _writer(self, broker_id: int, topic: str, partition: int) -> Writer:
        slot = (zlib.crc32(topic.encode()) + partition) % WRITERS_PER_BROKER
        writer = self._writers.get((broker_id, slot))
        if writer is None:
            writer = self._writers[broker_id, slot] = Writer(self, self._context, broker_id, slot)
        return writer


Writes: TypeAlias = dict[tuple[str, int], tuple[FollowerStream, list[Append] | Mark]]
"""What is written to each partition."""


class Writer:
    """One connection to a broker, over which the batches of some streams are appended."""

    def __init__(self, end: FollowerEnd, context: PluginContext, broker_id: int, slot: int) -> None:
        self._end = end
        self._context = context
        self._broker_id = broker_id
        self._lane = f"append-{slot}"
        self._tasks = Tasks(f"writer-{broker_id}-{slot}")
        self._ready: dict[FollowerStream, None] = {}
        """Streams that may have a batch to send, in the order in which they asked."""
        self._under_way: list[FollowerStream] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._work = asyncio.Event()
        self._connection: ProduceConnection | None = None
        self._tasks.start("append", self._run())

    async def stop(self) -> None:
        await self._tasks.close()
        if self._connection is not None:
            self._connection.close()

    def wake(self, stream: FollowerStream) -> None:
        """The stream has a batch to send."""
        self._ready[stream] = None
        self._work.set()

    async def leave(self, stream: FollowerStream) -> None:
        """Return when no request of the stream is under way, nor will be."""
        self._ready.pop(stream, None)
        while stream in self._under_way:
            self._idle.clear()
            await self._idle.wait()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._ready:
                writes = self._collect()
                if writes:
                    try:
                        await self._write(writes)
                    except Exception:
                        # A bug of ours must not leave all streams of this writer waiting for ever.
                        log.exception("write failed", extra={"broker": self._broker_id})
                        for stream in self._under_way:
                            stream.follower_log.unknown()
                        self._settled()

    def _collect(self) -> Writes:
        """The next operation of every stream that has one, or a burst of them, up to a request's size."""
        writes: Writes = {}
        transaction_of: int | None = None
        recent = self._end.recent
        size = 0
        for stream in list(self._ready):
            if size >= REQUEST_BYTES_MAX:
                break
            producer_id = stream.follower_log.transaction_of
            if producer_id is not None and transaction_of not in (None, producer_id):
                continue  # a request holds transactional batches of one producer
            del self._ready[stream]
            try:
                operation = stream.follower_log.take()
            except (BatchError, ProducerIdOverflow) as error:
                stream.follower_log.stop(StopReason(ReasonCode.UNSUPPORTED_MESSAGE_FORMAT, str(error)))
                self._end.proceed(stream)
                continue
            except Exception as error:  # a bug of ours must not end this writer, which other streams share
                log.exception("batch not prepared", extra={"topic": stream.topic, "partition": stream.partition})
                stream.follower_log.stop(StopReason(ReasonCode.INTERNAL_ERROR, repr(error)))
                self._end.proceed(stream)
                continue
            if operation is None and stream.follower_log.doubtful:
                self._end.proceed(stream)
            if isinstance(operation, Mark):
                writes[stream.place] = (stream, operation)
            elif operation is not None:
                appends = [operation, *(() if recent is None else stream.follower_log.take_more(recent))]
                writes[stream.place] = (stream, appends)
                size += sum(len(append.data) for append in appends)
                if operation.transactional:
                    transaction_of = producer_id
        return writes

    async def _write(self, writes: Writes) -> None:
        self._under_way = [stream for stream, _ in writes.values()]
        try:
            if monotonic() > self._context.lease_deadline:  # another proxy may write by now
                raise BrokerUnavailable("this proxy has no lease now")
            self._connection = await self._context.cluster.produce_connection(self._broker_id, self._lane)
        except BrokerUnavailable as error:
            for stream in self._under_way:
                stream.trouble = StopReason(reasons.BROKER_UNAVAILABLE, str(error))
                stream.follower_log.not_written()
                stream.follower_log.unknown()
            self._settled()
            return
        try:
            results = await self._request(self._connection, writes)
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("append unanswered", extra={"broker": self._broker_id, "detail": str(error)})
            self._connection.close()
            for stream in self._under_way:
                stream.trouble = StopReason(reasons.BROKER_UNAVAILABLE, str(error))
                stream.follower_log.unknown()
        else:
            for place, (stream, written) in writes.items():
                self._result(stream, written, results.get(place, []))
        self._settled()

    async def _request(
        self, connection: ProduceConnection, writes: Writes
    ) -> dict[tuple[str, int], list[ProduceResult]]:
        """Write batches and markers. Raises BrokerUnavailable: the fate of all is unknown.

        What a partition has under way ends with the last Produce request, which is the one with acks=all.
        """
        longest = max((len(written) for _, written in writes.values() if isinstance(written, list)), default=0)
        requests: list[dict[tuple[str, int], bytes]] = [{} for _ in range(longest)]
        markers: list[TransactionMarkers] = []
        transactional_id: str | None = None
        for place, (stream, written) in writes.items():
            if isinstance(written, Mark):
                markers.append(
                    TransactionMarkers(
                        *place,
                        written.producer_id,
                        written.producer_epoch,
                        written.committed,
                        written.coordinator_epoch,
                        written.next_offset - written.first_offset,
                    )
                )
                continue
            for request, append in zip(requests[-len(written) :], written, strict=True):
                request[place] = append.data
            if written[0].transactional:
                transactional_id = TRANSACTIONAL_ID_PREFIX + stream.link_name
        results: dict[tuple[str, int], list[ProduceResult]] = {}
        if requests:
            for answer in await connection.produce(requests, PRODUCE_TIMEOUT_MS, transactional_id):
                for place, result in answer.items():
                    results.setdefault(place, []).append(result)
        if markers:
            answer = await connection.write_markers(markers, PRODUCE_TIMEOUT_MS)
            results |= {place: [result] for place, result in answer.items()}
        return results

    def _settled(self) -> None:
        streams, self._under_way = self._under_way, []
        self._idle.set()
        for stream in streams:
            self._end.proceed(stream)
        if self._ready:
            self._work.set()

    def _result(self, stream: FollowerStream, written: list[Append] | Mark, results: Sequence[ProduceResult]) -> None:
        follower_log = stream.follower_log
        operations: Sequence[Operation] = written if isinstance(written, list) else [written]
        refused = next((result for result in results if result.error_code), None)
        if len(results) != len(operations):
            follower_log.unknown()
        elif refused is None:
            if isinstance(written, list):
                follower_log.appended(*(result.base_offset for result in results))
                self._end.bytes_appended += sum(len(append.data) for append in written)
            else:
                follower_log.marked()
            if follower_log.state is not LogState.DIVERGED:
                stream.held = stream.trouble = None
                stream.refusals = 0
                self._end.batches_appended += len(operations)
                self._end.tell_appended(stream)
        elif len(operations) == 1:
            self._refused(stream, operations[0], refused)
        else:  # what is wrong shows when the first that was refused is sent alone
            stream.trouble = self._objection(stream, refused)
            follower_log.partly_appended([None if each.error_code else each.base_offset for each in results])

    @staticmethod
    def _objection(stream: FollowerStream, result: ProduceResult) -> StopReason:
        return StopReason(
            ReasonCode.TARGET_REFUSES_RECORDS,
            f"the target refused the batch at offset {stream.follower_log.end}: "
            f"{result.error_name} {result.message}".rstrip(),
        )

    def _refused(self, stream: FollowerStream, operation: Operation, result: ProduceResult) -> None:
        """The broker answered an error."""
        follower_log, code = stream.follower_log, result.error_code
        transactional = isinstance(operation, Append) and operation.transactional
        objection = self._objection(stream, result)
        if code in _MOVED:
            follower_log.not_written()
            follower_log.stop(StopReason(reasons.MOVED, f"the broker answered {result.error_name}"))
        elif code in _UNVERIFIED and transactional:
            stream.trouble = objection
            stream.refusals += 1
            if stream.refusals > UNVERIFIED_MAX:
                stream.unverified = code
            follower_log.not_written()
            follower_log.unknown()
        elif code in _NOT_STORED:
            stream.trouble = objection
            if isinstance(operation, Append):  # of markers, some may have been written
                follower_log.not_written()
            follower_log.unknown()
        elif code in _FATE_UNKNOWN:
            stream.trouble = objection
            follower_log.unknown()
        elif code == MESSAGE_TOO_LARGE and isinstance(operation, Append) and operation.divisible:
            follower_log.too_large()
        elif stream.refusals >= REFUSALS_MAX:
            follower_log.not_written()
            follower_log.stop(objection)
        elif code == INVALID_RECORD and isinstance(operation, Append) and _is_keyless(operation) and not stream.is_copy:
            stream.trouble = objection
            stream.refusals += 1
            stream.keyless = True
            follower_log.not_written()
        elif code == OUT_OF_ORDER_SEQUENCE and not follower_log.renumbering:
            stream.refusals += 1
            follower_log.out_of_sequence()
        elif code == TRANSACTION_COORDINATOR_FENCED and isinstance(operation, Mark):
            stream.refusals += 1
            follower_log.fenced()
        elif code in _DOUBTFUL:
            stream.trouble = objection
            stream.refusals += 1
            follower_log.unknown()
        else:
            follower_log.not_written()
            follower_log.stop(objection)


def _is_keyless(operation: Append) -> bool:
    """Whether some record of a batch has no key."""
    return any(record.key is None for record in decode_records(operation.data))
