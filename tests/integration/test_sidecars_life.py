"""A target with a proxy for each of three brokers: consent, settings, the life of topics, promotion."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaException
from support.kafka import unique
from support.links import Linked, linked, sidecars, until
from support.source_topics import alter_topic

from isthmus_bench.kafka import KafkaCluster
from isthmus_plugins.replication.logs.topic_settings import COMPACTED

pytestmark = pytest.mark.brokers
PARTITIONS = 6


@pytest.fixture(scope="module")
def link(kafka: KafkaCluster, kafka_three: KafkaCluster) -> Iterator[Linked]:
    with linked(kafka, kafka_three, b_proxies=sidecars(kafka_three)) as pair:
        pair.b.verify_transactions(True)
        yield pair


def write(link: Linked, source: str, values: list[bytes], **more: bytes) -> None:
    producer = link.a.producer()
    for partition in range(PARTITIONS):
        for value in values:
            producer.produce(source, value, partition=partition, **more)
    assert producer.flush(30) == 0


def wait_ends(link: Linked, target: str, end: int) -> None:
    for partition in range(PARTITIONS):
        link.wait_end(target, end, partition)


def enabled(link: Linked) -> list[bool | None]:
    """What each proxy says of the brokers' check of transactions."""
    return [link.b.link(link.name, proxy)["transaction_verification"]["enabled"] for proxy in link.b.proxies]


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_the_consent_holds_whichever_proxy_goes(link: Linked) -> None:
    local, remote = unique("consent-") + "-", unique("consent-far-") + "-"
    link.attach(local, remote, "--disable-transaction-verification")
    until("all know", lambda: enabled(link) == [False] * 3, 30)
    link.b.proxies[0].kill()
    link.b.verify_transactions(True)
    until("another one switches it off", lambda: enabled_of(link, 1) is False, 40)
    link.b.proxies[0].start()
    until("all know", lambda: enabled(link) == [False] * 3, 40)
    link.a.create_topic(local + "t", PARTITIONS)
    producer = link.a.producer(transactional_id=unique("tx-"))
    producer.init_transactions(30)
    producer.begin_transaction()
    for partition in range(PARTITIONS):
        producer.produce(local + "t", b"in a transaction", partition=partition)
    producer.commit_transaction(30)
    wait_ends(link, remote + "t", 2)
    link.detach(local)
    until("it is restored", lambda: all(not proxy.get("/v1/status")["held_configs"] for proxy in link.b.proxies), 40)


def enabled_of(link: Linked, number: int) -> bool | None:
    found: bool | None = link.b.link(link.name, link.b.proxies[number])["transaction_verification"]["enabled"]
    return found


@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_settings_topics_made_again_and_promotion(link: Linked) -> None:
    local, remote = unique("life-") + "-", unique("life-far-") + "-"
    link.attach(local, remote)
    source, target = local + "t", remote + "t"
    link.a.create_topic(source, PARTITIONS, {"max.message.bytes": "2000000", "cleanup.policy": "compact"})
    write(link, source, [b"a", b"b"], key=b"k")
    wait_ends(link, target, 2)
    for value in ("3000000", "1500000"):
        alter_topic(link.a, source, {"max.message.bytes": value})
        until("followed", lambda value=value: link.b.topic_config(target)["max.message.bytes"] == value, 10)
    until(
        "compacted",
        lambda: set(link.b.topic_config(target)["cleanup.policy"].split(",")) == set(COMPACTED.split(",")),
        20,
    )
    for proxy in link.b.proxies:  # each says the same
        until(
            "it shows",
            lambda proxy=proxy: proxy.get(f"/v1/topics/{target}")["overrides"]["cleanup.policy"] == COMPACTED,
            10,
        )

    # Deleted and made again at the source: nothing is lost here before the operator says so.
    link.a.delete_topic(source)
    until("it is gone", lambda: source not in link.a.topics())
    until("made again", lambda: link.a.create_topic(source, PARTITIONS, {"cleanup.policy": "compact"}) is None, 30, 0.5)
    write(link, source, [b"another"], key=b"k")

    def refused() -> bool:
        found = {each["partition"]: each["reason"] for each in link.b.partitions(link.name, target)}
        return (
            len(found) == PARTITIONS
            and "SOURCE_TOPIC_ID_CHANGED" in found.values()
            and set(found.values()) <= {"SOURCE_TOPIC_ID_CHANGED", "SOURCE_TOPIC_MAY_BE_DELETED"}
        )

    until("it is told", refused, 30)
    assert [link.b.end(target, partition) for partition in range(PARTITIONS)] == [2] * PARTITIONS
    link.b.proxies[1].cli("topic", "recreate", target)
    until("it has the new one's", lambda: [link.b.end(target, each) for each in range(PARTITIONS)] == [1] * PARTITIONS)
    link.wait_following()

    with pytest.raises(KafkaException):
        link.b.produce(target, [b"reserved"])
    link.b.proxies[2].cli("link", "promote", link.name, "--local", remote)
    assert link.b.topic_config(target)["cleanup.policy"] == "compact"
    until("clients write", lambda: link.b.admin().list_topics(timeout=20) is not None)
    producer = link.b.producer()
    for partition in range(PARTITIONS):
        producer.produce(target, b"written here", key=b"own", partition=partition)
    assert producer.flush(30) == 0
    assert [link.b.end(target, partition) for partition in range(PARTITIONS)] == [2] * PARTITIONS
    for proxy in link.b.proxies:
        assert not proxy.get(f"/v1/topics/{target}")["overrides"]
