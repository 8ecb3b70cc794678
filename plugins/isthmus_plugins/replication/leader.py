"""The leader end of links: reads this cluster's topics and pushes what is new to the follower ends.

For each partition of a led namespace whose leader this proxy fronts there is one stream to the proxy that fronts the
target partition's leader. Tails read: one long poll a broker for the streams that are at the end of their log, and a
second connection for those that are behind, so that neither waits for the other. Batches go out as the log has them,
without waiting for the answers to earlier ones.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any, Final, NamedTuple

from isthmus_control.model import Link, NamespaceMapping, ResourceType, Role
from isthmus_plugins.api import (
    BrokerUnavailable,
    FetchConnection,
    Fetched,
    FetchPartition,
    KafkaRefused,
    PluginContext,
    TopicInfo,
)
from isthmus_plugins.replication.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.peers import LinkPeers
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import link
from isthmus_protocol.records import BatchError, walk

log = logging.getLogger("isthmus_plugins.replication")

DISCOVERY_INTERVAL_S: Final = 0.4
"""How often topics are looked for: one that is new is found, made on the target and followed within a second."""
PREPARE_INTERVAL_S: Final = 3.0
"""How often the target is told of all topics although nothing changed here: it may have lost or moved some."""
REOPEN_DELAY_S: Final = 0.5
STOPPED_RETRY_S: Final = 10.0
"""A stream that stopped for a reason of its data is tried again: the follower end may have been upgraded."""
TAIL_WAIT_MS: Final = 200
FETCH_BYTES_MAX: Final = 16 * 1024 * 1024
PARTITION_BYTES_MAX: Final = 1024 * 1024
IN_FLIGHT_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of one stream, sent and not confirmed; the follower end holds no more of it."""
OPENING_AT_ONCE: Final = 32
CONFIGS_NOT_COPIED: Final = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")

OFFSET_OUT_OF_RANGE: Final = 1
_RESOLVE_AGAIN: Final = frozenset({3, 5, 6, 9, 74, 75, 76, 100, 103})
"""Errors of a Fetch after which the partition's leader is looked for again."""


class PreparedTopic(NamedTuple):
    """The follower end's answer for one topic."""

    remote_topic: str
    ready: bool
    code: str | None
    message: str | None
    leaders: tuple[int, ...]
    """By partition: the target broker that leads it, -1 where there is none."""


class LedPartition(NamedTuple):
    link: str
    topic: str
    partition: int


class LeaderStream:
    """One partition that is pushed to its follower."""

    __slots__ = (
        "_in_flight",
        "_seen",
        "acked",
        "behind",
        "broker_id",
        "connection",
        "in_flight_bytes",
        "key",
        "next_offset",
        "remote_topic",
        "source_end",
        "stream_id",
        "told_end",
        "topic_id",
    )

    def __init__(
        self,
        key: LedPartition,
        topic_id: bytes,
        remote_topic: str,
        broker_id: int,
        connection: LinkConnection,
        stream_id: int,
    ) -> None:
        self.key = key
        self.topic_id = topic_id
        self.remote_topic = remote_topic
        self.broker_id = broker_id
        self.connection = connection
        self.stream_id = stream_id
        self.next_offset = 0
        """The next offset to read."""
        self.acked = 0
        """The follower's confirmed log end."""
        self.source_end = 0
        self.told_end = -1
        self.behind = True
        self.in_flight_bytes = 0
        self._in_flight: deque[tuple[int, int]] = deque()
        self._seen: deque[tuple[int, float]] = deque()

    def opened(self, end_offset: int) -> None:
        self.next_offset = self.acked = end_offset

    def saw_end(self, high_watermark: int, now: float) -> None:
        """The source's log reaches to ``high_watermark`` now."""
        if high_watermark > self.source_end or not self._seen:
            self.source_end = max(self.source_end, high_watermark)
            self._seen.append((high_watermark, now))

    def age_ms(self, now: float) -> int:
        """How long ago the oldest record that the follower lacks was first seen, 0 if it lacks none."""
        while self._seen and self._seen[0][0] <= self.acked:
            self._seen.popleft()
        return int((now - self._seen[0][1]) * 1000) if self._seen else 0

    def sent(self, next_offset: int, size: int) -> None:
        self.next_offset = next_offset
        self._in_flight.append((next_offset, size))
        self.in_flight_bytes += size

    def confirmed(self, end_offset: int) -> None:
        self.acked = max(self.acked, end_offset)
        while self._in_flight and self._in_flight[0][0] <= end_offset:
            self.in_flight_bytes -= self._in_flight.popleft()[1]

    @property
    def full(self) -> bool:
        return self.in_flight_bytes >= IN_FLIGHT_BYTES_MAX

    @property
    def lag(self) -> int:
        return max(0, self.source_end - self.acked)


class Stopped(NamedTuple):
    """Why a partition has no stream, and when it may have one again."""

    code: str
    message: str
    end_offset: int | None
    retry_at: float


class LeaderEnd:
    """All partitions that are led over links on the brokers that this proxy fronts."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._peers = peers
        self._tasks = Tasks("leader-end")
        self._stream_ids = itertools.count(1)
        self._changed = asyncio.Event()
        self._streams: dict[LedPartition, LeaderStream] = {}
        self._by_id: dict[tuple[LinkConnection, int], LeaderStream] = {}
        self._opening: set[LedPartition] = set()
        self._tails: dict[tuple[int, str], Tail] = {}
        self._prepared: dict[tuple[str, str], PreparedTopic] = {}
        self._prepared_for: dict[str, tuple[Any, float]] = {}
        self._limit = asyncio.Semaphore(OPENING_AT_ONCE)
        self.stopped: dict[LedPartition, Stopped] = {}
        self.led: dict[LedPartition, PreparedTopic | None] = {}
        """Every partition that this proxy is to push, with what the target said of its topic."""
        self.discovery_error: str | None = None

    def start(self) -> None:
        self._tasks.start("reconcile", self._reconcile_for_ever())

    async def stop(self) -> None:
        await self._tasks.close()
        for tail in self._tails.values():
            await tail.stop()

    def stream(self, key: LedPartition) -> LeaderStream | None:
        return self._streams.get(key)

    def wake(self) -> None:
        """Something changed: links, connections, topics."""
        self._changed.set()

    # ---- what should be, and making it so ----

    async def _reconcile_for_ever(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._reconcile()
                self.discovery_error = None
            except (BrokerUnavailable, KafkaRefused) as error:
                if self.discovery_error is None:
                    log.warning("topics not read", extra={"detail": str(error)})
                self.discovery_error = str(error)
            try:
                async with asyncio.timeout(DISCOVERY_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _leading(self) -> list[tuple[Link, NamespaceMapping]]:
        return [
            (link_, mapping)
            for link_ in self._context.control.state.links.values()
            for mapping in link_.mappings
            if mapping.role is Role.LEADER and mapping.type is ResourceType.TOPIC
        ]

    async def _reconcile(self) -> None:
        leading = self._leading()
        if not leading:
            self._keep(set())
            self.led = {}
            return
        topics = await self._context.cluster.topics()
        led: dict[LedPartition, PreparedTopic | None] = {}
        mine: dict[str, dict[str, tuple[NamespaceMapping, TopicInfo]]] = {}
        for link_, mapping in leading:
            for topic in topics.values():
                if topic.internal or mapping.remote_name(topic.name) is None:
                    continue
                fronted = [index for index, info in enumerate(topic.partitions) if self._context.fronts(info.leader)]
                if fronted:
                    mine.setdefault(link_.name, {})[topic.name] = (mapping, topic)
                for index in fronted:
                    led[LedPartition(link_.name, topic.name, index)] = None
        for link_name, wanted in mine.items():
            await self._prepare(link_name, wanted)
        now = monotonic()
        for key in led:
            led[key] = self._prepared.get((key.link, key.topic))
        self.led = led
        self._keep({key for key in led if self._still_right(key, topics[key.topic])})
        for key in led:
            if key not in self._streams and key not in self._opening:
                stopped = self.stopped.get(key)
                if stopped is None or stopped.retry_at <= now:
                    self._open(key, topics[key.topic])
        for key in [key for key in self.stopped if key not in led]:
            del self.stopped[key]

    def _still_right(self, key: LedPartition, topic: TopicInfo) -> bool:
        stream = self._streams.get(key)
        return (
            stream is not None
            and not stream.connection.lost
            and stream.topic_id == topic.topic_id
            and stream.broker_id == topic.partitions[key.partition].leader
        )

    def _keep(self, wanted: set[LedPartition]) -> None:
        for key in [key for key in self._streams if key not in wanted]:
            self._close(self._streams[key])

    def _close(self, stream: LeaderStream, tell: bool = True) -> None:
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key]
        self._by_id.pop((stream.connection, stream.stream_id), None)
        tail = self._tails.get((stream.broker_id, stream.key.link))
        if tail is not None:
            tail.remove(stream)
        if tell and not stream.connection.lost:
            self._tasks.start(f"close-{stream.stream_id}", self._tell_closed(stream))

    async def _tell_closed(self, stream: LeaderStream) -> None:
        try:
            await stream.connection.call("close_stream", {"stream": stream.stream_id})
        except (LinkRejected, LinkLost, TimeoutError):
            pass  # the follower end learns it from the connection, or from the next stream of the partition

    # ---- topics of the target ----

    async def _prepare(self, link_name: str, wanted: Mapping[str, tuple[NamespaceMapping, TopicInfo]]) -> None:
        """Have the target make the topics that it lacks, and learn where its partitions are led."""
        connections = self._peers.connections(link_name)
        if not connections:
            return
        fingerprint = (
            connections[0],
            {(name, info.topic_id, len(info.partitions)) for name, (_, info) in wanted.items()},
        )
        known = self._prepared_for.get(link_name)
        now = monotonic()
        if known is not None and known[0] == fingerprint and now - known[1] < PREPARE_INTERVAL_S:
            return
        requests = []
        for name, (mapping, info) in wanted.items():
            prepared = self._prepared.get((link_name, name))
            request: dict[str, Any] = {
                "topic": name,
                "topic_id": str(uuid.UUID(bytes=info.topic_id)),
                "remote_topic": mapping.remote_name(name),
                "partitions": len(info.partitions),
                "replication_factor": info.replication_factor,
            }
            if prepared is None or not prepared.ready or len(prepared.leaders) != len(info.partitions):
                configs = await self._context.cluster.topic_configs(name)
                request["configs"] = {
                    setting: value
                    for setting, (value, _) in configs.items()
                    if value is not None and setting not in CONFIGS_NOT_COPIED
                }
            requests.append(request)
        try:
            answer = await connections[0].call("prepare_topics", {"topics": requests}, timeout_s=60)
        except (LinkRejected, LinkLost, TimeoutError) as error:
            log.warning("target topics not prepared", extra={"link": link_name, "detail": str(error)})
            return
        for name in wanted:
            said = answer.get("topics", {}).get(name) or {}
            self._prepared[link_name, name] = PreparedTopic(
                str(said.get("remote_topic", "")),
                bool(said.get("ready")),
                said.get("code"),
                said.get("message"),
                tuple(said.get("leaders", ())),
            )
        ready = all(self._prepared[link_name, name].ready for name in wanted)
        self._prepared_for[link_name] = (fingerprint, now if ready else now - PREPARE_INTERVAL_S + REOPEN_DELAY_S)

    # ---- streams ----

    def _open(self, key: LedPartition, topic: TopicInfo) -> None:
        prepared = self.led[key]
        if prepared is None or not prepared.ready or key.partition >= len(prepared.leaders):
            return
        connection = self._peers.fronting(key.link, prepared.leaders[key.partition])
        if connection is None:
            return
        self._opening.add(key)
        stream = LeaderStream(
            key,
            topic.topic_id,
            prepared.remote_topic,
            topic.partitions[key.partition].leader,
            connection,
            next(self._stream_ids),
        )
        self._tasks.start(f"open-{key.topic}-{key.partition}", self._opened(stream))

    async def _opened(self, stream: LeaderStream) -> None:
        key = stream.key
        try:
            async with self._limit:
                answer = await stream.connection.call(
                    "open_stream",
                    {
                        "stream": stream.stream_id,
                        "topic": stream.remote_topic,
                        "source_topic_id": str(uuid.UUID(bytes=stream.topic_id)),
                        "partition": key.partition,
                    },
                )
        except (LinkRejected, LinkLost, TimeoutError) as error:
            code = error.code if isinstance(error, LinkRejected) else "UNAVAILABLE"
            if code == "NOT_LEADER":
                self._prepared_for.pop(key.link, None)
            self.stopped[key] = Stopped(code, str(error), None, monotonic() + REOPEN_DELAY_S)
            return
        finally:
            self._opening.discard(key)
        stream.opened(int(answer["end_offset"]))
        self.stopped.pop(key, None)
        self._streams[key] = stream
        self._by_id[stream.connection, stream.stream_id] = stream
        place = (stream.broker_id, key.link)
        tail = self._tails.get(place)
        if tail is None:
            tail = self._tails[place] = Tail(self, self._context, *place)
        tail.add(stream)

    def on_appended(self, connection: LinkConnection, appended: link.Appended) -> None:
        """The follower has everything of a stream up to an offset."""
        stream = self._by_id.get((connection, appended.stream))
        if stream is None:
            return
        was_full = stream.full
        stream.confirmed(appended.end_offset)
        if was_full and not stream.full:
            self._tails[stream.broker_id, stream.key.link].resume()

    def on_stopped(self, connection: LinkConnection, said: Mapping[str, Any]) -> None:
        """The follower end takes no more of a stream."""
        stream = self._by_id.get((connection, int(said.get("stream", 0))))
        if stream is not None:
            code, message = str(said.get("code")), str(said.get("message"))
            moved = code in ("MOVED", "CLOSED")
            if moved:
                self._prepared_for.pop(stream.key.link, None)
            self.stop_stream(
                stream, code, message, int(said.get("end_offset", 0)), REOPEN_DELAY_S if moved else STOPPED_RETRY_S
            )

    def stop_stream(
        self, stream: LeaderStream, code: str, message: str, end_offset: int | None, retry_s: float
    ) -> None:
        """End a stream for a reason, and try again after ``retry_s``."""
        log.info(
            "stream stopped",
            extra={
                "link": stream.key.link,
                "topic": stream.key.topic,
                "partition": stream.key.partition,
                "code": code,
                "detail": message,
            },
        )
        self.stopped[stream.key] = Stopped(code, message, end_offset, monotonic() + retry_s)
        self._close(stream, tell=False)
        self.wake()

    def connection_lost(self, connection: LinkConnection) -> None:
        """Streams of a connection that is gone end; they are opened again over the next one."""
        for stream in [stream for stream in self._streams.values() if stream.connection is connection]:
            self._close(stream, tell=False)
        self.wake()


class Tail:
    """Reads the ends of the logs that one broker leads, for one link."""

    def __init__(self, end: LeaderEnd, context: PluginContext, broker_id: int, link_name: str) -> None:
        self._end = end
        self._context = context
        self._broker_id = broker_id
        self._link_name = link_name
        self._tasks = Tasks(f"tail-{broker_id}-{link_name}")
        self._streams: dict[tuple[bytes, int], LeaderStream] = {}
        self._wake = {False: asyncio.Event(), True: asyncio.Event()}
        self._tasks.start("end", self._read_for_ever(behind=False))
        self._tasks.start("behind", self._read_for_ever(behind=True))

    async def stop(self) -> None:
        await self._tasks.close()

    def add(self, stream: LeaderStream) -> None:
        self._streams[stream.topic_id, stream.key.partition] = stream
        self.resume()

    def remove(self, stream: LeaderStream) -> None:
        key = (stream.topic_id, stream.key.partition)
        if self._streams.get(key) is stream:
            del self._streams[key]

    def resume(self) -> None:
        """A stream can be read on."""
        for event in self._wake.values():
            event.set()

    async def _read_for_ever(self, behind: bool) -> None:
        connection: FetchConnection | None = None
        lane = f"tail-{self._link_name}-{'behind' if behind else 'end'}"
        turn = 0
        while True:
            wake = self._wake[behind]
            wake.clear()
            streams = [stream for stream in self._streams.values() if stream.behind is behind and not stream.full]
            if not streams:
                await wake.wait()
                continue
            turn = (turn + 1) % len(streams)
            try:
                if connection is None:
                    connection = await self._context.cluster.fetch_connection(self._broker_id, lane)
                await self._read(connection, streams[turn:] + streams[:turn], 0 if behind else TAIL_WAIT_MS)
            except BrokerUnavailable as error:
                log.warning("source not read", extra={"broker": self._broker_id, "detail": str(error)})
                if connection is not None:
                    connection.close()
                    connection = None
                self._end.wake()
                await asyncio.sleep(REOPEN_DELAY_S)

    async def _read(self, connection: FetchConnection, streams: list[LeaderStream], wait_max_ms: int) -> None:
        asked = {(stream.topic_id, stream.key.partition): (stream, stream.next_offset) for stream in streams}
        fetched = await connection.fetch(
            [FetchPartition(*place, offset, PARTITION_BYTES_MAX) for place, (_, offset) in asked.items()],
            wait_max_ms,
            FETCH_BYTES_MAX,
        )
        now = monotonic()
        connections: set[LinkConnection] = set()
        for part in fetched:
            place = (part.topic_id, part.partition)
            stream, offset = asked[place]
            # Meanwhile the stream may have ended, and another one of the partition may have begun elsewhere in the log.
            if self._streams.get(place) is stream and stream.next_offset == offset:
                self._take(stream, part, now)
                connections.add(stream.connection)
        for peer in connections:
            await peer.writable()

    def _take(self, stream: LeaderStream, part: Fetched, now: float) -> None:
        if part.error_code:
            self._refused(stream, part)
            return
        stream.saw_end(part.high_watermark, now)
        end, next_offset = 0, stream.next_offset
        try:
            for _, batch_end, header in walk(part.records):
                end, next_offset = batch_end, header.next_offset
        except BatchError as error:
            self._end.stop_stream(stream, "UNSUPPORTED_MESSAGE_FORMAT", str(error), stream.acked, STOPPED_RETRY_S)
            return
        if end or stream.told_end != stream.source_end:
            stream.told_end = stream.source_end
            stream.connection.send(
                link.encode_append_head(stream.stream_id, stream.source_end, stream.age_ms(now), end),
                part.records[:end],
            )
        if end:
            stream.sent(next_offset, end)
        was_behind, stream.behind = stream.behind, next_offset < part.high_watermark
        if was_behind is not stream.behind:
            self._wake[stream.behind].set()

    def _refused(self, stream: LeaderStream, part: Fetched) -> None:
        if part.error_code == OFFSET_OUT_OF_RANGE:
            if part.log_start > stream.next_offset:
                code, message = (
                    "SOURCE_LOG_START_AHEAD",
                    f"the source's log starts at {part.log_start}, the follower's ends at {stream.next_offset}: head "
                    "gaps are not copied yet",
                )
            else:
                code, message = (
                    "UNEXPECTED_TRUNCATION",
                    f"the follower's log ends at {stream.next_offset}, beyond the source's {part.high_watermark}",
                )
            self._end.stop_stream(stream, code, message, stream.acked, STOPPED_RETRY_S)
        elif part.error_code in _RESOLVE_AGAIN:
            self._end.stop_stream(
                stream,
                "SOURCE_UNAVAILABLE",
                f"the broker answered error {part.error_code}",
                stream.acked,
                REOPEN_DELAY_S,
            )
        else:
            self._end.stop_stream(
                stream, "SOURCE_ERROR", f"the broker answered error {part.error_code}", stream.acked, STOPPED_RETRY_S
            )
