"""Has producers that move here from another cluster go on as the producers that they were there.

A client whose bootstrap name leads to another cluster after a failover goes on without a restart, with the producer id
that the former cluster gave it. Its batches stand in this cluster's logs under a translated id (``producer_ids``), and
its number may be another producer's here. So the batches of an idempotent producer that moved are written under its
translated id: a repeated one is answered as a duplicate, with its offset, and the next one goes on behind it. Back at
home it is its own again.

Where a producer comes from is told by its id, or else its epoch (``producer_epochs``), which this part hands out; where
that does not say it, by what this cluster's logs know (``producer_origins``).
Transactional producers are their coordinator's: that of this cluster does not know one that moved, and tells it so. But
where a transactional id is in use at both clusters, both may have given it the same number and epoch. So sequences that
the log has already are looked at: a broker takes such a batch for a repeated one, and acks what it does not store.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, Metric

from isthmus_control.control_state import ControlState
from isthmus_control.model import TopicHistory
from isthmus_plugins.api import NEED_MORE, Close, Hold, Leave, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import as_asked, on_loop
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import RarelyEach
from isthmus_plugins.replication.client_views.producer_origins import (
    Doubtful,
    OutOfSequence,
    ProducedBatch,
    ProducerOrigins,
)
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import INVALID_PRODUCER_ID_MAPPING, OUT_OF_ORDER_SEQUENCE_NUMBER
from isthmus_protocol.messages import decode_request
from isthmus_protocol.producer_epochs import NumberedBy, first_epoch, marked
from isthmus_protocol.producer_ids import ProducerIdOverflow, carry, is_replicated
from isthmus_protocol.records import HEADER_SIZE, BatchError, BatchHeader, read_header, restamped_header
from isthmus_protocol.refusals import Refusal, refuse_all
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import NeedMore

log = logging.getLogger("isthmus_plugins.replication")

CAUSE: Final = "producer_of_another_cluster"
PARTITIONS_AT_ONCE: Final = 200
"""Of a request of many, whose producers are looked for in one go: a millisecond."""
_NUMBER: Final = struct.Struct(">qh")
"""Producer id and epoch."""
Topics: TypeAlias = Sequence[tuple[bytes, Sequence[tuple[int, int, int]]]]
"""Of a request: topics as it names them, their partitions, and where in the frame the records of these are."""


class MovedProducers(Part):
    """Hooks that cost nothing while the cluster has no link, and little for a connection's own producer."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._own = context.cluster_id
        self._first_epoch = first_epoch(self._own)
        self._ranges: dict[str, int] = {}
        """The registered indexes of this cluster and those that it knows; empty: it knows none."""
        self._numbered_by = NumberedBy(self._own, ())
        self._origins = ProducerOrigins(context)
        self._histories: Mapping[str, TopicHistory] = {}
        self._has_followed = False
        """Whether some partition has records of another cluster."""
        self._leave = Leave(float("inf"))
        """For a connection whose producer is this cluster's own, or has no number: it has one producer."""
        self._written: Counter[str] = Counter()
        """Batches of producers that moved, by the cluster that they came from."""
        self._doubtful = 0
        self._refusals: RarelyEach[str] = RarelyEach(_say_refused)

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.INIT_PRODUCER_ID, self.on_init, whole=True),
            RequestHook(ApiKey.PRODUCE, self.on_produce, pure=True),
        ]

    def metrics(self) -> Iterable[Metric]:
        """Batches of producers that moved."""
        written = CounterMetricFamily(
            "isthmus_moved_producer_batches",
            "Batches of producers that were numbered by another cluster, written under their translated ids",
            labels=("from_cluster_id",),
        )
        for cluster_id, count in self._written.items():
            written.add_metric((cluster_id,), count)
        doubtful = CounterMetricFamily(
            "isthmus_moved_producer_requests_refused",
            "Produce requests of producers that moved here, and nobody can say from which cluster",
        )
        doubtful.add_metric((), self._doubtful)
        return (written, doubtful)

    def control_changed(self, state: ControlState) -> None:
        ranges = dict(state.producer_id_ranges) if len(state.producer_id_ranges) > 1 else {}
        changed = ranges != self._ranges and (not ranges or self._own in ranges)
        if changed:
            self._ranges = ranges
            self._numbered_by = NumberedBy(self._own, ranges.keys())
        if state.histories is not self._histories:
            self._histories, before = state.histories, self._has_followed
            self._has_followed = any(
                each.source_cluster_id != self._own
                for history in state.histories.values()
                for found in history.partitions.values()
                for each in found
            )
            changed = changed or self._has_followed != before
        if changed:
            self._leave.until = float("-inf")
            self._leave = Leave(float("inf"))

    def on_init(self, request: Request) -> Verdict:
        """Give a new idempotent producer an id and an epoch by which it is known as this cluster's."""
        if peeks.transactional_id(request.api_key, request.version, request.frame) is not None:
            return None
        return Replace(request.frame, partial(self._numbered_here, request.version))

    def _numbered_here(self, version: int, frame: bytes) -> bytes:
        code, (start, end) = peeks.producer_number(version, frame)
        if code:
            return frame
        producer_id, _ = _NUMBER.unpack_from(frame, start)
        return b"".join((frame[:start], _NUMBER.pack(marked(producer_id, self._own), self._first_epoch), frame[end:]))

    def on_produce(self, request: Request) -> Verdict:
        """Write what producers of other clusters send under the ids that these have here."""
        if not self._ranges:
            request.leave = self._leave
            return None
        try:
            acks, topics = peeks.produce_records(request.version, request.frame)
        except NeedMore:
            return NEED_MORE
        verdict = self._written_as(request, topics)
        if verdict is None and len(topics) == 1 and acks and not (self._has_followed and _transacts(request, topics)):
            request.leave = self._leave
        return verdict

    def _written_as(self, request: Request, topics: Topics) -> Verdict:
        """The request with batches as their producers of here write them."""
        frame: bytearray | None = None
        moved = Counter[str]()
        try:
            for topic, partitions in topics:
                for partition, start, end in partitions:
                    batch = memoryview(request.frame)[start:end]
                    header = _numbered(batch)
                    if header is None:
                        continue
                    if header.is_transactional:
                        if not self._is_in_sequence(request, topic, partition, header):
                            return Hold(self._found_out(request, topics))
                        continue
                    cluster_id = self._origin(request, topic, partition, header)
                    if cluster_id is None:
                        return Hold(self._found_out(request, topics))
                    if cluster_id != self._own:
                        frame = frame or bytearray(request.frame)
                        frame[start : start + HEADER_SIZE] = self._moved(batch, header, cluster_id)
                        moved[cluster_id] += 1
        except BatchError:
            return None  # the broker refuses it
        except (Doubtful, ProducerIdOverflow) as error:
            return self._refused(request, str(error))
        if frame is None:
            return None
        on_loop(self._written.update, moved)
        return Replace(bytes(frame))

    def _origin(self, request: Request, topic: bytes, partition: int, header: BatchHeader) -> str | None:
        """The cluster that a producer is of; None: that has to be found out."""
        clusters = self._numbered_by(header.producer_id, header.producer_epoch)
        if len(clusters) == 1:
            return next(iter(clusters))
        known = self._origins.known(request.client.session_id, header)
        if known is None:
            name = self._topic_name(request, topic)
            if name is not None and not self._origins.may_have_moved((name, partition)):
                return self._own
        return known

    def _is_in_sequence(self, request: Request, topic: bytes, partition: int, header: BatchHeader) -> bool:
        if not self._has_followed:
            return True
        name, session_id = self._topic_name(request, topic), request.client.session_id
        return name is not None and self._origins.is_in_sequence(session_id, header.producer_id, (name, partition))

    def _topic_name(self, request: Request, topic: bytes) -> str | None:
        by_id = peeks.topics_are_ids(ApiKey.PRODUCE, request.version)
        return self._context.known_topic_name(topic) if by_id else peeks.topic_text(topic)

    async def _found_out(self, request: Request, topics: Topics) -> Verdict:
        """What becomes of a request when it is known of which cluster its producers are."""
        batches: dict[tuple[int, int], list[ProducedBatch]] = {}
        looked_at = 0
        try:
            for topic, partitions in topics:
                name = self._topic_name(request, topic) or (await self._context.topic_names((topic,))).get(topic)
                if name is None:
                    return None  # the broker knows no such topic, either
                for partition, start, end in partitions:
                    looked_at += 1
                    if looked_at % PARTITIONS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                    data = memoryview(request.frame)[start:end]
                    header = _numbered(data)
                    if header is None:
                        continue
                    if header.is_transactional:
                        if not self._is_in_sequence(request, topic, partition, header):
                            sent_here = ProducedBatch((name, partition), header, data)
                            await self._origins.check_sequence(request.client.session_id, sent_here)
                    elif self._origin(request, topic, partition, header) is None:
                        sent = batches.setdefault((header.producer_id, header.producer_epoch), [])
                        sent.append(ProducedBatch((name, partition), header, data))
            for number, sent in batches.items():
                await self._origins.find(request.client.session_id, sent, self._numbered_by(*number))
        except BatchError:
            return None  # the broker refuses it
        except (Doubtful, ProducerIdOverflow) as error:
            return await as_asked(request, self._refused, request, str(error))
        except OutOfSequence as error:
            # Which it is for a broker, too, where the sequence is none of its last batches': clients raise the epoch.
            return await as_asked(request, self._refused, request, str(error), OUT_OF_ORDER_SEQUENCE_NUMBER)
        except (BrokerUnavailable, KafkaRefused, OperationError) as error:
            return Close(f"it cannot be found out where a producer comes from: {error}")
        return await as_asked(request, self._written_as, request, topics)

    def _moved(self, batch: memoryview, header: BatchHeader, cluster_id: str) -> bytes:
        """A batch's header under the id that its producer has here. Raises BatchError, ProducerIdOverflow."""
        return restamped_header(
            batch,
            base_offset=header.base_offset,
            producer_id=carry(header.producer_id, self._ranges[cluster_id], self._ranges[self._own]),
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
        )

    def _refused(self, request: Request, reason: str, code: int = INVALID_PRODUCER_ID_MAPPING) -> Verdict:
        """Have the client begin anew: under a number of this cluster its next batches are nobody else's.

        It is not told the reason, which names clusters and what logs hold: the broker has not said whether it may know.
        """
        on_loop(self._count_refused, request.client.address.rpartition(":")[0], reason)
        head, payload = decode_request(request.frame)
        refusal = Refusal(code, "it is in doubt where this producer comes from: begin with a new producer")
        return verdict_of(request, head, refuse_all(head, payload, refusal), CAUSE)

    def _count_refused(self, host: str, reason: str) -> None:
        self._doubtful += 1
        self._refusals.one(host, reason)


def _say_refused(count: int, reason: str) -> None:
    log.info("producer has to begin anew", extra={"reason": reason, "times": count})


def _numbered(batch: memoryview) -> BatchHeader | None:
    """The header of an idempotent or transactional producer's batch. Raises BatchError."""
    header = read_header(batch)
    return header if header.producer_id >= 0 and not is_replicated(header.producer_id) else None


def _transacts(request: Request, topics: Topics) -> bool:
    """Whether a request has batches of a transaction."""
    frame = memoryview(request.frame)
    batches = (frame[start:end] for _, partitions in topics for _, start, end in partitions)
    try:
        return any(header is not None and header.is_transactional for header in map(_numbered, batches))
    except BatchError:
        return False  # the broker refuses it
