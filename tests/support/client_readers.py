"""Consumers of each client library, the only members of their groups, that read until they are left, for tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError as AiokafkaError
from confluent_kafka import Consumer

from support import kafka_python_reads
from support.client_threads import ClientProcess, ClientThread
from support.java_steps import spawn
from support.step_processes import STEPS_END_S

COMMIT_MS: Final = 200
"""How often they commit by themselves."""
RETRY_S: Final = 0.05


class Reader(Protocol):
    """What each of them knows. It reads within its block, from the beginning, and commits by itself."""

    read: list[tuple[int, bytes]]
    """Offset and value, in the order in which they were read."""
    failed: list[str]
    """What was raised where it reads; it goes on."""


def reader(
    kind: str,
    version: str,
    topic: str,
    group: str,
    bootstrap: str,
    *,
    protocol: str = "classic",
    metadata_age_ms: int = 300_000,
) -> AbstractContextManager[Reader]:
    """A consumer of that kind (``client_writers.KINDS``); of Java, of a Kafka version.

    ``protocol``: of its group, in Java and librdkafka ("consumer": KIP-848).
    ``metadata_age_ms``: how old what it knows of its cluster may be before it asks again.
    """
    java = {
        "group.id": group,
        "group.protocol": protocol,
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
            spawn(version, "ConsumerStream", (topic,), java | {"metadata.max.age.ms": str(metadata_age_ms)})
        ),
        "librdkafka": lambda: Librdkafka(topic, java | {"topic.metadata.refresh.interval.ms": str(metadata_age_ms)}),
        "aiokafka": lambda: Aiokafka(topic, python),
        "kafka-python": lambda: ReadingProcess(
            subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ),
    }
    return made[kind]()


class Librdkafka(ClientThread):
    """A consumer of librdkafka."""

    def __init__(self, topic: str, settings: dict[str, str]) -> None:
        super().__init__()
        self._topic = topic
        self._consumer = Consumer(settings)
        self.read: list[tuple[int, bytes]] = []
        self.failed: list[str] = []

    def _run(self) -> None:
        self._consumer.subscribe([self._topic])
        while not self.ended.is_set():
            message = self._consumer.poll(0.1)
            if message is None:
                continue
            if (error := message.error()) is not None:
                self.failed.append(str(error))
            else:
                self.read.append((message.offset() or 0, message.value() or b""))
        self._consumer.close()


class Aiokafka(ClientThread):
    """The same of aiokafka, on a loop of its own."""

    def __init__(self, topic: str, settings: dict[str, Any]) -> None:
        super().__init__()
        self._topic = topic
        self._settings = settings
        self.read: list[tuple[int, bytes]] = []
        self.failed: list[str] = []

    def _run(self) -> None:
        asyncio.run(self._read())

    async def _read(self) -> None:
        consumer = AIOKafkaConsumer(self._topic, **self._settings)
        await consumer.start()
        while not self.ended.is_set():
            found = await self._noted(consumer.getmany(timeout_ms=100))
            for records in (found or {}).values():
                self.read += [(record.offset, record.value or b"") for record in records]
        await self._noted(consumer.stop())

    async def _noted(self, what: Coroutine[Any, Any, Any]) -> Any:
        """What comes of it; None where it raises, which is noted."""
        try:
            return await what
        except AiokafkaError as error:
            self.failed.append(repr(error))
            await asyncio.sleep(RETRY_S)
            return None


class ReadingProcess(ClientProcess):
    """The same of Java, or of kafka-python: ``read OFFSET VALUE``, or ``failed`` and the error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(process, STEPS_END_S)
        self.read: list[tuple[int, bytes]] = []
        self.failed: list[str] = []

    def _note(self, word: str, rest: str) -> None:
        if word == "read":
            offset, _, value = rest.partition(" ")
            self.read.append((int(offset), value.encode()))
        else:
            self.failed.append(rest)
