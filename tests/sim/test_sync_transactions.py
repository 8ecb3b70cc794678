"""Transactions over a synchronous link, simulated: at any moment the source may be gone for good.

Then what the other side has is looked at as a failover would: what is open there is committed where the store has its
decision, and aborted else. No commit that was acked is missing or in part there, and no transaction is torn.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, run_simulated, simulated_now
from support.partition_log import Partition, batch
from support.replicas import INDEX, LINK, LINK_ID, End, Replicas
from support.seeds import quarters, seeds
from support.transaction_state import state_batch, state_key, state_value

from isthmus_control.commands import AlterLink, CreateNamespace, DetachNamespace
from isthmus_control.model import LinkMode, ResourceType
from isthmus_plugins.api import Gate
from isthmus_plugins.cluster import TransactionMarkers
from isthmus_plugins.replication.in_doubt.store import TOPIC as STORE
from isthmus_plugins.replication.in_doubt.store import PlaceDecision, Stored, merged
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.transactions.sender import CALL_MAX
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import build_request, decode_response, encode_request, encode_response
from isthmus_protocol.produce_answers import Writes
from isthmus_protocol.producer_ids import carry
from isthmus_protocol.record_codec import Marker, decode_control, decode_records
from isthmus_protocol.records import TRANSACTIONAL_BIT
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, Transaction, TransactionState, partition_of

TOPIC, REMOTE = "local-t", "remote-t"
PARTITIONS = 2
STATE_PARTITIONS = 2
PRODUCE_VERSION, END_TXN_VERSION = 9, 4


@dataclass
class Done:
    """A transaction that was decided, or given up."""

    number: int
    written: set[int] = field(default_factory=set)
    """Partitions with a record of it."""
    committed: bool = False
    """Decided to commit."""
    guarded: bool = False
    """All of its partitions were In-Sync when that was decided."""
    kills: int = 0
    """How often the source's proxy had been killed by then."""
    acked: bool = False
    acked_at: float = 0.0
    at: tuple[int, int] = (-1, -1)
    """Where the decision stands."""


class Scene:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.replicas = Replicas(self.random, brokers=1)
        self.partitions = self.replicas.a.add_topic(TOPIC, PARTITIONS).partitions
        self.state = self.replicas.a.add_topic(TRANSACTION_TOPIC, STATE_PARTITIONS).partitions
        self.tasks = Tasks("sources", Supervision())
        self.done: list[Done] = []
        self.numbers = 0
        self.empty = self.random.choice((0.05, 0.4))
        """How often a transaction lists a partition in which it has nothing."""
        self.given_up = self.random.choice((0.2, 0.5))
        self.kills = 0
        self.violations: list[str] = []

    @property
    def a(self) -> End | None:
        return self.replicas.ends.get("A")

    def in_sync(self) -> bool:
        keys = [LinkPartition(LINK, TOPIC, partition) for partition in range(PARTITIONS)]
        return self.a is not None and all(self.a.sync_confirmer.partitions.in_sync(key) for key in keys)

    async def answered(self, ask: Any) -> bytes:
        """What a client gets in the end: it asks again when the proxy dies."""
        while True:
            end = self.a
            if end is None:
                await asyncio.sleep(0.05)
                continue
            found = ask(end)
            if not isinstance(found, Gate):
                return bytes(found)
            while True:
                if found._frame is not None:
                    return found._frame
                if self.a is not end:
                    break
                await asyncio.sleep(0.005)

    async def fault(self) -> None:
        what = self.random.choice(
            ("cut", "kill A", "kill B", "stuck", "trouble", "lease", "leader", "leader", "nothing")
        )
        if what == "cut":
            self.replicas.cut()
        elif what == "kill A":
            self.kills += 1
            await self.replicas.stop("A")
            await asyncio.sleep(self.random.choice((0.01, 3.0)))
            self.replicas.start("A")
        elif what == "kill B":
            await self.replicas.stop("B")
            await asyncio.sleep(self.random.choice((0.01, 3.0)))
            self.replicas.start("B")
            self.slow_down()
        elif what == "stuck":
            self.replicas.b.down ^= {1}
        elif what == "lease":  # B's proxy was paused, and takes nothing until it has a lease again
            context = self.replicas.ends["B"].context
            context.lease_deadline = float("-inf")
            later = self.random.choice((0.3, 3.0, 12.0))
            asyncio.get_running_loop().call_later(later, setattr, context, "lease_deadline", float("inf"))
        elif what == "leader":
            self.lose_leader(self.random.choice((0.5, 3.0, 9.0)))
        elif what == "trouble":
            self.replicas.b.trouble = self.random.choice((0.0, 0.1))

    def lose_leader(self, lasts_s: float) -> None:
        """A partition, of the transaction log or of those that transactions are written to, has no leader for a
        while: its broker died."""
        partition = self.random.choice((*self.partitions, *self.partitions, *self.state))
        if partition.leader >= 0:
            before = partition.leader
            partition.move(-1)
            asyncio.get_running_loop().call_later(lasts_s, partition.move, before)

    async def begin(self) -> None:
        replicas = self.replicas
        replicas.start()
        self.slow_down()
        await replicas.connect()
        await replicas.until("copied", replicas.equal)

    async def synchronous(self) -> None:
        self.replicas.controls["A"].apply(AlterLink(LINK, mode=LinkMode.SYNCHRONOUS))
        await self.replicas.until("In-Sync", self.in_sync)

    async def run(self) -> None:
        replicas = self.replicas
        await self.begin()
        for index, partition in enumerate(replicas.b.found[REMOTE].partitions):
            self.look_at_markers(index, partition)
        apps = [App(self, number) for number in range(3)]
        for app in apps:
            self.tasks.start(f"app-{app.producer_id}", app.run())
        await asyncio.sleep(self.random.uniform(0, 1))
        await self.synchronous()
        for _ in range(self.random.randint(0, 4)):
            await asyncio.sleep(self.random.uniform(0, self.random.choice((0.1, 2.0, 15.0))))
            await self.fault()
            if self.replicas.wire is None or not self.replicas.wire.open:
                await asyncio.sleep(self.random.choice((0.0, 1.0)))
                await self.replicas.connect()
            if self.random.random() < 0.5:
                replicas.b.down.clear()
        await asyncio.sleep(self.random.uniform(0, self.random.choice((0.05, 1.0, 10.0))))
        if self.random.random() < 0.4:  # it dies in steps
            for _ in range(self.random.choice((1, 1, 2, 3))):
                self.lose_leader(60.0)
                await asyncio.sleep(self.random.uniform(0, self.random.choice((0.3, 6.0))))
        await self.end()

    async def end(self) -> None:
        replicas = self.replicas
        # The source is gone, between any two events.
        await self.tasks.close()
        replicas.cut()
        await replicas.stop("A")
        replicas.b.down.clear()
        replicas.b.trouble = 0.0
        replicas.ends["B"].context.lease_deadline = float("inf")
        await asyncio.sleep(30)  # what is on the way at the other side lands
        await self.look(await replicas.ends["B"].store.read(LINK_ID))
        await replicas.stop("B")

    def slow_down(self) -> None:
        """Have the store take longer than appends to followers, now and then."""
        store = self.replicas.ends["B"].store
        append = store._appended

        async def later(taken: Any) -> bool:
            await asyncio.sleep(self.random.choice((0.0, 0.0, 0.1)))
            return await append(taken)

        store._appended = later  # type: ignore[method-assign]

    def look_at_markers(self, index: int, partition: Partition) -> None:
        """Whenever the other side writes a commit marker, its store has the decision."""
        before, begun = partition.on_append, dict[int, list[bytes]]()

        def appended(target: Partition) -> None:
            before(target)
            header, data = target.headers[-1], target.log[-1]
            if not header.is_control:
                if header.is_transactional:
                    begun.setdefault(header.producer_id, []).extend(each.value or b"" for each in decode_records(data))
                return
            values = begun.pop(header.producer_id, [])
            if decode_control(data).marker is not Marker.COMMIT:
                return
            source_id = carry(header.producer_id, INDEX["B"], INDEX["A"])
            for done in self.done:
                if b"%d" % done.number in values and done.guarded:
                    known = self.durable().get((source_id, REMOTE, index))
                    if known is None or known.identity[::2] < done.at:
                        self.violations.append(f"{done}: the marker in {index} came before the decision, {known}")

        partition.on_append = appended

    def durable(self) -> Mapping[tuple[int, str, int], PlaceDecision]:
        """What is stored, as far as it is replicated."""
        store = self.replicas.b.found[STORE].partitions[0]
        latest: dict[tuple[Any, ...], Any] = {}
        for header, data in zip(store.headers, store.log, strict=True):
            if header.next_offset <= store.high_watermark:
                for record in decode_records(data):
                    latest[tuple(json.loads(record.key or b""))] = json.loads(record.value or b"{}")
        return merged(latest.items()).decisions

    async def look(self, stored: Stored) -> None:
        assert not self.violations, self.violations[0]
        target = self.replicas.b.found[REMOTE].partitions
        outcomes = [outcome_of(partition, index, stored) for index, partition in enumerate(target)]
        told = [f"{index}: {each}" for index, each in enumerate(outcomes)]
        for done in self.done:
            value = b"%d" % done.number
            there = {index for index in done.written if outcomes[index].get(value) is True}
            if done.acked and done.guarded:
                assert there == done.written, f"{done} was acked, and is committed in {there}\n{told}"
            if done.guarded:
                assert there in (set(), done.written), f"{done} is torn: committed in {there} only\n{told}"
            if not done.committed:
                assert not there, f"{done} was not committed, and is in {there}\n{told}"


def outcome_of(partition: Partition, index: int, stored: Stored, ids: int = INDEX["B"]) -> dict[bytes, bool]:
    """By value of a record: whether it counts after a failover. ``ids``: the follower's own producer ids' index."""
    found: dict[bytes, bool] = {}
    begun: dict[int, list[bytes]] = {}
    for header, data in zip(partition.headers, partition.log, strict=True):
        if header.is_control:
            committed = decode_control(data).marker is Marker.COMMIT
            found.update(dict.fromkeys(begun.pop(header.producer_id, ()), committed))
        elif header.is_transactional:
            begun.setdefault(header.producer_id, []).extend(record.value or b"" for record in decode_records(data))
    for producer_id, values in begun.items():
        known, source_id = partition.producers[producer_id], carry(producer_id, ids, INDEX["A"])
        decision = stored.commits(source_id, known.epoch, (REMOTE, index), known.transaction_start)
        found.update(dict.fromkeys(values, decision is not None))
    return found


class App:
    """An application with its transactional id, and the coordinator's part for that."""

    def __init__(self, scene: Scene, number: int) -> None:
        self.scene = scene
        self.random = scene.random
        self.transactional_id = f"app-{number}"
        self.producer_id = 100 + number
        self.raises_epoch = number % 2 == 1
        """As clients of KIP-890 have it."""
        self.epoch = 0
        self.sequences: dict[int, tuple[int, int]] = {}
        self.state = scene.state[partition_of(self.transactional_id, STATE_PARTITIONS)]
        self.also: tuple[tuple[str, int], ...] = ()
        """Other partitions that its transactions list, and in which they have nothing."""

    async def led(self, partition: Partition) -> None:
        """Return when a partition has a leader."""
        leader = partition.leader
        while leader < 0:
            await asyncio.sleep(0.05)
            leader = partition.leader

    def record(self, state: TransactionState, partitions: set[int]) -> None:
        places = tuple((TOPIC, index) for index in sorted(partitions))
        places += self.also if partitions else ()
        client_version = 2 if self.raises_epoch else 1
        value = state_value(Transaction(self.producer_id, self.epoch, state, places, client_version))
        self.state.write(state_batch(self.state.end, [(state_key(self.transactional_id), value)]))

    async def run(self) -> None:
        while True:
            await self.transact()
            await asyncio.sleep(self.random.choice((0.0, 0.01, 0.3)))

    async def transact(self) -> None:
        self.scene.numbers += 1
        done = Done(self.scene.numbers)
        self.scene.done.append(done)
        partitions = set(self.random.sample(range(PARTITIONS), self.random.randint(1, PARTITIONS)))
        await self.led(self.state)
        self.record(TransactionState.ONGOING, partitions)
        acked = [await self.write(done, index) for index in partitions if self.random.random() >= self.scene.empty]
        await asyncio.sleep(self.random.choice((0.0, 0.005, 0.1)))
        if all(acked) and self.random.random() >= self.scene.given_up:
            await self.commit(done, partitions)
        else:
            await self.end(partitions, False)
        if self.random.random() < 0.1:  # another process of the application
            self.epoch += 1

    async def write(self, done: Done, index: int) -> bool:
        """One record; whether it was acked."""
        partition = self.scene.partitions[index]
        if partition.leader < 0:
            return False
        epoch, sequence = self.sequences.get(index, (-1, 0))
        sequence = sequence if epoch == self.epoch else 0
        self.sequences[index] = self.epoch, sequence + 1
        data = batch(
            0,
            [b"%d" % done.number],
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=sequence,
            attributes=TRANSACTIONAL_BIT,
        )
        code, base = partition.produce(data)
        assert code == 0, code
        done.written.add(index)
        for _ in range(3):
            frame = await self.scene.answered(lambda end, base=base: self._produced(end, index, base))
            _, answer = decode_response(ApiKey.PRODUCE, PRODUCE_VERSION, frame)
            found: Any = answer
            if not found.responses[0].partition_responses[0].error_code:
                return True
        return False

    def _produced(self, end: End, index: int, base: int) -> Any:
        entry = {"index": index, "error_code": 0, "base_offset": base}
        answer = {"responses": [{"name": TOPIC, "partition_responses": [entry]}]}
        frame = encode_response(build(schema.response_type(ApiKey.PRODUCE, PRODUCE_VERSION), answer), 1)
        written = Writes(-1, True, 20_000, {(TOPIC.encode(), index): 1})
        return end.acks.hold(-1, PRODUCE_VERSION, written, {TOPIC.encode(): TOPIC}, simulated_now(), frame)

    async def commit(self, done: Done, partitions: set[int]) -> None:
        await self.led(self.state)
        done.guarded, done.kills = self.scene.in_sync(), self.scene.kills
        done.committed = True
        done.at = partition_of(self.transactional_id, STATE_PARTITIONS), self.state.end
        self.epoch += self.raises_epoch
        self.record(TransactionState.PREPARE_COMMIT, partitions)
        completing = self.scene.tasks.start("complete", self.complete(partitions, True))
        for _ in range(100):
            frame = await self.scene.answered(self._end_txn)
            _, answer = decode_response(ApiKey.END_TXN, END_TXN_VERSION, frame)
            found: Any = answer
            if not found.error_code:
                done.acked, done.acked_at = True, simulated_now()
                break
            assert found.error_code == 14
            await completing
        await completing

    def _end_txn(self, end: End) -> Any:
        asked = {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
            "committed": True,
        }
        request = encode_request(build_request(ApiKey.END_TXN, END_TXN_VERSION, asked), 1, "app")
        frame = encode_response(build(schema.response_type(ApiKey.END_TXN, END_TXN_VERSION), {}), 1)
        return end.decisions.end_txn.answered(END_TXN_VERSION, self.transactional_id, request, frame)

    async def end(self, partitions: set[int], committed: bool) -> None:
        await self.led(self.state)
        self.epoch += self.raises_epoch
        prepare = TransactionState.PREPARE_COMMIT if committed else TransactionState.PREPARE_ABORT
        self.record(prepare, partitions)
        await self.complete(partitions, committed)

    async def complete(self, partitions: set[int], committed: bool) -> None:
        """Write the markers, some late and some twice."""
        epoch = self.epoch
        for index in sorted(partitions, key=lambda index: self.random.random()):
            await asyncio.sleep(self.random.choice((0.0, 0.002, 0.1)))
            marker = TransactionMarkers(TOPIC, index, self.producer_id, epoch, committed, 0)
            await self.led(self.scene.partitions[index])
            for _ in range(1 if self.random.random() < 0.97 else 2):
                assert self.scene.partitions[index].mark(marker) == 0
        await asyncio.sleep(self.random.choice((0.0, 0.002, 0.1)))
        await self.led(self.state)
        self.record(TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT, set())


@pytest.mark.parametrize("seed", seeds(12))
def test_no_acked_commit_is_missing_and_none_is_torn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_simulated(Scene(seed).run())


@pytest.mark.parametrize("lasts_s", [0.2, None])
@pytest.mark.parametrize("seed", quarters(range(3)))
def test_what_was_aborted_is_not_committed_by_the_next_transaction(
    seed: int, lasts_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer uses one epoch; the next transaction has nothing in the partition whose follower lacks the abort."""

    async def main(scene: Scene) -> None:
        await scene.begin()
        await scene.synchronous()
        app = App(scene, 0)
        aborted, committed = Done(1), Done(2)
        scene.done += [aborted, committed]
        app.record(TransactionState.ONGOING, {0})
        assert await app.write(aborted, 0)
        assert scene.a is not None
        stream = scene.a.leader.stream(LinkPartition(LINK, TOPIC, 0))
        assert stream is not None
        stream.doubting = True  # it reads no further, once what is under way has come back
        await asyncio.sleep(3)
        await app.end({0}, False)
        app.record(TransactionState.ONGOING, {0, 1})
        assert await app.write(committed, 1)
        committing = scene.tasks.start("commit", app.commit(committed, {0, 1}))
        await asyncio.sleep(lasts_s or 0.9)
        assert not committed.acked
        if lasts_s is not None:
            stream.doubting = False
            scene.a.leader.resume_tails(LINK)
            await committing
            assert committed.acked
            assert scene.in_sync()
        await scene.end()

    run_simulated(main(Scene(seed)))


@pytest.mark.parametrize("number", [0, 1])
def test_what_was_decided_before_a_start_is_told_before_its_markers(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy is killed before it sends a decision, and its cluster dies when one partition has the marker."""

    async def main(scene: Scene) -> None:
        await scene.begin()
        await scene.synchronous()
        app, done = App(scene, number), Done(1)
        scene.done.append(done)
        app.record(TransactionState.ONGOING, {0, 1})
        assert await app.write(done, 0)
        assert await app.write(done, 1)
        await scene.replicas.stop("A")
        done.committed = done.guarded = True
        await app.end({0, 1}, True)
        opened = LeaderStream.opened

        def opened_one(stream: LeaderStream, end: int) -> None:
            opened(stream, end)
            stream.doubting = stream.key.partition == 1  # it reads nothing

        monkeypatch.setattr(LeaderStream, "opened", opened_one)
        scene.replicas.start("A")
        await scene.replicas.connect()
        target = scene.replicas.b.found[REMOTE].partitions
        await scene.replicas.until("one marker is there", lambda: target[0].end == scene.partitions[0].end)
        assert target[1].end < scene.partitions[1].end
        await scene.end()

    run_simulated(main(Scene(7)))


@pytest.mark.parametrize("number", [0, 1])
def test_what_was_decided_before_each_of_several_starts_is_told(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application was started again each time, and its transactions list other partitions."""

    async def main(scene: Scene) -> None:
        await scene.begin()
        await scene.synchronous()
        app = App(scene, number)
        still = {0, 1}
        opened = LeaderStream.opened

        def opened_some(stream: LeaderStream, end: int) -> None:
            opened(stream, end)
            stream.doubting = stream.key.partition in still  # it reads nothing

        monkeypatch.setattr(LeaderStream, "opened", opened_some)
        for places in ({0, 1}, {0}, {0}):
            done = Done(len(scene.done))
            scene.done.append(done)
            app.record(TransactionState.ONGOING, places)
            for index in places:
                scene.partitions[index].produce(
                    batch(
                        0,
                        [b"%d" % done.number],
                        producer_id=app.producer_id,
                        producer_epoch=app.epoch,
                        base_sequence=0,
                        attributes=TRANSACTIONAL_BIT,
                    )
                )
                done.written.add(index)
            await scene.replicas.until("all is there", scene.replicas.equal) if done.number == 0 else None
            await scene.replicas.stop("A")
            done.committed = done.guarded = True
            await app.end(places, True)
            app.epoch += 1  # by InitProducerId, as it begins anew: it was not told that this is decided
            scene.replicas.start("A")
            await scene.replicas.connect()
            await asyncio.sleep(3)
        still.remove(0)
        await scene.replicas.stop("A")
        scene.replicas.start("A")
        await scene.replicas.connect()
        target = scene.replicas.b.found[REMOTE].partitions
        await scene.replicas.until("the markers are there", lambda: target[0].end == scene.partitions[0].end)
        assert target[1].end < scene.partitions[1].end
        await scene.end()

    run_simulated(main(Scene(7)))


def test_of_many_decisions_some_go_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(scene: Scene) -> None:
        await scene.begin()
        await scene.synchronous()
        sizes: list[int] = []

        def decided(connection: Any, question: calls.Decide) -> Any:
            sizes.append(len(question.decisions))
            return decide.handler(connection, question)

        decide = scene.replicas.ends["B"].instead(calls.Decide, decided)
        apps = [App(scene, number) for number in range(3 * CALL_MAX)]
        for app in apps:
            app.record(TransactionState.PREPARE_COMMIT, {0})
        await scene.replicas.until("all are told", lambda: sum(sizes) >= len(apps))
        assert max(sizes) == CALL_MAX
        assert scene.a is not None
        a = scene.a
        await scene.replicas.until("all are there", lambda: not a.decisions._pending)
        await scene.end()

    run_simulated(main(Scene(1)))


def test_a_commit_that_lists_a_deleted_topic_is_acked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the next ones of its transactional id, and without asking all the time."""

    async def main(scene: Scene) -> None:
        other = "local-deleted"
        scene.replicas.a.add_topic(other)
        await scene.begin()
        await scene.synchronous()
        assert scene.a is not None
        in_sync = scene.a.sync_confirmer.partitions.in_sync
        await scene.replicas.until("In-Sync", lambda: in_sync(LinkPartition(LINK, other, 0)))
        app = App(scene, 0)
        app.also = ((other, 0),)
        for number in range(6):
            done = Done(number)
            scene.done.append(done)
            app.record(TransactionState.ONGOING, {0})
            assert await app.write(done, 0)
            if number == 3:
                scene.replicas.a.found[other].partitions[0].write_values(b"of nobody")
                await app.end({0}, False)
                scene.replicas.a.found.pop(other)
                await asyncio.sleep(number)
                continue
            requests = scene.replicas.a.requests + scene.replicas.b.requests
            async with asyncio.timeout(2):
                await app.commit(done, {0})
            assert done.acked
            assert scene.replicas.a.requests + scene.replicas.b.requests < requests + 300
        assert scene.in_sync()
        await scene.end()

    run_simulated(main(Scene(3)))


def test_commits_go_on_while_namespaces_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers with one epoch for all their transactions, over the same partitions."""

    async def main(scene: Scene) -> None:
        scene.given_up = 0.2
        await scene.begin()
        await scene.synchronous()
        for number in range(0, 40, 2):
            scene.tasks.start(f"app-{number}", App(scene, number).run())
        await asyncio.sleep(1)
        for number in range(100):
            await asyncio.sleep(0.1)
            name = f"other-{number}"
            scene.replicas.controls["A"].apply(CreateNamespace(ResourceType.TOPIC, name, True, "a test"))
            assert scene.in_sync()
        assert sum(done.acked for done in scene.done) > 200
        await scene.end()

    run_simulated(main(Scene(3)))


def test_a_partition_without_a_leader_keeps_only_its_own_transactions_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    log_ends = FakeCluster.log_ends

    async def main(scene: Scene) -> None:
        await scene.begin()
        await scene.synchronous()
        there, not_there = App(scene, 0), App(scene, 2)
        waiting = Done(99, committed=True)
        scene.done.append(waiting)

        async def log_ends_but_one(cluster: FakeCluster, places: Any) -> Mapping[tuple[str, int], int]:
            if (TOPIC, 1) in places:
                await asyncio.sleep(10)
            return await log_ends(cluster, [place for place in places if place != (TOPIC, 1)])

        monkeypatch.setattr(FakeCluster, "log_ends", log_ends_but_one)
        not_there.record(TransactionState.ONGOING, {1})
        for number in range(10):
            done = Done(number)
            scene.done.append(done)
            there.record(TransactionState.ONGOING, {0})
            assert await there.write(done, 0)
            if number == 0:  # both decisions are read at once
                committing = scene.tasks.start("commit", not_there.commit(waiting, {1}))
            async with asyncio.timeout(0.8):
                await there.commit(done, {0})
            assert done.acked
        assert not waiting.acked
        monkeypatch.setattr(FakeCluster, "log_ends", log_ends)
        await committing
        assert waiting.acked
        await scene.end()

    run_simulated(main(Scene(3)))


def test_a_decision_about_a_partition_that_was_detached_waits_for_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side may still say In-Sync, and has no decision."""

    async def main(scene: Scene) -> None:
        await scene.begin()
        await scene.synchronous()
        app, done = App(scene, 0), Done(1)
        app.record(TransactionState.ONGOING, {0})
        assert await app.write(done, 0)
        b = scene.replicas.ends["B"]
        told = list[int]()

        async def decided(connection: Any, question: calls.Decide) -> Any:
            told.append(len(question.decisions[0].places))
            return await (decide.handler(connection, question) if len(told) > 1 else asyncio.sleep(60))

        decide = b.instead(calls.Decide, decided)
        await scene.replicas.until("leased", lambda: b.sync_leases.in_sync(REMOTE, 0))
        scene.tasks.start("commit", app.commit(done, {0}))
        await scene.replicas.until("told", lambda: bool(told))
        scene.replicas.controls["A"].apply(DetachNamespace(LINK, ResourceType.TOPIC, "local-"))
        await scene.replicas.connect()
        early = False
        while b.sync_leases.in_sync(REMOTE, 0):
            early = early or done.acked
            await asyncio.sleep(0.02)
        await scene.replicas.until("acked", lambda: done.acked)
        await scene.tasks.close()
        await scene.replicas.stop()
        assert not early

    run_simulated(main(Scene(1)))
