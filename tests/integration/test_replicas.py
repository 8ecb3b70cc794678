"""Targets of three brokers: how many replicas follower topics have, and what acks mean where one or two are down."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from support.links import Linked, linked, until, whole

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

THREE = ("--config", "follower.replication.factor=3", "--config", "follower.min.insync.replicas=2")


@pytest.fixture(scope="module")
def link(kafka: KafkaCluster) -> Iterator[Linked]:
    """A target of this module's own: its brokers are killed."""
    with (
        KafkaCluster(name="replicas", brokers=3) as target,
        # A lease that outlasts the election of another leader of the control topic, and an ack that is waited for in
        # vain (10 s) behind the end of two brokers: who has none tells that, and asks brokers for nothing more.
        linked(kafka, target, b_proxies=[whole(target, proxy={"lease_s": 30.0})]) as pair,
    ):
        pair.attach()
        yield pair


@pytest.fixture(autouse=True)
def _all_are_there(link: Linked) -> Iterator[None]:
    yield
    link.b.kafka.start_brokers([each for each in link.b.kafka.broker_ids if not link.b.kafka.alive(each)])
    wait_live(link, 3)


def wait_live(link: Linked, count: int) -> None:
    until(f"{count} brokers are there", lambda: len(link.b.kafka.live_brokers()) == count)


def replicas(link: Linked, topic: str) -> tuple[int, int]:
    """How many replicas a topic of B has, and how many are in sync."""
    found = link.b.admin(direct=True).list_topics(topic, timeout=20).topics[topic].partitions[0]
    return len(found.replicas), len(found.isrs)


def told(link: Linked, topic: str) -> str:
    found = link.b.partition(link.name, topic) or {}
    return f"{found.get('reason')}: {found.get('message')}"


@pytest.mark.one_in_ci("stories", of="the target's topics")
def test_made_while_a_broker_is_away(link: Linked) -> None:
    link.a.proxy.cli("link", "alter", link.name, *THREE)
    known = {"follower.replication.factor": "3", "follower.min.insync.replicas": "2"}
    until("B knows it", lambda: link.b.link(link.name)["config"] == known)
    link.b.kafka.kill(3)
    wait_live(link, 2)
    source, target = link.names("away")
    link.a.create_topic(source)
    link.a.produce(source, [b"1"])
    link.wait_end(target, 1)
    assert link.b.topic_config(target)["min.insync.replicas"] == "2"
    assert replicas(link, target) == (3, 2)
    link.b.kafka.start_broker(3)
    until("all have it", lambda: replicas(link, target) == (3, 3))
    assert link.wait_state(target, "Following")["reason"] is None


@pytest.mark.one_in_ci("stories", of="the target's topics")
def test_few_replicas_become_many_whoever_is_killed(link: Linked) -> None:
    """Also those of a link that says so later: it is shown until it is so, and clients go on."""
    fewer = ("--config", "follower.replication.factor=2", "--config", "follower.min.insync.replicas=")
    link.a.proxy.cli("link", "alter", link.name, *fewer)
    source, target = link.names("few")
    link.a.create_topic(source, 3)
    link.a.produce(source, [b"1"] * 100)
    link.wait_end(target, 100)
    assert replicas(link, target) == (2, 2)
    (kept,) = (each for each in link.b.kafka.broker_ids if each not in brokers_of(link, target))
    link.b.kafka.kill(kept)
    wait_live(link, 2)
    link.a.proxy.cli("link", "alter", link.name, *THREE)
    until("B says it", lambda: told(link, target).startswith("TARGET_LACKS_REPLICAS: "))
    planned = link.b.proxy.cli("link", "promote", link.name, "--local", link.remote, "--dry-run")
    (namespace,) = planned["namespaces"]
    # Of some partition the broker that is away had a replica; or it was to get one before it was known to be away.
    lacking = re.compile(rf"{target} has [12] of 3 replicas: (2 brokers|the others are being filled)")
    assert [each for each in namespace["replicas_lacking"] if lacking.match(each)]
    link.b.proxy.kill()
    # As whoever gave it replicas leaves it that is killed before it is done.
    once = ConfigEntry("min.insync.replicas", "1", incremental_operation=AlterConfigOpType.SET)
    control = ConfigResource(ResourceType.TOPIC, "__isthmus_control", incremental_configs=[once])
    link.b.admin(direct=True).incremental_alter_configs([control])[control].result(30)
    link.b.kafka.start_broker(kept)
    link.b.proxy.start()
    until("it has three", lambda: replicas(link, target) == (3, 3))
    until("nothing is told", lambda: told(link, target) == "None: None")
    until("two have to have it", lambda: link.b.topic_config(target)["min.insync.replicas"] == "2")
    link.a.produce(source, [b"2"])
    link.wait_end(target, 101)
    assert replicas(link, "__isthmus_control") == (3, 3)
    assert link.b.topic_config("__isthmus_control")["min.insync.replicas"] == "2"


def brokers_of(link: Linked, topic: str) -> set[int]:
    """The brokers that have a replica of a topic's first partition."""
    return set(link.b.admin(direct=True).list_topics(topic, timeout=20).topics[topic].partitions[0].replicas)


class Writer:
    """A producer that waits for each ack, and what was acked."""

    def __init__(self, link: Linked, topic: str) -> None:
        self._link = link
        self._topic = topic
        self.acked: list[bytes] = []
        self.waited_s = 0.0

    def write(self) -> None:
        """Write a record, until it is acked."""
        value, began = b"%d" % len(self.acked), time.monotonic()
        assert self._link.a.produce(self._topic, [value], enable_idempotence=True) == [len(self.acked)]
        self.waited_s = time.monotonic() - began
        self.acked.append(value)


@pytest.mark.one_in_ci("stories", of="the target's topics")
def test_acks_mean_that_enough_replicas_have_it(link: Linked) -> None:
    """One of three may be down. With two down the target cannot have what is acked, which is said, and mends itself."""
    link.a.proxy.cli("link", "alter", link.name, *THREE)
    source, target = link.names("acked")
    link.a.create_topic(source)
    link.wait_end(target, 0)
    until("three have all", lambda: {replicas(link, each) for each in topics_of(link)} == {(3, 3)})
    link.wait_following()
    until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"), 20)
    try:
        until("In-Sync", lambda: told_by_a(link, source)[0] == "In-Sync")
        writer, target_partition = Writer(link, source), link.b.admin(direct=True).list_topics(target, timeout=20)
        leader = target_partition.topics[target].partitions[0].leader
        first, second = sorted(set(link.b.kafka.broker_ids) - {leader})

        link.b.kafka.kill(first)
        states = set()
        while not states or replicas(link, target) != (3, 2) or len(writer.acked) < 20:
            writer.write()
            assert link.b.end(target) == len(writer.acked), "the replicas that are in sync have it"
            states.add(told_by_a(link, source)[0])
        assert states == {"In-Sync"}
        link.b.kafka.start_broker(first)
        until("three have all", lambda: replicas(link, target) == (3, 3))

        for broker in (first, second):
            link.b.kafka.stop_broker(broker)
        acked = len(writer.acked)
        writer.write()
        assert writer.waited_s > 2, "it was not acked before it was recorded that the target does not have it"
        state, reason = told_by_a(link, source)
        assert state == "Out-Of-Sync"
        assert "nothing was confirmed" in reason
        until("B says why", lambda: "NOT_ENOUGH_REPLICAS" in told(link, target))
        writer.write()
        assert link.b.kafka.alive(leader)

        link.b.kafka.start_brokers([first, second])
        until("In-Sync again", lambda: told_by_a(link, source)[0] == "In-Sync")
        writer.write()
        assert len(writer.acked) == acked + 3
        assert [record.value for record in link.b.read(target)] == writer.acked
        assert link.verify()["equal"]
    finally:
        link.a.proxy.cli("link", "set-mode", link.name, "asynchronous")


def topics_of(link: Linked) -> list[str]:
    """B's topics that follow."""
    return [topic for topic in link.b.topics() if topic.startswith(link.remote)]


def told_by_a(link: Linked, topic: str) -> tuple[str, str]:
    """The state of a partition at A, and why it is that."""
    found = link.a.partition(link.name, topic) or {}
    return str(found.get("state")), f"{found.get('reason')}: {found.get('message')}" if found.get("reason") else ""
