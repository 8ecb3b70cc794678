"""Reads this cluster's transaction log from the leaders of its partitions, whoever fronts them, and tells what changes.

What stood there when the reading began is told as the latest state of each transactional id, the rest as it comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from isthmus_plugins.api import BrokerUnavailable, FetchConnection, Fetched, FetchPartition, KafkaRefused, PluginContext
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import BatchError, walk
from isthmus_protocol.transaction_log import (
    TRANSACTION_TOPIC,
    Change,
    TransactionLog,
    TransactionState,
    partition_of,
)

log = logging.getLogger("isthmus_plugins.replication")

DISCOVERY_INTERVAL_S: Final = 1.0
TAIL_WAIT_MS: Final = 500
"""An idle cluster costs one read a broker in this time."""
FETCH_BYTES_MAX: Final = 4 * 1024 * 1024
PARTITION_BYTES_MAX: Final = 1024 * 1024
RETRY_DELAY_S: Final = 0.1
LANE: Final = "transaction-log"
SETTLED_S: Final = 10.0
OFFSET_OUT_OF_RANGE: Final = 1


class _Part:
    """One partition of the log, as far as it is read."""

    __slots__ = (
        "broker_id",
        "leader_epoch",
        "load_end",
        "loaded",
        "log",
        "next_offset",
        "offsets",
        "partition",
        "past",
    )

    def __init__(self, partition: int, broker_id: int, leader_epoch: int) -> None:
        self.partition = partition
        self.broker_id = broker_id
        self.leader_epoch = leader_epoch
        self.log = TransactionLog()
        self.next_offset = 0
        self.load_end: int | None = None
        """Where the log ended after the reading had begun."""
        self.loaded = False
        self.offsets: dict[str, int] = {}
        """By transactional id: where its latest state stands."""
        self.past: set[str] = set()
        """Ids whose latest transaction was committed before the log was loaded."""


class TransactionTail:
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
        self._context = context
        self._on_change = on_change
        self._on_progress = on_progress
        self._on_loaded = on_loaded
        self._tasks = Tasks("transaction-tail")
        self._active = False
        self._wake = asyncio.Event()
        self._found = False
        self._topic_id = b""
        self._parts: dict[int, _Part] = {}
        self._readers: dict[int, asyncio.Event] = {}
        self._decided: dict[int, tuple[int, Change]] = {}
        """By producer: the last decision to commit that was there when the log was loaded, and in which partition."""
        self._progressed = asyncio.Event()

    def start(self) -> None:
        self._tasks.start("find", self._find_for_ever())

    async def stop(self) -> None:
        await self._tasks.close()

    def follow(self, active: bool) -> None:
        """Whether to read it at all. What is not read is forgotten."""
        if active != self._active:
            self._active = active
            self._wake.set()

    def wake(self) -> None:
        """Look for the log now."""
        self._wake.set()

    # ---- what is known ----

    @property
    def loaded(self) -> bool:
        """Whether all that was in the log when the reading began was read."""
        return self._found and all(part.loaded for part in self._parts.values())

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

    def is_past(self, transactional_id: str) -> bool:
        """Whether what an id committed last was decided before this proxy read the log."""
        partition = self.partition_of(transactional_id)
        return partition is not None and transactional_id in self._parts[partition].past

    def is_old(self, at: tuple[int, int]) -> bool:
        """Whether what stands there, (partition, offset), was there when the log was loaded."""
        part = self._parts.get(at[0])
        return part is not None and (part.load_end is None or at[1] < part.load_end)

    def is_past_no_more(self, transactional_id: str) -> None:
        """What an id decided before is told again."""
        partition = self.partition_of(transactional_id)
        if partition is not None:
            self._parts[partition].past.discard(transactional_id)

    def decided(self, producer_id: int) -> tuple[int, Change] | None:
        """What a producer decided last before the log was loaded, and in which partition that stands."""
        return self._decided.get(producer_id)

    def decided_by(self, transactional_id: str) -> tuple[int, Change] | None:
        """The same of the producer that an id has now."""
        partition = self.partition_of(transactional_id)
        known = None if partition is None else self._parts[partition].log.latest.get(transactional_id)
        found = None if known is None else self._decided.get(known.producer_id)
        return found if found is not None and found[1].transactional_id == transactional_id else None

    def is_told(self, producer_id: int) -> None:
        """What a producer decided before the log was loaded is told again, or a later decision is."""
        self._decided.pop(producer_id, None)

    def completing(self, places: Collection[tuple[str, int]]) -> dict[str, int]:
        """Transactions in some of these partitions that are decided to commit and not completed: where that stands."""
        return {
            transactional_id: part.offsets[transactional_id]
            for part in self._parts.values()
            for transactional_id, transaction in part.log.latest.items()
            if transaction.state is TransactionState.PREPARE_COMMIT
            and not set(transaction.partitions).isdisjoint(places)
        }

    async def settled(self, places: Collection[tuple[str, int]]) -> None:
        """Return when transactions in these that were decided before the call are carried out.

        Raises BrokerUnavailable: not within :data:`SETTLED_S`, or the transaction log cannot be read.
        """
        try:
            async with asyncio.timeout(SETTLED_S):
                await self.caught_up()
                decided = self.completing(places).items()
                while decided & self.completing(places).items():
                    await self._more_is_read()
        except TimeoutError:
            raise BrokerUnavailable("transactions that were decided are not completed, or not read") from None

    async def caught_up(self) -> None:
        """Return when all is read that was in the log before the call. Raises BrokerUnavailable."""
        topic = await self._context.cluster.topic(TRANSACTION_TOPIC)
        if topic is None:
            return
        partitions = [(TRANSACTION_TOPIC, index) for index in range(len(topic.partitions))]
        ends = await self._context.cluster.log_ends(partitions)
        if len(ends) < len(partitions):
            raise BrokerUnavailable(f"not all partitions of {TRANSACTION_TOPIC} can be read")
        self.wake()
        while any(self.reached(index) < end for (_, index), end in ends.items()):
            await self._more_is_read()

    async def _more_is_read(self) -> None:
        self._progressed.clear()
        await self._progressed.wait()

    # ---- leaders ----

    async def _find_for_ever(self) -> None:
        while True:
            self._wake.clear()
            if self._active:
                try:
                    await self._find()
                except (BrokerUnavailable, KafkaRefused) as error:
                    log.warning("transaction log not found", extra={"detail": str(error)})
            else:
                self._parts.clear()
                self._found = False
            try:
                async with asyncio.timeout(DISCOVERY_INTERVAL_S if self._active else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _find(self) -> None:
        topic = await self._context.cluster.topic(TRANSACTION_TOPIC)
        self._found = True
        if topic is None:  # no transaction was ever begun
            self._parts.clear()
            return
        if topic.topic_id != self._topic_id:
            self._topic_id = topic.topic_id
            self._parts.clear()
        for index, info in enumerate(topic.partitions):
            part = self._parts.get(index)
            if part is None:
                self._parts[index] = _Part(index, info.leader, info.leader_epoch)
            else:  # what was read is below the high watermark, hence every leader's
                part.broker_id, part.leader_epoch = info.leader, info.leader_epoch
        for broker_id in {part.broker_id for part in self._parts.values() if part.broker_id >= 0}:
            if broker_id not in self._readers:
                self._readers[broker_id] = asyncio.Event()
                self._tasks.start(f"read-{broker_id}", self._read_for_ever(broker_id))
            self._readers[broker_id].set()

    # ---- reading ----

    async def _read_for_ever(self, broker_id: int) -> None:
        wake = self._readers[broker_id]
        while True:
            wake.clear()
            parts = [part for part in self._parts.values() if part.broker_id == broker_id]
            if not parts or not self._active:
                await wake.wait()
                continue
            connection: FetchConnection | None = None
            try:
                connection = await self._context.cluster.fetch_connection(broker_id, LANE)
                well = await self._read(connection, parts)
            except (BrokerUnavailable, KafkaRefused) as error:
                log.warning("transaction log not read", extra={"broker": broker_id, "detail": str(error)})
                if connection is not None:
                    connection.close()
                well = False
            if not well:
                self._wake.set()
                await asyncio.sleep(RETRY_DELAY_S)

    async def _read(self, connection: FetchConnection, parts: Sequence[_Part]) -> bool:
        """One read; whether all went well."""
        fresh = [part for part in parts if part.load_end is None]
        if fresh:
            ends = await self._context.cluster.log_ends([(TRANSACTION_TOPIC, part.partition) for part in fresh])
            for part in fresh:
                part.load_end = ends.get((TRANSACTION_TOPIC, part.partition))
        loaded = all(part.loaded for part in parts)
        asked = {part.partition: part for part in parts}
        fetched = await connection.fetch(
            [
                FetchPartition(self._topic_id, part.partition, part.next_offset, PARTITION_BYTES_MAX, part.leader_epoch)
                for part in parts
            ],
            TAIL_WAIT_MS if loaded else 0,
            FETCH_BYTES_MAX,
            only_changes=loaded,
        )
        well = all(part.load_end is not None for part in parts)
        for found in fetched:
            part = asked[found.partition]
            if self._parts.get(found.partition) is not part:
                continue
            if found.error_code:
                well = False
                await self._refused(part, found)
            else:
                well = self._take(part, found) and well
        for part in parts:
            if not part.loaded and part.load_end is not None and part.next_offset >= part.load_end:
                self._has_loaded(part)
        self._progressed.set()
        self._on_progress()
        if not loaded:
            await asyncio.sleep(0)  # a long log is read without holding up the sessions
        return well

    def _take(self, part: _Part, found: Fetched) -> bool:
        try:
            for start, end, header in walk(found.records):
                if header.next_offset <= part.next_offset:
                    continue
                changes = part.log.take(found.records[start:end], header)
                part.next_offset = header.next_offset
                for change in changes:
                    part.offsets[change.transactional_id] = change.offset
                    part.past.discard(change.transactional_id)
                    if part.loaded:
                        self._on_change(part.partition, change)
                    elif (decided := change.transaction) and decided.state is TransactionState.PREPARE_COMMIT:
                        self._decided[decided.producer_id] = part.partition, change
        except BatchError as error:
            where = f"{TRANSACTION_TOPIC}-{part.partition} at offset {part.next_offset}"
            log.error("transaction log not read", extra={"detail": f"{where}: {error}"})
            return False
        return True

    def _has_loaded(self, part: _Part) -> None:
        part.loaded = True
        self._on_loaded()
        for transactional_id, transaction in list(part.log.latest.items()):
            if transaction.state is TransactionState.COMPLETE_COMMIT:
                part.past.add(transactional_id)
            offset = part.offsets[transactional_id]
            self._on_change(part.partition, Change(transactional_id, transaction, offset))
        for what, offset in part.log.unknown.items():
            where = f"{TRANSACTION_TOPIC}-{part.partition}, offset {offset}"
            log.error(
                "transaction log has what this version does not know",
                extra={"detail": f"{where}: {what}"},
            )

    async def _refused(self, part: _Part, found: Fetched) -> None:
        if found.error_code != OFFSET_OUT_OF_RANGE:
            return  # another leader
        log_start = await self._context.cluster.log_start(TRANSACTION_TOPIC, part.partition)
        if part.next_offset < log_start:
            part.next_offset = log_start
        else:  # the log lost records: nothing that was read from it counts
            self._parts[part.partition] = _Part(part.partition, part.broker_id, part.leader_epoch)
