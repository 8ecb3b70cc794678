"""Commits over a synchronous link, simulated: while B may say In-Sync, its coordinator has whatever A acked.

Connections are cut, proxies killed, leaders move, coordinators and the control log fail.
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
from support.replicas import LINK, End, Replicas, falsely_out_of_sync
from support.seeds import seeds

from isthmus_control.commands import AlterLink, AttachNamespace, DetachNamespace
from isthmus_control.model import LinkMode, ResourceType, Role
from isthmus_plugins.api import Client, Gate, Hold, Replace, Request
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.expiring_leases import LEASE_S
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import decode_response, encode_request, encode_response
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, partition_of
from isthmus_protocol.schema import ApiKey

VERSION = 8
PARTITIONS = 2
GROUPS = ("app-1", "app-2", "app-3")
PLACE = ("local-t", 0)
RECORDS = 1000
COORDINATOR_LOAD_IN_PROGRESS = 14


@dataclass
class Asked:
    """A commit that is not answered."""

    group: str
    offset: int
    gate: Gate
    at: float


class Scene:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.replicas = Replicas(self.random)
        self.replicas.attach_groups()
        self.replicas.a.add_topic("local-t").partitions[0].write_values(*[b"x"] * RECORDS)
        self.partitions = self.replicas.a.add_topic(OFFSETS_TOPIC, PARTITIONS).partitions
        self.asked: list[Asked] = []
        self.acked = dict.fromkeys(GROUPS, 0)
        self.acks: list[tuple[float, str, int]] = []
        """(When, by B's clock, which group, and its committed offset) of each ack."""
        self.position = dict.fromkeys(GROUPS, 0)
        self.not_yet = 0
        self.powerless = self.lost_power = False
        self.before_loss: End | None = None
        """B's process when it lost commits last."""

    @property
    def a(self) -> End | None:
        return self.replicas.ends.get("A")

    def says_in_sync(self, partition: int) -> bool:
        b = self.replicas.ends.get("B")
        return b is not None and b.sync_leases.groups.lease(LINK, partition) is not None

    def in_sync(self) -> bool:
        keys = [LinkPartition(LINK, OFFSETS_TOPIC, partition) for partition in range(PARTITIONS)]
        holds = self.a is not None and all(self.a.sync_confirmer.partitions.in_sync(key) for key in keys)
        return holds and all(self.says_in_sync(partition) for partition in range(PARTITIONS))

    def mode(self, mode: LinkMode) -> None:
        self.replicas.controls["A"].apply(AlterLink(LINK, mode=mode))

    async def commit(self, group: str | None = None) -> None:
        """A client's request: its coordinator has it at once, and its answer goes by way of A's proxy."""
        if self.a is None:
            return
        group = group or self.random.choice(GROUPS)
        offset = self.position[group] = min(RECORDS, self.position[group] + 1)
        entry = {"name": PLACE[0], "partitions": [{"partition_index": PLACE[1], "committed_offset": offset}]}
        body = build(schema.request_type(ApiKey.OFFSET_COMMIT, VERSION), {"group_id": group, "topics": [entry]})
        frame = encode_request(body, 1, "client")
        now = simulated_now()
        request = Request(frame, True, ApiKey.OFFSET_COMMIT, VERSION, 1, now, Client(1, "client", 1))
        verdict = self.a.sync_confirmer.commits.on_commit(request)
        if isinstance(verdict, Hold):
            verdict = await verdict.verdict
        partition = self.partitions[partition_of(group, PARTITIONS)]
        partition.write(offsets_batch(partition.end, [group_made(group), commit(group, PLACE[0], offset)]))
        if not isinstance(verdict, Replace) or verdict.on_response is None:
            assert verdict is None
            self.ack(group, offset)
            return
        said = {"topics": [{"name": PLACE[0], "partitions": [{"partition_index": PLACE[1], "error_code": 0}]}]}
        answer = encode_response(build(schema.response_type(ApiKey.OFFSET_COMMIT, VERSION), said), 1)
        held = verdict.on_response(answer)
        if isinstance(held, Gate):
            self.asked.append(Asked(group, offset, held, now))
        else:
            self.answered(group, offset, held)

    def answered(self, group: str, offset: int, frame: bytes) -> None:
        _, answer = decode_response(ApiKey.OFFSET_COMMIT, VERSION, frame)
        found: Any = answer
        code = int(found.topics[0].partitions[0].error_code)
        if code == 0:
            self.ack(group, offset)
        else:
            assert code == COORDINATOR_LOAD_IN_PROGRESS
            self.not_yet += 1

    def ack(self, group: str, offset: int) -> None:
        self.acked[group] = max(self.acked[group], offset)
        self.acks.append((TIMESTAMP + simulated_now() * 1000, group, offset))
        self.check()

    def look(self) -> None:
        """See which answers went out."""
        still = []
        for each in self.asked:
            frame = each.gate._frame
            if frame is None:
                assert simulated_now() - each.at < 4, "heartbeats wait behind it"
                still.append(each)
                continue
            self.answered(each.group, each.offset, frame)
        self.asked = still
        self.check()

    def check(self) -> None:
        """What B says is so."""
        for group, acked in self.acked.items():
            if acked and not self.powerless and self.says_in_sync(partition_of(group, PARTITIONS)):
                has = self.replicas.b.offsets.get(f"far-{group}", {}).get(("remote-t", 0))
                assert has is not None, f"In-Sync, and {acked} of {group} was acked"
                assert has.offset >= acked, f"In-Sync at {has}, and {acked} of {group} was acked"

    def check_claims(self) -> None:
        """What B's control log says of leases that ran out is so, whatever became of B's process."""
        for (_, partition), claim in self.replicas.controls["B"].state.group_claims.items():
            for at, group, offset in self.acks:
                if partition_of(group, PARTITIONS) == partition and at <= claim.until_ms:
                    has = self.replicas.b.offsets.get(f"far-{group}", {}).get(("remote-t", 0))
                    if self.says_lost(f"far-{group}"):
                        continue
                    assert has is not None, f"In-Sync until {claim.until_ms}, and {offset} of {group} was acked"
                    assert has.offset >= offset, f"In-Sync until {claim.until_ms}: {has}, and {offset} was acked"

    def says_lost(self, group: str) -> bool:
        """Whether nothing is claimed of a group, since its coordinator lost what it had. A proxy that was started since
        knows nothing of that."""
        b = self.replicas.ends.get("B")
        if b is None or b is not self.before_loss:
            return self.lost_power
        return b.sync_leases.lost_offsets(LINK, group, self.replicas.b.offsets.get(group, {}))

    async def fault(self) -> str:
        what = self.random.choice(
            ("cut", "kill A", "kill B", "stuck", "control", "mode", "leader", "false", "power", "nothing")
        )
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
        elif what == "stuck":
            self.replicas.b.coordinator_trouble = self.random.choice((0.0, 0.3, 1.0))
        elif what == "control":
            self.replicas.controls["A"].trouble = self.random.choice((0.0, 0.5))
        elif what == "mode":
            self.mode(self.random.choice((LinkMode.ASYNCHRONOUS, LinkMode.SYNCHRONOUS)))
        elif what == "leader":
            self.random.choice(self.partitions).move(self.random.choice(self.replicas.a.brokers))
        elif what == "false":
            partition = self.random.randrange(PARTITIONS)
            falsely_out_of_sync(self.replicas.controls["A"], LINK, OFFSETS_TOPIC, partition)
        return str(what)

    async def lose_power(self) -> None:
        """B's coordinators lose what they had not flushed; they take longer to start than leases run."""
        trouble, b = self.replicas.b.coordinator_trouble, self.replicas.b
        self.powerless = self.lost_power = True
        self.before_loss = self.replicas.ends.get("B")
        b.coordinator_trouble = 1.0
        b.brokers_changed_at = simulated_now()
        until = simulated_now() + self.random.uniform(LEASE_S + 2.5, 8)  # none that was on its way lands later
        while simulated_now() < until:
            await self.commit()
            self.look()
            await asyncio.sleep(self.random.uniform(0.001, 0.2))
        b.lose_commits(lambda: self.random.choice((0, 1, 3, 9)))
        b.coordinator_trouble = trouble
        self.powerless = False

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
            fault = await self.fault()
            quiet = self.random.choice((0.3, 3.0, 20.0))
            until = simulated_now() + self.random.uniform(0, quiet)
            while simulated_now() < until:
                if self.random.random() < 0.7:
                    await self.commit()
                self.look()
                await asyncio.sleep(self.random.uniform(0.001, 0.2))
            self.check_claims()
            await self.connect_again()
        replicas.controls["A"].trouble = 0.0
        replicas.b.coordinator_trouble = 0.0
        self.mode(LinkMode.SYNCHRONOUS)
        await self.connect_again()
        await replicas.until("all is answered", lambda: self.look() or not self.asked)
        await replicas.until("In-Sync again", self.in_sync)
        before, refused = sum(self.acked.values()), self.not_yet
        for _ in range(20):
            await self.commit()
        assert self.asked, "in sync, nothing is acked at once"
        began = simulated_now()
        await replicas.until("all is acked", lambda: self.look() or not self.asked)
        assert simulated_now() - began < 3
        assert sum(self.acked.values()) + self.not_yet - refused >= before + 20
        assert self.not_yet == refused or fault == "leader", "whoever has come to lead tells"
        await asyncio.sleep(2)  # a lease of before its leader moved is over
        await replicas.until("In-Sync still", self.in_sync)
        replicas.cut()
        began_ms = TIMESTAMP + simulated_now() * 1000
        await replicas.until("claimed", lambda: self.claimed_since(began_ms))
        self.check_claims()
        await replicas.stop()

    def claimed_since(self, at_ms: float) -> bool:
        claims = self.replicas.controls["B"].state.group_claims
        return len(claims) == PARTITIONS and all(each.until_ms > at_ms for each in claims.values())


@pytest.mark.parametrize("seed", seeds(40))
def test_what_is_in_sync_has_all_that_was_acked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_simulated(Scene(seed).run())


def test_nothing_is_claimed_of_a_namespace_that_the_source_does_not_lead_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        replicas, group = scene.replicas, ResourceType.CONSUMER_GROUP
        replicas.start()
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        scene.mode(LinkMode.SYNCHRONOUS)
        await replicas.until("In-Sync", scene.in_sync)
        replicas.controls["B"].apply(AttachNamespace(LINK, group, "far-x-", "x-", Role.FOLLOWER, create_missing=True))
        for _ in range(50):  # the leases of before are about other groups, and so are those that A grants still
            assert not any(scene.says_in_sync(partition) for partition in range(PARTITIONS))
            await asyncio.sleep(0.1)
        replicas.controls["A"].apply(AttachNamespace(LINK, group, "x-", "far-x-", Role.LEADER, create_missing=True))
        await replicas.until("In-Sync with it", scene.in_sync)
        await replicas.stop()

    run_simulated(work(Scene(1)))


@pytest.mark.parametrize("others", [True, False])
def test_commits_in_a_namespace_that_was_detached_wait_until_its_leases_are_over(
    others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``others``: whether the link goes on to lead other groups."""

    async def work(scene: Scene) -> None:
        replicas, group = scene.replicas, ResourceType.CONSUMER_GROUP
        if others:
            replicas.controls["A"].apply(AttachNamespace(LINK, group, "x-", "far-x-", Role.LEADER, create_missing=True))
            replicas.controls["B"].apply(
                AttachNamespace(LINK, group, "far-x-", "x-", Role.FOLLOWER, create_missing=True)
            )
        replicas.start()
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        scene.mode(LinkMode.SYNCHRONOUS)
        await replicas.until("In-Sync", scene.in_sync)
        for _ in range(5):
            await scene.commit()
        replicas.controls["A"].apply(DetachNamespace(LINK, group, "app-"))
        began = simulated_now()
        while simulated_now() - began < 1:  # B, which has not heard of it, may say In-Sync
            await scene.commit()
            scene.look()
            await asyncio.sleep(0.05)
        assert scene.not_yet, "clients commit again"
        await asyncio.sleep(2)
        scene.look()
        assert not scene.asked
        refused = scene.not_yet
        for each in GROUPS:
            await scene.commit(each)
        assert (scene.asked, scene.not_yet) == ([], refused)
        assert scene.acked == scene.position
        await replicas.stop()

    run_simulated(work(Scene(1)))
