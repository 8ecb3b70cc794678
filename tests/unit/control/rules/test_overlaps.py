"""What is said of namespaces that overlap is what the control log does with them."""

from __future__ import annotations

import itertools
import uuid

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.model import ResourceType, Role, contains, overlap
from isthmus_control.outcome import Accepted, Rejected, Rejection
from isthmus_control.rules.overlaps import CLASHES, Links, Relation, Roles, relation

TOPIC = ResourceType.TOPIC
PREFIXES = "", "a", "ab", "abc", "b", "_", "_a"


def is_refused(first: str, second: str, roles: tuple[Role, Role], links: Links | None) -> bool:
    """What becomes of the second attachment. ``links`` None: over links to several clusters."""
    log = CommandLog()
    same_link, same_cluster = links is Links.ONE, links in (Links.ONE, Links.ONE_CLUSTER)
    log.ok(c.CreateLink("one", str(uuid.uuid4()), "B", True, ("h:1",)))
    log.ok(c.CreateLink("two", str(uuid.uuid4()), "B" if same_cluster else "C", True, ("h:1",)))
    log.ok(c.AttachNamespace("one", TOPIC, first, f"far-{first}", roles[0], create_missing=True))
    link = "one" if same_link else "two"
    remote = f"other-{second}" if same_link else f"far-{second}"
    outcome = log.do(c.AttachNamespace(link, TOPIC, second, remote, roles[1], create_missing=True))
    assert isinstance(outcome, Accepted) or (isinstance(outcome, Rejected) and outcome.code is Rejection.CONFLICT)
    return isinstance(outcome, Rejected)


@pytest.mark.parametrize("roles", list(itertools.product(Role, Role)))
@pytest.mark.parametrize("links", [Links.ONE, Links.ONE_CLUSTER, None])
def test_what_is_said_to_be_refused_is(roles: tuple[Role, Role], links: Links | None) -> None:
    both = Roles.EITHER if roles[0] is not roles[1] else Roles.FOLLOW if roles[0] is Role.FOLLOWER else Roles.LEAD
    said = any(each.roles is both and each.links in (links, Links.ANY) for each in CLASHES)
    assert is_refused("a", "ab", roles, links) is said
    assert is_refused("ab", "a", roles, links) is said
    assert not is_refused("ab", "ac", roles, links), "they do not overlap"


@pytest.mark.parametrize(("first", "second"), list(itertools.product(PREFIXES, PREFIXES)))
def test_which_names_are_shared(first: str, second: str) -> None:
    names = [*PREFIXES, *(f"{each}x" for each in PREFIXES)]
    in_first, in_second = ({name for name in names if contains(TOPIC, each, name)} for each in (first, second))
    found = relation(first, second)
    assert (found is Relation.NONE) is not (overlap(first, second) or first == second)
    if found is Relation.NONE:
        assert not in_first & in_second
    if found in (Relation.HOLDS, Relation.SAME):
        assert in_first >= in_second
    if found in (Relation.HELD, Relation.SAME):
        assert in_first <= in_second
