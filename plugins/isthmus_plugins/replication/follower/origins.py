"""Records where the records come from that are about to be appended, as the source says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from isthmus_control.commands import (
    Body,
    LogEpochs,
    RecordOriginEpochs,
    RecordOrigins,
    ToldPartition,
    ToldTopic,
    TopicEpochs,
)
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS
from isthmus_control.model import ResourceType
from isthmus_control.origins import Origin
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.link import calls, histories, reasons
from isthmus_plugins.replication.link.connection import LinkRejected
from isthmus_plugins.replication.link.histories import Parted
from isthmus_plugins.replication.link.joined_commands import JoinedCommands
from isthmus_plugins.tasks import Tasks


class _Told(NamedTuple):
    """What a source says of a partition. ``here``, ``there``: where the logs start and end."""

    link: str
    topic: str
    topic_id: str
    source: Origin
    said: ToldPartition
    here: tuple[int, int]
    there: tuple[int, int]


class FollowerOrigins:
    """Of the partitions that follow."""

    def __init__(self, context: PluginContext, tasks: Tasks) -> None:
        self._context = context
        self._told = JoinedCommands(context, tasks, "origins", _recorded)

    async def record(self, stream: FollowerStream, source_topic_id: str, told: calls.Origins) -> Parted | None:
        """Record what the source says, before anything of that is appended; or say that the logs are not the same.

        Raises LinkRejected, BrokerUnavailable.
        """
        state, follower_log = self._context.control.state, stream.follower_log
        found = state.links.get(stream.link_name)
        if state.level < ORIGINS or found is None:
            return None
        entry = _Told(
            stream.link_name,
            stream.topic,
            stream.topic_id,
            Origin(found.remote_cluster_id, source_topic_id),
            told.said,
            (follower_log.start or 0, follower_log.end),
            (told.log_start, told.log_end),
        )
        refused = await self._told.record(entry)
        if refused is not None:
            raise LinkRejected(reasons.NOT_FOLLOWING, refused.message)
        state = self._context.control.state
        parted = _due(state, entry)
        if isinstance(parted, Parted):
            return parted
        if state.lookup.leading(ResourceType.TOPIC, stream.topic):
            # Whichever proxy pushes it on must know before it can read what is appended.
            known = state.origins_of(stream.topic, stream.topic_id, stream.partition)
            await self._context.control.enforced(known.at_offset)
        return None


def _due(state: ControlState, told: _Told) -> ToldPartition | Parted | None:
    known = state.origins_of(told.topic, told.topic_id, told.said.partition)
    return histories.to_follow(known, told.source, told.said, told.here, told.there)


def _recorded(state: ControlState, told: Sequence[_Told]) -> Sequence[Body]:
    due: dict[str, dict[histories.Topic, list[ToldPartition]]] = {}
    later: dict[str, dict[histories.Topic, list[LogEpochs]]] = {}
    for each in told:
        found = _due(state, each)
        if found is not None and not isinstance(found, Parted):
            known = state.origins_of(each.topic, each.topic_id, each.said.partition)
            topic = each.topic, each.topic_id
            if (epochs := histories.later_epochs(known, each.source, found)) is not None:
                later.setdefault(each.link, {}).setdefault(topic, []).append(epochs)
            else:
                due.setdefault(each.link, {}).setdefault(topic, []).append(found)
    return [
        *(
            RecordOrigins(link, tuple(ToldTopic(*topic, tuple(partitions)) for topic, partitions in topics.items()))
            for link, topics in due.items()
        ),
        *(
            RecordOriginEpochs(link, tuple(TopicEpochs(*topic, tuple(some)) for topic, some in topics.items()))
            for link, topics in later.items()
        ),
    ]
