"""The follower end of links: takes batches from leader ends and appends them to this cluster's topics.

A stream is one partition over one connection. It is opened by the leader end, which is told where the follower's log
ends and sends what comes after. Batches are appended by writers, several connections to each broker that this proxy
fronts: a writer sends one request at a time, with the next batch of every stream of its that has one.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any, Final

from isthmus_control.commands import PartitionEpoch, RecordSourceEpochs
from isthmus_control.model import NamespaceMapping, ResourceType, Role, TopicState
from isthmus_control.outcome import Rejected
from isthmus_plugins.api import BrokerUnavailable, PluginContext, ProduceConnection, ProduceResult
from isthmus_plugins.replication.connection import LinkConnection, LinkRejected
from isthmus_plugins.replication.follower_log import FollowerLog, LogState, Numbering, StopReason
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import link
from isthmus_protocol.link import MessageType
from isthmus_protocol.records import BatchError
from isthmus_protocol.wire import MalformedFrame

log = logging.getLogger("isthmus_plugins.replication")

WRITERS_PER_BROKER: Final = 3
"""A broker reads a connection's next request only when it has answered the last: several connections overlap."""
REQUEST_BYTES_MAX: Final = 8 * 1024 * 1024
PRODUCE_TIMEOUT_MS: Final = 30_000
LOST_REQUEST_MARGIN_S: Final = 2.0
"""After its connection broke, a request may still be taken up by the broker; it is not sent again before this time."""

_NOT_STORED: Final = frozenset(
    {
        19,  # NOT_ENOUGH_REPLICAS: refused before the append
        6,  # NOT_LEADER_OR_FOLLOWER
        5,  # LEADER_NOT_AVAILABLE
        89,  # THROTTLING_QUOTA_EXCEEDED
    }
)
_MOVED: Final = frozenset({3, 6, 100})
"""UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_ID: the leader end looks for the leader again."""
_FATE_UNKNOWN: Final = frozenset({7, 13, 20, 45, 46, 56, 59, -1})
"""Timed out, connection trouble, too few replicas after the append, sequence doubts, storage error."""


class FollowerStream:
    """One partition that follows over one connection."""

    __slots__ = (
        "broker_id",
        "connection",
        "end_age_ms",
        "end_age_noted",
        "follower_log",
        "link_name",
        "partition",
        "resuming",
        "source_topic",
        "stream_id",
        "told_stopped",
        "topic",
        "topic_id",
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
        self.resuming = False
        self.told_stopped = False
        self.end_age_ms = 0
        self.end_age_noted = monotonic()
        self.writer: Writer

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest record of the source that is not here, as far as the source has told."""
        if self.follower_log.end >= self.follower_log.source_end:
            return 0.0
        return self.end_age_ms / 1000 + monotonic() - self.end_age_noted


class FollowerEnd:
    """All partitions that follow on the brokers that this proxy fronts."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._tasks = Tasks("follower-end")
        self._streams: dict[tuple[LinkConnection, int], FollowerStream] = {}
        self._partitions: dict[tuple[str, int], FollowerStream] = {}
        self._writers: dict[tuple[int, int], Writer] = {}
        self._epochs_due: dict[FollowerStream, None] = {}
        self._epoch_task: asyncio.Task[None] | None = None
        self.batches_appended = 0
        self.bytes_appended = 0

    async def stop(self) -> None:
        await self._tasks.close()
        for writer in self._writers.values():
            await writer.stop()

    def streams(self) -> list[FollowerStream]:
        return list(self._partitions.values())

    # ---- the leader end's calls ----

    async def open_stream(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """Open a stream for one partition: says where its log ends. An older stream of the partition ends."""
        topic, partition = str(params["topic"]), int(params["partition"])
        state = self._context.control.state
        record = state.follower_topics.get(topic)
        counterpart = state.lookup.following(ResourceType.TOPIC, topic)
        if record is None or record.state is not TopicState.FOLLOWING or record.link != connection.link_name:
            raise LinkRejected("NOT_FOLLOWING", f"{topic} does not follow over this link")
        if counterpart is None or counterpart.mapping.role is not Role.FOLLOWER:
            raise LinkRejected("NOT_FOLLOWING", f"{topic} is in no namespace that follows over this link")
        if record.source_topic_id != params["source_topic_id"]:
            raise LinkRejected("SOURCE_TOPIC_ID_CHANGED", f"{topic} follows another topic of the same name")
        leader = await self._context.cluster.leader_of(topic, partition)
        if leader is None or not self._context.fronts(leader):
            raise LinkRejected(
                "NOT_LEADER", f"{topic}-{partition} is led by broker {leader}, which another proxy fronts"
            )
        old = self._partitions.get((topic, partition))
        if old is not None:
            await self._end(old)
        numbering = Numbering(
            state.producer_id_ranges[counterpart.link.remote_cluster_id],
            state.producer_id_ranges[self._context.cluster_id],
            counterpart.link.number,
        )
        follower_log = FollowerLog(numbering)
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
        )
        await self._read_position(stream)
        if connection.lost:
            raise LinkRejected("LINK_LOST", "the connection went meanwhile")
        stream.writer = self._writer(leader, topic, partition)
        self._streams[connection, stream.stream_id] = stream
        self._partitions[topic, partition] = stream
        return {"end_offset": follower_log.end}

    async def _read_position(self, stream: FollowerStream) -> None:
        """Read the log end and the stamp's last sequence from the partition's leader. Raises BrokerUnavailable."""
        cluster, numbering = self._context.cluster, stream.follower_log.numbering
        log_end = await cluster.log_end(stream.topic, stream.partition)
        last = await cluster.last_sequence(stream.topic, stream.partition, numbering.stamp_id)
        stream.follower_log.resume(log_end, last)

    async def _end(self, stream: FollowerStream) -> None:
        """End a stream; when this returns, none of its requests is under way."""
        self._streams.pop((stream.connection, stream.stream_id), None)
        if self._partitions.get((stream.topic, stream.partition)) is stream:
            del self._partitions[stream.topic, stream.partition]
        stream.follower_log.stop(StopReason("CLOSED", "the stream was closed"))
        await stream.writer.leave(stream)

    async def close_stream(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """Close a stream (the namespace was detached, the leader moved)."""
        stream = self._streams.get((connection, int(params["stream"])))
        if stream is not None:
            await self._end(stream)
            return {"end_offset": stream.follower_log.end}
        return {}

    async def end_mapping(self, link_name: str, mapping: NamespaceMapping) -> None:
        """End the streams of a namespace: nothing of the link is appended to it any more."""
        for stream in list(self._partitions.values()):
            if stream.link_name == link_name and mapping.remote_name(stream.topic) is not None:
                await self._end(stream)

    def connection_lost(self, connection: LinkConnection) -> None:
        """The leader end is gone: its streams take nothing more. What is under way is still awaited."""
        for key, stream in list(self._streams.items()):
            if key[0] is connection:
                del self._streams[key]
                stream.follower_log.stop(StopReason("DISCONNECTED", "the peer is not connected"))

    # ---- records ----

    def on_append(self, connection: LinkConnection, append: link.Append) -> None:
        """Take batches of a stream. What comes for a stream that has ended is dropped: its leader end knows."""
        stream = self._streams.get((connection, append.stream))
        if stream is None:
            return
        follower_log = stream.follower_log
        follower_log.source_end = append.source_end
        stream.end_age_ms, stream.end_age_noted = append.source_end_age_ms, monotonic()
        try:
            follower_log.offer(memoryview(append.records))
        except BatchError as error:
            raise MalformedFrame(f"records of {stream.source_topic}-{stream.partition}: {error}") from error
        self.proceed(stream)

    def proceed(self, stream: FollowerStream) -> None:
        """Do what the log's state asks for: append, record an epoch, read the position again, tell that it stopped."""
        follower_log = stream.follower_log
        if follower_log.state in (LogState.STOPPED, LogState.DIVERGED):
            self._tell_stopped(stream)
        elif follower_log.next_epoch() is not None:
            self._epochs_due[stream] = None
            if self._epoch_task is None or self._epoch_task.done():
                self._epoch_task = self._tasks.start("epochs", self._record_epochs())
        elif follower_log.state is LogState.RESUMING:
            if not stream.resuming:
                stream.resuming = True
                self._tasks.start(f"resume-{stream.topic}-{stream.partition}", self._resume(stream))
        elif follower_log.queued:
            stream.writer.wake(stream)

    async def _record_epochs(self) -> None:
        """Store leader epochs of the source before their first append: the target's log has only its own.

        Whatever is due at the same time goes into one command.
        """
        while self._epochs_due:
            due = [
                (stream, epoch)
                for stream in self._epochs_due
                if (epoch := stream.follower_log.next_epoch()) is not None
            ]
            self._epochs_due.clear()
            entries = tuple(
                PartitionEpoch(stream.topic, stream.topic_id, stream.partition, epoch, start)
                for stream, (epoch, start) in due
            )
            try:
                outcome = await self._context.control.append(RecordSourceEpochs(entries)) if entries else None
            except BrokerUnavailable as error:
                log.warning("source epochs not recorded", extra={"detail": str(error)})
                self._epochs_due |= {stream: None for stream, _ in due if not stream.connection.lost}
                await asyncio.sleep(LOST_REQUEST_MARGIN_S)
                continue
            if isinstance(outcome, Rejected):
                for stream, _ in due:
                    stream.follower_log.stop(StopReason("EPOCH_REFUSED", outcome.message))
                    self.proceed(stream)
                continue
            for stream, recorded in due:
                stream.follower_log.epoch = recorded[0]
                self.proceed(stream)

    async def _resume(self, stream: FollowerStream) -> None:
        """The fate of a request is unknown: wait until it can no longer land, read the log end, go on from there."""
        try:
            while stream.follower_log.state is LogState.RESUMING and not stream.connection.lost:
                await asyncio.sleep(LOST_REQUEST_MARGIN_S)
                try:
                    leader = await self._context.cluster.leader_of(stream.topic, stream.partition)
                    if leader != stream.broker_id:
                        stream.follower_log.stop(StopReason("MOVED", f"the partition is led by broker {leader} now"))
                        break
                    await self._read_position(stream)
                except BrokerUnavailable as error:
                    log.warning(
                        "follower position not read",
                        extra={"topic": stream.topic, "partition": stream.partition, "detail": str(error)},
                    )
        finally:
            stream.resuming = False
        if stream.follower_log.state is LogState.APPENDING:
            self.tell_appended(stream)
        self.proceed(stream)

    def tell_appended(self, stream: FollowerStream) -> None:
        stream.connection.send(link.encode_appended(stream.stream_id, stream.follower_log.end))

    def _tell_stopped(self, stream: FollowerStream) -> None:
        reason = stream.follower_log.reason
        if stream.told_stopped or reason is None:
            return
        stream.told_stopped = True
        level = logging.ERROR if stream.follower_log.state is LogState.DIVERGED else logging.INFO
        log.log(
            level,
            "follower partition stopped",
            extra={
                "topic": stream.topic,
                "partition": stream.partition,
                "offset": stream.follower_log.end,
                "code": reason.code,
                "detail": reason.message,
            },
        )
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

    # ---- writers ----

    def _writer(self, broker_id: int, topic: str, partition: int) -> Writer:
        slot = hash((topic, partition)) % WRITERS_PER_BROKER
        writer = self._writers.get((broker_id, slot))
        if writer is None:
            writer = self._writers[broker_id, slot] = Writer(self, self._context, broker_id, slot)
        return writer


class Writer:
    """One connection to a broker, over which the batches of some streams are appended, one request at a time."""

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
                requests = self._collect()
                if requests:
                    await self._append(requests)

    def _collect(self) -> dict[tuple[str, int], tuple[FollowerStream, bytes]]:
        """The next batch of every stream that has one, up to a request's size."""
        requests: dict[tuple[str, int], tuple[FollowerStream, bytes]] = {}
        size = 0
        while self._ready and size < REQUEST_BYTES_MAX:
            stream = next(iter(self._ready))
            del self._ready[stream]
            try:
                batch = stream.follower_log.take()
            except BatchError as error:
                stream.follower_log.stop(StopReason("CORRUPT_BATCH", str(error)))
                self._end.proceed(stream)
                continue
            if batch is not None:
                requests[stream.topic, stream.partition] = (stream, batch)
                size += len(batch)
        return requests

    async def _append(self, requests: dict[tuple[str, int], tuple[FollowerStream, bytes]]) -> None:
        self._under_way = [stream for stream, _ in requests.values()]
        try:
            if self._connection is None:
                self._connection = await self._context.cluster.produce_connection(self._broker_id, self._lane)
        except BrokerUnavailable:
            for stream in self._under_way:
                stream.follower_log.not_appended()
                stream.follower_log.unknown()
            self._settled()
            return
        try:
            results = await self._connection.produce(
                {key: batch for key, (_, batch) in requests.items()}, PRODUCE_TIMEOUT_MS
            )
        except BrokerUnavailable as error:
            log.warning("append unanswered", extra={"broker": self._broker_id, "detail": str(error)})
            self._connection.close()
            self._connection = None
            for stream in self._under_way:
                stream.follower_log.unknown()
        else:
            for key, (stream, batch) in requests.items():
                self._result(stream, len(batch), results.get(key))
        self._settled()

    def _settled(self) -> None:
        streams, self._under_way = self._under_way, []
        self._idle.set()
        for stream in streams:
            self._end.proceed(stream)

    def _result(self, stream: FollowerStream, size: int, result: ProduceResult | None) -> None:
        follower_log = stream.follower_log
        if result is None:
            follower_log.unknown()
        elif result.error_code == 0:
            follower_log.appended(result.base_offset)
            if follower_log.state is not LogState.DIVERGED:
                self._end.batches_appended += 1
                self._end.bytes_appended += size
                self._end.tell_appended(stream)
        elif result.error_code in _MOVED:
            follower_log.not_appended()
            follower_log.stop(StopReason("MOVED", f"the broker answered {result.error_name}"))
        elif result.error_code in _NOT_STORED:
            follower_log.not_appended()
            follower_log.unknown()
        elif result.error_code in _FATE_UNKNOWN:
            follower_log.unknown()
        else:
            follower_log.not_appended()
            follower_log.stop(
                StopReason(
                    result.error_name,
                    f"the target refused the batch at offset {follower_log.end}: {result.error_name} {result.message}",
                )
            )
