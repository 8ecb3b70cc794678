"""What leader ends are told of how far coordinators are: nothing before it is there, and what is pending is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_cluster import run_simulated

from isthmus_plugins.cluster import CommittedOffset
from isthmus_plugins.replication.groups.confirmations import Confirmations
from isthmus_plugins.replication.groups.followed_group import FollowedGroup
from isthmus_plugins.replication.groups.open_losses import OpenLosses
from isthmus_plugins.replication.in_doubt.pending_offsets import PendingOffset
from isthmus_plugins.replication.in_doubt.store import Entry
from isthmus_plugins.replication.link import calls
from isthmus_plugins.tasks import Supervision, Tasks

KEY = LINK, PARTITION = "link", 3
EPOCH, PARTITIONS = 7, 50
T, U = ("far-t", 0), ("far-u", 0)
WAITED = [("far-a", T)]


class Connection:
    """A connection that notes what is confirmed over it, and answers."""

    link_name = LINK
    lost = False

    def __init__(self) -> None:
        self.peer = {"proxy": "a"}
        self.confirmed: list[calls.Applied] = []

    def begin_call(self, question: calls.GroupApplied) -> Callable[[float], Coroutine[Any, Any, calls.Done]]:
        self.confirmed += question.parts

        async def answer(timeout_s: float) -> calls.Done:
            return calls.Done()

        return answer


class Store:
    """A store that is as slow as a test wants."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.stored: dict[str, Any] = {}

    async def put(self, entries: Sequence[Entry]) -> None:
        await self.open.wait()
        self.stored |= {str(entry.key[0]): entry.value for entry in entries}


class Scene:
    def __init__(self) -> None:
        links = {LINK: SimpleNamespace(link_id="id")}
        context: Any = SimpleNamespace(control=SimpleNamespace(state=SimpleNamespace(links=links)), proxy_name="b")
        self.store: Any = Store()
        self.connection: Any = Connection()
        self.tasks = Tasks("test", Supervision())
        self.confirmations = Confirmations(context, self.store, self.tasks, OpenLosses(context))

    def begin(self) -> None:
        self.confirmations.begin(KEY, self.connection, EPOCH, PARTITIONS)

    def told(self, upto: calls.Upto, *pending: PendingOffset, waited: list[tuple[str, Any]] = WAITED) -> None:
        self.confirmations.received(KEY, upto, pending, waited)

    async def confirmed(self) -> list[int]:
        """What was confirmed since this was asked last, after all that is under way."""
        self.confirmations.report([KEY])
        await asyncio.sleep(0.1)
        said = list(self.connection.confirmed)
        self.connection.confirmed.clear()
        assert all(each[:2] == (PARTITION, EPOCH) for each in said)
        return [each.upto for each in said]


def on_scene(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        await work(scene)
        await scene.tasks.close()

    run_simulated(run())


def group() -> FollowedGroup:
    return FollowedGroup(LINK, "far-a", PARTITION)


def test_what_is_not_asked_for_is_not_confirmed() -> None:
    async def work(scene: Scene) -> None:
        assert KEY not in scene.confirmations
        assert scene.confirmations.received_so_far(KEY) is None
        scene.confirmations.resolve(group())
        assert await scene.confirmed() == []
        assert scene.confirmations.stable_offset(*KEY) == -1
        assert list(scene.confirmations.confirmed_over()) == []

    on_scene(work)


def test_a_commit_is_confirmed_when_the_coordinator_has_taken_it() -> None:
    async def work(scene: Scene) -> None:
        scene.begin()
        scene.told(calls.Upto(10, settled=8))
        so_far = scene.confirmations.received_so_far(KEY)
        assert so_far is not None
        scene.told(calls.Upto(11, settled=11))
        assert await scene.confirmed() == []
        scene.confirmations.has(so_far, group(), [T])
        assert await scene.confirmed() == [10], "what was told after the request began is not there by it"
        assert scene.confirmations.stable_offset(*KEY) == 8
        assert await scene.confirmed() == []
        assert list(scene.confirmations.confirmed_over()) == [(scene.connection, PARTITION, PARTITIONS)]

    on_scene(work)


def test_what_the_coordinator_was_found_to_have_is_confirmed() -> None:
    async def work(scene: Scene) -> None:
        scene.begin()
        scene.told(calls.Upto(10), waited=[("far-a", T), ("far-a", U)])
        read, wanted = group(), CommittedOffset(4, "")
        read.want(T, wanted, 0.0)
        read.want(U, wanted, 0.0)
        read.found({T: wanted}, False, 1.0, 100.0)
        scene.confirmations.resolve(read)
        assert await scene.confirmed() == []
        read.found({T: wanted, U: wanted}, False, 2.0, 100.0)
        scene.confirmations.resolve(read)
        assert await scene.confirmed() == [10]

    on_scene(work)


def test_who_tells_anew_is_confirmed_anew() -> None:
    async def work(scene: Scene) -> None:
        scene.begin()
        scene.told(calls.Upto(10))
        before = scene.confirmations.received_so_far(KEY)
        assert before is not None
        scene.confirmations.end(KEY)
        scene.begin()
        scene.told(calls.Upto(12))
        scene.confirmations.has(before, group(), [T])
        assert await scene.confirmed() == [], "that was for what was told before"

    on_scene(work)


def test_what_open_transactions_have_committed_counts_when_it_is_stored() -> None:
    async def work(scene: Scene) -> None:
        scene.begin()
        scene.store.open.clear()
        scene.told(calls.Upto(10, settled=9), PendingOffset(5, 0, "far-a", T, 4, "m", 9), waited=[])
        assert await scene.confirmed() == []
        scene.store.open.set()
        await asyncio.sleep(0.1)
        assert [each.upto for each in scene.connection.confirmed] == [10]
        assert scene.store.stored["o"]["positions"] == [[*T, 4, "m", 9]]
        assert "f" not in scene.store.stored
        scene.told(calls.Upto(12, settled=12), waited=[])
        scene.connection.confirmed.clear()
        assert await scene.confirmed() == [12]
        assert scene.store.stored["o"] is None, "it has ended"
        assert scene.store.stored["f"] == {"settled": 12}

    on_scene(work)


def test_which_transactions_are_still_open_is_stored_before_more_is_confirmed() -> None:
    async def work(scene: Scene) -> None:
        scene.begin()
        scene.store.open.clear()
        scene.told(calls.Upto(10, open=(calls.OpenSince(5, 9),)), waited=[])
        scene.told(calls.Upto(11), waited=[])
        assert await scene.confirmed() == []
        scene.store.open.set()
        await asyncio.sleep(0.1)
        assert [each.upto for each in scene.connection.confirmed] == [11]
        assert scene.store.stored["v"] == {"upto": 10, "open": [[5, 9]]}

    on_scene(work)


def test_nothing_is_said_over_a_connection_that_is_gone() -> None:
    async def work(scene: Scene) -> None:
        scene.begin()
        scene.told(calls.Upto(10), waited=[])
        scene.connection.lost = True
        assert await scene.confirmed() == []
        assert scene.confirmations.stable_offset(*KEY) == -1

    on_scene(work)


@pytest.mark.fails_on_purpose
@pytest.mark.parametrize("still_open", [None, (calls.OpenSince(5, 9),)])
def test_what_could_not_be_stored_is_stored_again(still_open: tuple[calls.OpenSince, ...] | None) -> None:
    """Whatever failed: nobody else would ever confirm the partition."""

    async def work(scene: Scene) -> None:
        scene.begin()
        put, failures = scene.store.put, 2

        async def fails(entries: Sequence[Entry]) -> None:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise RuntimeError("a bug of ours")
            await put(entries)

        scene.store.put = fails
        pending = [PendingOffset(5, 0, "far-a", T, 4, "m", 9)]
        scene.told(calls.Upto(10, settled=9, open=still_open), *pending, waited=[])
        await scene.confirmed()
        await asyncio.sleep(5)
        assert failures < 0
        assert [each.upto for each in scene.connection.confirmed] == [10]

    on_scene(work)
