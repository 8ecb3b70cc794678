"""The records of ``__transaction_state``: what the coordinator of a transactional id has decided.

    key   0   transactional id string
    value 0   producer id int64, producer epoch int16, timeout int32, state int8, partitions [topic string, [int32]]
              (null: none), last update int64, start int64
    value 1   the same with compact strings and arrays and tagged fields: 0 previous producer id int64, 1 next producer
              id int64, 2 the client's version of transactions int16

Keys and values begin with their version (16 bits). A value of null deletes the id. The topic is compacted by id.

A version that is not listed here is no reason to guess: it is reported (:class:`TransactionLog`).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from isthmus_protocol.offsets_log import UnknownRecord, partition_of
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import BatchHeader, Frame
from isthmus_protocol.wire import MalformedFrame, read_compact_string, read_string, read_uvarint

__all__ = (
    "TRANSACTION_TOPIC",
    "Change",
    "Transaction",
    "TransactionLog",
    "TransactionState",
    "UnknownRecord",
    "decode_key",
    "decode_value",
    "partition_of",
)

TRANSACTION_TOPIC: Final = "__transaction_state"
CLIENT_VERSION_TAG: Final = 2
EPOCH_FOR_EACH: Final = 2
"""From this version of transactions on (KIP-890), each transaction of a producer has an epoch of its own."""

_INT8: Final = struct.Struct(">b")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_TIMES: Final = struct.Struct(">qq")
"""Of the last update, and of the transaction's start."""
_HEAD: Final = struct.Struct(">hqhib")
"""Version, producer id, producer epoch, timeout, state."""


class TransactionState(IntEnum):
    """As the coordinator numbers them."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    """Decided: its markers are being written."""
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7


class Transaction(NamedTuple):
    """The state of one transactional id."""

    producer_id: int
    producer_epoch: int
    """Of a decided one: that of its markers."""
    state: TransactionState
    partitions: tuple[tuple[str, int], ...]
    """(topic, partition) of all that it touches; of group offsets those of the offsets topic."""
    client_version: int = 0
    started_ms: int = 0
    """When it began, by the coordinator's clock; -1 if it did not."""

    @property
    def data_epoch(self) -> int:
        """The epoch of the records of a decided one: the decision itself may have raised the producer's."""
        return self.producer_epoch - (not self.shares_epoch)

    @property
    def shares_epoch(self) -> bool:
        """Whether the producer's next transaction may have the same epoch."""
        return self.client_version < EPOCH_FOR_EACH

    def is_under_way(self, producer_id: int, epoch: int) -> bool:
        """Whether it is one of a producer, with this epoch, that was begun and not decided."""
        return (self.producer_id, self.producer_epoch, self.state) == (producer_id, epoch, TransactionState.ONGOING)


class Change(NamedTuple):
    """A transactional id has another state."""

    transactional_id: str
    transaction: Transaction | None
    """None: the id was deleted, or what was written of it cannot be read."""
    offset: int
    epoch: int = -1
    """The leader epoch in which it was written: a log that lost its end uses offsets again."""


def decode_key(key: bytes) -> str:
    """The transactional id. Raises UnknownRecord, and MalformedFrame for bytes that are none."""
    try:
        (version,) = _INT16.unpack_from(key)
        if version != 0:
            raise UnknownRecord(f"key of version {version}")
        transactional_id, end = read_string(key, 2)
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrame(f"a key of the transaction log: {error}") from error
    if end != len(key):
        raise MalformedFrame(f"a key of the transaction log with {len(key) - end} bytes more")
    return transactional_id


def decode_value(value: bytes) -> Transaction:
    """The state of an id. Raises UnknownRecord, and MalformedFrame for bytes that are none."""
    try:
        (version,) = _INT16.unpack_from(value)
        if version not in (0, 1):
            raise UnknownRecord(f"transaction of version {version}")
        _, producer_id, producer_epoch, _, number = _HEAD.unpack_from(value)
        try:
            state = TransactionState(number)
        except ValueError:
            raise UnknownRecord(f"transaction in state {number}") from None
        flexible = version == 1
        partitions, position = _partitions(value, _HEAD.size, flexible)
        _, started_ms = _TIMES.unpack_from(value, position)
        position += _TIMES.size
        tags, position = _tags(value, position) if flexible else ({}, position)
        client_version = tags.get(CLIENT_VERSION_TAG)
        client = 0 if client_version is None else _INT16.unpack(client_version)[0]
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"a transaction: {error}") from error
    if position != len(value):
        raise MalformedFrame(f"a transaction of version {version} with {len(value) - position} bytes more")
    return Transaction(producer_id, producer_epoch, state, partitions, client, started_ms)


def _partitions(value: bytes, position: int, flexible: bool) -> tuple[tuple[tuple[str, int], ...], int]:
    found: list[tuple[str, int]] = []
    topics, position = _count(value, position, flexible)
    for _ in range(topics):
        topic, position = read_compact_string(value, position) if flexible else read_string(value, position)
        indexes, position = _count(value, position, flexible)
        for _ in range(indexes):
            found.append((topic, _INT32.unpack_from(value, position)[0]))
            position += _INT32.size
        if flexible:
            _, position = _tags(value, position)
    return tuple(found), position


def _count(value: bytes, position: int, flexible: bool) -> tuple[int, int]:
    """The number of an array's elements, 0 for null."""
    if flexible:
        count, position = read_uvarint(value, position)
        count -= 1
    else:
        (count,) = _INT32.unpack_from(value, position)
        position += _INT32.size
    if count > len(value) - position:
        raise MalformedFrame(f"{count} elements in {len(value) - position} bytes")
    return max(0, count), position


def _tags(value: bytes, position: int) -> tuple[dict[int, bytes], int]:
    count, position = read_uvarint(value, position)
    tags = {}
    for _ in range(count):
        tag, position = read_uvarint(value, position)
        size, position = read_uvarint(value, position)
        tags[tag] = value[position : position + size]
        position += size
    return tags, position


class TransactionLog:
    """What one partition of the transaction log adds up to. Takes it in order."""

    def __init__(self) -> None:
        self.latest: dict[str, Transaction] = {}
        """By transactional id."""
        self.unreadable: dict[str, str] = {}
        """Ids whose latest state cannot be read, and why."""
        self.unknown: dict[str, int] = {}
        """Records of which it is not known whose they are: why, and where the last of each stands."""

    def take(self, batch: Frame, header: BatchHeader) -> list[Change]:
        """Take one batch; what changed, in order. Raises BatchError."""
        if header.is_control:
            return []
        changes: list[Change] = []
        for record in decode_records(batch):
            try:
                transactional_id = decode_key(record.key or b"")
            except (UnknownRecord, MalformedFrame) as error:
                self.unknown[str(error)] = record.offset
                continue
            transaction: Transaction | None = None
            self.unreadable.pop(transactional_id, None)
            self.latest.pop(transactional_id, None)
            if record.value is not None:
                try:
                    transaction = self.latest[transactional_id] = decode_value(record.value)
                except (UnknownRecord, MalformedFrame) as error:
                    self.unreadable[transactional_id] = f"{error}, at offset {record.offset}"
            changes.append(Change(transactional_id, transaction, record.offset, header.leader_epoch))
        return changes
