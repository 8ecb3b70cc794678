"""Groups that move over a tree while partitions are added to its topic, simulated: nothing that is unread is left out.

Random trees, in which messages go from cluster to cluster as distributors give them: by their keys where these have
seen other counts of partitions, until they look again. What is settled they hear from their targets, some time later.
The real offset distributors and committers look at logs, at what others have said, and at commits, each as it was at
some moment before; also at how many partitions there are here. A group reads and commits partitions at one cluster, and
moves to another one in the midst of it. Always:

- what stands before an offset that a committer sets, in any partition, was read by the group, somewhere;
- a group is not set where it has members, and not back where it went on by itself.

In the end all clusters have as many partitions, what is said is near the margin, and the group has read every message.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.fake_cluster import run_simulated
from support.seeds import seeds

from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, Refused, TopicPartition
from isthmus_plugins.distribution import kept as kept_module
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.group_times import GroupTime, read_key, unmarked
from isthmus_plugins.distribution.kept import STILL, KeptCourse, courses_group, time_of
from isthmus_plugins.distribution.positions import Course, Ends, Reports, Stretch, Term
from isthmus_plugins.distribution.tree import Above, Node, Subtree, Tree
from isthmus_plugins.distributor.followed import TimedLog, Times
from isthmus_plugins.distributor.later import Found
from isthmus_plugins.distributor.offset_committer import EARLIEST, OffsetCommitter
from isthmus_plugins.distributor.offset_distributor import OffsetDistributor
from isthmus_protocol.error_codes import UNKNOWN_MEMBER_ID
from isthmus_protocol.offsets_log import Commit, OffsetKey
from isthmus_protocol.record_codec import decode_records

SEEDS = 40
STEPS = 700
PARTITIONS_MAX = 6
KEYS = 12
BEGAN_MS = 1_700_000_000_000
MARGIN_MS = 500
LATE_MS = 200
"""Messages have timestamps so much earlier than their clusters take them, at most."""
SKEW_MS = 100
MINUTE_MS = 1_000
"""To which what is heard of keys is rounded: with the real one all of it would be of the time when partitions are
added."""
ROUND_MS = 4_000
"""From one round to the next, while all comes to rest."""
TOPIC = "t"
GROUP = "g"
TOPIC_ID = bytes(16)
PRODUCED = 63
"""In the place of the level by which a message came: it was produced here."""


class Message(NamedTuple):
    number: int
    timestamp: int
    key: int


class Clock:
    """One for all clusters; each has its wall clock go wrong by so much."""

    def __init__(self) -> None:
        self.now_ms = 0

    def of(self, skew_ms: int) -> Any:
        return SimpleNamespace(
            monotonic=lambda: self.now_ms / 1000, time=lambda: (BEGAN_MS + self.now_ms + skew_ms) / 1000
        )


class Partition:
    """As brokers have it."""

    def __init__(self) -> None:
        self.start = 0
        self.log: list[tuple[Message, int]] = []
        """Messages, and by which level they came."""


class Giver:
    """The distributor of one level of a cluster, with one target."""

    def __init__(self, cluster: Cluster, above: Above) -> None:
        self.cluster = cluster
        self.level = above.level
        self.target = cluster.world.rng.choice(above.beside)
        self.own = self.theirs = 0
        """How many partitions it has seen here, and at its target."""
        self.ends: dict[int, int] = {}
        """Where the target's logs end behind what it was given."""
        self.positions: list[int] = []
        self.settled: list[int] = []
        self.spread_ms: list[int] = []
        self.spread: list[bool] = []
        """Whether something of a partition went by its key."""
        self.reports: list[Reports] = []

    def meet(self) -> None:
        """Look how many partitions there are, and go on; as one that has just taken over."""
        target = self.cluster.world.clusters[self.target]
        self.own, self.theirs = len(self.cluster.partitions), len(target.partitions)
        for _ in range(len(self.positions), self.own):
            self.positions.append(0)
            self.settled.append(0)
            self.spread_ms.append(0)
            self.spread.append(False)
        self.ends = {number: len(each.log) for number, each in enumerate(target.partitions)}
        self.reports = []
        for number in range(self.own):
            if self.own != self.theirs:
                self.spread[number], self.spread_ms[number] = True, STILL
            elif self.spread_ms[number] == STILL:
                self.spread_ms[number] = int(self.cluster.clock.time() * 1000)
            self.reports.append(Reports())
            self.mark(number)
        self.keep()

    def mark(self, number: int) -> None:
        ends = self.ends if self.spread[number] else {number: self.ends[number]}
        self.reports[number].given(self.positions[number], dict(ends))

    def give(self, number: int, count: int) -> None:
        target = self.cluster.world.clusters[self.target]
        some = self.cluster.partitions[number].log[self.positions[number] :][:count]
        for message, level in some:
            if level > self.level:
                there = number if self.own == self.theirs else message.key % self.theirs
                target.partitions[there].log.append((message, self.level))
                self.ends[there] = len(target.partitions[there].log)
        self.positions[number] += len(some)
        self.mark(number)

    def settle(self) -> None:
        """Ask the target what is on all clusters of its side."""
        for below, spread_ms in self.settled_below(self.cluster.world.clusters[self.target]):
            for number in range(self.own):
                settled = self.reports[number].settled(below)
                if settled is not None:
                    self.settled[number] = settled
                    self.spread_ms[number] = max(self.spread_ms[number], spread_ms)
        self.keep()

    def settled_below(self, target: Cluster) -> Iterator[tuple[Ends | None, int]]:
        """What :class:`Settling` has of a topic, if the target says it."""
        levels = [above.level for above in self.cluster.world.tree.above(target.name) if above.level < self.level]
        groups = [courses_group(level) for level in (*levels, self.level)]
        settled: dict[int, int] = {}
        spread_ms, now_ms = 0, int(self.cluster.clock.time() * 1000)
        for number in range(len(target.partitions)):
            at = TOPIC, number
            kept = [KeptCourse.of(target.kept[each][at].metadata) for each in groups if at in target.kept.get(each, {})]
            if len(kept) == len(groups):
                settled[number] = min((each.course.settled for each in kept[:-1]), default=0)
            spread_ms = max([spread_ms, *(time_of(each.spread_ms, now_ms) for each in kept[:-1])])
        if levels:
            yield settled, spread_ms
        elif len(settled) == len(target.partitions):
            yield None, spread_ms

    def keep(self) -> None:
        kept = self.cluster.kept.setdefault(courses_group(self.level), {})
        for number in range(self.own):
            course = Course((Stretch(Term(1, 0), self.target, 0, self.settled[number]),))
            metadata = KeptCourse(course, 1, TOPIC_ID.hex(), spread_ms=self.spread_ms[number]).metadata()
            kept[TOPIC, number] = CommittedOffset(self.settled[number], metadata)


class Cluster:
    """What brokers of one cluster have, and its proxies."""

    def __init__(self, world: World, name: str, partitions: int) -> None:
        self.world = world
        self.name = name
        self.partitions = [Partition() for _ in range(partitions)]
        self.kept: dict[str, dict[TopicPartition, CommittedOffset]] = {GROUP: {}}
        """By group."""
        self.committed_ms: dict[int, int] = {}
        self.has_members = False
        self.times: list[tuple[OffsetKey, GroupTime]] = []
        """The topic of times."""
        self.away = False
        self.clock = world.clock.of(world.rng.randint(-SKEW_MS, SKEW_MS))
        self.givers = [Giver(self, above) for above in world.tree.above(name)]

    def begin(self) -> None:
        """A proxy that has just taken over."""
        document = TreeDocument(self.world.tree, (TOPIC,), {}, {}, groups=("",), margin_ms=MARGIN_MS)
        context: Any = SimpleNamespace(cluster=self, clock=self.clock, lease_deadline=float("inf"))
        self.read_times = 0
        self.followed_commits: Any = FollowedCommits(self)
        self.followed_times = FollowedTimes(context, document, self.name, nothing_lacks)
        self.timestamps: Any = FollowedTimestamps(self)
        leaves: Any = SimpleNamespace(reached=self.world.reached)
        later: Any = SimpleNamespace(first=self.first_later)
        self.distributor = OffsetDistributor(
            context, document, self.name, self.followed_commits, self.followed_times, self.timestamps, leaves
        )
        self.committer = OffsetCommitter(
            context, self.followed_commits, self.followed_times, self.timestamps, later, self.distributor.spreads
        )

    # ---- what brokers do ----

    async def committed_offsets(
        self, groups: Collection[str], stable: bool = False
    ) -> dict[str, dict[TopicPartition, CommittedOffset]]:
        if self.away:
            raise BrokerUnavailable("away")
        return {group: dict(self.kept.get(group, {})) for group in groups}

    async def topics_named(self, names: Collection[str]) -> dict[str, Any]:
        if self.away:
            raise BrokerUnavailable("away")
        return {name: SimpleNamespace(partitions=self.partitions) for name in names}

    async def offsets_for_times(self, asked: Mapping[TopicPartition, int]) -> dict[TopicPartition, tuple[int, int]]:
        found: dict[TopicPartition, tuple[int, int]] = {}
        for place, time in asked.items():
            one = self.partitions[place[1]]
            later = (offset for offset in range(one.start, len(one.log)) if one.log[offset][0].timestamp >= time)
            found[place] = (one.start, -1) if time == EARLIEST else (next(later, -1), 0)
        return found

    async def first_later(self, place: TopicPartition, one: TimedLog, time: int, offset: int) -> Found:
        """There are no markers of transactions."""
        return Found(offset)

    async def commit_offsets(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset], retention_ms: int
    ) -> dict[TopicPartition, Refused]:
        if self.has_members:
            return {place: Refused(UNKNOWN_MEMBER_ID, "UNKNOWN_MEMBER_ID") for place in offsets}
        for place, (position, metadata) in offsets.items():
            before = self.kept[GROUP].get(place)
            if before is not None and not unmarked(before.metadata)[0]:
                assert position >= before.offset, "a group is put back that went on by itself"
            one = self.partitions[place[1]]
            assert one.start <= position < len(one.log)
            unread = self.world.unread(one, position)
            assert not unread, f"{unread} lie before {position} of {place[1]} at {self.name}"
            assert unmarked(metadata) == (1, "the application's")
        self.kept[GROUP] |= offsets
        return {}

    def transactions(self, transactional_id: str) -> Any:
        async def begin() -> None: ...

        async def commit(
            batches: Mapping[TopicPartition, Sequence[bytes]],
            group: str,
            offsets: Mapping[TopicPartition, CommittedOffset],
        ) -> dict[TopicPartition, int]:
            for batch in (batch for each in batches.values() for batch in each):
                for record in decode_records(batch):
                    self.times.append((read_key(record.key), GroupTime.of(record.value or b"", 0)))
            self.kept.setdefault(group, {}).update(offsets)
            return {}

        return SimpleNamespace(begin=begin, commit=commit)

    # ---- what proxies do ----

    def read(self, count: int, numbers: Collection[int] | None = None) -> None:
        """Follow logs, and the topic of times, some of the way."""
        for (_, number), one in self.timestamps.logs.items():
            if numbers is not None and number not in numbers:
                continue
            partition = self.partitions[number]
            end = len(partition.log)
            for offset in range(one.position, min(one.position + count, end)):
                one.least.appended(offset, partition.log[offset][0].timestamp)
                one.position = offset + 1
            one.start = partition.start
            if one.position >= end:
                one.read_at, one.read_at_ms = self.clock.monotonic(), int(self.clock.time() * 1000)
        for key, said in self.times[self.read_times : self.read_times + count]:
            self.read_times += 1
            self.followed_times.hear(key, said)


async def nothing_lacks() -> None:
    """The topic of times is there."""


class FollowedTimes(Times):
    loaded = True


class FollowedCommits:
    loaded = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def follows(self, group: str) -> bool:
        return group == GROUP

    def has(self, key: OffsetKey) -> bool:
        return key[1:] in self._cluster.kept[GROUP]

    def own(self, group: str | None = None) -> dict[OffsetKey, Commit]:
        return {
            OffsetKey(GROUP, *place): Commit(each.offset, each.metadata, self._cluster.committed_ms[place[1]], 0)
            for place, each in self._cluster.kept[GROUP].items()
            if not unmarked(each.metadata)[0]
        }

    def offsets(self, group: str, places: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: each.offset for place, each in self._cluster.kept[GROUP].items() if place in places}


class FollowedTimestamps:
    loaded = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.logs: dict[TopicPartition, TimedLog] = {}
        self.look()

    def look(self) -> None:
        """Follow all partitions anew, where there are others."""
        cluster = self._cluster
        if len(cluster.partitions) == len(self.logs):
            return
        self.logs.clear()
        for number in range(len(cluster.partitions)):
            place = TOPIC, number
            needed = [each.settled[number] for each in cluster.givers if number < each.own]
            if place in cluster.kept[GROUP] and not unmarked(cluster.kept[GROUP][place].metadata)[0]:
                needed.append(cluster.kept[GROUP][place].offset)
            self.read_from(place, min(needed, default=0))

    def read_from(self, place: TopicPartition, offset: int) -> None:
        partition = self._cluster.partitions[place[1]]
        one = self.logs[place] = TimedLog(TOPIC_ID, 0, partition.start, max(offset, partition.start))
        if partition.log:
            one.least.last = partition.log[-1][0].timestamp


class World:
    def __init__(self, seed: int, tree: Subtree | None = None, partitions: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        drawn = self._drawn([f"c{number}" for number in range(self.rng.randint(2, 4))], 60)
        self.tree = Tree(1, tree or drawn)
        partitions = partitions or self.rng.randint(1, 2)
        self.clusters: dict[str, Cluster] = {}
        for name in self.tree.leaves:
            self.clusters[name] = Cluster(self, name, partitions)
        for cluster in self.clusters.values():
            for giver in cluster.givers:
                giver.meet()
            cluster.begin()
        self.given_at_once = self.rng.choice((2, 5, 20))
        self.messages = 0
        self.said: dict[tuple[str, str], int] = {}
        """By origin and cluster: how many of the origin's records of the topic of times that one has."""
        self.read: set[int] = set()
        """Messages that the group has read."""
        self.at = self.rng.choice(list(self.clusters.values()))
        """Where the group is."""
        self.at.has_members = True
        self.positions: dict[int, int] = {}
        self.assigned = partitions
        """How many partitions the group knows of: applications look for new ones every five minutes."""
        self.stands: set[int] = set()
        """Of which it reads none now, each for the third ones after it, too."""
        self.stuck: Giver | None = None
        """Gives nothing now."""
        self.often = {
            what: often * self.rng.choice((0.4, 1, 2))
            for what, often in {
                self.produce_some: 8, self.give_some: 20, self.tell_some: 6, self.read_some: 25, self.settle_some: 16,
                self.tick: 20, self.ask: 10, self.set_groups: 12, self.consume_some: 8, self.commit_some: 6,
                self.take_over: 0.1, self.delete_some: 0.3, self.go_away: 0.1, self.move_group: 2, self.add: 1.5,
                self.meet: 3, self.look: 0.7, self.all_go_on: 1, self.add_where_something_is_late: 1,
            }.items()
        }  # fmt: skip

    def _drawn(self, names: list[str], upper: int) -> Any:
        if len(names) == 1:
            return names[0]
        level, at = self.rng.randint(len(names), upper - 1), self.rng.randint(1, len(names) - 1)
        sides: tuple[Node, Node] = (self._drawn(names[:at], level), self._drawn(names[at:], level))
        return Subtree(level, sides)

    async def reached(self, name: str) -> Cluster:
        return self.clusters[name]

    def unread(self, partition: Partition, position: int) -> list[Message]:
        return [each for each, _ in partition.log[:position] if each.number not in self.read]

    def check_near(self) -> None:
        """What other clusters were told, all being at rest, of a group that committed last where it is: the margin
        before what it has not read in any partition, and what is told late by less than a tenth of it."""
        committed = self.at.kept[GROUP]
        unread: list[int] = []
        for number, partition in enumerate(self.at.partitions):
            offset = committed[TOPIC, number].offset if (TOPIC, number) in committed else 0
            unread += [each.timestamp for each, _ in partition.log[max(offset, partition.start) :]]
        others = [each for each in self.clusters.values() if each is not self.at]
        for number, partition in enumerate(self.at.partitions):
            one = committed.get((TOPIC, number))
            if one is None or unmarked(one.metadata)[0] or not partition.log:
                continue
            if any(each.committed_ms.get(number, 0) >= self.at.committed_ms[number] for each in others):
                continue
            latest = partition.log[-1][0].timestamp + 1
            said_ms = BEGAN_MS + self.clock.now_ms - 2 * ROUND_MS - 2 * SKEW_MS
            for cluster in others:
                said = cluster.followed_times.latest[OffsetKey(GROUP, TOPIC, number)]
                assert said.origin == self.at.name
                assert said.time >= min([latest, said_ms, *unread]) - MARGIN_MS - MARGIN_MS // 10

    # ---- steps ----

    def produce(self, cluster: Cluster) -> None:
        """To partitions that are followed: those that were just added are looked at within the margin."""
        time_ms = self.clock.now_ms - self.rng.randint(0, self.rng.choice((0, 10, LATE_MS)))
        key = self.rng.randrange(KEYS)
        chosen = key if self.rng.random() < 0.7 else self.rng.randrange(len(cluster.partitions))
        self.take(cluster, chosen % len(cluster.timestamps.logs), time_ms, key)

    def take(self, cluster: Cluster, number: int, time_ms: int, key: int) -> None:
        """A producer's message. ``time_ms``: on the clock that all have."""
        message = Message(self.messages, BEGAN_MS + time_ms, key)
        cluster.partitions[number].log.append((message, PRODUCED))
        self.messages += 1

    def add_partitions(self) -> None:
        """To whichever cluster; more often to one that has fewer than others."""
        cluster = self.rng.choice(list(self.clusters.values()))
        most = max(len(each.partitions) for each in self.clusters.values())
        if self.rng.random() < 0.8:
            cluster = min(self.clusters.values(), key=lambda each: len(each.partitions))
        elif most < PARTITIONS_MAX:
            most += 1
        cluster.partitions += [Partition() for _ in range(len(cluster.partitions), most)]

    def tell(self, origin: str, cluster: str, count: int) -> None:
        """Pass on records of the topic of times."""
        own = [each for each in self.clusters[origin].times if not each[1].flags]
        first = self.said.get((origin, cluster), 0)
        some = own[first : first + count]
        self.clusters[cluster].times += [(key, said._replace(flags=1)) for key, said in some]
        self.said[origin, cluster] = first + len(some)

    def move(self) -> None:
        """The application stops, with or without a last commit, and starts elsewhere."""
        self.go(self.rng.choice(list(self.clusters.values())))

    def go(self, cluster: Cluster) -> None:
        self.at.has_members = False
        self.at = cluster
        self.at.has_members = True
        self.assigned = len(self.at.partitions)
        self.positions = {place[1]: each.offset for place, each in self.at.kept[GROUP].items()}

    def consume(self, count: int, number: int) -> None:
        partition = self.at.partitions[number]
        position = max(self.positions.get(number, 0), partition.start)
        some = partition.log[position : position + count]
        self.read |= {each.number for each, _ in some}
        self.positions[number] = position + len(some)

    def commit(self, share: float) -> None:
        """Of some partitions, or of all."""
        for number, position in self.positions.items():
            if self.rng.random() < share:
                self.at.kept[GROUP][TOPIC, number] = CommittedOffset(position, "the application's")
                self.at.committed_ms[number] = int(self.at.clock.time() * 1000)

    def delete(self, cluster: Cluster) -> None:
        """Retention takes what the group has read, and everybody has."""
        everywhere = set.intersection(
            *(
                {each.number for partition in one.partitions for each, _ in partition.log}
                for one in self.clusters.values()
            )
        )
        for partition in cluster.partitions:
            before = partition.start
            while before < len(partition.log) and partition.log[before][0].number in everywhere & self.read:
                before += 1
            partition.start = self.rng.randint(partition.start, before)

    async def step(self) -> None:
        rng = self.rng
        self.clock.now_ms += rng.choice((1, 20, 100, 300))
        cluster = rng.choice(list(self.clusters.values()))
        cluster.away = cluster.away and rng.random() < 0.9
        (what,) = rng.choices(list(self.often), list(self.often.values()))
        await what(cluster)

    async def produce_some(self, cluster: Cluster) -> None:
        self.produce(cluster)

    async def give_some(self, cluster: Cluster) -> None:
        giver, least = self.rng.choice(cluster.givers), self.rng.choice((0, 0.8))
        for number in range(giver.own):
            if self.rng.random() >= least:
                giver.give(number, self.rng.randint(1, self.given_at_once))

    async def all_go_on(self, cluster: Cluster) -> None:
        await self.go_on()

    async def tell_some(self, cluster: Cluster) -> None:
        for other in self.clusters:
            if other != cluster.name and self.rng.random() < 0.7:
                self.tell(cluster.name, other, self.rng.randint(1, 20))

    async def read_some(self, cluster: Cluster) -> None:
        numbers = None if self.rng.random() < 0.7 else {self.rng.randrange(len(cluster.partitions))}
        cluster.read(self.rng.randint(1, 40), numbers)

    async def settle_some(self, cluster: Cluster) -> None:
        self.rng.choice(cluster.givers).settle()

    async def tick(self, cluster: Cluster) -> None:
        try:
            await cluster.distributor.tick()
        except BrokerUnavailable:
            cluster.begin()

    async def ask(self, cluster: Cluster) -> None:
        for each in self.rng.sample(sorted(self.clusters), self.rng.randint(1, len(self.clusters))):
            if each != cluster.name:
                await cluster.distributor.ask(each)

    async def set_groups(self, cluster: Cluster) -> None:
        await cluster.committer.tick()

    async def consume_some(self, cluster: Cluster) -> None:
        if self.rng.random() < 0.03:
            self.assigned = len(self.at.partitions)
        for number in range(self.assigned):
            if number % 3 not in self.stands and self.rng.random() < 0.5:
                self.consume(self.rng.randint(1, 40), number)

    async def commit_some(self, cluster: Cluster) -> None:
        self.commit(self.rng.choice((0.3, 1)))

    async def take_over(self, cluster: Cluster) -> None:
        cluster.begin()

    async def delete_some(self, cluster: Cluster) -> None:
        self.delete(cluster)

    async def go_away(self, cluster: Cluster) -> None:
        cluster.away = True

    async def move_group(self, cluster: Cluster) -> None:
        self.move()
        self.stands = {number for number in range(3) if self.rng.random() < 0.3}

    async def add(self, cluster: Cluster) -> None:
        self.add_partitions()

    async def add_where_something_is_late(self, cluster: Cluster) -> None:
        """The group has read what is given then, of some partitions."""
        rng, giver = self.rng, self.rng.choice(self.at.givers)
        target = self.clusters[giver.target]
        if len(target.partitions) == PARTITIONS_MAX:
            return
        self.even()
        self.stuck, self.stands = giver, {rng.randrange(3)}
        for _ in range(rng.randint(2, 6)):
            self.clock.now_ms += rng.choice((300, 1_000))
            for _ in range(rng.randint(1, 6)):
                self.produce(self.at)
            for number in range(len(self.at.partitions)):
                if number % 3 not in self.stands:
                    self.consume(rng.randint(1, 40), number)
            self.commit(1)
            await self.go_on()
        self.stuck = None
        target.partitions.append(Partition())
        giver.meet()
        for _ in range(rng.randint(2, 6)):
            giver.give(rng.randrange(giver.own), rng.randint(1, 4))
        self.clock.now_ms += rng.choice((100, 3_000))
        await target.committer.tick()

    async def meet(self, cluster: Cluster) -> None:
        self.rng.choice(cluster.givers).meet()

    async def look(self, cluster: Cluster) -> None:
        cluster.timestamps.look()

    async def settle(self) -> None:
        """Let all come to rest: everything is given, read, asked and said."""
        for cluster in self.clusters.values():
            cluster.away = False
        self.stuck = None
        for _ in range(4 + len(self.clusters)):
            self.clock.now_ms += ROUND_MS
            self.even()
            await self.go_on()

    def even(self) -> None:
        """All have as many partitions, and see that."""
        most = max(len(each.partitions) for each in self.clusters.values())
        for cluster in self.clusters.values():
            cluster.partitions += [Partition() for _ in range(len(cluster.partitions), most)]
        for cluster in self.clusters.values():
            for giver in cluster.givers:
                giver.meet()
            cluster.timestamps.look()

    async def go_on(self) -> None:
        """All do what they do within a few seconds, but for looking at partitions."""
        for cluster in self.clusters.values():
            for giver in cluster.givers:
                for number in range(giver.own) if giver is not self.stuck else ():
                    giver.give(number, 10**6)
                giver.settle()
            for other in sorted(self.clusters.keys() - {cluster.name}):
                self.tell(cluster.name, other, 10**6)
            cluster.read(10**6)
            await self.tick(cluster)
        for cluster in self.clusters.values():
            for other in sorted(self.clusters.keys() - {cluster.name}):
                await cluster.distributor.ask(other)
            cluster.read(10**6)
        for cluster in self.clusters.values():
            await self.tick(cluster)
        for cluster in self.clusters.values():
            await cluster.committer.tick()


@pytest.fixture(autouse=True)
def _short_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MINUTE_MS", MINUTE_MS)


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_nothing_unread_lies_before_where_a_group_is_set_while_partitions_are_added(seed: int) -> None:
    world = World(seed)

    async def test() -> None:
        for _ in range(STEPS):
            await world.step()
        await world.settle()

    run_simulated(test())
    world.check_near()
    for number in range(len(world.at.partitions)):
        world.consume(10**6, number)
    assert world.read == set(range(world.messages))


def test_what_went_by_its_key_to_a_partition_that_is_not_followed_yet_holds_a_group_back() -> None:
    """Its cluster's own distributors have seen it, and the one that gave it says that it is settled."""
    world = World(0, Subtree(1, ("c0", "c1")), partitions=1)
    there, here = world.clusters.values()
    (to_here,), (to_there,) = there.givers, here.givers
    world.go(here)

    async def say() -> None:
        there.read(100)
        await there.distributor.tick()
        await here.distributor.ask(there.name)
        here.read(100)
        await here.distributor.tick()

    async def test() -> None:
        here.partitions.append(Partition())
        for time_ms in range(9_000, 11_000, 100):
            world.take(there, 0, time_ms, key=int(time_ms == 9_000))
        world.clock.now_ms = 20_000
        to_here.meet()
        to_here.give(0, 100)
        to_there.meet()
        to_here.settle()
        assert [len(each.log) for each in here.partitions] == [19, 1]
        assert to_here.settled == [20]
        world.consume(100, 0)
        world.commit(1)
        await say()
        assert not here.times
        here.timestamps.look()
        there.partitions.append(Partition())
        for giver in (to_here, to_there):
            giver.meet()
        there.timestamps.look()
        to_here.settle()
        to_there.settle()
        for _ in range(2):
            await say()
        assert [said.time for _, said in here.times] == [BEGAN_MS + 9_000 - MARGIN_MS]

    run_simulated(test())


def test_what_went_by_its_key_on_its_way_holds_a_group_back_whoever_says_that_it_came() -> None:
    """The one in the middle, where partitions were added, has said nothing since."""
    world = World(0, Subtree(2, ("c0", Subtree(1, ("c1", "c2")))), partitions=2)
    first, middle, here = world.clusters.values()
    (to_middle,), (to_here, _) = first.givers, middle.givers
    to_middle.target = middle.name
    to_middle.meet()
    world.go(here)

    async def say(cluster: Cluster) -> None:
        cluster.read(100)
        await cluster.distributor.tick()

    async def test() -> None:
        for time_ms in range(9_000, 11_000, 100):
            world.take(first, 0, time_ms, key=int(time_ms == 9_000))
            world.take(first, 1, time_ms, key=1)
        world.clock.now_ms = 20_000
        for cluster in (first, middle):
            await say(cluster)
            await here.distributor.ask(cluster.name)
        middle.partitions.append(Partition())
        to_here.meet()
        for giver in (to_middle, to_here):
            for number in range(2):
                giver.give(number, 100)
        for giver in (to_here, to_middle):
            giver.settle()
        assert [len(each.log) for each in here.partitions] == [19, 21]
        assert to_middle.settled == [20, 20]
        world.clock.now_ms = 21_000
        await say(first)
        await here.distributor.ask(first.name)
        world.consume(100, 0)
        world.commit(1)
        await say(here)
        assert [said.time for _, said in here.times] == [BEGAN_MS + 9_000 - MARGIN_MS]

    run_simulated(test())


async def told_of_a_late_one(world: World, reader: Cluster, taker: Cluster, giver: Giver) -> None:
    """The group has read partition 0 at the ``reader``, and its time is told; but not partition 1, where an earlier
    message is. Of what the ``taker`` has its ``giver`` has given the first message only."""
    world.go(reader)
    for number, time_ms in ((0, 8_000), (1, 9_000), (0, 10_000), (0, 12_000)):
        world.take(taker, number, time_ms, key=6)
    world.clock.now_ms = 20_000
    giver.give(0, 1)
    world.stuck = giver
    await world.go_on()
    world.consume(100, 0)
    world.positions[1] = 0
    world.commit(1)
    for _ in range(2):
        await world.go_on()
    for cluster in world.clusters.values():
        said = cluster.followed_times.latest
        times = [said[OffsetKey(GROUP, TOPIC, number)].time for number in range(2)]
        assert times == [BEGAN_MS + 12_001 - MARGIN_MS, BEGAN_MS + 9_000 - MARGIN_MS]
    world.clock.now_ms += ROUND_MS


def give_the_late_one_first(giver: Giver) -> None:
    giver.meet()
    giver.give(1, 1)
    giver.give(0, 2)


async def set_to_the_late_one(world: World, here: Cluster) -> None:
    """It was not set behind it before, and once all is told anew it is not held back without need."""
    assert [each.number for each, _ in here.partitions[0].log] == [0, 1, 2, 3]
    await here.committer.tick()
    assert (TOPIC, 0) not in here.kept[GROUP]
    world.stuck = None
    for _ in range(3):
        world.clock.now_ms += ROUND_MS
        world.even()
        await world.go_on()
    assert here.kept[GROUP][TOPIC, 0].offset == 0


def test_a_time_that_was_told_before_partitions_were_added_sets_no_group_behind_what_came_by_its_key() -> None:
    """It is of one partition, and what is unread in another one stands in this one now."""
    world = World(0, Subtree(1, ("c0", "c1")), partitions=2)
    there, here = world.clusters.values()
    (to_here,) = there.givers

    async def test() -> None:
        await told_of_a_late_one(world, there, there, to_here)
        here.partitions.append(Partition())
        give_the_late_one_first(to_here)
        await set_to_the_late_one(world, here)

    run_simulated(test())


@pytest.mark.parametrize("is_away", [False, True])
def test_partitions_that_were_added_on_the_way_of_a_message_count_too(is_away: bool) -> None:
    """The cluster that has them says so, or has said so before it was lost."""
    world = World(0, Subtree(2, ("c0", Subtree(1, ("c1", "c2")))), partitions=2)
    first, middle, here = world.clusters.values()
    (to_middle,), (to_here, _) = first.givers, middle.givers
    to_middle.target = middle.name
    to_middle.meet()

    async def test() -> None:
        await told_of_a_late_one(world, first, first, to_middle)
        middle.partitions.append(Partition())
        give_the_late_one_first(to_middle)
        to_here.meet()
        to_here.give(0, 10)
        if is_away:
            middle.timestamps.look()
            middle.read(100)
            await middle.distributor.tick()
            await here.distributor.ask(middle.name)
            middle.away = True
            await here.distributor.ask(middle.name)
        assert len(here.partitions) == 2
        await here.committer.tick()
        middle.away = False
        await set_to_the_late_one(world, here)

    run_simulated(test())


def test_a_time_of_as_many_partitions_that_does_not_know_of_what_went_by_its_key_sets_no_group_behind_it() -> None:
    """Who told it had not heard yet what the giver says, which saw fewer partitions here for a moment."""
    world = World(0, Subtree(2, ("c0", Subtree(1, ("c1", "c2")))), partitions=2)
    reader, middle, here = world.clusters.values()
    to_here, _ = middle.givers

    async def say(cluster: Cluster) -> None:
        cluster.timestamps.look()
        cluster.read(100)
        await cluster.distributor.tick()
        await reader.distributor.ask(cluster.name)

    async def test() -> None:
        await told_of_a_late_one(world, reader, middle, to_here)
        for cluster in (reader, middle):
            cluster.partitions.append(Partition())
        await say(middle)
        give_the_late_one_first(to_here)
        here.partitions.append(Partition())
        await say(here)
        for cluster in (reader, middle):
            cluster.timestamps.look()
            cluster.read(100)
            await cluster.distributor.tick()
        await here.distributor.ask(middle.name)
        world.tell(reader.name, here.name, 100)
        here.read(100)
        said = here.followed_times.latest[OffsetKey(GROUP, TOPIC, 0)]
        assert (said.partitions, said.spread_ms) == (3, 0)
        await set_to_the_late_one(world, here)

    run_simulated(test())
