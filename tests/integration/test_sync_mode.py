"""The synchronous mode between real clusters: when it is taken, what is told of it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from support.kafka import unique
from support.links import Linked, Side, linked, taking_transactions, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = pytest.mark.brokers


def states(link: Linked) -> list[str]:
    return [link.a.link(link.name)["state"], link.b.link(link.name)["state"]]


def unknown(partition: dict[str, Any]) -> bool:
    sync = partition["sync"]
    return sync["state"] == "Unknown" and sync["until_ms"] > 0 and partition["message"].startswith("In-Sync until")


@pytest.mark.one_in_ci("stories", of="modes of links")
def test_the_mode_is_set_when_the_link_follows_and_goes_at_once(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    with linked(*kafka_pair) as link:
        command = "link", "set-mode", link.name, "synchronous"
        with pytest.raises(ProxyFailed, match="leads no topics"):
            link.a.proxy.cli(*command)
        link.attach()
        source, target = link.names("sync")
        link.a.create_topic(source, 2)
        link.a.produce(source, [b"%d" % number for number in range(100)])
        link.wait_end(target, 100)
        link.wait_following()
        with pytest.raises(ProxyFailed, match=r"leads (no|all of its) topics"):  # all: before feature level 6
            link.b.proxy.cli(*command)
        assert link.a.proxy.cli(*command, "--dry-run")["dry_run"]
        assert link.a.link(link.name)["mode"] == "asynchronous"
        result = link.a.proxy.cli(*command, "--confirm-timeout-ms", "5000")
        assert (result["former_mode"], result["mode"]) == ("asynchronous", "synchronous")

        def told() -> bool:
            status = link.a.link(link.name)
            partitions = link.a.partitions(link.name, source)
            return (status["mode"], status["sync_confirm_timeout_ms"], len(partitions)) == (
                "synchronous",
                5_000,
                2,
            ) and all(each["sync"]["state"] in ("Syncing", "In-Sync", "Out-Of-Sync") for each in partitions)

        until("status tells", told)
        until("both are in sync", lambda: states(link) == ["In-Sync", "In-Sync"])
        assert (link.b.link(link.name)["mode"], link.b.link(link.name)["sync_confirm_timeout_ms"]) == (
            "synchronous",
            5_000,
        )
        link.a.produce(source, [b"more"] * 10)
        link.wait_end(target, 110)
        assert link.verify()["equal"]

        # A process that begins from the log knows it, too.
        link.a.proxy.kill()
        until(
            "B says until when it knows", lambda: [unknown(each) for each in link.b.partitions(link.name)] == [True] * 2
        )
        link.a.proxy.spawn()
        link.a.proxy.wait_ready()
        until("status tells", told)

        link.b.proxy.kill()
        until("lost", lambda: link.a.link(link.name)["state"] in ("Syncing", "Out-Of-Sync"))
        assert link.a.proxy.cli("link", "set-mode", link.name, "asynchronous")["former_mode"] == "synchronous"
        until("lost", lambda: link.a.link(link.name)["state"] == "Disconnected")
        assert [each["sync"] for each in link.a.partitions(link.name, source)] == [None, None]
        with pytest.raises(ProxyFailed, match="NOT_FOLLOWING"):
            link.a.proxy.cli(*command)
        link.b.proxy.spawn()
        link.b.proxy.wait_ready()
        link.wait_following()
        link.a.proxy.cli(*command)


@pytest.mark.one_in_ci("stories", of="modes of links")
def test_consumers_of_a_follower_wait_until_it_was_in_sync_once(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    """Meanwhile the source's transactions are acked; what comes of them is seen whole."""
    with linked(*kafka_pair) as link:
        first, second = unique("first-") + "-", unique("second-") + "-"
        link.attach(first, first)
        link.a.proxy.cli("link", "set-mode", link.name, "synchronous")
        # B's brokers verify transactions, and take no copies of them: the follower gets the first record alone.
        source = second + "t"
        link.a.create_topic(source)
        link.a.produce(source, [b"plain"])
        transact(link.a, source, b"one")
        link.attach(second, second)
        link.wait_state(source, "Stopped", timeout_s=60)
        assert link.b.end(source) == 1
        transact(link.a, source, b"two")  # available while syncing
        settings = {"bootstrap.servers": link.b.bootstrap, "group.id": "r", "isolation.level": "read_committed"}
        with closing(Consumer({**settings, "enable.auto.commit": False})) as consumer:
            consumer.assign([TopicPartition(source, 0, 0)])
            assert consumer.consume(1, 3.0) == [], "read in part"
            with taking_transactions(link.b):
                read: list[bytes | None] = []

                def whole() -> bool:
                    for message in consumer.consume(10, 0.5):
                        assert message.error() is None, message.error()
                        read.append(message.value())
                    return len(read) == 3

                until("read", whole, 60)
                assert read == [b"plain", b"one", b"two"]
                # Out of sync, it is read on.
                link.a.proxy.kill()
                assert link.b.read(source, isolation="read_committed")[-1].value == b"two"


def transact(side: Side, topic: str, value: bytes) -> None:
    producer = side.producer(transactional_id=unique("tx"))
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, value, partition=0)
    producer.commit_transaction(30)


@pytest.mark.one_in_ci("stories", of="the target's topics")
def test_a_topic_that_goes_with_its_sources(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    """A topic that goes takes nothing In-Sync from the others, and what is acked to the next of its name is there."""
    with linked(*kafka_pair) as link:
        link.raise_levels()
        link.attach(None, None, "--on-source-delete", "delete")
        (kept, there), (gone, _) = link.names("kept"), link.names("gone")
        for source in (kept, gone):
            link.a.create_topic(source)
            link.a.produce(source, [b"old"] * 3)
        link.wait_following(2)
        until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, "synchronous"), 20)
        until("In-Sync", lambda: at_a(link, kept, gone) == {"In-Sync"})
        former = link.remote + gone.removeprefix(link.local)
        link.a.delete_topic(gone)
        while former in link.b.topics():
            (offset,) = link.a.produce(kept, [b"more"], enable_idempotence=True)
            assert link.b.end(there) > offset, "acked, and not at B"
            assert at_a(link, kept) == {"In-Sync"}
        link.a.create_topic(gone)
        until("In-Sync", lambda: former in link.b.topics() and at_a(link, kept, gone) == {"In-Sync"})
        link.a.produce(gone, [b"new"] * 5, enable_idempotence=True)
        until("consumers of B may read it", lambda: is_readable(link.b, former))
        assert [record.value for record in link.b.read(former)] == [b"new"] * 5
        assert link.verify()["equal"]


def is_readable(side: Side, topic: str) -> bool:
    """Whether a new topic was In-Sync here once: until then reads are refused, and consumers try again."""
    try:
        side.read(topic)
    except KafkaException:
        return False
    return True


def at_a(link: Linked, *topics: str) -> set[str]:
    """The states of A's topics at A; "missing" of one that is not there."""
    found = {each["topic"]: str(each["state"]) for each in link.a.partitions(link.name)}
    return {found.get(topic, "missing") for topic in topics}
