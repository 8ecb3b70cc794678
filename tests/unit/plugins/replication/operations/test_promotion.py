"""Promotion: refused while something is missing, carried out once it is begun, whoever dies."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import FakeControl
from support.plugins import Proxy, Two
from support.promoting import KEY, Killing, differ, on_following, replaced

from isthmus_control.commands import BeginPromotion, BeginTerm, DecidePromotion, DetachNamespace, TermStart
from isthmus_control.model import TRANSACTION_VERIFICATION, NamespaceKey, ResourceType, TopicState
from isthmus_control.origins import Ended
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset
from isthmus_plugins.links import NamespaceRef, OperationError, Promote, PromoteReport

REQUEST = Promote(namespaces=[NamespaceRef(local="r-")])


async def promote(proxy: Proxy, dry_run: bool = False) -> PromoteReport:
    request = REQUEST.model_copy(update={"dry_run": dry_run})
    report: PromoteReport = await proxy.links.promote("a-to-b", request, lambda done, total: None)
    return report


def promoted(two: Two) -> bool:
    state = two.controls["B"].state
    return not state.promotions and not state.namespaces[KEY].reserved


def test_drained_it_becomes_a_topic_like_the_source_had() -> None:
    async def work(two: Two) -> None:
        target = two.clusters["B"]
        planned = await promote(two.b, dry_run=True)
        assert (planned.drained, planned.namespaces[0].topics) == (True, ["r-t"])
        assert two.controls["B"].state.namespaces[KEY].reserved
        report = await promote(two.b)
        assert report.namespaces[0].promoted
        assert promoted(two)
        assert not two.a.status().mappings
        assert not two.b.status().mappings
        ours = target.found["r-t"].configs
        assert {name: ours.get(name) for name in ("retention.ms", "compression.type")} == {
            "retention.ms": "5",
            "compression.type": "gzip",
        }
        assert "message.timestamp.after.max.ms" not in ours  # the target's default is the source's value
        assert two.controls["B"].state.histories["r-t"].partitions[0][-1].end_offset == 3
        assert TRANSACTION_VERIFICATION not in target.cluster_configs

    on_following(work)


def origins(two: Two) -> list[tuple[str, bool, int, int | None, Ended | None]]:
    """Of r-t: (cluster, whether its term is known, from, to, how it ended)."""
    topic_id = str(uuid.UUID(bytes=two.clusters["B"].found["r-t"].topic_id))
    ranges = two.controls["B"].state.origins_of("r-t", topic_id, 0).ranges
    return [
        (each.origin.cluster_id, bool(each.origin.term), each.start_offset, each.end_offset, each.ended)
        for each in ranges
    ]


@pytest.mark.parametrize("at", [None, *range(11)])
def test_where_it_followed_and_writes_is_recorded_before_anybody_writes(at: int | None) -> None:
    async def work(two: Two) -> None:
        target = two.clusters["B"].partition("r-t")
        two.clusters["A"].partition("l-t").write_values(
            b"open", producer_id=7, producer_epoch=1, base_sequence=0, attributes=0x10
        )
        await two.until("copied", lambda: target.end == 4)
        control = two.controls["B"]
        if at is None:
            await promote(two.b)
        else:
            killing = Killing(two, at)
            with suppress(OperationError):
                await promote(two.b)
            begun = bool(control.state.promotions)
            await replaced(two, killing)
            if not begun and not promoted(two):
                assert origins(two)[-1] == ("A", True, 3, None, None), "it follows on"
                return
            await two.until("promoted", lambda: promoted(two))
        assert target.end == 5, "a marker of this cluster"
        followed, own = ("A", True, 3, 4, Ended.PROMOTED), ("B", True, 4, None, None)
        assert origins(two)[-2:] == [followed, own]
        (term,) = [each for each in control.commands if isinstance(each, BeginTerm)]
        assert term.topics[0].starts == {0: TermStart(4, target.leader_epoch)}

    on_following(work)


SETTINGS = "r-t: retention.ms=5: POLICY_VIOLATION: at least a day"


def refusing(two: Two) -> None:
    """Two more topics; the target's policy refuses a setting of one of the three."""
    for name in ("l-before", "l-z"):
        two.clusters["A"].add_topic(name, configs={"retention.ms": "86400000"})
    two.clusters["B"].policy = lambda topic, name, value: (
        "at least a day" if (topic, name, value) == ("r-t", "retention.ms", "5") else None
    )


def test_a_setting_that_is_refused_keeps_nobody_from_becoming_writable() -> None:
    async def work(two: Two) -> None:
        refusing(two)
        await two.until("all follow", lambda: len(two.controls["B"].state.histories) == 3)
        assert (await promote(two.b, dry_run=True)).namespaces[0].settings_refused == [SETTINGS]
        target = two.clusters["B"]
        assert {target.found[name].configs["retention.ms"] for name in ("r-before", "r-t", "r-z")} == {"-1"}
        (report,) = (await promote(two.b)).namespaces
        assert (report.promoted, report.settings_refused) == (True, [SETTINGS])
        assert promoted(two)
        found = {name: target.found[name].configs for name in ("r-before", "r-t", "r-z")}
        assert [each["retention.ms"] for each in found.values()] == ["86400000", "-1", "86400000"]
        assert found["r-t"]["compression.type"] == "gzip"
        # It shows until somebody has decided, whichever proxy is asked.
        reason = two.b.links.topic_reason("r-t")
        assert reason is not None
        assert "retention.ms=-1 (its source: 5)" in reason.message
        assert two.b.status().settings_kept == [reason.message]
        assert two.b.links.topic_reason("r-z") is None
        target.found["r-t"].configs["retention.ms"] = "86400000"
        await two.until("it shows no more", lambda: not two.b.status().settings_kept, 15)

    on_following(work)


def test_what_is_missing_is_named_and_nothing_changes() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].completing.append("payments")
        with pytest.raises(OperationError, match="'payments' of the source is being completed") as raised:
            await promote(two.b)
        assert raised.value.code == "NOT_DRAINED"
        two.clusters["A"].completing.clear()
        two.clusters["B"].found["r-t"].partitions[0].end = 2
        planned = await promote(two.b, dry_run=True)
        assert not planned.drained
        assert planned.namespaces[0].missing == ["r-t-0 ends at 2, the source's at 3"]
        two.clusters["B"].found["r-t"].partitions[0].end = 3
        assert not two.controls["B"].state.promotions
        assert [mapping.role for mapping in two.b.status().mappings] == ["follower"]
        for wrong in (two.a, two.b):
            request = Promote(namespaces=[NamespaceRef(local="l-")])
            with pytest.raises(OperationError) as raised:
                await wrong.links.promote("a-to-b", request, lambda done, total: None)
            assert raised.value.code == "NOT_FOUND"

    on_following(work)


def test_what_is_known_to_differ_is_promoted_once_somebody_says_that_he_knows() -> None:
    async def work(two: Two) -> None:
        why = differ(two)
        planned = await promote(two.b, dry_run=True)
        assert (planned.drained, planned.namespaces[0].logs_differ) == (True, [why])
        with pytest.raises(OperationError, match=f"{why}.*link acknowledge a-to-b") as raised:
            await promote(two.b)
        assert raised.value.code == "LOGS_DIFFER"
        assert not two.controls["B"].state.promotions
        assert (await two.b.links.acknowledge("a-to-b")).acknowledged == 1
        (report,) = (await promote(two.b)).namespaces
        assert (report.promoted, report.logs_differ) == (True, [])
        assert promoted(two)

    on_following(work)


def test_what_differed_in_a_topic_that_follows_no_more_is_nothing_to_be_acknowledged() -> None:
    async def work(two: Two) -> None:
        differ(two)
        control = two.controls["B"]
        record = replace(control.state.follower_topics["r-t"], state=TopicState.DETACHED)
        control.state = control.state.evolve(follower_topics={"r-t": record})
        assert two.b.links._promotions.logs_differ(["r-t"]) == []

    on_following(work)


def test_open_transactions_are_aborted() -> None:
    async def work(two: Two) -> None:
        target = two.clusters["B"].partition("r-t")
        two.clusters["A"].partition("l-t").write_values(
            b"open", producer_id=7, producer_epoch=1, base_sequence=0, attributes=0x10
        )
        await two.until("copied", lambda: target.end == 4)
        planned = await promote(two.b, dry_run=True)
        assert planned.namespaces[0].transactions_open == 1
        report = await promote(two.b)
        assert report.namespaces[0].transactions_ended == 1
        assert target.end == 5
        assert len(target.aborted) == 1
        assert promoted(two)

    on_following(work)


def just_before_it_begins(control: FakeControl, happen: Callable[[], object]) -> Callable[[], None]:
    """Have something happen right before a promotion is recorded, until what is returned is called."""
    append = control.append

    async def appended(body: Any) -> Any:
        if isinstance(body, BeginPromotion):
            happen()
        return await append(body)

    def undo() -> None:
        control.append = append  # type: ignore[method-assign]

    control.append = appended  # type: ignore[method-assign]
    return undo


def test_what_the_source_has_decided_since_is_seen_after_it_was_detached() -> None:
    async def work(two: Two) -> None:
        control = two.controls["B"]
        undo = just_before_it_begins(control, lambda: two.clusters["A"].completing.append("payments"))
        with pytest.raises(OperationError, match="'payments' of the source is being completed") as raised:
            await promote(two.b)
        assert raised.value.code == "NOT_DRAINED"
        await follows_on(two)
        undo()
        two.clusters["A"].completing.clear()
        await promote(two.b)
        assert promoted(two)

    on_following(work)


def test_who_slept_through_a_take_over_does_not_attach_the_source_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(two: Two) -> None:
        control, other = two.controls["B"], str(uuid.uuid4())
        append = control.append

        async def taken_over(body: Any) -> Any:
            if isinstance(body, DecidePromotion):
                assert not body.goes_on
                before = control.state.promotions[KEY]
                taken = {KEY: replace(before, owner=other)}
                control.state = control.state.evolve(promotions=taken)
            if isinstance(body, BeginPromotion):
                two.clusters["A"].completing.append("payments")
            return await append(body)

        control.append = taken_over  # type: ignore[method-assign]
        monkeypatch.setattr(control.state.__class__, "may_run", lambda state, incarnation: True)
        with pytest.raises(OperationError, match="took over"):
            await promote(two.b)
        assert not two.a.status().mappings
        assert control.state.promotions[KEY].owner == other

    on_following(work)


def test_what_is_to_be_taken_back_is_taken_back_whoever_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(two: Two) -> None:
        killing = Killing(two, 2)  # begun, and decided
        two.clusters["A"].completing.append("payments")
        begin = two.b.links._promotions._look

        async def nothing_missing(*arguments: Any) -> Any:
            report = await begin(*arguments)
            report.missing.clear()
            return report

        monkeypatch.setattr(two.b.links._promotions, "_look", nothing_missing)
        with pytest.raises(OperationError, match="killed"):
            await promote(two.b)
        assert two.controls["B"].state.promotions[KEY].decided is False
        await replaced(two, killing)
        await two.until("abandoned", lambda: not two.controls["B"].state.promotions)
        await follows_on(two)

    on_following(work)


def older(two: Two) -> None:
    """The source's proxy does not know yet how to say where its logs end."""
    for connection in two.a.plugin.parts.peers.connections("a-to-b"):
        connection.handlers = {name: call for name, call in connection.handlers.items() if name != "log_ends"}


def test_an_older_peer_is_refused_before_anything_is_detached() -> None:
    async def work(two: Two) -> None:
        older(two)
        with pytest.raises(OperationError, match="upgrade them") as raised:
            await promote(two.b)
        assert raised.value.code == "PEER_VERSION_UNSUPPORTED"
        await follows_on(two)

    on_following(work)


def test_a_promotion_is_taken_back_where_the_peer_is_an_older_one_by_then() -> None:
    async def work(two: Two) -> None:
        control = two.controls["B"]
        just_before_it_begins(control, lambda: older(two))
        with pytest.raises(OperationError, match="upgrade them") as raised:
            await promote(two.b)
        assert raised.value.code == "PEER_VERSION_UNSUPPORTED"
        await follows_on(two)

    on_following(work)


def test_what_kept_a_promotion_is_told_as_long_as_it_does() -> None:
    async def work(two: Two) -> None:
        killing = Killing(two, 1)
        with pytest.raises(OperationError, match="killed"):
            await promote(two.b)
        await two.until("told", lambda: "does not go on" in (two.b.status().message or ""))
        assert two.controls["B"].state.promotions
        begun = two.controls["B"].state.promotions
        two.controls["B"].state = two.controls["B"].state.evolve(promotions={})  # by another proxy
        assert two.b.status().message is None
        two.controls["B"].state = two.controls["B"].state.evolve(promotions=begun)
        killing.fails = False
        await two.until("promoted", lambda: promoted(two))
        assert two.b.status().message is None

    on_following(work)


def test_what_was_written_since_is_seen_after_the_source_was_detached() -> None:
    async def work(two: Two) -> None:
        source, control = two.clusters["A"], two.controls["A"]
        append, fetch = control.append, source.fetch_connection

        async def unread(broker_id: int, lane: str) -> Any:
            raise BrokerUnavailable("not now")

        async def written(body: Any) -> Any:
            if isinstance(body, DetachNamespace):
                source.fetch_connection = unread  # type: ignore[method-assign]
                await asyncio.sleep(0.6)  # what is being read has come
                source.partition("l-t").write_values(b"late")
            return await append(body)

        control.append = written  # type: ignore[method-assign]
        with pytest.raises(OperationError, match="r-t-0 ends at 3, the source's at 4") as raised:
            await promote(two.b)
        assert raised.value.code == "NOT_DRAINED"
        control.append = append  # type: ignore[method-assign]
        source.fetch_connection = fetch  # type: ignore[method-assign]
        await follows_on(two)
        await two.until("the rest is there", lambda: two.clusters["B"].partition("r-t").end == 4)
        await promote(two.b)
        assert promoted(two)

    on_following(work)


def test_what_was_asked_for_with_an_abandoned_promotion_is_abandoned_too() -> None:
    async def work(two: Two) -> None:
        groups = links.Attach(
            local="gl-", remote="gr-", role="leader", type="consumer-group", disable_transaction_verification=True
        )
        await two.a.links.attach("a-to-b", groups)
        await two.until("attached", lambda: len(two.b.status().mappings) == 2)
        control = two.controls["B"]
        just_before_it_begins(control, lambda: two.clusters["A"].completing.append("payments"))
        request = Promote(namespaces=[NamespaceRef(local="r-"), NamespaceRef(local="gr-", type="consumer-group")])
        with pytest.raises(OperationError, match="'payments' of the source is being completed"):
            await two.b.links.promote("a-to-b", request, lambda done, total: None)
        assert not control.state.promotions
        assert [mapping.role for mapping in two.b.status().mappings] == ["follower", "follower"]

    on_following(work)


GROUP_KEY = NamespaceKey(ResourceType.CONSUMER_GROUP, "gr-")
BOTH = Promote(namespaces=[NamespaceRef(local="gr-", type="consumer-group"), NamespaceRef(local="r-")])


def on_groups(work: Callable[[Two], Awaitable[None]]) -> None:
    """The same, with a group namespace and a group that has the same committed offset at both ends."""

    async def with_groups(two: Two) -> None:
        groups = links.Attach(
            local="gl-", remote="gr-", role="leader", type="consumer-group", disable_transaction_verification=True
        )
        await two.a.links.attach("a-to-b", groups)
        await two.until("attached", lambda: len(two.b.status().mappings) == 2)
        two.clusters["A"].offsets["gl-1"] = {("l-t", 0): CommittedOffset(3, "")}
        two.clusters["B"].offsets["gr-1"] = {("r-t", 0): CommittedOffset(3, "")}
        await work(two)

    on_following(with_groups)


async def promote_both(proxy: Proxy) -> None:
    await proxy.links.promote("a-to-b", BOTH, lambda done, total: None)


def test_groups_are_looked_at_again_when_nothing_more_comes_into_their_topics() -> None:
    async def work(two: Two) -> None:
        control = two.controls["B"]
        moved = {"gl-1": {("l-t", 0): CommittedOffset(2, "")}}
        undo = just_before_it_begins(control, lambda: two.clusters["A"].offsets.update(moved))
        with pytest.raises(OperationError, match="group gr-1: r-t-0: the source has 2, the follower has 3") as raised:
            await promote_both(two.b)
        assert raised.value.code == "NOT_DRAINED"
        assert not control.state.promotions
        for proxy, role in ((two.a, "leader"), (two.b, "follower")):
            assert [mapping.role for mapping in proxy.status().mappings] == [role, role]
        undo()
        two.clusters["A"].offsets["gl-1"] = {("l-t", 0): CommittedOffset(3, "")}
        await promote_both(two.b)
        assert promoted(two)
        assert not control.state.namespaces[GROUP_KEY].reserved

    on_groups(work)


@pytest.mark.parametrize("at", range(14))
def test_topics_and_groups_are_promoted_together_whoever_dies(at: int) -> None:
    async def work(two: Two) -> None:
        killing = Killing(two, at)
        try:
            await promote_both(two.b)
        except OperationError:
            pass
        control: FakeControl = two.controls["B"]
        begun = bool(control.state.promotions)
        assert len(control.state.promotions) in (0, 2)
        await replaced(two, killing)
        keys = (KEY, GROUP_KEY)
        if begun or promoted(two):
            await two.until("promoted", lambda: promoted(two))
            await two.until("detached there, too", lambda: not two.a.status().mappings)
            assert not any(control.state.namespaces[key].reserved for key in keys)
            assert two.clusters["B"].offsets["gr-1"] == {("r-t", 0): CommittedOffset(3, "")}
        else:
            assert all(control.state.namespaces[key].reserved for key in keys)
            assert len(two.a.status().mappings) == 2

    on_groups(work)


async def follows_on(two: Two) -> None:
    """Nothing is promoted, and both ends are attached."""
    assert not two.controls["B"].state.promotions
    assert two.controls["B"].state.namespaces[KEY].reserved
    assert [mapping.role for mapping in two.a.status().mappings] == ["leader"]
    assert [mapping.role for mapping in two.b.status().mappings] == ["follower"]


@pytest.mark.parametrize("at", range(11))
def test_once_begun_another_proxy_finishes_it(at: int) -> None:
    async def work(two: Two) -> None:
        killing = Killing(two, at)
        try:
            await promote(two.b)
        except OperationError:
            pass
        control: FakeControl = two.controls["B"]
        begun = bool(control.state.promotions)
        await replaced(two, killing)
        if begun or promoted(two):
            await two.until("promoted", lambda: promoted(two))
            await two.until("detached there, too", lambda: not two.a.status().mappings)
            assert two.clusters["B"].found["r-t"].configs["retention.ms"] == "5"
        else:
            assert control.state.namespaces[KEY].reserved

    on_following(work)


@pytest.mark.parametrize("may_run", [False, True])
def test_the_command_given_again_goes_on_for_a_proxy_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, may_run: bool
) -> None:
    """At once: what goes on by itself would wait for the commands that are given meanwhile. Not beside that proxy."""

    async def work(two: Two) -> None:
        control, other = two.controls["B"], str(uuid.uuid4())
        await control.append(BeginPromotion("a-to-b", *KEY, {"r-t": {"retention.ms": "5"}}, other))
        monkeypatch.setattr(control.state.__class__, "may_run", lambda state, incarnation: may_run)
        if may_run:
            with pytest.raises(OperationError, match=r"another proxy promotes .*, and its lease may still run"):
                await promote(two.b)
            assert control.state.promotions[KEY].owner == other
        else:
            assert (await promote(two.b)).namespaces[0].promoted
            assert promoted(two)

    on_following(work)


def test_what_goes_on_by_itself_does_so_while_commands_are_given_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(two: Two) -> None:
        control, cluster, other = two.controls["B"], two.clusters["B"], str(uuid.uuid4())
        await two.a.links.attach("a-to-b", links.Attach(local="more-", remote="more-", role="leader"))
        topics = cluster.topics

        async def slow() -> Any:
            await asyncio.sleep(0.5)
            return await topics()

        monkeypatch.setattr(cluster, "topics", slow)
        monkeypatch.setattr(control.state.__class__, "may_run", lambda state, incarnation: incarnation != other)
        await control.append(BeginPromotion("a-to-b", *KEY, {"r-t": {"retention.ms": "5"}}, other))
        of_others = Promote(namespaces=[NamespaceRef(local="more-")], dry_run=True)
        async with asyncio.timeout(30):
            while not promoted(two):
                await two.b.links.promote("a-to-b", of_others, lambda done, total: None)

    on_following(work)
