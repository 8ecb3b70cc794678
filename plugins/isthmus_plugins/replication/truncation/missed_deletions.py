"""Looks after deletions that a follower may have missed (``docs/adr/0005-missed-deletions.md``).

The control log says of which partitions that may be true, and before which offset. When a partition has come that far,
the latest records of all keys are compared with the source's, while both sides go on: mostly nothing was missed, and
the control log says that. Else the topic is truncated, which compares once more, when nothing moves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from isthmus_control.commands import PartitionOffset, SettleDeletions
from isthmus_control.model import FollowerTopic, Reason, TopicState
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.truncation.common_log import CommonLog, SourceReplaced
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import BatchError

log = logging.getLogger("isthmus_plugins.replication")

LOOK_INTERVAL_S: Final = 0.5
COMPARED_TIMES: Final = 3
"""Both cleaners go on meanwhile: what differs once may be on its way out on one side."""
COMPARED_AGAIN_S: Final = 2.0
RETRY_S: Final = 5.0
Begin = Callable[[str, str, str, Reason], None]
"""Begins the truncation of (link, topic, topic id) for a reason."""


class MissedDeletions(Part):
    """The comparisons of partitions that are led by brokers which this proxy fronts, one at a time."""

    def __init__(
        self, context: PluginContext, peers: LinkPeers, follower_end: FollowerEnd, common_log: CommonLog, begin: Begin
    ) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._follower_end = follower_end
        self._common_log = common_log
        self._begin = begin
        self._tasks = Tasks("missed-deletions", context.supervision)
        self.compared = 0
        """Comparisons of a whole partition."""

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            records = self._context.control.state.follower_topics.values()
            doubted = {record.topic for record in records if record.doubted}
            for stream in [each for each in self._follower_end.streams() if each.topic in doubted]:
                until = self._doubted(stream)
                if until is not None:
                    try:
                        await self._resolve(stream, until)
                    except (
                        BrokerUnavailable,
                        KafkaRefused,
                        LinkRejected,
                        LinkLost,
                        TimeoutError,
                        OperationError,
                        BatchError,
                        SourceReplaced,
                    ) as error:
                        where = {"topic": stream.topic, "partition": stream.partition}
                        log.warning("deletions not compared", extra={**where, "detail": str(error)})
                        await asyncio.sleep(RETRY_S)

    def _record(self, stream: FollowerStream) -> FollowerTopic | None:
        """What is recorded of a stream's topic, while it follows and is whole."""
        state = self._context.control.state
        record = state.follower_topics.get(stream.topic)
        follows = record is not None and record.state is TopicState.FOLLOWING and record.topic_id == stream.topic_id
        return record if follows and stream.topic not in state.truncations else None

    def _doubted(self, stream: FollowerStream) -> int | None:
        """Before which offset deletions may be missing, if the stream is there by now."""
        if stream.closed or self._clock.monotonic() > self._context.lease_deadline:
            return None
        record = self._record(stream)
        until = None if record is None else record.doubted.get(stream.partition)
        return until if until is not None and stream.follower_log.end >= until else None

    async def _resolve(self, stream: FollowerStream, until: int) -> None:
        """Compare a partition, and record what came of it."""
        for again in range(COMPARED_TIMES):
            if again:
                await asyncio.sleep(COMPARED_AGAIN_S)
            record, info = self._record(stream), (await self._context.cluster.topics()).get(stream.topic)
            if record is None or info is None or stream.topic_id != info.id_text:
                return
            found = await self._common_log.same_latest(self._connection(stream), info, record, stream.partition, until)
            if found is None:
                return
            self.compared += 1
            if found[1]:
                entry = PartitionOffset(stream.topic, stream.topic_id, stream.partition, found[0])
                outcome = await self._context.control.append(SettleDeletions((entry,)))
                if not isinstance(outcome, Rejected):
                    log.info(
                        "no deletion missed",
                        extra={"topic": entry.topic, "partition": entry.partition, "until": entry.offset},
                    )
                return
        self._begin(stream.link_name, stream.topic, stream.topic_id, _missed(stream))

    def _connection(self, stream: FollowerStream) -> LinkConnection:
        connections = self._peers.connections(stream.link_name)
        if not connections:
            raise LinkLost(f"link {stream.link_name} is not connected")
        return connections[0]


def _missed(stream: FollowerStream) -> Reason:
    return Reason(
        ReasonCode.DELETIONS_MISSED,
        f"partition {stream.partition}: {stream.topic} has keys that were deleted in the source's "
        f"{stream.source_topic}, whose cleaner had taken the tombstones before they were copied",
    )
