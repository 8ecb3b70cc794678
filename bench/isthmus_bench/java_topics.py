"""A Java AdminClient that creates and deletes many topics: what a link that has to make them is compared with."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from isthmus_bench.kafka import EmbeddedKafkaError
from isthmus_bench.kafka.archive import prepare

_PROGRAM: Final = Path(__file__).with_name("CreateTopics.java")


class JavaTopics:
    """One client of a Kafka version, at one cluster. Its program is compiled as it starts, which takes a JDK."""

    def __init__(self, version: str, bootstrap_servers: str, partitions: int, at_once: int) -> None:
        """``at_once``: topics in one request. Raises EmbeddedKafkaError."""
        distribution = prepare(version)
        if not distribution.java.compiles:
            raise EmbeddedKafkaError(
                f"{distribution.java.executable} has no compiler, which the AdminClient that links are compared "
                "with needs: install a JDK, and set JAVA_HOME to it"
            )
        arguments = [bootstrap_servers, str(partitions), str(at_once)]
        self._process = subprocess.Popen(
            distribution.command(str(_PROGRAM), arguments),
            env=distribution.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def create(self, prefix: str, count: int, settings: Mapping[str, str]) -> float:
        """Create the topics ``prefix`` + 0, 1, ...; the seconds until all have leaders. Raises EmbeddedKafkaError."""
        return self._ask("create", prefix, str(count), *(f"{name}={value}" for name, value in settings.items()))

    def delete(self, prefix: str, count: int) -> float:
        """Delete them; the seconds until no broker lists them. Raises EmbeddedKafkaError."""
        return self._ask("delete", prefix, str(count))

    def _ask(self, *words: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline().strip()
        if not said:
            raise EmbeddedKafkaError(f"the AdminClient ended:\n{self._process.stderr.read()[-3000:]}")
        return int(said) / 1000

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
