"""TLS and SASL through the proxy, the proxy's own identity, and secrets that appear nowhere."""

from __future__ import annotations

import base64
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from support.kafka import SECURITY, unique
from support.links import until
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster, Security, ToolFailed
from isthmus_bench.kafka.security import MECHANISMS, Mechanism, client_jaas
from isthmus_bench.proxies import ProxyFailed, ProxyProcess
from isthmus_plugins.capture.files import SEALED
from isthmus_protocol.schema import ApiKey
from isthmus_spark.blocks import read_file

pytestmark = pytest.mark.brokers

REAUTHENTICATION_MS: Final = 4_000
"""Everybody must log in again on open connections before this has passed (KIP-368)."""


@pytest.fixture(scope="module")
def brokers() -> Iterator[KafkaCluster]:
    """One broker with an authorizer. On its SSL listener, clients without a certificate are anonymous."""
    security = Security(**{**SECURITY.model_dump(), "client_certificates": "requested"})
    settings = {"connections.max.reauth.ms": str(REAUTHENTICATION_MS)}
    with KafkaCluster(name="secured", listeners=("SASL_SSL", "SSL"), security=security, settings=settings) as cluster:
        cluster.authority.issue("proxy")
        yield cluster


@pytest.fixture(scope="module")
def password(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secrets") / "password"
    file.write_text("admin-secret\n")
    return file


@pytest.fixture(scope="module")
def proxy(brokers: KafkaCluster, password: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """TLS towards clients; itself it is ``admin``, with a password from a file."""
    tls = brokers.authority.directory
    extra = {
        "proxy": {"log_level": "debug"},
        "plugins": {"enabled": ["reservation", "replication", "capture"]},
        "data": {"directory": str(tmp_path_factory.mktemp("data"))},
        "cluster": {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_username": "admin",
            "sasl_password_file": str(password),
            "ssl_cafile": str(tls / "ca.crt"),
        },
        "client_listener": {"tls_certfile": str(tls / "proxy.crt"), "tls_keyfile": str(tls / "proxy.key")},
    }
    with ProxyProcess(brokers.bootstrap_servers, name="secured", extra=extra) as process:
        yield process


def client_of(
    brokers: KafkaCluster, proxy: ProxyProcess, user: str, mechanism: Mechanism = "SCRAM-SHA-512", **more: Any
) -> dict[str, Any]:
    """Settings of a confluent-kafka client of the proxy."""
    settings = brokers.librdkafka_properties(user=user, mechanism=mechanism)
    chosen = {key if key == "error_cb" else key.replace("_", "."): value for key, value in more.items()}
    return settings | {"bootstrap.servers": proxy.bootstrap} | chosen


def create_topic(settings: dict[str, Any]) -> str:
    topic = unique("topic-")
    admin = AdminClient(settings)
    admin.create_topics([NewTopic(topic, 1)])[topic].result(30)
    return topic


def allow(settings: dict[str, Any], principal: str, topic: str, group: str = "*") -> None:
    """Let a principal write and read a topic, in a group."""

    def rule(kind: ResourceType, name: str, operation: AclOperation) -> AclBinding:
        pattern = ResourcePatternType.LITERAL
        return AclBinding(kind, name, pattern, principal, "*", operation, AclPermissionType.ALLOW)

    admin = AdminClient(settings)
    rules = [
        rule(ResourceType.TOPIC, topic, AclOperation.WRITE),
        rule(ResourceType.TOPIC, topic, AclOperation.READ),
        rule(ResourceType.GROUP, group, AclOperation.READ),
    ]
    for created in admin.create_acls(rules).values():
        created.result(30)


def produce(settings: dict[str, Any], topic: str, count: int = 10) -> list[KafkaError]:
    """What went wrong with each record."""
    errors: list[KafkaError] = []
    producer = Producer(settings | {"message.timeout.ms": 10_000})
    for number in range(count):
        producer.produce(topic, str(number), on_delivery=lambda error, _: error and errors.append(error))
    assert producer.flush(30) == 0
    return errors


def consume(settings: dict[str, Any], topic: str, count: int) -> list[int]:
    consumer = Consumer(settings | {"group.id": unique("group-"), "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    values: list[int] = []
    try:
        while len(values) < count:
            message = consumer.poll(20)
            assert message is not None
            assert message.error() is None, message.error()
            values.append(int(message.value()))
    finally:
        consumer.close()
    return values


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_acls_apply_to_the_clients_own_principal(
    brokers: KafkaCluster, proxy: ProxyProcess, mechanism: Mechanism
) -> None:
    admin = client_of(brokers, proxy, "admin", mechanism)
    alice, bob = (client_of(brokers, proxy, user, mechanism) for user in ("alice", "bob"))
    topic = create_topic(admin)
    assert {error.code() for error in produce(alice, topic)} == {KafkaError.TOPIC_AUTHORIZATION_FAILED}
    allow(admin, "User:alice", topic)
    assert produce(alice, topic) == []
    assert consume(alice, topic, 10) == list(range(10))
    assert {error.code() for error in produce(bob, topic)} == {KafkaError.TOPIC_AUTHORIZATION_FAILED}
    with pytest.raises(KafkaException) as refused:
        create_topic(bob)
    assert refused.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_wrong_password_is_told_as_the_broker_tells_it(
    brokers: KafkaCluster, proxy: ProxyProcess, mechanism: Mechanism
) -> None:
    def errors_of(bootstrap: str) -> set[str]:
        told: list[KafkaError] = []
        settings = client_of(brokers, proxy, "alice", mechanism, sasl_password="guess", error_cb=told.append)
        admin = AdminClient(settings | {"bootstrap.servers": bootstrap, "log_level": 0})
        while not any(error.code() == KafkaError._AUTHENTICATION for error in told):
            admin.poll(5)
        return {error.str().split("SASL")[1].split("(after")[0] for error in told if "SASL" in error.str()}

    expected = errors_of(brokers.bootstrap_servers)
    assert "uthentication failed" in str(expected)
    assert errors_of(proxy.bootstrap) == expected


def test_who_may_not_describe_what_is_reserved_is_not_told_that_it_is(
    brokers: KafkaCluster, proxy: ProxyProcess
) -> None:
    """alice may create topics and describe everything, bob may create topics alone."""
    admin = AdminClient(client_of(brokers, proxy, "admin"))
    clients = {user: AdminClient(client_of(brokers, proxy, user)) for user in ("alice", "bob")}
    prefix = unique("reserved-")
    topic, group = f"{prefix}topic", f"{prefix}group"
    admin.create_topics([NewTopic(topic, 1)])[topic].result(30)
    literal, cluster = ResourcePatternType.LITERAL, ResourceType.BROKER
    rules = [(cluster, "kafka-cluster", user, AclOperation.CREATE) for user in clients]
    rules += [(kind, "*", "alice", AclOperation.DESCRIBE) for kind in (ResourceType.TOPIC, ResourceType.GROUP)]
    rules.append((cluster, "kafka-cluster", "alice", AclOperation.DESCRIBE))
    bindings = [
        AclBinding(kind, name, literal, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
        for kind, name, user, operation in rules
    ]
    for created in admin.create_acls(bindings).values():
        created.result(30)
    reason = "because-of-a-merger"
    for kind, name in (("topic", prefix), ("consumer-group", prefix), ("principal", f"User:{prefix}")):
        proxy.cli("namespace", "create", name, "--type", kind, "--reserved", "--reason", reason)

    def told(user: str) -> dict[str, tuple[int, str]]:
        """By request, the code and the words of its answer."""
        client = clients[user]
        binding = AclBinding(
            ResourceType.TOPIC, "t", literal, f"User:{prefix}app", "*", AclOperation.READ, AclPermissionType.ALLOW
        )
        new = f"{prefix}new"
        futures: dict[str, Any] = {
            "create": client.create_topics([NewTopic(topic, 1)])[topic],
            "create a new one": client.create_topics([NewTopic(new, 1)])[new],
            "delete": client.delete_topics([topic])[topic],
            "delete the group": client.delete_consumer_groups([group])[group],
            "allow": client.create_acls([binding])[binding],
        }
        answers = {}
        for what, future in futures.items():
            with pytest.raises(KafkaException) as refused:
                future.result(30)
            error = refused.value.args[0]
            answers[what] = error.code(), error.str()
        return answers

    alice, bob = told("alice"), told("bob")
    assert {what: code for what, (code, _) in alice.items()} == {
        "create": KafkaError.TOPIC_ALREADY_EXISTS,
        "create a new one": KafkaError.POLICY_VIOLATION,
        "delete": KafkaError.POLICY_VIOLATION,
        "delete the group": KafkaError.POLICY_VIOLATION,
        "allow": KafkaError.POLICY_VIOLATION,
    }
    assert all(reason in alice[what][1] for what in ("create a new one", "allow")), "where librdkafka gets words"
    assert {what: code for what, (code, _) in bob.items()} == {
        "create": KafkaError.TOPIC_AUTHORIZATION_FAILED,
        "create a new one": KafkaError.TOPIC_AUTHORIZATION_FAILED,
        "delete": KafkaError.TOPIC_AUTHORIZATION_FAILED,
        "delete the group": KafkaError.GROUP_AUTHORIZATION_FAILED,
        "allow": KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
    assert not any(reason in words or prefix in words for _, words in bob.values())
    assert reason in proxy.log, "what bob is not told is in the log"


def principals(proxy: ProxyProcess, topic: str) -> Counter[str]:
    """Who has written to a captured topic, and how often."""
    data = tomllib.loads(proxy.config_path.read_text())["data"]["directory"]
    files = sorted((Path(data) / "capture").rglob(f"*{SEALED}"))
    rows = [row for file in files for batch in read_file(file) for row in batch.to_pylist()]
    return Counter(row["principal"] for row in rows if row["api_key"] == ApiKey.PRODUCE and row["topic"] == topic)


def test_captured_traffic_says_who_it_was(brokers: KafkaCluster, proxy: ProxyProcess) -> None:
    topic = create_topic(client_of(brokers, proxy, "admin"))
    before = Producer(client_of(brokers, proxy, "admin", "PLAIN") | {"message.timeout.ms": 10_000})
    before.produce(topic, "0")
    assert before.flush(30) == 0
    proxy.cli("namespace", "create", topic)
    proxy.cli("plugin", "enable", "capture", "--namespace", topic, "--set", "roll_s=1")
    users = {mechanism: client_of(brokers, proxy, "alice", mechanism) for mechanism in MECHANISMS}
    allow(client_of(brokers, proxy, "admin"), "User:alice", topic)
    for settings in users.values():
        assert produce(settings, topic, 1) == []
    before.produce(topic, "1")
    assert before.flush(30) == 0

    wanted = {"User:alice": len(users), "User:admin": 1}
    until("all are there, who was there before, too", lambda: principals(proxy, topic) == wanted)
    proxy.cli("plugin", "disable", "capture", "--namespace", topic)


def test_java(brokers: KafkaCluster, proxy: ProxyProcess, tmp_path: Path) -> None:
    admin = client_of(brokers, proxy, "admin")
    topic, group = create_topic(admin), unique("group-")
    allow(admin, "User:alice", topic, group)

    def config(user: str, **changed: str) -> str:
        properties = brokers.client_properties(user=user) | {"bootstrap.servers": proxy.bootstrap} | changed
        path = tmp_path / f"{user}.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        return str(path)

    def run(tool: str, *arguments: str, **more: Any) -> str:
        return brokers.tool(tool, "--bootstrap-server", proxy.bootstrap, *arguments, **more).stdout

    alice = config("alice")
    lines = [str(number) for number in range(20)]
    run("kafka-console-producer", "--topic", topic, "--command-config", alice, stdin="\n".join(lines) + "\n")
    options = ("--from-beginning", "--max-messages", "20", "--timeout-ms", "30000", "--group", group)
    read = run("kafka-console-consumer", "--topic", topic, *options, "--command-config", alice)
    assert read.splitlines() == lines
    wrong = config("bob", **{"sasl.jaas.config": client_jaas("SCRAM-SHA-512", "bob", "guess")})
    with pytest.raises(ToolFailed, match="SaslAuthenticationException: Authentication failed during authentication"):
        run("kafka-topics", "--list", "--command-config", wrong)


def test_clients_log_in_again_on_open_connections(brokers: KafkaCluster, proxy: ProxyProcess) -> None:
    """A broker closes a connection that it gets a request on after the login has run out."""
    admin = client_of(brokers, proxy, "admin")
    topic = create_topic(admin)
    closed: list[KafkaError] = []
    producer = Producer(client_of(brokers, proxy, "admin", error_cb=closed.append) | {"linger.ms": 0})
    delivered: list[KafkaError | None] = []
    deadline = time.monotonic() + 1.5 * REAUTHENTICATION_MS / 1000
    while time.monotonic() < deadline:
        producer.produce(topic, "x", on_delivery=lambda error, _: delivered.append(error))
        producer.poll(0)
        time.sleep(0.1)
    assert producer.flush(30) == 0
    assert set(delivered) == {None}
    assert closed == []
    # The proxy's own connections lived through it, too.
    assert proxy.get("/v1/status")["ready"]


def test_a_password_file_that_is_away_while_it_is_replaced_ends_nothing(
    brokers: KafkaCluster, proxy: ProxyProcess, password: Path
) -> None:
    """The broker ends the proxy's connections now and then (KIP-368): each new one reads the file."""
    settings = client_of(brokers, proxy, "admin")
    topic = create_topic(settings)
    text, said = password.read_text(), len(proxy.log)
    password.unlink()
    try:
        until("a connection needs it", lambda: f"{password} cannot be read" in proxy.log[said:])
    finally:
        password.write_text(text)
    assert produce(settings, topic) == []
    until("all goes on", lambda: proxy.get("/v1/status")["ready"])
    metrics = httpx.get(f"{proxy.url}/metrics", trust_env=False).text
    assert "isthmus_tasks_failing 0.0" in metrics
    assert "isthmus_task_failures_total{" not in metrics


def test_tls_that_does_not_fit(brokers: KafkaCluster, proxy: ProxyProcess) -> None:
    with Wire(proxy.bootstrap) as plain, pytest.raises(ConnectionError):
        plain.request(ApiKey.API_VERSIONS, 0, {})
    told: list[KafkaError] = []
    settings = client_of(brokers, proxy, "alice", error_cb=told.append) | {"log_level": 0}
    del settings["ssl.ca.location"]
    client = AdminClient(settings)
    while not any(error.code() == KafkaError._SSL for error in told):
        client.poll(5)
    assert "certificate verify failed" in str(told)


@pytest.mark.one_in_ci("stories", of="TLS of a proxy")
def test_plain_text_towards_clients_and_secrets_from_the_environment(
    brokers: KafkaCluster, proxy: ProxyProcess
) -> None:
    proxy.stop()
    extra = {
        "cluster": {
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "PLAIN",
            "sasl_username": "admin",
            "sasl_password_env": "KAFKA_PASSWORD",
            "control_key_env": "CONTROL_KEY",
            "ssl_cafile": str(brokers.authority.ca_file),
        }
    }
    secrets = {"KAFKA_PASSWORD": "admin-secret", "CONTROL_KEY": "5a" * 32}
    try:
        with ProxyProcess(brokers.bootstrap_servers, name="secured", extra=extra, environment=secrets) as plain:
            settings = client_of(brokers, plain, "admin", security_protocol="SASL_PLAINTEXT")
            topic = create_topic(settings)
            assert produce(settings, topic) == []
            assert consume(settings, topic, 10) == list(range(10))
            assert leaks(plain, *secrets.values()) == []
        missing = ProxyProcess(brokers.bootstrap_servers, name="secured", extra=extra)
        try:
            with pytest.raises(ProxyFailed, match=r"cluster\.sasl_password_env"):
                missing.start()
        finally:
            missing.close()
        denied = ProxyProcess(
            brokers.bootstrap_servers, name="secured", extra=extra, environment=secrets | {"KAFKA_PASSWORD": "guess42"}
        )
        try:
            with pytest.raises(ProxyFailed, match=r"(?i)authentication failed") as refused:
                denied.start()
            assert "guess42" not in str(refused.value)
            assert "Traceback" not in denied.log
        finally:
            denied.close()
    finally:
        proxy.start()


@pytest.mark.one_in_ci("stories", of="TLS of a proxy")
def test_certificates_of_the_proxy_and_of_clients(brokers: KafkaCluster, proxy: ProxyProcess, tmp_path: Path) -> None:
    """The proxy is ``admin`` by its certificate. That is not lent to clients: to the broker, they are anonymous."""
    tls = brokers.authority.directory
    for name in ("admin", "somebody"):
        brokers.authority.issue(name)
    extra = {
        "cluster": {
            "security_protocol": "SSL",
            "ssl_cafile": str(tls / "ca.crt"),
            "ssl_certfile": str(tls / "admin.crt"),
            "ssl_keyfile": str(tls / "admin.key"),
        },
        "client_listener": {
            "tls_certfile": str(tls / "proxy.crt"),
            "tls_keyfile": str(tls / "proxy.key"),
            "tls_client_cafile": str(tls / "ca.crt"),
        },
        "plugins": {"enabled": ["reservation", "replication", "capture"]},
        "data": {"directory": str(tmp_path)},
    }
    topic = create_topic(client_of(brokers, proxy, "admin"))
    admin = client_of(brokers, proxy, "admin")
    proxy.stop()
    try:
        with ProxyProcess(brokers.bootstrap("SSL"), name="secured", extra=extra) as process:
            at_proxy = {"bootstrap.servers": process.bootstrap}
            named = brokers.librdkafka_properties(listener="SSL", certificate="somebody") | at_proxy
            assert {error.code() for error in produce(named, topic)} == {KafkaError.TOPIC_AUTHORIZATION_FAILED}
            direct = admin | {"bootstrap.servers": brokers.bootstrap_servers}
            allow(direct, "User:ANONYMOUS", topic)
            assert produce(named, topic) == []
            assert consume(named, topic, 10) == list(range(10))
            process.cli("namespace", "create", topic)
            process.cli("plugin", "enable", "capture", "--namespace", topic, "--set", "roll_s=1")
            assert produce(named, topic, 1) == []
            until("it says who it was", lambda: set(principals(process, topic)) == {"User:CN=somebody"})
            process.cli("plugin", "disable", "capture", "--namespace", topic)
            told: list[KafkaError] = []
            nameless = brokers.librdkafka_properties(listener="SSL") | at_proxy
            client = AdminClient(nameless | {"error_cb": told.append, "log_level": 0})
            while not told:
                client.poll(5)
            assert told[0].code() in (KafkaError._SSL, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)
    finally:
        proxy.start()


def leaks(proxy: ProxyProcess, *secrets: str) -> list[str]:
    """Which secrets stand in what the proxy says of itself, as they are or in base64."""
    said = proxy.log + "".join(
        httpx.get(proxy.url + path, trust_env=False).text for path in ("/v1/status", "/metrics", "/v1/proxies")
    )
    said += Path(f"/proc/{proxy.pid}/cmdline").read_text()
    return [secret for secret in secrets if secret in said or base64.b64encode(secret.encode()).decode()[:-3] in said]


def test_no_secret_appears_anywhere(brokers: KafkaCluster, proxy: ProxyProcess) -> None:
    """After all of the above: not in logs (at debug level), status, metrics or the command line."""
    key = (brokers.authority.directory / "proxy.key").read_text().splitlines()[1]
    assert len(proxy.log) > 1000
    assert leaks(proxy, *SECURITY.users.values(), "guess", key) == []
