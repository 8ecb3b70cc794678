"""What of a partition the other side must have before a decision goes there: the abort markers of before.

Without I/O. Producers before KIP-890 use one epoch for many transactions. Where one was aborted, and the next lists the
same partition, has no record in it and commits, a follower without the abort's marker would take the aborted records
for committed ones. So the decision waits until the other side has what stood in the partition when the abort was
completed. Of what ended before the log was read, the partition's end counts, as it was when it was first listed. An end
that is read late makes the decision wait longer, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from isthmus_plugins.cluster import TopicPartition
from isthmus_protocol.transaction_log import Change, TransactionState

Key = tuple[int, TopicPartition]
"""A producer, and a partition of its transaction."""

ENDS_MAX: Final = 10_000
"""That are remembered; of more aborts the last end counts for all producers of the partition."""


class End:
    """Where a partition ends, from when that is read."""

    __slots__ = ("offset", "place", "reading")

    def __init__(self, place: TopicPartition) -> None:
        self.place = place
        self.offset: int | None = None
        self.reading = 0
        """The number of the reading that it comes from."""


class AbortOrder:
    """Where aborted transactions end."""

    def __init__(self) -> None:
        self._aborting: dict[str, tuple[int, tuple[TopicPartition, ...]]] = {}
        """By transactional id: the producer and the partitions of a transaction whose abort is not completed."""
        self._all: dict[TopicPartition, End] = {}
        """Above what any producer aborted before the log was read."""
        self._last: dict[Key, End] = {}
        """Above a producer's last abort marker."""
        self.unread: list[End] = []
        """To be read, and given to :meth:`read`."""
        self.readings = 0
        """How often ends were read."""

    def begin_anew(self) -> None:
        """The log is read from its start: what ended meanwhile is not known."""
        self._all.clear()

    def take(self, change: Change, concerns: Callable[[TopicPartition], bool]) -> None:
        """Take a change of the transaction log. ``concerns``: whether the other side is to have a partition."""
        transaction = change.transaction
        if transaction is None or transaction.state is TransactionState.COMPLETE_ABORT:
            producer_id, places = self._aborting.pop(change.transactional_id, (-1, ()))
            for place in places:
                if concerns(place):
                    self._want_last((producer_id, place))
                else:  # should it concern anyone later, its end of then counts
                    self._all.pop(place, None)
        elif transaction.state is TransactionState.PREPARE_ABORT and transaction.shares_epoch:
            self._aborting[change.transactional_id] = transaction.producer_id, transaction.partitions
        elif transaction.state is TransactionState.ONGOING and transaction.shares_epoch:
            for place in transaction.partitions:
                if place not in self._all and concerns(place):
                    self._want_all(place)

    def _want(self, place: TopicPartition) -> End:
        end = End(place)
        self.unread.append(end)
        return end

    def _want_all(self, place: TopicPartition) -> None:
        self._all[place] = self._want(place)
        if len(self._all) > ENDS_MAX:
            del self._all[next(iter(self._all))]

    def _want_last(self, key: Key) -> None:
        self._last.pop(key, None)
        self._last[key] = self._want(key[1])
        if len(self._last) > ENDS_MAX:
            oldest = next(iter(self._last))
            self._forget(oldest[1], self._last.pop(oldest))

    def _forget(self, place: TopicPartition, last: End) -> None:
        known = self._all.get(place)
        if known is not None and known.offset is not None and last.offset is not None:
            known.offset = max(known.offset, last.offset)
        else:
            self._all.pop(place, None)

    def begin_reading(self) -> list[End]:
        """What is to be read from now on, and given to :meth:`read`."""
        unread, self.unread = self.unread, []
        return unread

    def read(self, wanted: Iterable[End], ends: Mapping[TopicPartition, int | None]) -> None:
        """Where partitions end; None: it is gone."""
        self.readings += 1
        for each in wanted:
            if each.place in ends:
                each.offset, each.reading = ends[each.place] or 0, self.readings

    def ended(self, producer_id: int, ends: Mapping[TopicPartition, int], readings: int) -> None:
        """Where partitions end that a producer's transaction lists, read when ``readings`` others had been.

        A log that ends lower than before was made anew: what was known is of another one.
        """
        for place, offset in ends.items():
            known = (self._all.get(place), self._last.get((producer_id, place)))
            if any(each and (each.offset or 0) > offset and each.reading <= readings for each in known):
                self._last.pop((producer_id, place), None)
                self._want_all(place)

    def before(self, producer_id: int, place: TopicPartition) -> int | None:
        """Up to where the other side must have a partition before a decision of the producer; None: not known yet."""
        if place not in self._all:
            self._want_all(place)
        offset, last = self._all[place].offset, self._last.get((producer_id, place))
        if last is None or offset is None:
            return offset
        return None if last.offset is None else max(offset, last.offset)
