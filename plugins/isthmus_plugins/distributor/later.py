"""Finds the first message of a log that is later than some time.

Brokers know the first record that is. But they count the markers of transactions, which have the time at which they
were written: of messages that came late, or that a new cluster was filled with, that is later than any of theirs. So
from where the broker says the log is read on, up to a message.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, FetchPartition, TopicPartition
from isthmus_plugins.distributor.followed import TimedLog
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import BatchError, walk

LANE: Final = "tree-later"
READ_BYTES: Final = 1024 * 1024
LOOK_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of a log, at a time. What was read is not read again for a time that is as late."""


class Found(NamedTuple):
    """Where the first message is that is later than a time."""

    offset: int | None
    """None: no message is."""
    is_far: bool = False
    """It is somewhere behind this offset: whoever asks again has the log read on from there."""


class _Read(NamedTuple):
    """What is known of a log: no message before ``offset`` is later than ``time``."""

    topic_id: bytes
    leader_epoch: int
    """A log may have lost its end when its leader changed, and others may stand there."""
    time: int
    offset: int


class Later:
    """Of one cluster."""

    def __init__(self, cluster: ClusterApi) -> None:
        self._cluster = cluster
        self._read: dict[TopicPartition, _Read] = {}

    async def first(self, place: TopicPartition, one: TimedLog, time: int, offset: int) -> Found:
        """The first message later than ``time``.

        ``offset``: no message before it is later. Raises BrokerUnavailable, KafkaRefused.
        """
        known = self._read.get(place)
        if known is not None and known[:2] == (one.topic_id, one.leader_epoch) and known.time <= time:
            offset = max(offset, known.offset)
        leader = await self._cluster.leader_of(*place)
        connection = await self._cluster.fetch_connection(-1 if leader is None else leader, LANE)
        left = LOOK_BYTES_MAX
        while left > 0:
            asked = FetchPartition(one.topic_id, place[1], offset, READ_BYTES, one.leader_epoch)
            (found,) = await connection.fetch([asked], 0, READ_BYTES)
            if found.error_code:
                self._read.pop(place, None)
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
            self._read[place] = _Read(one.topic_id, one.leader_epoch, time, offset)
            if offset >= found.high_watermark:
                return Found(None)
            if not found.records:
                break  # a hole that cleaning left, or what else has nothing read now
            left -= len(found.records)
        return Found(offset, is_far=True)
