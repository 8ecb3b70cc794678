"""What the control log accepts of a truncation: the rules of :mod:`isthmus_control.truncations` as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.levels import CAUGHT_UP_CUTS
from isthmus_control.model import (
    FollowerTopic,
    NamespaceMapping,
    ProvenanceRange,
    Reason,
    ResourceType,
    Reversal,
    ReversalStep,
    TopicHistory,
    TopicState,
    contains,
)
from isthmus_control.outcome import (
    Change,
    FollowerTopicChanged,
    NamespaceAttached,
    ProvenanceChanged,
    Refuse,
    Rejection,
    ReversalChanged,
    TruncationChanged,
    require,
)
from isthmus_control.rules.checks import Result
from isthmus_control.rules.origins import origins_succeeded
from isthmus_control.rules.source_losses import truncated
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import (
    CANCELLABLE,
    MOVED_OFFSETS_MAX,
    PAST_TRUNCATIONS_MAX,
    SUCCESSIONS_MAX,
    TRUNCATION_TRANSITIONS,
    PartitionCut,
    Succession,
    Truncation,
    TruncationPhase,
)

_P = TruncationPhase


def _begin(state: ControlState, offset: int, command: c.Command, body: c.BeginTruncation) -> Result:
    record = state.follower_topics.get(body.topic)
    if (
        record is None
        or record.state is not TopicState.FOLLOWING
        or record.link != body.link
        or record.topic_id != body.topic_id
    ):
        raise Refuse(
            Rejection.CONFLICT, f"topic {body.topic!r} with id {body.topic_id} does not follow over link {body.link!r}"
        )
    require(body.topic not in state.truncations, Rejection.ALREADY_EXISTS, f"topic {body.topic!r} is truncated already")
    held = state.held(body.topic, body.topic_id)
    require(held is None, Rejection.CONFLICT, "" if held is None else f"nothing is cut of it: {held.describe()}")
    require(body.partitions, Rejection.INVALID, f"topic {body.topic!r} has no partitions")
    require(c.is_uuid(body.owner), Rejection.INVALID, f"the owner {body.owner!r} is not a UUID")
    if body.source is not None:
        require(
            body.source.former == record.source_topic_id and c.is_uuid(body.source.successor),
            Rejection.CONFLICT,
            f"topic {body.topic!r} follows {record.source_topic_id}, not what {body.source.successor!r} succeeded",
        )
        require(
            len(body.source.offsets) >= len(body.partitions) and min(body.source.offsets) >= 0,
            Rejection.INVALID,
            f"topic {body.topic!r}: one offset for each of {len(body.partitions)} partitions",
        )
    # What is about to be led here is not what it was: who handed it over is told so, and not that this cluster leads.
    drained = [each for each in state.reversals.values() if _drained_with(each, body.topic)]
    left = {name: each for name, each in state.reversals.items() if each not in drained}
    state = state.evolve(reversals=left) if drained else state
    shift = state.epoch_shifts.get(body.topic)
    begun = Truncation(
        body.link,
        body.topic,
        body.topic_id,
        body.reason,
        body.partitions,
        body.message_bytes_max,
        body.proxy,
        body.owner,
        command.at_ms,
        _P.COMPARING,
        command.at_ms,
        epochs_shifted_by=shift.by if shift is not None and shift.topic_id == body.topic_id else 0,
        source=body.source,
    )
    changes: list[Change] = [TruncationChanged(None, begun), *(ReversalChanged(each, None) for each in drained)]
    if (
        record is not None and record.compacts
    ):  # nothing is taken out while it is compared and spooled, and the new one is filled first
        frozen = replace(record, compacts=False, compacts_since_offset=offset, recorded_ms=command.at_ms)
        state = state.evolve(follower_topics={**state.follower_topics, body.topic: frozen})
        changes.append(FollowerTopicChanged(record, frozen))
    return _with(state, begun), tuple(changes)


def _drained_with(reversal: Reversal, topic: str) -> bool:
    """Whether this cluster is to lead a topic, which it follows."""
    topics = (key.prefix for key in reversal.keys if key.type is ResourceType.TOPIC)
    is_drained = reversal.step is ReversalStep.DRAINED
    return is_drained and any(contains(ResourceType.TOPIC, prefix, topic) for prefix in topics)


def _take_over(state: ControlState, offset: int, command: c.Command, body: c.TakeOverTruncation) -> Result:
    before = _under_way(state, body.topic, body.topic_id)
    if before.owner == body.owner:
        return state, ()
    require(
        not state.may_run(before.owner),
        Rejection.CONFLICT,
        f"proxy {before.proxy!r} truncates topic {body.topic!r}, and its lease may still run",
    )
    require(c.is_uuid(body.owner), Rejection.INVALID, f"the owner {body.owner!r} is not a UUID")
    after = replace(before, proxy=body.proxy, owner=body.owner, trouble=None)
    return _with(state, after), (TruncationChanged(before, after),)


def _advance(state: ControlState, offset: int, command: c.Command, body: c.AdvanceTruncation) -> Result:
    before = _owned(state, body.topic, body.topic_id, body.owner)
    require(
        body.phase in TRUNCATION_TRANSITIONS[before.phase],
        Rejection.CONFLICT,
        f"the truncation of topic {body.topic!r} cannot go from {before.phase} to {body.phase}",
    )
    cuts = () if body.phase is _P.COMPARING else before.cuts
    after = replace(
        before,
        phase=body.phase,
        phase_ms=command.at_ms,
        trouble=None,
        cuts=cuts if body.cuts is None else body.cuts,
        salvaged=before.salvaged if body.salvaged is None else body.salvaged,
        new_topic_id=before.new_topic_id if body.new_topic_id is None else body.new_topic_id,
        moved=before.moved if body.moved is None else body.moved[:MOVED_OFFSETS_MAX],
        moved_count=before.moved_count if body.moved_count is None else body.moved_count,
        attempt=before.attempt if body.attempt is None else body.attempt,
        layout=before.layout if body.layout is None else body.layout,
        positions_lost=before.positions_lost or body.positions_lost,
        given_up=before.given_up and body.phase is not _P.RECREATING,  # that was agreed to for what was there then
        compared_at=before.compared_at if body.compared_at is None else body.compared_at,
        refills_failed=before.refills_failed + (body.refill_failure is not None),
        refill_failure=before.refill_failure if body.refill_failure is None else body.refill_failure,
        stuck=None,
    )
    _check(after)
    if after.phase is _P.DONE:
        return _done(state, before, after, command.at_ms, offset)
    state, changes = _with(state, after), (TruncationChanged(before, after),)
    if after.phase is _P.CATCHING_UP:
        return _follows_already(state, after, command.at_ms, changes)
    return state, changes


def _follows_already(state: ControlState, after: Truncation, at_ms: int, changes: tuple[Change, ...]) -> Result:
    """The topic that was made follows its source from the start, before the truncation is over."""
    record, link = state.follower_topics.get(after.topic), state.links.get(after.link)
    topic_id = after.new_topic_id
    if record is None or record.state is not TopicState.FOLLOWING or link is None or topic_id is None:
        raise Refuse(Rejection.CONFLICT, f"topic {after.topic!r} does not follow over link {after.link!r}")
    source_id = record.source_topic_id if after.source is None else after.source.successor
    renewed = replace(record.following(source_id), topic_id=topic_id, recorded_ms=at_ms, doubted={}, proofs={})
    opened = ProvenanceRange(link.remote_cluster_id, source_id, 0, None, at_ms)
    partitions = dict.fromkeys(range(len(after.partitions)), (opened,))
    return (
        state.evolve(
            follower_topics={**state.follower_topics, after.topic: renewed},
            histories={**state.histories, after.topic: TopicHistory(after.topic, topic_id, partitions)},
        ),
        (
            *changes,
            FollowerTopicChanged(record, renewed),
            ProvenanceChanged(after.topic, topic_id, tuple(sorted(partitions))),
        ),
    )


def _give_up(state: ControlState, offset: int, command: c.Command, body: c.GiveUpTruncation) -> Result:
    before = _under_way(state, body.topic, body.topic_id)
    require(
        before.phase is _P.CATCHING_UP,
        Rejection.CONFLICT,
        f"the truncation of topic {body.topic!r} goes on by itself ({before.phase}): there is nothing to give up",
    )
    after = replace(before, given_up=True)
    return _with(state, after), (TruncationChanged(before, after),)


def _stop_catching_up(state: ControlState, offset: int, command: c.Command, body: c.StopCatchingUp) -> Result:
    before = _under_way(state, body.topic, body.topic_id)
    require(
        before.phase is _P.CATCHING_UP and before.new_topic_id == body.new_topic_id,
        Rejection.CONFLICT,
        f"topic {body.topic!r} with id {body.new_topic_id} does not catch up",
    )
    if before.stuck is not None:
        return state, ()
    after = replace(before, stuck=body.reason)
    return _with(state, after), (TruncationChanged(before, after),)


def _check(after: Truncation) -> None:
    """The phase has what it needs."""
    if after.phase is _P.SALVAGING or (after.phase is _P.CANCELLING and after.cuts and not after.records):
        require(
            [cut.partition for cut in after.cuts] == list(range(len(after.partitions))),
            Rejection.INVALID,
            f"topic {after.topic!r}: one cut for each of {len(after.partitions)} partitions, in their order",
        )
        require(
            all(0 <= cut.log_start <= cut.offset <= cut.log_end for cut in after.cuts),
            Rejection.INVALID,
            f"topic {after.topic!r}: a cut that is outside of its log",
        )
    if after.phase is _P.SALVAGING:
        require(after.records, Rejection.INVALID, f"topic {after.topic!r}: there is nothing to cut")
    if after.phase is _P.SPOOLING:
        safe = {file.partition for file in after.salvaged}
        require(
            all(cut.partition in safe for cut in after.cuts if cut.records),
            Rejection.INVALID,
            f"topic {after.topic!r}: what is cut is not salvaged",
        )
    if after.phase is _P.REFILLING:
        require(
            after.new_topic_id is not None and c.is_uuid(after.new_topic_id) and after.new_topic_id != after.topic_id,
            Rejection.INVALID,
            f"topic {after.topic!r} cannot be refilled without a new id",
        )


def _done(state: ControlState, before: Truncation, after: Truncation, at_ms: int, offset: int) -> Result:
    """The truncation is over: the topic follows under its new id, with the provenance that is left."""
    changes: list[Change] = [TruncationChanged(before, after)]
    truncations = {name: each for name, each in state.truncations.items() if name != after.topic}
    past = (*state.past_truncations, after)[-PAST_TRUNCATIONS_MAX:]
    state = state.evolve(truncations=truncations, past_truncations=past)
    made = after.succession if before.phase is not _P.CANCELLING else None
    state, told = truncated(state, after, made is not None)
    changes += told
    if made is not None and after.epoch_shift is not None:
        chain = (*state.predecessors(after.topic, after.topic_id), made)[-SUCCESSIONS_MAX:]
        state = origins_succeeded(state, after, offset).evolve(
            epoch_shifts={**state.epoch_shifts, after.topic: after.epoch_shift},
            successions={**state.successions, after.topic: chain},
        )
    elif not after.cuts or after.records:
        return state, tuple(changes)  # it was cancelled, and not because nothing had to be cut
    elif after.source is None:
        return _resolved(state, after, changes, at_ms)
    record, history = state.follower_topics.get(after.topic), state.histories.get(after.topic)
    topic_id = after.topic_id if made is None else made.successor
    source = after.source
    if record is None or record.state is not TopicState.FOLLOWING or record.topic_id != after.topic_id:
        source = None
    if record is not None and record.topic_id == after.topic_id:
        source_id = record.source_topic_id if source is None else source.successor
        doubted = _doubted(record, after) if made is None else {}
        renewed = replace(record.following(source_id), topic_id=topic_id, recorded_ms=at_ms, doubted=doubted, proofs={})
        state = state.evolve(follower_topics={**state.follower_topics, after.topic: renewed})
        changes.append(FollowerTopicChanged(record, renewed))
    if history is not None and history.topic_id == after.topic_id:
        ranges = {
            partition: _ranges_left(known, cut) if source is None else _succeeded(known, cut, source, at_ms)
            for partition, known in history.partitions.items()
            if (cut := after.cut(partition)) is not None
        }
        left = TopicHistory(after.topic, topic_id, ranges)
        state = state.evolve(histories={**state.histories, after.topic: left})
        changes.append(ProvenanceChanged(after.topic, topic_id, tuple(sorted(ranges))))
    return state, tuple(changes)


def _resolved(state: ControlState, after: Truncation, changes: list[Change], at_ms: int) -> Result:
    """Nothing differed: no deletion was missed before the ends of the logs that were compared."""
    if after.reason.code == ReasonCode.CUT_AGREED and state.level >= CAUGHT_UP_CUTS:
        state, dropped = _agreed_no_more(state, after)
        changes += dropped
    record = state.follower_topics.get(after.topic)
    if record is None or record.topic_id != after.topic_id or (doubted := _doubted(record, after)) == record.doubted:
        return state, tuple(changes)
    renewed = replace(record, doubted=doubted, recorded_ms=at_ms)
    state = state.evolve(follower_topics={**state.follower_topics, after.topic: renewed})
    return state, (*changes, FollowerTopicChanged(record, renewed))


def _agreed_no_more(state: ControlState, after: Truncation) -> tuple[ControlState, list[Change]]:
    """The state in which a topic follows without being cut, as was agreed: its source has got the rest."""
    link = state.links.get(after.link)
    if link is None:
        return state, []
    mapping = next((each for each in link.mappings if each.agreed_cut(after.topic_id) is not None), None)
    if mapping is None:
        return state, []
    left = replace(mapping, cuts=tuple(each for each in mapping.cuts if each.topic_id != after.topic_id))
    mappings = tuple(left if each is mapping else each for each in link.mappings)
    links = {**state.links, link.name: replace(link, mappings=mappings)}
    return state.evolve(links=links), [NamespaceAttached(link.name, left)]


def _doubted(record: FollowerTopic, after: Truncation) -> dict[int, int]:
    """What is still to be compared of a topic that was compared up to the ends of its logs."""
    ends = {cut.partition: cut.log_end for cut in after.cuts}
    return {partition: until for partition, until in record.doubted.items() if until > ends.get(partition, -1)}


def _ranges_left(known: tuple[ProvenanceRange, ...], cut: PartitionCut) -> tuple[ProvenanceRange, ...]:
    """The provenance of what stays."""
    return tuple(
        replace(
            each,
            start_offset=min(each.start_offset, cut.offset),
            end_offset=None if each.end_offset is None else min(each.end_offset, cut.offset),
            epochs=tuple(epoch for epoch in each.epochs if epoch.start_offset < cut.offset),
        )
        for each in known
        if each.start_offset < cut.offset or each.end_offset is None
    )


def _succeeded(
    known: tuple[ProvenanceRange, ...], cut: PartitionCut, source: Succession, at_ms: int
) -> tuple[ProvenanceRange, ...]:
    """The same, and what comes from here on is the successor's, whose leader epochs are others."""
    left = _ranges_left(known, cut)
    if not left or left[-1].end_offset is not None:
        return left
    last = left[-1]
    closed = (replace(last, end_offset=cut.offset),) if last.start_offset < cut.offset else ()
    opened = ProvenanceRange(last.source_cluster_id, source.successor, cut.offset, None, at_ms)
    return (*left[:-1], *closed, opened)


def _hold_up(state: ControlState, offset: int, command: c.Command, body: c.HoldUpTruncation) -> Result:
    before = _owned(state, body.topic, body.topic_id, body.owner)
    if before.trouble == body.trouble:
        return state, ()
    after = replace(before, trouble=body.trouble)
    return _with(state, after), (TruncationChanged(before, after),)


def cancelled(
    state: ControlState, link: str, mapping: NamespaceMapping, at_ms: int
) -> tuple[ControlState, tuple[Change, ...]]:
    """The truncations of a mapping that is detached, cancelled. Raises Refuse where a topic is gone already."""
    changes: list[Change] = []
    for name, before in sorted(state.truncations.items()):
        if before.link != link or mapping.remote_name(name) is None or before.phase is _P.CANCELLING:
            continue
        require(
            before.phase in CANCELLABLE,
            Rejection.CONFLICT,
            f"topic {name!r} is being truncated ({before.phase}): wait until it is whole again",
        )
        why = Reason(ReasonCode.STOPPED_BY_OPERATOR, "the namespace was detached")
        after = replace(before, phase=_P.CANCELLING, phase_ms=at_ms, reason=why, trouble=None)
        state = _with(state, after)
        changes.append(TruncationChanged(before, after))
    return state, tuple(changes)


def _under_way(state: ControlState, topic: str, topic_id: str) -> Truncation:
    found = state.truncations.get(topic)
    if found is None or found.topic_id != topic_id:
        raise Refuse(Rejection.NOT_FOUND, f"topic {topic!r} with id {topic_id} is not being truncated")
    return found


def _owned(state: ControlState, topic: str, topic_id: str, owner: str) -> Truncation:
    found = _under_way(state, topic, topic_id)
    require(found.owner == owner, Rejection.LEASE_LOST, f"proxy {found.proxy!r} truncates topic {topic!r} now")
    return found


def _with(state: ControlState, truncation: Truncation) -> ControlState:
    return state.evolve(truncations={**state.truncations, truncation.topic: truncation})


TRUNCATION_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.BeginTruncation: _begin,
    c.TakeOverTruncation: _take_over,
    c.AdvanceTruncation: _advance,
    c.GiveUpTruncation: _give_up,
    c.StopCatchingUp: _stop_catching_up,
    c.HoldUpTruncation: _hold_up,
}
