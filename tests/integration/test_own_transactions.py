"""A cluster's own transactions in topics that are to follow, or to be cut: they end before, and no others suffer."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from support import groups
from support.kafka import unique
from support.links import Linked, Side, linked, taking_transactions, truncated, until
from support.source_topics import alter_topic

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

ENDING = "TRANSACTIONS_ENDING"
IN_TIME_S = 10.0


def begun(side: Side, topic: str, transactional_id: str, direct: bool = False) -> Producer:
    """A producer with records of an open transaction in a topic."""
    producer = side.producer(direct, transactional_id=transactional_id)
    producer.init_transactions(30)
    write(producer, topic)
    return producer


def write(producer: Producer, topic: str) -> None:
    producer.begin_transaction()
    producer.produce(topic, b"of a transaction")
    assert producer.flush(30) == 0


def take_batches_up_to(side: Side, topic: str, size: str) -> None:
    """Returns when the broker does so: settings reach it after the controller has answered."""
    alter_topic(side, topic, {"max.message.bytes": size})
    until("the broker has it", lambda: side.topic_config(topic)["max.message.bytes"] == size)


def send_offset(side: Side, producer: Producer, group: str, topic: str) -> None:
    """Commit an offset of a group without members in the transaction that is open."""
    consumer = Consumer({"bootstrap.servers": side.bootstrap, "group.id": group})
    try:
        nobody = consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, 3)], nobody, 30)
    finally:
        consumer.close()


def settled(link: Linked, group: str) -> dict[str, Any] | None:
    told = groups.group_status(link.b, link.name, group)
    return told if told is not None and told["reason"] is None and told["state"] == "Following" else None


def both_go_on(link: Linked, source: str, target: str, values: int) -> None:
    """What is written at the source from now on has the same offsets at the target."""
    link.wait_end(target, values)
    link.a.produce(source, [b"more"] * 5)
    link.wait_end(target, values + 5)
    link.wait_following()
    assert link.b.read(target) == link.a.read(source)
    verdicts = [each for each in link.verify()["partitions"] if each["topic"] == source]
    assert all(each["equal"] for each in verdicts), verdicts


def test_what_is_open_where_a_cluster_led_ends_before_its_topic_is_cut_and_follows(
    kafka_pair: tuple[KafkaCluster, KafkaCluster],
) -> None:
    with linked(*kafka_pair) as link:
        source, target = link.local + "t", link.remote + "t"
        elsewhere = unique("elsewhere")
        link.a.create_topic(source)
        link.a.produce(source, [b"%d" % number for number in range(100)])
        link.b.create_topic(target)
        link.b.create_topic(elsewhere)
        link.b.produce(target, [b"led here"] * 10)
        ongoing = begun(link.b, target, unique("ongoing-"))
        other = begun(link.b, elsewhere, unique("other-"))
        group, kept = link.local + "g", link.remote + "g"
        groups.commit(link.a, group, {(source, 0): 50})
        commits = begun(link.b, elsewhere, unique("commits-"))
        send_offset(link.b, commits, kept, target)
        elsewhere_too = begun(link.b, elsewhere, unique("elsewhere-"))
        send_offset(link.b, elsewhere_too, unique("elsewhere-g"), target)

        link.attach(None, None, "--truncate-target")
        both_go_on(link, source, target, 100)
        with pytest.raises(KafkaException, match=r"FENCED|fenced"):
            ongoing.commit_transaction(30)
        other.commit_transaction(IN_TIME_S)

        with taking_transactions(link.b):
            link.attach(None, None, "--type", "consumer-group")
            until("it follows", lambda: groups.offsets(link.b, kept).get((target, 0)) == 50)
            told = until("nothing is waited for", lambda: settled(link, kept))
        assert told["reason"] is None
        with pytest.raises(KafkaException, match=r"FENCED|fenced"):
            commits.commit_transaction(30)
        elsewhere_too.commit_transaction(IN_TIME_S)
        assert groups.offsets(link.b, kept)[target, 0] == 50
        assert len(link.b.read_decided(elsewhere)) == 2


@pytest.mark.suite("stories")
def test_a_topic_that_is_its_sources_but_for_what_is_open_is_truncated_as_the_plan_says(
    kafka_pair: tuple[KafkaCluster, KafkaCluster],
) -> None:
    """The source of before has the same log, and will have markers that its new source has not."""
    with linked(*kafka_pair) as link:
        link.raise_levels()
        topic, copy = link.local + "t", link.remote + "t"
        link.a.create_topic(topic)
        link.attach(None, None, "--disable-transaction-verification")
        link.a.produce(topic, [b"before"] * 5)
        ongoing = begun(link.a, topic, unique("ongoing-"))
        link.wait_end(copy, 6)
        link.wait_following()
        link.a.proxy.kill()
        until("failed over", lambda: link.b.proxy.cli("link", "failover", link.name))
        link.a.proxy.start()
        until("detached", lambda: link.a.proxy.cli("link", "detach", link.name, "--local", link.local))
        back = "link", "attach", link.name, "--local", link.remote, "--remote", link.local, "--role", "leader"
        consents = "--truncate-target", "--disable-transaction-verification"
        (planned,) = link.b.proxy.cli(*back, *consents, "--dry-run")["topics"]
        assert (planned["action"], planned["records_lost"]) == ("truncate", 6)

        link.b.proxy.cli(*back, *consents)
        link.b.produce(copy, [b"more"] * 3)
        there = link.b.read_decided(copy)
        assert len(there) == 8
        until("A has what B has", lambda: link.a.read_decided(topic) == there)
        with pytest.raises(KafkaException, match=r"FENCED|fenced"):
            ongoing.commit_transaction(30)


@pytest.mark.suite("stories")
def test_a_topic_is_frozen_when_what_was_decided_is_carried_out_and_others_end_meanwhile(kafka: KafkaCluster) -> None:
    """The coordinator was answered that the marker is too large: it asks again when it is loaded anew, and not before.

    A topic that was frozen would have answered so, too.
    """
    with KafkaCluster(name="own-transactions") as own, linked(kafka, own) as link:
        source, target = link.local + "t", link.remote + "t"
        elsewhere = unique("elsewhere")
        link.a.create_topic(source)
        link.b.create_topic(elsewhere)
        link.a.produce(source, [b"%d" % number for number in range(100)])
        link.attach()
        link.wait_end(target, 100)
        link.wait_following()
        decided_id, ongoing_id = unique("decided-"), unique("ongoing-")
        decided = begun(link.b, target, decided_id, direct=True)
        take_batches_up_to(link.b, target, "0")
        decided.commit_transaction(30)  # is answered before the marker is tried
        until("the marker was refused", lambda: f"sending txn marker for {decided_id}" in own.log(1))
        take_batches_up_to(link.b, target, "1048588")
        ongoing = begun(link.b, target, ongoing_id, direct=True)
        other = begun(link.b, elsewhere, unique("other-"))
        link.a.produce(source, [b"more"] * 5)

        def waits() -> bool:
            code, message = link.b.reason(link.name, target)
            return code == ENDING and f"{decided_id!r} in {target}-0 to be completed: PrepareCommit" in message

        until("it waits for the coordinator", waits)
        other.commit_transaction(IN_TIME_S)
        write(other, elsewhere)
        link.b.proxy.kill()
        link.b.proxy.start()
        until("it waits for the coordinator again", waits)
        assert link.b.topic_config(target)["max.message.bytes"] == "1048588", "it is not frozen"
        other.commit_transaction(IN_TIME_S)
        write(other, elsewhere)

        own.restart(1)
        told = truncated(link, target)
        assert told["messages_truncated"] >= 4, "two records, and the markers of a commit and an abort"
        with pytest.raises(KafkaException, match=r"FENCED|fenced"):
            ongoing.commit_transaction(30)
        both_go_on(link, source, target, 105)
        other.commit_transaction(IN_TIME_S)
        assert len(link.b.read_decided(elsewhere)) == 3
