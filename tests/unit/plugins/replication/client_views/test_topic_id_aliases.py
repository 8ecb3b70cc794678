"""Groups that name a topic by the id it had before it was truncated."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from support.api_requests import request

from isthmus_control.control_state import ControlState
from isthmus_control.truncations import Succession
from isthmus_plugins.api import Client, Replace, Request, Verdict
from isthmus_plugins.replication.client_views.topic_id_aliases import TopicIdAliases
from isthmus_protocol.messages import (
    build_response,
    decode_request,
    decode_response,
    encode_response,
)
from isthmus_protocol.schema import ApiKey

FIRST, SECOND, LAST, OTHER = (uuid.UUID(int=number, version=4) for number in range(1, 5))


def made_anew(former: uuid.UUID, successor: uuid.UUID, *cuts: int) -> Succession:
    return Succession(str(former), str(successor), cuts)


def hooks(*chain: Succession) -> TopicIdAliases:
    found = TopicIdAliases()
    found.control_changed(ControlState("B", successions={"t": chain} if chain else {}))
    return found


def commit(version: int, topics: dict[uuid.UUID, dict[int, int]]) -> Request:
    listed = [
        {
            "name": "t",
            "topic_id": topic_id,
            "partitions": [
                {"partition_index": index, "committed_offset": offset} for index, offset in partitions.items()
            ],
        }
        for topic_id, partitions in topics.items()
    ]
    return request(ApiKey.OFFSET_COMMIT, version, {"group_id": "g", "topics": listed})


def committed(verdict: Verdict) -> dict[uuid.UUID, dict[int, int]]:
    assert isinstance(verdict, Replace)
    head, payload = decode_request(verdict.frame)
    assert (head.correlation_id, head.client_id) == (5, "me")
    asked: Any = payload
    return {
        topic.topic_id: {each.partition_index: each.committed_offset for each in topic.partitions}
        for topic in asked.topics
    }


def answered(verdict: Verdict, version: int, topics: list[uuid.UUID]) -> list[uuid.UUID]:
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    listed = [{"topic_id": topic_id, "partitions": [{"partition_index": 0}]} for topic_id in topics]
    broker = build_response(ApiKey.OFFSET_COMMIT, version, {"topics": listed})
    frame = verdict.on_response(encode_response(broker, 5))
    assert isinstance(frame, bytes)
    correlation_id, payload = decode_response(ApiKey.OFFSET_COMMIT, version, frame)
    assert correlation_id == 5
    told: Any = payload
    return [topic.topic_id for topic in told.topics]


def test_a_commit_under_the_former_id_is_one_under_the_new_id_up_to_the_cut() -> None:
    verdict = hooks(made_anew(FIRST, LAST, 100, 9)).on_commit(
        commit(10, {OTHER: {0: 700}, FIRST: {0: 103, 1: 7, 2: 50}})
    )
    assert committed(verdict) == {OTHER: {0: 700}, LAST: {0: 100, 1: 7, 2: 50}}
    assert answered(verdict, 10, [OTHER, LAST]) == [OTHER, FIRST]


def test_ids_lead_to_the_last_one_and_offsets_to_the_lowest_cut() -> None:
    found = hooks(made_anew(FIRST, SECOND, 100, 9), made_anew(SECOND, LAST, 80, 20, 5))
    assert committed(found.on_commit(commit(10, {FIRST: {0: 200, 1: 200}}))) == {LAST: {0: 80, 1: 9}}
    assert committed(found.on_commit(commit(10, {SECOND: {0: 200, 1: 200, 2: 6}}))) == {LAST: {0: 80, 1: 20, 2: 5}}


@pytest.mark.parametrize("version", range(2, 10))
def test_commits_by_name_pass(version: int) -> None:
    assert hooks(made_anew(FIRST, LAST, 100)).on_commit(commit(version, {FIRST: {0: 103}})) is None


def test_what_names_no_former_id_passes() -> None:
    found = hooks(made_anew(FIRST, LAST, 100))
    assert found.on_commit(commit(10, {LAST: {0: 1}, OTHER: {0: 1}, SECOND: {0: 1}})) is None
    assert found.on_commit(commit(10, {FIRST: {0: 1}, LAST: {0: 2}})) is None, "the broker answers for the former one"
    nonsense = Request(b"", True, ApiKey.OFFSET_COMMIT, 10, 5, 0.0, Client(1, "a", 1))
    assert hooks().on_commit(nonsense) is None
    assert hooks().on_offset_fetch(nonsense) is None


def test_each_group_is_told_its_committed_offsets_by_the_ids_that_it_named() -> None:
    found = hooks(made_anew(FIRST, LAST, 100))

    def asking(groups: dict[str, uuid.UUID | None]) -> Request:
        listed = [
            {"group_id": group, "topics": None if each is None else [{"topic_id": each, "partition_indexes": [0]}]}
            for group, each in groups.items()
        ]
        return request(ApiKey.OFFSET_FETCH, 10, {"groups": listed})

    assert found.on_offset_fetch(asking({"new": LAST, "all": None})) is None
    verdict = found.on_offset_fetch(asking({"old": FIRST, "new": LAST, "all": None}))
    assert isinstance(verdict, Replace)
    asked: Any = decode_request(verdict.frame)[1]
    named = [None if group.topics is None else [topic.topic_id for topic in group.topics] for group in asked.groups]
    assert named == [[LAST], [LAST], None]
    topics = [{"topic_id": LAST, "partitions": [{"partition_index": 0, "committed_offset": 100}]}]
    broker = build_response(
        ApiKey.OFFSET_FETCH,
        10,
        {"groups": [{"group_id": group, "topics": topics} for group in ("old", "new", "all")]},
    )
    assert verdict.on_response is not None
    frame = verdict.on_response(encode_response(broker, 5))
    assert isinstance(frame, bytes)
    told: Any = decode_response(ApiKey.OFFSET_FETCH, 10, frame)[1]
    assert {group.group_id: [topic.topic_id for topic in group.topics] for group in told.groups} == {
        "old": [FIRST],
        "new": [LAST],
        "all": [LAST],
    }
