"""Applications get back the metadata that they have committed, in all versions of OffsetFetch."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from support.reservations import request_of

from isthmus_plugins.api import Replace
from isthmus_plugins.distribution.group_times import GroupTime
from isthmus_plugins.distributor.fetched_metadata import FetchedMetadata
from isthmus_protocol.messages import build_response, decode_response, encode_response
from isthmus_protocol.schema import ApiKey

MARKED = GroupTime(1, 2, "c1", "the application's", 8).marked()


def hook() -> FetchedMetadata:
    found = FetchedMetadata()
    found.active = True
    return found


def asked(version: int) -> Any:
    group = {"group_id": "g", "topics": None}
    values = {"groups": [group], "require_stable": False} if version >= 8 else group | {"require_stable": False}
    return request_of(ApiKey.OFFSET_FETCH, version, values)


def answer(version: int, metadata: list[str | None]) -> bytes:
    partitions = [
        {
            "partition_index": number,
            "committed_offset": 5,
            "committed_leader_epoch": -1,
            "metadata": each,
            "error_code": 0,
        }
        for number, each in enumerate(metadata)
    ]
    named: dict[str, Any] = {"topic_id": uuid.UUID(int=1)} if version >= 10 else {"name": "t"}
    inside = {"topics": [{**named, "partitions": partitions}], "error_code": 0}
    values = {"groups": [{"group_id": "g", **inside}]} if version >= 8 else inside
    return encode_response(build_response(ApiKey.OFFSET_FETCH, version, values), 7)


@pytest.mark.parametrize("version", range(1, 11))
def test_flags_are_taken_off(version: int) -> None:
    request = asked(version)
    verdict = hook().on_offset_fetch(request)
    assert isinstance(verdict, Replace)
    assert (verdict.frame, verdict.on_response is not None) == (request.frame, True)
    assert verdict.on_response is not None
    plain = answer(version, ["", None, "other"])
    assert verdict.on_response(plain) is plain
    found = verdict.on_response(answer(version, [MARKED, "its own", None]))
    assert found == answer(version, ["the application's", "its own", None])
    assert isinstance(found, bytes)
    assert decode_response(ApiKey.OFFSET_FETCH, version, found)[0] == 7


def test_nothing_is_looked_at_where_no_groups_offsets_are_distributed() -> None:
    assert FetchedMetadata().on_offset_fetch(asked(9)) is None
