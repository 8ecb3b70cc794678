"""Records of ``__transaction_state`` as a coordinator writes them, for unit tests and simulations."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import BatchHeader
from isthmus_protocol.transaction_log import Transaction
from isthmus_protocol.wire import write_uvarint

NONE = b"\x00"


def state_key(transactional_id: str) -> bytes:
    return b"\x00\x00" + _string(transactional_id)


def state_value(transaction: Transaction, version: int = 1) -> bytes:
    flexible = version == 1
    head = struct.pack(
        ">hqhib", version, transaction.producer_id, transaction.producer_epoch, 60_000, transaction.state
    )
    topics: dict[str, list[int]] = {}
    for topic, partition in transaction.partitions:
        topics.setdefault(topic, []).append(partition)
    body = _count(len(topics), flexible)
    for topic, partitions in topics.items():
        body += _compact(topic) if flexible else _string(topic)
        body += _count(len(partitions), flexible) + b"".join(struct.pack(">i", index) for index in partitions)
        body += NONE if flexible else b""
    times = struct.pack(">qq", 1_700_000_000_001, transaction.started_ms)
    tags = b"\x01\x02\x02" + struct.pack(">h", transaction.client_version) if transaction.client_version else NONE
    return head + body + times + (tags if flexible else b"")


def state_batch(base_offset: int, records: Sequence[tuple[bytes, bytes | None]], leader_epoch: int = 0) -> bytes:
    made = [Record(base_offset + index, 1, key, value) for index, (key, value) in enumerate(records)]
    return encode_batch(made, BatchHeader(base_offset, 0, leader_epoch, 2, 0, 0, 0, 1, 1, -1, -1, -1, 1))


def _count(count: int, flexible: bool) -> bytes:
    return write_uvarint(count + 1) if flexible else struct.pack(">i", count)


def _compact(text: str) -> bytes:
    return write_uvarint(len(text.encode()) + 1) + text.encode()


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text.encode())) + text.encode()
