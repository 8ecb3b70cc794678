"""REST as clients see it: routes, statuses, errors, waiting; and the listener on a real port."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from support.admin import MemoryLinks, MemoryLog, access, make_services

from isthmus.admin import AdminServer, AdminServices, control, create_app
from isthmus.admin import server as admin_server
from isthmus.admin.operations import KEPT_MAX, Operations
from isthmus.admin.server import CONNECTIONS_MAX
from isthmus.errors import ConnectionLost
from isthmus_control.acls import AclBinding, AclResource, Pattern, Permission
from isthmus_control.commands import (
    AttachNamespace,
    CreateNamespace,
    OpenProvenance,
    PartitionOffset,
    ReleaseLease,
    SetFollowerTopic,
)
from isthmus_control.commands import CreateLink as CreateLinkCommand
from isthmus_control.levels import KNOWN_LEVEL, with_known_level
from isthmus_control.model import Reason, ResourceType, Role, TopicState
from isthmus_control.outcome import Accepted
from isthmus_plugins.cluster import KafkaRefused
from isthmus_plugins.links import OperationError
from isthmus_plugins.tasks import Supervision

TOPIC = ResourceType.TOPIC
A_UUID = "11111111-1111-4111-8111-111111111111"
B_UUID = "22222222-2222-4222-8222-222222222222"


class Rest:
    """A client of an application in this loop."""

    def __init__(self) -> None:
        self.log, self.links = MemoryLog(), MemoryLinks()
        self.services = make_services(self.log, self.links)
        self.cluster: Any = self.services.cluster
        self.operations = Operations(Supervision())
        transport = httpx.ASGITransport(create_app(self.services, self.operations), raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://admin")

    async def error(self, method: str, path: str, **more: Any) -> tuple[int, str, str]:
        """Status, code and message of an error; its shape is checked."""
        response = await self.client.request(method, path, **more)
        body = response.json()
        assert set(body) == {"error_code", "code", "message"}
        assert body["error_code"] // 100 == response.status_code
        return response.status_code, body["code"], body["message"]


def with_rest(test: Callable[[Rest], Awaitable[None]]) -> None:
    async def run() -> None:
        rest = Rest()
        try:
            await rest.log.enforce("proxy-1")
            async with rest.client:
                await test(rest)
        finally:
            await rest.operations.close()

    asyncio.run(run())


# --- health, metrics, description


def test_health_tells_life_and_readiness_apart() -> None:
    async def test(rest: Rest) -> None:
        assert (await rest.client.get("/health/live")).json() == {"alive": True}
        ready = await rest.client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "reasons": []})
        rest.services.not_ready = lambda: ["draining"]
        unready = await rest.client.get("/health/ready")
        assert (unready.status_code, unready.json()) == (503, {"ready": False, "reasons": ["draining"]})
        assert (await rest.client.get("/health/live")).status_code == 200

    with_rest(test)


def test_metrics_are_prometheus_text_or_openmetrics() -> None:
    async def test(rest: Rest) -> None:
        plain = await rest.client.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        assert "isthmus_connections_opened_total 0.0" in plain.text
        accepted = {"accept": "application/openmetrics-text; version=1.0.0"}
        openmetrics = await rest.client.get("/metrics", headers=accepted)
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
        assert openmetrics.text.endswith("# EOF\n")

    with_rest(test)


def test_openapi_describes_every_route_with_its_models_and_the_one_error() -> None:
    async def test(rest: Rest) -> None:
        description = (await rest.client.get("/openapi.json")).json()
        operations = {
            f"{method.upper()} {path}": operation
            for path, item in description["paths"].items()
            for method, operation in item.items()
        }
        assert set(operations) == {
            "GET /health/live",
            "GET /health/ready",
            "GET /metrics",
            "GET /v1/namespaces",
            "POST /v1/namespaces",
            "GET /v1/namespaces/{type}",
            "PATCH /v1/namespaces/{type}",
            "DELETE /v1/namespaces/{type}",
            "GET /v1/namespaces/{type}/contents",
            "GET /v1/namespaces/{type}/overlap",
            "GET /v1/plugins",
            "POST /v1/namespaces/{type}/plugins/{plugin}",
            "PATCH /v1/namespaces/{type}/plugins/{plugin}",
            "DELETE /v1/namespaces/{type}/plugins/{plugin}",
            "GET /v1/links",
            "POST /v1/links",
            "GET /v1/links/{name}",
            "GET /v1/links/{name}/truncations",
            "PATCH /v1/links/{name}",
            "DELETE /v1/links/{name}",
            "POST /v1/links/{name}/mode",
            "GET /v1/link-tokens",
            "POST /v1/link-tokens",
            "DELETE /v1/link-tokens/{id}",
            "GET /v1/links/{name}/grants",
            "POST /v1/links/{name}/grants",
            "POST /v1/links/{name}/grants/revoke",
            "GET /v1/links/{name}/offsets",
            "GET /v1/links/{name}/committed-offsets",
            "POST /v1/links/{name}/mappings",
            "PATCH /v1/links/{name}/mappings",
            "DELETE /v1/links/{name}/mappings",
            "POST /v1/links/{name}/acknowledge",
            "POST /v1/links/{name}/rotate-secret",
            "POST /v1/links/{name}/verify",
            "POST /v1/links/{name}/promote",
            "POST /v1/links/{name}/failover",
            "POST /v1/links/{name}/drill/failover",
            "POST /v1/links/{name}/recover",
            "POST /v1/links/{name}/reverse",
            "POST /v1/links/{name}/reverse/abandon",
            "GET /v1/operations",
            "GET /v1/operations/{id}",
            "DELETE /v1/operations/{id}",
            "GET /v1/topics",
            "GET /v1/topics/{name}",
            "POST /v1/topics/{name}/forget",
            "POST /v1/topics/{name}/recreate",
            "POST /v1/topics/{name}/truncate",
            "POST /v1/topics/{name}/give-up",
            "POST /v1/control/export",
            "GET /v1/audit",
            "GET /v1/tree",
            "GET /v1/tree/document",
            "PUT /v1/tree",
            "DELETE /v1/tree",
            "POST /v1/tree/groups/{group}/go-back",
            "PUT /v1/tree/clusters/{cluster}/levels/{level}/target",
            "GET /v1/status",
            "GET /v1/proxies",
            "GET /v1/control",
            "POST /v1/control/upgrade",
        }
        for name, operation in operations.items():
            assert operation["summary"], name
            success = next(body for status, body in operation["responses"].items() if status.startswith("2"))
            assert "content" in success or "204" in operation["responses"], name
            for status in ("4XX", "5XX"):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorBody"}, name
        ids = [operation["operationId"] for operation in operations.values()]
        assert len(set(ids)) == len(ids)
        schemas = description["components"]["schemas"]
        assert schemas["NamespaceView"]["properties"]["waiting_for"]["description"]
        assert "format" not in schemas["CreateLink"]["properties"]["link_name"]

    with_rest(test)


def test_there_are_no_pages_that_load_scripts_from_elsewhere() -> None:
    async def test(rest: Rest) -> None:
        for path in ("/docs", "/redoc"):
            assert (await rest.error("GET", path))[:2] == (404, "NO_SUCH_PATH")

    with_rest(test)


# --- namespaces


def test_a_namespace_is_created_listed_described_altered_and_deleted() -> None:
    async def test(rest: Rest) -> None:
        created = await rest.client.post("/v1/namespaces", json={"type": "topic", "prefix": "orders-"})
        assert created.status_code == 201
        assert created.json() == {
            "type": "topic",
            "prefix": "orders-",
            "state": "open",
            "waiting_for": [],
            "reserved_reason": None,
            "informational": False,
            "consistency": "available",
            "visibility": "local",
            "degrade_after_ms": None,
            "confirm": "ALL",
            "stale_reads": True,
            "created_ms": created.json()["created_ms"],
            "plugins": [],
            "mappings": [],
        }
        await rest.client.post("/v1/namespaces", json={"type": "consumer-group", "prefix": "orders-"})
        listed = (await rest.client.get("/v1/namespaces", params={"type": "topic"})).json()["items"]
        assert [(each["type"], each["prefix"]) for each in listed] == [("topic", "orders-")]
        assert len((await rest.client.get("/v1/namespaces")).json()["items"]) == 2

        path = "/v1/namespaces/topic?prefix=orders-"
        assert (await rest.client.get(path)).json()["state"] == "open"
        assert (await rest.client.delete(path + "&wait=false")).status_code == 204
        assert (await rest.error("GET", path))[:2] == (404, "NOT_FOUND")
        assert rest.log.state.namespace(TOPIC, "orders-") is None

    with_rest(test)


def test_prefix_and_type_of_a_namespace_are_not_changed() -> None:
    async def test(rest: Rest) -> None:
        await rest.client.post("/v1/namespaces", json={"prefix": "orders-"})
        before = rest.log.state.namespaces
        for body in ({"prefix": "other-"}, {"type": "principal"}):
            status, code, _ = await rest.error("PATCH", "/v1/namespaces/topic?prefix=orders-", json=body)
            assert (status, code) == (422, "INVALID_REQUEST")
        assert rest.log.state.namespaces == before

    with_rest(test)


def test_what_is_in_a_namespace() -> None:
    async def test(rest: Rest) -> None:
        cluster = rest.cluster
        cluster.add_topic("orders-eu", 3)
        cluster.add_topic("orders-us", 2)
        cluster.add_topic("other", 1)
        cluster.offsets |= {"orders-app": {}, "other": {}}
        cluster.set_acls(
            AclBinding(AclResource.TOPIC, "t", Pattern.LITERAL, "User:orders", "*", 3, Permission.ALLOW),
            AclBinding(AclResource.TOPIC, "u", Pattern.LITERAL, "User:orders", "*", 3, Permission.ALLOW),
        )
        found = {}
        for kind, prefix in (("topic", "orders-"), ("consumer-group", "orders-"), ("principal", "User:orders")):
            await rest.client.post("/v1/namespaces", json={"type": kind, "prefix": prefix})
            path = f"/v1/namespaces/{kind}/contents"
            found[kind] = (await rest.client.get(path, params={"prefix": prefix})).json()
        assert found["topic"]["namespace"]["prefix"] == "orders-"
        assert [(each["name"], each["partitions"]) for each in found["topic"]["items"]] == [
            ("orders-eu", 3),
            ("orders-us", 2),
        ]
        assert (found["topic"]["count"], found["topic"]["empty"]) == (2, False)
        assert [each["name"] for each in found["consumer-group"]["items"]] == ["orders-app"]
        assert [each["name"] for each in found["principal"]["items"]] == ["User:orders"]
        await rest.client.post("/v1/namespaces", json={"prefix": "none-"})
        empty = (await rest.client.get("/v1/namespaces/topic/contents?prefix=none-")).json()
        assert (empty["count"], empty["empty"], empty["items"]) == (0, True, [])
        assert (await rest.error("GET", "/v1/namespaces/topic/contents?prefix=no"))[:2] == (404, "NOT_FOUND")
        cluster.down.add(1)
        cluster.acls_refused = KafkaRefused(31, "CLUSTER_AUTHORIZATION_FAILED", "no")
        path = "/v1/namespaces/principal/contents?prefix=User:orders"
        assert (await rest.error("GET", path))[:2] == (503, "UNAVAILABLE")

    with_rest(test)


def test_whether_namespaces_overlap() -> None:
    async def test(rest: Rest) -> None:
        path = "/v1/namespaces/topic/overlap"
        found = (await rest.client.get(path, params={"prefix": "AB", "other": "A"})).json()
        assert (found["overlap"], found["relation"]) == (True, "held")
        assert {"roles": "both follow", "links": "any links"}.items() <= found["refused"][0].items()
        apart = (await rest.client.get(path, params={"prefix": "A", "other": "B"})).json()
        assert (apart["overlap"], apart["relation"], apart["refused"]) == (False, "none", [])

    with_rest(test)


@pytest.mark.parametrize("prefix", ["", "a/b", "..", "User:CN=x,O=y z", "50%", "a?b#c", "é"])
def test_any_prefix_can_be_named(prefix: str) -> None:
    async def test(rest: Rest) -> None:
        created = await rest.client.post("/v1/namespaces", json={"type": "consumer-group", "prefix": prefix})
        assert created.status_code == 201
        where = {"params": {"prefix": prefix}}
        described = await rest.client.get("/v1/namespaces/consumer-group", **where)
        assert described.json()["prefix"] == prefix
        where["params"]["wait"] = "false"
        assert (await rest.client.delete("/v1/namespaces/consumer-group", **where)).status_code == 204
        assert rest.log.state.namespaces == {}

    with_rest(test)


def test_deleting_without_a_prefix_deletes_nothing() -> None:
    async def test(rest: Rest) -> None:
        rest.log.apply(CreateNamespace(TOPIC, ""))
        status, code, message = await rest.error("DELETE", "/v1/namespaces/topic")
        assert (status, code) == (422, "INVALID_REQUEST")
        assert "prefix" in message
        assert rest.log.state.namespace(TOPIC, "") is not None

    with_rest(test)


def test_a_reservation_is_answered_when_every_proxy_enforces_it() -> None:
    async def test(rest: Rest) -> None:
        rest.log.claim("proxy-2", 2)
        await rest.log.enforce("proxy-1", "proxy-2")
        body = {"prefix": "orders-", "reserved": True, "reason": "migration"}
        loop = asyncio.get_running_loop()
        answer = loop.create_task(rest.client.post("/v1/namespaces", json=body))
        await asyncio.wait([answer], timeout=0.1)
        described = (await rest.client.get("/v1/namespaces/topic?prefix=orders-")).json()
        assert described["state"] == "reserving"
        assert described["waiting_for"] == ["proxy-1", "proxy-2"]
        await rest.log.enforce("proxy-1")
        await asyncio.wait([answer], timeout=0.1)
        assert not answer.done()
        await rest.log.enforce("proxy-2")
        response = await answer
        assert response.status_code == 201
        assert response.json()["state"] == "reserved"
        assert response.json()["reserved_reason"] == "migration"

    with_rest(test)


def test_a_deletion_is_answered_when_every_proxy_knows_it() -> None:
    """Clients that were refused by any of them write from then on."""

    async def test(rest: Rest) -> None:
        rest.log.apply(CreateNamespace(TOPIC, "orders-", True))
        await rest.log.enforce("proxy-1")
        loop = asyncio.get_running_loop()
        answer = loop.create_task(rest.client.delete("/v1/namespaces/topic?prefix=orders-"))
        await asyncio.wait([answer], timeout=0.1)
        assert not answer.done()
        assert rest.log.state.namespaces == {}
        await rest.log.enforce("proxy-1")
        assert (await answer).status_code == 204

    with_rest(test)


def test_without_waiting_a_reservation_names_who_is_waited_for() -> None:
    async def test(rest: Rest) -> None:
        rest.log.apply(CreateNamespace(TOPIC, "orders-"))
        path = "/v1/namespaces/topic?prefix=orders-&wait=false"
        answer = await rest.client.patch(path, json={"reserved": True})
        assert answer.status_code == 202
        assert (answer.json()["state"], answer.json()["waiting_for"]) == ("reserving", ["proxy-1"])
        await rest.log.enforce("proxy-1")
        again = await rest.client.patch(path, json={"reserved": True})
        assert (again.status_code, again.json()["state"]) == (200, "reserved")

    with_rest(test)


def test_a_proxy_that_does_not_follow_delays_the_answer_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ENFORCE_TIMEOUT_S", 0.05)

    async def test(rest: Rest) -> None:
        answer = await rest.client.post("/v1/namespaces", json={"prefix": "orders-", "reserved": True})
        assert answer.status_code == 202
        assert answer.json()["waiting_for"] == ["proxy-1"]

    with_rest(test)


def test_clearing_a_reservation_is_answered_when_every_proxy_acts_on_it() -> None:
    async def test(rest: Rest) -> None:
        rest.log.apply(CreateNamespace(TOPIC, "orders-", reserved=True))
        await rest.log.enforce("proxy-1")
        loop = asyncio.get_running_loop()
        path = "/v1/namespaces/topic?prefix=orders-"
        answer = loop.create_task(rest.client.patch(path, json={"reserved": False}))
        await asyncio.wait([answer], timeout=0.1)
        assert not answer.done()
        await rest.log.enforce("proxy-1")
        assert (await answer).json()["state"] == "open"

    with_rest(test)


@pytest.mark.parametrize(
    ("method", "body"), [("PATCH", {"reserved": False}), ("DELETE", None)], ids=["altered", "deleted"]
)
def test_what_links_left_open_ends_before_a_reservation_is_cleared(method: str, body: Any) -> None:
    async def test(rest: Rest) -> None:
        rest.log.apply(CreateNamespace(TOPIC, "orders-", reserved=True))
        path = "/v1/namespaces/topic?prefix=orders-&wait=false"
        rest.links.release_error = OperationError("BROKER_UNAVAILABLE", "begun, and to be gone on with", 503)
        assert (await rest.error(method, path, json=body))[:2] == (503, "BROKER_UNAVAILABLE")
        assert rest.log.state.namespaces[TOPIC, "orders-"].reserved
        rest.links.release_error = None
        assert (await rest.client.request(method, path, json=body)).is_success
        left = rest.log.state.namespace(TOPIC, "orders-")
        assert left is None or not left.reserved

    with_rest(test)


def test_what_a_namespace_demands_is_in_force_when_every_proxy_has_applied_it() -> None:
    async def test(rest: Rest) -> None:
        rest.log.apply(CreateNamespace(TOPIC, "orders-", reserved=True))
        await rest.log.enforce("proxy-1")
        loop = asyncio.get_running_loop()
        path = "/v1/namespaces/topic?prefix=orders-"
        answer = loop.create_task(rest.client.patch(path, json={"consistency": "strict"}))
        await asyncio.wait([answer], timeout=0.1)
        assert not answer.done()
        await rest.log.enforce("proxy-1")
        found = (await answer).json()
        assert (found["consistency"], found["state"]) == ("strict", "reserved")

    with_rest(test)


def test_what_the_control_log_rejects_has_its_own_words_and_a_fitting_status() -> None:
    async def test(rest: Rest) -> None:
        await rest.client.post("/v1/namespaces", json={"prefix": "orders-"})
        status, code, message = await rest.error("POST", "/v1/namespaces", json={"prefix": "orders-"})
        assert (status, code) == (409, "ALREADY_EXISTS")
        assert "orders-" in message
        gone = await rest.error("PATCH", "/v1/namespaces/topic?prefix=no-", json={"reserved": True})
        assert gone[:2] == (404, "NOT_FOUND")
        invalid = await rest.error("POST", "/v1/namespaces", json={"prefix": "a-", "reason": "b", "reserved": False})
        assert invalid[:2] == (422, "INVALID")
        too_long = await rest.error("POST", "/v1/namespaces", json={"prefix": "x" * 300})
        assert too_long[:2] == (422, "INVALID_REQUEST")

    with_rest(test)


def test_requests_of_the_wrong_shape_name_the_field_and_do_not_repeat_what_was_sent() -> None:
    async def test(rest: Rest) -> None:
        body = {"link_name": "a", "remote": 5, "token": ["hunter2"], "tokn": "hunter2"}
        status, code, message = await rest.error("POST", "/v1/links", json=body)
        assert (status, code) == (422, "INVALID_REQUEST")
        assert "remote" in message
        assert "tokn" in message
        assert "hunter2" not in message
        assert (await rest.error("GET", "/v1/namespaces/tpic?prefix=a"))[0] == 422
        assert (await rest.error("PUT", "/v1/namespaces"))[:2] == (405, "METHOD_NOT_ALLOWED")

    with_rest(test)


def test_an_unreachable_cluster_and_a_bug_are_told_apart() -> None:
    async def test(rest: Rest) -> None:
        rest.log.fault = ConnectionLost("127.0.0.1:9092: connection refused")
        unreachable = await rest.error("POST", "/v1/namespaces", json={"prefix": "a"})
        assert unreachable[:2] == (503, "CONTROL_LOG_UNAVAILABLE")
        assert "connection refused" in unreachable[2]
        rest.log.fault = KeyError("secret detail")
        bug = await rest.error("POST", "/v1/namespaces", json={"prefix": "a"})
        assert bug[:2] == (500, "INTERNAL_ERROR")
        assert "secret detail" not in bug[2]

    with_rest(test)


def test_parts_that_are_not_up_answer_503_and_the_others_work() -> None:
    async def test(rest: Rest) -> None:
        rest.services.control = rest.services.gateway = rest.services.links = None
        for path in ("/v1/namespaces", "/v1/topics", "/v1/proxies", "/v1/links"):
            assert (await rest.error("GET", path))[:2] == (503, "NOT_READY")
        assert (await rest.client.get("/health/live")).status_code == 200
        status = (await rest.client.get("/v1/status")).json()
        assert (status["cluster_id"], status["connections"], status["links"]) == (None, None, [])

    with_rest(test)


# --- links


def test_links_are_created_listed_described_and_deleted() -> None:
    async def test(rest: Rest) -> None:
        body = {"link_name": "a-to-c", "remote": "127.0.0.1:49192", "token": "hunter2"}
        created = await rest.client.post("/v1/links", json=body)
        assert created.status_code == 201
        assert created.json()["remote"] == ["127.0.0.1:49192"]
        assert "hunter2" not in created.text
        assert rest.links.created[0].token == "hunter2"
        names = [link["link_name"] for link in (await rest.client.get("/v1/links")).json()["items"]]
        assert names == ["a-to-b", "a-to-c"]
        partition = (await rest.client.get("/v1/links/a-to-b")).json()["partitions"][0]
        assert partition["partition_mirror_lag"] == 2
        assert (await rest.client.delete("/v1/links/a-to-c?local_only=true")).status_code == 204
        assert rest.links.calls == [("delete", "a-to-c", True)]
        assert (await rest.error("GET", "/v1/links/a-to-c"))[:2] == (404, "NOT_FOUND")

    with_rest(test)


def test_namespaces_are_attached_and_detached() -> None:
    async def test(rest: Rest) -> None:
        body = {"local": "", "remote": "eu-", "role": "follower", "dry_run": True}
        answer = await rest.client.post("/v1/links/a-to-b/mappings", json=body)
        assert answer.status_code == 200
        assert (answer.json()["dry_run"], answer.json()["topics"][0]["records_lost"]) == (True, 7)
        assert rest.links.attached[0].truncate_target is False
        where = {"local": "", "type": "consumer-group"}
        assert (await rest.client.delete("/v1/links/a-to-b/mappings", params=where)).status_code == 204
        assert rest.links.calls == [("detach", "a-to-b", "", "consumer-group", False)]

    with_rest(test)


def test_without_a_plugin_for_links_the_answer_says_which_setting_is_missing() -> None:
    async def test(rest: Rest) -> None:
        rest.services.links = None
        status, code, message = await rest.error("GET", "/v1/links")
        assert (status, code) == (501, "REPLICATION_DISABLED")
        assert "[plugins] enabled" in message

    with_rest(test)


def test_verification_is_an_operation_with_progress_and_a_result() -> None:
    async def test(rest: Rest) -> None:
        rest.links.proceed.clear()
        started = await rest.client.post("/v1/links/a-to-b/verify")
        assert started.status_code == 202
        path = started.headers["location"]
        assert path == f"/v1/operations/{started.json()['id']}"
        again = await rest.client.post("/v1/links/a-to-b/verify")
        assert again.json()["id"] == started.json()["id"]
        running = (await rest.client.get(f"{path}?wait_s=0.01")).json()
        assert (running["state"], running["done"], running["total"], running["result"]) == ("running", 4, 10, None)
        loop = asyncio.get_running_loop()
        waiting = loop.create_task(rest.client.get(f"{path}?wait_s=20"))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        rest.links.proceed.set()
        done = (await waiting).json()
        assert (done["state"], done["done"], done["error"]) == ("done", 10, None)
        assert done["result"]["equal"] is True
        assert done["result"]["partitions"][0]["compared_to"] == 10
        listed = (await rest.client.get("/v1/operations")).json()["items"]
        assert [each["id"] for each in listed] == [started.json()["id"]]

    with_rest(test)


@pytest.mark.parametrize(
    ("error", "code"),
    [(OperationError("PEER_DISCONNECTED", "no peer", 503), "PEER_DISCONNECTED"), (ValueError("x"), "OPERATION_FAILED")],
)
def test_a_failed_operation_says_why(error: Exception, code: str) -> None:
    async def test(rest: Rest) -> None:
        rest.links.verify_error = error
        started = await rest.client.post("/v1/links/a-to-b/verify")
        ended = (await rest.client.get(started.headers["location"], params={"wait_s": 10})).json()
        assert (ended["state"], ended["error"]["code"], ended["result"]) == ("failed", code, None)

    with_rest(test)


def test_operations_can_be_cancelled_and_unknown_ones_are_not_found() -> None:
    async def test(rest: Rest) -> None:
        assert (await rest.error("POST", "/v1/links/none/verify"))[:2] == (404, "NOT_FOUND")
        assert (await rest.error("GET", "/v1/operations/x"))[:2] == (404, "NOT_FOUND")
        rest.links.proceed.clear()
        path = (await rest.client.post("/v1/links/a-to-b/verify")).headers["location"]
        assert (await rest.client.delete(path)).status_code == 204
        assert (await rest.client.get(path)).json()["error"]["code"] == "CANCELLED"
        assert (await rest.client.delete(path)).status_code == 204

    with_rest(test)


def test_results_are_kept_for_a_bounded_number_of_operations() -> None:
    async def test(rest: Rest) -> None:
        ids = []
        for _ in range(KEPT_MAX + 3):
            started = (await rest.client.post("/v1/links/a-to-b/verify")).json()
            await rest.client.get(f"/v1/operations/{started['id']}?wait_s=5")
            ids.append(started["id"])
        kept = [operation.id for operation in rest.operations.newest_first()]
        assert len(kept) <= KEPT_MAX + 1
        assert kept[0] == ids[-1]

    with_rest(test)


# --- topics, status, proxies


def _follow(log: MemoryLog) -> None:
    for body in (
        CreateLinkCommand("b-to-a", A_UUID, "cluster-b", False),
        AttachNamespace("b-to-a", TOPIC, "orders-", "orders-", Role.FOLLOWER, create_missing=True),
        SetFollowerTopic("b-to-a", "orders-eu", "orders-eu", A_UUID, TopicState.CREATING),
        SetFollowerTopic("b-to-a", "orders-eu", "orders-eu", A_UUID, TopicState.FOLLOWING, B_UUID),
        OpenProvenance("b-to-a", (PartitionOffset("orders-eu", B_UUID, 0, 0),)),
        SetFollowerTopic(
            "b-to-a",
            "orders-us",
            "orders-us",
            A_UUID,
            TopicState.REFUSED,
            reason=Reason("TOPIC_NOT_EMPTY", "the topic holds other records"),
        ),
    ):
        outcome = log.apply(body)
        assert isinstance(outcome, Accepted), outcome


def test_topics_show_provenance_and_refusals() -> None:
    async def test(rest: Rest) -> None:
        _follow(rest.log)
        listed = (await rest.client.get("/v1/topics", params={"link": "b-to-a"})).json()["items"]
        assert [(each["topic"], each["state"], each["reason"]) for each in listed] == [
            ("orders-eu", "following", None),
            ("orders-us", "refused", "TOPIC_NOT_EMPTY"),
        ]
        topic = (await rest.client.get("/v1/topics/orders-eu")).json()
        assert topic["overrides"] == {"retention.ms": "-1"}
        assert (topic["reason"], topic["message"]) == (None, None)
        rest.links.settings_reasons["orders-eu"] = Reason("TARGET_REFUSES_SETTINGS", "too short")
        lacking = (await rest.client.get("/v1/topics/orders-eu")).json()
        assert (lacking["reason"], lacking["message"]) == ("TARGET_REFUSES_SETTINGS", "too short")
        (described,) = topic["partitions"]
        assert described["partition"] == 0
        (origin,) = described["provenance"]
        assert (origin["source_cluster_id"], origin["start_offset"], origin["end_offset"]) == ("cluster-b", 0, None)
        assert (await rest.client.get("/v1/topics?link=other")).json() == {"items": []}
        assert (await rest.error("GET", "/v1/topics/none"))[:2] == (404, "NOT_FOUND")
        namespace = (await rest.client.get("/v1/namespaces/topic?prefix=orders-")).json()
        assert namespace["mappings"] == [{"link_name": "b-to-a", "role": "follower", "remote": "orders-"}]

    with_rest(test)


def test_status_tells_of_the_proxy_and_its_cluster() -> None:
    async def test(rest: Rest) -> None:
        rest.log.claim("proxy-2", 2)
        assert rest.services.gateway is not None
        rest.services.gateway.closed_by_cause["client closed"] += 3
        rest.services.gateway.connections_opened = 3
        status = (await rest.client.get("/v1/status")).json()
        assert (status["name"], status["version"], status["cluster_id"]) == ("proxy-1", "1.2.3", "cluster-a")
        assert status["process"]["mode"] == "sidecar"
        assert status["process"]["brokers"] == [
            {"broker_id": 1, "address": "127.0.0.1:19093", "broker": "127.0.0.1:9092"}
        ]
        assert status["connections"] == {"open": 0, "opened": 3, "closed": {"client closed": 3}}
        limits = status["limits"]
        assert 0 < limits["file_descriptors_open"] < limits["file_descriptors_max"]
        assert [link["link_name"] for link in status["links"]] == ["a-to-b"]
        assert [(proxy["name"], proxy["this"]) for proxy in status["proxies"]] == [
            ("proxy-1", True),
            ("proxy-2", False),
        ]
        assert (await rest.client.get("/v1/proxies")).json()["items"] == status["proxies"]

    with_rest(test)


# --- the control log


def test_the_feature_level_is_raised_once_every_proxy_knows_it() -> None:
    async def test(rest: Rest) -> None:
        assert (await rest.client.get("/v1/control")).json() == {
            "offset": rest.log.state.applied_offset,
            "level": 0,
            "known_level": KNOWN_LEVEL,
            "behind": [],
            "key_id": None,
            "own_key_id": None,
            "without_key": [],
            "unsigned_records": 0,
            "own_sealing_key_id": None,
            "secrets": [],
            "not_understood": [],
        }
        plan = (await rest.client.post("/v1/control/upgrade", json={"dry_run": True})).json()
        assert (plan["before"], plan["after"], plan["dry_run"], plan["signs"]) == (0, KNOWN_LEVEL, True, False)
        assert len(plan["brings"]) == KNOWN_LEVEL
        assert rest.log.state.level == 0

        rest.log.claim("proxy-2", 2, "0.1.0")
        assert (await rest.client.get("/v1/control")).json()["behind"] == ["proxy-2"]
        for dry_run in (True, False):
            status, code, message = await rest.error("POST", "/v1/control/upgrade", json={"dry_run": dry_run})
            assert (status, code) == (409, "CONFLICT")
            assert "proxy 'proxy-2' (version 0.1.0) knows feature level 0" in message
        proxies = (await rest.client.get("/v1/proxies")).json()["items"]
        assert [(each["version"], each["known_level"]) for each in proxies] == [("1.2.3", KNOWN_LEVEL), ("0.1.0", 0)]

        lease = rest.log.state.proxies["proxy-2"]
        rest.log.apply(ReleaseLease("proxy-2", lease.incarnation))
        status, code, message = await rest.error("POST", "/v1/control/upgrade", json={"to": KNOWN_LEVEL + 1})
        assert (status, code) == (422, "NOT_SUPPORTED")
        assert f"this proxy knows feature level {KNOWN_LEVEL} at most" in message
        done = (await rest.client.post("/v1/control/upgrade", json={"to": 1})).json()
        assert (done["before"], done["after"], rest.log.state.level) == (0, 1, 1)
        again = (await rest.client.post("/v1/control/upgrade", json={"to": 1})).json()
        assert (again["before"], again["after"], again["brings"]) == (1, 1, [])
        assert rest.log.state.key_id == ""

        # Signed from level 2 on, once every proxy has the key.
        rest.log.key_id = "ab12cd34"
        assert (await rest.client.get("/v1/control")).json()["without_key"] == ["proxy-1"]
        status, code, message = await rest.error("POST", "/v1/control/upgrade", json={})
        assert (status, code) == (409, "CONFLICT")
        assert "proxy 'proxy-1' has no control key, and is to have ab12cd34: set cluster.control_key_file" in message
        lease = rest.log.state.proxies["proxy-1"]
        rest.log.apply(ReleaseLease("proxy-1", lease.incarnation))
        rest.log.claim("proxy-1", 1, with_known_level("1.2.3", "ab12cd34"))
        done = (await rest.client.post("/v1/control/upgrade", json={})).json()
        assert (done["after"], done["signs"], done["key_id"]) == (KNOWN_LEVEL, True, "ab12cd34")
        assert (await rest.client.get("/v1/control")).json()["key_id"] == "ab12cd34"

    with_rest(test)


# --- the listener


def _services() -> AdminServices:
    return make_services(MemoryLog(), MemoryLinks())


def test_the_listener_serves_on_a_free_port_and_leaves_signals_alone() -> None:
    async def run() -> None:
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        server = AdminServer(_services(), "127.0.0.1", 0, access())
        await server.start()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
            response = await client.get("/health/live")
            assert response.status_code == 200
            assert "server" not in response.headers
            described = await client.post("/v1/namespaces", content=json.dumps({"prefix": "a"}))
            assert described.status_code == 422  # a form of another site cannot send JSON
        await server.stop()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)

    asyncio.run(run())


def test_stopping_ends_operations_and_those_who_wait_for_them() -> None:
    async def run() -> None:
        services = _services()
        assert isinstance(services.links, MemoryLinks)
        services.links.proceed.clear()
        server = AdminServer(services, "127.0.0.1", 0, access())
        await server.start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
            path = (await client.post("/v1/links/a-to-b/verify")).headers["location"]
            waiting = asyncio.get_running_loop().create_task(client.get(f"{path}?wait_s=30"))
            await asyncio.wait([waiting], timeout=0.1)
            await server.stop()
            assert (await waiting).json()["error"]["code"] == "CANCELLED"

    asyncio.run(run())


def test_those_who_connect_and_ask_nothing_are_so_many_at_most_and_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin_server, "ROOM_AFTER_S", 0.0)

    async def run() -> None:
        server = AdminServer(_services(), "127.0.0.1", 0, access())
        await server.start()
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(CONNECTIONS_MAX)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
            assert (await client.get("/health/live")).status_code == 200
            assert await idle[0][0].read() == b"", "who came first has made room"
            more = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2 * CONNECTIONS_MAX)]
            assert (await client.get("/health/live")).status_code == 200
            gone = [reader for reader, _ in (*idle, *more) if reader.exception() or reader.at_eof()]
            assert len(gone) >= 2 * CONNECTIONS_MAX
        for _, writer in (*idle, *more):
            writer.close()
        await server.stop()

    asyncio.run(run())


def test_who_is_being_answered_makes_room_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        services = _services()
        assert isinstance(services.links, MemoryLinks)
        services.links.proceed.clear()
        server = AdminServer(services, "127.0.0.1", 0, access())
        await server.start()
        url, limits = f"http://127.0.0.1:{server.port}", httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            path = (await client.post("/v1/links/a-to-b/verify")).headers["location"]
        async with httpx.AsyncClient(base_url=url, trust_env=False, limits=limits, timeout=60) as client:
            loop = asyncio.get_running_loop()
            waiting = [loop.create_task(client.get(f"{path}?wait_s=30")) for _ in range(CONNECTIONS_MAX)]
            assert server._server is not None
            async with asyncio.timeout(20):
                while len(server._server.server_state.tasks) < CONNECTIONS_MAX:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await asyncio.sleep(admin_server.ROOM_AFTER_S + 0.1)
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                assert await reader.read() == b"", "it is turned away"
                writer.close()
            lines = [each for each in caplog.records if each.getMessage() == "admin connections refused"]
            assert len(lines) == 1, "then a line a minute"
            services.links.proceed.set()
            assert {each.status_code for each in await asyncio.gather(*waiting)} == {200}
        await server.stop()

    asyncio.run(run())


def test_an_address_in_use_is_an_error_of_the_start() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            server = AdminServer(_services(), "127.0.0.1", taken.getsockname()[1], access())
            with pytest.raises(OSError, match="in use"):
                await server.start()
            await server.stop()

    asyncio.run(run())


# --- modes


def test_the_mode_of_a_link_is_set() -> None:
    async def test(rest: Rest) -> None:
        path = "/v1/links/a-to-b/mode"
        planned = await rest.client.post(path, json={"mode": "synchronous", "dry_run": True})
        assert planned.json() == {
            "link_name": "a-to-b",
            "former_mode": "asynchronous",
            "mode": "synchronous",
            "sync_confirm_timeout_ms": 10_000,
            "dry_run": True,
        }
        assert (await rest.client.get("/v1/links/a-to-b")).json()["mode"] == "asynchronous"
        await rest.client.post(path, json={"mode": "synchronous", "confirm_timeout_ms": 3_000})
        link = (await rest.client.get("/v1/links/a-to-b")).json()
        assert (link["mode"], link["sync_confirm_timeout_ms"]) == ("synchronous", 3_000)
        for wrong in ({"mode": "half"}, {}, {"mode": "synchronous", "confirm_timeout_ms": 1_999}):
            assert (await rest.error("POST", path, json=wrong))[0] == 422
        assert (await rest.error("POST", "/v1/links/nope/mode", json={"mode": "synchronous"}))[:2] == (404, "NOT_FOUND")

    with_rest(test)


# --- offsets topics


def test_what_groups_have_committed_is_listed_at_both_sides() -> None:
    async def test(rest: Rest) -> None:
        view = (await rest.client.get("/v1/links/a-to-b/committed-offsets", params={"group": "app-7"})).json()
        found, lost = view["groups"]
        assert (found["group"], lost["message"]) == ("app-7", "the source's coordinator is not there")
        assert found["offsets"][0] == {"topic": "orders-eu", "partition": 0, "source_offset": 7, "follower_offset": 7}
        assert (await rest.error("GET", "/v1/links/nope/committed-offsets"))[:2] == (404, "NOT_FOUND")

    with_rest(test)


def test_the_form_of_the_offsets_topic_is_chosen_and_a_copy_is_read() -> None:
    async def test(rest: Rest) -> None:
        body = {"offsets_topic": "redacted", "offsets_groups": ["app-*"]}
        altered = await rest.client.patch("/v1/links/a-to-b", json=body)
        assert altered.status_code == 200
        (copy,) = altered.json()["offsets_topics"]
        assert (copy["role"], copy["form"], copy["groups"]) == ("leader", "redacted", ["app-*"])
        assert rest.links.calls == [("alter", "a-to-b", "redacted", ["app-*"])]
        view = (await rest.client.get("/v1/links/a-to-b/offsets", params={"group": "app-7"})).json()
        assert [each["group"] for each in view["groups"]] == ["app-7"]
        assert (view["unreadable_records"], view["unreadable_key_ids"]) == (3, ["1f0c"])
        assert (await rest.error("GET", "/v1/links/nope/offsets"))[:2] == (404, "NOT_FOUND")
        wrong = await rest.error("PATCH", "/v1/links/a-to-b", json={"offsets_topic": "half"})
        assert wrong[0] == 422

    with_rest(test)
