"""Processes that a benchmark starts beside itself: they report their port, serve, and end with their starter.

A child writes one line of JSON on its standard output when it is ready, and ends when its standard input does, so
nothing is left behind, however its starter ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

END_TIMEOUT_S: Final = 10.0
_CPU_CLOCK: Final = 2
"""CPUCLOCK_SCHED of a whole process, in the way Linux numbers the clocks of other processes."""


class ChildFailed(Exception):
    """A child did not start, or did not do what it was asked. The message says what it said."""


def packages_of(checkout: Path) -> list[Path]:
    """The folders of a checkout of Isthmus that packages are imported from. Raises ChildFailed where it has none."""
    folders = sorted({each.parent.parent for each in checkout.resolve().glob("*/isthmus*/__init__.py")})
    if not folders:
        raise ChildFailed(f"{checkout} is no checkout of Isthmus")
    return folders


class Child:
    """One child: a module run as a program, with arguments. ``code``: the checkout it is taken from, if another."""

    def __init__(self, module: str, *arguments: str, code: Path | None = None) -> None:
        self.module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if code is None else os.environ | {"PYTHONPATH": os.pathsep.join(map(str, packages_of(code)))},
        )
        self.said = self.read()
        """What it wrote when it was ready."""
        self.port: int = self.said.get("port", 0)

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> dict[str, Any]:
        """The next line of what it says. Raises ChildFailed where it ended or says that it failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"{self.module} ended with {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise ChildFailed(f"{self.module}: {said['error']}")
        return said

    def tell(self, **what: Any) -> None:
        """Write a line; what it says to it comes with :meth:`read`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, **what: Any) -> dict[str, Any]:
        """Write a line and read the next one."""
        self.tell(**what)
        return self.read()

    def close(self) -> None:
        """End it and wait until it is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(start: Callable[[], Awaitable[int]]) -> None:
    """A child's main part: start a server, report its port, go on until standard input ends."""
    import uvloop

    async def main() -> None:
        port = await start()
        print(json.dumps({"port": port}), flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
        await ended.wait()

    uvloop.run(main())


def server_tls(certificate: str | None) -> ssl.SSLContext | None:
    """TLS for a server from a PEM file with key and certificate; None: no TLS."""
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, user and system, all threads, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK)


def tree_cpu_seconds(pid: int) -> float:
    """CPU time of a process and all below it, those included that have ended and were waited for."""
    parents: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
        ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    total, left = 0, [pid]
    while left:
        each = left.pop()
        total += ticks.get(each, 0)
        left += parents.get(each, [])
    return total / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def open_descriptors(pid: int) -> int:
    """How many file descriptors a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
