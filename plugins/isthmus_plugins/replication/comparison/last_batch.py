"""What stands last in a log, and whether it is what stands there in the other one.

A follower's log is a prefix of the source's. Whoever else writes to it writes at its end, and whatever comes after
stands at wrong offsets: so two logs that are equal at the follower's end are equal before it (as with the previous
entry's term in Raft). Each new stream begins with this question.
"""

from __future__ import annotations

from typing import Final

from isthmus_plugins.cluster import FetchPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_protocol.record_equality import batch_digest
from isthmus_protocol.records import BatchError, walk

LANE: Final = "ends"
READ_BYTES_MAX: Final = 64 * 1024
"""Enough for most batches; a larger one is read whole all the same (KIP-74)."""


async def last_batch(
    context: PluginContext, topic_id: bytes, partition: int, broker_id: int, end: int, leader_epoch: int = -1
) -> calls.LastBatch | None:
    """The batch that holds offset ``end - 1``, or the first one after it; None if there is none that can be read.

    Raises BrokerUnavailable.
    """
    if end <= 0:
        return None
    connection = await context.cluster.fetch_connection(broker_id, LANE)
    asked = FetchPartition(topic_id, partition, end - 1, READ_BYTES_MAX, leader_epoch)
    (part,) = await connection.fetch([asked], 0, READ_BYTES_MAX)
    if part.error_code:
        return None
    own_index = context.control.state.producer_id_ranges[context.cluster_id]
    try:
        for start, stop, header in walk(part.records):
            if header.next_offset >= end:
                digest = batch_digest(part.records[start:stop], own_index).hex()
                return calls.LastBatch(
                    header.base_offset, header.next_offset, digest, header.is_control, header.has_holes
                )
    except BatchError:
        pass  # it has a reason of its own to stop
    return None
