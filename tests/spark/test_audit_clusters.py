"""The audit of two real clusters, with differences planted by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession
from support.groups import offsets
from support.kafka import NOW_MS, unique
from support.links import linked, taking_transactions, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_spark.audit.admin import AuditError, Cluster, properties_file
from isthmus_spark.audit.plan import Asked
from isthmus_spark.audit.run import Audited, audit

pytestmark = pytest.mark.brokers

Pair = tuple[KafkaCluster, KafkaCluster]
Row = dict[str, Any]

WIDTH: Final = 100


def row(at: int, **other: Any) -> Row:
    """A record that is the same on both sides, but for what is given."""
    known: Row = {"key": b"k%d" % at, "value": b"v%d" % at, "headers": [("h", b"%d" % at)], "timestamp": NOW_MS + at}
    return known | other


def rows(number: int, first: int = 0) -> list[Row]:
    return [row(at) for at in range(first, first + number)]


class Servers(NamedTuple):
    """Of proxies, in the place of the cluster behind them."""

    bootstrap_servers: str


def create(cluster: KafkaCluster, topic: str, partitions: int = 1, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(30)


def produce(
    cluster: KafkaCluster | Servers, topic: str, records: Sequence[Row], partition: int = 0, compression: str = "none"
) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 5, "compression.type": compression}
    producer = Producer(settings)
    for each in records:
        producer.produce(topic, partition=partition, **each)
    assert producer.flush(30) == 0


def transaction(cluster: KafkaCluster | Servers, topic: str, records: Sequence[Row], commit: bool | None) -> Producer:
    """It takes an offset for each record and one for the marker. None: it stays open."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "transactional.id": unique("t-")})
    producer.init_transactions(30)
    producer.begin_transaction()
    for each in records:
        producer.produce(topic, partition=0, **each)
    assert producer.flush(30) == 0
    if commit is not None:
        end = log_end(cluster, topic)
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
        until("the marker is written", lambda: log_end(cluster, topic) > end)  # which the ack does not wait for
    return producer


def log_end(cluster: KafkaCluster | Servers, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": unique("end-")})
    try:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), 30)[1])
    finally:
        consumer.close()


def commit(cluster: KafkaCluster | Servers, group: str, topic: str, offset: int, metadata: str | None = None) -> None:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": group})
    more = () if metadata is None else (metadata,)
    consumer.commit(offsets=[TopicPartition(topic, 0, offset, *more)], asynchronous=False)
    consumer.close()


def run(spark: SparkSession, pair: Pair, *topics: str, **asked: Any) -> Audited:
    with Cluster(spark, pair[0].bootstrap_servers, {}) as left, Cluster(spark, pair[1].bootstrap_servers, {}) as right:
        return audit(spark, left, right, Asked(topics, **({"width": WIDTH} | asked)))


def findings(audited: Audited) -> list[tuple[Any, ...]]:
    """Finding, partition, first and last offset, records."""
    columns = ("finding", "partition", "first_offset", "last_offset", "records")
    return [tuple(each[name] for name in columns) for each in audited.findings.collect()]


def states(audited: Audited) -> list[tuple[Any, ...]]:
    columns = ("partition", "state", "compared_from", "compared_to", "left_records", "right_records", "lag")
    return [tuple(each[name] for name in columns) for each in audited.partitions.collect()]


@pytest.mark.one_in_ci("stories", of="audits of clusters")
def test_equal_topics_and_one_that_is_behind(spark_kafka: SparkSession, kafka_pair: Pair) -> None:
    prefix = unique("orders-")
    for cluster, theirs in zip(kafka_pair, ("", "A."), strict=True):
        for topic, partitions in (("x", 2), ("y", 1)):
            create(cluster, f"{theirs}{prefix}{topic}", partitions)
        produce(cluster, f"{theirs}{prefix}x", rows(250))
        produce(cluster, f"{theirs}{prefix}x", rows(40), partition=1)
        transaction(cluster, f"{theirs}{prefix}y", rows(10), commit=True)
        transaction(cluster, f"{theirs}{prefix}y", rows(5), commit=False)
    produce(kafka_pair[0], f"{prefix}x", rows(7, first=40), partition=1)
    audited = run(spark_kafka, kafka_pair, f"{prefix}=A.{prefix}")
    assert findings(audited) == []
    assert states(audited) == [
        (0, "equal", 0, 250, 250, 250, 0),
        (1, "equal", 0, 40, 40, 40, 7),
        (0, "equal", 0, 17, 10, 10, 0),
    ]
    assert findings(run(spark_kafka, kafka_pair, f"{prefix}=A.{prefix}", committed=False)) == []
    whole = run(spark_kafka, kafka_pair, f"{prefix}=A.{prefix}", whole=True)
    assert [(each.finding, each.left_offset, each.right_offset) for each in whole.findings.collect()] == [
        ("log ends earlier on the right", 47, 40)
    ]
    assert [each[1] for each in states(whole)] == ["equal", "different", "equal"]


@pytest.mark.one_in_ci("stories", of="audits of clusters")
def test_planted_differences_are_found_and_no_others(spark_kafka: SparkSession, kafka_pair: Pair) -> None:
    topic = unique("audited-")
    left, right = kafka_pair
    for cluster in kafka_pair:
        create(cluster, topic, 2)
    there = rows(1000)
    here = list(there)
    there[205] = row(205, value=b"changed")
    here[210], there[210] = row(210, key=None), row(210, key=b"")
    here[220], there[220] = row(220, key=None, value=b"a"), row(220, key=b"a", value=None)
    there[230] = row(230, headers=[("h", None)])
    there[240] = row(240, timestamp=NOW_MS)
    there[950] = row(950, value=b"far away")
    produce(left, topic, here)
    produce(right, topic, there)
    for cluster in kafka_pair:
        produce(cluster, topic, rows(300), partition=1)
    expected = [
        ("value differs", 0, 205, 220, 2),
        ("key differs", 0, 210, 220, 2),
        ("headers differ", 0, 230, 230, 1),
        ("timestamp differs", 0, 240, 240, 1),
    ]
    assert findings(run(spark_kafka, kafka_pair, topic, buckets=1)) == [
        *expected,
        ("checksums differ further on", 0, 900, 999, None),
    ]
    expected[0] = ("value differs", 0, 205, 950, 3)
    audited = run(spark_kafka, kafka_pair, topic)
    assert findings(audited) == expected
    assert states(audited) == [(0, "different", 0, 1000, 1000, 1000, 0), (1, "equal", 0, 300, 300, 300, 0)]
    (first, _) = audited.partitions.collect()
    assert (first.buckets, first.differing_buckets) == (10, 2)

    assert findings(run(spark_kafka, kafka_pair, topic, ignored=("key", "value", "headers"))) == expected[3:]
    ranges = run(spark_kafka, kafka_pair, topic, partitions=(0,), from_offset=211, to_offset=230)
    assert findings(ranges) == [("key differs", 0, 220, 220, 1), ("value differs", 0, 220, 220, 1)]
    assert states(ranges) == [(0, "different", 211, 230, 19, 19, 0)]


@pytest.mark.one_in_ci("stories", of="audits of clusters")
def test_what_became_of_transactions(spark_kafka: SparkSession, kafka_pair: Pair) -> None:
    topic = unique("transactions-")
    left, right = kafka_pair
    open_ones = []
    for cluster in kafka_pair:
        create(cluster, topic)
        produce(cluster, topic, rows(5))
        transaction(cluster, topic, rows(2, first=5), commit=cluster is left)  # 5, 6
        transaction(cluster, topic, rows(1, first=8), commit=cluster is right)  # 8
        transaction(cluster, topic, [row(10, value=cluster.spec.name.encode())], commit=False)  # 10
        open_ones.append(transaction(cluster, topic, rows(1, first=12), commit=None))  # 12
        produce(cluster, topic, [row(13, value=cluster.spec.name.encode())])
    committed = run(spark_kafka, kafka_pair, topic)
    assert findings(committed) == [("missing on the right", 0, 5, 6, 2), ("missing on the left", 0, 8, 8, 1)]
    assert states(committed) == [(0, "different", 0, 12, 7, 6, 0)]
    uncommitted = run(spark_kafka, kafka_pair, topic, committed=False)
    assert findings(uncommitted) == [("value differs", 0, 10, 13, 2)]
    assert states(uncommitted) == [(0, "different", 0, 14, 11, 11, 0)]
    for each in open_ones:
        each.abort_transaction(30)


@pytest.mark.one_in_ci("stories", of="audits of clusters")
def test_what_was_deleted_on_one_side_is_told_and_not_compared(spark_kafka: SparkSession, kafka_pair: Pair) -> None:
    topic = unique("deleted-")
    for cluster in kafka_pair:
        create(cluster, topic)
        produce(cluster, topic, rows(20))
    admin = AdminClient({"bootstrap.servers": kafka_pair[1].bootstrap_servers})
    (deleted,) = admin.delete_records([TopicPartition(topic, 0, 6)]).values()
    deleted.result(30)
    audited = run(spark_kafka, kafka_pair, topic)
    assert [(each.finding, each.left_offset, each.right_offset) for each in audited.findings.collect()] == [
        ("log starts later on the right", 0, 6)
    ]
    assert states(audited) == [(0, "different", 6, 20, 14, 14, 0)]
    assert findings(run(spark_kafka, kafka_pair, topic, ignored=("start",))) == []
    assert findings(run(spark_kafka, kafka_pair, topic, from_offset=6)) == []


@pytest.mark.one_in_ci("stories", of="audits of clusters")
def test_of_compacted_topics_the_latest_record_of_each_key_counts(spark_kafka: SparkSession, kafka_pair: Pair) -> None:
    topic = unique("compacted-")
    left, right = kafka_pair
    for cluster in kafka_pair:
        create(cluster, topic, **{"cleanup.policy": "compact"})
    produce(left, topic, [row(0, key=b"a"), row(1, key=b"a"), row(2, key=b"b"), row(3, key=b"c", value=None), row(4)])
    # Aborted records stand for those that a cleaner took: nobody sees them, and offsets go on.
    transaction(right, topic, [row(0)], commit=False)  # and its marker at 1
    produce(right, topic, [row(2, key=b"b"), row(3, key=b"isthmus-filler", value=None), row(4)])
    audited = run(spark_kafka, kafka_pair, topic)
    assert findings(audited) == [("missing on the right", 0, 1, 1, 1)]
    for cluster in kafka_pair:
        produce(cluster, topic, [row(5, key=b"a")])
    audited = run(spark_kafka, kafka_pair, topic)
    assert findings(audited) == []
    assert states(audited) == [(0, "equal", 0, 6, 6, 4, 0)]


def test_topics_and_partitions_that_one_side_does_not_have(spark_kafka: SparkSession, kafka_pair: Pair) -> None:
    prefix = unique("some-")
    left, right = kafka_pair
    create(left, f"{prefix}left")
    create(right, f"{prefix}right")
    create(left, f"{prefix}both", 1)
    create(right, f"{prefix}both", 2)
    found = run(spark_kafka, kafka_pair, prefix).findings.collect()
    assert [(each.finding, each.left_topic, each.partition) for each in found] == [
        ("partition missing on the left", f"{prefix}both", 1),
        ("topic missing on the right", f"{prefix}left", None),
        ("topic missing on the left", f"{prefix}right", None),
    ]
    with pytest.raises(AuditError, match="neither side has a topic with this name or prefix"):
        run(spark_kafka, kafka_pair, unique("none-"))
    with pytest.raises(AuditError, match="neither side has any of these partitions"):
        run(spark_kafka, kafka_pair, f"{prefix}both", partitions=(7,))


@pytest.mark.one_in_ci("stories", of="audits of clusters")
def test_groups_are_compared_by_what_they_have_committed(spark_kafka: SparkSession, kafka_pair: Pair) -> None:
    topic, group = unique("topic-"), unique("app-")
    left, right = kafka_pair
    create(left, topic)
    create(right, f"A.{topic}")
    produce(left, topic, rows(10))
    produce(right, f"A.{topic}", rows(8))
    for name, offset, metadata in (("same", 5, None), ("other", 5, None), ("waits", 10, None), ("note", 5, "x")):
        commit(left, f"{group}-{name}", topic, offset, metadata)
    commit(left, f"{group}-alone", topic, 5)
    for name, offset, metadata in (("same", 5, None), ("other", 4, None), ("waits", 8, None), ("note", 5, "y")):
        commit(right, f"B.{group}-{name}", f"A.{topic}", offset, metadata)
    audited = run(spark_kafka, kafka_pair, f"{topic}=A.{topic}", groups=(f"{group}-=B.{group}-",))
    found = [
        (each.finding, each.group_id, each.right_topic, each.partition, each.left_offset, each.right_offset)
        for each in audited.findings.collect()
    ]
    assert found == [
        ("not committed on the right", f"{group}-alone", f"A.{topic}", 0, 5, None),
        ("committed metadata differs", f"{group}-note", f"A.{topic}", 0, 5, 5),
        ("committed offset differs", f"{group}-other", f"A.{topic}", 0, 5, 4),
    ]
    assert (audited.positions, audited.waiting) == (5, 1)
    assert states(audited) == [(0, "equal", 0, 8, 8, 8, 2)]


@pytest.mark.one_in_ci("stories", of="audits of clusters")
def test_what_a_link_copied_is_equal_until_somebody_writes_past_it(spark_kafka: SparkSession, kafka_pair: Pair) -> None:
    (_, right), group = kafka_pair, unique("app-")
    with linked(*kafka_pair) as pair, taking_transactions(pair.b):
        here, there = pair.names("t")
        proxy = Servers(pair.a.bootstrap)
        pair.attach()
        pair.attach(f"{group}-", f"B.{group}-", "--type", "consumer-group", "--disable-transaction-verification")
        pair.a.create_topic(here, 2)
        produce(proxy, here, rows(100))
        produce(proxy, here, rows(200, first=100), compression="zstd")
        transaction(proxy, here, rows(10, first=300), commit=True)
        transaction(proxy, here, rows(5, first=311), commit=False)
        produce(proxy, here, rows(3, first=317))
        produce(proxy, here, rows(60), partition=1)
        commit(proxy, f"{group}-x", here, 250, "noted")
        for partition, end in ((0, 320), (1, 60)):
            pair.wait_end(there, end, partition)
        until("the position arrived", lambda: offsets(pair.b, f"B.{group}-x") == {(there, 0): 250})

        asked = {"groups": (f"{group}-=B.{group}-",)}
        for committed, records in ((True, 313), (False, 318)):
            audited = run(spark_kafka, kafka_pair, f"{here}={there}", committed=committed, **asked)
            assert findings(audited) == []
            assert states(audited) == [(0, "equal", 0, 320, records, records, 0), (1, "equal", 0, 60, 60, 60, 0)]
            assert (audited.positions, audited.waiting) == (1, 0)

        pair.b.proxy.stop()
        for cluster, side, topic, done in ((proxy, pair.a, here, True), (right, pair.b, there, False)):
            produce(cluster, topic, rows(1, first=320))
            transaction(cluster, topic, rows(1, first=321), commit=done)
            until("the marker is there", lambda side=side, topic=topic: side.end(topic) == 323)
            produce(cluster, topic, rows(1, first=323))
            produce(cluster, topic, [row(60, value=b"%d" % done), row(61)], partition=1)
        commit(right, f"B.{group}-x", there, 249, "noted")
    audited = run(spark_kafka, kafka_pair, f"{here}={there}", **asked)
    assert findings(audited) == [
        ("missing on the right", 0, 321, 321, 1),
        ("value differs", 1, 60, 60, 1),
        ("committed offset differs", 0, None, None, None),
    ]
    assert states(audited) == [(0, "different", 0, 324, 316, 315, 0), (1, "different", 0, 62, 62, 62, 0)]


def test_a_secured_cluster_is_read_with_a_file_of_properties(
    spark_kafka: SparkSession, secured_kafka: KafkaCluster, tmp_path: Path
) -> None:
    file = tmp_path / "client.properties"
    properties = secured_kafka.client_properties(user="admin")
    file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()) + "group.id=mine\n")
    known = properties_file(spark_kafka, file)
    topic = unique("secret-")
    admin = AdminClient(secured_kafka.librdkafka_properties(user="admin"))
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    producer = Producer(secured_kafka.librdkafka_properties(user="admin"))
    producer.produce(topic, b"v")
    assert producer.flush(30) == 0
    servers = secured_kafka.bootstrap_servers
    with Cluster(spark_kafka, servers, known) as left, Cluster(spark_kafka, servers, known) as right:
        assert states(audit(spark_kafka, left, right, Asked([topic]))) == [(0, "equal", 0, 1, 1, 1, 0)]
    wrong = known | {"sasl.jaas.config": known["sasl.jaas.config"].replace("admin-secret", "wrong")}
    with Cluster(spark_kafka, servers, wrong) as left, pytest.raises(AuditError, match=servers):
        left.topics()
    with pytest.raises(AuditError, match="is no file of properties"):
        properties_file(spark_kafka, tmp_path / "none")


@pytest.mark.one_in_ci("stories", of="commands of jobs")
def test_the_command_tells_and_writes_a_report(spark_kafka: SparkSession, kafka_pair: Pair, tmp_path: Path) -> None:
    topic, report = unique("told-"), tmp_path / "audit.html"
    left, right = kafka_pair
    for cluster in kafka_pair:
        create(cluster, topic)
    produce(left, topic, [*rows(20), row(20), row(21)])
    produce(right, topic, [*rows(20), row(20, value=b"other")])
    servers = ("--left", left.bootstrap_servers, "--right", right.bootstrap_servers)
    command = [sys.executable, "-m", "isthmus", "spark", "audit", *servers, "--topic", topic, "--master", "local[2]"]
    command += ["--group", topic, "--report", str(report), "--check", "-o", "json"]
    commit(left, topic, topic, 3)
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["equal"], told["groups"]) == (False, {"positions": 1, "waiting": 0})
    assert [(each["finding"], each["first_offset"], each["records"]) for each in told["findings"]] == [
        ("value differs", 20, 1),
        ("not committed on the right", None, None),
    ]
    assert [(each["state"], each["compared_to"], each["lag"]) for each in told["partitions"]] == [("different", 21, 1)]
    page = report.read_text()
    assert "<svg" in page
    assert "value differs" in page
    assert spark_kafka.read.parquet(str(tmp_path / "audit.parquet")).count() == 2
    assert spark_kafka.read.parquet(str(tmp_path / "audit-partitions.parquet")).count() == 1
