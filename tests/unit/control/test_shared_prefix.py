"""Where two logs part: the situations that an operator may be in, and what holds of any two lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_control.model import ProvenanceRange, SourceEpoch
from isthmus_control.origins import Ended as How
from isthmus_control.origins import (
    Origin,
    OriginEpoch,
    OriginRange,
    PartitionOrigins,
    closed,
    cut,
    from_history,
    from_offset,
    going_on,
    without_epochs_below,
)
from isthmus_control.shared_prefix import PartitionLog, SharedPrefix, shared_prefix

Epochs = tuple[tuple[int, int], ...]
FIRST: Epochs = ((0, 0),)


def wrote(
    cluster: str, term: str, start: int, end: int | None, epochs: Epochs = FIRST, topic: str = "", **more: bool | int
) -> OriginRange:
    """A range that a cluster wrote in a term: of its topic ``x`` unless another is named."""
    origin = Origin(cluster, topic or f"{cluster}-x", term)
    return OriginRange(origin, start, end, 0, tuple(OriginEpoch(*each) for each in epochs), **more)  # type: ignore[arg-type]


def log(name: str, end: int, *ranges: OriginRange, start: int = 0) -> PartitionLog:
    return PartitionLog(name, PartitionOrigins(ranges), start, end)


def shared(one: PartitionLog, other: PartitionLog) -> int | str:
    """Up to where they are the same, or why that is not known; whoever is asked first."""
    found, again = shared_prefix(one, other), shared_prefix(other, one)
    assert found.offset == again.offset
    assert (found.unknown is None) == (again.unknown is None)
    return found.offset if found.unknown is None else found.unknown


# --- the situations


def test_a_planned_reversal_loses_nothing() -> None:
    a = log("A", 100, wrote("A", "a1", 0, 100))
    b = log("B", 100, wrote("A", "a1", 0, 100), wrote("B", "b1", 100, None))
    assert shared(a, b) == 100
    assert shared(a, replace(b, log_end=130)) == 100, "A follows from its end while B goes on"


def test_a_failover_behind_an_asynchronous_source() -> None:
    a = log("A", 200, wrote("A", "a1", 0, None))
    b = log("B", 150, wrote("A", "a1", 0, 100), wrote("B", "b1", 100, None))
    assert shared(a, b) == 100


@pytest.mark.parametrize(("end_of_c", "expected"), [(80, 80), (120, 100)])
def test_a_second_follower_when_the_source_died(end_of_c: int, expected: int) -> None:
    """B, failed over at 100, is ahead of C, or behind it."""
    b = log("B", 150, wrote("A", "a1", 0, 100), wrote("B", "b1", 100, None))
    c = log("C", end_of_c, wrote("A", "a1", 0, end_of_c))
    assert shared(c, b) == expected


@pytest.mark.parametrize(("end_of_a", "expected"), [(300, 90), (70, 70)])
def test_the_middle_of_a_chain_is_gone(end_of_a: int, expected: int) -> None:
    c = log("C", 90, wrote("A", "a1", 0, 90))  # by way of B
    assert shared(c, log("A", end_of_a, wrote("A", "a1", 0, None))) == expected


def test_twice_there_and_back() -> None:
    to_b = wrote("A", "a1", 0, 100), wrote("B", "b1", 100, 200), wrote("A", "a2", 200, 300)
    a = log("A", 350, *to_b, wrote("B", "b2", 300, 350))
    b = log("B", 400, *to_b, wrote("B", "b2", 300, None))
    assert shared(a, b) == 350


def test_a_cut_that_another_cluster_did_not_see() -> None:
    """A to 150; B failed over at 100 without a write; A cut, follows, reversed back at 100, writes to 200."""
    a = log(
        "A", 200, wrote("A", "a1", 0, 100), wrote("B", "b1", 100, 100, ()), wrote("A", "a2", 100, None, ((0, 100),))
    )
    c = log("C", 150, wrote("A", "a1", 0, 150))
    assert shared(a, c) == 100
    b = log(
        "B", 180, wrote("A", "a1", 0, 100), wrote("B", "b1", 100, 100, ()), wrote("A", "a2", 100, None, ((0, 100),))
    )
    assert shared(a, b) == 180, "empty ranges part nothing"
    other = log("C", 180, wrote("A", "a1", 0, 100), wrote("A", "a2", 100, None, ((0, 100),)))
    assert shared(a, other) == 180, "also where only one has them"


def test_both_were_written_while_they_were_apart() -> None:
    a = log("A", 500, wrote("A", "a1", 0, None))
    b = log("B", 400, wrote("A", "a1", 0, 100), wrote("B", "b1", 100, None))
    assert shared(a, b) == 100


def test_equal_names_by_accident() -> None:
    assert shared(log("A", 50, wrote("A", "a1", 0, None)), log("B", 70, wrote("B", "b1", 0, None))) == 0


def test_lost_provenance_is_unknown() -> None:
    b = log("B", 70, wrote("A", "a1", 0, None))
    assert "A has not recorded" in str(shared(log("A", 50), b))
    assert "from offset 30 on" in str(shared(log("A", 50, wrote("A", "a1", 0, 30)), b))
    assert shared(log("A", 30, wrote("A", "a1", 0, 30)), b) == 30, "its log ends there, too"
    assert shared_prefix(log("A", 50, wrote("A", "a1", 0, 30)), b).offset == 30, "so much is known"


# --- epochs: the origin lost records


def test_an_unclean_election_at_the_origin() -> None:
    a = log("A", 120, wrote("A", "a1", 0, None, ((0, 0), (1, 80))))
    b = log("B", 100, wrote("A", "a1", 0, 100))
    assert shared(a, b) == 80
    assert shared(a, replace(b, log_end=80)) == 80
    later = log("C", 130, wrote("A", "a1", 0, None, ((0, 0), (1, 80), (2, 125))))
    assert shared(a, later) == 120, "an epoch behind the end of one is not missing there"


def test_another_epoch_from_the_same_offset_on() -> None:
    a = log("A", 120, wrote("A", "a1", 0, None, ((0, 0), (1, 80))))
    b = log("B", 120, wrote("A", "a1", 0, 120, ((0, 0), (2, 80))))
    assert shared(a, b) == 80


def test_epochs_of_an_earlier_term_do_not_count_in_the_next() -> None:
    both = wrote("A", "a1", 0, 100, ((0, 0), (4, 60))), wrote("B", "b1", 100, None, ((2, 100),))
    assert shared(log("A", 140, *both), log("B", 150, *both)) == 140


# --- log starts


def test_only_what_both_may_have_is_compared() -> None:
    a = log("A", 120, wrote("A", "a1", 0, None, ((0, 0), (1, 40), (2, 60))))
    b = log("B", 100, wrote("A", "a1", 0, 100, ((0, 0), (2, 60))), start=60)
    assert shared(a, b) == 100, "the epoch that B lacks has written below its log start alone"
    assert shared(a, replace(b, log_start=50)) == 50, "here it has not"
    whole = log("A", 120, wrote("A", "a1", 0, None, ((0, 0), (1, 40))))
    expired = log("B", 100, wrote("A", "a1", 0, 100, ((0, 0),)), start=70)
    assert shared(whole, expired) == 70, "an epoch that is in force at the start may have begun before"
    assert shared(log("A", 30, wrote("A", "a1", 0, None)), expired) == 30, "one log ends before the other starts"


def test_what_is_unknown_below_the_log_starts_does_not_count() -> None:
    a = log("A", 120, wrote("A", "a1", 0, None))
    b = log("B", 100, wrote("A", "a1", 50, 100), start=60)
    assert shared(a, b) == 100
    assert "from offset 40 on" in str(shared(a, replace(b, log_start=40)))


def test_other_origins_below_the_log_starts_part_there() -> None:
    a = log("A", 120, wrote("A", "a1", 0, 50), wrote("A", "a2", 50, None, ((0, 50),)), start=60)
    b = log("B", 120, wrote("B", "b1", 0, 50), wrote("A", "a2", 50, None, ((0, 50),)), start=60)
    assert shared(a, b) == 0


def test_epochs_below_both_log_starts_may_be_dropped() -> None:
    ranges = (wrote("A", "a1", 0, None, ((0, 0), (1, 40), (2, 60))),)
    kept = without_epochs_below(ranges, 50)
    assert kept[0].epochs == ((1, 40), (2, 60))
    assert without_epochs_below(kept, 60)[0].epochs == ((2, 60),)
    a, b = log("A", 120, *ranges, start=50), log("B", 90, *kept, start=50)
    assert shared(a, b) == 90
    # Another replica leads, which has kept more of the log: what was dropped is unknown, not absent.
    lower = shared(replace(a, log_start=30), replace(b, log_start=0))
    assert "B has not recorded in which leader epochs [30, 40) are" in str(lower)


# --- what is not known of epochs


def test_an_epoch_that_may_be_missing_is_unknown() -> None:
    """B saw the epochs of its direct source as they came, maybe of a cleaned log."""
    a = log("A", 120, wrote("A", "a1", 0, None, ((0, 0), (1, 40), (2, 60))))
    b = log("B", 100, wrote("A", "a1", 0, 100, ((0, 0), (2, 60)), missing_before=60))
    assert shared(a, b) == 100, "both have the second one from 60 on, so they had the same before"
    ahead = log("A", 120, wrote("A", "a1", 0, None, ((0, 0), (1, 40))))
    assert "leader epoch 1 from offset 40 on is not recorded at B" in str(shared(ahead, b))
    assert shared_prefix(ahead, b).offset == 0, "only what is certain counts"
    neither = log("C", 55, wrote("A", "a1", 0, 55, ((0, 0),)))
    assert "may be missing" in str(shared(neither, b))


def test_epochs_that_nobody_recorded_are_unknown() -> None:
    a = log("A", 120, wrote("A", "a1", 0, None, ()))
    assert "has not recorded in which leader epochs [0, 100)" in str(shared(a, log("B", 100, wrote("A", "a1", 0, 100))))
    late = log("C", 120, wrote("A", "a1", 0, None, ((1, 20),)))
    assert "[0, 20)" in str(shared(late, log("B", 100, wrote("A", "a1", 0, 100))))


# --- from before terms


def test_from_before_terms_the_same_topic_is_one_origin() -> None:
    """B and C followed A's topic before terms, and A says that it wrote it."""
    a = log("A", 200, wrote("A", "", 0, 150), wrote("A", "a1", 150, None))
    followed = ProvenanceRange("A", "A-x", 0, 100, 0, (SourceEpoch(0, 0),))
    b = PartitionLog("B", from_history([followed], "B"), 0, 100)
    assert shared(a, b) == 100
    assert shared(log("C", 80, wrote("A", "", 0, 80, assumed=True)), b) == 80
    written = replace(followed, source_cluster_id="B", source_topic_id="B-x", start_offset=100, end_offset=120)
    b = PartitionLog("B", from_history([followed, written], "B"), 0, 120)
    assert shared(a, b) == 100, "both wrote themselves what comes behind"


def test_from_before_terms_another_topic_is_unknown() -> None:
    """A may have had it from Z, which B does not know."""
    a = log("A", 200, wrote("Z", "", 0, 150))
    b = log("B", 100, wrote("A", "", 0, 100, assumed=True))
    assert "from before terms" in str(shared(a, b))
    own = log("A", 200, wrote("A", "a1", 0, None))
    assert "in a term that is not known" in str(shared(own, log("B", 100, wrote("A", "", 0, 100))))


def test_epochs_of_a_direct_source_may_have_been_missed_but_behind_the_last() -> None:
    known = from_history([ProvenanceRange("A", "A-x", 0, None, 0, (SourceEpoch(0, 0), SourceEpoch(2, 60)))], "B")
    assert known.ranges[0].missing_before == 60
    assert known.ranges[0].assumed
    assert known.ranges[0].via == "A"
    assert from_history([ProvenanceRange("A", "A-x", 0, None, 0)], "B", whole=False).ranges == ()


# --- what holds of any


@st.composite
def histories(draw: st.DrawFn) -> tuple[PartitionLog, PartitionLog, int]:
    """Two logs and up to where they are the same: one stretch after the other that some cluster wrote, or followed.

    Both have the first ones; then each has its own.
    """
    stretch = st.tuples(st.sampled_from("ABC"), st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3))
    common, one, other = (draw(st.lists(stretch, max_size=4)) for _ in range(3))
    ended = draw(st.integers(0, 9))

    def ranges(stretches: list[tuple[str, int, list[int]]], name: str) -> tuple[tuple[OriginRange, ...], int]:
        found, end = [], 0
        for number, (cluster, size, elections) in enumerate(stretches):
            starts = sorted({end, *(end + each for each in elections if each < size)}) if size else []
            epochs = tuple((epoch, start) for epoch, start in enumerate(starts))
            term = f"{number}" if number < len(common) else f"{number}-{name}"
            found.append(wrote(cluster, term, end, end + size, epochs))
            end += size
        return tuple(found), end

    (left, left_end), (right, right_end) = ranges(common + one, "left"), ranges(common + other, "right")
    end = min(sum(size for _, size, _ in common), max(left_end - ended, 0), right_end)
    left_end = max(left_end - ended, 0)
    starts = draw(st.integers(0, left_end)), draw(st.integers(0, right_end))
    return log("left", left_end, *left, start=starts[0]), log("right", right_end, *right, start=starts[1]), end


@given(histories())
def test_the_same_up_to_where_both_have_the_same_writing(found: tuple[PartitionLog, PartitionLog, int]) -> None:
    one, other, truth = found
    assert shared(one, other) == truth
    assert shared(one, one) == one.log_end


@given(histories(), st.integers(0, 40))
def test_a_cut_shares_what_is_left(found: tuple[PartitionLog, PartitionLog, int], offset: int) -> None:
    one, other, truth = found
    for left in (cut(one.origins.ranges, offset), closed(one.origins.ranges, offset, How.DETACHED)):
        end = min(offset, one.log_end)
        less = PartitionLog("left", PartitionOrigins(left), min(one.log_start, end), end)
        assert shared(less, other) == min(truth, end)


@given(histories(), st.integers(0, 40))
def test_less_that_is_known_never_says_more(found: tuple[PartitionLog, PartitionLog, int], gone: int) -> None:
    """Without some of its ranges, epochs or origins a list may say less, or nothing, of what both logs still have."""
    one, other, truth = found
    ranges = one.origins.ranges
    if not ranges:
        return
    at = gone % len(ranges)
    dropped = (*ranges[:at], *ranges[at + 1 :])
    unread = (*ranges[:at], replace(ranges[at], epochs=()), *ranges[at + 1 :])
    assumed = (*ranges[:at], replace(ranges[at], assumed=True), *ranges[at + 1 :])
    for known in (dropped, unread, assumed):
        less = replace(one, origins=PartitionOrigins(known), log_start=0)
        assert shared_prefix(less, replace(other, log_start=0)).offset <= truth


@given(histories())
def test_who_follows_shares_all_with_its_source(found: tuple[PartitionLog, PartitionLog, int]) -> None:
    """Cut to what is shared, and told the rest."""
    one, other, truth = found
    told = from_offset(other.origins.ranges, truth)
    followed = going_on(cut(one.origins.ranges, truth), truth, told)
    copy = PartitionLog("copy", PartitionOrigins(followed), min(one.log_start, truth), other.log_end)
    assert shared(copy, other) == other.log_end


def test_it_says_so_in_a_value() -> None:
    assert shared_prefix(log("A", 0), log("B", 0)) == SharedPrefix(0)
