"""Positions: stretches, what is settled, and where a distributor goes on when something is lost."""

from __future__ import annotations

import pytest
from support.trees import BALANCED

from isthmus_plugins.distribution.copy_flags import ALL_LEVELS
from isthmus_plugins.distribution.positions import (
    MARKS_MAX,
    Course,
    Given,
    PositionError,
    Reports,
    Stretch,
    Term,
    begun,
    carried,
    needs,
    unsettled,
)

FIRST, SECOND, THIRD = (Term(1, number) for number in range(3))
BEGUN = Course((Stretch(FIRST, "x", 0, 0),))


def test_a_distributor_goes_on_where_its_target_says() -> None:
    course = BEGUN.settle(FIRST, 5)
    assert course.position(Given(FIRST, 9)) == 9
    assert course.position(None) == 5
    # What is there of an earlier stretch says nothing.
    later = course.handed_over("y", 9)
    assert later.position(Given(FIRST, 9)) == 9
    assert later.gone_back({"y"}, "x").position(Given(FIRST, 20)) == 9


def test_positions_of_a_later_term_are_no_guess() -> None:
    with pytest.raises(PositionError, match="its own positions are older than they were; take the cluster out"):
        BEGUN.position(Given(SECOND, 9))


def test_a_live_target_is_switched_where_it_was_given_all() -> None:
    course = BEGUN.settle(FIRST, 5).handed_over("y", 9)
    assert course.current == Stretch(SECOND, "y", 9, 9)
    assert (course.settled, list(course.pending())) == (5, [(Stretch(FIRST, "x", 0, 5), 9), (course.current, None)])
    # Each settles by itself, the first no further than to its end.
    course = course.settle(SECOND, 12)
    assert course.settled == 5
    course = course.settle(FIRST, 30)
    assert course.stretches == (Stretch(SECOND, "y", 9, 12),)


def test_a_log_that_lost_its_end_is_gone_on_with_where_it_ends() -> None:
    course = BEGUN.settle(FIRST, 5).handed_over("y", 9).settle(SECOND, 12)
    cut = course.cut(11)
    assert cut.stretches == (Stretch(FIRST, "x", 0, 5), Stretch(SECOND, "y", 9, 11), Stretch(THIRD, "y", 11, 11))
    # What was given of what is gone is in an earlier term, and settles nothing of what comes now.
    assert cut.position(Given(SECOND, 20)) == 11
    assert cut.settle(SECOND, 20).settle(FIRST, 20).stretches == (Stretch(THIRD, "y", 11, 11),)
    assert course.cut(7).stretches == (Stretch(FIRST, "x", 0, 5), Stretch(THIRD, "y", 7, 7))
    assert BEGUN.settle(FIRST, 5).cut(5).stretches == (Stretch(SECOND, "x", 5, 5),)
    assert BEGUN.settle(FIRST, 5).cut(3).stretches == (Stretch(SECOND, "x", 3, 3),)
    assert Course((Stretch(FIRST, "x", 4, 4),), 9).cut(0) == Course((Stretch(SECOND, "x", 0, 0),), 0)


def test_a_target_that_lost_the_end_of_its_log_settles_what_it_has() -> None:
    marks = Reports()
    for position, end in ((5, 10), (7, 14), (9, 20)):
        marks.given(position, {0: end})
    marks.ends_at({0: 20})
    assert marks.settled({0: 13}) == 5
    marks.ends_at({0: 12})
    assert (marks.settled({0: 11}), marks.settled({0: 12})) == (None, 9)
    marks.ends_at({0: 0})
    assert marks.settled(None) is None
    # It may have got more meanwhile than it had lost, and never comes to where it was.
    marks.given(12, {0: 30})
    marks.given(14, {0: 25})
    marks.ends_at({0: 25})
    assert marks.settled({0: 25}) == 14


def test_nothing_is_kept_of_a_stretch_that_was_settled() -> None:
    assert BEGUN.settle(FIRST, 9).handed_over("y", 9).stretches == (Stretch(SECOND, "y", 9, 9),)


def test_a_lost_target_takes_back_to_what_was_settled() -> None:
    course = BEGUN.settle(FIRST, 5).gone_back({"x"}, "y")
    assert course.stretches == (Stretch(SECOND, "y", 0, 5),)
    assert course.position(Given(FIRST, 9)) == 5


def test_an_earlier_target_is_lost_before_it_passed_everything_on() -> None:
    course = BEGUN.settle(FIRST, 5).handed_over("y", 9).settle(SECOND, 12)
    assert course.gone_back({"x"}, "y").stretches == (Stretch(THIRD, "y", 0, 5),)
    # A later one: what is before it goes on settling.
    lost = course.gone_back({"y"}, "x")
    assert lost.stretches == (Stretch(FIRST, "x", 0, 5), Stretch(THIRD, "x", 9, 12))
    assert lost.position(None) == 12
    # One that was given nothing, or all of whose is settled.
    assert course.gone_back({"z"}, "y") is course
    settled = BEGUN.handed_over("y", 3).handed_over("z", 7).settle(SECOND, 7)
    assert settled.gone_back({"y"}, "z") is settled


def test_settled_never_goes_back() -> None:
    course = BEGUN.settle(FIRST, 5)
    assert course.settle(FIRST, 3) == course
    assert course.settle(SECOND, 9) == course


def test_what_is_filled_is_given_whatever_its_flags() -> None:
    course = Course((Stretch(FIRST, "x", 0, 0),), fill_until=7)
    assert [course.flags(offset, 0b101, 4) for offset in (0, 6, 7)] == [ALL_LEVELS, ALL_LEVELS, None]
    assert course.flags(7, 0b10000, 4) == 0b11000
    assert (course.fills, course.settle(FIRST, 6).fills, course.settle(FIRST, 7).fills) == (True, True, False)


def test_reports_settle_what_was_in_the_log_before() -> None:
    reports = Reports()
    for position, end in ((3, 10), (5, 12), (8, 12), (9, 15)):
        reports.given(position, {0: end})
    assert reports.settled({0: 9}) is None
    assert reports.settled({0: 12}) == 8
    assert reports.settled({0: 14}) is None
    assert reports.settled({}) is None  # nobody knows
    assert reports.settled(None) == 9  # a single leaf: nothing is below


def test_what_went_by_keys_is_settled_when_it_is_in_all_partitions() -> None:
    reports = Reports()
    reports.given(3, {0: 10, 1: 4, 2: 0})
    reports.given(5, {0: 10, 1: 6, 2: 1})
    assert reports.settled({0: 10, 1: 3, 2: 9}) is None
    assert reports.settled({0: 10, 1: 5, 2: 9}) == 3
    assert reports.settled({0: 11, 1: 6}) is None
    reports.ends_at({0: 11, 1: 6, 2: 0})  # it lost the end of one of them
    assert reports.settled({0: 11, 1: 6, 2: 0}) == 5


def test_reports_are_bounded() -> None:
    reports = Reports()
    for number in range(5 * MARKS_MAX):
        reports.given(number, {0: number})
        assert len(reports._marks) <= MARKS_MAX
    settled = reports.settled({0: 2500})
    assert settled is not None
    assert 2000 < settled <= 2500
    assert reports.settled(None) == 5 * MARKS_MAX - 1


def test_all_of_a_log_is_given_by_a_level_that_is_new() -> None:
    assert begun(1, "x", 2) == Course((Stretch(FIRST, "x", 2, 2),))
    filled = begun(2, "x", 2, fill_until=30)
    assert filled == Course((Stretch(Term(2, 0), "x", 2, 2),), fill_until=30)
    assert (filled.fills, begun(2, "x", 2).fills) == (True, False)


def test_of_a_topic_that_was_made_anew_nobody_was_given_anything() -> None:
    course = BEGUN.settle(FIRST, 5).handed_over("y", 9)
    assert course.made_anew("x", 1) == Course((Stretch(THIRD, "x", 1, 1),))


def test_a_leaf_that_is_gone_was_lost_unless_it_was_settled() -> None:
    course = BEGUN.settle(FIRST, 7)
    assert carried(course, ("x", "y"), "y") is course
    assert carried(course, ("y", "z"), "y") == Course((Stretch(SECOND, "y", 0, 7),))
    course = course.handed_over("y", 9)
    assert carried(course, ("y", "z"), "z").stretches == (Stretch(THIRD, "y", 0, 7),)
    course = course.settle(FIRST, 9)
    assert carried(course, ("y", "z"), "z") == course


def test_what_keeps_a_leaf_in_the_tree() -> None:
    (low, high) = BALANCED.above("cluster-1")
    course = Course((Stretch(FIRST, "cluster-3", 0, 10),))
    assert needs(course, high, "cluster-3") == "writes to it at level 3: choose another target"
    assert needs(course, high, "cluster-4") is None
    switched = course.handed_over("cluster-4", 12)
    assert needs(switched, high, "cluster-3") == "gave it what is not settled yet at level 3"
    assert needs(switched.settle(FIRST, 12), high, "cluster-3") is None
    # A level whose other side is that leaf alone goes with it.
    assert needs(Course((Stretch(FIRST, "cluster-2", 0, 0),)), low, "cluster-2") is None
    assert unsettled(course, 3, 12) == "its log ends at 12, and is settled up to 10 at level 3"
    assert unsettled(course, 3, 10) is None
