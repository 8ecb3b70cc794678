"""Acks of several synchronous links, simulated: sets of links of which some are enough, and links given up for a time.

Connections are cut, proxies killed, settings changed. Looked at with every ack, as it goes out, and after every step:
who has what was acked, and whether what a target says of it is so.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from support.fake_cluster import run_simulated, simulated_now
from support.partition_log import TIMESTAMP
from support.replicas import End, falsely_out_of_sync
from support.seeds import quarters, seeds
from support.three import LINKS, Three

from isthmus_control.commands import AlterDemands, AlterLink, DegradeSync
from isthmus_control.demands import ALL, Confirm, Consistency, Demands
from isthmus_control.model import AckTerms, LinkMode, ResourceType, SyncRecord, SyncState
from isthmus_plugins.api import Gate
from isthmus_plugins.replication.sync.expiring_leases import LEASE_S
from isthmus_plugins.replication.sync.quorums import is_degraded
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.produce_answers import Writes
from isthmus_protocol.schema import ApiKey

TOPIC, REMOTE = "local-t", "remote-t"
VERSION = 9
PARTITIONS = 2
TIMEOUT_MS = 30_000
ANY_1, ANY_2 = (Confirm(count, tuple(sorted(LINKS.values()))) for count in (1, 2))
DEGRADE_MS = 20_000
OUT = SyncState.OUT_OF_SYNC


@dataclass(eq=False)
class Asked:
    """A Produce request that is not answered."""

    partition: int
    end: int
    transactional: bool


class Scene:
    def __init__(self, seed: int, confirm: Confirm = ANY_1, degrade_ms: int = 0, strict: bool = False) -> None:
        self.random = random.Random(seed)
        self.three = Three(self.random)
        self.asked: set[Asked] = set()
        self.acked = [0] * PARTITIONS
        self.acks: list[tuple[float, int, int]] = []
        """(When, partition, where the record ends) of each ack."""
        self.refused = 0
        self.wrong: list[str] = []
        self.partitions = self.three.a.add_topic(TOPIC, PARTITIONS).partitions
        self.demand(
            confirm=confirm, degrade_after_ms=degrade_ms, consistency=Consistency("strict" if strict else "available")
        )

    @property
    def a(self) -> End | None:
        return self.three.ends.get("A")

    def demand(self, **what: Any) -> None:
        self.three.controls["A"].apply(AlterDemands(ResourceType.TOPIC, "local-", **what))

    def mode(self, mode: LinkMode, targets: str = "BC") -> None:
        for target in targets:
            self.three.controls["A"].apply(AlterLink(LINKS[target], mode=mode))

    @property
    def demands(self) -> Demands:
        return self.three.controls["A"].state.lookup.demands(ResourceType.TOPIC, TOPIC)

    def record(self, target: str, partition: int) -> SyncRecord | None:
        return self.three.controls["A"].state.sync_records.get(LINKS[target], {}).get((TOPIC, partition))

    def has(self, target: str, partition: int) -> int:
        return self.three.has(target, REMOTE, partition)

    # ---- clients ----

    def produce(self, partition: int | None = None, transactional: bool | None = None) -> Asked | None:
        """A client's request; None: there is nobody to ask."""
        if self.a is None:
            return None
        partition = self.random.randrange(PARTITIONS) if partition is None else partition
        log = self.partitions[partition]
        base, values = log.end, [b"v"] * self.random.randint(1, 3)
        log.write_values(*values)
        entry = {"index": partition, "error_code": 0, "base_offset": base}
        answer = {"responses": [{"name": TOPIC, "partition_responses": [entry]}]}
        frame = encode_response(build(schema.response_type(ApiKey.PRODUCE, VERSION), answer), 1)
        transactional = self.random.random() < 0.4 if transactional is None else transactional
        written = Writes(-1, transactional, TIMEOUT_MS, {(TOPIC.encode(), partition): len(values)})
        asked = Asked(partition, log.end, transactional)
        held = self.a.acks.hold(-1, VERSION, written, {TOPIC.encode(): TOPIC}, simulated_now(), frame)
        if isinstance(held, Gate):
            self.asked.add(asked)
            if held.take(lambda: self.answered(asked, held._frame or b"")):
                self.answered(asked, held._frame or b"")
        else:
            self.ack(asked)
        return asked

    def answered(self, asked: Asked, frame: bytes) -> None:
        if asked not in self.asked:
            return  # its client lost the connection
        self.asked.discard(asked)
        _, answer = decode_response(ApiKey.PRODUCE, VERSION, frame)
        found: Any = answer
        code = int(found.responses[0].partition_responses[0].error_code)
        if code == 0:
            self.ack(asked)
        elif code in (6, 7):  # not leader: of a proxy that has just come and does not know
            self.refused += 1
        else:
            self.wrong.append(f"answered {code}")

    def ack(self, asked: Asked) -> None:
        """An ack goes out now: so many have it, of those that it has to wait for."""
        demands, partition = self.demands, asked.partition
        waits = asked.transactional or demands.strict
        records = {target: record for target in LINKS if (record := self.record(target, partition)) is not None}
        in_sync = [target for target, record in records.items() if record.state is not OUT]
        both = [
            target for target, record in records.items() if record.state is not OUT or not is_degraded(demands, record)
        ]
        for targets in (in_sync, both) if waits else (in_sync,):
            count = min(demands.confirm.count or len(targets), len(targets))
            having = [target for target in targets if self.has(target, partition) >= asked.end]
            if len(having) < count:
                self.wrong.append(
                    f"{asked} is acked, {having} have it, of {targets} {count} must: {demands}, {records}"
                )
        self.acked[partition] = max(self.acked[partition], asked.end)
        self.acks.append((TIMESTAMP + simulated_now() * 1000, partition, asked.end))

    # ---- what must hold ----

    def holds(self, terms: AckTerms, target: str, partition: int, end: int) -> bool:
        """Whether what a target says of everything up to an offset is so."""
        if not terms.links:
            return self.has(target, partition) >= end
        assert set(terms.links) <= set(LINKS.values())
        said = [each for each, link in LINKS.items() if link in terms.links]
        return sum(self.has(each, partition) >= end for each in said) >= terms.count

    def check(self) -> None:
        assert not self.wrong, self.wrong[0]
        for target in LINKS:
            b = self.three.ends.get(target)
            claims = self.three.controls[target].state.claims.items()
            for partition in range(PARTITIONS):
                lease = b.sync_leases._leases.get((REMOTE, partition)) if b is not None else None
                if lease is not None and simulated_now() < lease.until:
                    end = self.acked[partition]
                    assert self.holds(lease.terms, target, partition, end), f"{target}-{partition}: {end}, {lease}"
                claim = next((claim for (_, place), claim in claims if place == partition), None)
                if claim is not None:
                    end = max(
                        (end for at, place, end in self.acks if place == partition and at <= claim.until_ms), default=0
                    )
                    assert self.holds(claim.terms, target, partition, end), f"{target}-{partition}: {end}, {claim}"

    # ---- what happens ----

    async def fault(self) -> None:
        what = self.random.choice(
            ("cut", "cut", "kill A", "kill", "stuck", "control", "mode", "confirm", "degrade", "false")
        )
        target = self.random.choice("BC")
        if what == "cut":
            self.three.cut_off(target)
        elif what == "kill A":
            self.asked.clear()
            await self.three.stop("A")
            await asyncio.sleep(self.random.choice((0.0, 0.3, 5.0)))
            self.three.start("A")
        elif what == "kill":
            await self.three.stop(target)
            await asyncio.sleep(self.random.uniform(0, 5))
            self.three.start(target)
        elif what == "stuck":  # it hears and asks, and can store nothing
            self.three.targets[target].down ^= {1}
        elif what == "control":
            self.three.controls["A"].trouble = self.random.choice((0.0, 0.5))
        elif what == "mode":
            self.mode(self.random.choice((LinkMode.ASYNCHRONOUS, LinkMode.SYNCHRONOUS)), target)
        elif what == "false":
            falsely_out_of_sync(self.three.controls["A"], LINKS[target], TOPIC, self.random.randrange(PARTITIONS))
        elif what == "confirm":
            self.demand(confirm=self.random.choice((ALL, ANY_1, ANY_1, ANY_2)))
        else:
            self.demand(degrade_after_ms=self.random.choice((0, 2_000, DEGRADE_MS)))

    def says_in_sync(self, target: str) -> bool:
        b = self.three.ends.get(target)
        return b is not None and all(b.sync_leases.in_sync(REMOTE, partition) for partition in range(PARTITIONS))

    def in_sync(self) -> bool:
        return self.three.holds(TOPIC, PARTITIONS)() and all(map(self.says_in_sync, LINKS))

    async def begin(self) -> None:
        three = self.three
        three.start()
        self.join_all()
        await three.until("copied", three.all_equal)
        self.mode(LinkMode.SYNCHRONOUS)
        await three.until("In-Sync", self.in_sync)
        await asyncio.sleep(2)  # what this process may have promised before is over

    def join_all(self, targets: Iterable[str] = "BC") -> None:
        for target in targets:
            self.three.join(target)

    async def run(self) -> None:
        three = self.three
        await self.begin()
        for _ in range(self.random.randint(2, 7)):
            await self.fault()
            until = simulated_now() + self.random.uniform(0, self.random.choice((0.3, 3.0, 20.0)))
            joins = self.random.choice((("B",), ("C",), ("B", "C"), ()))
            while simulated_now() < until:
                if self.random.random() < 0.7:
                    self.produce()
                self.check()
                await asyncio.sleep(self.random.uniform(0.001, 0.2))
                if self.random.random() < 0.1:
                    self.join_all(joins)
        three.controls["A"].trouble = 0.0
        for cluster in three.targets.values():
            cluster.down.clear()
        self.mode(LinkMode.SYNCHRONOUS)
        self.join_all()
        await three.until("equal", three.all_equal)
        await three.until("In-Sync again", lambda: self.check() or self.in_sync())
        await three.until("all is answered", lambda: self.check() or not self.asked)
        for record in (self.record(target, partition) for target in LINKS for partition in range(PARTITIONS)):
            assert record is not None
            assert (record.state, record.degraded) == (SyncState.IN_SYNC, None)
        for _ in range(20):
            self.produce()
        began = simulated_now()
        await three.until("all is acked", lambda: self.check() or not self.asked)
        assert simulated_now() - began < 3
        for target in LINKS:
            three.cut_off(target)
        await three.until("claimed", lambda: all(three.controls[target].state.claims for target in LINKS))
        self.check()
        await three.stop()


@pytest.mark.parametrize("seed", seeds(15))
def test_who_must_have_what_is_acked_has_it_and_no_claim_is_false(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    confirm = (ANY_1, ANY_1, ANY_2, ALL)[seed % 4]
    run_simulated(Scene(seed, confirm, (0, 5_000)[seed // 4 % 2], strict=seed % 5 == 4).run())


@pytest.mark.parametrize("fault", ["cut", "stuck"])
@pytest.mark.parametrize("seed", quarters(range(4)))
def test_one_of_a_set_that_stands_still_delays_nobody_and_leaves_by_its_own_lag(
    seed: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        scene = Scene(seed)
        await scene.begin()
        three = scene.three
        if fault == "cut":
            three.cut_off("C")
        else:
            three.c.down.add(1)
        lost_at = simulated_now()
        left_at = 0.0
        while simulated_now() - lost_at < 25:
            sent_at = simulated_now()
            scene.produce(0)
            await three.until("acked", lambda: not scene.asked)
            assert simulated_now() - sent_at < 0.5, f"at {simulated_now() - lost_at}"
            scene.check()
            record = scene.record("C", 0)
            if not left_at and record is not None and record.state is OUT:
                left_at = simulated_now() - lost_at
            await asyncio.sleep(0.05)
        assert 9 < left_at < 17
        three.c.down.clear()
        scene.join_all()
        await three.until("In-Sync again", scene.in_sync)
        scene.check()
        await three.stop()

    run_simulated(main())


@pytest.mark.parametrize("seed", quarters(range(4)))
@pytest.mark.parametrize("strict", [False, True])
def test_acks_go_without_a_link_after_its_time_and_wait_again_after_it_was_in_sync(
    seed: int, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        scene = Scene(seed, ALL, DEGRADE_MS, strict)
        await scene.begin()
        three = scene.three
        for _ in range(2):
            three.c.down.add(1)
            lost_at, acked_at = simulated_now(), 0.0
            while not acked_at:
                asked = scene.produce(0, transactional=not strict)
                await asyncio.sleep(0.2)
                scene.check()
                if asked not in scene.asked:
                    acked_at = simulated_now() - lost_at
                assert simulated_now() - lost_at < 60
            assert 10 + DEGRADE_MS / 1000 < acked_at < 20 + DEGRADE_MS / 1000
            record = scene.record("C", 0)
            assert record is not None
            assert record.degraded is not None
            assert (record.state, record.degraded.after_ms) == (OUT, DEGRADE_MS)
            assert isinstance(three.controls["A"].commands[-1], DegradeSync) or scene.acks
            three.c.down.clear()
            await three.until("In-Sync again", scene.in_sync)
            record = scene.record("C", 0)
            assert record is not None
            assert record.degraded is None
        await three.stop()

    run_simulated(main())


@pytest.mark.parametrize("seed", quarters(range(3)))
def test_when_the_leader_was_away_all_are_waited_for_while_leases_of_another_proxy_may_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been with a proxy that promised B everything, and be back before this one looks."""

    async def main() -> None:
        scene = Scene(seed)
        await scene.begin()
        three, log = scene.three, scene.partitions[0]
        three.c.down.add(1)
        log.leader_epoch += 2
        a = scene.a
        assert a is not None
        await three.until("known", lambda: a.sync_confirmer.leader_epoch((TOPIC, 0)) == log.leader_epoch)
        known_at = simulated_now()
        while not scene.acked[0]:
            scene.produce(0, transactional=False)
            await asyncio.sleep(0.05)
            assert simulated_now() - known_at < 3
        assert simulated_now() - known_at > LEASE_S
        scene.check()
        await three.stop()

    run_simulated(main())
