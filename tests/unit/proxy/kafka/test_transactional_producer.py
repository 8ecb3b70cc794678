"""Transactions of which brokers refuse partitions, against a scripted peer: aborted, and the next one follows."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import pytest
from support.scripted_broker import ScriptedBroker, metadata_of

from isthmus.cluster_access import ClusterAccess
from isthmus.errors import OurBug
from isthmus.kafka.client import ClusterClient
from isthmus_bench.load import batch
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, PartitionsRefused, ProducerFenced
from isthmus_protocol.error_codes import (
    MESSAGE_TOO_LARGE,
    NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    NOT_LEADER_OR_FOLLOWER,
    OPERATION_NOT_ATTEMPTED,
    PRODUCER_FENCED,
    TOPIC_AUTHORIZATION_FAILED,
)
from isthmus_protocol.records import read_header
from isthmus_protocol.schema import ApiKey

KEPT = {("t", 0): CommittedOffset(1, "")}


class Coordinator(ScriptedBroker):
    """One broker that does all, and answers the errors that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: set[int] = set()
        """Partitions that no transaction may have."""
        self.errors: dict[int, int] = {}
        """Of Produce, by partition."""
        self.offsets_error = 0
        self.answers(ApiKey.METADATA, lambda _: metadata_of([self], {"t": self.topic()}))
        self.answers(ApiKey.FIND_COORDINATOR, self.coordinator)
        self.answers(ApiKey.INIT_PRODUCER_ID, {"error_code": 0, "producer_id": 5, "producer_epoch": 1})
        self.answers(ApiKey.ADD_PARTITIONS_TO_TXN, self.added)
        self.answers(ApiKey.ADD_OFFSETS_TO_TXN, {"error_code": 0})
        self.answers(ApiKey.PRODUCE, self.produced)
        self.answers(ApiKey.TXN_OFFSET_COMMIT, self.committed)
        self.answers(ApiKey.END_TXN, {"error_code": 0})

    def topic(self) -> dict[str, Any]:
        return {"topic_id": uuid.UUID(int=1), "leaders": {0: (1, 0), 1: (1, 0)}}

    def coordinator(self, request: Any) -> dict[str, Any]:
        place = {"node_id": 1, "host": self.host, "port": self.port, "error_code": 0, "error_message": None}
        return {**place, "coordinators": [{**place, "key": key} for key in request.coordinator_keys]}

    def added(self, request: Any) -> dict[str, Any]:
        def code(partition: int) -> int:
            asked = {each for topic in request.v3_and_below_topics for each in topic.partitions}
            if partition in self.forbidden:
                return TOPIC_AUTHORIZATION_FAILED
            return OPERATION_NOT_ATTEMPTED if self.forbidden & asked else 0

        results = [
            {
                "name": topic.name,
                "results_by_partition": [
                    {"partition_index": each, "partition_error_code": code(each)} for each in topic.partitions
                ],
            }
            for topic in request.v3_and_below_topics
        ]
        return {"results_by_topic_v3_and_below": results}

    def produced(self, request: Any) -> dict[str, Any]:
        responses = [
            {
                "name": topic.name,
                "partition_responses": [
                    {"index": each.index, "error_code": self.errors.get(each.index, 0), "base_offset": 10}
                    for each in topic.partition_data
                ],
            }
            for topic in request.topic_data
        ]
        return {"responses": responses}

    def committed(self, request: Any) -> dict[str, Any]:
        topics = [
            {
                "name": topic.name,
                "partitions": [
                    {"partition_index": each.partition_index, "error_code": self.offsets_error}
                    for each in topic.partitions
                ],
            }
            for topic in request.topics
        ]
        return {"topics": topics}

    def ended(self) -> list[bool]:
        """Whether each transaction was committed."""
        return [each.committed for each in self.seen(ApiKey.END_TXN)]

    def sequences(self) -> list[dict[int, int]]:
        """Of each Produce, by partition."""
        return [
            {each.index: read_header(each.records).base_sequence for each in request.topic_data[0].partition_data}
            for request in self.seen(ApiKey.PRODUCE)
        ]


def test_a_refused_partition_aborts_the_transaction_and_the_next_one_follows() -> None:
    async def test() -> None:
        async with Coordinator() as broker, ClusterClient([broker.address]) as client:
            transactions = ClusterAccess(client).transactions("id")
            await transactions.begin()
            both = {("t", 0): [batch(3, 10)], ("t", 1): [batch(2, 10)]}
            assert await transactions.commit(both, "g", KEPT) == {("t", 0): 13, ("t", 1): 12}

            broker.errors = {1: MESSAGE_TOO_LARGE}
            with pytest.raises(PartitionsRefused, match="t-1") as refused:
                await transactions.commit(both, "g", KEPT)
            ((place, (error, records, size)),) = refused.value.refused.items()
            assert (place, error.error_name, records) == (("t", 1), "MESSAGE_TOO_LARGE", 2)
            assert (size, refused.value.ends) == (len(both["t", 1][0]), {})

            broker.errors = {}
            await transactions.open([("t", 0)], "g")
            assert await transactions.commit(both, "g", KEPT) == {("t", 0): 13, ("t", 1): 12}
            # What was refused has not taken up a sequence number, and what was aborted has.
            assert broker.sequences() == [{0: 0, 1: 0}, {0: 3, 1: 2}, {0: 6, 1: 2}]
            assert broker.ended() == [True, False, True]
            asked = [
                topic.partitions
                for each in broker.seen(ApiKey.ADD_PARTITIONS_TO_TXN)
                for topic in each.v3_and_below_topics
            ]
            assert [[*each] for each in asked] == [[0, 1], [0, 1], [0], [1]], "what is open is not asked for again"
            assert len(broker.seen(ApiKey.ADD_OFFSETS_TO_TXN)) == 3

            broker.forbidden = {1}
            for ask in (transactions.open([*both], "g"), transactions.commit(both, "g", KEPT)):
                with pytest.raises(PartitionsRefused) as refused:
                    await ask
                assert [*refused.value.refused] == [("t", 1)], "the other one was not attempted"
                assert refused.value.refused["t", 1].records == 0
            assert broker.ended()[3:] == [False, False]
            assert len(broker.seen(ApiKey.PRODUCE)) == 3
            assert await transactions.commit({("t", 0): [batch(1, 10)]}, "g", KEPT) == {("t", 0): 11}

    asyncio.run(test())


@pytest.mark.parametrize(
    ("produce", "offsets", "error"),
    [
        (NOT_ENOUGH_REPLICAS_AFTER_APPEND, 0, BrokerUnavailable),
        (NOT_LEADER_OR_FOLLOWER, 0, BrokerUnavailable),
        (MESSAGE_TOO_LARGE, PRODUCER_FENCED, ProducerFenced),
    ],
)
def test_what_is_in_doubt_comes_before_what_is_refused(produce: int, offsets: int, error: type[Exception]) -> None:
    """Who goes on after that would go on without knowing what is there, or in another one's place."""

    async def test() -> None:
        async with Coordinator() as broker, ClusterClient([broker.address]) as client:
            transactions = ClusterAccess(client).transactions("id")
            await transactions.begin()
            broker.errors, broker.offsets_error = {0: produce, 1: MESSAGE_TOO_LARGE}, offsets
            with pytest.raises(error) as raised:
                await transactions.commit({("t", 0): [batch(3, 10)], ("t", 1): [batch(2, 10)]}, "g", KEPT)
            assert not isinstance(raised.value, PartitionsRefused)
            assert broker.ended() == []
            with pytest.raises(OurBug, match="begin first"):
                await transactions.commit({}, "g", KEPT)

    asyncio.run(test())


def test_a_transaction_that_is_left_open_keeps_readers_waiting_for_seconds() -> None:
    """Its producer's cluster may be lost: nobody begins with the id again, and brokers abort it after that time."""

    async def test() -> None:
        async with Coordinator() as broker, ClusterClient([broker.address]) as client:
            await ClusterAccess(client).transactions("id").begin()
            (asked,) = broker.seen(ApiKey.INIT_PRODUCER_ID)
            assert asked.transaction_timeout == timedelta(seconds=15)

    asyncio.run(test())
