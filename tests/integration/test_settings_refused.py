"""An authorizer on the target that keeps the proxy from changing settings: it shows, and goes on once allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)
from support.kafka import AUTHORIZED, unique
from support.links import VERIFICATION, Linked, Side, linked, until, whole
from support.source_topics import alter_topic

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers
USER = "app-2"


class Access:
    """What the target's proxy may do: everything, but for what is denied."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def allow_everything(self) -> None:
        kinds = {
            ResourceType.TOPIC: "*",
            ResourceType.GROUP: "*",
            ResourceType.BROKER: "kafka-cluster",
            ResourceType.TRANSACTIONAL_ID: "*",
        }
        for kind, name in kinds.items():
            self._create(self._binding(kind, name, AclOperation.ALL, AclPermissionType.ALLOW))

    def deny(self, kind: ResourceType, name: str, operation: AclOperation) -> None:
        self._create(self._binding(kind, name, operation, AclPermissionType.DENY))

    def take_back(self, kind: ResourceType, name: str) -> None:
        filter_ = AclBindingFilter(
            kind, name, ResourcePatternType.LITERAL, f"User:{USER}", "*", AclOperation.ANY, AclPermissionType.DENY
        )
        assert self.side.admin(direct=True).delete_acls([filter_])[filter_].result(30)

    def clear(self) -> None:
        every = AclBindingFilter(
            ResourceType.ANY,
            None,
            ResourcePatternType.ANY,
            f"User:{USER}",
            None,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        self.side.admin(direct=True).delete_acls([every])[every].result(30)

    @staticmethod
    def _binding(kind: ResourceType, name: str, operation: AclOperation, permission: AclPermissionType) -> AclBinding:
        return AclBinding(kind, name, ResourcePatternType.LITERAL, f"User:{USER}", "*", operation, permission)

    def _create(self, binding: AclBinding) -> None:
        self.side.admin(direct=True).create_acls([binding])[binding].result(30)


@pytest.fixture(scope="module")
def link(
    authorized_pair: tuple[KafkaCluster, KafkaCluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Linked]:
    """B's proxy logs in."""
    a, b = authorized_pair
    access = Access(Side(b, []))
    access.allow_everything()
    password: Path = tmp_path_factory.mktemp("identity") / "password"
    password.write_text(AUTHORIZED.users[USER])
    password.chmod(0o600)
    identity = {
        "bootstrap_servers": b.bootstrap("SASL_PLAINTEXT"),
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_username": USER,
        "sasl_password_file": str(password),
    }
    try:
        with linked(a, b, b_proxies=[whole(b, cluster=identity)]) as pair:
            pair.b.verify_transactions(True)
            yield pair
    finally:
        access.clear()


@pytest.fixture
def access(link: Linked) -> Access:
    return Access(link.b)


@pytest.mark.one_in_ci("stories", of="settings that are refused")
def test_the_cluster_wide_setting(link: Linked, access: Access) -> None:
    consent = (None, None, "--disable-transaction-verification")
    access.deny(ResourceType.BROKER, "kafka-cluster", AclOperation.ALTER_CONFIGS)

    def refused() -> str:
        try:
            link.attach(*consent, "--dry-run")
        except ProxyFailed as error:
            return str(error)
        return ""

    message = until("the authorizer refuses", refused, 20)
    assert VERIFICATION in message
    assert "AlterConfigs" in message
    with pytest.raises(ProxyFailed, match="AlterConfigs"):
        link.attach(*consent)
    assert not link.b.link(link.name)["mappings"]
    access.take_back(ResourceType.BROKER, "kafka-cluster")
    until("it is attached", lambda: link.attach(*consent), 20)

    # Somebody switches the check on again, and the proxy may not switch it off any more.
    access.deny(ResourceType.BROKER, "kafka-cluster", AclOperation.ALTER_CONFIGS)
    until("the authorizer refuses", refused, 20)
    link.b.verify_transactions(True)

    def told() -> str:
        found = link.b.link(link.name)["transaction_verification"]
        return str(found["message"]) if found["enabled"] and "AlterConfigs" in str(found["message"]) else ""

    assert VERIFICATION in until("the status tells", told, 40)
    access.take_back(ResourceType.BROKER, "kafka-cluster")
    until(
        "it is switched off by itself",
        lambda: link.b.link(link.name)["transaction_verification"]["enabled"] is False,
        30,
    )


@pytest.mark.one_in_ci("stories", of="settings that are refused")
@pytest.mark.parametrize("operation", [AclOperation.ALTER_CONFIGS, AclOperation.DESCRIBE_CONFIGS])
def test_settings_of_a_topic(link: Linked, access: Access, operation: AclOperation) -> None:
    if not link.b.link(link.name)["mappings"]:
        link.attach()
    source, target = link.names("refused")
    link.a.create_topic(source, config={"max.message.bytes": "1000000"}, direct=True)
    link.a.produce(source, [b"first"], direct=True)
    link.wait_end(target, 1)
    access.deny(ResourceType.TOPIC, target, operation)
    alter_topic(link.a, source, {"max.message.bytes": "2000000"})
    missing = operation.name.title().replace("_", "")
    until("it shows", lambda: link.b.reason(link.name, target)[0] == "TARGET_REFUSES_SETTINGS", 20)
    message = link.b.reason(link.name, target)[1]
    assert missing in message, message
    assert target in message
    if operation is AclOperation.ALTER_CONFIGS:
        assert "max.message.bytes" in message
    link.a.produce(source, [b"records go on"], direct=True)
    link.wait_end(target, 2)
    assert link.b.topic_config(target)["max.message.bytes"] == "1000000"
    access.take_back(ResourceType.TOPIC, target)
    until("it is followed", lambda: link.b.topic_config(target)["max.message.bytes"] == "2000000", 30)
    until("it shows no more", lambda: link.b.reason(link.name, target)[0] is None, 20)


@pytest.mark.one_in_ci("stories", of="settings that are refused")
@pytest.mark.parametrize("step", ["promote", "failover"])
def test_one_setting_of_one_topic_keeps_nobody_from_becoming_writable(link: Linked, access: Access, step: str) -> None:
    local, remote = unique("local-") + "-", unique("remote-") + "-"
    link.attach(local, remote)
    for name in "abc":
        link.a.create_topic(local + name, config={"retention.ms": "86400000"}, direct=True)
        link.a.produce(local + name, [b"x"], direct=True)
        link.wait_end(remote + name, 1)
    until("its state is known", lambda: link.b.partition(link.name, remote + "c") is not None)
    access.deny(ResourceType.TOPIC, remote + "b", AclOperation.ALTER_CONFIGS)
    command = ("link", step, link.name, "--local", remote)

    def refused(*more: str) -> list[str]:
        (namespace,) = link.b.proxy.cli(*command, *more)["namespaces"]
        assert namespace["promoted"] is not ("--dry-run" in more)
        return list(namespace["settings_refused"])

    (planned,) = until("the authorizer refuses", lambda: refused("--dry-run"), 20)
    assert all(word in planned for word in (remote + "b", "retention.ms=86400000", "ALLOW AlterConfigs")), planned
    assert refused(*(["--yes"] if step == "failover" else [])) == [planned]
    assert [link.b.topic_config(remote + name)["retention.ms"] for name in "abc"] == ["86400000", "-1", "86400000"]
    told = link.b.proxy.get(f"/v1/topics/{remote}b")
    assert (told["state"], told["reason"]) == ("detached", "TARGET_REFUSES_SETTINGS")
    assert told["message"] in link.b.link(link.name)["settings_kept"]
    access.take_back(ResourceType.TOPIC, remote + "b")
    alter_topic(link.b, remote + "b", {"retention.ms": "86400000"})
    until("the other one shows still", lambda: "retention" not in str(link.b.link(link.name)["settings_kept"]), 20)
    assert "message.timestamp.after.max.ms=" in str(link.b.link(link.name)["settings_kept"])
    alter_topic(link.b, remote + "b", {"message.timestamp.after.max.ms": "3600000"})
    until("it shows no more", lambda: not link.b.link(link.name)["settings_kept"], 20)
