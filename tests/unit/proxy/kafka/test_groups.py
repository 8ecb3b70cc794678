"""Commits in a group's place, as they are written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.scripted_broker import ScriptedBroker, metadata_of

from isthmus.kafka import groups
from isthmus.kafka.client import ClusterClient
from isthmus.kafka.groups import TRANSACTIONAL_ID, TXN_OFFSET_COMMIT_VERSIONS, GroupClient, txn_offset_commit_body
from isthmus_plugins.cluster import CommittedOffset
from isthmus_protocol.messages import build_request, encode_request
from isthmus_protocol.schema import ApiKey

OFFSETS = {
    ("t", 0): CommittedOffset(5, ""),
    ("ü" * 100, 3): CommittedOffset(2**40, "m" * 300),
    ("t", 2**31 - 1): CommittedOffset(0, "ä"),
}


@pytest.mark.parametrize("group", ["g", "a-group-with-a-long-name-" * 9])
@pytest.mark.parametrize("version", range(TXN_OFFSET_COMMIT_VERSIONS[0], TXN_OFFSET_COMMIT_VERSIONS[1] + 1))
def test_a_commit_is_what_kio_writes(version: int, group: str) -> None:
    topics: dict[str, list[dict[str, object]]] = {}
    for (topic, partition), each in OFFSETS.items():
        entry = {
            "partition_index": partition,
            "committed_offset": each.offset,
            "committed_leader_epoch": -1,
            "committed_metadata": each.metadata,
        }
        topics.setdefault(topic, []).append(entry)
    values = {
        "transactional_id": TRANSACTIONAL_ID,
        "group_id": group,
        "producer_id": -1,
        "producer_epoch": -1,
        "generation_id": -1,
        "topics": [{"name": name, "partitions": entries} for name, entries in topics.items()],
    }
    frame = encode_request(build_request(ApiKey.TXN_OFFSET_COMMIT, version, values), 5, "client")
    head = 4 + 2 + 2 + 4 + 2 + len("client") + 1  # size, key, version, correlation id, client id, no tags
    assert frame[head:] == txn_offset_commit_body(group, OFFSETS)


def test_coordinators_of_groups_that_come_and_go_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "COORDINATORS_MAX", 10)

    def coordinators(request: Any) -> dict[str, Any]:
        return {"coordinators": [{"key": key, "node_id": 1, "error_code": 0} for key in request.coordinator_keys]}

    async def main() -> None:
        async with ScriptedBroker(1) as broker:
            broker.answers(ApiKey.METADATA, metadata_of([broker], {}))
            broker.answers(ApiKey.FIND_COORDINATOR, coordinators)
            async with ClusterClient([broker.address]) as client:
                group_client = GroupClient(client)
                for number in range(50):
                    asked = [f"console-consumer-{number + each}" for each in range(3)]
                    assert await group_client._find(asked) == dict.fromkeys(asked, 1)
                    assert len(group_client._coordinators) <= 10

    asyncio.run(main())
