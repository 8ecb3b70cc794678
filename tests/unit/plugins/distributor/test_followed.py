"""What is followed of this cluster's logs: when all was read, and what is shown where it cannot be."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine, Mapping
from typing import Any

from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated

from isthmus_plugins.cluster import TopicInfo, TopicPartition
from isthmus_plugins.distribution.document import read_document
from isthmus_plugins.distribution.group_times import GroupTime, key_of
from isthmus_plugins.distribution.kept import TIMES_TOPIC
from isthmus_plugins.distributor.followed import Commits, TimedLog, Times, Timestamps
from isthmus_plugins.distributor.following import Following
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, OffsetKey
from isthmus_protocol.records import BatchError, BatchHeader

PLACE: TopicPartition = ("t-1", 0)
CLUSTERS = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in ("c1", "c2")}
DOCUMENT = read_document(json.dumps({"version": 1, "topics": ["t-"], "clusters": CLUSTERS, "tree": ["c1", "c2"]}))


class World:
    """One cluster with a topic of three messages."""

    def __init__(self) -> None:
        self.cluster = FakeCluster(random.Random(1))
        self.partition = self.cluster.add_topic("t-1").partitions[0]
        for number in range(3):
            self.partition.write_values(b"v", timestamp=1_000 + number)
        self.context: Any = FakeContext(self.cluster, FakeControl("c", random.Random(1)))

    def timestamps(self, follows: type[Timestamps] = Timestamps, position: int = 0) -> Timestamps:
        async def topics() -> Mapping[str, TopicInfo]:
            return await self.cluster.topics_named(["t-1"])

        async def needed() -> Mapping[TopicPartition, int]:
            return {PLACE: position}

        return follows(self.context, topics, needed)

    def commits(self) -> Commits:
        return Commits(self.context, lambda group: True)


async def nothing_lacks() -> None:
    """The topic of times is there."""


def follow(following: Following[Any], test: Coroutine[Any, Any, None]) -> None:
    """Have it follow while a test runs."""

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(following.run(), name="following")
            await test
            task.cancel()

    run_simulated(both())


def test_a_log_is_not_read_while_its_new_leader_does_not_give_all_that_was_acked() -> None:
    """Others have settled what was acked here: until it is read, nothing is known of what a group has not read."""
    world = World()
    timestamps = world.timestamps()

    async def test() -> None:
        world.partition.lag = 1  # the last message was acked by the leader before
        await asyncio.sleep(3)
        one = timestamps.logs[PLACE]
        assert (one.position, one.end, one.read_at) == (2, 2, None)
        assert not timestamps.loaded
        timestamps.read_from(PLACE, 1)
        await asyncio.sleep(3)
        assert timestamps.logs[PLACE].read_at is None
        world.partition.lag = 0
        await asyncio.sleep(3)
        one = timestamps.logs[PLACE]
        assert (one.position, one.least.since(2)) == (3, 1_002)
        assert timestamps.loaded

    follow(timestamps, test())


def test_what_is_committed_is_not_all_while_a_new_leader_does_not_give_all_that_was_acked() -> None:
    """What a cluster said last of a group may be earlier than what it had said before."""
    world = World()
    partition = world.cluster.add_topic(TIMES_TOPIC).partitions[0]
    key = OffsetKey("g", *PLACE)
    for time in (2_000, 1_000):
        partition.write_values(GroupTime(time, 0, "c2", "").value(), keys=[key_of(key)])
    times = Times(world.context, DOCUMENT, "c1", nothing_lacks)

    async def test() -> None:
        partition.lag = 1
        await asyncio.sleep(3)
        assert times.latest[key].time == 2_000
        assert not times.loaded
        partition.lag = 0
        await asyncio.sleep(3)
        assert times.latest[key].time == 1_000
        assert times.loaded

    follow(times, test())


def test_a_log_that_lost_its_end_is_read_from_its_start() -> None:
    """What was settled, or read by groups, was behind that: no other log waits until that is known not to be so."""
    world = World()
    timestamps = world.timestamps(position=5)

    async def test() -> None:
        await asyncio.sleep(3)
        assert timestamps.loaded
        assert (timestamps.logs[PLACE].begun, timestamps.logs[PLACE].position) == (0, 3)

    follow(timestamps, test())


def test_a_log_that_is_to_be_read_again_and_cannot_be_is_shown() -> None:
    """Somebody needs an earlier part of it, while a batch is looked at that nobody understands."""

    class Read(Timestamps):
        read_again = False

        async def take(self, place: TopicPartition, one: TimedLog, batch: memoryview, header: BatchHeader) -> None:
            if header.base_offset == 2:
                if not self.read_again:
                    self.read_again = True
                    self.read_from(place, 0)
                raise BatchError("it is malformed")
            await super().take(place, one, batch, header)

    world = World()
    timestamps = world.timestamps(Read, 1)

    async def test() -> None:
        await asyncio.sleep(3)
        assert timestamps.read_again
        assert timestamps.logs[PLACE].position == 2
        assert timestamps.broken is not None

    follow(timestamps, test())


def test_without_the_offsets_topic_nothing_is_known_of_groups() -> None:
    """Brokers that do not tell of it now are no reason to say that groups have committed nothing."""
    world = World()
    commits = world.commits()

    async def test() -> None:
        await asyncio.sleep(3)
        assert not commits.loaded
        assert commits.waits is not None
        assert commits.waits.message == f"there is no topic {OFFSETS_TOPIC} now"
        world.cluster.add_topic(OFFSETS_TOPIC)
        await asyncio.sleep(3)
        assert (commits.loaded, commits.waits) == (True, None)

    follow(commits, test())


def test_a_log_that_cannot_be_read_further_is_shown() -> None:
    world = World()
    partition = world.cluster.add_topic(OFFSETS_TOPIC).partitions[0]
    partition.write_values(b"v", keys=[b"k"])
    partition.log[-1] = partition.log[-1][:-1] + b"\x05"  # more headers than there are
    commits = world.commits()

    async def test() -> None:
        await asyncio.sleep(3)
        assert not commits.loaded
        assert commits.broken is not None
        assert commits.broken.code == "MALFORMED_BATCH"
        assert commits.broken.message.startswith(f"{OFFSETS_TOPIC}-0, at or behind offset 0: ")

    follow(commits, test())
