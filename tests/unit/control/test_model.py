"""Prefixes, overlap, renaming and the compiled lookup."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus_control.clock import ZERO, Register
from isthmus_control.lookup import Lookup
from isthmus_control.model import (
    Link,
    LinkMode,
    LinkSettings,
    Namespace,
    NamespaceKey,
    NamespaceMapping,
    ResourceType,
    Role,
    contains,
    overlap,
    rename,
)

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
names = st.text(alphabet="_ab.", max_size=6)


def test_contains() -> None:
    assert contains(TOPIC, "orders-", "orders-1")
    assert contains(TOPIC, "orders-", "orders-")
    assert not contains(TOPIC, "orders-", "order")
    assert contains(TOPIC, "", "x")
    assert not contains(TOPIC, "", "_x")
    assert contains(TOPIC, "_", "_schemas")
    assert not contains(GROUP, "", "_x")
    assert not contains(TOPIC, "_", "__consumer_offsets")
    assert not contains(TOPIC, "__", "__isthmus_control")
    assert contains(GROUP, "__", "__consumer_offsets")
    assert not contains(GROUP, "__", "__isthmus_control_x")


@given(names, names, names)
def test_overlap_says_whether_a_name_can_be_in_both(left: str, right: str, name: str) -> None:
    assert overlap(left, right) == overlap(right, left)
    if contains(GROUP, left, name) and contains(GROUP, right, name):
        assert overlap(left, right)


@given(names, names)
def test_overlapping_prefixes_have_a_common_name(left: str, right: str) -> None:
    candidates = [max(left, right, key=len), max(left, right, key=len) + "a"]
    assert overlap(left, right) == any(contains(GROUP, left, n) and contains(GROUP, right, n) for n in candidates)


@given(names, names, names)
def test_renaming_goes_back(prefix: str, other: str, name: str) -> None:
    there = rename(GROUP, prefix, other, name)
    if there is not None:
        assert rename(GROUP, other, prefix, there) == name


def test_renaming_into_the_empty_prefix_leaves_underscores_out() -> None:
    assert rename(TOPIC, "x-", "", "x-a") == "a"
    assert rename(TOPIC, "x-", "", "x-_a") is None
    assert rename(TOPIC, "x-", "y-", "z-a") is None


def namespace(prefix: str, kind: ResourceType = TOPIC, reserved: bool = True) -> Namespace:
    return Namespace(kind, prefix, 0, reserved, f"because of {prefix}" if reserved else None, 0 if reserved else None)


def link(name: str, *mappings: tuple[str, str, Role]) -> Link:
    attached = tuple(NamespaceMapping(TOPIC, local, remote, role, 0, 0) for local, remote, role in mappings)
    settings = LinkSettings(Register(LinkMode.ASYNCHRONOUS, ZERO), {}, {})
    return Link(name, "id", 0, "A", "B", False, settings, 0, mappings=attached)


def lookup(namespaces: list[Namespace], *links: Link) -> Lookup:
    return Lookup({n.key: n for n in namespaces}, {one.name: one for one in links})


def test_the_longest_reserved_prefix_answers() -> None:
    table = lookup(
        [namespace("a-"), namespace("a-b-"), namespace("a-b-c-", reserved=False), namespace("g", GROUP)],
        link("l", ("a-b-", "r-", Role.FOLLOWER)),
    )
    found = table.topic_reservation("a-b-c-d")
    assert found is not None
    assert (found.prefix, found.link, found.reason) == ("a-b-", "l", "because of a-b-")
    found = table.topic_reservation("a-x")
    assert found is not None
    assert (found.prefix, found.link) == ("a-", None)
    assert table.topic_reservation("g1") is None
    assert table.reservation(GROUP, "g1") is not None
    assert table.topic_reservation("b") is None


def test_internal_topics_are_always_protected_and_kafkas_never_reserved() -> None:
    table = lookup([namespace(""), namespace("_")])
    assert table.topic_reservation("__isthmus_control") is not None
    assert table.topic_reservation("__consumer_offsets") is None
    assert table.topic_reservation("_schemas") is not None
    assert table.topic_reservation("x") is not None


@given(st.lists(names, max_size=6), names)
def test_the_lookup_agrees_with_a_search(prefixes: list[str], name: str) -> None:
    spaces = [namespace(prefix, GROUP) for prefix in prefixes]
    holding = [space.prefix for space in spaces if name in space]
    found = lookup(spaces).reservation(GROUP, name)
    assert (found.prefix if found else None) == max(holding, key=len, default=None)


def test_counterparts() -> None:
    table = lookup(
        [],
        link("l1", ("out-", "from-a-", Role.LEADER), ("in-", "out-", Role.FOLLOWER)),
        link("l2", ("out-x-", "x-", Role.LEADER)),
    )
    assert [(found.link.name, found.remote_name) for found in table.leading(TOPIC, "out-x-1")] == [
        ("l1", "from-a-x-1"),
        ("l2", "x-1"),
    ]
    found = table.following(TOPIC, "in-1")
    assert found is not None
    assert (found.link.name, found.remote_name) == ("l1", "out-1")
    assert table.following(TOPIC, "out-1") is None
    back = table.local("l1", TOPIC, Role.FOLLOWER, "out-1")
    assert back is not None
    assert back.local_name == "in-1"
    led = table.local("l1", TOPIC, Role.LEADER, "from-a-1")
    assert led is not None
    assert led.local_name == "out-1"
    assert table.local("l2", TOPIC, Role.FOLLOWER, "out-1") is None


def test_a_namespace_is_named_by_type_and_prefix() -> None:
    assert str(NamespaceKey(GROUP, "g-")) == "consumer-group namespace 'g-'"
