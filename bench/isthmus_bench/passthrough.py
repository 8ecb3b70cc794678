"""What the proxy costs, measured beside what it is compared with, in one run.

Every workload runs over every path, in turn, round after round, so that what the machine does besides hits all alike;
figures are medians over the rounds, and ratios are formed within a round first. Paths:

* ``direct``: the client at the broker; no process in between;
* ``relay``: a bare byte relay (:mod:`isthmus_bench.relay`), the floor for any process in between;
* ``proxy, no plugins`` and ``proxy``: ``isthmus proxy`` without plugins, and with the default ones;
* ``proxy, hook on Produce``: with one more plugin, which looks at Produce and at nothing else;
* the same ``+ TLS``: TLS on the client's leg, ended in the relay or proxy.

CPU is that of the process in between, user and system, by the kernel's clock of it. With ``broker="kafka"`` brokers
are real ones, a broker for each proxy (one proxy fronts a broker), with leaders placed so that each path's topics are
on its broker. With ``broker="canned"`` one process of ours gives canned answers, and the proxies are listeners and
sessions alone (:mod:`isthmus_bench.bare_proxy`): less noise, no Java, and nothing in it but the path of a request.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path as FilePath
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from isthmus_bench import load as load_module
from isthmus_bench import produce_hook
from isthmus_bench.children import Child, open_descriptors, resident_bytes
from isthmus_bench.command import python_build
from isthmus_bench.kafka import DEFAULT_VERSION, Authority, KafkaCluster
from isthmus_bench.load import Load, LoadError, RawClient, Target, newest_versions
from isthmus_bench.proxies import ProxyProcess
from isthmus_protocol.schema import ApiKey

Say = Callable[[str], None]

DIRECT: Final = "direct"
RELAY: Final = "relay"
NO_PLUGINS: Final = "proxy, no plugins"
PROXY: Final = "proxy"
HOOK: Final = "proxy, hook on Produce"
TLS: Final = " + TLS"

SMALL_RATIO_MAX: Final = 1.5
FETCH_RATIO_MAX: Final = 1.3
UNHOOKED_RATIO_MAX: Final = 1.1
LIST_RATIO_MAX: Final = 1.5
LIST_CPU_US_MAX: Final = 2_000.0
IDLE_BYTES_MAX: Final = 40 * 1024
"""The targets: CPU against the relay's, that of Fetch with a hook on Produce against without, latency of a list of all
topics against that of a real broker, its CPU, and memory of an idle connection."""
GIVEN_BACK_MIN: Final = 0.5
"""What part of the memory of closed connections must be back with the system; the rest serves the next ones."""

WARM_CONNECTIONS: Final = 20
CLOSE_TIMEOUT_S: Final = 20.0
FETCH_BYTES: Final = 1 << 20
FETCH_RECORDS: Final = (16, 64_000)
"""Records of a batch and their size: as much as fits a broker's message.max.bytes, an answer of 1 MB."""
BROKER_SETTINGS: Final = {"log.retention.check.interval.ms": "2000"}
TOPIC_SETTINGS: Final = {
    "retention.bytes": str(64 << 20),
    "segment.bytes": str(32 << 20),
    "file.delete.delay.ms": "1000",
}
"""Produced records go again while the run lasts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of load. ``load`` has no times."""

    name: str
    load: Load

    @property
    def fetches(self) -> bool:
        return self.load.api == "fetch"


WORKLOADS: Final = (
    Workload("Produce 1 x 100 B, depth 1", Load("produce")),
    Workload("Produce 1 x 100 B, depth 5", Load("produce", depth=5)),
    Workload("Produce 16 x 1 KB, depth 1", Load("produce", records=16, record_bytes=1024)),
    Workload("Produce 16 x 1 KB, depth 5", Load("produce", records=16, record_bytes=1024, depth=5)),
    Workload("Fetch 1 MB", Load("fetch", record_bytes=FETCH_BYTES)),
    Workload("Produce 1 x 100 B, 50 connections", Load("produce", connections=50)),
    Workload("Fetch 1 MB, 8 connections", Load("fetch", record_bytes=FETCH_BYTES, connections=8)),
)
LIST: Final = "Metadata of all topics"
LISTED_PARTITIONS: Final = 3
"""Of each topic that is listed."""
LISTED_AT_ONCE: Final = 250
"""Made in one request."""
SMALL: Final = WORKLOADS[0].name, WORKLOADS[1].name
FETCH: Final = WORKLOADS[4].name


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    broker: Literal["kafka", "canned"] = "kafka"
    version: str = DEFAULT_VERSION
    rounds: int = 7
    seconds: float = 0.7
    warmup_s: float = 0.15
    workloads: tuple[Workload, ...] = WORKLOADS
    tls: bool = True
    idle_connections: int = 1_000
    carried_connections: int = 5_000
    """Connections that rest on one process while another one is measured."""
    listed_topics: int = 5_000
    beside: tuple[FilePath, ...] = ()
    """Checkouts whose sessions are measured in the same turns, canned answers before them: other versions of this one,
    and one of them twice for the noise."""
    settle_s: float = 2.0
    """After connections have closed, before memory is looked at: what is given back is given back a moment later."""

    @classmethod
    def quick(cls, broker: Literal["kafka", "canned"], version: str) -> Plan:
        """To see that it works; the figures mean nothing."""
        chosen = tuple(each for each in WORKLOADS if each.name in (SMALL[1], FETCH))
        return cls(
            broker,
            version,
            1,
            0.1,
            0.05,
            chosen,
            idle_connections=50,
            carried_connections=100,
            listed_topics=50,
            settle_s=0.1,
        )


@dataclass(frozen=True, slots=True)
class Path:
    """A way from the client to a broker."""

    name: str
    target: Target
    pid: int | None
    """The process in between."""
    fetch_topic: str
    beside: str = ""
    """The path of this version's which does the same, where this one is another's."""

    @property
    def tls(self) -> bool:
        return self.target.ca_file is not None

    @property
    def floor(self) -> str:
        """The path that its CPU is compared with."""
        return RELAY + TLS if self.tls else RELAY

    def target_of(self, workload: Workload) -> Target:
        if not workload.fetches:
            return self.target
        return Target(self.target.host, self.target.port, self.fetch_topic, self.target.ca_file)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run of a workload over a path gave."""

    requests_per_s: float
    mb_per_s: float
    p50_us: float
    p99_us: float
    p999_us: float
    cpu_us: float | None
    """Of the process in between, for one request and its answer."""
    cpu_ns_per_byte: float | None
    cpu_share: float | None
    """Of one core."""
    load_share: float
    """The load generator's own: near 1 it is what was measured."""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Sample:
        """From what the load generator says."""
        requests, seconds, cpu = said["requests"], said["seconds"], said["cpu_seconds"]
        moved = said["request_bytes"] + said["answer_bytes"]
        return cls(
            requests_per_s=requests / seconds,
            mb_per_s=requests * moved / seconds / 1e6,
            p50_us=said["p50_us"],
            p99_us=said["p99_us"],
            p999_us=said["p999_us"],
            cpu_us=None if cpu is None else cpu / requests * 1e6,
            cpu_ns_per_byte=None if cpu is None else cpu / requests / moved * 1e9,
            cpu_share=None if cpu is None else cpu / seconds,
            load_share=said["load_cpu_seconds"] / seconds,
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """A workload over a path: medians over the rounds."""

    workload: str
    path: str
    sample: Sample
    cpu_ratio: float | None
    """CPU for a request against the floor's in the same round."""


@dataclass(frozen=True, slots=True)
class BesideFigure:
    """A workload over two paths that do the same: ratios of each round, the first to the other."""

    workload: str
    path: str
    other: str
    cpu_ratio: float
    cpu_quartiles: tuple[float, float]
    requests_ratio: float
    p50_ratio: float


@dataclass(frozen=True, slots=True)
class IdleFigure:
    """Memory of connections that have exchanged ApiVersions and rest."""

    path: str
    connections: int
    resident_bytes: int
    """Of the process, before."""
    bytes_each: float
    given_back: float
    """The part of it that was back with the system when all were closed."""
    bytes_each_again: float
    """What as many new connections took on top of what the first ones took at most."""


@dataclass(frozen=True, slots=True)
class CarriedFigure:
    """A small Produce while many other connections rest on the same process."""

    path: str
    connections: int
    refused: str
    resident_bytes: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured."""

    target: str
    limit: float
    measured: float
    met: bool


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    broker: str
    machine: str
    rounds: int
    seconds: float
    figures: list[Figure]
    idle: list[IdleFigure]
    carried: list[CarriedFigure]
    verdicts: list[Verdict] = field(default_factory=list)
    beside: list[BesideFigure] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return asdict(self)


# ---- arithmetic ----


def figures_of(samples: Mapping[tuple[str, str], Sequence[Sample]], floors: Mapping[str, str]) -> list[Figure]:
    """Medians over the rounds. ``samples`` by (workload, path), ``floors``: the path that a path is compared with."""
    figures = []
    for (workload, path), rounds in samples.items():
        ratios = [
            sample.cpu_us / floor.cpu_us
            for sample, floor in zip(rounds, samples.get((workload, floors[path]), ()), strict=False)
            if sample.cpu_us is not None and floor.cpu_us
        ]
        figures.append(Figure(workload, path, median_of(rounds), statistics.median(ratios) if ratios else None))
    return figures


def beside_figures(
    samples: Mapping[tuple[str, str], Sequence[Sample]], pairs: Sequence[tuple[str, str]]
) -> list[BesideFigure]:
    """What the first path of each pair takes of what the other does, round by round, for every workload of both."""
    figures = []
    for workload in dict.fromkeys(workload for workload, _ in samples):
        for path, other in pairs:
            both = list(zip(samples.get((workload, path), ()), samples.get((workload, other), ()), strict=False))
            if not both:
                continue
            cpu = [one.cpu_us / two.cpu_us for one, two in both if one.cpu_us and two.cpu_us]
            low, _, high = statistics.quantiles(cpu, n=4) if len(cpu) > 1 else cpu * 3
            figures.append(
                BesideFigure(
                    workload,
                    path,
                    other,
                    statistics.median(cpu),
                    (low, high),
                    statistics.median(one.requests_per_s / two.requests_per_s for one, two in both),
                    statistics.median(one.p50_us / two.p50_us for one, two in both),
                )
            )
    return figures


def pairs_beside(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Each path of this version's with those of others that do the same, then those with the first of them."""
    others: dict[str, list[str]] = {}
    for path in paths:
        if path.beside:
            others.setdefault(path.beside, []).append(path.name)
    own = [(name, other) for name, each in others.items() for other in each]
    return own + [(other, first) for first, *more in others.values() for other in more]


def median_of(samples: Sequence[Sample]) -> Sample:
    """Field by field; None where any is None."""
    medians: dict[str, Any] = {}
    for name in Sample.__dataclass_fields__:
        values = [getattr(sample, name) for sample in samples]
        medians[name] = None if None in values else statistics.median(values)
    return Sample(**medians)


def idle_figure(path: str, connections: int, before: int, opened: int, closed: int, again: int) -> IdleFigure:
    """From resident sizes in bytes: before, with the connections, when they were closed, and with as many new ones."""
    taken = opened - before
    return IdleFigure(
        path,
        connections,
        before,
        taken / connections,
        1.0 if taken <= 0 else min(1.0, (opened - closed) / taken),
        max(0, again - opened) / connections,
    )


def verdicts_of(figures: Sequence[Figure], idle: Iterable[IdleFigure]) -> list[Verdict]:
    """The targets that apply to what was measured."""
    verdicts = []
    for figure in figures:
        if figure.path != PROXY or figure.cpu_ratio is None:
            continue
        if figure.workload in SMALL:
            limit = SMALL_RATIO_MAX
        elif figure.workload == FETCH:
            limit = FETCH_RATIO_MAX
        elif figure.workload == LIST:
            cpu_us = figure.sample.cpu_us
            assert cpu_us is not None
            verdicts.append(Verdict(f"CPU us: {LIST}", LIST_CPU_US_MAX, cpu_us, cpu_us <= LIST_CPU_US_MAX))
            continue
        else:
            continue
        name = f"CPU against the relay's: {figure.workload}"
        verdicts.append(Verdict(name, limit, figure.cpu_ratio, figure.cpu_ratio <= limit))
    verdicts += hook_verdicts(figures)
    for each in idle:
        if each.path == PROXY:
            fits = each.bytes_each <= IDLE_BYTES_MAX
            verdicts.append(Verdict("bytes of an idle connection", IDLE_BYTES_MAX, each.bytes_each, fits))
            back = each.given_back >= GIVEN_BACK_MIN
            verdicts.append(Verdict("part given back when it closes", GIVEN_BACK_MIN, each.given_back, back))
    return verdicts


def list_verdict(figures: Sequence[Figure]) -> Verdict:
    """That a list of all topics comes about as soon as from a real broker, of which making it takes its time."""
    p50 = {figure.path: figure.sample.p50_us for figure in figures if figure.workload == LIST}
    ratio = p50[PROXY] / p50[DIRECT]
    return Verdict(f"p50 against direct: {LIST}", LIST_RATIO_MAX, ratio, ratio <= LIST_RATIO_MAX)


def hook_verdicts(figures: Sequence[Figure]) -> Iterator[Verdict]:
    """That an API which nobody hooks costs nothing more; ratios of some percent are noise.

    Both as against the relay in the same round: what else the machine does changes from one to the next.
    """
    cpu = {figure.path: figure.cpu_ratio for figure in figures if figure.workload == FETCH}
    without, hooked = cpu.get(PROXY), cpu.get(HOOK)
    if without is not None and hooked is not None:
        ratio = hooked / without
        yield Verdict("CPU of Fetch with a hook on Produce", UNHOOKED_RATIO_MAX, ratio, ratio <= UNHOOKED_RATIO_MAX)


# ---- what is measured ----


def run(plan: Plan, say: Say) -> Report:
    """Measure. Progress goes to ``say``. Raises EmbeddedKafkaError, ProxyFailed, ChildFailed, LoadError."""
    with ExitStack() as stack:
        directory = FilePath(stack.enter_context(TemporaryDirectory(prefix="isthmus-bench-")))
        certificate, ca_file = _certificate(directory) if plan.tls else (None, None)
        cluster: KafkaCluster | None = None
        if plan.broker == "kafka":
            say(f"starting Kafka {plan.version}, relays and proxies")
            cluster, paths = _real_paths(plan, stack, directory, certificate, ca_file)
            broker = f"Kafka {plan.version}, a broker for each proxy"
        else:
            say("starting a broker of canned answers, relays and proxies")
            paths = _canned_paths(plan, stack, certificate, ca_file)
            broker = "canned answers; proxies are listeners and sessions alone"
        load = stack.enter_context(Child("isthmus_bench.load"))
        between = [path for path in paths if path.pid is not None]
        idle = [_idle(plan, path, load, say) for path in between]  # first, in fresh processes
        samples: dict[tuple[str, str], list[Sample]] = {}
        for number in range(plan.rounds):
            _round(plan, number, paths, load, samples, say)
        carried = [_carried(plan, path, load, say) for path in between if path.name in (RELAY, PROXY, PROXY + TLS)]
        say(f"{plan.listed_topics} topics to list")
        listing = [path for path in paths if path.name in (DIRECT, RELAY, PROXY)]
        if cluster is None:
            listing = _canned_list_paths(plan, stack)
        else:  # last, since brokers with so many topics do more besides
            _make_listed(plan, cluster, listing)
        for number in range(plan.rounds):
            _round(replace(plan, workloads=(Workload(LIST, Load("metadata")),)), number, listing, load, samples, say)
        figures = figures_of(samples, {path.name: path.floor for path in paths})
        verdicts = verdicts_of(figures, idle)
        if cluster is not None:
            verdicts.append(list_verdict(figures))
        machine = f"{os.cpu_count()} cores, Linux {platform.release()}, Python {python_build()}"
        beside = beside_figures(samples, pairs_beside(paths))
        return Report(broker, machine, plan.rounds, plan.seconds, figures, idle, carried, verdicts, beside)


def _round(
    plan: Plan,
    number: int,
    paths: Sequence[Path],
    load: Child,
    samples: dict[tuple[str, str], list[Sample]],
    say: Say,
) -> None:
    for workload in plan.workloads:
        say(f"round {number + 1} of {plan.rounds}: {workload.name}")
        for step in range(len(paths)):  # another path first in each round
            path = paths[(number + step) % len(paths)]
            sample = _drive(plan, workload, path, load)
            samples.setdefault((workload.name, path.name), []).append(sample)


def _drive(plan: Plan, workload: Workload, path: Path, load: Child) -> Sample:
    wanted = asdict(workload.load) | {"seconds": plan.seconds, "warmup_s": plan.warmup_s}
    return Sample.of(load.ask(do="drive", load=wanted, target=asdict(path.target_of(workload)), pid=path.pid))


def _idle(plan: Plan, path: Path, load: Child, say: Say) -> IdleFigure:
    assert path.pid is not None
    count = plan.idle_connections
    say(f"{count} idle connections: {path.name}")
    target = asdict(path.target)
    load.ask(do="idle", target=target, count=WARM_CONNECTIONS)  # what the first connections bring, they bring once
    load.ask(do="close_idle")
    time.sleep(plan.settle_s)
    descriptors = open_descriptors(path.pid)
    sizes = [resident_bytes(path.pid)]
    for _ in range(2):
        opened = load.ask(do="idle", target=target, count=count)
        if opened["open"] != count:
            raise LoadError(f"{path.name} took {opened['open']} of {count} connections: {opened['refused']}")
        sizes.append(resident_bytes(path.pid))
        load.ask(do="close_idle")
        _wait_closed(path.pid, descriptors, plan.settle_s)
        sizes.append(resident_bytes(path.pid))
    before, first, closed, again, _ = sizes
    return idle_figure(path.name, count, before, first, closed, again)


def _carried(plan: Plan, path: Path, load: Child, say: Say) -> CarriedFigure:
    assert path.pid is not None
    say(f"{plan.carried_connections} connections at rest: {path.name}")
    descriptors = open_descriptors(path.pid)
    opened = load.ask(do="idle", target=asdict(path.target), count=plan.carried_connections)
    sample = _drive(plan, Workload("", Load("produce", connections=10)), path, load)
    resident = resident_bytes(path.pid)
    load.ask(do="close_idle")
    _wait_closed(path.pid, descriptors, plan.settle_s)
    return CarriedFigure(path.name, opened["open"], opened["refused"], resident, sample)


def _wait_closed(pid: int, descriptors: int, settle_s: float) -> None:
    """Wait until another process has noticed that its connections are closed, and has had time to tidy up."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while open_descriptors(pid) > descriptors and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(settle_s)


# ---- paths ----


def _certificate(directory: FilePath) -> tuple[str, str]:
    authority = Authority(directory)
    authority.create()
    return str(authority.issue("proxy")), str(authority.ca_file)


def _canned_paths(plan: Plan, stack: ExitStack, certificate: str | None, ca_file: str | None) -> list[Path]:
    topic = "bench"
    broker = stack.enter_context(Child("isthmus_bench.canned_broker", topic))
    address = f"127.0.0.1:{broker.port}"
    kinds = {
        RELAY: ("isthmus_bench.relay", ()),
        NO_PLUGINS: ("isthmus_bench.bare_proxy", ()),
        PROXY: ("isthmus_bench.bare_proxy", ("--plugins",)),
        HOOK: ("isthmus_bench.bare_proxy", ("--plugins", "--hook")),
    }
    paths = [Path(DIRECT, Target("127.0.0.1", broker.port, topic), None, topic)]
    for tls in (None, certificate) if certificate else (None,):
        more = ("--certificate", tls) if tls else ()
        for name, (module, arguments) in kinds.items():
            if tls and name == HOOK:
                continue
            child = stack.enter_context(Child(module, address, *arguments, *more))
            target = Target("127.0.0.1", child.port, topic, ca_file if tls else None)
            paths.append(Path(name + TLS if tls else name, target, child.pid, topic))
    for number, checkout in enumerate(plan.beside, start=1):
        for name in (PROXY, HOOK):
            module, arguments = kinds[name]
            child = stack.enter_context(Child(module, address, *arguments, code=checkout))
            target = Target("127.0.0.1", child.port, topic)
            paths.append(Path(f"{name} of {checkout.name} ({number})", target, child.pid, topic, beside=name))
    return paths


def _canned_list_paths(plan: Plan, stack: ExitStack) -> list[Path]:
    """A broker of its own: one that lists so many topics does so whenever it is asked for one."""
    topic = "bench"
    broker = stack.enter_context(Child("isthmus_bench.canned_broker", topic, "--listed", str(plan.listed_topics)))
    address = f"127.0.0.1:{broker.port}"
    relay = stack.enter_context(Child("isthmus_bench.relay", address))
    proxy = stack.enter_context(Child("isthmus_bench.bare_proxy", address, "--plugins"))
    return [
        Path(name, Target("127.0.0.1", child.port, topic), None if child is broker else child.pid, topic)
        for name, child in ((DIRECT, broker), (RELAY, relay), (PROXY, proxy))
    ]


def _real_paths(
    plan: Plan, stack: ExitStack, directory: FilePath, certificate: str | None, ca_file: str | None
) -> tuple[KafkaCluster, list[Path]]:
    proxied: list[tuple[str, Mapping[str, Mapping[str, Any]]]] = []
    for tls in (False, True) if certificate else (False,):
        listener = {"client_listener": {"tls_certfile": certificate, "tls_keyfile": certificate}} if tls else {}
        suffix = TLS if tls else ""
        proxied.append((PROXY + suffix, listener))
        proxied.append((NO_PLUGINS + suffix, {**listener, "plugins": {"enabled": []}}))
    default = ["reservation", "replication"]
    proxied.insert(1, (HOOK, {"plugins": {"enabled": [*default, produce_hook.NAME]}}))
    site = produce_hook.install(directory / "site")
    cluster = stack.enter_context(
        KafkaCluster(
            name="bench",
            version=plan.version,
            brokers=len(proxied),
            settings=BROKER_SETTINGS,
            jvm_flags=("-XX:TieredStopAtLevel=4",),
            say=lambda _: None,
        )
    )
    addresses = cluster.addresses()
    topics = {}
    for broker_id in addresses:
        topics[broker_id] = f"bench-produce-{broker_id}", f"bench-fetch-{broker_id}"
    _make_topics(cluster, topics)
    first_host, first_port = addresses[1]
    produce_topic, fetch_topic = topics[1]
    paths = [Path(DIRECT, Target(first_host, first_port, produce_topic), None, fetch_topic)]
    for suffix, tls_arguments, authority in (("", (), None), (TLS, ("--certificate", certificate or ""), ca_file)):
        if suffix and not certificate:
            continue
        relay = stack.enter_context(Child("isthmus_bench.relay", f"{first_host}:{first_port}", *tls_arguments))
        target = Target("127.0.0.1", relay.port, produce_topic, authority)
        paths.append(Path(RELAY + suffix, target, relay.pid, fetch_topic))
        for broker_id, (name, extra) in enumerate(proxied, start=1):
            if name.endswith(TLS) != bool(suffix):
                continue
            proxy = stack.enter_context(
                ProxyProcess(
                    cluster.bootstrap_servers,
                    name=f"bench-{broker_id}",
                    directory=directory,
                    broker_id=broker_id,
                    extra=extra,
                    environment={
                        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
                    },
                )
            )
            host, _, port = proxy.bootstrap.rpartition(":")
            target = Target(host, int(port), topics[broker_id][0], authority)
            paths.append(Path(name, target, proxy.pid, topics[broker_id][1]))
    return cluster, paths


def _make_topics(cluster: KafkaCluster, topics: Mapping[int, tuple[str, str]]) -> None:
    """Two topics led by each broker; the one to fetch from has records."""
    host, port = cluster.addresses()[1]
    client = RawClient(Target(host, port, ""))
    try:
        versions = newest_versions(client)
        settings = [{"name": name, "value": value} for name, value in TOPIC_SETTINGS.items()]
        wanted = [
            {
                "name": name,
                "num_partitions": -1,
                "replication_factor": -1,
                "assignments": [{"partition_index": 0, "broker_ids": [broker_id]}],
                "configs": settings,
            }
            for broker_id, names in topics.items()
            for name in names
        ]
        client.ask(ApiKey.CREATE_TOPICS, versions[ApiKey.CREATE_TOPICS], {"topics": wanted, "timeout": 30_000})
    finally:
        client.close()
    for broker_id, (produce_topic, fetch_topic) in topics.items():
        target = Target(*cluster.addresses()[broker_id], fetch_topic)
        load_module.wait_for_topic(target)
        load_module.wait_for_topic(Target(target.host, target.port, produce_topic))
        load_module.fill(target, *FETCH_RECORDS)


def _make_listed(plan: Plan, cluster: KafkaCluster, paths: Iterable[Path]) -> None:
    """Topics to list; returns when every broker that is asked lists all. Raises LoadError."""
    brokers = sorted(cluster.addresses())
    client = RawClient(Target(*cluster.addresses()[brokers[0]], ""))
    try:
        version = newest_versions(client)[ApiKey.CREATE_TOPICS]
        for first in range(0, plan.listed_topics, LISTED_AT_ONCE):
            wanted = [
                {
                    "name": f"listed-{number}",
                    "num_partitions": -1,
                    "replication_factor": -1,
                    "assignments": [
                        {"partition_index": index, "broker_ids": [brokers[(number + index) % len(brokers)]]}
                        for index in range(LISTED_PARTITIONS)
                    ],
                }
                for number in range(first, min(first + LISTED_AT_ONCE, plan.listed_topics))
            ]
            client.ask(ApiKey.CREATE_TOPICS, version, {"topics": wanted, "timeout": 60_000})
    finally:
        client.close()
    for path in paths:
        load_module.wait_for_topics(path.target, plan.listed_topics)
