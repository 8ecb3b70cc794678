"""What a cluster records of where records come from before it does something: decided, and nothing done.

The protocol, which keeps what :mod:`isthmus_control.shared_prefix` says true through kills at any step, since each
record is in the control log before what it speaks of happens:

| who | before | does |
|---|---|---|
| leader | it pushes of a topic, or clients write to what followed | :func:`to_lead`: cuts the list to the log's end, |
|        |                                                         | then a term of its own begins                    |
| leader | a follower opens a stream | :func:`log_epochs` of its log from the last recorded one on; :func:`told` |
| leader | it pushes the first batch of an epoch | :func:`epoch_due`; once that is recorded, :func:`told` again |
| leader | it pushes behind a change of its list | has the follower record what is :func:`told` |
| follower | it appends of a stream, or behind a change that it is told | :func:`to_follow`, which may say *parted* |
| both | it appends what another cluster follows in turn | the same, and every proxy of the cluster knows: each says |
|      |                                                 | what is recorded of what it pushes on                     |
| follower | it is written by clients, or follows another source | :func:`to_close` at its end, when no request is     |
|          |                                                     | under way any more, and before :func:`to_lead`      |
| leader | it follows, or its log is compared | once fenced, :func:`log_epochs` up to its end; ``CloseProvenance`` |
|        |                                    | with FOLLOWS                                                       |
| either | its log is compared, or told, while nothing is appended by a link | ``TruncateProvenance`` where |
|        |                                                                   | :func:`ends_beyond`          |

The last two are what :func:`~isthmus_control.shared_prefix.shared_prefix` relies on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from isthmus_control.commands import (
    BeginTerm,
    Body,
    CloseProvenance,
    LogEpochs,
    PartitionOffset,
    TermStart,
    ToldPartition,
    TopicTerms,
)
from isthmus_control.commands import TruncateProvenance as Truncate
from isthmus_control.control_state import ControlState
from isthmus_control.model import ProvenanceRange, ResourceType
from isthmus_control.origins import (
    NO_TERM,
    Ended,
    Origin,
    OriginEpoch,
    OriginRange,
    PartitionOrigins,
    Ranges,
    at,
    epoch_at,
    from_offset,
    going_on,
)
from isthmus_control.shared_prefix import PartitionLog, shared_prefix

Topic: TypeAlias = tuple[str, str]
"""Name and topic id."""
SOURCE: Final = "the source"
FOLLOWER: Final = "this cluster"


# --- the leader's side


def to_lead(
    state: ControlState, ends: Mapping[Topic, Mapping[int, TermStart]], ended: Ended = Ended.PROMOTED
) -> tuple[Body, ...]:
    """What is to be recorded, in this order, before this cluster writes in partitions; ``ends``: of their logs.

    ``ended``: how what they followed until now ended. Nothing where its terms go on: also of one that the log ends
    before, if leaders changed since it began. What came in a later epoch may stand there, and says where the loss is
    (:func:`log_epochs`, before the log is compared, or told).
    """
    cuts: list[PartitionOffset] = []
    begun: list[TopicTerms] = []
    for (topic, topic_id), partitions in ends.items():
        due: dict[int, TermStart] = {}
        for partition, end in partitions.items():
            known = state.origins_of(topic, topic_id, partition)
            goes_on = known.open_range
            own = goes_on if goes_on is not None and is_own(goes_on, state.cluster_id, topic_id) else None
            if ends_beyond(known.ranges, end.offset):
                if own is not None and own.began_in < end.epoch:
                    continue
                cuts.append(PartitionOffset(topic, topic_id, partition, end.offset))
            elif own is not None:
                continue
            due[partition] = end
        if due:
            begun.append(TopicTerms(topic, topic_id, due))
    return (*([Truncate(tuple(cuts))] if cuts else ()), *([BeginTerm(tuple(begun), ended)] if begun else ()))


def to_mend(state: ControlState, topic: Topic, partition: int, lost: LostBefore, epoch: int) -> tuple[Body, ...]:
    """What is to be recorded, in this order, of a log that lost what a list says: a term that goes on is another one.

    ``epoch``: the partition's leader epoch.
    """
    goes_on = state.origins_of(*topic, partition).open_range
    cut = Truncate((PartitionOffset(*topic, partition, lost.offset),))
    if goes_on is None or goes_on.via:
        return (cut,)
    start = TermStart(lost.offset, epoch)
    return cut, BeginTerm((TopicTerms(*topic, {partition: start}),), Ended.CUT)


def ends_beyond(ranges: Ranges, end: int) -> bool:
    """Whether more is recorded of a log that nothing is appended to by a link than it has: it lost its end."""
    if not ranges:
        return False
    last = ranges[-1]
    return last.start_offset > end or (last.end_offset is not None and last.end_offset > end)


def is_own(range_: OriginRange, cluster_id: str, topic_id: str) -> bool:
    """Whether this cluster wrote a range of this very topic."""
    return range_.origin[:2] == (cluster_id, topic_id) and not range_.assumed


@dataclass(frozen=True, slots=True)
class LostBefore:
    """The log lost records from ``offset`` on that were there before this cluster's term began: see :func:`to_mend`."""

    offset: int


def epoch_due(
    known: PartitionOrigins, cluster_id: str, topic_id: str, base_offset: int, epoch: int
) -> OriginEpoch | LostBefore | None:
    """What is to be recorded before a batch of the log is pushed, by its header; None: nothing.

    The headers of what this cluster followed have its own epochs, which are nobody else's business, but for one that is
    later than that in which a term began behind it.
    """
    written = _written(known, cluster_id, topic_id)
    seen = EpochSeen(epoch, base_offset, base_offset + 1)
    if (lost := _lost_before(written, (seen,), (base_offset, None), False)) is not None:
        return lost
    found = at(written, base_offset)
    if found is None:
        return None
    in_force = epoch_at(found, base_offset)
    if in_force is not None and in_force.epoch == epoch:
        return None
    return OriginEpoch(epoch, max(base_offset, found.start_offset))


class EpochSeen(NamedTuple):
    """A leader epoch of a log, with where its first batch begins and its last one ends, of those that are there."""

    epoch: int
    start_offset: int
    end_offset: int


def log_epochs(
    known: PartitionOrigins,
    cluster_id: str,
    topic_id: str,
    partition: int,
    found: Sequence[EpochSeen],
    log: tuple[int, int | None],
    cleaned: bool,
) -> LogEpochs | LostBefore | None:
    """What is to be recorded of the epochs of this cluster's log, as they were ``found`` in it; None: nothing.

    ``found``: in order, all that the log has from the last recorded one on that it still has, else from its start.
    ``log``: where it starts and ends; None: it was not asked where it ends. ``cleaned``: they were read from what a
    cleaner left, so that each may have begun right behind the one before, and others may have been in between; brokers
    say where epochs begin whatever was cleaned. What may have been lost counts as lost.
    """
    written = _written(known, cluster_id, topic_id)
    if (lost := _lost_before(written, found, log, cleaned)) is not None:
        return lost
    epochs: list[OriginEpoch] = []
    read_to = log[0]
    for epoch, begins, ends in found:
        for each in written:
            start = max(begins, each.start_offset)
            if not each.reaches_beyond(start) or ends <= start:
                continue
            in_force = epoch_at(each, start)
            if in_force is None or in_force.epoch != epoch:
                epochs.append(OriginEpoch(epoch, max(read_to, each.start_offset) if cleaned else start))
        read_to = ends
    return LogEpochs(partition, tuple(epochs)) if epochs else None


def _written(known: PartitionOrigins, cluster_id: str, topic_id: str) -> Ranges:
    """What this cluster has written since it followed last, if it goes on with that.

    What it wrote before that may have come again from whom it followed, in other epochs of its own.
    """
    goes_on = known.open_range
    if goes_on is None or not is_own(goes_on, cluster_id, topic_id):
        return ()
    since = next((index for index, each in enumerate(reversed(known.ranges)) if each.via), len(known.ranges))
    return tuple(each for each in known.ranges[-since:] if is_own(each, cluster_id, topic_id))


def _lost_before(
    written: Ranges, found: Sequence[EpochSeen], log: tuple[int, int | None], cleaned: bool
) -> LostBefore | None:
    """Whether the log lost what was there before a term of this cluster's began, or may have.

    An epoch that came later has written before its start, the log ends there, or what a cleaner left does not show that
    it has not.
    """
    terms = [each for each in written if each.began_in >= 0]
    recorded = {epoch for each in terms for epoch, _ in each.epochs}
    read_to = log[0]
    for epoch, begins, ends in found:
        lost_from = read_to if cleaned and epoch not in recorded else begins
        if any(epoch > each.began_in and each.start_offset > lost_from for each in terms):
            return LostBefore(lost_from)
        read_to = ends
    log_end = log[1]
    if log_end is not None and terms and terms[-1].start_offset > log_end:
        return LostBefore(read_to if cleaned else log_end)
    return None


def told(known: PartitionOrigins, partition: int, offset: int) -> ToldPartition | None:
    """What a leader tells a follower of one of its partitions, from ``offset`` on; None: nothing is known."""
    ranges = tuple(replace(each, via="", began_in=-1) for each in from_offset(known.ranges, offset))
    if not ranges:
        return None
    first = ranges[0].start_offset
    return ToldPartition(partition, first, ranges)


# --- the follower's side


@dataclass(frozen=True, slots=True)
class Parted:
    """The follower's log is not its source's from ``offset`` on: nothing is appended before it was cut."""

    offset: int


def to_follow(
    known: PartitionOrigins,
    source: Origin,
    said: ToldPartition,
    here: tuple[int, int],
    there: tuple[int, int],
) -> ToldPartition | Parted | None:
    """What a follower records of what its source says, before it appends anything behind; None: nothing is new.

    ``source``: the direct one, with its topic id and no term. ``here``, ``there``: (start, end) of the logs. What was
    followed from it before it said where it has it from becomes what it says now, as it is the same topic.
    """
    log_end = here[1]
    theirs = PartitionLog(SOURCE, PartitionOrigins(said.ranges), max(there[0], said.offset), there[1])
    same = shared_prefix(PartitionLog(FOLLOWER, known, *here), theirs)
    if same.unknown is None and same.offset < min(log_end, there[1]) and same.offset >= said.offset:
        return Parted(same.offset)
    offset = max(_assumed_since(known.ranges, source, log_end), said.offset)
    ranges = from_offset(said.ranges, offset)
    if not ranges or ranges[0].start_offset != offset:
        return None
    entry = replace(said, offset=offset, ranges=ranges)
    return None if _recorded(known, entry) else entry


def _assumed_since(ranges: Ranges, source: Origin, log_end: int) -> int:
    """From where on up to its end a list assumes that the direct source wrote what it has from it."""
    since = log_end
    for each in reversed(ranges):
        if not each.assumed or each.origin != source._replace(term=NO_TERM):
            break
        since = min(since, each.start_offset)
    return since


def _recorded(known: PartitionOrigins, entry: ToldPartition) -> bool:
    """Whether a list says already what is to be recorded."""
    told_of = tuple(replace(each, via=SOURCE) for each in entry.ranges)
    return _plain(going_on(known.ranges, entry.offset, told_of)) == _plain(known.ranges)


def later_epochs(known: PartitionOrigins, source: Origin, entry: ToldPartition) -> LogEpochs | None:
    """What is to be recorded, where that is later epochs of what goes on to be received and nothing else; else None."""
    before = known.open_range
    if before is None or before.via != source.cluster_id or before.assumed:
        return None
    told_of = tuple(replace(each, via=source.cluster_id) for each in entry.ranges)
    *others, after = going_on(known.ranges, entry.offset, told_of)
    count = len(before.epochs)
    if (*others, replace(after, epochs=after.epochs[:count])) != known.ranges:
        return None
    return LogEpochs(entry.partition, after.epochs[count:])


def _plain(ranges: Sequence[OriginRange]) -> list[OriginRange]:
    return [replace(each, via="") for each in ranges]


# --- both sides


def is_received(state: ControlState, topic: Topic, partition: int) -> bool:
    """Whether a partition follows, as recorded: that was not closed yet."""
    goes_on = state.origins_of(*topic, partition).open_range
    return _followed(state, topic, partition) is not None or (goes_on is not None and bool(goes_on.via))


def is_as_received(state: ControlState, topic: Topic, partition: int) -> bool:
    """Whether a partition that follows no more, although its list goes on with that, has nothing but what it received.

    Who detached it was killed before it recorded where that ended. The list was changed last while it followed: where
    the namespace has been reserved since before that, nobody else could write.
    """
    known = state.origins_of(*topic, partition)
    return (
        known.open_range is not None
        and bool(known.open_range.via)
        and any(
            each.type is ResourceType.TOPIC
            and topic[0] in each
            and each.reserved_at_offset is not None
            and each.reserved_at_offset <= known.at_offset
            for each in state.namespaces.values()
        )
    )


def is_written(state: ControlState, topic: Topic, partition: int) -> bool:
    """Whether this cluster writes a partition, as recorded: that was not closed yet."""
    goes_on = state.origins_of(*topic, partition).open_range
    return goes_on is not None and not goes_on.via


def received_from_others(
    state: ControlState, topic: Topic, partitions: Iterable[int], source: tuple[str, str]
) -> list[int]:
    """Partitions that follow, as recorded, and not ``source``: (cluster id, topic id)."""
    found = []
    for partition in partitions:
        followed, goes_on = _followed(state, topic, partition), state.origins_of(*topic, partition).open_range
        if followed is not None:
            is_other = (followed.source_cluster_id, followed.source_topic_id) != source
        else:
            is_other = goes_on is not None and goes_on.via not in ("", source[0])
        if is_other:
            found.append(partition)
    return found


def _followed(state: ControlState, topic: Topic, partition: int) -> ProvenanceRange | None:
    """The direct source that a partition goes on to follow, as recorded."""
    history = state.histories.get(topic[0])
    return history.open_range(partition) if history is not None and history.topic_id == topic[1] else None


def to_close(state: ControlState, ends: Mapping[Topic, Mapping[int, int]], ended: Ended) -> tuple[Body, ...]:
    """What is to be recorded, in this order, where nothing is written or received any more; ``ends``: of the logs.

    What goes on there ended like that, and what a log lost before goes. Nothing where nothing goes on.
    """
    cuts: list[PartitionOffset] = []
    closed: list[PartitionOffset] = []
    for (topic, topic_id), partitions in ends.items():
        for partition, end in partitions.items():
            place = PartitionOffset(topic, topic_id, partition, end)
            goes_on = state.origins_of(topic, topic_id, partition).open_range
            followed = _followed(state, (topic, topic_id), partition)
            starts = [each.start_offset for each in followed.epochs[:-1]] if followed is not None else []
            if followed is not None and max((followed.start_offset, *starts)) > end:
                cuts.append(place)
            elif goes_on is not None and not goes_on.via and goes_on.start_offset > end:
                cuts.append(place)
                continue
            if goes_on is not None or followed is not None:
                closed.append(place)
    return (
        *([Truncate(tuple(cuts))] if cuts else ()),
        *([CloseProvenance(tuple(closed), ended)] if closed else ()),
    )


def to_compare(
    state: ControlState, name: str, topic: Topic, partition: int, log_start: int, log_end: int
) -> PartitionLog:
    """One side of :func:`~isthmus_control.shared_prefix.shared_prefix`.

    What is recorded of more than the log has does not count, but what it wrote itself has to be recorded: see
    :func:`log_epochs`.
    """
    return PartitionLog(name, state.origins_of(*topic, partition), log_start, log_end)
