"""Which partitions of synchronous links are new: acks of those wait for the other side from their first record on.

A partition is new for a process that has seen the cluster without it and its name, after every proxy of the cluster had
begun to hold what it leads over the link, and that fronts its first leader: so nobody has acked anything of it unheld.
Before its first ack goes it is recorded In-Sync, as one that was held from the first; whoever leads it later goes by
that record. What was there when a process began to look has a record, or none of its acks was held.
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
"""Stands for the record that acks of a new partition wait for, or for all proxies to know it. Nobody confirms it."""

Topics = Mapping[str, TopicInfo]
Counts = Mapping[str, tuple[bytes, int]]
"""By topic: its id and number of partitions."""


@dataclass(slots=True)
class _Held:
    """A pair of namespaces whose acks every proxy has begun to hold."""

    since: int
    """Where in the control log that was said."""
    enforced_at: int | None = None
    """So many looks there had been when every proxy did; None: other proxies are waited for."""
    seen: Counts | None = None
    """What a look showed that began after that. From then on acks wait of whatever is not in it."""
    seen_at: int = 0
    before: Counts | None = None
    """That, and what a look showed that began later still: what came to be meanwhile may have been acked alone."""


class NewPartitions:
    """Knows by the looks at this cluster's topics which partitions came later."""

    def __init__(self, context: PluginContext, agreed: Callable[[str], bool], looks: Callable[[], int]) -> None:
        """``agreed``: whether the other cluster of a link knows of its mode. ``looks``: how many looks have ended."""
        self._context = context
        self._agreed = agreed
        self._looks = looks
        self._tasks = Tasks("new-partitions", context.supervision)
        self._held: dict[tuple[str, str], _Held] = {}
        """By link and prefix."""
        self._pairs: dict[tuple[str, str], tuple[_Held, ...]] = {}
        """Those that hold a topic, by link and topic."""
        self._topics: Topics = {}
        self._looked = 0

    async def stop(self) -> None:
        await self._tasks.close()

    # ---- what is held ----

    def control_changed(self, state: ControlState) -> None:
        """Forget what is held no more, or anew; the next look begins with the others."""
        held = {key: since for key, (_, _, since) in _held(state)}
        self._held = {key: pair for key, pair in self._held.items() if held.get(key) == pair.since}
        self._pairs.clear()

    def forget(self) -> None:
        """Another process may have acked what this one fronted: begin anew."""
        self._held.clear()
        self._pairs.clear()

    def look(self, topics: Topics, looks: int) -> bool:
        """The cluster has these topics, as of the ``looks``-th look; whether that changes what is new."""
        if looks == self._looked:
            return False
        changed = len(topics) != len(self._topics) or any(
            self._topics.get(name) is not info for name, info in topics.items()
        )
        self._topics, self._looked = topics, looks
        for key, (link, mapping, since) in _held(self._context.control.state):
            pair = self._held.get(key)
            if pair is None:
                pair = self._held[key] = _Held(since)
                self._pairs.clear()
                self._tasks.start(f"enforced-{key}", self._enforced(pair))
            if pair.enforced_at is None or pair.before is not None or not self._knows_mode(link.name):
                continue
            counts = {
                name: (info.topic_id, len(info.partitions))
                for name, info in topics.items()
                if mapping.remote_name(name) is not None
            }
            # The look that was under way may have begun before; the one after that began later.
            if pair.seen is None and looks > pair.enforced_at + 1:
                pair.seen, pair.seen_at, changed = counts, looks, True
            elif pair.seen is not None and looks > pair.seen_at + 1:
                pair.before, changed = {**counts, **pair.seen}, True
        return changed

    def _knows_mode(self, link_name: str) -> bool:
        """Whether the other cluster of a link knows of its mode: then nothing is new before. Also where this process
        was started while the link is down: what has been In-Sync since the mode was set says it."""
        records = self._context.control.state.sync_records.get(link_name, {})
        return self._agreed(link_name) or any(record.reached for record in records.values())

    async def _enforced(self, held: _Held) -> None:
        try:
            await self._context.control.enforced(self._context.control.state.applied_offset)
            held.enforced_at = self._looks()
        except BrokerUnavailable:  # the next look begins anew
            self._held = {key: pair for key, pair in self._held.items() if pair is not held}
            self._pairs.clear()

    # ---- what is new ----

    def is_ready(self, link_name: str) -> bool:
        """Whether acks of whatever comes into being in any led namespace of a link wait from the first record on."""
        own = [key for key, (link, _, _) in _held(self._context.control.state) if link.name == link_name]
        pairs = [self._held.get(key) for key in own]
        return bool(pairs) and all(pair is not None and pair.before is not None for pair in pairs)

    def waits(self, link_name: str, place: TopicPartition) -> bool:
        """Whether acks of a partition that has no record over a link wait for one: it is new, or may be."""
        return any(self._is_new(held, held.before or held.seen, place) for held in self._of(link_name, place[0]))

    def is_new(self, link_name: str, place: TopicPartition) -> bool:
        """Whether a partition that has no record over a link is held from its first record on."""
        return any(self._is_new(held, held.before, place) for held in self._of(link_name, place[0]))

    def _of(self, link_name: str, topic: str) -> tuple[_Held, ...]:
        if not self._held:
            return ()
        found = self._pairs.get((link_name, topic))
        if found is None:
            leading = self._context.control.state.lookup.leading(ResourceType.TOPIC, topic)
            prefixes = [each.mapping.local_prefix for each in leading if each.link.name == link_name]
            held = (self._held.get((link_name, prefix)) for prefix in prefixes)
            found = self._pairs[link_name, topic] = tuple(each for each in held if each is not None)
        return found

    def _is_new(self, held: _Held, before: Counts | None, place: TopicPartition) -> bool:
        topic, partition = place
        if before is None:
            return False
        known, info = before.get(topic), self._topics.get(topic)
        if known is not None and (partition < known[1] or info is None or info.topic_id != known[0]):
            return False  # it was there, or is another one of a name that was
        if info is None:
            return True
        if partition >= len(info.partitions):
            return True  # added since the last look
        led = info.partitions[partition]
        state = self._context.control.state
        made_anew = topic in state.truncations or state.predecessors(topic, str(uuid.UUID(bytes=info.topic_id)))
        return not made_anew and led.leader_epoch <= 0 and (led.leader < 0 or self._context.fronts(led.leader))

    def record(self, link_name: str, place: TopicPartition) -> SyncRecord | None:
        """What stands for the record of a new partition until there is one; None: it is not new, or not seen yet."""
        info = self._topics.get(place[0])
        if info is None or not self.is_new(link_name, place):
            return None
        topic_id = str(uuid.UUID(bytes=info.topic_id))
        return SyncRecord(topic_id, SyncState.IN_SYNC, 0, 0, None, -1, reached=False, from_first=True)


def _held(state: ControlState) -> Iterator[tuple[tuple[str, str], tuple[Link, NamespaceMapping, int]]]:
    """Pairs of namespaces whose acks are held, and since when that is so; none before the log can say it."""
    if state.level < FROM_FIRST:
        return
    for link in state.links.values():
        if link.mode is not LinkMode.SYNCHRONOUS or not made_here(link) or link.synchronous_at_offset is None:
            continue
        for mapping in link.pairs(Role.LEADER, ResourceType.TOPIC):
            since = max(link.synchronous_at_offset, mapping.attached_at_offset)
            yield (link.name, mapping.local_prefix), (link, mapping, since)
