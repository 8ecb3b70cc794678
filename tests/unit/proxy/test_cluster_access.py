"""The access to its cluster is all that plugins are promised: nobody checks its structure where it is passed on."""

from __future__ import annotations

import asyncio
import gc
import inspect
from typing import Any

import pytest
from support.scripted_broker import Peer, ScriptedBroker

from isthmus.cluster_access import ClusterAccess, FetchOverConnection, ProduceOverConnection
from isthmus.kafka.client import BrokerConnection
from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, FetchConnection, ProduceConnection
from isthmus_protocol.schema import ApiKey


@pytest.mark.parametrize(
    ("own", "promised"),
    [(ClusterAccess, ClusterApi), (ProduceOverConnection, ProduceConnection), (FetchOverConnection, FetchConnection)],
)
def test_nothing_is_missing(own: type, promised: type) -> None:
    names = [name for name, _ in inspect.getmembers(promised, inspect.isfunction) if not name.startswith("_")]
    assert names
    for name in names:
        wanted, found = (inspect.signature(getattr(each, name)).parameters for each in (promised, own))
        assert list(found) == list(wanted), name


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_burst_whose_connection_is_lost_fails_once(cancelled: bool) -> None:
    """Of the answers that nobody waits for any more, nothing is said."""
    said: list[Any] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context["message"]))
        taken = asyncio.Event()

        async def lost(peer: Peer, head: Any, request: Any) -> None:
            taken.set()
            if not cancelled:
                peer.close()

        async with ScriptedBroker() as broker:
            broker.on(ApiKey.PRODUCE, lost)
            connection = await BrokerConnection.connect(broker.host, broker.port)
            batches = [{("t", 0): b"first"}, {("t", 0): b"second"}, {("t", 0): b"third"}]
            burst = ProduceOverConnection(connection).produce(batches, 1000)
            produced = asyncio.get_running_loop().create_task(burst)
            await taken.wait()
            if cancelled:
                produced.cancel()
            with pytest.raises(asyncio.CancelledError if cancelled else BrokerUnavailable):
                await produced
            await connection.close()
        gc.collect()

    asyncio.run(test())
    assert said == []
