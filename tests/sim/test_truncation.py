"""Truncations, with the proxy killed at each step: in the end the follower is the source's, and nothing else is lost.

What somebody wrote past the proxies is in salvage files, groups have their committed offsets or the cut, the spool is
gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fake_cluster import run_simulated
from support.partition_log import Partition
from support.replicas import LINK, End, Replicas
from support.seeds import quarters
from support.truncating import TruncatedCluster, salvaged, simulate_truncations

from isthmus_control.commands import AdvanceTruncation, Body, GiveUpTruncation, HoldUpTruncation
from isthmus_control.outcome import Accepted, Outcome
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import SPOOL_PREFIX, TruncationPhase
from isthmus_plugins.cluster import CommittedOffset, TransactionMarkers

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
        source.on_new_partition = self.replicas.a.on_new_partition
        self.replicas.a, self.replicas.b = source, self.cluster
        self.directory = directory
        self.came_to: list[TruncationPhase] = []
        self.kill_at: set[TruncationPhase] = set()
        self.at: dict[TruncationPhase, Callable[[], None]] = {}
        """What happens when it comes to a phase for the first time."""
        self.troubles: set[str] = set()
        self.kills: list[asyncio.Task[None]] = []
        self._killing = asyncio.Lock()
        """Who is being killed and started again is not killed: two that live at once would take turns for ever."""
        control = self.replicas.controls["B"]
        append = control.append

        async def watched(body: Body) -> Outcome:
            outcome = await append(body)
            if isinstance(body, HoldUpTruncation) and body.trouble is not None:
                self.troubles.add(body.trouble.code)
            if isinstance(body, AdvanceTruncation):
                self.came_to.append(body.phase)
                self.at.pop(body.phase, lambda: None)()
                if body.phase in self.kill_at:
                    self.kill_at.discard(body.phase)
                    self.kills.append(asyncio.get_running_loop().create_task(self.kill()))
            return outcome

        control.append = watched  # type: ignore[method-assign]

    def lose_spool(self, *partitions: int) -> None:
        """Delete the spool, or records of these partitions of it."""
        for name in [name for name in self.cluster.found if name.startswith(SPOOL_PREFIX)]:
            for partition in partitions:
                log = self.cluster.partition(name, partition)
                log.start = log.end
            if not partitions:
                del self.cluster.found[name]

    def start(self) -> None:
        self.replicas.start("A")
        self.start_b()

    def start_b(self) -> None:
        assert "B" not in self.replicas.ends, "leases keep a second one from being there"
        self.replicas.ends["B"] = End(self.cluster, self.replicas.controls["B"], data_directory=self.directory)

    async def kill(self) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.005, 0.02, 0.3)))
        async with self._killing:
            await self.replicas.stop("B")
            await asyncio.sleep(self.random.choice((0.0, 1.0)))
            self.start_b()
            await self.replicas.connect()

    def over(self) -> bool:
        state = self.replicas.controls["B"].state
        return bool(state.past_truncations) and not state.truncations and all(kill.done() for kill in self.kills)


async def simulate(
    scene: Scene,
    harm: Callable[[Scene], None],
    kill_at: set[TruncationPhase],
    trouble: float,
    written: Callable[[Partition], None] = lambda partition: None,
) -> None:
    """Let a follower catch up (``written``: with what else), do it harm, and wait until it is the source's again."""
    replicas = scene.replicas
    topic = replicas.a.add_topic("local-t", 2)
    for index, partition in enumerate(topic.partitions):
        for number in range(20):
            partition.write_values(b"%d-%d" % (index, number), producer_id=-1)
    written(topic.partitions[0])
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


def looks_the_same(scene: Scene) -> None:
    """The source loses records while nobody pushes, and gets others, the last of which is what the follower has there:
    an application's own timestamp and value, or a marker."""
    scene.replicas.cut()
    partition = scene.replicas.a.partition("local-t")
    last = b"0-19"
    partition.cut(16)
    partition.move(1)
    for _ in range(3):
        partition.write_values(b"another", producer_id=-1)
    partition.write_values(last, producer_id=-1)
    again = asyncio.get_running_loop().create_task(scene.replicas.connect())
    scene.kills.append(again)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)


ROGUE = [b"rogue-0", b"rogue-1", b"rogue-2"]
MANIFEST = 2


@pytest.mark.parametrize("partitions", [(), (0,), (MANIFEST,)])
def test_a_spool_that_is_lost_while_the_old_topic_is_there_is_filled_again(
    partitions: tuple[int, ...], tmp_path: Path
) -> None:
    scene = Scene(8, tmp_path)
    scene.at[P.RECREATING] = lambda: scene.lose_spool(*partitions)
    run_simulated(simulate(scene, rogue, set(), 0.0))
    assert scene.came_to.count(P.COMPARING) == 1
    assert P.CATCHING_UP not in scene.came_to
    assert ReasonCode.SPOOL_LOST in scene.troubles
    assert set(salvaged(tmp_path)) == set(ROGUE)
    assert scene.cluster.offsets["behind"] == {(TOPIC, 0): CommittedOffset(5, "m")}
    assert scene.cluster.offsets["beyond"][TOPIC, 0] == CommittedOffset(20, "")


@pytest.mark.parametrize("kill_at", [set(), {P.REFILLING}, {P.CATCHING_UP}, {P.CATCHING_UP, P.RESTORING}])
@pytest.mark.parametrize("partitions", [(), (0,), (MANIFEST,)])
def test_what_a_lost_spool_held_comes_from_the_source_again(
    partitions: tuple[int, ...], kill_at: set[TruncationPhase], tmp_path: Path
) -> None:
    scene = Scene(9, tmp_path)
    scene.at[P.REFILLING] = lambda: scene.lose_spool(*partitions)
    run_simulated(simulate(scene, rogue, kill_at, 0.0))
    (truncation,) = scene.replicas.controls["B"].state.past_truncations
    assert P.CATCHING_UP in scene.came_to
    assert ReasonCode.SPOOL_LOST in scene.troubles
    assert salvaged(tmp_path) == ROGUE
    assert [(cut.offset, cut.log_end) for cut in truncation.cuts] == [(20, 23), (20, 20)]
    assert truncation.succession is not None
    lost = partitions != (0,)
    assert truncation.positions_lost is lost
    assert truncation.layout is not None
    assert truncation.layout.groups == 2
    behind = {} if lost else {(TOPIC, 0): CommittedOffset(5, "m")}
    assert scene.cluster.offsets["behind"] == behind  # nobody makes committed offsets up


def test_a_source_that_lost_its_end_and_has_the_same_record_there_again_is_noticed(tmp_path: Path) -> None:
    """What stands last is equal, and was written in another epoch."""
    scene = Scene(13, tmp_path)
    run_simulated(simulate(scene, looks_the_same, set(), 0.0))
    (truncation,) = scene.replicas.controls["B"].state.past_truncations
    assert [(cut.offset, cut.log_end) for cut in truncation.cuts] == [(16, 20), (20, 20)]
    assert salvaged(tmp_path) == [b"0-16", b"0-17", b"0-18", b"0-19"]


def test_committed_offsets_that_are_lost_at_the_end_are_told(tmp_path: Path) -> None:
    scene = Scene(10, tmp_path)
    scene.at[P.RESTORING] = scene.lose_spool
    run_simulated(simulate(scene, rogue, set(), 0.0))
    (truncation,) = scene.replicas.controls["B"].state.past_truncations
    assert truncation.positions_lost
    assert P.CATCHING_UP not in scene.came_to


def test_a_lost_spool_of_a_lost_source_is_given_up(tmp_path: Path) -> None:
    """The topic keeps what has come, and goes on when there is a source again."""
    scene = Scene(11, tmp_path)
    replicas = scene.replicas

    def nothing_left() -> None:
        scene.lose_spool(0, 1)
        replicas.cut()

    async def run() -> None:
        topic = replicas.a.add_topic("local-t", 2)
        for partition in topic.partitions:
            for _ in range(20):
                partition.write_values(b"x")
        scene.start()
        await replicas.connect()
        await replicas.until("it has everything", replicas.equal)
        scene.cluster.offsets = {"g": {(TOPIC, 0): CommittedOffset(5, "m")}}
        rogue(scene)
        scene.at[P.REFILLING] = nothing_left
        control = replicas.controls["B"]
        await replicas.until("the spool is lost", lambda: P.CATCHING_UP in scene.came_to)
        await asyncio.sleep(60)
        truncation = control.state.truncations[TOPIC]
        assert truncation.phase is P.CATCHING_UP
        assert truncation.trouble is not None
        assert "40 offsets are left" in truncation.trouble.message
        assert isinstance(control.apply(GiveUpTruncation(TOPIC, truncation.topic_id)), Accepted)
        await replicas.until("it is over", scene.over)
        (over,) = control.state.past_truncations
        assert over.given_up
        assert [cut.offset for cut in over.cuts] == [0, 0]
        assert [(each.group, each.offset, each.moved_to) for each in over.moved] == [("g", 5, 0)]
        await replicas.connect()
        await replicas.until("it has everything again", replicas.equal, 300)
        await replicas.stop()

    run_simulated(run())


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


@pytest.mark.parametrize("seed", quarters(range(SEEDS)))
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


def test_a_transaction_whose_end_is_cut_is_open_again(tmp_path: Path) -> None:
    """Its records were aborted in the log that is spooled, and are not in the one that is made of it."""
    scene = Scene(13, tmp_path)

    def written(partition: Partition) -> None:
        partition.transact(5, [b"kept"], committed=True)
        partition.transact(5, [b"aborted"], committed=False)

    def lost_marker(scene: Scene) -> None:
        partition = scene.replicas.a.partition("local-t")
        partition.cut(23)
        partition.move(1)
        assert partition.mark(TransactionMarkers("", 0, 5, 0, True, 0)) == 0

    run_simulated(simulate(scene, lost_marker, set(), 0.0, written))
    assert scene.came_to.count(P.RECREATING) == 1
    (truncation,) = scene.replicas.controls["B"].state.past_truncations
    assert truncation.cuts[0].offset == 23


async def simulate_cleaned(scene: Scene, harm: Callable[[Scene], None]) -> None:
    """A follower that its own cleaner cleans, before harm was done to it and after; kills at some steps."""
    replicas, rng = scene.replicas, scene.random
    source = replicas.a.add_topic("local-t", 1, {"cleanup.policy": "compact"}).partitions[0]
    for number in range(40):
        source.write_values(b"%d" % number, keys=[b"key-%d" % rng.randrange(8)])
    scene.start()
    await replicas.connect()
    await replicas.until("it is there", lambda: TOPIC in scene.cluster.found)
    await replicas.until("it is compacted", lambda: scene.cluster.partition(TOPIC).compacted)
    target = scene.cluster.partition(TOPIC)
    if rng.random() < 0.5:
        source.compact(rng.randrange(source.end), drop_tombstones=True)
    if rng.random() < 0.5:
        target.compact(rng.randrange(target.end), drop_tombstones=True)
    scene.kill_at = {phase for phase in STEPS if rng.random() < 0.3}
    harm(scene)
    target.compact(target.end, drop_tombstones=True)
    await replicas.until("it is truncated", scene.over, 900)
    for number in range(3):
        source.write_values(b"more-%d" % number, keys=[b"more"])
    await replicas.until("it has everything again", replicas.equal, 300)
    scene.cluster.partition(TOPIC).cleaned = True  # as the one before it was
    replicas.check(TOPIC, 0)
    await replicas.until("it is compacted again", lambda: scene.cluster.partition(TOPIC).compacted)
    await replicas.stop()
    latest = [
        {record.key: (offset, record.value) for offset, record in partition.records().items()}
        for partition in (source, scene.cluster.partition(TOPIC))
    ]
    assert latest[0] == latest[1]


def rogue_with_keys(scene: Scene) -> None:
    partition = scene.cluster.partition(TOPIC)
    for _ in range(3):
        partition.write_values(b"rogue", keys=[b"key-%d" % scene.random.randrange(8)])


def lossy_with_keys(scene: Scene) -> None:
    """The source loses records that have made others superfluous at the follower."""
    source = scene.replicas.a.partition("local-t")
    source.cut(scene.random.randint(20, source.end - 1))
    source.move(1)
    source.write_values(b"another", keys=[b"key-%d" % scene.random.randrange(8)])


@pytest.mark.parametrize("harm", [rogue_with_keys, lossy_with_keys])
@pytest.mark.parametrize("seed", quarters([*range(12), 24, 36]))
def test_no_record_is_missing_that_a_cleaner_took_for_one_that_was_cut(
    seed: int, harm: Callable[[Scene], None], tmp_path: Path
) -> None:
    run_simulated(simulate_cleaned(Scene(seed, tmp_path), harm))


@pytest.mark.parametrize("kill_at", [set(), {P.CATCHING_UP}, {P.RESTORING}])
def test_what_is_written_while_the_source_refills_is_salvaged_too(
    kill_at: set[TruncationPhase], tmp_path: Path
) -> None:
    """What has come from the source by then may be gone there: it is not deleted unsaved."""
    scene = Scene(12, tmp_path)
    replicas = scene.replicas

    async def run() -> None:
        topic = replicas.a.add_topic("local-t", 2)
        for partition in topic.partitions:
            for _ in range(20):
                partition.write_values(b"x", producer_id=-1)
        scene.start()
        await replicas.connect()
        await replicas.until("it has everything", replicas.equal)
        rogue(scene)
        scene.at[P.REFILLING] = scene.lose_spool
        scene.at[P.CATCHING_UP] = replicas.cut
        await replicas.until("the spool is lost", lambda: P.CATCHING_UP in scene.came_to)
        scene.kill_at = set(kill_at)
        await replicas.until("it is there", lambda: TOPIC in scene.cluster.found)
        await asyncio.sleep(5)
        scene.cluster.partition(TOPIC).write_values(b"another")
        await replicas.connect()
        control = replicas.controls["B"]
        await replicas.until("both are over", lambda: scene.over() and len(control.state.past_truncations) == 2, 300)
        await replicas.until("it has everything again", replicas.equal, 300)
        for index in range(2):
            replicas.check(TOPIC, index)
        await replicas.stop()

    run_simulated(run())
    assert sorted(salvaged(tmp_path), key=str) == sorted([*ROGUE, b"another"], key=str)
