"""Namespaces on real clusters: what is in them, what overlaps, consumers that read nothing older than the source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from support.kafka import unique
from support.links import Linked, Side, linked, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        pair.raise_levels()
        yield pair


class Reader:
    """A consumer of one partition, through the proxies."""

    def __init__(self, side: Side, topic: str) -> None:
        self._consumer = Consumer({"bootstrap.servers": side.bootstrap, "group.id": "r", "enable.auto.commit": False})
        self._topic = topic

    def begin(self) -> None:
        """Read from the first record on."""
        self._consumer.assign([TopicPartition(self._topic, 0, 0)])

    def read(self, count: int, wait_s: float) -> list[bytes | None]:
        found = self._consumer.consume(count, wait_s)
        assert all(message.error() is None for message in found), [message.error() for message in found]
        return [message.value() for message in found]

    def close(self) -> None:
        self._consumer.close()


def test_consumers_wait_while_a_follower_may_be_older_than_its_source(link: Linked) -> None:
    topics = []
    for name in ("fresh", "stale"):
        prefix = unique(name) + "-"
        link.attach(prefix, prefix)
        link.b.proxy.cli("namespace", "alter", prefix, "--stale-reads", "no" if name == "fresh" else "yes")
        topics.append(prefix + "t")
        link.a.create_topic(topics[-1])
        link.a.produce(topics[-1], [b"one", b"two"])
        link.wait_end(topics[-1], 2)
    link.wait_following(2)
    until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"), 20)
    until("In-Sync", lambda: link.b.link(link.name)["state"] == "In-Sync")
    fresh, stale = topics
    with closing(Reader(link.b, fresh)) as waiting, closing(Reader(link.b, stale)) as reading:
        for reader in (waiting, reading):
            reader.begin()
            assert reader.read(2, 30) == [b"one", b"two"]
        link.a.proxy.pause()
        try:
            until("B does not know any more", lambda: link.b.link(link.name)["state"] != "In-Sync")
            for topic in topics:
                link.a.produce(topic, [b"not here yet"], direct=True)
            for reader in (waiting, reading):
                reader.begin()
            assert reading.read(2, 30) == [b"one", b"two"]
            assert waiting.read(1, 2.0) == []
        finally:
            link.a.proxy.resume()
        assert waiting.read(3, 60) == [b"one", b"two", b"not here yet"]
        link.a.produce(fresh, [b"more"])
        assert waiting.read(1, 60) == [b"more"]
    link.a.proxy.cli("link", "set-mode", link.name, "asynchronous")


def test_what_is_in_a_namespace_and_what_overlaps_it(link: Linked) -> None:
    outer = unique("ab")
    inner = outer + "-eu-"
    assert outer_holds(link, outer, inner)
    link.attach(inner, inner)
    assert link.b.proxy.cli("namespace", "show", inner)["empty"]
    with pytest.raises(ProxyFailed, match="overlaps"):
        link.attach(outer, outer)
    topic, group = inner + "t", unique("app-")
    link.a.create_topic(topic, 2)
    link.wait_end(topic, 0)
    shown = link.b.proxy.cli("namespace", "show", inner)
    (held,) = until("it follows", lambda: followed(link.b, inner))
    assert (held["name"], held["partitions"], held["link_name"]) == (topic, 2, link.name)
    assert (shown["namespace"]["state"], [each["role"] for each in shown["namespace"]["mappings"]]) == (
        "reserved",
        ["follower"],
    )
    link.b.proxy.cli("namespace", "create", outer)
    assert [each["name"] for each in link.b.proxy.cli("namespace", "show", outer)["items"]] == [topic]

    link.b.proxy.cli("namespace", "create", group, "--type", "consumer-group")
    assert link.b.proxy.cli("namespace", "show", group, "--type", "consumer-group")["empty"]
    settings = {"bootstrap.servers": link.b.bootstrap, "group.id": group + "1", "enable.auto.commit": False}
    with closing(Consumer(settings)) as consumer:
        consumer.commit(offsets=[TopicPartition(topic, 0, 0)], asynchronous=False)
    groups = link.b.proxy.cli("namespace", "show", group, "--type", "consumer-group")
    assert [each["name"] for each in groups["items"]] == [group + "1"]

    link.wait_following()
    link.a.proxy.cli("namespace", "alter", inner, "--informational", "yes")
    with pytest.raises(ProxyFailed, match="informational"):
        link.a.proxy.cli("link", "set-mode", link.name, "synchronous")
    assert not link.a.proxy.cli("namespace", "alter", inner, "--informational", "no")["informational"]


def outer_holds(link: Linked, outer: str, inner: str) -> bool:
    found: dict[str, Any] = link.a.proxy.cli("namespace", "overlap", outer, inner)
    return (found["overlap"], found["relation"]) == (True, "holds")


def followed(side: Side, prefix: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = side.proxy.cli("namespace", "show", prefix)["items"]
    return items if items and all(each["state"] == "following" for each in items) else []
