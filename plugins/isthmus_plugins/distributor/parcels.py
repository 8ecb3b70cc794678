"""What a distributor is about to give of one partition, while it is made and when it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.distribution.by_key import by_key
from isthmus_plugins.distribution.copies import Copies, Refused
from isthmus_plugins.distributor.reads import Read
from isthmus_protocol.records import read_header

T = TypeVar("T")

ASIDE_BYTES: Final = 32 * 1024
"""What is rewritten beside the loop."""


class Parcel(NamedTuple):
    """What is given of a partition at once, and where that ends."""

    place: TopicPartition
    batches: Mapping[TopicPartition, list[bytes]]
    """By the target's partition."""
    messages: int
    refused: list[Refused]
    following: int
    epoch: int
    """Leader epoch of the source's record before ``following``."""
    is_all: bool
    """Of what was read; if not, what is behind ``following`` is to be read again."""


class Prepared:
    """What was read of a partition and rewritten, and may still get more.

    ``counts``: how many partitions the target has of the topic, where that is another number than here.
    """

    def __init__(self, place: TopicPartition, copies: Copies, counts: int | None) -> None:
        self.place = place
        self.copies = copies
        self.counts = counts
        self.size = 0
        """Bytes that were read."""
        self._following, self._epoch = 0, -1

    def add(self, read: Read) -> None:
        """What was read next. Raises BatchError: nothing of this can be used then."""
        if self.copies.rest is None:
            self._add(read)
        self.size += read.size

    def _add(self, read: Read) -> None:
        for batch in read.batches:
            self.copies.add(batch, read.offset)
        rest = self.copies.rest
        if rest is None:
            self._following, self._epoch = read.following, read.epoch
            return
        # The epoch is that of the record before: whether the log was cut since is told by where that epoch ends.
        for header in map(read_header, read.batches):
            if header.base_offset < rest:
                self._following, self._epoch = min(rest, header.next_offset), header.leader_epoch

    def parcel(self) -> Parcel:
        """All of it, or what the copies have taken."""
        topic, partition = self.place
        made = self.copies.batches()
        if self.counts is None:
            batches = {self.place: made} if made else {}
        else:
            divided = by_key(made, partition, self.counts)
            batches = {(topic, number): each for number, each in divided.items()}
        messages, refused, is_all = self.copies.messages, self.copies.refused, self.copies.rest is None
        return Parcel(self.place, batches, messages, refused, self._following, self._epoch, is_all)


async def beside_the_loop(size: int, work: Callable[[], T]) -> T:
    """In a thread, if it is much."""
    return work() if size < ASIDE_BYTES else await asyncio.to_thread(work)
