"""Connects to a broker on a client's behalf, and again while the broker is there and does not take the connection.

A broker whose queue of new connections is full (50 by default) drops what comes; the kernel asks again at ever longer
intervals, so that some of a burst of clients would wait for many seconds after the broker has room. A new attempt asks
at once. A broker that refuses is not there: the client's connection is closed, as the broker would, since the client
knows what else to try.

A connection is the session's once its attempt has returned, and not before: one that is given up in the moment that it
is made is ended by uvloop, which does not tell its protocol.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from isthmus.session.session import Session, SessionState
from isthmus.session.upstream import Upstream
from isthmus_plugins import dialling
from isthmus_plugins.clock import monotonic

if TYPE_CHECKING:
    from isthmus.session.endpoint import Endpoint

ATTEMPTS_S: Final = (2.0, 4.0, 8.0, 16.0)
"""How long one attempt may take, with its TLS handshake: together as long as clients wait for an answer by default."""


class Connector:
    """Connects sessions to one of the addresses that ``targets`` returns, in turn."""

    def __init__(self, targets: Callable[[], Sequence[Endpoint]], context: Callable[[], ssl.SSLContext | None]) -> None:
        self._targets = targets
        self._context = context
        self._turn = itertools.count()

    async def connect(self, session: Session) -> asyncio.BaseTransport | None:
        """Give the session a connection to a broker; None if the session ended meanwhile. Raises Unreachable."""
        turn = next(self._turn)
        failures: dict[Endpoint, str] = {}
        for attempt_s in ATTEMPTS_S:
            targets = self._targets()
            timed_out = False
            for offset in range(len(targets)):
                if session.state is not SessionState.CONNECTING:
                    return None
                target = targets[(turn + offset) % len(targets)]
                began = monotonic()
                try:
                    transport, upstream = await self._attempt(session, target, attempt_s)
                except TimeoutError:
                    failures[target] = f"no answer for {monotonic() - began:.0f} s"
                    timed_out = True
                except OSError as error:
                    failures[target] = str(error) or type(error).__name__
                else:
                    session.upstream_connected(upstream)
                    return transport
            if not timed_out:
                break
        raise Unreachable("; ".join(f"{target}: {why}" for target, why in failures.items()) or "no broker is known")

    async def _attempt(
        self, session: Session, target: Endpoint, timeout_s: float
    ) -> tuple[asyncio.BaseTransport, Upstream]:
        upstream = Upstream(session, target)  # at once: the session may end while the name is looked up
        async with asyncio.timeout(timeout_s):
            return await dialling.connect(lambda: upstream, target.host, target.port, tls=self._context())


class Unreachable(Exception):
    """No broker took the connection; the message says why, for each."""
