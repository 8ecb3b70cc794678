"""What is due at the same time goes into one command; what that is refused for keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
from support.fake_cluster import run_simulated
from support.replicas import Replicas

from isthmus_control.commands import Body, CreateNamespace, DeleteNamespace
from isthmus_control.control_state import ControlState
from isthmus_control.model import NamespaceKey, ResourceType
from isthmus_control.outcome import Rejected, Rejection
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.replication.link.joined_commands import JoinedCommands
from isthmus_plugins.tasks import Tasks

TOPIC = ResourceType.TOPIC


class Scene:
    """Entries are prefixes; a namespace is made of each. ``!`` stands for one that is refused."""

    def __init__(self) -> None:
        replicas = Replicas(random.Random(1))
        replicas.start("A")
        self.context = replicas.ends["A"].context
        self.control = replicas.controls["A"]
        self.together: list[list[str]] = []
        self.away = False
        self.tasks = Tasks("test", self.context.supervision)
        self.joined = JoinedCommands(self.context, self.tasks, "joined", self.bodies)
        self.replicas = replicas

    def bodies(self, state: ControlState, prefixes: Sequence[str]) -> Sequence[Body]:
        if self.away:
            raise BrokerUnavailable("the control log's broker is away")
        self.together.append(list(prefixes))
        known = {key.prefix for key in state.namespaces}
        return [
            DeleteNamespace(TOPIC, "none-") if prefix.startswith("!") else CreateNamespace(TOPIC, prefix)
            for prefix in prefixes
            if prefix not in known
        ]


def on_scene(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        await work(scene)
        await scene.tasks.close()
        await scene.replicas.stop("A")

    run_simulated(run())


def test_what_comes_meanwhile_goes_together_and_what_is_there_need_not() -> None:
    async def work(scene: Scene) -> None:
        recorded = await asyncio.gather(*(scene.joined.record(f"n{number}-") for number in range(5)))
        assert recorded == [None] * 5
        assert scene.together == [[f"n{number}-" for number in range(5)]]
        assert {NamespaceKey(TOPIC, f"n{number}-") for number in range(5)} <= scene.control.state.namespaces.keys()
        assert await scene.joined.record("n1-") is None

    on_scene(work)


def test_a_refusal_is_that_of_the_entry_alone() -> None:
    async def work(scene: Scene) -> None:
        first, refused, last = await asyncio.gather(*map(scene.joined.record, ("a-", "!", "b-")))
        assert (first, last) == (None, None)
        assert isinstance(refused, Rejected)
        assert refused.code is Rejection.NOT_FOUND
        assert {NamespaceKey(TOPIC, "a-"), NamespaceKey(TOPIC, "b-")} <= scene.control.state.namespaces.keys()

    on_scene(work)


def test_who_waits_is_told_that_nothing_can_be_recorded_now() -> None:
    async def work(scene: Scene) -> None:
        scene.away = True
        with pytest.raises(BrokerUnavailable):
            await scene.joined.record("a-")
        scene.away = False
        assert await scene.joined.record("a-") is None

    on_scene(work)


def test_one_that_is_given_up_keeps_no_other_from_being_recorded() -> None:
    async def work(scene: Scene) -> None:
        one, other = (scene.tasks.start(prefix, scene.joined.record(prefix)) for prefix in ("a-", "b-"))
        await asyncio.sleep(0)
        one.cancel()
        assert await other is None

    on_scene(work)
