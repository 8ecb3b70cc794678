"""Leases of what is In-Sync, or led over a synchronous link, no more, whoever granted them: how long they run.

Without I/O. A proxy grants leases until it has applied the change. So of what another one pushed they run on from when
every proxy has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.partitions import LinkPartition

LEASE_S: Final = 1.5
"""How long the follower may say that a partition is In-Sync, from when it asked. Less than the shortest time that acks
may wait."""
LEASE_MARGIN_S: Final = 0.25
NOT_ENFORCED: Final = float("inf")


class ExpiringLeases:
    """By partition of a link: until when (monotonic seconds) its follower may say that it is In-Sync."""

    def __init__(self, began: float) -> None:
        """``began``: when this process did (monotonic seconds)."""
        self._began = began
        self.unsure = True
        """Leases of the process before this one may still run, whatever is recorded by now."""
        self._until: dict[LinkPartition, float] = {}
        self._changed_at: dict[LinkPartition, int] = {}
        """Where the change stands in the control log that not every proxy may have applied yet."""

    def __bool__(self) -> bool:
        return bool(self._until)

    @property
    def changed_at(self) -> int | None:
        """Up to where in the control log others must be known to have applied it; None: they are."""
        return max(self._changed_at.values(), default=None)

    def granted_here(self, key: LinkPartition, promised_at: float) -> None:
        """This proxy pushed it, and grants no more."""
        self._until[key] = max(self._until.get(key, 0.0), promised_at + LEASE_S + LEASE_MARGIN_S)

    def granted_elsewhere(self, keys: Iterable[LinkPartition], offset: int) -> None:
        """Others may have pushed these, until the change at an offset of the control log."""
        for key in keys:
            self._until[key], self._changed_at[key] = NOT_ENFORCED, offset

    def enforced(self, offset: int, now: float) -> None:
        """Every proxy has applied the change at an offset."""
        for key, changed_at in list(self._changed_at.items()):
            if changed_at <= offset:
                del self._changed_at[key]
                self._until[key] = now + LEASE_S + LEASE_MARGIN_S

    def expire(self, now: float) -> bool:
        """Forget those that have run out; whether they were the last, or those of the process before."""
        some, surely = bool(self._until), self.unsure and now > self._began + LEASE_S + LEASE_MARGIN_S
        self._until = {key: until for key, until in self._until.items() if now < until}
        self.unsure = self.unsure and not surely
        return surely or (some and not self._until)

    def running(self, place: TopicPartition, now: float) -> Iterator[LinkPartition]:
        """Over which links a partition may still be said to be In-Sync."""
        return (key for key, until in self._until.items() if key.place == place and now < until)

    def has_link(self, link_name: str) -> bool:
        return any(key.link == link_name for key in self._until)

    def has_topic(self, topic: str) -> bool:
        return any(key.topic == topic for key in self._until)
