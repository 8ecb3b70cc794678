"""What becomes of access control bindings on the other side of a link: mapped, told as not mapped, never widened."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from support.seeds import seeds

from isthmus_control.acl_mapping import counterparts, held
from isthmus_control.acls import AclBinding, AclResource, Pattern, Permission
from isthmus_control.model import NamespaceMapping, ResourceType, Role

TOPIC, GROUP, CLUSTER = AclResource.TOPIC, AclResource.GROUP, AclResource.CLUSTER
LITERAL, PREFIXED = Pattern.LITERAL, Pattern.PREFIXED
READ, WRITE = 3, 4


def mapping(kind: ResourceType, local: str, remote: str) -> NamespaceMapping:
    return NamespaceMapping(kind, local, remote, Role.LEADER, 0, 0)


MAPPINGS = (
    mapping(ResourceType.PRINCIPAL, "User:app-", "User:b-app-"),
    mapping(ResourceType.TOPIC, "orders-", "b-orders-"),
    mapping(ResourceType.TOPIC, "clicks-", "b-clicks-"),
    mapping(ResourceType.CONSUMER_GROUP, "app-", "b-app-"),
)


def turned(mappings: Iterable[NamespaceMapping]) -> list[NamespaceMapping]:
    """As the other side has them."""
    return [
        NamespaceMapping(each.type, each.remote_prefix, each.local_prefix, Role.FOLLOWER, 0, 0) for each in mappings
    ]


def allow(resource: int, name: str, pattern: int = LITERAL, principal: str = "User:app-1") -> AclBinding:
    return AclBinding(resource, name, pattern, principal, "*", READ, Permission.ALLOW)


def deny(resource: int, name: str, pattern: int = LITERAL, principal: str = "User:app-1") -> AclBinding:
    return AclBinding(resource, name, pattern, principal, "*", READ, Permission.DENY)


@pytest.mark.parametrize(
    ("binding", "there"),
    [
        (allow(TOPIC, "orders-eu"), allow(TOPIC, "b-orders-eu")),
        (allow(TOPIC, "orders-", PREFIXED), allow(TOPIC, "b-orders-", PREFIXED)),
        (allow(TOPIC, "orders-eu-", PREFIXED), allow(TOPIC, "b-orders-eu-", PREFIXED)),
        (allow(GROUP, "app-x"), allow(GROUP, "b-app-x")),
        (deny(TOPIC, "orders-eu"), deny(TOPIC, "b-orders-eu")),
        (deny(TOPIC, "clicks-", PREFIXED), deny(TOPIC, "b-clicks-", PREFIXED)),
    ],
)
def test_names_and_principals_are_mapped(binding: AclBinding, there: AclBinding) -> None:
    mapped = counterparts([binding._replace(host="10.0.0.1")], MAPPINGS)
    assert mapped.bindings == {there._replace(principal="User:b-app-1", host="10.0.0.1")}
    assert not mapped.not_mapped
    assert all(held(each, turned(MAPPINGS)) for each in mapped.bindings)


@pytest.mark.parametrize(
    ("binding", "reason"),
    [
        (allow(TOPIC, "other"), "no mapping of the link holds the topic 'other'"),
        (allow(GROUP, "orders-x"), "no mapping of the link holds the consumer group 'orders-x'"),
        (allow(TOPIC, "*"), "it reaches beyond the topic namespace"),
        (allow(TOPIC, "ord", PREFIXED), "it reaches beyond the topic namespace 'orders-'"),
        (allow(TOPIC, "x", PREFIXED), "no mapping of the link holds topics with the prefix 'x'"),
        (allow(CLUSTER, "kafka-cluster"), "for topics and consumer groups are mapped"),
        (allow(AclResource.TRANSACTIONAL_ID, "app-"), "for topics and consumer groups are mapped"),
        (allow(TOPIC, "orders-", 7), "pattern type 7"),
    ],
)
def test_what_is_not_mapped_is_told(binding: AclBinding, reason: str) -> None:
    mapped = counterparts([binding], MAPPINGS)
    assert not mapped.bindings
    [(told, why)] = mapped.not_mapped
    assert told == binding
    assert reason in why


def test_bindings_of_other_principals_are_not_the_links() -> None:
    strangers = [allow(TOPIC, "orders-eu", principal=principal) for principal in ("User:bob", "User:*", "Group:app-1")]
    assert counterparts(strangers, MAPPINGS) == (frozenset(), ())


def test_a_deny_for_more_than_a_namespace_holds_in_each() -> None:
    mapped = counterparts([deny(TOPIC, "*"), deny(GROUP, "ap", PREFIXED)], MAPPINGS)
    assert mapped.bindings == {
        deny(TOPIC, "b-orders-", PREFIXED, "User:b-app-1"),
        deny(TOPIC, "b-clicks-", PREFIXED, "User:b-app-1"),
        deny(GROUP, "b-app-", PREFIXED, "User:b-app-1"),
    }
    assert not mapped.not_mapped
    assert all(held(each, turned(MAPPINGS)) for each in mapped.bindings)


def test_a_deny_for_everybody_holds_for_everybody_who_is_let_in() -> None:
    everybody = deny(TOPIC, "orders-secret", principal="User:*")
    one, two = (allow(TOPIC, "orders-", PREFIXED, principal) for principal in ("User:app-1", "User:app-2"))
    mapped = counterparts([everybody, one, two, deny(CLUSTER, "kafka-cluster", principal="User:*")], MAPPINGS)
    denied = {each for each in mapped.bindings if each.permission == Permission.DENY}
    assert denied == {deny(TOPIC, "b-orders-secret", principal=f"User:b-app-{number}") for number in (1, 2)}
    assert counterparts([everybody], MAPPINGS) == (frozenset(), ())


def test_nothing_becomes_a_wildcard() -> None:
    """Where the remote prefix is empty, the rest of a name could be one."""
    mappings = (
        mapping(ResourceType.PRINCIPAL, "User:x-User:", "User:"),
        mapping(ResourceType.CONSUMER_GROUP, "x-", ""),
        mapping(ResourceType.TOPIC, "x-", ""),
        mapping(ResourceType.TOPIC, "_", "_"),
    )
    principal = "User:x-User:a"
    bindings = [
        allow(GROUP, "x-*", principal=principal),
        allow(GROUP, "x-a", principal="User:x-User:*"),
        allow(TOPIC, "x-", PREFIXED, principal),
        allow(TOPIC, "x-_", PREFIXED, principal),
        allow(TOPIC, "__isth", PREFIXED, principal),
        allow(TOPIC, "_", PREFIXED, principal),
        allow(TOPIC, "__consumer_offsets", LITERAL, principal),
    ]
    mapped = counterparts(bindings, mappings)
    assert not mapped.bindings
    assert {told.binding for told in mapped.not_mapped} == set(bindings)


def test_the_follower_takes_nothing_beyond_its_namespaces() -> None:
    mappings = turned(MAPPINGS)
    inside = allow(TOPIC, "b-orders-eu", principal="User:b-app-1")
    assert held(inside, mappings)
    for beyond in (
        inside._replace(principal="User:bob"),
        inside._replace(principal="User:*"),
        inside._replace(resource_name="*"),
        inside._replace(resource_name="other"),
        inside._replace(resource_name="b-", pattern_type=PREFIXED),
        inside._replace(resource_name="", pattern_type=PREFIXED),
        inside._replace(resource_type=CLUSTER),
        deny(TOPIC, "other-", PREFIXED, "User:b-app-1"),
        deny(TOPIC, "*", LITERAL, "User:b-app-1"),
    ):
        assert not held(beyond, mappings), beyond


# --- never widened, by the authorizer's own rule


def _applies(binding: AclBinding, kind: int, name: str, principal: str) -> bool:
    if binding.resource_type != kind or binding.principal not in (principal, "User:*"):
        return False
    if binding.pattern_type == LITERAL:
        return binding.resource_name in (name, "*")
    return name.startswith(binding.resource_name)


def _permitted(bindings: Iterable[AclBinding], kind: int, name: str, principal: str, operation: int) -> bool:
    """As StandardAuthorizer decides: one DENY is enough to refuse, one ALLOW to permit."""
    applying = [each for each in bindings if _applies(each, kind, name, principal) and each.operation in (operation, 2)]
    if any(each.permission == Permission.DENY for each in applying):
        return False
    return any(each.permission == Permission.ALLOW for each in applying)


@pytest.mark.parametrize("seed", seeds(300))
def test_nobody_may_do_more_on_the_target(seed: int) -> None:
    rng = random.Random(seed)
    prefixes = ["", "a", "ab", "a-", "_", "User:", "x"]
    topics = [mapping(ResourceType.TOPIC, rng.choice(prefixes), rng.choice(prefixes))]
    groups = [mapping(ResourceType.CONSUMER_GROUP, rng.choice(prefixes), rng.choice(prefixes))]
    people = [mapping(ResourceType.PRINCIPAL, f"User:{rng.choice(prefixes)}", f"User:{rng.choice(prefixes)}")]
    mappings = (*topics, *groups, *people)
    names = ["a", "ab", "abc", "a-b", "_a", "b", "*", "x", "__isthmus_control", ""]
    users = ["User:*", *(f"User:{name}" for name in ("a", "ab", "x", "a-1", "b", "x*"))]
    bindings = {
        AclBinding(
            rng.choice((TOPIC, GROUP)),
            rng.choice(names[:-1]),
            rng.choice((LITERAL, PREFIXED)),
            rng.choice(users),
            "*",
            rng.choice((2, READ, WRITE)),
            rng.choice((Permission.ALLOW, Permission.ALLOW, Permission.DENY)),
        )
        for _ in range(rng.randint(1, 8))
    }
    target = counterparts(bindings, mappings).bindings
    assert all(held(each, turned(mappings)) for each in target)
    for own in ((topics, TOPIC), (groups, GROUP)):
        for kind in [own[1]]:
            for user in [
                "User:",
                "User:a",
                "User:ab",
                "User:x",
                "User:a-1",
                "User:b",
                "User:abx",
                "User:xa",
                "User:zz",
            ]:
                source_user = people[0].local_name(user) if user in _names_of(people[0]) else None
                for name in (*names, "a-bc", "xa", "xab", "zz"):
                    for operation in (READ, WRITE):
                        if _permitted(target, kind, name, user, operation):
                            source_name = own[0][0].local_name(name)
                            assert source_user is not None, (user, target)
                            assert source_name is not None, (name, target)
                            assert _permitted(bindings, kind, source_name, source_user, operation), (name, user)


class _names_of:
    """The remote namespace of a mapping."""

    def __init__(self, which: NamespaceMapping) -> None:
        self._which = which

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._which.local_name(name) is not None
