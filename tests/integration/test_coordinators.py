"""Coordinators of groups, as clients see them through a proxy: commits wait for replicas, coordinators load and move.

A broker that stands still here stays in sync, and its proxy keeps its lease without it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Final

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from support.groups import commit, offsets
from support.kafka import unique
from support.leaders import described, move_leaders
from support.links import Side, until, whole
from support.wire import Wire, advertised

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, OffsetKey, decode_commit, decode_key, partition_of
from isthmus_protocol.schema import ApiKey

pytestmark = [pytest.mark.brokers, pytest.mark.suite("stories"), pytest.mark.timeout(300)]

OFFSETS_PARTITIONS: Final = 4
COMMIT_TIMEOUT_S: Final = 4.0
SETTINGS: Final = {
    "offsets.commit.timeout.ms": f"{COMMIT_TIMEOUT_S * 1000:.0f}",
    "replica.lag.time.max.ms": "120000",
    "broker.session.timeout.ms": "120000",
    "log.cleaner.backoff.ms": "200",
}
COORDINATOR_LOAD_IN_PROGRESS: Final = 14
COORDINATOR_NOT_AVAILABLE: Final = 15
NOT_COORDINATOR: Final = 16
WIDE: Final = 200
"""Partitions of a topic of which one request commits all."""
LOADED: Final = 150_000
"""Commits that a coordinator loads: it takes a moment, in which somebody asks."""


@pytest.fixture(scope="module")
def side() -> Iterator[Side]:
    with (
        KafkaCluster(name="coordinators", brokers=3, settings=SETTINGS) as cluster,
        whole(cluster, proxy={"lease_s": 30.0}) as proxy,
    ):
        yield Side(cluster, [proxy])


def in_partition_of(group: str) -> str:
    """The name of another group with the same coordinator."""
    wanted = partition_of(group, OFFSETS_PARTITIONS)
    return next(name for name in iter(lambda: unique("other-"), "") if partition_of(name, OFFSETS_PARTITIONS) == wanted)


def coordinator(side: Side, group: str) -> int:
    """The broker that leads a group's partition of the offsets topic."""
    return described(side, OFFSETS_TOPIC)[partition_of(group, OFFSETS_PARTITIONS)][0]


def to_commit(group: str, topic: str, positions: Mapping[int, int]) -> dict[str, Any]:
    """A commit of a group without members."""
    partitions = [
        {"partition_index": index, "committed_offset": offset, "committed_leader_epoch": -1, "committed_metadata": ""}
        for index, offset in positions.items()
    ]
    topics = [{"name": topic, "partitions": partitions}]
    return {"group_id": group, "generation_id_or_member_epoch": -1, "member_id": "", "topics": topics}


def codes(answer: Any) -> set[int]:
    return {each.error_code for topic in answer.topics for each in topic.partitions}


def fetched(wire: Wire, group: str) -> tuple[int, dict[int, int]]:
    """What a coordinator says that a group has committed: an error code, and offsets by partition."""
    asked = {"groups": [{"group_id": group, "topics": None}], "require_stable": False}
    (answer,) = wire.request(ApiKey.OFFSET_FETCH, 8, asked).groups
    found = {each.partition_index: each.committed_offset for topic in answer.topics for each in topic.partitions}
    return answer.error_code, found


@contextmanager
def one_replica_still(side: Side, *needed: int) -> Iterator[None]:
    """A broker that is none of ``needed`` stands still until the block ends, and stays in sync."""
    follower = next(each for each in side.kafka.broker_ids if each not in needed)
    side.kafka.pause(follower)
    try:
        yield
    finally:
        side.kafka.resume(follower)


@contextmanager
def java_consumer(side: Side, topic: str, group: str, count: int) -> Iterator[Future[list[dict[str, Any]]]]:
    """Reads ``count`` records and commits them batch by batch; the result is what it tells of that, once it has all."""

    def consume() -> list[dict[str, Any]]:
        told = side.kafka.tool(
            "kafka-verifiable-consumer",
            *("--bootstrap-server", side.bootstrap, "--topic", topic, "--group-id", group),
            *("--max-messages", str(count)),
        ).stdout
        return [json.loads(line) for line in told.splitlines() if line.startswith("{")]

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(consume)


def never_failed(told: list[dict[str, Any]]) -> bool:
    committed = [each for each in told if each["name"] == "offsets_committed"]
    return bool(committed) and all(each["success"] for each in committed)


def test_a_commit_is_answered_when_all_replicas_have_it(side: Side) -> None:
    topic, group = unique("topic-"), unique("group-")
    side.create_topic(topic)
    commit(side, group, {(topic, 0): 1})
    node = coordinator(side, group)
    address = advertised(side.bootstrap)[node]
    with Wire(address) as wire, Wire(address) as other:
        with one_replica_still(side, node):
            asked = wire.send(ApiKey.OFFSET_COMMIT, 8, to_commit(group, topic, {0: 2}))
            assert not wire.is_answered(COMMIT_TIMEOUT_S / 2), "answered while a replica does not have it"
            assert fetched(other, group) == (0, {0: 1})
        assert codes(wire.receive(ApiKey.OFFSET_COMMIT, 8, asked)) == {0}
        assert fetched(other, group) == (0, {0: 2})


def test_a_commit_that_replicas_do_not_have_in_time_fails_and_consumers_try_again(side: Side) -> None:
    topic, group, some, more = unique("topic-"), unique("group-"), 10, 20
    side.create_topic(topic)
    producer = side.producer()

    def produce(count: int) -> None:
        for _ in range(count):
            producer.produce(topic, b"x", partition=0)
        assert producer.flush(30) == 0

    produce(some)
    with java_consumer(side, topic, group, some + more) as consumer:
        until("it has committed", lambda: offsets(side, group) == {(topic, 0): some})
        node, (leader, _), other = coordinator(side, group), described(side, topic)[0], in_partition_of(group)
        with Wire(advertised(side.bootstrap)[node]) as wire, one_replica_still(side, node, leader):
            produce(more)
            began = time.monotonic()
            answer = wire.request(ApiKey.OFFSET_COMMIT, 8, to_commit(other, topic, {0: 1}))
            assert codes(answer) == {COORDINATOR_NOT_AVAILABLE}
            assert time.monotonic() - began >= COMMIT_TIMEOUT_S
            assert not consumer.done()
            assert fetched(wire, group) == (0, {0: some})
        told = consumer.result(120)
    assert never_failed(told), told
    assert offsets(side, group) == {(topic, 0): some + more}


@contextmanager
def cleaned_at_once(side: Side) -> Iterator[None]:
    """The offsets topic has segments of a moment, and none waits to be cleaned."""

    def alter(operation: AlterConfigOpType) -> None:
        resource = ConfigResource(ResourceType.TOPIC, OFFSETS_TOPIC)
        for name, value in {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.0"}.items():
            resource.add_incremental_config(ConfigEntry(name, value, incremental_operation=operation))
        (altered,) = side.admin().incremental_alter_configs([resource]).values()
        altered.result(30)

    alter(AlterConfigOpType.SET)
    try:
        yield
    finally:
        alter(AlterConfigOpType.DELETE)


def test_the_offsets_topic_is_compacted_to_the_latest_commits(side: Side) -> None:
    topic, group, commits = unique("topic-"), unique("group-"), 20
    other, latest = in_partition_of(group), {(topic, 0): commits, (topic, 1): 2 * commits}
    side.create_topic(topic, 2)
    commit(side, group, {(topic, 0): 0})

    def kept() -> list[tuple[tuple[str, int], int]]:
        """The commits of the group that stand in the log."""
        commit(side, other, {(topic, 0): 1})  # a segment is closed, and then cleaned, once something comes behind it
        found = []
        for record in side.read(OFFSETS_TOPIC, partition_of(group, OFFSETS_PARTITIONS)):
            key = decode_key(record.key or b"")
            if isinstance(key, OffsetKey) and key.group == group and record.value is not None:
                found.append(((key.topic, key.partition), decode_commit(record.value, record.offset).offset))
        return found

    with cleaned_at_once(side):
        for offset in range(1, commits + 1):
            commit(side, group, {(topic, 0): offset, (topic, 1): 2 * offset})
        until("only the latest are there", lambda: kept() == list(latest.items()), 60, 0.5)
    assert offsets(side, group, direct=False) == latest
    move_leaders(side, OFFSETS_TOPIC)  # who coordinates from now on reads what is left
    assert offsets(side, group, direct=False) == latest


def fill(side: Side, topic: str, group: str) -> dict[int, int]:
    """Have a group commit some ten thousands of times; what it has committed at last."""
    last = dict.fromkeys(range(WIDE), LOADED // WIDE)
    with Wire(advertised(side.bootstrap)[coordinator(side, group)]) as wire:
        for offset in range(1, LOADED // WIDE + 1):
            answer = wire.request(ApiKey.OFFSET_COMMIT, 8, to_commit(group, topic, dict.fromkeys(last, offset)))
            assert codes(answer) == {0}
    return last


class Asking:
    """Asks a broker again and again what a group has committed; ``told`` has what it said, each time."""

    def __init__(self, address: str, group: str) -> None:
        self.told: list[tuple[int, dict[int, int]]] = []
        self._address, self._group = address, group
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self) -> None:
        with Wire(self._address) as wire:
            while not self._ended.is_set():
                self.told.append(fetched(wire, self._group))

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30)


def test_consumers_wait_for_a_coordinator_that_loads_and_go_on(side: Side) -> None:
    """Its broker says in turn that it is no coordinator, that it loads, and what was committed last."""
    wide, topic, group, some, more = unique("wide-"), unique("topic-"), unique("group-"), 10, 20
    side.create_topic(wide, WIDE)
    side.create_topic(topic)
    side.produce(topic, [b"x"] * some)
    with java_consumer(side, topic, group, some + more) as consumer:
        until("it has committed", lambda: offsets(side, group) == {(topic, 0): some})
        large = in_partition_of(group)
        commit(side, large, {(wide, 0): 0})
        last = fill(side, wide, large)
        former, (_, next_one, _) = described(side, OFFSETS_TOPIC)[partition_of(group, OFFSETS_PARTITIONS)]
        addresses = advertised(side.bootstrap)
        with Asking(addresses[next_one], large) as asking:
            until("it is asked", lambda: asking.told)
            move_leaders(side, OFFSETS_TOPIC)
            side.produce(topic, [b"x"] * more)
            until("it tells", lambda: asking.told[-1][0] == 0)
        assert [code for code, _ in groupby(code for code, _ in asking.told)] == [
            NOT_COORDINATOR,
            COORDINATOR_LOAD_IN_PROGRESS,
            0,
        ]
        assert all(found == last for code, found in asking.told if code == 0)
        with Wire(addresses[former]) as wire:
            assert fetched(wire, large)[0] == NOT_COORDINATOR
        told = consumer.result(120)
    assert never_failed(told), told
    assert offsets(side, group) == {(topic, 0): some + more}
