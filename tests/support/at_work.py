"""Clients at work on real clusters while these die: writers that remember what was acknowledged, and the log of what
was done. For the storms over links (``storm``) and over trees (``tree_storm``).
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from support.kafka import unique
from support.links import Read, until

PARTITIONS: Final = 2
RATE: Final = 100
"""Records a second of each producer."""
BATCH: Final = 6
"""Records of a transaction."""
RECOVERY_S: Final = 60.0
PATIENCE_MS: Final = 120_000

Beside = Callable[[bytes], Mapping[str, Any]]
"""By its value, what a record has beside it: ``key``, ``headers`` and ``timestamp``, as producers take them."""


class Client(threading.Thread):
    """Works until it is told to stop."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.stopping = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.failure = error

    def work(self) -> None:
        raise NotImplementedError

    def stopped(self) -> None:
        """Wait until it has ended what it began."""
        self.stopping.set()
        self.join(PATIENCE_MS / 1000 + 30)


# ---- writers ----


@dataclass
class Written:
    """What one producer did, by value."""

    acked: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By partition and offset."""
    somewhere: list[tuple[int, bytes]] = field(default_factory=list)
    """Acked, too, by partition: nobody said where (of a batch that was sent again)."""
    sent: int = 0
    refused: list[KafkaError] = field(default_factory=list)

    def ack(self, message: Message) -> None:
        """A record was acked."""
        partition, offset, value = message.partition(), message.offset(), message.value()
        assert partition is not None
        assert value is not None
        if offset is None:
            self.somewhere.append((partition, value))
        else:
            self.acked[partition, offset] = value


@dataclass(frozen=True)
class Held:
    """What a topic holds where it was written to."""

    at: Mapping[tuple[int, int], bytes | None]
    """By partition and offset, whatever became of it."""
    times: Counter[bytes | None]
    """How often each value is committed."""
    unmarked: Counter[str]
    """By transactional id: see :func:`unmarked`."""

    @classmethod
    def of(
        cls, kafka: KafkaCluster, uncommitted: Iterable[Iterable[Read]], committed: Iterable[Iterable[Read]]
    ) -> Self:
        """By what is read of its partitions, so and so."""
        at = {(index, read.offset): read.value for index, part in enumerate(uncommitted) for read in part}
        return cls(at, Counter(read.value for part in committed for read in part), unmarked(kafka))

    @cached_property
    def somewhere(self) -> set[tuple[int, bytes | None]]:
        """By partition."""
        return {(index, value) for (index, _), value in self.at.items()}


def unmarked(kafka: KafkaCluster) -> Counter[str]:
    """By transactional id: how often brokers of a cluster left out markers of a transaction that they had ended.

    Kafka 4.3 does that of partitions without a leader, as the only broker of a cluster finds them that was killed after
    its answer to EndTxn (docs/operations.md): what the producer ends next decides about both transactions.
    """
    return Counter(found for broker_id in kafka.broker_ids for found in _UNMARKED.findall(kafka.log(broker_id)))


_UNMARKED: Final = re.compile(r"Couldn't find leader endpoint for partitions .* transaction markers for (\S+), ")


class Writer(Client):
    """A producer that writes until it is told to stop, and then waits for its answers."""

    def __init__(
        self, kind: str, topic: str, bootstrap: str, beside: Beside = lambda value: {}, **settings: Any
    ) -> None:
        super().__init__(f"writer-{kind}")
        self.kind = kind
        self.topic = topic
        self.written = Written()
        self._beside = beside
        self._settings = {
            "bootstrap.servers": bootstrap,
            "message.timeout.ms": PATIENCE_MS,
            "linger.ms": 20,
            "batch.num.messages": 20,
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
            **settings,
        }

    def work(self) -> None:
        producer = Producer(self._settings)
        while not self.stopping.is_set():
            self._send(producer, self._delivered)
            producer.poll(1 / RATE)
        assert producer.flush(PATIENCE_MS / 1000) == 0

    def value(self, number: int) -> bytes:
        """Of the record with this number."""
        return b"%s-%d" % (self.kind.encode(), number)

    def check(self, held: Held) -> None:
        """Raises AssertionError where something is not there that was acked."""
        lost = self.written.acked.items() - held.at.items()
        assert not lost, f"{self.kind}: acknowledged, and not there: {sorted(lost)[:5]}"
        assert not (missing := set(self.written.somewhere) - held.somewhere), missing

    def _send(self, producer: Producer, on_delivery: Callable[[KafkaError | None, Message], None]) -> bytes:
        number = self.written.sent
        self.written.sent += 1
        value = self.value(number)
        producer.produce(
            self.topic, value, partition=number % PARTITIONS, on_delivery=on_delivery, **self._beside(value)
        )
        return value

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.written.refused.append(error)
        else:
            self.written.ack(message)


class Idempotent(Writer):
    """An idempotent producer: what it sent is there once."""

    def __init__(
        self, kind: str, topic: str, bootstrap: str, beside: Beside = lambda value: {}, **settings: Any
    ) -> None:
        super().__init__(kind, topic, bootstrap, beside, **{"enable.idempotence": True, **settings})

    def check(self, held: Held) -> None:
        super().check(held)
        for number in range(self.written.sent):
            assert held.times[self.value(number)] == 1


class Transactions(Writer):
    """A transactional producer; its transactions commit or abort in turn."""

    def __init__(
        self, kind: str, topic: str, bootstrap: str, beside: Beside = lambda value: {}, **settings: Any
    ) -> None:
        chosen = {"transactional.id": unique("storm-"), "transaction.timeout.ms": 120_000, **settings}
        super().__init__(kind, topic, bootstrap, beside, **chosen)
        self.committed: list[list[bytes]] = []
        self.aborted: list[list[bytes]] = []
        self.unknown: list[list[bytes]] = []
        """Neither: the producer could not find out. They must be whole, or not at all."""
        self.wrong: list[tuple[int, int]] = []
        """By :meth:`check`: partitions and offsets of transactions that are not there as they were ended."""

    def work(self) -> None:
        producer: Producer | None = None
        while not self.stopping.is_set():
            values: list[bytes] = []
            outcome = self.unknown
            try:
                if producer is None:
                    producer = Producer(self._settings)
                    producer.init_transactions(60)
                producer.begin_transaction()
                told: list[Message] = []

                def delivered(error: KafkaError | None, message: Message, told: list[Any] = told) -> None:
                    if error is None:
                        told.append(message)

                for _ in range(BATCH):
                    values.append(self._send(producer, delivered))
                    producer.poll(1 / RATE)
                # An abort purges what is not sent; a coordinator that knows of no transaction refuses to end it.
                producer.flush(PATIENCE_MS / 1000)
                commit = (len(self.committed) + len(self.aborted)) % 3 != 2
                self._retrying(producer.commit_transaction if commit else producer.abort_transaction)
                outcome = self.committed if commit else self.aborted
                for message in told:
                    self.written.ack(message)
            except KafkaException:
                producer = None  # fenced, or fatal: the next one ends what this one began
            if values:
                outcome.append(values)
        if producer is None:
            Producer(self._settings).init_transactions(60)

    def check(self, held: Held) -> None:
        super().check(held)
        rules = ((self.committed, ({1},)), (self.aborted, ({0},)), (self.unknown, ({0}, {1})))
        faulty = [
            values
            for transactions, allowed in rules
            for values in transactions
            if {held.times[value] for value in values} not in allowed
        ]
        told = [[(value, held.times[value]) for value in values] for values in faulty]
        of = {value for values in faulty for value in values}
        self.wrong = sorted(place for place, value in held.at.items() if value in of)
        assert not [each for values in told for each in values if each[1] > 1], f"{self.kind}: {told}"
        assert len(faulty) <= held.unmarked[self._settings["transactional.id"]], f"{self.kind}: {told}"

    @staticmethod
    def _retrying(end: Callable[[float], None]) -> None:
        while True:
            try:
                end(60)
                return
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise


# ---- all of them ----


class AtWork:
    """Clients that work until the end, and the log of what was done meanwhile."""

    def __init__(self, seed: int, proxies: Sequence[ProxyProcess]) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.log: list[str] = []
        self.writers: list[Writer] = []
        self._proxies = proxies
        self._started = time.monotonic()

    @property
    def clients(self) -> Sequence[Client]:
        return self.writers

    def note(self, line: str) -> None:
        self.log.append(f"{time.monotonic() - self._started:7.1f} s  {line}")

    def __enter__(self) -> Self:
        for client in self.clients:
            client.start()
        until("everybody writes", lambda: all(writer.written.acked for writer in self.writers))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self.clients:
            client.stopping.set()
        for client in self.clients:
            client.stopped()
        if error is not None:
            said = [f"proxy {proxy.name} said:\n{proxy.log[-3000:]}" for proxy in self._proxies]
            error.add_note("\n".join([f"seed {self.seed}; what was done:", *self.log, *said]))

    def check_clients(self) -> None:
        """Everybody works on, and nothing was refused. Raises AssertionError."""
        for client in self.clients:
            if client.failure is not None:
                raise AssertionError(f"{client.name} failed") from client.failure
        for writer in self.writers:
            assert not writer.written.refused, writer.written.refused[0]

    def stop_writers(self, writers: Sequence[Writer] | None = None) -> None:
        """All, or these; they wait for answers to all that they have sent."""
        chosen = self.writers if writers is None else writers
        for writer in chosen:
            writer.stopping.set()
        for writer in chosen:
            writer.stopped()
            assert not writer.is_alive(), f"{writer.name} does not end"
        self.note(f"{len(chosen)} writers stopped")
