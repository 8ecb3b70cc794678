"""Fetch sessions (KIP-227): a broker remembers what a connection asks for, so that only changes travel.

The first request of a session has all partitions and makes the broker assign an id; each later one has the next epoch
and the partitions that changed, and is answered for those in which something happened. A broker that has forgotten the
session, or thinks it elsewhere, says so at the top of its answer: :meth:`FetchSession.forget`, and ask again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from isthmus_plugins.cluster import FetchPartition
from isthmus_protocol.error_codes import (
    FETCH_SESSION_ID_NOT_FOUND,
    FETCH_SESSION_TOPIC_ID_ERROR,
    INVALID_FETCH_SESSION_EPOCH,
)

NO_SESSION: Final = (0, -1)
"""Session id and epoch of a request outside of any session."""
FORGOTTEN: Final = frozenset({FETCH_SESSION_ID_NOT_FOUND, INVALID_FETCH_SESSION_EPOCH, FETCH_SESSION_TOPIC_ID_ERROR})
_NO_ID: Final = 0
_FIRST_EPOCH: Final = 0
_EPOCH_MAX: Final = 2**31 - 1

Place = tuple[bytes, int]
"""Topic id and partition."""


class SessionRequest(NamedTuple):
    """What a request of a session says."""

    session_id: int
    epoch: int
    topics: dict[bytes, list[FetchPartition]]
    forgotten: dict[bytes, list[int]]


class FetchSession:
    """The session of one connection, on which one request is under way at a time."""

    def __init__(self) -> None:
        self._id = _NO_ID
        self._epoch = _FIRST_EPOCH
        self._known: Mapping[Place, FetchPartition] = {}

    def request(self, wanted: Mapping[Place, FetchPartition]) -> SessionRequest:
        """What is to be sent to read what is ``wanted``."""
        known = self._known
        changed = {place: each for place, each in wanted.items() if known.get(place) != each}
        dropped = [place for place in known if place not in wanted]
        self._known = wanted
        topics = by_topic(changed)
        forgotten: dict[bytes, list[int]] = {}
        for topic_id, partition in dropped:
            forgotten.setdefault(topic_id, []).append(partition)
        return SessionRequest(self._id, self._epoch, topics, forgotten)

    def answered(self, session_id: int) -> None:
        """The broker answered. With id 0 it keeps no session, and is asked for everything again."""
        if session_id == _NO_ID:
            self.forget()
        else:
            self._epoch = 1 if self._epoch == _EPOCH_MAX else self._epoch + 1
        self._id = session_id

    def forget(self) -> None:
        """The next request begins a session, in the place of this one."""
        self._epoch, self._known = _FIRST_EPOCH, {}


def by_topic(wanted: Mapping[Place, FetchPartition]) -> dict[bytes, list[FetchPartition]]:
    """The partitions of each topic."""
    topics: dict[bytes, list[FetchPartition]] = {}
    for (topic_id, _), each in wanted.items():
        topics.setdefault(topic_id, []).append(each)
    return topics
