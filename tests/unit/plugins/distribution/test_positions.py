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
    carried,
    keeps,
    settled_below,
)
from isthmus_plugins.distribution.tree import Subtree, Tree

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
        marks.given(position, end)
    marks.ends_at(20)
    assert marks.settled(13) == 5
    marks.ends_at(12)
    assert (marks.settled(11), marks.settled(12)) == (None, 9)
    marks.ends_at(0)
    assert marks.settled(None) is None


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
        reports.given(position, end)
    assert reports.settled(9) is None
    assert reports.settled(12) == 8
    assert reports.settled(14) is None
    assert reports.settled(None) == 9  # a single leaf: nothing is below


def test_reports_are_bounded() -> None:
    reports = Reports()
    for number in range(5 * MARKS_MAX):
        reports.given(number, number)
        assert len(reports._marks) <= MARKS_MAX
    settled = reports.settled(2500)
    assert settled is not None
    assert 2000 < settled <= 2500
    assert reports.settled(None) == 5 * MARKS_MAX - 1


def test_a_leaf_reports_its_lower_levels() -> None:
    courses = {1: BEGUN.settle(FIRST, 4), 2: BEGUN.settle(FIRST, 3), 3: BEGUN}
    assert [settled_below(courses, level) for level in (1, 2, 3, 4)] == [None, 4, 3, 0]


def begun(tree: Tree, leaf: str, courses: dict[int, Course], log_end: int) -> dict[int, Course]:
    def target(level: int, current: str | None) -> str:
        (beside,) = (above.beside for above in tree.above(leaf) if above.level == level)
        return current or beside[0]

    return carried(courses, leaf, tree, target, log_start=2, log_end=log_end)


def test_all_of_a_log_is_given_in_a_new_tree() -> None:
    assert begun(BALANCED, "cluster-1", {}, 10) == {
        1: Course((Stretch(FIRST, "cluster-2", 2, 2),)),
        3: Course((Stretch(FIRST, "cluster-3", 2, 2),)),
    }


def test_a_new_leaf_is_filled_by_the_one_beside_it() -> None:
    before = Tree(1, Subtree(8, (Subtree(4, ("a", "b")), "c")))
    after = Tree(2, Subtree(8, (Subtree(4, ("a", Subtree(2, ("b", "x")))), "c")))
    courses = begun(before, "b", {}, 10)
    assert begun(after, "b", courses, 30) == {
        2: Course((Stretch(Term(2, 0), "x", 2, 2),), fill_until=30),
        **courses,
    }
    of_a = begun(before, "a", {}, 10)
    assert begun(after, "a", of_a, 30) == of_a
    assert all(not course.fills for course in begun(after, "x", {}, 0).values())


def test_a_leaf_that_is_gone_was_lost_unless_it_was_settled() -> None:
    courses = begun(BALANCED, "cluster-1", {}, 10)
    courses[3] = courses[3].settle(FIRST, 7)
    after = Tree(2, Subtree(3, (Subtree(1, ("cluster-1", "cluster-2")), "cluster-4")))
    assert begun(after, "cluster-1", courses, 10)[3] == Course((Stretch(SECOND, "cluster-4", 2, 7),))
    courses[3] = courses[3].handed_over("cluster-4", 9)
    assert begun(after, "cluster-1", courses, 10)[3].stretches == (Stretch(Term(1, 2), "cluster-4", 2, 7),)
    courses[3] = courses[3].settle(FIRST, 9)
    assert begun(after, "cluster-1", courses, 10) == courses


def test_what_keeps_a_leaf_in_the_tree() -> None:
    courses = {leaf: begun(BALANCED, leaf, {}, 10) for leaf in BALANCED.leaves}
    for of_leaf in courses.values():
        for level, course in of_leaf.items():
            of_leaf[level] = course.settle(FIRST, 10)
    assert keeps(BALANCED, "cluster-3", courses, 12) == [
        "cluster-1 writes to it at level 3: choose another target",
        "cluster-2 writes to it at level 3: choose another target",
        "its log ends at 12, and is settled up to 10 at level 1",
        "its log ends at 12, and is settled up to 10 at level 3",
    ]
    courses["cluster-1"][3] = courses["cluster-1"][3].handed_over("cluster-4", 10)
    courses["cluster-2"][3] = courses["cluster-2"][3].handed_over("cluster-4", 12)
    assert keeps(BALANCED, "cluster-3", courses, 10) == ["what cluster-2 gave it at level 3 is not settled yet"]
    courses["cluster-2"][3] = courses["cluster-2"][3].settle(FIRST, 12)
    assert keeps(BALANCED, "cluster-3", courses, 10) == []
