"""Verification: reads both sides of a link's partitions and says up to which offset they are equal.

"Equal" is the project's one definition (ARCHITECTURE.md). Whole batches are compared by digest, so a range costs the
link 16 bytes however large it is; where batches differ, records are, with what became of their transactions, since a
batch may have been re-encoded; where records differ, the range is halved until the first one that does is found, and
named by its offset. Each side's cleaner comes by when it likes: of compacted topics, the latest record of each key is
compared. What moves while it is read may look different, so a difference counts if it is still there a second later.
Copies of offsets topics that are not whole are counted (``offsets_verify``).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from time import monotonic
from typing import Any, Final, NamedTuple

from isthmus_control.model import Link, NamespaceMapping, Role
from isthmus_plugins.api import (
    BrokerUnavailable,
    KafkaRefused,
    PluginContext,
    TopicInfo,
)
from isthmus_plugins.links import OperationError, PartitionVerdict, VerifyReport
from isthmus_plugins.replication.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.follower_configs import CLEANUP_POLICY, is_compacted
from isthmus_plugins.replication.group_verify import GroupVerification
from isthmus_plugins.replication.offsets_keyring import KeyringFile
from isthmus_plugins.replication.offsets_verify import NOTE, OffsetsCount, is_compared
from isthmus_plugins.replication.reading import CHUNK_BYTES, read_batches
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.record_equality import LatestDigest, RecordsDigest, batch_digest
from isthmus_protocol.records import BatchError

BATCHES: Final = "batches"
RECORDS: Final = "records"
CONTENTS: Final = "contents"
MARKED: Final = "marked"
LATEST: Final = "latest"
RECHECK_TIMES: Final = 3
RECHECK_S: Final = 1.0
AT_ONCE: Final = 4
"""Partitions that are compared at the same time."""


class Digest(NamedTuple):
    """What stands for the records of ``[from, to)`` of one partition."""

    digest: str
    records: int
    to: int
    """Where the reading ended: asked for, or, for a first reader, the end of a batch after enough bytes."""


class Ends(NamedTuple):
    log_start: int
    high_watermark: int
    last_stable_offset: int


class Verification:
    """Digests of this cluster's partitions, for both ends, and the comparison itself."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self.groups = GroupVerification(context)
        self._offsets_count = OffsetsCount(KeyringFile(context.offsets_keyring_file))

    # ---- reading ----

    async def ends(self, topic: TopicInfo, partition: int) -> Ends:
        """The log's limits. Raises BrokerUnavailable."""
        cluster = self._context.cluster
        return Ends(
            await cluster.log_start(topic.name, partition),
            await cluster.high_watermark(topic.name, partition),
            await cluster.last_stable_offset(topic.name, partition),
        )

    async def digest(
        self, topic: TopicInfo, partition: int, offset: int, to: int, level: str, bytes_max: int | None
    ) -> Digest:
        """The digest of ``[offset, to)``; with ``bytes_max`` up to the batch that reaches so many bytes.

        Levels: BATCHES, whole batches; RECORDS, records and whether they were aborted; CONTENTS, records alone; MARKED,
        records and markers, whatever comes after them.
        """
        own_index = self._context.control.state.producer_id_ranges[self._context.cluster_id]
        whole = blake2b(digest_size=16)
        single = RecordsDigest()
        size = records = 0
        reached = to
        if level in (CONTENTS, MARKED):
            async for batch, _, _ in read_batches(self._context, topic, partition, offset, to):
                if level == MARKED:
                    single.add_marked(batch, offset, to)
                else:
                    single.add(batch, from_offset=offset, to_offset=to)
            return Digest(single.digest().hex(), single.records, to)
        if level == RECORDS:
            read = offset
            async for batch, header, aborted in read_batches(
                self._context, topic, partition, offset, to, read_committed=True
            ):
                single.add(batch, from_offset=offset, to_offset=to, aborted=aborted)
                read = header.next_offset
            if read < to:  # beyond the last stable offset nothing was aborted yet
                async for batch, _, _ in read_batches(self._context, topic, partition, read, to):
                    single.add(batch, from_offset=read, to_offset=to)
            return Digest(single.digest().hex(), single.records, to)
        async for batch, header, _ in read_batches(self._context, topic, partition, offset, to):
            if header.base_offset >= offset and header.next_offset <= to:
                whole.update(header.base_offset.to_bytes(8, "big"))
                whole.update(batch_digest(batch, own_index))
                records += 0 if header.is_control else header.record_count
            else:
                single.add(batch, from_offset=offset, to_offset=to)
                whole.update(b"cut")
            size += len(batch)
            if bytes_max is not None and size >= bytes_max and header.next_offset < to:
                reached = header.next_offset
                break
        return Digest(whole.hexdigest() + single.digest().hex(), records + single.records, reached)

    async def latest(self, topic: TopicInfo, partition: int, until: int, offset: int, to: int) -> Digest:
        """The digest of those records in ``[offset, to)`` that are the latest of their keys before ``until``."""
        found = LatestDigest()
        start = await self._context.cluster.log_start(topic.name, partition)
        async for batch, _, aborted in read_batches(self._context, topic, partition, start, until, read_committed=True):
            if not aborted:
                found.add(batch, start, until)
        digest, records = found.digest(offset, to)
        return Digest(digest.hex(), records, to)

    async def latest_at(
        self, topic: TopicInfo, partition: int, start: int, offsets: Sequence[int], whole_batches: bool = False
    ) -> list[tuple[int, str]]:
        """For each of some rising offsets: (the offset, the digest of the latest records of all keys before it).

        ``whole_batches``: in the place of an offset in the middle of a batch, where that begins.
        """
        found = LatestDigest()
        digests: list[tuple[int, str]] = []
        async for batch, header, aborted in read_batches(
            self._context, topic, partition, start, offsets[-1], read_committed=True
        ):
            first = start
            while len(digests) < len(offsets) and offsets[len(digests)] < header.next_offset:
                at = offsets[len(digests)]
                if whole_batches:
                    at = max(start, min(at, header.base_offset))
                if not aborted:
                    found.add(batch, first, at)
                digests.append((at, found.total.hex()))
                first = max(first, at)
            if not aborted:
                found.add(batch, first)
        return digests + [(at, found.total.hex()) for at in offsets[len(digests) :]]

    async def may_be_gone(self, topic: str, partition: int, offset: int) -> bool:
        """Whether a cleaner may have taken what this log has at an offset from a log in which nothing comes after it.

        It takes tombstones, records without a key, what was aborted, and markers. Raises BrokerUnavailable.
        """
        info = (await self._context.cluster.topics()).get(topic)
        if info is None:
            raise BrokerUnavailable(f"{topic} does not exist")
        try:
            async for batch, header, aborted in read_batches(
                self._context, info, partition, offset, offset + 1, read_committed=True
            ):
                if header.is_control or aborted:
                    continue
                for record in decode_records(batch):
                    if record.offset == offset and record.key is not None and record.value is not None:
                        return False
        except (OperationError, BatchError) as error:
            raise BrokerUnavailable(str(error)) from error
        return await self._context.cluster.last_stable_offset(topic, partition) > offset

    async def digest_of(self, topic: str, partition: int, offset: int, to: int) -> Digest:
        """The digest of the records of ``[offset, to)``, whatever became of them. Raises BrokerUnavailable."""
        info = (await self._context.cluster.topics()).get(topic)
        if info is None:
            raise BrokerUnavailable(f"{topic} does not exist")
        try:
            return await self.digest(info, partition, offset, to, CONTENTS, None)
        except (OperationError, BatchError) as error:
            raise BrokerUnavailable(str(error)) from error

    async def compacts(self, topic: str, topic_id: bytes) -> bool:
        """Whether this cluster's cleaner compacts a topic, or did so while it followed. Raises BrokerUnavailable."""
        record = self._context.control.state.follower_topics.get(topic)
        if record is not None and record.cleaned and record.topic_id == str(uuid.UUID(bytes=topic_id)):
            return True
        try:
            configs = await self._context.cluster.topic_configs(topic)
        except KafkaRefused as error:
            raise BrokerUnavailable(str(error)) from error
        return is_compacted({CLEANUP_POLICY: configs[CLEANUP_POLICY][0]})

    # ---- the peer's calls ----

    async def on_digest(self, connection: LinkConnection, params: Mapping[str, Any]) -> dict[str, Any]:
        """The digest of a range of one of this cluster's partitions, for the peer that verifies."""
        topic, mapping = await self.linked_topic(connection, str(params["topic"]))
        if not is_compared(mapping):  # digests would let it try out what it is not to know
            raise LinkRejected("NOT_COMPARED", f"{topic.name} is copied in a form that is not compared")
        partition, offset, to = int(params["partition"]), int(params["from"]), int(params["to"])
        try:
            if params["level"] == LATEST and "at" in params:
                found_at = await self.latest_at(topic, partition, offset, [int(at) for at in params["at"]])
                return {"digests": [digest for _, digest in found_at]}
            if params["level"] == LATEST:
                found = await self.latest(topic, partition, int(params["until"]), offset, to)
            else:
                found = await self.digest(topic, partition, offset, to, str(params["level"]), None)
        except (OperationError, BatchError, BrokerUnavailable) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        return found._asdict()

    async def on_ends(self, connection: LinkConnection, params: Mapping[str, Any]) -> dict[str, Any]:
        """The limits of each partition's log of one of this cluster's topics."""
        topic, _ = await self.linked_topic(connection, str(params["topic"]))
        try:
            ends = await asyncio.gather(*(self.ends(topic, partition) for partition in range(len(topic.partitions))))
            compacts = await self.compacts(topic.name, topic.topic_id)
        except BrokerUnavailable as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        return {"partitions": [list(each) for each in ends], "compacts": compacts}

    async def on_linked_topics(self, connection: LinkConnection, params: Mapping[str, Any]) -> dict[str, Any]:
        """This cluster's topics in the namespaces of the link."""
        link = self._context.control.state.links.get(connection.link_name)
        topics = await self._context.cluster.topics()
        mappings = link.topic_mappings if link is not None else ()
        return {
            "topics": {
                topic.name: len(topic.partitions)
                for topic in topics.values()
                if any(_holds(mapping, topic) for mapping in mappings)
            }
        }

    async def on_count_offsets(self, connection: LinkConnection, params: Mapping[str, Any]) -> dict[str, Any]:
        """How many records of an offsets topic leave, or its copy has, for the peer that verifies."""
        topic, mapping = await self.linked_topic(connection, str(params["topic"]))
        try:
            count = await self.count_offsets(mapping, topic, int(params["partition"]), int(params["until"]))
        except (OperationError, BatchError, BrokerUnavailable) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        return {"records": count}

    async def count_offsets(self, mapping: NamespaceMapping, topic: TopicInfo, partition: int, until: int) -> int:
        """How many latest records before ``until`` leave this side's offsets topic, or its copy here has.

        Raises BrokerUnavailable, BatchError, OperationError.
        """
        start = await self._context.cluster.log_start(topic.name, partition)
        return await self._offsets_count.latest(
            mapping, read_batches(self._context, topic, partition, start, until, read_committed=True)
        )

    async def linked_topic(self, connection: LinkConnection, name: str) -> tuple[TopicInfo, NamespaceMapping]:
        """A topic that the connection's link may ask about, with its mapping. Raises LinkRejected."""
        link = self._context.control.state.links.get(connection.link_name)
        mappings = link.topic_mappings if link is not None else ()
        mapping = next((each for each in mappings if each.remote_name(name) is not None), None)
        topics = await self._context.cluster.topics() if mapping is not None else {}
        if mapping is None or name not in topics:
            raise LinkRejected("UNKNOWN_TOPIC", f"{name} is no topic of this link here")
        return topics[name], mapping

    # ---- comparing ----

    async def verify(
        self, link: Link, connection: LinkConnection, progress: Callable[[int, int], None]
    ) -> VerifyReport:
        """Compare every partition of the link's topic namespaces, up to a snapshot of the smaller end."""
        started = monotonic()
        topics = await self._context.cluster.topics()
        there = {
            str(name): int(count) for name, count in (await connection.call("linked_topics", {}))["topics"].items()
        }
        pairs: list[tuple[NamespaceMapping, str, str]] = []
        for mapping in link.topic_mappings:
            names = {name for name, topic in topics.items() if _holds(mapping, topic)}
            names |= {name for remote in there if (name := mapping.local_name(remote)) is not None}
            pairs += [(mapping, name, mapping.remote_name(name) or "") for name in sorted(names)]
        counter = _Counter(progress)
        limit = asyncio.Semaphore(AT_ONCE)
        jobs = []
        for mapping, name, remote in pairs:
            remote_ends: list[list[int]] = []
            compacts = False
            if remote in there:
                try:
                    answer = await connection.call("ends", {"topic": remote})
                    remote_ends, compacts = answer["partitions"], bool(answer["compacts"])
                except LinkRejected:
                    pass  # deleted since then
            local = topics.get(name)
            for partition in range(max(len(remote_ends), 0 if local is None else len(local.partitions))):
                remote_end = Ends(*remote_ends[partition]) if partition < len(remote_ends) else None
                jobs.append(Comparison(self, connection, name, local, remote, partition, mapping, remote_end, compacts))
        verdicts = await asyncio.gather(*(job.run(limit, counter) for job in jobs))
        groups = await self.groups.verify(link, connection)
        found = [verdict.equal for verdict in verdicts] + [verdict.equal for verdict in groups]
        return VerifyReport(
            link_name=link.name,
            equal=bool(found) and all(found),
            records=sum(verdict.records for verdict in verdicts),
            seconds=round(monotonic() - started, 3),
            partitions=list(verdicts),
            groups=groups,
        )


def _holds(mapping: NamespaceMapping, topic: TopicInfo) -> bool:
    """Whether a local topic is one of a mapping's: of Kafka's own, the offsets topic alone may be."""
    return mapping.remote_name(topic.name) is not None and (not topic.internal or mapping.offsets is not None)


class _Counter:
    """Offsets compared, of how many."""

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

    def __init__(
        self,
        verification: Verification,
        connection: LinkConnection,
        name: str,
        topic: TopicInfo | None,
        remote: str,
        partition: int,
        mapping: NamespaceMapping | None,
        remote_ends: Ends | None,
        compacts: bool,
    ) -> None:
        self._verification = verification
        self._connection = connection
        self._name = name
        self._local_topic = topic
        self._remote = remote
        self._partition = partition
        self._mapping = mapping
        self._remote_ends = remote_ends
        self._compacts = compacts
        self._records = 0

    async def run(self, limit: asyncio.Semaphore, counter: _Counter) -> PartitionVerdict:
        async with limit:
            try:
                return await self._compare(counter)
            except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, OperationError, BatchError) as error:
                return self._verdict(0, 0, Ends(0, 0, 0), f"not compared: {str(error) or type(error).__name__}")

    @property
    def _topic(self) -> TopicInfo:
        assert self._local_topic is not None
        return self._local_topic

    async def _compare(self, counter: _Counter) -> PartitionVerdict:
        if self._local_topic is None or self._partition >= len(self._local_topic.partitions):
            return self._verdict(0, 0, Ends(0, 0, 0), f"{self._name}-{self._partition} does not exist on this cluster")
        here = await self._verification.ends(self._topic, self._partition)
        there = self._remote_ends
        if there is None:
            missing = f"{self._remote}-{self._partition}"
            return self._verdict(0, 0, here, f"{missing} does not exist on the other cluster")
        start, to = max(here.log_start, there.log_start), min(here.high_watermark, there.high_watermark)
        counter.expect(max(0, to - start))
        if here.log_start != there.log_start:
            return self._verdict(start, start, here, f"the logs start at {here.log_start} and {there.log_start}")
        if self._mapping is not None and not is_compared(self._mapping):
            return await self._counted(self._mapping, here, there, counter)
        difference = await self.first_difference(start, to, here, there, counter.add)
        if difference is not None:
            return self._verdict(start, difference, here, self._what(difference))
        return self._verdict(start, to, here, None)

    async def first_difference(
        self, start: int, to: int, here: Ends, there: Ends, compared: Callable[[int], None]
    ) -> int | None:
        """The first offset of ``[start, to)`` at which the records differ, None if they do not.

        ``compared`` is told how many offsets are equal, piece by piece. Raises LinkRejected, LinkLost, TimeoutError,
        OperationError, BatchError.
        """
        offset = start
        while offset < to:
            mine = await self._local(offset, to, BATCHES, CHUNK_BYTES)
            reached = mine.to
            theirs = await self._far(offset, reached, BATCHES)
            if mine.digest != theirs.digest:
                difference, reached = await self._lasting_difference(start, offset, reached, to, here, there)
                if difference is not None:
                    return difference
            self._records += mine.records
            compared(reached - offset)
            offset = reached
        return None

    async def _counted(self, mapping: NamespaceMapping, here: Ends, there: Ends, counter: _Counter) -> PartitionVerdict:
        """The verdict on an offsets topic and its copy in another form."""
        assert mapping.offsets is not None
        leads = mapping.role is Role.LEADER
        source, copy = (here, there) if leads else (there, here)
        until = min(source.last_stable_offset, copy.high_watermark)
        mine = await self._verification.count_offsets(mapping, self._topic, self._partition, until)
        asked = {"topic": self._remote, "partition": self._partition, "until": until}
        theirs = int((await self._connection.call("count_offsets", asked, timeout_s=120))["records"])
        leaving, copied = (mine, theirs) if leads else (theirs, mine)
        counter.add(max(0, until - here.log_start))
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
        self, start: int, offset: int, to: int, last: int, here: Ends, there: Ends
    ) -> tuple[int | None, int]:
        """Where ``[offset, to)`` differs, if it does so for a while, since both sides may be on the move; and up to
        where that was looked at, at most ``last``.

        Either cleaner takes out what a later record makes superfluous, wherever that stands: of compacted topics, the
        latest records of all that is stable are compared at once. Above that nothing has been cleaned.
        """
        difference, reached = None, to
        for again in range(RECHECK_TIMES):
            difference, reached = await self._first_difference(offset, to), to
            if difference is not None and await self._is_cleaned():
                if again:  # the source's cleaner may have been where the follower was not yet
                    here, there = await self._limits()
                stable = min(here.last_stable_offset, there.last_stable_offset)
                if offset < stable:
                    difference = await self._first_latest_difference(start, stable)
                    reached = min(last, max(to, stable))
                    if difference is None and stable < to:
                        difference = await self._first_difference(stable, to)
            if difference is None or again == RECHECK_TIMES - 1:
                break
            await asyncio.sleep(RECHECK_S)
        return difference, reached

    async def _limits(self) -> tuple[Ends, Ends]:
        """Both logs' limits now, the own one's first."""
        answer = await self._connection.call("ends", {"topic": self._remote})
        here = await self._verification.ends(self._topic, self._partition)
        return here, Ends(*answer["partitions"][self._partition])

    async def _is_cleaned(self) -> bool:
        return self._compacts or await self._verification.compacts(self._topic.name, self._topic.topic_id)

    async def _first_difference(self, offset: int, to: int) -> int | None:
        """The first offset at which the records differ, None if they do not: batches may be cut differently."""
        if (await self._local(offset, to, RECORDS, None)).digest == (await self._far(offset, to, RECORDS)).digest:
            return None
        while to - offset > 1:
            middle = (offset + to) // 2
            mine, theirs = await self._local(offset, middle, RECORDS, None), await self._far(offset, middle, RECORDS)
            if mine.digest == theirs.digest:
                offset = middle
            else:
                to = middle
        return offset

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
        mine = await self._verification.latest(self._topic, self._partition, until, offset, to)
        return mine.digest == (await self._far(offset, to, LATEST, until)).digest

    async def _local(self, offset: int, to: int, level: str, bytes_max: int | None) -> Digest:
        return await self._verification.digest(self._topic, self._partition, offset, to, level, bytes_max)

    async def _far(self, offset: int, to: int, level: str, until: int = 0) -> Digest:
        answer = await self._connection.call(
            "digest",
            {
                "topic": self._remote,
                "partition": self._partition,
                "from": offset,
                "to": to,
                "level": level,
                "until": until,
            },
            timeout_s=120,
        )
        return Digest(str(answer["digest"]), int(answer["records"]), int(answer["to"]))

    def _what(self, offset: int) -> str:
        return f"the records at offset {offset} differ"

    def _verdict(self, start: int, to: int, here: Ends, difference: str | None) -> PartitionVerdict:
        there = self._remote_ends or Ends(0, 0, 0)
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
