"""Appends whole batches and commits a group's offsets in one transaction, one transaction at a time.

    begin      InitProducerId: whoever had the transactional id is fenced, and what it left open aborted
    open       AddPartitionsToTxn, AddOffsetsToTxn     to the coordinator, together
    commit     what of these lacks  |  Produce to each leader, TxnOffsetCommit, together  |  EndTxn

So a transaction takes three round trips, and whoever opens it knows what it has a third of them later. All but Produce
is asked again where brokers move. Where brokers refuse partitions, it is aborted. After another error its fate is
not known: whoever goes on begins again, which aborts what is open, and reads what was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final

from isthmus.errors import KafkaError, OurBug, PeerFault
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus.kafka.client import ClusterClient
from isthmus.kafka.results import ProducerIdentity, TopicPartition
from isthmus_plugins.cluster import (
    NOT_APPENDED,
    CommittedOffset,
    KafkaRefused,
    PartitionsRefused,
    ProducerFenced,
    Refusal,
)
from isthmus_protocol.error_codes import (
    CONCURRENT_TRANSACTIONS,
    INVALID_PRODUCER_EPOCH,
    NETWORK_EXCEPTION,
    OPERATION_NOT_ATTEMPTED,
    PRODUCER_FENCED,
)
from isthmus_protocol.record_requests import one_batch_each
from isthmus_protocol.records import add_sequence, in_transaction, read_header
from isthmus_protocol.schema import ApiKey

TIMEOUT_MS: Final = 15_000
"""Of a transaction: what is left open keeps readers of committed records waiting for so long, and until brokers look,
every ten seconds, unless somebody begins before. One that takes longer is aborted, and its producer fenced."""
CONCURRENT_RETRY_S: Final = 0.002
"""The last transaction has ended, and its markers are being written."""
CONCURRENT_S: Final = 30.0
MOVED_S: Final = 5.0
"""How long a coordinator that has moved is looked for, before all is begun again."""
CLASSIC_VERSIONS_MAX: Final[Mapping[int, int]] = {
    ApiKey.ADD_PARTITIONS_TO_TXN: 3,
    ApiKey.ADD_OFFSETS_TO_TXN: 3,
    ApiKey.TXN_OFFSET_COMMIT: 4,
    ApiKey.END_TXN: 4,
}
"""Later ones are for brokers among each other, or add to transactions by themselves (KIP-890, not all brokers)."""
OFFSETS_AT_ONCE: Final = 500
"""A coordinator writes those of a request as one batch, which has to be no larger than brokers allow."""
_FENCED: Final = frozenset((INVALID_PRODUCER_EPOCH, PRODUCER_FENCED))


class TransactionalProducer:
    """Of one transactional id, in one cluster. Raises PeerFaults as :class:`ClusterClient` does, and ProducerFenced."""

    def __init__(self, client: ClusterClient, transactional_id: str) -> None:
        self._client = client
        self._id = transactional_id
        self._lane = f"transactions-{transactional_id}"
        self._producer: ProducerIdentity | None = None
        """None: what was begun is in doubt, or nothing was."""
        self._sequences: dict[TopicPartition, int] = {}
        self._opened: set[TopicPartition | str] = set()
        """Partitions and groups of the transaction that is open."""
        self._coordinators: dict[str | None, int] = {}
        """Brokers: of groups by their ids, and of the transactional id (None)."""

    async def begin(self) -> None:
        """Fence whoever had the id before. What that left open is aborted when this returns."""
        self._producer = None
        self._sequences.clear()
        self._opened.clear()
        self._producer = await self._client.init_producer_id(self._id, transaction_timeout_ms=TIMEOUT_MS)

    async def open(self, places: Collection[tuple[str, int]], group: str) -> None:
        """Have the transaction that :meth:`commit` ends begin, with these partitions. Raises what that does."""
        producer = self._taken()
        await self._or_aborted(producer, self._open(producer, [TopicPartition(*place) for place in places], group))
        self._producer = producer

    async def commit(
        self,
        batches: Mapping[tuple[str, int], Sequence[bytes]],
        group: str,
        offsets: Mapping[tuple[str, int], CommittedOffset],
    ) -> dict[tuple[str, int], int]:
        """Append batches of no producer, in their order, and commit offsets, all or nothing; where logs go on then.

        Raises PartitionsRefused: it was aborted, another one may follow; ProducerFenced: another one has begun with the
        id. After that and any other error :meth:`begin` again.
        """
        producer = self._taken()
        places = {TopicPartition(*place): each for place, each in batches.items() if each}
        ends: dict[tuple[str, int], int] = {}
        await self._or_aborted(producer, self._fill(producer, places, group, offsets, ends))
        await self._end(producer, committed=True)
        self._producer = producer
        return ends

    def _taken(self) -> ProducerIdentity:
        """The producer, which nobody has until it is known that it may go on."""
        producer, self._producer = self._producer, None
        if producer is None:
            raise OurBug(f"{self._id}: begin first")
        return producer

    async def _or_aborted(self, producer: ProducerIdentity, work: Awaitable[None]) -> None:
        try:
            await work
        except PartitionsRefused as refused:
            await self._end(producer, committed=False)
            await self._client.refresh({topic for topic, _ in refused.refused})  # leaders may be others
            self._producer = producer
            raise

    async def _end(self, producer: ProducerIdentity, *, committed: bool) -> None:
        await self._added(producer, ApiKey.END_TXN, {"committed": committed})
        self._opened.clear()

    async def _open(self, producer: ProducerIdentity, places: Collection[TopicPartition], group: str) -> None:
        """Add what the transaction does not have yet."""
        added: set[TopicPartition | str] = {*places, group}
        asked = []
        if new := [place for place in places if place not in self._opened]:
            asked.append(self._add_partitions(producer, new))
        if group not in self._opened:
            asked.append(self._added(producer, ApiKey.ADD_OFFSETS_TO_TXN, {"group_id": group}))
        await _all(*asked)
        self._opened |= added

    async def _fill(
        self,
        producer: ProducerIdentity,
        places: Mapping[TopicPartition, Sequence[bytes]],
        group: str,
        offsets: Mapping[tuple[str, int], CommittedOffset],
        ends: dict[tuple[str, int], int],
    ) -> None:
        await self._open(producer, places, group)
        await _all(self._produce(producer, places, ends), self._commit_offsets(producer, group, offsets))

    async def _add_partitions(self, producer: ProducerIdentity, places: Collection[TopicPartition]) -> None:
        topics: dict[str, list[int]] = {}
        for place in places:
            topics.setdefault(place.topic, []).append(place.partition)
        values = {
            "v3_and_below_transactional_id": self._id,
            "v3_and_below_producer_id": producer.producer_id,
            "v3_and_below_producer_epoch": producer.producer_epoch,
            "v3_and_below_topics": [{"name": name, "partitions": indexes} for name, indexes in topics.items()],
        }
        refused: dict[tuple[str, int], Refusal] = {}

        def codes(answer: Any) -> list[int]:
            found = {
                (topic.name, result.partition_index): result.partition_error_code
                for topic in answer.results_by_topic_v3_and_below
                for result in topic.results_by_partition
            }
            refused.clear()
            refused.update({place: _refusal(code) for place, code in found.items() if code in NOT_APPENDED})
            told = {*NOT_APPENDED, OPERATION_NOT_ATTEMPTED} if refused else set()
            return [code for code in found.values() if code not in told]

        await self._ask(ApiKey.ADD_PARTITIONS_TO_TXN, values, codes)
        if refused:
            raise PartitionsRefused(refused)

    async def _added(self, producer: ProducerIdentity, api_key: ApiKey, more: Mapping[str, Any]) -> None:
        values = {"transactional_id": self._id, **producer._asdict(), **more}
        await self._ask(api_key, values, lambda answer: [answer.error_code])

    async def _ask(
        self,
        api_key: ApiKey,
        values: Mapping[str, Any],
        codes: Callable[[Any], Sequence[int]],
        group: str | None = None,
    ) -> None:
        """Ask the transaction's coordinator, or a group's, wherever it moves: each of these may be asked twice.

        Raises KafkaError, ProducerFenced.
        """

        async def attempt() -> None:
            if group not in self._coordinators:
                found = await self._client.coordinator(group or self._id, transaction=group is None)
                self._coordinators[group] = found
            try:
                connection = await self._client.to(self._coordinators[group], self._lane)
                await self._asked(connection, api_key, values, codes)
            except PeerFault:
                self._coordinators.pop(group, None)
                raise

        await self._client.retrying(attempt, deadline_s=MOVED_S)

    async def _asked(
        self,
        connection: BrokerConnection,
        api_key: ApiKey,
        values: Mapping[str, Any],
        codes: Callable[[Any], Sequence[int]],
    ) -> None:
        """Ask, and again while the transaction before is being completed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONCURRENT_S
        while True:
            answer = await connection.call(
                api_key, values, at_most=CLASSIC_VERSIONS_MAX[api_key], timeout=self._client.request_timeout_s
            )
            found = codes(answer)
            if CONCURRENT_TRANSACTIONS not in found or loop.time() > deadline:
                self._check(found, api_key.name)
                return
            await asyncio.sleep(CONCURRENT_RETRY_S)

    def _check(self, codes: Sequence[int], what: str) -> None:
        if _FENCED.intersection(codes):
            raise ProducerFenced(f"another producer has begun with the transactional id {self._id}")
        # What failed by itself is said, before what was not attempted because of it.
        for code in sorted(set(codes) - {0}):
            raise KafkaError(code, f"{what} of {self._id}")

    async def _produce(
        self,
        producer: ProducerIdentity,
        places: Mapping[TopicPartition, Sequence[bytes]],
        ends: dict[tuple[str, int], int],
    ) -> None:
        """What has several batches of a partition goes on when the one before is stored."""
        for batches in one_batch_each(places):
            request: dict[TopicPartition, bytes] = {}
            records: dict[TopicPartition, int] = {}
            for place, batch in batches.items():
                records[place] = read_header(batch).last_offset_delta + 1
                request[place] = in_transaction(
                    batch,
                    producer_id=producer.producer_id,
                    producer_epoch=producer.producer_epoch,
                    base_sequence=self._sequences.get(place, 0),
                )
            results = await self._client.produce_raw(request, transactional_id=self._id, lane=self._lane)
            refused: dict[tuple[str, int], Refusal] = {}
            failed: list[KafkaError] = []
            for place, result in results.items():
                error = result.error
                if error is None:
                    ends[place] = result.base_offset + records[place]
                    self._sequences[place] = add_sequence(self._sequences.get(place, 0), records[place])
                elif error.code in NOT_APPENDED:
                    refused[place] = _refusal(error.code, error.message, records[place], len(request[place]))
                else:
                    self._check([error.code] if error.code in _FENCED else [], "Produce")
                    failed.append(
                        KafkaError(error.code, f"{place.topic}-{place.partition}: {error.message or error.name}")
                    )
            if failed:
                raise failed[0]
            if len(results) < len(request):
                raise KafkaError(NETWORK_EXCEPTION, "a broker answers Produce without some partitions")
            if refused:
                raise PartitionsRefused(refused)

    async def _commit_offsets(
        self, producer: ProducerIdentity, group: str, offsets: Mapping[tuple[str, int], CommittedOffset]
    ) -> None:
        left = list(offsets.items())
        for first in range(0, len(left), OFFSETS_AT_ONCE):
            await self._commit_some_offsets(producer, group, left[first : first + OFFSETS_AT_ONCE])

    async def _commit_some_offsets(
        self, producer: ProducerIdentity, group: str, offsets: Sequence[tuple[tuple[str, int], CommittedOffset]]
    ) -> None:
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, partition), each in offsets:
            entry = {
                "partition_index": partition,
                "committed_offset": each.offset,
                "committed_leader_epoch": -1,
                "committed_metadata": each.metadata,
            }
            topics.setdefault(topic, []).append(entry)
        values = {
            "transactional_id": self._id,
            "group_id": group,
            **producer._asdict(),
            "generation_id": -1,
            "member_id": "",
            "group_instance_id": None,
            "topics": [{"name": name, "partitions": entries} for name, entries in topics.items()],
        }

        def codes(answer: Any) -> list[int]:
            return [result.error_code for topic in answer.topics for result in topic.partitions]

        await self._ask(ApiKey.TXN_OFFSET_COMMIT, values, codes, group)


def _refusal(code: int, message: str | None = None, records: int = 0, size: int = 0) -> Refusal:
    error = KafkaError(code, message)
    return Refusal(KafkaRefused(error.code, error.name, error.message or ""), records, size)


async def _all(*asked: Awaitable[None]) -> None:
    """All, whatever becomes of some of them. Raises the first error: that somebody has taken over before others, and
    last that partitions were refused, after which one may go on."""
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    for error in sorted(
        errors, key=lambda each: (isinstance(each, PartitionsRefused), not isinstance(each, ProducerFenced))
    ):
        raise error
