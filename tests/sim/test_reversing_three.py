"""Three clusters with a link between each two: reversals, failovers and recoveries, with proxies killed and links cut.

One leads, the others follow it, or each other. Never two lead by a reversal; after a failover the old leader may go on
until it follows, and what it wrote, or had alone, is in salvage files. All else that was acked is in all three logs in
the end, once, in one order; the group goes on where it was. Clients are told to move where another cluster leads.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support.killed_proxies import GROUP, PARTITIONS, TOPIC, KilledProxies
from support.loopback import run_on_loopback
from support.moving_clients import TIMES_S, MovingClients
from support.plugins import raise_if_to_end
from support.seeds import seeds
from support.truncating import TruncatedCluster, salvaged, simulate_truncations

from isthmus_control.commands import AbandonReversal, HandOver, TakeBack
from isthmus_control.model import ResourceType, Role, TopicState
from isthmus_plugins import links
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.links import OperationError

MOVE_S = 35


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_truncations(monkeypatch)


def link_of(one: str, other: str) -> str:
    return "-to-".join(sorted((one.lower(), other.lower())))


def other_end(name: str, link: str) -> str:
    """The other cluster of a link."""
    return link.replace(name.lower(), "").replace("-to-", "").upper()


class Scene(KilledProxies):
    def __init__(self, seed: int, directory: Path) -> None:
        super().__init__(random.Random(seed), "ABC", cluster=TruncatedCluster)
        self.seed = seed
        self.left = ""
        """Who handed over last."""
        self.directory = directory
        for proxy in self.proxies.values():
            proxy.context.data_directory = directory
        self.failed: set[str] = set()
        """Who led when another cluster was failed over, until it follows."""
        self.doubtful: set[bytes] = set()
        """What was acked, and was not at the other cluster when that was failed over."""
        self.late = 0
        """So many records clients still write to who led, before they hear of it."""
        self.rewound = False
        """The group is where that cluster had it, when it comes to that."""

    def leaders(self) -> list[str]:
        """By what operators have said."""
        return [name for name in self.names if name not in self.failed and self.follows_over(name) is None]

    def source(self, name: str) -> str | None:
        """Whom a cluster follows."""
        link = self.follows_over(name)
        return None if link is None else other_end(name, link)

    def watch(self, name: str) -> None:
        control = self.controls[name]
        apply = control.apply

        def applied(body: Any) -> Any:
            led = self.writable(name)
            outcome = apply(body)
            if not (self.writable(name) or self.writable(name, GROUP)):
                self.failed.discard(name)
            elif not led and self.writable(name) and self.failed:
                self.rewound = True
                here = {value for log in self.values(name) for value in log}
                self.doubtful |= {value for value in self.acked if value not in here}
            for kind in (TOPIC, GROUP):
                lead = [each for each in self.names if self.writable(each, kind) and each not in self.failed]
                assert len(lead) <= 1, f"{lead} lead after {body}"
            if isinstance(body, HandOver | TakeBack | AbandonReversal):
                self.seen[f"{type(body).__name__} {type(outcome).__name__}"] += 1
            return outcome

        control.apply = applied  # type: ignore[method-assign]

    def commits(self, name: str) -> bool:
        if name in self.failed or not super().commits(name):
            return False
        if self.rewound:
            self.committed, self.rewound = self.committed_at(name), False
        return True

    def writes(self, name: str) -> bool:
        if name in self.failed and self.late and super().writes(name):
            self.late -= 1
            topic = self.clusters[name].found[self.prefix(name) + "t"]
            value = b"late %d" % len(self.doubtful)
            self.random.choice(topic.partitions).write_values(value)
            self.acked.append(value)
            self.doubtful.add(value)
        return name not in self.failed and super().writes(name)

    # ---- operators ----

    async def begin(self) -> None:
        topic = self.clusters["A"].add_topic("a-t", PARTITIONS)
        for partition in topic.partitions:
            partition.write_values(b"first")
        for one, other in combinations(self.names, 2):
            request = links.CreateLink(link_name=link_of(one, other), remote=self.side(other).address)
            await self.side(one).links.create(request)
        await self.until("connected", self.are_connected, 10)
        await self.follow("B", "A")
        await self.follow("C", self.random.choice("AB"))
        await self.until("copied", self.are_equal, 60)
        for name in self.names:
            self.watch(name)
        self.moving = MovingClients(self, self.seed, "A")
        self.kills = self.random.randint(0, 5)

    def are_connected(self) -> bool:
        return all(
            self.side(name).plugin.parts.peers.connections(link)
            for name in self.names
            for link in self.state(name).links
        )

    def attached(self, follower: str, leader: str, kind: ResourceType) -> bool:
        link = link_of(follower, leader)
        found = [self.mapping(name, link, kind) for name in (follower, leader)]
        if [each and each.role for each in found] != [Role.FOLLOWER, Role.LEADER]:
            return False
        name, state = self.prefix(follower) + "t", self.state(follower)
        topic = state.follower_topics.get(name)
        follows = topic is not None and topic.state is TopicState.FOLLOWING and name not in state.truncations
        return kind is GROUP or follows

    async def follow(self, follower: str, leader: str) -> None:
        """Attach, at either side, until it follows; what has to be cut is agreed to, again where it has become more."""
        link = link_of(follower, leader)
        for kind in (TOPIC, GROUP):
            while not self.attached(follower, leader, kind):
                here, there, role = self.random.choice(((follower, leader, "follower"), (leader, follower, "leader")))
                asked = links.Attach(
                    type=kind.value,
                    local=self.prefix(here, kind),
                    remote=self.prefix(there, kind),
                    role=role,
                    disable_transaction_verification=True,
                )
                await self.tried(partial(self.attach, here, link, asked))
                await asyncio.sleep(self.random.choice((0.5, 3.0)))

    async def attach(self, name: str, link: str, asked: links.Attach) -> None:
        dry = await self.side(name).links.attach(link, asked.model_copy(update={"dry_run": True}))
        await self.side(name).links.attach(link, asked.model_copy(update={"cut": dry.cut}))

    async def reverse(self, move_clients_s: int | None = None) -> bool:
        """Have one that follows the leader lead; asked at either of them."""
        if len(leads := self.leaders()) != 1:
            return False
        (leader,) = leads
        followers = [name for name in self.names if self.source(name) == leader]
        if not followers:
            return False
        follower = self.random.choice(followers)
        link, name = link_of(leader, follower), self.random.choice((leader, follower))
        request = links.Reverse(
            namespaces=self.refs(name),
            here=name == follower,
            disable_transaction_verification=True,
            transactions_wait_seconds=0,
            hold_seconds=3,
            move_clients_seconds=self.random.choice(TIMES_S) if move_clients_s is None else move_clients_s,
        )
        done = await self.tried(lambda: self.side(name).links.reverse(link, request))
        self.left = leader if done else self.left
        self.seen["reversed"] += done
        return done

    async def abandon(self) -> None:
        name = self.random.choice(self.names)
        link = self.random.choice(sorted(self.state(name).links))
        request = links.AbandonReversal()
        self.seen["abandoned"] += await self.tried(lambda: self.side(name).links.abandon_reversal(link, request))

    async def fail_over(self) -> None:
        """The leader is gone for a while; one that follows it leads, and it follows that when it is back."""
        (leader,) = self.leaders()
        follower = self.random.choice([name for name in self.names if self.source(name) == leader])
        link, gone = link_of(leader, follower), leader.lower()
        self.dying[gone] = asyncio.get_running_loop().create_task(self.killed(gone))
        await self.dying[gone]
        self.failed.add(leader)
        self.late = self.random.choice((0, 1, 10, 50))
        await self.until("lost", lambda: not self.side(follower).plugin.parts.peers.connections(link))
        asked = Failover(move_clients_seconds=self.random.choice(TIMES_S))
        while not self.writable(follower) or not self.writable(follower, GROUP):
            if self.state(follower).truncations:  # it is no copy: the leader is waited for instead
                await self.started(gone)
                del self.dying[gone]
                self.failed.discard(leader)
                return
            await self.tried(lambda: self.side(follower).links.fail_over(link, asked, lambda done, total: None))
            await asyncio.sleep(0.1)
        self.seen["failed over"] += 1
        await self.started(gone)
        del self.dying[gone]
        await self.recover(link)

    async def recover(self, link: str) -> None:
        """Give the command, at either side, until there is nothing more to do."""
        one, other = (part.upper() for part in link.split("-to-"))
        while True:
            side = self.side(self.random.choice((one, other)))
            try:
                await side.links.recover(link, links.Recover(disable_transaction_verification=True))
            except OperationError as error:
                self.seen[f"recover {error.code}"] += 1
                if error.code == "NOT_FOUND" and "recover" in error.message:
                    break
            except (AttributeError, RuntimeError, asyncio.CancelledError) as error:
                raise_if_to_end(error)
                self.seen["recover killed"] += 1
            await asyncio.sleep(self.random.choice((0.1, 1.0, 6.0)))
        follower = one if self.source(one) == other else other
        await self.follow(follower, one if follower == other else other)  # what came late is to be agreed to, too

    async def detach(self, name: str, link: str, kind: ResourceType) -> None:
        await self.side(name).links.detach(link, self.prefix(name, kind), kind.value)

    async def move(self) -> None:
        """One that follows comes to follow another one."""
        name = self.random.choice([each for each in self.names if self.source(each) is not None])
        source = self.source(name)
        assert source is not None
        to = next(each for each in self.names if each not in (name, source))
        if self.source(to) == name:
            return
        link = link_of(name, source)
        for kind in (TOPIC, GROUP):
            while any(self.mapping(each, link, kind) is not None for each in (name, source)):
                await self.tried(partial(self.detach, name, link, kind))
                await asyncio.sleep(0.1)
        await self.follow(name, to)
        self.seen["moved"] += 1

    async def operate(self) -> None:
        for _ in range(self.random.randint(3, 6)):
            for name in self.names:
                self.controls[name].trouble = self.random.choice((0.0, 0.0, 0.1))
            if self.random.random() < 0.3:
                asyncio.get_running_loop().call_later(self.random.uniform(0, 0.6), self.cut)
            chance = self.random.random()
            if chance < 0.6:
                work = asyncio.get_running_loop().create_task(self.reverse())
                if self.random.random() < 0.3:
                    await asyncio.sleep(self.random.uniform(0, 1))
                    await self.abandon()
                await work
            else:
                await self.until("settled", self.is_over)
                await (self.fail_over() if chance < 0.8 else self.move())
            await asyncio.sleep(self.random.choice((0.1, 1.0, 5.0)))

    def described(self, name: str) -> list[object]:
        """What is shown of a cluster where it all comes to no end."""
        state = self.state(name)
        under_way = [*state.reversals.values(), *state.promotions.values(), *state.truncations.values()]
        statuses = [self.side(name).status(link) for link in state.links]
        shown = [(each.link_name, str(part.state), part.message) for each in statuses for part in each.partitions]
        return [self.source(name), [len(log) for log in self.values(name)], self.committed_at(name), under_way, shown]

    def is_over(self) -> bool:
        """Nothing is under way, and one cluster leads what the others follow."""
        if self.under_way() or self.failed or len(self.leaders()) != 1:
            return False
        return [self.writable(name) for name in self.names].count(True) == 1

    async def run(self) -> None:
        await self.begin()
        self.begin_clients()
        self.moving.begin()
        await self.operate()
        self.kills = 0
        for control in self.controls.values():
            control.trouble = 0.0
        await self.until("over", self.is_over)
        while not await self.reverse(move_clients_s=MOVE_S):
            await asyncio.sleep(1)
            await self.until("over", self.is_over)
        await self.end_clients()
        await self.until("equal", self.are_equal)
        (leader,) = self.leaders()
        assert self.rewound or self.committed_at(leader) == self.committed
        at = self.committed_at(leader)
        await self.until("groups", lambda: {self.committed_at(name) for name in self.names} == {at}, 60)
        assert self.is_over()
        counted = Counter(value for log in self.values("A") for value in log)
        gone = {value for value in self.acked if counted[value] != 1}
        assert max(counted[value] for value in self.acked) <= 1, "nothing is there twice"
        assert gone <= self.doubtful, "what was acked is there, but for what a failover lost"
        assert gone <= {*salvaged(self.directory)}, "that is in files"
        assert sum(counted.values()) == len(self.acked) - len(gone) + PARTITIONS, "and nothing else"
        if self.seed % 3 == 0:  # it takes as long as all else
            await self.moving.until("moved", lambda: self.moving.have_moved(self.left), MOVE_S)
            await self.moving.until("over", lambda: not self.moving.known(), max(TIMES_S) + 5)
            await asyncio.sleep(11)
        await self.moving.end()


@pytest.mark.parametrize("seed", seeds(10))
def test_one_leads_and_all_hold_the_same_in_the_end(seed: int, tmp_path: Path) -> None:
    async def run() -> None:
        scene = Scene(seed, tmp_path)
        await scene.start()
        try:
            async with asyncio.timeout(600):
                await scene.run()
        finally:
            print("seen", dict(scene.seen), "acked", len(scene.acked), "committed", scene.committed)
            for name in scene.names:
                print(name, scene.described(name))
            for task in scene.moving.tasks:
                task.cancel()
            await scene.stop()

    run_on_loopback(run())
