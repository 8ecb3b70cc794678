"""The route of the audit."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import FastAPI, Query

from isthmus.admin import problems
from isthmus.admin.models import AuditView, Page
from isthmus.admin.services import AdminServices
from isthmus.errors import PeerFault
from isthmus_plugins.links import OperationError

LIMIT_MAX: Final = 1_000


def install(app: FastAPI, services: AdminServices) -> None:
    """Add the route."""

    @app.get("/v1/audit", tags=["audit"], summary="List changes: who, what, before, after, outcome")
    async def list_audit(
        limit: Annotated[int, Query(ge=1, le=LIMIT_MAX, description="so many, the last ones")] = 100,
    ) -> Page[AuditView]:
        """By any proxy of the cluster, the oldest first, from the topic `__isthmus_audit`."""
        if services.audit is None:
            raise problems.not_ready("the audit")
        try:
            lines = await services.audit.read(limit)
        except PeerFault as error:
            raise OperationError("AUDIT_UNAVAILABLE", f"the audit cannot be read: {error}", 503) from error
        return Page(items=[view for line in lines if (view := AuditView.of(line)) is not None])
