"""The rules of truncations: every edge of the phases, who may go along it, and what is left in the end."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import replace
from typing import Any

import pytest

from isthmus_control import commands as c
from isthmus_control.apply import apply
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import CAUGHT_UP_CUTS
from isthmus_control.model import AgreedCut, BrokerClaim, Reason, ResourceType, Role, TopicState
from isthmus_control.outcome import Accepted, Outcome, Rejected, Rejection
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import (
    CANCELLABLE,
    PAST_TRUNCATIONS_MAX,
    TRUNCATION_TRANSITIONS,
    WITHHELD,
    MovedOffset,
    PartitionCut,
    PartitionView,
    SalvageFile,
    Succession,
    Truncation,
    TruncationPhase,
    succession,
)

TOPIC = ResourceType.TOPIC
P = TruncationPhase
WHY = Reason("TARGET_WRITTEN_BY_OTHERS", "somebody wrote")
CUTS = (PartitionCut(0, 10, 100, 105), PartitionCut(1, 0, 50, 50))
SAFE = (SalvageFile(0, "p", "/salvage/x", 5),)
WAY = (P.COMPARING, P.SALVAGING, P.SPOOLING, P.RECREATING, P.REFILLING, P.RESTORING, P.CLEANING, P.DONE)


class Log:
    """A control log in which ``in-t`` follows ``out-t`` with two partitions, and proxy ``p`` has a lease."""

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        self.state = ControlState("A")
        self.source_id, self.topic_id, self.owner = self.uid(), self.uid(), self.uid()
        self.ok(c.CreateLink("b", self.uid(), "B", True, ("b:1",)))
        self.ok(c.AttachNamespace("b", TOPIC, "in-", "out-", Role.FOLLOWER, create_missing=True))
        self.ok(c.SetFollowerTopic("b", "in-t", "out-t", self.source_id, TopicState.FOLLOWING, self.topic_id))
        self.ok(c.OpenProvenance("b", tuple(c.PartitionOffset("in-t", self.topic_id, p, 0) for p in range(2))))
        self.lease("p", self.owner)

    def uid(self) -> str:
        return str(uuid.UUID(int=next(self.ids), version=4))

    def do(self, body: c.Body) -> Outcome:
        offset = self.state.applied_offset + 1
        command = c.Command(self.uid(), 1000 + offset, "p", self.state.applied_offset, body)
        assert c.decode(c.encode(command)) == command
        self.state, outcome = apply(self.state, offset, command)
        return outcome

    def at_offset(self, partition: int, offset: int) -> c.PartitionOffset:
        return c.PartitionOffset("in-t", self.topic_id, partition, offset)

    def ok(self, body: c.Body) -> tuple[Any, ...]:
        outcome = self.do(body)
        assert isinstance(outcome, Accepted), outcome
        return outcome.changes

    def refused(self, body: c.Body, code: Rejection, *words: str) -> None:
        outcome = self.do(body)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.code is code, outcome
        assert all(word in outcome.message for word in words), outcome

    def lease(self, name: str, incarnation: str, broker: int = 1) -> None:
        claim = BrokerClaim(broker, "h", broker)
        self.ok(c.ClaimBrokers(name, incarnation, (claim,), False, None, 10_000, "1", self.state.applied_offset))

    @property
    def truncation(self) -> Truncation:
        return self.state.truncations["in-t"]

    def begin(self, **more: Any) -> c.BeginTruncation:
        views = (PartitionView(1, 5), PartitionView(1, 6))
        return replace(c.BeginTruncation("b", "in-t", self.topic_id, WHY, views, "5000", "p", self.owner), **more)

    def advance(self, phase: TruncationPhase, **more: Any) -> c.AdvanceTruncation:
        return c.AdvanceTruncation("in-t", self.topic_id, more.pop("owner", self.owner), phase, **more)

    def needed(self, phase: TruncationPhase) -> dict[str, Any]:
        """What a step to the phase brings along."""
        return {
            P.SALVAGING: {"cuts": CUTS},
            P.SPOOLING: {"salvaged": SAFE},
            P.RECREATING: {"attempt": "1"},
            P.REFILLING: {"new_topic_id": self.uid()},
            P.CLEANING: {"moved": (MovedOffset("g", 0, 104, 100),), "moved_count": 1},
        }.get(phase, {})

    def at(self, phase: TruncationPhase) -> Log:
        """Go there on the straight way."""
        self.ok(self.begin())
        way = (*WAY[1:5], P.CATCHING_UP) if phase is P.CATCHING_UP else (phase,)
        for step in WAY[1 : WAY.index(phase) + 1] if phase in WAY else way:
            self.ok(self.advance(step, **self.needed(step)))
        return self


def test_begins_for_a_topic_that_follows_and_once() -> None:
    log = Log()
    log.refused(log.begin(link="c"), Rejection.CONFLICT, "does not follow")
    log.refused(log.begin(topic="in-u"), Rejection.CONFLICT, "does not follow")
    log.refused(log.begin(topic_id=log.uid()), Rejection.CONFLICT, "does not follow")
    log.refused(log.begin(partitions=()), Rejection.INVALID, "no partitions")
    log.refused(log.begin(owner="me"), Rejection.INVALID, "UUID")
    (change,) = log.ok(log.begin())
    assert (change.before, change.after.phase, change.after.records) == (None, P.COMPARING, 0)
    log.refused(log.begin(), Rejection.ALREADY_EXISTS)


@pytest.mark.parametrize("start", [phase for phase in P if phase is not P.DONE])
@pytest.mark.parametrize("end", list(P))
def test_every_edge(start: TruncationPhase, end: TruncationPhase) -> None:
    log = Log().at(start)
    step = log.advance(end, **log.needed(end))
    if end in TRUNCATION_TRANSITIONS[start]:
        log.ok(step)
        now = log.state.past_truncations[-1] if end is P.DONE else log.truncation
        assert now.phase is end
        assert ("in-t" in log.state.truncations) is (end is not P.DONE)
    else:
        log.refused(step, Rejection.CONFLICT, str(start), str(end))
        assert log.truncation.phase is start


def test_steps_need_what_the_next_phase_works_on() -> None:
    log = Log().at(P.COMPARING)
    log.refused(log.advance(P.SALVAGING), Rejection.INVALID, "one cut for each")
    log.refused(log.advance(P.SALVAGING, cuts=CUTS[:1]), Rejection.INVALID, "one cut for each")
    nothing = tuple(replace(cut, offset=cut.log_end) for cut in CUTS)
    log.refused(log.advance(P.SALVAGING, cuts=nothing), Rejection.INVALID, "nothing to cut")
    outside = (replace(CUTS[0], offset=9), CUTS[1])
    log.refused(log.advance(P.SALVAGING, cuts=outside), Rejection.INVALID, "outside")
    log.ok(log.advance(P.SALVAGING, cuts=CUTS))
    assert (log.truncation.records, log.truncation.cut(1), log.truncation.cut(2)) == (5, CUTS[1], None)
    log.refused(log.advance(P.SPOOLING), Rejection.INVALID, "not salvaged")
    log.ok(log.advance(P.SPOOLING, salvaged=SAFE))
    assert (log.truncation.salvage_file(0), log.truncation.salvage_file(1)) == (SAFE[0], None)
    log.ok(log.advance(P.RECREATING))
    log.refused(log.advance(P.REFILLING), Rejection.INVALID, "new id")
    log.refused(log.advance(P.REFILLING, new_topic_id=log.topic_id), Rejection.INVALID, "new id")


def test_in_the_end_the_topic_follows_under_its_new_id_with_what_is_left_of_its_provenance() -> None:
    log = Log()
    epochs = tuple(
        c.PartitionEpoch("in-t", log.topic_id, p, epoch, start)
        for p, epoch, start in ((0, 0, 0), (0, 2, 80), (0, 3, 100), (1, 0, 0))
    )
    log.ok(c.RecordSourceEpochs(epochs))
    log.at(P.CLEANING)
    new_id = log.truncation.new_topic_id
    truncated, topic, provenance = log.ok(log.advance(P.DONE))
    assert (truncated.after.phase, truncated.after.moved_count) == (P.DONE, 1)
    assert (topic.after.topic_id, topic.after.state) == (new_id, TopicState.FOLLOWING)
    assert (provenance.topic_id, provenance.partitions) == (new_id, (0, 1))
    assert [(each.epoch, each.start_offset) for each in log.state.source_epochs("in-t", 0)] == [(0, 0), (2, 80)]
    assert [(each.epoch, each.start_offset) for each in log.state.source_epochs("in-t", 1)] == [(0, 0)]
    assert log.state.truncations == {}
    shift = log.state.epoch_shifts["in-t"]
    assert (shift.topic_id, shift.by) == (new_id, 1007)  # above what clients were told meanwhile
    # It goes on, and may be truncated again.
    log.ok(c.RecordSourceEpochs((c.PartitionEpoch("in-t", new_id or "", 0, 5, 100),)))
    log.topic_id = new_id or ""
    log.ok(log.begin())
    assert log.truncation.shown_epoch(0) == 5 + 1007 + 1000


def test_deletions_are_not_doubted_any_more_where_the_logs_were_compared_or_the_topic_is_another() -> None:
    log = Log()
    doubt = c.DoubtDeletions((log.at_offset(0, 90), log.at_offset(1, 91)))
    log.ok(doubt)
    log.ok(log.begin())
    log.ok(log.advance(P.CANCELLING))  # it was not compared
    log.ok(log.advance(P.DONE))
    assert dict(log.state.follower_topics["in-t"].doubted) == {0: 90, 1: 91}
    log.ok(log.begin())
    log.ok(log.advance(P.CANCELLING, cuts=tuple(replace(cut, offset=90, log_end=90) for cut in CUTS)))
    log.ok(log.advance(P.DONE))
    assert dict(log.state.follower_topics["in-t"].doubted) == {1: 91}
    log.ok(doubt)
    log.at(P.CLEANING)
    log.ok(log.advance(P.DONE))
    assert dict(log.state.follower_topics["in-t"].doubted) == {}


def successor(log: Log, *offsets: int, former: str | None = None) -> Succession:
    return Succession(former or log.source_id, log.uid(), offsets)


def epochs(log: Log, topic_id: str, *entries: tuple[int, int, int]) -> None:
    log.ok(c.RecordSourceEpochs(tuple(c.PartitionEpoch("in-t", topic_id, *entry) for entry in entries)))


def test_what_succeeded_the_source_is_followed_in_the_end() -> None:
    log = Log()
    source = successor(log, 100, 60)
    log.refused(log.begin(source=replace(source, former=log.uid())), Rejection.CONFLICT, "not what")
    log.refused(log.begin(source=replace(source, successor="it")), Rejection.CONFLICT, "not what")
    log.refused(log.begin(source=replace(source, offsets=(100,))), Rejection.INVALID, "one offset for each")
    log.refused(log.begin(source=replace(source, offsets=(100, -1))), Rejection.INVALID, "one offset for each")
    epochs(log, log.topic_id, (0, 7, 0), (0, 8, 100), (1, 7, 0))
    log.ok(log.begin(source=source))
    for step in WAY[1:]:
        log.ok(log.advance(step, **log.needed(step)))
    record = log.state.follower_topics["in-t"]
    new_id = log.state.past_truncations[-1].new_topic_id or ""
    assert (record.source_topic_id, record.topic_id) == (source.successor, new_id)
    for partition, cut in ((0, 100), (1, 50)):
        ranges = log.state.provenance("in-t", partition)
        assert [(each.source_topic_id, each.start_offset, each.end_offset) for each in ranges] == [
            (log.source_id, 0, cut),
            (source.successor, cut, None),
        ]
        assert [each.epoch for each in ranges[0].epochs] == [7]
    # Its epochs begin again.
    assert log.state.source_epochs("in-t", 0) == ()
    epochs(log, new_id, (0, 0, 100))


@pytest.mark.parametrize("level", [CAUGHT_UP_CUTS - 1, CAUGHT_UP_CUTS])
def test_a_topic_is_not_to_be_cut_any_more_where_its_source_has_got_the_rest(level: int) -> None:
    log = Log()
    log.state = log.state.evolve(level=level)
    agreed = (AgreedCut(log.topic_id, "token"), AgreedCut(log.uid(), "another topic's"))
    link = log.state.links["b"]
    (mapping,) = link.mappings
    agreeing = replace(link, mappings=(replace(mapping, cuts=agreed),))
    log.state = log.state.evolve(links={"b": agreeing})
    log.ok(log.begin(reason=Reason(ReasonCode.CUT_AGREED, "an operator")))
    nothing = tuple(replace(cut, offset=cut.log_end) for cut in CUTS)
    log.ok(log.advance(P.CANCELLING, cuts=nothing))
    log.ok(log.advance(P.DONE))
    assert log.state.follower_topics["in-t"].topic_id == log.topic_id
    left = log.state.links["b"].mappings[0].cuts
    assert left == (agreed[1:] if level == CAUGHT_UP_CUTS else agreed)


def test_a_source_is_succeeded_where_nothing_had_to_be_cut_too() -> None:
    log = Log()
    source = successor(log, 100, 60)
    epochs(log, log.topic_id, (0, 7, 0))
    log.ok(log.begin(source=source))
    equal = tuple(replace(cut, offset=90, log_end=90) for cut in CUTS)
    log.refused(log.advance(P.CANCELLING, cuts=equal[:1]), Rejection.INVALID, "one cut for each")
    log.ok(log.advance(P.CANCELLING, cuts=equal))
    log.ok(log.advance(P.DONE))
    record = log.state.follower_topics["in-t"]
    assert (record.source_topic_id, record.topic_id) == (source.successor, log.topic_id)
    assert log.state.successions == {}
    assert [each.end_offset for each in log.state.provenance("in-t", 0)] == [90, None]
    assert log.state.source_epochs("in-t", 0) == ()


@pytest.mark.parametrize("step", [P.COMPARING, P.SALVAGING])
def test_a_truncation_that_is_given_up_changes_no_source(step: TruncationPhase) -> None:
    log = Log()
    log.ok(log.begin(source=successor(log, 100, 60)))
    if step is P.SALVAGING:
        log.ok(log.advance(P.SALVAGING, cuts=CUTS))
        log.ok(log.advance(P.COMPARING))
    log.ok(log.advance(P.CANCELLING))
    log.ok(log.advance(P.DONE))
    assert log.state.follower_topics["in-t"].source_topic_id == log.source_id
    assert [each.end_offset for each in log.state.provenance("in-t", 0)] == [None]


def test_successors_are_known_as_long_as_the_topic_is() -> None:
    log = Log()
    ids = [log.topic_id]
    for offset in (100, 90):
        cuts = tuple(replace(cut, offset=min(cut.offset, offset)) for cut in CUTS)
        log.ok(log.begin())
        for step in WAY[1:]:
            log.ok(log.advance(step, **{**log.needed(step), **({"cuts": cuts} if step is P.SALVAGING else {})}))
        ids.append(log.state.past_truncations[-1].new_topic_id or "")
        log.topic_id = ids[-1]
    chain = log.state.predecessors("in-t", ids[2])
    assert [(each.former, each.successor) for each in chain] == [(ids[0], ids[1]), (ids[1], ids[2])]
    assert succession(chain, ids[0], ids[2]) == Succession(ids[0], ids[2], (90, 50))
    assert succession(chain, ids[1], ids[2]) == Succession(ids[1], ids[2], (90, 50))
    assert succession(chain, ids[0], ids[1]) is None
    assert succession(chain[:1], ids[0], ids[2]) is None
    assert succession(chain[1:], ids[0], ids[2]) is None
    assert log.state.predecessors("in-t", log.uid()) == ()
    assert from_json(ControlState, parse(canonical(log.state))) == log.state


def test_a_topic_whose_spool_is_lost_follows_its_source_from_the_start() -> None:
    log = Log()
    epochs(log, log.topic_id, (0, 7, 0), (1, 7, 0))
    give_up = c.GiveUpTruncation("in-t", log.topic_id)
    source = successor(log, 100, 60)
    log.ok(log.begin(source=source))
    for step in WAY[1:5]:
        log.ok(log.advance(step, **log.needed(step)))
    log.refused(give_up, Rejection.CONFLICT, "nothing to give up")
    assert not log.truncation.follows
    log.ok(log.advance(P.CATCHING_UP))
    assert log.truncation.follows
    record, new_id = log.state.follower_topics["in-t"], log.truncation.new_topic_id or ""
    assert (record.topic_id, record.source_topic_id) == (new_id, source.successor)
    assert [(each.start_offset, each.end_offset) for each in log.state.provenance("in-t", 1)] == [(0, None)]
    epochs(log, new_id, (0, 0, 0))
    log.ok(give_up)
    assert log.truncation.given_up
    log.ok(log.advance(P.RESTORING))
    log.ok(log.advance(P.CLEANING, positions_lost=True))
    log.ok(log.advance(P.DONE))
    assert log.state.past_truncations[-1].positions_lost
    assert log.state.follower_topics["in-t"].topic_id == new_id
    assert [each.epoch for each in log.state.source_epochs("in-t", 0)] == [0]
    assert log.state.predecessors("in-t", new_id)
    log.refused(give_up, Rejection.NOT_FOUND, "not being truncated")


def test_any_proxy_says_that_a_topic_cannot_catch_up() -> None:
    log = Log().at(P.CATCHING_UP)
    stop = c.StopCatchingUp("in-t", log.topic_id, log.truncation.new_topic_id or "", WHY)
    log.refused(replace(stop, new_topic_id=log.uid()), Rejection.CONFLICT, "does not catch up")
    (change,) = log.ok(stop)
    assert change.after.stuck == WHY
    assert log.ok(stop) == ()
    log.ok(log.advance(P.RESTORING))
    assert log.truncation.stuck is None
    log.refused(stop, Rejection.CONFLICT, "does not catch up")


def test_refills_in_vain_are_counted() -> None:
    log = Log().at(P.REFILLING)
    for number in (1, 2):
        log.ok(log.advance(P.RECREATING, refill_failure=f"failure {number}"))
        log.ok(log.advance(P.REFILLING, new_topic_id=log.uid()))
    assert (log.truncation.refills_failed, log.truncation.refill_failure) == (2, "failure 2")
    assert "refilled 2 times in vain" in log.truncation.describe()


def test_what_was_given_up_is_what_a_topic_lacked_that_is_still_there() -> None:
    log = Log().at(P.CATCHING_UP)
    log.ok(c.GiveUpTruncation("in-t", log.topic_id))
    log.ok(log.advance(P.RECREATING))
    log.ok(log.advance(P.REFILLING, new_topic_id=log.uid()))
    log.ok(log.advance(P.CATCHING_UP))
    assert not log.truncation.given_up


def test_only_the_owner_goes_on_and_only_while_nobody_took_over() -> None:
    log = Log().at(P.SALVAGING)
    other = log.uid()
    log.refused(log.advance(P.SPOOLING, owner=other, salvaged=SAFE), Rejection.LEASE_LOST, "'p'")
    log.refused(c.HoldUpTruncation("in-t", log.topic_id, other, WHY), Rejection.LEASE_LOST)
    take = c.TakeOverTruncation("in-t", log.topic_id, "q", other)
    log.refused(take, Rejection.CONFLICT, "lease may still run")
    log.lease("p", other)  # a new process of the same name: the old one may still run
    log.refused(take, Rejection.CONFLICT, "lease may still run")
    log.ok(c.ReleaseLease("p", log.owner))
    log.ok(take)
    assert (log.truncation.proxy, log.truncation.owner, log.truncation.phase) == ("q", other, P.SALVAGING)
    assert log.ok(take) == ()
    log.refused(log.advance(P.SPOOLING, salvaged=SAFE), Rejection.LEASE_LOST, "'q'")
    log.ok(log.advance(P.SPOOLING, owner=other, salvaged=SAFE))
    log.refused(replace(take, topic_id=log.uid()), Rejection.NOT_FOUND)


def test_what_holds_it_up_is_shown_until_it_goes_on() -> None:
    log = Log().at(P.SALVAGING)
    trouble = Reason("SALVAGE_FAILED", "the disk is full")
    (change,) = log.ok(c.HoldUpTruncation("in-t", log.topic_id, log.owner, trouble))
    assert change.after.trouble == trouble
    assert log.ok(c.HoldUpTruncation("in-t", log.topic_id, log.owner, trouble)) == ()
    log.ok(log.advance(P.SPOOLING, salvaged=SAFE))
    assert log.truncation.trouble is None


def test_detaching_cancels_a_truncation_while_the_old_topic_is_whole_and_waits_for_one_after_that() -> None:
    detach = c.DetachNamespace("b", TOPIC, "in-")
    for phase in (phase for phase in WAY if phase is not P.DONE):
        log = Log().at(phase)
        if phase in CANCELLABLE:
            log.ok(detach)
            assert (log.truncation.phase, log.truncation.reason.code) == (P.CANCELLING, "STOPPED_BY_OPERATOR")
            log.ok(log.advance(P.DONE))
            assert log.state.follower_topics["in-t"].topic_id == log.topic_id
        else:
            log.refused(detach, Rejection.CONFLICT, "wait")
            log.refused(c.DeleteLink("b"), Rejection.CONFLICT, "wait")


def test_nobody_changes_the_record_of_a_topic_that_is_truncated() -> None:
    log = Log().at(P.RECREATING)
    made = c.SetFollowerTopic("b", "in-t", "out-t", log.source_id, TopicState.FOLLOWING, log.uid())
    log.refused(made, Rejection.CONFLICT, "truncated")
    log.refused(c.ForgetFollowerTopic("b", "in-t"), Rejection.CONFLICT, "truncated")


def test_clients_wait_while_the_topic_is_not_whole() -> None:
    assert {P.SPOOLING, P.RECREATING, P.REFILLING, P.CATCHING_UP, P.RESTORING, P.CLEANING} == WITHHELD
    assert CANCELLABLE.isdisjoint(WITHHELD - {P.SPOOLING})
    assert TRUNCATION_TRANSITIONS.keys() == set(P)


def test_the_last_ones_are_kept_and_the_state_goes_through_a_snapshot() -> None:
    log = Log()
    for _ in range(PAST_TRUNCATIONS_MAX + 2):
        log.at(P.CANCELLING)
        log.ok(log.advance(P.DONE))
    assert len(log.state.past_truncations) == PAST_TRUNCATIONS_MAX
    log.at(P.RESTORING)
    assert from_json(ControlState, parse(canonical(log.state))) == log.state
