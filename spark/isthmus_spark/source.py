"""Captured traffic as a data source of Spark: ``spark.read.format("isthmus_capture").load(directory)``.

As a stream (``readStream``) it has each file that is sealed. An offset is the names of the files that were read, those
begun in the day before the newest of them: proxies seal at different times, so the newest name alone would not do.
Files that retention deleted before they were read are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from isthmus_spark.blocks import EVENTS, Events, read_file

FORMAT: Final = "isthmus_capture"
PARTITION_BYTES: Final = 64 * 1024 * 1024
"""Small files are read together up to this size, and big ones in parts of it, each block in one."""
FILES_MAX: Final = 64
"""In one batch of a stream, the oldest first."""
REMEMBERED_MS: Final = 86_400_000
"""A file that is sealed so long after it was begun, when newer ones were read already, is not read by a stream."""


class CaptureSource(DataSource):
    """Sealed files below a directory (option ``path``), of any number of proxies and namespaces.

    Option ``events``: ``requests`` (default) or ``links``. Option ``columns``: their names, separated by commas, where
    not all are needed. What is left out is not made. Option ``files``, in place of ``path``: a JSON list of files.
    Option ``starting`` of a stream: ``earliest`` (default), or ``latest``: without the files that are there at first.
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

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        latest = self.options.get("starting") == "latest"
        return CaptureStream(Path(self.options["path"]), self._events().sealed, self._columns(), latest)

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


class CaptureStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, root: Path, sealed: str, columns: Sequence[str], latest: bool) -> None:
        """``sealed``: what matches the names of files."""
        self._root = root
        self._glob = sealed
        self._columns = columns
        self._latest = latest
        self._available: set[str] | None = None
        """All that is to be read, where that was decided when the query began."""

    def prepareForTriggerAvailableNow(self) -> None:
        self._available = set(self._sealed())

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxFiles(FILES_MAX)

    def initialOffset(self) -> dict[str, Any]:
        return {"since": 0, "files": self._sealed() if self._latest else []}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        read = set(start["files"])
        wanted = self._sealed() if self._available is None else sorted(self._available, key=_age)
        new = [name for name in wanted if name not in read and _begun_ms(name) >= start["since"]]
        if isinstance(limit, ReadMaxFiles):
            new = new[: limit.max_files]
        if not new:
            return start
        since = max(start["since"], max(map(_begun_ms, new)) - REMEMBERED_MS)
        return {"since": since, "files": sorted(name for name in (*read, *new) if _begun_ms(name) >= since)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        new = sorted(set(end["files"]) - set(start["files"]), key=_age)
        found = []
        for name in new:
            try:
                found.append((self._root / name, (self._root / name).stat().st_size))
            except FileNotFoundError:
                pass
        return together(found)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Spans)
        for path, begin, end in partition.spans:
            try:
                yield from read_file(Path(path), self._columns, begin, end)
            except FileNotFoundError:  # retention has deleted it
                pass

    def _sealed(self) -> list[str]:
        """The oldest first."""
        return sorted((str(file.relative_to(self._root)) for file in self._root.rglob(self._glob)), key=_age)


def _begun_ms(name: str) -> int:
    begun = Path(name).name.split("-", 1)[0]
    return int(begun) if begun.isdecimal() else 0


def _age(name: str) -> tuple[int, str]:
    return _begun_ms(name), name


def register(spark: SparkSession) -> None:
    """Make the format known to a session."""
    spark.dataSource.register(CaptureSource)
