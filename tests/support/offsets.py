"""Records of ``__consumer_offsets`` as a coordinator writes them, for unit tests and simulations."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from isthmus_protocol.record_codec import Marker, Record, encode_batch
from isthmus_protocol.records import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader

KeyValue = tuple[bytes, bytes | None]


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack(">h", len(raw)) + raw


def commit_key(group: str, topic: str, partition: int = 0) -> bytes:
    return struct.pack(">h", 1) + _string(group) + _string(topic) + struct.pack(">i", partition)


def group_key(group: str, type_: int = 2) -> bytes:
    return struct.pack(">h", type_) + _string(group)


def commit(
    group: str, topic: str, offset: int, partition: int = 0, metadata: str = "", at_ms: int = 1_700_000_000_000
) -> KeyValue:
    value = struct.pack(">hqi", 3, offset, -1) + _string(metadata) + struct.pack(">q", at_ms)
    return commit_key(group, topic, partition), value


def deleted(group: str, topic: str, partition: int = 0) -> KeyValue:
    return commit_key(group, topic, partition), None


def group_made(group: str, type_: int = 2) -> KeyValue:
    return group_key(group, type_), b"\x00\x03"


def group_gone(group: str, type_: int = 2) -> KeyValue:
    return group_key(group, type_), None


def offsets_batch(
    base_offset: int,
    records: Iterable[KeyValue],
    producer_id: int = -1,
    producer_epoch: int = 0,
    at_ms: int = 1,
    leader_epoch: int = 0,
) -> bytes:
    """A batch of the offsets log; with a ``producer_id`` part of that producer's transaction."""
    made = [Record(base_offset + index, at_ms, key, value) for index, (key, value) in enumerate(records)]
    attributes = TRANSACTIONAL_BIT if producer_id >= 0 else 0
    header = _header(base_offset, attributes, producer_id, producer_epoch, at_ms)
    return encode_batch(made, header._replace(leader_epoch=leader_epoch))


def marker_batch(base_offset: int, producer_id: int, marker: Marker, producer_epoch: int = 0) -> bytes:
    record = Record(base_offset, 1, struct.pack(">hh", 0, marker), struct.pack(">hi", 0, 0))
    return encode_batch([record], _header(base_offset, TRANSACTIONAL_BIT | CONTROL_BIT, producer_id, producer_epoch))


def _header(
    base_offset: int, attributes: int, producer_id: int, producer_epoch: int = 0, at_ms: int = 1
) -> BatchHeader:
    epoch = producer_epoch if producer_id >= 0 else -1
    return BatchHeader(base_offset, 0, 0, 2, 0, attributes, 0, at_ms, at_ms, producer_id, epoch, epoch, 1)
