"""Whether the other side has the abort markers that stand before a decision (see ``abort_order``).

Of what this proxy pushes it knows; of other partitions it asks the other side. Of those of the offsets topic that
another proxy pushes it knows nothing, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from isthmus_control.model import SyncRecord, SyncState
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.logs.log_end_reader import LogEndReader
from isthmus_plugins.replication.partitions import GroupPlaces, LinkPartition, SyncPlace
from isthmus_plugins.replication.sync.links import SynchronousLinks
from isthmus_plugins.replication.sync.pushed import PushedPartitions
from isthmus_plugins.replication.sync.requirements import Requirements
from isthmus_plugins.replication.transactions.abort_order import AbortOrder, End
from isthmus_plugins.replication.transactions.decision import Decision, remote_topic
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.transaction_log import Change

log = logging.getLogger("isthmus_plugins.replication")

RETRY_S: Final = 0.05
"""How often the other side is asked at most."""
GONE: Final = 1 << 63
"""Above all offsets."""


class Connections(Protocol):
    """Of the link's peers what is used here."""

    def connections(self, link_name: str) -> list[LinkConnection]: ...


class AbortCoverage:
    """How far the other sides have what was aborted."""

    def __init__(
        self,
        context: PluginContext,
        leader_end: LeaderEnd,
        groups: GroupPlaces,
        peers: Connections,
        links: SynchronousLinks,
        requirements: Requirements,
        on_more: Callable[[], None],
        ends: LogEndReader,
    ) -> None:
        """``on_more``: called when something is known that :meth:`missing` was asked for."""
        self._context = context
        self._leader_end = leader_end
        self._groups = groups
        self._pushed = PushedPartitions(leader_end, groups)
        self._peers = peers
        self._links = links
        self._requirements = requirements
        self._on_more = on_more
        self._order = AbortOrder()
        self._ends = ends
        self._tasks = Tasks("abort-ends", context.supervision)
        self._unknown = rare_lines(log, "ends of the follower not known")
        self._there: dict[LinkPartition, tuple[SyncRecord | None, int]] = {}
        """Of partitions that others push: what the other side said to have, and what was recorded then."""
        self._asked: dict[str, dict[LinkPartition, int]] = {}
        """By link: what it is asked for, and up to where it must be there."""

    async def stop(self) -> None:
        await self._tasks.close()

    def begin_anew(self) -> None:
        """See :meth:`~isthmus_plugins.replication.transactions.abort_order.AbortOrder.begin_anew`."""
        self._order.begin_anew()

    def take(self, change: Change) -> None:
        """Take a change of the transaction log."""
        self._order.take(change, lambda place: self._links.concerns(place[0]))
        self._read()

    @property
    def readings(self) -> int:
        """How often ends were read."""
        return self._order.readings

    def ended(self, decision: Decision, readings: int) -> None:
        """The ends of a decision are known. ``readings``: as it was before they were read."""
        self._order.ended(decision.producer_id, decision.ends, readings)

    def missing(
        self, decision: Decision, link_name: str, held: Callable[[SyncPlace], bool]
    ) -> frozenset[TopicPartition]:
        """Where the other side has not what must be there before a decision; then ``on_more`` is called later.

        ``held``: whether a partition's stream waits at the decision's own marker.
        """
        missing: set[TopicPartition] = set()
        if not decision.shares_epoch:
            return frozenset()
        for place in decision.places:
            key = LinkPartition(link_name, *place)
            if key not in self._requirements.sent_to(place) or (upto := self._upto(decision, key)) is None:
                continue
            if decision.again and self.is_out(key):
                is_there = self._has(key, upto)  # nothing else: the other side may lack several transactions
            else:
                is_there = link_name in decision.overdue or self._is_there(key, upto, place in decision.unread, held)
            if not is_there:
                missing.add(place)
        self._read()
        return frozenset(missing)

    def left_out(self, decision: Decision, link_name: str) -> frozenset[TopicPartition]:
        """Where no commit waits for the other side, and it is not known to have what must be there before a decision.

        Partitions of the offsets topic are none of these."""
        found: set[TopicPartition] = set()
        for place in decision.places if decision.shares_epoch else ():
            key = LinkPartition(link_name, *place)
            if place[0] == OFFSETS_TOPIC or not self.is_out(key) or key in self._requirements.sent_to(place):
                continue
            if (upto := self._upto(decision, key)) is not None and not self._has(key, upto):
                found.add(place)
        self._read()
        return frozenset(found)

    def _upto(self, decision: Decision, key: LinkPartition) -> int | None:
        """Up to where the other side must have a partition before a decision; None: nothing is sent of it."""
        end = decision.end_of(key)
        if end is None:
            return None
        aborted = self._order.before(decision.producer_id, key.place)
        # What came after the decision is not waited for, whenever its end was read.
        return end if aborted is None else min(aborted, end)

    def _has(self, key: LinkPartition, upto: int) -> bool:
        """Whether this proxy knows by itself that the other side has a partition up to here."""
        pushed = self._pushed.get(key)
        return pushed is not None and pushed.acked >= upto

    def is_out(self, key: LinkPartition) -> bool:
        """Whether a partition is recorded, and not In-Sync."""
        record = self._recorded(key)
        return record is not None and record.state is not SyncState.IN_SYNC

    def _is_there(self, key: LinkPartition, end: int, has_no_end: bool, held: Callable[[SyncPlace], bool]) -> bool:
        pushed = self._pushed.get(key)
        if pushed is not None:
            return pushed.acked >= end or held(pushed)
        if end <= 0:
            return True
        if end == calls.OPEN_END:
            return False  # nothing is known of it yet
        if key.topic == OFFSETS_TOPIC and self._groups.confirmed(key) >= end:
            return True
        led = key in self._leader_end.discovery.led or (key.topic == OFFSETS_TOPIC and key in self._groups.places())
        if led and not has_no_end:
            return False  # it is to be pushed
        if key.topic == OFFSETS_TOPIC:
            return True
        record, there = self._there.get(key, (None, -1))
        if there >= end and record == self._recorded(key):
            return True
        if key.link not in self._asked:
            self._asked[key.link] = {}
            self._tasks.start(f"ask-{key.link}", self._ask(key.link))
        self._asked[key.link][key] = end
        return False

    def _recorded(self, key: LinkPartition) -> SyncRecord | None:
        """With another record the follower may have another log."""
        return self._links.records(key.place).get(key.link)

    # ---- what is not known ----

    def _read(self) -> None:
        if self._order.unread:
            self._tasks.start("read", self._read_ends(self._order.begin_reading()))

    async def _read_ends(self, wanted: Sequence[End]) -> None:
        def on_ends(found: Mapping[TopicPartition, int | None]) -> None:
            self._order.read(wanted, found)
            self._on_more()

        await self._ends.read({each.place for each in wanted}, on_ends)

    async def _ask(self, link_name: str) -> None:
        """Ask the other side once how far it has partitions; not again for a moment."""
        try:
            await asyncio.sleep(0)  # all of a decision are asked for at once
            asked, self._asked[link_name] = self._asked[link_name], {}
            records = {key: self._recorded(key) for key in asked}
            found = await self._high_watermarks(link_name, asked)
            gone = await self._gone({key: records[key] for key, end in asked.items() if found.get(key, -1) < end})
            for key in asked:
                self._there[key] = records[key], GONE if key in gone else found.get(key, -1)
            self._on_more()
        except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            self._unknown.one(link_name, {"link": link_name, "detail": str(error)})
        finally:
            try:
                await asyncio.sleep(RETRY_S)
            finally:
                del self._asked[link_name]
        self._on_more()

    async def _high_watermarks(self, link_name: str, keys: Iterable[LinkPartition]) -> dict[LinkPartition, int]:
        link = self._context.control.state.links.get(link_name)
        connections = self._peers.connections(link_name)
        asked = {}
        for key in keys:
            remote = None if link is None else remote_topic(link, key.topic)
            if remote is not None:
                asked[remote, key.partition] = key
        if not connections or not asked:
            return {}
        places = tuple(calls.PartitionName(*place) for place in sorted(asked))
        answer = await connections[0].call(calls.HighWatermarks(places))
        return {asked[topic, index]: end for topic, index, end in answer.partitions}

    async def _gone(self, records: Mapping[LinkPartition, SyncRecord | None]) -> set[LinkPartition]:
        """Those whose log is no more, or no more that of their record: the follower gets nothing of it any more."""
        topics = {topic: await self._context.cluster.topic(topic) for topic in {key.topic for key in records}}

        def is_gone(key: LinkPartition, record: SyncRecord | None) -> bool:
            topic = topics[key.topic]
            if topic is None or key.partition >= len(topic.partitions):
                return True
            return record is not None and record.topic_id != topic.id_text

        return {key for key, record in records.items() if is_gone(key, record)}
