"""Reads this cluster's transaction log from the leaders of its partitions, whoever fronts them, and reports changes.

What stood there when the reading began is reported as the latest state of each transactional id, the rest as it comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from isthmus_plugins.cluster import BrokerUnavailable, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link.calls import LogPlace
from isthmus_plugins.replication.logs.transaction_log_tail import LogPart, TransactionLogTail
from isthmus_protocol.records import BatchHeader, Frame
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, Change, Transaction, TransactionState

log = logging.getLogger("isthmus_plugins.replication")

LANE: Final = "transaction-log"
DRAIN_S: Final = 10.0
PAST_MAX: Final = 4
"""Decisions of a producer that are remembered from before: the process before this one may have been killed as often,
each time between a decision and its sending."""
HOMES_MAX: Final = 100_000
"""Producers of which is remembered which partition has their transactions."""


class Decided(NamedTuple):
    """A decision to commit, and in which partition of the log it stands."""

    partition: int
    change: Change


class _Part(LogPart):
    """One partition of the log, as far as it is read."""

    __slots__ = ("past", "stands_at")

    def __init__(self, partition: int) -> None:
        super().__init__(partition)
        self.stands_at: dict[str, tuple[int, int]] = {}
        """By transactional id: the offset and the leader epoch of its latest state."""
        self.past: set[str] = set()
        """Ids whose latest transaction was committed before the log was loaded."""


class TransactionTail(TransactionLogTail[_Part]):
    """The transaction log, as this proxy has read it."""

    def __init__(
        self,
        context: PluginContext,
        on_change: Callable[[int, Change], None],
        on_progress: Callable[[], None],
        on_loaded: Callable[[], None],
    ) -> None:
        """``on_change(partition, change)``: an id has another state. ``on_progress``: more was read. ``on_loaded``: a
        partition was read to its end for the first time; its latest states come next."""
        super().__init__(context, LANE, _Part, on_progress)
        self._on_change = on_change
        self._on_loaded = on_loaded
        self._decided: dict[int, deque[Decided]] = {}
        """By producer: the last decisions to commit that were there when the log was loaded, oldest first."""
        self._homes: dict[int, int] = {}
        """By producer: the partition that has its transactions."""

    # ---- what is known ----

    def home_of(self, producer_id: int) -> int | None:
        """The partition that has a producer's transactions; None: none that was read."""
        return self._homes.get(producer_id)

    def is_past(self, transactional_id: str) -> bool:
        """Whether what an id committed last was decided before this proxy read the log."""
        partition = self.partition_of(transactional_id)
        return partition is not None and transactional_id in self._parts[partition].past

    def is_old(self, at: LogPlace) -> bool:
        """Whether what stands there was there when the log was loaded."""
        part = self._parts.get(at.partition)
        return part is not None and (not part.begun or at.offset < part.load_end)

    def decided(self, producer_id: int) -> Sequence[Decided]:
        """What a producer decided last before the log was loaded, oldest first."""
        return self._decided.get(producer_id, ())

    def decided_by(self, transactional_id: str) -> Sequence[Decided]:
        """The same of the producer that an id has now."""
        partition = self.partition_of(transactional_id)
        known = None if partition is None else self._parts[partition].log.latest.get(transactional_id)
        found = () if known is None else self.decided(known.producer_id)
        return [each for each in found if each.change.transactional_id == transactional_id]

    def take_decided(self, producer_id: int) -> Sequence[Decided]:
        """The same as :meth:`decided`, to be sent again, or not to be: it is forgotten."""
        found = self._decided.pop(producer_id, ())
        for partition, (transactional_id, *_) in found:
            part = self._parts.get(partition)
            latest = None if part is None else part.log.latest.get(transactional_id)
            if part is not None and latest is not None and latest.producer_id == producer_id:
                part.past.discard(transactional_id)
        return found

    def completing(self, places: Collection[TopicPartition]) -> dict[str, tuple[int, int]]:
        """Transactions in some of these partitions that are decided to commit and not completed: where that stands."""
        return {
            transactional_id: part.stands_at[transactional_id]
            for part in self._parts.values()
            for transactional_id, transaction in part.log.latest.items()
            if transaction.state is TransactionState.PREPARE_COMMIT
            and not set(transaction.partitions).isdisjoint(places)
        }

    async def drain(self, places: Collection[TopicPartition]) -> None:
        """Return when transactions in these that were decided before the call are carried out.

        Raises BrokerUnavailable: not within :data:`DRAIN_S`, or the transaction log cannot be read.
        """
        try:
            async with asyncio.timeout(DRAIN_S):
                await self.caught_up()
                decided = self.completing(places).items()
                while decided & self.completing(places).items():
                    await self.more_is_read()
        except TimeoutError:
            raise BrokerUnavailable("transactions that were decided are not completed, or not read") from None

    # ---- reading ----

    def take(self, part: _Part, batch: Frame, header: BatchHeader) -> None:
        for change in part.log.take(batch, header):
            if change.transaction is None:  # its id has expired
                part.stands_at.pop(change.transactional_id, None)
            else:
                part.stands_at[change.transactional_id] = change.offset, change.epoch
            part.past.discard(change.transactional_id)
            if change.transaction is not None:
                self._forget_answered(change.transaction)
                self._homes[change.transaction.producer_id] = part.partition
                if len(self._homes) > HOMES_MAX:
                    del self._homes[next(iter(self._homes))]
            if part.loaded:
                self._on_change(part.partition, change)
            elif (decided := change.transaction) and decided.state is TransactionState.PREPARE_COMMIT:
                past = self._decided.setdefault(decided.producer_id, deque(maxlen=PAST_MAX))
                past.append(Decided(part.partition, change))

    def _forget_answered(self, transaction: Transaction) -> None:
        """Forget what a producer decided before it went on in the same epoch.

        It was told that this is decided, so the other side had it; and where it ends can be told no more from where the
        next one begins.
        """
        if past := self._decided.get(transaction.producer_id):
            self._decided[transaction.producer_id] = deque(
                (each for each in past if not _goes_on(transaction, each.change.transaction)), maxlen=PAST_MAX
            )

    def was_read(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            if not part.loaded and part.next_offset >= part.load_end:
                self._has_loaded(part)

    def _has_loaded(self, part: _Part) -> None:
        part.loaded = True
        self._on_loaded()
        for transactional_id, transaction in list(part.log.latest.items()):
            if transaction.state is TransactionState.COMPLETE_COMMIT:
                part.past.add(transactional_id)
            change = Change(transactional_id, transaction, *part.stands_at[transactional_id])
            self._on_change(part.partition, change)
        for what, offset in part.log.unknown.items():
            where = f"{TRANSACTION_TOPIC}-{part.partition}, offset {offset}"
            log.error(
                "transaction log has what this version does not know",
                extra={"detail": f"{where}: {what}"},
            )


def _goes_on(transaction: Transaction, decided: Transaction | None) -> bool:
    return (
        decided is not None
        and decided.shares_epoch
        and transaction.is_under_way(decided.producer_id, decided.producer_epoch)
    )
