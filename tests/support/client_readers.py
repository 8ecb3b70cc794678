"""Consumers of each client library, the only members of their groups, that read until they are left, for tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, Self

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError as AiokafkaError
from confluent_kafka import Consumer

from support import kafka_python_reads
from support.java_steps import spawn
from support.step_processes import STEPS_END_S, end

COMMIT_MS: Final = 200
"""How often they commit by themselves."""
RETRY_S: Final = 0.05


class Reader(Protocol):
    """What each of them knows. It reads within its block, from the beginning, and commits by itself."""

    read: list[bytes]
    """Values, in order."""
    failed: list[str]
    """What was raised where it reads; it goes on."""


def reader(
    kind: str, version: str, topic: str, group: str, bootstrap: str, *, metadata_age_ms: int = 300_000
) -> AbstractContextManager[Reader]:
    """A consumer of that kind (``client_writers.KINDS``); of Java, of a Kafka version.

    ``metadata_age_ms``: how old what it knows of its cluster may be before it asks again.
    """
    java = {
        "group.id": group,
        "bootstrap.servers": bootstrap,
        "auto.offset.reset": "earliest",
        "auto.commit.interval.ms": str(COMMIT_MS),
    }
    python = {
        "group_id": group,
        "bootstrap_servers": bootstrap,
        "auto_offset_reset": "earliest",
        "auto_commit_interval_ms": COMMIT_MS,
        "metadata_max_age_ms": metadata_age_ms,
    }
    own = [sys.executable, "-P", kafka_python_reads.__file__, topic, json.dumps(python)]  # support.kafka is not kafka
    made: dict[str, Callable[[], AbstractContextManager[Reader]]] = {
        "java": lambda: ReadingProcess(
            spawn(version, "ConsumerStream.java", (topic,), java | {"metadata.max.age.ms": str(metadata_age_ms)})
        ),
        "librdkafka": lambda: Librdkafka(topic, java | {"topic.metadata.refresh.interval.ms": str(metadata_age_ms)}),
        "aiokafka": lambda: Aiokafka(topic, python),
        "kafka-python": lambda: ReadingProcess(
            subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ),
    }
    return made[kind]()


class Librdkafka:
    """A consumer of librdkafka."""

    def __init__(self, topic: str, settings: dict[str, str]) -> None:
        self._topic = topic
        self._consumer = Consumer(settings)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.read: list[bytes] = []
        self.failed: list[str] = []

    def _read(self) -> None:
        self._consumer.subscribe([self._topic])
        while not self._ended.is_set():
            message = self._consumer.poll(0.1)
            if message is None:
                continue
            if (error := message.error()) is not None:
                self.failed.append(str(error))
            else:
                self.read.append(message.value() or b"")
        self._consumer.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join(60)


class Aiokafka:
    """The same of aiokafka, on a loop in a thread of its own."""

    def __init__(self, topic: str, settings: dict[str, Any]) -> None:
        self._topic = topic
        self._settings = settings
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read()))
        self.read: list[bytes] = []
        self.failed: list[str] = []

    async def _read(self) -> None:
        consumer = AIOKafkaConsumer(self._topic, **self._settings)
        await consumer.start()
        while not self._ended.is_set():
            found = await self._noted(consumer.getmany(timeout_ms=100))
            for records in (found or {}).values():
                self.read += [record.value or b"" for record in records]
        await self._noted(consumer.stop())

    async def _noted(self, what: Coroutine[Any, Any, Any]) -> Any:
        """What comes of it; None where it raises, which is noted."""
        try:
            return await what
        except AiokafkaError as error:
            self.failed.append(repr(error))
            await asyncio.sleep(RETRY_S)
            return None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join(60)


class ReadingProcess:
    """A process that prints a line for each: ``read VALUE``, or ``failed`` and the error. It ends when its input does.

    Of Java, or of kafka-python.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._thread = threading.Thread(target=self._note)
        self.read: list[bytes] = []
        self.failed: list[str] = []

    def _note(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            became, _, what = line.rstrip().partition(" ")
            if became == "read":
                self.read.append(what.encode())
            else:
                self.failed.append(what)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("end\n")
        end(self._process, STEPS_END_S)
        self._thread.join()
        self._process.stdout.close()
