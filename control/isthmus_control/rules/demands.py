"""What the control log accepts of a namespace's demands (``demands``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.demands import NEVER, NONE, Confirm, Demands
from isthmus_control.model import LinkMode, Namespace, NamespaceKey, ResourceType
from isthmus_control.outcome import NamespaceChanged, Refuse, Rejection, require
from isthmus_control.rules.checks import Result

DEGRADE_AFTER_MS_MIN = 1_000
DEGRADE_AFTER_MS_MAX = 366 * 24 * 3600 * 1000
LINKS_MAX = 16


def check_demands(key: NamespaceKey, informational: bool, demands: Demands) -> None:
    """Raises Refuse where a namespace cannot ask for this."""
    if demands == NONE:
        return
    require(
        key.type is not ResourceType.PRINCIPAL,
        Rejection.INVALID,
        f"the {key} holds neither topics nor groups: only those can ask for more of synchronous links",
    )
    require(
        key.type is ResourceType.TOPIC or not demands.confirmed,
        Rejection.INVALID,
        f"the {key} holds no topics: there is nothing that its consumers could see later",
    )
    require(
        not informational,
        Rejection.INVALID,
        f"the {key} is informational: no synchronous link leads it, so it cannot ask for more of one",
    )
    after_ms, confirm = demands.degrade_after_ms, demands.confirm
    require(
        after_ms == NEVER or DEGRADE_AFTER_MS_MIN <= after_ms <= DEGRADE_AFTER_MS_MAX,
        Rejection.INVALID,
        f"acks cannot go without a link after {after_ms} ms: say {DEGRADE_AFTER_MS_MIN} to {DEGRADE_AFTER_MS_MAX}",
    )
    require(
        len(confirm.links) <= LINKS_MAX and confirm.links == tuple(sorted(set(confirm.links))),
        Rejection.INVALID,
        f"the {key} cannot be confirmed by {confirm}: name up to {LINKS_MAX} links, each once",
    )
    require(
        confirm.count == 0 if not confirm else 1 <= confirm.count <= len(confirm.links),
        Rejection.INVALID,
        f"the {key} cannot be confirmed by {confirm}: an ack waits for 1 of the links at least, and for all at most",
    )


def check_stale_reads(key: NamespaceKey, informational: bool, stale_reads: bool) -> None:
    """Raises Refuse where consumers of a namespace cannot be kept from reading what is old."""
    require(
        stale_reads or key.type is ResourceType.TOPIC,
        Rejection.INVALID,
        f"the {key} holds no topics: there is nothing that its consumers could read later",
    )
    require(
        stale_reads or not informational,
        Rejection.INVALID,
        f"the {key} is informational: it follows over no synchronous link, so nothing says whether it is In-Sync",
    )


def check_informational(state: ControlState, namespace: Namespace) -> None:
    """Raises Refuse where an informational namespace is part of a synchronous link."""
    for link, _ in state.attachments(namespace.key):
        require(
            not (namespace.informational and link.mode is LinkMode.SYNCHRONOUS),
            Rejection.CONFLICT,
            f"the {namespace.key} is attached to the synchronous link {link.name!r}, of which an informational one is "
            f"no part: detach it, or make the link asynchronous first",
        )


def check_links(state: ControlState, confirm: Confirm) -> None:
    """Raises Refuse where there is no such link; one that is deleted later confirms nothing any more."""
    for name in confirm.links:
        if name not in state.links:
            raise Refuse(Rejection.NOT_FOUND, f"there is no link {name!r}, so it can confirm nothing")


def _alter(state: ControlState, offset: int, command: c.Command, body: c.AlterDemands) -> Result:
    before = state.namespaces.get(NamespaceKey(body.type, body.prefix))
    if before is None:
        raise Refuse(Rejection.NOT_FOUND, f"there is no {NamespaceKey(body.type, body.prefix)}")
    demands = before.demands
    if body.consistency is not None:
        demands = replace(demands, consistency=body.consistency)
    if body.visibility is not None:
        demands = replace(demands, visibility=body.visibility)
    if body.degrade_after_ms is not None:
        demands = replace(demands, degrade_after_ms=body.degrade_after_ms)
    if body.confirm is not None:
        demands = replace(demands, confirm=body.confirm)
        check_links(state, body.confirm)
    informational = before.informational if body.informational is None else body.informational
    stale_reads = before.stale_reads if body.stale_reads is None else body.stale_reads
    check_demands(before.key, informational, demands)
    check_stale_reads(before.key, informational, stale_reads)
    after = replace(before, demands=demands, informational=informational, stale_reads=stale_reads)
    check_informational(state, after)
    if after == before:
        return state, ()
    return state.evolve(namespaces={**state.namespaces, before.key: after}), (NamespaceChanged(before, after),)


DEMAND_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.AlterDemands: _alter,
}
