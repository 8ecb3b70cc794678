"""Work that is kept: it begins anew where it failed, and shows for as long as it may fail again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.fake_cluster import run_simulated, simulated_now

from isthmus_plugins.tasks import NAMES_MAX, RECOVERED_S, RETRY_MAX_S, RETRY_MIN_S, Supervision, Tasks, some_at_once

pytestmark = pytest.mark.fails_on_purpose


class Scene:
    def __init__(self) -> None:
        self.supervision = Supervision()
        self.tasks = Tasks("owner", self.supervision)
        self.begun: list[float] = []
        self.fails = True

    async def work(self) -> None:
        self.begun.append(simulated_now())
        if self.fails:
            raise RuntimeError("injected")
        await asyncio.Event().wait()

    @property
    def failing(self) -> list[str]:
        return [each.name for each in self.supervision.failing]


def on_scene(run: Callable[[Scene], Awaitable[None]]) -> None:
    async def work() -> None:
        scene = Scene()
        try:
            await run(scene)
        finally:
            await scene.tasks.close()

    run_simulated(work())


def test_what_fails_begins_anew_after_longer_and_longer() -> None:
    async def run(scene: Scene) -> None:
        scene.tasks.keep("loop", scene.work)
        await asyncio.sleep(40)
        pauses = [later - before for before, later in zip(scene.begun, scene.begun[1:], strict=False)]
        assert pauses[:4] == pytest.approx([RETRY_MIN_S, 2 * RETRY_MIN_S, 4 * RETRY_MIN_S, 8 * RETRY_MIN_S])
        assert pauses[4:] == pytest.approx([RETRY_MAX_S] * len(pauses[4:]))
        failing = scene.supervision.failing[0]
        assert (failing.name, failing.error, failing.failures) == (
            "owner/loop",
            "RuntimeError: injected",
            len(scene.begun),
        )
        assert "owner/loop fails and is tried again (11 times in 40 s): RuntimeError: injected" in failing.describe(
            failing.since + 40
        )
        assert scene.supervision.failures == {"owner/loop": len(scene.begun)}

    on_scene(run)


def test_it_shows_until_it_has_run_well_for_a_while() -> None:
    async def run(scene: Scene) -> None:
        scene.tasks.keep("loop", scene.work)
        await asyncio.sleep(0)
        scene.fails = False
        await asyncio.sleep(RETRY_MIN_S + RECOVERED_S - 1)
        assert scene.failing == ["owner/loop"]
        await asyncio.sleep(2)
        assert scene.failing == []
        assert len(scene.begun) == 2
        assert scene.supervision.failures == {"owner/loop": 1}

    on_scene(run)


def test_what_ended_or_is_not_wanted_any_more_fails_no_longer() -> None:
    async def run(scene: Scene) -> None:
        ended = asyncio.Event()

        async def once() -> None:
            if not ended.is_set():
                ended.set()
                raise RuntimeError("injected")

        await scene.tasks.keep("once", once)
        assert ended.is_set()
        assert scene.failing == []
        scene.tasks.keep("loop", scene.work)
        await asyncio.sleep(1)
        assert scene.failing == ["owner/loop"]
        await scene.tasks.close()
        assert scene.failing == []

    on_scene(run)


def test_of_two_with_one_name_each_counts_for_itself() -> None:
    async def run(scene: Scene) -> None:
        async def well() -> None:
            await asyncio.sleep(3)

        scene.tasks.keep("loop", scene.work)
        await scene.tasks.keep("loop", well)
        assert scene.failing == ["owner/loop"]

    on_scene(run)


def test_what_was_started_once_is_counted_and_its_owner_knows() -> None:
    async def work() -> None:
        seen: list[tuple[str, str]] = []
        supervision = Supervision()
        tasks = Tasks("owner", supervision, lambda name, error: seen.append((name, str(error))))

        async def fails() -> None:
            raise RuntimeError("injected")

        await asyncio.wait([tasks.start("once", fails())])
        assert seen == [("owner/once", "injected")]
        assert supervision.failures == {"owner/once": 1}
        assert supervision.failing == []
        await tasks.close()

    run_simulated(work())


def test_what_got_over_a_failure_by_itself_shows_for_a_while() -> None:
    async def run(scene: Scene) -> None:
        for _ in range(2):
            scene.tasks.failed("writer", RuntimeError("injected"))
            await asyncio.sleep(RECOVERED_S - 1)
            assert scene.failing == ["owner/writer"]
        assert scene.supervision.failing[0].failures == 2
        await asyncio.sleep(2)
        assert scene.failing == []
        scene.tasks.failed("writer", RuntimeError("injected"))
        await scene.tasks.close()
        assert scene.failing == []

    on_scene(run)


def test_what_fails_while_its_owner_closes_is_not_begun_anew() -> None:
    async def run(scene: Scene) -> None:
        begun = []

        async def work() -> None:
            begun.append(simulated_now())
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise RuntimeError("injected") from None

        scene.tasks.keep("loop", work)
        await asyncio.sleep(1)
        await scene.tasks.close()
        assert len(begun) == 1

    on_scene(run)


def test_names_that_are_counted_have_a_bound() -> None:
    supervision = Supervision()
    for number in range(NAMES_MAX + 100):
        supervision.count(f"owner/of-topic-{number}")
        supervision.count("owner/loop")
    assert len(supervision.failures) == NAMES_MAX + 1
    assert supervision.failures["owner/loop"] == NAMES_MAX + 100, "known ones go on"
    assert supervision.failures["owner/others"] == 101
    assert supervision.failures.total() == 2 * (NAMES_MAX + 100)


def test_some_at_once_are_under_way_and_their_results_are_in_order() -> None:
    under_way: list[int] = []
    most = 0

    async def do(number: int) -> int:
        nonlocal most
        under_way.append(number)
        most = max(most, len(under_way))
        await asyncio.sleep(3.0 if number == 0 else 1.0)
        under_way.remove(number)
        return -number

    async def work() -> None:
        began = simulated_now()
        assert await some_at_once(3, do, range(7)) == [0, -1, -2, -3, -4, -5, -6]
        assert most == 3
        assert simulated_now() - began == pytest.approx(3.0)
        assert await some_at_once(3, do, []) == []

    run_simulated(work())


def test_the_first_error_of_some_ends_all_that_is_under_way() -> None:
    done: list[int] = []

    async def do(number: int) -> None:
        if number == 1:
            raise RuntimeError("injected")
        await asyncio.sleep(1.0)
        done.append(number)

    async def work() -> None:
        with pytest.raises(RuntimeError, match="injected"):
            await some_at_once(2, do, range(4))
        await asyncio.sleep(5.0)
        assert done == []

    run_simulated(work())
