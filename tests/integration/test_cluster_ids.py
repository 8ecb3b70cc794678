"""Clusters whose ids have another form than Kafka's own, and clusters that have the same id."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.groups import commit
from support.kafka import unique
from support.links import Linked, linked, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed
from isthmus_protocol.cluster_ids import is_usual

pytestmark = [pytest.mark.brokers, pytest.mark.suite("stories")]

ODD_ID = "production/eu, no. 1"
COPY = "__consumer_offsets_production.2Feu.2C.20no..201"
BY_KAFKAS_TOOL = {"features": {"transaction.version": 2}}
"""Storage is formatted by Kafka's own tool."""


@pytest.fixture(scope="module")
def link(kafka: KafkaCluster) -> Iterator[Linked]:
    """From a cluster of an odd id to one of Kafka's form."""
    with KafkaCluster(name="odd", cluster_id=ODD_ID, **BY_KAFKAS_TOOL) as odd, linked(odd, kafka) as pair:
        pair.raise_levels()
        pair.b.proxy.cli("link", "grant", pair.name, "--may", "lead:__consumer_offsets")
        yield pair


def test_an_odd_id_is_a_warning_and_is_escaped_in_the_name_of_a_topic(link: Linked) -> None:
    link.attach()
    link.a.proxy.cli("link", "alter", link.name, "--offsets-topic", "whole")
    source, target = link.names("t")
    link.a.create_topic(source)
    link.a.produce(source, [b"a", b"b"])
    link.wait_end(target, 2)
    group = unique("group-")
    commit(link.a, group, {(source, 0): 1})

    def copied() -> list[int]:
        groups = link.b.proxy.get(f"/v1/links/{link.name}/offsets")["groups"]
        return [offset["offset"] for each in groups if each["group"] == group for offset in each["offsets"]]

    until("the commit is in the copy", lambda: copied() == [1])
    assert COPY in link.b.topics()
    assert link.verify()["equal"]
    for side in (link.a, link.b):
        status = side.proxy.get("/v1/status")
        assert status["ready"]
        (warning,) = [each for each in status["process"]["warnings"] if "the id of" in each]
        assert repr(ODD_ID) in warning
    assert link.b.link(link.name)["remote_cluster_id"] == ODD_ID


def test_a_cluster_keeps_its_id(link: Linked) -> None:
    """Also where brokers and proxies start again: what a link leads to stays the same."""
    link.a.kafka.restart(1)
    link.a.proxy.kill()
    link.a.proxy.start()
    assert link.a.proxy.get("/v1/status")["cluster_id"] == ODD_ID
    until("the link goes on", lambda: link.b.link(link.name)["state"] != "Disconnected")


def test_a_cluster_with_the_id_of_another_one_is_linked_with_neither(link: Linked) -> None:
    with KafkaCluster(name="twin", cluster_id=ODD_ID, **BY_KAFKAS_TOOL) as twin, whole(twin) as proxy:
        for asking, remote, code, words in (
            (link.a.proxy, proxy, "INVALID_REQUEST", "each with an id of its own"),
            (proxy, link.a.proxy, "INVALID_REQUEST", "each with an id of its own"),
            (link.b.proxy, proxy, "PEER_IS_ANOTHER_CLUSTER", link.name),
            (proxy, link.b.proxy, "PEER_IS_ANOTHER_CLUSTER", link.name),
        ):
            with pytest.raises(ProxyFailed, match=code) as refused:
                asking.cli("link", "create", unique("twin"), "--remote", remote.link_address)
            assert words in str(refused.value)
        assert proxy.cli("link", "list") == []
        assert [each["link_name"] for each in link.b.proxy.cli("link", "list")] == [link.name]
        # Another link with the cluster that is linked already is welcome.
        again = unique("again")
        link.a.proxy.cli("link", "create", again, "--remote", link.b.proxy.link_address)
        link.a.proxy.cli("link", "delete", again)


def test_kafka_gives_a_new_cluster_an_id_of_its_form(kafka: KafkaCluster) -> None:
    """Whoever formats a cluster takes one that Kafka's tool makes."""
    first, second = (kafka.tool("kafka-storage", "random-uuid").stdout.strip() for _ in range(2))
    assert is_usual(first)
    assert is_usual(second)
    assert len(first) == len(second) == 22
    assert first != second
