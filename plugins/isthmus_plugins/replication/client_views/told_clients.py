"""Which connections are told to ask their bootstrap servers again, and when.

What they are told is about their whole client, which then leaves every broker that it knows. So it is told to those
that asked for topics of moved namespaces and for no other one, as far as this connection said; and each connection is
told every :data:`AGAIN_S`, since a client may be in the middle of something that has it pass over the first time.
Who is told closes its connections and opens others, here again while its name leads here still. So of connections that
were opened since then each client is told at that rate, by its host and its client id. That is no loop that costs
anything, and it goes on until the name leads elsewhere. What it was told over older connections does not count: a
consumer may have opened one here before it has heard from the other cluster (see ``client_moves``), and ask over that.

What a connection asks beside that is told, too: what was on its way then, and what comes within :data:`MOMENT_S`.
librdkafka (2.16) begins anew a moment later than it is told, and does not where an answer without the error comes in
between: that stops the timer (``rd_kafka_rebootstrap_tmr_stop``), and it takes no notice of the error any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

AGAIN_S: Final = 10.0
"""How often a connection, or a client that came back, is told again."""
MOMENT_S: Final = 1.0
"""How long a connection that was told is told again."""
NAMES_MAX: Final = 16
"""Names, or what names begin with, that are remembered of a connection."""
CLIENTS_MAX: Final = 10_000
"""Clients that were told within :data:`AGAIN_S`. When there are more, those that come back are not told."""


def beginnings(names: Iterable[str], at_most: int = NAMES_MAX) -> tuple[str, ...]:
    """These names, or so many of them at most with what others have in common in their place, in order.

    Each of the names begins with one of what is returned. Those that have most in common are put together.
    """
    ordered = sorted(set(names))
    if len(ordered) <= at_most:
        return tuple(ordered)
    common = [len(_common(*pair)) for pair in pairwise(ordered)]
    ends = sorted(sorted(range(len(common)), key=common.__getitem__)[: at_most - 1])
    starts = [0, *(end + 1 for end in ends)]
    lasts = [*ends, len(ordered) - 1]
    found = {_common(ordered[start], ordered[last]) for start, last in zip(starts, lasts, strict=True)}
    return tuple(sorted(found))


def _common(one: str, other: str) -> str:
    """With what both begin."""
    same, most = 0, min(len(one), len(other))
    while same < most:
        tried = (same + most + 1) // 2
        if one[same:tried] == other[same:tried]:
            same = tried
        else:
            most = tried - 1
    return one[:same]


@dataclass(slots=True)
class _Connection:
    host: str
    opened: float
    named: tuple[str, ...] = ()
    """Beginnings of all topics that it asked for."""
    told_at: float = -math.inf


class ToldClients:
    """What is known of this proxy's connections. All times are monotonic seconds."""

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}
        self._told: dict[tuple[str, str], tuple[float, bool]] = {}
        """When clients were told last, and whether any of it over a connection that they opened since they are; the
        longest ago first.
        """

    def opened(self, session_id: int, host: str, now: float) -> None:
        """A client has connected."""
        self._connections[session_id] = _Connection(host, now)

    def closed(self, session_id: int) -> None:
        """The connection is gone."""
        self._connections.pop(session_id, None)

    def asked(self, session_id: int, named: tuple[str, ...]) -> None:
        """A connection has asked for topics, of which these are :func:`beginnings`."""
        connection = self._connections.get(session_id)
        if connection is not None and connection.named != named:
            connection.named = beginnings((*connection.named, *named))

    def may_be_told(self, session_id: int, client_id: str, begun: Callable[[str], float | None], now: float) -> bool:
        """Whether a connection is to be told now. ``begun``: since when clients of a topic are; None: they are not."""
        connection = self._connections.get(session_id)
        if connection is None or not connection.named or now - connection.told_at < AGAIN_S:
            return False
        since = [begun(name) for name in connection.named]
        known = [each for each in since if each is not None]
        if len(known) < len(since):
            return False
        if connection.opened < max(known):
            return True
        self._forget(now)
        told = self._told.get((connection.host, client_id))
        return len(self._told) < CLIENTS_MAX if told is None else not told[1]

    def is_being_told(self, session_id: int, asked: float) -> bool:
        """Whether what a connection asked then was on its way when it was told, or came a moment later."""
        connection = self._connections.get(session_id)
        return connection is not None and asked - connection.told_at < MOMENT_S

    def was_told(self, session_id: int, client_id: str, now: float) -> bool:
        """Whether a connection's client was told a short time ago, over this connection or another one."""
        connection = self._connections.get(session_id)
        told = None if connection is None else self._told.get((connection.host, client_id))
        return told is not None and now - told[0] < AGAIN_S

    def told(self, session_id: int, client_id: str, begun: float, now: float) -> None:
        """A connection is told now. ``begun``: since when clients of what it asked for are."""
        connection = self._connections.get(session_id)
        if connection is None:
            return
        connection.told_at = now
        client = connection.host, client_id
        _, came_back = self._told.pop(client, (now, False))
        if len(self._told) < CLIENTS_MAX:
            self._told[client] = now, came_back or connection.opened >= begun

    def _forget(self, now: float) -> None:
        """Of clients that may be told again."""
        while self._told and now - self._told[client := next(iter(self._told))][0] >= AGAIN_S:
            del self._told[client]
