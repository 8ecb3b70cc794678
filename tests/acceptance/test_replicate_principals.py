"""User story: what an application's principals may do on the source, they may do on the target, and nothing more.

Both clusters have an authorizer. Whoever does not log in may do anything: so do the proxies and administrators here.
Applications log in at the brokers, to see what they may do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from support.kafka import AUTHORIZED
from support.links import Linked, Side, linked, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers

SOON_S = 2.0
USER = "app-1"
READ, WRITE, ALL, ANY = AclOperation.READ, AclOperation.WRITE, AclOperation.ALL, AclOperation.ANY
ALLOW, DENY = AclPermissionType.ALLOW, AclPermissionType.DENY
TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP
LITERAL, PREFIXED = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED
EVERY = AclBindingFilter(ResourceType.ANY, None, ResourcePatternType.ANY, None, None, ANY, AclPermissionType.ANY)


@pytest.fixture
def link(authorized_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """A link between two clusters with authorizers, and an empty list of bindings at both."""
    for kafka in authorized_pair:
        side = Side(kafka, [])
        side.admin(direct=True).delete_acls([EVERY])[EVERY].result(30)
    with linked(*authorized_pair) as pair:
        yield pair


def acl(
    name: str,
    operation: AclOperation = READ,
    permission: AclPermissionType = ALLOW,
    pattern: ResourcePatternType = LITERAL,
    kind: ResourceType = TOPIC,
    principal: str = f"User:{USER}",
) -> AclBinding:
    return AclBinding(kind, name, pattern, principal, "*", operation, permission)


def grant(side: Side, *bindings: AclBinding) -> None:
    for created in side.admin().create_acls(list(bindings)).values():
        created.result(30)


def revoke(side: Side, *bindings: AclBinding) -> None:
    filters = [
        AclBindingFilter(
            each.restype,
            each.name,
            each.resource_pattern_type,
            each.principal,
            each.host,
            each.operation,
            each.permission_type,
        )
        for each in bindings
    ]
    for deleted in side.admin().delete_acls(filters).values():
        assert len(deleted.result(30)) == 1


def bindings(side: Side) -> set[tuple[str, str, str, str, str]]:
    """(principal, permission, operation, pattern, resource) of each binding, as the brokers have them."""
    return {
        (
            each.principal,
            each.permission_type.name,
            each.operation.name,
            each.resource_pattern_type.name,
            f"{each.restype.name}:{each.name}",
        )
        for each in side.admin(direct=True).describe_acls(EVERY).result(30)
    }


def soon(side: Side, wanted: set[tuple[str, str, str, str, str]]) -> None:
    """Within two seconds these are all bindings (and what this machine takes to look)."""
    started = time.monotonic()
    until(f"bindings {wanted}", lambda: bindings(side) == wanted, 20, 0.02)
    assert time.monotonic() - started < SOON_S + 0.5


def attach_principals(link: Linked, local: str = "User:app-", remote: str = "User:app-") -> None:
    attached = ("--type", "principal", "--local", local, "--remote", remote, "--role", "leader")
    link.a.proxy.cli("link", "attach", link.name, *attached)


def as_user(side: Side) -> dict[str, str]:
    """Settings of an application that logs in at the brokers themselves."""
    return {
        "bootstrap.servers": side.kafka.bootstrap("SASL_PLAINTEXT"),
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": AUTHORIZED.users[USER],
    }


def may_read(side: Side, topic: str) -> bool:
    """Whether the application sees the topic, as who may read it does."""
    error = AdminClient(as_user(side)).list_topics(topic, timeout=20).topics[topic].error
    assert error is None or error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED, error
    return error is None


def test_principals_may_do_the_same_on_the_target(link: Linked) -> None:
    topic = "clicks"
    link.a.create_topic(link.local + topic)
    link.a.produce(link.local + topic, [b"first"])
    link.attach()
    link.wait_end(link.remote + topic, 1)
    grant(link.a, acl(link.local + topic), acl(link.local, WRITE, DENY, PREFIXED))
    assert may_read(link.a, link.local + topic)
    assert not may_read(link.b, link.remote + topic)
    attach_principals(link)
    read = (f"User:{USER}", "ALLOW", "READ", "LITERAL", f"TOPIC:{link.remote}{topic}")
    write = (f"User:{USER}", "DENY", "WRITE", "PREFIXED", f"TOPIC:{link.remote}")
    soon(link.b, {read, write})
    until("the broker lets the application read", lambda: may_read(link.b, link.remote + topic), 5)

    # Changes and deletions follow; what is not mapped is told.
    grant(link.a, acl("elsewhere"), acl(link.local + topic, AclOperation.DESCRIBE_CONFIGS))
    described = (f"User:{USER}", "ALLOW", "DESCRIBE_CONFIGS", "LITERAL", f"TOPIC:{link.remote}{topic}")
    soon(link.b, {read, write, described})
    until("the source knows it", lambda: link.a.link(link.name)["acls"][0]["state"] == "Following")
    [told] = link.a.link(link.name)["acls"]
    assert (told["role"], told["bindings"]) == ("leader", 3)
    assert [each["binding"] for each in told["not_mapped"]] == [f"allow User:{USER} read topic 'elsewhere'"]
    assert "no mapping" in told["not_mapped"][0]["reason"]
    [told] = link.b.link(link.name)["acls"]
    assert (told["role"], told["state"], told["bindings"]) == ("follower", "Following", 3)
    revoke(link.a, acl(link.local + topic))
    soon(link.b, {write, described})
    until("the broker keeps it out", lambda: not may_read(link.b, link.remote + topic), 5)

    # Nobody else changes them on the target, and what others made there stays.
    with pytest.raises(KafkaException) as refused:
        grant(link.b, acl(link.remote + topic))
    assert refused.value.args[0].code() == KafkaError.POLICY_VIOLATION
    assert f"it follows over link {link.name}" in refused.value.args[0].str()
    grant(link.b, acl(link.remote + topic, principal="User:local"))
    local = ("User:local", "ALLOW", "READ", "LITERAL", f"TOPIC:{link.remote}{topic}")
    revoke(link.a, acl(link.local, WRITE, DENY, PREFIXED), acl(link.local + topic, AclOperation.DESCRIBE_CONFIGS))
    soon(link.b, {local})


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_renamed_principals_killed_proxies_and_detaching(link: Linked) -> None:
    link.attach()
    grant(link.a, acl(link.local + "one"), acl(link.local + "two"))
    attach_principals(link, "User:app-", "User:b-app-")

    def there(name: str) -> tuple[str, str, str, str, str]:
        return ("User:b-app-1", "ALLOW", "READ", "LITERAL", f"TOPIC:{link.remote}{name}")

    soon(link.b, {there("one"), there("two")})
    # Both proxies die, and meanwhile the source changes at its brokers.
    for side in (link.a, link.b):
        side.proxy.kill()
    direct = Side(link.a.kafka, [])
    three = acl(link.local + "three")
    direct.admin(direct=True).create_acls([three])[three].result(30)
    gone = AclBindingFilter(TOPIC, link.local + "one", LITERAL, None, None, ANY, AclPermissionType.ANY)
    assert len(direct.admin(direct=True).delete_acls([gone])[gone].result(30)) == 1
    for side in (link.a, link.b):
        side.proxy.start()
    until("the target has them", lambda: bindings(link.b) == {there("two"), there("three")}, 30)
    # Detached, they stay, reserved, until somebody says otherwise.
    link.a.proxy.cli("link", "detach", link.name, "--type", "principal", "--local", "User:app-")
    revoke(link.a, acl(link.local + "two"))
    stranger = acl(link.remote + "two", principal="User:b-app-1")
    with pytest.raises(KafkaException) as refused:
        revoke(link.b, stranger)
    assert refused.value.args[0].code() == KafkaError.POLICY_VIOLATION
    assert bindings(link.b) == {there("two"), there("three")}
    link.b.proxy.cli("namespace", "alter", "User:b-app-", "--type", "principal", "--no-reserved")
    revoke(link.b, stranger)
    soon(link.b, {there("three")})  # each broker knows a little later


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_a_cluster_without_an_authorizer(
    authorized_pair: tuple[KafkaCluster, KafkaCluster], kafka_pair: tuple[KafkaCluster, KafkaCluster]
) -> None:
    with linked(authorized_pair[0], kafka_pair[1]) as link:
        for dry_run in (("--dry-run",), ()):
            attached = ("--type", "principal", "--local", "User:app-", "--remote", "User:app-", "--role", "leader")
            with pytest.raises(ProxyFailed, match="has no authorizer"):
                link.a.proxy.cli("link", "attach", link.name, *attached, *dry_run)
        assert link.a.link(link.name)["mappings"] == link.b.link(link.name)["mappings"] == []
