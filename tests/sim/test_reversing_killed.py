"""Reversals back and forth with proxies killed, links cut and control logs in trouble, under clients that write on.

Each cluster's log says who may write there: never both, whatever was killed when. What was acked is in both logs in
the end, once, in one order. Clients are told to move where the other cluster leads, for as long as that was asked for.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from support.killed_proxies import GROUP, PARTITIONS, TOPIC, KilledProxies
from support.loopback import run_on_loopback
from support.moving_clients import TIMES_S, MovingClients
from support.seeds import seeds

from isthmus_control.commands import AbandonReversal, HandOver, TakeBack
from isthmus_control.model import LinkMode, Role
from isthmus_plugins import links

LINK = "a-to-b"
LEADS = links.Attach(local="a-", remote="b-", role="leader")
GROUPS = links.Attach(
    type="consumer-group", local="ga-", remote="gb-", role="leader", disable_transaction_verification=True
)

MOVE_S = 35
OTHER = links.Attach(local="x-", remote="y-", role="leader")
"""What B leads all the time, over a link that is synchronous."""


class Scene(KilledProxies):
    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.synchronous = rng.random() < 0.4
        super().__init__(rng, "AB", sidecars=rng.random() < 0.5)
        self.seed = seed

    def leader(self) -> str | None:
        found = [
            name
            for name in self.names
            if (mapping := self.mapping(name, LINK)) is not None and mapping.role is Role.LEADER
        ]
        return found[0] if len(found) == 1 else None

    def watch(self, name: str) -> None:
        control = self.controls[name]
        apply = control.apply

        def applied(body: Any) -> Any:
            outcome = apply(body)
            for kind in (TOPIC, GROUP):
                assert not (self.writable("A", kind) and self.writable("B", kind)), f"two lead after {body}"
            if isinstance(body, HandOver | TakeBack | AbandonReversal):
                self.seen[f"{type(body).__name__} {type(outcome).__name__}"] += 1
            return outcome

        control.apply = applied  # type: ignore[method-assign]

    def other_is_equal(self) -> bool:
        """What goes the other way all the time."""
        here = self.clusters["A"].found.get("y-t")
        there = self.clusters["B"].partition("x-t").records()
        return here is not None and here.partitions[0].records() == there

    async def write_other(self) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0.1, 0.5))
            self.clusters["B"].partition("x-t").write_values(b"other")

    # ---- operators ----

    async def begin(self) -> None:
        topic = self.clusters["A"].add_topic("a-t", PARTITIONS)
        for partition in topic.partitions:
            partition.write_values(b"first")
        self.clusters["B"].add_topic("x-t").partitions[0].write_values(b"0")
        a, b = self.proxies["a"], self.proxies["b"]
        await a.links.create(links.CreateLink(link_name=LINK, remote=b.address))
        await self.until("connected", lambda: all(each.status().state == "Following" for each in (a, b)), 10)
        await a.links.attach(LINK, LEADS)
        await a.links.attach(LINK, GROUPS)
        await self.until("copied", self.are_equal, 60)
        if self.synchronous:
            await b.links.attach(LINK, OTHER)
            await self.until("copied", self.other_is_equal, 60)
            await self.until(
                "ready", lambda: all(each.status().state == "Following" for each in self.proxies.values()), 60
            )
            await self.random.choice((a, b)).links.set_mode(LINK, links.SetMode(mode="synchronous"))
        for name in self.names:
            self.watch(name)
        self.moving = MovingClients(self, self.seed, "A")
        self.kills = self.random.randint(0, 4)

    async def reverse(self, move_clients_s: int | None = None) -> bool:
        """Asked at either cluster."""
        if (leader := self.leader()) is None:
            return False
        name = self.random.choice(self.names)
        request = links.Reverse(
            namespaces=self.refs(name),
            here=name != leader,
            disable_transaction_verification=True,
            transactions_wait_seconds=0,
            hold_seconds=3,
            move_clients_seconds=self.random.choice(TIMES_S) if move_clients_s is None else move_clients_s,
        )
        done = await self.tried(lambda: self.side(name).links.reverse(LINK, request))
        self.seen["reversed"] += done
        return done

    async def abandon(self) -> None:
        name = self.random.choice(self.names)
        request = links.AbandonReversal()
        self.seen["abandoned"] += await self.tried(lambda: self.side(name).links.abandon_reversal(LINK, request))

    async def operate(self) -> None:
        for _ in range(self.random.randint(2, 4)):
            for name in self.names:
                self.controls[name].trouble = self.random.choice((0.0, 0.0, 0.1))
            if self.random.random() < 0.3:
                asyncio.get_running_loop().call_later(self.random.uniform(0, 0.6), self.cut)
            work = asyncio.get_running_loop().create_task(self.reverse())
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.uniform(0, 1))
                await self.abandon()
            await work
            await asyncio.sleep(self.random.choice((0.1, 1.0, 5.0)))

    def is_in_sync(self, name: str) -> bool:
        """All partitions, as the proxies of a cluster have it."""
        found = [each.state for proxy in self.proxies_of(name) for each in proxy.status().partitions]
        return not self.dying and found == ["In-Sync"] * (PARTITIONS + 1)

    def is_over(self) -> bool:
        """Nothing is under way, and one cluster leads what the other one follows."""
        if self.under_way():
            return False
        return [self.writable(name) for name in self.names].count(True) == 1 and self.leader() is not None

    async def clients_move(self, name: str) -> None:
        """All that do, away from a cluster; although a proxy there is killed, which does not begin the time again."""
        await self.moving.until("told", lambda: self.moving.told_at(name), 60)
        await asyncio.sleep(self.random.uniform(0, 5))
        self.die(self.random.choice([each for each in self.proxies if each[0] == name.lower()]))
        await self.moving.until("moved", lambda: self.moving.have_moved(name), MOVE_S)
        await self.moving.until("told again", lambda: not self.dying and self.moving.have_told(name), MOVE_S)
        await self.moving.until("over", lambda: not self.moving.known(), MOVE_S + 5)
        await asyncio.sleep(11)

    async def run(self) -> None:
        await self.begin()
        self.begin_clients()
        self.moving.begin()
        self.clients.append(asyncio.get_running_loop().create_task(self.write_other()))
        await self.operate()
        self.kills = 0
        for control in self.controls.values():
            control.trouble = 0.0
        await self.until("over", self.is_over, 120)
        while not await self.reverse(move_clients_s=MOVE_S):
            await asyncio.sleep(1)
            await self.until("over", self.is_over, 120)
        await self.end_clients()
        await self.until("equal", self.are_equal, 120)
        leader = self.leader()
        assert leader is not None
        assert self.committed_at(leader) == self.committed
        await self.until("groups", lambda: {self.committed_at(name) for name in self.names} == {self.committed}, 60)
        assert self.is_over()
        counted = Counter(value for log in self.values("A") for value in log)
        assert all(counted[value] == 1 for value in self.acked), "what was acked is there, once"
        assert sum(counted.values()) == len(self.acked) + PARTITIONS, "and nothing else"
        if self.synchronous:
            assert all(self.state(name).links[LINK].mode is LinkMode.SYNCHRONOUS for name in self.names)
            await self.until("in sync", lambda: all(map(self.is_in_sync, self.names)), 120)
            await self.until("equal the other way", self.other_is_equal)
        if self.seed % 3 == 0:  # it takes as long as all else
            await self.clients_move("A" if leader == "B" else "B")
        await self.moving.end()


@pytest.mark.parametrize("seed", seeds(16))
def test_one_leads_and_nothing_that_was_acked_is_lost(seed: int) -> None:
    async def run() -> None:
        scene = Scene(seed)
        await scene.start()
        try:
            async with asyncio.timeout(3000):
                await scene.run()
        finally:
            print("seen", dict(scene.seen), "acked", len(scene.acked), "committed", scene.committed)
            if not scene.is_over():
                print({name: (scene.state(name).reversals, scene.state(name).promotions) for name in "AB"})
            for task in scene.moving.tasks:
                task.cancel()
            await scene.stop()

    run_on_loopback(run())
