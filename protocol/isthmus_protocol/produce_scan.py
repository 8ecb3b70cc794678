"""Finds the partitions of a Produce request, each of which holds one batch, and their batch headers."""

from __future__ import annotations

import struct
from typing import Final

from isthmus_protocol.partition_scan import PartitionScan, ScannedPartition
from isthmus_protocol.peeks import topics_are_ids
from isthmus_protocol.records import HEADER_SIZE
from isthmus_protocol.schema import ApiKey, request_flexible

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_ACKS: Final = struct.Struct(">hi")
_CLIENT_ID_AT: Final = 12


class ProduceScan(PartitionScan):
    """One request."""

    def __init__(self, version: int) -> None:
        super().__init__(topics_are_ids(ApiKey.PRODUCE, version), request_flexible(ApiKey.PRODUCE, version))
        self.acks = -1
        self.transactional_id: bytes | None = None
        self.lone_head_end: int | None = None
        """Where the head of a request of one partition ends: up to there others like it have the same bytes."""

    def _head(self, data: bytes, position: int) -> int:
        start = position
        position += _CLIENT_ID_AT
        (length,) = _INT16.unpack_from(data, position)  # of the client id, also in flexible versions
        position += 2 + max(0, length)
        if self._flexible:
            position = self._tags(data, position)
        size, position = self._length(data, position)
        transactional_id = None if size < 0 else data[position : position + size]
        position += max(0, size)
        acks, _ = _ACKS.unpack_from(data, position)
        topics, position = self._count(data, position + _ACKS.size)
        self.acks, self.transactional_id, self._topics_left = acks, transactional_id, max(0, topics)
        if topics == 1:
            try:
                end = self._topic_head(data, position)
            except (IndexError, struct.error):
                return position
            if self._partitions_left == 1:
                self.lone_head_end = end - start
            return end
        return position

    def _partition(self, data: bytes, position: int) -> int:
        (partition,) = _INT32.unpack_from(data, position)
        size, position = self._count(data, position + 4)
        length = max(0, size)
        header = data[position : position + min(length, HEADER_SIZE)]
        if len(header) < min(length, HEADER_SIZE):
            raise IndexError("the bytes end")
        self.parts.append(ScannedPartition(self._topic, partition, size, header))
        self._partition_ends()
        return position + length
