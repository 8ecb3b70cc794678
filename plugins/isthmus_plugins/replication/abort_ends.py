"""Whether the other side has the abort markers that stand before a decision (see ``abort_order``).

Of what this proxy pushes it knows; of other partitions it asks the other side. Of those of the offsets topic that
another proxy pushes it knows nothing, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from isthmus_plugins.api import BrokerUnavailable, KafkaRefused, PluginContext
from isthmus_plugins.replication.abort_order import AbortOrder, Key, Wanted
from isthmus_plugins.replication.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.decision import Decision, Partition, remote_topic
from isthmus_plugins.replication.leader import LeaderEnd
from isthmus_plugins.replication.leader_stream import LedPartition
from isthmus_plugins.replication.sync_needs import SyncNeeds
from isthmus_plugins.replication.sync_places import GroupPlaces, SyncPlace
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.transaction_log import Change

log = logging.getLogger("isthmus_plugins.replication")

RETRY_S: Final = 0.05
"""Also how often the other side is asked again."""


class Connections(Protocol):
    """Of the link's peers what is used here."""

    def connections(self, link_name: str) -> list[LinkConnection]: ...


class Concerns(Protocol):
    """What synchronous links need, as far as it is used here."""

    def concerns(self, topic: str) -> bool: ...

    @property
    def who(self) -> SyncNeeds: ...


async def log_ends(context: PluginContext, places: Iterable[Partition]) -> Mapping[Partition, int]:
    """Where partitions end; those of topics that were deleted are left out. Tried until it is known."""
    ends: dict[Partition, int] = {}
    wanted = set(places)
    while wanted:
        try:
            ends |= await context.cluster.log_ends(sorted(wanted))
            wanted -= ends.keys()
            for topic in {topic for topic, _ in wanted}:
                if await context.cluster.topic(topic) is None:
                    wanted = {place for place in wanted if place[0] != topic}
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("ends of partitions not read", extra={"detail": str(error)})
        if wanted:
            await asyncio.sleep(RETRY_S)
    return ends


class AbortEnds:
    """How far the other sides have what was aborted."""

    def __init__(
        self,
        context: PluginContext,
        leader_end: LeaderEnd,
        groups: GroupPlaces,
        peers: Connections,
        needs: Concerns,
        on_more: Callable[[], None],
    ) -> None:
        """``on_more``: called when something is known that :meth:`are_there` was asked for."""
        self._context = context
        self._leader_end = leader_end
        self._groups = groups
        self._peers = peers
        self._needs = needs
        self._on_more = on_more
        self._order = AbortOrder()
        self._tasks = Tasks("abort-ends")
        self._there: dict[LedPartition, int] = {}
        """Of partitions that others push: what the other side said to have."""
        self._asked: dict[str, set[Partition]] = {}
        """By link: what it is asked for."""

    async def stop(self) -> None:
        await self._tasks.close()

    def begin_anew(self) -> None:
        """See :meth:`~isthmus_plugins.replication.abort_order.AbortOrder.begin_anew`."""
        self._order.begin_anew()

    def take(self, change: Change) -> None:
        """Take a change of the transaction log."""
        self._order.take(change, lambda place: self._needs.concerns(place[0]))
        self._read()

    def are_there(self, decision: Decision, link_name: str, held: Callable[[SyncPlace], bool]) -> bool:
        """Whether the other side has what must be there before a decision; else ``on_more`` is called later.

        ``held``: whether a partition's stream waits at the decision's own marker.
        """
        if not decision.shares_epoch or decision.again:
            return True
        there = True
        for place in decision.places:
            key = LedPartition(link_name, *place)
            if key in self._needs.who.told(place):
                end = self._order.before(decision.producer_id, place)
                there = end is not None and self._is_there(key, end, held) and there
        self._read()
        return there

    def _is_there(self, key: LedPartition, end: int, held: Callable[[SyncPlace], bool]) -> bool:
        pushed = self.place(key)
        if pushed is not None:
            return pushed.acked >= end or held(pushed)
        if key in self._leader_end.led or (key.topic == OFFSETS_TOPIC and key in self._groups.places()):
            return False  # it is to be pushed
        if key.topic == OFFSETS_TOPIC or self._there.get(key, -1) >= end:
            return True
        if key.link not in self._asked:
            self._asked[key.link] = set()
            self._tasks.start(f"ask-{key.link}", self._ask(key.link))
        self._asked[key.link].add(key.place)
        return False

    def place(self, key: LedPartition) -> SyncPlace | None:
        """A partition that this proxy pushes."""
        return self._groups.place(key) if key.topic == OFFSETS_TOPIC else self._leader_end.stream(key)

    def forget(self) -> None:
        """Forget what is there."""

        def is_there(place: Partition, end: int) -> bool:
            pushed = [self.place(key) for key in self._needs.who.leading(place)]
            return all(each is not None and each.acked >= end for each in pushed)

        self._order.forget(is_there)

    # ---- what is not known ----

    def _read(self) -> None:
        if self._order.unread:
            self._tasks.start("read", self._read_ends(self._order.begin_reading()))

    async def _read_ends(self, wanted: Mapping[Key, Wanted]) -> None:
        self._order.read(wanted, await log_ends(self._context, {place for _, place in wanted}))
        self._on_more()

    async def _ask(self, link_name: str) -> None:
        """Ask the other side once how far it has partitions."""
        try:
            await asyncio.sleep(0)  # all of a decision are asked for at once
            link = self._context.control.state.links.get(link_name)
            connections = self._peers.connections(link_name)
            asked = {}
            for place in self._asked[link_name]:
                remote = None if link is None else remote_topic(link, place[0])
                if remote is not None:
                    asked[remote, place[1]] = place
            if connections and asked:
                answer = await connections[0].call("high_watermarks", {"partitions": sorted(asked)})
                for topic, partition, end in answer["partitions"]:
                    place = asked[str(topic), int(partition)]
                    self._there[LedPartition(link_name, *place)] = int(end)
        except (LinkRejected, LinkLost, TimeoutError) as error:
            log.warning("ends of the follower not known", extra={"link": link_name, "detail": str(error)})
            await asyncio.sleep(RETRY_S)
        finally:
            del self._asked[link_name]
        self._on_more()
