"""Led partitions without a stream, as while a link is cut: how far their logs went on without the follower.

Their high watermarks are read once a second, so that what a failover would lose is seen while it grows. Of those whose
follower was never heard of the end alone is shown, and may be older.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.tasks import Tasks

INTERVAL_S: Final = 1.0
READ_AT_ONCE: Final = 1000
"""Of more partitions than that, those that were read longest ago come first."""
UNHEARD_AT_ONCE: Final = 100
"""Of partitions whose follower this process has not heard of: their ends say no lag, and those of thousands that are
being attached cost brokers time that these have better use for."""


class PartitionLag:
    """One partition. Times are monotonic seconds."""

    __slots__ = ("acked", "read_at", "since", "source_end", "topic_id")

    def __init__(self, topic_id: bytes) -> None:
        self.topic_id = topic_id
        self.acked: int | None = None
        """The follower's log end when it was heard of last; None: not in this process."""
        self.source_end: int | None = None
        self.since: float | None = None
        """When the oldest record that the follower lacks was first seen; None: it lacks none, as far as is known."""
        self.read_at = float("-inf")

    @property
    def lag(self) -> int | None:
        if self.acked is None or self.source_end is None:
            return None
        return max(0, self.source_end - self.acked)

    def age_s(self, now: float) -> float | None:
        """How long ago the oldest record that the follower lacks was first seen; None: the lag is not known."""
        if self.lag is None:
            return None
        return 0.0 if self.since is None else now - self.since

    def heard(self, stream: LeaderStream, now: float) -> None:
        """What a stream knew of it."""
        self.acked = stream.acked
        if stream.source_end:
            self.source_end = stream.source_end
            age_ms = stream.age_ms(now)
            self.since = now - age_ms / 1000 if age_ms else None
        self._note_since(now)

    def saw_end(self, high_watermark: int, now: float) -> None:
        self.source_end = high_watermark
        self._note_since(now)

    def _note_since(self, now: float) -> None:
        if not self.lag:
            self.since = None
        elif self.since is None:
            self.since = now


class LagWithoutStream:
    """Those of all links on the brokers that this proxy fronts."""

    def __init__(self, context: PluginContext, wanted: Callable[[], Mapping[LinkPartition, bytes]]) -> None:
        """``wanted``: the topic ids of all that have no stream now."""
        self._context = context
        self._clock = context.clock
        self._wanted = wanted
        self._tasks = Tasks("lag-without-stream", context.supervision)
        self._known: dict[LinkPartition, PartitionLag] = {}

    def start(self) -> None:
        self._tasks.keep("read", self._read_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def of(self, key: LinkPartition) -> PartitionLag | None:
        return self._known.get(key)

    def heard(self, stream: LeaderStream) -> None:
        """A stream of it begins or ends, and knows where the follower is."""
        self._entry(stream.key, stream.topic_id).heard(stream, self._clock.monotonic())

    def followed(self, key: LinkPartition) -> None:
        """It has a stream."""
        self._known.pop(key, None)

    def _entry(self, key: LinkPartition, topic_id: bytes) -> PartitionLag:
        entry = self._known.get(key)
        if entry is None or entry.topic_id != topic_id:
            entry = self._known[key] = PartitionLag(topic_id)
        return entry

    async def _read_for_ever(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            wanted = self._wanted()
            self._known = {key: entry for key, entry in self._known.items() if key in wanted}
            if wanted:
                await self._read(wanted)

    async def _read(self, wanted: Mapping[LinkPartition, bytes]) -> None:
        entries = {key: self._entry(key, topic_id) for key, topic_id in wanted.items()}
        heard, unheard = list[LinkPartition](), list[LinkPartition]()
        for key, entry in entries.items():
            (unheard if entry.acked is None else heard).append(key)
        stalest = [
            key
            for some, at_once in ((heard, READ_AT_ONCE), (unheard, UNHEARD_AT_ONCE))
            for key in heapq.nsmallest(at_once, some, key=lambda key: entries[key].read_at)
        ]
        try:
            ends = await self._context.cluster.high_watermarks({key.place for key in stalest})
        except (BrokerUnavailable, KafkaRefused):
            ends = {}  # what was known stays
        now = self._clock.monotonic()
        for key in stalest:
            entries[key].read_at = now
            if key.place in ends:
                entries[key].saw_end(ends[key.place], now)
