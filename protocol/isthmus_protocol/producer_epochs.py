"""Which cluster numbered an idempotent producer, told by its epoch.

Every cluster hands out producer ids from 0 upwards, and to an idempotent producer always epoch 0. A client that moves
to another cluster keeps id and epoch, so there nobody could tell it from the cluster's own producer of that number. But
brokers take any epoch that an idempotent producer begins with. So each cluster's proxies hand one out that is their
cluster's own, from a hash of its id:

    0 .. 1023        nobody's: of producers that were numbered without a proxy, and of transactional ones
    first .. + 1023  the cluster's; clients count up by themselves (KIP-360), once for each record that is refused

Two clusters whose first epochs are closer than :data:`NEAR` (one pair in a thousand) are not told apart by them.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Collection
from typing import Final

EPOCHS: Final = 1024
"""So many are a cluster's, from its first one on, where no other one's begin in between."""
NEAR: Final = 16
"""A producer may count up so far; where another cluster's epochs begin before, the two are not told apart."""
_EPOCH_MAX: Final = 32767


def first_epoch(cluster_id: str) -> int:
    """The epoch with which a cluster's idempotent producers begin."""
    return EPOCHS + zlib.crc32(cluster_id.encode()) % (_EPOCH_MAX - 2 * EPOCHS)


class NumberedBy:
    """Says of which of the known clusters a producer may be, by its epoch."""

    def __init__(self, own: str, others: Collection[str]) -> None:
        clusters = sorted({own, *others}, key=first_epoch)
        self._all = frozenset(clusters)
        self._firsts = [first_epoch(each) for each in clusters]
        self._alike = [frozenset(other for other in clusters if _are_alike(each, other)) for each in clusters]

    def __call__(self, epoch: int) -> frozenset[str]:
        """The clusters that may have numbered a producer with this epoch: one, or several that hand out such ones.

        All that are known, where no proxy has numbered it.
        """
        at = bisect_right(self._firsts, epoch) - 1
        return self._all if at < 0 or epoch - self._firsts[at] >= EPOCHS else self._alike[at]


def _are_alike(one: str, other: str) -> bool:
    return abs(first_epoch(one) - first_epoch(other)) < NEAR
