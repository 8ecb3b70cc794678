"""One connection of a session."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from isthmus.session.peer import Peer


def test_one_that_is_gone_takes_no_orders_and_minds_none() -> None:
    """The other connection of its session may end first, or be read on, before this one hears of its own end."""

    async def work() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        transport, peer = await asyncio.get_running_loop().create_connection(Peer, *server.sockets[0].getsockname())
        peer._connected(transport)
        transport.abort()
        with pytest.raises(RuntimeError):
            transport.resume_reading()
        peer.resume_reading()
        peer.pause_reading()
        server.close()

    uvloop.run(work())
