"""A failover that is tried on a copy: its figures are those of the real one after it, and nothing is left of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from support.groups import commit, offsets
from support.kafka import unique
from support.links import Linked, linked, relayed, sidecars, until, whole
from support.relay import Relay

from isthmus_bench.kafka import KafkaCluster
from isthmus_control.model import DRILL_PREFIX

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

TOPICS = {"t": 3, "u": 2}
GROUPS = 4
LOST = 37
CLOSE_S = 2.0
"""How far the time of a failover may be from that of the drill before it: both ask brokers for the same, and this
machine has other things to do."""


@pytest.fixture
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[tuple[Linked, Relay]]:
    """Topics, and groups that have committed offsets there, which follow."""
    with relayed(*kafka_pair) as (pair, relay):
        pair.raise_levels()
        pair.attach(None, None, "--disable-transaction-verification")
        pair.attach(pair.local, pair.remote, "--type", "consumer-group", "--disable-transaction-verification")
        for topic, partitions in TOPICS.items():
            pair.a.create_topic(pair.local + topic, partitions, {"retention.ms": "86400000"})
            for partition in range(partitions):
                pair.a.produce(pair.local + topic, [b"x"] * 20, partition)
        pair.wait_following(len(TOPICS))
        for number in range(GROUPS):
            commit(pair.a, f"{pair.local}app-{number}", {(pair.local + "t", number % 3): 10 + number})
        for number in range(GROUPS):
            position = {(pair.remote + "t", number % 3): 10 + number}
            until("committed", lambda g=number, p=position: offsets(pair.b, f"{pair.remote}app-{g}") == p)
        yield pair, relay


def opened(pair: Linked) -> Producer:
    """A transaction with a record in each topic, which the other cluster has."""
    producer = pair.a.producer(transactional_id=unique("open-"), linger_ms=0)
    producer.init_transactions(30)
    producer.begin_transaction()
    for topic in TOPICS:
        producer.produce(pair.local + topic, b"open", partition=1)
    assert producer.flush(30) == 0
    until("copied", lambda: all(pair.b.end(pair.remote + topic, 1) == 21 for topic in TOPICS))
    return producer


def ends(pair: Linked) -> dict[tuple[str, int], int]:
    """B's logs."""
    return {
        (topic, each): pair.b.end(pair.remote + topic, each) for topic, many in TOPICS.items() for each in range(many)
    }


def left_over(pair: Linked) -> list[str]:
    """What there is of copies at B."""
    listed = pair.b.admin(direct=True).list_consumer_groups().result(30)
    namespaces = [each["prefix"] for each in pair.b.proxy.get("/v1/namespaces")["items"]]
    names = [*pair.b.topics(), *(each.group_id for each in listed.valid), *namespaces]
    return sorted(name for name in names if name.startswith(DRILL_PREFIX))


def drill(pair: Linked, *more: str, check: bool = True) -> Any:
    return pair.b.proxy.cli("drill", "failover", pair.name, *more, check=check)


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_its_figures_are_those_of_the_failover_that_follows(link: tuple[Linked, Relay]) -> None:
    pair, relay = link
    still_open = opened(pair)
    before = ends(pair)
    report = drill(pair)
    assert (report["lost"]["known"], report["lost"]["records"], report["lost"]["positions"]) == (True, 0, 0)
    assert report["copy_size"] == {"topics": 2, "partitions": 5, "groups": GROUPS, "not_copied": []}
    assert report["copy_deleted"]
    until("no broker shows any of it", lambda: not left_over(pair))
    assert ends(pair) == before, "nothing is written to what follows"
    measured = report["measured"]
    assert (measured["transactions_ended"], measured["transactions_committed"]) == (2, 0)
    assert (measured["positions"], measured["settings_refused"]) == (GROUPS, [])

    relay.cut(refuse=True)
    until("A knows that it is cut", lambda: pair.a.link(pair.name)["state"] == "Disconnected")
    pair.a.produce(pair.local + "t", [b"lost"] * LOST, 2)
    at_a = pair.a.proxy.cli("drill", "failover", pair.name)["lost"]
    assert (at_a["known"], at_a["records"], at_a["acked_records"]) == (True, LOST, LOST), at_a
    assert [(each["topic"], each["partition"]) for each in at_a["partitions"]] == [(pair.local + "t", 2)]
    assert at_a["seconds"] is not None
    unknown = drill(pair, "--dry-run", check=False)["lost"]
    assert (unknown["known"], unknown["reason"], unknown["records"]) == (False, "SOURCE_AWAY", 0)

    until("what was leased is over", lambda: pair.b.link(pair.name)["last_heard_seconds"] > measured["leases_seconds"])
    lost = sum(pair.a.end(pair.local + topic, each) - end for (topic, each), end in ends(pair).items())
    failed_over = pair.b.proxy.cli("link", "failover", pair.name)
    took = next(each for each in pair.b.proxy.get("/v1/operations")["items"] if each["kind"] == "failover")["seconds"]
    assert lost == at_a["records"], "as many as the drill said"
    expected = measured["look_seconds"] + measured["carry_out_seconds"]
    print(f"failed over in {took:.2f} s, in the drill {expected:.2f} s: {measured}")
    assert abs(took - expected) < CLOSE_S
    assert all(each["promoted"] for each in failed_over["namespaces"])
    ended = [
        sum(each[name] for each in failed_over["namespaces"])
        for name in ("transactions_ended", "transactions_committed")
    ]
    assert ended == [measured["transactions_ended"], measured["transactions_committed"]]
    assert pair.b.produce(pair.remote + "t", [b"here now"], 2) == [20]
    still_open.purge()


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_nothing_is_left_of_one_that_is_killed(link: tuple[Linked, Relay]) -> None:
    pair, _ = link
    before = ends(pair)

    def ask() -> None:
        drill(pair, check=False)  # it is killed

    asked = threading.Thread(target=ask)
    asked.start()
    shown = until("it is shown", lambda: pair.b.link(pair.name)["drill"], interval_s=0.005)
    assert shown["in_use"]
    pair.b.proxy.kill()
    asked.join(60)
    pair.b.proxy.spawn()
    pair.b.proxy.wait_ready()
    until("it is deleted", lambda: pair.b.link(pair.name)["drill"] is None and left_over(pair) == [])
    assert ends(pair) == before
    pair.wait_following(len(TOPICS))
    assert drill(pair)["copy_deleted"]
    until("no broker shows any of it", lambda: not left_over(pair))


@pytest.mark.suite("stories")
@pytest.mark.parametrize("sidecars_lead", [True, False], ids=["of the source", "of the target"])
def test_over_a_synchronous_link_with_several_proxies(
    kafka_three: KafkaCluster, kafka: KafkaCluster, sidecars_lead: bool
) -> None:
    """Whichever of the target's is asked, all of the source's say what they push; what is acked is not lost."""
    three, one = sidecars(kafka_three), [whole(kafka)]
    a, b = (kafka_three, kafka) if sidecars_lead else (kafka, kafka_three)
    with linked(a, b, a_proxies=three if sidecars_lead else one, b_proxies=one if sidecars_lead else three) as pair:
        pair.raise_levels()
        pair.attach(None, None, "--disable-transaction-verification")
        topic, far_topic = pair.names("t")
        pair.a.create_topic(topic, 6)
        for partition in range(6):
            pair.a.produce(topic, [b"x"] * 20, partition)
        pair.wait_following()
        until("synchronous", lambda: pair.a.proxy.cli("link", "set-mode", pair.name, "synchronous"))
        until("In-Sync", lambda: all(pair.a.link(pair.name, each)["state"] == "In-Sync" for each in pair.a.proxies))
        producer = pair.a.producer(transactional_id=unique("open-"), linger_ms=0)
        producer.init_transactions(30)
        producer.begin_transaction()
        for partition in range(6):
            producer.produce(topic, b"open", partition=partition)
        assert producer.flush(30) == 0  # In-Sync: the other cluster has what is acked
        before = [pair.b.end(far_topic, partition) for partition in range(6)]
        assert before == [21] * 6
        for proxy in pair.b.proxies:
            report = proxy.cli("drill", "failover", pair.name)
            said = report["lost"]
            assert (said["known"], said["records"], said["acked_records"], said["partitions_total"]) == (True, 0, 0, 6)
            assert report["measured"]["transactions_ended"] == 6
            assert report["copy_deleted"]
        until("no broker shows any of it", lambda: not left_over(pair))
        assert [pair.b.end(far_topic, partition) for partition in range(6)] == before
        assert all(pair.a.link(pair.name, each)["state"] == "In-Sync" for each in pair.a.proxies)
        producer.commit_transaction(30)
        assert len(pair.b.read_decided(far_topic)) == 21
        pair.a.proxy.cli("link", "set-mode", pair.name, "asynchronous")
