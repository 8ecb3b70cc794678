"""Two ends of a link's connection over loopback sockets: a listener, and diallers that know its secret or do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from isthmus_control.tokens import Token
from isthmus_plugins.replication.link.connection import Credential, LinkConnection, LinkRejected, TokenCredential
from isthmus_plugins.tasks import Supervision

SECRET = b"the link's secret"


class Listener:
    """A link listener, and the connections that it accepted. ``features``: what both ends know.

    ``token``: what diallers have to hold, in place of the secret.
    """

    def __init__(self, features: Sequence[str] = ()) -> None:
        self.features = list(features)
        self.accepted: list[LinkConnection] = []
        self.ready: asyncio.Queue[LinkConnection] = asyncio.Queue()
        self.secret = SECRET
        self.token: Token | None = None
        self.port = 0

    def made(self) -> LinkConnection:
        connection = LinkConnection(
            clock=time,
            supervision=Supervision(),
            accept=self.look_up,
            identity={"cluster_id": "B", "proxy": "b", "features": self.features},
            on_ready=self.ready.put_nowait,
        )
        self.accepted.append(connection)
        return connection

    def look_up(self, hello: dict[str, Any], connection: LinkConnection) -> Credential | TokenCredential:
        if hello.get("link_id") == "unknown":
            raise LinkRejected("LINK_NOT_FOUND", "no such link")
        if self.token is not None:
            return TokenCredential(self.token.public_key, self.token.acceptor_key)
        return Credential(self.secret)

    async def dial(self, secret: bytes = SECRET, **more: Any) -> LinkConnection:
        """``features``: what the dialler knows, if not the same."""
        hello = {"purpose": "link", "link_id": more.pop("link_id", "1")}
        features = list(more.pop("features", self.features))
        return await LinkConnection.dial(
            "127.0.0.1",
            self.port,
            clock=time,
            supervision=Supervision(),
            hello=hello,
            secret=b"" if self.token is not None else secret,
            token=self.token,
            identity={"cluster_id": "A", "proxy": "a", "features": features},
            **more,
        )

    async def pair(self, **more: Any) -> tuple[LinkConnection, LinkConnection]:
        return await self.dial(**more), await self.ready.get()


@asynccontextmanager
async def listening(features: Sequence[str] = ()) -> AsyncIterator[Listener]:
    listener = Listener(features)
    server = await asyncio.get_running_loop().create_server(listener.made, "127.0.0.1", 0)
    listener.port = server.sockets[0].getsockname()[1]
    try:
        yield listener
    finally:
        server.close()
        for connection in listener.accepted:
            await connection.stopped()
        await server.wait_closed()


def over_a_listener(work: Callable[[Listener], Awaitable[None]], features: Sequence[str] = ()) -> None:
    async def run() -> None:
        async with listening(features) as listener, asyncio.timeout(20):
            await work(listener)

    asyncio.run(run())


async def strangers_answer(listener: Listener, data: bytes) -> bytes:
    """What a listener says to somebody who sends this, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        writer.write(data)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
