"""Truncations, with the proxy killed at each step: in the end the follower is the source's, and nothing else is lost.

What somebody wrote past the proxies is in salvage files, groups have their positions or the cut, the spool is gone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_cluster import run_simulated
from support.replicas import LINK, Replicas
from support.truncating import TruncatedCluster, Truncating, salvaged, simulate_truncations

from isthmus_control.commands import AdvanceTruncation, Body
from isthmus_control.outcome import Outcome
from isthmus_control.truncations import SPOOL_PREFIX, TruncationPhase
from isthmus_plugins.api import CommittedOffset
from isthmus_plugins.replication.common_log import CommonLog

P = TruncationPhase
TOPIC = "remote-t"
SEEDS = 6


class Scene:
    """Replicas whose proxy of B is killed when the truncation comes to a phase."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = random.Random(seed)
        self.replicas = Replicas(self.random, brokers=1)
        source, self.cluster = TruncatedCluster(self.random, (1,)), TruncatedCluster(self.random, (1,))
        source.found, self.cluster.found = self.replicas.a.found, self.replicas.b.found
        self.replicas.a, self.replicas.b = source, self.cluster
        self.directory = directory
        self.came_to: list[TruncationPhase] = []
        self.kill_at: set[TruncationPhase] = set()
        self.kills: list[asyncio.Task[None]] = []
        control = self.replicas.controls["B"]
        append = control.append

        async def watched(body: Body) -> Outcome:
            outcome = await append(body)
            if isinstance(body, AdvanceTruncation):
                self.came_to.append(body.phase)
                if body.phase in self.kill_at:
                    self.kill_at.discard(body.phase)
                    self.kills.append(asyncio.get_running_loop().create_task(self.kill()))
            return outcome

        control.append = watched  # type: ignore[method-assign]

    def start(self) -> None:
        self.replicas.start("A")
        a = self.replicas.ends["A"]
        a.handlers["limits"] = CommonLog(a.context, a.verification).on_limits
        self.start_b()

    def start_b(self) -> None:
        self.replicas.ends["B"] = Truncating(self.cluster, self.replicas.controls["B"], self.directory)

    async def kill(self) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.005, 0.02, 0.3)))
        await self.replicas.stop("B")
        await asyncio.sleep(self.random.choice((0.0, 1.0)))
        self.start_b()
        await self.replicas.connect()

    def over(self) -> bool:
        state = self.replicas.controls["B"].state
        return bool(state.past_truncations) and not state.truncations and all(kill.done() for kill in self.kills)


async def simulate(scene: Scene, harm: Callable[[Scene], None], kill_at: set[TruncationPhase], trouble: float) -> None:
    """Let a follower catch up, do it harm, and wait until it is the source's again."""
    replicas = scene.replicas
    topic = replicas.a.add_topic("local-t", 2)
    for index, partition in enumerate(topic.partitions):
        for number in range(20):
            partition.write_values(b"%d-%d" % (index, number), producer_id=-1)
    scene.start()
    await replicas.connect()
    await replicas.until("it has everything", replicas.equal)
    scene.cluster.offsets = {
        "behind": {(TOPIC, 0): CommittedOffset(5, "m")},
        "beyond": {(TOPIC, 0): CommittedOffset(22, ""), (TOPIC, 1): CommittedOffset(20, "")},
    }
    scene.kill_at = set(kill_at)
    scene.cluster.trouble = trouble
    harm(scene)
    await replicas.until("it is truncated", scene.over, 900)
    scene.cluster.trouble = 0.0
    for partition in topic.partitions:
        partition.write_values(b"more")
    await replicas.until("it has everything again", replicas.equal, 300)
    for index in range(2):
        replicas.check(TOPIC, index)
    assert not [name for name in scene.cluster.found if name.startswith(SPOOL_PREFIX)]
    await replicas.stop()


def rogue(scene: Scene) -> None:
    """Somebody writes to the follower."""
    partition = scene.cluster.partition(TOPIC)
    for number in range(3):
        partition.write_values(b"rogue-%d" % number)


def lossy(scene: Scene) -> None:
    """The source loses records, and gets others of a new epoch."""
    partition = scene.replicas.a.partition("local-t")
    partition.cut(17)
    partition.move(1)
    partition.write_values(b"another")


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)


STEPS = [P.SALVAGING, P.SPOOLING, P.RECREATING, P.REFILLING, P.RESTORING, P.CLEANING]


@pytest.mark.parametrize("phase", STEPS)
def test_what_a_rogue_wrote_is_cut_whenever_the_proxy_is_killed(phase: TruncationPhase, tmp_path: Path) -> None:
    scene = Scene(7, tmp_path)
    run_simulated(simulate(scene, rogue, {phase}, 0.0))
    assert scene.came_to[-1] is P.DONE
    assert len(scene.kills) == 1
    assert salvaged(tmp_path) == [b"rogue-0", b"rogue-1", b"rogue-2"]
    (truncation,) = scene.replicas.controls["B"].state.past_truncations
    assert [(cut.offset, cut.log_end) for cut in truncation.cuts] == [(20, 23), (20, 20)]
    assert scene.cluster.offsets == {
        "behind": {(TOPIC, 0): CommittedOffset(5, "m")},
        "beyond": {(TOPIC, 0): CommittedOffset(20, ""), (TOPIC, 1): CommittedOffset(20, "")},
    }
    assert [(each.group, each.offset, each.moved_to) for each in truncation.moved] == [("beyond", 22, 20)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_kills_and_trouble_at_every_step(seed: int, tmp_path: Path) -> None:
    scene = Scene(seed, tmp_path)
    run_simulated(simulate(scene, rogue if seed % 2 else lossy, set(STEPS), 0.05))
    lost = [b"rogue-0", b"rogue-1", b"rogue-2"] if seed % 2 else [b"0-17", b"0-18", b"0-19"]
    assert salvaged(tmp_path)[: len(lost)] == lost
    assert scene.cluster.offsets["behind"] == {(TOPIC, 0): CommittedOffset(5, "m")}
    assert scene.cluster.offsets["beyond"][TOPIC, 0].offset == (20 if seed % 2 else 17)


def test_the_sources_leader_epochs_say_where_the_logs_part(tmp_path: Path) -> None:
    """Records that look the same in an epoch that the source has lost are not the source's."""
    scene = Scene(3, tmp_path)

    def same_again(scene: Scene) -> None:
        partition = scene.replicas.a.partition("local-t")
        partition.cut(17)
        partition.move(1)
        for number in range(17, 19):
            partition.write_values(b"0-%d" % number)

    run_simulated(simulate(scene, same_again, set(), 0.0))
    (truncation,) = scene.replicas.controls["B"].state.past_truncations
    assert truncation.cuts[0].offset == 17
    assert salvaged(tmp_path) == [b"0-17", b"0-18", b"0-19"]
    assert truncation.link == LINK
