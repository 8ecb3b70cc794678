"""Transactions of a cluster in memory: a coordinator that fences, and a producer whose requests get lost or refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from isthmus_plugins.cluster import (
    BrokerUnavailable,
    CommittedOffset,
    KafkaRefused,
    PartitionsRefused,
    ProducerFenced,
    Refusal,
    TopicPartition,
    TransactionMarkers,
)
from isthmus_protocol.record_requests import one_batch_each
from isthmus_protocol.records import add_sequence, in_transaction, read_header
from support.fake_cluster import FakeCluster

REQUEST_TIMEOUT_S: Final = 30.0


@dataclass
class Coordinated:
    """What a coordinator knows of a transactional id."""

    producer_id: int
    epoch: int = -1
    places: set[TopicPartition] = field(default_factory=set)
    """Of the open transaction."""
    offsets: dict[str, dict[TopicPartition, CommittedOffset]] = field(default_factory=dict)
    """By group, what it commits if it does."""


class TransactingCluster(FakeCluster):
    """A cluster whose transactions are those of transactional ids."""

    def __init__(self, cluster_id: str, rng: random.Random, brokers: Sequence[int] = (1,)) -> None:
        super().__init__(rng, brokers)
        self.cluster_id = cluster_id
        self.coordinated: dict[str, Coordinated] = {}
        self.refuses: dict[TopicPartition, tuple[int, str]] = {}
        """Partitions that no transaction may have, and the broker's error."""
        self.silent = False
        """Whether nothing is answered until requests time out."""

    async def _request(self, broker: int | None = None) -> None:
        await self.answer()
        await super()._request(broker)

    async def answer(self) -> None:
        """What asks gets its answer. Raises BrokerUnavailable."""
        if self.silent:
            await asyncio.sleep(REQUEST_TIMEOUT_S)
            raise BrokerUnavailable(f"no answer within {REQUEST_TIMEOUT_S:g} s")

    def transactions(self, transactional_id: str) -> FakeTransactions:
        return FakeTransactions(self, transactional_id)

    def end(self, state: Coordinated, committed: bool) -> None:
        """Write the markers of an open transaction, and take its offsets."""
        for topic, partition in sorted(state.places):
            marker = TransactionMarkers(topic, partition, state.producer_id, state.epoch, committed, 0)
            assert self.partition(topic, partition).mark(marker) == 0
        for group, offsets in state.offsets.items() if committed else ():
            self.offsets.setdefault(group, {}).update(offsets)
        state.places, state.offsets = set(), {}

    async def close(self) -> None:
        """Nothing is open."""


class FakeTransactions:
    """A producer of one transactional id."""

    def __init__(self, cluster: TransactingCluster, transactional_id: str) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self._epoch = -1
        self._sequences: dict[TopicPartition, int] = {}
        self._opened: set[TopicPartition] | None = None
        """What the open transaction has; None: there is none."""

    async def begin(self) -> None:
        known = self._cluster.coordinated
        state = known.setdefault(self._id, Coordinated(1_000 + len(known)))
        await self._cluster._request()
        self._cluster.end(state, False)
        state.epoch += 1
        self._epoch = state.epoch
        self._sequences.clear()
        self._opened = None
        self._meet_trouble()

    async def open(self, places: Collection[TopicPartition], group: str) -> None:
        """An open transaction without records."""
        if self._opened is None or not self._opened.issuperset(places):
            await self._asked()
            await self._refuse({place: error for place in places if (error := self._forbidden(place)) is not None})
            self._meet_trouble()
            self._opened = {*places, *(self._opened or ())}

    async def commit(
        self,
        batches: Mapping[TopicPartition, Sequence[bytes]],
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
    ) -> Mapping[TopicPartition, int]:
        await self.open([place for place, each in batches.items() if each], group)
        ends: dict[TopicPartition, int] = {}
        for request in one_batch_each(batches):
            state = await self._asked()
            refused: dict[TopicPartition, Refusal] = {}
            for place, batch in request.items():
                self._append(state, place, batch, ends, refused)
            await self._refuse(refused)
            self._meet_trouble()
        (await self._asked()).offsets[group] = dict(offsets)
        self._meet_trouble()
        self._cluster.end(await self._asked(), True)
        self._opened = None
        self._meet_trouble()
        return ends

    async def _refuse(self, refused: Mapping[TopicPartition, Refusal]) -> None:
        """Abort, where something was refused."""
        if refused:
            self._cluster.end(await self._asked(), False)
            self._opened = None
            self._meet_trouble()
            raise PartitionsRefused(refused)

    def _forbidden(self, place: TopicPartition) -> Refusal | None:
        if place[0] not in self._cluster.found:
            return Refusal(KafkaRefused(3, "UNKNOWN_TOPIC_OR_PARTITION", "there is none"))
        if place not in self._cluster.refuses:
            return None
        return Refusal(KafkaRefused(*self._cluster.refuses[place], "refused"))

    def _append(
        self,
        state: Coordinated,
        place: TopicPartition,
        batch: bytes,
        ends: dict[TopicPartition, int],
        refused: dict[TopicPartition, Refusal],
    ) -> None:
        topic = self._cluster.found[place[0]]
        records = read_header(batch).last_offset_delta + 1
        if len(batch) > int({**self._cluster.defaults, **topic.configs}["max.message.bytes"]):
            refused[place] = Refusal(KafkaRefused(10, "MESSAGE_TOO_LARGE", "the batch"), records, len(batch))
            return
        sequence = self._sequences.get(place, 0)
        data = in_transaction(batch, producer_id=state.producer_id, producer_epoch=self._epoch, base_sequence=sequence)
        state.places.add(place)
        code, base_offset = topic.partitions[place[1]].produce(data)
        assert code == 0, (place, code)
        self._sequences[place] = add_sequence(sequence, records)
        ends[place] = base_offset + records

    async def _asked(self) -> Coordinated:
        """A request arrives at brokers."""
        await self._cluster._request()
        state = self._cluster.coordinated[self._id]
        if state.epoch != self._epoch:
            raise ProducerFenced(self._id)
        return state

    def _meet_trouble(self) -> None:
        """An answer is lost."""
        if self._cluster.random.random() < self._cluster.trouble / 4:
            raise BrokerUnavailable("the answer was lost")
