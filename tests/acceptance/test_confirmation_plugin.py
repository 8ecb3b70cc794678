"""User story: a third party's plugin adds a condition for acks of some topics: the example of the documentation."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from confluent_kafka import KafkaError, Message
from support.kafka import unique
from support.links import Side, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess

pytestmark = pytest.mark.brokers

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "archive"


class Setup(NamedTuple):
    side: Side
    prefix: str
    archive: Path


def install(example: Path, directory: Path) -> None:
    """Put a distribution of one module where Python finds it, with its entry points."""
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    for module in example.glob("*.py"):
        shutil.copy(module, directory)
    info = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def setup(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    site, archive = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("archive")
    install(EXAMPLE, site)
    prefix = unique("archived-") + "-"
    environment = {
        "PYTHONPATH": str(site),
        "ISTHMUS_ARCHIVE_PREFIX": prefix,
        "ISTHMUS_ARCHIVE_DIRECTORY": str(archive),
    }
    plugins = {"plugins": {"enabled": ["reservation", "replication", "archive"]}}
    with ProxyProcess(kafka.bootstrap_servers, name=unique("proxy"), extra=plugins, environment=environment) as proxy:
        yield Setup(Side(kafka, [proxy]), prefix, archive)


def test_an_ack_means_that_the_archive_has_it(setup: Setup) -> None:
    topic = setup.prefix + "t"
    setup.side.create_topic(topic, 2)
    for number in range(20):
        value = b"record %d" % number
        (offset,) = setup.side.produce(topic, [value], partition=number % 2, acks="all")
        assert offset == number // 2
        assert value in (setup.archive / f"{topic}-{number % 2}.log").read_bytes()


def test_what_the_archive_does_not_take_is_not_acked_and_nobody_else_waits(setup: Setup) -> None:
    stuck, free = setup.prefix + "stuck", unique("free-")
    (setup.archive / f"{stuck}-0.log").mkdir()  # it cannot be opened as a file
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
    text = httpx.get(f"{setup.side.proxy.url}/metrics", timeout=10, trust_env=False).text
    assert 'isthmus_acks_unconfirmed_total{confirmer="the archive"} 0.0' in text
