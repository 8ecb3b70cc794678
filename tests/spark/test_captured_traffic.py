"""User story: two linked clusters with real clients are captured; jobs find what was planted, and nothing else.

Planted: a broker that is slow for a while, a batch that is stored twice, a client that writes to a follower, records
that were acked and that the other cluster does not have.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka.admin import NewTopic
from pyspark.sql import DataFrame, SparkSession
from support.kafka import unique
from support.links import Linked, Side, linked, until, whole

from isthmus_bench import raw_writes
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.load import RawClient, Target
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import HEADER_SIZE, BatchHeader
from isthmus_spark.anomalies.job import anomalies
from isthmus_spark.anomalies.rules import DUPLICATE as RULE_DUPLICATE
from isthmus_spark.anomalies.rules import REFUSED, SEQUENCES, SLOW
from isthmus_spark.blocks import EVENTS, read_file
from isthmus_spark.jobs.exactly_once import DUPLICATE, MISSING, exactly_once
from isthmus_spark.jobs.hot import hot
from isthmus_spark.jobs.incidents import incidents
from isthmus_spark.jobs.latency import latency
from isthmus_spark.jobs.link_states import pieces
from isthmus_spark.jobs.rejections import rejections
from isthmus_spark.other_side import ends_of_other_side
from isthmus_spark.source import FORMAT

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(300)]

VALUE: Final = bytes(5000)
"""No small batches: those would be a finding."""
RATE: Final = 40
"""Records a second to each partition."""
WELL_S: Final = 5.0
SLOW_S: Final = 6.0
PULSE_S: Final = 0.25
FORGOTTEN_MS: Final = 2000
"""When brokers forget a producer."""


class Planted(NamedTuple):
    """What was done, as the jobs should find it."""

    pair: Linked
    directory: Path
    topic: str
    written: Counter[int]
    """By partition, how many records the application wrote while all was well or slow."""
    duplicate: tuple[int, int]
    """The offsets of the batch that is stored twice, in partition 0."""
    missing: list[int]
    """Offsets of partition 1 that the other cluster does not have."""

    def events(self, spark: SparkSession) -> DataFrame:
        return spark.read.format(FORMAT).load(str(self.directory))


class Application:
    """An idempotent producer of both partitions, each led by another broker; and a group that reads them."""

    def __init__(self, side: Side, topic: str) -> None:
        self._topic = topic
        self._producer = side.producer(client_id="orders-app", enable_idempotence=True, linger_ms=0, acks="all")
        self._side = side
        self.acked: dict[int, list[int]] = {0: [], 1: []}

    def write(self, seconds: float) -> None:
        """At a steady rate, until all is acked."""
        began, number = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            for partition in (0, 1):
                self._producer.produce(self._topic, VALUE, partition=partition, on_delivery=self._delivered)
            number += 1
            while (wait := began + number / RATE - time.monotonic()) > 0:
                self._producer.poll(wait)
        assert self._producer.flush(60) == 0

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        self.acked[message.partition()].append(message.offset())

    def read(self, group: str) -> None:
        """All of it, by a member of a group that commits."""

        async def read() -> None:
            wanted = sum(map(len, self.acked.values()))
            settings = {"group_id": group, "client_id": "billing-app", "auto_offset_reset": "earliest"}
            servers = self._side.bootstrap
            async with AIOKafkaConsumer(self._topic, bootstrap_servers=servers, **settings) as consumer:
                found = 0
                while found < wanted:
                    found += sum(map(len, (await consumer.getmany(timeout_ms=1000)).values()))
                await consumer.commit()

        asyncio.run(read())


def plant_a_slow_broker(side: Side, application: Application) -> None:
    """Broker 2 stands still most of the time while the application writes."""

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(application.write, SLOW_S)
        while not writing.done():
            side.kafka.pause(2)
            time.sleep(PULSE_S)
            side.kafka.resume(2)
            wait([writing], timeout=PULSE_S / 5)
        writing.result()


def plant_a_duplicate(side: Side, topic: str) -> tuple[int, int]:
    """A batch is sent again when the broker has forgotten its producer."""
    leader = side.admin().list_topics(topic).topics[topic].partitions[0].leader
    metadata = side.admin().list_topics(topic).brokers[leader]
    client = RawClient(Target(metadata.host, metadata.port, topic))
    header = BatchHeader(0, 0, 0, 2, 0, 0, 0, int(time.time() * 1000), int(time.time() * 1000), 990_001, 0, 7, 1)
    payload = encode_batch([Record(0, header.max_timestamp, b"k", VALUE)], header)[HEADER_SIZE:]

    def write() -> int:
        end = side.end(topic)
        raw_writes.produce(client, topic, header, payload, None)
        return end

    first = write()
    end = first + 1

    def again() -> bool:
        raw_writes.produce(client, topic, header, payload, None)
        return side.end(topic) > end

    until("the broker has forgotten the producer", again, timeout_s=60, interval_s=0.5)
    client.close()
    return first, end


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    data = tmp_path_factory.mktemp("data")
    forgetful = {
        "producer.id.expiration.ms": str(FORGOTTEN_MS),
        "producer.id.expiration.check.interval.ms": "500",
    }
    with (
        KafkaCluster(name="captured-a", brokers=2, settings=forgetful, say=lambda _: None) as a,
        KafkaCluster(name="captured-b", brokers=1, say=lambda _: None) as b,
    ):
        plugins = {"enabled": ["reservation", "replication", "capture"]}
        proxies = [
            whole(kafka, plugins=plugins, data={"directory": str(data / side)}) for kafka, side in ((a, "a"), (b, "b"))
        ]
        with linked(a, b, a_proxies=proxies[:1], b_proxies=proxies[1:]) as pair:
            yield scene(pair, data)


def read(directory: Path, kind: str) -> Iterator[dict[str, Any]]:
    """What is in sealed files."""
    for file in sorted(directory.rglob(EVENTS[kind].sealed)):
        for batch in read_file(file, EVENTS[kind].schema.names):
            yield from batch.to_pylist()


def scene(pair: Linked, data: Path) -> Planted:
    prefix = unique("orders-") + "-"
    pair.attach(prefix, prefix)
    topic = prefix + "t"
    created = NewTopic(topic, num_partitions=2, replica_assignment=[[1], [2]])
    pair.a.admin().create_topics([created])[topic].result(30)
    pair.wait_following()
    for side in (pair.a, pair.b):
        side.proxy.cli("plugin", "enable", "capture", "--namespace", prefix, "--set", "roll_s=1")
    application = Application(pair.a, topic)
    application.write(WELL_S)
    application.read(unique("billing-"))
    plant_a_slow_broker(pair.a, application)
    written = Counter({partition: len(offsets) for partition, offsets in application.acked.items()})
    duplicate = plant_a_duplicate(pair.a, topic)
    with pytest.raises((KafkaException, AssertionError)):
        pair.b.produce(topic, [VALUE], client_id="stray-app")
    for partition in (0, 1):
        pair.wait_end(topic, pair.a.end(topic, partition), partition)
    pair.wait_following()  # what A has not heard of is at risk, as far as it knows
    pair.b.proxy.stop()
    first = pair.a.end(topic, 1)
    missing = pair.a.produce(topic, [VALUE] * 3, partition=1, client_id="late-app", enable_idempotence=True, acks="all")
    assert missing == [first, first + 1, first + 2]

    def captured() -> bool:
        late = [row for row in read(data, "requests") if row["client_id"] == "late-app" and row["api_key"] == 0]
        lost = Counter(row["partition"] for row in read(data, "links") if row["state"] == "Disconnected")
        return sum(row["records"] for row in late) == len(missing) and min(lost[0], lost[1]) > 3

    until("the last ones are in sealed files, and the link is lost for a while", captured, interval_s=0.5)
    pair.a.proxy.stop()
    return Planted(pair, data, topic, written, duplicate, missing)


def rows(found: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict() for row in found.collect()]


def test_who_writes_where_they_must_not(planted: Planted, spark: SparkSession) -> None:
    (found,) = rows(rejections(planted.events(spark)))
    assert (found["refused_by"], found["api"], found["error"]) == ("proxy", "Produce", "INVALID_REQUEST")
    assert (found["topic"], found["client_id"]) == (planted.topic, "stray-app")
    assert found["cluster"] == planted.pair.b.kafka.cluster_id


def test_what_is_stored_twice_or_missing_on_the_other_side(planted: Planted, spark_kafka: SparkSession) -> None:
    first, second = planted.duplicate
    events = planted.events(spark_kafka)
    ends = ends_of_other_side(events, planted.pair.b.kafka.bootstrap_servers, names={planted.topic: planted.topic})
    found = rows(exactly_once(events, ends))
    duplicates = [each for each in found if each["finding"] == DUPLICATE]
    assert [(each["partition"], each["base_offset"], each["other_offset"]) for each in duplicates] == [
        (0, second, first)
    ]
    assert (duplicates[0]["producer_id"], duplicates[0]["base_sequence"]) == (990_001, 7)
    missing = [each for each in found if each["finding"] == MISSING]
    offsets = [each["base_offset"] + number for each in missing for number in range(each["records"])]
    assert sorted(offsets) == planted.missing
    assert {(each["partition"], each["client_id"]) for each in missing} == {(1, "late-app")}
    assert len(found) == len(duplicates) + len(missing), "nothing else"


def test_anomalies_are_those_that_were_planted(planted: Planted, spark: SparkSession) -> None:
    found = [
        json.loads(each["facts"]) | json.loads(each["subject"]) | each
        for each in rows(anomalies(planted.events(spark)))
    ]
    slow = [each for each in found if each["rule"] == SLOW]
    # On a machine with other work any broker is slow now and then.
    stopped = [each for each in slow if (each["cluster"], each["broker_id"]) == (planted.pair.a.kafka.cluster_id, 2)]
    assert stopped, slow
    assert all(each["measured"] > each["limit"] for each in slow)
    others = {each["rule"]: each for each in found if each["rule"] != SLOW}
    assert (len(others), len(found)) == (2, 2 + len(slow)), "one each"
    refused, twice = others[REFUSED], others[SEQUENCES]
    assert (refused["cluster"], refused["topic"]) == (planted.pair.b.kafka.cluster_id, planted.topic)
    assert (twice["finding"], twice["producer_id"], twice["partition"]) == (RULE_DUPLICATE, 990_001, 0)


def test_the_link_has_one_incident_that_is_not_over(planted: Planted, spark: SparkSession) -> None:
    links = spark.read.format(FORMAT).option("events", "links").load(str(planted.directory))
    seen = planted.events(spark).select("cluster", "proxy", "time")
    (incident,) = rows(incidents(pieces(links, seen)))
    assert (incident["link"], incident["worst"], incident["ended"]) == (planted.pair.name, "Disconnected", None)
    assert incident["source_cluster"] == planted.pair.a.kafka.cluster_id
    assert planted.topic in incident["topics"]
    assert (incident["partitions"], incident["rpo_is"]) == (2, "all")
    assert incident["rpo_offsets"] == incident["at_risk_offsets"] == len(planted.missing)
    assert 0 < incident["rpo_ms"] <= incident["seconds"] * 1000


def test_load_that_is_even_is_no_finding(planted: Planted, spark: SparkSession) -> None:
    assert rows(hot(planted.events(spark))) == []


def test_how_long_requests_took(planted: Planted, spark: SparkSession) -> None:
    found = {(each["dimension"], each["value"], each["api"]): each for each in rows(latency(planted.events(spark)))}
    application = found["client_id", "orders-app", "Produce"]
    assert application["requests"] <= planted.written.total()
    assert application["errors"] == 0
    assert application["p50_us"] < application["p99_us"] <= application["max_us"]
    assert application["p99_us"] > PULSE_S * 1e6 / 2, "a broker stood still so long"
    assert application["gate_share"] == 0, "the link is asynchronous"
    assert ("client_id", "billing-app", "Fetch") in found
    assert ("client_id", "billing-app", "OffsetCommit") in found, "it names topics that are captured"
    assert ("client_id", "billing-app", "Heartbeat") not in found, "its group is in no namespace that is captured"
