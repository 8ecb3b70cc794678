"""Producer ids of several clusters in one log never collide, and find their way home."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_protocol.producer_ids import (
    CLUSTERS_MAX,
    IDS_PER_CLUSTER,
    LINKS_MAX,
    NO_PRODUCER_ID,
    REPLICATED,
    ProducerIdOverflow,
    ProducerIdRange,
    carry,
    home,
    is_links_own,
    is_replicated,
    translate,
)

local_ids = st.integers(0, IDS_PER_CLUSTER - 1)
indexes = st.integers(0, CLUSTERS_MAX - 1)
links = st.integers(0, LINKS_MAX - 1)


def test_the_layout_is_the_one_that_logs_hold_by_now() -> None:
    # Ids are stored in logs for good: whoever changes these numbers changes what old logs mean.
    assert translate(0, 0) == 0x4000_0000_0000_0000
    assert translate(7, 1) == 0x4000_0100_0000_0007
    assert translate(IDS_PER_CLUSTER - 1, CLUSTERS_MAX - 1) == 0x7FFF_FF7F_FFFF_FFFF
    assert ProducerIdRange(1).stamp_id(0) == 0x4000_0180_0000_0000
    assert ProducerIdRange(1).filler_id(0) == 0x4000_0180_0000_0001
    assert ProducerIdRange(1).stamp_id(1) == 0x4000_0180_0000_0002
    assert ProducerIdRange(CLUSTERS_MAX - 1).filler_id(LINKS_MAX - 1) == 2**63 - 1


def test_no_producer_stays_no_producer() -> None:
    assert translate(NO_PRODUCER_ID, 5) == NO_PRODUCER_ID
    assert home(NO_PRODUCER_ID, 5) == NO_PRODUCER_ID
    assert carry(NO_PRODUCER_ID, 5, 6) == NO_PRODUCER_ID
    assert not is_replicated(NO_PRODUCER_ID)
    assert not is_links_own(NO_PRODUCER_ID)


@given(local_ids, indexes)
def test_a_local_id_goes_to_its_clusters_range_and_comes_home_from_it(producer_id: int, index: int) -> None:
    replicated = translate(producer_id, index)
    assert replicated in ProducerIdRange(index)
    assert is_replicated(replicated)
    assert not is_links_own(replicated)
    assert replicated >= REPLICATED  # past whatever a cluster hands out
    assert struct.unpack(">q", struct.pack(">q", replicated)) == (replicated,)
    assert home(replicated, index) == producer_id


@given(local_ids, local_ids, indexes, indexes)
def test_ids_of_different_clusters_never_meet(first: int, second: int, first_index: int, second_index: int) -> None:
    same = (first, first_index) == (second, second_index)
    assert (translate(first, first_index) == translate(second, second_index)) is same


@given(local_ids, indexes, indexes)
def test_an_id_that_is_in_a_range_stays_in_it(producer_id: int, index: int, next_index: int) -> None:
    replicated = translate(producer_id, index)
    assert translate(replicated, next_index) == replicated
    if next_index != index:
        assert home(replicated, next_index) == replicated


@given(local_ids, st.lists(indexes, min_size=2, max_size=6))
def test_an_id_is_the_same_producer_wherever_it_goes(producer_id: int, route: list[int]) -> None:
    origin, carried = route[0], producer_id
    for source, target in pairwise(route):
        carried = carry(carried, source, target)
        # At home it is what the cluster handed out, everywhere else it says where it came from.
        assert carried == (producer_id if target == origin else translate(producer_id, origin))


def test_an_id_comes_home_by_way_of_a_third_cluster() -> None:
    a, b, c = 0, 1, 2
    at_b = carry(42, a, b)
    at_c = carry(at_b, b, c)
    assert at_c == at_b == translate(42, a)
    assert carry(at_c, c, a) == 42


@given(indexes, links, indexes)
def test_a_links_own_ids_are_nobodys_and_stay(index: int, link: int, other: int) -> None:
    own = ProducerIdRange(index)
    stamp, filler = own.stamp_id(link), own.filler_id(link)
    assert stamp != filler
    for producer_id in (stamp, filler):
        assert producer_id in own
        assert is_replicated(producer_id)
        assert is_links_own(producer_id)
        assert translate(producer_id, other) == producer_id
        assert home(producer_id, index) == producer_id  # no cluster handed it out, so it has no home
        assert carry(producer_id, other, index) == producer_id


@given(indexes, links, links, local_ids)
def test_links_do_not_share_ids_with_each_other_or_with_producers(
    index: int, first: int, second: int, local: int
) -> None:
    own = ProducerIdRange(index)
    ids = {own.stamp_id(first), own.filler_id(first), own.stamp_id(second), own.filler_id(second)}
    assert len(ids) == (2 if first == second else 4)
    assert translate(local, index) not in ids


@given(indexes)
def test_ranges_lie_side_by_side(index: int) -> None:
    own = ProducerIdRange(index)
    assert own.start in own
    assert own.stop - 1 in own
    assert own.stop not in own
    assert own.start - 1 not in own
    if index + 1 < CLUSTERS_MAX:
        assert ProducerIdRange(index + 1).start == own.stop
    else:
        assert own.stop == 2**63


@pytest.mark.parametrize("producer_id", [-2, -(2**63), IDS_PER_CLUSTER, REPLICATED - 1])
def test_ids_without_a_place_are_refused(producer_id: int) -> None:
    with pytest.raises(ProducerIdOverflow, match=f"producer id {producer_id} "):
        translate(producer_id, 0)
    with pytest.raises(ProducerIdOverflow):
        carry(producer_id, 0, 1)


@pytest.mark.parametrize("index", [-1, CLUSTERS_MAX])
def test_indexes_without_a_place_are_refused(index: int) -> None:
    for attempt in (translate, home):
        with pytest.raises(ProducerIdOverflow, match="cluster index"):
            attempt(1, index)
        with pytest.raises(ProducerIdOverflow, match="cluster index"):
            attempt(NO_PRODUCER_ID, index)
    with pytest.raises(ProducerIdOverflow, match="cluster index"):
        ProducerIdRange(index)


@pytest.mark.parametrize("link", [-1, LINKS_MAX])
def test_link_numbers_without_a_place_are_refused(link: int) -> None:
    with pytest.raises(ProducerIdOverflow, match="link number"):
        ProducerIdRange(0).stamp_id(link)
    with pytest.raises(ProducerIdOverflow, match="link number"):
        ProducerIdRange(0).filler_id(link)
