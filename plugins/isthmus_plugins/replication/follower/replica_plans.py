"""How many replicas topics are to have, and which brokers get those that are lacking: decided, and nothing done.

A topic only grows. The replicas that it has stay first in its partitions' lists, so no leader moves because of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from isthmus_control.model import Link, TopicHistory
from isthmus_plugins.cluster import TopicInfo, TopicPartition
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.logs.topic_settings import IN_SYNC_MIN

S = TypeVar("S", calls.LedTopic, calls.WantedTopic)


class Wish(NamedTuple):
    """What a topic is to have."""

    factor: int
    """At least so many replicas of each partition; 0: what there are."""
    in_sync_min: int | None
    """At most as many as it has replicas; None: that is not known."""


def as_wished(link: Link | None, source: S, brokers: int) -> S:
    """A topic of the source, with what the link's settings say of replicas in place of what it has there.

    ``brokers``: how many this cluster has; nothing has more replicas.
    """
    factor = None if link is None else link.follower_replication_factor
    factor = min(factor or source.replication_factor or 1, brokers)
    if source.replication_factor != factor:
        source = replace(source, replication_factor=factor)
    in_sync_min = None if link is None else link.follower_in_sync_min
    if in_sync_min is not None and source.configs is not None:
        source = replace(source, configs={**source.configs, IN_SYNC_MIN: str(in_sync_min)})
    return source


def known_brokers(alive: Iterable[int], topics: Mapping[str, TopicInfo]) -> frozenset[int]:
    """The brokers that a cluster has: those that are there, and those that are away and have replicas."""
    placed = (each.replicas for topic in topics.values() for each in topic.partitions)
    return frozenset(alive).union(*placed)


def came_empty(history: TopicHistory | None) -> bool:
    """Whether all that a topic holds came over the link that it follows: it was made for it, or was empty.

    What somebody else has filled before has the replicas that its owner gave it.
    """
    if history is None:
        return False
    return all(
        len(ranges) == 1 and ranges[0].start_offset == 0 and ranges[0].end_offset is None
        for ranges in history.partitions.values()
    )


def fewest(topic: TopicInfo) -> int:
    """How many replicas each partition has, at least."""
    return min(len(partition.replicas) for partition in topic.partitions)


def filled(topic: TopicInfo) -> int:
    """How many replicas of each partition have all of it, at least."""
    return min(len(partition.in_sync) for partition in topic.partitions)


def is_behind(topic: TopicInfo) -> bool:
    """Whether some replica lacks records: its broker is away, or it is filled."""
    return any(len(partition.in_sync) < len(partition.replicas) for partition in topic.partitions)


def grown(
    wanted: Mapping[str, int], topics: Mapping[str, TopicInfo], racks: Mapping[int, str | None], at_most: int
) -> dict[TopicPartition, tuple[int, ...]]:
    """The replicas that partitions are to get, so that they have as many as is ``wanted`` of their topics.

    ``racks``: of the brokers that are there. New replicas come to racks where the partition has fewest, there to
    brokers that have fewest. Partitions without a leader wait; of others ``at_most`` so many are begun with.
    """
    load = Counter(broker for topic in topics.values() for each in topic.partitions for broker in each.replicas)
    found: dict[TopicPartition, tuple[int, ...]] = {}
    for name, factor in sorted(wanted.items()):
        for index, partition in enumerate(topics[name].partitions):
            replicas = list(partition.replicas)
            here = Counter(racks.get(broker) for broker in replicas)
            while len(replicas) < factor and (free := racks.keys() - set(replicas)):
                chosen = min(free, key=lambda broker: (here[racks[broker]], load[broker], broker))
                replicas.append(chosen)
                here[racks[chosen]] += 1
                load[chosen] += 1
            if partition.leader >= 0 and len(replicas) > len(partition.replicas):
                if len(found) >= at_most:
                    return found
                found[name, index] = tuple(replicas)
    return found
