"""Asks sources where their logs end, for committed offsets that are ahead of the data here: is more to come?

A group may commit any offset, and resets, former mirrors and clients' own tests commit some that are beyond the end of
the source's own log. No data comes for those, so they are committed here as they are. The source is asked after it told
the commit: its log has whatever the commit was about by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from isthmus_plugins.cluster import CommittedOffset, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.groups.followed_group import FollowedGroup
from isthmus_plugins.replication.groups.intake import Intake
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import PARTITION_ENDS
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

ASK_INTERVAL_S: Final = 1.0
"""How often one leader end is asked."""
PARTITIONS_AT_ONCE: Final = 1000

_Waiting = tuple[FollowedGroup, TopicPartition, CommittedOffset]


class SourceEnds:
    """What is asked of leader ends, one call to each at a time."""

    def __init__(
        self, context: PluginContext, intake: Intake, tasks: Tasks, answered: Callable[[FollowedGroup], None]
    ) -> None:
        """``answered``: called for a group of which something is known now."""
        self._context = context
        self._clock = context.clock
        self._intake = intake
        self._tasks = tasks
        self._answered = answered
        self._asked_at: dict[LinkConnection, float] = {}
        """When each was asked last; infinity while it has not answered."""
        self._unknown = rare_lines(log, "source's ends not known")

    def ask(self, waiting: Iterable[tuple[FollowedGroup, TopicPartition]]) -> None:
        """Ask about what groups want there now, where that may be asked already."""
        questions: dict[LinkConnection, list[_Waiting]] = {}
        for group, place in waiting:
            connection = self._intake.connection_of(group)
            if connection is not None:
                questions.setdefault(connection, []).append((group, place, group.wanted[place]))
        self._asked_at = {each: at for each, at in self._asked_at.items() if not each.lost}
        now = self._clock.monotonic()
        for connection, concerned in questions.items():
            if PARTITION_ENDS not in connection.peer_features:
                self._note(concerned, {})
            elif self._asked_at.get(connection, 0.0) + ASK_INTERVAL_S <= now:
                self._asked_at[connection] = float("inf")
                self._tasks.start("source-ends", self._ask(connection, concerned))

    async def _ask(self, connection: LinkConnection, concerned: list[_Waiting]) -> None:
        topics = self._context.control.state.follower_topics
        names = {
            place: calls.PartitionName(record.source_topic, place[1])
            for _, place, _ in concerned
            if (record := topics.get(place[0])) is not None
        }
        names = dict(list(names.items())[:PARTITIONS_AT_ONCE])
        try:
            answer = await connection.call(calls.PartitionEnds(tuple(names.values())))
            found = {calls.PartitionName(each.topic, each.partition): each.offset for each in answer.partitions}
            ends = {place: found[name] for place, name in names.items() if name in found}
            self._note([each for each in concerned if each[1] in ends], ends)
        except LinkLost:
            pass  # it is pushed anew, and asked again
        except (LinkRejected, TimeoutError) as error:
            link_name = connection.link_name
            self._unknown.one(link_name, {"link": link_name, "detail": str(error)})
        finally:
            self._asked_at[connection] = self._clock.monotonic()

    def _note(self, concerned: Iterable[_Waiting], ends: dict[TopicPartition, int]) -> None:
        """Note whether the source has the data; where it cannot say, that it may have."""
        for group, place, wanted in concerned:
            if group.wanted.get(place) == wanted:
                group.source_ends(place, wanted.offset <= ends.get(place, wanted.offset))
                self._answered(group)
