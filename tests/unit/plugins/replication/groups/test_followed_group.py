"""One group that follows: what there is to do for it, and why the rest waits."""

from __future__ import annotations

import random

import pytest

from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import CommittedOffset, TopicPartition
from isthmus_plugins.replication.groups.followed_group import (
    BEYOND_FOLLOWER_END,
    COMPARE_INTERVAL_S,
    COORDINATOR_NOT_AVAILABLE,
    MEMBERS_SUBSCRIBED,
    POSITION_NOT_KNOWN,
    TARGET_REFUSES_OFFSETS,
    FollowedGroup,
    Pending,
    Plan,
)

A, B = ("t", 0), ("t", 1)
RENEWAL_S = 3600.0


def at(offset: int, metadata: str = "") -> CommittedOffset:
    return CommittedOffset(offset, metadata)


def a_group(has: dict[TopicPartition, CommittedOffset] | None = None, **wanted: CommittedOffset) -> FollowedGroup:
    """A group that was read at time 0; ``wanted`` by partition: a for A, b for B."""
    group = FollowedGroup("a-to-b", "far-app-1", 7)
    for name, offset in wanted.items():
        group.want({"a": A, "b": B}[name], offset, since=-5.0)
    if has is not None:
        group.found(has, False, 0.0, RENEWAL_S)
    return group


def test_what_differs_is_committed_and_what_nobody_wants_is_deleted() -> None:
    group = a_group({A: at(3), B: at(4)}, a=at(5))
    assert not group.idle
    assert group.plan({A: 10, B: 10}, {}, 1.0, {A: 10, B: 10}) == Plan({A: at(5)}, {}, {B}, False)
    group.committed({A: at(5)}, 2.0, RENEWAL_S)
    group.deleted([B])
    assert group.idle
    assert not group.plan({}, {}, 3.0)


def test_nothing_is_deleted_before_all_was_told() -> None:
    group = a_group({A: at(3)})
    assert group.plan({}, {}, 1.0, {A: 10}, whole=False) == Plan({}, {}, set(), False)
    group.deleting = True
    group.deleted([A])
    assert not group.plan({}, {}, 1.0, whole=False)
    assert group.plan({}, {}, 1.0) == Plan({}, {}, set(), True)
    group.has_others = True
    assert not group.plan({}, {}, 1.0), "it has committed offsets in topics of its own"


@pytest.mark.parametrize(
    ("ends", "said"), [({A: 4}, "ends at 4, the group's committed offset is 5"), ({}, "cannot be read")]
)
def test_a_commit_ahead_of_the_data_waits_for_it(ends: dict[TopicPartition, int], said: str) -> None:
    group = a_group({}, a=at(5))
    assert not group.plan(ends, {}, 1.0)
    waiting = group.waiting(10.0)
    assert (waiting.positions, waiting.age_ms, waiting.code) == (1, 15_000, BEYOND_FOLLOWER_END)
    assert said in (waiting.message or "")
    assert group.plan({A: 5}, {}, 2.0).commit == {A: at(5)}
    group.committed({A: at(5)}, 2.0, RENEWAL_S)
    assert group.waiting(11.0).positions == 0
    assert not group.pending


def test_a_topic_that_does_not_follow_says_why() -> None:
    group = a_group({}, a=at(5), b=at(6))
    why = Pending(ReasonCode.TRUNCATING, "it is cut")
    assert not group.plan({A: 10, B: 10}, {"t": why}, 1.0)
    assert group.pending == {A: why, B: why}


def test_the_gravest_reason_is_told() -> None:
    group = a_group({}, a=at(5), b=at(6))
    group.pending = {A: Pending(MEMBERS_SUBSCRIBED, "later"), B: Pending(TARGET_REFUSES_OFFSETS, "somebody must act")}
    assert group.waiting(0.0).code == TARGET_REFUSES_OFFSETS


def test_what_own_transactions_may_do_is_told_until_they_have_ended_whatever_was_carried_out() -> None:
    why = Pending(ReasonCode.TRANSACTIONS_ENDING, "one is open")
    group = a_group({A: at(3)}, a=at(5))
    group.await_own(why)
    group.pending[None] = Pending(COORDINATOR_NOT_AVAILABLE, "it moves")
    assert group.plan({A: 10}, {}, 1.0).commit == {A: at(5)}
    group.committed({A: at(5)}, 2.0, RENEWAL_S)
    del group.pending[None]
    assert group.waiting(3.0)[2:] == why
    assert not group.idle
    group.own_ended(certain_from=4.0)
    assert group.waiting(5.0).code is None
    group.found({A: at(5)}, False, 5.0, RENEWAL_S)
    assert group.settled


def test_what_cannot_be_read_at_the_source_stays_as_it_is() -> None:
    group = a_group({A: at(3)}, a=at(5))
    group.not_known(A)
    plan = group.plan({A: 10}, {}, 1.0, {A: 10})
    assert not plan
    assert group.pending[A].code == POSITION_NOT_KNOWN
    assert not group.has_as_wanted(A)
    group.want(A, at(6), since=2.0)
    assert group.plan({A: 10}, {}, 3.0, {A: 10}).commit == {A: at(6)}


def test_what_is_beyond_the_log_is_moved_into_it() -> None:
    group = a_group({A: at(9, "m")}, a=at(9, "m"))
    assert group.to_check == [A]
    assert not group.plan({A: 4}, {}, 1.0, {A: 6}), "the source is asked first"
    assert group.ahead_of_source({A: 6}) == [A]
    group.source_ends(A, has_data=True)
    assert group.plan({A: 4}, {}, 1.0, {A: 6}).commit == {A: at(4, "m")}
    assert group.to_check == [], "it has been looked at"


def test_what_is_beyond_the_sources_log_is_as_the_source_has_it() -> None:
    group = a_group({A: at(9)}, a=at(9), b=at(8))
    ends = {A: 4, B: 4}
    assert not group.plan(ends, {}, 1.0, ends)
    assert group.pending[B].code == BEYOND_FOLLOWER_END
    assert group.awaits_data(ends, before=-5.0) == [B]
    assert group.awaits_data(ends, before=-6.0) == [], "not yet"
    for place in (A, B):
        group.source_ends(place, has_data=False)
    assert group.awaits_data(ends, before=1.0) == group.ahead_of_source(ends) == []
    assert group.plan(ends, {}, 1.0, ends).commit == {B: at(8)}
    group.committed({B: at(8)}, 1.0, RENEWAL_S)
    assert group.idle
    group.want(B, at(7), 2.0)
    assert not group.plan(ends, {}, 2.0), "it was not asked about that"
    assert group.awaits_data(ends, before=2.0) == [B]


def test_what_was_beyond_the_sources_log_may_not_be_any_more() -> None:
    group = a_group({}, a=at(9))
    group.source_ends(A, has_data=False)
    assert group.plan({A: 4}, {}, 1.0).commit == {A: at(9)}
    group.want(A, at(3), 2.0)
    group.want(A, at(9), 3.0)
    assert not group.plan({A: 4}, {}, 3.0)


def test_what_the_source_has_is_asked_about_again() -> None:
    """It may lose its end."""
    group = a_group({}, a=at(9))
    group.source_ends(A, has_data=True)
    assert not group.plan({A: 4}, {}, 1.0)
    assert group.awaits_data({A: 4}, before=1.0) == [A]


def test_a_request_in_doubt_makes_nothing_certain_until_it_can_land_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)  # the first renewal may be due before the rest
    group = a_group({A: at(5)}, a=at(5))
    assert group.has_as_wanted(A)
    group.in_doubt(30.0)
    assert not group.has_as_wanted(A)
    assert group.due_at == 30.0
    group.found({A: at(5)}, False, 20.0, RENEWAL_S)
    assert not group.has_as_wanted(A), "it may still be carried out"
    assert group.due_at == 30.0
    group.found({A: at(5)}, False, 31.0, RENEWAL_S)
    assert group.has_as_wanted(A)
    assert group.due_at == 31.0 + COMPARE_INTERVAL_S


def test_committed_offsets_are_renewed_before_they_expire() -> None:
    group = a_group({}, a=at(5))
    assert group.plan({A: 10}, {}, 1.0).commit == {A: at(5)}
    group.committed({A: at(5)}, 1.0, RENEWAL_S)
    assert not group.plan({}, {}, RENEWAL_S)
    assert group.plan({}, {}, 1.0 + RENEWAL_S).renew == {A: at(5)}
    truncated = Pending(ReasonCode.TRUNCATING, "it is cut")
    group.committed({A: at(5)}, 1.0, RENEWAL_S)
    assert not group.plan({}, {"t": truncated}, 1.0 + RENEWAL_S).renew, "its log is about to be cut"


def test_what_the_source_does_not_tell_of_now_is_left_alone() -> None:
    group = a_group({A: at(3)}, a=at(5))
    why = Pending(ReasonCode.SOURCE_TRUNCATING, "the source's topic is truncated")
    group.silence({A: why}, by="told")
    assert not group.plan({A: 10}, {}, 1.0, {A: 10})
    assert (group.waiting(1.0).positions, group.waiting(1.0).code) == (1, ReasonCode.SOURCE_TRUNCATING)
    group.silence({}, by="told again")
    assert group.plan({A: 10}, {}, 1.0, {A: 10}).commit == {A: at(5)}


def committed_at(*offsets: int) -> dict[TopicPartition, CommittedOffset]:
    return {("t", partition): CommittedOffset(offset, "") for partition, offset in enumerate(offsets)}


def test_what_a_coordinator_has_lost_is_known_until_it_has_it_again() -> None:
    group = FollowedGroup("link", "far-a", 0)
    for place, offset in committed_at(35, 7).items():
        group.want(place, offset, 0.0)
    group.found(committed_at(35, 7), False, 1.0, 100.0)
    assert group.had_any
    assert not group.lacks
    group.read_again(2.0)
    assert not group.missing_from(committed_at(35, 7))
    assert group.missing_from(committed_at(20, 7)) == committed_at(35)
    assert group.missing_from({}) == committed_at(35, 7)
    for again in range(3):
        group.found(committed_at(20, 7), False, 3.0 + again, 100.0)
        assert group.lacks
        assert group.missing_from(committed_at(20, 7)) == committed_at(35), "however often it was read"
        group.read_again(3.5 + again)
    group.committed(committed_at(20), 7.0, 100.0)
    assert group.missing_from(committed_at(20, 7)), "what was left was renewed"
    group.want(("t", 0), CommittedOffset(40, ""), 7.0)
    assert group.missing_from(committed_at(20, 7))
    anew = FollowedGroup("link", "far-a", 0)
    anew.goes_on(group)
    assert anew.missing_from(committed_at(20, 7)) == committed_at(35)
    group.found(committed_at(20, 7), False, 8.0, 100.0)
    group.committed(committed_at(35), 8.0, 100.0)
    assert not group.missing_from(committed_at(35, 7))
    assert not group.missing_from(committed_at(40, 7))
    group.found(committed_at(40, 7), False, 9.0, 100.0)
    assert not group.lacks


def test_a_group_that_is_pushed_anew_is_looked_after_until_it_is_certain_what_it_has() -> None:
    group = FollowedGroup("link", "far-a", 0)
    group.doubt(3.0)
    group.want(("t", 0), CommittedOffset(35, ""), 0.0)
    group.found(committed_at(35), False, 1.0, 100.0)
    assert (group.idle, group.settled, group.read_at) == (True, False, 3.0), "acks wait for the read at 3.0"
    group.found(committed_at(35), False, 3.0, 100.0)
    assert group.settled


def test_a_group_that_its_coordinator_lost_whole_is_one_that_had_committed_offsets() -> None:
    group = FollowedGroup("link", "far-a", 0)
    group.want(("t", 0), CommittedOffset(35, ""), 0.0)
    group.found(committed_at(35), False, 1.0, 100.0)
    group.found({}, False, 2.0, 100.0)
    assert group.had_any
    assert group.missing_from({}) == committed_at(35)


def test_what_a_request_of_unknown_fate_made_of_it_is_no_loss() -> None:
    group = FollowedGroup("link", "far-a", 0)
    group.found(committed_at(35), False, 1.0, 100.0)
    group.in_doubt(2.0, {("t", 0): CommittedOffset(36, "")})
    group.want(("t", 0), CommittedOffset(40, ""), 2.0)
    for kept in (35, 36, 40):
        assert not group.missing_from(committed_at(kept))
    assert group.missing_from(committed_at(30))
    anew = FollowedGroup("link", "far-a", 0)
    anew.goes_on(group)
    assert not anew.missing_from(committed_at(36))
    assert anew.missing_from(committed_at(30))


def test_what_the_source_lost_is_left_and_renewed_until_a_later_commit() -> None:
    group = a_group({A: at(9), B: at(4)})
    group.want(A, at(5), since=0.0, at=20)
    assert group.put_back(20) == {B: at(4)}  # it came to count just there: it is later
    assert group.put_back(21) == {A: at(9), B: at(4)}
    why = Pending(ReasonCode.SOURCE_LOST_COMMITS, "lost")
    group.silence(dict.fromkeys(group.put_back(21), why), "by")
    plan = group.plan({A: 10, B: 10}, {}, RENEWAL_S + 1, {A: 10, B: 10})
    assert (plan.commit, plan.renew, plan.delete) == ({}, {A: at(9), B: at(4)}, set())
    assert group.has_as_wanted(A)  # whoever waits for it need not
    assert (group.idle, group.waiting(1.0).code) == (False, ReasonCode.SOURCE_LOST_COMMITS)
    group.want(A, at(6), since=0.0, at=30)
    assert group.silent_by is None
    assert group.put_back(21) == {B: at(4)}
    group.silence(dict.fromkeys(group.put_back(21), why), "by")
    assert not group.has_as_wanted(A)
    assert group.plan({A: 10, B: 10}, {}, 2.0).commit == {A: at(6)}
