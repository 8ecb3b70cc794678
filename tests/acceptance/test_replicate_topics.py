"""KIP-986's user stories about topics, step by step, on two real clusters with unmodified clients.

Their commands are those of runbooks; something dies while one of them runs.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterator
from typing import Final

import pytest
from confluent_kafka import KafkaError, KafkaException
from support.kafka import Clusters, unique
from support.links import Linked, Side, relayed, until, whole
from support.relay import Relay
from support.runbooks import Kill, Runbook, Watching, another_link, kills

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers

REFUSED_WRITE = KafkaError.INVALID_REQUEST
STATES: Final = {"asynchronous": "Following", "synchronous": "In-Sync"}
SLOW_S: Final = 0.004
"""The relay's delay of each chunk of 4 KB: about 1 MB/s."""
FAR_S: Final = 0.1
"""The same of a link over which producers do not wait."""
ACKS: Final = 50
BACKLOG: Final = [os.urandom(50_000)] * 60


@pytest.fixture(scope="module")
def scene(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[tuple[Linked, Relay]]:
    """A proxy in front of each of two clusters, a link between them, and what their links go through."""
    with relayed(*kafka_pair) as (pair, relay):
        pair.raise_levels()
        yield pair, relay


@pytest.fixture
def pair(scene: tuple[Linked, Relay]) -> Linked:
    return scene[0]


@pytest.fixture
def relay(scene: tuple[Linked, Relay]) -> Relay:
    return scene[1]


def refusal(pair: Linked, topic: str) -> KafkaError:
    """What a producer of B's proxy is told."""
    with pytest.raises(KafkaException) as raised:
        pair.b.produce(topic, [b"not here"])
    error: KafkaError = raised.value.args[0]
    return error


def told(pair: Linked, source: str, target: str) -> set[str]:
    """The states of a topic's partitions at both ends; empty if an end does not tell of it yet."""
    ends = [pair.a.partitions(pair.name, source), pair.b.partitions(pair.name, target)]
    return {str(each["state"]) for end in ends for each in end} if all(ends) else set()


def brokers(side: Side, topic: str) -> set[tuple[str, int]]:
    """Where clients of a side are told that the replicas of a topic are."""
    found = side.admin().list_topics(topic, timeout=20)
    ids = {each for partition in found.topics[topic].partitions.values() for each in partition.replicas}
    return {(found.brokers[each].host, found.brokers[each].port) for each in ids}


def mappings(pair: Linked, side: Side) -> list[tuple[str, str, str]]:
    return [(each["local"], each["remote"], each["role"]) for each in side.link(pair.name)["mappings"]]


@pytest.mark.parametrize(
    ("mode", "kill"),
    [
        pytest.param(mode, *each.values, id=f"{mode}-{each.id}", marks=each.marks)
        for mode in STATES
        for each in kills("empty-namespace", of=f"an empty namespace, {mode}")
    ],
)
def test_add_an_empty_namespace_and_create_a_topic_afterwards(
    pair: Linked, relay: Relay, mode: str, kill: Kill
) -> None:
    """ "Adding an empty namespace 'local-' to a replication link, and creating a topic within it afterwards"."""
    names = {"local-": unique("local-") + "-", "remote-": unique("remote-") + "-"}
    local, remote = names.values()
    with (
        another_link(pair, relay, mode) as link,
        Watching(link) as watching,
        Runbook("empty-namespace", link, relay, names, kill, {STATES[mode]}, watching) as book,
    ):
        book.step("Create the leader's namespace")
        book.step("Create the follower's")
        book.step("Attach them")
        assert (local, remote, "leader") in mappings(link, link.a)
        assert (remote, local, "follower") in mappings(link, link.b)
        assert watching.seen == {STATES[mode]}, watching.told
        book.step("Create a topic at the leader")
        until("the topic is there", lambda: link.b.topics().get(remote + "clicks") == 2)
        until("both sides tell of it", lambda: told(link, local + "clicks", remote + "clicks") == {STATES[mode]})
        assert watching.seen == {STATES[mode]}, watching.told
        link.a.produce(local + "clicks", [b"first", b"second"], partition=1)
        link.wait_end(remote + "clicks", 2, partition=1)
        # Over a synchronous link consumers wait (OFFSET_NOT_AVAILABLE) until B knows that it has what was acked.
        until("it is read", lambda: link.b.read(remote + "clicks", 1) == link.a.read(local + "clicks", 1))
        assert [record.value for record in link.b.read(remote + "clicks", 1)] == [b"first", b"second"]
        assert refusal(link, remote + "clicks").code() == REFUSED_WRITE


@pytest.mark.parametrize("kill", kills("existing-topic"))
def test_add_a_single_existing_topic(pair: Linked, relay: Relay, kill: Kill) -> None:
    """ "Adding a single existing topic (local-clicks) to a replication link"."""
    local, remote = unique("local-clicks-"), unique("remote-clicks-")
    pair.a.create_topic(local, partitions=2)
    pair.a.produce(local, BACKLOG, partition=0)
    pair.a.produce(local, [b"%d" % number for number in range(10)], partition=1)
    names = {"local-clicks": local, "remote-clicks": remote}
    with (
        another_link(pair, relay) as link,
        Watching(link) as watching,
        Runbook("existing-topic", link, relay, names, kill, {"Following"}, watching) as book,
    ):
        book.step("Create the leader's namespace")
        book.step("Create the follower's")
        assert (watching.seen, link.a.end(local)) == ({"Following"}, len(BACKLOG))
        relay.delay_s = SLOW_S
        try:
            book.step("Attach them")
            said = book.step("The follower's namespace is reserved")
            assert re.search(r"^state +reserved", said, re.MULTILINE), said
            until("it catches up", lambda: "Catching Up" in watching.seen | watching.meanwhile)
        finally:
            relay.delay_s = 0.0
        book.step("Wait until it is copied")
        assert link.b.read(remote) == link.a.read(local)
        assert link.b.read(remote, 1) == link.a.read(local, 1)
        assert watching.seen <= {"Following", "Catching Up"}
        at_a, at_b = brokers(link.a, local), brokers(link.b, remote)
        assert at_a.isdisjoint(at_b), "A's consumers are told of A's own brokers alone"
        follower = link.b.proxy.get(f"/v1/topics/{remote}")
        assert len({follower["topic_id"], follower["source_topic_id"], None}) == 3, "it is a topic of its own"


@pytest.mark.parametrize("kill", kills("writable-follower"))
def test_remove_a_follower_topic_and_make_it_writable(pair: Linked, relay: Relay, kill: Kill) -> None:
    """ "Remove a follower topic from a replication link and make it writable"."""
    names = {"local-": unique("local-") + "-", "remote-": unique("remote-") + "-"}
    local, remote = names.values()
    with another_link(pair, relay) as link, Watching(link) as watching:
        link.attach(local, remote)
        link.a.create_topic(local + "clicks")
        link.a.produce(local + "clicks", [b"theirs"] * 100)
        link.wait_end(remote + "clicks", 100)
        link.wait_following(2)
        assert refusal(link, remote + "clicks").code() == REFUSED_WRITE
        watching.seen.clear()
        with Runbook("writable-follower", link, relay, names, kill, {"Following"}, watching) as book:
            said = book.step("Detach it")
            assert re.search(r"^state +reserved", said, re.MULTILINE), said
            assert not link.b.partitions(link.name, remote + "clicks")
            assert (remote, local, "follower") not in mappings(link, link.b)
            assert refusal(link, remote + "clicks").code() == REFUSED_WRITE  # the namespace is reserved still
            topics = {each["topic"]: each for each in link.b.proxy.get("/v1/topics")["items"]}
            assert topics[remote + "clicks"]["state"] == "detached"
            origin = link.b.proxy.get(f"/v1/topics/{remote}clicks")["partitions"][0]["provenance"]
            assert [(each["start_offset"], each["end_offset"]) for each in origin] == [(0, 100)]
            book.step("Clear the reservation")
        assert watching.seen == {"Following"}, watching.told
        assert link.b.produce(remote + "clicks", [b"ours"]) == [100]
        # What the source gets from now on stays there.
        link.a.produce(local + "clicks", [b"theirs"])
        link.a.produce(link.names("later")[0], [b"x"])
        link.wait_following(2)
        assert [record.value for record in link.b.read(remote + "clicks")] == [b"theirs"] * 100 + [b"ours"]
        # And records that are not the source's are not overwritten: following again needs the operator's consent.
        plan = link.attach(local, remote, "--dry-run")
        assert [(each["action"], each["topic"]) for each in plan["topics"]] == [("refuse", remote + "clicks")]


def test_producers_do_not_wait_for_an_asynchronous_link(pair: Linked, relay: Relay) -> None:
    """Beside a topic that no link has, over a line that takes far longer than an ack."""
    outside = unique("outside")
    pair.a.create_topic(outside)
    with another_link(pair, relay) as link:
        inside, copy = link.names("inside")
        link.a.create_topic(inside)
        until("it follows", lambda: copy in link.b.topics())
        link.wait_following(2)
        took_s: dict[str, list[float]] = {inside: [], outside: []}
        relay.delay_s = FAR_S
        try:
            with_each = {topic: link.a.producer(linger_ms=0, acks="all") for topic in took_s}
            for _ in range(ACKS):
                for topic, producer in with_each.items():
                    began = time.perf_counter()
                    producer.produce(topic, b"x", partition=0)
                    assert producer.flush(30) == 0
                    took_s[topic].append(time.perf_counter() - began)
        finally:
            relay.delay_s = 0.0
        link.wait_end(copy, ACKS)
    median_s = {topic: statistics.median(each) for topic, each in took_s.items()}
    assert median_s[inside] < min(1.5 * median_s[outside] + 0.002, FAR_S), median_s


def test_follow_one_and_lead_many(pair: Linked, shared_kafka: Clusters) -> None:
    """ "... the follower for one replication link at a time, but can be the leader for multiple links"."""
    local, remote = unique("local-") + "-", unique("remote-") + "-"
    third = shared_kafka(role="third")
    to_c, b_to_c = unique("a-to-c"), unique("b-to-c")
    with whole(third) as proxy:
        c = Side(third, [proxy])
        pair.attach(local, remote)
        pair.a.proxy.cli("link", "create", to_c, "--remote", proxy.link_address)
        pair.a.proxy.cli("link", "attach", to_c, "--local", local, "--remote", local, "--role", "leader")
        pair.a.create_topic(local + "t")
        pair.a.produce(local + "t", [b"%d" % number for number in range(50)])
        pair.wait_end(remote + "t", 50)
        until("C has it, too", lambda: local + "t" in c.topics() and c.end(local + "t") == 50)
        assert c.read(local + "t") == pair.b.read(remote + "t") == pair.a.read(local + "t")

        # B to C, into the namespace that follows A: refused, and named.
        pair.b.proxy.cli("link", "create", b_to_c, "--remote", proxy.link_address)
        with pytest.raises(ProxyFailed, match="follows one link at most"):
            pair.b.proxy.cli("link", "attach", b_to_c, "--local", remote, "--remote", local, "--role", "leader")
        # C may follow B's follower under another name: A's records then come by way of B.
        pair.b.proxy.cli("link", "attach", b_to_c, "--local", remote, "--remote", "far-" + local, "--role", "leader")
        until("it came by way of B", lambda: "far-" + local + "t" in c.topics() and c.end("far-" + local + "t") == 50)
        assert c.read("far-" + local + "t") == pair.a.read(local + "t")
        assert pair.b.proxy.cli("verify", b_to_c)["equal"]
        pair.b.proxy.cli("link", "delete", b_to_c)
        pair.a.proxy.cli("link", "delete", to_c)
        names = [each["link_name"] for each in proxy.get("/v1/links")["items"]]
        assert names == []
