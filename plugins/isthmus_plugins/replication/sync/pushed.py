"""What this proxy pushes over links: partitions of topics and those of the offsets topic, asked for alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from isthmus_plugins.cluster import TopicInfo, TopicPartition
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.partitions import GroupPlaces, LinkPartition, SyncPlace
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

TAKEN_OVER_S: Final = 2.0
"""By then the proxy of the new leader has found what it is to push."""


class PushedPartitions:
    """Those of the leader end, and those that are read for groups. A copy of the offsets topic is none of either."""

    def __init__(self, leader_end: LeaderEnd, groups: GroupPlaces) -> None:
        self._leader_end = leader_end
        self._groups = groups

    def led(self) -> set[LinkPartition]:
        """All that this proxy is to push."""
        return {*(key for key in self._leader_end.discovery.led if key.topic != OFFSETS_TOPIC), *self._groups.places()}

    def get(self, key: LinkPartition) -> SyncPlace | None:
        """One that is pushed now."""
        return self._groups.place(key) if key.topic == OFFSETS_TOPIC else self._leader_end.stream(key)

    def waits(self, place: TopicPartition) -> bool:
        """Whether this proxy reads a partition of the offsets topic, which is not pushed before its decisions are."""
        return place[0] == OFFSETS_TOPIC and self._groups.leader_epoch(place[1]) >= 0

    def leader_epoch(self, place: TopicPartition) -> int:
        """The latest that is known, -1 for none."""
        if place[0] == OFFSETS_TOPIC:
            return self._groups.leader_epoch(place[1])
        return self._leader_end.discovery.leader_epochs.get(place, -1)

    def has_led(self, place: TopicPartition, broker_id: int, since: float) -> bool:
        """See :class:`~isthmus_plugins.confirmation.Confirmer`. Of the offsets topic brokers answer for records when
        all their replicas have them."""
        discovery = self._leader_end.discovery
        leader = discovery.leaders.get(place, -1)
        if leader >= 0 and broker_id >= 0 and leader != broker_id:
            return False
        return discovery.leads_since.get(place, since) <= since

    def between_leaders(self, now: float) -> list[TopicPartition]:
        """Partitions of led topics that may be no proxy's to push, as far as proxies know: they have no leader, or have
        another one since just now. ``now``: monotonic seconds."""
        discovery = self._leader_end.discovery
        since = discovery.leads_since
        return [
            place
            for place, leader in discovery.leaders.items()
            if leader < 0 or (place in since and now - since[place] < TAKEN_OVER_S)
        ]

    def tell_again(self) -> None:
        """Other partitions are new than before: the other sides are told with the next look."""
        self._leader_end.discovery.unsettle()

    def topics(self) -> tuple[Mapping[str, TopicInfo], int]:
        """This cluster's topics as of the last look at them, and how many looks there were."""
        return self._leader_end.discovery.topics, self._leader_end.discovery.looks

    def topic_id(self, topic: str) -> bytes | None:
        """None: not known."""
        return (
            (self._groups.topic_id or None)
            if topic == OFFSETS_TOPIC
            else self._leader_end.discovery.topic_ids.get(topic)
        )
