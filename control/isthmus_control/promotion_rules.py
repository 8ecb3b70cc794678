"""What the control log accepts of a promotion: a follower namespace on its way to be written by clients.

A promotion is recorded before its first step, with what its steps need once the link is gone from the namespace, and
each step can be done again by any proxy: detach at both ends, end open transactions, give topics the source's settings
where they had overrides, clear the reservation. Until that last one nobody else may open or attach the namespace. While
it follows still, a promotion can be abandoned.

One proxy, the *owner*, carries it out; who finds that the owner's lease is gone takes over, by beginning it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.acl_rules import own_again
from isthmus_control.control_state import ControlState
from isthmus_control.model import NamespaceKey, Promotion, ResourceType, Role
from isthmus_control.outcome import Change, NamespaceChanged, PromotionChanged, Refuse, Rejection, require

Result = tuple[ControlState, tuple[Change, ...]]


def _begin(state: ControlState, offset: int, command: c.Command, body: c.BeginPromotion) -> Result:
    require(c.is_uuid(body.owner), Rejection.INVALID, f"the owner {body.owner!r} is not a UUID")
    key = NamespaceKey(body.type, body.prefix)
    before = state.promotions.get(key)
    if before is not None:
        return _take_over(state, before, body)
    link = state.links.get(body.link)
    mapping = link.mapping(body.type, body.prefix) if link is not None else None
    if mapping is None or mapping.role is not Role.FOLLOWER:
        raise Refuse(Rejection.NOT_FOUND, f"the {key} does not follow over link {body.link!r}")
    cut = next((topic for topic in sorted(state.truncations) if mapping.remote_name(topic) is not None), None)
    require(
        body.type is not ResourceType.TOPIC or cut is None,
        Rejection.CONFLICT,
        f"topic {cut!r} is being truncated: wait for that",
    )
    begun = Promotion(
        body.link, body.type, body.prefix, mapping.remote_prefix, body.settings, body.owner, command.at_ms
    )
    return state.evolve(promotions={**state.promotions, key: begun}), (PromotionChanged(None, begun),)


def _take_over(state: ControlState, before: Promotion, body: c.BeginPromotion) -> Result:
    if before.owner == body.owner:
        return state, ()
    require(
        not state.may_run(before.owner),
        Rejection.CONFLICT,
        f"another proxy promotes the {before.key}, and its lease may still run",
    )
    after = replace(before, owner=body.owner)
    return state.evolve(promotions={**state.promotions, before.key: after}), (PromotionChanged(before, after),)


def _owned(state: ControlState, body: c.AbandonPromotion | c.EndPromotion) -> Promotion | None:
    """The promotion that its owner ends, None if there is none any more. Raises Refuse: somebody took over."""
    key = NamespaceKey(body.type, body.prefix)
    found = state.promotions.get(key)
    if found is not None:
        require(found.owner == body.owner, Rejection.CONFLICT, f"another proxy took over to promote the {key}")
    return found


def _without(state: ControlState, key: NamespaceKey) -> dict[NamespaceKey, Promotion]:
    return {other: promotion for other, promotion in state.promotions.items() if other != key}


def _abandon(state: ControlState, offset: int, command: c.Command, body: c.AbandonPromotion) -> Result:
    before = _owned(state, body)
    if before is None:
        return state, ()
    key = before.key
    require(
        any(mapping.role is Role.FOLLOWER for _, mapping in state.attachments(key)),
        Rejection.CONFLICT,
        f"the {key} follows no more: its promotion can only go on",
    )
    return state.evolve(promotions=_without(state, key)), (PromotionChanged(before, None),)


def _end(state: ControlState, offset: int, command: c.Command, body: c.EndPromotion) -> Result:
    before = _owned(state, body)
    if before is None:
        return state, ()
    key = before.key
    require(
        all(mapping.role is not Role.FOLLOWER for _, mapping in state.attachments(key)),
        Rejection.CONFLICT,
        f"the {key} still follows: detach it first",
    )
    namespace = state.namespaces[key]
    after = replace(namespace, reserved=False, reserved_reason=None, reserved_at_offset=None)
    state, changes = own_again(state, namespace)
    return (
        state.evolve(promotions=_without(state, key), namespaces={**state.namespaces, key: after}),
        (PromotionChanged(before, None), NamespaceChanged(namespace, after), *changes),
    )


PROMOTION_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.BeginPromotion: _begin,
    c.EndPromotion: _end,
    c.AbandonPromotion: _abandon,
}
