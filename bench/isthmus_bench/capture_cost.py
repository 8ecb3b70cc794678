"""What capture costs: the same proxy with its traffic captured and without, in turns, under an open loop.

Small Produce requests at a steady rate: what is captured is one event each. A proxy that is asked as fast as it can
answer takes all that the machine has, and is slowed down by whatever else runs there, the process that writes events
too; at a steady rate that shows as what it is, a longer tail.

CPU time is taken while the proxy has a core to itself, and what else runs has the others. Where cores are shared, a
process takes a twentieth more or less from one run to the next, by what it finds in caches: that is more than what an
event costs. The tail is taken while all share all cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any, Final

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

Say = Callable[[str], None]

PREFIX: Final = "captured-"
TOPIC: Final = f"{PREFIX}orders"
CPU_US_MAX: Final = 2.0
TAIL_RATIO_MAX: Final = 1.1
WARM_MAX: Final = 12
SLICE_S: Final = 0.25
"""CPU time is taken of so long at a time: a machine that is shared takes the core away now and then, and that counts as
time of whoever had it. Some hand-overs of notes are in each."""


@dataclass(frozen=True, slots=True)
class Plan:
    rate: int = 2_000
    rounds: int = 10
    seconds: float = 3.0
    settle_s: float = 1.5
    """Of requests that do not count: the process that writes events has started then."""
    connections: int = 10
    record_bytes: int = 100
    warm_max: int = WARM_MAX
    """Runs of so long before the first round at most, until the broker's compilers are done."""
    awake: bool = True
    """Whether cores are kept from sleeping."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Two runs: one for CPU time, one for what clients see."""

    cpu_us: float
    """Of the proxy's process, a request: the median of slices (:data:`SLICE_S`), on a core of its own."""
    p50_us: float
    p99_us: float
    p999_us: float


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
        measured = Measured(plan, proxy, stack.enter_context(Child("isthmus_bench.sync_load")), cluster.pids)
        measured.warm_up(Compilers(cluster.pids), say)
        samples: tuple[list[Sample], list[Sample]] = ([], [])
        for each in range(plan.rounds):
            say(f"round {each + 1} of {plan.rounds}")
            for on in (False, True) if each % 2 == 0 else (True, False):
                samples[on].append(measured.sample(on))
        measured.capture(False)  # files are sealed
        captured = sum(file.stat().st_size for file in (directory / "data").rglob("*.capture"))
        if not captured:
            raise ChildFailed("nothing was captured")
    return Report({**machine(), "idle cores": idle_cores}, plan.rate, *samples, captured, verdicts_of(*samples))


class Measured:
    """One proxy, whose traffic is captured or not."""

    def __init__(self, plan: Plan, proxy: ProxyProcess, generator: Child, broker_pids: Sequence[int]) -> None:
        self._broker_pids = broker_pids
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
            self._start()
            self._generator.read()
            if compilers.share() <= COMPILING_MAX:
                break

    def sample(self, on: bool) -> Sample:
        self.capture(on)
        self._start()
        sleep(self._plan.settle_s)
        with core_of_its_own(self._proxy.pid, self._others()):
            cpu_us = statistics.median(self._slices()) / self._plan.rate * 1e6
            self._generator.read()
        self._start()
        said = self._generator.read()
        return Sample(cpu_us, *(said[f"{name}_ms"] * 1000 for name in ("p50", "p99", "p999")))

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

    def _start(self) -> None:
        """Requests begin to come; what became of them is read from the generator when all are answered."""
        plan = self._plan
        shape = Shape(
            rate=plan.rate,
            connections=plan.connections,
            record_bytes=plan.record_bytes,
            warmup_s=plan.settle_s,
            seconds=plan.seconds,
        )
        self._generator.tell(do="open", target=asdict(self._target), shape=asdict(shape), pids={})


def verdicts_of(off: Sequence[Sample], on: Sequence[Sample]) -> list[Verdict]:
    """What was added is taken round by round: what else the machine does changes from one to the next."""
    added = statistics.median(each.cpu_us - without.cpu_us for without, each in zip(off, on, strict=True))
    tail = statistics.median(each.p999_us for each in on) / statistics.median(each.p999_us for each in off)
    return [
        Verdict("CPU added for an event, us", CPU_US_MAX, added, added <= CPU_US_MAX),
        Verdict("p99.9 with capture against without", TAIL_RATIO_MAX, tail, tail <= TAIL_RATIO_MAX),
    ]


def headline(report: Report) -> str:
    """What was measured on what, in one line."""
    told = report.machine
    return (
        f"{report.rate:,} Produce requests/s of 100 bytes, medians of {len(report.on)} rounds, "
        f"{report.captured_bytes / 1e6:.1f} MB captured; "
        f"{told['cores']} cores ({told['idle cores']} when idle), {told['processor']}, Python {told['Python']}"
    )


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    heads = ["", "CPU us a request", "p50 us", "p99 us", "p99.9 us"]
    rows = []
    for name, samples in (("without capture", report.off), ("with capture", report.on)):
        medians = [statistics.median(getattr(each, field) for each in samples) for field in _FIELDS]
        rows.append([name, number(medians[0], 1), *(number(each, 0) for each in medians[1:])])
    yield "One proxy", heads, rows
    yield "Targets", ["target", "limit", "measured", "met"], verdict_rows(report.verdicts)


_FIELDS: Final = ("cpu_us", "p50_us", "p99_us", "p999_us")
