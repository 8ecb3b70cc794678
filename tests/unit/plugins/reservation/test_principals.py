"""What administrators may do to principals in reserved namespaces, request by request."""

from __future__ import annotations

import time
import uuid
from typing import Any, cast

import pytest
from support.reservations import Process, decide, request_of, started

from isthmus_control.acls import AclBinding, AclResource, Pattern, Permission
from isthmus_control.model import ResourceType
from isthmus_plugins.api import Answer, Replace, Request, Verdict
from isthmus_plugins.cluster import KafkaRefused
from isthmus_plugins.reservation import ReservationPlugin
from isthmus_plugins.reservation.principals import UNNAMED_MAX
from isthmus_protocol.messages import build_response, decode_request, decode_response, encode_response
from isthmus_protocol.schema import ApiKey

NOT_ENOUGH_REPLICAS, POLICY_VIOLATION, SECURITY_DISABLED = 19, 44, 54
CLUSTER_AUTHORIZATION_FAILED = 31
READ = 3
VERSIONS = range(1, 4)
WHY = "principal User:app-1 is in the reserved namespace 'User:app-': because"


@pytest.fixture
def process() -> Process:
    process = Process()
    process.reserve("User:app-", ResourceType.PRINCIPAL)
    process.bindings = frozenset({binding("User:app-1", "orders"), binding("User:bob", "orders"), binding("User:bob")})
    return process


@pytest.fixture
def plugin(process: Process) -> ReservationPlugin:
    return started(process)


def binding(principal: str, topic: str = "t") -> AclBinding:
    return AclBinding(AclResource.TOPIC, topic, Pattern.LITERAL, principal, "*", READ, Permission.ALLOW)


def create(*principals: str, version: int = 3) -> Request:
    creations = [
        {
            "resource_type": 2,
            "resource_name": "t",
            "resource_pattern_type": 3,
            "principal": principal,
            "host": "*",
            "operation": READ,
            "permission_type": 3,
        }
        for principal in principals
    ]
    return request_of(ApiKey.CREATE_ACLS, version, {"creations": creations})


def delete(*wanted: tuple[str | None, str | None], version: int = 3) -> Request:
    """Filters by (principal, topic)."""
    filters = [
        {
            "resource_type_filter": 2,
            "resource_name_filter": topic,
            "pattern_type_filter": 3,
            "principal_filter": principal,
            "host_filter": None,
            "operation": 1,
            "permission_type": 1,
        }
        for principal, topic in wanted
    ]
    return request_of(ApiKey.DELETE_ACLS, version, {"filters": filters})


def answered(request: Request, verdict: Verdict) -> Any:
    assert isinstance(verdict, Answer), verdict
    return decode_response(request.api_key, request.version, verdict.frame)[1]


def deleted(request: Request, verdict: Verdict, broker: int = 0) -> Any:
    """What a client is told of its filters where the broker answers what is forwarded with this code."""
    assert isinstance(verdict, Replace), verdict
    assert verdict.on_response is not None
    wanted = cast(Any, decode_request(verdict.frame)[1]).filters
    values = {"filter_results": [{"error_code": broker, "error_message": "the broker's"} for _ in wanted]}
    frame = verdict.on_response(encode_response(build_response(ApiKey.DELETE_ACLS, request.version, values), 7))
    assert isinstance(frame, bytes)
    return cast(Any, decode_response(ApiKey.DELETE_ACLS, request.version, frame)[1]).filter_results


@pytest.mark.parametrize("version", VERSIONS)
def test_bindings_are_not_created(plugin: ReservationPlugin, version: int) -> None:
    assert decide(plugin, create("User:bob", "Group:app-1", version=version)) is None
    request = create("User:app-1", version=version)
    [result] = answered(request, decide(plugin, request)).results
    assert (int(result.error_code), result.error_message) == (POLICY_VIOLATION, WHY)
    mixed = decide(plugin, create("User:app-1", "User:bob", version=version))
    assert isinstance(mixed, Replace)
    assert [each.principal for each in cast(Any, decode_request(mixed.frame)[1]).creations] == ["User:bob"]


@pytest.mark.parametrize("version", VERSIONS)
def test_bindings_are_not_deleted(plugin: ReservationPlugin, version: int) -> None:
    assert decide(plugin, delete(("User:bob", None), (None, "t"), version=version)) is None
    request = delete(("User:app-2", "t"), (None, "orders"), (None, None), version=version)
    named, by_topic, everything = deleted(request, decide(plugin, request))
    assert {int(each.error_code) for each in (named, by_topic, everything)} == {POLICY_VIOLATION}
    assert "principal User:app-2 is in the reserved namespace" in named.error_message
    assert by_topic.error_message == f"the filter matches allow User:app-1 read topic 'orders'; {WHY}"
    request = delete((None, "orders"), ("User:bob", "t"), version=version)
    mixed = decide(plugin, request)
    assert isinstance(mixed, Replace)
    refused, forwarded = cast(Any, decode_request(mixed.frame)[1]).filters
    assert forwarded.principal_filter == "User:bob"
    assert uuid.UUID(refused.principal_filter.removeprefix("User:")), "a principal that has no bindings"
    assert [int(each.error_code) for each in deleted(request, mixed)] == [POLICY_VIOLATION, 0]


def test_who_may_not_delete_bindings_is_told_of_none(plugin: ReservationPlugin) -> None:
    request = delete((None, "orders"), ("User:app-1", None), ("User:bob", "t"))
    told = deleted(request, decide(plugin, request), CLUSTER_AUTHORIZATION_FAILED)
    assert {(int(each.error_code), each.error_message) for each in told} == {
        (CLUSTER_AUTHORIZATION_FAILED, "the broker's")
    }


def test_a_message_names_few_of_many_bindings(plugin: ReservationPlugin, process: Process) -> None:
    process.bindings = frozenset(binding("User:app-1", f"t{number}") for number in range(9))
    request = delete((None, None))
    [result] = deleted(request, decide(plugin, request))
    assert "'t0', " in result.error_message
    assert "'t2' and 6 more; " in result.error_message


def test_the_brokers_are_asked_of_so_many_filters_and_no_more(plugin: ReservationPlugin, process: Process) -> None:
    asked: list[None] = []
    process.on_read = lambda: asked.append(None)
    request = delete(*[(None, f"t{each}") for each in range(UNNAMED_MAX + 3)])
    results = deleted(request, decide(plugin, request))
    assert len(asked) == UNNAMED_MAX
    assert [int(result.error_code) for result in results] == [0] * UNNAMED_MAX + [POLICY_VIOLATION] * 3


def test_a_filter_is_not_forwarded_before_it_is_known_what_it_matches(
    plugin: ReservationPlugin, process: Process
) -> None:
    process.reachable = False
    request = delete((None, "t"))
    [result] = deleted(request, decide(plugin, request))
    assert int(result.error_code) == NOT_ENOUGH_REPLICAS
    process.reachable, process.refuses = True, KafkaRefused(31, "CLUSTER_AUTHORIZATION_FAILED", "")
    [result] = deleted(request, decide(plugin, request))
    assert int(result.error_code) == POLICY_VIOLATION
    assert "may not see" in result.error_message


def test_without_an_authorizer_the_broker_answers(plugin: ReservationPlugin, process: Process) -> None:
    process.refuses = KafkaRefused(SECURITY_DISABLED, "SECURITY_DISABLED", "")
    assert decide(plugin, delete((None, None))) is None


def test_credentials_and_quotas_stay(plugin: ReservationPlugin) -> None:
    def scram(user: str) -> Request:
        return request_of(
            ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, {"deletions": [{"name": user, "mechanism": 1}], "upsertions": []}
        )

    def quota(kind: str, name: str | None) -> Request:
        entry = {
            "entity": [{"entity_type": kind, "entity_name": name}, {"entity_type": "client-id", "entity_name": "c"}],
            "ops": [{"key": "request_percentage", "value": 1.0, "remove": False}],
        }
        return request_of(ApiKey.ALTER_CLIENT_QUOTAS, 1, {"entries": [entry], "validate_only": False})

    request = scram("app-1")
    [result] = answered(request, decide(plugin, request)).results
    assert (result.user, int(result.error_code), result.error_message) == ("app-1", POLICY_VIOLATION, WHY)
    assert decide(plugin, scram("bob")) is None
    request = quota("user", "app-1")
    [entry] = answered(request, decide(plugin, request)).entries
    assert (int(entry.error_code), entry.error_message) == (POLICY_VIOLATION, WHY)
    for free in (("user", "bob"), ("user", None), ("client-id", "app-1")):
        assert decide(plugin, quota(*free)) is None


def test_no_token_is_made_for_an_owner_in_the_namespace(plugin: ReservationPlugin) -> None:
    def token(owner: str | None) -> Request:
        values = {"owner_principal_type": owner and "User", "owner_principal_name": owner, "renewers": []}
        return request_of(ApiKey.CREATE_DELEGATION_TOKEN, 3, {**values, "max_lifetime": -1})

    request = token("app-1")
    assert int(answered(request, decide(plugin, request)).error_code) == POLICY_VIOLATION
    assert decide(plugin, token("bob")) is None
    assert decide(plugin, token(None)) is None


def test_clusters_without_reserved_principals_are_left_alone(process: Process) -> None:
    fresh = Process()
    fresh.reachable = False
    plugin = started(fresh)
    assert decide(plugin, create("User:app-1")) is None
    assert decide(plugin, delete((None, None))) is None


def test_without_a_lease_nothing_is_changed(plugin: ReservationPlugin, process: Process) -> None:
    process.lease_deadline = time.monotonic() - 1
    request = create("User:bob")
    assert [int(each.error_code) for each in answered(request, decide(plugin, request)).results] == [
        NOT_ENOUGH_REPLICAS
    ]
    process.lease_deadline = time.monotonic() + 60

    def lapse() -> None:
        process.lease_deadline = time.monotonic() - 1

    process.on_read = lapse
    request = delete((None, "t"))
    [result] = answered(request, decide(plugin, request)).filter_results
    assert int(result.error_code) == NOT_ENOUGH_REPLICAS
