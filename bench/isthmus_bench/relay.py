"""A bare byte relay: the floor that a proxy of this kind is measured against.

The least that a Python process on uvloop can do between a client and a broker: a connection for each connection, bytes
written as they arrive, reading paused while the other side does not take them. It knows nothing of frames.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
from typing import cast

from isthmus_bench.children import serve, server_tls

WRITE_HIGH_WATER_BYTES = 256 * 1024
"""As the proxy's."""


class Leg(asyncio.Protocol):
    """One of the two connections."""

    __slots__ = ("other", "transport")

    transport: asyncio.Transport
    other: Leg

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.other.transport.close()


class Client(Leg):
    """The client's connection; dials the broker when it comes."""

    __slots__ = ("_dialling", "_early", "_target")

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._early: list[bytes] | None = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._dialling = asyncio.get_running_loop().create_task(self._dial())

    async def _dial(self) -> None:
        try:
            _, self.other = await asyncio.get_running_loop().create_connection(Leg, *self._target)
        except OSError:
            self.transport.close()
            return
        self.other.other = self
        for data in self._early or ():
            self.other.transport.write(data)
        self._early = None
        if self.transport.is_closing():
            self.other.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._early is None:
            self.other.transport.close()


async def start(target: tuple[str, int], tls: ssl.SSLContext | None) -> int:
    """Listen on a free port, which is returned."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(target), "127.0.0.1", 0, ssl=tls, backlog=1024)
    port: int = server.sockets[0].getsockname()[1]
    return port


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", help="host:port of the broker")
    parser.add_argument("--certificate")
    chosen = parser.parse_args()
    host, _, port = chosen.target.rpartition(":")
    serve(lambda: start((host, int(port)), server_tls(chosen.certificate)))


if __name__ == "__main__":
    main()
