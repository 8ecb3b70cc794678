"""What the control log accepts of namespaces: made, reserved or not, deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import Namespace, NamespaceKey, ResourceType, Role, TopicState
from isthmus_control.outcome import Change, FollowerTopicChanged, NamespaceChanged, Rejection, require
from isthmus_control.rules.acls import own_again
from isthmus_control.rules.checks import NAMESPACES_MAX, Result, check_prefix, check_reason, drop, namespace_at, put
from isthmus_control.rules.client_moves import told_no_more
from isthmus_control.rules.demands import check_demands, check_links, check_stale_reads


def reserve(namespace: Namespace, offset: int, reason: str) -> Namespace:
    """Reserved; one that is already stays reserved since when it was, so nobody waits for it again."""
    if namespace.reserved:
        return replace(namespace, reserved_reason=reason)
    return replace(namespace, reserved=True, reserved_reason=reason, reserved_at_offset=offset)


BY_OPERATOR = "reserved by the operator"


def _create_namespace(state: ControlState, offset: int, command: c.Command, body: c.CreateNamespace) -> Result:
    check_prefix(body.type, body.prefix)
    check_reason(body.reason)
    key = NamespaceKey(body.type, body.prefix)
    require(key not in state.namespaces, Rejection.ALREADY_EXISTS, f"the {key} exists already")
    require(len(state.namespaces) < NAMESPACES_MAX, Rejection.CONFLICT, f"there are {NAMESPACES_MAX} namespaces")
    require(body.reserved or body.reason is None, Rejection.INVALID, "a reason is for a reservation, and there is none")
    check_demands(key, body.informational, body.demands)
    check_stale_reads(key, body.informational, body.stale_reads)
    check_links(state, body.demands.confirm)
    namespace = Namespace(
        body.type,
        body.prefix,
        command.at_ms,
        informational=body.informational,
        demands=body.demands,
        stale_reads=body.stale_reads,
    )
    if body.reserved:
        namespace = reserve(namespace, offset, body.reason or BY_OPERATOR)
    return state.evolve(namespaces=put(state.namespaces, key, namespace)), (NamespaceChanged(None, namespace),)


def _alter_namespace(state: ControlState, offset: int, command: c.Command, body: c.AlterNamespace) -> Result:
    check_reason(body.reason)
    before = namespace_at(state, body.type, body.prefix)
    reversal = state.reversal_of(before.key)
    require(
        reversal is None or not reversal.at_leader,
        Rejection.CONFLICT,
        f"the {before.key} is being reversed: wait for that, or abandon it",
    )
    following = next((link for link, m in state.attachments(before.key) if m.role is Role.FOLLOWER), None)
    if body.reserved:
        if before.reserved and (body.reason is None or following is not None):
            return state, ()
        after = reserve(before, offset, body.reason or BY_OPERATOR)
    else:
        require(
            following is None,
            Rejection.CONFLICT,
            f"the {before.key} follows link {following.name!r}, so it stays reserved: detach it first"
            if following
            else "",
        )
        require(body.reason is None, Rejection.INVALID, "a reason is for a reservation, and this clears it")
        require(
            before.key not in state.promotions,
            Rejection.CONFLICT,
            f"the {before.key} is being promoted, which clears its reservation when everything else is done",
        )
        after = replace(before, reserved=False, reserved_reason=None, reserved_at_offset=None)
    if after == before:
        return state, ()
    changes: tuple[Change, ...] = ()
    if not after.reserved:
        state, changes = own_again(state, before)
        state, over = told_no_more(state, before.key, there=False)  # clients are to write here
        changes = (*changes, *over)
    return (
        state.evolve(namespaces=put(state.namespaces, before.key, after)),
        (NamespaceChanged(before, after), *changes),
    )


def _delete_namespace(state: ControlState, offset: int, command: c.Command, body: c.DeleteNamespace) -> Result:
    before = namespace_at(state, body.type, body.prefix)
    links = [link.name for link, _ in state.attachments(before.key)]
    require(
        not links,
        Rejection.CONFLICT,
        f"the {before.key} is attached to link {', '.join(repr(name) for name in sorted(links))}: detach it first",
    )
    require(before.key not in state.promotions, Rejection.CONFLICT, f"the {before.key} is being promoted")
    state, more = own_again(state, before)
    state, over = told_no_more(state, before.key)
    changes: list[Change] = [NamespaceChanged(before, None), *more, *over]
    topics = dict(state.follower_topics)
    if body.type is ResourceType.TOPIC:
        # Only what no remaining namespace shows; the history of the topics stays.
        others = [n for n in state.namespaces.values() if n.type is ResourceType.TOPIC and n.key != before.key]
        for name, topic in sorted(state.follower_topics.items()):
            if name in before and topic.state is TopicState.DETACHED and not any(name in other for other in others):
                del topics[name]
                changes.append(FollowerTopicChanged(topic, None))
    return (
        state.evolve(namespaces=drop(state.namespaces, before.key), follower_topics=topics),
        tuple(changes),
    )


NAMESPACE_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.CreateNamespace: _create_namespace,
    c.AlterNamespace: _alter_namespace,
    c.DeleteNamespace: _delete_namespace,
}
