"""What the control log accepts of origins: which cluster wrote which offsets first (:mod:`isthmus_control.origins`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS
from isthmus_control.model import TopicState
from isthmus_control.origins import (
    Origin,
    OriginEpoch,
    OriginRange,
    PartitionOrigins,
    Ranges,
    TopicOrigins,
    at,
    closed,
    cut,
    going_on,
    joined,
    with_epoch,
    without_epochs_below,
)
from isthmus_control.outcome import Change, ProvenanceChanged, Refuse, Rejection, require
from isthmus_control.rules.checks import ENTRIES_MAX, Result, check_uuid, following, link_named
from isthmus_control.truncations import Truncation

EPOCHS_MAX: Final = 1_000
"""Of one partition in one command: a cluster that had as many elections has dropped most of them long ago."""


class _Edits:
    """Edits origins of many partitions and says in the end which changed."""

    def __init__(self, state: ControlState, offset: int, entries: int) -> None:
        require(0 < entries <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
        self._state = state
        self._offset = offset
        self._edited: dict[str, tuple[str, dict[int, PartitionOrigins]]] = {}
        self._touched: dict[str, set[int]] = {}

    def known(self, topic: str, topic_id: str, partition: int) -> PartitionOrigins:
        require(partition >= 0, Rejection.INVALID, f"topic {topic!r} has no partition {partition}")
        check_uuid(topic_id, "the topic id")
        edited = self._edited.get(topic)
        if edited is not None:
            require(edited[0] == topic_id, Rejection.INVALID, f"topic {topic!r} occurs with two ids")
            if partition in edited[1]:
                return edited[1][partition]
        return self._state.origins_of(topic, topic_id, partition)

    def set(self, topic: str, topic_id: str, partition: int, ranges: Ranges, *, at_offset: int | None = None) -> None:
        """``at_offset``: where it says the same as it did at that offset of the log, and nothing new."""
        if self.known(topic, topic_id, partition).ranges == ranges:
            return
        edited = self._edited.setdefault(topic, (topic_id, {}))
        edited[1][partition] = PartitionOrigins(ranges, self._offset if at_offset is None else at_offset)
        self._touched.setdefault(topic, set()).add(partition)

    def result(self, before: Result | None = None) -> Result:
        """``before``: what else the command did."""
        state, changes = before or (self._state, ())
        if not self._touched:
            return state, changes
        origins = dict(state.origins)
        touched = {each: set(parts) for each, parts in self._touched.items()}
        others: list[Change] = []
        for change in changes:
            if isinstance(change, ProvenanceChanged) and change.topic in touched:
                touched[change.topic].update(change.partitions)
            else:
                others.append(change)
        for topic, (topic_id, partitions) in self._edited.items():
            known = origins.get(topic)
            kept = known.partitions if known is not None and known.topic_id == topic_id else {}
            origins[topic] = TopicOrigins(topic, topic_id, {**kept, **partitions})
        told = (
            ProvenanceChanged(topic, self._edited[topic][0], tuple(sorted(touched[topic]))) for topic in sorted(touched)
        )
        return state.evolve(origins=origins), (*others, *told)


def _count(topics: tuple[Any, ...]) -> int:
    """How many partitions, of topics that list them."""
    return sum(len(getattr(each, name)) for each in topics for name in _LISTS if hasattr(each, name))


_LISTS: Final = ("starts", "offsets", "partitions")


def _begin_term(state: ControlState, offset: int, command: c.Command, body: c.BeginTerm) -> Result:
    edits = _Edits(state, offset, _count(body.topics))
    for topic in body.topics:
        record = state.follower_topics.get(topic.topic)
        require(
            record is None or record.topic_id != topic.topic_id or record.state is not TopicState.FOLLOWING,
            Rejection.CONFLICT,
            f"topic {topic.topic!r} follows link {record.link if record is not None else ''!r}: nobody writes there",
        )
        for partition, (start, epoch) in topic.starts.items():
            require(start >= 0, Rejection.INVALID, f"{topic.topic}-{partition}: the offset is negative")
            known = edits.known(topic.topic, topic.topic_id, partition)
            ranges = known.ranges
            last = ranges[-1] if ranges else None
            own = (state.cluster_id, topic.topic_id)
            if last is not None:
                behind = last.start_offset if last.end_offset is None else last.end_offset
                require(
                    behind <= start,
                    Rejection.CONFLICT,
                    f"{topic.topic}-{partition} has provenance from offset {behind} on: truncate it to {start} first",
                )
                if last.end_offset is None and last.origin[:2] == own:
                    continue  # its term goes on
                ranges = closed(ranges, start, body.ended)
            written = _until(ranges)
            if written < start:
                # What stands between was written here before anybody said so. A log that was lost may have said else.
                before = OriginRange(Origin(*own), written, start, command.at_ms, assumed=state.generation > 0)
                ranges = joined(ranges, (before,))
            opened = OriginRange(Origin(*own, command.id), start, None, command.at_ms, began_in=epoch)
            edits.set(topic.topic, topic.topic_id, partition, (*ranges, opened))
    return edits.result()


def _until(ranges: Ranges) -> int:
    """Up to where a list that is closed says something."""
    return (ranges[-1].end_offset or 0) if ranges else 0


def _record_log_epochs(state: ControlState, offset: int, command: c.Command, body: c.RecordLogEpochs) -> Result:
    edits = _Edits(state, offset, _count(body.topics))
    for topic in body.topics:
        own = (state.cluster_id, topic.topic_id)
        for entry in topic.partitions:
            place = f"{topic.topic}-{entry.partition}"
            require(len(entry.epochs) <= EPOCHS_MAX, Rejection.INVALID, f"{place}: more than {EPOCHS_MAX} epochs")
            known = edits.known(topic.topic, topic.topic_id, entry.partition)
            ranges = known.ranges
            for new in entry.epochs:
                ranges = _with_log_epoch(ranges, own, new, place)
            edits.set(topic.topic, topic.topic_id, entry.partition, ranges)
    return edits.result()


def _with_log_epoch(ranges: Ranges, own: tuple[str, str], new: OriginEpoch, place: str) -> Ranges:
    require(new.epoch >= 0 and new.start_offset >= 0, Rejection.INVALID, f"{place}: epoch {new.epoch} is none")
    found = at(ranges, new.start_offset)
    if found is None or found.origin[:2] != own or found.assumed:
        raise Refuse(Rejection.CONFLICT, f"{place}: offset {new.start_offset} was not written here")
    edited = []
    for each in ranges:
        epochs = each.epochs
        if each is found:
            try:
                epochs = with_epoch(epochs, new)
            except ValueError as error:
                raise Refuse(Rejection.CONFLICT, f"{place}: {error}") from None
        elif each.start_offset > new.start_offset:
            # An election that lost records: what the epochs before had written behind it is gone.
            epochs = tuple(epoch for epoch in epochs if epoch.epoch >= new.epoch)
        edited.append(each if epochs == each.epochs else replace(each, epochs=epochs))
    return tuple(edited)


def _received(
    state: ControlState,
    offset: int,
    command: c.Command,
    body: c.RecordOrigins | c.RecordOriginEpochs,
    after: Callable[[PartitionOrigins, Any, str, str], Ranges],
) -> Result:
    """What the source says of partitions that follow it. ``after``: a list with an entry of that, by what it was, the
    source's cluster id and the place, for people."""
    link = link_named(state, body.link)
    edits = _Edits(state, offset, _count(body.topics))
    for topic in body.topics:
        following(state, link, topic.topic, topic.topic_id)
        for entry in topic.partitions:
            place = f"{topic.topic}-{entry.partition}"
            known = edits.known(topic.topic, topic.topic_id, entry.partition)
            _check_fresh(known, command, place)
            ranges = after(known, entry, link.remote_cluster_id, place)
            edits.set(topic.topic, topic.topic_id, entry.partition, ranges)
    return edits.result()


def _record_origins(state: ControlState, offset: int, command: c.Command, body: c.RecordOrigins) -> Result:
    return _received(state, offset, command, body, _as_told)


def _as_told(known: PartitionOrigins, entry: c.ToldPartition, source: str, place: str) -> Ranges:
    _check_told(entry, place)
    return going_on(known.ranges, entry.offset, tuple(replace(each, via=source) for each in entry.ranges))


def _record_origin_epochs(state: ControlState, offset: int, command: c.Command, body: c.RecordOriginEpochs) -> Result:
    return _received(state, offset, command, body, _with_epochs)


def _with_epochs(known: PartitionOrigins, entry: c.LogEpochs, source: str, place: str) -> Ranges:
    goes_on = known.open_range
    if goes_on is None or goes_on.via != source or goes_on.assumed:
        raise Refuse(Rejection.CONFLICT, f"{place}: the source has not said where it has its records from")
    longer = replace(goes_on, epochs=(*goes_on.epochs, *entry.epochs))
    _check_epochs(longer, place)
    return (*known.ranges[:-1], longer)


def _check_told(entry: c.ToldPartition, place: str) -> None:
    require(entry.ranges, Rejection.INVALID, f"{place}: the source says nothing")
    require(
        entry.ranges[0].start_offset == entry.offset >= 0,
        Rejection.INVALID,
        f"{place}: what the source says begins at {entry.ranges[0].start_offset}, not {entry.offset}",
    )
    require(
        all(before.end_offset == after.start_offset for before, after in pairwise(entry.ranges)),
        Rejection.INVALID,
        f"{place}: ranges of the source do not follow each other",
    )
    for each in entry.ranges:
        _check_epochs(each, place)
        require(
            each.end_offset is None or each.end_offset >= each.start_offset,
            Rejection.INVALID,
            f"{place}: the range from {each.start_offset} on ends at {each.end_offset}",
        )


def _check_epochs(range_: OriginRange, place: str) -> None:
    starts = [epoch.start_offset for epoch in range_.epochs]
    epochs = [epoch.epoch for epoch in range_.epochs]
    end = range_.end_offset
    require(
        starts == sorted(starts)
        and epochs == sorted(set(epochs))
        and len(epochs) <= EPOCHS_MAX
        and (end is None or all(start < max(end, 1) for start in starts)),
        Rejection.INVALID,
        f"{place}: the epochs of the range from {range_.start_offset} on are out of order",
    )


def _check_fresh(known: PartitionOrigins, command: c.Command, place: str) -> None:
    """Refuse to replace what its proposer did not know of: another proxy may lead the partition's link by now."""
    require(
        known.at_offset <= command.seen,
        Rejection.CONFLICT,
        f"{place}: its origins were recorded anew meanwhile, at offset {known.at_offset} of the control log",
    )


def _drop_epochs(state: ControlState, offset: int, command: c.Command, body: c.DropEpochs) -> Result:
    edits = _Edits(state, offset, _count(body.topics))
    for topic in body.topics:
        for partition, below in topic.offsets.items():
            known = edits.known(topic.topic, topic.topic_id, partition)
            ranges = without_epochs_below(known.ranges, below)
            edits.set(topic.topic, topic.topic_id, partition, ranges, at_offset=known.at_offset)
    return edits.result()


def _forget_histories(state: ControlState, offset: int, command: c.Command, body: c.ForgetHistories) -> Result:
    require(0 < len(body.topics) <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
    origins, histories, changes = dict(state.origins), dict(state.histories), []
    for gone in body.topics:
        record = state.follower_topics.get(gone.topic)
        require(
            record is None or record.topic_id != gone.topic_id or record.state is TopicState.DETACHED,
            Rejection.CONFLICT,
            f"topic {gone.topic!r} belongs to link {record.link if record is not None else ''!r}",
        )
        require(
            gone.topic not in state.truncations,
            Rejection.CONFLICT,
            f"topic {gone.topic!r} is being truncated: wait for it",
        )
        known, history, partitions = origins.get(gone.topic), histories.get(gone.topic), set[int]()
        if known is not None and known.topic_id == gone.topic_id:
            partitions |= origins.pop(gone.topic).partitions.keys()
        if history is not None and history.topic_id == gone.topic_id:
            partitions |= histories.pop(gone.topic).partitions.keys()
        if partitions:
            changes.append(ProvenanceChanged(gone.topic, gone.topic_id, tuple(sorted(partitions))))
    if not changes:
        return state, ()
    return state.evolve(origins=origins, histories=histories), tuple(changes)


# --- what other rules do to origins


def origins_closed(state: ControlState, offset: int, body: c.CloseProvenance, before: Result) -> Result:
    """What goes on in these partitions ends at the ends of their logs. ``before``: what the command did else."""
    if state.level < ORIGINS:
        return before
    edits = _Edits(state, offset, len(body.partitions))
    for entry in body.partitions:
        known = edits.known(entry.topic, entry.topic_id, entry.partition)
        last = known.ranges[-1] if known.ranges else None
        if last is None or not last.reaches_beyond(entry.offset):
            continue
        require(
            last.via or last.start_offset <= entry.offset,
            Rejection.CONFLICT,
            f"{entry.topic}-{entry.partition} is written here from offset {last.start_offset} on: truncate it to "
            f"{entry.offset} first",
        )
        edits.set(entry.topic, entry.topic_id, entry.partition, closed(known.ranges, entry.offset, body.ended))
    return edits.result(before)


def origins_cut(
    state: ControlState, offset: int, command: c.Command, body: c.TruncateProvenance, before: Result
) -> Result:
    """What these partitions' logs lost is nobody's. ``before``: what the command did else."""
    if state.level < ORIGINS:
        return before
    edits = _Edits(state, offset, len(body.partitions))
    for entry in body.partitions:
        known = edits.known(entry.topic, entry.topic_id, entry.partition)
        _check_fresh(known, command, f"{entry.topic}-{entry.partition}")
        edits.set(entry.topic, entry.topic_id, entry.partition, cut(known.ranges, entry.offset))
    return edits.result(before)


def origins_succeeded(state: ControlState, done: Truncation, offset: int) -> ControlState:
    """The topic that a truncation made has what the old one had up to the cuts, wherever that came from."""
    made = done.succession
    known_already = state.origins.get(done.topic)
    if state.level < ORIGINS or made is None:
        return state
    if known_already is not None and known_already.topic_id == made.successor:
        return state  # it follows again since its spool was lost, and was told anew
    partitions = {}
    for each in done.cuts:
        known = state.origins_of(done.topic, done.topic_id, each.partition)
        partitions[each.partition] = PartitionOrigins(cut(known.ranges, each.offset), offset)
    return state.evolve(
        origins={**state.origins, done.topic: TopicOrigins(done.topic, made.successor, partitions)},
    )


def origins_gone(state: ControlState, topic: str, topic_id: str) -> ControlState:
    """A topic is gone, and nothing is left of it."""
    known = state.origins.get(topic)
    if known is None or known.topic_id != topic_id:
        return state
    return state.evolve(origins={name: each for name, each in state.origins.items() if name != topic})


def origins_in_doubt(state: ControlState, offset: int) -> ControlState:
    """The log lost some of its records: of a partition that was being written or followed nothing is known any more.

    It may have been cut, closed and written by others since. What was closed stays as it was.
    """
    origins = {
        topic: replace(
            known,
            partitions={
                partition: PartitionOrigins(at_offset=offset) if each.open_range is not None else each
                for partition, each in known.partitions.items()
            },
        )
        for topic, known in state.origins.items()
    }
    return state.evolve(origins=origins) if origins else state


ORIGIN_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.BeginTerm: _begin_term,
    c.RecordLogEpochs: _record_log_epochs,
    c.RecordOrigins: _record_origins,
    c.RecordOriginEpochs: _record_origin_epochs,
    c.DropEpochs: _drop_epochs,
    c.ForgetHistories: _forget_histories,
}
