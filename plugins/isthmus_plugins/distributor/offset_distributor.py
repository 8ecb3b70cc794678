"""Tells other clusters how far groups have read here, by time (document 000's offset distributor).

Once a second, of each group whose last commit was here: the least timestamp of what it has not read, and of what other
clusters hold and have not given this one yet, less the margin. That goes into the topic of times. In the same
transaction this cluster keeps, for the others to ask, what it has reached there itself: see
:class:`~isthmus_plugins.distribution.kept.KeptReached`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from isthmus_control.model import Reason
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, KafkaRefused, TopicPartition, Transactions
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.group_times import ORIGIN_HEADER, GroupTime, Spread, is_news, key_of, was_last_here
from isthmus_plugins.distribution.kept import (
    REACHED_GROUP,
    STILL,
    TIMES_ID,
    TIMES_TOPIC,
    KeptCourse,
    KeptReached,
    courses_group,
    time_of,
)
from isthmus_plugins.distribution.positions import PositionError
from isthmus_plugins.distribution.times import moves_on, reached, time_to_send
from isthmus_plugins.distributor import reasons
from isthmus_plugins.distributor.followed import Commits, TimedLog, Times, Timestamps
from isthmus_plugins.distributor.leaves import Leaves
from isthmus_plugins.distributor.places import PLACES_AT_ONCE, committed_of_all
from isthmus_plugins.distributor.reasons import Waits
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import some_at_once
from isthmus_protocol.offsets_log import Commit, OffsetKey
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import PLAIN_HEADER

log = logging.getLogger("isthmus_plugins.distributor")

TICK_S: Final = 1.0
BATCH_BYTES: Final = 512 * 1024
"""Of keys and values: brokers take a megabyte by default. An application's metadata may become six times as long as
text of JSON."""
KEPT_AT_ONCE: Final = 500
COUNT_TIMEOUT_S: Final = 3.0
"""For a cluster to answer how many partitions a topic has. One that has just been lost holds nothing up for longer."""
AGAIN_S: Final = 3_600.0
"""What has not changed is kept and told again: brokers forget offsets of groups without members after a week, and
cleaning leaves the last record of a group, which may be what another cluster has said before."""


CourseOf: TypeAlias = tuple[int, str, int, str]
"""Level, topic, partition, and the topic's id as hexadecimal digits."""


class Said(NamedTuple):
    """What another cluster has said that it has reached here."""

    at: float
    """Monotonic seconds: it was said before."""
    times: Mapping[TopicPartition, int]
    partitions: Mapping[str, int]
    """By topic: of how many partitions."""


class Reached(NamedTuple):
    """What this cluster has said that it has reached at others, of a partition."""

    topic_id: bytes
    """Brokers forget what was said of a topic that is deleted."""
    kept: KeptReached
    at: float
    """Monotonic seconds."""


class EpochEnd(NamedTuple):
    """Where a leader epoch ends in a log."""

    topic_id: bytes
    leader_epoch: int
    """A later one: of who said so."""
    end: int
    """-1: that is not known."""


class ByKeys(NamedTuple):
    """Of a group, and a topic of which messages went by their keys: they stand in any partition elsewhere."""

    least: int | None
    """The least timestamp of what may have gone by its key, and the group has not read here, or is on its way here."""
    read_at: float
    """Monotonic seconds: when the first of the topic's logs was read."""


NOTHING_BY_KEYS: Final = ByKeys(None, math.inf)


class OffsetDistributor:
    """Of this cluster."""

    def __init__(
        self,
        context: PluginContext,
        document: TreeDocument,
        leaf: str,
        commits: Commits,
        times: Times,
        timestamps: Timestamps,
        leaves: Leaves,
    ) -> None:
        self._context = context
        self._cluster = context.cluster
        self._clock = context.clock
        self._document = document
        self._tree = document.tree
        self._margin_of = document.margin_of
        self._least_margin_ms = document.least_margin_ms
        self._leaf = leaf
        self._since = {above.level: document.began(leaf, above.level).version for above in self._tree.above(leaf)}
        """Since which version this cluster has a level. What is kept of one from before is of an earlier life."""
        self._commits = commits
        self._times = times
        self._timestamps = timestamps
        self._leaves = leaves
        self._transactions: Transactions = context.cluster.transactions(TIMES_ID)
        self.others = {each: self._tree.level_between(leaf, each) for each in self._tree.leaves if each != leaf}
        self._said: dict[str, list[Said]] = {each: [] for each in self.others}
        """The last ones, the newest last."""
        self._unheard: dict[str, str] = {}
        """Clusters that do not answer, and why."""
        self._partitions: Mapping[str, int] = Counter()
        """By topic: how many this cluster has, whether they are followed yet or not."""
        self._counted_at = -math.inf
        """Monotonic seconds: they were counted later. What others have said since, they may have said of more."""
        self._reached: dict[TopicPartition, Reached] = {}
        self._spread_ms: dict[str, int] = {}
        """By topic: before which time messages went by their keys somewhere in the tree."""
        self._spreads: set[str] = set()
        """Topics of which this cluster's messages go by their keys now."""
        self._epoch_ends: dict[tuple[TopicPartition, int], EpochEnd] = {}
        """By partition and leader epoch, as it was asked last."""
        self._beyond: dict[OffsetKey, tuple[int, float]] = {}
        """What groups have committed beyond the end of a log, and when that was seen first (monotonic seconds)."""
        self._began_at = context.clock.monotonic()
        self._told_at: dict[OffsetKey, float] = {}
        # What is shown.
        self.unsaid: dict[OffsetKey, Reason] = {}
        """Groups of which nothing is said, or nothing new."""
        self.sent = 0
        """Records."""

    async def begin(self) -> None:
        """Fence whoever has done this before, and read what that one has heard of. Raises BrokerUnavailable,
        KafkaRefused."""
        await self._transactions.begin()
        found = await committed_of_all(self._cluster, [REACHED_GROUP], stable=True)
        for (topic, _), each in found[REACHED_GROUP].items():
            with suppress(PositionError):  # it is written anew
                self._hear_of_keys(topic, KeptReached.of(each.metadata).spread_ms)

    # ---- what others have reached here ----

    async def ask(self, other: str) -> None:
        """Ask another cluster what it has reached here."""
        try:
            times, partitions = await self._asked(other)
        except (Waits, BrokerUnavailable, KafkaRefused, PositionError) as error:
            if other not in self._unheard:
                log.warning("reached is not known", extra={"cluster": other, "error": str(error)})
            self._unheard[other] = str(error)
        else:
            self._unheard.pop(other, None)
            self._said[other] = [*self._said[other][-1:], Said(self._clock.monotonic(), times, partitions)]

    async def ask_for_ever(self, other: str) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self.ask(other)
            await asyncio.sleep(TICK_S)

    async def _asked(self, other: str) -> tuple[dict[TopicPartition, int], Mapping[str, int]]:
        """What another cluster has reached here, and how many partitions its topics have: also those of which the level
        between the two gives nothing yet."""
        cluster = await self._leaves.reached(other)
        found = await committed_of_all(cluster, [REACHED_GROUP])
        level = self.others[other]
        kept = {place: KeptReached.of(each.metadata) for place, each in found[REACHED_GROUP].items()}
        for (topic, _), reached_there in kept.items():
            self._hear_of_keys(topic, reached_there.spread_ms)
        # What was kept before that cluster began with the level is of an earlier life: another one stood here then.
        since = self._document.began(other, level).version
        times = {
            place: each.times[level] for place, each in kept.items() if level in each.times and each.version >= since
        }
        return times, _counted(kept)

    def _hear_of_keys(self, topic: str, spread_ms: int) -> None:
        """Messages of a topic went by their keys before a time, or do now. That is never forgotten: the cluster that
        said so may leave."""
        spread_ms = time_of(spread_ms, int(self._clock.time() * 1000))
        if spread_ms > self._spread_ms.get(topic, 0):
            self._spread_ms[topic] = spread_ms

    def _on_the_way(self, place: TopicPartition, read_at: float) -> list[int] | None:
        """What each other cluster had reached here when this cluster's log was read, and its partitions were counted,
        or before; None: that was before they said what is known now. Raises Waits where one has not said it.

        Where a topic has another number of partitions there, messages go by their keys: what a group has not read of
        one partition is in any of the others', of which nobody could say how far to go on.
        """
        topic = place[0]
        own = self._partitions[topic]
        times: list[int] = []
        for other, all_said in self._said.items():
            if not all_said or place not in all_said[-1].times:
                why = self._unheard.get(other, f"it has said nothing of {place[0]}-{place[1]} yet")
                raise Waits(
                    reasons.REACHED_UNKNOWN, f"what {other} has of it that did not come here is not known: {why}"
                )
            if all_said[-1].partitions[topic] != own:
                raise Waits(
                    reasons.REACHED_UNKNOWN,
                    f"{other} has said something of {all_said[-1].partitions[topic]} partitions of {topic}, of which "
                    f"this cluster has {own}: groups go on elsewhere in topics that have as many partitions everywhere",
                )
            said = next((each for each in reversed(all_said) if each.at <= min(read_at, self._counted_at)), None)
            if said is None or place not in said.times:
                return None
            times.append(said.times[place])
        return times

    def count_partitions(self, courses: Iterable[CourseOf], asked_at: float) -> None:
        """See how many partitions of each topic there are here.

        Also of those that were added and are not followed yet. What others have given to one is settled for nobody
        before this cluster's own distributors have kept its course. ``asked_at``: monotonic seconds, when those were
        asked for.
        """
        ids = {place[0]: one.topic_id.hex() for place, one in self._timestamps.logs.items()}
        distributed = {(topic, number) for _, topic, number, topic_id in courses if topic_id == ids.get(topic)}
        self._partitions, self._counted_at = _counted(self._timestamps.logs.keys() | distributed), asked_at

    async def spreads(self, topics: Collection[str]) -> Mapping[str, Spread]:
        """What may have gone by its key of these topics by now, of those that this cluster has.

        One request to each cluster; of those that do not answer, what they have said last. Raises BrokerUnavailable,
        KafkaRefused.
        """
        own = await self._cluster.topics_named(topics)
        counts = await some_at_once(len(self.others), partial(self._counts, topics), self.others)
        return {
            topic: Spread(
                [len(info.partitions), *(each[topic] for each in counts if topic in each)],
                self._spread_ms.get(topic, 0),
            )
            for topic, info in own.items()
        }

    async def _counts(self, topics: Collection[str], other: str) -> Mapping[str, int]:
        """How many partitions topics have at another cluster. Raises BrokerUnavailable where it was not asked yet."""
        said = self._said[other]
        if other not in self._unheard:
            if not said:
                raise BrokerUnavailable(f"{other} was not asked yet how many partitions its topics have")
            with suppress(Waits, BrokerUnavailable, KafkaRefused, TimeoutError):
                async with asyncio.timeout(COUNT_TIMEOUT_S):
                    found = await (await self._leaves.reached(other)).topics_named(topics)
                return {name: len(info.partitions) for name, info in found.items()}
        return said[-1].partitions if said else {}

    def lag(self) -> tuple[int, str] | None:
        """How late (ms) what other clusters take may come here, and from which one that is; None: that is not known."""
        now_ms = int(self._clock.time() * 1000)
        lags = [
            (now_ms - all_said[-1].times[place], other)
            for other, all_said in self._said.items()
            for place in self._timestamps.logs
            if all_said and place in all_said[-1].times
        ]
        return max(lags, default=None)

    # ---- once a second ----

    async def tick(self) -> None:
        """Say what is new. Raises ProducerFenced, BrokerUnavailable, KafkaRefused: :meth:`begin` again."""
        if not self._timestamps.logs:
            return
        levels = [above.level for above in self._tree.above(self._leaf)]
        logs = dict(self._timestamps.logs)
        asked_at = self._clock.monotonic()
        courses = await self.courses(levels)
        settled = await self._settled(courses, logs)
        self.count_partitions(courses, asked_at)
        news = self._news(levels, settled, logs)
        records = await self._known_gone(self._records()) if self._commits.loaded and self._times.loaded else {}
        batches = list(self._batches(records, int(self._clock.time() * 1000)))
        places = list(news)
        for first in range(0, max(len(places), 1 if batches else 0), KEPT_AT_ONCE):
            some = places[first : first + KEPT_AT_ONCE]
            offsets = {
                place: CommittedOffset(self._timestamps.logs[place].position, news[place].kept.metadata())
                for place in some
                if place in self._timestamps.logs
            }
            await self._transactions.commit(
                {(TIMES_TOPIC, 0): batches} if batches and not first else {}, REACHED_GROUP, offsets
            )
            self._reached |= {place: news[place] for place in offsets}
        self.sent += len(records)
        for key, said in records.items():
            self._times.hear(key, said, self._leaf)
        self._told_at |= dict.fromkeys(records, self._clock.monotonic())

    def _records(self) -> dict[OffsetKey, GroupTime | None]:
        """What is new of groups; None: they have committed nothing any more."""
        found: dict[OffsetKey, GroupTime | None] = {}
        own, now = self._commits.own(), self._clock.monotonic()
        for gone in self.unsaid.keys() - own.keys():
            del self.unsaid[gone]
        by_topic: dict[tuple[str, str], list[OffsetKey]] = defaultdict(list)
        for key, commit in own.items():
            known = self._times.latest.get(key)
            if key[1:] in self._timestamps.logs and commit.offset >= 0 and was_last_here(commit.committed_ms, known):
                by_topic[key.group, key.topic].append(key)
            else:
                self.unsaid.pop(key, None)
        for (group, topic), keys in by_topic.items():
            try:
                by_keys = self._by_keys(group, topic)
            except Waits as waits:
                self.unsaid |= dict.fromkeys(keys, waits.reason)
                continue
            if by_keys is None:
                continue
            for key in keys:
                commit, known = own[key], self._times.latest.get(key)
                try:
                    time = self._time(key, commit, by_keys)
                except Waits as waits:
                    self.unsaid[key] = waits.reason
                    continue
                if time is None:
                    continue
                self.unsaid.pop(key, None)
                known_of_keys = self._partitions[topic], self._spread_ms.get(topic, 0)
                said = GroupTime(time, commit.committed_ms, self._leaf, commit.metadata, 0, *known_of_keys)
                is_due = now - self._told_at.get(key, self._began_at) > AGAIN_S
                if is_due or is_news(said, known, self._margin_of(group)):
                    found[key] = said
        for key, known in self._times.latest.items():
            if not known.flags and self._commits.follows(key.group) and not self._commits.has(key):
                found[key] = None
        self._beyond = {key: each for key, each in self._beyond.items() if self._commits.has(key)}
        return found

    async def _known_gone(self, records: Mapping[OffsetKey, GroupTime | None]) -> dict[OffsetKey, GroupTime | None]:
        """Without what the groups' coordinators do not know to be gone.

        Brokers may tell of fewer partitions of the offsets topic for a moment: what stands in the others was not read.
        Raises BrokerUnavailable, KafkaRefused.
        """
        groups = {key.group for key, said in records.items() if said is None}
        found = await self._cluster.committed_offsets(groups) if groups else {}
        return {
            key: said
            for key, said in records.items()
            if said is not None or (key.group in found and key[1:] not in found[key.group])
        }

    def _by_keys(self, group: str, topic: str) -> ByKeys | None:
        """What holds a group back in each partition of a topic; None: that is not known yet. Raises Waits."""
        spread_ms = self._spread_ms.get(topic)
        if spread_ms is None:
            return NOTHING_BY_KEYS
        places = [(topic, partition) for partition in range(self._partitions[topic])]
        logs = {place: one for place in places if (one := self._timestamps.logs.get(place)) is not None}
        if len(logs) < len(places):
            return None  # some were just added, and may hold what went by its key
        committed = self._commits.offsets(group, places)
        offsets = {place: max(committed.get(place, 0), one.start) for place, one in logs.items()}
        keys = {OffsetKey(group, *place): one for place, one in logs.items()}
        unread_yet = [key for key, one in keys.items() if not self._is_read(key, one, offsets[key[1:]])]
        if unread_yet:
            return None
        read_at = min((one.read_at for one in logs.values() if one.read_at is not None), default=math.inf)
        times: list[int | None] = []
        for place, one in logs.items():
            coming = self._on_the_way(place, read_at)
            if coming is None:
                return None
            times += [one.least.from_offset(offsets[place]), *coming]
        # What is later than messages went by their keys stands in the same partition everywhere.
        last = spread_ms + self._margin_of(group)
        return ByKeys(min((each for each in times if each is not None and each <= last), default=None), read_at)

    def _time(self, key: OffsetKey, commit: Commit, by_keys: ByKeys) -> int | None:
        """What to say of a group; None: nothing yet. Raises Waits."""
        place = key.topic, key.partition
        one = self._timestamps.logs[place]
        if not self._is_read(key, one, commit.offset) or one.read_at is None:
            return None
        on_the_way = self._on_the_way(place, min(one.read_at, by_keys.read_at))
        if on_the_way is None:
            return None
        unread = one.least.since(max(commit.offset, one.start)), by_keys.least
        least = min((each for each in unread if each is not None), default=None)
        return time_to_send(least, on_the_way, self._margin_of(key.group))

    def _is_read(self, key: OffsetKey, one: TimedLog, offset: int) -> bool:
        """Whether all that a log has from a group's offset on was read; else it begins to be. Raises Waits."""
        place = key.topic, key.partition
        if one.broken is not None:
            raise Waits(reasons.MALFORMED_BATCH, one.broken)
        if one.is_append_time:
            raise Waits(
                reasons.APPEND_TIME,
                f"{place[0]} has message.timestamp.type=LogAppendTime here: its messages have other times elsewhere. "
                f"Set CreateTime",
            )
        if not one.covers(offset):
            self._timestamps.read_from(place, offset)
            return False
        if one.read_at is None:
            return False
        end = max(one.position, one.end or 0)
        if offset <= end:
            self._beyond.pop(key, None)
            return True
        # The group has read something else: what this log holds, and will, is unread. Or it is only ahead of what
        # follows the log, until that was read to its end again.
        since = self._beyond.get(key)
        if since is None or since[0] != offset:
            self._beyond[key] = offset, self._clock.monotonic()
        elif one.read_at > since[1]:
            raise Waits(
                reasons.MESSAGES_LOST,
                f"it has committed offset {offset} of {place[0]}-{place[1]}, which ends at {end} here: the log lost "
                f"its end, or is another one. Reset the group's offset there",
            )
        return False

    def _batches(self, records: Mapping[OffsetKey, GroupTime | None], now_ms: int) -> Iterator[bytes]:
        gone = ((ORIGIN_HEADER, self._leaf.encode()),)
        some: list[Record] = []
        left = BATCH_BYTES
        for key, said in records.items():
            topic = self._document.shared_name(self._leaf, key.topic)
            assert topic is not None  # it is distributed
            shared, value = key_of(key._replace(topic=topic)), None if said is None else said.value()
            size = len(shared) + len(value or b"")
            if some and size > left:
                yield encode_batch(some, PLAIN_HEADER)
                some, left = [], BATCH_BYTES
            some.append(Record(len(some), now_ms, shared, value, gone if said is None else ()))
            left -= size
        if some:
            yield encode_batch(some, PLAIN_HEADER)

    def _news(
        self, levels: Sequence[int], settled: Mapping[CourseOf, int], logs: Mapping[TopicPartition, TimedLog]
    ) -> dict[TopicPartition, Reached]:
        """What this cluster has reached at others, of partitions of which that has changed.

        ``logs``: of which what is settled was asked for.
        """
        now = self._clock.monotonic()
        changed: dict[TopicPartition, Reached] = {}
        followed = _counted(self._timestamps.logs)
        for place, one in logs.items():
            if followed[place[0]] < self._partitions[place[0]]:
                continue  # others would take it for all that there is, while what is in the rest goes by its key
            if self._timestamps.logs.get(place) is not one:
                continue  # it is read anew: of another leader maybe, whose log lacks what was settled
            if one.read_at is None or one.broken is not None:
                continue
            upto = {
                level: settled[level, *place, one.topic_id.hex()]
                for level in levels
                if (level, *place, one.topic_id.hex()) in settled
            }
            if any(offset > one.position for offset in upto.values()):
                continue  # it is not read so far yet; or it lost its end, and what comes there is settled for nobody
            if upto and not one.covers(min(upto.values())):
                self._timestamps.read_from(place, min(upto.values()))
                continue
            times = {level: reached(one.read_at_ms, one.least.from_offset(offset)) for level, offset in upto.items()}
            before = self._reached.get(place)
            spread_ms = STILL if place[0] in self._spreads else self._spread_ms.get(place[0], 0)
            if (
                before is None
                or before.topic_id != one.topic_id
                or before.kept.spread_ms != spread_ms
                or now - before.at > AGAIN_S
                or any(
                    moves_on(before.kept.times.get(level), time, self._least_margin_ms) for level, time in times.items()
                )
            ):
                changed[place] = Reached(one.topic_id, KeptReached(times, spread_ms, self._tree.version), now)
        return changed

    async def _settled(
        self, courses: Mapping[CourseOf, KeptCourse], logs: Mapping[TopicPartition, TimedLog]
    ) -> dict[CourseOf, int]:
        """What this cluster's distributors have settled, of what its logs hold.

        One that lost its end may be longer than before by now, and its distributor not have noticed: what stands in the
        place of what was lost was given to nobody. Raises BrokerUnavailable, KafkaRefused.
        """
        asked: dict[TopicPartition, set[int]] = {}
        for (_, topic, partition, _), kept in courses.items():
            one = logs.get((topic, partition))
            if one is not None and 0 <= kept.epoch < one.leader_epoch:
                asked.setdefault((topic, partition), set()).add(kept.epoch)
        epochs = [(place, epoch) for place, epochs in asked.items() for epoch in epochs]
        found = await some_at_once(PLACES_AT_ONCE, partial(self._epoch_end, logs), epochs)
        self._epoch_ends = dict(zip(epochs, found, strict=True))
        settled: dict[CourseOf, int] = {}
        for course_of, kept in courses.items():
            _, topic, partition, _ = course_of
            known = self._epoch_ends.get(((topic, partition), kept.epoch))
            end = -1 if known is None else known.end
            is_cut = 0 <= end < kept.read
            settled[course_of] = min(kept.course.settled, end) if is_cut else kept.course.settled
        return settled

    async def _epoch_end(self, logs: Mapping[TopicPartition, TimedLog], asked: tuple[TopicPartition, int]) -> EpochEnd:
        """Where an earlier leader epoch ends in a log, which does not change while that has the same leader."""
        place, epoch = asked
        one, known = logs[place], self._epoch_ends.get(asked)
        if known is None or (known.topic_id, known.leader_epoch) != (one.topic_id, one.leader_epoch):
            _, end = await self._cluster.epoch_end(*place, epoch)
            known = EpochEnd(one.topic_id, one.leader_epoch, end)
        return known

    async def courses(self, levels: Sequence[int]) -> dict[CourseOf, KeptCourse]:
        """Of this cluster's distributors, as they have kept them.

        They also say whether messages go by their keys. Raises BrokerUnavailable, KafkaRefused.
        """
        groups = {courses_group(level): level for level in levels}
        found = await committed_of_all(self._cluster, groups)
        courses: dict[CourseOf, KeptCourse] = {}
        self._spreads = set()
        for group, level in groups.items():
            for place, committed in found[group].items():
                try:
                    kept = KeptCourse.of(committed.metadata)
                except PositionError:
                    continue  # that level's distributor says so
                self._hear_of_keys(place[0], kept.spread_ms)
                if kept.spread_ms == STILL:
                    self._spreads.add(place[0])
                if kept.version >= self._since[level]:
                    courses[level, *place, kept.topic_id] = kept
        return courses


def _counted(places: Iterable[TopicPartition]) -> Mapping[str, int]:
    """How many partitions there are, by topic."""
    return Counter(topic for topic, _ in places)
