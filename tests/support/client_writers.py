"""Producers of each client library that write numbers to partition 0 of a topic until they are left, for tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, Self

from aiokafka import AIOKafkaProducer
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from support import kafka_python_writes
from support.java_steps import ProducerStream, java_compiles

KINDS: Final = ("java", "librdkafka", "aiokafka", "kafka-python")


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
    java = {"enable.idempotence": str(idempotent).lower(), "metadata.max.age.ms": str(metadata_age_ms)}
    python = {"enable_idempotence": idempotent, "metadata_max_age_ms": metadata_age_ms}
    librdkafka = {"enable.idempotence": idempotent, "topic.metadata.refresh.interval.ms": metadata_age_ms}
    made: dict[str, Callable[[], AbstractContextManager[Writer]]] = {
        "java": lambda: ProducerStream(version, topic, bootstrap_servers=bootstrap, **java),
        "librdkafka": lambda: Librdkafka(topic, bootstrap, librdkafka),
        "aiokafka": lambda: Aiokafka(topic, bootstrap, python),
        "kafka-python": lambda: KafkaPython(topic, bootstrap, python),
    }
    return made[kind]()


class Librdkafka:
    """A producer of librdkafka."""

    def __init__(self, topic: str, bootstrap: str, settings: dict[str, Any]) -> None:
        self._topic = topic
        self._producer = Producer({"bootstrap.servers": bootstrap, **settings})
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self.acked: dict[bytes, int] = {}
        self.failed: list[str] = []

    def _write(self) -> None:
        number = 0
        while not self._ended.is_set():
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

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join(60)
        self._producer.flush(30)


class Aiokafka:
    """The same of aiokafka, on a loop in a thread of its own."""

    def __init__(self, topic: str, bootstrap: str, settings: dict[str, Any]) -> None:
        self._topic = topic
        self._settings = {"bootstrap_servers": bootstrap, **settings}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._write()))
        self.acked: dict[bytes, int] = {}
        self.failed: list[str] = []

    async def _write(self) -> None:
        async with (
            AIOKafkaProducer(**self._settings) as producer,
            asyncio.TaskGroup() as sending,
        ):
            number = 0
            while not self._ended.is_set():
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

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join(60)


class KafkaPython:
    """The same of kafka-python, in a process of its own."""

    def __init__(self, topic: str, bootstrap: str, settings: dict[str, Any]) -> None:
        told = [topic, json.dumps({"bootstrap_servers": bootstrap, **settings})]
        command = [sys.executable, "-P", kafka_python_writes.__file__, *told]  # support.kafka is not kafka
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read)
        self.acked: dict[bytes, int] = {}
        self.failed: list[str] = []

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            became, value, what = line.rstrip().split(" ", 2)
            if became == "acked":
                self.acked[value.encode()] = int(what)
            else:
                self.failed.append(f"{value} {what}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._thread.join(60)
        with self._process:
            pass
