"""The audit's comparisons by hand, on few records."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.kafka_records import Headers, frame, record

from isthmus_spark.jobs import audit as job
from isthmus_spark.jobs import audit_groups

pytestmark = pytest.mark.brokers  # a JVM as well

WIDTH = 10
SALT = "7"


def differing(spark: SparkSession, left: list[Any], right: list[Any]) -> list[int]:
    sums = [job.checksums(frame(spark, *side), SALT, width=WIDTH) for side in (left, right)]
    return sorted(row.bucket for row in job.buckets(*sums).where("differs").collect())


def found(spark: SparkSession, left: list[Any], right: list[Any]) -> list[tuple[int, str]]:
    """Exactly; and whether checksums say that there is something to be found."""
    rows = job.differences(frame(spark, *left), frame(spark, *right)).collect()
    assert differing(spark, left, right) == sorted({row.offset // WIDTH for row in rows})
    return sorted((row.offset, row.finding) for row in rows)


def test_equal_records_are_equal_in_whatever_order(spark: SparkSession) -> None:
    left = [record(at, b"%d" % at, headers=[("h", b"%d" % at)]) for at in range(25)]
    assert found(spark, left, left[::-1]) == []


def test_a_missing_record_and_one_that_is_too_many(spark: SparkSession) -> None:
    records = [record(at, b"%d" % at) for at in range(30)]
    left, right = records[:3] + records[4:], records[:25] + records[26:]
    assert found(spark, left, right) == [(3, "missing on the left"), (25, "missing on the right")]


def test_one_record_at_another_offset_is_one_missing_and_one_too_many(spark: SparkSession) -> None:
    assert found(spark, [record(1)], [record(2)]) == [(1, "missing on the right"), (2, "missing on the left")]


@pytest.mark.parametrize(
    ("left", "right", "fields"),
    [
        ({"value": b"v"}, {"value": b"w"}, ["value differs"]),
        ({"key": None}, {"key": b""}, ["key differs"]),
        ({"value": None}, {"value": b""}, ["value differs"]),
        ({"key": None, "value": b"a"}, {"key": b"a", "value": None}, ["key differs", "value differs"]),
        ({"key": b"ab", "value": b"c"}, {"key": b"a", "value": b"bc"}, ["key differs", "value differs"]),
        ({"at_ms": 1}, {"at_ms": 2}, ["timestamp differs"]),
    ],
)
def test_fields_that_differ(
    spark: SparkSession, left: dict[str, Any], right: dict[str, Any], fields: list[str]
) -> None:
    assert found(spark, [record(0), record(4, **left)], [record(0), record(4, **right)]) == [
        (4, each) for each in fields
    ]


HEADERS: list[Headers | None] = [
    None,
    [("a", None)],
    [("a", b"")],
    [("a", b"null")],
    [("a", b"1"), ("b", b"2")],
    [("b", b"2"), ("a", b"1")],
    [("a", None), ("b", b"2")],
    [("a", b"2"), ("b", None)],
    [("a", None), ("2", None)],
    [("a", None), ("b", b"c")],
    [("a", b"b"), ("c", None)],
    [("a", b"2")],
    [("a", b"1"), ("a", b"1")],
    [("a", b"1")],
    [("a", b"1b"), ("", b"2")],
    [("a", b"\x00")],
    [("a", b"\xff")],
    [("a", b"\xfe")],
]


def test_headers_are_told_apart_and_found_equal(spark: SparkSession) -> None:
    pairs = [(one, other) for one in HEADERS for other in HEADERS]
    left = [record(at * WIDTH, headers=one) for at, (one, _) in enumerate(pairs)]
    right = [record(at * WIDTH, headers=other) for at, (_, other) in enumerate(pairs)]
    expected = [(at * WIDTH, "headers differ") for at, (one, other) in enumerate(pairs) if one is not other]
    assert found(spark, left, right) == expected


def test_another_salt_gives_other_checksums(spark: SparkSession) -> None:
    records = frame(spark, record(0))
    sums = {job.checksums(records, salt).collect()[0].checksum for salt in "abc"}
    assert len(sums) == 3


def test_fields_that_are_ignored(spark: SparkSession) -> None:
    left, right = frame(spark, record(0, at_ms=1)), frame(spark, record(0, at_ms=2))
    fields = ("key", "value", "headers")
    assert job.differences(left, right, fields).collect() == []
    buckets = job.buckets(job.checksums(left, SALT, fields), job.checksums(right, SALT, fields))
    assert [row.asDict() for row in buckets.collect()] == [
        {"topic": "t", "partition": 0, "bucket": 0, "left_records": 1, "right_records": 1, "differs": False}
    ]


def test_buckets_of_one_side_only_differ(spark: SparkSession) -> None:
    assert differing(spark, [record(0), record(35), record(36)], [record(0)]) == [3]
    left = job.checksums(frame(spark, record(0, partition=1), record(12)), SALT, width=WIDTH)
    buckets = job.buckets(left, job.checksums(frame(spark), SALT, width=WIDTH))
    assert sorted(tuple(row) for row in buckets.collect()) == [("t", 0, 1, 1, 0, True), ("t", 1, 0, 1, 0, True)]


def test_the_first_buckets_from_one_on(spark: SparkSession) -> None:
    compared = spark.createDataFrame(
        [("t", 0, at, 1, 1, at % 2 == 1) for at in range(12)] + [("t", 1, 5, 1, 0, True), ("u", 0, 1, 1, 0, True)],
        job.BUCKETS_SCHEMA,
    )
    froms = spark.createDataFrame([("t", 0, 4), ("t", 1, 0)], "topic string, partition int, from_bucket bigint")
    chosen = job.first_buckets(compared, froms, 2)
    assert sorted(tuple(row) for row in chosen.collect()) == [("t", 0, 5), ("t", 0, 7), ("t", 1, 5)]


def test_findings_are_counted_from_the_logs_start_on(spark: SparkSession) -> None:
    differences = spark.createDataFrame(
        [
            ("t", 0, 1, "key differs"),
            ("t", 0, 3, "key differs"),
            ("t", 0, 9, "key differs"),
            ("t", 1, 0, "key differs"),
        ],
        job.DIFFERENCES_SCHEMA,
    )
    starts = spark.createDataFrame([("t", 0, 2), ("t", 1, 1)], "topic string, partition int, start bigint")
    assert [tuple(row) for row in job.summary(differences, starts).collect()] == [("t", 0, "key differs", 3, 9, 2)]


def test_the_right_sides_names_become_the_left_sides(spark: SparkSession) -> None:
    right = frame(spark, record(0, topic="A.orders"), record(0, topic="same"))
    renamed = job.renamed(right, {"A.orders": "orders", "same": "same"})
    assert sorted(row.topic for row in renamed.collect()) == ["orders", "same"]


def latest_found(spark: SparkSession, left: list[Any], right: list[Any], end: int) -> list[tuple[int, str]]:
    ends = spark.createDataFrame([("t", 0, end)], "topic string, partition int, end bigint")
    sides = [job.latest(frame(spark, *side), ends, SALT) for side in (left, right)]
    return sorted((row.offset, row.finding) for row in job.latest_differences(*sides).collect())


def test_what_a_cleaner_took_from_one_side_is_no_difference(spark: SparkSession) -> None:
    left = [
        record(0, b"a", b"1"),
        record(1, b"a", b"2"),
        record(2, b"gone"),
        record(3, b"gone", None),
        record(4, None, b"without a key"),
        record(5, b"b", b"3"),
        record(12, b"c", b"beyond the end"),
    ]
    right = [record(1, b"a", b"2"), record(5, b"b", b"3"), record(7, b"isthmus-filler", None)]
    assert latest_found(spark, left, right, 10) == []


def test_latest_records_that_differ(spark: SparkSession) -> None:
    left = [
        record(0, b"a", b"1"),
        record(1, b"b", b"old"),
        record(2, b"b", b"new"),
        record(3, b"c", b"1"),
        record(5, b"d", b"1"),
        record(6, b"d", None),
        record(7, b"e", b"1", headers=[("h", None)]),
    ]
    right = [
        record(0, b"a", b"2"),
        record(1, b"b", b"old"),
        record(3, b"c", b"1", at_ms=1),
        record(4, b"x", b"1"),
        record(5, b"d", b"1"),
        record(7, b"e", None, headers=[("h", b"")]),
    ]
    assert latest_found(spark, left, right, 10) == [
        (0, "value differs"),
        (2, "missing on the right"),
        (3, "timestamp differs"),
        (4, "missing on the left"),
        (6, "missing on the right"),  # a tombstone of a key that lives on there
        (7, "headers differ"),
        (7, "value differs"),
    ]


def test_a_key_that_comes_again_beyond_the_end_may_have_been_cleaned(spark: SparkSession) -> None:
    left = [record(0, b"a", b"1"), record(1, b"b", b"1")]
    right = [record(11, b"a", b"2"), record(12, b"z", b"1")]
    assert latest_found(spark, left, right, 10) == [(1, "missing on the right")]


def test_committed_offsets_of_groups(spark: SparkSession) -> None:
    left = [
        ("g", "t", 0, 10, "", []),
        ("g", "t", 1, 10, "", []),
        ("g", "t", 2, 10, "x", []),
        ("g", "t", 3, 90, "", [70, 80]),
        ("g", "t", 4, 100, "", []),
        ("g", "t", 5, 101, "", []),
        ("g", "t", 6, 120, "", []),
        ("g", "u", 0, 1, "", []),
    ]
    right = [
        ("g", "t", 0, 10, "", []),
        ("g", "t", 1, 9, "", []),
        ("g", "t", 2, 10, "y", []),
        ("g", "t", 3, 80, "", [60]),
        ("g", "t", 5, 99, "", []),
        ("g", "t", 6, 121, "", []),
        ("h", "t", 0, 1, "", []),
    ]
    schema = audit_groups.POSITIONS_SCHEMA
    ends = [("t", each, 120, 100) for each in range(7)]
    frames: list[DataFrame] = [spark.createDataFrame(rows, schema) for rows in (left, right)]
    rows = audit_groups.positions(*frames, spark.createDataFrame(ends, audit_groups.ENDS_SCHEMA)).collect()
    assert sorted((row.group_id, row.topic, row.partition, row.finding) for row in rows) == [
        ("g", "t", 0, None),
        ("g", "t", 1, "committed offset differs"),
        ("g", "t", 2, "committed metadata differs"),
        ("g", "t", 3, None),  # where the left side was a moment ago
        ("g", "t", 4, "not committed on the right"),
        ("g", "t", 5, "waits for data"),
        ("g", "t", 6, "waits for data"),  # beyond the left side's end
        ("g", "u", 0, "waits for data"),  # a topic that the right side does not have
        ("h", "t", 0, "not committed on the left"),
    ]
