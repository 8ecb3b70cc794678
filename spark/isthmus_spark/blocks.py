"""Reads files of captured traffic (docs/capture.md has their format) into Arrow batches.

Blocks describe themselves, so a column that a file's writer did not know is null, and one that this version does not
know is left out.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
from crc32c import crc32c

MAGIC: Final = b"ISTHMCAP"
MAJOR: Final = 1
_HEAD: Final = struct.Struct(">8sHHII")
_CRC: Final = struct.Struct(">I")

TEXTS: Final = (
    *("listener", "client_address", "client_id", "software", "principal"),
    *("topic", "group_id", "transactional_id"),
)
SOURCES: Final = ("cluster", "proxy", "namespace", "namespace_type")
"""The same for all rows of a block."""
NUMBERS: Final = {
    "session": pa.int64(),
    "correlation_id": pa.int32(),
    "api_key": pa.int16(),
    "api_version": pa.int16(),
    "broker_id": pa.int32(),
    "part": pa.int32(),
    "parts": pa.int32(),
    "partition": pa.int32(),
    "request_bytes": pa.int32(),
    "response_bytes": pa.int32(),
    "acks": pa.int16(),
    "error_code": pa.int16(),
    "records": pa.int32(),
    "batches": pa.int32(),
    "batch_bytes": pa.int32(),
    "compression": pa.int16(),
    "producer_id": pa.int64(),
    "producer_epoch": pa.int16(),
    "base_sequence": pa.int32(),
    "base_offset": pa.int64(),
    "proxy_us": pa.int32(),
    "broker_us": pa.int32(),
    "gate_us": pa.int32(),
    "partial": pa.int16(),
}
"""-1 where nothing is known, as in the files."""

SCHEMA: Final = pa.schema(
    [
        pa.field("time", pa.timestamp("us", tz="UTC")),
        *(pa.field(name, pa.string()) for name in (*SOURCES, *TEXTS)),
        *(pa.field(name, kind) for name, kind in NUMBERS.items()),
    ]
)

LINK_TEXTS: Final = ("kind", "link", "role", "remote_cluster", "topic", "state", "reason")
LINK_NUMBERS: Final = {
    "partition": pa.int32(),
    "base_offset": pa.int64(),
    "end_offset": pa.int64(),
    "source_end": pa.int64(),
    "follower_end": pa.int64(),
    "batches": pa.int32(),
    "bytes": pa.int64(),
    "took_us": pa.int64(),
    "lag": pa.int64(),
    "lag_ms": pa.int64(),
}
LINK_SCHEMA: Final = pa.schema(
    [
        pa.field("time", pa.timestamp("us", tz="UTC")),
        *(pa.field(name, pa.string()) for name in ("cluster", "proxy", *LINK_TEXTS)),
        *(pa.field(name, kind) for name, kind in LINK_NUMBERS.items()),
    ]
)


@dataclass(frozen=True)
class Events:
    """What is captured of one kind: which files, with which columns."""

    sealed: str
    schema: pa.Schema


EVENTS: Final = {"requests": Events("*.capture", SCHEMA), "links": Events("*.links", LINK_SCHEMA)}
_FIELDS: Final = {field.name: field for each in EVENTS.values() for field in each.schema}
"""A name has one type in all kinds."""


class DamagedFile(Exception):
    """A sealed file is not as it was written."""


class NewerFormat(Exception):
    """A file was written by a newer version of Isthmus."""


def read_file(
    path: Path, columns: Sequence[str] = tuple(SCHEMA.names), begin: int = 0, end: int | None = None
) -> Iterator[pa.RecordBatch]:
    """The batches of a sealed file, one for each block, with these columns. Raises DamagedFile, NewerFormat.

    ``begin`` and ``end``: only blocks whose first byte is from the one up to, not including, the other.
    """
    with path.open("rb") as file:
        for position, head, described, left in _heads(path, file):
            if end is not None and position >= end:
                return
            if position < begin:
                continue
            block = memoryview(file.read(left))
            if _CRC.unpack(block[-_CRC.size :])[0] != crc32c(block[: -_CRC.size], crc32c(head)):
                raise DamagedFile(f"{path}: the block at byte {position} does not have its checksum")
            yield _batch(json.loads(bytes(block[:described])), block[described : -_CRC.size], columns)


def count_rows(path: Path) -> int:
    """How many rows a sealed file has by its descriptions, without reading them. Raises DamagedFile, NewerFormat."""
    with path.open("rb") as file:
        return sum(json.loads(file.read(described))["rows"] for _, _, described, _ in _heads(path, file))


def _heads(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes, int, int]]:
    """Position, head, size of the description and of all behind the head, where the file stands, of each block."""
    position, size = 0, os.fstat(file.fileno()).st_size
    while position < size:
        file.seek(position)
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise DamagedFile(f"{path}: {len(head)} bytes too many at {position}")
        magic, major, _, described, rows = _HEAD.unpack(head)
        if magic != MAGIC:
            raise DamagedFile(f"{path}: no block begins at byte {position}")
        if major > MAJOR:
            raise NewerFormat(f"{path} has format {major}, this version reads {MAJOR}: upgrade Isthmus")
        left = described + rows + _CRC.size
        if position + len(head) + left > size:
            raise DamagedFile(f"{path}: the block at byte {position} does not have its checksum")
        yield position, head, described, left
        position += _HEAD.size + left


def _batch(description: dict[str, Any], rows: memoryview, columns: Sequence[str]) -> pa.RecordBatch:
    kinds = np.dtype([(name, kind) for name, kind in description["fields"]])
    read = np.frombuffer(rows, kinds)
    made = [_column(name, description, read, set(kinds.names or ())) for name in columns]
    return pa.RecordBatch.from_arrays(made, schema=pa.schema([_FIELDS[name] for name in columns]))


def _column(name: str, description: dict[str, Any], read: np.ndarray, known: set[str]) -> pa.Array:
    kind = _FIELDS[name].type
    if name == "time":
        return pa.array(read["time_us"].astype("i8"), pa.int64()).cast(kind)
    if name in SOURCES:
        return pa.repeat(pa.scalar(description["source"].get(name), kind), len(read))
    if name not in known:
        return pa.nulls(len(read), kind)
    if kind == pa.string():
        numbers = read[name].astype("i4")
        indexes = pa.array(numbers, pa.int32(), mask=numbers < 0)
        return pa.DictionaryArray.from_arrays(indexes, pa.array(description["tables"][name], kind)).cast(kind)
    return pa.array(read[name].astype(kind.to_pandas_dtype()), kind)
