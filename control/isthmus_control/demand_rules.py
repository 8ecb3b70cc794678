"""What the control log accepts of a namespace's demands (``demands``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.demands import NONE, Demands
from isthmus_control.model import NamespaceKey, ResourceType
from isthmus_control.outcome import Change, NamespaceChanged, Refuse, Rejection, require

Result = tuple[ControlState, tuple[Change, ...]]


def check_demands(key: NamespaceKey, informational: bool, demands: Demands) -> None:
    """Raises Refuse where a namespace cannot ask for this."""
    if demands == NONE:
        return
    require(
        key.type is ResourceType.TOPIC,
        Rejection.INVALID,
        f"the {key} holds no topics: only those can ask for more of synchronous links",
    )
    require(
        not informational,
        Rejection.INVALID,
        f"the {key} is informational: no synchronous link leads it, so it cannot ask for more of one",
    )


def _alter(state: ControlState, offset: int, command: c.Command, body: c.AlterDemands) -> Result:
    before = state.namespaces.get(NamespaceKey(body.type, body.prefix))
    if before is None:
        raise Refuse(Rejection.NOT_FOUND, f"there is no {NamespaceKey(body.type, body.prefix)}")
    demands = before.demands
    if body.consistency is not None:
        demands = replace(demands, consistency=body.consistency)
    if body.visibility is not None:
        demands = replace(demands, visibility=body.visibility)
    check_demands(before.key, before.informational, demands)
    if demands == before.demands:
        return state, ()
    after = replace(before, demands=demands)
    return state.evolve(namespaces={**state.namespaces, before.key: after}), (NamespaceChanged(before, after),)


DEMAND_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.AlterDemands: _alter,
}
