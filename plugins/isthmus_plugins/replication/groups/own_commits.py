"""Whether this cluster's own transactions have committed offsets in groups that follow, which count when they end.

Or in groups that are handed over to another cluster, which is to have all that they will have committed.

They would put older committed offsets over the source's. Once every proxy refuses clients' commits in such groups, what
is open of them stands between the last stable offset and the end of the offsets topic's partitions: mostly nothing.
Where there is something the transactions are ended as those in topics are (``follower.own_transactions``), and the
offsets topic is looked at again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from isthmus_control.model import NamespaceMapping, Reason, ResourceType, Role
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions, Scope
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, GroupKey, UnknownRecord, decode_key
from isthmus_protocol.record_codec import decode_control, decode_records
from isthmus_protocol.records import BatchError
from isthmus_protocol.wire import MalformedFrame

LANE: Final = "own-commits"
AGAIN_S: Final = 1.0
"""After a look in vain."""
NOT_LOOKED: Final = Reason(
    ReasonCode.TRANSACTIONS_ENDING,
    "it is not known yet whether transactions of this cluster's producers are open in it",
)


class OwnCommits:
    """What is open in groups that follow, by pair of namespaces. ``changed`` is called when it may be another."""

    def __init__(
        self, context: PluginContext, own_transactions: OwnTransactions, tasks: Tasks, changed: Callable[[], None]
    ) -> None:
        self._context = context
        self._own_transactions = own_transactions
        self._tasks = tasks
        self._changed = changed
        self._over: set[Scope] = set()
        self._looks: dict[Scope, asyncio.Task[None]] = {}
        self._why: dict[Scope, Reason] = {}

    def wait(self, link_name: str, mapping: NamespaceMapping) -> Reason | None:
        """Why what coordinators have of a namespace's groups is not certain; None: nothing is open in it any more.

        Has it ended. Does not wait.
        """
        scope = self._scope(link_name, mapping)
        if scope in self._over:
            return None
        if scope not in self._looks:
            self._forget_others()
            self._looks[scope] = self._tasks.keep(f"own-commits-{mapping.local_prefix}", lambda: self._end(scope))
        return self._why.get(scope, NOT_LOOKED)

    def _scope(self, link_name: str, mapping: NamespaceMapping) -> Scope:
        """Commits in a group are refused since both it and the topic follow."""
        link = self._context.control.state.links[link_name]
        pairs = link.pairs(Role.FOLLOWER, ResourceType.TOPIC, ResourceType.CONSUMER_GROUP)
        since = max((each.attached_at_offset for each in pairs), default=mapping.attached_at_offset)
        return Scope.of(link_name, mapping)._replace(refused_from=since)

    def _forget_others(self) -> None:
        """Forget namespaces that follow no more, or whose link has other topics by now."""
        for scope in [*self._over, *self._looks]:
            if not self._is_current(scope):
                self._over.discard(scope)
                self._why.pop(scope, None)
                if (look := self._looks.pop(scope, None)) is not None:
                    look.cancel()

    def _is_current(self, scope: Scope) -> bool:
        state = self._context.control.state
        link = state.links.get(scope.link)
        mapping = None if link is None else link.mapping(*scope.namespace)
        return mapping is not None and scope.stands(state) and self._scope(scope.link, mapping) == scope

    async def _end(self, scope: Scope) -> None:
        """Return when nothing is open."""
        while self._is_current(scope):
            why = await self.open_in(scope)
            if why is None:
                self._over.add(scope)
                self._why.pop(scope, None)
                self._changed()
                return
            if why != self._why.get(scope):
                self._why[scope] = why
                self._changed()
            await asyncio.sleep(AGAIN_S)

    async def open_in(self, scope: Scope) -> Reason | None:
        """Have what is open in groups of a namespace ended; why it is not, None: nothing is."""
        try:
            await self._context.control.enforced(scope.refused_from)
            producers = await self._producers(scope)
            if not producers:
                return None
            why = await self._own_transactions.keeps_open(scope._replace(producers=tuple(sorted(producers.items()))))
            if why is not None:
                return why
            left = await self._producers(scope)
        except (BrokerUnavailable, KafkaRefused, OperationError, BatchError) as error:
            return Reason(ReasonCode.TRANSACTIONS_ENDING, f"{OFFSETS_TOPIC} cannot be read: {error}")
        for producer_id, group in sorted(left.items()):
            what = f"producer {producer_id} has offsets of group {group} in a transaction that no coordinator knows"
            return Reason(ReasonCode.TRANSACTIONS_ENDING, what)
        return None

    async def _producers(self, scope: Scope) -> dict[int, str]:
        """The producers that have committed offsets in open transactions, and in which group.

        Raises BrokerUnavailable, KafkaRefused, OperationError, BatchError.
        """
        cluster = self._context.cluster
        topic = await cluster.topic(OFFSETS_TOPIC)
        if topic is None:
            return {}
        places: list[TopicPartition] = [(OFFSETS_TOPIC, index) for index in range(len(topic.partitions))]
        stable = await asyncio.gather(*(cluster.last_stable_offset(*place) for place in places))
        ends = await cluster.log_ends(places)
        if len(ends) < len(places):
            raise BrokerUnavailable("not all of its partitions have a leader")
        found: dict[int, str] = {}
        for place, start in zip(places, stable, strict=True):
            if start < ends[place]:
                found |= await self._producers_in(scope, topic, place[1], start, ends[place])
        return found

    async def _producers_in(
        self, scope: Scope, topic: TopicInfo, partition: int, start: int, end: int
    ) -> dict[int, str]:
        open_: dict[int, str] = {}
        async for batch, header, _ in read_batches(self._context, topic, partition, start, end, lane=LANE):
            if not header.is_transactional or not header.record_count:
                continue
            if header.is_control:
                open_.pop(decode_control(batch).producer_id, None)
                continue
            for record in decode_records(batch):
                group = self._group_in(scope, record.key or b"", record.offset)
                if group is not None:
                    open_[header.producer_id] = group
        return open_

    def _group_in(self, scope: Scope, key: bytes, offset: int) -> str | None:
        """The group of a committed offset that the link replicates, one way or the other; None: it is none."""
        try:
            said = decode_key(key)
        except (UnknownRecord, MalformedFrame) as error:
            raise BatchError(f"offset {offset}: {error}") from error
        if isinstance(said, GroupKey):
            return None
        link = self._context.control.state.links.get(scope.link)
        mapping = None if link is None else link.mapping(*scope.namespace)
        if link is None or mapping is None or not mapping.holds(said.group):
            return None
        topics = link.pairs(mapping.role, ResourceType.TOPIC)
        return said.group if any(each.holds(said.topic) for each in topics) else None
