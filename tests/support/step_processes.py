"""Processes that are told what to do on their standard input, and end when that does."""

from __future__ import annotations

import subprocess
from types import TracebackType
from typing import Final, Self

STEPS_END_S: Final = 30.0


class StepProcess:
    """A process, with pipes, that says one line to each that it is told. It has ended when the block has."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, command: str) -> str:
        """What it says to a line; empty: it has ended."""
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
        assert self._process.stdout is not None
        end(self._process, STEPS_END_S)
        self._process.stdout.close()


def end(process: subprocess.Popen[str], within_s: float) -> None:
    """Close its standard input, and kill it where it has not ended in time."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
