"""User story: an operator reserves namespaces of consumer groups and of principals, and nobody makes, deletes or
changes anything in them; groups that exist go on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import GroupAuthorizationFailedError
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from support.kafka import unique
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

GROUP_AUTHORIZATION_FAILED = KafkaError.GROUP_AUTHORIZATION_FAILED
POLICY_VIOLATION = KafkaError.POLICY_VIOLATION
REASON = "it moves to another cluster"

_numbers = itertools.count(1)


class Setup(NamedTuple):
    kafka: KafkaCluster
    proxy: ProxyProcess
    admin: AdminClient
    direct: AdminClient
    """An administrator that bypasses the proxy."""
    topic: str

    @property
    def client(self) -> dict[str, str]:
        return {"bootstrap.servers": self.proxy.bootstrap}

    def tool(self, name: str, *arguments: str) -> str:
        """What one of Kafka's own tools prints, through the proxy."""
        done = self.kafka.tool(name, "--bootstrap-server", self.proxy.bootstrap, *arguments, check=False)
        return done.stdout + done.stderr

    def groups(self) -> set[str]:
        return {group.group_id for group in self.direct.list_consumer_groups().result(30).valid}

    def committed(self, group: str) -> int:
        wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(self.topic, 0)])
        [found] = self.direct.list_consumer_group_offsets([wanted])[group].result(30).topic_partitions
        return int(found.offset)


@pytest.fixture(scope="module")
def setup(authorized_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Setup]:
    kafka, _ = authorized_pair
    with ProxyProcess(kafka.bootstrap_servers, name="reserving", extra={"proxy": {"lease_s": 3.0}}) as proxy:
        direct = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        topic = unique("records-")
        direct.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
        client = {"bootstrap.servers": proxy.bootstrap}
        producer = Producer(client)
        for number in range(100):
            producer.produce(topic, str(number))
        assert producer.flush(30) == 0
        yield Setup(kafka, proxy, AdminClient(client), direct, topic)


@contextmanager
def reserved(setup: Setup, kind: str, prefix: str) -> Iterator[None]:
    created = setup.proxy.cli("namespace", "create", prefix, "--type", kind, "--reserved", "--reason", REASON)
    assert created["state"] == "reserved"
    try:
        yield
    finally:
        setup.proxy.cli("namespace", "delete", prefix, "--type", kind)


def consume(setup: Setup, group: str, count: int, **settings: Any) -> int:
    """Read records as a member of a group and commit; returns the next offset. Raises KafkaException."""
    chosen = {"group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = Consumer(setup.client | chosen | {key.replace("_", "."): value for key, value in settings.items()})
    consumer.subscribe([setup.topic])
    read = 0
    deadline = time.monotonic() + 30
    try:
        while read < count:
            assert time.monotonic() < deadline
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error() is not None:
                raise KafkaException(message.error())
            read += 1
        [committed] = consumer.commit(message, asynchronous=False)
        return int(committed.offset)
    finally:
        consumer.close()


def code_of(work: Callable[[], Any]) -> tuple[int, str]:
    """The Kafka error code and message that a call ends with."""
    with pytest.raises(KafkaException) as raised:
        work()
    error = raised.value.args[0]
    return error.code(), error.str()


def test_groups_that_exist_go_on_and_no_other_is_made(setup: Setup) -> None:
    prefix = f"held-{next(_numbers)}-"
    old, new = f"{prefix}old", f"{prefix}new"
    assert consume(setup, old, 5) == 5
    with reserved(setup, "consumer-group", prefix):
        assert consume(setup, old, 5) == 10
        assert setup.committed(old) == 10
        assert code_of(lambda: consume(setup, new, 1))[0] == GROUP_AUTHORIZATION_FAILED
        code, message = code_of(lambda: consume(setup, new, 1, group_protocol="consumer"))
        assert code == KafkaError._FATAL
        assert "Group authorization failed" in message

        async def aiokafka_joins() -> None:
            consumer = AIOKafkaConsumer(setup.topic, bootstrap_servers=setup.proxy.bootstrap, group_id=new)
            try:
                await consumer.start()
            finally:
                await consumer.stop()

        with pytest.raises(GroupAuthorizationFailedError):
            asyncio.run(aiokafka_joins())
        java = setup.tool("kafka-console-consumer", *("--topic", setup.topic, "--group", new, "--timeout-ms", "20000"))
        assert "GroupAuthorizationException" in java, java
        # Positions from outside of the group: those of an existing one move, and make no other.
        positions = [TopicPartition(setup.topic, 0, 3)]
        moved = setup.admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(old, positions)])[old].result(30)
        assert moved.topic_partitions[0].error is None
        assert setup.committed(old) == 3
        made = setup.admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(new, positions)])[new].result(30)
        assert made.topic_partitions[0].error.code() == GROUP_AUTHORIZATION_FAILED
        # Nothing is deleted.
        deleted = setup.admin.delete_consumer_groups([old])[old]
        assert code_of(lambda: deleted.result(30))[0] == POLICY_VIOLATION
        java = setup.tool("kafka-consumer-groups", "--delete-offsets", "--group", old, "--topic", setup.topic)
        assert "PolicyViolationException" in java, java
        assert setup.committed(old) == 3
        assert new not in setup.groups()
        assert "group request refused" in setup.proxy.log
    assert consume(setup, new, 1) == 1
    setup.admin.delete_consumer_groups([old])[old].result(30)
    assert old not in setup.groups()


def test_every_request_that_makes_a_group(setup: Setup) -> None:
    prefix = f"held-{next(_numbers)}-"
    new = f"{prefix}new"
    member = {"group_id": new, "member_id": "AAAAAAAAAAAAAAAAAAAAAA", "member_epoch": 0}
    transaction = {"transactional_id": unique("txn-"), "producer_id": 1, "producer_epoch": 0, "group_id": new}
    positions = [{"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}]
    topics = [{"name": setup.topic, "partitions": positions}]
    share = {"topic_name": setup.topic, "partitions": [{"partition_index": 0, "start_offset": 0}]}
    requests: list[tuple[ApiKey, int, dict[str, Any]]] = [
        (ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, {**member, "rebalance_timeout": 5000, "subscribed_topic_names": ["t"]}),
        (ApiKey.SHARE_GROUP_HEARTBEAT, 1, {**member, "subscribed_topic_names": ["t"]}),
        (ApiKey.STREAMS_GROUP_HEARTBEAT, 0, {**member, "rebalance_timeout": 5000, "topology": None}),
        (ApiKey.ALTER_SHARE_GROUP_OFFSETS, 0, {"group_id": new, "topics": [share]}),
        (ApiKey.ADD_OFFSETS_TO_TXN, 4, transaction),
    ]
    with reserved(setup, "consumer-group", prefix), Wire(setup.proxy.bootstrap) as wire:
        for api_key, version, values in requests:
            answer = wire.request(api_key, version, values)
            assert answer.error_code == GROUP_AUTHORIZATION_FAILED, (api_key.name, answer)
            if hasattr(answer, "error_message"):
                assert f"namespace '{prefix}'" in answer.error_message
                assert REASON in answer.error_message
        for version in (2, 3, 5):
            [topic] = wire.request(ApiKey.TXN_OFFSET_COMMIT, version, {**transaction, "topics": topics}).topics
            assert [int(each.error_code) for each in topic.partitions] == [GROUP_AUTHORIZATION_FAILED]
        assert not any(group.startswith(prefix) for group in setup.groups())


def acl(principal: str, topic: str, operation: AclOperation = AclOperation.READ) -> AclBinding:
    pattern, allow = ResourcePatternType.LITERAL, AclPermissionType.ALLOW
    return AclBinding(ResourceType.TOPIC, topic, pattern, principal, "*", operation, allow)


def matching(principal: str | None = None, topic: str | None = None) -> AclBindingFilter:
    every = (AclOperation.ANY, AclPermissionType.ANY)
    return AclBindingFilter(ResourceType.TOPIC, topic, ResourcePatternType.ANY, principal, None, *every)


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_principals_stay_as_they_are(setup: Setup) -> None:
    number = next(_numbers)
    prefix, user, other = f"User:team{number}-", f"team{number}-1", f"free{number}"
    topic, shared = unique("topic-"), unique("topic-")
    for binding in (acl(f"User:{user}", shared), acl(f"User:{other}", shared), acl(f"User:{other}", topic)):
        setup.direct.create_acls([binding])[binding].result(30)
    scram = UserScramCredentialUpsertion(user, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), b"old")
    setup.direct.alter_user_scram_credentials([scram])[user].result(30)

    def bindings() -> set[tuple[str, str]]:
        found = setup.direct.describe_acls(matching()).result(30)
        return {(each.principal, each.name) for each in found if each.name in (topic, shared)}

    before = bindings()
    assert len(before) == 3
    with reserved(setup, "principal", prefix):
        new = acl(f"User:{user}", topic)
        code, message = code_of(lambda: setup.admin.create_acls([new])[new].result(30))
        assert code == POLICY_VIOLATION
        assert f"User:{user} is in the reserved namespace '{prefix}': {REASON}" in message
        for wanted in (matching(f"User:{user}"), matching(topic=shared), matching()):
            deleted = setup.admin.delete_acls([wanted])[wanted]
            code, message = code_of(lambda deleted=deleted: deleted.result(30))  # type: ignore[misc]
            assert code == POLICY_VIOLATION
            assert f"User:{user}" in message
        assert bindings() == before
        removed = matching(f"User:{other}", shared)
        assert len(setup.admin.delete_acls([removed])[removed].result(30)) == 1
        own = matching(topic=topic)  # leaves the principal open, and matches none of the namespace's
        assert len(setup.admin.delete_acls([own])[own].result(30)) == 1
        for change in (
            UserScramCredentialUpsertion(user, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), b"new"),
            UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_256),
        ):
            altered = setup.admin.alter_user_scram_credentials([change])[user]
            code, message = code_of(lambda altered=altered: altered.result(30))  # type: ignore[misc]
            assert code == POLICY_VIOLATION
            assert REASON in message
        described = setup.direct.describe_user_scram_credentials([user])[user].result(30)
        assert [each.mechanism for each in described.scram_credential_infos] == [ScramMechanism.SCRAM_SHA_256]
        java = setup.tool(
            "kafka-configs",
            "--alter",
            "--entity-type",
            "users",
            "--entity-name",
            user,
            "--add-config",
            "producer_byte_rate=1",
        )
        assert "PolicyViolationException" in java, java
        assert REASON in java
        with Wire(setup.proxy.bootstrap) as wire:
            owner = {"owner_principal_type": "User", "owner_principal_name": user, "renewers": []}
            token = wire.request(ApiKey.CREATE_DELEGATION_TOKEN, 3, {**owner, "max_lifetime": -1})
            assert token.error_code == POLICY_VIOLATION
    setup.admin.alter_user_scram_credentials([UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_256)])[
        user
    ].result(30)
    everything = matching(topic=shared)
    assert len(setup.admin.delete_acls([everything])[everything].result(30)) == 1
