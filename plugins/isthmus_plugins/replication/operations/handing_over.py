"""Reversal, at the cluster that leads: its clients' writes wait until the other cluster leads, or they are taken back.

1. *Looked at*: whether this cluster could follow, what the other one lacks, what is open. Nothing is held.
2. *Announced*: nobody begins a transaction there; those that are open may end by themselves for a while.
3. *Held*: every proxy has clients' writes wait. What is open is aborted, and its producers fenced.
4. *Drained*: the other cluster has all, and has recorded that it is to lead.
5. *Handed over*: one record. This cluster follows from there on.
6. The other cluster is told so until it leads.

Until 5 the proxy that was asked carries it out (the *owner*), and takes it back when the time is over or something
fails. Any other proxy does when the owner is gone, or takes too long: the log says which of the two counts, so it need
not know. From 5 on every proxy tells the other cluster, which leads once.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from isthmus_control.commands import AbandonReversal, AnnounceReversal, EndReversal, HandOver, HoldReversal, TakeBack
from isthmus_control.control_state import ControlState
from isthmus_control.model import (
    Link,
    NamespaceKey,
    NamespaceMapping,
    Reason,
    ResourceType,
    Reversal,
    ReversalStep,
    TopicEnd,
)
from isthmus_control.outcome import Rejection
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.links import OperationError, ReversalStatus, ReverseReport, TopicPlan
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions, Scope
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.calls import AttachedPair
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected
from isthmus_plugins.replication.link.features import REVERSALS
from isthmus_plugins.replication.operations.attaching import Attaching
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.replication.operations.promotion import NOT_DRAINED, Promotions, listed
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

LOOK_S: Final = 0.5
"""How often a proxy looks after reversals that nobody may be carrying out, while there are any."""
MARGIN_S: Final = 2.0
"""So much longer than it should take somebody else's reversal is left alone."""
TOLD_S: Final = 10.0
"""How long who asked for it waits until the other cluster leads; it is told on after that."""
HANDED_OVER: Final = "HANDED_OVER"
MISSING_LISTED: Final = 5


class HandingOver:
    """Carries out what operators ask for, and answers the other cluster. ``open_commits``: what this cluster's own
    transactions have in groups, once it was begun to be ended. All but answers raise OperationError."""

    def __init__(
        self,
        context: PluginContext,
        commands: LinkCommands,
        attaching: Attaching,
        promotions: Promotions,
        own_transactions: OwnTransactions,
        open_commits: Callable[[Scope], Awaitable[Reason | None]],
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._commands = commands
        self._attaching = attaching
        self._promotions = promotions
        self._own_transactions = own_transactions
        self._open_commits = open_commits
        self._tasks = Tasks("reversals", context.supervision)
        self._running: set[str] = set()
        """Those that this process carries out."""
        self._seen: dict[tuple[str, ReversalStep], float] = {}
        """Since when (monotonic seconds) it has known them to be in a step."""
        self._waits: dict[str, str] = {}
        """What they wait for, or what failed."""
        self._under_way = asyncio.Event()
        """Something is being reversed."""

    def start(self) -> None:
        self._tasks.keep("look-after", self._look_after_all)

    async def stop(self) -> None:
        await self._tasks.close()

    def control_changed(self, state: ControlState) -> None:
        """What is being reversed may be something else."""
        if state.reversals:
            self._under_way.set()
        else:
            self._under_way.clear()

    def statuses(self, link_name: str) -> list[ReversalStatus]:
        """The reversals of a link that are under way."""
        found = (each for each in self._context.control.state.reversals.values() if each.link == link_name)
        return [
            ReversalStatus(
                reversal_id=each.reversal_id,
                namespaces=[links.NamespaceRef(type=key.type.value, local=key.prefix) for key in each.keys],
                step=each.step.value,
                begun_ms=each.begun_ms,
                waits_for=self._waits.get(each.reversal_id) or _waits_for(each),
            )
            for each in found
        ]

    # ---- the operator's request ----

    async def reverse(self, link_name: str, request: links.Reverse) -> ReverseReport:
        """Have the other cluster lead, or (``dry_run``) say what keeps it from that."""
        self._commands.link(link_name)
        self._commands.knows(link_name, REVERSALS)
        keys = [NamespaceKey(ResourceType(each.type), each.local) for each in request.namespaces]
        body = AnnounceReversal(
            link_name,
            *keys[0],
            tuple(keys[1:]),
            str(uuid.uuid4()),
            self._context.incarnation,
            round(request.transactions_wait_seconds * 1000),
            round(request.hold_seconds * 1000),
            request.disable_transaction_verification,
            round(request.move_clients_seconds * 1000),
        )
        reversal = self._commands.would_append(body).reversals[body.reversal_id]
        report = await self._look(reversal, request.dry_run)
        if request.dry_run:
            return report
        if report.refused:
            raise OperationError(NOT_DRAINED, f"nothing is held: {listed(report.refused, MISSING_LISTED)}", 409)
        # Whoever asked may hang up: it is not left halfway for that.
        work = self._tasks.start(f"reverse-{body.reversal_id}", self._carried_out(body))
        failure = await asyncio.shield(work)
        if failure is not None:
            raise failure
        report.reversed = True
        return report

    async def abandon(self, link_name: str, request: links.AbandonReversal) -> None:
        """Have this cluster lead on, or again. The other one is asked to record first that it never will."""
        self._commands.link(link_name)
        found = [each for each in self._context.control.state.reversals.values() if each.link == link_name]
        if not found:
            raise OperationError("NOT_FOUND", f"nothing of link {link_name!r} is being reversed", 404)
        for reversal in found:
            if reversal.at_leader:
                pairs = self._pairs(reversal)
                await self._commands.append(TakeBack(link_name, reversal.reversal_id))
                await self._forgotten_there(link_name, reversal.reversal_id, pairs)
            elif reversal.step is ReversalStep.DRAINED:
                raise OperationError("CONFLICT", "the other cluster leads, or has handed over: that is said there", 409)
            else:
                await self._abandon(reversal, request.although_unreachable)
        await self._commands.enforced()
        await self._attaching.verification_as_agreed("abandoned")

    async def _abandon(self, reversal: Reversal, although_unreachable: bool) -> None:
        question = calls.AbandonReversal(reversal.reversal_id, self._pairs(reversal))
        try:
            await self._commands.call(reversal.link, question)
        except OperationError as error:
            if error.code != "UNAVAILABLE":
                raise
            if not although_unreachable:
                raise OperationError(
                    error.code,
                    "the other cluster cannot be asked whether it leads: if it does, both would. If you know that it "
                    f"does not, and never heard that it may, say --yes ({error.message})",
                    503,
                ) from error
            log.warning("reversal abandoned unasked", extra={"link": reversal.link, "id": reversal.reversal_id})
        await self._commands.append(AbandonReversal(reversal.link, reversal.reversal_id))

    # ---- looked at ----

    async def _look(self, reversal: Reversal, dry_run: bool) -> ReverseReport:
        link = self._commands.link(reversal.link)
        report = ReverseReport(link_name=link.name, dry_run=dry_run, namespaces=[])
        for mapping in _mappings(link, reversal):
            ref = links.NamespaceRef(type=mapping.type.value, local=mapping.local_prefix)
            report.namespaces.append(ref)
            plans, verification = await self._attaching.plan_to_follow(
                link.name, mapping, reversal.disable_transaction_verification
            )
            report.refused += [why for plan in plans if (why := not_to_follow(plan)) is not None]
            if verification.action == "refuse":
                report.refused.append(verification.message or verification.setting)
        try:
            topics = await self._led(link, reversal)
            drain = await self._question(reversal, topics, 0, dry_run=True)
            answer = await self._commands.call(link.name, drain)
            scopes = [self._scope(reversal, mapping) for mapping in _mappings(link, reversal)]
            report.transactions_open = await self._own_transactions.open_in(scopes)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", str(error), 503) from error
        report.refused += answer.not_followed
        report.missing = list(answer.missing)
        return report

    async def _led(self, link: Link, reversal: Reversal) -> list[TopicInfo]:
        """The topics of the namespaces. Raises BrokerUnavailable."""
        pairs = [each for each in _mappings(link, reversal) if each.type is ResourceType.TOPIC]
        topics = (await self._context.cluster.topics()).values()
        return [
            topic
            for topic in topics
            if not topic.internal and any(each.remote_name(topic.name) is not None for each in pairs)
        ]

    async def _question(
        self, reversal: Reversal, topics: Sequence[TopicInfo], wait_ms: int, dry_run: bool = False
    ) -> calls.Drain:
        """Whether the other cluster has all that stands here now. Raises BrokerUnavailable, KafkaRefused."""
        ends = await self._promotions.ends_of(topics)
        settings: Mapping[str, Mapping[str, str]] = {}
        if not dry_run:
            settings = await self._promotions.settings_of([topic.name for topic in topics])
        pairs = self._pairs(reversal)
        return calls.Drain(reversal.reversal_id, pairs, ends, settings, wait_ms, dry_run, reversal.held_at)

    def _pairs(self, reversal: Reversal) -> tuple[AttachedPair, ...]:
        """The namespaces as the other cluster has them."""
        link = self._commands.link(reversal.link)
        return tuple(
            AttachedPair(each.type, each.remote_prefix, each.local_prefix, each.role.other)
            for each in _mappings(link, reversal)
        )

    # ---- carried out ----

    async def _carried_out(self, body: AnnounceReversal) -> OperationError | None:
        """What keeps the other cluster from leading; None: it does."""
        self._running.add(body.reversal_id)
        try:
            await self._carry_out(body)
        except OperationError as error:
            return error
        finally:
            self._running.discard(body.reversal_id)
            self._waits.pop(body.reversal_id, None)
        return None

    async def _carry_out(self, body: AnnounceReversal) -> None:
        extra = {"link": body.link, "id": body.reversal_id}
        pairs: tuple[AttachedPair, ...] = ()
        try:
            await self._commands.append(body)
            pairs = self._pairs(self._known(body.reversal_id))
            log.info("reversal announced", extra=extra)
            await self._transactions_end(self._known(body.reversal_id))
            await self._commands.append(HoldReversal(body.link, body.reversal_id, body.owner))
            ends = await self._drained(self._known(body.reversal_id))
            self._waits[body.reversal_id] = "the control log"
            await self._commands.append(HandOver(body.link, body.reversal_id, body.owner, ends))
        except OperationError as error:
            if await self._taken_back(body):
                await self._forgotten_there(body.link, body.reversal_id, pairs)
                log.warning("reversal taken back", extra=extra | {"detail": error.message})
                raise
        log.warning("handed over to the other cluster", extra=extra)
        reversal = self._context.control.state.reversals.get(body.reversal_id)
        if reversal is not None:  # another proxy may have told the other cluster already
            await self._take_lead(reversal)
        await self._attaching.verification_as_agreed("reversed")

    def _known(self, reversal_id: str) -> Reversal:
        found = self._context.control.state.reversals.get(reversal_id)
        if found is None:
            raise OperationError("NOT_FOUND", "the reversal was taken back meanwhile, or abandoned", 409)
        return found

    async def _taken_back(self, body: AnnounceReversal) -> bool:
        """Whether this cluster leads on; False: it was handed over before. Raises OperationError: that is not known."""
        try:
            await self._commands.append(TakeBack(body.link, body.reversal_id))
        except OperationError as error:
            reversal = self._context.control.state.reversals.get(body.reversal_id)
            if error.code == Rejection.NOT_FOUND.told:
                return True  # somebody else has, or it was never announced
            if reversal is not None and reversal.step is ReversalStep.HANDED_OVER:
                return False
            raise  # the others see to it
        return True

    async def _forgotten_there(self, link_name: str, reversal_id: str, pairs: tuple[AttachedPair, ...]) -> None:
        """Have the other cluster know that it was taken back. Where it cannot be told that does no harm."""
        with suppress(OperationError):
            await self._commands.call(link_name, calls.AbandonReversal(reversal_id, pairs))

    async def _transactions_end(self, reversal: Reversal) -> None:
        """Let what is open end by itself, for a while."""
        self._waits[reversal.reversal_id] = "open transactions to end by themselves"
        link = self._commands.link(reversal.link)
        scopes = [self._scope(reversal, each) for each in _mappings(link, reversal) if each.type is ResourceType.TOPIC]
        try:
            await self._own_transactions.end_by_themselves(scopes, reversal.transactions_wait_ms / 1000)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", f"what is open is not known: {error}", 503) from error

    async def _drained(self, reversal: Reversal) -> tuple[TopicEnd, ...]:
        """Have the other cluster have all; where the logs end then. Raises OperationError where that takes too long."""
        try:
            async with asyncio.timeout(reversal.hold_ms / 1000):
                return await self._drain(reversal)
        except TimeoutError as error:
            waits_for = self._waits.get(reversal.reversal_id, "the other cluster")
            raise OperationError(
                NOT_DRAINED,
                f"taken back: writes were held for {reversal.hold_ms / 1000:g} s, and it still waited for {waits_for}",
                409,
            ) from error
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("BROKER_UNAVAILABLE", f"taken back: {error}", 503) from error

    async def _drain(self, reversal: Reversal) -> tuple[TopicEnd, ...]:
        link = self._commands.link(reversal.link)
        self._waits[reversal.reversal_id] = "every proxy to hold clients' writes"
        await self._context.control.enforced(reversal.step_offset)
        for mapping in _mappings(link, reversal):
            self._waits[reversal.reversal_id] = f"transactions that are open in the {mapping.local}"
            ended = self._own_transactions.keeps_open if mapping.type is ResourceType.TOPIC else self._open_commits
            while (why := await ended(self._scope(reversal, mapping))) is not None:
                self._waits[reversal.reversal_id] = why.message
        self._waits[reversal.reversal_id] = "the brokers to say where the logs end"
        topics = await self._led(link, reversal)
        question = await self._question(reversal, topics, reversal.hold_ms)
        while True:
            self._waits[reversal.reversal_id] = f"cluster {link.remote_cluster_id} to have all"
            answer = await self._commands.call(link.name, question)
            if not answer.missing:
                break
            self._waits[reversal.reversal_id] = listed(answer.missing, MISSING_LISTED)
        return tuple(TopicEnd(name, said.ends) for name, said in sorted(question.ends.items()))

    @staticmethod
    def _scope(reversal: Reversal, mapping: NamespaceMapping) -> Scope:
        return Scope(reversal.link, mapping.local, mapping.attached_at_offset, reversal.step_offset)

    async def _take_lead(self, reversal: Reversal) -> None:
        """Tell the other cluster until it leads."""
        deadline = self._clock.monotonic() + TOLD_S
        while True:
            try:
                await self._tell(reversal)
                return
            except OperationError as error:
                self._waits[reversal.reversal_id] = f"the other cluster to lead: {error.message}"
                if self._clock.monotonic() > deadline:
                    raise OperationError(
                        HANDED_OVER,
                        f"this cluster has handed over and follows, and the other one does not lead yet: "
                        f"{error.message}. It is told again and again",
                        503,
                    ) from error
            await asyncio.sleep(LOOK_S)

    async def _tell(self, reversal: Reversal) -> None:
        await self._commands.call(reversal.link, calls.TakeLead(reversal.reversal_id, self._pairs(reversal)))
        await self._commands.append(EndReversal(reversal.link, reversal.reversal_id))
        self._waits.pop(reversal.reversal_id, None)
        log.info("the other cluster leads", extra={"link": reversal.link, "id": reversal.reversal_id})

    # ---- what nobody carries out ----

    async def _look_after_all(self) -> None:
        while True:
            await self._under_way.wait()
            await asyncio.sleep(LOOK_S)
            await self._look_after_some()

    async def _look_after_some(self) -> None:
        state = self._context.control.state
        steps = {(each.reversal_id, each.step) for each in state.reversals.values()}
        self._seen = {step: self._seen.get(step, self._clock.monotonic()) for step in steps}
        self._waits = {name: why for name, why in self._waits.items() if name in state.reversals}
        if self._clock.monotonic() > self._context.lease_deadline:
            return
        for reversal in state.reversals.values():
            if reversal.reversal_id not in self._running:
                await self._look_after(state, reversal)

    async def _look_after(self, state: ControlState, reversal: Reversal) -> None:
        try:
            if reversal.step is ReversalStep.HANDED_OVER:
                await self._tell(reversal)
            elif reversal.at_leader and self._is_left(state, reversal):
                pairs = self._pairs(reversal)
                await self._commands.append(TakeBack(reversal.link, reversal.reversal_id))
                log.warning("reversal taken back", extra={"link": reversal.link, "id": reversal.reversal_id})
                await self._forgotten_there(reversal.link, reversal.reversal_id, pairs)
        except OperationError as error:
            self._waits[reversal.reversal_id] = error.message

    def _is_left(self, state: ControlState, reversal: Reversal) -> bool:
        """Whether nobody carries it out, or it takes too long: that need not be true, the log decides."""
        if reversal.owner == self._context.incarnation or not state.may_run(reversal.owner):
            return True
        takes_ms = reversal.hold_ms if reversal.holds else reversal.transactions_wait_ms
        since = self._seen[reversal.reversal_id, reversal.step]
        return self._clock.monotonic() > since + takes_ms / 1000 + MARGIN_S

    # ---- the other cluster asks ----

    async def on_handed_over(self, connection: LinkConnection, question: calls.HandedOver) -> calls.HandedOverAnswer:
        """Whether the other cluster may lead, as the log says now. Raises LinkRejected where it may not."""
        try:
            check_lease(self._context)
            await self._context.control.caught_up()
            check_lease(self._context)
        except BrokerUnavailable as error:
            raise LinkRejected("CONTROL_LOG_UNAVAILABLE", str(error)) from error
        found = self._context.control.state.reversals.get(question.reversal_id)
        if found is None or found.link != connection.link_name or found.step is not ReversalStep.HANDED_OVER:
            raise LinkRejected("NOT_HANDED_OVER", "it was not handed over, or it was abandoned since")
        return calls.HandedOverAnswer(found.ends)


def _mappings(link: Link, reversal: Reversal) -> list[NamespaceMapping]:
    return [mapping for key in reversal.keys if (mapping := link.mapping(*key)) is not None]


def not_to_follow(plan: TopicPlan) -> str | None:
    """Why a topic could not follow; None: it can, once the other cluster has all of it."""
    if plan.action in ("follow", "create"):
        return None
    # The other log may have grown since this one's end was read.
    is_same = plan.partitions is not None and all(
        each.unknown is None and each.shared >= min(each.end, each.source_end) for each in plan.partitions
    )
    return None if is_same and plan.partitions else f"{plan.topic}: {plan.reason or plan.action}"


def _waits_for(reversal: Reversal) -> str:
    """What it waits for as far as the log says."""
    return {
        ReversalStep.ANNOUNCED: "open transactions to end",
        ReversalStep.HELD: "the other cluster to have all",
        ReversalStep.HANDED_OVER: "the other cluster to lead",
        ReversalStep.DRAINED: "the other cluster to hand over, or to take it back",
    }[reversal.step]
