"""A name that stands for several addresses: whichever answers is taken, and none is waited for alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

from isthmus_plugins import dialling
from isthmus_plugins.dialling import ADDRESS_S, Address

HOST = "127.0.0.1"


@contextlib.contextmanager
def silent() -> Iterator[Address]:
    """An address that answers no connection: its queue is full."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(8):
            filling = stack.enter_context(socket.socket())
            filling.settimeout(0.1)
            try:
                filling.connect(listening.getsockname())
            except TimeoutError:
                break
        yield socket.AF_INET, listening.getsockname()


def refusing() -> Address:
    with socket.create_server((HOST, 0)) as gone:
        return socket.AF_INET, gone.getsockname()


async def listening(work: Callable[[Address], Awaitable[None]]) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(accept, HOST, 0)
    async with server:
        await work((socket.AF_INET, server.sockets[0].getsockname()))


async def connected(monkeypatch: pytest.MonkeyPatch, *addresses: Address) -> tuple[str, int]:
    """Which of the addresses it was."""

    async def resolved(host: str, port: int) -> list[Address]:
        return list(addresses)

    monkeypatch.setattr(dialling, "resolved", resolved)
    transport, _ = await dialling.connect(asyncio.Protocol, "broker.example", 9092)
    found: tuple[str, int] = transport.get_extra_info("peername")
    transport.close()
    return found


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_one_that_does_not_answer_costs_a_second(
    run: Callable[[Awaitable[None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(good: Address) -> None:
        with silent() as dead:
            began = time.monotonic()
            assert await connected(monkeypatch, dead, good) == good[1]
            assert ADDRESS_S <= time.monotonic() - began < 5

    run(listening(work))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_one_that_refuses_costs_nothing_and_the_first_that_answers_is_taken(
    run: Callable[[Awaitable[None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(good: Address) -> None:
        with silent() as dead:
            began = time.monotonic()
            assert await connected(monkeypatch, refusing(), good, dead) == good[1]
            assert time.monotonic() - began < ADDRESS_S

    run(listening(work))


def test_where_none_answers_each_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=rf"{HOST}: .*; {HOST}: "):
        asyncio.run(connected(monkeypatch, refusing(), refusing()))


def test_who_gives_up_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        with silent() as one, silent() as other:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2 * ADDRESS_S):
                    await connected(monkeypatch, one, other)
            await asyncio.sleep(0)
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("dial/")] == []

    asyncio.run(work())  # a socket that is not closed fails the test


def test_an_address_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(good: Address) -> None:
        async def resolved(host: str, port: int) -> list[Address]:
            raise AssertionError(host)

        monkeypatch.setattr(dialling, "resolved", resolved)
        transport, _ = await dialling.connect(asyncio.Protocol, *good[1])
        transport.close()

    asyncio.run(listening(work))
