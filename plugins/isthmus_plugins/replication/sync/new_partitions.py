"""Which partitions of synchronous links are new: acks of those wait for the other side from their first record on.

A partition is new for a process that has seen the cluster without it and its name, after every proxy of the cluster had
begun to hold what it leads over the link, and that fronts its first leader: so nobody has acked anything of it unheld.
Before its first ack goes it is recorded In-Sync, as one that was held from the first; whoever leads it later goes by
that record. What was there when a process began to look has a record, or none of its acks was held.

A topic that takes the name of one that was deleted is another one, and new like any other. Answers to Produce name
topics, though: until a look shows the new one, its acks go as those of the one before, whose record stands. So it is
new where this process let none go in that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from isthmus_control.control_state import ControlState
from isthmus_control.levels import FROM_FIRST
from isthmus_control.model import Link, LinkMode, NamespaceMapping, ResourceType, Role, SyncRecord, SyncState, contains
from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.tasks import Tasks

NAMES_MAX: Final = 10_000
"""So many more names are known than twice those of topics that there are, before what was deleted is forgotten."""
STEPS_OF_A_LOOK: Final = 3
"""A topic that a look shows, and the one before did not, came to be no earlier: that one had begun by then."""
UNRECORDED = LinkPartition("", "", -1)
"""Stands for the record that acks of a new partition wait for, or for all proxies to know it. Nobody confirms it."""

Topics = Mapping[str, TopicInfo]
Counts = Mapping[bytes, int]
"""By topic id: its number of partitions."""


class _Named(NamedTuple):
    """The topic that has a name."""

    topic_id: bytes
    text: str
    """The same, as records have it."""
    made_at: int
    """When it came to be, or earlier, in looks that were taken in."""
    former: frozenset[bytes]
    """Topics that had its name, and never will again: a look that shows one of them is that of a broker that lags."""


@dataclass(slots=True)
class _Held:
    """A pair of namespaces whose acks every proxy has begun to hold."""

    since: int
    """Where in the control log that was said."""
    asked: bool = False
    """Whether other proxies are waited for, or were."""
    enforced_at: int | None = None
    """So many looks there had been when every proxy did; None: not all are known to."""
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
        self._steps = 0
        """How many looks were taken in: some may be left out."""
        self._named: dict[str, _Named] = {}
        """By name, also of topics that were deleted."""
        self._acked: dict[TopicPartition, int] = {}
        """When an ack of a partition may have gone last, in looks that were taken in."""
        self._attaching: list[tuple[str, str]] = []
        """Namespaces that this process attaches, by link and prefix, each as often as somebody waits for it."""
        self._applied = (-1, -1)
        """What of the control log was applied at the look before the last one, and at that."""

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
        self._steps += 1
        changed = len(topics) != len(self._topics)
        for name, info in topics.items():
            if self._topics.get(name) is not info:
                changed = True
                self._note_name(info)
        self._topics, self._looked = topics, looks
        self._applied = self._applied[1], self._context.control.state.applied_offset
        if len(self._named) > 2 * len(topics) + NAMES_MAX:
            self._forget_names()
        for key, (link, mapping, since) in _held(self._context.control.state):
            pair = self._held.get(key)
            if pair is None:
                pair = self._held[key] = _Held(since)
                self._pairs.clear()
            if not pair.asked:
                pair.asked = True
                self._tasks.start(f"enforced-{key}", self._enforced(pair))
            if pair.enforced_at is None or pair.before is not None or not self._knows_mode(link.name):
                continue
            counts = {
                info.topic_id: len(info.partitions)
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
        except BrokerUnavailable:  # the next look asks again
            held.asked = False

    def acked(self, place: TopicPartition) -> None:
        """Acks of a partition may go, of whatever topic has the name now."""
        self._acked[place] = self._steps

    def _note_name(self, info: TopicInfo) -> None:
        known = self._named.get(info.name)
        if known is None or (info.topic_id != known.topic_id and info.topic_id not in known.former):
            former = frozenset() if known is None else known.former | {known.topic_id}
            made_at = self._steps - STEPS_OF_A_LOOK
            self._named[info.name] = _Named(info.topic_id, info.id_text, made_at, former)

    def _forget_names(self) -> None:
        """Forget those that no topic has; what was acked lately may be of another one that has the name by now."""
        lately = self._steps - STEPS_OF_A_LOOK
        self._named = {name: each for name, each in self._named.items() if name in self._topics}
        self._acked = {place: at for place, at in self._acked.items() if place[0] in self._topics or at >= lately}

    # ---- what is new ----

    def is_ready(self, link_name: str, prefix: str) -> bool:
        """Whether acks of whatever comes into being in a led namespace wait for a link from the first record on."""
        pair = self._held.get((link_name, prefix))
        return pair is not None and pair.before is not None

    @contextmanager
    def attaching(self, link_name: str, prefix: str) -> Iterator[None]:
        """This process attaches a namespace, to be led: who asked for that waits until it is ready."""
        self._attaching.append((link_name, prefix))
        try:
            yield
        finally:
            self._attaching.remove((link_name, prefix))

    def is_taken_up(self, link_name: str, prefix: str) -> bool:
        """Whether acks of whatever comes into being in a led namespace wait, or who has it attached here waits until
        they do: it joins a link that is ready for what comes in others.

        Not where it has topics: their acks go alone, whoever waits.
        """
        if self.is_ready(link_name, prefix):
            return True
        if (link_name, prefix) not in self._attaching:
            return False
        if any(contains(ResourceType.TOPIC, prefix, name) for name in self._topics):
            return False
        return any(name == link_name and each.before is not None for (name, _), each in self._held.items())

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
        state = self._context.control.state
        if before is None or topic in state.truncations:
            return False
        info = self._topics.get(topic)
        if info is None:
            return True
        if partition < before.get(info.topic_id, 0):
            return False
        if partition >= len(info.partitions):
            return True  # added since the last look
        named, led = self._named[topic], info.partitions[partition]
        acked_at = self._acked.get(place)
        if info.topic_id in named.former or (acked_at is not None and acked_at >= named.made_at):
            return False
        made_anew = state.predecessors(topic, named.text)
        return not made_anew and led.leader_epoch <= 0 and (led.leader < 0 or self._context.fronts(led.leader))

    def is_young(self, record: SyncRecord) -> bool:
        """Whether a record may be of a topic that no look has shown yet: it was made since the look before the last
        one. Which topic it is of, looks to come say."""
        return record.at_offset > self._applied[0]

    def is_of_another(self, place: TopicPartition, record: SyncRecord) -> bool:
        """Whether a partition's record is of a topic that does not have its name any more."""
        if self.is_young(record):
            return False
        named = self._named.get(place[0])
        return place[0] not in self._topics or named is None or named.text != record.topic_id

    def record(self, link_name: str, place: TopicPartition) -> SyncRecord | None:
        """What stands for the record of a new partition until there is one; None: it is not new, or not seen yet."""
        if place[0] not in self._topics or not self.is_new(link_name, place):
            return None
        topic_id = self._named[place[0]].text
        return SyncRecord(topic_id, SyncState.IN_SYNC, 0, 0, None, -1, reached=False, from_first=True)


def _held(state: ControlState) -> Iterator[tuple[tuple[str, str], tuple[Link, NamespaceMapping, int]]]:
    """Pairs of namespaces whose acks are held, and since when that is so; none before the log can say it."""
    if state.level < FROM_FIRST:
        return
    for link in state.links.values():
        if link.mode is not LinkMode.SYNCHRONOUS or link.synchronous_at_offset is None:
            continue
        for mapping in link.pairs(Role.LEADER, ResourceType.TOPIC):
            since = max(link.synchronous_at_offset, mapping.attached_at_offset)
            yield (link.name, mapping.local_prefix), (link, mapping, since)
