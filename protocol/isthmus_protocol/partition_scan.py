"""Walks the topics and partitions of a message while its bytes come, in whatever pieces.

What is between headers (contents) is skipped by arithmetic and never kept, so the cost is that of partitions and
batches, not of bytes.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Final

from isthmus_protocol.wire import MalformedFrame, read_uvarint, skip_tags

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_INT32_MAX: Final = 2**31 - 1
_NAME_BYTES_MAX: Final = 2**15 - 1
_UNIT_BYTES_MAX: Final = 128 * 1024
"""What is read as a whole is no longer."""


@dataclass(slots=True)
class ScannedPartition:
    """One partition of a message. Batches and records are counted in answers to Fetch: a Produce has one batch."""

    topic: bytes
    """Its name, or in versions that have ids alone its id (16 bytes)."""
    partition: int
    size: int = 0
    """Bytes of its whole batches; of a Produce: of its records, -1 for null."""
    header: bytes = b""
    """Of its first batch. A Produce may have less of one, and that of a message older than magic 2 ends with its
    attributes."""
    batches: int = 0
    """A message older than magic 2 counts as one."""
    records: int = 0
    """-1: not known, as messages older than magic 2 are compressed, or something is there that is no batch."""
    error_code: int = 0


class PartitionScan:
    """One message, from its size prefix on. Raises MalformedFrame where the bytes are no such message."""

    def __init__(self, by_id: bool, flexible: bool) -> None:
        self._by_id = by_id
        self._flexible = flexible
        self._kept = b""
        """Bytes from the beginning of what could not be read whole yet."""
        self._skip = 0
        self._topics_left = -1
        """-1: the head was not read yet."""
        self._partitions_left = 0
        self._tags_due = 0
        """Sections of tags that stand before what comes next."""
        self._topic = b""
        self.parts: list[ScannedPartition] = []
        """Whoever is told of some may take them out."""
        self.units = 0
        """So many were read: the head, topics, partitions, tags. Of an answer to Fetch also what is in partitions."""
        self.name_bytes_max = 0
        """Of its topics."""

    @property
    def done(self) -> bool:
        """All partitions were found."""
        return self._topics_left == 0 and self._partitions_left == 0

    def feed(self, data: bytes, units_max: int = sys.maxsize) -> int:
        """Take the next bytes, or as many of them as have so many units (1 at least). How many were taken."""
        size = len(data)
        if self._skip >= size:
            self._skip -= size
            return size
        position, self._skip = self._skip, 0
        kept = len(self._kept)
        if kept:
            data = self._kept + data
        last = self.units + units_max
        while not self.done:
            if self.units >= last:
                self._kept = b""  # no unit ends in what was kept of it
                return position - kept
            units = self.units
            try:
                end = self._unit(data, position)
            except (IndexError, struct.error):
                self.units = units  # of tags, which are read again
                self._kept = data[position:]
                if len(self._kept) > _UNIT_BYTES_MAX:
                    raise MalformedFrame("no message has so much between two batches") from None
                return size
            self.units += 1
            if end >= len(data):
                self._kept, self._skip = b"", end - len(data)
                return size
            position = end
        return size

    def _unit(self, data: bytes, position: int) -> int:
        """Read what comes next as a whole, or raise and change nothing. Where it ends, which may be behind ``data``."""
        if self._topics_left < 0:
            return self._head(data, position)
        for _ in range(self._tags_due):
            position = self._tags(data, position)
        return self._partition(data, position) if self._partitions_left else self._topic_head(data, position)

    def _head(self, data: bytes, position: int) -> int:
        """What stands before the first topic."""
        raise NotImplementedError

    def _partition(self, data: bytes, position: int) -> int:
        """What stands of a partition before its first batch header, or with it."""
        raise NotImplementedError

    def _topic_head(self, data: bytes, position: int) -> int:
        size, position = (16, position) if self._by_id else self._length(data, position)
        if not 0 <= size <= _NAME_BYTES_MAX:
            raise MalformedFrame(f"a topic's name has {size} bytes")
        self.name_bytes_max = max(self.name_bytes_max, size)
        topic = data[position : position + size]
        partitions, position = self._count(data, position + size)
        self._topic, self._partitions_left, self._tags_due = topic, max(0, partitions), 0
        if not self._partitions_left:
            self._topic_ends()
        return position

    def _partition_ends(self) -> None:
        self._partitions_left -= 1
        self._tags_due = int(self._flexible)
        if not self._partitions_left:
            self._topic_ends()

    def _topic_ends(self) -> None:
        self._topics_left -= 1
        self._tags_due += int(self._flexible)

    def _tags(self, data: bytes, position: int) -> int:
        """Behind a section of tags, each of which costs as much as a partition."""
        if not data[position]:  # as nearly all
            return position + 1
        self.units += read_uvarint(data, position)[0]
        return skip_tags(data, position)

    def _length(self, data: bytes, position: int) -> tuple[int, int]:
        """Of a string, and where that begins. Negative: null."""
        if self._flexible:
            length, position = read_uvarint(data, position)
            return length - 1, position
        (length,) = _INT16.unpack_from(data, position)
        return int(length), position + 2

    def _count(self, data: bytes, position: int) -> tuple[int, int]:
        """Of an array or of bytes, and where they begin. Negative: null."""
        if self._flexible:
            count, position = read_uvarint(data, position)
            if count > _INT32_MAX:
                raise MalformedFrame(f"no frame holds {count} of anything")
            return count - 1, position
        (count,) = _INT32.unpack_from(data, position)
        return int(count), position + 4
