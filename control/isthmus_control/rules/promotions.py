"""What the control log accepts of a promotion: follower namespaces on their way to be written by clients.

What is promoted at once (topics, their groups, principals) is recorded at once, before the first step, with what the
steps need once the link is gone from the namespaces: all of it is promoted or none of it, whoever dies. Each step can
be done again by any proxy: detach the source's end, see that nothing is missing, *decide*, detach the rest, end open
transactions, give topics the source's settings where they had overrides, clear the reservations. Until that last one
nobody else may open or attach the namespaces. Before it is decided, a promotion can be abandoned.

A failover is one without the source: what is missing is missing, so it is decided from the beginning. So is what the
source has handed over (:mod:`isthmus_control.rules.reversals`): nothing is missing, and in the end this cluster leads
it over the same link.

One proxy, the *owner*, carries it out; who finds that the owner's lease is gone takes over, by beginning it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS
from isthmus_control.model import (
    NamespaceKey,
    Promotion,
    ResourceType,
    Reversal,
    ReversalStep,
    Role,
    TopicState,
    contains,
)
from isthmus_control.outcome import (
    Change,
    NamespaceChanged,
    PromotionChanged,
    Refuse,
    Rejection,
    ReversalChanged,
    require,
)
from isthmus_control.rules.acls import own_again
from isthmus_control.rules.checks import Result
from isthmus_control.rules.client_moves import check_time, told, told_no_more
from isthmus_control.rules.links import lead

_ORDER = (ResourceType.TOPIC, ResourceType.CONSUMER_GROUP, ResourceType.PRINCIPAL)
"""Committed offsets of groups are compared when nothing more comes into their topics."""


def _begin(state: ControlState, offset: int, command: c.Command, body: c.BeginPromotion) -> Result:
    require(c.is_uuid(body.owner), Rejection.INVALID, f"the owner {body.owner!r} is not a UUID")
    check_time(body.move_clients_ms)
    first = NamespaceKey(body.type, body.prefix)
    before = state.promotions.get(first)
    if before is not None:
        missing = next((key for key in body.more if key not in before.keys), None)
        require(missing is None, Rejection.CONFLICT, f"the {first} is being promoted already, without the {missing}")
        require(
            body.reversal in ("", before.reversal),
            Rejection.CONFLICT,
            f"the {first} is being promoted, not handed over",
        )
        state, changes = _take_over(state, before, body)
        if body.move_clients_ms:
            state, more = _changed(state, state.promotions[first], move_clients_ms=body.move_clients_ms)
            changes = (*changes, *more)
        if not body.without_source or before.without_source:
            return state, changes
        state, decided = _changed(state, state.promotions[first], decided=True, without_source=True)
        return state, (*changes, *decided)
    keys = tuple(sorted(dict.fromkeys((first, *body.more)), key=lambda key: _ORDER.index(key.type)))
    begun = {key: _begun(state, command, body, key, keys) for key in keys}
    begun = {key: replace(each, move_clients_ms=body.move_clients_ms) for key, each in begun.items()}
    if body.reversal:
        settings = _handed_over(state, body, keys).settings
        begun = {key: replace(each, decided=True, reversal=body.reversal) for key, each in begun.items()}
        begun = {
            key: replace(each, settings={topic: values for topic, values in settings.items() if contains(*key, topic)})
            if key.type is ResourceType.TOPIC
            else each
            for key, each in begun.items()
        }
    over = {each.reversal_id: each for key in keys if (each := state.reversal_of(key)) is not None}
    require(not any(each.at_leader for each in over.values()), Rejection.CONFLICT, f"the {first} is being reversed")
    left = {name: each for name, each in state.reversals.items() if name not in over}
    return (
        state.evolve(promotions={**state.promotions, **begun}, reversals=left),
        (
            *(PromotionChanged(None, promotion) for promotion in begun.values()),
            *(ReversalChanged(each, None) for each in over.values()),
        ),
    )


def _handed_over(state: ControlState, body: c.BeginPromotion, keys: tuple[NamespaceKey, ...]) -> Reversal:
    """What this cluster is drained for. Raises Refuse."""
    found = state.reversals.get(body.reversal)
    if found is None or found.link != body.link or {*found.keys} != {*keys}:
        raise Refuse(Rejection.NOT_FOUND, f"there is no reversal {body.reversal} here: it was abandoned, or has ended")
    require(found.step is ReversalStep.DRAINED, Rejection.CONFLICT, f"the {keys[0]} is to be led by the other cluster")
    return found


def _begun(
    state: ControlState, command: c.Command, body: c.BeginPromotion, key: NamespaceKey, keys: tuple[NamespaceKey, ...]
) -> Promotion:
    """What is recorded of one namespace. Raises Refuse."""
    require(key not in state.promotions, Rejection.CONFLICT, f"the {key} is being promoted already")
    link = state.links.get(body.link)
    mapping = link.mapping(*key) if link is not None else None
    if body.without_source and not _follows(state, key) and followed_over(state, key, body.link):
        begun = Promotion(body.link, *key, "", {}, body.owner, command.at_ms, keys)
        return replace(begun, decided=True, without_source=True, released=state.level >= ORIGINS)
    if mapping is None or mapping.role is not Role.FOLLOWER:
        raise Refuse(Rejection.NOT_FOUND, f"the {key} does not follow over link {body.link!r}")
    cut = next((topic for topic in sorted(state.truncations) if mapping.remote_name(topic) is not None), None)
    require(
        key.type is not ResourceType.TOPIC or cut is None,
        Rejection.CONFLICT,
        f"topic {cut!r} is being truncated, and no copy until that has ended: wait for it, or, where the source is "
        "gone, detach the namespace here alone (--local-only): that keeps the topic as it is while nothing is deleted",
    )
    settings = {topic: values for topic, values in body.settings.items() if contains(*key, topic)}
    if key.type is not ResourceType.TOPIC:
        settings = {}
    begun = Promotion(body.link, key.type, key.prefix, mapping.remote_prefix, settings, body.owner, command.at_ms, keys)
    return replace(begun, decided=True, without_source=True) if body.without_source else begun


def followed_over(state: ControlState, key: NamespaceKey, link: str) -> bool:
    """Whether a namespace holds topics that followed over a link, and were detached with it."""
    return key.type is ResourceType.TOPIC and any(
        record.link == link and record.state is TopicState.DETACHED and contains(*key, topic)
        for topic, record in state.follower_topics.items()
    )


def _take_over(state: ControlState, before: Promotion, body: c.BeginPromotion) -> Result:
    if before.owner == body.owner:
        return state, ()
    require(
        not state.may_run(before.owner),
        Rejection.CONFLICT,
        f"another proxy promotes the {before.key}, and its lease may still run",
    )
    return _changed(state, before, owner=body.owner)


def _changed(state: ControlState, promotion: Promotion, **what: Any) -> Result:
    """The same change for all that are promoted together."""
    after = {key: replace(state.promotions[key], **what) for key in promotion.keys}
    return (
        state.evolve(promotions={**state.promotions, **after}),
        tuple(PromotionChanged(state.promotions[key], each) for key, each in after.items()),
    )


def _owned(state: ControlState, body: c.AbandonPromotion | c.DecidePromotion | c.EndPromotion) -> Promotion | None:
    """The promotion that its owner ends, None if there is none any more. Raises Refuse: somebody took over."""
    key = NamespaceKey(body.type, body.prefix)
    found = state.promotions.get(key)
    if found is not None:
        require(found.owner == body.owner, Rejection.CONFLICT, f"another proxy took over to promote the {key}")
    return found


def _without(state: ControlState, promotion: Promotion) -> tuple[ControlState, tuple[Change, ...]]:
    left = {key: each for key, each in state.promotions.items() if key not in promotion.keys}
    gone = tuple(PromotionChanged(state.promotions[key], None) for key in promotion.keys)
    return state.evolve(promotions=left), gone


def _follows(state: ControlState, key: NamespaceKey) -> bool:
    return any(mapping.role is Role.FOLLOWER for _, mapping in state.attachments(key))


def _decide(state: ControlState, offset: int, command: c.Command, body: c.DecidePromotion) -> Result:
    before = _owned(state, body)
    if before is None:
        raise Refuse(Rejection.NOT_FOUND, f"the {NamespaceKey(body.type, body.prefix)} is not being promoted")
    require(before.decided in (None, body.goes_on), Rejection.CONFLICT, f"it was decided on the {before.key} already")
    require(
        body.goes_on or any(_follows(state, key) for key in before.keys),
        Rejection.CONFLICT,
        f"the {before.key} follows no more: its promotion can only go on",
    )
    return (state, ()) if before.decided is not None else _changed(state, before, decided=body.goes_on)


def _abandon(state: ControlState, offset: int, command: c.Command, body: c.AbandonPromotion) -> Result:
    before = _owned(state, body)
    if before is None:
        return state, ()
    require(
        not before.decided and any(_follows(state, key) for key in before.keys),
        Rejection.CONFLICT,
        f"the {before.key} follows no more, or nothing was missing: its promotion can only go on",
    )
    return _without(state, before)


def _end(state: ControlState, offset: int, command: c.Command, body: c.EndPromotion) -> Result:
    before = _owned(state, body)
    if before is None:
        return state, ()
    following = next((key for key in before.keys if _follows(state, key)), None)
    require(following is None, Rejection.CONFLICT, f"the {following} still follows: detach it first")
    begun = {key: state.promotions[key] for key in before.keys}
    remote = {key: each.remote_prefix for key, each in begun.items()}
    state, gone = _without(state, before)
    changes: list[Change] = list(gone)
    for key in before.keys:
        namespace = state.namespaces[key]
        after = replace(namespace, reserved=False, reserved_reason=None, reserved_at_offset=None)
        state, more = own_again(state, namespace)
        state = state.evolve(namespaces={**state.namespaces, key: after})
        changes += [NamespaceChanged(namespace, after), *more]
        state, over = told_no_more(state, key)
        changes += over
        for_ms = 0 if begun[key].released else begun[key].move_clients_ms  # what it followed is not known any more
        state, told_of = told(state, offset, command, before.link, key, remote[key], for_ms, there=True)
        changes += told_of
    if before.reversal:
        state, led = _led(state, offset, command, before, remote)
        changes += led
    return state, tuple(changes)


def _led(
    state: ControlState, offset: int, command: c.Command, promotion: Promotion, remote: Mapping[NamespaceKey, str]
) -> Result:
    """The state in which this cluster leads what was handed over to it, over the link by which that was.

    Where a pair cannot stand any more (the link was deleted), it leads without: nobody else does.
    """
    changes: list[Change] = []
    for key, prefix in remote.items():
        try:
            state, more = lead(state, offset, command, promotion.link, key, prefix)
        except Refuse:
            continue
        changes += more
    return state, tuple(changes)


PROMOTION_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.BeginPromotion: _begin,
    c.DecidePromotion: _decide,
    c.EndPromotion: _end,
    c.AbandonPromotion: _abandon,
}
