"""Transactions over two synchronous links of which one is enough, simulated: at any moment the source may be gone.

Then what each target says of acks is looked at as who fails over would: of the clusters that it names, the one whose
log ends last has all that was acked by then. And no transaction is torn on a side that was In-Sync and has its records.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, NamedTuple

import pytest
from sim.test_sync_transactions import PARTITIONS, REMOTE, STATE_PARTITIONS, TOPIC, App, Done, outcome_of
from support.fake_cluster import run_simulated
from support.partition_log import TIMESTAMP
from support.replicas import INDEX, LINK_ID, End
from support.seeds import seeds
from support.three import INDEX_OF_C, LINKS, SECOND_ID, Three

from isthmus_control.commands import AlterDemands, AlterLink
from isthmus_control.demands import Confirm
from isthmus_control.model import LinkMode, ResourceType, SyncState
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC

LINK_IDS = {"B": LINK_ID, "C": SECOND_ID}
INDEXES = {"B": INDEX["B"], "C": INDEX_OF_C}
ANY_1 = Confirm(1, tuple(sorted(LINKS.values())))


class Faults(NamedTuple):
    """What happens before the source is gone."""

    kinds: tuple[str, ...]
    least: int
    most: int
    mended: float
    """How often all that was cut off is there again after one."""
    across_kills: bool
    """Whether what was decided before the source's proxy was killed is looked at, too, for being torn."""


FEW = Faults(("cut", "cut", "stuck", "stuck", "kill", "kill A", "slow", "leader"), 0, 5, 0.6, False)
MANY = Faults(("cut", "stuck", "kill A", "kill A", "leader"), 2, 8, 0.4, True)
"""The source's proxy starts again and again, while a target lacks what was there before."""


class Scene:
    """What ``App`` uses of its scene, and two targets."""

    def __init__(self, seed: int, faults: Faults = FEW) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.three = Three(self.random)
        self.partitions = self.three.a.add_topic(TOPIC, PARTITIONS).partitions
        self.state = self.three.a.add_topic(TRANSACTION_TOPIC, STATE_PARTITIONS).partitions
        self.failed: list[BaseException] = []
        self.tasks = Tasks("sources", Supervision(), lambda name, error: self.failed.append(error))
        self.done: list[Done] = []
        self.numbers = 0
        self.kills = 0
        self.empty, self.given_up = 0.05, 0.2
        """How often a transaction has nothing in a partition that it lists, and how often it is not committed."""
        degrade_ms = self.random.choice((0, 0, 3_000))
        demands = AlterDemands(ResourceType.TOPIC, "local-", confirm=ANY_1, degrade_after_ms=degrade_ms)
        self.three.controls["A"].apply(demands)
        self.out = dict.fromkeys(LINKS, 0)
        """How often a target has left."""

    @property
    def a(self) -> End | None:
        return self.three.ends.get("A")

    def in_sync(self) -> Any:
        """Targets that are in sync, each with how often it had left before."""
        leader = self.a.sync_confirmer if self.a is not None else None
        return {
            target: self.out[target]
            for target, link in LINKS.items()
            if leader is not None
            and all(leader.partitions.in_sync(LinkPartition(link, TOPIC, partition)) for partition in range(PARTITIONS))
        }

    async def answered(self, ask: Any) -> bytes:
        """What a client gets in the end: it asks again when the proxy dies."""
        while True:
            end = self.a
            found = ask(end) if end is not None else None
            if isinstance(found, bytes):
                return found
            while found is not None and self.a is end:
                if found._frame is not None:
                    return bytes(found._frame)
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)

    def note_who_left(self) -> None:
        """Count, whenever the control log changes."""
        known = dict.fromkeys(LINKS, False)

        def changed(state: Any) -> None:
            for target, link in LINKS.items():
                records = state.sync_records.get(link, {}).values()
                left = any(record.state is SyncState.OUT_OF_SYNC for record in records) or not records
                self.out[target] += left and not known[target]
                known[target] = left

        self.three.controls["A"].subscribe(changed)

    async def fault(self) -> None:
        what = self.random.choice(self.faults.kinds)
        target = self.random.choice("BC")
        if what == "cut":
            self.three.cut_off(target)
        elif what == "stuck":
            self.three.targets[target].down ^= {1}
        elif what == "leader":  # its broker died
            partition = self.random.choice((*self.partitions, *self.state))
            if partition.leader >= 0:
                asyncio.get_running_loop().call_later(self.random.choice((0.5, 9.0)), partition.move, partition.leader)
                partition.move(-1)
        elif what == "slow":
            self.three.targets[target].trouble = self.random.choice((0.0, 0.1))
        elif what == "kill":
            await self.three.stop(target)
            await asyncio.sleep(self.random.choice((0.01, 3.0)))
            self.three.start(target)
        else:
            self.kills += 1
            await self.three.stop("A")
            await asyncio.sleep(self.random.choice((0.01, 3.0)))
            self.three.start("A")
            self.note_who_left()
            for each in LINKS:
                self.three.join(each)

    async def run(self) -> None:
        three = self.three
        three.start()
        self.note_who_left()
        for target in LINKS:
            three.join(target)
        await three.until("copied", three.all_equal)
        for link in LINKS.values():
            three.controls["A"].apply(AlterLink(link, mode=LinkMode.SYNCHRONOUS))
        await three.until("In-Sync", three.holds(TOPIC, PARTITIONS))
        for number in range(3):
            app: Any = App(self, number)  # type: ignore[arg-type]
            self.tasks.start(f"app-{number}", app.run())
        for _ in range(self.random.randint(self.faults.least, self.faults.most)):
            await asyncio.sleep(self.random.uniform(0, self.random.choice((0.1, 2.0, 15.0))))
            await self.fault()
            await asyncio.sleep(self.random.choice((0.0, 1.0, 15.0)))
            if self.random.random() < self.faults.mended:
                for target, cluster in three.targets.items():
                    cluster.down.clear()
                    three.join(target)
        await asyncio.sleep(self.random.uniform(0, self.random.choice((0.05, 1.0, 10.0))))
        # The source is gone, between any two events.
        await self.tasks.close()
        await three.stop("A")
        for cluster in three.targets.values():
            cluster.down.clear()
            cluster.trouble = 0.0
        await asyncio.sleep(30)  # what is on the way at the other sides lands, and what was leased is recorded
        assert not self.failed
        await self.look()
        await three.stop("BC")

    async def look(self) -> None:
        outcomes = {
            target: [
                outcome_of(partition, index, stored, INDEXES[target])
                for index, partition in enumerate(cluster.found[REMOTE].partitions)
            ]
            for target, cluster in self.three.targets.items()
            for stored in [await self.three.ends[target].store.read(LINK_IDS[target])]
        }
        for done in self.done:
            value = b"%d" % done.number
            there = {
                target: {index for index in done.written if found[index].get(value) is True}
                for target, found in outcomes.items()
            }
            guarded: Any = done.guarded
            for target in LINKS:
                assert done.committed or not there[target], f"{done} was not committed, and is in {there}"
                if not all(value in outcomes[target][index] for index in done.written):
                    continue  # what the other one confirmed is not here yet
                is_looked_at = done.kills == self.kills or self.faults.across_kills
                if is_looked_at and guarded and guarded.get(target) == self.out[target]:
                    assert there[target] in (set(), done.written), f"{done} is torn at {target}: {there}"
            if done.acked:
                self.look_at_claims(done, there)

    def look_at_claims(self, done: Done, there: dict[str, set[int]]) -> None:
        """Of the clusters that a claim names, all whose log ends last have what was acked by then."""
        for target in LINKS:
            for (_, partition), claim in self.three.controls[target].state.claims.items():
                if partition not in done.written or TIMESTAMP + done.acked_at * 1000 > claim.until_ms:
                    continue
                named = [each for each, link in LINKS.items() if link in claim.terms.links] or [target]
                ends = {each: self.three.has(each, REMOTE, partition) for each in named}
                last = [each for each, end in ends.items() if end == max(ends.values())]
                missing = [each for each in last if partition not in there[each]]
                assert not missing, (
                    f"{done} was acked, and is not in {partition} of {missing}: {there}, {ends}, {claim}"
                )


@pytest.mark.parametrize("seed", seeds(8))
def test_who_goes_by_a_claim_finds_every_commit_that_was_acked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_simulated(Scene(seed).run())


@pytest.mark.parametrize("seed", seeds(2))
def test_nothing_that_was_aborted_counts_however_often_the_source_starts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_simulated(Scene(seed, MANY).run())
