"""Finds the first message of a log that is later than some time.

Brokers know the first record that is. But they count the markers of transactions, which have the time at which they
were written: of messages that came late, or that a new cluster was filled with, that is later than any of theirs. So
from where the broker says the log is read on, up to a message.
"""

from __future__ import annotations

from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, FetchPartition, TopicPartition
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import BatchError, walk

LANE: Final = "tree-later"
READ_BYTES: Final = 1024 * 1024
LOOK_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of a log, at a time. What was read is not read again for a time that is as late."""


class Later:
    """Of one cluster."""

    def __init__(self, cluster: ClusterApi) -> None:
        self._cluster = cluster
        self._read: dict[tuple[bytes, int], tuple[int, int]] = {}
        """By topic id and partition: no message before this offset is later than this time: (time, offset)."""

    async def first(self, place: TopicPartition, topic_id: bytes, time: int, offset: int) -> int | None:
        """The offset of the first message later than ``time``, or an earlier one where that is far; None: none is.

        ``offset``: no message before it is later. Raises BrokerUnavailable, KafkaRefused.
        """
        known_time, known_offset = self._read.get((topic_id, place[1]), (time + 1, 0))
        if known_time <= time:
            offset = max(offset, known_offset)
        leader = await self._cluster.leader_of(*place)
        connection = await self._cluster.fetch_connection(-1 if leader is None else leader, LANE)
        left = LOOK_BYTES_MAX
        while left > 0:
            (found,) = await connection.fetch([FetchPartition(topic_id, place[1], offset, READ_BYTES)], 0, READ_BYTES)
            if found.error_code:
                self._read.pop((topic_id, place[1]), None)
                raise BrokerUnavailable(f"{place[0]}-{place[1]}: error {found.error_code} at offset {offset}")
            try:
                for start, end, header in walk(found.records):
                    if header.next_offset <= offset:
                        continue
                    if not header.is_control and header.max_timestamp > time:
                        for record in decode_records(found.records[start:end]):
                            if record.offset >= offset and record.timestamp > time:
                                return record.offset
                    offset = header.next_offset
            except BatchError as error:
                raise BrokerUnavailable(f"{place[0]}-{place[1]} cannot be read at offset {offset}: {error}") from error
            self._read[topic_id, place[1]] = time, offset
            if offset >= found.high_watermark:
                return None
            left -= max(len(found.records), 1)
        return offset
