"""Producers of several clusters are told apart by the epochs with which they began."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from isthmus_protocol.producer_epochs import EPOCHS, NEAR, NumberedBy, first_epoch, marked
from isthmus_protocol.producer_ids import IDS_PER_CLUSTER

CLUSTERS = [f"cluster-{number}" for number in range(3000)]
"""So many that some are near each other."""
ids = st.text(st.characters(codec="ascii"), min_size=1, max_size=22)


def near_and_far() -> tuple[tuple[str, str], tuple[str, str]]:
    """Two clusters that are not told apart, and two that begin just far enough from each other."""
    by_epoch = sorted(CLUSTERS, key=first_epoch)
    near = next(pair for pair in itertools.pairwise(by_epoch) if first_epoch(pair[1]) - first_epoch(pair[0]) < NEAR)
    far = next(
        (one, other)
        for one, other in itertools.combinations(by_epoch, 2)
        if first_epoch(other) - first_epoch(one) == NEAR
    )
    return near, far


def test_the_first_epochs_are_those_that_logs_hold_by_now() -> None:
    # Producers live for months, and move: whoever changes these numbers has them taken for others.
    assert first_epoch("MkU3OEVBNTcwNTJENDM2Qg") == 15848
    assert first_epoch("cluster-0") == 16918
    assert marked(7, "MkU3OEVBNTcwNTJENDM2Qg") == 0x37C0000007
    assert marked(7, "cluster-0") == 0xF00000007


@given(ids, st.integers(0, 2**28 - 1))
def test_a_marked_id_has_the_brokers_number_and_a_place_among_those_of_its_cluster(cluster: str, number: int) -> None:
    producer_id = marked(number, cluster)
    assert number < producer_id < IDS_PER_CLUSTER
    assert producer_id % 2**28 == number
    assert marked(producer_id, cluster) == producer_id


def test_numbers_that_leave_no_room_for_a_mark_stay() -> None:
    assert marked(2**28, "cluster-0") == 2**28


@given(st.integers(0, 32767))
def test_whom_an_id_is_marked_for_its_epoch_does_not_matter(epoch: int) -> None:
    numbered_by = NumberedBy("cluster-0", ["cluster-1"])
    assert numbered_by(marked(7, "cluster-0"), epoch) == {"cluster-0"}
    assert numbered_by(marked(7, "cluster-1"), epoch) == {"cluster-1"}
    assert numbered_by(marked(7, "cluster-2"), epoch) == {"cluster-0"}, "which is not known here: nobody else's"


def test_of_two_that_are_marked_alike_the_epoch_says_which() -> None:
    of_mark: dict[int, str] = {}
    alike = next((each, found) for each in CLUSTERS if (found := of_mark.setdefault(marked(0, each), each)) != each)
    numbered_by = NumberedBy("cluster-0", alike)
    for each in alike:
        assert numbered_by(marked(7, each), first_epoch(each)) == {each}
    assert numbered_by(marked(7, alike[0]), 0) == set(alike), "nobody has numbered it so"


@given(ids)
def test_a_first_epoch_leaves_room_on_both_sides(cluster: str) -> None:
    assert EPOCHS <= first_epoch(cluster) <= 32767 - EPOCHS


@given(ids, ids, st.integers(0, EPOCHS - 1))
def test_a_producer_that_counted_up_is_still_its_clusters(own: str, other: str, bumps: int) -> None:
    numbered_by = NumberedBy(own, [other])
    epoch = first_epoch(other) + bumps
    distance = first_epoch(own) - first_epoch(other)
    if abs(distance) < NEAR:
        expected = {own, other}
    else:
        expected = {own} if 0 < distance <= bumps else {other}
    assert numbered_by(7, epoch) == expected


def test_what_no_proxy_has_numbered_may_be_anybodys() -> None:
    numbered_by = NumberedBy("cluster-0", ["cluster-1"])
    nobodys = 0, 1, EPOCHS - 1, first_epoch("cluster-0") - 1, first_epoch("cluster-1") + EPOCHS, 32767
    assert {numbered_by(7, epoch) for epoch in nobodys} == {frozenset({"cluster-0", "cluster-1"})}


def test_the_nearer_cluster_begins_where_the_other_one_ends() -> None:
    _, (low, high) = near_and_far()
    numbered_by = NumberedBy("cluster-0", [low, high])
    assert [numbered_by(7, first_epoch(low)), numbered_by(7, first_epoch(high) - 1)] == [{low}, {low}]
    assert numbered_by(7, first_epoch(high)) == {high}


def test_two_that_begin_alike_are_not_told_apart() -> None:
    (low, high), _ = near_and_far()
    numbered_by = NumberedBy("cluster-0", [low, high])
    assert numbered_by(7, first_epoch(low)) == numbered_by(7, first_epoch(high)) == {low, high}
