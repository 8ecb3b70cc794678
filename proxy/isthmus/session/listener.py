"""Listeners, and what all sessions of the process share: routes, limits, counters, fences."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from isthmus.memory import Trimmer, keep_heap
from isthmus.session.authentication import certificate_principal
from isthmus.session.broker_sasl import BrokerSasl
from isthmus.session.connecting import Connector, Unreachable
from isthmus.session.deciding import Deciding
from isthmus.session.dispatch import Route, describe_key, newer_api_versions_route, route_key
from isthmus.session.downstream import Downstream, nothing_known
from isthmus.session.endpoint import Endpoint
from isthmus.session.gated_answers import GateCounts
from isthmus.session.queued_bytes import QueuedBytes
from isthmus.session.session import Session, host_of
from isthmus_plugins import descriptors
from isthmus_plugins.accepting import Acceptor
from isthmus_plugins.api import Client, Leave, Tap
from isthmus_plugins.aside import share_the_interpreter
from isthmus_plugins.clock import monotonic
from isthmus_plugins.observers import ConnectionObserver
from isthmus_plugins.rarely import Rarely, RarelyEach
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol.messages import encode_request
from isthmus_protocol.schema import ApiKey, request_type
from isthmus_protocol.wire import MalformedFrame

log = logging.getLogger("isthmus.listener")

LOST_WRITE_MARGIN_S: Final = 10.0
"""A request whose connection broke may still be taken up by the broker. After this long it has been, unless the broker
stands still: docs/operations.md says what that means."""
FENCE_TIMEOUT_S: Final = 30.0
"""As long as a broker's own request timeout."""
OF_ONE_ADDRESS: Final = "connections of one address"
BACKLOG_MIN: Final = 1024
"""Connections that wait to be accepted. The kernel has a limit of its own (net.core.somaxconn)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process takes on before it says no."""

    connections_max: int = 10_000
    in_flight_max: int = 1_000
    """Unanswered requests of one connection before its reading pauses."""
    frame_bytes_max: int = 100 * 1024 * 1024
    """As a broker's ``socket.request.max.bytes``."""
    sasl_frame_bytes_max: int = 512 * 1024
    """As a broker's ``sasl.server.max.receive.size``: of a client that has not authenticated."""
    authentication_timeout_s: float = 30.0
    """How long a client may take to authenticate, once the broker is connected."""
    request_elements_max: int = 20_000
    """Elements in arrays of one request that plugins look into."""
    queued_bytes_max: int = 256 * 1024 * 1024
    """Of all requests that are kept until they are whole; as a broker's ``queued.max.request.bytes``."""
    frame_timeout_s: float = 60.0
    """How long one of them may take, once there is room for it."""
    connections_per_address_max: int | None = None
    """Of one client's address; None: as many as of all."""


class Gateway:
    """What all sessions of the process share."""

    def __init__(
        self,
        routes: dict[int, Route],
        limits: Limits,
        supervision: Supervision,
        upstream_ssl: ssl.SSLContext | None = None,
        broker_sasl: BrokerSasl | None = None,
    ) -> None:
        """``broker_sasl``: which brokers' listeners have SASL; None: none has, whoever connects may do anything."""
        self.routes = routes
        self.broker_sasl = broker_sasl
        self.limits = limits
        self.frame_bytes_max = limits.frame_bytes_max
        self.in_flight_max = limits.in_flight_max
        self.upstream_ssl = upstream_ssl
        self.lost_write_margin_s = LOST_WRITE_MARGIN_S
        self.supervision = supervision
        self.tasks = Tasks("gateway", supervision)
        self.sessions: set[Session] = set()
        self.arriving: set[Downstream] = set()
        """Connections that were accepted and are no sessions yet: in their TLS handshake."""
        self.bytes_from_clients = 0
        self.bytes_from_brokers = 0
        self.connections_opened = 0
        self.closed_by_cause: Counter[str] = Counter()
        self.refused_by_cause: Counter[str] = Counter()
        self.gates = GateCounts()
        self.tap: Tap | None = None
        self.connection_observers: tuple[ConnectionObserver, ...] = ()
        self.vouches_until: Callable[[], float] = lambda: float("inf")
        """Until when (monotonic seconds) writes may be forwarded: the end of the proxy's lease."""
        self.deciding = Deciding(limits.request_elements_max, lambda: self.vouches_until())
        self.queued_bytes = QueuedBytes(limits.queued_bytes_max)
        self.strangers_bytes = QueuedBytes(max(1, limits.queued_bytes_max // 4))
        """Of clients that have not authenticated, beside the others': whose login is large waits for theirs alone."""
        self.connections_from: Counter[str] = Counter()
        """By client's host, those in their TLS handshake too."""
        self.write_lost_at = float("-inf")
        """When a session last ended with writes that the broker had not answered."""
        self._session_ids = itertools.count(1)
        self.fence_route = routes[route_key(ApiKey.API_VERSIONS, 0)]
        self.nothing_known = nothing_known(self.fence_route)
        self.fence_frame = encode_request(request_type(ApiKey.API_VERSIONS, 0)(), 0, None)
        self.leave = Leave(float("inf"))
        """Sessions' own, for what no hook wants to see; ends with the table of routes."""
        keep_heap()
        share_the_interpreter()
        self._trimmer = Trimmer()
        self._newer_api_versions = newer_api_versions_route()
        self._draining: asyncio.Event | None = None
        self._cut_off = RarelyEach(_log_cut_off)
        """By the broker, which ends the connection of any client that sends it what it does not understand."""
        self._turned_away = RarelyEach(_log_turned_away)
        """By the cause, and where it is the client's own, by its host."""
        self.refused_by_protocol = RarelyEach(_log_refused_by_protocol)
        """By the client's host and the cause: probes come by the hundred."""

    def set_routes(self, routes: dict[int, Route]) -> None:
        """Put another table in place, for open sessions too."""
        self.leave.until = float("-inf")
        self.leave = Leave(float("inf"))
        for key, route in routes.items():
            route.tell(self.tap)
            if key in self.routes:
                route.go_on_counting(self.routes[key])
        self.routes.clear()
        self.routes.update(routes)
        self.fence_route = routes[route_key(ApiKey.API_VERSIONS, 0)]
        self.nothing_known = nothing_known(self.fence_route)
        for session in self.sessions:
            session.downstream.forget()

    def observe(self, tap: Tap | None) -> None:
        """Have this note all traffic from now on; None: nobody."""
        self.tap = tap
        for route in self.routes.values():
            route.tell(tap)

    def unknown_route(self, key: int) -> Route:
        """The route of what the table does not know. Raises MalformedFrame: no answer can be given."""
        if key >> 16 == ApiKey.API_VERSIONS:
            return self._newer_api_versions  # not kept for each version: there are too many
        raise MalformedFrame(f"{describe_key(key)} is not served here")

    def admits(self, descriptor: int, client_address: str) -> bool:
        """Whether one more connection, which has this descriptor, may come in."""
        host = host_of(client_address)
        most = self.limits.connections_per_address_max
        if len(self.sessions) + len(self.arriving) >= self.limits.connections_max:
            self.turn_away("connection limit", client_address)
        elif descriptors.is_kept(descriptor):
            self.turn_away("file descriptors", client_address)
        elif most is not None and self.connections_from[host] >= most:
            self.turn_away(OF_ONE_ADDRESS, client_address, host)
        else:
            self.connections_from[host] += 1
            return True
        return False

    def _gone(self, client_address: str) -> None:
        """A connection that was admitted is over."""
        host = host_of(client_address)
        self.connections_from[host] -= 1
        if self.connections_from[host] <= 0:
            del self.connections_from[host]

    def turn_away(self, cause: str, detail: str, host: str = "") -> None:
        """Count a connection that is closed before it is a session. ``host``: whose own cause it is; "": nobody's."""
        self.connections_opened += 1
        self.closed_by_cause[cause] += 1
        self._turned_away.one(f"{host} {cause}", f"{detail}: {cause}")

    def tls_failed(self, client_address: str, error: OSError) -> None:
        """Count a connection whose TLS handshake failed."""
        self._gone(client_address)
        self.turn_away("TLS handshake failed", f"{client_address}: {error}", host_of(client_address))

    def open_session(self, downstream: Downstream, client_address: str, broker_id: int, listener: str) -> Session:
        self.arriving.discard(downstream)
        client = Client(next(self._session_ids), client_address, broker_id, listener)
        session = Session(self, client, downstream)
        self.sessions.add(session)
        self.connections_opened += 1
        return session

    def refused_at_once(self, client: Client) -> str | None:
        """Notify observers that a client has connected. Why it is sent away; None: it may come in."""
        refused: str | None = None
        for observer in self.connection_observers:
            try:
                verdict = observer.opened(client)
            except Exception as error:
                log.exception("connection observer failed", extra={"session": client.session_id})
                return repr(error)
            if verdict is not None and refused is None:
                refused = verdict.reason
        return refused

    def authenticated(self, client: Client) -> None:
        """Notify observers that it is known who a client is."""
        self._notify(client, lambda observer: observer.authenticated(client))

    def _notify(self, client: Client, notify: Callable[[ConnectionObserver], None]) -> None:
        for observer in self.connection_observers:
            try:
                notify(observer)
            except Exception:
                log.exception("connection observer failed", extra={"session": client.session_id})

    def session_closed(self, session: Session, cause: str, detail: str) -> None:
        """A session reports its end."""
        if session.has_unanswered_write():
            self.write_lost_at = monotonic()
        self.sessions.discard(session)
        self._gone(session.client.address)
        self._notify(session.client, lambda observer: observer.closed(session.client))
        self.closed_by_cause[cause] += 1
        self._trimmer.closed()
        if cause == "broker closed" and session.pending:
            broker = f"broker {session.client.broker_id}"
            self._cut_off.one(broker, f"{broker}, the last of {session.client.address}")
        log.debug(
            "session closed",
            extra={"session": session.client.session_id, "cause": cause, "detail": detail},
        )
        if self._draining is not None and not self.sessions:
            self._draining.set()

    def refused(self, cause: str) -> None:
        """Count a request that the proxy refused, whole or in part."""
        self.refused_by_cause[cause] += 1

    async def fence(self) -> None:
        """Return when no write that was forwarded before the call can still land.

        A session that holds it up for long, by half a request or a broker that does not answer, is closed: the margin
        for lost writes is what it then waits for.
        """
        self.deciding.fence_begins()
        loop = asyncio.get_running_loop()
        waits: dict[asyncio.Future[None], Session] = {}
        for session in tuple(self.sessions):
            passed: asyncio.Future[None] = loop.create_future()
            if not session.fence(_resolve(passed)):
                waits[passed] = session
        if waits:
            _, late = await asyncio.wait(waits, timeout=FENCE_TIMEOUT_S)
            for passed in late:
                log.warning("session held up a reservation", extra={"session": waits[passed].client.session_id})
                waits[passed].close("held up a reservation")
        wait_s = self.write_lost_at + self.lost_write_margin_s - monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    async def drain(self, timeout_s: float) -> bool:
        """Let every session answer what it was asked, then close; after ``timeout_s`` close what is left.

        False: a write of a session that was closed, then or a short while before, may still land.
        """
        self._draining = asyncio.Event()
        for session in tuple(self.sessions):
            session.drain()
        if self.sessions:
            try:
                await asyncio.wait_for(self._draining.wait(), timeout_s)
            except TimeoutError:
                log.warning("drain timed out", extra={"sessions": len(self.sessions)})
        for session in tuple(self.sessions):
            session.close("drain timed out")
        self._trimmer.stop()
        await self.tasks.close()
        return monotonic() > self.write_lost_at + self.lost_write_margin_s


def _log_cut_off(connections: int, detail: str) -> None:
    log.warning("broker closed connections with requests unanswered", extra={"connections": connections, "of": detail})


def _log_turned_away(connections: int, detail: str) -> None:
    log.warning("connections turned away", extra={"connections": connections, "detail": detail})


def _log_refused_by_protocol(connections: int, fields: dict[str, Any]) -> None:
    log.warning("connection refused by protocol", extra={"connections": connections, **fields})


def _resolve(future: asyncio.Future[None]) -> Callable[[], None]:
    def passed() -> None:
        if not future.done():
            future.set_result(None)

    return passed


class Listener:
    """One port for the clients of one broker, or of any broker (``broker_id`` -1: a bootstrap port)."""

    def __init__(
        self,
        gateway: Gateway,
        broker_id: int,
        bind: Endpoint,
        targets: Callable[[], Sequence[Endpoint]],
        client_ssl: ssl.SSLContext | None = None,
    ) -> None:
        self.gateway = gateway
        self.broker_id = broker_id
        self.bind = bind
        self._acceptor = Acceptor(
            bind.host,
            bind.port,
            lambda: Downstream(gateway, self),
            gateway.supervision,
            arriving=gateway.arriving,
            admits=gateway.admits,
            admitted=Downstream.comes_from,
            failed=gateway.tls_failed,
            tls=client_ssl,
        )
        self._connector = Connector(targets, lambda: gateway.upstream_ssl)
        self._unreachable = Rarely(self._log_unreachable)

    def use_tls(self, client_ssl: ssl.SSLContext | None) -> None:
        """Have clients that come from now on served with this."""
        self._acceptor.tls = client_ssl

    async def start(self) -> None:
        """Bind the port, which ``bind`` then has. Raises OSError. Clients come in after :meth:`accept`."""
        await self._acceptor.bind()
        self.bind = Endpoint(self.bind.host, self._acceptor.port)

    async def accept(self) -> None:
        """Let clients in. Raises OSError where another socket listens on the port: binding it does not show that."""
        self._acceptor.listen(max(BACKLOG_MIN, self.gateway.limits.connections_max))

    async def stop(self) -> None:
        """Listen no more; sessions go on."""
        await self._acceptor.close()

    def session_opened(self, downstream: Downstream, transport: asyncio.Transport) -> Session:
        """A client has connected: connect to the broker on its behalf."""
        gateway = self.gateway
        address = downstream.address
        session = gateway.open_session(downstream, address, self.broker_id, str(self.bind))
        tls = transport.get_extra_info("ssl_object")
        principal = None if tls is None else certificate_principal(tls.getpeercert())
        refused = gateway.refused_at_once(session.client)
        if refused is not None:
            session.fault("refused", refused)
            return session
        if principal is not None:
            session.client.principal = principal
            gateway.authenticated(session.client)
        _keep_alive(transport)
        gateway.tasks.start("connect", self._connect(session))
        return session

    async def _connect(self, session: Session) -> None:
        try:
            transport = await self._connector.connect(session)
        except Unreachable as error:
            self._unreachable.one(str(error))
            session.close("broker unreachable", str(error))
        else:
            if transport is not None:
                _keep_alive(transport)

    def _log_unreachable(self, connections: int, detail: str) -> None:
        extra = {"broker": self.broker_id, "connections": connections, "detail": detail}
        log.warning("broker unreachable", extra=extra)


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    """Find half-open connections: the kernel asks the peer after a minute of silence."""
    if transport.is_closing():  # its session ended while it was connecting
        return
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
