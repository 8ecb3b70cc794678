"""Which partitions of synchronous links are In-Sync, and how they join and leave.

What docs/adr/0006 says, in the words of this file: a partition *joins* when it is recorded In-Sync, which makes every
proxy hold acks; it is *level* when the other side has confirmed all that was in the log once all of them did; when it
is recorded that it has *reached* this once, it is *in sync*, and leases are *granted* to the follower. It *leaves* when
confirmations stay out: no lease is granted any more, and when the last one has run out it is recorded Out-Of-Sync, or
Syncing again if it never reached In-Sync, and acks go out when that record is applied.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from isthmus_control.commands import PartitionSync, RecordSync
from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, Reason, ResourceType, Role, SyncState
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, TopicPartition, id_as_text
from isthmus_plugins.links import SyncStatus
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.partitions import LinkPartition, SyncPlace
from isthmus_plugins.replication.sync import degrading, recording
from isthmus_plugins.replication.sync.expiring_leases import LEASE_MARGIN_S, LEASE_S
from isthmus_plugins.replication.sync.lease_grants import granted_no_more
from isthmus_plugins.replication.sync.links import SynchronousLinks
from isthmus_plugins.replication.sync.progress import NOT_READ, Phase, Progress
from isthmus_plugins.replication.sync.pushed import PushedPartitions
from isthmus_plugins.replication.sync.quorums import NOT_KNOWN, Known, Quorums
from isthmus_plugins.replication.sync.status import recorded_sync
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

log = logging.getLogger("isthmus_plugins.replication")

JOIN_S: Final = 3.0
"""How long acks are held for a partition that joins."""
JOIN_RETRY_S: Final = 5.0
NEW_RETRY_S: Final = 1.0
"""Until a new partition that is not recorded yet is tried to be again; its acks wait for that."""


class SyncPartitions:
    """The partitions that this proxy pushes over synchronous links, each on its way into In-Sync or out of it.

    Whoever owns it calls :meth:`decide` again and again.
    """

    def __init__(
        self,
        context: PluginContext,
        pushed: PushedPartitions,
        links: SynchronousLinks,
        quorums: Quorums,
        known: Known,
        waits_since: Callable[[LinkPartition, int], float | None],
        agreed: Callable[[str], bool],
        drain: Callable[[Sequence[TopicPartition]], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        """``known``: what followers have confirmed. ``waits_since(partition, beyond)``: since when (monotonic seconds)
        the first answer waits for its link to confirm what stands at an offset or later. ``agreed``: whether the other
        cluster of a link knows of its mode, and so asks for leases. ``drain``: returns when transactions in these
        partitions that were decided before the call are carried out. ``wake``: called when there is something to
        decide."""
        self._context = context
        self._clock = context.clock
        self._pushed = pushed
        self._links = links
        self.new = links.new
        """Knows which partitions are new, and whether acks of those to come wait."""
        self._quorums = quorums
        self._known = known
        self._waits_since = waits_since
        self._agreed = agreed
        self._drain = drain
        self._wake = wake
        self._tasks = Tasks("sync-partitions", context.supervision)
        self.progress: dict[LinkPartition, Progress] = {}
        self._enforcing = -1
        """The offset of the control log that other proxies are waited for to have applied."""
        self._unleased: set[LinkPartition] = set()
        """New partitions that are In-Sync, which no lease has told the other side yet."""

    async def stop(self) -> None:
        await self._tasks.close()

    # ---- what the control log says ----

    def links_changed(self, before: ControlState, state: ControlState) -> None:
        """Links are others: of partitions whose records ended with that leases may still run, whoever granted them."""
        elsewhere: list[LinkPartition] = []
        for name, records in before.sync_records.items():
            for place, record in records.items():
                key = LinkPartition(name, *place)
                if record.state is not SyncState.IN_SYNC or self._links.record(name, place) is not None:
                    continue
                if not _led(before.links[name], place[0]):
                    continue  # it followed
                progress = self.progress.get(key)
                if progress is None:
                    elsewhere.append(key)
                else:
                    progress.leaves()
                    self._links.expiring.granted_here(key, progress.promised_at)
        if elsewhere:
            self._links.expiring.granted_elsewhere(elsewhere, state.applied_offset)
        for key, progress in self.progress.items():
            was, link = before.links.get(key.link), state.links.get(key.link)
            if key.topic == OFFSETS_TOPIC and link is not None and (was is None or was.mappings != link.mappings):
                # Commits of other groups, or in other topics, count now, and nobody held those of before.
                progress.leaves()

    def records_changed(self, before: ControlState, state: ControlState) -> None:
        """Partitions are recorded to have reached In-Sync, or to be Out-Of-Sync, by whatever proxy.

        Of those no lease is granted any more, and acks wait for those that were. Who records that has waited for its
        own, but may believe to lead what it leads no more.
        """
        now = self._clock.monotonic()
        for name, records in state.sync_records.items():
            known = before.sync_records.get(name, {})
            for place, record in records.items() if records is not known else ():
                was, key = known.get(place), LinkPartition(name, *place)
                if was is None or was is record or was.state is not SyncState.IN_SYNC:
                    continue
                progress, promised_at = self.progress.get(key), now
                if record.state is SyncState.IN_SYNC:
                    if record.reached and progress is not None and progress.awaits_reached(was):
                        self._begin(key, progress, record.at_offset)
                    continue
                if progress is not None:
                    progress.leaves()
                    promised_at = progress.promised_at
                if self._links.leads(key) and now < promised_at + LEASE_S + LEASE_MARGIN_S:
                    self._links.expiring.granted_here(key, promised_at)

    async def _enforced(self, offset: int) -> None:
        await granted_no_more(self._context, offset)
        self._links.expiring.enforced(offset, self._clock.monotonic())
        self._wake()

    # ---- joining and leaving ----

    def in_sync(self, key: LinkPartition) -> bool:
        """Whether every ack of a partition means that both sides have it."""
        progress = self.progress.get(key)
        return progress is not None and progress.phase is Phase.IN_SYNC

    def catches_up(self, key: LinkPartition) -> bool:
        """Whether acks are held for a partition until the other side has what was there before."""
        progress = self.progress.get(key)
        return progress is not None and progress.phase is Phase.CATCHING_UP

    def floor(self, key: LinkPartition) -> int | None:
        """From where on this proxy knows of every decision to commit in a partition."""
        progress = self.progress.get(key)
        return progress.floor if progress is not None and not progress.suspended else None

    def sent_from(self, key: LinkPartition) -> int | None:
        """From where on every decision is sent that lists a partition of the offsets topic; None: nowhere."""
        progress, record = self.progress.get(key), self._links.record(key.link, key.place)
        if progress is None or record is None or record.state is not SyncState.IN_SYNC:
            return None
        is_read = progress.joining == record.at_offset and progress.join_end != NOT_READ
        return progress.join_end if is_read else None

    def lose(self, key: LinkPartition, why: str) -> bool:
        """Have a partition leave; whether nothing says any more that it is In-Sync."""
        progress, record = self.progress.get(key), self._links.record(key.link, key.place)
        if progress is None or record is None or record.state is not SyncState.IN_SYNC:
            return True
        if progress.why is None and progress.phase is not Phase.OUT:
            progress.lost(why)
        self._wake()
        return False

    def confirmed(self, key: LinkPartition, end: int) -> None:
        """A link's follower has a partition up to ``end``. Where that is less than it had, no lease is granted:
        it has lost what was acked."""
        progress = self.progress.get(key)
        if progress is not None and progress.is_level:
            if end < progress.confirmed and progress.why is None:
                progress.lost(f"the follower has lost what it confirmed: it ends at {end} of {progress.confirmed}")
                self._wake()
            progress.confirmed = max(progress.confirmed, end)

    def holds_from_first(self, link_name: str, topic: TopicInfo | None) -> bool:
        """Whether some partitions of a topic are new, and the other side has no lease of them; or (None) those to come
        will be, in whatever namespace."""
        if not self._links.is_synchronous(link_name):
            return False
        if topic is None:
            led = self._context.control.state.links[link_name].pairs(Role.LEADER, ResourceType.TOPIC)
            prefixes = [each.local_prefix for each in led]
            return bool(prefixes) and all(self.new.is_taken_up(link_name, prefix) for prefix in prefixes)
        for index in range(len(topic.partitions)):  # of each topic with each look: no more than a look at its record
            place = topic.name, index
            record = self._links.own_record(link_name, place)
            if record is None and self.new.is_new(link_name, place):
                return True
            if record is not None and record.from_first and self._has_first_leader(place):
                return True
            if self._unleased and LinkPartition(link_name, *place) in self._unleased:
                return True
        return False

    def unshown(self, link_name: str) -> list[TopicPartition]:
        """Partitions that a link leads which are not In-Sync, and that may be no proxy's to show."""
        if not self._links.is_synchronous(link_name):
            return []
        keys = (LinkPartition(link_name, *place) for place in self._pushed.between_leaders(self._clock.monotonic()))
        return [key.place for key in keys if self._links.leads(key) and self.sync_of(key).state != "In-Sync"]

    def _why_not(self, key: LinkPartition) -> str | None:
        """Why a partition did not get In-Sync when it tried last, for status."""
        progress = self.progress.get(key)
        return progress.failed if progress is not None else None

    def sync_of(self, key: LinkPartition, group: str | None = None) -> SyncStatus:
        """What an ack for a partition means; of the offsets topic, to a group."""
        state, topic_id = self._context.control.state, self._pushed.topic_id(key.topic)
        asks = (ResourceType.TOPIC, key.topic) if group is None else (ResourceType.CONSUMER_GROUP, group)
        demands = state.lookup.demands(*asks)
        told = self.in_sync, self._why_not, self.new.is_new, self._has_first_leader
        return recorded_sync(state, key, topic_id, demands, *told)

    def _has_first_leader(self, place: TopicPartition) -> bool:
        """Whether a partition has had no other leader, as far as is known: that one's proxy held acks from the first
        on, or the partition is not new."""
        return self._pushed.leader_epoch(place) <= 0

    # ---- what is late ----

    def late_since(self, key: LinkPartition) -> float | None:
        """Since when the first answer waits for what a link has not confirmed, or such went without waiting for it."""
        epoch, end = self._known.get(key, NOT_KNOWN)
        since = [self._waits_since(key, end if epoch == self._pushed.leader_epoch(key.place) else -1)]
        progress, topic_id = self.progress.get(key), self._pushed.topic_id(key.topic) or b""
        if progress is not None and self._quorums.is_chosen(key):
            since.append(progress.late_since(end, self._quorums.acked(key.place, topic_id)[1], self._clock.monotonic()))
        return min((each for each in since if each is not None), default=None)

    def is_late(self, key: LinkPartition, now: float) -> bool:
        """Whether a partition may not stay in sync for as long as a lease runs."""
        since, timeout_s = self.late_since(key), self._links.timeout_s(key.link)
        return since is not None and now - since >= timeout_s - LEASE_S - LEASE_MARGIN_S

    # ---- what is to be recorded ----

    async def decide(self, now: float) -> None:
        """Have partitions join, leave, or go on. Raises BrokerUnavailable, KafkaRefused: then nothing is let go."""
        changed_at = self._links.expiring.changed_at
        if changed_at is not None and changed_at != self._enforcing:
            self._enforcing = changed_at
            self._tasks.keep("enforced", partial(self._enforced, changed_at))
        state = self._context.control.state
        joining: dict[str, list[SyncPlace]] = {}
        leaving: dict[str, dict[LinkPartition, str]] = {}
        joined: list[SyncPlace] = []
        reached: dict[str, list[LinkPartition]] = {}
        degraded: dict[str, dict[LinkPartition, int]] = {}
        first: dict[str, list[LinkPartition]] = {}
        led = {key for key in self._pushed.led() if self._links.leads(key)}
        for key in [key for key in self.progress if key not in led]:
            del self.progress[key]
        self._unleased = {key for key in self._unleased if self.in_sync(key) and not self.progress[key].was_granted}
        for key in led:
            progress, epoch = self.progress.get(key), self._pushed.leader_epoch(key.place)
            led_id = self._pushed.topic_id(key.topic)
            if progress is None or led_id not in (None, progress.led_id):  # another topic has the name now
                progress = self.progress[key] = Progress(now, epoch, led_id=led_id)
            progress.leader_moved(epoch, now)
            stream = self._pushed.get(key)
            record = self._links.record(key.link, key.place)
            progress.lost_at = None if stream is not None else progress.lost_at or now
            another = record is not None and stream is not None and record.topic_id != id_as_text(stream.topic_id)
            if self._links.is_unrecorded(key.link, key.place):
                progress.leaves()
                if now >= progress.retry_at:
                    first.setdefault(key.link, []).append(key)
                continue
            if record is None or record.state is SyncState.OUT_OF_SYNC or another:
                progress.leaves()
                if record is not None and not another:
                    without = self._quorums.goes_without(key, self._links.records(key.place))
                    progress.suspended = progress.suspended or without
                    after_ms = degrading.due_after_ms(self._quorums, key, record, progress, now)
                    if after_ms is not None:
                        degraded.setdefault(key.link, {})[key] = after_ms
                ready = stream is not None and now >= progress.retry_at and stream.is_close(now)
                if stream is not None and ready and self._agreed(key.link):
                    joining.setdefault(key.link, []).append(stream)
                continue
            if progress.joining != record.at_offset:
                progress.joins(record, now)
            if stream is not None and progress.was_in_sync and self._may_have_been_led(stream, progress):
                progress.led_elsewhere(now)
            if stream is not None and progress.asks:
                joined.append(stream)
            why = self._why_leave(key, progress, stream, now)
            if why is not None:
                leaving.setdefault(key.link, {})[key] = why
            elif progress.phase is Phase.LEVEL:
                if record.reached and record.degraded is None:
                    self._begin(key, progress, record.at_offset)
                else:
                    reached.setdefault(key.link, []).append(key)
        if joined:
            asked = [(stream, self.progress[stream.key].joining) for stream in joined]
            for stream in joined:
                self.progress[stream.key].asked()
            self._tasks.keep("join", partial(self._joined, asked))
        for name, gone in leaving.items():
            await self._leave_sync(state.links[name], gone)
        for name, level in reached.items():
            await self._reach(state.links[name], level)
        for name, long_out in degraded.items():
            for command in degrading.commands(state.links[name], long_out, self._links.record, self._known):
                await recording.record(self._context, command)
        for name, new in first.items():
            await self._join_first(state.links[name], new)
        for name, streams in joining.items():
            await self._join(state.links[name], streams)

    def _may_have_been_led(self, place: SyncPlace, progress: Progress) -> bool:
        """Whether acks of another process may have gone without a partition that it knows to be in sync."""
        return self._quorums.is_chosen(place.key) and place.leader_epoch != progress.level_epoch

    def _why_leave(self, key: LinkPartition, progress: Progress, stream: SyncPlace | None, now: float) -> str | None:
        """Why a partition is In-Sync no more; None while it is, or a lease may still run."""
        why, timeout = progress.why, self._links.timeout_s(key.link)
        progress.late = self.is_late(key, now)
        if stream is not None and not progress.was_in_sync:
            progress.has(stream.acked, stream.leader_epoch)
        oldest = self.late_since(key)
        if progress.was_in_sync or progress.from_first:
            since = min((moment for moment in (progress.lost_at, oldest) if moment is not None), default=now)
            if now - since > timeout:
                why = f"nothing was confirmed for {now - since:.1f} s"
        elif now - progress.joined_at > JOIN_S + timeout:
            why = "proxies of this cluster, or the follower, did not get there in time"
        elif progress.held_at is not None and now - progress.held_at > JOIN_S:
            why = f"the follower did not catch up within {JOIN_S:.0f} s while acks were held"
        if why is None:
            return None
        progress.lost(why)
        return why if now > progress.promised_at + LEASE_S + LEASE_MARGIN_S else None

    async def _join(self, link: Link, streams: Sequence[SyncPlace]) -> None:
        for stream in streams:
            self.progress[stream.key].retry_at = self._clock.monotonic() + JOIN_RETRY_S
        entries = tuple(
            PartitionSync(stream.key.topic, id_as_text(stream.topic_id), stream.key.partition, stream.acked)
            for stream in streams
        )
        await recording.record(self._context, RecordSync(link.name, link.link_id, SyncState.IN_SYNC, entries, None))

    async def _join_first(self, link: Link, keys: Sequence[LinkPartition]) -> None:
        """Record new partitions before the first ack of them goes."""
        entries = []
        for key in keys:
            topic_id, progress = self._pushed.topic_id(key.topic), self.progress[key]
            progress.retry_at = self._clock.monotonic() + NEW_RETRY_S
            if topic_id is not None:
                progress.is_new = True
                entries.append(PartitionSync(key.topic, id_as_text(topic_id), key.partition, 0))
        new = RecordSync(link.name, link.link_id, SyncState.IN_SYNC, tuple(entries), from_first=True)
        await recording.record(self._context, new)

    def _entries(self, keys: Iterable[LinkPartition]) -> tuple[PartitionSync, ...]:
        """What is recorded of partitions whose records still are those that were looked at."""
        return tuple(
            PartitionSync(key.topic, record.topic_id, key.partition, max(0, self._known.get(key, (-1, 0))[1]))
            for key in keys
            if (record := self._links.record(key.link, key.place)) is not None
            and record.at_offset == self.progress[key].joining
        )

    async def _reach(self, link: Link, keys: Sequence[LinkPartition]) -> None:
        """Record that the follower had all once: from when that is applied it may get leases, and whoever leaves is
        Out-Of-Sync."""
        entries = self._entries(keys)
        if entries:
            body = RecordSync(link.name, link.link_id, SyncState.IN_SYNC, entries, reached=True)
            await recording.record(self._context, body)

    def _begin(self, key: LinkPartition, progress: Progress, at_offset: int) -> None:
        if progress.from_first and not progress.was_granted:
            self._unleased.add(key)
        progress.reached(at_offset)
        log.info("partition in sync", extra=key._asdict())

    async def _leave_sync(self, link: Link, gone: Mapping[LinkPartition, str]) -> None:
        entries = self._entries(gone)
        if not entries:
            return
        key, why = next(iter(gone.items()))
        reason = Reason(ReasonCode.TIMEOUT_ERROR, f"{key.topic}-{key.partition}: {why}")
        log.warning("out of sync", extra={"link": link.name, "partitions": len(gone), "detail": reason.message})
        for each in gone:
            self.progress[each].retry_at = self._clock.monotonic() + JOIN_RETRY_S
            self.progress[each].failed = gone[each]
        out = RecordSync(link.name, link.link_id, SyncState.OUT_OF_SYNC, entries, reason)
        await recording.record(self._context, out)

    async def _joined(self, asked: Sequence[tuple[SyncPlace, int | None]]) -> None:
        """Find the log's ends from which on every ack was held: by all proxies, with no write under way before.

        ``asked``: with the records that these joined by. What joined anew meanwhile has asked anew: acks went out in
        between, which this answer knows nothing of.
        """
        streams = [stream for stream, _ in asked]
        ends: Mapping[TopicPartition, int] = {}
        try:
            await self._context.control.enforced(self._context.control.state.applied_offset)
            await self._context.fence()
            await self._drain([each.key.place for each in streams])
            ends = await self._context.cluster.log_ends([each.key.place for each in streams])
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("log ends not read", extra={"detail": str(error)})
        for stream, joined_by in asked:
            progress = self.progress.get(stream.key)
            if progress is not None and progress.join_end == NOT_READ and progress.joining == joined_by:
                progress.read(ends.get(stream.key.place), self._clock.monotonic())
        self._wake()


def _led(link: Link, topic: str) -> bool:
    """Whether a link led a topic; of the offsets topic, whether it led groups."""
    if topic == OFFSETS_TOPIC:
        return link.leads_groups
    return any(each.holds(topic) for each in link.pairs(Role.LEADER, ResourceType.TOPIC))
