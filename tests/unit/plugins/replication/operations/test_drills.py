"""Drills: what a failover would lose, said by either cluster while nothing of what follows changes."""

from __future__ import annotations

import pytest
from support.plugins import Two
from support.promoting import on_following

from isthmus_plugins import links
from isthmus_plugins.drill_report import DrillFailover, DrillReport, LostByFailover
from isthmus_plugins.links import NamespaceRef, OperationError

ALL = DrillFailover()


async def drill(two: Two, at: str = "b", request: DrillFailover = ALL) -> DrillReport:
    proxy = two.a if at == "a" else two.b
    report: DrillReport = await proxy.links.drill_failover("a-to-b", request, lambda done, total: None)
    return report


async def lost(two: Two, at: str = "b") -> LostByFailover:
    return (await drill(two, at)).lost


def test_either_cluster_says_that_nothing_is_lost() -> None:
    async def work(two: Two) -> None:
        before = two.controls["B"].state
        for at, role, prefix in (("b", "follower", "r-"), ("a", "leader", "l-")):
            report = await drill(two, at)
            assert (report.asked, [each.local for each in report.namespaces]) == (role, [prefix])
            assert (report.lost.known, report.lost.records, report.lost.seconds) == (True, 0, 0.0)
            assert (report.lost.partitions_total, report.lost.partitions) == (1, [])
        assert two.controls["B"].state.follower_topics == before.follower_topics
        assert two.controls["B"].state.links == before.links

    on_following(work)


def test_what_the_follower_cannot_take_is_lost() -> None:
    async def work(two: Two) -> None:
        two.clusters["B"].down.add(1)
        two.clusters["A"].partition("l-t").write_values(b"1", b"2")
        for at, topic in (("b", "r-t"), ("a", "l-t")):
            found = await lost(two, at)
            assert (found.known, found.records, found.acked_records) == (True, 2, 2)
            (partition,) = found.partitions
            assert (partition.topic, partition.source_end, partition.confirmed) == (topic, 5, 3)
        two.clusters["B"].down.clear()
        await two.until("copied", lambda: two.clusters["B"].partition("r-t").end == 5)
        await two.until("confirmed", lambda: two.a.status().partitions[0].follower_end == 5)
        assert (await lost(two)).records == 0

    on_following(work)


def test_while_the_link_is_cut_the_source_knows_and_the_follower_says_what_it_knew_last() -> None:
    async def work(two: Two) -> None:
        await two.b.stop()
        await two.until("lost", lambda: not two.a.plugin.parts.peers.connections("a-to-b"))
        two.clusters["A"].partition("l-t").write_values(b"1", b"2", b"3", b"4")
        found = await lost(two, "a")
        assert (found.known, found.records, found.partitions[0].confirmed) == (True, 4, 3)

    on_following(work)


def test_without_the_source_the_last_word_is_said_to_be_old() -> None:
    async def work(two: Two) -> None:
        await two.a.stop()
        await two.until("lost", lambda: not two.b.plugin.parts.peers.connections("a-to-b"))
        found = await lost(two)
        assert (found.known, found.reason, found.records) == (False, "SOURCE_AWAY", 0)
        assert found.as_of_seconds is not None

    on_following(work)


def test_a_source_of_before_does_not_say_it() -> None:
    async def work(two: Two) -> None:
        for connection in two.b.plugin.parts.peers.connections("a-to-b"):
            connection.peer["features"] = []
        found = await lost(two)
        assert (found.known, found.reason, found.as_of_seconds) == (False, "PEER_VERSION_UNSUPPORTED", None)
        assert "upgrade" in str(found.message)

    on_following(work)


def test_what_is_asked_for_has_to_follow_or_to_be_led() -> None:
    async def work(two: Two) -> None:
        with pytest.raises(OperationError, match="not attached") as raised:
            await drill(two, request=DrillFailover(namespaces=[NamespaceRef(local="x-")]))
        assert raised.value.http_status == 404
        await two.b.links.attach("a-to-b", links.Attach(local="back-", remote="back-", role="leader"))
        mixed = [NamespaceRef(local="r-"), NamespaceRef(local="back-")]
        with pytest.raises(OperationError, match="leads the others"):
            await drill(two, request=DrillFailover(namespaces=mixed))
        assert (await drill(two)).namespaces == [NamespaceRef(local="r-")]

    on_following(work)
