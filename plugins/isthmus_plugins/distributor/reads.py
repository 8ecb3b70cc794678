"""Reads this cluster's logs for a distributor: committed records, from where it goes on, as they come.

One task for each broker that leads something. What was read waits for the distributor, up to :data:`WAITING_BYTES_MAX`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, FetchPartition, TopicInfo, TopicPartition
from isthmus_protocol.error_codes import OFFSET_OUT_OF_RANGE
from isthmus_protocol.records import walk
from isthmus_protocol.transactions import AbortedTransactions

PARTITION_BYTES: Final = 1024 * 1024
REQUEST_BYTES: Final = 8 * 1024 * 1024
WAIT_MS: Final = 500
WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of what was read and not given yet."""


class Read(NamedTuple):
    """What was read of a partition, and was committed."""

    place: TopicPartition
    batches: list[memoryview]
    following: int
    """The offset to go on at."""
    epoch: int
    """Leader epoch of the last batch; -1: nothing was read."""
    end: int
    """The last stable offset."""


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
        self._waiting: asyncio.Queue[Read] = asyncio.Queue()
        self._waiting_bytes = 0
        self._room = asyncio.Event()

    async def run(self, topics: Mapping[str, TopicInfo], positions: Mapping[TopicPartition, int]) -> None:
        """Read from ``positions`` on until cancelled. Raises BrokerUnavailable, OutOfRange: begin anew."""
        try:
            async with asyncio.TaskGroup() as group:
                for leader, asked_of in by_leader(topics, positions).items():
                    group.create_task(self._read(leader, asked_of), name=f"{self._lane}/broker-{leader}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _read(self, leader: int, asked: dict[TopicPartition, FetchPartition]) -> None:
        connection = await self._cluster.fetch_connection(leader, self._lane)
        places = {(each.topic_id, each.partition): place for place, each in asked.items()}
        while True:
            while self._waiting_bytes > WAITING_BYTES_MAX:
                self._room.clear()
                await self._room.wait()
            for found in await connection.fetch(
                list(asked.values()), WAIT_MS, REQUEST_BYTES, read_committed=True, only_changes=True
            ):
                place = places[found.topic_id, found.partition]
                if found.error_code == OFFSET_OUT_OF_RANGE:
                    raise OutOfRange(f"{place[0]}-{place[1]} does not have offset {asked[place].offset}")
                if found.error_code:
                    raise BrokerUnavailable(f"{place[0]}-{place[1]}: error {found.error_code}")
                batches, following, epoch = [], asked[place].offset, -1
                aborted = AbortedTransactions(found.aborted)
                for start, end, header in walk(found.records):
                    is_aborted = aborted.hold(header)
                    if header.next_offset <= following:
                        continue
                    following, epoch = header.next_offset, header.leader_epoch
                    if not header.is_control and not is_aborted:
                        batches.append(found.records[start:end])
                asked[place] = asked[place]._replace(offset=following)
                self._waiting_bytes += sum(map(len, batches))
                self._waiting.put_nowait(Read(place, batches, following, epoch, found.last_stable_offset))

    async def take(self, bytes_max: int, wait_s: float) -> list[Read]:
        """What was read, up to about so many bytes; empty: nothing was for so long."""
        try:
            async with asyncio.timeout(wait_s):
                taken = [await self._waiting.get()]
        except TimeoutError:
            return []
        size = _size(taken[0])
        while size < bytes_max and not self._waiting.empty():
            taken.append(self._waiting.get_nowait())
            size += _size(taken[-1])
        self._waiting_bytes -= size
        self._room.set()
        return taken


def _size(read: Read) -> int:
    return sum(map(len, read.batches))
