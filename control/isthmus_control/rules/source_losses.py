"""What the control log accepts of losses of the source (:mod:`isthmus_control.source_losses`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import NamespaceMapping, ResourceType, Role
from isthmus_control.outcome import Change, Refuse, Rejection, SourceLossChanged, require
from isthmus_control.rules.checks import ENTRIES_MAX, Result, link_named
from isthmus_control.source_losses import COMMITS_MAX, TOLD_MAX, LossState, SourceLoss
from isthmus_control.truncations import Truncation

Losses = tuple[ControlState, list[Change]]


def _record(state: ControlState, offset: int, command: c.Command, body: c.RecordSourceLosses) -> Result:
    link = link_named(state, body.link)
    require(link.link_id == body.link_id, Rejection.CONFLICT, f"link {body.link!r} has the id {link.link_id} now")
    require(0 < len(body.losses) <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
    changes: list[Change] = []
    for found in body.losses:
        _check(state, body.link, found)
        before = _open(state, body.link, found)
        after = SourceLoss(
            offset if before is None else before.number,
            body.link,
            found.type,
            found.namespace,
            found.topic,
            found.topic_id,
            found.partition,
            found.from_offset,
            found.to_offset,
            found.count,
            # An operator who has had it cut meanwhile has decided.
            LossState.CUTTING if _is_released(before) and found.state is LossState.HELD else found.state,
            command.at_ms if before is None else before.found_ms,
            command.by if before is None else before.found_by,
            found.groups,
            found.commits[:COMMITS_MAX],
            found.salvaged,
            _is_acknowledged(before, found),
        )
        if before != after:
            state, changes = _changed(state, changes, before, after)
    return state, tuple(changes)


def _check(state: ControlState, link_name: str, found: c.FoundLoss) -> None:
    """Raises Refuse for what no follower can have found."""
    mapping = state.links[link_name].mapping(found.type, found.namespace)
    if mapping is None or mapping.role is not Role.FOLLOWER or found.type is ResourceType.PRINCIPAL:
        raise Refuse(
            Rejection.CONFLICT, f"the {found.type} namespace {found.namespace!r} does not follow over {link_name!r}"
        )
    require(
        found.partition >= 0 and 0 <= found.from_offset < found.to_offset and found.count > 0,
        Rejection.INVALID,
        f"no loss of {found.topic}-{found.partition} is from {found.from_offset} to {found.to_offset}",
    )
    require(found.state is not LossState.KEPT, Rejection.INVALID, "what follows is held or cut")
    if found.type is not ResourceType.TOPIC:
        return
    record = state.follower_topics.get(found.topic)
    require(
        record is not None and (record.link, record.topic_id) == (link_name, found.topic_id),
        Rejection.CONFLICT,
        f"topic {found.topic!r} with id {found.topic_id} does not follow over link {link_name!r}",
    )


def _open(state: ControlState, link_name: str, found: c.FoundLoss) -> SourceLoss | None:
    """The loss that was found there before, if it is not over."""
    place = (link_name, found.type, found.namespace, found.topic, found.topic_id, found.partition)
    return next(
        (
            loss
            for loss in state.source_losses
            if loss.is_open
            and (loss.link, loss.type, loss.namespace, loss.topic, loss.topic_id, loss.partition) == place
        ),
        None,
    )


def _is_released(before: SourceLoss | None) -> bool:
    return before is not None and before.state is LossState.CUTTING


def _is_acknowledged(before: SourceLoss | None, found: c.FoundLoss) -> bool:
    """Whether the operator knows what was found again: no more was lost."""
    return (
        before is not None
        and before.acknowledged
        and (before.from_offset, before.to_offset) == (found.from_offset, found.to_offset)
    )


def _release(state: ControlState, offset: int, command: c.Command, body: c.ReleaseSourceLosses) -> Result:
    require(
        state.held(body.topic, body.topic_id) is not None,
        Rejection.CONFLICT,
        f"nothing of topic {body.topic!r} with id {body.topic_id} is held",
    )
    state, changes = _moved(
        state,
        LossState.CUTTING,
        lambda loss: _held(loss) and (loss.topic, loss.topic_id) == (body.topic, body.topic_id),
    )
    return state, tuple(changes)


def _acknowledge(state: ControlState, offset: int, command: c.Command, body: c.AcknowledgeSourceLosses) -> Result:
    """Those that are open stay, and are told no more."""
    link_named(state, body.link)
    changes: list[Change] = []
    for before in state.source_losses:
        if before.link != body.link or before.number > body.number or before.acknowledged:
            continue
        after = replace(before, acknowledged=True) if before.is_open else None
        state = _put(state, before, after)
        changes.append(SourceLossChanged(before, after))
    left_off = {name: count for name, count in state.source_losses_left_off.items() if name != body.link}
    return state.evolve(source_losses_left_off=left_off), tuple(changes)


# --- what other rules make of them


def released(state: ControlState, link_name: str, mapping: NamespaceMapping) -> Losses:
    """What is held of a mapping is cut."""
    return _moved(state, LossState.CUTTING, lambda loss: _held(loss) and _is_of(loss, link_name, mapping))


def kept(state: ControlState, link_name: str, mapping: NamespaceMapping) -> Losses:
    """A mapping is detached: what is not cut stays."""
    return _moved(state, LossState.KEPT, lambda loss: loss.is_open and _is_of(loss, link_name, mapping))


def abandoned(state: ControlState, topic: str) -> Losses:
    """An operator has decided otherwise: a topic follows no more, or is made anew."""
    return _moved(state, LossState.KEPT, lambda loss: loss.is_open and loss.topic == topic)


def truncated(state: ControlState, truncation: Truncation, is_made: bool) -> Losses:
    """A topic's truncation is over; ``is_made``: it was made anew."""
    changes: list[Change] = []
    if not is_made and (not truncation.cuts or truncation.records):
        return state, changes  # it was cancelled, and not because nothing had to be cut
    for before in state.source_losses:
        if before.state is LossState.CUTTING and (before.topic, before.topic_id) == (
            truncation.topic,
            truncation.topic_id,
        ):
            after = replace(before, state=LossState.CUT, salvaged=truncation.salvage_file(before.partition))
            state, changes = _changed(state, changes, before, after)
    return state, changes


def without_losses(state: ControlState, link_name: str) -> ControlState:
    """The state in which nothing is told of a link, which is deleted."""
    if link_name not in {*state.source_losses_left_off, *(loss.link for loss in state.source_losses)}:
        return state
    losses = tuple(loss for loss in state.source_losses if loss.link != link_name)
    left_off = {name: count for name, count in state.source_losses_left_off.items() if name != link_name}
    return state.evolve(source_losses=losses, source_losses_left_off=left_off)


def _held(loss: SourceLoss) -> bool:
    return loss.state is LossState.HELD


def _is_of(loss: SourceLoss, link_name: str, mapping: NamespaceMapping) -> bool:
    return (loss.link, loss.type, loss.namespace) == (link_name, mapping.type, mapping.local_prefix)


def _moved(state: ControlState, to: LossState, which: Callable[[SourceLoss], bool]) -> Losses:
    changes: list[Change] = []
    for before in state.source_losses:
        if which(before):
            state, changes = _changed(state, changes, before, replace(before, state=to))
    return state, changes


def _changed(state: ControlState, changes: list[Change], before: SourceLoss | None, after: SourceLoss) -> Losses:
    """One that was acknowledged, and is over, is told no more."""
    stays = after if after.is_open or not after.acknowledged else None
    return _put(state, before, stays), [*changes, SourceLossChanged(before, stays)]


def _put(state: ControlState, before: SourceLoss | None, after: SourceLoss | None) -> ControlState:
    """One in the other's place. Of those that nobody waits for the oldest give way."""
    if before is not None:
        replaced = (after if loss is before else loss for loss in state.source_losses)
        return state.evolve(source_losses=tuple(loss for loss in replaced if loss is not None))
    assert after is not None
    losses = (*state.source_losses, after)
    told = [loss for loss in losses if not loss.is_open]
    gone = told[: max(0, len(told) - TOLD_MAX)]
    left_off = dict(state.source_losses_left_off)
    for loss in gone:
        left_off[loss.link] = left_off.get(loss.link, 0) + 1
    return state.evolve(
        source_losses=tuple(loss for loss in losses if loss not in gone), source_losses_left_off=left_off
    )


SOURCE_LOSS_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.RecordSourceLosses: _record,
    c.ReleaseSourceLosses: _release,
    c.AcknowledgeSourceLosses: _acknowledge,
}
