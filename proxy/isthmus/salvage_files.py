"""Salvage files as commands open them, and the notes of their replays beside them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from isthmus_plugins.private_files import write_file
from isthmus_protocol.offsets_salvage import OFFSETS_MAGIC_LINE, OffsetsSalvage, read_offsets_salvage
from isthmus_protocol.salvage import MalformedSalvage, Salvage, from_json, read_salvage

NOTE_PREFIX: Final = "replay-"
NOTE_SUFFIX: Final = ".json"


def read_file(file: BinaryIO) -> Salvage | OffsetsSalvage:
    """What a salvage file holds, checked. Records stay on the disk until they are read.

    Raises MalformedSalvage, OSError.
    """
    first = file.read(len(OFFSETS_MAGIC_LINE))
    if first == OFFSETS_MAGIC_LINE:
        return read_offsets_salvage(first + file.read())
    return read_salvage(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if first else b"")


def is_ours_alone(file: BinaryIO) -> bool:
    """Keep the file for this process as long as it is open, or mapped; False: another one has it. Raises OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Note:
    """What is remembered of one replay, beside the file.

    ``salvage``: the file's :func:`~isthmus_protocol.salvage.identity`. ``acked`` of its ``records`` stand in the
    target's log below the offset ``look_from``; ``done_ms``: when all did, 0 before.
    """

    salvage: str
    cluster_id: str
    topic: str
    topic_id: str
    partition: int
    producer_id: int
    producer_epoch: int
    records: int
    acked: int
    look_from: int
    begun_ms: int
    done_ms: int


def note_path(directory: Path, salvage: str, cluster_id: str, topic: str, partition: int) -> Path:
    """Where the note of one file and one target stands, whatever the file is called."""
    where = json.dumps([salvage, cluster_id, topic, partition])
    return directory / f"{NOTE_PREFIX}{hashlib.sha256(where.encode()).hexdigest()[:32]}{NOTE_SUFFIX}"


def read_note(path: Path) -> Note | None:
    """None: there is none. Raises MalformedSalvage, OSError."""
    try:
        return from_json(Note, path.read_bytes(), f"note {path}")
    except FileNotFoundError:
        return None


def write_note(path: Path, note: Note) -> None:
    """It is on the disk when this returns. Raises OSError."""
    write_file(path, json.dumps(asdict(note)).encode() + b"\n")


def notes_in(directory: Path) -> Iterator[Note]:
    """The notes of a directory that can be read. Raises OSError."""
    for path in sorted(directory.glob(f"{NOTE_PREFIX}*{NOTE_SUFFIX}")):
        try:
            note = read_note(path)
        except MalformedSalvage:
            continue
        if note is not None:
            yield note
