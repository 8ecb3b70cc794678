"""What a synchronous link pushes of a partition, whatever it is: records of a topic, or what groups have committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_protocol.records import BatchHeader, Frame


class SyncPlace(Protocol):
    """One partition that is pushed, and how much of it the other side has."""

    @property
    def key(self) -> LinkPartition: ...

    @property
    def topic_id(self) -> bytes: ...

    @property
    def leader_epoch(self) -> int:
        """Of the source, under which it is read."""

    @property
    def connection(self) -> LinkConnection: ...

    @property
    def acked(self) -> int:
        """The other side has all before this."""

    def is_close(self, now: float) -> bool:
        """Whether the other side lacks nothing but what came just now."""


class OrderedPlace(SyncPlace, Protocol):
    """One whose commit markers wait for the decisions that they carry out."""

    undecided: bool
    late_marker: int | None
    """The offset of the commit marker that it waits at for longer than that takes; None: at none."""


class GroupPlaces(Protocol):
    """Partitions of the offsets topic whose groups are led over synchronous links: :class:`GroupLeader`."""

    on_confirmed: Callable[[SyncPlace], None]
    """Called when the other side has more."""
    pushed: asyncio.Event
    """Set when more is pushed to the other side."""

    @property
    def partitions(self) -> int:
        """Of the offsets topic; 0 while it is not known."""

    @property
    def topic_id(self) -> bytes:
        """Of the offsets topic; empty while it is not known."""

    def places(self) -> Iterable[LinkPartition]:
        """All that this proxy is to push."""

    def place(self, key: LinkPartition) -> SyncPlace | None:
        """One that is pushed, from when its follower had all of it once."""

    def confirmed(self, key: LinkPartition) -> int:
        """Up to where the other side has one that is about to be pushed anew, -1 if that is not known."""

    def leader_epoch(self, partition: int) -> int:
        """The latest that is known, -1 for none."""

    def read_end(self, partition: int) -> int:
        """Up to where one is read, -1 for not at all."""

    may_pass: Callable[[OrderedPlace, BatchHeader, Frame], bool]
    """Whether a transactional batch may be pushed now. Asked again after :meth:`resume`."""

    def is_pushed(self, place: object) -> bool:
        """Whether a place is pushed still."""

    def resume(self, partition: int) -> None:
        """Look again at what may not have been pushed."""


class LinkPartition(NamedTuple):
    """A partition of this cluster's, as one of the links that push it: link, and topic, by their names here."""

    link: str
    topic: str
    partition: int

    @property
    def place(self) -> TopicPartition:
        return self.topic, self.partition
