"""Producers of each client library that write numbers to partition 0 of a topic until they are left, for tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from aiokafka import AIOKafkaProducer
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from support import kafka_python_writes
from support.client_threads import ClientProcess, ClientThread
from support.java_steps import java_compiles, spawn

KINDS: Final = ("java", "librdkafka", "aiokafka", "kafka-python")
FLUSHED_WITHIN_S: Final = 30.0
ENDS_S: Final = 150.0
"""A process may have to wait for acks."""


class Writer(Protocol):
    """What each of them knows of its records. It writes within its block."""

    acked: dict[bytes, int]
    """Offset by value."""
    failed: list[str]
    """Value and error."""


def runs_here(kind: str, version: str) -> bool:
    """Whether a client can run: Java of a Kafka version needs a compiler."""
    return kind != "java" or java_compiles(version)


def writer(
    kind: str, version: str, topic: str, bootstrap: str, *, idempotent: bool = True, metadata_age_ms: int = 300_000
) -> AbstractContextManager[Writer]:
    """A producer of that kind, all else as it is by default; of Java, of a Kafka version.

    ``metadata_age_ms``: how old what it knows of its cluster may be before it asks again.
    """
    java = {
        "bootstrap.servers": bootstrap,
        "enable.idempotence": str(idempotent).lower(),
        "metadata.max.age.ms": str(metadata_age_ms),
    }
    python = {"enable_idempotence": idempotent, "metadata_max_age_ms": metadata_age_ms}
    librdkafka = {"enable.idempotence": idempotent, "topic.metadata.refresh.interval.ms": metadata_age_ms}
    told = [topic, json.dumps({"bootstrap_servers": bootstrap, **python})]
    own = [sys.executable, "-P", kafka_python_writes.__file__, *told]  # support.kafka is not kafka
    made: dict[str, Callable[[], AbstractContextManager[Writer]]] = {
        "java": lambda: WritingProcess(spawn(version, "ProducerStream", (topic,), java)),
        "librdkafka": lambda: Librdkafka(topic, bootstrap, librdkafka),
        "aiokafka": lambda: Aiokafka(topic, bootstrap, python),
        "kafka-python": lambda: WritingProcess(
            subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ),
    }
    return made[kind]()


class Librdkafka(ClientThread):
    """A producer of librdkafka."""

    def __init__(self, topic: str, bootstrap: str, settings: dict[str, Any]) -> None:
        super().__init__()
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": bootstrap, **settings})
        self.acked: dict[bytes, int] = {}
        self.failed: list[str] = []

    def _run(self) -> None:
        number = 0
        while not self.ended.is_set():
            value = str(number).encode()
            try:
                self._producer.produce(self._topic, value, partition=0, on_delivery=self._delivered)
                self._producer.poll(0.003)
            except KafkaException as error:  # fatal: only another one goes on
                self.failed.append(f"{value.decode()} {error}")
                return
            number += 1

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        value = message.value() or b""
        if error is None:
            self.acked[value] = message.offset() or 0
        else:
            self.failed.append(f"{value.decode()} {error}")

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self._producer.flush(FLUSHED_WITHIN_S)


class Aiokafka(ClientThread):
    """The same of aiokafka, on a loop of its own."""

    def __init__(self, topic: str, bootstrap: str, settings: dict[str, Any]) -> None:
        super().__init__()
        self._topic = topic
        self._settings = {"bootstrap_servers": bootstrap, **settings}
        self.acked: dict[bytes, int] = {}
        self.failed: list[str] = []

    def _run(self) -> None:
        asyncio.run(self._write())

    async def _write(self) -> None:
        async with (
            AIOKafkaProducer(**self._settings) as producer,
            asyncio.TaskGroup() as sending,
        ):
            number = 0
            while not self.ended.is_set():
                value = str(number).encode()
                sent = await producer.send(self._topic, value, partition=0)
                sending.create_task(self._noted(value, sent))
                await asyncio.sleep(0.003)
                number += 1

    async def _noted(self, value: bytes, sent: asyncio.Future[Any]) -> None:
        try:
            self.acked[value] = (await sent).offset
        except Exception as error:
            self.failed.append(f"{value.decode()} {error!r}")


class WritingProcess(ClientProcess):
    """The same of Java, or of kafka-python: ``acked VALUE OFFSET``, or ``failed``, the value and the error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(process, ENDS_S)
        self.acked: dict[bytes, int] = {}
        self.failed: list[str] = []

    def _note(self, word: str, rest: str) -> None:
        value, _, offset = rest.partition(" ")
        if word == "acked":
            self.acked[value.encode()] = int(offset)
        else:
            self.failed.append(rest)
