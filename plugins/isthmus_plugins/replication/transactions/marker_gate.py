"""Streams that stop at commit markers until the decisions that these carry out go ahead of them.

``marker_order`` decides. What is here has to do with time and with other parts: which streams wait, since when, that
they look again, and that a partition whose decision does not come is In-Sync no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from isthmus_plugins.replication.transactions.marker_order import UNUSED_MAX, MarkerOrder
from isthmus_plugins.replication.transactions.state_tail import TransactionTail
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.records import BatchHeader, Frame

log = logging.getLogger("isthmus_plugins.replication")

UNDECIDED_S: Final = 1.0
"""How long a stream waits for a decision of which nothing is known although all are read; then the partition is In-Sync
no more. The same below the floor for one that waits for aborts behind the marker, itself or by way of others."""
HELD_BACK_S: Final = 20.0
"""How long a stream waits for a decision that waits for aborts: longer than another leader is elected in, at the source
for a partition that nobody pushes meanwhile, or at the target. Above the floor two that wait for each other do no
longer."""
LOAD_S: Final = 10.0
"""How long markers wait until the transaction log is read, after the start."""
NOT_JOINED: Final = 1 << 63
"""Above all offsets."""


@dataclass(slots=True)
class _Waiting:
    """The marker that a stream waits at."""

    producer_id: int
    offset: int
    since: float
    all_read: bool = False
    """All decisions were read since that it may carry out."""


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
        insist: Callable[[Decision, str], bool],
        on_wait: Callable[[], None],
    ) -> None:
        """``recall(partition, producer id, epoch)``: see
        :class:`~isthmus_plugins.replication.transactions.marker_order.MarkerOrder`. ``insist(decision, link)``: have a
        decision sent over a link; whether it is to be. ``on_wait``: called when a stream begins to wait."""
        self._clock = context.clock
        self._leader_end = leader_end
        self._groups = groups
        self._pushed = PushedPartitions(leader_end, groups)
        self._partitions = partitions
        self._requirements = requirements
        self._tail = tail
        self._recall = recall
        self._insist = insist
        self._on_wait = on_wait
        self._tasks = Tasks("marker-gate", context.supervision)
        self._order = MarkerOrder[Decision](self._floor, self._recall_once_loaded, self._may_go_unknown, self._give_up)
        self._active = False
        self._load_until = 0.0
        """So long the transaction log may take to be read, from when it was not any more."""
        self._undecided: dict[OrderedPlace, _Waiting] = {}
        """Streams that wait for a decision."""
        self._read_upto: dict[tuple[OrderedPlace, int | None], int] = {}
        """By stream, and partition of the transaction log (None: all of them): below this, all is read there that
        markers may carry out."""
        self._catching_up: set[tuple[OrderedPlace, int | None]] = set()
        """The same for which it is being read."""

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
        return self._order.earlier(key, decision) if self._is_ordered(key) else []

    def is_held_for(self, decision: Decision, place: SyncPlace) -> bool:
        """Whether all is there of a partition up to the marker that a decision is waited for at."""
        for stream, waiting in self._undecided.items():
            if stream is place and waiting.producer_id == decision.producer_id and place.acked >= waiting.offset:
                # Below the floor it may be the marker of one before, and what was aborted since stands behind it.
                is_its = decision.again or not self._is_below(place.key, waiting.offset)
                return is_its and self._order.is_next(place.key, decision)
        return False

    def are_level(self, places: Iterable[TopicPartition]) -> bool:
        """Whether the other side has all that was in these partitions, as far as this proxy is to push them, when it
        began to."""
        led = self._pushed.led()
        for key in [key for place in places for key in self._requirements.ordered(place)]:
            pushed, floor = self._pushed.get(key), self._partitions.floor(key)
            if key in led and (pushed is None or floor is None or pushed.acked < floor):
                return False
        return True

    def _floor(self, key: LinkPartition) -> int | None:
        if key not in self._requirements.ordered(key.place):
            return None
        floor = self._partitions.floor(key)
        return NOT_JOINED if floor is None else floor

    def _is_below(self, key: LinkPartition, offset: int) -> bool:
        floor = self._floor(key)
        return floor is not None and offset < floor

    def _is_loading(self) -> bool:
        if self._tail.loaded:
            self._load_until = self._clock.monotonic() + LOAD_S
            return False
        return self._clock.monotonic() < self._load_until

    def _recall_once_loaded(self, key: LinkPartition, producer_id: int, epoch: int) -> bool:
        return self._is_loading() or self._recall(key, producer_id, epoch)

    def _may_go_unknown(self, stream: OrderedPlace, producer_id: int, offset: int, below: bool) -> bool:
        """In a topic, above the floor, each decision is sent, hence known. In the offsets topic not that of others'
        groups."""
        if below or stream.key.topic == OFFSETS_TOPIC:
            return self._is_read(stream, producer_id, offset) or (below and not self._tail.loaded)
        return False

    def _is_read(self, stream: OrderedPlace, producer_id: int, offset: int) -> bool:
        """Whether all decisions are read that a producer's marker may carry out."""
        return any(offset < self._read_upto.get((stream, home), 0) for home in {None, self._tail.home_of(producer_id)})

    def _give_up(self, key: LinkPartition) -> bool:
        """Have a partition leave whose follower lacks too many markers; whether it has."""
        return self._partitions.lose(key, f"the follower is {UNUSED_MAX} transactions of a producer behind")

    # ---- streams ----

    def may_pass(self, stream: LeaderStream, header: BatchHeader, batch: Frame, plain: bool) -> bool:
        """Whether a transactional batch may be sent now; else the stream is read on when its decision was."""
        return stream.copy is not None or self._may_pass(stream, header, batch, plain)

    def may_pass_of_groups(self, place: OrderedPlace, header: BatchHeader, batch: Frame) -> bool:
        """The same of the offsets topic: what a marker commits is pushed as any other commit, not in its order."""
        return self._may_pass(place, header, batch, header.is_control)

    def _may_pass(self, stream: OrderedPlace, header: BatchHeader, batch: Frame, plain: bool) -> bool:
        if not self._active or self._order.may_pass(stream, header, batch, plain):
            self._undecided.pop(stream, None)
            stream.late_marker = None
            return True
        waiting = self._undecided.get(stream)
        if waiting is None or waiting.offset != header.base_offset:
            self._undecided[stream] = _Waiting(header.producer_id, header.base_offset, self._clock.monotonic())
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
        loading = self._is_loading()
        for stream, waiting in self._undecided.items():
            late = now - waiting.since > UNDECIDED_S
            if not waiting.all_read and (late or self._may_be_unsent(stream, waiting)):
                self._catch_up_for(stream, waiting)
            if self._press(stream.key, waiting, late):
                continue
            if late and not loading and (why := self._why_give_up(stream, waiting, now)) is not None:
                if self._partitions.lose(stream.key, f"the decision that the marker at offset {waiting.offset} {why}"):
                    self._order.waive(stream.key, waiting.offset)
            elif late and stream.late_marker != waiting.offset:
                stream.late_marker = waiting.offset
                log.warning(
                    "commit marker waits for its decision", extra={**stream.key._asdict(), "offset": waiting.offset}
                )
        self.go_on()
        self._order.forget(self._is_pushed, self._is_ordered)
        self._read_upto = {at: upto for at, upto in self._read_upto.items() if self._is_pushed(at[0])}

    def _is_ordered(self, key: LinkPartition) -> bool:
        return key in self._requirements.ordered(key.place)

    def _why_give_up(self, stream: OrderedPlace, waiting: _Waiting, now: float) -> str | None:
        """Why a marker goes without its decision at last, which nothing but this will bring forth; None: it waits."""
        key = stream.key
        missing = [each for each in self._order.missing(key, waiting.producer_id) if self._insist(each, key.link)]
        if not missing:
            return "carries out is not known" if waiting.all_read or not self._tail.loaded else None
        if not all(key.link in each.held_back for each in missing):
            return None
        in_vain = self._is_below(key, waiting.offset) and self._cannot_go_on(key)
        bound_s = UNDECIDED_S if in_vain else HELD_BACK_S
        return "carries out waits for what was aborted before it" if now - waiting.since > bound_s else None

    def _press(self, key: LinkPartition, waiting: _Waiting, late: bool) -> bool:
        """Have decisions sent again that a marker waits for in vain, whatever was aborted before them; whether there
        are any.

        They wait for all that was there after the start: their own markers, which may wait for each other.
        """
        missing = self._order.missing(key, waiting.producer_id)
        held_back = [each for each in missing if each.again and key.link in each.held_back]
        if held_back and (late or self._cannot_go_on(key)):
            for each in held_back:
                each.overdue.add(key.link)
            self._on_wait()
            return True
        return False

    def _cannot_go_on(self, key: LinkPartition) -> bool:
        """Whether the other side gets no more of a partition unless some marker goes without its decision: its stream
        waits at one for what stands behind it, or behind others that wait so."""
        undecided = {stream.key: waiting for stream, waiting in self._undecided.items()}
        seen, unseen = {key}, [key]
        while unseen:  # each once: they may all wait for each other
            each = unseen.pop()
            waiting, pushed = undecided.get(each), self._pushed.get(each)
            if waiting is None or (pushed is not None and pushed.acked < waiting.offset):
                return False
            missing = self._order.missing(each, waiting.producer_id)
            if not missing or not all(each.link in decision.held_back for decision in missing):
                return False
            more = _waited_for(each.link, missing) - seen
            seen |= more
            unseen += more
        return True

    def _may_be_unsent(self, stream: OrderedPlace, waiting: _Waiting) -> bool:
        """Whether a marker may carry out a decision that is sent already, or to nobody because of it."""
        key = stream.key
        if self._is_read(stream, waiting.producer_id, waiting.offset):
            return False
        if self._is_below(key, waiting.offset):
            return True
        sent_from = self._partitions.sent_from(key)
        return key.topic == OFFSETS_TOPIC and (sent_from is None or waiting.offset < sent_from)

    def _catch_up_for(self, stream: OrderedPlace, waiting: _Waiting) -> None:
        home = self._tail.home_of(waiting.producer_id)
        if (stream, home) not in self._catching_up:
            self._catching_up.add((stream, home))
            self._tasks.start("catch-up", self._catch_up(stream, home, waiting))

    async def _catch_up(self, stream: OrderedPlace, home: int | None, waiting: _Waiting) -> None:
        """Read all that is decided by now, so that markers of what other groups decided wait for nobody, nor those of
        what is on the other side already.

        Of a partition of the offsets topic that is Out-Of-Sync those are sent that are about groups of the link.
        """
        upto = max(waiting.offset + 1, self._end_seen(stream.key))
        try:
            async with asyncio.timeout(UNDECIDED_S):
                await self._tail.caught_up(home)
            waiting.all_read = True
            self._read_upto[stream, home] = max(upto, self._read_upto.get((stream, home), 0))
        except (BrokerUnavailable, KafkaRefused, TimeoutError) as error:
            log.warning("transaction log not read", extra={"detail": str(error)})
            await asyncio.sleep(UNDECIDED_S)
        finally:
            self._catching_up.discard((stream, home))
        self.go_on()

    def _end_seen(self, key: LinkPartition) -> int:
        """What is seen of a partition's log ends here, or later."""
        if key.topic == OFFSETS_TOPIC:
            return self._groups.read_end(key.partition)
        stream = self._leader_end.stream(key)
        return 0 if stream is None else stream.source_end


def _waited_for(link_name: str, decisions: Iterable[Decision]) -> set[LinkPartition]:
    """Where decisions that are held back over a link wait for aborts."""
    return {LinkPartition(link_name, *place) for each in decisions for place in each.held_back[link_name]}
