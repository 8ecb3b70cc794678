"""Deletes follower topics whose source's topic was deleted, where that is set of the pair of namespaces.

The source is asked about a topic that it does not have any more, or has another one in the place of, until it says that
the one which is followed was deleted for certain. Its control log tells that, so it has to be the one in which it had
the topic: a cluster that was lost and made anew, or whose controllers were restored, knows nothing of what it had.

That this one goes is recorded then, and it is deleted by its id, one after the other, by the proxy that recorded it.
Another one goes on, from the beginning, when that one's lease is over, so it does not matter which is killed when.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Final

from isthmus_control.commands import DeleteFollowerTopic, FollowerTopicDeleted, KeepFollowerTopic
from isthmus_control.directions import followed
from isthmus_control.model import FollowerTopic, NamespaceMapping, OnSourceDelete, Reason, ResourceType, TopicState
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.connection import LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import SOURCE_DELETIONS
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

LOOK_INTERVAL_S: Final = 2.0
KEPT_S: Final = 300.0
"""How long a topic is kept that may not be deleted, until that is tried again."""
UNDER_WAY_S: Final = 60.0
"""So long a request to delete a topic may be under way that nobody has seen the answer of."""
ASKED_AT_ONCE: Final = 500
GOING_AT_ONCE: Final = 10
"""So many are recorded to go at most: a promotion waits for them."""


class SourceDeletions(Part):
    """What this proxy finds to be deleted at sources, and deletes here."""

    def __init__(self, context: PluginContext, peers: LinkPeers, follower_topics: FollowerTopics) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._follower_topics = follower_topics
        self._tasks = Tasks("source-deletions", context.supervision)
        self._kept: dict[str, tuple[float, Reason]] = {}
        """By id of a topic that may not be deleted: until when it is not tried again, and why."""
        self._under_way: dict[str, float] = {}
        """By id of one that is recorded to go: until when a request to delete it may be under way."""

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def reason(self, record: FollowerTopic) -> Reason | None:
        """Why a topic is still here although its source's was deleted."""
        kept = self._kept.get(record.topic_id or "")
        return None if kept is None else kept[1]

    async def look(self) -> None:
        """Find what was deleted at the sources, and delete it. Raises BrokerUnavailable."""
        for record in [each for each in self._context.control.state.follower_topics.values() if each.deleting]:
            await self._carry_out(record.topic)
        for link in list(self._context.control.state.links.values()):
            for mapping in followed(link, ResourceType.TOPIC):
                if mapping.on_source_delete is OnSourceDelete.DELETE:
                    candidates = self._candidates(link.name, mapping)
                    for start in range(0, len(candidates), ASKED_AT_ONCE):
                        await self._ask(link.name, mapping, candidates[start : start + ASKED_AT_ONCE])

    # ---- what was deleted there ----

    def _candidates(self, link_name: str, mapping: NamespaceMapping) -> list[FollowerTopic]:
        """Topics that may have to go: the source has told this proxy that it does not have theirs any more."""
        now = self._clock.monotonic()
        return [
            record
            for record in self._context.control.state.follower_topics.values()
            if record.link == link_name
            and mapping.holds(record.topic)
            and self._follower_topics.source_may_be_deleted(record)
            and self._kept.get(record.topic_id or "", (0.0,))[0] <= now
            and self._may_go(record)
        ]

    def _may_go(self, record: FollowerTopic) -> bool:
        """Whether the control log would take it, as it stands now, that a topic goes."""
        state = self._context.control.state
        return (
            state.follower_topics.get(record.topic) == record
            and record.state is TopicState.FOLLOWING
            and record.topic_id is not None
            and self._is_set(record)
            and record.topic not in state.truncations
            and not state.is_promoted(record.topic)
            and state.held(record.topic, record.topic_id) is None
        )

    def _is_set(self, record: FollowerTopic) -> bool:
        """Whether a topic is to go with its source's, as the operator has it now."""
        following = self._context.control.state.lookup.following(ResourceType.TOPIC, record.topic)
        return following is not None and following.mapping.on_source_delete is OnSourceDelete.DELETE

    async def _ask(self, link_name: str, mapping: NamespaceMapping, records: Sequence[FollowerTopic]) -> None:
        """Ask the source, and delete what it has deleted. Raises BrokerUnavailable."""
        connection = next(
            (each for each in self._peers.connections(link_name) if SOURCE_DELETIONS in each.peer_features), None
        )
        if connection is None:
            return
        topic_ids = sorted({record.source_topic_id for record in records})
        try:
            answer = await connection.call(calls.DeletedTopics(tuple(topic_ids), mapping.remote_prefix))
        except (LinkRejected, LinkLost, TimeoutError) as error:
            log.debug("source not asked for deleted topics", extra={"link": link_name, "detail": str(error)})
            return
        for record in records:
            if record.source_topic_id not in answer.topic_ids:
                self._kept.pop(record.topic_id or "", None)
            elif not answer.log or record.source_log != answer.log:
                self._keep_for_now(record, reasons.deleted_in_another_log(record))
            elif self._may_go(record) and self._going_now() < GOING_AT_ONCE:
                await self._go(record)

    def _going_now(self) -> int:
        return sum(record.deleting for record in self._context.control.state.follower_topics.values())

    async def _go(self, record: FollowerTopic) -> None:
        """Record that a topic is to go, and delete it."""
        check_lease(self._context)
        outcome = await self._context.control.append(self._going(record))
        if isinstance(outcome, Rejected):
            self._keep_for_now(record, outcome.message)
            return
        log.warning("source topic deleted", extra={"link": record.link, "topic": record.topic})
        await self._carry_out(record.topic)

    def _going(self, record: FollowerTopic) -> DeleteFollowerTopic:
        topic_id, ours = record.topic_id or "", self._context.incarnation
        return DeleteFollowerTopic(record.link, record.topic, topic_id, record.source_topic_id, ours)

    def _keep_for_now(self, record: FollowerTopic, message: str) -> None:
        """Have a topic stay until it is looked at again, and say why."""
        reason, before = Reason(ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED, message), self.reason(record)
        self._kept[record.topic_id or ""] = self._clock.monotonic() + KEPT_S, reason
        if reason != before:
            log.warning("follower topic not deleted", extra={"topic": record.topic, "detail": message})

    # ---- what is recorded to go ----

    async def _carry_out(self, topic: str) -> None:
        """Delete a topic that is recorded to go, if that is this proxy's to do; or keep it, where it may not go.

        What goes may be decided otherwise at any time. Raises BrokerUnavailable.
        """
        state, ours = self._context.control.state, self._context.incarnation
        record = state.follower_topics.get(topic)
        if record is None or not record.deleting:
            return
        if record.owner != ours:
            if state.may_run(record.owner):
                return
            check_lease(self._context)
            await self._context.control.append(self._going(record))
            record = self._context.control.state.follower_topics.get(topic)
            if record is None or not record.deleting or record.owner != ours:
                return
            self._may_be_under_way(record)
        if not self._is_set(record):
            await self._keep(record)
            return
        try:
            await self._delete(record)
        except BrokerUnavailable as error:
            self._may_be_under_way(record)
            log.info("follower topic not deleted yet", extra={"topic": topic, "detail": str(error)})

    async def _delete(self, record: FollowerTopic) -> None:
        """Delete a topic that is recorded to go, and what is recorded of it. Raises BrokerUnavailable."""
        topic_id = record.topic_id or ""
        check_lease(self._context)
        try:
            await self._context.cluster.delete_topic_id(uuid.UUID(topic_id).bytes)
        except KafkaRefused as error:
            why = reasons.refused(error, "Delete", f"topic {record.topic}")
            message = f"the source's {record.source_topic} was deleted, and {record.topic} cannot be: {why}"
            self._keep_for_now(record, message)
            await self._keep(record)
            return
        self._kept.pop(topic_id, None)
        self._under_way.pop(topic_id, None)
        await self._context.control.append(FollowerTopicDeleted(record.link, record.topic, topic_id))
        log.info("follower topic deleted", extra={"link": record.link, "topic": record.topic})

    def _may_be_under_way(self, record: FollowerTopic) -> None:
        """A request of which this process has no answer, or of another one, may delete the topic later."""
        self._under_way[record.topic_id or ""] = self._clock.monotonic() + UNDER_WAY_S

    async def _keep(self, record: FollowerTopic) -> None:
        """Have a topic that was to go follow again, once nothing can delete it any more."""
        topic_id = record.topic_id or ""
        if self._clock.monotonic() < self._under_way.get(topic_id, 0.0):
            return
        self._under_way.pop(topic_id, None)
        check_lease(self._context)
        kept = KeepFollowerTopic(record.link, record.topic, topic_id, self._context.incarnation)
        await self._context.control.append(kept)
        log.info("follower topic kept", extra={"link": record.link, "topic": record.topic})

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self.look()
            except BrokerUnavailable as error:
                log.info("deletions not carried out", extra={"detail": str(error)})
            await asyncio.sleep(LOOK_INTERVAL_S)
