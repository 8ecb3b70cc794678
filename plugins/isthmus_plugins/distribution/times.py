"""Where a group goes on at another cluster: by a timestamp, since offsets differ (document 000).

The origin sends, for a group and partition, a time before which everything was read. The receiver commits the record
before the first one that is later. Logs of a tree are merged from many origins, and not in the order of timestamps: so
the time is the *least* one of what the group has not read, here and on its way here, less a margin. Whatever has come
to the receiver, no message that is unread at the origin lies before what is committed there.

Timestamps are milliseconds since 1970, as records have them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from operator import itemgetter
from typing import Final

MARGIN_MS: Final = 60_000
ENTRIES_MAX: Final = 1000
"""Of :class:`LeastTimestamps`; beyond that what is older is known less exactly."""


class LeastTimestamps:
    """The least timestamp of a log's records from any offset on to the end, in bounded memory: never one too late."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries: list[tuple[int, int]] = []
        """(Offset, timestamp), both rising: from behind the entry before to this offset no later record is as early."""
        self._entries_max = entries_max
        self.last: int | None = None
        """Timestamp of the last record."""

    def appended(self, offset: int, timestamp: int, last: int | None = None) -> None:
        """A record; or a batch: its last offset, the least timestamp in it, and the ``last`` one."""
        while self._entries and self._entries[-1][1] >= timestamp:
            self._entries.pop()
        self._entries.append((offset, timestamp))
        if len(self._entries) > self._entries_max:
            # Two become one: the later offset, the earlier time. What is old was halved more often.
            halved = [(offset, earlier) for (_, earlier), (offset, _) in zip(*[iter(self._entries)] * 2, strict=False)]
            self._entries = halved + self._entries[2 * len(halved) :]
        self.last = timestamp if last is None else last

    def from_offset(self, offset: int) -> int | None:
        """The least timestamp from ``offset`` on; None behind the end."""
        at = bisect_left(self._entries, offset, key=itemgetter(0))
        return self._entries[at][1] if at < len(self._entries) else None

    def since(self, offset: int) -> int | None:
        """The least timestamp from ``offset`` on (a deleted one: from the log's start), behind the end that of the last
        record and one millisecond; None of an empty log."""
        unread = self.from_offset(offset)
        if unread is not None or self.last is None:
            return unread
        return self.last + 1


def time_to_send(unread: int | None, on_the_way: Iterable[int | None], margin_ms: int = MARGIN_MS) -> int | None:
    """The time that goes to other clusters; None: nothing is sent.

    ``unread``: of :meth:`LeastTimestamps.since` at the committed offset. ``on_the_way``: for each other cluster of the
    tree the least timestamp of what it holds and has not given this one, or the time up to which it has given
    everything; None where that is not known (yet). Raises ValueError for a margin of less than a millisecond: messages
    of the very time that is sent are unread.
    """
    if margin_ms < 1:
        raise ValueError(f"the margin is {margin_ms} ms: it is at least 1 ms, {MARGIN_MS} by default")
    least = unread
    for timestamp in on_the_way:
        if timestamp is None or least is None:
            return None
        least = min(least, timestamp)
    return None if least is None else least - margin_ms


def reached(read_ms: int, unsettled: int | None) -> int:
    """What a cluster has reached at the clusters on one side of it: for :func:`time_to_send` at any of these.

    ``read_ms``: all that it held at this time was looked at; ``unsettled``: the least timestamp of what of that is not
    settled, None where all is. What it takes later is not earlier than that, but for the margin.
    """
    return read_ms if unsettled is None else min(read_ms, unsettled)


def moves_on(before: int | None, now: int, margin_ms: int) -> bool:
    """Whether a time is told again: at once where it is earlier, else when it has gone on by a tenth of the margin."""
    return before is None or now < before or now - before >= max(margin_ms // 10, 1)


class NotSet(StrEnum):
    """Why a time that was received is not committed (yet)."""

    NOT_REACHED = "the topic here has no message that is later yet"
    WENT_ON = "the group has gone on here: it is put back only if that is asked for"


def position_at(
    first_later: int | None, log_start: int, committed: int | None, *, may_go_back: bool = False
) -> int | NotSet:
    """The offset to commit at the receiver. ``first_later``: of the first record that is later than the time received;
    ``committed``: what the group itself has committed here; None: nothing, or it was set by a time, which may go back.
    """
    if first_later is None:
        return NotSet.NOT_REACHED
    position = max(first_later - 1, log_start)
    if committed is not None and committed > position and not may_go_back:
        return NotSet.WENT_ON
    return position
