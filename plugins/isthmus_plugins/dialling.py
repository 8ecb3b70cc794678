"""Connects to a name that may stand for several addresses, of which some may not answer (KIP-302, RFC 8305)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

P = TypeVar("P", bound=asyncio.BaseProtocol)

ADDRESS_S: Final = 1.0
"""After so long without an answer the next address is tried as well; whichever answers first is taken."""


async def connect(
    protocol: Callable[[], P],
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    **more: Any,
) -> tuple[asyncio.Transport, P]:
    """As the loop's ``create_connection``, over the first of the name's addresses that takes a connection.

    ``more`` goes there, too. TLS is about the name. How long all of it may take is the caller's to bound. Raises
    OSError, with the reason of each address where there are several.
    """
    loop = asyncio.get_running_loop()
    server_hostname = host if tls is not None else None
    addresses = [] if _is_address(host) else await resolved(host, port)
    if len(addresses) < 2:
        return await loop.create_connection(protocol, host, port, ssl=tls, server_hostname=server_hostname, **more)
    sock = await _first(addresses)
    try:
        return await loop.create_connection(protocol, sock=sock, ssl=tls, server_hostname=server_hostname, **more)
    except BaseException:
        sock.close()
        raise


Address = tuple[socket.AddressFamily, Any]
"""As sockets take it."""


async def resolved(host: str, port: int) -> Sequence[Address]:
    """The addresses of a name, in the resolver's order. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _first(addresses: Sequence[Address]) -> socket.socket:
    """A socket that is connected to one of these. Raises OSError."""
    loop = asyncio.get_running_loop()
    rest = list(addresses)
    attempts: dict[asyncio.Task[socket.socket], Address] = {}
    failures: list[str] = []
    try:
        while rest or attempts:
            if rest:
                address = rest.pop(0)
                attempts[loop.create_task(_open(address), name=f"dial/{address[1][0]}")] = address
            done, _ = await asyncio.wait(
                attempts, timeout=ADDRESS_S if rest else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                address = attempts.pop(task)
                if (error := task.exception()) is None:
                    return task.result()
                failures.append(f"{address[1][0]}: {getattr(error, 'strerror', None) or error}")
    finally:
        for task in attempts:
            task.add_done_callback(_close)
            task.cancel()
    raise OSError("; ".join(failures))


async def _open(address: Address) -> socket.socket:
    family, where = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


def _close(task: asyncio.Task[socket.socket]) -> None:
    """Of one that came too late."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()
