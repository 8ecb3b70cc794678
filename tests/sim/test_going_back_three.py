"""Three clusters: A led B and C over two links and is gone; C follows B over a third one, from where both part."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_cluster import FakeControl, Partition
from support.plugins import Proxy, Two, on_two
from support.truncating import TruncatedCluster, salvaged, simulate_truncations

from isthmus_control.commands import CloseProvenance, ReleaseLease
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.links import OperationError

TO_B = links.Attach(local="a-", remote="b-", role="leader")
TO_C = links.Attach(local="a-", remote="c-", role="leader")
B_TO_C = links.Attach(local="b-", remote="c-", role="leader")


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)


class Three:
    """``two``: A and B."""

    def __init__(self, two: Two, directory: Path) -> None:
        self.two = two
        self.directory = directory
        rng = two.clusters["A"].random
        self.cluster, self.control = TruncatedCluster(rng, (1,)), FakeControl("C", rng)
        self.cluster.add_topic("__isthmus_control")
        self.control.wall_ms = two.controls["A"].wall_ms
        self.c = Proxy(self.cluster, self.control, "c")
        for each in (two.a, two.b, self.c):
            each.context.data_directory = directory

    def log(self, name: str) -> Partition:
        cluster = self.cluster if name == "C" else self.two.clusters[name]
        return cluster.partition(f"{name.lower()}-t")

    def write(self, name: str, what: str, count: int) -> None:
        for number in range(count):
            self.log(name).write_values(b"%s %d" % (what.encode(), number))

    def has(self, name: str, end: int) -> bool:
        cluster = self.cluster if name == "C" else self.two.clusters[name]
        return f"{name.lower()}-t" in cluster.found and self.log(name).end == end

    def values(self, name: str) -> list[bytes | None]:
        return [record.value for record in self.log(name).records().values()]

    async def stop(self, name: str) -> None:
        """The proxy of a follower is killed."""
        proxy, control = (self.c, self.control) if name == "C" else (self.two.b, self.two.controls["B"])
        await proxy.stop()
        control.unsubscribe_all()
        control.apply(ReleaseLease(proxy.context.proxy_name, proxy.context.incarnation))

    async def start(self, name: str) -> None:
        if name == "C":
            self.c = Proxy(self.cluster, self.control, "c")
            self.c.context.data_directory = self.directory
            await self.c.start()
        else:
            self.two.b = Proxy(self.two.clusters["B"], self.two.controls["B"], "b")
            await self.two.b.start()

    async def begin(self, b: int, c: int, killed: bool = False) -> None:
        """A leads both; B has ``b`` records of it, C ``c``, then A is gone for good, and B was failed over.

        ``killed``: C's proxy, when its cluster has recorded that it follows A no more, and not yet where that ended.
        """
        two = self.two
        await self.c.start()
        two.clusters["A"].add_topic("a-t")
        await two.create()
        await two.create("a-to-c", remote=self.c.address)
        await two.connected()
        await two.a.links.attach("a-to-b", TO_B)
        await two.a.links.attach("a-to-c", TO_C)
        self.write("A", "A's", min(b, c))
        await two.until("both have it", lambda: self.has("B", min(b, c)) and self.has("C", min(b, c)), 60)
        behind = "B" if b < c else "C"
        await self.stop(behind)
        self.write("A", "A's later", abs(b - c))
        await two.until("one is ahead", lambda: self.has("C" if b < c else "B", max(b, c)), 60)
        await two.a.stop()
        await self.start(behind)
        await two.until("A is lost", lambda: not two.b.plugin.parts.peers.connections("a-to-b"), 60)
        await two.b.links.fail_over("a-to-b", Failover(), lambda done, total: None)
        await (self.detach_killed() if killed else self.c.links.detach("a-to-c", "c-", local_only=True))
        request = links.CreateLink(link_name="b-to-c", remote=self.c.address)
        await two.b.links.create(request)

    async def detach_killed(self) -> None:
        append = self.control.append

        async def dies(body: Any) -> Any:
            if isinstance(body, CloseProvenance):
                raise BrokerUnavailable("the process ended here")
            return await append(body)

        self.control.append = dies  # type: ignore[method-assign]
        with pytest.raises(OperationError, match="log ends not recorded"):
            await self.c.links.detach("a-to-c", "c-", local_only=True)
        await self.stop("C")
        self.control.append = append  # type: ignore[method-assign]
        await self.start("C")

    async def follow(self) -> links.AttachResult:
        """C follows B, as the dry run said."""
        dry = await self.two.b.links.attach("b-to-c", B_TO_C.model_copy(update={"dry_run": True}))
        done: links.AttachResult = await self.two.b.links.attach("b-to-c", B_TO_C.model_copy(update={"cut": dry.cut}))
        return done


def on_three(work: Callable[[Three], Awaitable[None]], directory: Path) -> None:
    async def run(two: Two) -> None:
        three = Three(two, directory)
        try:
            await work(three)
        finally:
            await three.c.stop()

    on_two(run, 600, TruncatedCluster)


@pytest.mark.parametrize("written", [0, 4])
def test_a_second_follower_that_is_behind_goes_on_from_its_end(written: int, tmp_path: Path) -> None:
    async def work(three: Three) -> None:
        await three.begin(b=20, c=15)
        three.write("B", "B's", written)
        topic_id = three.cluster.found["c-t"].topic_id
        (plan,) = (await three.follow()).topics
        assert plan.action == "follow"
        await three.two.until("C has all", lambda: three.has("C", 20 + written), 60)
        assert three.values("C") == three.values("B")
        assert three.cluster.found["c-t"].topic_id == topic_id, "nothing was cut"

    on_three(work, tmp_path)


def test_one_whose_proxy_was_killed_as_it_was_detached_goes_on_from_its_end(tmp_path: Path) -> None:
    async def work(three: Three) -> None:
        await three.begin(b=20, c=15, killed=True)
        three.write("B", "B's", 4)
        (plan,) = (await three.follow()).topics
        assert plan.action == "follow"
        await three.two.until("C has all", lambda: three.has("C", 24), 60)
        assert three.values("C") == three.values("B")
        topic_id = str(uuid.UUID(bytes=three.cluster.found["c-t"].topic_id))
        ranges = three.control.state.origins_of("c-t", topic_id, 0).ranges
        assert [(each.origin.cluster_id, each.end_offset) for each in ranges] == [("A", 20), ("B", None)]

    on_three(work, tmp_path)


@pytest.mark.parametrize("written", [0, 4, 9])
def test_one_that_is_ahead_is_cut_to_what_the_new_source_had(written: int, tmp_path: Path) -> None:
    async def work(three: Three) -> None:
        await three.begin(b=15, c=20)
        three.write("B", "B's", written)
        (plan,) = (await three.follow()).topics
        assert plan.action == "cut"
        assert plan.partitions is not None
        assert [(each.shared, each.end, each.source_end) for each in plan.partitions] == [(15, 20, 15 + written)]
        await three.two.until("C is cut", lambda: bool(three.control.state.past_truncations), 60)
        await three.two.until("C has all", lambda: three.has("C", 15 + written), 60)
        assert three.values("C") == three.values("B")
        assert salvaged(tmp_path) == [b"A's later %d" % number for number in range(5)]

    on_three(work, tmp_path)
