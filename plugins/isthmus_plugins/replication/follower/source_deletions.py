"""Deletes follower topics whose source's topic was deleted, where that is set of the pair of namespaces.

The source is asked about a topic that it does not have any more, or has another one in the place of, until it says that
the one which is followed was deleted for certain. That this one goes is recorded then, and it is deleted by its id. Any
proxy carries out what is recorded, from its beginning, so it does not matter which is killed when.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Final

from isthmus_control.commands import DeleteFollowerTopic, FollowerTopicDeleted, KeepFollowerTopic
from isthmus_control.model import FollowerTopic, OnSourceDelete, Reason, ResourceType, TopicState
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
REFUSED_RETRY_S: Final = 60.0
"""How long a topic is kept that the brokers refuse to delete, until that is tried again."""
KEPT_AFTER_S: Final = 60.0
"""So long a topic is refused before it is kept: a request of another proxy to delete it may be under way until then."""
ASKED_AT_ONCE: Final = 500


class SourceDeletions(Part):
    """What this proxy finds to be deleted at sources, and deletes here."""

    def __init__(self, context: PluginContext, peers: LinkPeers, follower_topics: FollowerTopics) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._follower_topics = follower_topics
        self._tasks = Tasks("source-deletions", context.supervision)
        self._refused: dict[str, tuple[float, Reason]] = {}
        """By id of a topic that the brokers refuse to delete: until when it is not tried again, and what they say."""
        self._refused_since: dict[str, float] = {}
        """The same of one that is recorded to go: since when they do."""

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def reason(self, record: FollowerTopic) -> Reason | None:
        """Why a topic is still here whose source's was deleted, if its brokers refuse to delete it."""
        refused = self._refused.get(record.topic_id or "")
        return None if refused is None else refused[1]

    async def look(self) -> None:
        """Find what was deleted at the sources, and delete what is recorded. Raises BrokerUnavailable."""
        for link in list(self._context.control.state.links.values()):
            candidates = self._candidates(link.name)
            for start in range(0, len(candidates), ASKED_AT_ONCE):
                await self._ask(link.name, candidates[start : start + ASKED_AT_ONCE])
        for topic in [
            record.topic for record in self._context.control.state.follower_topics.values() if record.deleting
        ]:
            # Each request takes a while, and what goes may be decided otherwise meanwhile.
            record = self._context.control.state.follower_topics.get(topic)
            if record is not None and record.deleting:
                try:
                    await self._delete(record)
                except BrokerUnavailable as error:
                    log.info("follower topic not deleted yet", extra={"topic": topic, "detail": str(error)})

    def _candidates(self, link_name: str) -> list[FollowerTopic]:
        """Topics that may have to go: the source has told this proxy that it does not have theirs any more."""
        state, now = self._context.control.state, self._clock.monotonic()
        found = []
        for record in state.follower_topics.values():
            following = state.lookup.following(ResourceType.TOPIC, record.topic)
            if (
                record.link == link_name
                and record.state is TopicState.FOLLOWING
                and record.topic not in state.truncations
                and following is not None
                and following.mapping.on_source_delete is OnSourceDelete.DELETE
                and self._refused.get(record.topic_id or "", (0.0,))[0] <= now
                and self._follower_topics.source_may_be_deleted(record)
            ):
                found.append(record)
        return found

    async def _ask(self, link_name: str, records: Sequence[FollowerTopic]) -> None:
        """Ask the source, and record what is to go."""
        connection = next(
            (each for each in self._peers.connections(link_name) if SOURCE_DELETIONS in each.peer_features), None
        )
        if connection is None:
            return
        try:
            question = calls.DeletedTopics(tuple(sorted({record.source_topic_id for record in records})))
            deleted = (await connection.call(question)).topic_ids
        except (LinkRejected, LinkLost, TimeoutError) as error:
            log.debug("source not asked for deleted topics", extra={"link": link_name, "detail": str(error)})
            return
        for record in records:
            if record.source_topic_id in deleted and record.topic_id is not None:
                check_lease(self._context)
                going = DeleteFollowerTopic(link_name, record.topic, record.topic_id, record.source_topic_id)
                outcome = await self._context.control.append(going)
                detail = outcome.message if isinstance(outcome, Rejected) else None
                log.warning(
                    "source topic deleted", extra={"link": link_name, "topic": record.topic, "detail": detail or "goes"}
                )

    async def _delete(self, record: FollowerTopic) -> None:
        """Delete a topic that is recorded to go, and what is recorded of it; or keep it, if the brokers refuse."""
        topic_id = record.topic_id or ""
        try:
            check_lease(self._context)
            await self._context.cluster.delete_topic_id(uuid.UUID(topic_id).bytes)
        except KafkaRefused as error:
            why = reasons.refused(error, "Delete", f"topic {record.topic}")
            message = f"the source's {record.source_topic} was deleted, and {record.topic} cannot be: {why}"
            now, reason = self._clock.monotonic(), Reason(ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED, message)
            self._refused[topic_id] = now + REFUSED_RETRY_S, reason
            if now - self._refused_since.setdefault(topic_id, now) < KEPT_AFTER_S:
                return
            self._refused_since.pop(topic_id)
            await self._context.control.append(KeepFollowerTopic(record.link, record.topic, topic_id))
            log.warning("follower topic not deleted", extra={"topic": record.topic, "detail": why})
            return
        self._refused.pop(topic_id, None)
        self._refused_since.pop(topic_id, None)
        await self._context.control.append(FollowerTopicDeleted(record.link, record.topic, topic_id))
        log.info("follower topic deleted", extra={"link": record.link, "topic": record.topic})

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self.look()
            except BrokerUnavailable as error:
                log.info("deletions not carried out", extra={"detail": str(error)})
            await asyncio.sleep(LOOK_INTERVAL_S)
