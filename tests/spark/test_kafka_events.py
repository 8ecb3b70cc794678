"""Events from records: what a proxy writes becomes rows as those of files, and what cannot be read is counted."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from support.captured import NOTHING

from isthmus_spark.blocks import SCHEMA
from isthmus_spark.kafka_events import events

pytestmark = pytest.mark.brokers  # a JVM as well

FIRST_US = 1_767_225_600_000_007


def frame(spark: SparkSession, *values: bytes) -> DataFrame:
    rows = [(bytearray(b"proxy"), bytearray(value)) for value in values]
    return spark.createDataFrame(rows, "key binary, value binary")


def record(**known: Any) -> bytes:
    return json.dumps({"format": 1, "type": "request", "time_us": FIRST_US, **known}).encode()


def test_known_fields_are_columns_and_the_rest_is_not_known(spark: SparkSession) -> None:
    known = {"cluster": "c", "proxy": "p", "topic": "pay-é", "api_key": 0, "broker_us": 2**31 - 1, "base_offset": 2**62}
    found = events(frame(spark, record(**known, producer_id=None, of_a_later_minor_version={"a": [1]})))
    assert found.schema.simpleString() == from_arrow_schema(SCHEMA).simpleString()
    (row,) = found.collect()
    time = datetime.fromtimestamp(FIRST_US // 1_000_000, UTC).replace(microsecond=7, tzinfo=None)
    assert row.asDict() == {**NOTHING, **known, "time": time}


def test_what_is_not_a_request_is_left_out_and_what_cannot_be_read_is_counted(spark: SparkSession) -> None:
    values = [
        record(client_id="a"),
        record(type="link", state="In-Sync"),
        json.dumps({"format": 1, "type": "link"}).encode(),
        record(format=2),
        b'{"format": 2, "kind": "?"}',
        b"no JSON",
        b"",
        b"[1]",
        b"{}",
        b"\xff\xfe",
        json.dumps({"format": 1, "type": "request"}).encode(),
        record(format="x"),
        record(client_id="b", broker_us="slow"),  # one field of another kind makes no other one unknown
    ]
    counts = Observation("counts")
    found = [(row.client_id, row.broker_us) for row in events(frame(spark, *values), counts).collect()]
    assert found == [("a", -1), ("b", -1)]
    assert counts.get == {"records": 13, "malformed": 7, "newer": 2}
