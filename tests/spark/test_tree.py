"""The proof of a distribution tree: on records made by hand, and on two clusters with something planted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import DataFrame, SparkSession
from support.kafka import NOW_MS, unique

from isthmus_bench.kafka import KafkaCluster
from isthmus_plugins.distribution.document import read_document, written
from isthmus_spark.audit.reading import union
from isthmus_spark.tree import copies as c
from isthmus_spark.tree.document import FILLED, DocumentError, Tree, read_tree

pytestmark = pytest.mark.brokers  # a JVM as well

HEADER: Final = "isthmus-copy-flags"
BALANCED: Final = {"level": 3, "sides": [{"level": 1, "sides": ["c1", "c2"]}, {"level": 1, "sides": ["c3", "c4"]}]}
SCHEMA: Final = (
    "topic string, key binary, value binary, headers array<struct<key:string,value:binary>>, partition int, "
    "offset long, timestamp timestamp"
)


def document(tree: Any, servers: dict[str, str], topics: Sequence[str] = ("orders-",), **more: Any) -> dict[str, Any]:
    """As ``isthmus tree document`` prints it."""
    clusters = {
        name: {"cluster_id": f"{name}-0123456789012345678", "bootstrap_servers": each} for name, each in servers.items()
    }
    text = json.dumps({"version": 1, "topics": list(topics), "clusters": clusters, "tree": tree, **more})
    return written(read_document(text))


@pytest.fixture
def balanced(tmp_path: Path) -> Tree:
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(document(BALANCED, {f"c{number}": f"b{number}:9092" for number in range(1, 5)})))
    return read_tree(path)


# ---- the document ----


def test_flags_say_the_way(balanced: Tree) -> None:
    assert balanced.topics == ("orders-",)
    assert balanced.header == HEADER
    assert balanced.path("c1", "c2", 0b001) == "level 1"
    assert balanced.path("c1", "c3", 0b100) == "level 3"
    assert balanced.path("c1", "c4", 0b101) == "level 3 level 1"
    assert balanced.path("c1", "c4", FILLED) == "filled"
    assert balanced.path("c1", "c2", 0b100) is None
    assert balanced.path("c1", "c2", 0b101) is None
    assert balanced.path("c1", "c3", 0b110) is None
    assert balanced.path("c1", "c1", 0b001) is None
    assert balanced.path("c1", "c2", 0) is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"tree": ["a", "b"]}', '{"tree": {"level": 0, "sides": ["a", "b"]}}', "tree: [a, b]"],
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other"
    path.write_text(content)
    with pytest.raises(DocumentError, match="is not what `isthmus tree document -o json` prints"):
        read_tree(path)


# ---- the comparison ----


def record(at: int, flags: int | bytes | None = None, **other: Any) -> dict[str, Any]:
    headers = [("h", b"%d" % at), ("n", None)]
    if flags is not None:
        headers.insert(1, (HEADER, flags if isinstance(flags, bytes) else flags.to_bytes(8, "big")))
    known = {"topic": "orders-eu", "key": None, "value": b"v%d" % at, "headers": headers, "partition": 0, "offset": at}
    return known | {"timestamp": datetime.fromtimestamp((NOW_MS + at) / 1000, UTC)} | other


def found(spark: SparkSession, logs: dict[str, list[dict[str, Any]]]) -> DataFrame:
    return union(
        [
            c.copies(spark.createDataFrame(records, SCHEMA), cluster, HEADER)  # type: ignore[type-var]
            for cluster, records in logs.items()
        ]
    )


def findings(spark: SparkSession, tree: Tree, logs: dict[str, list[dict[str, Any]]], until: int = 1000) -> list[Any]:
    messages = c.messages(found(spark, logs), list(tree.servers))
    rows = c.counted_wrongly(messages, NOW_MS + until).collect()
    return sorted((row.finding, row.cluster, row.origin, row.messages, row.offset) for row in rows)


def everywhere(at: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A message of c1, and its copies."""
    yield "c1", record(at)
    yield "c2", record(at, 0b001, offset=70)
    yield "c3", record(at, 0b100, partition=1)
    yield "c4", record(at, 0b101)


def logs_of(*records: tuple[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    logs: dict[str, list[dict[str, Any]]] = {}
    for cluster, each in records:
        logs.setdefault(cluster, []).append(each)
    return logs


def test_what_is_everywhere_once_has_no_findings(spark: SparkSession, balanced: Tree) -> None:
    logs = logs_of(*everywhere(1), *everywhere(2), *everywhere(2))  # the same twice on purpose is there twice
    assert findings(spark, balanced, logs) == []
    ways = c.ways(c.messages(found(spark, logs), list(balanced.servers))).collect()
    assert [
        (row["cluster"], row["path"], row["messages"]) for row in c.named([tuple(row) for row in ways], balanced)
    ] == [
        ("c2", "level 1", 3),
        ("c3", "level 3", 3),
        ("c4", "level 3 level 1", 3),
    ]


def test_what_is_missing_or_there_too_often(spark: SparkSession, balanced: Tree) -> None:
    logs = logs_of(*everywhere(1), *everywhere(2), *everywhere(3), *everywhere(900))
    logs["c4"] = [each for each in logs["c4"] if each["offset"] not in (1, 3, 900)]
    logs["c2"].append(record(2, 0b001))
    logs["c3"] = [*logs["c3"][:-1], record(3, 0b100, value=b"another")]
    del logs["c3"][2]
    assert findings(spark, balanced, logs, until=500) == [
        (c.MISSING, "c1", "-", 1, None),  # what c3 has, and nobody produced
        (c.MISSING, "c2", "-", 1, None),
        (c.MISSING, "c3", "c1", 1, 3),
        (c.MISSING, "c4", "-", 1, None),
        (c.MISSING, "c4", "c1", 2, 1),
        (c.ON_THE_WAY, "c3", "c1", 1, 900),
        (c.ON_THE_WAY, "c4", "c1", 1, 900),
        (c.TWICE, "c2", "c1", 1, 2),
    ]


def test_flags_that_cannot_be_read_and_ways_that_cannot_be(spark: SparkSession, balanced: Tree) -> None:
    twice = record(7, 1)
    twice["headers"].append((HEADER, b"\0" * 8))
    logs = logs_of(*everywhere(1), ("c1", record(5, b"\0" * 4)), ("c1", twice))
    logs["c2"][0] = record(1, 0b100)
    assert findings(spark, balanced, logs) == []
    (row,) = c.refused(found(spark, logs)).collect()
    assert (row.finding, row.cluster, row.origin, row.messages, row.offset) == (c.REFUSED, "c1", "c1", 2, 5)
    ways = c.named([tuple(row) for row in c.ways(c.messages(found(spark, logs), ["c1"])).collect()], balanced)
    assert [row["path"] for row in ways if row["cluster"] == "c2"] == [None]


NAMED: Final = {
    "c1": "{tenant}-main-{topic}",
    "c2": "{topic}.{tenant}",
    "c3": "{tenant}-{topic}",
    "c4": "x_{tenant}-{topic}.y",
}


def test_clusters_that_call_topics_differently(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    servers = {f"c{number}": f"b{number}:9092" for number in range(1, 5)}
    path.write_text(json.dumps(document(BALANCED, servers, [""], names=NAMED)))
    tree, distributed = read_tree(path), read_document(path.read_text())
    for topic in ("acme-main-orders", "acme-orders", "orders.eu.acme", "x_a-b.y", "__acme-orders", "acme"):
        for cluster in NAMED:
            assert tree.shared_name(cluster, topic) == distributed.shared_name(cluster, topic), (topic, cluster)

    called = {"c1": "acme-main-orders", "c2": "orders.acme", "c3": "acme-orders", "c4": "x_acme-orders.y"}
    logs = {
        cluster: [each | {"topic": called[cluster]} for each in records]
        for cluster, records in logs_of(*everywhere(1), *everywhere(2)).items()
    }
    del logs["c3"][1]
    copied = union(
        [
            c.copies(spark.createDataFrame(records, SCHEMA), cluster, HEADER, tree.names[cluster])  # type: ignore[type-var]
            for cluster, records in logs.items()
        ]
    )
    (row,) = c.counted_wrongly(c.messages(copied, list(tree.servers)), NOW_MS + 1000).collect()
    assert (row.finding, row.cluster, row.origin, row.messages) == (c.MISSING, "c3", "c1", 1)
    assert row.topic == "tenant=acme/topic=orders"


# ---- two clusters ----


@pytest.mark.one_in_ci("stories", of="commands of jobs")
def test_the_command_tells_and_writes_a_report(
    spark_kafka: SparkSession, kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path
) -> None:
    topic, report, file = unique("tree-"), tmp_path / "tree.html", tmp_path / "tree.json"
    servers = dict(zip(("one", "other"), (each.bootstrap_servers for each in kafka_pair), strict=True))
    tree = document({"level": 4, "sides": ["one", "other"]}, servers, [topic])
    file.write_text(json.dumps(tree))
    for name, each in servers.items():
        admin = AdminClient({"bootstrap.servers": each})
        admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(30)
        producer = Producer({"bootstrap.servers": each})
        for number in range(20):
            if name == "other" and number == 7:
                continue
            headers = [("h", b"1"), *([(HEADER, (8).to_bytes(8, "big"))] if name == "other" else [])]
            producer.produce(topic, b"%d" % number, partition=number % 2, headers=headers, timestamp=NOW_MS + number)
        assert producer.flush(30) == 0
    command = [sys.executable, "-m", "isthmus", "spark", "tree", str(file), "--master", "local[2]"]
    done = subprocess.run(
        [*command, "--on-the-way-s", "0", "--report", str(report), "--check", "-o", "json"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["proven"], told["messages"], told["records"]) == (False, 20, {"one": 20, "other": 19})
    assert [(each["origin"], each["cluster"], each["path"], each["messages"]) for each in told["ways"]] == [
        ("one", "other", "level 4", 19)
    ]
    assert [(each["finding"], each["cluster"], each["partition"], each["offset"]) for each in told["findings"]] == [
        (c.MISSING, "other", 1, 3)
    ]
    assert c.MISSING in report.read_text()
