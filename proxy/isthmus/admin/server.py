"""uvicorn inside the proxy's own event loop: no signal handlers, no access log, no polling for the end.

It has two doors, an address and a unix socket, and who comes by one keeps nobody from the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from isthmus.admin.access import Access, Peer
from isthmus.admin.app import create_app
from isthmus.admin.audit import Audit
from isthmus.admin.guard import SAID_EVERY_S, Guard
from isthmus.admin.operations import Operations
from isthmus.admin.services import AdminServices
from isthmus.admin.unix_socket import UnixAcceptor, UnixSocket
from isthmus_plugins.accepting import Acceptor
from isthmus_plugins.clock import monotonic
from isthmus_plugins.rarely import RarelyEach
from isthmus_plugins.tasks import Supervision, Tasks

log = logging.getLogger("isthmus.admin")

CONNECTIONS_MAX: Final = 64
"""Over TCP, and as many over the unix socket: operators and scrapers may have the last file descriptors, and not all of
them. Who comes when there are so many has the place of one who asks nothing, if there is one."""
ROOM_AFTER_S: Final = 1.0
"""Who is here for less has a request on its way, and need not make room."""
HEAD_TIMEOUT_S: Final = 10.0
"""How long a connection may be without a request that has arrived as far as its body."""
STOP_TIMEOUT_S: Final = 3
"""How long requests that are being answered may still take."""


class AdminServer:
    """Serves :func:`~isthmus.admin.app.create_app` on one address, and on a unix socket beside it."""

    def __init__(
        self,
        services: AdminServices,
        host: str,
        port: int,
        access: Access,
        *,
        tls: ssl.SSLContext | None = None,
        unix_socket: UnixSocket | None = None,
    ) -> None:
        """``tls``: of the address."""
        self.host = host
        self.port = port
        """The port in use, once started: another one if it was 0."""
        self._operations = Operations(services.supervision)
        self._audit = Audit(create_app(services, self._operations), services, self._operations)
        self.guard = Guard(self._audit, access)
        self._supervision = services.supervision
        self._tls = tls
        self._unix_socket = unix_socket
        self._tasks = Tasks("admin", self._supervision)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if an address cannot be bound; for the unix socket, with its path as file name."""
        config = uvicorn.Config(
            self.guard,
            loop="none",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        self._server = _Server(config, self.host, self.port, self._tls, self._unix_socket, self._supervision)
        await self._server.bind()
        self.port = self._server.port
        self._serving = self._tasks.start("serve", self._server.serve())
        up = self._tasks.start("up", self._server.up.wait())
        await asyncio.wait([self._serving, up], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            await self._tasks.close()
            self._serving.result()

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Have who comes from now on served with this."""
        self._tls = tls
        if self._server is not None:
            self._server.use_tls(tls)

    async def stop(self) -> None:
        """Answer what is being answered, then close. Operations are cancelled first: nobody could ask for them."""
        await self._operations.close()
        if self._server is not None and self._serving is not None:
            self._server.down.set()
            await asyncio.wait([self._serving])
        await self._audit.close()
        await self._tasks.close()


class Seldom(logging.Filter):
    """Lets warnings pass once in a while: uvicorn has one for each request that is none, and strangers send those."""

    def __init__(self) -> None:
        super().__init__()
        self._said = -SAID_EVERY_S

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        now = monotonic()
        if now - self._said < SAID_EVERY_S:
            return False
        self._said = now
        return True


class _Connection(H11Protocol):
    """Says to the application who it is with, and ends where nobody asks anything."""

    door: _Door
    """By which it came."""
    made_at = 0.0
    """Monotonic seconds."""
    turned_out = False
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {"peer": Peer.of(transport)}
        self.made_at = monotonic()
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def turn_out(self) -> None:
        """End it at once."""
        self.turned_out = True
        self.transport.abort()

    def _wait(self) -> None:
        """Give the next request some time, which does not begin anew with each byte of it."""
        if not self.is_idle:
            self._stop_waiting()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Door:
    """One address, and the connections that came by it."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._refused = RarelyEach(_log_refused)
        self.arriving: set[asyncio.BaseProtocol] = set()

    def admits(self, descriptor: int, peer: str) -> bool:
        made = [
            each
            for each in self._state.connections
            if isinstance(each, _Connection) and each.door is self and not each.turned_out
        ]
        if len(made) + len(self.arriving) < CONNECTIONS_MAX:
            return True
        before = monotonic() - ROOM_AFTER_S
        idle = [each for each in made if each.is_idle and each.made_at <= before]
        if idle:
            # Of those who have asked nothing yet the one that has been here longest, else of the others.
            min(idle, key=lambda each: (each.cycle is not None, each.made_at)).turn_out()
            return True
        self._refused.one(peer.rpartition(":")[0], peer)
        return False


def _log_refused(connections: int, peer: str) -> None:
    extra = {"peer": peer, "connections": connections, "detail": f"there are {CONNECTIONS_MAX} others"}
    log.warning("admin connections refused", extra=extra)


class _Server(uvicorn.Server):
    """Takes its connections from acceptors."""

    def __init__(
        self,
        config: uvicorn.Config,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        unix_socket: UnixSocket | None,
        supervision: Supervision,
    ) -> None:
        super().__init__(config)
        self._http_log = logging.getLogger("isthmus.admin.http")
        self._http_log.filters[:] = [Seldom()]
        self.up = asyncio.Event()
        self.down = asyncio.Event()
        self.servers = []
        tcp = _Door(self.server_state)
        self._tcp: Acceptor[asyncio.BaseProtocol] = Acceptor(
            host,
            port,
            lambda: self._connection(tcp),
            supervision,
            arriving=tcp.arriving,
            admits=tcp.admits,
            failed=lambda peer, error: log.debug("no TLS", extra={"peer": peer, "error": str(error)}),
            tls=tls,
        )
        self._acceptors = [self._tcp]
        if unix_socket is not None:
            local = _Door(self.server_state)
            self._acceptors.append(
                UnixAcceptor(
                    unix_socket,
                    lambda: self._connection(local),
                    supervision,
                    arriving=local.arriving,
                    admits=local.admits,
                )
            )

    @property
    def port(self) -> int:
        return self._tcp.port

    def use_tls(self, tls: ssl.SSLContext | None) -> None:
        """Have who comes to the address from now on served with this."""
        self._tcp.tls = tls

    async def bind(self) -> None:
        """Bind all addresses. Raises OSError."""
        for bound, acceptor in enumerate(self._acceptors):
            try:
                await acceptor.bind()
            except OSError:
                for other in self._acceptors[:bound]:
                    await other.close()
                raise

    def _connection(self, door: _Door) -> asyncio.BaseProtocol:
        protocol = _Connection(self.config, self.server_state, self.lifespan.state)
        protocol.door = door
        protocol.logger = self._http_log
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the process' business

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.listen(CONNECTIONS_MAX)
        self.started = True
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            await acceptor.close()
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.down.wait()
