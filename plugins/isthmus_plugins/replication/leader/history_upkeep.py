"""Keeps what is recorded of records' origins from growing for ever: lists of topics that are gone, and old epochs.

Rarely, by the first proxy of the cluster by name that has a lease; where two do, the second has nothing left to record.
A list goes when its topic is gone for certain (``deleted_topics``), whichever way it went. Leader epochs go that lie
below the start of the partition's log: two logs are compared behind the higher of their starts. Should a log start
lower later (another replica had kept more), what was dropped there is unknown, and not absent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from isthmus_control.commands import Body, DropEpochs, ForgetHistories, GoneTopic, TopicOffsets
from isthmus_control.levels import ORIGINS
from isthmus_control.model import TopicHistory, TopicState
from isthmus_control.origins import PartitionOrigins, TopicOrigins, without_epochs_below
from isthmus_control.outcome import Rejected
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.deleted_topics import DeletedTopics
from isthmus_plugins.replication.link.connection import LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.tasks import Tasks, some_at_once

log = logging.getLogger("isthmus_plugins.replication")

LOOK_INTERVAL_S: Final = 600.0
ASK_INTERVAL_S: Final = 5.0
ASKED_S: Final = 120.0
"""How long it is asked for topics until they are gone for longer than a lease."""
EPOCHS_KEPT: Final = 16
"""Of a partition: with fewer, nobody asks where its log starts."""
AT_ONCE: Final = 200
"""Log starts that are asked for at the same time: they meet in few requests."""
ENTRIES_AT_ONCE: Final = 5_000


class HistoryUpkeep(Part):
    """What this proxy has the control log forget."""

    def __init__(self, context: PluginContext, deleted: DeletedTopics) -> None:
        self._context = context
        self._deleted = deleted
        self._tasks = Tasks("history-upkeep", context.supervision)

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            state = self._context.control.state
            if state.level < ORIGINS or min(state.proxies, default="") != self._context.proxy_name:
                continue
            try:
                await self.look()
            except (BrokerUnavailable, KafkaRefused, LinkRejected) as error:
                log.info("histories not looked at", extra={"detail": str(error)})

    async def look(self) -> None:
        """Have forgotten what is of no use any more. Raises BrokerUnavailable, KafkaRefused, LinkRejected."""
        topics = {each.id_text: each for each in (await self._context.cluster.topics()).values()}
        await self._drop_epochs(topics)
        await self._forget(topics)

    async def _forget(self, there: Mapping[str, TopicInfo]) -> None:
        missing = self._recorded().keys() - there.keys()
        began, gone = self._context.clock.monotonic(), set[str]()
        while missing - gone and self._context.clock.monotonic() < began + ASKED_S:
            gone = await self._deleted.certain(missing)
            if missing - gone:
                await asyncio.sleep(ASK_INTERVAL_S)
        recorded = self._recorded()
        forgotten = [GoneTopic(recorded[topic_id], topic_id) for topic_id in sorted(gone & recorded.keys())]
        for first in range(0, len(forgotten), ENTRIES_AT_ONCE):
            await self._append(ForgetHistories(tuple(forgotten[first : first + ENTRIES_AT_ONCE])))

    def _recorded(self) -> dict[str, str]:
        """By topic id: topics of which something is recorded, and that no link or truncation has a claim to."""
        state = self._context.control.state
        claimed = {
            record.topic_id for record in state.follower_topics.values() if record.state is not TopicState.DETACHED
        }
        lists: list[TopicOrigins | TopicHistory] = [*state.origins.values(), *state.histories.values()]
        return {
            each.topic_id: each.topic
            for each in lists
            if each.topic not in state.truncations and each.topic_id not in claimed
        }

    async def _drop_epochs(self, there: Mapping[str, TopicInfo]) -> None:
        many = {
            (known.topic, partition): (known.topic_id, origins)
            for known in self._context.control.state.origins.values()
            if known.topic_id in there
            for partition, origins in known.partitions.items()
            if sum(len(each.epochs) for each in origins.ranges) > EPOCHS_KEPT
        }
        places = sorted(many)
        starts = await some_at_once(AT_ONCE, self._log_start, places)
        old = [(place, start) for place, start in zip(places, starts, strict=True) if _drops(many[place][1], start)]
        for first in range(0, len(old), ENTRIES_AT_ONCE):
            below: dict[tuple[str, str], dict[int, int]] = {}
            for (topic, partition), start in old[first : first + ENTRIES_AT_ONCE]:
                below.setdefault((topic, many[topic, partition][0]), {})[partition] = start
            await self._append(DropEpochs(tuple(TopicOffsets(*topic, offsets) for topic, offsets in below.items())))

    async def _log_start(self, place: TopicPartition) -> int:
        return await self._context.cluster.log_start(*place)

    async def _append(self, body: Body) -> None:
        outcome = await self._context.control.append(body)
        if isinstance(outcome, Rejected):  # somebody was faster: it is looked again
            log.info("histories not forgotten", extra={"detail": outcome.message})


def _drops(origins: PartitionOrigins, log_start: int) -> bool:
    return without_epochs_below(origins.ranges, log_start) != origins.ranges
