"""Records where the records of led partitions come from before they are pushed, and says it to the follower.

What is recorded, and when, is decided in :mod:`isthmus_plugins.replication.link.histories`.

Of what this cluster follows it says what its source says. That may change with any batch, and a batch here does not
show it; another proxy is the first to know. But that one appends nothing before every proxy of the cluster with a lease
knows as well (``follower/origins.py``): who has read a batch and has a lease knows where it comes from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from math import inf

from isthmus_control.commands import TermStart
from isthmus_control.levels import ORIGINS
from isthmus_control.model import TopicState
from isthmus_control.origins import PartitionOrigins, at
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, id_as_text
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.link import calls, features, histories
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.link.histories import EpochSeen
from isthmus_plugins.replication.link.own_logs import Begun, OwnLogs, Seen, is_new
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import BatchHeader


class LeaderOrigins:
    """Of the partitions that are led over links."""

    def __init__(self, context: PluginContext, tasks: Tasks) -> None:
        self._context = context
        self._tasks = tasks
        self._own = OwnLogs(context, tasks)

    def begin(self, connection: LinkConnection, begun: Sequence[Begun]) -> None:
        """Streams of these partitions are about to be opened: record of those that are new, together, that this cluster
        writes there."""
        state = self._context.control.state
        new = [each for each in begun if is_new(state, each)] if self._are_told(connection) else []
        if new:
            self._tasks.start("begin-terms", self._begin(new))

    async def _begin(self, begun: Sequence[Begun]) -> None:
        with suppress(BrokerUnavailable, KafkaRefused):  # as a stream opens it is done again, and told
            await asyncio.gather(*map(self._own.begin_term, begun))
            # Most that are new get their first records now, and these wait for that to be recorded, too.
            ends = await self._context.cluster.log_ends([(each.topic, each.partition) for each in begun])
            await asyncio.gather(*(self._written(each, ends.get((each.topic, each.partition), 0)) for each in begun))

    async def _written(self, begun: Begun, end: int) -> None:
        """Record the leader epochs of what this cluster wrote in its term up to the log's end, which was read since."""
        known = self._context.control.state.origins_of(begun.topic, begun.topic_id, begun.partition).open_range
        if end and known is not None and histories.is_own(known, self._context.cluster_id, begun.topic_id):
            await self._record_written(begun, await self._log(begun.topic, begun.partition, end))

    async def _record_written(self, begun: Begun, log: tuple[int, int]) -> None:
        start, end = log
        await self._own.record_written(begun._replace(start=begun.start._replace(offset=end)), start)

    async def _log(self, topic: str, partition: int, end: int) -> tuple[int, int]:
        """A log's start and end, where the end was read before: what was deleted in between had been there."""
        start = await self._context.cluster.log_start(topic, partition) if end else 0
        return start, max(start, end)

    def _are_told(self, connection: LinkConnection) -> bool:
        """Whether followers behind a connection record where records come from."""
        return self._context.control.state.level >= ORIGINS and features.ORIGINS in connection.peer_features

    async def opening(self, stream: LeaderStream) -> calls.Origins | None:
        """Record what is due before a stream is opened; what the follower is told. None: it is not told.

        Raises BrokerUnavailable, KafkaRefused.
        """
        if stream.copy is not None or not self._are_told(stream.connection):  # in another form it is another log
            return None
        (topic, partition), topic_id = stream.key.place, _id_of(stream)
        is_followed = self._is_followed(topic, topic_id)
        end = await self._context.cluster.log_end(topic, partition)
        if is_followed != self._is_followed(topic, topic_id):  # where it follows no more, more may have come than that
            raise BrokerUnavailable(f"{topic}-{partition} came to follow, or to follow no more, as its end was read")
        stream.tells_origins = True
        begun = Begun(topic, topic_id, partition, TermStart(end, stream.leader_epoch))
        if not is_followed:  # before anything else is asked: who records it later is to have read the later end
            await self._own.begin_term(begun)
        log = await self._log(topic, partition, end)
        if is_followed:
            check_lease(self._context)
        else:
            await self._record_written(begun, log)
        return self._said(stream, log)

    def are_known(self, stream: LeaderStream, header: BatchHeader) -> bool:
        """Whether the follower was told where a batch comes from, which is read next; else :meth:`tell` it before."""
        topic, partition = stream.key.place
        known = self._context.control.state.origins_of(topic, _id_of(stream), partition)
        due = histories.epoch_due(
            known, self._context.cluster_id, _id_of(stream), header.base_offset, header.leader_epoch
        )
        if due is not None or known.at_offset != stream.told_at:
            return False
        if self._is_followed(topic, _id_of(stream)):
            return self._context.clock.monotonic() <= self._context.lease_deadline
        stream.told_epoch, stream.told_until = header.leader_epoch, _until(known, header.base_offset)
        return True

    async def tell(self, stream: LeaderStream, header: BatchHeader) -> None:
        """Record the epoch of a batch before it is pushed, and have the follower record that.

        Raises BrokerUnavailable, KafkaRefused, LinkRejected, LinkLost, TimeoutError.
        """
        topic, partition = stream.key.place
        if self._is_followed(topic, _id_of(stream)):
            check_lease(self._context)
        start = await self._context.cluster.log_start(topic, partition)
        seen = (EpochSeen(header.leader_epoch, header.base_offset, header.next_offset),)
        # A term may have begun behind the batch, where the log ends by now: this cluster followed until a moment ago.
        await self._own.record_epochs(Seen(topic, _id_of(stream), partition, seen, (start, None), stream.leader_epoch))
        said = self._said(stream, (start, header.next_offset))
        if said is not None:
            await stream.connection.call(calls.StreamOrigins(stream.stream_id, said))

    def _is_followed(self, topic: str, topic_id: str) -> bool:
        record = self._context.control.state.follower_topics.get(topic)
        return record is not None and record.state is TopicState.FOLLOWING and record.topic_id == topic_id

    def _said(self, stream: LeaderStream, log: tuple[int, int]) -> calls.Origins | None:
        topic, partition = stream.key.place
        known = self._context.control.state.origins_of(topic, _id_of(stream), partition)
        stream.told_at = known.at_offset
        told = histories.told(known, partition, log[0])
        return None if told is None else calls.Origins(told, *log)


def _id_of(stream: LeaderStream) -> str:
    return id_as_text(stream.topic_id)


def _until(known: PartitionOrigins, offset: int) -> float:
    """Up to where the same is known as at an offset: the same range, and the same epoch of it."""
    found = at(known.ranges, offset)
    if found is None:
        return min((each.start_offset for each in known.ranges if each.start_offset > offset), default=inf)
    end = inf if found.end_offset is None else found.end_offset
    return min((each.start_offset for each in found.epochs if each.start_offset > offset), default=end)
