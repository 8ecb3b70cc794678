"""Every loop of a replication plugin, killed by its name: it shows, it begins anew, and the link goes on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from support.fake_cluster import run_simulated
from support.group_replicas import PLACE, log
from support.offsets import commit, group_made
from support.partition_log import Partition
from support.plugins import Proxy, Two, on_two
from support.replicas import LINK as REPLICAS_LINK
from support.replicas import Replicas

from isthmus_control.commands import AlterLink
from isthmus_control.model import LinkMode
from isthmus_control.states import ReasonCode
from isthmus_plugins import links
from isthmus_plugins.replication.groups import leader
from isthmus_plugins.replication.groups.leader import GroupLeader
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.tasks import RECOVERED_S
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

LINK = "a-to-b"


def kept() -> list[tuple[str, asyncio.Task[Any]]]:
    """By name: what is kept now, of both proxies."""
    found = [
        (task.get_name(), task)
        for task in asyncio.all_tasks()
        if getattr(getattr(task.get_coro(), "cr_code", None), "co_name", "") == "_kept"
    ]
    return sorted(found, key=lambda each: each[0])


def kill(task: asyncio.Task[Any]) -> bool:
    """Have fail what a task waits for; False: that is another task."""
    waits_for = getattr(task, "_fut_waiter", None)
    if waits_for is None or isinstance(waits_for, asyncio.Task) or waits_for.done():
        return False
    waits_for.set_exception(RuntimeError("injected"))
    return True


class Scene:
    """A link with a topic and a group, both of which follow."""

    def __init__(self, two: Two) -> None:
        self.two = two
        self.source = two.clusters["A"].add_topic("m-t").partitions[0]
        self.written = 0

    async def start(self) -> None:
        await self.two.create()
        await self.two.connected()
        for request in (
            links.Attach(local="m-", remote="s-", role="leader"),
            links.Attach(
                local="g-",
                remote="h-",
                role="leader",
                type="consumer-group",
                disable_transaction_verification=True,
            ),
        ):
            await self.two.a.links.attach(LINK, request)
        await self.arrives()
        await self.two.connected()

    @property
    def target(self) -> Partition | None:
        topic = self.two.clusters["B"].found.get("s-t")
        return None if topic is None else topic.partitions[0]

    async def arrives(self) -> None:
        """A record is written, and is at the other side."""
        self.source.write_values(str(self.written).encode())
        self.written += 1
        await self.two.until(
            f"record {self.written}",
            lambda: (target := self.target) is not None and target.end == self.source.end,
        )

    def failing(self) -> dict[str, Proxy]:
        return {each.name: proxy for proxy in (self.two.a, self.two.b) for each in proxy.context.supervision.failing}


@pytest.mark.fails_on_purpose
def test_each_loop_that_is_killed_shows_and_goes_on() -> None:
    async def work(two: Two) -> None:
        scene = Scene(two)
        await scene.start()
        names = [name for name, _ in kept()]
        assert len(names) > 40
        killed = set()
        for index, name in enumerate(names):
            before = kept()
            if len(before) <= index or before[index][0] != name:
                continue
            if not kill(before[index][1]):
                continue
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            killed.add(name)
            assert name in scene.failing(), name
            status = scene.failing()[name].status()
            assert status.state == "Catching Up", name
            assert status.reason == ReasonCode.INTERNAL_ERROR
            assert name in str(status.message)
            assert "injected" in str(status.message)
            await asyncio.sleep(RECOVERED_S + 1)
            assert scene.failing() == {}
            await scene.arrives()
            await two.connected()
        assert set(names) == killed

    on_two(work, 1500)


@pytest.mark.fails_on_purpose
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_a_push_of_committed_offsets_that_fails_in_the_middle_is_made_whole(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counted as pushed and never left would be missing at the target, which would be In-Sync without it."""
    groups = [f"app-{number}" for number in range(1, 6)]
    asked: list[str] = []
    real = GroupLeader._committed_offset

    def failing(self: GroupLeader, feed: Any, source: Any, key: Any, age: Any) -> Any:
        asked.append(key.group)
        if len(asked) == nth:
            raise RuntimeError("injected")
        return real(self, feed, source, key, age)

    async def work() -> None:
        replicas = Replicas(random.Random(1))
        replicas.attach_groups()
        replicas.a.add_topic("local-t").partitions[0].write_values(*[b"x"] * 10)
        replicas.a.add_topic(OFFSETS_TOPIC)
        for group in groups:
            log(replicas, group_made(group), commit(group, "local-t", 5))
        replicas.controls["A"].apply(AlterLink(REPLICAS_LINK, mode=LinkMode.SYNCHRONOUS))
        replicas.start()
        await replicas.connect()
        await asyncio.sleep(60)
        end, key = replicas.ends["A"], LinkPartition(REPLICAS_LINK, OFFSETS_TOPIC, 0)
        assert len(asked) > nth
        assert end.sync_confirmer.partitions.in_sync(key)
        there = {group: replicas.b.offsets[f"far-{group}"][PLACE].offset for group in groups}
        assert there == dict.fromkeys(groups, 5)
        log(replicas, commit("app-1", "local-t", 7))
        await asyncio.sleep(20)
        assert replicas.b.offsets["far-app-1"][PLACE].offset == 7
        await replicas.stop()

    monkeypatch.setattr(leader, "OFFSETS_AT_ONCE", 1)
    monkeypatch.setattr(GroupLeader, "_committed_offset", failing)
    run_simulated(work())
