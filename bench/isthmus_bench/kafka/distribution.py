"""A Kafka version that is ready to run: jars, Java, and how to start a main class with them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isthmus_bench.kafka.jars import Say, kafka_home, parse_version, resolve_jars, say_on_stderr
from isthmus_bench.kafka.java import Java, find_java

_HERE: Final = Path(__file__).parent

# Started in one second instead of two: the optimizing compiler pays only for processes that live long.
_QUICK: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

# Files that a killed JVM leaves in /tmp; endless misery after an OutOfMemoryError.
_TIDY: Final = ("-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true")


@dataclass(frozen=True)
class Distribution:
    version: str
    java: Java
    jars: tuple[Path, ...]
    archive: Path | None = None
    """Class data archive for this Java and these jars: halves the time to start."""

    @property
    def home(self) -> Path:
        """Where things prepared for this version and Java are kept."""
        return kafka_home(self.version) / self.java.build

    @property
    def template(self) -> Path:
        """A ``bootstrap.checkpoint`` as this version's storage tool writes it, without users or chosen features."""
        return self.home / "bootstrap.checkpoint"

    @property
    def module_flags(self) -> list[str]:
        """They must be the same when an archive is made and when it is used."""
        # Compression codecs are native code: no warning.
        return ["--enable-native-access=ALL-UNNAMED"] if self.java.major >= 24 else []

    def command(
        self,
        main: str,
        arguments: Sequence[str],
        *,
        heap_mb: int = 256,
        flags: Sequence[str] = (),
        log_level: str = "warn",
    ) -> list[str]:
        """The command line that runs a main class; it needs ``environment()``."""
        command = [str(self.java.executable), f"-Xmx{heap_mb}m", *_QUICK, *_TIDY]
        if self.archive is not None:
            # An archive that does not fit is not used, and nobody needs to hear of it.
            command += [f"-XX:SharedArchiveFile={self.archive}", "-Xlog:disable"]
        if parse_version(self.version)[0] >= 4:
            command += [f"-Dlog4j2.configurationFile={_HERE / 'log4j2.properties'}", "-Dlog4j2.disableJmx=true"]
        else:
            command.append(f"-Dlog4j.configuration={(_HERE / 'log4j.properties').as_uri()}")
        return [*command, *self.module_flags, f"-Disthmus.log.level={log_level}", *flags, main, *arguments]

    def environment(self, classes: Iterable[Path] = ()) -> dict[str, str]:
        """Ours, with the class path, which is too long for lists of processes; ``classes`` come last in it."""
        environment = {key: value for key, value in os.environ.items() if not _foreign(key)}
        environment["CLASSPATH"] = os.pathsep.join(map(str, (*self.jars, *classes)))
        return environment


def _foreign(key: str) -> bool:
    """Settings for another Kafka on this machine."""
    return key == "CLASSPATH" or key.startswith("KAFKA_")


def unprepared(version: str, say: Say = say_on_stderr) -> Distribution:
    """The distribution as downloaded. Raises EmbeddedKafkaError."""
    parse_version(version)
    java = find_java()
    return Distribution(version, java, tuple(resolve_jars(version, say)))


def properties_file(path: Path, text: str) -> Path:
    """Write settings that may hold passwords: nobody else may read them."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="latin-1") as file:
        file.write(text)
    return path
