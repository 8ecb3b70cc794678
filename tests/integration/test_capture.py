"""Captured traffic of real clients on real brokers: what is in the files, what never is, what happens to a writer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition
from support.kafka import unique
from support.links import Side, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from isthmus_plugins.capture.files import SEALED
from isthmus_spark.blocks import read_file

pytestmark = pytest.mark.brokers

SECRET = b"a record's contents"
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
"""By their numbers."""


class Setup(NamedTuple):
    side: Side
    directory: Path
    prefix: str

    def enable(self, *settings: str) -> None:
        more = [each for setting in ("roll_s=1", *settings) for each in ("--set", setting)]
        self.side.proxy.cli("namespace", "create", self.prefix)
        self.side.proxy.cli("plugin", "enable", "capture", "--namespace", self.prefix, *more)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Returns when its leaders know it: until then they refuse what clients write, who send it again."""
        self.side.create_topic(name, partitions)
        until("its leaders know it", lambda: all(self.side.end(name, each) == 0 for each in range(partitions)))

    def rows(self) -> list[dict[str, Any]]:
        files = sorted(self.directory.rglob(f"*{self.prefix}*/*{SEALED}"))
        return [row for file in files for batch in read_file(file) for row in batch.to_pylist()]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.side.proxy.url}/metrics", timeout=10, trust_env=False).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture(scope="module")
def proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Path]]:
    data = tmp_path_factory.mktemp("data")
    extra = {"plugins": {"enabled": ["reservation", "replication", "capture"]}, "data": {"directory": str(data)}}
    with ProxyProcess(kafka.bootstrap_servers, name=unique("proxy"), extra=extra) as proxy:
        yield Side(kafka, [proxy]), data / "capture"


@pytest.fixture
def setup(proxy: tuple[Side, Path]) -> Iterator[Setup]:
    side, directory = proxy
    setup = Setup(side, directory, unique("captured-") + "-")
    yield setup
    if any(each["prefix"] == setup.prefix for each in side.proxy.cli("plugin", "list")["enabled"]):
        side.proxy.cli("plugin", "disable", "capture", "--namespace", setup.prefix)


def test_what_clients_did_is_in_the_files_and_contents_are_not(setup: Setup) -> None:
    topic, other = setup.prefix + "t", unique("other-")
    for name in (topic, other):
        setup.create_topic(name, 2)
    setup.enable()
    for number in range(30):
        assert setup.side.produce(topic, [SECRET] * 2, partition=number % 2, acks="all") != []
        setup.side.produce(other, [SECRET])
    assert sum(len(setup.side.read(topic, partition=partition)) for partition in (0, 1)) == 60

    def records(rows: list[dict[str, Any]], api_key: int) -> int:
        return sum(row["records"] for row in rows if row["api_key"] == api_key and row["records"] > 0)

    def all_there() -> list[dict[str, Any]] | None:
        rows = setup.rows()
        return rows if records(rows, 0) == records(rows, 1) == 60 else None

    found: list[dict[str, Any]] = until("all is in sealed files", all_there)
    assert {row["topic"] for row in found} == {topic}
    for partition in (0, 1):
        written = sorted(
            (row["base_offset"], row["records"]) for row in produced(found) if row["partition"] == partition
        )
        assert [offset for offset, _ in written] == [
            sum(count for _, count in written[:at]) for at in range(len(written))
        ]
    brokers = setup.side.admin().list_topics(timeout=30).brokers.values()
    for row in produced(found):
        assert row["listener"] in {f"{broker.host}:{broker.port}" for broker in brokers}
        assert (row["error_code"], row["batches"], row["acks"], row["namespace"]) == (0, 1, -1, setup.prefix)
        assert row["client_id"] == "rdkafka"
        assert "kafka" in row["software"]
        assert row["broker_us"] > 0
        assert (row["gate_us"], row["partial"]) == (0, 0)
        assert row["request_bytes"] > row["batch_bytes"] > len(SECRET)
    for file in setup.directory.rglob("*.*"):
        assert SECRET not in file.read_bytes()


def produced(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["api_key"] == 0]


def fetched(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["api_key"] == 1 and row["batches"] > 0]


@pytest.mark.parametrize("size", [40, 3000, 60_000], ids=["small", "large", "in many pieces"])
def test_requests_of_many_partitions_have_an_event_for_each(setup: Setup, size: int) -> None:
    topic, partitions, each = setup.prefix + "t", 12, 3
    setup.create_topic(topic, partitions)
    setup.enable()

    async def write() -> None:
        # It waits, and then writes all partitions of a broker in one request.
        more = {"linger_ms": 300, "max_batch_size": 4 * size * each, "max_request_size": 8_000_000}
        async with AIOKafkaProducer(bootstrap_servers=setup.side.bootstrap, **more) as producer:
            await producer.partitions_for(topic)
            for number in range(partitions * each):
                await producer.send(topic, bytes(size), partition=number % partitions)

    asyncio.run(write())

    def complete() -> list[dict[str, Any]] | None:
        rows = produced(setup.rows())
        return rows if sum(row["records"] for row in rows) >= partitions * each else None

    rows = until("all partitions are there", complete)
    assert Counter(row["partition"] for row in rows for _ in range(row["records"])) == dict.fromkeys(
        range(partitions), each
    )
    assert max(row["parts"] for row in rows) > 1  # all 12 on a machine that has time for it
    assert {row["partial"] for row in rows} == {0}
    assert {row["error_code"] for row in rows} == {0}
    for row in rows:
        assert row["batch_bytes"] > row["records"] * size
        assert row["base_offset"] in range(each)


def consume(setup: Setup, topic: str, partitions: int, count: int, **settings: Any) -> None:
    """Read all with librdkafka."""
    names = {name.replace("_", "."): value for name, value in settings.items()}
    consumer = Consumer({"bootstrap.servers": setup.side.bootstrap, "group.id": unique("reader-"), **names})
    try:
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(partitions)])
        read = 0

        def all_read() -> bool:
            nonlocal read
            read += len(consumer.consume(500, 0.2))
            return read >= count

        until("all is read", all_read, 60)
    finally:
        consumer.close()


def consume_in_java(setup: Setup, topic: str, count: int) -> None:
    """The same with a client that has fetch sessions and calls topics by their ids."""
    setup.side.kafka.tool(
        "kafka-console-consumer",
        *("--bootstrap-server", setup.side.bootstrap, "--topic", topic, "--from-beginning"),
        *("--max-messages", str(count), "--timeout-ms", "60000"),
    )


@pytest.mark.one_in_ci("clients")
@pytest.mark.parametrize("client", ["librdkafka", "answers cut at a limit", "java"])
def test_what_is_fetched_adds_up_to_what_was_produced(setup: Setup, client: str) -> None:
    topic, partitions, each = setup.prefix + "t", 24, 6
    setup.create_topic(topic, partitions)
    setup.enable()
    for partition in range(partitions):  # two records a batch
        values = [os.urandom(10_000).hex().encode() for _ in range(each)]
        codec = CODECS[partition % len(CODECS)]
        setup.side.produce(topic, values, partition, compression_type=codec, batch_size=45_000, linger_ms=300)
    total = partitions * each
    if client == "java":
        consume_in_java(setup, topic, total)
    elif client == "librdkafka":
        consume(setup, topic, partitions, total)
    else:
        consume(setup, topic, partitions, total, fetch_message_max_bytes=50_000)

    def complete() -> list[dict[str, Any]] | None:
        rows = setup.rows()
        return rows if all(sum(row["records"] for row in of(rows)) >= total for of in (produced, fetched)) else None

    rows = until("all is in sealed files", complete)
    assert sums(fetched(rows)) == sums(produced(rows))
    assert sums(fetched(rows)).keys() == set(range(partitions))
    assert {row["partial"] for row in fetched(rows) + produced(rows)} == {0}
    assert {(row["partition"] % len(CODECS), row["compression"]) for row in fetched(rows)} == set(enumerate(range(5)))
    assert {(row["topic"], row["error_code"], row["producer_id"]) for row in fetched(rows)} == {(topic, 0, -1)}
    for partition in range(partitions):
        of_partition = (row for row in fetched(rows) if row["partition"] == partition)
        following = 0
        for offset, records in sorted((row["base_offset"], row["records"]) for row in of_partition):
            assert offset == following
            following += records
    if client != "answers cut at a limit":
        assert max(row["parts"] for row in fetched(rows)) > partitions // 4
        assert max(row["response_bytes"] for row in fetched(rows)) > 500_000


def sums(rows: list[dict[str, Any]]) -> dict[int, tuple[int, int, int]]:
    """Batches, their bytes and records of each partition."""
    found: dict[int, tuple[int, int, int]] = {}
    for row in rows:
        batches, size, records = found.get(row["partition"], (0, 0, 0))
        found[row["partition"]] = batches + row["batches"], size + row["batch_bytes"], records + row["records"]
    return found


def test_settings_change_while_traffic_goes_on(setup: Setup) -> None:
    topic = setup.prefix + "t"
    setup.create_topic(topic)
    setup.enable("hash_clients=true", 'salt="x"')
    setup.side.produce(topic, [b"1"])
    until("the first one is there", lambda: len(produced(setup.rows())) == 1)
    setup.side.proxy.cli("plugin", "configure", "capture", "--namespace", setup.prefix, "--set", "hash_clients=false")
    setup.side.produce(topic, [b"2"])
    until("the second one is there", lambda: len(produced(setup.rows())) == 2)
    hashed, plain = sorted({row["client_id"] for row in produced(setup.rows())}, key=lambda each: each == "rdkafka")
    assert (len(hashed), plain) == (16, "rdkafka")
    setup.side.proxy.cli("plugin", "disable", "capture", "--namespace", setup.prefix)
    setup.side.produce(topic, [b"3"])
    assert len(produced(setup.rows())) == 2


def test_a_refused_write_is_an_event_without_a_time_at_the_broker(setup: Setup) -> None:
    topic = setup.prefix + "t"
    setup.create_topic(topic)
    setup.enable()
    setup.side.proxy.cli("namespace", "alter", setup.prefix, "--reserved")
    with pytest.raises((KafkaException, AssertionError)):
        setup.side.produce(topic, [b"x"])
    (row,) = until("it is there", lambda: produced(setup.rows()))[:1]
    assert (row["error_code"], row["broker_us"], row["topic"]) == (42, -1, topic)


def test_a_writer_that_is_killed_is_started_again_and_loses_little(setup: Setup) -> None:
    topic = setup.prefix + "t"
    setup.create_topic(topic)
    setup.enable()
    setup.side.produce(topic, [b"1"])
    until("the first one is there", lambda: len(produced(setup.rows())) == 1)
    (writer,) = writers(setup.side.proxy.pid)
    os.kill(writer, signal.SIGKILL)
    until("another one runs", lambda: [each for each in writers(setup.side.proxy.pid) if each != writer])

    def again() -> bool:
        setup.side.produce(topic, [b"2"])
        return len(produced(setup.rows())) > 1

    until("events come again", again)
    versions = Counter(row["software"] is not None for row in produced(setup.rows()))
    assert versions[True] >= 1


def writers(parent: int) -> list[int]:
    """Processes that write captured traffic for a proxy."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"isthmus_plugins.capture.writer" in command:
            found.append(int(status.parent.name))
    return found
