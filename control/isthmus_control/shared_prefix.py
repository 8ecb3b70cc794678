"""Up to which offset two logs of a partition hold the same, by what is recorded of their origins alone.

Both lists of ranges are walked together (:mod:`isthmus_control.origins`):

| at an offset | the logs |
|---|---|
| the same origin, term included | are the same up to the smaller end of the two ranges |
| two origins | part there |
| the same origin, with an epoch of it that one side has and the other has not | part where that begins: its cluster |
|                                                                              | lost there what the other one has   |
| no range on one side, or an origin that is assumed only | unknown |

What lies below the higher of the two log starts is on one side at most, so epochs are compared behind it, and what
nobody knows below it does not count. An epoch that may be missing on a side (``missing_before``) is unknown, not
absent; if both have a later one from the same offset on they were the same before it, as the origin's own log was.

No record is read. Digests of batches around the end check the bookkeeping, and are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus_control.origins import NO_TERM, OriginEpoch, OriginRange, PartitionOrigins, at


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """One side of the comparison: what is recorded of a partition, and where its log starts and ends.

    All epochs of what the side wrote itself have to be recorded up to ``log_end``. ``name``: of the side, for people.
    """

    name: str
    origins: PartitionOrigins
    log_start: int
    log_end: int


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The logs are the same below ``offset``. ``unknown``: why nobody knows whether they are beyond; None: they part
    there, or one of them ends."""

    offset: int
    unknown: str | None = None


def shared_prefix(one: PartitionLog, other: PartitionLog) -> SharedPrefix:
    """Up to where two logs are the same."""
    start, end = max(one.log_start, other.log_start), min(one.log_end, other.log_end)
    offset = 0
    while offset < end:
        mine, theirs = at(one.origins.ranges, offset), at(other.origins.ranges, offset)
        until = min(_until(each, side, offset, end) for each, side in ((mine, one), (theirs, other)))
        if mine is not None and theirs is not None and mine.origin == theirs.origin:
            first = max(offset, start)
            if first < until:
                found = _parted(one, mine, other, theirs, first, until)
                if found is not None:
                    return found
        elif (why := _unknown(one, mine, other, theirs, offset)) is None:
            return SharedPrefix(offset)
        elif offset >= start:
            return SharedPrefix(offset, why)
        else:
            until = min(until, start)
        offset = until
    return SharedPrefix(max(end, 0))


def _until(found: OriginRange | None, side: PartitionLog, offset: int, end: int) -> int:
    """Up to where a side has this range, or none; at most ``end``."""
    if found is not None:
        return end if found.end_offset is None else min(found.end_offset, end)
    return min((each.start_offset for each in side.origins.ranges if each.start_offset > offset), default=end)


def _unknown(
    one: PartitionLog, mine: OriginRange | None, other: PartitionLog, theirs: OriginRange | None, offset: int
) -> str | None:
    """Why two sides may have the same from an offset on although no origin says so; None: they have not."""
    for side, found in ((one, mine), (other, theirs)):
        if found is None:
            return f"{side.name} has not recorded where its records from offset {offset} on come from"
    assert mine is not None
    assert theirs is not None
    for side, found in ((one, mine), (other, theirs)):
        if found.assumed:
            return (
                f"{side.name} has records from offset {offset} on from before terms were recorded: from cluster "
                f"{found.origin.cluster_id}, which may have had them from elsewhere"
            )
    if mine.origin[:2] == theirs.origin[:2] and NO_TERM in (mine.origin.term, theirs.origin.term):
        return f"cluster {mine.origin.cluster_id} wrote what follows offset {offset}, in a term that is not known"
    return None


def _parted(
    one: PartitionLog, mine: OriginRange, other: PartitionLog, theirs: OriginRange, first: int, until: int
) -> SharedPrefix | None:
    """Where two logs part within ``[first, until)`` of the same origin, by its leader epochs; None: they do not."""
    ours, others = _epochs(mine, first, until), _epochs(theirs, first, until)
    same = first
    """Up to here both had the same epochs, and none can be missing."""
    for side, epochs in ((one, ours), (other, others)):
        if not epochs or epochs[0].start_offset > first:
            begin = epochs[0].start_offset if epochs else until
            return SharedPrefix(first, f"{side.name} has not recorded in which leader epochs [{first}, {begin}) are")
    common = _last_common(ours, others, first)
    index = 0
    while index < max(len(ours), len(others)):
        left = ours[index] if index < len(ours) else None
        right = others[index] if index < len(others) else None
        if left is not None and right is not None and _clamped(left, first) == _clamped(right, first):
            same = max(left.start_offset, first)
            index += 1
            continue
        parts_at = min(max(each.start_offset, first) for each in (left, right) if each is not None)
        lacks = [
            (side, its, epoch)
            for side, its, epoch in ((other, theirs, left), (one, mine, right))
            if epoch is not None and max(epoch.start_offset, first) == parts_at
        ]
        if any(its.missing_before <= epoch.start_offset for _, its, epoch in lacks):
            return SharedPrefix(parts_at)
        if common is not None and common.start_offset > parts_at:
            # What they had before is the same whatever was not seen of it: go on from there.
            ours = ours[ours.index(common) :]
            others = others[others.index(common) :]
            index = 0
            continue
        side, its, epoch = lacks[0]
        return SharedPrefix(
            max(same, first),
            f"leader epoch {epoch.epoch} from offset {epoch.start_offset} on is not recorded at {side.name}, which has "
            f"read a cleaned log up to {its.missing_before}",
        )
    for side, its in ((one, mine), (other, theirs)):
        if its.missing_before > same:
            return SharedPrefix(
                same,
                f"{side.name} has read a cleaned log up to {its.missing_before}: leader epochs after offset {same} may "
                f"be missing",
            )
    return None


def _epochs(range_: OriginRange, first: int, until: int) -> list[OriginEpoch]:
    """The epochs in which records of ``[first, until)`` of a range may be."""
    found = []
    for index, epoch in enumerate(range_.epochs):
        ends = range_.epochs[index + 1].start_offset if index + 1 < len(range_.epochs) else until
        if epoch.start_offset < until and ends > first:
            found.append(epoch)
    return found


def _clamped(epoch: OriginEpoch, first: int) -> OriginEpoch:
    return OriginEpoch(epoch.epoch, max(epoch.start_offset, first))


def _last_common(ours: Sequence[OriginEpoch], others: Sequence[OriginEpoch], first: int) -> OriginEpoch | None:
    """The last epoch that both have from the same offset on."""
    return next((each for each in reversed(ours) if each in others and each.start_offset > first), None)
