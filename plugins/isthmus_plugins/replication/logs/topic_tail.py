"""Reads an internal topic of this cluster from the leaders of its partitions, whoever fronts them, as it grows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Generic, TypeVar

from isthmus_plugins.cluster import BrokerUnavailable, FetchConnection, Fetched, FetchPartition, KafkaRefused, TopicInfo
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.error_codes import OFFSET_OUT_OF_RANGE
from isthmus_protocol.records import BatchError, BatchHeader, Frame, walk

log = logging.getLogger("isthmus_plugins.replication")

DISCOVERY_INTERVAL_S: Final = 1.0
TAIL_WAIT_MS: Final = 500
"""An idle cluster costs one read a broker in this time."""
FETCH_BYTES_MAX: Final = 4 * 1024 * 1024
PARTITION_BYTES_MAX: Final = 1024 * 1024
RETRY_DELAY_S: Final = 0.1
ASK_TIMEOUT_S: Final = 1.0


class TailPart:
    """One partition, as far as it is read."""

    __slots__ = ("begun", "broker_id", "leader_epoch", "loaded", "next_offset", "partition")

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.broker_id = -1
        self.leader_epoch = -1
        self.next_offset = 0
        self.begun = False
        """Whether it is known from where on it is read, and whatever else :meth:`TopicTail.begin` finds."""
        self.loaded = False
        """Whether all was read that was there when the reading began."""


P = TypeVar("P", bound=TailPart)


class TopicTail(Generic[P]):
    """The topic, as this proxy has read it. :meth:`begin`, :meth:`take` and :meth:`was_read` are a subclass's."""

    def __init__(
        self,
        context: PluginContext,
        topic: str,
        lane: str,
        make: Callable[[int], P],
        on_progress: Callable[[], None],
        rest_s: float = 0.0,
    ) -> None:
        """``lane``: names its connections. ``make(partition)``: before anything of it is read. ``on_progress``: more
        was read. ``rest_s``: after a read that found something, how long the next one may wait for :meth:`read_on`."""
        self._context = context
        self._topic = topic
        self._lane = lane
        self._make = make
        self._on_progress = on_progress
        self._rest_s = rest_s
        self._tasks = Tasks(lane, context.supervision)
        self._active = False
        self._wake = asyncio.Event()
        self._found = False
        self._topic_id = b""
        self._parts: dict[int, P] = {}
        self._readers: dict[int, asyncio.Event] = {}
        self._progressed = asyncio.Event()

    def start(self) -> None:
        self._tasks.keep("find", self._find_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def follow(self, active: bool) -> None:
        """Whether to read it at all. What is not read is forgotten."""
        if active != self._active:
            self._active = active
            self._wake.set()

    def wake(self) -> None:
        """Look for the topic now."""
        self._wake.set()

    def read_on(self) -> None:
        """Somebody needs what is there now."""
        for reader in self._readers.values():
            reader.set()

    @property
    def loaded(self) -> bool:
        """Whether all that was there when the reading began was read."""
        return self._found and all(part.loaded for part in self._parts.values())

    async def more_is_read(self) -> None:
        """Return when more was read than before the call."""
        self._progressed.clear()
        await self._progressed.wait()

    # ---- a subclass's ----

    async def begin(self, parts: Sequence[P]) -> None:
        """Find out what there is to know before these are read, and from where on; ``begun`` of those of which it is.

        Raises BrokerUnavailable, KafkaRefused.
        """
        raise NotImplementedError

    def take(self, part: P, batch: Frame, header: BatchHeader) -> None:
        """Take a batch, each once and in order. Raises BatchError: it is read again."""
        raise NotImplementedError

    def was_read(self, parts: Sequence[P]) -> None:
        """A read of these is taken."""
        raise NotImplementedError

    # ---- leaders ----

    async def _find_for_ever(self) -> None:
        while True:
            self._wake.clear()
            if self._active:
                try:
                    await self._find()
                except (BrokerUnavailable, KafkaRefused) as error:
                    log.warning("topic not found", extra={"topic": self._topic, "detail": str(error)})
            else:
                self._parts.clear()
                self._found = False
            try:
                async with asyncio.timeout(DISCOVERY_INTERVAL_S if self._active else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _find(self) -> None:
        topic = await self._context.cluster.topic(self._topic)
        if topic is None:  # nobody ever needed it
            self._parts.clear()
            self._found = True
            return
        if topic.topic_id != self._topic_id:
            self._topic_id = topic.topic_id
            self._parts.clear()
        for index in range(len(topic.partitions)):
            if index not in self._parts:
                self._parts[index] = self._make(index)
        moved = [
            part
            for part, info in zip(self._parts_of(topic), topic.partitions, strict=True)
            if part.next_offset and part.leader_epoch not in (-1, info.leader_epoch)
        ]
        known = dict(zip(moved, await asyncio.gather(*map(self._is_still_there, moved)), strict=True))
        for part, info in zip(self._parts_of(topic), topic.partitions, strict=True):
            if known.get(part, True) is None:
                part.broker_id = -1  # it is not read before that is known
                continue
            if not known.get(part, True):
                part = self._parts[part.partition] = self._make(part.partition)
            part.broker_id, part.leader_epoch = info.leader, info.leader_epoch
        self._found = True
        for broker_id in {part.broker_id for part in self._parts.values() if part.broker_id >= 0}:
            if broker_id not in self._readers:
                self._readers[broker_id] = asyncio.Event()
                self._tasks.keep(f"read-{broker_id}", partial(self._read_for_ever, broker_id))
            self._readers[broker_id].set()

    def _parts_of(self, topic: TopicInfo) -> list[P]:
        return [self._parts[index] for index in range(len(topic.partitions))]

    async def _is_still_there(self, part: P) -> bool | None:
        """Whether the log has what was read of it, under its new leader; None: that cannot be asked now.

        What was read was below the high watermark, hence every leader's; but a power loss takes what was not flushed.
        """
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                epoch, ends_at = await self._context.cluster.epoch_end(self._topic, part.partition, part.leader_epoch)
        except (BrokerUnavailable, KafkaRefused, TimeoutError):
            return None
        if epoch < 0 or ends_at >= part.next_offset:
            return True
        where = f"{self._topic}-{part.partition} lost what stood from offset {ends_at} on"
        log.error("topic read again", extra={"topic": self._topic, "detail": where})
        return False

    # ---- reading ----

    async def _read_for_ever(self, broker_id: int) -> None:
        wake = self._readers[broker_id]
        while True:
            wake.clear()
            parts = [part for part in self._parts.values() if part.broker_id == broker_id]
            if not parts or not self._active:
                await wake.wait()
                continue
            connection: FetchConnection | None = None
            try:
                connection = await self._context.cluster.fetch_connection(broker_id, self._lane)
                well, rests = await self._read(connection, parts)
            except (BrokerUnavailable, KafkaRefused) as error:
                log.warning("topic not read", extra={"topic": self._topic, "broker": broker_id, "detail": str(error)})
                if connection is not None:
                    connection.close()
                well = rests = False
            except Exception:
                # What was read may be taken in part: it is read again from where reading begins.
                if connection is not None:
                    connection.close()
                for part in parts:
                    if self._parts.get(part.partition) is part:
                        anew = self._parts[part.partition] = self._make(part.partition)
                        anew.broker_id, anew.leader_epoch = part.broker_id, part.leader_epoch
                raise
            if not well:
                self._wake.set()
                await asyncio.sleep(RETRY_DELAY_S)
            elif rests and self._rest_s:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._rest_s):
                        await wake.wait()

    async def _read(self, connection: FetchConnection, parts: Sequence[P]) -> tuple[bool, bool]:
        """One read; whether all went well, and whether it found something, and all that there was."""
        fresh = [part for part in parts if not part.begun]
        if fresh:
            await self.begin(fresh)
        begun = [part for part in parts if part.begun]
        if not begun:
            return False, False
        loaded = all(part.loaded for part in begun)
        asked = {part.partition: part for part in begun}
        fetched = await connection.fetch(
            [
                FetchPartition(self._topic_id, part.partition, part.next_offset, PARTITION_BYTES_MAX, part.leader_epoch)
                for part in begun
            ],
            TAIL_WAIT_MS if loaded else 0,
            FETCH_BYTES_MAX,
            only_changes=loaded,
        )
        well = len(begun) == len(parts)
        for found in fetched:
            part = asked[found.partition]
            if self._parts.get(found.partition) is not part:
                continue
            if found.error_code:
                well = False
                await self._refused(part, found)
            else:
                well = self._take(part, found) and well
        self.was_read(begun)
        self._progressed.set()
        self._on_progress()
        if not loaded:
            await asyncio.sleep(0)  # a long log is read without holding up the sessions
        at_end = all(asked[found.partition].next_offset >= found.high_watermark for found in fetched)
        return well, at_end and any(found.records for found in fetched)

    def _take(self, part: P, found: Fetched) -> bool:
        try:
            for start, end, header in walk(found.records):
                if header.next_offset > part.next_offset:
                    self.take(part, found.records[start:end], header)
                    part.next_offset = header.next_offset
        except BatchError as error:
            where = f"{self._topic}-{part.partition} at offset {part.next_offset}"
            log.error("topic not read", extra={"detail": f"{where}: {error}"})
            return False
        return True

    async def _refused(self, part: P, found: Fetched) -> None:
        if found.error_code != OFFSET_OUT_OF_RANGE:
            return  # another leader
        log_start = await self._context.cluster.log_start(self._topic, part.partition)
        if part.next_offset < log_start:
            part.next_offset = log_start
        else:  # the log lost records: nothing that was read from it counts
            anew = self._parts[part.partition] = self._make(part.partition)
            anew.broker_id, anew.leader_epoch = part.broker_id, part.leader_epoch
