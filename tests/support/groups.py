"""Consumer groups of a side, for tests: what they have committed, as brokers tell it, and members that stay."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka import Consumer, TopicPartition

from isthmus_protocol.offsets_log import OFFSETS_TOPIC, OffsetKey, decode_commit, decode_key, partition_of
from isthmus_protocol.schema import ApiKey
from support.links import Side, until
from support.wire import Wire

Committed = tuple[int, str]
COORDINATOR_MOVES: Final = (14, 15, 16)


def committed(side: Side, group: str, direct: bool = True) -> dict[tuple[str, int], Committed]:
    """Offsets and metadata that a group has, by topic and partition.

    Asked without librdkafka, whose AdminClient crashes where a coordinator is not ready (its issue 5040). Metadata that
    librdkafka committed has a NUL at its end.
    """
    servers = (side.kafka.bootstrap_servers if direct else side.bootstrap).split(",")

    def told() -> list[Any]:
        for server in servers:
            try:
                with Wire(server) as wire:
                    asked = {"key_type": 0, "coordinator_keys": [group]}
                    (found,) = wire.request(ApiKey.FIND_COORDINATOR, 4, asked).coordinators
                if found.error_code:
                    continue
                with Wire(f"{found.host}:{found.port}") as wire:
                    wanted = {"groups": [{"group_id": group, "topics": None}], "require_stable": False}
                    (answer,) = wire.request(ApiKey.OFFSET_FETCH, 8, wanted).groups
            except OSError:
                continue  # it is dead, or dies
            if answer.error_code not in COORDINATOR_MOVES:
                return [answer]
        return []

    (answer,) = until(f"the coordinator of {group} tells", told)
    assert not answer.error_code, answer
    return {
        (topic.name, each.partition_index): (each.committed_offset, (each.metadata or "").rstrip("\0"))
        for topic in answer.topics
        for each in topic.partitions
    }


def ever_committed(side: Side, group: str) -> list[tuple[tuple[str, int], Committed]]:
    """What was committed of a group, by whomever, one after the other, as the brokers' log has it.

    The cleaner does not come by what was committed lately: it leaves the newest segment.
    """
    partition = partition_of(group, side.topics()[OFFSETS_TOPIC])
    found = []
    for record in side.read(OFFSETS_TOPIC, partition, direct=True):
        key = decode_key(record.key or b"")
        if isinstance(key, OffsetKey) and key.group == group and record.value is not None:
            commit = decode_commit(record.value, record.offset)
            found.append(((key.topic, key.partition), (commit.offset, commit.metadata.rstrip("\0"))))
    return found


def offsets(side: Side, group: str, direct: bool = True) -> dict[tuple[str, int], int]:
    return {place: offset for place, (offset, _) in committed(side, group, direct).items()}


def commit(
    side: Side, group: str, positions: Mapping[tuple[str, int], int], metadata: str = "", direct: bool = False
) -> None:
    """Commit as a group's only user, without joining it."""
    servers = side.kafka.bootstrap_servers if direct else side.bootstrap
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False})
    try:
        more = (metadata,) if metadata else ()
        chosen = [TopicPartition(*place, offset, *more) for place, offset in positions.items()]
        for each in consumer.commit(offsets=chosen, asynchronous=False):
            assert each.error is None, each.error
    finally:
        consumer.close()


def group_ids(side: Side) -> set[str]:
    """The groups that the brokers know."""
    return {each.group_id for each in side.admin(direct=True).list_consumer_groups().result(30).valid}


def delete_group(side: Side, group: str) -> None:
    side.admin().delete_consumer_groups([group])[group].result(30)


def delete_offset(side: Side, group: str, topic: str, partition: int = 0) -> None:
    """Delete one committed offset of a group. Raises AssertionError for an error."""
    with Wire(side.bootstrap.split(",")[0]) as wire:
        answer = wire.request(
            ApiKey.OFFSET_DELETE,
            0,
            {"group_id": group, "topics": [{"name": topic, "partitions": [{"partition_index": partition}]}]},
        )
    assert answer.error_code == 0
    assert all(each.error_code == 0 for found in answer.topics for each in found.partitions)


class Member:
    """A member of a group, which consumes in a thread of its own: nothing else may touch its client."""

    def __init__(self, consumer: Consumer, topics: Sequence[str]) -> None:
        self._consumer = consumer
        self._assigned, self._stop = threading.Event(), threading.Event()
        self._commits: queue.Queue[tuple[list[TopicPartition], Future[None]]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.assignments = 0
        """How often the group gave it partitions."""
        self.group_metadata: Any = None
        """Of this member once it has its assignment, for transactions that commit its offsets."""
        consumer.subscribe(list(topics), on_assign=self._on_assign)
        self._thread.start()
        assert self._assigned.wait(30), "the member got no assignment"

    def _on_assign(self, *_: Any) -> None:
        self.assignments += 1
        self._assigned.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._consumer.poll(0.05)
            if self.assignments and self.group_metadata is None:
                self.group_metadata = self._consumer.consumer_group_metadata()
            while not self._commits.empty():
                positions, done = self._commits.get()
                try:
                    self._consumer.commit(offsets=positions, asynchronous=False)
                    done.set_result(None)
                except Exception as error:  # the caller's to raise
                    done.set_exception(error)

    def commit(self, positions: Mapping[tuple[str, int], int]) -> None:
        """Commit as the group's member."""
        done: Future[None] = Future()
        self._commits.put(([TopicPartition(*place, offset) for place, offset in positions.items()], done))
        done.result(30)

    def leave(self) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()


@contextmanager
def member(side: Side, group: str, *topics: str, direct: bool = False, **settings: Any) -> Iterator[Member]:
    """A member of a group with its assignment, until the block ends. ``settings`` are librdkafka's, as a producer's."""
    servers = side.kafka.bootstrap_servers if direct else side.bootstrap
    chosen = {name.replace("_", "."): value for name, value in settings.items()}
    common = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
    joined = Member(Consumer({"bootstrap.servers": servers, "group.id": group, **common, **chosen}), topics)
    try:
        yield joined
    finally:
        joined.leave()


def group_status(side: Side, link: str, group: str) -> dict[str, Any] | None:
    """What the proxies of a side tell of a group."""
    found = [each for proxy in side.proxies for each in side.link(link, proxy)["groups"] if each["group"] == group]
    return found[0] if found else None


def wait_pending(side: Side, link: str, group: str, reason: str) -> dict[str, Any]:
    """Wait until something of a group waits for a reason."""

    def pending() -> dict[str, Any] | None:
        status = group_status(side, link, group)
        return status if status is not None and status["reason"] == reason else None

    status: dict[str, Any] = until(f"{group} waits: {reason}", pending, 20)
    return status
