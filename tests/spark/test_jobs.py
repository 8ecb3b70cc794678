"""Rejections, hot spots and exactly-once, each by hand on few events: what was planted is found, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.captured import event, frame, produced

from isthmus_spark.jobs import exactly_once as e
from isthmus_spark.jobs import hot as h
from isthmus_spark.jobs.rejections import rejections

pytestmark = pytest.mark.brokers  # a JVM as well


def rows(found: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict() for row in found.collect()]


# ---- rejections ----


def test_who_writes_where_they_must_not(spark: SparkSession) -> None:
    refused = {"broker_us": -1, "response_bytes": 60, "error_code": 42, "topic": "pay-t", "client_id": "stray"}
    events = [
        *(event(0, **refused, client_address=f"10.0.0.1:{port}") for port in (1, 2, 3)),
        event(0, **{**refused, "topic": "pay-u"}, client_address="10.0.0.2:9"),
        event(900, error_code=29, response_bytes=60, api_key=1, topic="pay-t", client_id="reader"),
        event(900, error_code=6, response_bytes=60, topic="pay-t"),  # tried again
        event(900, topic="pay-t"),
        event(0, broker_us=-1, response_bytes=-1, error_code=-1),  # no answer
    ]
    found = rows(rejections(frame(spark, *events)))
    told = [(r["refused_by"], r["api"], r["error"], r["topic"], r["client_address"], r["requests"]) for r in found]
    assert told[0] == ("proxy", "Produce", "INVALID_REQUEST", "pay-t", "10.0.0.1", 3)
    assert sorted(told[1:], key=str) == [
        ("broker", "Fetch", "TOPIC_AUTHORIZATION_FAILED", "pay-t", None, 1),
        ("proxy", "Produce", "INVALID_REQUEST", "pay-u", "10.0.0.2", 1),
    ]
    assert "point it at the source" in found[0]["advice"]


# ---- exactly once ----


def findings(found: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((r["finding"], r["base_sequence"], r["base_offset"], r["other_offset"]) for r in rows(found))


def test_what_is_well_has_no_findings(spark: SparkSession) -> None:
    events = [
        *(produced(5 * number, 100 + 5 * number, 5) for number in range(20)),
        produced(0, 100, 5, at_s=1),  # sent again: the broker told where it stands
        *(produced(number, 300 + number, producer_id=10) for number in range(5)),
        produced(0, 400, producer_epoch=1),  # a new epoch begins anew
        produced(2**31 - 1, 500, producer_id=11),
        produced(0, 501, producer_id=11),  # sequences wrap
        produced(7, -1, error_code=7),
        event(900, topic="pay-t", partition=0, producer_id=-1, base_sequence=-1, base_offset=3, records=1),
        produced(50, 50, partition=1),
    ]
    ends = spark.createDataFrame([("pay-t", 0, 502), ("pay-t", 1, 51)], "topic string, partition int, end bigint")
    assert findings(e.exactly_once(frame(spark, *events), ends)) == []


def test_what_was_planted_is_found(spark: SparkSession) -> None:
    events = [
        *(produced(number, 10 + number) for number in range(4)),
        produced(2, 40, at_s=2),  # stored twice
        produced(20, 60),
        produced(21, 55),  # before the one that comes before it
        produced(30, 70, 5),
    ]
    ends = spark.createDataFrame([("pay-t", 0, 72)], "topic string, partition int, end bigint")
    assert findings(e.exactly_once(frame(spark, *events), ends)) == [
        (e.MISSING, 30, 70, 72),
        (e.REORDERED, 21, 55, 60),
        (e.DUPLICATE, 2, 40, 12),
    ]


# ---- hot ----


def test_even_load_has_no_findings(spark: SparkSession) -> None:
    events = [produced(n, n, 100, partition=n % 4, session=n % 2, client_id="good") for n in range(400)]
    assert rows(h.hot(frame(spark, *events))) == []


def test_hot_partitions_small_batches_churn_and_retries(spark: SparkSession) -> None:
    skewed = [
        produced(n, n, 100 if n % 5 else 2000, partition=n % 5, topic="pay-hot", client_id="a") for n in range(50)
    ]
    small = [produced(n, n, 1, topic="pay-small", client_id="b") for n in range(100)]
    short = [produced(n, n, 100, topic="pay-short", client_id="c", session=100 + n) for n in range(20)]
    tried = [produced(n, n, 100, topic="pay-t", client_id="d", error_code=7 * (n == 3)) for n in range(10)]
    found = rows(h.hot(frame(spark, *skewed, *small, *short, *tried)))
    told = {r["finding"].split(" (")[0]: (r["subject"], round(r["measured"], 2)) for r in found}
    assert told == {
        "hot partition": ("pay-hot-0", 4.17),  # 2000 against a mean of 480
        "small batches": ("b", 100.0),
        "connection churn": ("c", 20.0),
        "retried batches": ("d", 0.1),
    }
    assert len(found) == 4
