"""A seeded simulation of one cluster's control log.

Several proxies propose, retry, read, renew, stop for a while, crash and start again from snapshots, on clocks that run
at different speeds, over a network that loses answers and delivers appends late and twice. After every step:

- proxies at the same offset have the same state, and nobody halts;
- a command counts once, and its proposer is told what came of it; once records are signed (odd seeds), only what is;
- nobody takes the log for another one than any writer had applied;
- one proxy for a broker; a namespace follows one link, is reserved while it does, and nothing goes round in a circle;
- when anybody says that a reservation is made, no process that may still let writes through has yet to apply it.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from support.seeds import quarters

from isthmus_control import anchors
from isthmus_control import apply as rules
from isthmus_control import commands as c
from isthmus_control import replica as replicas
from isthmus_control.anchors import LogRecord, RecentRecords
from isthmus_control.control_state import ControlState
from isthmus_control.grants import covers, of_pair
from isthmus_control.leases import LeaseView, ReservationState
from isthmus_control.levels import CONSENT, KNOWN_LEVEL, with_known_level
from isthmus_control.model import (
    AttachRequest,
    BrokerClaim,
    Grant,
    ResourceType,
    Right,
    Role,
    TopicState,
    overlap,
)
from isthmus_control.outcome import Accepted, Duplicate, Outcome, Rejected, Rejection
from isthmus_control.prefixes import prefix_of, why_forked
from isthmus_control.replica import Replica
from isthmus_control.sealing import Secret
from isthmus_control.signing import Signer

CLUSTER = "A"
PROXIES = 3
STEPS = 500
LEASE_MS = 10_000
CLOCK_SKEW = 0.03
RIGHTS = (Right.FOLLOW, Right.LEAD, Right.REPLACE)
PREFIXES = ("", "a-", "a-b-", "c-", "_d")
LINKS = {"l1": "B", "l2": "B", "l3": "C"}
TOPIC = ResourceType.TOPIC
SIGNER = Signer(Secret(b"k" * 32), CLUSTER)


@dataclass
class Flight:
    """An append on its way to the log."""

    value: bytes
    lands_at: float


def newest_snapshot(records: list[tuple[int, bytes]], signer: Signer | None) -> c.Snapshot | None:
    found = (replicas.snapshot_in(offset, value, signer) for offset, value in reversed(records))
    return next((each for each in found if each is not None), None)


class Proxy:
    """A process: a replica, a view of leases, commands without an answer. ``paused``: it exists, and does nothing."""

    def __init__(self, world: World, name: str, broker: int) -> None:
        self.world = world
        self.name = name
        self.broker = broker
        self.incarnation = world.uid()
        self.rate = 1 + world.random.uniform(-CLOCK_SKEW, CLOCK_SKEW)
        self.view = LeaseView(self.incarnation)
        self.recent = RecentRecords()
        self.replica = self.load()
        self.waiting: dict[str, c.Command] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.paused = False

    def load(self) -> Replica:
        records = list(enumerate(self.world.log))
        signer = self.world.signer if any(replicas.is_signed(value, SIGNER) for value in self.world.log) else None
        snapshot = newest_snapshot(records[-self.world.random.randint(1, 200) :], signer)
        snapshot = snapshot or newest_snapshot(records, signer)
        state = replicas.load(snapshot, CLUSTER, self.world.signer) if snapshot else ControlState(CLUSTER)
        for offset in range(anchors.window_start(max(state.applied_offset, 0)), state.applied_offset + 1):
            self.recent.add(LogRecord(offset, self.world.log[offset]))
        return Replica(state, self.world.signer)

    @property
    def now(self) -> float:
        return self.world.now * self.rate

    def propose(self, body: c.Body) -> None:
        state = self.replica.state
        prefix = prefix_of(state, self.recent)
        command = c.Command(self.world.uid(), int(self.world.now * 1000), self.name, state.applied_offset, body, prefix)
        self.waiting[command.id] = command
        if isinstance(body, c.RenewLease | c.ClaimBrokers):
            self.view.sending(command.id, self.now)
        self.world.proposed[command.id] = command
        self.send(command)

    def send(self, command: c.Command) -> None:
        chance = self.world.random.random()
        for _ in range(0 if chance < 0.2 else 2 if chance > 0.9 else 1):
            delay = self.world.random.expovariate(2)
            if self.world.random.random() < 0.02:
                delay += 30  # a request that lay in a socket for long
            state = self.replica.state
            value = c.encode(command, state.level, SIGNER if state.key_id else None)
            self.world.flights.append(Flight(value, self.world.now + delay))

    def retry(self) -> None:
        for command in self.waiting.values():
            self.send(command)

    def read(self, limit: int) -> None:
        for _ in range(limit):
            offset = self.replica.next_offset
            if offset >= len(self.world.log):
                return
            applied = self.replica.feed(offset, self.world.log[offset], self.fork)
            self.recent.add(LogRecord(offset, self.world.log[offset]))
            self.world.applied(self, offset, applied.outcome)
            self.view.applied(self.replica.state, self.now)
            if applied.command is not None and self.waiting.pop(applied.command.id, None) is not None:
                self.outcomes[applied.command.id] = applied.outcome
                self.view.resolved(applied.command.id, isinstance(applied.outcome, Accepted))

    def fork(self, command: c.Command) -> replicas.Halted | None:
        state = self.replica.state
        return why_forked(command, state.applied_offset + 1, state.generation, self.recent)

    def tend(self) -> None:
        """What a proxy does by itself: claim, renew, expire others, take snapshots."""
        if self.replica.next_offset < len(self.world.log):
            return
        enforced = self.replica.state.applied_offset
        if self.view.superseded:
            return
        if self.view.own is None:
            if not any(isinstance(command.body, c.ClaimBrokers) for command in self.waiting.values()):
                claims = (BrokerClaim(self.broker, "h", 9000 + self.broker),)
                self.propose(
                    c.ClaimBrokers(
                        self.name, self.incarnation, claims, False, None, LEASE_MS, self.world.version, enforced
                    )
                )
        else:
            self.propose(c.RenewLease(self.name, self.incarnation, enforced))
        for expire in self.view.expirable(self.now):
            self.propose(expire)
        due = self.replica.due_state
        if due is not None:
            self.propose(replicas.take(due))


@dataclass
class World:
    random: random.Random
    now: float = 0.0
    log: list[bytes] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)
    proposed: dict[str, c.Command] = field(default_factory=dict)
    signer: Signer | None = None
    reference: Replica = field(init=False)
    states: list[ControlState] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    counted: dict[str, Outcome] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.reference = Replica(ControlState(CLUSTER), self.signer)

    @property
    def key_id(self) -> str:
        return self.signer.key_id if self.signer is not None else ""

    @property
    def version(self) -> str:
        return with_known_level("1", self.key_id)

    def uid(self) -> str:
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    # --- the log

    def land(self) -> None:
        due = [flight for flight in self.flights if flight.lands_at <= self.now]
        self.random.shuffle(due)
        for flight in due:
            self.flights.remove(flight)
            self.log.append(flight.value)
            applied = self.reference.feed(len(self.log) - 1, flight.value)
            self.states.append(self.reference.state)
            self.outcomes.append(applied.outcome)
            command = applied.command
            if command is None:
                assert self.reference.state.key_id, "only what is not signed does not count at all"
            elif command.body.REMEMBERED:
                decided = self.counted.get(command.id)
                repeated = isinstance(applied.outcome, Duplicate) or (
                    isinstance(applied.outcome, Rejected) and applied.outcome.code is Rejection.STALE
                )
                if decided is None:
                    self.counted[command.id] = applied.outcome
                    assert not isinstance(applied.outcome, Duplicate)
                else:
                    assert repeated, f"{command} counted twice"
            self.seen.add(
                applied.outcome.code.value if isinstance(applied.outcome, Rejected) else type(applied.outcome).__name__
            )
            self.check_rules(self.reference.state)

    def applied(self, proxy: Proxy, offset: int, outcome: Outcome) -> None:
        assert proxy.replica.state == self.states[offset]
        assert outcome == self.outcomes[offset]

    # --- invariants

    def check_rules(self, state: ControlState) -> None:
        fronted = [claim.broker_id for lease in state.proxies.values() for claim in lease.brokers]
        assert len(fronted) == len(set(fronted))
        mappings = [(link, mapping) for link in state.links.values() for mapping in link.mappings]
        for link, mapping in mappings:
            namespace = state.namespaces[mapping.local]
            assert namespace.reserved or mapping.role is Role.LEADER
            for other_link, other in mappings:
                if mapping is other or not overlap(mapping.local_prefix, other.local_prefix):
                    continue
                assert mapping.role is Role.LEADER or other.role is Role.LEADER
                if link.remote_cluster_id == other_link.remote_cluster_id and mapping.role is not other.role:
                    assert not overlap(mapping.remote_prefix, other.remote_prefix)
        if state.level >= CONSENT:
            for link, mapping in mappings:
                wanted = of_pair(mapping)
                assert any(covers(grant, wanted) for grant in link.grants), "what is attached may go on"
        for name, topic in state.follower_topics.items():
            counterpart = state.lookup.following(TOPIC, name)
            follows = counterpart is not None and counterpart.link.name == topic.link
            assert follows or topic.state is TopicState.DETACHED
        for history in state.histories.values():
            for ranges in history.partitions.values():
                for before, after in pairwise(ranges):
                    assert before.end_offset == after.start_offset

    def check_fences(self) -> None:
        """A reservation that anybody calls made is applied by everybody who may still let writes through."""
        for observer in self.proxies:
            if observer.paused or observer.replica.state.applied_offset < 0:
                continue
            for namespace in observer.replica.state.namespaces.values():
                if observer.view.reservation_state(namespace, observer.now) is not ReservationState.RESERVED:
                    continue
                for proxy in self.proxies:
                    if proxy.view.vouching(proxy.now):
                        assert namespace.reserved_at_offset is not None
                        assert proxy.replica.state.applied_offset >= namespace.reserved_at_offset, (
                            f"{observer.name} calls {namespace.key} reserved, {proxy.name} lets writes through"
                        )

    # --- what operators and links do

    def body(self) -> c.Body:
        pick = self.random
        prefix, link = pick.choice(PREFIXES), pick.choice(list(LINKS))
        role = pick.choice(list(Role))
        topic = pick.choice(("a-1", "a-b-1", "c-1", "_d1"))
        known = self.reference.state.follower_topics.get(topic)
        topic_id = known.topic_id if known and known.topic_id else self.uid()
        at = (c.PartitionOffset(topic, topic_id, pick.randint(0, 1), pick.randint(0, 20)),)
        return pick.choice(
            [
                lambda: c.CreateNamespace(TOPIC, prefix, pick.random() < 0.3),
                lambda: c.AlterNamespace(TOPIC, prefix, pick.random() < 0.6),
                lambda: c.DeleteNamespace(TOPIC, prefix),
                lambda: c.CreateLink(link, self.uid(), LINKS[link], True, ("h:1",)),
                lambda: c.AlterLink(link, remote_addresses=(f"h:{pick.randint(1, 9)}",)),
                lambda: c.DeleteLink(link),
                lambda: c.AttachNamespace(
                    link, TOPIC, prefix, pick.choice(PREFIXES), role, create_missing=pick.random() < 0.5
                ),
                lambda: c.AttachNamespace(link, TOPIC, prefix, prefix, Role.FOLLOWER, create_missing=True),
                lambda: c.AttachNamespace(link, TOPIC, prefix, prefix, role, create_missing=True, for_peer=True),
                lambda: c.DetachNamespace(link, TOPIC, prefix),
                lambda: c.DetachNamespace(link, TOPIC, prefix, for_peer=True),
                lambda: c.ChangeGrants(link, given=(Grant(pick.choice(RIGHTS), TOPIC, prefix),)),
                lambda: c.ChangeGrants(link, taken=(Grant(pick.choice(RIGHTS), TOPIC, prefix),)),
                lambda: c.RequestAttach(link, AttachRequest(TOPIC, prefix, prefix, role, pick.random() < 0.5)),
                lambda: c.WithdrawAttach(link, TOPIC, prefix, pick.random() < 0.5),
                lambda: c.SetFollowerTopic(link, topic, topic, str(uuid.UUID(int=9)), TopicState.CREATING),
                lambda: c.SetFollowerTopic(link, topic, topic, str(uuid.UUID(int=9)), TopicState.FOLLOWING, topic_id),
                lambda: c.OpenProvenance(link, at),
                lambda: c.CloseProvenance(at),
                lambda: c.TruncateProvenance(at),
                lambda: c.RecordSourceEpochs(
                    (c.PartitionEpoch(topic, topic_id, at[0].partition, pick.randint(0, 9), at[0].offset),)
                ),
                lambda: c.RegisterProducerIds(pick.choice("BCDE")),
                lambda: c.RaiseLevel(KNOWN_LEVEL, self.key_id),
            ]
        )()

    # --- events

    def step(self) -> None:
        self.now += self.random.expovariate(3)
        self.land()
        proxy = self.random.choice(self.proxies)
        event = self.random.random()
        if proxy.paused:
            if event < 0.05:
                proxy.paused = False
        elif event < 0.40:
            proxy.read(self.random.randint(1, 30))
        elif event < 0.60:
            proxy.propose(self.body())
        elif event < 0.70:
            proxy.retry()
        elif event < 0.94:
            proxy.read(10_000)
            proxy.tend()
        elif event < 0.96:
            proxy.paused = True
        elif event < 0.98:
            self.crash(proxy)
        else:
            # The same name in a second process, while the first lives on: a wrong configuration, or a slow stop.
            second = Proxy(self, proxy.name, proxy.broker)
            self.proxies.append(second)
            if self.random.random() < 0.7:  # the first hangs at the worst moment
                proxy.paused = True
                second.read(10_000)
                second.tend()
            if len(self.proxies) > PROXIES + 2:
                self.proxies.remove(self.random.choice(self.proxies))
        self.check_fences()

    def crash(self, proxy: Proxy) -> None:
        """Killed; what it had sent may still land. It starts again at once, or stays away."""
        self.proxies.remove(proxy)
        if self.random.random() < 0.8 or len(self.proxies) < PROXIES:
            self.proxies.append(Proxy(self, proxy.name, proxy.broker))

    def settle(self) -> None:
        """The network is well again: everybody is told what came of what it proposed, and all agree."""
        for _ in range(200):
            self.now += 1
            self.land()
            for proxy in self.proxies:
                proxy.paused = False
                proxy.read(10_000)
                proxy.retry()
                self.check_fences()
            if not self.flights and not any(proxy.waiting for proxy in self.proxies):
                break
        assert not any(proxy.waiting for proxy in self.proxies)
        for proxy in self.proxies:
            proxy.read(10_000)
            assert proxy.replica.state == self.reference.state
            for command_id, outcome in proxy.outcomes.items():
                if self.proposed[command_id].body.REMEMBERED:
                    assert self.counted[command_id] == outcome


def run(seed: int) -> World:
    world = World(random.Random(seed), signer=SIGNER if seed % 2 else None)
    world.proxies = [Proxy(world, f"p{number}", number) for number in range(PROXIES)]
    for _ in range(STEPS):
        world.step()
    world.settle()
    return world


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that snapshots, forgetting and late retries all happen in a short run."""
    monkeypatch.setattr(rules, "SNAPSHOT_INTERVAL", 32)
    monkeypatch.setattr(replicas, "SNAPSHOT_INTERVAL", 32)
    monkeypatch.setattr(rules, "REMEMBERED_COMMANDS", 24)
    monkeypatch.setattr(anchors, "WINDOW", 32)


@pytest.mark.parametrize("seed", quarters(range(40)))
def test_all_proxies_agree(seed: int) -> None:
    world = run(seed)
    assert world.reference.state.snapshot_offset > 0


def test_the_simulation_reaches_what_it_is_about() -> None:
    seen: set[str] = set()
    for seed in range(100, 106):
        seen |= run(seed).seen
    assert seen >= {
        "Accepted",
        "Duplicate",
        "stale",
        "conflict",
        "not-found",
        "already-exists",
        "lease-lost",
        "unsigned",
    }


def test_a_run_can_be_repeated() -> None:
    assert run(7).log == run(7).log
