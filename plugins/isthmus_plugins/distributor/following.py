"""Follows logs of this cluster: reads all that stands in them, and goes on as they grow.

One task for each broker that leads something. Where leaders change, or a log has lost what was read of it, all is read
anew: nobody guesses which of what was read still stands.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from isthmus_control.model import Reason
from isthmus_plugins.cluster import BrokerUnavailable, Fetched, FetchPartition, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.distributor.places import log_starts
from isthmus_plugins.distributor.reads import REQUEST_BYTES, WAIT_MS, by_leader
from isthmus_plugins.distributor.reasons import MALFORMED_BATCH, SOURCE_UNAVAILABLE, Waits
from isthmus_plugins.process import PluginContext
from isthmus_protocol.records import BatchError, BatchHeader, walk
from isthmus_protocol.transactions import AbortedTransactions

log = logging.getLogger("isthmus_plugins.distributor")

LOOK_S: Final = 5.0
"""How often topics, and who leads them, are looked at."""
RETRY_S: Final = 0.5


class Log:
    """One partition, as far as it is read."""

    def __init__(self, start: int, position: int) -> None:
        self.start = start
        """Where the log begins, as far as it is known."""
        self.begun = position
        """What stands before was not read."""
        self.position = position
        """Where to go on."""
        self.until = position
        """Where it ended in its leader's log when reading began: the high watermark of a new leader may be behind what
        was acked, and so may be what is committed."""
        self.end: int | None = None
        """Up to where it can be read, as the broker said last."""
        self.read_at: float | None = None
        """Monotonic seconds: what stood in it then was read; None: not all that stood there in the beginning was."""
        self.read_at_ms = 0
        """The same by the wall clock."""
        self.broken: str | None = None
        """Why it is not read further."""


L = TypeVar("L", bound=Log)


class TopicsChanged(Exception):
    """Other topics, partitions or leaders."""


class Following(Generic[L]):
    """Some logs. :meth:`topics`, :meth:`begin` and :meth:`take` are a subclass's."""

    committed = False
    """Whether what was not committed, or was aborted, is left out."""

    def __init__(self, context: PluginContext, lane: str) -> None:
        self._context = context
        self._cluster = context.cluster
        self._lane = lane
        self._followed = False
        self.logs: dict[TopicPartition, L] = {}
        self.waits: Reason | None = None

    @property
    def loaded(self) -> bool:
        """Whether all was read that stood in the logs when they were begun."""
        return self._followed and all(each.read_at is not None for each in self.logs.values())

    @property
    def broken(self) -> Reason | None:
        """Which log is not read further, and why."""
        broken = ((place, one.broken) for place, one in self.logs.items() if one.broken is not None)
        return next((Reason(MALFORMED_BATCH, f"{name}-{number}, {why}") for (name, number), why in broken), None)

    async def topics(self) -> Mapping[str, TopicInfo]:
        """Those to follow, as they are now. Raises BrokerUnavailable, KafkaRefused."""
        raise NotImplementedError

    async def begin(self, topics: Mapping[str, TopicInfo]) -> dict[TopicPartition, L]:
        """Each of their partitions, at where its reading begins. Raises BrokerUnavailable, KafkaRefused."""
        raise NotImplementedError

    async def take(self, place: TopicPartition, one: L, batch: memoryview, header: BatchHeader) -> None:
        """A batch, each once and in order. Raises BatchError: nothing more of this log is read."""
        raise NotImplementedError

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._follow()
            except TopicsChanged:
                continue
            except Waits as waits:
                self._wait(waits.reason)
            except (BrokerUnavailable, KafkaRefused) as error:
                self._wait(Reason(SOURCE_UNAVAILABLE, str(error)))
            finally:
                self._followed = False
                self.logs = {}
            await asyncio.sleep(RETRY_S)

    def _wait(self, reason: Reason) -> None:
        if self.waits is None:
            log.warning("logs not followed", extra={"lane": self._lane, "error": reason.message})
        self.waits = reason

    async def _follow(self) -> None:
        topics = await self.topics()
        logs = await self.begin(topics)
        await self._find_ends(logs)
        asked = by_leader(topics, {place: one.position for place, one in logs.items()})
        self.logs, self._followed, self.waits = logs, True, None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._look(_as_led(topics)), name=f"{self._lane}/look")
                for leader, asked_of in asked.items():
                    group.create_task(self._read(leader, asked_of), name=f"{self._lane}/broker-{leader}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _find_ends(self, logs: Mapping[TopicPartition, L]) -> None:
        ends = await self._cluster.log_ends(logs.keys())
        for place, one in logs.items():
            if place not in ends:
                raise BrokerUnavailable(f"where {place[0]}-{place[1]} ends cannot be read now")
            one.until = ends[place]
            if one.position > one.until:  # it has lost its end: who knows what of it was wanted
                one.begun = one.position = one.start

    async def _look(self, led: object) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if _as_led(await self.topics()) != led:
                raise TopicsChanged

    async def _read(self, leader: int, asked: dict[TopicPartition, FetchPartition]) -> None:
        connection = await self._cluster.fetch_connection(leader, self._lane)
        places = {(each.topic_id, each.partition): place for place, each in asked.items()}
        clock = self._context.clock
        try:
            while asked:
                at, at_ms = clock.monotonic(), int(clock.time() * 1000)
                logs = {place: self.logs[place] for place in asked}
                for place, one in logs.items():
                    if asked[place].offset != one.position:
                        asked[place] = asked[place]._replace(offset=one.position)
                for found in await connection.fetch(
                    list(asked.values()), WAIT_MS, REQUEST_BYTES, read_committed=self.committed, only_changes=True
                ):
                    place = places[found.topic_id, found.partition]
                    if found.error_code:
                        raise BrokerUnavailable(f"{place[0]}-{place[1]}: error {found.error_code}")
                    await self._found(place, logs[place], found)
                for place, one in logs.items():
                    if self.logs[place] is not one:
                        continue  # it is read again from elsewhere
                    if one.broken is not None:
                        del asked[place]
                    elif one.end is not None and one.position >= max(one.end, one.until):
                        one.read_at, one.read_at_ms = at, at_ms
        finally:
            connection.close()  # the broker's session knows what it has said, and whoever reads next does not

    async def only(self, name: str) -> Mapping[str, TopicInfo]:
        """One topic, which has to be there: without it nothing is known. Raises BrokerUnavailable, KafkaRefused."""
        topics = await self._cluster.topics_named([name])
        if not topics:
            raise BrokerUnavailable(f"there is no topic {name} now")
        return topics

    async def log_starts(self, topics: Mapping[str, TopicInfo]) -> dict[TopicPartition, int]:
        """Where logs begin. Raises BrokerUnavailable, KafkaRefused."""
        places = [(name, partition) for name, info in topics.items() for partition in range(len(info.partitions))]
        return await log_starts(self._cluster, places)

    async def _found(self, place: TopicPartition, one: L, found: Fetched) -> None:
        one.start = found.log_start
        one.end = found.last_stable_offset if self.committed else found.high_watermark
        aborted = AbortedTransactions(found.aborted)
        try:
            for start, end, header in walk(found.records):
                is_aborted = aborted.hold(header)
                if header.next_offset <= one.position:
                    continue
                if not (self.committed and (is_aborted or header.is_control)):
                    await self.take(place, one, found.records[start:end], header)
                one.position = header.next_offset
        except BatchError as error:
            one.broken, one.read_at = f"at or behind offset {one.position}: {error}", None
            log.error("log not followed", extra={"topic": place[0], "partition": place[1], "error": one.broken})
        await asyncio.sleep(0)  # a long log is read without holding up the sessions


def _as_led(topics: Mapping[str, TopicInfo]) -> object:
    return {name: (info.topic_id, [each.leader_epoch for each in info.partitions]) for name, info in topics.items()}
