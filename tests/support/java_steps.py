"""Java programs for what Kafka's tools do not do: transactions step by step, records for as long as it takes; and
classes that brokers load.
"""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from isthmus_bench.kafka.archive import prepare
from support.step_processes import StepProcess

_PROGRAMS: Final = Path(__file__).parent / "java"
_CLIENTS: Final = ("ConsumerStream", "ProducerStream", "TransactionSteps")


def java_compiles(version: str) -> bool:
    """Whether programs can be compiled here; some Java comes without its compiler."""
    return prepare(version).java.compiles


def compiled(version: str, directory: Path, *programs: str) -> Path:
    """Compile programs of ``support/java`` on the classes of a Kafka version, into ``directory``.

    ClusterSpec's ``classes`` may name it, where brokers are to load them.
    """
    distribution = prepare(version)
    compiler = distribution.java.executable.resolve().with_name("javac")
    arguments = [compiler, "-d", directory, *(_PROGRAMS / f"{program}.java" for program in programs)]
    subprocess.run(list(map(str, arguments)), env=distribution.environment(), check=True, timeout=120)
    return directory


@cache
def _clients(version: str) -> Path:
    """Clients' classes, once for all that start: to compile takes Java longer than all else that a start does."""
    directory = TemporaryDirectory(prefix="isthmus-clients-")
    atexit.register(directory.cleanup)
    return compiled(version, Path(directory.name), *_CLIENTS)


def spawn(version: str, program: str, arguments: Sequence[str], settings: dict[str, str]) -> subprocess.Popen[str]:
    """Start a client of ``support/java``, on the classes of a Kafka version. ``settings`` may have _ for dots."""
    distribution = prepare(version)
    chosen = [f"{name.replace('_', '.')}={value}" for name, value in settings.items()]
    return subprocess.Popen(
        distribution.command(program, [*arguments, *chosen]),
        env=distribution.environment((_clients(version),)),
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
        super().__init__(spawn(version, "TransactionSteps", (), settings))
