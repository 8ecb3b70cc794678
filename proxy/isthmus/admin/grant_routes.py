"""Routes about consent: tokens with which links are made, and what the other cluster of a link may have done here."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from isthmus.admin.models import Page
from isthmus_plugins.link_operations import LinkOperations
from isthmus_plugins.links import ChangeGrants, CreateToken, GrantsStatus, NewToken, TokenStatus


def install(app: FastAPI, operations: Callable[[], LinkOperations]) -> None:
    """Add them. ``operations`` raises OperationError where there are none."""

    @app.get("/v1/link-tokens", tags=["links"], summary="List tokens that nobody has used")
    async def list_tokens() -> Page[TokenStatus]:
        return Page(items=operations().tokens())

    @app.post("/v1/link-tokens", tags=["links"], summary="Make a token for one link", status_code=201)
    async def create_token(request: CreateToken) -> NewToken:
        """Another cluster makes one link with this one by it, before it expires. The token is shown this once."""
        return await operations().create_token(request)

    @app.delete("/v1/link-tokens/{id}", tags=["links"], summary="Have a token be none any more", status_code=204)
    async def delete_token(id: str) -> None:
        await operations().delete_token(id)

    @app.get("/v1/links/{name}/grants", tags=["links"], summary="What the other cluster may have done here")
    async def list_grants(name: str) -> GrantsStatus:
        return operations().grants(name)

    @app.post("/v1/links/{name}/grants", tags=["links"], summary="Let the other cluster have more done here")
    async def grant(name: str, request: ChangeGrants) -> GrantsStatus:
        """What waits for it is attached within some seconds, by the cluster that asked for it."""
        return await operations().grant(name, request)

    @app.post("/v1/links/{name}/grants/revoke", tags=["links"], summary="Let the other cluster have less done here")
    async def revoke(name: str, request: ChangeGrants) -> GrantsStatus:
        """From now on. What is attached goes on until it is detached."""
        return await operations().revoke(name, request)
