"""A topic that was deleted at the source goes here where that is set, and for no other reason, whoever is killed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.loopback import LoopbackAcceptor
from support.plugins import Proxy, Two
from support.promoting import on_following

from isthmus_control.anchors import Anchor
from isthmus_control.commands import (
    DeleteFollowerTopic,
    DetachNamespace,
    FollowerTopicDeleted,
    FoundLoss,
    RecordSourceLosses,
    ReleaseLease,
)
from isthmus_control.model import ResourceType
from isthmus_control.source_losses import LossState
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.links import OperationError, PartitionStatus
from isthmus_plugins.process import LinkListenerSpec
from isthmus_plugins.replication.follower.source_deletions import LOOK_INTERVAL_S, UNDER_WAY_S
from isthmus_plugins.replication.leader.discovery import DISCOVERY_INTERVAL_S

LEASE_S = 10.0
"""Of the proxies of the model."""


def on_pair(work: Callable[[Two], Awaitable[None]], setting: str | None = "delete") -> None:
    """``l-t`` at A, which ``r-t`` at B follows, and goes when that is deleted."""

    async def run(two: Two) -> None:
        source_log(two, 0)
        noted = two.controls["B"].state
        await two.until("noted", lambda: two.controls["B"].state.follower_topics["r-t"].source_log, 20)
        assert noted.follower_topics["r-t"].source_log == ""
        if setting is not None:
            wanted = links.AlterMapping(local="l-", on_source_delete=setting)  # type: ignore[arg-type]
            await two.a.links.alter_mapping("a-to-b", wanted)
        await work(two)

    on_following(run, 200)


def source_log(two: Two, generation: int, topic: str = "__isthmus_control") -> None:
    """A has this control log."""
    topic_id = str(uuid.UUID(bytes=two.clusters["A"].found[topic].topic_id))
    two.controls["A"].anchors.known = Anchor("A", topic_id, generation, 1, 0, "")


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


def test_a_target_is_told_at_once_that_acks_of_topics_to_come_wait() -> None:
    async def work(two: Two) -> None:
        await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))
        led = two.a.plugin.parts.leader_end
        await two.until("they wait", lambda: led.holds_from_first("a-to-b", None))
        await asyncio.sleep(2 * DISCOVERY_INTERVAL_S)
        assert two.b.plugin.parts.follower_topics.holds_new("a-to-b")

    on_pair(work, None)


def test_a_synchronous_link_stays_in_sync_while_a_topic_is_made_again() -> None:
    """Acks of the new one are held from its first record on, until the former one is gone and it is followed: for as
    long as they may wait, and it takes more than a lease until it is certain that the former one was deleted."""

    async def work(two: Two) -> None:
        waits = links.SetMode(mode="synchronous", confirm_timeout_ms=int(3000 * LEASE_S))
        await two.a.links.set_mode("a-to-b", waits)
        await two.until("In-Sync", lambda: two.a.status().state == "In-Sync")
        led = two.a.plugin.parts.leader_end
        await two.until("acks of topics to come wait", lambda: led.holds_from_first("a-to-b", None))
        del two.clusters["A"].found["l-t"]
        await asyncio.sleep(1.0)
        new = two.clusters["A"].add_topic("l-t")
        former, shown = two.clusters["B"].found["r-t"], set()

        def made_anew() -> bool:
            told = two.a.status()
            shown.add((told.state, *((each.state, each.reason) for each in told.partitions if each.topic == "l-t")))
            return two.clusters["B"].found.get("r-t", former) is not former and not any(
                each.sync is None or each.sync.from_first for each in told.partitions
            )

        await two.until("made anew", made_anew, 60)
        assert {state for state, *_ in shown} == {"In-Sync"}, shown
        assert ("In-Sync", ("In-Sync", "FORMER_TOPIC_GOES")) in shown
        new.partitions[0].write_values(b"1")
        await two.until("copied", lambda: two.clusters["B"].partition("r-t").end == 1)

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
        control.apply(ReleaseLease("b", two.b.context.incarnation))
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


@pytest.mark.parametrize("sent", [False, True])
def test_what_the_operator_keeps_before_it_is_deleted_stays(sent: bool) -> None:
    """At once where no request was sent; else when none can be carried out any more."""

    async def work(two: Two) -> None:
        cluster, control = two.clusters["B"], two.controls["B"]
        asked = asyncio.Event()
        delete, append = cluster.delete_topic_id, control.append

        async def lost(topic_id: bytes) -> None:
            asked.set()
            raise BrokerUnavailable("no answer")

        async def keeps_then(body: Any) -> Any:
            outcome = await append(body)
            if isinstance(body, DeleteFollowerTopic) and not sent:
                asked.set()
                await keep()
            return outcome

        async def keep() -> None:
            await two.b.links.alter_mapping("a-to-b", links.AlterMapping(local="r-", on_source_delete="keep"))

        cluster.delete_topic_id, control.append = lost, keeps_then  # type: ignore[method-assign]
        del two.clusters["A"].found["l-t"]
        async with asyncio.timeout(60):
            await asked.wait()
        if sent:
            await keep()
        cluster.delete_topic_id = delete  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        await two.until("it is kept", lambda: not control.state.follower_topics["r-t"].deleting, 120)
        assert (asyncio.get_running_loop().time() - began > UNDER_WAY_S - 5) is sent
        await asyncio.sleep(2 * LEASE_S)
        assert cluster.partition("r-t").end == 3
        await two.b.links.detach("a-to-b", "r-")

    on_pair(work)


@pytest.mark.parametrize("how", ["another topic", "another generation"])
def test_another_control_log_of_the_source_does_not_tell_what_was_deleted(how: str) -> None:
    """A cluster that was lost and made anew has none of its topics, and neither has one restored from before them."""

    async def work(two: Two) -> None:
        source, control = two.clusters["A"], two.controls["B"]
        del source.found["l-t"]
        if how == "another topic":
            source.add_topic("new-log")
            source_log(two, 0, "new-log")
        else:
            source_log(two, 1)

        def told() -> bool:
            found = status(two)
            return found is not None and "`isthmus topic forget r-t`" in (found.message or "") and says(found)

        def says(found: PartitionStatus) -> bool:
            return "its control log is not known to be the one that had it" in (found.message or "")

        await two.until("it is told", told, 60)
        await stays(two)
        # What the source has by then, in its new log, goes by that.
        source.add_topic("l-u")
        await two.until("followed", lambda: "r-u" in two.clusters["B"].found)
        new_log = two.controls["A"].anchors.known
        assert new_log is not None
        await two.until("noted", lambda: control.state.follower_topics["r-u"].source_log == new_log.log, 20)
        del source.found["l-u"]
        await two.until("it is gone", lambda: "r-u" not in two.clusters["B"].found, 60)
        assert two.clusters["B"].partition("r-t").end == 3

    on_pair(work)


def test_a_log_that_was_accepted_anew_and_has_the_topic_tells_when_that_is_deleted_later() -> None:
    async def work(two: Two) -> None:
        source_log(two, 1)
        record = two.controls["B"].state.follower_topics
        before = record["r-t"].source_log
        await two.until("noted", lambda: two.controls["B"].state.follower_topics["r-t"].source_log != before, 20)
        del two.clusters["A"].found["l-t"]
        await gone(two)

    on_pair(work)


def test_what_the_source_alone_detached_is_not_followed_into_its_deletion() -> None:
    async def work(two: Two) -> None:
        two.controls["A"].apply(DetachNamespace("a-to-b", ResourceType.TOPIC, "l-"))
        two.clusters["A"].add_topic("m-t")
        await two.a.links.attach("a-to-b", links.Attach(local="m-", remote="s-", role="leader"))
        await two.until("another pair is followed", lambda: "s-t" in two.clusters["B"].found)
        del two.clusters["A"].found["l-t"]
        await stays(two)

    on_pair(work)


def test_what_is_held_or_promoted_is_not_asked_for() -> None:
    """Or the control log would refuse it every two seconds."""

    async def work(two: Two) -> None:
        control = two.controls["B"]
        record, link_id = control.state.follower_topics["r-t"], control.state.links["a-to-b"].link_id
        found = FoundLoss(ResourceType.TOPIC, "r-", "r-t", record.topic_id or "", 0, 1, 3, 2, LossState.HELD)
        control.apply(RecordSourceLosses("a-to-b", link_id, (found,)))
        del two.clusters["A"].found["l-t"]
        await stays(two)

    on_pair(work)


def test_one_of_two_proxies_deletes_it() -> None:
    async def work(two: Two) -> None:
        cluster, control = two.clusters["B"], two.controls["B"]
        other = Proxy(cluster, control, "b2", brokers=frozenset({2}))
        await two.b.stop()
        control.unsubscribe_all()
        control.apply(ReleaseLease("b", two.b.context.incarnation))
        port = two.b.context.port
        assert port is not None
        two.b = Proxy(cluster, control, "b", brokers=frozenset({1}))
        two.b.context.link_listener = LinkListenerSpec("127.0.0.1", port, None, LoopbackAcceptor)
        await two.b.start()
        await other.start()
        try:
            asked: list[bytes] = []
            delete = cluster.delete_topic_id

            async def deleting(topic_id: bytes) -> None:
                asked.append(topic_id)
                await asyncio.sleep(3 * LOOK_INTERVAL_S)
                await delete(topic_id)

            cluster.delete_topic_id = deleting  # type: ignore[method-assign]
            del two.clusters["A"].found["l-t"]
            await gone(two)
            assert len(asked) == 1
        finally:
            await other.stop()

    on_pair(work)


def test_many_go_one_after_the_other_and_a_failover_waits_for_few() -> None:
    async def work(two: Two) -> None:
        source, target, control = two.clusters["A"], two.clusters["B"], two.controls["B"]
        names = [f"l-{number}" for number in range(60)]
        for name in names:
            source.add_topic(name)
        await two.until("all follow", lambda: len(control.state.follower_topics) == 61, 30)

        def noted() -> bool:
            return all(each.source_log for each in control.state.follower_topics.values())

        await two.until("noted", noted, 30)
        most = 0
        delete = target.delete_topic_id

        async def deleting(topic_id: bytes) -> None:
            nonlocal most
            most = max(most, sum(each.deleting for each in control.state.follower_topics.values()))
            await asyncio.sleep(0.5)
            await delete(topic_id)

        target.delete_topic_id = deleting  # type: ignore[method-assign]
        for name in names:
            del source.found[name]
        await two.until("some are gone", lambda: len(control.state.follower_topics) < 50, 60)
        assert most == 1
        request = Failover(although_reachable=True)
        began = asyncio.get_running_loop().time()
        report = await two.b.links.fail_over("a-to-b", request, lambda done, total: None)
        assert asyncio.get_running_loop().time() - began < 10
        assert [each.promoted for each in report.namespaces] == [True]
        left = {name for name in target.found if name.startswith("r-")}
        assert len(left) > 40
        await asyncio.sleep(2 * LEASE_S)
        assert {name for name in target.found if name.startswith("r-")} == left
        recorded = [each for each in control.commands if isinstance(each, DeleteFollowerTopic)]
        assert len(recorded) == 61 - len(left), "the others are not asked of the control log in vain"

    on_pair(work)


def test_a_failover_that_waits_for_one_goes_on_by_itself() -> None:
    async def work(two: Two) -> None:
        cluster, control = two.clusters["B"], two.controls["B"]
        delete = cluster.delete_topic_id

        async def lost(topic_id: bytes) -> None:
            raise BrokerUnavailable("no answer")

        cluster.delete_topic_id = lost  # type: ignore[method-assign]
        del two.clusters["A"].found["l-t"]
        await two.until("it is to go", lambda: control.state.follower_topics["r-t"].deleting, 60)
        with pytest.raises(OperationError, match="'r-t' is being deleted"):
            await two.b.links.fail_over("a-to-b", Failover(although_reachable=True), lambda done, total: None)
        assert control.state.promotions
        cluster.delete_topic_id = delete  # type: ignore[method-assign]
        await two.until("it is failed over", lambda: not control.state.promotions, 30)
        assert "r-t" not in cluster.found

    on_pair(work)
