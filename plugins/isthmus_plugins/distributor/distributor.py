"""The distributor of one level: reads this cluster's topics, and gives its target what has not come by this level.

::

    begin     fence the level's other distributors at this cluster, read the courses
    switch    where the target is another one now: fence them at the one before, read what that was given
    meet      does the target have this version of the tree, these topics? fence at the target, read what it was given
    give      read, rewrite flags, produce with the position in one transaction; again and again. What comes while one
              is under way is rewritten meanwhile; what the target refuses of a partition keeps that one waiting alone
    tick      once a second: what the target's side has settled is kept at this cluster

All of that is left where another target is chosen, or the one before is given up: what is under way has a moment to
end.
Whatever fails, it begins again: everything that it needs is read then, and nothing is remembered but what is shown.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from isthmus_control.model import DistributionTree, Reason
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    ClusterApi,
    CommittedOffset,
    KafkaRefused,
    PartitionsRefused,
    ProducerFenced,
    Refusal,
    TopicInfo,
    TopicPartition,
    Transactions,
)
from isthmus_plugins.distribution.copies import Copies
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.kept import (
    STILL,
    TIMES_TOPIC,
    KeptCourse,
    KeptGiven,
    courses_group,
    given_at,
    given_group,
    given_metadata,
    latest,
    out_of_place,
    read_given,
)
from isthmus_plugins.distribution.positions import Course, Given, PositionError
from isthmus_plugins.distributor import reasons
from isthmus_plugins.distributor.at_least_once import AtLeastOnce
from isthmus_plugins.distributor.changes import is_filled, lacks, unfit
from isthmus_plugins.distributor.courses import Courses
from isthmus_plugins.distributor.leaves import Leaves
from isthmus_plugins.distributor.parcels import Parcel, Prepared, beside_the_loop
from isthmus_plugins.distributor.places import PLACES_AT_ONCE
from isthmus_plugins.distributor.reads import OutOfRange, Read, Reads
from isthmus_plugins.distributor.reasons import Waits
from isthmus_plugins.distributor.refusals import Refusals
from isthmus_plugins.distributor.renamed import LeafApi
from isthmus_plugins.distributor.settling import Settling, is_of, topic_ends
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.tasks import some_at_once
from isthmus_protocol.records import BatchError

log = logging.getLogger("isthmus_plugins.distributor")

RETRY_S: Final = 0.5
TICK_S: Final = 1.0
LOOK_S: Final = 5.0
"""How often topics are looked at, at both clusters."""
KEPT_AGAIN_S: Final = 3_600.0
"""Positions that do not change are committed again: brokers forget those of groups without members, after a week."""
GIVEN_BYTES: Final = 4 * 1024 * 1024
"""What one transaction gives, about."""
TOO_LONG: Final = "its name would be none that a topic may have"
UNKNOWN_EPOCH: Final = -1
KEPT_S: Final = 0.1
"""After which time positions are committed where no transaction has them. If a distributor dies, what it gave since is
given again."""
KEPT_MESSAGES: Final = 500
"""Of so many they are committed at once: after an outage there may be any number in a tenth of a second."""
LEAVING_S: Final = 1.0
"""How long a distributor that ends tries to commit them."""
SWITCHING_S: Final = 3.0
"""How long what is under way has to end where another target is chosen: of one that answers nothing is in doubt."""
GIVEN_UP_S: Final = 5.0
"""How long a target that is given up is asked what it was given: if it answers, nothing is given again."""

T = TypeVar("T")


class Again(Exception):
    """Something has changed: begin again."""


class Distributor:
    """Of one level, for one version of the tree. ``chosen``: what the control log has of the tree now."""

    def __init__(
        self,
        context: PluginContext,
        document: TreeDocument,
        leaf: str,
        level: int,
        chosen: Callable[[], DistributionTree | None],
    ) -> None:
        self._context = context
        self._cluster: ClusterApi = context.cluster
        self._document = document
        self._tree = document.tree
        self._leaf = leaf
        self.level = level
        self._chosen = chosen
        self._lane = f"tree-{level}"
        self._leaves = Leaves(context, document, leaf)
        self._courses = Courses(self._cluster, document, leaf, level)
        self._settling = Settling(self._courses, self._leaves, document, level, context.clock)
        self._acts_on = "", False
        """The target, and whether the one before is given up, as it began with them."""
        self._target: Transactions | None = None
        self._refusals = Refusals()
        self._reads = Reads(self._cluster, self._lane)
        self._given: dict[TopicPartition, KeptGiven] = {}
        """What the target was given, as it keeps it, or will with the next transaction."""
        self._uncommitted: set[TopicPartition] = set()
        self._preparing: dict[TopicPartition, Prepared] = {}
        """What is given next."""
        self._prepared_bytes = 0
        self._next: dict[TopicPartition, int] = {}
        """Up to where everything is given, under way, or prepared."""
        self._keep_at = math.inf
        """When positions are committed, by the loop's clock."""
        self._not_kept = 0
        """Messages that were given since."""
        self._target_ends: dict[str, Mapping[int, int]] = {}
        """By topic and partition: where the target's logs go on behind what they were given."""
        self._spread: set[TopicPartition] = set()
        """Partitions of which something went by its key in this term, to whichever partition of the target."""
        self._filled = 0
        """Of how many partitions a target that is new gets what was there, and those of which nobody knows."""
        self._not_read: dict[TopicPartition, Reason] = {}
        """Partitions of which nothing is given now."""
        self._unfit: Mapping[str, TopicInfo] = {}
        """Topics that begin as those that are distributed, and for which other clusters have no name."""
        self._looked: object = None
        self._look_again_at = 0.0
        # What is shown.
        self.waits: Reason | None = Reason(reasons.SOURCE_UNAVAILABLE, "it begins")
        self.positions: dict[TopicPartition, int] = {}
        self.ends: dict[TopicPartition, int] = {}
        self._partitions: dict[str, int] = {}
        self._partitions_given: dict[str, int] = {}
        """By topic: up to which number partitions were given, maybe more than brokers here tell of yet."""
        self.by_key: dict[str, int] = {}
        """Topics of which the target has another number of partitions, and that: messages go by their keys."""
        self.told: dict[TopicPartition, Reason] = {}
        """What of a partition was not distributed."""
        self.given: Counter[str] = Counter()
        """Messages, by target."""
        self.refused = 0
        self.lost = 0

    @property
    def courses(self) -> Mapping[TopicPartition, Course]:
        return self._courses.by_place

    @property
    def left_out(self) -> Mapping[TopicPartition, Reason]:
        """Partitions that are not distributed, or stand still; also those that are just being tried again."""
        return {**self._without_names(), **self._refusals.reasons, **self._not_read}

    def _without_names(self) -> Mapping[TopicPartition, Reason]:
        if not self._unfit:
            return {}
        assert self._document.names is not None
        pattern = self._document.names.patterns[self._leaf].text
        reason = Reason(
            reasons.NAME_DOES_NOT_FIT,
            f"its name is not such as {pattern}, so no other cluster has a name for it: have a topic with such a name",
        )
        return {(name, each): reason for name, info in self._unfit.items() for each in range(len(info.partitions))}

    @property
    def target(self) -> str:
        """Which leaf it is to write to."""
        known = self._chosen()
        chosen = None if known is None else known.chosen.get(self.level)
        return self._document.target(self._leaf, self.level, chosen)

    @property
    def _gives_up(self) -> bool:
        """Whether the target before is given up if it does not say what it was given."""
        known = self._chosen()
        return known is not None and self.level in known.given_up

    @property
    def _is_chosen_anew(self) -> bool:
        """Whether the target is another one now, or the one before is given up, or no more."""
        return (self.target, self._gives_up) != self._acts_on

    @property
    def fill(self) -> tuple[int, int]:
        """Of what a new leaf is filled with: offsets that are left to be given, and of how many; (0, 0): it has all."""
        left = total = 0
        if any(course.fills for course in self.courses.values()):
            for place, course in self.courses.items():
                start, end = course.current.start, course.fill_until
                left += max(end - max(self.positions.get(place, course.settled), start), 0)
                total += max(end - start, 0)
        return left, total

    async def run(self) -> None:
        """Distribute until cancelled."""
        while True:
            try:
                await self._distribute_as_chosen()
            except Again as again:
                log.info("distributor begins again", extra={"level": self.level, "why": str(again)})
                continue
            except Waits as waits:
                self._waits(waits.reason)
            except ProducerFenced as error:
                self._waits(Reason(reasons.TAKEN_OVER, str(error)))
            except PositionError as error:
                self._waits(Reason(reasons.POSITIONS_CONTRADICT, str(error)))
            except (BrokerUnavailable, KafkaRefused, OutOfRange) as error:
                self._waits(Reason(reasons.SOURCE_UNAVAILABLE, str(error)))
            finally:
                await self._leaves.close()
            await asyncio.sleep(RETRY_S)

    def _waits(self, reason: Reason) -> None:
        if self.waits is None or self.waits.code != reason.code:
            log.warning(
                "distributor waits", extra={"level": self.level, "reason": reason.code, "detail": reason.message}
            )
        self.waits = reason

    # ---- begin, switch, meet ----

    async def _distribute_as_chosen(self) -> None:
        """Until another target is chosen, or the one before is given up: also while one does not answer.

        What is cancelled then is in doubt, as of a process that died: whoever begins again fences it, or goes back.
        """
        target = self.target
        self._acts_on = target, self._gives_up
        work = asyncio.get_running_loop().create_task(self._distribute(target), name=f"{self._lane}/distribute")
        try:
            while not work.done():
                await asyncio.wait([work], timeout=TICK_S)
                if self._is_chosen_anew:
                    self._reads.wake()
                    await asyncio.wait([work], timeout=SWITCHING_S)
                    break
            if work.done():
                work.result()
            raise Again("what is under way does not end")
        finally:
            await _ended(work)

    async def _distribute(self, target: str) -> None:
        check_lease(self._context)
        await self._check_filled(target)
        topics = await self._topics()
        await self._courses.begin(topics, target)
        await self._note_filled()
        self._settling.begin()
        self._uncommitted.clear()
        self._preparing, self._prepared_bytes = {}, 0
        self._refusals.begin()
        self._keep_at, self._not_kept = math.inf, 0
        self._not_read = dict(self._courses.wrong)
        await some_at_once(PLACES_AT_ONCE, self._cut_where_read, list(self.courses))
        await self._courses.keep(self.courses)  # others look at what is settled, whether the target is reached or not
        await self._switched(target)
        positions = await self._met(target, topics)
        self._reads = Reads(self._cluster, self._lane)
        self._next = dict(positions)
        self._look_again_at = 0.0  # what is there may have changed since
        self.waits = None
        log.info("distributing", extra={"level": self.level, "target": target, "partitions": len(positions)})
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._reads.run(topics, positions), name=f"{self._lane}/read")
                group.create_task(self._give(target), name=f"{self._lane}/give")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _check_filled(self, target: str) -> None:
        """A leaf that is being filled is nobody's target but of the one that fills it. Raises Waits."""
        added = self._document.added.get(target)
        if added is None or added.by == self._leaf:
            return
        cluster = await self._leaves.itself(target)
        with _asking(target):
            if not await is_filled(cluster, self._document, target):
                raise Waits(reasons.TARGET_LACKS_MESSAGES, lacks(target, added))

    async def _note_filled(self) -> None:
        """Keep that this cluster, which came to the tree, has all, before its brokers forget what it was given."""
        added = self._document.added.get(self._leaf)
        if added is None or self._courses.has_all_of or self.level != self._tree.level_between(added.by, self._leaf):
            return
        if await is_filled(self._cluster, self._document, self._leaf):
            self._courses.has_all_of = added.version
            await self._courses.keep(self.courses)

    async def _topics(self) -> dict[str, TopicInfo]:
        """Those of this cluster that are distributed."""
        known = self._chosen()
        found = await self._cluster.topics()
        self._unfit = unfit(self._document, self._leaf, found)
        return {
            name: info
            for name, info in found.items()
            if (known is not None and name in known and name not in self._unfit and not info.internal)
            or (name == TIMES_TOPIC and self._document.groups)
        }

    async def _switched(self, target: str) -> None:
        """Have every course lead to the target. Raises Waits while the one before does not say what it has."""
        before: dict[str, list[TopicPartition]] = defaultdict(list)
        for place, course in self.courses.items():
            if course.current.leaf != target:
                before[course.current.leaf].append(place)
        for leaf, places in before.items():
            gives_up = self._gives_up
            try:
                async with asyncio.timeout(GIVEN_UP_S if gives_up else None):
                    given = await self._fenced(leaf)
            except (Waits, BrokerUnavailable, KafkaRefused, TimeoutError) as error:
                if not gives_up:
                    raise Waits(
                        reasons.FORMER_TARGET_UNREACHABLE,
                        f"{leaf}, which was written to before {target}, does not say what it was given: {error}. Where "
                        f"it is lost: isthmus tree target {self._leaf} {self.level} {target} --give-up",
                    ) from error
                for place in places:
                    self._courses.by_place[place] = self.courses[place].gone_back({leaf}, target)
            else:
                await self._hand_over(given, places, target)
        await self._courses.keep([place for places in before.values() for place in places])
        self._not_read |= self._courses.wrong

    async def _fenced(self, leaf: str) -> Mapping[TopicPartition, KeptGiven | PositionError]:
        """What a target was given that is given nothing any more. Raises Waits, BrokerUnavailable, KafkaRefused."""
        cluster = await self._leaves.reached(leaf)
        await (await self._leaves.transactions(leaf, self._transactions)).begin()
        given, _ = await self._given_to(cluster, leaf)
        return given

    async def _hand_over(
        self, given: Mapping[TopicPartition, KeptGiven | PositionError], places: Sequence[TopicPartition], target: str
    ) -> None:
        """A target that answers is switched where it was given all: nobody gives it anything any more."""
        for place in places:
            at = await self._said(given, place)
            if at is None:
                continue
            self._courses.by_place[place] = self.courses[place].handed_over(target, at)

    def _transactions(self, cluster: ClusterApi) -> Transactions:
        if self._document.exactly_once:
            return cluster.transactions(self._group)
        return AtLeastOnce(cluster, self._lane)

    @property
    def _group(self) -> str:
        return given_group(self._leaf, self.level)

    async def _given_to(
        self, cluster: LeafApi, leaf: str
    ) -> tuple[dict[TopicPartition, KeptGiven | PositionError], dict[str, dict[int, Collection[int]]]]:
        """What a leaf was given by this cluster at this level; by topic, at which of its partitions that stands.

        Raises Waits.
        """
        found = await cluster.committed_offsets([self._group], stable=True)
        if self._group not in found:
            raise Waits(reasons.TARGET_UNREACHABLE, f"{leaf} does not say now what it was given")
        given: dict[TopicPartition, KeptGiven | PositionError] = {}
        kept: dict[str, dict[int, dict[int, KeptGiven]]] = defaultdict(dict)
        for (topic, partition), committed in found[self._group].items():
            try:
                kept[topic][partition] = read_given(partition, committed.offset, committed.metadata)
            except PositionError as error:
                given[topic, partition] = error
        for topic, of_topic in kept.items():
            for partition, each in latest(each for at in of_topic.values() for each in at.items()).items():
                given.setdefault((topic, partition), each)
        return given, {topic: {at: there.keys() for at, there in of_topic.items()} for topic, of_topic in kept.items()}

    async def _met(self, target: str, topics: Mapping[str, TopicInfo]) -> dict[TopicPartition, int]:
        """The positions of all partitions that are distributed. Raises Waits."""
        cluster = await self._leaves.reached(target)
        with _asking(target):
            there = await self._topics_there(cluster, target, topics)
            self._looked = _seen(topics, there)
            self._target = await self._leaves.transactions(target, self._transactions)
            await self._target.begin()
            given, kept_at = await self._given_to(cluster, target)
        self._partitions = {name: len(topic.partitions) for name, topic in topics.items()}
        counts = {name: len(topic.partitions) for name, topic in there.items()}
        self._spread.clear()
        self.by_key = {name: count for name, count in counts.items() if count != len(topics[name].partitions)}
        places = [each for each in self.courses if each not in self._not_read]
        for place in places:
            if place[0] not in there:
                name = self._leaves.name_there(target, place[0])
                if self.courses[place].fills:
                    # What it was given of others would have it seem to be filled.
                    raise Waits(
                        reasons.TOPIC_MISSING,
                        f"{target} is new, and has no topic {name}, which it is to be filled with: create it there, "
                        f"or apply the tree there again"
                        if name is not None
                        else f"{target} is new, and is to be filled with {place[0]}, {TOO_LONG}: delete it here",
                    )
                self._not_read[place] = Reason(
                    reasons.TOPIC_MISSING,
                    f"{target} has no topic {name}: create it there" if name is not None else f"at {target} {TOO_LONG}",
                )
        places = [each for each in places if each not in self._not_read]
        ids = {name: topic.topic_id.hex() for name, topic in topics.items()}
        self._given = {
            place: each
            for place, each in given.items()
            if isinstance(each, KeptGiven) and each.topic_id == ids.get(place[0])
        }
        self._partitions_given.clear()
        for name, partition in self._given:
            self._partitions_given[name] = max(self._partitions_given.get(name, 0), partition + 1)
        for name in kept_at.keys() & counts.keys():
            moved = {(name, each) for each in out_of_place(kept_at[name], counts[name])}
            self._uncommitted |= moved & self._given.keys()
        fills = self._document.began(self._leaf, self.level).fills
        may_fill = {*self._courses.wrong, *(place for place, course in self.courses.items() if course.fill_until)}
        self._filled = sum(self._document.has(self._leaf, topic) for topic, _ in may_fill) if fills else 0
        found = await some_at_once(PLACES_AT_ONCE, partial(self._position, given), places)
        positions = {place: position for place, position in zip(places, found, strict=True) if position is not None}
        for place in positions:
            self._note_spread(place)
        await self._courses.keep(positions)
        self._not_read |= self._courses.wrong
        positions = {place: position for place, position in positions.items() if place not in self._not_read}
        for place, position in positions.items() if fills else ():
            # Said of all partitions before the first message: from then on the leaf tells that it lacks some.
            known, said = self._given.get(place), Given(self.courses[place].current.term, position)
            if known is None or known.given != said:
                self._keep(place, position)
            elif known.filled != self._filled:
                self._keep(place, position, known.epoch)
        names = {topic for topic, _ in positions}
        with _asking(target):
            self._target_ends = await topic_ends(cluster, {name: range(counts[name]) for name in names})
        for place, position in positions.items():
            self._mark(place, position)
        self.positions = positions
        return positions

    def _note_spread(self, place: TopicPartition) -> None:
        """Until when messages go by their keys: to be kept before any does, or none does any more."""
        known = self._courses.spread_ms.get(place, 0)
        if place[0] in self.by_key:
            self._courses.spread_ms[place] = STILL
        elif known == STILL or (place in self._spread and not known):
            self._courses.spread_ms[place] = int(self._context.clock.time() * 1000)

    async def _topics_there(self, cluster: LeafApi, leaf: str, topics: Collection[str]) -> Mapping[str, TopicInfo]:
        """Those of some topics that a leaf has, which has this version of the tree. Raises Waits."""
        there = await cluster.topics_named(topics)
        if there or not topics:  # else it distributes none of them, and says nothing of its version
            await self._check_version(cluster, leaf, topics)
        return there

    async def _check_version(self, cluster: LeafApi, leaf: str, topics: Collection[str]) -> None:
        """Whether a leaf has the same version of the tree: its own distributor of this level keeps it. Raises Waits."""
        group = courses_group(self.level)
        found = await cluster.committed_offsets([group])
        kept = [KeptCourse.of(each.metadata) for place, each in found.get(group, {}).items() if place[0] in topics]
        for each in kept:
            if each.version != self._tree.version:
                raise Waits(
                    reasons.TARGET_AT_ANOTHER_VERSION,
                    f"{leaf} has version {each.version} of the tree, and this cluster {self._tree.version}: apply the "
                    f"later one there, or here",
                )
            if not is_of(each, self._document):
                raise Waits(
                    reasons.TARGET_AT_ANOTHER_VERSION,
                    f"{leaf} has another tree as version {each.version}: one of the two is to leave its tree, and to "
                    f"apply what `isthmus tree document` prints at the other",
                )
        if not kept:
            raise Waits(
                reasons.TARGET_AT_ANOTHER_VERSION,
                f"{leaf} distributes nothing for level {self.level}: apply the tree there, and see that it has the "
                f"topics, and proxies with the distribution plugin",
            )

    async def _position(
        self, given: Mapping[TopicPartition, KeptGiven | PositionError], place: TopicPartition
    ) -> int | None:
        """Where to go on; None: nobody knows, and it is left out. Raises BrokerUnavailable."""
        position = await self._said(given, place)
        if position is None:
            return None
        start = await self._cluster.log_start(*place)
        if position < start:
            self.lost += start - position
            self.told[place] = Reason(
                reasons.MESSAGES_LOST,
                f"retention has taken offsets {position} to {start - 1} before they were given: see that topics keep "
                f"what a target that is away will be given",
            )
            position = start
            self._keep(place, position)
        return position

    async def _said(
        self, given: Mapping[TopicPartition, KeptGiven | PositionError], place: TopicPartition
    ) -> int | None:
        """Up to where the current target was given all, as it says; None: that cannot be, and it is left out."""
        course = self.courses[place]
        try:
            kept = self._of(given, place)
            position = course.position(None if kept is None else kept.given)
        except PositionError as error:
            self._not_read[place] = Reason(reasons.POSITIONS_CONTRADICT, str(error))
            return None
        said = kept is not None and kept.given.term == course.current.term
        if place[0] in self.by_key or (kept is not None and said and kept.spread):
            self._spread.add(place)
        return await self._cut(place, position, kept.epoch if kept is not None and said else UNKNOWN_EPOCH)

    def _of(self, given: Mapping[TopicPartition, KeptGiven | PositionError], place: TopicPartition) -> KeptGiven | None:
        """What is kept of a partition of this very topic. Raises PositionError: what is kept is not a position.

        Brokers forget the courses of a topic that is deleted, and the target's do not know of that.
        """
        found = given.get(place)
        if isinstance(found, PositionError):
            raise found
        return found if found is not None and found.topic_id == self._courses.topic_ids[place] else None

    def _keep(self, place: TopicPartition, position: int, epoch: int = UNKNOWN_EPOCH) -> None:
        """Have the target keep a position, with the next transaction."""
        self._given[place] = self._kept(place, position, epoch)
        self._uncommitted.add(place)

    def _kept(self, place: TopicPartition, position: int, epoch: int = UNKNOWN_EPOCH) -> KeptGiven:
        """A position as the target keeps it."""
        course = self.courses[place]
        given = Given(course.current.term, position)
        spread, topic_id = place in self._spread, self._courses.topic_ids[place]
        return KeptGiven(given, topic_id, epoch, course.fill_until, spread, self._filled)

    def _to_commit(self, kept: Mapping[TopicPartition, KeptGiven]) -> dict[TopicPartition, CommittedOffset]:
        """These and what is not committed yet, beside what is kept at the same partitions. Raises PositionError."""
        offsets: dict[TopicPartition, CommittedOffset] = {}
        for topic, partition in self._uncommitted | kept.keys():
            ours, theirs = self._partitions[topic], self.by_key.get(topic, self._partitions[topic])
            at, end = given_at(partition, theirs), max(ours, self._partitions_given.get(topic, 0))
            if (topic, at) not in offsets:
                together = {
                    each: kept.get((topic, each)) or self._given.get((topic, each)) for each in range(at, end, theirs)
                }
                known = {each: given for each, given in together.items() if given is not None}
                offsets[topic, at] = CommittedOffset(*given_metadata(at, known))
        return offsets

    async def _cut_where_read(self, place: TopicPartition) -> None:
        read = self._courses.read.get(place)
        if read is not None:
            await self._cut(place, *read)

    async def _cut(self, place: TopicPartition, position: int, epoch: int) -> int:
        """Where to go on in a log that was read up to ``position``, with a record of ``epoch`` before it.

        If brokers elected a leader since that lacks records, what it has in their place was given to nobody.
        """
        end, known = await self._cluster.log_end(*place), UNKNOWN_EPOCH
        if epoch >= 0:
            known, epoch_end = await self._cluster.epoch_end(*place, epoch)
            end = end if epoch_end < 0 else min(end, epoch_end)
        if end >= position:
            return position
        self._courses.by_place[place] = self.courses[place].cut(end)
        # Of which epoch the record before the end is: it may be lost as well before anything is given from here on.
        self._courses.read[place] = end, known
        self.told[place] = Reason(
            reasons.MESSAGES_LOST,
            f"this cluster lost offsets {end} to {position - 1} of it after they were given: other clusters have them, "
            f"and it goes on at {end}",
        )
        return end

    def _mark(self, place: TopicPartition, position: int) -> None:
        """What stands before a position is in the target's logs, before the ends that are known of them."""
        topic, partition = place
        ends = self._target_ends[topic]
        if place not in self._spread:
            ends = {partition: ends[partition]}
        self._settling.mark(place, position, ends)

    # ---- give ----

    async def _give(self, target: str) -> None:
        loop = asyncio.get_running_loop()
        due, kept_again = loop.time() + TICK_S, loop.time() + KEPT_AGAIN_S
        tick: asyncio.Task[None] | None = None
        try:
            while True:
                if self._is_chosen_anew:
                    raise Again(f"the target is {self.target}")
                if not self._preparing:
                    due_now = due if tick is None else math.inf
                    await self._reads.wait(min(due_now, self._keep_at, self._refusals.next_try))
                self._go_on_with_refused()
                for read in self._reads.take(GIVEN_BYTES - self._prepared_bytes):
                    await self._prepare(read)
                if self._preparing:
                    await self._give_prepared(target)
                if loop.time() >= self._keep_at:
                    await self._meanwhile(self._keep_positions(target))
                if tick is not None and tick.done():
                    tick.result()
                    tick, due = None, loop.time() + TICK_S
                if tick is None and loop.time() >= due:
                    again = loop.time() >= kept_again
                    if again:
                        kept_again = loop.time() + KEPT_AGAIN_S
                        self._keep_given_again()
                    if self._uncommitted:
                        await self._meanwhile(self._keep_positions(target))
                    tick = self._begun("tick", self._tick(target, again))
        finally:
            await _ended(tick)
            await self._leave(target)

    def _begun(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task whose end is noticed by who waits for what is read."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._lane}/{name}")
        task.add_done_callback(lambda _: self._reads.wake())
        return task

    async def _leave(self, target: str) -> None:
        """What was given without a transaction is not to be given again by who goes on."""
        if self._keep_at < math.inf:
            with suppress(Waits, BrokerUnavailable, PositionError, TimeoutError):
                async with asyncio.timeout(LEAVING_S):
                    await self._keep_positions(target)

    async def _meanwhile(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for something, and prepare what is read meanwhile."""
        task = self._begun("meanwhile", work)
        try:
            while not task.done():
                if self._prepared_bytes >= GIVEN_BYTES:
                    await asyncio.wait([task])
                    break
                await self._reads.wait()
                for read in self._reads.take(1):
                    await self._prepare(read)
            return task.result()
        finally:
            if not task.done():
                await _ended(task)

    async def _prepare(self, read: Read) -> None:
        """Rewrite what was read, for what is given next."""
        place = read.place
        if place in self._not_read or read.offset != self._next[place]:
            return  # or it was read before the partition went back
        self.ends[place] = read.end
        if read.following == read.offset:
            return
        prepared = self._preparing.get(place)
        if prepared is None:
            payload_max, one_batch = self._refusals.payload_max(place), self._refusals.one_batch(place)
            copies = Copies(self._tree.header.encode(), self.courses[place], self.level, payload_max, one_batch)
            prepared = self._preparing[place] = Prepared(place, copies, self.by_key.get(place[0]))
        try:
            await beside_the_loop(read.size, partial(prepared.add, read))
            self._prepared_bytes += read.size
        except BatchError as error:
            # Nothing behind it is given, or it would be left out for good.
            self._not_read[place] = Reason(reasons.MALFORMED_BATCH, f"at or behind {self.positions[place]}: {error}")
            self._unprepare(place)
            self._reads.leave_out(place)
        else:
            self._next[place] = read.following

    def _unprepare(self, place: TopicPartition) -> None:
        prepared = self._preparing.pop(place, None)
        self._prepared_bytes -= 0 if prepared is None else prepared.size

    async def _give_prepared(self, target: str) -> None:
        """Give all that is prepared, and what is prepared until the target's last transaction is complete."""
        assert self._target is not None
        begun = False
        if self._document.exactly_once and any(each.copies.messages for each in self._preparing.values()):
            check_lease(self._context)
            places = [place for place, each in self._preparing.items() if each.copies.messages and not each.counts]
            try:
                with _asking(target):
                    await self._meanwhile(self._target.open(places, self._group))
                begun = True
            except PartitionsRefused as error:
                self._hold({place: error.refused[place] for place in places if place in error.refused})
        prepared, size = list(self._preparing.values()), self._prepared_bytes
        self._preparing, self._prepared_bytes = {}, 0
        parcels = await beside_the_loop(size, lambda: [each.parcel() for each in prepared])
        ends: dict[TopicPartition, int] = {}
        while begun or any(each.batches for each in parcels):
            batches: dict[TopicPartition, list[bytes]] = {}
            for each in parcels:
                for there, made in each.batches.items():
                    if there not in ends:
                        batches.setdefault(there, []).extend(made)
            try:
                ends |= await self._meanwhile(self._commit(target, batches, parcels))
                break
            except PartitionsRefused as error:
                # Of a transaction nothing stays. Without one what was appended does.
                ends |= error.ends
                refused = {
                    each.place: error.refused[there]
                    for each in parcels
                    for there in each.batches
                    if there in error.refused
                }
                if not refused:
                    raise Waits(reasons.TARGET_UNREACHABLE, f"cluster {target}: {error}") from error
                self._hold(refused)
                parcels = [each for each in parcels if each.place not in refused]
                begun = False
        else:  # the positions go with the next transaction, or at the next tick
            for each in parcels:
                self._given[each.place] = self._kept(each.place, each.following, each.epoch)
                self._uncommitted.add(each.place)
        self._note_given(target, parcels, ends)

    def _note_given(self, target: str, parcels: Sequence[Parcel], ends: Mapping[TopicPartition, int]) -> None:
        for (topic, partition), end in ends.items():
            # Another mapping: marks have the one of before.
            self._target_ends[topic] = {**self._target_ends[topic], partition: end}
        for each in parcels:
            place = each.place
            self._courses.read[place] = each.following, each.epoch
            self.positions[place] = each.following
            self._mark(place, each.following)
            self.given[target] += each.messages
            self._note_refused(each)
            if not each.is_all:
                self._go_back(place)
            self._refusals.given(place, each.following)

    async def _commit(
        self, target: str, batches: Mapping[TopicPartition, Sequence[bytes]], parcels: Sequence[Parcel] = ()
    ) -> Mapping[TopicPartition, int]:
        """Give batches, with the positions behind them and all that are not committed yet.

        Without transactions positions are committed by themselves, so that nothing waits for that. Raises Waits,
        ProducerFenced, PartitionsRefused.
        """
        assert self._target is not None
        check_lease(self._context)  # what was paused gives nothing to a cluster that has left since, and come back
        kept = {each.place: self._kept(each.place, each.following, each.epoch) for each in parcels}
        later = bool(batches) and not self._document.exactly_once
        with _asking(target):
            ends = await self._target.commit(batches, self._group, {} if later else self._to_commit(kept))
        self._given |= kept
        if later:
            self._uncommitted |= kept.keys()
            self._not_kept += sum(each.messages for each in parcels)
            wait_s = KEPT_S if self._not_kept < KEPT_MESSAGES else 0
            self._keep_at = min(self._keep_at, asyncio.get_running_loop().time() + wait_s)
        else:
            self._uncommitted.clear()
            self._keep_at, self._not_kept = math.inf, 0
        return ends

    async def _keep_positions(self, target: str) -> None:
        await self._commit(target, {})

    def _note_refused(self, parcel: Parcel) -> None:
        for refused in parcel.refused:
            self.refused += refused.messages
            self.told[parcel.place] = Reason(
                reasons.FLAGS_REFUSED,
                f"{refused.messages} messages from offset {refused.first_offset} on stay here: {refused.reason}",
            )

    # ---- what the target refuses ----

    def _hold(self, refused: Mapping[TopicPartition, Refusal]) -> None:
        """Have partitions wait that the target has refused, and the others go on."""
        now = asyncio.get_running_loop().time()
        for place, refusal in refused.items():
            until = self._next[place]
            self._go_back(place)
            held = self._refusals.hold(place, refusal, self.positions[place], until, now)
            if held is None:
                continue
            self._not_read[place] = held.reason
            self._reads.leave_out(place)
            if held.is_news:
                more = {"level": self.level, "partition": f"{place[0]}-{place[1]}", "error": str(refusal.error)}
                log.warning("partition is refused", extra=more)

    def _go_back(self, place: TopicPartition) -> None:
        """What is prepared of a partition is not given next."""
        self._unprepare(place)
        self._next[place] = self.positions[place]
        self._reads.go_back(place, self.positions[place])

    def _go_on_with_refused(self) -> None:
        for place in self._refusals.due(asyncio.get_running_loop().time()):
            del self._not_read[place]
            self._reads.go_back(place, self.positions[place])

    # ---- tick ----

    async def _tick(self, target: str, again: bool) -> None:
        """What is looked at beside the giving. Raises Again, and what ends that."""
        check_lease(self._context)
        await self._courses.keep(self.courses if again else await self._settling.settle(), again)
        if asyncio.get_running_loop().time() >= self._look_again_at:
            await self._note_filled()
            if await self._look(target) != self._looked:
                raise Again("topics have changed")

    def _keep_given_again(self) -> None:
        for place, position in self.positions.items():
            known = self._given.get(place)
            if known is not None and known.given == Given(self.courses[place].current.term, position):
                self._uncommitted.add(place)
            else:
                self._keep(place, position)

    async def _look(self, target: str) -> object:
        """What topics there are, and with how many partitions, at both clusters; and who leads them here."""
        self._look_again_at = asyncio.get_running_loop().time() + LOOK_S
        here = await self._topics()
        cluster = await self._leaves.reached(target)
        with _asking(target):
            there = await self._topics_there(cluster, target, here)
        return _seen(here, there)


async def _ended(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task that nobody waits for any more, and wait until it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _seen(here: Mapping[str, TopicInfo], there: Mapping[str, TopicInfo]) -> object:
    """What is not to change while topics are distributed."""
    return (
        {name: (info.topic_id, [each.leader_epoch for each in info.partitions]) for name, info in here.items()},
        {name: len(info.partitions) for name, info in there.items()},
    )


@contextmanager
def _asking(target: str) -> Iterator[None]:
    """Raises Waits where a target's brokers do not answer, or refuse more than some partitions."""
    try:
        yield
    except PartitionsRefused:
        raise
    except (BrokerUnavailable, KafkaRefused) as error:
        raise Waits(reasons.TARGET_UNREACHABLE, f"cluster {target}: {error}") from error
