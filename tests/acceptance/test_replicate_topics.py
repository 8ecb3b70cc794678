"""KIP-986's user stories about topics, step by step, on two real clusters with unmodified clients."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException
from support.kafka import Clusters, unique
from support.links import Linked, Side, linked, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers

REFUSED_WRITE = KafkaError.INVALID_REQUEST


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """A proxy in front of each of two clusters, and a link between them."""
    with linked(*kafka_pair) as pair:
        yield pair


def refusal(pair: Linked, topic: str) -> KafkaError:
    """What a producer of B's proxy is told."""
    with pytest.raises(KafkaException) as raised:
        pair.b.produce(topic, [b"not here"])
    error: KafkaError = raised.value.args[0]
    return error


def mappings(pair: Linked, side: Side) -> list[tuple[str, str, str]]:
    return [(each["local"], each["remote"], each["role"]) for each in side.link(pair.name)["mappings"]]


def test_add_an_empty_namespace_and_create_a_topic_afterwards(link: Linked) -> None:
    """ "Adding an empty namespace 'local-' to a replication link, and creating a topic within it afterwards"."""
    local, remote = unique("local-") + "-", unique("remote-") + "-"
    link.a.proxy.cli("namespace", "create", local, "--type", "topic")
    link.b.proxy.cli("namespace", "create", remote, "--type", "topic")
    # On either cluster: here on the follower's.
    link.b.proxy.cli("link", "attach", link.name, "--local", remote, "--remote", local, "--role", "follower")
    assert link.a.link(link.name)["state"] == "Following"
    assert (local, remote, "leader") in mappings(link, link.a)
    assert (remote, local, "follower") in mappings(link, link.b)

    link.a.create_topic(local + "clicks", partitions=2)
    link.a.produce(local + "clicks", [b"first", b"second"], partition=1)
    started = time.monotonic()
    until("the topic is there", lambda: link.b.topics().get(remote + "clicks") == 2, 5, 0.01)
    assert time.monotonic() - started < 2  # a second, and what this machine takes to look
    link.wait_end(remote + "clicks", 2, partition=1)
    assert [record.value for record in link.b.read(remote + "clicks", 1)] == [b"first", b"second"]
    link.wait_following()
    assert link.a.link(link.name)["state"] == link.b.link(link.name)["state"] == "Following"
    assert refusal(link, remote + "clicks").code() == REFUSED_WRITE


def test_add_a_single_existing_topic(link: Linked) -> None:
    """ "Adding a single existing topic (local-clicks) to a replication link"."""
    local, remote = unique("local-clicks-"), unique("remote-clicks-")
    link.a.create_topic(local, partitions=2)
    link.a.produce(local, [b"%d" % number for number in range(5000)], partition=0, compression_type="zstd")
    link.a.produce(local, [b"%d" % number for number in range(10)], partition=1)
    link.a.proxy.cli("namespace", "create", local, "--type", "topic")
    link.b.proxy.cli("namespace", "create", remote, "--type", "topic")
    link.attach(local, remote)

    namespaces = {each["prefix"]: each for each in link.b.proxy.get("/v1/namespaces")["items"]}
    assert namespaces[remote]["state"] == "reserved"
    until("the link is back to Following", lambda: link.b.link(link.name)["state"] == "Following")
    link.wait_end(remote, 5000, partition=0)
    link.wait_end(remote, 10, partition=1)
    assert link.b.read(remote) == link.a.read(local)
    link.wait_following()
    assert link.verify()["equal"]


def test_remove_a_follower_topic_and_make_it_writable(link: Linked) -> None:
    """ "Remove a follower topic from a replication link and make it writable"."""
    local, remote = unique("local-") + "-", unique("remote-") + "-"
    link.attach(local, remote)
    link.a.create_topic(local + "clicks")
    link.a.produce(local + "clicks", [b"theirs"] * 100)
    link.wait_end(remote + "clicks", 100)
    assert refusal(link, remote + "clicks").code() == REFUSED_WRITE

    link.detach(local)
    assert link.a.link(link.name)["state"] == link.b.link(link.name)["state"] == "Following"
    assert not link.b.partitions(link.name, remote + "clicks")
    error = refusal(link, remote + "clicks")  # the namespace is reserved still
    assert error.code() == REFUSED_WRITE
    topics = {each["topic"]: each for each in link.b.proxy.get("/v1/topics")["items"]}
    assert topics[remote + "clicks"]["state"] == "detached"

    link.b.proxy.cli("namespace", "alter", remote, "--type", "topic", "--no-reserved")
    assert link.b.produce(remote + "clicks", [b"ours"]) == [100]
    # What the source gets from now on stays there.
    link.a.produce(local + "clicks", [b"theirs"])
    time.sleep(1.0)
    assert [record.value for record in link.b.read(remote + "clicks")] == [b"theirs"] * 100 + [b"ours"]
    # And records that are not the source's are not overwritten: following again needs the operator's consent.
    plan = link.attach(local, remote, "--dry-run")
    assert [(each["action"], each["topic"]) for each in plan["topics"]] == [("refuse", remote + "clicks")]


def test_follow_one_and_lead_many(link: Linked, shared_kafka: Clusters) -> None:
    """ "... the follower for one replication link at a time, but can be the leader for multiple links"."""
    local, remote = unique("local-") + "-", unique("remote-") + "-"
    third = shared_kafka(role="third")
    to_c, b_to_c = unique("a-to-c"), unique("b-to-c")
    with whole(third) as proxy:
        c = Side(third, [proxy])
        link.attach(local, remote)
        link.a.proxy.cli("link", "create", to_c, "--remote", proxy.link_address)
        link.a.proxy.cli("link", "attach", to_c, "--local", local, "--remote", local, "--role", "leader")
        link.a.create_topic(local + "t")
        link.a.produce(local + "t", [b"%d" % number for number in range(50)])
        link.wait_end(remote + "t", 50)
        until("C has it, too", lambda: local + "t" in c.topics() and c.end(local + "t") == 50)
        assert c.read(local + "t") == link.b.read(remote + "t") == link.a.read(local + "t")

        # B to C, into the namespace that follows A: refused, and named.
        link.b.proxy.cli("link", "create", b_to_c, "--remote", proxy.link_address)
        with pytest.raises(ProxyFailed, match="follows one link at most"):
            link.b.proxy.cli("link", "attach", b_to_c, "--local", remote, "--remote", local, "--role", "leader")
        # C may follow B's follower under another name: A's records then come by way of B.
        link.b.proxy.cli("link", "attach", b_to_c, "--local", remote, "--remote", "far-" + local, "--role", "leader")
        until("it came by way of B", lambda: "far-" + local + "t" in c.topics() and c.end("far-" + local + "t") == 50)
        assert c.read("far-" + local + "t") == link.a.read(local + "t")
        assert link.b.proxy.cli("verify", b_to_c)["equal"]
        link.b.proxy.cli("link", "delete", b_to_c)
        link.a.proxy.cli("link", "delete", to_c)
        names = [each["link_name"] for each in proxy.get("/v1/links")["items"]]
        assert names == []
