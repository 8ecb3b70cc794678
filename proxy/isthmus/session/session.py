"""A session: one client connection and its upstream connection (``downstream``, ``upstream``). This is the hot path.

Theory of operation
-------------------
Bytes arrive in chunks. A chunk usually holds whole frames; of each frame the head is read (size, API key, version,
correlation id) and the :class:`~isthmus.session.dispatch.Route` of its API and version says who wants to see more.
Nobody: the frame is forwarded with its neighbours in one write, also while most of it has yet to arrive. So nothing is
buffered but frames that a hook asked for, and what does not fit the peer's socket stops the reading of the other side.

Answers of a connection go out in the order of its requests. ``pending`` holds one entry for each request that is
forwarded and not answered, and for each answer that the proxy gives itself and whose turn has not come.

A response hook may return a gate in an answer's place. From then on until it is open, answers are queued in place of
being sent (:mod:`isthmus.session.gated_answers`): ``Downstream.send`` is swapped, so that without gates nothing is
asked. The broker has answered, so neither a fence nor a client that is gone waits for a gate; draining does.

States (every edge is in ``TRANSITIONS``, and tested)::

    CONNECTING --upstream connected--> AUTHENTICATING --authenticated--> SERVING

    SERVING --drain--> DRAINING --last answer--> LINGERING --client gone--> CLOSED
        |  \\--client gone, writes unanswered--> SETTLING --last answer--> CLOSED
        +---- fault, either side lost ------------------------------------> CLOSED (so, too, before it serves)

*AUTHENTICATING*: the client's SASL exchange passes (:mod:`isthmus.session.stranger`), and nothing else. Where the
broker's listener has no SASL, that is over at once.

*LINGERING*: the client has been sent the end of its answers; what it still sends is dropped, until it closes. A
socket that is closed while bytes of a client are unread is reset, and answers that have not left it are lost with it.

*SETTLING*: the client is gone, but the broker has writes of it that it has not answered. The upstream connection stays
until it has, so that a fence (:meth:`Session.fence`) never passes a write that may still land.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from isthmus.session.stranger import Stranger
from isthmus_plugins.api import ASKED_ID, Client, Gate, ResponseHook
from isthmus_plugins.clock import monotonic

if TYPE_CHECKING:
    from isthmus.session.dispatch import Route
    from isthmus.session.downstream import Downstream
    from isthmus.session.listener import Gateway
    from isthmus.session.upstream import Upstream

log = logging.getLogger("isthmus.session")

SETTLE_TIMEOUT_S: Final = 30.0
"""How long unanswered writes of a client that is gone are waited for; a broker's own request timeout."""
LINGER_TIMEOUT_S: Final = 2.0
"""How long a client that has all its answers may take to close; most do at once, some not before they ask again."""


class SessionState(enum.Enum):
    CONNECTING = "connecting"
    AUTHENTICATING = "authenticating"
    SERVING = "serving"
    DRAINING = "draining"
    SETTLING = "settling"
    LINGERING = "lingering"
    CLOSED = "closed"


class SessionEvent(enum.Enum):
    UPSTREAM_CONNECTED = "upstream connected"
    AUTHENTICATED = "authenticated"
    DRAIN = "drain"
    CLIENT_GONE_WRITES_PENDING = "client gone, writes unanswered"
    LAST_ANSWER = "last answer"
    CLOSE = "close"


SERVING: Final = SessionState.SERVING  # members of an enum are looked up slowly
AUTHENTICATING: Final = SessionState.AUTHENTICATING
_S, _E = SessionState, SessionEvent
TRANSITIONS: Final[dict[tuple[SessionState, SessionEvent], SessionState]] = {
    (_S.CONNECTING, _E.UPSTREAM_CONNECTED): _S.AUTHENTICATING,
    (_S.CONNECTING, _E.DRAIN): _S.CLOSED,
    (_S.CONNECTING, _E.CLOSE): _S.CLOSED,
    (_S.AUTHENTICATING, _E.AUTHENTICATED): _S.SERVING,
    (_S.AUTHENTICATING, _E.DRAIN): _S.CLOSED,
    (_S.AUTHENTICATING, _E.CLOSE): _S.CLOSED,
    (_S.SERVING, _E.DRAIN): _S.DRAINING,
    (_S.SERVING, _E.CLIENT_GONE_WRITES_PENDING): _S.SETTLING,
    (_S.SERVING, _E.CLOSE): _S.CLOSED,
    (_S.DRAINING, _E.CLIENT_GONE_WRITES_PENDING): _S.SETTLING,
    (_S.DRAINING, _E.LAST_ANSWER): _S.LINGERING,
    (_S.DRAINING, _E.CLOSE): _S.CLOSED,
    (_S.SETTLING, _E.LAST_ANSWER): _S.CLOSED,
    (_S.SETTLING, _E.CLOSE): _S.CLOSED,
    (_S.LINGERING, _E.CLOSE): _S.CLOSED,
}


Pending: TypeAlias = "tuple[int, Route, float, ResponseHook | None, bytes | Gate | None]"
"""A request whose answer has not gone out: ``(correlation id, route, forwarded, on_response, answer)``.

*forwarded*: when it was, monotonic seconds. *on_response* wants the whole answer; None lets it stream through.
*answer*: the proxy's own, nothing was forwarded; ``_FENCE_ANSWER``: the proxy has asked, and no client sees the answer.
A plain tuple: one is made for each request, and a named one takes five times as long.
"""

_FENCE_ANSWER: Final = b""
NO_ACKS0: Final = -1


class Session:
    """What the two connections of a session share: order of answers, state, and the way to end."""

    __slots__ = (
        "_end_timer",
        "_late_fences",
        "_legs",
        "acks0_behind",
        "client",
        "close_cause",
        "downstream",
        "gateway",
        "pending",
        "state",
        "stranger",
        "upstream",
    )

    def __init__(self, gateway: Gateway, client: Client, downstream: Downstream) -> None:
        self.gateway = gateway
        self.client = client
        self.downstream = downstream
        self.upstream: Upstream | None = None
        self.pending: deque[Pending] = deque()
        self.state = SessionState.CONNECTING
        self.close_cause = ""
        self.acks0_behind = NO_ACKS0
        """How many entries of ``pending`` stand before the newest unanswered Produce with acks=0: the answer to
        whatever was forwarded after it says that the broker has taken it up."""
        self._end_timer: asyncio.TimerHandle | None = None
        """Of AUTHENTICATING, SETTLING and LINGERING."""
        self.stranger: Stranger | None = None
        """What the client may do while AUTHENTICATING."""
        self._legs = 1
        """Connections that are not lost yet."""
        self._late_fences: tuple[Callable[[], None], ...] = ()
        """Fences that wait for the end of a frame which is half forwarded, to ask behind it."""

    def _on(self, event: SessionEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def upstream_connected(self, upstream: Upstream) -> None:
        """The broker answers the telephone: requests may flow."""
        if self.state is not SessionState.CONNECTING:  # the client is gone, or was sent away
            upstream.abort()
            return
        if upstream.lost:
            self.broker_lost("at once")
            return
        self._legs += 1
        self.upstream = upstream
        self._on(SessionEvent.UPSTREAM_CONNECTED)
        sasl = self.gateway.broker_sasl
        required = None if sasl is None else sasl.required(upstream.target)
        # Who has shown a certificate is known here; a broker with SASL wants to know, too, before all else.
        if sasl is None or required is False or (required is None and self.client.principal is not None):
            self._on(SessionEvent.AUTHENTICATED)
        else:
            self.stranger = Stranger(self, upstream, sasl, required)
            self.limit_authentication()
        self.downstream.serve(upstream)

    def limit_authentication(self) -> None:
        """Have the client authenticate within the limit of time, from now on."""
        assert self.stranger is not None
        timeout_s = self.gateway.limits.authentication_timeout_s
        self._end_timer = asyncio.get_running_loop().call_later(timeout_s, self.stranger.timed_out)

    def authenticated(self) -> None:
        """The broker takes the client's requests from now on."""
        self._on(SessionEvent.AUTHENTICATED)
        self._no_stranger()

    def _no_stranger(self) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        if self.stranger is not None:
            self.stranger.end()
            self.stranger = None

    def close(self, cause: str, detail: str = "") -> None:
        """End both connections for ``cause`` (counted and logged). Idempotent."""
        if self.state is not SessionState.CLOSED:
            self._end(SessionEvent.CLOSE, cause, detail)

    def _end(self, event: SessionEvent, cause: str, detail: str = "") -> None:
        self._on(event)
        self.close_cause = cause
        self._no_stranger()
        self.downstream.finish()
        if self.upstream is not None:
            if self.has_unanswered_write():  # what is still queued shall not land after the margin for lost writes
                self.upstream.abort()
            else:
                self.upstream.finish()
        self.gateway.session_closed(self, cause, detail)

    def fault(self, cause: str, detail: str) -> None:
        """The peer sent what no peer may send: say so, now and then, close the connection, go on with the others."""
        if self.state is SessionState.CLOSED:
            log.debug("connection refused by protocol", extra=self._log_fields(cause=cause, detail=detail))
            return
        self._say_refused(cause, detail)
        self.close(cause, detail)

    def not_authenticated(self, detail: str) -> None:
        """Close the connection of a client that does what only those may who have authenticated."""
        self.fault("not authenticated", detail)

    def refuse(self, reason: str) -> None:
        """Close the client's connection for what a plugin refuses; what was forwarded is waited for (SETTLING)."""
        self._say_refused("refused", reason)
        self.downstream.finish()

    def _say_refused(self, cause: str, detail: str) -> None:
        name = f"{host_of(self.client.address)} {cause}"
        self.gateway.refused_by_protocol.one(name, self._log_fields(cause=cause, detail=detail))

    def hook_failed(self, route: Route, error: Exception) -> None:
        """A plugin raised. Plugins fail closed: nobody knows what it would have refused."""
        log.error("hook failed", extra=self._log_fields(api=route.api, error=repr(error)), exc_info=error)
        self.close("hook failed", repr(error))

    def client_lost(self) -> None:
        """The client's connection ended. Writes that the broker has not answered are waited for, unseen."""
        if self.state is SessionState.CLOSED or self.state is SessionState.SETTLING:
            return
        if self.state is SessionState.CONNECTING:
            self.close("client closed")
            return
        if self.state is SessionState.LINGERING:
            self.close("drained")
            return
        assert self.upstream is not None
        asks_for_acks0 = self.acks0_behind != NO_ACKS0
        if self.downstream.mid_frame:
            if asks_for_acks0:  # Nothing can be asked behind half a frame: the margin for lost writes must do.
                self.close("client closed")
                return
            self._forget_half_forwarded()
        if not self.has_unanswered_write():
            self.close("client closed")
            return
        self._on(SessionEvent.CLIENT_GONE_WRITES_PENDING)
        self.downstream.hear_no_more()
        self.upstream.resume_reading()  # A client that did not read may have been the reason to pause.
        if asks_for_acks0:
            self._ask_behind_acks0(_nothing)
        loop = asyncio.get_running_loop()
        self._end_timer = loop.call_later(SETTLE_TIMEOUT_S, self.close, "settle timed out")

    def broker_lost(self, detail: str) -> None:
        """The broker's connection ended."""
        if self.state is not SessionState.LINGERING:  # nothing is expected of it any more
            self.close("broker closed", detail)

    def _forget_half_forwarded(self) -> None:
        """The newest request will never be whole, so the broker will not answer it, nor do what it says."""
        _, _, _, on_response, _ = self.pending.pop()
        if isinstance(on_response, _Passed):
            on_response.passed()

    def drain(self) -> None:
        """Answer what was asked, then end. A frame that is half forwarded is still taken in; later ones are not."""
        if self.state in (SessionState.CONNECTING, AUTHENTICATING):
            self._end(SessionEvent.DRAIN, "drained")
        elif self.state is SessionState.SERVING:
            self._on(SessionEvent.DRAIN)
            if self.acks0_behind != NO_ACKS0 and not self.downstream.mid_frame:
                self._ask_behind_acks0(_nothing)
            self.answered()

    def answered(self) -> None:
        """Called when ``pending`` may have become empty; ends a session that only waited for that."""
        if self.pending or self.state not in (AUTHENTICATING, SessionState.DRAINING, SessionState.SETTLING):
            return
        if self.stranger is not None:
            self.stranger.answered()
            return
        assert self.upstream is not None
        if self.upstream.mid_frame:
            return
        if self.state is SessionState.SETTLING:
            self._end(SessionEvent.LAST_ANSWER, "client closed")
        elif not self.downstream.busy:
            self._on(SessionEvent.LAST_ANSWER)
            self.upstream.finish()
            self.downstream.finish_sending()
            self._linger()

    def _linger(self) -> None:
        self._end_timer = asyncio.get_running_loop().call_later(LINGER_TIMEOUT_S, self._lingered)

    def _lingered(self) -> None:
        if self.downstream.unsent:  # a client that reads slowly has as long as the drain
            self._linger()
        else:
            self.close("drained")

    def has_unanswered_write(self) -> bool:
        """Whether the broker may hold a write of this session that it has not answered."""
        return self.acks0_behind != NO_ACKS0 or any(
            route.is_write and answer is None for _, route, _, _, answer in self.pending
        )

    def fence(self, passed: Callable[[], None]) -> bool:
        """Call ``passed`` when every write that was forwarded before now has been answered or can no longer land.

        Returns True, and does not call, if there is none. Acks=0 writes have no answer: a request of the proxy's own,
        which the broker takes up after them, is answered instead.
        """
        if self.upstream is None or self.state in (SessionState.CONNECTING, SessionState.CLOSED):
            return True
        if self.acks0_behind != NO_ACKS0:
            if self.downstream.mid_frame:
                self._late_fences += (passed,)
            else:
                self._ask_behind_acks0(passed)
            return False
        last = None
        for position, (_, route, _, _, answer) in enumerate(self.pending):
            if route.is_write and answer is None:
                last = position
        if last is None:
            return True
        correlation_id, route, forwarded, on_response, _ = self.pending[last]
        self.pending[last] = (correlation_id, route, forwarded, _Passed(passed, on_response), None)
        return False

    def _ask_behind_acks0(self, passed: Callable[[], None]) -> None:
        self.ask(_Passed(passed))

    def ask(self, on_response: ResponseHook, frame: bytes = b"") -> None:
        """Send the broker a request of the proxy's own (``frame``, or ApiVersions v0), whose answer only
        ``on_response`` sees."""
        assert self.upstream is not None
        self.pending.append((ASKED_ID, self.gateway.fence_route, monotonic(), on_response, _FENCE_ANSWER))
        self.upstream.send(frame or self.gateway.fence_frame)

    def frame_ended(self) -> None:
        """A frame that was forwarded in parts is whole."""
        late, self._late_fences = self._late_fences, ()
        for passed in late:
            self._ask_behind_acks0(passed)
        if self.state is SessionState.DRAINING:
            if self.acks0_behind != NO_ACKS0 and not late:
                self._ask_behind_acks0(_nothing)
            self.answered()

    def release_fences(self) -> None:
        """The upstream connection is gone: what it carried is out of our hands. Fences pass after the margin."""
        passed = [hook.passed for _, _, _, hook, _ in self.pending if isinstance(hook, _Passed)]
        loop = asyncio.get_running_loop()
        for each in (*passed, *self._late_fences):
            loop.call_later(self.gateway.lost_write_margin_s, each)
        self._late_fences = ()

    def leg_lost(self, upstream: Upstream | None = None) -> None:
        """One of the connections is gone. With the last one all that refers to each other lets go of each other, so
        that the memory is back at once, and not when the garbage collector comes by."""
        if upstream is not None:
            upstream.unlink()
        self._legs -= 1
        if not self._legs and self.state is SessionState.CLOSED:
            self.downstream.unlink()
            self.upstream = None
            del self.downstream

    def _log_fields(self, **more: Any) -> dict[str, Any]:
        return {
            "session": self.client.session_id,
            "client": self.client.address,
            "broker": self.client.broker_id,
            **more,
        }


def host_of(address: str) -> str:
    """Of ``host:port``."""
    return address.rpartition(":")[0]


def _nothing() -> None:
    pass


class _Passed:
    """A response hook that notifies a fence, and then calls the hook that was there before."""

    __slots__ = ("inner", "passed")

    def __init__(self, passed: Callable[[], None], inner: ResponseHook | None = None) -> None:
        self.passed = passed
        self.inner = inner

    def __call__(self, frame: bytes) -> bytes | Gate:
        self.passed()
        return frame if self.inner is None else self.inner(frame)
