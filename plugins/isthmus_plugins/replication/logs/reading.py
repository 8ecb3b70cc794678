"""Reads a range of one of this cluster's logs, wherever the partition's leader is by then, or from one leader alone.

Whoever takes batches from here need not think of others: they have their turn every few batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, FetchConnection, FetchPartition, TopicInfo
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_protocol.error_codes import FENCED_LEADER_EPOCH
from isthmus_protocol.records import BatchHeader, walk
from isthmus_protocol.transactions import AbortedTransactions

CHUNK_BYTES: Final = 8 * 1024 * 1024
READ_WAIT_MS: Final = 500
READ_TRIES_MAX: Final = 20
READ_RETRY_S: Final = 0.2
LANE: Final = "verify"
BATCH_COST: Final = 4_000
"""What a batch costs beside its bytes, in bytes, where its header is looked at, and a digest made of it."""
TURN_COST: Final = 64 * 1024
"""After batches that cost so much others have their turn, which clients may wait for: 0.1 ms, or a little more."""


@dataclass(slots=True)
class Reads:
    """Reads of one purpose: of how many bytes each is at most, and how many bytes and batches all had so far."""

    at_once: int
    bytes: int = 0
    batches: int = 0

    @property
    def cost(self) -> int:
        """That of looking at all batches, in bytes."""
        return self.bytes + BATCH_COST * self.batches


async def read_batches(
    context: PluginContext,
    topic: TopicInfo,
    partition: int,
    offset: int,
    to: int,
    read_committed: bool = False,
    lane: str = LANE,
    reads: Reads | None = None,
    once: bool = False,
) -> AsyncIterator[tuple[memoryview, BatchHeader, bool]]:
    """Whole batches that hold ``[offset, to)``: (bytes, header, whether aborted). Raises OperationError.

    Those of a ``pinned`` topic come from the leader that it names, or not at all.
    ``read_committed``: no further than the last stable offset; else nothing is known to be aborted. ``once``: no
    further than the first read that has batches of the range.
    """
    reads = Reads(CHUNK_BYTES) if reads is None else reads
    connection: FetchConnection | None = None
    leader_epoch = topic.partitions[partition].leader_epoch if topic.pinned else -1
    tries = turn = 0
    while offset < to:
        try:
            if connection is None:
                leader = await context.cluster.leader_of(topic.name, partition)
                connection = await context.cluster.fetch_connection(-1 if leader is None else leader, lane)
            asked = [FetchPartition(topic.topic_id, partition, offset, reads.at_once, leader_epoch)]
            wait_max_ms = 0 if read_committed else READ_WAIT_MS
            (part,) = await connection.fetch(asked, wait_max_ms, reads.at_once, read_committed)
            reads.bytes += len(part.records)
            if part.error_code == FENCED_LEADER_EPOCH:
                moved = f"{topic.name}-{partition} has another leader since it was begun to be read"
                raise OperationError("BROKER_UNAVAILABLE", moved, 503)
            if part.error_code:
                raise BrokerUnavailable(f"{topic.name}-{partition}: error {part.error_code} at offset {offset}")
        except BrokerUnavailable as error:
            connection = None
            tries += 1
            if tries == READ_TRIES_MAX:
                raise OperationError("BROKER_UNAVAILABLE", f"reading failed: {error}", 503) from error
            await asyncio.sleep(READ_RETRY_S)
            continue
        read = offset
        aborted = AbortedTransactions(part.aborted)
        for start, end, header in walk(part.records):
            turn += end - start + BATCH_COST
            if turn >= TURN_COST:
                turn = 0
                await asyncio.sleep(0)
            is_aborted = aborted.hold(header)
            if header.next_offset <= offset:
                continue
            if header.base_offset >= to:
                return
            reads.batches += 1
            yield part.records[start:end], header, is_aborted
            read = header.next_offset
        if once and read > offset:
            return
        if read == offset:
            if read_committed or part.high_watermark >= to:
                return  # the rest are offsets without records
            tries += 1  # a new leader's high watermark may lag for a moment
            if tries == READ_TRIES_MAX:
                raise OperationError(
                    "BROKER_UNAVAILABLE",
                    f"{topic.name}-{partition} can be read up to {part.high_watermark} so far, not to {to}",
                    503,
                )
            await asyncio.sleep(READ_RETRY_S)
        offset = read
