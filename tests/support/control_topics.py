"""What becomes of the control topic of a cluster of brokers, for tests."""

from __future__ import annotations

import asyncio

from isthmus.anchor_places import AnchorGroups
from isthmus.control_topic import TOPIC
from isthmus.kafka.client import ClusterClient
from isthmus_bench.kafka import KafkaCluster
from isthmus_control.model import AUDIT_TOPIC


def forget(cluster: KafkaCluster) -> None:
    """Make it a cluster that never had a control log."""

    async def run() -> None:
        async with ClusterClient([cluster.bootstrap_servers]) as client:
            await delete_topic(client)
            if AUDIT_TOPIC in await client.refresh([AUDIT_TOPIC]):
                await client.delete_topics([AUDIT_TOPIC])
            groups = AnchorGroups(client)._groups
            for group in await groups.ids():
                if group.startswith("__isthmus_"):
                    await groups.delete(group)

    asyncio.run(run())


async def delete_topic(client: ClusterClient) -> None:
    await client.delete_topics([TOPIC])
    while TOPIC in await client.refresh([TOPIC]):  # noqa: ASYNC110 - nothing tells when a deletion has spread
        await asyncio.sleep(0.05)
