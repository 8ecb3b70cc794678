r"""Salvage files of committed offsets: what groups had committed before it was put back to what their source has left.

::

    isthmus-salvage-offsets 1\n    what the file is, and the version of its format
    {"namespace": ...}\n           the head: one JSON object (:class:`OffsetsSalvageHead`)
    {"group": ...}\n               for each committed offset one JSON object (:class:`SalvagedOffset`)
    {"offsets": ...}\n             the tail: one JSON object (:class:`OffsetsSalvageTail`), on the last line

A file without a tail was never finished. Beside it stand the files of records (:mod:`isthmus_protocol.salvage`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from isthmus_protocol.salvage import MalformedSalvage, from_json

OFFSETS_MAGIC_LINE: Final = b"isthmus-salvage-offsets 1\n"


@dataclass(frozen=True, slots=True)
class OffsetsSalvageHead:
    """Whose they were, and why they were put back.

    ``[from_offset, to_offset)`` is what a ``partition`` of the source's offsets topic lost, which was confirmed in its
    ``leader_epoch`` (-1: not known any more). ``namespace``: the prefix of the groups here.
    """

    cluster_id: str
    link: str
    namespace: str
    partition: int
    leader_epoch: int
    from_offset: int
    to_offset: int
    code: str
    message: str
    at_ms: int
    proxy: str


@dataclass(frozen=True, slots=True)
class SalvagedOffset:
    """A committed offset as the coordinator here had it; ``source_offset`` is put in its place, -1 deletes it."""

    group: str
    topic: str
    partition: int
    offset: int
    metadata: str
    source_offset: int


@dataclass(frozen=True, slots=True)
class OffsetsSalvageTail:
    """How many committed offsets the file holds, and the SHA-256 of their lines."""

    offsets: int
    sha256: str


@dataclass(frozen=True, slots=True)
class OffsetsSalvage:
    """A whole file, checked."""

    head: OffsetsSalvageHead
    tail: OffsetsSalvageTail
    offsets: tuple[SalvagedOffset, ...]


def encode_offsets_salvage(head: OffsetsSalvageHead, offsets: Sequence[SalvagedOffset]) -> bytes:
    """The file's content."""
    lines = b"".join(_line(each) for each in offsets)
    tail = OffsetsSalvageTail(len(offsets), hashlib.sha256(lines).hexdigest())
    return OFFSETS_MAGIC_LINE + _line(head) + lines + _line(tail)


def read_offsets_salvage(content: bytes) -> OffsetsSalvage:
    """Read a file and check it against its tail. Raises MalformedSalvage."""
    if not content.startswith(OFFSETS_MAGIC_LINE):
        raise MalformedSalvage("this is no salvage file of committed offsets: its first line is not that of one")
    lines = content[len(OFFSETS_MAGIC_LINE) :].split(b"\n")
    if len(lines) < 3 or lines[-1]:
        raise MalformedSalvage("the file was never finished: it has no tail")
    head, tail = from_json(OffsetsSalvageHead, lines[0], "head"), from_json(OffsetsSalvageTail, lines[-2], "tail")
    found = lines[1:-2]
    if (
        len(found) != tail.offsets
        or hashlib.sha256(b"".join(line + b"\n" for line in found)).hexdigest() != tail.sha256
    ):
        raise MalformedSalvage("the committed offsets are not those that were written: number or SHA-256 differ")
    return OffsetsSalvage(head, tail, tuple(from_json(SalvagedOffset, line, "committed offset") for line in found))


def _line(value: OffsetsSalvageHead | SalvagedOffset | OffsetsSalvageTail) -> bytes:
    return json.dumps(asdict(value)).encode() + b"\n"
