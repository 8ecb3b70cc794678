"""Leaders of offsets topics move, at the source and at the target, while groups commit; each broker has a proxy.

So a move takes groups' coordinators, and the logs that their commits are read from, to other proxies. The target keeps
committed offsets for a minute only: those that nobody changes outlive it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Final, NamedTuple, Self

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from support.groups import commit, member
from support.kafka import unique
from support.leaders import described, move_leaders
from support.links import Linked, Side, linked, sidecars, until
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, Commit, OffsetKey, decode_commit, decode_key, partition_of
from isthmus_protocol.schema import ApiKey

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

OFFSETS_PARTITIONS: Final = 4
GROUPS: Final = 8
RECORDS: Final = 5000
"""In the topic that groups read: committed offsets stay below."""
MOVES: Final = 3
RETENTION: Final = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "500"}
"""A minute is the least that brokers take."""
POSITION: Final = 42
"""Of groups that never change it."""


class Scene(NamedTuple):
    """Three brokers and their proxies on each side; a topic and groups follow, and a copy of the offsets topic."""

    pair: Linked
    source: str
    target: str
    copy: str
    unchanged: dict[str, str]
    """Groups at the target whose committed offset nobody changes, by how their coordinator sees them."""
    own: str
    """A group of the target's own and its topic: its committed offset, the youngest of these, expires."""


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Clusters of this module's own: their brokers are killed, and the target's forget."""
    with ExitStack() as stack:
        a = stack.enter_context(KafkaCluster(name="moving-a", brokers=3))
        b = stack.enter_context(KafkaCluster(name="moving-b", brokers=3, settings=RETENTION))
        pair = stack.enter_context(linked(a, b, a_proxies=sidecars(a), b_proxies=sidecars(b)))
        pair.attach()
        pair.attach(None, None, "--type", "consumer-group", "--disable-transaction-verification")
        pair.a.proxy.cli("link", "alter", pair.name, "--offsets-topic", "whole")
        source, target = pair.names("t")
        pair.a.create_topic(source, config={"min.insync.replicas": "2"}, replicas=3)
        pair.a.produce(source, [b"x"] * RECORDS)
        pair.wait_end(target, RECORDS)

        names = {kind: unique(kind) for kind in ("without-members", "left-by-members", "classic", "consumer")}
        unchanged = {kind: pair.remote + name for kind, name in names.items()}
        for name in names.values():
            commit(pair.a, pair.local + name, {(source, 0): POSITION})
        expected = dict.fromkeys(unchanged.values(), POSITION)
        until("all committed offsets are there", lambda: committed_offsets(pair.b, target, expected) == expected, 20)
        own = unique("own")
        pair.b.create_topic(own, replicas=3)
        with member(pair.b, unchanged["left-by-members"], target):
            pass  # offsets of such groups expire some time after the last member left, whenever they were committed
        for protocol in ("classic", "consumer"):
            stack.enter_context(member(pair.b, unchanged[protocol], own, group_protocol=protocol))
        commit(pair.b, own, {(own, 0): 0})
        yield Scene(pair, source, target, f"{OFFSETS_TOPIC}_{a.cluster_id}", unchanged, own)


class Committers:
    """Groups of the source that commit one offset after another until the block ends; seen by all coordinators."""

    def __init__(self, scene: Scene) -> None:
        name = unique("app-") + "-"
        numbers = [f"{name}{number}" for number in range(GROUPS)]
        self.groups = {scene.pair.local + name: scene.pair.remote + name for name in numbers}
        """Their names at both sides."""
        for names in zip(*self.groups.items(), strict=True):
            assert len({partition_of(group, OFFSETS_PARTITIONS) for group in names}) == OFFSETS_PARTITIONS
        self.acked = dict.fromkeys(self.groups, 0)
        self._scene = scene
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._commit, args=(group,), daemon=True) for group in self.groups]

    def _commit(self, group: str) -> None:
        servers = self._scene.pair.a.bootstrap
        consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False})
        offset = 1
        while not self._stop.wait(0.02):
            try:
                consumer.commit(offsets=[TopicPartition(self._scene.source, 0, offset)], asynchronous=False)
            except KafkaException:
                continue  # its coordinator moves: the same again
            self.acked[group] = offset
            offset += 1
        consumer.close()

    def wait_for_more(self) -> None:
        """Every group commits again."""
        before = dict(self.acked)
        until("all groups commit", lambda: all(self.acked[group] > before[group] + 1 for group in before), 30)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.wait_for_more()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert error is not None or not any(thread.is_alive() for thread in self._threads)


def committed_offsets(side: Side, topic: str, groups: Iterable[str]) -> dict[str, int]:
    """By group, its committed offset in a topic of one partition; of those whose coordinator tells it now.

    Asked of every broker: librdkafka's administrators crash while coordinators move. One that does not know yet that it
    is no coordinator any more tells what was, so the furthest counts.
    """
    found: dict[str, int] = {}
    asked = [{"group_id": group, "topics": None} for group in groups]
    for address in side.kafka.bootstrap_servers.split(","):
        try:
            with Wire(address) as wire:
                answer = wire.request(ApiKey.OFFSET_FETCH, 8, {"groups": asked, "require_stable": False})
        except OSError:
            continue  # it is dead
        for group in answer.groups:
            for each in group.topics if not group.error_code else ():
                if each.name == topic:
                    (partition,) = each.partitions
                    found[group.group_id] = max(found.get(group.group_id, 0), partition.committed_offset)
    return found


def commits(side: Side) -> Iterator[tuple[OffsetKey, Commit | None]]:
    """What was ever committed, as the brokers have it, in order for each key; None: expired or deleted.

    This is what is so. A coordinator that has just become one may tell older committed offsets for a moment, until its
    high watermark is there."""
    for partition in range(OFFSETS_PARTITIONS):
        for record in side.read(OFFSETS_TOPIC, partition, direct=True):
            key = decode_key(record.key or b"")
            if isinstance(key, OffsetKey):
                yield key, None if record.value is None else decode_commit(record.value, record.offset)


def move_by_election(scene: Scene, side: Side, committers: Committers) -> None:
    for _ in range(MOVES):
        for topic in (OFFSETS_TOPIC, scene.copy):
            if topic in side.topics():
                move_leaders(side, topic)
        committers.wait_for_more()


def kill_a_leader(scene: Scene, side: Side, committers: Committers) -> None:
    broker, _ = described(side, OFFSETS_TOPIC)[0]
    side.kafka.kill(broker)
    until("others lead", lambda: broker not in {leader for leader, _ in described(side, OFFSETS_TOPIC).values()}, 30)
    committers.wait_for_more()
    side.kafka.start_broker(broker)


Move = Callable[[Scene, Side, Committers], None]


@pytest.mark.one_in_ci("stories", of="faults of committed offsets")
@pytest.mark.parametrize("move", [move_by_election, kill_a_leader], ids=lambda move: str(move.__name__))
@pytest.mark.parametrize("where", ["source", "target"])
def test_committed_offsets_and_copy_follow(scene: Scene, where: str, move: Move) -> None:
    pair = scene.pair
    with Committers(scene) as committers:
        move(scene, pair.a if where == "source" else pair.b, committers)
        committers.wait_for_more()
    expected = {follower: committers.acked[group] for group, follower in committers.groups.items()}
    until("all committed offsets are there", lambda: committed_offsets(pair.b, scene.target, expected) == expected, 20)
    told: dict[str, list[int]] = defaultdict(list)
    for key, found in commits(pair.b):
        if key.group in expected:
            assert found is not None, f"{key} was deleted"
            told[key.group].append(found.offset)
    assert {group: (told[group], told[group][-1]) for group in expected} == {
        group: (sorted(told[group]), offset) for group, offset in expected.items()
    }
    for partition in range(OFFSETS_PARTITIONS):  # proxies commit there, too, every few seconds
        until("all is copied", lambda p=partition: pair.b.end(scene.copy, p) == pair.a.end(OFFSETS_TOPIC, p))
    report = pair.verify()
    assert report["equal"], report
    view = pair.b.proxy.get(f"/v1/links/{pair.name}/offsets")
    copied = {each["group"]: [commit["offset"] for commit in each["offsets"]] for each in view["groups"]}
    assert {group: copied[group] for group in committers.acked} == {
        group: [offset] for group, offset in committers.acked.items()
    }


@pytest.mark.one_in_ci("stories", of="faults of committed offsets")
def test_committed_offsets_that_nobody_changes_outlive_the_retention(scene: Scene) -> None:
    b = scene.pair.b
    until("the retention of all is over", lambda: not committed_offsets(b, scene.own, [scene.own]), 90, 0.3)
    renewed = dict.fromkeys(scene.unchanged.values(), 0)
    for key, found in commits(b):
        if key.group in renewed:
            assert key == OffsetKey(key.group, scene.target, 0)
            assert found is not None, f"{key} has expired"
            renewed[key.group] += 1
    assert committed_offsets(b, scene.target, renewed) == dict.fromkeys(renewed, POSITION)
    assert min(renewed.values()) > 1, renewed
