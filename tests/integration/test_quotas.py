"""Quotas of a cluster that its operator did not mean for the proxies (KIP-219): they slow a link down, and it shows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from support.links import Linked, linked, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

BYTES_PER_S = 20_000


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        pair.attach()
        yield pair


@contextmanager
def limited(kafka: KafkaCluster) -> Iterator[None]:
    """Every client id has a consumer quota, the proxies' too."""
    every = "--bootstrap-server", kafka.bootstrap_servers, "--entity-type", "clients", "--entity-default"
    kafka.tool("kafka-configs", *every, "--alter", "--add-config", f"consumer_byte_rate={BYTES_PER_S}")
    try:
        yield
    finally:
        kafka.tool("kafka-configs", *every, "--alter", "--delete-config", "consumer_byte_rate")


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_a_throttled_link_is_slower_and_says_so(link: Linked) -> None:
    source, target = link.names("throttled")
    link.a.create_topic(source)
    values = random.Random(1).randbytes(300_000)  # some ten seconds' worth, and then some of throttling

    def throttled() -> bool:
        told = link.a.link(link.name)
        return (told["state"], told["reason"]) == ("Catching Up", "THROTTLED") and "FETCH" in told["message"]

    with limited(link.a.kafka):
        for start in range(0, len(values), 100_000):
            link.a.produce(source, [values[at : at + 1000] for at in range(start, start + 100_000, 1000)])
        until("it is shown", throttled)
        process = link.a.proxy.get("/v1/status")["process"]
        assert any("quotas throttle this proxy" in warning for warning in process["warnings"])
        link.wait_end(target, 300)
    metrics = httpx.get(f"{link.a.proxy.url}/metrics", trust_env=False).text
    assert 'isthmus_cluster_throttled_seconds_total{api="fetch"' in metrics
    assert "isthmus_tasks_failing 0.0" in metrics
    link.wait_following()
    assert link.verify()["equal"]
