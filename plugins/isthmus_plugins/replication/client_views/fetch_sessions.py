"""Keeps some topics out of clients' fetch sessions (KIP-227), so that whoever reads one names it in every request.

A session that may hold such a topic is ended once: the client asks for all its partitions then, and what asks for such
a topic is to be forwarded without a session (``fetch_verdicts``).
"""

from __future__ import annotations

from typing import Final

from isthmus_plugins.api import Answer, Request
from isthmus_plugins.aside import on_loop
from isthmus_protocol.error_codes import FETCH_SESSION_ID_NOT_FOUND
from isthmus_protocol.messages import build_response, encode_response
from isthmus_protocol.schema import ApiKey

CLEAR_MAX: Final = 100_000


class FetchSessions:
    """The sessions of all clients' connections."""

    def __init__(self, cause: str) -> None:
        self._cause = cause
        self._clear: set[int] = set()
        """Connections whose fetch session holds no such topic."""

    @property
    def now(self) -> set[int]:
        """To be taken before a request is looked at, which may be in the thread: stands until :meth:`forget`."""
        return self._clear

    def forget(self) -> None:
        """There are more such topics: any session may hold one."""
        self._clear = set()

    def end(self, since: set[int], request: Request, session_epoch: int | None, named: bool) -> Answer | None:
        """The answer that ends a Fetch's session if it may hold such a topic; ``named``: the request names one.

        ``since``: what :attr:`now` was before that was looked for.
        """
        if session_epoch is None or session_epoch < 0 or (session_epoch == 0 and named):
            return None
        session_id = request.client.session_id
        if session_epoch > 0 and (named or session_id not in self._clear):
            on_loop(self._note, since, session_id)
            answer = build_response(ApiKey.FETCH, request.version, {"error_code": FETCH_SESSION_ID_NOT_FOUND})
            return Answer(encode_response(answer, request.correlation_id), self._cause)
        on_loop(self._note, since, session_id)
        return None

    def _note(self, since: set[int], session_id: int) -> None:
        if since is not self._clear:
            return
        if len(self._clear) > CLEAR_MAX:
            self._clear.clear()
        self._clear.add(session_id)
