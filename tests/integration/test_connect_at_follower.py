"""Kafka Connect's workers keep what they know in three topics that they make where these are missing: at a follower
they find them, and wait for the day when they may write.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest
from support.kafka import unique
from support.links import Linked, linked, until

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster
from isthmus_bench.kafka.settings import properties_text
from isthmus_bench.mirror_maker import distribution

pytestmark = [pytest.mark.brokers, pytest.mark.suite("clients")]

MAIN: Final = "org.apache.kafka.connect.cli.ConnectDistributed"
JSON: Final = "org.apache.kafka.connect.json.JsonConverter"
STORES: Final = ("config", "offset", "status")
START_S: Final = 60.0


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        yield pair


@contextmanager
def worker(bootstrap: str, prefix: str, directory: Path) -> Iterator[str]:
    """A worker that has its topics, and is a member of its group. Yields the address of its REST resources."""
    directory.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    settings = {
        "bootstrap.servers": bootstrap,
        "group.id": f"{prefix}workers",
        "key.converter": JSON,
        "value.converter": JSON,
        "listeners": address,
        "offset.storage.partitions": "2",
        "status.storage.partitions": "1",
    }
    for store in STORES:
        settings |= {f"{store}.storage.topic": f"{prefix}{store}", f"{store}.storage.replication.factor": "1"}
    (directory / "worker.properties").write_text(properties_text(settings))
    java = distribution(DEFAULT_VERSION, lambda _: None)
    command = java.command(MAIN, [str(directory / "worker.properties")], heap_mb=256)
    log = directory / "worker.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=java.environment(), stdout=output, stderr=subprocess.STDOUT)
    try:

        def serves() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(f"{address}/connectors", timeout=5, trust_env=False).status_code == httpx.codes.OK
            except httpx.TransportError:
                return False

        until("the worker serves", serves, START_S)
        yield address
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_a_worker_starts(link: Linked, tmp_path: Path) -> None:
    prefix = unique("connect-")
    link.attach(prefix, prefix)
    topics = {f"{prefix}{store}" for store in STORES}
    with worker(link.a.bootstrap, prefix, tmp_path / "a"):
        until("its topics follow", lambda: topics <= link.b.topics().keys())
    for topic in topics:
        link.wait_state(topic, "Following")
    assert {link.b.topic_config(topic)["cleanup.policy"] for topic in topics} & {"delete", "compact,delete"}
    with worker(link.b.bootstrap, prefix, tmp_path / "b") as address:
        assert httpx.get(f"{address}/connectors", timeout=30, trust_env=False).json() == []
