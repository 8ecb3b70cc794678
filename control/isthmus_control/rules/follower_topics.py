"""What the control log accepts of follower topics: how each of them becomes another state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import FollowerTopic, Reason, ResourceType, TopicState
from isthmus_control.outcome import FollowerTopicChanged, Refuse, Rejection, require
from isthmus_control.rules.checks import Result, check_reason, check_uuid, drop, link_named, put
from isthmus_control.rules.source_losses import abandoned

TOPIC_TRANSITIONS: Mapping[TopicState | None, frozenset[TopicState]] = {
    None: frozenset((TopicState.CREATING, TopicState.FOLLOWING, TopicState.REFUSED)),
    TopicState.CREATING: frozenset((TopicState.CREATING, TopicState.FOLLOWING, TopicState.REFUSED)),
    TopicState.FOLLOWING: frozenset((TopicState.FOLLOWING, TopicState.REFUSED)),
    TopicState.REFUSED: frozenset((TopicState.CREATING, TopicState.FOLLOWING, TopicState.REFUSED)),
    TopicState.DETACHED: frozenset((TopicState.CREATING, TopicState.FOLLOWING, TopicState.REFUSED)),
}
"""What a follower topic may become by command, from each state. DETACHED comes of detaching alone."""


def _set_follower_topic(state: ControlState, offset: int, command: c.Command, body: c.SetFollowerTopic) -> Result:
    link = link_named(state, body.link)
    check_uuid(body.source_topic_id, "the source topic id")
    if body.topic_id is not None:
        check_uuid(body.topic_id, "the topic id")
    counterpart = state.lookup.following(ResourceType.TOPIC, body.topic)
    require(
        counterpart is not None and counterpart.link.name == link.name and counterpart.remote_name == body.source_topic,
        Rejection.CONFLICT,
        f"topic {body.topic!r} does not follow {body.source_topic!r} on link {link.name!r}: no mapping says so",
    )
    before = state.follower_topics.get(body.topic)
    require(
        body.topic not in state.truncations, Rejection.CONFLICT, f"topic {body.topic!r} is being truncated: wait for it"
    )
    require(
        body.state in TOPIC_TRANSITIONS[before.state if before else None],
        Rejection.CONFLICT,
        f"topic {body.topic!r} cannot become {body.state}, it is {before.state if before else 'new'}",
    )
    require(
        before is None or not before.deleting or _is_another(before, body),
        Rejection.CONFLICT,
        f"topic {body.topic!r} is being deleted, as the source's was",
    )
    require(
        body.state is not TopicState.FOLLOWING or body.topic_id is not None,
        Rejection.INVALID,
        f"topic {body.topic!r} cannot follow without a topic id",
    )
    require(
        (body.state is TopicState.REFUSED) == (body.reason is not None),
        Rejection.INVALID,
        f"topic {body.topic!r}: a refusal has a reason, and nothing else has",
    )
    if body.reason is not None:
        check_reason(body.reason.message)
    after = FollowerTopic(
        link.name,
        body.topic,
        body.source_topic,
        body.source_topic_id,
        body.state,
        command.at_ms,
        body.topic_id if body.topic_id is not None else _kept_id(before, body),
        Reason(body.reason.code, body.reason.message) if body.reason else None,
        compacts_since_offset=offset,
        settings=dict(body.settings),
    )
    if before is not None and before.topic_id == after.topic_id:
        after = replace(after, cleaned=before.cleaned, doubted=before.doubted)
        if before.state is body.state:
            after = replace(after, compacts=before.compacts, compacts_since_offset=before.compacts_since_offset)
    if before is not None and before.source_topic_id == after.source_topic_id:
        after = replace(after, source_log=before.source_log)
        if before.topic_id == after.topic_id and before.state is body.state:
            after = replace(after, proofs=before.proofs)
    if before is not None and replace(after, recorded_ms=before.recorded_ms) == before:
        return state, ()
    return (
        state.evolve(follower_topics=put(state.follower_topics, body.topic, after)),
        (FollowerTopicChanged(before, after),),
    )


def _is_another(before: FollowerTopic, body: c.SetFollowerTopic) -> bool:
    """Whether that is about a topic that comes in the place of one that is being deleted."""
    return body.topic_id != before.topic_id and body.source_topic_id != before.source_topic_id


def _kept_id(before: FollowerTopic | None, body: c.SetFollowerTopic) -> str | None:
    """A refusal keeps the id of the topic that was there; an intent to create one has none yet."""
    return before.topic_id if before is not None and body.state is TopicState.REFUSED else None


def _compact_follower_topic(
    state: ControlState, offset: int, command: c.Command, body: c.CompactFollowerTopic
) -> Result:
    before = state.follower_topics.get(body.topic)
    if before is None or before.state is not TopicState.FOLLOWING or before.topic_id != body.topic_id:
        raise Refuse(Rejection.NOT_FOUND, f"topic {body.topic!r} with id {body.topic_id} does not follow")
    require(
        body.topic not in state.truncations, Rejection.CONFLICT, f"topic {body.topic!r} is being truncated: wait for it"
    )
    require(
        before.compacts_since_offset == body.since_offset,
        Rejection.CONFLICT,
        f"topic {body.topic!r}: whether it is compacted was decided anew meanwhile",
    )
    if before.compacts == body.compacts:
        return state, ()
    after = replace(
        before,
        compacts=body.compacts,
        compacts_since_offset=offset,
        cleaned=before.cleaned or body.compacts,
        recorded_ms=command.at_ms,
    )
    return (
        state.evolve(follower_topics=put(state.follower_topics, body.topic, after)),
        (FollowerTopicChanged(before, after),),
    )


def _forget_follower_topic(state: ControlState, offset: int, command: c.Command, body: c.ForgetFollowerTopic) -> Result:
    before = state.follower_topics.get(body.topic)
    if before is None:
        return state, ()
    require(
        before.link == body.link,
        Rejection.CONFLICT,
        f"topic {body.topic!r} belongs to link {before.link!r}, not {body.link!r}",
    )
    require(
        body.topic not in state.truncations, Rejection.CONFLICT, f"topic {body.topic!r} is being truncated: wait for it"
    )
    require(
        not before.deleting,
        Rejection.CONFLICT,
        f"topic {body.topic!r} is being deleted, as its source's was: wait for it",
    )
    state, told = abandoned(state, body.topic)
    return (
        state.evolve(follower_topics=drop(state.follower_topics, body.topic)),
        (FollowerTopicChanged(before, None), *told),
    )


def _recreate_follower_topic(
    state: ControlState, offset: int, command: c.Command, body: c.RecreateFollowerTopic
) -> Result:
    link = link_named(state, body.link)
    before = state.follower_topics.get(body.topic)
    if before is None or before.link != link.name or before.state is TopicState.DETACHED:
        raise Refuse(Rejection.NOT_FOUND, f"topic {body.topic!r} does not follow over link {link.name!r}")
    if body.topic_id is not None:
        check_uuid(body.topic_id, "the topic id")
    require(
        body.topic not in state.truncations,
        Rejection.CONFLICT,
        f"topic {body.topic!r} is being truncated: wait for that",
    )
    after = replace(
        before,
        state=TopicState.CREATING,
        topic_id=body.topic_id,
        reason=None,
        recorded_ms=command.at_ms,
        compacts=False,
        compacts_since_offset=before.compacts_since_offset if before.state is TopicState.CREATING else offset,
        cleaned=False,
        doubted={},
        proofs={},
        deleting=False,
        owner="",
    )
    if replace(after, recorded_ms=before.recorded_ms) == before:
        return state, ()
    state, told = abandoned(state, body.topic)
    return (
        state.evolve(follower_topics=put(state.follower_topics, body.topic, after)),
        (FollowerTopicChanged(before, after), *told),
    )


FOLLOWER_TOPIC_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.SetFollowerTopic: _set_follower_topic,
    c.CompactFollowerTopic: _compact_follower_topic,
    c.ForgetFollowerTopic: _forget_follower_topic,
    c.RecreateFollowerTopic: _recreate_follower_topic,
}
