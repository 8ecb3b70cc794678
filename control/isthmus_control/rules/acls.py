"""What the control log records of access control bindings: those that links made here.

A follower end deletes only what a link made, so each binding is recorded before it is created, and until it is deleted.
The record belongs to the principal namespace and outlives the link: whoever attaches the namespace again takes away
what the source does not have any more. When the namespace is reserved no longer, its bindings are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import Namespace, ResourceType, Role
from isthmus_control.outcome import AclsRecorded, Rejection, require
from isthmus_control.rules.checks import Result

ACLS_MAX = 50_000
"""Bindings of one namespace that links made."""


def _record(state: ControlState, offset: int, command: c.Command, body: c.RecordAcls) -> Result:
    link = state.links.get(body.link)
    mapping = link.mapping(ResourceType.PRINCIPAL, body.local_prefix) if link is not None else None
    require(
        mapping is not None and mapping.role is Role.FOLLOWER,
        Rejection.CONFLICT,
        f"the principal namespace {body.local_prefix!r} does not follow on link {body.link!r}",
    )
    assert mapping is not None
    for binding in body.made:
        require(
            mapping.holds(binding.principal),
            Rejection.INVALID,
            f"{binding.principal!r} is not in the principal namespace {body.local_prefix!r}",
        )
    before = frozenset(state.acls.get(body.local_prefix, ()))
    after = (before | frozenset(body.made)) - frozenset(body.deleted)
    require(len(after) <= ACLS_MAX, Rejection.CONFLICT, f"there are {ACLS_MAX} bindings of {body.local_prefix!r}")
    if after == before:
        return state, ()
    acls = {prefix: known for prefix, known in state.acls.items() if prefix != body.local_prefix}
    if after:
        acls[body.local_prefix] = tuple(sorted(after))
    return state.evolve(acls=acls), (AclsRecorded(body.local_prefix, len(after)),)


def own_again(state: ControlState, namespace: Namespace) -> Result:
    """The state after a namespace was deleted, or its reservation cleared."""
    if namespace.type is not ResourceType.PRINCIPAL or namespace.prefix not in state.acls:
        return state, ()
    rest = {prefix: known for prefix, known in state.acls.items() if prefix != namespace.prefix}
    return state.evolve(acls=rest), (AclsRecorded(namespace.prefix, 0),)


ACL_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {c.RecordAcls: _record}
