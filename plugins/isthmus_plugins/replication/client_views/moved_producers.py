"""Has producers that move here from another cluster go on as the producers that they were there.

A client whose bootstrap name leads to another cluster after a failover goes on without a restart, with the producer id
that the former cluster gave it. Its batches stand in this cluster's logs under a translated id (``producer_ids``), and
its number may be another producer's here. So the batches of an idempotent producer that moved are written under its
translated id: a repeated one is answered as a duplicate, with its offset, and the next one goes on behind it. Back at
home it is its own again.

Where a producer comes from is told by its epoch (``producer_epochs``), of which this part hands out the first.
Transactional producers are their coordinator's: that of this cluster does not know one that moved, and tells it so.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric

from isthmus_control.control_state import ControlState
from isthmus_plugins.api import NEED_MORE, Leave, Replace, Request, RequestHook, Verdict
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import INVALID_PRODUCER_ID_MAPPING
from isthmus_protocol.messages import decode_request
from isthmus_protocol.producer_epochs import Doubtful, NumberedBy, first_epoch
from isthmus_protocol.producer_ids import ProducerIdOverflow, carry, is_replicated
from isthmus_protocol.records import BatchError, read_header, restamped_header
from isthmus_protocol.refusals import Refusal, refuse_all
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import NeedMore

log = logging.getLogger("isthmus_plugins.replication")

CAUSE: Final = "producer_of_another_cluster"
_EPOCH: Final = struct.Struct(">h")


class MovedProducers(Part):
    """Hooks that cost nothing while the cluster has no link, and little for a connection's own producer."""

    def __init__(self, cluster_id: str) -> None:
        self._own = cluster_id
        self._first_epoch = _EPOCH.pack(first_epoch(cluster_id))
        self._ranges: dict[str, int] = {}
        """The registered indexes of this cluster and those that it knows; empty: it knows none."""
        self._numbered_by = NumberedBy(self._own, ())
        self._leave = Leave(float("inf"))
        """For a connection whose producer is this cluster's own, or has no number: it has one producer."""
        self._written: Counter[str] = Counter()
        """Batches of producers that moved, by the cluster that they came from."""
        self._doubtful = 0

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.INIT_PRODUCER_ID, self.on_init, whole=True),
            RequestHook(ApiKey.PRODUCE, self.on_produce),
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
        if ranges == self._ranges or (ranges and self._own not in ranges):
            return
        self._ranges = ranges
        self._numbered_by = NumberedBy(self._own, ranges.keys())
        self._leave.until = float("-inf")
        self._leave = Leave(float("inf"))
        for cluster_id in sorted(self._numbered_by.alike):
            log.warning("producers that move here are not told from own ones", extra={"from": cluster_id})

    def on_init(self, request: Request) -> Verdict:
        """Give a new idempotent producer an epoch by which it is known as this cluster's."""
        if peeks.transactional_id(request.api_key, request.version, request.frame) is not None:
            return None
        return Replace(request.frame, partial(self._numbered, request.version))

    def _numbered(self, version: int, frame: bytes) -> bytes:
        code, (start, end) = peeks.producer_epoch(version, frame)
        if code:
            return frame
        return b"".join((frame[:start], self._first_epoch, frame[end:]))

    def on_produce(self, request: Request) -> Verdict:
        """Write what producers of other clusters send under the ids that these have here."""
        if not self._ranges:
            request.leave = self._leave
            return None
        try:
            acks, topics = peeks.produce_records(request.version, request.frame)
        except NeedMore:
            return NEED_MORE
        frame = None
        for start, end in (place for places in topics for place in places):
            try:
                header = self._moved(request.frame, start, end)
            except (Doubtful, ProducerIdOverflow) as error:
                return self._refused(request, str(error))
            if header is not None:
                frame = frame or bytearray(request.frame)
                frame[start : start + len(header)] = header
        if frame is not None:
            return Replace(bytes(frame))
        if len(topics) == 1 and acks:
            request.leave = self._leave
        return None

    def _moved(self, frame: bytes, start: int, end: int) -> bytes | None:
        """The header of a partition's batch under the id that its producer has here; None: leave it as it is.

        Raises Doubtful, ProducerIdOverflow.
        """
        batch = memoryview(frame)[start:end]
        try:
            header = read_header(batch)
            if header.is_transactional or header.producer_id < 0 or is_replicated(header.producer_id):
                return None
            cluster_id = self._numbered_by(header.producer_epoch)
            if cluster_id is None:
                return None
            moved = restamped_header(
                batch,
                base_offset=header.base_offset,
                producer_id=carry(header.producer_id, self._ranges[cluster_id], self._ranges[self._own]),
                producer_epoch=header.producer_epoch,
                base_sequence=header.base_sequence,
            )
        except BatchError:
            return None  # the broker refuses it
        self._written[cluster_id] += 1
        return moved

    def _refused(self, request: Request, reason: str) -> Verdict:
        """Have the client begin anew: under a number of this cluster its next batches are nobody else's."""
        if not request.whole:
            return NEED_MORE
        self._doubtful += 1
        head, payload = decode_request(request.frame)
        refusal = Refusal(INVALID_PRODUCER_ID_MAPPING, f"{reason}: begin with a new producer")
        return verdict_of(request, head, refuse_all(head, payload, refusal), CAUSE)
