"""A follower becomes the cluster that applications write, on real clusters with unmodified clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from support.groups import commit, offsets
from support.kafka import unique
from support.links import Linked, linked, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        yield pair


@pytest.fixture
def namespaces(link: Linked) -> tuple[str, str]:
    """A pair of namespaces with a topic ``t`` of three records, which have been copied."""
    local, remote = unique("from-") + "-", unique("to-") + "-"
    link.attach(local, remote, "--disable-transaction-verification")
    link.a.create_topic(local + "t", config={"retention.ms": "86400000", "compression.type": "gzip"})
    link.a.produce(local + "t", [b"x"] * 3)
    link.wait_end(remote + "t", 3)
    return local, remote


def attach_group(link: Linked, group: str) -> None:
    link.a.proxy.cli(
        *("link", "attach", link.name, "--type", "consumer-group", "--local", group, "--remote", group),
        *("--role", "leader", "--disable-transaction-verification"),
    )


def reserved(link: Linked, prefix: str) -> str:
    state: str = link.b.proxy.get(f"/v1/namespaces/topic?prefix={prefix}")["state"]
    return state


def left_open(link: Linked, namespaces: tuple[str, str]) -> Producer:
    """A producer at A whose transaction has one record, which is at B by now."""
    local, remote = namespaces
    producer = Producer({"bootstrap.servers": link.a.bootstrap, "transactional.id": unique("open")})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(local + "t", b"never committed", partition=0)
    producer.flush(30)
    link.wait_end(remote + "t", 4)
    return producer


@pytest.mark.one_in_ci("stories", of="details of reservations")
@pytest.mark.parametrize("cleared", [("alter", "--no-reserved"), ("delete",)], ids=lambda how: how[0])
def test_a_reservation_that_is_cleared_by_hand_ends_what_is_open(
    link: Linked, namespaces: tuple[str, str], cleared: tuple[str, ...]
) -> None:
    """Nobody promotes: the namespace is detached, and opened, or deleted."""
    local, remote = namespaces
    producer = left_open(link, namespaces)
    link.detach(local)
    assert link.b.end(remote + "t", 0, "read_committed") == 3
    verb, *options = cleared
    link.b.proxy.cli("namespace", verb, remote, *options)
    assert link.b.decided_end(remote + "t") == link.b.end(remote + "t") == 5
    assert link.b.produce(remote + "t", [b"here now"]) == [5]
    committed = link.b.read(remote + "t", isolation="read_committed")
    assert [record.value for record in committed] == [b"x"] * 3 + [b"here now"]
    producer.abort_transaction(30)


def test_promoted_with_what_was_open(link: Linked, namespaces: tuple[str, str]) -> None:
    local, remote = namespaces
    producer = left_open(link, namespaces)
    assert [record.value for record in link.b.read(remote + "t", isolation="read_committed")] == [b"x"] * 3

    planned = link.b.proxy.cli("link", "promote", link.name, "--local", remote, "--dry-run")
    assert (planned["drained"], planned["namespaces"][0]["transactions_open"]) == (True, 1)
    assert reserved(link, remote) == "reserved"
    report = link.b.proxy.cli("link", "promote", link.name, "--local", remote)
    assert (report["namespaces"][0]["promoted"], report["namespaces"][0]["transactions_ended"]) == (True, 1)
    assert reserved(link, remote) == "open"
    config = link.b.topic_config(remote + "t")
    assert (config["retention.ms"], config["compression.type"]) == ("86400000", "gzip")
    assert (
        config["message.timestamp.after.max.ms"] == link.a.topic_config(local + "t")["message.timestamp.after.max.ms"]
    )
    assert all(mapping["local"] != local for mapping in link.a.link(link.name)["mappings"])

    assert link.b.produce(remote + "t", [b"here now"]) == [5]
    committed = link.b.read(remote + "t", isolation="read_committed")
    assert [record.value for record in committed] == [b"x"] * 3 + [b"here now"]
    origin = link.b.proxy.get(f"/v1/topics/{remote}t")["partitions"][0]["provenance"]
    assert [(each["start_offset"], each["end_offset"]) for each in origin] == [(0, 4)]
    producer.abort_transaction(30)


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_refused_while_something_is_missing(link: Linked, namespaces: tuple[str, str]) -> None:
    local, remote = namespaces
    link.b.create_topic(remote + "late", direct=True)
    link.b.produce(remote + "late", [b"other records"], direct=True)
    link.a.create_topic(local + "late")
    with pytest.raises(ProxyFailed, match="NOT_DRAINED") as raised:
        link.b.proxy.cli("link", "promote", link.name, "--local", remote)
    assert f"{local}late is not followed" in str(raised.value)
    assert reserved(link, remote) == "reserved"
    with pytest.raises(ProxyFailed, match="NOT_FOUND"):
        link.a.proxy.cli("link", "promote", link.name, "--local", local)
    with pytest.raises(KafkaException):
        link.b.produce(remote + "t", [b"not yet"])
    link.detach(local)


@pytest.mark.one_in_ci("stories")
@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_finished_after_kill_9(link: Linked, namespaces: tuple[str, str], delay_s: float) -> None:
    """Topics with their groups, or none of them."""
    local, remote = namespaces
    group = unique("killed-")
    attach_group(link, group)
    commit(link.a, group, {(local + "t", 0): 2})
    until("the position is there", lambda: offsets(link.b, group) == {(remote + "t", 0): 2})

    def promote() -> None:
        try:
            link.b.proxy.cli("link", "promote", link.name, "--local-group", group, "--local", remote)
        except ProxyFailed:
            pass  # it was killed

    asked = threading.Thread(target=promote)
    asked.start()
    until(
        "it has begun",
        lambda: remote in link.b.link(link.name)["promoting"] or reserved(link, remote) == "open",
        30,
        0.005,
    )
    time.sleep(delay_s)
    link.b.proxy.kill()
    asked.join(60)
    link.b.proxy.start()
    until("it is promoted", lambda: reserved(link, remote) == "open")
    assert link.b.proxy.get(f"/v1/namespaces/consumer-group?prefix={group}")["state"] == "open"
    assert offsets(link.b, group) == {(remote + "t", 0): 2}
    until("A has found B again", lambda: link.a.link(link.name)["state"] != "Disconnected")
    assert link.b.topic_config(remote + "t")["retention.ms"] == "86400000"
    assert all(mapping["local"] not in (local, group) for mapping in link.a.link(link.name)["mappings"])
    assert link.b.produce(remote + "t", [b"here now"]) == [3]
    commit(link.b, group, {(remote + "t", 0): 3})


@pytest.mark.one_in_ci("stories", of="details of reservations")
def test_groups_go_along(link: Linked, namespaces: tuple[str, str]) -> None:
    local, remote = namespaces
    group, place = unique("app-"), TopicPartition(remote + "t", 0)
    attach_group(link, group)

    def consumer(bootstrap: str) -> Consumer:
        return Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})

    there, here = consumer(link.a.bootstrap), consumer(link.b.bootstrap)
    try:
        there.commit(offsets=[TopicPartition(local + "t", 0, 2)], asynchronous=False)
        until("the position is there", lambda: here.committed([place], 30)[0].offset == 2)
        with pytest.raises(KafkaException):
            here.commit(offsets=[TopicPartition(remote + "t", 0, 1)], asynchronous=False)
        report = link.b.proxy.cli("link", "promote", link.name, "--local", remote, "--local-group", group)
        assert [(each["type"], each["promoted"]) for each in report["namespaces"]] == [
            ("topic", True),
            ("consumer-group", True),
        ]
        assert here.committed([place], 30)[0].offset == 2
        here.commit(offsets=[TopicPartition(remote + "t", 0, 3)], asynchronous=False)
        assert here.committed([place], 30)[0].offset == 3
    finally:
        there.close()
        here.close()
