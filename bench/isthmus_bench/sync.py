"""What an ack costs that means "both sites have it", measured beside what else there is, over a WAN, in one run.

For each round trip of the WAN (:mod:`isthmus_bench.wan`) and each round, *environments* are started one after the
other: two clusters of a broker each, with a proxy in front of each and a link over the WAN between the proxies; or one
*stretched* cluster, whose brokers talk to each other over the WAN only. Clients and the leaders of all partitions are
in the first site, and so are the coordinators that are used. In an environment, every *load* goes through each of its
*scenarios* in turn.

Everything is real: brokers, proxies, TCP over the WAN. What is on this machine is shared by all of it: CPU shares stand
in the report.
"""

from __future__ import annotations

import math
import os
import platform
import re
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory
from typing import Any, Final

from isthmus_bench.children import Child, ChildFailed
from isthmus_bench.kafka import DEFAULT_VERSION, KafkaCluster, ToolFailed, run_tool
from isthmus_bench.kafka.jars import parse_version
from isthmus_bench.kafka.settings import Reach
from isthmus_bench.load import RawClient, Target, newest_versions, wait_for_topic
from isthmus_bench.proxies import ProxyFailed, ProxyProcess
from isthmus_bench.sync_load import COORDINATOR, Shape
from isthmus_bench.wan import RoundTrips, Wan
from isthmus_protocol.schema import ApiKey

Say = Callable[[str], None]

RECORD_BYTES: Final = 1024
HEAP_MB: Final = 1024
JVM_FLAGS: Final = (
    "-XX:TieredStopAtLevel=4",
    "-XX:-UseSerialGC",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    f"-Xms{HEAP_MB}m",
    "-XX:+AlwaysPreTouch",
)
"""As Kafka's own start script has them, and memory is there from the start, as in a broker that has run for long: the
serial collector that tests start quickly with stops a broker for 25 to 100 ms under 500 requests/s."""
BIG_BUFFER_BYTES: Final = 4 << 20
PROBES: Final = 100
"""Exchanges over the WAN that its round trip is measured by."""
CONNECTIONS_MIN: Final = 8
CONNECTIONS_MAX: Final = 900
TOPIC_SETTINGS: Final = {"file.delete.delay.ms": "1000"}
LINK: Final = "bench"
LINK_TIMEOUT_S: Final = 60.0
WARMUP_PER_S: Final = 2000
JAVA_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {"java-linger-0": ("acks=all", "linger.ms=0"), "java-stock": ()}
ASYNCHRONOUS: Final = "asynchronous"
SYNCHRONOUS: Final = "synchronous"
COORDINATED: Final = ("commit", "transaction")
"""Kinds of loads that use a group."""


# ---- what is measured ----


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


DIRECT: Final = "direct"
PROXIED: Final = "proxied"
ASYNC: Final = "async"
SYNC: Final = "sync"

_ONE: Final = "1 copy (RF 1, min ISR 1)"
SCENARIOS: Final = (
    Scenario(DIRECT, "direct broker", _ONE, ASYNCHRONOUS),
    Scenario(PROXIED, "proxied, no link", _ONE, ASYNCHRONOUS, proxied=True),
    Scenario(ASYNC, "asynchronous link", f"{_ONE}, the other site later", ASYNCHRONOUS, proxied=True, linked=True),
    Scenario(
        SYNC, "synchronous link", "2 copies, 1 in each site (RF 1, min ISR 1 on both sides)", SYNCHRONOUS, True, True
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
STRETCHED: Final = tuple(each.name for each in SCENARIOS if each.brokers > 1)
NOT_YET: Final[Mapping[str, str]] = {}
"""Scenarios that cannot be measured, and why. Without its line here, one is measured."""


def set_mode(proxy: ProxyProcess, link: str, mode: str) -> None:
    """Have a link in a mode: what to run where that is not the mode that links have at first. Raises ProxyFailed."""
    if mode != ASYNCHRONOUS:
        proxy.cli("link", "set-mode", link, mode)


LINKED_STATES: Final[Mapping[str, str]] = {ASYNCHRONOUS: "Following", SYNCHRONOUS: "In-Sync"}
"""By a link's mode the state of partitions in which nothing is missing."""


def wait_for_link(proxy: ProxyProcess, link: str, state: str, partitions: int) -> None:
    """Wait until so many partitions are in a state. Raises ProxyFailed."""
    deadline = time.monotonic() + LINK_TIMEOUT_S
    while True:
        found = [each["state"] for each in proxy.get(f"/v1/links/{link}")["partitions"]]
        if found == [state] * partitions:
            return
        if time.monotonic() > deadline:
            raise ProxyFailed(f"after {LINK_TIMEOUT_S:.0f} s partitions are {found}:\n{proxy.log[-1500:]}")
        time.sleep(0.05)


def wait_for_groups(proxy: ProxyProcess, link: str) -> None:
    """Wait until acks of commits mean that the other side has them. Raises ProxyFailed."""
    deadline = time.monotonic() + LINK_TIMEOUT_S
    while True:
        groups = proxy.get(f"/v1/links/{link}")["groups"]
        found = {(each["sync"] or {}).get("state") for each in groups}
        if found == {LINKED_STATES[SYNCHRONOUS]}:
            return
        if time.monotonic() > deadline:
            raise ProxyFailed(f"after {LINK_TIMEOUT_S:.0f} s groups are {found}:\n{proxy.log[-1500:]}")
        time.sleep(0.05)


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


LOADS: Final = (
    Load("depth-1", "depth 1, one connection", "closed"),
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
    Load("commit", "OffsetCommit, depth 1", "commit"),
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
    """Of each load, after a fifth of it that does not count."""
    warmup_s: float = 5.0
    """Of an environment, so that compilers are done."""

    @classmethod
    def quick(cls, version: str) -> Plan:
        """To see that it works; the figures mean nothing."""
        scenarios = tuple(each.name for each in SCENARIOS if each.big_buffers)
        return cls(version, (2.0,), 1, scenarios, seconds=1.0, warmup_s=0.5)

    def shape(self, load: Load, rtt_ms: float) -> Shape:
        """How the load generator sends a load."""
        return Shape(
            load.depth,
            load.rate,
            connections_for(load.rate, rtt_ms) if load.kind == "open" else 1,
            load.partitions,
            RECORD_BYTES,
            self.seconds / 5,
            self.seconds,
        )


def connections_for(rate: int, rtt_ms: float) -> int:
    """So many that a broker which answers a connection's requests one after the other is seldom kept from the next."""
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, math.ceil(rate * (3 * rtt_ms + 40) / 1000)))


# ---- figures ----


@dataclass(frozen=True, slots=True)
class Figure:
    """One load in one scenario: medians over the rounds."""

    rtt_ms: float
    scenario: str
    load: str
    requests: float
    per_s: float
    p50_ms: float
    p90_ms: float | None
    p99_ms: float
    p999_ms: float
    max_ms: float
    late_p99_ms: float | None
    """How late the load generator sent; the latencies count from when requests were due and so have it in them."""
    cpu: Mapping[str, float]
    """Shares of one core: ``brokers``, ``proxies``, ``wan``, ``load``."""
    rounds: int


@dataclass(frozen=True, slots=True)
class WanFigure:
    """What the WAN did."""

    rtt_ms: float
    """What it was to be."""
    measured: RoundTrips
    """Of a few bytes, alone on it: medians over the rounds."""
    late_p99_us: float
    """How late packets were under the loads: the median of all loads and rounds."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What was not measured, and why."""

    rtt_ms: float | None
    scenario: str
    load: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured. ``met`` is None where it was not."""

    target: str
    limit: float | None
    measured: float | None
    met: bool | None
    least: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    machine: Mapping[str, str]
    version: str
    rounds: int
    seconds: float
    wans: list[WanFigure]
    figures: list[Figure]
    missing: list[Missing]
    verdicts: list[Verdict] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return {
            **asdict(self),
            "scenarios": [asdict(each) for each in SCENARIOS],
            "loads": [asdict(each) for each in LOADS],
        }


def figure_of(rtt_ms: float, scenario: str, load: str, said: Sequence[Mapping[str, Any]]) -> Figure:
    """Medians of what the rounds said; what one of them did not say is None."""

    def median(name: str) -> Any:
        values = [each.get(name) for each in said]
        return None if None in values else statistics.median(values)  # type: ignore[type-var]

    cpu = {name: statistics.median(each["cpu"].get(name, 0.0) for each in said) for name in said[0]["cpu"]}
    names = ("requests", "per_s", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms", "late_p99_ms")
    medians: dict[str, Any] = {name: median(name) for name in names}
    return Figure(rtt_ms=rtt_ms, scenario=scenario, load=load, cpu=cpu, rounds=len(said), **medians)


# ---- targets ----

TARGET_RTT_MS: Final = 20.0
MEDIAN_OVER_RTT_MS: Final[Mapping[str, float]] = {"depth-1": 1.5, "depth-5": 1.5, "open-500": 1.5, "open-2000": 3.0}
P99_OVER_RTT_MS: Final[Mapping[str, float]] = {"depth-1": 8.0, "depth-5": 8.0, "open-500": 8.0}
JAVA_OVER_RTT_MS: Final = 8.0
ASYNC_OVER_PROXIED_MS: Final = 0.2
EQUAL_MS: Final = 1.0
"""At depth 1 (of commits, too) a synchronous link need not be ahead of a stretched cluster; so much counts as equal."""
DEPTH_ONE: Final = ("depth-1", "commit")
SUSTAINED: Final = 0.99
"""Of the rate that was asked for."""


def verdicts_of(figures: Iterable[Figure]) -> Iterator[Verdict]:
    """The targets, at a round trip of 20 ms."""
    found = {(each.scenario, each.load): each for each in figures if each.rtt_ms == TARGET_RTT_MS}
    titles = {each.name: each.title for each in LOADS}
    for name, limits in (("p50", MEDIAN_OVER_RTT_MS), ("p99", P99_OVER_RTT_MS)):
        for each, over in limits.items():
            figure = found.get((SYNC, each))
            measured = getattr(figure, f"{name}_ms") if figure else None
            yield _at_most(f"synchronous, {titles[each]}: {name}, ms", TARGET_RTT_MS + over, measured)
    java = found.get((SYNC, "java-linger-0"))
    limit = TARGET_RTT_MS + JAVA_OVER_RTT_MS
    yield _at_most(f"synchronous, {titles['java-linger-0']}: p50, ms", limit, java.p50_ms if java else None)
    fast = found.get((SYNC, "open-5000-8p"))
    least, per_s = 5_000 * SUSTAINED, fast.per_s if fast else None
    met = None if per_s is None else per_s >= least
    yield Verdict(f"synchronous, {titles['open-5000-8p']}: answered a second", least, per_s, met, least=True)
    for load in LOADS:
        yield from _ahead(found, load)
    for load in LOADS:
        if load.kind in ("closed", "open"):
            asynchronous, proxied = found.get((ASYNC, load.name)), found.get((PROXIED, load.name))
            added = asynchronous.p50_ms - proxied.p50_ms if asynchronous and proxied else None
            yield _at_most(f"asynchronous link, {load.title}: added to the p50, ms", ASYNC_OVER_PROXIED_MS, added)


def _ahead(found: Mapping[tuple[str, str], Figure], load: Load) -> Iterator[Verdict]:
    """A synchronous link against the best of the stretched clusters: ahead of it, or within 1 ms at depth 1."""
    ours = found.get((SYNC, load.name))
    theirs = [each for name in STRETCHED if (each := found.get((name, load.name))) is not None]
    for name in ("p50_ms", "p99_ms"):
        limit = min((getattr(each, name) for each in theirs), default=None)
        measured = getattr(ours, name) if ours else None
        target = f"synchronous against the best stretched, {load.title}: {name.removesuffix('_ms')}, ms"
        if limit is not None and load.name in DEPTH_ONE:
            limit += EQUAL_MS
        met = None if measured is None or limit is None else measured < limit
        yield Verdict(target, limit, measured, met)


def _at_most(target: str, limit: float, measured: float | None) -> Verdict:
    return Verdict(target, limit, measured, None if measured is None else measured <= limit)


# ---- environments ----


class Environment:
    """Clusters, and where each scenario writes. ``stack`` ends what it starts."""

    def __init__(self, scenarios: Sequence[Scenario], version: str, wan: Wan, stack: ExitStack) -> None:
        self._version = version
        self._wan = wan
        self._stack = stack
        self._reach = Reach(bind=wan.near, advertised=wan.far)
        self.brokers: list[int] = []
        self.proxies: list[int] = []
        self._cluster = self._start("a", scenarios[0])
        self._proxy: ProxyProcess | None = None
        self._proxies: list[ProxyProcess] = []
        if any(each.proxied for each in scenarios):
            self._start_proxies(any(each.linked for each in scenarios))
        for each in scenarios:
            self._prepare(each)

    def _start(self, name: str, scenario: Scenario) -> KafkaCluster:
        cluster = KafkaCluster(
            name=name,
            version=self._version,
            brokers=scenario.brokers,
            settings=broker_settings(scenario),
            heap_mb=HEAP_MB,
            jvm_flags=JVM_FLAGS,
            between_brokers=self._reach if scenario.brokers > 1 else None,
            say=lambda _: None,
        )
        self._stack.enter_context(cluster)
        running = (cluster.process(broker_id) for broker_id in cluster.broker_ids)
        self.brokers += [process.pid for process in running if process is not None]
        return cluster

    def _start_proxies(self, linked: bool) -> None:
        directory = FilePath(self._stack.enter_context(TemporaryDirectory(prefix="isthmus-bench-")))
        clusters = [self._cluster]
        if linked:
            clusters.append(self._start("b", Scenario("b", "", "", "")))
        token = directory / "token"  # the far address is another machine's
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        proxies = [
            self._stack.enter_context(
                ProxyProcess(
                    each.bootstrap_servers,
                    name=each.spec.name,
                    directory=directory,
                    extra={"link_listener": {"enrolment_token_file": str(token)}},
                    link_reach=self._reach,
                )
            )
            for each in clusters
        ]
        self._proxy = proxies[0]
        self._proxies = proxies
        self.proxies = [each.pid for each in proxies]
        if linked:
            remote = ("--remote", proxies[1].link_address, "--token-file", str(token))
            self._proxy.cli("link", "create", LINK, *remote)

    def _prepare(self, scenario: Scenario) -> None:
        """Topics, of 1 and of 8 partitions, led by the first broker, and what copies them."""
        replicas = range(1, scenario.brokers + 1)
        for partitions in PARTITIONS:
            create_topic(self._direct(topic_of(scenario, partitions)), partitions, replicas)
        if scenario.linked:
            assert self._proxy is not None
            prefix = prefix_of(scenario)
            for kind in ("topic", "consumer-group"):
                pair = ("--type", kind, "--local", prefix, "--remote", prefix, "--role", "leader")
                self._proxy.cli("namespace", "create", prefix, "--type", kind)
                self._proxy.cli("link", "attach", LINK, *pair)
            wait_for_link(self._proxy, LINK, LINKED_STATES[ASYNCHRONOUS], sum(PARTITIONS))
            set_mode(self._proxy, LINK, scenario.environment)
            wait_for_link(self._proxy, LINK, LINKED_STATES[scenario.environment], sum(PARTITIONS))
        if scenario.proxied:
            for partitions in PARTITIONS:
                wait_for_topic(self.target(scenario, partitions))

    def _direct(self, topic: str) -> Target:
        return Target(*self._cluster.addresses()[COORDINATOR], topic)

    def target(self, scenario: Scenario, partitions: int) -> Target:
        """Where a scenario writes to a topic of so many partitions."""
        topic = topic_of(scenario, partitions)
        if not scenario.proxied:
            return self._direct(topic)
        assert self._proxy is not None
        client = RawClient(Target(*_split(self._proxy.bootstrap), topic))
        try:
            answer: Any = client.ask(ApiKey.METADATA, newest_versions(client)[ApiKey.METADATA], {"topics": None})
        finally:
            client.close()
        (broker,) = (each for each in answer.brokers if each.node_id == COORDINATOR)
        return Target(broker.host, broker.port, topic)

    def wait_for_groups(self, scenario: Scenario) -> None:
        """Wait until what a scenario's commits mean is so. Raises ProxyFailed."""
        if scenario.environment == SYNCHRONOUS:
            assert self._proxy is not None
            wait_for_groups(self._proxy, LINK)

    def log(self) -> str:
        """The end of what the proxies said."""
        return "\n".join(each.log[-3000:] for each in self._proxies)

    @property
    def pids(self) -> dict[str, list[int]]:
        """By what they do."""
        return {"brokers": self.brokers, "proxies": self.proxies, "wan": [self._wan.pid]}


def broker_settings(scenario: Scenario) -> dict[str, str]:
    """Settings of all brokers; with big buffers a connection over the WAN takes what a round trip holds."""
    settings = {
        "transaction.partition.verification.enable": "false",  # as on every target of transactions
        "min.insync.replicas": str(min(2, scenario.brokers)),
    }
    if scenario.big_buffers:
        names = ("socket.send.buffer.bytes", "socket.receive.buffer.bytes", "replica.socket.receive.buffer.bytes")
        settings |= dict.fromkeys(names, str(BIG_BUFFER_BYTES))
    return settings


def prefix_of(scenario: Scenario) -> str:
    """Of the names of its topics, groups and transactional ids."""
    return f"{scenario.name}-"


def topic_of(scenario: Scenario, partitions: int) -> str:
    return f"{prefix_of(scenario)}{partitions}"


def create_topic(target: Target, partitions: int, replicas: Sequence[int]) -> None:
    """A topic on those brokers, led by the first; both sites have what is acked. Raises LoadError."""
    settings = {**TOPIC_SETTINGS, "min.insync.replicas": str(min(2, len(replicas)))}
    topic = {
        "name": target.topic,
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": [{"partition_index": index, "broker_ids": list(replicas)} for index in range(partitions)],
        "configs": [{"name": name, "value": value} for name, value in settings.items()],
    }
    client = RawClient(target)
    try:
        version = newest_versions(client)[ApiKey.CREATE_TOPICS]
        client.ask(ApiKey.CREATE_TOPICS, version, {"topics": [topic], "timeout": 30_000})
    finally:
        client.close()
    wait_for_topic(target)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


# ---- a Java producer ----

_TOTAL: Final = re.compile(
    r"^(?P<requests>\d+)(?: \D*)? records sent, (?P<per_s>[\d.]+) records/sec .*?, [\d.]+ ms avg latency, "
    r"(?P<max_ms>[\d.]+) ms max latency, (?P<p50_ms>\d+) ms 50th, \d+ ms 95th, (?P<p99_ms>\d+) ms 99th, "
    r"(?P<p999_ms>\d+) ms 99\.9th",
    re.MULTILINE,
)
WARMUP_SINCE: Final = (4, 2)
"""kafka-producer-perf-test leaves out records at first (KIP-1052)."""


def java_said(printed: str) -> dict[str, float]:
    """The figures of kafka-producer-perf-test, the last ones it printed. Whole milliseconds. Raises ValueError."""
    found = list(_TOTAL.finditer(printed))
    if not found:
        raise ValueError(f"no figures in: {printed[-500:]}")
    return {name: float(value) for name, value in found[-1].groupdict().items()}


def java_producer(version: str, bootstrap: str, topic: str, load: Load, shape: Shape) -> dict[str, float]:
    """Run one at a steady rate. Raises ToolFailed, ValueError."""
    warmup, counted = round(load.rate * shape.warmup_s), round(load.rate * shape.seconds)
    arguments = ["--topic", topic, "--record-size", str(RECORD_BYTES), "--throughput", str(load.rate)]
    arguments += ["--num-records", str(warmup + counted)]
    if parse_version(version)[:2] >= WARMUP_SINCE:
        arguments += ["--warmup-records", str(warmup)]
    arguments += ["--producer-props", f"bootstrap.servers={bootstrap}", *JAVA_SETTINGS[load.name]]
    done = run_tool(version, "kafka-producer-perf-test", *arguments)
    return java_said(done.stdout)


# ---- a run ----


def run(plan: Plan, say: Say) -> Report:
    """Measure. Progress goes to ``say``. Raises ChildFailed, EmbeddedKafkaError, ProxyFailed, LoadError."""
    chosen = [each for each in SCENARIOS if each.name in plan.scenarios]
    missing = [Missing(None, each.name, None, NOT_YET[each.name]) for each in chosen if each.name in NOT_YET]
    for each in missing:
        say(f"{each.scenario} is left out: {each.reason}")
    chosen = [each for each in chosen if each.name not in NOT_YET]
    wans, figures = [], []
    for rtt_ms in plan.rtts_ms:
        measured = Measured(plan, rtt_ms, say)
        for number in range(plan.rounds):
            for name in dict.fromkeys(each.environment for each in chosen):
                say(f"RTT {rtt_ms:g} ms, round {number + 1} of {plan.rounds}: starting {name}")
                measured.environment([each for each in chosen if each.environment == name])
        wans.append(measured.wan_figure())
        figures += measured.figures(chosen)
        missing += measured.missing
    return Report(
        machine(), plan.version, plan.rounds, plan.seconds, wans, figures, missing, list(verdicts_of(figures))
    )


class Measured:
    """What was measured at one round trip."""

    def __init__(self, plan: Plan, rtt_ms: float, say: Say) -> None:
        self.missing: list[Missing] = []
        self._plan = plan
        self._rtt_ms = rtt_ms
        self._say = say
        self._loads = [each for each in LOADS if each.name in plan.loads]
        self._said: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._probes: list[RoundTrips] = []
        self._late_us: list[float] = []

    def environment(self, scenarios: Sequence[Scenario]) -> None:
        """All loads in all scenarios of an environment, once."""
        with ExitStack() as stack:
            wan = stack.enter_context(Wan(self._rtt_ms))
            self._probes.append(wan.round_trips(PROBES))
            environment = Environment(scenarios, self._plan.version, wan, stack)
            generator = stack.enter_context(Child("isthmus_bench.sync_load"))
            try:
                for scenario in scenarios:
                    self._warm(environment, generator, scenario)
                for load in self._loads:
                    for scenario in scenarios:
                        self._say(f"{scenario.title}: {load.title}")
                        wan.stats()
                        self._measure(environment, generator, scenario, load)
                        self._late_us.append(wan.stats()["p99_late_us"])
            except ChildFailed as error:
                error.add_note(environment.log())
                raise

    def _warm(self, environment: Environment, generator: Child, scenario: Scenario) -> None:
        connections = connections_for(WARMUP_PER_S, self._rtt_ms)
        shape = Shape(rate=WARMUP_PER_S, connections=connections, warmup_s=0, seconds=self._plan.warmup_s)
        target = asdict(environment.target(scenario, 1))
        generator.ask(do="open", target=target, shape=asdict(shape), pids={})

    def _measure(self, environment: Environment, generator: Child, scenario: Scenario, load: Load) -> None:
        """One load; where it fails, that is a figure that is missing, with the reason."""
        target, shape = environment.target(scenario, load.partitions), self._plan.shape(load, self._rtt_ms)
        try:
            if load.kind in COORDINATED:
                self._warm_group(environment, generator, scenario)
            if load.kind == "java":
                bootstrap = f"{target.host}:{target.port}"
                said: dict[str, Any] = java_producer(self._plan.version, bootstrap, target.topic, load, shape)
                said["cpu"] = {}
            else:
                said = generator.ask(
                    do=load.kind,
                    target=asdict(target),
                    shape=asdict(shape),
                    pids=environment.pids,
                    **({"prefix": prefix_of(scenario)} if load.kind in COORDINATED else {}),
                )
        except (ChildFailed, ToolFailed, ProxyFailed, ValueError) as error:
            self._say(f"failed: {error}")
            self.missing.append(Missing(self._rtt_ms, scenario.name, load.name, str(error).strip()[-500:]))
            return
        self._said.setdefault((scenario.name, load.name), []).append(said)

    def _warm_group(self, environment: Environment, generator: Child, scenario: Scenario) -> None:
        """Have a group, whose commits wait for the other side where that is what is measured."""
        target, shape = asdict(environment.target(scenario, 1)), asdict(Shape(warmup_s=0, seconds=0.1))
        generator.ask(do="commit", target=target, shape=shape, pids={}, prefix=prefix_of(scenario))
        environment.wait_for_groups(scenario)

    def figures(self, scenarios: Sequence[Scenario]) -> list[Figure]:
        """Medians over the rounds."""
        return [
            figure_of(self._rtt_ms, scenario.name, load.name, self._said[scenario.name, load.name])
            for load in self._loads
            for scenario in scenarios
            if (scenario.name, load.name) in self._said
        ]

    def wan_figure(self) -> WanFigure:
        """What the WAN did in all rounds."""
        names = ("p50_ms", "p99_ms", "max_ms")
        probed = RoundTrips(*(statistics.median(getattr(each, name) for each in self._probes) for name in names))
        return WanFigure(self._rtt_ms, probed, statistics.median(self._late_us or [0.0]))


def machine() -> dict[str, str]:
    """What this was measured on."""
    kernel = FilePath("/proc/sys/net")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    models = re.findall(r"^model name\s*: (.*)$", FilePath("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cores": str(os.cpu_count()),
        "processor": models[0] if models else platform.machine(),
        "memory": f"{memory:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "TCP congestion control": (kernel / "ipv4/tcp_congestion_control").read_text().strip(),
        "net.core.rmem_max": (kernel / "core/rmem_max").read_text().strip(),
        "net.core.wmem_max": (kernel / "core/wmem_max").read_text().strip(),
        "load average at the end": " ".join(f"{each:.2f}" for each in os.getloadavg()),
    }
