"""The demo's clients: they know nothing of Isthmus, and change ``bootstrap.servers`` alone."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import InvalidRequestError, KafkaError

TOPIC: Final = "orders-clicks"
PARTITIONS: Final = 3
READ_TIMEOUT_S: Final = 60.0
IN_FLIGHT: Final = 5_000
WARM_UP: Final = 200
"""Records before latencies are measured: connections are made, and code is compiled."""
PAUSE_S: Final = 0.002
"""Between the records of a producer whose cluster is going to die."""
FAREWELL_S: Final = 0.2

Place = tuple[int, int]
"""Partition and offset."""
Advance = Callable[[int], None]
"""Gets how many records more there are."""


async def create_topic(bootstrap: str, replicas: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(TOPIC, PARTITIONS, replicas)])
    finally:
        await admin.close()


async def produce(bootstrap: str, records: int, advance: Advance) -> float:
    """Write many records. Returns how many seconds that took."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, linger_ms=5, max_batch_size=64 * 1024
    )
    started = time.monotonic()
    await producer.start()
    try:
        pending = []
        for number in range(records):
            value = b'{"order": %d, "item": "%s"}' % (number, b"abcdefgh"[number % 8 :] * 8)
            pending.append(await producer.send(TOPIC, value, key=b"%d" % (number % 1000)))
            if len(pending) == IN_FLIGHT:
                await asyncio.gather(*pending)
                advance(len(pending))
                pending.clear()
        await asyncio.gather(*pending)
        advance(len(pending))
    finally:
        await producer.stop()
    return time.monotonic() - started


async def latencies(
    bootstrap: str, records: int, name: bytes, acked: dict[Place, bytes], advance: Advance
) -> list[float]:
    """Write one record after another, each when the one before is acked.

    Returns, in rising order, how many milliseconds each ack took. What was acked is added to ``acked``.
    """
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
    took_ms = []
    await producer.start()
    try:
        for number in range(WARM_UP + records):
            value = b"%s %d" % (name, number)
            sent = time.perf_counter()
            ack = await producer.send_and_wait(TOPIC, value, partition=number % PARTITIONS)
            took_ms.append((time.perf_counter() - sent) * 1000)
            acked[ack.partition, ack.offset] = value
            advance(1)
    finally:
        await producer.stop()
    return sorted(took_ms[WARM_UP:])


async def consume(bootstrap: str, records: int, advance: Advance) -> dict[int, int]:
    """Read so many records from the beginning, and see that no offset is missing. Returns the partitions' ends."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", max_poll_records=IN_FLIGHT)
    await consumer.start()
    try:
        consumer.assign([TopicPartition(TOPIC, number) for number in range(PARTITIONS)])
        count, ends = 0, dict.fromkeys(range(PARTITIONS), 0)
        async with asyncio.timeout(READ_TIMEOUT_S):
            while count < records:
                for place, batch in (await consumer.getmany(timeout_ms=1_000)).items():
                    assert batch[0].offset == ends[place.partition], "an offset is missing"
                    ends[place.partition] = batch[-1].offset + 1
                    count += len(batch)
                    advance(len(batch))
    finally:
        await consumer.stop()
    return ends


async def read_from(bootstrap: str, starts: Mapping[int, int]) -> dict[Place, bytes]:
    """Read what the partitions hold from these offsets on."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, max_poll_records=IN_FLIGHT)
    found: dict[Place, bytes] = {}
    await consumer.start()
    try:
        places = {TopicPartition(TOPIC, partition): start for partition, start in starts.items()}
        consumer.assign(list(places))
        for place, start in places.items():
            consumer.seek(place, start)
        ends = await consumer.end_offsets(list(places))
        async with asyncio.timeout(READ_TIMEOUT_S):
            while any([await consumer.position(place) < end for place, end in ends.items()]):
                for place, batch in (await consumer.getmany(timeout_ms=1_000)).items():
                    found.update(((place.partition, each.offset), each.value) for each in batch)
    finally:
        await consumer.stop()
    return found


async def write_once(bootstrap: str, value: bytes) -> tuple[Place | None, str | None]:
    """Try to write one record. Returns where it is, or the client's error."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all")
    await producer.start()
    try:
        ack = await producer.send_and_wait(TOPIC, value)
    except KafkaError as error:
        return None, f"{type(error).__name__}: {error}"
    else:
        return (ack.partition, ack.offset), None
    finally:
        await producer.stop()


class LastWriter:
    """A producer in a thread of its own, which writes until its cluster is dead, and keeps what was acked."""

    def __init__(self, bootstrap: str, acked: dict[Place, bytes], enough: int, advance: Advance) -> None:
        """``acked`` gets what is acked; ``enough`` of it are waited for by :meth:`wait_acked`."""
        self._bootstrap = bootstrap
        self._into = acked
        self._enough_acks = enough
        self._advance = advance
        self._enough = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="last-writer", daemon=True)
        self.sent = 0
        self.acked = 0

    def start(self) -> None:
        # What the client says when its cluster dies is expected.
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
        self._thread.start()

    def wait_acked(self, timeout_s: float) -> bool:
        """Wait until enough was acked; False if it was not in time, or the writer has failed."""
        return self._enough.wait(timeout_s) and self.acked >= self._enough_acks

    def stop(self) -> None:
        """End it, when its cluster is dead. What was not acked by now never will be."""
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # its loop is closed: it has failed
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError, KafkaError):
            asyncio.run(self._write())
        self._enough.set()

    async def _write(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap, acks="all", enable_idempotence=True)
        await producer.start()
        try:
            for number in itertools.count():
                value = b"last %d" % number
                future = await producer.send(TOPIC, value, partition=number % PARTITIONS)
                self.sent += 1
                future.add_done_callback(partial(self._answered, value))
                await asyncio.sleep(PAUSE_S)
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await producer.stop()  # waits for acks, which nobody gives any more
            await producer.client.close()

    def _answered(self, value: bytes, future: asyncio.Future[Any]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        self._into[future.result().partition, future.result().offset] = value
        self.acked += 1
        self._advance(1)
        if self.acked >= self._enough_acks:
            self._enough.set()


class Application:
    """A producer in a thread of its own that knows both clusters: one record after the other, where it is taken.

    A cluster that does not lead refuses a write and has not stored it. Producers are new after that: what was refused
    is missing in their sequences.
    """

    def __init__(self, bootstraps: Sequence[str], acked: dict[Place, bytes]) -> None:
        """``acked`` gets what is acked."""
        self._bootstraps = bootstraps
        self._into = acked
        self._moments: list[float] = []
        self._more = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="application", daemon=True)

    @property
    def acks(self) -> int:
        return len(self._moments)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Have it end with the record that it writes."""
        self._over.set()
        self._thread.join()

    def wait_acked(self, count: int, timeout_s: float) -> bool:
        """Wait for so many acks; False if they were not there in time, or it has failed."""
        with self._more:
            self._more.wait_for(lambda: self.acks >= count or self._over.is_set(), timeout_s)
        return self.acks >= count

    def gap_s(self, since: int) -> float:
        """The longest time between two acks that follow each other, from one on."""
        return max(later - earlier for earlier, later in itertools.pairwise(self._moments[max(0, since - 1) :]))

    def _run(self) -> None:
        try:
            asyncio.run(self._write())
        finally:
            with self._more:
                self._over.set()
                self._more.notify_all()

    async def _write(self) -> None:
        clusters = itertools.cycle(self._bootstraps)
        producer = await self._producer(next(clusters))
        try:
            for number in itertools.count():
                if self._over.is_set():
                    return
                value = b"moved %d" % number
                while (ack := await self._written(producer, value, number % PARTITIONS)) is None:
                    await producer.stop()
                    producer = await self._producer(next(clusters))
                self._into[ack.partition, ack.offset] = value
                with self._more:
                    self._moments.append(time.monotonic())
                    self._more.notify_all()
        finally:
            await producer.stop()

    @staticmethod
    async def _written(producer: AIOKafkaProducer, value: bytes, partition: int) -> Any:
        """The ack; None: another cluster leads."""
        try:
            return await producer.send_and_wait(TOPIC, value, partition=partition)
        except InvalidRequestError:
            return None

    @staticmethod
    async def _producer(bootstrap: str) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
        await producer.start()
        return producer
