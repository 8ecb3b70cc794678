"""The mode of a link, and what status says of one that is synchronous, between whole plugins on model clusters."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from support.fake_cluster import simulated_now
from support.plugins import Proxy, Two, on_two

from isthmus_control.commands import ClaimBrokers, PartitionSync, RecordSync
from isthmus_control.levels import BOTH_WAYS, with_known_level
from isthmus_control.model import BrokerClaim, LinkMode, Reason, SyncState
from isthmus_plugins import links
from isthmus_plugins.links import OperationError, SetMode
from isthmus_plugins.replication.leader.stream import CLOSE_MS
from isthmus_plugins.replication.link.features import FEATURES
from isthmus_plugins.replication.partitions import LinkPartition

SYNC, DRY = SetMode(mode="synchronous"), SetMode(mode="synchronous", dry_run=True)
ATTACH = links.Attach(local="l-", remote="r-", role="leader")


async def following(two: Two) -> None:
    """``l-t`` of A is copied to ``r-t`` of B."""
    two.clusters["A"].add_topic("l-t", 2).partitions[0].write_values(b"x", b"y")
    await two.create()
    await two.connected()
    await two.a.links.attach("a-to-b", ATTACH)
    await two.until("copied", lambda: len(states(two)) == 2 and set(states(two).values()) == {"Following"})


def states(two: Two) -> dict[int, str]:
    return {each.partition: each.state for each in two.a.status().partitions}


def mode(two: Two) -> LinkMode:
    return two.controls["A"].state.links["a-to-b"].mode


async def refused(proxy: Proxy, code: str, *words: str, request: SetMode = SYNC) -> None:
    with pytest.raises(OperationError) as caught:
        await proxy.links.set_mode("a-to-b", request)
    assert caught.value.code == code, caught.value
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_link_that_follows_is_made_synchronous_and_asynchronous_again() -> None:
    async def work(two: Two) -> None:
        await following(two)
        planned = await two.a.links.set_mode("a-to-b", DRY)
        assert (planned.former_mode, planned.mode, planned.dry_run) == ("asynchronous", "synchronous", True)
        assert mode(two) is LinkMode.ASYNCHRONOUS
        result = await two.a.links.set_mode("a-to-b", SetMode(mode="synchronous", confirm_timeout_ms=4_000))
        assert (result.mode, result.sync_confirm_timeout_ms) == ("synchronous", 4_000)
        status = two.a.status()
        assert (status.mode, status.sync_confirm_timeout_ms) == ("synchronous", 4_000)
        again = await two.a.links.set_mode("a-to-b", SYNC)
        assert (again.former_mode, again.sync_confirm_timeout_ms) == ("synchronous", 4_000)
        await two.b.stop()  # whatever the other side is at
        back = await two.a.links.set_mode("a-to-b", SetMode(mode="asynchronous"))
        assert back.former_mode == "synchronous"
        assert mode(two) is LinkMode.ASYNCHRONOUS

    on_two(work)


def test_a_link_that_does_not_follow_stays_asynchronous() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        await refused(two.a, "CONFLICT", "leads no topics")
        two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"x")
        two.clusters["B"].add_topic("r-other").partitions[0].write_values(b"another's")
        await two.a.links.attach("a-to-b", ATTACH)
        await refused(two.b, "CONFLICT", "leads no topics")
        await two.until("copied", lambda: states(two) == {0: "Following"})
        two.clusters["A"].add_topic("l-other").partitions[0].write_values(b"x")
        await two.until("refused", lambda: "Refused" in states_of(two, "l-other"))
        await refused(two.a, "NOT_FOLLOWING", "l-other-0, Refused")
        await two.b.stop()
        await two.until("lost", lambda: two.a.status().state == "Disconnected")
        await refused(two.a, "NOT_FOLLOWING", "Disconnected", "offsets behind", "isthmus link describe", request=DRY)
        assert mode(two) is LinkMode.ASYNCHRONOUS

    on_two(work)


def test_a_link_under_load_is_made_synchronous_while_its_lag_is_young() -> None:
    async def work(two: Two) -> None:
        await following(two)
        stream = two.a.plugin.parts.leader_end.stream(LinkPartition("a-to-b", "l-t", 0))
        assert stream is not None
        await two.until("read", lambda: stream.at_end)
        stream.saw_end(stream.source_end + 5, simulated_now())  # as if records had come that B has not confirmed
        assert two.a.status().state == "Catching Up"
        assert (await two.a.links.set_mode("a-to-b", DRY)).mode == "synchronous"
        await asyncio.sleep(CLOSE_MS / 1000 + 0.1)
        await refused(two.a, "NOT_FOLLOWING", "5 offsets behind", request=DRY)

    on_two(work)


def states_of(two: Two, topic: str) -> list[str]:
    return [each.state for each in two.a.status().partitions if each.topic == topic]


def test_before_feature_level_6_topics_go_in_one_direction_over_a_synchronous_link() -> None:
    async def work(two: Two) -> None:
        for control in two.controls.values():
            control.state = control.state.evolve(level=BOTH_WAYS - 1)
        await following(two)
        back = links.Attach(local="back-", remote="back-", role="follower")
        await two.a.links.set_mode("a-to-b", SYNC)
        with pytest.raises(OperationError, match="one direction"):
            await two.a.links.attach("a-to-b", back)
        with pytest.raises(OperationError, match="one direction"):
            await two.b.links.attach("a-to-b", links.Attach(local="back-", remote="back-", role="leader"))
        await two.a.links.set_mode("a-to-b", SetMode(mode="asynchronous"))
        await two.a.links.attach("a-to-b", back)
        await refused(two.a, "CONFLICT", "one direction", "'back-'")

    on_two(work)


def test_every_proxy_of_the_peer_takes_part() -> None:
    async def work(two: Two) -> None:
        await following(two)
        (connection,) = two.a.plugin.parts.peers.connections("a-to-b")
        connection.peer.pop("features")  # an older one
        await refused(two.a, "PEER_VERSION_UNSUPPORTED", "proxy b", "upgrade")
        connection.peer["features"] = list(FEATURES)
        two.controls["B"].apply(
            ClaimBrokers(
                "b2", str(uuid.uuid4()), (BrokerClaim(2, "h", 1),), False, None, 10_000, with_known_level("0"), -1
            )
        )
        await refused(two.a, "NOT_FOLLOWING", "proxy b2")

    async def sidecars(two: Two) -> None:
        # One proxy for all brokers would be alone: B's are for some.
        two.b.context.fronted_brokers = frozenset({1})
        await two.b.stop()
        await two.b.start()
        await work(two)

    on_two(sidecars)


def test_status_says_what_an_ack_means() -> None:
    async def work(two: Two) -> None:
        await following(two)
        sync_confirmer = two.a.plugin.parts.sync
        await sync_confirmer.stop()  # what is recorded here is the test's
        level: set[int] = set()
        sync_confirmer.partitions.in_sync = lambda key: key.partition in level  # type: ignore[method-assign]
        sync_confirmer.partitions.new.is_taken_up = lambda *pair: True  # type: ignore[method-assign]
        await two.a.links.set_mode("a-to-b", SYNC)
        status = two.a.status()
        assert status.state == "Syncing"
        assert [(each.state, each.sync.state, each.sync.since_offset) for each in led(status)] == [
            ("Syncing", "Syncing", None)
        ] * 2
        await two.until("told", lambda: {each.state for each in two.b.status().partitions} == {"Syncing"})

        record(two, SyncState.IN_SYNC, 0, 1)
        level.add(0)
        assert (two.a.status().state, [each.state for each in led(two.a.status())]) == (
            "Syncing",
            ["In-Sync", "Syncing"],
        )
        level.add(1)
        record(two, SyncState.IN_SYNC, 0, 1, reached=True)
        status = two.a.status()
        assert status.state == "In-Sync"
        first = led(status)[0]
        assert (first.state, first.sync.since_offset, first.sync.reason) == ("In-Sync", 7, None)
        assert first.sync.since_ms is not None

        record(two, SyncState.OUT_OF_SYNC, 1)
        status = two.a.status()
        assert (status.state, [each.state for each in led(status)]) == ("Out-Of-Sync", ["In-Sync", "Out-Of-Sync"])
        assert (led(status)[1].reason, led(status)[1].message) == ("PEER_SILENT", "nothing heard")
        text = {metric.name: metric for metric in two.a.plugin.isthmus_metrics()}
        counts = {tuple(each.labels.values()): each.value for each in text["isthmus_link_partitions"].samples}
        assert counts["a-to-b", "leader", "Out-Of-Sync", "PEER_SILENT"] == 1
        since = text["isthmus_link_sync_since_timestamp_seconds"].samples
        assert [each.labels["state"] for each in since] == ["In-Sync", "Out-Of-Sync"]
        assert text["isthmus_link_heard_seconds"].samples[0].value >= 0

        # Another topic of its name is another one, and nothing is recorded of it.
        record(two, SyncState.IN_SYNC, 1)
        level.clear()
        assert [(each.state, each.reason) for each in led(two.a.status())] == [("Out-Of-Sync", "NOT_LEVEL_YET")] * 2
        del two.clusters["A"].found["l-t"]
        two.clusters["A"].add_topic("l-t", 2)
        two.a.plugin.parts.leader_end.wake()
        await two.until("seen", lambda: {each.sync.state for each in led(two.a.status())} == {"Syncing"})

    on_two(work)


def led(status: links.LinkStatus) -> list[Any]:
    return [each for each in status.partitions if each.topic == "l-t"]


def record(two: Two, state: SyncState, *partitions: int, reached: bool = False) -> None:
    link = two.controls["A"].state.links["a-to-b"]
    topic_id = str(uuid.UUID(bytes=two.clusters["A"].found["l-t"].topic_id))
    entries = tuple(PartitionSync("l-t", topic_id, partition, 7) for partition in partitions)
    reason = Reason("PEER_SILENT", "nothing heard") if state is SyncState.OUT_OF_SYNC else None
    two.controls["A"].apply(RecordSync("a-to-b", link.link_id, state, entries, reason, reached))
