"""The routes of the tree of clusters that topics are distributed over."""

from __future__ import annotations

from fastapi import FastAPI, Response

from isthmus.admin import problems
from isthmus.admin.services import AdminServices
from isthmus_plugins.links import OperationError
from isthmus_plugins.trees import AppliedTree, ApplyTreeRequest, ChooseTargetRequest, TreeOperations, TreeStatus


def install(app: FastAPI, services: AdminServices) -> None:
    """Add the routes."""

    @app.get("/v1/tree", tags=["tree"], summary="Describe the tree, and this cluster's distributors")
    async def describe_tree() -> TreeStatus:
        """Of a level that another proxy distributes for, that one knows more."""
        return _trees(services).status()

    @app.put("/v1/tree", tags=["tree"], summary="Apply the next version of the tree")
    async def apply_tree(request: ApplyTreeRequest) -> AppliedTree:
        """At this cluster: apply it at each cluster of the tree."""
        return await _trees(services).apply(request)

    @app.delete("/v1/tree", tags=["tree"], summary="Leave the tree", status_code=204)
    async def leave_tree() -> Response:
        """Nothing is distributed from here any more. Others go on writing here until they leave it, too."""
        await _trees(services).leave()
        return Response(status_code=204)

    @app.put("/v1/tree/clusters/{cluster}/levels/{level}/target", tags=["tree"], summary="Choose a target")
    async def choose_target(cluster: str, level: int, request: ChooseTargetRequest) -> TreeStatus:
        """Of a distributor of this cluster."""
        return await _trees(services).choose_target(cluster, level, request)

    @app.post("/v1/tree/groups/{group}/go-back", tags=["tree"], summary="Set a group back")
    async def go_back(group: str) -> TreeStatus:
        """To where other clusters say that it is to go on here, also where it went on here by itself."""
        return await _trees(services).go_back(group)


def _trees(services: AdminServices) -> TreeOperations:
    if services.control is None:
        raise problems.not_ready("the proxy")
    if services.trees is None:
        raise OperationError(
            "NOT_FOUND", "this proxy has no plugin for trees: [plugins] enabled is to have distribution", 404
        )
    return services.trees
