"""The rules of copies of offsets topics."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.levels import ESCAPED_IDS
from isthmus_control.model import OffsetsCopy, OffsetsForm, ResourceType, Role, TopicState, contains
from isthmus_control.outcome import FollowerTopicChanged, LinkChanged, Rejected, Rejection

TOPIC, LEADER, FOLLOWER = ResourceType.TOPIC, Role.LEADER, Role.FOLLOWER
OFFSETS = "__consumer_offsets"
WHOLE = OffsetsCopy(OffsetsForm.WHOLE)
REDACTED = OffsetsCopy(OffsetsForm.REDACTED, ("app-*", "billing"))
ENCRYPTED = OffsetsCopy(OffsetsForm.ENCRYPTED)
SOURCE_ID, COPY_ID = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))


class Log(CommandLog):
    """The log of cluster A, linked to B and C."""

    def __init__(self) -> None:
        super().__init__()
        for name, remote in (("ab", "B"), ("ab2", "B"), ("ac", "C")):
            self.ok(c.CreateLink(name, str(uuid.uuid4()), remote, True, ("there:9192",)))

    def refused(self, body: c.Body, code: Rejection, *words: str) -> None:
        before = self.state
        outcome = self.do(body)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.code is code
        assert all(word in outcome.message for word in words), outcome.message
        assert self.state.links == before.links


@pytest.fixture
def log() -> Log:
    return Log()


def test_both_sides_know_the_pair_by_their_own_names(log: Log) -> None:
    (changed,) = log.ok(c.SetOffsetsTopic("ab", LEADER, WHOLE))
    log.ok(c.SetOffsetsTopic("ab", FOLLOWER, REDACTED))
    link = log.state.links["ab"]
    assert isinstance(changed, LinkChanged)
    assert link.mappings == ()
    led, copy = link.offsets_topics
    assert (led.remote_name(OFFSETS), copy.remote_name(f"{OFFSETS}_B")) == (f"{OFFSETS}_A", OFFSETS)
    assert (led.local_name(f"{OFFSETS}_A"), copy.local_name(OFFSETS)) == (OFFSETS, f"{OFFSETS}_B")
    assert led.remote_name(OFFSETS + "x") is copy.local_name("orders") is None
    assert link.topic_mappings == (led, copy)
    assert copy.offsets == REDACTED


def test_the_copy_follows_as_any_topic_does(log: Log) -> None:
    log.ok(c.SetOffsetsTopic("ab", FOLLOWER, WHOLE))
    counterpart = log.state.lookup.following(TOPIC, f"{OFFSETS}_B")
    assert counterpart is not None
    assert (counterpart.link.name, counterpart.remote_name) == ("ab", OFFSETS)
    back = log.state.lookup.local("ab", TOPIC, FOLLOWER, OFFSETS)
    assert back is not None
    assert back.local_name == f"{OFFSETS}_B"
    log.ok(c.SetFollowerTopic("ab", f"{OFFSETS}_B", OFFSETS, SOURCE_ID, TopicState.FOLLOWING, COPY_ID))
    changes = log.ok(c.SetOffsetsTopic("ab", FOLLOWER, None))
    assert any(isinstance(change, FollowerTopicChanged) for change in changes)
    assert log.state.follower_topics[f"{OFFSETS}_B"].state is TopicState.DETACHED
    assert log.state.lookup.following(TOPIC, f"{OFFSETS}_B") is None
    assert log.state.links["ab"].offsets_topics == ()


def test_a_deleted_link_detaches_the_copy(log: Log) -> None:
    log.ok(c.SetOffsetsTopic("ab", LEADER, WHOLE))
    log.ok(c.SetOffsetsTopic("ab", FOLLOWER, WHOLE))
    log.ok(c.SetFollowerTopic("ab", f"{OFFSETS}_B", OFFSETS, SOURCE_ID, TopicState.FOLLOWING, COPY_ID))
    log.ok(c.DeleteLink("ab"))
    assert log.state.follower_topics[f"{OFFSETS}_B"].state is TopicState.DETACHED


def test_the_form_changes_in_place_and_saying_it_again_changes_nothing(log: Log) -> None:
    log.ok(c.SetOffsetsTopic("ab", LEADER, REDACTED))
    before = log.state.links["ab"]
    assert log.ok(c.SetOffsetsTopic("ab", LEADER, REDACTED)) == ()
    assert log.state.links["ab"] == before
    log.ok(c.SetOffsetsTopic("ab", LEADER, replace(REDACTED, groups=("billing",))))
    (led,) = log.state.links["ab"].offsets_topics
    assert led.offsets == OffsetsCopy(OffsetsForm.REDACTED, ("billing",))
    log.ok(c.SetOffsetsTopic("ab", LEADER, ENCRYPTED))
    log.ok(c.SetOffsetsTopic("ab", LEADER, None))
    assert log.ok(c.SetOffsetsTopic("ab", LEADER, None)) == ()


def test_what_is_refused(log: Log) -> None:
    log.refused(c.SetOffsetsTopic("nope", LEADER, WHOLE), Rejection.NOT_FOUND, "'nope'")
    log.refused(c.SetOffsetsTopic("ab", LEADER, OffsetsCopy(OffsetsForm.REDACTED)), Rejection.INVALID, "groups")
    log.refused(c.SetOffsetsTopic("ab", LEADER, replace(WHOLE, groups=("a",))), Rejection.INVALID, "redacted")
    for pattern in ("", "a*b", "a,b", "x" * 1001):
        copy = OffsetsCopy(OffsetsForm.REDACTED, (pattern,))
        log.refused(c.SetOffsetsTopic("ab", LEADER, copy), Rejection.INVALID, "pattern")
    many = OffsetsCopy(OffsetsForm.REDACTED, tuple(f"g{number}" for number in range(101)))
    log.refused(c.SetOffsetsTopic("ab", LEADER, many), Rejection.INVALID, "100")


def test_one_link_copies_a_clusters_offsets_topic(log: Log) -> None:
    log.ok(c.SetOffsetsTopic("ab", FOLLOWER, WHOLE))
    log.refused(c.SetOffsetsTopic("ab2", FOLLOWER, WHOLE), Rejection.CONFLICT, "'ab'")
    log.ok(c.SetOffsetsTopic("ac", FOLLOWER, WHOLE))
    for link in ("ab", "ab2", "ac"):  # one offsets topic may be led to many
        log.ok(c.SetOffsetsTopic(link, LEADER, WHOLE))


def test_no_client_writes_copies_and_no_namespace_holds_them(log: Log) -> None:
    reservation = log.state.lookup.topic_reservation(f"{OFFSETS}_B")
    assert reservation is not None
    assert "copy" in reservation.reason
    assert not contains(TOPIC, "__", f"{OFFSETS}_B")
    log.refused(c.CreateNamespace(TOPIC, f"{OFFSETS}_"), Rejection.INVALID, "internal")


def test_an_id_that_no_topic_can_have_in_its_name_is_escaped_from_a_feature_level_on() -> None:
    """Below it the log says what it did for versions that escape nothing."""
    log = CommandLog()
    log.ok(c.CreateLink("odd", str(uuid.uuid4()), "prod/eu", True, ("there:9192",)))

    def copy() -> str:
        log.ok(c.SetOffsetsTopic("odd", FOLLOWER, None))
        log.ok(c.SetOffsetsTopic("odd", FOLLOWER, WHOLE))
        (mapping,) = log.state.links["odd"].offsets_topics
        return mapping.local_prefix

    assert copy() == "__consumer_offsets_prod/eu"
    log.ok(c.RaiseLevel(ESCAPED_IDS))
    assert copy() == "__consumer_offsets_prod.2Feu"


def test_two_clusters_whose_copies_would_have_one_name_are_not_both_copied(log: Log) -> None:
    log.ok(c.RaiseLevel(ESCAPED_IDS))
    for name, remote in (("odd", "prod/eu"), ("mean", "prod.2Feu")):
        log.ok(c.CreateLink(name, str(uuid.uuid4()), remote, True, ("there:9192",)))
    log.ok(c.SetOffsetsTopic("odd", FOLLOWER, WHOLE))
    log.refused(c.SetOffsetsTopic("mean", FOLLOWER, WHOLE), Rejection.CONFLICT, "'odd'", "prod/eu")
    log.ok(c.SetOffsetsTopic("mean", LEADER, WHOLE))
