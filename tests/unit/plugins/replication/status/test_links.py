"""In which states links and partitions are shown, at both ends."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.offsets import commit, group_made, offsets_batch
from support.plugins import Proxy, Two, on_two

from isthmus_control.commands import PartitionSync, RecordSync
from isthmus_control.model import Reason, SyncState
from isthmus_control.states import ReasonCode
from isthmus_plugins import links
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, partition_of

LEADS = links.Attach(local="l-", remote="r-", role="leader")


async def states(two: Two, work: Awaitable[Any], copied: Callable[[], bool]) -> dict[str, list[str]]:
    """The states of the link at each end, one after the other, from before some work until both tell of what it made,
    and that was copied."""
    seen: dict[str, list[str]] = {"A": [], "B": []}

    def look() -> bool:
        ends: dict[str, Proxy] = {"A": two.a, "B": two.b}
        for name, proxy in ends.items():
            state = str(proxy.status().state)
            if seen[name][-1:] != [state]:
                seen[name].append(state)
        return all(proxy.status().partitions for proxy in ends.values()) and copied()

    look()
    await work
    for _ in range(20_000):
        if look():
            return seen
        await asyncio.sleep(0.001)
    raise AssertionError(f"not copied: {seen}")


async def made(two: Two, topic: str, *values: bytes) -> None:
    """A topic of A, and records in it."""
    partition = two.clusters["A"].add_topic(topic).partitions[0]
    if values:
        partition.write_values(*values)


async def attached(two: Two) -> None:
    await two.create()
    await two.connected()
    await two.a.links.attach("a-to-b", LEADS)
    await asyncio.sleep(1)


def end_at_b(two: Two) -> int:
    return two.clusters["B"].partition("r-t").end if "r-t" in two.clusters["B"].found else -1


def test_a_link_remains_following_while_a_topic_comes_and_gets_partitions() -> None:
    async def work(two: Two) -> None:
        await attached(two)

        def pushed() -> bool:
            told = [each for proxy in (two.a, two.b) for each in proxy.status().partitions]
            return len(told) == 2 * len(two.clusters["A"].found["l-t"].partitions) and all(
                each.partition_mirror_lag == 0 for each in told
            )

        found = await states(two, made(two, "l-t"), pushed)
        assert found == {"A": ["Following"], "B": ["Following"]}
        found = await states(two, two.clusters["A"].create_partitions("l-t", 3), pushed)
        assert found == {"A": ["Following"], "B": ["Following"]}

    on_two(work)


def test_a_link_remains_following_while_a_namespace_is_detached() -> None:
    """Until the next look its topics were there still, which nobody pushes any more."""

    async def work(two: Two) -> None:
        await attached(two)
        await two.a.links.attach("a-to-b", links.Attach(local="more-", remote="more-", role="leader"))
        await made(two, "l-t", b"x")
        await two.until("copied", lambda: end_at_b(two) == 1 and two.a.status().state == "Following")
        seen = set[str]()
        topics_of_a, looked = two.clusters["A"].topics, asyncio.Event()

        async def slow() -> Any:
            await looked.wait()
            return await topics_of_a()

        two.clusters["A"].topics = slow  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            detaching = tasks.create_task(two.a.links.detach("a-to-b", "l-"))
            for _ in range(100):
                seen.add(str(two.a.status().state))
                await asyncio.sleep(0.01)
            looked.set()
        await detaching
        assert seen == {"Following"}
        assert not two.a.status().partitions

    on_two(work)


def test_it_is_catching_up_where_the_topic_was_written_to_meanwhile() -> None:
    async def work(two: Two) -> None:
        await attached(two)
        written = made(two, "l-t", b"first", b"second")
        found = await states(two, written, lambda: end_at_b(two) == 2 and two.a.status().state == "Following")
        assert found["A"] == ["Following", "Catching Up", "Following"]

    on_two(work)


@pytest.mark.parametrize("values", [(b"first",), ()], ids=["written", "empty"])
def test_it_is_catching_up_at_once_with_a_topic_that_was_there(values: tuple[bytes, ...]) -> None:
    async def work(two: Two) -> None:
        await attached(two)
        await made(two, "other-t", *values)
        await asyncio.sleep(1)
        await two.a.links.attach("a-to-b", LEADS.model_copy(update={"local": "other-", "remote": "far-"}))
        assert two.a.status().state == "Catching Up"

    on_two(work)


def test_what_was_pushed_over_a_connection_that_is_gone_follows_no_more() -> None:
    async def work(two: Two) -> None:
        await attached(two)
        await made(two, "l-t", b"first")
        await two.until("it follows", lambda: end_at_b(two) == 1 and two.a.status().state == "Following")
        stream = two.a.links._statuses._leader_end.stream(LinkPartition("a-to-b", "l-t", 0))
        connection, stream.connection = stream.connection, SimpleNamespace(lost=True)  # there is another one by now
        assert two.a.status().state == "Catching Up"
        stream.connection = connection

    on_two(work)


def test_a_proxy_that_fronts_nothing_of_a_synchronous_link_says_in_sync_once_all_was() -> None:
    async def work(two: Two) -> None:
        two.b.context.fronted_brokers = frozenset({1})
        await two.b.stop()
        await two.b.start()
        other = Proxy(two.clusters["B"], two.controls["B"], "b2", frozenset({2}))
        await other.start()
        try:
            await attached(two)
            await two.until("connected", lambda: other.status().state == "Following")
            await made(two, "l-t", b"x")
            await two.until("copied", lambda: end_at_b(two) == 1)
            await two.until("follows", lambda: two.a.status().state == "Following")
            await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))
            seen = list[str]()
            while seen[-1:] != ["In-Sync"]:
                status = other.status()
                assert not status.partitions
                assert [each.state for each in status.mappings] == [status.state]
                if seen[-1:] != [status.state]:
                    seen.append(status.state)
                await asyncio.sleep(0.1)
            assert seen[-2:] == ["Syncing", "In-Sync"]
            topic_id = str(uuid.UUID(bytes=two.clusters["B"].found["r-t"].topic_id))
            record = two.controls["B"].state.sync_record("a-to-b", "r-t", topic_id, 0)
            assert record is not None
            assert record.reached

            # It is to have something of it, and does not know of it yet.
            two.clusters["B"].partition("r-t").leader = 2
            await two.until("its own", lambda: other.status().state == "Syncing")
        finally:
            await other.stop()

    on_two(work, 120)


def test_a_link_is_in_sync_once_acks_of_topics_that_come_wait() -> None:
    """What it had was In-Sync before that, and so it was: a topic that was made then was acked alone."""

    async def work(two: Two) -> None:
        await attached(two)
        await made(two, "l-t", b"x")
        await two.until("copied", lambda: end_at_b(two) == 1 and two.a.status().state == "Following")
        await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))
        partitions = two.a.plugin.parts.sync.partitions
        early = False
        while two.a.status().state != "In-Sync":
            status = two.a.status()
            early = early or {each.state for each in status.partitions} == {"In-Sync"}
            assert status.mappings[0].state == status.state
            await asyncio.sleep(0.01)
        assert partitions.new.is_ready("a-to-b", "l-")
        assert early, "or this shows nothing"

    on_two(work)


def test_it_remains_in_sync_while_a_namespace_is_attached() -> None:
    async def work(two: Two) -> None:
        await attached(two)
        await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))
        await two.until("In-Sync", lambda: {each.status().state for each in (two.a, two.b)} == {"In-Sync"})
        more = links.Attach(local="more-", remote="more-", role="follower")
        seen, waited = set[str](), False
        is_ready = two.a.plugin.parts.sync.partitions.new.is_ready
        async with asyncio.TaskGroup() as tasks:
            attaching = tasks.create_task(two.b.links.attach("a-to-b", more))
            while not attaching.done():
                seen |= {str(each.status().state) for each in (two.a, two.b)}
                waited = waited or not is_ready("a-to-b", "more-")
                await asyncio.sleep(0.01)
        assert is_ready("a-to-b", "more-")
        assert waited
        assert seen == {"In-Sync"}

    on_two(work)


def test_a_proxy_that_nobody_waits_for_says_in_sync_once_it_holds_acks_itself() -> None:
    """Whoever attaches the namespace waits for the proxy that was asked, and no longer than that lives."""

    async def work(two: Two) -> None:
        two.a.context.fronted_brokers = frozenset({1})
        other = Proxy(two.clusters["A"], two.controls["A"], "a2", frozenset({2}))
        await other.start()
        try:
            await attached(two)
            await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))
            await two.until("In-Sync", lambda: {each.status().state for each in (two.a, other)} == {"In-Sync"})
            more = links.Attach(local="more-", remote="more-", role="leader")
            is_ready, said = other.plugin.parts.sync.partitions.new.is_ready, set[str]()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(two.a.links.attach("a-to-b", more))
                while not is_ready("a-to-b", "more-"):
                    assert two.a.status().state == "In-Sync"
                    if len(other.status().mappings) == 2:
                        said.add(str(other.status().state))
                    await asyncio.sleep(0.01)
            assert said == {"Syncing"}
            assert other.status().state == "In-Sync"
        finally:
            await other.stop()

    on_two(work, 60)


@pytest.mark.parametrize("has_topics", [True, False], ids=["with topics", "empty"])
def test_a_namespace_is_in_sync_no_sooner_than_acks_of_what_is_in_it_wait(has_topics: bool) -> None:
    """Other namespaces of the link are, and who attaches it may be gone: with its topics it was In-Sync until a look
    had found them, though their acks went alone."""

    async def work(two: Two) -> None:
        await attached(two)
        if has_topics:
            await made(two, "more-t", b"x")
        await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))
        await two.until("In-Sync", lambda: {each.status().state for each in (two.a, two.b)} == {"In-Sync"})
        partitions = two.a.plugin.parts.sync.partitions
        place, said = ("more-t", 0), set[str]()

        def is_held() -> bool:
            return partitions.new.is_ready("a-to-b", "more-") and all(
                partitions.sync_of(LinkPartition("a-to-b", *place)).state == "In-Sync" for _ in range(has_topics)
            )

        topics = two.clusters["A"].topics

        async def late() -> Any:
            await asyncio.sleep(0.2)
            return await topics()

        two.clusters["A"].topics = late  # type: ignore[method-assign]
        more = links.Attach(local="more-", remote="more-", role="leader")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(two.a.links.attach("a-to-b", more))
            while not is_held():
                status = two.a.status()
                of_namespace = next((each for each in status.mappings if each.local == "more-"), None)
                if of_namespace is not None:
                    assert of_namespace.state != "In-Sync"
                    said.add(str(status.state))
                await asyncio.sleep(0.01)
        assert said
        assert not has_topics or "In-Sync" not in said
        assert bool(two.a.status().partitions) is has_topics
        await two.until("In-Sync", lambda: {each.state for each in two.a.status().mappings} == {"In-Sync"})

    on_two(work)


def test_groups_are_in_sync_where_the_first_commit_of_any_group_waits() -> None:
    """It may come to any partition of the offsets topic: with groups in others alone they said In-Sync."""

    async def work(two: Two) -> None:
        await attached(two)
        await made(two, "l-t", b"x")
        two.clusters["A"].add_topic(OFFSETS_TOPIC, 2)
        known = next(name for name in (f"app-{number}" for number in range(9)) if partition_of(name, 2) == 0)
        partition = two.clusters["A"].partition(OFFSETS_TOPIC)
        partition.write(offsets_batch(partition.end, [group_made(known), commit(known, "l-t", 1)]))
        groups = links.Attach(
            type="consumer-group", local="app-", remote="app-", role="leader", disable_transaction_verification=True
        )
        await two.a.links.attach("a-to-b", groups)
        await two.until("copied", lambda: end_at_b(two) == 1 and two.a.status().state == "Following")
        await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))

        def said() -> tuple[str, str | None]:
            [status] = [each for each in two.a.status().mappings if each.type == "consumer-group"]
            return status.state, status.reason

        await two.until("In-Sync", lambda: said() == ("In-Sync", None), 20)
        assert [each.group for each in two.a.status().groups] == [known]
        out_of_sync(two, LinkPartition("a-to-b", OFFSETS_TOPIC, 1))
        assert {each.sync.state for each in two.a.status().groups if each.sync} == {"In-Sync"}
        assert said() == ("Out-Of-Sync", ReasonCode.TIMEOUT_ERROR)
        await two.until("In-Sync", lambda: said() == ("In-Sync", None), 20)

    on_two(work, 60)


async def in_sync_beside_another_proxy(two: Two) -> None:
    """Two topics of A, whose leaders this proxy fronts now, and the other one has them when they move."""
    two.a.context.fronted_brokers = frozenset({1})
    await attached(two)
    await made(two, "l-t", b"x")
    await made(two, "l-other", b"x")
    await two.until("copied", lambda: end_at_b(two) == 1 and two.a.status().state == "Following")
    await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))
    await two.until("In-Sync", lambda: two.a.status().state == "In-Sync")


def test_a_partition_without_a_leader_is_no_proxys_and_counts_for_all() -> None:
    """Acks of it may go alone from when it has one again, and that a look finds later."""

    async def work(two: Two) -> None:
        await in_sync_beside_another_proxy(two)
        partition = two.clusters["A"].partition("l-t")
        leader, partition.leader = partition.leader, -1
        await two.until("it is nobody's", lambda: len(two.a.status().partitions) == 1)
        out_of_sync(two, LinkPartition("a-to-b", "l-t", 0))
        status = two.a.status()
        assert [each.topic for each in status.partitions] == ["l-other"]
        assert (status.state, status.mappings[0].state) == ("Syncing", "Syncing")
        partition.leader = leader
        await two.until("Out-Of-Sync", lambda: two.a.status().state == "Out-Of-Sync")
        await two.until("In-Sync", lambda: two.a.status().state == "In-Sync")

    on_two(work, 60)


def test_a_partition_that_has_just_got_another_leader_counts_for_all() -> None:
    """The proxy that pushed it shows it no more, and the one that is to may not have found it."""

    async def work(two: Two) -> None:
        await in_sync_beside_another_proxy(two)
        out_of_sync(two, LinkPartition("a-to-b", "l-t", 0))
        two.clusters["A"].partition("l-t").move(2)
        await two.until("it is not shown here", lambda: len(two.a.status().partitions) == 1)
        for _ in range(10):
            assert two.a.status().state == "Syncing"
            await asyncio.sleep(0.1)
        await two.until("the other proxy shows it", lambda: two.a.status().state == "In-Sync", 2)

    on_two(work, 60)


def out_of_sync(two: Two, key: LinkPartition) -> None:
    """A proxy of A records a partition Out-Of-Sync."""
    state = two.controls["A"].state
    entry = PartitionSync(key.topic, state.sync_records[key.link][key.place].topic_id, key.partition, 0)
    late = Reason(ReasonCode.TIMEOUT_ERROR, "late")
    link_id = state.links[key.link].link_id
    two.controls["A"].apply(RecordSync(key.link, link_id, SyncState.OUT_OF_SYNC, (entry,), late))


def test_a_synchronous_link_that_has_groups_left_remains_in_sync() -> None:
    """Its topics are detached: it said Syncing for as long as it had no others."""

    async def work(two: Two) -> None:
        await attached(two)
        groups = links.Attach(
            type="consumer-group", local="app", remote="app", role="leader", disable_transaction_verification=True
        )
        await two.a.links.attach("a-to-b", groups)
        await made(two, "l-t", b"x")
        await two.until("copied", lambda: end_at_b(two) == 1 and two.a.status().state == "Following")
        await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))
        await two.until("In-Sync", lambda: {each.status().state for each in (two.a, two.b)} == {"In-Sync"})
        await two.a.links.detach("a-to-b", "l-")
        await two.until("In-Sync still", lambda: {each.status().state for each in (two.a, two.b)} == {"In-Sync"})
        await asyncio.sleep(2)
        assert {each.status().state for each in (two.a, two.b)} == {"In-Sync"}

    on_two(work)
