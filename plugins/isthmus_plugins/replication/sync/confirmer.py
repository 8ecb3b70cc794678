"""Holds acks over synchronous links until the other side has what they ack (``docs/adr/0006``).

Here stands what followers have confirmed, and how far acks may go therefore; :mod:`.in_sync` has which partitions wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from isthmus_control.control_state import ControlState
from isthmus_control.lookup import Lookup
from isthmus_control.model import groups_with_topics, leads_commits
from isthmus_plugins.api import RequestHook
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.confirmation import Acks, Confirmer, NoAcks
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.client_views.confirmed_reads import ConfirmedReads
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.part import Part, not_joined
from isthmus_plugins.replication.partitions import GroupPlaces, LinkPartition, SyncPlace
from isthmus_plugins.replication.sync.commit_gate import CommitGate
from isthmus_plugins.replication.sync.in_sync import SyncPartitions
from isthmus_plugins.replication.sync.lease_grants import LeaseGrants
from isthmus_plugins.replication.sync.links import SynchronousLinks
from isthmus_plugins.replication.sync.new_partitions import NewPartitions
from isthmus_plugins.replication.sync.pushed import PushedPartitions
from isthmus_plugins.replication.sync.quorums import GroupScope, Quorums
from isthmus_plugins.replication.sync.requirements import Requirements
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

log = logging.getLogger("isthmus_plugins.replication")

STEP_S: Final = 0.2
"""How often is looked at what may have waited for too long."""
FAILED_RETRY_S: Final = 1.0


class SyncConfirmer(Confirmer, Part):
    """What synchronous links have confirmed of what this proxy's clients write."""

    name = "a synchronous link"

    def __init__(
        self, context: PluginContext, leader_end: LeaderEnd, groups: GroupPlaces, agreed: Callable[[str], bool]
    ) -> None:
        """``agreed``: whether the other cluster of a link knows of its mode, and so asks for leases."""
        self._context = context
        self._clock = context.clock
        self._tasks = Tasks("sync-confirmer", context.supervision)
        self._work = asyncio.Event()
        self._lookup: Lookup | None = None
        self._before: ControlState | None = None
        """As of the last look."""
        self.acks: Acks = NoAcks()
        """Those that wait for it."""
        self.known: dict[LinkPartition, tuple[int, int]] = {}
        """(leader epoch, offset): what a link's follower has confirmed."""
        self._stable: dict[LinkPartition, tuple[int, int]] = {}
        """The same of transactions that have ended there."""
        self._leased_until = float("inf")
        """What this proxy's lease was at the last look (monotonic seconds)."""
        self._known_ids: dict[str, bytes] = {}
        """By topic: the id of the one that this was confirmed of."""
        self.drain: Callable[[Sequence[TopicPartition]], Awaitable[None]] = not_joined
        """Returns when transactions in these that were decided before the call are carried out."""
        self.on_more: Callable[[], None] = not_joined
        """Called when more of a partition is confirmed."""
        self._quorums = Quorums(lambda: context.control.state)
        self._pushed = PushedPartitions(leader_end, groups)
        self._new = NewPartitions(context, agreed, lambda: self._pushed.topics()[1])
        self.links = SynchronousLinks(context, self._new)
        self.commits = CommitGate(context, self, groups, context.clock.monotonic)
        self.reads = ConfirmedReads(context, self.concerns, self.readable_end)
        self.partitions = SyncPartitions(
            context,
            self._pushed,
            self.links,
            self._quorums,
            self.known,
            self._waits_since,
            agreed,
            lambda places: self.drain(places),
            self._work.set,
        )
        self.requirements = Requirements(
            self._quorums,
            self.links,
            self.partitions.progress,
            self.leader_epoch,
            self.commits.scope_of,
            context.clock,
        )
        self.grants = LeaseGrants(
            context, leader_end, self._pushed, self._quorums, self.links, self.partitions, self.known
        )

    def start(self) -> None:
        self._tasks.keep("decide", self._decide_for_ever)
        self.commits.start()

    async def stop(self) -> None:
        await self.commits.stop()
        await self.reads.stop()
        await self._tasks.close()
        await self.partitions.stop()
        await self._new.stop()

    def control_changed(self, state: ControlState) -> None:
        """Hold, or let go, as the control log says now."""
        before = self._before or state
        if state.lookup is not self._lookup:
            self._lookup = state.lookup
            self._quorums.changed()
            self.partitions.links_changed(before, state)
            self._note_detached(before, state)
            self.links.changed(state)
            self.acks.changed()
        self._new.control_changed(state)
        self.partitions.records_changed(before, state)
        self._before = state
        self.requirements.changed()
        self.reads.control_changed(state)
        self._confirmed_all()
        self.commits.control_changed(self.links.leading(OFFSETS_TOPIC))
        self._work.set()

    def _note_detached(self, before: ControlState, state: ControlState) -> None:
        """Links are others: of groups that they lead no more it may still be said that they are In-Sync."""
        for name, link in before.links.items():
            if leads_commits(link):
                after = state.links.get(name)
                now = after.mappings if after is not None and groups_with_topics(after) else ()
                gone = [each for each in link.mappings if each.leads_groups and each not in now]
                if gone:
                    self.commits.detached(name, gone, state.applied_offset)

    # ---- whom it concerns ----

    def answers(self) -> Sequence[Answering]:
        return (calls.SyncLease.by(self.grants.on_sync_lease),)

    def hooks(self) -> list[RequestHook]:
        return [*self.commits.hooks(), *self.reads.hooks()]

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Whether some link is synchronous, or may have been."""
        return self.links.active

    def bound(self, acks: Acks) -> None:
        self.acks = acks

    def concerns(self, topic: str) -> bool:
        return self.links.concerns(topic)

    # ---- what an ack needs ----

    def leader_epoch(self, place: TopicPartition) -> int:
        return self._pushed.leader_epoch(place)

    def has_led(self, place: TopicPartition, broker_id: int, since: float) -> bool:
        return self._pushed.has_led(place, broker_id, since)

    def confirmed_end(
        self, place: TopicPartition, epoch: int, transactional: bool, scope: GroupScope | None = None
    ) -> int | None:
        """See :class:`~isthmus_plugins.confirmation.Confirmer`; ``scope``: to these groups."""
        topic_id = self._pushed.topic_id(place[0])
        self._forget_another(place[0], topic_id)
        ends = [quorum.end(self.known, epoch) for quorum in self.requirements.needed(place, transactional, scope)]
        end = min(ends, default=None)
        if end is None or end > 0:
            self._new.acked(place)
        if end is None:
            return None
        self._quorums.may_be_acked(place, topic_id, epoch, end, scope)
        return end

    def _forget_another(self, topic: str, topic_id: bytes | None) -> None:
        """Of a topic that was made anew, what was confirmed of the one before says nothing, at whatever epoch."""
        if topic_id is None or self._known_ids.get(topic, topic_id) == topic_id:
            return
        del self._known_ids[topic]
        for known in (self.known, self._stable):
            for key in [key for key in known if key.topic == topic]:
                del known[key]

    def readable_end(self, place: TopicPartition, committed: bool) -> int | None:
        """Up to where consumers see a partition that are to see what is confirmed alone: as far as plain acks go.

        None: all of it; -1: it is not known.
        """
        self._forget_another(place[0], self._pushed.topic_id(place[0]))
        epoch, known = self.leader_epoch(place), self._stable if committed else self.known
        return min((quorum.end(known, epoch) for quorum in self.requirements.needed(place, False)), default=None)

    def _confirmed_all(self) -> None:
        """Any partition may be confirmed further, or need less."""
        self.acks.confirmed_all()
        self.reads.confirmed_all()

    def _waits_since(self, key: LinkPartition, beyond: int) -> float | None:
        """Since when the first answer waits for a link to confirm an offset or a later one; None: none does."""
        offsets = key.topic == OFFSETS_TOPIC
        return self.commits.oldest(key, beyond) if offsets else self.acks.oldest(key.place, beyond)

    # ---- what is confirmed ----

    def on_stream(self, stream: LeaderStream) -> None:
        if stream.copy is None:
            if self.links.active:
                self._forget_another(stream.key.topic, stream.topic_id)
                self._stable[stream.key] = (stream.leader_epoch, stream.stable)
            self.on_confirmed(stream)

    def on_gone(self, stream: LeaderStream) -> None:
        """The source's broker does not have a partition that is pushed any more: what was confirmed of it says nothing
        of that of another topic, which may have the name already, and which no look has shown yet."""
        if stream.copy is None and self._known_ids.get(stream.key.topic) == stream.topic_id:
            for known in (self.known, self._stable):
                known.pop(stream.key, None)

    def on_confirmed(self, stream: SyncPlace) -> None:
        """The follower has more of a partition, or it was opened."""
        if not self.links.active:
            return
        self._forget_another(stream.key.topic, stream.topic_id)
        self._known_ids[stream.key.topic] = stream.topic_id
        self.known[stream.key] = (stream.leader_epoch, stream.acked)
        self.partitions.confirmed(stream.key, stream.acked)
        if stream.key.topic == OFFSETS_TOPIC:
            self.commits.confirmed(stream.key)
        else:
            self.acks.confirmed(stream.key.place)
            self.reads.confirmed(stream.key.place)
        self.on_more()
        if self.partitions.catches_up(stream.key):
            self._work.set()

    # ---- what time changes ----

    @property
    def _waits(self) -> bool:
        """Whether time alone may change something."""
        return bool(self.links.active or self.links.expiring)

    async def _decide_for_ever(self) -> None:
        while True:
            self._work.clear()
            if self._waits:
                try:
                    await self._decide(self._clock.monotonic())
                except (BrokerUnavailable, KafkaRefused) as error:
                    # Nothing is let go: acks wait until it is known what they mean.
                    log.warning("synchronous state not recorded", extra={"detail": str(error)})
                    await asyncio.sleep(FAILED_RETRY_S)
            try:
                async with asyncio.timeout(STEP_S if self._waits else None):
                    await self._work.wait()
            except TimeoutError:
                pass

    async def _decide(self, now: float) -> None:
        if self.links.expiring.expire(now):
            self._lookup = None
            self.control_changed(self._context.control.state)
        # As of the last look, too: one that was lost since then may have been had again.
        leased_until, self._leased_until = self._leased_until, self._context.lease_deadline
        if now >= min(leased_until, self._leased_until):
            self._new.forget()
            self.requirements.changed()
        elif self._new.look(*self._pushed.topics()):
            self._pushed.tell_again()
            self.requirements.changed()
            self.acks.confirmed_all()
        self.reads.confirmed_all()  # leaders may have moved
        await self.partitions.decide(now)
