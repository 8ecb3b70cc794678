"""uvicorn inside the proxy's own event loop: no signal handlers, no access log, no polling for the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from isthmus.admin.app import create_app
from isthmus.admin.operations import Operations
from isthmus.admin.services import AdminServices
from isthmus_plugins.accepting import Acceptor
from isthmus_plugins.tasks import Supervision, Tasks

log = logging.getLogger("isthmus.admin")

CONNECTIONS_MAX: Final = 64
"""More are closed at once: operators and scrapers may have the last file descriptors, and not all of them."""
STOP_TIMEOUT_S: Final = 3
"""How long requests that are being answered may still take."""


class AdminServer:
    """Serves :func:`~isthmus.admin.app.create_app` on one address."""

    def __init__(self, services: AdminServices, host: str, port: int) -> None:
        self.host = host
        self.port = port
        """The port in use, once started: another one if it was 0."""
        self._operations = Operations(services.supervision)
        self._app = create_app(services, self._operations)
        self._supervision = services.supervision
        self._tasks = Tasks("admin", self._supervision)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if the address cannot be bound."""
        config = uvicorn.Config(
            self._app,
            loop="none",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        self._server = _Server(config, self.host, self.port, self._supervision)
        await self._server.acceptor.bind()
        self.port = self._server.acceptor.port
        self._serving = self._tasks.start("serve", self._server.serve())
        up = self._tasks.start("up", self._server.up.wait())
        await asyncio.wait([self._serving, up], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            await self._tasks.close()
            self._serving.result()

    async def stop(self) -> None:
        """Answer what is being answered, then close. Operations are cancelled first: nobody could ask for them."""
        await self._operations.close()
        if self._server is not None and self._serving is not None:
            self._server.down.set()
            await asyncio.wait([self._serving])
        await self._tasks.close()


class _Server(uvicorn.Server):
    """Takes its connections from an acceptor."""

    def __init__(self, config: uvicorn.Config, host: str, port: int, supervision: Supervision) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.down = asyncio.Event()
        self.servers = []
        self._arriving: set[asyncio.BaseProtocol] = set()
        self.acceptor: Acceptor[asyncio.BaseProtocol] = Acceptor(
            host, port, self._connection, supervision, arriving=self._arriving, admits=self._admits
        )

    def _connection(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = H11Protocol(self.config, self.server_state, self.lifespan.state)
        return protocol

    def _admits(self, descriptor: int, peer: str) -> bool:
        if len(self.server_state.connections) + len(self._arriving) < CONNECTIONS_MAX:
            return True
        log.warning("admin connection refused", extra={"peer": peer, "connections": CONNECTIONS_MAX})
        return False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the process' business

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.acceptor.listen(CONNECTIONS_MAX)
        self.started = True
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.acceptor.close()
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.down.wait()
