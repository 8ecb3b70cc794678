"""What routes do with the control log."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from fastapi import Query

from isthmus.admin import problems
from isthmus.admin.services import AdminServices, ControlLogPort
from isthmus_control.commands import AlterNamespace, Body, DeleteNamespace
from isthmus_control.model import Namespace, ResourceType
from isthmus_control.outcome import Rejected
from isthmus_control.rules.checks import PREFIX_CHARS_MAX
from isthmus_plugins.links import OperationError

ENFORCE_TIMEOUT_S: Final = 60.0
"""How long an answer waits for other proxies; longer than any but the longest leases."""

Prefix = Annotated[
    str,
    Query(
        max_length=PREFIX_CHARS_MAX,
        description="the namespace's prefix; `?prefix=` is the empty one",
        openapi_examples={"one": {"value": "orders-"}},
    ),
]
Wait = Annotated[bool, Query(description="answer when every proxy of the cluster acts on it")]


def control_of(services: AdminServices) -> ControlLogPort:
    if services.control is None:
        raise problems.not_ready("the control log")
    return services.control


async def append(services: AdminServices, body: Body) -> ControlLogPort:
    """Let the control log judge a command. Raises OperationError if it is rejected."""
    control = control_of(services)
    outcome = await control.append(body)
    if isinstance(outcome, Rejected):
        raise problems.rejected(outcome)
    return control


async def append_clearing(services: AdminServices, body: AlterNamespace | DeleteNamespace) -> ControlLogPort:
    """Let the control log judge a command that clears a reservation.

    What links left open in the namespace ends before: transactions of producers that nobody here knows, and what counts
    as received. Raises OperationError.
    """
    if services.links is not None:
        await services.links.release(body)
    return await append(services, body)


def namespace_of(control: ControlLogPort, kind: ResourceType, prefix: str) -> Namespace:
    namespace = control.state.namespace(kind, prefix)
    if namespace is None:
        raise OperationError("NOT_FOUND", f"there is no {kind} namespace {prefix!r}", 404)
    return namespace


async def enforced(control: ControlLogPort, offset: int) -> bool:
    """Wait until every proxy acts on the log up to ``offset``. False: some proxy does not yet."""
    try:
        async with asyncio.timeout(ENFORCE_TIMEOUT_S):
            await control.enforced(offset)
    except TimeoutError:
        return False
    return True
