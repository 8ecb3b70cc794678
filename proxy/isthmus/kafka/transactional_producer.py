"""Appends whole batches and commits a group's offsets in one transaction, one transaction at a time.

    begin      InitProducerId: whoever had the transactional id is fenced, and what it left open aborted
    commit     AddPartitionsToTxn, AddOffsetsToTxn  |  Produce to each leader, TxnOffsetCommit  |  EndTxn
               \\______ to the coordinator, together ___/  \\____________ together ____________/

So a transaction takes three round trips. All but Produce is asked again where brokers move. After an error its fate is
not known: whoever goes on begins again, which aborts what is open, and reads what was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from isthmus.errors import KafkaError, OurBug, PeerFault
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus.kafka.client import ClusterClient
from isthmus.kafka.results import ProducerIdentity, TopicPartition
from isthmus_plugins.cluster import CommittedOffset, ProducerFenced
from isthmus_protocol.error_codes import (
    CONCURRENT_TRANSACTIONS,
    INVALID_PRODUCER_EPOCH,
    NETWORK_EXCEPTION,
    PRODUCER_FENCED,
)
from isthmus_protocol.record_requests import one_batch_each
from isthmus_protocol.records import add_sequence, in_transaction, read_header
from isthmus_protocol.schema import ApiKey

TIMEOUT_MS: Final = 60_000
"""Of a transaction: what is left open keeps readers of committed records waiting for so long, unless somebody begins
before."""
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
        self._coordinators: dict[str | None, int] = {}
        """Brokers: of groups by their ids, and of the transactional id (None)."""

    async def begin(self) -> None:
        """Fence whoever had the id before. What that left open is aborted when this returns."""
        self._producer = None
        self._sequences.clear()
        self._producer = await self._client.init_producer_id(self._id, transaction_timeout_ms=TIMEOUT_MS)

    async def commit(
        self,
        batches: Mapping[tuple[str, int], Sequence[bytes]],
        group: str,
        offsets: Mapping[tuple[str, int], CommittedOffset],
    ) -> dict[tuple[str, int], int]:
        """Append batches of no producer, in their order, and commit offsets, all or nothing; where logs go on then.

        Raises ProducerFenced: another one has begun with the id. After any error :meth:`begin` again.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            raise OurBug(f"{self._id}: begin first")
        places = {TopicPartition(*place): each for place, each in batches.items() if each}
        await _both(
            self._add_partitions(producer, places),
            self._added(producer, ApiKey.ADD_OFFSETS_TO_TXN, {"group_id": group}),
        )
        ends: dict[tuple[str, int], int] = {}
        await _both(self._produce(producer, places, ends), self._commit_offsets(producer, group, offsets))
        await self._added(producer, ApiKey.END_TXN, {"committed": True})
        self._producer = producer
        return ends

    async def _add_partitions(self, producer: ProducerIdentity, places: Mapping[TopicPartition, object]) -> None:
        topics: dict[str, list[int]] = {}
        for place in places:
            topics.setdefault(place.topic, []).append(place.partition)
        if not topics:
            return
        values = {
            "v3_and_below_transactional_id": self._id,
            "v3_and_below_producer_id": producer.producer_id,
            "v3_and_below_producer_epoch": producer.producer_epoch,
            "v3_and_below_topics": [{"name": name, "partitions": indexes} for name, indexes in topics.items()],
        }

        def codes(answer: Any) -> list[int]:
            return [
                result.partition_error_code
                for topic in answer.results_by_topic_v3_and_below
                for result in topic.results_by_partition
            ]

        await self._ask(ApiKey.ADD_PARTITIONS_TO_TXN, values, codes)

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
                sequence = self._sequences.get(place, 0)
                records[place] = read_header(batch).last_offset_delta + 1
                request[place] = in_transaction(
                    batch,
                    producer_id=producer.producer_id,
                    producer_epoch=producer.producer_epoch,
                    base_sequence=sequence,
                )
                self._sequences[place] = add_sequence(sequence, records[place])
            results = await self._client.produce_raw(request, transactional_id=self._id, lane=self._lane)
            for place, result in results.items():
                error = result.error
                if error is not None:
                    self._check([error.code] if error.code in _FENCED else [], "Produce")
                    raise KafkaError(error.code, f"{place.topic}-{place.partition}: {error.message or error.name}")
                ends[place] = result.base_offset + records[place]
            if len(results) < len(request):
                raise KafkaError(NETWORK_EXCEPTION, "a broker answers Produce without some partitions")

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


async def _both(first: Awaitable[None], second: Awaitable[None]) -> None:
    """Both, whatever becomes of one of them. Raises the first error, that somebody has taken over before others."""
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    for error in sorted(errors, key=lambda each: not isinstance(each, ProducerFenced)):
        raise error
