"""Keeps consumers of a follower on a synchronous link waiting until it was In-Sync once.

Until then the source acks transactions that are not copied whole, so nobody is to read them in part: reads are answered
OFFSET_NOT_AVAILABLE, by partition, which clients try again. That a partition was In-Sync is recorded in the control
log, so every proxy of the cluster shows it from then on, whatever becomes of the link.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Iterable, Sequence
from typing import Final

from isthmus_control.commands import PartitionSync, RecordSync
from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, LinkMode, ResourceType, Role, SyncState, TopicState
from isthmus_control.outcome import Rejected
from isthmus_plugins.api import Request, RequestHook, Verdict
from isthmus_plugins.cluster import BrokerUnavailable, TopicPartition
from isthmus_plugins.fetch_verdicts import refused_in_part
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.client_views.fetch_sessions import FetchSessions
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.tasks import Tasks
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import OFFSET_NOT_AVAILABLE
from isthmus_protocol.messages import decode_request
from isthmus_protocol.refusals import Part as RequestPart
from isthmus_protocol.refusals import Refusal, refuse
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.replication")

CAUSE: Final = "syncing_topic"


def followed_synchronously(state: ControlState, link: Link) -> dict[str, str]:
    """The topics that follow over a link, if it is synchronous: their ids."""
    mappings = link.pairs(Role.FOLLOWER, ResourceType.TOPIC)
    if link.mode is not LinkMode.SYNCHRONOUS or not mappings:
        return {}
    return {
        topic.topic: topic.topic_id
        for topic in state.follower_topics.values()
        if topic.link == link.name
        and topic.state is TopicState.FOLLOWING
        and topic.topic_id is not None
        and any(mapping.holds(topic.topic) for mapping in mappings)
    }


class SyncingTopics(Part):
    """Hooks that do nothing while no topic follows over a synchronous link."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._tasks = Tasks("syncing-topics", context.supervision)
        self._following: dict[str, str] = {}
        """Topics that follow over a synchronous link: their ids."""
        self._readable: set[TopicPartition] = set()
        """Their partitions that were In-Sync once."""
        self._by_frame: dict[bytes, str] = {}
        """Their names by what frames call them, names or ids."""
        self._sessions = FetchSessions(CAUSE)
        self._released = asyncio.Event()
        self._state: ControlState | None = None
        self._changed = asyncio.Event()
        """The control log says something else than what is known here: to be looked at before it is gone by."""
        self._recording: set[TopicPartition] = set()

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.FETCH, self.on_fetch, whole=True, pure=True),
            RequestHook(ApiKey.LIST_OFFSETS, self.on_list_offsets, whole=True, pure=True),
        ]

    def control_changed(self, state: ControlState) -> None:
        """Thousands of records may come at once, each about one topic: all topics are looked at when they are over, or
        a request comes."""
        before, self._state = self._state, state
        if before is None or not (
            state.links is before.links
            and state.follower_topics is before.follower_topics
            and state.sync_records is before.sync_records
        ):
            self._changed.set()

    async def _look_for_ever(self) -> None:
        """Release reads that wait, which no request may come for."""
        while True:
            await self._changed.wait()
            self._look()

    def _look(self) -> None:
        if not self._changed.is_set() or self._state is None:
            return
        if threading.current_thread() is not threading.main_thread():  # a large request: the loop looks at once
            return
        self._changed.clear()
        state = self._state
        following: dict[str, str] = {}
        readable: set[TopicPartition] = set()
        for link in state.links.values():
            following |= followed_synchronously(state, link)
            readable |= {
                place
                for place, record in state.sync_records.get(link.name, {}).items()
                if record.reached and following.get(place[0]) == record.topic_id
            }
        if following.keys() - self._following.keys() or self._readable - readable:
            self._sessions.forget()
        if readable - self._readable or self._following.keys() - following.keys():
            released, self._released = self._released, asyncio.Event()
            released.set()
        self._following, self._readable = following, readable
        self._by_frame = {name.encode(): name for name in following}
        self._by_frame |= {uuid.UUID(topic_id).bytes: name for name, topic_id in following.items()}

    def _holds(self, name: str | None, partition: int) -> bool:
        return name in self._following and (name, partition) not in self._readable

    # ---- requests ----

    def on_fetch(self, request: Request) -> Verdict:
        """Answer for partitions that are Syncing, and forward the rest without a fetch session."""
        self._look()
        sessions = self._sessions.now
        if not self._following:
            return None
        wait_ms, _, _, session_epoch, topics, _ = peeks.fetch_partitions(request.version, request.frame)
        named = any(
            self._holds(self._by_frame.get(topic), partition)
            for topic, partitions in topics
            for partition, _ in partitions
        )
        if (ended := self._sessions.end(sessions, request, session_epoch, named)) is not None:
            return ended
        if not named:
            return None
        return refused_in_part(request, self._decide, wait_ms, self._released, CAUSE)

    def on_list_offsets(self, request: Request) -> Verdict:
        """Answer for partitions that are Syncing, and forward the rest."""
        self._look()
        if not self._following:
            return None
        head, payload = decode_request(request.frame)
        return verdict_of(request, head, refuse(head, payload, self._decide), CAUSE)

    def _decide(self, part: RequestPart) -> Refusal | None:
        self._look()
        name = part.topic if part.topic_id is None else self._by_frame.get(part.topic_id.bytes)
        if part.partition is None or not self._holds(name, part.partition):
            return None
        return Refusal(OFFSET_NOT_AVAILABLE, f"{name}-{part.partition} is Syncing: try again")

    # ---- what was In-Sync ----

    def reached(self, link_name: str, partitions: Iterable[tuple[str, str, int]]) -> None:
        """The source has granted leases of these (topic, topic id, partition): record what is not recorded."""
        self._look()
        new = [
            PartitionSync(topic, topic_id, partition, 0)
            for topic, topic_id, partition in partitions
            if self._holds(topic, partition)
            and self._following[topic] == topic_id
            and (topic, partition) not in self._recording
        ]
        if new:
            self._recording |= {(each.topic, each.partition) for each in new}
            self._tasks.start("record", self._record(link_name, tuple(new)))

    async def _record(self, link_name: str, partitions: tuple[PartitionSync, ...]) -> None:
        try:
            link = self._context.control.state.links.get(link_name)
            if link is None or link.mode is not LinkMode.SYNCHRONOUS:
                return
            body = RecordSync(link.name, link.link_id, SyncState.IN_SYNC, partitions, reached=True)
            outcome = await self._context.control.append(body)
            if isinstance(outcome, Rejected):
                log.warning("In-Sync not recorded", extra={"link": link_name, "detail": outcome.message})
        except BrokerUnavailable as error:  # the next lease has it recorded
            log.warning("In-Sync not recorded", extra={"link": link_name, "detail": str(error)})
        finally:
            self._recording -= {(each.topic, each.partition) for each in partitions}
