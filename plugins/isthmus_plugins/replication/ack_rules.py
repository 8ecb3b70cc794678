"""What an ack needs of synchronous links: each of them, or some of a set (``docs/adr/0008``).

Without I/O. An ack waits for *clauses*: so many of these links have all up to it. A lease says at the target what acks
mean, so it is a *promise*: whatever becomes of settings and partitions meanwhile, what was promised is a clause, too,
until the lease has run out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from isthmus_control.control_state import ControlState
from isthmus_control.demands import NEVER, Confirm, Demands
from isthmus_control.model import SyncRecord, SyncState
from isthmus_plugins.held_answers import Partition
from isthmus_plugins.replication.leader_stream import LedPartition

Known = Mapping[LedPartition, tuple[int, int]]
"""(Leader epoch, offset): what each link's follower has."""
NOT_KNOWN = (-1, -1)
Records = Mapping[str, SyncRecord]
"""By link: what is recorded of a partition."""


@dataclass(frozen=True, slots=True)
class Clause:
    """``count`` of these must have it."""

    count: int
    keys: tuple[LedPartition, ...]

    @property
    def chooses(self) -> bool:
        """Whether one of them is as good as another."""
        return self.count < len(self.keys)

    def end(self, known: Known, epoch: int) -> int:
        """Up to which offset so many of them have all, of a leader epoch; -1: not known."""
        ends = [end if at == epoch else -1 for at, end in (known.get(key, NOT_KNOWN) for key in self.keys)]
        return ends[0] if len(ends) == 1 else sorted(ends)[-self.count]

    def holds(self, has: Callable[[LedPartition], bool]) -> bool:
        return sum(map(has, self.keys)) >= self.count


def is_degraded(demands: Demands, record: SyncRecord) -> bool:
    """Whether no ack waits for a partition that is Out-Of-Sync, as its namespaces have it now."""
    degraded = record.degraded
    return (
        degraded is not None
        and record.state is SyncState.OUT_OF_SYNC
        and NEVER < demands.degrade_after_ms <= degraded.after_ms
    )


class AckRules:
    """By topic what is asked, by partition what was promised and what may have been acked."""

    def __init__(self, state: Callable[[], ControlState]) -> None:
        self._state = state
        self._demands: dict[str, Demands] = {}
        self._promises: dict[Partition, dict[Clause, float]] = {}
        """Until when."""
        self._acked: dict[Partition, tuple[bytes | None, int, int]] = {}
        """(Topic id, leader epoch, offset) up to which acks may have gone, where links are chosen from."""

    def changed(self) -> None:
        """Namespaces may ask for something else."""
        self._demands.clear()

    def demands(self, topic: str) -> Demands:
        found = self._demands.get(topic)
        if found is None:
            found = self._demands[topic] = self._state().lookup.demands(topic)
        return found

    def confirm(self, topic: str) -> Confirm:
        return self.demands(topic).confirm

    def is_degraded(self, topic: str, record: SyncRecord) -> bool:
        """See :func:`is_degraded`."""
        return record.degraded is not None and is_degraded(self.demands(topic), record)

    def goes_without(self, key: LedPartition, records: Records) -> bool:
        """Whether transactions go on without a partition that is Out-Of-Sync."""
        record = records[key.link]
        if record.state is SyncState.IN_SYNC or self.is_degraded(key.topic, record):
            return record.state is not SyncState.IN_SYNC
        confirm = self.confirm(key.topic)
        others = [link for link in confirm.links if link in records and records[link].state is SyncState.IN_SYNC]
        return key.link in confirm.links and len(others) >= confirm.count

    def clauses(
        self, place: Partition, records: Records, transactional: bool, able: Callable[[LedPartition], bool], now: float
    ) -> Iterator[Clause]:
        """What an ack needs of links that have a record of a partition.

        ``able``: one that is In-Sync and will stay so. Of a set, others are not counted on while there are enough.
        """
        waits, confirm = transactional or self.demands(place[0]).strict, self.confirm(place[0])
        in_sync, others, chosen = self._members(place, records, waits)
        for key in others:
            yield Clause(1, (key,))
        if in_sync:
            count = min(confirm.count, len(in_sync))
            stay = tuple(filter(able, in_sync))
            yield Clause(count, stay if len(stay) >= count else in_sync)
        if len(chosen) > len(in_sync):
            yield Clause(min(confirm.count, len(chosen)), chosen)
        if confirm:
            yield from self._promised(place, now)

    def commit_clauses(self, place: Partition, records: Records) -> Iterator[Clause]:
        """The same of decisions to commit: of a set all that are In-Sync must have them, and so many in any case.

        Which of them has the records of a transaction says nothing of which has its decision.
        """
        in_sync, others, chosen = self._members(place, records, True)
        for key in (*others, *in_sync):
            yield Clause(1, (key,))
        if len(chosen) > len(in_sync):
            yield Clause(min(self.confirm(place[0]).count, len(chosen)), chosen)

    def _members(
        self, place: Partition, records: Records, waits: bool
    ) -> tuple[tuple[LedPartition, ...], tuple[LedPartition, ...], tuple[LedPartition, ...]]:
        """Of the set those that are In-Sync; all others that an ack waits for; of the set all that it may wait for."""
        listed = self.confirm(place[0]).links
        in_sync: list[LedPartition] = []
        others: list[LedPartition] = []
        chosen: list[LedPartition] = []
        for link, record in records.items():
            holds = record.state is SyncState.IN_SYNC
            if not holds and (not waits or self.is_degraded(place[0], record)):
                continue
            key = LedPartition(link, *place)
            (chosen if link in listed else others).append(key)
            if holds and link in listed:
                in_sync.append(key)
        return tuple(in_sync), tuple(others), tuple(chosen)

    # ---- promises ----

    def promise(self, place: Partition, clause: Clause, until: float, now: float) -> None:
        """A lease says that acks mean this."""
        kept = {each: end for each, end in self._promises.get(place, {}).items() if end > now}
        kept[clause] = max(until, kept.get(clause, until))
        self._promises[place] = kept

    def _promised(self, place: Partition, now: float) -> Iterator[Clause]:
        for clause, until in self._promises.get(place, {}).items():
            if now < until:
                yield clause

    # ---- what may have been acked ----

    def may_be_acked(self, place: Partition, topic_id: bytes | None, epoch: int, end: int) -> None:
        """Acks go out up to here. Which of the links have it may not be known later, if that depends on the set."""
        if not self.confirm(place[0]):
            return
        known_id, known_epoch, known_end = self._acked.get(place, (topic_id, *NOT_KNOWN))
        if None not in (topic_id, known_id) and topic_id != known_id:  # it was made anew
            known_epoch, known_end = NOT_KNOWN
        self._acked[place] = topic_id or known_id, max(epoch, known_epoch), max(end, known_end)

    def acked(self, place: Partition, topic_id: bytes) -> tuple[int, int]:
        """(Leader epoch, offset). What an earlier process acked was there when a partition got level."""
        known_id, epoch, end = self._acked.get(place, (topic_id, *NOT_KNOWN))
        return (epoch, end) if known_id in (None, topic_id) else NOT_KNOWN
