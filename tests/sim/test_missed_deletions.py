"""Deletions whose tombstones are gone at the source before they were copied: in the end the follower has them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.fake_cluster import run_simulated, simulated_now
from support.partition_log import Partition
from support.replicas import End, Replicas
from support.seeds import quarters
from support.truncating import TruncatedCluster, salvaged, simulate_truncations

from isthmus_control.states import ReasonCode
from isthmus_control.truncations import Truncation
from isthmus_plugins.replication.follower.log import FILLER_KEY
from isthmus_plugins.replication.leader import tombstone_window

TOPIC = "remote-t"
RETENTION_S = 20.0
SEEDS = 12


class Scene:
    """A compacted topic at A, whose cleaner keeps tombstones for ``RETENTION_S``; B follows, and truncates."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = random.Random(seed)
        self.replicas = Replicas(self.random, brokers=1)
        source, target = TruncatedCluster(self.random), TruncatedCluster(self.random)
        source.found, target.found = self.replicas.a.found, self.replicas.b.found
        source.on_new_partition = self.replicas.a.on_new_partition
        self.replicas.a, self.replicas.b = source, target
        self.directory = directory
        configs = {"cleanup.policy": "compact", "delete.retention.ms": str(int(1000 * RETENTION_S))}
        self.source = source.add_topic("local-t", 1, configs).partitions[0]
        self.horizons: dict[int, float] = {}
        """By offset of tombstones: until when the cleaner keeps them."""

    def start(self, which: str = "AB") -> None:
        if "A" in which:
            self.replicas.start("A")
        if "B" in which:
            self.replicas.ends["B"] = End(self.replicas.b, self.replicas.controls["B"], data_directory=self.directory)

    @property
    def b(self) -> End:
        return self.replicas.ends["B"]

    @property
    def past(self) -> tuple[Truncation, ...]:
        """The truncations that are over."""
        return self.replicas.controls["B"].state.past_truncations

    @property
    def target(self) -> Partition:
        return self.replicas.b.partition(TOPIC)

    def put(self, key: bytes, value: bytes = b"value") -> None:
        self.source.write_values(value, keys=[key])

    def delete(self, key: bytes) -> None:
        self.source.write_values(None, keys=[key])

    def delete_all(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.delete(key)

    def clean(self) -> None:
        """As a broker's cleaner does: what later records make superfluous goes at once, tombstones in their time."""
        if not self.source.headers:
            return
        active = self.source.headers[-1].base_offset
        now = simulated_now()
        expired = {offset for offset, until in self.horizons.items() if until < now}
        self.source.compact(active, drop_tombstones=False)
        self.source.clean(expired)
        for offset in expired:
            del self.horizons[offset]
        for offset, record in self.source.records().items():
            if record.value is None and offset < active:
                self.horizons.setdefault(offset, now + RETENTION_S)

    def same(self) -> bool:
        """Whether both have the same latest records, and nothing is doubted."""
        record = self.replicas.controls["B"].state.follower_topics.get(TOPIC)
        if record is None or record.doubted or self.replicas.controls["B"].state.truncations:
            return False
        return self.replicas.equal() and latest(self.source) == latest(self.target)

    async def settled(self) -> None:
        await self.replicas.until("both have the same", self.same, 300)


def latest(partition: Partition) -> dict[bytes | None, int]:
    found = {record.key: offset for offset, record in partition.records().items() if record.key != FILLER_KEY}
    return {key: offset for key, offset in found.items() if partition.records()[offset].value is not None}


def run(work: Coroutine[Any, Any, None], monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)
    monkeypatch.setattr(tombstone_window, "CLEANING_MAX_S", 0.0)  # this cleaner takes no time
    run_simulated(work)


async def away(scene: Scene, seconds: float, which: str, meanwhile: Callable[[], None]) -> None:
    """The link, or a side's proxy, is gone for some time; something happens, and then the cleaner comes by."""
    if which == "link":
        scene.replicas.cut()
    else:
        await scene.replicas.stop(which)
    meanwhile()
    for _ in range(4):
        scene.clean()
        await asyncio.sleep(seconds / 4)
    scene.clean()
    if which != "link":
        scene.start(which)
    await scene.replicas.connect()


async def copied(scene: Scene, *keys: bytes) -> None:
    """Some keys are there, and the link runs."""
    for key in keys:
        scene.put(key)
    scene.start()
    await scene.replicas.connect()
    await scene.settled()


@pytest.mark.parametrize("which", ["link", "A", "B", "AB"])
def test_a_follower_loses_a_key_that_was_deleted_while_it_was_away(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        scene = Scene(1, tmp_path)
        await copied(scene, b"kept", b"deleted", b"other")

        def meanwhile() -> None:
            scene.delete(b"deleted")
            scene.put(b"more")

        await away(scene, 3 * RETENTION_S, which, meanwhile)
        assert b"deleted" in latest(scene.target)
        await scene.settled()
        (truncation,) = scene.past
        assert truncation.reason.code == ReasonCode.DELETIONS_MISSED
        assert [(cut.offset, cut.log_end) for cut in truncation.cuts] == [(1, 5)]
        assert sorted(latest(scene.target)) == [b"kept", b"more", b"other"]
        assert salvaged(tmp_path).count(b"value") == 3  # and what filled the hole
        await asyncio.sleep(60)
        assert scene.same()
        assert len(scene.past) == 1
        await scene.replicas.stop()

    run(work(), monkeypatch)


@pytest.mark.one_in_ci("stories")
@pytest.mark.parametrize("seed", quarters(range(5)))
def test_a_copy_that_takes_long_misses_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        scene = Scene(seed, tmp_path)
        for number in range(1000):
            scene.put(b"%d" % number, bytes(4000))
        scene.start()
        await scene.replicas.connect()
        begun = scene.random.randint(1, 600)
        await scene.replicas.until("it is begun", lambda: TOPIC in scene.replicas.b.found and scene.target.end >= begun)
        scene.replicas.cut()
        until = scene.target.end
        assert until < scene.source.end
        scene.delete(b"0")
        scene.put(b"more")
        await away(scene, 3 * RETENTION_S, "link", lambda: None)
        await scene.settled()
        assert [each.reason.code for each in scene.past] == [ReasonCode.DELETIONS_MISSED]
        await scene.replicas.stop()

    run(work(), monkeypatch)


@pytest.mark.parametrize("which", ["link", "A", "B", "AB"])
def test_nothing_is_cut_where_no_deletion_was_missed(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holes that are late, of keys that the follower has later records of, or never had."""

    async def work() -> None:
        scene = Scene(1, tmp_path)
        await copied(scene, b"one", b"two")

        def meanwhile() -> None:
            for key in (b"one", b"two", b"new", b"one", b"two"):
                scene.put(key)
            scene.delete(b"new")
            scene.put(b"more")

        await away(scene, 3 * RETENTION_S, which, meanwhile)
        await scene.settled()
        await asyncio.sleep(60)
        assert scene.same()
        assert scene.b.parts.missed_deletions.compared == 1
        assert not scene.past
        await scene.replicas.stop()

    run(work(), monkeypatch)


def test_a_link_that_is_never_away_for_long_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        scene = Scene(1, tmp_path)
        for number in range(200):  # old holes, before anything is copied
            scene.put(b"%d" % (number % 7))
            scene.delete(b"gone")
        scene.clean()
        await asyncio.sleep(2 * RETENTION_S)
        scene.clean()
        assert not scene.horizons
        await copied(scene)
        for number in range(30):
            scene.put(b"%d" % (number % 7))
            scene.delete(b"%d" % (number % 5))
            await asyncio.sleep(scene.random.choice((0.0, RETENTION_S / 3)))
            if number % 5 == 0:
                await away(scene, RETENTION_S / 6, "link", lambda: scene.put(b"while it is away"))
            scene.clean()
        await asyncio.sleep(10 * RETENTION_S)  # nothing happens for long
        await away(scene, RETENTION_S / 6, "link", lambda: scene.delete_all([b"a", b"a", b"b"]))
        await scene.settled()
        assert scene.b.parts.missed_deletions.compared == 0
        assert not scene.past
        await scene.replicas.stop()

    run(work(), monkeypatch)


async def blow(scene: Scene) -> None:
    """Keys are written and deleted, the cleaner comes by, proxies die, the link is away for short and long."""
    rng = scene.random
    for _ in range(120):
        for _ in range(rng.choice((0, 1, 5))):
            key = b"%d" % rng.randrange(12)
            scene.put(key) if rng.random() < 0.6 else scene.delete(key)
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.3, 3.0)))
        chance = rng.random()
        if chance < 0.3:
            scene.clean()
        elif chance < 0.4:
            seconds = rng.choice((0.1, RETENTION_S / 3, RETENTION_S, 2 * RETENTION_S))
            keys = [b"%d" % rng.randrange(12) for _ in range(rng.randrange(8))]
            await away(
                scene,
                seconds,
                rng.choice(("link", "link", "A", "B", "AB")),
                partial(scene.delete_all, keys),
            )
        elif chance < 0.42:
            for cluster in (scene.replicas.a, scene.replicas.b):
                cluster.trouble = rng.choice((0.0, 0.05))


@pytest.mark.parametrize("seed", quarters(range(SEEDS)))
def test_both_have_the_same_keys_in_the_end(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        scene = Scene(seed, tmp_path)
        await copied(scene, *[b"%d" % number for number in range(12)])
        await blow(scene)
        for cluster in (scene.replicas.a, scene.replicas.b):
            cluster.trouble = 0.0
        await scene.replicas.connect()
        await scene.settled()
        await scene.replicas.stop()

    run(work(), monkeypatch)
