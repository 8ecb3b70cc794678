"""A seeded simulation of a link under faults.

The plugin's own ends, from the handshake to the writers, between two model clusters: appends are lost, answered late or
never, land after they were taken for lost; connections break in the middle of a frame; leaders move, brokers and
proxies go and come back, the control log does not answer. After every append to a follower:

- its log is a prefix of the source's, batch by batch: nothing twice, no gap, nothing shifted.

And when everything works again, the follower gets all of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Final

import pytest
from support.fake_cluster import FakeCluster, run_simulated
from support.partition_log import TIMESTAMP, Partition, Producer, batch
from support.replicas import Replicas
from support.seeds import seeds

from isthmus_plugins.cluster import TransactionMarkers
from isthmus_protocol.records import TRANSACTIONAL_BIT

SEEDS: Final = 40
"""``make test-fuzz`` runs thousands."""
STEPS: Final = 30
TROUBLE: Final = (0.0, 0.05, 0.3)
PRODUCER_IDS: Final = (-1, -1, 0, 1)
TRANSACTIONAL_IDS: Final = (10, 11, 12)
KEYS: Final = (b"a", b"b", b"c")
OLD: Final = TIMESTAMP - 86_400_000


class Storm:
    """What happens to a pair of replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.random = replicas.random
        self.topics = 0
        self.violation: AssertionError | None = None

    def write(self) -> None:
        names = [name for name in self.replicas.a.found if name.startswith("local-")]
        name = self.random.choice(names)
        index = self.random.randrange(len(self.replicas.a.found[name].partitions))
        partition = self.replicas.a.partition(name, index)
        for _ in range(self.random.randint(1, 8)):
            self.random.choices((self.produce, self.transact, self.end_transaction), (55, 30, 15))[0](partition)

    def produce(self, partition: Partition) -> None:
        """A batch that is in no transaction."""
        self._append(partition, self.random.choice(PRODUCER_IDS), 0)

    def transact(self, partition: Partition) -> None:
        """A batch of a transaction, which begins with it or goes on."""
        self._append(partition, self.random.choice(TRANSACTIONAL_IDS), TRANSACTIONAL_BIT)

    def _append(self, partition: Partition, producer_id: int, attributes: int) -> None:
        rng = self.random
        count = rng.randint(1, 5)
        keys = KEYS if partition.compacted else (*KEYS, None)
        known = partition.producers.get(producer_id, Producer())
        code, _ = partition.produce(
            batch(
                0,
                [rng.randbytes(rng.randint(0, 40)) for _ in range(count)],
                keys=[rng.choice(keys) for _ in range(count)],
                producer_id=producer_id,
                producer_epoch=-1 if producer_id < 0 else max(0, known.epoch),
                base_sequence=-1 if producer_id < 0 else known.last_sequence + 1,
                attributes=attributes | rng.randint(0, 4),
                timestamp=TIMESTAMP if rng.random() < 0.9 else OLD,
            )
        )
        assert code == 0

    def end_transaction(self, partition: Partition) -> None:
        """Some with the producer's next epoch, as the coordinator does for clients of KIP-890 part 2."""
        begun = [each for each, known in partition.producers.items() if known.transaction_start >= 0]
        if begun:
            producer_id = self.random.choice(begun)
            known = partition.producers[producer_id]
            epoch = known.epoch + self.random.choice((0, 0, 1))
            committed = self.random.random() < 0.6
            marker = TransactionMarkers("", 0, producer_id, epoch, committed, max(0, known.coordinator_epoch))
            assert partition.mark(marker) == 0

    def clean(self) -> None:
        """A log cleaner comes by, at the source or at the follower."""
        for partition in (*self._source_partitions(), *self._partitions(self.replicas.b, "remote-")):
            if partition.compacted and self.random.random() < 0.5:
                partition.compact(self.random.randint(0, partition.end), drop_tombstones=self.random.random() < 0.5)

    def delete_head(self) -> None:
        """Retention, or DeleteRecords."""
        partition = self.random.choice(list(self._source_partitions()))
        if not partition.compacted and not partition.cleaned:
            before = self.random.randint(partition.start, partition.high_watermark)
            assert partition.delete_records(before)[0] == 0

    def _source_partitions(self) -> Iterator[Partition]:
        return self._partitions(self.replicas.a, "local-")

    @staticmethod
    def _partitions(cluster: FakeCluster, prefix: str) -> Iterator[Partition]:
        for name, topic in cluster.found.items():
            if name.startswith(prefix):
                yield from topic.partitions

    def change_policy(self) -> None:
        """A topic becomes compacted, or is not any more: it may have records without a key."""
        topics = [topic for name, topic in self.replicas.a.found.items() if name.startswith("local-")]
        topic = self.random.choice(topics)
        self.check()  # which notes that it was compacted
        topic.configs["cleanup.policy"] = self.random.choice(("delete", "compact", "compact,delete"))
        self.replicas.a._configure(topic)

    def add_topic(self) -> None:
        if self.topics < 4:
            self.topics += 1
            configs = {
                "cleanup.policy": self.random.choice(("delete", "delete", "compact", "compact,delete")),
                "message.timestamp.type": self.random.choice(("CreateTime", "CreateTime", "LogAppendTime")),
            }
            self.replicas.a.add_topic(f"local-{self.topics}", self.random.randint(1, 3), configs)

    def add_partitions(self) -> None:
        names = [name for name in self.replicas.a.found if name.startswith("local-")]
        topic = self.replicas.a.found[self.random.choice(names)]
        if len(topic.partitions) < 4:
            self.replicas.a._grow(topic, len(topic.partitions) + 1)

    def move_leader(self) -> None:
        cluster = self.random.choice((self.replicas.a, self.replicas.b))
        topic = self.random.choice(list(cluster.found.values()))
        partition = self.random.choice(topic.partitions)
        alive = [broker for broker in cluster.brokers if broker not in cluster.down]
        self._move(cluster, partition, self.random.choice(alive))

    def _move(self, cluster: FakeCluster, partition: Partition, leader: int) -> None:
        """At the target often without what is not replicated yet; and sometimes back at once."""
        before = partition.leader
        lossy = cluster is self.replicas.b and self.random.random() < 0.7
        partition.move(leader, lossy)
        if self.random.random() < 0.3 and before not in cluster.down:
            partition.move(before)

    def stop_broker(self) -> None:
        cluster = self.random.choice((self.replicas.a, self.replicas.b))
        if cluster.down:
            return
        broker = self.random.choice(cluster.brokers)
        cluster.down.add(broker)
        for topic in cluster.found.values():
            for partition in topic.partitions:
                if partition.leader == broker and self.random.random() < 0.8:
                    self._move(cluster, partition, next(each for each in cluster.brokers if each != broker))

    def start_brokers(self) -> None:
        for cluster in (self.replicas.a, self.replicas.b):
            cluster.down.clear()

    def forget_producers(self) -> None:
        """Producer states expire by the records' timestamps, but for open transactions: brokers tell no duplicates."""
        for topic in self.replicas.b.found.values():
            for partition in topic.partitions:
                partition.producers = {
                    producer_id: known
                    for producer_id, known in partition.producers.items()
                    if known.transaction_start >= 0 or known.timestamp > OLD
                }

    def uncommitted(self) -> None:
        """A broker whose replicas are slow."""
        for topic in self.replicas.a.found.values():
            for partition in topic.partitions:
                if partition.headers and self.random.random() < 0.3:
                    partition.lag = partition.end - partition.headers[-1].base_offset

    def trouble(self) -> None:
        for cluster in (self.replicas.a, self.replicas.b):
            cluster.trouble = self.random.choice(TROUBLE)
        for control in self.replicas.controls.values():
            control.trouble = self.random.choice(TROUBLE)

    async def cut(self) -> None:
        self.write()
        await asyncio.sleep(self.random.choice((0.0, 0.02)))
        self.replicas.cut()
        await asyncio.sleep(self.random.choice((0.0, 0.1, 3.0)))
        await self.replicas.connect()

    async def kill(self) -> None:
        for _ in range(self.random.choice((0, 5))):  # often with appends under way
            self.write()
        await asyncio.sleep(self.random.choice((0.0, 0.02)))
        which = self.random.choice(("A", "B", "AB"))
        await self.replicas.stop(which)
        await asyncio.sleep(self.random.choice((0.0, 0.3, 5.0)))
        self.replicas.start(which)
        await self.replicas.connect()

    async def blow(self) -> None:
        for _ in range(STEPS):
            await asyncio.sleep(self.random.choice((0.001, 0.01, 0.1, 1.0)))
            action = self.random.choices(
                (
                    self.write,
                    self.cut,
                    self.kill,
                    self.move_leader,
                    self.stop_broker,
                    self.start_brokers,
                    self.trouble,
                    self.forget_producers,
                    self.uncommitted,
                    self.add_topic,
                    self.add_partitions,
                    self.clean,
                    self.delete_head,
                    self.change_policy,
                ),
                (60, 6, 3, 8, 3, 6, 6, 3, 6, 2, 2, 6, 3, 3),
            )[0]
            done = action()
            if done is not None:
                await done
            self.check()

    def check(self) -> None:
        for name, topic in self.replicas.b.found.items():
            if name.startswith("remote-"):
                for index in range(len(topic.partitions)):
                    self.replicas.check(name, index)

    def calm(self) -> None:
        self.start_brokers()
        for cluster in (self.replicas.a, self.replicas.b):
            calm(cluster)
        for control in self.replicas.controls.values():
            control.trouble = 0.0


def calm(cluster: FakeCluster) -> None:
    cluster.trouble = 0.0
    for topic in cluster.found.values():
        for partition in topic.partitions:
            partition.lag = 0
            grew, partition.grew = partition.grew, asyncio.Event()
            grew.set()


async def simulate(seed: int) -> None:
    replicas = Replicas(random.Random(seed))
    storm = Storm(replicas)
    storm.add_topic()
    replicas.start()
    await replicas.connect()
    await storm.blow()
    storm.calm()
    await replicas.connect()
    await replicas.until("the follower has everything", replicas.equal)
    storm.check()
    await replicas.until("the follower starts where the source does", replicas.trimmed)
    compare_ends(replicas)
    await replicas.until(
        "every stream follows",
        lambda: all(
            stream.reason is None and not stream.closed and not stream.lag
            for stream in replicas.ends["B"].follower.streams()
        ),
    )
    await replicas.stop()


def compare_ends(replicas: Replicas) -> None:
    """What read_committed consumers see is the same, and the logs' limits are."""
    for name, topic in replicas.a.found.items():
        for index, source in enumerate(topic.partitions if name.startswith("local-") else ()):
            target = replicas.b.partition("remote-" + name.removeprefix("local-"), index)
            if not any(0 <= each.transaction_start < source.start for each in source.producers.values()):
                # An open transaction of which all records were deleted is none at the target.
                assert target.last_stable_offset == source.last_stable_offset, (
                    f"{name}-{index}\n{source.describe()}\n{target.describe()}"
                )
            if not (source.compacted or source.cleaned or target.cleaned):
                assert target.start == source.start, f"{name}-{index}"
                stable = source.records(committed=True)
                seen = target.records(committed=True)
                assert {each: seen[each] for each in seen if each < source.last_stable_offset} == stable, (
                    f"{name}-{index}\n{source.describe()}\n{target.describe()}"
                )


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_follower_is_a_prefix_of_the_source_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_simulated(simulate(seed))


def test_a_burst_of_which_the_first_batches_are_lost_while_the_leader_moves_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are still on their way to the same broker: they must not land where the lost ones were."""

    async def run() -> None:
        replicas = Replicas(random.Random(1), 2)
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"first")
        replicas.start()
        await replicas.connect()
        await replicas.until("the stamp is known", replicas.equal)
        target = replicas.b.partition("remote-t")
        check = target.on_append
        lost: list[int] = []

        def lose() -> None:
            lost.append(target.lag)
            leader = target.leader
            target.move(3 - leader, lossy=True)
            target.move(leader)

        def appended(partition: Partition) -> None:
            check(partition)
            if partition.end == 4 and not lost:
                asyncio.get_running_loop().call_soon(lose)

        target.on_append = appended
        for number in range(8):
            source.write_values(b"%d" % number)
        await replicas.until("it is copied", replicas.equal)
        assert lost[0] > 0
        assert replicas.b.bursts >= 2
        replicas.check("remote-t", 0)
        await replicas.stop()

    run_simulated(run())


def test_a_transaction_that_was_aborted_while_the_link_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last record is the follower's last, encoded again: it is the source's, though no marker says so here."""

    async def run() -> None:
        replicas = Replicas(random.Random(1), 1)
        configs = {"message.timestamp.type": "LogAppendTime"}
        source = replicas.a.add_topic("local-t", configs=configs).partitions[0]
        begun = batch(0, [b"x"], producer_id=9, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT)
        assert source.produce(begun)[0] == 0
        replicas.start()
        await replicas.connect()
        await replicas.until("the open transaction is copied", replicas.equal)
        await replicas.stop()
        assert source.mark(TransactionMarkers("", 0, 9, 0, False, 0)) == 0
        replicas.start()
        await replicas.connect()
        await replicas.until("its end is copied", replicas.equal)
        await replicas.stop()
        assert replicas.b.partition("remote-t").records(committed=True) == {}

    run_simulated(run())


def test_a_last_batch_that_the_cleaner_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower has its records: the source has an empty batch, since it is its producer's last one."""

    async def run() -> None:
        replicas = Replicas(random.Random(1), 1)
        source = replicas.a.add_topic("local-t", configs={"cleanup.policy": "compact"}).partitions[0]
        assert source.produce(batch(0, [b"old"], keys=[b"k"], producer_id=9, producer_epoch=0, base_sequence=0))[0] == 0
        replicas.start()
        await replicas.connect()
        await replicas.until("it is copied", replicas.equal)
        await replicas.stop()
        for _ in range(2):
            source.write_values(b"new", keys=[b"k"])
        source.compact(source.end, drop_tombstones=False)
        assert [header.record_count for header in source.headers] == [0, 1, 1]
        replicas.start()
        await replicas.connect()
        await replicas.until("it goes on", replicas.equal)
        assert not replicas.ends["A"].leader.stopped
        await replicas.stop()

    run_simulated(run())


def test_an_abort_marker_that_the_cleaner_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the link was away for longer than ``delete.retention.ms``: the next marker belongs to other records."""

    def transact(source: Partition, sequence: int, key: bytes) -> None:
        header = {"producer_id": 9, "producer_epoch": 0, "base_sequence": sequence, "attributes": TRANSACTIONAL_BIT}
        assert source.produce(batch(0, [b"value"], keys=[key], **header))[0] == 0

    async def run() -> None:
        replicas = Replicas(random.Random(1), 1)
        source = replicas.a.add_topic("local-t", configs={"cleanup.policy": "compact"}).partitions[0]
        transact(source, 0, b"aborted")
        replicas.start()
        await replicas.connect()
        await replicas.until("the open transaction is copied", replicas.equal)
        await replicas.stop()
        assert source.mark(TransactionMarkers("", 0, 9, 0, False, 0)) == 0
        transact(source, 1, b"committed")
        source.compact(source.end, drop_tombstones=True)
        assert source.mark(TransactionMarkers("", 0, 9, 0, True, 0)) == 0
        assert [header.base_offset for header in source.headers] == [2, 3]
        replicas.start()
        await replicas.connect()
        await replicas.until("everything is copied", replicas.equal)
        target = replicas.b.partition("remote-t")
        committed = [record.key for record in target.records(committed=True).values()]
        await replicas.stop()
        assert committed == [b"committed"]

    run_simulated(run())


def test_a_log_that_starts_within_an_open_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is open begins where the log does, in the middle of its batch; of a compacted topic it was taken for ended,
    and read again and again."""

    async def run() -> None:
        replicas = Replicas(random.Random(1), 1)
        source = replicas.a.add_topic("local-t", configs={"cleanup.policy": "compact,delete"}).partitions[0]
        values = [b"a", b"b", b"c"]
        begun = {"producer_id": 9, "producer_epoch": 0, "base_sequence": 0, "attributes": TRANSACTIONAL_BIT}
        assert source.produce(batch(0, values, keys=values, **begun))[0] == 0
        source.write_values(b"d", keys=[b"d"])
        assert source.delete_records(1) == (0, 1)
        assert source.last_stable_offset == 1
        replicas.start()
        await replicas.connect()
        await replicas.until("it is copied", replicas.equal)
        assert source.mark(TransactionMarkers("", 0, 9, 0, True, 0)) == 0
        await replicas.until("its end is copied", replicas.equal)
        replicas.check("remote-t", 0)
        await replicas.stop()

    run_simulated(run())


def test_a_batch_that_the_source_has_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its broker had forgotten the producer in between, and the follower's has not."""

    async def run() -> None:
        replicas = Replicas(random.Random(1), 1)
        source = replicas.a.add_topic("local-t").partitions[0]
        sent = batch(0, [b"x", b"y"], producer_id=9, producer_epoch=0, base_sequence=0)
        assert source.produce(sent)[0] == 0
        source.producers.clear()
        assert source.produce(sent)[0] == 0
        source.write_values(b"plain")
        assert source.produce(batch(0, [b"z"], producer_id=9, producer_epoch=0, base_sequence=2))[0] == 0
        assert source.end == 6
        replicas.start()
        await replicas.connect()
        await replicas.until("it is copied", replicas.equal)
        replicas.check("remote-t", 0)
        await replicas.stop()

    run_simulated(run())
