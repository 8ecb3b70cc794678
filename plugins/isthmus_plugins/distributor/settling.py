"""What of a level is settled: on all clusters of its target's side, by what these tell (:class:`Reports`)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.kept import KeptCourse, courses_group, time_of
from isthmus_plugins.distribution.positions import Ends, PositionError, Reports, Term
from isthmus_plugins.distributor.courses import Courses
from isthmus_plugins.distributor.leaves import Leaves
from isthmus_plugins.distributor.reasons import Waits
from isthmus_plugins.distributor.renamed import LeafApi
from isthmus_plugins.process import Clock

log = logging.getLogger("isthmus_plugins.distributor")


class Settling:
    """Of one level, for one version of the tree."""

    def __init__(self, courses: Courses, leaves: Leaves, document: TreeDocument, level: int, clock: Clock) -> None:
        self._courses = courses
        self._clock = clock
        self._leaves = leaves
        self._document = document
        self._level = level
        self._reports: dict[tuple[TopicPartition, Term], Reports] = {}
        self._marks_later: list[tuple[Reports, int, Ends]] | None = None
        """Those of what is given while it is being asked what is settled."""

    def begin(self) -> None:
        """What was given is not known."""
        self._reports.clear()

    def mark(self, place: TopicPartition, position: int, ends: Ends) -> None:
        """What stands before a position is in the target's logs, before these ends."""
        term = self._courses.by_place[place].current.term
        reports = self._reports.setdefault((place, term), Reports())
        if self._marks_later is None:
            reports.given(position, ends)
        else:
            self._marks_later.append((reports, position, ends))

    async def settle(self) -> list[TopicPartition]:
        """Ask each leaf that was given something how far that is on all clusters of its side; what has changed.

        What is given meanwhile is marked afterwards: what a leaf says then may be older.
        """
        self._marks_later = []
        try:
            return await self._settle_marked()
        finally:
            marks, self._marks_later = self._marks_later, None
            for reports, position, ends in marks:
                reports.given(position, ends)

    async def _settle_marked(self) -> list[TopicPartition]:
        changed: list[TopicPartition] = []
        pending: dict[str, list[tuple[TopicPartition, Term, int | None]]] = defaultdict(list)
        for place, course in self._courses.by_place.items():
            for stretch, end in course.pending():
                pending[stretch.leaf].append((place, stretch.term, end))
        for leaf, stretches in pending.items():
            try:
                below, spread_ms = await self._settled_below(leaf, stretches)
            except (Waits, BrokerUnavailable, KafkaRefused, PositionError) as error:
                log.info("settled is not known", extra={"level": self._level, "leaf": leaf, "error": str(error)})
                continue
            for place, term, _ in stretches:
                marks = self._reports.get((place, term))
                if marks is None or place[0] not in below:
                    continue
                settled = marks.settled(below[place[0]])
                if settled is not None:
                    # Who hears that it is settled hears, too, that it may stand in other partitions there.
                    self._courses.hear_of_keys(place, spread_ms[place[0]])
                    self._courses.by_place[place] = self._courses.by_place[place].settle(term, settled)
                    changed.append(place)
        return changed

    async def _settled_below(
        self, leaf: str, stretches: Sequence[tuple[TopicPartition, Term, int | None]]
    ) -> tuple[dict[str, Ends | None], dict[str, int]]:
        """By topic: up to where all that a leaf's partitions hold is settled on its lower levels; None: it has none.
        And before which time messages went by their keys there.

        Topics, and partitions, of which its levels are not all at this version are left out: there may be one that this
        cluster does not know of. This level of its own is one that would be seen then. So are those of a topic that was
        made anew, until its levels have begun with it: what they had settled was of the one before. Raises Waits.
        """
        cluster = await self._leaves.reached(leaf)
        there = await cluster.topics_named({topic for (topic, _), _, _ in stretches})
        ends = await topic_ends(cluster, {name: range(len(each.partitions)) for name, each in there.items()})
        for place, term, end in stretches:
            topic = place[0]
            if topic not in ends:
                continue
            if end is not None and (place, term) not in self._reports:
                # An earlier distributor gave that, to whichever partitions: it was all before what this one finds their
                # ends.
                self._reports[place, term] = Reports()
                self._reports[place, term].given(end, ends[topic])
            if (place, term) in self._reports:
                self._reports[place, term].ends_at(ends[topic])
        levels = [above.level for above in self._document.tree.above(leaf) if above.level < self._level]
        groups = [courses_group(level) for level in (*levels, self._level)]
        found = await cluster.committed_offsets(groups)
        now_ms = int(self._clock.time() * 1000)
        below: dict[str, Ends | None] = {}
        spread_ms: dict[str, int] = {}
        for topic, of_topic in ends.items():
            settled: dict[int, int] = {}
            spread_ms[topic] = 0
            for partition in of_topic:
                at = topic, partition
                kept = [KeptCourse.of(found[each][at].metadata) for each in groups if at in found.get(each, {})]
                there_ms = (time_of(each.spread_ms, now_ms) for each in kept[:-1])
                spread_ms[topic] = max(spread_ms[topic], max(there_ms, default=0))
                topic_id = there[topic].topic_id.hex()
                is_all = all(is_of(each, self._document) and each.topic_id == topic_id for each in kept)
                if len(kept) == len(groups) and is_all:
                    settled[partition] = min((each.course.settled for each in kept[:-1]), default=0)
            if levels:
                below[topic] = settled
            elif len(settled) == len(of_topic):
                below[topic] = None
        return below, spread_ms


def is_of(kept: KeptCourse, document: TreeDocument) -> bool:
    """Whether a course was kept by this version of this tree."""
    return kept.version == document.tree.version and kept.digest in ("", document.digest)


async def topic_ends(cluster: LeafApi, topics: Mapping[str, Iterable[int]]) -> dict[str, Mapping[int, int]]:
    """Where logs of another cluster end, by topic and partition. Raises BrokerUnavailable where one is not known."""
    places = [(name, partition) for name, partitions in topics.items() for partition in partitions]
    found = await cluster.log_ends(places)
    ends: dict[str, dict[int, int]] = {name: {} for name in topics}
    for name, partition in places:
        if (name, partition) not in found:
            raise BrokerUnavailable(f"where {name}-{partition} ends there is not known now")
        ends[name][partition] = found[name, partition]
    return dict(ends)
