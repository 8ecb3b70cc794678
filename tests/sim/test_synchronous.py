"""Acks of a synchronous link, simulated: while B may say In-Sync, it has whatever A has ever acked.

Connections are cut, proxies killed, the control log fails. Looked at after every step and with every ack.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
from support.fake_cluster import FakeControl, run_simulated, simulated_now
from support.partition_log import TIMESTAMP
from support.replicas import HOUR_MS, LINK, End, Replicas, falsely_out_of_sync
from support.seeds import quarters, seeds

from isthmus_control.commands import AlterDemands, AlterLink, DetachNamespace
from isthmus_control.control_state import ControlState
from isthmus_control.demands import Consistency
from isthmus_control.model import Claim, LinkMode, ResourceType, SyncState
from isthmus_plugins.api import Gate
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.confirmer import SyncConfirmer
from isthmus_plugins.replication.sync.expiring_leases import LEASE_S
from isthmus_plugins.replication.sync.progress import NOT_READ, Phase
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.produce_answers import Writes
from isthmus_protocol.schema import ApiKey

TOPIC, REMOTE = "local-t", "remote-t"
VERSION = 9
PARTITIONS = 2
TIMEOUT_MS = 30_000
ON_THE_WAY_S = 0.5
"""So long a confirmation may be on its way."""


@dataclass
class Asked:
    """A Produce request that is not answered."""

    partition: int
    end: int
    gate: Gate
    transactional: bool


class Scene:
    def __init__(self, seed: int, strict: bool = False) -> None:
        self.random = random.Random(seed)
        self.strict = strict
        self.replicas = Replicas(self.random, brokers=1)
        self.asked: list[Asked] = []
        self.acked = [0] * PARTITIONS
        """By partition: where the last record ends that was acked."""
        self.acks: list[tuple[float, int, int]] = []
        """(When, partition, where the record ends) of each ack."""
        self.timed_out = 0
        self.powerless = self.lost_power = False
        self.lost_at = float("-inf")
        self.before_loss: list[int] = []
        self.reached: set[int] = set()
        """Partitions that were In-Sync since the mode was set, as B has recorded: its consumers read them."""
        if strict:
            topic = ResourceType.TOPIC
            self.replicas.controls["A"].apply(AlterDemands(topic, "local-", Consistency.STRICT))
        self.partitions = self.replicas.a.add_topic(TOPIC, PARTITIONS).partitions

    @property
    def a(self) -> End | None:
        return self.replicas.ends.get("A")

    def says_in_sync(self, partition: int) -> bool:
        b = self.replicas.ends.get("B")
        return b is not None and b.sync_leases.in_sync(REMOTE, partition)

    def in_sync(self) -> bool:
        return all(self.says_in_sync(partition) for partition in range(PARTITIONS))

    def holds(self) -> bool:
        """Whether A holds acks of all partitions, and knows them in sync."""
        keys = [LinkPartition(LINK, TOPIC, partition) for partition in range(PARTITIONS)]
        return self.a is not None and all(self.a.sync_confirmer.partitions.in_sync(key) for key in keys)

    def recorded(self, partition: int) -> SyncState | None:
        record = self.replicas.controls["A"].state.sync_records.get(LINK, {}).get((TOPIC, partition))
        return record.state if record is not None else None

    def mode(self, mode: LinkMode) -> None:
        if mode is LinkMode.ASYNCHRONOUS:
            self.reached.clear()
        self.replicas.controls["A"].apply(AlterLink(LINK, mode=mode))

    def produce(self, partition: int | None = None, transactional: bool | None = None) -> None:
        """A client's request: the broker has it at once, and its answer goes by way of A's proxy, if there is one."""
        if self.a is None:
            return
        partition = self.random.randrange(PARTITIONS) if partition is None else partition
        log = self.partitions[partition]
        base, values = log.end, [b"v"] * self.random.randint(1, 3)
        log.write_values(*values)
        entry = {"index": partition, "error_code": 0, "base_offset": base}
        answer = {"responses": [{"name": TOPIC, "partition_responses": [entry]}]}
        frame = encode_response(build(schema.response_type(ApiKey.PRODUCE, VERSION), answer), 1)
        transactional = self.random.random() < 0.3 if transactional is None else transactional
        written = Writes(-1, transactional, TIMEOUT_MS, {(TOPIC.encode(), partition): len(values)})
        held = self.a.acks.hold(-1, VERSION, written, {TOPIC.encode(): TOPIC}, simulated_now(), frame)
        if isinstance(held, Gate):
            self.asked.append(Asked(partition, log.end, held, transactional))
        else:
            self.ack(partition, log.end, transactional)

    def ack(self, partition: int, end: int, transactional: bool) -> None:
        self.acked[partition] = max(self.acked[partition], end)
        if (transactional or self.strict) and partition in self.reached:
            has = self.replicas.b.partition(REMOTE, partition).high_watermark
            if simulated_now() < self.lost_at + ON_THE_WAY_S:  # it was there when it was confirmed
                has = max(has, self.before_loss[partition])
            assert has >= end, f"acked up to {end}, and B, whose consumers read, has up to {has}"
        self.acks.append((TIMESTAMP + simulated_now() * 1000, partition, end))
        self.check()

    def look(self) -> None:
        """See which answers went out."""
        still = []
        for each in self.asked:
            frame = each.gate._frame
            if frame is None:
                still.append(each)
                continue
            _, answer = decode_response(ApiKey.PRODUCE, VERSION, frame)
            found: Any = answer
            code = int(found.responses[0].partition_responses[0].error_code)
            if code == 0:
                self.ack(each.partition, each.end, each.transactional)
            else:
                assert code in (6, 7), code  # not leader: of a proxy that has just come and does not know
                self.timed_out += 1
        self.asked = still
        self.check()

    def check(self) -> None:
        """What B says is so."""
        target = self.replicas.b.found.get(REMOTE)
        modes = [self.replicas.controls[name].state.links[LINK].settings.mode for name in "AB"]
        if modes[0] == modes[1] and modes[0].value is LinkMode.SYNCHRONOUS:
            recorded = self.replicas.controls["B"].state.sync_records.get(LINK, {})
            self.reached |= {partition for _, partition in recorded}
        for partition in range(PARTITIONS):
            if self.says_in_sync(partition) and not self.powerless:
                assert target is not None
                has = target.partitions[partition].high_watermark
                assert has >= self.acked[partition], f"In-Sync at {has}, and {self.acked[partition]} was acked"

    def check_claims(self) -> None:
        """What B's control log says of leases that ran out is so, whatever became of B's process, or what was lost with
        B's power shows. So does what B's process knows."""
        for (_, partition), claim in self.replicas.controls["B"].state.claims.items():
            self.check_claim(partition, claim)
        b, topic = self.replicas.ends.get("B"), self.replicas.controls["B"].state.follower_topics.get(REMOTE)
        for partition in range(PARTITIONS if b is not None and topic is not None else 0):
            known = b.sync_leases.claim(REMOTE, topic.topic_id, partition)
            if known is not None:
                self.check_claim(partition, known)

    def check_claim(self, partition: int, claim: Claim) -> None:
        has = self.replicas.b.found[REMOTE].partitions[partition].high_watermark
        promised = max((end for at, place, end in self.acks if place == partition and at <= claim.until_ms), default=0)
        assert has >= claim.end or self.lost_power, f"it ended at {claim.end}, and ends at {has}"
        if has >= claim.end:  # else that shows, and nothing is claimed
            assert has >= promised, f"In-Sync until {claim.until_ms}: {has}, and {promised} was acked"

    async def lose_power(self) -> None:
        """B's only broker loses what it had not flushed, and with it, or not, its proxy dies; it takes longer to start
        than leases run."""
        replicas = self.replicas
        self.powerless = self.lost_power = True
        self.lost_at = simulated_now()
        self.before_loss = [each.high_watermark for each in replicas.b.found[REMOTE].partitions]
        replicas.b.down.add(1)
        replicas.b.lose_ends(1, lambda partition: self.random.choice((0, 1, 3, 9)))
        dies = self.random.random() < 0.3
        if dies:
            await replicas.stop("B")
        until = simulated_now() + self.random.uniform(LEASE_S + 0.5, 6)
        while simulated_now() < until:
            self.produce()
            self.look()
            self.check_claims()
            await asyncio.sleep(self.random.uniform(0.001, 0.2))
        replicas.b.down.discard(1)
        self.powerless = False
        if dies:
            replicas.start("B")

    async def fault(self) -> None:
        what = self.random.choice(("cut", "kill A", "kill B", "stuck", "control", "mode", "false", "power", "nothing"))
        if what == "cut":
            self.replicas.cut()
        elif what.startswith("kill"):
            name = what[-1]
            if name == "A":
                self.asked.clear()  # their clients lose the connection
            await self.replicas.stop(name)
            await asyncio.sleep(self.random.uniform(0, 5))
            self.replicas.start(name)
        elif what == "power":
            await self.lose_power()
        elif what == "stuck":  # B hears and asks, and can store nothing
            self.replicas.b.down ^= {1}
        elif what == "control":
            self.replicas.controls["A"].trouble = self.random.choice((0.0, 0.5))
        elif what == "false":
            falsely_out_of_sync(self.replicas.controls["A"], LINK, TOPIC, self.random.randrange(PARTITIONS))
        elif what == "mode":
            self.mode(self.random.choice((LinkMode.ASYNCHRONOUS, LinkMode.SYNCHRONOUS)))

    async def connect_again(self) -> None:
        if self.replicas.wire is None or not self.replicas.wire.open:
            await self.replicas.connect()

    async def run(self) -> None:
        replicas = self.replicas
        replicas.clocks_apart()
        replicas.start()
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        self.mode(LinkMode.SYNCHRONOUS)
        await replicas.until("In-Sync", self.in_sync)
        for _ in range(self.random.randint(2, 6)):
            await self.fault()
            quiet = self.random.choice((0.3, 3.0, 20.0))
            until = simulated_now() + self.random.uniform(0, quiet)
            while simulated_now() < until:
                if self.random.random() < 0.7:
                    self.produce()
                self.look()
                self.check_claims()
                await asyncio.sleep(self.random.uniform(0.001, 0.2))
            await self.connect_again()
        replicas.controls["A"].trouble = 0.0
        replicas.b.down.clear()
        self.mode(LinkMode.SYNCHRONOUS)
        await self.connect_again()
        await replicas.until("equal", replicas.equal)
        await replicas.until("all is answered", lambda: self.look() or not self.asked)
        await replicas.until("In-Sync again", lambda: self.in_sync() and self.holds())
        await replicas.until("read at B", lambda: self.look() or len(self.reached) == PARTITIONS)
        before = sum(self.acked)
        for _ in range(20):
            self.produce()
        assert self.asked, "in sync, nothing is acked at once"
        began = simulated_now()
        await replicas.until("all is acked", lambda: self.look() or not self.asked)
        assert simulated_now() - began < 3
        assert sum(self.acked) >= before + 20
        replicas.cut()
        await replicas.until("claimed", lambda: len(replicas.controls["B"].state.claims) == PARTITIONS)
        self.check_claims()
        await replicas.stop()


@pytest.mark.parametrize("seed", seeds(40))
def test_what_is_in_sync_has_all_that_was_acked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_simulated(Scene(seed, strict=seed % 4 == 3).run())


def test_leases_of_the_process_before_hold_acks_where_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        replicas = scene.replicas
        replicas.start()
        await replicas.connect()
        replicas.controls["A"].wall_ms -= HOUR_MS
        scene.mode(LinkMode.SYNCHRONOUS)
        await replicas.until("In-Sync", scene.in_sync)
        scene.mode(LinkMode.ASYNCHRONOUS)
        replicas.cut()
        await replicas.stop("A")
        replicas.start("A")
        assert scene.says_in_sync(0)
        before = scene.acked[0]
        while scene.acked[0] == before:  # none is acked while B says In-Sync
            scene.produce(0, transactional=False)
            scene.look()
            await asyncio.sleep(0.1)
        await replicas.stop()

    run_simulated(work(Scene(1)))


def test_what_another_proxy_records_lets_no_ack_go_while_leases_of_this_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever believes to lead a partition, and does not any more, may record that it is Out-Of-Sync."""

    async def work(scene: Scene) -> None:
        replicas = scene.replicas
        replicas.start()
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        scene.mode(LinkMode.SYNCHRONOUS)
        await replicas.until("In-Sync", lambda: scene.in_sync() and scene.holds())
        await asyncio.sleep(LEASE_S * 2)
        replicas.b.down.add(1)
        scene.produce(0, transactional=False)
        assert scene.asked
        falsely_out_of_sync(replicas.controls["A"], LINK, TOPIC, 0)
        assert scene.says_in_sync(0)
        applied_at = simulated_now()
        await replicas.until("the ack", lambda: scene.look() or not scene.asked)
        assert not scene.says_in_sync(0)
        assert simulated_now() - applied_at < 3 * LEASE_S
        replicas.b.down.clear()
        await replicas.until("In-Sync again", lambda: scene.in_sync() and scene.holds())
        await replicas.stop()

    run_simulated(work(Scene(1)))


@pytest.mark.parametrize("fault", ["killed", "cut", "stuck"])
@pytest.mark.parametrize("seed", quarters(range(8)))
def test_acks_wait_for_the_confirm_timeout_and_no_longer(
    seed: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        scene = Scene(seed)
        replicas = scene.replicas
        replicas.start()
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        scene.mode(LinkMode.SYNCHRONOUS)
        await replicas.until("In-Sync", scene.in_sync)
        if fault == "killed":
            await replicas.stop("B")
        elif fault == "cut":
            replicas.cut()
        else:
            replicas.b.down.add(1)
        lost_at = simulated_now()
        while simulated_now() - lost_at < 5:
            scene.produce(transactional=False)
            scene.look()
            await asyncio.sleep(0.1)
        assert not any(scene.acked)
        await replicas.until("the acks", lambda: scene.look() or not scene.asked)
        assert 9 < simulated_now() - lost_at < 17
        assert not scene.timed_out
        assert all(scene.recorded(partition) is SyncState.OUT_OF_SYNC for partition in range(PARTITIONS))
        replicas.b.down.clear()
        if fault == "killed":
            replicas.start("B")
        await scene.connect_again()
        await replicas.until("In-Sync again", lambda: scene.in_sync() and scene.holds())
        await replicas.stop()

    run_simulated(main())


@pytest.mark.parametrize("seed", quarters(range(8)))
def test_one_that_does_not_get_in_sync_is_syncing_again_and_one_that_was_is_not(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transactional producers go on while the partition syncs for the first time, and wait ever after."""

    async def main() -> None:
        scene = Scene(seed)
        replicas = scene.replicas
        replicas.start()
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        fails = True

        def stuck(state: ControlState) -> None:
            """B hears and asks, and can store nothing, from the moment on that acks are held."""
            if fails and scene.recorded(0) is SyncState.IN_SYNC and not replicas.b.down:
                scene.partitions[0].write_values(b"v")
                replicas.b.down.add(1)

        async def tries_and_fails() -> None:
            replicas.b.down.clear()
            await replicas.until("held", lambda: scene.recorded(0) is SyncState.IN_SYNC)
            scene.produce(0, transactional=True)
            assert scene.asked
            await replicas.until("no more", lambda: scene.recorded(0) is not SyncState.IN_SYNC)

        replicas.controls["A"].subscribe(stuck)
        scene.mode(LinkMode.SYNCHRONOUS)
        for _ in range(3):
            await tries_and_fails()
            assert not scene.says_in_sync(0)
            assert scene.recorded(0) is None
            scene.look()
            scene.produce(0, transactional=True)
            assert not scene.asked, "held while nothing was promised"

        fails = False
        replicas.b.down.clear()
        await replicas.until("In-Sync", lambda: scene.in_sync() and scene.holds())
        replicas.b.down.add(1)
        scene.produce(0, transactional=True)
        fails = True
        await replicas.until("out", lambda: scene.recorded(0) is SyncState.OUT_OF_SYNC)
        for _ in range(3):
            await tries_and_fails()
            assert scene.recorded(0) is SyncState.OUT_OF_SYNC
            scene.produce(0, transactional=True)
            scene.look()
            assert scene.asked, "acked although the other side was read"
        fails = False
        replicas.b.down.clear()
        await replicas.until("In-Sync again", lambda: scene.in_sync() and scene.holds())
        await replicas.until("all is answered", lambda: scene.look() or not scene.asked)
        await replicas.stop()

    run_simulated(main())


@pytest.mark.parametrize("change", ["mode", "detached"])
def test_a_proxy_that_pushes_nothing_knows_that_leases_of_others_run(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fronts the coordinator of transactions, and applies the change before the one that grants leases does."""

    async def work(scene: Scene) -> None:
        replicas = scene.replicas
        replicas.start()
        await replicas.connect()
        control: Any = replicas.controls["A"]
        enforced = asyncio.Event()

        async def once_enforced(offset: int) -> None:
            await enforced.wait()

        monkeypatch.setattr(control, "enforced", once_enforced)
        other = proxy_beside(replicas)
        scene.mode(LinkMode.SYNCHRONOUS)
        enforced.set()
        await replicas.until("In-Sync", scene.in_sync)
        await asyncio.sleep(LEASE_S * 2)
        enforced.clear()
        if change == "mode":
            scene.mode(LinkMode.ASYNCHRONOUS)
        else:
            control.apply(DetachNamespace(LINK, ResourceType.TOPIC, "local-"))
        key = LinkPartition(LINK, TOPIC, 0)
        for _ in range(2):  # as long as another proxy may not know
            assert other.links.expiring
            assert other.concerns(TOPIC)
            assert other.requirements.sent_to(key.place) == {key}
            assert [quorum.keys for quorum in other.requirements.commit_needed(key.place)] == [(key,)]
            await asyncio.sleep(LEASE_S * 2)
        enforced.set()
        enforced_at = simulated_now()
        await replicas.until("run out", lambda: not other.links.expiring)
        assert simulated_now() - enforced_at >= LEASE_S
        assert not other.concerns(TOPIC)
        assert not list(other.requirements.commit_needed(key.place))
        await other.stop()
        await replicas.stop()

    run_simulated(work(Scene(1)))


def test_who_joins_anew_does_not_go_by_where_the_log_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy is waited for while a partition joins; meanwhile it gives up, acks go out, and it joins once more."""

    async def work(scene: Scene) -> None:
        replicas = scene.replicas
        replicas.start()
        await replicas.connect()
        control: Any = replicas.controls["A"]
        waited_for: list[asyncio.Event] = []

        async def once_enforced(offset: int) -> None:
            waited_for.append(asyncio.Event())
            await waited_for[-1].wait()

        monkeypatch.setattr(control, "enforced", once_enforced)
        scene.mode(LinkMode.SYNCHRONOUS)
        sync = replicas.ends["A"].sync_confirmer
        key = LinkPartition(LINK, TOPIC, 0)

        def asks() -> bool:
            progress = sync.partitions.progress.get(key)
            return progress is not None and progress.phase is Phase.ASKING and bool(waited_for)

        await replicas.until("it joins", asks)
        first, joined_by = len(waited_for), sync.partitions.progress[key].joining
        await replicas.until(
            "it gives up and joins again",
            lambda: asks() and sync.partitions.progress[key].joining != joined_by and len(waited_for) > first,
        )
        assert sync.partitions.progress[key].join_end == NOT_READ
        for each in waited_for[:first]:
            each.set()
        await asyncio.sleep(1.0)
        assert sync.partitions.progress[key].join_end == NOT_READ, "what was asked for before it gave up is no answer"
        for each in waited_for:
            each.set()
        monkeypatch.setattr(control, "enforced", FakeControl.enforced.__get__(control))
        await replicas.until("In-Sync", scene.in_sync)
        await replicas.stop()

    run_simulated(work(Scene(1)))


def proxy_beside(replicas: Replicas) -> SyncConfirmer:
    """Of another proxy of A, which fronts none of the leaders, what holds acks."""
    return End(replicas.a, replicas.controls["A"], "other", fronted_brokers=frozenset((99,))).sync_confirmer
