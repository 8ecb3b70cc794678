"""Committed offsets that transactions commit over a synchronous link, simulated: at any moment the source may be gone.

Some applications commit in groups that the link leads, some in others, in the same partition of the offsets topic. What
was acked of the first is at the other side then, in its coordinator or, decided, in its store. The others wait for
nobody.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import pytest
from support.fake_cluster import run_simulated, simulated_now
from support.offsets import commit, group_made, marker_batch, offsets_batch
from support.partition_log import batch
from support.replicas import LINK, LINK_ID, End, Replicas
from support.seeds import quarters, seeds
from support.transaction_state import state_batch, state_key, state_value

from isthmus_control.commands import AlterLink
from isthmus_control.model import LinkMode, SyncState
from isthmus_plugins.api import Client, Gate, Hold, Replace, Request
from isthmus_plugins.replication.in_doubt.pending_offsets import committed_offsets
from isthmus_plugins.replication.in_doubt.store import DECISION
from isthmus_plugins.replication.in_doubt.store import TOPIC as STORE
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.transactions.sender import DecisionSender
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import build_request, decode_response, encode_request, encode_response
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.record_codec import Marker, decode_records
from isthmus_protocol.records import TRANSACTIONAL_BIT
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, Transaction, TransactionState, partition_of

STATE_PARTITIONS = 2
TXN_OFFSET_COMMIT_VERSION, END_TXN_VERSION = 3, 4
RECORDS = 2000
PLACE = (OFFSETS_TOPIC, 0)
FAR = ("remote-t", 0)
COORDINATOR_LOAD_IN_PROGRESS = 14


@dataclass
class Done:
    """A transaction that was decided."""

    group: str
    offset: int
    acked: bool = False
    took_s: float = 0.0


class Scene:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.replicas = Replicas(self.random, brokers=1)
        self.replicas.attach_groups()
        self.replicas.a.add_topic("local-t").partitions[0].write_values(*[b"x"] * RECORDS)
        self.offsets = self.replicas.a.add_topic(OFFSETS_TOPIC).partitions[0]
        self.state = self.replicas.a.add_topic(TRANSACTION_TOPIC, STATE_PARTITIONS).partitions
        self.failed: list[BaseException] = []
        self.tasks = Tasks("sources", Supervision(), lambda name, error: self.failed.append(error))
        self.done: list[Done] = []
        self.decided: dict[str, int] = {}
        """By group: the furthest committed offset that was decided."""

    @property
    def a(self) -> End | None:
        return self.replicas.ends.get("A")

    def in_sync(self) -> bool:
        return self.a is not None and self.a.sync_confirmer.partitions.in_sync(LinkPartition(LINK, *PLACE))

    async def answered(self, ask: Any) -> bytes:
        """What a client gets in the end: it asks again when the proxy dies."""
        while True:
            end = self.a
            found = await ask(end) if end is not None else None
            if isinstance(found, bytes):
                return found
            while found is not None and self.a is end:
                if found._frame is not None:
                    return bytes(found._frame)
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)

    async def fault(self) -> None:
        what = self.random.choice(("cut", "kill A", "kill B", "stuck", "slow", "leader", "nothing"))
        if what == "cut":
            self.replicas.cut()
        elif what.startswith("kill"):
            await self.replicas.stop(what[-1])
            await asyncio.sleep(self.random.choice((0.01, 3.0)))
            self.replicas.start(what[-1])
        elif what == "stuck":
            self.replicas.b.coordinator_trouble = self.random.choice((0.0, 0.3, 1.0))
        elif what == "slow":
            self.replicas.b.trouble = self.random.choice((0.0, 0.1))
        elif what == "leader":
            self.offsets.leader_epoch += 1

    async def begin(self, *groups: str) -> None:
        replicas = self.replicas
        replicas.start()
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        replicas.controls["A"].apply(AlterLink(LINK, mode=LinkMode.SYNCHRONOUS))
        await replicas.until("In-Sync", self.in_sync)
        for number, group in enumerate(groups):
            self.tasks.start(group, App(self, number, group).run())

    async def run(self) -> None:
        replicas = self.replicas
        await self.begin("app-1", "app-2", "other-1", "other-2")
        for _ in range(self.random.randint(0, 5)):
            await asyncio.sleep(self.random.uniform(0, self.random.choice((0.1, 2.0, 15.0))))
            await self.fault()
            await asyncio.sleep(self.random.choice((0.0, 1.0, 15.0)))
            if replicas.wire is None or not replicas.wire.open:
                await replicas.connect()
            if self.random.random() < 0.5:
                replicas.b.coordinator_trouble = replicas.b.trouble = 0.0
        await asyncio.sleep(self.random.uniform(0, self.random.choice((0.05, 1.0, 10.0))))
        await self.end()

    async def end(self) -> None:
        replicas = self.replicas
        # The source is gone, between any two events.
        await self.tasks.close()
        replicas.cut()
        await replicas.stop("A")
        replicas.b.coordinator_trouble = replicas.b.trouble = 0.0
        await asyncio.sleep(30)  # what is on the way at the other side lands
        assert not self.failed, self.failed
        stored = committed_offsets(await replicas.ends["B"].store.read(LINK_ID))
        for group in ("far-app-1", "far-app-2"):
            has = replicas.b.offsets.get(group, {}).get(FAR)
            decided = stored.get(group, {}).get(FAR)
            there = max(has.offset if has else 0, decided.offset if decided else 0)
            done = (each.offset for each in self.done if f"far-{each.group}" == group and each.acked)
            acked = max(done, default=0)
            assert acked <= there, f"{group}: {acked} was acked, {has} is there, {decided} is decided"
            assert there <= self.decided.get(group.removeprefix("far-"), 0), f"{group}: {there} was not committed"
        await replicas.stop("B")


class App:
    """An application that commits offsets in transactions, and its coordinators' part."""

    def __init__(self, scene: Scene, number: int, group: str) -> None:
        self.scene = scene
        self.random = scene.random
        self.group = group
        self.transactional_id = f"txn-{group}"
        self.producer_id = 100 + number
        self.raises_epoch = number % 2 == 1
        """As clients of KIP-890 have it."""
        self.epoch = 0
        self.offset = 0
        self.state = scene.state[partition_of(self.transactional_id, STATE_PARTITIONS)]

    def record(self, state: TransactionState, places: tuple[tuple[str, int], ...] = (PLACE,)) -> None:
        value = state_value(Transaction(self.producer_id, self.epoch, state, places, 2 if self.raises_epoch else 1))
        self.state.write(state_batch(self.state.end, [(state_key(self.transactional_id), value)]))

    async def run(self) -> None:
        while True:
            await self.transact()
            await asyncio.sleep(self.random.choice((0.0, 0.01, 0.3)))

    async def transact(self) -> None:
        self.record(TransactionState.ONGOING)
        acked = await self.commit_offset(self.offset + 1)
        await asyncio.sleep(self.random.choice((0.0, 0.005, 0.1)))
        if acked and self.random.random() < 0.8:
            self.offset += 1
            await self.commit()
        else:
            self.epoch += self.raises_epoch
            self.record(TransactionState.PREPARE_ABORT)
            await self.complete(Marker.ABORT)

    async def commit_offset(self, offset: int) -> bool:
        """TxnOffsetCommit; whether it was acked."""
        log, version = self.scene.offsets, TXN_OFFSET_COMMIT_VERSION
        entry = {"name": "local-t", "partitions": [{"partition_index": 0, "committed_offset": offset}]}
        asked = {"group_id": self.group, "producer_id": self.producer_id, "topics": [entry]}
        frame = encode_request(build(schema.request_type(ApiKey.TXN_OFFSET_COMMIT, version), asked), 1, "client")
        said = {"topics": [{"name": "local-t", "partitions": [{"partition_index": 0, "error_code": 0}]}]}
        answer = encode_response(build(schema.response_type(ApiKey.TXN_OFFSET_COMMIT, version), said), 1)

        async def ask(end: End) -> bytes | Gate:
            client = Client(1, "client", 1)
            request = Request(frame, True, ApiKey.TXN_OFFSET_COMMIT, version, 1, simulated_now(), client)
            verdict = end.sync_confirmer.commits.on_commit(request)
            if isinstance(verdict, Hold):
                verdict = await verdict.verdict
            records = [commit(self.group, "local-t", offset)]
            log.write(offsets_batch(log.end, records, self.producer_id, self.epoch))
            if isinstance(verdict, Replace) and verdict.on_response is not None:
                return verdict.on_response(answer)
            return answer

        if self.offset == 0:
            log.write(offsets_batch(log.end, [group_made(self.group)]))
        for _ in range(3):
            _, payload = decode_response(ApiKey.TXN_OFFSET_COMMIT, version, await self.scene.answered(ask))
            found: Any = payload
            code = int(found.topics[0].partitions[0].error_code)
            if not code:
                return True
            assert code == COORDINATOR_LOAD_IN_PROGRESS
        return False

    def decide(self) -> Done:
        self.scene.decided[self.group] = self.offset
        self.epoch += self.raises_epoch
        self.record(TransactionState.PREPARE_COMMIT)
        done = Done(self.group, self.offset)
        self.scene.done.append(done)
        return done

    async def commit(self) -> None:
        done = self.decide()
        completing = self.scene.tasks.start("complete", self.complete(Marker.COMMIT))
        await self.end_transaction(done, completing)
        await completing

    async def end_transaction(self, done: Done, completing: asyncio.Future[None]) -> None:
        """EndTxn, until it is acked."""
        began = simulated_now()
        request = encode_request(
            build_request(
                ApiKey.END_TXN,
                END_TXN_VERSION,
                {
                    "transactional_id": self.transactional_id,
                    "producer_id": self.producer_id,
                    "producer_epoch": self.epoch,
                    "committed": True,
                },
            ),
            1,
            "app",
        )
        frame = encode_response(build(schema.response_type(ApiKey.END_TXN, END_TXN_VERSION), {}), 1)

        async def ask(end: End) -> Any:
            return end.decisions.end_txn.answered(END_TXN_VERSION, self.transactional_id, request, frame)

        for _ in range(100):
            _, answer = decode_response(ApiKey.END_TXN, END_TXN_VERSION, await self.scene.answered(ask))
            found: Any = answer
            if not found.error_code:
                done.acked, done.took_s = True, simulated_now() - began
                break
            assert found.error_code == COORDINATOR_LOAD_IN_PROGRESS
            await completing

    async def complete(self, marker: Marker) -> None:
        log, epoch = self.scene.offsets, self.epoch
        await asyncio.sleep(self.random.choice((0.0, 0.002, 0.1)))
        log.write(marker_batch(log.end, self.producer_id, marker, epoch))
        await asyncio.sleep(self.random.choice((0.0, 0.002, 0.1)))
        ended = TransactionState.COMPLETE_COMMIT if marker is Marker.COMMIT else TransactionState.COMPLETE_ABORT
        self.record(ended, ())


@pytest.mark.parametrize("seed", seeds(12))
def test_committed_offsets_that_were_acked_are_there(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_simulated(Scene(seed).run())


@pytest.mark.parametrize("seed", quarters(range(4)))
def test_other_groups_wait_for_nobody(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side answers nothing, and is In-Sync until something has waited for it for long enough."""

    async def main(scene: Scene) -> None:
        await scene.begin("other-1", "other-2")
        await scene.replicas.until("they commit", lambda: len(scene.done) > 10)
        for question in (calls.Decide, calls.GroupOffsets):
            scene.replicas.ends["B"].instead(question, lambda connection, question: asyncio.sleep(60))
        before = len(scene.done)
        await asyncio.sleep(20)
        assert len(scene.done) > before + 50
        assert max(done.took_s for done in scene.done) < 1
        await scene.end()

    run_simulated(main(Scene(seed)))


@pytest.mark.parametrize("dies", ["proxy", "broker"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_what_a_group_has_committed_is_not_there_before_the_decision(
    number: int, reads: bool, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy is killed between a decision and its sending, or a broker is, so that the decision cannot be read for a
    moment and the offsets topic is read and pushed anew; and the records of the transaction stand still, or not.

    If the source died then, they would be aborted, and what they were made of would count as done."""
    output = ("local-t", 0)

    async def main(scene: Scene) -> None:
        replicas = scene.replicas
        await scene.begin()
        app = App(scene, number, "app-1")
        log = replicas.a.found["local-t"].partitions[0]
        app.record(TransactionState.ONGOING, (PLACE, output))
        log.produce(
            batch(
                0, [b"x"], producer_id=app.producer_id, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT
            )
        )
        assert await app.commit_offset(1)
        await replicas.until("copied", replicas.equal)
        await asyncio.sleep(5)  # all that is there is confirmed
        if dies == "proxy":
            await replicas.stop("A")
        else:
            app.state.move(-1)
            scene.offsets.leader_epoch += 1
        app.offset = 1
        scene.decided[app.group] = 1
        app.epoch += app.raises_epoch
        app.record(TransactionState.PREPARE_COMMIT, (PLACE, output))
        for each in (scene.offsets, log):
            each.write(marker_batch(each.end, app.producer_id, Marker.COMMIT, app.epoch))
        app.record(TransactionState.COMPLETE_COMMIT, ())
        opened = LeaderStream.opened

        def opened_here(stream: LeaderStream, end: int) -> None:
            opened(stream, end)
            stream.doubting = not reads

        monkeypatch.setattr(LeaderStream, "opened", opened_here)
        torn: list[bool] = []

        def committed(group: str, place: tuple[str, int], wanted: Any) -> None:
            stored = [
                record.key for data in replicas.b.found[STORE].partitions[0].log for record in decode_records(data)
            ]
            torn.append(not any(key and json.loads(key)[0] == DECISION for key in stored))

        replicas.b.on_commit = committed
        if dies == "proxy":
            replicas.start("A")
            await replicas.connect()
        else:
            await asyncio.sleep(5)
            assert not torn
            app.state.move(1)
        await replicas.until("committed", lambda: bool(torn), 3 if dies == "broker" else 20)
        assert torn == [False]
        await scene.end()

    run_simulated(main(Scene(3)))


def test_a_partition_is_pushed_whole_by_a_proxy_that_fronts_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends what was decided itself: what another one has sent it does not know."""

    async def main(scene: Scene) -> None:
        replicas = scene.replicas
        await scene.begin()
        app = App(scene, 0, "app-1")
        app.record(TransactionState.ONGOING)
        assert await app.commit_offset(1)
        await replicas.stop("A")
        monkeypatch.setattr(DecisionSender, "_coordinates", lambda sender, decision: False)
        app.offset = 1
        app.decide()
        await app.complete(Marker.COMMIT)
        replicas.start("A")
        await replicas.connect()
        await replicas.until("committed", lambda: FAR in replicas.b.offsets.get("far-app-1", {}))
        await replicas.until("In-Sync", scene.in_sync)
        await scene.end()

    run_simulated(main(Scene(4)))


@pytest.mark.parametrize("completed", [False, True])
def test_what_was_decided_before_a_start_waits_for_its_groups_link_alone(
    completed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy is killed between a decision and its answer; the link is gone when the client asks again."""

    async def main(scene: Scene) -> None:
        replicas = scene.replicas
        await scene.begin()
        apps = [App(scene, number, group) for number, group in enumerate(("app-1", "app-2", "other-1", "other-2"))]
        for app in apps:
            app.record(TransactionState.ONGOING)
            assert await app.commit_offset(1)
            app.offset = 1
        replicas.cut()
        await replicas.stop("A")
        done = [app.decide() for app in apps]
        if completed:
            for app in apps:
                await app.complete(Marker.COMMIT)
        replicas.start("A")

        def is_out() -> bool:
            return replicas.controls["A"].state.sync_records[LINK][PLACE].state is SyncState.OUT_OF_SYNC

        await replicas.until("Out-Of-Sync", is_out)
        completing = [scene.tasks.start("complete", app.complete(Marker.COMMIT)) for app in apps if not completed]
        ended = asyncio.gather(*completing)
        asking = [
            scene.tasks.start("end", app.end_transaction(each, ended)) for app, each in zip(apps, done, strict=True)
        ]
        await asyncio.sleep(60)
        assert [each.acked for each in done] == [False, False, True, True]
        await replicas.connect()
        await asyncio.gather(*asking)
        assert all(each.acked for each in done)
        await scene.end()

    run_simulated(main(Scene(5)))
