"""uvicorn inside the proxy's own event loop: no signal handlers, no access log, no polling for the end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn

from isthmus.admin.app import create_app
from isthmus.admin.operations import Operations
from isthmus.admin.services import AdminServices
from isthmus_plugins.tasks import Tasks

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
        self._tasks = Tasks("admin", services.supervision)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if the address cannot be bound."""
        listening = await asyncio.get_running_loop().run_in_executor(None, _listen, self.host, self.port)
        self.port = listening.getsockname()[1]
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
        self._server = _Server(config)
        self._serving = self._tasks.start("serve", self._server.serve([listening]))
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
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.down = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the process' business

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.down.wait()


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening
