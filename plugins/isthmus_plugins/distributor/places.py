"""Partitions that brokers are asked about one by one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from isthmus_plugins.cluster import ClusterApi, TopicPartition
from isthmus_plugins.tasks import some_at_once

PLACES_AT_ONCE: Final = 50
"""So many at the same time."""


async def log_starts(cluster: ClusterApi, places: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Where logs begin. Raises BrokerUnavailable, KafkaRefused: also where that is not known of one of them."""

    async def start(place: TopicPartition) -> int:
        return await cluster.log_start(*place)

    return dict(zip(places, await some_at_once(PLACES_AT_ONCE, start, places), strict=True))
