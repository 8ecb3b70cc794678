"""What capture costs: the same proxy with its traffic captured and without, in turns, under an open loop.

Small Produce requests at a steady rate: what is captured is one event each. A proxy that is asked as fast as it can
answer takes all that the machine has, and is slowed down by whatever else runs there, the process that writes events
too; at a steady rate that shows as what it is, a longer tail.

CPU time is taken while the proxy has a core to itself, and what else runs has the others. Where cores are shared, a
process takes a twentieth more or less from one run to the next, by what it finds in caches: that is more than what an
event costs. Other connections change it, too: capture goes on and off while the same ones send. The tail is taken while
all share all cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any, Final, TypeVar

from isthmus_bench.affinity import children_of, core_of_its_own
from isthmus_bench.awake import cores_awake
from isthmus_bench.children import Child, ChildFailed, cpu_seconds
from isthmus_bench.command import machine
from isthmus_bench.compilers import COMPILING_MAX, Compilers
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.load import Target, wait_for_topic
from isthmus_bench.proxies import ProxyProcess
from isthmus_bench.sync_environment import HEAP_MB, JVM_FLAGS, create_topic
from isthmus_bench.sync_figures import Verdict
from isthmus_bench.sync_load import Shape
from isthmus_bench.sync_report import verdict_rows
from isthmus_bench.tables import Table, number
from isthmus_plugins.capture.files import OPEN, SEALED

Say = Callable[[str], None]
R = TypeVar("R")

PREFIX: Final = "captured-"
TOPIC: Final = f"{PREFIX}orders"
CPU_US_MAX: Final = 2.0
TAIL_RATIO_MAX: Final = 1.1
WARM_MAX: Final = 12
SWITCHES_S: Final = (4.0, 16.0, 64.0)
"""So long it may take until capture is on or off, and the process that writes events has written some; longer when that
was not enough. That process gives way to everybody, so where cores are busy it takes seconds to start, which costs more
than what it does later."""
POLL_S: Final = 0.05
SLICE_S: Final = 0.25
"""CPU time is taken of so long at a time: a machine that is shared takes the core away now and then, and that counts as
time of whoever had it. Some hand-overs of notes are in each."""


@dataclass(frozen=True, slots=True)
class Plan:
    rate: int = 2_000
    rounds: int = 8
    seconds: float = 3.0
    """Of CPU time, with capture and without."""
    tail_s: float = 6.0
    """Of the tail, with capture and without."""
    settle_s: float = 1.0
    """Of requests that do not count, each time."""
    connections: int = 10
    record_bytes: int = 100
    warm_max: int = WARM_MAX
    """Runs of so long before the first round at most, until the broker's compilers are done."""
    awake: bool = True
    """Whether cores are kept from sleeping."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one proxy takes, and what its clients see."""

    cpu_us: float
    """Of the proxy's process, a request: the median of slices (:data:`SLICE_S`), on a core of its own."""
    p50_us: float
    p99_us: float
    p999_us: tuple[float, ...]
    """Of each second: a stall of the machine is in one of them, and in a p99.9 of all."""


@dataclass(frozen=True, slots=True)
class Report:
    machine: dict[str, str]
    rate: int
    off: list[Sample]
    on: list[Sample]
    """After the one of ``off`` in the same place, or before it."""
    captured_bytes: int
    verdicts: list[Verdict]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(plan: Plan, say: Say) -> Report:
    """Measure. Raises ChildFailed, EmbeddedKafkaError, LoadError, ProxyFailed."""
    with cores_awake() if plan.awake else nullcontext("asleep") as idle_cores, ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="isthmus-bench-")))
        say("starting a broker and a proxy")
        cluster = stack.enter_context(
            KafkaCluster(name="bench", heap_mb=HEAP_MB, jvm_flags=JVM_FLAGS, say=lambda _: None)
        )
        create_topic(Target(*cluster.addresses()[1], TOPIC), 1, (1,))
        extra: dict[str, dict[str, Any]] = {
            "plugins": {"enabled": ["reservation", "replication", "capture"]},
            "data": {"directory": str(directory / "data")},
        }
        proxy = stack.enter_context(
            ProxyProcess(cluster.bootstrap_servers, name="bench", directory=directory, broker_id=1, extra=extra)
        )
        proxy.cli("namespace", "create", PREFIX)
        generator = stack.enter_context(Child("isthmus_bench.sync_load"))
        measured = Measured(plan, proxy, directory / "data", generator, cluster.pids)
        measured.warm_up(Compilers(cluster.pids), say)
        samples: tuple[list[Sample], list[Sample]] = ([], [])
        for each in range(plan.rounds):
            say(f"round {each + 1} of {plan.rounds}")
            for on, sample in measured.round(each % 2 == 1).items():
                samples[on].append(sample)
        measured.capture(False)  # files are sealed
        captured = sum(file.stat().st_size for file in (directory / "data").rglob(f"*{SEALED}"))
        if not captured:
            raise ChildFailed("nothing was captured")
    return Report({**machine(), "idle cores": idle_cores}, plan.rate, *samples, captured, verdicts_of(*samples))


class _TooLate(Exception):
    """Capture was not on or off in time. Requests still come."""


class Measured:
    """One proxy, whose traffic is captured or not."""

    def __init__(
        self, plan: Plan, proxy: ProxyProcess, data: Path, generator: Child, broker_pids: Sequence[int]
    ) -> None:
        """``data``: the proxy's directory."""
        self._broker_pids = broker_pids
        self._data = data
        self._plan = plan
        self._proxy = proxy
        self._generator = generator
        self._captured = False
        host, _, port = proxy.bootstrap.rpartition(":")
        self._target = Target(host, int(port), TOPIC)
        wait_for_topic(self._target)

    def capture(self, on: bool) -> None:
        """Returns when the proxy acts on it."""
        if on is not self._captured:
            self._proxy.cli("plugin", "enable" if on else "disable", "capture", "--namespace", PREFIX)
            self._captured = on

    def warm_up(self, compilers: Compilers, say: Say) -> None:
        """With capture, until the broker has compiled what handles requests."""
        self.capture(True)
        for _ in range(self._plan.warm_max):
            say("warming up")
            self._load(self._plan.seconds)
            self._generator.read()
            if compilers.share() <= COMPILING_MAX:
                break

    def round(self, first: bool) -> dict[bool, Sample]:
        """With capture and without: which is ``first`` changes, and each pair is taken from the same requests."""
        order = (first, not first)
        cpu_us = self._cpu_us(order)
        tails = {on: self._tail(on) for on in reversed(order)}
        return {on: Sample(cpu_us[on], *tails[on]) for on in order}

    def _cpu_us(self, order: Sequence[bool]) -> dict[bool, float]:
        return self._in_time(lambda switch_s: self._cpu_us_within(order, switch_s))

    def _in_time(self, measure: Callable[[float], R]) -> R:
        """What is measured under requests that come until capture is on or off. Raises ChildFailed."""
        for switch_s in SWITCHES_S:
            try:
                return measure(switch_s)
            except _TooLate:
                self._generator.read()
        raise ChildFailed(f"capture was not on and off within {SWITCHES_S[-1]:.0f} s each: lower the rate")

    def _cpu_us_within(self, order: Sequence[bool], switch_s: float) -> dict[bool, float]:
        """Raises _TooLate."""
        plan, found = self._plan, {}
        seconds = len(order) * (switch_s + plan.settle_s + plan.seconds)
        end = monotonic() + plan.settle_s + seconds
        self._load(seconds)
        for on in order:
            self._switch(on, switch_s)
            with core_of_its_own(self._proxy.pid, self._others()):
                sleep(plan.settle_s)
                found[on] = statistics.median(self._slices()) / plan.rate * 1e6
        if monotonic() > end:
            raise _TooLate
        self._generator.read()
        return found

    def _tail(self, on: bool) -> tuple[float, float, tuple[float, ...]]:
        """p50, p99 and the p99.9 of each second, us."""
        if on is not self._captured:
            self._in_time(lambda switch_s: self._switched_within(on, switch_s))
        self._load(self._plan.tail_s)
        said = self._generator.read()
        return said["p50_ms"] * 1000, said["p99_ms"] * 1000, tuple(each * 1000 for each in said["p999_each_s_ms"])

    def _switched_within(self, on: bool, switch_s: float) -> None:
        """Raises _TooLate."""
        self._load(switch_s)
        self._switch(on, switch_s)
        self._generator.read()

    def _others(self) -> list[int]:
        """What shares the machine with the proxy: the process that writes its events, too."""
        return [*self._broker_pids, self._generator.pid, *children_of(self._proxy.pid)]

    def _slices(self) -> Iterator[float]:
        """The cores that the proxy takes, slice by slice while requests come."""
        count = max(1, int(self._plan.seconds / SLICE_S))
        before, begun = cpu_seconds(self._proxy.pid), monotonic()
        for _ in range(count):
            sleep(min(SLICE_S, self._plan.seconds))
            used, now = cpu_seconds(self._proxy.pid), monotonic()
            yield (used - before) / (now - begun)
            before, begun = used, now

    def _switch(self, on: bool, switch_s: float) -> None:
        """Returns when events are written, or none are any more. Raises _TooLate."""
        self.capture(on)
        if not on:
            return
        deadline = monotonic() + switch_s
        while not any(file.stat().st_size for file in self._data.rglob(f"*{OPEN}")):
            if monotonic() > deadline:
                raise _TooLate
            sleep(POLL_S)

    def _load(self, seconds: float) -> None:
        """Requests come from now on; what became of them is read from the generator when all are answered."""
        plan = self._plan
        shape = Shape(
            rate=plan.rate,
            connections=plan.connections,
            record_bytes=plan.record_bytes,
            warmup_s=plan.settle_s,
            seconds=seconds,
        )
        self._generator.tell(do="open", target=asdict(self._target), shape=asdict(shape), pids={})


def verdicts_of(off: Sequence[Sample], on: Sequence[Sample]) -> list[Verdict]:
    """What was added is taken round by round: what else the machine does changes from one to the next."""
    added = statistics.median(each.cpu_us - without.cpu_us for without, each in zip(off, on, strict=True))
    tail = _p999_us(on) / _p999_us(off)
    return [
        Verdict("CPU added for an event, us", CPU_US_MAX, added, added <= CPU_US_MAX),
        Verdict("p99.9 with capture against without", TAIL_RATIO_MAX, tail, tail <= TAIL_RATIO_MAX),
    ]


def _p999_us(samples: Sequence[Sample]) -> float:
    return statistics.median(second for each in samples for second in each.p999_us)


def headline(report: Report) -> str:
    """What was measured on what, in one line."""
    host = report.machine
    return (
        f"{report.rate:,} Produce requests/s of 100 bytes, medians of {len(report.on)} rounds, "
        f"{report.captured_bytes / 1e6:.1f} MB captured; "
        f"{host['cores']} cores ({host['idle cores']} when idle), {host['processor']}, Python {host['Python']}"
    )


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    heads = ["", "CPU us a request", "p50 us", "p99 us", "p99.9 of a second, us"]
    rows = []
    for name, samples in (("without capture", report.off), ("with capture", report.on)):
        cpu_us, p50_us, p99_us = (statistics.median(getattr(each, field) for each in samples) for field in _FIELDS)
        rows.append([name, number(cpu_us, 1), *(number(each, 0) for each in (p50_us, p99_us, _p999_us(samples)))])
    yield "One proxy", heads, rows
    yield "Targets", ["target", "limit", "measured", "met"], verdict_rows(report.verdicts)


_FIELDS: Final = ("cpu_us", "p50_us", "p99_us")
