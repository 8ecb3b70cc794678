"""The courses of one level of this cluster, one for each partition, as they are kept at this cluster.

They are written in transactions of the level's own id: once another distributor has begun with it, what this one writes
does not count. All is read after that, so nothing is written over. One transaction has all partitions: what a new leaf
is filled up to stands for all of them, or for none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from isthmus_control.model import Reason
from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, CommittedOffset, TopicInfo, TopicPartition
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.kept import KeptCourse, courses_group
from isthmus_plugins.distribution.positions import Course, PositionError, begun, carried
from isthmus_plugins.distributor.places import committed_of_all, log_starts
from isthmus_plugins.distributor.reasons import LEVELS_AT_ANOTHER_VERSION, POSITIONS_CONTRADICT, Waits


class Courses:
    """Of one level."""

    def __init__(self, cluster: ClusterApi, document: TreeDocument, leaf: str, level: int) -> None:
        self._cluster = cluster
        self._group = courses_group(level)
        self._leaf = leaf
        self._document = document
        self._version = document.tree.version
        above = document.tree.above(leaf)
        (self._beside,) = (each.beside for each in above if each.level == level)
        self._others = [each.level for each in above if each.level != level]
        self._since, self._fills = document.began(leaf, level)
        self._transactions = cluster.transactions(self._group)
        self.topic_ids: dict[TopicPartition, str] = {}
        """As hexadecimal digits, of this cluster's topics."""
        self._kept: dict[TopicPartition, str] = {}
        """As written."""
        self.by_place: dict[TopicPartition, Course] = {}
        self.read: dict[TopicPartition, tuple[int, int]] = {}
        """Up to where this cluster's log was read, and the leader epoch there: see :class:`KeptCourse`."""
        self.spread_ms: dict[TopicPartition, int] = {}
        """Until when messages went by their keys: see :class:`KeptCourse`."""
        self.has_all_of = 0
        """The version in which this cluster came to the tree, once it has all: see :class:`KeptCourse`."""
        self.wrong: dict[TopicPartition, Reason] = {}
        """What is kept and cannot be."""

    async def begin(self, topics: Mapping[str, TopicInfo], target: str) -> None:
        """Fence other distributors, and read. ``target``: of partitions that nothing is kept of.

        Raises BrokerUnavailable, KafkaRefused, Waits.
        """
        await self._transactions.begin()
        found = await committed_of_all(self._cluster, [self._group], stable=True)
        self.topic_ids = {
            (topic.name, partition): topic.topic_id.hex()
            for topic in topics.values()
            for partition in range(len(topic.partitions))
        }
        new: list[TopicPartition] = []
        made_anew: dict[TopicPartition, Course] = {}
        ids_before: set[str] = set()
        has_begun = False
        self._kept.clear()
        self.by_place.clear()
        self.read.clear()
        self.spread_ms.clear()
        self.has_all_of = 0
        self.wrong.clear()
        for place, topic_id in self.topic_ids.items():
            committed = found[self._group].get(place)
            if committed is None:
                new.append(place)
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
            self.spread_ms[place] = kept.spread_ms  # what another life of it has given stands where it is
            if kept.version < self._since:
                new.append(place)
                continue
            has_begun = True
            self.has_all_of = max(self.has_all_of, kept.has_all_of)
            if kept.topic_id != topic_id:  # it was made anew: none of its messages was given to anybody
                made_anew[place] = kept.course
                ids_before.add(kept.topic_id)
                continue
            self.by_place[place] = carried(kept.course, self._beside, target)
            self.read[place] = kept.read, kept.epoch
            self._kept[place] = committed.metadata
        await self._check_gone(ids_before)
        # Of topics that come later everything goes by its flags: this level was there before their first message.
        ends = await self._filled_until(new) if self._fills and not has_begun and new else {}
        for place, start in (await log_starts(self._cluster, [*new, *made_anew])).items():
            self.by_place[place] = (
                made_anew[place].made_anew(target, start)
                if place in made_anew
                else begun(self._version, target, start, ends.get(place, 0))
            )
        await self.keep(self.by_place)

    async def _check_gone(self, topic_ids: Collection[str]) -> None:
        """Whether no broker has these topics any more: one that is cut off tells of the one that a topic was before.

        Raises BrokerUnavailable where one has: which of the two is the topic now is not known.
        """
        asked = {bytes.fromhex(topic_id) for topic_id in topic_ids}
        own = self._document.clusters[self._leaf].cluster_id
        if asked and (known := asked - await self._cluster.unknown_topics(asked, own)):
            raise BrokerUnavailable(
                f"brokers do not agree on which topics there are: some still have {min(known).hex()}, in whose place "
                f"others tell of another one"
            )

    async def _filled_until(self, places: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Where logs end, with all other levels at a version that has the new leaf. Raises Waits where one is not.

        Distributors of other clusters take for settled what those levels have settled, as long as they do not know of
        the new leaf: that is before these ends.
        """
        groups = {courses_group(level): level for level in self._others}
        found = await self._cluster.committed_offsets(list(groups))
        for group, level in groups.items():
            versions = {
                place: KeptCourse.of(each.metadata).version
                for place, each in found.get(group, {}).items()
                if place in self.topic_ids
            }
            behind = next((place for place in places if versions.get(place, self._since) < self._since), None)
            if behind is not None or not any(version >= self._since for version in versions.values()):
                what = "" if behind is None else f"{behind[0]}-{behind[1]} at "
                raise Waits(
                    LEVELS_AT_ANOTHER_VERSION,
                    f"{what}level {level} of this cluster is not at version {self._since} yet",
                )
        ends = await self._cluster.log_ends(places)
        for place in places:
            if place not in ends:
                raise BrokerUnavailable(f"where {place[0]}-{place[1]} ends cannot be read now")
        return ends

    def hear_of_keys(self, place: TopicPartition, spread_ms: int) -> None:
        """Messages of a log went by their keys before a time, on their way from a cluster that was given them."""
        self.spread_ms[place] = max(self.spread_ms.get(place, 0), spread_ms)

    async def keep(self, places: Collection[TopicPartition], again: bool = False) -> None:
        """Write those courses that have changed; ``again``: the others, too, before brokers forget them.

        Raises ProducerFenced, BrokerUnavailable, KafkaRefused: :meth:`begin` again.
        """
        changed: dict[TopicPartition, CommittedOffset] = {}
        for place in places:
            course = self.by_place[place]
            try:
                read = self.read.get(place, (0, -1))
                digest, spread_ms = self._document.digest, self.spread_ms.get(place, 0)
                kept = KeptCourse(
                    course,
                    self._version,
                    self.topic_ids[place],
                    *read,
                    digest,
                    spread_ms=spread_ms,
                    has_all_of=self.has_all_of,
                )
                metadata = kept.metadata()
            except PositionError as error:
                self.wrong[place] = Reason(POSITIONS_CONTRADICT, str(error))
                continue
            if again or self._kept.get(place) != metadata:
                changed[place] = CommittedOffset(course.settled, metadata)
        if changed:
            await self._transactions.commit({}, self._group, changed)
            self._kept |= {place: each.metadata for place, each in changed.items()}
