"""Captured events from a Kafka topic: the records that proxies write, as rows like those of the files.

A record is a JSON object with ``format``, ``type`` and ``time_us``; its other fields are named as the columns, and
what is not known is left out. A frame of Kafka's source, a stream or not, becomes a frame of events. What could not be
read is counted as a metric of the frame (:data:`COUNTS`): a stream goes on with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from isthmus_spark.blocks import NUMBERS, SCHEMA

FORMAT: Final = 1
REQUEST: Final = "request"
COUNTS: Final = "isthmus_events"
"""The metric: ``records``, ``malformed``, ``newer``."""

OPTIONS: Final = {"kafka.fetch.max.wait.ms": "10", "kafka.max.poll.records": "5000"}
"""Of Kafka's source: records are there sooner, and twice as many in a second."""

_HEAD: Final = [
    StructField("format", LongType()),
    StructField("type", StringType()),
    StructField("time_us", LongType()),
]


def events(
    records: DataFrame, counts: str | Observation = COUNTS, columns: Sequence[str] = tuple(SCHEMA.names)
) -> DataFrame:
    """The requests among ``records``, which have a column ``value``; with these columns of captured files.

    ``counts``: the name of the metric in a stream's progress; or, of a frame that is no stream, where it is put.
    """
    known = from_arrow_schema(pa.schema([SCHEMA.field(name) for name in columns if name != "time"]))
    read = records.select(f.from_json(f.col("value").cast("string"), StructType([*_HEAD, *known])).alias("event"))
    event = f.col("event")
    newer = f.coalesce(event["format"] > FORMAT, f.lit(False))
    whole = event["format"].isNotNull() & event["type"].isNotNull()
    malformed = ~newer & ~(whole & (event["time_us"].isNotNull() | (event["type"] != REQUEST)))
    counted = read.observe(
        counts,
        f.count(f.lit(1)).alias("records"),
        f.count_if(f.coalesce(malformed, f.lit(True))).alias("malformed"),
        f.count_if(newer).alias("newer"),
    )
    requests = counted.where(~newer & (event["type"] == REQUEST) & event["time_us"].isNotNull() & whole)
    return requests.select(*(_column(name, event, known) for name in columns))


def _column(name: str, event: Column, known: StructType) -> Column:
    if name == "time":
        return f.timestamp_micros(event["time_us"]).alias(name)
    if name in NUMBERS:
        return f.coalesce(event[name], f.lit(-1).cast(known[name].dataType)).alias(name)
    return event[name].alias(name)
