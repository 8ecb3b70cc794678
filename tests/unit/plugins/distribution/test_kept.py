"""Positions as they are written: they read as they were, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_plugins.distribution.kept import (
    METADATA_BYTES_MAX,
    STILL,
    KeptCourse,
    KeptGiven,
    KeptReached,
    courses_group,
    given_at,
    given_group,
    given_metadata,
    latest,
    out_of_place,
    read_given,
)
from isthmus_plugins.distribution.positions import Course, Given, PositionError, Stretch, Term

OFFSETS = st.integers(0, 2**63 - 1)
TERMS = st.builds(Term, st.integers(1, 2**31), st.integers(0, 2**31))
STRETCHES = st.builds(Stretch, TERMS, st.sampled_from(("cluster-1", "c.2")), OFFSETS, OFFSETS)
COURSES = st.builds(Course, st.lists(STRETCHES, min_size=1, max_size=5).map(tuple), OFFSETS)
TOPIC_ID = "0" * 32


@settings(deadline=None)
@given(COURSES, st.integers(1, 2**31), OFFSETS, st.integers(-1, 2**31), st.sampled_from(("", "0123abcd")))
def test_a_course_reads_as_it_was_written(course: Course, version: int, read: int, epoch: int, digest: str) -> None:
    kept = KeptCourse(course, version, TOPIC_ID, read, epoch, digest, spread_ms=read, has_all_of=version)
    assert KeptCourse.of(kept.metadata()) == kept


@settings(deadline=None)
@given(TERMS, OFFSETS, st.integers(-1, 2**31), OFFSETS, st.booleans(), st.integers(0, 2**31))
def test_what_was_given_reads_as_it_was_written(
    term: Term, position: int, epoch: int, fill_until: int, spread: bool, filled: int
) -> None:
    kept = KeptGiven(Given(term, position), TOPIC_ID, epoch, fill_until, spread, filled)
    assert read_given(3, *given_metadata(3, {3: kept})) == {3: kept}
    assert read_given(3, *given_metadata(3, {8: kept, 13: kept})) == {8: kept, 13: kept}
    assert read_given(3, *given_metadata(3, {3: kept, 8: kept})) == {3: kept, 8: kept}
    assert kept.fills == (position < fill_until)


def test_what_is_kept_beside_others_is_found_when_the_target_has_more_partitions() -> None:
    early, late = (KeptGiven(Given(Term(1, 0), position), TOPIC_ID) for position in (5, 9))
    assert [given_at(partition, 3) for partition in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    of_three = read_given(0, *given_metadata(0, {0: early, 3: early, 6: early}))
    of_seven = read_given(3, *given_metadata(3, {3: late}))
    assert latest([*of_three.items(), *of_seven.items()]) == {0: early, 3: late, 6: early}
    assert latest([*of_seven.items(), *of_three.items()]) == {0: early, 3: late, 6: early}
    # What would be left out at 0 goes with what is kept there.
    assert out_of_place({0: of_three}, 7) == {0, 3, 6}
    assert out_of_place({0: [0], 3: [3], 6: [6]}, 7) == set()
    assert out_of_place({0: [0, 3], 3: [3]}, 7) == {0, 3}
    with pytest.raises(PositionError, match="give it more partitions"):
        given_metadata(0, dict.fromkeys(range(1_000), early))


def test_what_a_proxy_of_before_has_written_is_read() -> None:
    (given,) = read_given(0, 5, '{"term":[1,0],"topic_id":"","epoch":3}').values()
    assert given == KeptGiven(Given(Term(1, 0), 5), "", epoch=3)
    course = '{"version":1,"topic_id":"","read":[0,-1],"fill_until":0,"stretches":[[1,0,"x",0,0]]}'
    kept = KeptCourse.of(course)
    assert (kept.digest, kept.spread_ms, kept.has_all_of) == ("", 0, 0)
    assert KeptReached.of('{"4":7}') == KeptReached({4: 7})
    # Nor is that one stopped by what this one writes: it takes all for times of levels.
    assert all(type(each) is int for each in json.loads(KeptReached({4: 7}, STILL, 3).metadata()).values())


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 63), OFFSETS))
def test_what_was_reached_reads_as_it_was_written(times: dict[int, int]) -> None:
    assert KeptReached.of(KeptReached(times).metadata()) == KeptReached(times)
    assert KeptReached.of(KeptReached(times, STILL, 3).metadata()) == KeptReached(times, STILL, 3)


NESTED = "[" * METADATA_BYTES_MAX
"""Too deep for a parser."""


@pytest.mark.parametrize("metadata", ["", "[]", '{"x":1}', '{"4":null}', '{"4":"y"}', '{"4":1e999}', NESTED])
def test_nothing_else_was_reached(metadata: str) -> None:
    with pytest.raises(PositionError, match="which no distributor of this version has written"):
        KeptReached.of(metadata)


@pytest.mark.parametrize(
    "metadata",
    ["", "x", "[]", "{}", "null", NESTED, '{"version":1e999,"stretches":[]}',
     '{"term":[1,1e999],"topic_id":"","epoch":1}',
     '{"term":[1,0]}', '{"term":3,"epoch":1}', '{"version":1,"stretches":[]}',
     '{"version":1,"topic_id":"","read":[0,-1],"fill_until":0,"stretches":[]}',
     '{"version":1,"topic_id":"","read":[0,-1],"fill_until":0,"stretches":[[1,0,"x",0]]}',
     '{"version":1,"topic_id":"xy","read":[0,-1],"fill_until":0,"stretches":[[1,0,"x",0,0]]}',
     '{"term":[1,0],"topic_id":"xy","epoch":1}'],
)  # fmt: skip
def test_nothing_else_is_a_position(metadata: str) -> None:
    with pytest.raises(PositionError, match="which no distributor of this version has written"):
        KeptCourse.of(metadata)
    with pytest.raises(PositionError, match="which no distributor of this version has written"):
        read_given(0, 1, metadata)


def test_a_course_that_brokers_would_not_take_is_refused_before() -> None:
    course = Course((Stretch(Term(1, 0), "x" * 100, 0, 0),))
    while len(KeptCourse(course, 1, TOPIC_ID).metadata()) < METADATA_BYTES_MAX - 200:
        course = course.handed_over("y" * 100, course.current.start + 1)
    for _ in range(2):
        course = course.handed_over("y" * 100, course.current.start + 1)
    with pytest.raises(PositionError, match="targets were given messages that are not settled"):
        KeptCourse(course, 1, TOPIC_ID).metadata()


def test_groups_are_the_proxies_own() -> None:
    assert courses_group(4) == "__isthmus_tree_courses_4"
    assert given_group("cluster-1", 12) == "__isthmus_tree_given_cluster-1_12"
