"""Appends what streams have: connections to a broker, the requests over them, and what the broker's answers mean.

A writer sends one request at a time, with the next batch of every stream that has one; or a few in a row, where a
stream has small batches that no fate of those before them can shift (``FollowerLog.take_more``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    KafkaRefused,
    ProduceConnection,
    ProduceResult,
    TopicPartition,
    TransactionMarkers,
)
from isthmus_plugins.decompression import decompressed
from isthmus_plugins.observers import LinkAppended
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.follower.log import Append, LogState, Mark, Operation, StopReason
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.connection import written_together
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.error_codes import (
    DUPLICATE_SEQUENCE_NUMBER,
    INVALID_PRODUCER_ID_MAPPING,
    INVALID_RECORD,
    INVALID_TXN_STATE,
    KAFKA_STORAGE_ERROR,
    LEADER_NOT_AVAILABLE,
    MESSAGE_TOO_LARGE,
    NETWORK_EXCEPTION,
    NOT_ENOUGH_REPLICAS,
    NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    NOT_LEADER_OR_FOLLOWER,
    OUT_OF_ORDER_SEQUENCE_NUMBER,
    RECORD_LIST_TOO_LARGE,
    REQUEST_TIMED_OUT,
    THROTTLING_QUOTA_EXCEEDED,
    TRANSACTION_COORDINATOR_FENCED,
    UNKNOWN_PRODUCER_ID,
    UNKNOWN_SERVER_ERROR,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.record_codec import decode_in_steps

log = logging.getLogger("isthmus_plugins.replication")

WRITERS_PER_BROKER: Final = 4
"""A broker reads a connection's next request only when it has answered the last."""
PATIENCE_S: Final = 0.02
"""A request that takes longer is passed by: some in-sync replica may be slow."""
REQUEST_BYTES_MAX: Final = 8 * 1024 * 1024
LARGE_BYTES: Final = 1024 * 1024
"""A larger batch goes in a request of its own: those of other partitions would be answered when it is."""
LARGE_AT_ONCE: Final = WRITERS_PER_BROKER - 1
"""One connection is left for the others."""
PRODUCE_TIMEOUT_MS: Final = 30_000
REFUSALS_MAX: Final = 5
"""A broker that answers a batch so often with an error that may pass, with nothing stored, does not want it."""

UNVERIFIED_MAX: Final = 3
"""How often a transactional batch is refused before the target is asked whether it verifies transactions (KIP-890): the
error that says so may pass, too."""
TRANSACTIONAL_ID_PREFIX: Final = "isthmus-"
"""Brokers want a transactional id with transactional batches, and ask for WRITE on it; they do nothing else with it."""

_UNVERIFIED: Final = frozenset({NOT_ENOUGH_REPLICAS, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING})
"""What the verification of KIP-890 answers."""
_NOT_STORED: Final = frozenset({NOT_ENOUGH_REPLICAS, LEADER_NOT_AVAILABLE, THROTTLING_QUOTA_EXCEEDED})
"""Refused before the append."""
_MOVED: Final = frozenset({UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_ID})
"""The leader end looks for the leader again."""
_FATE_UNKNOWN: Final = frozenset(
    {
        REQUEST_TIMED_OUT,
        NETWORK_EXCEPTION,
        NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KAFKA_STORAGE_ERROR,
        UNKNOWN_SERVER_ERROR,
    }
)
_TOO_LARGE: Final = frozenset({MESSAGE_TOO_LARGE, RECORD_LIST_TOO_LARGE})
"""Larger than the topic's ``max.message.bytes``, or its ``segment.bytes``: the source has lowered that since."""
_DOUBTFUL: Final = frozenset({OUT_OF_ORDER_SEQUENCE_NUMBER, DUPLICATE_SEQUENCE_NUMBER, UNKNOWN_PRODUCER_ID})
"""Sequence trouble: passes if a request of ours landed that we took for lost, else it is an objection."""


Writes: TypeAlias = dict[TopicPartition, tuple[FollowerStream, list[Append] | Mark]]
"""What is written to each partition."""


class WriterEnd(Protocol):
    """What writers need of the follower end that has them."""

    batches_appended: int
    bytes_appended: int

    @property
    def recent(self) -> int | None: ...

    def proceed(self, stream: FollowerStream) -> None: ...

    def report_appended(self, stream: FollowerStream) -> None: ...


class Writers:
    """The connections to one broker over which batches are appended.

    One takes all that there is to write, in one request after the other, which costs the broker least. Another one goes
    past a request that takes long.
    """

    def __init__(self, end: WriterEnd, context: PluginContext, broker_id: int) -> None:
        self._clock = context.clock
        self.ready: dict[FollowerStream, None] = {}
        """Streams that may have a batch to send, in the order in which they asked."""
        self._writers = [Writer(self, end, context, broker_id, number) for number in range(WRITERS_PER_BROKER)]
        self._later: asyncio.TimerHandle | None = None

    async def stop(self) -> None:
        if self._later is not None:
            self._later.cancel()
        for writer in self._writers:
            await writer.stop()

    def wake(self, stream: FollowerStream) -> None:
        """The stream has a batch to send."""
        self.ready[stream] = None
        self.share()

    @property
    def busy(self) -> bool:
        """Whether some request is under way."""
        return any(writer.busy for writer in self._writers)

    @property
    def large(self) -> int:
        """How many requests with a large batch are under way."""
        return sum(writer.large for writer in self._writers)

    def share(self) -> None:
        """Have a writer take what is ready: at once if none is busy, else when their latest request has taken long."""
        free, began = None, float("-inf")
        for writer in self._writers:
            if writer.busy:
                began = max(began, writer.began)
            elif free is None:
                free = writer
        if free is None:
            return
        wait = began + PATIENCE_S - self._clock.monotonic()
        if wait <= 0:
            free.work.set()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait, self._share_later)

    def _share_later(self) -> None:
        self._later = None
        if self.ready:
            self.share()

    async def connect(self) -> None:
        """Have a connection open, over which what is read from now on can be gone on. Raises BrokerUnavailable."""
        await self._writers[0].connect()

    @property
    def alive_since(self) -> float:
        """Since when the broker has not been restarted: its oldest connection has been open since then."""
        return min(writer.open_since for writer in self._writers)

    async def leave(self, stream: FollowerStream) -> None:
        """Return when no request of the stream is under way, nor will be."""
        self.ready.pop(stream, None)
        for writer in self._writers:
            await writer.leave(stream)


class Writer:
    """One connection to a broker: it sends one request at a time, or a few in a row."""

    def __init__(self, writers: Writers, end: WriterEnd, context: PluginContext, broker_id: int, number: int) -> None:
        self._writers = writers
        self._end = end
        self._context = context
        self._clock = context.clock
        self._broker_id = broker_id
        self._lane = f"append-{number}"
        self._tasks = Tasks(f"writer-{broker_id}-{number}", context.supervision)
        self._under_way: list[FollowerStream] = []
        self.began = 0.0
        """When its latest request began."""
        self.large = False
        """Whether that has a large batch, and is under way."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.work = asyncio.Event()
        self._connection: ProduceConnection | None = None
        self._tasks.keep("append", self._run)

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    async def stop(self) -> None:
        await self._tasks.close()
        if self._connection is not None:
            self._connection.close()

    async def leave(self, stream: FollowerStream) -> None:
        """Return when no request of the stream is under way here."""
        while stream in self._under_way:
            self._idle.clear()
            await self._idle.wait()

    @property
    def open_since(self) -> float:
        """When its connection was opened; inf: it has none."""
        connection = self._connection
        return connection.opened_at if connection is not None and connection.is_open else float("inf")

    async def connect(self) -> ProduceConnection:
        """Its connection, opened if need be. Raises BrokerUnavailable."""
        self._connection = await self._context.cluster.produce_connection(self._broker_id, self._lane)
        return self._connection

    async def _run(self) -> None:
        while True:
            await self.work.wait()
            self.work.clear()
            writes: Writes = {}
            try:
                while self._collect(writes):
                    self._under_way = [stream for stream, _ in writes.values()]
                    self.began = self._clock.monotonic()
                    if self._writers.ready:  # of another transaction, or beyond a request's size
                        self._writers.share()
                    await self._write(writes)
                    writes = {}
                    if self._writers.busy:  # another one went past, and may take what is left together with its own
                        break
            except Exception as error:
                # A bug of ours must not leave streams waiting for ever, nor others that share this writer.
                self._tasks.failed("append", error)
                self._under_way = list(dict.fromkeys([*self._under_way, *(stream for stream, _ in writes.values())]))
                for stream in self._under_way:
                    stream.follower_log.unknown()
                self._drained()
                self.work.set()
                await asyncio.sleep(0)

    def _collect(self, writes: Writes) -> bool:
        """Add the next operation of every stream that has one, or a burst of them, up to a request's size; whether
        there is any."""
        transaction_of: int | None = None
        recent = self._end.recent
        size = 0
        for stream in list(self._writers.ready):
            if size >= REQUEST_BYTES_MAX:
                break
            large = stream.follower_log.next_bytes > LARGE_BYTES
            if large and (writes or self._writers.large >= LARGE_AT_ONCE):
                continue
            producer_id = stream.follower_log.transaction_of
            if producer_id is not None and transaction_of not in (None, producer_id):
                continue  # a request holds transactional batches of one producer
            del self._writers.ready[stream]
            try:
                operation = stream.follower_log.take()
            except Exception as error:  # a bug of ours must not end this writer, which other streams share
                log.exception("batch not prepared", extra={"topic": stream.topic, "partition": stream.partition})
                stream.follower_log.stop(StopReason(ReasonCode.INTERNAL_ERROR, repr(error)))
                self._end.proceed(stream)
                continue
            if operation is None:
                self._end.proceed(stream)
            elif isinstance(operation, Mark):
                writes[stream.place] = (stream, operation)
            else:
                appends = [operation, *(() if recent is None else stream.follower_log.take_more(recent))]
                writes[stream.place] = (stream, appends)
                size += sum(len(append.data) for append in appends)
                if operation.transactional:
                    transaction_of = producer_id
            if large and writes:
                self.large = True
                break
        return bool(writes)

    async def _write(self, writes: Writes) -> None:
        try:
            check_lease(self._context)
            connection = await self.connect()
        except BrokerUnavailable as error:
            for stream in self._under_way:
                stream.trouble = StopReason(reasons.BROKER_UNAVAILABLE, str(error))
                stream.follower_log.not_written()
                stream.follower_log.unknown()
            self._drained()
            return
        self._read_again_before(connection.opened_at, writes)
        try:
            results = await self._request(connection, writes) if writes else {}
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("append unanswered", extra={"broker": self._broker_id, "detail": str(error)})
            connection.close()
            for stream in self._under_way:
                stream.trouble = StopReason(reasons.BROKER_UNAVAILABLE, str(error))
                stream.follower_log.unknown()
        else:
            with written_together({stream.connection for stream, _ in writes.values()}):
                for place, (stream, written) in writes.items():
                    self._result(stream, written, results.get(place, []))
        self._drained()

    @staticmethod
    def _read_again_before(opened_at: float, writes: Writes) -> None:
        """Leave out the streams whose log's end was read before the connection was opened: the broker may have been
        restarted in between, and a power loss takes the ends of logs."""
        for place, (stream, _) in list(writes.items()):
            if stream.read_at < opened_at:
                del writes[place]
                stream.follower_log.not_written()
                stream.follower_log.doubt_end()

    async def _request(
        self, connection: ProduceConnection, writes: Writes
    ) -> dict[TopicPartition, list[ProduceResult]]:
        """Write batches and markers. Raises BrokerUnavailable: the fate of all is unknown.

        What a partition has under way ends with the last Produce request, which is the one with acks=all.
        """
        longest = max((len(written) for _, written in writes.values() if isinstance(written, list)), default=0)
        requests: list[dict[TopicPartition, bytes]] = [{} for _ in range(longest)]
        markers: list[TransactionMarkers] = []
        transactional_id: str | None = None
        for place, (stream, written) in writes.items():
            if isinstance(written, Mark):
                markers.append(
                    TransactionMarkers(
                        *place,
                        written.producer_id,
                        written.producer_epoch,
                        written.committed,
                        written.coordinator_epoch,
                        written.next_offset - written.first_offset,
                    )
                )
                continue
            for request, append in zip(requests[-len(written) :], written, strict=True):
                request[place] = append.data
            if written[0].transactional:
                transactional_id = TRANSACTIONAL_ID_PREFIX + stream.link_name
        results: dict[TopicPartition, list[ProduceResult]] = {}
        if requests:
            for answer in await connection.produce(requests, PRODUCE_TIMEOUT_MS, transactional_id):
                for place, result in answer.items():
                    results.setdefault(place, []).append(result)
        if markers:
            answer = await connection.write_markers(markers, PRODUCE_TIMEOUT_MS)
            results |= {place: [result] for place, result in answer.items()}
        return results

    def _drained(self) -> None:
        streams, self._under_way = self._under_way, []
        self.large = False
        self._idle.set()
        for stream in streams:
            self._end.proceed(stream)

    def _result(self, stream: FollowerStream, written: list[Append] | Mark, results: Sequence[ProduceResult]) -> None:
        follower_log = stream.follower_log
        operations: Sequence[Operation] = written if isinstance(written, list) else [written]
        refused = next((result for result in results if result.error_code), None)
        if len(results) != len(operations):
            follower_log.unknown()
        elif refused is None:
            if isinstance(written, list):
                follower_log.appended(*(result.base_offset for result in results))
                size = sum(len(append.data) for append in written)
                self._end.bytes_appended += size
                stream.count(len(written), size)
            else:
                follower_log.marked()
            if follower_log.state is not LogState.DIVERGED:
                stream.read_at = max(stream.read_at, self.began)
                stream.held = stream.trouble = None
                stream.refusals = 0
                self._end.batches_appended += len(operations)
                self._end.report_appended(stream)
                if self._context.link_observers:
                    self._observe(stream, operations)
        elif len(operations) == 1:
            self._refused(stream, operations[0], refused)
        else:  # what is wrong shows when the first that was refused is sent alone
            stream.trouble = self._objection(stream, refused)
            follower_log.partly_appended([None if each.error_code else each.base_offset for each in results])

    def _observe(self, stream: FollowerStream, operations: Sequence[Operation]) -> None:
        state = self._context.control.state
        link_ = state.links.get(stream.link_name)
        size = sum(len(each.data) for each in operations if isinstance(each, Append))
        self._context.link_observers.appended(
            LinkAppended(
                stream.link_name,
                "" if link_ is None else link_.remote_cluster_id,
                stream.topic,
                stream.partition,
                operations[0].first_offset,
                stream.follower_log.end,
                len(operations),
                size,
                self._clock.monotonic() - self.began,
            )
        )

    @staticmethod
    def _objection(stream: FollowerStream, result: ProduceResult) -> StopReason:
        return StopReason(
            ReasonCode.TARGET_REFUSES_RECORDS,
            f"the target refused the batch at offset {stream.follower_log.end}: "
            f"{result.error_name} {result.message}".rstrip(),
        )

    def _refused(self, stream: FollowerStream, operation: Operation, result: ProduceResult) -> None:
        """The broker answered an error."""
        follower_log, code = stream.follower_log, result.error_code
        transactional = isinstance(operation, Append) and operation.transactional
        objection = self._objection(stream, result)
        if code in _MOVED:
            follower_log.not_written()
            follower_log.stop(StopReason(reasons.MOVED, f"the broker answered {result.error_name}"))
        elif code in _UNVERIFIED and transactional:
            stream.trouble = objection
            stream.refusals += 1
            if stream.refusals > UNVERIFIED_MAX:
                stream.unverified = code
            follower_log.not_written()
            follower_log.unknown()
        elif code in _NOT_STORED:
            stream.trouble = objection
            if isinstance(operation, Append):  # of markers, some may have been written
                follower_log.not_written()
            follower_log.unknown()
        elif code in _FATE_UNKNOWN:
            stream.trouble = objection
            follower_log.unknown()
        elif code in _TOO_LARGE and isinstance(operation, Append) and operation.divisible:
            follower_log.too_large()
        elif stream.refusals >= REFUSALS_MAX:
            follower_log.not_written()
            follower_log.stop(objection)
        elif code in _TOO_LARGE and isinstance(operation, Append):
            stream.trouble = objection
            stream.refusals += 1
            follower_log.refused_large(len(operation.data))
        elif code == INVALID_RECORD and isinstance(operation, Append) and _is_keyless(operation) and not stream.is_copy:
            stream.trouble = objection
            stream.refusals += 1
            follower_log.refused_keyless()
        elif code == OUT_OF_ORDER_SEQUENCE_NUMBER and not follower_log.renumbering:
            stream.refusals += 1
            follower_log.out_of_sequence()
        elif code == TRANSACTION_COORDINATOR_FENCED and isinstance(operation, Mark):
            stream.refusals += 1
            follower_log.fenced()
        elif code in _DOUBTFUL:
            stream.trouble = objection
            stream.refusals += 1
            follower_log.unknown()
        else:
            follower_log.not_written()
            follower_log.stop(objection)


def _is_keyless(operation: Append) -> bool:
    """Whether some record of a batch has no key."""
    parts = decode_in_steps(operation.data, decompressed(operation.data))
    return any(record.key is None for records in parts for record in records)
