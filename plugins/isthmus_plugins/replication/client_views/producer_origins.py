"""Where a producer comes from whose id and epoch do not say it: by what a partition's log knows of it.

A partition that followed another cluster knows that cluster's producers under their translated ids. Whoever goes on
where one of them stopped, in its epoch, or sends again what it sent last, is that one. So much is asked once for each
connection. Where the log says nothing the producer is this cluster's; where it says two things, nobody knows.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from isthmus_plugins.cluster import BrokerUnavailable, ProducerState, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_protocol.producer_ids import carry
from isthmus_protocol.record_codec import Record, decode_records
from isthmus_protocol.records import BatchHeader, add_sequence

KNOWN_MAX: Final = 10_000
"""Producers of connections that are remembered."""
SEARCHED_MAX: Final = 1000
"""Batches that are looked through for one that is sent again."""


class Doubtful(Exception):
    """Nobody can say which cluster a producer is of."""


class OutOfSequence(Exception):
    """A batch has the sequence of another one that the log has."""


class ProducedBatch(NamedTuple):
    """What a client sends to a partition."""

    place: TopicPartition
    header: BatchHeader
    data: memoryview


class Claim(enum.Enum):
    """Why a batch may be a producer's that the log knows."""

    GOES_ON = "goes on"
    REPEATS = "repeats"
    AFTER_A_GAP = "after a gap"
    """What came between was lost, as over an asynchronous link."""
    BEGINS_ANEW = "begins anew"
    """With a higher epoch: clients raise it by themselves."""


def claims(states: Mapping[str, ProducerState], epoch: int, sequence: int) -> dict[str, Claim]:
    """Whose a batch may be, of producers that the log knows, by the cluster that numbered each."""
    found: dict[str, Claim] = {}
    for cluster_id, state in states.items():
        if state.last_sequence < 0:
            continue
        if state.epoch == epoch:
            if add_sequence(state.last_sequence, 1) == sequence:
                found[cluster_id] = Claim.GOES_ON
            else:
                found[cluster_id] = Claim.REPEATS if sequence <= state.last_sequence else Claim.AFTER_A_GAP
        elif state.epoch < epoch and not sequence:
            found[cluster_id] = Claim.BEGINS_ANEW
    return found


def chosen(own: str, claimed: Mapping[str, Claim], sequence: int) -> str | None:
    """The cluster whose producer sent a batch that is in the log under none of those that claim to repeat it.

    One of the own cluster may begin, with any epoch. None: nobody knows.
    """
    left = {cluster_id for cluster_id, claim in claimed.items() if claim is not Claim.REPEATS}
    if not sequence and own not in claimed and Claim.GOES_ON not in claimed.values():
        left.add(own)
    return left.pop() if len(left) == 1 else None


class ProducerOrigins:
    """Asks this cluster's logs, and remembers what they said of a connection's producer."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._known: OrderedDict[tuple[int, int, int], str] = OrderedDict()
        """By session, producer id and epoch."""
        self._in_sequence: OrderedDict[tuple[int, int, TopicPartition], None] = OrderedDict()
        """Session, producer id and partition of transactional producers that :meth:`check_sequence` has passed."""

    def known(self, session_id: int, header: BatchHeader) -> str | None:
        """The cluster that a session's producer was found to be of."""
        return self._known.get((session_id, header.producer_id, header.producer_epoch))

    def may_have_moved(self, place: TopicPartition) -> bool:
        """Whether a partition has records that came from another cluster."""
        ranges = self._context.control.state.provenance(*place)
        return any(each.source_cluster_id != self._context.cluster_id for each in ranges)

    def is_in_sequence(self, session_id: int, producer_id: int, place: TopicPartition) -> bool:
        """Whether what a session's transactional producer writes to a partition needs no :meth:`check_sequence`."""
        return not self.may_have_moved(place) or (session_id, producer_id, place) in self._in_sequence

    async def check_sequence(self, session_id: int, batch: ProducedBatch) -> None:
        """See to it that a transactional batch is not taken for another one that has its number, epoch and sequence.

        Raises OutOfSequence, and as :meth:`find`.
        """
        own, header = self._context.cluster_id, batch.header
        known = (await self._context.cluster.producers(*batch.place)).get(header.producer_id)
        if known is not None and known.epoch == header.producer_epoch:
            claimed = claims({own: known}, header.producer_epoch, header.base_sequence)
            repeats = claimed.get(own) is Claim.REPEATS
            if repeats and await self._stored(batch, {header.producer_id: own}) is None:
                raise OutOfSequence(f"{batch.place[0]}-{batch.place[1]} has another batch of that sequence")
        self._in_sequence[session_id, header.producer_id, batch.place] = None
        if len(self._in_sequence) > KNOWN_MAX:
            self._in_sequence.popitem(last=False)

    async def find(self, session_id: int, batches: Sequence[ProducedBatch], clusters: Collection[str]) -> None:
        """Find out of which of the clusters the producer of these batches is.

        Raises Doubtful, BatchError, ProducerIdOverflow, and BrokerUnavailable, KafkaRefused and OperationError where a
        log could not be read.
        """
        followed = [batch for batch in batches if self.may_have_moved(batch.place)]
        found = {each for batch in followed if (each := await self._of(batch, clusters)) is not None}
        header = batches[0].header
        if len(found) > 1:
            raise Doubtful(f"producer {header.producer_id} seems to be of {' and '.join(sorted(found))}")
        key = session_id, header.producer_id, header.producer_epoch
        self._known[key] = found.pop() if found else self._context.cluster_id
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    async def _of(self, batch: ProducedBatch, clusters: Collection[str]) -> str | None:
        """Of which of them it is; None: the log does not say. Raises as :meth:`find`."""
        own, ranges = self._context.cluster_id, self._context.control.state.producer_id_ranges
        producer_id, epoch, sequence = batch.header[9:12]
        producers = await self._context.cluster.producers(*batch.place)
        ids = {each: carry(producer_id, ranges[each], ranges[own]) for each in clusters}
        states = {each: producers[here] for each, here in ids.items() if here in producers}
        claimed = claims(states, epoch, sequence)
        if not claimed:
            return None
        repeats = [each for each, claim in claimed.items() if claim is Claim.REPEATS]
        if len(claimed) == len(repeats) == 1 and (sequence or own in claimed):
            return repeats[0]
        if repeats:
            repeated = await self._stored(batch, {ids[each]: each for each in repeats})
            if repeated is not None:
                return repeated
        found = chosen(own, claimed, sequence)
        if found is None:
            raise Doubtful(f"producer {producer_id} of epoch {epoch} may be of {' or '.join(sorted({own, *claimed}))}")
        return found

    async def _stored(self, batch: ProducedBatch, ids: Mapping[int, str]) -> str | None:
        """Which of some producers, by their ids here, has written this to the partition before.

        Raises as :meth:`find`.
        """
        place, header = batch.place, batch.header
        topic = await self._context.cluster.topic(place[0])
        begins = (await self._context.cluster.offsets_for_times({place: header.base_timestamp})).get(place)
        if topic is None or begins is None:
            raise BrokerUnavailable(f"{place[0]}-{place[1]} cannot be read now")
        # Where no record has such a time the brokers' clocks may have given it another one.
        begin = begins[0] if begins[0] >= 0 else await self._context.cluster.log_start(*place)
        end = await self._context.cluster.log_end(*place)
        sent = decode_records(batch.data)
        looked_at = 0
        async for data, stored, _ in read_batches(self._context, topic, place[1], begin, end):
            if (
                stored.producer_id in ids
                and (stored.producer_epoch, stored.base_sequence) == (header.producer_epoch, header.base_sequence)
                and _are_equal(sent, decode_records(data), stored.is_log_append_time)
            ):
                return ids[stored.producer_id]
            looked_at += 1
            if looked_at == SEARCHED_MAX:
                raise Doubtful(f"too much of {place[0]}-{place[1]} would have to be read")
        return None


def _are_equal(sent: Sequence[Record], stored: Sequence[Record], is_log_append_time: bool) -> bool:
    """Whether a batch holds what was sent, wherever it stands."""

    def contents(records: Sequence[Record]) -> list[Record]:
        return [each._replace(offset=0, timestamp=0 if is_log_append_time else each.timestamp) for each in records]

    return contents(sent) == contents(stored)
