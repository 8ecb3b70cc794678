"""Accepts connections of clients, peers and operators.

The loop's own servers are not used. Without file descriptors uvloop's closes whoever comes, or asks the kernel again
without a pause for as long as that lasts, and says nothing of either. And nothing bounds the connections that are in
their TLS handshake, of which it tells nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from isthmus_plugins.tasks import Supervision, Tasks

log = logging.getLogger("isthmus.accepting")

P = TypeVar("P", bound=asyncio.BaseProtocol)
T = TypeVar("T")

AT_ONCE: Final = 64
"""Connections that are accepted before others' traffic has its turn."""
AGAIN_S: Final = 0.5
"""After a failure to accept, for which the kernel would call again at once. Who connects waits meanwhile."""
TLS_HANDSHAKE_S: Final = 10.0
"""How long one may take."""
ABSENT: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
"""A name such as ``localhost`` has addresses of IPv6, also on machines that have none."""


class Acceptor(Generic[P]):
    """One address on which connections are accepted, each with a protocol of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        protocol: Callable[[], P],
        supervision: Supervision,
        *,
        arriving: set[P],
        admits: Callable[[int, str], bool],
        admitted: Callable[[P, str], None] = lambda protocol, peer: None,
        failed: Callable[[str, OSError], None] = lambda peer, error: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``arriving`` has protocols of connections that are accepted, until ``connection_made`` has been called.

        ``admits``, asked before that and before a TLS handshake, is given the descriptor's number and the peer's
        address; who is not admitted is closed. ``admitted`` is given the others' protocols and addresses, ``failed``
        the addresses of those whose TLS handshake did.
        """
        self.host = host
        self.port = port
        """The port in use, once bound."""
        self._protocol = protocol
        self._supervision = supervision
        self._arriving = arriving
        self._admits = admits
        self._admitted = admitted
        self._failed = failed
        self.tls = tls
        """Of connections to come: another one may take its place."""
        self._tasks = Tasks("accept", supervision)
        self._sockets: list[socket.socket] = []
        self._making: dict[asyncio.Task[None], tuple[P, socket.socket, str]] = {}
        self._again: asyncio.TimerHandle | None = None
        self._failing = False

    # ---- life ----

    async def bind(self) -> None:
        """Bind the port, on all addresses of the host that this machine has. Raises OSError."""
        found = await asyncio.get_running_loop().getaddrinfo(
            self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        absent: OSError | None = None
        for family, kind, number, _, address in dict.fromkeys(found):
            try:
                listening = self._bound(socket.socket(family, kind, number), address)
            except OSError as error:
                if error.errno not in ABSENT:
                    self._close_sockets()
                    raise
                absent = error
            else:
                self._sockets.append(listening)
                self.port = listening.getsockname()[1]
        if absent is not None and not self._sockets:
            raise absent

    def _bound(self, listening: socket.socket, address: Any) -> socket.socket:
        try:
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if listening.family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            host, _, *more = address
            listening.bind((host, self.port, *more))
        except OSError:
            listening.close()
            raise
        return listening

    def listen(self, backlog: int) -> None:
        """Let connections in, of which so many may wait. Raises OSError where another socket listens on the port."""
        for listening in self._sockets:
            listening.listen(backlog)
        self._go_on()

    async def close(self) -> None:
        """Accept no more. Connections that are made go on."""
        if self._again is not None:
            self._again.cancel()
        self._close_sockets()
        self._supervision.well(self)
        for protocol, sock, _ in self._making.values():
            if protocol in self._arriving and self.tls is not None:
                _end_handshake(sock)
        if self._making:  # not cancelled: uvloop would end a connection that is made and not tell its protocol
            await asyncio.wait(self._making)
        await self._tasks.close()

    def end_oldest(self) -> bool:
        """End a TLS handshake: the oldest one of the host that has most of them. False: there is none."""
        waiting = {sock: peer for protocol, sock, peer in self._making.values() if protocol in self._arriving}
        if self.tls is None or not waiting:
            return False
        _end_handshake(oldest_of_most(waiting))
        return True

    def _close_sockets(self) -> None:
        for listening in self._sockets:
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._sockets.clear()

    # ---- connections ----

    def _go_on(self) -> None:
        self._again = None
        for listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)
        for listening in self._sockets:
            if self._again is None:
                self._accept(listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                self._wait(error)
                return
            self._arrived(sock, f"{address[0]}:{address[1]}" if address else "unix")
        if self._failing:
            self._failing = False
            self._supervision.well(self)

    def _wait(self, error: OSError) -> None:
        """There are no descriptors left, or no memory."""
        loop = asyncio.get_running_loop()
        where = f"{self.host}:{self.port}" if self.port else self.host
        if not self._failing:
            log.error("no connections accepted", extra={"address": where, "error": repr(error)})
        self._failing = True
        self._supervision.failed(self, f"accept/{where}", error, loop.time())
        for listening in self._sockets:
            loop.remove_reader(listening)
        self._again = loop.call_later(AGAIN_S, self._go_on)

    def _arrived(self, sock: socket.socket, peer: str) -> None:
        if not self._admits(sock.fileno(), peer):
            sock.close()
            return
        sock.setblocking(False)
        protocol = self._protocol()
        self._admitted(protocol, peer)
        self._arriving.add(protocol)
        making = self._tasks.start("connection", self._make(sock, peer, protocol))
        self._making[making] = protocol, sock, peer
        making.add_done_callback(self._making.pop)

    async def _make(self, sock: socket.socket, peer: str, protocol: P) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self.tls,
                ssl_handshake_timeout=None if self.tls is None else TLS_HANDSHAKE_S,
            )
        except OSError as error:  # a timeout is one, too
            self._failed(peer, error)
        finally:
            self._arriving.discard(protocol)


def _end_handshake(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # it fails


def oldest_of_most(addresses: Mapping[T, str]) -> T:
    """Of connections in their order, with their peers' addresses: the first one of the host that has most of them."""
    hosts = {each: address.rpartition(":")[0] for each, address in addresses.items()}
    counts = Counter(hosts.values())
    return max(hosts, key=lambda each: counts[hosts[each]])  # the first one of several
