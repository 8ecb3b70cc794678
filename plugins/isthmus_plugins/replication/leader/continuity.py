"""Whether the source's log goes on where the follower's ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, FetchPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.comparison.digests import CONTENTS, Verification
from isthmus_plugins.replication.comparison.last_batch import LANE, last_batch
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.link import calls, reasons
from isthmus_protocol.records import walk

SCAN_BYTES: Final = 1024 * 1024
NO_EPOCH: Final = -1


async def still_in_log(
    context: PluginContext,
    topic: str,
    topic_id: bytes,
    partition: int,
    broker_id: int,
    leader_epoch: int,
    began: Mapping[int, int],
    before: int,
    stored_as: Callable[[int], int],
) -> set[int]:
    """Of which transactions the log still has records before an offset.

    ``began``: by producer id, where the transaction began; ``stored_as`` is the id that a producer of this log has
    there. Raises BrokerUnavailable.
    """
    connection = await context.cluster.fetch_connection(broker_id, LANE)
    found: set[int] = set()
    log_start = await context.cluster.log_start(topic, partition)
    position = max(log_start, min(began.values(), default=before))
    while position < before and len(found) < len(began):
        asked = FetchPartition(topic_id, partition, position, SCAN_BYTES, leader_epoch)
        (part,) = await connection.fetch([asked], 0, SCAN_BYTES)
        if part.error_code:
            raise BrokerUnavailable(f"the log cannot be read at {position}: error {part.error_code}")
        read = position
        for _, _, header in walk(part.records):
            read = header.next_offset
            if header.base_offset >= before:
                break
            if header.is_transactional and not header.is_control and header.record_count:
                producer_id = stored_as(header.producer_id)
                if producer_id in began and header.last_offset >= began[producer_id]:
                    found.add(producer_id)
        if read == position:
            if part.high_watermark < before:  # a new leader's may lag for a moment
                raise BrokerUnavailable(f"the log can be read up to {part.high_watermark} so far, not to {before}")
            break
        position = read
    return found


async def objection_to(
    context: PluginContext, verification: Verification, stream: LeaderStream, answer: calls.OpenStreamAnswer
) -> tuple[str, str] | None:
    """Why the source's log does not go on where the follower's ends; None if it does. Raises BrokerUnavailable.

    ``answer``: what the follower said of its log.
    """
    theirs, end = answer.last, stream.acked
    if theirs is None and (answer.start_offset is None or answer.start_offset >= end):
        return None  # it has no batch
    if stream.copy is not None:  # a copy in another form, cleaned at its own times, is equal in its offsets alone
        log_end = await context.cluster.log_end(stream.key.topic, stream.key.partition)
        return truncated(end, log_end) if log_end < end else None
    ours = await last_batch(context, stream.topic_id, stream.key.partition, stream.broker_id, end, stream.leader_epoch)
    if ours is not None and theirs is not None and ours[:4] == theirs[:4]:
        return await _lost_since(context, stream, answer.epoch)
    if ours is None or ours.base_offset >= end:
        # The source has nothing there (any more, or not yet, or not to be read): the log's limits say which.
        cluster, key = context.cluster, stream.key
        log_start = await cluster.log_start(key.topic, key.partition)
        log_end = await cluster.log_end(key.topic, key.partition)
        if log_end < end:
            return truncated(end, log_end)
        if log_start >= end or ours is not None:
            return None  # it expired: what comes after it is the source's
        return reasons.SOURCE_UNAVAILABLE, f"the source's batch at offset {end - 1} cannot be read now"
    cleaned = theirs is None or theirs.holes
    if ours.control and theirs is not None and theirs.control:
        if ours.holes or cleaned:
            return None  # a marker that a cleaner has taken
    elif not await _differs(verification, stream, end - 1, ours.holes, cleaned):
        return None
    return (
        ReasonCode.TARGET_WRITTEN_BY_OTHERS,
        f"the batch that ends the follower's log at {end} is not the source's: somebody else wrote to it",
    )


async def _lost_since(context: PluginContext, stream: LeaderStream, epoch: int) -> tuple[str, str] | None:
    """Whether the source has lost what it wrote in the follower's latest epoch, and has something else there by now,
    although what stands last looks the same: a record with an application's own timestamp, or a marker."""
    if epoch in (NO_EPOCH, stream.leader_epoch):
        return None  # nobody else has led since
    key, end = stream.key, stream.acked
    known, ends_at = await context.cluster.epoch_end(key.topic, key.partition, epoch)
    if known == NO_EPOCH or ends_at >= end:
        return None
    return (
        ReasonCode.UNEXPECTED_TRUNCATION,
        f"the follower's log ends at {end} and has records of leader epoch {epoch}, and the source's has others from "
        f"offset {ends_at} on: it has lost records",
    )


async def _differs(
    verification: Verification, stream: LeaderStream, offset: int, cleaned_here: bool, cleaned_there: bool
) -> bool:
    """Whether the follower has another record at an offset: one that was encoded again is equal all the same."""
    key = stream.key
    # Contents: the end of a transaction may not be copied yet.
    asked = calls.Digest(stream.remote_topic, key.partition, offset, offset + 1, CONTENTS)
    theirs = await stream.connection.call(asked)
    ours = await verification.digest_of(key.topic, key.partition, offset, offset + 1)
    if ours.digest == theirs.digest or (cleaned_here and not ours.records):
        return False
    if not cleaned_there or theirs.records:
        return True
    return not await verification.may_be_gone(key.topic, key.partition, offset)


def truncated(end: int, log_end: int) -> tuple[str, str]:
    """The objection to a follower's log that ends beyond the source's."""
    return (
        ReasonCode.UNEXPECTED_TRUNCATION,
        f"the follower's log ends at {end}, beyond the source's, which ends at {log_end}: the source lost records, or "
        "somebody else wrote to the follower",
    )
