"""The spool topic of a truncation: filled from the old topic, read for the new one (see isthmus_protocol.spool)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Final

from isthmus_control.truncations import PartitionCut, Truncation
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.decompression import decompressed, in_steps
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_protocol.error_codes import (
    LEADER_NOT_AVAILABLE,
    NOT_LEADER_OR_FOLLOWER,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.record_equality import RecordsDigest
from isthmus_protocol.records import verify_crc, walk
from isthmus_protocol.spool import Manifest, decode_manifest, encode_manifest, spool_batch, spooled

LANE: Final = "spool"
VALUE_BYTES: Final = 1024 * 1024
"""Batches are put together into records of about this size; a larger batch is a record of its own."""
MESSAGE_BYTES_MAX: Final = 2**31 - 1
"""A spool takes whatever its topic took."""
PRODUCE_TIMEOUT_MS: Final = 30_000
LEADERS_WAIT_S: Final = 10.0
POLL_S: Final = 0.05
NEW_TOPIC: Final = frozenset(
    {UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_ID}
)
"""It spreads still."""
CONFIGS: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "compression.type": "producer",
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
    "message.timestamp.type": "LogAppendTime",
}


class SpoolDamaged(Exception):
    """The spool does not hold what was put into it."""


class Spool:
    """The spool of one attempt of a truncation."""

    def __init__(self, context: PluginContext, truncation: Truncation, attempt: str | None) -> None:
        self._context = context
        self._name = truncation.spool(attempt)
        self._partitions = len(truncation.partitions)
        self._topic: TopicInfo | None = None
        self.largest = 0
        """Bytes of the largest batch that was put in."""

    # ---- the topic ----

    async def create(self, replication_factor: int) -> None:
        """Make an empty spool."""
        cluster = self._context.cluster
        await cluster.create_topic(self._name, self._partitions + 1, replication_factor, CONFIGS)
        deadline = asyncio.get_running_loop().time() + LEADERS_WAIT_S
        while True:
            self._topic = (await cluster.topics()).get(self._name)
            if self._topic is not None and all(partition.leader >= 0 for partition in self._topic.partitions):
                return
            if asyncio.get_running_loop().time() > deadline:
                raise BrokerUnavailable(f"the partitions of {self._name} have no leaders yet")
            await asyncio.sleep(POLL_S)

    async def _info(self) -> TopicInfo:
        if self._topic is None:
            self._topic = (await self._context.cluster.topics()).get(self._name)
        if self._topic is None:
            raise SpoolDamaged(f"{self._name} is gone")
        return self._topic

    # ---- writing ----

    async def fill(self, topic: TopicInfo, cut: PartitionCut) -> int:
        """Put ``[cut.log_start, cut.offset)`` of a partition in; how many batches that is.

        Raises OperationError, BatchError, SpoolDamaged.
        """
        value = bytearray()
        batches = 0
        async for batch, _, _ in read_batches(self._context, topic, cut.partition, cut.log_start, cut.offset):
            batches += 1
            self.largest = max(self.largest, len(batch))
            if value and len(value) + len(batch) > VALUE_BYTES:
                await self._append(cut.partition, bytes(value))
                value.clear()
            value += batch
        if value:
            await self._append(cut.partition, bytes(value))
        return batches

    async def put_manifest(self, manifest: Manifest) -> None:
        """Put the manifest in, the last thing: a spool with a manifest is whole."""
        for value in encode_manifest(manifest, str(uuid.uuid4())):
            await self._append(self._partitions, value)

    async def _append(self, partition: int, value: bytes) -> None:
        """Append one record; again where its fate is not known, since a second one does no harm."""
        deadline = asyncio.get_running_loop().time() + LEADERS_WAIT_S
        while True:
            try:
                return await self._produce(partition, value)
            except BrokerUnavailable:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(POLL_S)

    async def _produce(self, partition: int, value: bytes) -> None:
        cluster = self._context.cluster
        leader = await cluster.leader_of(self._name, partition)
        connection = await cluster.produce_connection(-1 if leader is None else leader, LANE)
        place = (self._name, partition)
        result = (await connection.produce([{place: spool_batch(value)}], PRODUCE_TIMEOUT_MS))[0][place]
        if result.error_code in NEW_TOPIC:
            raise BrokerUnavailable(f"{self._name}-{partition}: {result.error_name}")
        if result.error_code:
            raise KafkaRefused(result.error_code, result.error_name, result.message)

    # ---- reading ----

    async def read(self, partition: int) -> AsyncIterator[memoryview]:
        """The values of a partition's records, in order, each whole batches.

        Raises OperationError, BatchError, SpoolDamaged.
        """
        topic = await self._info()
        await self._check_start(partition)
        end = await self._context.cluster.high_watermark(self._name, partition)
        async for batch, _, _ in read_batches(self._context, topic, partition, 0, end):
            for value in spooled(batch):
                yield value

    async def check(self, cut: PartitionCut, batches: int) -> str:
        """The digest (MARKED) of what is in it: all ``batches`` that were put in, undamaged and in order.

        Raises SpoolDamaged, OperationError, BatchError.
        """
        last, found = -1, 0
        digest = RecordsDigest()
        async for value in self.read(cut.partition):
            for start, end, header in walk(value):
                verify_crc(value[start:end])
                if header.last_offset <= last:
                    continue  # written twice
                if header.base_offset <= last:
                    raise SpoolDamaged(f"offset {header.base_offset} of partition {cut.partition} is out of order")
                batch = value[start:end]
                await in_steps(digest.adding_marked(batch, decompressed(batch), cut.log_start, cut.offset))
                last = header.last_offset
                found += 1
        if found != batches:
            raise SpoolDamaged(f"partition {cut.partition} has {found} batches in the spool, {batches} were put in")
        if last >= cut.offset:
            raise SpoolDamaged(f"partition {cut.partition} was spooled up to {last}, and is cut at {cut.offset}")
        return digest.digest().hex()

    async def check_there(self) -> None:
        """Raise SpoolDamaged unless nothing of it was deleted since it was whole."""
        await self.manifest()
        for partition in range(self._partitions):
            await self._check_start(partition)

    async def _check_start(self, partition: int) -> None:
        if await self._context.cluster.log_start(self._name, partition):
            raise SpoolDamaged(f"records were deleted from {self._name}-{partition}")

    async def manifest(self) -> Manifest:
        """Raises SpoolDamaged, OperationError, BatchError."""
        values = [bytes(value) async for value in self.read(self._partitions)]
        try:
            return decode_manifest(values)
        except (ValueError, KeyError, TypeError) as error:
            raise SpoolDamaged(f"the manifest in {self._name} cannot be read: {error}") from error
