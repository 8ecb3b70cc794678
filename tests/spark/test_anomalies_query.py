"""The query on real brokers: alerts come once, whatever is killed and when; and what it says when it cannot go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from support.anomalies_driver import POINTS
from support.kafka import unique

from isthmus_bench.kafka import KafkaCluster

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
        timeout=120,
        check=False,
    )


@pytest.mark.timeout(600)
def test_each_alert_is_there_once_wherever_the_driver_is_killed(setup: Setup) -> None:
    printed: Counter[str] = Counter()
    number = 0
    for point in (*POINTS, None):
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
    assert len(setup.told("read_uncommitted")) > len(alerts)
    assert max(printed.values()) == 1
