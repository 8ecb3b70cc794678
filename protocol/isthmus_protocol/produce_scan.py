"""Finds the partitions and batch headers of a Produce request while its bytes come, in whatever pieces.

What is between headers (contents) is skipped by arithmetic and never kept, so the cost is that of the partitions, not
of the bytes. A partition of a Produce request holds one batch.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from isthmus_protocol.peeks import topics_are_ids
from isthmus_protocol.records import HEADER_SIZE
from isthmus_protocol.schema import ApiKey, request_flexible
from isthmus_protocol.wire import MalformedFrame, read_uvarint, skip_tags

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_ACKS: Final = struct.Struct(">hi")
_CLIENT_ID_AT: Final = 12
_UNIT_BYTES_MAX: Final = 128 * 1024
"""What stands between two batches is no longer: a name has 32 KiB at most."""


class ScannedPartition(NamedTuple):
    topic: bytes
    """Its name, or in versions that have ids alone its id (16 bytes)."""
    partition: int
    size: int
    """Of its records; -1: null."""
    header: bytes
    """The first bytes of its records, :data:`HEADER_SIZE` where there are so many."""


class ProduceScan:
    """One request, from its size prefix on. Raises MalformedFrame where the bytes are no such request."""

    def __init__(self, version: int) -> None:
        self._by_id = topics_are_ids(ApiKey.PRODUCE, version)
        self._flexible = request_flexible(ApiKey.PRODUCE, version)
        self._kept = b""
        """Bytes from the beginning of what could not be read whole yet."""
        self._skip = 0
        self._topics_left = -1
        """-1: the head was not read yet."""
        self._partitions_left = 0
        self._tags_due = 0
        """Sections of tags that stand before what comes next."""
        self._topic = b""
        self.acks = -1
        self.transactional_id: bytes | None = None
        self.parts: list[ScannedPartition] = []
        self.lone_head_end: int | None = None
        """Where the head of a request of one partition ends: up to there others like it have the same bytes."""

    @property
    def done(self) -> bool:
        """All partitions were found."""
        return self._topics_left == 0 and self._partitions_left == 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._skip >= len(data):
            self._skip -= len(data)
            return
        position, self._skip = self._skip, 0
        if self._kept:
            data = self._kept + data
        while not self.done:
            try:
                end = self._unit(data, position)
            except (IndexError, struct.error):
                self._kept = data[position:]
                if len(self._kept) > _UNIT_BYTES_MAX:
                    raise MalformedFrame("no Produce request has so much between two batches") from None
                return
            if end >= len(data):
                self._kept, self._skip = b"", end - len(data)
                return
            position = end

    def _unit(self, data: bytes, position: int) -> int:
        """Read what comes next as a whole, or raise and change nothing. Where it ends, which may be behind ``data``."""
        if self._topics_left < 0:
            return self._head(data, position)
        for _ in range(self._tags_due):
            position = skip_tags(data, position)
        return self._partition(data, position) if self._partitions_left else self._topic_head(data, position)

    def _head(self, data: bytes, position: int) -> int:
        start = position
        position += _CLIENT_ID_AT
        (length,) = _INT16.unpack_from(data, position)  # of the client id, also in flexible versions
        position += 2 + max(0, length)
        if self._flexible:
            position = skip_tags(data, position)
            size, position = read_uvarint(data, position)
            size -= 1
        else:
            (size,) = _INT16.unpack_from(data, position)
            position += 2
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

    def _topic_head(self, data: bytes, position: int) -> int:
        if self._by_id:
            size = 16
        elif self._flexible:
            size, position = read_uvarint(data, position)
            size -= 1
        else:
            (size,) = _INT16.unpack_from(data, position)
            position += 2
        topic = data[position : position + size]
        partitions, position = self._count(data, position + size)
        self._topic, self._partitions_left, self._tags_due = topic, max(0, partitions), 0
        if not self._partitions_left:
            self._topic_ends()
        return position

    def _partition(self, data: bytes, position: int) -> int:
        (partition,) = _INT32.unpack_from(data, position)
        size, position = self._count(data, position + 4)
        length = max(0, size)
        header = data[position : position + min(length, HEADER_SIZE)]
        if len(header) < min(length, HEADER_SIZE):
            raise IndexError("the bytes end")
        self.parts.append(ScannedPartition(self._topic, partition, size, header))
        self._partitions_left -= 1
        self._tags_due = int(self._flexible)
        if not self._partitions_left:
            self._topic_ends()
        return position + length

    def _topic_ends(self) -> None:
        self._topics_left -= 1
        self._tags_due += int(self._flexible)

    def _count(self, data: bytes, position: int) -> tuple[int, int]:
        if self._flexible:
            count, position = read_uvarint(data, position)
            return count - 1, position
        (count,) = _INT32.unpack_from(data, position)
        return int(count), position + 4
