"""The parts of replication are joined in one place, all of them, and told things in one order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated
from support.replicas import Peers

from isthmus_plugins.replication.assembly import Parts, assemble
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.link.part import NotJoined, Part, not_joined
from isthmus_plugins.replication.traffic import Traffic


def assembled() -> Parts:
    rng = random.Random(1)
    context: Any = FakeContext(FakeCluster(rng, range(1, 2)), FakeControl("A", rng))
    return assemble(context, cast(Any, Peers))


def simulated(work: Callable[[], Any]) -> None:
    async def run() -> None:
        work()

    run_simulated(run())


def test_every_part_is_there_once_and_answers_its_own_calls() -> None:
    def work() -> None:
        parts = assembled()
        assert len({id(part) for part in parts.all}) == len(parts.all) == len(vars(parts)) - 2, (
            "all but the context and the counts"
        )
        answered = [answer.question for part in parts.all for answer in part.answers()]
        assert len(answered) == len(set(answered))
        methods = {question.METHOD for question in answered}
        assert {"open_stream", "decide", "sync_lease", "group_offsets", "attach", "digest"} <= methods

    simulated(work)


def test_what_nobody_joined_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FollowerEnd.__init__

    def with_another(end: FollowerEnd, context: Any, traffic: Traffic) -> None:
        made(end, context, traffic)
        end.forgotten = not_joined  # type: ignore[attr-defined]

    monkeypatch.setattr(FollowerEnd, "__init__", with_another)

    def work() -> None:
        with pytest.raises(NotJoined, match=r"FollowerEnd\.forgotten is joined to nothing"):
            assembled()

    simulated(work)


def test_a_part_that_is_not_joined_lets_nothing_pass() -> None:
    def work() -> None:
        parts = assembled()
        alone = FollowerEnd(parts.context, Traffic())
        for ask in (alone.awaits, alone.on_stored):
            with pytest.raises(NotJoined, match="not joined"):
                ask(None, 1)  # type: ignore[arg-type]

    simulated(work)


class Told(Part):
    """A part that writes down what it is told."""

    def __init__(self, name: str, told: list[tuple[str, str]]) -> None:
        self._name = name
        self._told = told

    def start(self) -> None:
        self._told.append((self._name, "start"))

    async def stop(self) -> None:
        self._told.append((self._name, "stop"))

    def control_changed(self, state: Any) -> None:
        self._told.append((self._name, "control"))

    def wake(self) -> None:
        self._told.append((self._name, "wake"))


def test_another_control_state_wakes_whoever_does_not_say_more() -> None:
    class Wakes(Part):
        woken = 0

        def wake(self) -> None:
            self.woken += 1

    def work() -> None:
        parts, told = assembled(), list[tuple[str, str]]()
        stand_ins: dict[str, Any] = {"service": Wakes(), "observing": Told("observing", told)}
        parts = replace(parts, **stand_ins)
        parts.control_changed(parts.context.control.state)
        assert stand_ins["service"].woken == 1
        assert told == [("observing", "control")]

    simulated(work)


def test_parts_are_told_in_the_order_of_their_fields_and_stop_in_reverse() -> None:
    async def run() -> None:
        told: list[tuple[str, str]] = []
        parts = assembled()
        names = [name for name, value in vars(parts).items() if isinstance(value, Part)]
        stand_ins: dict[str, Any] = {name: Told(name, told) for name in names}
        parts = replace(parts, **stand_ins)
        parts.start()
        once = [(name, what) for what in ("control", "start") for name in names]
        assert told == once, "what is known counts before anything begins"
        told.clear()
        await parts.stop()
        assert told == [(name, "stop") for name in reversed(names)]
        before = {name: names.index(name) for name in names}
        assert before["store"] < before["follower_end"] < before["peers"] < before["leader_end"] < before["decisions"]

    run_simulated(run())
