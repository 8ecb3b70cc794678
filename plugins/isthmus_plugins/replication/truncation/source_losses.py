"""What of a follower's log the source had acked In-Sync, and lost: counted, and recorded before anything is cut.

The logs say it. Whatever comes over a link is stored under producer ids that no cluster hands out, so what the source
had ends where somebody wrote past the proxies: an append of a link that came behind that was never confirmed. And the
source's leader epochs say how much of it the source has still.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from isthmus_control.commands import FoundLoss, RecordSourceLosses
from isthmus_control.levels import SOURCE_LOSSES
from isthmus_control.model import LinkMode, OnSourceLoss, ResourceType
from isthmus_control.outcome import Rejected
from isthmus_control.source_losses import LossState
from isthmus_control.truncations import PartitionCut, Truncation
from isthmus_plugins.cluster import TopicInfo
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.connection import Peer
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_plugins.replication.truncation.common_log import CommonLog
from isthmus_protocol.producer_ids import is_filler, is_replicated

log = logging.getLogger("isthmus_plugins.replication")


class _Counted(NamedTuple):
    end: int
    records: int
    """Markers among them, and no fillers."""


class SourceLosses:
    """Looks at what a truncation would cut."""

    def __init__(self, context: PluginContext, common_log: CommonLog) -> None:
        self._context = context
        self._common_log = common_log

    async def are_held(
        self, connection: Peer, topic: TopicInfo, truncation: Truncation, cuts: Sequence[PartitionCut]
    ) -> bool:
        """Record what the source lost of these cuts; whether something of it waits for the operator, so nothing is cut.

        Raises SourceReplaced, OperationError, BatchError, and what brokers and peers raise.
        """
        found = [
            loss
            for cut in cuts
            if cut.records and (loss := await self._loss(connection, topic, truncation, cut)) is not None
        ]
        if found:
            await self._record(truncation.link, found)
        return self._context.control.state.held(truncation.topic, truncation.topic_id) is not None

    async def _loss(
        self, connection: Peer, topic: TopicInfo, truncation: Truncation, cut: PartitionCut
    ) -> FoundLoss | None:
        """What is to be cut of one partition although it was acked In-Sync; None: nothing, as far as it is known."""
        state = self._context.control.state
        following = state.lookup.following(ResourceType.TOPIC, truncation.topic)
        end = self._in_sync_until(truncation, cut)
        differs = truncation.reason.code in reasons.DIFFER and truncation.source is None
        if following is None or not differs or end == cut.offset:
            return None
        confirmed = await self._count(topic, cut.partition, cut.offset, end)
        source = await self._common_log.at_source(connection, truncation.topic, cut.partition, confirmed.end)
        begin = max(cut.offset, source.kept_to)
        lost = await self._count(topic, cut.partition, begin, confirmed.end)
        if not lost.records:
            return None
        default = OnSourceLoss.HOLD if source.strict else OnSourceLoss.CUT
        held = state.level >= SOURCE_LOSSES and (following.mapping.on_source_loss or default) is OnSourceLoss.HOLD
        return FoundLoss(
            ResourceType.TOPIC,
            following.mapping.local_prefix,
            truncation.topic,
            truncation.topic_id,
            cut.partition,
            begin,
            lost.end,
            lost.records,
            LossState.HELD if held else LossState.CUTTING,
        )

    async def _count(self, topic: TopicInfo, partition: int, begin: int, end: int) -> _Counted:
        """What came over a link from an offset on, up to where somebody else wrote."""
        counted = _Counted(begin, 0)
        async for _, header, _ in read_batches(self._context, topic, partition, begin, end):
            if not is_replicated(header.producer_id):
                break
            records = 0 if is_filler(header.producer_id) else header.record_count
            counted = _Counted(header.next_offset, counted.records + records)
        return counted

    def _in_sync_until(self, truncation: Truncation, cut: PartitionCut) -> int:
        """Where what was confirmed while acks waited for it ends at most.

        While the link is synchronous that is all of a partition that was In-Sync once; before, what is claimed of it.
        """
        state, partition = self._context.control.state, cut.partition
        link = state.links[truncation.link]
        reached = state.sync_record(link.name, truncation.topic, truncation.topic_id, partition)
        if link.mode is LinkMode.SYNCHRONOUS and reached is not None:
            return cut.log_end
        claim = state.claim(truncation.topic, truncation.topic_id, partition)
        return cut.offset if claim is None else min(cut.log_end, claim.end)

    async def _record(self, link_name: str, found: Sequence[FoundLoss]) -> None:
        """Have it in the control log, if that may hold it. Raises OperationError, BrokerUnavailable."""
        state = self._context.control.state
        if state.level >= SOURCE_LOSSES:
            command = RecordSourceLosses(link_name, state.links[link_name].link_id, tuple(found))
            outcome = await self._context.control.append(command)
            if isinstance(outcome, Rejected):
                raise OperationError("CONFLICT", f"what the source lost is not recorded: {outcome.message}")
        for loss in found:
            log.error(
                "source lost records",
                extra={
                    "link": link_name,
                    "topic": loss.topic,
                    "partition": loss.partition,
                    "from_offset": loss.from_offset,
                    "to_offset": loss.to_offset,
                    "messages": loss.count,
                    "state": loss.state.value,
                },
            )
