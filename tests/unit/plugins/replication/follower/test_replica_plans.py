"""Which brokers get the replicas that topics lack."""

from __future__ import annotations

import pytest

from isthmus_control.model import ProvenanceRange, TopicHistory
from isthmus_plugins.cluster import PartitionInfo, TopicInfo
from isthmus_plugins.replication.follower.replica_plans import came_empty, grown, known_brokers

RACKS = {1: "near", 2: "near", 3: "far", 4: "far"}


def topic(name: str, *replicas: tuple[int, ...], leader: int | None = None) -> TopicInfo:
    partitions = tuple(PartitionInfo(each[0] if leader is None else leader, 0, each, each) for each in replicas)
    return TopicInfo(name, name.encode().ljust(16), partitions, len(replicas[0]), False)


def test_new_replicas_come_behind_those_that_are_there_to_other_racks_and_to_brokers_with_few() -> None:
    topics = {each.name: each for each in (topic("t", (2,), (3,)), topic("u", (4,), (4,)))}
    found = grown({"t": 3}, topics, RACKS, 10)
    # To the other rack first, there to the broker that has fewest; then to what is left.
    assert found == {("t", 0): (2, 3, 1), ("t", 1): (3, 1, 2)}


def test_nothing_shrinks_and_nothing_moves() -> None:
    topics = {"t": topic("t", (1, 2, 3), (9, 8))}
    assert grown({"t": 2}, topics, RACKS, 10) == {}


def test_as_far_as_there_are_brokers() -> None:
    topics = {"t": topic("t", (1,))}
    assert grown({"t": 3}, topics, {1: None, 2: None}, 10) == {("t", 0): (1, 2)}
    assert grown({"t": 3}, topics, {1: None}, 10) == {}
    # One that is away and has a replica counts as having it.
    assert grown({"t": 2}, {"t": topic("t", (1, 9))}, RACKS, 10) == {}


def test_some_at_once_and_none_without_a_leader() -> None:
    topics = {"t": topic("t", (1,), (2,), (3,)), "u": topic("u", (1,), leader=-1)}
    assert list(grown({"t": 2, "u": 2}, topics, RACKS, 2)) == [("t", 0), ("t", 1)]
    assert list(grown({"u": 2}, topics, RACKS, 2)) == []
    assert grown({"t": 2}, topics, RACKS, 0) == grown({"t": 2}, topics, RACKS, -3) == {}


def test_a_broker_that_is_away_is_one_that_the_cluster_has() -> None:
    assert known_brokers([1, 2], {"t": topic("t", (1, 7))}) == {1, 2, 7}


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(0, None)], True),
        ([(5, None)], False),
        ([(0, 5), (5, None)], False),
        ([(0, 5)], False),
    ],
)
def test_what_came_over_the_link_alone(ranges: list[tuple[int, int | None]], expected: bool) -> None:
    known = tuple(ProvenanceRange("A", "id", start, end, 0) for start, end in ranges)
    assert came_empty(TopicHistory("t", "id", {0: known})) is expected
    assert not came_empty(None)
