"""Decisions of this cluster's transactions, on their way to the other side of synchronous links.

Every proxy reads the whole transaction log (``state_tail``). Of a decision to commit that touches a partition of
a synchronous link it tells the other side: over the connections on which it pushes such a partition, and where it
fronts the coordinator over one connection in any case. The answer to EndTxn waits for that (``end_txn_gate``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, Role, leads_positions
from isthmus_plugins.api import Replace, Request, RequestHook, Verdict
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs.log_end_reader import EndsReader
from isthmus_plugins.replication.partitions import GroupPlaces, LedPartition
from isthmus_plugins.replication.sync.in_sync import SyncPartitions
from isthmus_plugins.replication.sync.links import SynchronousLinks
from isthmus_plugins.replication.sync.pushed import PushedPartitions
from isthmus_plugins.replication.sync.requirements import SyncNeeds
from isthmus_plugins.replication.transactions.abort_coverage import AbortEnds, Connections
from isthmus_plugins.replication.transactions.decision import Decision, Partition, remote_topic, said
from isthmus_plugins.replication.transactions.end_txn_gate import HeldTransaction, HeldTransactions
from isthmus_plugins.replication.transactions.groups_of_decisions import DecisionGroups
from isthmus_plugins.replication.transactions.marker_gate import MarkerGate
from isthmus_plugins.replication.transactions.state_tail import TransactionTail
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import peeks
from isthmus_protocol.messages import decode_request
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, Change, TransactionState

log = logging.getLogger("isthmus_plugins.replication")

STEP_S: Final = 0.2
"""How often is looked at what may have waited for too long, or has to be told again."""
CALL_TIMEOUT_S: Final = 10.0
CALL_MAX: Final = 500
"""How many decisions go in one call: each is answered in time, and none keeps the loop from other work."""
RETRY_S: Final = 0.05


class Decisions(Part):
    """The decisions that the other sides may not have yet, and the answers to EndTxn that wait for them."""

    def __init__(
        self,
        context: PluginContext,
        leader_end: LeaderEnd,
        groups: GroupPlaces,
        peers: Connections,
        links: SynchronousLinks,
        partitions: SyncPartitions,
        needs: SyncNeeds,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._leader_end = leader_end
        self._groups = groups
        self._pushed_now = PushedPartitions(leader_end, groups)
        self._peers = peers
        self._links = links
        self._partitions = partitions
        self._needs = needs
        self._tasks = Tasks("decisions")
        self._work = asyncio.Event()
        self._active = False
        self._pending: dict[str, list[Decision]] = {}
        """By transactional id, in the order of the log."""
        self._fresh: list[Decision] = []
        """Those whose ends are to be read."""
        self._asking = False
        self._ends = EndsReader(context, "decisions")
        self._aborts = AbortEnds(context, leader_end, groups, peers, links, needs, self._work.set, self._ends)
        self._held_back = False
        """Whether a decision waits for what is aborted before it."""
        self.tail = TransactionTail(context, self._on_change, self._on_progress, self._aborts.begin_anew)
        self._groups_of = DecisionGroups(context, links, needs, self._all_pending, self._groups_found)
        self.held = HeldTransactions(self, context.clock.monotonic, self._ask)
        self.markers = MarkerGate(
            context, leader_end, groups, partitions, needs, self.tail, self._recall, self._work.set
        )

    def start(self) -> None:
        self.tail.start()
        self._groups_of.start()
        self._tasks.start("tell", self._tell_for_ever())

    async def stop(self) -> None:
        await self.tail.stop()
        await self._groups_of.stop()
        await self._aborts.stop()
        await self._ends.stop()
        await self.markers.stop()
        await self._tasks.close()

    def control_changed(self, state: ControlState) -> None:
        """Links, their modes, or states of partitions are others."""
        self._look_at(state)
        self._work.set()

    def _look_at(self, state: ControlState) -> None:
        leading = any(
            self._links.holds(link) and any(mapping.role is Role.LEADER for mapping in link.mappings)
            for link in state.links.values()
        )
        active = leading or bool(self._links.former)
        self._active = active
        self.tail.follow(self._active)
        self._groups_of.follow(self._active and any(map(leads_positions, state.links.values())))
        if not self._active:
            self._pending.clear()
            self._fresh.clear()
            self.held.let_all_go()
        self.markers.follow(self._active)
        self.held.check()

    # ---- requests ----

    def hooks(self) -> list[RequestHook]:
        return [RequestHook(ApiKey.END_TXN, self.on_end_txn, whole=True)]

    def on_end_txn(self, request: Request) -> Verdict:
        """Have the answer to a commit wait for the other side."""
        if not self._active:
            return None
        _, payload = decode_request(request.frame)
        asked: Any = payload
        if not asked.committed:
            return None
        return Replace(request.frame, partial(self._answered, request.version, asked.transactional_id, request.frame))

    def _answered(self, version: int, transactional_id: str, request: bytes, frame: bytes) -> Any:
        if not self._active or peeks.error_codes(ApiKey.END_TXN, version, frame) != {0}:
            return frame
        return self.held.hold(transactional_id, request, frame)

    # ---- what answers wait for ----

    def partition_of(self, transactional_id: str) -> int | None:
        """See :class:`~isthmus_plugins.replication.transactions.end_txn_gate.TransactionNeeds`."""
        return self.tail.partition_of(transactional_id)

    def reached(self, partition: int) -> int:
        """See :class:`~isthmus_plugins.replication.transactions.end_txn_gate.TransactionNeeds`."""
        return self.tail.reached(partition)

    def outstanding(self, transactional_id: str) -> bool:
        """See :class:`~isthmus_plugins.replication.transactions.end_txn_gate.TransactionNeeds`."""
        if not self.tail.readable(transactional_id):
            return True
        if self.tail.is_past(transactional_id) and not self._told_again(transactional_id):
            return True  # whether its decision got to the other side died with the process before this one
        return not all(map(self._may_be_acked, self._pending.get(transactional_id, ())))

    def _told_again(self, transactional_id: str) -> bool:
        """Whether what an id decided before this process is being told, or need not be."""
        decided = self.tail.decided_by(transactional_id)
        if decided is None:
            return self._all_in_sync()
        self._remember(*decided)
        return True

    def _all_in_sync(self) -> bool:
        """Whether the other sides have all that was in this proxy's partitions when it had read the log."""
        places = {key.place for key in self._pushed()}
        return not any(map(self._groups_of.may_lead, places)) and all(
            clause.holds(self._partitions.in_sync) for place in places for clause in self._needs.commit_needed(place)
        )

    def _pushed(self) -> set[LedPartition]:
        """All that this proxy pushes, or is to push."""
        return {*self._leader_end.led, *self._groups.places()}

    def _may_be_acked(self, decision: Decision) -> bool:
        """Whether all have a decision that must; whoever joined later has what it decided."""
        if self._groups_of.may_be_needed(decision):
            return False
        return all(
            clause.holds(lambda key: key.link in decision.confirmed or self._needs_none(key, decision))
            for place in decision.places
            for clause in self._needs.commit_needed(place, decision.groups.get(place))
        )

    def _needs_none(self, key: LedPartition, decision: Decision) -> bool:
        return key.link not in decision.links and key in self._links.holding(key.place)

    def _is_kept(self, decision: Decision) -> bool:
        """Whether somebody is to have a decision, or may be."""
        waits = decision.looks_for_groups or self._groups_of.may_be_needed(decision)
        return waits or bool(self._missing(decision))

    def _missing(self, decision: Decision) -> set[str]:
        """Links that are to have a decision and do not."""
        told = {key for place in decision.places for key in self._told(decision, place)}
        return ({key.link for key in told} & decision.links) - decision.confirmed

    def _told(self, decision: Decision, place: Partition) -> set[LedPartition]:
        """Over which links a decision goes that lists a partition."""
        return self._groups_of.told(decision, place)

    def _links_of(self, places: Iterable[Partition]) -> set[str]:
        """Over which links a decision goes."""
        return {key.link for place in places for key in self._needs.told(place)}

    def _ask(self) -> None:
        if not self._asking:
            self._asking = True
            self._tasks.start("ends-of-log", self._read_ends_of_log())

    async def _read_ends_of_log(self) -> None:
        """Read where the transaction log ends, for answers that came before; at once for all that come meanwhile."""
        try:
            while taken := self.held.take_untold():
                by_partition: dict[int, list[HeldTransaction]] = {}
                for answer in taken:
                    answer.partition = self.tail.partition_of(answer.transactional_id)
                    if answer.partition is not None:
                        by_partition.setdefault(answer.partition, []).append(answer)
                places = [(TRANSACTION_TOPIC, partition) for partition in by_partition]
                await self._ends.read(places, partial(self._log_has_ended, by_partition))
                unknown = [answer for answer in taken if answer.partition is None]
                if unknown:
                    self.held.told(unknown)
                    self.tail.wake()
                    await asyncio.sleep(RETRY_S)
        finally:
            self._asking = False

    def _log_has_ended(
        self, waiting: Mapping[int, Sequence[HeldTransaction]], ends: Mapping[Partition, int | None]
    ) -> None:
        for (_, partition), end in ends.items():
            for answer in waiting[partition]:
                answer.log_end = end
            self.held.told(waiting[partition])

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
        """Have a decision told; whether it has to be."""
        transaction, at = change.transaction, (partition, change.offset)
        assert transaction is not None
        before = self.tail.decided(transaction.producer_id)
        self.tail.is_told(transaction.producer_id)
        if before is not None and before != (partition, change) and not self.markers.are_level(transaction.partitions):
            self._remember(*before)  # its marker may not be at the other side, and this one would hide it
        places = (place for place in transaction.partitions if place[0] == OFFSETS_TOPIC)
        of_groups = {link for place in places for link in self._links.records(place)}
        links = self._links_of(transaction.partitions) | of_groups
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
        )
        # Whether these need it depends on what the transaction has committed in groups.
        decision.looks_for_groups = bool(of_groups)
        if of_groups:
            self._groups_of.expect()
        pushed = self._pushed()
        for link_name in links:
            for place in transaction.partitions:
                if (key := LedPartition(link_name, *place)) in pushed:
                    self.markers.decided(key, decision)
        self._keep(change.transactional_id, sorted((*pending, decision), key=lambda each: each.at))
        self._fresh.append(decision)
        self._work.set()
        return True

    def _recall(self, key: LedPartition, producer_id: int, epoch: int) -> bool:
        """Have told what a producer decided in a partition before this process; whether that was not yet told."""
        found = self.tail.decided(producer_id)
        transaction = None if found is None else found[1].transaction
        if found is None or transaction is None or key.place not in transaction.partitions:
            return False
        return epoch in (transaction.producer_epoch, transaction.data_epoch) and self._remember(*found)

    def _go_on(self, change: Change) -> None:
        """Forget what other proxies have told, from when the id's next transaction is begun: that was answered then.

        Until then this proxy may come to front the coordinator, and be asked whether the other side has it.
        """
        pending = self._pending.get(change.transactional_id)
        if pending and (change.transaction is None or change.transaction.state is TransactionState.ONGOING):
            for decision in pending:
                self._groups_of.let_go(decision)
            self._keep(change.transactional_id, [decision for decision in pending if self._is_ours(decision)])

    def _is_ours(self, decision: Decision) -> bool:
        """Whether this proxy tells a decision."""
        return self._coordinates(decision) or any(
            self._connections_for(decision, link_name) for link_name in decision.links
        )

    def _coordinates(self, decision: Decision) -> bool:
        return self._context.fronts(self.tail.coordinator(decision.at[0]))

    def _keep(self, transactional_id: str, decisions: list[Decision]) -> None:
        if decisions:
            self._pending[transactional_id] = decisions
        else:
            self._pending.pop(transactional_id, None)

    def on_more(self) -> None:
        if self._held_back:
            self._work.set()

    def _on_progress(self) -> None:
        if self.held:
            self.held.check()

    # ---- telling ----

    async def _tell_for_ever(self) -> None:
        while True:
            self._work.clear()
            fresh, self._fresh = self._fresh, []
            if fresh:
                self._tasks.start("ends", self._read_ends(fresh))
            self._tell_again()
            self.markers.look(self._clock.monotonic())
            for transactional_id in self.held.expire(self._clock.monotonic()):
                log.warning("commit not confirmed in time", extra={"transactional_id": transactional_id})
            try:
                async with asyncio.timeout(STEP_S if self._active else None):
                    await self._work.wait()
            except TimeoutError:
                self._look_at(self._context.control.state)  # leases may have run out

    async def _read_ends(self, decisions: Sequence[Decision]) -> None:
        """Read where the partitions of new decisions end, and tell the decisions."""
        places = {place for decision in decisions for place in decision.places}
        await self._ends.read(places, partial(self._have_ended, decisions, {}, self._aborts.readings))

    def _have_ended(
        self,
        decisions: Sequence[Decision],
        known: dict[Partition, int | None],
        readings: int,
        ends: Mapping[Partition, int | None],
    ) -> None:
        """Tell those decisions of which all ends are known now."""
        known.update(ends)
        ready = [each for each in decisions if each.ends is None and known.keys() >= set(each.places)]
        for decision in ready:
            decision.ends = {place: end for place in decision.places if (end := known[place]) is not None}
            self._aborts.ended(decision, readings)
            self._groups_of.look_for(decision)
        self._tell(ready)

    def _all_pending(self) -> Iterator[Decision]:
        return (decision for of_id in self._pending.values() for decision in of_id)

    def _groups_found(self, found: Sequence[Decision]) -> None:
        """It is known what groups these are about, or that it will not be."""
        self._tell([decision for decision in found if decision.ends is not None])
        self.markers.go_on()
        self.held.check()

    def _tell_again(self) -> None:
        """Tell what nobody was told of, or was told in vain; forget what is needed no more."""
        self._held_back = False
        untold: list[Decision] = []
        for transactional_id, pending in list(self._pending.items()):
            left = [decision for decision in pending if self._is_kept(decision)]
            untold += [decision for decision in left if decision.ends is not None]
            self._keep(transactional_id, left)
        self._tell(untold)

    def _tell(self, decisions: Sequence[Decision]) -> None:
        """Send decisions over every connection that is to have them and was not sent them, many in one call."""
        calls: dict[LinkConnection, list[Decision]] = {}
        for decision in decisions:
            for link_name in self._missing(decision):
                connections = self._connections_for(decision, link_name) if self._carries(link_name, decision) else []
                unsent = [connection for connection in connections if connection not in decision.sent_on]
                if unsent and not self._aborts.are_there(
                    decision, link_name, partial(self.markers.is_held_for, decision)
                ):
                    self._held_back, unsent = True, []
                for connection in unsent:
                    calls.setdefault(connection, []).append(decision)
        for connection, told in calls.items():
            link = self._context.control.state.links.get(connection.link_name)
            for start in range(0, len(told), CALL_MAX):
                if link is not None and not connection.lost:
                    self._send(connection, link, told[start : start + CALL_MAX])

    def _carries(self, link_name: str, decision: Decision) -> bool:
        """Whether a link leads all of a decision's places that go over it: an answer says nothing of others."""
        link = self._context.control.state.links.get(link_name)
        told = [place for place in decision.places if LedPartition(link_name, *place) in self._told(decision, place)]
        return link is not None and all(remote_topic(link, topic) is not None for topic, _ in told)

    def _connections_for(self, decision: Decision, link_name: str) -> list[LinkConnection]:
        pushed = (self._pushed_now.get(LedPartition(link_name, *place)) for place in decision.places)
        pushing = {place.connection for place in pushed if place is not None}
        if not pushing and self._coordinates(decision):
            return self._peers.connections(link_name)[:1]
        return list(pushing)

    def _send(self, connection: LinkConnection, link: Link, decisions: Sequence[Decision]) -> None:
        """Put decisions on the way: what is sent over the connection after this comes behind them."""
        told = []
        for decision in decisions:
            again = decision.again or not self.markers.are_level(decision.places)
            told.append(said(link, decision, again, self.markers.earlier))
        answer = connection.begin_call(calls.Decide(tuple(told)))(CALL_TIMEOUT_S)
        for decision in decisions:
            decision.sent_on.add(connection)
        self.markers.go_on()
        self._tasks.start("decide", self._decided(connection, decisions, answer))

    async def _decided(
        self,
        connection: LinkConnection,
        decisions: Sequence[Decision],
        answer: Awaitable[calls.Done],
    ) -> None:
        try:
            await answer
        except (LinkRejected, LinkLost, TimeoutError) as error:
            log.warning("decisions not stored", extra={"link": connection.link_name, "detail": str(error)})
            # Markers wait there for what came over this connection: over another one they do not.
            connection.close(f"decisions not stored: {error}")
            for decision in decisions:
                decision.sent_on.discard(connection)
            self._work.set()
            return
        for decision in decisions:
            decision.confirmed.add(connection.link_name)
            pending = self._pending.get(decision.transactional_id, [])
            self._keep(decision.transactional_id, [each for each in pending if self._is_kept(each)])
        self.markers.go_on()
        self.held.check()
