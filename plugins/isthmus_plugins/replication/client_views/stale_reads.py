"""Keeps consumers of a follower on a synchronous link waiting while it may be older than its source.

So it is where a namespace says so (``stale_reads`` no). Reads are let through while this proxy has a lease of the
partition by which all that the source has acked is here, from before the broker was asked until it has answered; else
they are answered OFFSET_NOT_AVAILABLE, by partition, which clients try again. A partition has its leases at the proxy
that fronts its leader, so it is read there: the rack that a consumer names is taken out (KIP-392), and nobody reads
within a fetch session.

A lease by which some of several clusters have what is acked (``confirm`` ANY k) says nothing of this one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from isthmus_control.control_state import ControlState
from isthmus_plugins.api import Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_as_asked
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.fetch_verdicts import refused_in_part, without_session
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.client_views.fetch_sessions import FetchSessions
from isthmus_plugins.replication.client_views.syncing_topics import followed_synchronously
from isthmus_plugins.replication.link.part import Part, not_joined
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol import peeks
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import OFFSET_NOT_AVAILABLE
from isthmus_protocol.messages import decode_request, decode_response, encode_request, encode_response
from isthmus_protocol.refusals import Part as RequestPart
from isthmus_protocol.refusals import Refusal, Refused, offset_not_available, refuse
from isthmus_protocol.schema import ApiKey

CAUSE: Final = "stale_reads"
NOWHERE: Final = -1

HasAllSince = Callable[[str, str, int], float | None]
"""Of a topic, its id and a partition: since when (monotonic seconds) all that is acked is known to be here, without a
gap; None: it is not known now."""


class StaleReads(Part):
    """Hooks that do nothing while no namespace keeps its consumers from reading what is old."""

    def __init__(self, context: PluginContext) -> None:
        self._clock = context.clock
        self.has_all_since: HasAllSince = not_joined
        self._fresh: dict[str, str] = {}
        """Topics that are to be read as their sources are: their ids."""
        self._by_frame: dict[bytes, str] = {}
        """Their names by what frames call them, names or ids."""
        self._sessions = FetchSessions(CAUSE)
        self._refused: set[TopicPartition] = set()
        """Partitions of which a read waits."""
        self._released = asyncio.Event()
        self._seen: tuple[object, ...] = ()

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.FETCH, self.on_fetch, whole=True, pure=True),
            RequestHook(ApiKey.LIST_OFFSETS, self.on_list_offsets, whole=True, pure=True),
        ]

    def control_changed(self, state: ControlState) -> None:
        seen = (state.links, state.follower_topics, state.namespaces)
        if len(self._seen) == len(seen) and all(new is old for new, old in zip(seen, self._seen, strict=True)):
            return
        self._seen = seen
        fresh: dict[str, str] = {}
        if not all(namespace.stale_reads for namespace in state.namespaces.values()):
            fresh = {
                name: topic_id
                for link in state.links.values()
                for name, topic_id in followed_synchronously(state, link).items()
                if not state.lookup.reads_stale(name)
            }
        if fresh == self._fresh:
            return
        if fresh.keys() - self._fresh.keys():
            self._sessions.forget()
        if self._fresh.keys() - fresh.keys():
            self._release()
        self._fresh = fresh
        self._by_frame = {name.encode(): name for name in fresh}
        self._by_frame |= {uuid.UUID(topic_id).bytes: name for name, topic_id in fresh.items()}

    def granted(self, partitions: Iterable[tuple[str, str, int]]) -> None:
        """The source has granted leases of these (topic, topic id, partition)."""
        if self._refused and any((topic, partition) in self._refused for topic, _, partition in partitions):
            self._release()

    def _release(self) -> None:
        self._refused.clear()
        released, self._released = self._released, asyncio.Event()
        released.set()

    def _is_fresh(self, name: str, partition: int, since: float) -> bool:
        """Whether it has been known from then until now that the partition has all that was acked."""
        topic_id = self._fresh.get(name)
        if topic_id is None:  # it follows no more, or may be read
            return True
        has_all_since = self.has_all_since(name, topic_id, partition)
        return has_all_since is not None and has_all_since <= since

    # ---- requests ----

    def on_fetch(self, request: Request) -> Verdict:
        """Answer for what may be stale; the rest is read from leaders, without a fetch session."""
        sessions = self._sessions.now
        if not self._fresh:
            return None
        wait_ms, _, _, session_epoch, topics, _ = peeks.fetch_partitions(request.version, request.frame)
        named = any(topic in self._by_frame for topic, _ in topics)
        if (ended := self._sessions.end(sessions, request, session_epoch, named)) is not None:
            return ended
        if not named:
            return None
        since = self._clock.monotonic()
        head, payload = decode_request(request.frame)
        refused = refuse(head, payload, partial(self._decide, since))
        if refused is not None and refused.answer is not None:
            return refused_in_part(request, partial(self._decide, since), wait_ms, self._released, CAUSE)
        asked: Any = without_session(payload if refused is None else refused.remaining)
        if getattr(asked, "rack_id", ""):
            asked = replace(asked, rack_id="")
        frame = encode_request(asked, request.correlation_id, head.client_id)
        answered = partial(self._fetched, request.version, since, refused)
        return Replace(frame, answered_as_asked(request, answered), CAUSE if refused else "")

    def on_list_offsets(self, request: Request) -> Verdict:
        """Answer for partitions that may be stale, and forward the rest."""
        if not self._fresh:
            return None
        _, topics = peeks.list_offsets(request.version, request.frame)
        if not any(topic in self._by_frame for topic, _ in topics):
            return None
        since = self._clock.monotonic()
        head, payload = decode_request(request.frame)
        refused = refuse(head, payload, partial(self._decide, since))
        if refused is not None and refused.answer is not None:
            return verdict_of(request, head, refused, CAUSE)
        frame = request.frame
        if refused is not None and refused.remaining is not None:
            frame = encode_request(refused.remaining, request.correlation_id, head.client_id)
        answered = partial(self._listed, request.version, since, refused)
        return Replace(frame, answered_as_asked(request, answered), CAUSE if refused else "")

    def _decide(self, since: float, part: RequestPart) -> Refusal | None:
        named = (part.topic or "").encode() if part.topic_id is None else part.topic_id.bytes
        name = self._by_frame.get(named)
        if name is None or part.partition is None or self._is_fresh(name, part.partition, since):
            return None
        self._refused.add((name, part.partition))
        what = (
            f"{name}-{part.partition} may be older than its source, and its namespace has --stale-reads no: try again"
        )
        return Refusal(OFFSET_NOT_AVAILABLE, what)

    # ---- answers ----

    def _fetched(self, version: int, since: float, refused: Refused | None, frame: bytes) -> bytes:
        """The answer to a Fetch, of which nothing may have become stale while the broker waited for records."""
        correlation_id, payload = decode_response(ApiKey.FETCH, version, frame)
        answered: Any = payload

        def shown(named: bytes, part: Any) -> Any:
            if int(part.error_code) or self._is_shown(named, part.partition_index, since):
                return part
            return replace(part, error_code=error_code(OFFSET_NOT_AVAILABLE), records=b"")

        responses = tuple(
            replace(
                topic,
                partitions=tuple(
                    shown(topic.topic_id.bytes if hasattr(topic, "topic_id") else topic.topic.encode(), part)
                    for part in topic.partitions
                ),
            )
            for topic in answered.responses
        )
        answered = replace(answered, responses=responses)
        return encode_response(answered if refused is None else refused.merge(answered), correlation_id)

    def _listed(self, version: int, since: float, refused: Refused | None, frame: bytes) -> bytes:
        """The same of the answer to a ListOffsets."""
        correlation_id, payload = decode_response(ApiKey.LIST_OFFSETS, version, frame)
        answered: Any = payload
        not_available = error_code(offset_not_available(version))

        def shown(name: str, part: Any) -> Any:
            if int(part.error_code) or self._is_shown(name.encode(), part.partition_index, since):
                return part
            return replace(part, error_code=not_available, offset=NOWHERE, timestamp=NOWHERE)

        topics = tuple(
            replace(topic, partitions=tuple(shown(topic.name, part) for part in topic.partitions))
            for topic in answered.topics
        )
        answered = replace(answered, topics=topics)
        return encode_response(answered if refused is None else refused.merge(answered), correlation_id)

    def _is_shown(self, named: bytes, partition: int, since: float) -> bool:
        name = self._by_frame.get(named)
        return name is None or self._is_fresh(name, partition, since)
