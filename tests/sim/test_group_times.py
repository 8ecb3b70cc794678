"""Groups' committed offsets by time, simulated: nothing that a group has not read lies before where it is set.

Random trees. Clusters take messages at any time, and have those of others any time later, in any order between origins.
The real offset distributors and committers look at logs, at what others have said, and at commits, each as it was at
some moment before. A group reads and commits at one cluster, and moves to another one in the midst of it. Always:

- what stands before an offset that a committer sets was read by the group, somewhere;
- a group is not set where it has members, and not back where it went on by itself.

In the end what is said is near the margin, and the group has read every message. Where messages come with any
timestamp, however late, it leaves out those that nobody knew of when it moved, and no others once all has been said
again, and committers have gone back for it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.fake_cluster import run_simulated
from support.seeds import seeds

from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, Refused, TopicPartition
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.group_times import GroupTime, read_key, unmarked
from isthmus_plugins.distribution.kept import KeptCourse, courses_group
from isthmus_plugins.distribution.positions import Course, Stretch, Term
from isthmus_plugins.distribution.tree import Node, Subtree, Tree
from isthmus_plugins.distributor.followed import TimedLog, Times
from isthmus_plugins.distributor.later import Found
from isthmus_plugins.distributor.offset_committer import EARLIEST, OffsetCommitter
from isthmus_plugins.distributor.offset_distributor import OffsetDistributor
from isthmus_protocol.error_codes import UNKNOWN_MEMBER_ID
from isthmus_protocol.offsets_log import Commit, OffsetKey
from isthmus_protocol.record_codec import decode_records

SEEDS = 60
STEPS = 2500
BEGAN_MS = 1_700_000_000_000
MARGIN_MS = 10_000
LATE_MS = 5_000
"""Messages have timestamps so much earlier than their clusters take them, at most."""
SKEW_MS = 2_000
ROUND_MS = 4_000
"""From one round to the next, while all comes to rest."""
PLACE: TopicPartition = ("t", 0)
GROUP = "g"
KEY = OffsetKey(GROUP, *PLACE)
TOPIC_ID = bytes(16)


class Message(NamedTuple):
    number: int
    timestamp: int
    origin: str


class Clock:
    """One for all clusters; each has its wall clock go wrong by so much."""

    def __init__(self) -> None:
        self.now_ms = 0

    def of(self, skew_ms: int) -> Any:
        return SimpleNamespace(
            monotonic=lambda: self.now_ms / 1000, time=lambda: (BEGAN_MS + self.now_ms + skew_ms) / 1000
        )


class Cluster:
    """What brokers of one cluster have, and its proxy that distributes offsets."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.log: list[Message] = []
        self.start = 0
        self.kept: dict[str, dict[TopicPartition, CommittedOffset]] = {GROUP: {}}
        """By group."""
        self.committed_ms = 0
        self.has_members = False
        self.times: list[tuple[OffsetKey, GroupTime]] = []
        """The topic of times."""
        self.away = False
        self.clock = world.clock.of(world.rng.randint(-SKEW_MS, SKEW_MS))
        self.begin()

    def begin(self) -> None:
        """A proxy that has just taken over."""
        document = TreeDocument(self.world.tree, ("t",), {}, {}, groups=("",), margin_ms=MARGIN_MS)
        context: Any = SimpleNamespace(cluster=self, clock=self.clock, lease_deadline=float("inf"))
        self.read_times = 0
        self.followed_commits: Any = FollowedCommits(self)
        self.followed_times = FollowedTimes(context, document, self.name, nothing_lacks)
        needed = [self._settled(above.level) for above in self.world.tree.above(self.name)]
        if PLACE in self.kept[GROUP]:
            needed.append(self.kept[GROUP][PLACE].offset)
        self.timestamps: Any = FollowedTimestamps(self, min(needed))
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
        return {name: SimpleNamespace(partitions=(0,)) for name in names}

    async def offsets_for_times(self, asked: Mapping[TopicPartition, int]) -> dict[TopicPartition, tuple[int, int]]:
        ((place, time),) = asked.items()
        if time == EARLIEST:
            return {place: (self.start, -1)}
        later = (offset for offset in range(self.start, len(self.log)) if self.log[offset].timestamp >= time)
        return {place: (next(later, -1), 0)}

    async def first_later(self, place: TopicPartition, one: TimedLog, time: int, offset: int) -> Found:
        """There are no markers of transactions."""
        return Found(offset)

    async def commit_offsets(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset], retention_ms: int
    ) -> dict[TopicPartition, Refused]:
        if self.has_members:
            return {place: Refused(UNKNOWN_MEMBER_ID, "UNKNOWN_MEMBER_ID") for place in offsets}
        position = offsets[PLACE].offset
        before = self.kept[GROUP].get(PLACE)
        if before is not None and not unmarked(before.metadata)[0]:
            assert position >= before.offset, "a group is put back that went on by itself"
        assert self.start <= position < len(self.log)
        if not self.world.any_timestamp:
            self.world.check_read(self, position)
        assert unmarked(offsets[PLACE].metadata) == (1, "the application's")
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

    # ---- what distributors do ----

    def _settled(self, level: int) -> int:
        """What its own distributor of a level has settled: what others took is not its to pass on there."""
        (above,) = (each for each in self.world.tree.above(self.name) if each.level == level)
        there = [{each.number for each in self.world.clusters[leaf].log} for leaf in above.beside if leaf in self.world]
        unsettled = (
            offset
            for offset, message in enumerate(self.log)
            if message.origin == self.name and not all(message.number in each for each in there)
        )
        return next(unsettled, len(self.log))

    def settle(self) -> None:
        for above in self.world.tree.above(self.name):
            settled = self._settled(above.level)
            course = Course((Stretch(Term(1, 0), above.beside[0], 0, settled),))
            kept = KeptCourse(course, 1, TOPIC_ID.hex())
            self.kept[courses_group(above.level)] = {PLACE: CommittedOffset(settled, kept.metadata())}

    def read(self, count: int) -> None:
        """Follow the log, and the topic of times, some of the way."""
        one: TimedLog = self.timestamps.logs[PLACE]
        end = len(self.log)
        for offset in range(one.position, min(one.position + count, end)):
            one.least.appended(offset, self.log[offset].timestamp)
            one.position = offset + 1
        one.start = self.start
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
        return key == KEY and PLACE in self._cluster.kept[GROUP]

    def own(self, group: str | None = None) -> dict[OffsetKey, Commit]:
        committed = self._cluster.kept[GROUP].get(PLACE)
        if committed is None or unmarked(committed.metadata)[0]:
            return {}
        return {KEY: Commit(committed.offset, committed.metadata, self._cluster.committed_ms, 0)}


class FollowedTimestamps:
    loaded = True

    def __init__(self, cluster: Cluster, position: int) -> None:
        self._cluster = cluster
        self.logs: dict[TopicPartition, TimedLog] = {}
        self.read_from(PLACE, position)

    def read_from(self, place: TopicPartition, offset: int) -> None:
        one = self.logs[place] = TimedLog(TOPIC_ID, 0, self._cluster.start, max(offset, self._cluster.start))
        if self._cluster.log:
            one.least.last = max(each.timestamp for each in self._cluster.log)


class World:
    def __init__(self, seed: int, any_timestamp: bool, clusters: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.any_timestamp = any_timestamp
        self.clock = Clock()
        names = [f"c{number}" for number in range(clusters or self.rng.randint(2, 5))]
        self.tree = Tree(1, self._drawn(names, 60))
        self.clusters: dict[str, Cluster] = {}
        for name in names:
            self.clusters[name] = Cluster(self, name)
        self.given_at_once = self.rng.choice((2, 5, 20))
        self.messages = 0
        self.given: dict[tuple[str, str], int] = {}
        """By origin and cluster: how many of the origin's messages that one has."""
        self.said: dict[tuple[str, str], int] = {}
        """The same of records of the topic of times."""
        self.read: set[int] = set()
        """Messages that the group has read."""
        self.left_out: set[int] = set()
        """Those that it has not, and that lay before where it went on: nobody had known of them in time."""
        self.at: Cluster | None = None
        """Where the group is."""
        self.position = 0

    def __contains__(self, name: str) -> bool:
        return name in self.clusters

    def _drawn(self, names: list[str], upper: int) -> Any:
        if len(names) == 1:
            return names[0]
        level, at = self.rng.randint(len(names), upper - 1), self.rng.randint(1, len(names) - 1)
        sides: tuple[Node, Node] = (self._drawn(names[:at], level), self._drawn(names[at:], level))
        return Subtree(level, sides)

    async def reached(self, name: str) -> Cluster:
        return self.clusters[name]

    def check_read(self, cluster: Cluster, position: int) -> None:
        unread = [each for each in cluster.log[:position] if each.number not in self.read | self.left_out]
        assert not unread, f"{unread} lie before {position} at {cluster.name}"

    def check_near(self) -> None:
        """What other clusters were told, all being at rest, of a group that committed last where it is: the margin
        before what it has not read, and what is told late by less than a tenth of it."""
        assert self.at is not None
        committed = self.at.kept[GROUP].get(PLACE)
        others = [each for each in self.clusters.values() if each is not self.at]
        if committed is None or unmarked(committed.metadata)[0] or not self.at.log:
            return
        if any(each.committed_ms >= self.at.committed_ms for each in others):
            return
        unread = [each.timestamp for each in self.at.log[max(committed.offset, self.at.start) :]]
        latest = max(each.timestamp for each in self.at.log) + 1
        said_ms = BEGAN_MS + self.clock.now_ms - 2 * ROUND_MS - 2 * SKEW_MS
        for cluster in others:
            said = cluster.followed_times.latest[KEY]
            assert said.origin == self.at.name
            assert said.time >= min([latest, said_ms, *unread]) - MARGIN_MS - MARGIN_MS // 10

    # ---- steps ----

    def produce(self) -> None:
        cluster = self.rng.choice(list(self.clusters.values()))
        late = self.rng.choice((0, 10, LATE_MS)) if not self.any_timestamp else self.rng.choice((0, 10, 10_000_000))
        self.take(cluster, self.clock.now_ms - self.rng.randint(0, late))

    def take(self, cluster: Cluster, time_ms: int) -> None:
        """A producer's message. ``time_ms``: on the clock that all have."""
        cluster.log.append(Message(self.messages, BEGAN_MS + time_ms, cluster.name))
        self.messages += 1

    def give(self, origin: str, cluster: str, count: int) -> None:
        own = [each for each in self.clusters[origin].log if each.origin == origin]
        first = self.given.get((origin, cluster), 0)
        some = own[first : first + count]
        self.clusters[cluster].log += some
        self.given[origin, cluster] = first + len(some)

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
        if self.at is not None:
            self.at.has_members = False
        self.at = cluster
        self.at.has_members = True
        committed = self.at.kept[GROUP].get(PLACE)
        self.position = max(self.at.start, 0 if committed is None else committed.offset)
        self.left_out |= {each.number for each in self.at.log[: self.position]} - self.read

    def consume(self, count: int) -> None:
        assert self.at is not None
        some = self.at.log[self.position : self.position + count]
        self.read |= {each.number for each in some}
        self.position += len(some)

    def commit(self) -> None:
        assert self.at is not None
        self.at.kept[GROUP][PLACE] = CommittedOffset(self.position, "the application's")
        self.at.committed_ms = int(self.at.clock.time() * 1000)

    def delete(self) -> None:
        """Retention takes what the group has read, and everybody has."""
        cluster = self.rng.choice(list(self.clusters.values()))
        everywhere = set.intersection(*({each.number for each in one.log} for one in self.clusters.values()))
        before = cluster.start
        while before < len(cluster.log) and cluster.log[before].number in everywhere & self.read:
            before += 1
        cluster.start = self.rng.randint(cluster.start, before)
        self.position = max(self.position, cluster.start) if cluster is self.at else self.position

    async def step(self) -> None:
        rng = self.rng
        self.clock.now_ms += rng.choice((1, 20, 100, 300))
        cluster = rng.choice(list(self.clusters.values()))
        other = rng.choice([each for each in self.clusters if each != cluster.name])
        what = rng.random()
        if what < 0.12:
            self.produce()
        elif what < 0.32:
            self.give(cluster.name, other, rng.randint(1, self.given_at_once))
        elif what < 0.38:
            self.tell(cluster.name, other, rng.randint(1, 5))
        elif what < 0.5:
            cluster.read(rng.randint(1, 40))
        elif what < 0.58:
            cluster.settle()
        elif what < 0.68:
            try:
                await cluster.distributor.tick()
            except BrokerUnavailable:
                cluster.begin()
        elif what < 0.78:
            for each in rng.sample(sorted(self.clusters), rng.randint(1, len(self.clusters))):
                if each != cluster.name:
                    await cluster.distributor.ask(each)
        elif what < 0.83:
            await cluster.committer.tick()
        elif what < 0.91:
            self.consume(rng.randint(1, 40))
        elif what < 0.96:
            self.commit()
        elif what < 0.962:
            cluster.begin()
        elif what < 0.97:
            self.delete()
        elif what < 0.974:
            cluster.away = not cluster.away
        elif what < 0.98:
            self.move()

    async def settle(self) -> None:
        """Let all come to rest: everything is given, read, asked and said."""
        for cluster in self.clusters.values():
            cluster.away = False
        for _ in range(4):
            self.clock.now_ms += ROUND_MS
            for origin in self.clusters:
                for other in self.clusters:
                    if other != origin:
                        self.give(origin, other, 10**6)
                        self.tell(origin, other, 10**6)
            for cluster in self.clusters.values():
                cluster.settle()
                cluster.read(10**6)
                await cluster.distributor.tick()
            for cluster in self.clusters.values():
                for other in self.clusters.keys() - {cluster.name}:
                    await cluster.distributor.ask(other)
                cluster.read(10**6)
            for cluster in self.clusters.values():
                await cluster.distributor.tick()
            for cluster in self.clusters.values():
                await cluster.committer.tick()


async def simulate(world: World) -> None:
    world.move()
    for _ in range(STEPS):
        await world.step()
    await world.settle()


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_nothing_unread_lies_before_where_a_group_is_set(seed: int) -> None:
    world = World(seed, any_timestamp=False)
    run_simulated(simulate(world))
    assert world.at is not None
    world.check_near()
    world.consume(10**6)
    assert world.read == set(range(world.messages))
    assert not world.left_out


@pytest.mark.parametrize("seed", seeds(SEEDS // 2))
def test_messages_of_any_time_are_gone_back_for(seed: int) -> None:
    world = World(seed, any_timestamp=True)
    run_simulated(simulate(world))
    assert world.at is not None
    for cluster in world.clusters.values():
        committed = cluster.kept[GROUP].get(PLACE)
        if committed is not None and cluster is not world.at:
            world.check_read(cluster, committed.offset)


def test_what_was_said_before_a_group_moved_comes_after_what_was_said_since() -> None:
    """By another way over the tree: it does not count, as less was known then."""

    async def test() -> None:
        world = World(0, any_timestamp=True, clusters=3)
        here, there, third = world.clusters.values()

        async def settle_and_say() -> None:
            for cluster in world.clusters.values():
                cluster.settle()
                cluster.read(10**6)
                await cluster.distributor.tick()
            for cluster in world.clusters.values():
                for other in world.clusters.keys() - {cluster.name}:
                    await cluster.distributor.ask(other)
                cluster.read(10**6)

        world.clock.now_ms = 60_000
        for number in range(40):
            world.take(here, number * 1_000)
        world.give(here.name, there.name, 40)
        world.give(here.name, third.name, 5)
        world.go(here)
        world.consume(40)
        world.commit()
        await settle_and_say()
        for _ in range(3):
            world.take(third, 0)  # an hour late, for instance: nobody could know
        await here.distributor.tick()
        assert here.times[-1][1].time > BEGAN_MS + 20_000
        world.give(here.name, third.name, 35)
        world.tell(here.name, there.name, 10)
        there.read(0)
        there.read(10)
        await there.committer.tick()
        world.clock.now_ms += SKEW_MS * 3
        world.go(there)
        world.consume(40)
        world.commit()
        await there.distributor.tick()
        world.tell(there.name, here.name, 10)  # so it says nothing more
        here.read(10)
        world.give(third.name, there.name, 3)
        for _ in range(2):
            await settle_and_say()
        world.tell(there.name, third.name, 10)
        world.tell(here.name, third.name, 10)
        for _ in range(3):
            third.read(10)
            await third.committer.tick()
            await settle_and_say()
        assert not world.left_out
        committed = third.kept[GROUP][PLACE]
        world.check_read(third, committed.offset)
        assert committed.offset == 0, "the late ones are as early as the first, and there is the margin"

    run_simulated(test())
