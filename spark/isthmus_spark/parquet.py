"""Writes the events of block files as Parquet, by date, hour and namespace.

Executors read blocks and write files by themselves; only the files' names go through Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from isthmus_spark.blocks import EVENTS, read_file
from isthmus_spark.compacted import hour_directory
from isthmus_spark.source import Spans, together

GROUP_ROWS: Final = 256 * 1024
HOUR_US: Final = 3_600_000_000
COMPRESSION: Final = "zstd"

Part = tuple[int, str | None]
"""Hours since 1970, namespace."""


def write_parquet(spark: SparkSession, kind: str, files: Sequence[Path], to: Path) -> None:
    """Into a new directory. Raises FileNotFoundError if a file goes meanwhile, and what Spark raises."""
    parts = together((file.absolute(), file.stat().st_size) for file in files)
    directory = to.absolute()

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch["id"].to_pylist():
                written = write_spans(kind, parts[number], directory)
                yield pa.RecordBatch.from_pydict({"file": [str(file) for file in written]}, pa.schema([_FILE]))

    tasks = spark.range(0, len(parts), 1, len(parts)).mapInArrow(write, "file string")
    written = {row.file for row in tasks.collect()}
    for file in directory.rglob("*"):
        if file.is_file() and str(file) not in written:  # of an attempt that Spark gave up
            file.unlink(missing_ok=True)


_FILE: Final = pa.field("file", pa.string())


def write_spans(kind: str, spans: Spans, directory: Path) -> list[Path]:
    """The files that were written."""
    return _Writer(directory).write(kind, spans)


class _Writer:
    """Puts events together that belong into one file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._waiting: dict[Part, list[pa.RecordBatch]] = {}
        self._files: dict[Part, tuple[Path, pq.ParquetWriter]] = {}

    def write(self, kind: str, spans: Spans) -> list[Path]:
        schema = EVENTS[kind].schema
        for path, begin, end in spans.spans:
            for batch in read_file(Path(path), schema.names, begin, end):
                for part, rows in _parts(batch):
                    waiting = self._waiting.setdefault(part, [])
                    waiting.append(rows)
                    if sum(each.num_rows for each in waiting) >= GROUP_ROWS:
                        self._flush(part)
        for part in list(self._waiting):
            self._flush(part)
        for finished, writer in self._files.values():
            writer.close()
            # Where the directory is a batch by now, this attempt was given up, and this fails.
            _unfinished(finished).rename(finished)
        return [path for path, _ in self._files.values()]

    def _flush(self, part: Part) -> None:
        rows = pa.Table.from_batches(self._waiting.pop(part))
        if part not in self._files:
            path = self._path(part)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[part] = path, pq.ParquetWriter(_unfinished(path), rows.schema, compression=COMPRESSION)
        self._files[part][1].write_table(rows, row_group_size=GROUP_ROWS)

    def _path(self, part: Part) -> Path:
        hours, namespace = part
        began = np.datetime64(hours, "h").astype(str)  # 2026-01-01T07
        parent = self._directory / hour_directory(began)
        if namespace is not None:
            parent /= (
                f"prefix={''.join(each if each.isalnum() or each in '-_.' else '~' for each in namespace) or 'all'}"
            )
        return parent / f"{uuid4().hex}.parquet"


def _unfinished(path: Path) -> Path:
    return path.with_name(f"_{path.name}.unfinished")


def _parts(batch: pa.RecordBatch) -> Iterator[tuple[Part, pa.RecordBatch]]:
    """A block's rows by hour. A block is of one namespace."""
    if not batch.num_rows:
        return
    namespace: Any = batch["namespace"][0].as_py() if "namespace" in batch.schema.names else None
    hours = batch["time"].cast(pa.int64()).to_numpy() // HOUR_US
    for hour in np.unique(hours):
        chosen = hours == hour
        yield (int(hour), namespace), batch if chosen.all() else batch.filter(pa.array(chosen))
