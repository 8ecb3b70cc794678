"""A control topic that a stranger writes to, or that lost its end: what a proxy begins with, and writes again."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support import control_cluster
from support.control_cluster import Client, ControlCluster, Disk

from isthmus import control_start, control_topic
from isthmus.control_log import ControlLog, ControlLogHalted, ControlLogLost, LeaseSpec
from isthmus.control_repair import ControlRepair, RepairRefused
from isthmus.control_start import Known
from isthmus.control_topic import ControlTopic, Loaded
from isthmus.errors import PeerFault
from isthmus_control import anchors
from isthmus_control import apply as rules
from isthmus_control import commands as c
from isthmus_control import replica as replicas
from isthmus_control.control_state import ControlState
from isthmus_control.exports import Export, MalformedExport, decode
from isthmus_control.model import BrokerClaim, ResourceType
from isthmus_control.outcome import Accepted, Rejected, Rejection
from isthmus_control.sealing import Secret
from isthmus_control.signing import Signer
from isthmus_plugins.tasks import Supervision, Tasks

INTERVAL = 16
TOPIC = ResourceType.TOPIC
KEY = Secret(b"k" * 32)
SIGNER = Signer(KEY, "A")
OTHER = Signer(Secret(b"x" * 32), "A")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rules, replicas, control_topic):
        monkeypatch.setattr(module, "SNAPSHOT_INTERVAL", INTERVAL)
    monkeypatch.setattr(control_cluster, "LATENCY_S", 0.0001)


class Calm(random.Random):
    """No answer of the model is lost."""

    def random(self) -> float:
        return 0.5


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class Written:
    """A log in a cluster, written as its proxies do; ``signed``: by those who have the key, once that is raised."""

    def __init__(self) -> None:
        self.cluster = ControlCluster(Calm(1))
        self.replica = replicas.Replica(ControlState("A"), SIGNER)
        self.recent = anchors.RecentRecords()

    @property
    def end(self) -> int:
        return len(self.cluster.log)

    def topic(self, signer: Signer | None = SIGNER) -> ControlTopic:
        client: Any = Client(self.cluster)
        return ControlTopic(client, signer)

    async def make(self) -> None:
        await self.topic().make()

    def put(self, value: bytes | None) -> replicas.Applied:
        """A record, whoever writes it."""
        record = anchors.LogRecord(self.end, value, self.cluster.epoch)
        self.cluster.log.append((value, self.cluster.epoch))
        self.recent.add(record)
        return self.replica.feed(record.offset, value)

    def do(self, body: c.Body) -> None:
        command = control_topic.command_of(body, "p", self.replica.state, self.recent)
        assert isinstance(self.put(self.topic().encode(command, self.replica.state)).outcome, Accepted)

    def sign(self) -> None:
        self.do(c.RaiseLevel(2, SIGNER.key_id))

    def fill(self, end: int) -> None:
        while self.end < end:
            self.do(c.CreateNamespace(TOPIC, f"n{self.end}-", True))

    def snapshot(self) -> bytes:
        due = self.replica.due_state
        assert due is not None
        self.do(replicas.take(due))
        value = self.cluster.log[-1][0]
        assert value is not None
        return value

    async def load(self, signer: Signer | None = SIGNER) -> Loaded:
        topic = self.topic(signer)
        assert await topic.find()
        return await topic.load()

    async def loads_what_counts(self) -> None:
        loaded = await self.load()
        assert loaded.replica.state == self.replica.state
        assert loaded.forked is None


def forged(state: ControlState, as_of: int, seen: int) -> bytes:
    """A snapshot of a state without reservations, of one who does not have the key."""
    snapshot = replicas.take(state.evolve(namespaces={}, applied_offset=as_of))
    return c.encode(c.Command(str(uuid.uuid4()), 1, "p", seen, snapshot))


def due_before(offset: int) -> int:
    """The last offset before this one of which a snapshot is due."""
    return offset // INTERVAL * INTERVAL - 1


def test_a_strangers_snapshot_does_not_win_over_those_that_are_signed() -> None:
    async def work() -> None:
        log = Written()
        await log.make()
        log.sign()
        log.fill(20)
        log.snapshot()
        log.fill(50)
        log.put(forged(ControlState("A"), due_before(log.end), log.end - 1))  # as if nothing had been signed ever
        await log.loads_what_counts()
        log.put(forged(log.replica.state, due_before(log.end), log.end - 1))
        await log.loads_what_counts()
        # Nor behind so much junk that nothing signed is near.
        for _ in range(10 * INTERVAL):
            log.put(b"junk")
        log.put(forged(ControlState("A"), due_before(log.end), log.end - 1))
        await log.loads_what_counts()
        assert log.replica.unsigned.count == 3

    run(work())


def test_below_the_first_signed_record_snapshots_are_not_signed_yet() -> None:
    async def work() -> None:
        log = Written()
        await log.make()
        log.fill(20)
        log.snapshot()
        log.cluster.start = 10  # so that it is needed
        log.fill(40)
        log.sign()
        raised = log.end - 1
        await log.loads_what_counts()
        # Of before, but written behind the record that demands a signature; and of behind it, as if it had not been.
        log.put(forged(ControlState("A"), due_before(raised), log.end - 1))
        await log.loads_what_counts()
        log.fill(50)
        log.put(forged(ControlState("A"), due_before(log.end), log.end - 1))
        log.put(forged(log.replica.state, due_before(log.end), log.end - 1))
        await log.loads_what_counts()

    run(work())


def test_a_copy_of_a_signed_snapshot_harms_nothing() -> None:
    async def work() -> None:
        log = Written()
        await log.make()
        log.sign()
        log.fill(20)
        old = log.snapshot()
        log.fill(60)
        log.snapshot()
        log.put(old)
        await log.loads_what_counts()
        log.cluster.start = 40  # behind what a reader of the copy would need
        await log.loads_what_counts()

    run(work())


def test_a_proxy_with_a_key_begins_a_log_that_is_not_signed_as_ever() -> None:
    async def work() -> None:
        log = Written()
        await log.make()
        await log.loads_what_counts()
        log.fill(40)
        log.snapshot()
        log.cluster.start = 30
        log.fill(60)
        for signer in (SIGNER, None):
            loaded = await log.load(signer)
            assert loaded.replica.state == log.replica.state
            assert loaded.replica.bases()[0].applied_offset == 31

    run(work())


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("signer", [None, OTHER])
def test_a_proxy_without_the_key_does_not_start(signer: Signer | None, snapshot: bool) -> None:
    async def work() -> None:
        log = Written()
        await log.make()
        log.sign()
        log.fill(20)
        if snapshot:
            log.snapshot()
        client: Any = Client(log.cluster)
        proxy = ControlLog(client, "p2", supervision=Supervision(), signer=signer)
        with pytest.raises(ControlLogHalted, match=f"control key of id {SIGNER.key_id}") as caught:
            await proxy.start()
        assert caught.value.reason == replicas.CONTROL_KEY
        assert not isinstance(caught.value, ControlLogLost), "no other log is what it needs"
        assert "set cluster.control_key_file" in str(caught.value)
        repair = ControlRepair(client, (), signer)
        with pytest.raises(RepairRefused, match=f"control key of id {SIGNER.key_id}") as refused:
            await repair.accept(Known())
        assert refused.value.code == "CONTROL_KEY"
        assert "delete" not in str(refused.value)

    run(work())


def test_a_log_whose_writer_had_applied_another_one_is_lost_until_an_operator_accepts_it() -> None:
    async def work() -> None:
        log = Written()
        await log.make()
        log.sign()
        log.fill(30)
        lost = control_topic.command_of(c.CreateNamespace(TOPIC, "a-"), "p9", log.replica.state, log.recent)
        late = log.topic().encode(lost, log.replica.state)
        again = Written()  # of the same begin
        await again.make()
        again.cluster.topic_id = log.cluster.topic_id
        for value, _ in log.cluster.log[:20]:
            again.put(value)
        again.fill(35)
        again.put(late)
        again.fill(40)
        assert (await log.load()).forked is None
        loaded = await again.load()
        assert loaded.forked is not None
        assert loaded.forked.reason == anchors.LOG_REWRITTEN
        assert "proxy 'p9', which wrote the record at offset 35, had applied the log up to 29" in str(loaded.forked)
        client: Any = Client(again.cluster)
        proxy = ControlLog(client, "p2", supervision=Supervision(), places=[Disk("p2")], signer=SIGNER)
        with pytest.raises(ControlLogLost, match="had others"):
            await proxy.start()
        # What the operator accepts counts from anywhere, and also when such a record comes later still.
        await control_start.accept(again.topic(), Known(), "test")
        again.cluster.log.append((late, 0))
        loaded = await again.load()
        assert loaded.forked is None
        assert loaded.replica.state.generation > 0
        await proxy.start()
        await proxy.close(release=False)

    run(work())


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("later", "same_topic"), [(40, False), (60, False), (60, True)])
def test_an_export_that_begins_with_a_snapshot_is_written_again(later: int, same_topic: bool, signed: bool) -> None:
    """Behind fillers digests are others, also in the topic that it was: the generation settles it. What the repair
    itself writes is signed."""

    async def work() -> None:
        log = Written()
        await log.make()
        log.do(c.RaiseLevel(2, SIGNER.key_id if signed else ""))
        log.fill(32)
        snapshot = replicas.take(log.replica.state)
        log.fill(later)
        if later > 48:
            log.snapshot()
            log.fill(later + 5)
        records = tuple(anchors.LogRecord(at, log.cluster.log[at][0]) for at in range(32, log.end))
        made = Export("A", str(log.cluster.topic_id), 0, snapshot, records)
        if signed:
            with pytest.raises(MalformedExport, match="set cluster"):
                decode(made.encode())
        found = decode(made.encode(), KEY)
        assert found.replica(SIGNER).state == log.replica.state

        again = Written()
        await again.make()
        again.cluster.topic_id = log.cluster.topic_id if same_topic else uuid.uuid4()
        client: Any = Client(again.cluster)
        repair = ControlRepair(client, (), SIGNER)
        known = await repair.known()
        plan = await repair.plan(found, known)
        await repair.write(plan, found, known, lambda offset: None)
        loaded = await again.load()
        assert loaded.forked is None
        assert loaded.replica.state.namespaces == log.replica.state.namespaces
        assert (loaded.replica.state.key_id != "") is signed
        assert loaded.replica.state.generation > 0
        assert loaded.replica.unsigned.count == 0
        written = [value for value, _ in again.cluster.log[log.end :] if value is not None]
        assert written
        assert all(replicas.is_signed(value, SIGNER) is signed for value in written)
        async with running(again.cluster, "one") as one:
            await claim(one, 1)
            assert one.vouching

    run(work())


@asynccontextmanager
async def running(
    cluster: ControlCluster, name: str, signer: Signer | None = SIGNER, **more: Any
) -> AsyncIterator[ControlLog]:
    client: Any = Client(cluster)
    log = ControlLog(client, name, supervision=Supervision(), signer=signer, **more)
    await log.start()
    try:
        yield log
    finally:
        await log.close(release=False)


async def claim(log: ControlLog, broker: int) -> None:
    assert isinstance(await log.claim(LeaseSpec((BrokerClaim(broker, "h", 9),), version="1")), Accepted)


def test_a_command_that_crossed_with_the_raising_counts_once_and_signed() -> None:
    """Its proxy had not read the record that demands a signature when it wrote."""

    async def work() -> None:
        cluster = ControlCluster(Calm(1))
        async with running(cluster, "one") as one, running(cluster, "two") as two:
            await claim(one, 1)
            await claim(two, 2)
            fetch, gate = two._topic.fetch, asyncio.Event()

            async def later(offset: int, read_epoch: int = -1) -> list[anchors.LogRecord]:
                records = await fetch(offset, read_epoch)
                await gate.wait()
                return records

            two._topic.fetch = later  # type: ignore[method-assign]
            assert isinstance(await one.append(c.CreateNamespace(TOPIC, "b-")), Accepted)
            await two.applied(one.state.applied_offset + 1)  # by the fetch that was under way
            assert isinstance(await one.append(c.RaiseLevel(2, SIGNER.key_id)), Accepted)
            raised = one.state.applied_offset
            tasks = Tasks("test", Supervision())
            command = two._command(c.CreateNamespace(TOPIC, "a-"))
            answer = tasks.start("append", _append(two, command))
            while len(cluster.log) <= raised + 1:  # noqa: ASYNC110 - nothing tells what the model has
                await asyncio.sleep(0.01)
            unsigned = cluster.log[raised + 1][0]
            assert unsigned is not None
            assert not replicas.is_signed(unsigned, SIGNER)
            gate.set()
            await answer
            copies = [value for value, _ in cluster.log if value is not None and command.id.encode() in value]
            assert [replicas.is_signed(value, SIGNER) for value in copies][:2] == [False, True]
            await one.applied(len(cluster.log))
            for log in (one, two):
                assert log.state.namespace(TOPIC, "a-") is not None
                assert log.unsigned.count == 0
                assert log.halted is None

    run(work())


def test_a_command_that_is_being_sent_when_signing_begins_is_sent_again() -> None:
    async def work() -> None:
        cluster = ControlCluster(Calm(1))
        async with running(cluster, "one") as one, running(cluster, "two") as two:
            await claim(one, 1)
            await claim(two, 2)
            produce, gate = two._topic.produce, asyncio.Event()

            async def later(values: Sequence[bytes | None], *, compress: bool = False) -> PeerFault | None:
                await gate.wait()
                return await produce(values, compress=compress)

            two._topic.produce = later  # type: ignore[method-assign]
            tasks = Tasks("test", Supervision())
            answer = tasks.start("append", _append(two, two._command(c.CreateNamespace(TOPIC, "a-"))))
            assert isinstance(await one.append(c.RaiseLevel(2, SIGNER.key_id)), Accepted)
            await two.applied(one.state.applied_offset + 1)
            gate.set()
            await answer
            assert two.state.namespace(TOPIC, "a-") is not None

    run(work())


def test_a_proxy_that_was_told_by_a_record_goes_on_when_an_operator_has_decided() -> None:
    """What it has is in the log, which is not the one that another proxy had applied: nothing is whole by that."""

    async def work() -> None:
        log = Written()
        await log.make()
        log.sign()
        log.fill(30)
        other = Written()
        await other.make()
        for value, _ in log.cluster.log[:20]:
            other.put(value)
        other.fill(35)
        lost = control_topic.command_of(c.CreateNamespace(TOPIC, "a-"), "p9", log.replica.state, log.recent)
        failures: list[Exception] = []
        disk = Disk("three")
        async with running(other.cluster, "three", places=[disk], on_failure=failures.append) as three:
            other.cluster.log.append((log.topic().encode(lost, log.replica.state), 0))
            other.cluster.changed()
            async with asyncio.timeout(10):
                while three.halted is None:  # noqa: ASYNC110 - a halt is not told to anybody
                    await asyncio.sleep(0.01)
            assert three.halted.reason == anchors.LOG_REWRITTEN
            assert three.state.namespace(TOPIC, "a-") is None
            remembered = three.export()
            assert remembered is not None
            assert remembered.end == other.end - 1
            disk.kept.clear()
            await three.anchors._insist()
            assert failures == []
            assert disk.kept == {}, "what it has itself is not missing"
            await control_start.accept(other.topic(), Known(), "test")
            await three.anchors._insist()
            assert "may be read again" in str(failures[0])

    run(work())


async def _append(log: ControlLog, command: c.Command) -> None:
    assert isinstance(await log.append(command), Accepted)


def test_signing_waits_for_a_proxy_that_does_not_know_it() -> None:
    async def work() -> None:
        cluster = ControlCluster(Calm(1))
        async with running(cluster, "one") as one, running(cluster, "two", None) as two:
            await claim(one, 1)
            await claim(two, 2)
            refused = await one.append(c.RaiseLevel(2, SIGNER.key_id))
            assert isinstance(refused, Rejected)
            assert refused.code is Rejection.CONFLICT
            assert "'two' has no control key" in refused.message
            assert not [value for value, _ in cluster.log if b"raise-level" in (value or b"")], "it is not even written"
            assert isinstance(await one.append(c.RaiseLevel(2)), Accepted)
            await two.applied(one.state.applied_offset + 1)
            assert isinstance(await two.append(c.CreateNamespace(TOPIC, "a-")), Accepted)
            assert b'"prefix":{"digest":"' in (cluster.log[-1][0] or b"")

    run(work())
