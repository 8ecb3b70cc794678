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
    is_all: bool
    """Of what was prepared."""


class Prepared:
    """What was read of a partition and rewritten, and may still get more.

    ``counts``: how many partitions the target has of the topic, where that is another number than here.
    ``one_batch``: what the target refuses is looked for, so only the first batch is given.
    """

    def __init__(self, place: TopicPartition, copies: Copies, counts: int | None, one_batch: bool) -> None:
        self.place = place
        self.copies = copies
        self.counts = counts
        self._one_batch = one_batch
        self.size = 0
        """Bytes that were read."""
        self._following, self._epoch = 0, -1

    def add(self, read: Read) -> None:
        """What was read next. Raises BatchError: nothing of this can be used then."""
        for batch in read.batches:
            self.copies.add(batch, read.offset)
        self.size += read.size
        self._following, self._epoch = read.following, read.epoch

    def parcel(self) -> Parcel:
        """All of it, or its first batch."""
        (topic, partition), begins = self.place, self.copies.begins
        made, following = self.copies.batches(), self._following
        messages, refused = self.copies.messages, self.copies.refused
        is_all = not (self._one_batch and begins)
        if not is_all:
            made, following = made[:1], begins[0]
            messages = read_header(made[0]).record_count
            refused = [each for each in refused if each.first_offset < following]
        if self.counts is None:
            batches = {self.place: made} if made else {}
        else:
            divided = by_key(made, partition, self.counts)
            batches = {(topic, number): each for number, each in divided.items()}
        return Parcel(self.place, batches, messages, refused, following, self._epoch, is_all)


async def beside_the_loop(size: int, work: Callable[[], T]) -> T:
    """In a thread, if it is much."""
    return work() if size < ASIDE_BYTES else await asyncio.to_thread(work)
