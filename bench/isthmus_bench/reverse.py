"""How long nobody can write while another cluster takes over: a reversal, a promotion, a failover.

For each round trip two clusters of a broker each, a proxy beside each broker, and links between these, over a WAN
(:mod:`isthmus_bench.wan`) unless the round trip is 0. Producers are connected to both clusters
(:mod:`isthmus_bench.moving_load`) and write 2,000 records/s to the one that leads.

- *Reversed*, there and back: by an asynchronous link, by a synchronous one, with transactions that end by themselves,
  and with one that nobody ends. The *pause* is the time from the first write that was held at the one cluster to the
  first that the other has acked. Transactions begin no more from *announced* on.
- *Reversed, and a client moves*: a Java producer beside them is told to (:mod:`isthmus_bench.told_producer`). What it
  takes itself is the time from the first write that the other cluster has acked to its own first one there.
- *Promoted*: nobody writes, the other cluster has all, and is told to lead.
- *Failed over*: the first cluster's proxy is killed, and the other is told to lead at once. It waits until what was
  leased has run out, counted from when the first was heard last.

The last two are from the command to the first acked write. Commands are requests to the proxies' REST API: what a
process takes to start is not in the figures. What a client takes to move is in no other figure than its own.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from isthmus_bench.children import Child, ChildFailed
from isthmus_bench.command import machine
from isthmus_bench.compilers import COMPILING_MAX, Compilers
from isthmus_bench.kafka import DEFAULT_VERSION
from isthmus_bench.moving_load import Moving
from isthmus_bench.moving_name import MovingName
from isthmus_bench.reverse_environment import ONCE, Environment, prefix_of
from isthmus_bench.sync_figures import Verdict
from isthmus_bench.sync_plan import ASYNCHRONOUS, SYNCHRONOUS
from isthmus_bench.told_producer import ToldProducer, knows_that_it_is_told
from isthmus_bench.wan import Wan
from isthmus_plugins.replication.operations.failover import CLAIMS_RECORDED_S

Say = Callable[[str], None]

PAUSE_MAX_S: Final = 1.0
ROUND_TRIPS_MAX: Final = 4
"""That a pause may take beside :data:`PAUSE_MAX_S`."""
TRANSACTIONS_WAIT_S: Final = 1.0
"""For so long open transactions may end by themselves, by default."""
MANY_MAX_S: Final = 5.0
"""For a failover of many partitions."""
PATIENT_S: Final = 0.02
"""What a producer takes for a request, beside the round trips that its ack waits for."""
MOVE_CLIENTS_S: Final = 60.0
"""For so long clients are told to move."""

PROMOTE: Final = "promote"
FAILOVER: Final = "failover"
FAILOVER_MANY: Final = "failover, many partitions"


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to reverse."""

    name: str
    link: str = ASYNCHRONOUS
    transactional: bool = False
    left_open: bool = False
    told: bool = False
    """Whether a client is told to move."""


TOLD: Final = "reverse, a client moves"
KINDS: Final = (
    Kind("reverse"),
    Kind("reverse, synchronous", link=SYNCHRONOUS),
    Kind("reverse, transactions", transactional=True),
    Kind("reverse, one left open", transactional=True, left_open=True),
    Kind(TOLD, told=True),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    version: str = DEFAULT_VERSION
    rtts_ms: tuple[float, ...] = (0.0, 20.0)
    rounds: int = 2
    """There and back, of each kind; and so many promotions and failovers."""
    records_per_s: int = 2_000
    batches_per_s: int = 500
    partitions: int = 4
    """Of each topic. One is written to."""
    many: int = 1_000
    """Partitions that are failed over at once in the end; 0: none are."""
    before_s: float = 1.0
    after_s: float = 0.5
    warm_again_max: int = 1
    """So often all is done again before anything is measured, where brokers still compile much."""

    @classmethod
    def quick(cls, version: str) -> Plan:
        """To see that it works; the figures mean nothing."""
        return cls(version, (0.0,), rounds=1, many=0, before_s=0.3, after_s=0.2, warm_again_max=0)

    def producers(self, rtt_ms: float) -> int:
        """So many that each can wait for its acks, also over a synchronous link."""
        return max(10, round(self.batches_per_s * (rtt_ms / 1000 + PATIENT_S)))

    def kinds(self) -> list[Kind]:
        """Those that clients of this version know."""
        return [each for each in KINDS if not each.told or knows_that_it_is_told(self.version)]


@dataclass(frozen=True, slots=True)
class Move:
    """One time that another cluster took over. Times in seconds; None: there was no such thing."""

    pause_s: float
    """From the first write that was held, or from the command, to the first acked one."""
    command_s: float
    """From the command until it was done."""
    until_held_s: float | None = None
    """From the command to the first write that was held."""
    announced_s: float | None = None
    """From the first transaction that did not begin to the first acked write of one."""
    waits_s: float = 0.0
    """What is waited for by design."""
    records_per_s: float | None = None
    """That were acked before."""
    after_per_s: float | None = None
    """And after, from the first one on."""
    client_s: float | None = None
    """From the first acked write to that of a client that was told to move."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What one kind of taking over took."""

    rtt_ms: float
    kind: str
    partitions: int
    moves: list[Move]

    def worst(self, of: Callable[[Move], float | None]) -> float | None:
        return max((each for each in map(of, self.moves) if each is not None), default=None)

    def median(self, of: Callable[[Move], float | None]) -> float | None:
        found = [each for each in map(of, self.moves) if each is not None]
        return statistics.median(found) if found else None


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    machine: dict[str, str]
    version: str
    records_per_s: int
    figures: list[Figure]
    verdicts: list[Verdict] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return asdict(self)


def verdicts_of(figures: Sequence[Figure]) -> Iterator[Verdict]:
    """The slowest of each counts. What a client takes itself is not judged, nor what it takes from the others."""
    for each in figures:
        if each.kind == TOLD:
            continue
        at = f", RTT {each.rtt_ms:g} ms"
        round_trips_s = ROUND_TRIPS_MAX * each.rtt_ms / 1000
        if each.kind in (FAILOVER, FAILOVER_MANY):
            limit = MANY_MAX_S if each.kind == FAILOVER_MANY else PAUSE_MAX_S
            what = f"{each.kind}{at}: to the first ack, beyond what it waits for, s"
            yield _verdict(what, limit, each.worst(lambda move: move.pause_s - move.waits_s))
            continue
        if each.kind == PROMOTE:
            what = f"{each.kind}{at}: to the first ack, s"
            yield _verdict(what, PAUSE_MAX_S + round_trips_s, each.worst(lambda move: move.pause_s))
            continue
        yield _verdict(f"{each.kind}{at}: pause, s", PAUSE_MAX_S + round_trips_s, each.worst(lambda move: move.pause_s))
        announced_s = each.worst(lambda move: move.announced_s)
        if announced_s is not None:
            limit = PAUSE_MAX_S + TRANSACTIONS_WAIT_S + round_trips_s
            yield _verdict(f"{each.kind}{at}: since announced, s", limit, announced_s)


def _verdict(target: str, limit: float, measured: float | None) -> Verdict:
    return Verdict(target, limit, measured, None if measured is None else measured <= limit)


def run(plan: Plan, say: Say) -> Report:
    """Measure. Progress goes to ``say``. Raises ChildFailed, EmbeddedKafkaError, HTTPError, LoadError, ProxyFailed."""
    figures: list[Figure] = []
    for rtt_ms in plan.rtts_ms:
        with ExitStack() as stack:
            say(f"RTT {rtt_ms:g} ms: starting two clusters")
            figures += _Measured(plan, rtt_ms, stack, say).figures()
    load = " ".join(f"{each:.2f}" for each in os.getloadavg())
    return Report(
        {**machine(), "load average at the end": load},
        plan.version,
        plan.records_per_s,
        figures,
        list(verdicts_of(figures)),
    )


class _Measured:
    """Everything at one round trip. ``stack`` ends what it starts."""

    def __init__(self, plan: Plan, rtt_ms: float, stack: ExitStack, say: Say) -> None:
        self._plan = plan
        self._rtt_ms = rtt_ms
        self._say = say
        wan = stack.enter_context(Wan(rtt_ms)) if rtt_ms else None
        self._generator = stack.enter_context(Child("isthmus_bench.sync_load"))
        self._load = stack.enter_context(Child("isthmus_bench.moving_load"))
        self._once = {f"{kind}-{n}-": plan.partitions for kind in (PROMOTE, FAILOVER) for n in range(plan.rounds)}
        many = {"many-": plan.many} if plan.many else {}
        self._environment = Environment(plan.version, wan, plan.partitions, self._once | many, self._generator, stack)

    def figures(self) -> Iterator[Figure]:
        """One after the other. Raises ChildFailed, HTTPError, LoadError, ProxyFailed."""
        try:
            self._warm_up()
            for kind in self._plan.kinds():
                yield self._figure(
                    kind.name, [move for _ in range(self._plan.rounds) for move in self._there_and_back(kind)]
                )
            once = [each for each in self._once if each.startswith(PROMOTE)]
            yield self._figure(PROMOTE, [self._promoted(each) for each in once])
            once = [each for each in self._once if each.startswith(FAILOVER)]
            yield self._figure(FAILOVER, [self._failed_over(each) for each in once])
            if self._plan.many:
                yield self._figure(FAILOVER_MANY, [self._failed_over("many-")], self._plan.many)
        except ChildFailed as error:
            error.add_note(self._environment.log())
            raise

    def _figure(self, kind: str, moves: list[Move], partitions: int | None = None) -> Figure:
        return Figure(self._rtt_ms, kind, partitions or self._plan.partitions, moves)

    def _warm_up(self) -> None:
        """Have brokers and proxies do all of it, until the brokers' compilers have little left to do."""
        compilers = Compilers([pid for each in self._environment.clusters for pid in each.pids])
        for _ in range(1 + self._plan.warm_again_max):
            self._say("warming up")
            for kind in self._plan.kinds():
                self._there_and_back(kind)
            if compilers.share() <= COMPILING_MAX:
                break

    def _there_and_back(self, kind: Kind) -> list[Move]:
        return [self._reversed(kind, leader) for leader in (0, 1)]

    def _reversed(self, kind: Kind, leader: int) -> Move:
        """Reverse what is led over a link once."""
        with ExitStack() as stack:
            self._environment.wait(kind.link, leader)
            return self._reversed_with(kind, leader, self._told(kind, leader, stack) if kind.told else None)

    def _told(self, kind: Kind, leader: int, stack: ExitStack) -> ToldProducer:
        """A client whose name leads to the cluster that is to lead, and which writes to the one that leads."""
        here, there = (self._environment.target(side, prefix_of(kind.link)) for side in (leader, 1 - leader))
        name = stack.enter_context(MovingName())
        name.lead_to(here.host, here.port)
        producer = ToldProducer(self._plan.version, name, here.topic, self._environment.directory)
        stack.enter_context(producer).acked_after(0.0)
        name.lead_to(there.host, there.port)
        return producer

    def _reversed_with(self, kind: Kind, leader: int, client: ToldProducer | None) -> Move:
        prefix = prefix_of(kind.link)
        load = {"transactional": kind.transactional, "left_open": kind.left_open}
        self._begin(prefix, 1 - leader, leader, **load)
        namespaces = [{"type": each, "local": prefix} for each in ("topic", "consumer-group")]
        moving = {} if client is None else {"move_clients_seconds": MOVE_CLIENTS_S}
        began = time.monotonic()
        self._environment.do(leader, f"/v1/links/{kind.link}/reverse", {"namespaces": namespaces, **moving})
        command_s = time.monotonic() - began
        said = self._load.read()
        assert said["held_at"] is not None
        move = Move(
            said["accepted_at"] - said["held_at"],
            command_s,
            said["held_at"] - began,
            said["transaction_at"] - said["announced_at"] if kind.transactional else None,
            records_per_s=said["records_per_s"],
            after_per_s=said["after_per_s"],
            client_s=None if client is None else client.acked_after(said["accepted_at"]) - said["accepted_at"],
        )
        more = "" if move.client_s is None else f", the client moves within {move.client_s:.3f} s"
        self._say(f"{kind.name}: pause {move.pause_s:.3f} s{more}")
        return move

    def _promoted(self, prefix: str) -> Move:
        """Promote what the other cluster leads, once nobody writes there any more."""
        self._followed(prefix)
        return self._led(PROMOTE, prefix)

    def _failed_over(self, prefix: str) -> Move:
        """Kill the other cluster's proxy, go on without it, and start it again."""
        environment = self._environment
        self._followed(prefix)
        proxy = environment.proxies[0]
        killed = time.monotonic()
        proxy.kill()
        environment.wait_connected(False)
        move = self._led(FAILOVER, prefix, leases_until=killed + CLAIMS_RECORDED_S)
        proxy.start()
        environment.wait_connected(True)
        return move

    def _followed(self, prefix: str) -> None:
        """Write for a while, and wait until the other cluster has it."""
        self._environment.write(prefix, self._plan.batches_per_s, self._plan.before_s)
        self._environment.wait_once(prefix)

    def _led(self, how: str, prefix: str, leases_until: float = 0.0) -> Move:
        """Have the second cluster lead what nobody writes to. ``leases_until``: what it has to wait for."""
        self._begin(prefix, 1)
        began = time.monotonic()
        namespaces = [{"type": "topic", "local": prefix}]
        report = self._environment.do(1, f"/v1/links/{ONCE}/{how}", {"namespaces": namespaces})
        command_s = time.monotonic() - began
        assert all(each["promoted"] for each in report["namespaces"]), report
        said = self._load.read()
        move = Move(said["accepted_at"] - began, command_s, waits_s=max(0.0, leases_until - began))
        self._say(f"{how} of {prefix}: {move.pause_s:.3f} s, of which it waits for {move.waits_s:.3f} s")
        return move

    def _begin(self, prefix: str, follower: int, leader: int | None = None, **load: bool) -> None:
        """Have producers write to one cluster, and try the other. Raises ChildFailed."""
        plan, target = self._plan, self._environment.target
        what = Moving(
            None if leader is None else target(leader, prefix),
            target(follower, prefix),
            plan.records_per_s,
            plan.batches_per_s,
            plan.producers(self._rtt_ms),
            plan.before_s,
            plan.after_s,
            **load,
        )
        self._load.ask(**asdict(what))
