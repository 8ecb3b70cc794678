"""What clients of a topic that is truncated are told, by version of what they ask."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import Any

import pytest
from support.api_requests import request, versions
from support.reservations import settled

from isthmus_control.control_state import ControlState
from isthmus_control.model import Reason
from isthmus_control.truncations import PartitionCut, PartitionView, Truncation, TruncationPhase
from isthmus_plugins.api import Answer, Client, Close, Hold, Replace, Request, Verdict
from isthmus_plugins.replication.client_views.truncating_topics import TruncatingTopics
from isthmus_protocol.messages import (
    build_response,
    decode_request,
    decode_response,
    encode_response,
)
from isthmus_protocol.refusals import offset_not_available
from isthmus_protocol.schema import ApiKey

OLD, NEW, OTHER = (uuid.UUID(int=number, version=4) for number in (1, 2, 3))
P = TruncationPhase


def truncation(phase: TruncationPhase = P.REFILLING, **more: Any) -> Truncation:
    return Truncation(
        "l",
        "t",
        str(OLD),
        Reason("CODE", "why"),
        (PartitionView(7, 4), PartitionView(8, 5)),
        None,
        "p",
        str(OTHER),
        0,
        phase,
        0,
        cuts=(PartitionCut(0, 0, 100, 105), PartitionCut(1, 0, 9, 9)),
        new_topic_id=str(NEW),
        **more,
    )


def withheld(*under_way: Truncation, past: Iterable[Truncation] = ()) -> TruncatingTopics:
    hooks = TruncatingTopics()
    show(hooks, *under_way, past=past)
    return hooks


def show(hooks: TruncatingTopics, *under_way: Truncation, past: Iterable[Truncation] = ()) -> None:
    hooks.control_changed(
        ControlState("B", truncations={each.topic: each for each in under_way}, past_truncations=tuple(past))
    )


def answered(verdict: Verdict, asked: Request) -> Any:
    assert isinstance(verdict, Answer), verdict
    correlation_id, payload = decode_response(asked.api_key, asked.version, verdict.frame)
    assert correlation_id == 5
    return payload


def fetch(version: int, topics: dict[str, uuid.UUID], session: tuple[int, int] = (0, -1), who: int = 1) -> Request:
    partitions = [{"partition": index, "fetch_offset": 50, "partition_max_bytes": 9} for index in range(2)]
    values = {
        "max_wait": 1,
        "session_id": session[0],
        "session_epoch": session[1],
        "topics": [{"topic": name, "topic_id": id_, "partitions": partitions} for name, id_ in topics.items()],
    }
    return request(ApiKey.FETCH, version, values, who)


@pytest.mark.parametrize("version", versions(ApiKey.FETCH))
def test_fetch_of_a_withheld_topic_waits_and_others_are_served(version: int) -> None:
    async def run() -> None:
        hooks = withheld(truncation())
        for topic_id in (OLD, NEW) if version >= 13 else (OLD,):
            asked = fetch(version, {"t": topic_id})
            verdict = hooks.on_fetch(asked)
            assert isinstance(verdict, Hold)
            payload = answered(await verdict.verdict, asked)
            entries = [entry for topic in payload.responses for entry in topic.partitions]
            assert [(entry.partition_index, int(entry.error_code)) for entry in entries] == [(0, 78), (1, 78)]
            assert all(entry.records == b"" for entry in entries), "null is a protocol error to librdkafka"
        both = fetch(version, {"t": OLD, "u": OTHER}, (0, 0))
        replaced = hooks.on_fetch(both)
        assert isinstance(replaced, Replace)
        _, forwarded = decode_request(replaced.frame)
        left: Any = forwarded
        assert len(left.topics) == 1
        assert getattr(left, "session_epoch", -1) == -1
        entry = {"partition_index": 0, "records": b"xy"}
        broker = build_response(
            ApiKey.FETCH, version, {"responses": [{"topic": "u", "topic_id": OTHER, "partitions": [entry]}]}
        )
        assert replaced.on_response is not None
        merged: Any = decode_response(ApiKey.FETCH, version, replaced.on_response(encode_response(broker, 5)))[1]
        codes = [[int(entry.error_code) for entry in topic.partitions] for topic in merged.responses]
        assert codes == [[78, 78], [0]]

    asyncio.run(run())


@pytest.mark.parametrize("version", versions(ApiKey.FETCH, 7))
def test_each_fetch_session_is_ended_once(version: int) -> None:
    hooks = withheld(truncation(P.SALVAGING))
    incremental = fetch(version, {}, (9, 3))
    assert hooks.on_fetch(incremental) is None
    show(hooks, truncation(P.SPOOLING))
    assert int(answered(hooks.on_fetch(incremental), incremental).error_code) == 70
    assert hooks.on_fetch(fetch(version, {"u": OTHER}, (0, 0))) is None  # a new session, without the topic
    assert hooks.on_fetch(incremental) is None
    again = fetch(version, {"t": OLD}, (9, 4))  # the topic is added to it
    assert int(answered(hooks.on_fetch(again), again).error_code) == 70
    other = fetch(version, {}, (10, 1), who=2)
    assert int(answered(hooks.on_fetch(other), other).error_code) == 70
    show(hooks)
    assert hooks.on_fetch(again) is None


def positions(api_key: int, version: int, topics: dict[str, uuid.UUID]) -> Request:
    partition = {"partition_index": 0, "committed_offset": 5, "timestamp": -1}
    return request(
        api_key,
        version,
        {"topics": [{"name": name, "topic_id": id_, "partitions": [partition]} for name, id_ in topics.items()]},
    )


@pytest.mark.parametrize(
    ("api_key", "version", "code"),
    [
        (api_key, version, offset_not_available(version) if api_key == ApiKey.LIST_OFFSETS else code)
        for api_key, code in ((ApiKey.LIST_OFFSETS, 78), (ApiKey.OFFSET_COMMIT, 14), (ApiKey.TXN_OFFSET_COMMIT, 14))
        for version in versions(api_key)
    ],
)
def test_committed_offsets_of_a_withheld_topic_are_asked_again(api_key: int, version: int, code: int) -> None:
    hooks = withheld(truncation())
    names = {"t": OLD}
    asked = request_of(api_key, version, names)
    payload = answered(hooks.on_parts(asked), asked)
    assert [int(entry.error_code) for topic in payload.topics for entry in topic.partitions] == [code]
    assert hooks.on_parts(request_of(api_key, version, {"u": OTHER})) is None
    assert isinstance(hooks.on_parts(request_of(api_key, version, {"t": OLD, "u": OTHER})), Replace)


def request_of(api_key: int, version: int, topics: dict[str, uuid.UUID]) -> Request:
    partition: dict[str, Any] = {"partition_index": 0}
    partition |= {"timestamp": -1} if api_key == ApiKey.LIST_OFFSETS else {"committed_offset": 5}
    listed = []
    for name, topic_id in topics.items():
        entry: dict[str, Any] = {"name": name, "partitions": [partition]}
        if api_key == ApiKey.OFFSET_COMMIT:
            entry["topic_id"] = topic_id
        listed.append(entry)
    return request(api_key, version, {"topics": listed})


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_FETCH))
def test_groups_ask_again_for_their_committed_offsets(version: int) -> None:
    hooks = withheld(truncation())

    def asking(topics: list[str] | None) -> Request:
        listed = None if topics is None else [{"name": name, "partition_indexes": [0]} for name in topics]
        if version >= 8:
            if version >= 10 and listed is not None:
                listed = [
                    {"topic_id": OLD if each["name"] == "t" else OTHER, "partition_indexes": [0]} for each in listed
                ]
            return request(ApiKey.OFFSET_FETCH, version, {"groups": [{"group_id": "g", "topics": listed}]})
        return request(ApiKey.OFFSET_FETCH, version, {"group_id": "g", "topics": listed})

    assert hooks.on_offset_fetch(asking(["u"])) is None
    for topics in (["t"], ["u", "t"], *([None] if version >= 2 else [])):
        asked = asking(topics)
        verdict = hooks.on_offset_fetch(asked)
        if version < 2:
            assert isinstance(verdict, Close)
            continue
        payload = answered(verdict, asked)
        code = payload.groups[0].error_code if version >= 8 else payload.error_code
        assert int(code) == 14


@pytest.mark.parametrize("version", versions(ApiKey.METADATA))
def test_metadata_is_told_from_memory_with_an_epoch_of_its_own(version: int) -> None:
    hooks = withheld(truncation())
    asked = request(ApiKey.METADATA, version, {"topics": [{"name": "t"}, {"name": "u"}]})
    verdict = settled(hooks.on_metadata(asked))
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    broker = build_response(
        ApiKey.METADATA,
        version,
        {
            "brokers": [{"node_id": 7, "host": "h", "port": 1}],
            "topics": [{"name": "t", "topic_id": None, "error_code": 3}, {"name": "u", "topic_id": OTHER}],
        },
    )
    told: Any = decode_response(ApiKey.METADATA, version, verdict.on_response(encode_response(broker, 5)))[1]
    ours = next(topic for topic in told.topics if topic.name == "t")
    assert (len(told.topics), int(ours.error_code)) == (2, 0)
    assert [(each.partition_index, each.leader_id) for each in ours.partitions] == [(0, 7), (1, 7)]
    if version >= 7:
        assert [each.leader_epoch for each in ours.partitions] == [1004, 1005]
    if version >= 10:
        assert ours.topic_id == OLD
    assert hooks.on_metadata(request(ApiKey.METADATA, version, {"topics": [{"name": "u"}]})) is None
    everything = request(ApiKey.METADATA, version, {"topics": None if version >= 1 else []})
    assert isinstance(settled(hooks.on_metadata(everything)), Replace)


@pytest.mark.parametrize("version", versions(ApiKey.OFFSET_FOR_LEADER_EPOCH))
@pytest.mark.parametrize("over", [False, True])
def test_epochs_of_the_old_topic_end_at_the_cut(version: int, over: bool) -> None:
    hooks = withheld(past=[truncation(P.DONE)]) if over else withheld(truncation())
    entry = {"partition": 0, "current_leader_epoch": 5, "leader_epoch": 4}
    asked = request(ApiKey.OFFSET_FOR_LEADER_EPOCH, version, {"topics": [{"topic": "t", "partitions": [entry]}]})
    verdict = hooks.on_leader_epoch(asked)
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None

    def told(**broker: Any) -> Any:
        topics = [{"topic": "t", "partitions": [{"partition": 0, "leader_epoch": -1, "end_offset": -1, **broker}]}]
        frame = encode_response(build_response(ApiKey.OFFSET_FOR_LEADER_EPOCH, version, {"topics": topics}), 5)
        assert verdict.on_response is not None
        answer: Any = decode_response(ApiKey.OFFSET_FOR_LEADER_EPOCH, version, verdict.on_response(frame))[1]
        (found,) = answer.topics[0].partitions
        return int(found.error_code), getattr(found, "leader_epoch", 4), found.end_offset

    assert told() == (0, 4, 100)
    if over:
        assert told(end_offset=120, leader_epoch=4) == (0, 4, 120), "the broker knows the epoch"
    else:
        assert told(error_code=3) == (0, 4, 100), "the topic is not there now"


def test_nothing_is_looked_at_while_nothing_is_withheld() -> None:
    hooks = withheld(truncation(P.COMPARING))
    nonsense = Request(b"", True, ApiKey.FETCH, 12, 5, 0.0, Client(1, "a", 1))
    for look in (hooks.on_fetch, hooks.on_parts, hooks.on_offset_fetch, hooks.on_metadata, hooks.on_leader_epoch):
        assert look(nonsense) is None


def test_clients_go_on_while_the_old_topic_waits_for_somebody() -> None:
    trouble = Reason("POSITIONS_NOT_RESTORED", "why")
    hooks = withheld(truncation(P.SPOOLING, trouble=trouble))
    assert hooks.on_fetch(fetch(12, {"t": OLD})) is None
    show(hooks, truncation(P.RESTORING, trouble=trouble))
    assert hooks.on_parts(request_of(ApiKey.LIST_OFFSETS, 5, {"t": OLD})) is not None


@pytest.mark.parametrize("version", versions(ApiKey.METADATA))
def test_a_list_of_all_topics_has_it_in_place_of_the_brokers_or_beside_them(version: int) -> None:
    hooks = withheld(truncation())
    verdict = settled(hooks.on_metadata(request(ApiKey.METADATA, version, {"topics": None if version >= 1 else []})))
    assert isinstance(verdict, Replace)
    for names in (["u", "t", "v"], ["u", "v"]):
        topics = [{"name": name, "topic_id": NEW if name == "t" else OTHER} for name in names]
        frame = encode_response(build_response(ApiKey.METADATA, version, {"topics": topics}), 5)
        assert verdict.on_response is not None
        told: Any = decode_response(ApiKey.METADATA, version, verdict.on_response(frame))[1]
        assert {each.name: len(each.partitions) for each in told.topics} == {"t": 2, "u": 0, "v": 0}
        assert {getattr(each, "topic_id", OLD) for each in told.topics if each.name == "t"} == {OLD}


@pytest.mark.parametrize("version", versions(ApiKey.METADATA, 12))
@pytest.mark.parametrize("asked", [OLD, NEW])
def test_who_asks_by_either_id_is_told_the_old_topic(version: int, asked: uuid.UUID) -> None:
    hooks = withheld(truncation())
    asking = request(ApiKey.METADATA, version, {"topics": [{"topic_id": asked, "name": None}]})
    verdict = settled(hooks.on_metadata(asking))
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    unknown = {"name": None, "topic_id": asked, "error_code": 100}
    known = {"name": "t", "topic_id": asked}
    for topic in (unknown, known):
        frame = encode_response(build_response(ApiKey.METADATA, version, {"topics": [topic]}), 5)
        told: Any = decode_response(ApiKey.METADATA, version, verdict.on_response(frame))[1]
        assert [(each.name, each.topic_id, int(each.error_code)) for each in told.topics] == [("t", OLD, 0)]


@pytest.mark.parametrize("version", versions(ApiKey.METADATA))
def test_who_may_not_describe_it_is_not_told_that_it_is_there(version: int) -> None:
    """To a list of all topics it was added for everybody, and put in the place of the broker's refusal."""
    hooks = withheld(truncation())
    for topics in ([{"name": "t"}], None if version >= 1 else []):
        asked = request(ApiKey.METADATA, version, {"topics": topics})
        assert settled(hooks.on_metadata(asked), {"u"}) is None, "the broker's answer stands"
        assert isinstance(settled(hooks.on_metadata(asked), {"t"}), Replace)
