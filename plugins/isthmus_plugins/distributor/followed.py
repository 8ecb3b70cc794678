"""What is followed of this cluster for groups' committed offsets: commits, times that clusters say, timestamps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo, TopicPartition
from isthmus_plugins.distribution.copy_flags import FlagsError, read_flags
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.group_times import GroupTime, MalformedTime, counts, origin_of, read_key, unmarked
from isthmus_plugins.distribution.kept import TIMES_TOPIC
from isthmus_plugins.distribution.times import LeastTimestamps
from isthmus_plugins.distributor.following import Following, Log
from isthmus_plugins.process import PluginContext
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, Commit, Group, OffsetKey, OffsetsLog
from isthmus_protocol.record_codec import decode_records, timestamps
from isthmus_protocol.records import BatchHeader

log = logging.getLogger("isthmus_plugins.distributor")

LATEST_TIME: Final = -3
"""In the place of a time."""
ASIDE_BYTES: Final = 32 * 1024
"""Batches that are looked into beside the loop."""


class CommitsLog(Log):
    """A partition of the offsets topic."""

    def __init__(self, start: int, wanted: Callable[[str], bool]) -> None:
        super().__init__(start, start)
        self.offsets = OffsetsLog(wanted)


class Commits(Following[CommitsLog]):
    """What groups have committed here."""

    def __init__(self, context: PluginContext, wanted: Callable[[str], bool]) -> None:
        """``wanted(group)``."""
        super().__init__(context, "tree-commits")
        self.follows = wanted

    async def topics(self) -> Mapping[str, TopicInfo]:
        return await self.only(OFFSETS_TOPIC)

    async def begin(self, topics: Mapping[str, TopicInfo]) -> dict[TopicPartition, CommitsLog]:
        starts = await self.log_starts(topics)
        return {place: CommitsLog(start, self.follows) for place, start in starts.items()}

    async def take(self, place: TopicPartition, one: CommitsLog, batch: memoryview, header: BatchHeader) -> None:
        one.offsets.take(batch, header)

    def own(self, group: str | None = None) -> dict[OffsetKey, Commit]:
        """What groups, or one, have committed themselves, and no offset committer; but for what cannot be read."""
        return {
            OffsetKey(name, *place): commit
            for name, found in self._groups(group)
            for place, commit in found.offsets.items()
            if place not in found.unreadable and not unmarked(commit.metadata)[0]
        }

    def offsets(self, group: str, places: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Where a group goes on in partitions, whoever has committed that; but for what cannot be read."""
        return {
            place: found.offsets[place].offset
            for _, found in self._groups(group)
            for place in places
            if place in found.offsets and place not in found.unreadable
        }

    def has(self, key: OffsetKey) -> bool:
        """Whether there is a commit, whoever has made it."""
        place = key.topic, key.partition
        return any(place in found.offsets or place in found.unreadable for _, found in self._groups(key.group))

    def _groups(self, group: str | None) -> Iterator[tuple[str, Group]]:
        for one in self.logs.values():
            if group is None:
                yield from one.offsets.groups.items()
            elif group in one.offsets.groups:
                yield group, one.offsets.groups[group]


class Times(Following[Log]):
    """What clusters say of groups, as it has come here."""

    committed = True

    def __init__(
        self, context: PluginContext, document: TreeDocument, leaf: str, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        """``leaf``: what this cluster is called in the tree. ``prepare`` the topic: it makes it where it lacks. Raises
        Waits."""
        super().__init__(context, "tree-times")
        self._document = document
        self._leaf = leaf
        self._prepare = prepare
        self.latest: dict[OffsetKey, GroupTime] = {}
        """What counts."""

    async def topics(self) -> Mapping[str, TopicInfo]:
        return await self.only(TIMES_TOPIC)

    async def _follow(self) -> None:
        await self._prepare()  # somebody may have deleted it, or made another one, since it was followed last
        await super()._follow()

    async def begin(self, topics: Mapping[str, TopicInfo]) -> dict[TopicPartition, Log]:
        self.latest = {}
        return {place: Log(start, start) for place, start in (await self.log_starts(topics)).items()}

    async def take(self, place: TopicPartition, one: Log, batch: memoryview, header: BatchHeader) -> None:
        for record in decode_records(batch):
            try:
                key = read_key(record.key)
                topic = self._document.own_name(self._leaf, key.topic)
                if topic is None:
                    continue  # of other names than this tree's, or too long a one here: there is no such topic
                key = key._replace(topic=topic)
                flags = [value for name, value in record.headers if name == self._document.tree.header]
                all_flags = read_flags(flags[0]) if flags else 0
                said = None if record.value is None else GroupTime.of(record.value, all_flags)
                self.hear(key, said, origin_of(record.headers))
            except (MalformedTime, FlagsError) as error:
                log.warning("group's time not understood", extra={"offset": record.offset, "error": str(error)})

    def hear(self, key: OffsetKey, said: GroupTime | None, origin: str | None = None) -> None:
        """What a record of the topic says.

        None: the group has committed nothing any more at the cluster ``origin`` (None: nobody knows which): what that
        one said is gone, and no other one's word.
        """
        known = self.latest.get(key)
        if said is not None:
            if counts(said, known):
                self.latest[key] = said
        elif known is not None and origin in (None, known.origin):
            del self.latest[key]


class TimedLog(Log):
    """A partition that is distributed."""

    def __init__(self, topic_id: bytes, leader_epoch: int, start: int, position: int) -> None:
        super().__init__(start, position)
        self.topic_id = topic_id
        self.leader_epoch = leader_epoch
        self.least = LeastTimestamps()
        self.is_append_time = False
        """Whether brokers have put times of their own in the place of messages': copies elsewhere have others."""

    def covers(self, offset: int) -> bool:
        """Whether all from an offset on was read, but for what is deleted."""
        return self.begun <= max(offset, self.start)


class Timestamps(Following[TimedLog]):
    """The timestamps of what is distributed."""

    def __init__(
        self,
        context: PluginContext,
        topics: Callable[[], Awaitable[Mapping[str, TopicInfo]]],
        needed: Callable[[], Awaitable[Mapping[TopicPartition, int]]],
    ) -> None:
        """``needed``: from which offset on they are asked for; of those that are left out, from the log's start on."""
        super().__init__(context, "tree-timestamps")
        self._topics = topics
        self._needed = needed

    async def topics(self) -> Mapping[str, TopicInfo]:
        return await self._topics()

    async def begin(self, topics: Mapping[str, TopicInfo]) -> dict[TopicPartition, TimedLog]:
        starts = await self.log_starts(topics)
        needed = await self._needed()
        latest = await self._cluster.offsets_for_times(dict.fromkeys(starts, LATEST_TIME))
        logs: dict[TopicPartition, TimedLog] = {}
        for place, start in starts.items():
            if place not in latest:
                raise BrokerUnavailable(f"{place[0]}-{place[1]} does not say its latest time")
            topic = topics[place[0]]
            position, epoch = max(needed.get(place, start), start), topic.partitions[place[1]].leader_epoch
            one = logs[place] = TimedLog(topic.topic_id, epoch, start, position)
            if latest[place][0] >= 0:
                one.least.last = latest[place][1]  # in case that nothing comes to be read
        return logs

    async def take(self, place: TopicPartition, one: TimedLog, batch: memoryview, header: BatchHeader) -> None:
        if header.is_control:
            return
        one.is_append_time = one.is_append_time or header.is_log_append_time
        aside = len(batch) >= ASIDE_BYTES
        found = await asyncio.to_thread(timestamps, batch) if aside else timestamps(batch)
        if found is not None:
            runs, last = found
            for offset, least in runs:
                one.least.appended(offset, least, last)

    def read_from(self, place: TopicPartition, offset: int) -> None:
        """Read a log again, from an earlier offset on: somebody needs to know."""
        before = self.logs[place]
        one = self.logs[place] = TimedLog(before.topic_id, before.leader_epoch, before.start, max(offset, before.start))
        one.end, one.until, one.least.last = before.end, before.until, before.least.last
