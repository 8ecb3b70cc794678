"""The routes of the tree of clusters that topics are distributed over."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from isthmus.admin import problems
from isthmus.admin.services import AdminServices
from isthmus_plugins.links import OperationError
from isthmus_plugins.trees import (
    AppliedTree,
    ApplyTreeRequest,
    ChooseTargetRequest,
    LeftTree,
    TreeOperations,
    TreeStatus,
)


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

    @app.get("/v1/tree/document", tags=["tree"], summary="The tree's document")
    async def tree_document() -> dict[str, Any]:
        """With all levels and targets, as a cluster that comes to the tree is to apply it."""
        return _trees(services).document()

    @app.delete("/v1/tree", tags=["tree"], summary="Leave the tree")
    async def leave_tree(dry_run: bool = False, give_up: bool = False) -> LeftTree:
        """Nothing is distributed from here any more. Others go on writing here until they have a version without it.

        Refused where others lack what is here, unless that is given up.
        """
        return await _trees(services).leave(dry_run, give_up)

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
