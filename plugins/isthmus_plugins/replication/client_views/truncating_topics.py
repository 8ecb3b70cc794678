"""Keeps clients of a topic that is truncated waiting, from before it is deleted until it is whole again.

To its clients the topic never goes away. Metadata shows it from memory; reads and searches of it are answered with
OFFSET_NOT_AVAILABLE, committed offsets of groups with COORDINATOR_LOAD_IN_PROGRESS: clients try those again, and
consumers keep their positions. Other topics in the same request are served.

Fetch sessions (KIP-227) would leave the topic out of their requests while nothing changes, so there are none with it
(``fetch_sessions``).

A consumer may have read what is cut. To it the topic gets a new leader, with a leader epoch of its own: so consumers
ask where the epoch of their last record ends (KIP-320). The answer is the cut: their positions stand, or move to it.
Afterwards the topic is another one for Kafka, whose leader epochs begin again, and who asks about an epoch that it
never had is answered the same.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from isthmus_control.control_state import ControlState
from isthmus_control.model import ResourceType
from isthmus_control.truncations import Truncation
from isthmus_plugins.api import Answer, Ask, Close, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_as_asked, on_loop
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.describing import described, question
from isthmus_plugins.fetch_verdicts import refused_in_part
from isthmus_plugins.replication.client_views.fetch_sessions import FetchSessions
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol import peeks
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import COORDINATOR_LOAD_IN_PROGRESS, OFFSET_NOT_AVAILABLE
from isthmus_protocol.messages import (
    build_response,
    decode_request,
    decode_response,
    encode_response,
    parse_request_head,
)
from isthmus_protocol.refusals import Part as RequestPart
from isthmus_protocol.refusals import Refusal, refuse
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.topic_entries import topic_entries

NO_EPOCH: Final = -1
CAUSE: Final = "truncating_topic"
ENCODED_MAX: Final = 100
"""Versions, and sets of brokers, for which topics are kept encoded."""

CODES: Final = {
    ApiKey.FETCH: OFFSET_NOT_AVAILABLE,
    ApiKey.LIST_OFFSETS: OFFSET_NOT_AVAILABLE,
    ApiKey.OFFSET_COMMIT: COORDINATOR_LOAD_IN_PROGRESS,
    ApiKey.TXN_OFFSET_COMMIT: COORDINATOR_LOAD_IN_PROGRESS,
    ApiKey.OFFSET_DELETE: COORDINATOR_LOAD_IN_PROGRESS,
}
"""What a partition of a withheld topic is answered with."""


class TruncatingTopics(Part):
    """Hooks that do nothing while no topic is truncated, nor was."""

    def __init__(self) -> None:
        self._withheld: dict[str, Truncation] = {}
        self._ids: dict[bytes, str] = {}
        """Old and new ids of withheld topics."""
        self._cut: dict[str, Truncation] = {}
        """Topics that were truncated, with the last time that it happened."""
        self._encoded: dict[tuple[int, int, tuple[int, ...]], Mapping[str, bytes]] = {}
        """By API, version and the brokers that are there: withheld topics as they are shown."""
        self._sessions = FetchSessions(CAUSE)
        self._released = asyncio.Event()
        self._seen: tuple[object, object] = (None, None)

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.FETCH, self.on_fetch, whole=True, pure=True),
            RequestHook(ApiKey.OFFSET_FOR_LEADER_EPOCH, self.on_leader_epoch, whole=True, pure=True),
            RequestHook(ApiKey.OFFSET_FETCH, self.on_offset_fetch, whole=True, pure=True),
            RequestHook(ApiKey.METADATA, self.on_metadata, whole=True, pure=True),
            RequestHook(ApiKey.DESCRIBE_TOPIC_PARTITIONS, self.on_metadata, whole=True, pure=True),
            *(
                RequestHook(api, self.on_parts, whole=True, pure=True)
                for api in (
                    ApiKey.LIST_OFFSETS,
                    ApiKey.OFFSET_COMMIT,
                    ApiKey.TXN_OFFSET_COMMIT,
                    ApiKey.OFFSET_DELETE,
                )
            ),
        ]

    def control_changed(self, state: ControlState) -> None:
        """Withhold what is truncated now, and let go of what is whole."""
        seen = (state.truncations, state.past_truncations)
        if seen[0] is self._seen[0] and seen[1] is self._seen[1]:
            return
        self._seen = seen
        before = self._withheld
        self._withheld = {name: each for name, each in state.truncations.items() if each.withheld}
        self._encoded.clear()
        self._ids = {
            uuid.UUID(topic_id).bytes: name
            for name, each in self._withheld.items()
            for topic_id in (each.topic_id, each.new_topic_id)
            if topic_id is not None
        }
        self._cut = {each.topic: each for each in state.past_truncations if each.new_topic_id is not None}
        if self._withheld.keys() - before.keys():
            self._sessions.forget()
        if before.keys() - self._withheld.keys():
            released, self._released = self._released, asyncio.Event()
            released.set()

    def _name(self, part: RequestPart) -> str | None:
        if part.topic_id is not None:
            return self._ids.get(part.topic_id.bytes)
        return part.topic if part.topic in self._withheld else None

    def _decide(self, part: RequestPart) -> Refusal | None:
        name = self._name(part)
        if name is None:
            return None
        return Refusal(CODES[ApiKey(part.api_key)], f"topic {name} is being truncated to its source: try again")

    # ---- reading ----

    def on_fetch(self, request: Request) -> Verdict:
        """Answer for withheld topics, and forward the rest without a fetch session."""
        sessions = self._sessions.now
        if not self._withheld:
            return None
        wait_ms, _, _, session_epoch, topics, _ = peeks.fetch_partitions(request.version, request.frame)
        by_id = peeks.topics_are_ids(ApiKey.FETCH, request.version)
        keys = self._ids if by_id else {name.encode() for name in self._withheld}
        named = any(topic in keys for topic, _ in topics)
        if (ended := self._sessions.end(sessions, request, session_epoch, named)) is not None:
            return ended
        if not named:
            return None
        return refused_in_part(request, self._decide, wait_ms, self._released, CAUSE)

    def on_parts(self, request: Request) -> Verdict:
        """Answer for the partitions of withheld topics, and forward the rest."""
        if not self._withheld:
            return None
        head, payload = decode_request(request.frame)
        return verdict_of(request, head, refuse(head, payload, self._decide), CAUSE)

    def on_leader_epoch(self, request: Request) -> Verdict:
        """Speak for the epochs that topics had before they were cut."""
        if not self._withheld and not self._cut:
            return None
        _, payload = decode_request(request.frame)
        asked: Any = payload
        epochs = {
            (topic.topic, partition.partition): partition.leader_epoch
            for topic in asked.topics
            if topic.topic in self._cut or topic.topic in self._withheld
            for partition in topic.partitions
        }
        if not epochs:
            return None
        return Replace(
            request.frame, answered_as_asked(request, partial(self._with_old_epochs, request.version, epochs))
        )

    def _with_old_epochs(self, version: int, epochs: dict[TopicPartition, int], frame: bytes) -> bytes:
        correlation_id, payload = decode_response(ApiKey.OFFSET_FOR_LEADER_EPOCH, version, frame)
        answered: Any = payload

        def of_old_epoch(topic: str, entry: Any) -> Any:
            epoch = epochs.get((topic, entry.partition), NO_EPOCH)
            withheld = self._withheld.get(topic)
            truncation = withheld or self._cut.get(topic)
            cut = None if truncation is None else truncation.cut(entry.partition)
            if cut is None or epoch == NO_EPOCH:
                return entry
            if withheld is None and (int(entry.error_code) or entry.end_offset >= 0):
                return entry  # the broker knows the epoch
            values: dict[str, Any] = {"error_code": error_code(0), "end_offset": cut.offset}
            if hasattr(entry, "leader_epoch"):
                values["leader_epoch"] = epoch
            return replace(entry, **values)

        topics = tuple(
            replace(topic, partitions=tuple(of_old_epoch(topic.topic, entry) for entry in topic.partitions))
            for topic in answered.topics
        )
        return encode_response(replace(answered, topics=topics), correlation_id)

    # ---- committed offsets of groups ----

    def on_offset_fetch(self, request: Request) -> Verdict:
        """Have a group that asks for its committed offsets in a withheld topic, or for all it has, ask again."""
        if not self._withheld:
            return None
        head, payload = decode_request(request.frame)
        asked: Any = payload
        groups = getattr(asked, "groups", None)
        if not any(self._asks(topics) for topics in ([asked.topics] if groups is None else [g.topics for g in groups])):
            return None
        code = error_code(COORDINATOR_LOAD_IN_PROGRESS)
        if groups is not None:
            values: dict[str, Any] = {
                "groups": [{"group_id": group.group_id, "error_code": code} for group in groups],
            }
        elif head.version >= 2:
            values = {"error_code": code}
        else:
            return Close("committed offsets of a topic that is being truncated")
        answer = build_response(ApiKey.OFFSET_FETCH, head.version, values)
        return Answer(encode_response(answer, request.correlation_id), CAUSE)

    def _asks(self, topics: Sequence[Any] | None) -> bool:
        if topics is None:
            return True
        return any(
            getattr(topic, "name", None) in self._withheld
            or ((topic_id := getattr(topic, "topic_id", None)) is not None and topic_id.bytes in self._ids)
            for topic in topics
        )

    # ---- what there is ----

    def on_metadata(self, request: Request) -> Verdict:
        """Forward the request, and show withheld topics as they were, to who may describe them.

        The broker is asked who may: of a list of all topics it leaves out what the client may not see and what is
        deleted alike.
        """
        if not self._withheld:
            return None
        asked = _asked_for(request)
        if asked is None:
            wanted = set(self._withheld)
        else:
            names = {name.encode(): name for name in self._withheld}
            wanted = {known for each in asked if each is not None and (known := names.get(each) or self._ids.get(each))}
        if not wanted:
            return None
        by_id = asked is not None and not self._ids.keys().isdisjoint(asked)
        frame, api_key, version = request.frame, request.api_key, request.version

        def shown(told: Collection[str]) -> Verdict:
            return Replace(frame, partial(self._remembered, api_key, version, {*told}, by_id)) if told else None

        client_id = parse_request_head(frame).client_id
        read = partial(described, ResourceType.TOPIC, wanted)
        return Ask(question(ResourceType.TOPIC, wanted, client_id), shown, read)

    def _remembered(self, api_key: int, version: int, wanted: set[str], by_id: bool, frame: bytes) -> bytes:
        entries = topic_entries(api_key, version)
        brokers = peeks.brokers(version, frame) if api_key == ApiKey.METADATA else []
        shown = self._shown(api_key, version, tuple(brokers))
        there = entries.named(frame, map(str.encode, wanted))
        changed = []
        added = []
        for name in sorted(wanted):
            entry, instead = there.get(name.encode()), shown.get(name, b"")
            if entry is not None:
                changed.append((entry, instead))
            elif instead:
                added.append(instead)
        for topic_id in self._ids if by_id else ():  # of an old one the broker knows no name
            entry = entries.without_name(frame, topic_id)
            if entry is not None:
                changed.append((entry, b""))
        return entries.spliced(frame, changed, added)

    def _shown(self, api_key: int, version: int, brokers: tuple[int, ...]) -> Mapping[str, bytes]:
        """Withheld topics as they stand in an answer with these brokers."""
        found = self._encoded.get((api_key, version, brokers))
        if found is None:
            withheld = self._withheld
            topics = [_described(each, brokers) for each in withheld.values()]
            made = encode_response(build_response(api_key, version, {"topics": topics}), 0)
            found = dict(zip(withheld, topic_entries(api_key, version).all_of(made), strict=True))
            on_loop(self._remember, withheld, (api_key, version, brokers), found)
        return found

    def _remember(
        self, withheld: Mapping[str, Truncation], asked: tuple[int, int, tuple[int, ...]], shown: Mapping[str, bytes]
    ) -> None:
        """What was encoded of these; in the thread there may be others meanwhile."""
        if withheld is not self._withheld:
            return
        if len(self._encoded) >= ENCODED_MAX:
            self._encoded.clear()
        self._encoded[asked] = shown


def _asked_for(request: Request) -> list[bytes | None] | None:
    """The names and ids of the topics that a request asks for; None: all topics."""
    if request.api_key == ApiKey.METADATA:
        topics, _ = peeks.metadata(request.version, request.frame)
        return None if topics is None else [each for topic in topics for each in topic]
    return peeks.topics(request.api_key, request.version, "request", request.frame) or None


def _described(truncation: Truncation, brokers: Sequence[int]) -> dict[str, Any]:
    """A topic as Metadata and DescribeTopicPartitions show it, with leaders that are there, and of another epoch."""
    partitions = []
    for index, known in enumerate(truncation.partitions):
        leader = known.leader
        if brokers and leader not in brokers:
            leader = brokers[index % len(brokers)]
        partitions.append(
            {
                "partition_index": index,
                "leader_id": leader,
                "leader_epoch": truncation.shown_epoch(index),
                "replica_nodes": [leader],
                "isr_nodes": [leader],
            }
        )
    return {
        "name": truncation.topic,
        "topic_id": uuid.UUID(truncation.topic_id),
        "is_internal": False,
        "partitions": partitions,
    }
