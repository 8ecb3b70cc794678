"""What an ack needs of synchronous links: each of them, or some of a set (``docs/adr/0008``).

Without I/O. An ack waits for *quorums*: so many of these links have all up to it. A lease says at the target what acks
mean, so it is a *promise*: whatever becomes of settings and partitions meanwhile, what was promised is a quorum, too,
until the lease has run out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from isthmus_control.control_state import ControlState
from isthmus_control.demands import NEVER, Confirm, Demands
from isthmus_control.model import ResourceType, SyncRecord, SyncState
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

Known = Mapping[LinkPartition, tuple[int, int]]
"""(Leader epoch, offset): what each link's follower has."""
NOT_KNOWN = (-1, -1)
Records = Mapping[str, SyncRecord]
"""By link: what is recorded of a partition."""


class GroupScope(NamedTuple):
    """Groups whose commits wait alike. A partition of the offsets topic has those of many."""

    prefix: str
    """Of the most specific namespace that holds them, as far as namespaces of groups ask for anything."""
    links: tuple[str, ...]
    """Those that lead them, of the links that commits may wait for."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """``count`` of these must have it."""

    count: int
    keys: tuple[LinkPartition, ...]

    @property
    def chooses(self) -> bool:
        """Whether one of them is as good as another."""
        return self.count < len(self.keys)

    def end(self, known: Known, epoch: int) -> int:
        """Up to which offset so many of them have all, of a leader epoch; -1: not known."""
        if len(self.keys) == 1:  # nearly always, and asked for with every request
            at, end = known.get(self.keys[0], NOT_KNOWN)
            return end if at == epoch else -1
        ends = [end if at == epoch else -1 for at, end in (known.get(key, NOT_KNOWN) for key in self.keys)]
        return sorted(ends)[-self.count]

    def holds(self, has: Callable[[LinkPartition], bool]) -> bool:
        return sum(map(has, self.keys)) >= self.count


def is_degraded(demands: Demands, record: SyncRecord) -> bool:
    """Whether no ack waits for a partition that is Out-Of-Sync, as its namespaces have it now."""
    degraded = record.degraded
    return (
        degraded is not None
        and record.state is SyncState.OUT_OF_SYNC
        and NEVER < demands.degrade_after_ms <= degraded.after_ms
    )


class Quorums:
    """What is asked, and by partition what was promised and what may have been acked.

    A topic is asked for something by its namespaces. A partition of the offsets topic is not, but groups are: there an
    ack is one to groups of a *scope*.
    """

    def __init__(self, state: Callable[[], ControlState]) -> None:
        self._state = state
        self._demands: dict[tuple[ResourceType, str], Demands] = {}
        self._led_groups: dict[str, tuple[str, ...]] = {}
        self._promises: dict[TopicPartition, dict[tuple[str, Quorum], float]] = {}
        """Until when; of the offsets topic with the prefix of the groups that it was promised of."""
        self._acked: dict[TopicPartition, dict[str, tuple[bytes | None, int, int]]] = {}
        """(Topic id, leader epoch, offset) up to which acks may have gone, where links are chosen from; by prefix of
        groups."""

    def changed(self) -> None:
        """Namespaces may ask for something else."""
        self._demands.clear()
        self._led_groups.clear()

    def demands(self, topic: str, scope: GroupScope | None = None) -> Demands:
        """Of a topic, or of groups."""
        key = (ResourceType.TOPIC, topic) if scope is None else (ResourceType.CONSUMER_GROUP, scope.prefix)
        found = self._demands.get(key)
        if found is None:
            found = self._demands[key] = self._state().lookup.demands(*key)
        return found

    def confirm(self, topic: str, scope: GroupScope | None = None) -> Confirm:
        return self.demands(topic, scope).confirm

    def asked(self, key: LinkPartition) -> Mapping[str, Demands]:
        """What is asked of one link in a partition: by the prefix of its groups, or for the topic ("")."""
        if key.topic != OFFSETS_TOPIC:
            return {"": self.demands(key.topic)}
        led = self._led_groups.get(key.link)
        if led is None:
            led = self._led_groups[key.link] = self._state().lookup.led_groups(key.link)
        return {prefix: self.demands(OFFSETS_TOPIC, GroupScope(prefix, ())) for prefix in led}

    def is_chosen(self, key: LinkPartition) -> bool:
        """Whether acks in a partition may go without this link although it is In-Sync."""
        return any(key.link in demands.confirm.links for demands in self.asked(key).values())

    def goes_without(self, key: LinkPartition, records: Records, scope: GroupScope | None = None) -> bool:
        """Whether transactions (with committed offsets of such groups) go on without a partition that is
        Out-Of-Sync."""
        record, demands = records[key.link], self.demands(key.topic, scope)
        if record.state is SyncState.IN_SYNC or is_degraded(demands, record):
            return record.state is not SyncState.IN_SYNC
        confirm = demands.confirm
        others = [link for link in confirm.links if link in records and records[link].state is SyncState.IN_SYNC]
        return key.link in confirm.links and len(others) >= confirm.count

    def of_acks(
        self,
        place: TopicPartition,
        records: Records,
        transactional: bool,
        able: Callable[[LinkPartition], bool],
        now: float,
        scope: GroupScope | None = None,
    ) -> Iterator[Quorum]:
        """What an ack needs of links that have a record of a partition.

        ``able``: one that is In-Sync and will stay so. Of a set, others are not counted on while there are enough.
        """
        demands = self.demands(place[0], scope)
        confirm = demands.confirm
        in_sync, others, chosen = self._members(place, records, transactional or demands.strict, demands)
        for key in others:
            yield Quorum(1, (key,))
        if in_sync:
            count = min(confirm.count, len(in_sync))
            stay = tuple(filter(able, in_sync))
            yield Quorum(count, stay if len(stay) >= count else in_sync)
        if len(chosen) > len(in_sync):
            yield Quorum(min(confirm.count, len(chosen)), chosen)
        if confirm:
            yield from self._promised(place, "" if scope is None else scope.prefix, now)

    def of_decisions(
        self, place: TopicPartition, records: Records, scope: GroupScope | None = None
    ) -> Iterator[Quorum]:
        """The same of decisions to commit: of a set all that are In-Sync must have them, and so many in any case.

        Which of them has the records of a transaction says nothing of which has its decision.
        """
        demands = self.demands(place[0], scope)
        in_sync, others, chosen = self._members(place, records, True, demands)
        for key in (*others, *in_sync):
            yield Quorum(1, (key,))
        if len(chosen) > len(in_sync):
            yield Quorum(min(demands.confirm.count, len(chosen)), chosen)

    @staticmethod
    def _members(
        place: TopicPartition, records: Records, waits: bool, demands: Demands
    ) -> tuple[tuple[LinkPartition, ...], tuple[LinkPartition, ...], tuple[LinkPartition, ...]]:
        """Of the set those that are In-Sync; all others that an ack waits for; of the set all that it may wait for."""
        listed = demands.confirm.links
        in_sync: list[LinkPartition] = []
        others: list[LinkPartition] = []
        chosen: list[LinkPartition] = []
        for link, record in records.items():
            holds = record.state is SyncState.IN_SYNC
            if not holds and (not waits or is_degraded(demands, record)):
                continue
            key = LinkPartition(link, *place)
            (chosen if link in listed else others).append(key)
            if holds and link in listed:
                in_sync.append(key)
        return tuple(in_sync), tuple(others), tuple(chosen)

    # ---- promises ----

    def promise(self, place: TopicPartition, promised: Mapping[str, Quorum], until: float, now: float) -> None:
        """A lease says that acks mean this: by the prefix of groups, or to all ("")."""
        kept = {each: end for each, end in self._promises.get(place, {}).items() if end > now}
        for each in promised.items():
            kept[each] = max(until, kept.get(each, until))
        self._promises[place] = kept

    def _promised(self, place: TopicPartition, prefix: str, now: float) -> Iterator[Quorum]:
        """Namespaces may have come and gone since: what was promised of some of these groups is kept to all of them."""
        for (promised, quorum), until in self._promises.get(place, {}).items():
            if now < until and _overlap(promised, prefix):
                yield quorum

    # ---- what may have been acked ----

    def may_be_acked(
        self, place: TopicPartition, topic_id: bytes | None, epoch: int, end: int, scope: GroupScope | None = None
    ) -> None:
        """Acks go out up to here. Which of the links have it may not be known later, if that depends on the set."""
        if not self.confirm(place[0], scope):
            return
        known, prefix = self._acked.setdefault(place, {}), "" if scope is None else scope.prefix
        known_id, known_epoch, known_end = known.get(prefix, (topic_id, *NOT_KNOWN))
        if None not in (topic_id, known_id) and topic_id != known_id:  # it was made anew
            known_epoch, known_end = NOT_KNOWN
        known[prefix] = topic_id or known_id, max(epoch, known_epoch), max(end, known_end)

    def acked(self, place: TopicPartition, topic_id: bytes, prefix: str = "") -> tuple[int, int]:
        """(Leader epoch, offset), of groups to any that a prefix holds, or that are held with them. What an earlier
        process acked was there when a partition got level."""
        found = NOT_KNOWN
        for each, (known_id, epoch, end) in self._acked.get(place, {}).items():
            if known_id in (None, topic_id) and _overlap(each, prefix):
                found = max(epoch, found[0]), max(end, found[1])
        return found


def _overlap(left: str, right: str) -> bool:
    return left.startswith(right) or right.startswith(left)
