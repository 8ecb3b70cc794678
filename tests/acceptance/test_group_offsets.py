"""Consumer groups over a link: an application that moves from A to B goes on where it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, Producer, TopicPartition
from support.groups import (
    commit,
    committed,
    delete_group,
    delete_offset,
    group_ids,
    group_status,
    member,
    offsets,
    wait_pending,
)
from support.kafka import Clusters, unique
from support.links import Linked, Side, linked, until
from support.wire import Wire

from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster
from isthmus_protocol.schema import ApiKey

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(60)]

A_SECOND = 1.0
LOOKING_S = 0.5
"""What this machine may take to look."""


@contextmanager
def group_link(a: KafkaCluster, b: KafkaCluster) -> Iterator[Linked]:
    """A link with a topic namespace and a group namespace."""
    with linked(a, b) as pair:
        pair.attach()
        agreed = ("--type", "consumer-group", "--disable-transaction-verification")
        pair.attach("l" + pair.local, "r" + pair.remote, *agreed)
        yield pair


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """The link of most tests."""
    with group_link(*kafka_pair) as pair:
        yield pair


def reset(side: Side, group: str, topic: str, offset: int) -> None:
    """Commit an offset that librdkafka does not."""
    entry = {"partition_index": 0, "committed_offset": offset, "committed_leader_epoch": -1, "committed_metadata": ""}
    asked = {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "topics": [{"name": topic, "partitions": [entry]}],
    }
    with Wire(side.bootstrap) as wire:
        (answered,) = wire.request(ApiKey.OFFSET_COMMIT, 8, asked).topics
    assert [each.error_code for each in answered.partitions] == [0]


class Names:
    """Names at both ends of one test's topics and group."""

    def __init__(self, link: Linked, topics: int = 1, partitions: int = 1, records: int = 100) -> None:
        self.link = link
        names = [unique("t") for _ in range(topics)]
        self.topics = [link.local + name for name in names]
        self.remote_topics = [link.remote + name for name in names]
        name = unique("app")
        self.group, self.remote_group = "l" + link.local + name, "r" + link.remote + name
        for topic, remote in zip(self.topics, self.remote_topics, strict=True):
            link.a.create_topic(topic, partitions)
            for partition in range(partitions):
                if records:
                    link.a.produce(topic, [b"%d" % number for number in range(records)], partition)
                link.wait_end(remote, records, partition)

    def wait(self, expected: dict[tuple[str, int], int], timeout_s: float = 20.0) -> float:
        """Wait until B's coordinator has exactly this; how long that took."""
        started = time.monotonic()
        until(
            f"{self.remote_group} is at {expected}",
            lambda: offsets(self.link.b, self.remote_group) == expected,
            timeout_s,
            0.02,
        )
        return time.monotonic() - started


def test_commits_arrive_within_a_second_while_members_are_active(link: Linked) -> None:
    """Several topics and partitions, metadata, a rewind; librdkafka members at B, static and not."""
    names = Names(link, topics=2, partitions=2)
    (one, two), (there, other) = names.topics, names.remote_topics
    commit(link.a, names.group, {(one, 0): 10, (one, 1): 20, (two, 1): 30}, "first")
    assert names.wait({(there, 0): 10, (there, 1): 20, (other, 1): 30}) < A_SECOND + LOOKING_S
    assert committed(link.b, names.remote_group)[there, 0] == (10, "first")
    assert committed(link.b, names.remote_group, direct=False) == committed(link.b, names.remote_group)
    with member(link.b, names.remote_group, there, group_instance_id="static-1"):
        slowest = 0.0
        for offset in (40, 41, 5):
            commit(link.a, names.group, {(one, 0): offset, (two, 0): offset + 1}, f"at {offset}")
            slowest = max(
                slowest,
                names.wait({(there, 0): offset, (there, 1): 20, (other, 0): offset + 1, (other, 1): 30}),
            )
        assert slowest < A_SECOND + LOOKING_S
        assert committed(link.b, names.remote_group)[there, 0] == (5, "at 5")
        status = group_status(link.b, link.name, names.remote_group)
        assert status is not None
        assert (status["state"], status["positions"], status["pending"]) == ("Following", 4, 0)
    assert link.verify()["equal"]


def test_committed_offsets_in_topics_that_are_not_mapped_are_listed(link: Linked) -> None:
    names = Names(link)
    alien = unique("alien-")
    link.a.create_topic(alien)
    commit(link.a, names.group, {(names.topics[0], 0): 10, (alien, 0): 0})
    names.wait({(names.remote_topics[0], 0): 10})
    status = group_status(link.a, link.name, names.group)
    assert status is not None
    assert (status["positions"], status["unmapped_topics"]) == (1, [alien])


def test_a_transaction_counts_from_its_commit_on(link: Linked) -> None:
    names = Names(link)
    place, there = (names.topics[0], 0), (names.remote_topics[0], 0)
    commit(link.a, names.group, {place: 1})
    names.wait({there: 1})
    producer = Producer({"bootstrap.servers": link.a.bootstrap, "transactional.id": unique("txn-")})
    producer.init_transactions(30)
    consumer = Consumer({"bootstrap.servers": link.a.bootstrap, "group.id": names.group})
    for offset, end in ((50, producer.abort_transaction), (60, producer.commit_transaction)):
        producer.begin_transaction()
        producer.send_offsets_to_transaction([TopicPartition(*place, offset)], consumer.consumer_group_metadata(), 30)
        time.sleep(A_SECOND)
        assert offsets(link.b, names.remote_group) == {there: 1}
        end(30)
        assert names.wait({there: 1 if offset == 50 else 60}) < A_SECOND + LOOKING_S
    consumer.close()


@pytest.mark.one_in_ci("stories", of="details of groups")
def test_a_commit_beyond_the_sources_own_log_is_as_the_source_has_it(link: Linked) -> None:
    """Resets, former mirrors and clients' own tests commit such offsets: no data ever comes for them."""
    names = Names(link, records=5)
    place, there = (names.topics[0], 0), (names.remote_topics[0], 0)
    commit(link.a, names.group, {place: 1000}, "beyond")
    names.wait({there: 1000})
    report = link.verify()
    assert [each["waiting"] for each in report["groups"] if each["group"] == names.group] == [0]
    commit(link.a, names.group, {place: 3})
    names.wait({there: 3})


@pytest.mark.one_in_ci("stories", of="details of groups")
@pytest.mark.parametrize("offset", [-1, -2])
def test_a_negative_offset_is_as_the_source_has_it(link: Linked, offset: int) -> None:
    """Clients reset groups with these: kafkajs' resetOffsets does."""
    names = Names(link, records=5)
    (topic,), (remote,) = names.topics, names.remote_topics
    commit(link.a, names.group, {(topic, 0): 3})
    names.wait({(remote, 0): 3})
    reset(link.a, names.group, topic, offset)
    names.wait({(remote, 0): offset})
    assert link.verify()["equal"]


@pytest.mark.one_in_ci("stories", of="details of groups")
def test_deletions_wait_for_members_and_are_done_when_they_are_gone(link: Linked) -> None:
    names = Names(link, topics=2)
    (one, two), (there, other) = names.topics, names.remote_topics
    commit(link.a, names.group, {(one, 0): 10, (two, 0): 20})
    names.wait({(there, 0): 10, (other, 0): 20})
    delete_offset(link.a, names.group, two)
    names.wait({(there, 0): 10})
    with member(link.b, names.remote_group, there):
        delete_group(link.a, names.group)
        status = wait_pending(link.b, link.name, names.remote_group, "MEMBERS_SUBSCRIBED")
        assert status["pending"] == 1
        assert offsets(link.b, names.remote_group) == {(there, 0): 10}
    until("the group is gone", lambda: names.remote_group not in group_ids(link.b), 20)
    until("and forgotten", lambda: group_status(link.b, link.name, names.remote_group) is None, 20)


@pytest.mark.one_in_ci("stories", of="details of groups")
def test_nothing_stale_stays_after_both_proxies_were_killed(link: Linked) -> None:
    moved, deleted = Names(link), Names(link)
    for names in (moved, deleted):
        commit(link.a, names.group, {(names.topics[0], 0): 10})
        names.wait({(names.remote_topics[0], 0): 10})
    for side in (link.a, link.b):
        side.proxy.kill()
    commit(link.a, moved.group, {(moved.topics[0], 0): 77}, direct=True)
    link.a.admin(direct=True).delete_consumer_groups([deleted.group])[deleted.group].result(30)
    for side in (link.a, link.b):
        side.proxy.spawn()
    for side in (link.a, link.b):
        side.proxy.wait_ready()
    moved.wait({(moved.remote_topics[0], 0): 77})
    until("the stray is gone", lambda: deleted.remote_group not in group_ids(link.b), 30)


@pytest.mark.one_in_ci("stories", of="details of groups")
def test_a_kip_848_group(link: Linked) -> None:
    names = Names(link)
    place, there = (names.topics[0], 0), (names.remote_topics[0], 0)
    with member(link.a, names.group, names.topics[0], group_protocol="consumer") as first:
        first.commit({place: 25})
        assert names.wait({there: 25}) < A_SECOND + LOOKING_S
        with member(link.b, names.remote_group, names.remote_topics[0], group_protocol="consumer"):
            first.commit({place: 26})
            assert names.wait({there: 26}) < A_SECOND + LOOKING_S


@pytest.mark.one_in_ci("stories", of="details of groups")
def test_a_planted_difference_is_found_and_mended(link: Linked) -> None:
    names = Names(link)
    commit(link.a, names.group, {(names.topics[0], 0): 10})
    names.wait({(names.remote_topics[0], 0): 10})

    def planted() -> dict[str, object] | None:
        # Again where the follower end, which looks every ten seconds, was faster than the verification.
        commit(link.b, names.remote_group, {(names.remote_topics[0], 0): 99}, direct=True)
        found = link.verify(check=False)
        return None if found["equal"] else found

    report = until("it is found", planted)
    (verdict,) = [each for each in report["groups"] if not each["equal"]]
    assert verdict["group"] == names.group
    assert verdict["difference"] == f"{names.topics[0]}-0: the source has 10, the follower has 99"
    names.wait({(names.remote_topics[0], 0): 10}, 20)  # what coordinators have is read again all the time


@pytest.mark.one_in_ci("stories", of="details of groups")
@pytest.mark.parametrize("source", ["3.9.2", DEFAULT_VERSION])
def test_an_older_cluster(shared_kafka: Clusters, source: str) -> None:
    """Kafka 3.9 serves no KIP-848 groups; committed offsets of such groups arrive there all the same."""
    older, newer = shared_kafka(version="3.9.2"), shared_kafka(role="third")
    a, b = (older, newer) if source == "3.9.2" else (newer, older)
    with group_link(a, b) as link:
        names = Names(link)
        place, there = (names.topics[0], 0), (names.remote_topics[0], 0)
        protocol = "classic" if source == "3.9.2" else "consumer"
        with member(link.a, names.group, names.topics[0], group_protocol=protocol) as first:
            first.commit({place: 25})
            assert names.wait({there: 25}) < A_SECOND + LOOKING_S
        with member(link.b, names.remote_group, names.remote_topics[0]):
            commit(link.a, names.group, {place: 26})
            assert names.wait({there: 26}) < A_SECOND + LOOKING_S
        delete_group(link.a, names.group)
        until("the group is gone", lambda: names.remote_group not in group_ids(link.b), 20)


def test_an_application_moves(link: Linked) -> None:
    """Java's console consumer begins at A; aiokafka goes on at B with the next record."""
    names = Names(link)
    link.a.kafka.tool(
        "kafka-console-consumer",
        *("--bootstrap-server", link.a.bootstrap, "--topic", names.topics[0], "--group", names.group),
        *("--from-beginning", "--max-messages", "42", "--timeout-ms", "30000"),
    )
    names.wait({(names.remote_topics[0], 0): 42})

    async def go_on() -> list[int]:
        async with AIOKafkaConsumer(
            names.remote_topics[0],
            bootstrap_servers=link.b.bootstrap,
            group_id=names.remote_group,
            enable_auto_commit=False,
            auto_offset_reset="none",
        ) as consumer:
            found = await consumer.getmany(timeout_ms=20_000, max_records=100)
            return [record.offset for records in found.values() for record in records]

    assert asyncio.run(go_on())[:3] == [42, 43, 44]
