"""Failover: what follows is written here without its source, says what acks meant, and ends what was open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.offsets import commit, group_made, offsets_batch
from support.plugins import Two
from support.promoting import KEY, Killing, differ, on_following, replaced

from isthmus_control.commands import (
    AlterNamespace,
    DecidePromotion,
    DeleteNamespace,
    DetachNamespace,
    OffsetsClaim,
    RecordClaims,
)
from isthmus_control.commands import PartitionClaim as Claimed
from isthmus_control.model import TRANSACTION_VERIFICATION, AckTerms, ResourceType
from isthmus_control.origins import Ended
from isthmus_plugins import links
from isthmus_plugins.cluster import CommittedOffset, TopicPartition
from isthmus_plugins.failover_report import Failover, FailoverReport
from isthmus_plugins.links import LeftOutName, NamespaceRef, OperationError, Promote, SetMode
from isthmus_plugins.replication.in_doubt.store import DECISION, Entry
from isthmus_protocol.offsets_log import partition_of

DRY, ALL = Failover(dry_run=True), Failover()
TRANSACTIONAL = 0x10
X = 7


async def fail_over(two: Two, request: Failover = ALL) -> FailoverReport:
    report: FailoverReport = await two.b.links.fail_over("a-to-b", request, lambda done, total: None)
    return report


def promoted(two: Two) -> bool:
    state = two.controls["B"].state
    return not state.promotions and not state.namespaces[KEY].reserved


def open_transaction(two: Two, topic: str, sequence: int = 0) -> None:
    two.clusters["A"].partition(topic).write_values(
        b"open", producer_id=X, producer_epoch=1, base_sequence=sequence, attributes=TRANSACTIONAL
    )


async def source_lost(two: Two) -> None:
    await two.a.stop()
    await two.until("lost", lambda: not two.b.plugin.parts.peers.connections("a-to-b"))


def told(two: Two) -> list[str | None]:
    return [each.reason for each in two.a.status().partitions]


def settings(two: Two) -> dict[str, str | None]:
    ours = two.clusters["B"].found["r-t"].configs
    return {name: ours.get(name) for name in ("retention.ms", "compression.type", "message.timestamp.after.max.ms")}


def test_what_is_known_to_differ_is_told_and_keeps_nobody() -> None:
    async def work(two: Two) -> None:
        why = differ(two)
        await source_lost(two)
        assert (await fail_over(two, DRY)).namespaces[0].logs_differ == [why]
        (namespace,) = (await fail_over(two)).namespaces
        assert (namespace.promoted, namespace.logs_differ) == (True, [why])
        assert promoted(two)

    on_following(work)


SOURCES = {"retention.ms": "5", "compression.type": "gzip", "message.timestamp.after.max.ms": None}


def test_the_source_is_not_asked_and_its_settings_are_restored() -> None:
    async def work(two: Two) -> None:
        with pytest.raises(OperationError, match="link promote") as raised:
            await fail_over(two)
        assert raised.value.code == "SOURCE_REACHABLE"
        assert (await fail_over(two, DRY)).reachable
        open_transaction(two, "l-t")
        await two.until("copied", lambda: two.clusters["B"].partition("r-t").end == 4)
        await source_lost(two)
        planned = await fail_over(two, DRY)
        assert (planned.reachable, planned.namespaces[0].transactions_open) == (False, 1)
        assert not promoted(two)
        report = await fail_over(two)
        (namespace,) = report.namespaces
        assert (namespace.promoted, namespace.transactions_ended, namespace.transactions_committed) == (True, 1, 0)
        assert "not known" in namespace.claims[0].message
        assert promoted(two)
        assert not two.b.status().mappings
        assert settings(two) == SOURCES
        assert len(two.clusters["B"].partition("r-t").aborted) == 1
        with pytest.raises(OperationError, match="follows nothing"):
            await fail_over(two)
        with pytest.raises(OperationError, match="does not follow"):
            await fail_over(two, Failover(namespaces=[NamespaceRef(local="r-")]))

    on_following(work)


def test_a_setting_that_is_refused_keeps_nothing_from_becoming_writable() -> None:
    async def work(two: Two) -> None:
        await source_lost(two)
        two.clusters["B"].policy = lambda topic, name, value: "at least a day" if value == "5" else None
        refused = ["r-t: retention.ms=5: POLICY_VIOLATION: at least a day"]
        assert (await fail_over(two, DRY)).namespaces[0].settings_refused == refused
        (report,) = (await fail_over(two)).namespaces
        assert (report.promoted, report.settings_refused) == (True, refused)
        assert promoted(two)
        assert settings(two) == SOURCES | {"retention.ms": "-1"}
        assert two.b.links.topic_reason("r-t") is not None

    on_following(work)


def test_topics_that_the_brokers_refused_to_make_are_told() -> None:
    async def work(two: Two) -> None:
        two.clusters["B"].policy = lambda topic, name, value: "no" if topic == "r-u" else None
        two.clusters["A"].add_topic("l-u")
        refused = "the target refuses the topic: POLICY_VIOLATION: no"

        def shown() -> list[tuple[str, str | None, str | None]]:
            partitions = two.b.status().partitions
            return [(each.state, each.reason, each.message) for each in partitions if each.topic == "r-u"]

        await two.until("told", lambda: shown() == [("Refused", "TARGET_TOPIC_NOT_CREATED", refused)])
        assert two.b.status().state == "Catching Up"
        reason = two.b.links.topic_reason("r-u")
        assert reason is not None
        assert reason.message == refused
        with pytest.raises(OperationError, match="l-u is not followed"):
            await two.b.links.promote("a-to-b", Promote(namespaces=[NamespaceRef(local="r-")]), lambda *done: None)
        await source_lost(two)
        left_out = [LeftOutName(type="topic", name="l-u", reason="r-u was not made here")]
        assert (await fail_over(two, DRY)).namespaces[0].left_out == left_out
        assert (await fail_over(two)).namespaces[0].left_out == left_out
        assert promoted(two)

    on_following(work)


def test_it_goes_on_although_the_source_is_reachable_where_that_is_said() -> None:
    async def work(two: Two) -> None:
        report = await fail_over(two, Failover(although_reachable=True))
        assert (report.reachable, promoted(two)) == (True, True)
        assert [mapping.role for mapping in two.a.status().mappings] == ["leader"]
        await two.until("A says so", lambda: told(two) == ["NOT_FOLLOWING"], 30)
        source, target = two.clusters["A"].partition("l-t"), two.clusters["B"].partition("r-t")
        source.write_values(b"there")
        target.write_values(b"here")
        two.a.plugin.parts.leader_end.wake()
        await two.until("A says so again", lambda: told(two) == ["NOT_FOLLOWING"], 30)
        assert target.end == 4

    on_following(work)


def test_settings_that_the_source_changed_are_restored_too() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].found["l-t"].configs["retention.ms"] = "77"
        records = two.controls["B"].state.follower_topics
        assert records["r-t"].settings["retention.ms"] == "5"
        await two.until("told", lambda: two.controls["B"].state.follower_topics["r-t"].settings["retention.ms"] == "77")
        await source_lost(two)
        await fail_over(two)
        assert settings(two) == SOURCES | {"retention.ms": "77"}

    on_following(work)


async def stored(two: Two, *places: TopicPartition, epoch: int = 1) -> None:
    link_id = two.controls["B"].state.links["a-to-b"].link_id
    value = {"id": "app", "epoch": epoch, "data_epoch": 1, "at": [3, 99]}
    await two.b.plugin.parts.store.put(
        [
            Entry((DECISION, link_id, X, topic, 0, sender, "b"), {**value, "end": end})
            for topic, end in places
            for sender in ("a", "a2")
        ]
    )


def test_what_was_decided_is_committed_in_all_its_partitions_and_the_next_transaction_aborted() -> None:
    async def work(two: Two) -> None:
        other = two.clusters["A"].add_topic("l-u").partitions[0]
        two.a.plugin.parts.leader_end.wake()
        open_transaction(two, "l-t")
        open_transaction(two, "l-u")
        target = two.clusters["B"]
        await two.until("copied", lambda: "r-u" in target.found and target.partition("r-u").end == other.end == 1)
        await two.until("copied", lambda: target.partition("r-t").end == 4)
        # What is open in r-u is of a later transaction, says the decision: it holds for what is below its end.
        await stored(two, ("r-t", 4), ("r-u", 0), epoch=2)
        await source_lost(two)
        planned = await fail_over(two, DRY)
        assert (planned.namespaces[0].transactions_open, planned.namespaces[0].transactions_decided) == (2, 1)
        (namespace,) = (await fail_over(two)).namespaces
        assert (namespace.transactions_ended, namespace.transactions_committed) == (2, 1)
        assert (len(target.partition("r-t").aborted), len(target.partition("r-u").aborted)) == (0, 1)
        assert target.partition("r-t").headers[-1].producer_epoch == 2

    on_following(work)


def test_an_ack_meant_this_until_then() -> None:
    async def work(two: Two) -> None:
        await two.until("follows", lambda: two.a.status().partitions[0].state == "Following")
        await two.a.links.set_mode("a-to-b", SetMode(mode="synchronous"))
        await two.until("In-Sync", lambda: two.b.status().state == "In-Sync")
        await source_lost(two)
        (claim,) = (await fail_over(two, DRY)).namespaces[0].claims
        assert claim.in_sync_until_ms is not None
        assert claim.message.startswith("In-Sync until")
        link_id = two.controls["B"].state.links["a-to-b"].link_id
        topic_id = two.controls["B"].state.follower_topics["r-t"].topic_id
        later = claim.in_sync_until_ms + 3_000
        two.controls["B"].apply(RecordClaims("a-to-b", link_id, (Claimed("r-t", str(topic_id), 0, later, 9),)))
        (claim,) = (await fail_over(two)).namespaces[0].claims
        assert (claim.in_sync_until_ms, claim.end) == (None, 3), "the log has lost some of it"
        assert "ended at 9 once" in claim.message

    on_following(work)


def test_where_some_of_several_links_are_enough_nothing_is_said_of_this_side_alone() -> None:
    async def work(two: Two) -> None:
        state = two.controls["B"].state
        link_id, topic_id = state.links["a-to-b"].link_id, str(state.follower_topics["r-t"].topic_id)
        now_ms = two.now_ms
        terms = AckTerms(1, {"a-to-b": "B", "a-to-c": "C"}, 60_000)
        claimed = Claimed("r-t", topic_id, 0, now_ms, 3, terms)
        two.controls["B"].apply(RecordClaims("a-to-b", link_id, (claimed,)))
        (claim,) = (await fail_over(two, DRY)).namespaces[0].claims
        assert (claim.in_sync_until_ms, claim.degrade_after_ms) == (None, 60_000)
        assert claim.any_of == links.AnyOf(count=1, links={"a-to-b": "B", "a-to-c": "C"}, until_ms=now_ms)
        assert "Compare the log ends of 2" in claim.message
        assert "transactional and strict producers may be acked without it" in claim.message

    on_following(work)


def test_a_claim_of_a_clock_that_was_ahead_says_nothing() -> None:
    async def work(two: Two) -> None:
        state = two.controls["B"].state
        link_id, topic_id = state.links["a-to-b"].link_id, str(state.follower_topics["r-t"].topic_id)
        later = two.now_ms + 3_600_000
        two.controls["B"].wall_ms += 3_600_000
        two.controls["B"].apply(RecordClaims("a-to-b", link_id, (Claimed("r-t", topic_id, 0, later, 3),)))
        assert two.controls["B"].state.claims
        (claim,) = (await fail_over(two, DRY)).namespaces[0].claims
        assert claim.in_sync_until_ms is None
        assert "3600 s ahead" in claim.message

    on_following(work)


def test_an_ack_to_a_group_meant_this_until_then() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("__consumer_offsets", 2)
        groups = links.Attach(
            local="gl-", remote="gr-", role="leader", type="consumer-group", disable_transaction_verification=True
        )
        await two.a.links.attach("a-to-b", groups)
        await two.until("follows", lambda: two.a.status().partitions[0].state == "Following")
        await two.a.links.set_mode("a-to-b", SetMode(mode="synchronous"))
        leases = two.b.plugin.parts.sync_leases.groups
        await two.until("In-Sync", lambda: all(leases.lease("a-to-b", partition) for partition in range(2)))
        two.clusters["B"].offsets["gr-1"] = {("r-t", 0): CommittedOffset(3, "")}
        await source_lost(two)
        lost_ms = two.now_ms
        await fail_over(two, DRY)
        await two.until("recorded", lambda: len(two.controls["B"].state.group_claims) == 2)
        (report,) = (each for each in (await fail_over(two)).namespaces if each.type == "consumer-group")
        (claim,) = report.group_claims
        assert (claim.group, claim.partition) == ("gr-1", partition_of("gl-1", 2))
        assert claim.in_sync_until_ms is not None
        assert report.all_groups_until_ms is not None
        assert lost_ms - 3_000 < report.all_groups_until_ms <= claim.in_sync_until_ms < lost_ms + 3_000

    on_following(work)


@pytest.mark.parametrize("left", [{}, {("r-t", 0): CommittedOffset(2, "")}])
def test_nothing_is_claimed_of_a_group_whose_coordinator_has_lost_commits(
    left: dict[tuple[str, int], CommittedOffset],
) -> None:
    """All of them, so that the group is not there any more, or the last ones; what it meant for others stands."""

    async def work(two: Two) -> None:
        offsets_topic = two.clusters["A"].add_topic("__consumer_offsets", 2)
        groups = links.Attach(
            local="gl-", remote="gr-", role="leader", type="consumer-group", disable_transaction_verification=True
        )
        await two.a.links.attach("a-to-b", groups)
        await two.until("follows", lambda: two.a.status().partitions[0].state == "Following")
        for name in ("gl-1", "gl-2"):
            log = offsets_topic.partitions[partition_of(name, 2)]
            log.write(offsets_batch(log.end, [group_made(name), commit(name, "l-t", 3)]))
        await two.a.links.set_mode("a-to-b", SetMode(mode="synchronous"))
        leases = two.b.plugin.parts.sync_leases.groups
        await two.until("In-Sync", lambda: all(leases.lease("a-to-b", partition) for partition in range(2)))
        there = two.clusters["B"].offsets
        await two.until("there", lambda: all(there.get(name) for name in ("gr-1", "gr-2")))
        await source_lost(two)
        there["gr-1"] = left
        if not left:
            del there["gr-1"]
        (report,) = (each for each in (await fail_over(two)).namespaces if each.type == "consumer-group")
        lost, kept = report.group_claims
        assert (lost.group, lost.in_sync_until_ms) == ("gr-1", None)
        assert lost.message == "its coordinator has lost commits that it had: what an ack meant is lost with them"
        assert kept.in_sync_until_ms is not None
        assert report.all_groups_until_ms is None

    on_following(work)


def test_of_groups_for_which_some_of_several_links_are_enough_it_says_which_to_compare() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("__consumer_offsets", 1)
        groups = links.Attach(
            local="gl-", remote="gr-", role="leader", type="consumer-group", disable_transaction_verification=True
        )
        await two.a.links.attach("a-to-b", groups)
        link_id, now_ms = two.controls["B"].state.links["a-to-b"].link_id, two.now_ms
        terms = {"gr-": AckTerms(degrade_after_ms=60_000), "gr-any-": AckTerms(1, {"a-to-b": "B", "a-to-c": "C"})}
        claimed = OffsetsClaim(0, 1, now_ms, terms)
        two.controls["B"].apply(RecordClaims("a-to-b", link_id, (), (claimed,)))
        await source_lost(two)  # else B does away with groups that A does not have
        for name in ("gr-1", "gr-any-1"):
            two.clusters["B"].offsets[name] = {("r-t", 0): CommittedOffset(3, "")}
        (report,) = (each for each in (await fail_over(two, DRY)).namespaces if each.type == "consumer-group")
        one, chosen = report.group_claims
        assert (one.in_sync_until_ms, one.any_of, one.degrade_after_ms) == (now_ms, None, 60_000)
        assert "may be acked without it" in one.message
        assert (chosen.in_sync_until_ms, chosen.degrade_after_ms) == (None, None)
        assert chosen.any_of == links.AnyOf(count=1, links={"a-to-b": "B", "a-to-c": "C"}, until_ms=now_ms)
        assert "Compare its committed offsets in 2 of them" in chosen.message
        assert report.all_groups_until_ms is None, "not all that was acked needs to be here"

    on_following(work)


@pytest.mark.parametrize("at", range(7))
def test_once_begun_another_proxy_finishes_it(at: int) -> None:
    async def work(two: Two) -> None:
        open_transaction(two, "l-t")
        await two.until("copied", lambda: two.clusters["B"].partition("r-t").end == 4)
        await stored(two, ("r-t", 4))
        await source_lost(two)
        killing = Killing(two, at)
        with pytest.raises(OperationError):
            await fail_over(two)
        begun = bool(two.controls["B"].state.promotions)
        await replaced(two, killing)
        if begun:
            await two.until("promoted", lambda: promoted(two))
        elif not promoted(two):
            await fail_over(two)
        assert promoted(two)
        assert two.clusters["B"].partition("r-t").end == 5
        assert not two.clusters["B"].partition("r-t").aborted
        assert two.controls["B"].state.histories["r-t"].partitions[0][-1].end_offset == 4
        assert settings(two) == SOURCES

    on_following(work)


def test_a_promotion_that_lost_its_source_is_gone_on_with_without_it() -> None:
    async def work(two: Two) -> None:
        append = two.controls["B"].append

        async def lost(body: Any) -> Any:
            if isinstance(body, DecidePromotion):
                await source_lost(two)
                raise OperationError("UNAVAILABLE", "killed", 503)
            return await append(body)

        two.controls["B"].append = lost  # type: ignore[method-assign]
        with pytest.raises(OperationError):
            await two.b.links.promote(
                "a-to-b", Promote(namespaces=[NamespaceRef(local="r-")]), lambda done, total: None
            )
        assert two.controls["B"].state.promotions[KEY].decided is None
        await fail_over(two)
        assert promoted(two)
        assert settings(two) == SOURCES

    on_following(work)


CLEARED, DELETED = AlterNamespace(*KEY, reserved=False), DeleteNamespace(*KEY)


@pytest.mark.parametrize("clearing", [CLEARED, DELETED], ids=["altered", "deleted"])
def test_a_reservation_that_is_cleared_by_hand_ends_the_same(clearing: AlterNamespace | DeleteNamespace) -> None:
    async def work(two: Two) -> None:
        open_transaction(two, "l-t")
        await two.until("copied", lambda: two.clusters["B"].partition("r-t").end == 4)
        await stored(two, ("r-t", 4))
        await two.b.links.release(clearing)
        assert not promoted(two), "it follows: the control log refuses it"
        await two.b.links.detach("a-to-b", "r-")
        assert two.clusters["B"].partition("r-t").end == 4
        await two.b.links.release(clearing)
        assert promoted(two)
        assert (two.clusters["B"].partition("r-t").end, two.clusters["B"].partition("r-t").aborted) == (5, [])
        assert settings(two) == SOURCES
        state = two.controls["B"].state
        await two.b.links.release(clearing)
        await two.b.links.release(replace(clearing, prefix="other-"))
        assert two.controls["B"].state is state

    on_following(work)


def test_what_leads_before_its_reservation_is_cleared_goes_on_leading() -> None:
    """As where a direction is reversed step by step: attached the other way round, and then opened."""

    async def work(two: Two) -> None:
        await two.b.links.detach("a-to-b", "r-")
        other_way = links.Attach(local="r-", remote="back-", role="leader", disable_transaction_verification=True)
        await two.b.links.attach("a-to-b", other_way)
        await two.b.links.release(DELETED)
        assert not promoted(two), "what is attached is not deleted"
        await two.b.links.release(CLEARED)
        assert promoted(two)
        assert [(each.local, each.role) for each in two.b.status().mappings] == [("r-", "leader")]
        await two.until("it is led", lambda: "back-t" in two.controls["A"].state.follower_topics)

    on_following(work)


@pytest.mark.parametrize("clearing", [CLEARED, DELETED], ids=["altered", "deleted"])
def test_what_was_detached_by_a_proxy_that_was_killed_is_released_as_detached(
    clearing: AlterNamespace | DeleteNamespace,
) -> None:
    async def work(two: Two) -> None:
        control = two.controls["B"]
        control.apply(DetachNamespace("a-to-b", ResourceType.TOPIC, "r-"))  # and no more
        assert control.state.origins["r-t"].partitions[0].open_range is not None
        await two.b.links.release(clearing)
        control.apply(clearing)
        ranges = control.state.origins["r-t"].partitions[0].ranges
        assert [(each.end_offset, each.ended) for each in ranges][-2:] == [(3, Ended.DETACHED), (None, None)]

    on_following(work)


def test_who_clears_a_reservation_has_read_of_the_detach_before() -> None:
    """Another proxy has recorded it, and was killed there."""

    async def work(two: Two) -> None:
        control = two.controls["B"]
        caught_up = control.caught_up

        async def hears() -> None:
            await caught_up()
            control.apply(DetachNamespace("a-to-b", ResourceType.TOPIC, "r-"))

        control.caught_up = hears  # type: ignore[method-assign]
        await two.b.links.release(DELETED)
        assert promoted(two)

    on_following(work)


def test_what_follows_within_a_namespace_is_not_released_with_it() -> None:
    """A wider namespace has what was detached, and what another one within it follows."""

    async def work(two: Two) -> None:
        await two.b.links.detach("a-to-b", "r-")
        two.clusters["A"].add_topic("l-in-t").partitions[0].write_values(b"x")
        within = links.Attach(local="l-in-", remote="r-in-", role="leader", disable_transaction_verification=True)
        await two.a.links.attach("a-to-b", within)
        await two.until(
            "copied", lambda: "r-in-t" in two.clusters["B"].found and two.clusters["B"].partition("r-in-t").end
        )
        open_transaction(two, "l-in-t")
        log = two.clusters["B"].partition("r-in-t")
        await two.until("copied, too", lambda: log.end == 2)
        state = two.controls["B"].state
        await two.b.links.release(DELETED)
        assert promoted(two)
        assert log.end == 2, "it is its source's to end what is open"
        assert two.controls["B"].state.origins["r-in-t"] == state.origins["r-in-t"]
        assert two.controls["B"].state.histories["r-in-t"] == state.histories["r-in-t"]

    on_following(work)


def test_offsets_of_decided_transactions_are_committed_in_groups() -> None:
    async def work(two: Two) -> None:
        groups = links.Attach(
            local="gl-", remote="gr-", role="leader", type="consumer-group", disable_transaction_verification=True
        )
        await two.a.links.attach("a-to-b", groups)
        await two.until("attached", lambda: len(two.b.status().mappings) == 2)
        target = two.clusters["B"]
        link_id = two.controls["B"].state.links["a-to-b"].link_id
        decision = {"id": "app", "epoch": 1, "data_epoch": 1, "at": [3, 99], "end": 101}
        entries = [Entry((DECISION, link_id, X, "__consumer_offsets", 5, "a", "b"), decision)]
        for producer_id, group in ((X, "gr-1"), (X + 1, "gr-2"), (X, "other")):
            key = ("o", link_id, producer_id, group, 5, 100, "a", "b")
            entries.append(Entry(key, {"epoch": 1, "positions": [["r-t", 0, 3, "m", 100]]}))
        await two.b.plugin.parts.store.put(entries)
        await source_lost(two)
        commit = target.commit_offsets

        async def verified(*arguments: Any) -> Any:
            assert TRANSACTION_VERIFICATION in target.cluster_configs, "it would be refused"
            return await commit(*arguments)

        target.commit_offsets = verified  # type: ignore[method-assign]
        report = await fail_over(two)
        assert {each.type: each.promoted for each in report.namespaces} == {"topic": True, "consumer-group": True}
        assert target.offsets.get("gr-1") == {("r-t", 0): CommittedOffset(3, "m")}
        assert not target.offsets.get("gr-2"), "not decided"
        assert not target.offsets.get("other"), "of no namespace that follows"
        await two.until("verified again", lambda: TRANSACTION_VERIFICATION not in target.cluster_configs)

    on_following(work)
