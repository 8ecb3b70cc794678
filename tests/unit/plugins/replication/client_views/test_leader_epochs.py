"""Leader epochs of topics that were made anew, as clients see them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from support.api_requests import request, versions

from isthmus_control.control_state import ControlState
from isthmus_control.truncations import EpochShift
from isthmus_plugins.api import Client, Replace, Request
from isthmus_plugins.replication.client_views.leader_epochs import LeaderEpochs
from isthmus_protocol.messages import (
    build_response,
    decode_request,
    decode_response,
    encode_response,
)
from isthmus_protocol.schema import ApiKey

ID, OTHER = (uuid.UUID(int=number, version=4) for number in (1, 2))


@pytest.fixture
def hooks() -> LeaderEpochs:
    made = LeaderEpochs()
    made.control_changed(ControlState("B", epoch_shifts={"t": EpochShift(str(ID), 1007)}))
    return made


@pytest.mark.parametrize("version", versions(ApiKey.METADATA))
def test_metadata_tells_them_shifted(hooks: LeaderEpochs, version: int) -> None:
    verdict = hooks.on_metadata(request(ApiKey.METADATA, version, {"topics": [{"name": "t"}]}))
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    partitions = [{"partition_index": 0, "leader_epoch": 2}, {"partition_index": 1, "leader_epoch": -1}]

    def told(name: str, topic_id: uuid.UUID) -> list[int]:
        topics = [{"name": name, "topic_id": topic_id, "partitions": partitions}]
        frame = encode_response(build_response(ApiKey.METADATA, version, {"topics": topics}), 5)
        assert verdict.on_response is not None
        answer: Any = decode_response(ApiKey.METADATA, version, verdict.on_response(frame))[1]
        return [getattr(each, "leader_epoch", -9) for each in answer.topics[0].partitions]

    if version < 7:
        assert told("t", ID) == [-9, -9]
        return
    assert told("t", ID) == [1009, -1]
    assert told("u", OTHER) == [2, -1]
    assert told("t", OTHER) == ([2, -1] if version >= 10 else [1009, -1]), "made anew by somebody else"


@pytest.mark.parametrize("version", versions(ApiKey.FETCH))
def test_fetch_goes_on_without_them(hooks: LeaderEpochs, version: int) -> None:
    def forwarded(name: str, topic_id: uuid.UUID) -> list[Any] | None:
        partitions = [{"partition": index, "fetch_offset": 7, "current_leader_epoch": 1009} for index in range(2)]
        topics = [{"topic": name, "topic_id": topic_id, "partitions": partitions}]
        verdict = hooks.on_fetch(request(ApiKey.FETCH, version, {"topics": topics}))
        if verdict is None:
            return None
        assert isinstance(verdict, Replace)
        assert verdict.on_response is None
        payload: Any = decode_request(verdict.frame)[1]
        assert [each.fetch_offset for each in payload.topics[0].partitions] == [7, 7]
        return [getattr(each, "current_leader_epoch", None) for each in payload.topics[0].partitions]

    assert forwarded("t", ID) == ([-1, -1] if version >= 9 else None)
    assert forwarded("u", OTHER) is None


@pytest.mark.parametrize("version", versions(ApiKey.LIST_OFFSETS))
def test_searches_go_on_without_them(hooks: LeaderEpochs, version: int) -> None:
    entry = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": 1009}
    topics = [{"name": name, "partitions": [entry]} for name in ("t", "tt")]
    verdict = hooks.on_search(request(ApiKey.LIST_OFFSETS, version, {"topics": topics}))
    assert isinstance(verdict, Replace)
    payload: Any = decode_request(verdict.frame)[1]
    epochs = [getattr(topic.partitions[0], "current_leader_epoch", None) for topic in payload.topics]
    assert epochs == ([-1, 1009] if version >= 4 else [None, None])


def test_nothing_is_looked_at_until_a_topic_was_made_anew() -> None:
    hooks = LeaderEpochs()
    nonsense = Request(b"t", True, ApiKey.FETCH, 12, 5, 0.0, Client(1, "a", 1))
    for look in (hooks.on_fetch, hooks.on_search, hooks.on_metadata):
        assert look(nonsense) is None


@pytest.mark.parametrize("version", versions(ApiKey.METADATA, 7))
@pytest.mark.parametrize("count", [1, 50])
def test_of_thousands_of_topics_only_those_made_anew_change(version: int, count: int) -> None:
    partitions = [{"partition_index": number, "leader_epoch": number - 1} for number in range(3)]
    topics = [
        {"name": f"t-{number}", "topic_id": uuid.UUID(int=number), "partitions": partitions} for number in range(500)
    ]
    anew = {f"t-{number}": EpochShift(str(uuid.UUID(int=number)), 1000) for number in range(7, 7 + count)}
    hooks = LeaderEpochs()
    hooks.control_changed(ControlState("B", epoch_shifts=anew))
    verdict = hooks.on_metadata(request(ApiKey.METADATA, version, {"topics": None}))
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    frame = encode_response(build_response(ApiKey.METADATA, version, {"topics": topics}), 5)
    told = verdict.on_response(frame)
    assert isinstance(told, bytes)
    wanted = [
        {**topic, "partitions": [{**each, "leader_epoch": (-1, 1000, 1001)[n]} for n, each in enumerate(partitions)]}
        if topic["name"] in anew
        else topic
        for topic in topics
    ]
    assert told == encode_response(build_response(ApiKey.METADATA, version, {"topics": wanted}), 5)
    assert verdict.on_response(frame) == told, "by what is remembered"
