"""Applications that consume, transform and produce exactly once, for tests: run, killed, and looked at."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Producer

from support import transform_app
from support.links import Side


class Application:
    """The process, which is started again whenever it ends."""

    def __init__(self, side: Side, prefix: str, log: Path, batch: int = 7) -> None:
        """``batch``: how many records a transaction has at most."""
        names = (prefix + "group", prefix + "input", prefix + "output", prefix + "transform")
        self._command = [sys.executable, transform_app.__file__, side.bootstrap, *names, str(batch)]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.is_set():
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
            self._process.wait()

    @property
    def acked(self) -> set[bytes]:
        """Keys of what was written in transactions whose commits were acked."""
        lines = self._log.read_bytes().splitlines() if self._log.exists() else []
        mark = transform_app.ACKED.encode()
        return {key for line in lines if line.startswith(mark) for key in line.removeprefix(mark).split()}

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Application:
        self._watcher.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        while self._watcher.is_alive():
            self.kill()
            self._watcher.join(0.1)


@contextmanager
def writing(side: Side, topic: str, values: range) -> Iterator[threading.Thread]:
    """Write one record for each number, each of them acked in the end."""

    def write() -> None:
        producer = Producer({"bootstrap.servers": side.bootstrap, "enable.idempotence": True, "linger.ms": 5})
        for value in values:
            producer.produce(topic, b"%d" % value, partition=value % 2)
            producer.poll(0.01)
        assert producer.flush(120) == 0

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield writer
    finally:
        writer.join(150)


def committed(side: Side, topic: str) -> list[bytes]:
    return [
        record.key or b""
        for partition in range(2)
        for record in side.read(topic, partition, isolation="read_committed")
    ]
