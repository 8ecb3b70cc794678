"""Reads this cluster's logs for a distributor: committed records, from where it goes on, as they come.

One task for each broker that leads something. What was read waits for the distributor, up to :data:`WAITING_BYTES_MAX`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, FetchPartition, TopicInfo, TopicPartition
from isthmus_protocol.error_codes import OFFSET_OUT_OF_RANGE
from isthmus_protocol.records import walk
from isthmus_protocol.transactions import AbortedTransactions

PARTITION_BYTES: Final = 1024 * 1024
REQUEST_BYTES: Final = 8 * 1024 * 1024
WAIT_MS: Final = 500
WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of what was read and not taken yet."""


class Read(NamedTuple):
    """What was read of a partition, and was committed."""

    place: TopicPartition
    batches: list[memoryview]
    offset: int
    """From where it was read."""
    following: int
    """The offset to go on at."""
    epoch: int
    """Leader epoch of the last batch; -1: nothing was read."""
    end: int
    """The last stable offset."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self.batches))


class OutOfRange(Exception):
    """A log does not have an offset: it begins later, or ends before it."""


def by_leader(
    topics: Mapping[str, TopicInfo], positions: Mapping[TopicPartition, int]
) -> dict[int, dict[TopicPartition, FetchPartition]]:
    """What to ask each broker for. Raises BrokerUnavailable where a partition has no leader."""
    asked: dict[int, dict[TopicPartition, FetchPartition]] = {}
    for place, position in positions.items():
        topic, partition = topics[place[0]], topics[place[0]].partitions[place[1]]
        if partition.leader < 0:
            raise BrokerUnavailable(f"{place[0]}-{place[1]} has no leader now")
        asked.setdefault(partition.leader, {})[place] = FetchPartition(
            topic.topic_id, place[1], position, PARTITION_BYTES, partition.leader_epoch
        )
    return asked


class Reads:
    """Of the partitions of one distributor."""

    def __init__(self, cluster: ClusterApi, lane: str) -> None:
        self._cluster = cluster
        self._lane = lane
        self._asked: dict[int, dict[TopicPartition, FetchPartition]] = {}
        """By leader, what is read."""
        self._left_out: dict[TopicPartition, tuple[int, FetchPartition]] = {}
        self._waiting: deque[Read] = deque()
        self._waiting_bytes = 0
        self._work = asyncio.Event()
        """There is room, or something to be read again."""
        self._news = asyncio.Event()

    async def run(self, topics: Mapping[str, TopicInfo], positions: Mapping[TopicPartition, int]) -> None:
        """Read from ``positions`` on until cancelled. Raises BrokerUnavailable, OutOfRange: begin anew."""
        self._asked |= by_leader(topics, positions)
        try:
            async with asyncio.TaskGroup() as group:
                for leader, asked_of in self._asked.items():
                    group.create_task(self._read(leader, asked_of), name=f"{self._lane}/broker-{leader}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _read(self, leader: int, asked: dict[TopicPartition, FetchPartition]) -> None:
        connection = await self._cluster.fetch_connection(leader, self._lane)
        places = {(each.topic_id, each.partition): place for place, each in asked.items()}
        while True:
            while self._waiting_bytes > WAITING_BYTES_MAX or not asked:
                self._work.clear()
                await self._work.wait()
            sent = dict(asked)
            for found in await connection.fetch(
                list(sent.values()), WAIT_MS, REQUEST_BYTES, read_committed=True, only_changes=True
            ):
                place = places[found.topic_id, found.partition]
                if asked.get(place) is not sent.get(place):
                    continue  # it is read from elsewhere by now, or not at all
                if found.error_code == OFFSET_OUT_OF_RANGE:
                    raise OutOfRange(f"{place[0]}-{place[1]} does not have offset {asked[place].offset}")
                if found.error_code:
                    raise BrokerUnavailable(f"{place[0]}-{place[1]}: error {found.error_code}")
                offset = asked[place].offset
                batches, following, epoch = [], offset, -1
                aborted = AbortedTransactions(found.aborted)
                for start, end, header in walk(found.records):
                    is_aborted = aborted.hold(header)
                    if header.next_offset <= following:
                        continue
                    following, epoch = header.next_offset, header.leader_epoch
                    if not header.is_control and not is_aborted:
                        batches.append(found.records[start:end])
                asked[place] = asked[place]._replace(offset=following)
                read = Read(place, batches, offset, following, epoch, found.last_stable_offset)
                self._waiting_bytes += read.size
                self._waiting.append(read)
                self._news.set()

    def leave_out(self, place: TopicPartition) -> None:
        """Read a partition no more, for now."""
        for leader, asked in self._asked.items():
            if place in asked:
                self._left_out[place] = leader, asked.pop(place)

    def go_back(self, place: TopicPartition, offset: int) -> None:
        """Read a partition from an offset on, also one that was left out. What was read of it and waits is no use."""
        self.leave_out(place)
        leader, asked = self._left_out.pop(place)
        self._asked[leader][place] = asked._replace(offset=offset)
        self._work.set()

    async def wait(self, until: float = math.inf) -> None:
        """Until something was read, by the loop's clock until then at most, or until :meth:`wake`."""
        if not self._waiting:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if until == math.inf else until):
                    await self._news.wait()
        self._news.clear()

    def wake(self) -> None:
        """Have who waits go on."""
        self._news.set()

    def take(self, bytes_max: int) -> list[Read]:
        """What was read, up to about so many bytes."""
        taken: list[Read] = []
        size = 0
        while size < bytes_max and self._waiting:
            taken.append(self._waiting.popleft())
            size += taken[-1].size
        self._waiting_bytes -= size
        if size:
            self._work.set()
        return taken
