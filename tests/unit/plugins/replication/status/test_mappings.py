"""The state of a pair of namespaces is that of what is worst in it, and says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from isthmus_control.model import Link, LinkMode, NamespaceMapping, ResourceType, Role
from isthmus_plugins.links import AclStatus, GroupStatus, PartitionStatus, SyncStatus
from isthmus_plugins.replication.status.mappings import mapping_statuses

TOPICS = NamespaceMapping(ResourceType.TOPIC, "l-", "r-", Role.LEADER, 0, 0)
OTHERS = NamespaceMapping(ResourceType.TOPIC, "other-", "other-", Role.LEADER, 0, 0)
GROUPS = NamespaceMapping(ResourceType.CONSUMER_GROUP, "g-", "g-", Role.LEADER, 0, 0)
PRINCIPALS = NamespaceMapping(ResourceType.PRINCIPAL, "p-", "p-", Role.LEADER, 0, 0)


def link(mode: LinkMode, *mappings: NamespaceMapping) -> Link:
    return cast(Link, SimpleNamespace(mode=mode, mappings=mappings))


def partition(topic: str, number: int, state: str, **why: Any) -> PartitionStatus:
    return PartitionStatus(topic=topic, remote_topic=topic, partition=number, role="leader", state=state, **why)


def group(state: str, sync: SyncStatus | None = None, **why: Any) -> GroupStatus:
    return GroupStatus(group="g-1", remote_group="g-1", role="leader", state=state, positions=1, sync=sync, **why)


def told(mode: LinkMode, mapping: NamespaceMapping, connected: bool = True, **known: Any) -> tuple[str, str | None]:
    everything: dict[str, Any] = {"partitions": [], "groups": [], "acls": [], **known}
    (status,) = mapping_statuses(link(mode, mapping), connected, **everything)
    assert (status.local, status.remote, status.role) == (mapping.local_prefix, mapping.remote_prefix, "leader")
    return status.state, status.reason


def test_each_namespace_has_what_is_worst_in_it() -> None:
    partitions = [
        partition("l-a", 0, "In-Sync"),
        partition("l-a", 1, "Out-Of-Sync", reason="CONFIRMATION_LATE", message="late"),
        partition("other-a", 0, "In-Sync"),
    ]
    first, second = mapping_statuses(link(LinkMode.SYNCHRONOUS, TOPICS, OTHERS), True, partitions, [], [])
    assert (first.state, first.reason, first.message) == ("Out-Of-Sync", "CONFIRMATION_LATE", "late")
    assert (second.state, second.reason, second.message) == ("In-Sync", None, None)


def test_what_waits_for_somebody_is_named_although_the_others_go_on() -> None:
    partitions = [partition("l-a", 0, "Following"), partition("l-b", 0, "Diverged", reason="TARGET_WRITTEN_BY_OTHERS")]
    assert told(LinkMode.ASYNCHRONOUS, TOPICS, partitions=partitions) == ("Catching Up", "TARGET_WRITTEN_BY_OTHERS")


def test_a_link_that_is_down_has_no_namespace_up() -> None:
    partitions = [partition("l-a", 0, "Disconnected", reason="CONNECTION_LOST")]
    assert told(LinkMode.ASYNCHRONOUS, TOPICS, False, partitions=partitions) == ("Disconnected", "CONNECTION_LOST")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (group("Catching Up", reason="BEYOND_FOLLOWER_END"), ("Catching Up", "BEYOND_FOLLOWER_END")),
        (group("Following", SyncStatus(state="In-Sync")), ("In-Sync", None)),
        (group("Following", SyncStatus(state="Out-Of-Sync", reason="LATE")), ("Out-Of-Sync", "LATE")),
    ],
)
def test_groups_have_the_state_of_their_acks_where_these_mean_something(
    status: GroupStatus, expected: tuple[str, str | None]
) -> None:
    assert told(LinkMode.SYNCHRONOUS, GROUPS, groups=[status]) == expected


def test_principals_have_the_state_of_their_bindings() -> None:
    acls = [AclStatus(role="leader", state="Stopped", reason="REFUSED", message="no", bindings=1)]
    assert told(LinkMode.SYNCHRONOUS, PRINCIPALS, acls=acls) == ("Catching Up", "REFUSED")
