"""Captured traffic as a data source of Spark: ``spark.read.format("isthmus_capture").load(directory)``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from isthmus_spark.blocks import EVENTS, Events, read_file

FORMAT: Final = "isthmus_capture"
PARTITION_BYTES: Final = 64 * 1024 * 1024
"""Small files are read together up to this size, and big ones in parts of it, each block in one."""


class CaptureSource(DataSource):
    """Sealed files below a directory (option ``path``), of any number of proxies and namespaces.

    Option ``events``: ``requests`` (default) or ``links``. Option ``columns``: their names, separated by commas, where
    not all are needed. What is left out is not made. Option ``files``, in place of ``path``: a JSON list of files.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        known = self._events().schema
        return from_arrow_schema(pa.schema([known.field(name) for name in self._columns()]))

    def reader(self, schema: StructType) -> DataSourceReader:
        return CaptureReader(self._files(), self._columns())

    def _files(self) -> Sequence[Path]:
        """In the order of their names, that is of time."""
        if "files" in self.options:
            return [Path(each) for each in json.loads(self.options["files"])]
        root = Path(self.options["path"])
        if not root.is_file():
            return sorted(root.rglob(self._events().sealed))
        others = (each.sealed for each in EVENTS.values() if each != self._events())
        return [] if any(root.match(each) for each in others) else [root]

    def _events(self) -> Events:
        name = self.options.get("events", "requests")
        if name not in EVENTS:
            raise ValueError(f"no events of the kind {name}: option events is one of {', '.join(EVENTS)}")
        return EVENTS[name]

    def _columns(self) -> list[str]:
        return self.options.get("columns", ",".join(self._events().schema.names)).split(",")


class Spans(InputPartition):
    """(Path, begin, end) of what is read together."""

    def __init__(self, spans: Sequence[tuple[str, int, int]]) -> None:
        self.spans = list(spans)


class CaptureReader(DataSourceReader):
    def __init__(self, files: Sequence[Path], columns: Sequence[str]) -> None:
        self._files = files
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        return together((file, file.stat().st_size) for file in self._files)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Spans)
        for path, begin, end in partition.spans:
            yield from read_file(Path(path), self._columns, begin, end)


def together(files: Iterable[tuple[Path, int]]) -> list[Spans]:
    """Small files put together, big ones in parts; one partition at least."""
    partitions: list[Spans] = [Spans(())]
    left = PARTITION_BYTES
    for file, size in files:
        begin = 0
        while begin < size:
            if not left:
                partitions.append(Spans(()))
                left = PARTITION_BYTES
            end = min(size, begin + left)
            partitions[-1].spans.append((str(file), begin, end))
            left -= end - begin
            begin = end
    return partitions


def register(spark: SparkSession) -> None:
    """Make the format known to a session."""
    spark.dataSource.register(CaptureSource)
