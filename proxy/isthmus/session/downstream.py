"""The client's connection: takes its requests to hooks and to the broker. Of the hot path (see ``session``)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from isthmus.session.deciding import BYTES_AT_ONCE, ELEMENTS_AT_ONCE, NOT_BEGUN, PRODUCE_ELEMENTS_AT_ONCE, told_aside
from isthmus.session.dispatch import PROXY_TIME_EACH
from isthmus.session.gated_answers import GatedAnswers
from isthmus.session.peer import WRITE_HIGH_WATER_BYTES, Peer
from isthmus.session.queued_bytes import UNCOUNTED_BYTES
from isthmus.session.refused_produce import RefusedProduce, has_few_partitions
from isthmus.session.session import AUTHENTICATING, SERVING, SessionState
from isthmus.session.tapped_produce import TappedProduces
from isthmus_plugins.api import (
    NEED_MORE,
    TAP_BYTES,
    TAP_REQUEST,
    WITHOUT_RECORDS,
    Answer,
    Ask,
    Close,
    Gate,
    Hold,
    Leave,
    Replace,
    Request,
    ResponseHook,
    Tap,
    Verdict,
    in_turn,
)
from isthmus_plugins.aside import ANSWER_BYTES_AT_ONCE
from isthmus_plugins.clock import monotonic
from isthmus_protocol.elements import TooManyElements, at_most
from isthmus_protocol.wire import MalformedFrame, NeedMore

if TYPE_CHECKING:
    from isthmus.session.dispatch import Route
    from isthmus.session.listener import Gateway, Listener
    from isthmus.session.upstream import Upstream

_request_head: Final = struct.Struct(">iIi").unpack_from
"""Size, API key and version as one number, correlation id."""
_REQUEST_HEAD_SIZE: Final = 12
_SMALLEST_REQUEST: Final = 10
"""Key, version, correlation id and a client id's length; what follows the size."""
WHOLE_FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a request that hooks see as a whole: many thousand topics. To put it together takes 3 ms."""
PRODUCE_HEAD_BYTES_MAX: Final = 64 * 1024
"""So much of a Produce is kept to find its acks, behind the header's tags and the transactional id."""
KNOWN_HEADS_MAX: Final = 8
"""Topics of a connection whose Produce requests are recognised by their first bytes."""
KNOWN_HEAD_BYTES_MAX: Final = 1024
_WAITS: Final = -1
"""In the place of bytes that are counted: there is no room for them yet."""
_NO_LEAVE: Final = Leave(float("-inf"))
Known: TypeAlias = "tuple[int, Leave, tuple[bytes, ...], int, Route]"
"""Route key, leave, the heads of frames that it covers, the least size of a frame that holds them, route."""
_LATE: Final = "client gone, lease lost"
_ESTABLISHED: Final = 1
"""The kernel's TCP_ESTABLISHED, the first byte of its tcp_info."""
_UNTIL_SERVED: Final = 1 << 62
"""More bytes than come: nothing is looked at before the broker's connection is there."""


def nothing_known(route: Route) -> Known:
    """No leave is known; ``route`` is there for its type. One for all connections."""
    return -1, _NO_LEAVE, (), 0, route


def _unheard(data: bytes) -> None:
    """Takes the place of ``send`` of a client that is gone."""


class Downstream(Peer):
    """The client's connection: requests arrive here."""

    __slots__ = (
        "_counted",
        "_frame_timer",
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
        "_produces",
        "_refused",
        "_request",
        "_room",
        "_routes",
        "_scanning",
        "_session_id",
        "_since",
        "_upstream",
        "_writing",
        "address",
        "throttled",
    )

    _upstream: Upstream

    def __init__(self, gateway: Gateway, listener: Listener) -> None:
        super().__init__()
        self.address = ""
        """The client's, ``host:port``."""
        self._gateway = gateway
        self._listener = listener
        self._routes = gateway.routes
        self._holds = 1
        """Reasons not to read: connecting, a slow broker or client, too many in flight, a held request."""
        self._held = False
        self._since = NOT_BEGUN
        """When the decision about the request that is held was begun."""
        self._writing = False
        """What is streaming is a write: it ends where the proxy may not vouch for it any more."""
        self._request: Request | None = None
        """What hooks are asked about, used again while no hook has kept it: one that wants nothing has not."""
        self._known = gateway.nothing_known
        self._in_flight_max = gateway.in_flight_max
        self.throttled = False
        self._produces: TappedProduces | None = None
        """Made when a tap is to note partitions."""
        self._scanning = False
        """The rest of what is streaming goes there."""
        self._full = 0
        """Reasons not to read answers: the client does not read them, too much waits behind a gate."""
        self._gated: GatedAnswers | None = None
        """Answers that wait at gates, and behind them; None where there are none."""
        self._gated_full = False
        self._counted = 0
        """Bytes of the frame that is kept, or held, as far as the process was asked for them."""
        self._room = gateway.strangers_bytes
        """Out of which what is kept is counted: strangers' until the client has authenticated."""
        self._refused: RefusedProduce | None = None
        """What comes of a Produce that is refused; ``_partial`` is there, and stays empty."""
        self._frame_timer: asyncio.TimerHandle | None = None
        """How long the frame that is kept may take to be whole."""

    def comes_from(self, address: str) -> None:
        """Told before all else where the client is, which its socket does not know any more once it is gone."""
        self.address = address

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connected(transport)
        self._transport.pause_reading()
        self._keep(b"", _UNTIL_SERVED)
        self.session = self._listener.session_opened(self, self._transport)
        self._pending = self.session.pending
        self._session_id = self.session.client.session_id

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_no_more()
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
            self._gated = GatedAnswers(self._gateway.gates, self)
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

    def send_answers(self, data: bytes) -> None:
        """Answers whose turn has come: see :class:`~isthmus.session.gated_answers.Sender`."""
        self._transport.write(data)

    def gate_opened(self) -> None:
        if self._gated is not None and not len(self._gated):
            self._gated = None
            self.send = self._transport.write
        self._bound_gated()
        if self.throttled or self.session.state is not SERVING:
            self._upstream.answered()

    def gate_failed(self, route: Route, error: Exception) -> None:
        if isinstance(error, MalformedFrame):
            self.session.fault("malformed answer", str(error))
        else:
            self.session.hook_failed(route, error)

    def gate_passed(self, tap: Tap, answer: bytes) -> None:
        tap.sent(self._session_id, int.from_bytes(answer[4:8], "big", signed=True))

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

    def finish_sending(self) -> None:
        """Send the client, behind its answers, the end of them. What it still sends is read, for nobody."""
        self._partial = None
        self._keep_no_more()
        if self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
        else:  # TLS: what closes it goes on reading until the client closes, too
            super().finish()

    @property
    def unsent(self) -> int:
        """Bytes of answers that the client's socket has not taken."""
        return self._transport.get_write_buffer_size()

    def finish(self) -> None:
        self._keep_no_more()
        if self._gated is not None:
            self.hear_no_more()
        super().finish()

    def serve(self, upstream: Upstream) -> None:
        """The broker is connected: read requests."""
        self._upstream = upstream
        self.go_on()
        self.release_reading()

    def go_on(self) -> None:
        """Take what was kept."""
        if self._counted:
            self._uncount()
        if self.session.stranger is None:
            self._room = self._gateway.queued_bytes
        early, self._partial = self._partial, None
        if early and self.session.stranger is not None:
            self.session.stranger.take(bytes(early))
        elif early:
            self._take(bytes(early), monotonic())

    def keep(self, data: bytes, wanted: int) -> None:
        """Keep what a stranger has sent until so many bytes are there, or until :meth:`go_on`."""
        self._keep(data, wanted)
        if wanted > UNCOUNTED_BYTES:
            self._count(wanted, goes_on=False)

    def pass_on(self, frame: bytes, route: Route, correlation_id: int, on_response: ResponseHook | None) -> None:
        """Forward a request of a stranger's, which no hook sees."""
        arrived = monotonic()
        route.requests += 1
        if route.tap is not None:
            self._note(route, arrived, frame[:TAP_BYTES])
        self._pending.append((correlation_id, route, arrived, on_response, None))
        self._upstream.send(frame)

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
        if self._holds == 0 and self.session.state in (AUTHENTICATING, SERVING, SessionState.DRAINING):
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
                and self.session.state is SERVING
                and (on_response := self._looking(leave, route, data, arrived) if leave.answers else route.on_response)
                is not _ask
            ):
                pending = self._pending
                pending.append((correlation_id, route, arrived, on_response, None))
                route.requests += 1
                note = route.note
                if note is None:
                    self._upstream.send(data)
                elif size <= TAP_BYTES:
                    self._upstream.send(data)
                    note((TAP_REQUEST, self._session_id, arrived, monotonic(), known_key, data))
                else:
                    note((TAP_REQUEST, self._session_id, arrived, monotonic(), known_key, data[:TAP_BYTES]))
                    taken = self._scan(route, correlation_id, arrived, data, 0, size)
                    self._upstream.send(data if taken == size else data[:taken])
                    if taken < size:
                        self._streaming = size - taken
                        self._writing = route.is_write
                        self._take_later(data[taken:])
                if len(pending) > self._in_flight_max:
                    self.throttle()
                if route.requests % PROXY_TIME_EACH == 1:
                    route.proxy_time.observe(monotonic() - arrived)
                return
        if self.session.state is SERVING:
            self._take(data, arrived)
        elif self.session.stranger is not None:
            if self._counted:
                self._uncount()
            self.session.stranger.take(data)

    def _take_later(self, data: bytes) -> None:
        """Take the rest of what has come when the loop has done other things. It begins within a frame."""
        self.hold_reading()
        asyncio.get_running_loop().call_soon(self._take_now, data)

    def _take_now(self, data: bytes) -> None:
        try:
            if self.session.state in (SERVING, SessionState.DRAINING):
                data = self._continued(data)
                if data and self.session.state is SERVING:
                    self._take(data, monotonic())
        except Exception:  # as where the event loop hands on what has come: what is left of it is gone
            self.session.close("the proxy could not go on")
            raise
        finally:
            self.release_reading()

    def _continued(self, data: bytes) -> bytes:
        """Take in what belongs to a frame that has begun before. Returns what begins with a frame, b"" for nothing."""
        rest = self._streaming
        if rest:
            size = len(data)
            if self._writing and monotonic() > self._gateway.vouches_until():
                self.session.close("lease lost in mid-write")
                return b""
            if self._scanning:
                assert self._produces is not None
                taken = self._produces.feed(data if size <= rest else data[:rest])
                self._scanning = self._produces.wants_more and taken < rest
                if taken < min(size, rest):
                    self._streaming = rest - taken
                    self._upstream.send(data[:taken])
                    self._take_later(data[taken:])
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
            if self._refused is not None:
                return self._thrown_away(self._refused, data)
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
            self._malformed(error)

    def _malformed(self, error: MalformedFrame) -> None:
        cause = "oversized request" if isinstance(error, TooManyElements) else "malformed request"
        self.session.fault(cause, str(error))

    def _undecided(self, route: Route, error: Exception) -> None:
        """Hooks raised where a request was held."""
        if isinstance(error, MalformedFrame):
            self._malformed(error)
        else:
            self.session.hook_failed(route, error)

    def _requests(self, data: bytes, arrived: float) -> None:
        if self._counted:
            self._uncount()
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
            if route.is_write and route.acks is None and self._comes_late(arrived):
                self.session.close(_LATE)
                return
            end = position + 4 + size
            acks = 1
            on_response = route.on_response
            known = (
                key == known_key
                and size >= known_size
                and arrived <= leave.until
                and data.startswith(heads, position + _REQUEST_HEAD_SIZE)
            )
            if known and leave.answers is not None:
                looking = self._looking(leave, route, data[position:end], arrived) if end <= available else _ask
                if self.session.state is SessionState.CLOSED:
                    return
                known = looking is not _ask
                on_response = looking
            if route.looked_at and not known:
                on_response = route.on_response
                if route.acks is not None:
                    try:
                        acks = route.acks(data, position)
                    except NeedMore:
                        if available - position >= PRODUCE_HEAD_BYTES_MAX:
                            self.session.fault("oversized request", f"{route.api} whose acks come late")
                            return
                        wanted = min(2 * (available - position), 4 + size, PRODUCE_HEAD_BYTES_MAX)
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
                        if verdict is WITHOUT_RECORDS and _may_be_thrown_away(route, data, position):
                            if start < position:
                                self._upstream.send(data[start:position])
                            self._throw_away(route, correlation_id, 4 + size, data[position:])
                            return
                        if not whole and not isinstance(verdict, Close):  # asked again when all is there
                            _drop(verdict)
                            wanted = 4 + size
                            break
                        if start < position:
                            self._upstream.send(data[start:position])
                        route.requests += 1
                        route.decoded += 1
                        rest = data[end:]
                        if acks and given is not None and given.answers is not None and isinstance(verdict, Replace):
                            self._know(route, key, given, data, position)
                        start = position = end
                        if not self._act(verdict, route, correlation_id, acks == 0, arrived, frame, rest, arrived):
                            return
                        known_key, leave, heads, known_size, _ = self._known
                        continue
                    route.decoded += 1
                if acks and given is not None:
                    self._know(route, key, given, data, position)
                known_key, leave, heads, known_size, _ = self._known
            route.requests += 1
            here = end if end < available else available
            if route.tap is not None:
                self._note(route, arrived, data[position : min(end, position + TAP_BYTES)])
                if size > TAP_BYTES and route.acks is not None:
                    here = position + self._scan(route, correlation_id, arrived, data, position, end)
            if acks:
                pending.append((correlation_id, route, arrived, on_response, None))
            else:
                self.session.acks0_behind = len(pending)
            position = here
            if here < end:
                self._streaming = end - here
                self._writing = route.is_write
                break
        if start < position:
            self._upstream.send(data if position - start == available else data[start:position])
        if self._streaming and position < available:
            self._take_later(data[position:])
        elif position < available:
            self._keep(data[position:], wanted or _REQUEST_HEAD_SIZE)
        if wanted > UNCOUNTED_BYTES:
            self._count(wanted, goes_on=position == 0)
        elif self._frame_timer is not None:
            self._stop_frame_timer()
        if len(pending) > self._gateway.in_flight_max:
            self.throttle()
        if route is not None and route.requests % PROXY_TIME_EACH == 1:
            route.proxy_time.observe(monotonic() - arrived)

    # ---- a Produce that is refused by its head ----

    def _throw_away(self, route: Route, correlation_id: int, size: int, data: bytes) -> None:
        """Keep nothing of a frame that begins with this but what its refusal needs."""
        elements_max = self._gateway.limits.request_elements_max
        self._refused = RefusedProduce(route.version, correlation_id, size, elements_max)
        self._keep(b"", 0)
        self._thrown_away(self._refused, data)

    def _thrown_away(self, refused: RefusedProduce, data: bytes) -> bytes:
        """Take in what belongs to it. Returns what begins with a frame, b"" for nothing."""
        try:
            frame, rest = refused.feed(data)
            if frame is None:
                return b""
            self._partial = self._refused = None
            return rest if self._refuse(frame, rest) else b""
        except MalformedFrame as error:
            self._malformed(error)
            return b""

    def _refuse(self, frame: bytes, rest: bytes) -> bool:
        """Answer a Produce whose records are gone. False: nothing may be read now, ``rest`` is taken care of."""
        _, key, correlation_id = _request_head(frame)
        route, arrived = self._routes[key], monotonic()
        assert route.acks is not None
        acks0 = route.acks(frame) == 0
        try:
            verdict, _ = self._verdict(route, frame, True, correlation_id, arrived)
        except Exception as error:
            self.session.hook_failed(route, error)
            return False
        route.requests += 1
        route.decoded += 1
        return self._act(_refused_still(verdict), route, correlation_id, acks0, arrived, frame, rest, arrived)

    # ---- frames that are kept until they are whole ----

    def _count(self, size: int, goes_on: bool) -> None:
        """Ask for room for the frame that is kept. ``goes_on``: it was kept before, and not as much of it."""
        if not goes_on:
            self._stop_frame_timer()
        if self._room.ask(self, size, self._granted):
            self._may_keep(size)
        else:
            self._counted = _WAITS
            self.hold_reading()

    def _granted(self) -> None:
        """There is room now."""
        self._may_keep(self._wanted)
        self.release_reading()

    def _may_keep(self, size: int) -> None:
        self._counted = size
        if self._frame_timer is None:
            timeout_s = self._gateway.limits.frame_timeout_s
            self._frame_timer = asyncio.get_running_loop().call_later(timeout_s, self._frame_late)

    def _frame_late(self) -> None:
        self._frame_timer = None
        if self._holds and self._full == self._gated_full:  # it is not read, and not because the client reads nothing
            self._may_keep(self._counted)
            return
        kept = 0 if self._partial is None else len(self._partial)
        self.session.fault("unfinished request", f"{kept} of {self._wanted} bytes came in time")

    def _stop_frame_timer(self) -> None:
        if self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None

    def _uncount(self) -> None:
        counted, self._counted = self._counted, 0
        if counted != _WAITS:
            self._room.give_back(counted)
        elif self._room.forget(self):  # what was read already made the frame whole
            self.release_reading()

    def _keep_no_more(self) -> None:
        """The connection ends: whoever waits for room has it."""
        self._refused = None
        self._stop_frame_timer()
        self._room.forget(self)
        if self._counted:
            self._uncount()

    def _note(self, route: Route, arrived: float, frame: bytes) -> None:
        assert route.note is not None
        route.note((TAP_REQUEST, self._session_id, arrived, monotonic(), route.key, frame[:TAP_BYTES]))

    def _scan(self, route: Route, correlation_id: int, arrived: float, data: bytes, start: int, end: int) -> int:
        """Note all partitions of a Produce request that is larger than what was noted; now, or when it is whole.

        How many of its bytes may be forwarded in this step of the loop."""
        assert route.tap is not None
        produces = self._produces or self._tapped_produces()
        taken = produces.begin(route.tap, route.key, correlation_id, arrived, data, start, end)
        self._scanning = produces.wants_more and taken < end - start
        return taken

    def _tapped_produces(self) -> TappedProduces:
        if self._produces is None:
            self._produces = TappedProduces(self._session_id, self._gateway.limits.request_elements_max)
        return self._produces

    def forget(self) -> None:
        """There is another table of routes."""
        self._known = self._gateway.nothing_known

    def _know(self, route: Route, key: int, leave: Leave, data: bytes, position: int) -> None:
        """Remember what leave was given for, to recognise the next such request by its first bytes."""
        known_key, known_leave, heads, size, _ = self._known
        if key != known_key or leave is not known_leave:
            if leave.answers is not None and known_leave.answers is None and monotonic() <= known_leave.until:
                return  # that saves more
            heads, size = (), 0
        if route.head_end is None or len(heads) == KNOWN_HEADS_MAX:
            return
        try:
            end = route.head_end(data, position)
        except NeedMore:
            return
        if end is None or end - position > KNOWN_HEAD_BYTES_MAX:
            return
        head = data[position + _REQUEST_HEAD_SIZE : end]
        self._known = (key, leave, (*heads, head), max(size, end - position - 4), route)

    def _looking(self, leave: Leave, route: Route, frame: bytes, arrived: float) -> ResponseHook | None:
        """What sees the answer to a request that a leave covers; ``_ask``: ask hooks, unless it has ended."""
        assert leave.answers is not None
        try:
            first = leave.answers(frame, arrived)
        except MalformedFrame as error:
            self.session.fault("malformed request", str(error))
            return _ask
        except Exception as error:
            self.session.hook_failed(route, error)
            return _ask
        if first is None:
            return _ask
        route.decoded += 1
        return in_turn(first, route.on_response)

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
        # An element takes a byte at least.
        few = ELEMENTS_AT_ONCE if route.pure else self._gateway.deciding.elements_max
        verdict = route.on_request(request) if len(frame) <= few else self._decided(route, request)
        if verdict is None:
            request.frame = b""  # an idle connection keeps no frame
        else:
            self._request = None
            if whole and (verdict is NEED_MORE or verdict is WITHOUT_RECORDS):
                raise RuntimeError("a hook wants more than the whole frame")
        return verdict, request.leave

    def _decided(self, route: Route, request: Request) -> Verdict:
        """The verdict on a request that may have many elements: in a thread, if it has."""
        assert route.on_request is not None
        deciding = self._gateway.deciding
        if not route.pure:
            return deciding.ask(route, request)
        if route.acks is not None:  # most bytes of a Produce are records, which hooks skip
            bound = at_most(PRODUCE_ELEMENTS_AT_ONCE, each=True, aside=deciding.elements_max)
            with contextlib.suppress(TooManyElements), bound:
                return route.on_request(request)
        elif len(request.frame) <= BYTES_AT_ONCE:
            with contextlib.suppress(TooManyElements), at_most(ELEMENTS_AT_ONCE):
                return route.on_request(request)
        if not request.whole:
            return NEED_MORE
        request.leave = None
        return Hold(deciding.verdict(route, request))

    def _act(
        self,
        verdict: Verdict,
        route: Route,
        correlation_id: int,
        acks0: bool,
        arrived: float,
        frame: bytes,
        rest: bytes,
        came: float,
    ) -> bool:
        """Carry out a verdict on ``frame``. False: nothing may be read now, ``rest`` is taken care of.

        ``came``: when it had arrived; ``arrived``: that, or when it was no longer held.
        """
        if verdict is None or verdict is NEED_MORE or verdict is WITHOUT_RECORDS:
            verdict = Replace(frame)
        if route.tap is not None and not isinstance(verdict, Hold | Ask):
            self._note(route, came, frame)
            if len(frame) > TAP_BYTES and route.acks is not None:
                self._tapped_produces().take_whole(route.tap, route.key, correlation_id, came, frame)
        if isinstance(verdict, Hold | Ask):
            if not self._held:
                self._held = True
                self._since = self._gateway.deciding.since()
            self.hold_reading()
            self._counted = len(frame)
            self._room.take(self._counted)
            if isinstance(verdict, Hold):
                held = self._held_until(verdict, route, correlation_id, acks0, frame, rest, came)
                self._gateway.tasks.start("hold", held)
            else:
                told = partial(self._told, verdict, route, correlation_id, acks0, frame, rest, came)
                self.session.ask(partial(_later, told), verdict.frame)
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
            on_response = in_turn(verdict.on_response, route.on_response)
            self._pending.append((correlation_id, route, arrived, on_response, None))
        self._upstream.send(verdict.frame)
        return True

    async def _held_until(
        self, hold: Hold, route: Route, correlation_id: int, acks0: bool, frame: bytes, rest: bytes, came: float
    ) -> None:
        verdict: Verdict = hold
        try:
            while isinstance(verdict, Hold):
                verdict = await verdict.verdict
            if (
                len(frame) > TAP_BYTES
                and route.acks is not None
                and route.tap is not None
                and route.tap.wants_parts(self._session_id, came, correlation_id)
            ):
                await self._tapped_produces().look_ahead(route.version, frame)
        except Exception as error:
            self._undecided(route, error)
            return
        self._go_on_with(verdict, route, correlation_id, acks0, frame, rest, came)

    def _told(
        self,
        ask: Ask,
        route: Route,
        correlation_id: int,
        acks0: bool,
        frame: bytes,
        rest: bytes,
        came: float,
        answer: bytes,
    ) -> None:
        """The broker has answered what a hook had it asked."""
        if self.session.state in (SessionState.CLOSED, SessionState.SETTLING):
            return
        verdict: Verdict
        try:
            if len(answer) > ANSWER_BYTES_AT_ONCE:
                verdict = Hold(told_aside(ask, answer))
            else:
                verdict = ask.then(ask.read(answer))
        except Exception as error:
            self.session.hook_failed(route, error)
            return
        self._go_on_with(verdict, route, correlation_id, acks0, frame, rest, came)

    def _go_on_with(
        self, verdict: Verdict, route: Route, correlation_id: int, acks0: bool, frame: bytes, rest: bytes, came: float
    ) -> None:
        """Carry out the verdict on a request that was held. Nothing happens between the two, no fence either."""
        if self.session.state in (SessionState.CLOSED, SessionState.SETTLING):
            self._held = False
            return
        if not isinstance(verdict, Hold | Ask):
            self._held = False
            forwards = not isinstance(verdict, Answer | Close)
            if forwards and route.is_write and self._comes_late(monotonic()):
                self.session.close(_LATE)
                return
            if forwards and route.is_write and self._gateway.deciding.overtaken(self._since):
                try:
                    verdict, _ = self._verdict(route, frame, True, correlation_id, monotonic())
                except Exception as error:
                    self._undecided(route, error)
                    return
        self._uncount()
        if self._act(verdict, route, correlation_id, acks0, monotonic(), frame, rest, came):
            if rest and self.session.state is SERVING:
                self._take(rest, monotonic())
        elif not self._held:  # closed
            return
        self.release_reading()
        self.session.answered()

    def _comes_late(self, now: float) -> bool:
        """Whether a client may have sent a write again elsewhere, and have gone on: it has closed the connection, and
        another proxy may have this one's place since. What ends a transaction would end the next one then."""
        return now > self._gateway.vouches_until() and _closed_by_client(self._transport)

    def throttle(self) -> None:
        """Too many requests in flight: read on when half of them have been answered."""
        if not self.throttled:
            self.throttled = True
            self.hold_reading()

    def unthrottle(self) -> None:
        self.throttled = False
        self.release_reading()


def _closed_by_client(transport: asyncio.Transport) -> bool:
    """Whether all that comes has come: the loop, which reads what comes before that first, may not know it yet."""
    sock = transport.get_extra_info("socket")
    if sock is None or transport.is_closing():
        return True
    return int(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]) != _ESTABLISHED


def _drop(verdict: Verdict) -> None:
    """A hook's verdict on a part of a frame does not count; a coroutine in it must not complain."""
    if isinstance(verdict, Hold) and isinstance(verdict.verdict, Coroutine):
        verdict.verdict.close()


def _may_be_thrown_away(route: Route, data: bytes, position: int) -> bool:
    """Whether so few partitions are in a Produce of which this has the first bytes. Others are kept for the thread."""
    assert route.head_end is not None
    try:
        end = route.head_end(data, position)
    except NeedMore:
        return False
    return end is not None and has_few_partitions(route.version, data, end)


def _refused_still(verdict: Verdict) -> Verdict:
    """What becomes of a Produce whose records are gone: it goes back, or nowhere."""
    if isinstance(verdict, Answer):
        return verdict
    if isinstance(verdict, Close):
        return Close(verdict.reason)
    if isinstance(verdict, Hold):
        return Hold(_refused_later(verdict))
    if isinstance(verdict, Ask):
        then = verdict.then
        return replace(verdict, then=lambda told: _refused_still(then(told)))
    return Close("what was refused may be written now: the producer sends it again")


async def _refused_later(hold: Hold) -> Verdict:
    return _refused_still(await hold.verdict)


def _later(told: Callable[[bytes], None], answer: bytes) -> bytes:
    """Have an answer looked at when those that have come with it are taken."""
    asyncio.get_running_loop().call_soon(told, answer)
    return answer


def _ask(frame: bytes) -> bytes:
    """Stands for no hook: the hooks of the route must be asked about a request."""
    raise AssertionError("an answer to a request that no hook was asked about")
