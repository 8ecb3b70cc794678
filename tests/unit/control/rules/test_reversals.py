"""The rules of reversals: the first of handed over and taken back counts, and each cluster's log says who leads."""

from __future__ import annotations

import random
import uuid
from dataclasses import replace
from typing import Any

import pytest
from support.command_log import CommandLog
from support.seeds import seeds

from isthmus_control import commands as c
from isthmus_control.bounds import REVERSAL_HOLD_MS_MAX, REVERSAL_TRANSACTIONS_WAIT_MS_MAX
from isthmus_control.clock import Hlc, Register
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import REVERSALS, level_of
from isthmus_control.model import (
    Grant,
    HeldAt,
    LinkMode,
    LinkSettings,
    NamespaceKey,
    Reason,
    ResourceType,
    ReversalStep,
    Right,
    Role,
    SyncState,
    TopicEnd,
    TopicState,
    leads_commits,
)
from isthmus_control.outcome import Accepted, Rejected, Rejection
from isthmus_control.truncations import PartitionView

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
HERE, GROUPS = NamespaceKey(TOPIC, "a-"), NamespaceKey(GROUP, "ga-")
THERE, GROUPS_THERE = NamespaceKey(TOPIC, "b-"), NamespaceKey(GROUP, "gb-")
LINK_ID = str(uuid.UUID(int=1))
ID, OTHER_ID = str(uuid.UUID(int=2)), str(uuid.UUID(int=3))
OWNER, OTHER = str(uuid.UUID(int=4)), str(uuid.UUID(int=5))
ANNOUNCE = c.AnnounceReversal("l", *HERE, (GROUPS,), ID, OWNER, 1_000, 5_000)
HOLD = c.HoldReversal("l", ID, OWNER)
HAND_OVER = c.HandOver("l", ID, OWNER, (TopicEnd("a-t", (7, 9)),))
TAKE_BACK = c.TakeBack("l", ID)
END = c.EndReversal("l", ID)
ABANDON = c.AbandonReversal("l", ID)
ACCEPT = c.AcceptReversal("l", *THERE, (GROUPS_THERE,), ID, {"b-t": {"retention.ms": "5"}})
LEAD = c.BeginPromotion("l", *THERE, {}, OWNER, (GROUPS_THERE,), reversal=ID)


class Log(CommandLog):
    def refused(self, body: c.Body, code: Rejection, words: str) -> None:
        before = self.state
        outcome = self.do(body)
        assert isinstance(outcome, Rejected), outcome
        assert (outcome.code, words in outcome.message) == (code, True), outcome
        assert (self.state.links, self.state.namespaces) == (before.links, before.namespaces)
        assert self.state.reversals == before.reversals

    def role(self, key: NamespaceKey) -> Role | None:
        mapping = self.state.links["l"].mapping(*key)
        return None if mapping is None else mapping.role

    @property
    def step(self) -> ReversalStep | None:
        reversal = self.state.reversals.get(ID)
        return None if reversal is None else reversal.step

    def writable(self, key: NamespaceKey) -> bool:
        return self.state.lookup.reservation(key.type, key.prefix + "x") is None


def log_of(cluster_id: str, level: int = REVERSALS) -> Log:
    """A leads topics and groups to B."""
    log = Log(cluster_id)
    log.ok(c.RaiseLevel(level))
    at_a = cluster_id == "A"
    log.ok(c.CreateLink("l", LINK_ID, "B" if at_a else "A", at_a, ("b:1",) if at_a else ()))
    pairs = zip((HERE, GROUPS), (THERE, GROUPS_THERE), strict=True)
    for here, there in pairs:
        own, other = (here, there) if at_a else (there, here)
        role = Role.LEADER if at_a else Role.FOLLOWER
        log.ok(c.AttachNamespace("l", *own, other.prefix, role, create_missing=True))
    return log


def at_a(*done: c.Body) -> Log:
    log = log_of("A")
    for body in done:
        log.ok(body)
    return log


def at_b(*done: c.Body) -> Log:
    log = log_of("B")
    log.ok(c.ChangeGrants("l", (Grant(Right.FOLLOW, *THERE), Grant(Right.FOLLOW, *GROUPS_THERE))))
    for body in done:
        log.ok(body)
    return log


def test_one_that_is_handed_over() -> None:
    log = at_a(ANNOUNCE)
    assert (log.step, log.role(HERE), log.writable(HERE)) == (ReversalStep.ANNOUNCED, Role.LEADER, True)
    announced = log.state.lookup.reversing(TOPIC, "a-t")
    assert announced is not None
    assert (announced.keys, announced.holds) == ((HERE, GROUPS), False)
    log.ok(HOLD)
    assert (log.step, log.role(HERE), log.writable(HERE)) == (ReversalStep.HELD, Role.LEADER, False)
    assert not log.writable(GROUPS)
    held = log.state.lookup.reversing(GROUP, "ga-1")
    assert held is not None
    assert held.holds
    since = log.state.namespaces[HERE].reserved_at_offset
    log.ok(HAND_OVER)
    assert (log.step, log.role(HERE), log.role(GROUPS)) == (ReversalStep.HANDED_OVER, Role.FOLLOWER, Role.FOLLOWER)
    assert log.state.lookup.reversing(TOPIC, "a-t") is None
    assert log.state.namespaces[HERE].reserved_at_offset == since, "it is enforced already"
    assert log.state.reversals[ID].ends == HAND_OVER.ends
    log.ok(END)
    assert (log.step, log.role(HERE), log.writable(HERE)) == (None, Role.FOLLOWER, False)
    assert log.ok(END) == ()


@pytest.mark.parametrize("done", [(ANNOUNCE,), (ANNOUNCE, HOLD)], ids=["announced", "held"])
def test_one_that_is_taken_back(done: tuple[c.Body, ...]) -> None:
    log = at_a(*done)
    log.ok(TAKE_BACK)
    assert (log.step, log.role(HERE), log.writable(HERE), log.writable(GROUPS)) == (None, Role.LEADER, True, True)
    for late in (HOLD, HAND_OVER, TAKE_BACK):
        log.refused(late, Rejection.NOT_FOUND, "taken back")
    log.ok(replace(ANNOUNCE, reversal_id=OTHER_ID))
    log.ok(replace(HOLD, reversal_id=OTHER_ID))
    log.refused(HAND_OVER, Rejection.NOT_FOUND, "taken back")


def test_the_first_of_handed_over_and_taken_back_counts() -> None:
    log = at_a(ANNOUNCE, HOLD, HAND_OVER)
    log.refused(TAKE_BACK, Rejection.CONFLICT, "handed over already")
    log.refused(HAND_OVER, Rejection.CONFLICT, "handed over already")
    log.refused(HOLD, Rejection.CONFLICT, "handed over already")
    log.ok(END)
    log.refused(TAKE_BACK, Rejection.NOT_FOUND, "has ended")


def test_only_its_owner_hands_over_and_only_what_is_held() -> None:
    log = at_a(ANNOUNCE)
    log.refused(replace(HOLD, owner=OTHER), Rejection.CONFLICT, "another proxy")
    log.refused(HAND_OVER, Rejection.CONFLICT, "is held before")
    log.refused(END, Rejection.CONFLICT, "not handed over")
    log.refused(ABANDON, Rejection.CONFLICT, "taken back")
    log.ok(HOLD)
    assert log.ok(HOLD) == ()
    log.refused(replace(HAND_OVER, owner=OTHER), Rejection.CONFLICT, "another proxy")
    log.refused(replace(HAND_OVER, ends=(TopicEnd("a-t", (0,) * 10_001),)), Rejection.INVALID, "partitions")


def test_who_abandons_leads_again() -> None:
    log = at_a(ANNOUNCE, HOLD, HAND_OVER)
    log.ok(ABANDON)
    assert (log.step, log.role(HERE), log.role(GROUPS)) == (None, Role.LEADER, Role.LEADER)
    assert (log.writable(HERE), log.writable(GROUPS)) == (True, True)
    assert log.ok(ABANDON) == ()
    log.ok(replace(ANNOUNCE, reversal_id=OTHER_ID))


@pytest.mark.parametrize("state", [TopicState.CREATING, TopicState.FOLLOWING])
def test_nothing_is_abandoned_that_follows_who_leads(state: TopicState) -> None:
    log = at_a(ANNOUNCE, HOLD, HAND_OVER)
    log.ok(c.SetFollowerTopic("l", "a-t", "b-t", LINK_ID, state, LINK_ID))
    log.refused(ABANDON, Rejection.CONFLICT, "which leads")


def test_the_follower_leads_what_it_was_handed() -> None:
    log = at_b(ACCEPT)
    assert (log.step, log.role(THERE), log.writable(THERE)) == (ReversalStep.DRAINED, Role.FOLLOWER, False)
    assert log.ok(ACCEPT) == ()
    log.ok(LEAD)
    assert log.step is None
    for key in (THERE, GROUPS_THERE):
        promotion = log.state.promotions[key]
        assert (promotion.decided, promotion.reversal, promotion.without_source) == (True, ID, False)
    assert log.state.promotions[THERE].settings == ACCEPT.settings
    assert log.ok(LEAD) == ()
    log.refused(c.DecidePromotion(*THERE, OWNER, False), Rejection.CONFLICT, "decided")
    log.refused(ABANDON, Rejection.CONFLICT, "handed over to this cluster")
    for key in (THERE, GROUPS_THERE):
        log.ok(c.DetachNamespace("l", *key, for_peer=True))
    log.ok(c.EndPromotion(*THERE, OWNER))
    assert (log.role(THERE), log.role(GROUPS_THERE)) == (Role.LEADER, Role.LEADER)
    assert (log.writable(THERE), log.writable(GROUPS_THERE)) == (True, True)
    assert not log.state.promotions


def test_who_has_abandoned_it_never_leads_by_it() -> None:
    log = at_b(ACCEPT, ABANDON)
    assert log.role(THERE) is Role.FOLLOWER
    log.refused(LEAD, Rejection.NOT_FOUND, "abandoned")
    log = at_b(ABANDON)
    log.refused(LEAD, Rejection.NOT_FOUND, "abandoned")


def test_another_reversal_takes_the_place_of_one_that_was_taken_back() -> None:
    log = at_b(ACCEPT, replace(ACCEPT, reversal_id=OTHER_ID))
    assert [*log.state.reversals] == [OTHER_ID]
    log.refused(LEAD, Rejection.NOT_FOUND, "abandoned")
    log.refused(replace(LEAD, reversal=OTHER_ID, more=()), Rejection.NOT_FOUND, "no reversal")
    log.ok(replace(LEAD, reversal=OTHER_ID))


def test_one_that_was_taken_back_takes_no_later_ones_place_however_late_it_comes() -> None:
    at = at_a(ANNOUNCE, HOLD)
    first = at.state.reversals[ID].held_at
    for body in (TAKE_BACK, replace(ANNOUNCE, reversal_id=OTHER_ID), replace(HOLD, reversal_id=OTHER_ID)):
        at.ok(body)
    then = at.state.reversals[OTHER_ID].held_at
    assert first is not None
    assert then is not None
    late, later = replace(ACCEPT, held_at=first), replace(ACCEPT, reversal_id=OTHER_ID, held_at=then)
    log = at_b(late, later)
    log.refused(late, Rejection.CONFLICT, "a later reversal")
    log.refused(replace(late, type=GROUP, prefix="gb-", more=()), Rejection.CONFLICT, "a later reversal")
    assert log.ok(later) == ()
    log.ok(replace(LEAD, reversal=OTHER_ID))


def test_a_log_that_counts_from_less_after_a_loss_is_a_later_one() -> None:
    last, accepted = HeldAt(0, 500), at_a(c.AcceptLog(1), ANNOUNCE, HOLD).state.reversals[ID].held_at
    assert accepted is not None
    assert (accepted.generation, accepted.offset < last.offset) == (1, True)
    later = replace(ACCEPT, reversal_id=OTHER_ID, held_at=accepted)
    log = at_b(replace(ACCEPT, held_at=last), later)
    assert [*log.state.reversals] == [OTHER_ID]


def test_who_does_not_say_where_it_is_held_is_taken_for_the_last_one() -> None:
    older, newer = replace(ACCEPT, reversal_id=OTHER_ID), replace(ACCEPT, held_at=HeldAt(0, 7))
    for bodies in ((older, newer), (newer, older)):
        assert [*at_b(*bodies).state.reversals] == [bodies[-1].reversal_id]


def test_a_failover_or_detaching_ends_what_it_was_drained_for() -> None:
    log = at_b(ACCEPT, replace(LEAD, reversal="", without_source=True))
    assert not log.state.reversals
    log.refused(LEAD, Rejection.CONFLICT, "not handed over")
    log = at_b(ACCEPT, c.DetachNamespace("l", *THERE))
    assert not log.state.reversals
    log = at_b(ACCEPT, c.DeleteLink("l"))
    assert not log.state.reversals


def test_nothing_is_led_that_is_being_cut() -> None:
    log = at_b(c.SetFollowerTopic("l", "b-t", "a-t", LINK_ID, TopicState.FOLLOWING, LINK_ID))
    cut = c.BeginTruncation("l", "b-t", LINK_ID, Reason("CODE", "why"), (PartitionView(1, 0),), None, "p", OWNER)
    log.ok(ACCEPT)
    log.ok(cut)
    assert not log.state.reversals
    log.refused(LEAD, Rejection.CONFLICT, "being truncated")
    log.refused(ACCEPT, Rejection.CONFLICT, "being truncated")


def test_it_leads_without_the_link_where_that_is_gone() -> None:
    log = at_b(ACCEPT, LEAD, c.DeleteLink("l"))
    log.ok(c.EndPromotion(*THERE, OWNER))
    assert (log.writable(THERE), log.writable(GROUPS_THERE)) == (True, True)


def test_the_other_cluster_leads_by_what_it_was_granted() -> None:
    log = log_of("B")
    log.refused(ACCEPT, Rejection.NOT_GRANTED, "follow:b-")
    log.ok(c.ChangeGrants("l", (Grant(Right.FOLLOW, *THERE), Grant(Right.FOLLOW, *GROUPS_THERE))))
    log.ok(ACCEPT)
    log.ok(c.ChangeGrants("l", (), (Grant(Right.FOLLOW, *THERE),)))
    log.ok(LEAD)
    for key in (THERE, GROUPS_THERE):
        log.ok(c.DetachNamespace("l", *key, for_peer=True))
    log.ok(c.EndPromotion(*THERE, OWNER))
    assert log.role(THERE) is Role.LEADER, "what is revoked is what comes"


def test_grants_that_came_with_the_pair_last_there_and_back() -> None:
    log = at_a(ANNOUNCE, HOLD, HAND_OVER, END)
    back = c.AcceptReversal("l", *HERE, (GROUPS,), OTHER_ID, {})
    log.ok(back)
    log.ok(c.DetachNamespace("l", *HERE))
    kept = {each.prefix for each in log.state.links["l"].grants}
    assert kept == {GROUPS.prefix}, "who detaches takes back what came with the pair, in either role"


def test_what_may_not_be_done_meanwhile() -> None:
    for log in (at_a(ANNOUNCE), at_a(ANNOUNCE, HOLD)):
        log.refused(c.DetachNamespace("l", *HERE), Rejection.CONFLICT, "being reversed")
        log.refused(c.DetachNamespace("l", *HERE, for_peer=True), Rejection.CONFLICT, "being reversed")
        log.refused(c.DeleteLink("l"), Rejection.CONFLICT, "being reversed")
        for reserved in (True, False):
            log.refused(c.AlterNamespace(*HERE, reserved), Rejection.CONFLICT, "being reversed")
        recovers = c.AttachNamespace("l", *HERE, "b-", Role.FOLLOWER, recovers=True)
        log.refused(recovers, Rejection.CONFLICT, "being reversed")
        log.refused(replace(ANNOUNCE, reversal_id=OTHER_ID), Rejection.CONFLICT, "being reversed already")
        log.refused(replace(ACCEPT, type=TOPIC, prefix="a-", more=()), Rejection.CONFLICT, "another reversal")
    assert at_a(ANNOUNCE).ok(ANNOUNCE) == ()
    log = at_a(ANNOUNCE, HOLD, HAND_OVER, c.DetachNamespace("l", *HERE))
    assert not log.state.reversals
    assert not log.writable(HERE)


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (replace(ANNOUNCE, reversal_id="x"), Rejection.INVALID, "UUID"),
        (replace(ANNOUNCE, owner="x"), Rejection.INVALID, "UUID"),
        (replace(ANNOUNCE, hold_ms=0), Rejection.INVALID, "held"),
        (replace(ANNOUNCE, hold_ms=REVERSAL_HOLD_MS_MAX + 1), Rejection.INVALID, "held"),
        (replace(ANNOUNCE, transactions_wait_ms=-1), Rejection.INVALID, "waited for"),
        (
            replace(ANNOUNCE, transactions_wait_ms=REVERSAL_TRANSACTIONS_WAIT_MS_MAX + 1),
            Rejection.INVALID,
            "waited for",
        ),
        (replace(ANNOUNCE, link="m"), Rejection.NOT_FOUND, "no link"),
        (replace(ANNOUNCE, prefix="c-"), Rejection.NOT_FOUND, "not led"),
        (replace(ANNOUNCE, type=ResourceType.PRINCIPAL, prefix="User:a"), Rejection.INVALID, "topics and groups"),
        (HOLD, Rejection.NOT_FOUND, "no reversal"),
        (ACCEPT, Rejection.NOT_FOUND, "does not follow"),
        (replace(ACCEPT, reversal_id="x"), Rejection.INVALID, "UUID"),
    ],
)
def test_what_is_refused(body: c.Body, code: Rejection, words: str) -> None:
    at_a().refused(body, code, words)


def test_what_is_reserved_or_could_not_follow_is_refused_before_anything_is_announced() -> None:
    log = at_a(c.AlterNamespace(*HERE, True))
    log.refused(ANNOUNCE, Rejection.CONFLICT, "reserved")
    log = at_a(c.CreateLink("m", OTHER_ID, "C", True, ("c:1",)))
    log.ok(c.AttachNamespace("m", TOPIC, "a-eu-", "c-", Role.FOLLOWER, create_missing=True))
    log.refused(ANNOUNCE, Rejection.CONFLICT, "follows one link at most")


def test_one_that_follows_elsewhere_meanwhile_is_not_handed_over() -> None:
    log = at_a(c.CreateLink("m", OTHER_ID, "C", True, ("c:1",)), ANNOUNCE, HOLD)
    log.ok(c.AttachNamespace("m", TOPIC, "a-eu-", "c-", Role.FOLLOWER, create_missing=True))
    log.refused(HAND_OVER, Rejection.CONFLICT, "follows one link at most")
    log.ok(TAKE_BACK)
    assert log.writable(HERE)


def test_what_a_third_cluster_follows_is_pushed_on() -> None:
    log = at_a(c.CreateLink("m", OTHER_ID, "C", True, ("c:1",)))
    log.ok(c.AttachNamespace("m", *HERE, "c-", Role.LEADER))
    for body in (ANNOUNCE, HOLD, HAND_OVER):
        log.ok(body)
    assert [link.name for link, mapping in log.state.attachments(HERE) if mapping.role is Role.LEADER] == ["m"]


def test_it_needs_its_level() -> None:
    log = log_of("A", REVERSALS - 1)
    log.refused(ANNOUNCE, Rejection.NOT_SUPPORTED, f"feature level {REVERSALS}")
    bodies = (ANNOUNCE, HOLD, HAND_OVER, TAKE_BACK, END, ABANDON, ACCEPT, LEAD)
    assert {level_of(each) for each in bodies} == {REVERSALS}
    assert level_of(replace(LEAD, reversal="")) == 0


def synchronous(log: Log) -> Log:
    log.ok(c.AlterLink("l", LinkMode.SYNCHRONOUS))
    return log


def test_what_a_synchronous_link_leads_besides_stays_in_sync() -> None:
    log = synchronous(at_a())
    log.ok(c.AttachNamespace("l", TOPIC, "more-", "more-", Role.LEADER, create_missing=True))
    topic_id = str(uuid.UUID(int=9))
    for topic in ("a-t", "more-t"):
        log.ok(c.RecordSync("l", LINK_ID, SyncState.IN_SYNC, (c.PartitionSync(topic, topic_id, 0, 5),)))
    for body in (replace(ANNOUNCE, more=()), HOLD, HAND_OVER):
        log.ok(body)
    assert log.role(HERE) is Role.FOLLOWER
    assert list(log.state.sync_records["l"]) == [("more-t", 0)]
    assert log.state.links["l"].mode is LinkMode.SYNCHRONOUS


def test_it_is_synchronous_the_other_way_after_it() -> None:
    a, b = synchronous(at_a()), at_b()
    mode = a.state.links["l"].settings.mode
    b.ok(c.MergeLink("l", LINK_ID, a.state.links["l"].settings))
    for body in (ANNOUNCE, HOLD, HAND_OVER):
        a.ok(body)
    for body in (ACCEPT, LEAD, *(c.DetachNamespace("l", *key, for_peer=True) for key in (THERE, GROUPS_THERE))):
        b.ok(body)
    b.ok(c.EndPromotion(*THERE, OWNER))
    assert (b.role(THERE), leads_commits(b.state.links["l"])) == (Role.LEADER, True)
    assert a.state.links["l"].settings.mode == b.state.links["l"].settings.mode == mode


def test_the_state_survives_a_snapshot() -> None:
    held = (ANNOUNCE, HOLD)
    for log in (at_a(ANNOUNCE), at_a(*held), at_a(*held, HAND_OVER), at_b(ACCEPT), at_b(ACCEPT, LEAD)):
        again = from_json(ControlState, parse(canonical(log.state)))
        assert again == log.state
        assert (again.lookup.reversing(*HERE) is None) == (log.state.lookup.reversing(*HERE) is None)


@pytest.mark.parametrize("seed", seeds(300))
def test_never_two_lead_whatever_is_recorded_when(seed: int) -> None:
    """All commands of two reversals, in any order, late and twice; B leads only by what A's log said in its time."""
    rng = random.Random(seed)
    a, b = at_a(), at_b()
    ids: list[str] = []
    handed: set[str] = set()
    for _ in range(80):
        choice = rng.randrange(10)
        if choice == 0 or not ids:
            ids.append(str(uuid.UUID(int=100 + len(ids))))
            a.do(replace(ANNOUNCE, reversal_id=ids[-1]))
        each = rng.choice(ids[-3:])
        if choice < 5:
            body: Any = (ANNOUNCE, HOLD, HAND_OVER, TAKE_BACK, END)[choice]
            if body is not ANNOUNCE and (body is not END or b.role(THERE) is Role.LEADER):
                outcome = a.do(replace(body, reversal_id=each))
                if body is HAND_OVER and isinstance(outcome, Accepted):
                    handed.add(each)
        elif choice < 7 and each not in handed:  # it is asked for before, and a late one is of no use
            b.do(replace(ACCEPT, reversal_id=each))
        elif choice < 7:  # heard once, carried out any time later
            b.do(replace(LEAD, reversal=each))
        elif choice == 7:  # an operator abandons it: B says first that it will not lead
            said = b.do(replace(ABANDON, reversal_id=each))
            if isinstance(said, Accepted) and b.role(THERE) is Role.FOLLOWER and THERE not in b.state.promotions:
                a.do(replace(ABANDON, reversal_id=each))
        else:
            for key in (THERE, GROUPS_THERE):
                if key in b.state.promotions and b.role(key) is Role.FOLLOWER:
                    b.ok(c.DetachNamespace("l", *key, for_peer=True))
            if THERE in b.state.promotions:
                b.ok(c.EndPromotion(*THERE, OWNER))
        may_write = [a.writable(HERE), b.writable(THERE) or THERE in b.state.promotions]
        assert may_write.count(True) <= 1, (seed, a.state.reversals, b.state.reversals)


def test_a_write_of_the_mode_that_is_later_wins() -> None:
    """An operator's own word at the other side, which was not heard before it was handed over."""
    a = synchronous(at_a())
    later = Register(LinkMode.ASYNCHRONOUS, Hlc(9_000, 0, "B"))
    for body in (ANNOUNCE, HOLD, HAND_OVER):
        a.ok(body)
    a.ok(c.MergeLink("l", LINK_ID, LinkSettings(later, {}, {})))
    assert a.state.links["l"].mode is LinkMode.ASYNCHRONOUS
