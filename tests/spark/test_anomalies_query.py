"""The query on real brokers: alerts come once, whatever is killed and when; and what it says when it cannot go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from support.anomalies_driver import POINTS
from support.kafka import unique
from support.links import Side, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.kafka.ports import pick
from isthmus_bench.proxies import ProxyProcess
from isthmus_spark.anomalies.alerts import Alerts, AlertsError, Record

pytestmark = pytest.mark.brokers

BEGAN_US = 1_767_225_600_000_000


class Setup(NamedTuple):
    servers: str
    topic: str
    alerts: str
    checkpoint: Path

    def capture(self, *events: dict[str, Any] | bytes) -> None:
        """Write records as proxies do."""
        producer = Producer({"bootstrap.servers": self.servers, "linger.ms": 1})
        for event in events:
            value = (
                event if isinstance(event, bytes) else json.dumps({"format": 1, "type": "request", **event}).encode()
            )
            producer.produce(self.topic, key=b"proxy", value=value, partition=0)
        assert producer.flush(30) == 0

    def told(self, isolation: str = "read_committed") -> list[dict[str, Any]]:
        """All alerts in the topic, to its end."""
        settings = {"bootstrap.servers": self.servers, "group.id": "none", "isolation.level": isolation}
        consumer = Consumer({**settings, "enable.partition.eof": True, "auto.offset.reset": "earliest"})
        consumer.assign([TopicPartition(self.alerts, partition, 0) for partition in (0, 1)])
        found, ended = [], set()
        while len(ended) < 2:
            message = consumer.poll(30)
            assert message is not None
            if message.error():
                ended.add(message.partition())
            else:
                found.append(json.loads(message.value()))
        consumer.close()
        return found


@pytest.fixture
def setup(kafka: KafkaCluster, tmp_path: Path) -> Setup:
    setup = Setup(kafka.bootstrap_servers, unique("captured-"), unique("alerts-"), tmp_path / "checkpoint")
    admin = AdminClient({"bootstrap.servers": setup.servers})
    for name, partitions in ((setup.topic, 1), (setup.alerts, 2)):
        admin.create_topics([NewTopic(name, partitions, 1)])[name].result(30)
    return setup


def refused(number: int, topic: str = "pay-t") -> dict[str, Any]:
    """A write that the proxy refused, of a client of its own."""
    known = {"cluster": "c", "proxy": "p", "namespace": "pay-", "api_key": 0, "error_code": 42, "part": 0, "parts": 1}
    return {**known, "time_us": BEGAN_US + number, "client_id": f"stray-{number}", "topic": topic, "response_bytes": 60}


def acked(sequence: int, offset: int, producer_id: int) -> dict[str, Any]:
    known = {"cluster": "c", "api_key": 0, "error_code": 0, "part": 0, "response_bytes": 60, "broker_us": 900}
    batch = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": sequence, "records": 1}
    return {**known, **batch, "base_offset": offset, "time_us": BEGAN_US, "topic": "pay-t", "partition": 0}


def strays(alerts: list[dict[str, Any]]) -> Counter[str]:
    return Counter(alert["subject"]["client_id"] for alert in alerts if alert["rule"] == "refused write")


def drive(setup: Setup, point: str | None, nth: int, how: str) -> subprocess.CompletedProcess[str]:
    told = {"servers": setup.servers, "topic": setup.topic, "alerts": setup.alerts, "records_max": 10}
    told |= {"checkpoint": str(setup.checkpoint), "point": point, "nth": nth, "how": how}
    return subprocess.run(
        [sys.executable, "-m", "support.anomalies_driver", json.dumps(told)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=250,
        check=False,
    )


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "points",
    [
        *(
            pytest.param((each,), id=each, marks=pytest.mark.one_in_ci("stories", of="Spark at work"))
            for each in POINTS
        ),
        pytest.param(tuple(POINTS), id="one after the other", marks=pytest.mark.suite("stories")),
    ],
)
def test_each_alert_is_there_once_wherever_the_driver_is_killed(setup: Setup, points: tuple[str, ...]) -> None:
    printed: Counter[str] = Counter()
    number = 0
    for point in (*points, None):
        # What one batch begins, another one ends: state has to come through, too.
        setup.capture(*(acked(0, 100, each) for each in range(number, number + 5)))
        setup.capture(*(refused(each) for each in range(number, number + 25)))
        setup.capture(*(acked(0, 200, each) for each in range(number, number + 5)))
        number += 25
        how = "driver" if point in ("judged", "committed") else "all"
        done = drive(setup, point, 2, how)
        assert done.returncode == (0 if point is None else -signal.SIGKILL), done.stderr
        printed += strays([json.loads(line) for line in done.stdout.splitlines()])
    alerts = setup.told()
    assert strays(alerts) == Counter(f"stray-{each}" for each in range(number))
    twice = Counter(alert["facts"]["producer_id"] for alert in alerts if alert["rule"] == "sequences")
    assert twice == Counter(each for begin in range(0, number, 25) for each in range(begin, begin + 5))
    # What was in transactions that were never committed, and what was not told although it is there.
    if len(points) == len(POINTS):
        assert len(setup.told("read_uncommitted")) > len(alerts)
    assert max(printed.values()) == 1


# ---- the command ----


def command(setup: Setup, *arguments: str) -> list[str]:
    own = ["--to", setup.servers, "--alerts", setup.alerts, "--checkpoint", str(setup.checkpoint), "-o", "json"]
    return [sys.executable, "-m", "isthmus", "spark", "anomalies", *own, "--master", "local[2]", *arguments]


@contextmanager
def running(setup: Setup, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, from when it reads."""
    process = subprocess.Popen(
        command(setup, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        assert any("runs; alerts go to" in line for line in process.stderr)
        drained = threading.Thread(target=process.stderr.read)
        drained.start()
        yield process
        drained.join()
    finally:
        process.kill()
        process.communicate()


def metrics(port: int) -> dict[str, float]:
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("isthmus_anomalies_"))
    return {name.removeprefix("isthmus_anomalies_"): float(value) for name, value in pairs}


@pytest.mark.one_in_ci("stories", of="Spark at work")
def test_the_command_runs_until_it_is_told_to_end(setup: Setup) -> None:
    source = ("--from", setup.servers, "--topic", setup.topic)
    (port,) = pick("127.0.0.1", 1)
    later = {**refused(2), "time_us": BEGAN_US + 7_200_000_000}  # after which all others are late by two hours
    setup.capture(refused(0), later, b"no JSON", {**refused(9), "format": 2}, {"type": "link"})
    with running(setup, *source, "--starting", "earliest", "--metrics-port", str(port)) as process:
        until("the first alert is there", lambda: strays(setup.told()) == {"stray-0": 1, "stray-2": 1}, 120)
        setup.capture(refused(1), refused(0))
        until("a late one is there", lambda: strays(setup.told()) == {"stray-0": 1, "stray-1": 1, "stray-2": 1}, 60)
        found = until("all is counted", lambda: (said := metrics(port))["read_total"] == 7 and said, 60)
        assert found['alerts_total{rule="refused write"}'] == 3
        assert (found["malformed_total"], found["newer_total"]) == (1, 1)
        assert found["last_batch_timestamp_seconds"] == pytest.approx(time.time(), abs=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout is not None
        printed = [json.loads(line) for line in process.stdout]
    assert sorted(printed, key=str) == sorted(setup.told(), key=str)
    (alert,) = (each for each in printed if each["subject"]["client_id"] == "stray-0")
    assert {name: alert[name] for name in ("format", "rule", "subject", "measured", "limit", "unit", "requests")} == {
        "format": 1,
        "rule": "refused write",
        "subject": {"cluster": "c", "namespace": "pay-", "topic": "pay-t", "client_id": "stray-0"},
        "measured": 1.0,
        "limit": 0.0,
        "unit": "requests",
        "requests": 1,
    }
    assert (alert["first_us"], alert["last_us"]) == (BEGAN_US, BEGAN_US)
    assert alert["detected_us"] > BEGAN_US
    # The same directory cannot be used for something else.
    other = command(setup, "--from", setup.servers, "--topic", "other", "--once")
    done = subprocess.run(other, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "name a new directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_usage_is_said(tmp_path: Path) -> None:
    setup = Setup("127.0.0.1:1", "t", "a", tmp_path / "checkpoint")
    for arguments in (
        (),
        ("--from", "h:1"),
        (str(tmp_path), "--from", "h:1", "--topic", "t"),
        (str(tmp_path), "--set", "x=1"),
    ):
        done = subprocess.run(command(setup, *arguments), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2, done.stderr


# ---- what real clients do ----


@contextmanager
def watched(kafka: KafkaCluster, prefix: str, data: Path, *settings: str) -> Iterator[Side]:
    """A proxy that captures a namespace."""
    extra = {"plugins": {"enabled": ["reservation", "replication", "capture"]}, "data": {"directory": str(data)}}
    extra["capture"] = {"servers_allowed": [each.split("=")[1] for each in settings if "kafka_servers=" in each]}
    with ProxyProcess(kafka.bootstrap_servers, name=unique("proxy"), extra=extra) as proxy:
        proxy.cli("namespace", "create", prefix)
        chosen = [each for setting in settings for each in ("--set", setting)]
        proxy.cli("plugin", "enable", "capture", "--namespace", prefix, *chosen)
        yield Side(kafka, [proxy])


def traffic(side: Side, prefix: str) -> None:
    """Nothing in it is an anomaly."""
    for topic in (prefix + "t", prefix + "u"):
        side.create_topic(topic, 2)
    for number in range(20):
        side.produce(prefix + "t", [b"x"] * 3, partition=number % 2, enable_idempotence=True)
    with_id = side.producer(transactional_id=unique("transactional-"))
    with_id.init_transactions()
    for number in range(10):
        with_id.begin_transaction()
        with_id.produce(prefix + "u", b"x", partition=number % 2)
        if number % 3:
            with_id.commit_transaction()
        else:
            with_id.flush()
            with_id.abort_transaction()
    assert len(side.read(prefix + "t")) == 30


def write_where_none_may(side: Side, prefix: str) -> None:
    side.proxy.cli("namespace", "alter", prefix, "--reserved")
    with pytest.raises((KafkaException, AssertionError)):
        side.produce(prefix + "t", [b"x"], client_id="stray")


def about(alert: dict[str, Any]) -> tuple[str, str, str]:
    return alert["rule"], alert["subject"]["client_id"], alert["subject"]["topic"]


@pytest.mark.one_in_ci("stories", of="Spark at work")
def test_traffic_of_real_clients_has_the_one_anomaly_that_was_planted(
    setup: Setup, kafka: KafkaCluster, tmp_path: Path
) -> None:
    prefix = unique("watched-") + "-"
    with watched(kafka, prefix, tmp_path / "data", "roll_s=1") as side:
        traffic(side, prefix)
        write_where_none_may(side, prefix)
    capture = str(tmp_path / "data" / "capture")
    done = subprocess.run(command(setup, capture, "--once"), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    (alert,) = setup.told()
    assert about(alert) == ("refused write", "stray", prefix + "t")


@pytest.mark.one_in_ci("stories", of="Spark at work")
def test_what_proxies_write_to_a_topic_is_judged_while_clients_go_on(
    setup: Setup, kafka: KafkaCluster, tmp_path: Path
) -> None:
    prefix = unique("watched-") + "-"
    (port,) = pick("127.0.0.1", 1)
    sink = (f"kafka_topic={setup.topic}", f"kafka_servers={setup.servers}", "files=false")
    source = ("--from", setup.servers, "--topic", setup.topic, "--starting", "earliest", "--metrics-port", str(port))
    with running(setup, *source) as process:
        with watched(kafka, prefix, tmp_path / "data", *sink) as side:
            traffic(side, prefix)
            until("some of it was judged", lambda: metrics(port)["read_total"] > 20, 120)
            assert setup.told() == []
            refused_us = time.time_ns() // 1000
            write_where_none_may(side, prefix)
            (alert,) = until("the alert is there", setup.told, 60)
            assert len(side.read(prefix + "t")) == 30
        written = side.end(setup.topic)  # the proxy has ended, and with it the capture
        until("all was read", lambda: metrics(port)["read_total"] == written, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert about(alert) == ("refused write", "stray", prefix + "t")
    assert (alert["subject"]["cluster"], alert["requests"]) == (kafka.cluster_id, 1)
    assert refused_us < alert["first_us"] <= alert["last_us"] < alert["detected_us"]
    assert setup.told() == [alert]


# ---- writing ----


@pytest.fixture
def writer(setup: Setup, spark_kafka: SparkSession) -> Any:
    query = unique("query-")

    def made(topic: str = setup.alerts) -> Alerts:
        settings = {"bootstrap.servers": setup.servers}
        return Alerts(spark_kafka, settings, topic, query, print, threading.Event())

    return made


def record(number: int) -> Record:
    return Record(b"key", json.dumps(number).encode())


def now_ms() -> int:
    return int(time.time() * 1000)


def test_who_was_fenced_writes_nothing(setup: Setup, writer: Any) -> None:
    first, second = writer(), writer()
    first.open(None)
    assert first.write(0, [record(0)])
    second.open((1, now_ms()))
    with pytest.raises(AlertsError, match="another process"):
        first.write(1, [record(1)])
    assert second.write(1, [record(2)])
    assert not second.write(1, [record(3)])
    assert sorted(setup.told()) == [0, 2]
    second.close()


def test_a_commit_whose_outcome_is_not_known_is_looked_up(setup: Setup, writer: Any, spark_kafka: SparkSession) -> None:
    alerts = writer()
    alerts.open(None)
    producer = alerts._producer

    class Lost:
        """The commit's answer, or the commit itself, does not arrive."""

        def __init__(self, committed: bool) -> None:
            self.committed = committed

        def __getattr__(self, name: str) -> Any:
            if name == "commitTransaction":
                if self.committed:
                    producer.commitTransaction()
                jvm: Any = spark_kafka._jvm
                return jvm.java.util.ArrayDeque().removeFirst  # raises
            return getattr(producer, name)

    alerts._producer = Lost(committed=True)
    assert alerts.write(0, [record(0), record(1)])
    producer = alerts._producer
    alerts._producer = Lost(committed=False)
    assert alerts.write(1, [record(2)])
    assert sorted(setup.told()) == [0, 1, 2]
    alerts.close()


def test_an_old_copy_of_a_checkpoint_is_refused(setup: Setup, writer: Any) -> None:
    alerts = writer()
    alerts.open(None)
    assert alerts.write(5, [record(0)])
    with pytest.raises(AlertsError, match="old copy"):
        writer().open((3, now_ms()))
    with pytest.raises(AlertsError, match="create it"):
        writer(unique("missing-")).open(None)
