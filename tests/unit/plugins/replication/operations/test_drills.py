"""Drills: what a failover would lose and how long it takes, while nothing of what follows changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.offsets import commit, group_made, offsets_batch
from support.plugins import Two
from support.promoting import Killing, on_following, replaced
from support.seeds import quarters

from isthmus_control.control_state import ControlState
from isthmus_control.model import DRILL_PREFIX
from isthmus_plugins import links
from isthmus_plugins.cluster import CommittedOffset
from isthmus_plugins.drill_report import DrillFailover, DrillReport, LostByFailover
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.links import NamespaceRef, OperationError
from isthmus_plugins.replication.follower.position import LOST_REQUEST_MARGIN_S
from isthmus_plugins.replication.in_doubt.pending_offsets import OFFSETS
from isthmus_plugins.replication.in_doubt.store import DECISION, Entry
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

ALL, DRY = DrillFailover(), DrillFailover(dry_run=True)
TRANSACTIONAL = 0x10
X = 7


async def drill(two: Two, at: str = "b", request: DrillFailover = DRY) -> DrillReport:
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


def of_drills(two: Two) -> list[str]:
    """What there is of copies at the follower's cluster, also in what is recorded."""
    state, cluster = two.controls["B"].state, two.clusters["B"]
    names: list[Any] = [*cluster.found, *cluster.offsets, *state.links, *state.follower_topics]
    names += [key.prefix for key in (*state.namespaces, *state.promotions)]
    return sorted(name for name in names if name.startswith(DRILL_PREFIX))


def real(state: ControlState) -> tuple[Any, ...]:
    """What is recorded of what is no copy."""

    def own(table: Any) -> dict[Any, Any]:
        return {key: each for key, each in table.items() if not str(key).startswith(DRILL_PREFIX)}

    namespaces = {key: each for key, each in state.namespaces.items() if not key.prefix.startswith(DRILL_PREFIX)}
    return own(state.links), namespaces, own(state.follower_topics), own(state.histories), own(state.origins)


def logs(two: Two) -> dict[str, list[int]]:
    found = two.clusters["B"].found
    return {name: [each.end for each in topic.partitions] for name, topic in found.items() if not name.startswith("_")}


async def with_open_transaction(two: Two) -> None:
    """In l-t and its copy, and a group that has committed an offset there."""
    two.clusters["A"].partition("l-t").write_values(
        b"open", producer_id=X, producer_epoch=1, base_sequence=0, attributes=TRANSACTIONAL
    )

    def confirmed() -> dict[str, int | None]:
        return {each.topic: each.follower_end for each in two.a.status().partitions}

    await two.until("the source knows that it is copied", lambda: confirmed()["l-t"] == 4)


def test_a_copy_is_failed_over_and_nothing_else_changes() -> None:
    async def work(two: Two) -> None:
        cluster = two.clusters["B"]
        await groups_follow(two)
        await with_open_transaction(two)
        before = real(two.controls["B"].state), logs(two), dict(cluster.found["r-t"].configs)
        report = await drill(two, request=ALL)
        assert (report.lost.known, report.lost.records) == (True, 0)
        assert report.copy_size is not None
        assert (report.copy_size.topics, report.copy_size.partitions, report.copy_size.groups) == (1, 1, 1)
        measured = report.measured
        assert measured is not None
        assert (measured.transactions_ended, measured.transactions_committed, measured.positions) == (1, 0, 1)
        assert measured.settings_refused == []
        took = measured.leases_seconds + measured.look_seconds + measured.carry_out_seconds
        assert measured.seconds == pytest.approx(took, abs=0.01)
        assert 0 < measured.carry_out_seconds < LOST_REQUEST_MARGIN_S, "nothing is on its way to a copy"
        assert report.copy_deleted
        assert of_drills(two) == []
        after = real(two.controls["B"].state), logs(two), dict(cluster.found["r-t"].configs)
        assert after == before
        two.clusters["A"].partition("l-t").write_values(b"goes on")
        await two.until("copied", lambda: cluster.partition("r-t").end == 5)

    on_following(work, 60)


async def groups_follow(two: Two) -> None:
    """l-app at A has committed an offset in l-t, and r-app at B has it."""
    log = two.clusters["A"].add_topic("__consumer_offsets", 1).partitions[0]
    attach = links.Attach(
        local="l-", remote="r-", role="leader", type="consumer-group", disable_transaction_verification=True
    )
    await two.a.links.attach("a-to-b", attach)
    log.write(offsets_batch(log.end, [group_made("l-app"), commit("l-app", "l-t", 2)]))
    await two.until("committed", lambda: two.clusters["B"].offsets.get("r-app") == {("r-t", 0): CommittedOffset(2, "")})


def test_what_the_source_had_decided_is_committed_in_the_copy_with_what_is_pending_in_groups() -> None:
    async def work(two: Two) -> None:
        await groups_follow(two)
        await with_open_transaction(two)
        store, link_id = two.b.plugin.parts.store, two.controls["B"].state.links["a-to-b"].link_id
        decided = {"id": "app", "epoch": 2, "data_epoch": 1, "at": [3, 99]}
        pending = {"epoch": 1, "positions": [["r-t", 0, 3, "", 5]]}
        entries = [
            Entry((DECISION, link_id, X, "r-t", 0, "a", "b"), {**decided, "end": 4}),
            Entry((DECISION, link_id, X, OFFSETS_TOPIC, 0, "a", "b"), {**decided, "end": 6}),
            Entry((OFFSETS, link_id, X, "r-app", 0, 5, "a", "b"), pending),
        ]
        await store.put(entries)
        before = await store.entries()
        commits = two.clusters["B"].renewed
        commits.clear()
        measured = (await drill(two, request=ALL)).measured
        assert measured is not None
        assert (measured.transactions_ended, measured.transactions_committed, measured.positions) == (1, 1, 1)
        assert {group.startswith(DRILL_PREFIX) for group, _, _ in commits} == {True}
        assert len(commits) == 2, "the copy's committed offset, and what was pending in it"
        assert await store.entries() == before
        assert of_drills(two) == []
        assert two.clusters["B"].offsets["r-app"] == {("r-t", 0): CommittedOffset(2, "")}
        assert two.clusters["B"].partition("r-t").last_stable_offset == 3, "what follows is open still"

    on_following(work, 60)


STEPS = 20
"""So many changes a drill makes one after the other (records of the control log, settings, topics, groups), and one."""


@pytest.mark.parametrize("at", quarters(range(STEPS)))
def test_one_that_is_killed_leaves_nothing(at: int) -> None:
    async def work(two: Two) -> None:
        await groups_follow(two)
        await with_open_transaction(two)
        before = real(two.controls["B"].state), logs(two)
        killing = Killing(two, at, "create_topic", "commit_offsets", "delete_topic_id", "delete_group")
        try:
            report = await drill(two, request=ALL)
        except OperationError:
            pass
        else:
            assert killing.left >= 0 or not report.copy_deleted, "it is killed while it deletes"
        await replaced(two, killing)
        await two.until("deleted", lambda: of_drills(two) == [], 60)
        after = real(two.controls["B"].state), logs(two)
        assert after == before
        two.clusters["A"].partition("l-t").write_values(b"goes on")
        await two.until("copied", lambda: two.clusters["B"].partition("r-t").end == 5, 60)
        assert (await drill(two, request=ALL)).copy_deleted
        assert of_drills(two) == []

    on_following(work, 300)


def test_one_that_is_cancelled_is_deleted_and_shown_until_then() -> None:
    async def work(two: Two) -> None:
        await with_open_transaction(two)
        tasks = Tasks("test", two.b.context.supervision)
        running = tasks.start("drill", drill(two, request=ALL))
        await two.until("made", lambda: two.b.status().drill is not None)
        shown = two.b.status().drill
        assert shown is not None
        assert (shown.in_use, shown.copy_name.startswith(DRILL_PREFIX)) == (True, True)
        assert [each.link_name for each in two.b.links.statuses()] == ["a-to-b"], "it is no link of an operator's"
        with pytest.raises(OperationError, match="there is no link"):
            two.b.links.status(shown.copy_name)
        with pytest.raises(OperationError, match="is being tried already"):
            await drill(two, request=ALL)
        running.cancel()
        await asyncio.wait([running])
        left = two.b.status().drill
        assert left is None or not left.in_use
        await two.until("deleted", lambda: of_drills(two) == [] and two.b.status().drill is None)

    on_following(work, 60)


def test_what_a_process_before_has_left_without_a_record_goes_too() -> None:
    async def work(two: Two) -> None:
        cluster = two.clusters["B"]
        await two.b.links.drill_failover("a-to-b", DRY, lambda done, total: None)
        cluster.add_topic(f"{DRILL_PREFIX}ab12cd34_0_0")
        cluster.offsets[f"{DRILL_PREFIX}ab12cd34_1_0"] = {}
        assert len(of_drills(two)) == 2
        assert (await drill(two, request=ALL)).copy_deleted
        assert of_drills(two) == []

    on_following(work, 60)


def test_no_copy_is_made_that_is_too_large_or_that_the_control_log_cannot_hold() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("l-u", 3)
        two.a.plugin.parts.leader_end.wake()
        await two.until("made", lambda: "r-u" in two.clusters["B"].found)
        await two.until("follows", lambda: len(two.b.status().partitions) == 4)
        with pytest.raises(OperationError, match="--partitions-max 4") as raised:
            await drill(two, request=DrillFailover(partitions_max=3))
        assert raised.value.code == "TOO_MANY_PARTITIONS"
        planned = await drill(two, request=DrillFailover(partitions_max=3, dry_run=True))
        assert planned.copy_size is not None
        assert (planned.copy_size.topics, planned.copy_size.partitions) == (2, 4)
        assert planned.measured is None
        assert of_drills(two) == []
        control = two.controls["B"]
        control.state = control.state.evolve(level=5)
        with pytest.raises(OperationError, match="feature level 6"):
            await drill(two, request=ALL)

    on_following(work, 60)


def test_its_figures_are_those_of_a_failover() -> None:
    async def work(two: Two) -> None:
        await groups_follow(two)
        await with_open_transaction(two)
        measured = (await drill(two, request=ALL)).measured
        assert measured is not None
        began = asyncio.get_running_loop().time()
        report = await two.b.links.fail_over("a-to-b", Failover(although_reachable=True), lambda done, total: None)
        took = asyncio.get_running_loop().time() - began
        assert all(each.promoted for each in report.namespaces)
        assert sum(each.transactions_ended for each in report.namespaces) == measured.transactions_ended
        assert took == pytest.approx(measured.look_seconds + measured.carry_out_seconds, abs=0.5)

    on_following(work, 60)
