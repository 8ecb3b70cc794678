r"""Salvage files: what was cut from a follower's log, as the log had it.

::

    isthmus-salvage 1\n            what the file is, and the version of its format
    {"topic": ...}\n               the head: one JSON object (:class:`SalvageHead`)
    <record batches>               whole batches in offset order, byte by byte as a Fetch answer has them (magic 2)
    \n{"batches": ...}\n           the tail: one JSON object (:class:`SalvageTail`), on the last line

A file without a tail was never finished. The batches' own headers say where each ends, so any Kafka tool that reads
record batches reads the middle of the file; producer ids are those of the cluster that the records were cut from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO, Final, TypeVar

from isthmus_protocol.records import BatchError, BatchHeader, Frame, walk

MAGIC_LINE: Final = b"isthmus-salvage 1\n"
SUFFIX: Final = ".salvage"
LINE_BYTES_MAX: Final = 64 * 1024
"""Of head and tail."""

T = TypeVar("T")


class MalformedSalvage(ValueError):
    """The file is not a salvage file, or not a whole one."""


@dataclass(frozen=True, slots=True)
class SalvageHead:
    """Where the batches come from, and why they were cut.

    ``[from_offset, to_offset)`` is what was cut; ``truncation`` is the topic id of the topic that was truncated.
    """

    cluster_id: str
    link: str
    topic: str
    topic_id: str
    source_topic: str
    partition: int
    from_offset: int
    to_offset: int
    code: str
    message: str
    at_ms: int
    proxy: str


@dataclass(frozen=True, slots=True)
class SalvageTail:
    """What the file holds: ``size`` bytes of batches, and their SHA-256."""

    batches: int
    records: int
    size: int
    sha256: str


class SalvageWriter:
    """Makes the parts of a file, in their order: :meth:`head`, :meth:`add` for each batch, :meth:`tail`."""

    def __init__(self, head: SalvageHead) -> None:
        self._head = head
        self._hash = hashlib.sha256()
        self.batches = self.records = self.size = 0

    def head(self) -> bytes:
        return MAGIC_LINE + json.dumps(asdict(self._head)).encode() + b"\n"

    def add(self, batch: bytes | memoryview, header: BatchHeader) -> None:
        """Count a batch that goes into the file as it is."""
        self._hash.update(batch)
        self.batches += 1
        self.records += header.record_count
        self.size += len(batch)

    def tail(self) -> bytes:
        tail = SalvageTail(self.batches, self.records, self.size, self._hash.hexdigest())
        return b"\n" + json.dumps(asdict(tail)).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Salvage:
    """A whole file, checked."""

    head: SalvageHead
    tail: SalvageTail
    data: memoryview
    """The batches."""

    def batches(self) -> Iterator[tuple[memoryview, BatchHeader]]:
        """The batches with their headers, in offset order. The first may begin before ``head.from_offset``."""
        for start, end, header in walk(self.data):
            yield self.data[start:end], header


def read_salvage(content: Frame) -> Salvage:
    """Read a file, which may be mapped into memory, and check it against its tail. Raises MalformedSalvage."""
    view = memoryview(content)
    first = bytes(view[: len(MAGIC_LINE) + LINE_BYTES_MAX])
    if not first.startswith(MAGIC_LINE):
        raise MalformedSalvage("this is no salvage file: its first line is not 'isthmus-salvage 1'")
    last_at = max(0, len(view) - LINE_BYTES_MAX)
    last = bytes(view[last_at:])
    head_end = first.find(b"\n", len(MAGIC_LINE))
    tail_start = last.rfind(b"\n", 0, len(last) - 1) + last_at
    if head_end < 0 or tail_start < max(head_end, last_at) or not last.endswith(b"\n"):
        raise MalformedSalvage("the file was never finished: it has no tail")
    head = from_json(SalvageHead, first[len(MAGIC_LINE) : head_end], "head")
    tail = from_json(SalvageTail, last[tail_start - last_at + 1 :], "tail")
    data = view[head_end + 1 : tail_start]
    if len(data) != tail.size or hashlib.sha256(data).hexdigest() != tail.sha256:
        raise MalformedSalvage("the batches are not those that were written: size or SHA-256 differ from the tail's")
    salvage = Salvage(head, tail, data)
    try:
        counts = [header.record_count for _, header in salvage.batches()]
    except BatchError as error:
        raise MalformedSalvage(f"the batches cannot be read: {error}") from error
    if (len(counts), sum(counts)) != (tail.batches, tail.records):
        raise MalformedSalvage(f"the file holds {len(counts)} batches, its tail says {tail.batches}")
    return salvage


def identity(head: SalvageHead, tail: SalvageTail) -> str:
    """What the file holds, whatever it is called and whenever it was written: 32 hexadecimal digits."""
    cut = head.cluster_id, head.topic, head.topic_id, head.partition, head.from_offset, head.to_offset, tail.sha256
    return hashlib.sha256(json.dumps(cut).encode()).hexdigest()[:32]


def read_ends(file: BinaryIO) -> tuple[SalvageHead, SalvageTail]:
    """Head and tail of a file, however large what is between them is, and unread. Raises MalformedSalvage, OSError."""
    if file.readline(LINE_BYTES_MAX) != MAGIC_LINE:
        raise MalformedSalvage("this is no salvage file: its first line is not 'isthmus-salvage 1'")
    head = from_json(SalvageHead, file.readline(LINE_BYTES_MAX), "head")
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LINE_BYTES_MAX))
    content = file.read()
    start = content.rfind(b"\n", 0, len(content) - 1)
    if start < 0 or not content.endswith(b"\n"):
        raise MalformedSalvage("the file was never finished: it has no tail")
    return head, from_json(SalvageTail, content[start + 1 :], "tail")


def from_json(shape: type[T], line: bytes, what: str) -> T:
    """A line of a salvage file as a dataclass. Raises MalformedSalvage, which names ``what`` it is."""
    try:
        value = json.loads(line)
    except ValueError:
        raise MalformedSalvage(f"the {what} is not JSON") from None
    names = {field.name: field.type for field in fields(shape)}  # type: ignore[arg-type]
    if not isinstance(value, Mapping) or value.keys() != names.keys():
        raise MalformedSalvage(f"the {what} does not have the fields {', '.join(names)}")
    for name, kind in names.items():
        if type(value[name]).__name__ != kind:
            raise MalformedSalvage(f"{name} in the {what} is not of type {kind}")
    made: dict[str, Any] = dict(value)
    return shape(**made)
