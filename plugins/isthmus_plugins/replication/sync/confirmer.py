"""The leader end of synchronous links: holds acks, and decides when a partition is In-Sync.

What docs/adr/0006 says, in the words of this file: a partition *joins* when it is recorded In-Sync, which makes every
proxy hold acks; it is *level* when the other side has confirmed all that was in the log once all of them did; when it
is recorded that it has *reached* this once, it is *in sync*, and leases are *granted* to the follower. It *leaves* when
confirmations stay out: no lease is granted any more, and when the last one has run out it is recorded Out-Of-Sync, or
Syncing again if it never reached In-Sync, and acks go out when that record is applied.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

from isthmus_control.clock import ZERO
from isthmus_control.commands import DegradeSync, PartitionSync, RecordSync
from isthmus_control.control_state import ControlState
from isthmus_control.lookup import Lookup
from isthmus_control.model import (
    Link,
    LinkMode,
    NamespaceMapping,
    Reason,
    ResourceType,
    SyncRecord,
    SyncState,
    made_here,
)
from isthmus_control.outcome import Accepted, Outcome, Rejected, SyncChanged
from isthmus_control.states import ReasonCode
from isthmus_plugins.api import RequestHook
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.confirmation import Acks, Confirmer, NoAcks
from isthmus_plugins.held_answers import Partition
from isthmus_plugins.links import SyncStatus
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.client_views.confirmed_reads import ConfirmedReads
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.part import Part, not_joined
from isthmus_plugins.replication.partitions import GroupPlaces, LedPartition, SyncPlace
from isthmus_plugins.replication.sync import degrading
from isthmus_plugins.replication.sync.commit_gate import HeldCommits
from isthmus_plugins.replication.sync.lease_grants import LEASE_MARGIN_S, LEASE_S, SyncGrants, granted_no_more
from isthmus_plugins.replication.sync.progress import NOT_READ, Phase, Progress
from isthmus_plugins.replication.sync.quorums import AckRules, GroupScope
from isthmus_plugins.replication.sync.requirements import SyncNeeds
from isthmus_plugins.replication.sync.status import recorded_sync
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

log = logging.getLogger("isthmus_plugins.replication")

JOIN_S: Final = 3.0
"""How long acks are held for a partition that joins."""
JOIN_RETRY_S: Final = 5.0
STEP_S: Final = 0.2
"""How often is looked at what may have waited for too long."""
FAILED_RETRY_S: Final = 1.0


class SyncLeader(Confirmer, Part):
    """What synchronous links have confirmed of what this proxy's clients write."""

    name = "a synchronous link"

    def __init__(
        self, context: PluginContext, leader_end: LeaderEnd, groups: GroupPlaces, agreed: Callable[[str], bool]
    ) -> None:
        """``agreed``: whether the other cluster of a link knows of its mode, and so asks for leases."""
        self._context = context
        self._clock = context.clock
        self._leader_end = leader_end
        self._groups = groups
        self._agreed = agreed
        self._tasks = Tasks("sync-leader")
        self.acks: Acks = NoAcks()
        """Those that wait for it."""
        self.commits = HeldCommits(context, self, groups, context.clock.monotonic)
        self.reads = ConfirmedReads(context, self.concerns, self.readable_end)
        self.known: dict[LedPartition, tuple[int, int]] = {}
        """(leader epoch, offset): what a link's follower has confirmed."""
        self._stable: dict[LedPartition, tuple[int, int]] = {}
        """The same of transactions that have ended there."""
        self.progress: dict[LedPartition, Progress] = {}
        self._work = asyncio.Event()
        self._lookup: Lookup | None = None
        self._synchronous = False
        """Whether some link is synchronous."""
        self._links: dict[str, tuple[str, ...]] = {}
        """By topic: the synchronous links that lead it, or lead groups for the offsets topic."""
        self._mappings: dict[str, tuple[NamespaceMapping, ...]] = {}
        self._started = context.clock.monotonic()
        self._former: ControlState | None = None
        """As of the last look."""
        self._enforcing = -1
        """The offset of the control log that other proxies are waited for to have applied."""
        self.settled: Callable[[Sequence[Partition]], Awaitable[None]] = not_joined
        """Returns when transactions in these that were decided before the call are carried out."""
        self.on_more: Callable[[], None] = not_joined
        """Called when more of a partition is confirmed."""
        self._rules = AckRules(lambda: context.control.state)
        self.who = SyncNeeds(
            self._rules,
            self._links_of,
            self._record,
            self._is_synchronous,
            self.progress,
            self.leader_epoch,
            self.commits.scope_of,
            context.clock,
        )
        self.grants = SyncGrants(context, leader_end, groups, self._rules, self.who.holding, self)

    def start(self) -> None:
        self._tasks.start("decide", self._decide_for_ever())
        self.commits.start()

    async def stop(self) -> None:
        await self.commits.stop()
        await self._tasks.close()

    def control_changed(self, state: ControlState) -> None:
        """Hold, or let go, as the control log says now."""
        if state.lookup is not self._lookup:
            self._lookup = state.lookup
            self._rules.changed()
            self._note_former(state)
            for key, progress in self.progress.items():
                link = state.links.get(key.link)
                if key.topic == OFFSETS_TOPIC and link is not None and self._mappings.get(key.link) != link.mappings:
                    # Commits of other groups, or in other topics, count now, and nobody held those of before.
                    progress.leaves()
            self._links.clear()
            self._synchronous = any(self.holds(link) for link in state.links.values())
            self._mappings = {name: link.mappings for name, link in state.links.items()}
            self.acks.changed()
        self._note_left(self._former or state, state, self._clock.monotonic())
        self._former = state
        self.who.changed()
        self.reads.control_changed(state)
        self._confirmed_all()
        self.commits.control_changed(self._links_of(OFFSETS_TOPIC))
        self._work.set()

    def _note_former(self, state: ControlState) -> None:
        """Links are others: of partitions whose records ended with that leases may still run, whoever granted them."""
        before = self._former or state
        elsewhere: list[LedPartition] = []
        for name, records in before.sync_records.items():
            if not made_here(before.links[name]):
                continue  # it follows
            for place, record in records.items():
                key = LedPartition(name, *place)
                if record.state is not SyncState.IN_SYNC or self._record(name, place) is not None:
                    continue
                progress = self.progress.get(key)
                if progress is None:
                    elsewhere.append(key)
                else:
                    progress.leaves()
                    self.who.former.granted_here(key, progress.promised_at)
        if elsewhere:
            self.who.former.granted_elsewhere(elsewhere, state.applied_offset)
        for name, link in before.links.items():
            if link.mode is LinkMode.SYNCHRONOUS and made_here(link):
                now = state.links[name].mappings if name in state.links else ()
                gone = [each for each in link.mappings if each.leads_groups and each not in now]
                if gone:
                    self.commits.detached(name, gone, state.applied_offset)

    def _note_left(self, before: ControlState, state: ControlState, now: float) -> None:
        """Partitions are recorded Out-Of-Sync, by whatever proxy: no lease of them is granted any more, and acks wait
        for those that were. Who records it has waited for its own, but may believe to lead what it leads no more."""
        for name, records in state.sync_records.items():
            known = before.sync_records.get(name, {})
            for place, record in records.items() if records is not known else ():
                was, key = known.get(place), LedPartition(name, *place)
                if was is None or (was.state, record.state) != (SyncState.IN_SYNC, SyncState.OUT_OF_SYNC):
                    continue
                progress, promised_at = self.progress.get(key), now
                if progress is not None:
                    progress.leaves()
                    promised_at = progress.promised_at
                if self.leads(key) and now < promised_at + LEASE_S + LEASE_MARGIN_S:
                    self.who.former.granted_here(key, promised_at)

    async def _enforced(self, offset: int) -> None:
        await granted_no_more(self._context, offset)
        self.who.former.enforced(offset, self._clock.monotonic())
        self._work.set()

    # ---- whom it concerns ----

    def answers(self) -> Sequence[Answering]:
        return (calls.SyncLease.by(self.grants.on_sync_lease),)

    def hooks(self) -> list[RequestHook]:
        return [*self.commits.hooks(), *self.reads.hooks()]

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Whether some link is synchronous, or may have been."""
        return self._synchronous

    def bound(self, acks: Acks) -> None:
        self.acks = acks

    def concerns(self, topic: str) -> bool:
        return bool(self._links_of(topic)) or self.who.former.has_topic(topic)

    def _links_of(self, topic: str) -> tuple[str, ...]:
        links = self._links.get(topic)
        if links is None and topic == OFFSETS_TOPIC:
            state = self._context.control.state
            links = self._links[topic] = tuple(
                name for name, link in state.links.items() if link.leads_groups and made_here(link) and self.holds(link)
            )
        elif links is None:
            links = self._links[topic] = tuple(
                counterpart.link.name
                for counterpart in self._context.control.state.lookup.leading(ResourceType.TOPIC, topic)
                if self.holds(counterpart.link) and counterpart.mapping.offsets is None
            )
        return links

    def holds(self, link: Link) -> bool:
        """Whether acks may have to wait for a link: it is synchronous, or its leases run, or this process does not know
        whether they do."""
        if link.mode is LinkMode.SYNCHRONOUS or self.who.former.has_link(link.name):
            return True
        return self.who.unsure and link.settings.mode.written > ZERO

    # ---- what an ack needs ----

    def leader_epoch(self, place: Partition) -> int:
        if place[0] == OFFSETS_TOPIC:
            return self._groups.leader_epoch(place[1])
        return self._leader_end.discovery.leader_epochs.get(place, -1)

    def confirmed_end(
        self, place: Partition, epoch: int, transactional: bool, scope: GroupScope | None = None
    ) -> int | None:
        """See :class:`~isthmus_plugins.confirmation.Confirmer`; ``scope``: to these groups."""
        ends = [clause.end(self.known, epoch) for clause in self.who.needed(place, transactional, scope)]
        if not ends:
            return None
        end = min(ends)
        self._rules.may_be_acked(place, self._topic_id(place[0]), epoch, end, scope)
        return end

    def _topic_id(self, topic: str) -> bytes | None:
        """None: not known."""
        if topic == OFFSETS_TOPIC:
            return self._groups.topic_id or None
        return self._leader_end.discovery.topic_ids.get(topic)

    def readable_end(self, place: Partition, committed: bool) -> int | None:
        """Up to where consumers see a partition that are to see what is confirmed alone: as far as plain acks go.

        None: all of it; -1: it is not known.
        """
        epoch, known = self.leader_epoch(place), self._stable if committed else self.known
        return min((clause.end(known, epoch) for clause in self.who.needed(place, False)), default=None)

    def _confirmed_all(self) -> None:
        """Any partition may be confirmed further, or need less."""
        self.acks.confirmed_all()
        self.reads.confirmed_all()

    @property
    def leased(self) -> bool:
        """Whether leases may still run of links that are synchronous no more."""
        return bool(self.who.former)

    def _is_synchronous(self, link_name: str) -> bool:
        link = self._context.control.state.links.get(link_name)
        return link is not None and link.mode is LinkMode.SYNCHRONOUS

    def _record(self, link: str, place: Partition) -> SyncRecord | None:
        """What is recorded of a partition, of whatever topic of that name: this proxy may be the last to know of a new
        one, and acks that wait too long are no error."""
        return self._context.control.state.sync_records.get(link, {}).get(place)

    def on_stream(self, stream: LeaderStream) -> None:
        if stream.copy is None:
            if self._synchronous:
                self._stable[stream.key] = (stream.leader_epoch, stream.stable)
            self.on_confirmed(stream)

    def on_confirmed(self, stream: SyncPlace) -> None:
        """The follower has more of a partition, or it was opened."""
        if not self._synchronous:
            return
        self.known[stream.key] = (stream.leader_epoch, stream.acked)
        if stream.key.topic == OFFSETS_TOPIC:
            self.commits.confirmed(stream.key)
        else:
            self.acks.confirmed(stream.key.place)
            self.reads.confirmed(stream.key.place)
        self.on_more()
        progress = self.progress.get(stream.key)
        if progress is not None and progress.phase is Phase.CATCHING_UP:
            self._work.set()

    # ---- joining and leaving ----

    def in_sync(self, key: LedPartition) -> bool:
        """Whether every ack of a partition means that both sides have it."""
        progress = self.progress.get(key)
        return progress is not None and progress.phase is Phase.IN_SYNC

    def floor(self, key: LedPartition) -> int | None:
        """From where on this proxy knows of every decision to commit in a partition."""
        progress = self.progress.get(key)
        return progress.floor if progress is not None and not progress.suspended else None

    def told_from(self, key: LedPartition) -> int | None:
        """From where on every decision is told that lists a partition of the offsets topic; None: nowhere."""
        progress, record = self.progress.get(key), self._record(key.link, key.place)
        if progress is None or record is None or record.state is not SyncState.IN_SYNC:
            return None
        is_read = progress.joining == record.at_offset and progress.join_end != NOT_READ
        return progress.join_end if is_read else None

    def lose(self, key: LedPartition, why: str) -> bool:
        """Have a partition leave; whether nothing says any more that it is In-Sync."""
        progress, record = self.progress.get(key), self._record(key.link, key.place)
        if progress is None or record is None or record.state is not SyncState.IN_SYNC:
            return True
        if progress.why is None and progress.phase is not Phase.OUT:
            progress.lost(why)
        self._work.set()
        return False

    def why_not(self, key: LedPartition) -> str | None:
        """Why a partition did not get In-Sync when it tried last, for status."""
        progress = self.progress.get(key)
        return progress.failed if progress is not None else None

    def sync_of(self, key: LedPartition, group: str | None = None) -> SyncStatus:
        """What an ack for a partition means; of the offsets topic, to a group."""
        state, topic_id = self._context.control.state, self._topic_id(key.topic)
        asks = (ResourceType.TOPIC, key.topic) if group is None else (ResourceType.CONSUMER_GROUP, group)
        return recorded_sync(state, key, topic_id, state.lookup.demands(*asks), self.in_sync, self.why_not)

    def late_since(self, key: LedPartition) -> float | None:
        """Since when the first answer waits for what a link has not confirmed, or such went without waiting for it."""
        epoch, end = self.known.get(key, (-1, -1))
        beyond = end if epoch == self.leader_epoch(key.place) else -1
        offsets = key.topic == OFFSETS_TOPIC
        since = [self.commits.oldest(key, beyond) if offsets else self.acks.oldest(key.place, beyond)]
        progress, topic_id = self.progress.get(key), self._topic_id(key.topic) or b""
        if progress is not None and self._rules.is_chosen(key):
            since.append(progress.late_since(end, self._rules.acked(key.place, topic_id)[1], self._clock.monotonic()))
        return min((each for each in since if each is not None), default=None)

    def _pushed(self, key: LedPartition) -> SyncPlace | None:
        return self._groups.place(key) if key.topic == OFFSETS_TOPIC else self._leader_end.stream(key)

    def timeout_s(self, link_name: str) -> float:
        link = self._context.control.state.links.get(link_name)
        return link.sync_confirm_timeout_ms / 1000 if link is not None else 0.0

    @property
    def _active(self) -> bool:
        """Whether time alone may change something."""
        return bool(self._synchronous or self.who.former)

    async def _decide_for_ever(self) -> None:
        while True:
            self._work.clear()
            if self._active:
                try:
                    await self._decide(self._clock.monotonic())
                except (BrokerUnavailable, KafkaRefused) as error:
                    # Nothing is let go: acks wait until it is known what they mean.
                    log.warning("synchronous state not recorded", extra={"detail": str(error)})
                    await asyncio.sleep(FAILED_RETRY_S)
                except Exception:  # a bug of ours must not hold acks for ever
                    log.exception("synchronous state not decided")
                    await asyncio.sleep(FAILED_RETRY_S)
            try:
                async with asyncio.timeout(STEP_S if self._active else None):
                    await self._work.wait()
            except TimeoutError:
                pass

    async def _decide(self, now: float) -> None:
        changed_at = self.who.former.changed_at
        if changed_at is not None and changed_at != self._enforcing:
            self._enforcing = changed_at
            self._tasks.start("enforced", self._enforced(changed_at))
        sure = self.who.unsure and now > self._started + LEASE_S + LEASE_MARGIN_S
        if self.who.former.expire(now) or sure:
            self.who.unsure, self._lookup = self.who.unsure and not sure, None
            self.control_changed(self._context.control.state)
        self.reads.confirmed_all()  # leaders may have moved
        state = self._context.control.state
        joining: dict[str, list[SyncPlace]] = {}
        leaving: dict[str, dict[LedPartition, str]] = {}
        joined: list[SyncPlace] = []
        reached: dict[str, list[LedPartition]] = {}
        degraded: dict[str, dict[LedPartition, int]] = {}
        led = {key for key in self._leader_end.discovery.led if key.topic != OFFSETS_TOPIC and self.leads(key)}
        led.update(key for key in self._groups.places() if self.leads(key))
        for key in [key for key in self.progress if key not in led]:
            del self.progress[key]
        for key in led:
            progress, epoch = self.progress.get(key), self.leader_epoch(key.place)
            if progress is None:
                progress = self.progress[key] = Progress(now, epoch)
            progress.leader_moved(epoch, now)
            stream = self._pushed(key)
            record = self._record(key.link, key.place)
            progress.lost_at = None if stream is not None else progress.lost_at or now
            another = record is not None and stream is not None and record.topic_id != _as_uuid(stream.topic_id)
            if record is None or record.state is SyncState.OUT_OF_SYNC or another:
                progress.leaves()
                if record is not None and not another:
                    without = self._rules.goes_without(key, self.who.records(key.place))
                    progress.suspended = progress.suspended or without
                    after_ms = degrading.due_after_ms(self._rules, key, record, progress, now)
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
            self._tasks.start("join", self._joined(asked))
        for name, gone in leaving.items():
            await self._leave_sync(state.links[name], gone)
        for name, level in reached.items():
            await self._reach(state.links[name], level)
        for name, long_out in degraded.items():
            for command in degrading.commands(state.links[name], long_out, self._record, self.known):
                await self._append(command)
        for name, streams in joining.items():
            await self._join(state.links[name], streams)

    def _may_have_been_led(self, place: SyncPlace, progress: Progress) -> bool:
        """Whether acks of another process may have gone without a partition that it knows to be in sync."""
        return self._rules.is_chosen(place.key) and place.leader_epoch != progress.level_epoch

    def leads(self, key: LedPartition) -> bool:
        """Whether a partition is led over a link that is synchronous."""
        return self._is_synchronous(key.link) and key.link in self._links_of(key.topic)

    def _why_leave(self, key: LedPartition, progress: Progress, stream: SyncPlace | None, now: float) -> str | None:
        """Why a partition is In-Sync no more; None while it is, or a lease may still run."""
        why, timeout = progress.why, self.timeout_s(key.link)
        progress.late = self.grants.is_late(key, now)
        if stream is not None and progress.was_in_sync:
            if stream.acked < progress.confirmed:
                why = f"the follower has lost what it confirmed: it ends at {stream.acked} of {progress.confirmed}"
            progress.confirmed = max(progress.confirmed, stream.acked)
        elif stream is not None:
            progress.has(stream.acked, stream.leader_epoch)
        oldest = self.late_since(key)
        if progress.was_in_sync:
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
            PartitionSync(stream.key.topic, _as_uuid(stream.topic_id), stream.key.partition, stream.acked)
            for stream in streams
        )
        await self._append(RecordSync(link.name, link.link_id, SyncState.IN_SYNC, entries, None))

    def _entries(self, keys: Iterable[LedPartition]) -> tuple[PartitionSync, ...]:
        """What is recorded of partitions whose records still are those that were looked at."""
        return tuple(
            PartitionSync(key.topic, record.topic_id, key.partition, max(0, self.known.get(key, (-1, 0))[1]))
            for key in keys
            if (record := self._record(key.link, key.place)) is not None
            and record.at_offset == self.progress[key].joining
        )

    async def _reach(self, link: Link, keys: Sequence[LedPartition]) -> None:
        """Record that the follower had all once: from now on it may be told so, and whoever leaves is Out-Of-Sync."""
        entries = self._entries(keys)
        if not entries:
            return
        outcome = await self._append(RecordSync(link.name, link.link_id, SyncState.IN_SYNC, entries, reached=True))
        for change in outcome.changes if isinstance(outcome, Accepted) else ():
            if not isinstance(change, SyncChanged) or change.before is None or change.after is None:
                continue
            key = LedPartition(link.name, change.topic, change.partition)
            progress = self.progress.get(key)
            if progress is not None and progress.joining == change.before.at_offset:
                self._begin(key, progress, change.after.at_offset)

    def _begin(self, key: LedPartition, progress: Progress, at_offset: int) -> None:
        progress.reached(at_offset)
        log.info("partition in sync", extra=key._asdict())

    async def _leave_sync(self, link: Link, gone: Mapping[LedPartition, str]) -> None:
        entries = self._entries(gone)
        if not entries:
            return
        key, why = next(iter(gone.items()))
        reason = Reason(ReasonCode.TIMEOUT_ERROR, f"{key.topic}-{key.partition}: {why}")
        log.warning("out of sync", extra={"link": link.name, "partitions": len(gone), "detail": reason.message})
        for each in gone:
            self.progress[each].retry_at = self._clock.monotonic() + JOIN_RETRY_S
            self.progress[each].failed = gone[each]
        await self._append(RecordSync(link.name, link.link_id, SyncState.OUT_OF_SYNC, entries, reason))

    async def _append(self, body: RecordSync | DegradeSync) -> Outcome:
        outcome = await self._context.control.append(body)
        if isinstance(outcome, Rejected):
            log.warning("synchronous state refused", extra={"link": body.link, "detail": outcome.message})
        return outcome

    async def _joined(self, asked: Sequence[tuple[SyncPlace, int | None]]) -> None:
        """Find the log's ends from which on every ack was held: by all proxies, with no write under way before.

        ``asked``: with the records that these joined by. What joined anew meanwhile has asked anew: acks went out in
        between, which this answer knows nothing of.
        """
        streams = [stream for stream, _ in asked]
        ends: Mapping[Partition, int] = {}
        try:
            await self._context.control.enforced(self._context.control.state.applied_offset)
            await self._context.fence()
            await self.settled([each.key.place for each in streams])
            ends = await self._context.cluster.log_ends([each.key.place for each in streams])
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("log ends not read", extra={"detail": str(error)})
        for stream, joined_by in asked:
            progress = self.progress.get(stream.key)
            if progress is not None and progress.join_end == NOT_READ and progress.joining == joined_by:
                progress.read(ends.get(stream.key.place), self._clock.monotonic())
        self._work.set()


def _as_uuid(topic_id: bytes) -> str:
    return str(uuid.UUID(bytes=topic_id))
