"""Ends what this cluster's own transactional producers have open in topics, before these follow, or are cut, or are
handed over to another cluster.

A coordinator writes the markers of its transactions whenever it can, whatever became of the topic meanwhile: in a
follower's log they shift every offset behind them; a topic that takes none leaves other transactions unended, too
(ADR 24). What they have committed in groups counts when they end. So, once every proxy refuses clients' writes:

1. The transaction log is read to its end: what a coordinator has answered before stands there.
2. What is Ongoing in the topic is aborted by its coordinator, and its producer fenced. What is decided is left to end.
3. It is read on until the coordinators have written that all of it is complete, hence its markers are in the logs.

Nothing of this is recorded: done again from the beginning it finds what is left. What cannot be known is waited for.
Transactions that no coordinator of this cluster knows, as those of a link's source, do not stand in that log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple

from isthmus_control.control_state import ControlState
from isthmus_control.model import NamespaceKey, NamespaceMapping, Reason, ResourceType, Role, contains
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs.transaction_log_tail import LogPart, TransactionLogTail
from isthmus_plugins.tasks import Tasks, some_at_once
from isthmus_protocol.records import BatchHeader, Frame
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, Transaction, TransactionState

log = logging.getLogger("isthmus_plugins.replication")

LANE: Final = "own-transactions"
LOOK_S: Final = 3.0
"""So long whoever asks is kept waiting for what ends soon: an abort takes some milliseconds."""
AGAIN_S: Final = 0.5
"""A coordinator that was about to change a transaction anyway is asked once more after that."""
KEPT_S: Final = 30.0
"""So long the log is read on for who asks again; then it is forgotten. More than a look takes."""
FENCED_AT_ONCE: Final = 20
UNDER_WAY: Final = frozenset(
    {
        TransactionState.ONGOING,
        TransactionState.PREPARE_COMMIT,
        TransactionState.PREPARE_ABORT,
        TransactionState.PREPARE_EPOCH_FENCE,
    }
)
"""States in which a coordinator has markers to write."""


class Scope(NamedTuple):
    """In what nothing is to be open: topics of a namespace that clients may not write, one of them, or some of its
    groups."""

    link: str
    namespace: NamespaceKey
    attached_at: int
    """The offset of the command that attached it."""
    refused_from: int
    """That of the command since which no client adds anything to a transaction there."""
    topic: str | None = None
    """This one alone."""
    producers: tuple[tuple[int, str], ...] = ()
    """Those that have committed offsets of groups, and in which one: it stands in no transaction's partitions."""

    @classmethod
    def of(cls, link: str, mapping: NamespaceMapping) -> Scope:
        """All topics of a namespace."""
        return cls(link, mapping.local, mapping.attached_at_offset, mapping.attached_at_offset)

    def place_of(self, transaction: Transaction) -> str | None:
        """Where a transaction touches it; None: nowhere."""
        if self.producers:
            group = dict(self.producers).get(transaction.producer_id)
            return None if group is None else f"group {group}"
        return next((f"{topic}-{partition}" for topic, partition in transaction.partitions if self._holds(topic)), None)

    def _holds(self, topic: str) -> bool:
        return topic == self.topic if self.topic is not None else contains(*self.namespace, topic)

    def stands(self, state: ControlState) -> bool:
        """Whether the namespace is attached as it was, and follows or is held."""
        link = state.links.get(self.link)
        mapping = None if link is None else link.mapping(*self.namespace)
        if mapping is None or mapping.attached_at_offset != self.attached_at:
            return False
        reversal = state.reversal_of(self.namespace)
        held = reversal is not None and reversal.holds and reversal.step_offset == self.refused_from
        return mapping.role is Role.FOLLOWER or held


class Open(NamedTuple):
    """A transaction that its coordinator has not completed."""

    transactional_id: str
    transaction: Transaction
    coordinator: int
    """The broker that coordinates it; -1: none does now."""


class _Part(LogPart):
    __slots__ = ("under_way",)

    def __init__(self, partition: int) -> None:
        super().__init__(partition)
        self.under_way: dict[str, Transaction] = {}
        """By transactional id, what is not complete: few of all that there are."""


class TransactionStates(TransactionLogTail[_Part]):
    """Which transactions of this cluster are under way."""

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context, LANE, _Part, lambda: None)

    def under_way(self, scope: Scope) -> list[Open]:
        """Those that touch it, the oldest first. Raises NotKnown."""
        found = [each for each in self.all_under_way() if scope.place_of(each.transaction) is not None]
        return sorted(found, key=lambda each: (each.transaction.started_ms, each.transactional_id))

    def all_under_way(self) -> list[Open]:
        """Raises NotKnown."""
        for part in self._parts.values():
            for what in (*part.log.unknown, *part.log.unreadable.values()):
                raise NotKnown(f"{TRANSACTION_TOPIC}-{part.partition} has what this version cannot read: {what}")
        return [
            Open(transactional_id, transaction, part.broker_id)
            for part in self._parts.values()
            for transactional_id, transaction in part.under_way.items()
        ]

    def take(self, part: _Part, batch: Frame, header: BatchHeader) -> None:
        for change in part.log.take(batch, header):
            if change.transaction is not None and change.transaction.state in UNDER_WAY:
                part.under_way[change.transactional_id] = change.transaction
            else:
                part.under_way.pop(change.transactional_id, None)

    def was_read(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.loaded = part.loaded or part.next_offset >= part.load_end


class NotKnown(Exception):
    """It cannot be told what is under way."""


class OwnTransactions(Part):
    """Ends what is open, for whoever is about to have topics follow."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._states = TransactionStates(context)
        self._tasks = Tasks(LANE, context.supervision)
        self._looks: dict[Scope, asyncio.Task[Reason | None]] = {}
        self._rest_at: asyncio.TimerHandle | None = None
        self._over: set[Scope] = set()
        """Namespaces in which nothing is open, and nothing can be begun any more."""
        self._fenced: set[Open] = set()
        """What was told while the log is read."""

    def start(self) -> None:
        self._states.start()

    async def stop(self) -> None:
        await self._tasks.close()
        if self._rest_at is not None:
            self._rest_at.cancel()
        await self._states.stop()

    def control_changed(self, state: ControlState) -> None:
        """Forget namespaces that do not follow any more."""
        self._over = {scope for scope in self._over if scope.stands(state)}

    def are_over(self, link: str, mapping: NamespaceMapping) -> bool:
        """Whether nothing can be open in a namespace, as was seen before."""
        # Clients never wrote to a copy of an offsets topic.
        return mapping.offsets is not None or Scope.of(link, mapping) in self._over

    async def keeps_from_following(self, link: str, mapping: NamespaceMapping) -> Reason | None:
        """What keeps topics of a namespace from being made, adopted or emptied to follow; None: nothing any more.

        Returns when that is so, or after :data:`LOOK_S`: to be asked again.
        """
        return await self.keeps_open(Scope.of(link, mapping))

    async def keeps_from_cutting(self, topic: str) -> Reason | None:
        """What keeps a topic that follows from being frozen, and cut. Looked at anew each time: who writes past the
        proxies may do so in transactions."""
        following = self._context.control.state.lookup.following(ResourceType.TOPIC, topic)
        if following is None:
            return None  # it is not cut either
        return await self.keeps_open(Scope.of(following.link.name, following.mapping)._replace(topic=topic))

    async def open_in(self, scopes: Sequence[Scope]) -> list[str]:
        """What is open there now, for people. Raises BrokerUnavailable, KafkaRefused."""
        try:
            await self._look()
            return [described([each], scope) for scope in scopes for each in self._states.under_way(scope)]
        except NotKnown as error:
            return [f"what is open is not known: {error}"]

    async def open_topics(self) -> set[str]:
        """Those into which coordinators have markers to write. Raises BrokerUnavailable, KafkaRefused."""
        try:
            await self._look()
            return {topic for each in self._states.all_under_way() for topic, _ in each.transaction.partitions}
        except NotKnown as error:
            raise BrokerUnavailable(f"which transactions are open is not known: {error}") from error

    async def _look(self) -> None:
        """Have read what is in the log now. Raises NotKnown, BrokerUnavailable, KafkaRefused."""
        self._read()
        try:
            async with asyncio.timeout(LOOK_S):
                await self._states.caught_up()
        except TimeoutError:
            raise NotKnown("the transaction log is not read yet") from None

    async def end_by_themselves(self, scopes: Sequence[Scope], wait_s: float) -> None:
        """Return when nothing is open there, after ``wait_s`` at the latest. Nobody is fenced.

        Raises BrokerUnavailable, KafkaRefused.
        """
        self._read()
        with suppress(TimeoutError, NotKnown):
            async with asyncio.timeout(wait_s):
                await self._states.caught_up()
                while any(self._states.under_way(scope) for scope in scopes):
                    await self._states.more_is_read()

    async def keeps_open(self, scope: Scope) -> Reason | None:
        """What is open there, after it was begun to be ended. Everybody who asks at the same time waits for the same.

        Returns None when nothing is, or the reason after :data:`LOOK_S`.
        """
        look = self._looks.get(scope)
        if look is None:
            look = self._looks[scope] = self._tasks.start(f"end-{scope.topic or scope.namespace}", self._ended(scope))
            look.add_done_callback(lambda _: self._looks.pop(scope, None))
        return await asyncio.shield(look)

    def _read(self) -> None:
        """Read the log, until nobody has asked for a while."""
        if self._rest_at is not None:
            self._rest_at.cancel()
        self._rest_at = asyncio.get_running_loop().call_later(KEPT_S, self._rest)
        self._states.follow(True)

    def _rest(self) -> None:
        self._states.follow(False)
        self._fenced.clear()

    async def _ended(self, scope: Scope) -> Reason | None:
        self._read()
        waits_for = ["every proxy to refuse clients' writes to it"]
        try:
            async with asyncio.timeout(LOOK_S):
                await self._context.control.enforced(scope.refused_from)
                waits_for[0] = f"{TRANSACTION_TOPIC} to be read"
                await self._states.caught_up()
                while found := self._states.under_way(scope):
                    waits_for[0] = described(found, scope)
                    await self._fence(found, scope)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(AGAIN_S):
                            while self._states.under_way(scope) == found:
                                await self._states.more_is_read()
                    await self._states.caught_up()  # whoever has begun anew with an id is not to be fenced
        except TimeoutError:
            return _waits(scope, waits_for[0])
        except (BrokerUnavailable, KafkaRefused, NotKnown) as error:
            return _waits(scope, f"{waits_for[0]}: {error}")
        if scope.topic is None and not scope.producers:
            self._over.add(scope)
        return None

    async def _fence(self, found: Sequence[Open], scope: Scope) -> None:
        """Have those that are not decided aborted. Raises BrokerUnavailable, KafkaRefused."""
        ongoing = [each for each in found if each.transaction.state is TransactionState.ONGOING]
        await some_at_once(FENCED_AT_ONCE, partial(self._fence_one, scope), ongoing)

    async def _fence_one(self, scope: Scope, each: Open) -> None:
        check_lease(self._context)
        if not scope.stands(self._context.control.state):
            raise NotKnown("it does not follow any more")
        transaction = each.transaction
        if each not in self._fenced:
            self._fenced.add(each)
            place = scope.place_of(transaction)
            extra = {"link": scope.link, "transactional_id": each.transactional_id, "place": place}
            log.warning("transaction aborted before its topic or group follows another cluster's", extra=extra)
        cluster = self._context.cluster
        await cluster.fence_transaction(each.transactional_id, transaction.producer_id, transaction.producer_epoch)


def _waits(scope: Scope, for_what: str) -> Reason:
    what = scope.topic if scope.topic is not None else f"the {scope.namespace}"
    return Reason(ReasonCode.TRANSACTIONS_ENDING, f"{what} waits for {for_what}")


def described(found: Sequence[Open], scope: Scope) -> str:
    """What is waited for, in words that change only when that does."""
    transactional_id, transaction, coordinator = found[0]
    doing = "to be aborted" if transaction.state is TransactionState.ONGOING else "to be completed"
    since = "" if transaction.started_ms < 0 else f" since {_moment(transaction.started_ms)}"
    by = "which no broker coordinates now" if coordinator < 0 else f"coordinated by broker {coordinator}"
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    where, state = scope.place_of(transaction), _name(transaction.state)
    return f"the transaction of {transactional_id!r} in {where} {doing}: {state}{since}, {by}{more}"


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _name(state: TransactionState) -> str:
    """As Kafka's tools say it."""
    return "".join(word.title() for word in state.name.split("_"))
