"""Keeps some topics out of clients' fetch sessions (KIP-227), so that whoever reads one names it in every request.

A session that may hold such a topic is ended once: the client asks for all its partitions then, and what asks for such
a topic is to be forwarded without a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from isthmus_plugins.api import Answer, Hold, Request, Verdict
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol.error_codes import FETCH_SESSION_ID_NOT_FOUND
from isthmus_protocol.messages import build_response, decode_request, encode_response
from isthmus_protocol.refusals import Part, Refusal, refuse
from isthmus_protocol.schema import ApiKey

NO_SESSION: Final = 0
NO_SESSION_EPOCH: Final = -1
WAIT_S_MAX: Final = 0.5
CLEAR_MAX: Final = 100_000


class FetchSessions:
    """The sessions of all clients' connections."""

    def __init__(self, cause: str) -> None:
        self._cause = cause
        self._clear: set[int] = set()
        """Connections whose fetch session holds no such topic."""

    def forget(self) -> None:
        """There are more such topics: any session may hold one."""
        self._clear.clear()

    def end(self, request: Request, session_epoch: int | None, named: bool) -> Answer | None:
        """The answer that ends a Fetch's session if it may hold such a topic; ``named``: the request names one."""
        if session_epoch is None or session_epoch < 0 or (session_epoch == 0 and named):
            return None
        session_id = request.client.session_id
        if session_epoch > 0 and (named or session_id not in self._clear):
            self._note(session_id)
            answer = build_response(ApiKey.FETCH, request.version, {"error_code": FETCH_SESSION_ID_NOT_FOUND})
            return Answer(encode_response(answer, request.correlation_id), self._cause)
        self._note(session_id)
        return None

    def _note(self, session_id: int) -> None:
        if len(self._clear) > CLEAR_MAX:
            self._clear.clear()
        self._clear.add(session_id)


async def answered_later(frame: bytes, wait_s: float, released: asyncio.Event, cause: str) -> Answer:
    """An answer that says "try again", after a while, as if the broker had waited for records: clients ask at once."""
    try:
        async with asyncio.timeout(min(wait_s, WAIT_S_MAX)):
            await released.wait()
    except TimeoutError:
        pass
    return Answer(frame, cause)


def refused_in_part(
    request: Request, decide: Callable[[Part], Refusal | None], wait_ms: int, released: asyncio.Event, cause: str
) -> Verdict:
    """A Fetch of which some partitions are refused: these are answered, and the rest goes on without a session."""
    head, payload = decode_request(request.frame)
    refused = refuse(head, payload, decide)
    if refused is None:
        return None
    if refused.answer is not None:
        return Hold(answered_later(refused.answer, wait_ms / 1000, released, cause))
    return verdict_of(request, head, replace(refused, remaining=without_session(refused.remaining)), cause)


def without_session(payload: Any) -> Any:
    """A Fetch request that neither is part of a session nor begins one."""
    if not hasattr(payload, "session_epoch"):
        return payload
    return replace(payload, session_id=NO_SESSION, session_epoch=NO_SESSION_EPOCH)
