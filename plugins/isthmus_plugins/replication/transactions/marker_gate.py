"""Streams that stop at commit markers until the decisions that these carry out go ahead of them.

``marker_order`` decides. What is here has to do with time and with other parts: which streams wait, since when, that
they look again, and that a partition whose decision does not come is In-Sync no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.partitions import GroupPlaces, LinkPartition, OrderedPlace, SyncPlace
from isthmus_plugins.replication.sync.in_sync import SyncPartitions
from isthmus_plugins.replication.sync.pushed import PushedPartitions
from isthmus_plugins.replication.sync.requirements import Requirements
from isthmus_plugins.replication.transactions.decision import Decision
from isthmus_plugins.replication.transactions.marker_order import MarkerOrder
from isthmus_plugins.replication.transactions.state_tail import TransactionTail
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.records import BatchHeader, Frame

log = logging.getLogger("isthmus_plugins.replication")

UNDECIDED_S: Final = 1.0
"""How long a stream waits for a decision that must be there; then the partition is In-Sync no more."""
LOAD_S: Final = 10.0
"""How long markers wait until the transaction log is read, after the start."""
NOT_JOINED: Final = 1 << 63
"""Above all offsets."""


class MarkerGate:
    """Which batches of transactions may be sent now, over links whose markers wait."""

    def __init__(
        self,
        context: PluginContext,
        leader_end: LeaderEnd,
        groups: GroupPlaces,
        partitions: SyncPartitions,
        requirements: Requirements,
        tail: TransactionTail,
        recall: Callable[[LinkPartition, int, int], bool],
        on_wait: Callable[[], None],
    ) -> None:
        """``recall(partition, producer id, epoch)``: have sent what a producer decided in a partition before this
        process; whether that was not yet. ``on_wait``: called when a stream begins to wait."""
        self._clock = context.clock
        self._leader_end = leader_end
        self._groups = groups
        self._pushed = PushedPartitions(leader_end, groups)
        self._partitions = partitions
        self._requirements = requirements
        self._tail = tail
        self._recall = recall
        self._on_wait = on_wait
        self._tasks = Tasks("marker-gate", context.supervision)
        self._order = MarkerOrder(self._floor, self._recall_once_loaded)
        self._active = False
        self._load_until = 0.0
        self._undecided: dict[OrderedPlace, tuple[int, int, float]] = {}
        """Streams that wait for a decision: of which producer, at which offset, and since when."""
        self._catching_up: set[LinkPartition] = set()
        """Those of the offsets topic for which the log is read up to its end."""

    async def stop(self) -> None:
        await self._tasks.close()

    def follow(self, active: bool) -> None:
        """Whether markers wait at all: some link is synchronous, or its leases run."""
        if active and not self._active:
            self._load_until = self._clock.monotonic() + LOAD_S
        self._active = active
        if not active:
            self.go_on()

    # ---- decisions ----

    def decided(self, key: LinkPartition, decision: Decision) -> None:
        """A decision lists a partition that this proxy pushes."""
        self._order.decided(key, decision)

    def earlier(self, key: LinkPartition, decision: Decision) -> list[tuple[int, int, int]]:
        """See :meth:`~isthmus_plugins.replication.transactions.marker_order.MarkerOrder.earlier`."""
        return self._order.earlier(key, decision)

    def is_held_for(self, decision: Decision, place: SyncPlace) -> bool:
        """Whether all is there of a partition up to the marker that a decision is waited for at."""
        for stream, (producer_id, offset, _) in self._undecided.items():
            if stream is place and producer_id == decision.producer_id and place.acked >= offset:
                return self._order.is_next(place.key, decision)
        return False

    def are_level(self, places: Iterable[TopicPartition]) -> bool:
        """Whether the other side has all that was in these partitions, as far as this proxy pushes them, when it began
        to."""
        for key in [key for place in places for key in self._requirements.ordered(place)]:
            pushed, floor = self._pushed.get(key), self._partitions.floor(key)
            if pushed is not None and (floor is None or pushed.acked < floor):
                return False
        return True

    def _floor(self, key: LinkPartition) -> int | None:
        if key not in self._requirements.ordered(key.place):
            return None
        floor = self._partitions.floor(key)
        return NOT_JOINED if floor is None else floor

    def _recall_once_loaded(self, key: LinkPartition, producer_id: int, epoch: int) -> bool:
        if not self._tail.loaded and self._clock.monotonic() < self._load_until:
            return True
        return self._recall(key, producer_id, epoch)

    # ---- streams ----

    def may_pass(self, stream: LeaderStream, header: BatchHeader, batch: Frame, plain: bool) -> bool:
        """Whether a transactional batch may be sent now; else the stream is read on when its decision was."""
        return stream.copy is not None or self._may_pass(stream, header, batch, plain)

    def may_pass_of_groups(self, place: OrderedPlace, header: BatchHeader, batch: Frame) -> bool:
        """The same of the offsets topic: what a marker commits is pushed as any other commit, not in its order."""
        return self._may_pass(place, header, batch, header.is_control)

    def _may_pass(self, stream: OrderedPlace, header: BatchHeader, batch: Frame, plain: bool) -> bool:
        if not self._active:
            return True
        if self._order.may_pass(stream, header, batch, plain):
            self._undecided.pop(stream, None)
            return True
        if self._undecided.get(stream, (-1, -1, 0.0))[1] != header.base_offset:
            self._undecided[stream] = header.producer_id, header.base_offset, self._clock.monotonic()
            self._on_wait()  # it may have been sent over another connection, and in vain
        stream.undecided = True
        return False

    def go_on(self) -> None:
        """Have streams that wait look again."""
        for stream in list(self._undecided):
            if stream.undecided:
                stream.undecided = False
                if stream.key.topic == OFFSETS_TOPIC:
                    self._groups.resume(stream.key.partition)
                else:
                    self._leader_end.resume_tails(stream.key.link)

    def _is_pushed(self, stream: OrderedPlace) -> bool:
        return self._leader_end.stream(stream.key) is stream or self._groups.is_pushed(stream)

    def look(self, now: float) -> None:
        """See to streams that wait for too long, and forget those that are no more."""
        self._undecided = {stream: waits for stream, waits in self._undecided.items() if self._is_pushed(stream)}
        loading = not self._tail.loaded and now < self._load_until + UNDECIDED_S
        for stream, (_, offset, since) in self._undecided.items():
            if self._may_be_unsent(stream.key, offset) and stream.key not in self._catching_up:
                self._catching_up.add(stream.key)
                self._tasks.start("catch-up", self._catch_up(stream.key))
            if not loading and now - since > UNDECIDED_S:
                why = f"the decision that the marker at offset {offset} carries out is not known"
                if self._partitions.lose(stream.key, why):
                    self._order.waive(stream.key, offset)
        self.go_on()
        self._order.forget(self._is_pushed, lambda key: key in self._requirements.ordered(key.place))

    def _may_be_unsent(self, key: LinkPartition, offset: int) -> bool:
        """Whether a marker of the offsets topic may carry out a decision that is sent to nobody because of it."""
        if key.topic != OFFSETS_TOPIC or offset < self._order.known_upto(key):
            return False
        sent_from = self._partitions.sent_from(key)
        return sent_from is None or offset < sent_from

    async def _catch_up(self, key: LinkPartition) -> None:
        """Read all that is decided by now, so that markers of what other groups decided wait for nobody.

        Of a partition of the offsets topic that is Out-Of-Sync those are sent that are about groups of the link.
        """
        upto = self._groups.read_end(key.partition)
        try:
            async with asyncio.timeout(UNDECIDED_S):
                await self._tail.caught_up()
            self._order.all_known(key, upto)
        except (BrokerUnavailable, KafkaRefused, TimeoutError) as error:
            log.warning("transaction log not read", extra={"detail": str(error)})
        finally:
            self._catching_up.discard(key)
        self.go_on()
