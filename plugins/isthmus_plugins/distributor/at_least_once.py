"""Writes to a target without a transaction, where the tree's document says ``exactly_once: false``.

A distributor that dies before the positions of what it gave are committed has given what the next one gives again; so
has one that goes on after another took over, for as long as it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from isthmus_plugins.cluster import (
    NOT_APPENDED,
    BrokerUnavailable,
    ClusterApi,
    CommittedOffset,
    KafkaRefused,
    PartitionsRefused,
    Refusal,
    TopicInfo,
    TopicPartition,
)
from isthmus_protocol.error_codes import LEADER_NOT_AVAILABLE
from isthmus_protocol.record_requests import one_batch_each
from isthmus_protocol.records import read_header

PRODUCE_TIMEOUT_MS: Final = 30_000
AS_BROKERS_DO: Final = -1
"""How long committed offsets are kept."""
NO_LEADER: Final = KafkaRefused(LEADER_NOT_AVAILABLE, "LEADER_NOT_AVAILABLE", "no broker leads it")


class AtLeastOnce:
    """In the place of :class:`~isthmus_plugins.cluster.Transactions`."""

    def __init__(self, cluster: ClusterApi, lane: str) -> None:
        self._cluster = cluster
        self._lane = lane
        self._topics: dict[str, TopicInfo] = {}
        """As they were when nothing was refused."""

    async def begin(self) -> None:
        """Nobody is fenced."""

    async def open(self, places: Collection[TopicPartition], group: str) -> None:
        """There is nothing to begin."""

    async def commit(
        self,
        batches: Mapping[TopicPartition, Sequence[bytes]],
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
    ) -> Mapping[TopicPartition, int]:
        """Append batches, then commit offsets. Raises PartitionsRefused, BrokerUnavailable, KafkaRefused."""
        ends: dict[TopicPartition, int] = {}
        refused: dict[TopicPartition, Refusal] = {}
        by_leader: dict[int, dict[TopicPartition, Sequence[bytes]]] = {}
        if unknown := {topic for topic, _ in batches} - self._topics.keys():
            self._topics |= await self._cluster.topics_named(unknown)
        for place, each in batches.items():
            leader = _leader(self._topics, place)
            if leader < 0:
                refused[place] = Refusal(NO_LEADER)
            elif each:
                by_leader.setdefault(leader, {})[place] = each
        outcomes = await asyncio.gather(
            *(self._append(leader, of_leader, ends, refused) for leader, of_leader in by_leader.items()),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        if refused:
            self._topics.clear()
            raise PartitionsRefused(refused, {place: end for place, end in ends.items() if place not in refused})
        not_committed = await self._cluster.commit_offsets(group, offsets, AS_BROKERS_DO) if offsets else {}
        for place, error in not_committed.items():
            raise BrokerUnavailable(f"the position of {place[0]}-{place[1]} is not committed: {error.error_name}")
        return ends

    async def _append(
        self,
        leader: int,
        batches: Mapping[TopicPartition, Sequence[bytes]],
        ends: dict[TopicPartition, int],
        refused: dict[TopicPartition, Refusal],
    ) -> None:
        """What has several batches of a partition goes on when the one before is stored."""
        connection = await self._cluster.produce_connection(leader, self._lane)
        for each in one_batch_each(batches):
            request = {place: batch for place, batch in each.items() if place not in refused}
            if not request:
                continue
            (results,) = await connection.produce([request], PRODUCE_TIMEOUT_MS)
            for place, batch in request.items():
                result = results.get(place)
                where = f"{place[0]}-{place[1]}"
                records = read_header(batch).last_offset_delta + 1
                if result is None:
                    raise BrokerUnavailable(f"{where} is not appended to: no answer")
                if result.error_code in NOT_APPENDED:
                    error = KafkaRefused(result.error_code, result.error_name, result.message)
                    refused[place] = Refusal(error, records, len(batch))
                elif result.error_code:
                    raise KafkaRefused(result.error_code, result.error_name, f"{where}: {result.message}")
                else:
                    ends[place] = result.base_offset + records


def _leader(topics: Mapping[str, TopicInfo], place: TopicPartition) -> int:
    """-1: none."""
    topic = topics.get(place[0])
    return topic.partitions[place[1]].leader if topic is not None and place[1] < len(topic.partitions) else -1
