"""A source that comes back after a failover follows from where both logs part: whole plugins on model clusters.

What the old source has and the new one has not is in salvage files, what both have is neither copied nor compared
again, and nothing is cut that is not as it was when an operator agreed to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_cluster import Partition
from support.plugins import Two, on_two
from support.truncating import TruncatedCluster, salvaged, simulate_truncations

from isthmus_control.commands import AlterNamespace, AttachNamespace, RaiseLevel
from isthmus_control.levels import ORIGINS
from isthmus_control.model import TopicState
from isthmus_control.states import ReasonCode
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.links import OperationError

LEADS = links.Attach(local="a-", remote="b-", role="leader")
BACK = links.Attach(local="a-", remote="b-", role="follower")
BACK_FROM_B = links.Attach(local="b-", remote="a-", role="leader")
DRY = links.Recover(dry_run=True)
SHARED = 20


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)


def log_of(two: Two, name: str, index: int = 0) -> Partition:
    topic = "a-t" if name == "A" else "b-t"
    return two.clusters[name].partition(topic, index)


def values(partition: Partition) -> list[bytes | None]:
    return [record.value for record in partition.records().values()]


def write(partition: Partition, what: str, count: int) -> None:
    for number in range(count):
        partition.write_values(b"%s %d" % (what.encode(), number))


async def failed_over(two: Two, ahead: int, written: int, *, detached: bool = True, recorded: bool = True) -> None:
    """B follows A to :data:`SHARED`, A wrote ``ahead`` more and is gone, B is written; then A is back, and detached."""
    two.clusters["A"].add_topic("a-t", 2)
    for index in range(2):
        write(log_of(two, "A", index), f"shared {index}", SHARED)
    await two.create()
    await two.connected()
    await two.a.links.attach("a-to-b", LEADS)
    await two.until("copied", lambda: "b-t" in two.clusters["B"].found and ends(two, "B") == [SHARED, SHARED])
    if recorded:
        await two.until("told", lambda: told(two))
    await two.a.stop()
    await two.until("lost", lambda: not two.b.plugin.parts.peers.connections("a-to-b"))
    write(log_of(two, "A"), "ahead", ahead)
    await two.b.links.fail_over("a-to-b", Failover(), lambda done, total: None)
    write(log_of(two, "B"), "new", written)
    await two.a.start()
    await two.until("A is back", lambda: two.a.plugin.parts.peers.connections("a-to-b"), 60)
    if detached:
        await two.a.links.detach("a-to-b", "a-", local_only=True)


def told(two: Two) -> bool:
    topic = two.controls["B"].state.origins.get("b-t")
    return topic is not None and len(topic.partitions) == 2


def ends(two: Two, name: str) -> list[int]:
    return [log_of(two, name, index).end for index in range(2)]


def watched(two: Two) -> list[int]:
    """The offsets that come into A's log from now on."""
    came: list[int] = []
    for index in range(2):
        log = log_of(two, "A", index)
        log.on_append = lambda partition: came.append(partition.headers[-1].base_offset)
    return came


def going_back(work: Callable[[Two], Awaitable[None]], directory: Path | None) -> None:
    async def run(two: Two) -> None:
        two.a.context.data_directory = directory
        await work(two)

    on_two(run, 600, TruncatedCluster)


@pytest.mark.parametrize("request_", [BACK, BACK_FROM_B], ids=["asked at A", "asked at B"])
def test_equal_logs_go_on_from_the_end_and_nothing_is_copied_again(request_: links.Attach, tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        await failed_over(two, 0, 5)
        came = watched(two)
        side = two.a if request_ is BACK else two.b
        (plan,) = (await side.links.attach("a-to-b", request_.model_copy(update={"dry_run": True}))).topics
        assert plan.action == "follow"
        topic_id = two.clusters["A"].found["a-t"].topic_id
        await side.links.attach("a-to-b", request_)
        await two.until("equal", lambda: ends(two, "A") == ends(two, "B"), 60)
        assert (two.clusters["A"].found["a-t"].topic_id, came) == (topic_id, [20, 21, 22, 23, 24])
        assert values(log_of(two, "A")) == values(log_of(two, "B"))

    going_back(work, tmp_path)


@pytest.mark.parametrize("request_", [BACK, BACK_FROM_B], ids=["asked at A", "asked at B"])
def test_what_the_old_source_has_alone_is_salvaged_and_cut_once_that_is_agreed(
    request_: links.Attach, tmp_path: Path
) -> None:
    async def work(two: Two) -> None:
        await failed_over(two, 3, 5)
        two.clusters["A"].offsets = {
            "g": {("a-t", 0): CommittedOffset(22, "")},
            "h": {("a-t", 0): CommittedOffset(9, "")},
        }
        side = two.a if request_ is BACK else two.b
        told = await side.links.attach("a-to-b", request_.model_copy(update={"dry_run": True}))
        (plan,) = told.topics
        assert plan.partitions is not None
        assert [(each.shared, each.end, each.source_end) for each in plan.partitions] == [(20, 23, 25), (20, 20, 20)]
        assert plan.partitions[0].first_ms is not None
        assert plan.partitions[1].first_ms is None
        assert (plan.action, plan.records_lost, plan.groups_moved, plan.cut is None) == ("refuse", 3, ["g"], False)

        with pytest.raises(OperationError, match="the same up to 20, ends at 23, the source's at 25") as raised:
            await side.links.attach("a-to-b", request_)
        assert raised.value.code == ReasonCode.TARGET_TOPIC_NOT_EMPTY
        write(log_of(two, "A"), "later", 1)
        agreed = request_.model_copy(update={"cut": told.cut})
        with pytest.raises(OperationError, match="not as they were"):
            await side.links.attach("a-to-b", agreed)
        assert not two.a.status().mappings

        told = await side.links.attach("a-to-b", request_.model_copy(update={"dry_run": True}))
        done = await side.links.attach("a-to-b", request_.model_copy(update={"cut": told.cut}))
        assert [(each.action, each.reason) for each in done.topics] == [("cut", None)]
        await two.until("equal", lambda: "a-t" in two.clusters["A"].found and ends(two, "A") == ends(two, "B"), 60)
        assert values(log_of(two, "A")) == values(log_of(two, "B"))
        assert salvaged(tmp_path) == [b"ahead 0", b"ahead 1", b"ahead 2", b"later 0"]
        (truncation,) = two.controls["A"].state.past_truncations
        assert [(cut.offset, cut.log_end) for cut in truncation.cuts] == [(20, 24), (20, 20)]
        await two.until("over", lambda: not two.controls["A"].state.truncations, 60)
        assert two.clusters["A"].offsets["g"]["a-t", 0].offset == SHARED
        again = await side.links.attach("a-to-b", request_.model_copy(update={"cut": told.cut}))
        assert [each.action for each in again.topics] == ["follow"], "what was agreed is done"
        write(log_of(two, "B", 1), "more", 2)
        await two.until("goes on", lambda: ends(two, "A") == ends(two, "B"), 60)

    going_back(work, tmp_path)


def test_nothing_is_cut_without_a_place_to_keep_it() -> None:
    async def work(two: Two) -> None:
        await failed_over(two, 3, 5)
        told = await two.a.links.attach("a-to-b", BACK.model_copy(update={"dry_run": True}))
        assert told.cut is None
        assert "data" in str(told.topics[0].reason)
        with pytest.raises(OperationError, match="what their sources have not can be cut"):
            await two.a.links.attach("a-to-b", BACK.model_copy(update={"cut": "any"}))

    going_back(work, None)


def test_nothing_is_cut_where_the_records_are_not_what_provenance_says(tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        await failed_over(two, 0, 0)
        log_of(two, "A").cut(18)  # its brokers lost the end, and an administrator put something else there
        write(log_of(two, "A"), "others", 2)
        told = await two.a.links.attach("a-to-b", BACK.model_copy(update={"dry_run": True}))
        assert (told.topics[0].action, told.cut) == ("refuse", None)
        assert "nothing is done with it" in str(told.topics[0].reason)

    going_back(work, tmp_path)


def test_a_topic_of_the_same_name_shares_nothing(tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("a-t")
        two.clusters["B"].add_topic("b-t")
        for name in "AB":
            write(log_of(two, name), name, 3)
        await two.create()
        await two.connected()
        told = await two.a.links.attach("a-to-b", LEADS.model_copy(update={"dry_run": True}))
        assert (told.topics[0].action, told.topics[0].records_lost, told.cut) == ("refuse", 3, None)
        assert "no cluster has written for both" in str(told.topics[0].reason)

    going_back(work, tmp_path)


def test_a_topic_to_be_cut_does_not_follow_before(tmp_path: Path) -> None:
    """Ends that change while it is being attached hold it up; the operator agrees again, and it goes on."""

    async def work(two: Two) -> None:
        await failed_over(two, 3, 5)
        told = await two.a.links.attach("a-to-b", BACK.model_copy(update={"dry_run": True}))
        append = two.controls["A"].append

        async def late(body: Any) -> Any:
            outcome = await append(body)
            record = two.controls["A"].state.follower_topics.get("a-t")
            if record is not None and record.state is TopicState.FOLLOWING and not came:
                came.append(1)
                write(log_of(two, "A"), "too late", 1)
            return outcome

        came: list[int] = []
        two.controls["A"].append = late  # type: ignore[method-assign]
        await two.a.links.attach("a-to-b", BACK.model_copy(update={"cut": told.cut}))

        def trouble() -> str | None:
            found = two.controls["A"].state.truncations.get("a-t")
            return None if found is None or found.trouble is None else found.trouble.code

        await two.until("held up", lambda: trouble() == ReasonCode.ENDS_CHANGED, 60)
        await asyncio.sleep(10)
        assert values(log_of(two, "A"))[SHARED:] == [b"ahead 0", b"ahead 1", b"ahead 2", b"too late 0"]
        with pytest.raises(OperationError, match="has 4 records"):
            await two.a.links.attach("a-to-b", BACK)
        told = await two.a.links.attach("a-to-b", BACK.model_copy(update={"dry_run": True}))
        await two.a.links.attach("a-to-b", BACK.model_copy(update={"cut": told.cut}))
        await two.until("equal", lambda: "a-t" in two.clusters["A"].found and ends(two, "A") == ends(two, "B"), 60)
        assert salvaged(tmp_path) == [b"ahead 0", b"ahead 1", b"ahead 2", b"too late 0"]

    going_back(work, tmp_path)


@pytest.mark.parametrize("which", ["a", "b"])
def test_who_still_writes_to_the_old_source_is_refused_before_anything_is_cut(which: str, tmp_path: Path) -> None:
    """And the operator sees what came before the command goes on."""

    async def work(two: Two) -> None:
        await failed_over(two, 3, 5, detached=False)
        side, append = getattr(two, which).links, two.controls["A"].append

        async def late(body: Any) -> Any:
            if isinstance(body, AlterNamespace) and body.reserved:
                write(log_of(two, "A"), "late", 1)
            return await append(body)

        two.controls["A"].append = late  # type: ignore[method-assign]
        with pytest.raises(OperationError, match="clients still wrote to a-t") as raised:
            await side.recover("a-to-b", links.Recover())
        assert raised.value.code == ReasonCode.ENDS_CHANGED
        assert [each.role for each in two.a.status().mappings] == ["leader"]
        assert two.controls["A"].state.lookup.topic_reservation("a-t") is not None
        (pair,) = (await side.recover("a-to-b", DRY)).namespaces
        assert [each.records_lost for each in pair.topics] == [4]
        await side.recover("a-to-b", links.Recover())
        await two.until("equal", lambda: "a-t" in two.clusters["A"].found and ends(two, "A") == ends(two, "B"), 60)
        assert salvaged(tmp_path) == [b"ahead 0", b"ahead 1", b"ahead 2", b"late 0"]

    going_back(work, tmp_path)


@pytest.mark.parametrize("which", ["a", "b"])
def test_one_command_on_either_side_has_the_old_source_follow(which: str, tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        await failed_over(two, 3, 5, detached=False)
        side = getattr(two, which).links
        told = await side.recover("a-to-b", DRY)
        (pair,) = told.namespaces
        assert (pair.local, pair.role) == (("a-", "follower") if which == "a" else ("b-", "leader"))
        assert [(each.topic, each.records_lost) for each in pair.topics] == [("a-t", 3)]
        assert [each.role for each in two.a.status().mappings] == ["leader"]
        done = await side.recover("a-to-b", links.Recover())
        assert [each.action for each in done.namespaces[0].topics] == ["cut"]
        assert [each.role for each in (*two.a.status().mappings, *two.b.status().mappings)] == ["follower", "leader"]
        await two.until("equal", lambda: "a-t" in two.clusters["A"].found and ends(two, "A") == ends(two, "B"), 60)
        assert values(log_of(two, "A")) == values(log_of(two, "B"))
        assert salvaged(tmp_path) == [b"ahead 0", b"ahead 1", b"ahead 2"]
        with pytest.raises(OperationError, match="nothing to recover"):
            await side.recover("a-to-b", links.Recover())

    going_back(work, tmp_path)


@pytest.mark.parametrize("which", ["a", "b"])
def test_what_was_attached_at_one_end_is_gone_on_with(which: str, tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        await failed_over(two, 0, 5, detached=False)
        append = two.controls["B"].append

        async def failing(body: Any) -> Any:
            if isinstance(body, AttachNamespace):
                raise BrokerUnavailable("the control log does not answer")
            return await append(body)

        two.controls["B"].append = failing  # type: ignore[method-assign]
        with pytest.raises(OperationError):
            await getattr(two, which).links.recover("a-to-b", links.Recover())
        two.controls["B"].append = append  # type: ignore[method-assign]
        assert [each.role for each in two.a.status().mappings] == ["follower"]
        assert not two.b.status().mappings
        await getattr(two, which).links.recover("a-to-b", links.Recover())
        await two.until("equal", lambda: ends(two, "A") == ends(two, "B"), 60)

    going_back(work, tmp_path)


def test_nothing_is_recovered_from_a_cluster_that_was_not_failed_over(tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("a-t", 2)
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", LEADS)
        with pytest.raises(OperationError, match="nothing to recover"):
            await two.b.links.recover("a-to-b", links.Recover())
        await two.b.links.detach("a-to-b", "b-", local_only=True)
        for each in (two.a, two.b):
            with pytest.raises(OperationError, match="still reserved"):
                await each.links.recover("a-to-b", links.Recover())

    going_back(work, tmp_path)


@pytest.mark.parametrize("ahead", [0, 3])
def test_what_was_followed_before_terms_were_recorded_counts(ahead: int, tmp_path: Path) -> None:
    """Both logs are upgraded when A is back: what direct sources say is enough between these two."""

    async def work(two: Two) -> None:
        for control in two.controls.values():
            control.state = control.state.evolve(level=ORIGINS - 1)
        await failed_over(two, ahead, 5, detached=False, recorded=False)
        with pytest.raises(OperationError, match="feature level 5"):
            await two.a.links.recover("a-to-b", links.Recover())
        for control in two.controls.values():
            control.apply(RaiseLevel(ORIGINS))
        done = await two.b.links.recover("a-to-b", links.Recover())
        assert [each.action for each in done.namespaces[0].topics] == ["cut" if ahead else "follow"]
        await two.until("equal", lambda: "a-t" in two.clusters["A"].found and ends(two, "A") == ends(two, "B"), 60)
        assert values(log_of(two, "A")) == values(log_of(two, "B"))
        assert len(salvaged(tmp_path)) == ahead

    going_back(work, tmp_path)


@pytest.mark.parametrize("ahead", [0, 3])
def test_an_operator_may_say_what_is_shared_where_nobody_has_recorded_it(ahead: int, tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        await failed_over(two, ahead, 5)
        state = two.controls["A"].state
        two.controls["A"].state = state.evolve(origins={}, histories={}, generation=1)  # its control log was lost
        dry = BACK.model_copy(update={"dry_run": True})
        told = await two.a.links.attach("a-to-b", dry)
        assert (told.topics[0].action, told.cut) == ("refuse", None)
        assert "is not known to be the source's" in str(told.topics[0].reason)
        said = [links.SharedUntil(topic="a-t", partition=index, offset=SHARED) for index in range(2)]
        wrong = [each.model_copy(update={"offset": 99}) for each in said]
        told = await two.a.links.attach("a-to-b", dry.model_copy(update={"shared_until": wrong}))
        assert told.topics[0].action == "refuse", "beyond the ends"
        told = await two.a.links.attach("a-to-b", dry.model_copy(update={"shared_until": said}))
        assert told.topics[0].action == ("refuse" if ahead else "follow")
        assert (told.cut is None) == (not ahead)
        await two.a.links.attach("a-to-b", BACK.model_copy(update={"shared_until": said, "cut": told.cut}))
        await two.until("equal", lambda: "a-t" in two.clusters["A"].found and ends(two, "A") == ends(two, "B"), 60)
        assert values(log_of(two, "A")) == values(log_of(two, "B"))
        assert len(salvaged(tmp_path)) == ahead

    going_back(work, tmp_path)


def test_what_an_operator_says_is_shared_is_compared(tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        await failed_over(two, 3, 5)
        state = two.controls["A"].state
        two.controls["A"].state = state.evolve(origins={}, histories={}, generation=1)
        said = [
            links.SharedUntil(topic="a-t", partition=0, offset=22),
            links.SharedUntil(topic="a-t", partition=1, offset=20),
        ]
        told = await two.a.links.attach("a-to-b", BACK.model_copy(update={"dry_run": True, "shared_until": said}))
        assert (told.topics[0].action, told.cut) == ("refuse", None)
        assert "nothing is done with it" in str(told.topics[0].reason)

    going_back(work, tmp_path)
