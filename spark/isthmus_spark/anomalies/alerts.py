"""Writes alerts to a Kafka topic, each batch exactly once, with the Java client that Spark's connector brings.

    batch N    is planned in the checkpoint (offsets/N)
               alerts, each with headers ``query`` and ``batch``, are written in one transaction
               is done in the checkpoint (commits/N)

What was killed between two of these runs batch N again when it comes back, with the same events and the same state,
so with the same alerts. Whether they are there is looked up in the topic: a transaction is there whole or not at all,
so one record with both headers is enough, and it lives as long as what it stands for. ``initTransactions`` comes
first: it ends what a killed driver left open, and fences one that still runs. A batch without alerts writes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

QUERY, BATCH = "query", "batch"
LOOKED_BACK_MS: Final = 3_600_000
"""Before a batch was planned: clocks of drivers and brokers may differ by so much."""
POLL_MS: Final = 500
SAY_S: Final = 10.0
GIVE_UP_S: Final = 300.0
"""A cluster that answers nothing for so long ends the query; it goes on when it is started again."""
RETRY_S: Final = 1.0
CLIENT: Final = {
    "max.block.ms": "30000",
    "delivery.timeout.ms": "30000",
    "request.timeout.ms": "10000",
    "transaction.timeout.ms": "30000",
    "linger.ms": "0",
}
"""Of the producer, unless they are set: consumers wait no longer than this for a transaction that nobody ends."""
_FENCED: Final = ("ProducerFencedException", "InvalidProducerEpochException")
_FOR_GOOD: Final = (
    "AuthorizationException",
    "AuthenticationException",
    "ConfigException",
    "UnsupportedVersionException",
)

T = TypeVar("T")
Say = Callable[[str], None]


class AlertsError(Exception):
    """Alerts cannot be written; says what to do."""


class Record(NamedTuple):
    key: bytes
    value: bytes


class Alerts:
    """The topic, as one query writes it.

    ``settings``: of Kafka's clients, ``bootstrap.servers`` at least. ``ending``: set when the query is to end; then
    nothing is tried again.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Mapping[str, str],
        topic: str,
        query: str,
        say: Say,
        ending: threading.Event,
    ) -> None:
        self._jvm: Any = spark._jvm
        self._settings = dict(settings)
        self._topic = topic
        self._query = query
        self._say = say
        self._ending = ending
        self._producer: Any = None
        self._upto: int | None = None
        """The newest batch of which alerts are in the topic; None: it has to be looked up."""

    def open(self, last: tuple[int, int] | None) -> None:
        """Fence others. ``last``: the batch that was planned last, and when (ms). Raises AlertsError."""
        batch, planned_ms = last or (-1, int(time.time() * 1000))
        self._trying(lambda: self._open(planned_ms))
        if self._upto is not None and self._upto > batch:
            raise AlertsError(
                f"alerts of batch {self._upto} are in topic {self._topic}, but the checkpoint ends with batch {batch}: "
                "it is an old copy. Take the newest one, or a new directory"
            )

    def write(self, batch: int, records: Sequence[Record]) -> bool:
        """Write the alerts of a batch, unless they are there. True: this process has written some.

        Raises AlertsError.
        """
        if not records:
            return False
        began_ms = int(time.time() * 1000)
        attempted = False

        def attempt() -> bool:
            nonlocal attempted
            if self._upto is None:
                self._open(began_ms)
            if self._upto is None or batch > self._upto:
                attempted = True
                self._transact(batch, records)
                self._upto = batch
            return attempted

        return self._trying(attempt)

    def close(self) -> None:
        producer, self._producer, self._upto = self._producer, None, None
        if producer is not None:
            try:
                producer.close(self._jvm.java.time.Duration.ofSeconds(0))
            except Py4JJavaError:
                pass

    # ---- Kafka ----

    def _open(self, planned_ms: int) -> None:
        self._producer = self._client("producer.KafkaProducer", "Serializer", {"transactional.id": self._query})
        self._producer.initTransactions()
        self._upto = self._newest_since(planned_ms - LOOKED_BACK_MS)

    def _transact(self, batch: int, records: Sequence[Record]) -> None:
        producer, new = self._producer, self._jvm.org.apache.kafka.clients.producer.ProducerRecord
        producer.beginTransaction()
        sent = []
        for record in records:
            made = new(self._topic, record.key, record.value)
            made.headers().add(QUERY, self._query.encode()).add(BATCH, str(batch).encode())
            sent.append(producer.send(made))
        for each in sent:
            each.get()
        producer.commitTransaction()

    def _newest_since(self, since_ms: int) -> int:
        """The newest batch of this query that has alerts in the topic, of those since then; -1: there is none.

        Up to the end that there is now, even if others' open transactions have to end before.
        """
        own = {"allow.auto.create.topics": "false", "enable.auto.commit": "false", "fetch.max.wait.ms": "10"}
        consumer = self._client("consumer.KafkaConsumer", "Deserializer", {**own, "isolation.level": "read_committed"})
        uncommitted = self._client("consumer.KafkaConsumer", "Deserializer", own)
        try:
            named = consumer.partitionsFor(self._topic)
            if not named:
                raise AlertsError(f"there is no topic {self._topic}: create it, or name another one with --alerts")
            new = self._jvm.org.apache.kafka.common.TopicPartition
            partitions, since = self._jvm.java.util.ArrayList(), self._jvm.java.util.HashMap()
            for each in named:
                partitions.add(new(self._topic, each.partition()))
            for each in partitions:
                since.put(each, since_ms)
            ends, begins = uncommitted.endOffsets(partitions), consumer.offsetsForTimes(since)
            consumer.assign(partitions)
            for each in partitions:
                consumer.seek(each, ends[each] if begins[each] is None else begins[each].offset())
            newest, said = -1, time.monotonic()
            while any(consumer.position(each) < ends[each] for each in partitions):
                for record in consumer.poll(self._jvm.java.time.Duration.ofMillis(POLL_MS)).iterator():
                    headers = {each.key(): bytes(each.value()) for each in record.headers().toArray()}
                    if headers.get(QUERY) == self._query.encode():
                        newest = max(newest, int(headers[BATCH]))
                if time.monotonic() > said + SAY_S:
                    said = time.monotonic()
                    self._say(f"{self._topic}: looking up what was written; transactions of others have to end before")
            return newest
        finally:
            consumer.close()
            uncommitted.close()

    def _client(self, kind: str, codec: str, own: Mapping[str, str]) -> Any:
        properties = self._jvm.java.util.Properties()
        defaults = CLIENT if codec == "Serializer" else {}
        for name, value in {**defaults, **self._settings, **own}.items():
            properties.setProperty(name, value)
        coding = getattr(self._jvm.org.apache.kafka.common.serialization, f"ByteArray{codec}")
        package, name = kind.split(".")
        return getattr(getattr(self._jvm.org.apache.kafka.clients, package), name)(properties, coding(), coding())

    def _trying(self, attempt: Callable[[], T]) -> T:
        """Again while the cluster does not answer. After each failure it is looked up again what is there."""
        until = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return attempt()
            except Py4JJavaError as error:
                causes = _causes(error.java_exception)
                failure = f"{self._topic}: {causes[-1]}"
                self.close()
                if any(name in cause for cause in causes for name in _FENCED):
                    raise AlertsError(
                        "another process runs this query with the same checkpoint, and took over"
                    ) from error
                if any(name in cause for cause in causes for name in _FOR_GOOD):
                    raise AlertsError(f"alerts cannot be written to topic {failure}") from error
                if time.monotonic() > until:
                    raise AlertsError(
                        f"alerts cannot be written to topic {failure}; tried for {GIVE_UP_S:.0f} s"
                    ) from error
                self._say(f"alerts cannot be written to topic {failure}; trying again")
                if self._ending.wait(RETRY_S):
                    raise AlertsError(f"ended while alerts could not be written to topic {failure}") from error


def _causes(exception: Any) -> list[str]:
    """What it says, and what each of its causes says."""
    said = []
    while exception is not None:
        said.append(str(exception.toString()))
        exception = exception.getCause()
    return said
