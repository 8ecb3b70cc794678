"""Committed offsets that a truncation moves, against a model of coordinators: what is read, kept, and given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import pytest
from support.fake_cluster import run_simulated, simulated_now
from support.truncating import TOPIC, FollowedTopic

from isthmus_control.states import ReasonCode
from isthmus_control.truncations import MovedOffset, Truncation, TruncationPhase
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, Refused, TopicPartition
from isthmus_plugins.replication.truncation.group_offsets import DROP_S, NO_EXPIRY_OF_ITS_OWN, GroupOffsets
from isthmus_plugins.replication.truncation.ownership import HeldUp, NotOwner, Ownership

P = TruncationPhase
CUT = FollowedTopic.COMMON
PLACE = (TOPIC, 0)
VERIFIES = Refused(15, "COORDINATOR_NOT_AVAILABLE")
"""What coordinators answer that verify transactions."""


class Scene(FollowedTopic):
    """A topic whose truncation this process carries out, and the groups of the cluster."""

    def __init__(self) -> None:
        super().__init__(2)
        context = self.context()
        self.group_offsets = GroupOffsets(context, Ownership(context))
        self.begin(context.incarnation)

    @property
    def committed(self) -> dict[str, dict[TopicPartition, tuple[int, str]]]:
        """What groups have, but for those that have nothing."""
        return {
            group: {place: tuple(each) for place, each in offsets.items()}
            for group, offsets in self.cluster.offsets.items()
            if offsets
        }

    def has(self, group: str, offset: int, metadata: str = "", place: TopicPartition = PLACE) -> None:
        """A group has committed that."""
        self.cluster.offsets.setdefault(group, {})[place] = CommittedOffset(offset, metadata)

    def on_commit(self, happens: Callable[[str], None]) -> None:
        """Have something happen when a commit for a group is asked for, before it lands."""
        commit = self.cluster.commit_offsets

        async def watched(group: str, *arguments: Any) -> Mapping[TopicPartition, Refused]:
            happens(group)
            return await commit(group, *arguments)

        self.cluster.commit_offsets = watched  # type: ignore[method-assign]

    def refuse(self, group: str, refused: Refused) -> None:
        """Have a group's coordinator answer so, also to commits that are no member's."""
        commit = self.cluster.commit_offsets

        async def answer(asked: str, offsets: Mapping[TopicPartition, Any], *more: Any) -> Any:
            return dict.fromkeys(offsets, refused) if asked == group else await commit(asked, offsets, *more)

        self.cluster.commit_offsets = answer  # type: ignore[method-assign]


def on_scene(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(600):
            await work(Scene())

    run_simulated(run())


# ---- reading ----


def test_what_groups_have_in_the_topic_is_read_and_nothing_else() -> None:
    async def work(scene: Scene) -> None:
        scene.has("g", 5, "m")
        scene.has("g", 6, place=(TOPIC, 1))
        scene.has("g", 7, place=("remote-t2", 0))
        scene.has("elsewhere", 8, place=("remote-t2", 0))
        scene.cluster.subscriptions = {"has members": {TOPIC}}
        assert await scene.group_offsets.read(TOPIC) == {"g": {0: (5, "m"), 1: (6, "")}}

    on_scene(work)


async def read(scene: Scene) -> None:
    await scene.group_offsets.read(TOPIC)


async def restore(scene: Scene) -> None:
    await scene.group_offsets.restore(scene.at(P.RESTORING), {"b": {0: (4, "")}})


@pytest.mark.parametrize("step", [read, restore])
def test_a_group_that_does_not_tell_is_not_one_without_committed_offsets(
    step: Callable[[Scene], Awaitable[None]],
) -> None:
    async def work(scene: Scene) -> None:
        for group in ("a", "b", "c"):
            scene.has(group, 5)
        all_of_them = scene.cluster.committed_offsets

        async def without_some(groups: Collection[str]) -> Mapping[str, Mapping[TopicPartition, CommittedOffset]]:
            return {group: found for group, found in (await all_of_them(groups)).items() if group == "a"}

        scene.cluster.committed_offsets = without_some  # type: ignore[method-assign]
        with pytest.raises(BrokerUnavailable, match="of 2 groups cannot be read now, of b first"):
            await step(scene)
        assert not scene.cluster.renewed

    on_scene(work)


# ---- committing ----


def test_what_is_committed_in_a_groups_place_expires_as_the_groups_own_whether_it_has_members_or_not() -> None:
    async def work(scene: Scene) -> None:
        scene.cluster.subscriptions = {"has members": {TOPIC}}
        offsets = {"has members": {0: (5, "m")}, "has none": {0: (6, ""), 1: (7, "")}}
        await scene.group_offsets.commit(scene.now, offsets)
        assert scene.committed == {
            "has members": {PLACE: (5, "m")},
            "has none": {PLACE: (6, ""), (TOPIC, 1): (7, "")},
        }
        assert scene.cluster.renewed == [
            ("has members", PLACE, None),
            ("has none", PLACE, NO_EXPIRY_OF_ITS_OWN),
            ("has none", (TOPIC, 1), NO_EXPIRY_OF_ITS_OWN),
        ]

    on_scene(work)


def test_who_was_taken_over_commits_nothing() -> None:
    async def work(scene: Scene) -> None:
        slept = scene.at(P.RESTORING)
        scene.take_over()
        for change in (scene.group_offsets.commit, scene.group_offsets.restore):
            with pytest.raises(NotOwner, match="'q' truncates"):
                await change(slept, {"g": {0: (5, "")}})
        assert not scene.cluster.renewed
        await scene.group_offsets.commit(slept, {})  # nobody is asked

    on_scene(work)


def test_a_commit_that_the_coordinator_will_never_take_waits_for_somebody() -> None:
    async def work(scene: Scene) -> None:
        scene.refuse("b", VERIFIES)
        with pytest.raises(HeldUp, match="of group b in partition 1 cannot be kept") as raised:
            await scene.group_offsets.commit(scene.now, {group: {1: (5, "")} for group in ("a", "b")})
        assert raised.value.code == ReasonCode.POSITIONS_NOT_RESTORED
        assert VERIFIES.error_name in str(raised.value)
        assert "--disable-transaction-verification" in str(raised.value)
        assert "a" in scene.committed

    on_scene(work)


@pytest.mark.parametrize("refused", [Refused(14, "COORDINATOR_LOAD_IN_PROGRESS"), Refused(16, "NOT_COORDINATOR")])
def test_a_coordinator_that_moves_is_waited_for_and_needs_nobody(refused: Refused) -> None:
    async def work(scene: Scene) -> None:
        scene.refuse("g", refused)
        with pytest.raises(BrokerUnavailable, match=f"the coordinator of group g answers {refused.error_name}"):
            await scene.group_offsets.commit(scene.now, {"g": {0: (5, "")}})

    on_scene(work)


# ---- giving back ----


def given_back(scene: Scene) -> Truncation:
    """The topic was made anew, and has all that both logs share; nobody has anything committed in it."""
    return scene.at(P.RESTORING)


BEFORE = {
    "behind": {0: (5, "m")},
    "beyond": {0: (CUT + 2, "mine"), 1: (CUT, "")},
    "further": {1: (CUT + 1, "")},
}
AFTER = {
    "behind": {PLACE: (5, "m")},
    "beyond": {PLACE: (CUT, "mine"), (TOPIC, 1): (CUT, "")},
    "further": {(TOPIC, 1): (CUT, "")},
}
MOVED = [MovedOffset("beyond", 0, CUT + 2, CUT), MovedOffset("further", 1, CUT + 1, CUT)]


def test_groups_get_what_they_had_and_beyond_the_cut_the_cut_which_is_told() -> None:
    async def work(scene: Scene) -> None:
        assert await scene.group_offsets.restore(given_back(scene), BEFORE) == MOVED
        assert scene.committed == AFTER

    on_scene(work)


def test_what_a_group_has_committed_since_is_left() -> None:
    async def work(scene: Scene) -> None:
        scene.has("behind", 7)
        scene.has("beyond", 0, place=(TOPIC, 1))
        assert await scene.group_offsets.restore(given_back(scene), BEFORE) == MOVED
        expected = AFTER | {"behind": {PLACE: (7, "")}, "beyond": {PLACE: (CUT, "mine"), (TOPIC, 1): (0, "")}}
        assert scene.committed == expected

    on_scene(work)


def test_a_partition_that_was_not_cut_keeps_what_was_committed_in_it() -> None:
    async def work(scene: Scene) -> None:
        assert await scene.group_offsets.restore(given_back(scene), {"g": {2: (99, "")}}) == []
        assert scene.committed == {"g": {(TOPIC, 2): (99, "")}}

    on_scene(work)


def test_a_commit_that_was_under_way_when_the_topic_was_deleted_is_none_beyond_the_cut() -> None:
    """Whether the group had something before or not."""

    async def work(scene: Scene) -> None:
        scene.has("behind", CUT + 3, "late")
        scene.has("new", CUT + 3, "late")
        scene.has("new", CUT, "not beyond", place=(TOPIC, 1))
        await scene.group_offsets.restore(given_back(scene), {"behind": {0: (5, "m")}})
        assert scene.committed == {
            "behind": {PLACE: (5, "m")},
            "new": {PLACE: (CUT, "late"), (TOPIC, 1): (CUT, "not beyond")},
        }

    on_scene(work)


def test_what_the_coordinator_drops_with_the_old_topic_after_it_was_given_back_is_given_back_again() -> None:
    async def work(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        dropped: list[float] = []

        def drop(group: str) -> None:
            """It hears of the deletion, once for each group, when it has taken the commit."""
            if len(dropped) < len(BEFORE):
                dropped.append(loop.time())
                loop.call_later(DROP_S / 2, scene.cluster.offsets.pop, group)

        scene.on_commit(drop)
        assert await scene.group_offsets.restore(given_back(scene), BEFORE) == MOVED
        assert scene.committed == AFTER
        assert len(scene.cluster.renewed) == 2 * len([each for offsets in AFTER.values() for each in offsets])

    on_scene(work)


def test_who_begins_again_after_a_request_was_lost_comes_to_the_same() -> None:
    async def work(scene: Scene) -> None:
        truncation = given_back(scene)
        lost: list[str] = []

        def lose(group: str) -> None:
            if group == "beyond" and not lost:
                lost.append(group)
                raise BrokerUnavailable("no answer")

        scene.on_commit(lose)
        with pytest.raises(BrokerUnavailable):
            await scene.group_offsets.restore(truncation, BEFORE)
        assert scene.committed == {"behind": AFTER["behind"]}
        assert await scene.group_offsets.restore(truncation, BEFORE) == MOVED
        assert scene.committed == AFTER
        assert [group for group, *_ in scene.cluster.renewed].count("behind") == 1

    on_scene(work)


def test_who_is_taken_over_while_it_waits_leaves_the_rest_to_the_next_owner() -> None:
    async def work(scene: Scene) -> None:
        truncation, began = given_back(scene), simulated_now()

        def slow(group: str) -> None:
            """The others have it, one is dropped."""
            if group == "further":
                asyncio.get_running_loop().call_later(DROP_S / 2, taken_over)

        def taken_over() -> None:
            scene.cluster.offsets.pop("behind")
            scene.take_over()

        scene.on_commit(slow)
        with pytest.raises(NotOwner):
            await scene.group_offsets.restore(truncation, BEFORE)
        assert simulated_now() - began >= DROP_S
        assert "behind" not in scene.committed

    on_scene(work)


def test_what_the_coordinator_drops_late_is_given_back_although_all_was_there_at_first() -> None:
    async def work(scene: Scene) -> None:
        scene.has("g", 5, "m")  # of the old topic: the coordinator has not heard yet that it was deleted
        asyncio.get_running_loop().call_later(DROP_S / 2, scene.cluster.offsets.pop, "g")
        await scene.group_offsets.restore(given_back(scene), {"g": {0: (5, "m")}})
        await asyncio.sleep(2 * DROP_S)
        assert scene.committed == {"g": {PLACE: (5, "m")}}

    on_scene(work)


def test_who_is_taken_over_between_two_groups_does_not_put_the_second_one_back() -> None:
    async def work(scene: Scene) -> None:
        slept = scene.at(P.SPOOLING)

        def next_owner_is_done(group: str) -> None:
            if group == "a":
                scene.take_over()
                scene.has("b", CUT)

        scene.on_commit(next_owner_is_done)
        with pytest.raises(NotOwner):
            await scene.group_offsets.commit(slept, {group: {0: (CUT + 2, "")} for group in ("a", "b")})
        assert scene.committed["b"] == {PLACE: (CUT, "")}

    on_scene(work)
