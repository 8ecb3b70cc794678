"""Records as Spark's Kafka source gives them, made by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, "
    "headers array<struct<key: string, value: binary>>"
)
START: Final = datetime(2026, 1, 1, tzinfo=UTC)

Headers = list[tuple[str, bytes | None]]


def record(
    offset: int,
    key: bytes | None = b"k",
    value: bytes | None = b"v",
    *,
    headers: Headers | None = None,
    at_ms: int = 0,
    topic: str = "t",
    partition: int = 0,
) -> tuple[Any, ...]:
    return (key, value, topic, partition, offset, START + timedelta(milliseconds=at_ms), 0, headers)


def frame(spark: SparkSession, *records: tuple[Any, ...]) -> DataFrame:
    return spark.createDataFrame(list(records), SCHEMA)
