"""Digests of this cluster's partitions: what stands for the records of a range, so that a link carries 16 bytes.

"Equal" is the project's one definition (docs/operations.md). Each side's cleaner comes by when it likes: of compacted
topics, the latest record of each key counts. Copies of offsets topics that are not whole are counted
(``offsets_topic.counting``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from isthmus_control.model import NamespaceMapping
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, id_as_text
from isthmus_plugins.decompression import decompressed, in_steps
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs.reading import CHUNK_BYTES, Reads, read_batches
from isthmus_plugins.replication.logs.topic_settings import CLEANUP_POLICY, is_compacted
from isthmus_plugins.replication.offsets_topic.counting import OffsetsCount, is_compared
from isthmus_plugins.replication.offsets_topic.keyring import KeyringFile
from isthmus_protocol.record_codec import decode_in_steps
from isthmus_protocol.record_equality import LatestDigest, RecordsDigest, batch_digest
from isthmus_protocol.records import BatchError, verify_crc

BATCHES: Final = "batches"
CHECKED: Final = "checked"
RECORDS: Final = "records"
CONTENTS: Final = "contents"
MARKED: Final = "marked"
LATEST: Final = "latest"
UNKNOWN_TOPIC: Final = "UNKNOWN_TOPIC"
"""Why a peer is told nothing of a topic: there is none, or it is none of the link's."""
UNREADABLE: Final = "BATCH_UNREADABLE"
"""What the log has is no batch, or does not match its CRC: no consumer reads it."""
TOO_MANY_KEYS: Final = "TOO_MANY_KEYS"
READ_BYTES_MIN: Final = 64 * 1024
"""What a peer's range is read in at least."""


class Digest(NamedTuple):
    """What stands for the records of ``[from, to)`` of one partition."""

    digest: str
    records: int
    to: int
    """Where the reading ended: asked for, or, for a first reader, the end of a batch after enough bytes."""


class Verification(Part):
    """Digests and counts of this cluster's partitions, for both ends."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._offsets_count = OffsetsCount(KeyringFile(context.offsets_keyring_file))

    def answers(self) -> Sequence[Answering]:
        return (
            calls.Digest.by(self.on_digest),
            calls.DigestsAt.by(self.on_digests_at),
            calls.TopicLimits.by(self.on_ends),
            calls.CountOffsets.by(self.on_count_offsets),
        )

    # ---- reading ----

    async def ends(self, topic: TopicInfo, partition: int) -> calls.Ends:
        """The log's limits. Raises BrokerUnavailable."""
        cluster = self._context.cluster
        return calls.Ends(
            await cluster.log_start(topic.name, partition),
            await cluster.high_watermark(topic.name, partition),
            await cluster.last_stable_offset(topic.name, partition),
        )

    async def digest(
        self,
        topic: TopicInfo,
        partition: int,
        offset: int,
        to: int,
        level: str,
        reads: Reads | None = None,
        once: bool = False,
    ) -> Digest:
        """The digest of ``[offset, to)``; ``once``: up to the last whole batch of one read.

        Levels: BATCHES, whole batches; CHECKED, the same up to the first that does not match its CRC; RECORDS, records
        and whether they were aborted; CONTENTS, records alone; MARKED, records and markers, whatever comes after them.
        Raises OperationError, BatchError.
        """
        own_index = self._context.control.state.producer_id_ranges[self._context.cluster_id]
        whole = blake2b(digest_size=16)
        single = RecordsDigest()
        records = 0
        reached = to
        if level in (CONTENTS, MARKED):
            async for batch, _, _ in read_batches(self._context, topic, partition, offset, to, reads=reads):
                if level == MARKED:
                    await in_steps(single.adding_marked(batch, decompressed(batch), offset, to))
                else:
                    await in_steps(single.adding(batch, decompressed(batch), from_offset=offset, to_offset=to))
            return Digest(single.digest().hex(), single.records, to)
        if level == RECORDS:
            read = offset
            async for batch, header, aborted in read_batches(
                self._context, topic, partition, offset, to, read_committed=True, reads=reads
            ):
                await in_steps(
                    single.adding(batch, decompressed(batch), from_offset=offset, to_offset=to, aborted=aborted)
                )
                read = header.next_offset
            if read < to:  # beyond the last stable offset nothing was aborted yet
                async for batch, _, _ in read_batches(self._context, topic, partition, read, to, reads=reads):
                    await in_steps(single.adding(batch, decompressed(batch), from_offset=read, to_offset=to))
            return Digest(single.digest().hex(), single.records, to)
        read = offset
        batches = read_batches(self._context, topic, partition, offset, to, reads=reads, once=once)
        try:
            async for batch, header, _ in batches:
                if level == CHECKED:
                    verify_crc(batch, header)
                if header.base_offset >= offset and header.next_offset <= to:
                    whole.update(header.base_offset.to_bytes(8, "big"))
                    whole.update(batch_digest(batch, own_index, header))
                    records += 0 if header.is_control else header.record_count
                else:
                    await in_steps(single.adding(batch, decompressed(batch), from_offset=offset, to_offset=to))
                    whole.update(b"cut")
                read = header.next_offset
        except BatchError:
            if level != CHECKED or read == offset:
                raise
            once = True  # the next reading begins with what cannot be read
        if once and read > offset:
            reached = min(to, read)
        return Digest(whole.hexdigest() + single.digest().hex(), records + single.records, reached)

    async def latest(
        self,
        topic: TopicInfo,
        partition: int,
        until: int,
        offset: int,
        to: int,
        reads: Reads | None = None,
        keys_max: int | None = None,
    ) -> Digest:
        """The digest of those records in ``[offset, to)`` that are the latest of their keys before ``until``.

        Raises OperationError, TOO_MANY_KEYS where there are more than ``keys_max``.
        """
        found = LatestDigest()
        start = await self._context.cluster.log_start(topic.name, partition)
        async for batch, _, aborted in read_batches(
            self._context, topic, partition, start, until, read_committed=True, reads=reads
        ):
            if not aborted:
                await in_steps(found.adding(batch, decompressed(batch), start, until))
            if keys_max is not None and found.keys > keys_max:
                raise OperationError(TOO_MANY_KEYS, f"{topic.name}-{partition} has more than {keys_max} keys", 503)
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
                    await in_steps(found.adding(batch, decompressed(batch), first, at))
                digests.append((at, found.total.hex()))
                first = max(first, at)
            if not aborted:
                await in_steps(found.adding(batch, decompressed(batch), first))
        return digests + [(at, found.total.hex()) for at in offsets[len(digests) :]]

    async def may_be_gone(self, topic: str, partition: int, offset: int) -> bool:
        """Whether a cleaner may have taken what this log has at an offset from a log in which nothing comes after it.

        It takes tombstones, records without a key, what was aborted, and markers. Raises BrokerUnavailable.
        """
        info = await self._context.cluster.topic(topic)
        if info is None:
            raise BrokerUnavailable(f"{topic} does not exist")
        try:
            async for batch, header, aborted in read_batches(
                self._context, info, partition, offset, offset + 1, read_committed=True
            ):
                if header.is_control or aborted:
                    continue
                for records in decode_in_steps(batch, decompressed(batch)):
                    for record in records:
                        if record.offset == offset and record.key is not None and record.value is not None:
                            return False
                    await asyncio.sleep(0)
        except (OperationError, BatchError) as error:
            raise BrokerUnavailable(str(error)) from error
        return await self._context.cluster.last_stable_offset(topic, partition) > offset

    async def digest_of(self, topic: str, partition: int, offset: int, to: int) -> Digest:
        """The digest of the records of ``[offset, to)``, whatever became of them. Raises BrokerUnavailable."""
        info = await self._context.cluster.topic(topic)
        if info is None:
            raise BrokerUnavailable(f"{topic} does not exist")
        try:
            return await self.digest(info, partition, offset, to, CONTENTS)
        except (OperationError, BatchError) as error:
            raise BrokerUnavailable(str(error)) from error

    async def compacts(self, topic: str, topic_id: bytes, configs: Mapping[str, str] | None = None) -> bool:
        """Whether this cluster's cleaner compacts a topic, or did so while it followed. Raises BrokerUnavailable.

        ``configs``: its settings, where they are known.
        """
        record = self._context.control.state.follower_topics.get(topic)
        if record is not None and record.cleaned and record.topic_id == id_as_text(topic_id):
            return True
        if configs is not None:
            return is_compacted(configs)
        try:
            found = await self._context.cluster.topic_configs(topic, [CLEANUP_POLICY])
        except KafkaRefused as error:
            raise BrokerUnavailable(str(error)) from error
        return is_compacted({CLEANUP_POLICY: found[CLEANUP_POLICY][0]})

    # ---- the peer's calls ----

    async def on_digest(self, connection: LinkConnection, question: calls.Digest) -> calls.DigestAnswer:
        """The digest of a range of one of this cluster's partitions, for the peer that verifies."""
        topic, partition = await self._compared_topic(connection, question.topic), question.partition
        offset, to = question.offset, question.to
        try:
            if question.level == LATEST:
                if question.until is None:
                    raise LinkRejected("INVALID_REQUEST", "digest.until is missing")
                found = await self.latest(topic, partition, question.until, offset, to)
            else:
                size = CHUNK_BYTES if question.bytes is None else max(READ_BYTES_MIN, min(question.bytes, CHUNK_BYTES))
                found = await self.digest(topic, partition, offset, to, question.level, Reads(size))
        except BatchError as error:
            raise LinkRejected(UNREADABLE, str(error)) from error
        except (OperationError, BrokerUnavailable) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        return calls.DigestAnswer(*found)

    async def on_digests_at(self, connection: LinkConnection, question: calls.DigestsAt) -> calls.DigestsAtAnswer:
        """The digests of the latest records before some offsets, for the peer that looks for what both have."""
        topic = await self._compared_topic(connection, question.topic)
        try:
            found = await self.latest_at(topic, question.partition, question.offset, question.at)
        except (OperationError, BatchError, BrokerUnavailable) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        return calls.DigestsAtAnswer(tuple(digest for _, digest in found))

    async def _compared_topic(self, connection: LinkConnection, name: str) -> TopicInfo:
        topic, mapping = await self.linked_topic(connection, name)
        if not is_compared(mapping):  # digests would let it try out what it is not to know
            raise LinkRejected("NOT_COMPARED", f"{topic.name} is copied in a form that is not compared")
        return topic

    async def on_ends(self, connection: LinkConnection, question: calls.TopicLimits) -> calls.TopicLimitsAnswer:
        """The limits of each partition's log of one of this cluster's topics."""
        topic, _ = await self.linked_topic(connection, question.topic)
        try:
            ends = await asyncio.gather(*(self.ends(topic, partition) for partition in range(len(topic.partitions))))
            compacts = await self.compacts(topic.name, topic.topic_id)
        except BrokerUnavailable as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        return calls.TopicLimitsAnswer(tuple(ends), compacts)

    async def on_count_offsets(
        self, connection: LinkConnection, question: calls.CountOffsets
    ) -> calls.CountOffsetsAnswer:
        """How many records of an offsets topic leave, or its copy has, for the peer that verifies."""
        topic, mapping = await self.linked_topic(connection, question.topic)
        try:
            count = await self.count_offsets(mapping, topic, question.partition, question.until)
        except (OperationError, BatchError, BrokerUnavailable) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        return calls.CountOffsetsAnswer(count)

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
        topic = await self._context.cluster.topic(name) if mapping is not None else None
        if mapping is None or topic is None:
            raise LinkRejected(UNKNOWN_TOPIC, f"{name} is no topic of this link here")
        return topic, mapping
