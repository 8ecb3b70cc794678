"""One partition that follows over one connection: its log's state, and what keeps it from going on."""

from __future__ import annotations

import asyncio
from typing import Protocol

from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.process import Clock
from isthmus_plugins.replication.follower.log import FollowerLog, Step, StopReason
from isthmus_plugins.replication.link.connection import Peer
from isthmus_protocol.offsets_copy import COPY_PREFIX


class Appending(Protocol):
    """What appends the stream's batches: see ``Writers``."""

    def wake(self, stream: FollowerStream) -> None:
        """The stream has a batch to send."""

    async def leave(self, stream: FollowerStream) -> None:
        """Return when no request of the stream is under way, nor will be."""


class FollowerStream:
    """One partition that follows over one connection."""

    __slots__ = (
        "_clock",
        "broker_id",
        "closed",
        "connection",
        "end_age_ms",
        "end_age_noted",
        "follower_log",
        "held",
        "knows_end",
        "link_name",
        "partition",
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
        self.closed = False
        """The leader end pushes it no more."""
        self.held: StopReason | None = None
        """Why the partition's stream before this one stopped, until this one has come further."""
        self.trouble: StopReason | None = None
        """What keeps it from appending right now, if it is expected to pass."""
        self.refusals = 0
        self.unverified: int | None = None
        """The error that may say that the target verifies transactions, until it was asked whether it does."""
        self.under_way: dict[Step, asyncio.Task[None]] = {}
        """What is done before the next record can be written: see ``FollowerEnd.proceed``."""
        self.knows_end = False
        """Whether the leader end has said where the source's log ends."""
        self.reported_stopped = False
        self.end_age_ms = 0
        self.end_age_noted = clock.monotonic()

    @property
    def place(self) -> TopicPartition:
        return self.topic, self.partition

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

    @property
    def reason(self) -> StopReason | None:
        """Why it does not go on, or has not come further than the stream before it."""
        return self.follower_log.reason or self.held or self.trouble
