"""Offsets by time of topics that follow, or did: what the source's brokers would answer.

Transaction markers and fillers of a follower carry the target's time, which is later than the records' around them. So
a broker that is asked for the first offset since some time may answer with a marker far too early (never too late). The
proxy puts the right offset in its place: while the topic follows over a live link, the source's own answer; else the
first record from the broker's answer on that has such a time, as far as it can be found in bounded time.

The client's request goes to the broker as it is, so that the broker decides what the client may see: errors stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from isthmus_control.model import TopicState
from isthmus_plugins.api import Hold, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_by_size
from isthmus_plugins.cluster import BrokerUnavailable, FetchPartition, KafkaRefused, TopicPartition
from isthmus_plugins.decompression import decompressed
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.follower.log import FILLER_KEY
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_protocol import peeks
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.producer_ids import is_links_own
from isthmus_protocol.record_codec import decode_in_steps
from isthmus_protocol.records import BatchError, BatchHeader, walk
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.replication")

MAX_TIMESTAMP: Final = -3
"""The special time of ListOffsets that asks for the record with the latest one (KIP-734)."""
NO_OFFSET: Final = -1
ASK_TIMEOUT_S: Final = 3.0
SCAN_S: Final = 2.0
"""How long a record is looked for without the source."""
SCAN_BYTES: Final = 4 * 1024 * 1024
"""Of one read."""
LANE: Final = "time-offsets"


class Found(NamedTuple):
    """An answer of ListOffsets: -1 for both where no record has such a time."""

    offset: int
    timestamp: int


class TimeOffsets(Part):
    """Corrects answers of ListOffsets by time for topics with provenance; all others pass untouched."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._uncorrected = rare_lines(log, "offsets by time not corrected")
        self.unsure = 0
        """Answers that stayed the broker's, because the source could not be asked and the scan found no end."""

    def answers(self) -> Sequence[Answering]:
        return (calls.OffsetsForTimes.by(self.on_offsets_for_times),)

    def metrics(self) -> Iterable[Metric]:
        unsure = CounterMetricFamily(
            "isthmus_link_uncorrected_time_offsets", "Answers of ListOffsets by time that may be too early"
        )
        unsure.add_metric((), self.unsure)
        return (unsure,)

    def hooks(self) -> Sequence[RequestHook]:
        return [RequestHook(ApiKey.LIST_OFFSETS, self.on_list_offsets, whole=True, pure=True)]

    def on_list_offsets(self, request: Request) -> Verdict:
        """Look whether the request asks for offsets by time of a topic that follows or did."""
        histories = self._context.control.state.histories
        if not histories:
            return None
        isolation, topics = peeks.list_offsets(request.version, request.frame)
        asked: dict[TopicPartition, int] = {}
        for encoded, partitions in topics:
            if any(timestamp >= 0 or timestamp == MAX_TIMESTAMP for _, timestamp in partitions):
                name = encoded.decode("utf-8", "replace")
                if name in histories:
                    asked |= {
                        (name, partition): timestamp
                        for partition, timestamp in partitions
                        if timestamp >= 0 or timestamp == MAX_TIMESTAMP
                    }
        if not asked:
            return None
        # The hook's frame is valid during the call only.
        return Hold(self._corrected(bytes(request.frame), request.version, bool(isolation), asked))

    async def _corrected(
        self, frame: bytes, version: int, committed: bool, asked: Mapping[TopicPartition, int]
    ) -> Verdict:
        found = await self.answer(asked, committed)
        if not found:
            return Replace(frame)
        return Replace(frame, partial(answered_by_size, partial(_with, found, version)))

    async def on_offsets_for_times(
        self, connection: LinkConnection, question: calls.OffsetsForTimes
    ) -> calls.OffsetsForTimesAnswer:
        """A follower asks for offsets of one of the led topics."""
        topic = question.topic
        link = self._context.control.state.links.get(connection.link_name)
        if link is None or not any(mapping.remote_name(topic) is not None for mapping in link.mappings):
            raise LinkRejected("UNKNOWN_TOPIC", f"{topic} is no topic of this link here")
        asked = {(topic, partition): timestamp for partition, timestamp in question.partitions}
        try:
            found = await self._context.cluster.offsets_for_times(asked)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        if topic in self._context.control.state.histories:  # it follows a third cluster, whose answer is the right one
            found = {**found, **await self.answer(asked, committed=False)}
        return calls.OffsetsForTimesAnswer(
            tuple(calls.FoundAtTime(partition, *answer) for (_, partition), answer in found.items())
        )

    # ---- right answers ----

    async def answer(self, asked: Mapping[TopicPartition, int], committed: bool) -> dict[TopicPartition, Found]:
        """The right answers, as far as they can be found; what is left out is the broker's to answer."""
        topics = {topic for topic, _ in asked}
        parts = await asyncio.gather(
            *(
                self._answer_for(topic, {place: time for place, time in asked.items() if place[0] == topic}, committed)
                for topic in sorted(topics)
            )
        )
        return {place: found for part in parts for place, found in part.items()}

    async def _answer_for(
        self, topic: str, asked: Mapping[TopicPartition, int], committed: bool
    ) -> dict[TopicPartition, Found]:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                theirs = await self._of_source(topic, asked)
            if theirs is None:
                scans = await asyncio.gather(*(self._scan(place, time) for place, time in asked.items()))
                theirs = {place: found for place, found in zip(asked, scans, strict=True) if found is not None}
            return {place: await self._readable(place, found, committed) for place, found in theirs.items()}
        except (BrokerUnavailable, KafkaRefused, LinkRejected, LinkLost, TimeoutError) as error:
            self.unsure += len(asked)
            self._uncorrected.one(topic, {"topic": topic, "detail": str(error)})
            return {}

    async def _of_source(self, topic: str, asked: Mapping[TopicPartition, int]) -> dict[TopicPartition, Found] | None:
        """The source's own answers; None where the topic does not follow now, or the source cannot be asked."""
        record = self._context.control.state.follower_topics.get(topic)
        if record is None or record.state is not TopicState.FOLLOWING:
            return None
        connections = self._peers.connections(record.link)
        if not connections:
            return None
        times = tuple(calls.AtTime(partition, time) for (_, partition), time in asked.items())
        answer = await connections[0].call(calls.OffsetsForTimes(record.source_topic, times), ASK_TIMEOUT_S)
        return {(topic, partition): Found(offset, time) for partition, offset, time in answer.partitions}

    async def _readable(self, place: TopicPartition, found: Found, committed: bool) -> Found:
        """What a broker with this log answers: nothing beyond what the client may read."""
        if found.offset == NO_OFFSET:
            return found
        cluster = self._context.cluster
        end = await (cluster.last_stable_offset(*place) if committed else cluster.high_watermark(*place))
        return found if found.offset < end else Found(NO_OFFSET, -1)

    async def _scan(self, place: TopicPartition, time: int) -> Found | None:
        """The first of the source's records with such a time, from the broker's answer on; None if that takes long."""
        cluster = self._context.cluster
        leader = await cluster.leader_of(*place)
        answer = (await cluster.offsets_for_times({place: time})).get(place)
        topic = (await cluster.topics()).get(place[0])
        if leader is None or answer is None or topic is None or time == MAX_TIMESTAMP:
            self.unsure += 1
            return None
        offset = answer[0]
        if offset == NO_OFFSET:
            return Found(NO_OFFSET, -1)
        connection = await cluster.fetch_connection(leader, LANE)
        deadline = self._clock.monotonic() + SCAN_S
        while self._clock.monotonic() < deadline:
            (part,) = await connection.fetch(
                [FetchPartition(topic.topic_id, place[1], offset, SCAN_BYTES)], 0, SCAN_BYTES
            )
            if part.error_code or not part.records:
                return None if part.error_code else Found(NO_OFFSET, -1)
            try:
                for start, end, header in walk(part.records):
                    found = await self._in_batch(place, header, part.records[start:end], offset, time)
                    if found is not None:
                        return found
                    offset = header.next_offset
            except BatchError as error:
                raise BrokerUnavailable(f"{place[0]}-{place[1]} at {offset}: {error}") from error
        self.unsure += 1
        return None

    async def _in_batch(
        self, place: TopicPartition, header: BatchHeader, batch: memoryview, offset: int, time: int
    ) -> Found | None:
        if header.max_timestamp < time or header.next_offset <= offset:
            return None
        if self._came_from_elsewhere(place, header.base_offset):
            if header.is_control:
                return None
            fills = is_links_own(header.producer_id) and header.is_transactional
        else:
            fills = False
        if header.is_control:
            return Found(header.base_offset, header.max_timestamp)
        for records in decode_in_steps(batch, decompressed(batch)):
            for record in records:
                if record.offset >= offset and record.timestamp >= time and not (fills and record.key == FILLER_KEY):
                    return Found(record.offset, record.timestamp)
            await asyncio.sleep(0)
        return None

    def _came_from_elsewhere(self, place: TopicPartition, offset: int) -> bool:
        """Whether what stands at the offset was written by a link."""
        for known in self._context.control.state.provenance(*place):
            if known.start_offset <= offset and (known.end_offset is None or offset < known.end_offset):
                return known.source_cluster_id != self._context.cluster_id
        return False


def _with(found: Mapping[TopicPartition, Found], version: int, frame: bytes) -> bytes:
    """A broker's answer with the right offsets in place of those that it found. What it refused stays refused."""
    correlation_id, response = decode_response(ApiKey.LIST_OFFSETS, version, frame)
    answer: Any = response
    topics = []
    for topic in answer.topics:
        partitions = (_corrected(found.get((topic.name, each.partition_index)), each) for each in topic.partitions)
        topics.append(replace(topic, partitions=tuple(partitions)))
    return encode_response(replace(answer, topics=tuple(topics)), correlation_id)


def _corrected(found: Found | None, partition: Any) -> Any:
    if found is None or partition.error_code:
        return partition
    changed = {"offset": found.offset, "timestamp": found.timestamp}
    if found.offset != partition.offset and hasattr(partition, "leader_epoch"):
        changed["leader_epoch"] = -1  # the broker's is that of another offset, and clients would compare with it
    return replace(partition, **changed)
