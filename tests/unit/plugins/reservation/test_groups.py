"""What clients may do to consumer groups in reserved namespaces, request by request."""

from __future__ import annotations

import time
import uuid
from typing import Any, cast

import pytest
from support.reservations import Process, decide, request_of, started

from isthmus_control import commands as c
from isthmus_control.model import NamespaceKey, ResourceType
from isthmus_plugins.api import Answer, Replace, Request, Verdict
from isthmus_plugins.cluster import KafkaRefused
from isthmus_plugins.reservation import ReservationPlugin
from isthmus_protocol import schema
from isthmus_protocol.messages import (
    build_response,
    decode_request,
    decode_response,
    encode_response,
    parse_request_head,
)
from isthmus_protocol.refusals import Refusal, refuse_all
from isthmus_protocol.schema import ApiKey

LOADING, TOPIC_DENIED, GROUP_DENIED, POLICY_VIOLATION, UNKNOWN_TOPIC_ID = 14, 29, 30, 44, 100
GROUP, TOPIC = ResourceType.CONSUMER_GROUP, ResourceType.TOPIC


@pytest.fixture
def process() -> Process:
    """``app-`` groups and ``orders-`` topics follow over a link, ``held-`` groups are reserved, ``other-`` topics
    follow over another link."""
    process = Process()
    process.follow(GROUP, "app-")
    process.follow(TOPIC, "orders-")
    process.follow(TOPIC, "other-", "other")
    process.reserve("held-", GROUP)
    return process


@pytest.fixture
def plugin(process: Process) -> ReservationPlugin:
    return started(process)


def commit(group: str, *topics: str | uuid.UUID, version: int = 8, generation: int = 3) -> Request:
    return request_of(
        ApiKey.OFFSET_COMMIT,
        version,
        {
            "group_id": group,
            "generation_id_or_member_epoch": generation,
            "member_id": "m" if generation >= 0 else "",
            "topics": [_positions(topic) for topic in topics],
        },
    )


def txn_commit(group: str, *topics: str, version: int = 3, generation: int = -1) -> Request:
    values = {"transactional_id": "t", "group_id": group, "producer_id": 1, "producer_epoch": 0}
    values |= {"generation_id": generation, "member_id": "", "topics": [_positions(topic) for topic in topics]}
    return request_of(ApiKey.TXN_OFFSET_COMMIT, version, values)


def _positions(topic: str | uuid.UUID) -> dict[str, Any]:
    positions = [{"partition_index": index, "committed_offset": 5, "committed_metadata": ""} for index in range(2)]
    return {"name" if isinstance(topic, str) else "topic_id": topic, "partitions": positions}


def join(api_key: ApiKey, group: str, first: bool = True) -> Request:
    """A request that makes its group if there is none; not ``first``: of a member that the group knows."""
    version = schema.supported()[api_key][1]
    values: dict[str, Any] = {"group_id": group}
    if api_key == ApiKey.JOIN_GROUP:
        values |= {"session_timeout": 1, "rebalance_timeout": 1, "member_id": "" if first else "m"}
        values |= {"protocol_type": "consumer", "protocols": []}
    elif api_key == ApiKey.ADD_OFFSETS_TO_TXN:
        values |= {"transactional_id": "t", "producer_id": 1, "producer_epoch": 0}
    elif api_key == ApiKey.ALTER_SHARE_GROUP_OFFSETS:
        values |= {"topics": []}
    else:
        values |= {"member_id": "m", "member_epoch": 0 if first else 5}
    return request_of(api_key, version, values)


HEARTBEATS = (ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_HEARTBEAT)
JOINS = (ApiKey.JOIN_GROUP, *HEARTBEATS, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.ALTER_SHARE_GROUP_OFFSETS)


def answered(request: Request, verdict: Verdict) -> Any:
    assert isinstance(verdict, Answer), verdict
    return decode_response(request.api_key, request.version, verdict.frame)[1]


def codes(request: Request, verdict: Verdict) -> dict[Any, list[int]]:
    """Error codes of partitions by topic, of a request that was answered."""
    return {
        getattr(topic, "name", None) or topic.topic_id: [int(each.error_code) for each in topic.partitions]
        for topic in answered(request, verdict).topics
    }


@pytest.mark.parametrize("version", range(2, 10))
def test_a_commit_for_topics_that_follow(plugin: ReservationPlugin, version: int) -> None:
    request = commit("app-1", "orders-a", "orders-b", version=version)
    verdict = decide(plugin, request)
    assert codes(request, verdict) == {"orders-a": [TOPIC_DENIED] * 2, "orders-b": [TOPIC_DENIED] * 2}
    assert isinstance(verdict, Answer)
    assert verdict.cause == "replicated_group"


@pytest.mark.parametrize("version", range(6))
def test_a_transactional_commit(plugin: ReservationPlugin, version: int) -> None:
    request = txn_commit("app-1", "orders-a", version=version)
    assert codes(request, decide(plugin, request)) == {"orders-a": [TOPIC_DENIED] * 2}


def test_local_topics_of_the_same_group_go_through(plugin: ReservationPlugin) -> None:
    """Topics of another link are local to this one: nobody else knows the group's committed offsets in them."""
    assert decide(plugin, commit("app-1", "local", "other-a")) is None
    request = commit("app-1", "local", "orders-a", "other-a")
    verdict = decide(plugin, request)
    assert isinstance(verdict, Replace)
    remaining = cast(Any, decode_request(verdict.frame)[1])
    assert [topic.name for topic in remaining.topics] == ["local", "other-a"]
    assert verdict.on_response is not None
    granted = refuse_all(parse_request_head(verdict.frame), remaining, Refusal(0))
    assert granted is not None
    assert granted.answer is not None
    merged = verdict.on_response(granted.answer)
    found = cast(Any, decode_response(request.api_key, request.version, merged)[1])
    assert [(topic.name, [int(each.error_code) for each in topic.partitions]) for topic in found.topics] == [
        ("local", [0, 0]),
        ("orders-a", [TOPIC_DENIED] * 2),
        ("other-a", [0, 0]),
    ]


def test_other_groups_commit_what_they_like(plugin: ReservationPlugin) -> None:
    assert decide(plugin, commit("free", "orders-a")) is None
    assert decide(plugin, txn_commit("free", "orders-a")) is None


def test_a_commit_by_topic_id(plugin: ReservationPlugin, process: Process) -> None:
    orders, local, new, unknown = (uuid.uuid4() for _ in range(4))
    process.known_ids = {orders.bytes: "orders-a", local.bytes: "local"}
    process.ids = {new.bytes: "orders-b"}
    assert decide(plugin, commit("app-1", local, version=10)) is None
    request = commit("app-1", orders, new, unknown, version=10)
    assert codes(request, decide(plugin, request)) == {
        orders: [TOPIC_DENIED] * 2,
        new: [TOPIC_DENIED] * 2,
        unknown: [UNKNOWN_TOPIC_ID] * 2,
    }
    process.reachable = False
    request = commit("app-1", uuid.uuid4(), version=10)
    assert {code for found in codes(request, decide(plugin, request)).values() for code in found} == {LOADING}


def test_committed_offsets_of_a_group_that_follows_are_not_deleted(plugin: ReservationPlugin) -> None:
    values = {"group_id": "app-1", "topics": [{"name": "orders-a", "partitions": [{"partition_index": 0}]}]}
    request = request_of(ApiKey.OFFSET_DELETE, 0, values)
    assert codes(request, decide(plugin, request)) == {"orders-a": [POLICY_VIOLATION]}
    values = {"group_id": "app-1", "topics": [{"name": "local", "partitions": [{"partition_index": 0}]}]}
    assert decide(plugin, request_of(ApiKey.OFFSET_DELETE, 0, values)) is None


@pytest.mark.parametrize("version", range(3))
def test_groups_in_reserved_namespaces_are_not_deleted(plugin: ReservationPlugin, version: int) -> None:
    request = request_of(ApiKey.DELETE_GROUPS, version, {"groups_names": ["app-1", "held-1"]})
    results = answered(request, decide(plugin, request)).results
    assert {each.group_id: int(each.error_code) for each in results} == {
        "app-1": POLICY_VIOLATION,
        "held-1": POLICY_VIOLATION,
    }
    mixed = decide(plugin, request_of(ApiKey.DELETE_GROUPS, version, {"groups_names": ["app-1", "free"]}))
    assert isinstance(mixed, Replace)
    assert cast(Any, decode_request(mixed.frame)[1]).groups_names == ("free",)
    assert decide(plugin, request_of(ApiKey.DELETE_GROUPS, version, {"groups_names": ["free"]})) is None


@pytest.mark.parametrize("api_key", JOINS)
def test_consumers_of_a_group_that_follows_join(plugin: ReservationPlugin, api_key: ApiKey) -> None:
    assert decide(plugin, join(api_key, "app-1")) is None
    assert decide(plugin, join(api_key, "free")) is None


@pytest.mark.parametrize("api_key", JOINS)
def test_no_group_is_made_in_a_reserved_namespace(plugin: ReservationPlugin, process: Process, api_key: ApiKey) -> None:
    request = join(api_key, "held-1")
    answer = answered(request, decide(plugin, request))
    assert int(answer.error_code) == GROUP_DENIED
    if hasattr(answer, "error_message"):
        assert answer.error_message == "consumer group held-1 is in the reserved namespace 'held-': because"
    process.groups = {"held-1"}
    assert decide(plugin, request) is None


@pytest.mark.parametrize("api_key", [ApiKey.JOIN_GROUP, *HEARTBEATS])
def test_members_of_a_reserved_group_are_not_looked_at(
    plugin: ReservationPlugin, process: Process, api_key: ApiKey
) -> None:
    process.reachable = False
    assert decide(plugin, join(api_key, "held-1", first=False)) is None


def test_a_commit_makes_no_reserved_group(plugin: ReservationPlugin, process: Process) -> None:
    for request in (commit("held-1", "orders-a", generation=-1), txn_commit("held-1", "local", version=2)):
        assert {code for found in codes(request, decide(plugin, request)).values() for code in found} == {GROUP_DENIED}
    assert decide(plugin, commit("held-1", "orders-a", generation=3)) is None
    process.groups = {"held-1"}
    assert decide(plugin, commit("held-1", "orders-a", generation=-1)) is None
    assert decide(plugin, txn_commit("held-1", "orders-a")) is None


def test_committed_offsets_of_reserved_groups_are_not_deleted(plugin: ReservationPlugin, process: Process) -> None:
    process.groups = {"held-1"}
    values = {"group_id": "held-1", "topics": [{"name": "local", "partitions": [{"partition_index": 0}]}]}
    request = request_of(ApiKey.OFFSET_DELETE, 0, values)
    assert codes(request, decide(plugin, request)) == {"local": [POLICY_VIOLATION]}
    request = request_of(ApiKey.DELETE_SHARE_GROUP_OFFSETS, 0, {"group_id": "held-1", "topics": []})
    assert int(answered(request, decide(plugin, request)).error_code) == POLICY_VIOLATION


def test_settings_of_reserved_groups_stay(plugin: ReservationPlugin) -> None:
    def alter(group: str) -> Request:
        change = {"name": "consumer.session.timeout.ms", "config_operation": 0, "value": "50000"}
        resource = {"resource_type": 32, "resource_name": group, "configs": [change]}
        return request_of(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": False})

    request = alter("held-1")
    [entry] = answered(request, decide(plugin, request)).responses
    assert int(entry.error_code) == POLICY_VIOLATION
    assert decide(plugin, alter("free")) is None


def test_a_coordinator_that_does_not_answer_makes_clients_try_again(
    plugin: ReservationPlugin, process: Process
) -> None:
    process.reachable = False
    for request in (join(ApiKey.JOIN_GROUP, "held-1"), join(ApiKey.CONSUMER_GROUP_HEARTBEAT, "held-1")):
        assert int(answered(request, decide(plugin, request)).error_code) == LOADING


def test_a_proxy_that_may_not_look_refuses(plugin: ReservationPlugin, process: Process) -> None:
    process.refuses = KafkaRefused(GROUP_DENIED, "GROUP_AUTHORIZATION_FAILED", "not yours")
    request = join(ApiKey.CONSUMER_GROUP_HEARTBEAT, "held-1")
    answer = answered(request, decide(plugin, request))
    assert int(answer.error_code) == GROUP_DENIED
    assert "may not see" in answer.error_message


def test_without_a_lease_groups_go_on_and_none_is_made_or_moved(plugin: ReservationPlugin, process: Process) -> None:
    process.lease_deadline = time.monotonic() - 1
    process.groups = {"free"}
    assert decide(plugin, join(ApiKey.JOIN_GROUP, "free")) is None
    request = join(ApiKey.JOIN_GROUP, "new")
    assert int(answered(request, decide(plugin, request)).error_code) == LOADING
    request = commit("free", "local")
    assert codes(request, decide(plugin, request)) == {"local": [LOADING] * 2}
    request = request_of(ApiKey.DELETE_GROUPS, 2, {"groups_names": ["free"]})
    assert [int(each.error_code) for each in answered(request, decide(plugin, request)).results] == [LOADING]


def test_a_lease_that_ends_while_the_coordinator_is_asked(plugin: ReservationPlugin, process: Process) -> None:
    def lapse() -> None:
        process.lease_deadline = time.monotonic() - 1

    process.on_read = lapse
    request = join(ApiKey.JOIN_GROUP, "held-1")
    assert int(answered(request, decide(plugin, request)).error_code) == LOADING


def test_a_reservation_that_ends_while_the_coordinator_is_asked(plugin: ReservationPlugin, process: Process) -> None:
    process.on_read = lambda: process.do(c.AlterNamespace(GROUP, "held-", False))
    assert decide(plugin, join(ApiKey.JOIN_GROUP, "held-1")) is None


def test_a_group_in_a_reserved_namespace_inside_of_one_that_follows_follows(
    plugin: ReservationPlugin, process: Process
) -> None:
    process.reserve("app-x-", GROUP)
    request = commit("app-x-1", "orders-a")
    assert codes(request, decide(plugin, request)) == {"orders-a": [TOPIC_DENIED] * 2}
    assert decide(plugin, join(ApiKey.JOIN_GROUP, "app-x-1")) is None


def test_after_the_detachment_groups_are_reserved_only(plugin: ReservationPlugin, process: Process) -> None:
    process.do(c.DetachNamespace("link", GROUP, "app-"))
    assert decide(plugin, commit("app-1", "orders-a")) is None
    request = join(ApiKey.JOIN_GROUP, "app-1")
    assert int(answered(request, decide(plugin, request)).error_code) == GROUP_DENIED


def test_a_refusal_is_told_once(plugin: ReservationPlugin, process: Process, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "isthmus_plugins.reservation")
    for _ in range(3):
        decide(plugin, commit("app-1", "orders-a"))
    assert [(each.api, each.group, each.link) for each in cast(list[Any], caplog.records)] == [
        ("offset_commit", "app-1", "link")
    ]
    process.reserve("more-", GROUP)
    decide(plugin, commit("app-1", "orders-a"))
    assert len(caplog.records) == 2


def test_groups_that_a_newer_proxy_wrote_of_commit_nothing_here(process: Process) -> None:
    process.newer(NamespaceKey(GROUP, "free-"))
    plugin = started(process)
    process.groups.add("free-1")
    for request in (commit("free-1", "t"), txn_commit("free-1", "t")):
        assert codes(request, decide(plugin, request)) == {"t": [LOADING, LOADING]}
    assert decide(plugin, commit("else-1", "t")) is None


INTERNAL_GROUP = "__isthmus_control_Q0x1eG5mS1ZhYmNkZWZnaA"


def test_the_proxies_own_groups_are_nobody_elses(process: Process) -> None:
    """Also where nothing is reserved."""
    for plugin in (started(Process()), started(process)):
        for request in (commit(INTERNAL_GROUP, "t", generation=-1), txn_commit(INTERNAL_GROUP, "t")):
            verdict = decide(plugin, request)
            assert codes(request, verdict) == {"t": [GROUP_DENIED] * 2}
            assert isinstance(verdict, Answer)
            assert verdict.cause == "internal_group"
        for api_key in JOINS:
            for first in (True, False):
                request = join(api_key, INTERNAL_GROUP, first)
                assert isinstance(decide(plugin, request), Answer)
        request = request_of(ApiKey.DELETE_GROUPS, 2, {"groups_names": [INTERNAL_GROUP, "free"]})
        mixed = decide(plugin, request)
        assert isinstance(mixed, Replace)
        assert cast(Any, decode_request(mixed.frame)[1]).groups_names == ("free",)
        values = {"group_id": INTERNAL_GROUP, "topics": [{"name": "t", "partitions": [{"partition_index": 0}]}]}
        request = request_of(ApiKey.OFFSET_DELETE, 0, values)
        assert codes(request, decide(plugin, request)) == {"t": [POLICY_VIOLATION]}
        assert decide(plugin, commit("free", INTERNAL_GROUP)) is None, "the name stands elsewhere"


@pytest.mark.parametrize("version", range(schema.supported()[ApiKey.LIST_GROUPS][1] + 1))
def test_lists_of_groups_leave_the_proxies_own_out(plugin: ReservationPlugin, version: int) -> None:
    (hook,) = (hook for hook in plugin.isthmus_request_hooks() if hook.api_key == ApiKey.LIST_GROUPS)
    verdict = hook.on_request(request_of(ApiKey.LIST_GROUPS, version, {}))
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    for names in (["free", INTERNAL_GROUP, "app-1"], ["free"], []):
        groups = [{"group_id": name, "protocol_type": "consumer"} for name in names]
        answer = encode_response(build_response(ApiKey.LIST_GROUPS, version, {"groups": groups}), 7)
        seen = verdict.on_response(answer)
        assert isinstance(seen, bytes)
        correlation_id, shown = decode_response(ApiKey.LIST_GROUPS, version, seen)
        assert correlation_id == 7
        assert [each.group_id for each in cast(Any, shown).groups] == [each for each in names if each != INTERNAL_GROUP]
