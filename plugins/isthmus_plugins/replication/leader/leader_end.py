"""The leader end of links: reads this cluster's topics and pushes what is new to the follower ends.

For each partition of a led namespace whose leader this proxy fronts there is one stream to the proxy that fronts the
target partition's leader, and tails read for it (``tail``).

A stream belongs to one leader epoch of the source. Every read names it, so that the log cannot be cut and grow again
unseen between two reads; with a new epoch the stream is opened again, and begins by asking whether the follower's last
batch is still the source's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from isthmus_control.control_state import ControlState
from isthmus_control.model import OffsetsCopy, Role
from isthmus_control.origins import TopicOrigins
from isthmus_control.states import ReasonCode
from isthmus_plugins.api import RequestHook
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, id_as_text
from isthmus_plugins.observers import LinkConfirmed
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.comparison.digests import Verification
from isthmus_plugins.replication.leader.continuity import objection_to, still_in_log, truncated
from isthmus_plugins.replication.leader.discovery import Discovery
from isthmus_plugins.replication.leader.ends_seen import EndsSeen
from isthmus_plugins.replication.leader.lag_without_stream import LagWithoutStream
from isthmus_plugins.replication.leader.origins import LeaderOrigins
from isthmus_plugins.replication.leader.stream import REOPEN_DELAY_S, STOPPED_RETRY_S, Flow, LeaderStream
from isthmus_plugins.replication.leader.tail import Tail
from isthmus_plugins.replication.leader.target_topics import HoldsFromFirst
from isthmus_plugins.replication.leader.tombstone_window import TombstoneWindow
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import UNKNOWN_METHOD, LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part, not_joined
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.logs.topic_settings import copied, is_compacted
from isthmus_plugins.replication.offsets_topic.keyring import KeyringFile
from isthmus_plugins.replication.offsets_topic.leaving import OffsetsSource
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.traffic import Place, Traffic
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import link
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.producer_ids import carry
from isthmus_protocol.records import BatchHeader, Frame

log = logging.getLogger("isthmus_plugins.replication")

POLICY_KNOWN_S: Final = 5.0
"""How long a topic's cleanup policy is taken to be what it was."""
OPENING_AT_ONCE: Final = 200
"""What they ask of brokers goes together."""
OFFSET_MAX: Final = 2**63 - 1


class Stopped(NamedTuple):
    """Why a partition has no stream, and when it may have one again.

    It stays while the next stream has not come further than the one before it.
    """

    code: str
    message: str
    retry_at: float
    topic_id: bytes
    """Of the topic that it is about: it says nothing of another one that takes its name."""


class LeaderEnd(Part):
    """All partitions that are led over links on the brokers that this proxy fronts."""

    def __init__(self, context: PluginContext, peers: LinkPeers, verification: Verification, traffic: Traffic) -> None:
        self._context = context
        self._traffic = traffic
        self._clock = context.clock
        self._peers = peers
        self._verification = verification
        self._tasks = Tasks("leader-end", context.supervision)
        self._said_stopped = rare_lines(log, "stream stopped", logging.INFO)
        self._stream_ids = itertools.count(1)
        self._streams: dict[LinkPartition, LeaderStream] = {}
        self._by_id: dict[tuple[LinkConnection, int], LeaderStream] = {}
        """Those and the ones that are being opened: the follower may end a stream as soon as it has opened it."""
        self._opening: set[LinkPartition] = set()
        self._tails: dict[tuple[int, str], Tail] = {}
        self._flows: dict[LinkConnection, Flow] = {}
        self._tombstone_windows: dict[tuple[LinkPartition, bytes], TombstoneWindow] = {}
        """By partition and topic id."""
        self._limit = asyncio.Semaphore(OPENING_AT_ONCE)
        self._origins = LeaderOrigins(context, self._tasks)
        self._origins_seen: Mapping[str, TopicOrigins] = {}
        self.stopped: dict[LinkPartition, Stopped] = {}
        self.discovery = Discovery(
            context,
            peers,
            self._reconcile,
            self._open_missing,
            lambda *asked: self.holds_from_first(*asked),
            self._origins.begin,
        )
        self.holds_from_first: HoldsFromFirst = not_joined
        self.on_confirmed: Callable[[LeaderStream], None] = not_joined
        """Called when a stream was opened, and when its follower has more."""
        self.on_gone: Callable[[LeaderStream], None] = not_joined
        """Called when the source's broker says that it does not have the partition of a stream."""
        self.may_pass: Callable[[LeaderStream, BatchHeader, Frame, bool], bool] = not_joined
        """Whether a transactional batch may be sent; the last says whether as a plain one. Asked again after
        :meth:`resume_tails`."""
        self.offsets_source = OffsetsSource(KeyringFile(context.offsets_keyring_file))
        self.lag_without_stream = LagWithoutStream(context, self._without_stream)
        self._ends_seen = EndsSeen(context, self._streams.values)

    def start(self) -> None:
        self.discovery.start()
        self.lag_without_stream.start()
        self._ends_seen.start()

    async def stop(self) -> None:
        await self._ends_seen.stop()
        await self.lag_without_stream.stop()
        await self.discovery.stop()
        await self._tasks.close()
        for tail in self._tails.values():
            await tail.stop()

    def hooks(self) -> Sequence[RequestHook]:
        return self.discovery.hooks()

    def answers(self) -> Sequence[Answering]:
        return (calls.EndedTransactions.by(self.ended_transactions),)

    def stream(self, key: LinkPartition) -> LeaderStream | None:
        return self._streams.get(key)

    def stream_of(self, connection: LinkConnection, stream_id: int) -> LeaderStream | None:
        """The stream of that number over a connection, once it is open."""
        stream = self._by_id.get((connection, stream_id))
        return stream if stream is not None and self._streams.get(stream.key) is stream else None

    def _without_stream(self) -> dict[LinkPartition, bytes]:
        discovery = self.discovery
        return {key: discovery.topic_ids[key.topic] for key in discovery.led if key not in self._streams}

    def wake(self) -> None:
        """Something changed: links, connections, topics."""
        self.discovery.wake()

    # ---- a stream for each led partition ----

    def _reconcile(self, topics: Mapping[str, TopicInfo]) -> bool:
        """Have a stream for each partition that was found to be led, and no other; whether they are all open."""
        led, truncating = self.discovery.led, self._context.control.state.truncations
        for key, why in list(self.stopped.items()):
            if key not in led or key.topic in truncating or topics[key.topic].topic_id != why.topic_id:
                del self.stopped[key]
        self._learn_retention(topics)
        self._keep(topics)
        self._open_missing(led)
        return self._streams.keys() == led.keys()

    def _open_missing(self, keys: Iterable[LinkPartition]) -> None:
        """Open streams for those of these led partitions that have none, and are not to wait."""
        now = self._clock.monotonic()
        for key in keys:
            if key not in self._streams and key not in self._opening:
                stopped = self.stopped.get(key)
                if stopped is None or stopped.retry_at <= now:
                    self._open(key, self.discovery.topics[key.topic])

    def _learn_retention(self, topics: Mapping[str, TopicInfo]) -> None:
        """Keep what is known of led partitions true, also while the link is away; forget the others."""
        led = self.discovery.led
        for place, tombstone_window in list(self._tombstone_windows.items()):
            (key, topic_id), topic = place, topics.get(place[0].topic)
            if key not in led or topic is None or topic.topic_id != topic_id:
                del self._tombstone_windows[place]
            else:
                tombstone_window.learn(self.discovery.configs_of(topic))

    def _copy(self, key: LinkPartition) -> OffsetsCopy | None:
        """The form in which a partition of the offsets topic leaves now; None for other topics."""
        if key.topic != OFFSETS_TOPIC:
            return None
        link_ = self._context.control.state.links.get(key.link)
        mapping = link_.offsets_topic(Role.LEADER) if link_ is not None else None
        return mapping.offsets if mapping is not None else None

    def _keep(self, topics: Mapping[str, TopicInfo]) -> None:
        """Close the streams of what is not led any more, or is led elsewhere or by another epoch."""
        for stream in list(self._streams.values()):
            why = self._why_ended(stream, topics)
            if why is None:
                self._read_committed(stream, topics[stream.key.topic])
            else:
                self._close(stream, why)

    def _why_ended(self, stream: LeaderStream, topics: Mapping[str, TopicInfo]) -> tuple[str, str] | None:
        """Why a stream is not one that is to be pushed over any more (code, message); None: it is."""
        key, topic = stream.key, topics.get(stream.key.topic)
        if key.topic in self._context.control.state.truncations:
            return ReasonCode.SOURCE_TRUNCATING, reasons.source_truncating(key.topic, stream.remote_topic)
        if topics and (topic is None or topic.topic_id != stream.topic_id):
            return ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED, reasons.deleted(key.topic, stream.remote_topic)
        if topic is not None and key in self.discovery.led and not stream.connection.lost:
            info = topic.partitions[key.partition]
            led_as_before = stream.broker_id == info.leader and stream.leader_epoch == info.leader_epoch
            if led_as_before and stream.copy == self._copy(key):
                return None
        return reasons.CLOSED, "the leader end does not push it any more, or over another stream"

    def _read_committed(self, stream: LeaderStream, topic: TopicInfo) -> None:
        """Read a topic as a compacted one from when it has become that. What was one once may lack markers for ever."""
        configs = self.discovery.configs_of(topic)
        if not stream.compacted and configs is not None and is_compacted(configs):
            stream.compacted = stream.read_committed = True
            self._tails[stream.broker_id, stream.key.link].stir(stream)

    def _close(self, stream: LeaderStream, why: tuple[str, str] | None = None) -> None:
        """End a stream; ``why`` (code, message) is sent to the follower."""
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key]
            self.discovery.unsettle()
            self.lag_without_stream.heard(stream)
        self._by_id.pop((stream.connection, stream.stream_id), None)
        stream.connection.drop_stream(stream.stream_id)
        stream.closed()
        tail = self._tails.get((stream.broker_id, stream.key.link))
        if tail is not None:
            tail.remove(stream)
        self.resume_tails(stream.key.link)
        if why is not None and not stream.connection.lost:
            self._tasks.start("close", self._report_closed(stream, *why))

    async def _report_closed(self, stream: LeaderStream, code: str, message: str) -> None:
        try:
            await stream.connection.call(calls.CloseStream(stream.stream_id, code, message))
        except (LinkRejected, LinkLost, TimeoutError):
            pass  # the follower end learns it from the connection, or from the next stream of the partition

    # ---- streams ----

    def _open(self, key: LinkPartition, topic: TopicInfo) -> None:
        prepared = self.discovery.led[key]
        info = topic.partitions[key.partition]
        if info.leader < 0:
            self._note(key, topic.topic_id, ReasonCode.NO_LOCAL_LEADER, "the source partition has no leader")
            return
        if prepared is None or not prepared.ready or key.partition >= len(prepared.leaders):
            return
        connection = self._peers.fronting(key.link, prepared.leaders[key.partition])
        if connection is None:
            if self._peers.connections(key.link):
                self._note(
                    key,
                    topic.topic_id,
                    reasons.NOT_LEADER,
                    f"no proxy of the other cluster that is connected fronts broker {prepared.leaders[key.partition]}, "
                    "which leads the partition there",
                )
            return
        stream = LeaderStream(
            key,
            topic.topic_id,
            prepared.remote_topic,
            info.leader,
            info.leader_epoch,
            connection,
            next(self._stream_ids),
            self._flows.setdefault(connection, Flow(connection.round_trip_s)),
            self._clock,
            self._copy(key),
            self._tombstone_windows.setdefault((key, topic.topic_id), TombstoneWindow()),
        )
        stream.count = partial(self._traffic.add, Place(key.link, Role.LEADER, key.topic, key.partition))
        self._opening.add(key)
        self._tasks.start(f"open-{key.topic}-{key.partition}", self._open_or_say_why(stream))

    def _note(self, key: LinkPartition, topic_id: bytes, code: str, message: str, retry_s: float = 0.0) -> None:
        """Why a partition has no stream now; a reason that somebody must remove is kept as long as it may hold."""
        before = self.stopped.get(key)
        retry_at = self._clock.monotonic() + retry_s
        kept = before is not None and before.topic_id == topic_id and reasons.waiting_state(before.code)
        if before is not None and kept and not reasons.waiting_state(code):
            self.stopped[key] = before._replace(retry_at=retry_at)
        else:
            self.stopped[key] = Stopped(code, message, retry_at, topic_id)

    async def _open_or_say_why(self, stream: LeaderStream) -> None:
        try:
            await self._opened(stream)
        except Exception as error:  # a bug of ours: nobody would read the stream, and it would stand in the way
            self._note(stream.key, stream.topic_id, ReasonCode.INTERNAL_ERROR, repr(error), STOPPED_RETRY_S)
            self._close(stream, (reasons.CLOSED, "the leader end could not go on"))
            raise

    async def _opened(self, stream: LeaderStream) -> None:
        key, place = stream.key, (stream.connection, stream.stream_id)
        self._by_id[place] = stream
        try:
            async with self._limit:
                source_topic_id = id_as_text(stream.topic_id)
                origins = await self._origins.opening(stream)
                answer = await stream.connection.call(
                    calls.OpenStream(stream.stream_id, stream.remote_topic, source_topic_id, key.partition, origins)
                )
                if answer.epoch > stream.leader_epoch:  # its log may be shorter than the real one
                    raise BrokerUnavailable(
                        f"broker {stream.broker_id} leads with epoch {stream.leader_epoch}, and the follower has "
                        f"records of epoch {answer.epoch}"
                    )
                stream.opened(answer.end_offset)
                self.lag_without_stream.heard(stream)
                empty = answer.start_offset == stream.acked
                stream.tombstone_window.opened(stream.acked, empty, stream.leader_epoch, self._clock.monotonic())
                stream.compacted = stream.read_committed = await self._compacts(key.topic, stream.topic_id)
                objection = await objection_to(self._context, self._verification, stream, answer)
        except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            if isinstance(error, LinkRejected):
                code = error.code
            elif isinstance(error, LinkLost):
                code = reasons.LINK_LOST
            else:
                code = ReasonCode.TIMEOUT_ERROR if isinstance(error, TimeoutError) else reasons.SOURCE_UNAVAILABLE
            if code == reasons.NOT_LEADER:
                self.discovery.prepare_again(key.link, key.topic)
            self._note(
                key, stream.topic_id, code, str(error) or "the other cluster did not answer in time", REOPEN_DELAY_S
            )
            may_be_open = isinstance(error, BrokerUnavailable | KafkaRefused | TimeoutError)
            self._close(stream, (reasons.CLOSED, "the leader end could not go on") if may_be_open else None)
            return
        finally:
            self._opening.discard(key)
        if self._by_id.get(place) is not stream:
            return  # the follower has ended it
        if objection is not None:
            before = self.stopped.get(key)
            if before is not None and before.code in reasons.DIFFER and objection[0] in reasons.DIVERGED:
                objection = before.code, before.message  # what was found first says more
            waiting = reasons.waiting_state(objection[0]) is not None
            self.stop_stream(stream, *objection, STOPPED_RETRY_S if waiting else REOPEN_DELAY_S)
            return
        if (why := self._why_ended(stream, self.discovery.topics)) is not None:  # looks close those that are open alone
            self._close(stream, why)
            return
        before = self.stopped.get(key)
        if before is not None and reasons.waiting_state(before.code) is None:
            del self.stopped[key]
        self._streams[key] = stream
        before_it = self.lag_without_stream.of(key)
        stream.lacking_since = before_it.since if before_it is not None else None
        self.lag_without_stream.followed(key)
        self.on_confirmed(stream)
        reader = (stream.broker_id, key.link)
        tail = self._tails.get(reader)
        if tail is None:
            tail = self._tails[reader] = Tail(self, self._context, *reader)
        tail.add(stream)

    async def _compacts(self, topic: str, topic_id: bytes) -> bool:
        """Whether the cleaner compacts a topic, or did. Raises BrokerUnavailable, KafkaRefused."""
        lately = self.discovery.configs_lately(topic, topic_id, POLICY_KNOWN_S)
        return await self._verification.compacts(topic, topic_id, lately)

    async def ended_transactions(
        self, connection: LinkConnection, question: calls.EndedTransactions
    ) -> calls.EndedTransactionsAnswer:
        """Which of the follower's open transactions have no records left in the source's log before a gap.

        The cleaner works below the last stable offset, so each of them has ended; and it takes a marker out only after
        the last record of its transaction. One that has records left still has its marker, too.
        """
        stream = self._by_id.get((connection, question.stream))
        if stream is None:
            raise LinkRejected(reasons.CLOSED, "the stream was closed")
        state = self._context.control.state
        ranges = state.producer_id_ranges
        own, remote = ranges[self._context.cluster_id], ranges[state.links[stream.key.link].remote_cluster_id]
        began = dict(question.began)
        left = await still_in_log(
            self._context,
            stream.key.topic,
            stream.topic_id,
            stream.key.partition,
            stream.broker_id,
            stream.leader_epoch,
            began,
            question.before,
            lambda producer_id: carry(producer_id, own, remote),
        )
        return calls.EndedTransactionsAnswer(tuple(producer_id for producer_id in began if producer_id not in left))

    def on_appended(self, connection: LinkConnection, appended: link.Appended) -> None:
        """The follower has everything of a stream up to an offset."""
        stream = self._by_id.get((connection, appended.stream))
        if stream is None:
            return
        waited = stream.wait
        if appended.end_offset > stream.acked:
            self._went_on(stream.key)
            if self._context.link_observers:
                self._observe(stream, appended.end_offset)
        stream.confirmed(appended.end_offset)
        self.on_confirmed(stream)
        stream.tombstone_window.confirmed(stream.acked)
        if stream.blocked is not None and stream.acked >= stream.next_offset:
            stream.blocked()
        elif waited is not None and stream.wait is None:
            self.resume_tails(stream.key.link)

    def _observe(self, stream: LeaderStream, end_offset: int) -> None:
        link_ = self._context.control.state.links.get(stream.key.link)
        remote = "" if link_ is None else link_.remote_cluster_id
        sent_at = stream.sent_at(end_offset)
        took_s = None if sent_at is None else self._clock.monotonic() - sent_at
        self._context.link_observers.confirmed(
            LinkConfirmed(stream.key.link, remote, *stream.key.place, stream.acked, end_offset, took_s)
        )

    def on_writable(self, connection: LinkConnection) -> None:
        """A peer that was slow takes more."""
        self.resume_tails(connection.link_name)

    def resume_tails(self, link_name: str) -> None:
        """Streams of a link may be read on."""
        for (_, name), tail in self._tails.items():
            if name == link_name:
                tail.resume()

    def _went_on(self, key: LinkPartition) -> None:
        self.stopped.pop(key, None)

    def caught_up(self, stream: LeaderStream) -> None:
        """The follower has all that the source has."""
        if stream.key in self.stopped:
            self._went_on(stream.key)

    def on_stopped(self, connection: LinkConnection, stopped: link.Stopped) -> None:
        """The follower end takes no more of a stream."""
        stream = self._by_id.get((connection, stopped.stream))
        if stream is None:
            return
        code, message = stopped.code, stopped.message
        stream.acked = stream.acked if stopped.end_offset is None else stopped.end_offset
        waiting = reasons.waiting_state(code) is not None
        if not waiting:
            self.discovery.prepare_again(stream.key.link, stream.key.topic)
        self.stop_stream(stream, code, message, STOPPED_RETRY_S if waiting else REOPEN_DELAY_S, report=False)

    def stop_stream(self, stream: LeaderStream, code: str, message: str, retry_s: float, report: bool = True) -> None:
        """End a stream for a reason, notify the follower if it does not know, and try again after ``retry_s``."""
        if stream.key.topic in self._context.control.state.truncations:  # the log that was read is not whole any more
            code = ReasonCode.SOURCE_TRUNCATING
            message = reasons.source_truncating(stream.key.topic, stream.remote_topic)
        before = self.stopped.get(stream.key)
        if before is None or before.code != code:
            said = {**stream.key._asdict(), "offset": stream.acked, "code": str(code), "detail": message}
            self._said_stopped.one(f"{stream.key} {code}", said)
        self._note(stream.key, stream.topic_id, code, message, retry_s)
        self._close(stream, (code, message) if report else None)
        self.wake()

    def block(self, stream: LeaderStream, end: Callable[[], None]) -> None:
        """Read no further, and ``end`` the stream as soon as the follower has all before."""
        if stream.acked >= stream.next_offset:
            end()
        else:
            stream.blocked = end

    def doubt(self, stream: LeaderStream, until: int) -> None:
        """Report to the follower that it may lack deletions before ``until``, and read on when it has recorded that."""
        stream.doubting = True
        self._tasks.start(f"doubt-{stream.key.topic}-{stream.key.partition}", self._doubt(stream, until))

    async def _doubt(self, stream: LeaderStream, until: int) -> None:
        if await self._done_before_more(stream, self._report_doubt(stream, until)):
            stream.doubting = False
            self.resume_tails(stream.key.link)

    async def _report_doubt(self, stream: LeaderStream, until: int) -> None:
        topic = stream.key.topic
        _, effective = await self._context.cluster.effective_configs([topic])
        stream.tombstone_window.learn(copied((effective or {}).get(topic, {})))
        if not stream.tombstone_window.late(self._clock.monotonic()):
            return
        try:
            await stream.connection.call(calls.DoubtDeletions(stream.stream_id, until))
        except LinkRejected as error:
            if error.code != UNKNOWN_METHOD:
                raise
            until = OFFSET_MAX  # a peer of a version before this one cannot look after it
        stream.doubted = until

    async def _done_before_more(self, stream: LeaderStream, work: Awaitable[None]) -> bool:
        """Whether something was done before more of a stream is sent; where it fails the stream ends."""
        try:
            await work
        except LinkRejected as error:
            self._stop_if_current(stream, error.code, str(error))
            return False
        except (LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            self._stop_if_current(stream, reasons.SOURCE_UNAVAILABLE, str(error) or "the peer did not answer in time")
            return False
        except Exception as error:
            self._stop_if_current(stream, ReasonCode.INTERNAL_ERROR, repr(error))
            raise
        return True

    def control_changed(self, state: ControlState) -> None:
        if state.origins is not self._origins_seen:
            self._origins_seen = state.origins
            for stream in self._streams.values():
                stream.look_again()
        self.discovery.control_changed(state)

    def knows_origins(self, stream: LeaderStream, header: BatchHeader) -> bool:
        """Whether the follower was told where the next batch comes from; if not it is, and then the stream goes on."""
        if stream.telling:
            return False
        if self._origins.are_known(stream, header):
            return True
        stream.telling = True
        self._tasks.start(f"origins-{stream.key.topic}-{stream.key.partition}", self._tell_origins(stream, header))
        return False

    async def _tell_origins(self, stream: LeaderStream, header: BatchHeader) -> None:
        if await self._done_before_more(stream, self._origins.tell(stream, header)):
            stream.telling = False
            self.resume_tails(stream.key.link)

    def _stop_if_current(self, stream: LeaderStream, code: str, message: str) -> None:
        if self._streams.get(stream.key) is stream:
            self.stop_stream(stream, code, message, REOPEN_DELAY_S)

    def out_of_range(self, stream: LeaderStream) -> None:
        """The source has no such offset: find out what it has, and go on there or stop."""
        stream.seeking = True
        self._tasks.start(f"range-{stream.key.topic}-{stream.key.partition}", self._out_of_range(stream))

    async def _out_of_range(self, stream: LeaderStream) -> None:
        key, offset = stream.key, stream.next_offset
        try:
            log_start = await self._context.cluster.log_start(key.topic, key.partition)
            log_end = await self._context.cluster.log_end(key.topic, key.partition)
        except (BrokerUnavailable, KafkaRefused) as error:
            if self._streams.get(key) is stream:
                self.stop_stream(stream, reasons.SOURCE_UNAVAILABLE, str(error), REOPEN_DELAY_S)
            return
        if self._streams.get(key) is not stream:
            return
        if log_start > offset:
            log.info(
                "source log starts later",
                extra={"topic": key.topic, "partition": key.partition, "offset": log_start, "from": offset},
            )
            stream.seek(log_start)
            self.resume_tails(key.link)
        elif log_end < offset:
            stream.source_end = log_end
            self.stop_stream(stream, *truncated(offset, log_end), STOPPED_RETRY_S)
        else:
            self.stop_stream(stream, reasons.SOURCE_UNAVAILABLE, f"offset {offset} was out of range", REOPEN_DELAY_S)

    def connection_lost(self, connection: LinkConnection) -> None:
        """Streams of a connection that is gone end; they are opened again over the next one."""
        for stream in [stream for stream in self._streams.values() if stream.connection is connection]:
            self._close(stream)
        self._flows.pop(connection, None)
        self.wake()
