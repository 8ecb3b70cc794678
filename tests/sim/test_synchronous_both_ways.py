"""One synchronous link that leads a namespace each way, and has one of them reversed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.plugins import Proxy, Two, on_two

from isthmus_control.commands import RecordSync
from isthmus_control.model import LinkMode, ResourceType, Role
from isthmus_plugins import links
from isthmus_plugins.links import NamespaceRef

LINK = "a-to-b"
LEADS = {
    "A": links.Attach(local="a-", remote="b-", role="leader", disable_transaction_verification=True),
    "B": links.Attach(local="x-", remote="y-", role="leader", disable_transaction_verification=True),
}
TOPICS = {"A": ("a-t", "y-t"), "B": ("b-t", "x-t")}
GROUPS = {"A": ("ga-", "gb-"), "B": ("gx-", "gy-")}


def values(two: Two, name: str) -> list[list[bytes | None]]:
    found = [two.clusters[name].found.get(topic) for topic in TOPICS[name]]
    return [[each.value for each in topic.partitions[0].records().values()] if topic else [] for topic in found]


def sync_of(proxy: Proxy) -> dict[str, str]:
    """Of each topic, what this side says of its acks."""
    return {each.topic: each.sync.state if each.sync is not None else "" for each in proxy.status().partitions}


def in_sync(two: Two) -> bool:
    return all(set(sync_of(each).values()) == {"In-Sync"} and len(sync_of(each)) == 2 for each in (two.a, two.b))


async def attach(side: Proxy, name: str) -> None:
    """What a cluster leads, topics and groups."""
    groups = links.Attach(
        type="consumer-group",
        local=GROUPS[name][0],
        remote=GROUPS[name][1],
        role="leader",
        disable_transaction_verification=True,
    )
    for each in (LEADS[name], groups):
        await side.links.attach(LINK, each)


def both_ways(work: Callable[[Two], Awaitable[None]], attached_later: bool = False) -> None:
    """``attached_later``: what B leads is attached when the link is synchronous already."""

    async def begun(two: Two) -> None:
        for name, topic in (("A", "a-t"), ("B", "x-t")):
            two.clusters[name].add_topic(topic).partitions[0].write_values(b"first")
        await two.create()
        await two.connected()
        await attach(two.a, "A")
        if not attached_later:
            await attach(two.b, "B")
        await two.until(
            "follows",
            lambda: len(two.a.status().partitions) == 2 - attached_later and two.a.status().state == "Following",
            30,
        )
        await two.a.links.set_mode(LINK, links.SetMode(mode="synchronous"))
        if attached_later:
            await attach(two.b, "B")
        await two.until("copied", lambda: values(two, "A") == values(two, "B") == [[b"first"], [b"first"]], 30)
        await two.until("in sync", lambda: in_sync(two), 60)
        await work(two)

    on_two(begun, 600)


def held(two: Two, name: str, topic: str) -> bool:
    """Whether acks of a topic wait for the other cluster, as its leader has it."""
    side = two.a if name == "A" else two.b
    return LINK in side.plugin.parts.sync.links.leading(topic)


@pytest.mark.parametrize("attached_later", [False, True])
def test_one_of_them_is_reversed_and_both_are_synchronous_after_it(attached_later: bool) -> None:
    async def work(two: Two) -> None:
        assert held(two, "A", "a-t")
        assert held(two, "B", "x-t")
        assert held(two, "A", "__consumer_offsets")
        assert held(two, "B", "__consumer_offsets")
        stays = watched(two)
        for number, (leader, follower) in enumerate((("A", "B"), ("B", "A"))):
            refs = [NamespaceRef(local=leader.lower() + "-")]
            request = links.Reverse(namespaces=refs, disable_transaction_verification=True)
            side = two.a if leader == "A" else two.b
            assert (await side.links.reverse(LINK, request)).reversed
            topic = follower.lower() + "-t"
            two.clusters[follower].partition(topic).write_values(b"%d" % number)
            two.clusters["B"].partition("x-t").write_values(b"also %d" % number)
            await two.until("copied", lambda: values(two, "A") == values(two, "B"), 30)
            await two.until("in sync", lambda: in_sync(two), 60)
            assert held(two, follower, topic)
            # Groups go by the mode where topics are led that they read.
            assert held(two, "A", "__consumer_offsets") == (follower == "A")
            assert held(two, "B", "x-t")
            roles = [
                two.controls[name].state.links[LINK].mapping(ResourceType.TOPIC, name.lower() + "-") for name in "AB"
            ]
            assert [each and each.role for each in roles] == (
                [Role.FOLLOWER, Role.LEADER] if follower == "B" else [Role.LEADER, Role.FOLLOWER]
            )
        assert all(two.controls[name].state.links[LINK].mode is LinkMode.SYNCHRONOUS for name in "AB")
        assert not stays, "what is not reversed has been In-Sync all the time"

    both_ways(work, attached_later)


def watched(two: Two) -> list[Any]:
    """What is said of ``x-t`` that is not In-Sync, as it comes, at either side."""
    said: list[Any] = []

    def changed(_: object) -> None:
        record = two.controls["B"].state.sync_records.get(LINK, {}).get(("x-t", 0))
        if record is None or record.state != "In-Sync":
            said.append(record)

    two.controls["B"].subscribe(changed)
    leases = two.a.plugin.parts.sync_leases
    assert leases.in_sync("y-t", 0)
    return said


def test_each_way_goes_out_of_sync_by_itself_and_comes_back() -> None:
    async def work(two: Two) -> None:
        port = two.b.context.port
        assert port is not None
        two.clusters["A"].partition("y-t").leader = -1
        two.clusters["B"].partition("x-t").write_values(b"not there")
        await two.until("out of sync", lambda: sync_of(two.b)["x-t"] == "Out-Of-Sync", 60)
        assert sync_of(two.a)["a-t"] == "In-Sync"
        assert not [each for each in two.controls["A"].commands if isinstance(each, RecordSync) and each.reason]
        two.clusters["A"].partition("y-t").leader = 1
        await two.until("in sync", lambda: in_sync(two), 60)
        assert values(two, "A") == values(two, "B")

    both_ways(work)


def test_it_becomes_asynchronous_at_either_side() -> None:
    async def work(two: Two) -> None:
        await two.b.links.set_mode(LINK, links.SetMode(mode="asynchronous"))
        await two.until(
            "both know",
            lambda: all(each.state.links[LINK].mode is LinkMode.ASYNCHRONOUS for each in two.controls.values()),
        )
        await asyncio.sleep(3)
        assert not held(two, "A", "a-t")
        assert not held(two, "B", "x-t")
        await two.b.links.set_mode(LINK, links.SetMode(mode="synchronous"))
        await two.until("in sync", lambda: in_sync(two), 60)

    both_ways(work)
