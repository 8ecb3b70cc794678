"""A client that has not authenticated: its SASL exchange passes to the broker, as does ApiVersions, and nothing else.

No plugin sees what a stranger sends, and of a request that it may not send only the head is read. Its frames are taken
one at a time, each when the one before is answered, as brokers do; so it is known here when the broker has accepted
it. Two forms of the exchange pass:

- SaslHandshake v1, then SaslAuthenticate requests.
- SaslHandshake v0, then messages of the mechanism with nothing but their size around them, both ways.

Of PLAIN, SCRAM and OAUTHBEARER it is known which answer is the last. Of other mechanisms (GSSAPI) it is not: when such
a client sends a request, the broker is asked whether it would take one, on this connection, before it is passed.

Where it is not known yet whether the broker's listener has SASL, a request waits until it is.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from isthmus.session.authentication import (
    Exchange,
    Progress,
    accept,
    auth_bytes,
    handshake_error,
    mechanism_asked,
    taken,
)
from isthmus.session.queued_bytes import UNCOUNTED_BYTES
from isthmus_plugins.api import ResponseHook
from isthmus_plugins.clock import monotonic
from isthmus_protocol.api_versions import unsupported_version_answer
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame, NeedMore

if TYPE_CHECKING:
    from isthmus.session.broker_sasl import BrokerSasl
    from isthmus.session.session import Session
    from isthmus.session.upstream import Upstream

ALLOWED: Final = frozenset({ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE})
_request_head: Final = struct.Struct(">IIi").unpack_from
"""Size, API key and version as one number, correlation id."""
_size: Final = struct.Struct(">I").unpack_from
_HEAD_SIZE: Final = 12
_SMALLEST_REQUEST: Final = 10
_SIZE: Final = 4


class Stranger:
    """What happens to a session's bytes until its client has authenticated."""

    __slots__ = (
        "_exchange",
        "_frame_bytes_max",
        "_holds",
        "_opaque",
        "_required",
        "_sasl",
        "_session",
        "_upstream",
        "_versions_told",
        "_waits",
        "_waits_to_know",
    )

    def __init__(self, session: Session, upstream: Upstream, sasl: BrokerSasl, required: bool | None) -> None:
        """``required``: whether the broker's listener has SASL; None: ``sasl`` does not know yet."""
        self._session = session
        self._upstream = upstream
        self._sasl = sasl
        self._required = required
        self._frame_bytes_max = session.gateway.limits.sasl_frame_bytes_max
        self._exchange: Exchange | None = None
        self._opaque = False
        """The exchange began with SaslHandshake v0: what comes has no heads."""
        self._waits = False
        """For an answer, or to know of the listener: what comes is kept."""
        self._waits_to_know = False
        self._holds = False
        """Nothing is read: as much is kept as need not be counted. Before, it is, to see the client go."""
        self._versions_told = False
        """The client asked with a newer ApiVersions than the proxy knows. It has no reason to do so again."""
        if required is None:
            sasl.expect(upstream.target, self.known)

    def end(self) -> None:
        """The client has authenticated, or is gone. Hooks of answers that have not come still refer to this."""
        self._sasl.expect_no_more(self._upstream.target, self.known)
        del self._session, self._upstream

    def known(self, required: bool) -> None:
        """It is known now whether the broker's listener has SASL."""
        self._required = required
        if not required:
            self._accepted()
        elif self._waits_to_know:
            self._go_on()

    def timed_out(self) -> None:
        """The client has had its time. It may have used it well, and be silent since."""
        if self._perhaps_done and not self._waits:
            self._ask_broker()
            self._session.limit_authentication()
        else:
            self._session.not_authenticated("it took too long")

    # ---- what comes from the client ----

    def take(self, data: bytes) -> None:
        """What the client has sent, from the first byte of a frame on."""
        session = self._session
        try:
            position, wanted = self._frames(data)
        except (MalformedFrame, NeedMore) as error:
            session.not_authenticated(f"malformed request: {error}")
            return
        rest = data[position:]
        if not rest or session.stranger is not self:
            return
        if self._waits and len(rest) >= wanted and not self._holds:
            self._holds = True
            session.downstream.hold_reading()
        session.downstream.keep(rest, max(wanted, len(rest) + 1))

    def _frames(self, data: bytes) -> tuple[int, int]:
        """Take whole frames. Returns where the rest begins, and how much of it must be there for another look."""
        position, available = 0, len(data)
        while position < available and not self._waits:
            least = _SIZE if self._opaque else _HEAD_SIZE
            if available - position < least:
                return position, least
            (size,) = _size(data, position)
            if self._is_request(data, position) and not self._may_send(data, position):
                break
            if size > self._frame_bytes_max:
                self._session.not_authenticated(f"a frame of {size} bytes")
                break
            end = position + _SIZE + size
            if available < end:
                return position, _SIZE + size
            frame, position = data[position:end], end
            if self._opaque:
                self._pass_message(frame)
            elif not self._pass_request(frame):
                break
        return position, min(self._frame_bytes_max, UNCOUNTED_BYTES)

    def _is_request(self, data: bytes, position: int) -> bool:
        """Whether a frame begins as a Kafka request. Messages of unknown mechanisms end where one does."""
        if not self._opaque:
            return True
        if not self._perhaps_done or len(data) - position < _HEAD_SIZE:
            return False
        size, key, _ = _request_head(data, position)
        return bool(size >= _SMALLEST_REQUEST and key in self._session.gateway.routes)

    def _may_send(self, data: bytes, position: int) -> bool:
        """Whether the request that begins there passes now. If not it waits, or the session has ended."""
        size, key, _ = _request_head(data, position)
        if size < _SMALLEST_REQUEST:
            raise MalformedFrame(f"{size} bytes")
        if key >> 16 in ALLOWED and not self._opaque:
            return True
        if self._required is None:
            self._waits = True
            self._waits_to_know = True
        elif self._perhaps_done:
            self._ask_broker()
        else:
            self._session.not_authenticated(f"API key {key >> 16} before it has authenticated")
        return False

    def _pass_request(self, frame: bytes) -> bool:
        """Have the broker, or the proxy, answer a request. False: the session has ended."""
        _, key, correlation_id = _request_head(frame)
        session = self._session
        api_key, version = key >> 16, key & 0xFFFF
        route = session.gateway.routes.get(key) or session.gateway.unknown_route(key)
        if key not in session.gateway.routes:  # ApiVersions that are newer than the proxy
            if self._versions_told:
                session.not_authenticated("ApiVersions of an unknown version, again")
                return False
            self._versions_told = True
            answer = unsupported_version_answer(correlation_id)
            self._upstream.own_answer((correlation_id, route, monotonic(), None, answer))
            return True
        on_response = route.on_response
        if api_key == ApiKey.SASL_HANDSHAKE:
            on_response = self._on_handshake(version, mechanism_asked(version, frame))
        elif api_key == ApiKey.SASL_AUTHENTICATE and self._exchange is not None:
            self._exchange.says(auth_bytes(version, frame))
            on_response = self._on_authenticate(version, self._exchange)
        self._waits = True
        session.downstream.pass_on(frame, route, correlation_id, on_response)
        return True

    def _pass_message(self, frame: bytes) -> None:
        """A message of an exchange without heads."""
        assert self._exchange is not None
        self._exchange.says(frame[_SIZE:])
        if self._exchange.progress is Progress.OPEN:  # GSSAPI has a last message that is not answered
            self._waits = True
        self._upstream.send(frame)

    # ---- what comes from the broker ----

    def _on_handshake(self, version: int, mechanism: str) -> ResponseHook:
        def answered(frame: bytes) -> bytes:
            if handshake_error(frame) == 0:
                self._exchange = Exchange(mechanism)
                self._opaque = version == 0
            return frame

        return answered

    def _on_authenticate(self, version: int, exchange: Exchange) -> ResponseHook:
        def answered(frame: bytes) -> bytes:
            if not taken(exchange, version, frame):
                self._exchange = None
            return frame

        return answered

    def _on_message(self, message: bytes) -> None:
        """The broker's answer to one without heads has gone to the client."""
        assert self._exchange is not None
        self._exchange.taken(message)
        self.answered()

    def answered(self) -> None:
        """All that was passed is answered, and the answers have gone to the client."""
        exchange = self._exchange
        if exchange is not None and exchange.progress is Progress.DONE:
            if self._opaque:
                self._upstream.expect_heads()
            self._accepted()
            return
        if self._opaque and not self._upstream.headless:
            self._upstream.expect_messages(self._on_message)
        self._go_on()

    @property
    def _perhaps_done(self) -> bool:
        return self._exchange is not None and self._exchange.progress is Progress.PERHAPS_DONE

    def _ask_broker(self) -> None:
        """Whether it takes requests: in the middle of an exchange it answers with an error, or closes."""
        self._waits = True
        if self._opaque:
            self._upstream.expect_heads()
        self._session.ask(self._on_asked)

    def _on_asked(self, frame: bytes) -> bytes:
        assert self._exchange is not None
        if int.from_bytes(frame[8:10], "big") == 0:
            self._exchange.progress = Progress.DONE
        else:  # what the client asks is refused when it is looked at again
            self._exchange, self._opaque = None, False
        return frame

    # ---- states ----

    def _accepted(self) -> None:
        session, exchange = self._session, self._exchange
        session.authenticated()
        if exchange is not None and accept(session.client, exchange):
            session.gateway.authenticated(session.client)
        session.downstream.go_on()
        if self._holds:
            session.downstream.release_reading()

    def _go_on(self) -> None:
        session = self._session
        self._waits = self._waits_to_know = False
        held, self._holds = self._holds, False
        session.downstream.go_on()
        if held:
            session.downstream.release_reading()
