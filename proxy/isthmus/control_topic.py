"""The topic that the control log of a cluster is: found, made and checked, read and appended to.

From its records nothing is ever removed but what stands far below the newest snapshot, by the proxies. Whoever reads it
says which leader epoch wrote the record that was read last: a leader whose log is another one from there on answers
that, and no records (KIP-595). So nothing is read behind an end that was cut and written over.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from isthmus.errors import ConfigurationError, KafkaError, PeerFault, RequestTimedOut
from isthmus.kafka.client import (
    EARLIEST,
    LATEST,
    LOG_END,
    Backoff,
    ClusterClient,
    NewTopic,
    ResourceConfigs,
    ResourceType,
    TopicPartition,
)
from isthmus_control import anchors
from isthmus_control import replica as replicas
from isthmus_control.anchors import Anchor, LogFacts, LogRecord, RecentRecords
from isthmus_control.apply import SNAPSHOT_INTERVAL
from isthmus_control.commands import Body, Command, Snapshot, encode
from isthmus_control.control_state import ControlState
from isthmus_control.model import CONTROL_TOPIC, INTERNAL_PREFIX
from isthmus_control.outcome import Accepted
from isthmus_control.prefixes import prefix_of, why_forked
from isthmus_control.replica import Halted, Replica
from isthmus_control.signing import Signer
from isthmus_plugins.clock import monotonic
from isthmus_protocol.error_codes import (
    INVALID_REPLICATION_FACTOR,
    OFFSET_OUT_OF_RANGE,
    REQUEST_TIMED_OUT,
    TOPIC_ALREADY_EXISTS,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import PLAIN_HEADER, BatchError, Compression, verify_crc, walk

log = logging.getLogger("isthmus.control_log")

T = TypeVar("T")

TOPIC: Final = CONTROL_TOPIC
PARTITION: Final = TopicPartition(TOPIC, 0)
REPLICATION_FACTOR: Final = 3
IN_SYNC_MIN: Final = "min.insync.replicas"
RECORD_BYTES_MAX: Final = 16 * 1024 * 1024
"""A snapshot of some ten thousand partitions has less than one of them."""
FETCH_BYTES_MAX: Final = 4 * 1024 * 1024
FETCH_WAIT_MS: Final = 1_000
"""A long poll: a record is answered at once, and a quiet log costs a request in this time."""
FETCH_TIMEOUT_S: Final = 5.0
PRODUCE_TIMEOUT_S: Final = 4.0
REFRESH_TIMEOUT_S: Final = 3.0
"""A broker that hangs must not cost this proxy its lease: give it up while there is time to ask another one."""
READ_TIMEOUT_S: Final = 60.0
"""For the records in front of an offset, which may have to be below the high watermark of a new leader first."""
TAIL_LANE: Final = "control-tail"
APPEND_LANE: Final = "control-append"
CREATE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The log up to its end when it was read. ``forked``: why it is not the one that some of its writers had applied,
    if no operator has accepted that since."""

    replica: Replica
    recent: RecentRecords
    start: int
    end: int
    forked: Halted | None = None


def command_of(body: Body, by: str, state: ControlState, recent: RecentRecords) -> Command:
    """A new command, of one who has applied the log up to ``state``."""
    now_ms = int(time.time() * 1000)
    return Command(str(uuid.uuid4()), now_ms, by, state.applied_offset, body, prefix_of(state, recent))


class ControlTopic:
    """The topic in one cluster. What its methods ask of brokers raises PeerFault."""

    def __init__(self, client: ClusterClient, signer: Signer | None = None) -> None:
        """``client`` is the caller's and stays open. ``signer``: has the control key, if there is one."""
        self._client = client
        self.signer = signer
        self._topic_id: uuid.UUID | None = None

    @property
    def topic_id(self) -> uuid.UUID:
        """Known once the topic is found or made."""
        if self._topic_id is None:
            raise RuntimeError("the control topic is not looked for")
        return self._topic_id

    # --- The topic itself

    async def find(self) -> bool:
        """Look for it. Raises ConfigurationError where it is not fit for a control log."""
        if TOPIC not in await self._client.refresh([TOPIC]):
            return False
        info = await self._client.topic(TOPIC)
        self._topic_id = info.topic_id
        await self._check(len(info.partitions))
        return True

    async def make(self) -> None:
        """Make it, and find it. Raises ConfigurationError, KafkaError."""
        deadline = monotonic() + CREATE_TIMEOUT_S
        backoff = Backoff()
        while not await self.find():  # of several brokers one hears of it before another
            error = await self._create()
            if error is not None and error.code not in (TOPIC_ALREADY_EXISTS, REQUEST_TIMED_OUT):
                # Fewer brokers answer than metadata said a moment ago: they are starting, or stopping.
                if not (error.retriable or error.code == INVALID_REPLICATION_FACTOR) or monotonic() > deadline:
                    raise error
            elif monotonic() > deadline:
                raise KafkaError(UNKNOWN_TOPIC_OR_PARTITION, f"{TOPIC} was created and does not appear")
            await asyncio.sleep(backoff.next_s())

    async def siblings(self) -> list[str]:
        """The proxies' other topics in this cluster, which the log had made."""
        return sorted(
            name for name in await self._client.refresh() if name.startswith(INTERNAL_PREFIX) and name != TOPIC
        )

    async def _create(self) -> KafkaError | None:
        """Create it with as many replicas as it is to have, or as there are brokers: it gets the others later."""
        error = await self._create_replicated(REPLICATION_FACTOR)
        alive = len(self._client.brokers)
        if error is None or error.code != INVALID_REPLICATION_FACTOR or alive >= REPLICATION_FACTOR:
            return error
        log.warning("control topic has few replicas", extra={"topic": TOPIC, "replication_factor": alive})
        return await self._create_replicated(alive)

    async def _create_replicated(self, factor: int) -> KafkaError | None:
        configs = settings(factor) | {"message.timestamp.type": "LogAppendTime"}
        try:
            created = await self._client.create_topics([NewTopic(TOPIC, 1, factor, configs)])
        except KafkaError as error:
            return error
        except PeerFault:
            return KafkaError(REQUEST_TIMED_OUT)  # it may exist now: look
        result = created[TOPIC]
        if result.error is None:
            log.info("control topic created", extra={"topic": TOPIC, "replication_factor": factor})
        return result.error

    async def _check(self, partitions: int) -> None:
        """Refuse a topic of this name on which the log would not be safe, whoever made it."""
        if partitions != 1:
            raise ConfigurationError(
                f"topic {TOPIC}",
                f"it has {partitions} partitions, and commands would have no order",
                "Delete the topic if no proxy of this cluster uses it",
            )
        info = await self._client.leader(TOPIC, 0)
        wanted = settings(len(info.replicas))

        async def described() -> ResourceConfigs:
            found = (await self._client.describe_configs(ResourceType.TOPIC, [TOPIC], list(wanted)))[TOPIC]
            if found.error is not None:
                raise found.error
            return found

        # Any broker may be asked, and one of several has not heard of a topic that was made a moment ago.
        answer = await self._client.retrying(described)
        for name, value in wanted.items():
            actual = answer.entries[name].value or ""
            fits = int(actual) >= int(value) if name in _AT_LEAST else actual == value
            if name == IN_SYNC_MIN and not fits and len(info.isr) >= int(value):
                # It was made while a broker was away, and got its replicas since; whoever gave it those was killed.
                await self._client.incremental_alter_configs(ResourceType.TOPIC, TOPIC, {name: value})
                log.info("control topic configured", extra={"topic": TOPIC, "settings": f"{name}={value}"})
            elif not fits:
                raise ConfigurationError(
                    f"{name} of topic {TOPIC}",
                    f"it is {actual}, and the log would not be safe",
                    f"Set it to {value}: kafka-configs --alter --topic {TOPIC} --add-config {name}={value}",
                )

    # --- Reading

    async def load(self) -> Loaded:
        """Read it up to its end as it is now: from the newest snapshot on that counts, or from its beginning.

        Raises :class:`Halted`.
        """
        cluster_id = self._client.cluster_id
        if cluster_id is None:
            raise ConfigurationError("cluster", "its brokers tell no cluster id", "Kafka 2.8 and later do")
        start, end = await self._listed(EARLIEST), await self._listed(LATEST)
        newer = False
        async for offset, snapshot in self._snapshots(start, end):
            try:
                state = replicas.load(snapshot, cluster_id, self.signer)
            except Halted as halted:
                if halted.reason != replicas.NEWER_VERSION:
                    raise
                newer = True  # from one before, this version comes to what it may know
                continue
            loaded = await self._read_on(Replica(state, self.signer), start, end, offset)
            if loaded is not None:
                return loaded
        if start > 0 and newer:
            why = f"{TOPIC} begins at offset {start}, and its snapshots are of newer versions: upgrade this proxy"
            raise Halted(replicas.NEWER_VERSION, why)
        if start > 0:
            raise Halted(replicas.RECORDS_MISSING, f"{TOPIC} begins at offset {start}, without a snapshot")
        loaded = await self._read_on(Replica(ControlState(cluster_id), self.signer), start, end)
        assert loaded is not None
        return loaded

    async def _read_on(self, replica: Replica, start: int, end: int, snapshot_at: int = -1) -> Loaded | None:
        """The log up to ``end``, from what a replica has; None: the snapshot in the record at ``snapshot_at``, which
        that comes from, does not count at its place."""
        recent, forked = RecentRecords(), None
        # The windows of what commands from there on had seen, and of those that are on their way.
        windows = anchors.window_start(max(replica.state.applied_offset, 0)), anchors.kept_from(max(end - 1, 0))
        async for record in self.read(max(start, min(windows)), end):
            recent.add(record)
            if record.offset < replica.next_offset:
                continue
            generation = replica.state.generation
            applied = replica.feed(record.offset, record.value)
            if record.offset == snapshot_at and not isinstance(applied.outcome, Accepted):
                return None
            if replica.state.generation > generation:
                forked = None
            if forked is None and applied.command is not None:
                forked = why_forked(applied.command, record.offset, replica.state.generation, recent)
        return Loaded(replica, recent, start, end, forked)

    async def _snapshots(self, start: int, end: int) -> AsyncIterator[tuple[int, Snapshot]]:
        """Those that a reader may begin with, newest first, and the offsets at which they stand.

        With a control key, those that are signed. Only where there are none, others: the log is not signed, or has been
        for a short time. Behind the first record that is signed they are not the proxies'.
        """
        signer, below = self.signer, end
        if signer is not None:
            async for record in self._backwards(start, end):
                if not replicas.is_signed(record.value, signer):
                    continue
                below = record.offset
                snapshot = replicas.snapshot_in(record.offset, record.value, signer)
                if snapshot is not None and snapshot.as_of + 1 >= start:
                    yield record.offset, snapshot
        async for record in self._backwards(start, below):
            snapshot = replicas.snapshot_in(record.offset, record.value)
            if snapshot is not None and snapshot.as_of + 1 >= start:
                yield record.offset, snapshot

    async def _backwards(self, start: int, end: int) -> AsyncIterator[LogRecord]:
        """The records of ``[start, end)``, the last first. Snapshots stand at most a little over an interval apart."""
        below, window = end, 2 * SNAPSHOT_INTERVAL
        while below > start:
            above, below = below, max(start, below - window)
            for record in reversed([record async for record in self.read(below, above)]):
                yield record
            window = min(2 * window, 16 * SNAPSHOT_INTERVAL)

    async def _listed(self, timestamp: int, **more: int) -> int:
        listed = (await self._client.list_offsets({PARTITION: timestamp}, **more))[PARTITION]
        if listed.error is not None:
            raise listed.error
        return listed.offset

    async def end(self) -> int:
        """Where the leader's log ends, whatever its high watermark is yet."""
        return await self._listed(LATEST, isolation=LOG_END)

    async def read(self, start: int, end: int) -> AsyncIterator[LogRecord]:
        """The records of ``[start, end)``. Raises :class:`Halted` as :meth:`fetch`."""
        position = start
        while position < end:
            for record in await self.fetch(position):
                if record.offset >= end:
                    return
                yield record
                position = record.offset + 1

    async def fetch(self, offset: int, read_epoch: int = -1) -> list[LogRecord]:
        """Records from ``offset`` on; none if none came in time. ``read_epoch``: of the record before, if it was read.

        Raises :class:`Halted` where the log is not the one any more that was read up to there.
        """
        fetch = self._client.fetch(
            TOPIC,
            0,
            offset,
            bytes_max=FETCH_BYTES_MAX,
            wait_ms_max=FETCH_WAIT_MS,
            lane=TAIL_LANE,
            fetched_epoch=read_epoch,
            deadline_s=0,
        )
        fetched = await self._bounded(fetch, TAIL_LANE, FETCH_TIMEOUT_S)
        info = self._client.topics.get(TOPIC)
        if info is not None and info.topic_id != self._topic_id:
            reason = f"{TOPIC} was deleted and created again: the control state is lost"
            raise Halted(anchors.TOPIC_REPLACED, reason)
        if fetched.error is not None:
            if fetched.error.code == OFFSET_OUT_OF_RANGE:
                raise Halted(replicas.RECORDS_MISSING, f"{TOPIC} has no record at offset {offset} any more")
            raise fetched.error
        if fetched.diverging is not None:
            epoch, end = fetched.diverging
            reason = (
                f"{TOPIC} was read up to offset {offset - 1} of leader epoch {read_epoch}, and its leader has of epoch "
                f"{epoch} what is below {end}: it lost its end"
            )
            raise Halted(anchors.LOG_CUT, reason)
        records: list[LogRecord] = []
        data = memoryview(fetched.records)
        try:
            for start, end, header in walk(data):
                batch = data[start:end]
                verify_crc(batch)
                epoch = header.leader_epoch
                if header.is_control or not header.record_count:
                    # Transaction markers are none of ours; they take an offset, and every proxy passes over them.
                    numbers = range(header.base_offset, header.next_offset)
                    records.extend(LogRecord(number, None, epoch) for number in numbers)
                else:
                    found = decode_records(batch)
                    records.extend(LogRecord(record.offset, record.value, epoch) for record in found)
        except BatchError as error:
            raise PeerFault(f"the broker of {TOPIC} sent a damaged batch: {error}") from error
        return [record for record in records if record.offset >= offset]

    async def facts(self, anchor: Anchor, generation: int, recent: RecentRecords) -> LogFacts:
        """What the log is now, for an anchor. ``recent``: what was read of it anyway."""
        end = await self.end()
        epoch, epoch_end = await self._client.epoch_end(TOPIC, 0, anchor.leader_epoch)
        known = recent.digest_at(anchor.offset)
        first = anchors.window_start(anchor.offset)
        if known is None and anchor.offset < end and first >= await self._listed(EARLIEST):
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    known = anchors.digest([record async for record in self.read(first, anchor.offset + 1)])
            except TimeoutError:
                raise RequestTimedOut(f"{TOPIC} is not read up to offset {anchor.offset} in time") from None
        return LogFacts(str(self.topic_id), generation, end, known, epoch_end if epoch == anchor.leader_epoch else 0)

    # --- Appending

    def encode(self, command: Command, state: ControlState) -> bytes:
        """The record's value, as the log may hold it that led to ``state``."""
        return encode(command, state.level, self.signer and self.signer.of(state.key_id))

    async def produce(self, values: Sequence[bytes | None], *, compress: bool = False) -> PeerFault | None:
        """Append records, once. None: they are there. An error may leave open whether they are."""
        records = [Record(offset, 0, None, value) for offset, value in enumerate(values)]
        batch = encode_batch(records, PLAIN_HEADER, compression=Compression.GZIP if compress else None)
        produce = self._client.produce_raw({PARTITION: batch}, timeout_s=PRODUCE_TIMEOUT_S, lane=APPEND_LANE)
        try:
            return (await self._bounded(produce, APPEND_LANE, PRODUCE_TIMEOUT_S + 1))[PARTITION].error
        except PeerFault as fault:
            return fault

    async def trim(self, before: int) -> None:
        """Delete the records below an offset: readers begin at a snapshot far above it. Raises PeerFault."""
        deleted = (await self._client.delete_records({PARTITION: before}))[PARTITION]
        if deleted.error is not None:
            raise deleted.error

    # --- Its leader

    async def look_again(self, backoff: Backoff) -> None:
        """Wait, then read who leads the log now."""
        await asyncio.sleep(backoff.next_s())
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                await self._client.refresh([TOPIC])
        except (PeerFault, TimeoutError):
            pass  # the next request says what is wrong

    async def _bounded(self, request: Awaitable[T], lane: str, timeout_s: float) -> T:
        """The answer of the log's leader on one of our lanes; a connection on which it does not come is given up."""
        try:
            async with asyncio.timeout(timeout_s):
                return await request
        except TimeoutError:
            info = self._client.topics.get(TOPIC)
            leader = info.partitions[0].leader if info is not None and 0 in info.partitions else -1
            await self._give_up(leader, lane)
            raise RequestTimedOut(f"broker {leader}, which leads {TOPIC}, does not answer") from None

    async def _give_up(self, leader: int, lane: str) -> None:
        try:
            async with asyncio.timeout(0):  # an open connection is there without waiting
                (await self._client.to(leader, lane)).abort()
        except (PeerFault, TimeoutError):
            pass


_AT_LEAST: Final = frozenset((IN_SYNC_MIN, "max.message.bytes"))


def settings(replicas_count: int) -> dict[str, str]:
    """What the topic must be like: nothing is ever removed, and an acknowledged command survives a broker."""
    return {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "unclean.leader.election.enable": "false",
        IN_SYNC_MIN: "2" if replicas_count >= REPLICATION_FACTOR else "1",
        "max.message.bytes": str(RECORD_BYTES_MAX),
    }
