"""Plugins of namespaces on several proxies: at work on all of them at once, and refused where one cannot run them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, Message, Producer
from support.kafka import Clusters, unique
from support.links import Side, until

from isthmus_bench.proxies import ProxyFailed, ProxyProcess

pytestmark = pytest.mark.brokers

ENABLED = {"plugins": {"enabled": ["reservation", "replication", "capture"]}}


@pytest.fixture(scope="module")
def side(shared_kafka: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """Two brokers with a sidecar each; the second one does not have the plugin."""
    kafka = shared_kafka(brokers=2, role="namespace-plugins")
    data = {"data": {"directory": str(tmp_path_factory.mktemp("data"))}}
    with (
        ProxyProcess(kafka.bootstrap_servers, name=unique("proxy"), broker_id=1, extra={**ENABLED, **data}) as first,
        ProxyProcess(kafka.bootstrap_servers, name=unique("proxy"), broker_id=2) as second,
    ):
        yield Side(kafka, [first, second])


def test_a_proxy_that_does_not_have_a_plugin_refuses_what_it_would_look_at(side: Side) -> None:
    first, second = side.proxies
    prefix = unique("plugged-") + "-"
    first.cli("namespace", "create", prefix)
    with pytest.raises(ProxyFailed, match="there is no such plugin here"):
        second.cli("plugin", "enable", "capture", "--namespace", prefix)
    enabled = first.cli("plugin", "enable", "capture", "--namespace", prefix)
    assert enabled["waiting_for"] == [], "it is returned when both act on it"
    for proxy, state in ((first, "running"), (second, "failed")):
        (status,) = proxy.cli("plugin", "list", "--namespace", prefix)["enabled"]
        assert (status["state"], status["reason"] is None) == (state, state == "running"), proxy.log
    assert "no such plugin" in status["reason"]
    topic, other = prefix + "t", unique("other-")
    for name in (topic, other):
        side.create_topic(name, 2)
    places = until("there are leaders", lambda: leaders(side, topic))
    assert sorted(places.values()) == [1, 2]
    (taken,) = (partition for partition, broker in places.items() if broker == 1)
    assert side.produce(topic, [b"x"], partition=taken) == [0]
    assert delivered(side, topic, 1 - taken) == KafkaError._MSG_TIMED_OUT, (
        "it is tried again until the producer gives up"
    )
    assert side.end(topic, 1 - taken) == 0
    assert delivered(side, other, 0) is None
    assert delivered(side, other, 1) is None
    first.cli("plugin", "disable", "capture", "--namespace", prefix)
    assert delivered(side, topic, 1 - taken) is None


def leaders(side: Side, topic: str) -> dict[int, int]:
    partitions = side.admin().list_topics(topic, timeout=10).topics[topic].partitions
    return {number: partition.leader for number, partition in partitions.items() if partition.leader >= 0}


def delivered(side: Side, topic: str, partition: int) -> int | None:
    """The error of a delivery, None for none."""
    errors: list[int | None] = []

    def report(error: KafkaError | None, message: Message) -> None:
        errors.append(None if error is None else error.code())

    producer: Producer = side.producer(message_timeout_ms=3000)
    producer.produce(topic, b"x", partition=partition, on_delivery=report)
    assert producer.flush(30) == 0
    return errors[0]
