"""What consumers of a source see where a namespace asks for ``visibility: confirmed``: nothing that acks wait for.

Answers to Fetch are cut before the first batch that a synchronous link has not confirmed, and show that as the log's
end; ListOffsets answers the same end. An answer of which nothing is left waits until more is confirmed, as the broker
would wait for records. Where plain producers are acked without the other side (Syncing, Out-Of-Sync), all is shown.

Read-committed consumers see a transaction when its marker is confirmed, too: then the other side can end it in no other
way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from isthmus_control.control_state import ControlState
from isthmus_control.lookup import Lookup
from isthmus_control.model import TOPIC_NAME_CHARS_MAX, ResourceType
from isthmus_plugins.api import Close, Gate, Hold, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import as_asked
from isthmus_plugins.cluster import BrokerUnavailable, TopicPartition
from isthmus_plugins.fetch_verdicts import without_session
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.client_views.fetch_sessions import FetchSessions
from isthmus_protocol import peeks
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import OFFSET_NOT_AVAILABLE
from isthmus_protocol.messages import decode_request, decode_response, encode_request, encode_response
from isthmus_protocol.records import walk
from isthmus_protocol.schema import ApiKey

LATEST: Final = -1
EARLIEST: Final = -2
UNKNOWN: Final = -1
READ_COMMITTED: Final = 1
CAUSE: Final = "confirmed_visibility"
NAMES_MAX: Final = 100_000

Limit = Callable[[TopicPartition, bool], int | None]
"""Up to which offset consumers may read a partition, read-committed ones or others. None: all; -1: it is not known."""


@dataclass(slots=True, eq=False)
class _Read:
    """An answer of which nothing is left, waiting."""

    version: int
    committed: bool
    names: Mapping[bytes, str]
    correlation_id: int
    answered: Any
    gate: Gate
    places: tuple[TopicPartition, ...]
    timer: asyncio.TimerHandle | None = None


class ConfirmedReads:
    """Hooks that do nothing while no namespace on a synchronous link asks for confirmed visibility."""

    def __init__(self, context: PluginContext, is_led: Callable[[str], bool], limit: Limit) -> None:
        """``is_led``: whether a topic is led over a synchronous link."""
        self._context = context
        self._is_led = is_led
        self._limit = limit
        self._lookup: Lookup | None = None
        self._active = False
        self._asked: dict[bytes, str | None] = {}
        """By topic, as frames name it: its name if its consumers see what is confirmed alone."""
        self._sessions = FetchSessions(CAUSE)
        self._waiting: dict[TopicPartition, set[_Read]] = {}

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.FETCH, self.on_fetch, whole=True, pure=True),
            RequestHook(ApiKey.LIST_OFFSETS, self.on_list_offsets, whole=True, pure=True),
        ]

    def control_changed(self, state: ControlState) -> None:
        if state.lookup is self._lookup:
            return
        self._lookup = state.lookup
        self._active = any(namespace.demands.confirmed for namespace in state.namespaces.values())
        self._asked.clear()
        self._sessions.forget()

    def confirmed(self, place: TopicPartition) -> None:
        """More of a partition is confirmed, or less needs to be."""
        for read in tuple(self._waiting.get(place, ())):
            if read.gate.dropped:
                self._forget(read)
            else:
                self._open(read, last=False)

    def confirmed_all(self) -> None:
        """The same of any partition."""
        for place in tuple(self._waiting):
            self.confirmed(place)

    # ---- requests ----

    def on_fetch(self, request: Request) -> Verdict:
        """Have the answer cut if it may hold what is not confirmed."""
        if not self._active:
            return None
        wait_ms, isolation, _, session_epoch, topics, _ = peeks.fetch_partitions(request.version, request.frame)
        names = self._names(request, (topic for topic, _ in topics))
        if names is None:
            return Hold(self._resolved(_kept(request), [topic for topic, _ in topics], self.on_fetch))
        if (ended := self._sessions.end(request, session_epoch, bool(names))) is not None:
            return ended
        if not names:
            return None
        head, payload = decode_request(request.frame)
        asked: Any = without_session(payload)
        if getattr(asked, "rack_id", ""):  # a replica nearer to the consumer may be behind another proxy
            asked = replace(asked, rack_id="")
        frame = encode_request(asked, request.correlation_id, head.client_id)
        on_response = partial(
            self._fetched, request.version, isolation == READ_COMMITTED, names, request.now + wait_ms / 1000
        )
        return Replace(frame, on_response, CAUSE)

    def on_list_offsets(self, request: Request) -> Verdict:
        """Have the answer show the end of what is confirmed as the log's end."""
        if not self._active:
            return None
        isolation, topics = peeks.list_offsets(request.version, request.frame)
        names = self._names(request, (topic for topic, _ in topics))
        if names is None:
            return Hold(self._resolved(_kept(request), [topic for topic, _ in topics], self.on_list_offsets))
        asked = {
            (names[topic], partition): timestamp
            for topic, partitions in topics
            if topic in names
            for partition, timestamp in partitions
            if timestamp != EARLIEST
        }
        if not asked:
            return None
        committed = isolation == READ_COMMITTED
        return Replace(request.frame, partial(self._listed, request.version, committed, asked), CAUSE)

    def _names(self, request: Request, topics: Iterable[bytes]) -> dict[bytes, str] | None:
        """Of the topics of a request, those that are cut, by what the frame calls them. None: a name is not known."""
        by_id = peeks.topics_are_ids(request.api_key, request.version)
        names: dict[bytes, str] = {}
        for topic in topics:
            if topic in self._asked:
                name = self._asked[topic]
            else:
                known = self._context.known_topic_name(topic) if by_id else topic.decode("utf-8", "replace")
                if known is None:
                    return None
                demands = self._context.control.state.lookup.demands(ResourceType.TOPIC, known)
                name = known if demands.confirmed and self._is_led(known) else None
                if len(topic) <= TOPIC_NAME_CHARS_MAX:
                    self._remember({topic: name})
            if name is not None:
                names[topic] = name
        return names

    async def _resolved(self, request: Request, topics: Iterable[bytes], look: Callable[[Request], Verdict]) -> Verdict:
        """Go on when the names of topic ids have been read from the cluster."""
        try:
            found = await self._context.topic_names(asked := tuple(topics))
        except BrokerUnavailable as error:
            return Close(f"topic ids cannot be resolved: {error}")
        self._remember(dict.fromkeys(set(asked) - found.keys()))  # the broker knows no such topics, either
        return await as_asked(request, look, request)

    def _remember(self, names: Mapping[bytes, str | None]) -> None:
        if len(self._asked) + len(names) > NAMES_MAX:
            self._asked.clear()
        self._asked |= names

    # ---- answers to Fetch ----

    def _fetched(
        self, version: int, committed: bool, names: Mapping[bytes, str], deadline: float, frame: bytes
    ) -> bytes | Gate:
        correlation_id, answered = decode_response(ApiKey.FETCH, version, frame)
        cut, hidden = self._cut(answered, committed, names)
        loop = asyncio.get_running_loop()
        if not hidden or _has_news(cut) or deadline <= loop.time():
            return encode_response(cut, correlation_id)
        read = _Read(version, committed, names, correlation_id, answered, Gate(), hidden)
        for place in hidden:
            self._waiting.setdefault(place, set()).add(read)
        read.timer = loop.call_at(deadline, partial(self._open, read, last=True))
        return read.gate

    def _open(self, read: _Read, *, last: bool) -> None:
        cut, _ = self._cut(read.answered, read.committed, read.names)
        if last or _has_news(cut):
            self._forget(read)
            read.gate.open(encode_response(cut, read.correlation_id))

    def _forget(self, read: _Read) -> None:
        if read.timer is not None:
            read.timer.cancel()
        for place in read.places:
            waiting = self._waiting.get(place)
            if waiting is not None:
                waiting.discard(read)
                if not waiting:
                    del self._waiting[place]

    def _cut(
        self, answered: Any, committed: bool, names: Mapping[bytes, str]
    ) -> tuple[Any, tuple[TopicPartition, ...]]:
        """The answer without what is not confirmed, and of which partitions something is left out."""
        hidden: list[TopicPartition] = []
        topics = []
        for topic in answered.responses:
            named = topic.topic_id.bytes if hasattr(topic, "topic_id") else topic.topic.encode()
            name = names.get(named)
            if name is None:
                topics.append(topic)
                continue
            partitions = []
            for part in topic.partitions:
                shown = self._shown(part, (name, part.partition_index), committed)
                if shown is not part and len(shown.records or b"") < len(part.records or b""):
                    hidden.append((name, part.partition_index))
                partitions.append(shown)
            topics.append(replace(topic, partitions=tuple(partitions)))
        return replace(answered, responses=tuple(topics)), tuple(hidden)

    def _shown(self, part: Any, place: TopicPartition, committed: bool) -> Any:
        """A partition's part of an answer, as far as it is confirmed."""
        if int(part.error_code):
            return part
        limit = self._limit(place, False)
        if limit is None:
            return part
        stable = self._limit(place, True) if committed else limit
        if limit == UNKNOWN or stable == UNKNOWN:  # this proxy has just come, or the leader
            return replace(part, error_code=error_code(OFFSET_NOT_AVAILABLE), records=b"")
        stable = limit if stable is None else stable
        start = max(0, part.log_start_offset) if hasattr(part, "log_start_offset") else 0
        high_watermark = max(start, min(part.high_watermark, limit))
        last_stable = min(part.last_stable_offset, max(start, min(stable, high_watermark)))
        if high_watermark == part.high_watermark and last_stable == part.last_stable_offset:
            return part
        end = last_stable if committed else high_watermark
        records = part.records
        if records:
            records = records[: confirmed_bytes(records, end)]
        return replace(part, high_watermark=high_watermark, last_stable_offset=last_stable, records=records)

    # ---- answers to ListOffsets ----

    def _listed(self, version: int, committed: bool, asked: Mapping[TopicPartition, int], frame: bytes) -> bytes:
        correlation_id, answered = decode_response(ApiKey.LIST_OFFSETS, version, frame)
        found: Any = answered

        def shown(topic: str, part: Any) -> Any:
            timestamp = asked.get((topic, part.partition_index))
            if timestamp is None or int(part.error_code) or part.offset < 0:
                return part
            limit = self._limit((topic, part.partition_index), committed)
            if limit is None or part.offset < limit:
                return part
            if limit == UNKNOWN:
                return replace(part, error_code=error_code(OFFSET_NOT_AVAILABLE), offset=-1, timestamp=-1)
            if timestamp == LATEST:
                return replace(part, offset=limit)
            return part if part.offset == limit else replace(part, offset=-1, timestamp=-1)

        topics = tuple(
            replace(topic, partitions=tuple(shown(topic.name, part) for part in topic.partitions))
            for topic in found.topics
        )
        return encode_response(replace(found, topics=topics), correlation_id)


def _kept(request: Request) -> Request:
    """A request that outlives the call."""
    head = request.api_key, request.version, request.correlation_id
    kept = Request(request.frame, request.whole, *head, request.now, request.client)
    kept.aside = request.aside
    return kept


def _has_news(answered: Any) -> bool:
    """Whether an answer has something that its consumer did not know."""
    return bool(getattr(answered, "error_code", 0)) or any(
        part.records or int(part.error_code) not in (0, OFFSET_NOT_AVAILABLE)
        for topic in answered.responses
        for part in topic.partitions
    )


def confirmed_bytes(records: bytes, end: int) -> int:
    """How many bytes of a Fetch answer's records are whole batches that end at or before the offset ``end``."""
    size = 0
    for _, behind, header in walk(records):
        if header.next_offset > end:
            break
        size = behind
    return size
