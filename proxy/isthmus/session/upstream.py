"""The connection to the broker: takes its answers to the client, in their order. Of the hot path (see ``session``)."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final

from isthmus.session.dispatch import PROXY_TIME_EACH
from isthmus.session.peer import Peer
from isthmus.session.session import NO_ACKS0, SERVING, Pending, Session, SessionState
from isthmus.session.tapped_answer import TappedAnswers
from isthmus_plugins.api import TAP_ANSWER, TAP_BYTES, TAP_GATED, TAP_HEAD, TAP_OWN_ANSWER, Gate
from isthmus_plugins.clock import monotonic
from isthmus_protocol.wire import MalformedFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus.session.dispatch import ResponseStream, Route
    from isthmus.session.endpoint import Endpoint

_response_head: Final = struct.Struct(">ii").unpack_from
_RESPONSE_HEAD_SIZE: Final = 8
_SIZE: Final = 4
_NO_FRAME: Final = -4
"""Size of an answer that is not there yet."""


class Upstream(Peer):
    """The connection to the broker: answers arrive here."""

    __slots__ = (
        "_answers",
        "_behind",
        "_downstream",
        "_frame_bytes_max",
        "_gateway",
        "_on_message",
        "_opaque",
        "_paused",
        "_pending",
        "_session_id",
        "_stream",
        "_tapped",
        "lost",
        "target",
    )

    def __init__(self, session: Session, target: Endpoint) -> None:
        super().__init__()
        self.session = session
        self.target = target
        self.lost = False
        """The connection has ended."""
        self._session_id = session.client.session_id
        self._gateway = session.gateway
        self._frame_bytes_max = session.gateway.frame_bytes_max
        self._downstream = session.downstream
        self._pending = session.pending
        self._stream: ResponseStream | None = None
        self._answers: TappedAnswers | None = None
        """Made when a tap is to note partitions, or more of an answer than has come."""
        self._tapped: TappedAnswers | None = None
        """The same, while bytes that come are for it first."""
        self._behind: bytes | None = None
        """What has come, and is to be taken when the loop has done other things. ``_tapped`` is there then."""
        self._paused = False
        """The client does not read, or too much waits for it."""
        self._opaque = 0
        """How many of the bytes that are streaming are sent on without ``_stream``."""
        self._on_message: Callable[[bytes], None] | None = None
        """What comes are messages of SASL with nothing but their size around them, and this is given each."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connected(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        session = self.session
        if session.upstream is not self:  # not yet, or the session has ended before
            return
        session.release_fences()
        session.broker_lost(repr(exc) if exc else "")
        session.leg_lost(self)

    def unlink(self) -> None:
        """Let go of the other parts of the session."""
        del self.session, self._downstream
        self._on_message = None

    def pause_writing(self) -> None:
        self._downstream.hold_reading()

    def resume_writing(self) -> None:
        self._downstream.release_reading()

    def pause_reading(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if self._behind is None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        size = len(data)
        self._gateway.bytes_from_brokers += size
        if self._tapped is not None:
            data = self._tapped_first(self._tapped, data)
            if not data:
                return
            size = len(data)
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

    # ---- what a tap wants to know more of ----

    def _tapped_first(self, tapped: TappedAnswers, data: bytes) -> bytes:
        """Have the tap told of the next bytes of what is streaming. Returns as many of them as may go on."""
        if self._behind is not None:  # something was read all the same
            self._behind += data
            return b""
        taken = tapped.feed(data)
        if taken < len(data):
            self._take_later(data[taken:])
            return data[:taken]
        if not tapped.wants_more:
            self._tapped = None
        return data

    def _take_later(self, data: bytes) -> None:
        """Take the rest of what has come when the loop has done other things. It begins within what is streaming, or
        with a frame that :meth:`_looked_ahead` was not through with."""
        self._behind, self._tapped = data, self._answers
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._take_now)

    def _take_now(self) -> None:
        data, self._behind = self._behind, None
        if self._ended():
            return
        assert data is not None
        assert self._answers is not None
        try:
            if not self._streaming:
                self._tapped = None
                self._answers.go_on()
                self._own_answers()
            if data:
                self._gateway.bytes_from_brokers -= len(data)  # they were counted
                self.data_received(data)
        except Exception:  # as where the event loop hands on what has come: what is left of it is gone
            self.session.close("the proxy could not go on")
            raise
        if self._behind is None and not self._ended():
            self.answered()
            if not self._paused:
                self._transport.resume_reading()

    def _ended(self) -> bool:
        return self.lost or self.session.state is SessionState.CLOSED

    def _looked_ahead(self, of: Route, correlation_id: int, forwarded: float, frame: bytes, at: float) -> bool:
        """Whether a tap knows all of an answer to Fetch that is there as a whole; if not, it is to be taken later."""
        if len(frame) <= TAP_BYTES:
            return True
        return self._tapped_answers().look_ahead(of, correlation_id, forwarded, frame, at)

    def _tapped_answers(self) -> TappedAnswers:
        if self._answers is None:
            self._answers = TappedAnswers(self._session_id)
        return self._answers

    # ---- frames ----

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
            if self._behind is not None:
                self._behind += data[rest:]
                return b""
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
            if self._on_message is not None:
                return self._messages(data)
        return data

    @property
    def headless(self) -> bool:
        """Whether what comes has no heads."""
        return self._on_message is not None

    def expect_messages(self, on_message: Callable[[bytes], None]) -> None:
        """What comes from now on are messages of SASL: each goes to the client, and then to this."""
        self._on_message = on_message
        self._keep(bytes(self._partial or b""), _SIZE)  # so that each chunk is looked at here

    def expect_heads(self) -> None:
        """What comes from now on are answers to requests again."""
        if self._on_message is not None:
            self._on_message = None
            if not self._partial:
                self._partial = None

    def _messages(self, data: bytes) -> bytes:
        """Take in whole messages. Returns what comes behind the last one, b"" for nothing."""
        while self._on_message is not None:
            end = _SIZE + int.from_bytes(data[:_SIZE], "big") if len(data) >= _SIZE else _SIZE
            if end > self._frame_bytes_max:
                self.session.fault("oversized answer", f"{end} bytes")
                return b""
            if len(data) < end:
                self._keep(data, end)
                return b""
            message, data = data[:end], data[end:]
            self._downstream.send(message)
            self._on_message(message[_SIZE:])
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
            noted = False
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
                if of.scans_answers and not self._looked_ahead(of, correlation_id, forwarded, frame, arrived):
                    self._take_later(data[position:])
                    available = position
                    break
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
                            noted = True
                            if of.tap is not None:  # before it may open
                                self._note(of, TAP_GATED, arrived, frame)
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
                stream = of.stream_response(size + 4)
                self._streaming = end - available
                if of.note is not None:
                    noted = True
                    self._note(of, TAP_ANSWER, arrived, data[position : position + of.tap_bytes])
                    available = self._note_more(of, correlation_id, forwarded, size, data, position, arrived)
                self._stream = stream
                send(self._streamed(data[position:available] if available - position < len(data) else data))
                start = end = available
                pending.popleft()
            note = of.note
            if note is not None and own is None and not noted:
                wanted = of.tap_bytes
                whole = end - position == available <= wanted
                first = data if whole else data[position : min(end, position + wanted)]
                note((TAP_ANSWER, self._session_id, arrived, monotonic(), of.key, first))
                if on_response is None and (size + 4 > TAP_BYTES or size + 4 > len(first)):
                    taken = self._note_more(of, correlation_id, forwarded, size, data, position, arrived)
                    if taken < end:
                        self._opaque = self._streaming
                        available = end = taken
            position = end
            route = of
            route.broker_time.observe(arrived - forwarded)
            if session.acks0_behind != NO_ACKS0:
                session.acks0_behind -= 1
            if pending and pending[0][4] and not self._streaming:
                if start < position:
                    send(data[start:position])
                    start = position
                self._own_answers()
                if session.state is SessionState.CLOSED:
                    return
                if self._behind is not None:
                    self._behind += data[position:available]
                    available = position
                send = self._downstream.send
        if start < position:
            send(data if position - start == len(data) else data[start:position])
        if position < available:
            rest = data[position:]
            wanted = _RESPONSE_HEAD_SIZE
            if len(rest) >= _RESPONSE_HEAD_SIZE:
                wanted = _response_head(rest)[0] + 4
            self._keep(rest, wanted)
        if session.state is not SERVING or self._downstream.throttled:
            self.answered()
        if route is not None and route.requests % PROXY_TIME_EACH == 1:
            route.proxy_time.observe(monotonic() - arrived)

    def _note(self, of: Route, kind: int, at: float, frame: bytes) -> None:
        assert of.note is not None
        of.note((kind, self._session_id, at, monotonic(), of.key, frame[: of.tap_bytes]))

    def _note_more(
        self, of: Route, correlation_id: int, forwarded: float, size: int, data: bytes, position: int, arrived: float
    ) -> int:
        """Have a tap know more of an answer of this size that streams through and begins at ``data[position]``.

        Where that ends of it which may go on now.
        """
        answers = self._tapped_answers()
        begun = data[position : position + 4 + size]
        taken = answers.begin(of, correlation_id, forwarded, size + 4, begun, arrived)
        end = position + taken
        if taken < len(begun):
            self._streaming += len(begun) - taken
            self._take_later(data[end:])
        elif answers.wants_more:
            self._tapped = answers
        return end

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
        at = 0.0
        while pending and (answer := pending[0][4]):
            correlation_id, route, forwarded, _, _ = pending[0]
            if route.scans_answers and not isinstance(answer, Gate):
                at = at or monotonic()
                if not self._looked_ahead(route, correlation_id, forwarded, answer, at):
                    self._take_later(b"")
                    return
            pending.popleft()
            if route.tap is not None:
                head = TAP_HEAD.pack(_NO_FRAME, correlation_id)
                frame = head if isinstance(answer, Gate) or len(answer) < len(head) else answer
                self._note(route, TAP_OWN_ANSWER, monotonic(), frame)
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
