"""What the control log accepts of provenance: which cluster each range of a partition's offsets came from.

That is the direct source; who wrote the records first is in :mod:`isthmus_control.rules.origins`. Closing and cutting
is told to both, where both are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS
from isthmus_control.model import ProvenanceRange, SourceEpoch, TopicHistory
from isthmus_control.origins import TopicOrigins
from isthmus_control.outcome import ProducerIdsRegistered, ProvenanceChanged, Refuse, Rejection, require
from isthmus_control.rules.checks import ENTRIES_MAX, Result, check_uuid, following, link_named, put
from isthmus_control.rules.origins import origins_closed, origins_cut
from isthmus_protocol.producer_ids import CLUSTERS_MAX


class _Histories:
    """Edits histories of many partitions and says in the end which changed."""

    def __init__(self, state: ControlState, entries: int) -> None:
        require(0 < entries <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
        self._state = state
        self._edited: dict[str, tuple[str, dict[int, tuple[ProvenanceRange, ...]]]] = {}
        self._touched: dict[str, set[int]] = {}

    def ranges(self, topic: str, topic_id: str, partition: int, *, new: bool = False) -> tuple[ProvenanceRange, ...]:
        """The ranges of a partition. With ``new`` another topic id begins an empty history, else it is refused."""
        require(partition >= 0, Rejection.INVALID, f"topic {topic!r} has no partition {partition}")
        check_uuid(topic_id, "the topic id")
        if topic not in self._edited:
            history = self._state.histories.get(topic)
            if history is not None and history.topic_id == topic_id:
                self._edited[topic] = (topic_id, dict(history.partitions))
            elif new:
                self._edited[topic] = (topic_id, {})
            else:
                raise Refuse(Rejection.NOT_FOUND, f"topic {topic!r} with id {topic_id} has no provenance")
        known_id, partitions = self._edited[topic]
        require(known_id == topic_id, Rejection.INVALID, f"topic {topic!r} occurs with two ids")
        return partitions.get(partition, ())

    def set(self, topic: str, partition: int, ranges: tuple[ProvenanceRange, ...]) -> None:
        partitions = self._edited[topic][1]
        if partitions.get(partition, ()) != ranges:
            partitions[partition] = ranges
            self._touched.setdefault(topic, set()).add(partition)

    def result(self) -> Result:
        if not self._touched:
            return self._state, ()
        histories = dict(self._state.histories)
        changes = []
        for topic in sorted(self._touched):
            topic_id, partitions = self._edited[topic]
            histories[topic] = TopicHistory(topic, topic_id, partitions)
            changes.append(ProvenanceChanged(topic, topic_id, tuple(sorted(self._touched[topic]))))
        return self._state.evolve(histories=histories), tuple(changes)


def _open_provenance(state: ControlState, offset: int, command: c.Command, body: c.OpenProvenance) -> Result:
    link = link_named(state, body.link)
    histories = _Histories(state, len(body.partitions))
    for entry in body.partitions:
        topic = following(state, link, entry.topic, entry.topic_id)
        require(entry.offset >= 0, Rejection.INVALID, f"{_at(entry)}: the offset is negative")
        ranges = histories.ranges(entry.topic, entry.topic_id, entry.partition, new=True)
        last = ranges[-1] if ranges else None
        if last is not None and last.end_offset is None:
            require(
                (last.source_cluster_id, last.source_topic_id) == (link.remote_cluster_id, topic.source_topic_id),
                Rejection.CONFLICT,
                f"{_at(entry)} follows cluster {last.source_cluster_id} since offset {last.start_offset}: "
                f"close that range first",
            )
            require(
                entry.offset >= last.start_offset,
                Rejection.CONFLICT,
                f"{_at(entry)} follows since offset {last.start_offset}, later than {entry.offset}",
            )
            continue  # goes on where it was
        if last is not None and last.end_offset is not None:
            require(
                entry.offset >= last.end_offset,
                Rejection.CONFLICT,
                f"{_at(entry)} has provenance up to offset {last.end_offset}: truncate it to {entry.offset} first",
            )
        behind = 0 if last is None or last.end_offset is None else last.end_offset
        if last is not None and entry.offset > behind:
            # What stands between was written here while nothing was followed.
            local = ProvenanceRange(state.cluster_id, entry.topic_id, behind, entry.offset, command.at_ms)
            ranges = (*ranges, local)
        opened = ProvenanceRange(link.remote_cluster_id, topic.source_topic_id, entry.offset, None, command.at_ms)
        histories.set(entry.topic, entry.partition, (*ranges, opened))
    return histories.result()


def _at(entry: c.PartitionOffset | c.PartitionEpoch) -> str:
    return f"{entry.topic}-{entry.partition}"


def _of_histories(state: ControlState, partitions: tuple[c.PartitionOffset, ...]) -> list[c.PartitionOffset]:
    """Those of topics that follow, or did; of what was led alone there are origins, and no more."""
    if state.level < ORIGINS:
        return list(partitions)
    return [each for each in partitions if not _is(state.origins, each) or _is(state.histories, each)]


def _is(table: Mapping[str, TopicHistory] | Mapping[str, TopicOrigins], entry: c.PartitionOffset) -> bool:
    known = table.get(entry.topic)
    return known is not None and known.topic_id == entry.topic_id


def _goes_on(state: ControlState, entry: c.PartitionOffset) -> bool:
    """Whether something goes on in a partition whose history is not open: this cluster writes, or has been told from
    where it is about to receive."""
    return state.origins_of(entry.topic, entry.topic_id, entry.partition).open_range is not None


def _close_provenance(state: ControlState, offset: int, command: c.Command, body: c.CloseProvenance) -> Result:
    histories = _Histories(state, len(body.partitions))
    for entry in _of_histories(state, body.partitions):
        ranges = histories.ranges(entry.topic, entry.topic_id, entry.partition)
        if (not ranges or ranges[-1].end_offset is not None) and _goes_on(state, entry):
            continue
        require(ranges, Rejection.NOT_FOUND, f"{_at(entry)} has no provenance")
        last = ranges[-1]
        if last.end_offset is not None:
            require(
                last.end_offset == entry.offset,
                Rejection.CONFLICT,
                f"{_at(entry)} was closed at offset {last.end_offset}, not {entry.offset}",
            )
            continue
        floor = max((last.start_offset, *(epoch.start_offset for epoch in last.epochs if epoch != last.epochs[-1])))
        require(entry.offset >= floor, Rejection.CONFLICT, f"{_at(entry)} is open from offset {floor} on")
        # An epoch is recorded before its first append: one that never came is dropped.
        epochs = tuple(epoch for epoch in last.epochs if epoch.start_offset < entry.offset)
        histories.set(
            entry.topic,
            entry.partition,
            (*ranges[:-1], replace(last, end_offset=entry.offset, epochs=epochs, recorded_ms=command.at_ms)),
        )
    return origins_closed(state, offset, body, histories.result())


def _truncate_provenance(state: ControlState, offset: int, command: c.Command, body: c.TruncateProvenance) -> Result:
    histories = _Histories(state, len(body.partitions))
    for entry in body.partitions:
        require(entry.offset >= 0, Rejection.INVALID, f"{_at(entry)}: the offset is negative")
    for entry in _of_histories(state, body.partitions):
        kept = []
        for range_ in histories.ranges(entry.topic, entry.topic_id, entry.partition):
            is_open = range_.end_offset is None
            if range_.start_offset >= entry.offset and not is_open:
                continue
            kept.append(
                replace(
                    range_,
                    start_offset=min(range_.start_offset, entry.offset),
                    end_offset=None if range_.end_offset is None else min(range_.end_offset, entry.offset),
                    epochs=tuple(epoch for epoch in range_.epochs if epoch.start_offset < entry.offset),
                )
            )
        histories.set(entry.topic, entry.partition, tuple(kept))
    return origins_cut(state, offset, command, body, histories.result())


def _record_source_epochs(state: ControlState, offset: int, command: c.Command, body: c.RecordSourceEpochs) -> Result:
    histories = _Histories(state, len(body.epochs))
    for entry in body.epochs:
        ranges = histories.ranges(entry.topic, entry.topic_id, entry.partition)
        last = ranges[-1] if ranges else None
        if last is None or last.end_offset is not None:
            raise Refuse(Rejection.CONFLICT, f"{_at(entry)} follows nothing")
        require(entry.epoch >= 0, Rejection.INVALID, f"{_at(entry)}: epoch {entry.epoch} is none")
        new = SourceEpoch(entry.epoch, entry.start_offset)
        if new in last.epochs:
            continue
        newest = last.epochs[-1] if last.epochs else SourceEpoch(-1, last.start_offset)
        require(
            entry.epoch > newest.epoch and entry.start_offset >= newest.start_offset,
            Rejection.CONFLICT,
            f"{_at(entry)}: epoch {entry.epoch} from offset {entry.start_offset} does not come after "
            f"epoch {newest.epoch} from offset {newest.start_offset}",
        )
        # An epoch that wrote nothing gives its place to the next one, as in a broker's own epoch cache.
        epochs = last.epochs[:-1] if last.epochs and newest.start_offset == entry.start_offset else last.epochs
        histories.set(entry.topic, entry.partition, (*ranges[:-1], replace(last, epochs=(*epochs, new))))
    return histories.result()


def _register_producer_ids(state: ControlState, offset: int, command: c.Command, body: c.RegisterProducerIds) -> Result:
    require(body.cluster_id, Rejection.INVALID, "the cluster has no id")
    taken = {index: cluster_id for cluster_id, index in state.producer_id_ranges.items()}
    known = state.producer_id_ranges.get(body.cluster_id)
    if known is not None:
        require(
            body.index in (None, known),
            Rejection.CONFLICT,
            f"cluster {body.cluster_id} has the producer id range {known} here, not {body.index}",
        )
        return state, ()
    index = body.index
    if index is None:
        index = next(number for number in range(len(taken) + 1) if number not in taken)
    require(0 <= index < CLUSTERS_MAX, Rejection.INVALID, f"there is no producer id range {index}")
    require(
        index not in taken,
        Rejection.CONFLICT,
        f"the producer id range {index} belongs to cluster {taken.get(index)} here, not to {body.cluster_id}",
    )
    return (
        state.evolve(producer_id_ranges=put(state.producer_id_ranges, body.cluster_id, index)),
        (ProducerIdsRegistered(body.cluster_id, index),),
    )


PROVENANCE_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.OpenProvenance: _open_provenance,
    c.CloseProvenance: _close_provenance,
    c.TruncateProvenance: _truncate_provenance,
    c.RecordSourceEpochs: _record_source_epochs,
    c.RegisterProducerIds: _register_producer_ids,
}
