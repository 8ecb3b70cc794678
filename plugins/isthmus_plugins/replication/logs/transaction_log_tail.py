"""Reads this cluster's transaction log from its start, since it is compacted, and then as it grows.

What a coordinator has answered stands there before: whoever reads on to where the log ends after an answer knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs.topic_tail import TailPart, TopicTail
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, TransactionLog, partition_of


class LogPart(TailPart):
    """One partition of the log, as far as it is read."""

    __slots__ = ("load_end", "log")

    def __init__(self, partition: int) -> None:
        super().__init__(partition)
        self.log = TransactionLog()
        self.load_end = 0
        """Where the log ended after the reading had begun."""


P = TypeVar("P", bound=LogPart)


class TransactionLogTail(TopicTail[P]):
    """The transaction log, as this proxy has read it. :meth:`take` and :meth:`was_read` are a subclass's."""

    def __init__(
        self, context: PluginContext, lane: str, make: Callable[[int], P], on_progress: Callable[[], None]
    ) -> None:
        super().__init__(context, TRANSACTION_TOPIC, lane, make, on_progress)

    def partition_of(self, transactional_id: str) -> int | None:
        """The partition that has an id; None: the log is not known yet."""
        return partition_of(transactional_id, len(self._parts)) if self._parts else None

    def coordinator(self, partition: int) -> int:
        """The broker that leads a partition, as far as is known; -1: none."""
        part = self._parts.get(partition)
        return -1 if part is None else part.broker_id

    def reached(self, partition: int) -> int:
        """Up to where a partition is read; -1: not yet to where it ended when the reading began."""
        part = self._parts.get(partition)
        return part.next_offset if part is not None and part.loaded else -1

    def readable(self, transactional_id: str) -> bool:
        """Whether the latest state of an id is known for certain."""
        partition = self.partition_of(transactional_id)
        part = None if partition is None else self._parts[partition]
        return part is not None and not part.log.unknown and transactional_id not in part.log.unreadable

    async def caught_up(self, partition: int | None = None) -> None:
        """Return when all is read that was in the log before the call, or in one partition of it.

        Raises BrokerUnavailable, KafkaRefused.
        """
        topic = await self._context.cluster.topic(TRANSACTION_TOPIC)
        if topic is None:
            return
        asked = range(len(topic.partitions)) if partition is None else [partition]
        partitions = [(TRANSACTION_TOPIC, index) for index in asked]
        ends = await self._context.cluster.log_ends(partitions)
        if len(ends) < len(partitions):
            raise BrokerUnavailable(f"not all partitions of {TRANSACTION_TOPIC} can be read")
        self.wake()
        while any(self.reached(index) < end for (_, index), end in ends.items()):
            await self.more_is_read()

    async def begin(self, parts: Sequence[P]) -> None:
        """It is read from its start."""
        ends = await self._context.cluster.log_ends([(TRANSACTION_TOPIC, part.partition) for part in parts])
        for part in parts:
            end = ends.get((TRANSACTION_TOPIC, part.partition))
            if end is not None:
                part.load_end, part.begun = end, True
