"""Answers of which each element is looked at for addresses are looked at beside the loop where they have thousands."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.loop_time import LOOP_S_MAX, longest, went_out

from isthmus.session.dispatch import compile_routes, route_key
from isthmus_plugins.api import Gate
from isthmus_protocol.messages import build_response, decode_response, encode_response
from isthmus_protocol.schema import ApiKey

COUNT = 5_000
OURS = (b"proxy", 9)
CONFIG = [{"name": "listeners", "value": "PLAINTEXT://broker:9092"}, {"name": "retention.ms", "value": "7"}]


def coordinators(answer: Any) -> set[tuple[str, int]]:
    return {(each.host, each.port) for each in answer.coordinators}


def values_of(answer: Any) -> set[tuple[str, str | None]]:
    return {(each.name, each.value) for result in answer.results for each in result.configs}


@pytest.mark.parametrize(
    ("api", "version", "values", "read", "expected"),
    [
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
