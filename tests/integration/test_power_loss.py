"""What a power loss takes from the ends of the target's logs, on real brokers: nothing goes astray, nor is claimed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from support.groups import member, offsets
from support.kafka import unique
from support.links import Linked, until
from support.power_loss import FIRST, in_sync, lose_end, one_by_one
from support.raw_log import read_log
from support.source_topics import alter_topic
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_control.model import TRANSACTIONS_TOPIC as STORE
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, partition_of

pytestmark = [
    pytest.mark.brokers,
    pytest.mark.timeout(240),
    pytest.mark.one_in_ci("stories", of="power losses"),
]

BROKER = 1
ACKED, LOST = 20, 4


@pytest.fixture(scope="module")
def target() -> Iterator[KafkaCluster]:
    """A cluster of this module's own: it loses power."""
    with KafkaCluster(name="power", brokers=1) as cluster:
        yield cluster


def described(link: Linked, topic: str) -> dict[str, Any]:
    (found,) = link.b.link(link.name)["partitions"]
    assert found["topic"] == topic
    return dict(found)


def claim_of(report: Any, kind: str) -> Any:
    (claim,) = report["namespaces"][0][kind]
    return claim


@pytest.mark.parametrize("what", ["record", "marker"])
def test_what_comes_first_after_it_stands_where_it_belongs(
    what: str, kafka_pair: tuple[KafkaCluster, KafkaCluster], target: KafkaCluster
) -> None:
    """A new producer's first batch, or a marker, which no broker refuses wherever it comes; and the topic stays."""
    with in_sync(kafka_pair[0], target) as (link, here, there):
        producer: Producer
        if what == "record":
            one_by_one(link, here, ACKED)
            producer = link.a.producer(enable_idempotence=True)
        else:
            producer = link.a.producer(transactional_id=unique("power"))
            producer.init_transactions(30)
            producer.begin_transaction()
            producer.produce(here, b"in a transaction")
            assert producer.flush(30) == 0
        end = link.a.end(here)
        until("all is there", lambda: link.b.end(there) == end)
        before = link.b.proxy.cli("link", "truncations", link.name)
        topic_id = topic_id_of(link, there)

        target.kill(BROKER)
        lost = lose_end(target, BROKER, there)
        assert lost.next_offset == end
        going_on = threading.Thread(target=go_on, args=(producer, here, what))
        going_on.start()
        until("it is at the source", lambda: link.a.end(here) > end)
        target.start_broker(BROKER)
        going_on.join(60)
        assert not going_on.is_alive()

        until("all is there", lambda: link.b.end(there) == link.a.end(here))
        until("In-Sync", lambda: link.a.link(link.name)["state"] == "In-Sync")
        assert link.verify()["equal"]
        assert topic_id_of(link, there) == topic_id
        assert link.b.proxy.cli("link", "truncations", link.name) == before


def go_on(producer: Producer, topic: str, what: str) -> None:
    if what == "record":
        producer.produce(topic, b"the first of this producer")
        assert producer.flush(60) == 0
    else:
        producer.commit_transaction(60)


def topic_id_of(link: Linked, topic: str) -> str:
    return str(link.b.proxy.cli("topic", "describe", topic)["topic_id"])


def test_nothing_is_claimed_of_records_that_are_lost(
    kafka_pair: tuple[KafkaCluster, KafkaCluster], target: KafkaCluster
) -> None:
    """All were acked, and the source is lost before it could send them again."""
    with in_sync(kafka_pair[0], target) as (link, here, there):
        one_by_one(link, here, ACKED)
        end = link.a.end(here)
        until("all is there", lambda: link.b.end(there) == end)
        target.kill(BROKER)
        link.a.proxy.kill()
        lost = lose_end(target, BROKER, there, batches=LOST)
        target.start_broker(BROKER)
        claim = claim_of(until("planned", lambda: dry_run(link)), "claims")
        assert (claim["end"], claim["in_sync_until_ms"]) == (lost.base_offset, None)
        assert (
            claim["message"]
            == f"the log ends at {end - LOST}, and ended at {end} once: what an ack meant is lost with it"
        )
        told = until(
            "it is told", lambda: (found := described(link, there))["reason"] == "TARGET_LOST_RECORDS" and found
        )
        assert told["sync"]["until_ms"] is None

        link.a.proxy.spawn()  # it was not lost after all
        link.a.proxy.wait_ready()
        until("all is there", lambda: link.b.end(there) == end)
        until("In-Sync", lambda: link.b.link(link.name)["state"] == "In-Sync")
        assert link.verify()["equal"]
        assert claim_of(dry_run(link), "claims")["in_sync_until_ms"] is not None


def dry_run(link: Linked) -> Any:
    return link.b.proxy.cli("link", "failover", link.name, "--dry-run")


@pytest.mark.parametrize("source", ["alive", "lost"])
def test_nothing_is_claimed_of_commits_that_are_lost(
    source: str, kafka_pair: tuple[KafkaCluster, KafkaCluster], target: KafkaCluster
) -> None:
    with in_sync(kafka_pair[0], target) as (link, here, there):
        local, remote = unique("app-") + "-", unique("far-") + "-"
        link.attach(local, remote, "--type", "consumer-group")
        group, far_group = local + "g", remote + "g"
        with member(link.a, group, here) as joined:
            joined.commit({(here, 0): 0})
            until("In-Sync", lambda: dry_run_of_groups(link, remote)["in_sync_until_ms"] is not None)
            for offset in range(1, FIRST + 1):
                joined.commit({(here, 0): offset})
        assert offsets(link.b, far_group)[there, 0] == FIRST

        partition = partition_of(far_group, link.b.topics()[OFFSETS_TOPIC])
        target.kill(BROKER)
        if source == "lost":
            link.a.proxy.kill()
        lose_end(target, BROKER, OFFSETS_TOPIC, partition, batches=LOST)
        target.start_broker(BROKER)
        if source == "alive":
            until("committed again", lambda: offsets(link.b, far_group)[there, 0] == FIRST, timeout_s=5)
            until("In-Sync", lambda: dry_run_of_groups(link, remote)["in_sync_until_ms"] is not None)
            return
        assert offsets(link.b, far_group)[there, 0] == FIRST - LOST
        claim = dry_run_of_groups(link, remote)
        assert claim["in_sync_until_ms"] is None
        assert claim["message"] == "its coordinator has lost commits that it had: what an ack meant is lost with them"
        link.a.proxy.spawn()
        link.a.proxy.wait_ready()
        until("committed again", lambda: offsets(link.b, far_group)[there, 0] == FIRST)


def dry_run_of_groups(link: Linked, remote: str) -> Any:
    command = "link", "failover", link.name, "--local-group", remote, "--dry-run"
    return claim_of(link.b.proxy.cli(*command), "group_claims")


def test_what_was_decided_is_committed_although_the_store_lost_it(
    kafka_pair: tuple[KafkaCluster, KafkaCluster], target: KafkaCluster
) -> None:
    """The commit was acked, its marker did not come, and the source is lost before it could send either again."""
    transactional_id = unique("power")
    with in_sync(kafka_pair[0], target) as (link, here, there):
        producer = link.a.producer(transactional_id=transactional_id)
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(here, b"decided")
        assert producer.flush(30) == 0
        alter_topic(link.b, there, {"max.message.bytes": "1"})
        producer.commit_transaction(30)
        link.a.proxy.kill()
        with Wire(target.bootstrap_servers) as wire:
            decided = [transactional_id.encode() in data for _, data in read_log(wire, STORE)]
        assert any(decided)

        target.kill(BROKER)
        lose_end(target, BROKER, STORE, batches=len(decided) - decided.index(True))
        target.start_broker(BROKER)
        assert link.b.end(there, isolation="read_committed") < link.b.end(there), "its marker came"
        alter_topic(link.b, there, {"max.message.bytes": "1048588"})
        until("failed over", lambda: link.b.proxy.cli("link", "failover", link.name))
        assert link.b.read(there, isolation="read_committed")[-1].value == b"decided"
