"""Deletes Parquet that is too old, or more than is to be kept: whole hours, the oldest first.

For each batch that has some of them: write its list without their files, sync it, rename it over the old one; only then
may the files go. So a reader finds a file in a list, or it is gone. What a killed process leaves is files that no
list has; who comes after deletes them. The block files that a batch was made of stay in its list, so what retention
took is not taken over again. A batch goes when it has no file left, and none of its block files is there any more.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from shutil import rmtree
from typing import Final, NamedTuple
from uuid import uuid4

from isthmus_spark.compacted import LISTS, STAGING, Batch, hour_of
from isthmus_spark.durable import sync_one

_NEW_LISTS: Final = f"{LISTS}.new"
_OURS: Final = (".parquet", ".unfinished", _NEW_LISTS)


@dataclass(frozen=True, slots=True)
class Keep:
    """How much Parquet is kept; None: no limit."""

    days: int | None = None
    """Since the end of an hour."""
    bytes: int | None = None


@dataclass(slots=True)
class Expired:
    files: int = 0
    bytes: int = 0


class _File(NamedTuple):
    hour: str
    batch: Batch
    name: str
    size: int


def expire(batches: Sequence[Batch], there: Collection[str], keep: Keep, now: datetime) -> Expired:
    """Delete what is not to be kept of these batches. Raises NewerFormat, OSError.

    ``there``: what identifies the block files that are in a batch and still there. Nobody else may write batches.
    """
    for batch in batches:
        _sweep(batch)
    expired = _expired(batches, keep, now)
    gone: defaultdict[Batch, set[str]] = defaultdict(set)
    for file in expired:
        gone[file.batch].add(file.name)
    for batch, names in gone.items():
        _shorten(batch, names)
        _sweep(Batch(batch.path))
    for batch in batches:
        if len(gone[batch]) == len(batch.files()) and batch.sources.keys().isdisjoint(there):
            _drop(batch)
    return Expired(len(expired), sum(each.size for each in expired))


def _expired(batches: Iterable[Batch], keep: Keep, now: datetime) -> list[_File]:
    files = [
        _File(hour_of(file.relative_to(batch.path)), batch, str(file.relative_to(batch.path)), file.stat().st_size)
        for batch in batches
        for file in batch.files()
    ]
    first = "" if keep.days is None else f"{now.astimezone(UTC) - timedelta(days=keep.days):%Y-%m-%dT%H}"
    left = sum(each.size for each in files)
    expired: list[_File] = []
    for hour, group in groupby(sorted(files, key=lambda each: each.hour), key=lambda each: each.hour):
        if hour >= first and (keep.bytes is None or left <= keep.bytes):
            break
        of_hour = list(group)
        left -= sum(each.size for each in of_hour)
        expired += of_hour
    return expired


def _shorten(batch: Batch, gone: Collection[str]) -> None:
    """Write the list of a batch anew without these files."""
    written = batch.path / _NEW_LISTS
    written.write_text(
        json.dumps({**batch.lists, "files": [each for each in batch.lists["files"] if each not in gone]})
    )
    sync_one(written)
    written.rename(batch.path / LISTS)
    sync_one(batch.path)


def _sweep(batch: Batch) -> None:
    """Delete what writers or a killed retention have left in a batch, and directories in which nothing is."""
    listed = {str(file) for file in batch.files()}
    for name, directories, files in os.walk(batch.path, topdown=False):
        for file in files:
            path = os.path.join(name, file)
            if file.endswith(_OURS) and path not in listed:
                os.unlink(path)
        for directory in directories:
            with suppress(OSError):  # it is not empty; on NFS also while a file is read that was deleted
                os.rmdir(os.path.join(name, directory))


def _drop(batch: Batch) -> None:
    """Whole: by a rename first, so that there is never a part of a batch."""
    dropped = batch.path.with_name(f"{STAGING}{uuid4().hex}")
    batch.path.rename(dropped)
    sync_one(dropped.parent)
    rmtree(dropped)
