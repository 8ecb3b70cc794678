"""Commits in a group's place, as they are written."""

from __future__ import annotations

import pytest

from isthmus.kafka.groups import TRANSACTIONAL_ID, TXN_OFFSET_COMMIT_VERSIONS, txn_offset_commit_body
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
