"""Records what this cluster's own logs say of its writing: where terms begin, and in which leader epochs it wrote.

What is recorded, and when, is decided in :mod:`isthmus_plugins.replication.link.histories`; here the logs are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from isthmus_control.commands import Body, LogEpochs, RecordLogEpochs, TermStart, TopicEpochs
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS
from isthmus_control.origins import Ended
from isthmus_control.outcome import Rejected
from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import histories
from isthmus_plugins.replication.link.histories import EpochSeen, LostBefore
from isthmus_plugins.replication.link.joined_commands import JoinedCommands
from isthmus_plugins.tasks import Tasks

NO_EPOCH: Final = -1
RECORDED_AT_MOST: Final = 4
"""Times in a row: each should leave less to be recorded."""
TERMS_AT_ONCE: Final = 5_000
"""Partitions in a command that begins a term: some 25 bytes each."""


class Begun(NamedTuple):
    """Where a partition's log ends, and its leader epoch: this cluster writes there from now on, or did before."""

    topic: str
    topic_id: str
    partition: int
    start: TermStart
    only_if_new: bool = False
    """Not where anything is recorded of its topic: what was recorded since its end was read says more."""


class Seen(NamedTuple):
    """Leader epochs that a log has, and where it starts and ends; None: behind these, it was not asked where."""

    topic: str
    topic_id: str
    partition: int
    epochs: tuple[EpochSeen, ...]
    log: tuple[int, int | None]
    leader_epoch: int


async def begin_terms(context: PluginContext, topics: Sequence[TopicInfo], ended: Ended) -> None:
    """Record that this cluster writes in topics from their logs' ends on, before anybody does, if it did not before.

    ``topics``: as they were read before, nothing is written in them now. ``ended``: how what they followed ended.
    Raises BrokerUnavailable.
    """
    if context.control.state.level < ORIGINS:
        return
    epochs = {
        (topic.name, partition): (topic.id_text, info.leader_epoch)
        for topic in topics
        for partition, info in enumerate(topic.partitions)
    }
    ends = await context.cluster.log_ends(epochs.keys()) if epochs else {}
    if missing := epochs.keys() - ends.keys():
        topic, partition = min(missing)
        raise BrokerUnavailable(f"the log end of {topic}-{partition} cannot be read")
    begun = [
        Begun(topic, topic_id, partition, TermStart(ends[topic, partition], epoch))
        for (topic, partition), (topic_id, epoch) in epochs.items()
    ]
    for first in range(0, len(begun), TERMS_AT_ONCE):
        for body in _terms(context.control.state, begun[first : first + TERMS_AT_ONCE], ended):
            outcome = await context.control.append(body)
            if isinstance(outcome, Rejected):
                raise BrokerUnavailable(f"that this cluster writes is not recorded: {outcome.message}")


async def epochs_of(
    context: PluginContext, place: TopicPartition, log: tuple[int, int], leader_epoch: int, known: int = NO_EPOCH
) -> tuple[EpochSeen, ...]:
    """The leader epochs in which a log was written, as its leader says, from one that is known on.

    ``log``: where it starts, and where it ended before: an epoch that is in the log behind that is not looked for.
    Raises BrokerUnavailable, KafkaRefused.
    """
    start, end = log
    found: list[EpochSeen] = []
    if start == end:
        return ()
    epoch, ends = await context.cluster.epoch_end(*place, leader_epoch)
    ends = min(ends, end)
    while epoch != NO_EPOCH:
        before, begins = await context.cluster.epoch_end(*place, epoch - 1) if epoch else (NO_EPOCH, NO_EPOCH)
        begins = max(start, begins) if before != NO_EPOCH else start
        if begins < ends:
            found.append(EpochSeen(epoch, begins, ends))
        if epoch <= known or begins <= start:
            break
        epoch, ends = before, min(begins, end)
    return tuple(reversed(found))


def epochs_due(state: ControlState, seen: Sequence[Seen]) -> Sequence[Body]:
    """What is to be recorded of what logs have, in this order.

    Where one lost something a new term begins, and once that is recorded more may be due.
    """
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


class OwnLogs:
    """Of single partitions: what is due for many at the same time is recorded together."""

    def __init__(self, context: PluginContext, tasks: Tasks) -> None:
        self._context = context
        self._terms = JoinedCommands(context, tasks, "terms", _terms)
        self._epochs = JoinedCommands(context, tasks, "log-epochs", epochs_due)

    async def begin_term(self, begun: Begun) -> None:
        """Record that this cluster writes in a partition, if it did not before. Raises BrokerUnavailable."""
        await self._recorded(self._terms, begun)

    async def record_written(self, begun: Begun, log_start: int) -> None:
        """Record the leader epochs of a log up to its end, as its leader says them, where the last is another one, or
        the log lost its end.

        ``begun``: with its end. Raises BrokerUnavailable, KafkaRefused.
        """
        topic, topic_id, partition, (log_end, leader_epoch), _ = begun
        known = self._context.control.state.origins_of(topic, topic_id, partition).ranges
        last = next((each.epochs[-1].epoch for each in reversed(known) if each.epochs), NO_EPOCH)
        log, lost = (log_start, log_end), histories.ends_beyond(known, log_end)
        if lost or (last != leader_epoch and log_start < log_end):
            last = NO_EPOCH if lost else last
            seen = await epochs_of(self._context, (topic, partition), log, leader_epoch, last)
            await self.record_epochs(Seen(topic, topic_id, partition, seen, log, leader_epoch))

    async def record_epochs(self, seen: Seen) -> None:
        """Record epochs, and before what the log lost: there a new term begins. Raises BrokerUnavailable."""
        for _ in range(RECORDED_AT_MOST):
            if not epochs_due(self._context.control.state, [seen]):
                return
            await self._recorded(self._epochs, seen)
        raise BrokerUnavailable(f"the leader epochs of {seen.topic}-{seen.partition} are not recorded yet")

    async def _recorded(self, commands: JoinedCommands[Any], entry: Any) -> None:
        refused = await commands.record(entry)
        if refused is not None:
            raise BrokerUnavailable(f"where records come from is not recorded: {refused.message}")


def is_new(state: ControlState, begun: Begun) -> bool:
    """Whether nothing is recorded of a partition, nor of another topic that has, or had, the name."""
    origins = state.origins.get(begun.topic)
    if begun.topic in state.follower_topics or (origins is not None and origins.topic_id != begun.topic_id):
        return False
    return not state.origins_of(begun.topic, begun.topic_id, begun.partition).ranges


def _terms(state: ControlState, begun: Sequence[Begun], ended: Ended = Ended.DETACHED) -> Sequence[Body]:
    """``ended``: how what was followed there ended, where nobody has recorded that."""
    ends: dict[histories.Topic, dict[int, TermStart]] = {}
    for each in sorted(begun, key=lambda each: not each.only_if_new):  # another end of the same was read later
        if not each.only_if_new or is_new(state, each):
            ends.setdefault((each.topic, each.topic_id), {})[each.partition] = each.start
    return histories.to_lead(state, ends, ended)
