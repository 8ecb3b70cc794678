"""Over which links acks may have to wait, and what is recorded of their partitions.

A link counts from when it is synchronous until the last lease of it has run out.
"""

from __future__ import annotations

from isthmus_control.clock import ZERO
from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, LinkMode, ResourceType, SyncRecord, SyncState, groups_with_topics
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.expiring_leases import ExpiringLeases
from isthmus_plugins.replication.sync.new_partitions import NewPartitions
from isthmus_protocol.offsets_log import OFFSETS_TOPIC


class SynchronousLinks:
    """Links over which this cluster's topics and groups are led that are synchronous, or may have been."""

    def __init__(self, context: PluginContext, new: NewPartitions) -> None:
        self._context = context
        self.new = new
        self.expiring = ExpiringLeases(context.clock.monotonic())
        self.active = False
        """Whether acks may have to wait for one at all."""
        self._leading: dict[str, tuple[str, ...]] = {}
        """By topic."""

    def changed(self, state: ControlState) -> None:
        """Links are others, or leases have run out."""
        self._leading.clear()
        self.active = any(map(self.holds, state.links.values()))

    def leading(self, topic: str) -> tuple[str, ...]:
        """Those that lead a topic; groups for the offsets topic."""
        found = self._leading.get(topic)
        if found is None:
            found = self._leading[topic] = self._that_lead(topic)
        return found

    def _that_lead(self, topic: str) -> tuple[str, ...]:
        state = self._context.control.state
        if topic == OFFSETS_TOPIC:
            links = state.links.items()
            return tuple(
                name for name, link in links if link.leads_groups and groups_with_topics(link) and self.holds(link)
            )
        return tuple(
            counterpart.link.name
            for counterpart in state.lookup.leading(ResourceType.TOPIC, topic)
            if self.holds(counterpart.link) and counterpart.mapping.offsets is None
        )

    def concerns(self, topic: str) -> bool:
        """Whether acks of a topic may have to wait."""
        return bool(self.leading(topic)) or self.expiring.has_topic(topic)

    def holds(self, link: Link) -> bool:
        """Whether acks may have to wait for a link: it is synchronous, or its leases run, or this process does not know
        whether they do."""
        if link.mode is LinkMode.SYNCHRONOUS or self.expiring.has_link(link.name):
            return True
        return self.expiring.unsure and link.settings.mode.written > ZERO

    def is_synchronous(self, link_name: str) -> bool:
        link = self._context.control.state.links.get(link_name)
        return link is not None and link.mode is LinkMode.SYNCHRONOUS

    def leads(self, key: LinkPartition) -> bool:
        """Whether a partition is led over a link that is synchronous."""
        return self.is_synchronous(key.link) and key.link in self.leading(key.topic)

    def timeout_s(self, link_name: str) -> float:
        """How long acks wait for a link that confirms nothing."""
        link = self._context.control.state.links.get(link_name)
        return link.sync_confirm_timeout_ms / 1000 if link is not None else 0.0

    # ---- what is recorded ----

    def record(self, link_name: str, place: TopicPartition) -> SyncRecord | None:
        """What is recorded of a partition, of whatever topic of that name: this proxy may be the last to know of a new
        one, and acks that wait too long are no error."""
        return self._context.control.state.sync_records.get(link_name, {}).get(place)

    def own_record(self, link_name: str, place: TopicPartition) -> SyncRecord | None:
        """The same, unless it is known to be of another topic: what was deleted says nothing of what has its name."""
        record = self.record(link_name, place)
        return None if record is None or self.new.is_of_another(place, record) else record

    def has_young(self, place: TopicPartition) -> bool:
        """Whether looks to come may say, without a change of what there is, that some record is of another topic."""
        records = (self.record(link_name, place) for link_name in self.leading(place[0]))
        return any(record is not None and self.new.is_young(record) for record in records)

    def is_unrecorded(self, link_name: str, place: TopicPartition) -> bool:
        """Whether a partition is new and is to be recorded."""
        return self.own_record(link_name, place) is None and self.new.is_new(link_name, place)

    def records(self, place: TopicPartition) -> dict[str, SyncRecord]:
        """The same by link that leads it; a new partition counts as In-Sync before it is recorded."""
        found = ((link_name, self._record_or_new(link_name, place)) for link_name in self.leading(place[0]))
        return {link_name: record for link_name, record in found if record is not None}

    def _record_or_new(self, link_name: str, place: TopicPartition) -> SyncRecord | None:
        own = self.own_record(link_name, place)
        return own or self.new.record(link_name, place) or self.record(link_name, place)

    def waits_for_record(self, place: TopicPartition) -> bool:
        """Whether no ack of a partition goes before it is recorded, since it is new."""
        return any(
            self.own_record(link_name, place) is None and self.new.waits(link_name, place)
            for link_name in self.leading(place[0])
        )

    def holding(self, place: TopicPartition) -> list[LinkPartition]:
        """Over which links a partition is recorded In-Sync."""
        records = self.records(place).items()
        return [LinkPartition(name, *place) for name, record in records if record.state is SyncState.IN_SYNC]
