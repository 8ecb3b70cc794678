"""Up to where a follower's log and its source's are the same.

First the leader epochs say it: the follower has stored which of the source's epochs begins where, and asks where each
ends in the source's log now (KIP-101). What was written in an epoch that the source has lost is not the source's, even
if it looks like it. Then the records do: they are compared up to there, since somebody else may have written to the
follower at any offset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from isthmus_control.model import SourceEpoch
from isthmus_plugins.api import BrokerUnavailable, KafkaRefused, PluginContext, TopicInfo
from isthmus_plugins.replication.connection import LinkConnection, LinkRejected
from isthmus_plugins.replication.reading import read_batches
from isthmus_plugins.replication.verify import CONTENTS, RECORDS, Comparison, Digest, Ends, Verification

CALL_TIMEOUT_S: Final = 60.0
NO_EPOCH: Final = -1


class SourceLimits(NamedTuple):
    """What the source's leader says of one partition."""

    log_start: int
    log_end: int
    high_watermark: int


async def epoch_bound(
    epochs: Sequence[SourceEpoch], end: int, epoch_end: Callable[[int], Awaitable[tuple[int, int]]]
) -> int:
    """Up to where the source's leader epochs allow that both logs are the same; at most ``end``.

    ``epochs`` are those that the follower stored, and ``epoch_end`` asks the source: (its largest epoch up to the one
    that is asked for, where that ends), with epoch -1 if it knows none.
    """
    bound = end
    for known in reversed(epochs):
        epoch, ends_at = await epoch_end(known.epoch)
        if epoch == NO_EPOCH:
            return bound
        if epoch == known.epoch:
            return min(bound, ends_at)
        bound = min(bound, known.start_offset)  # the source has lost this epoch, with all that it wrote
    return bound


class _ContentsComparison(Comparison):
    """Compares records whatever became of their transactions."""

    async def _local(self, offset: int, to: int, level: str, bytes_max: int | None) -> Digest:
        return await super()._local(offset, to, CONTENTS if level == RECORDS else level, bytes_max)

    async def _far(self, offset: int, to: int, level: str, until: int = 0) -> Digest:
        return await super()._far(offset, to, CONTENTS if level == RECORDS else level, until)


class CommonLog:
    """Finds it for the follower end, and answers for the leader end."""

    def __init__(self, context: PluginContext, verification: Verification) -> None:
        self._context = context
        self._verification = verification

    # ---- the source's side ----

    async def on_limits(self, connection: LinkConnection, params: Mapping[str, Any]) -> dict[str, Any]:
        """Where the log of one partition starts and ends, and the end of an ``epoch`` in it, if one is given."""
        topic, _ = await self._verification.linked_topic(connection, str(params["topic"]))
        cluster, place = self._context.cluster, (topic.name, int(params["partition"]))
        try:
            ends, log_end = await asyncio.gather(self._verification.ends(topic, place[1]), cluster.log_end(*place))
            answer = {**ends._asdict(), "log_end": log_end, "compacts": await self._verification.compacts(topic)}
            if params.get("epoch") is not None:
                answer["epoch"], answer["epoch_end"] = await cluster.epoch_end(*place, int(params["epoch"]))
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        return answer

    # ---- the follower's side ----

    async def end(
        self,
        connection: LinkConnection,
        topic: TopicInfo,
        source_topic: str,
        partition: int,
        log_start: int,
        log_end: int,
    ) -> int:
        """Up to where the partition's log is the source's, exclusive; at most ``log_end``.

        Raises LinkRejected, LinkLost, TimeoutError, OperationError, BatchError, and BrokerUnavailable where the
        source's leader does not know yet what it may show.
        """
        place = {"topic": source_topic, "partition": partition}

        async def epoch_end(epoch: int) -> tuple[int, int]:
            answer = await connection.call("limits", {**place, "epoch": epoch}, CALL_TIMEOUT_S)
            return int(answer["epoch"]), int(answer["epoch_end"])

        answer = await connection.call("limits", place, CALL_TIMEOUT_S)
        compacts = bool(answer["compacts"])
        source = SourceLimits(int(answer["log_start"]), int(answer["log_end"]), int(answer["high_watermark"]))
        epochs = self._context.control.state.source_epochs(topic.name, partition)
        bound = await epoch_bound(epochs, min(log_end, source.log_end), epoch_end)
        if source.high_watermark < bound:
            raise BrokerUnavailable(
                f"the source's {source_topic}-{partition} shows records up to {source.high_watermark} only so far, "
                f"its log may hold more"
            )
        start = max(log_start, source.log_start)
        if bound <= start:
            return bound
        here = await self._verification.ends(topic, partition)
        there = Ends(source.log_start, source.high_watermark, int(answer["last_stable_offset"]))
        # What is open in one of the logs may be aborted in the other by now: nothing differs yet.
        ended = min(max(start, min(here.last_stable_offset, there.last_stable_offset)), bound)
        for kind, first, to in ((Comparison, start, ended), (_ContentsComparison, ended, bound)):
            comparison = kind(
                self._verification, connection, topic.name, topic, source_topic, partition, None, None, compacts
            )
            difference = await comparison.first_difference(first, to, here, there, lambda offsets: None)
            if difference is not None:
                return await self._between(topic, partition, start, difference)
        return bound

    async def _between(self, topic: TopicInfo, partition: int, start: int, offset: int) -> int:
        """The end of the last batch of ``[start, offset)`` that is whole before an offset: logs are cut there."""
        end = start
        async for _, header, _ in read_batches(self._context, topic, partition, start, offset + 1):
            if header.next_offset > offset:
                return header.base_offset if header.base_offset <= offset else end
            end = header.next_offset
        return end
