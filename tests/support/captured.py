"""Captured events, made by hand: what tests of Spark jobs begin with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from isthmus_spark.blocks import SCHEMA, SOURCES, TEXTS

START = datetime(2026, 1, 1, tzinfo=UTC)
NOTHING: dict[str, Any] = dict.fromkeys((*SOURCES, *TEXTS)) | {
    name: -1 for name in SCHEMA.names if name not in (*SOURCES, *TEXTS, "time")
}


def event(total_us: int, **known: Any) -> dict[str, Any]:
    """An event that took so long at the broker."""
    base = {"time": START, "cluster": "c", "proxy": "p", "namespace": "pay-"}
    times = {"proxy_us": 0, "broker_us": total_us, "gate_us": 0, "part": 0, "parts": 1, "error_code": 0, "api_key": 0}
    return {**NOTHING, **base, **times, "client_id": "app", **known}


def frame(spark: SparkSession, *events: dict[str, Any]) -> DataFrame:
    rows = [tuple(each[name] for name in SCHEMA.names) for each in events]
    return spark.createDataFrame(rows, from_arrow_schema(SCHEMA))


def produced(sequence: int, offset: int, records: int = 1, at_s: float = 0.0, **known: Any) -> dict[str, Any]:
    """A Produce request of one batch of an idempotent producer, acked."""
    batch = {
        "producer_id": 9,
        "producer_epoch": 0,
        "base_sequence": sequence,
        "base_offset": offset,
        "records": records,
    }
    size = {"batches": 1, "batch_bytes": 100 * records, "topic": "pay-t", "partition": 0, "session": 1}
    return event(1000, **{**batch, **size, "time": START + timedelta(seconds=at_s), **known})
