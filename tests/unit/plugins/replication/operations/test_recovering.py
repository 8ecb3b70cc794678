"""What is to be recovered, by what both clusters of a link have attached."""

from __future__ import annotations

import pytest

from isthmus_control.model import ResourceType, Role
from isthmus_plugins.replication.link.calls import AttachedPair
from isthmus_plugins.replication.operations.recovering import turned

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
LEADER, FOLLOWER = Role.LEADER, Role.FOLLOWER


def pair(role: Role, kind: ResourceType = TOPIC, local: str = "a-", remote: str = "b-") -> AttachedPair:
    """As this cluster, A, calls it."""
    return AttachedPair(kind, local, remote, role)


def there(role: Role, kind: ResourceType = TOPIC, local: str = "b-", remote: str = "a-") -> AttachedPair:
    """As B calls it."""
    return AttachedPair(kind, local, remote, role)


@pytest.mark.parametrize(
    ("here", "at_the_other", "found"),
    [
        ([pair(LEADER)], [there(FOLLOWER)], []),
        ([pair(FOLLOWER)], [there(LEADER)], []),
        ([pair(LEADER)], [], [pair(FOLLOWER)]),  # B was failed over
        ([], [there(LEADER)], [pair(LEADER)]),  # this cluster was
        ([pair(FOLLOWER)], [], [pair(FOLLOWER)]),  # killed half way
        ([], [there(FOLLOWER)], [pair(LEADER)]),
        ([pair(LEADER)], [there(LEADER)], []),  # nobody can tell
        ([pair(LEADER), pair(LEADER, local="x-", remote="y-")], [there(FOLLOWER)], [pair(FOLLOWER, TOPIC, "x-", "y-")]),
        ([pair(LEADER, GROUP), pair(LEADER)], [], [pair(FOLLOWER), pair(FOLLOWER, GROUP)]),
        ([], [], []),
    ],
)
def test_what_is_attached_at_one_end_alone_follows_there(
    here: list[AttachedPair], at_the_other: list[AttachedPair], found: list[AttachedPair]
) -> None:
    assert turned(here, at_the_other) == found
