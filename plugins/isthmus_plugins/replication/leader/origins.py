"""Records where the records of led partitions come from before they are pushed, and says it to the follower.

What is recorded, and when, is decided in :mod:`isthmus_plugins.replication.link.histories`; here the logs are asked.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from math import inf
from typing import Any, Final, NamedTuple

from isthmus_control.commands import Body, LogEpochs, RecordLogEpochs, TermStart, ToldPartition, TopicEpochs
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS
from isthmus_control.model import TopicState
from isthmus_control.origins import Origin, OriginRange, PartitionOrigins, at
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.link import calls, features, histories
from isthmus_plugins.replication.link.histories import EpochSeen, LostBefore
from isthmus_plugins.replication.link.joined_commands import JoinedCommands
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import BatchHeader

NO_EPOCH: Final = -1
RECORDED_AT_MOST: Final = 4
"""Times in a row: each should leave less to be recorded."""


class _Begun(NamedTuple):
    """Where a partition's log ends, and its leader epoch: this cluster writes there from now on, or did before."""

    topic: str
    topic_id: str
    partition: int
    start: TermStart


class _Seen(NamedTuple):
    """Leader epochs that a log has, and where it starts and ends."""

    topic: str
    topic_id: str
    partition: int
    epochs: tuple[EpochSeen, ...]
    log: tuple[int, int]
    leader_epoch: int


class LeaderOrigins:
    """Of the partitions that are led over links."""

    def __init__(self, context: PluginContext, tasks: Tasks) -> None:
        self._context = context
        self._terms = JoinedCommands(context, tasks, "terms", _terms)
        self._epochs = JoinedCommands(context, tasks, "log-epochs", _log_epochs)

    async def opening(self, stream: LeaderStream) -> calls.Origins | None:
        """Record what is due before a stream is opened; what the follower is told. None: it is not told.

        Raises BrokerUnavailable, KafkaRefused.
        """
        if (
            self._context.control.state.level < ORIGINS
            or stream.copy is not None  # in another form it is another log
            or features.ORIGINS not in stream.connection.peer_features
        ):
            return None
        cluster, (topic, partition), topic_id = self._context.cluster, stream.key.place, _id_of(stream)
        log = await cluster.log_start(topic, partition), await cluster.log_end(topic, partition)
        if self._is_followed(topic, topic_id):
            # Its own source may say something else before the next batch: what it says is not passed on.
            own = Origin(self._context.cluster_id, topic_id)
            return calls.Origins(
                ToldPartition(partition, log[0], (OriginRange(own, log[0], None, 0, assumed=True),)), *log
            )
        await self._recorded(self._terms, _Begun(topic, topic_id, partition, TermStart(log[1], stream.leader_epoch)))
        known = self._context.control.state.origins_of(topic, topic_id, partition).ranges
        last = next((each.epochs[-1].epoch for each in reversed(known) if each.epochs), NO_EPOCH)
        if last != stream.leader_epoch:
            seen = await self._epochs_of(stream, log, last)
            await self._record_epochs(_Seen(topic, topic_id, partition, seen, log, stream.leader_epoch))
        stream.tells_origins = True
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
        stream.told_epoch, stream.told_until = header.leader_epoch, _until(known, header.base_offset)
        return True

    async def tell(self, stream: LeaderStream, header: BatchHeader) -> None:
        """Record the epoch of a batch before it is pushed, and have the follower record that.

        Raises BrokerUnavailable, KafkaRefused, LinkRejected, LinkLost, TimeoutError.
        """
        topic, partition = stream.key.place
        log = await self._context.cluster.log_start(topic, partition), header.next_offset
        seen = (EpochSeen(header.leader_epoch, header.base_offset, header.next_offset),)
        await self._record_epochs(_Seen(topic, _id_of(stream), partition, seen, log, stream.leader_epoch))
        said = self._said(stream, log)
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

    async def _epochs_of(self, stream: LeaderStream, log: tuple[int, int], known: int) -> tuple[EpochSeen, ...]:
        """The leader epochs in which a log was written, from one that is known on, as its leader says.

        The end was read before: an epoch that is in the log behind it is not looked for.
        """
        start, end = log
        found: list[EpochSeen] = []
        epoch, ends = await self._context.cluster.epoch_end(*stream.key.place, stream.leader_epoch)
        ends = min(ends, end)
        while epoch != NO_EPOCH:
            before, begins = (
                await self._context.cluster.epoch_end(*stream.key.place, epoch - 1) if epoch else (NO_EPOCH, NO_EPOCH)
            )
            begins = max(start, begins) if before != NO_EPOCH else start
            if begins < ends:
                found.append(EpochSeen(epoch, begins, ends))
            if epoch <= known or begins <= start:
                break
            epoch, ends = before, min(begins, end)
        return tuple(reversed(found))

    async def _record_epochs(self, seen: _Seen) -> None:
        """Raises BrokerUnavailable."""
        for _ in range(RECORDED_AT_MOST):  # what a log lost goes first, and a new term begins
            if not _log_epochs(self._context.control.state, [seen]):
                return
            await self._recorded(self._epochs, seen)
        raise BrokerUnavailable(f"the leader epochs of {seen.topic}-{seen.partition} are not recorded yet")

    async def _recorded(self, commands: JoinedCommands[Any], entry: Any) -> None:
        refused = await commands.record(entry)
        if refused is not None:
            raise BrokerUnavailable(f"where records come from is not recorded: {refused.message}")


def _id_of(stream: LeaderStream) -> str:
    return str(uuid.UUID(bytes=stream.topic_id))


def _until(known: PartitionOrigins, offset: int) -> float:
    """Up to where the same is known as at an offset: the same range, and the same epoch of it."""
    found = at(known.ranges, offset)
    if found is None:
        return min((each.start_offset for each in known.ranges if each.start_offset > offset), default=inf)
    end = inf if found.end_offset is None else found.end_offset
    return min((each.start_offset for each in found.epochs if each.start_offset > offset), default=end)


def _terms(state: ControlState, begun: Sequence[_Begun]) -> Sequence[Body]:
    ends: dict[histories.Topic, dict[int, TermStart]] = {}
    for each in begun:
        ends.setdefault((each.topic, each.topic_id), {})[each.partition] = each.start
    return histories.to_lead(state, ends)


def _log_epochs(state: ControlState, seen: Sequence[_Seen]) -> Sequence[Body]:
    due: dict[histories.Topic, list[LogEpochs]] = {}
    mended: list[Body] = []
    for each in seen:
        topic = each.topic, each.topic_id
        known = state.origins_of(*topic, each.partition)
        found = histories.log_epochs(
            known, state.cluster_id, each.topic_id, each.partition, each.epochs, each.log, cleaned=False
        )
        if isinstance(found, LostBefore):
            mended += histories.to_mend(state, topic, each.partition, found, each.leader_epoch)
        elif found is not None:
            due.setdefault(topic, []).append(found)
    if due:
        topics = tuple(TopicEpochs(*topic, tuple(partitions)) for topic, partitions in due.items())
        return (*mended, RecordLogEpochs(topics))
    return mended
