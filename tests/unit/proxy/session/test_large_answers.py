"""Answers are searched for addresses beside the loop where they have thousands of elements, and not where of bytes."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from support.loop_time import LOOP_S_MAX, longest, went_out

from isthmus.session.dispatch import compile_routes, route_key
from isthmus_plugins.api import Gate
from isthmus_protocol.messages import build_response, decode_response, encode_response
from isthmus_protocol.schema import ApiKey

COUNT = 5_000
OURS = (b"proxy", 9)
ENDPOINTS = [{"node_id": 1, "host": "b", "port": 1}]
ONE_ID = uuid.UUID(int=1)
CONFIG = [{"name": "listeners", "value": "PLAINTEXT://broker:9092"}, {"name": "retention.ms", "value": "7"}]


NAMED = [{"name": "t", "partition_responses": [{"index": 0}]} for _ in range(COUNT)]


def coordinators(answer: Any) -> set[tuple[str, int]]:
    return {(each.host, each.port) for each in answer.coordinators}


def values_of(answer: Any) -> set[tuple[str, str | None]]:
    return {(each.name, each.value) for result in answer.results for each in result.configs}


def endpoints(answer: Any) -> set[tuple[str, int]]:
    return {(each.host, each.port) for each in answer.node_endpoints}


def produced(topics: int) -> dict[str, Any]:
    partition = {"index": 0, "base_offset": 7}
    responses = [{"topic_id": ONE_ID, "partition_responses": [partition]} for _ in range(topics)]
    return {"responses": responses, "node_endpoints": ENDPOINTS}


def fetched(topics: int, records: bytes = b"") -> dict[str, Any]:
    responses = [{"topic_id": ONE_ID, "partitions": [{"partition_index": 0, "records": records}]}] * topics
    return {"responses": responses, "node_endpoints": ENDPOINTS}


@pytest.mark.parametrize(
    ("api", "version", "values", "read", "expected"),
    [
        (ApiKey.PRODUCE, 12, produced(0) | {"responses": NAMED}, endpoints, {("proxy", 9)}),
        (ApiKey.PRODUCE, 13, produced(COUNT), endpoints, {("proxy", 9)}),
        (ApiKey.FETCH, 17, fetched(COUNT), endpoints, {("proxy", 9)}),
        (ApiKey.SHARE_FETCH, 1, fetched(COUNT), endpoints, {("proxy", 9)}),
        (
            ApiKey.FIND_COORDINATOR,
            6,
            {"coordinators": [{"key": str(each), "node_id": 1, "host": "b", "port": 1} for each in range(COUNT)]},
            coordinators,
            {("proxy", 9)},
        ),
        (
            ApiKey.DESCRIBE_CONFIGS,
            4,
            {"results": [{"resource_type": 4, "resource_name": "1", "configs": CONFIG} for _ in range(COUNT)]},
            values_of,
            {("listeners", None), ("retention.ms", "7")},
        ),
    ],
)
def test_addresses_in_thousands_of_elements(api: int, version: int, values: Any, read: Any, expected: Any) -> None:
    async def main() -> None:
        on_response = compile_routes((), lambda *_: OURS)[route_key(api, version)].on_response
        assert on_response is not None
        answer = on_response(encode_response(build_response(api, version, values), 7))
        assert isinstance(answer, Gate)
        frame, spent = await longest(went_out(answer))
        assert read(decode_response(api, version, frame)[1]) == expected
        assert spent < LOOP_S_MAX, f"{spent * 1000:.1f} ms"

    asyncio.run(main())


def test_what_has_few_elements_and_many_bytes_is_searched_at_once() -> None:
    for api, version, values in (
        (ApiKey.FETCH, 17, fetched(10, records=bytes(1 << 20))),
        (ApiKey.PRODUCE, 13, produced(500)),
        (ApiKey.METADATA, 12, {"topics": [{"name": f"topic-{each}", "partitions": []} for each in range(COUNT)]}),
    ):
        on_response = compile_routes((), lambda *_: OURS)[route_key(api, version)].on_response
        assert on_response is not None
        assert isinstance(on_response(encode_response(build_response(api, version, values), 7)), bytes)
