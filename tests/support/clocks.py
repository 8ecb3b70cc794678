"""Proxies and brokers whose wall clocks are apart from the machine's. What they measure takes as long as before.

A JVM that libfaketime is loaded into needs a minute to start. Kafka asks for the time in one place: brokers whose clock
is apart have a class for that of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from isthmus_bench.kafka import DEFAULT_VERSION
from isthmus_bench.kafka.archive import prepare
from support.class_files import ClassFile

HOUR_S: Final = 3600
_CLOCK: Final = "org/apache/kafka/common/utils/SystemTime.class"


def apart(seconds: int) -> dict[str, str]:
    """The environment of a proxy whose clock is so far ahead, or behind."""
    if not seconds:
        return {}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent / "clock_apart"), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "ISTHMUS_TEST_CLOCK_S": str(seconds)}


def brokers_apart(seconds: int, directory: Path, version: str = DEFAULT_VERSION) -> tuple[str, ...]:
    """The JVM flags of brokers whose clock is so far ahead, or behind; what they need is put into the directory."""
    if not seconds:
        return ()
    jars = prepare(version).jars
    (clients,) = (jar for jar in jars if jar.name == f"kafka-clients-{version}.jar")
    with ZipFile(clients) as archive:
        clock = ClassFile(archive.read(_CLOCK))
    changed = directory / "classes" / _CLOCK
    changed.parent.mkdir(parents=True)
    changed.write_bytes(clock.later("milliseconds", seconds * 1000))
    path = os.pathsep.join(map(str, (directory / "classes", *jars)))
    arguments = directory / "class-path"
    arguments.write_text(f'-cp "{path}"\n')
    return (f"@{arguments}",)
