"""Lets groups commit and ask under the id that a topic had before it was truncated.

Consumers of KIP-848 groups name topics by id (OffsetCommit and OffsetFetch v10). Their coordinator takes a partition
from them when the old topic is gone, and Kafka's own commits what it has read before it lets go: under the old id, if
it has not heard of the new one yet. It takes UNKNOWN_TOPIC_ID for something that passes, asks for no metadata
meanwhile, and so would commit in vain until its rebalance timeout (seen with 4.3).

What an offset of the old topic says, the same one of the new topic says up to the cut, and what was beyond that is
gone: a commit beyond it becomes one of the cut.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

from isthmus_control.control_state import ControlState
from isthmus_control.truncations import Succession
from isthmus_plugins.api import Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_as_asked
from isthmus_plugins.replication.link.part import Part
from isthmus_protocol import peeks
from isthmus_protocol.messages import decode_request, decode_response, encode_request, encode_response
from isthmus_protocol.schema import ApiKey

TOPIC_IDS_SINCE: Final = 10
"""The first version of OffsetCommit and OffsetFetch that names topics by id."""

_Ids: TypeAlias = dict[uuid.UUID, uuid.UUID]
"""The ids that a client named topics by, by those that they have."""


class TopicIdAliases(Part):
    """Hooks that do nothing until a topic was made anew."""

    def __init__(self) -> None:
        self._successions: dict[bytes, Succession] = {}
        """By former id: what became of the topic in the end."""
        self._seen: object = None

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.OFFSET_COMMIT, self.on_commit, whole=True, pure=True),
            RequestHook(ApiKey.OFFSET_FETCH, self.on_offset_fetch, whole=True, pure=True),
        ]

    def control_changed(self, state: ControlState) -> None:
        if state.successions is self._seen:
            return
        self._seen = state.successions
        successions: dict[bytes, Succession] = {}
        for chain in state.successions.values():
            found: Succession | None = None
            for step in reversed(chain):
                found = step if found is None else step.then(found)
                successions[uuid.UUID(step.former).bytes] = found
        self._successions = successions

    def on_commit(self, request: Request) -> Verdict:
        """Forward a commit with the ids that there are, and offsets that the topics had."""
        if not self._may_concern(request) or self._successions.keys().isdisjoint(
            peeks.topics(ApiKey.OFFSET_COMMIT, request.version, "request", request.frame)
        ):
            return None
        head, payload = decode_request(request.frame)
        asked: Any = payload
        topics, former = self._renamed(asked.topics)
        if not former:
            return None
        frame = encode_request(replace(asked, topics=topics), request.correlation_id, head.client_id)
        return Replace(frame, answered_as_asked(request, partial(_committed, request.version, former)))

    def on_offset_fetch(self, request: Request) -> Verdict:
        """The same for a question about committed offsets."""
        if not self._may_concern(request) or self._successions.keys().isdisjoint(
            peeks.offset_fetch_topic_ids(request.version, request.frame)
        ):
            return None
        head, payload = decode_request(request.frame)
        asked: Any = payload
        former: dict[str, _Ids] = {}
        groups = []
        for group in asked.groups:
            topics, former[group.group_id] = self._renamed(group.topics or ())
            groups.append(replace(group, topics=topics) if former[group.group_id] else group)
        if not any(former.values()):
            return None
        frame = encode_request(replace(asked, groups=tuple(groups)), request.correlation_id, head.client_id)
        return Replace(frame, answered_as_asked(request, partial(_answered, request.version, former)))

    def _may_concern(self, request: Request) -> bool:
        return bool(self._successions) and request.version >= TOPIC_IDS_SINCE

    def _renamed(self, topics: Sequence[Any]) -> tuple[tuple[Any, ...], _Ids]:
        """Topics under the ids that they have now, and the ids that they were named by; no ids: nothing changes."""
        found: dict[uuid.UUID, Any] = {}
        former: _Ids = {}
        for topic in topics:
            succession = self._successions.get(topic.topic_id.bytes) if topic.topic_id is not None else None
            if succession is not None:
                former[uuid.UUID(succession.successor)] = topic.topic_id
                topic = _succeeded(topic, succession)
            found[topic.topic_id] = topic
        # Who names a topic by two of its ids knows the last one.
        return tuple(found.values()), former if len(found) == len(topics) else {}


def _succeeded(topic: Any, succession: Succession) -> Any:
    """A topic of a request under its last id, and with no offset beyond a cut."""

    def within(entry: Any) -> Any:
        if not hasattr(entry, "committed_offset") or entry.partition_index >= len(succession.offsets):
            return entry
        return replace(entry, committed_offset=min(entry.committed_offset, succession.offsets[entry.partition_index]))

    topic = replace(topic, topic_id=uuid.UUID(succession.successor))
    return replace(topic, partitions=tuple(map(within, topic.partitions))) if hasattr(topic, "partitions") else topic


def _committed(version: int, former: _Ids, frame: bytes) -> bytes:
    correlation_id, payload = decode_response(ApiKey.OFFSET_COMMIT, version, frame)
    answered: Any = payload
    return encode_response(replace(answered, topics=_named(answered.topics, former)), correlation_id)


def _answered(version: int, former: Mapping[str, _Ids], frame: bytes) -> bytes:
    correlation_id, payload = decode_response(ApiKey.OFFSET_FETCH, version, frame)
    answered: Any = payload
    groups = tuple(
        replace(group, topics=_named(group.topics, former.get(group.group_id, {}))) for group in answered.groups
    )
    return encode_response(replace(answered, groups=groups), correlation_id)


def _named(topics: Sequence[Any], former: _Ids) -> tuple[Any, ...]:
    return tuple(replace(topic, topic_id=former.get(topic.topic_id, topic.topic_id)) for topic in topics)
