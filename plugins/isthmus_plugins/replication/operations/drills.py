"""Drills: what a failover now would lose, and how long it would take, tried on a copy of what follows.

What would be lost the source's proxies say (``unconfirmed``, ``losses``). The copy (``drill_copies``) follows over a
link that leads nowhere, and is failed over by ``failover``, as anything else is. It is deleted in the end; where nobody
does that, since who tried it is gone, any proxy of the cluster does.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from isthmus_control.levels import DRILLS as LEVEL
from isthmus_control.model import Link, NamespaceKey, NamespaceMapping, ResourceType, Role
from isthmus_control.outcome import Rejection
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.drill_report import CopySize, DrillFailover, DrillReport, LostByFailover, MeasuredFailover
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.links import DrillStatus, LinkStatus, NamespaceRef, OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.in_doubt.resolution import Resolution
from isthmus_plugins.replication.in_doubt.store import TransactionStore
from isthmus_plugins.replication.operations import drill_copies, losses
from isthmus_plugins.replication.operations.drill_copies import DrillCopies, DrillRefused, Plan
from isthmus_plugins.replication.operations.failover import CLAIMS_RECORDED_S, Failovers
from isthmus_plugins.replication.operations.unconfirmed import Unconfirmed
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import BatchError

log = logging.getLogger("isthmus_plugins.replication")

LOOK_S: Final = 2.0
"""How often a proxy looks for copies that nobody uses any more."""
NUMBER_CHARS: Final = 8
TOO_MANY_PARTITIONS: Final = "TOO_MANY_PARTITIONS"
_KINDS: Final = (ResourceType.TOPIC, ResourceType.CONSUMER_GROUP)
_FAILURES: Final = (BrokerUnavailable, KafkaRefused, DrillRefused, OperationError, BatchError)
"""Why a copy is not deleted now: it is tried again."""

Progress = Callable[[int, int], None]


class Drills:
    """``status``: what this proxy shows of a link."""

    def __init__(
        self,
        context: PluginContext,
        unconfirmed: Unconfirmed,
        status: Callable[[Link], LinkStatus],
        failovers: Failovers,
        store: TransactionStore,
        ends: Resolution,
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._unconfirmed = unconfirmed
        self._status = status
        self._failovers = failovers
        self._copies = DrillCopies(context, store)
        self._ends = ends
        self._tasks = Tasks("drills", context.supervision)
        self._running: set[str] = set()
        """Links of copies that are in use here."""
        self._troubles: dict[str, str] = {}
        """By link of a copy: why it is not deleted yet."""

    def start(self) -> None:
        self._tasks.keep("clear", self._clear_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def status(self, link_name: str) -> DrillStatus | None:
        """The copy of what follows over a link, if there is one."""
        state = self._context.control.state
        for link in state.links.values():
            if link.drill is not None and link.drill.link == link_name:
                return DrillStatus(
                    copy_name=link.name,
                    begun_ms=link.created_ms,
                    in_use=not self._is_unused(link),
                    message=self._troubles.get(link.name),
                )
        return None

    # ---- the operator's request ----

    async def fail_over(self, link: Link, request: DrillFailover, progress: Progress) -> DrillReport:
        """Say what failing over what follows over a link would lose, and try it on a copy. Raises OperationError."""
        pairs, role = _wanted(link, request.namespaces)
        report = DrillReport(
            link_name=link.name,
            dry_run=request.dry_run,
            asked="follower" if role is Role.FOLLOWER else "leader",
            namespaces=[NamespaceRef(type=each.type.value, local=each.local_prefix) for each in pairs],
            lost=await self._lost(link, pairs, role),
        )
        if role is Role.LEADER:
            return report
        try:
            wanted = await self._plan(link, pairs)
            report.copy_size = _size(wanted, pairs)
            if not request.dry_run:
                self._check(wanted, request.partitions_max)
                await self._try(link, wanted, report, progress)
        except DrillRefused as error:
            raise OperationError(error.code, str(error), 409) from error
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        return report

    async def _plan(self, link: Link, pairs: Sequence[NamespaceMapping]) -> Plan:
        state, number = self._context.control.state, uuid.uuid4().hex[:NUMBER_CHARS]
        topics = await self._context.cluster.topics()
        return drill_copies.plan(state, link, pairs, number, topics, await self._context.cluster.groups())

    def _check(self, wanted: Plan, partitions_max: int) -> None:
        """Raise OperationError where no copy can be made, or it would be larger than it may be."""
        level = self._context.control.state.level
        if level < LEVEL:
            raise OperationError(
                Rejection.NOT_SUPPORTED.told,
                f"trying a failover needs feature level {LEVEL} of the control log, which has {level}: isthmus control "
                "upgrade. A dry run says what would be lost",
            )
        if wanted.partitions > partitions_max:
            raise OperationError(
                TOO_MANY_PARTITIONS,
                f"a copy would have {wanted.partitions} partitions, and this cluster so many more meanwhile: where its "
                f"brokers can bear that, say --partitions-max {wanted.partitions}",
            )

    async def _try(self, link: Link, wanted: Plan, report: DrillReport, progress: Progress) -> None:
        """Fail a copy over, and delete it."""
        self._running.add(wanted.name)
        try:
            await self._copies.delete_unclaimed(looked_for=True)
            report.measured = await self._measured(link, wanted, progress)
        finally:
            self._running.discard(wanted.name)
        report.copy_deleted = await self._deleted(wanted.name)

    async def _measured(self, link: Link, wanted: Plan, progress: Progress) -> MeasuredFailover:
        began = self._clock.monotonic()
        made = await self._copies.make(link, wanted, await self._ends.stored(link.name))
        asked = looked = self._clock.monotonic()

        def note(done: int, total: int) -> None:
            nonlocal looked
            if not done:  # it was looked at what there is
                looked = self._clock.monotonic()
            progress(done, total)

        failed_over = await self._failovers.fail_over(made.link, Failover(although_reachable=True), note)
        over = self._clock.monotonic()
        await self._copies.write(wanted)
        return MeasuredFailover(
            seconds=round(CLAIMS_RECORDED_S + over - asked, 3),
            leases_seconds=CLAIMS_RECORDED_S,
            look_seconds=round(looked - asked, 3),
            carry_out_seconds=round(over - looked, 3),
            write_seconds=round(self._clock.monotonic() - over, 3),
            positions=made.positions,
            transactions_ended=sum(each.transactions_ended for each in failed_over.namespaces),
            transactions_committed=sum(each.transactions_committed for each in failed_over.namespaces),
            settings_refused=[why for each in failed_over.namespaces for why in each.settings_refused],
            copy_seconds=round(asked - began, 3),
        )

    # ---- what would be lost ----

    async def _lost(self, link: Link, pairs: Sequence[NamespaceMapping], role: Role) -> LostByFailover:
        if role is Role.LEADER:
            return losses.lost([await self._unconfirmed.of(link)], *_held(pairs))
        status = self._status(link)
        try:
            answers = await self._unconfirmed.asked(link)
        except OperationError as error:
            return losses.not_said(error.message)
        if answers:
            return losses.lost(answers, *_names(pairs))
        topic, _ = _held(pairs)
        followed = [each for each in status.partitions if topic(each.topic) is not None]
        why = status.message or "none of its proxies that are connected answers"
        return losses.last_known(followed, status.last_heard_seconds, f"the source says nothing: {why}")

    # ---- copies that nobody uses any more ----

    def _is_unused(self, link: Link) -> bool:
        """Whether nobody tries anything on a copy: who did has ended that, or is gone."""
        assert link.drill is not None
        if link.drill.owner == self._context.incarnation:
            return link.name not in self._running
        return not self._context.control.state.may_run(link.drill.owner)

    async def _clear_for_ever(self) -> None:
        looked_for = True
        while True:
            await asyncio.sleep(LOOK_S)
            if self._clock.monotonic() > self._context.lease_deadline:
                continue
            links = self._context.control.state.links
            self._troubles = {name: why for name, why in self._troubles.items() if name in links}
            for link in list(links.values()):
                if link.drill is not None and self._is_unused(link):
                    await self._deleted(link.name)
            if looked_for:
                looked_for = not await self._found_unclaimed()

    async def _found_unclaimed(self) -> bool:
        """Once after a start: whether it was looked for what processes before this one have left."""
        try:
            await self._copies.delete_unclaimed(looked_for=True)
        except _FAILURES as error:
            log.info("copies of drills not looked for", extra={"detail": str(error)})
            return False
        return True

    async def _deleted(self, name: str) -> bool:
        """Delete a copy; False: not now, it is tried again."""
        link = self._context.control.state.links.get(name)
        if link is None:
            return True
        try:
            deleted = await self._copies.delete(link)
            why = None if deleted else "its failover has not ended"
        except _FAILURES as error:
            deleted, why = False, str(error)
        if why is None:
            self._troubles.pop(name, None)
        else:
            self._troubles[name] = why
            log.warning("copy of a drill not deleted", extra={"link": name, "detail": why})
        return deleted


def _size(wanted: Plan, pairs: Sequence[NamespaceMapping]) -> CopySize:
    return CopySize(
        topics=len(wanted.topics),
        partitions=wanted.partitions,
        groups=len(wanted.groups),
        not_copied=[
            NamespaceRef(type="principal", local=each.local_prefix)
            for each in pairs
            if each.type is ResourceType.PRINCIPAL
        ],
    )


def _wanted(link: Link, namespaces: Sequence[NamespaceRef]) -> tuple[list[NamespaceMapping], Role]:
    """The pairs that were asked for, of the one role that this cluster has in them; all that follow where nothing is
    named, or else all that are led."""
    if not namespaces:
        for role in (Role.FOLLOWER, Role.LEADER):
            if pairs := list(link.pairs(role)):
                return pairs, role
        raise OperationError("NOT_FOUND", f"nothing is attached to {link.name!r}", 404)
    found = []
    for each in namespaces:
        key = NamespaceKey(ResourceType(each.type), each.local)
        mapping = link.mapping(*key)
        if mapping is None:
            raise OperationError("NOT_FOUND", f"the {key} is not attached to {link.name!r}", 404)
        found.append(mapping)
    roles = {each.role for each in found}
    if len(roles) > 1:
        raise OperationError(
            "INVALID", "some of these follow, and this cluster leads the others: a failover is of what follows", 422
        )
    return found, roles.pop()


def _names(pairs: Sequence[NamespaceMapping]) -> tuple[losses.Name, losses.Name]:
    """What the source's topics and groups are called here."""
    topic, group = (_first(pairs, kind, NamespaceMapping.local_name) for kind in _KINDS)
    return topic, group


def _held(pairs: Sequence[NamespaceMapping]) -> tuple[losses.Name, losses.Name]:
    """This cluster's own topics and groups, of those that the pairs hold."""
    topic, group = (_first(pairs, kind, lambda pair, name: name if pair.holds(name) else None) for kind in _KINDS)
    return topic, group


def _first(
    pairs: Sequence[NamespaceMapping], kind: ResourceType, called: Callable[[NamespaceMapping, str], str | None]
) -> losses.Name:
    some = [each for each in pairs if each.type is kind]
    return lambda name: next((found for each in some if (found := called(each, name)) is not None), None)
