"""One partition that follows over one connection: its log's state, and what keeps it from going on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.process import Clock
from isthmus_plugins.replication.follower.log import FollowerLog, LogState, Step, StopReason
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.connection import Peer
from isthmus_plugins.replication.traffic import uncounted
from isthmus_protocol.offsets_copy import COPY_PREFIX

DECISION_LATE_S: Final = 1.0
"""A marker waits for its decision for some milliseconds, as a rule."""
LAG_KNOWN_S: Final = 3.0
"""The leader end says once a second how fresh it is."""


class Appending(Protocol):
    """What appends the stream's batches: see ``Writers``."""

    def wake(self, stream: FollowerStream) -> None:
        """The stream has a batch to send."""

    async def leave(self, stream: FollowerStream) -> None:
        """Return when no request of the stream is under way, nor will be."""

    async def connect(self) -> None:
        """Have a connection open. Raises BrokerUnavailable."""

    @property
    def alive_since(self) -> float:
        """Monotonic seconds: since when the broker has not been restarted, as far as is known."""


class FollowerStream:
    """One partition that follows over one connection."""

    __slots__ = (
        "_awaits_decision_since",
        "_clock",
        "broker_id",
        "closed",
        "confirmed_before",
        "connection",
        "count",
        "end_age_ms",
        "end_age_noted",
        "end_seen_at",
        "follower_log",
        "found_end",
        "held",
        "knows_end",
        "link_name",
        "partition",
        "read_at",
        "refusals",
        "reported_stopped",
        "source_topic",
        "stream_id",
        "topic",
        "topic_id",
        "trouble",
        "under_way",
        "unverified",
        "writers",
    )

    def __init__(
        self,
        connection: Peer,
        stream_id: int,
        topic: str,
        topic_id: str,
        source_topic: str,
        partition: int,
        broker_id: int,
        follower_log: FollowerLog,
        writers: Appending,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self.connection = connection
        self.link_name = connection.link_name
        self.stream_id = stream_id
        self.topic = topic
        self.topic_id = topic_id
        self.source_topic = source_topic
        self.partition = partition
        self.broker_id = broker_id
        self.follower_log = follower_log
        self.writers = writers
        self.count: Callable[[int, int], None] = uncounted
        """Called with the batches and bytes that are appended."""
        self.confirmed_before = 0
        """The furthest that streams of the topic before this one have confirmed."""
        self.found_end: int | None = None
        """Where the log ended when that was looked at last, since the stream ended."""
        self.closed = False
        """The leader end pushes it no more."""
        self.held: StopReason | None = None
        """Why the partition's stream before this one stopped, until this one has come further."""
        self.trouble: StopReason | None = None
        """What keeps it from appending right now, if it is expected to pass."""
        self.read_at = float("-inf")
        """Monotonic seconds: the log ended then where ``follower_log`` says, or later where the last append ended."""
        self.refusals = 0
        self.unverified: int | None = None
        """The error that may say that the target verifies transactions, until it was asked whether it does."""
        self.under_way: dict[Step, asyncio.Task[None]] = {}
        """What is done before the next record can be written: see ``FollowerEnd.proceed``."""
        self.knows_end = False
        """Whether the leader end has said where the source's log ends."""
        self.reported_stopped = False
        self._awaits_decision_since: float | None = None
        self.end_age_ms = 0
        self.end_age_noted = clock.monotonic()
        self.end_seen_at: float | None = None
        """When the leader end last saw where the source's log ends; None: its version does not say, so it is what it
        said last."""

    @property
    def place(self) -> TopicPartition:
        return self.topic, self.partition

    @property
    def knows_position(self) -> bool:
        """Whether the log ends where it was read to end: its broker has not been restarted since then."""
        return self.follower_log.state is LogState.WRITING and self.read_at >= self.writers.alive_since

    @property
    def confirmed(self) -> int:
        """The furthest that the source was told of: the log ends before where the target has lost its end."""
        return max(self.confirmed_before, self.follower_log.end)

    @property
    def lacks(self) -> bool:
        """Whether the log ends before what was confirmed of it: the target has lost its end, and gets it again."""
        ends_at = self.follower_log.end if self.found_end is None else self.found_end
        return ends_at < self.confirmed

    @property
    def is_copy(self) -> bool:
        """Whether it is of a copy of an offsets topic."""
        return self.topic.startswith(COPY_PREFIX)

    @property
    def lag(self) -> int:
        """Offsets that are not here, as far as the source has reported."""
        return max(0, self.follower_log.source_end - self.follower_log.end)

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest record of the source that is not here, as far as the source has reported."""
        return self.end_age_ms / 1000 + self._clock.monotonic() - self.end_age_noted if self.lag else 0.0

    def note_source_end(self, end: int, age_ms: int) -> None:
        """The leader end says where the source's log ends, and how old the oldest record is that is not here.

        Records may come later than what was said after they were sent; the log of a stream never becomes shorter.
        """
        if self.knows_end and end < self.follower_log.source_end:
            return
        self.follower_log.source_end, self.knows_end = end, True
        self.end_age_ms, self.end_age_noted = age_ms, self._clock.monotonic()

    def lag_unknown_s(self, now: float) -> float | None:
        """Since when it is not known any more how far the source's log goes; None: it is."""
        seen_at = self.end_age_noted if self.end_seen_at is None else max(self.end_seen_at, self.end_age_noted)
        if now - seen_at <= LAG_KNOWN_S or (self.end_seen_at is None and not self.closed):
            return None
        return now - seen_at

    def note_next(self, step: Step) -> None:
        """What its log asks for now."""
        if step is not Step.AWAIT_DECISION:
            self._awaits_decision_since = None
        elif self._awaits_decision_since is None:
            self._awaits_decision_since = self._clock.monotonic()

    @property
    def reason(self) -> StopReason | None:
        """Why it does not go on, or has not come further than the stream before it."""
        return self.follower_log.reason or self.held or self.trouble or self._late_decision

    @property
    def _late_decision(self) -> StopReason | None:
        since = self._awaits_decision_since
        if since is None or self._clock.monotonic() - since < DECISION_LATE_S:
            return None
        why = reasons.decision_not_stored(self.follower_log.end)
        return StopReason(why.code, why.message)
