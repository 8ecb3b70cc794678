"""Three clusters with a link between each two, attached in whatever order: none follows itself over the others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import combinations, permutations

import pytest
from support.killed_proxies import TOPIC, KilledProxies
from support.loopback import run_on_loopback
from support.seeds import seeds

from isthmus_plugins import links
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.operations.rings import LOOK_S, Rings

TOLD = "FOLLOWS_ITSELF"
ROUND = (("A", "B"), ("B", "C"), ("C", "A"))
"""Who leads to whom in a ring."""


def link_of(one: str, other: str) -> str:
    return "-to-".join(sorted((one.lower(), other.lower())))


class Scene(KilledProxies):
    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        super().__init__(rng, "ABC", sidecars=rng.random() < 0.3)

    def source(self, name: str) -> str | None:
        """Whom a cluster follows."""
        link = self.follows_over(name)
        return None if link is None else link.replace(name.lower(), "").replace("-to-", "").upper()

    def ring(self) -> set[str]:
        """Clusters that follow themselves, by their logs."""
        found = set[str]()
        for name in self.names:
            at = self.source(name)
            for _ in self.names:
                at = self.source(at) if at not in (None, name) else at
            found |= {name} if at == name else set()
        return found

    def told(self) -> set[str]:
        """Those of which every proxy says so."""
        return {
            name
            for name in self.names
            if (link := self.follows_over(name)) is not None
            and all(self._tells(proxy.status(link)) for proxy in self.proxies_of(name))
        }

    @staticmethod
    def _tells(status: links.LinkStatus) -> bool:
        (mapping,) = (each for each in status.mappings if each.role == "follower")
        assert (mapping.reason == TOLD) == (status.reason == TOLD) == (mapping.state != "Following"), status
        assert mapping.reason != TOLD or "which follows this one" in str(mapping.message)
        return mapping.reason == TOLD

    async def begin(self) -> None:
        for one, other in combinations(self.names, 2):
            request = links.CreateLink(link_name=link_of(one, other), remote=self.side(other).address)
            await self.side(one).links.create(request)
        await self.until("connected", self.are_connected, 10)

    def are_connected(self) -> bool:
        return all(
            proxy.plugin.parts.peers.connections(link)
            for name in self.names
            for proxy in self.proxies_of(name)
            for link in self.state(name).links
        )

    async def attach(self, leader: str, follower: str) -> bool:
        """At either side; whether that was done."""
        here, there, role = self.random.choice(((leader, follower, "leader"), (follower, leader, "follower")))
        asked = links.Attach(local=self.prefix(here), remote=self.prefix(there), role=role)
        try:
            await self.side(here).links.attach(link_of(leader, follower), asked)
        except OperationError as error:
            self.seen["a ring" if "a ring" in error.message else error.code] += 1
            return False
        return True

    async def detach(self, leader: str, follower: str) -> None:
        here = self.random.choice((leader, follower))
        await self.side(here).links.detach(link_of(leader, follower), self.prefix(here), TOPIC.value)


async def on_scene(seed: int, work: Callable[[Scene], Awaitable[None]]) -> None:
    scene = Scene(seed)
    await scene.start()
    try:
        async with asyncio.timeout(600):
            await scene.begin()
            await work(scene)
    finally:
        print("seen", dict(scene.seen), {name: scene.source(name) for name in scene.names})
        await scene.stop()


@pytest.mark.parametrize("seed", seeds(6))
def test_one_after_the_other_no_ring_is_made(seed: int) -> None:
    async def work(scene: Scene) -> None:
        for leader, follower in scene.random.choices([*permutations(scene.names, 2)], k=12):
            if scene.source(follower) == leader and scene.random.random() < 0.5:
                await scene.detach(leader, follower)
                continue
            await scene.attach(leader, follower)
            assert not scene.ring()
        pairs = [(str(scene.source(name)), name) for name in scene.names if scene.source(name)]
        for pair in pairs:
            await scene.detach(*pair)
        *pairs, last = scene.random.sample(ROUND, 3)
        for pair in pairs:
            assert await scene.attach(*pair)
        assert not await scene.attach(*last)
        assert scene.seen["a ring"]
        await asyncio.sleep(LOOK_S + 5)
        assert not scene.told()

    run_on_loopback(on_scene(seed, work))


@pytest.mark.parametrize("seed", seeds(6))
def test_a_ring_that_was_made_at_once_is_told_until_it_is_none(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene) -> None:
        if scene.random.random() < 0.5:  # as if all had been asked before any was attached
            monkeypatch.setattr(Rings, "check", lambda *asked: asyncio.sleep(0))
        await asyncio.gather(*(scene.attach(*pair) for pair in ROUND))
        monkeypatch.undo()
        ring = scene.ring()
        scene.seen["rings"] += bool(ring)
        await scene.until("told", lambda: scene.told() == ring, 3 * LOOK_S)
        await asyncio.sleep(LOOK_S)
        assert scene.told() == ring
        if ring:
            await scene.detach(*scene.random.choice(ROUND))
            assert not scene.ring()
            await scene.until("none", lambda: not scene.told(), 3 * LOOK_S)

    run_on_loopback(on_scene(seed, work))
