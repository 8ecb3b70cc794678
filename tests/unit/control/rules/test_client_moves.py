"""The rules of clients that are told to move: who leads was recorded before, and whoever leads again tells nobody."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.bounds import MOVE_CLIENTS_MS_MAX
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import CLIENT_MOVES, level_of
from isthmus_control.model import ClientMove, Grant, NamespaceKey, ResourceType, Right, Role, TopicState
from isthmus_control.outcome import ClientMoveChanged, Rejected, Rejection

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
HERE, GROUPS = NamespaceKey(TOPIC, "a-"), NamespaceKey(GROUP, "ga-")
THERE = NamespaceKey(TOPIC, "b-")
LINK_ID, ID, OWNER = (str(uuid.UUID(int=number)) for number in (1, 2, 4))
FOR_MS = 60_000
ANNOUNCE = c.AnnounceReversal("l", *HERE, (GROUPS,), ID, OWNER, 0, 5_000, move_clients_ms=FOR_MS)
HOLD, HAND_OVER, END = c.HoldReversal("l", ID, OWNER), c.HandOver("l", ID, OWNER, ()), c.EndReversal("l", ID)
MOVE = c.MoveClients("l", *HERE, "b-", FOR_MS)
PROMOTE = c.BeginPromotion("l", *THERE, {}, OWNER, move_clients_ms=FOR_MS)
FAIL_OVER = replace(PROMOTE, without_source=True)
PROMOTED = c.EndPromotion(*THERE, OWNER)
DETACH_HERE, DETACH_THERE = c.DetachNamespace("l", *HERE, for_peer=True), c.DetachNamespace("l", *THERE)


class Log(CommandLog):
    """Each command is made a second after the one before it."""

    @property
    def at_ms(self) -> int:
        return (self.state.applied_offset + 2) * 1_000

    def refused(self, body: c.Body, code: Rejection, words: str) -> None:
        before = self.state.client_moves
        outcome = self.do(body)
        assert isinstance(outcome, Rejected), outcome
        assert (outcome.code, words in outcome.message) == (code, True), outcome
        assert self.state.client_moves == before

    def move(self, key: NamespaceKey = HERE) -> ClientMove | None:
        assert self.state.client_moves.keys() <= {key}
        return self.state.client_moves.get(key)


def at_a(*done: c.Body) -> Log:
    """A leads topics and groups to B."""
    log = Log("A")
    log.ok(c.RaiseLevel(CLIENT_MOVES))
    log.ok(c.CreateLink("l", LINK_ID, "B", True, ("b:1",)))
    for key, remote in ((HERE, "b-"), (GROUPS, "gb-")):
        log.ok(c.AttachNamespace("l", *key, remote, Role.LEADER, create_missing=True))
    for body in done:
        log.ok(body)
    return log


def at_b(*done: c.Body, level: int = CLIENT_MOVES) -> Log:
    """B follows A's topics."""
    log = Log("B")
    log.ok(c.RaiseLevel(level))
    log.ok(c.CreateLink("l", LINK_ID, "A", False))
    log.ok(c.AttachNamespace("l", *THERE, "a-", Role.FOLLOWER, create_missing=True))
    for body in done:
        log.ok(body)
    return log


def test_who_led_tells_its_clients_once_the_other_cluster_leads() -> None:
    log = at_a(ANNOUNCE, HOLD, HAND_OVER)
    assert log.move() is None, "nobody leads yet"
    at_ms = log.at_ms
    log.ok(END)
    move = log.move()
    assert move == ClientMove("l", *HERE, "b-", False, at_ms, FOR_MS, log.state.applied_offset)
    assert move.ends_ms == at_ms + FOR_MS
    assert [move.left_ms(at) for at in (0, at_ms, at_ms + 1, at_ms + FOR_MS)] == [FOR_MS, FOR_MS, FOR_MS - 1, 0]


@pytest.mark.parametrize("taken_back", [(ANNOUNCE,), (ANNOUNCE, HOLD)], ids=["announced", "held"])
def test_nobody_is_told_where_it_was_taken_back(taken_back: tuple[c.Body, ...]) -> None:
    assert at_a(*taken_back, c.TakeBack("l", ID)).move() is None
    assert at_a(ANNOUNCE, HOLD, HAND_OVER, c.AbandonReversal("l", ID)).move() is None


def test_nobody_is_told_unasked() -> None:
    assert at_a(replace(ANNOUNCE, move_clients_ms=0), HOLD, HAND_OVER, END).move() is None
    assert at_b(replace(PROMOTE, move_clients_ms=0), DETACH_THERE, PROMOTED).move(THERE) is None


@pytest.mark.parametrize("begun", [PROMOTE, FAIL_OVER], ids=["promoted", "failed over"])
def test_who_leads_asks_the_other_cluster_once_clients_may_write(begun: c.BeginPromotion) -> None:
    log = at_b(begun, DETACH_THERE)
    assert log.move(THERE) is None
    at_ms = log.at_ms
    log.ok(PROMOTED)
    move = log.move(THERE)
    assert move == ClientMove("l", *THERE, "a-", True, at_ms, FOR_MS, log.state.applied_offset)
    end = c.EndClientMove("l", *THERE, move.offset)
    assert log.ok(replace(end, begun_offset=move.offset - 1)) == ()
    assert log.ok(end) == (ClientMoveChanged(move, None),)
    assert log.ok(end) == ()
    assert log.move(THERE) is None


def test_a_promotion_that_goes_on_as_a_failover_may_be_given_the_time_then() -> None:
    log = at_b(replace(PROMOTE, move_clients_ms=0), FAIL_OVER, replace(FAIL_OVER, move_clients_ms=0))
    log.ok(DETACH_THERE)
    log.ok(PROMOTED)
    assert log.move(THERE) is not None


def test_of_what_followed_no_more_nobody_knows_whom_to_tell() -> None:
    log = at_b(c.SetFollowerTopic("l", "b-t", "a-t", ID, TopicState.FOLLOWING, LINK_ID, None))
    log.ok(DETACH_THERE)
    log.ok(FAIL_OVER)
    log.ok(PROMOTED)
    assert log.move(THERE) is None


@pytest.mark.parametrize("detached", [True, False], ids=["promoted", "failed over"])
def test_who_led_tells_its_clients_when_it_is_asked(detached: bool) -> None:
    log = at_a(*([DETACH_HERE] if detached else []))
    at_ms = log.at_ms
    log.ok(MOVE)
    first = log.move()
    assert first is not None
    assert (first.there, first.at_ms, first.for_ms) == (False, at_ms, FOR_MS)
    # Another proxy has asked, a second later, and for as much less.
    assert log.ok(replace(MOVE, for_ms=FOR_MS - 1_000)) == ()
    assert log.move() == first
    log.ok(MOVE)
    again = log.move()
    assert again is not None
    assert again.ends_ms > first.ends_ms


def test_who_asks_has_to_be_allowed_to_follow() -> None:
    log = at_a(DETACH_HERE)
    for body, code, words in (
        (replace(MOVE, link="m"), Rejection.NOT_FOUND, "no link"),
        (replace(MOVE, prefix="c-"), Rejection.NOT_FOUND, "no topic namespace"),
        (replace(MOVE, type=GROUP, prefix="ga-"), Rejection.INVALID, "by the topics"),
        (replace(MOVE, for_ms=0), Rejection.INVALID, "some time"),
        (replace(MOVE, remote_prefix="b" * 250), Rejection.INVALID, "prefix"),
        (replace(MOVE, for_ms=MOVE_CLIENTS_MS_MAX + 1), Rejection.INVALID, "told to move"),
    ):
        log.refused(body, code, words)
    log.ok(c.CreateNamespace(TOPIC, "c-"))
    log.refused(replace(MOVE, prefix="c-"), Rejection.NOT_GRANTED, "follow:c-")
    log.ok(c.ChangeGrants("l", (Grant(Right.FOLLOW, TOPIC, "c-"),)))
    log.ok(replace(MOVE, prefix="c-"))
    for body in (replace(ANNOUNCE, move_clients_ms=-1), replace(PROMOTE, move_clients_ms=-1)):
        log.refused(body, Rejection.INVALID, "told to move")


@pytest.mark.parametrize(
    "leads",
    [
        (c.AttachNamespace("l", *HERE, "b-", Role.LEADER),),
        (
            c.AttachNamespace("l", *HERE, "b-", Role.FOLLOWER),
            c.BeginPromotion("l", *HERE, {}, OWNER),
            c.DetachNamespace("l", *HERE),
            c.EndPromotion(*HERE, OWNER),
        ),
        (c.AlterNamespace(*HERE, True), c.AlterNamespace(*HERE, False)),
        (c.DeleteNamespace(*HERE),),
    ],
    ids=["attached", "promoted", "opened", "deleted"],
)
def test_who_leads_again_tells_nobody(leads: tuple[c.Body, ...]) -> None:
    log = at_a(DETACH_HERE, MOVE)
    for body in leads[:-1]:
        log.ok(body)
        assert log.move() is not None, body
    log.ok(leads[-1])
    assert log.move() is None


def test_a_reversal_there_and_back_leaves_the_latest_alone() -> None:
    log = at_a(ANNOUNCE, HOLD, HAND_OVER, END)
    log.ok(c.AcceptReversal("l", *HERE, (GROUPS,), ID, {}))
    log.ok(c.BeginPromotion("l", *HERE, {}, OWNER, (GROUPS,), reversal=ID))
    for key in (HERE, GROUPS):
        log.ok(c.DetachNamespace("l", *key))
    assert log.move() is not None
    log.ok(c.EndPromotion(*HERE, OWNER))
    assert log.move() is None, "it leads"


def test_who_hands_over_asks_nobody_any_more() -> None:
    log = at_b(PROMOTE, DETACH_THERE, PROMOTED)
    log.ok(c.AttachNamespace("l", *THERE, "a-", Role.LEADER))
    assert log.move(THERE) is not None, "the old source follows, and its clients are not told yet"
    announce = c.AnnounceReversal("l", *THERE, (), ID, OWNER, 0, 5_000)
    for body in (announce, HOLD):
        log.ok(body)
    assert log.move(THERE) is not None
    log.ok(HAND_OVER)
    assert log.move(THERE) is None


def test_it_needs_its_level_and_stands_in_snapshots() -> None:
    assert {level_of(each) for each in (MOVE, c.EndClientMove("l", *HERE, 5), PROMOTE)} == {CLIENT_MOVES}
    assert level_of(replace(PROMOTE, move_clients_ms=0)) == 0
    log = at_b(level=CLIENT_MOVES - 1)
    log.refused(PROMOTE, Rejection.NOT_SUPPORTED, f"feature level {CLIENT_MOVES}")
    state = at_a(DETACH_HERE, MOVE).state
    assert from_json(ControlState, parse(canonical(state))) == state
    assert b"client_moves" not in canonical(at_a().state)
