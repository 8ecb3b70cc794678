"""What becomes of a follower topic that cannot go on: nothing, until the operator decides."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.plugins import Two, on_two

from isthmus_control.commands import (
    AdvanceTruncation,
    BeginTruncation,
    CompactFollowerTopic,
    DetachNamespace,
    FoundLoss,
    RecordSourceLosses,
)
from isthmus_control.model import Reason, ResourceType, TopicState
from isthmus_control.outcome import Accepted
from isthmus_control.source_losses import LossState
from isthmus_control.truncations import PartitionCut, PartitionView, SalvageFile, TopicLayout, TruncationPhase
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.links import OperationError

P = TruncationPhase
ATTACH = links.Attach(local="l-", remote="r-", role="leader")


def on_following(work: Callable[[Two], Awaitable[None]]) -> None:
    """``l-t`` with three records at A, which ``r-t`` at B follows."""

    async def follow(two: Two) -> None:
        two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"x", b"y", b"z")
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", ATTACH)
        await two.until("copied", lambda: "r-t" in two.clusters["B"].found and two.clusters["B"].partition("r-t").end)
        await work(two)

    on_two(follow)


def reason(two: Two) -> str | None:
    """Why B's partition does not go on."""
    return next((each.reason for each in two.b.status().partitions if each.topic == "r-t"), None)


def ends(two: Two) -> list[int]:
    topic = two.clusters["B"].found.get("r-t")
    return [] if topic is None else [partition.end for partition in topic.partitions]


async def source_deleted(two: Two) -> None:
    await two.clusters["A"].delete_topic("l-t")
    await two.until("B knows", lambda: reason(two) == "SOURCE_TOPIC_MAY_BE_DELETED", 3.0)


async def source_created_again(two: Two) -> None:
    await two.clusters["A"].delete_topic("l-t")
    two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"new")
    await two.until("B knows", lambda: reason(two) == "SOURCE_TOPIC_ID_CHANGED", 3.0)


def test_while_the_source_has_the_topic_there_is_nothing_to_decide() -> None:
    async def work(two: Two) -> None:
        for decide in (two.b.links.forget_topic("r-t"), two.b.links.recreate_topic("r-t")):
            with pytest.raises(OperationError) as raised:
                await decide
            assert raised.value.code == "CONFLICT"
        with pytest.raises(OperationError) as raised:
            await two.b.links.forget_topic("r-other")
        assert raised.value.code == "NOT_FOUND"
        with pytest.raises(OperationError) as raised:
            await two.a.links.recreate_topic("l-t")
        assert raised.value.code == "NOT_FOUND"

    on_following(work)


def test_recreate_a_topic_that_its_own_cleaner_compacts() -> None:
    """It may have missed tombstones that the source's cleaner took, and keep keys that are deleted there."""

    async def work(two: Two) -> None:
        target, control = two.clusters["B"], two.controls["B"]
        old = target.found["r-t"].topic_id
        record = control.state.follower_topics["r-t"]
        assert record.topic_id is not None
        compact = CompactFollowerTopic("r-t", record.topic_id, True, record.compacts_since_offset)
        assert isinstance(await control.append(compact), Accepted)
        planned = await two.b.links.recreate_topic("r-t", dry_run=True)
        assert (planned.source, planned.records_lost) == ("unchanged", 3)
        await two.b.links.recreate_topic("r-t")
        await two.until("it follows anew", lambda: ends(two) == [3] and target.found["r-t"].topic_id != old)

    on_following(work)


def test_what_a_truncation_lost_is_given_up_once_it_is_said_how_much_that_is() -> None:
    async def unread(broker_id: int, lane: str) -> Any:
        raise BrokerUnavailable("not now")

    async def work(two: Two) -> None:
        with pytest.raises(OperationError, match="lacks nothing"):
            await two.b.links.give_up_topic("r-t")
        source, target, control = two.clusters["A"], two.clusters["B"], two.controls["B"]
        fetch = source.fetch_connection
        source.fetch_connection = unread  # type: ignore[method-assign]
        old = control.state.follower_topics["r-t"].topic_id or ""
        await target.delete_topic("r-t")
        new = str(uuid.UUID(bytes=target.add_topic("r-t").topic_id))
        owner, why = two.b.context.incarnation, Reason("TARGET_WRITTEN_BY_OTHERS", "somebody wrote")
        control.apply(BeginTruncation("a-to-b", "r-t", old, why, (PartitionView(1, 0),), None, "b", owner))
        for phase, found in (
            (P.SALVAGING, {"cuts": (PartitionCut(0, 0, 3, 4),)}),
            (P.SPOOLING, {"salvaged": (SalvageFile(0, "b", "/salvage/x", 1),)}),
            (P.RECREATING, {"attempt": "1", "layout": TopicLayout(1, {}, 5)}),
            (P.REFILLING, {"new_topic_id": new}),
            (P.CATCHING_UP, {}),
        ):
            more: dict[str, Any] = dict(found)
            assert isinstance(control.apply(AdvanceTruncation("r-t", old, owner, phase, **more)), Accepted)
        await two.until("it is told", lambda: reason(two) == "SPOOL_LOST", 5.0)
        planned = await two.b.links.give_up_topic("r-t", dry_run=True)
        assert (planned.action, planned.source, planned.records_lost) == ("give up", "unchanged", 3)
        assert not control.state.truncations["r-t"].given_up
        await two.b.links.give_up_topic("r-t")
        await two.until("it is over", lambda: not control.state.truncations, 15.0)
        (told,) = two.b.links.truncations("a-to-b")
        assert (told.given_up, told.positions_lost, told.groups_lost) == (True, True, 5)
        source.fetch_connection = fetch  # type: ignore[method-assign]
        await two.until("it goes on", lambda: ends(two) == [3], 15.0)

    on_following(work)


@pytest.mark.parametrize("delete", [False, True])
def test_forget_a_topic_whose_source_was_deleted(delete: bool) -> None:
    async def work(two: Two) -> None:
        await source_deleted(two)
        status = next(each for each in two.b.status().partitions if each.topic == "r-t")
        assert status.state == "Stopped"
        assert "isthmus topic forget r-t" in str(status.message)
        target = two.clusters["B"]
        planned = await two.b.links.forget_topic("r-t", delete, dry_run=True)
        assert (planned.source, planned.records_lost) == ("deleted", 3 if delete else 0)
        assert target.partition("r-t").end == 3
        assert "r-t" in two.controls["B"].state.follower_topics
        with pytest.raises(OperationError, match="no l-t"):
            await two.b.links.recreate_topic("r-t")

        done = await two.b.links.forget_topic("r-t", delete)
        assert done.action == ("delete" if delete else "forget")
        assert ("r-t" in target.found) is not delete
        assert "r-t" not in two.controls["B"].state.follower_topics
        assert two.controls["B"].state.histories["r-t"].partitions[0][-1].end_offset == 3
        assert not [each for each in two.b.status().partitions if each.topic == "r-t"]
        # Another topic of the name does not get at what was kept.
        two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"new")
        if delete:
            await two.until("it follows", lambda: "r-t" in target.found and target.partition("r-t").end == 1)
        else:
            await two.until("it is refused", lambda: reason(two) == "TARGET_TOPIC_NOT_EMPTY")
            assert target.partition("r-t").end == 3

    on_following(work)


@pytest.mark.parametrize("what", ["made anew", "detached"])
def test_what_became_of_a_topic_since_the_operator_looked_at_it_is_not_deleted(what: str) -> None:
    """Somebody has another topic of that name by then, or clients may write to it."""

    async def work(two: Two) -> None:
        await source_deleted(two)
        target, control = two.clusters["B"], two.controls["B"]
        idle_ends = two.b.plugin.parts.follower_topics._idle_ends  # type: ignore[union-attr]

        async def meanwhile(places: Any) -> Any:
            ends = await idle_ends(places)
            if what == "made anew":
                await target.delete_topic("r-t")
                target.add_topic("r-t").partitions[0].write_values(b"precious")
            else:
                control.apply(DetachNamespace("a-to-b", ResourceType.TOPIC, "r-"))
            return ends

        two.b.plugin.parts.follower_topics._idle_ends = meanwhile  # type: ignore[union-attr, method-assign]
        if what == "made anew":
            await two.b.links.forget_topic("r-t", True)
        else:
            with pytest.raises(OperationError, match="meanwhile"):
                await two.b.links.forget_topic("r-t", True)
        assert ends(two) == [1 if what == "made anew" else 3]

    on_following(work)


def test_recreate_a_topic_whose_source_was_created_again() -> None:
    async def work(two: Two) -> None:
        await source_created_again(two)
        target = two.clusters["B"]
        old = target.found["r-t"].topic_id
        assert next(each.state for each in two.b.status().partitions if each.topic == "r-t") == "Refused"
        planned = await two.b.links.recreate_topic("r-t", dry_run=True)
        assert (planned.source, planned.records_lost) == ("created again", 3)
        assert target.found["r-t"].topic_id == old
        await two.b.links.recreate_topic("r-t")
        await two.until("it follows", lambda: "r-t" in target.found and target.partition("r-t").end == 1)
        assert target.found["r-t"].topic_id != old
        record = two.controls["B"].state.follower_topics["r-t"]
        assert record.state is TopicState.FOLLOWING
        await two.until("no reason is left", lambda: reason(two) is None)

    on_following(work)


def test_forget_a_topic_whose_source_was_created_again_keeps_its_records() -> None:
    async def work(two: Two) -> None:
        await source_created_again(two)
        await two.b.links.forget_topic("r-t")
        await two.until("it is refused", lambda: reason(two) == "TARGET_TOPIC_NOT_EMPTY")
        assert two.clusters["B"].partition("r-t").end == 3
        await two.b.links.recreate_topic("r-t")
        await two.until("it follows", lambda: ends(two) == [1])

    on_following(work)


def test_recreate_a_topic_that_was_deleted_here() -> None:
    async def work(two: Two) -> None:
        target = two.clusters["B"]
        await target.delete_topic("r-t")
        await two.until("B knows", lambda: reason(two) == "TARGET_TOPIC_MAY_BE_DELETED", 10.0)
        await two.b.links.recreate_topic("r-t")
        await two.until("it is whole again", lambda: "r-t" in target.found and target.partition("r-t").end == 3)

    on_following(work)


def test_only_the_topic_that_was_agreed_on_is_lost() -> None:
    async def work(two: Two) -> None:
        await source_created_again(two)
        # The consent is recorded, and before it is acted on somebody puts another topic there.
        turns = two.b.plugin.parts.service._follower_topics._preparing  # type: ignore[union-attr]
        async with turns.setdefault(("a-to-b", "l-t"), asyncio.Lock()):
            await two.b.links.recreate_topic("r-t")
            await two.clusters["B"].delete_topic("r-t")
            two.clusters["B"].add_topic("r-t").partitions[0].write_values(b"precious")
        await two.until("it is refused", lambda: reason(two) == "TARGET_TOPIC_NOT_EMPTY")
        assert two.clusters["B"].partition("r-t").end == 1

    on_following(work)


def test_the_consent_to_truncate_is_for_the_topics_that_were_there() -> None:
    async def work(two: Two) -> None:
        source, target = two.clusters["A"], two.clusters["B"]
        source.add_topic("l-t").partitions[0].write_values(b"theirs")
        target.add_topic("r-t").partitions[0].write_values(b"ours", b"ours")
        await two.create()
        await two.connected()
        consent = ATTACH.model_copy(update={"truncate_target": True})
        planned = await two.a.links.attach("a-to-b", consent.model_copy(update={"dry_run": True}))
        assert [(plan.action, plan.records_lost) for plan in planned.topics] == [("truncate", 2)]
        await two.a.links.attach("a-to-b", consent)
        await two.until("emptied", lambda: "r-t" in target.found and target.partition("r-t").end == 1)
        target.add_topic("r-later").partitions[0].write_values(b"ours")
        source.add_topic("l-later").partitions[0].write_values(b"theirs")
        await two.until(
            "the later one is refused",
            lambda: (
                [each.reason for each in two.b.status().partitions if each.topic == "r-later"]
                == ["TARGET_TOPIC_NOT_EMPTY"]
            ),
        )
        assert target.partition("r-later").end == 1
        kept = target.found["r-later"].topic_id
        await two.a.links.attach("a-to-b", consent)
        await two.until("emptied, too", lambda: "r-later" in target.found and target.found["r-later"].topic_id != kept)

    on_two(work)


def test_a_topic_that_is_held_is_cut_once_the_operator_says_so() -> None:
    """As far as it differs by then: here nothing does."""

    async def work(two: Two) -> None:
        control = two.controls["B"]
        with pytest.raises(OperationError, match="nothing of r-t is held"):
            await two.b.links.truncate_topic("r-t")
        topic_id, link_id = control.state.follower_topics["r-t"].topic_id or "", control.state.links["a-to-b"].link_id
        found = FoundLoss(ResourceType.TOPIC, "r-", "r-t", topic_id, 0, 1, 3, 2, LossState.HELD)
        control.apply(RecordSourceLosses("a-to-b", link_id, (found,)))
        assert reason(two) == "SOURCE_LOST_RECORDS"
        planned = await two.b.links.truncate_topic("r-t", dry_run=True)
        assert (planned.action, planned.source, planned.records_lost) == ("truncate", "unchanged", 2)
        assert "offsets 1 to 2" in planned.message
        assert control.state.held("r-t", topic_id) is not None
        await two.b.links.truncate_topic("r-t")
        await two.until("it is over", lambda: [each.state for each in control.state.source_losses] == ["cut"], 30.0)
        await two.until("told at the source", lambda: len(two.a.status().source_losses) == 1)
        (told,) = two.a.status().source_losses
        assert (told.role, told.topic, told.remote_topic, told.state) == ("leader", "l-t", "r-t", "cut")
        (metric,) = [each for each in two.a.plugin.isthmus_metrics() if each.name == "isthmus_source_losses"]
        assert [(each.labels, each.value) for each in metric.samples] == [
            ({"link": "a-to-b", "role": "leader", "type": "topic", "state": "cut"}, 1)
        ]

    on_following(work)
