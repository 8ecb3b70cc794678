"""Where groups are set by the times that other clusters say, and what keeps them from being set."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated
from support.partition_log import control_batch

from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, TopicInfo, TopicPartition
from isthmus_plugins.distribution.group_times import GroupTime, Spread
from isthmus_plugins.distributor import later
from isthmus_plugins.distributor.followed import Timestamps
from isthmus_plugins.distributor.later import Later
from isthmus_plugins.distributor.offset_committer import OffsetCommitter
from isthmus_protocol.offsets_log import Commit, OffsetKey

PLACE: TopicPartition = ("t-1", 0)
KEY = OffsetKey("g", *PLACE)
BEGAN_MS = 1_700_000_000_000
MARKERS_MS = BEGAN_MS + 3_600_000
"""A log that was filled: its markers are later than all of its messages."""


class World:
    """A cluster whose log has messages at even offsets, a second from each other, each followed by a marker."""

    def __init__(self, messages: int = 20, partitions: int = 1) -> None:
        self.cluster = FakeCluster(random.Random(1))
        self.partition = self.cluster.add_topic("t-1", partitions).partitions[0]
        for number in range(messages):
            self.partition.write_values(b"v", timestamp=time_of(number))
            self.partition.write(
                control_batch(self.partition.end, True, producer_id=7, producer_epoch=0, timestamp=MARKERS_MS)
            )
        self.context: Any = FakeContext(self.cluster, FakeControl("c", random.Random(1)))
        self.own: dict[OffsetKey, Commit] = {}
        """What groups have committed themselves, as far as the log of it was read."""
        self.said: dict[OffsetKey, GroupTime] = {}

        async def topics() -> Mapping[str, TopicInfo]:
            return await self.cluster.topics_named(["t-1"])

        async def needed() -> Mapping[TopicPartition, int]:
            return {}

        self.timestamps = Timestamps(self.context, topics, needed)
        commits: Any = SimpleNamespace(loaded=True, follows=lambda group: True, own=lambda group: self.own)
        times: Any = SimpleNamespace(loaded=True, latest=self.said)
        self.later = Later(self.cluster)
        self.elsewhere = partitions
        """How many partitions another cluster has."""
        self.spread_ms = 0
        self.spreads_asked = 0
        self.committer = OffsetCommitter(self.context, commits, times, self.timestamps, self.later, self.spreads)

    async def spreads(self, topics: Collection[str]) -> Mapping[str, Spread]:
        self.spreads_asked += 1
        found = await self.cluster.topics_named(topics)
        return {name: Spread((len(each.partitions), self.elsewhere), self.spread_ms) for name, each in found.items()}

    def say(self, time: int, committed_ms: int = 0, partitions: int = 1, spread_ms: int = 0) -> None:
        self.said[KEY] = GroupTime(time, committed_ms, "other", "its own", 8, partitions, spread_ms)

    def commit(self, offset: int) -> None:
        """The group itself; the log of it was not read yet."""
        self.cluster.offsets["g"] = {PLACE: CommittedOffset(offset, "")}

    @property
    def position(self) -> int:
        return self.cluster.offsets["g"][PLACE].offset

    @property
    def reason(self) -> str | None:
        reason = self.committer.states[KEY].reason
        return None if reason is None else reason.code

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self.timestamps.run(), name="timestamps")
                await asyncio.sleep(3)
                assert self.timestamps.loaded
                await test()
                task.cancel()

        run_simulated(both())


def time_of(number: int) -> int:
    return BEGAN_MS + number * 1_000


def test_where_a_time_is_far_it_is_gone_on_to_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers tell the first marker, and what is behind it is read some of the way at a time."""
    monkeypatch.setattr(later, "LOOK_BYTES_MAX", 1)
    monkeypatch.setattr(later, "READ_BYTES", 1)
    world = World()

    async def test() -> None:
        world.say(time_of(9))
        positions = []
        for _ in range(25):
            await world.committer.tick()
            positions.append(world.position)
        assert positions == sorted(positions)
        assert positions[0] < 5
        assert positions[-1] == 2 * 10 - 1
        requests = world.cluster.requests
        await world.committer.tick()
        assert world.cluster.requests == requests, "it is looked at again, and is where it is to be"

    world.run(test)


def test_a_group_whose_position_retention_took_is_set_again() -> None:
    """Where its client resets to the end, it would leave out what it has not read."""
    world = World()

    async def test() -> None:
        world.say(time_of(9))
        await world.committer.tick()
        assert (world.position, world.reason) == (19, None)
        world.partition.delete_records(20)
        world.partition.write_values(b"v", timestamp=time_of(20))
        await asyncio.sleep(1)
        await world.committer.tick()
        assert (world.position, world.reason) == (20, None)

    world.run(test)


def test_a_group_is_set_again_in_a_topic_that_was_made_anew() -> None:
    """Brokers forget what was committed of the one before, and where its client resets to the end it would leave out
    what it has not read."""
    world = World()

    async def test() -> None:
        world.say(time_of(9))
        await world.committer.tick()
        assert world.position == 19
        await world.cluster.delete_topic("t-1")
        world.cluster.offsets.clear()
        partition = world.cluster.add_topic("t-1").partitions[0]
        partition.write_values(b"v", timestamp=time_of(8))
        partition.write_values(b"v", timestamp=time_of(10))
        await asyncio.sleep(10)
        assert world.timestamps.loaded
        await world.committer.tick()
        assert (world.position, world.reason) == (0, None)

    world.run(test)


def test_a_log_that_cannot_be_read_keeps_none_of_the_group_s_others_waiting() -> None:
    world = World(partitions=2)
    other = OffsetKey("g", "t-1", 1)

    async def test() -> None:
        partition = world.cluster.partition("t-1", 1)
        partition.write_values(b"v", timestamp=time_of(10))
        search: Any = world.later
        first = search.first

        async def refused(place: TopicPartition, *asked: Any) -> Any:
            if place == PLACE:
                return await first(place, *asked)
            raise BrokerUnavailable("t-1-1 cannot be read")

        search.first = refused
        world.say(time_of(9))
        world.said[other] = world.said[KEY] = world.said[KEY]._replace(partitions=2)
        await world.committer.tick()
        assert (world.position, world.reason) == (19, None)
        reason = world.committer.states[other].reason
        assert reason is not None
        assert (reason.code, reason.message) == ("COMMIT_UNAVAILABLE", "t-1-1 cannot be read")

    world.run(test)


def test_a_group_that_commits_while_the_log_is_looked_at_is_not_set_back() -> None:
    """It was here for a moment, and has gone again."""
    world = World()

    async def test() -> None:
        search: Any = world.later
        first = search.first

        async def meanwhile(*asked: Any) -> Any:
            found = await first(*asked)
            world.own[KEY] = Commit(30, "", 150, 0)
            world.commit(30)
            return found

        search.first = meanwhile
        world.say(time_of(9), committed_ms=100)
        await world.committer.tick()
        assert (world.position, world.reason) == (30, None)

    world.run(test)


def test_a_commit_of_the_group_that_was_not_read_yet_is_not_taken_for_an_older_one() -> None:
    """It went back here, and that was its last commit: it is not set on."""
    world = World()

    async def test() -> None:
        world.say(time_of(9), committed_ms=100)
        world.own[KEY] = Commit(5, "", 50, 0)
        world.commit(2)
        await world.committer.tick()
        assert (world.position, world.reason) == (2, "COMMIT_UNAVAILABLE")
        world.own[KEY] = Commit(2, "", 150, 1)
        await asyncio.sleep(5)
        await world.committer.tick()
        assert (world.position, world.reason) == (2, None)
        # One that was read, and is older than another cluster's, is.
        world.say(time_of(9), committed_ms=200)
        await world.committer.tick()
        assert (world.position, world.reason) == (19, None)

    world.run(test)


def test_nobody_is_set_back_by_what_is_half_read() -> None:
    world = World()
    world.say(time_of(9))
    with pytest.raises(BrokerUnavailable, match="was not all read yet"):
        asyncio.run(world.committer.go_back("g"))  # the timestamps are not followed yet


def test_a_proxy_that_has_lost_its_lease_sets_nothing() -> None:
    """Another one may have set the group since, and it may have gone on."""
    world = World()

    async def test() -> None:
        world.say(time_of(9))
        world.context.lease_deadline = world.context.clock.monotonic() - 1
        await world.committer.tick()
        assert world.reason == "COMMIT_UNAVAILABLE"
        assert "g" not in world.cluster.offsets

    world.run(test)


def test_a_time_that_does_not_know_of_partitions_sets_a_group_on_once_it_is_told_anew() -> None:
    world = World()

    async def test() -> None:
        world.elsewhere = 2
        world.say(time_of(9))
        await world.committer.tick()
        assert world.reason == "PARTITIONS_ADDED"
        assert "g" not in world.cluster.offsets
        world.say(time_of(4), partitions=2)
        await world.committer.tick()
        assert (world.position, world.reason) == (9, None)
        # Where it was set it stays, and may go back.
        for number, position in ((9, 9), (3, 7), (9, 7)):
            world.say(time_of(number))
            await world.committer.tick()
            assert (world.position, world.reason) == (position, None)
        world.partition.delete_records(10)
        await asyncio.sleep(1)
        await world.committer.tick()
        assert world.position == 10, "what stands before is gone"
        world.say(time_of(9), partitions=2)
        await world.committer.tick()
        assert (world.position, world.reason) == (19, None)

    world.run(test)


@pytest.mark.parametrize("told_ms", [4, 5])
def test_a_time_that_does_not_know_of_what_went_by_its_key_sets_no_group_on(told_ms: int) -> None:
    world = World()

    async def test() -> None:
        world.spread_ms = 5
        world.say(time_of(9), spread_ms=told_ms)
        await world.committer.tick()
        assert world.reason == (None if told_ms == 5 else "PARTITIONS_ADDED")

    world.run(test)


def test_partitions_are_counted_once_for_all_that_is_set_on() -> None:
    """Groups of a topic, and topics, have it in common; and nothing is asked where nothing is to be set."""
    world = World(partitions=3)

    async def test() -> None:
        for number in range(3):
            world.cluster.partition("t-1", number).write_values(b"v", timestamp=time_of(30))
        for group in range(20):
            for number in range(3):
                key = OffsetKey(f"g-{group}", "t-1", number)
                world.said[key] = GroupTime(time_of(9), 0, "other", "", 8, 3)
        await asyncio.sleep(1)
        await world.committer.tick()
        assert (world.spreads_asked, world.committer.set) == (1, 60)
        for _ in range(5):
            await world.committer.tick()
        assert world.spreads_asked == 1
        for key in list(world.said):
            world.said[key] = world.said[key]._replace(time=time_of(40))
        await world.committer.tick()
        assert {each.reason.code for each in world.committer.states.values() if each.reason} == {"NOT_REACHED"}
        assert world.spreads_asked == 1

    world.run(test)


def test_where_partitions_cannot_be_counted_nothing_is_set() -> None:
    world = World()

    async def test() -> None:
        async def unavailable(topics: Collection[str]) -> Mapping[str, Spread]:
            raise BrokerUnavailable("the brokers are away")

        world.committer._spreads = unavailable
        world.say(time_of(9))
        await world.committer.tick()
        assert world.reason == "COMMIT_UNAVAILABLE"
        assert "g" not in world.cluster.offsets

    world.run(test)
