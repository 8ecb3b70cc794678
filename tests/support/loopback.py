"""A machine's loopback interface in memory, on a loop whose clock jumps: connections that take no time of anybody's.

Whole plugins listen and dial on it as they do on sockets. Nothing is lost or late on it, as on the real one; flow
control is not modelled. Only this loop's own listeners can be reached.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from isthmus_plugins.accepting import Acceptor
from support.fake_cluster import SimulatedLoop

T = TypeVar("T")

HOST: Final = "127.0.0.1"
WAY_S: Final = 0.0001


class ShownSocket:
    """What transports show of theirs."""

    def __init__(self, port: int = 0) -> None:
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        return HOST, self._port

    def getsockopt(self, *option: int) -> bytes:
        return b"cubic\0"

    def setsockopt(self, *option: int) -> None:
        """There is nothing to be set."""


class _Transport(asyncio.Transport):
    """One end of a connection. ``None`` on its way is the end of what the other one sent."""

    peer: _Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, port: int) -> None:
        super().__init__({"peername": (HOST, port), "socket": ShownSocket(port)})
        self._loop = loop
        self._protocol = protocol
        self._on_way: deque[bytes | None] = deque()
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closed and data:
            self._send(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def _send(self, data: bytes | None) -> None:
        self._on_way.append(data)
        self._loop.call_later(WAY_S, self._arrive)

    def _arrive(self) -> None:
        data = self._on_way.popleft()  # timers of one moment come in any order, bytes do not
        if self.peer._closed:
            return
        if data is None:
            self.peer.close()
        else:
            self.peer._protocol.data_received(data)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._send(None)
            self._loop.call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class _TurnedAway(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class LoopbackAcceptor(Acceptor[Any]):
    """Accepts in memory what is dialled on the same loop."""

    async def bind(self) -> None:
        assert self.tls is None, "in memory there is no TLS"
        self.port = self.port or next(_loop().ports)
        if self.port in _loop().listening:
            raise OSError(f"port {self.port} is in use")

    def listen(self, backlog: int) -> None:
        _loop().listening[self.port] = self

    async def close(self) -> None:
        _loop().listening.pop(self.port, None)

    def arrived(self) -> asyncio.Protocol:
        """What takes a connection that was dialled."""
        protocol: asyncio.Protocol = self._protocol() if self._admits(0, f"{HOST}:0") else _TurnedAway()
        return protocol


class LoopbackLoop(SimulatedLoop):
    """A simulated loop whose listeners and connections are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.listening: dict[int, LoopbackAcceptor] = {}
        self.ports = itertools.count(40_000)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        if host not in (HOST, "localhost"):
            raise socket.gaierror(socket.EAI_NONAME, f"{host} is not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (HOST, port))]

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        assert not options.get("ssl"), "in memory there is no TLS"
        await asyncio.sleep(WAY_S)
        await self.getaddrinfo(host, port)
        listener = self.listening.get(port)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens on {host}:{port}")
        dialler, acceptor = (_Transport(self, made(), port) for made in (protocol_factory, listener.arrived))
        dialler.peer, acceptor.peer = acceptor, dialler
        for end in (acceptor, dialler):  # the dialler speaks at once
            end._protocol.connection_made(end)
        return dialler, dialler._protocol


def _loop() -> LoopbackLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, LoopbackLoop)
    return loop


def run_on_loopback(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on a loop whose clock jumps, with a loopback interface of its own."""
    with asyncio.Runner(debug=False, loop_factory=LoopbackLoop) as runner:
        return runner.run(work)
