"""A link of real processes under random faults: writers that remember what was acknowledged, readers that never rest,
and faults that kill, stop, cut, hold and restart. For ``tests/faults``.

What holds at every time, and is checked in each round: the follower's log is a prefix of the source's; and when it
is over: every acknowledged record is there, once, at the offset that its producer was told; transactions are whole or
not at all; readers of the follower saw each offset once, in order.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from support.clocks import apart, brokers_apart
from support.kafka import unique
from support.links import VERIFICATION, Linked, Read, relayed, sidecars, until, whole
from support.relay import Relay

PARTITIONS: Final = 2
RATE: Final = 100
"""Records a second of each producer."""
BATCH: Final = 6
"""Records of a transaction."""
RECOVERY_S: Final = 60.0
PATIENCE_MS: Final = 120_000


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


# ---- writers ----


@dataclass
class Written:
    """What one producer did, by value."""

    acked: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By partition and offset."""
    somewhere: list[tuple[int, bytes]] = field(default_factory=list)
    """Acked, too, by partition: nobody said where (of a batch that was sent again)."""
    sent: int = 0
    refused: list[KafkaError] = field(default_factory=list)

    def ack(self, message: Message) -> None:
        """A record was acked."""
        partition, offset, value = message.partition(), message.offset(), message.value()
        assert partition is not None
        assert value is not None
        if offset is None:
            self.somewhere.append((partition, value))
        else:
            self.acked[partition, offset] = value


class Writer(threading.Thread):
    """A producer that writes until it is told to stop, and then waits for its answers."""

    def __init__(self, kind: str, topic: str, bootstrap: str, **settings: Any) -> None:
        super().__init__(name=f"writer-{kind}", daemon=True)
        self.kind = kind
        self.topic = topic
        self.stopping = threading.Event()
        self.written = Written()
        self.failure: BaseException | None = None
        self._settings = {
            "bootstrap.servers": bootstrap,
            "message.timeout.ms": PATIENCE_MS,
            "linger.ms": 20,
            "batch.num.messages": 20,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
            **settings,
        }

    def run(self) -> None:
        try:
            self.write()
        except BaseException as error:
            self.failure = error

    def write(self) -> None:
        producer = Producer(self._settings)
        while not self.stopping.is_set():
            self._send(producer, self._delivered)
            producer.poll(1 / RATE)
        assert producer.flush(PATIENCE_MS / 1000) == 0

    def _send(self, producer: Producer, on_delivery: Callable[[KafkaError | None, Message], None]) -> bytes:
        number = self.written.sent
        self.written.sent += 1
        value = b"%s-%d" % (self.kind.encode(), number)
        producer.produce(self.topic, value, partition=number % PARTITIONS, on_delivery=on_delivery)
        return value

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.written.refused.append(error)
        else:
            self.written.ack(message)


class Transactions(Writer):
    """A transactional producer; its transactions commit or abort in turn."""

    def __init__(self, kind: str, topic: str, bootstrap: str) -> None:
        super().__init__(
            kind, topic, bootstrap, **{"transactional.id": unique("storm-"), "transaction.timeout.ms": 120_000}
        )
        self.committed: list[list[bytes]] = []
        self.aborted: list[list[bytes]] = []
        self.unknown: list[list[bytes]] = []
        """Neither: the producer could not find out. They must be whole, or not at all."""

    def write(self) -> None:
        producer: Producer | None = None
        while not self.stopping.is_set():
            values: list[bytes] = []
            outcome = self.unknown
            try:
                if producer is None:
                    producer = Producer(self._settings)
                    producer.init_transactions(60)
                producer.begin_transaction()
                told: list[Message] = []

                def delivered(error: KafkaError | None, message: Message, told: list[Any] = told) -> None:
                    if error is None:
                        told.append(message)

                for _ in range(BATCH):
                    values.append(self._send(producer, delivered))
                    producer.poll(1 / RATE)
                # An abort purges what is not sent; a coordinator that knows of no transaction refuses to end it.
                producer.flush(PATIENCE_MS / 1000)
                commit = (len(self.committed) + len(self.aborted)) % 3 != 2
                self._retrying(producer.commit_transaction if commit else producer.abort_transaction)
                outcome = self.committed if commit else self.aborted
                for message in told:
                    self.written.ack(message)
            except KafkaException:
                producer = None  # fenced, or fatal: the next one ends what this one began
            if values:
                outcome.append(values)
        if producer is None:
            Producer(self._settings).init_transactions(60)

    @staticmethod
    def _retrying(end: Callable[[float], None]) -> None:
        while True:
            try:
                end(60)
                return
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise


# ---- readers ----


class Reader(threading.Thread):
    """A consumer of the follower through its proxy: sees each offset once, in order."""

    def __init__(self, topic: str, bootstrap: str, isolation: str) -> None:
        super().__init__(name=f"reader-{isolation}", daemon=True)
        self.topic = topic
        self.isolation = isolation
        self.stopping = threading.Event()
        self.seen: dict[int, dict[int, bytes | None]] = defaultdict(dict)
        """By partition and offset."""
        self.failure: BaseException | None = None
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": unique("storm-reader"),
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "auto.offset.reset": "error",
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }

    def run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self.failure = error

    def _read(self) -> None:
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


class Storm:
    """Writers and readers at work on one topic, and the log of what was done to them."""

    faults = FAULTS

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene = scene
        self.random = random.Random(seed)
        self.seed = seed
        self.log: list[str] = []
        self._started = time.monotonic()
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
        self.plain = Writer("plain", self.topic, servers, **{"enable.idempotence": False, "acks": "all"})
        self.idempotent = Writer("idempotent", self.topic, servers, **{"enable.idempotence": True})
        self.transactions = [Transactions(f"transaction{number}", self.topic, servers) for number in range(2)]
        self.writers: list[Writer] = [self.plain, self.idempotent, *self.transactions]
        self.readers = [
            Reader(self.follower, pair.b.bootstrap, isolation) for isolation in ("read_committed", "read_uncommitted")
        ]

    def note(self, line: str) -> None:
        self.log.append(f"{time.monotonic() - self._started:7.1f} s  {line}")

    def __enter__(self) -> Self:
        for thread in (*self.writers, *self.readers):
            thread.start()
        until("everybody writes", lambda: all(writer.written.acked for writer in self.writers))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in (*self.writers, *self.readers):
            thread.stopping.set()
        for thread in (*self.writers, *self.readers):
            thread.join(PATIENCE_MS / 1000 + 30)
        if error is not None:
            error.add_note("\n".join([f"seed {self.seed}; what was done:", *self.log, *self._ends_of_logs()]))

    def _ends_of_logs(self) -> list[str]:
        return [f"proxy {proxy.name} said:\n{proxy.log[-3000:]}" for proxy in self.scene.proxies]

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
        for thread in (*self.writers, *self.readers):
            if thread.failure is not None:
                raise AssertionError(f"{thread.name} failed") from thread.failure
        for writer in self.writers:
            assert not writer.written.refused, writer.written.refused[0]
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
        for writer in self.writers:
            writer.stopping.set()
        for writer in self.writers:
            writer.join(PATIENCE_MS / 1000 + 30)
            assert not writer.is_alive(), f"{writer.name} does not end"
        self.note("writers stopped")
        ends = sum(pair.a.end(self.topic, partition) for partition in range(PARTITIONS))
        while (copied := self._copied()) < ends:  # on a busy machine it takes a while, but it goes on
            until(f"records are copied after {copied} of {ends}", lambda copied=copied: self._copied() > copied, 30)
        for partition in range(PARTITIONS):
            pair.wait_end(self.follower, pair.a.end(self.topic, partition), partition)
        until("the link has all", self.has_all)
        self.check_now()
        uncommitted, committed = self._compare("read_uncommitted"), self._compare("read_committed")
        self._check_writers(uncommitted, committed)
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

    def _check_writers(self, uncommitted: Sequence[Sequence[Read]], committed: Sequence[Sequence[Read]]) -> None:
        at = {(index, read.offset): read.value for index, part in enumerate(uncommitted) for read in part}
        somewhere = {(index, value) for (index, _), value in at.items()}
        for writer in self.writers:
            lost = writer.written.acked.items() - at.items()
            assert not lost, f"{writer.kind}: acknowledged, and not there: {sorted(lost)[:5]}"
            assert not (missing := set(writer.written.somewhere) - somewhere), missing
        times = Counter(read.value for part in committed for read in part)
        for number in range(self.idempotent.written.sent):
            assert times[b"idempotent-%d" % number] == 1
        for writer in self.transactions:
            for values in writer.committed:
                assert [times[value] for value in values] == [1] * len(values)
            for values in writer.aborted:
                assert not any(times[value] for value in values)
            for values in writer.unknown:
                assert {times[value] for value in values} in ({0}, {1}), "half a transaction"

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
