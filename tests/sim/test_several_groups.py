"""Commits of groups over two synchronous links, simulated: sets of links of which one is enough, and links given up.

Two namespaces of groups ask for different things, and share the partitions of the offsets topic. Connections are cut,
proxies killed, settings changed. Looked at with every ack, as it goes out, and after every step: whose coordinators
have what was acked, and whether what a target says of it is so.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
from support.fake_cluster import run_simulated, simulated_now
from support.offsets import commit, group_made, offsets_batch
from support.partition_log import TIMESTAMP
from support.replicas import End, falsely_out_of_sync
from support.seeds import quarters, seeds
from support.three import LINKS, Three

from isthmus_control.commands import AlterDemands, AlterLink
from isthmus_control.demands import ALL, Confirm, Consistency
from isthmus_control.model import PLAIN_TERMS, AckTerms, LinkMode, ResourceType, SyncRecord, SyncState
from isthmus_plugins.api import Client, Gate, Hold, Replace, Request
from isthmus_plugins.replication.sync.quorums import is_degraded
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import decode_response, encode_request, encode_response
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, partition_of
from isthmus_protocol.schema import ApiKey

VERSIONS = {ApiKey.OFFSET_COMMIT: 8, ApiKey.TXN_OFFSET_COMMIT: 3}
PARTITIONS = 2
GROUPS = [f"{prefix}{number}" for prefix in ("any-", "all-") for number in range(3)]
PLACE = ("local-t", 0)
RECORDS = 1000
ANY_1 = Confirm(1, tuple(sorted(LINKS.values())))
COORDINATOR_LOAD_IN_PROGRESS = 14
OUT = SyncState.OUT_OF_SYNC


@dataclass(eq=False)
class Asked:
    """A commit that is not answered."""

    api_key: ApiKey
    group: str
    offset: int

    @property
    def partition(self) -> int:
        return partition_of(self.group, PARTITIONS)


class Scene:
    def __init__(self, seed: int, degrade_ms: int = 0, strict: bool = False) -> None:
        self.random = random.Random(seed)
        self.three = Three(self.random)
        self.three.a.add_topic("local-t").partitions[0].write_values(*[b"x"] * RECORDS)
        self.partitions = self.three.a.add_topic(OFFSETS_TOPIC, PARTITIONS).partitions
        for prefix in ("any-", "all-"):
            self.three.lead_groups(prefix)
        consistency = Consistency("strict" if strict else "available")
        self.demand("any-", confirm=ANY_1, consistency=consistency)
        self.demand("all-", degrade_after_ms=degrade_ms, consistency=consistency)
        self.asked: set[Asked] = set()
        self.position = dict.fromkeys(GROUPS, 0)
        self.acked = dict.fromkeys(GROUPS, 0)
        self.acks: list[tuple[float, str, int]] = []
        """(When, which group, its committed offset) of each ack."""
        self.not_yet = 0
        self.wrong: list[str] = []

    @property
    def a(self) -> End | None:
        return self.three.ends.get("A")

    def demand(self, prefix: str, **what: Any) -> None:
        self.three.controls["A"].apply(AlterDemands(ResourceType.CONSUMER_GROUP, prefix, **what))

    def mode(self, mode: LinkMode, targets: str = "BC") -> None:
        for target in targets:
            self.three.controls["A"].apply(AlterLink(LINKS[target], mode=mode))

    def record(self, target: str, partition: int) -> SyncRecord | None:
        return self.three.controls["A"].state.sync_records.get(LINKS[target], {}).get((OFFSETS_TOPIC, partition))

    def has(self, target: str, group: str) -> int:
        """Where a target's coordinator has a group."""
        found = self.three.targets[target].offsets.get(f"far-{group}", {}).get(("remote-t", 0))
        return found.offset if found is not None else 0

    # ---- clients ----

    async def commit(self, group: str | None = None, transactional: bool | None = None) -> Asked | None:
        """A client's request: its coordinator has it at once, and its answer goes by way of A's proxy."""
        if self.a is None:
            return None
        group = self.random.choice(GROUPS) if group is None else group
        transactional = self.random.random() < 0.4 if transactional is None else transactional
        api_key = ApiKey.TXN_OFFSET_COMMIT if transactional else ApiKey.OFFSET_COMMIT
        version = VERSIONS[api_key]
        offset = self.position[group] = min(RECORDS, self.position[group] + 1)
        entry = {"name": PLACE[0], "partitions": [{"partition_index": PLACE[1], "committed_offset": offset}]}
        body = build(schema.request_type(api_key, version), {"group_id": group, "topics": [entry]})
        frame = encode_request(body, 1, "client")
        request = Request(frame, True, api_key, version, 1, simulated_now(), Client(1, "client", 1))
        end = self.a
        verdict = end.sync_confirmer.commits.on_commit(request)
        if isinstance(verdict, Hold):
            verdict = await verdict.verdict
        asked = Asked(api_key, group, offset)
        log = self.partitions[asked.partition]
        log.write(offsets_batch(log.end, [group_made(group), commit(group, PLACE[0], offset)]))
        if not isinstance(verdict, Replace) or verdict.on_response is None:
            assert verdict is None
            self.ack(asked)
            return asked
        said = {"topics": [{"name": PLACE[0], "partitions": [{"partition_index": PLACE[1], "error_code": 0}]}]}
        held = verdict.on_response(encode_response(build(schema.response_type(api_key, version), said), 1))
        if not isinstance(held, Gate):
            self.answered(asked, held)
        elif self.a is end:
            self.asked.add(asked)
            if held.take(lambda: self.opened(asked, held)):
                self.opened(asked, held)
        return asked

    def opened(self, asked: Asked, gate: Gate) -> None:
        if asked in self.asked:  # else its client lost the connection
            self.asked.discard(asked)
            self.answered(asked, gate._frame or b"")

    def answered(self, asked: Asked, frame: bytes) -> None:
        _, answer = decode_response(asked.api_key, VERSIONS[asked.api_key], frame)
        found: Any = answer
        code = int(found.topics[0].partitions[0].error_code)
        if code == 0:
            self.ack(asked)
        elif code == COORDINATOR_LOAD_IN_PROGRESS:
            self.not_yet += 1
        else:
            self.wrong.append(f"answered {code}")

    def ack(self, asked: Asked) -> None:
        """An ack goes out now: so many have it, of those that it has to wait for."""
        demands = self.three.controls["A"].state.lookup.demands(ResourceType.CONSUMER_GROUP, asked.group)
        waits = asked.api_key is ApiKey.TXN_OFFSET_COMMIT or demands.strict
        records = {target: found for target in LINKS if (found := self.record(target, asked.partition)) is not None}
        in_sync = [target for target, record in records.items() if record.state is not OUT]
        both = [
            target for target, record in records.items() if record.state is not OUT or not is_degraded(demands, record)
        ]
        for targets in (in_sync, both) if waits else (in_sync,):
            count = min(demands.confirm.count or len(targets), len(targets))
            having = [target for target in targets if self.has(target, asked.group) >= asked.offset]
            if len(having) < count:
                self.wrong.append(f"{asked} is acked, {having} have it, of {targets} {count} must: {demands}")
        self.acked[asked.group] = max(self.acked[asked.group], asked.offset)
        self.acks.append((TIMESTAMP + simulated_now() * 1000, asked.group, asked.offset))

    # ---- what must hold ----

    def holds(self, terms: AckTerms, target: str, group: str, offset: int) -> bool:
        """Whether what a target says of a group's commits up to a committed offset is so."""
        said = [each for each, link in LINKS.items() if link in terms.links] or [target]
        return sum(self.has(each, group) >= offset for each in said) >= (terms.count or 1)

    def check(self) -> None:
        assert not self.wrong, self.wrong[0]
        for target, link in LINKS.items():
            b = self.three.ends.get(target)
            claims = self.three.controls[target].state.group_claims
            for group, acked in self.acked.items():
                partition = partition_of(group, PARTITIONS)
                lease = b.sync_leases.groups.lease(link, partition) if b is not None else None
                if lease is not None:
                    terms = lease.terms.get("far-" + group[:4], PLAIN_TERMS)
                    assert self.holds(terms, target, group, acked), f"{target}, {group}: {acked}, {lease}"
                claim = claims.get((link, partition))
                if claim is not None:
                    acks = (offset for at, which, offset in self.acks if which == group and at <= claim.until_ms)
                    terms, offset = claim.terms_of(f"far-{group}"), max(acks, default=0)
                    assert self.holds(terms, target, group, offset), f"{target}, {group}: {offset}, {claim}"

    # ---- what happens ----

    async def fault(self) -> None:
        what = self.random.choice(
            ("cut", "cut", "kill A", "kill", "stuck", "control", "mode", "confirm", "degrade", "false", "leader")
        )
        target, prefix = self.random.choice("BC"), self.random.choice(("any-", "all-"))
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
        elif what == "stuck":
            self.three.targets[target].coordinator_trouble = self.random.choice((0.0, 0.3, 1.0))
        elif what == "control":
            self.three.controls["A"].trouble = self.random.choice((0.0, 0.5))
        elif what == "mode":
            self.mode(self.random.choice((LinkMode.ASYNCHRONOUS, LinkMode.SYNCHRONOUS)), target)
        elif what == "false":
            partition = self.random.randrange(PARTITIONS)
            falsely_out_of_sync(self.three.controls["A"], LINKS[target], OFFSETS_TOPIC, partition)
        elif what == "confirm":
            self.demand(prefix, confirm=self.random.choice((ALL, ANY_1)))
        elif what == "leader":
            self.random.choice(self.partitions).move(self.random.choice(self.three.a.brokers))
        else:
            self.demand(prefix, degrade_after_ms=self.random.choice((0, 2_000, 20_000)))

    def in_sync(self) -> bool:
        return self.three.holds(OFFSETS_TOPIC, PARTITIONS)() and all(
            (b := self.three.ends.get(target)) is not None
            and all(b.sync_leases.groups.lease(link, partition) is not None for partition in range(PARTITIONS))
            for target, link in LINKS.items()
        )

    def join_all(self, targets: str = "BC") -> None:
        for target in targets:
            self.three.join(target)

    async def begin(self) -> None:
        three = self.three
        three.start()
        self.join_all()
        await three.until("copied", three.all_equal)
        self.mode(LinkMode.SYNCHRONOUS)
        await three.until("In-Sync", self.in_sync)
        await asyncio.sleep(2)  # what this process may have promised before is over

    async def run(self) -> None:
        three = self.three
        await self.begin()
        for _ in range(self.random.randint(2, 7)):
            await self.fault()
            until = simulated_now() + self.random.uniform(0, self.random.choice((0.3, 3.0, 20.0)))
            joins = self.random.choice(("B", "C", "BC", ""))
            while simulated_now() < until:
                if self.random.random() < 0.7:
                    await self.commit()
                self.check()
                await asyncio.sleep(self.random.uniform(0.001, 0.2))
                if self.random.random() < 0.1:
                    self.join_all(joins)
        three.controls["A"].trouble = 0.0
        for cluster in three.targets.values():
            cluster.coordinator_trouble = 0.0
        self.mode(LinkMode.SYNCHRONOUS)
        self.join_all()
        await three.until("In-Sync again", lambda: self.check() or self.in_sync())
        await three.until("all is answered", lambda: self.check() or not self.asked)
        for record in (self.record(target, partition) for target in LINKS for partition in range(PARTITIONS)):
            assert record is not None
            assert (record.state, record.degraded) == (SyncState.IN_SYNC, None)
        for _ in range(20):
            await self.commit()
        began = simulated_now()
        await three.until("all is acked", lambda: self.check() or not self.asked)
        assert simulated_now() - began < 3
        for target in LINKS:
            three.cut_off(target)
        await three.until("claimed", lambda: all(three.controls[target].state.group_claims for target in LINKS))
        self.check()
        await three.stop()


@pytest.mark.parametrize("seed", seeds(15))
def test_who_must_have_what_is_acked_has_it_and_no_claim_is_false(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_simulated(Scene(seed, (0, 5_000)[seed % 2], strict=seed % 5 == 4).run())


@pytest.mark.parametrize("fault", ["cut", "stuck"])
@pytest.mark.parametrize("seed", quarters(range(4)))
def test_one_of_a_set_that_stands_still_delays_no_commit_and_leaves_by_its_own_lag(
    seed: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        scene = Scene(seed)
        await scene.begin()
        three = scene.three
        if fault == "cut":
            three.cut_off("C")
        else:
            three.c.coordinator_trouble = 1.0
        lost_at, left_at = simulated_now(), 0.0
        while simulated_now() - lost_at < 25:
            sent_at = simulated_now()
            await scene.commit("any-0", transactional=scene.random.random() < 0.5)
            await three.until("acked", lambda: not scene.asked)
            assert simulated_now() - sent_at < 0.5, f"at {simulated_now() - lost_at}"
            assert not scene.not_yet
            scene.check()
            record = scene.record("C", partition_of("any-0", PARTITIONS))
            if not left_at and record is not None and record.state is OUT:
                left_at = simulated_now() - lost_at
            await asyncio.sleep(0.05)
        assert 9 < left_at < 17
        three.c.coordinator_trouble = 0.0
        scene.join_all()
        await three.until("In-Sync again", scene.in_sync)
        scene.check()
        await three.stop()

    run_simulated(main())


@pytest.mark.parametrize("seed", quarters(range(3)))
@pytest.mark.parametrize("strict", [False, True])
def test_commits_go_without_a_link_after_the_time_of_their_groups(
    seed: int, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``any-*`` wait for as long as it takes here; ``all-*`` of the same partition do not."""

    async def main() -> None:
        scene = Scene(seed, 20_000, strict)
        scene.demand("any-", confirm=ALL)
        await scene.begin()
        three = scene.three
        for_ever = next(group for group in GROUPS if group.startswith("any-") and partition_of(group, PARTITIONS) == 0)
        for_a_time = next(
            group for group in GROUPS if group.startswith("all-") and partition_of(group, PARTITIONS) == 0
        )
        for _ in range(2):
            three.cut_off("C")
            lost_at, acked = simulated_now(), scene.acked[for_a_time]
            while scene.acked[for_a_time] == acked:
                await scene.commit(for_a_time, transactional=not strict)
                await asyncio.sleep(0.2)
                scene.check()
                assert simulated_now() - lost_at < 60
            assert 30 < simulated_now() - lost_at < 40
            record = scene.record("C", 0)
            assert record is not None
            assert record.degraded is not None
            assert (record.state, record.degraded.after_ms) == (OUT, 20_000)
            waiting = await scene.commit(for_ever, transactional=not strict)
            await asyncio.sleep(2)
            assert waiting in scene.asked
            scene.join_all()
            await three.until("In-Sync again", scene.in_sync)
            record = scene.record("C", 0)
            assert record is not None
            assert record.degraded is None
        await three.stop()

    run_simulated(main())
