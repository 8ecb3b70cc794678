"""Connections are accepted, turned away, and waited with while there are no descriptors: on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.descriptors import few_left, open_now
from support.sessions import tls_contexts, until

from isthmus_plugins import accepting
from isthmus_plugins.accepting import Acceptor, oldest_of_most
from isthmus_plugins.tasks import Supervision

HOST = "127.0.0.1"


class Echo(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


class Door:
    """An acceptor, and what it says."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.supervision = Supervision()
        self.arriving: set[Echo] = set()
        self.made: list[Echo] = []
        self.asked: list[tuple[int, str]] = []
        self.failures: list[OSError] = []
        self.open = True
        self.acceptor = Acceptor(
            HOST,
            0,
            self._make,
            self.supervision,
            arriving=self.arriving,
            admits=self._admits,
            failed=lambda peer, error: self.failures.append(error),
            tls=tls,
        )

    def _make(self) -> Echo:
        self.made.append(Echo())
        return self.made[-1]

    def _admits(self, descriptor: int, peer: str) -> bool:
        self.asked.append((descriptor, peer))
        return self.open

    def client(self) -> socket.socket:
        client = socket.create_connection((HOST, self.acceptor.port), 5)
        client.setblocking(False)
        return client

    async def close(self) -> None:
        await self.acceptor.close()
        for each in self.made:
            if each.transport is not None:
                each.transport.abort()


@contextlib.asynccontextmanager
async def door(tls: ssl.SSLContext | None = None) -> AsyncIterator[Door]:
    made = Door(tls)
    await made.acceptor.bind()
    made.acceptor.listen(128)
    try:
        yield made
    finally:
        await made.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(main, 30))


async def echoes(client: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, b"said")
    return await loop.sock_recv(client, 4) == b"said"


def test_who_is_admitted_is_served_and_nobody_after_the_end() -> None:
    async def main() -> None:
        async with door() as here:
            with here.client() as client:
                assert await echoes(client)
                assert not here.arriving
                (protocol,) = here.made
                sock = protocol.transport.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert here.asked == [(sock.fileno(), "{}:{}".format(*client.getsockname()))]
                await here.acceptor.close()
                assert await echoes(client), "connections that are made go on"
            with pytest.raises(ConnectionRefusedError):
                here.client()

    run(main())


def test_an_end_in_the_moment_in_which_a_connection_is_made(tmp_path: Path) -> None:
    server, _ = tls_contexts(tmp_path)

    async def main() -> None:
        async with door() as here:
            with here.client() as client:
                await until(lambda: bool(here.made))
                await here.acceptor.close()
                assert await echoes(client)
        async with door(server) as here:
            with here.client() as client:
                await until(lambda: bool(here.made))
                await asyncio.wait_for(here.acceptor.close(), 2)
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
                assert len(here.failures) == 1

    run(main())


def test_who_is_not_admitted_is_closed() -> None:
    async def main() -> None:
        async with door() as here:
            here.open = False
            with here.client() as client:
                assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
            assert not here.made

    run(main())


def test_a_port_on_which_somebody_listens() -> None:
    async def main() -> None:
        async with door() as here:
            other = Door()
            other.acceptor.port = here.acceptor.port
            with pytest.raises(OSError, match="in use"):
                await other.acceptor.bind()
            await other.close()

    run(main())


def test_without_descriptors_clients_wait_and_nothing_spins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "AGAIN_S", 0.1)

    async def main() -> None:
        async with door() as here:
            with contextlib.ExitStack() as clients, few_left(2) as held:
                waiting = [clients.enter_context(here.client()) for _ in range(2)]
                worked = time.thread_time()
                await asyncio.sleep(1)
                assert time.thread_time() - worked < 0.3
                assert not here.made
                (failing,) = here.supervision.failing
                assert failing.name == f"accept/{HOST}:{here.acceptor.port}"
                assert "Too many open files" in failing.error
                for _ in range(4):
                    os.close(held.pop())
                for client in waiting:
                    assert await echoes(client)
                await until(lambda: not here.supervision.failing)

    run(main())
    assert [record.getMessage() for record in caplog.records].count("no connections accepted") == 1


def test_handshakes_are_bounded_before_they_begin_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, client_context = tls_contexts(tmp_path)
    monkeypatch.setattr(accepting, "TLS_HANDSHAKE_S", 0.5)

    async def main() -> None:
        async with door(server) as here:
            with here.client():
                await until(lambda: len(here.failures) == 1)
            here.asked.clear()
            here.failures.clear()
            before = open_now()  # the loop takes one for itself with its first connection
            with here.client(), here.client():
                await until(lambda: len(here.asked) == 2)
                assert len(here.arriving) == 2, "as long as the handshake lasts"
                await until(lambda: len(here.failures) == 2)
            with here.client() as stranger:
                await asyncio.get_running_loop().sock_sendall(stranger, b"GET / HTTP/1.1\r\n\r\n")
                await until(lambda: len(here.failures) == 3)
            assert not here.arriving
            await until(lambda: open_now() == before)
            reader, writer = await asyncio.open_connection(HOST, here.acceptor.port, ssl=client_context)
            writer.write(b"said")
            assert await reader.readexactly(4) == b"said"
            assert not here.arriving
            writer.close()

    run(main())


@pytest.mark.parametrize("family", [socket.AF_INET6, socket.AF_X25])
def test_addresses_that_the_machine_does_not_have_are_left_out(
    family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with IPv6 switched off: there is no such address, or no such family (X.25 has none here)."""
    found: list[Any] = [(family, socket.SOCK_STREAM, 0, "", ("2001:db8::1", 0, 0, 0))]

    async def main() -> None:
        here = Door()
        with monkeypatch.context() as resolver:
            resolver.setattr(socket, "getaddrinfo", lambda *asked, **more: found)
            with pytest.raises(OSError, match="ddress"):
                await here.acceptor.bind()
            found.append((socket.AF_INET, socket.SOCK_STREAM, 0, "", (HOST, 0)))
            await here.acceptor.bind()
        here.acceptor.listen(1)
        with here.client() as client:
            assert await echoes(client)
        await here.close()

    asyncio.run(main())


def test_who_makes_room_is_the_oldest_of_the_host_that_has_most() -> None:
    addresses = {1: "a:1", 2: "b:2", 3: "c:3", 4: "b:4", 5: "[::1]:5"}
    assert oldest_of_most(addresses) == 2
    assert oldest_of_most({1: "a:1", 2: "b:1"}) == 1


def test_a_handshake_that_does_not_go_on_makes_room(tmp_path: Path) -> None:
    server, _ = tls_contexts(tmp_path)

    async def main() -> None:
        async with door(server) as made:
            silent = [made.client() for _ in range(2)]
            await until(lambda: len(made.arriving) == 2)
            assert made.acceptor.end_oldest()
            await until(lambda: len(made.arriving) == 1)
            assert await asyncio.get_running_loop().sock_recv(silent[0], 1) == b""
            for each in silent:
                each.close()
            await until(lambda: not made.arriving)
            assert not made.acceptor.end_oldest()

    run(main())
