"""Going back after a failover with the old source's proxy killed at any step, and the command given again."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.plugins import Proxy, Two, on_two, raise_if_to_end
from support.seeds import seeds
from support.truncating import TruncatedCluster, salvaged, simulate_truncations

from isthmus_control.commands import ReleaseLease
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.links import OperationError

LEADS = links.Attach(local="a-", remote="b-", role="leader")
PARTITIONS = 2


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)


class Scene:
    """A is ahead of B in some topics when it dies, B is failed over and written to, A comes back.

    ``kills``: so many times the proxy of A is killed at one of its commands, before or after that stands in the log.
    """

    def __init__(self, seed: int, two: Two, directory: Path) -> None:
        self.random = random.Random(seed)
        self.two = two
        self.directory = directory
        self.topics = [f"t{number}" for number in range(self.random.randint(1, 3))]
        self.kills = self.random.randint(0, 3)
        self.dying: asyncio.Task[None] | None = None
        self.ahead: set[bytes] = set()

    def logs(self, name: str) -> dict[tuple[str, int], Any]:
        prefix = name.lower() + "-"
        found = self.two.clusters[name].found
        return {
            (topic, index): partition
            for topic in self.topics
            if prefix + topic in found
            for index, partition in enumerate(found[prefix + topic].partitions)
        }

    def values(self, name: str) -> dict[tuple[str, int], list[tuple[int, bytes | None]]]:
        return {
            place: [(offset, record.value) for offset, record in log.records().items()]
            for place, log in self.logs(name).items()
        }

    def write(self, name: str, what: str, most: int) -> set[bytes]:
        """Some records in some partitions."""
        written = set()
        for (topic, index), log in self.logs(name).items():
            for number in range(self.random.randint(0, most)):
                value = f"{what} {topic} {index} {number}".encode()
                log.write_values(value)
                written.add(value)
        return written

    def watch(self) -> None:
        control = self.two.controls["A"]
        append = control.append

        async def killed(body: Any) -> Any:
            dies = self.kills and self.dying is None and self.random.random() < 0.15
            if dies and self.random.random() < 0.5:
                self.die()
                raise BrokerUnavailable("killed before it was recorded")
            outcome = await append(body)
            if dies:
                self.die()
            return outcome

        control.append = killed  # type: ignore[method-assign]

    def die(self) -> None:
        self.kills -= 1
        self.dying = asyncio.get_running_loop().create_task(self._die())

    async def _die(self) -> None:
        two = self.two
        await two.a.stop()
        two.controls["A"].unsubscribe_all()
        await asyncio.sleep(self.random.choice((0.0, 2.0)))
        two.controls["A"].apply(ReleaseLease(two.a.context.proxy_name, two.a.context.incarnation))
        two.a = Proxy(two.clusters["A"], two.controls["A"], "a")
        two.a.context.data_directory = self.directory
        await two.a.start()
        self.dying = None

    async def fail_over(self) -> None:
        two = self.two
        two.a.context.data_directory = self.directory
        for topic in self.topics:
            two.clusters["A"].add_topic("a-" + topic, PARTITIONS)
        self.write("A", "shared", 10)
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", LEADS)
        await two.until("copied", lambda: len(self.logs("B")) == len(self.logs("A")) and self.are_equal(), 60)
        self.write("A", "then", 4)
        await two.until("copied", self.are_equal, 60)
        await two.a.stop()
        two.controls["A"].unsubscribe_all()
        two.controls["A"].apply(ReleaseLease(two.a.context.proxy_name, two.a.context.incarnation))
        await two.until("lost", lambda: not two.b.plugin.parts.peers.connections("a-to-b"))
        if self.random.random() < 0.8:
            self.ahead = self.write("A", "ahead", 3)
        await two.b.links.fail_over("a-to-b", Failover(), lambda done, total: None)
        self.write("B", "new", 6)
        two.a = Proxy(two.clusters["A"], two.controls["A"], "a")
        two.a.context.data_directory = self.directory
        await two.a.start()

    def are_equal(self) -> bool:
        return self.values("A") == self.values("B")

    async def recover(self) -> None:
        """Give the command, on either side, until there is nothing more to do."""
        while True:
            side = self.random.choice((self.two.a, self.two.b))
            try:
                await side.links.recover("a-to-b", links.Recover())
            except (OperationError, AttributeError, asyncio.CancelledError) as error:
                raise_if_to_end(error)
                if isinstance(error, OperationError) and error.code == "NOT_FOUND" and "recover" in error.message:
                    return
            if self.random.random() < 0.5:
                self.write("B", f"meanwhile {self.random.random()}", 2)
            await asyncio.sleep(self.random.choice((0.1, 1.0, 6.0)))

    async def run(self) -> None:
        await self.fail_over()
        before = self.values("B")
        self.watch()
        await self.recover()
        await self.two.until("equal", lambda: self.dying is None and self.are_equal(), 120)
        assert not any(value in self.ahead for log in self.values("A").values() for _, value in log)
        assert {value for value in salvaged(self.directory) if value is not None} >= self.ahead, "it is in files"
        after = self.values("B")
        assert all(after[place][: len(log)] == log for place, log in before.items()), "B is as it was"
        self.write("B", "at last", 2)
        await self.two.until("goes on", lambda: self.dying is None and self.are_equal(), 120)
        self.kills = 0


@pytest.mark.parametrize("seed", seeds(12))
def test_in_the_end_the_old_source_has_what_the_new_one_has(seed: int, tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        await Scene(seed, two, tmp_path).run()

    on_two(work, 3000, TruncatedCluster)
