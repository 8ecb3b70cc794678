"""Reads where partitions end. One that cannot be read keeps no other waiting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

OnEnds = Callable[[Mapping[TopicPartition, int | None]], None]
"""Where some partitions end; None: there is no such partition any more."""

TOGETHER_S: Final = 0.3
"""How long all are read at once; what is not read by then is read one by one."""
ALONE_S: Final = 1.0
RETRY_S: Final = 0.05


class LogEndReader:
    """The readings under way."""

    def __init__(self, context: PluginContext, owner: str) -> None:
        self._context = context
        self._tasks = Tasks(f"{owner}-ends", context.supervision)
        self._alone: dict[TopicPartition, list[OnEnds]] = {}
        """Those that are read one by one, and who waits for the next reading of them."""

    async def stop(self) -> None:
        await self._tasks.close()

    async def read(self, places: Collection[TopicPartition], on_ends: OnEnds) -> None:
        """Read where partitions end now. Those that cannot be read at once come after it has returned."""
        together = [place for place in sorted(set(places)) if place not in self._alone]
        found: Mapping[TopicPartition, int] = {}
        try:
            async with asyncio.timeout(TOGETHER_S):
                found = await self._context.cluster.log_ends(together) if together else {}
        except (TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            log.warning("ends of partitions not read", extra={"detail": str(error)})
        if found:
            on_ends(found)
        for place in set(places) - found.keys():
            if place in self._alone:
                self._alone[place].append(on_ends)
            else:
                self._alone[place] = [on_ends]
                self._tasks.keep(f"alone-{place[0]}-{place[1]}", partial(self._read_alone, place))

    async def _read_alone(self, place: TopicPartition) -> None:
        while self._alone[place]:
            waiting, self._alone[place] = self._alone[place], []  # who comes meanwhile may need a later end
            try:
                known, end = await self._end(place)
                while known and waiting:
                    waiting.pop(0)({place: end})
            finally:
                self._alone[place][:0] = waiting
            if not known:
                await asyncio.sleep(RETRY_S)
        del self._alone[place]

    async def _end(self, place: TopicPartition) -> tuple[bool, int | None]:
        """(Whether it is known, end; None: it is gone)."""
        try:
            async with asyncio.timeout(ALONE_S):
                topic = await self._context.cluster.topic(place[0])
                if topic is None or place[1] >= len(topic.partitions):
                    return True, None
                end = (await self._context.cluster.log_ends([place])).get(place)
                return end is not None, end
        except (TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            log.warning("end of a partition not read", extra={"detail": f"{place[0]}-{place[1]}: {error}"})
            return False, None
