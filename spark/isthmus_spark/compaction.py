"""Compacts sealed block files to Parquet: each event is taken over once, wherever the process is killed.

For some block files at a time: write Parquet into a staging directory of a new name; count its rows; write down its
files and the block files; sync it; rename the directory to the next batch. Only then may the block files go. What a
killed process leaves is a staging directory, which the next one deletes, or block files that a batch names, which need
no other one. A Spark that outlives its killed driver writes into a directory that nobody renames.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from uuid import uuid4

import pyarrow.parquet as pq

from isthmus_spark.blocks import EVENTS, count_rows
from isthmus_spark.compacted import BATCH, FORMAT, LISTS, STAGING, Batch, block_files, identity, kind_directory
from isthmus_spark.durable import sync_one, sync_tree
from isthmus_spark.retention import Expired, Keep, expire

BATCH_BYTES: Final = 2 * 1024**3
BATCH_FILES: Final = 10_000
"""So much is done again at most by who comes after a killed process."""
TRIES: Final = 5
"""Of a batch, when block files go while they are read."""

Write = Callable[[str, Sequence[Path], Path], None]
"""Writes Parquet: kind of events, block files, a directory that is not there yet."""
Say = Callable[[str], None]


class CompactionError(Exception):
    """What is there cannot be compacted; nothing was lost."""


@dataclass(slots=True)
class Result:
    files: int = 0
    events: int = 0
    block_bytes: int = 0
    parquet_bytes: int = 0
    batches: int = 0
    already: int = 0
    """Block files that are in a batch from before."""
    gone: int = 0
    """Block files that somebody else deleted before they were read."""
    deleted: int = 0
    expired: Expired = field(default_factory=Expired)


@dataclass(frozen=True, slots=True)
class Source:
    """A block file."""

    path: Path
    kind: str
    size: int


def compact(
    capture: Path,
    to: Path,
    write: Write,
    say: Say,
    *,
    delete: bool = False,
    keep: Keep | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Result:
    """Take over what is in no batch below ``to`` yet. Raises CompactionError, DamagedFile, NewerFormat, OSError.

    ``delete``: block files that are in a batch are deleted, those from before, too. ``keep``: what is not to be kept of
    the batches from before is deleted first, so that a full disk has room again.
    """
    result = Result()
    to.mkdir(parents=True, exist_ok=True)
    with _alone(to):
        for directory in (to.absolute().parent, to):  # before anything is deleted: a killed run may have renamed last
            sync_one(directory)
        for left in to.glob(f"{STAGING}*"):
            shutil.rmtree(left, ignore_errors=True)
        batches = [Batch(path.parent) for path in to.glob(f"{BATCH}*/{LISTS}")]
        new, before = _sorted_out(_sources(capture, result), batches)
        result.already = len(before)
        if keep is not None:
            there = {identity(source.path) for source in before}
            result.expired = expire(batches, there, keep, datetime.now(UTC))
        if delete:
            _delete(before, result)
        number = max((batch.number for batch in batches), default=0)
        for chunk in _chunks(new, batch_bytes):
            taken = _take(chunk, to, number + 1, write, say, result)
            number += bool(taken)
            if delete:
                _delete(taken, result)
    return result


@contextmanager
def _alone(to: Path) -> Iterator[None]:
    """The lock goes with the process."""
    with (to / "_lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompactionError(f"{to} is being written by another process: wait until it has ended") from None
        yield


def _sources(capture: Path, result: Result) -> Iterator[Source]:
    for kind in EVENTS:
        for path in block_files(capture, kind):
            try:
                yield Source(path, kind, path.stat().st_size)
            except FileNotFoundError:
                result.gone += 1


def _sorted_out(sources: Iterable[Source], batches: Iterable[Batch]) -> tuple[list[Source], list[Source]]:
    """Those that are in no batch, and the others."""
    done = {name: size for batch in batches for name, size in batch.sources.items()}
    new: dict[str, Source] = {}
    before: list[Source] = []
    for source in sources:
        name = identity(source.path)
        if name in done:
            if done[name] != source.size:
                raise CompactionError(
                    f"{source.path} has {source.size} bytes and had {done[name]} when it was compacted: sealed files "
                    "do not change; move it away, and look where it comes from"
                )
            before.append(source)
        elif name in new:
            raise CompactionError(f"{source.path} and {new[name].path} have one name: if one is a copy, move it away")
        else:
            new[name] = source
    return list(new.values()), before


def _chunks(sources: Iterable[Source], batch_bytes: int) -> Iterator[list[Source]]:
    chunk: list[Source] = []
    size = 0
    for source in sources:
        if chunk and (len(chunk) == BATCH_FILES or size + source.size > batch_bytes):
            yield chunk
            chunk, size = [], 0
        chunk.append(source)
        size += source.size
    if chunk:
        yield chunk


def _take(chunk: list[Source], to: Path, number: int, write: Write, say: Say, result: Result) -> list[Source]:
    """Make a batch of these block files; of those of them that are still there if some go meanwhile."""
    for tried in range(TRIES):
        staging = to / f"{STAGING}{uuid4().hex}"
        rows: dict[str, int] = {}
        present: list[Source] = []
        for source in chunk:
            try:
                rows[identity(source.path)] = count_rows(source.path)
                present.append(source)
            except FileNotFoundError:
                pass
        result.gone += len(chunk) - len(present)
        chunk = present
        if not chunk:
            return []
        say(f"batch {number}: {len(chunk)} files with {sum(rows.values()):,} events")
        staging.mkdir()
        try:
            for kind in EVENTS:
                paths = [source.path for source in chunk if source.kind == kind]
                if paths:
                    write(kind, paths, staging / kind_directory(kind))
        except Exception:
            shutil.rmtree(staging, ignore_errors=True)
            if tried == TRIES - 1 or all(source.path.exists() for source in chunk):
                raise
            say("block files were deleted while they were read: once more without them")
            continue
        _commit(chunk, rows, staging, to / f"{BATCH}{number:06d}", result)
        return chunk
    raise AssertionError


def _commit(chunk: Sequence[Source], rows: dict[str, int], staging: Path, batch: Path, result: Result) -> None:
    parquet = sorted(staging.rglob("*.parquet"))
    written, expected = sum(pq.read_metadata(file).num_rows for file in parquet), sum(rows.values())
    if written != expected:
        shutil.rmtree(staging, ignore_errors=True)
        raise CompactionError(
            f"{written:,} rows of Parquet were written of {expected:,} events: on a cluster the captured files and "
            f"{batch.parent} have to be the same on all machines, on storage that they share"
        )
    size = sum(file.stat().st_size for file in parquet)
    sources = [[identity(each.path), each.size, rows[identity(each.path)]] for each in chunk]
    lists = {"format": FORMAT, "sources": sources, "files": [str(file.relative_to(staging)) for file in parquet]}
    (staging / LISTS).write_text(json.dumps(lists))
    sync_tree(staging)
    staging.rename(batch)
    sync_one(batch.parent)
    result.batches += 1
    result.files += len(chunk)
    result.events += expected
    result.block_bytes += sum(each.size for each in chunk)
    result.parquet_bytes += size


def _delete(sources: Iterable[Source], result: Result) -> None:
    """Block files that are in a batch; the capture's own retention may have been here before."""
    for source in sources:
        source.path.unlink(missing_ok=True)
        result.deleted += 1
