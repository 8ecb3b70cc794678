"""One partition of the offsets topic that is pushed to a follower end over one connection."""

from __future__ import annotations

from collections import deque

from isthmus_plugins.replication.leader.stream import CLOSE_MS, SEEN_INTERVAL_S
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol.offsets_log import OffsetKey


class PushedPartition:
    """How far a partition was pushed and confirmed: a :class:`~isthmus_plugins.replication.partitions.SyncPlace`."""

    __slots__ = (
        "_seen",
        "acked",
        "connection",
        "key",
        "late_marker",
        "leader_epoch",
        "pending",
        "pushed",
        "topic_id",
        "undecided",
        "undone",
    )

    def __init__(self, key: LinkPartition, topic_id: bytes, leader_epoch: int, connection: LinkConnection) -> None:
        self.key = key
        self.topic_id = topic_id
        self.leader_epoch = leader_epoch
        self.connection = connection
        self.pushed = -1
        """What the log adds up to at this offset was pushed."""
        self.acked = -1
        """The follower's coordinators have that of this offset; -1: it has not had the whole of it once."""
        self.pending: dict[tuple[int, OffsetKey], None] = {}
        """Commits of open transactions that are to be pushed, by producer id."""
        self.undone = False
        """Some transaction of theirs was aborted, or a committed offset went back, and that is to be pushed."""
        self.undecided = False
        """The decision is not known to be on the other side that a commit marker carries out; it waits for that."""
        self.late_marker: int | None = None
        """See :class:`~isthmus_plugins.replication.partitions.OrderedPlace`."""
        self._seen: deque[tuple[int, float]] = deque()

    def saw(self, offset: int, now: float) -> None:
        """The log was read up to ``offset``."""
        if self._seen and now - self._seen[-1][1] < SEEN_INTERVAL_S:
            self._seen[-1] = offset, self._seen[-1][1]
        elif not self._seen or self._seen[-1][0] < offset:
            self._seen.append((offset, now))

    def confirmed(self, offset: int) -> None:
        self.acked = max(self.acked, offset)

    def age_ms(self, now: float) -> int:
        """How long ago the oldest of what the other side lacks was read, 0 if it lacks nothing."""
        while self._seen and self._seen[0][0] <= self.acked:
            self._seen.popleft()
        return int((now - self._seen[0][1]) * 1000) if self._seen else 0

    def is_close(self, now: float) -> bool:
        """Whether the other side lacks nothing but what came just now."""
        return self.age_ms(now) <= CLOSE_MS
