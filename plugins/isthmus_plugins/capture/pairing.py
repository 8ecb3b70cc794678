"""From notes to events: pairs requests with answers, and reads what their first bytes say. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from isthmus_plugins.api import (
    TAP_ANSWER,
    TAP_BYTES,
    TAP_GATED,
    TAP_OWN_ANSWER,
    TAP_REQUEST,
    tap_answer_bytes,
)
from isthmus_plugins.capture.alike import CLIENT_ID_AT, Alike
from isthmus_plugins.capture.events import NONE, Common, Event, event_of, times
from isthmus_plugins.capture.first_bytes import (
    NOT_READ,
    RequestFacts,
    ResponseFacts,
    fetched_facts,
    produced_parts,
    request_facts,
    response_facts,
)
from isthmus_plugins.capture.notes import ANSWERS, Kind, Note, unpack_parts
from isthmus_protocol.partition_scan import ScannedPartition
from isthmus_protocol.schema import ApiKey

ALIKE_MAX: Final = 8
"""Kinds of requests of a session that are known by their first bytes, such as those for one topic."""
_NOT_ANSWERED: Final = ResponseFacts()


class _Open:
    """A request that has no answer yet, or of whose answer not all is noted."""

    answer: Note | None = None
    scanned: tuple[ScannedPartition, ...] = ()
    """Partitions of a Produce, or fetched ones, as far as they were noted beside first bytes."""
    answer_facts: ResponseFacts | None = None
    """What the answer says, where its first bytes do not say all."""

    def __init__(self, note: Note, alike: Alike | None) -> None:
        self.note = note
        self.alike = alike
        """Requests like this one, of which most need not be read."""

    @cached_property
    def facts(self) -> RequestFacts:
        note = self.note
        return request_facts(note.key >> 16, note.key & 0xFFFF, note.first, note.head[0] + 4)

    @property
    def awaits_more(self) -> bool:
        """Whether more of its answer is to be noted."""
        answer = self.answer
        if answer is None or self.answer_facts is not None:
            return False
        size, said = answer.head[0] + 4, len(answer.first)
        if size > TAP_BYTES and answer.key >> 16 == ApiKey.FETCH:
            return True
        return answer.kind == TAP_ANSWER and said < size and said < tap_answer_bytes(answer.key)


@dataclass(slots=True)
class _Session:
    address: str | None = None
    listener: str | None = None
    broker_id: int = NONE
    principal: str | None = None
    software: str | None = None
    open: deque[_Open] = field(default_factory=deque)
    alike: list[Alike] = field(default_factory=list)
    """Kinds of requests that were read before."""
    unanswered: _Open | None = None
    """A Produce with acks=0, of which more may come."""
    gated: dict[int, _Open] = field(default_factory=dict)
    cut: _Open | None = None
    """Of whose answer more is to be noted."""


class Pairing:
    """All sessions of a proxy. ``topic_name``: of a topic's id (16 bytes), None where it is not known."""

    def __init__(self, topic_name: Callable[[bytes], str | None]) -> None:
        self._topic_name = topic_name
        self._sessions: dict[int, _Session] = {}
        self.unpaired = 0
        """Answers without a request: notes were dropped, or the capture began between the two."""

    def take(self, note: Note) -> Sequence[Event]:
        """The events that are complete with this note."""
        session = self._sessions.get(note.session)
        if session is None:
            session = self._sessions[note.session] = _Session()
        kind = note.kind
        if kind == TAP_REQUEST:
            return self._asked(session, note)
        if kind in ANSWERS:
            return self._answered(session, note)
        if kind == Kind.PARTS:
            return self._parts(session, note)
        if kind == Kind.MORE:
            return self._more(session, note)
        if kind == Kind.SENT:
            waited = session.gated.pop(note.head[1], None)
            return () if waited is None else self._events(session, waited, note.at)
        if kind == Kind.OPENED:
            session.address, _, session.listener = note.said.decode("utf-8", "replace").partition("\0")
            session.broker_id = note.head[0]
        elif kind == Kind.PRINCIPAL:
            session.principal = note.said.decode("utf-8", "replace")
            session.alike.clear()  # they have another one
        elif kind == Kind.CLOSED:
            return self._closed(session, note)
        return ()

    def _closed(self, session: _Session, note: Note) -> Sequence[Event]:
        events = [*self._unanswered(session), *self._cut(session)]
        for opened in session.open:
            events += self._events(session, opened, None)
        for opened in session.gated.values():  # nobody waits for them any more: that long they had
            events += self._events(session, opened, note.at)
        del self._sessions[note.session]
        return events

    def _asked(self, session: _Session, note: Note) -> Sequence[Event]:
        key, first = note.key, note.first
        events = self._unanswered(session)
        for alike in session.alike:
            if key == alike.key and first.startswith(alike.head, CLIENT_ID_AT):
                session.open.append(_Open(note, alike))
                return events
        opened = _Open(note, None)
        facts = opened.facts
        if facts.software is not None:
            session.software = facts.software
            session.alike.clear()
        if key >> 16 == ApiKey.PRODUCE and facts.acks == 0:
            session.unanswered = opened
            return events if facts.partial else [*events, *self._unanswered(session)]
        session.open.append(opened)
        return events

    def _unanswered(self, session: _Session) -> Sequence[Event]:
        """A request without an answer is complete: its parts are there, or another request is."""
        opened, session.unanswered = session.unanswered, None
        return () if opened is None else self._events(session, opened, None)

    def _cut(self, session: _Session) -> Sequence[Event]:
        """An answer is complete: all was noted of it, or nothing more will be (the next one is there)."""
        opened, session.cut = session.cut, None
        return () if opened is None else self._events(session, opened, None)

    def _parts(self, session: _Session, note: Note) -> Sequence[Event]:
        found, correlation_id = note.head
        candidates: tuple[_Open | None, ...]
        if note.key >> 16 == ApiKey.FETCH:
            candidates = (session.cut, *session.open)  # notes of answers to the first ones may have been dropped
        else:
            candidates = (session.unanswered, session.open[-1] if session.open else None)
        for opened in candidates:
            if opened is not None and opened.note.head[1] == correlation_id:
                opened.scanned += tuple(unpack_parts(note.said))
                return self._all_parts(session, opened, note.key, found) if found else ()
        return ()

    def _all_parts(self, session: _Session, opened: _Open, key: int, count: int) -> Sequence[Event]:
        version = key & 0xFFFF
        partial = len(opened.scanned) < count
        opened.alike = None
        if key >> 16 == ApiKey.FETCH:
            opened.answer_facts = fetched_facts(version, opened.scanned)
            opened.answer_facts.partial = partial
            return self._cut(session) if opened is session.cut else ()
        opened.facts.parts = produced_parts(version, opened.scanned)
        opened.facts.partial = partial
        return self._unanswered(session) if opened is session.unanswered else ()

    def _answered(self, session: _Session, note: Note) -> Sequence[Event]:
        events = self._cut(session)
        correlation_id = note.first[4:8]
        while session.open and session.open[0].note.first[8:12] != correlation_id:
            session.open.popleft()  # its answer's note was dropped
            self.unpaired += 1
        if not session.open:
            self.unpaired += 1
            return events
        opened = session.open.popleft()
        opened.answer = note
        if note.kind == TAP_GATED:
            session.gated[note.head[1]] = opened
            return events
        found = self._known(opened, None)
        if not found:
            if opened.awaits_more:
                session.cut = opened
                return events
            found = self._learned(session, opened, None)
        return [*events, *found] if events else found

    def _more(self, session: _Session, note: Note) -> Sequence[Event]:
        opened = session.cut
        if opened is not None and opened.answer is not None and opened.answer.first[4:8] == note.first[4:8]:
            opened.answer = opened.answer._replace(first=opened.answer.first + note.said)
            if not opened.awaits_more:
                return self._cut(session)
        return ()

    def _events(self, session: _Session, opened: _Open, sent: float | None) -> Sequence[Event]:
        return self._known(opened, sent) or self._learned(session, opened, sent)

    def _learned(self, session: _Session, opened: _Open, sent: float | None) -> Sequence[Event]:
        """The events of an exchange that has to be read; others like it will not have to be."""
        events = self._read(session, opened, sent)
        asked, answer, head_end = opened.note, opened.answer, opened.facts.lone_head_end
        if head_end is not None and len(events) == 1 and answer is not None and answer.kind != TAP_OWN_ANSWER:
            alike = opened.alike or self._alike(session, asked, head_end)
            alike.learn(asked, answer, sent, events[0])
        return events

    @staticmethod
    def _known(opened: _Open, sent: float | None) -> Sequence[Event]:
        """The event of an exchange that is like one before; none: it has to be read."""
        alike, answer = opened.alike, opened.answer
        if alike is None or answer is None or answer.kind == TAP_OWN_ANSWER:
            return ()
        event = alike.event(opened.note, answer, sent)
        return () if event is None else (event,)

    @staticmethod
    def _alike(session: _Session, asked: Note, head_end: int) -> Alike:
        head = asked.first[CLIENT_ID_AT:head_end]
        found = next((each for each in session.alike if (each.key, each.head) == (asked.key, head)), None)
        if found is None:
            found = Alike(asked.key, head)
            session.alike = [found, *session.alike[: ALIKE_MAX - 1]]
        return found

    def _read(self, session: _Session, opened: _Open, sent: float | None) -> Sequence[Event]:
        """The events of a request with its answer, whatever they are."""
        asked, facts, answer = opened.note, opened.facts, opened.answer
        api_key, version = asked.key >> 16, asked.key & 0xFFFF
        said = opened.answer_facts or _NOT_ANSWERED
        response_bytes = NONE
        if answer is not None:
            response_bytes = answer.head[0] + 4
            said = opened.answer_facts or response_facts(api_key, version, answer.first, response_bytes)
        parts, partial = facts.parts or (NOT_READ,), facts.partial or said.partial
        if api_key == ApiKey.FETCH:  # what comes back counts: a request may name a thousand, or be of a fetch session
            parts, partial = (said.parts, said.partial) if said.parts else (parts[:1], partial)
        answers = {part[:2]: part for part in said.parts}  # by topic and partition
        size, correlation_id = asked.head
        took = times(asked, answer, sent)
        events = []
        for number, part in enumerate(parts):
            answered = answers.get(part[:2], NOT_READ)
            batch = part if part.batches >= 0 else answered
            common = Common(
                asked.session,
                api_key,
                version,
                session.broker_id,
                session.listener,
                session.address,
                facts.client_id,
                session.software,
                session.principal,
                number,
                len(parts),
                self._name(part.topic),
                part.partition,
                facts.group_id,
                facts.transactional_id,
                facts.acks,
                answered.error_code if answered.error_code is not None else said.error_code,
                batch.compression,
                batch.producer_id,
                batch.producer_epoch,
                int(partial),
            )
            counts = (batch.records, batch.batches, batch.batch_bytes, batch.base_sequence, answered.base_offset)
            events.append(event_of((asked.at, correlation_id, size + 4, response_bytes, *counts, *took, common)))
        return events

    def _name(self, topic: bytes | str | None) -> str | bytes | None:
        return self._topic_name(topic) or topic if isinstance(topic, bytes) else topic
