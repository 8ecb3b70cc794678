"""Java programs for what Kafka's tools do not do: transactions step by step, records for as long as it takes; and
classes that brokers load.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from isthmus_bench.kafka.archive import prepare
from support.step_processes import StepProcess, end

_PROGRAMS: Final = Path(__file__).parent / "java"
STREAM_ENDS_S: Final = 150.0
"""Its producer may have to wait for acks."""


def java_compiles(version: str) -> bool:
    """Whether Java here runs programs from their source; one that comes without its compiler does not."""
    return prepare(version).java.compiles


def broker_classes(version: str, program: str, directory: Path) -> Path:
    """Compile classes that brokers of a version load, into ``directory``, which ClusterSpec's ``classes`` may name."""
    distribution = prepare(version)
    compiler = distribution.java.executable.resolve().with_name("javac")
    arguments = [compiler, "-d", directory, _PROGRAMS / program]
    subprocess.run(list(map(str, arguments)), env=distribution.environment(), check=True, timeout=120)
    return directory


def spawn(version: str, program: str, arguments: Sequence[str], settings: dict[str, str]) -> subprocess.Popen[str]:
    """Start a program of ``support/java``, on the classes of a Kafka version. ``settings`` may have _ for dots."""
    distribution = prepare(version)
    chosen = [f"{name.replace('_', '.')}={value}" for name, value in settings.items()]
    return subprocess.Popen(
        distribution.command(str(_PROGRAMS / program), [*arguments, *chosen]),
        env=distribution.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class TransactionSteps(StepProcess):
    """A transactional producer of a Kafka version. ``settings`` are Java's, with underscores for dots.

    It is asked for ``init``, ``begin``, ``send TOPIC VALUE`` (to partition 0), ``commit`` and ``abort``, and says
    ``done``, or the error.
    """

    def __init__(self, version: str, **settings: str) -> None:
        super().__init__(spawn(version, "TransactionSteps.java", (), settings))


class ProducerStream:
    """An idempotent producer of a Kafka version that writes to partition 0, until it is left. Settings as above."""

    def __init__(self, version: str, topic: str, **settings: str) -> None:
        self._process = spawn(version, "ProducerStream.java", (topic,), settings)
        self._reader = threading.Thread(target=self._read)
        self.acked: dict[bytes, int] = {}
        """Offset by value."""
        self.failed: list[str] = []
        """Value and exception."""

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            value, _, result = line.strip().partition(" ")
            if result.isdigit():
                self.acked[value.encode()] = int(result)
            else:
                self.failed.append(line.strip())

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("end\n")
        end(self._process, STREAM_ENDS_S)
        self._reader.join()
        self._process.stdout.close()
