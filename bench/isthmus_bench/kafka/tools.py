"""Kafka's own command line tools, without its shell scripts."""

from __future__ import annotations

import subprocess
from typing import Final, NamedTuple

from isthmus_bench.kafka.archive import prepare
from isthmus_bench.kafka.catalogue import main_class
from isthmus_bench.kafka.errors import EmbeddedKafkaError

TOOL_TIMEOUT_S: Final = 120.0


class JavaTool(NamedTuple):
    """How to start a tool: append its arguments to ``argv``."""

    argv: list[str]
    env: dict[str, str]


class ToolFailed(EmbeddedKafkaError):
    """A tool ended with an exit status other than 0."""

    def __init__(self, name: str, done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        self.returncode: int = done.returncode
        self.stdout: str = done.stdout
        self.stderr: str = done.stderr


def java_tool(version: str, name: str, *, heap_mb: int = 256) -> JavaTool:
    """Command line and environment of a tool of one Kafka version: ``kafka-topics``, or a main class.

    Raises EmbeddedKafkaError.
    """
    distribution = prepare(version)
    return JavaTool(
        distribution.command(main_class(distribution, name), [], heap_mb=heap_mb), distribution.environment()
    )


def run_tool(
    version: str,
    name: str,
    *arguments: str,
    stdin: str = "",
    timeout_s: float = TOOL_TIMEOUT_S,
    check: bool = True,
    heap_mb: int = 256,
) -> subprocess.CompletedProcess[str]:
    """Run a tool to its end. Raises ToolFailed (unless not ``check``), and subprocess.TimeoutExpired."""
    tool = java_tool(version, name, heap_mb=heap_mb)
    done = subprocess.run(
        [*tool.argv, *arguments], env=tool.env, input=stdin, capture_output=True, text=True, timeout=timeout_s
    )
    if check and done.returncode != 0:
        raise ToolFailed(name, done)
    return done
