"""A session: one client connection and its upstream connection. This is the hot path.

Theory of operation
-------------------
Bytes arrive in chunks. A chunk usually holds whole frames; of each frame the head is read (size, API key, version,
correlation id) and the :class:`~isthmus.dispatch.Route` of its API and version says whether anybody wants to see more.
Nobody: the frame is forwarded with its neighbours in one write, also while most of it has yet to arrive. So nothing is
buffered but frames that a hook asked for, and what does not fit the peer's socket stops the reading of the other side.

Answers of a connection go out in the order of its requests. ``pending`` holds one entry for each request that is
forwarded and not answered, and for each answer that the proxy gives itself and whose turn has not come.

A response hook may return a gate in an answer's place. From then on until it is open, answers are queued in place of
being sent (:mod:`isthmus.gated_answers`): ``Downstream.send`` is swapped, so that where nobody gates nothing is asked.
The broker has answered, so neither a fence nor a client that is gone waits for a gate; draining does.

States (every edge is in ``TRANSITIONS``, and tested)::

    CONNECTING --upstream connected--> SERVING --drain--> DRAINING --last answer--> CLOSED
        |                                 |  \\--client gone, writes unanswered--> SETTLING --last answer--> CLOSED
        +---- fault, either side lost ----+--------------------------------------------------------------> CLOSED

*SETTLING*: the client is gone, but the broker has writes of it that it has not answered. The upstream connection stays
until it has, so that a fence (:meth:`Session.fence`) never passes a write that may still land.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from isthmus.dispatch import PROXY_TIME_EACH
from isthmus.gated_answers import GatedAnswers
from isthmus_plugins.api import (
    NEED_MORE,
    Answer,
    Client,
    Close,
    Gate,
    Hold,
    Leave,
    Replace,
    Request,
    ResponseHook,
    Verdict,
    passed_on,
)
from isthmus_protocol.wire import MalformedFrame, NeedMore

if TYPE_CHECKING:
    from isthmus.dispatch import ResponseStream, Route
    from isthmus.listener import Gateway, Listener

log = logging.getLogger("isthmus.session")

_request_head: Final = struct.Struct(">iIi").unpack_from
"""Size, API key and version as one number, correlation id."""
_response_head: Final = struct.Struct(">ii").unpack_from
_REQUEST_HEAD_SIZE: Final = 12
_RESPONSE_HEAD_SIZE: Final = 8
_SMALLEST_REQUEST: Final = 10
"""Key, version, correlation id and a client id's length; what follows the size."""

WRITE_HIGH_WATER_BYTES: Final = 256 * 1024
"""Bytes queued towards one peer before the other one is no longer read: a session holds at most this and one chunk."""
WHOLE_FRAME_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of a request that hooks see as a whole: many thousand topics. Anybody may make the proxy hold that much."""
FLUSH_TIMEOUT_S: Final = 30.0
"""How long a peer that does not read may keep a closed connection's last bytes in memory."""
KNOWN_HEADS_MAX: Final = 8
"""Topics of a connection whose Produce requests are recognised by their first bytes."""
KNOWN_HEAD_BYTES_MAX: Final = 1024
SETTLE_TIMEOUT_S: Final = 30.0
"""How long unanswered writes of a client that is gone are waited for; a broker's own request timeout."""


class SessionState(enum.Enum):
    CONNECTING = "connecting"
    SERVING = "serving"
    DRAINING = "draining"
    SETTLING = "settling"
    CLOSED = "closed"


class SessionEvent(enum.Enum):
    UPSTREAM_CONNECTED = "upstream connected"
    DRAIN = "drain"
    CLIENT_GONE_WRITES_PENDING = "client gone, writes unanswered"
    LAST_ANSWER = "last answer"
    CLOSE = "close"


_SERVING: Final = SessionState.SERVING  # members of an enum are looked up slowly
_S, _E = SessionState, SessionEvent
TRANSITIONS: Final[dict[tuple[SessionState, SessionEvent], SessionState]] = {
    (_S.CONNECTING, _E.UPSTREAM_CONNECTED): _S.SERVING,
    (_S.CONNECTING, _E.DRAIN): _S.CLOSED,
    (_S.CONNECTING, _E.CLOSE): _S.CLOSED,
    (_S.SERVING, _E.DRAIN): _S.DRAINING,
    (_S.SERVING, _E.CLIENT_GONE_WRITES_PENDING): _S.SETTLING,
    (_S.SERVING, _E.CLOSE): _S.CLOSED,
    (_S.DRAINING, _E.CLIENT_GONE_WRITES_PENDING): _S.SETTLING,
    (_S.DRAINING, _E.LAST_ANSWER): _S.CLOSED,
    (_S.DRAINING, _E.CLOSE): _S.CLOSED,
    (_S.SETTLING, _E.LAST_ANSWER): _S.CLOSED,
    (_S.SETTLING, _E.CLOSE): _S.CLOSED,
}


Pending: TypeAlias = "tuple[int, Route, float, ResponseHook | None, bytes | Gate | None]"
"""A request whose answer has not gone out: ``(correlation id, route, forwarded, on_response, answer)``.

*forwarded*: when it was, monotonic seconds. *on_response* wants the whole answer; None lets it stream through.
*answer*: the proxy's own, nothing was forwarded; ``_FENCE_ANSWER``: the proxy has asked, and no client sees the answer.
A plain tuple: one is made for each request, and a named one takes five times as long.
"""

_FENCE_ANSWER: Final = b""
_NO_ACKS0: Final = -1
_NO_LEAVE: Final = Leave(float("-inf"))
_UNTIL_SERVED: Final = 1 << 62
"""More bytes than come: nothing is looked at before the broker's connection is there."""


class Session:
    """What the two connections of a session share: order of answers, state, and the way to end."""

    __slots__ = (
        "_late_fences",
        "_legs",
        "_settle_timer",
        "_unlinked",
        "acks0_behind",
        "client",
        "close_cause",
        "downstream",
        "gateway",
        "pending",
        "state",
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
        self.acks0_behind = _NO_ACKS0
        """How many entries of ``pending`` stand before the newest unanswered Produce with acks=0: the answer to
        whatever was forwarded after it says that the broker has taken it up."""
        self._settle_timer: asyncio.TimerHandle | None = None
        self._legs = 1
        """Connections that are not lost yet."""
        self._unlinked = False
        self._late_fences: list[Callable[[], None]] = []
        """Fences that wait for the end of a frame which is half forwarded, to ask behind it."""

    def _on(self, event: SessionEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def upstream_connected(self, upstream: Upstream) -> None:
        """The broker answers the telephone: requests may flow."""
        self._legs += 1
        if self.state is not SessionState.CONNECTING:  # the client is gone, or was sent away
            upstream.abort()
            return
        self.upstream = upstream
        self._on(SessionEvent.UPSTREAM_CONNECTED)
        self.downstream.serve(upstream)

    def close(self, cause: str, detail: str = "") -> None:
        """End both connections for ``cause`` (counted and logged). Idempotent."""
        if self.state is not SessionState.CLOSED:
            self._end(SessionEvent.CLOSE, cause, detail)

    def _end(self, event: SessionEvent, cause: str, detail: str = "") -> None:
        self._on(event)
        self.close_cause = cause
        if self._settle_timer is not None:
            self._settle_timer.cancel()
        self.downstream.finish()
        if self.upstream is not None:
            if self.has_unanswered_write():  # what is still queued shall not land after the margin for lost writes
                self.upstream.abort()
            else:
                self.upstream.finish()
        self.gateway.session_closed(self, cause, detail)

    def fault(self, cause: str, detail: str) -> None:
        """The peer sent what no peer may send: say so, close the connection, go on with the others."""
        level = logging.DEBUG if self.state is SessionState.CLOSED else logging.WARNING
        log.log(level, "connection refused by protocol", extra=self._log_fields(cause=cause, detail=detail))
        self.close(cause, detail)

    def refuse(self, reason: str) -> None:
        """Close the client's connection for what a plugin refuses; what was forwarded is waited for (SETTLING)."""
        log.warning("connection refused by protocol", extra=self._log_fields(cause="refused", detail=reason))
        self.downstream.finish()

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
        assert self.upstream is not None
        asks_for_acks0 = self.acks0_behind != _NO_ACKS0
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
        self._settle_timer = loop.call_later(SETTLE_TIMEOUT_S, self.close, "settle timed out")

    def _forget_half_forwarded(self) -> None:
        """The newest request will never be whole, so the broker will not answer it, nor do what it says."""
        _, _, _, on_response, _ = self.pending.pop()
        if isinstance(on_response, _Passed):
            on_response.passed()

    def drain(self) -> None:
        """Answer what was asked, then close. A frame that is half forwarded is still taken in; later ones are not."""
        if self.state is SessionState.CONNECTING:
            self._end(SessionEvent.DRAIN, "drained")
        elif self.state is SessionState.SERVING:
            self._on(SessionEvent.DRAIN)
            if self.acks0_behind != _NO_ACKS0 and not self.downstream.mid_frame:
                self._ask_behind_acks0(_nothing)
            self.answered()

    def answered(self) -> None:
        """Called when ``pending`` may have become empty; ends a session that only waited for that."""
        if self.pending or self.state not in (SessionState.DRAINING, SessionState.SETTLING):
            return
        assert self.upstream is not None
        if self.upstream.mid_frame:
            return
        if self.state is SessionState.SETTLING:
            self._end(SessionEvent.LAST_ANSWER, "client closed")
        elif not self.downstream.busy:
            self._end(SessionEvent.LAST_ANSWER, "drained")

    def has_unanswered_write(self) -> bool:
        """Whether the broker may hold a write of this session that it has not answered."""
        return self.acks0_behind != _NO_ACKS0 or any(
            route.is_write and answer is None for _, route, _, _, answer in self.pending
        )

    def fence(self, passed: Callable[[], None]) -> bool:
        """Call ``passed`` when every write that was forwarded before now has been answered or can no longer land.

        Returns True, and does not call, if there is none. Acks=0 writes have no answer: a request of the proxy's own,
        which the broker takes up after them, is answered instead.
        """
        if self.upstream is None or self.state in (SessionState.CONNECTING, SessionState.CLOSED):
            return True
        if self.acks0_behind != _NO_ACKS0:
            if self.downstream.mid_frame:
                self._late_fences.append(passed)
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
        assert self.upstream is not None
        self.pending.append((0, self.gateway.fence_route, monotonic(), _Passed(passed), _FENCE_ANSWER))
        self.upstream.send(self.gateway.fence_frame)

    def frame_ended(self) -> None:
        """A frame that was forwarded in parts is whole."""
        late, self._late_fences = self._late_fences, []
        for passed in late:
            self._ask_behind_acks0(passed)
        if self.state is SessionState.DRAINING:
            self.answered()

    def release_fences(self) -> None:
        """The upstream connection is gone: what it carried is out of our hands. Fences pass after the margin."""
        passed = [hook.passed for _, _, _, hook, _ in self.pending if isinstance(hook, _Passed)]
        loop = asyncio.get_running_loop()
        for each in (*passed, *self._late_fences):
            loop.call_later(self.gateway.lost_write_margin_s, each)
        self._late_fences = []

    def leg_lost(self, upstream: Upstream | None = None) -> None:
        """One of the connections is gone. With the last one all that refers to each other lets go of each other, so
        that the memory is back at once, and not when the garbage collector comes by."""
        if upstream is not None:
            upstream.unlink()
        self._legs -= 1
        if not self._legs and self.state is SessionState.CLOSED and not self._unlinked:
            self._unlinked = True  # an upstream connection may come, and go, after that
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


def _nothing() -> None:
    pass


def _unheard(data: bytes) -> None:
    """Takes the place of ``send`` of a client that is gone."""


class _Passed:
    """A response hook that tells a fence, behind the hook that was there before."""

    __slots__ = ("inner", "passed")

    def __init__(self, passed: Callable[[], None], inner: ResponseHook | None = None) -> None:
        self.passed = passed
        self.inner = inner

    def __call__(self, frame: bytes) -> bytes | Gate:
        self.passed()
        return frame if self.inner is None else self.inner(frame)


class _Peer(asyncio.Protocol):
    """What both ends of a session have: a transport, bytes that are not a frame yet, and back-pressure."""

    __slots__ = ("_partial", "_streaming", "_transport", "_wanted", "send", "session")

    _transport: asyncio.Transport
    session: Session
    send: Callable[[bytes], None]
    """Queues bytes towards this peer."""

    def __init__(self) -> None:
        self._streaming = 0
        """Bytes that are still to come of a frame that is being forwarded."""
        self._partial: bytearray | None = None
        self._wanted = 0
        """How long ``_partial`` must be before it is worth another look."""

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has been forwarded in part."""
        return self._streaming > 0

    def _keep(self, data: bytes, wanted: int) -> None:
        self._partial = bytearray(data)
        self._wanted = wanted

    def _connected(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self.send = self._transport.write

    def finish(self) -> None:
        """Close after what is queued has been sent, within a bounded time; no more is read."""
        self._partial = None
        if self._transport.is_closing():
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(FLUSH_TIMEOUT_S, self._transport.abort)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()


class Upstream(_Peer):
    """The connection to the broker: answers arrive here."""

    __slots__ = ("_downstream", "_frame_bytes_max", "_gateway", "_opaque", "_pending", "_stream")

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self._gateway = session.gateway
        self._frame_bytes_max = session.gateway.frame_bytes_max
        self._downstream = session.downstream
        self._pending = session.pending
        self._stream: ResponseStream | None = None
        self._opaque = 0
        """How many of the bytes that are streaming are sent on without ``_stream``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connected(transport)
        self.session.upstream_connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        session = self.session
        session.release_fences()
        session.close("broker closed", repr(exc) if exc else "")
        session.leg_lost(self)

    def unlink(self) -> None:
        """Let go of the other parts of the session."""
        del self.session, self._downstream

    def pause_writing(self) -> None:
        self._downstream.hold_reading()

    def resume_writing(self) -> None:
        self._downstream.release_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        size = len(data)
        self._gateway.bytes_from_brokers += size
        if size < self._opaque:  # the middle of something large
            self._opaque -= size
            self._streaming -= size
            self._downstream.send(data)
            return
        arrived = monotonic()
        try:
            if self._streaming or self._partial is not None:
                data = self._continued(data)
                if not data:
                    return
            self._responses(data, arrived)
        except MalformedFrame as error:
            self.session.fault("malformed answer", str(error))

    def _continued(self, data: bytes) -> bytes:
        """Take in what belongs to a frame that has begun before. Returns what begins with a frame, b"" for nothing."""
        rest = self._streaming
        if rest:
            size = len(data)
            if size < rest:
                self._streaming = rest - size
                self._downstream.send(self._streamed(data))
                return b""
            self._streaming = 0
            self._downstream.send(self._streamed(data if size == rest else data[:rest]))
            self._stream = None
            self._own_answers()
            if size == rest:
                self.answered()
                return b""
            data = data[rest:]
        if self._partial is not None:
            self._partial += data
            if len(self._partial) < self._wanted:
                return b""
            data = bytes(self._partial)
            self._partial = None
        return data

    def _streamed(self, data: bytes) -> bytes:
        """The next bytes of a streaming answer as they are to be sent."""
        stream, opaque = self._stream, self._opaque
        if stream is None:
            self._opaque = self._streaming
            return data
        rest = data[opaque:] if opaque else data
        fed = stream.feed(rest)
        self._opaque = stream.pass_on()
        if fed is rest:  # nearly always: no copy of what may be large
            return data
        return data[:opaque] + fed if opaque else fed

    def _responses(self, data: bytes, arrived: float) -> None:
        session = self.session
        pending = self._pending
        send = self._downstream.send
        available = len(data)
        start = position = 0  # data[start:position] is checked and not written yet
        route: Route | None = None
        while available - position >= _RESPONSE_HEAD_SIZE:
            size, correlation_id = _response_head(data, position)
            if not pending or pending[0][0] != correlation_id:
                session.fault("answer out of order", f"correlation id {correlation_id}")
                return
            _, of, forwarded, on_response, own = pending[0]
            if size < 4 or (size > self._frame_bytes_max and on_response is not None and of.stream_response is None):
                session.fault("oversized answer", f"{size} bytes")
                return
            end = position + 4 + size
            if on_response is None:
                if end > available:
                    self._streaming = self._opaque = end - available
                    end = available
                pending.popleft()
            elif end <= available:
                frame = data if end - position == available else data[position:end]
                try:
                    answer = on_response(frame)
                except MalformedFrame:
                    raise
                except Exception as error:
                    session.hook_failed(of, error)
                    return
                pending.popleft()
                if answer is not frame or own is not None:
                    if start < position:
                        send(data[start:position])
                    if own is None:
                        if isinstance(answer, Gate):
                            self._downstream.gate(answer, of)
                            if session.state is SessionState.CLOSED:
                                return
                            send = self._downstream.send
                        else:
                            send(answer)
                    start = end
            else:
                if on_response is not of.on_response or of.stream_response is None:
                    break
                if start < position:
                    send(data[start:position])
                self._stream = of.stream_response(size + 4)
                self._streaming = end - available
                send(self._streamed(data[position:] if position else data))
                start = end = available
                pending.popleft()
            position = end
            route = of
            route.broker_time.observe(arrived - forwarded)
            if session.acks0_behind != _NO_ACKS0:
                session.acks0_behind -= 1
            if pending and pending[0][4] and not self._streaming:
                if start < position:
                    send(data[start:position])
                    start = position
                self._own_answers()
                if session.state is SessionState.CLOSED:
                    return
                send = self._downstream.send
        if start < position:
            send(data if position - start == available else data[start:position])
        if position < available:
            rest = data[position:]
            wanted = _RESPONSE_HEAD_SIZE
            if len(rest) >= _RESPONSE_HEAD_SIZE:
                wanted = _response_head(rest)[0] + 4
            self._keep(rest, wanted)
        if session.state is not _SERVING or self._downstream.throttled:
            self.answered()
        if route is not None and route.requests % PROXY_TIME_EACH == 1:
            route.proxy_time.observe(monotonic() - arrived)

    def answered(self) -> None:
        """Answers have gone out: go on with what waited for that."""
        pending = self._pending
        downstream = self._downstream
        if downstream.throttled and 2 * (len(pending) + downstream.gated) <= self._gateway.in_flight_max:
            downstream.unthrottle()
        if not pending:
            self.session.answered()

    def _own_answers(self) -> None:
        """Send the proxy's own answers whose turn has come."""
        pending = self._pending
        while pending and (answer := pending[0][4]):
            _, route, _, _, _ = pending.popleft()
            if self.session.acks0_behind > 0:
                self.session.acks0_behind -= 1
            if isinstance(answer, Gate):
                self._downstream.gate(answer, route)
            else:
                self._downstream.send(answer)

    def own_answer(self, entry: Pending) -> None:
        """Give an answer of the proxy's own, in its turn."""
        self._pending.append(entry)
        if self._pending[0] is entry and not self._streaming:
            self._own_answers()


class Downstream(_Peer):
    """The client's connection: requests arrive here."""

    __slots__ = (
        "_full",
        "_gated",
        "_gated_full",
        "_gateway",
        "_held",
        "_holds",
        "_in_flight_max",
        "_known",
        "_listener",
        "_pending",
        "_request",
        "_routes",
        "_upstream",
        "_writing",
        "throttled",
    )

    _upstream: Upstream

    def __init__(self, gateway: Gateway, listener: Listener) -> None:
        super().__init__()
        self._gateway = gateway
        self._listener = listener
        self._routes = gateway.routes
        self._holds = 1
        """Reasons not to read: connecting, a slow broker or client, too many in flight, a held request."""
        self._held = False
        self._writing = False
        """What is streaming is a write: it ends where the proxy may not vouch for it any more."""
        self._request: Request | None = None
        """What hooks are asked about, used again while no hook has kept it: one that wants nothing has not."""
        self._known = self._nothing_known()
        """Route key, leave, the heads of frames that it covers, the least size of a frame that holds them, route."""
        self._in_flight_max = gateway.in_flight_max
        self.throttled = False
        self._full = 0
        """Reasons not to read answers: the client does not read them, too much waits behind a gate."""
        self._gated: GatedAnswers | None = None
        """Answers that wait at gates, and behind them; None where there are none."""
        self._gated_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connected(transport)
        self._transport.pause_reading()
        self._keep(b"", _UNTIL_SERVED)
        self.session = self._listener.session_opened(self, self._transport)
        self._pending = self.session.pending

    def connection_lost(self, exc: Exception | None) -> None:
        self.session.client_lost()
        self.session.leg_lost()

    def unlink(self) -> None:
        """Let go of the upstream connection. A held request may still want to know that the session is closed."""
        with contextlib.suppress(AttributeError):  # it never came
            del self._upstream

    def pause_writing(self) -> None:
        self._full += 1
        self.hold_reading()  # the proxy's own answers come of requests, not of the broker
        upstream = self.session.upstream
        if upstream is not None:
            upstream.pause_reading()

    def resume_writing(self) -> None:
        self._full -= 1
        self.release_reading()
        upstream = self.session.upstream
        if not self._full and upstream is not None and self.session.state is not SessionState.CLOSED:
            upstream.resume_reading()

    def gate(self, gate: Gate, route: Route) -> None:
        """Send an answer when its gate is open, and whatever comes behind it after that."""
        if self.send is _unheard or self._transport.is_closing():
            gate.drop()
            return
        if self._gated is None:
            self._gated = GatedAnswers(self._gateway.gates, self._transport.write, self._gate_opened, self._gate_failed)
            self.send = self._behind_gate
        self._gated.add_gate(gate, route)
        self._bound_gated()

    def _behind_gate(self, data: bytes) -> None:
        """Takes the place of ``send`` while an answer waits at a gate."""
        if self._gated is None:  # it has opened since the caller looked
            self.send(data)
        else:
            self._gated.add(data)
            self._bound_gated()

    def _gate_opened(self) -> None:
        if self._gated is not None and not len(self._gated):
            self._gated = None
            self.send = self._transport.write
        self._bound_gated()
        if self.throttled or self.session.state is not _SERVING:
            self._upstream.answered()

    def _gate_failed(self, route: Route, error: Exception) -> None:
        if isinstance(error, MalformedFrame):
            self.session.fault("malformed answer", str(error))
        else:
            self.session.hook_failed(route, error)

    @property
    def gated(self) -> int:
        """How many answers, or parts of them, wait at gates and behind them."""
        return 0 if self._gated is None else len(self._gated)

    def _bound_gated(self) -> None:
        """Stop what adds to the answers that wait when there are too many, or let it go on."""
        if self._gated is not None and len(self._gated) + len(self._pending) > self._in_flight_max:
            self.throttle()
        full = self._gated is not None and self._gated.waiting_bytes > WRITE_HIGH_WATER_BYTES
        if full != self._gated_full:
            self._gated_full = full
            if full:
                self.pause_writing()
            else:
                self.resume_writing()

    def hear_no_more(self) -> None:
        """The client is gone: nothing is sent any more, and nothing waits to be."""
        self.send = _unheard
        if self._gated is not None:
            gated, self._gated = self._gated, None
            gated.drop()
            self._bound_gated()

    def finish(self) -> None:
        if self._gated is not None:
            self.hear_no_more()
        super().finish()

    def serve(self, upstream: Upstream) -> None:
        """The broker is connected: read requests."""
        self._upstream = upstream
        early, self._partial = self._partial, None
        if early:
            self._take(bytes(early), monotonic())
        self.release_reading()

    @property
    def busy(self) -> bool:
        """Whether a request was taken in that is not forwarded as a whole, or an answer waits at a gate."""
        return self._held or self._streaming > 0 or self._gated is not None

    def hold_reading(self) -> None:
        """One more reason not to read requests."""
        self._holds += 1
        if self._holds == 1 and self.session.state is not SessionState.CLOSED:
            self._transport.pause_reading()

    def release_reading(self) -> None:
        """One reason less."""
        self._holds -= 1
        if self._holds == 0 and self.session.state in (SessionState.SERVING, SessionState.DRAINING):
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        arrived = monotonic()
        size = len(data)
        self._gateway.bytes_from_clients += size
        if self._streaming or self._partial is not None:
            data = self._continued(data)
            if not data:
                return
        elif size > _REQUEST_HEAD_SIZE:
            # One whole request like others before: most are, and this is all that they need.
            size_inside, key, correlation_id = _request_head(data)
            known_key, leave, heads, known_size, route = self._known
            if (
                key == known_key
                and size_inside == size - 4
                and size >= known_size
                and arrived <= leave.until
                and data.startswith(heads, _REQUEST_HEAD_SIZE)
                and self.session.state is _SERVING
            ):
                pending = self._pending
                pending.append((correlation_id, route, arrived, route.on_response, None))
                route.requests += 1
                self._upstream.send(data)
                if len(pending) > self._in_flight_max:
                    self.throttle()
                if route.requests % PROXY_TIME_EACH == 1:
                    route.proxy_time.observe(monotonic() - arrived)
                return
        if self.session.state is _SERVING:
            self._take(data, arrived)

    def _continued(self, data: bytes) -> bytes:
        """Take in what belongs to a frame that has begun before. Returns what begins with a frame, b"" for nothing."""
        rest = self._streaming
        if rest:
            size = len(data)
            if self._writing and monotonic() > self._gateway.vouches_until():
                self.session.close("lease lost in mid-write")
                return b""
            if size < rest:
                self._streaming = rest - size
                self._upstream.send(data)
                return b""
            self._streaming = 0
            self._upstream.send(data if size == rest else data[:rest])
            self.session.frame_ended()
            if size == rest:
                return b""
            data = data[rest:]
        if self._partial is not None:
            self._partial += data
            if len(self._partial) < self._wanted:
                if self._holds:  # uvloop starts to read behind connection_made, whatever that said
                    self._transport.pause_reading()
                return b""
            data = bytes(self._partial)
            self._partial = None
        return data

    def _take(self, data: bytes, arrived: float) -> None:
        """Requests, from the first byte of one on."""
        try:
            self._requests(data, arrived)
        except MalformedFrame as error:
            self.session.fault("malformed request", str(error))

    def _requests(self, data: bytes, arrived: float) -> None:
        routes = self._routes
        pending = self._pending
        available = len(data)
        start = position = 0  # data[start:position] is to be forwarded and not written yet
        wanted = 0
        route: Route | None = None
        known_key, leave, heads, known_size, _ = self._known
        while available - position >= _REQUEST_HEAD_SIZE:
            size, key, correlation_id = _request_head(data, position)
            route = routes.get(key)
            if route is None:
                route = self._gateway.unknown_route(key)
            if not _SMALLEST_REQUEST <= size <= self._gateway.frame_bytes_max:
                oversized = size > self._gateway.frame_bytes_max
                self.session.fault("oversized request" if oversized else "malformed request", f"{size} bytes")
                return
            end = position + 4 + size
            acks = 1
            if route.looked_at and not (
                key == known_key
                and size >= known_size
                and arrived <= leave.until
                and data.startswith(heads, position + _REQUEST_HEAD_SIZE)
            ):
                if route.acks is not None:
                    try:
                        acks = route.acks(data, position)
                    except NeedMore:
                        wanted = min(2 * (available - position), 4 + size)
                        break
                given: Leave | None = self._gateway.leave
                if route.on_request is not None:
                    whole = end <= available
                    if route.whole and not whole:
                        if size > WHOLE_FRAME_BYTES_MAX:
                            self.session.fault("oversized request", f"{route.api} of {size} bytes")
                            return
                        wanted = 4 + size
                        break
                    frame = data if position == 0 and end >= available else data[position:end]
                    try:
                        verdict, given = self._verdict(route, frame, whole, correlation_id, arrived)
                    except MalformedFrame:
                        raise
                    except Exception as error:
                        self.session.hook_failed(route, error)
                        return
                    if verdict is not None:
                        if not whole and not isinstance(verdict, Close):  # asked again when all is there
                            _drop(verdict)
                            wanted = 4 + size
                            break
                        if start < position:
                            self._upstream.send(data[start:position])
                        route.requests += 1
                        route.decoded += 1
                        start = position = end
                        if not self._act(verdict, route, correlation_id, acks == 0, arrived, frame, data[end:]):
                            return
                        known_key, leave, heads, known_size, _ = self._known
                        continue
                    route.decoded += 1
                if acks and given is not None:
                    self._know(route, key, given, data, position)
                known_key, leave, heads, known_size, _ = self._known
            route.requests += 1
            if acks:
                pending.append((correlation_id, route, arrived, route.on_response, None))
            else:
                self.session.acks0_behind = len(pending)
            if end > available:
                self._streaming = end - available
                self._writing = route.is_write
                position = available
            else:
                position = end
        if start < position:
            self._upstream.send(data if position - start == available else data[start:position])
        if position < available:
            self._keep(data[position:], wanted or _REQUEST_HEAD_SIZE)
        if len(pending) > self._gateway.in_flight_max:
            self.throttle()
        if route is not None and route.requests % PROXY_TIME_EACH == 1:
            route.proxy_time.observe(monotonic() - arrived)

    def _nothing_known(self) -> tuple[int, Leave, tuple[bytes, ...], int, Route]:
        return -1, _NO_LEAVE, (), 0, self._gateway.fence_route

    def forget(self) -> None:
        """There is another table of routes."""
        self._known = self._nothing_known()

    def _know(self, route: Route, key: int, leave: Leave, data: bytes, position: int) -> None:
        """Remember what leave was given for, to recognise the next such request by its first bytes."""
        known_key, known_leave, heads, size, _ = self._known
        if key != known_key or leave is not known_leave:
            heads, size = (), 0
        if route.head_end is None or len(heads) == KNOWN_HEADS_MAX:
            return
        end = route.head_end(data, position)
        if end is None or end - position > KNOWN_HEAD_BYTES_MAX:
            return
        head = data[position + _REQUEST_HEAD_SIZE : end]
        self._known = (key, leave, (*heads, head), max(size, end - position - 4), route)

    def _verdict(
        self, route: Route, frame: bytes, whole: bool, correlation_id: int, arrived: float
    ) -> tuple[Verdict, Leave | None]:
        """Ask the hooks of a route: the verdict, and the leave that they gave. Raises what they raise."""
        assert route.on_request is not None
        request = self._request
        if request is None:
            client = self.session.client
            request = Request(frame, whole, route.api_key, route.version, correlation_id, arrived, client)
            self._request = request
        else:
            request.frame = frame
            request.whole = whole
            request.api_key = route.api_key
            request.version = route.version
            request.correlation_id = correlation_id
            request.now = arrived
            request.leave = None
        verdict = route.on_request(request)
        if verdict is None:
            request.frame = b""  # an idle connection keeps no frame
        else:
            self._request = None
            if verdict is NEED_MORE and whole:
                raise RuntimeError("a hook wants more than the whole frame")
        return verdict, request.leave

    def _act(
        self,
        verdict: Verdict,
        route: Route,
        correlation_id: int,
        acks0: bool,
        arrived: float,
        frame: bytes,
        rest: bytes,
    ) -> bool:
        """Carry out a verdict on ``frame``. False: nothing may be read now, ``rest`` is taken care of."""
        if verdict is None or verdict is NEED_MORE:
            verdict = Replace(frame)
        if isinstance(verdict, Hold):
            self._held = True
            self.hold_reading()
            self._gateway.tasks.start(
                f"session-{self.session.client.session_id}-hold",
                self._held_until(verdict, route, correlation_id, acks0, frame, rest),
            )
            return False
        if isinstance(verdict, Close):
            if verdict.forward:
                self.session.acks0_behind = len(self._pending)
                self._upstream.send(verdict.forward)
                self.session.refuse(verdict.reason)
            else:
                self.session.fault("refused", verdict.reason)
            return False
        if isinstance(verdict, Answer):
            self._gateway.refused(verdict.cause)
            if not acks0:
                self._upstream.own_answer((correlation_id, route, arrived, None, verdict.frame))
            return True
        if verdict.cause:
            self._gateway.refused(verdict.cause)
        if acks0:
            self.session.acks0_behind = len(self._pending)
        else:
            on_response = _chain(verdict.on_response, route.on_response)
            self._pending.append((correlation_id, route, arrived, on_response, None))
        self._upstream.send(verdict.frame)
        return True

    async def _held_until(
        self, hold: Hold, route: Route, correlation_id: int, acks0: bool, frame: bytes, rest: bytes
    ) -> None:
        verdict: Verdict = hold
        try:
            while isinstance(verdict, Hold):
                verdict = await verdict.verdict
        except Exception as error:
            self.session.hook_failed(route, error)
            return
        self._held = False
        if self.session.state in (SessionState.CLOSED, SessionState.SETTLING):
            return
        if not self._act(verdict, route, correlation_id, acks0, monotonic(), frame, rest):
            return
        if rest and self.session.state is _SERVING:
            self._take(rest, monotonic())
        self.release_reading()
        self.session.answered()

    def throttle(self) -> None:
        """Too many requests in flight: read on when half of them have been answered."""
        if not self.throttled:
            self.throttled = True
            self.hold_reading()

    def unthrottle(self) -> None:
        self.throttled = False
        self.release_reading()


def _drop(verdict: Verdict) -> None:
    """A hook's verdict on a part of a frame does not count; a coroutine in it must not complain."""
    if isinstance(verdict, Hold) and isinstance(verdict.verdict, Coroutine):
        verdict.verdict.close()


def _chain(first: ResponseHook | None, second: ResponseHook | None) -> ResponseHook | None:
    if first is None or second is None:
        return first or second
    return lambda frame: passed_on(second, first(frame))
