"""One partition that is pushed to its follower: how far it was read, sent and confirmed, and which read has it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Final

from isthmus_control.model import OffsetsCopy
from isthmus_plugins.cluster import FetchPartition
from isthmus_plugins.process import Clock
from isthmus_plugins.replication.leader.tombstone_window import TombstoneWindow
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.traffic import uncounted
from isthmus_protocol.records import BatchHeader

REOPEN_DELAY_S: Final = 0.5
STOPPED_RETRY_S: Final = 10.0
"""A stream that stopped for a reason of its data is tried again: the follower end may have been upgraded."""
PARTITION_BYTES_MAX: Final = 512 * 1024
IN_FLIGHT_BYTES_MIN: Final = 1024 * 1024
IN_FLIGHT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of one stream, sent and not confirmed: the least lets one read travel while another is appended, and the farther the
peer is, the more. The follower end holds no more of it (and of one more read)."""
STREAM_BYTES_PER_S: Final = 100 * 1024 * 1024
"""What a stream can carry over any distance, until it has the most in flight."""
PEER_IN_FLIGHT_BYTES_MAX: Final = 64 * 1024 * 1024
"""The same of all streams over one connection. A stream may have its share all the same: large batches of others are
long on their way, and clients of this one may wait for its acks."""
SHARE_BYTES: Final = 32 * 1024
"""That share, and what is read of a busy stream at a time while others have too much on their way."""
SEEN_INTERVAL_S: Final = 0.05
"""The age of what the follower lacks is known to this."""
STABLES_MAX: Final = 32
CLOSE_MS: Final = 500
"""A follower is close when what it lacks is not older."""


class Lane(enum.Enum):
    """The reads of a tail that are under way at the same time."""

    IDLE = "idle"
    BUSY = "busy"
    READ_COMMITTED = "read-committed"
    OFFSETS = "offsets"


class Wait(enum.Enum):
    """Why a stream is read no further: the first of these that holds."""

    PEER = "peer"
    """Too much is on its way."""
    DECISION = "decision"
    """What comes next waits for the decision of its transaction."""
    DELETIONS = "deletions"
    """Deletions that the follower may lack are being reported to it."""
    ORIGINS = "origins"
    """The follower is being told where the next records come from."""
    LOG_START = "log start"
    """The log's start is being read: it has passed the next offset."""
    END = "end"
    """Nothing more can be read: the stream ends when the follower has all before that."""


class Flow:
    """Bytes on their way over one connection, of all its streams; the peer answers after ``round_trip_s``."""

    __slots__ = ("in_flight_bytes", "round_trip_s", "stream_bytes_max")

    def __init__(self, round_trip_s: float = 0.0) -> None:
        self.in_flight_bytes = 0
        self.round_trip_s = round_trip_s
        self.stream_bytes_max = min(IN_FLIGHT_BYTES_MIN + int(round_trip_s * STREAM_BYTES_PER_S), IN_FLIGHT_BYTES_MAX)
        """Of each of them."""


class LeaderStream:
    """One partition that is pushed to its follower."""

    __slots__ = (
        "_clock",
        "_first_end",
        "_in_flight",
        "_seen",
        "_stables",
        "_wanted",
        "acked",
        "at_end",
        "blocked",
        "broker_id",
        "busy",
        "compacted",
        "connection",
        "copy",
        "count",
        "doubted",
        "doubting",
        "end_seen_at",
        "flow",
        "in_flight_bytes",
        "key",
        "lacking_since",
        "last_read",
        "late_marker",
        "leader_epoch",
        "next_offset",
        "read_committed",
        "read_from",
        "remote_topic",
        "seeking",
        "sent_bounds",
        "source_end",
        "stable",
        "stirred",
        "stream_id",
        "telling",
        "tells_origins",
        "told_at",
        "told_epoch",
        "told_until",
        "tombstone_window",
        "topic_id",
        "undecided",
    )

    def __init__(
        self,
        key: LinkPartition,
        topic_id: bytes,
        remote_topic: str,
        broker_id: int,
        leader_epoch: int,
        connection: LinkConnection,
        stream_id: int,
        flow: Flow,
        clock: Clock,
        copy: OffsetsCopy | None = None,
        tombstone_window: TombstoneWindow | None = None,
    ) -> None:
        self.key = key
        self._clock = clock
        self.topic_id = topic_id
        self.remote_topic = remote_topic
        self.broker_id = broker_id
        self.leader_epoch = leader_epoch
        self.connection = connection
        self.stream_id = stream_id
        self.flow = flow
        self.copy = copy
        """The form in which an offsets topic leaves; None for any other topic."""
        self.tombstone_window = TombstoneWindow() if tombstone_window is None else tombstone_window
        self.count: Callable[[int, int], None] = uncounted
        """Called with the batches and bytes that are sent."""
        self.doubted = 0
        """The follower knows that deletions may be missing before this."""
        self.doubting = False
        """That is being reported to it."""
        self.tells_origins = False
        """The follower is told where records come from, before they are pushed."""
        self.told_at = -1
        """As of which command of the control log it was told that last."""
        self.told_epoch = -1
        self.told_until = -1.0
        """It was told of batches of that epoch that begin before this offset."""
        self.telling = False
        """It is being told of the next one."""
        self.next_offset = 0
        """The next offset to read."""
        self.read_from = 0
        """What the follower was sent ends here: between this and ``next_offset`` the log has nothing."""
        self.acked = 0
        """The follower's confirmed log end."""
        self.source_end = 0
        self.end_seen_at = clock.monotonic()
        """When it was last asked where the source's log ends, and that was answered."""
        self.lacking_since: float | None = None
        """When the oldest record was first seen that the follower lacked as the stream was opened, if one was."""
        self.sent_bounds: tuple[int, int] | None = None
        """The log's start and end, as they were sent last."""
        self.compacted = False
        """Whether the cleaner may take records and markers out of the log."""
        self.read_committed = False
        """Whether records of transactions that have ended are to be read next, of a compacted log."""
        self.seeking = False
        """The log's start is being read: it has passed the next offset."""
        self.undecided = False
        """What comes next waits for the decision of its transaction."""
        self.late_marker: int | None = None
        """See :class:`~isthmus_plugins.replication.partitions.OrderedPlace`."""
        self.at_end = False
        """Whether the last read came to the high watermark."""
        self.busy = True
        self.stirred = False
        """It is busy from the next read of busy ones on: the one that is under way lacks it."""
        self.last_read = clock.monotonic()
        """When records were last read."""
        self.blocked: Callable[[], None] | None = None
        """Nothing more can be read. Called when the follower has all before that: it ends the stream."""
        self.in_flight_bytes = 0
        self._wanted: FetchPartition | None = None
        self._in_flight: deque[tuple[int, int, float]] = deque()
        """(end, bytes, when it was sent) of what is not confirmed."""
        self._seen: deque[tuple[int, float]] = deque()
        self.stable = -1
        """Transactions with data below this have ended, and the follower has their markers; -1: not known yet."""
        self._stables: list[tuple[int, int]] = []
        """(high watermark, last stable offset) of reads, until the follower has all of what was read."""
        self._first_end: int | None = None
        """Where the source's log ended when it was read first: how old what is below that is nobody knows."""

    def wanted(self) -> FetchPartition:
        """What is to be read next; the same object as long as it is the same."""
        wanted = self._wanted
        bytes_max = SHARE_BYTES if self.busy and self._clogged else PARTITION_BYTES_MAX
        if wanted is None or wanted.offset != self.next_offset or wanted.bytes_max != bytes_max:
            wanted = self._wanted = FetchPartition(
                self.topic_id, self.key.partition, self.next_offset, bytes_max, self.leader_epoch
            )
        return wanted

    @property
    def _clogged(self) -> bool:
        """Whether the streams of the connection have as much on their way as they may, or the peer takes no more."""
        return self.flow.in_flight_bytes >= PEER_IN_FLIGHT_BYTES_MAX or not self.connection.writable

    def is_told_of(self, header: BatchHeader) -> bool:
        """Whether it is known without a look that the follower was told where a batch comes from."""
        return not self.tells_origins or (
            header.leader_epoch == self.told_epoch and header.base_offset < self.told_until
        )

    def look_again(self) -> None:
        """What is recorded of where records come from is something else."""
        self.told_epoch = -1

    def opened(self, end_offset: int) -> None:
        self.next_offset = self.acked = self.read_from = end_offset

    def seek(self, offset: int) -> None:
        """The log has nothing before ``offset`` any more."""
        self.next_offset = offset
        self.seeking = False
        self.blocked = None

    @property
    def lane(self) -> Lane:
        """The read that has the stream."""
        if self.copy is not None:
            return Lane.OFFSETS
        if self.read_committed:
            return Lane.READ_COMMITTED
        return Lane.BUSY if self.busy else Lane.IDLE

    def saw_end(self, high_watermark: int, now: float) -> None:
        """The source's log reaches to ``high_watermark`` now."""
        first_seen = now
        if self._first_end is None:
            self._first_end = high_watermark
            if self.lacking_since is not None:
                first_seen = self.lacking_since
        if high_watermark <= self.source_end:
            return
        self.source_end = high_watermark
        if self._seen and now - self._seen[-1][1] < SEEN_INTERVAL_S:
            self._seen[-1] = (high_watermark, self._seen[-1][1])
        else:
            self._seen.append((high_watermark, first_seen))

    def saw_stable(self, high_watermark: int, last_stable_offset: int) -> bool:
        """The source's last stable offset when its log reached to ``high_watermark``, which the markers are below.

        A few of these are enough: of many, some are taken for known later than they were. Returns whether ``stable``
        is another one now.
        """
        before = self.stable
        if len(self._stables) > STABLES_MAX:
            self._stables.pop()
        self._stables.append((high_watermark, last_stable_offset))
        self._reach_stable()
        return self.stable != before

    def _reach_stable(self) -> None:
        while self._stables and self._stables[0][0] <= self.acked:
            self.stable = max(self.stable, self._stables.pop(0)[1])

    def age_ms(self, now: float) -> int:
        """How long ago the oldest record that the follower lacks was first seen, 0 if it lacks none."""
        while self._seen and self._seen[0][0] <= self.acked:
            self._seen.popleft()
        return int((now - self._seen[0][1]) * 1000) if self._seen else 0

    def is_close(self, now: float) -> bool:
        """Whether the follower lacks nothing but what came just now."""
        caught_up = self._first_end is not None and self.acked >= self._first_end
        return caught_up and self.age_ms(now) <= CLOSE_MS

    def sent(self, next_offset: int, size: int) -> None:
        self.next_offset = next_offset
        self._in_flight.append((next_offset, size, self._clock.monotonic()))
        self.in_flight_bytes += size
        self.flow.in_flight_bytes += size
        self.count(1, size)

    def sent_at(self, end_offset: int) -> float | None:
        """When the oldest was sent that the follower has with ``end_offset``; None: nothing was."""
        oldest = self._in_flight[0] if self._in_flight else None
        return oldest[2] if oldest is not None and oldest[0] <= end_offset else None

    def confirmed(self, end_offset: int) -> None:
        self.acked = max(self.acked, end_offset)
        self._reach_stable()
        while self._in_flight and self._in_flight[0][0] <= end_offset:
            size = self._in_flight.popleft()[1]
            self.in_flight_bytes -= size
            self.flow.in_flight_bytes -= size

    def closed(self) -> None:
        """Nothing of it is on its way any more."""
        self._in_flight.clear()
        self.flow.in_flight_bytes -= self.in_flight_bytes
        self.in_flight_bytes = 0

    @property
    def wait(self) -> Wait | None:
        """Why it is read no further for now; None: it is."""
        in_flight = self.in_flight_bytes
        if in_flight >= self.flow.stream_bytes_max or (in_flight >= SHARE_BYTES and self._clogged):
            return Wait.PEER
        if self.undecided:
            return Wait.DECISION
        if self.doubting:
            return Wait.DELETIONS
        if self.telling:
            return Wait.ORIGINS
        if self.seeking:
            return Wait.LOG_START
        return None if self.blocked is None else Wait.END

    @property
    def lag(self) -> int:
        return max(0, self.source_end - self.acked)
