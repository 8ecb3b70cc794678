"""What ``isthmus bench sync`` measures: ways to write (scenarios), what is written (loads), and how much of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from isthmus_bench.kafka import DEFAULT_VERSION
from isthmus_bench.sync_load import COORDINATED, Shape

RECORD_BYTES: Final = 1024
CONNECTIONS_MIN: Final = 8
CONNECTIONS_MAX: Final = 900
ASYNCHRONOUS: Final = "asynchronous"
SYNCHRONOUS: Final = "synchronous"


class Beside(enum.StrEnum):
    """What goes on in a synchronous link's namespace while another one is measured."""

    NOTHING = "nothing"
    WRITES = "writes"
    STANDSTILL = "writes, while the other side's proxy is stopped"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A way to write. ``name`` is what options and JSON call it."""

    name: str
    title: str
    durability: str
    """Where a record is when it is acked."""
    environment: str
    """Scenarios of one environment share clusters. It is named by its link's mode, where it has one."""
    proxied: bool = False
    linked: bool = False
    """Whether a link copies what it writes."""
    brokers: int = 1
    """Of the cluster; more than one: it is stretched."""
    big_buffers: bool = True
    loads: tuple[str, ...] | None = None
    """The only ones that it is measured with; None: all."""
    beside: Beside = Beside.NOTHING


DIRECT: Final = "direct"
PROXIED: Final = "proxied"
ASYNC: Final = "async"
SYNC: Final = "sync"
BESIDE: Final = "beside"
BESIDE_STANDSTILL: Final = "beside-standstill"
BESIDE_LOADS: Final = ("open-500",)

_ONE: Final = "1 copy (RF 1, min ISR 1)"
SCENARIOS: Final = (
    Scenario(DIRECT, "direct broker", _ONE, ASYNCHRONOUS),
    Scenario(PROXIED, "proxied, no link", _ONE, ASYNCHRONOUS, proxied=True),
    Scenario(ASYNC, "asynchronous link", f"{_ONE}, the other site later", ASYNCHRONOUS, proxied=True, linked=True),
    Scenario(
        SYNC, "synchronous link", "2 copies, 1 in each site (RF 1, min ISR 1 on both sides)", SYNCHRONOUS, True, True
    ),
    Scenario(
        BESIDE,
        "another namespace, beside a synchronous link under the same load",
        _ONE,
        SYNCHRONOUS,
        proxied=True,
        loads=BESIDE_LOADS,
        beside=Beside.WRITES,
    ),
    Scenario(
        BESIDE_STANDSTILL,
        "another namespace, beside that link while its other side stands still",
        _ONE,
        SYNCHRONOUS,
        proxied=True,
        loads=BESIDE_LOADS,
        beside=Beside.STANDSTILL,
    ),
    Scenario("stretched-2", "stretched, RF 2", "2 copies, 1 in each site (RF 2, min ISR 2)", "stretched-2", brokers=2),
    Scenario(
        "stretched-3", "stretched, RF 3", "3 copies, 2 in the other site (RF 3, min ISR 2)", "stretched-3", brokers=3
    ),
    Scenario(
        "stretched-2-default",
        "stretched, RF 2, default buffers",
        "2 copies, 1 in each site (RF 2, min ISR 2)",
        "stretched-2-default",
        brokers=2,
        big_buffers=False,
    ),
    Scenario(
        "stretched-3-default",
        "stretched, RF 3, default buffers",
        "3 copies, 2 in the other site (RF 3, min ISR 2)",
        "stretched-3-default",
        brokers=3,
        big_buffers=False,
    ),
)


def named(name: str) -> Scenario:
    """The scenario of that name."""
    return next(each for each in SCENARIOS if each.name == name)


STRETCHED: Final = tuple(each.name for each in SCENARIOS if each.brokers > 1)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent."""

    name: str
    title: str
    kind: str
    """``closed``, ``open``, ``java``, ``commit`` or ``transaction``."""
    depth: int = 1
    rate: int = 0
    partitions: int = 1
    times: int = 1
    """So many times as long as others."""


FEW_ANSWERS_TIMES: Final = 3
"""One request in flight is answered 47 times a second at 20 ms: too seldom for a p99 of 5 s to mean much."""
LOADS: Final = (
    Load("depth-1", "depth 1, one connection", "closed", times=FEW_ANSWERS_TIMES),
    Load("depth-5", "depth 5, one connection", "closed", depth=5),
    Load("depth-5-8p", "depth 5, one connection, 8 partitions", "closed", depth=5, partitions=8),
    Load("open-100", "100 requests/s", "open", rate=100),
    Load("open-500", "500 requests/s", "open", rate=500),
    Load("open-2000", "2,000 requests/s", "open", rate=2_000),
    Load("open-100-8p", "100 requests/s, 8 partitions", "open", rate=100, partitions=8),
    Load("open-500-8p", "500 requests/s, 8 partitions", "open", rate=500, partitions=8),
    Load("open-2000-8p", "2,000 requests/s, 8 partitions", "open", rate=2_000, partitions=8),
    Load("open-5000-8p", "5,000 requests/s, 8 partitions", "open", rate=5_000, partitions=8),
    Load("java-linger-0", "Java producer, linger.ms=0, 500 records/s", "java", rate=500),
    Load("java-stock", "Java producer, stock settings, 500 records/s", "java", rate=500),
    Load("commit", "OffsetCommit, depth 1", "commit", times=FEW_ANSWERS_TIMES),
    Load("transaction", "whole transactions, one after the other", "transaction"),
)


PARTITIONS: Final = tuple({each.partitions: None for each in LOADS})
"""Of the topics of a scenario."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    version: str = DEFAULT_VERSION
    rtts_ms: tuple[float, ...] = (20.0,)
    rounds: int = 3
    scenarios: tuple[str, ...] = tuple(each.name for each in SCENARIOS)
    loads: tuple[str, ...] = tuple(each.name for each in LOADS)
    seconds: float = 5.0
    """Of each load (:attr:`Load.times` that of some), after a fifth of it that does not count."""
    warmup_s: float = 15.0
    """Of an environment with each kind of request, so that compilers are done: its scenarios share it."""
    warm_again_max: int = 6
    """So often a third of that follows, if they are not."""

    @classmethod
    def quick(cls, version: str) -> Plan:
        """To see that it works; the figures mean nothing."""
        scenarios = tuple(each.name for each in SCENARIOS if each.big_buffers)
        return cls(version, (2.0,), 1, scenarios, seconds=1.0, warmup_s=0.5, warm_again_max=0)

    awake: bool = True
    """Whether cores are kept from sleeping."""
    sites_apart: bool = True
    """Whether each site has cores of its own."""

    def warmed(self, scenarios: Sequence[Scenario]) -> list[Scenario]:
        """Of those that share an environment: the others send nothing that these have not sent before."""
        return [each for each in scenarios if each.loads is None] or list(scenarios)

    @property
    def coordinated(self) -> list[str]:
        """Kinds of its loads that use a group."""
        return [each.kind for each in LOADS if each.name in self.loads and each.kind in COORDINATED]

    def shape(self, load: Load, rtt_ms: float) -> Shape:
        """How the load generator sends a load."""
        return Shape(
            load.depth,
            load.rate,
            connections_for(load.rate, rtt_ms) if load.kind == "open" else 1,
            load.partitions,
            RECORD_BYTES,
            self.seconds / 5,
            self.seconds * load.times,
        )


def connections_for(rate: int, rtt_ms: float) -> int:
    """So many that a broker which answers a connection's requests one after the other is seldom kept from the next."""
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, math.ceil(rate * (3 * rtt_ms + 40) / 1000)))
