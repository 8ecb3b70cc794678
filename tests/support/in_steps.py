"""Transactions over several partitions and a group, and clusters that die under them broker by broker.

What must hold at the target after a failover: a transaction has one outcome in all its partitions and in its group, an
acked one is committed, one that was not decided is not. For ``tests/acceptance/test_dies_in_steps.py``.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from isthmus_bench.kafka import EmbeddedKafkaError, KafkaCluster
from support.groups import offsets
from support.kafka import unique
from support.links import Linked, Side, until

CALL_S: Final = 1.0
"""A call of a producer takes no longer, so that it ends soon after its cluster has."""
ENDING_S: Final = 5.0
Place = tuple[str, int]


class Transfers:
    """An application with its transactional id and its group, from :meth:`start` to :meth:`end`. Its transactions count
    from 1: each writes its number into all partitions, and commits it as the group's offset in the first."""

    def __init__(self, side: Side, group: str, places: Sequence[Place], rng: random.Random) -> None:
        self.group = group
        self.name = unique("transfers-").encode()
        self.committing: dict[int, tuple[Place, ...]] = {}
        """Transactions whose records and offset were acked, and their partitions: they may be committed."""
        self.acked: set[int] = set()
        self.failed: BaseException | None = None
        self._side = side
        self._places = places
        self._random = random.Random(rng.random())
        self._metadata: Any = None
        """The group's, of somebody who is no member of it."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        consumer = Consumer({"bootstrap.servers": self._side.bootstrap, "group.id": self.group})
        self._metadata = consumer.consumer_group_metadata()
        consumer.close()
        self._thread.start()

    def end(self) -> None:
        """It begins nothing more."""
        self._ended.set()

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, or its cluster did and librdkafka waits for it, whatever time limit a call has (seen of
        ``send_offsets_to_transaction``): nobody answers that call any more. Raises what it failed with."""
        self._thread.join(timeout_s)
        if self.failed is not None:
            raise self.failed

    def value(self, number: int) -> bytes:
        return b"%s %d" % (self.name, number)

    def _run(self) -> None:
        try:
            number = 0
            while not self._ended.is_set():
                number = self._life(number)
        except BaseException as error:
            self.failed = error

    def _life(self, number: int) -> int:
        """Of one producer, until it cannot go on; the number of its last transaction."""
        settings = {
            "bootstrap.servers": self._side.bootstrap,
            "transactional.id": self.name.decode(),
            "transaction.timeout.ms": 60_000,
            "linger.ms": 0,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
        producer = Producer(settings)
        try:
            self._again(lambda: producer.init_transactions(CALL_S))
            while not self._ended.is_set():
                number += 1
                self._transact(producer, number)
        except KafkaException:
            pass  # another producer goes on: what this one was at is decided, or aborted
        finally:
            producer.purge()
        return number

    def _transact(self, producer: Producer, number: int) -> None:
        """Raises KafkaException: the producer cannot go on."""
        errors: list[KafkaError | None] = []
        count = self._random.randint(2, len(self._places))
        chosen = tuple(self._random.sample(list(self._places), count))
        producer.begin_transaction()
        for topic, partition in chosen:
            producer.produce(
                topic, self.value(number), partition=partition, on_delivery=lambda error, _: errors.append(error)
            )
        position = TopicPartition(*self._places[0], number)
        self._again(lambda: producer.send_offsets_to_transaction([position], self._metadata, CALL_S))
        while len(errors) < count and not self._ended.is_set():
            producer.poll(0.05)
        if len(errors) < count or any(errors):
            self._again(lambda: producer.abort_transaction(CALL_S))
            return
        self.committing[number] = chosen
        self._again(lambda: producer.commit_transaction(CALL_S))
        self.acked.add(number)
        time.sleep(self._random.choice((0.0, 0.0, 0.02)))

    def _again(self, call: Callable[[], Any]) -> None:
        """Call until it is done. Raises KafkaException: it never will be, or the application ends."""
        while True:
            try:
                call()
                return
            except KafkaException as error:
                if self._ended.is_set() or not error.args[0].retriable():
                    raise


@contextmanager
def transferring(
    side: Side, groups: Sequence[str], places: Sequence[Place], rng: random.Random
) -> Iterator[list[Transfers]]:
    """Applications, one for each group; their cluster is dead when the block ends."""
    running = [Transfers(side, group, places, rng) for group in groups]
    for each in running:
        each.start()
    try:
        yield running
    finally:
        for each in running:
            each.end()
        deadline = time.monotonic() + ENDING_S
        for each in running:
            each.wait(max(0.0, deadline - time.monotonic()))


class Found:
    """What a side has after a failover."""

    def __init__(self, side: Side, places: Sequence[Place]) -> None:
        self._side = side
        self.values = {
            place: {record.value for record in side.read(*place, isolation="read_committed")} for place in places
        }

    def check(self, each: Transfers, first: Place) -> int:
        """That all transactions of an application are whole or not at all, none that was acked is missing, and its
        group is where the last of them left it; how many are in doubt that had been asked for."""
        committed = set()
        for number, places in each.committing.items():
            there = [place for place in places if each.value(number) in self.values[place]]
            assert len(there) in (0, len(places)), (
                f"{each.value(number)!r} is torn: committed in {there} of {places}, acked: {number in each.acked}"
            )
            if there:
                committed.add(number)
        lost = each.acked - committed
        assert not lost, f"acked commits of {each.name!r} are lost: {sorted(lost)}"
        known = {each.value(number) for number in each.committing}
        mine = {value for values in self.values.values() for value in values if value.startswith(each.name + b" ")}
        assert mine <= known, f"committed, and nobody asked for it: {sorted(mine - known)}"
        position = offsets(self._side, each.group).get(first, 0)
        assert position == max(committed, default=0), (
            f"{each.group} is torn: at {position}, its last transaction is {max(committed, default=0)}; "
            f"{position} was asked for in {each.committing.get(position)}, acked: {position in each.acked}"
        )
        return len(each.committing.keys() - each.acked)


# ---- what dies ----


def kill(cluster: KafkaCluster, broker_id: int) -> None:
    """If it lives."""
    try:
        cluster.kill(broker_id)
    except EmbeddedKafkaError:
        assert not cluster.alive(broker_id)


def die(side: Side, rng: random.Random) -> list[str]:
    """Brokers and proxies of a side die in some order: at once, or one first and the rest when it may be missed, and
    before or after others lead what it led; what happened."""
    victims: dict[str, Callable[[], None]] = {
        f"broker {broker_id}": lambda broker_id=broker_id: kill(side.kafka, broker_id)
        for broker_id in side.kafka.broker_ids
    }
    victims |= {f"proxy {proxy.name}": proxy.kill for proxy in side.proxies}
    order = list(victims)
    rng.shuffle(order)
    first = next(index for index, name in enumerate(order) if name.startswith("broker"))
    if rng.random() < 0.75:  # else a proxy may be the first
        order.insert(0, order.pop(first))
    gaps = [rng.choice((0.0, 0.0, 0.01, 0.1, rng.uniform(0.2, 2.0))) for _ in order]
    gaps[0] = rng.choice((0.0, 0.05, rng.uniform(0.2, 1.5), rng.uniform(1.0, 4.5), rng.uniform(4.5, 9.0)))
    began, told = time.monotonic(), []
    for name, gap in zip(order, gaps, strict=True):
        victims[name]()
        told.append(f"{time.monotonic() - began:.2f} s: {name}")
        time.sleep(gap)
    return told


def in_sync(link: Linked, topics: Mapping[str, int], groups: Sequence[str]) -> bool:
    """Whether acks mean both sides, for all proxies that push some of this."""
    pushed = {
        (each["topic"], each["partition"]): each["state"]
        for each in link.a.partitions(link.name)
        if each["topic"] in topics
    }
    known = {
        each["group"]: (each["sync"] or {}).get("state")
        for proxy in link.a.proxies
        for each in link.a.link(link.name, proxy)["groups"]
        if (each["sync"] or {}).get("state") == "In-Sync"
    }
    return len(pushed) == sum(topics.values()) and set(pushed.values()) == {"In-Sync"} and known.keys() >= set(groups)


def revive(side: Side) -> None:
    """Have all brokers and proxies of a side run again."""
    dead = [broker_id for broker_id in side.kafka.broker_ids if not side.kafka.alive(broker_id)]
    if dead:
        side.kafka.start_brokers(dead)
    for proxy in side.proxies:
        if not proxy.running:
            proxy.spawn()
    for proxy in side.proxies:
        proxy.wait_ready()
    until(
        "brokers are there",
        lambda: len(side.admin(direct=True).list_topics(timeout=5).brokers) >= len(side.kafka.broker_ids),
    )
