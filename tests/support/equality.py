"""Whether a follower's log equals its source's, raw batches of both, as docs/operations.md defines it."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_plugins.replication.follower.log import FILLER_KEY
from isthmus_protocol.producer_ids import INDEX_SHIFT, REPLICATED, is_links_own, is_replicated
from isthmus_protocol.record_codec import Record, decode_records
from isthmus_protocol.record_equality import batch_digest, first_difference
from isthmus_protocol.records import BatchHeader
from support.raw_log import RawBatch, RawLog


@dataclass(frozen=True)
class Copied:
    """How much of a log had to be equal, and was."""

    whole_batches: int
    records: int


def assert_equal(source: RawLog, follower: RawLog, cleaned: bool = False) -> Copied:
    """The follower's log is the source's: limits, records by offset, batches whole wherever they could be copied whole.

    ``cleaned``: the source's log was compacted, so that its batches may have been encoded again. Raises AssertionError.
    """
    assert (follower.start, follower.high_watermark) == (source.start, source.high_watermark)
    assert follower.last_stable_offset == source.last_stable_offset
    for header, _ in follower:
        assert not header.is_idempotent or is_replicated(header.producer_id), header
    theirs, ours = records(source), records(follower)
    assert first_difference(theirs, ours) is None, str(first_difference(theirs, ours))
    index = source_index(follower)
    whole = 0
    copies = {header.base_offset: data for header, data in follower}
    headless = known_by_markers(source)
    for header, data in source:
        if header.base_offset < source.start or not copied_whole(header, cleaned):
            continue
        copy = copies.get(header.base_offset)
        assert copy is not None, f"no batch of the follower begins at {header.base_offset}"
        if header.producer_id in headless and header.base_sequence > 0:
            continue
        # Ids of the follower's log are in the source's range already.
        assert batch_digest(data, index) == batch_digest(copy, index), f"the batches at {header.base_offset} differ"
        whole += 1
    if not cleaned:  # nothing but the source's batches: not even fillers
        assert [each.header.last_offset for each in source] == [each.header.last_offset for each in follower]
    return Copied(whole, len(ours))


def copied_whole(header: BatchHeader, cleaned: bool) -> bool:
    """Whether a batch of the source has to stand in the follower's log as it is."""
    return header.is_as_produced and not cleaned


def known_by_markers(source: RawLog) -> set[int]:
    """Producers of which a marker comes first in a log, since the batches before it were deleted.

    A broker that gets the marker first takes the next batch with sequence 0 only: the follower's may be numbered anew.
    """
    first: dict[int, bool] = {}
    for header, _ in source:
        first.setdefault(header.producer_id, header.is_control)
    return {producer_id for producer_id, is_control in first.items() if is_control}


def records(log: RawLog) -> list[Record]:
    """What a read_uncommitted consumer sees."""
    return [
        record
        for header, data in log
        if not header.is_control and header.record_count
        for record in decode_records(data)
        if record.offset >= log.start
    ]


def latest(log: RawLog) -> dict[bytes, Record]:
    """What counts of a compacted log of no transactions: the last record of each key, if that is no tombstone."""
    found = {record.key: record for record in records(log) if record.key is not None}
    return {key: record for key, record in found.items() if record.value is not None and key != FILLER_KEY}


def source_index(follower: RawLog) -> int:
    """The registered index of the cluster whose producer ids the follower's log holds."""
    ids = {
        each.header.producer_id >> INDEX_SHIFT & (REPLICATED >> INDEX_SHIFT) - 1
        for each in follower
        if is_replicated(each.header.producer_id) and not is_links_own(each.header.producer_id)
    }
    assert len(ids) <= 1, f"producer ids of several clusters: {ids}"
    return ids.pop() if ids else 0


def was_cleaned(log: RawLog) -> bool:
    """Whether compaction has taken something out of the log."""
    expected = log.batches[0].header.base_offset if log.batches else log.start
    for header, _ in log:
        if header.base_offset != expected or header.has_holes:
            return True
        expected = header.next_offset
    return False


def describe(batches: tuple[RawBatch, ...]) -> str:
    """A log's headers, a line each, for messages of failures."""
    return "\n".join(
        f"{header.base_offset}..{header.last_offset} n={header.record_count} attributes={header.attributes:#x} "
        f"producer={header.producer_id} epoch={header.producer_epoch} sequence={header.base_sequence}"
        for header, _ in batches
    )
