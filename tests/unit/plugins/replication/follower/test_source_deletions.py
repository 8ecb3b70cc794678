"""A topic that was deleted at the source goes here where that is set, and for no other reason, whoever is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.plugins import Proxy, Two
from support.promoting import on_following

from isthmus_control.commands import DeleteFollowerTopic, FollowerTopicDeleted
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import PartitionStatus

LEASE_S = 10.0
"""Of the proxies of the model."""


def on_pair(work: Callable[[Two], Awaitable[None]], setting: str | None = "delete") -> None:
    """``l-t`` at A, which ``r-t`` at B follows, and goes when that is deleted."""

    async def run(two: Two) -> None:
        if setting is not None:
            wanted = links.AlterMapping(local="l-", on_source_delete=setting)  # type: ignore[arg-type]
            await two.a.links.alter_mapping("a-to-b", wanted)
        await work(two)

    on_following(run, 200)


def status(two: Two) -> PartitionStatus | None:
    return next((each for each in two.b.status().partitions if each.topic == "r-t"), None)


async def gone(two: Two) -> None:
    def nothing_is_left() -> bool:
        state = two.controls["B"].state
        return "r-t" not in two.clusters["B"].found and "r-t" not in state.follower_topics

    await two.until("it is gone", nothing_is_left, 60)
    assert "r-t" not in two.controls["B"].state.histories


async def stays(two: Two) -> None:
    await asyncio.sleep(6 * LEASE_S)
    assert two.clusters["B"].partition("r-t").end == 3
    assert not any(isinstance(each, DeleteFollowerTopic) for each in two.controls["B"].commands)


def test_it_goes_with_its_sources_and_a_new_one_is_followed_from_its_start() -> None:
    async def work(two: Two) -> None:
        topic_id = two.clusters["A"].found.pop("l-t").topic_id
        await asyncio.sleep(LEASE_S / 2)
        assert "r-t" in two.clusters["B"].found, "what is out of sight for a moment may be there"
        await gone(two)
        new = two.clusters["A"].add_topic("l-t")
        assert new.topic_id != topic_id
        new.partitions[0].write_values(b"1")
        await two.until("copied", lambda: "r-t" in two.clusters["B"].found and two.clusters["B"].partition("r-t").end)
        assert two.clusters["B"].partition("r-t").end == 1

    on_pair(work)


def test_one_that_was_created_again_is_followed_in_its_place() -> None:
    async def work(two: Two) -> None:
        del two.clusters["A"].found["l-t"]
        two.clusters["A"].add_topic("l-t", 2).partitions[0].write_values(b"1")
        former = two.clusters["B"].found["r-t"]
        await two.until("made anew", lambda: two.clusters["B"].found.get("r-t", former) is not former, 60)
        await two.until("copied", lambda: two.clusters["B"].partition("r-t").end == 1)
        await two.until("it follows", lambda: (found := status(two)) is not None and found.state == "Following")

    on_pair(work)


@pytest.mark.parametrize("setting", [None, "keep"])
def test_it_is_kept_without_that(setting: str | None) -> None:
    async def work(two: Two) -> None:
        del two.clusters["A"].found["l-t"]
        await stays(two)
        found = status(two)
        assert found is not None
        assert found.reason == "SOURCE_TOPIC_MAY_BE_DELETED"
        # What was kept until then goes as well when that is set.
        wanted = links.AlterMapping(local="r-", on_source_delete="delete")
        await two.b.links.alter_mapping("a-to-b", wanted)
        await gone(two)

    on_pair(work, setting)


def test_a_topic_that_the_source_is_not_shown_was_not_deleted() -> None:
    """An ACL that was taken away, say, or a broker that does not know of it yet."""

    async def work(two: Two) -> None:
        source = two.clusters["A"]
        source.hidden["l-t"] = source.found.pop("l-t")
        await stays(two)
        source.found["l-t"] = source.hidden.pop("l-t")
        source.partition("l-t").write_values(b"more")
        await two.until("it goes on", lambda: two.clusters["B"].partition("r-t").end == 4)

    on_pair(work)


def test_a_source_whose_brokers_cannot_all_be_asked_says_nothing() -> None:
    async def work(two: Two) -> None:
        async def unavailable(*asked: Any) -> Any:
            raise BrokerUnavailable("broker 2 is of another cluster, X")

        del two.clusters["A"].found["l-t"]
        two.clusters["A"].unknown_topics = unavailable  # type: ignore[method-assign]
        await stays(two)
        del two.clusters["A"].unknown_topics  # type: ignore[method-assign]
        await gone(two)

    on_pair(work)


def test_a_topic_that_is_there_again_before_it_is_certain_stays() -> None:
    async def work(two: Two) -> None:
        source = two.clusters["A"]
        for _ in range(4):
            topic = source.found.pop("l-t")
            await asyncio.sleep(0.8 * LEASE_S)
            source.found["l-t"] = topic
            await asyncio.sleep(0.5 * LEASE_S)
        assert two.clusters["B"].partition("r-t").end == 3

    on_pair(work)


@pytest.mark.parametrize("step", ["recorded", "deleted", "forgotten"])
def test_whoever_is_killed_another_one_goes_on(step: str) -> None:
    """After it was recorded that it goes, after it was deleted, and when that is not recorded."""

    async def work(two: Two) -> None:
        reached = asyncio.Event()
        cluster, control = two.clusters["B"], two.controls["B"]
        delete, append = cluster.delete_topic_id, control.append

        async def deleting(topic_id: bytes) -> None:
            if step == "recorded":
                reached.set()
                raise BrokerUnavailable("killed")
            await delete(topic_id)
            if step == "deleted":
                reached.set()
                raise BrokerUnavailable("killed")

        async def appending(body: Any) -> Any:
            if step == "forgotten" and isinstance(body, FollowerTopicDeleted):
                reached.set()
                raise BrokerUnavailable("killed")
            return await append(body)

        cluster.delete_topic_id, control.append = deleting, appending  # type: ignore[method-assign]
        del two.clusters["A"].found["l-t"]
        async with asyncio.timeout(60):
            await reached.wait()
        await two.b.stop()
        cluster.delete_topic_id, control.append = delete, append  # type: ignore[method-assign]
        two.b = Proxy(cluster, control, "b")
        await two.b.start()
        # A topic of that name that somebody has made here meanwhile is another one.
        if step != "recorded":
            cluster.add_topic("r-t")
            await two.until("forgotten", lambda: "r-t" not in control.state.follower_topics, 60)
            assert "r-t" in cluster.found
        else:
            await gone(two)

    on_pair(work)


def test_what_the_brokers_refuse_to_delete_is_kept_and_told_and_can_be_failed_over() -> None:
    async def work(two: Two) -> None:
        async def refused(topic_id: bytes) -> None:
            raise KafkaRefused(29, "TOPIC_AUTHORIZATION_FAILED", "no")

        cluster = two.clusters["B"]
        cluster.delete_topic_id = refused  # type: ignore[method-assign]
        del two.clusters["A"].found["l-t"]

        def told() -> bool:
            found = status(two)
            return found is not None and "needs ALLOW Delete on topic r-t" in (found.message or "")

        await two.until("it is told", told, 120)
        assert not two.controls["B"].state.follower_topics["r-t"].deleting
        assert cluster.partition("r-t").end == 3
        await two.b.links.detach("a-to-b", "r-")
        assert cluster.partition("r-t").end == 3

    on_pair(work)
