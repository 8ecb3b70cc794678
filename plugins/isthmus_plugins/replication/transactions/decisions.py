"""Decisions of this cluster's transactions that the other side of a synchronous link is to have.

Every proxy reads the whole transaction log (``state_tail``) and has each decision to commit sent that touches a
partition of a synchronous link (``sender``), as soon as it is known where the transaction ends in each partition and
which groups it is about. Markers wait for that (``marker_gate``), and the answer to EndTxn for the other side to have
it (``end_txn_answers``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from isthmus_control.control_state import ControlState
from isthmus_control.model import Role, leads_commits
from isthmus_plugins.api import RequestHook
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.link.calls import LogPlace
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs.log_end_reader import LogEndReader
from isthmus_plugins.replication.partitions import GroupPlaces, LinkPartition
from isthmus_plugins.replication.sync.in_sync import SyncPartitions
from isthmus_plugins.replication.sync.links import SynchronousLinks
from isthmus_plugins.replication.sync.pushed import PushedPartitions
from isthmus_plugins.replication.sync.requirements import Requirements
from isthmus_plugins.replication.transactions.abort_coverage import AbortCoverage, Connections
from isthmus_plugins.replication.transactions.decision import Decision
from isthmus_plugins.replication.transactions.end_txn_answers import EndTxnAnswers
from isthmus_plugins.replication.transactions.groups_of_decisions import GroupsOfDecisions
from isthmus_plugins.replication.transactions.marker_gate import MarkerGate
from isthmus_plugins.replication.transactions.sender import DecisionSender
from isthmus_plugins.replication.transactions.state_tail import Decided, TransactionTail
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.transaction_log import Change, TransactionState

log = logging.getLogger("isthmus_plugins.replication")

STEP_S: Final = 0.2
"""How often is looked at what may have waited for too long, or has to be sent again."""
LEFT_MAX: Final = 10_000
"""Producers whose last decision is remembered although it was another proxy's to send."""
OPEN_AFTER_S: Final = 0.3
"""A decision some of whose partitions have not told their ends by then goes without these ends."""


class Decisions(Part):
    """The decisions that the other sides may not have yet, and what waits for them."""

    def __init__(
        self,
        context: PluginContext,
        leader_end: LeaderEnd,
        groups: GroupPlaces,
        peers: Connections,
        links: SynchronousLinks,
        partitions: SyncPartitions,
        requirements: Requirements,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._leader_end = leader_end
        self._groups = groups
        self._links = links
        self._partitions = partitions
        self._requirements = requirements
        self._tasks = Tasks("decisions", context.supervision)
        self._work = asyncio.Event()
        self._active = False
        self._pending: dict[str, list[Decision]] = {}
        """By transactional id, in the order of the log."""
        self._left: dict[int, Decision] = {}
        """By producer: what it decided last of those that other proxies were to send."""
        self._fresh: list[Decision] = []
        """Those whose ends are to be read."""
        self._ends = LogEndReader(context, "decisions")
        self._aborts = AbortCoverage(
            context, leader_end, groups, peers, links, requirements, self._work.set, self._ends
        )
        self.tail = TransactionTail(context, self._on_change, self._on_progress, self._aborts.begin_anew)
        self._groups_of = GroupsOfDecisions(context, links, requirements, self._all_pending, self._groups_found)
        self.markers = MarkerGate(
            context, leader_end, groups, partitions, requirements, self.tail, self._recall, self._insist, self._work.set
        )
        self._sender = DecisionSender(
            context,
            peers,
            PushedPartitions(leader_end, groups),
            self._groups_of,
            self._aborts,
            self.markers,
            self.tail.coordinator,
            self._stored,
            self._work.set,
        )
        self.end_txn = EndTxnAnswers(context, self.tail, self._ends, self._outstanding)

    def start(self) -> None:
        self.tail.start()
        self._groups_of.start()
        self.end_txn.start()
        self._tasks.keep("send", self._send_for_ever)

    async def stop(self) -> None:
        await self.tail.stop()
        await self._groups_of.stop()
        await self._aborts.stop()
        await self._ends.stop()
        await self._tasks.close()
        await self._sender.stop()
        await self.markers.stop()
        await self.end_txn.stop()

    def hooks(self) -> list[RequestHook]:
        return self.end_txn.hooks()

    def control_changed(self, state: ControlState) -> None:
        """Links, their modes, or states of partitions are others."""
        self._look_at(state)
        self._work.set()

    def _look_at(self, state: ControlState) -> None:
        leading = any(self._links.holds(link) and link.pairs(Role.LEADER) for link in state.links.values())
        self._active = leading or bool(self._links.expiring)
        self.tail.follow(self._active)
        self._groups_of.follow(self._active and any(map(leads_commits, state.links.values())))
        if not self._active:
            self._pending.clear()
            self._left.clear()
            self._fresh.clear()
        self.end_txn.follow(self._active)
        self.markers.follow(self._active)
        self.end_txn.check()

    # ---- what answers wait for ----

    def _outstanding(self, transactional_id: str) -> bool:
        """Whether some decision of an id is not known to be on the other side, as far as the log is read."""
        if not self.tail.readable(transactional_id):
            return True
        if self.tail.is_past(transactional_id) and not self._sent_again(transactional_id):
            return True  # whether its decision got to the other side died with the process before this one
        return not all(map(self._may_be_acked, self._pending.get(transactional_id, ())))

    def _sent_again(self, transactional_id: str) -> bool:
        """Whether what an id decided before this process is being sent, or need not be."""
        decided = self.tail.decided_by(transactional_id)
        if not decided:
            return self._all_in_sync()
        self._remember(*decided[-1])
        return True

    def _all_in_sync(self) -> bool:
        """Whether the other sides have all that was in any partition when this proxy had read the log: in its own, and
        in those of other proxies as they are recorded."""
        pushed = self._pushed()
        places = {key.place for key in pushed}
        for link_name, records in self._context.control.state.sync_records.items():
            places |= {place for place in records if self._links.own_record(link_name, place) is not None}

        def has_all(key: LinkPartition) -> bool:
            return self._partitions.in_sync(key) if key in pushed else key in self._links.holding(key.place)

        return not any(map(self._groups_of.may_lead, places)) and all(
            quorum.holds(has_all) for place in places for quorum in self._requirements.commit_needed(place)
        )

    def _pushed(self) -> set[LinkPartition]:
        """All that this proxy pushes, or is to push."""
        return {*self._leader_end.discovery.led, *self._groups.places()}

    def _may_be_acked(self, decision: Decision) -> bool:
        """Whether all have a decision that must; whoever joined later has what it decided."""
        if self._groups_of.may_be_needed(decision):
            return False
        return all(
            quorum.holds(lambda key: decision.is_confirmed(key) or self._needs_none(key, decision))
            for place in decision.places
            for quorum in self._requirements.commit_needed(place, decision.groups.get(place))
        )

    def _needs_none(self, key: LinkPartition, decision: Decision) -> bool:
        return key.link not in decision.links and key in self._links.holding(key.place)

    def _is_kept(self, decision: Decision) -> bool:
        """Whether somebody is to have a decision, or may be."""
        waits = decision.looks_for_groups or self._groups_of.may_be_needed(decision)
        return waits or bool(self._groups_of.missing(decision))

    # ---- the log ----

    def _on_change(self, partition: int, change: Change) -> None:
        """A transactional id has another state."""
        self._aborts.take(change)
        transaction = change.transaction
        if transaction is None or transaction.state is not TransactionState.PREPARE_COMMIT:
            self._go_on(change)
        else:
            self._remember(partition, change)

    def _remember(self, partition: int, change: Change) -> bool:
        """Have a decision sent; whether it has to be."""
        transaction, at = change.transaction, LogPlace(partition, change.offset, change.epoch)
        assert transaction is not None
        self._remember_all(self.tail.take_decided(transaction.producer_id))  # this one would hide them
        places = (place for place in transaction.partitions if place[0] == OFFSETS_TOPIC)
        of_groups = {link for place in places for link in self._links.records(place)}
        links = {key.link for place in transaction.partitions for key in self._requirements.sent_to(place)} | of_groups
        pending = self._pending.get(change.transactional_id, [])
        if not links or any(known.at == at for known in pending):
            return False
        decision = Decision(
            change.transactional_id,
            transaction.producer_id,
            transaction.producer_epoch,
            transaction.data_epoch,
            at,
            transaction.partitions,
            frozenset(links),
            self._clock.monotonic(),
            transaction.started_ms,
            self.tail.is_old(at),
            unread=set(transaction.partitions),
        )
        # EndTxn of a new one waits, so nothing of the epoch comes before its ends are read.
        decision.ends_hold = not (decision.again and decision.shares_epoch)
        # Whether these need it depends on what the transaction has committed in groups.
        decision.looks_for_groups = bool(of_groups)
        if of_groups:
            self._groups_of.expect()
        pushed = self._pushed()
        for link_name in links:
            for place in transaction.partitions:
                if (key := LinkPartition(link_name, *place)) in pushed:
                    self.markers.decided(key, decision)
        self._keep(change.transactional_id, sorted((*pending, decision), key=lambda each: each.at.identity))
        self._fresh.append(decision)
        self._work.set()
        return True

    def _remember_all(self, decided: Sequence[Decided]) -> bool:
        """Have those sent whose markers may not be at the other side; whether any has to be."""
        to_be_sent = [
            self._remember(partition, change)
            for partition, change in decided
            if change.transaction is not None and not self.markers.are_level(change.transaction.partitions)
        ]
        return any(to_be_sent)

    def _recall(self, key: LinkPartition, producer_id: int, epoch: int) -> bool:
        """Have sent what a producer decided in a partition before this process; whether that was not yet.

        What was decided since, but before this proxy pushed the partition, is sent, too, and the marker gate is told.
        """
        left = self._left.get(producer_id)
        if left is not None and key.place in left.places and self._insist(left, key.link):
            left.again = True  # what it decided since may be stored by now
            del self._left[producer_id]
            self._work.set()
        for decision in self._all_pending():
            if decision.producer_id == producer_id and key.place in decision.places and key.link in decision.links:
                self.markers.decided(key, decision)
        past = [each.change.transaction for each in self.tail.decided(producer_id)]
        if any(
            each is not None and key.place in each.partitions and epoch in (each.producer_epoch, each.data_epoch)
            for each in past
        ):
            return self._remember_all(self.tail.take_decided(producer_id))
        return False

    def _insist(self, decision: Decision, link_name: str) -> bool:
        """Have a decision sent over a link, since a marker waits for it; whether it is to be."""
        if link_name not in self._groups_of.missing(decision):
            return False
        pending = self._pending.get(decision.transactional_id, [])
        if decision not in pending:
            self._keep(decision.transactional_id, sorted((*pending, decision), key=lambda each: each.at.identity))
        return True

    def _go_on(self, change: Change) -> None:
        """Forget what other proxies have sent, from when the id's next transaction is begun: that was answered then.

        Until then this proxy may come to front the coordinator, and be asked whether the other side has it.
        """
        pending = self._pending.get(change.transactional_id)
        for decision in pending or ():
            if not decision.ends_hold and change.transaction is not None:
                producer = decision.producer_id, decision.producer_epoch
                decision.answered |= change.transaction.is_under_way(*producer)
        if pending and (change.transaction is None or change.transaction.state is TransactionState.ONGOING):
            for decision in pending:
                self._groups_of.let_go(decision)
                if not self._sender.is_ours(decision):
                    self._leave(decision)
            self._keep(change.transactional_id, [decision for decision in pending if self._sender.is_ours(decision)])

    def _leave(self, decision: Decision) -> None:
        """Another proxy sends it, or has. Should this one push a partition of it before its marker, it has to, too."""
        self._left.pop(decision.producer_id, None)
        self._left[decision.producer_id] = decision
        if len(self._left) > LEFT_MAX:
            del self._left[next(iter(self._left))]

    def _keep(self, transactional_id: str, decisions: list[Decision]) -> None:
        if decisions:
            self._pending[transactional_id] = decisions
        else:
            self._pending.pop(transactional_id, None)

    def on_more(self) -> None:
        if self._sender.held_back:
            self._work.set()

    def _on_progress(self) -> None:
        self.end_txn.check()

    # ---- sending ----

    async def _send_for_ever(self) -> None:
        while True:
            self._work.clear()
            await self.end_txn.expire()  # first: whatever becomes of the rest, clients are answered
            fresh, self._fresh = self._fresh, []
            if fresh:
                self._tasks.keep("ends", partial(self._read_ends, fresh))
            self._send_again()
            self.markers.look(self._clock.monotonic())
            try:
                async with asyncio.timeout(STEP_S if self._active else None):
                    await self._work.wait()
            except TimeoutError:
                self._look_at(self._context.control.state)  # leases may have run out

    async def _read_ends(self, decisions: Sequence[Decision]) -> None:
        """Read where the partitions of new decisions end, and send the decisions."""
        places = {place for decision in decisions for place in decision.places}
        await self._ends.read(places, partial(self._have_ended, decisions, self._aborts.readings))

    def _have_ended(
        self, decisions: Sequence[Decision], readings: int, ends: Mapping[TopicPartition, int | None]
    ) -> None:
        """Send those decisions of which enough is known now."""
        concerned = [decision for decision in decisions if not decision.unread.isdisjoint(ends)]
        for decision in concerned:
            found = decision.unread & ends.keys()
            decision.unread -= found
            decision.ends |= {place: end for place in found if (end := ends[place]) is not None}
            self._aborts.ended(decision, readings)
            self._groups_of.look_for(decision)
        self._send(concerned)
        if unsure := [each for each in concerned if not (each.unread or each.ends_hold)]:
            self._tasks.start("hold-ends", self._hold_ends(unsure))

    async def _hold_ends(self, decisions: Sequence[Decision]) -> None:
        """Send those of which the log says that nothing of their epoch had begun when their ends were read."""
        unread = {decision.at.partition for decision in decisions}
        while unread:
            for partition in sorted(unread):
                try:
                    await self.tail.caught_up(partition)
                    unread.discard(partition)
                except (BrokerUnavailable, KafkaRefused) as error:
                    log.warning("transaction log not read", extra={"partition": partition, "detail": str(error)})
            if unread:
                await asyncio.sleep(STEP_S)
        for decision in decisions:
            decision.ends_hold = not decision.answered
        self._send(each for decision in decisions for each in self._pending.get(decision.transactional_id, ()))

    def _send(self, decisions: Iterable[Decision]) -> None:
        self._sender.send(list(filter(self._may_go, decisions)))

    def _may_go(self, decision: Decision) -> bool:
        """Whether enough is known to send it: of those before it, too, since it carries them along."""
        pending = self._pending.get(decision.transactional_id, ())
        return decision.may_go and all(
            each.ends_hold or each.answered for each in pending if each.identity < decision.identity
        )

    def _all_pending(self) -> Iterator[Decision]:
        return (decision for of_id in self._pending.values() for decision in of_id)

    def _groups_found(self, found: Sequence[Decision]) -> None:
        """It is known what groups these are about, or that it will not be."""
        self._send(found)
        self.markers.go_on()
        self.end_txn.check()

    def _send_again(self) -> None:
        """Send what was not sent, or was sent in vain; forget what is needed no more."""
        unsent: list[Decision] = []
        open_since = self._clock.monotonic() - OPEN_AFTER_S
        for transactional_id, pending in list(self._pending.items()):
            left = [decision for decision in pending if self._is_kept(decision)]
            for decision in left:
                decision.goes_open = decision.goes_open or decision.seen_at < open_since
            unsent += filter(self._may_go, left)
            self._keep(transactional_id, left)
        self._sender.send_all(unsent)

    def _stored(self, decisions: Sequence[Decision]) -> None:
        """The other side of a link has these."""
        for decision in decisions:
            pending = self._pending.get(decision.transactional_id, [])
            self._keep(decision.transactional_id, [each for each in pending if self._is_kept(each)])
        self.markers.go_on()
        self.end_txn.check()
