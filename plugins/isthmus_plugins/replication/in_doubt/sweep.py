"""Takes out of the store of transactions what no failover can need, so that it does not grow with every producer.

A producer that goes on replaces its own entries; those of one that is gone stay. An entry of a partition is of no use
when the partition has all below its ``end``, and no transaction of that producer is open there: what is open later is
of another one. That is looked at once in a while, of entries that were there the last time, too. Only the proxy that
wrote an entry takes it out, oldest ones first, and of copies those with a larger end, so that none comes to light
of an older decision, or with an end that is not the decision's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.in_doubt.pending_offsets import OFFSETS, STABLE
from isthmus_plugins.replication.in_doubt.store import DECISION, TransactionStore, identity_of
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.producer_ids import IDS_PER_CLUSTER
from isthmus_protocol.records import BatchError

log = logging.getLogger("isthmus_plugins.replication")

SWEEP_S: Final = 1800.0
AT_ONCE: Final = 1000

Key = tuple[Any, ...]
Value = Mapping[str, Any]


class TransactionSweep(Part):
    """``stable_offset(link, partition)``: before which offset of a source's offsets topic all has ended and is here."""

    def __init__(
        self, context: PluginContext, store: TransactionStore, stable_offset: Callable[[str, int], int]
    ) -> None:
        self._context = context
        self._store = store
        self._stable_offset = stable_offset
        self._tasks = Tasks("transaction-sweep", context.supervision)
        self._seen: Mapping[Key, Value] = {}
        """What was there the last time."""

    def start(self) -> None:
        self._tasks.keep("sweep", self._sweep_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except (BrokerUnavailable, KafkaRefused, OperationError, BatchError) as error:
                log.warning("store of transactions not swept", extra={"detail": str(error)})

    async def sweep(self) -> int:
        """Take out what was there the last time and is needed no more; how many entries."""
        entries = await self._store.entries()
        before, self._seen = self._seen, entries
        mine = {
            key: value
            for key, value in entries.items()
            if key[-1] == self._context.proxy_name and before.get(key) == value
        }
        void = await self._void(mine, entries)
        for start in range(0, len(void), AT_ONCE):
            await self._store.take_out(void[start : start + AT_ONCE])
        if void:
            log.info("store of transactions swept", extra={"entries": len(entries), "taken_out": len(void)})
        return len(void)

    async def _void(self, mine: Mapping[Key, Value], entries: Mapping[Key, Value]) -> list[tuple[Key, Value]]:
        names = {link.link_id: link.name for link in self._context.control.state.links.values()}
        first: dict[Key, tuple[tuple[int, ...], int]] = {}
        """By place of a producer: the oldest decision, and the largest end of its copies, negative."""
        smallest: dict[tuple[Key, tuple[int, ...]], int] = {}
        """By place and decision: the smallest end of its copies, which is its end."""
        stable: dict[Key, int] = {}
        for key, value in entries.items():
            if key[0] == DECISION:
                identity, end = identity_of(value), int(value["end"])
                first[key[:5]] = min(first.get(key[:5], (identity, -end)), (identity, -end))
                smallest[key[:5], identity] = min(smallest.get((key[:5], identity), end), end)
            elif key[0] == STABLE:
                stable[key[1], key[3]] = max(int(value["settled"]), stable.get((key[1], key[3]), 0))
        found: list[tuple[Key, Value]] = []
        by_place: dict[TopicPartition, list[tuple[Key, Value]]] = {}
        for key, value in mine.items():
            name = names.get(key[1])
            is_void = key[0] == OFFSETS and int(key[5]) < stable.get((key[1], key[4]), 0)
            if name is None or is_void:  # nobody can ask for what a link knew that was deleted
                found.append((key, value))
            elif key[0] == DECISION and (identity_of(value), -int(value["end"])) == first[key[:5]]:
                place = str(key[3]), int(key[4])
                if place[0] != OFFSETS_TOPIC:
                    by_place.setdefault(place, []).append((key, value))
                elif self._stable_offset(name, place[1]) >= smallest[key[:5], identity_of(value)]:
                    found.append((key, value))
        ends = await self._context.cluster.high_watermarks(by_place) if by_place else {}
        for place, some in by_place.items():
            if place in ends:
                is_open = await self._open(place)
                found += [
                    (key, value)
                    for key, value in some
                    if smallest[key[:5], identity_of(value)] <= ends[place] and key[2] not in is_open
                ]
        return found

    async def _open(self, place: TopicPartition) -> Collection[int]:
        """Producers, as their clusters have them, with an open transaction in a partition."""
        producers = await self._context.cluster.producers(*place)
        return {
            producer_id % IDS_PER_CLUSTER for producer_id, known in producers.items() if known.transaction_start >= 0
        }
