"""Pages whose blocks a reader pastes into one bash, one after the other: done as it stands there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from isthmus_bench.kafka import ports
from isthmus_bench.kafka.processes import kill_marked, marked

HOST: Final = "127.0.0.1"
EPHEMERAL_FROM: Final = 32768
"""Ports that outgoing connections are given: one of them may be taken."""
PORT: Final = re.compile(r"(?<=127\.0\.0\.1:)\d{5}|(?<=port )\d{5}")
PORTS_OF_CLIENTS: Final = 3
"""Of a proxy in front of a cluster of one broker, one after the other."""


def blocks_of(text: str) -> list[str]:
    """The blocks of a part of a page, each as it is copied."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert text.count("```") == 2 * len(blocks), "a block is not marked as bash, and would not be tried"
    return blocks


@contextmanager
def free_ports(text: str, clients: Sequence[int]) -> Iterator[dict[str, str]]:
    """Ports that nobody has, for those that a page names. ``clients``: where those of proxies begin."""
    named = {int(port) for port in PORT.findall(text)}
    assert named >= {*clients}
    assert max(named) < EPHEMERAL_FROM
    of_clients = {first + number for first in clients for number in range(PORTS_OF_CLIENTS)}
    runs = dict.fromkeys(clients, PORTS_OF_CLIENTS) | dict.fromkeys(named - of_clients, 1)
    picked = {first: ports.pick_run(HOST, count) for first, count in runs.items()}
    try:
        yield {str(first + number): str(port) for first, run in picked.items() for number, port in enumerate(run)}
    finally:
        ports.release([port for run in picked.values() for port in run])


class Shell:
    """One bash in a directory, that ends at the first command that fails, and whatever it has started with it.

    ``chosen``: ports in place of those that the blocks name. ``clusters``: directories of those that they start.
    ``timeout_s``: of one block.
    """

    def __init__(
        self,
        directory: Path,
        chosen: Mapping[str, str],
        clusters: Sequence[Path],
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._block = directory / "pasted.sh"
        self._chosen = chosen
        self._clusters = clusters
        self._timeout_s = timeout_s
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=directory,
            env={**environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        self._bash.communicate()
        left = [process.pid for cluster in self._clusters for process in marked(cluster)]
        for cluster in self._clusters:
            kill_marked(cluster)
        if error is None:
            assert not left, "brokers go on"

    def paste(self, block: str) -> str:
        """What it prints. Raises AssertionError where a command fails, or it takes too long."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        end = "=== end of block\n"
        self._block.write_text(PORT.sub(lambda found: self._chosen[found[0]], block))
        late = threading.Timer(self._timeout_s, self._kill)
        late.start()
        try:
            # What runs in it must not read what is pasted next.
            self._bash.stdin.write(f"set -e; . {self._block} </dev/null; echo '{end.strip()}'\n")
            self._bash.stdin.flush()
            said = ""
            while line := self._bash.stdout.readline():
                if line == end:
                    return said
                said += line
        finally:
            late.cancel()
        raise AssertionError(f"{block}\nended with {self._bash.wait()}:\n{said}")

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
