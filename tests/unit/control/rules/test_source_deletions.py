"""What is recorded of topics that go because their source's topic was deleted, and what keeps them."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import SOURCE_DELETIONS, SOURCE_LOSSES, with_known_level
from isthmus_control.model import BrokerClaim, FollowerTopic, OnSourceDelete, Reason, ResourceType, Role, TopicState
from isthmus_control.outcome import Rejected, Rejection
from isthmus_control.source_losses import LossState
from isthmus_control.truncations import PartitionView

TOPIC, GROUP, FOLLOWER = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP, Role.FOLLOWER
LINK_ID, T_ID, NEW_ID, SOURCE_ID, OTHER_ID, OWNER, ANOTHER = (str(uuid.UUID(int=number)) for number in range(1, 8))
GOES = c.DeleteFollowerTopic("ab", "in-t", T_ID, SOURCE_ID, OWNER)
GONE = c.FollowerTopicDeleted("ab", "in-t", T_ID)
KEPT = c.KeepFollowerTopic("ab", "in-t", T_ID, OWNER)


class Log(CommandLog):
    """The log of cluster B, where ``in-t`` follows over link ``ab`` and goes when its source's topic is deleted."""

    def __init__(self, setting: OnSourceDelete | None = OnSourceDelete.DELETE) -> None:
        super().__init__("B")
        self.ok(c.RaiseLevel(SOURCE_DELETIONS))
        self.ok(c.CreateLink("ab", LINK_ID, "A", False))
        body = c.AttachNamespace("ab", TOPIC, "in-", "far-", FOLLOWER, create_missing=True, on_source_delete=setting)
        self.ok(body)
        self.ok(c.SetFollowerTopic("ab", "in-t", "far-t", SOURCE_ID, TopicState.FOLLOWING, T_ID))
        self.ok(c.OpenProvenance("ab", (c.PartitionOffset("in-t", T_ID, 0, 0),)))

    def no(self, body: c.Body, code: Rejection, said: str) -> None:
        before = self.state
        outcome = self.do(body)
        assert isinstance(outcome, Rejected)
        assert (outcome.code, said in outcome.message) == (code, True), outcome
        assert self.state.follower_topics == before.follower_topics

    @property
    def record(self) -> FollowerTopic:
        return self.state.follower_topics["in-t"]


def test_it_goes_and_nothing_is_left_of_it() -> None:
    log = Log()
    log.ok(c.RecordClaims("ab", LINK_ID, (c.PartitionClaim("in-t", T_ID, 0, 1_000, 5),)))
    log.ok(GOES)
    assert (log.record.state, log.record.deleting, log.record.topic_id) == (TopicState.CREATING, True, T_ID)
    assert from_json(ControlState, parse(canonical(log.state))) == log.state
    assert log.ok(GOES) == (), "two proxies have seen it"
    log.ok(GONE)
    assert "in-t" not in log.state.follower_topics
    assert "in-t" not in log.state.histories
    assert not log.state.claims
    assert log.ok(GONE) == ()


def test_while_it_goes_nothing_else_becomes_of_it() -> None:
    """Whoever is late with something about the topic that goes has no say any more."""
    log = Log()
    log.ok(GOES)
    log.no(c.ForgetFollowerTopic("ab", "in-t"), Rejection.CONFLICT, "is being deleted")
    for state, topic_id, reason in (
        (TopicState.FOLLOWING, T_ID, None),
        (TopicState.REFUSED, T_ID, Reason("CODE", "why")),
        (TopicState.CREATING, None, None),
    ):
        late = c.SetFollowerTopic("ab", "in-t", "far-t", SOURCE_ID, state, topic_id, reason)
        log.no(late, Rejection.CONFLICT, "is being deleted, as the source's was")
    ends = c.DetachNamespace("ab", TOPIC, "in-"), c.DeleteLink("ab")
    for body in ends:
        log.no(body, Rejection.CONFLICT, "'in-t' is being deleted, as the source's was: wait until it is gone")
    # A failover does not wait to begin: it has what goes end, and no other one go.
    log.ok(c.SetFollowerTopic("ab", "in-u", "far-u", SOURCE_ID, TopicState.FOLLOWING, NEW_ID))
    log.ok(c.BeginPromotion("ab", TOPIC, "in-", {}, OWNER, (), True))
    log.no(c.DetachNamespace("ab", TOPIC, "in-"), Rejection.CONFLICT, "wait until it is gone")
    log.no(c.DeleteFollowerTopic("ab", "in-u", NEW_ID, SOURCE_ID), Rejection.CONFLICT, "is being promoted")
    log.ok(GONE)
    log.ok(c.DetachNamespace("ab", TOPIC, "in-"))


def test_another_topic_in_its_place_at_the_source_is_followed() -> None:
    log = Log()
    log.ok(GOES)
    log.ok(c.SetFollowerTopic("ab", "in-t", "far-t", OTHER_ID, TopicState.CREATING))
    log.ok(c.SetFollowerTopic("ab", "in-t", "far-t", OTHER_ID, TopicState.FOLLOWING, NEW_ID))
    log.ok(c.OpenProvenance("ab", (c.PartitionOffset("in-t", NEW_ID, 0, 0),)))
    before = log.state
    for late in (GONE, KEPT):
        assert log.ok(late) == ()
    assert (log.state.follower_topics, log.state.histories) == (before.follower_topics, before.histories)
    log.no(GOES, Rejection.NOT_FOUND, "does not follow that topic")


def test_what_the_brokers_refuse_to_delete_stays_as_it_was() -> None:
    log = Log()
    before = log.record
    log.ok(GOES)
    log.ok(KEPT)
    assert log.record == before
    assert "in-t" in log.state.histories


def test_one_proxy_deletes_it_until_its_lease_is_over() -> None:
    log = Log()
    for broker, name, incarnation in ((1, "p", OWNER), (2, "q", ANOTHER)):
        claim = (BrokerClaim(broker, "h", 1),)
        log.ok(c.ClaimBrokers(name, incarnation, claim, False, None, 4_000, with_known_level("0"), -1))
    log.ok(GOES)
    assert log.record.owner == OWNER
    theirs = replace(GOES, owner=ANOTHER)
    assert log.ok(theirs) == (), "it has seen that, too"
    assert log.ok(replace(KEPT, owner=ANOTHER)) == ()
    assert (log.record.owner, log.record.deleting) == (OWNER, True)
    log.ok(c.ReleaseLease("p", OWNER))
    log.ok(theirs)
    assert (log.record.owner, log.record.deleting) == (ANOTHER, True)
    assert log.ok(KEPT) == (), "the one before is late"
    assert log.record.deleting
    log.ok(replace(KEPT, owner=ANOTHER))
    assert (log.record.owner, log.record.deleting) == ("", False)


def test_in_which_log_the_source_has_it_is_noted_of_the_topic_that_is_followed() -> None:
    log = Log()
    noted = c.NoteSourceLog("ab", "log/0", (c.FollowedTopic("in-t", SOURCE_ID), c.FollowedTopic("in-u", SOURCE_ID)))
    assert len(log.ok(noted)) == 1
    assert log.ok(noted) == ()
    assert from_json(ControlState, parse(canonical(log.state))) == log.state
    log.ok(c.NoteSourceLog("ab", "log/1", (c.FollowedTopic("in-t", OTHER_ID),)))
    assert log.record.source_log == "log/0"
    log.ok(GOES)
    log.ok(KEPT)
    log.ok(c.SetFollowerTopic("ab", "in-t", "far-t", SOURCE_ID, TopicState.FOLLOWING, T_ID))
    assert log.record.source_log == "log/0"
    log.ok(c.SetFollowerTopic("ab", "in-t", "far-t", OTHER_ID, TopicState.FOLLOWING, T_ID))
    assert log.record.source_log == "", "of another topic nothing is known"


@pytest.mark.parametrize("setting", [None, OnSourceDelete.KEEP])
def test_it_is_kept_unless_the_pair_of_namespaces_says_otherwise(setting: OnSourceDelete | None) -> None:
    log = Log(setting)
    log.no(GOES, Rejection.CONFLICT, "is kept when the source's is deleted")
    log.ok(c.AlterMapping("ab", TOPIC, "in-", None, OnSourceDelete.DELETE))
    log.ok(c.AttachNamespace("ab", TOPIC, "in-", "far-", FOLLOWER))  # which does not name it
    log.ok(GOES)


def test_what_keeps_it_although_it_is_to_go() -> None:
    log = Log()
    for body in (
        c.DeleteFollowerTopic("ab", "in-t", NEW_ID, SOURCE_ID),
        c.DeleteFollowerTopic("ab", "in-t", T_ID, OTHER_ID),
        c.DeleteFollowerTopic("ab", "in-u", T_ID, SOURCE_ID),
    ):
        log.no(body, Rejection.NOT_FOUND, "does not follow that topic")
    held = c.FoundLoss(TOPIC, "in-", "in-t", T_ID, 0, 90, 100, 10, LossState.HELD)
    log.ok(c.RecordSourceLosses("ab", LINK_ID, (held,)))
    log.no(GOES, Rejection.CONFLICT, "an operator decides")
    log.ok(c.ReleaseSourceLosses("in-t", T_ID))
    why, views = Reason("UNEXPECTED_TRUNCATION", "why"), (PartitionView(1, 0),)
    log.ok(c.BeginTruncation("ab", "in-t", T_ID, why, views, None, "p", OWNER))
    log.no(GOES, Rejection.CONFLICT, "is being truncated")


def test_a_topic_that_is_promoted_stays() -> None:
    log = Log()
    log.ok(c.BeginPromotion("ab", TOPIC, "in-", {}, OWNER))
    log.no(GOES, Rejection.CONFLICT, "is being promoted")
    log.ok(c.DecidePromotion(TOPIC, "in-", OWNER, True))
    log.ok(c.DetachNamespace("ab", TOPIC, "in-"))
    log.no(GOES, Rejection.CONFLICT, "is detached")


def test_an_operator_who_recreates_it_has_the_last_word() -> None:
    log = Log()
    log.ok(GOES)
    log.ok(c.RecreateFollowerTopic("ab", "in-t", T_ID))
    assert not log.record.deleting


def test_it_is_set_of_topics_that_follow_at_the_level_that_knows_it() -> None:
    log = Log(None)
    log.ok(c.AttachNamespace("ab", GROUP, "g-", "far-", FOLLOWER, create_missing=True))
    of_topics = "is set at the follower's side, of topics"
    log.no(c.AlterMapping("ab", GROUP, "g-", None, OnSourceDelete.DELETE), Rejection.INVALID, of_topics)
    leads = c.AttachNamespace(
        "ab", TOPIC, "out-", "x-", Role.LEADER, create_missing=True, on_source_delete=OnSourceDelete.DELETE
    )
    log.no(leads, Rejection.INVALID, of_topics)
    older = CommandLog("B")
    older.ok(c.RaiseLevel(SOURCE_LOSSES))
    older.ok(c.CreateLink("ab", LINK_ID, "A", False))
    body = c.AttachNamespace(
        "ab", TOPIC, "in-", "far-", FOLLOWER, create_missing=True, on_source_delete=OnSourceDelete.DELETE
    )
    refused = older.do(body)
    assert isinstance(refused, Rejected)
    assert "needs feature level 3" in refused.message
