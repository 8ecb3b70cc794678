"""The routes of the control log itself."""

from __future__ import annotations

import asyncio
import time
import uuid

from fastapi import FastAPI

from isthmus.admin import problems
from isthmus.admin.control import append, control_of
from isthmus.admin.models import ControlExportView, ControlUpgradeRequest, ControlUpgradeView, ControlView, SealedSecret
from isthmus.admin.services import AdminServices
from isthmus.control_export import write_export
from isthmus_control.apply import apply
from isthmus_control.commands import Command, RaiseLevel
from isthmus_control.levels import KNOWN_LEVEL, LEVELS, SIGNING
from isthmus_control.outcome import Rejected, Rejection
from isthmus_control.rules.levels import behind, without_key
from isthmus_plugins.links import OperationError


def install(app: FastAPI, services: AdminServices) -> None:
    """Add the routes."""

    @app.get("/v1/control", tags=["control log"], summary="Describe the control log")
    async def describe_control() -> ControlView:
        control = control_of(services)
        state, own = control.state, control.key_id
        return ControlView(
            offset=state.applied_offset,
            level=state.level,
            known_level=KNOWN_LEVEL,
            behind=[lease.name for lease in behind(state, KNOWN_LEVEL)],
            key_id=state.key_id or None,
            own_key_id=own or None,
            without_key=[lease.name for lease in without_key(state, own)] if own else [],
            unsigned_records=control.unsigned.count,
            own_sealing_key_id=services.sealing_key_id or None,
            secrets=[
                SealedSecret(link_name=link.name, secret_id=secret_id or None, key_id=sealed.key_id or None)
                for _, link in sorted(state.links.items())
                for secret_id, sealed in link.secrets.items()
            ],
            not_understood=[each.message for each in state.beyond],
        )

    @app.post("/v1/control/upgrade", tags=["control log"], summary="Raise the control log's feature level")
    async def upgrade_control(request: ControlUpgradeRequest) -> ControlUpgradeView:
        """Refused while a proxy with a lease does not know the level, or does not have this proxy's control key, if it
        has one. It is never lowered: from then on, versions that do not know it refuse to start."""
        control = control_of(services)
        before, key_before = control.state.level, control.state.key_id
        level = KNOWN_LEVEL if request.to is None else request.to
        if level > KNOWN_LEVEL:
            message = f"this proxy knows feature level {KNOWN_LEVEL} at most, not {level}: upgrade it first"
            raise problems.rejected(Rejected(Rejection.NOT_SUPPORTED, message))
        body = RaiseLevel(level, control.key_id if level >= SIGNING else "")
        if request.dry_run:
            seen = control.state.applied_offset
            command = Command(str(uuid.uuid4()), int(time.time() * 1000), services.name, seen, body)
            outcome = apply(control.state, seen + 1, command)[1]
            if isinstance(outcome, Rejected):
                raise problems.rejected(outcome)
        else:
            await append(services, body)
        brings = [LEVELS[each] for each in range(before + 1, level + 1)]
        key_id = body.key_id or key_before
        return ControlUpgradeView(
            before=before,
            after=level,
            brings=brings,
            key_id=key_id or None,
            signs=key_id != key_before,
            dry_run=request.dry_run,
        )

    @app.post("/v1/control/export", tags=["control log"], summary="Write the control log to a file", status_code=201)
    async def export_control_log() -> ControlExportView:
        """What this proxy remembers of it, also when the topic is lost. The file is on the proxy's machine: it may hold
        secrets of links, which do not go over this listener."""
        if services.export is None:
            raise problems.not_ready("the control log")
        export = services.export()
        if export is None:
            raise OperationError("NOT_FOUND", "the control log has no record yet", 404)
        try:
            path = await asyncio.to_thread(write_export, export, services.data_directory)
        except OSError as error:
            raise OperationError("NOT_WRITTEN", f"the export cannot be written: {error}", 500) from error
        return ControlExportView(
            path=str(path),
            cluster_id=export.cluster_id,
            topic_id=export.topic_id,
            generation=export.generation,
            first_offset=export.first,
            end_offset=export.end,
        )
