"""What the sync job foretells of traffic without a link, beside what a real synchronous link over a WAN then takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from confluent_kafka import KafkaError, Message
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from support.kafka import unique
from support.links import Linked, Side, linked, until
from support.wan import RTT_MS

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.kafka.settings import Reach
from isthmus_bench.proxies import ProxyProcess
from isthmus_bench.wan import Wan
from isthmus_spark.blocks import read_file
from isthmus_spark.events import events
from isthmus_spark.jobs import latency, sync

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(400)]

RATE: Final = 50
SECONDS: Final = 3.0
ROUNDS: Final = 3
"""Others use the machine as well, and the model does not know them: the quietest round counts."""
OFF_MAX: Final = 0.25


class Scene(NamedTuple):
    pair: Linked
    data: Path
    """Of A's proxy."""
    prefix: str

    @property
    def topic(self) -> str:
        return self.prefix + "t"

    def captured(self) -> int:
        """Acked records in sealed files."""
        return sum(
            row["records"]
            for file in self.data.rglob("*.capture")
            for batch in read_file(file, ["api_key", "error_code", "records"])
            for row in batch.to_pylist()
            if row["api_key"] == sync.PRODUCE and row["error_code"] == 0
        )


@pytest.fixture
def scene(kafka_pair: tuple[KafkaCluster, KafkaCluster], wan: Wan, tmp_path: Path) -> Iterator[Scene]:
    token = tmp_path / "token"  # the far address is another machine's
    extra = {
        "plugins": {"enabled": ["reservation", "replication", "capture"]},
        "data": {"directory": str(tmp_path / "a")},
        "link": {"remotes_allowed": [wan.far]},
    }
    a, b = kafka_pair
    first = ProxyProcess(a.bootstrap_servers, name=unique("proxy"), extra=extra)
    reach = Reach(bind=wan.near, advertised=wan.far)
    extra["data"] = {"directory": str(tmp_path / "b")}
    second = ProxyProcess(b.bootstrap_servers, name=unique("proxy"), extra=extra, link_reach=reach)
    with linked(a, b, a_proxies=[first], b_proxies=[second], token=token) as pair:
        yield Scene(pair, tmp_path / "a", unique("paced-") + "-")


def write(side: Side, topic: str, client: str) -> int:
    """At a steady rate, whether the ones before were acked or not; how many."""
    producer = side.producer(client_id=client, enable_idempotence=True, linger_ms=0)
    began, number, acked = time.monotonic(), 0, 0

    def delivered(error: KafkaError | None, _: Message) -> None:
        nonlocal acked
        assert error is None, error
        acked += 1

    while time.monotonic() < began + SECONDS:
        producer.produce(topic, bytes(1000), partition=0, on_delivery=delivered)
        number += 1
        while (wait := began + number / RATE - time.monotonic()) > 0:
            producer.poll(wait)
    assert producer.flush(60) == 0
    assert acked == number
    return number


def quietest(found: DataFrame, when: str, column: str) -> float:
    """Of the clients of a time, in ms."""
    chosen = found.where(f"dimension = 'client_id' and api = 'Produce' and value like '{when}-%'").collect()
    assert len(chosen) == ROUNDS
    return min(row[column] for row in chosen) / 1000


@pytest.mark.one_in_ci("stories", of="the model of acks")
def test_what_is_foretold_comes_true(scene: Scene, spark: SparkSession) -> None:
    pair, topic = scene.pair, scene.topic
    pair.a.proxy.cli("namespace", "create", scene.prefix)
    pair.a.proxy.cli("plugin", "enable", "capture", "--namespace", scene.prefix, "--set", "roll_s=1")
    pair.a.create_topic(topic)
    written = sum(write(pair.a, topic, f"before-{number}") for number in range(ROUNDS))
    pair.b.proxy.cli("namespace", "create", scene.prefix)
    pair.attach(scene.prefix, scene.prefix)
    pair.wait_end(topic, written)
    pair.wait_following()
    until("the mode is taken", lambda: pair.a.proxy.cli("link", "set-mode", pair.name, "synchronous"), 20)
    until("acks wait", lambda: {each["state"] for each in pair.a.partitions(pair.name, topic)} == {"In-Sync"}, 20)
    written += sum(write(pair.a, topic, f"after-{number}") for number in range(ROUNDS))
    until("all of it is in sealed files", lambda: scene.captured() >= written, 30, interval_s=0.5)

    traffic = events(spark, scene.data, tuple({*sync.COLUMNS, *latency.COLUMNS})).cache()
    before = traffic.where("client_id like 'before-%'")
    (append_us,) = before.where(f"api_key = {sync.PRODUCE}").select(f.percentile("broker_us", f.lit(0.5))).first() or ()
    scenario = sync.Scenario("the WAN", (round(1000 * RTT_MS),), 1)
    stats = sync.replay(before, [scenario], sync.constant_append(spark, round(append_us)), 0)
    foretold = quietest(sync.what_if(stats, [scenario]), "before", "then_p50_us")
    real = quietest(latency.latency(traffic), "after", "p50_us")
    assert real >= RTT_MS
    assert foretold == pytest.approx(real, rel=OFF_MAX), f"{foretold:.1f} ms were foretold, it took {real:.1f} ms"
