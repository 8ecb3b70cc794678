"""What stands before the routes of the admin listener: who asks, from where, and how much they say.

Who is refused is told the same whether there is such a path or not. A page in an operator's browser can ask nothing:
browsers send Origin (or Sec-Fetch-Site) with what a page asks of another site, and there are no pages here. A page
whose own name was made to lead here (DNS rebinding) shows in Host.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from isthmus.admin import problems
from isthmus.admin.access import Access, Identity, Peer, Role, Unauthenticated
from isthmus.admin.hiding import hides
from isthmus_control.codec import MalformedValue, parse
from isthmus_plugins.clock import monotonic

log = logging.getLogger("isthmus.admin")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES_MAX: Final = 1024 * 1024
DEPTH_MAX: Final = 32
"""How deep JSON may be nested."""
BODY_TIMEOUT_S: Final = 10.0
"""How long a request's body may take to arrive."""
READING: Final = frozenset({"GET", "HEAD"})
OPEN_PREFIX: Final = "/health/"
METRICS_PATH: Final = "/metrics"
SAID_EVERY_S: Final = 60.0
"""How often the log has a line of refused requests of one address."""
ADDRESSES_MAX: Final = 1_000


class Refused(Exception):
    """A request that does not come to a route."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class Guard:
    """An ASGI application in front of another one, which finds the :class:`Identity` in the request's state."""

    def __init__(self, app: App, access: Access) -> None:
        self._app = app
        self._access = access
        self._said: dict[str, float] = {}
        self.refused: Counter[str] = Counter()
        """Requests, by code."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer: Peer = scope["state"]["peer"]
        try:
            scope["state"]["identity"] = self._admit(scope, peer)
            body = await _body(scope, receive)
        except Refused as error:
            self.refused[error.code] += 1
            self._say(peer, error)
            answer = problems.problem(error.status, error.code, error.message)
            answer.headers["connection"] = "close"  # what it still sends is not read
            if error.status == 401:
                answer.headers["www-authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        identity: Identity | None = scope["state"]["identity"]
        hides.set(identity is not None and identity.role is Role.VIEWER)
        await self._app(scope, _again(body, receive), send)

    def _admit(self, scope: Scope, peer: Peer) -> Identity | None:
        """Who may have this request answered; None: anybody. Raises Refused."""
        path, method = scope["path"], scope["method"]
        if path.startswith(OPEN_PREFIX) and method in READING:
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if peer.uid is None and not self._access.is_host(headers.get("host")):
            message = "Host does not name this proxy: use its address, or have admin_listener.hosts list the name"
            raise Refused(421, "HOST_NOT_ALLOWED", message)
        if "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refused(403, "ORIGIN_NOT_ALLOWED", "pages of other sites may ask nothing here")
        if path == METRICS_PATH and method in READING and self._access.metrics_open:
            return None
        try:
            identity = self._access.identify(peer, headers.get("authorization"))
        except Unauthenticated as error:
            raise Refused(401, "UNAUTHENTICATED", str(error)) from None
        if identity.role < Role.OPERATOR and method not in READING:
            raise Refused(403, "FORBIDDEN", f"{identity.name} may read and change nothing: an operator may")
        return identity

    def _say(self, peer: Peer, error: Refused) -> None:
        """Log it, once in a while."""
        now = monotonic()
        if now - self._said.get(peer.address, -SAID_EVERY_S) < SAID_EVERY_S:
            return
        if len(self._said) >= ADDRESSES_MAX:
            self._said.clear()
        self._said[peer.address] = now
        log.warning("admin request refused", extra={"peer": peer.address, "code": error.code})


async def _body(scope: Scope, receive: Receive) -> bytes:
    """All of a request's body. Raises Refused.

    One that is too large is read to its end all the same, and not kept: who goes on sending would not see the answer.
    """
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            more = True
            while more:
                message = await receive()
                size += len(message.get("body", b""))
                body += message.get("body", b"") if size <= BODY_BYTES_MAX else b""
                more = message.get("more_body", False)
    except TimeoutError:
        late = f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise Refused(408, "REQUEST_TIMEOUT", late) from None
    if size > BODY_BYTES_MAX:
        raise Refused(413, "TOO_LARGE", f"a request has a body of {BODY_BYTES_MAX} bytes at most")
    if not body:
        return b""
    media = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media != b"application/json":
        raise Refused(422, "INVALID_REQUEST", "a body is JSON: Content-Type: application/json")
    try:
        # What JSON cannot hold must not get into the control log, nor into answers; 1e999 is infinite, too.
        value = parse(body)
        json.dumps(value, allow_nan=False)
    except (MalformedValue, ValueError, RecursionError):
        odd = "the body is not JSON (in UTF-8, each key once, numbers and characters that there are)"
        raise Refused(422, "INVALID_REQUEST", odd) from None
    if _is_deep(value):
        raise Refused(422, "INVALID_REQUEST", f"the body is nested more than {DEPTH_MAX} deep")
    return bytes(body)


def _is_deep(value: Any) -> bool:
    """Whether JSON is nested deeper than whatever takes it apart by recursion should be given."""
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        inside = [each for each in level if isinstance(each, dict | list)]
        if not inside:
            return False
        level = [one for each in inside for one in (each.values() if isinstance(each, dict) else each)]
    return True


def _again(body: bytes, receive: Receive) -> Receive:
    """Give what was read to who reads next."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
