"""One connection between two proxies: handshake, frames, calls, heartbeats.

The link protocol itself (bytes) is :mod:`isthmus_protocol.link`; this is its asyncio shell. Either side may have
dialled; after the handshake both ends are the same class with the same powers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import ssl
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isthmus_control.tokens import Token, is_signed
from isthmus_plugins import dialling
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import Clock
from isthmus_plugins.replication.link import features, reasons
from isthmus_plugins.replication.link.call_codec import A, Answering, MalformedCall, Question, answer_to, to_wire
from isthmus_plugins.replication.link.congestion import CongestionControl, keep_little_unsent
from isthmus_plugins.replication.link.features import Protection
from isthmus_plugins.replication.link.outgoing import Outgoing
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol import link, link_cipher
from isthmus_protocol.link import MessageType
from isthmus_protocol.link_pieces import PIECE_BYTES, Reassembly
from isthmus_protocol.wire import MalformedFrame

log = logging.getLogger("isthmus_plugins.replication")

HANDSHAKE_TIMEOUT_S: Final = 10.0
HEARTBEAT_INTERVAL_S: Final = 1.0
SILENCE_MAX_S: Final = 8.0
"""A peer that says nothing for so long is taken for dead: several lost heartbeats, less than a client's time-out."""
CALL_TIMEOUT_S: Final = 30.0
WRITE_HIGH_WATER_BYTES: Final = 4 * 1024 * 1024
"""More that waits to be written means that the peer does not keep up, until a quarter of it is left."""
WRITTEN_AHEAD_BYTES: Final = PIECE_BYTES
"""What the transport may hold beyond what the system takes: all of that comes before a frame that is sent next."""
ANSWERED_AT_ONCE_MAX: Final = 10_000
"""Calls of one peer. It opens some hundred streams at a time; who asks more means no good."""
SECRET: Final = "secret"
"""In a HELLO: the id of the link's secret that the dialler holds."""
UNKNOWN_METHOD: Final = "UNKNOWN_METHOD"
"""What a peer answers to a call that its version does not know."""
INVALID_REQUEST: Final = "INVALID_REQUEST"
"""What a peer answers to a call that it does not understand."""
MALFORMED_CALL: Final = "MALFORMED_CALL"
"""Why such a call was refused, to this end."""
INVALID_ANSWER: Final = "INVALID_ANSWER"
"""In the place of a peer's answer that this version does not understand."""
FLUSH_TIMEOUT_S: Final = 2.0
"""How long a connection that ends may still send what is queued (the reason of a rejection, say)."""


class LinkRejected(Exception):
    """The peer refused the connection or a call. ``code`` is a constant of the link protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class LinkLost(Exception):
    """The connection ended while something was awaited on it."""


@dataclass(frozen=True, slots=True)
class Credential:
    """What an acceptor knows of a dialler that may come in: the secret that it must hold."""

    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TokenCredential:
    """The same of a dialler who has to hold a token (:mod:`isthmus_control.tokens`): what that is verified by."""

    public_key: str
    acceptor_key: bytes = field(repr=False)


class PeerSilent(LinkLost):
    """The peer said nothing for too long."""


class Peer(Protocol):
    """The other side of a link, as what is sent to it and asked of it needs it.

    Mostly a :class:`LinkConnection`; where a topic is refilled, this cluster itself.
    """

    @property
    def link_name(self) -> str: ...

    @property
    def lost(self) -> bool: ...

    def send(self, *parts: bytes | memoryview) -> None: ...

    def gather(self) -> None: ...

    def write(self) -> None: ...

    async def call(self, question: Question[A], timeout_s: float = CALL_TIMEOUT_S) -> A:
        """Ask it. Raises LinkRejected (its answer), LinkLost, TimeoutError."""


class Receiver:
    """What a connection delivers to. The defaults take nothing: records that nobody asked for end the connection."""

    def on_append(self, connection: LinkConnection, append: link.Append) -> None:
        raise MalformedFrame("an APPEND of no open stream")

    def on_call(self, connection: LinkConnection, question: Question[Any]) -> None:
        """A call came in. Called in the order of frames, and before it is answered."""

    def on_appended(self, connection: LinkConnection, appended: link.Appended) -> None:
        raise MalformedFrame("an APPENDED of no open stream")

    def on_stopped(self, connection: LinkConnection, stopped: link.Stopped) -> None:
        raise MalformedFrame("a STOPPED of no open stream")

    def on_writable(self, connection: LinkConnection) -> None:
        """The peer keeps up again with what is queued for it."""

    def on_lost(self, connection: LinkConnection) -> None:
        """The connection is gone; nothing more will come of it."""


class LinkConnection(asyncio.Protocol):
    """One end of a connection between two proxies.

    ``accept`` (acceptor only) looks a HELLO up and returns the :class:`Credential`, ``approve`` looks at what a peer
    said of itself whose proof holds, and at what protects the connection; either may raise :class:`LinkRejected`.
    ``on_refused`` is told of what the peer sent that ends the connection here, or is a call that is not understood
    (:data:`MALFORMED_CALL`): with a code and why.
    ``on_ready`` is called when the handshake is over, before anything else is taken: it sets handlers and receiver.
    ``ready`` resolves then, too. ``token``: with it a dialler proves itself, in place of a secret.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        supervision: Supervision,
        hello: Mapping[str, Any] | None = None,
        secret: bytes = b"",
        token: Token | None = None,
        accept: Callable[[dict[str, Any], LinkConnection], Credential | TokenCredential] | None = None,
        approve: Callable[[dict[str, Any], Protection], None] | None = None,
        on_refused: Callable[[LinkConnection, str, str], None] | None = None,
        identity: Mapping[str, Any] | None = None,
        on_ready: Callable[[LinkConnection], None] | None = None,
        on_made: Callable[[LinkConnection], None] | None = None,
    ) -> None:
        self._clock = clock
        self.dialled = hello is not None
        self.receiver = Receiver()
        self.handlers: Mapping[str, Answering] = {}
        """By method: who answers the peer's calls."""
        self.peer: dict[str, Any] = {}
        """What the peer said of itself: HELLO or CHALLENGE, verified by its proof."""
        self.purpose = ""
        self.protection = Protection.NONE
        """Known once the peer has proved what it said."""
        self.last_heard = self._clock.monotonic()
        self.lost = False
        self.lost_reason = ""
        self.lost_error: Exception | None = None
        self.link_name = ""
        """Set when the connection is taken into use for a link."""
        self._ended = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._gathered: list[bytes | memoryview] | None = None
        """Small frames that are written together in a moment."""
        self._gathered_bytes = 0
        self._outgoing = Outgoing()
        """What waits until the transport takes more, or for what was gathered."""
        self._full = False
        """Whether the transport takes no more for now."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._secret = secret
        self._token = token
        self._shown: TokenCredential | None = None
        self._accept = accept
        self._approve = approve
        self._identity = dict(identity or {})
        self._on_refused = on_refused or _log_refused
        self._on_ready = on_ready
        self._on_made = on_made
        self._key = X25519PrivateKey.generate()
        self._hello: dict[str, Any] = dict(hello or {})
        self._challenge: dict[str, Any] = {}
        self._splitter = link.Splitter()
        self._cipher: link_cipher.FrameCipher | None = None
        """All that is written and read goes through it, once it is there."""
        self._opened = link.Splitter()
        """Of the bytes that were encrypted."""
        self._reassembly = Reassembly()
        self._tasks = Tasks("link-connection", supervision)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = itertools.count(1)
        self._answering = 0
        """How many calls of the peer are not answered."""
        self._last_sent = self._beaten = self._clock.monotonic()
        self.round_trip_s = 0.0
        """How long the peer took to answer the first message: at least once to it and back."""
        self._timer: asyncio.TimerHandle | None = None
        self.writable = True
        """Whether the peer keeps up with what is queued for it."""
        self._transport: asyncio.Transport
        self.keep_steady: Callable[[bool], None]
        """See :class:`~isthmus_plugins.replication.link.congestion.CongestionControl`; there once it is connected."""

    # ---- life ----

    @classmethod
    async def dial(
        cls,
        host: str,
        port: int,
        *,
        clock: Clock,
        supervision: Supervision,
        hello: Mapping[str, Any],
        secret: bytes,
        identity: Mapping[str, Any],
        token: Token | None = None,
        tls: ssl.SSLContext | None = None,
        approve: Callable[[dict[str, Any], Protection], None] | None = None,
        on_refused: Callable[[LinkConnection, str, str], None] | None = None,
        on_ready: Callable[[LinkConnection], None] | None = None,
    ) -> LinkConnection:
        """Connect and shake hands. Raises OSError, TimeoutError, LinkRejected, LinkLost."""
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            _, connection = await dialling.connect(
                lambda: cls(
                    clock=clock,
                    supervision=supervision,
                    hello=hello,
                    secret=secret,
                    token=token,
                    identity=identity,
                    approve=approve,
                    on_refused=on_refused,
                    on_ready=on_ready,
                ),
                host,
                port,
                tls=tls,
            )
            try:
                await connection.ready
            except MalformedFrame as error:
                raise LinkLost(f"it is no link listener: {error}") from error
            except BaseException:
                connection.close()
                raise
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._transport.set_write_buffer_limits(high=WRITTEN_AHEAD_BYTES)
        connected = transport.get_extra_info("socket")
        keep_little_unsent(connected)
        self.keep_steady = CongestionControl(connected).keep_steady
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_TIMEOUT_S, self._handshake_timed_out)
        self._identity["tls"] = transport.get_extra_info("ssl_object") is not None
        if self.dialled:
            self._hello |= {
                **self._identity,
                **({} if self._token is None else {"token": self._token.token_id}),
                "versions": [link.VERSION_MIN, link.VERSION_MAX],
                "nonce": os.urandom(link.NONCE_BYTES).hex(),
                "key": self._public_key(),
            }
            self.send(link.encode_json(MessageType.HELLO, self._hello))
        if self._on_made is not None:
            self._on_made(self)

    @property
    def peer_features(self) -> frozenset[str]:
        """What the peer knows (:mod:`~isthmus_plugins.replication.link.features`)."""
        return features.known_by(self.peer)

    @property
    def secret_id(self) -> str:
        """Which of the link's secrets both ends have proved to hold; empty: the one that it was created with."""
        said = self._hello.get(SECRET, "")
        return said if isinstance(said, str) else ""

    @property
    def peer_address(self) -> str:
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if name else ""

    @property
    def shows_token(self) -> bool:
        """Whether who dialled has named a token, right or not."""
        return "token" in self._hello

    def _handshake_timed_out(self) -> None:
        self._fail(LinkLost("the peer did not finish the handshake in time"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnected.set()
        self._fail(LinkLost(repr(exc) if exc else "the peer closed the connection"))

    def close(self, why: str = "closed") -> None:
        """End the connection; what waits on it fails with :class:`LinkLost`."""
        self._fail(LinkLost(why))

    async def stopped(self) -> None:
        """End the connection and the peer's calls that are still being answered, and wait for it."""
        self.close()
        await self._tasks.close()
        try:
            async with asyncio.timeout(2 * FLUSH_TIMEOUT_S):
                await self._disconnected.wait()
        except TimeoutError:
            pass

    def _fail(self, error: Exception) -> None:
        if self.lost:
            return
        self.lost = True
        self.lost_reason = str(error)
        self.lost_error = error
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        while not self._disconnected.is_set() and (parts := self._outgoing.take()):
            self._to_line(parts)
        self._outgoing, self._reassembly = Outgoing(), Reassembly()
        self._transport.close()
        # A peer that is stuck takes nothing more: what is queued for it must not stay in memory.
        asyncio.get_running_loop().call_later(FLUSH_TIMEOUT_S, self._transport.abort)
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # the acceptor has nobody who awaits it
        for call in self._calls.values():
            if not call.done():
                call.set_exception(LinkLost(str(error)))
        self._calls.clear()
        self.receiver.on_lost(self)

    # ---- bytes ----

    def data_received(self, data: bytes) -> None:
        self.last_heard = self._clock.monotonic()
        try:
            for kind, body in self._frames(data):
                if self.lost:
                    return
                self._take(kind, body)
        except MalformedFrame as error:
            self._on_refused(self, "MALFORMED", str(error))
            self._fail(error)
        except LinkRejected as error:
            self._on_refused(self, error.code, error.message)
            self.send(link.encode_json(MessageType.REJECT, {"code": error.code, "message": error.message}))
            self._fail(error)
        except Exception as error:  # whatever a peer sends ends its own connection, and nothing else
            log.exception("link connection failed", extra={"peer": self.peer_address})
            self._fail(LinkLost(f"what the peer sent met a bug: {error!r}"))

    def _frames(self, data: bytes) -> Iterator[tuple[MessageType, memoryview]]:
        """The frames that ``data`` completes, decrypted from the first on that is encrypted. Raises MalformedFrame."""
        for kind, body in self._splitter.feed(data):
            if self._cipher is None or (kind is MessageType.REJECT and not self.ready.done()):
                yield kind, body  # who is rejected for its proof has no key in common with the peer
            else:
                yield from self._opened.feed(self._cipher.open(kind, body))

    def _take(self, kind: MessageType, body: memoryview) -> None:
        if not self.ready.done():
            self._shake_hands(kind, link.decode_json(body))
        elif kind is MessageType.PIECE:
            whole = self._reassembly.add(body)
            if whole is not None:
                self._take(*whole)
        elif kind is MessageType.APPEND:
            self.receiver.on_append(self, link.decode_append(body))
        elif kind is MessageType.APPENDED:
            self.receiver.on_appended(self, link.decode_appended(body))
        elif kind is MessageType.HEARTBEAT:
            pass
        elif kind is MessageType.CALL:
            self._called(link.decode_json(body))
        elif kind is MessageType.RESULT:
            self._result(link.decode_json(body))
        elif kind is MessageType.STOPPED:
            self.receiver.on_stopped(self, link.decode_stopped(body))
        elif kind is MessageType.REJECT:
            rejection = link.decode_json(body)
            self._fail(LinkRejected(str(rejection.get("code")), str(rejection.get("message"))))
        else:
            raise MalformedFrame(f"{kind.name} after the handshake")

    def send(self, *parts: bytes | memoryview, in_order: bool = False) -> None:
        """Queue one frame, given in parts. ``in_order``: no records that are sent after it come before it."""
        if self.lost:
            return
        size = sum(map(len, parts))
        if self._full or self._outgoing.queued_bytes or max(size, self._gathered_bytes) > PIECE_BYTES:
            self._outgoing.put(parts, size, in_order)
            self.writable = self.writable and self._outgoing.queued_bytes <= WRITE_HIGH_WATER_BYTES
            self._write_on()
        elif self._gathered is not None:
            self._gathered += parts
            self._gathered_bytes += size
        else:
            self._write(parts)

    def drop_stream(self, stream: int) -> None:
        """What waits of a stream that has ended need not be sent any more."""
        self._outgoing.drop(stream)
        self._write_on()

    def gather(self) -> None:
        """Keep the frames that are sent from here on, until :meth:`write`: one call of the kernel for all of them."""
        if self._gathered is None:
            self._gathered = []

    def write(self) -> None:
        """Write what was gathered."""
        parts, self._gathered, self._gathered_bytes = self._gathered, None, 0
        if parts and not self.lost:
            self._write(parts)
        self._write_on()

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        self._last_sent = self._clock.monotonic()
        self._to_line(parts)

    def _to_line(self, parts: Sequence[bytes | memoryview]) -> None:
        """The one place from which bytes go out."""
        self._transport.writelines(parts if self._cipher is None else self._cipher.seal(parts))

    def _write_on(self) -> None:
        """Write what waits, as far as the transport takes it. What was gathered comes before."""
        if self._gathered is not None:
            return
        while not self._full and not self.lost and (parts := self._outgoing.take()):
            self._write(parts)
        if self.writable or self._full or self.lost:
            return
        if self._outgoing.queued_bytes <= WRITE_HIGH_WATER_BYTES // 4:
            self.writable = True
            self.receiver.on_writable(self)

    def pause_writing(self) -> None:
        self._full = True
        if self._transport.get_write_buffer_size() > WRITE_HIGH_WATER_BYTES:  # a large frame, whole
            self.writable = False

    def resume_writing(self) -> None:
        self._full = False
        self._write_on()

    async def lost_within(self, seconds: float) -> bool:
        """Whether the connection ends within the next ``seconds``; returns at once when it does."""
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _beat(self) -> None:
        now = self._clock.monotonic()
        if now - self.last_heard > SILENCE_MAX_S and now - self._beaten < 2 * HEARTBEAT_INTERVAL_S:
            self._fail(PeerSilent(f"nothing heard for {now - self.last_heard:.1f} s"))
            return
        self._beaten = now
        if now - self._last_sent >= HEARTBEAT_INTERVAL_S:
            self.send(link.encode(MessageType.HEARTBEAT, b""))
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_S, self._beat)

    # ---- handshake ----

    def _public_key(self) -> str:
        return self._key.public_key().public_bytes_raw().hex()

    def _shake_hands(self, kind: MessageType, said: dict[str, Any]) -> None:
        """A frame of who has not proved anything. Raises MalformedFrame, LinkRejected."""
        try:
            self._next_of_handshake(kind, said)
        except MalformedFrame:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise MalformedFrame(f"a {kind.name} that is not understood: {type(error).__name__}: {error}") from error

    def _next_of_handshake(self, kind: MessageType, said: dict[str, Any]) -> None:
        if kind is MessageType.REJECT:
            self._fail(LinkRejected(str(said.get("code")), str(said.get("message"))))
        elif self.dialled and kind is MessageType.CHALLENGE and not self._challenge:
            self._challenge = said
            self.round_trip_s = self._clock.monotonic() - self._last_sent
            self._prove_to_acceptor()
        elif self.dialled and kind is MessageType.WELCOME and self._challenge:
            self._welcomed(said)
        elif not self.dialled and kind is MessageType.HELLO and not self._hello:
            self._challenge_for(said)
        elif not self.dialled and kind is MessageType.PROOF and self._hello:
            self.round_trip_s = self._clock.monotonic() - self._last_sent
            self._proven(said)
        else:
            raise MalformedFrame(f"{kind.name} out of turn in the handshake")

    def _prove_to_acceptor(self) -> None:
        """A dialler was challenged. Who holds a token proves that first, and the acceptor itself in its WELCOME."""
        if self._token is not None:
            if features.TOKENS not in features.known_by(self._challenge):
                self._fail(LinkRejected("UNSUPPORTED_VERSION", "the peer's version does not know tokens: upgrade it"))
                return
            self.send(link.encode_json(MessageType.PROOF, {"proof": self._token.sign(self._words)}))
            return
        if not self._proof_holds("acceptor", self._challenge):
            self._fail(LinkRejected("AUTHENTICATION_ERROR", "the peer does not hold this link's secret"))
        elif self._approves():
            proof = link.proof(self._secret, "dialler", self._words)
            self.send(link.encode_json(MessageType.PROOF, {"proof": proof}))
            self._protect(self._challenge)

    def _welcomed(self, said: dict[str, Any]) -> None:
        """A dialler may come in. With a token it has known until here only what somebody said."""
        if self._token is not None:
            if not self._proof_holds("acceptor", said, self._token.acceptor_key):
                self._fail(LinkRejected("AUTHENTICATION_ERROR", "the peer is not of the cluster that made the token"))
                return
            if not self._approves():
                return
            self._protect(self._challenge)
        self._handshake_done(self._challenge)

    def _approves(self) -> bool:
        """Whether a dialler goes on with an acceptor that has proved what it said."""
        self.protection = self._agreed_protection(self._challenge)
        try:
            if self._approve is not None:
                self._approve(self._challenge, self.protection)
        except LinkRejected as error:
            self._fail(error)
            return False
        return True

    def _proven(self, said: dict[str, Any]) -> None:
        """A dialler has given its proof. Raises LinkRejected."""
        shown = self._shown
        if shown is not None and not is_signed(shown.public_key, self._words, str(said.get("proof"))):
            raise LinkRejected("AUTHENTICATION_ERROR", "the dialler does not hold the token that it names")
        if shown is None and not self._proof_holds("dialler", said):
            raise LinkRejected("AUTHENTICATION_ERROR", "the dialler does not hold this link's secret")
        self.protection = self._agreed_protection(self._hello)
        if shown is None:
            self._protect(self._hello)
        if self._approve is not None:
            self._approve(self._hello, self.protection)
        if shown is None:
            self.send(link.encode_json(MessageType.WELCOME, {}))
        else:  # in the clear: only with this proof does the dialler know with whom it has keys in common
            proof = link.proof(shown.acceptor_key, "acceptor", self._words)
            self.send(link.encode_json(MessageType.WELCOME, {"proof": proof}))
            self._protect(self._hello)
        self._handshake_done(self._hello)

    @property
    def _words(self) -> bytes:
        """What both ends have said before they prove anything."""
        return link.transcript(self._hello, self._challenge)

    def _proof_holds(self, side: str, said: dict[str, Any], key: bytes | None = None) -> bool:
        given = str(said.get("proof", ""))
        return given.isascii() and link.proof_holds(self._secret if key is None else key, side, self._words, given)

    def _agreed_protection(self, peer: Mapping[str, Any]) -> Protection:
        """What both ends have said that they can, which their proofs cover: nobody in between has them do without."""
        if self._identity["tls"] and peer.get("tls") is True:
            return Protection.TLS
        if features.ENCRYPTED_FRAMES in features.known_by(self._identity) & features.known_by(peer):
            return Protection.FRAMES
        return Protection.TLS if self._identity["tls"] else Protection.NONE

    def _protect(self, peer: Mapping[str, Any]) -> None:
        """From here on, both ends encrypt what they write, if they agreed to."""
        if self.protection is not Protection.FRAMES:
            self._splitter.authenticated()
            return
        self._cipher = link_cipher.FrameCipher(self._shared(peer), self._secret, self._words, dialled=self.dialled)
        self._splitter.authenticated(link_cipher.FRAME_BYTES_MAX)
        self._opened.authenticated()

    def _shared(self, peer: Mapping[str, Any]) -> bytes:
        """What only the two ends can know of their X25519 keys. Raises MalformedFrame."""
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(peer["key"])))
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedFrame("a key that is none") from error

    def _challenge_for(self, hello: dict[str, Any]) -> None:
        assert self._accept is not None
        try:
            lowest, highest = (int(version) for version in hello["versions"])
            nonce, key = bytes.fromhex(hello["nonce"]), bytes.fromhex(hello["key"])
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedFrame("an incomplete HELLO") from error
        if len(nonce) != link.NONCE_BYTES or len(key) != 32:
            raise MalformedFrame("a HELLO with a nonce or key of the wrong size")
        version = link.choose_version(lowest, highest)
        if version is None:
            raise LinkRejected(
                "UNSUPPORTED_VERSION",
                f"this proxy speaks link versions {link.VERSION_MIN} to {link.VERSION_MAX}, the dialler {lowest} to "
                f"{highest}: upgrade the older one",
            )
        self._hello = hello
        credential = self._accept(hello, self)
        if isinstance(credential, TokenCredential):
            self._shown = credential
        else:
            self._secret = credential.secret
        self._challenge = {
            **self._identity,
            "version": version,
            "nonce": os.urandom(link.NONCE_BYTES).hex(),
            "key": self._public_key(),
        }
        if self._shown is None:
            self._challenge["proof"] = link.proof(self._secret, "acceptor", self._words)
        self.send(link.encode_json(MessageType.CHALLENGE, self._challenge))

    def _handshake_done(self, peer: dict[str, Any]) -> None:
        self.peer = peer
        self._outgoing.cuts = features.PIECES in self.peer_features
        self.purpose = str(self._hello.get("purpose", ""))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_S, self._beat)
        if self._on_ready is not None:
            self._on_ready(self)
        if not self.ready.done():
            self.ready.set_result(None)

    def agreed_secret(self, purpose: str) -> bytes:
        """32 bytes that only the two ends of this connection know, the same at both; they never crossed the wire."""
        shared = self._shared(self.peer)
        salt = bytes.fromhex(self._hello["nonce"]) + bytes.fromhex(self._challenge["nonce"])
        return HKDF(hashes.SHA256(), 32, salt, purpose.encode()).derive(shared)

    # ---- calls ----

    async def call(self, question: Question[A], timeout_s: float = CALL_TIMEOUT_S) -> A:
        """Ask the peer. Raises LinkRejected (the peer's answer), LinkLost, TimeoutError."""
        return await self.begin_call(question)(timeout_s)

    def begin_call(self, question: Question[A]) -> Callable[[float], Coroutine[Any, Any, A]]:
        """Send a call now, before whatever is sent later; what is returned waits for the answer. Raises LinkLost."""
        if self.lost:
            raise LinkLost("the connection is gone")
        call_id = next(self._call_ids)
        result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = result
        call = {"id": call_id, "method": question.METHOD, "params": to_wire(question)}
        self.send(link.encode_json(MessageType.CALL, call), in_order=question.IN_ORDER)

        async def answer(timeout_s: float) -> A:
            try:
                async with asyncio.timeout(timeout_s):
                    said = await result
            finally:
                self._calls.pop(call_id, None)
            try:
                return answer_to(question, said)
            except MalformedCall as error:
                raise LinkRejected(INVALID_ANSWER, str(error)) from error

        return answer

    def _called(self, call: dict[str, Any]) -> None:
        """Have a call answered. What it asks is read at once, in the order of frames."""
        call_id, method, params = call.get("id"), str(call.get("method")), call.get("params") or {}
        if type(call_id) is not int:
            raise MalformedFrame("a CALL without a number")
        if self._answering >= ANSWERED_AT_ONCE_MAX:
            raise MalformedFrame(f"a CALL where {self._answering} others are not answered")
        answering = self.handlers.get(method)
        if answering is None:
            self._refuse(call_id, UNKNOWN_METHOD, f"no such call for this connection: {method}")
            return
        try:
            answering, question = answering.read(params)
        except MalformedCall as error:
            if answering.question.IN_ORDER:
                raise MalformedFrame(f"a call that is not understood: {error}") from error
            self._on_refused(self, MALFORMED_CALL, str(error))
            self._refuse(call_id, INVALID_REQUEST, f"{type(error).__name__}: {error}")
            return
        self.receiver.on_call(self, question)
        self._answering += 1
        self._tasks.start(f"call-{method}", self._answer(call_id, answering, question))

    async def _answer(self, call_id: int, answering: Answering, question: Question[Any]) -> None:
        method = question.METHOD
        try:
            answer = to_wire(await answering.handler(self, question))
            frame = link.encode_json(MessageType.RESULT, {"id": call_id, "result": answer})
        except LinkRejected as error:
            self._refuse(call_id, error.code, error.message)
        except LinkLost as error:
            self._refuse(call_id, reasons.LINK_LOST, str(error))
        except BrokerUnavailable as error:
            self._refuse(call_id, reasons.BROKER_UNAVAILABLE, str(error))
        except KafkaRefused as error:
            self._refuse(call_id, error.error_name, str(error))
        except (KeyError, TypeError, ValueError) as error:
            log.exception("link call failed", extra={"method": method})
            self._refuse(call_id, INVALID_REQUEST, f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("link call failed", extra={"method": method})
            self._refuse(call_id, "INTERNAL_ERROR", f"{type(error).__name__}: {error}")
        else:
            self.send(frame)
        finally:
            self._answering -= 1

    def _refuse(self, call_id: int, code: str, message: str) -> None:
        error = {"code": code, "message": message}
        self.send(link.encode_json(MessageType.RESULT, {"id": call_id, "error": error}))

    def _result(self, answer: dict[str, Any]) -> None:
        call_id, error = answer.get("id"), answer.get("error")
        if type(call_id) is not int or not isinstance(error, dict | None):
            raise MalformedFrame("a RESULT without a number, or whose error is no object")
        call = self._calls.pop(call_id, None)
        if call is None or call.done():
            return
        if error is not None:
            call.set_exception(LinkRejected(str(error.get("code")), str(error.get("message"))))
        else:
            call.set_result(answer.get("result") or {})


def _log_refused(connection: LinkConnection, code: str, why: str) -> None:
    log.warning("refused what a link peer sent", extra={"peer": connection.peer_address, "code": code, "detail": why})


def least_protected(connections: Iterable[LinkConnection]) -> LinkConnection | None:
    """The one over which somebody in between can do most; None: there is none."""
    return max(connections, key=lambda each: list(Protection).index(each.protection), default=None)


@contextmanager
def written_together(connections: Collection[Peer]) -> Iterator[None]:
    """Have what is sent over them meanwhile be written at the end, by one call of the kernel for each."""
    for connection in connections:
        connection.gather()
    try:
        yield
    finally:
        for connection in connections:
            connection.write()
