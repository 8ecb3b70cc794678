"""A chain of three clusters whose middle one is truncated: the last one is cut to correspond, and all are equal again.

C knows of B's truncation only what B's control log states. Proxies are killed at any step of either truncation.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from support.fake_cluster import FakeControl, run_simulated
from support.replicas import LINK, LINK_ID, SECRET, End, Wire, connected, records_of
from support.seeds import quarters
from support.truncating import TruncatedCluster, salvaged, simulate_truncations

from isthmus_control.commands import AdvanceTruncation, AttachNamespace, Body, CreateLink, RegisterProducerIds
from isthmus_control.model import ResourceType, Role
from isthmus_control.outcome import Outcome
from isthmus_control.sealing import Sealer, Secret
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import SPOOL_PREFIX, TruncationPhase
from isthmus_plugins.cluster import CommittedOffset

P = TruncationPhase
SECOND: Final = "b-to-c"
SECOND_ID: Final = str(uuid.UUID(int=8, version=4))
INDEX: Final = {"A": 11, "B": 22, "C": 33}
SOURCE, MIDDLE, LAST = "local-t", "remote-t", "last-t"
PARTITIONS: Final = 2
SEEDS: Final = 12
STEPS: Final = (P.COMPARING, P.SALVAGING, P.SPOOLING, P.RECREATING, P.REFILLING, P.RESTORING, P.CLEANING)


class Chain:
    """Clusters A, B and C: ``local-*`` leads to ``remote-*``, which leads to ``last-*``."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.clusters = {name: TruncatedCluster(self.random, (1,)) for name in "ABC"}
        self.controls = {name: FakeControl(name, self.random) for name in "ABC"}
        self.ends: dict[str, End] = {}
        self.wires: dict[str, Wire] = {}
        self.kill_at: dict[str, set[TruncationPhase]] = {"B": set(), "C": set()}
        self.kills: list[asyncio.Task[None]] = []
        self._killing = {name: asyncio.Lock() for name in "ABC"}
        self.waited: set[str] = set()
        """Reasons that C's topic showed."""
        for name, control in self.controls.items():
            self.clusters[name].add_topic("__isthmus_control")
            for cluster_id, index in INDEX.items():
                control.apply(RegisterProducerIds(cluster_id, index))
        self._link(LINK, LINK_ID, "A", "local-", "B", "remote-")
        self._link(SECOND, SECOND_ID, "B", "remote-", "C", "last-")
        for name in "BC":
            self._watch(name)

    def _link(self, link: str, link_id: str, leader: str, leads: str, follower: str, follows: str) -> None:
        topic, secret = ResourceType.TOPIC, Sealer(None).seal(Secret(SECRET), link_id)
        for name, other, local, remote, role in (
            (leader, follower, leads, follows, Role.LEADER),
            (follower, leader, follows, leads, Role.FOLLOWER),
        ):
            control = self.controls[name]
            control.apply(CreateLink(link, link_id, other, name == leader, ("127.0.0.1:1",), (), secret))
            control.apply(AttachNamespace(link, topic, local, remote, role, create_missing=True))

    def _watch(self, name: str) -> None:
        control = self.controls[name]
        append = control.append

        async def watched(body: Body) -> Outcome:
            outcome = await append(body)
            if isinstance(body, AdvanceTruncation) and body.phase in self.kill_at[name]:
                self.kill_at[name].discard(body.phase)
                self.kills.append(asyncio.get_running_loop().create_task(self.kill(name)))
            return outcome

        control.append = watched  # type: ignore[method-assign]

    def start(self, name: str) -> None:
        assert name not in self.ends, "leases keep a second one from being there"
        self.ends[name] = End(self.clusters[name], self.controls[name], data_directory=self.directory / name)

    def connect(self, link: str) -> None:
        one, other = ("A", "B") if link == LINK else ("B", "C")
        if link in self.wires:
            self.wires[link].cut()
        if one in self.ends and other in self.ends:
            self.wires[link] = connected(self.random, self.ends[one], self.ends[other], link)

    async def stop(self, name: str) -> None:
        for link in (LINK, SECOND) if name == "B" else (LINK,) if name == "A" else (SECOND,):
            if link in self.wires:
                self.wires[link].cut()
        self.controls[name].unsubscribe_all()
        end = self.ends.pop(name, None)
        if end is not None:
            await end.stop()

    async def kill(self, name: str) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.005, 0.02, 0.3)))
        async with self._killing[name]:
            await self.stop(name)
            await asyncio.sleep(self.random.choice((0.0, 1.0)))
            self.start(name)
        for link in (LINK, SECOND):
            if link not in self.wires or not self.wires[link].open:
                self.connect(link)

    def equal(self) -> bool:
        """Whether all three have the same records at the same offsets."""
        if any(name not in self.clusters[cluster].found for cluster, name in zip("BC", (MIDDLE, LAST), strict=True)):
            return False
        for index in range(PARTITIONS):
            logs = [self.clusters["A"].partition(SOURCE, index), self.clusters["B"].partition(MIDDLE, index)]
            logs.append(self.clusters["C"].partition(LAST, index))
            if len({(log.start, log.end) for log in logs}) > 1:
                return False
            if any(records_of(log, 0, log.end) != records_of(logs[0], 0, log.end) for log in logs[1:]):
                return False
        return True

    def over(self) -> bool:
        """Whether nothing is truncated any more, and what B lost is lost at C."""
        return self.equal() and all(kill.done() for kill in self.kills) and not self._truncating()

    def _truncating(self) -> bool:
        return any(self.controls[name].state.truncations for name in "BC")

    async def until(self, what: str, ready: Callable[[], bool], timeout_s: float = 120.0) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not ready():
            assert loop.time() < deadline, f"{what}: not within {timeout_s:.0f} s\n{self.describe()}"
            if (last := self.ends.get("C")) is not None and LAST in last.parts.follower_topics.refused:
                self.waited.add(last.parts.follower_topics.refused[LAST].code)
            await asyncio.sleep(0.02)

    def describe(self) -> str:
        lines = []
        for name, topic in (("A", SOURCE), ("B", MIDDLE), ("C", LAST)):
            state = self.controls[name].state
            lines += [f"{name}: {each.describe()}" for each in state.truncations.values()]
            lines.append(f"{name}: follows {state.follower_topics.get(topic)}")
            if topic in self.clusters[name].found:
                lines += [partition.describe() for partition in self.clusters[name].found[topic].partitions]
            if (end := self.ends.get(name)) is not None:
                lines += [f"{name} refused {end.parts.follower_topics.refused}", f"{name} stopped {end.leader.stopped}"]
        return "\n".join(lines)


async def simulate(chain: Chain, harm: Callable[[Chain], None], trouble: float = 0.0) -> None:
    """Let all three catch up, do B harm, and wait until they are equal again; then they go on."""
    topic = chain.clusters["A"].add_topic(SOURCE, PARTITIONS)
    for index, partition in enumerate(topic.partitions):
        partition.leader_epoch = 3
        for number in range(20):
            partition.write_values(b"%d-%d" % (index, number), producer_id=-1)
    for name in "ABC":
        chain.start(name)
    for link in (LINK, SECOND):
        chain.connect(link)
    await chain.until("all have everything", chain.equal)
    chain.clusters["C"].offsets = {
        "behind": {(LAST, 0): CommittedOffset(5, "m")},
        "beyond": {(LAST, 0): CommittedOffset(22, "")},
    }
    harm(chain)
    for cluster in chain.clusters.values():
        cluster.trouble = trouble
    await chain.until("B is truncated", lambda: bool(chain.controls["B"].state.past_truncations), 900)
    for partition in topic.partitions:
        partition.write_values(b"more")
    await chain.until("all are equal again", chain.over, 900)
    for cluster in chain.clusters.values():
        cluster.trouble = 0.0
    for partition in topic.partitions:
        partition.write_values(b"last")
    await chain.until("they go on", chain.over, 300)
    for name in "BC":
        assert not [each for each in chain.clusters[name].found if each.startswith(SPOOL_PREFIX)]
    for name in "ABC":
        await chain.stop(name)


def rogue(chain: Chain) -> None:
    """Somebody writes to B, past its proxy, and C copies that."""
    partition = chain.clusters["B"].partition(MIDDLE)
    for number in range(3):
        partition.write_values(b"rogue-%d" % number)


def lossy(chain: Chain) -> None:
    """A loses records, and gets others of a new epoch."""
    partition = chain.clusters["A"].partition(SOURCE)
    partition.cut(17)
    partition.move(1)
    partition.write_values(b"another")


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)


def test_the_last_one_is_cut_as_well_and_follows_the_topic_that_was_made_anew(tmp_path: Path) -> None:
    chain = Chain(1, tmp_path)
    run_simulated(simulate(chain, lossy))
    middle, last = (chain.controls[name].state for name in "BC")
    (made,) = middle.past_truncations
    (cut,) = last.past_truncations
    assert made.succession is not None
    assert cut.source == made.succession
    assert cut.reason.code == ReasonCode.SOURCE_TRUNCATED
    assert [(each.offset, each.log_end) for each in cut.cuts] == [(17, 20), (20, 20)]
    assert salvaged(tmp_path / "C") == [b"0-17", b"0-18", b"0-19"]
    assert last.follower_topics[LAST].source_topic_id == made.new_topic_id
    ranges = last.provenance(LAST, 0)
    assert [(each.source_topic_id, each.start_offset, each.end_offset) for each in ranges] == [
        (made.topic_id, 0, 17),
        (made.new_topic_id, 17, None),
    ]
    assert [(each.epoch, each.start_offset) for each in ranges[-1].epochs] == [(0, 17)]
    assert ReasonCode.SOURCE_TRUNCATING in chain.waited
    assert ReasonCode.SOURCE_TOPIC_ID_CHANGED not in chain.waited
    assert chain.clusters["C"].offsets == {
        "behind": {(LAST, 0): CommittedOffset(5, "m")},
        "beyond": {(LAST, 0): CommittedOffset(17, "")},
    }


@pytest.mark.parametrize("seed", quarters(range(SEEDS)))
def test_kills_and_trouble_at_every_step_of_either(seed: int, tmp_path: Path) -> None:
    chain = Chain(seed, tmp_path)
    for name in "BC":
        chain.kill_at[name] = set(chain.random.sample(STEPS, 3))
    run_simulated(simulate(chain, rogue if seed % 2 else lossy, 0.03))
    expected = {b"rogue-0", b"rogue-1", b"rogue-2"} if seed % 2 else {b"0-17", b"0-18", b"0-19"}
    assert set(salvaged(tmp_path / "C")) <= expected
    if not seed % 2:
        assert set(salvaged(tmp_path / "C")) == expected
    at = 20 if seed % 2 else 17
    offsets = chain.clusters["C"].offsets
    assert offsets["behind"] == {(LAST, 0): CommittedOffset(5, "m")}
    assert offsets["beyond"][LAST, 0].offset in (at, 22)


def test_a_topic_that_was_deleted_and_created_again_is_no_successor(tmp_path: Path) -> None:
    """What looks the same, but was not stated by B's control log, is refused."""
    chain = Chain(5, tmp_path)

    async def run() -> None:
        chain.clusters["B"].add_topic(MIDDLE, 1).partitions[0].write_values(b"a")
        for name in "BC":
            chain.start(name)
        chain.connect(SECOND)
        clusters = chain.clusters
        await chain.until("C has it", lambda: LAST in clusters["C"].found and clusters["C"].partition(LAST).end == 1)
        del clusters["B"].found[MIDDLE]
        clusters["B"].add_topic(MIDDLE, 1).partitions[0].write_values(b"a")
        await chain.until("C refuses it", lambda: ReasonCode.SOURCE_TOPIC_ID_CHANGED in chain.waited)
        await asyncio.sleep(30)
        assert not chain.controls["C"].state.past_truncations
        assert not chain.controls["C"].state.truncations
        for name in "BC":
            await chain.stop(name)

    run_simulated(run())
