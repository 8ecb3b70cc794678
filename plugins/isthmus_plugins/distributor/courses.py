"""The courses of one level of this cluster, one for each partition, as they are kept at this cluster.

They are written in transactions of the level's own id: once another distributor has begun with it, what this one writes
does not count. All is read after that, so nothing is written over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from isthmus_control.model import Reason
from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, CommittedOffset, TopicInfo, TopicPartition
from isthmus_plugins.distribution.kept import KeptCourse, courses_group
from isthmus_plugins.distribution.positions import Course, PositionError, Stretch, Term
from isthmus_plugins.distributor.reasons import POSITIONS_CONTRADICT
from isthmus_plugins.tasks import some_at_once

AT_ONCE: Final = 50
"""Partitions that brokers are asked about one by one, at the same time."""
COMMITTED_AT_ONCE: Final = 500


class Courses:
    """Of one level."""

    def __init__(self, cluster: ClusterApi, level: int, version: int) -> None:
        """``version``: of the tree."""
        self._cluster = cluster
        self._group = courses_group(level)
        self._version = version
        self._transactions = cluster.transactions(self._group)
        self.topic_ids: dict[TopicPartition, str] = {}
        """As hexadecimal digits, of this cluster's topics."""
        self._kept: dict[TopicPartition, str] = {}
        """As written."""
        self.by_place: dict[TopicPartition, Course] = {}
        self.read: dict[TopicPartition, tuple[int, int]] = {}
        """Up to where this cluster's log was read, and the leader epoch there: see :class:`KeptCourse`."""
        self.wrong: dict[TopicPartition, Reason] = {}
        """What is kept and cannot be."""

    async def begin(self, topics: Mapping[str, TopicInfo], target: str) -> None:
        """Fence other distributors, and read. ``target``: of partitions that nothing is kept of.

        Raises BrokerUnavailable, KafkaRefused.
        """
        await self._transactions.begin()
        found = await self._cluster.committed_offsets([self._group], stable=True)
        if self._group not in found:
            raise BrokerUnavailable(f"what group {self._group} has committed cannot be read now")
        self.topic_ids = {
            (topic.name, partition): topic.topic_id.hex()
            for topic in topics.values()
            for partition in range(len(topic.partitions))
        }
        new: dict[TopicPartition, Term] = {}
        self._kept.clear()
        self.by_place.clear()
        self.read.clear()
        self.wrong.clear()
        for place, topic_id in self.topic_ids.items():
            committed = found[self._group].get(place)
            if committed is None:
                new[place] = Term(self._version, 0)
                continue
            try:
                kept = KeptCourse.of(committed.metadata)
                if kept.version > self._version:
                    raise PositionError(
                        f"it was distributed in version {kept.version} of the tree, which has {self._version} here"
                    )
            except PositionError as error:
                self.wrong[place] = Reason(POSITIONS_CONTRADICT, str(error))
                continue
            if kept.topic_id != topic_id:  # it was made anew: none of its messages was given to anybody
                term = kept.course.current.term
                new[place] = term._replace(number=term.number + 1)
                continue
            self.by_place[place] = kept.course
            self.read[place] = kept.read, kept.epoch
            self._kept[place] = committed.metadata
        for place, start in zip(new, await some_at_once(AT_ONCE, self._log_start, new), strict=True):
            self.by_place[place] = Course((Stretch(new[place], target, start, start),))
        await self.keep(self.by_place)

    async def _log_start(self, place: TopicPartition) -> int:
        return await self._cluster.log_start(*place)

    async def keep(self, places: Collection[TopicPartition], again: bool = False) -> None:
        """Write those courses that have changed; ``again``: the others, too, before brokers forget them.

        Raises ProducerFenced, BrokerUnavailable, KafkaRefused: :meth:`begin` again.
        """
        changed: dict[TopicPartition, CommittedOffset] = {}
        for place in places:
            course = self.by_place[place]
            try:
                read = self.read.get(place, (0, -1))
                metadata = KeptCourse(course, self._version, self.topic_ids[place], *read).metadata()
            except PositionError as error:
                self.wrong[place] = Reason(POSITIONS_CONTRADICT, str(error))
                continue
            if again or self._kept.get(place) != metadata:
                changed[place] = CommittedOffset(course.settled, metadata)
        written = list(changed.items())
        for first in range(0, len(written), COMMITTED_AT_ONCE):
            some = dict(written[first : first + COMMITTED_AT_ONCE])
            await self._transactions.commit({}, self._group, some)
            self._kept |= {place: each.metadata for place, each in some.items()}
