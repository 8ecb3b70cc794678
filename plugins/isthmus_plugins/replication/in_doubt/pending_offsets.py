"""Offsets that open transactions of the source have committed, kept in the store for a failover.

They are stored before the source's TxnOffsetCommit is answered. When the transaction has ended, and this cluster's
coordinators have what it committed, they are void: all that stands below *settled* in the source's offsets log is.

    key     ["o", link id, the source's producer id, group, partition of the offsets topic, where it stands there,
            sending proxy, storing proxy]
    value   {"epoch": of the producer, "positions": [[topic, partition, offset or null, metadata, where it stands]]}
    key     ["f", link id, -1, partition of the offsets topic, sending proxy, storing proxy]
    value   {"settled": ...}
    key     ["v", link id, -1, partition of the offsets topic, sending proxy, storing proxy]
    value   {"upto": ..., "open": [[producer id, where what it has open begins]]}: what stands before "upto" and is not
            of these is void. Written where a transaction was aborted (the next one may have the same epoch), and where
            a committed offset went back: no older commit may be put over it.

Each entry has a key of its own, so a producer's next transaction replaces nothing of the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from isthmus_control.model import ResourceType, contains
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.in_doubt.store import Entry, Stored, TransactionStore
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

OFFSETS: Final = "o"
STABLE: Final = "f"
STILL_OPEN: Final = "v"


class PendingName(NamedTuple):
    """Of which producer's transaction a committed offset is."""

    producer_id: int
    place: TopicPartition


class PendingOffset(NamedTuple):
    """A commit of an open transaction, by the names that group and topic have here."""

    producer_id: int
    """As the source has it."""
    producer_epoch: int
    group: str
    place: TopicPartition
    offset: int | None
    """None: it was deleted."""
    metadata: str
    at: int
    """Where it stands in the source's offsets log."""

    @classmethod
    def of(cls, said: calls.Pending) -> PendingOffset:
        """As a call of the leader end has it."""
        producer_id, epoch, group, topic, partition, offset, metadata, at = said
        return cls(producer_id, epoch, group, (topic, partition), offset, metadata, at)

    @property
    def name(self) -> PendingName:
        return PendingName(self.producer_id, self.place)


class PendingOffsets:
    """What this proxy has stored of open transactions."""

    def __init__(self, context: PluginContext, store: TransactionStore) -> None:
        self._context = context
        self._store = store
        self._stored: dict[tuple[str, int], dict[tuple[Any, ...], int]] = {}
        """By link id and partition of the source's offsets topic: keys, and where the last of each stands."""

    async def store(self, connection: LinkConnection, partition: int, pending: Sequence[PendingOffset]) -> None:
        """Return when they are durable here. What is stored earlier is appended earlier."""
        link = self._context.control.state.links.get(connection.link_name)
        if link is None:
            return
        sender = str(connection.peer.get("proxy"))
        stored = self._stored.setdefault((link.link_id, partition), {})
        groups: dict[tuple[int, int, str], list[PendingOffset]] = {}
        for each in pending:
            groups.setdefault((each.producer_id, each.producer_epoch, each.group), []).append(each)
        entries = []
        for (producer_id, epoch, group), some in groups.items():
            offsets = [[*each.place, each.offset, each.metadata, each.at] for each in some]
            at = max(each.at for each in some)
            key = (OFFSETS, link.link_id, producer_id, group, partition, at, sender, self._context.proxy_name)
            stored[key] = at
            entries.append(Entry(key, {"epoch": epoch, "positions": offsets}))
        await self._store.put(entries)

    def void_before(self, connection: LinkConnection, partition: int, offset: int) -> list[Entry]:
        """What is to be put, now that all before ``offset`` of the source's offsets log has ended and is here."""
        link = self._context.control.state.links.get(connection.link_name)
        stored = None if link is None else self._stored.get((link.link_id, partition))
        over = [key for key, at in stored.items() if at < offset] if stored else []
        if link is None or stored is None or not over:
            return []
        for key in over:
            del stored[key]
        sender = str(connection.peer.get("proxy"))
        stable = (STABLE, link.link_id, -1, partition, sender, self._context.proxy_name)
        return [Entry(stable, {"settled": offset}), *(Entry(key, None) for key in over)]

    async def still_open(self, connection: LinkConnection, partition: int, upto: int, open_since: StillOpen) -> None:
        """Store which transactions were open when the source's offsets log was applied up to an offset."""
        link = self._context.control.state.links.get(connection.link_name)
        if link is None:
            return
        stored = self._stored.get((link.link_id, partition), {})
        key = (STILL_OPEN, link.link_id, -1, partition, str(connection.peer.get("proxy")), self._context.proxy_name)
        value = {"upto": upto, "open": [[*each] for each in open_since.items()]}
        void = [each for each, at in stored.items() if _is_void(value, int(each[2]), at)]
        await self._store.put([Entry(key, value), *(Entry(each, None) for each in void)])
        for each in void:
            stored.pop(each, None)

    async def forget(self, entries: Sequence[Entry]) -> None:
        """Put what says that committed offsets are void."""
        await self._store.put(entries)


def _is_void(value: Mapping[str, Any], producer_id: int, at: int) -> bool:
    """Whether an entry of what was still open says that what a producer committed at an offset counts no more."""
    since = {int(each): int(begin) for each, begin in value["open"]}.get(producer_id, int(value["upto"]))
    return at < since


def committed_offsets(stored: Stored) -> dict[str, dict[TopicPartition, CommittedOffset]]:
    """What transactions have committed that were decided and not carried out, by group as it is called here."""
    stable: dict[int, int] = {}
    still_open: dict[int, list[Mapping[str, Any]]] = {}
    deleted: dict[tuple[int, str, PendingName], int] = {}
    pending: list[tuple[int, PendingOffset]] = []
    for key, value in stored.others.items():
        if key[0] == STABLE:
            stable[int(key[3])] = max(int(value["settled"]), stable.get(int(key[3]), 0))
        elif key[0] == STILL_OPEN:
            still_open.setdefault(int(key[3]), []).append(value)
        elif key[0] == OFFSETS:
            for topic, index, offset, metadata, at in value["positions"]:
                said = calls.Pending(key[2], value["epoch"], key[3], topic, index, offset, metadata, at)
                pending.append((int(key[4]), PendingOffset.of(said)))
    for partition, each in pending:
        if each.offset is None:
            where = partition, each.group, each.name
            deleted[where] = max(each.at, deleted.get(where, 0))
    found: dict[str, dict[TopicPartition, PendingOffset]] = {}
    for partition, each in pending:
        over = max(stable.get(partition, 0), deleted.get((partition, each.group, each.name), 0))
        if any(_is_void(value, each.producer_id, each.at) for value in still_open.get(partition, ())):
            continue
        decided = stored.commits(each.producer_id, each.producer_epoch, (OFFSETS_TOPIC, partition), each.at)
        newest = found.setdefault(each.group, {}).get(each.place)
        # Of two commits the one that stands later wins.
        if decided is not None and each.at >= over and (newest is None or newest.at < each.at):
            found[each.group][each.place] = each
    return {
        group: {
            place: CommittedOffset(each.offset, each.metadata)
            for place, each in offsets.items()
            if each.offset is not None
        }
        for group, offsets in found.items()
        if offsets
    }


def of_groups(stored: Stored, prefix: str) -> Stored:
    """The same without the groups of other namespaces, which may still follow."""
    kind = ResourceType.CONSUMER_GROUP
    others = {
        key: value for key, value in stored.others.items() if key[0] != OFFSETS or contains(kind, prefix, str(key[3]))
    }
    return Stored(stored.decisions, others)


async def apply_committed(
    context: PluginContext, stored: Stored
) -> Mapping[str, Mapping[TopicPartition, CommittedOffset]]:
    """Commit what decided transactions have committed; what was committed. May be done again.

    No committed offset is moved back, or beyond the data. To be called when nothing follows any more. Raises
    BrokerUnavailable, KafkaRefused.
    """
    wanted = committed_offsets(stored)
    cluster = context.cluster
    has = await cluster.committed_offsets(sorted(wanted)) if wanted else {}
    ends = await cluster.log_ends({place for offsets in wanted.values() for place in offsets}) if wanted else {}
    done: dict[str, Mapping[TopicPartition, CommittedOffset]] = {}
    for group, offsets in sorted(wanted.items()):
        known = has.get(group)
        if known is None:
            raise BrokerUnavailable(f"the coordinator of {group} does not answer now")
        missing = {
            place: CommittedOffset(min(committed.offset, ends[place]), committed.metadata)
            for place, committed in offsets.items()
            if place in ends and (place not in known or known[place].offset < min(committed.offset, ends[place]))
        }
        if missing:
            refused = await cluster.commit_offsets(group, missing)
            if refused:
                place, why = next(iter(refused.items()))
                raise BrokerUnavailable(f"{group}: {place[0]}-{place[1]} is answered {why.error_name}")
            done[group] = missing
    return done


StillOpen = Mapping[int, int]
"""By producer of the source with commits of an open transaction: where they begin."""
