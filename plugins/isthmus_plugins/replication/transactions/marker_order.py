"""No commit marker goes to the other side before the decision that it carries out.

Without I/O. A partition's stream stops at a commit marker until the decision was sent ahead of it, over the same
connection, or is known to be on the other side. From the offset on from which this proxy saw every decision that lists
the partition while it pushed that (the *floor*), it is known which marker carries out which. Below it, a marker waits
until all is read that may be its decision, and for each decision of its producer that this proxy has not sent, and the
last one from before this process, which may have died with the one before.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from isthmus_plugins.replication.partitions import LinkPartition, OrderedPlace
from isthmus_protocol.record_codec import Marker, decode_control
from isthmus_protocol.records import BatchHeader, Frame

NOT_DECIDED: Final = False
UNUSED_MAX: Final = 256
"""Decisions of a producer whose markers a partition's stream has not read. Each goes along with the next decision, so
the other side is not to be further behind: then the partition is In-Sync no more."""
PRODUCERS_MAX: Final = 10_000
"""That are remembered of a stream; of others more is asked for than might be needed."""


class SentDecision(Protocol):
    """A decision, as far as markers need it."""

    producer_id: int
    producer_epoch: int
    data_epoch: int
    again: bool
    """It was there before this process, which may not be the first to send it."""

    @property
    def identity(self) -> tuple[int, int, int]:
        """Of one producer, higher is later."""

    def has_epoch(self, header: BatchHeader) -> bool:
        """Whether a batch of its producer has the epoch of its records or, a marker, of its markers."""

    def end_of(self, key: LinkPartition) -> int | None:
        """Its records in a partition stand below this; None: that is not known yet, or nothing stands there."""

    def ends_after(self, key: LinkPartition, offset: int) -> bool:
        """Whether what begins at an offset may be of its transaction."""

    def is_sent(self, stream: OrderedPlace) -> bool:
        """Whether it comes before whatever the stream sends now, or is on the other side already."""

    def is_there(self, key: LinkPartition) -> bool:
        """Whether it is on the other side of a partition's link, or need not be."""


D = TypeVar("D", bound=SentDecision)


class _Known(Generic[D]):
    """One decision for one partition."""

    __slots__ = ("decision", "used_at")

    def __init__(self, decision: D) -> None:
        self.decision = decision
        self.used_at: int | None = None
        """Where the marker stands that carries it out; None while that has not been read."""


class _Producers:
    """What a stream has passed on of each producer since the last marker of it."""

    __slots__ = ("begun", "ended")

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}
        """Where its open transaction begins."""
        self.ended: set[int] = set()
        """Those of which nothing came after their marker."""


class MarkerOrder(Generic[D]):
    """Which markers may be sent."""

    def __init__(
        self,
        floor: Callable[[LinkPartition], int | None],
        recall: Callable[[LinkPartition, int, int], bool],
        may_go_unknown: Callable[[OrderedPlace, int, int, bool], bool],
        give_up: Callable[[LinkPartition], bool],
    ) -> None:
        """``floor(partition)``: the floor; None: no marker waits. ``recall(partition, producer id, epoch)``: name what
        was decided before this proxy pushed the partition (:meth:`decided`), and have the last decision from before
        this process sent; whether there is one that was not yet. ``may_go_unknown(stream, producer id, offset, below
        the floor)``: whether a marker may go of whose decision nothing is known. ``give_up(partition)``: have one leave
        of which more is to be remembered than can be; whether nothing says any more that it is In-Sync."""
        self._floor = floor
        self._recall = recall
        self._may_go_unknown = may_go_unknown
        self._give_up = give_up
        self._known: dict[tuple[LinkPartition, int], list[_Known[D]]] = {}
        """By partition and producer id, in the order of the transaction log."""
        self._producers: dict[OrderedPlace, _Producers] = {}
        self._waived: dict[LinkPartition, int] = {}

    def decided(self, key: LinkPartition, decision: D) -> None:
        """A decision lists a partition that this proxy pushes."""
        known = self._known.setdefault((key, decision.producer_id), [])
        if any(each.decision is decision for each in known):
            return
        bisect.insort(known, _Known(decision), key=lambda each: each.decision.identity)
        if len(known) <= UNUSED_MAX:
            return
        unused = [each for each in known if each.used_at is None]
        if len(unused) > UNUSED_MAX and self._give_up(key):
            known.remove(next((each for each in unused if each.decision.is_there(key)), unused[0]))

    def is_next(self, key: LinkPartition, decision: D) -> bool:
        """Whether the next marker of its producer in a partition carries this decision out."""
        known = self._known.get((key, decision.producer_id), ())
        return next((each.decision is decision for each in known if each.used_at is None), False)

    def missing(self, key: LinkPartition, producer_id: int) -> list[D]:
        """Decisions of a producer that list a partition, and that the other side may not have."""
        known = self._known.get((key, producer_id), ())
        return [each.decision for each in known if not each.decision.is_there(key)]

    def earlier(self, key: LinkPartition, decision: D) -> list[tuple[int, int, int]]:
        """Decisions of the same producer before this one, of other epochs, whose markers the follower may not have.

        (Epoch of the markers, of the records, end.) They are forgotten when it has (:meth:`forget`).
        """
        found: list[tuple[int, int, int]] = []
        for each in self._known.get((key, decision.producer_id), ()):
            if each.decision is decision:
                break
            end = each.decision.end_of(key)
            if end is not None and each.decision.data_epoch != decision.data_epoch:
                found.append((each.decision.producer_epoch, each.decision.data_epoch, end))
        return found

    def forget(self, led: Callable[[OrderedPlace], bool], needs: Callable[[LinkPartition], bool]) -> None:
        """Forget streams that have ended, and decisions of partitions that need none, or whose markers are there."""
        self._producers = {stream: known for stream, known in self._producers.items() if led(stream)}
        self._waived = {key: offset for key, offset in self._waived.items() if needs(key)}
        acked = {stream.key: stream.acked for stream in self._producers}
        for place, known in list(self._known.items()):
            end = acked.get(place[0], 0)
            left = [each for each in known if each.used_at is None or each.used_at >= end] if needs(place[0]) else []
            if left:
                self._known[place] = left
            else:
                del self._known[place]

    def waive(self, key: LinkPartition, offset: int) -> None:
        """Send the marker at an offset all the same."""
        self._waived[key] = offset

    def may_pass(self, stream: OrderedPlace, header: BatchHeader, batch: Frame, plain: bool = False) -> bool:
        """Whether a transactional batch may be sent. To be asked for each of a stream, in order, also again.

        ``plain``: the records of a committed transaction go as plain ones, so that they count before their marker.
        """
        producers = self._producers.get(stream)
        if producers is None:
            producers = self._producers[stream] = _Producers()
        producer_id, offset = header.producer_id, header.base_offset
        if not header.is_control:
            if plain and self._decided(stream, header, offset, True) is NOT_DECIDED:
                return False
            producers.ended.discard(producer_id)
            producers.begun.setdefault(producer_id, offset)
            return True
        commits = bool(header.record_count) and decode_control(batch).marker is Marker.COMMIT
        if producer_id in producers.ended:
            self._pass_empty(stream.key, producer_id, offset)
        elif commits:
            found = self._decided(stream, header, producers.begun.get(producer_id, 0), plain)
            if found is NOT_DECIDED:
                return False
            if isinstance(found, _Known):
                self._use(stream.key, producer_id, found, offset)
        producers.begun.pop(producer_id, None)
        if len(producers.ended) < PRODUCERS_MAX:
            producers.ended.add(producer_id)
        return True

    def _pass_empty(self, key: LinkPartition, producer_id: int, offset: int) -> None:
        """A marker of a producer of which nothing is open: what stands below had nothing else in the partition."""
        for each in self._known.get((key, producer_id), ()):
            end = each.decision.end_of(key)
            if each.used_at is None and end is not None and end <= offset:
                each.used_at = offset

    def _use(self, key: LinkPartition, producer_id: int, used: _Known[D], offset: int) -> None:
        """A marker carries a decision out; those before it that no marker did had nothing in the partition."""
        used.used_at = offset
        known = self._known[key, producer_id]
        place = known.index(used)
        known[:place] = [each for each in known[:place] if each.used_at is not None]

    def _decided(self, stream: OrderedPlace, header: BatchHeader, begun: int, there: bool) -> _Known[D] | bool:
        """The decision of what a batch is part of; True: it needs none, or may go without; NOT_DECIDED: it waits.

        ``there``: it must be on the other side, where being sent ahead is not enough.
        """
        floor, offset = self._floor(stream.key), header.base_offset
        if floor is None or self._waived.get(stream.key) == offset:
            return True
        below = offset < floor
        if below and self._recall(stream.key, header.producer_id, header.producer_epoch):
            return NOT_DECIDED
        all_known = self._known.get((stream.key, header.producer_id), [])
        # What was decided before this process is carried out below the floor, and only below it may anything else be.
        known = [each for each in all_known if each.decision.again == below and each.decision.has_epoch(header)]
        found = next((each for each in known if each.used_at == offset), None)
        if found is None:
            unused = (each for each in known if each.used_at is None)
            found = next((each for each in unused if each.decision.ends_after(stream.key, begun)), None)
        if (found is None or below) and not self._may_go_unknown(stream, header.producer_id, offset, below):
            return NOT_DECIDED
        if found is None and not below:
            return True
        for each in all_known:  # those that came earlier may be the one that is meant; below the floor any may
            if not (each.decision.is_there(stream.key) if there else each.decision.is_sent(stream)):
                return NOT_DECIDED
        return True if found is None else found
