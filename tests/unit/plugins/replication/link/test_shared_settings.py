"""What both clusters of a link know of it: its mode and settings, and at the target what was leased."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.plugins import Two, on_two

from isthmus_control.clock import Hlc
from isthmus_control.commands import AlterLink, AttachNamespace, CreateNamespace
from isthmus_control.model import LinkMode, ResourceType, Role
from isthmus_plugins import links
from isthmus_plugins.links import OperationError, SetMode

SYNC, ASYNC = SetMode(mode="synchronous", confirm_timeout_ms=4_000), SetMode(mode="asynchronous")
ATTACH = links.Attach(local="l-", remote="r-", role="leader")


async def following(two: Two) -> None:
    two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"x", b"y")
    await two.create()
    await two.connected()
    await two.a.links.attach("a-to-b", ATTACH)
    await two.until("copied", lambda: [each.state for each in two.a.status().partitions] == ["Following"])


async def in_sync(two: Two) -> None:
    await following(two)
    await two.a.links.set_mode("a-to-b", SYNC)
    await two.until("In-Sync at both", lambda: two.a.status().state == two.b.status().state == "In-Sync")


def settings(two: Two, name: str) -> tuple[LinkMode, dict[str, str]]:
    link = two.controls[name].state.links["a-to-b"]
    return link.mode, link.config


def test_both_sides_have_the_later_write_whoever_made_it() -> None:
    async def work(two: Two) -> None:
        await following(two)
        two.controls["B"].state = two.controls["B"].state.evolve(clock=Hlc(9_999_999_999, 3, "B"))  # its clock is ahead
        await two.a.links.set_mode("a-to-b", SYNC)
        wanted = LinkMode.SYNCHRONOUS, {"sync.confirm.timeout.ms": "4000"}
        await two.until("both", lambda: settings(two, "A") == settings(two, "B") == wanted)
        await two.b.links.set_mode("a-to-b", ASYNC)
        await two.until("both", lambda: settings(two, "A")[0] is settings(two, "B")[0] is LinkMode.ASYNCHRONOUS)
        addresses = {name: two.controls[name].state.links["a-to-b"].remote_addresses for name in "AB"}
        await two.a.links.set_mode("a-to-b", SYNC)  # A's clock is behind; what it has taken from B is not
        await two.until("both", lambda: settings(two, "A") == settings(two, "B") == wanted)
        assert addresses == {name: two.controls[name].state.links["a-to-b"].remote_addresses for name in "AB"}

    on_two(work)


def test_what_was_written_apart_meets_when_the_link_is_back() -> None:
    async def work(two: Two) -> None:
        await in_sync(two)
        await two.b.stop()
        await two.a.links.set_mode("a-to-b", ASYNC)
        assert settings(two, "B")[0] is LinkMode.SYNCHRONOUS
        await two.b.start()
        two.controls["A"].apply(AlterLink("a-to-b", remote_addresses=(two.b.address,)))
        await two.until("met", lambda: settings(two, "B")[0] is LinkMode.ASYNCHRONOUS)

    on_two(work)


def test_a_mode_that_the_other_cluster_refuses_is_not_set() -> None:
    async def work(two: Two) -> None:
        await following(two)
        two.controls["B"].apply(CreateNamespace(ResourceType.TOPIC, "x-", informational=True))
        two.controls["B"].apply(AttachNamespace("a-to-b", ResourceType.TOPIC, "x-", "x-", Role.FOLLOWER))
        with pytest.raises(OperationError, match=r"cluster B does not take .* informational") as raised:
            await two.a.links.set_mode("a-to-b", SYNC)
        assert raised.value.code == "CONFLICT"
        assert settings(two, "A")[0] is LinkMode.ASYNCHRONOUS
        # Set all the same, it takes hold of nothing, and says why.
        two.controls["A"].apply(AlterLink("a-to-b", mode=LinkMode.SYNCHRONOUS))
        await two.until("said", lambda: "informational" in (two.a.status().message or ""))
        appended = len(two.controls["B"].commands)
        await asyncio.sleep(0.5)
        assert two.a.status().state == "Syncing"
        assert len(two.controls["B"].commands) == appended, "what is refused again and again is not recorded"

    on_two(work)


def test_the_target_says_until_when_it_was_in_sync_and_so_does_its_next_process() -> None:
    async def work(two: Two) -> None:
        await in_sync(two)
        (there,) = two.b.status().partitions
        assert (there.state, there.sync.state) == ("In-Sync", "In-Sync")
        assert there.sync.until_ms is not None
        assert two.b.status().mode == "synchronous"
        await two.a.stop()
        await two.until("it ran out", lambda: two.b.status().partitions[0].sync.state == "Unknown")
        status = two.b.status()
        (there,) = status.partitions
        assert (status.state, there.state, there.reason) == ("Out-Of-Sync", "Out-Of-Sync", "LEASE_RAN_OUT")
        assert "In-Sync until 20" in there.message
        assert status.last_heard_seconds is not None
        until_ms = there.sync.until_ms
        await two.until("recorded", lambda: two.controls["B"].state.claims)
        text: Any = {metric.name: metric for metric in two.b.plugin.isthmus_metrics()}
        (sample,) = text["isthmus_link_sync_until_timestamp_seconds"].samples
        assert sample.value == until_ms / 1000
        assert [each.value for each in text["isthmus_link_synchronous"].samples] == [1]

        await two.b.stop()
        await two.b.start()
        (there,) = two.b.status().partitions
        assert (there.state, there.sync.state, there.sync.until_ms) == ("Out-Of-Sync", "Unknown", until_ms)

    on_two(work)


def test_the_target_says_what_the_source_tells_of_what_it_does_not_lease() -> None:
    async def work(two: Two) -> None:
        await following(two)
        await two.a.plugin.parts.sync.stop()
        await two.a.links.set_mode("a-to-b", SYNC)
        await two.until("told", lambda: two.b.status().partitions[0].state == "Syncing")
        assert two.b.status().partitions[0].sync.until_ms is None

    on_two(work)
