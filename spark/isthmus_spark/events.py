"""Captured events as a data frame, whether they are in block files, in Parquet, or some here and some there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from isthmus_spark.blocks import EVENTS
from isthmus_spark.compacted import captured_below
from isthmus_spark.source import FORMAT


def events(spark: SparkSession, root: Path, columns: Sequence[str], kind: str = "requests") -> DataFrame:
    """All events below a directory, each once. ``columns``: what is needed of them, as each job says.

    Which files there are is looked up now, so that all that is made of the frame has the same; one that is deleted
    meanwhile is an error. Raises OSError, NewerFormat.
    """
    found = captured_below(root, kind)
    frame = _block_events(spark, found.files, columns, kind)
    parquet = [file for batch in found.batches for file in batch.files(kind)]
    if not parquet:
        return frame
    schema = from_arrow_schema(EVENTS[kind].schema)
    reader = spark.read.schema(schema).option("recursiveFileLookup", "true")  # no columns of directories' names
    compacted = reader.parquet(*(_uri(each) for each in parquet)).select(*columns)
    return frame.unionByName(compacted) if found.files else compacted


def _block_events(spark: SparkSession, files: Sequence[Path], columns: Sequence[str], kind: str) -> DataFrame:
    """Of these block files."""
    listed = json.dumps([str(file.absolute()) for file in files])
    options = {"events": kind, "columns": ",".join(columns), "files": listed}
    return spark.read.format(FORMAT).options(**options).load()


def _uri(path: Path) -> str:
    """Of a path on this machine or mounted there, whatever file system Spark takes by default."""
    return f"file://{path.absolute()}"
