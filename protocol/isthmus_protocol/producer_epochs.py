"""Which cluster numbered an idempotent producer, told by its id, or else by its epoch.

Every cluster hands out producer ids from 0 upwards, and to an idempotent producer always epoch 0. A client that moves
to another cluster keeps id and epoch, so there nobody could tell it from the cluster's own producer of that number. But
brokers take any id and any epoch that an idempotent producer begins with. So each cluster's proxies hand out an id with
a mark that is their cluster's own, from a hash of the cluster's id, above the number that the broker has given:

    bits 38..28  0            nobody's: of producers that were numbered without a proxy, or of before there were marks
                 1 .. 2047    the cluster's
    bits 27..0                the broker's number; above 268,435,455 it is left as it is, without a mark

An id stays as long as its producer. Where it has no mark, or two clusters have the same one, the epoch may say it: each
cluster's proxies hand out a first one of its own, too:

    0 .. 1023        nobody's: of producers that were numbered without a proxy, and of transactional ones
    first .. + 1023  the cluster's; clients count up by themselves (KIP-360), once for each record that is refused

Two clusters whose first epochs are closer than :data:`NEAR` (one pair in a thousand) are not told apart by them.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Collection
from typing import Final

from isthmus_protocol.producer_ids import IDS_PER_CLUSTER

EPOCHS: Final = 1024
"""So many are a cluster's, from its first one on, where no other one's begin in between."""
NEAR: Final = 16
"""A producer may count up so far; where another cluster's epochs begin before, the two are not told apart."""
_EPOCH_MAX: Final = 32767
_MARK_SHIFT: Final = 28
_MARKS: Final = IDS_PER_CLUSTER >> _MARK_SHIFT


def first_epoch(cluster_id: str) -> int:
    """The epoch with which a cluster's idempotent producers begin."""
    return EPOCHS + zlib.crc32(cluster_id.encode()) % (_EPOCH_MAX - 2 * EPOCHS)


def _mark(cluster_id: str) -> int:
    return 1 + zlib.crc32(cluster_id.encode()[::-1]) % (_MARKS - 1)


def marked(producer_id: int, cluster_id: str) -> int:
    """The id under which a cluster's proxies hand out what a broker of it has numbered ``producer_id``."""
    return producer_id if producer_id >> _MARK_SHIFT else _mark(cluster_id) << _MARK_SHIFT | producer_id


class NumberedBy:
    """Says of which of the known clusters a producer may be, by its id and epoch."""

    def __init__(self, own: str, others: Collection[str]) -> None:
        clusters = sorted({own, *others}, key=first_epoch)
        self._own = frozenset({own})
        self._marked = {
            mark: frozenset(each for each in clusters if _mark(each) == mark) for mark in map(_mark, clusters)
        }
        self._all = frozenset(clusters)
        self._firsts = [first_epoch(each) for each in clusters]
        self._alike = [frozenset(other for other in clusters if _are_alike(each, other)) for each in clusters]

    def __call__(self, producer_id: int, epoch: int) -> frozenset[str]:
        """The clusters that may have numbered a producer: one, or several that hand out such ids and epochs.

        All that are known, where no proxy has numbered it. A producer of a cluster that is not known has an id that is
        nobody else's, so it may be written as this cluster's own.
        """
        mark = producer_id >> _MARK_SHIFT
        if not 0 < mark < _MARKS:
            return self._by_epoch(epoch)
        marked_so = self._marked.get(mark, self._own)
        return marked_so if len(marked_so) == 1 else marked_so & self._by_epoch(epoch) or marked_so

    def _by_epoch(self, epoch: int) -> frozenset[str]:
        at = bisect_right(self._firsts, epoch) - 1
        return self._all if at < 0 or epoch - self._firsts[at] >= EPOCHS else self._alike[at]


def _are_alike(one: str, other: str) -> bool:
    return abs(first_epoch(one) - first_epoch(other)) < NEAR
