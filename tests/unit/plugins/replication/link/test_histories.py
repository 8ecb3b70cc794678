"""What is recorded of where records come from, before what happens."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS
from isthmus_control.model import ProvenanceRange, SourceEpoch, TopicHistory
from isthmus_control.origins import Ended, Origin, OriginEpoch, OriginRange, PartitionOrigins, TopicOrigins
from isthmus_plugins.replication.link import histories
from isthmus_plugins.replication.link.histories import EpochSeen, LostBefore, Parted

X = str(uuid.UUID(int=1))
Y = str(uuid.UUID(int=2))
TOPIC = ("t", X)
SOURCE = Origin("A", Y)


def own(start: int, end: int | None, *epochs: tuple[int, int], term: str = "b1", began_in: int = 3) -> OriginRange:
    found = tuple(OriginEpoch(*each) for each in epochs)
    return OriginRange(Origin("B", X, term), start, end, 5, found, began_in=began_in)


def source(start: int, end: int | None, *epochs: tuple[int, int], term: str = "a1", via: str = "A") -> OriginRange:
    return OriginRange(Origin("A", Y, term), start, end, 5, tuple(OriginEpoch(*each) for each in epochs), via=via)


def state(*ranges: OriginRange, history: tuple[ProvenanceRange, ...] = ()) -> ControlState:
    origins = {"t": TopicOrigins("t", X, {0: PartitionOrigins(ranges)})}
    known = {"t": TopicHistory("t", X, {0: history})} if history else {}
    return ControlState("B", level=ORIGINS, origins=origins, histories=known)


def known(*ranges: OriginRange) -> PartitionOrigins:
    return PartitionOrigins(ranges)


def at(offset: int) -> tuple[c.PartitionOffset, ...]:
    return (c.PartitionOffset("t", X, 0, offset),)


def begun(offset: int, ended: Ended = Ended.PROMOTED) -> c.BeginTerm:
    return c.BeginTerm((c.TopicTerms("t", X, {0: c.TermStart(offset, 7)}),), ended)


# --- the leader


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ((), (begun(50),)),
        ((source(0, 50),), (begun(50),)),
        ((source(0, None),), (begun(50),)),
        ((source(0, 60),), (c.TruncateProvenance(at(50)), begun(50))),
        ((source(0, 60), own(60, None, began_in=7)), (c.TruncateProvenance(at(50)), begun(50))),
        ((source(0, 60), own(60, None, began_in=6)), ()),
        ((own(0, None),), ()),
        ((own(0, 40),), (begun(50),)),
    ],
)
def test_before_it_leads_a_term_begins(ranges: tuple[OriginRange, ...], expected: tuple[c.Body, ...]) -> None:
    ends = {TOPIC: {0: c.TermStart(50, 7)}}
    assert histories.to_lead(state(*ranges), ends) == expected


def test_terms_of_many_topics_begin_at_once() -> None:
    ends = {("t", X): {0: c.TermStart(5, 7), 1: c.TermStart(6, 7)}, ("u", Y): {0: c.TermStart(0, 0)}}
    (one,) = histories.to_lead(state(own(0, None)), ends, Ended.FAILED_OVER)
    assert one == c.BeginTerm(
        (c.TopicTerms("t", X, {1: c.TermStart(6, 7)}), c.TopicTerms("u", Y, {0: c.TermStart(0, 0)})), Ended.FAILED_OVER
    )


@pytest.mark.parametrize(
    ("base", "epoch", "expected"),
    [
        (60, 3, None),
        (60, 4, OriginEpoch(4, 60)),
        (50, 3, None),
        (30, 3, None),
        (30, 4, LostBefore(30)),
    ],
)
def test_before_an_epoch_is_pushed_it_is_recorded(base: int, epoch: int, expected: object) -> None:
    """What was followed has this cluster's own epochs in its headers, up to the one in which the term began."""
    found = histories.epoch_due(known(source(0, 50, (0, 0)), own(50, None, (3, 50))), "B", X, base, epoch)
    assert found == expected


def test_what_is_relayed_has_the_epochs_of_others() -> None:
    for ranges in ((source(0, None, (0, 0)),), (own(0, 50, (3, 0)), source(50, None, (0, 50))), (own(0, 50, (3, 0)),)):
        assert histories.epoch_due(known(*ranges), "B", X, 20, 9) is None
        seen = (EpochSeen(9, 20, 60),)
        assert histories.log_epochs(known(*ranges), "B", X, 0, seen, (0, 60), False) is None


def test_the_epochs_of_a_log_are_recorded_up_to_its_end() -> None:
    before = own(0, 40, term="", began_in=-1)
    ranges = known(before, own(40, None, began_in=1))
    seen = (EpochSeen(0, 0, 10), EpochSeen(1, 10, 55), EpochSeen(2, 55, 60))
    due = histories.log_epochs(ranges, "B", X, 0, seen, (0, 60), False)
    assert due == c.LogEpochs(0, tuple(OriginEpoch(*each) for each in ((0, 0), (1, 10), (1, 40), (2, 55))))
    recorded = known(own(0, 40, (0, 0), (1, 10), term="", began_in=-1), own(40, None, (1, 40), (2, 55), began_in=1))
    assert histories.log_epochs(recorded, "B", X, 0, seen, (0, 60), False) is None


def test_of_a_cleaned_log_what_may_have_been_lost_counts_as_lost() -> None:
    ranges = known(source(0, 50, (0, 0)), own(50, None, (3, 50)))
    seen = (EpochSeen(3, 45, 58), EpochSeen(5, 70, 80))
    due = histories.log_epochs(ranges, "B", X, 0, seen, (0, 80), False)
    assert due == c.LogEpochs(0, (OriginEpoch(5, 70),))
    due = histories.log_epochs(ranges, "B", X, 0, seen, (0, 80), True)
    assert due == c.LogEpochs(0, (OriginEpoch(5, 58),)), "epoch 5 may have begun right behind what is left of 3"
    seen = (EpochSeen(3, 20, 45), EpochSeen(5, 70, 80))
    assert histories.log_epochs(ranges, "B", X, 0, seen, (0, 80), True) == LostBefore(45), "also before the term"


def test_a_log_that_ends_before_its_term_has_lost_it() -> None:
    ranges = (source(0, 50, (0, 0)), own(50, None))
    seen = (EpochSeen(3, 0, 40),)
    lost = histories.log_epochs(known(*ranges), "B", X, 0, seen, (0, 45), False)
    assert lost == LostBefore(45)
    assert histories.log_epochs(known(*ranges), "B", X, 0, seen, (0, None), False) is None, "it was not asked"
    assert histories.log_epochs(known(*ranges), "B", X, 0, seen, (0, 45), True) == LostBefore(40)
    mended = histories.to_mend(state(*ranges), TOPIC, 0, lost, 7)
    assert mended == (c.TruncateProvenance(at(45)), begun(45, Ended.CUT))
    assert histories.to_mend(state(own(0, 50)), TOPIC, 0, lost, 7) == (c.TruncateProvenance(at(45)),)


def test_a_follower_is_told_what_lies_ahead_of_it() -> None:
    list_ = known(source(0, 40, (0, 0)), own(40, 40), source(40, None, (0, 40), (1, 60), term="a2", via="C"))
    said = histories.told(list_, 2, 50)
    assert said == c.ToldPartition(2, 50, (source(50, None, (0, 40), (1, 60), term="a2", via=""),))
    whole = histories.told(list_, 2, 0)
    assert whole is not None
    assert [each.began_in for each in whole.ranges] == [-1] * 3, "what is this cluster's own business stays here"
    assert histories.told(known(), 0, 0) is None


# --- the follower


def said(*ranges: OriginRange) -> c.ToldPartition:
    return c.ToldPartition(0, ranges[0].start_offset, ranges)


def test_what_is_new_is_recorded_from_the_end_of_the_log_on() -> None:
    there = said(source(0, None, (0, 0), (1, 60), via=""))
    found = histories.to_follow(known(source(0, None, (0, 0))), SOURCE, there, (0, 50), (0, 80))
    assert found == c.ToldPartition(0, 50, (source(50, None, (0, 0), (1, 60), via=""),))
    all_known = known(source(0, None, (0, 0), (1, 60)))
    assert histories.to_follow(all_known, SOURCE, there, (0, 50), (0, 80)) is None
    assert histories.to_follow(known(), SOURCE, there, (0, 0), (0, 80)) == there


def test_where_only_later_epochs_are_new_nothing_else_is_recorded() -> None:
    recorded = source(0, None, (0, 0), (1, 40))
    for new in (((2, 60),), ((2, 60), (5, 70))):
        told_of = said(source(50, None, (1, 40), *new, via=""))
        found = histories.later_epochs(known(own(0, 0), recorded), SOURCE, told_of)
        assert found == c.LogEpochs(0, tuple(OriginEpoch(*each) for each in new))
    told_of = said(source(50, None, (1, 40), (2, 60), via=""))
    ahead = replace(recorded, epochs=(*recorded.epochs, OriginEpoch(3, 65)))  # and the source lost that
    others = (
        replace(recorded, assumed=True),
        replace(recorded, via="C"),
        source(0, 50, (0, 0)),
        source(0, None, (0, 0), term="a0"),
        ahead,
    )
    for other in others:
        assert histories.later_epochs(known(other), SOURCE, told_of) is None
    assert histories.later_epochs(known(), SOURCE, told_of) is None
    changed = said(source(50, 60, (1, 40), via=""), source(60, None, (2, 60), term="a2", via=""))
    assert histories.later_epochs(known(recorded), SOURCE, changed) is None


def test_logs_that_have_parted_are_not_gone_on_with() -> None:
    """What stands last may look the same all the same."""
    there = said(source(0, None, (0, 0), (1, 40), via=""))
    assert histories.to_follow(known(source(0, None, (0, 0))), SOURCE, there, (0, 50), (0, 80)) == Parted(40)
    other = said(source(0, 30, (0, 0), via=""), source(30, None, (0, 30), term="a2", via=""))
    assert histories.to_follow(known(source(0, None, (0, 0))), SOURCE, other, (0, 50), (0, 80)) == Parted(30)


def test_what_came_from_the_source_before_it_said_so_is_what_it_says_now() -> None:
    assumed = OriginRange(SOURCE, 0, None, 5, (OriginEpoch(4, 0),), via="A", assumed=True)
    there = said(OriginRange(Origin("C", Y, "c1"), 0, 30, 5, (OriginEpoch(0, 0),)), source(30, None, (4, 30), via=""))
    assert histories.to_follow(known(assumed), SOURCE, there, (0, 50), (0, 80)) == there
    elsewhere = Origin("D", Y)
    found = histories.to_follow(known(assumed), elsewhere, there, (0, 50), (0, 80))
    assert isinstance(found, c.ToldPartition)
    assert found.offset == 50, "it came from another one: that stays as it is"


# --- both


def test_whose_a_log_is_now() -> None:
    """As recorded: followed or written, and from whom."""
    followed = ProvenanceRange("A", Y, 0, None, 0)
    for now, received, written, from_others in (
        (state(), False, False, False),
        (state(own(0, None)), False, True, False),
        (state(source(0, 50)), False, False, False),
        (state(source(0, None)), True, False, False),
        (state(source(0, None, via="C")), True, False, True),
        (state(history=(followed,)), True, False, False),
        (state(history=(replace(followed, source_topic_id=X),)), True, False, True),
        (state(history=(replace(followed, source_cluster_id="C"),)), True, False, True),
        (state(history=(replace(followed, end_offset=9),)), False, False, False),
    ):
        assert histories.is_received(now, TOPIC, 0) is received
        assert histories.is_written(now, TOPIC, 0) is written
        assert histories.received_from_others(now, TOPIC, [0], ("A", Y)) == [0] * from_others


def test_what_goes_on_is_closed_at_the_end_of_the_log() -> None:
    ends = {TOPIC: {0: 50}}
    close = c.CloseProvenance(at(50), Ended.DETACHED)
    cut = c.TruncateProvenance(at(50))
    followed = ProvenanceRange("A", Y, 0, None, 5)
    assert histories.to_close(state(source(0, None)), ends, Ended.DETACHED) == (close,)
    assert histories.to_close(state(source(0, 50)), ends, Ended.DETACHED) == ()
    assert histories.to_close(state(source(0, 50), history=(followed,)), ends, Ended.DETACHED) == (close,)
    assert histories.to_close(state(source(0, 60), own(60, None)), ends, Ended.DETACHED) == (cut,)
    epochs = SourceEpoch(1, 0), SourceEpoch(2, 55), SourceEpoch(3, 60)
    lost = ProvenanceRange("A", Y, 0, None, 5, epochs)
    assert histories.to_close(state(source(0, None), history=(lost,)), ends, Ended.DETACHED) == (cut, close)


def test_a_side_of_a_comparison() -> None:
    side = histories.to_compare(state(own(0, None)), "B", TOPIC, 0, 10, 50)
    assert (side.name, side.log_start, side.log_end, side.origins.ranges) == ("B", 10, 50, (own(0, None),))
    assert histories.to_compare(state(own(0, None)), "B", ("t", Y), 0, 10, 50).origins.ranges == ()
