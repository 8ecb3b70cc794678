"""Which cluster wrote a partition's records first: ranges of offsets with their origins, through any number of links.

:class:`~isthmus_control.model.ProvenanceRange` names the *direct* source and its leader epochs, and says how a link
goes on. What is here says where two logs part, whichever links lie between them
(:mod:`isthmus_control.shared_prefix`), so each cluster keeps it for the topics that it leads, too:

| range of a partition's offsets | its origin |
|---|---|
| written here since a :class:`~isthmus_control.commands.BeginTerm` | this cluster, this topic, the command's id |
| written here before: nobody began a term | this cluster, this topic, no term |
| followed | what the source said of its own log (:class:`~isthmus_control.commands.RecordOrigins`) |
| followed before sources said that | the source itself, which may have had it from elsewhere: *assumed* |
| anything else | no range: unknown |

A *term* names one stretch of writing. It is the id of a command, which is never given twice, and not an offset of the
control log: one that was lost and begun again counts from 0. Of one topic id, offsets without a term hold the same
wherever they came from it, since a topic is cut by making it anew.

A follower records what it is told up to the source's end, which lies ahead of its own log: a list counts up to the end
of the log, and closing it cuts it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from isthmus_control.codec import LEFT_OUT
from isthmus_control.model import ProvenanceRange

NO_TERM: Final = ""
"""Written before its cluster recorded terms."""


class Origin(NamedTuple):
    """The stretch of writing that records come from: a topic of a cluster, and the id of the command that began it."""

    cluster_id: str
    topic_id: str
    term: str = NO_TERM


class OriginEpoch(NamedTuple):
    """From ``start_offset`` on, the origin's records are of its leader epoch ``epoch``, until the next one."""

    epoch: int
    start_offset: int


class Ended(StrEnum):
    """How a range ended: what this cluster, or the one that said so, did then."""

    DETACHED = "detached"
    PROMOTED = "promoted"
    FAILED_OVER = "failed-over"
    REVERSED = "reversed"
    SOURCE_GONE = "source-gone"
    """The source has no such topic any more, and an operator had it followed no more."""
    FOLLOWS = "follows"
    """This cluster wrote, and follows another one from here on."""
    SOURCE_CHANGED = "source-changed"
    """The source that was followed goes on with what another one wrote."""
    CUT = "cut"
    """What came after was cut, or lost."""


@dataclass(frozen=True, slots=True)
class OriginRange:
    """Where the records of ``[start_offset, end_offset)`` come from; None: it goes on. Empty ones are kept.

    ``since_ms``: when the origin began to write, by its own clock. ``epochs``: the origin's, those in which it wrote
    here, in order; the first may have begun before the range. ``missing_before``: of those that begin in the range and
    before this offset some may be missing, since a follower saw them only as they came, maybe after a cleaner had been
    there. They are unknown, not absent. ``via``: the direct source's cluster id, empty where it was written here.
    ``began_in``: the leader epoch here when this cluster's term began, -1 of others: a later one before it has lost
    what was there. ``assumed``: see the table.
    """

    origin: Origin
    start_offset: int
    end_offset: int | None
    since_ms: int
    epochs: tuple[OriginEpoch, ...] = field(default=(), metadata=LEFT_OUT)
    missing_before: int = field(default=0, metadata=LEFT_OUT)
    via: str = field(default="", metadata=LEFT_OUT)
    began_in: int = field(default=-1, metadata=LEFT_OUT)
    ended: Ended | None = field(default=None, metadata=LEFT_OUT)
    assumed: bool = field(default=False, metadata=LEFT_OUT)

    def reaches_beyond(self, offset: int) -> bool:
        """Whether it has, or will have, records at ``offset`` or behind."""
        return self.end_offset is None or self.end_offset > offset


Ranges: TypeAlias = tuple[OriginRange, ...]
"""In order of offsets, none overlapping; what lies between two is unknown."""


@dataclass(frozen=True, slots=True)
class PartitionOrigins:
    """What is known of one partition. ``at_offset``: of the command that changed it last."""

    ranges: Ranges = ()
    at_offset: int = -1

    @property
    def open_range(self) -> OriginRange | None:
        """The range that goes on."""
        return self.ranges[-1] if self.ranges and self.ranges[-1].end_offset is None else None


@dataclass(frozen=True, slots=True)
class TopicOrigins:
    """Of one topic, by partition. Bound to the topic id: one that was created again has none yet."""

    topic: str
    topic_id: str
    partitions: Mapping[int, PartitionOrigins]


# --- lists of ranges


def at(ranges: Sequence[OriginRange], offset: int) -> OriginRange | None:
    """The range that an offset lies in."""
    return next(
        (each for each in reversed(ranges) if each.start_offset <= offset and each.reaches_beyond(offset)), None
    )


def epoch_at(range_: OriginRange, offset: int) -> OriginEpoch | None:
    """The epoch in force at an offset of a range, as far as it is known."""
    return next((each for each in reversed(range_.epochs) if each.start_offset <= offset), None)


def cut(ranges: Sequence[OriginRange], offset: int, how: Ended = Ended.CUT) -> Ranges:
    """What is left of a list when its log is cut to ``offset``; nothing goes on after."""
    return tuple(
        _clipped(each, offset, how) if each.reaches_beyond(offset) else each
        for each in ranges
        if each.start_offset < offset or each.end_offset == offset
    )


def closed(ranges: Sequence[OriginRange], offset: int, how: Ended) -> Ranges:
    """The same where nothing was cut: what goes on ends at the end of its log, also if nothing was written in it."""
    return tuple(
        _clipped(each, offset, how) if each.reaches_beyond(offset) else each
        for each in ranges
        if each.start_offset <= offset
    )


def _clipped(range_: OriginRange, offset: int, how: Ended) -> OriginRange:
    epochs = tuple(each for each in range_.epochs if each.start_offset < offset)
    missing = min(range_.missing_before, offset)
    return replace(range_, end_offset=offset, epochs=epochs, missing_before=missing, ended=how)


def from_offset(ranges: Sequence[OriginRange], offset: int) -> Ranges:
    """What a list says of ``offset`` and what comes behind, with the epoch that is in force there."""
    return tuple(
        _begun_at(each, offset)
        for each in ranges
        if each.reaches_beyond(offset) or (each.end_offset == each.start_offset and each.start_offset >= offset)
    )


def _begun_at(range_: OriginRange, offset: int) -> OriginRange:
    if range_.start_offset >= offset:
        return range_
    in_force = epoch_at(range_, offset)
    epochs = tuple(each for each in range_.epochs if each == in_force or each.start_offset > offset)
    return replace(range_, start_offset=offset, epochs=epochs)


def joined(before: Sequence[OriginRange], after: Sequence[OriginRange]) -> Ranges:
    """Two lists, one behind the other. A range that goes on in the second one is one; of different terms none is."""
    if not before or not after:
        return (*before, *after)
    last, first = before[-1], after[0]
    if (last.origin, last.end_offset, last.assumed) != (first.origin, first.start_offset, first.assumed):
        return (*before, *after)
    epochs = last.epochs + tuple(each for each in first.epochs if each not in last.epochs)
    missing = first.missing_before if first.missing_before > first.start_offset else last.missing_before
    one = replace(first, start_offset=last.start_offset, since_ms=last.since_ms, epochs=epochs, missing_before=missing)
    return (*before[:-1], one, *after[1:])


def with_epoch(epochs: Sequence[OriginEpoch], new: OriginEpoch) -> tuple[OriginEpoch, ...]:
    """The epochs of an origin's own range with one whose first batch was seen in its log.

    Earlier epochs that were recorded at or behind its start have lost what they wrote there: they go, as in a broker's
    own cache. Raises ValueError where the log cannot hold both.
    """
    kept = [each for each in epochs if not (each.epoch <= new.epoch and each.start_offset >= new.start_offset)]
    for each in kept:
        earlier = each.epoch <= new.epoch and each.start_offset < new.start_offset
        if not earlier and not (each.epoch > new.epoch and each.start_offset > new.start_offset):
            raise ValueError(
                f"epoch {new.epoch} from offset {new.start_offset} does not go with epoch {each.epoch} from offset "
                f"{each.start_offset}"
            )
    if any(each.epoch == new.epoch for each in kept):
        return tuple(kept)  # it began before
    return tuple(sorted((*kept, new), key=lambda each: each.start_offset))


def going_on(known: Sequence[OriginRange], offset: int, told: Sequence[OriginRange]) -> Ranges:
    """A list whose log goes on from ``offset`` as the source says; what it said before of what comes there goes."""
    kept = cut(known, offset, Ended.SOURCE_CHANGED)
    return joined([each for each in kept if not each.via or each.start_offset < offset], told)


def without_epochs_below(ranges: Sequence[OriginRange], offset: int) -> Ranges:
    """A list without the epochs whose records all lie below ``offset``; the one in force there stays."""
    return tuple(
        replace(each, epochs=tuple(epoch for epoch in each.epochs if _reaches(each, epoch, offset)))
        if each.epochs
        else each
        for each in ranges
    )


def _reaches(range_: OriginRange, epoch: OriginEpoch, offset: int) -> bool:
    following = next((each.start_offset for each in range_.epochs if each.start_offset > epoch.start_offset), None)
    end = range_.end_offset if following is None else following
    return end is None or end > offset


def from_history(known: Iterable[ProvenanceRange], cluster_id: str, *, whole: bool = True) -> PartitionOrigins:
    """What the direct sources of a partition say of its origins: a cluster of before terms kept nothing else.

    Without ``whole`` what is being followed is left out. The epochs of such a source were recorded as its batches came,
    maybe of a cleaned log: only behind the last one none is missing.
    """
    ranges = tuple(
        OriginRange(
            Origin(each.source_cluster_id, each.source_topic_id),
            each.start_offset,
            each.end_offset,
            each.recorded_ms,
            tuple(OriginEpoch(epoch.epoch, epoch.start_offset) for epoch in each.epochs),
            each.epochs[-1].start_offset if len(each.epochs) > 1 else 0,
            "" if each.source_cluster_id == cluster_id else each.source_cluster_id,
            assumed=each.source_cluster_id != cluster_id,
        )
        for each in known
        if whole or each.end_offset is not None
    )
    return PartitionOrigins(ranges)
