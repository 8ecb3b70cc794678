"""Puts a spool's batches into the topic that was made anew: a stream like any other, whose source is this cluster.

The follower end writes it by its own rules (gaps, transactions, the log's start), so what followed is written again as
it was written first. Producer ids stay: a cluster's own index takes an id to itself.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

from isthmus_control.truncations import PartitionCut
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import A, Question
from isthmus_plugins.replication.link.connection import CALL_TIMEOUT_S, UNKNOWN_METHOD, LinkRejected
from isthmus_plugins.replication.truncation.spool import Spool
from isthmus_protocol import link
from isthmus_protocol.records import NO_SEQUENCE, BatchHeader, seal, walk

QUEUED_BYTES: Final = 8 * 1024 * 1024
"""Batches that wait for their append, of one partition."""
POLL_S: Final = 0.5
"""Appends wake who waits for them; what else may happen to a stream is looked for so often."""
STALLED_S: Final = 60.0
"""A stream that writes nothing for so long is given up, which shows, and begun again."""


class RefillFailed(Exception):
    """The new topic does not become what the spool holds."""


class LocalConnection:
    """In the place of a link's connection: what a stream sends its leader end wakes whoever refills."""

    def __init__(self, link_name: str) -> None:
        self.link_name = link_name
        self.lost = False
        self.changed = asyncio.Event()

    def send(self, *parts: bytes | memoryview) -> None:
        """The stream went on, or ended."""
        self.changed.set()

    def gather(self) -> None:
        """There is nothing to be written together."""

    def write(self) -> None:
        """As ``gather``."""

    async def call(self, question: Question[A], timeout_s: float = CALL_TIMEOUT_S) -> A:
        """No transaction has ended without a marker: what was open in the log before is open in the new one.

        Nothing else is known of a source: there is none.
        """
        if not isinstance(question, calls.EndedTransactions):
            raise LinkRejected(UNKNOWN_METHOD, "a topic that is refilled has no source to ask")
        return cast(A, calls.EndedTransactionsAnswer(()))

    async def wait(self) -> None:
        self.changed.clear()
        try:
            async with asyncio.timeout(POLL_S):
                await self.changed.wait()
        except TimeoutError:
            pass


async def refill(
    end: FollowerEnd,
    spool: Spool,
    link_name: str,
    topic: str,
    topic_id: str,
    cut: PartitionCut,
    uncertain: bool,
    limit: asyncio.Semaphore,
) -> None:
    """Write a partition's part of the spool, from where its log ends now.

    ``uncertain``: somebody may have begun that before, and a request of theirs may still be on its way. ``limit``
    bounds how many partitions are written at once. Raises RefillFailed: the log is not what it should be, and will not
    become it. Raises BrokerUnavailable: try again.
    """
    async with limit:
        local = LocalConnection(link_name)
        stream = await end.open_refill(local, topic, topic_id, cut.partition, uncertain)
        try:
            await _fill(end, spool, local, stream, cut)
        finally:
            local.lost = True
            await end.close_refill(stream)


async def _fill(
    end: FollowerEnd,
    spool: Spool,
    local: LocalConnection,
    stream: FollowerStream,
    cut: PartitionCut,
) -> None:
    follower_log = stream.follower_log
    if follower_log.end > cut.offset:
        raise RefillFailed(f"{stream.topic}-{cut.partition} ends at {follower_log.end} already, beyond {cut.offset}")
    watch = _Watch(stream)
    position, timestamp = follower_log.end, 0
    async for value in spool.read(cut.partition):
        for start, stop, header in walk(value):
            timestamp = header.max_timestamp
            if header.last_offset < position:
                continue
            while follower_log.queued_bytes > QUEUED_BYTES:
                await local.wait()
                watch.check()
            end.on_append(local, _append(stream, position, cut, value[start:stop]))
            position = header.next_offset
    # A log that was compacted may have no batch right before the cut: what is empty there ends the gap.
    last = _without_records(cut.offset - 1, timestamp) if position < cut.offset else b""
    end.on_append(local, _append(stream, position, cut, memoryview(last)))
    while follower_log.end < cut.offset or follower_log.start < cut.log_start:
        await local.wait()
        watch.check()


def _append(stream: FollowerStream, position: int, cut: PartitionCut, records: memoryview) -> link.Append:
    return link.Append(stream.stream_id, position, cut.log_start, cut.offset, 0, records)


def _without_records(offset: int, timestamp: int) -> bytes:
    """A batch of one offset that the cleaner has emptied."""
    return seal(BatchHeader(offset, 0, 0, 2, 0, 0, 0, timestamp, timestamp, -1, -1, NO_SEQUENCE, 0), b"")


class _Watch:
    """Sees that a stream goes on."""

    def __init__(self, stream: FollowerStream) -> None:
        self._stream = stream
        self._at = self._position()
        self._since = asyncio.get_running_loop().time()

    def _position(self) -> tuple[int, int]:
        return self._stream.follower_log.start, self._stream.follower_log.end

    def check(self) -> None:
        """Raise RefillFailed or BrokerUnavailable if the stream has ended, or stands still."""
        stream, now = self._stream, asyncio.get_running_loop().time()
        reason = stream.follower_log.reason
        if stream.follower_log.ended and reason is not None:
            what = f"{stream.topic}-{stream.partition} at {stream.follower_log.end}: {reason.message}"
            if reasons.waiting_state(reason.code) is None:
                raise BrokerUnavailable(what)
            raise RefillFailed(what)
        if (at := self._position()) != self._at:
            self._at, self._since = at, now
        elif now - self._since > STALLED_S:
            raise BrokerUnavailable(
                f"{stream.topic}-{stream.partition} stays at {stream.follower_log.end} for {STALLED_S:.0f} s"
            )
