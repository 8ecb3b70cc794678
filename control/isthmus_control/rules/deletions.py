"""What the control log accepts of deletions that a follower may have missed (``docs/adr/0005``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import FollowerTopic, TopicState
from isthmus_control.outcome import Change, FollowerTopicChanged, Refuse, Rejection, require
from isthmus_control.rules.checks import ENTRIES_MAX, Result


def _doubt(state: ControlState, offset: int, command: c.Command, body: c.DoubtDeletions) -> Result:
    def later(known: int | None, entry: c.PartitionOffset) -> int | None:
        return entry.offset if known is None else max(known, entry.offset)

    return _changed(state, body.partitions, later, command.at_ms)


def _settle(state: ControlState, offset: int, command: c.Command, body: c.SettleDeletions) -> Result:
    def left(known: int | None, entry: c.PartitionOffset) -> int | None:
        return None if known is None or known <= entry.offset else known

    return _changed(state, body.partitions, left, command.at_ms)


def _changed(
    state: ControlState,
    entries: Sequence[c.PartitionOffset],
    decide: Callable[[int | None, c.PartitionOffset], int | None],
    at_ms: int,
) -> Result:
    """``decide``: what is doubted of a partition from now on (None: nothing), of what was and an entry."""
    require(0 < len(entries) <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
    topics = dict(state.follower_topics)
    for entry in entries:
        record = topics.get(entry.topic)
        if record is None or record.state is not TopicState.FOLLOWING or record.topic_id != entry.topic_id:
            raise Refuse(Rejection.NOT_FOUND, f"topic {entry.topic!r} with id {entry.topic_id} does not follow")
        require(
            entry.partition >= 0 and entry.offset >= 0,
            Rejection.INVALID,
            f"topic {entry.topic!r} has no offset {entry.offset} of partition {entry.partition}",
        )
        doubted = decide(record.doubted.get(entry.partition), entry)
        if doubted != record.doubted.get(entry.partition):
            known = {partition: until for partition, until in record.doubted.items() if partition != entry.partition}
            if doubted is not None:
                known[entry.partition] = doubted
            topics[entry.topic] = replace(record, doubted=known, recorded_ms=at_ms)
    changes: list[Change] = []
    for name, after in sorted(topics.items()):
        before: FollowerTopic = state.follower_topics[name]
        if after is not before:
            changes.append(FollowerTopicChanged(before, after))
    return (state.evolve(follower_topics=topics), tuple(changes)) if changes else (state, ())


DELETION_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.DoubtDeletions: _doubt,
    c.SettleDeletions: _settle,
}
