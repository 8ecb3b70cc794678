"""A seeded simulation of proxies on a control topic that is lost in every way, with what operators do about it.

Whole control logs run on a model of a broker and a simulated clock. Proxies claim, command, crash and start again, some
with an empty disk; the broker goes away, loses power and the ends of its log, or its topic is deleted; an operator
repairs it from what a proxy remembers, or accepts it as it is.

Records say what their writers had applied, and with odd seeds they are signed: then a stranger's do not count.

- Nobody stops vouching while nothing was lost.
- What somebody vouched for for long enough to be anchored, or who ever started, is never vouched against: no proxy
  vouches for a log without a command that was anchored, until an operator has accepted that.
- When all is quiet, those who vouch agree, and after a repair everybody vouches again.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from support.control_cluster import Client, ControlCluster, Disk, Group
from support.fake_cluster import LoopClock, run_simulated, simulated_now
from support.seeds import seeds

from isthmus import anchor_keeper, anchor_places, control_log, control_repair, control_start, control_topic
from isthmus.control_log import ControlLog, ControlLogHalted, ControlLogLost, LeaseSpec
from isthmus.control_repair import ControlRepair, RepairRefused, Step
from isthmus.errors import PeerFault
from isthmus.lease_clocks import Clocks
from isthmus_control.commands import Command, CreateNamespace, DeleteNamespace, RaiseLevel, encode
from isthmus_control.exports import Export
from isthmus_control.levels import KNOWN_LEVEL
from isthmus_control.model import BrokerClaim, ResourceType
from isthmus_control.outcome import Accepted
from isthmus_control.sealing import Secret
from isthmus_control.signing import Signer
from isthmus_plugins.tasks import Supervision, Tasks

T = TypeVar("T")

PROXIES = 3
LEASE_MS = 9_000
KIND = ResourceType.TOPIC
QUIET_S = 40.0
AGAIN_S = 5.0
"""After this a proxy that could not start tries again, and reads all of the log."""


class Process:
    """A proxy that its supervisor starts again, with its disk."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.disk = Disk(str(number))
        self.log: ControlLog | None = None
        self.client = Client(world.cluster)
        self.waiting = ""
        """Why it did not start when that was tried last."""

    async def run(self) -> None:
        while True:
            ended = asyncio.Event()
            places = [self.disk, Group(self.world.cluster)]
            client: Any = self.client
            world_signer = self.world.signer
            log = ControlLog(
                client,
                f"p{self.number}",
                supervision=Supervision(),
                on_failure=lambda error, ended=ended: ended.set(),  # type: ignore[misc]
                clocks=lambda: Clocks(simulated_now(), simulated_now()),
                places=places,
                signer=world_signer,
            )
            try:
                while True:
                    try:
                        await log.start()
                        break
                    except ControlLogLost as lost:
                        self.waiting = str(lost)
                        await asyncio.sleep(AGAIN_S)
                    except PeerFault as fault:
                        self.waiting = str(fault)
                        await asyncio.sleep(AGAIN_S)
                self._check_start(log)
                self.log = log
                claims = (BrokerClaim(self.number, "h", 9000),)
                tasks = Tasks("process", Supervision())
                tasks.start("claim", self._claim(log, LeaseSpec(claims, lease_ms=LEASE_MS, version="1")))
                try:
                    await ended.wait()
                finally:
                    await tasks.close()
            finally:
                self.log = None
                await log._tasks.close()  # as kill -9 does: nothing is said to anybody

    def _check_start(self, log: ControlLog) -> None:
        """What its disk knew is there, or was given up: before it vouches for anything."""
        known = self.disk.kept.get(self.world.cluster.cluster_id)
        if known is not None and known.generation >= log.state.generation:
            assert known.topic_id == str(log.topic_id)
            assert known.offset < len(self.world.cluster.log), "it is there, read or not"
            assert log.recent.digest_at(known.offset) in (None, known.digest)

    async def _claim(self, log: ControlLog, lease: LeaseSpec) -> None:
        while True:
            try:
                await log.claim(lease)
                return
            except ControlLogHalted:
                return
            except PeerFault:
                await asyncio.sleep(0.5)

    async def command(self) -> None:
        """Something that somebody counts on."""
        log = self.log
        if log is None or not log.vouching:
            return
        prefix = f"p{self.number}-{self.world.random.getrandbits(40)}-"
        try:
            outcome = await log.append(CreateNamespace(KIND, prefix, True), timeout_s=5)
        except PeerFault:
            return
        if isinstance(outcome, Accepted):
            self.world.accepted[prefix] = log.state.generation


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.signer = Signer(Secret(b"k" * 32), "A") if seed % 2 else None
        self.cluster = ControlCluster(self.random)
        self.processes = [Process(self, number) for number in range(PROXIES)]
        self.tasks = Tasks("world", Supervision())
        self.running: dict[int, asyncio.Task[None]] = {}
        self.accepted: dict[str, int] = {}
        self.damaged = False
        self.seen: set[str] = set()

    async def raise_level(self) -> None:
        """What an operator does, as soon as somebody vouches."""
        body = RaiseLevel(KNOWN_LEVEL, self.signer.key_id if self.signer is not None else "")
        while True:
            for log in self.logs:
                if log.vouching:
                    try:
                        outcome = await log.append(body, timeout_s=5)
                    except PeerFault:
                        continue
                    if isinstance(outcome, Accepted):
                        return
            await asyncio.sleep(1)

    def intrude(self) -> None:
        """Somebody without the key writes to the topic."""
        if self.signer is None or not self.accepted or not self.logs or not self.logs[0].state.key_id:
            return
        seen = self.random.randrange(len(self.cluster.log))
        prefix = self.random.choice(sorted(self.accepted))
        command = Command(
            str(uuid.UUID(int=self.random.getrandbits(128), version=4)), 1, "p0", seen, DeleteNamespace(KIND, prefix)
        )
        copied = self.random.choice(self.cluster.log)[0]
        self.cluster.log.append((self.random.choice([encode(command, KNOWN_LEVEL), copied]), self.cluster.epoch))
        self.cluster.changed()
        self.seen.add("intruded")

    def start(self, process: Process) -> None:
        self.running[process.number] = self.tasks.start(f"p{process.number}", process.run())

    async def crash(self, process: Process) -> None:
        task = self.running[process.number]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.start(process)

    @property
    def logs(self) -> list[ControlLog]:
        return [each.log for each in self.processes if each.log is not None]

    def check(self) -> None:
        """What is anchored is vouched for, or nothing is: within a lease of a loss that nobody could see yet."""
        if not self.damaged:
            for log in self.logs:
                assert log.halted is None, f"{log.name} halted, and nothing was lost: {log.halted}"

    async def quiet(self) -> None:
        await asyncio.sleep(QUIET_S)
        for task in self.running.values():
            if task.done():
                task.result()  # what went wrong in it

    async def settle(self) -> None:
        self.cluster.up = True
        await self.quiet()
        self.seen |= {log.halted.reason for log in self.logs if log.halted is not None}
        vouching = [log for log in self.logs if log.vouching]
        anchored = [*self.cluster.kept.values(), *(each for one in self.processes for each in one.disk.kept.values())]
        for log in vouching:
            recent = log.recent
            for anchor in anchored:
                if anchor.generation < log.state.generation:
                    continue
                assert anchor.topic_id == str(log.topic_id), f"{log.name} vouches for another topic than {anchor}"
                assert anchor.offset <= log.state.applied_offset + 50
                known = recent.digest_at(anchor.offset)
                assert known in (None, anchor.digest), f"{log.name} vouches against {anchor}"
        for log in vouching[1:]:
            common = min(log.state.applied_offset, vouching[0].state.applied_offset)
            first, second = log.recent.digest_at(common), vouching[0].recent.digest_at(common)
            assert first == second or None in (first, second)
        if not self.damaged:
            assert len(vouching) == PROXIES, [str(log.halted) for log in self.logs]
            names = {key.prefix for key in vouching[0].state.namespaces}
            assert set(self.accepted) <= names

    async def repair(self) -> None:
        """What docs/operations.md says: from the proxy that remembers most, else as it is."""
        exports: list[Export] = [found for log in self.logs if log.halted is not None and (found := log.export())]
        client: Any = Client(self.cluster)
        repair = ControlRepair(client, [Group(self.cluster)], self.signer)
        while True:
            try:
                known = await repair.known()
                if exports:
                    best = max(exports, key=lambda each: (each.generation, each.end))
                    plan = await repair.plan(best, known)
                    self.seen.add(plan.step)
                    await repair.write(plan, best, known, lambda offset: None)
                    remembered = {key.prefix for key in best.replica(self.signer).state.namespaces}
                    self.accepted = {prefix: 0 for prefix in self.accepted if prefix in remembered}
                else:
                    await repair.accept(known)
                    self.seen.add("accepted")
                    self.accepted = {}
                break
            except RepairRefused as refused:
                self.seen.add(refused.code)
                await asyncio.sleep(5)
            except PeerFault:
                await asyncio.sleep(1)
        await self.quiet()
        vouching = [log for log in self.logs if log.vouching]
        if len(vouching) < PROXIES and not any(log.halted is None and not log.vouching for log in self.logs):
            # What was given up is still known somewhere: on a disk that the operator did not look at.
            self.seen.add("given up")
            await repair.accept(await self._known(repair))
            await self.quiet()
            vouching = [log for log in self.logs if log.vouching]
            self.accepted = {}
        assert len(vouching) == PROXIES, [(each.waiting, each.log and each.log.halted) for each in self.processes]
        names = {key.prefix for key in vouching[0].state.namespaces}
        assert set(self.accepted) <= names
        self.damaged = False

    async def _known(self, repair: ControlRepair) -> Any:
        while (known := await repair.known()).unavailable:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        return known

    async def step(self) -> None:
        event = self.random.random()
        process = self.random.choice(self.processes)
        if event < 0.55:
            await process.command()
        elif event < 0.75:
            await asyncio.sleep(self.random.uniform(0, 3))
        elif event < 0.83:
            await self.crash(process)
        elif event < 0.86:
            process.disk.kept.clear()
            await self.crash(process)
        elif event < 0.89:
            self.intrude()
        elif event < 0.93:
            self.cluster.up = False
            await asyncio.sleep(self.random.uniform(0, 5))
            self.cluster.epoch += 1
            self.cluster.up = True
        self.check()

    async def damage(self) -> None:
        """Something is lost, while some proxies go on and others do not."""
        await asyncio.sleep(2)  # so that what was commanded is anchored
        self.damaged = True
        self.cluster.up = False
        if self.random.random() < 0.2:
            for process in self.processes:
                await self.crash(process)
        if self.random.random() < 0.3:
            self.cluster.delete()
        else:
            self.cluster.lose_power(self.random.randint(1, 8))
        await asyncio.sleep(self.random.uniform(0, 4))
        self.cluster.up = True
        for _ in range(self.random.randint(0, 8)):
            if self.random.random() < 0.3:
                await self.crash(self.random.choice(self.processes))
            await asyncio.sleep(self.random.uniform(0, 2))

    async def run(self) -> None:
        for process in self.processes:
            self.start(process)
        try:
            await asyncio.sleep(10)
            for _ in range(3):
                await self.raise_level()
                for _ in range(25):
                    await self.step()
                await self.settle()
                await self.damage()
                await self.settle()
                await self.repair()
        finally:
            await self.tasks.close()


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LoopClock()
    for module in (anchor_keeper, anchor_places, control_log, control_repair, control_start, control_topic):
        monkeypatch.setattr(module, "monotonic", clock.monotonic)
    monkeypatch.setattr(asyncio, "to_thread", here)


async def here(function: Callable[..., T], *arguments: Any) -> T:
    """In place of a thread, whose time does not pass on a simulated clock."""
    return function(*arguments)


def simulate(seed: int) -> World:
    random.seed(seed)  # of back-offs

    async def work() -> World:
        world = World(seed)
        await world.run()
        return world

    return run_simulated(work())


@pytest.mark.parametrize("seed", seeds(4))
def test_nothing_is_vouched_for_that_was_lost(seed: int) -> None:
    simulate(seed)


@pytest.mark.suite("fuzz")
def test_the_simulation_reaches_what_it_is_about() -> None:
    seen: set[str] = set()
    for seed in (2, 4):
        seen |= simulate(seed).seen
    assert seen >= {Step.APPEND, Step.REPLACE, "accepted"}
