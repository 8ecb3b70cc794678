"""What the control log accepts of copies of offsets topics (KIP-986): over which link, and in which form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.grants import OFFSETS_COPY
from isthmus_control.levels import ESCAPED_IDS
from isthmus_control.model import Link, NamespaceMapping, OffsetsCopy, OffsetsForm, Role, TopicState, offsets_mapping
from isthmus_control.outcome import Change, FollowerTopicChanged, LinkChanged, Refuse, Rejection, require
from isthmus_control.rules import grants
from isthmus_control.rules.checks import Result
from isthmus_control.rules.truncations import cancelled
from isthmus_protocol.group_names import pattern_problem

OFFSETS_GROUPS_MAX = 100
"""Patterns of groups of one redacted copy."""


def _set_offsets_topic(state: ControlState, offset: int, command: c.Command, body: c.SetOffsetsTopic) -> Result:
    link = state.links.get(body.link)
    if link is None:
        raise Refuse(Rejection.NOT_FOUND, f"there is no link {body.link!r}")
    before = link.offsets_topic(body.role)
    others = tuple(mapping for mapping in link.offsets_topics if mapping is not before)
    if body.copy is None:
        if before is None:
            return state, ()
        state, changes = offsets_topic_ended(state, link, before, command.at_ms)
        after = replace(link, offsets_topics=others)
        return state.evolve(links={**state.links, link.name: after}), (*changes, LinkChanged(link, after))
    check_offsets_copy(body.copy)
    if before is not None and before.offsets == body.copy:
        return state, ()
    if body.for_peer and before is None:
        grants.check_granted(link, (OFFSETS_COPY,))
    escaped = state.level >= ESCAPED_IDS
    mapping = offsets_mapping(link, body.role, body.copy, command.at_ms, offset, escaped=escaped)
    if body.role is Role.FOLLOWER:
        rival = next(
            (
                other
                for other in state.links.values()
                if other.name != link.name
                and (copied := other.offsets_topic(Role.FOLLOWER)) is not None
                and (other.remote_cluster_id == link.remote_cluster_id or copied.local_prefix == mapping.local_prefix)
            ),
            None,
        )
        if rival is not None:
            copied_from = f"the offsets topic of cluster {rival.remote_cluster_id}"
            raise Refuse(Rejection.CONFLICT, f"{copied_from} is copied over link {rival.name!r} already")
    after = replace(link, offsets_topics=(*others, mapping))
    return state.evolve(links={**state.links, link.name: after}), (LinkChanged(link, after),)


def check_offsets_copy(copy: OffsetsCopy) -> None:
    """Raises Refuse for a form that makes no sense."""
    redacted = copy.form is OffsetsForm.REDACTED
    require(
        bool(copy.groups) == redacted,
        Rejection.INVALID,
        "name the groups whose offsets are copied"
        if redacted
        else f"groups are chosen for a {OffsetsForm.REDACTED} copy only, this one is {copy.form}",
    )
    require(len(copy.groups) <= OFFSETS_GROUPS_MAX, Rejection.INVALID, f"more than {OFFSETS_GROUPS_MAX} patterns")
    for pattern in copy.groups:
        if problem := pattern_problem(pattern):
            raise Refuse(Rejection.INVALID, problem)


def offsets_topic_ended(state: ControlState, link: Link, mapping: NamespaceMapping, at_ms: int) -> Result:
    """The state in which an offsets topic is not copied any more; its copy stays, and stays reserved."""
    if mapping.role is Role.LEADER:
        return state, ()
    state, stopped = cancelled(state, link.name, mapping, at_ms)
    state, detached = topics_detached(state, link, mapping, at_ms)
    return state, (*stopped, *detached)


def topics_detached(state: ControlState, link: Link, mapping: NamespaceMapping, at_ms: int) -> Result:
    """The state in which the topics of a mapping follow no more."""
    changes: list[Change] = []
    topics = dict(state.follower_topics)
    for name, topic in sorted(state.follower_topics.items()):
        if topic.link == link.name and mapping.remote_name(name) == topic.source_topic:
            topics[name] = replace(topic, state=TopicState.DETACHED, reason=None, recorded_ms=at_ms)
            if topic.topic_id is None:
                del topics[name]  # intended only: there is nothing to detach
            changes.append(FollowerTopicChanged(topic, topics.get(name)))
    return state.evolve(follower_topics=topics), tuple(changes)


OFFSETS_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.SetOffsetsTopic: _set_offsets_topic,
}
