"""What is known of led partitions while they have no stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from support.fake_cluster import simulated_now
from support.replicas import LINK, Replicas, on_replicas

from isthmus_plugins.cluster import BrokerUnavailable, TopicPartition
from isthmus_plugins.replication.leader import lag_without_stream as module
from isthmus_plugins.replication.leader.lag_without_stream import INTERVAL_S, LagWithoutStream, PartitionLag
from isthmus_plugins.replication.leader.stream import Flow, LeaderStream
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.tasks import Supervision

KEY = LinkPartition(LINK, "local-t", 0)


def opened_at(end_offset: int) -> LeaderStream:
    connection: Any = None
    stream = LeaderStream(KEY, bytes(16), "remote-t", 1, 0, connection, 1, Flow(), time)
    stream.opened(end_offset)
    return stream


def test_age_is_that_of_the_oldest_record_that_the_follower_lacks() -> None:
    stream = opened_at(10)
    stream.saw_end(10, 100.0)
    alone = PartitionLag(stream.topic_id)
    assert (alone.lag, alone.age_s(100.0)) == (None, None)
    alone.heard(stream, 100.0)
    assert (alone.lag, alone.age_s(110.0)) == (0, 0.0)
    alone.saw_end(12, 110.0)
    alone.saw_end(15, 120.0)
    assert (alone.lag, alone.age_s(121.0)) == (5, 11.0)


def test_a_stream_hands_over_how_old_is_what_was_not_confirmed() -> None:
    stream = opened_at(10)
    stream.saw_end(12, 100.0)
    alone = PartitionLag(stream.topic_id)
    alone.heard(stream, 103.0)
    assert (alone.lag, alone.age_s(105.0)) == (2, 5.0)
    following = opened_at(10)
    following.lacking_since = alone.since
    following.saw_end(20, 110.0)
    assert following.age_ms(111.0) == 11_000
    following.saw_end(30, 112.0)
    following.confirmed(20)
    assert following.age_ms(113.0) == 1000, "what came after the first look is as old as it was seen"


def test_a_source_that_was_cut_lacks_nothing() -> None:
    alone = PartitionLag(b"")
    alone.acked = 10
    alone.saw_end(15, 100.0)
    alone.saw_end(9, 101.0)
    assert (alone.lag, alone.age_s(102.0)) == (0, 0.0)


def test_the_lag_grows_while_the_link_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"a", b"b")
        await replicas.until("copied", replicas.equal)
        leader = replicas.ends["A"].leader
        lag_without_stream = leader.lag_without_stream
        assert lag_without_stream.of(KEY) is None
        await replicas.until("confirmed", lambda: (stream := leader.stream(KEY)) is not None and stream.acked == 2)
        replicas.cut()
        source.write_values(b"c")

        def lag() -> int | None:
            alone = lag_without_stream.of(KEY)
            return alone.lag if alone is not None else None

        await replicas.until("one is missing", lambda: lag() == 1, 2 * INTERVAL_S)
        source.write_values(b"d", b"e")
        await replicas.until("three are missing", lambda: lag() == 3, 2 * INTERVAL_S)
        await asyncio.sleep(60.0)
        alone = lag_without_stream.of(KEY)
        assert alone is not None
        assert 60.0 <= (alone.age_s(simulated_now()) or 0.0) < 60.0 + 3 * INTERVAL_S
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        assert lag_without_stream.of(KEY) is None
        stream = replicas.ends["A"].leader.stream(KEY)
        assert stream is not None
        await replicas.until("confirmed", lambda: stream.age_ms(simulated_now()) == 0)

    on_replicas(monkeypatch, work)


def test_where_the_follower_is_a_new_process_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"a", b"b")
        await replicas.until("copied", replicas.equal)
        replicas.cut()
        await replicas.stop("A")
        replicas.start("A")
        lag_without_stream = replicas.ends["A"].leader.lag_without_stream
        await replicas.until("read", lambda: lag_without_stream.of(KEY), 5.0)
        await replicas.until("its end", lambda: (alone := lag_without_stream.of(KEY)) and alone.source_end == 2, 5.0)
        alone = lag_without_stream.of(KEY)
        assert alone is not None
        assert (alone.acked, alone.lag) == (None, None)

    on_replicas(monkeypatch, work)


def test_what_is_led_no_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        replicas.a.add_topic("local-t").partitions[0].write_values(b"a")
        await replicas.until("copied", replicas.equal)
        replicas.cut()
        lag_without_stream = replicas.ends["A"].leader.lag_without_stream
        await replicas.until("known", lambda: lag_without_stream.of(KEY), 2 * INTERVAL_S)
        del replicas.a.found["local-t"]
        await replicas.until("forgotten", lambda: lag_without_stream.of(KEY) is None, 5.0)

    on_replicas(monkeypatch, work)


class Cluster:
    """Answers for every partition, unless it is away."""

    def __init__(self) -> None:
        self.asked: list[Collection[TopicPartition]] = []
        self.away = False

    async def high_watermarks(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        self.asked.append(partitions)
        if self.away:
            raise BrokerUnavailable("away")
        return dict.fromkeys(partitions, 7)


class Context:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.clock = time
        self.supervision = Supervision()


def test_of_very_many_all_are_read_in_turn_and_fewer_of_those_without_any_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_AT_ONCE", 10)
    monkeypatch.setattr(module, "UNHEARD_AT_ONCE", 2)
    wanted = {LinkPartition(LINK, "t", number): b"id" for number in range(31)}
    cluster = Cluster()
    context: Any = Context(cluster)
    lag_without_stream = LagWithoutStream(context, lambda: wanted)
    for number in range(25):
        lag_without_stream._entry(LinkPartition(LINK, "t", number), b"id").acked = 5

    async def read() -> None:
        for _ in range(3):
            await lag_without_stream._read(wanted)

    asyncio.run(read())
    assert [len(each) for each in cluster.asked] == [12, 12, 12]
    ends = [alone.source_end for key in wanted if (alone := lag_without_stream.of(key)) is not None]
    assert ends == [7] * 31

    asyncio.run(lag_without_stream._read(dict(list(wanted.items())[:25])))
    assert len(cluster.asked[-1]) == 10


def test_what_was_known_stays_while_the_cluster_does_not_answer() -> None:
    wanted = {LinkPartition(LINK, "t", 0): b"id"}
    cluster = Cluster()
    context: Any = Context(cluster)
    lag_without_stream = LagWithoutStream(context, lambda: wanted)

    async def read() -> None:
        await lag_without_stream._read(wanted)
        cluster.away = True
        await lag_without_stream._read(wanted)

    asyncio.run(read())
    alone = lag_without_stream.of(*wanted)
    assert alone is not None
    assert alone.source_end == 7
