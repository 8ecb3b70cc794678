"""What a copy of another cluster's offsets topic says of its groups, as far as it can be read here."""

from __future__ import annotations

from typing import Final

from isthmus_control.model import Link, NamespaceMapping
from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo
from isthmus_plugins.links import GroupOffset, GroupOffsets, OffsetsView
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_plugins.tasks import some_at_once
from isthmus_protocol.offsets_cipher import EMPTY_KEYRING, CipherError, Keyring, key_id_of
from isthmus_protocol.offsets_log import Group, OffsetsLog
from isthmus_protocol.producer_ids import is_filler
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import BatchError, BatchHeader, Frame

LANE: Final = "offsets-view"
AT_ONCE: Final = 4
"""Partitions that are read at the same time."""


class PartitionView:
    """One partition of the copy. Takes its batches in order."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._log = OffsetsLog(lambda group: True)
        self._closed: dict[bytes, bool] = {}
        """By encrypted key, of records whose key is missing: whether the last one has a value."""
        self.damaged = 0

    @property
    def groups(self) -> dict[str, Group]:
        return self._log.groups

    @property
    def unknown(self) -> dict[str, int]:
        return self._log.unknown

    @property
    def unreadable(self) -> list[bytes]:
        """Encrypted keys of what stands in the copy and cannot be read."""
        return [key for key, has_value in self._closed.items() if has_value]

    def take(self, batch: Frame, header: BatchHeader) -> None:
        """Raises BatchError."""
        if header.is_control or not header.record_count or is_filler(header.producer_id):
            return
        records = [plain for record in decode_records(batch) if (plain := self._opened(record)) is not None]
        if records:
            readable = encode_batch(records, header, compression=header.compression)
            self._log.take(readable, header)

    def _opened(self, record: Record) -> Record | None:
        try:
            plain = self._keyring.decrypt(record)
        except CipherError:
            self.damaged += 1
            return None
        if plain is None and record.key is not None:
            self._closed[record.key] = record.value is not None
        return plain


async def read_view(
    context: PluginContext, link: Link, mapping: NamespaceMapping, keyring: Keyring | None, group: str | None
) -> OffsetsView:
    """Read the whole copy. ``group``: of this one only. Raises BrokerUnavailable."""
    topic = (await context.cluster.topics()).get(mapping.local_prefix)
    partitions = range(0 if topic is None else len(topic.partitions))

    async def read(index: int) -> PartitionView:
        assert topic is not None
        return await _read_partition(context, topic, index, keyring or EMPTY_KEYRING)

    views = await some_at_once(AT_ONCE, read, partitions)
    assert mapping.offsets is not None
    closed = [key for view in views for key in view.unreadable]
    return OffsetsView(
        link_name=link.name,
        topic=mapping.local_prefix,
        source_cluster_id=link.remote_cluster_id,
        form=mapping.offsets.form.value,
        groups=[
            _group(name, found)
            for name, found in sorted((name, found) for view in views for name, found in view.groups.items())
            if group in (None, name)
        ],
        unreadable_records=len(closed),
        unreadable_key_ids=sorted({key_id.hex() for key in closed if (key_id := key_id_of(key)) is not None}),
        damaged_records=sum(view.damaged for view in views),
        unknown_records=sum(len(view.unknown) for view in views),
    )


async def _read_partition(context: PluginContext, topic: TopicInfo, index: int, keyring: Keyring) -> PartitionView:
    view = PartitionView(keyring)
    offset = await context.cluster.log_start(topic.name, index)
    end = await context.cluster.high_watermark(topic.name, index)
    try:
        async for batch, header, _ in read_batches(
            context, topic, index, offset, end, lane=f"{LANE}-{index % AT_ONCE}"
        ):
            view.take(batch, header)
            offset = header.next_offset
    except BatchError as error:
        raise BrokerUnavailable(f"{topic.name}-{index} cannot be read at offset {offset}: {error}") from error
    return view


def _group(name: str, group: Group) -> GroupOffsets:
    return GroupOffsets(
        group=name,
        kind=None if group.kind is None else group.kind.value,
        offsets=[
            GroupOffset(
                topic=topic,
                partition=partition,
                offset=committed.offset,
                metadata=committed.metadata,
                committed_ms=committed.committed_ms,
            )
            for (topic, partition), committed in sorted(group.offsets.items())
        ],
        unreadable_offsets=len(group.unreadable),
    )
