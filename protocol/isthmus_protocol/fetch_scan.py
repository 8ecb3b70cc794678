"""Finds the partitions and batches of a Fetch answer, and counts records by batch headers."""

from __future__ import annotations

import struct
from typing import Final

from isthmus_protocol.partition_scan import PartitionScan, ScannedPartition
from isthmus_protocol.peeks import topics_are_ids
from isthmus_protocol.records import COMPRESSION_MASK, HEADER_SIZE, MAGIC, PREFIX_SIZE
from isthmus_protocol.schema import ApiKey, response_header_flexible

_THROTTLE_AT: Final = 8
_ERROR_CODE: Final = struct.Struct(">h4x")
"""Of the answer, and the fetch session's id."""
_PARTITION: Final = struct.Struct(">ih")
"""Partition and error code; offsets follow: high watermark, last stable, and since v5 log start."""
_ABORTED_BYTES: Final = 16
"""Of an aborted transaction: producer id, first offset."""
_BATCH: Final = struct.Struct(">8xi4xb40xi")
"""Of a batch's header: length, magic, count of records."""
assert _BATCH.size == HEADER_SIZE
_ANY: Final = struct.Struct(">8xi4xbB")
"""Of what stands at the same place before magic 2 ("Old Message Format" of Kafka's documentation): length, magic,
attributes."""
_INT32_MAX: Final = 2**31 - 1
_OLD_LENGTH_MIN: Final = 14
"""CRC, magic, attributes, and the lengths of key and value."""
_BATCHES_AT_ONCE: Final = 100
_BATCHES_PER_UNIT: Final = 4
"""So many cost what one of the other units does."""


class FetchScan(PartitionScan):
    """One answer, in the versions since 4.

    The last batch of a partition that is cut (KIP-74) is not counted. Nor is what stands behind something that is no
    batch: ``records`` is not known then, and the next partition is gone on with.
    """

    def __init__(self, version: int) -> None:
        flexible = response_header_flexible(ApiKey.FETCH, version)
        super().__init__(topics_are_ids(ApiKey.FETCH, version), flexible)
        self._has_error_code = version >= 7
        self._offsets_bytes = 24 if version >= 5 else 16
        self._replica_bytes = 4 if version >= 11 else 0
        """Of the preferred read replica."""
        self._aborted_left = 0
        self._records_due = False
        """The size of a partition's records comes next."""
        self._records_left = 0
        """Bytes."""
        self.error_code = 0
        """Of the answer as a whole."""

    def _unit(self, data: bytes, position: int) -> int:
        if self._records_left:
            return self._batches(data, position)
        if self._aborted_left:
            position = self._tags(data, position + _ABORTED_BYTES)
            self._aborted_left -= 1
            return position
        if self._records_due:
            return self._records(data, position)
        return super()._unit(data, position)

    def _head(self, data: bytes, position: int) -> int:
        position += _THROTTLE_AT
        if self._flexible:
            position = self._tags(data, position)
        position += 4
        error_code = 0
        if self._has_error_code:
            (error_code,) = _ERROR_CODE.unpack_from(data, position)
            position += _ERROR_CODE.size
        topics, position = self._count(data, position)
        self.error_code, self._topics_left = error_code, max(0, topics)
        return position

    def _partition(self, data: bytes, position: int) -> int:
        partition, error_code = _PARTITION.unpack_from(data, position)
        aborted, position = self._count(data, position + _PARTITION.size + self._offsets_bytes)
        self.parts.append(ScannedPartition(self._topic, partition, error_code=error_code))
        self._records_due = True
        self._tags_due = 0
        if self._flexible:
            self._aborted_left = max(0, aborted)
            return position
        return position + max(0, aborted) * _ABORTED_BYTES

    def _records(self, data: bytes, position: int) -> int:
        size, position = self._count(data, position + self._replica_bytes)
        self._records_due = False
        self._records_left = max(0, size)
        if not self._records_left:
            self._partition_ends()
        return position

    def _batches(self, data: bytes, position: int) -> int:
        """The next batches, as many as have their headers in ``data``."""
        part, end, start = self.parts[-1], position + self._records_left, position
        last = min(end, len(data)) - HEADER_SIZE
        batches = records = 0
        while position <= last and batches < _BATCHES_AT_ONCE:
            length, magic, count = _BATCH.unpack_from(data, position)
            behind: int = position + PREFIX_SIZE + length
            if magic != MAGIC or behind > end or length < HEADER_SIZE - PREFIX_SIZE or count < 0:
                break
            batches += 1
            records += count
            position = behind
        if not batches:
            return self._odd_batch(part, data, position, end)
        if not part.batches:
            part.header = data[start : start + HEADER_SIZE]
        self._add(part, position - start, batches, records)
        self.units += batches // _BATCHES_PER_UNIT
        return self._goes_on(position, end)

    def _odd_batch(self, part: ScannedPartition, data: bytes, position: int, end: int) -> int:
        """Something else than a whole batch whose header is there."""
        if end - position < _ANY.size:
            return self._goes_on(end, end)
        length, magic, attributes = _ANY.unpack_from(data, position)
        behind: int = position + PREFIX_SIZE + length
        if behind > end and MAGIC >= magic >= 0:
            return self._goes_on(end, end)
        if magic == MAGIC and length >= HEADER_SIZE - PREFIX_SIZE and len(data) - position < HEADER_SIZE:
            raise IndexError("the bytes end")
        if magic not in (0, 1) or length < _OLD_LENGTH_MIN:
            part.records = -1
            return self._goes_on(end, end)
        if not part.batches:
            part.header = data[position : position + _ANY.size]
        self._add(part, behind - position, 1, -1 if attributes & COMPRESSION_MASK else 1)
        return self._goes_on(behind, end)

    @staticmethod
    def _add(part: ScannedPartition, size: int, batches: int, records: int) -> None:
        part.size += size
        part.batches += batches
        count = part.records + records
        part.records = -1 if records < 0 or part.records < 0 or count > _INT32_MAX else count

    def _goes_on(self, position: int, end: int) -> int:
        """Behind what was read of a partition's records, which end at ``end``."""
        self._records_left = end - position
        if not self._records_left:
            self._partition_ends()
        return position
