"""User story: what a link may have, and what becomes of its namespaces when it goes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaException
from support.kafka import unique
from support.links import Linked, relayed, until
from support.relay import Relay
from support.runbooks import Kill, Runbook, another_link, delete_link, kills

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Linked, Relay]]:
    """Clusters of its own: the empty prefix has all their topics."""
    with (
        KafkaCluster(name="rules-a", brokers=1) as a,
        KafkaCluster(name="rules-b", brokers=1) as b,
        relayed(a, b) as (pair, relay),
    ):
        pair.raise_levels()
        yield pair, relay


def topic_id(pair: Linked, topic: str) -> str:
    found: str = pair.b.proxy.get(f"/v1/topics/{topic}")["topic_id"]
    return found


def is_reserved(told: str) -> bool:
    return re.search(r"^state +reserved", told, re.MULTILINE) is not None


def refused(pair: Linked, topic: str) -> None:
    with pytest.raises(KafkaException):
        pair.b.produce(topic, [b"not here"])


@pytest.mark.parametrize("kill", kills("namespaces"))
def test_what_becomes_of_namespaces(scene: tuple[Linked, Relay], kill: Kill) -> None:
    pair, relay = scene
    orders, metrics, second = unique("orders-"), unique("metrics-") + "-", unique("second")
    names = {
        "orders-eu-": f"{orders}-eu-",
        "orders-": f"{orders}-",
        "metrics-": metrics,
        "second": second,
    }
    eu, topic = f"{orders}-eu-t", f"{orders}-t"
    try:
        with (
            another_link(pair, relay) as link,
            Runbook("namespaces", link, relay, names, kill, {"Following"}) as book,
        ):
            book.step("Attach a namespace")
            for name in (eu, topic):
                link.a.create_topic(name)
                link.a.produce(name, [b"before"] * 10)
                link.wait_end(name, 10)
            assert f"all names of {orders}-eu- are in {orders}-" in book.step(
                "One inside of it is not attached beside it"
            )
            link.a.produce(eu, [b"more"])  # it is of both namespaces: it follows as before
            link.wait_end(eu, 11)
            book.step("What is attached is not deleted")
            book.step("An informational namespace is in no synchronous link")
            link.a.create_topic(metrics + "t")
            link.a.produce(metrics + "t", [b"before"] * 10)
            link.wait_end(metrics + "t", 10)
            former = topic_id(link, topic)

            link.a.proxy.cli("link", "detach", link.name, "--local", link.local)  # the page knows nothing of it
            assert book.step("Delete the link").count("reserved") >= 2
            for name in (topic, metrics + "t"):
                refused(link, name)
                origin = link.b.proxy.get(f"/v1/topics/{name}")["partitions"][0]["provenance"]
                assert [(each["start_offset"], each["end_offset"]) for each in origin] == [(0, 10)]
            link.a.produce(topic, [b"meanwhile"] * 10)
            book.step("Attach them to another link")
            link.wait_end(topic, 20)
            assert topic_id(link, topic) == former, "nothing was copied again"
            assert link.b.read(topic) == link.a.read(topic)

            book.step("Or make them writable, or delete them")
            assert link.b.produce(metrics + "t", [b"ours"]) == [10]
            assert metrics not in {each["prefix"] for each in link.b.proxy.get("/v1/namespaces")["items"]}
            link.b.delete_topic(metrics + "t")  # the empty prefix would have it
            link.a.delete_topic(metrics + "t")
            # Not followed, whether it was there before or not; what is left out is looked at with each attachment.
            outside = ["_" + orders, "_later" + orders]
            link.a.create_topic(outside[0])
            book.step("The empty prefix")
            assert topic_id(link, topic) == former
            until("it is told", lambda: left_out(link, second, outside[0]))
            link.a.create_topic(outside[1])
            link.a.create_topic(some := unique("any"))
            for name in (*outside, some):
                link.a.produce(name, [b"x"])
            until("it follows", lambda: some in link.b.topics() and link.b.end(some) == 1)
            assert link.b.topics().keys().isdisjoint(outside)
    finally:
        delete_link(pair, second)
        for side in (pair.a, pair.b):  # else it reserves all that the next case makes
            side.proxy.cli("namespace", "delete", "", check=False)


def left_out(pair: Linked, link: str, topic: str) -> bool:
    return topic in {each["name"] for each in pair.a.link(link)["left_out"]}
