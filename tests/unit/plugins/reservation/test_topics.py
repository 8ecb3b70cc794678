"""The reservation plugin's decisions, request by request."""

from __future__ import annotations

import time
import tracemalloc
import uuid
from collections.abc import Callable
from typing import Any, cast

import pytest
from support.api_requests import versions
from support.reservations import INTERNAL_ID, Process, request_of, settled, started

from isthmus.session.dispatch import WRITES
from isthmus_control import commands as c
from isthmus_control.model import NamespaceKey, ResourceType
from isthmus_plugins.api import (
    NEED_MORE,
    WITHOUT_RECORDS,
    Answer,
    Close,
    Hold,
    Replace,
    Request,
    Verdict,
)
from isthmus_plugins.reservation import CODES, ReservationPlugin
from isthmus_plugins.reservation.groups import COMMITS, DELETIONS, MAKES_GROUP
from isthmus_plugins.reservation.principals import CHANGES as PRINCIPAL_APIS
from isthmus_plugins.reservation.untold import ASSIGNING, TELLING
from isthmus_protocol.messages import build_response, decode_request, decode_response, encode_response
from isthmus_protocol.schema import ApiKey, supported

GROUP_APIS = (*COMMITS, *MAKES_GROUP, *DELETIONS)
INVALID_REQUEST, POLICY_VIOLATION, NOT_ENOUGH_REPLICAS, UNKNOWN_TOPIC_ID = 42, 44, 19, 100
TOPIC_AUTHORIZATION_FAILED, TOPIC_ALREADY_EXISTS = 29, 36
COORDINATOR_LOAD_IN_PROGRESS = 14


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def plugin(process: Process) -> ReservationPlugin:
    plugin = started(process)
    process.reserve("closed-")
    return plugin


def produce(version: int, *topics: str | uuid.UUID, acks: int = -1, part: float = 1.0) -> Request:
    data = [
        {
            "name" if isinstance(topic, str) else "topic_id": topic,
            "partition_data": [{"index": 0, "records": b"x" * 99}],
        }
        for topic in topics
    ]
    values = {"transactional_id": None, "acks": acks, "timeout": 1000, "topic_data": data}
    return request_of(ApiKey.PRODUCE, version, values, part)


def codes(request: Request, verdict: Verdict) -> dict[Any, int]:
    """Topic (or its id) to error code, of a Produce that was answered."""
    assert isinstance(verdict, Answer)
    _, answer = decode_response(request.api_key, request.version, verdict.frame)
    return {
        topic.topic_id if request.version >= 13 else topic.name: int(topic.partition_responses[0].error_code)
        for topic in cast(Any, answer).responses
    }


@pytest.mark.parametrize("version", range(supported()[ApiKey.PRODUCE][0], 13))
def test_produce_by_name(plugin: ReservationPlugin, version: int) -> None:
    assert plugin.on_produce(produce(version, "open-1")) is None
    closed = produce(version, "closed-1")
    verdict = settled(plugin.on_produce(closed))
    assert codes(closed, verdict) == {"closed-1": INVALID_REQUEST}
    assert isinstance(verdict, Answer)
    assert verdict.cause == "reserved_namespace"
    mixed = settled(plugin.on_produce(produce(version, "open-1", "closed-1", "open-2")))
    assert isinstance(mixed, Replace)
    _, remaining = decode_request(mixed.frame)
    assert [topic.name for topic in cast(Any, remaining).topic_data] == ["open-1", "open-2"]
    refused = plugin.on_produce(produce(version, "closed-1", acks=0))
    assert isinstance(refused, Close)
    assert not refused.forward
    refused = plugin.on_produce(produce(version, "open-1", "closed-1", acks=0))
    assert isinstance(refused, Close)
    _, remaining = decode_request(refused.forward)
    assert [topic.name for topic in cast(Any, remaining).topic_data] == ["open-1"]


def test_a_part_of_a_frame_is_enough_only_for_topics_that_are_open(plugin: ReservationPlugin) -> None:
    assert plugin.on_produce(produce(9, "open-1", part=0.8)) is None
    assert plugin.on_produce(produce(9, "open-1", part=0.2)) is NEED_MORE
    assert plugin.on_produce(produce(9, "closed-1", part=0.8)) is WITHOUT_RECORDS
    assert plugin.on_produce(produce(9, "closed-1", "open-1", part=0.9)) is NEED_MORE


def test_names_that_no_topic_can_have_are_not_kept(plugin: ReservationPlugin) -> None:
    """They may be megabytes long: fifty requests left 200 MiB behind."""
    tracemalloc.start()
    try:
        for number in range(50):
            assert plugin.on_produce(produce(9, f"{number}{'x' * 100_000}")) is None
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1_000_000


def test_what_was_open_is_not_remembered_past_a_reservation(plugin: ReservationPlugin, process: Process) -> None:
    request = produce(9, "orders-1")
    assert plugin.on_produce(request) is None
    assert plugin.on_produce(request) is None
    leave = request.leave
    assert leave is not None
    assert leave.until >= request.now
    process.reserve("orders-")
    assert leave.until < request.now
    assert isinstance(settled(plugin.on_produce(request)), Answer)
    process.do(c.AlterNamespace(ResourceType.TOPIC, "orders-", False))
    assert plugin.on_produce(request) is None


def test_produce_by_id(plugin: ReservationPlugin, process: Process) -> None:
    opened, closed, new, unknown = (uuid.uuid4() for _ in range(4))
    process.known_ids = {opened.bytes: "open-1", closed.bytes: "closed-1"}
    process.ids = {new.bytes: "closed-2"}
    assert plugin.on_produce(produce(13, opened)) is None
    request = produce(13, closed)
    assert codes(request, settled(plugin.on_produce(request))) == {closed: INVALID_REQUEST}
    request = produce(13, new, unknown)
    hold = plugin.on_produce(request)
    assert isinstance(hold, Hold)
    verdict = settled(hold)
    assert codes(request, verdict) == {new: INVALID_REQUEST, unknown: UNKNOWN_TOPIC_ID}


def test_an_id_that_cannot_be_resolved_closes_the_connection(plugin: ReservationPlugin, process: Process) -> None:
    process.reachable = False
    hold = plugin.on_produce(produce(13, uuid.uuid4()))
    assert isinstance(hold, Hold)
    assert isinstance(settled(hold), Close)


def test_a_lease_that_ends_while_an_id_is_resolved(plugin: ReservationPlugin, process: Process) -> None:
    """Others may have reserved the topic since: what was held is refused."""
    topic = uuid.uuid4()
    process.ids = {topic.bytes: "open-1"}

    def lapse() -> None:
        process.lease_deadline = time.monotonic() - 1

    process.on_read = lapse
    request = produce(13, topic)
    hold = plugin.on_produce(request)
    assert isinstance(hold, Hold)
    assert codes(request, settled(hold)) == {topic: NOT_ENOUGH_REPLICAS}


CHANGES: dict[ApiKey, tuple[int, dict[str, Any]]] = {
    ApiKey.CREATE_TOPICS: (7, {"topics": [{"name": "open-1", "num_partitions": 1, "replication_factor": 1}]}),
    ApiKey.DELETE_TOPICS: (6, {"topics": [{"name": "open-1"}]}),
    ApiKey.CREATE_PARTITIONS: (3, {"topics": [{"name": "open-1", "count": 3}]}),
    ApiKey.ADD_PARTITIONS_TO_TXN: (
        3,
        {
            "v3_and_below_transactional_id": "t",
            "v3_and_below_producer_id": 1,
            "v3_and_below_producer_epoch": 0,
            "v3_and_below_topics": [{"name": "open-1", "partitions": [0]}],
        },
    ),
    ApiKey.PRODUCE: (
        9,
        {
            "transactional_id": None,
            "acks": -1,
            "timeout": 1000,
            "topic_data": [{"name": "open-1", "partition_data": [{"index": 0, "records": b"x"}]}],
        },
    ),
}


@pytest.mark.parametrize("api_key", CHANGES)
def test_without_a_lease_clients_are_told_to_try_again(
    plugin: ReservationPlugin, process: Process, api_key: ApiKey
) -> None:
    """AddPartitionsToTxn with a code that is retriable there: any other would cost the client its transaction."""
    request = request_of(api_key, *CHANGES[api_key])
    hook = plugin.on_produce if api_key is ApiKey.PRODUCE else plugin.on_change
    assert hook(request) is None
    process.lease_deadline = time.monotonic() - 1
    request.now = time.monotonic() + 7200
    verdict = hook(request)
    assert isinstance(verdict, Answer)
    assert verdict.cause == "no_lease"
    _, answer = decode_response(api_key, request.version, verdict.frame)
    transactional = api_key is ApiKey.ADD_PARTITIONS_TO_TXN
    assert f"{COORDINATOR_LOAD_IN_PROGRESS if transactional else NOT_ENOUGH_REPLICAS}>" in repr(answer)


def test_every_change_has_a_code_and_a_hook(plugin: ReservationPlugin) -> None:
    hooked = {hook.api_key for hook in plugin.isthmus_request_hooks()}
    reading = {ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS, ApiKey.FETCH, ApiKey.SHARE_FETCH}
    reading |= {ApiKey.OFFSET_FETCH, *ASSIGNING, *TELLING}
    moving = {ApiKey.ALTER_PARTITION_REASSIGNMENTS, ApiKey.ELECT_LEADERS, ApiKey.STREAMS_GROUP_HEARTBEAT}
    assert hooked == set(CODES) | reading | moving | set(GROUP_APIS) | set(PRINCIPAL_APIS)
    assert {*CODES, *GROUP_APIS, *PRINCIPAL_APIS} - WRITES == {ApiKey.JOIN_GROUP}, "a fence waits for what is refused"


@pytest.mark.parametrize("version", versions(ApiKey.CREATE_TOPICS))
def test_a_reserved_topic_that_exists_is_said_to(plugin: ReservationPlugin, process: Process, version: int) -> None:
    """Kafka Connect, and whoever else makes the topics that it needs, goes on where they are there."""

    def told(*topics: str) -> dict[str, int]:
        wanted = [{"name": name, "num_partitions": 1, "replication_factor": 1} for name in topics]
        request = request_of(ApiKey.CREATE_TOPICS, version, {"topics": wanted, "timeout": 1000})
        hold = plugin.on_change(request)
        assert isinstance(hold, Hold)
        verdict = settled(hold)
        frame: Any
        if isinstance(verdict, Answer):
            frame = verdict.frame
        elif isinstance(verdict, Close):
            return {}
        else:
            assert isinstance(verdict, Replace)
            made = [{"name": topic.name} for topic in cast(Any, decode_request(verdict.frame)[1]).topics]
            assert verdict.on_response is not None
            frame = verdict.on_response(
                encode_response(build_response(ApiKey.CREATE_TOPICS, version, {"topics": made}), 7)
            )
        answered = cast(Any, decode_response(ApiKey.CREATE_TOPICS, version, frame)[1])
        return {topic.name: int(topic.error_code) for topic in answered.topics}

    process.existing = {"closed-1": None, "open-1": None, "__isthmus_control": None}
    assert told("closed-1") == {"closed-1": TOPIC_ALREADY_EXISTS}
    assert told("closed-2", "closed-1") == {"closed-2": POLICY_VIOLATION, "closed-1": TOPIC_ALREADY_EXISTS}
    assert told("open-2", "closed-1") == {"open-2": 0, "closed-1": TOPIC_ALREADY_EXISTS}
    assert told("__isthmus_control", "closed-1") == {
        "__isthmus_control": POLICY_VIOLATION,
        "closed-1": TOPIC_ALREADY_EXISTS,
    }
    process.truncating("closed-2")
    assert told("closed-2") == {"closed-2": TOPIC_ALREADY_EXISTS}
    process.reachable = False
    assert told("closed-1") == {}
    process.reachable = True
    process.on_read = lambda: setattr(process, "lease_deadline", 0.0)
    assert told("closed-1") == {"closed-1": NOT_ENOUGH_REPLICAS}


def test_topics_that_are_nobodys_are_not_looked_up(plugin: ReservationPlugin) -> None:
    for name in ("open-1", "__isthmus_control"):
        wanted = [{"name": name, "num_partitions": 1, "replication_factor": 1}]
        request = request_of(ApiKey.CREATE_TOPICS, 7, {"topics": wanted, "timeout": 1000})
        assert not isinstance(plugin.on_change(request), Hold)


def metadata(version: int, *topics: str, create: bool = True) -> Request:
    values = {"topics": [{"name": topic} for topic in topics], "allow_auto_topic_creation": create}
    return request_of(ApiKey.METADATA, version, values)


def test_metadata_creates_nothing_in_a_reserved_namespace(plugin: ReservationPlugin, process: Process) -> None:
    assert plugin.on_metadata(metadata(12, "open-1")) is None
    assert plugin.on_metadata(metadata(12)) is None
    assert plugin.on_metadata(metadata(12, "closed-1", create=False)) is None
    alone = plugin.on_metadata(metadata(12, "closed-1"))
    assert isinstance(alone, Replace)
    _, asked = decode_request(alone.frame)
    assert not cast(Any, asked).allow_auto_topic_creation
    process.existing = {"closed-1": None}
    for version in (1, 12):  # version 1 cannot say that nothing be created
        hold = plugin.on_metadata(metadata(version, "open-1", "closed-1", "closed-2"))
        assert isinstance(hold, Hold)
        verdict = settled(hold)
        assert isinstance(verdict, Replace)
        _, asked = decode_request(verdict.frame)
        assert [topic.name for topic in cast(Any, asked).topics] == ["open-1", "closed-1"]


def test_the_proxies_own_topics_are_always_reserved(plugin: ReservationPlugin) -> None:
    request = produce(9, "__isthmus_control")
    assert codes(request, settled(plugin.on_produce(request))) == {"__isthmus_control": INVALID_REQUEST}


def test_without_a_lease_nothing_is_created_by_being_asked_for(plugin: ReservationPlugin, process: Process) -> None:
    request = metadata(12, "open-1")
    process.lease_deadline = request.now - 1
    verdict = plugin.on_metadata(request)
    assert isinstance(verdict, Replace)
    _, asked = decode_request(verdict.frame)
    assert not cast(Any, asked).allow_auto_topic_creation


def test_half_a_produce_is_not_kept_without_a_lease(plugin: ReservationPlugin, process: Process) -> None:
    process.lease_deadline = time.monotonic() - 1
    assert isinstance(plugin.on_produce(produce(9, "open-1", part=0.5)), Close)


def fetch(version: int, *topics: str | bytes) -> Request:
    asked = [
        {
            "topic" if isinstance(topic, str) else "topic_id": topic
            if isinstance(topic, str)
            else uuid.UUID(bytes=topic),
            "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1}],
        }
        for topic in topics
    ]
    return request_of(ApiKey.FETCH, version, {"max_wait": 1, "min_bytes": 1, "max_bytes": 1, "topics": asked})


def fetch_hook(plugin: ReservationPlugin) -> Callable[[Request], Verdict]:
    (hook,) = (hook for hook in plugin.isthmus_request_hooks() if hook.api_key == ApiKey.FETCH)
    return hook.on_request


@pytest.mark.parametrize("version", [4, 12])
def test_nobody_reads_the_proxies_own_topics_by_name(plugin: ReservationPlugin, version: int) -> None:
    on_fetch = fetch_hook(plugin)
    assert on_fetch(fetch(version, "open-1", "closed-1")) is None
    assert on_fetch(fetch(version, "not__isthmus_control")) is None
    assert read_codes(on_fetch, fetch(version, "open-1", "__isthmus_control")) == {
        "open-1": 0,
        "__isthmus_control": TOPIC_AUTHORIZATION_FAILED,
    }
    assert read_codes(on_fetch, fetch(version, "__isthmus_control")) == {
        "__isthmus_control": TOPIC_AUTHORIZATION_FAILED
    }


def test_nobody_reads_the_proxies_own_topics_by_id(plugin: ReservationPlugin) -> None:
    on_fetch = fetch_hook(plugin)
    other = uuid.uuid4()
    assert on_fetch(fetch(13, other.bytes)) is None
    assert read_codes(on_fetch, fetch(13, other.bytes, INTERNAL_ID)) == {
        other: 0,
        uuid.UUID(bytes=INTERNAL_ID): TOPIC_AUTHORIZATION_FAILED,
    }


@pytest.mark.parametrize("version", versions(ApiKey.SHARE_FETCH))
def test_no_share_group_does(plugin: ReservationPlugin, version: int) -> None:
    (on_fetch,) = (hook.on_request for hook in plugin.isthmus_request_hooks() if hook.api_key == ApiKey.SHARE_FETCH)
    other = uuid.uuid4()
    topics = [
        {"topic_id": topic_id, "partitions": [{"partition_index": 0}]}
        for topic_id in (uuid.UUID(bytes=INTERNAL_ID), other)
    ]
    values = {"group_id": "g", "member_id": "m", "share_session_epoch": 3, "topics": topics}
    assert read_codes(on_fetch, request_of(ApiKey.SHARE_FETCH, version, values)) == {
        uuid.UUID(bytes=INTERNAL_ID): TOPIC_AUTHORIZATION_FAILED,
        other: 0,
    }


def read_codes(hook: Callable[[Request], Verdict], request: Request) -> dict[Any, int]:
    """Topic (or its id) to error code, as a client is told by a broker that refuses it nothing."""
    verdict = hook(request)
    if isinstance(verdict, Hold):
        verdict = settled(verdict)
    if isinstance(verdict, Answer):
        frame = verdict.frame
    else:
        assert isinstance(verdict, Replace)
        asked = cast(Any, decode_request(verdict.frame)[1])
        assert getattr(asked, "session_epoch", -1) == -1, "the client is to name it in each request, and be answered"
        served = [
            {
                "topic_id" if hasattr(topic, "topic_id") else "topic": getattr(topic, "topic_id", None) or topic.topic,
                "partitions": [{"partition_index": 0, "records": b""}],
            }
            for topic in asked.topics
        ]
        broker = build_response(request.api_key, request.version, {"responses": served})
        assert verdict.on_response is not None
        frame = verdict.on_response(encode_response(broker, 7))
    assert isinstance(frame, bytes)
    told = cast(Any, decode_response(request.api_key, request.version, frame)[1])
    return {
        getattr(topic, "topic", None) or topic.topic_id: int(topic.partitions[0].error_code) for topic in told.responses
    }


def test_the_proxies_own_topics_stay_where_they_are(plugin: ReservationPlugin) -> None:
    hooks = {hook.api_key: hook.on_request for hook in plugin.isthmus_request_hooks()}

    def move(topic: str) -> Verdict:
        parts = [{"partition_index": 0, "replicas": (1,)}]
        values = {"timeout": 1000, "topics": [{"name": topic, "partitions": parts}]}
        return hooks[ApiKey.ALTER_PARTITION_REASSIGNMENTS](request_of(ApiKey.ALTER_PARTITION_REASSIGNMENTS, 0, values))

    def elect(topic: str | None, election_type: int) -> Verdict:
        chosen = None if topic is None else [{"topic": topic, "partitions": (0,)}]
        values = {"election_type": election_type, "topic_partitions": chosen, "timeout": 1000}
        return hooks[ApiKey.ELECT_LEADERS](request_of(ApiKey.ELECT_LEADERS, 2, values))

    assert move("closed-1") is None
    moved = move("__isthmus_control")
    assert isinstance(moved, Answer)
    _, answer = decode_response(ApiKey.ALTER_PARTITION_REASSIGNMENTS, 0, moved.frame)
    assert int(cast(Any, answer).error_code) == POLICY_VIOLATION
    assert elect("__isthmus_control", 0) is None
    assert elect("closed-1", 1) is None
    assert isinstance(elect("__isthmus_control", 1), Answer)
    assert isinstance(elect(None, 1), Answer)


def test_a_streams_group_makes_no_topic_in_a_reserved_namespace(plugin: ReservationPlugin) -> None:
    def heartbeat(changelog: str) -> Verdict:
        part = {
            "subtopology_id": "0",
            "source_topics": ("open-1",),
            "source_topic_regex": (),
            "state_changelog_topics": [{"name": changelog, "partitions": 0, "replication_factor": 0}],
            "repartition_sink_topics": (),
            "repartition_source_topics": [],
            "copartition_groups": [],
        }
        values = {"group_id": "g", "member_id": "m", "topology": {"epoch": 0, "subtopologies": [part]}}
        return plugin.on_streams_heartbeat(request_of(ApiKey.STREAMS_GROUP_HEARTBEAT, 0, values))

    assert heartbeat("open-app-s-changelog") is None
    assert isinstance(settled(heartbeat("closed-app-s-changelog")), Answer)


def test_what_a_newer_proxy_wrote_of_takes_no_writes_here_and_producers_try_again(
    process: Process, plugin: ReservationPlugin
) -> None:
    assert plugin.on_produce(produce(9, "orders-1")) is None
    process.newer(NamespaceKey(ResourceType.TOPIC, "orders-"))
    request = produce(9, "orders-1")
    verdict = settled(plugin.on_produce(request))
    assert codes(request, verdict) == {"orders-1": NOT_ENOUGH_REPLICAS}
    assert isinstance(verdict, Answer)
    assert b"takes no writes at this proxy now" in verdict.frame
    assert plugin.on_produce(produce(9, "other-1")) is None
