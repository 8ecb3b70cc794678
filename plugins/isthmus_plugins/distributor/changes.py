"""Whether clusters may come to a tree, or leave it, now: the clusters themselves are asked, by what they keep.

All clusters are to have begun the version that there is, so none is at the version before that. A new one is to be
empty, as it is given all that there is, and to have that before the next comes. One that is taken out is to have
nothing that others lack; an operator who gives up one that is lost says that this does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.kept import (
    TIMES_TOPIC,
    KeptCourse,
    KeptGiven,
    courses_group,
    given_group,
    latest,
    read_given,
)
from isthmus_plugins.distribution.positions import PositionError, needs, unsettled
from isthmus_plugins.distribution.tree import Added
from isthmus_plugins.distributor.leaves import Leaves
from isthmus_plugins.distributor.places import committed_of_all, log_starts
from isthmus_plugins.distributor.reasons import Waits
from isthmus_plugins.distributor.renamed import LeafApi
from isthmus_plugins.process import PluginContext

SHOWN: Final = 5
"""Partitions of one cluster in the words of a refusal."""

_SILENT: Final = (Waits, BrokerUnavailable, KafkaRefused, PositionError)

Kept = Mapping[int, Mapping[TopicPartition, KeptCourse]]
"""The courses of a cluster's topics that are distributed, by level."""


def lacks(leaf: str, added: Added) -> str:
    """Why a leaf is no target."""
    return (
        f"{leaf} came in version {added.version} of the tree and is not known to have all yet: {added.by} fills it, "
        f"where `isthmus tree show` says how far"
    )


async def is_filled(cluster: ClusterApi, document: TreeDocument, leaf: str) -> bool:
    """Whether a leaf that was added is known to have all. ``cluster``: that one, which keeps what it was given, by its
    own names.

    Once it has, its own distributor keeps that: what it was given is forgotten where the cluster that gave it is away
    for a week. Until then: brokers forget what they keep of a topic that is deleted, so it is to be kept of as many
    partitions as it was said to be of. Where topics were deleted at the cluster that fills it, that is said anew of
    fewer ones.

    Raises BrokerUnavailable, KafkaRefused.
    """
    by, version = document.added[leaf]
    level = document.tree.level_between(by, leaf)
    group, own = given_group(by, level), courses_group(level)
    committed = await cluster.committed_offsets([group, own], stable=True)
    found = committed.get(group, {})
    kept: dict[str, list[tuple[int, KeptGiven]]] = defaultdict(list)
    try:
        if any(KeptCourse.of(each.metadata).has_all_of == version for each in committed.get(own, {}).values()):
            return True
        for (topic, partition), each in found.items():
            if document.has(leaf, topic):
                kept[topic] += read_given(partition, each.offset, each.metadata).items()
    except PositionError:
        return False
    given = [each for of_topic in kept.values() for each in latest(of_topic).values()]
    since = [each for each in given if each.given.term.version >= version]
    filled = [each for each in since if each.fill_until]
    if not since or len(filled) < min(each.filled for each in since):
        return False
    return not any(each.fills for each in filled)


async def held(cluster: ClusterApi, document: TreeDocument, leaf: str) -> list[str]:
    """What a leaf that comes has in topics of the tree already; empty: nothing, or it has begun since it came.

    ``cluster``: that one, by its own names. Raises BrokerUnavailable, KafkaRefused, PositionError.
    """
    since, version = document.added[leaf].version, document.tree.version
    groups = [courses_group(above.level) for above in document.tree.above(leaf)]
    found = await committed_of_all(cluster, groups, stable=True)
    if any(since <= KeptCourse.of(each.metadata).version <= version for of in found.values() for each in of.values()):
        return []
    places = [
        (name, partition)
        for name, each in (await cluster.topics()).items()
        if (document.has(leaf, name) and not each.internal) or (name == TIMES_TOPIC and document.groups)
        for partition in range(len(each.partitions))
    ]
    ends = await cluster.log_ends(places)
    if unknown := {*places} - ends.keys():
        topic, partition = min(unknown)
        raise BrokerUnavailable(f"where {topic}-{partition} ends cannot be read now")
    starts = await log_starts(cluster, sorted(place for place in places if ends[place]))
    return _shortened(
        [
            f"{topic}-{partition} has offsets {first} to {ends[topic, partition] - 1}"
            for (topic, partition), first in starts.items()
            if first < ends[topic, partition]
        ]
    )


def distributed(document: TreeDocument, leaf: str, topics: Mapping[str, TopicInfo]) -> dict[str, TopicInfo]:
    """Those of a cluster's topics that are the tree's. ``leaf``: whose names they have."""
    return {name: info for name, info in topics.items() if document.has(leaf, name) and not info.internal}


def unfit(document: TreeDocument, leaf: str, topics: Mapping[str, TopicInfo]) -> dict[str, TopicInfo]:
    """Those of a leaf's own topics that would be distributed if they had such names as ``names`` says."""
    if document.names is None:
        return {}
    return {
        name: info
        for name, info in topics.items()
        if name.startswith(document.topics) and not document.fits(leaf, name) and not info.internal
    }


def _shortened(partitions: list[str]) -> list[str]:
    more = len(partitions) - SHOWN
    return partitions if more <= 0 else [*partitions[:SHOWN], f"and {more} more like these"]


class Changes:
    """Of a tree that is there, asked by a cluster of it. ``leaf``: what that is called."""

    def __init__(self, context: PluginContext, document: TreeDocument, leaf: str) -> None:
        self._own = context.cluster
        self._document = document
        self._leaf = leaf
        self._leaves = Leaves(context, document, leaf)

    async def close(self) -> None:
        """Close connections to other clusters."""
        await self._leaves.close()

    async def filling(self) -> frozenset[str]:
        """The leaves that are not known to have all: also those that do not answer."""
        return frozenset([leaf for leaf in self._document.added if not await self._is_filled(leaf)])

    async def _is_filled(self, leaf: str) -> bool:
        try:
            return await is_filled(await self._itself(leaf), self._document, leaf)
        except _SILENT:
            return False

    async def blocked(self, after: TreeDocument, removed: Collection[str], given_up: bool) -> list[str]:
        """Why the next version cannot be applied here yet; empty: it can. ``removed``: leaves that it takes out."""
        tree = self._document.tree
        reasons: list[str] = []
        kept: dict[str, Kept] = {}
        for leaf in tree.leaves:
            if leaf in removed and given_up:
                continue
            try:
                kept[leaf] = await self._kept(await self._cluster(leaf), leaf)
            except _SILENT as error:
                reasons.append(_silent(leaf, error, removed))
        for leaf, levels in kept.items():
            if leaf not in removed:
                reasons += self._behind(leaf, levels)
        if not given_up:
            for leaf in removed:
                reasons += self._needed(leaf, {each: of for each, of in kept.items() if each not in removed})
                if leaf in kept and not self._is_under_way(after, kept, removed):
                    try:
                        reasons += [f"{leaf}: {why}" for why in await self._lacking(leaf, kept[leaf])]
                    except _SILENT as error:
                        reasons.append(_silent(leaf, error, removed))
        return reasons

    async def leaving(self) -> list[str]:
        """What of this cluster is not known to be on all others; empty: nothing is. Raises PositionError too."""
        return await self._lacking(self._leaf, await self._kept(self._own, self._leaf))

    async def _itself(self, leaf: str) -> ClusterApi:
        return self._own if leaf == self._leaf else await self._leaves.itself(leaf)

    async def _cluster(self, leaf: str) -> LeafApi:
        """A cluster, by this one's names."""
        return self._own if leaf == self._leaf else await self._leaves.reached(leaf)

    async def _kept(self, cluster: LeafApi, leaf: str) -> Kept:
        """Of each level of a leaf: the courses of the topics that it has. Raises BrokerUnavailable, PositionError."""
        topics = await self._topics(cluster)
        groups = {courses_group(above.level): above.level for above in self._document.tree.above(leaf)}
        found = await committed_of_all(cluster, groups)
        return {
            level: {place: KeptCourse.of(each.metadata) for place, each in found[group].items() if place[0] in topics}
            for group, level in groups.items()
            if topics
        }

    async def _topics(self, cluster: LeafApi) -> dict[str, TopicInfo]:
        """The topics of the tree that a cluster has."""
        return distributed(self._document, self._leaf, await cluster.topics())

    def _behind(self, leaf: str, levels: Kept) -> Iterator[str]:
        version = self._document.tree.version
        for level, courses in levels.items():
            if max((each.version for each in courses.values()), default=0) < version:
                yield f"{leaf} has not begun version {version} at level {level}: apply it there, and see that it can"

    def _is_under_way(self, after: TreeDocument, kept: Mapping[str, Kept], removed: Collection[str]) -> bool:
        """Whether another cluster has begun the next version: leaves that it takes out settle nothing since then."""
        return any(
            course.version >= after.tree.version
            for leaf, levels in kept.items()
            if leaf not in removed
            for courses in levels.values()
            for course in courses.values()
        )

    def _needed(self, leaf: str, kept: Mapping[str, Kept]) -> Iterator[str]:
        """Why others need a leaf still."""
        for other, levels in kept.items():
            for above in self._document.tree.above(other):
                why = {needs(each.course, above, leaf) for each in levels.get(above.level, {}).values()}
                yield from (f"{leaf}: {other} {each}" for each in sorted(filter(None, why)))

    async def _lacking(self, leaf: str, levels: Kept) -> list[str]:
        """What of a leaf's own log is not known to be on all others."""
        cluster = await self._cluster(leaf)
        topics = await self._topics(cluster)
        places = [(name, number) for name, each in topics.items() for number in range(len(each.partitions))]
        ends = await cluster.log_ends(places)
        reasons: list[str] = []
        for place in places:
            for level, courses in levels.items():
                where = f"{place[0]}-{place[1]}"
                kept = courses.get(place)
                if place not in ends:
                    reasons.append(f"where {where} ends is not known now")
                elif kept is None or kept.topic_id != topics[place[0]].topic_id.hex():  # or of the topic before it
                    if ends[place]:
                        reasons.append(f"{where}: level {level} does not distribute it")
                elif (why := unsettled(kept.course, level, ends[place])) is not None:
                    reasons.append(f"{where}: {why}")
        return _shortened(reasons)


def _silent(leaf: str, error: Exception, removed: Collection[str]) -> str:
    """That a leaf does not answer, or keeps what is none of ours."""
    lost = "; if it is lost: --give-up, and what it had passed on to nobody is lost with it" if leaf in removed else ""
    return f"{leaf} does not say how far it is: {error}{lost}"
