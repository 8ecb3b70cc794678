"""The proxies' own topics and groups: clients neither read nor move these topics, and see nothing of them in lists.

The control log holds secrets of links (sealed, where a control key is set). So a Fetch of it ends the connection, and
lists of all topics leave it out, or a consumer of every topic would run into that. Who asks for it by name sees that it
exists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from isthmus_control.model import INTERNAL_PREFIX
from isthmus_plugins.api import Answer, Close, Replace, Request, RequestHook, Verdict
from isthmus_protocol.error_codes import POLICY_VIOLATION
from isthmus_protocol.messages import decode_request, decode_response, encode_response
from isthmus_protocol.refusals import Refusal, refuse_all
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.topic_entries import topic_entries

CAUSE: Final = "internal_topic"
UNCLEAN: Final = 1
"""ElectionType of ElectLeaders: a replica that may lack records."""
_PREFIX: Final = INTERNAL_PREFIX.encode()


class InternalTopics:
    """Hooks that keep clients from the proxies' own topics, beyond the writes that reservations refuse."""

    def __init__(self, topic_ids: Collection[bytes]) -> None:
        self._topic_ids = topic_ids
        self._marks = (_PREFIX, *topic_ids)
        """A request that has none of these bytes anywhere is not about an internal topic."""

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.FETCH, self.on_fetch, whole=True),
            RequestHook(ApiKey.SHARE_FETCH, self.on_fetch, whole=True),
            RequestHook(ApiKey.DESCRIBE_TOPIC_PARTITIONS, self.hidden, whole=True),
            RequestHook(ApiKey.LIST_GROUPS, self.hidden_groups, whole=True),
            RequestHook(ApiKey.ALTER_PARTITION_REASSIGNMENTS, self.on_move, whole=True),
            RequestHook(ApiKey.ELECT_LEADERS, self.on_move, whole=True),
        ]

    def on_fetch(self, request: Request) -> Verdict:
        """Let a Fetch pass that asks for no internal topic: a search of its bytes is enough for nearly all."""
        frame = request.frame
        if len(self._marks) != 1 + len(self._topic_ids):
            self._marks = (_PREFIX, *self._topic_ids)
        for mark in self._marks:
            if mark in frame:
                break
        else:
            return None
        _, payload = decode_request(frame)
        asked: Any = payload
        for topic in asked.topics or ():
            name = getattr(topic, "topic", None)
            if name is not None and name.startswith(INTERNAL_PREFIX):
                return Close(f"a read of the internal topic {name}")
            topic_id = getattr(topic, "topic_id", None)
            if topic_id is not None and topic_id.bytes in self._marks:
                return Close("a read of an internal topic")
        return None

    def hidden(self, request: Request) -> Verdict:
        """Forward a request for all topics, and leave internal ones out of the answer."""
        return Replace(request.frame, partial(_without_internal, request.api_key, request.version))

    def hidden_groups(self, request: Request) -> Verdict:
        """Forward a request for all groups, and leave the proxies' own out of the answer."""
        return Replace(request.frame, partial(_without_internal_groups, request.api_key, request.version))

    def on_move(self, request: Request) -> Verdict:
        """Refuse to move an internal topic to other brokers, and to elect a leader for it that may lack records."""
        head, payload = decode_request(request.frame)
        asked: Any = payload
        if request.api_key == ApiKey.ELECT_LEADERS:
            if getattr(asked, "election_type", 0) != UNCLEAN:
                return None
            touched = asked.topic_partitions is None or any(
                topic.topic.startswith(INTERNAL_PREFIX) for topic in asked.topic_partitions
            )
        else:
            touched = any(topic.name.startswith(INTERNAL_PREFIX) for topic in asked.topics)
        if not touched:
            return None
        refused = refuse_all(
            head, payload, Refusal(POLICY_VIOLATION, f"{INTERNAL_PREFIX}* are the proxies' own topics")
        )
        if refused is None or refused.answer is None:
            return Close("a change of an internal topic")
        return Answer(refused.answer, CAUSE)


def _without_internal(api_key: int, version: int, frame: bytes) -> bytes:
    entries = topic_entries(api_key, version)
    return entries.spliced(frame, [(entry, b"") for entry in entries.beginning_with(frame, _PREFIX)])


def _without_internal_groups(api_key: int, version: int, frame: bytes) -> bytes:
    if _PREFIX not in frame:
        return frame
    correlation_id, response = decode_response(api_key, version, frame)
    answered: Any = response
    groups = tuple(group for group in answered.groups if not group.group_id.startswith(INTERNAL_PREFIX))
    return encode_response(replace(answered, groups=groups), correlation_id)
