"""Whether two clusters' logs hold the same: batches compared whole where they can be, record by record where not.

Two levels, as docs/operations.md defines "equal":

- a batch copied whole has the same offsets, attributes, record count, base and max timestamp, producer and compressed
  bytes. Allowed to differ: leader epoch, CRC, the producer id by its translation, for plain batches all about the
  producer (links stamp them), for control batches the timestamp and coordinator epoch (the target writes its own);
- a batch that had to be re-encoded (holes, LogAppendTime, cleaned prefix) holds records with the same offset,
  timestamp, key, value and headers, in batches that may begin and end elsewhere. Markers are no records.

The first level costs a hash (or, side by side, a comparison) over bytes that nobody decodes, so it is tried first.
Batches come as fetched, with the registered index (producer_ids.py) of the cluster they were fetched from.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

from isthmus_protocol.producer_ids import NO_PRODUCER_ID, is_filler, is_links_own, translate
from isthmus_protocol.record_codec import Record, decode_control, decode_in_steps, decode_records
from isthmus_protocol.records import HEADER_SIZE, NO_SEQUENCE, BatchHeader, Frame, UnsupportedBatch, whole_header

DIGEST_SIZE = 16

# Base offset, last offset delta, attributes, base and max timestamp, record count, producer id, epoch, sequence.
_CANONICAL = struct.Struct(">qihqqiqhi")
# Offset, timestamp, and how long key and value are (-1: null), then how many headers.
_RECORD = struct.Struct(">qqqqi")
_LENGTH = struct.Struct(">q")
# Offset, producer id and epoch, commit or abort.
_MARKER = struct.Struct(">qqhh")


class Equality(IntEnum):
    """How far two batches are equal; false in a condition if they are not."""

    DIFFERENT = 0
    RECORDS = 1
    BATCH = 2


class Difference(NamedTuple):
    """The first offset at which two logs differ, and in what; never the contents, which are not ours to show.

    `what` is "missing in the first", "missing in the second", "timestamp", "key", "value" or "headers".
    """

    offset: int
    what: str

    def __str__(self) -> str:
        return f"offset {self.offset}: {self.what}"


def batch_digest(batch: Frame, cluster_index: int, header: BatchHeader | None = None) -> bytes:
    """16 bytes that are the same for batches that are equal as whole batches, and for no others.

    `header`: the whole batch's, where it was read before. Raises MalformedBatch, UnsupportedBatch, ProducerIdOverflow.
    """
    header = whole_header(batch) if header is None else header
    digest = blake2b(_canonical_header(header, cluster_index), digest_size=DIGEST_SIZE)
    digest.update(_canonical_payload(batch, header))
    return digest.digest()


def equal_batches(first: Frame, first_index: int, second: Frame, second_index: int) -> Equality:
    """How far two batches, each from its cluster, are equal.

    RECORDS is an answer about batches that begin and end alike; use RecordsDigest or first_difference for runs of
    batches that do not. Whether RECORDS is enough depends on the source's batch having been copied whole or not.

    Raises MalformedBatch, UnsupportedBatch, ProducerIdOverflow.
    """
    first_header, second_header = whole_header(first), whole_header(second)
    if _canonical_header(first_header, first_index) == _canonical_header(second_header, second_index) and (
        # Memoryviews compare byte by byte, bytes at once.
        bytes(_canonical_payload(first, first_header)) == bytes(_canonical_payload(second, second_header))
    ):
        return Equality.BATCH
    if first_header.is_control or second_header.is_control:
        return Equality.DIFFERENT
    difference = first_difference(decode_records(first), decode_records(second))
    return Equality.DIFFERENT if difference else Equality.RECORDS


class RecordsDigest:
    """A digest of all records in a run of batches, however they are cut into batches and compressed."""

    __slots__ = ("_digest", "records")

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=DIGEST_SIZE)
        self.records = 0

    def adding(
        self,
        batch: Frame,
        pieces: Iterable[bytes],
        *,
        from_offset: int = 0,
        to_offset: int | None = None,
        aborted: bool = False,
    ) -> Iterator[None]:
        """Adds a batch's records from `from_offset` on, before `to_offset`, a step at a time. Markers and fillers add
        nothing. `pieces`: the batch's records, decompressed.

        `aborted`: they are part of an aborted transaction, so consumers that read committed records do not see them.
        Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.
        """
        header = whole_header(batch)
        if header.is_control or is_filler(header.producer_id):
            return
        for records in decode_in_steps(batch, pieces):
            parts: list[bytes] = []
            for offset, timestamp, key, value, headers, _ in records:
                if offset < from_offset:
                    continue
                if to_offset is not None and offset >= to_offset:
                    break
                self.records += 1
                parts += _canonical_record(offset, timestamp, key, value, headers)
                if aborted:
                    parts.append(b"aborted")
            self._digest.update(b"".join(parts))
            yield

    def adding_marked(self, batch: Frame, pieces: Iterable[bytes], from_offset: int, to_offset: int) -> Iterator[None]:
        """Adds a batch's records of a range, a step at a time, or what a control batch says of its producer's
        transaction, and where.

        A marker that was taken out adds nothing. Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.
        """
        header = whole_header(batch)
        if not header.is_control:
            yield from self.adding(batch, pieces, from_offset=from_offset, to_offset=to_offset)
        elif header.record_count and not is_filler(header.producer_id):
            marker = decode_control(batch).marker
            self._digest.update(_MARKER.pack(header.base_offset, header.producer_id, header.producer_epoch, marker))

    def digest(self) -> bytes:
        """16 bytes that stand for the records added so far."""
        return self._digest.digest()


class LatestDigest:
    """A digest of the latest committed record of each key: what the cleaner leaves of a compacted topic in the end.

    Keys whose latest record is a tombstone count as absent: the cleaner takes it out, too, in its own time. So it does
    with records without a key, which only topics have that were not compacted before. Holds 32 bytes for each key, and
    a little more.
    """

    __slots__ = ("_latest", "_sum")

    def __init__(self) -> None:
        self._latest: dict[bytes, tuple[int, int]] = {}
        self._sum = 0

    def adding(
        self, batch: Frame, pieces: Iterable[bytes], from_offset: int = 0, to_offset: int | None = None
    ) -> Iterator[None]:
        """Adds a batch's committed records from `from_offset` on, before `to_offset`, in the order of the log, a step
        at a time. `pieces`: the batch's records, decompressed.

        Markers and fillers add nothing. Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.
        """
        header = whole_header(batch)
        if header.is_control or is_filler(header.producer_id):
            return
        for records in decode_in_steps(batch, pieces):
            for offset, timestamp, key, value, headers, _ in records:
                if to_offset is not None and offset >= to_offset:
                    break
                if offset < from_offset or key is None:
                    continue
                name = blake2b(key, digest_size=DIGEST_SIZE).digest()
                record = 0
                if value is not None:
                    parts = _canonical_record(offset, timestamp, key, value, headers)
                    record = int.from_bytes(blake2b(b"".join(parts), digest_size=DIGEST_SIZE).digest(), "big")
                self._sum += record - self._latest.get(name, (0, 0))[1]
                self._latest[name] = (offset, record)
            yield

    @property
    def keys(self) -> int:
        """How many there are, those whose latest record is a tombstone among them."""
        return len(self._latest)

    @property
    def total(self) -> bytes:
        """16 bytes that stand for the latest records of all that was added so far."""
        return _sum_digest(self._sum)

    def digest(self, from_offset: int, to_offset: int) -> tuple[bytes, int]:
        """16 bytes that stand for the latest records in a range of offsets, in any order, and how many they are."""
        found = [record for offset, record in self._latest.values() if record and from_offset <= offset < to_offset]
        return _sum_digest(sum(found)), len(found)


def _sum_digest(total: int) -> bytes:
    return (total % (1 << 8 * DIGEST_SIZE)).to_bytes(DIGEST_SIZE, "big")


def first_difference(first: Iterable[Record], second: Iterable[Record]) -> Difference | None:
    """Where two sequences of records (rising offsets) first differ, or None. Reads both only as far as needed."""
    left, right = iter(first), iter(second)
    while True:
        a, b = next(left, None), next(right, None)
        if a is None or b is None:
            if a is not None:
                return Difference(a.offset, "missing in the second")
            return None if b is None else Difference(b.offset, "missing in the first")
        if a.offset != b.offset:
            if a.offset < b.offset:
                return Difference(a.offset, "missing in the second")
            return Difference(b.offset, "missing in the first")
        if a[1:5] != b[1:5]:
            for what in ("timestamp", "key", "value", "headers"):
                if getattr(a, what) != getattr(b, what):
                    return Difference(a.offset, what)


def _canonical_record(
    offset: int,
    timestamp: int,
    key: bytes | None,
    value: bytes | None,
    headers: tuple[tuple[str, bytes | None], ...],
) -> list[bytes]:
    parts = [
        _RECORD.pack(offset, timestamp, _length(key), _length(value), len(headers)),
        key or b"",
        value or b"",
    ]
    for name, content in headers:
        encoded = name.encode("utf-8", "surrogateescape")
        parts += (_LENGTH.pack(len(encoded)), encoded, _LENGTH.pack(_length(content)), content or b"")
    return parts


def _length(content: bytes | None) -> int:
    return -1 if content is None else len(content)


def _canonical_header(header: BatchHeader, cluster_index: int) -> bytes:
    producer_id, epoch, sequence = header.producer_id, header.producer_epoch, header.base_sequence
    if producer_id == NO_PRODUCER_ID or (is_links_own(producer_id) and not header.is_control):
        producer_id, epoch, sequence = NO_PRODUCER_ID, -1, NO_SEQUENCE
    else:
        producer_id = translate(producer_id, cluster_index)
    base_timestamp, max_timestamp = (0, 0) if header.is_control else (header.base_timestamp, header.max_timestamp)
    return _CANONICAL.pack(
        header.base_offset,
        header.last_offset_delta,
        header.attributes,
        base_timestamp,
        max_timestamp,
        header.record_count,
        producer_id,
        epoch,
        sequence,
    )


def _canonical_payload(batch: Frame, header: BatchHeader) -> Frame:
    if header.is_control and header.record_count:
        try:
            return bytes((decode_control(batch).marker,))
        except UnsupportedBatch:
            pass  # another kind of control batch: nobody re-creates it, so it has to be the same bytes
    return memoryview(batch)[HEADER_SIZE:]
