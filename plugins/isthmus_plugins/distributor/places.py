"""What brokers are asked for all of, or nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, CommittedOffset, TopicPartition
from isthmus_plugins.distributor.renamed import LeafApi
from isthmus_plugins.tasks import some_at_once

PLACES_AT_ONCE: Final = 50
"""So many at the same time."""


async def log_starts(cluster: ClusterApi, places: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Where logs begin. Raises BrokerUnavailable, KafkaRefused: also where that is not known of one of them."""

    async def start(place: TopicPartition) -> int:
        return await cluster.log_start(*place)

    return dict(zip(places, await some_at_once(PLACES_AT_ONCE, start, places), strict=True))


async def committed_of_all(
    cluster: LeafApi, groups: Collection[str], stable: bool = False
) -> Mapping[str, Mapping[TopicPartition, CommittedOffset]]:
    """What groups have committed (:meth:`LeafApi.committed_offsets`). Raises BrokerUnavailable, KafkaRefused: also
    where one of them cannot be asked now."""
    found = await cluster.committed_offsets(groups, stable=stable)
    if missing := {*groups} - found.keys():
        raise BrokerUnavailable(f"what group {min(missing)} has committed cannot be read now")
    return found
