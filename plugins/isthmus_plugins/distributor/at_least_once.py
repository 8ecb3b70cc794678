"""Writes to a target without a transaction, where the tree's document says ``exactly_once: false``.

A distributor that dies between the two requests has given what the next one gives again; so has one that goes on after
another took over, for as long as it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from isthmus_plugins.cluster import (
    BrokerUnavailable,
    ClusterApi,
    CommittedOffset,
    KafkaRefused,
    TopicInfo,
    TopicPartition,
)
from isthmus_protocol.record_requests import one_batch_each
from isthmus_protocol.records import read_header

PRODUCE_TIMEOUT_MS: Final = 30_000
AS_BROKERS_DO: Final = -1
"""How long committed offsets are kept."""


class AtLeastOnce:
    """In the place of :class:`~isthmus_plugins.cluster.Transactions`."""

    def __init__(self, cluster: ClusterApi, lane: str) -> None:
        self._cluster = cluster
        self._lane = lane

    async def begin(self) -> None:
        """Nobody is fenced."""

    async def commit(
        self,
        batches: Mapping[TopicPartition, Sequence[bytes]],
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
    ) -> Mapping[TopicPartition, int]:
        """Append batches, then commit offsets. Raises BrokerUnavailable, KafkaRefused."""
        ends: dict[TopicPartition, int] = {}
        by_leader: dict[int, dict[TopicPartition, Sequence[bytes]]] = {}
        topics = await self._cluster.topics_named({topic for topic, _ in batches})
        for place, each in batches.items():
            if each:
                by_leader.setdefault(_leader(topics, place), {})[place] = each
        for leader, places in by_leader.items():
            connection = await self._cluster.produce_connection(leader, self._lane)
            for request in one_batch_each(places):
                (results,) = await connection.produce([request], PRODUCE_TIMEOUT_MS)
                for place, batch in request.items():
                    result = results.get(place)
                    where = f"{place[0]}-{place[1]}"
                    if result is None:
                        raise BrokerUnavailable(f"{where} is not appended to: no answer")
                    if result.error_code:
                        raise KafkaRefused(result.error_code, result.error_name, f"{where}: {result.message}")
                    ends[place] = result.base_offset + read_header(batch).last_offset_delta + 1
        refused = await self._cluster.commit_offsets(group, offsets, AS_BROKERS_DO)
        for place, error in refused.items():
            raise BrokerUnavailable(f"the position of {place[0]}-{place[1]} is not committed: {error.error_name}")
        return ends


def _leader(topics: Mapping[str, TopicInfo], place: TopicPartition) -> int:
    topic = topics.get(place[0])
    if topic is None or not place[1] < len(topic.partitions):
        raise BrokerUnavailable(f"{place[0]}-{place[1]} is not there")
    return topic.partitions[place[1]].leader
