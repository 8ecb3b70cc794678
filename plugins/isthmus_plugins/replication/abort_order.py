"""What of a partition the other side must have before a decision goes there: the abort markers of before.

Without I/O. Producers before KIP-890 use one epoch for many transactions. Where one was aborted, and the next lists the
same partition, has no record in it and commits, a follower without the abort's marker would take the aborted records
for committed ones. So the decision waits until the other side has what stood in the partition when the abort was
completed. Of what ended before the log was read, the partition's end counts, as it was when it was first listed. An end
that is read late makes the decision wait longer, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from isthmus_protocol.transaction_log import Change, TransactionState

Partition = tuple[str, int]
Key = tuple[int, Partition]
"""A producer, and a partition of its transaction."""

ANY: Final = -1
"""In the place of a producer: all of them."""
ABORTS_MAX: Final = 10_000
"""Of more, the partition's end counts for all producers."""


class Wanted:
    """In the place of an end that is to be read."""

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = False


class AbortOrder:
    """Where aborted transactions end."""

    def __init__(self) -> None:
        self._aborting: dict[str, tuple[int, tuple[Partition, ...]]] = {}
        """By transactional id: the producer and the partitions of a transaction whose abort is not completed."""
        self._ends: dict[Key, int | Wanted] = {}
        """Of a producer: above its last abort marker. Of any: above what was aborted before the log was read."""
        self.unread = False
        """Whether there is something for :meth:`begin_reading`."""

    def begin_anew(self) -> None:
        """The log is read from its start, or other partitions concern us: what ended meanwhile is not known."""
        self._ends = {key: end for key, end in self._ends.items() if key[0] != ANY}

    def take(self, change: Change, concerns: Callable[[Partition], bool]) -> None:
        """Take a change of the transaction log. ``concerns``: whether the other side is to have a partition."""
        transaction = change.transaction
        if transaction is None or transaction.state is TransactionState.COMPLETE_ABORT:
            producer_id, places = self._aborting.pop(change.transactional_id, (ANY, ()))
            for place in filter(concerns, places):
                self._want((producer_id, place))
        elif transaction.state is TransactionState.PREPARE_ABORT and transaction.shares_epoch:
            self._aborting[change.transactional_id] = transaction.producer_id, transaction.partitions
        elif transaction.state is TransactionState.ONGOING and transaction.shares_epoch:
            for place in transaction.partitions:
                if (ANY, place) not in self._ends and concerns(place):
                    self._want((ANY, place))

    def _want(self, key: Key) -> None:
        self._ends.pop(key, None)
        self._ends[key] = Wanted()
        self.unread = True
        if len(self._ends) > ABORTS_MAX:
            oldest = next((key for key in self._ends if key[0] != ANY), None)
            if oldest is not None:
                del self._ends[oldest]
                self._want((ANY, oldest[1]))

    def begin_reading(self) -> dict[Key, Wanted]:
        """What is to be read from now on, and given to :meth:`read`."""
        self.unread = False
        wanted = {key: end for key, end in self._ends.items() if isinstance(end, Wanted) and not end.begun}
        for each in wanted.values():
            each.begun = True
        return wanted

    def read(self, wanted: Mapping[Key, Wanted], ends: Mapping[Partition, int]) -> None:
        """Where partitions end. Those that are not named are gone."""
        for key, each in wanted.items():
            if self._ends.get(key) is each:  # else it was wanted again meanwhile
                self._ends[key] = ends.get(key[1], 0)

    def before(self, producer_id: int, place: Partition) -> int | None:
        """Up to where the other side must have a partition before a decision of the producer; None: not known yet."""
        if (ANY, place) not in self._ends:
            self._want((ANY, place))
        ends = [self._ends.get(key, 0) for key in ((ANY, place), (producer_id, place))]
        known = [end for end in ends if not isinstance(end, Wanted)]
        return max(known) if len(known) == len(ends) else None

    def forget(self, is_there: Callable[[Partition, int], bool]) -> None:
        """Forget aborts of single producers whose markers the other side has: ``is_there(partition, offset)``."""
        for key, end in list(self._ends.items()):
            if key[0] != ANY and not isinstance(end, Wanted) and is_there(key[1], end):
                del self._ends[key]
