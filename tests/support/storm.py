"""A link of real processes under random faults: writers that remember what was acknowledged (``at_work``), readers that
never rest, and faults that kill, stop, cut, hold and restart. For ``tests/faults``.

What holds at every time, and is checked in each round: the follower's log is a prefix of the source's; and when it
is over: every acknowledged record is there, once, at the offset that its producer was told; transactions are whole or
not at all; readers of the follower saw each offset once, in order.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from support.at_work import PARTITIONS, RECOVERY_S, AtWork, Client, Held, Idempotent, Transactions, Writer
from support.clocks import apart, brokers_apart
from support.kafka import unique
from support.links import VERIFICATION, Linked, Read, relayed, sidecars, until, whole
from support.relay import Relay


class Scene:
    """Brokers that lead, brokers that follow, a proxy each side, a relay between the proxies."""

    def __init__(self, pair: Linked, relay: Relay) -> None:
        self.pair = pair
        self.relay = relay

    @property
    def clusters(self) -> tuple[KafkaCluster, KafkaCluster]:
        return self.pair.a.kafka, self.pair.b.kafka

    @property
    def proxies(self) -> tuple[ProxyProcess, ProxyProcess]:
        return self.pair.a.proxy, self.pair.b.proxy


@contextmanager
def scene(
    a_brokers: int,
    b_brokers: int,
    a_clock_s: int = 0,
    a_sidecars: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Scene]:
    """Clusters of one's own: their brokers are killed. ``a_clock_s``: how far A's clocks are ahead of B's.

    ``a_sidecars``: A has a proxy for each broker. ``environment``: of all proxies.
    """
    with ExitStack() as stack:
        clock = brokers_apart(a_clock_s, Path(stack.enter_context(TemporaryDirectory(prefix="isthmus-storm-"))))
        a = stack.enter_context(KafkaCluster(name="storm-a", brokers=a_brokers, jvm_flags=clock))
        b = stack.enter_context(KafkaCluster(name="storm-b", brokers=b_brokers, settings={VERIFICATION: "false"}))
        around = {**apart(a_clock_s), **(environment or {})}
        a_proxies = sidecars(a, around) if a_sidecars else [whole(a, around)]
        pair, relay = stack.enter_context(relayed(a, b, a_proxies=a_proxies, b_environment=environment))
        pair.attach()
        yield Scene(pair, relay)


# ---- readers ----


class Reader(Client):
    """A consumer of the follower through its proxy: sees each offset once, in order."""

    def __init__(self, topic: str, bootstrap: str, isolation: str) -> None:
        super().__init__(f"reader-{isolation}")
        self.topic = topic
        self.isolation = isolation
        self.seen: dict[int, dict[int, bytes | None]] = defaultdict(dict)
        """By partition and offset."""
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": unique("storm-reader"),
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "auto.offset.reset": "error",
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }

    def work(self) -> None:
        consumer = Consumer(self._settings)
        consumer.assign([TopicPartition(self.topic, partition, 0) for partition in range(PARTITIONS)])
        last = dict.fromkeys(range(PARTITIONS), -1)
        try:
            while not self.stopping.is_set():
                for message in consumer.consume(200, 0.2):
                    error = message.error()
                    if error is not None:
                        assert error.code() != KafkaError._AUTO_OFFSET_RESET, error
                        continue  # a proxy or broker that is gone for now
                    partition, offset = message.partition(), message.offset()
                    assert offset > last[partition], f"{self.isolation}: {offset} after {last[partition]}"
                    last[partition] = offset
                    self.seen[partition][offset] = message.value()
        finally:
            consumer.close()


# ---- faults ----

Fault = Callable[[Scene, random.Random], None]


def kill_source_proxy(scene: Scene, rng: random.Random) -> None:
    scene.proxies[0].kill()
    scene.proxies[0].start()


def kill_target_proxy(scene: Scene, rng: random.Random) -> None:
    scene.proxies[1].kill()
    scene.proxies[1].start()


def kill_both_proxies(scene: Scene, rng: random.Random) -> None:
    for proxy in scene.proxies:
        proxy.kill()
    for proxy in scene.proxies:
        proxy.spawn()
    for proxy in scene.proxies:
        proxy.wait_ready()


def kill_target_proxy_twice(scene: Scene, rng: random.Random) -> None:
    """Also while it reads where it was."""
    kill_target_proxy(scene, rng)
    time.sleep(rng.uniform(0, 3))
    kill_target_proxy(scene, rng)


def kill_source_broker(scene: Scene, rng: random.Random) -> None:
    _kill_broker(scene.clusters[0], rng)


def kill_target_broker(scene: Scene, rng: random.Random) -> None:
    _kill_broker(scene.clusters[1], rng)


def _kill_broker(kafka: KafkaCluster, rng: random.Random) -> None:
    broker = rng.choice(kafka.broker_ids)
    kafka.kill(broker)
    time.sleep(rng.choice((0.0, 1.0)))
    kafka.start_broker(broker)


def stop_a_proxy(scene: Scene, rng: random.Random) -> None:
    proxy = rng.choice(scene.proxies)
    proxy.pause()
    time.sleep(rng.uniform(0.1, 6))
    proxy.resume()


def stop_a_broker(scene: Scene, rng: random.Random) -> None:
    kafka = rng.choice(scene.clusters)
    broker = rng.choice(kafka.broker_ids)
    kafka.pause(broker)
    time.sleep(rng.uniform(0.1, 4))
    kafka.resume(broker)


def cut_in_the_middle(scene: Scene, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 6)):
        before = scene.relay.accepted
        scene.relay.cut_after(rng.choice((1, 40, 100, 1000, 5000, 20_000)))
        until("the link connects again", lambda before=before: scene.relay.accepted > before, 30)
        time.sleep(rng.choice((0.0, 0.1, 0.7)))


def stall_and_deliver_late(scene: Scene, rng: random.Random) -> None:
    """The connection hangs until the proxies take it for dead; what it held arrives beside the next one."""
    before = scene.relay.accepted
    scene.relay.stall()
    try:
        if rng.random() < 0.5:
            until("the link connects again", lambda: scene.relay.accepted > before, 30)
            time.sleep(rng.uniform(0, 2))
        else:
            time.sleep(rng.uniform(0.1, 4))
    finally:
        scene.relay.release()


def slow_link(scene: Scene, rng: random.Random) -> None:
    scene.relay.delay_s = rng.uniform(0.005, 0.1)
    time.sleep(rng.uniform(0.5, 3))
    scene.relay.delay_s = 0.0


def restart_all(scene: Scene, rng: random.Random) -> None:
    for proxy in scene.proxies:
        proxy.kill()
    target = scene.clusters[1]
    for broker in target.broker_ids:
        target.kill(broker)
    target.start_brokers(target.broker_ids)
    for proxy in scene.proxies:
        proxy.spawn()
    for proxy in scene.proxies:
        proxy.wait_ready()


FAULTS: Final[dict[Fault, int]] = {
    kill_source_proxy: 3,
    kill_target_proxy: 3,
    kill_target_proxy_twice: 1,
    kill_both_proxies: 3,
    kill_source_broker: 2,
    kill_target_broker: 2,
    stop_a_proxy: 3,
    stop_a_broker: 2,
    cut_in_the_middle: 4,
    stall_and_deliver_late: 3,
    slow_link: 1,
    restart_all: 1,
}
"""How often each comes, against the others."""


# ---- the storm ----


class Storm(AtWork):
    """Writers and readers at work on one topic, and the log of what was done to them."""

    faults = FAULTS

    def __init__(self, scene: Scene, seed: int) -> None:
        super().__init__(seed, scene.proxies)
        self.scene = scene
        pair = scene.pair
        name = unique("storm-")
        self.topic, self.follower = pair.local + name, pair.remote + name
        replicas = min(3, len(pair.a.kafka.broker_ids))
        pair.a.create_topic(
            self.topic,
            PARTITIONS,
            {"min.insync.replicas": str(min(2, replicas))},
            direct=True,
            replicas=replicas,
        )
        pair.wait_state(self.follower, "Following", PARTITIONS - 1)
        servers = pair.a.bootstrap
        self.writers = [
            Writer("plain", self.topic, servers, **{"enable.idempotence": False, "acks": "all"}),
            Idempotent("idempotent", self.topic, servers),
            *(Transactions(f"transaction{number}", self.topic, servers) for number in range(2)),
        ]
        self.readers = [
            Reader(self.follower, pair.b.bootstrap, isolation) for isolation in ("read_committed", "read_uncommitted")
        ]

    @property
    def clients(self) -> Sequence[Client]:
        return [*self.writers, *self.readers]

    def round(self) -> None:
        """One fault, or two at once; then the link comes back by itself, and what is there is the source's."""
        faults = self.random.choices(list(self.faults), list(self.faults.values()))
        if self.random.random() < 0.2:
            faults.append(cut_in_the_middle)
        for fault in faults:
            self.note(fault.__name__)
            fault(self.scene, self.random)
        until("the link is well again", self.is_well, RECOVERY_S)
        before = self._copied()
        until("records are copied again", lambda: self._copied() > before, RECOVERY_S)
        self.check_now()
        self.note("recovered")
        time.sleep(self.random.uniform(0, 1))

    def is_well(self) -> bool:
        """Whether the link works, as far as its proxies know."""
        pair = self.scene.pair
        found = pair.b.partitions(pair.name, self.follower)
        return (
            len(found) == PARTITIONS
            and all(each["state"] in ("Following", "Catching Up") for each in found)
            and pair.b.link(pair.name)["state"] != "Disconnected"
        )

    def has_all(self) -> bool:
        """Whether the link is well and nothing is on its way."""
        pair = self.scene.pair
        sides = pair.a.partitions(pair.name, self.topic), pair.b.partitions(pair.name, self.follower)
        return self.is_well() and all(each["partition_mirror_lag"] == 0 for side in sides for each in side)

    def _copied(self) -> int:
        pair = self.scene.pair
        return sum(each["follower_end"] or 0 for each in pair.b.partitions(pair.name, self.follower))

    def check_now(self) -> None:
        """What has to hold while everybody is at work."""
        self.check_clients()
        verdicts = until("all is compared", self._compared, RECOVERY_S)
        assert len(verdicts) == PARTITIONS
        assert all(each["equal"] for each in verdicts), verdicts

    def _compared(self) -> list[dict[str, Any]] | None:
        """What verify says; None where the link was cut once more meanwhile, as a machine that stalls does."""
        verdicts = [each for each in self.scene.pair.verify(check=False)["partitions"] if each["topic"] == self.topic]
        cut = [each for each in verdicts if (each["difference"] or "").startswith("not compared")]
        return None if cut else verdicts

    def finish(self) -> None:
        """Stop the writers, wait for the follower, and compare everything."""
        pair = self.scene.pair
        self.stop_writers()
        ends = sum(pair.a.end(self.topic, partition) for partition in range(PARTITIONS))
        while (copied := self._copied()) < ends:  # on a busy machine it takes a while, but it goes on
            until(f"records are copied after {copied} of {ends}", lambda copied=copied: self._copied() > copied, 30)
        for partition in range(PARTITIONS):
            pair.wait_end(self.follower, pair.a.end(self.topic, partition), partition)
        until("the link has all", self.has_all)
        self.check_now()
        uncommitted, committed = self._compare("read_uncommitted"), self._compare("read_committed")
        held = Held.of(pair.a.kafka, uncommitted, committed)
        for writer in self.writers:
            writer.check(held)
        self._check_readers({"read_uncommitted": uncommitted, "read_committed": committed})

    def _compare(self, isolation: str) -> list[list[Read]]:
        pair = self.scene.pair
        found = []
        for partition in range(PARTITIONS):
            theirs = pair.a.read(self.topic, partition, direct=True, isolation=isolation)
            ours = pair.b.read(self.follower, partition, direct=True, isolation=isolation)
            assert ours == theirs
            found.append(ours)
        return found

    def _check_readers(self, expected: dict[str, list[list[Read]]]) -> None:
        for reader in self.readers:
            wanted = {
                partition: {read.offset: read.value for read in part}
                for partition, part in enumerate(expected[reader.isolation])
            }
            until(
                f"the {reader.isolation} reader has everything",
                lambda reader=reader, wanted=wanted: reader.failure is not None or reader.seen == wanted,
                30,
            )
            assert reader.failure is None, reader.failure
