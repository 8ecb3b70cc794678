"""A report of the demo's own traffic, made by Spark while the story goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from isthmus_bench.kafka.jars import cache_directory
from isthmus_bench.kafka.java import find_java
from isthmus_bench.proxies import ProxyFailed, ProxyProcess

TIMEOUT_S: Final = 240.0
"""For a busy machine; a quarter of a minute is usual."""
QUICK_SPARK: Final = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Dspark.sql.adaptive.enabled=false",
    "-Dspark.sql.codegen.wholeStage=false",
    "-Dspark.sql.codegen.factoryMode=NO_CODEGEN",
)
"""For some thousand events: to compile Spark and each plan, and to plan anew after each stage, takes longer than to run
it."""


class TrafficReport:
    """One run of ``isthmus spark latency`` over what proxies captured under ``captured``."""

    def __init__(self, captured: Path, page: Path) -> None:
        self._captured = captured
        self.page = page
        self._result = captured.with_name("report.json")
        self._log = captured.with_name("report.log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, proxies: Iterable[ProxyProcess], namespace: str) -> None:
        """End the capture, and begin. Does nothing where Spark is not installed."""
        if find_spec("pyarrow") is None or find_spec("pyspark") is None:
            return
        for proxy in proxies:
            proxy.cli("plugin", "disable", "capture", "--namespace", namespace)
        deadline = time.monotonic() + TIMEOUT_S
        while list(self._captured.rglob("*.open")) and time.monotonic() < deadline:
            time.sleep(0.05)
        by_hand = os.environ.get("SPARK_SUBMIT_OPTS", "")
        command = [sys.executable, "-m", "isthmus", "spark", "latency", str(self._captured), "-o", "json"]
        with self._result.open("wb") as result, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--report", str(self.page)],
                env={**os.environ, "SPARK_SUBMIT_OPTS": " ".join((*QUICK_SPARK, *_archive_of_classes(), by_hand))},
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=log,
            )

    def finish(self) -> list[dict[str, Any]]:
        """Wait for the result; it is empty where nothing was begun. Raises ProxyFailed."""
        if self._process is None:
            return []
        try:
            status = self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ProxyFailed(f"the report was not made in {TIMEOUT_S:.0f} s") from None
        if status:
            raise ProxyFailed(f"the report was not made: {self._log.read_text()}")
        rows: list[dict[str, Any]] = json.loads(self._result.read_text())
        return rows

    def close(self) -> None:
        """End it, however far it is."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def _archive_of_classes() -> tuple[str, ...]:
    """Flags of a JVM that maps Spark's classes in place of reading and verifying them (JEP 350), which takes half the
    time and CPU; the first one leaves the archive, when it ends.
    """
    archive = cache_directory() / "spark" / version("pyspark") / f"{find_java().build}.jsa"
    archive.parent.mkdir(parents=True, exist_ok=True)
    # The header is written last; an archive that does not fit is not used, and nobody needs to hear of it.
    is_whole = False
    if archive.is_file():
        with archive.open("rb") as file:
            is_whole = any(file.read(4))
    return f"-XX:{'SharedArchiveFile' if is_whole else 'ArchiveClassesAtExit'}={archive}", "-Xlog:disable"
