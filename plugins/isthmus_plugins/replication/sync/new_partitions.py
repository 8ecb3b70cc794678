"""Which partitions of synchronous links are new: acks of those wait for the other side from their first record on.

A partition is new for a process that has seen the cluster without it, after every proxy of the cluster had begun to
hold what it leads over the link: so nobody has acked anything of it unheld. Before its first ack goes it is recorded
In-Sync, as one that was held from the first; whoever leads it later goes by that record. What was there when a process
began to look has a record, or none of its acks was held.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from isthmus_control.control_state import ControlState
from isthmus_control.levels import FROM_FIRST
from isthmus_control.model import Link, LinkMode, NamespaceMapping, ResourceType, Role, SyncRecord, SyncState, made_here
from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.tasks import Tasks

UNRECORDED = LinkPartition("", "", -1)
"""Stands for the record that acks of a new partition wait for. Nobody confirms it."""


@dataclass(slots=True)
class _Held:
    """A pair of namespaces whose acks every proxy has begun to hold."""

    since: int
    """Where in the control log that was said."""
    enforced_at: int | None = None
    """Of the looks at the cluster's topics the one before that; None: other proxies are waited for."""
    before: Mapping[str, tuple[bytes, int]] | None = None
    """The topics that were there then: their ids and numbers of partitions."""


class NewPartitions:
    """Knows by the looks at this cluster's topics which partitions came later."""

    def __init__(self, context: PluginContext, agreed: Callable[[str], bool]) -> None:
        """``agreed``: whether the other cluster of a link knows of its mode."""
        self._context = context
        self._agreed = agreed
        self._tasks = Tasks("new-partitions", context.supervision)
        self._held: dict[tuple[str, str], _Held] = {}
        """By link and prefix."""
        self._topics: Mapping[str, TopicInfo] = {}
        self._looks = 0

    async def stop(self) -> None:
        await self._tasks.close()

    def look(self, topics: Mapping[str, TopicInfo], looks: int) -> bool:
        """The cluster has these topics, as of the ``looks``-th look; whether that changes what is new."""
        if looks == self._looks:
            return False
        changed = len(topics) != len(self._topics) or any(
            (known := self._topics.get(name)) is not info and (known is None or known.topic_id != info.topic_id)
            for name, info in topics.items()
        )
        self._topics, self._looks = topics, looks
        state = self._context.control.state
        held = dict(_held(state))
        for key in self._held.keys() - held.keys():
            del self._held[key]
        for key, (link, mapping, since) in held.items():
            pair = self._held.get(key)
            if pair is None or pair.since != since:
                pair = self._held[key] = _Held(since)
                self._tasks.start("enforced", self._enforced(pair))
            # A look may have begun before; that of the next one began later.
            due = pair.enforced_at is not None and looks > pair.enforced_at + 1
            if due and pair.before is None and self._agreed(link.name):
                pair.before = {
                    name: (info.topic_id, len(info.partitions))
                    for name, info in topics.items()
                    if mapping.remote_name(name) is not None
                }
                changed = True
        return changed

    async def _enforced(self, held: _Held) -> None:
        try:
            await self._context.control.enforced(held.since)
            held.enforced_at = self._looks
        except BrokerUnavailable:
            held.since = -1  # asked again with the next look

    def is_ready(self, link_name: str) -> bool:
        """Whether acks of whatever comes into being in any led namespace of a link wait from the first record on."""
        own = [held for (name, _), held in self._held.items() if name == link_name]
        return (
            bool(own)
            and self._context.control.state.level >= FROM_FIRST
            and all(each.before is not None for each in own)
        )

    def is_new(self, link_name: str, place: TopicPartition) -> bool:
        """Whether a partition, that has no record over a link, is held from its first record on."""
        topic, partition = place
        state = self._context.control.state
        if state.level < FROM_FIRST or not self._held:
            return False
        prefixes = (
            each.mapping.local_prefix
            for each in state.lookup.leading(ResourceType.TOPIC, topic)
            if each.link.name == link_name
        )
        return any(self._came_later(held, state, topic, partition) for held in self._held_of(link_name, prefixes))

    def _held_of(self, link_name: str, prefixes: Iterator[str]) -> Iterator[_Held]:
        return (held for prefix in prefixes if (held := self._held.get((link_name, prefix))) is not None)

    def _came_later(self, held: _Held, state: ControlState, topic: str, partition: int) -> bool:
        if held.before is None or topic in state.truncations:
            return False
        before, info = held.before.get(topic), self._topics.get(topic)
        if info is not None and state.predecessors(topic, str(uuid.UUID(bytes=info.topic_id))):
            return False  # made anew by a truncation: it has records of before
        if before is None or (info is not None and info.topic_id != before[0]):
            return True
        return partition >= before[1]

    def record(self, link_name: str, place: TopicPartition) -> SyncRecord | None:
        """What stands for the record of a new partition until there is one; None: it is not new, or not seen yet."""
        info = self._topics.get(place[0])
        if info is None or not self.is_new(link_name, place):
            return None
        topic_id = str(uuid.UUID(bytes=info.topic_id))
        return SyncRecord(topic_id, SyncState.IN_SYNC, 0, 0, None, -1, reached=False, from_first=True)


def _held(state: ControlState) -> Iterator[tuple[tuple[str, str], tuple[Link, NamespaceMapping, int]]]:
    """Pairs of namespaces whose acks are held, and since when that is so."""
    for link in state.links.values():
        if link.mode is not LinkMode.SYNCHRONOUS or not made_here(link) or link.synchronous_at_offset is None:
            continue
        for mapping in link.pairs(Role.LEADER, ResourceType.TOPIC):
            since = max(link.synchronous_at_offset, mapping.attached_at_offset)
            yield (link.name, mapping.local_prefix), (link, mapping, since)
