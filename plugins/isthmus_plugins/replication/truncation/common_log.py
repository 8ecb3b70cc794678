"""Up to where a follower's log and its source's are the same.

First the leader epochs say it: the follower has stored which of the source's epochs begins where, and asks where each
ends in the source's log now (KIP-101). What was written in an epoch that the source has lost is not the source's, even
if it looks like it. Where the source's topic was truncated and made anew its epochs begin again, and the cut says it.
Where both clusters say which one wrote which offsets first, that bounds it as well
(:mod:`isthmus_control.shared_prefix`). Then the records do: they are compared up to there, since somebody else may have
written to the follower at any offset.

All of that is about one topic of the source, known by its id: while that is truncated, or once another one has its
name, nothing is said.

Where a cleaner was at work, either log may lack records that the other one has. They may lack them because of a record
that is to be cut: so a compacted log is cut where the latest records of all keys *before the cut* are the same on both
sides, and nothing that the source still has is missing, nor comes back what it has deleted. The largest such offset is
looked for from the end on, in steps that double, since what differs mostly stands at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Final, NamedTuple

from isthmus_control.model import FollowerTopic, ResourceType, SourceEpoch
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import Succession
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.comparison.comparison import Comparison
from isthmus_plugins.replication.comparison.digests import (
    BATCHES,
    CONTENTS,
    LATEST,
    MARKED,
    RECORDS,
    Digest,
    Verification,
)
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected, Peer
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs.reading import Reads, read_batches
from isthmus_protocol.record_equality import RecordsDigest

CALL_TIMEOUT_S: Final = 60.0
COMPARE_TIMEOUT_S: Final = 600.0
"""A compacted log is read from its start for an answer."""
PROBES: Final = 64
"""Offsets at which the logs are compared in one reading."""
NO_EPOCH: Final = -1
NOTHING: Final = RecordsDigest().digest().hex()
"""The digest of a range without records, and, if they count, without markers."""


class SourceLimits(NamedTuple):
    """What the source's leader says of one partition."""

    log_start: int
    log_end: int
    high_watermark: int


async def epoch_bound(
    epochs: Sequence[SourceEpoch], end: int, epoch_end: Callable[[int], Awaitable[tuple[int, int]]]
) -> int:
    """Up to where the source's leader epochs allow that both logs are the same; at most ``end``.

    ``epochs`` are those that the follower stored, and ``epoch_end`` asks the source: (its largest epoch up to the one
    that is asked for, where that ends), or epoch -1 where it knows none as high, as a new leader that has written
    nothing yet. Where it knows none at all the epochs say nothing.
    """
    bound = lowered = end
    for known in reversed(epochs):
        epoch, ends_at = await epoch_end(known.epoch)
        if epoch == known.epoch:
            return min(lowered, ends_at)
        lowered = min(lowered, known.start_offset)  # the source has lost this epoch, with all that it wrote
        if epoch != NO_EPOCH:
            bound = lowered
    return bound


class AtSource(NamedTuple):
    """What the source has of a follower's log. ``kept_to``: up to there it has what it wrote; ``strict``: see
    :class:`~isthmus_plugins.replication.link.calls.LimitsAnswer`."""

    kept_to: int
    strict: bool


class SourceReplaced(Exception):
    """The source's topic is not the one that was followed."""


class _ContentsComparison(Comparison):
    """Compares records whatever became of their transactions, and as they are, whatever their CRCs."""

    _whole_level = BATCHES

    async def _local(self, offset: int, to: int, level: str, reads: Reads, once: bool = False) -> Digest:
        return await super()._local(offset, to, CONTENTS if level == RECORDS else level, reads, once)

    async def _far(self, offset: int, to: int, level: str, until: int = 0, size: int | None = None) -> Digest:
        return await super()._far(offset, to, CONTENTS if level == RECORDS else level, until, size)


class CommonLog(Part):
    """Finds it for the follower end, and answers for the leader end."""

    def __init__(self, context: PluginContext, verification: Verification) -> None:
        self._context = context
        self._verification = verification

    async def at_source(self, connection: Peer, topic: str, partition: int, end: int) -> AtSource:
        """Up to where the source has what it wrote in the leader epochs that the follower stored; at most ``end``.

        Whatever the records are. Raises SourceReplaced, and what peers raise.
        """
        state = self._context.control.state
        record = state.follower_topics[topic]
        place = _Place(connection, record.source_topic, record.source_topic_id, partition)
        asked = await place.ask()
        kept_to = await epoch_bound(state.source_epochs(topic, partition), end, place.epoch_end)
        return AtSource(min(kept_to, asked.log_end), asked.strict)

    # ---- the source's side ----

    def answers(self) -> Sequence[Answering]:
        return calls.Limits.by(self.on_limits), calls.EpochEnd.by(self.on_epoch_end)

    async def on_limits(
        self, connection: LinkConnection, question: calls.Limits | calls.EpochEnd
    ) -> calls.LimitsAnswer:
        """Where the log of one partition starts and ends.

        Raises LinkRejected, also while the topic is truncated: it is not whole then.
        """
        truncation = self._context.control.state.truncations.get(question.topic)
        if truncation is not None:
            raise LinkRejected(ReasonCode.SOURCE_TRUNCATING, truncation.describe())
        topic, _ = await self._verification.linked_topic(connection, question.topic)
        try:
            ends, log_end = await asyncio.gather(
                self._verification.ends(topic, question.partition),
                self._context.cluster.log_end(topic.name, question.partition),
            )
            compacts = await self._verification.compacts(topic.name, topic.topic_id)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        strict = self._context.control.state.lookup.demands(ResourceType.TOPIC, topic.name).strict
        return calls.LimitsAnswer(*ends, log_end, compacts, topic.id_text, strict)

    async def on_epoch_end(self, connection: LinkConnection, question: calls.EpochEnd) -> calls.EpochEndAnswer:
        """The same, and where an epoch ends in it."""
        limits = await self.on_limits(connection, question)
        try:
            epoch, end = await self._context.cluster.epoch_end(question.topic, question.partition, question.epoch)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        return calls.EpochEndAnswer(**asdict(limits), epoch=epoch, epoch_end=end)

    # ---- the follower's side ----

    async def end(
        self,
        connection: Peer,
        topic: TopicInfo,
        record: FollowerTopic,
        succession: Succession | None,
        partition: int,
        log_start: int,
        log_end: int,
        bound: int | None = None,
    ) -> int:
        """Up to where the partition's log is the source's, exclusive; at most ``log_end``, and ``bound``.

        ``succession``: the source's topic succeeded the one that was followed. Raises LinkRejected, LinkLost,
        TimeoutError, OperationError, BatchError, SourceReplaced, and BrokerUnavailable where the source's leader does
        not know yet what it may show.
        """
        source_id = record.source_topic_id if succession is None else succession.successor
        place = _Place(connection, record.source_topic, source_id, partition)
        found = await self._end(place, topic, succession, log_start, log_end, log_end if bound is None else bound)
        await place.limits()  # it was that topic, and whole, all the time
        return found

    async def same_latest(
        self, connection: Peer, topic: TopicInfo, record: FollowerTopic, partition: int, offset: int
    ) -> tuple[int, bool] | None:
        """(Up to where a partition was compared, whether the latest records of all keys before that are the same).

        Nobody stops for it. None: the logs are not stable up to ``offset`` yet. Raises as :meth:`end`.
        """
        place = _Place(connection, record.source_topic, record.source_topic_id, partition)
        source, last_stable_offset, _ = await place.limits()
        here = await self._verification.ends(topic, partition)
        until = min(here.last_stable_offset, last_stable_offset)
        if until < offset:
            return None
        start = min(max(here.log_start, source.log_start), until)
        ((_, ours),) = await self._verification.latest_at(topic, partition, start, [until])
        theirs = await self._latest_there(place, start, [until])
        await place.limits()  # it was that topic all the time
        return until, ours == theirs[until]

    async def _end(
        self,
        place: _Place,
        topic: TopicInfo,
        succession: Succession | None,
        log_start: int,
        log_end: int,
        at_most: int,
    ) -> int:
        connection, partition = place.connection, place.partition
        source, last_stable_offset, compacts = await place.limits()
        if succession is None:
            epochs = self._context.control.state.source_epochs(topic.name, partition)
            bound = await epoch_bound(epochs, min(log_end, source.log_end), place.epoch_end)
        else:
            bound = min(log_end, source.log_end, succession.offsets[partition])
        bound = min(bound, at_most)
        if source.high_watermark < bound:
            raise BrokerUnavailable(
                f"the source's {place.topic}-{partition} shows records up to {source.high_watermark} only so far, "
                f"its log may hold more"
            )
        start = max(log_start, source.log_start)
        if bound <= start:
            return bound
        if bound < log_end:
            bound = max(start, await self.whole(topic, partition, bound))
        here = await self._verification.ends(topic, partition)
        there = calls.Ends(source.log_start, source.high_watermark, last_stable_offset)
        # What is open in one of the logs may be aborted in the other by now: nothing differs yet.
        ended = min(max(start, min(here.last_stable_offset, there.last_stable_offset)), bound)
        if compacts or await self._verification.compacts(topic.name, topic.topic_id):
            last = await self._last_equal(place, topic, start, ended)
            if last < ended:
                return last
            start = ended  # nothing above has been cleaned
        for kind, first, to in ((Comparison, start, ended), (_ContentsComparison, ended, bound)):
            comparison = kind(
                self._verification, connection, topic.name, topic, place.topic, partition, None, None, False
            )
            difference = await comparison.first_difference(first, to, here, there, lambda offsets: None)
            if difference is not None:
                return await self._between(topic, partition, start, difference)
        return bound

    async def whole(self, topic: TopicInfo, partition: int, offset: int) -> int:
        """An offset, or the begin of the batch in the middle of which it is."""
        async for _, header, _ in read_batches(self._context, topic, partition, offset, offset + 1):
            return min(header.base_offset, offset)
        return offset

    async def _last_equal(self, place: _Place, topic: TopicInfo, start: int, end: int) -> int:
        """Where a batch of the log here ends, up to which the latest records are those of the source: the last found.

        The search is for latest records, so what ends there is looked at as it is: no cleaner makes it another record.
        """
        while True:
            end = await self._last_same_latest(place, topic, start, end)
            if end == start or not await self._ends_with_another(place, topic, end):
                return end
            end -= 1

    async def _last_same_latest(self, place: _Place, topic: TopicInfo, start: int, end: int) -> int:
        probes = sorted({end, *(max(start, end - 2**step) for step in range((end - start).bit_length() + 1))})
        low = searched = start
        high = end + 1
        while True:
            found = await self._same_latest(place, topic, start, probes)
            low = max([low, *(at for _, at, same in found if same)])
            # No batch ends between one that is in the middle of a batch and the beginning of that.
            searched = max([searched, low, *(probe for probe, at, _ in found if at <= low)])
            high = min([high, *(probe for probe, _, _ in found if probe > searched)])
            if high - searched <= 1:
                return low
            step = -(-(high - searched) // PROBES)
            probes = list(range(searched + step, high, step)) or [searched + 1]

    async def _same_latest(
        self, place: _Place, topic: TopicInfo, start: int, probes: Sequence[int]
    ) -> list[tuple[int, int, bool]]:
        """For rising offsets: (offset, where the batch here begins that it is in, whether the latest records before
        that are the same on both sides)."""
        here = await self._verification.latest_at(topic, place.partition, start, probes, whole_batches=True)
        there = await self._latest_there(place, start, sorted({at for at, _ in here}))
        return [(probe, at, digest == there[at]) for probe, (at, digest) in zip(probes, here, strict=True)]

    async def _latest_there(self, place: _Place, start: int, offsets: Sequence[int]) -> Mapping[int, str]:
        """For rising offsets of the source: the digest of the latest records of all keys before it."""
        asked = calls.DigestsAt(place.topic, place.partition, start, offsets[-1], LATEST, tuple(offsets))
        answer = await place.connection.call(asked, COMPARE_TIMEOUT_S)
        return dict(zip(offsets, answer.digests, strict=True))

    async def _ends_with_another(self, place: _Place, topic: TopicInfo, end: int) -> bool:
        """Whether both logs have a record before an offset, and not the same, or one a record and the other a marker.

        No latest record may differ for that: a tombstone of a key that neither has is none.
        """
        here, there = await self._at(place, topic, end - 1, CONTENTS)
        if here.records and there.records:
            return here.digest != there.digest
        if not here.records and not there.records:
            return False
        here, there = await self._at(place, topic, end - 1, MARKED)
        other = there if here.records else here
        # A peer of before does not know of markers, and answers something longer.
        return len(other.digest) == len(NOTHING) and other.digest != NOTHING

    async def _at(self, place: _Place, topic: TopicInfo, offset: int, level: str) -> tuple[Digest, Digest]:
        """What stands for an offset here, and at the source."""
        asked = calls.Digest(place.topic, place.partition, offset, offset + 1, level)
        answer = await place.connection.call(asked, CALL_TIMEOUT_S)
        here = await self._verification.digest(topic, place.partition, offset, offset + 1, level, None)
        return here, Digest(answer.digest, answer.records, offset + 1)

    async def _between(self, topic: TopicInfo, partition: int, start: int, offset: int) -> int:
        """The end of the last batch of ``[start, offset)`` that is whole before an offset: logs are cut there."""
        end = start
        async for _, header, _ in read_batches(self._context, topic, partition, start, offset + 1):
            if header.next_offset > offset:
                return header.base_offset if header.base_offset <= offset else end
            end = header.next_offset
        return end


class _Place:
    """A partition of the source, of one topic id."""

    def __init__(self, connection: Peer, topic: str, topic_id: str, partition: int) -> None:
        self.connection = connection
        self.topic = topic
        self.partition = partition
        self._topic_id = topic_id

    async def ask(self) -> calls.LimitsAnswer:
        """All that the source says of it."""
        answer = await self.connection.call(calls.Limits(self.topic, self.partition), CALL_TIMEOUT_S)
        self._check(answer)
        return answer

    async def limits(self) -> tuple[SourceLimits, int, bool]:
        """The log's limits, its last stable offset, and whether it is compacted."""
        answer = await self.ask()
        limits = SourceLimits(answer.log_start, answer.log_end, answer.high_watermark)
        return limits, answer.last_stable_offset, answer.compacts

    async def epoch_end(self, epoch: int) -> tuple[int, int]:
        """As ``epoch_bound`` asks it."""
        answer = await self.connection.call(calls.EpochEnd(self.topic, self.partition, epoch), CALL_TIMEOUT_S)
        self._check(answer)
        return answer.epoch, answer.epoch_end

    def _check(self, answer: calls.LimitsAnswer) -> None:
        if answer.topic_id not in (self._topic_id, None):  # a peer of before does not say
            raise SourceReplaced(f"the source's {self.topic} is another topic by now: {answer.topic_id}")
