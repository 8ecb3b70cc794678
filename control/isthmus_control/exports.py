"""A control log as a file: what is needed to write it again, at the same offsets.

    offsets   0 .......... first-1 | first ........................ end-1
    file      (nothing)    snapshot | records, as they stand in the log

The snapshot is of the state in front of the first record. What stood below is written again as fillers, records without
a value, which every proxy passes over: so offsets, which much of the state refers to, mean the same in the log that is
written again.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from isthmus_control.anchors import LogRecord, RecentRecords, digest
from isthmus_control.codec import MalformedValue, UnknownField, canonical, from_json, parse
from isthmus_control.commands import Snapshot
from isthmus_control.control_state import ControlState
from isthmus_control.replica import Halted, Replica, load, take
from isthmus_control.sealing import Secret
from isthmus_control.signing import Signer

VERSION = 1


class MalformedExport(ValueError):
    """The file is no export, it is damaged, or a newer version wrote it."""


@dataclass(frozen=True, slots=True)
class _File:
    """``records``: base64 of each value, None where there is none. ``digest``: of them, as an anchor's."""

    isthmus_control_log: int
    cluster_id: str
    topic_id: str
    generation: int
    first: int
    digest: str
    snapshot: Snapshot | None
    records: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """Of the log in topic ``topic_id``. ``snapshot``: None where the records begin at offset 0."""

    cluster_id: str
    topic_id: str
    generation: int
    snapshot: Snapshot | None
    records: tuple[LogRecord, ...]

    @property
    def first(self) -> int:
        return self.records[0].offset

    @property
    def end(self) -> int:
        return self.records[-1].offset + 1

    def value(self, offset: int) -> bytes | None:
        """What belongs at an offset below the end; None: a filler."""
        return None if offset < self.first else self.records[offset - self.first].value

    def replica(self, signer: Signer | None = None) -> Replica:
        """The replica that has applied it, of a proxy with this control key. Raises Halted."""
        snapshot = self.snapshot
        state = ControlState(self.cluster_id) if snapshot is None else load(snapshot, self.cluster_id, signer)
        replica = Replica(state, signer)
        for record in self.records:
            replica.feed(record.offset, record.value)
        return replica

    def encode(self) -> bytes:
        values = (record.value for record in self.records)
        return canonical(
            _File(
                VERSION,
                self.cluster_id,
                self.topic_id,
                self.generation,
                self.first,
                digest(self.records),
                self.snapshot,
                tuple(None if value is None else base64.b64encode(value).decode() for value in values),
            )
        )


def export(replica: Replica, recent: RecentRecords, topic_id: str) -> Export | None:
    """What a proxy remembers of its log; None: it has no record yet."""
    state = replica.state
    for base in replica.bases():
        records = recent.since(base.applied_offset + 1)
        if records and records[-1].offset == state.applied_offset:
            snapshot = None if base.applied_offset < 0 else take(base)
            return Export(state.cluster_id, topic_id, state.generation, snapshot, tuple(records))
    return None


def decode(data: bytes, control_key: Secret | None = None, others: Iterable[Secret] = ()) -> Export:
    """Raises :class:`MalformedExport` where it cannot be written as a log, or where its records are signed with another
    control key."""
    try:
        raw: Any = parse(data)
        if type(raw) is not dict or raw.get("isthmus_control_log") != VERSION:
            raise MalformedExport("it is no export of a control log, or one of another version")
        file = from_json(_File, raw, "export")
        values = [None if text is None else base64.b64decode(text, validate=True) for text in file.records]
    except (MalformedValue, UnknownField, ValueError) as error:
        raise MalformedExport(str(error)) from None
    records = tuple(LogRecord(offset, value) for offset, value in enumerate(values, file.first))
    found = Export(file.cluster_id, file.topic_id, file.generation, file.snapshot, records)
    if not records or digest(records) != file.digest:
        raise MalformedExport("its records are not those that it says it has: it is damaged")
    if file.first != (0 if file.snapshot is None else file.snapshot.as_of + 1):
        raise MalformedExport("its records do not follow its snapshot")
    try:
        state = found.replica(None if control_key is None else Signer(control_key, file.cluster_id, others)).state
    except Halted as halted:
        raise MalformedExport(str(halted)) from None
    if state.generation != file.generation:
        raise MalformedExport(f"its records lead to generation {state.generation}, it says {file.generation}")
    return found
