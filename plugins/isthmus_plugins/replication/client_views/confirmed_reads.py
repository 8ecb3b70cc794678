"""What consumers of a source see where a namespace asks for ``visibility: confirmed``: nothing that acks wait for.

Answers to Fetch are cut before the first batch that a synchronous link has not confirmed, and show that as the log's
end; ListOffsets answers the same end. An answer of which nothing is left waits until more is confirmed, as the broker
would wait for records. Where plain producers are acked without the other side (Syncing, Out-Of-Sync), all is shown.

Read-committed consumers see a transaction when its marker is confirmed, too: then the other side can end it in no other
way.

What a follower has confirmed the loop alone knows. So an answer of more than some partitions is taken apart and put
together in the thread (``aside``), and between these the loop says of some partitions at a time how much of them is
confirmed. Nothing of it is decoded: what changes is found, and replaced in its bytes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from isthmus_control.control_state import ControlState
from isthmus_control.lookup import Lookup
from isthmus_control.model import TOPIC_NAME_CHARS_MAX, ResourceType
from isthmus_plugins.api import Close, Gate, Hold, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_on_loop, as_asked, aside, on_loop
from isthmus_plugins.cluster import BrokerUnavailable, TopicPartition
from isthmus_plugins.fetch_verdicts import without_session
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.client_views.fetch_sessions import FetchSessions
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import peeks
from isthmus_protocol.elements import TooManyElements, at_most
from isthmus_protocol.error_codes import OFFSET_NOT_AVAILABLE
from isthmus_protocol.messages import decode_request, encode_request
from isthmus_protocol.records import walk
from isthmus_protocol.refusals import offset_not_available
from isthmus_protocol.schema import ApiKey, message_spec
from isthmus_protocol.splicing import Edit, Span, edited_frame, encoded_count
from isthmus_protocol.wire import Frame

LATEST: Final = -1
EARLIEST: Final = -2
UNKNOWN: Final = -1
READ_COMMITTED: Final = 1
CAUSE: Final = "confirmed_visibility"
NAMES_MAX: Final = 100_000

PARTS_AT_ONCE: Final = 200
"""Partitions, and topics, of an answer that the loop looks at in one go."""
READS_AT_ONCE: Final = 50
"""Answers that wait, and partitions, that the loop looks at in one go: each may be made, and go out."""
RECORDS_AT_ONCE: Final = 64 * 1024
"""Bytes of records that it looks at: some hundred batches, if they are small."""
_INT16: Final = struct.Struct(">h")
_INT64: Final = struct.Struct(">q")
_NOT_AVAILABLE: Final = _INT16.pack(OFFSET_NOT_AVAILABLE)
_NOWHERE: Final = _INT64.pack(-1)

Limit = Callable[[TopicPartition, bool], int | None]
"""Up to which offset consumers may read a partition, read-committed ones or others. None: all; -1: it is not known."""
_Ends: TypeAlias = tuple[int, int] | None
"""High watermark and last stable offset that consumers see of a partition. None: the broker's; -1: none is known."""
_NOT_KNOWN: Final = UNKNOWN, UNKNOWN


class _Found(NamedTuple):
    """What is in an answer to Fetch."""

    parts: Sequence[tuple[TopicPartition, peeks.FetchedSpans]]
    """Of topics whose consumers see what is confirmed alone."""
    news: bool
    """Something else has records or an error that its consumer did not know."""
    records_bytes: int
    """Of ``parts``."""


class _Cut(NamedTuple):
    """An answer as it may go out."""

    frame: bytes
    hidden: Mapping[TopicPartition, peeks.FetchedSpans]
    """Of which something is left out, as the broker answered."""
    news: bool


@dataclass(slots=True, eq=False)
class _Read:
    """A Fetch whose answer has come."""

    version: int
    committed: bool
    names: Mapping[bytes, str]
    deadline: float
    """When its consumer wants an answer, whatever is in it, seconds of the loop's clock."""
    frame: bytes
    found: _Found | None = None
    large: bool = False
    """It is taken apart in the thread."""
    gate: Gate | None = None
    """It waits: nothing would be left of the answer."""
    hidden: Mapping[TopicPartition, peeks.FetchedSpans] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    waits: bool = False
    """Its gate was not opened."""


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
        self._seen: dict[TopicPartition, tuple[int | None, int | None]] = {}
        """How much of a partition was confirmed, of plain and of ended transactions, when what waits for it was looked
        at for the last time: if that has not changed, nothing is to be looked at."""
        self._due: dict[TopicPartition, None] = {}
        """Partitions of which more may be confirmed, and that were not looked at since."""
        self._left = READS_AT_ONCE
        """So much may be looked at before the loop does other things."""
        self._looking = self._stopped = False
        self._tasks = Tasks("confirmed-reads", context.supervision)

    async def stop(self) -> None:
        self._stopped = True
        await self._tasks.close()

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
        waiting = self._waiting.get(place)
        if waiting is None:
            return
        if len(waiting) < self._left:
            for _ in self._look_at(place):
                pass
        else:
            self._look_later((place,))

    def confirmed_all(self) -> None:
        """The same of any partition."""
        self._look_later(self._waiting)

    def _look_later(self, places: Iterable[TopicPartition]) -> None:
        self._due.update(dict.fromkeys(places))  # what is due already keeps its turn
        if self._due and not (self._looking or self._stopped):
            self._looking = True
            self._tasks.start("look", self._look())

    async def _look(self) -> None:
        """Look at what is due, some of it at a time."""
        try:
            while self._due:
                place = next(iter(self._due))
                del self._due[place]
                for _ in self._look_at(place):
                    if self._left <= 0:
                        await asyncio.sleep(0)
                        self._left = READS_AT_ONCE
        finally:
            self._looking = False

    def _look_at(self, place: TopicPartition) -> Iterator[None]:
        """Let go what waits for a partition, if something of it is left by now; step by step. To be gone through."""
        waiting = self._waiting.get(place)
        if waiting is None:
            return
        confirmed = self._limit(place, False), self._limit(place, True)
        changed = self._seen.get(place) != confirmed
        self._seen[place] = confirmed  # whatever comes between two steps takes it out again
        self._left -= 1
        yield
        for read in tuple(waiting):
            if not read.waits or read.gate is None:
                continue
            if read.gate.dropped:
                self._forget(read)
            elif not changed:
                continue
            elif self._shows(read, place):
                self._open(read)
            self._left -= 1
            yield

    # ---- requests ----

    def on_fetch(self, request: Request) -> Verdict:
        """Have the answer cut if it may hold what is not confirmed."""
        sessions = self._sessions.now
        if not self._active:
            return None
        wait_ms, isolation, _, session_epoch, topics, _ = peeks.fetch_partitions(request.version, request.frame)
        names = self._names(request, (topic for topic, _ in topics))
        if names is None:
            return Hold(self._resolved(_kept(request), [topic for topic, _ in topics], self.on_fetch))
        if (ended := self._sessions.end(sessions, request, session_epoch, bool(names))) is not None:
            return ended
        if not names:
            return None
        head, payload = decode_request(request.frame)
        asked: Any = without_session(payload)
        if getattr(asked, "rack_id", ""):  # a replica nearer to the consumer may be behind another proxy
            asked = replace(asked, rack_id="")
        frame = encode_request(asked, request.correlation_id, head.client_id)
        deadline = request.now + wait_ms / 1000
        on_response = partial(self._fetched, request.version, isolation == READ_COMMITTED, names, deadline)
        return Replace(frame, answered_on_loop(on_response), CAUSE)

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
        on_response = partial(self._listed, request.version, committed, asked)
        return Replace(request.frame, answered_on_loop(on_response), CAUSE)

    def _names(self, request: Request, topics: Iterable[bytes]) -> dict[bytes, str] | None:
        """Of the topics of a request, those that are cut, by what the frame calls them. None: a name is not known."""
        by_id = peeks.topics_are_ids(request.api_key, request.version)
        names: dict[bytes, str] = {}
        lookup, found = self._lookup, dict[bytes, str | None]()
        for topic in topics:
            name = self._asked.get(topic, "")
            if name == "":
                known = self._context.known_topic_name(topic) if by_id else topic.decode("utf-8", "replace")
                if known is None:
                    return None
                demands = self._context.control.state.lookup.demands(ResourceType.TOPIC, known)
                name = known if demands.confirmed and self._is_led(known) else None
                if len(topic) <= TOPIC_NAME_CHARS_MAX:
                    found[topic] = name
            if name is not None:
                names[topic] = name
        if found:
            on_loop(self._remember_of, lookup, found)
        return names

    def _remember_of(self, lookup: Lookup | None, names: Mapping[bytes, str | None]) -> None:
        """What was found by this lookup; in the thread there may be another one meanwhile."""
        if lookup is self._lookup:
            self._remember(names)

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
        read = _Read(version, committed, names, deadline, frame)
        try:
            with at_most(PARTS_AT_ONCE):
                read.found = _found_in(version, names, frame)
        except TooManyElements:
            read.large = True
        else:
            read.large = read.found.records_bytes > RECORDS_AT_ONCE
        return self._answered(read, waits=True)

    def _answered(self, read: _Read, waits: bool) -> bytes | Gate:
        """What goes out of an answer; ``waits``: nothing does, yet, where nothing would be left of it."""
        if read.large or read.found is None:
            return self._later(self._cut_in_slices(read, waits), read.frame)
        ends = [self._ends(place, part, read.committed) for place, part in read.found.parts]
        return self._or_waits(read, _cut(read.version, read.committed, read.frame, read.found, ends), waits)

    async def _cut_in_slices(self, read: _Read, waits: bool) -> bytes | Gate:
        if read.found is None:
            read.found = await aside(_found_in, read.version, read.names, read.frame)
        ends: list[_Ends] = []
        for begin in range(0, len(read.found.parts), PARTS_AT_ONCE):
            parts = read.found.parts[begin : begin + PARTS_AT_ONCE]
            ends += [self._ends(place, part, read.committed) for place, part in parts]
            await asyncio.sleep(0)
        cut = await aside(_cut, read.version, read.committed, read.frame, read.found, ends)
        return self._or_waits(read, cut, waits)

    def _or_waits(self, read: _Read, cut: _Cut, waits: bool) -> bytes | Gate:
        loop = asyncio.get_running_loop()
        if not waits or not cut.hidden or cut.news or read.deadline <= loop.time():
            return cut.frame
        read.gate, read.hidden = Gate().then(lambda _: self._answered(read, waits=False)), cut.hidden
        read.waits = True
        for place in read.hidden:
            self._waiting.setdefault(place, set()).add(read)
            self._seen.pop(place, None)  # more may be confirmed since it was cut
        read.timer = loop.call_at(read.deadline, self._open, read)
        return read.gate

    def _later(self, work: Coroutine[Any, Any, bytes | Gate], frame: bytes) -> Gate:
        """An answer that goes out when it has been made of ``frame``."""
        task = self._tasks.start("cut", work)
        gate = Gate().then(lambda _: task.result())  # before the hooks behind this one
        task.add_done_callback(lambda _: None if task.cancelled() else gate.open(frame))
        return gate

    def _shows(self, read: _Read, place: TopicPartition) -> bool:
        """Whether something of a partition would be left in an answer that waits for it."""
        part = read.hidden[place]
        ends, records = self._ends(place, part, read.committed), part[8]
        return records is not None and (ends is None or _begins_before(records, ends[read.committed]))

    def _open(self, read: _Read) -> None:
        self._forget(read)
        assert read.gate is not None
        read.gate.open(read.frame)

    def _forget(self, read: _Read) -> None:
        read.waits = False
        if read.timer is not None:
            read.timer.cancel()
        for place in read.hidden:
            waiting = self._waiting.get(place)
            if waiting is not None:
                waiting.discard(read)
                if not waiting:
                    del self._waiting[place]
                    self._seen.pop(place, None)

    def _ends(self, place: TopicPartition, part: peeks.FetchedSpans, committed: bool) -> _Ends:
        """As far as a partition is confirmed."""
        _, code, _, high, _, stable, _, log_start, _, _ = part
        if code:
            return None
        limit = self._limit(place, False)
        if limit is None:
            return None
        stable_limit = self._limit(place, True) if committed else limit
        if limit == UNKNOWN or stable_limit == UNKNOWN:  # this proxy has just come, or the leader
            return _NOT_KNOWN
        start = max(0, log_start or 0)
        shown = max(start, min(high, limit))
        shown_stable = min(stable, max(start, min(limit if stable_limit is None else stable_limit, shown)))
        return None if (shown, shown_stable) == (high, stable) else (shown, shown_stable)

    # ---- answers to ListOffsets ----

    def _listed(self, version: int, committed: bool, asked: Mapping[TopicPartition, int], frame: bytes) -> bytes | Gate:
        try:
            with at_most(PARTS_AT_ONCE):
                found = _listed_in(version, asked, frame)
        except TooManyElements:
            return self._later(self._listed_in_slices(version, committed, asked, frame), frame)
        listed = bytearray(frame)
        for place, part in found:
            self._show_end(version, listed, part, asked[place], self._limit(place, committed))
        return bytes(listed)

    async def _listed_in_slices(
        self, version: int, committed: bool, asked: Mapping[TopicPartition, int], frame: bytes
    ) -> bytes:
        found = await aside(_listed_in, version, asked, frame)
        listed = bytearray(frame)
        for begin in range(0, len(found), PARTS_AT_ONCE):
            for place, part in found[begin : begin + PARTS_AT_ONCE]:
                self._show_end(version, listed, part, asked[place], self._limit(place, committed))
            await asyncio.sleep(0)
        return bytes(listed)

    @staticmethod
    def _show_end(version: int, listed: bytearray, part: peeks.ListedSpans, timestamp: int, limit: int | None) -> None:
        _, _, code_at, timestamp_at, offset, offset_at = part
        if limit is None or offset < limit:
            return
        if limit == UNKNOWN:
            _put(listed, code_at, _INT16.pack(offset_not_available(version)))
        elif timestamp == LATEST:
            _put(listed, offset_at, _INT64.pack(limit))
            return
        elif offset == limit:
            return
        _put(listed, offset_at, _NOWHERE)
        _put(listed, timestamp_at, _NOWHERE)


def _found_in(version: int, names: Mapping[bytes, str], frame: bytes) -> _Found:
    code, topics = peeks.fetched_spans(version, frame)
    news = bool(code)
    parts: list[tuple[TopicPartition, peeks.FetchedSpans]] = []
    for topic, partitions in topics:
        name = names.get(topic)
        if name is None:
            news = news or any(map(_is_news, partitions))
        else:
            parts += [((name, part[0]), part) for part in partitions]
    return _Found(parts, news, sum(len(part[8] or b"") for _, part in parts))


def _cut(version: int, committed: bool, frame: bytes, found: _Found, ends: Iterable[_Ends]) -> _Cut:
    """The answer without what is not confirmed."""
    flexible = message_spec(ApiKey.FETCH, version, "response").flexible
    edits: list[Edit] = []
    hidden: dict[TopicPartition, peeks.FetchedSpans] = {}
    news = found.news
    for (place, part), shown in zip(found.parts, ends, strict=True):
        _, _, code_at, _, high_at, _, stable_at, _, records, records_at = part
        if shown is None:
            news = news or _is_news(part)
            continue
        kept = b""
        if shown == _NOT_KNOWN:
            edits.append((*code_at, _NOT_AVAILABLE))
            edits.append((*records_at, encoded_count(0, flexible)))  # never null beside an error
        else:
            edits += [(*high_at, _INT64.pack(shown[0])), (*stable_at, _INT64.pack(shown[1]))]
            if records:
                kept = bytes(records[: confirmed_bytes(records, shown[committed])])
                edits.append((*records_at, encoded_count(len(kept), flexible) + kept))
        news = news or bool(kept)
        if records and len(kept) < len(records):
            hidden[place] = part
    return _Cut(edited_frame(frame, edits) if edits else frame, hidden, news)


def _is_news(part: peeks.FetchedSpans) -> bool:
    """Whether its consumer did not know what the broker says of a partition."""
    return bool(part[8]) or part[1] not in (0, OFFSET_NOT_AVAILABLE)


def _listed_in(
    version: int, asked: Mapping[TopicPartition, int], frame: bytes
) -> list[tuple[TopicPartition, peeks.ListedSpans]]:
    """The partitions that were asked about, and have an offset."""
    return [
        (place, part)
        for topic, partitions in peeks.listed_spans(version, frame)
        for part in partitions
        if (place := (topic.decode("utf-8", "replace"), part[0])) in asked and not part[1] and part[4] >= 0
    ]


def _put(listed: bytearray, at: Span, value: bytes) -> None:
    listed[at[0] : at[1]] = value


def _kept(request: Request) -> Request:
    """A request that outlives the call."""
    head = request.api_key, request.version, request.correlation_id
    kept = Request(request.frame, request.whole, *head, request.now, request.client)
    kept.aside = request.aside
    return kept


def _begins_before(records: memoryview, end: int) -> bool:
    """Whether the first batch of a Fetch answer's records is whole and ends at or before an offset."""
    return any(header.next_offset <= end for _, _, header in islice(walk(records), 1))


def confirmed_bytes(records: Frame, end: int) -> int:
    """How many bytes of a Fetch answer's records are whole batches that end at or before the offset ``end``."""
    size = 0
    for _, behind, header in walk(records):
        if header.next_offset > end:
            break
        size = behind
    return size
