"""What the control log accepts of follower topics that go because their source's topic was deleted.

It is recorded that one goes before it is deleted, by its id, and from then on nothing but that becomes of it: whoever
is late deletes it by an id that no topic will ever have again. So a namespace is not detached meanwhile, and nobody
writes to a topic that is about to go. A promotion that begins waits for those that go, and none is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import FollowerTopic, NamespaceMapping, OnSourceDelete, ResourceType, TopicState
from isthmus_control.outcome import FollowerTopicChanged, Refuse, Rejection, require
from isthmus_control.rules.checks import Result, drop, link_named, put
from isthmus_control.rules.origins import origins_gone
from isthmus_control.rules.source_losses import abandoned


def _delete(state: ControlState, offset: int, command: c.Command, body: c.DeleteFollowerTopic) -> Result:
    link = link_named(state, body.link)
    before = state.follower_topics.get(body.topic)
    wanted = link.name, body.topic_id, body.source_topic_id
    if before is None or (before.link, before.topic_id, before.source_topic_id) != wanted:
        raise Refuse(Rejection.NOT_FOUND, f"topic {body.topic!r} with id {body.topic_id} does not follow that topic")
    if before.deleting and (before.owner == body.owner or state.may_run(before.owner)):
        return state, ()
    if before.deleting:
        return _changed(state, before, replace(before, owner=body.owner))
    require(before.state is TopicState.FOLLOWING, Rejection.CONFLICT, f"topic {body.topic!r} is {before.state}")
    following = state.lookup.following(ResourceType.TOPIC, body.topic)
    require(
        following is not None and following.mapping.on_source_delete is OnSourceDelete.DELETE,
        Rejection.CONFLICT,
        f"topic {body.topic!r} is kept when the source's is deleted",
    )
    require(
        body.topic not in state.truncations, Rejection.CONFLICT, f"topic {body.topic!r} is being truncated: wait for it"
    )
    require(not state.is_promoted(body.topic), Rejection.CONFLICT, f"topic {body.topic!r} is being promoted")
    held = state.held(body.topic, body.topic_id)
    require(
        held is None,
        Rejection.CONFLICT,
        f"topic {body.topic!r} holds what the source lost before: an operator decides about it",
    )
    after = replace(before, state=TopicState.CREATING, deleting=True, owner=body.owner, recorded_ms=command.at_ms)
    state, told = abandoned(state, body.topic)
    return _changed(state, before, after, *told)


def _keep(state: ControlState, offset: int, command: c.Command, body: c.KeepFollowerTopic) -> Result:
    before = _going(state, body)
    if before is None or before.owner != body.owner:
        return state, ()
    after = replace(before, state=TopicState.FOLLOWING, deleting=False, owner="", recorded_ms=command.at_ms)
    return _changed(state, before, after)


def _deleted(state: ControlState, offset: int, command: c.Command, body: c.FollowerTopicDeleted) -> Result:
    before = _going(state, body)
    if before is None:
        return state, ()
    history = state.histories.get(body.topic)
    if history is not None and history.topic_id == body.topic_id:
        state = state.evolve(histories=drop(state.histories, body.topic))
    state = origins_gone(state, body.topic, body.topic_id)
    claims = {
        place: claim
        for place, claim in state.claims.items()
        if place[0] != body.topic or claim.topic_id != body.topic_id
    }
    if len(claims) < len(state.claims):
        state = state.evolve(claims=claims)
    return (
        state.evolve(follower_topics=drop(state.follower_topics, body.topic)),
        (FollowerTopicChanged(before, None),),
    )


def _note_log(state: ControlState, offset: int, command: c.Command, body: c.NoteSourceLog) -> Result:
    link = link_named(state, body.link)
    topics = dict(state.follower_topics)
    changes = []
    for said in body.topics:
        before = topics.get(said.topic)
        known = before is not None and (before.link, before.source_topic_id) == (link.name, said.source_topic_id)
        if before is not None and known and before.source_log != body.log:
            topics[said.topic] = after = replace(before, source_log=body.log)
            changes.append(FollowerTopicChanged(before, after))
    return (state.evolve(follower_topics=topics), tuple(changes)) if changes else (state, ())


def _going(state: ControlState, body: c.KeepFollowerTopic | c.FollowerTopicDeleted) -> FollowerTopic | None:
    """The record of the topic, if it is that one which goes."""
    found = state.follower_topics.get(body.topic)
    known = found is not None and (found.link, found.topic_id) == (body.link, body.topic_id)
    return found if found is not None and known and found.deleting else None


def _changed(state: ControlState, before: FollowerTopic, after: FollowerTopic, *told: Any) -> Result:
    topics = put(state.follower_topics, after.topic, after)
    return state.evolve(follower_topics=topics), (FollowerTopicChanged(before, after), *told)


def check_none_under_way(state: ControlState, link: str, mapping: NamespaceMapping) -> None:
    """Refuse to detach a mapping one of whose topics is about to be deleted."""
    for name, topic in sorted(state.follower_topics.items()):
        require(
            not (topic.deleting and topic.link == link and mapping.holds(name)),
            Rejection.CONFLICT,
            f"topic {name!r} is being deleted, as the source's was: wait until it is gone, or kept",
        )


SOURCE_DELETION_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.DeleteFollowerTopic: _delete,
    c.KeepFollowerTopic: _keep,
    c.FollowerTopicDeleted: _deleted,
    c.NoteSourceLog: _note_log,
}
