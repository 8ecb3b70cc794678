"""The proxies' own topics: clients neither read nor move them, and are not told of them (``untold``).

The control log holds secrets of links (sealed, where a control key is set). So a Fetch of it is answered, by partition,
as one of a client that may not read it. Who asks for it by name sees that it exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from isthmus_control.model import INTERNAL_PREFIX
from isthmus_plugins.api import Answer, Close, Request, RequestHook, Verdict
from isthmus_plugins.fetch_verdicts import refused_in_part
from isthmus_plugins.process import PluginContext
from isthmus_plugins.reservation.untold import Untold
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import POLICY_VIOLATION, TOPIC_AUTHORIZATION_FAILED
from isthmus_protocol.messages import decode_request
from isthmus_protocol.refusals import Part, Refusal, refuse, refuse_all
from isthmus_protocol.schema import ApiKey

CAUSE: Final = "internal_topic"
UNCLEAN: Final = 1
"""ElectionType of ElectLeaders: a replica that may lack records."""
_PREFIX: Final = INTERNAL_PREFIX.encode()


class InternalTopics:
    """Hooks that keep clients from the proxies' own topics, beyond the writes that reservations refuse."""

    def __init__(self, context: PluginContext) -> None:
        self._topic_ids = context.internal_topic_ids
        self._untold = Untold(context)
        self._never = asyncio.Event()
        """What waits for internal topics to be readable waits as long as it may."""
        self._marks = (_PREFIX, *self._topic_ids)
        """A request that has none of these bytes anywhere is not about an internal topic."""

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.FETCH, self.on_fetch, whole=True, pure=True),
            RequestHook(ApiKey.SHARE_FETCH, self.on_fetch, whole=True, pure=True),
            RequestHook(ApiKey.ALTER_PARTITION_REASSIGNMENTS, self.on_move, whole=True, pure=True),
            RequestHook(ApiKey.ELECT_LEADERS, self.on_move, whole=True, pure=True),
            *self._untold.hooks(),
        ]

    async def stop(self) -> None:
        await self._untold.stop()

    def on_all_topics(self, request: Request) -> Verdict:
        """Forward a Metadata request for all topics, and leave internal ones out of the answer."""
        return self._untold.on_all_topics(request)

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
        if request.api_key == ApiKey.SHARE_FETCH:
            head, payload = decode_request(frame)
            return verdict_of(request, head, refuse(head, payload, self._unreadable), CAUSE)
        wait_ms, *_ = peeks.fetch_partitions(request.version, frame)
        return refused_in_part(request, self._unreadable, wait_ms, self._never, CAUSE)

    def _unreadable(self, part: Part) -> Refusal | None:
        ours = (part.topic or "").startswith(INTERNAL_PREFIX) or (
            part.topic_id is not None and self._untold.is_ours(part.topic_id.bytes)
        )
        return Refusal(TOPIC_AUTHORIZATION_FAILED) if ours else None

    def on_move(self, request: Request) -> Verdict:
        """Refuse to move an internal topic to other brokers, and to elect a leader for it that may lack records."""
        head, payload = decode_request(request.frame)
        asked: Any = payload
        if request.api_key == ApiKey.ELECT_LEADERS:
            if getattr(asked, "election_type", 0) != UNCLEAN:
                return self._untold.on_question(request) if asked.topic_partitions is None else None
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
