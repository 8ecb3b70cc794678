"""A Java producer whose transactions go step by step, for what Kafka's own tools do not do: ask again for a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from isthmus_bench.kafka.archive import prepare

_PROGRAM: Final = Path(__file__).parent / "java" / "TransactionSteps.java"
_COMPILER: Final = "jdk.compiler"


def java_compiles(version: str) -> bool:
    """Whether Java here runs programs from their source; one that comes without its compiler does not."""
    java = str(prepare(version).java.executable)
    return _COMPILER in subprocess.run([java, "--list-modules"], capture_output=True, text=True, check=True).stdout


class TransactionSteps:
    """A transactional producer of a Kafka version. ``settings`` are Java's, with underscores for dots."""

    def __init__(self, version: str, **settings: str) -> None:
        distribution = prepare(version)
        chosen = [f"{name.replace('_', '.')}={value}" for name, value in settings.items()]
        self._process = subprocess.Popen(
            distribution.command(str(_PROGRAM), chosen),
            env=distribution.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str) -> str:
        """``init``, ``begin``, ``send TOPIC VALUE`` to partition 0, or ``commit``: ``done``, or the exception."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
