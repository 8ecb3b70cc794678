"""The rules of trees: versions follow each other, topics are in a tree or on a link, one process has a level."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import TREES, level_of
from isthmus_control.model import BrokerClaim, DistributionTree, ResourceType, Role
from isthmus_control.outcome import DistributorClaimed, Rejected, Rejection, TreeChanged

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
LINK_ID, ONE, OTHER = (str(uuid.UUID(int=number)) for number in (1, 2, 3))
APPLY = c.ApplyTree(1, "c1", ("orders-", "bills-"), (4, 8), '{"version":1}')
TREE = DistributionTree(1, "c1", ("orders-", "bills-"), (4, 8), '{"version":1}')


class Log(CommandLog):
    def __init__(self, *done: c.Body) -> None:
        super().__init__()
        self.ok(c.RaiseLevel(TREES))
        self.ok(c.CreateLink("l", LINK_ID, "B", True, ("b:1",)))
        for body in done:
            self.ok(body)

    def refused(self, body: c.Body, code: Rejection, words: str) -> None:
        before = self.state.tree, self.state.distributors, self.state.links
        outcome = self.do(body)
        assert isinstance(outcome, Rejected), outcome
        assert (outcome.code, words in outcome.message) == (code, True), outcome
        assert (self.state.tree, self.state.distributors, self.state.links) == before


def attach(prefix: str, role: Role = Role.FOLLOWER, kind: ResourceType = TOPIC) -> c.AttachNamespace:
    return c.AttachNamespace("l", kind, prefix, "b-", role, create_missing=True)


def lease(name: str, incarnation: str, broker: int) -> c.ClaimBrokers:
    return c.ClaimBrokers(name, incarnation, (BrokerClaim(broker, "h", 1),), False, None, 10_000, "1+level.6", -1)


def test_versions_follow_each_other() -> None:
    log = Log()
    assert log.ok(APPLY) == (TreeChanged(None, TREE),)
    assert log.ok(APPLY) == (), "the same again"
    log.refused(replace(APPLY, document="{}"), Rejection.CONFLICT, "version 1 of the tree is another one here")
    log.refused(replace(APPLY, version=3), Rejection.CONFLICT, "version 3 cannot follow 1")
    log.ok(c.ChooseTarget(1, 4, "c2"))
    log.ok(c.ChooseTarget(1, 8, "c3"))
    assert log.ok(replace(APPLY, version=1)) == (), "targets that were chosen since are no other version"
    log.ok(replace(APPLY, version=2, levels=(2, 4)))
    assert log.state.tree == replace(TREE, version=2, levels=(2, 4), chosen={4: "c2"})
    log.refused(APPLY, Rejection.CONFLICT, "version 1 cannot follow 2")
    log.refused(c.LeaveTree(1), Rejection.CONFLICT, "version 2 meanwhile")
    log.ok(c.LeaveTree(2))
    assert log.state.tree is None
    log.refused(c.LeaveTree(2), Rejection.NOT_FOUND, "in no tree")
    log.ok(replace(APPLY, version=7))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": 0}, "no version 0"),
        ({"leaf": "a b"}, "no name of a cluster"),
        ({"prefixes": ()}, "1 to 1000 sets of topics"),
        ({"prefixes": ("orders-", "orders-eu-")}, "overlap: keep the shorter one"),
        ({"prefixes": ("__isthmus_",)}, "internal topics"),
        ({"levels": ()}, "rising"),
        ({"levels": (4, 4)}, "rising"),
        ({"levels": (0, 4)}, "rising"),
        ({"levels": (4, 64)}, "rising"),
        ({"document": "[]"}, "no JSON object"),
        ({"document": "{"}, "no JSON object"),
    ],
)
def test_trees_that_cannot_be(changed: dict[str, object], words: str) -> None:
    Log().refused(replace(APPLY, **changed), Rejection.INVALID, words)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("prefix", ["orders-", "orders-eu-", "orders", ""])
def test_topics_are_in_a_tree_or_on_a_link(prefix: str, role: Role) -> None:
    Log(APPLY).refused(attach(prefix, role), Rejection.CONFLICT, "topics 'orders-' are distributed over a tree")
    Log(attach(prefix, role)).refused(APPLY, Rejection.CONFLICT, "is attached to link 'l', and topics 'orders-'")
    log = Log(APPLY, attach("payments-", role), attach("orders-", role, GROUP))
    log.refused(replace(APPLY, version=2, prefixes=("payments-",)), Rejection.CONFLICT, "attached to link 'l'")
    log.ok(replace(APPLY, version=2, prefixes=("bills-",)))
    log.ok(c.DetachNamespace("l", TOPIC, "payments-"))
    log.ok(attach("orders-", role))


def test_a_level_is_distributed_for_by_one_process_whose_lease_stands() -> None:
    log = Log(APPLY, lease("one", ONE, 1))
    log.refused(c.ClaimDistributor(4, OTHER), Rejection.LEASE_LOST, "lease stands in the log")
    log.refused(c.ClaimDistributor(5, ONE), Rejection.NOT_FOUND, "no level 5 in its tree; it has 4, 8")
    assert log.ok(c.ClaimDistributor(4, ONE)) == (DistributorClaimed(4, ONE),)
    assert log.ok(c.ClaimDistributor(4, ONE)) == ()
    log.ok(lease("other", OTHER, 2))
    log.refused(c.ClaimDistributor(4, OTHER), Rejection.CONFLICT, "proxy 'one' distributes for level 4")
    log.ok(c.ClaimDistributor(8, OTHER))
    log.ok(c.ExpireLease("one", ONE, log.state.proxies["one"].renewed_at_offset))
    log.ok(c.ClaimDistributor(4, OTHER))
    assert log.state.distributors == {4: OTHER, 8: OTHER}
    log.ok(replace(APPLY, version=2, levels=(8, 12)))
    assert log.state.distributors == {8: OTHER}
    log.ok(c.LeaveTree(2))
    assert log.state.distributors == {}
    log.refused(c.ClaimDistributor(8, OTHER), Rejection.NOT_FOUND, "in no tree")


def test_targets_are_chosen_of_the_version_that_was_seen() -> None:
    log = Log(APPLY)
    log.ok(c.ChooseTarget(1, 4, "c2"))
    assert log.ok(c.ChooseTarget(1, 4, "c2")) == ()
    log.refused(c.ChooseTarget(2, 4, "c2"), Rejection.CONFLICT, "version 1 meanwhile")
    log.refused(c.ChooseTarget(1, 5, "c2"), Rejection.NOT_FOUND, "no level 5")
    log.refused(c.ChooseTarget(1, 4, "c/2"), Rejection.INVALID, "no name of a cluster")
    assert log.state.tree == replace(TREE, chosen={4: "c2"})
    log.ok(c.ChooseTarget(1, 4, "c3", give_up=True))
    log.ok(c.ChooseTarget(1, 8, None, give_up=True))
    assert log.state.tree == replace(TREE, chosen={4: "c3"}, given_up=(4, 8))
    log.ok(c.ChooseTarget(1, 8, None))
    log.ok(c.ChooseTarget(1, 4, None))
    assert log.state.tree == TREE


def test_a_log_below_the_level_holds_nothing_of_it() -> None:
    assert {level_of(each) for each in (APPLY, c.LeaveTree(1), c.ClaimDistributor(4, ONE))} == {TREES}
    log = CommandLog()
    outcome = log.do(APPLY)
    assert isinstance(outcome, Rejected)
    assert outcome.code is Rejection.NOT_SUPPORTED
    assert b"tree" not in canonical(log.state)
    full = Log(APPLY, lease("one", ONE, 1), c.ClaimDistributor(4, ONE), c.ChooseTarget(1, 4, "c2")).state
    assert from_json(ControlState, parse(canonical(full))) == full


def test_a_tree_says_which_topics_it_has() -> None:
    assert [each in TREE for each in ("orders-1", "orders-", "order", "bills-x", "__isthmus_control")] == [
        True, True, False, True, False,
    ]  # fmt: skip
