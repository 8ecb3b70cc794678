"""What is captured of a request and its answer: an event for each of its partitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from isthmus_plugins.api import TAP_OWN_ANSWER
from isthmus_plugins.capture.notes import Note

NONE: Final = -1
"""Stands for a number that is not known, or that there is none of."""


class Common(NamedTuple):
    """What many requests of a session have in common. Fields are those of ``blocks.COMMON_FIELDS``."""

    session: int
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
    acks: int
    error_code: int
    compression: int
    producer_id: int
    producer_epoch: int
    partial: int


class Event(NamedTuple):
    """A request with its answer, for one of its partitions. Fields but the last are those of ``blocks.FIELDS``."""

    at: float
    """Monotonic seconds; a file has ``time_us``, the wall clock's microseconds."""
    correlation_id: int
    request_bytes: int
    response_bytes: int
    records: int
    batches: int
    batch_bytes: int
    base_sequence: int
    base_offset: int
    proxy_us: int
    broker_us: int
    gate_us: int
    common: Common


event_of: Final[Callable[[tuple[Any, ...]], Event]] = partial(tuple.__new__, Event)
"""Of all its values at once: half of what calling the class takes."""


def times(asked: Note, answer: Note | None, sent: float | None) -> tuple[int, int, int]:
    """Microseconds in the proxy, at the broker and behind a gate, from which an answer went out at ``sent``."""
    taken = asked.noted - asked.at
    if answer is None:
        return _us(taken), NONE, NONE
    answered = answer.at
    taken += answer.noted - answered
    if answer.kind == TAP_OWN_ANSWER:
        return _us(taken), NONE, NONE
    return _us(taken), _us(answered - asked.noted), 0 if sent is None else _us(sent - answered)


def _us(seconds: float) -> int:
    return int(seconds * 1e6 + 0.5) if seconds > 0 else 0
