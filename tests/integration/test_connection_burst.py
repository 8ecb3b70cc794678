"""Hundreds of clients that connect at once while the broker stands still, on a real one."""

from __future__ import annotations

import asyncio

import pytest
from support.links import whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.messages import build_request, encode_request
from isthmus_protocol.schema import ApiKey

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(180)]

CLIENTS = 300
"""Several times what fits a broker's queue of new connections."""
PAUSE_S = 11.0
"""Longer than one attempt to connect may take."""


async def ask(host: str, port: int) -> bool:
    """Connect, and ask what the broker speaks; whether there was an answer."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(encode_request(build_request(ApiKey.API_VERSIONS, 0, {}), 1, "burst"))
        size = await asyncio.wait_for(reader.readexactly(4), 60)
        await reader.readexactly(int.from_bytes(size, "big"))
    except asyncio.IncompleteReadError:
        return False
    finally:
        writer.close()
    return True


def test_a_burst_of_clients_waits_for_a_broker_that_stands_still(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    kafka, _ = kafka_pair
    with whole(kafka) as proxy:
        host, _, bootstrap_port = proxy.bootstrap.partition(":")
        port = int(bootstrap_port) + 1 + kafka.broker_ids[0]

        async def burst() -> int:
            await asyncio.to_thread(kafka.pause, kafka.broker_ids[0])
            answered = asyncio.gather(*(ask(host, port) for _ in range(CLIENTS)))
            try:
                await asyncio.sleep(PAUSE_S)
            finally:
                await asyncio.to_thread(kafka.resume, kafka.broker_ids[0])
            return sum(await answered)

        assert asyncio.run(burst()) == CLIENTS
        assert "broker unreachable" not in proxy.log
