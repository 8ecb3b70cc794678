"""The records of ``__consumer_offsets``, and the groups' committed offsets that a partition of it adds up to.

Each record's key starts with its type (16 bits); every known type goes on with the group's id. Values of offset commits
start with their version:

    key   0, 1      offset commit      group string, topic string, partition int32
    key   2 .. 23   the group itself   group string, what else there is does not matter here
    value 0, 2      offset int64, metadata string, commit time int64
    value 1         the same, then expiry time int64 (-1: none)
    value 3         offset int64, leader epoch int32, metadata string, commit time int64
    value 4         the same with a compact string, then tagged fields

A value of null (a tombstone) deletes: an offset that expired or was deleted, a group that is gone. Commits inside a
transaction count from its commit marker on; of two commits the one that stands later in the log wins, as in the
coordinator, so a plain commit that came while the transaction was open stays.

A type or version that is not listed here is no reason to guess: it is reported (:class:`OffsetsLog`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from isthmus_protocol.record_codec import Marker, Record, decode_control, decode_records
from isthmus_protocol.records import BatchHeader, Frame
from isthmus_protocol.wire import MalformedFrame, read_compact_string, read_string, skip_tags

OFFSETS_TOPIC: Final = "__consumer_offsets"

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")
_OFFSET_COMMIT_TYPES: Final = (0, 1)
_GROUP_TYPES: Final = frozenset(range(2, 24))
_TIMED: Final = (0, 1, 2)
"""Versions of an offset commit's value that have no leader epoch."""


class UnknownRecord(ValueError):
    """A record of a type or version that a newer broker wrote."""


class GroupKind(StrEnum):
    """What a group is to its coordinator."""

    CLASSIC = "classic"
    CONSUMER = "consumer"
    """KIP-848."""
    SHARE = "share"
    STREAMS = "streams"


_KINDS: Final = {2: GroupKind.CLASSIC, 3: GroupKind.CONSUMER, 11: GroupKind.SHARE, 17: GroupKind.STREAMS}
"""Types of the records that say that a group exists."""


class OffsetKey(NamedTuple):
    """Whose committed offset a record is."""

    group: str
    topic: str
    partition: int


class GroupKey(NamedTuple):
    """Any other record of a group. ``kind`` is set for those that say that the group exists."""

    group: str
    kind: GroupKind | None


class Commit(NamedTuple):
    """A committed offset."""

    offset: int
    metadata: str
    committed_ms: int
    """The coordinator's wall clock."""
    log_offset: int
    """Where the commit stands in the offsets log."""


def decode_key(key: bytes) -> OffsetKey | GroupKey:
    """A record's key. Raises UnknownRecord, and MalformedFrame for bytes that are none."""
    try:
        (type_,) = _INT16.unpack_from(key)
        if type_ in _OFFSET_COMMIT_TYPES:
            group, position = read_string(key, 2)
            topic, position = read_string(key, position)
            return OffsetKey(group, topic, _INT32.unpack_from(key, position)[0])
        if type_ in _GROUP_TYPES:
            return GroupKey(read_string(key, 2)[0], _KINDS.get(type_))
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrame(f"a key of the offsets log: {error}") from error
    raise UnknownRecord(f"type {type_}")


def decode_commit(value: bytes, log_offset: int) -> Commit:
    """The value of an offset commit. Raises UnknownRecord, and MalformedFrame for bytes that are none."""
    try:
        (version,) = _INT16.unpack_from(value)
        (offset,) = _INT64.unpack_from(value, 2)
        if version in _TIMED:
            metadata, position = read_string(value, 10)
        elif version == 3:
            metadata, position = read_string(value, 14)
        elif version == 4:
            metadata, position = read_compact_string(value, 14)
        else:
            raise UnknownRecord(f"offset commit of version {version}")
        (committed_ms,) = _INT64.unpack_from(value, position)
        end = skip_tags(value, position + 8) if version == 4 else position + (16 if version == 1 else 8)
        if end > len(value):
            raise MalformedFrame(f"an offset commit of version {version} that is cut")
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"an offset commit: {error}") from error
    return Commit(offset, metadata, committed_ms, log_offset)


def partition_of(group: str, partitions: int) -> int:
    """The partition of the offsets topic that a group's records are in: Java's hash of its id."""
    hashed = 0
    for unit in struct.iter_unpack(">H", group.encode("utf-16-be", "surrogatepass")):
        hashed = (31 * hashed + unit[0]) & 0xFFFFFFFF
    signed = hashed - (1 << 32) if hashed >= 1 << 31 else hashed
    return (0 if signed == -(1 << 31) else abs(signed)) % partitions


class Group:
    """One group, as the log has it so far."""

    __slots__ = ("counts_from", "kind", "offsets", "unreadable")

    def __init__(self) -> None:
        self.kind: GroupKind | None = None
        """None: the coordinator knows committed offsets of it and nothing else."""
        self.offsets: dict[tuple[str, int], Commit] = {}
        """By (topic, partition)."""
        self.counts_from: dict[tuple[str, int], int] = {}
        """Of each of them, where in the log it came to count: at the marker, if it was in a transaction."""
        self.unreadable: dict[tuple[str, int], str] = {}
        """Partitions whose newest commit is of a version that is not known, and what it is."""

    @property
    def is_empty(self) -> bool:
        return self.kind is None and not self.offsets and not self.unreadable


class OffsetsLog:
    """What one partition of the offsets topic adds up to, for the groups that are ``wanted``. Takes it in order."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self.groups: dict[str, Group] = {}
        self.unknown: dict[str, int] = {}
        """Records that are not known: what they are, and where the last of each stands."""
        self._open: dict[int, dict[OffsetKey, Commit | str]] = {}
        """By producer id: commits of its open transaction (or what of them cannot be read)."""
        self._since: dict[int, tuple[int, int]] = {}
        """By producer id with such commits: its epoch, and where they begin."""
        self._pending_news: dict[tuple[int, OffsetKey], None] = {}
        self._undone = False

    def take(self, batch: Frame, header: BatchHeader) -> set[OffsetKey]:
        """Take one batch; the committed offsets that it changed. Raises BatchError."""
        if header.is_control:
            if not header.record_count:
                return set()  # the cleaner has taken the marker out: nothing of its transaction is left either
            control = decode_control(batch)
            pending = self._open.pop(control.producer_id, {})
            self._since.pop(control.producer_id, None)
            if control.marker is Marker.ABORT:
                self._undone = self._undone or bool(pending)
                return set()
            return {key for key, found in pending.items() if self._put(key, found, header.base_offset)}
        transaction = self._open.setdefault(header.producer_id, {}) if header.is_transactional else None
        records = decode_records(batch)
        changed = {key for record in records if (key := self._record(record, transaction, header)) is not None}
        if transaction:
            _, since = self._since.get(header.producer_id, (0, header.base_offset))
            self._since[header.producer_id] = header.producer_epoch, since
        return changed

    # ---- open transactions ----

    def take_pending_news(self) -> dict[tuple[int, OffsetKey], None]:
        """Commits of open transactions (by producer id) that came, or were deleted, since this was asked last."""
        news, self._pending_news = self._pending_news, {}
        return news

    def take_undone(self) -> bool:
        """Whether, since this was asked last, a transaction with commits was aborted, or a committed offset went back
        or away.

        Then what transactions had committed before may not be put over what there is now.
        """
        undone, self._undone = self._undone, False
        return undone

    def open_since(self) -> dict[int, int]:
        """By producer with commits of an open transaction: where these begin."""
        return {producer_id: since for producer_id, (_, since) in self._since.items()}

    def pending(self) -> Iterator[tuple[int, OffsetKey]]:
        """All commits of open transactions, by producer id."""
        return ((producer_id, key) for producer_id, commits in self._open.items() for key in commits)

    def pending_commit(self, producer_id: int, key: OffsetKey) -> tuple[int, Commit | str | None] | None:
        """The producer's epoch, and what is committed (a text: why it cannot be read; None: it was deleted).

        None: the transaction has ended.
        """
        known = self._since.get(producer_id)
        return None if known is None else (known[0], self._open[producer_id].get(key))

    @property
    def has_unreadable_pending(self) -> bool:
        """Whether some commit of an open transaction cannot be read."""
        return any(isinstance(found, str) for commits in self._open.values() for found in commits.values())

    def first_open(self, default: int) -> int:
        """All transactions with commits before this offset have ended."""
        return min((since for _, since in self._since.values()), default=default)

    def _record(
        self, record: Record, transaction: dict[OffsetKey, Commit | str] | None, header: BatchHeader
    ) -> OffsetKey | None:
        try:
            key = decode_key(record.key or b"")
        except (UnknownRecord, MalformedFrame) as error:
            self.unknown[str(error)] = record.offset
            return None
        if not self._wanted(key.group):
            return None
        if isinstance(key, GroupKey):
            if key.kind is not None:
                self._exists(key.group, key.kind, record.value is not None)
            return None
        if record.value is None:
            return key if self._delete(key) else None
        found: Commit | str
        try:
            found = decode_commit(record.value, record.offset)
        except (UnknownRecord, MalformedFrame) as error:
            found = f"{error}, at offset {record.offset}"
        if transaction is not None:
            transaction[key] = found
            self._pending_news[header.producer_id, key] = None
            return None
        return key if self._put(key, found, record.offset) else None

    def _exists(self, name: str, kind: GroupKind, exists: bool) -> None:
        group = self.groups.setdefault(name, Group())
        if exists:
            group.kind = kind
        elif group.kind is kind:  # a classic group that became a consumer group ends, and does not
            group.kind = None
        self._drop_if_empty(name, group)

    def _put(self, key: OffsetKey, found: Commit | str, at: int) -> bool:
        group = self.groups.setdefault(key.group, Group())
        place = key.topic, key.partition
        if isinstance(found, str):
            group.unreadable[place] = found
            return True
        known = group.offsets.get(place)
        if known is not None and known.log_offset > found.log_offset:
            return False
        group.unreadable.pop(place, None)
        group.offsets[place], group.counts_from[place] = found, at
        self._undone = self._undone or (known is not None and found.offset < known.offset)
        return True

    def _delete(self, key: OffsetKey) -> bool:
        for producer_id, pending in self._open.items():
            if pending.pop(key, None) is not None:
                self._pending_news[producer_id, key] = None
        group = self.groups.get(key.group)
        if group is None:
            return False
        place = key.topic, key.partition
        was_unreadable = group.unreadable.pop(place, None) is not None
        existed = group.offsets.pop(place, None) is not None
        group.counts_from.pop(place, None)
        self._undone = self._undone or existed
        self._drop_if_empty(key.group, group)
        return existed or was_unreadable

    def _drop_if_empty(self, name: str, group: Group) -> None:
        if group.is_empty:
            self.groups.pop(name, None)
