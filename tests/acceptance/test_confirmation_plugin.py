"""User story: a third party's plugin, installed by pip, adds a condition for acks and a metric for one namespace only.

It is the example of the documentation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from confluent_kafka import KafkaError, Message
from support.kafka import unique
from support.links import Side, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed, ProxyProcess

pytestmark = pytest.mark.brokers

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "archive"


class Setup(NamedTuple):
    side: Side
    prefix: str
    archive: Path

    @property
    def metrics(self) -> str:
        return httpx.get(f"{self.side.proxy.url}/metrics", timeout=10, trust_env=False).text


@pytest.fixture(scope="module")
def setup(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    site, archive = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("archive")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index")
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", site, EXAMPLE], check=True, timeout=120)
    prefix = unique("archived-") + "-"
    plugins = {"plugins": {"enabled": ["reservation", "replication", "archive"]}}
    environment = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with ProxyProcess(kafka.bootstrap_servers, name=unique("proxy"), extra=plugins, environment=environment) as proxy:
        proxy.cli("namespace", "create", prefix)
        proxy.cli("plugin", "enable", "archive", "--namespace", prefix, "--set", f"directory={archive}")
        yield Setup(Side(kafka, [proxy]), prefix, archive)


def test_an_ack_means_that_the_archive_has_it(setup: Setup) -> None:
    topic = setup.prefix + "t"
    setup.side.create_topic(topic, 2)
    for number in range(20):
        value = b"record %d" % number
        (offset,) = setup.side.produce(topic, [value], partition=number % 2, acks="all")
        assert offset == number // 2
        (file,) = (setup.archive / topic).glob(f"*-{number % 2}.log")
        assert value in file.read_bytes()
    assert f'isthmus_archive_end_offset{{partition="1",topic="{topic}"}} 10.0' in setup.metrics


def test_what_the_archive_does_not_take_is_not_acked_and_nobody_else_waits(setup: Setup) -> None:
    stuck, free = setup.prefix + "stuck", unique("free-")
    (setup.archive / stuck).touch()  # it cannot be made a directory
    for topic in (stuck, free):
        setup.side.create_topic(topic)
    until("the archive has found it", lambda: "task failed" in setup.side.proxy.log)
    errors: list[KafkaError | None] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        errors.append(error)

    producer = setup.side.producer(acks="all", request_timeout_ms=1000, message_timeout_ms=4000)
    producer.produce(stuck, b"x", partition=0, on_delivery=delivered)
    producer.poll(0)
    assert setup.side.produce(free, [b"y"]) == [0]
    assert producer.flush(30) == 0
    assert [error is not None and error.code() for error in errors] == [KafkaError._MSG_TIMED_OUT]
    assert setup.side.end(stuck) >= 1, "not acked is not not written"
    assert 'isthmus_acks_unconfirmed_total{confirmer="the archive"} 0.0' in setup.metrics
    assert free not in setup.metrics


def test_settings_change_at_run_time_and_errors_name_the_field(setup: Setup) -> None:
    cli, where = setup.side.proxy.cli, ("--namespace", setup.prefix)
    with pytest.raises(ProxyFailed, match="limit_s: Input should be greater than 0"):
        cli("plugin", "configure", "archive", *where, "--set", "limit_s=0")
    changed = cli("plugin", "configure", "archive", *where, "--set", "limit_s=5")
    assert changed["settings"] == {"directory": str(setup.archive), "limit_s": 5}
    (enabled,) = cli("plugin", "list", *where)["enabled"]
    assert (enabled["state"], enabled["settings"]["limit_s"]) == ("running", 5)
    topic = setup.prefix + "again"
    setup.side.create_topic(topic)
    assert setup.side.produce(topic, [b"x"], acks="all") == [0]
    (file,) = (setup.archive / topic).iterdir()
    assert b"x" in file.read_bytes()
    cli("plugin", "disable", "archive", *where)
    assert cli("plugin", "list", *where)["enabled"] == []
    assert topic not in setup.metrics, "it has ended"
    file.unlink()
    assert setup.side.produce(topic, [b"y"], acks="all") == [1]
    assert not file.exists()
    assert topic not in setup.metrics
