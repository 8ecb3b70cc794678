"""A Java producer that moves from one cluster to another because it is told to, for ``isthmus bench reverse``.

It knows a name of bootstrap servers alone (:mod:`isthmus_bench.moving_name`). It is Kafka's own
``kafka-verifiable-producer``, idempotent as Java's producers are by default.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from isthmus_bench.kafka.jars import parse_version
from isthmus_bench.kafka.tools import java_tool
from isthmus_bench.load import LoadError
from isthmus_bench.moving_name import MovingName
from isthmus_bench.proxies import HOST

SETTINGS: Final = "enable.idempotence=true\nretries=2147483647\n"
"""That tool's own default is to try nothing again."""
RECORDS_PER_S: Final = 100
RECORDS_MAX: Final = 60 * RECORDS_PER_S
"""It ends by itself then, whatever has become of who started it."""
TIMEOUT_S: Final = 30.0
FIRST_VERSION: Final = 4
"""Of Kafka, whose clients move when they are told to."""


def knows_that_it_is_told(version: str) -> bool:
    """Whether producers of a Kafka version move when they are told to."""
    return parse_version(version)[0] >= FIRST_VERSION


class ToldProducer:
    """Writes :data:`RECORDS_PER_S` to a topic until it is left, and moves where its name leads."""

    def __init__(self, version: str, name: MovingName, topic: str, directory: Path) -> None:
        """``directory``: for a file of settings. Raises EmbeddedKafkaError."""
        self._name = name
        self._topic = topic
        self._tool = java_tool(version, "kafka-verifiable-producer")
        self._settings = directory / "told-producer.properties"
        self._settings_option = "--command-config" if parse_version(version) >= (4, 2) else "--producer.config"
        self._acked: list[float] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="told-producer")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and json.loads(line).get("name") == "producer_send_success":
                with self._changed:
                    self._acked.append(time.monotonic())
                    self._changed.notify_all()

    def acked_after(self, moment: float) -> float:
        """When the first record was acked after a moment, in seconds of CLOCK_MONOTONIC. Raises LoadError."""

        def found() -> float | None:
            return next((each for each in self._acked if each > moment), None)

        with self._changed:
            at = self._changed.wait_for(found, TIMEOUT_S)
        if at is None:
            raise LoadError(f"the producer that was told to move had no ack for {TIMEOUT_S:.0f} s")
        return at

    def __enter__(self) -> Self:
        self._settings.write_text(SETTINGS)
        self._process = subprocess.Popen(
            [
                *self._tool.argv,
                *("--bootstrap-server", f"{HOST}:{self._name.port}", "--topic", self._topic, "--acks", "-1"),
                *("--throughput", str(RECORDS_PER_S), "--max-messages", str(RECORDS_MAX)),
                *(self._settings_option, str(self._settings)),
            ],
            env=self._tool.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
