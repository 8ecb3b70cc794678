"""Embedded clusters are real ones: every version, faults, security, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from support.kafka import Clusters, unique
from typer.testing import CliRunner

from isthmus_bench.cli import cluster_app
from isthmus_bench.kafka import DEFAULT_VERSION, EmbeddedKafkaError, KafkaCluster, ToolFailed
from isthmus_bench.kafka.processes import MARK, Process, marked

pytestmark = pytest.mark.brokers


def create_topic(properties: dict[str, str], name: str, **options: int) -> None:
    admin = AdminClient(properties)
    wanted = NewTopic(name, num_partitions=options.get("partitions", 1), replication_factor=options.get("replicas", 1))
    admin.create_topics([wanted])[name].result(30)


def produce(properties: dict[str, str], topic: str, *values: str) -> None:
    failures: list[KafkaError] = []
    producer = Producer({**properties, "message.timeout.ms": 30000})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: failures.append(error) if error else None)
    assert producer.flush(30) == 0
    if failures:
        raise KafkaException(failures[0])


def consume(properties: dict[str, str], topic: str, count: int) -> list[str]:
    consumer = Consumer({**properties, "group.id": unique("g"), "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        values: list[str] = []
        deadline = time.monotonic() + 30
        while len(values) < count and time.monotonic() < deadline:
            message = consumer.poll(1)
            if message is not None and message.error() is None:
                values.append((message.value() or b"").decode())
        return values
    finally:
        consumer.close()


def test_kafkas_own_tools_work_in_each_version(kafka_of_each_version: KafkaCluster) -> None:
    cluster, topic, group = kafka_of_each_version, unique("tools-"), unique("group-")
    server = ["--bootstrap-server", cluster.bootstrap_servers]

    cluster.tool("kafka-topics", *server, "--create", "--topic", topic, "--partitions", "2")
    cluster.tool("kafka-configs", *server, "--alter", "--topic", topic, "--add-config", "retention.ms=60000")
    cluster.tool("kafka-console-producer", *server, "--topic", topic, stdin="one\ntwo\nthree\n")
    arguments = ["--topic", topic, "--from-beginning", "--max-messages", "3", "--group", group]
    read = cluster.tool("kafka-console-consumer", *server, *arguments)
    perf = ["--topic", topic, "--num-records", "200", "--record-size", "50", "--throughput", "-1"]
    bootstrap = f"bootstrap.servers={cluster.bootstrap_servers}"
    plain = cluster.tool("kafka-producer-perf-test", *perf, "--producer-props", bootstrap)
    transactional = cluster.tool(
        "kafka-producer-perf-test", *perf, "--transactional-id", unique("t"), "--producer-props", bootstrap
    )

    described = cluster.tool("kafka-topics", *server, "--describe", "--topic", topic).stdout
    assert "PartitionCount: 2" in described
    assert "retention.ms=60000" in described
    assert sorted(read.stdout.split()) == ["one", "three", "two"]
    assert "200 records sent" in plain.stdout
    assert "200 records sent" in transactional.stdout
    assert topic in cluster.tool("kafka-consumer-groups", *server, "--describe", "--group", group).stdout
    assert "TransactionalId" in cluster.tool("kafka-transactions", *server, "list").stdout


def test_a_failing_tool_says_why(kafka: KafkaCluster) -> None:
    with pytest.raises(ToolFailed, match="does not exist") as failure:
        kafka.tool("kafka-topics", "--bootstrap-server", kafka.bootstrap_servers, "--describe", "--topic", "nowhere")
    assert failure.value.returncode == 1


def test_shared_clusters_are_apart(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    first, second = kafka_pair
    topic = unique("apart-")
    create_topic(first.librdkafka_properties(), topic)
    assert first.cluster_id != second.cluster_id
    assert topic in AdminClient(first.librdkafka_properties()).list_topics(timeout=10).topics
    assert topic not in AdminClient(second.librdkafka_properties()).list_topics(timeout=10).topics


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_three_brokers_survive_a_kill_of_the_first(kafka_cluster: Clusters) -> None:
    cluster = kafka_cluster(brokers=3, settings={"min.insync.replicas": "2"})
    client, topic = cluster.librdkafka_properties(), unique("killed-")
    create_topic(client, topic, replicas=3)
    produce(client, topic, "before")
    address = cluster.addresses()[1]

    cluster.kill(1)

    assert not cluster.alive(1)
    produce(client, topic, "while one is dead")
    create_topic(client, unique("new-"), replicas=2)  # the controllers have a majority
    cluster.start_broker(1)
    assert cluster.addresses()[1] == address
    assert cluster.live_brokers() == {1, 2, 3}
    assert consume(client, topic, 2) == ["before", "while one is dead"]

    cluster.restart(2)
    assert cluster.live_brokers() == {1, 2, 3}
    assert consume(client, topic, 2) == ["before", "while one is dead"]


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_three_brokers_come_back_after_all_were_killed(kafka_cluster: Clusters) -> None:
    cluster = kafka_cluster(brokers=3)
    for broker_id in cluster.broker_ids:
        cluster.kill(broker_id)
    cluster.start_brokers(cluster.broker_ids)
    assert cluster.live_brokers() == {1, 2, 3}


@pytest.mark.one_in_ci("stories", of="clusters of tests")
def test_two_brokers_and_settings_of_one(kafka_cluster: Clusters) -> None:
    cluster = kafka_cluster(brokers=2, broker_settings={2: {"broker.rack": "far"}}, settings={"num.partitions": "7"})
    produce(cluster.librdkafka_properties(), "made-by-writing", "x")
    metadata = AdminClient(cluster.librdkafka_properties()).list_topics(timeout=10)
    assert set(metadata.brokers) == {1, 2}
    assert len(metadata.topics["made-by-writing"].partitions) == 7
    described = cluster.tool(
        "kafka-configs", "--bootstrap-server", cluster.bootstrap_servers, "--entity-type", "brokers",
        "--entity-name", "2", "--describe", "--all",
    ).stdout  # fmt: skip
    assert "broker.rack=far" in described


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_a_paused_broker_is_fenced_and_comes_back(kafka_cluster: Clusters) -> None:
    cluster = kafka_cluster(brokers=3)
    cluster.pause(3)
    deadline = time.monotonic() + 30
    while 3 in cluster.live_brokers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert cluster.live_brokers() == {1, 2}
    assert cluster.alive(3)
    cluster.resume(3)
    while 3 not in cluster.live_brokers() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert cluster.live_brokers() == {1, 2, 3}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_users_log_in_and_need_permission(secured_kafka: KafkaCluster, mechanism: str) -> None:
    topic = unique("secret-")
    admin = secured_kafka.librdkafka_properties(user="admin", mechanism=mechanism)  # type: ignore[arg-type]
    alice = secured_kafka.librdkafka_properties(user="alice", mechanism=mechanism)  # type: ignore[arg-type]
    create_topic(admin, topic)
    produce(admin, topic, "x")
    assert consume(admin, topic, 1) == ["x"]
    with pytest.raises(KafkaException, match=r"TOPIC_AUTHORIZATION_FAILED|authorization failed"):
        produce(alice, topic, "y")


def test_a_certificate_is_an_identity(secured_kafka: KafkaCluster) -> None:
    topic = unique("certified-")
    admin = secured_kafka.librdkafka_properties(listener="SSL", certificate="admin")
    create_topic(admin, topic)
    produce(admin, topic, "x")
    with pytest.raises(KafkaException, match=r"TOPIC_AUTHORIZATION_FAILED|authorization failed"):
        produce(secured_kafka.librdkafka_properties(listener="SSL", certificate="bob"), topic, "y")
    nobody = AdminClient({**secured_kafka.librdkafka_properties(listener="SSL"), "log_level": "0"})
    with pytest.raises(KafkaException):
        nobody.list_topics(timeout=3)


def test_java_clients_log_in(secured_kafka: KafkaCluster, tmp_path: Path) -> None:
    topic = unique("java-")
    for number, properties in enumerate(
        (
            secured_kafka.client_properties(user="admin"),
            secured_kafka.client_properties(listener="SASL_PLAINTEXT", user="admin", mechanism="PLAIN"),
            secured_kafka.client_properties(listener="SSL", certificate="admin"),
        )
    ):
        file = tmp_path / f"{number}.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        server = ["--bootstrap-server", properties["bootstrap.servers"], "--command-config", str(file)]
        secured_kafka.tool("kafka-topics", *server, "--create", "--topic", f"{topic}{number}")


def test_a_wrong_setting_is_named(kafka_cluster: Clusters) -> None:
    with pytest.raises(EmbeddedKafkaError, match=r"num\.io\.threads"):
        kafka_cluster(settings={"num.io.threads": "many"})


@pytest.mark.one_in_ci("stories", of="clusters of tests")
def test_works_from_async_code() -> None:
    async def started() -> set[int]:
        cluster = KafkaCluster()
        await asyncio.to_thread(cluster.start)
        try:
            return await asyncio.to_thread(cluster.live_brokers)
        finally:
            await asyncio.to_thread(cluster.stop)

    assert asyncio.run(started()) == {1}


@pytest.mark.one_in_ci("stories", of="clusters of tests")
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    with KafkaCluster(directory) as cluster:
        pid = cluster.state.pids[1]
        assert cluster.log(1)
    assert not directory.exists()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.one_in_ci("stories", of="clusters of tests")
def test_a_killed_owner_takes_its_cluster_along(tmp_path: Path) -> None:
    directory = tmp_path / "orphan"
    script = (
        "import sys, threading; from pathlib import Path; from isthmus_bench.kafka import KafkaCluster\n"
        "cluster = KafkaCluster(Path(sys.argv[1])); cluster.start()\n"
        "print(cluster.state.pids[1], flush=True); threading.Event().wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(directory)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        broker = Process.attach(pid, f"{MARK}{directory}")
        assert broker is not None
        owner.send_signal(signal.SIGKILL)
    assert broker.wait(20)
    deadline = time.monotonic() + 10
    while directory.exists() and time.monotonic() < deadline:  # removed right after
        time.sleep(0.05)
    assert not directory.exists()


@pytest.mark.one_in_ci("stories", of="clusters of tests")
def test_the_command_line_keeps_clusters_in_the_background(tmp_path: Path) -> None:
    runner = CliRunner()
    where = ["--dir", str(tmp_path)]

    def run(*arguments: str, code: int = 0) -> str:
        result = runner.invoke(cluster_app, [*arguments, *where])
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.stderr

    # A process of its own: what it started goes on after it.
    command = "from isthmus_bench.cli import cluster_app; cluster_app()"
    arguments = ["start", "--name", "a", "--brokers", "1", "--version", DEFAULT_VERSION, "-o", "json"]
    started = subprocess.run(
        [sys.executable, "-c", command, *arguments, *where, "--set", "num.partitions=5"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert "Warning" not in started.stderr
    facts = json.loads(started.stdout)
    client = {"bootstrap.servers": facts["bootstrap_servers"]}
    try:
        produce(client, "t", "kept")
        assert len(AdminClient(client).list_topics(timeout=10).topics["t"].partitions) == 5
        assert json.loads(run("status", "--name", "a", "-o", "json"))["cluster_id"] == facts["cluster_id"]

        assert "runs already" in run("start", "--name", "a", code=1)
        port = facts["bootstrap_servers"].split(":")[1]
        assert f"port {port} on 127.0.0.1 is in use" in run("start", "--name", "b", "--port", port, code=1)
        assert "no broker 2" in run("kill", "--name", "a", "--broker", "2", code=1)

        run("kill", "--name", "a", "--broker", "1")
        assert "does not run" in run("stop-broker", "--name", "a", "--broker", "1", code=1)
        assert json.loads(run("status", "--name", "a", "-o", "json"))["state"] == "stopped"
        run("start-broker", "--name", "a", "--broker", "1")
        assert consume(client, "t", 1) == ["kept"]

        run("stop", "--name", "a", "--keep-data")
        assert "other brokers" in run("start", "--name", "a", "--brokers", "3", code=1)
        again = json.loads(run("start", "--name", "a", "-o", "json"))
        assert (again["cluster_id"], again["bootstrap_servers"]) == (facts["cluster_id"], facts["bootstrap_servers"])
        assert consume(client, "t", 1) == ["kept"]
    finally:
        run("stop", "--name", "a")
    assert list(tmp_path.iterdir()) == []
    assert marked(tmp_path / "a") == []
    assert json.loads(run("status", "-o", "json")) == []
