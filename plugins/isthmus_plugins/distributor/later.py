"""Finds the first message of a log that is later than some time.

Brokers know the first record that is. But they count the markers of transactions, which have the time at which they
were written: of messages that came late, or that a new cluster was filled with, that is later than any of theirs. So
from where the broker says the log is read on, up to a message.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Final, NamedTuple

from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, FetchPartition, TopicPartition
from isthmus_plugins.distributor.followed import TimedLog
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import BatchError, walk

LANE: Final = "tree-later"
FIRST_BYTES: Final = 16 * 1024
"""To be read first: mostly the broker's is a message."""
READ_BYTES: Final = 1024 * 1024
LOOK_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of a log, at a time. What was read is not read again for a time that is as late."""
TIMES_MAX: Final = 100
"""That are known of a log; beyond that every other one is forgotten."""


class Found(NamedTuple):
    """Where the first message is that is later than a time."""

    offset: int | None
    """None: no message is."""
    is_far: bool = False
    """It is somewhere behind this offset: whoever asks again has the log read on from there."""


class Searched:
    """What is known of a log: before which offset no message is later than a time.

    Of many times, since groups are at different ones, and each goes on from where it was.
    """

    def __init__(self, topic_id: bytes, leader_epoch: int) -> None:
        self.log = topic_id, leader_epoch
        """A log may have lost its end when its leader changed, and others may stand there."""
        self._known: list[tuple[int, int]] = []
        """(Time, offset), both rising."""

    def offset(self, time: int) -> int:
        """No message before it is later than ``time``."""
        at = bisect_right(self._known, time, key=itemgetter(0))
        return self._known[at - 1][1] if at else 0

    def add(self, time: int, offset: int) -> None:
        """No message before ``offset`` is later than ``time``."""
        if self.offset(time) >= offset:
            return
        first = last = bisect_left(self._known, time, key=itemgetter(0))
        while last < len(self._known) and self._known[last][1] <= offset:
            last += 1
        self._known[first:last] = [(time, offset)]
        if len(self._known) > TIMES_MAX:
            self._known = self._known[-1::-2][::-1]


class Later:
    """Of one cluster."""

    def __init__(self, cluster: ClusterApi) -> None:
        self._cluster = cluster
        self._searched: dict[TopicPartition, Searched] = {}

    async def first(self, place: TopicPartition, one: TimedLog, time: int, offset: int) -> Found:
        """The first message later than ``time``.

        ``offset``: no message before it is later. Raises BrokerUnavailable, KafkaRefused.
        """
        searched = self._searched.get(place)
        if searched is None or searched.log != (one.topic_id, one.leader_epoch):
            searched = self._searched[place] = Searched(one.topic_id, one.leader_epoch)
        offset = max(offset, searched.offset(time))
        leader = await self._cluster.leader_of(*place)
        connection = await self._cluster.fetch_connection(-1 if leader is None else leader, LANE)
        left, size = LOOK_BYTES_MAX, min(FIRST_BYTES, READ_BYTES)
        while left > 0:
            asked = FetchPartition(one.topic_id, place[1], offset, size, one.leader_epoch)
            (found,) = await connection.fetch([asked], 0, size)
            size = READ_BYTES
            if found.error_code:
                self._searched.pop(place, None)
                raise BrokerUnavailable(f"{place[0]}-{place[1]}: error {found.error_code} at offset {offset}")
            try:
                for start, end, header in walk(found.records):
                    if header.next_offset <= offset:
                        continue
                    if not header.is_control and header.max_timestamp > time:
                        for record in decode_records(found.records[start:end]):
                            if record.offset >= offset and record.timestamp > time:
                                return Found(record.offset)
                    offset = header.next_offset
            except BatchError as error:
                raise BrokerUnavailable(f"{place[0]}-{place[1]} cannot be read at offset {offset}: {error}") from error
            searched.add(time, offset)
            if offset >= found.high_watermark:
                return Found(None)
            if not found.records:
                break  # a hole that cleaning left, or what else has nothing read now
            left -= len(found.records)
        return Found(offset, is_far=True)
