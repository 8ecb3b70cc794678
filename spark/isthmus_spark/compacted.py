"""Where compacted events are, and which block files they were made of.

    DIR/batch=000001/_batch.json                     its files, and the block files that they were made of
    DIR/batch=000001/kind=requests/date=2026-01-01/hour=07/prefix=pay-/*.parquet
    DIR/_staging-*                                   what is being written or deleted; nobody reads it

A batch appears by one rename, with all its events and the list of what they were made of. So at any moment an event
is in block files that no list names, or in one batch. Only the files that it lists are in a batch: what a task leaves
there that Spark has given up, and that goes on, is not; nor is what retention took, even where its block
files are still there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from isthmus_spark.blocks import EVENTS, NewerFormat

LISTS: Final = "_batch.json"
BATCH: Final = "batch="
STAGING: Final = "_staging-"
FORMAT: Final = 1


@dataclass(frozen=True)
class Batch:
    """One directory of compacted events."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name.removeprefix(BATCH))

    @property
    def sources(self) -> dict[str, int]:
        """By what identifies a block file its size. Raises NewerFormat."""
        return {name: size for name, size, _ in self.lists["sources"]}

    def files(self, *kinds: str) -> list[Path]:
        """Of Parquet; of all kinds of events, also such as are not known here, if none is given. Raises NewerFormat."""
        begins = tuple(f"{kind_directory(kind)}/" for kind in kinds)
        return [self.path / name for name in self.lists["files"] if not kinds or name.startswith(begins)]

    @cached_property
    def lists(self) -> dict[str, Any]:
        """As it stands in the file. Raises NewerFormat."""
        said: dict[str, Any] = json.loads((self.path / LISTS).read_text())
        if said["format"] > FORMAT:
            raise NewerFormat(f"{self.path} has format {said['format']}, this version reads {FORMAT}: upgrade Isthmus")
        return said


def kind_directory(kind: str) -> str:
    """Of a batch."""
    return f"kind={kind}"


def hour_directory(hour: str) -> Path:
    """Of a kind of events; ``hour`` is like 2026-01-01T07."""
    return Path(f"date={hour[:10]}", f"hour={hour[11:]}")


def hour_of(file: Path) -> str:
    """Of Parquet, below a batch."""
    _, date, hour, *_ = file.parts
    return f"{date.removeprefix('date=')}T{hour.removeprefix('hour=')}"


@dataclass(frozen=True)
class Captured:
    """What there is below a directory, each event once."""

    files: list[Path] = field(default_factory=list)
    """Block files that are in no batch."""
    batches: list[Batch] = field(default_factory=list)


def identity(file: Path) -> str:
    """What identifies a block file wherever it is copied: its name has a time and 32 random bits."""
    return f"{file.parent.name}/{file.name}"


def captured_below(root: Path, kind: str) -> Captured:
    """What is to be read. Raises NewerFormat, OSError."""
    # In this order: what is compacted and deleted meanwhile is in the list of files, and missed when it is read; in the
    # other order nobody would miss it.
    files = block_files(root, kind)
    batches = batches_below(root)
    done: set[str] = set()
    for batch in batches:
        done |= batch.sources.keys()
    return Captured([file for file in files if identity(file) not in done], batches)


def block_files(root: Path, kind: str) -> list[Path]:
    """Sealed files, in the order of their names, that is of time."""
    sealed = EVENTS[kind].sealed
    if root.is_file():
        return [root] if root.match(sealed) or not any(root.match(each.sealed) for each in EVENTS.values()) else []
    return sorted(directory / name for directory, names in _walk(root) for name in names if Path(name).match(sealed))


def batches_below(root: Path) -> list[Batch]:
    """All batches of all directories of compacted events."""
    found = [directory for directory, names in _walk(root) if LISTS in names and directory.name.startswith(BATCH)]
    return [Batch(each) for each in sorted(found)]


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Directories with the names of their files; of a batch and of what is being written not what is below."""
    for name, directories, files in os.walk(root):
        directory = Path(name)
        if LISTS in files and directory.name.startswith(BATCH):
            directories.clear()
        directories[:] = [each for each in directories if not each.startswith(STAGING)]
        yield directory, files
