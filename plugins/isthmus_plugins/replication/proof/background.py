"""Compares, in the background, what the brokers of both clusters hold of what follows here.

Every proxy does so with the partitions that are pushed to it, a piece at a time, slowly, and while nothing else is to
be done: digests of what is read back from the brokers are compared over the connection that pushes the partition. How
far that came is in memory, and in the control log from time to time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from isthmus_control.commands import PartitionProof, RecordProofs
from isthmus_control.levels import PROOFS
from isthmus_control.model import FollowerTopic, Link, ResourceType, TopicState
from isthmus_control.outcome import Rejected
from isthmus_control.proofs import FoundDifference, Proof
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.comparison.comparison import Comparison
from isthmus_plugins.replication.comparison.digests import TOO_MANY_KEYS, UNREADABLE, Verification
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.log import LogState
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import BACKGROUND_DIGESTS
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs.reading import Reads, read_batches
from isthmus_plugins.replication.offsets_topic.counting import is_compared
from isthmus_plugins.replication.proof.passes import Pace, PartitionPasses
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.records import BatchError

log = logging.getLogger("isthmus_plugins.replication")

BYTES_PER_S: Final = 10_000_000.0
"""What is read of this cluster's logs, and of the other one's, by each proxy."""
PIECE_BYTES: Final = 4 * 1024 * 1024
"""Of a log, at once, at most: it costs an answer and a question, and is in memory. A piece of small batches has fewer,
and costs as much: clients have their turn in between, and wait longer all the same."""
PIECE_BYTES_MIN: Final = 128 * 1024
"""And the first one, before it is known how large batches are."""
PIECE_COST: Final = 200_000
"""What a piece costs beside its bytes, in bytes; and to ask where a partition ends that has nothing more."""
SINGLE_COST: Final = 20
"""What it costs to compare record by record, where batches differ, as a multiple."""
KEYS_MAX: Final = 200_000
"""Of a compacted partition whose sides were cleaned differently: each is held in memory, some 300 bytes."""
LOOK_S: Final = 3.0
"""How often it is looked for what is new, or due."""
LOOKED_AT_ONCE: Final = 500
"""Partitions, before others have their turn: a millisecond or two."""
BEHIND_S: Final = 2.0
"""What is further behind its source catches up before it is compared."""
RETRY_MIN_S: Final = 15.0
RETRY_MAX_S: Final = 600.0
"""What cannot be compared, or differs, is compared again after this time, and then after twice as long each time: what
a broker cannot read keeps others waiting for some seconds."""
TOO_MANY_KEYS_RETRY_S: Final = 3600.0
RECORD_S: Final = 60.0
RECORDED_AT_ONCE: Final = 100
"""A command about more topics would concern everything."""


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of a partition of one topic, and of one source of it."""

    topic_id: str
    source_topic_id: str
    passes: PartitionPasses
    recorded: Proof | None
    """What the control log had last."""
    piece_bytes: int
    """Of the next piece."""
    stable: int = 0
    """Up to where it may be compared: all before was stable when that was asked."""
    retry_at: float = float("-inf")
    retry_s: float = RETRY_MIN_S
    trouble: str | None = None
    """Why it could not be compared last."""
    info: TopicInfo | None = None


class ShownProof(NamedTuple):
    """How far a partition was found to be its source's, as it is shown."""

    equal_until: int
    age_seconds: float | None
    """Of the last whole pass; None: there was none."""
    trouble: str | None
    difference: FoundDifference | None
    """As it is recorded."""


class BackgroundVerification(Part):
    """The passes over all partitions that are pushed to this proxy."""

    def __init__(self, context: PluginContext, follower_end: FollowerEnd, digests: Verification) -> None:
        self._context = context
        self._clock = context.clock
        self._follower_end = follower_end
        self._digests = digests
        self._tasks = Tasks("background-verification", context.supervision)
        self._pace = Pace(BYTES_PER_S)
        self._known: dict[TopicPartition, _Known] = {}
        self._links: Mapping[str, Link] = {}
        """Of which ``_every`` is."""
        self._every: dict[str, int | None] = {}
        """By link, as set: it is asked for each partition."""
        self._recorded_at = context.clock.monotonic()
        self._troubles = rare_lines(log, "logs not compared in the background", logging.INFO)
        self.bytes_read = 0
        """Of this cluster's logs."""

    def start(self) -> None:
        self._tasks.keep("compare", self._compare_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    # ---- what is shown ----

    def shown(self, record: FollowerTopic, partition: int) -> ShownProof | None:
        """How far a partition was found to be its source's; None: it was not compared."""
        known, recorded = self._known.get((record.topic, partition)), record.proofs.get(partition)
        if known is not None and known.topic_id == record.topic_id:
            proof, trouble = known.passes.proof, known.trouble
        elif recorded is not None:
            proof, trouble = recorded, None
        else:
            return None
        age = max(0.0, self._clock.time() - proof.passed_ms / 1000) if proof.passed_ms else None
        return ShownProof(proof.equal_until, age, trouble, None if recorded is None else recorded.difference)

    def metrics(self) -> Iterable[Metric]:
        read = CounterMetricFamily(
            "isthmus_verified_bytes", "Bytes of this cluster's logs that were read to compare them in the background"
        )
        read.add_metric((), self.bytes_read)
        return (read,)

    # ---- what is compared next ----

    async def _compare_for_ever(self) -> None:
        while True:
            until = self._clock.monotonic() + LOOK_S
            due = deque(await self._due())
            while due and self._clock.monotonic() < until:
                stream = due.popleft()
                await asyncio.sleep(self._pace.wait_s(self._clock.monotonic()))
                if (known := self._known_of(stream)) is not None and await self._compare(stream, known):
                    due.append(stream)
            if self._clock.monotonic() >= self._recorded_at + RECORD_S:
                self._recorded_at = self._clock.monotonic()
                await self._record_all()
            await asyncio.sleep(max(0.0, until - self._clock.monotonic()))

    async def _due(self) -> list[FollowerStream]:
        """Partitions of which there is something to compare now: none while one catches up."""
        streams = self._follower_end.streams()
        places = {stream.place for stream in streams}
        for place in [place for place in self._known if place not in places]:
            del self._known[place]
        due: list[FollowerStream] = []
        if self._context.control.state.level < PROOFS:
            return due
        for begin in range(0, len(streams), LOOKED_AT_ONCE):
            looked_at = streams[begin : begin + LOOKED_AT_ONCE]
            if any(map(_catches_up, looked_at)):
                return []
            now, now_ms = self._clock.monotonic(), self._now_ms
            due += [stream for stream in looked_at if self._is_due(stream, now, now_ms)]
            await asyncio.sleep(0)
        return due

    def _is_due(self, stream: FollowerStream, now: float, now_ms: int) -> bool:
        """Of thousands, mostly nothing."""
        known, every_ms = self._known.get(stream.place), self._every_ms(stream)
        if known is None or every_ms is None or known.topic_id != stream.topic_id:
            return every_ms is not None and self._known_of(stream) is not None
        passes = known.passes
        if passes.difference is not None and self._known_of(stream) is not None and passes is known.passes:
            return passes.difference is None or now >= known.retry_at
        if now < known.retry_at:
            return False
        return not passes.is_whole or passes.at < stream.follower_log.end or passes.is_due(every_ms, now_ms)

    def _known_of(self, stream: FollowerStream) -> _Known | None:
        """What is known of a stream's partition, which is to be compared and may be now; None: it is not."""
        every_ms, record = self._every_ms(stream), self._record_of(stream)
        if every_ms is None or record is None or not _follows(stream):
            return None
        known, now_ms = self._known.get(stream.place), self._now_ms
        recorded = record.proofs.get(stream.partition)
        ids = stream.topic_id, record.source_topic_id
        if known is None or (known.topic_id, known.source_topic_id) != ids:
            known = self._known[stream.place] = _Known(
                *ids, PartitionPasses(recorded, now_ms), recorded, PIECE_BYTES_MIN
            )
        elif recorded != known.recorded:
            if known.recorded is not None and recorded == replace(known.recorded, difference=None):
                known.passes.acknowledged()
                known.retry_at, known.retry_s = float("-inf"), RETRY_MIN_S
            else:  # another proxy had the partition meanwhile
                known.passes = PartitionPasses(recorded, now_ms)
            known.recorded, known.stable = recorded, 0
        known.passes.ends(stream.follower_log.end)
        known.stable = min(known.stable, stream.follower_log.end)
        if known.passes.is_due(every_ms, now_ms):
            known.passes.begin(now_ms)
            known.stable = 0
        return known

    def _every_ms(self, stream: FollowerStream) -> int | None:
        links = self._context.control.state.links
        if links is not self._links:
            self._links, self._every = links, {name: link.verify_every_ms for name, link in links.items()}
        return self._every.get(stream.link_name)

    def _record_of(self, stream: FollowerStream) -> FollowerTopic | None:
        """What is recorded of a stream's topic, where that follows, is whole, and is compared record by record."""
        state = self._context.control.state
        record = state.follower_topics.get(stream.topic)
        if record is None or record.state is not TopicState.FOLLOWING or record.topic_id != stream.topic_id:
            return None
        if stream.topic in state.truncations or self._clock.monotonic() > self._context.lease_deadline:
            return None
        counterpart = state.lookup.following(ResourceType.TOPIC, stream.topic)
        return record if counterpart is not None and is_compared(counterpart.mapping) else None

    @property
    def _now_ms(self) -> int:
        return int(self._clock.time() * 1000)

    # ---- comparing ----

    async def _compare(self, stream: FollowerStream, known: _Known) -> bool:
        """Compare a piece; whether there is more to compare at once."""
        passes = known.passes
        if not stream.follower_log.end:  # as most of many new topics are: nobody is asked anything
            passes.reached_end()
            return False
        try:
            info = await self._ask(stream, known)
        except (BrokerUnavailable, KafkaRefused) as error:
            return self._not_compared(stream, known, str(error))
        if passes.at >= known.stable:
            self._pace.spend(PIECE_COST, self._clock.monotonic())
            passes.reached_end()
            return False
        comparison = Comparison(
            self._digests,
            stream.connection,
            stream.topic,
            info,
            stream.source_topic,
            stream.partition,
            None,
            None,
            compacts=False,
            at_once=known.piece_bytes,
            keys_max=KEYS_MAX,
        )
        try:
            difference, to = await comparison.piece(passes.at, known.stable)
        except BatchError as error:
            return await self._unreadable(stream, known, info, f"this cluster's log cannot be read: {error}")
        except LinkRejected as error:
            if error.code == UNREADABLE:
                return await self._unreadable(stream, known, info, f"the source's log cannot be read: {error.message}")
            return await self._failed(stream, known, comparison, str(error))
        except (LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            return await self._failed(stream, known, comparison, str(error) or type(error).__name__)
        except OperationError as error:
            if error.code == TOO_MANY_KEYS:
                why = f"{error.message}, and both cleaners were not at the same: isthmus verify compares it"
                return self._not_compared(stream, known, why, TOO_MANY_KEYS_RETRY_S)
            return await self._failed(stream, known, comparison, error.message)
        finally:
            self.bytes_read += comparison.whole.bytes + comparison.single.bytes
            if comparison.whole.bytes:
                known.piece_bytes = _piece_bytes(comparison.whole)
            cost = PIECE_COST + comparison.whole.cost + SINGLE_COST * comparison.single.bytes
            self._pace.spend(cost, self._clock.monotonic())
        if difference is not None:
            what = f"the record at offset {difference} is not what the source's {stream.source_topic} has there"
            return await self._differs(stream, known, difference, to, what)
        if passes.difference is not None:
            log.info("logs are equal again", extra={**_where(stream), "offset": passes.difference.offset})
        known.trouble, known.retry_s = None, RETRY_MIN_S
        passes.equal(to)
        if passes.at < known.stable:
            return True
        passes.reached_end()
        return False

    async def _ask(self, stream: FollowerStream, known: _Known) -> TopicInfo:
        """The topic, and where what may be compared begins and ends, as far as that is not known yet."""
        cluster, passes = self._context.cluster, known.passes
        if known.info is None:
            info = await cluster.topic(stream.topic)
            if info is None or info.id_text != stream.topic_id:
                raise BrokerUnavailable(f"{stream.topic} is another topic by now, or none")
            known.info = info
        if passes.at >= known.stable:
            if passes.at == 0:
                passes.starts(await cluster.log_start(stream.topic, stream.partition))
            known.stable = await cluster.last_stable_offset(stream.topic, stream.partition)
        return known.info

    async def _failed(self, stream: FollowerStream, known: _Known, comparison: Comparison, why: str) -> bool:
        """A log may start later than the pass stands: what it had there grew old."""
        try:
            here, there = await comparison.limits()
        except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused):
            return self._not_compared(stream, known, why)
        start = max(here.log_start, there.log_start)
        if known.passes.at >= start:
            return self._not_compared(stream, known, why)
        known.passes.starts(start)
        return True

    def _not_compared(self, stream: FollowerStream, known: _Known, why: str, retry_s: float = 0.0) -> bool:
        self._put_off(known, retry_s)
        known.trouble, known.info = why, None
        self._troubles.one(f"{stream.topic}-{stream.partition}", {**_where(stream), "detail": why})
        return False

    def _put_off(self, known: _Known, retry_s: float = 0.0) -> None:
        known.retry_at = self._clock.monotonic() + max(known.retry_s, retry_s)
        known.retry_s = min(2 * known.retry_s, RETRY_MAX_S)

    async def _unreadable(self, stream: FollowerStream, known: _Known, info: TopicInfo, what: str) -> bool:
        """A piece ends before what cannot be read: it begins with that."""
        at, to = known.passes.at, known.stable
        reads = read_batches(self._context, info, stream.partition, at, to, reads=Reads(1), once=True)
        try:
            async for _, header, _ in reads:
                to = min(to, header.next_offset)
        except (BatchError, OperationError):
            pass  # nobody knows where it ends
        return await self._differs(stream, known, at, to, what)

    async def _differs(self, stream: FollowerStream, known: _Known, offset: int, to: int, what: str) -> bool:
        if self._known_of(stream) is not known:
            return False  # it follows no more, or is cut, or catches up: nobody knows what was compared
        self._put_off(known)
        if known.passes.differs(offset, to, what, self._now_ms):
            log.error("logs differ", extra={**_where(stream), "offset": offset, "detail": what})
            await self._record([(stream, known, known.passes.proof)])
        return False

    # ---- what is recorded ----

    async def _record_all(self) -> None:
        """Where passes stand, of those that this proxy has."""
        now_ms = self._now_ms
        found = []
        for stream in self._follower_end.streams():
            has_any = stream.place in self._known and stream.follower_log.end
            known = self._known_of(stream) if has_any else None
            if known is not None and (proof := known.passes.to_record(known.recorded, now_ms)) is not None:
                found.append((stream, known, proof))
        for begin in range(0, len(found), RECORDED_AT_ONCE):
            await self._record(found[begin : begin + RECORDED_AT_ONCE])

    async def _record(self, found: Sequence[tuple[FollowerStream, _Known, Proof]]) -> None:
        """What cannot be recorded now is found again the next time."""
        entries = [PartitionProof(each.topic, each.topic_id, each.partition, proof) for each, _, proof in found]
        try:
            outcome = await self._context.control.append(RecordProofs(tuple(entries)))
        except BrokerUnavailable as error:
            log.warning("proofs of equality not recorded", extra={"detail": str(error)})
            return
        if isinstance(outcome, Rejected):
            log.warning("proofs of equality not recorded", extra={"detail": outcome.message})
            return
        for _, known, proof in found:
            known.recorded = proof


def _piece_bytes(reads: Reads) -> int:
    """Of a piece that costs as much as one of large batches, by what was read last."""
    return max(PIECE_BYTES_MIN, PIECE_BYTES * reads.bytes // reads.cost)


def _follows(stream: FollowerStream) -> bool:
    """Whether a partition has what its source has, as far as that is known, and nothing waits for its connection."""
    connection = stream.connection
    return (
        not stream.closed
        and stream.knows_end
        and stream.reason is None
        and stream.follower_log.state is LogState.WRITING
        and stream.lag_seconds <= BEHIND_S
        and isinstance(connection, LinkConnection)
        and BACKGROUND_DIGESTS in connection.peer_features
        and connection.writable
    )


def _catches_up(stream: FollowerStream) -> bool:
    if stream.lag_seconds <= BEHIND_S:
        return False
    return not stream.closed and stream.follower_log.state is LogState.WRITING and stream.reason is None


def _where(stream: FollowerStream) -> dict[str, object]:
    return {"link": stream.link_name, "topic": stream.topic, "partition": stream.partition}
