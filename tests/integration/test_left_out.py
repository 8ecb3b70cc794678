"""Names that begin with underscores: followed by namespaces whose prefix does, left out by the empty one, and said."""

from __future__ import annotations

from typing import Any

import pytest
from support.groups import commit
from support.links import Linked, linked, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("stories", of="settings that are refused")]

TOPICS = ["orders", "_schemas", "__debezium-heartbeat.a"]
LEFT_OUT = {("topic", "_schemas"), ("topic", "__debezium-heartbeat.a"), ("consumer-group", "_connect")}


def attached(link: Linked, prefix: str, kind: str, *more: str) -> Any:
    names = "--local", prefix, "--remote", prefix, "--type", kind
    consent = ("--disable-transaction-verification",) if kind == "consumer-group" else ()
    return link.a.proxy.cli("link", "attach", link.name, *names, "--role", "leader", *consent, *more)


def named(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(each["type"], each["name"]) for each in report["left_out"]}


def named_of(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {each for namespace in report["namespaces"] for each in named(namespace)}


def test_what_begins_with_an_underscore() -> None:
    with (
        KafkaCluster(name="left-out-a", brokers=1) as a,
        KafkaCluster(name="left-out-b", brokers=1) as b,
        linked(a, b) as link,
    ):
        for topic in TOPICS:
            link.a.create_topic(topic, direct=True)
            link.a.produce(topic, [topic.encode()] * 3, direct=True)
        commit(link.a, "app", {("orders", 0): 2}, direct=True)
        commit(link.a, "_connect", {("orders", 0): 1}, direct=True)
        nothing = link.verify(check=False)
        assert (nothing["equal"], nothing["partitions"]) == (False, [])
        assert "nothing was compared" in nothing["message"]

        of_topics = {each for each in LEFT_OUT if each[0] == "topic"}
        dry = attached(link, "", "topic", "--dry-run")
        assert [each["topic"] for each in dry["topics"]] == ["orders"]
        assert named(dry) == of_topics
        assert "attach a namespace '_'" in dry["left_out"][0]["reason"]
        assert named(attached(link, "", "topic")) == of_topics
        assert named(attached(link, "", "consumer-group")) == LEFT_OUT - of_topics
        link.wait_end("orders", 3)
        for side in (link.a, link.b):
            until("status lists them", lambda side=side: named(side.link(link.name)) == LEFT_OUT, 20)
        assert set(link.b.topics()) & set(TOPICS) == {"orders"}
        report = until("verified", lambda: (found := link.verify(check=False))["equal"] and found, 20)
        assert named(report) == LEFT_OUT
        namespaces = "--local", "", "--local-group", ""
        assert named_of(link.b.proxy.cli("link", "promote", link.name, *namespaces, "--dry-run")) == LEFT_OUT

        # A namespace whose own prefix begins with an underscore has them, but for Kafka's own.
        for kind in ("topic", "consumer-group"):
            assert not attached(link, "_", kind, "--dry-run")["left_out"]
        attached(link, "_", "topic")
        for topic in TOPICS[1:]:
            link.wait_end(topic, 3)
        until("one is left out", lambda: named(link.b.link(link.name)) == LEFT_OUT - of_topics, 20)
        assert sorted(set(link.b.topics()) & set(TOPICS)) == sorted(TOPICS)
        report = until("verified", lambda: (found := link.verify(check=False))["equal"] and found, 20)
        assert {each["topic"] for each in report["partitions"]} == set(TOPICS)

        # The source is gone: what it said last is what there is.
        link.a.proxy.close()
        until("disconnected", lambda: link.b.link(link.name)["state"] == "Disconnected", 20)
        assert named_of(link.b.proxy.cli("link", "failover", link.name, "--dry-run")) == LEFT_OUT - of_topics
