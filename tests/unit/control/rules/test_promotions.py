"""The rules of promotions: recorded first, carried on by whoever is left, and the reservation cleared last."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest

from isthmus_control import commands as c
from isthmus_control.apply import apply
from isthmus_control.control_state import ControlState
from isthmus_control.model import BrokerClaim, NamespaceKey, ResourceType, Role, TopicState
from isthmus_control.outcome import Accepted, Rejected, Rejection

TOPIC = ResourceType.TOPIC
KEY = NamespaceKey(TOPIC, "in-")


def uid() -> str:
    return str(uuid.uuid4())


class Log:
    """A log in which ``in-`` follows over link ``b``, and two proxies have leases."""

    def __init__(self) -> None:
        self.state = ControlState("A")
        self.ours, self.other = uid(), uid()
        self.ok(c.CreateLink("b", uid(), "B", True, ("b:1",)))
        self.ok(c.AttachNamespace("b", TOPIC, "in-", "out-", Role.FOLLOWER, create_missing=True))
        self.ok(self.claim("ours", self.ours, 1))
        self.ok(self.claim("other", self.other, 2))
        self.begin = c.BeginPromotion("b", TOPIC, "in-", {"in-t": {"retention.ms": "5"}}, self.ours)
        self.end = c.EndPromotion(TOPIC, "in-", self.ours)

    def claim(self, name: str, incarnation: str, broker: int) -> c.ClaimBrokers:
        return c.ClaimBrokers(name, incarnation, (BrokerClaim(broker, "h", 9),), False, None, 10_000, "1", -1)

    def do(self, body: c.Body) -> Any:
        offset = self.state.applied_offset + 1
        self.state, outcome = apply(self.state, offset, c.Command(uid(), 1000 + offset, "p", offset - 1, body))
        return outcome

    def ok(self, body: c.Body) -> Any:
        outcome = self.do(body)
        assert isinstance(outcome, Accepted), outcome
        return outcome.changes

    def refused(self, body: c.Body, code: Rejection, words: str) -> None:
        outcome = self.do(body)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.code is code
        assert words in outcome.message


def test_from_the_beginning_to_the_end() -> None:
    log = Log()
    (change,) = log.ok(log.begin)
    assert change.after.remote_prefix == "out-"
    assert log.ok(log.begin) == ()
    log.refused(log.end, Rejection.CONFLICT, "still follows")
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    assert log.state.namespaces[KEY].reserved
    log.refused(c.AlterNamespace(TOPIC, "in-", False), Rejection.CONFLICT, "being promoted")
    again = c.AttachNamespace("b", TOPIC, "in-", "out-", Role.FOLLOWER)
    log.refused(again, Rejection.CONFLICT, "being promoted")
    log.ok(log.end)
    assert not log.state.namespaces[KEY].reserved
    assert not log.state.promotions
    assert log.ok(log.end) == ()
    log.ok(again)


def test_it_is_abandoned_only_while_it_follows_still() -> None:
    log = Log()
    abandon = c.AbandonPromotion(TOPIC, "in-", log.ours)
    assert log.ok(abandon) == ()
    log.ok(log.begin)
    log.refused(replace(abandon, owner=log.other), Rejection.CONFLICT, "took over")
    (change,) = log.ok(abandon)
    assert change.after is None
    assert not log.state.promotions
    assert log.state.namespaces[KEY].reserved
    log.ok(log.begin)
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.refused(abandon, Rejection.CONFLICT, "can only go on")


def test_only_followers_are_promoted() -> None:
    log = Log()
    log.refused(replace(log.begin, prefix="x-"), Rejection.NOT_FOUND, "'x-'")
    log.refused(replace(log.begin, link="x"), Rejection.NOT_FOUND, "'x'")
    log.refused(replace(log.begin, owner="me"), Rejection.INVALID, "UUID")
    log.ok(c.AttachNamespace("b", TOPIC, "lead-", "lead-", Role.LEADER, create_missing=True))
    log.refused(replace(log.begin, prefix="lead-"), Rejection.NOT_FOUND, "does not follow")


def test_taken_over_when_the_owner_is_gone_also_without_its_link() -> None:
    log = Log()
    log.ok(log.begin)
    theirs = replace(log.begin, owner=log.other, settings={})
    log.refused(theirs, Rejection.CONFLICT, "lease may still run")
    log.ok(c.DeleteLink("b"))
    log.ok(c.ReleaseLease("ours", log.ours))
    (change,) = log.ok(theirs)
    assert change.after.settings == {"in-t": {"retention.ms": "5"}}
    log.refused(log.end, Rejection.CONFLICT, "took over")
    log.ok(replace(log.end, owner=log.other))
    assert not log.state.promotions


def test_a_process_that_was_replaced_may_still_run() -> None:
    log = Log()
    log.ok(log.begin)
    log.ok(log.claim("ours", uid(), 1))
    log.refused(replace(log.begin, owner=log.other), Rejection.CONFLICT, "lease may still run")


def test_the_reservation_outlives_the_link() -> None:
    log = Log()
    log.ok(log.begin)
    log.ok(c.DeleteLink("b"))
    assert log.state.namespaces[KEY].reserved
    log.refused(c.DeleteNamespace(TOPIC, "in-"), Rejection.CONFLICT, "being promoted")


def test_what_is_promoted_together_is_one_thing_from_its_begin_to_its_end() -> None:
    log = Log()
    group = ResourceType.CONSUMER_GROUP
    log.ok(c.AttachNamespace("b", group, "app-", "app-", Role.FOLLOWER, create_missing=True))
    begin = replace(log.begin, type=group, prefix="app-", more=(KEY,))
    log.refused(replace(begin, more=(NamespaceKey(TOPIC, "x-"),)), Rejection.NOT_FOUND, "'x-'")
    assert not log.state.promotions
    assert len(log.ok(begin)) == 2
    keys = (KEY, NamespaceKey(group, "app-"))
    assert [each.keys for each in log.state.promotions.values()] == [keys, keys]
    assert log.state.promotions[KEY].settings == {"in-t": {"retention.ms": "5"}}
    log.refused(replace(log.begin, more=(NamespaceKey(TOPIC, "x-"),)), Rejection.CONFLICT, "without the")
    assert len(log.ok(c.AbandonPromotion(TOPIC, "in-", log.ours))) == 2
    assert not log.state.promotions

    log.ok(begin)
    log.ok(c.ReleaseLease("ours", log.ours))
    assert len(log.ok(replace(log.begin, owner=log.other))) == 2
    decide = c.DecidePromotion(group, "app-", log.ours, True)
    log.refused(decide, Rejection.CONFLICT, "took over")
    assert len(log.ok(replace(decide, owner=log.other))) == 2
    assert log.ok(replace(decide, owner=log.other)) == ()
    log.refused(replace(decide, owner=log.other, goes_on=False), Rejection.CONFLICT, "decided")
    log.refused(c.AbandonPromotion(TOPIC, "in-", log.other), Rejection.CONFLICT, "can only go on")
    end = replace(log.end, owner=log.other)
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.refused(end, Rejection.CONFLICT, "'app-' still follows")
    log.ok(c.DetachNamespace("b", group, "app-"))
    log.ok(end)
    assert not log.state.promotions
    assert not any(log.state.namespaces[key].reserved for key in keys)
    log.refused(replace(decide, owner=log.other), Rejection.NOT_FOUND, "not being promoted")


def test_what_lacks_something_is_taken_back_by_its_owner_alone() -> None:
    log = Log()
    log.ok(log.begin)
    back = c.DecidePromotion(TOPIC, "in-", log.other, False)
    log.refused(back, Rejection.CONFLICT, "took over")
    back = replace(back, owner=log.ours)
    (change,) = log.ok(back)
    assert change.after.decided is False
    log.refused(replace(back, goes_on=True), Rejection.CONFLICT, "decided")
    log.ok(c.AbandonPromotion(TOPIC, "in-", log.ours))
    log.ok(log.begin)
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.refused(back, Rejection.CONFLICT, "can only go on")


@pytest.mark.parametrize(
    ("kind", "prefix"), [(ResourceType.CONSUMER_GROUP, "app-"), (ResourceType.PRINCIPAL, "User:app-")]
)
def test_other_namespaces_are_promoted_alike(kind: ResourceType, prefix: str) -> None:
    log = Log()
    log.ok(c.AttachNamespace("b", kind, prefix, prefix, Role.FOLLOWER, create_missing=True))
    log.ok(replace(log.begin, type=kind, prefix=prefix, settings={}))
    log.ok(c.DetachNamespace("b", kind, prefix))
    log.ok(replace(log.end, type=kind, prefix=prefix))
    assert not log.state.namespaces[NamespaceKey(kind, prefix)].reserved


def test_a_failover_is_decided_from_the_beginning() -> None:
    log = Log()
    log.ok(replace(log.begin, settings={}, without_source=True))
    begun = log.state.promotions[KEY]
    assert (begun.decided, begun.without_source, begun.settings) == (True, True, {})
    log.refused(c.AbandonPromotion(TOPIC, "in-", log.ours), Rejection.CONFLICT, "only go on")
    log.refused(replace(log.begin, owner=log.other, without_source=True), Rejection.CONFLICT, "may still run")
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.ok(log.end)
    assert not log.state.namespaces[KEY].reserved


@pytest.mark.parametrize("decided", [None, False])
def test_a_promotion_that_lost_its_source_becomes_a_failover(decided: bool | None) -> None:
    log = Log()
    log.ok(log.begin)
    if decided is not None:
        log.ok(c.DecidePromotion(TOPIC, "in-", log.ours, decided))
    log.ok(replace(log.begin, settings={}, without_source=True))
    begun = log.state.promotions[KEY]
    assert (begun.decided, begun.without_source) == (True, True)
    assert begun.settings == {"in-t": {"retention.ms": "5"}}, "what it had told stays"
    assert log.ok(replace(log.begin, without_source=True)) == ()


def test_what_followed_and_was_detached_is_ended_before_its_reservation_is_cleared() -> None:
    log = Log()
    release = replace(log.begin, settings={}, without_source=True)
    log.ok(c.SetFollowerTopic("b", "in-t", "out-t", uid(), TopicState.FOLLOWING, uid()))
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.refused(replace(release, without_source=False), Rejection.NOT_FOUND, "does not follow")
    log.refused(replace(release, link="other"), Rejection.NOT_FOUND, "does not follow")
    log.ok(release)
    log.refused(
        c.AttachNamespace("b", TOPIC, "in-", "out-", Role.FOLLOWER), Rejection.CONFLICT, "is being promoted: wait"
    )
    log.ok(log.end)
    assert not log.state.namespaces[KEY].reserved
