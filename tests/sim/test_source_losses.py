"""A source that loses power after it acked In-Sync, simulated: cut or held as is set, never without a trace.

Proxies of either side are killed meanwhile. Cut: what is lost is in salvage files. Held: the target keeps it, until the
operator has it cut or the namespace is detached. Both sides tell it until it is acknowledged, whoever was restarted."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.fake_cluster import run_simulated
from support.partition_log import Partition
from support.replicas import LINK, End, Replicas
from support.seeds import seeds
from support.truncating import TruncatedCluster, salvaged, simulate_truncations

from isthmus_control.commands import (
    AlterDemands,
    AlterLink,
    AttachNamespace,
    DetachNamespace,
    ReleaseSourceLosses,
)
from isthmus_control.demands import Consistency
from isthmus_control.model import LinkMode, OnSourceLoss, ResourceType, Role
from isthmus_control.source_losses import LossState
from isthmus_control.states import PartitionState, ReasonCode
from isthmus_plugins.links import LinkStatus, PartitionStatus
from isthmus_protocol.record_codec import decode_records

TOPIC, REMOTE = "local-t", "remote-t"
FIRST, ACKED = 5, 20
SEEDS = 5


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)


class Scene:
    """A synchronous link with a topic of two partitions, of which the first loses its end at the source."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.replicas = Replicas(self.random, brokers=1)
        source, target = TruncatedCluster(self.random, (1,)), TruncatedCluster(self.random, (1,))
        source.found, target.found = self.replicas.a.found, self.replicas.b.found
        source.on_new_partition = self.replicas.a.on_new_partition
        self.replicas.a, self.replicas.b = source, target
        self.lost = self.random.randint(1, 4)
        self.partitions: list[Partition] = []

    def apply(self, name: str, body: Any) -> None:
        self.replicas.controls[name].apply(body)

    def start(self, which: str) -> None:
        for name in which:
            cluster = self.replicas.a if name == "A" else self.replicas.b
            directory = self.directory if name == "B" else None
            control = self.replicas.controls[name]
            self.replicas.ends[name] = End(cluster, control, data_directory=directory)

    async def begin(self) -> None:
        """Everything is In-Sync, and acked."""
        replicas = self.replicas
        self.partitions = replicas.a.add_topic(TOPIC, 2).partitions
        for partition in self.partitions:
            partition.write_values(*[b"first"] * FIRST)
        self.start("AB")
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        self.apply("A", AlterLink(LINK, mode=LinkMode.SYNCHRONOUS))
        await replicas.until("In-Sync", self.in_sync)
        for index, partition in enumerate(self.partitions):
            for number in range(FIRST, ACKED):
                partition.write_values(b"%d-%d" % (index, number))
        await replicas.until("it has everything", replicas.equal)
        await replicas.until("it is recorded", lambda: len(self.recorded) == 2)

    @property
    def recorded(self) -> Any:
        return replicas_records(self.replicas)

    def in_sync(self) -> bool:
        b = self.replicas.ends["B"]
        return all(b.sync_leases.in_sync(REMOTE, partition) for partition in range(2))

    async def lose_power(self) -> None:
        """The source's only broker, and with it a proxy of either side, or none. It gets others, or nothing, then."""
        replicas = self.replicas
        dies = self.random.choice(("", "A", "B", "AB"))
        replicas.a.down.add(1)
        replicas.a.lose_ends(1, lambda partition: self.lost if partition is self.partitions[0] else 0)
        await replicas.stop(dies)
        for number in range(self.random.choice((0, 1, self.lost, self.lost + 2))):
            self.partitions[0].write_values(b"another-%d" % number)
        await asyncio.sleep(self.random.uniform(0, 4))
        replicas.a.down.discard(1)
        self.start(dies)
        await replicas.connect()

    async def kill_meanwhile(self) -> None:
        """A proxy dies while all that is found and done."""
        name = self.random.choice("AB")
        await asyncio.sleep(self.random.uniform(0, 6))
        await self.replicas.stop(name)
        self.start(name)
        await self.replicas.connect()

    @property
    def of_source(self) -> list[bytes]:
        return [b"0-%d" % number for number in range(ACKED - self.lost, ACKED)]

    @property
    def losses(self) -> list[Any]:
        return list(self.replicas.controls["B"].state.source_losses)

    def status(self, name: str) -> LinkStatus:
        return self.replicas.ends[name].parts.service.status(LINK)

    def partition(self, name: str) -> PartitionStatus:
        return next(each for each in self.status(name).partitions if each.partition == 0)

    def told(self) -> bool:
        """Whether both sides tell the one loss."""
        told = [self.status(name).source_losses for name in "AB"]
        return [[(each.role, each.topic, each.partition) for each in found] for found in told] == [
            [("leader", TOPIC, 0)],
            [("follower", REMOTE, 0)],
        ]

    def set(self, to: OnSourceLoss) -> None:
        topic, role = ResourceType.TOPIC, Role.FOLLOWER
        self.apply("B", AttachNamespace(LINK, topic, "remote-", "local-", role, on_source_loss=to))

    async def write_on(self) -> None:
        """It goes on, and both sides are told until it is acknowledged."""
        replicas = self.replicas
        await replicas.until("told", self.told)
        await replicas.until("connected", lambda: replicas.ends["A"].peers.connections(LINK))
        await replicas.ends[self.random.choice("AB")].parts.service.acknowledge(LINK)
        await replicas.until("told no more", lambda: not any(self.status(name).source_losses for name in "AB"))


def replicas_records(replicas: Replicas) -> Any:
    """What B has recorded to have been In-Sync once."""
    return replicas.controls["B"].state.sync_records.get(LINK, {})


def run(seed: int, directory: Path, work: Any) -> None:
    async def main() -> None:
        scene = Scene(seed, directory)
        await work(scene)
        await scene.replicas.stop()

    run_simulated(main())


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_what_is_cut_is_salvaged_and_told(seed: int, tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        replicas = scene.replicas
        await scene.begin()
        await scene.lose_power()
        await scene.kill_meanwhile()
        for partition in scene.partitions:
            partition.write_values(b"more")
        await replicas.until("cut", lambda: [loss.state for loss in scene.losses] == [LossState.CUT], 600)
        await replicas.until("equal", replicas.equal)
        for partition in range(2):
            replicas.check(REMOTE, partition)
        (loss,) = scene.losses
        assert (loss.state, loss.partition, loss.topic) == (LossState.CUT, 0, REMOTE)
        assert (loss.from_offset, loss.to_offset, loss.count) == (ACKED - scene.lost, ACKED, scene.lost)
        assert loss.salvaged is not None
        assert loss.salvaged.path.startswith(str(tmp_path))
        assert salvaged(tmp_path) == scene.of_source
        await replicas.until("In-Sync", scene.in_sync)
        await scene.write_on()
        assert scene.losses == []

    run(seed, tmp_path, work)


@pytest.mark.parametrize("how", ["set", "strict"])
@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_what_is_held_stays_until_the_operator_decides(seed: int, how: str, tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        replicas = scene.replicas
        await scene.begin()
        if how == "set":
            scene.set(OnSourceLoss.HOLD)
        else:
            scene.apply("A", AlterDemands(ResourceType.TOPIC, "local-", Consistency.STRICT))
        target = replicas.b.partition(REMOTE)
        await scene.lose_power()
        await scene.kill_meanwhile()
        scene.partitions[1].write_values(b"more")
        await replicas.until("held", lambda: [loss.state for loss in scene.losses] == [LossState.HELD])
        await replicas.until("the other one goes on", lambda: replicas.b.partition(REMOTE, 1).end == ACKED + 1)
        await replicas.until("told", scene.told)
        assert replicas.b.partition(REMOTE) is target
        for name in "AB":
            await replicas.until(
                f"{name} shows it",
                lambda name=name: (  # type: ignore[misc]
                    scene.partition(name).state == PartitionState.DIVERGED
                    and scene.partition(name).reason == ReasonCode.SOURCE_LOST_RECORDS
                ),
            )
        await scene.kill_meanwhile()
        await asyncio.sleep(30)
        assert target.end == ACKED
        assert salvaged(tmp_path) == []
        record = replicas.controls["B"].state.follower_topics[REMOTE]
        decision = scene.random.choice(("truncate", "set", "detach"))
        if decision == "detach":
            scene.apply("B", DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
            assert [loss.state for loss in scene.losses] == [LossState.KEPT]
            assert target.end == ACKED
        else:
            scene.set(OnSourceLoss.CUT) if decision == "set" else scene.apply(
                "B", ReleaseSourceLosses(REMOTE, str(record.topic_id))
            )
            scene.partitions[0].write_values(b"more")
            await replicas.until("cut", lambda: [loss.state for loss in scene.losses] == [LossState.CUT], 600)
            assert salvaged(tmp_path) == scene.of_source
            await replicas.until("equal", replicas.equal)
        await scene.write_on()

    run(seed, tmp_path, work)


def test_what_somebody_wrote_past_the_proxies_is_no_loss(tmp_path: Path) -> None:
    """Also where the source's next batch lands behind it, at an offset that is not its own."""

    async def work(scene: Scene) -> None:
        await scene.begin()
        scene.set(OnSourceLoss.HOLD)
        scene.replicas.b.partition(REMOTE).write_values(b"rogue", producer_id=7)
        for partition in scene.partitions:
            partition.write_values(b"more")
        state = scene.replicas.controls["B"]
        await scene.replicas.until("cut", lambda: bool(state.state.past_truncations) and not state.state.truncations)
        await scene.replicas.until("equal", scene.replicas.equal)
        assert b"rogue" in salvaged(tmp_path)
        assert scene.losses == []

    run(1, tmp_path, work)


def test_what_was_never_in_sync_is_cut_although_all_would_be_held(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        replicas = scene.replicas
        scene.partitions = replicas.a.add_topic(TOPIC, 2).partitions
        for partition in scene.partitions:
            for _ in range(ACKED):
                partition.write_values(b"v")
        scene.start("AB")
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        scene.set(OnSourceLoss.HOLD)
        scene.partitions[0].cut(ACKED - 1)
        scene.partitions[0].move(1)
        state = replicas.controls["B"]
        await replicas.until("cut", lambda: bool(state.state.past_truncations) and not state.state.truncations)
        assert scene.losses == []

    run(1, tmp_path, work)


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_whatever_is_lost_by_one_side_alone_is_at_the_other_or_salvaged(seed: int, tmp_path: Path) -> None:
    """Power fails again and again, at the source, at the target, or at both; the source gets others then, or not."""

    async def work(scene: Scene) -> None:
        replicas, rng = scene.replicas, scene.random
        await scene.begin()
        source = scene.partitions[0]
        salvageable: set[bytes] = set()

        def there() -> list[bytes]:
            made = replicas.b.found.get(REMOTE)
            found = made.partitions[0].log if made is not None else []
            return [record.value or b"" for data in found for record in decode_records(data)]

        for number in range(5):
            for each in range(rng.randint(4, 6)):  # beyond what both lost: before, the target says that it lacks that
                source.write_values(b"round-%d-%d" % (number, each))
            await replicas.until(
                "equal", lambda: replicas.equal() and not replicas.controls["B"].state.truncations, 600
            )
            await replicas.until("In-Sync", lambda: scene.in_sync() and len(scene.recorded) == 2, 600)
            acked = there()
            at_source, at_target = (rng.choice((0, 0, 1, 3)) for _ in range(2))
            for cluster, log, lost in (
                (replicas.a, source, at_source),
                (replicas.b, replicas.b.partition(REMOTE), at_target),
            ):
                cluster.lose_ends(1, lambda each, log=log, lost=lost: lost if each is log else 0)  # type: ignore[misc]
            salvageable |= set(acked[len(acked) - at_source : len(acked) - at_target] if at_source > at_target else ())
            if rng.random() < 0.5:
                for each in range(rng.randint(1, 4)):
                    source.write_values(b"another-%d-%d" % (number, each))
            if rng.random() < 0.5:
                await scene.kill_meanwhile()
            if not replicas.wire or not replicas.wire.open:
                await replicas.connect()
        source.write_values(b"last")
        await replicas.until("it goes on", lambda: there()[-1:] == [b"last"] and replicas.equal(), 600)
        replicas.check(REMOTE, 0)
        saved = set(salvaged(tmp_path))
        assert saved <= salvageable, "what is at both sides is not cut"
        assert salvageable <= saved | set(there())
        lost = sum(loss.count for loss in scene.losses)
        assert lost == len(salvageable), "each is told"

    run(seed, tmp_path, work)
