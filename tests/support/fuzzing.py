"""Fuzzes a listener of a running proxy, at a bounded rate, and looks at what that does to the proxy and to others.

Windows of odd traffic take turns with windows in which as many connections send what real ones do. An honest client
asks in both, so that what is compared are two loads of the same machine at nearly the same time: the median of the
windows' 99th percentiles.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self

import httpx

from isthmus_bench.children import resident_bytes
from isthmus_bench.proxies import ProxyProcess
from support.mutations import Sent

SECONDS: Final = float(os.environ.get("ISTHMUS_FUZZ_S", "60"))
"""For how long, all listeners together."""
SEED: Final = int(os.environ.get("ISTHMUS_FUZZ_SEED", "1"))
MIB: Final = 1 << 20
RATE: Final = 25.0
"""Connections that are begun each second: whoever measures beside it has most of a core."""
OPEN_MAX: Final = 30
"""Connections at a time. An admin listener has 64, of which some are those that it has not seen go."""
EXCHANGE_S_MAX: Final = 8.0
WINDOW_S: Final = 0.5
ODD_WINDOWS: Final = 2
"""For each one of real traffic. All take as long: of more requests the slowest hundredth would be slower."""
ROUNDS_MIN: Final = 4
WARM_UP: Final = 0.3
"""So much of the time passes before memory is looked at: what is kept for reuse is there then."""
PAUSE_S: Final = 0.002
"""Between two requests of the honest client."""
RATIO_MAX: Final = 2.0 if SECONDS >= 300 else 4.0
"""Some windows, beside other tests, are compared less sharply than hundreds."""
FLOOR_S: Final = 0.010
"""So much more than that may pass: where a percentile is some milliseconds, one pause of the machine doubles it."""
GROWTH_BYTES_MAX: Final = 32 * MIB
"""However long it takes, beside the budget for unfinished requests."""
LINES_A_MINUTE: Final = 30
"""Of all causes for which a line a minute is written."""
BUGS: Final = ("Traceback", "task failed", "hook failed", "connection failed", "call failed")
_LINE: Final = re.compile(r"\S+ \w+ +(\S+: [^=]*?)(?: \w+=.*)?")

Doing = Callable[[], Coroutine[Any, Any, None]]
"""What a connection does, from connecting to closing. Raises OSError where the other side ends it."""


async def say(host: str, port: int, sent: Sent) -> None:
    """Connect, send it, read what is answered, and close."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        for chunk in sent.chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(sent.held_s):
                while await reader.read(64 * 1024):
                    pass
    finally:
        if sent.resets:
            writer.transport.abort()
        writer.close()


class Fuzzer:
    """A thread that begins :data:`RATE` connections a second, each of which does what ``doing`` is then."""

    def __init__(self, doing: Doing) -> None:
        self.doing = doing
        self.begun = 0
        self._open = 0
        self._over = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fuzzer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(2 * EXCHANGE_S_MAX)
        assert not self._thread.is_alive()
        if self._failed is not None and error is None:
            raise self._failed

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failed = error

    async def _main(self) -> None:
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while not self._over.is_set():
                if self._open < OPEN_MAX:
                    self._open += 1
                    self.begun += 1
                    group.create_task(self._one())
                due = max(due + 1 / RATE, time.monotonic() - 1)
                await asyncio.sleep(due - time.monotonic())

    async def _one(self) -> None:
        try:
            with contextlib.suppress(OSError):  # a timeout is one, too
                async with asyncio.timeout(EXCHANGE_S_MAX):
                    await self.doing()
        finally:
            self._open -= 1


class Watch:
    """What becomes of a proxy meanwhile."""

    def __init__(self, proxy: ProxyProcess, budget_bytes: int = 0) -> None:
        """``budget_bytes``: what unfinished requests may take together."""
        self._proxy = proxy
        self._pid = proxy.pid
        self._budget_bytes = budget_bytes
        self._began = time.monotonic()
        self._log_begins = len(proxy.log)
        self.memory: list[int] = []
        """Resident bytes: when it was warm, and at the end of each window since."""

    def look(self) -> None:
        self.memory.append(resident_bytes(self._pid))

    def lines(self) -> Counter[str]:
        """The log's lines since the beginning, by logger and event; others by what they say."""
        lines = self._proxy.log[self._log_begins :].splitlines()
        return Counter(found[1] if (found := _LINE.fullmatch(each)) else each for each in lines)

    def check(self, *uncounted: str) -> None:
        """It is there, well, and as it was. ``uncounted``: events that may have any number of lines."""
        proxy = self._proxy
        assert proxy.running
        assert proxy.pid == self._pid
        assert httpx.get(f"{proxy.url}/health/ready", trust_env=False).status_code == 200
        said = proxy.log[self._log_begins :]
        for bug in BUGS:
            assert bug not in said, said[max(0, said.index(bug) - 500) :][:5_000]
        lines = self.lines()
        print(f"log of {proxy.name}:", dict(lines))
        counted = {line: count for line, count in lines.items() if line.partition(": ")[2] not in uncounted}
        minutes = (time.monotonic() - self._began) / 60
        assert sum(counted.values()) <= LINES_A_MINUTE * (1 + minutes), counted
        grown = max(self.memory) - self.memory[0]
        assert grown < GROWTH_BYTES_MAX + self._budget_bytes, [each // MIB for each in self.memory]


def percentile_99(ask: Callable[[], None]) -> float:
    """Of the seconds that a request takes, in one window."""
    times, ends = [], time.monotonic() + WINDOW_S
    while (asked := time.monotonic()) < ends:
        ask()
        times.append(time.monotonic() - asked)
        time.sleep(PAUSE_S)
    return sorted(times)[len(times) * 99 // 100]


def fuzz(
    title: str, fuzzer: Fuzzer, odd: Doing, real: Doing, ask: Callable[[], None], watches: list[Watch], seconds: float
) -> None:
    """Have the fuzzer send both in turns for so long, and another client ``ask`` beside it.

    Raises AssertionError where that client's 99th percentile is more than :data:`RATIO_MAX` times its own.
    """
    found: dict[Doing, list[float]] = {real: [], odd: []}
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds or len(found[real]) < ROUNDS_MIN:
        for doing in (real, *[odd] * ODD_WINDOWS):
            fuzzer.doing = doing
            found[doing].append(percentile_99(ask))
        if passed >= WARM_UP * seconds:
            for each in watches:
                each.look()
    fuzzer.doing = real
    own, beside = (statistics.median(found[doing]) for doing in (real, odd))
    print(
        f"{title}: seed {SEED}, {time.monotonic() - began:.0f} s, {fuzzer.begun} connections, "
        f"p99 {own * 1000:.1f} ms beside real traffic, {beside * 1000:.1f} ms beside odd traffic; memory",
        *(
            f"{each.memory[0] / MIB:.1f} to {max(each.memory) / MIB:.1f} MiB (end {each.memory[-1] / MIB:.1f})"
            for each in watches
        ),
    )
    assert beside <= RATIO_MAX * own + FLOOR_S
