"""The topics and groups that requests name, in every version that the proxy serves, compared with kio's decoding."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from isthmus_protocol import resources, schema
from isthmus_protocol.api_versions import proxied
from isthmus_protocol.messages import build_request, decode_request, encode_request
from isthmus_protocol.refusals import parts_of
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import NeedMore

ID = UUID(int=7)
VERSIONS = [(key, version) for key, (low, high) in sorted(proxied().items()) for version in range(low, high + 1)]


def frame(api_key: int, version: int, values: dict[str, Any]) -> bytes:
    fields = {each.name for each in schema.message_spec(api_key, version, "request").fields}
    known = {name: value for name, value in values.items() if name in fields}
    return encode_request(build_request(ApiKey(api_key), version, known), 1, "client")


def topics_of(api_key: int, version: int, request: bytes) -> tuple[list[bytes], list[bytes]]:
    find = resources.topics_in(api_key, version)
    return ([], []) if find is None else find(request)


@pytest.mark.parametrize(("api_key", "version"), VERSIONS)
def test_every_request_can_be_asked(api_key: int, version: int) -> None:
    request = encode_request(build_request(ApiKey(api_key), version, {}), 1, "client")
    assert topics_of(api_key, version, request) == ([], [])
    find = resources.groups_in(api_key, version)
    assert find is None or find(request) in ([], [b""])


def test_topics_of_what_carries_data() -> None:
    for version in range(3, 14):
        topic = {"topic_id": ID} if version == 13 else {"name": "t"}
        values = {"topic_data": [{**topic, "partition_data": [{"index": 0, "records": b"r"}]}]}
        request = frame(ApiKey.PRODUCE, version, values)
        assert topics_of(ApiKey.PRODUCE, version, request) == (([], [ID.bytes]) if version == 13 else ([b"t"], []))
    for version in range(4, 18):
        topic = {"topic_id": ID} if version >= 13 else {"topic": "t"}
        request = frame(ApiKey.FETCH, version, {"topics": [{**topic, "partitions": [{"partition": 0}]}]})
        assert topics_of(ApiKey.FETCH, version, request) == (([], [ID.bytes]) if version >= 13 else ([b"t"], []))


@pytest.mark.parametrize("version", [1, 5, 6])
def test_topics_that_are_named_in_several_ways(version: int) -> None:
    values = {"topic_names": ["a", "b"], "topics": [{"name": "a"}, {"name": None, "topic_id": ID}]}
    found = topics_of(ApiKey.DELETE_TOPICS, version, frame(ApiKey.DELETE_TOPICS, version, values))
    assert found == (([b"a"], [ID.bytes]) if version == 6 else ([b"a", b"b"], []))


def test_topics_deep_inside() -> None:
    transactions = [
        {"transactional_id": "x", "topics": [{"name": "a", "partitions": [0]}, {"name": "b", "partitions": [0]}]},
        {"transactional_id": "y", "topics": [{"name": "c", "partitions": [0]}]},
    ]
    request = frame(ApiKey.ADD_PARTITIONS_TO_TXN, 4, {"transactions": transactions})
    assert topics_of(ApiKey.ADD_PARTITIONS_TO_TXN, 4, request) == ([b"a", b"b", b"c"], [])
    assert {part.topic for part in parts_of(*decode_request(request))} == {"a", "b", "c"}
    older = frame(ApiKey.ADD_PARTITIONS_TO_TXN, 3, {"v3_and_below_topics": [{"name": "a", "partitions": [0]}]})
    assert topics_of(ApiKey.ADD_PARTITIONS_TO_TXN, 3, older) == ([b"a"], [])


def test_configurations_name_topics_and_groups() -> None:
    entries = [{"resource_type": kind, "resource_name": name} for kind, name in ((2, "t"), (32, "g"), (4, "1"))]
    request = frame(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": entries})
    find = resources.groups_in(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1)
    assert topics_of(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, request) == ([b"t"], [])
    assert find is not None
    assert find(request) == [b"g"]


@pytest.mark.parametrize(
    ("api_key", "values", "groups"),
    [
        (ApiKey.OFFSET_COMMIT, {"group_id": "g"}, [b"g"]),
        (ApiKey.JOIN_GROUP, {"group_id": "g"}, [b"g"]),
        (ApiKey.CONSUMER_GROUP_HEARTBEAT, {"group_id": "g"}, [b"g"]),
        (ApiKey.TXN_OFFSET_COMMIT, {"group_id": "g"}, [b"g"]),
        (ApiKey.DELETE_GROUPS, {"groups_names": ["g", "h"]}, [b"g", b"h"]),
        (ApiKey.DESCRIBE_GROUPS, {"groups": ["g", "h"]}, [b"g", b"h"]),
        (ApiKey.OFFSET_FETCH, {"group_id": "g", "groups": [{"group_id": "g"}]}, [b"g"]),
    ],
)
def test_groups_in_every_version(api_key: ApiKey, values: dict[str, Any], groups: list[bytes]) -> None:
    low, high = proxied()[api_key]
    for version in range(low, high + 1):
        find = resources.groups_in(api_key, version)
        assert find is not None
        assert find(frame(api_key, version, values)) == groups


def test_a_part_of_a_frame_that_has_the_topics_is_enough() -> None:
    values = {"topic_data": [{"name": "t", "partition_data": [{"index": 0, "records": bytes(1000)}]}]}
    request = frame(ApiKey.PRODUCE, 9, values)
    find = resources.topics_in(ApiKey.PRODUCE, 9)
    assert find is not None
    with pytest.raises(NeedMore):
        find(request[:20])
