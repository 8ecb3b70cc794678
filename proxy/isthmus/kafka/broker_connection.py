"""One connection to a broker: raw frames, pipelined, with nothing between the caller and the protocol.

Requests are sent in the order of the calls and answered in that order (a broker does so, and a connection on which it
does not is closed). There is no retry here: when the connection is lost, every outstanding request fails with
ConnectionLost at once, and whether it was carried out is unknown. ``client`` connects again and retries.

Requests are built from plain values for the version that both sides know (``messages.build_request``)::

    answer = await connection.call(ApiKey.METADATA, {"topics": None, "allow_auto_topic_creation": False})
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar

from isthmus.errors import AuthenticationFailed, ConnectionLost, KafkaError, RequestTimedOut, UnsupportedVersion
from isthmus.kafka.sasl import PlainExchange, SaslExchange, ScramExchange
from isthmus.kafka.security import SecuritySpec
from isthmus_plugins import dialling
from isthmus_plugins.clock import monotonic
from isthmus_protocol import schema
from isthmus_protocol.error_codes import UNSUPPORTED_VERSION
from isthmus_protocol.messages import (
    MalformedFrame,
    RequestPayload,
    build_request,
    decode_response,
    encode_request,
)
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.throttling import throttle_ms

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 30.0
FRAME_BYTES_MAX: Final = 256 * 1024 * 1024
"""A larger answer ends the connection: no fetch of ours asks for half of it, and the size comes from the peer."""
READ_BUFFER_BYTES: Final = 32 * 1024
"""Frames that do not fit are read straight into a buffer of their own."""
TLS_SHUTDOWN_TIMEOUT_S: Final = 2.0
SOFTWARE_NAME: Final = "isthmus"
SOFTWARE_VERSION: Final = "0.1.0"

_SIZE: Final = struct.Struct(">i")
_SIZE_AND_CORRELATION: Final = struct.Struct(">ii")
_UNSUPPORTED_VERSION: Final = UNSUPPORTED_VERSION.to_bytes(2, "big")


class _Pending:
    """A request on its way."""

    __slots__ = ("answer", "api_key", "correlation_id", "sent_at", "timer", "version")

    def __init__(
        self, api_key: int, version: int, correlation_id: int, sent_at: float, answer: asyncio.Future[bytes | bytearray]
    ) -> None:
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.sent_at = sent_at
        self.answer = answer
        self.timer: asyncio.TimerHandle | None = None


class BrokerConnection(asyncio.BufferedProtocol):
    """One connection to a broker. Make it with :meth:`connect`."""

    def __init__(self, host: str, port: int, client_id: str, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.host = host
        self.port = port
        self.client_id = client_id
        self.versions: Mapping[int, tuple[int, int]] = MappingProxyType({})
        """API key -> (lowest, highest) version of the broker."""
        self.expires_at: float | None = None
        """When the broker ends this connection's authentication (KIP-368), on the loop's clock. None: never."""
        self.opened_at = float("inf")
        """When it was made, in monotonic seconds."""
        self.on_lost: Callable[[ConnectionLost], None] | None = None
        """Called once, when the connection is lost or closed."""
        self.on_throttled: Callable[[int, float], None] | None = None
        """Called with an API and seconds where a quota has the broker read nothing from this connection for so long."""
        self._mute_until = float("-inf")
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frame_bytes_max = frame_bytes_max
        self._pending: deque[_Pending] = deque()
        self._correlation_id = 0
        self._loss: ConnectionLost | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._writable: asyncio.Future[None] | None = None
        # Reading: either into the buffer, or, for a frame that exceeds it, into a buffer of that frame's size.
        self._buffer = bytearray(READ_BUFFER_BYTES)
        self._filled = 0
        self._large: bytearray | None = None
        self._large_filled = 0

    # --- Setting up ---

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        security: SecuritySpec | None = None,
        *,
        client_id: str = SOFTWARE_NAME,
        timeout: float = CONNECT_TIMEOUT_S,
        tls_context: ssl.SSLContext | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> BrokerConnection:
        """Connect, negotiate versions, authenticate; all in ``timeout`` seconds.

        ``tls_context`` saves reading the files of ``security`` again. Raises ConnectionLost (also where TLS fails),
        AuthenticationFailed, ConfigurationError.
        """
        security = security or SecuritySpec()
        if security.uses_tls and tls_context is None:
            tls_context = security.tls_context()
        connection = cls(host, port, client_id, frame_bytes_max)
        try:
            async with asyncio.timeout(timeout):
                await dialling.connect(
                    lambda: connection,
                    host,
                    port,
                    tls=tls_context if security.uses_tls else None,
                    ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S if security.uses_tls else None,
                )
                await connection._negotiate()
                if security.uses_sasl:
                    await connection._authenticate(security)
        except BaseException as error:
            connection.abort()
            if isinstance(error, TimeoutError):
                raise ConnectionLost(f"{connection.address}: not connected within {timeout:g} s") from error
            if isinstance(error, OSError):  # ssl.SSLError is one
                raise ConnectionLost(f"{connection.address}: {_what(error)}") from error
            raise
        return connection

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def _negotiate(self) -> None:
        """ApiVersions in the highest version that both know; one that does not know ours answers in v0 (KIP-511)."""
        highest = schema.supported()[ApiKey.API_VERSIONS][1]
        values = {"client_software_name": SOFTWARE_NAME, "client_software_version": SOFTWARE_VERSION}
        version = highest
        frame = await self.send(build_request(ApiKey.API_VERSIONS, version, values))
        if frame[8:10] == _UNSUPPORTED_VERSION:
            known = self.decode(ApiKey.API_VERSIONS, 0, frame)
            theirs = (api.max_version for api in known.api_keys if api.api_key == ApiKey.API_VERSIONS)
            version = min(highest, max(theirs, default=0))
            frame = await self.send(build_request(ApiKey.API_VERSIONS, version, values))
        answer = self.decode(ApiKey.API_VERSIONS, version, frame)
        if answer.error_code:
            raise KafkaError(answer.error_code, f"{self.address} answers ApiVersions")
        self.versions = MappingProxyType({api.api_key: (api.min_version, api.max_version) for api in answer.api_keys})

    async def _authenticate(self, security: SecuritySpec) -> None:
        assert security.sasl_mechanism is not None
        assert security.username is not None
        answer = await self.call(ApiKey.SASL_HANDSHAKE, {"mechanism": security.sasl_mechanism})
        if answer.error_code:
            offered = ", ".join(answer.mechanisms)
            raise AuthenticationFailed(
                f"{self.address} offers {offered or 'no mechanism'}, not {security.sasl_mechanism}"
            )
        exchange: SaslExchange
        if security.sasl_mechanism == "PLAIN":
            exchange = PlainExchange(security.username, security.password())
        else:
            exchange = ScramExchange(security.sasl_mechanism, security.username, security.password())
        message: bytes | None = exchange.first()
        while message is not None:
            answer = await self.call(ApiKey.SASL_AUTHENTICATE, {"auth_bytes": message})
            if answer.error_code:
                reason = answer.error_message or KafkaError(answer.error_code).name
                raise AuthenticationFailed(f"{self.address}: {security.username}: {reason}")
            try:
                message = exchange.next(answer.auth_bytes)
            except ValueError as error:
                raise AuthenticationFailed(f"{self.address}: {error}") from error
        lifetime_s = getattr(answer, "session_lifetime", None)
        if lifetime_s and lifetime_s.total_seconds() > 0:
            self.expires_at = self._loop.time() + lifetime_s.total_seconds()

    # --- Requests ---

    def version(self, api_key: int, at_most: int | None = None) -> int:
        """The highest version of an API that both sides know, not above ``at_most``. Raises UnsupportedVersion."""
        ours = schema.supported().get(api_key)
        # Before ApiVersions is answered, nothing is known: what must be sent then exists in its first version.
        theirs = self.versions.get(api_key) if self.versions else ours
        if ours is not None and theirs is not None:
            lowest, highest = max(ours[0], theirs[0]), min(ours[1], theirs[1])
            if at_most is not None:
                highest = min(highest, at_most)
            if lowest <= highest:
                return highest
        name = ApiKey(api_key).name if api_key in set(ApiKey) else f"API {api_key}"
        limit = "" if at_most is None else f" up to v{at_most}"
        raise UnsupportedVersion(
            f"{self.address} has no version of {name}{limit} that this proxy knows ({theirs}, {ours})"
        )

    async def call(
        self,
        api_key: int,
        values: Mapping[str, Any],
        *,
        at_most: int | None = None,
        timeout: float = REQUEST_TIMEOUT_S,
    ) -> Any:
        """Send a request built from plain values in the negotiated version; returns kio's response payload."""
        return await self.request(build_request(api_key, self.version(api_key, at_most), values), timeout=timeout)

    async def request(self, payload: RequestPayload, *, timeout: float = REQUEST_TIMEOUT_S) -> Any:
        """Send a payload as it is; returns kio's response payload (top-level error codes are the caller's to read)."""
        frame = await self.send(payload, timeout=timeout)
        return self.decode(payload.__api_key__, payload.__version__, frame)

    async def request_raw(self, payload: RequestPayload, *, timeout: float = REQUEST_TIMEOUT_S) -> bytes | bytearray:
        """Send a payload; returns the whole response frame, not decoded. The caller owns it."""
        return await self.send(payload, timeout=timeout)

    def send(self, payload: RequestPayload, *, timeout: float = REQUEST_TIMEOUT_S) -> asyncio.Future[bytes | bytearray]:
        """Write a request now, and return the future of its response frame.

        The order of calls is the order on the wire, so a pipeline needs no lock. What is in flight is the caller's to
        bound (see :meth:`drained`). Raises ConnectionLost.
        """
        frame = encode_request(payload, self._next_correlation_id(), self.client_id)
        transport, answer = self._open_transport(), self._expect(payload.__api_key__, payload.__version__, timeout)
        transport.write(frame)
        return answer

    def send_body(
        self,
        api_key: int,
        version: int,
        body: Sequence[bytes | bytearray | memoryview],
        *,
        timeout: float = REQUEST_TIMEOUT_S,
    ) -> asyncio.Future[bytes | bytearray]:
        """Like :meth:`send` for a body that is encoded already, in pieces (a Produce with its record batches)."""
        return self.send_bodies(api_key, version, (body,), timeout=timeout)[0]

    def send_bodies(
        self,
        api_key: int,
        version: int,
        bodies: Sequence[Sequence[bytes | bytearray | memoryview]],
        *,
        timeout: float = REQUEST_TIMEOUT_S,
    ) -> list[asyncio.Future[bytes | bytearray]]:
        """Like :meth:`send_body` for several requests, which are written together."""
        transport, client_id = self._open_transport(), self.client_id.encode()
        tags = b"\x00" if schema.request_flexible(api_key, version) else b""
        pieces: list[bytes | bytearray | memoryview] = []
        answers = []
        for body in bodies:
            head = struct.pack(">hhih", api_key, version, self._next_correlation_id(), len(client_id)) + client_id
            head += tags
            size = len(head) + sum(map(len, body))
            pieces += (_SIZE.pack(size) + head, *body)
            answers.append(self._expect(api_key, version, timeout))
        transport.writelines(pieces)
        return answers

    def _open_transport(self) -> asyncio.Transport:
        """Raises ConnectionLost."""
        if self._transport is None or self._loss is not None:
            raise self._lost_error()
        return self._transport

    def _expect(self, api_key: int, version: int, timeout: float) -> asyncio.Future[bytes | bytearray]:
        """The answer to the request that is written next."""
        pending = _Pending(api_key, version, self._correlation_id, self._loop.time(), self._loop.create_future())
        pending.timer = self._loop.call_later(timeout, self._timed_out, pending, timeout)
        self._pending.append(pending)
        return pending.answer

    def _next_correlation_id(self) -> int:
        self._correlation_id = (self._correlation_id + 1) & 0x7FFF_FFFF
        return self._correlation_id

    def decode(self, api_key: int, version: int, frame: bytes | bytearray) -> Any:
        """The payload of an answer that came raw. Raises ConnectionLost where it is none, and closes the connection."""
        return self.read(lambda: decode_response(api_key, version, frame)[1])

    def read(self, reader: Callable[[], T]) -> T:
        """What ``reader`` reads in an answer that came raw. Raises ConnectionLost where that raises MalformedFrame, and
        closes the connection."""
        try:
            return reader()
        except MalformedFrame as error:
            self._lose(ConnectionLost(f"{self.address}: malformed answer: {error}"))
            raise self._lost_error() from error

    def _timed_out(self, pending: _Pending, timeout: float) -> None:
        # A broker that throttles reads a request when that is over: from then on it has its time.
        if (rest := max(pending.sent_at, self._mute_until) + timeout - self._loop.time()) > 0:
            pending.timer = self._loop.call_later(rest, self._timed_out, pending, timeout)
            return
        # Answers come in order, so all that was sent later waits for this one, too: the connection is of no more use.
        _fail_future(pending.answer, RequestTimedOut(f"{self.address}: no answer within {timeout:g} s"))
        self._lose(ConnectionLost(f"{self.address}: closed, as a request was not answered within {timeout:g} s"))

    @property
    def in_flight(self) -> int:
        """Requests that are not answered yet."""
        return len(self._pending)

    async def drained(self) -> None:
        """Wait until the socket takes more. Raises ConnectionLost."""
        if self._loss is not None:
            raise self._lost_error()
        if self._writable is not None:
            await asyncio.shield(self._writable)

    # --- Ending ---

    @property
    def is_open(self) -> bool:
        return self._transport is not None and self._loss is None

    async def close(self) -> None:
        """Close, and wait until it is. Outstanding requests fail with ConnectionLost, and may still be carried out."""
        if self._transport is None:
            return
        if self._loss is None:
            reason = ConnectionLost(f"{self.address}: closed by this side")
            if self._pending:
                self._lose(reason)
            else:
                self._fail(reason)
                self._transport.close()
        await self._ended

    def abort(self) -> None:
        """Close now, without waiting and without sending what is still buffered."""
        self._lose(ConnectionLost(f"{self.address}: closed by this side"))

    def _lose(self, reason: ConnectionLost) -> None:
        self._fail(reason)
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, reason: ConnectionLost) -> None:
        """From now on the connection is lost; everybody who waits is notified."""
        if self._loss is not None:
            return
        self._loss = reason
        while self._pending:
            pending = self._pending.popleft()
            if pending.timer is not None:
                pending.timer.cancel()
            _fail_future(pending.answer, self._lost_error())
        self._set_writable(reason)
        if self.on_lost is not None:
            self.on_lost(reason)

    def _lost_error(self) -> ConnectionLost:
        # A new one for each caller: a raised exception collects tracebacks.
        return ConnectionLost(f"{self.address}: not connected" if self._loss is None else str(self._loss))

    def _set_writable(self, error: Exception | None) -> None:
        waiting, self._writable = self._writable, None
        if waiting is not None and error is not None:
            _fail_future(waiting, error)
        elif waiting is not None and not waiting.done():
            waiting.set_result(None)

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.opened_at = monotonic()
        raw_socket = transport.get_extra_info("socket")
        if raw_socket is not None:
            raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._loss is not None:  # given up while the handshake was under way
            transport.abort()  # type: ignore[attr-defined]

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionLost(f"{self.address}: {_what(error) if error else 'closed by the broker'}"))
        self._large = None
        if not self._ended.done():
            self._ended.set_result(None)

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        self._set_writable(None)

    def get_buffer(self, size_hint: int) -> memoryview:
        if self._large is not None:
            return memoryview(self._large)[self._large_filled :]
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, count: int) -> None:
        if self._large is not None:
            self._large_filled += count
            if self._large_filled == len(self._large):
                frame, self._large = self._large, None
                self._answered(frame)
            return
        self._filled += count
        buffer, filled, start = self._buffer, self._filled, 0
        while filled - start >= 4:
            size = 4 + _SIZE.unpack_from(buffer, start)[0]
            if not 8 <= size <= self._frame_bytes_max:
                self._lose(ConnectionLost(f"{self.address}: a frame of {size} bytes: is this a Kafka broker?"))
                return
            if filled - start >= size:
                self._answered(bytes(memoryview(buffer)[start : start + size]))
                start += size
                continue
            if size > len(buffer):
                self._large = bytearray(size)
                self._large_filled = filled - start
                self._large[: self._large_filled] = buffer[start:filled]
                start = filled
            break
        if start:
            buffer[: filled - start] = buffer[start:filled]
            self._filled = filled - start

    def _answered(self, frame: bytes | bytearray) -> None:
        if self._loss is not None:
            return
        _, correlation_id = _SIZE_AND_CORRELATION.unpack_from(frame)
        if not self._pending or self._pending[0].correlation_id != correlation_id:
            expected = self._pending[0].correlation_id if self._pending else "none"
            self._lose(ConnectionLost(f"{self.address}: answer {correlation_id} in the place of {expected}"))
            return
        pending = self._pending.popleft()
        if pending.timer is not None:
            pending.timer.cancel()
        if (muted_ms := throttle_ms(pending.api_key, pending.version, frame)) > 0:
            self._mute_until = max(self._mute_until, self._loop.time() + muted_ms / 1000)
            if self.on_throttled is not None:
                self.on_throttled(pending.api_key, muted_ms / 1000)
        if not pending.answer.done():  # else its caller was cancelled
            pending.answer.set_result(frame)


def _fail_future(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # if nobody waits for it any more, that is no news


def _what(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
