"""Whether a group exists, as coordinators of each version tell."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.kafka import unique

from isthmus.kafka.client import ClusterClient
from isthmus.kafka.group_existence import group_exists
from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

LOADING, MEMBER_ID_REQUIRED = 14, 79
TRY_AGAIN = (LOADING, 15, 16, MEMBER_ID_REQUIRED)
MEMBER = {"member_id": "AAAAAAAAAAAAAAAAAAAAAA", "member_epoch": 0, "subscribed_topic_names": ["none"]}


def test_groups_of_every_type(kafka_of_each_version: KafkaCluster) -> None:
    kafka = kafka_of_each_version
    requests: dict[ApiKey, dict[str, Any]] = {
        ApiKey.OFFSET_COMMIT: {"generation_id_or_member_epoch": -1, "member_id": "", "topics": []},
        ApiKey.JOIN_GROUP: {
            "session_timeout": 60_000,
            "rebalance_timeout": 60_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        },
    }
    if kafka.version >= "4":
        requests[ApiKey.CONSUMER_GROUP_HEARTBEAT] = {**MEMBER, "rebalance_timeout": 5000, "topic_partitions": []}
    if kafka.version >= "4.2":
        requests[ApiKey.SHARE_GROUP_HEARTBEAT] = MEMBER

    async def scenario() -> None:
        async with ClusterClient(kafka.bootstrap_servers.split(",")) as client:
            for api_key, values in requests.items():
                group = unique("group-")
                assert not await group_exists(client, group)
                error = LOADING
                while error in TRY_AGAIN:  # its broker has just started, or a member must come with the id it got
                    connection = await client.to(await client.coordinator(group))
                    answer = await connection.call(api_key, {"group_id": group, **values}, at_most=8)
                    error = int(getattr(answer, "error_code", 0))
                    if error == MEMBER_ID_REQUIRED:
                        values = {**values, "member_id": answer.member_id}
                assert not error, (api_key.name, error)
                if api_key is ApiKey.OFFSET_COMMIT:  # of nothing: no group
                    assert not await group_exists(client, group)
                while api_key is not ApiKey.OFFSET_COMMIT and not await group_exists(client, group):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # from 4.0 on a group is described as it is replicated, after the answer

    asyncio.run(asyncio.wait_for(scenario(), 60))
