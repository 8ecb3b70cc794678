"""From notes to events: pairs requests with answers, and reads what their first bytes say. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from isthmus_plugins.api import (
    TAP_ANSWER,
    TAP_BYTES,
    TAP_GATED,
    TAP_OWN_ANSWER,
    TAP_REQUEST,
    tap_answer_bytes,
)
from isthmus_plugins.capture.first_bytes import (
    NOT_READ,
    LoneAnswer,
    LoneProduce,
    RequestFacts,
    ResponseFacts,
    Topic,
    fetched_facts,
    lone_answer,
    lone_produce,
    produced_parts,
    request_facts,
    response_facts,
)
from isthmus_plugins.capture.notes import ANSWERS, Kind, Note, unpack_parts
from isthmus_protocol.partition_scan import ScannedPartition
from isthmus_protocol.schema import ApiKey

NO_ANSWER: Final = -1
LONE_ANSWERS_MAX: Final = 100
"""Partitions of a session of which is known what their answers have in common."""
_NOT_ANSWERED: Final = ResponseFacts()


class Event(NamedTuple):
    """A request with its answer, for one of its partitions. Fields are those of ``blocks.FIELDS`` by the same names."""

    time_ns: int
    """Monotonic."""
    session: int
    correlation_id: int
    api_key: int
    api_version: int
    broker_id: int
    listener: str | None
    client_address: str | None
    client_id: str | None
    software: str | None
    principal: str | None
    part: int
    parts: int
    topic: str | bytes | None
    """Bytes: the id of one of which the name is not known."""
    partition: int
    group_id: str | None
    transactional_id: str | None
    request_bytes: int
    response_bytes: int
    acks: int
    error_code: int
    records: int
    batches: int
    batch_bytes: int
    compression: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    base_offset: int
    proxy_us: int
    broker_us: int
    gate_us: int
    partial: int


_event: Final = partial(tuple.__new__, Event)
"""Of all its values at once: half of what calling the class takes."""


@dataclass(slots=True)
class _Open:
    """A request that has no answer yet."""

    note: Note
    facts: RequestFacts
    answer: Note | None = None
    scanned: tuple[ScannedPartition, ...] = ()
    """Partitions of a Produce, or fetched ones, as far as they were told apart from first bytes."""
    told: ResponseFacts | None = None
    """What the answer says, where its first bytes do not say all."""

    @property
    def awaits_more(self) -> bool:
        """Whether it is not told yet what there is to tell of its answer."""
        answer = self.answer
        if answer is None or self.told is not None:
            return False
        size, said = answer.size + 4, len(answer.first)
        if size > TAP_BYTES and answer.key >> 16 == ApiKey.FETCH:
            return True
        return answer.kind == TAP_ANSWER and said < size and said < tap_answer_bytes(answer.key)


@dataclass(slots=True)
class _Session:
    address: str | None = None
    listener: str | None = None
    broker_id: int = -1
    principal: str | None = None
    software: str | None = None
    open: deque[_Open] = field(default_factory=deque)
    lone: LoneProduce | None = None
    """What its last Produce request of one partition has in common with others."""
    lone_answers: dict[tuple[int, Topic, int], LoneAnswer] = field(default_factory=dict)
    """What answers to such requests have in common, by version, topic and partition."""
    unanswered: _Open | None = None
    """A Produce with acks=0, of which more may come."""
    gated: dict[int, _Open] = field(default_factory=dict)
    cut: _Open | None = None
    """Of whose answer more is told."""


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
            waited = session.gated.pop(note.correlation_id, None)
            return () if waited is None else self._events(session, waited, note.at_ns)
        if kind == Kind.OPENED:
            session.address, _, session.listener = note.first.decode("utf-8", "replace").partition("\0")
            session.broker_id = note.size
        elif kind == Kind.PRINCIPAL:
            session.principal = note.first.decode("utf-8", "replace")
        elif kind == Kind.CLOSED:
            return self._closed(session, note)
        return ()

    def _closed(self, session: _Session, note: Note) -> Sequence[Event]:
        events = [*self._unanswered(session), *self._cut(session)]
        for opened in session.open:
            events += self._events(session, opened, None)
        for opened in session.gated.values():  # nobody waits for them any more: that long they had
            events += self._events(session, opened, note.at_ns)
        del self._sessions[note.session]
        return events

    def _asked(self, session: _Session, note: Note) -> Sequence[Event]:
        facts = self._facts(session, note)
        opened = _Open(note, facts)
        events = self._unanswered(session)
        if facts.acks != 0 or note.key >> 16 != ApiKey.PRODUCE:
            session.open.append(opened)
            return events
        session.unanswered = opened
        return events if facts.partial else [*events, *self._unanswered(session)]

    @staticmethod
    def _facts(session: _Session, note: Note) -> RequestFacts:
        api_key, version = note.key >> 16, note.key & 0xFFFF
        if api_key == ApiKey.PRODUCE and session.lone is not None:  # most are like the one before
            known = session.lone.facts_of(version, note.first)
            if known is not None:
                return known
        facts = request_facts(api_key, version, note.first, note.size + 4)
        if api_key == ApiKey.PRODUCE:
            session.lone = lone_produce(version, note.first, facts)
        if facts.software is not None:
            session.software = facts.software
        return facts

    def _unanswered(self, session: _Session) -> Sequence[Event]:
        """A request without an answer is complete: its parts are there, or another request is."""
        opened, session.unanswered = session.unanswered, None
        return () if opened is None else self._events(session, opened, None)

    def _cut(self, session: _Session) -> Sequence[Event]:
        """An answer is complete: all was told of it, or nothing more will be (the next one is there)."""
        opened, session.cut = session.cut, None
        return () if opened is None else self._events(session, opened, None)

    def _parts(self, session: _Session, note: Note) -> Sequence[Event]:
        candidates: tuple[_Open | None, ...]
        if note.key >> 16 == ApiKey.FETCH:
            candidates = (session.cut, session.gated.get(note.correlation_id))
        else:
            candidates = (session.unanswered, session.open[-1] if session.open else None)
        for opened in candidates:
            if opened is not None and opened.note.correlation_id == note.correlation_id:
                opened.scanned += tuple(unpack_parts(note.first))
                return self._all_parts(session, opened, note) if note.size else ()
        return ()

    def _all_parts(self, session: _Session, opened: _Open, last: Note) -> Sequence[Event]:
        version, partial = last.key & 0xFFFF, len(opened.scanned) < last.size
        if opened.answer is not None:
            opened.told = fetched_facts(version, opened.scanned)
            opened.told.partial = partial
            return self._cut(session) if opened is session.cut else ()
        opened.facts.parts = produced_parts(version, opened.scanned)
        opened.facts.partial = partial
        return self._unanswered(session) if opened is session.unanswered else ()

    def _answered(self, session: _Session, note: Note) -> Sequence[Event]:
        events = self._cut(session)
        while session.open and session.open[0].note.correlation_id != note.correlation_id:
            session.open.popleft()  # its answer's note was dropped
            self.unpaired += 1
        if not session.open:
            self.unpaired += 1
            return events
        opened = session.open.popleft()
        opened.answer = note
        if note.kind == TAP_GATED:
            session.gated[note.correlation_id] = opened
        elif opened.awaits_more:
            session.cut = opened
        else:
            return [*events, *self._events(session, opened, None)]
        return events

    def _more(self, session: _Session, note: Note) -> Sequence[Event]:
        opened = session.cut
        if opened is not None and opened.answer is not None and opened.answer.correlation_id == note.correlation_id:
            opened.answer = opened.answer._replace(first=opened.answer.first + note.first)
            if not opened.awaits_more:
                return self._cut(session)
        return ()

    @staticmethod
    def _told(session: _Session, opened: _Open) -> ResponseFacts:
        """What an answer's first bytes say; of a Produce most are like one before."""
        answer, parts = opened.answer, opened.facts.parts
        if answer is None:
            return _NOT_ANSWERED
        api_key, version = opened.note.key >> 16, opened.note.key & 0xFFFF
        if api_key != ApiKey.PRODUCE or len(parts) != 1 or parts[0].topic is None:
            return response_facts(api_key, version, answer.first, answer.size + 4)
        place = (version, parts[0].topic, parts[0].partition)
        lone = session.lone_answers.get(place)
        told = None if lone is None else lone.facts_of(answer.first)
        if told is None:
            told = response_facts(api_key, version, answer.first, answer.size + 4)
            lone = lone_answer(version, answer.first, told)
            if lone is not None:
                if len(session.lone_answers) >= LONE_ANSWERS_MAX:
                    session.lone_answers.clear()
                session.lone_answers[place] = lone
        return told

    def _events(self, session: _Session, opened: _Open, sent_ns: int | None) -> Sequence[Event]:
        asked, facts, answer = opened.note, opened.facts, opened.answer
        api_key, version = asked.key >> 16, asked.key & 0xFFFF
        told = opened.told or self._told(session, opened)
        broker_us = gate_us = response_bytes = NO_ANSWER
        proxy_ns = asked.took_ns
        if answer is not None:
            response_bytes = answer.size + 4
            proxy_ns += answer.took_ns
            if answer.kind != TAP_OWN_ANSWER:
                broker_us = max(0, answer.at_ns - asked.at_ns - asked.took_ns) // 1000
                gate_us = 0 if sent_ns is None else max(0, sent_ns - answer.at_ns) // 1000
        parts, partial = facts.parts or (NOT_READ,), facts.partial or told.partial
        if api_key == ApiKey.FETCH:  # what comes back counts: a request may name a thousand, or be of a fetch session
            parts, partial = (told.parts, told.partial) if told.parts else (parts[:1], partial)
        answers = {part[:2]: part for part in told.parts}  # by topic and partition
        events = []
        for number, part in enumerate(parts):
            answered = answers.get(part[:2], NOT_READ)
            batch = part if part.batches >= 0 else answered
            values = (
                asked.at_ns,
                asked.session,
                asked.correlation_id,
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
                asked.size + 4,
                response_bytes,
                facts.acks,
                answered.error_code if answered.error_code is not None else told.error_code,
                batch.records,
                batch.batches,
                batch.batch_bytes,
                batch.compression,
                batch.producer_id,
                batch.producer_epoch,
                batch.base_sequence,
                answered.base_offset,
                proxy_ns // 1000,
                broker_us,
                gate_us,
                int(partial),
            )
            events.append(_event(values))
        return events

    def _name(self, topic: bytes | str | None) -> str | bytes | None:
        return self._topic_name(topic) or topic if isinstance(topic, bytes) else topic
