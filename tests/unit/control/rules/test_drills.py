"""The rules of drills: a link that leads nowhere has copies alone, and nobody else's namespace holds them."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import DRILLS, level_of
from isthmus_control.model import DRILL_PREFIX, Drill, NamespaceKey, ResourceType, Role, TopicState, contains, overlap
from isthmus_control.outcome import Rejected, Rejection

TOPIC, GROUP, PRINCIPAL = ResourceType
LINK_ID, COPY_ID, OWNER, TOPIC_ID = (str(uuid.UUID(int=number)) for number in (1, 2, 3, 4))
NAME = f"{DRILL_PREFIX}ab12cd34"
PREFIX = f"{NAME}_0_"
COPY = NamespaceKey(TOPIC, PREFIX)
CREATE = c.CreateLink(NAME, COPY_ID, "A", False, drill=Drill("l", OWNER))
ATTACH = c.AttachNamespace(NAME, TOPIC, PREFIX, "a-", Role.FOLLOWER, create_missing=True)


class Log(CommandLog):
    def refused(self, body: c.Body, code: Rejection, words: str) -> None:
        before = self.state.links, self.state.namespaces
        outcome = self.do(body)
        assert isinstance(outcome, Rejected), outcome
        assert (outcome.code, words in outcome.message) == (code, True), outcome
        assert (self.state.links, self.state.namespaces) == before


def following(*done: c.Body, level: int = DRILLS, prefix: str = "b-") -> Log:
    """B follows A's topics."""
    log = Log("B")
    log.ok(c.RaiseLevel(level))
    log.ok(c.CreateLink("l", LINK_ID, "A", False))
    log.ok(c.AttachNamespace("l", TOPIC, prefix, "a-", Role.FOLLOWER, create_missing=True))
    for body in done:
        log.ok(body)
    return log


def test_names_of_copies_are_in_namespaces_of_copies_alone() -> None:
    name = f"{PREFIX}7"
    for kind in (TOPIC, GROUP):
        assert contains(kind, PREFIX, name)
        assert not contains(kind, f"{NAME}_1_", name)
        assert not any(contains(kind, prefix, name) for prefix in ("", "_", "__", "__isthmus_", "__isthmus_d"))
        assert not contains(kind, "__isthmus_c", "__isthmus_control")
    assert overlap(PREFIX, PREFIX)
    assert not any(overlap(PREFIX, prefix) or overlap(prefix, PREFIX) for prefix in ("", "_", "__", "b-"))


@pytest.mark.parametrize("prefix", ["b-", "", "_", "__"])
def test_a_copy_follows_beside_whatever_follows_and_is_failed_over_like_it(prefix: str) -> None:
    log = following(CREATE, ATTACH, prefix=prefix)
    assert log.state.links[NAME].drill == Drill("l", OWNER)
    assert log.state.namespaces[COPY].reserved
    assert log.state.namespaces[COPY].reserved_at_offset is None, "nobody has to pass a fence"
    copy = f"{PREFIX}0"
    log.ok(c.SetFollowerTopic(NAME, copy, "a-0", TOPIC_ID, TopicState.FOLLOWING, TOPIC_ID))
    assert log.state.lookup.topic_reservation(copy) is not None
    log.ok(c.BeginPromotion(NAME, *COPY, {}, OWNER, without_source=True))
    log.ok(c.DetachNamespace(NAME, *COPY))
    log.ok(c.EndPromotion(*COPY, OWNER))
    assert not log.state.namespaces[COPY].reserved
    assert log.state.lookup.topic_reservation(copy) is not None, "it is no client's all the same"
    log.ok(c.DeleteLink(NAME))
    log.ok(c.DeleteNamespace(*COPY))
    before = following(prefix=prefix).state
    assert (log.state.namespaces, log.state.follower_topics) == (before.namespaces, before.follower_topics)
    assert log.state.links.keys() == {"l"}


def test_one_failover_of_a_link_is_tried_at_a_time() -> None:
    log = following(CREATE, CREATE)
    other = replace(CREATE, name=f"{DRILL_PREFIX}other", link_id=str(uuid.UUID(int=9)))
    log.refused(other, Rejection.CONFLICT, "is being tried already")
    log.ok(c.DeleteLink(NAME))
    log.ok(other)


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (replace(CREATE, drill=Drill("x", OWNER)), Rejection.NOT_FOUND, "no link 'x'"),
        (replace(CREATE, drill=Drill("l", "me")), Rejection.INVALID, "is not a UUID"),
        (replace(CREATE, name="copy"), Rejection.INVALID, "is no copy of"),
        (replace(CREATE, remote_cluster_id="C"), Rejection.INVALID, "is no copy of"),
        (replace(CREATE, dials=True, remote_addresses=("a:1",)), Rejection.INVALID, "leads nowhere"),
        (replace(CREATE, remote_addresses=("a:1",)), Rejection.INVALID, "leads nowhere"),
    ],
)
def test_what_is_no_copy_of_a_link_is_refused(body: c.Body, code: Rejection, words: str) -> None:
    following().refused(body, code, words)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (replace(ATTACH, role=Role.LEADER), "that follow"),
        (replace(ATTACH, type=PRINCIPAL, local_prefix="User:"), "that follow"),
        (replace(ATTACH, local_prefix="c-"), "is no prefix of a copy"),
        (replace(ATTACH, local_prefix=DRILL_PREFIX + "x" * 249), "is no prefix of a copy"),
        (replace(ATTACH, link="l"), "internal topics"),
        (c.CreateNamespace(TOPIC, PREFIX), "internal topics"),
    ],
)
def test_copies_are_attached_to_their_link_and_nothing_else_is(body: c.Body, words: str) -> None:
    following(CREATE).refused(body, Rejection.INVALID, words)


def test_the_level_and_the_form_that_stands_in_the_log() -> None:
    assert level_of(CREATE) == DRILLS
    assert level_of(replace(CREATE, drill=None)) == 0
    state = following(CREATE, ATTACH).state
    assert from_json(ControlState, parse(canonical(state))) == state
