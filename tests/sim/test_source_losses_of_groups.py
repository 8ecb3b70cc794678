"""A source whose offsets topic loses its end after commits were acked In-Sync, simulated: put back, or held, as is set.

Proxies of either side are killed meanwhile. Nothing goes back before it is salvaged and recorded; what groups commit
later at the source is no loss, back or forth, and an administrator's reset is none either."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.fake_cluster import run_simulated
from support.offsets import commit, deleted, offsets_batch
from support.replicas import LINK, End, Replicas
from support.seeds import seeds
from support.truncating import simulate_truncations

from isthmus_control.commands import AlterDemands, AlterLink, AttachNamespace, DetachNamespace
from isthmus_control.demands import Consistency
from isthmus_control.model import LinkMode, OnSourceLoss, ResourceType, Role
from isthmus_control.source_losses import LossState
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import CommittedOffset
from isthmus_plugins.replication.groups.source_losses import GroupLosses
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.offsets_salvage import SalvagedOffset, read_offsets_salvage

GROUPS = ("app-1", "app-2")
RECORDS, ACKED = 100, 20
PLACE = ("remote-t", 0)
SEEDS = 5


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)


class Scene:
    """Two groups, whose commits are in one partition of the source's offsets topic, acked over a synchronous link."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.replicas = Replicas(self.random, brokers=1)
        self.replicas.attach_groups()
        self.replicas.a.add_topic("local-t").partitions[0].write_values(*[b"x"] * RECORDS)
        self.log = self.replicas.a.add_topic(OFFSETS_TOPIC).partitions[0]
        self.lost = self.random.randint(1, 5)
        self.went_back: list[tuple[str, int, bool]] = []
        """What coordinators were given that is less than what they had, and whether that was recorded before."""
        self.replicas.b.on_commit = self.committed

    def committed(self, group: str, place: tuple[str, int], wanted: CommittedOffset) -> None:
        has = self.replicas.b.offsets.get(group, {}).get(place)
        if has is not None and wanted.offset < has.offset:
            self.went_back.append((group, wanted.offset, bool(self.losses)))

    def apply(self, name: str, body: Any) -> None:
        self.replicas.controls[name].apply(body)

    def start(self, which: str) -> None:
        for name in which:
            cluster = self.replicas.a if name == "A" else self.replicas.b
            directory = self.directory if name == "B" else None
            self.replicas.ends[name] = End(cluster, self.replicas.controls[name], data_directory=directory)

    def commit(self, group: str, offset: int | None) -> None:
        record = deleted(group, "local-t") if offset is None else commit(group, "local-t", offset)
        self.log.write(offsets_batch(self.log.end, [record], leader_epoch=self.log.leader_epoch))

    async def begin(self) -> None:
        replicas = self.replicas
        self.start("AB")
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        self.apply("A", AlterLink(LINK, mode=LinkMode.SYNCHRONOUS))
        await replicas.until("In-Sync", self.in_sync)
        for offset in range(ACKED + 1):
            for group in GROUPS:
                self.commit(group, offset)
        await self.at(ACKED, ACKED)
        await asyncio.sleep(1)
        await replicas.until("In-Sync", self.in_sync)

    def in_sync(self) -> bool:
        b = self.replicas.ends["B"]
        return b.sync_leases.groups.lease(LINK, 0) is not None

    def has(self, group: str) -> int | None:
        found = self.replicas.b.offsets.get(f"far-{group}", {}).get(PLACE)
        return None if found is None else found.offset

    async def at(self, *offsets: int | None) -> None:
        await self.replicas.until(f"at {offsets}", lambda: tuple(map(self.has, GROUPS)) == offsets)

    async def lose_power(self, then: Any = lambda: None) -> None:
        """The source's only broker, and with it proxies of either side; ``then``: what the source does.

        What a proxy of the target forgets is known to the source's, or, once leases have run out, to the control log.
        """
        replicas = self.replicas
        dies = self.random.choice(("", "A", "B", "AB"))
        if dies == "AB":
            replicas.cut()
            await replicas.until("claimed", lambda: bool(replicas.controls["B"].state.group_claims))
        replicas.a.down.add(1)
        replicas.a.lose_ends(1, lambda partition: self.lost if partition is self.log else 0)
        await replicas.stop(dies)
        then()
        await asyncio.sleep(self.random.uniform(0, 4))
        replicas.a.down.discard(1)
        self.start(dies)
        await replicas.connect()

    async def kill(self) -> None:
        name = self.random.choice("AB")
        await self.replicas.stop(name)
        self.start(name)
        await self.replicas.connect()

    @property
    def losses(self) -> list[Any]:
        return list(self.replicas.controls["B"].state.source_losses)

    @property
    def put_back(self) -> tuple[int, int]:
        """What is left at the source: every second commit is of the same group."""
        left = 2 * (ACKED + 1) - self.lost
        return (left + 1) // 2 - 1, left // 2 - 1

    def set(self, to: OnSourceLoss) -> None:
        group, role = ResourceType.CONSUMER_GROUP, Role.FOLLOWER
        self.apply("B", AttachNamespace(LINK, group, "far-app-", "app-", role, on_source_loss=to))

    def reasons(self, name: str) -> set[str | None]:
        return {each.reason for each in self.replicas.ends[name].parts.service.status(LINK).groups}

    def told(self) -> bool:
        found = [self.replicas.ends[name].parts.service.status(LINK).source_losses for name in "AB"]
        return [[(each.role, each.type) for each in told] for told in found] == [
            [("leader", "consumer-group")],
            [("follower", "consumer-group")],
        ]

    def salvaged(self) -> list[SalvagedOffset]:
        files = sorted(self.directory.glob("salvage/offsets-*.salvage"))
        return [each for file in files for each in read_offsets_salvage(file.read_bytes()).offsets]

    def expected(self) -> list[SalvagedOffset]:
        return [
            SalvagedOffset(f"far-{group}", *PLACE, ACKED, "", left)
            for group, left in zip(GROUPS, self.put_back, strict=True)
            if left < ACKED
        ]


def run(seed: int, directory: Path, work: Any) -> None:
    async def main() -> None:
        scene = Scene(seed, directory)
        await scene.begin()
        await work(scene)
        await scene.replicas.stop()

    run_simulated(main())


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_what_is_put_back_is_salvaged_and_told(seed: int, tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.lose_power()
        await scene.at(*scene.put_back)
        (loss,) = scene.losses
        assert (loss.state, loss.type, loss.namespace) == (LossState.CUT, ResourceType.CONSUMER_GROUP, "far-app-")
        assert loss.to_offset - loss.from_offset == scene.lost
        assert scene.salvaged() == scene.expected()
        assert (loss.count, loss.groups) == (len(scene.expected()), len(scene.expected()))
        assert all(recorded for _, _, recorded in scene.went_back)
        await scene.kill()
        await scene.replicas.until("told", scene.told)
        await scene.replicas.until("connected", lambda: scene.replicas.ends["A"].peers.connections(LINK))
        await scene.replicas.ends["A"].parts.service.acknowledge(LINK)
        await scene.replicas.until("In-Sync", scene.in_sync)
        scene.commit("app-1", ACKED + 5)
        await scene.at(ACKED + 5, scene.put_back[1])
        assert scene.losses == []

    run(seed, tmp_path, work)


@pytest.mark.parametrize("how", ["set", "strict"])
@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_what_is_held_stays_until_the_group_commits_or_the_operator_decides(
    seed: int, how: str, tmp_path: Path
) -> None:
    async def work(scene: Scene) -> None:
        replicas = scene.replicas
        scene.lost = scene.random.randint(2, 5)  # of both groups
        if how == "set":
            scene.set(OnSourceLoss.HOLD)
        else:
            scene.apply("A", AlterDemands(ResourceType.CONSUMER_GROUP, "app-", Consistency.STRICT))
        await scene.lose_power()
        await replicas.until("held", lambda: [loss.state for loss in scene.losses] == [LossState.HELD])
        await scene.kill()
        await replicas.until("told", scene.told)
        for name in "AB":
            await replicas.until(
                f"{name} shows it",
                lambda name=name: ReasonCode.SOURCE_LOST_COMMITS in scene.reasons(name),  # type: ignore[misc]
            )
        await replicas.until("In-Sync", scene.in_sync)
        await asyncio.sleep(30)
        await scene.at(ACKED, ACKED)
        scene.commit("app-1", ACKED - 10)  # later, if less
        await scene.at(ACKED - 10, ACKED)
        decision = scene.random.choice(("commit", "set", "detach"))
        if decision == "commit":
            scene.commit("app-2", ACKED + 1)
            await scene.at(ACKED - 10, ACKED + 1)
            await replicas.until("over", lambda: [loss.state for loss in scene.losses] == [LossState.CUT])
            assert scene.salvaged() == []
        elif decision == "set":
            scene.set(OnSourceLoss.CUT)
            await scene.at(ACKED - 10, scene.put_back[1])
            assert scene.salvaged() == scene.expected()[1:]
        else:
            scene.apply("B", DetachNamespace(LINK, ResourceType.CONSUMER_GROUP, "far-app-"))
            assert [loss.state for loss in scene.losses] == [LossState.KEPT]
            await asyncio.sleep(5)
            await scene.at(ACKED - 10, ACKED)

    run(seed, tmp_path, work)


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_what_is_committed_later_at_the_source_is_no_loss(seed: int, tmp_path: Path) -> None:
    """A reset while nobody was connected, a deletion, and a commit after the loss."""

    async def work(scene: Scene) -> None:
        scene.set(OnSourceLoss.HOLD)
        scene.replicas.cut()
        scene.commit("app-1", 3)
        scene.commit("app-2", None)
        scene.log.move(1)
        await scene.replicas.connect()
        await scene.at(3, None)
        assert scene.losses == []
        scene.commit("app-2", 7)
        await scene.at(3, 7)
        await asyncio.sleep(4)
        await scene.replicas.until("In-Sync", scene.in_sync)
        scene.lost = 1

        def reset() -> None:
            scene.commit("app-2", 5)

        await scene.lose_power(reset)
        await scene.at(3, 5)
        await asyncio.sleep(10)
        assert scene.losses == []

    run(seed, tmp_path, work)


def test_what_is_held_costs_no_look_for_each_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, looks = GroupLosses.settle, [0]

    def counted(losses: GroupLosses) -> Any:
        looks[0] += 1
        return settle(losses)

    async def work(scene: Scene) -> None:
        scene.lost = 2
        scene.set(OnSourceLoss.HOLD)
        await scene.lose_power()
        await scene.replicas.until("held", lambda: [loss.state for loss in scene.losses] == [LossState.HELD])
        monkeypatch.setattr(GroupLosses, "settle", counted)
        for offset in range(RECORDS):
            scene.commit("app-1", offset)
            await asyncio.sleep(0.1)
        await scene.at(RECORDS - 1, ACKED)
        assert looks[0] <= RECORDS * 0.1 + 2
        scene.commit("app-2", 5)
        await scene.replicas.until("over", lambda: [loss.state for loss in scene.losses] == [LossState.CUT])

    run(1, tmp_path, work)


def test_nothing_is_put_back_unsalvaged_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    """The control log has the feature level of versions of before."""

    async def work(scene: Scene) -> None:
        control, context = scene.replicas.controls["B"], scene.replicas.ends["B"].context
        control.state = control.state.evolve(level=0)
        scene.lost = 2
        context.data_directory = None
        scene.replicas.a.lose_ends(1, lambda partition: scene.lost if partition is scene.log else 0)
        await asyncio.sleep(30)
        await scene.at(ACKED, ACKED)
        assert ReasonCode.SOURCE_LOST_COMMITS in scene.reasons("B")
        context.data_directory = tmp_path
        await scene.at(*scene.put_back)
        assert sorted(scene.salvaged(), key=lambda each: each.group) == scene.expected()

    run(1, tmp_path, work)


def test_what_cannot_be_salvaged_is_not_put_back_and_keeps_nobody_else(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        scene.lost = 2
        scene.replicas.ends["B"].context.data_directory = None
        scene.replicas.a.lose_ends(1, lambda partition: scene.lost if partition is scene.log else 0)
        await scene.replicas.until("told", scene.told)
        assert [loss.state for loss in scene.losses] == [LossState.CUTTING]
        await scene.replicas.until("In-Sync", scene.in_sync)
        scene.commit("app-1", ACKED + 1)
        await scene.at(ACKED + 1, ACKED)
        await asyncio.sleep(10)
        (stopped,) = [
            each.message
            for each in scene.replicas.ends["B"].parts.service.status(LINK).groups
            if each.reason == ReasonCode.SOURCE_LOST_COMMITS
        ]
        assert "set [data] directory" in str(stopped)
        scene.replicas.ends["B"].context.data_directory = tmp_path
        await scene.at(ACKED + 1, scene.put_back[1])
        assert [each.group for each in scene.salvaged()] == ["far-app-2"]
        assert [loss.state for loss in scene.losses] == [LossState.CUT]

    run(1, tmp_path, work)
