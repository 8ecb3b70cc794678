"""The routes of the admin listener.

A namespace is named by its type in the path and its prefix in the query (``/v1/namespaces/topic?prefix=orders-``): a
prefix may be empty, and those of groups and principals may hold slashes and dots, which paths do not carry safely.

What an operator asks for goes through the control log, and its answer is the log's: a command is judged once, by all
proxies alike. A change of a reservation is answered when every proxy acts on it, at the latest after
``ENFORCE_TIMEOUT_S`` (202, with those that are waited for; 204, where nothing is left to tell of); ``?wait=false``
does not wait.

All routes are coroutines on the proxy's own event loop, so that they may read what sessions write.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from isthmus.admin import (
    audit_routes,
    control_routes,
    grant_routes,
    namespace_routes,
    plugin_routes,
    problems,
    tree_routes,
    views,
)
from isthmus.admin.control import Prefix, Wait, append, append_clearing, control_of, enforced, namespace_of
from isthmus.admin.models import (
    AlterNamespaceRequest,
    CreateNamespaceRequest,
    ErrorBody,
    ForgetTopicRequest,
    Liveness,
    NamespaceView,
    OperationView,
    Page,
    ProxyView,
    Readiness,
    RecreateTopicRequest,
    StatusView,
    TopicView,
)
from isthmus.admin.operations import Operation, Operations
from isthmus.admin.services import AdminServices, ControlLogPort
from isthmus.metrics import exposition
from isthmus_control.bounds import SYNC_CONFIRM_TIMEOUT_MS
from isthmus_control.commands import AlterDemands, AlterNamespace, CreateNamespace, DeleteNamespace
from isthmus_control.demands import ALL, NEVER, Confirm, Demands
from isthmus_control.model import ResourceType
from isthmus_plugins.drill_report import DrillFailover
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.link_operations import LinkOperations
from isthmus_plugins.links import (
    AbandonReversal,
    Acknowledged,
    AlterLink,
    AlterMapping,
    Attach,
    AttachResult,
    CommittedOffsets,
    CreateLink,
    LinkStatus,
    ModeResult,
    OffsetsView,
    OperationError,
    Promote,
    Recover,
    RecoverReport,
    Reverse,
    SecretRotated,
    SetMode,
    TopicDecision,
    TruncationStatus,
)

WAIT_S_MAX: Final = 30.0
"""How long asking for an operation may wait for its end."""

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be carried out as it is."},
    "5XX": {
        "model": ErrorBody,
        "description": "Not now: a part of the process is not up, or the cluster not reachable.",
    },
}
_LINK_EXAMPLE: Final = {
    "link_name": "a-to-b",
    "link_id": "0b5d9a0e-7c1e-4e0c-9a43-1f4b7d9f2f11",
    "local_cluster_id": "Q0x1eG5mS1ZhYmNkZWZnaA",
    "remote_cluster_id": "WnlYd1Z1VHNScVBvTm1MaA",
    "remote": ["proxy-b.example.org:19192"],
    "dials": True,
    "mode": "asynchronous",
    "sync_confirm_timeout_ms": SYNC_CONFIRM_TIMEOUT_MS,
    "state": "Following",
    "last_heard_seconds": 0.2,
    "mappings": [{"type": "topic", "local": "orders-", "remote": "orders-", "role": "leader"}],
    "partitions": [
        {
            "topic": "orders-eu",
            "remote_topic": "orders-eu",
            "partition": 0,
            "role": "leader",
            "state": "Following",
            "source_end": 1200,
            "follower_end": 1200,
            "partition_mirror_lag": 0,
            "lag_seconds": 0.0,
        }
    ],
}


def _example(value: dict[str, Any], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"example": value}}}


def create_app(services: AdminServices, operations: Operations | None = None) -> FastAPI:
    """The application. ``operations`` is closed by who made it (:class:`~isthmus.admin.server.AdminServer`)."""
    app = FastAPI(
        title="Isthmus",
        version=services.version,
        description="Namespaces, links and the state of a proxy. Errors have the shape of `ErrorBody`.",
        # The pages would load scripts from elsewhere; the description itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
        generate_unique_id_function=lambda route: route.name,
    )
    problems.install(app)
    _health(app, services)
    _namespaces(app, services)
    namespace_routes.install(app, services)
    plugin_routes.install(app, services)
    control_routes.install(app, services)
    audit_routes.install(app, services)
    tree_routes.install(app, services)
    grant_routes.install(app, lambda: _operations(services))
    _links(app, services, operations or Operations(services.supervision))
    _state(app, services)
    return app


# --- health and metrics


def _health(app: FastAPI, services: AdminServices) -> None:
    @app.get("/health/live", tags=["health"], summary="The process runs")
    async def live() -> Liveness:
        return Liveness()

    @app.get(
        "/health/ready",
        tags=["health"],
        summary="Clients may be sent here",
        response_model=Readiness,
        responses={503: {"model": Readiness, "description": "Not ready, with the reasons."}},
    )
    async def ready() -> Response:
        reasons = services.not_ready()
        body = Readiness(ready=not reasons, reasons=reasons)
        return JSONResponse(body.model_dump(), 503 if reasons else 200)

    @app.get(
        "/metrics",
        tags=["health"],
        summary="Prometheus metrics",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {}}, "description": "Prometheus text, or OpenMetrics where accepted."}
        },
    )
    async def metrics(request: Request) -> Response:
        body, content_type = await exposition(services.registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


# --- namespaces


async def _changed(
    control: ControlLogPort, kind: ResourceType, prefix: str, response: Response, wait: bool, more: bool = False
) -> NamespaceView:
    """Answer with the namespace when every proxy acts on its reservation, or with 202 before.

    ``more``: something else was changed just now, too.
    """
    namespace = namespace_of(control, kind, prefix)
    # A cleared reservation has no offset of its own: what has been applied by now holds the clearing.
    known = None if more else namespace.reserved_at_offset
    offset = control.state.applied_offset if known is None else known
    if (wait and not await enforced(control, offset)) or (not wait and views.waiting_for(control, offset)):
        response.status_code = 202
    return views.namespace_view(control, control.state.namespace(kind, prefix) or namespace)


def _namespaces(app: FastAPI, services: AdminServices) -> None:
    accepted: dict[int | str, dict[str, Any]] = {
        202: {
            "model": NamespaceView,
            "description": "Decided; `waiting_for` names the proxies that do not act on it yet.",
        }
    }

    @app.get("/v1/namespaces", tags=["namespaces"], summary="List namespaces")
    async def list_namespaces(
        type: Annotated[ResourceType | None, Query(description="only those of this type")] = None,
    ) -> Page[NamespaceView]:
        control = control_of(services)
        return Page(items=[view for view in views.namespace_views(control) if type is None or view.type is type])

    @app.post("/v1/namespaces", tags=["namespaces"], summary="Create a namespace", status_code=201, responses=accepted)
    async def create_namespace(request: CreateNamespaceRequest, response: Response, wait: Wait = True) -> NamespaceView:
        confirm = ALL if request.confirm is None else Confirm.parse(request.confirm)
        demands = Demands(request.consistency, request.visibility, request.degrade_after_ms or NEVER, confirm)
        body = CreateNamespace(
            request.type,
            request.prefix,
            request.reserved,
            request.reason,
            request.informational,
            demands,
            request.stale_reads,
        )
        control = await append(services, body)
        more = demands != Demands() or not request.stale_reads
        if not request.reserved and not more:  # nothing to enforce
            return views.namespace_view(control, namespace_of(control, request.type, request.prefix))
        return await _changed(control, request.type, request.prefix, response, wait, more)

    @app.get("/v1/namespaces/{type}", tags=["namespaces"], summary="Describe a namespace")
    async def describe_namespace(type: ResourceType, prefix: Prefix) -> NamespaceView:
        control = control_of(services)
        return views.namespace_view(control, namespace_of(control, type, prefix))

    @app.patch("/v1/namespaces/{type}", tags=["namespaces"], summary="Alter a namespace", responses=accepted)
    async def alter_namespace(
        type: ResourceType, prefix: Prefix, request: AlterNamespaceRequest, response: Response, wait: Wait = True
    ) -> NamespaceView:
        control = control_of(services)
        confirm = None if request.confirm is None else Confirm.parse(request.confirm)
        said = request.consistency, request.visibility, request.degrade_after_ms, confirm
        demands = AlterDemands(type, prefix, *said, request.informational, request.stale_reads)
        more = demands != AlterDemands(type, prefix)
        if more:
            control = await append(services, demands)
        if request.reserved is not None:
            body = AlterNamespace(type, prefix, request.reserved, request.reason)
            control = await (append if request.reserved else append_clearing)(services, body)
        return await _changed(control, type, prefix, response, wait, more)

    @app.delete("/v1/namespaces/{type}", tags=["namespaces"], summary="Delete a namespace", status_code=204)
    async def delete_namespace(type: ResourceType, prefix: Prefix, wait: Wait = True) -> None:
        """What it holds stays. A namespace that is attached to a link must be detached first."""
        control = await append_clearing(services, DeleteNamespace(type, prefix))
        if wait:
            await enforced(control, control.state.applied_offset)


# --- links


def _operations(services: AdminServices) -> LinkOperations:
    if services.links is not None:
        return services.links
    if services.control is None or services.gateway is None:
        raise problems.not_ready("replication")
    message = 'no enabled plugin offers links: add "replication" to [plugins] enabled'
    raise OperationError("REPLICATION_DISABLED", message, 501)


def _links(app: FastAPI, services: AdminServices, operations: Operations) -> None:
    example: dict[int | str, dict[str, Any]] = {200: _example(_LINK_EXAMPLE, "The link with its partitions.")}

    @app.get("/v1/links", tags=["links"], summary="List links with their partitions")
    async def list_links() -> Page[LinkStatus]:
        return Page(items=_operations(services).statuses())

    @app.post(
        "/v1/links",
        tags=["links"],
        summary="Create a link, both ends of it",
        status_code=201,
        responses={201: _example(_LINK_EXAMPLE, "The link.")},
    )
    async def create_link(request: CreateLink) -> LinkStatus:
        return await _operations(services).create(request)

    @app.get("/v1/links/{name}", tags=["links"], summary="Describe a link", responses=example)
    async def describe_link(name: str) -> LinkStatus:
        return _operations(services).status(name)

    @app.patch("/v1/links/{name}", tags=["links"], summary="Alter a link, both ends of it", responses=example)
    async def alter_link(name: str, request: AlterLink) -> LinkStatus:
        """Changes what is named. What was copied of an offsets topic before stays as it is."""
        return await _operations(services).alter(name, request)

    @app.post("/v1/links/{name}/mode", tags=["links"], summary="Set a link's mode")
    async def set_mode(name: str, request: SetMode) -> ModeResult:
        """Synchronous: acks of this cluster's clients wait until both clusters have the records.

        Refused unless the link is Following, this cluster leads all topics on it and the peer's proxies know how. Then
        each partition gets In-Sync by itself (`docs/synchronous-mode.md`). Asynchronous is immediate.
        """
        return await _operations(services).set_mode(name, request)

    @app.get("/v1/links/{name}/offsets", tags=["links"], summary="Groups' offsets in a copied offsets topic")
    async def show_offsets(
        name: str, group: Annotated[str | None, Query(description="only this group")] = None
    ) -> OffsetsView:
        """Reads the copy of the other cluster's offsets topic, as far as this proxy has the keys."""
        return await _operations(services).offsets(name, group)

    @app.get(
        "/v1/links/{name}/committed-offsets", tags=["links"], summary="What groups have committed at both clusters"
    )
    async def list_committed_offsets(
        name: str, group: Annotated[str | None, Query(description="only this group")] = None
    ) -> CommittedOffsets:
        """Asks the coordinators of both clusters, for the groups of the link's group namespaces."""
        return await _operations(services).committed_offsets(name, group)

    @app.delete("/v1/links/{name}", tags=["links"], summary="Delete a link, both ends of it", status_code=204)
    async def delete_link(
        name: str,
        local_only: Annotated[bool, Query(description="this end, where the other cluster cannot be reached")] = False,
    ) -> None:
        """Namespaces that followed stay reserved."""
        await _operations(services).delete(name, local_only)

    @app.post("/v1/links/{name}/mappings", tags=["links"], summary="Attach a pair of namespaces")
    async def attach(name: str, request: Attach) -> AttachResult:
        """With `dry_run` nothing changes, and the answer says what would happen and what would be lost."""
        return await _operations(services).attach(name, request)

    @app.patch("/v1/links/{name}/mappings", tags=["links"], summary="Alter a pair of namespaces", responses=example)
    async def alter_mapping(name: str, request: AlterMapping) -> LinkStatus:
        """Either end may be asked. What was agreed to when it was attached stays as it is."""
        return await _operations(services).alter_mapping(name, request)

    @app.delete("/v1/links/{name}/mappings", tags=["links"], summary="Detach a pair of namespaces", status_code=204)
    async def detach(
        name: str,
        local: Annotated[str, Query(description="the local namespace's prefix")],
        type: ResourceType = ResourceType.TOPIC,
        local_only: Annotated[bool, Query(description="this end, where the other cluster cannot be reached")] = False,
    ) -> None:
        """A follower stays reserved."""
        await _operations(services).detach(name, local, type.value, local_only)

    @app.get("/v1/links/{name}/truncations", tags=["links"], summary="List truncations of follower topics")
    async def list_truncations(name: str) -> Page[TruncationStatus]:
        """Those under way first. What was cut is in salvage files: `isthmus salvage show` reads them."""
        return Page(items=_operations(services).truncations(name))

    @app.post("/v1/links/{name}/acknowledge", tags=["links"], summary="Acknowledge what was lost or differs")
    async def acknowledge(name: str) -> Acknowledged:
        """Ends the telling of `source_losses`, on both sides. What is held stays so until it is decided.

        And, at the follower's side, of `differs_at` of partitions, until they are found to differ again.
        """
        return await _operations(services).acknowledge(name)

    @app.post("/v1/links/{name}/rotate-secret", tags=["links"], summary="Give both sides of a link a new secret")
    async def rotate_secret(name: str) -> SecretRotated:
        """Nothing is disconnected. One that was interrupted is gone on with: the old secret counts until both sides
        have the new one."""
        return await _operations(services).rotate_secret(name)

    @app.post("/v1/links/{name}/verify", tags=["links"], summary="Compare both sides of a link", status_code=202)
    async def verify(name: str, response: Response) -> OperationView:
        """Starts an operation whose result is a VerifyReport. While one runs for the link, that one is returned."""
        links = _operations(services)
        links.status(name)  # an unknown link is an error now and not later
        operation = operations.start("verify", name, lambda progress: links.verify(name, progress))
        response.headers["location"] = f"/v1/operations/{operation.id}"
        return operation.view()

    @app.post("/v1/links/{name}/promote", tags=["links"], summary="Make follower namespaces writable", status_code=202)
    async def promote(name: str, request: Promote, response: Response) -> OperationView:
        """Starts an operation whose result is a PromoteReport. It fails with NOT_DRAINED where something is missing."""
        links = _operations(services)
        links.status(name)
        # What was asked for is part of the target: another request is another operation.
        target = f"{name} {request.model_dump_json()}"
        operation = operations.start("promote", target, lambda progress: links.promote(name, request, progress))
        response.headers["location"] = f"/v1/operations/{operation.id}"
        return operation.view()

    @app.post("/v1/links/{name}/recover", tags=["links"], summary="Have the old source follow after a failover")
    async def recover(name: str, request: Recover) -> RecoverReport:
        """Either cluster may be asked. What the old source has alone is salvaged and cut: `dry_run` says it."""
        return await _operations(services).recover(name, request)

    @app.post(
        "/v1/links/{name}/reverse",
        tags=["links"],
        summary="Have the cluster that follows lead, and the one that leads follow",
        status_code=202,
    )
    async def reverse(name: str, request: Reverse, response: Response) -> OperationView:
        """Starts an operation whose result is a ReverseReport, at either cluster (`here`). Writes wait meanwhile.

        It fails with NOT_DRAINED where it is taken back, and they go on; with HANDED_OVER where the cluster that led
        follows, and the other one does not lead yet: that is told so again and again.
        """
        links = _operations(services)
        links.status(name)
        target = f"{name} {request.model_dump_json()}"
        operation = operations.start("reverse", target, lambda progress: links.reverse(name, request))
        response.headers["location"] = f"/v1/operations/{operation.id}"
        return operation.view()

    @app.post("/v1/links/{name}/reverse/abandon", tags=["links"], summary="Have this cluster lead on, or again")
    async def abandon_reversal(name: str, request: AbandonReversal) -> LinkStatus:
        """What is not handed over is taken back. What is, is led again once the other cluster says it never will."""
        return await _operations(services).abandon_reversal(name, request)

    @app.post(
        "/v1/links/{name}/failover",
        tags=["links"],
        summary="Make follower namespaces writable without their source",
        status_code=202,
    )
    async def fail_over(name: str, request: Failover, response: Response) -> OperationView:
        """Starts an operation whose result is a FailoverReport: what an ack meant until when, and what was ended.

        It fails with SOURCE_REACHABLE where the other cluster is connected, unless `although_reachable`.
        """
        links = _operations(services)
        links.status(name)
        target = f"{name} {request.model_dump_json()}"
        operation = operations.start("failover", target, lambda progress: links.fail_over(name, request, progress))
        response.headers["location"] = f"/v1/operations/{operation.id}"
        return operation.view()

    @app.post(
        "/v1/links/{name}/drill/failover",
        tags=["links"],
        summary="Say what failing over now would lose",
        status_code=202,
    )
    async def drill_failover(name: str, request: DrillFailover, response: Response) -> OperationView:
        """Starts an operation whose result is a DrillReport, at either cluster. What follows stays as it is."""
        links = _operations(services)
        links.status(name)
        target = f"{name} {request.model_dump_json()}"
        operation = operations.start("drill", target, lambda progress: links.drill_failover(name, request, progress))
        response.headers["location"] = f"/v1/operations/{operation.id}"
        return operation.view()

    @app.get("/v1/operations", tags=["operations"], summary="List operations, newest first")
    async def list_operations() -> Page[OperationView]:
        return Page(items=[operation.view() for operation in operations.newest_first()])

    @app.get("/v1/operations/{id}", tags=["operations"], summary="What became of an operation")
    async def describe_operation(
        id: str,
        wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX, description="wait so long for its end")] = 0,
    ) -> OperationView:
        operation: Operation = operations.get(id)
        if wait_s:
            try:
                await asyncio.wait_for(operation.ended.wait(), wait_s)
            except TimeoutError:
                pass
        return operation.view()

    @app.delete("/v1/operations/{id}", tags=["operations"], summary="Cancel an operation", status_code=204)
    async def cancel_operation(id: str) -> None:
        await operations.cancel(id)


# --- what there is


def _state(app: FastAPI, services: AdminServices) -> None:
    @app.get("/v1/topics", tags=["topics"], summary="List follower topics with provenance and refusals")
    async def list_topics(
        link: Annotated[str | None, Query(description="only those of this link")] = None,
    ) -> Page[TopicView]:
        found = views.topic_views(control_of(services).state)
        return Page(items=[view for view in found if link is None or view.link_name == link])

    @app.get("/v1/topics/{name}", tags=["topics"], summary="Describe a follower topic")
    async def describe_topic(name: str) -> TopicView:
        view = views.topic_view(control_of(services).state, name)
        if view is None:
            raise OperationError("NOT_FOUND", f"topic {name!r} follows no link here, nor did it", 404)
        if services.links is not None:
            view.overrides = dict(services.links.topic_overrides(name))
            settings = services.links.topic_reason(name)
            if settings is not None and view.reason is None:
                view.reason, view.message = settings.code, settings.message
        return view

    @app.post("/v1/topics/{name}/forget", tags=["topics"], summary="Stop following a topic whose source is gone")
    async def forget_topic(name: str, request: ForgetTopicRequest) -> TopicDecision:
        """Its records stay here, unless `delete` says that they may be lost."""
        return await _operations(services).forget_topic(name, request.delete, request.dry_run)

    @app.post("/v1/topics/{name}/recreate", tags=["topics"], summary="Lose a topic and follow its source's anew")
    async def recreate_topic(name: str, request: RecreateTopicRequest) -> TopicDecision:
        """For one that cannot go on: its source's was created again, it holds other records, it was deleted here."""
        return await _operations(services).recreate_topic(name, request.dry_run)

    @app.post("/v1/topics/{name}/truncate", tags=["topics"], summary="Cut a topic to what its source has left")
    async def truncate_topic(name: str, request: RecreateTopicRequest) -> TopicDecision:
        """For one that is held because its source lost what it had acked In-Sync. What is cut is salvaged."""
        return await _operations(services).truncate_topic(name, request.dry_run)

    @app.post("/v1/topics/{name}/give-up", tags=["topics"], summary="Go on without what a truncation lost")
    async def give_up_topic(name: str, request: RecreateTopicRequest) -> TopicDecision:
        """For one whose local copy was lost in a truncation, and whose source does not give it back."""
        return await _operations(services).give_up_topic(name, request.dry_run)

    @app.get("/v1/status", tags=["status"], summary="This proxy, and what it knows of its cluster")
    async def status() -> StatusView:
        return views.status_view(services)

    @app.get("/v1/proxies", tags=["status"], summary="The proxies of the cluster")
    async def list_proxies() -> Page[ProxyView]:
        return Page(items=views.proxy_views(control_of(services).state, services.name))
