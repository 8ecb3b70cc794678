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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final

from isthmus_control.commands import PartitionSync, RecordSync
from isthmus_control.control_state import ControlState
from isthmus_control.lookup import Lookup
from isthmus_control.model import Link, LinkMode, NamespaceMapping, Reason, ResourceType, SyncRecord, SyncState
from isthmus_control.outcome import Accepted, Outcome, Rejected, SyncChanged
from isthmus_control.states import ReasonCode
from isthmus_plugins.api import (
    BrokerUnavailable,
    KafkaRefused,
    PluginContext,
    RequestHook,
)
from isthmus_plugins.confirmation import Acks, Confirmer, NoAcks
from isthmus_plugins.held_answers import Partition
from isthmus_plugins.links import SyncStatus
from isthmus_plugins.replication.connection import LinkConnection
from isthmus_plugins.replication.held_commits import HeldCommits
from isthmus_plugins.replication.leader import LeaderEnd
from isthmus_plugins.replication.leader_stream import LeaderStream, LedPartition
from isthmus_plugins.replication.sync_places import GroupPlaces, SyncPlace, at_once, made_here
from isthmus_plugins.replication.sync_progress import NOT_READ, Progress
from isthmus_plugins.replication.sync_status import recorded_sync
from isthmus_plugins.replication.visibility import ConfirmedReads
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

log = logging.getLogger("isthmus_plugins.replication")

LEASE_S: Final = 1.5
"""How long the follower may say that a partition is In-Sync, from when it asked. Less than the shortest time that acks
may wait."""
LEASE_MARGIN_S: Final = 0.25
JOIN_S: Final = 3.0
"""How long acks are held for a partition that joins."""
JOIN_RETRY_S: Final = 5.0
STEP_S: Final = 0.2
"""How often is looked at what may have waited for too long."""
FAILED_RETRY_S: Final = 1.0
FREE_MAX: Final = 100_000


class SyncLeader(Confirmer):
    """What synchronous links have confirmed of what this proxy's clients write."""

    name = "a synchronous link"

    def __init__(
        self, context: PluginContext, leader_end: LeaderEnd, groups: GroupPlaces, agreed: Callable[[str], bool]
    ) -> None:
        """``agreed``: whether the other cluster of a link knows of its mode, and so asks for leases."""
        self._context = context
        self._leader_end = leader_end
        self._groups = groups
        self._agreed = agreed
        self._tasks = Tasks("sync-leader")
        self.acks: Acks = NoAcks()
        """Those that wait for it."""
        self.commits = HeldCommits(context, self, groups, _now)
        self.reads = ConfirmedReads(context, lambda topic: bool(self._links_of(topic)), self.readable_end)
        self._confirmed: dict[LedPartition, tuple[int, int]] = {}
        """(leader epoch, offset): what a link's follower has confirmed."""
        self._stable: dict[LedPartition, tuple[int, int]] = {}
        """The same of transactions that have ended there."""
        self._progress: dict[LedPartition, Progress] = {}
        self._work = asyncio.Event()
        self._lookup: Lookup | None = None
        self._synchronous = False
        """Whether some link is synchronous."""
        self._links: dict[str, tuple[str, ...]] = {}
        """By topic: the synchronous links that lead it, or lead groups for the offsets topic."""
        self._mappings: dict[str, tuple[NamespaceMapping, ...]] = {}
        self._strict: dict[str, bool] = {}
        """By topic: whether plain producers wait as transactional ones do."""
        self._leased: dict[LedPartition, float] = {}
        """What a link that is synchronous no more had granted, until when."""
        self._started = monotonic()
        self._unsure = True
        """Leases of the process before this one may still run, of links that are asynchronous again."""
        self.settled: Callable[[Sequence[Partition]], Awaitable[None]] = at_once
        """Returns when transactions in these that were decided before the call are carried out."""
        self.on_more: Callable[[], None] = lambda: None
        """Called when more of a partition is confirmed."""
        leader_end.on_confirmed = self._on_stream
        groups.on_confirmed = self._on_confirmed

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
            self._links.clear()
            self._strict.clear()
            for key, progress in self._progress.items():
                if progress.in_sync and not self._leads(key):
                    self._leased[key] = progress.granted_at + LEASE_S + LEASE_MARGIN_S
                elif key.topic == OFFSETS_TOPIC and self._mappings.get(key.link) != state.links[key.link].mappings:
                    # Commits of other groups, or in other topics, count now, and nobody held those of before.
                    progress.joining, progress.in_sync, progress.level = None, False, False
            self._links.clear()
            self._synchronous = any(self.holds(link) for link in state.links.values())
            self._mappings = {name: link.mappings for name, link in state.links.items()}
            self.acks.changed()
        self.reads.control_changed(state)
        self._confirmed_all()
        self.commits.control_changed(self._links_of(OFFSETS_TOPIC))
        self._work.set()

    # ---- whom it concerns ----

    def hooks(self) -> list[RequestHook]:
        return [*self.commits.hooks(), *self.reads.hooks()]

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Whether some link is synchronous, or may have been."""
        return self._synchronous

    def bound(self, acks: Acks) -> None:
        self.acks = acks

    def concerns(self, topic: str) -> bool:
        return bool(self._links_of(topic))

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
        if link.mode is LinkMode.SYNCHRONOUS or any(key.link == link.name for key in self._leased):
            return True
        return self._unsure and link.settings.mode.written.wall_ms > link.created_ms

    # ---- what an ack needs ----

    def leader_epoch(self, place: Partition) -> int:
        if place[0] == OFFSETS_TOPIC:
            return self._groups.leader_epoch(place[1])
        return self._leader_end.leader_epochs.get(place, -1)

    def confirmed_end(
        self, place: Partition, epoch: int, transactional: bool, over_link: str | None = None
    ) -> int | None:
        """See :class:`~isthmus_plugins.confirmation.Confirmer`; ``over_link``: of that link alone."""
        ends = []
        for key in self.needed(place, transactional):
            if over_link not in (None, key.link):
                continue
            confirmed_epoch, end = self._confirmed.get(key, (-1, -1))
            ends.append(end if confirmed_epoch == epoch else -1)
        return min(ends, default=None)

    def readable_end(self, place: Partition, committed: bool) -> int | None:
        """Up to where consumers see a partition that are to see what is confirmed alone: as far as plain acks go.

        None: all of it; -1: it is not known.
        """
        epoch = self.leader_epoch(place)
        ends = []
        for key in self.needed(place, False):
            known = (self._stable if committed else self._confirmed).get(key, (-1, -1))
            ends.append(known[1] if known[0] == epoch else -1)
        return min(ends, default=None)

    def _confirmed_all(self) -> None:
        """Any partition may be confirmed further, or need less."""
        self.acks.confirmed_all()
        self.reads.confirmed_all()

    def needed(self, place: Partition, transactional: bool) -> Iterator[LedPartition]:
        """Over which links a partition's records must be confirmed before they are acked."""
        waits = transactional or self._is_strict(place[0])
        for link in self._links_of(place[0]):
            record = self._record(link, place)
            if record is None:
                if not self._is_synchronous(link):  # its leases of before may still run
                    yield LedPartition(link, *place)
            elif record.state is SyncState.IN_SYNC or waits:
                yield LedPartition(link, *place)
        for key, until in self._leased.items():
            if key.place == place and monotonic() < until:
                yield key

    @property
    def leased(self) -> bool:
        """Whether leases may still run of links that are synchronous no more."""
        return bool(self._leased)

    def _is_strict(self, topic: str) -> bool:
        strict = self._strict.get(topic)
        if strict is None:
            strict = self._strict[topic] = self._context.control.state.lookup.demands(topic).strict
        return strict

    def _is_synchronous(self, link_name: str) -> bool:
        link = self._context.control.state.links.get(link_name)
        return link is not None and link.mode is LinkMode.SYNCHRONOUS

    def _record(self, link: str, place: Partition) -> SyncRecord | None:
        return self._context.control.state.sync_records.get(link, {}).get(place)

    def _on_stream(self, stream: LeaderStream) -> None:
        if stream.copy is None:
            if self._synchronous:
                self._stable[stream.key] = (stream.leader_epoch, stream.stable)
            self._on_confirmed(stream)

    def _on_confirmed(self, stream: SyncPlace) -> None:
        """The follower has more of a partition, or it was opened."""
        if not self._synchronous:
            return
        self._confirmed[stream.key] = (stream.leader_epoch, stream.acked)
        if stream.key.topic == OFFSETS_TOPIC:
            self.commits.confirmed(stream.key)
        else:
            self.acks.confirmed(stream.key.place)
            self.reads.confirmed(stream.key.place)
        self.on_more()
        progress = self._progress.get(stream.key)
        if progress is not None and not progress.level and progress.join_end is not None:
            self._work.set()

    # ---- joining and leaving ----

    def in_sync(self, key: LedPartition) -> bool:
        """Whether every ack of a partition means that both sides have it."""
        progress = self._progress.get(key)
        return progress is not None and progress.in_sync and progress.why is None

    def floor(self, key: LedPartition) -> int | None:
        """From where on this proxy knows of every decision to commit in a partition."""
        progress = self._progress.get(key)
        return progress.floor if progress is not None else None

    def lose(self, key: LedPartition, why: str) -> bool:
        """Have a partition leave; whether nothing says any more that it is In-Sync."""
        progress, record = self._progress.get(key), self._record(key.link, key.place)
        if progress is None or record is None or record.state is not SyncState.IN_SYNC:
            return True
        progress.why = progress.why or why
        self._work.set()
        return False

    def why_not(self, key: LedPartition) -> str | None:
        """Why a partition did not get In-Sync when it tried last, for status."""
        progress = self._progress.get(key)
        return progress.failed if progress is not None else None

    def sync_of(self, key: LedPartition) -> SyncStatus:
        """What an ack for a partition means."""
        offsets = key.topic == OFFSETS_TOPIC
        topic_id = self._groups.topic_id if offsets else self._leader_end.topic_ids.get(key.topic)
        return recorded_sync(self._context.control.state, key, topic_id or None, self.in_sync, self.why_not)

    async def on_sync_lease(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """Grant the follower leases for those of its streams and groups that are in sync, and tell how others are."""
        now = monotonic()
        streams = [self._leader_end.stream_of(connection, int(each)) for each in params["streams"]]
        records = [each for each in streams if each is not None and each.copy is None]
        granted = [each for each in records if self._grant(each, connection, now)]
        others = [each for each in records if each not in granted and self._leads(each.key)]
        keys = [LedPartition(connection.link_name, OFFSETS_TOPIC, int(each)) for each in params.get("groups", ())]
        return {
            "in_sync": [each.stream_id for each in granted],
            "groups_in_sync": [key.partition for key in keys if self._grant(self._groups.place(key), connection, now)],
            "lease_ms": int(LEASE_S * 1000),
            "states": {str(each.stream_id): self.sync_of(each.key).model_dump(exclude_none=True) for each in others},
        }

    def _grant(self, place: SyncPlace | None, connection: LinkConnection, now: float) -> bool:
        """Grant a lease of a partition, if nothing speaks against it."""
        if place is None or place.connection is not connection or not self.in_sync(place.key):
            return False
        oldest, timeout_s = self._oldest(place.key), self._timeout_s(place.key.link)
        if now >= self._context.lease_deadline or (
            oldest is not None and now - oldest >= timeout_s - LEASE_S - LEASE_MARGIN_S
        ):
            return False
        self._progress[place.key].granted_at = now
        return True

    def _oldest(self, key: LedPartition) -> float | None:
        """Since when the first answer waits for what a link has not confirmed of a partition."""
        if key.topic == OFFSETS_TOPIC:
            return self.commits.oldest(key)
        epoch, end = self._confirmed.get(key, (-1, -1))
        return self.acks.oldest(key.place, end if epoch == self.leader_epoch(key.place) else -1)

    def _pushed(self, key: LedPartition) -> SyncPlace | None:
        return self._groups.place(key) if key.topic == OFFSETS_TOPIC else self._leader_end.stream(key)

    def _timeout_s(self, link_name: str) -> float:
        link = self._context.control.state.links.get(link_name)
        return link.sync_confirm_timeout_ms / 1000 if link is not None else 0.0

    @property
    def _active(self) -> bool:
        """Whether time alone may change something."""
        return bool(self._synchronous or self._leased)

    async def _decide_for_ever(self) -> None:
        while True:
            self._work.clear()
            if self._active:
                try:
                    await self._decide(monotonic())
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
        leased = bool(self._leased)
        self._leased = {key: until for key, until in self._leased.items() if now < until}
        sure = self._unsure and now > self._started + LEASE_S + LEASE_MARGIN_S
        if sure or (leased and not self._leased):
            self._unsure, self._lookup = self._unsure and not sure, None
            self.control_changed(self._context.control.state)
        self.reads.confirmed_all()  # leaders may have moved
        state = self._context.control.state
        joining: dict[str, list[SyncPlace]] = {}
        leaving: dict[str, dict[LedPartition, str]] = {}
        joined: list[SyncPlace] = []
        reached: dict[str, list[LedPartition]] = {}
        led = {key for key in self._leader_end.led if key.topic != OFFSETS_TOPIC and self._leads(key)}
        led.update(key for key in self._groups.places() if self._leads(key))
        for key in [key for key in self._progress if key not in led]:
            del self._progress[key]
        for key in led:
            progress = self._progress.get(key)
            if progress is None:
                progress = self._progress[key] = Progress(now)
            stream = self._pushed(key)
            record = self._record(key.link, key.place)
            progress.lost_at = None if stream is not None else progress.lost_at or now
            another = record is not None and stream is not None and record.topic_id != _topic_id(stream.topic_id)
            if record is None or record.state is SyncState.OUT_OF_SYNC or another:
                progress.joining, progress.level, progress.in_sync, progress.why = None, False, False, None
                ready = stream is not None and now >= progress.retry_at and stream.is_close(now)
                if stream is not None and ready and self._agreed(key.link):
                    joining.setdefault(key.link, []).append(stream)
                continue
            if progress.joining != record.at_offset:
                progress.joining, progress.joined_at = record.at_offset, now
                progress.level, progress.in_sync, progress.why = False, False, None
                progress.join_end, progress.held_at = None, None
            if stream is not None and progress.join_end is None:
                joined.append(stream)
            why = self._why_leave(key, progress, stream, now)
            if why is not None:
                leaving.setdefault(key.link, {})[key] = why
            elif progress.level and not progress.in_sync and progress.why is None:
                if record.reached:
                    self._begin(key, progress)
                else:
                    reached.setdefault(key.link, []).append(key)
        if joined:
            self._tasks.start("join", self._joined(joined))
            for stream in joined:
                self._progress[stream.key].join_end = NOT_READ
        for name, gone in leaving.items():
            await self._leave_sync(state.links[name], gone)
        for name, level in reached.items():
            await self._reach(state.links[name], level)
        for name, streams in joining.items():
            await self._join(state.links[name], streams)

    def _leads(self, key: LedPartition) -> bool:
        """Whether a partition is led over a link that is synchronous."""
        return self._is_synchronous(key.link) and key.link in self._links_of(key.topic)

    def _why_leave(self, key: LedPartition, progress: Progress, stream: SyncPlace | None, now: float) -> str | None:
        """Why a partition is In-Sync no more; None while it is, or a lease may still run."""
        why = progress.why
        if stream is not None and progress.in_sync:
            if stream.acked < progress.confirmed:
                why = f"the follower has lost what it confirmed: it ends at {stream.acked} of {progress.confirmed}"
            progress.confirmed = max(progress.confirmed, stream.acked)
        elif stream is not None and (end := progress.join_end) is not None and end != NOT_READ and stream.acked >= end:
            progress.level, progress.confirmed = True, stream.acked
        timeout = self._timeout_s(key.link)
        oldest = self._oldest(key)
        if progress.in_sync:
            since = min((moment for moment in (progress.lost_at, oldest) if moment is not None), default=now)
            if now - since > timeout:
                why = f"nothing was confirmed for {now - since:.1f} s"
        elif now - progress.joined_at > JOIN_S + timeout:
            why = "proxies of this cluster, or the follower, did not get there in time"
        elif progress.held_at is not None and now - progress.held_at > JOIN_S:
            why = f"the follower did not catch up within {JOIN_S:.0f} s while acks were held"
        if why is None:
            return None
        progress.why = why
        leased_until = max(progress.granted_at, progress.seen_at) + LEASE_S + LEASE_MARGIN_S
        return why if now > leased_until else None

    async def _join(self, link: Link, streams: Sequence[SyncPlace]) -> None:
        for stream in streams:
            self._progress[stream.key].retry_at = monotonic() + JOIN_RETRY_S
        entries = tuple(
            PartitionSync(stream.key.topic, _topic_id(stream.topic_id), stream.key.partition, stream.acked)
            for stream in streams
        )
        await self._append(RecordSync(link.name, link.link_id, SyncState.IN_SYNC, entries, None))

    def _entries(self, keys: Iterable[LedPartition]) -> tuple[PartitionSync, ...]:
        """What is recorded of partitions whose records still are those that were looked at."""
        return tuple(
            PartitionSync(key.topic, record.topic_id, key.partition, max(0, self._confirmed.get(key, (-1, 0))[1]))
            for key in keys
            if (record := self._record(key.link, key.place)) is not None
            and record.at_offset == self._progress[key].joining
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
            progress = self._progress.get(key)
            if progress is not None and progress.joining == change.before.at_offset:
                progress.joining = change.after.at_offset
                self._begin(key, progress)

    def _begin(self, key: LedPartition, progress: Progress) -> None:
        progress.in_sync, progress.failed = True, None
        log.info("partition in sync", extra=key._asdict())

    async def _leave_sync(self, link: Link, gone: Mapping[LedPartition, str]) -> None:
        entries = self._entries(gone)
        if not entries:
            return
        key, why = next(iter(gone.items()))
        reason = Reason(ReasonCode.TIMEOUT_ERROR, f"{key.topic}-{key.partition}: {why}")
        log.warning("out of sync", extra={"link": link.name, "partitions": len(gone), "detail": reason.message})
        for each in gone:
            self._progress[each].retry_at = monotonic() + JOIN_RETRY_S
            self._progress[each].failed = gone[each]
        await self._append(RecordSync(link.name, link.link_id, SyncState.OUT_OF_SYNC, entries, reason))

    async def _append(self, body: RecordSync) -> Outcome:
        outcome = await self._context.control.append(body)
        if isinstance(outcome, Rejected):
            log.warning("synchronous state refused", extra={"link": body.link, "detail": outcome.message})
        return outcome

    async def _joined(self, streams: Sequence[SyncPlace]) -> None:
        """Find the log's ends from which on every ack was held: by all proxies, with no write under way before."""
        ends: Mapping[Partition, int] = {}
        try:
            await self._context.control.enforced(self._context.control.state.applied_offset)
            await self._context.fence()
            await self.settled([each.key.place for each in streams])
            ends = await self._context.cluster.log_ends([each.key.place for each in streams])
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("log ends not read", extra={"detail": str(error)})
        for stream in streams:
            progress = self._progress.get(stream.key)
            if progress is not None and progress.join_end == NOT_READ:
                progress.join_end = ends.get(stream.key.place)
                progress.floor = progress.join_end if progress.floor is None else progress.floor
                progress.held_at = monotonic() if progress.join_end is not None else None
        self._work.set()


def _now() -> float:
    return monotonic()


def _topic_id(topic_id: bytes) -> str:
    return str(uuid.UUID(bytes=topic_id))
