"""The leader end of group offsets: reads this cluster's offsets topic, and pushes to follower ends what is committed.

For each partition of ``__consumer_offsets`` whose leader this proxy fronts there is a :class:`Source`: what the log
adds up to for the groups of led namespaces, read from the log's start in one leader epoch. For each link there is one
:class:`Feed` over one connection: first the whole of each partition, then what changed, newest state only, one call at
a time. What a call carried is the follower end's to keep until the connection ends; then all is pushed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from isthmus_control.directions import pushed
from isthmus_control.model import (
    Link,
    NamespaceMapping,
    ResourceType,
    leads_commits,
    local_name,
    overlap,
    remote_name,
)
from isthmus_control.truncations import WITHHELD
from isthmus_plugins.cluster import BrokerUnavailable, FetchConnection, Fetched, FetchPartition, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.groups.feed import Checked, Feed, LedGroup
from isthmus_plugins.replication.groups.pushed_partition import PushedPartition
from isthmus_plugins.replication.groups.source import Source
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import CALL_TIMEOUT_S, LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import NEGATIVE_OFFSETS, SOURCE_LOSSES
from isthmus_plugins.replication.link.part import Part, not_joined
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.partitions import LinkPartition, OrderedPlace, SyncPlace
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.error_codes import OFFSET_OUT_OF_RANGE
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, Group, OffsetKey, OffsetsLog
from isthmus_protocol.records import BatchError, BatchHeader, Frame, walk

log = logging.getLogger("isthmus_plugins.replication")

DISCOVERY_INTERVAL_S: Final = 1.0
"""How often the offsets topic's leaders are looked at, where group namespaces are led."""
TAIL_WAIT_MS: Final = 2000
"""An idle cluster costs one read a broker in this time."""
GATHER_S: Final = 0.05
"""After a read that found something: what comes meanwhile is read together, since each read names every partition."""
FETCH_BYTES_MAX: Final = 1024 * 1024
PARTITION_BYTES_MAX: Final = 256 * 1024
OFFSETS_AT_ONCE: Final = 2000
"""In one call."""
CALLS_AT_ONCE: Final = 64
"""Calls to one follower end of a synchronous link that are not answered; each takes a round trip."""
PENDING_INTERVAL_S: Final = 1.0
RETRY_DELAY_S: Final = 0.5
BROKEN_RETRY_S: Final = 10.0
LANE: Final = "group-offsets"
NO_EPOCH: Final = -1
NOTHING: Final = (NO_EPOCH, -1)


class GroupLeader(Part):
    """The groups that are led over links, as far as this proxy fronts their coordinators."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._tasks = Tasks("group-leader", context.supervision)
        self._untold = rare_lines(log, "group offsets not told")
        self._changed = asyncio.Event()
        self._wanted: tuple[NamespaceMapping, ...] = ()
        """Led group namespaces of all links: what the logs were read for."""
        self._topic_id = b""
        self._partitions = 0
        self._sources: dict[int, Source] = {}
        self._tails: dict[int, asyncio.Event] = {}
        self._feeds: dict[str, Feed] = {}
        self._confirmed: dict[tuple[str, int], tuple[int, int]] = {}
        """By id of the link and partition: up to where it was confirmed last, in which leader epoch."""
        self.on_confirmed: Callable[[SyncPlace], None] = not_joined
        """Called when a follower end of a synchronous link has more."""
        self.pushed = asyncio.Event()
        """Set when more is pushed to a follower end; who waits for it clears it."""
        self.may_pass: Callable[[OrderedPlace, BatchHeader, Frame], bool] = not_joined
        """Whether a transactional batch may be pushed now. Asked again after :meth:`resume`."""
        self.error: str | None = None
        """Why the offsets topic cannot be found."""

    def start(self) -> None:
        self._tasks.keep("reconcile", self._reconcile_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def answers(self) -> Sequence[Answering]:
        return (calls.GroupApplied.by(self.on_applied), calls.PartitionEnds.by(self.on_partition_ends))

    def wake(self) -> None:
        """Links, namespaces or connections changed."""
        self._changed.set()

    # ---- what synchronous links confirm ----

    @property
    def partitions(self) -> int:
        """Of the offsets topic; 0 while it is not known."""
        return self._partitions

    @property
    def topic_id(self) -> bytes:
        """Of the offsets topic; empty while it is not known."""
        return self._topic_id

    def places(self) -> Iterator[LinkPartition]:
        """The partitions whose groups are led over synchronous links, as far as this proxy fronts their leaders."""
        for link in self._leading().values():
            if leads_commits(link):
                for partition in self._sources:
                    yield LinkPartition(link.name, OFFSETS_TOPIC, partition)

    def place(self, key: LinkPartition) -> SyncPlace | None:
        """One of them, from when its follower had all of it once."""
        feed, source = self._feeds.get(key.link), self._sources.get(key.partition)
        if feed is None or source is None or not self._is_current(feed):
            return None
        fed = feed.fed.get(source)
        return fed if fed is not None and fed.acked >= 0 else None

    def confirmed(self, key: LinkPartition) -> int:
        """Up to where the other side has a partition that is about to be pushed anew, -1 if that is not known."""
        feed, source = self._feeds.get(key.link), self._sources.get(key.partition)
        checked = None if feed is None else feed.checked
        return checked.confirmed if checked is not None and checked.source is source else -1

    def leader_epoch(self, partition: int) -> int:
        """Under which a partition of the offsets topic is read, -1 for none."""
        source = self._sources.get(partition)
        return -1 if source is None else source.leader_epoch

    def read_end(self, partition: int) -> int:
        """Up to where a partition of the offsets topic is read, -1 for not at all."""
        source = self._sources.get(partition)
        return -1 if source is None else source.read_offset

    async def on_applied(self, connection: LinkConnection, question: calls.GroupApplied) -> calls.Done:
        """The other side's coordinators have what partitions add up to at these offsets."""
        feed = self._feeds.get(connection.link_name)
        if feed is not None and feed.connection is connection and self._is_current(feed):
            for partition, epoch, upto in question.parts:
                source = self._sources.get(partition)
                fed = feed.fed.get(source) if source is not None and source.leader_epoch == epoch else None
                if fed is not None:
                    fed.confirmed(upto)
                    self._confirmed[feed.link_id, partition] = epoch, fed.acked
                    self.on_confirmed(fed)
        return calls.Done()

    async def on_partition_ends(
        self, connection: LinkConnection, question: calls.PartitionEnds
    ) -> calls.PartitionEndsAnswer:
        """Where logs of led topics end, whatever their high watermarks are yet."""
        link = self._context.control.state.links.get(connection.link_name)
        for topic, _ in question.partitions:
            if link is None or remote_name(link.mappings, ResourceType.TOPIC, topic) is None:
                raise LinkRejected("UNKNOWN_RESOURCE", f"{topic} is in no namespace of this link here")
        found = await self._context.cluster.log_ends([(each.topic, each.partition) for each in question.partitions])
        return calls.PartitionEndsAnswer(tuple(calls.PartitionEnd(*place, end) for place, end in found.items()))

    def _is_current(self, feed: Feed) -> bool:
        """Whether what a feed pushes is what the link's namespaces ask for now."""
        link = self._context.control.state.links.get(feed.link_name)
        return link is not None and feed.mappings == link.mappings and not feed.connection.lost

    def groups(self, link: Link) -> Iterator[LedGroup]:
        """The led groups of a link that this proxy knows."""
        feed = self._feeds.get(link.name)
        mapped = feed if feed is not None and feed.mappings == link.mappings else None
        named: set[str] = set()
        for source in self._sources.values():
            for name, group in source.offsets_log.groups.items():
                remote = remote_name(link.mappings, ResourceType.CONSUMER_GROUP, name)
                if remote is not None:
                    named.add(remote)
                    yield self._led_group(link, name, remote, group, source, mapped)
        for remote, waiting in (mapped.pending if mapped is not None else {}).items():
            local = local_name(link.mappings, remote)
            if remote not in named and local is not None:  # deleted here, and not yet there
                yield LedGroup(local, remote, None, 0, (), (), waiting, None, None)

    def _led_group(
        self, link: Link, name: str, remote: str, group: Group, source: Source, feed: Feed | None
    ) -> LedGroup:
        unmapped = {
            topic for topic, _ in group.offsets if remote_name(link.mappings, ResourceType.TOPIC, topic) is None
        }
        problems = [f"{topic}-{partition}: {what}" for (topic, partition), what in sorted(group.unreadable.items())]
        changed = None if feed is None else feed.pushed.get(source)
        changed_at = None if changed is None else tuple(read for key, read in changed.items() if key.group == name)
        return LedGroup(
            name,
            remote,
            None if group.kind is None else group.kind.value,
            sum(topic not in unmapped for topic, _ in group.offsets),
            tuple(sorted(unmapped)),
            changed_at,
            None if feed is None else feed.pending.get(remote),
            source.problem or "; ".join(problems) or None,
            source.partition,
        )

    def warnings(self) -> list[str]:
        """What keeps this proxy from knowing all that groups have committed."""
        found = [
            f"{OFFSETS_TOPIC}-{source.partition} has records of {what}, the last at offset {offset}, which this "
            "version does not know: upgrade the proxies"
            for source in self._sources.values()
            for what, offset in source.offsets_log.unknown.items()
        ]
        return found if self.error is None else [*found, f"{OFFSETS_TOPIC} cannot be found: {self.error}"]

    # ---- what should be, and making it so ----

    async def _reconcile_for_ever(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._reconcile()
                self.error = None
            except (BrokerUnavailable, KafkaRefused) as error:
                if self.error is None:
                    log.warning("offsets topic not found", extra={"detail": str(error)})
                self.error = str(error)
            try:
                async with asyncio.timeout(DISCOVERY_INTERVAL_S if self._wanted else None):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _leading(self) -> dict[str, Link]:
        return {
            link.name: link
            for link in self._context.control.state.links.values()
            if pushed(link, ResourceType.CONSUMER_GROUP)
        }

    async def _reconcile(self) -> None:
        leading = self._leading()
        links = {link.link_id for link in self._context.control.state.links.values()}
        self._confirmed = {key: known for key, known in self._confirmed.items() if key[0] in links}
        wanted = tuple(mapping for link in leading.values() for mapping in pushed(link, ResourceType.CONSUMER_GROUP))
        if wanted != self._wanted:
            self._wanted = wanted
            self._sources.clear()
        # Without a lease another proxy may front these brokers, and push the same groups.
        if not wanted or self._clock.monotonic() >= self._context.lease_deadline:
            self._sources.clear()
            self._keep_feeds({})
            return
        await self._find_sources()
        self._keep_feeds(leading)

    async def _find_sources(self) -> None:
        topic = await self._context.cluster.topic(OFFSETS_TOPIC)
        if topic is None:  # no group was ever used
            self._sources.clear()
            return
        if topic.topic_id != self._topic_id:
            self._topic_id = topic.topic_id
            self._sources.clear()
        self._partitions = len(topic.partitions)
        now = self._clock.monotonic()
        for index, info in enumerate(topic.partitions):
            known = self._sources.get(index)
            if not self._context.fronts(info.leader) or info.leader < 0:
                self._sources.pop(index, None)
            elif (
                known is None
                or (known.broker_id, known.leader_epoch) != (info.leader, info.leader_epoch)
                or (known.problem is not None and known.retry_at <= now)
            ):
                self._sources[index] = Source(index, info.leader, info.leader_epoch, OffsetsLog(self._is_wanted))
        for broker_id in {source.broker_id for source in self._sources.values()}:
            if broker_id not in self._tails:
                self._tails[broker_id] = asyncio.Event()
                self._tasks.keep(f"tail-{broker_id}", partial(self._read_for_ever, broker_id, self._tails[broker_id]))
            self._tails[broker_id].set()

    def _is_wanted(self, group: str) -> bool:
        return any(mapping.remote_name(group) is not None for mapping in self._wanted)

    def _keep_feeds(self, leading: Mapping[str, Link]) -> None:
        for name, feed in list(self._feeds.items()):
            link = leading.get(name)
            if link is None or feed.connection.lost or feed.mappings != link.mappings:
                del self._feeds[name]
                if link is None and not feed.connection.lost:
                    self._tasks.start(f"end-{name}", self._end(feed.connection, None))
                feed.wake.set()
        for name, link in leading.items():
            connections = self._peers.connections(name)
            if name not in self._feeds and connections:
                feed = self._feeds[name] = Feed(link, connections[0])
                self._tasks.keep(f"feed-{name}", partial(self._feed_for_ever, feed))
                self._tasks.keep(f"pending-{name}", partial(self._ask_for_ever, feed))
        for name, feed in self._feeds.items():
            confirms = leads_commits(leading[name])
            if confirms is not feed.confirms:
                feed.confirms = confirms
                feed.pushed.clear()
                feed.fed.clear()
                feed.checked = None
            feed.wake.set()

    async def _end(self, connection: LinkConnection, partitions: tuple[int, ...] | None) -> None:
        """Notify a follower end that no more is pushed of these partitions (None: of any)."""
        try:
            await connection.call(calls.EndGroupOffsets(partitions))
        except (LinkRejected, LinkLost, TimeoutError):
            pass  # it learns it from the connection, or from whoever pushes them now

    # ---- reading ----

    async def _read_for_ever(self, broker_id: int, wake: asyncio.Event) -> None:
        turn = 0
        while True:
            wake.clear()
            now = self._clock.monotonic()
            sources = [
                source
                for source in self._sources.values()
                if source.broker_id == broker_id and source.problem is None and source.retry_at <= now
            ]
            if not sources:
                await wake.wait()
                continue
            turn = (turn + 1) % len(sources)
            connection: FetchConnection | None = None
            try:
                connection = await self._context.cluster.fetch_connection(broker_id, LANE)
                if await self._read(connection, sources[turn:] + sources[:turn]):
                    await asyncio.sleep(GATHER_S)
            except (BrokerUnavailable, KafkaRefused) as error:
                log.warning("offsets topic not read", extra={"broker": broker_id, "detail": str(error)})
                if connection is not None:
                    connection.close()
                self.wake()
                await asyncio.sleep(RETRY_DELAY_S)

    async def _read(self, connection: FetchConnection, sources: list[Source]) -> bool:
        """One read; whether to pause: it found what the follower ends lack, or less than there is to be read."""
        asked = {source.partition: source for source in sources}
        await self._read_ends([source for source in sources if source.log_end is None])
        loaded = all(source.loaded for source in sources)
        fetched = await connection.fetch(
            [
                FetchPartition(
                    self._topic_id, source.partition, source.read_offset, PARTITION_BYTES_MAX, source.leader_epoch
                )
                for source in sources
            ],
            TAIL_WAIT_MS if loaded else 0,
            FETCH_BYTES_MAX,
            only_changes=loaded,
        )
        now = self._clock.monotonic()
        found = False
        nothing_left = not any(len(part.records) for part in fetched)
        for part in fetched:
            source = asked[part.partition]
            if self._sources.get(part.partition) is not source:
                continue
            if part.error_code:
                await self._refused(source, part)
                continue
            found = self._take(source, part, now) or found
            reached = max(source.next_offset, part.high_watermark if nothing_left else 0)
            if not source.loaded and source.log_end is not None and reached >= source.log_end:
                source.loaded = True
                for feed in self._feeds.values():
                    feed.wake.set()
            await asyncio.sleep(0)  # a long log is read without holding up the sessions
        if not all(source.loaded for source in sources):
            return nothing_left
        return found and not any(feed.confirms for feed in self._feeds.values())

    async def _read_ends(self, sources: list[Source]) -> None:
        if sources:
            ends = await self._context.cluster.log_ends([(OFFSETS_TOPIC, source.partition) for source in sources])
            for source in sources:
                source.log_end = ends.get((OFFSETS_TOPIC, source.partition))

    def _take(self, source: Source, part: Fetched, now: float) -> bool:
        broken: BatchError | None = None
        try:
            for start, end, header in walk(part.records):
                if header.next_offset > source.read_offset:
                    source.waiting.append((bytes(part.records[start:end]), header))
        except BatchError as error:
            broken = error
        self._take_waiting(source, now, broken)
        return bool(len(part.records))

    def _take_waiting(self, source: Source, now: float, broken: BatchError | None = None) -> None:
        """Take what was read, up to a marker that may not be pushed yet; ``broken``: what comes behind it."""
        try:
            self._take_more(source, now, broken)
        except Exception:
            # Half of it may be taken, and lost to feeds: nothing that was read of it counts, it is read from its start.
            if self._sources.get(source.partition) is source:
                del self._sources[source.partition]
            self.wake()
            raise

    def _take_more(self, source: Source, now: float, broken: BatchError | None) -> None:
        changed: set[OffsetKey] = set()
        try:
            while source.waiting:
                batch, header = source.waiting[0]
                if header.is_transactional and not self._may_pass(source, header, batch):
                    break
                changed |= source.offsets_log.take(batch, header)
                source.next_offset = header.next_offset
                source.waiting.popleft()
                if header.is_transactional:
                    source.transactional.append((batch if header.is_control else b"", header))
            if broken is not None and not source.waiting:
                raise broken
        except BatchError as error:
            source.waiting.clear()
            source.problem = (
                f"{OFFSETS_TOPIC}-{source.partition} cannot be read at offset {source.next_offset}: {error}"
            )
            source.retry_at = now + BROKEN_RETRY_S
            log.error("offsets topic not read", extra={"partition": source.partition, "detail": str(error)})
        pending, undone = source.offsets_log.take_pending_news(), source.offsets_log.take_undone()
        for feed in self._feeds.values():
            news, fed = feed.pushed.get(source), feed.fed.get(source)
            if news is not None:
                for key in changed:
                    if feed.remote_group(key.group) is not None and feed.remote_topic(key.topic) is not None:
                        news.setdefault(key, now)
            if fed is not None:
                fed.pending |= pending
                fed.undone = fed.undone or undone
                fed.saw(source.read_offset, now)
            if (news or fed is not None) and not self._push_at_once(feed, source):
                feed.wake.set()

    def _may_pass(self, source: Source, header: BatchHeader, batch: Frame) -> bool:
        """Whether a transactional batch may be pushed over all links that confirm."""
        fed = [fed for feed in self._feeds.values() if (fed := feed.fed.get(source)) is not None]
        return all(self.may_pass(each, header, batch) for each in fed)

    def resume(self, partition: int) -> None:
        """Look again at what may not have been pushed."""
        source = self._sources.get(partition)
        if source is not None and source.waiting:
            self._take_waiting(source, self._clock.monotonic())
        for feed in self._feeds.values():
            if feed.checked is not None and feed.checked.source is source:
                feed.wake.set()

    def is_pushed(self, place: object) -> bool:
        """Whether a place is pushed still, or is about to be."""
        current = set(self._sources.values())
        for feed in self._feeds.values():
            checked = feed.checked
            if self._is_current(feed) and (
                any(each is place for each in feed.fed.values())
                or (checked is not None and checked.place is place and checked.source in current)
            ):
                return True
        return False

    async def _refused(self, source: Source, part: Fetched) -> None:
        if part.error_code == OFFSET_OUT_OF_RANGE and source.next_offset == 0:
            source.next_offset = await self._context.cluster.log_start(OFFSETS_TOPIC, source.partition)
            source.waiting.clear()
        else:  # another leader, or the log was cut: read it again from its start
            del self._sources[source.partition]
            self.wake()

    # ---- pushing ----

    async def _feed_for_ever(self, feed: Feed) -> None:
        """Push to one follower end, until its connection ends or the link changes."""
        while self._in_use(feed):
            feed.wake.clear()
            try:
                if not await self._push(feed):
                    feed.idle = True
                    await feed.wake.wait()
                    feed.idle = False
            except LinkLost:
                break
            except (LinkRejected, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
                self._untold.one(feed.link_name, {"link": feed.link_name, "detail": str(error)})
                feed.pushed.clear()
                await asyncio.sleep(RETRY_DELAY_S)
            except Exception:
                self._push_anew(feed)
                raise
        self.wake()

    def _push_anew(self, feed: Feed) -> None:
        """What counts as pushed may not have left: everything is pushed whole, and confirmed anew."""
        feed.pushed.clear()
        feed.fed.clear()
        feed.wake.set()

    def _in_use(self, feed: Feed) -> bool:
        return self._feeds.get(feed.link_name) is feed and self._is_current(feed)

    async def _ask_for_ever(self, feed: Feed) -> None:
        """Ask a follower end what of all that is pending there, for the link's status on this side."""
        while self._in_use(feed):
            try:
                feed.pending = dict((await feed.connection.call(calls.GroupPending())).groups)
            except LinkLost:
                break
            except (LinkRejected, TimeoutError):
                feed.pending = {}
            await feed.connection.lost_within(PENDING_INTERVAL_S)

    async def _push(self, feed: Feed) -> bool:
        """Push what the follower end lacks; False if that was nothing."""
        whole = self._next_whole(feed)
        confirmed, lost = NOTHING, None
        if whole is not None and feed.confirms and SOURCE_LOSSES in feed.connection.peer_features:
            confirmed = await self._furthest(feed, whole)
            lost = await self._lost_end(feed, whole, *confirmed)
        current = set(self._sources.values())
        withheld = self._withheld(feed)
        for source in [source for source in feed.pushed if source not in current]:
            del feed.pushed[source]
            feed.held_back.pop(source, None)
            feed.fed.pop(source, None)
            if source.partition not in self._sources:  # another proxy fronts its leader now
                await self._end(feed.connection, (source.partition,))
        for source in [source for source in feed.pushed if feed.held_back.get(source, frozenset()) - withheld]:
            del feed.pushed[source]
        if whole is not self._next_whole(feed):
            return True  # it is another one by now
        if whole is not None:
            if withheld and not feed.holds_back:
                await self._call(feed, [])  # the answer says whether it does
            since = confirmed[1] if lost is None else lost.from_offset
            if (not withheld or feed.holds_back) and self._is_decided(feed, whole, since):
                await self._push_whole(feed, whole, frozenset(withheld), lost)
                return True
        changes = []
        room = OFFSETS_AT_ONCE
        for source in feed.pushed:
            part = self._change(feed, source, withheld, room)
            if part is not None:
                room -= len(part.positions)
                changes.append(part)
        if not changes:
            return False
        if not feed.confirms:
            await self._call(feed, changes)
            return True
        self._begin_call(feed, changes)
        if len(feed.calls) >= CALLS_AT_ONCE:
            await asyncio.wait(feed.calls, return_when=asyncio.FIRST_COMPLETED)
        return True

    def _next_whole(self, feed: Feed) -> Source | None:
        """A partition that is to be pushed whole."""
        return next((each for each in self._sources.values() if each.loaded and each not in feed.pushed), None)

    def _push_at_once(self, feed: Feed, source: Source) -> bool:
        """Push what was read just now to a follower end that confirms, if all else was pushed; whether nothing is left.

        Clients wait for that. The task that pushes takes its turn where there is more to do.
        """
        if not feed.idle or not feed.confirms or source not in feed.pushed or not self._is_current(feed):
            return False
        if len(feed.calls) >= CALLS_AT_ONCE:
            return False
        part = self._change(feed, source, self._withheld(feed), OFFSETS_AT_ONCE)
        if part is not None:
            self._begin_call(feed, [part])
        return not feed.pushed[source]

    def _withheld(self, feed: Feed) -> set[str]:
        """Topics that are not pushed now: one that is truncated takes its committed offsets with it when it is deleted,
        and gets them back."""
        withheld = (name for name, each in self._context.control.state.truncations.items() if each.phase in WITHHELD)
        return {name for name in withheld if feed.remote_topic(name) is not None}

    def _change(self, feed: Feed, source: Source, withheld: Collection[str], room: int) -> calls.OffsetsPart | None:
        """What changed of one partition, as a call carries it, up to ``room`` committed offsets; None: nothing."""
        news, fed = feed.pushed[source], feed.fed.get(source)
        keys = [key for key in news if key.topic not in withheld][: max(0, room)]
        all_pushed = len(keys) == len(news) and not feed.held_back.get(source)
        if not keys and (fed is None or not all_pushed or source.next_offset <= fed.pushed):
            return None
        now = self._clock.monotonic()
        offsets = tuple(self._committed_offset(feed, source, key, now - news.pop(key)) for key in keys)
        upto = None
        if fed is not None:
            pending, fed.pending = fed.pending, {}
            upto = self._upto(feed, source, pending, all_pushed, fed.undone)
            fed.pushed, fed.undone = (source.next_offset, False) if all_pushed else (fed.pushed, fed.undone)
        gone = self._gone(feed, source, keys)
        return calls.OffsetsPart(source.partition, source.leader_epoch, offsets, gone, upto=upto)

    def _begin_call(self, feed: Feed, changes: Iterable[calls.OffsetsPart]) -> None:
        """Call now, without waiting for the answer: calls are taken in their order. Raises LinkLost."""
        answer = feed.connection.begin_call(self._asked(feed, changes))
        self.pushed.set()
        call = self._tasks.start(f"push-{feed.link_name}", self._answered(feed, answer(CALL_TIMEOUT_S)))
        feed.calls.add(call)
        call.add_done_callback(feed.calls.discard)

    async def _answered(self, feed: Feed, answer: Awaitable[calls.GroupOffsetsAnswer]) -> None:
        try:
            feed.holds_back = (await answer).holds_back
        except LinkLost:
            feed.wake.set()
        except (LinkRejected, TimeoutError) as error:
            self._untold.one(feed.link_name, {"link": feed.link_name, "detail": str(error)})
            feed.pushed.clear()
            feed.wake.set()
        except Exception:
            self._push_anew(feed)
            raise

    async def _push_whole(
        self, feed: Feed, source: Source, withheld: frozenset[str], lost: calls.LostEnd | None
    ) -> None:
        """Push all that one partition adds up to, but for some topics, in as many calls as it takes."""
        feed.pushed[source] = {}
        feed.held_back[source] = withheld
        feed.fed.pop(source, None)
        upto = None
        if feed.confirms:
            upto = self._upto(feed, source, source.offsets_log.pending(), not withheld, True)
            key = LinkPartition(feed.link_name, OFFSETS_TOPIC, source.partition)
            fed = feed.fed[source] = PushedPartition(key, self._topic_id, source.leader_epoch, feed.connection)
            fed.saw(source.next_offset, self._clock.monotonic())
            fed.pushed = -1 if withheld else source.next_offset
        keys = [
            OffsetKey(name, *place)
            for name, group in source.offsets_log.groups.items()
            if feed.remote_group(name) is not None
            for place in {**group.offsets, **group.unreadable}
            if place[0] not in withheld and feed.remote_topic(place[0]) is not None
        ]
        held_back = tuple(sorted(remote for topic in withheld if (remote := feed.remote_topic(topic)) is not None))
        for start in range(0, max(1, len(keys)), OFFSETS_AT_ONCE):
            chunk = keys[start : start + OFFSETS_AT_ONCE]
            begin, end = start == 0, start + OFFSETS_AT_ONCE >= len(keys)
            part = calls.OffsetsPart(
                source.partition,
                source.leader_epoch,
                tuple(self._committed_offset(feed, source, key, 0.0) for key in chunk),
                whole=calls.WholePart(begin, end, held_back, feed.confirms, lost if begin else None),
                upto=upto if end else None,
            )
            await self._call(feed, [part])

    def _is_decided(self, feed: Feed, source: Source, since: int) -> bool:
        """Whether the other side has the decisions that markers from an offset on carry out; else the feed is woken.

        What is read before a partition is pushed waits for nobody, and whoever was to send them may have died. Those
        before are there: it was confirmed up to the offset. -1: never, or that is not known.
        """
        if not feed.confirms or since < 0:
            return True
        checked = feed.checked
        if checked is None or checked.source is not source:
            key = LinkPartition(feed.link_name, OFFSETS_TOPIC, source.partition)
            place = PushedPartition(key, self._topic_id, source.leader_epoch, feed.connection)
            checked = feed.checked = Checked(source, place, since)
        for batch, header in source.transactional:
            if header.base_offset >= checked.upto:
                if not self.may_pass(checked.place, header, batch):
                    return False
                checked.upto = header.next_offset
        feed.checked = None
        return True

    async def _furthest(self, feed: Feed, source: Source) -> tuple[int, int]:
        """(Leader epoch, offset) up to where a partition was confirmed over the link, as far as both ends know."""
        said = await feed.connection.call(calls.ConfirmedCommits(source.partition))
        return max((said.epoch, said.upto), self._confirmed.get((feed.link_id, source.partition), NOTHING))

    async def _lost_end(self, feed: Feed, source: Source, epoch: int, upto: int) -> calls.LostEnd | None:
        """What the log lost of what the follower end had confirmed, as its leader epochs say. Raises BrokerUnavailable,
        KafkaRefused."""
        if epoch in (NO_EPOCH, source.leader_epoch):
            return None  # nobody else has led since
        known, end = await self._context.cluster.epoch_end(OFFSETS_TOPIC, source.partition, epoch)
        if known == NO_EPOCH:  # nothing is left of it, nor has anybody written since
            end = source.next_offset
        if end >= upto:
            return None
        extra = {"link": feed.link_name, "partition": source.partition, "offset": end, "confirmed": upto}
        log.error("offsets topic lost what was confirmed", extra=extra)
        return calls.LostEnd(end, upto, epoch, self._strict(feed))

    def _strict(self, feed: Feed) -> tuple[str, ...]:
        """The pushed namespaces of groups, by the follower's names, some of whose groups are in a strict one."""
        strict = [
            each.prefix
            for each in self._context.control.state.namespaces.values()
            if each.type is ResourceType.CONSUMER_GROUP and each.demands.strict
        ]
        led = [each for each in feed.mappings if each.leads_groups]
        return tuple(each.remote_prefix for each in led if any(overlap(each.local_prefix, one) for one in strict))

    def _committed_offset(self, feed: Feed, source: Source, key: OffsetKey, age_s: float) -> calls.CommittedOffset:
        """One committed offset as a call carries it, of a group and a topic that the link has."""
        group, place = source.offsets_log.groups.get(key.group), (key.topic, key.partition)
        remote_group, remote_topic, age_ms = (
            feed.remote_group(key.group),
            feed.remote_topic(key.topic),
            int(age_s * 1000),
        )
        assert remote_group is not None
        assert remote_topic is not None
        read = source.next_offset - 1
        committed = None if group is None else group.offsets.get(place)
        said = None if committed is None else calls.as_said(committed.offset)
        is_said = said is None or said >= 0 or NEGATIVE_OFFSETS in feed.connection.peer_features
        if group is not None and (place in group.unreadable or not is_said):
            return calls.CommittedOffset(remote_group, remote_topic, key.partition, calls.NOT_KNOWN, "", age_ms, read)
        if group is None or committed is None:
            return calls.CommittedOffset(remote_group, remote_topic, key.partition, None, "", age_ms, read)
        at = group.counts_from[place]
        return calls.CommittedOffset(remote_group, remote_topic, key.partition, said, committed.metadata, age_ms, at)

    def _upto(
        self, feed: Feed, source: Source, pending: Iterable[tuple[int, OffsetKey]], all_pushed: bool, undone: bool
    ) -> calls.Upto:
        """What goes beside committed offsets to a follower end that confirms: up to where that is all, and what is
        pending.

        ``undone``: transactions may have been aborted, or committed offsets have gone back: those that are open are
        listed, each with where its commits begin."""
        found_pending: list[calls.Pending] = []
        for producer_id, key in pending:
            found = source.offsets_log.pending_commit(producer_id, key)
            group, topic = feed.remote_group(key.group), feed.remote_topic(key.topic)
            if found is None or group is None or topic is None:
                continue  # it has ended, and is pushed as a committed offset, or is not the link's
            epoch, committed = found
            where = producer_id, epoch, group, topic, key.partition
            if committed is None:
                found_pending.append(calls.Pending(*where, None, "", source.next_offset - 1))
            elif not isinstance(committed, str):
                found_pending.append(calls.Pending(*where, committed.offset, committed.metadata, committed.log_offset))
        stable_offset = source.offsets_log.first_open(source.next_offset)
        all_pushed = all_pushed and not source.offsets_log.has_unreadable_pending
        still_open = source.offsets_log.open_since().items() if all_pushed and undone else None
        return calls.Upto(
            source.next_offset if all_pushed else None,
            stable_offset,
            tuple(found_pending),
            None if still_open is None else tuple(calls.OpenSince(*each) for each in still_open),
        )

    def _gone(self, feed: Feed, source: Source, keys: Iterable[OffsetKey]) -> tuple[str, ...]:
        """Groups among these that exist no more, by their remote names."""
        names = {key.group for key in keys} - source.offsets_log.groups.keys()
        return tuple(sorted(remote for name in names if (remote := feed.remote_group(name)) is not None))

    async def _call(self, feed: Feed, parts: Iterable[calls.OffsetsPart]) -> None:
        feed.holds_back = (await feed.connection.call(self._asked(feed, parts))).holds_back

    def _asked(self, feed: Feed, parts: Iterable[calls.OffsetsPart]) -> calls.GroupOffsets:
        return calls.GroupOffsets(self._partitions, tuple(parts), feed.topic_prefixes)
