"""Who is told why a request is refused: those alone who may describe what it is about."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any, cast

import pytest
from support.reservations import PRINCIPALS, Process, decide, request_of, started

from isthmus_control.model import ResourceType
from isthmus_plugins.api import Answer, Ask, Close, Replace, Request
from isthmus_plugins.reservation import ReservationPlugin
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    INVALID_REQUEST,
    NOT_ENOUGH_REPLICAS,
    POLICY_VIOLATION,
    TOPIC_ALREADY_EXISTS,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.messages import build_response, decode_request, decode_response, encode_response
from isthmus_protocol.schema import ApiKey

TOPIC, GROUP, USER = "secret-topic", "secret-group", "secret-user"
NEW_TOPIC = {"name": TOPIC, "num_partitions": 1, "replication_factor": 1}
CONFIG = [{"name": "a", "value": "b"}]
OPEN_CONFIG: dict[str, Any] = {"resource_type": 2, "resource_name": "open", "configs": CONFIG}
BINDING = {
    "resource_type": 2,
    "resource_name": "t",
    "resource_pattern_type": 3,
    "principal": f"User:{USER}",
    "host": "*",
    "operation": 3,
    "permission_type": 3,
}
QUOTA = {
    "entity": [{"entity_type": "user", "entity_name": USER}],
    "ops": [{"key": "request_percentage", "value": 1.0, "remove": False}],
}
TOKEN = {"owner_principal_type": "User", "owner_principal_name": USER, "renewers": [], "max_lifetime": -1}
WRITTEN = {"name": TOPIC, "partition_data": [{"index": 0, "records": b"x"}]}


REFUSED: dict[str, tuple[ApiKey, int, dict[str, Any], str, int, int]] = {
    "produce": (
        ApiKey.PRODUCE,
        9,
        {"acks": -1, "timeout": 1, "topic_data": [WRITTEN]},
        TOPIC,
        INVALID_REQUEST,
        TOPIC_AUTHORIZATION_FAILED,
    ),
    "delete topics": (
        ApiKey.DELETE_TOPICS,
        6,
        {"topics": [{"name": TOPIC}]},
        TOPIC,
        POLICY_VIOLATION,
        TOPIC_AUTHORIZATION_FAILED,
    ),
    "create a topic that exists": (
        ApiKey.CREATE_TOPICS,
        7,
        {"topics": [NEW_TOPIC]},
        TOPIC,
        TOPIC_ALREADY_EXISTS,
        TOPIC_AUTHORIZATION_FAILED,
    ),
    "create a topic that does not": (
        ApiKey.CREATE_TOPICS,
        7,
        {"topics": [{**NEW_TOPIC, "name": "secret-new"}]},
        "secret-new",
        POLICY_VIOLATION,
        TOPIC_AUTHORIZATION_FAILED,
    ),
    "configure a topic": (
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        1,
        {"resources": [{"resource_type": 2, "resource_name": TOPIC, "configs": CONFIG}]},
        TOPIC,
        POLICY_VIOLATION,
        TOPIC_AUTHORIZATION_FAILED,
    ),
    "configure a group": (
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        1,
        {"resources": [{"resource_type": 32, "resource_name": GROUP, "configs": CONFIG}]},
        GROUP,
        POLICY_VIOLATION,
        GROUP_AUTHORIZATION_FAILED,
    ),
    "join a group": (
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        1,
        {"group_id": GROUP, "member_id": "m", "member_epoch": 0},
        GROUP,
        GROUP_AUTHORIZATION_FAILED,
        GROUP_AUTHORIZATION_FAILED,
    ),
    "delete a group": (
        ApiKey.DELETE_GROUPS,
        2,
        {"groups_names": [GROUP]},
        GROUP,
        POLICY_VIOLATION,
        GROUP_AUTHORIZATION_FAILED,
    ),
    "create a binding": (
        ApiKey.CREATE_ACLS,
        3,
        {"creations": [BINDING]},
        PRINCIPALS,
        POLICY_VIOLATION,
        CLUSTER_AUTHORIZATION_FAILED,
    ),
    "set a quota": (
        ApiKey.ALTER_CLIENT_QUOTAS,
        1,
        {"entries": [QUOTA], "validate_only": False},
        PRINCIPALS,
        POLICY_VIOLATION,
        CLUSTER_AUTHORIZATION_FAILED,
    ),
    "make a token": (
        ApiKey.CREATE_DELEGATION_TOKEN,
        3,
        TOKEN,
        PRINCIPALS,
        POLICY_VIOLATION,
        DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    ),
}
"""API, version, values; what is to be described; the code with and without leave to."""
WORDLESS = (ApiKey.DELETE_GROUPS, ApiKey.CREATE_DELEGATION_TOKEN)
"""Their answers have no room for words."""


@pytest.fixture
def process() -> Process:
    process = Process()
    process.reserve("secret-")
    process.reserve("secret-", ResourceType.CONSUMER_GROUP)
    process.reserve("User:secret-", ResourceType.PRINCIPAL)
    process.existing = {TOPIC: None}
    return process


@pytest.fixture
def plugin(process: Process) -> ReservationPlugin:
    return started(process)


def _codes(value: Any) -> set[int]:
    """All error codes in a struct but 0."""
    if isinstance(value, tuple):
        return {code for each in value for code in _codes(each)}
    if not hasattr(value, "__dataclass_fields__"):
        return set()
    inside = {name: getattr(value, name) for name in value.__dataclass_fields__}
    own = {int(inside["error_code"])} if inside.get("error_code") else set()
    return own | {code for each in inside.values() for code in _codes(each)}


def _told(request: Request, frame: Any) -> tuple[set[int], bool]:
    """The codes of an answer, and whether it says why."""
    assert isinstance(frame, bytes)
    payload = decode_response(request.api_key, request.version, frame)[1]
    return _codes(payload), any(each in frame for each in (b"because", b"reserved namespace", b"exists"))


@pytest.mark.parametrize("what", REFUSED)
def test_who_may_not_describe_it_is_refused_as_a_broker_does(
    plugin: ReservationPlugin, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api, version, values, described, code, plain = REFUSED[what]
    request = request_of(api, version, values)
    verdict = decide(plugin, request, {described})
    assert isinstance(verdict, Answer)
    assert _told(request, verdict.frame) == ({code}, api not in WORDLESS)
    assert not [each for each in caplog.records if "without saying why" in each.message]

    verdict = decide(plugin, request, {"anything else"})
    assert isinstance(verdict, Answer)
    assert verdict.cause == "reserved_namespace"
    assert _told(request, verdict.frame) == ({plain}, False)
    (said,) = [each for each in caplog.records if "without saying why" in each.message]
    assert vars(said)["reason"]


def test_topics_and_groups_of_one_request_are_asked_about_in_turn(plugin: ReservationPlugin) -> None:
    resources = [
        {"resource_type": 2, "resource_name": TOPIC, "configs": CONFIG},
        {"resource_type": 32, "resource_name": GROUP, "configs": CONFIG},
        OPEN_CONFIG,
    ]
    request = request_of(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": resources})
    for described, topics, groups in (
        ({TOPIC}, POLICY_VIOLATION, GROUP_AUTHORIZATION_FAILED),
        ({GROUP}, TOPIC_AUTHORIZATION_FAILED, POLICY_VIOLATION),
    ):
        verdict = decide(plugin, request, described)
        assert isinstance(verdict, Replace)
        assert [each.resource_name for each in cast(Any, decode_request(verdict.frame)[1]).resources] == ["open"]
        assert verdict.on_response is not None
        done = {"error_code": error_code(0), "resource_type": 2, "resource_name": "open"}
        frame = verdict.on_response(
            encode_response(build_response(request.api_key, request.version, {"responses": [done]}), 7)
        )
        assert isinstance(frame, bytes)
        responses = cast(Any, decode_response(request.api_key, request.version, frame)[1]).responses
        assert [int(each.error_code) for each in responses] == [topics, groups, 0]


def test_what_is_missing_is_missing_to_who_may_describe_it(plugin: ReservationPlugin) -> None:
    """It is taken out of a request that may make its other topics."""
    values = {"topics": [{"name": "open"}, {"name": "secret-none"}], "allow_auto_topic_creation": True}
    request = request_of(ApiKey.METADATA, 12, values)
    for described, code in (
        ({"secret-none"}, UNKNOWN_TOPIC_OR_PARTITION),
        ({"open"}, TOPIC_AUTHORIZATION_FAILED),
    ):
        verdict = decide(plugin, request, described)
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        broker = build_response(ApiKey.METADATA, 12, {"topics": [{"error_code": error_code(0), "name": "open"}]})
        frame = verdict.on_response(encode_response(broker, 7))
        assert _told(request, frame) == ({code}, False)


def test_only_what_is_refused_is_asked_about(plugin: ReservationPlugin) -> None:
    assert decide(plugin, request_of(ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": "open"}]})) is None
    topics = [WRITTEN, {**WRITTEN, "name": "open"}]
    verdict = plugin.on_produce(
        request_of(ApiKey.PRODUCE, 9, {"acks": -1, "timeout": 1, "topic_data": topics}),
    )
    assert isinstance(verdict, Ask)
    asked = cast(Any, decode_request(verdict.frame)[1])
    assert [each.name for each in asked.topics] == [TOPIC]
    assert not asked.allow_auto_topic_creation


def test_a_write_that_wants_no_answer_gets_none(plugin: ReservationPlugin) -> None:
    request = request_of(ApiKey.PRODUCE, 9, {"acks": 0, "timeout": 1, "topic_data": [WRITTEN]})
    assert isinstance(plugin.on_produce(request), Close)


def test_a_lease_that_ends_while_the_broker_is_asked(plugin: ReservationPlugin, process: Process) -> None:
    """Others may have reserved more since."""
    request = request_of(ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": TOPIC}, {"name": "open"}]})
    verdict = plugin.on_change(request)
    assert isinstance(verdict, Ask)
    process.lease_deadline = time.monotonic() - 1
    answer = build_response(ApiKey.METADATA, 12, {"topics": []})
    refused = verdict.then(encode_response(answer, 0))
    assert isinstance(refused, Answer)
    assert refused.cause == "no_lease"
    assert _told(request, refused.frame)[0] == {NOT_ENOUGH_REPLICAS}


def test_what_is_free_by_the_time_that_the_broker_answers_goes_on(plugin: ReservationPlugin, process: Process) -> None:
    fresh = str(uuid.uuid4())
    process.reserve(fresh)
    request = request_of(ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": fresh}]})
    verdict = plugin.on_change(request)
    assert isinstance(verdict, Ask)
    free = Process()
    process.state = free.state.evolve(applied_offset=process.state.applied_offset)
    for changed in process._changed:
        changed(process.state)
    answer = build_response(ApiKey.METADATA, 12, {"topics": []})
    assert verdict.then(encode_response(answer, 0)) is None
