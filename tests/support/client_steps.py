"""Transactional producers of each client library that do one step after the other, for tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, Protocol, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError as AiokafkaError
from confluent_kafka import KafkaException, Producer

from support import kafka_python_steps
from support.java_steps import TransactionSteps
from support.step_processes import StepProcess

TOLD_OF_ANOTHER_COORDINATOR: Final = {
    "java": "InvalidPidMappingException",
    "librdkafka": "INVALID_PRODUCER_ID_MAPPING",
    "aiokafka": "Unexpected error during batch delivery",
    "kafka-python": "InvalidProducerIdMappingError",
}
"""In what each says, by its kind, where its cluster is another one than that which gave it its number."""


class Steps(Protocol):
    """A transactional producer that carries out one step after the other."""

    def ask(self, command: str) -> str:
        """Steps as :class:`~support.java_steps.TransactionSteps` takes them; ``done``, or the error."""


class LibrdkafkaSteps:
    """What :class:`TransactionSteps` does, with librdkafka."""

    def __init__(self, bootstrap: str, settings: dict[str, Any]) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, **settings})

    def ask(self, command: str) -> str:
        steps: dict[str, Callable[..., Any]] = {
            "init": lambda: self._producer.init_transactions(60),
            "begin": self._producer.begin_transaction,
            "send": self._send,
            "commit": lambda: self._producer.commit_transaction(60),
            "abort": lambda: self._producer.abort_transaction(60),
        }
        step, *words = command.split()
        try:
            steps[step](*words)
        except KafkaException as error:
            return repr(error)
        return "done"

    def _send(self, topic: str, value: str) -> None:
        self._producer.produce(topic, value.encode(), partition=0)
        self._producer.flush(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None: ...


class AiokafkaSteps:
    """The same with aiokafka, on a loop in a thread of its own."""

    def __init__(self, bootstrap: str, settings: dict[str, Any]) -> None:
        self._settings = {"bootstrap_servers": bootstrap, **settings}
        self._runner = asyncio.Runner()
        self._producer: AIOKafkaProducer | None = None

    def ask(self, command: str) -> str:
        step, *words = command.split()
        try:
            self._runner.run(self._step(step, *words))
        except Exception as error:
            return repr(error)
        return "done"

    async def _step(self, step: str, *words: str) -> None:
        async with asyncio.timeout(60):
            if self._producer is None:
                self._producer = AIOKafkaProducer(**self._settings)
                await self._producer.start()
            if step == "init":
                return
            if step == "send":
                topic, value = words
                await self._producer.send_and_wait(topic, value.encode(), partition=0)
            else:
                await getattr(self._producer, f"{step}_transaction")()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._producer is not None:
            with suppress(AiokafkaError):  # that it has ended
                self._runner.run(self._producer.stop())
        self._runner.close()


class KafkaPythonSteps(StepProcess):
    """The same with kafka-python, in a process of its own."""

    def __init__(self, bootstrap: str, settings: dict[str, Any]) -> None:
        told = json.dumps({"bootstrap_servers": bootstrap, **settings})
        command = [sys.executable, "-P", kafka_python_steps.__file__, told]
        super().__init__(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def steps(
    kind: str, version: str, bootstrap: str, transactional_id: str | None, *, metadata_age_ms: int = 300_000
) -> AbstractContextManager[Steps]:
    """A producer of that kind (``client_writers.KINDS``), all else as it is by default; of Java, of a Kafka version.

    ``transactional_id`` None: it knows ``send`` alone, of which librdkafka's says ``done`` in any case.
    ``metadata_age_ms``: how old what it knows of its cluster may be before it asks again.
    """
    java = {"metadata.max.age.ms": str(metadata_age_ms)}
    python: dict[str, Any] = {"metadata_max_age_ms": metadata_age_ms}
    librdkafka: dict[str, Any] = {"topic.metadata.refresh.interval.ms": metadata_age_ms}
    if transactional_id is not None:
        java["transactional.id"] = librdkafka["transactional.id"] = transactional_id
        python["transactional_id"] = transactional_id
    made: dict[str, Callable[[], AbstractContextManager[Steps]]] = {
        "java": lambda: TransactionSteps(version, bootstrap_servers=bootstrap, **java),
        "librdkafka": lambda: LibrdkafkaSteps(bootstrap, librdkafka),
        "aiokafka": lambda: AiokafkaSteps(bootstrap, python),
        "kafka-python": lambda: KafkaPythonSteps(bootstrap, python),
    }
    return made[kind]()


def committed_by(producer: Steps, topic: str, value: str) -> list[str]:
    """What it says to the steps of one transaction with one record."""
    return [producer.ask(step) for step in ("begin", f"send {topic} {value}", "commit")]
