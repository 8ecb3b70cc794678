"""What an ack costs that means "both sites have it", measured beside what else there is, over a WAN, in one run.

For each round trip of the WAN (:mod:`isthmus_bench.wan`) and each round, *environments* are started one after the
other: two clusters of a broker each, with a proxy in front of each and a link over the WAN between the proxies; or one
*stretched* cluster, whose brokers talk to each other over the WAN only. Clients and the leaders of all partitions are
in the first site, and so are the coordinators that are used. In an environment, every *load* goes through each of its
*scenarios* in turn.

Everything is real: brokers, proxies, TCP over the WAN. Each site has half of the machine's cores, as a machine of its
own: left to the kernel, both sites' threads would follow each other over all cores, and find the other site's data in
the caches. What else is on this machine is shared by all of it: CPU shares stand in the report.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Any, Final

from isthmus_bench.affinity import run_on, started_on, two_sites
from isthmus_bench.awake import cores_awake
from isthmus_bench.children import Child, ChildFailed
from isthmus_bench.command import python_build
from isthmus_bench.compilers import COMPILING_MAX, Compilers
from isthmus_bench.kafka import ToolFailed, run_tool
from isthmus_bench.kafka.jars import parse_version
from isthmus_bench.proxies import ProxyFailed
from isthmus_bench.sync_environment import Environment, prefix_of
from isthmus_bench.sync_figures import Figure, Missing, Report, WanFigure, figure_of, verdicts_of
from isthmus_bench.sync_load import COORDINATED, Shape
from isthmus_bench.sync_plan import LOADS, RECORD_BYTES, SCENARIOS, Load, Plan, Scenario, connections_for
from isthmus_bench.wan import RoundTrips, Wan

Say = Callable[[str], None]

PROBES: Final = 100
"""Exchanges over the WAN that its round trip is measured by."""
WARMUP_PER_S: Final = 2000
WARMUP_CLIENTS: Final = 16
"""That use coordinators at once: one after the other, what they ask takes round trips, and compilers see too little."""
JAVA_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {"java-linger-0": ("acks=all", "linger.ms=0"), "java-stock": ()}

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
    with cores_awake() if plan.awake else nullcontext("asleep") as idle_cores:
        return _run(plan, say, idle_cores)


def _run(plan: Plan, say: Say, idle_cores: str) -> Report:
    chosen = [each for each in SCENARIOS if each.name in plan.scenarios]
    wans, figures, missing = [], [], []
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
        machine(idle_cores, plan.sites_apart),
        plan.version,
        plan.rounds,
        plan.seconds,
        wans,
        figures,
        missing,
        list(verdicts_of(figures)),
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
                self._warm_up(environment, generator, self._plan.warmed(scenarios))
                if self._plan.sites_apart:  # from now on: compilers had all cores
                    near, far = two_sites()
                    environment.place(near, far)
                    run_on(near, [generator.pid])
                    stack.enter_context(started_on(near))
                for load in self._loads:
                    for scenario in scenarios:
                        if scenario.loads is not None and load.name not in scenario.loads:
                            continue
                        self._say(f"{scenario.title}: {load.title}")
                        wan.stats()
                        self._measure(environment, generator, scenario, load)
                        self._late_us.append(wan.stats()["p99_late_us"])
            except ChildFailed as error:
                error.add_note(environment.log())
                raise

    def _warm_up(self, environment: Environment, generator: Child, scenarios: Sequence[Scenario]) -> None:
        """Send requests of each kind that is measured, until brokers have compiled what handles them.

        A broker that has run for a day answers in half the time of one that has seen 200 such requests.
        """
        compilers = Compilers(environment.brokers)
        seconds, busy = self._plan.warmup_s, ""
        for _ in range(1 + self._plan.warm_again_max):
            for scenario in scenarios:
                self._say(f"{scenario.title}: warming up{busy}")
                self._warm(environment, generator, scenario, seconds / len(scenarios))
            share = compilers.share()
            if share <= COMPILING_MAX:
                break
            seconds, busy = self._plan.warmup_s / 3, f" (compilers still take {share:.0%} of a core)"
        compilers.give_way()

    def _warm(self, environment: Environment, generator: Child, scenario: Scenario, seconds: float) -> None:
        """Each kind of request for so long."""
        connections = connections_for(WARMUP_PER_S, self._rtt_ms)
        shape = Shape(rate=WARMUP_PER_S, connections=connections, warmup_s=0, seconds=seconds)
        target = asdict(environment.target(scenario, 1))
        generator.ask(do="open", target=target, shape=asdict(shape), pids={})
        shape = Shape(connections=WARMUP_CLIENTS, warmup_s=0, seconds=seconds)
        for kind in self._plan.coordinated:
            prefix = prefix_of(scenario)
            generator.ask(do="warm", kind=kind, target=target, shape=asdict(shape), pids={}, prefix=prefix)

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
                with environment.beside(scenario.beside, shape):
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


def machine(idle_cores: str, sites_apart: bool) -> dict[str, str]:
    """What this was measured on; what its idle cores did, and whether each site had its own."""
    kernel = FilePath("/proc/sys/net")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    models = re.findall(r"^model name\s*: (.*)$", FilePath("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cores": str(os.cpu_count()),
        "idle cores": idle_cores,
        "cores of each site": " and ".join(str(len(each)) for each in two_sites()) if sites_apart else "all",
        "processor": models[0] if models else platform.machine(),
        "memory": f"{memory:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": python_build(),
        "TCP congestion control": (kernel / "ipv4/tcp_congestion_control").read_text().strip(),
        "net.core.rmem_max": (kernel / "core/rmem_max").read_text().strip(),
        "net.core.wmem_max": (kernel / "core/wmem_max").read_text().strip(),
        "load average at the end": " ".join(f"{each:.2f}" for each in os.getloadavg()),
    }
