"""Two logs of one partition, compared up to where they are equal.

Whole batches are compared by digest, so a range costs the link 16 bytes however large it is; where batches differ,
records are, with what became of their transactions, since a batch may have been re-encoded; where records differ, the
range is halved until the first one that does is found, and named by its offset. What moves while it is read may look
different, so a difference counts if it is still there a second later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from isthmus_control.model import NamespaceMapping, Role
from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo
from isthmus_plugins.links import OperationError, PartitionVerdict
from isthmus_plugins.replication.comparison.digests import CHECKED, LATEST, RECORDS, Digest, Verification
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkLost, LinkRejected, Peer
from isthmus_plugins.replication.logs.reading import CHUNK_BYTES, Reads
from isthmus_plugins.replication.offsets_topic.counting import NOTE, is_compared
from isthmus_protocol.records import BatchError

RECHECK_TIMES: Final = 3
RECHECK_S: Final = 1.0
AT_ONCE: Final = 8
"""Partitions whose records are compared at the same time."""


class Progress:
    """Partitions and their offsets that are compared, of how many."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self.done = self.total = 0

    def expect(self, offsets: int) -> None:
        self.total += offsets
        self._progress(self.done, self.total)

    def add(self, offsets: int) -> None:
        self.done += offsets
        self._progress(self.done, self.total)


class Comparison:
    """One partition, here and there."""

    _whole_level = CHECKED
    """In which whole batches are compared."""

    def __init__(
        self,
        verification: Verification,
        connection: Peer,
        name: str,
        topic: TopicInfo | None,
        remote: str,
        partition: int,
        mapping: NamespaceMapping | None,
        remote_ends: calls.Ends | None,
        compacts: bool,
        unread: str | None = None,
        at_once: int | None = None,
        keys_max: int | None = None,
    ) -> None:
        """``unread``: why the other side's log could not be read. ``at_once``: of how many bytes a read is at most.
        ``keys_max``: of how many keys the latest records are compared at most.
        """
        self._verification = verification
        self._connection = connection
        self._name = name
        self._local_topic = topic
        self._remote = remote
        self._partition = partition
        self._mapping = mapping
        self._remote_ends = remote_ends
        self._compacts = compacts
        self._unread = unread
        self._keys_max = keys_max
        self._records = 0
        self.whole = Reads(CHUNK_BYTES if at_once is None else at_once)
        """What was read here to compare whole batches."""
        self.single = Reads(self.whole.at_once)
        """What was read here to compare record by record."""

    async def run(self, limit: asyncio.Semaphore, counted: Progress) -> PartitionVerdict:
        """``limit``: of those whose records are compared now. ``counted`` expects one more than there are offsets."""
        try:
            return await self._compare(limit, counted)
        except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, OperationError, BatchError) as error:
            return self._verdict(0, 0, calls.Ends(0, 0, 0), f"not compared: {str(error) or type(error).__name__}")
        finally:
            counted.add(1)

    @property
    def _topic(self) -> TopicInfo:
        assert self._local_topic is not None
        return self._local_topic

    async def _compare(self, limit: asyncio.Semaphore, counted: Progress) -> PartitionVerdict:
        if self._local_topic is None or self._partition >= len(self._local_topic.partitions):
            return self._verdict(
                0, 0, calls.Ends(0, 0, 0), f"{self._name}-{self._partition} does not exist on this cluster"
            )
        if self._unread is not None:
            raise OperationError("UNAVAILABLE", self._unread, 503)
        here = await self._verification.ends(self._topic, self._partition)
        there = self._remote_ends
        if there is None:
            missing = f"{self._remote}-{self._partition}"
            return self._verdict(0, 0, here, f"{missing} does not exist on the other cluster")
        start, to = max(here.log_start, there.log_start), min(here.high_watermark, there.high_watermark)
        counted.expect(max(0, to - start))
        if here.log_start != there.log_start:
            return self._verdict(start, start, here, f"the logs start at {here.log_start} and {there.log_start}")
        async with limit:
            if self._mapping is not None and not is_compared(self._mapping):
                return await self._counted(self._mapping, here, there, counted)
            difference = await self.first_difference(start, to, here, there, counted.add) if start < to else None
        if difference is not None:
            return self._verdict(start, difference, here, self._what(difference))
        return self._verdict(start, to, here, None)

    async def first_difference(
        self, start: int, to: int, here: calls.Ends, there: calls.Ends, compared: Callable[[int], None]
    ) -> int | None:
        """The first offset of ``[start, to)`` at which the records differ, None if they do not.

        ``compared`` gets how many offsets are equal, piece by piece. Raises LinkRejected, LinkLost, TimeoutError,
        OperationError, BatchError.
        """
        offset = start
        while offset < to:
            difference, reached = await self.piece(offset, to, (here, there))
            if difference is not None:
                return difference
            compared(reached - offset)
            offset = reached
        return None

    async def piece(
        self, offset: int, to: int, limits: tuple[calls.Ends, calls.Ends] | None = None
    ) -> tuple[int | None, int]:
        """The first offset at which the records of a first piece of ``[offset, to)`` differ, None if they do not; and
        up to where that was looked at.

        ``limits``: both logs', the own one's first; None: they are asked for where they matter. Raises LinkRejected,
        LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused, OperationError, BatchError.
        """
        before = self.whole.bytes
        mine = await self._local(offset, to, self._whole_level, self.whole, once=True)
        theirs = await self._far(offset, mine.to, self._whole_level, size=self.whole.bytes - before)
        if theirs.to < mine.to:  # behind it the other side has what cannot be read
            mine = await self._local(offset, theirs.to, self._whole_level, self.whole)
        difference, reached = None, mine.to
        if mine.digest != theirs.digest:
            difference, reached = await self._lasting_difference(offset, reached, to, limits)
        if difference is None:
            self._records += mine.records
        return difference, reached

    async def _counted(
        self, mapping: NamespaceMapping, here: calls.Ends, there: calls.Ends, counted: Progress
    ) -> PartitionVerdict:
        """The verdict on an offsets topic and its copy in another form."""
        assert mapping.offsets is not None
        leads = mapping.role is Role.LEADER
        source, copy = (here, there) if leads else (there, here)
        until = min(source.last_stable_offset, copy.high_watermark)
        mine = await self._verification.count_offsets(mapping, self._topic, self._partition, until)
        asked = calls.CountOffsets(self._remote, self._partition, until)
        theirs = (await self._connection.call(asked, timeout_s=120)).records
        leaving, copied = (mine, theirs) if leads else (theirs, mine)
        counted.add(max(0, until - here.log_start))
        if copy.high_watermark > source.high_watermark:
            difference: str | None = f"the copy ends at {copy.high_watermark}, the source at {source.high_watermark}"
        elif copied < leaving:
            difference = (
                f"the copy has {copied} latest records, {leaving} of the groups that are copied leave the source"
            )
        else:
            difference = None
        verdict = self._verdict(here.log_start, until, here, difference)
        verdict.note = NOTE.format(form=mapping.offsets.form.value, source=leaving, copy=copied)
        return verdict

    async def _lasting_difference(
        self, offset: int, to: int, last: int, limits: tuple[calls.Ends, calls.Ends] | None
    ) -> tuple[int | None, int]:
        """Where ``[offset, to)`` differs, if it does so for a while, since both sides may be on the move; and up to
        where that was looked at, at most ``last``.

        Either cleaner takes out what a later record makes superfluous, wherever that stands: of compacted topics, the
        latest records of all that is stable are compared at once. Above that nothing has been cleaned.
        """
        difference, reached = None, to
        for again in range(RECHECK_TIMES):
            difference, reached = await self._first_difference(offset, to), to
            if difference is not None and limits is None:
                limits = await self.limits()
            if difference is not None and limits is not None and await self._is_cleaned():
                if again:  # the source's cleaner may have been where the follower was not yet
                    limits = await self.limits()
                here, there = limits
                stable = min(here.last_stable_offset, there.last_stable_offset)
                if offset < stable:
                    difference = await self._first_latest_difference(max(here.log_start, there.log_start), stable)
                    reached = min(last, max(to, stable))
                    if difference is None and stable < to:
                        difference = await self._first_difference(stable, to)
            if difference is None or again == RECHECK_TIMES - 1:
                break
            await asyncio.sleep(RECHECK_S)
        return difference, reached

    async def limits(self) -> tuple[calls.Ends, calls.Ends]:
        """Both logs' limits now, the own one's first. Raises as :meth:`piece`."""
        answer = await self._connection.call(calls.TopicLimits(self._remote))
        self._compacts = answer.compacts
        here = await self._verification.ends(self._topic, self._partition)
        return here, answer.partitions[self._partition]

    async def _is_cleaned(self) -> bool:
        return self._compacts or await self._verification.compacts(self._topic.name, self._topic.topic_id)

    async def _first_difference(self, offset: int, to: int) -> int | None:
        """The first offset at which the records differ, None if they do not: batches may be cut differently."""
        if await self._equal_records(offset, to):
            return None
        while to - offset > 1:
            middle = (offset + to) // 2
            if await self._equal_records(offset, middle):
                offset = middle
            else:
                to = middle
        return offset

    async def _equal_records(self, offset: int, to: int) -> bool:
        mine = await self._local(offset, to, RECORDS, self.single)
        return mine.digest == (await self._far(offset, to, RECORDS)).digest

    async def _first_latest_difference(self, offset: int, until: int) -> int | None:
        """The first offset at which the latest records of keys differ."""
        to = until
        if await self._equal_latest(until, offset, to):
            return None
        while to - offset > 1:
            middle = (offset + to) // 2
            if await self._equal_latest(until, offset, middle):
                offset = middle
            else:
                to = middle
        return offset

    async def _equal_latest(self, until: int, offset: int, to: int) -> bool:
        mine = await self._verification.latest(
            self._topic, self._partition, until, offset, to, self.single, self._keys_max
        )
        return mine.digest == (await self._far(offset, to, LATEST, until)).digest

    async def _local(self, offset: int, to: int, level: str, reads: Reads, once: bool = False) -> Digest:
        return await self._verification.digest(self._topic, self._partition, offset, to, level, reads, once)

    async def _far(self, offset: int, to: int, level: str, until: int = 0, size: int | None = None) -> Digest:
        asked = calls.Digest(self._remote, self._partition, offset, to, level, until, size)
        answer = await self._connection.call(asked, timeout_s=120)
        return Digest(answer.digest, answer.records, answer.to)

    def _what(self, offset: int) -> str:
        return f"the records at offset {offset} differ"

    def _verdict(self, start: int, to: int, here: calls.Ends, difference: str | None) -> PartitionVerdict:
        there = self._remote_ends or calls.Ends(0, 0, 0)
        leads = self._mapping is not None and self._mapping.role is Role.LEADER
        source, follower = (here, there) if leads else (there, here)
        return PartitionVerdict(
            topic=self._name,
            remote_topic=self._remote,
            partition=self._partition,
            equal=difference is None,
            compared_from=start,
            compared_to=to,
            records=self._records,
            source_end=source.high_watermark,
            follower_end=follower.high_watermark,
            difference=difference,
        )
