"""Vouches to follower ends for how fresh their lag is: once a second for all streams of a connection.

A stream's pushes say where the source's log ends. Where nothing is read of it for a while (a quota has the source's
broker answer nothing, the follower takes nothing more) the ends of the logs are read by themselves, and said. Where
that fails, too, the follower end hears that its lag is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.tasks import Tasks

INTERVAL_S: Final = 1.0
STALE_S: Final = 1.5
"""An idle stream is read twice a second."""
READ_TIMEOUT_S: Final = 1.0
CALL_TIMEOUT_S: Final = 5.0


class EndsSeen:
    """Of all streams of this leader end."""

    def __init__(self, context: PluginContext, streams: Callable[[], Iterable[LeaderStream]]) -> None:
        self._context = context
        self._clock = context.clock
        self._streams = streams
        self._tasks = Tasks("ends-seen", context.supervision)

    def start(self) -> None:
        self._tasks.keep("say", self._say_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    async def _say_for_ever(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            by_connection: dict[LinkConnection, list[LeaderStream]] = {}
            for stream in self._streams():
                if not stream.connection.lost:
                    by_connection.setdefault(stream.connection, []).append(stream)
            now = self._clock.monotonic()
            stale = {
                stream for those in by_connection.values() for stream in those if now - stream.end_seen_at > STALE_S
            }
            ends = await self._read({stream.key.place for stream in stale}) if stale else {}
            for connection, those in by_connection.items():
                if not connection.lost:
                    self._say(connection, those, stale, ends)

    async def _read(self, places: set[TopicPartition]) -> Mapping[TopicPartition, int]:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await self._context.cluster.high_watermarks(places)
        except (BrokerUnavailable, KafkaRefused, TimeoutError):
            return {}

    def _say(
        self,
        connection: LinkConnection,
        streams: Iterable[LeaderStream],
        stale: set[LeaderStream],
        ends: Mapping[TopicPartition, int],
    ) -> None:
        now = self._clock.monotonic()
        oldest, said, unknown = now, [], []
        for stream in streams:
            if stream not in stale:
                oldest = min(oldest, stream.end_seen_at)
            elif (end := ends.get(stream.key.place)) is None:
                unknown.append(stream.stream_id)
            else:
                stream.saw_end(end, now)
                said.append(calls.SourceEnd(stream.stream_id, stream.source_end, stream.age_ms(now)))
        question = calls.EndsSeen(int((now - oldest) * 1000), tuple(said), tuple(unknown))
        self._tasks.start("said", _answered(connection.begin_call(question)(CALL_TIMEOUT_S)))


async def _answered(answer: Awaitable[calls.Done]) -> None:
    try:
        await answer
    except (LinkRejected, LinkLost, TimeoutError):
        pass  # it is said again in a second; a peer of a version before this one does not ask how fresh its lag is
