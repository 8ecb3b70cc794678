"""Two sides' records compared: checksums of ranges of offsets first, then record by record where those differ.

A checksum is one number for a bucket of offsets, whatever order its records come in, so the first pass shuffles next to
nothing. It only says where to look: the exact comparison reads those buckets again and decides. Of compacted topics,
which each side's cleaner cleans when it likes, the latest record of each key counts.

Records: what Spark's Kafka source gives, with headers; ``topic`` is the left side's name on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add, or_
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

SCHEMA: Final = (
    "finding string, left_topic string, right_topic string, partition int, group_id string, "
    "first_offset bigint, last_offset bigint, records bigint, left_offset bigint, right_offset bigint"
)
"""Of findings. Of records: how many, from which offset to which. Of ends and groups: what the two sides have."""
BUCKETS_SCHEMA: Final = (
    "topic string, partition int, bucket bigint, left_records bigint, right_records bigint, differs boolean"
)
DIFFERENCES_SCHEMA: Final = "topic string, partition int, offset bigint, finding string"

FIELDS: Final = ("key", "value", "headers", "timestamp")
MISSING_LEFT, MISSING_RIGHT = "missing on the left", "missing on the right"
BUCKET_OFFSETS: Final = 65_536
"""So narrow that a bucket is read again in a moment, and so wide that there are few of them."""
_PLACE: Final = ("topic", "partition")


def renamed(frame: DataFrame, names: Mapping[str, str]) -> DataFrame:
    """With ``topic`` by the left side's names. ``names``: from the right side's to them."""
    if all(left == right for right, left in names.items()):
        return frame
    to_left = f.create_map(*(f.lit(each) for pair in names.items() for each in pair))
    return frame.withColumn("topic", to_left[f.col("topic")])


def checksums(records: DataFrame, salt: str, fields: Sequence[str] = FIELDS, width: int = BUCKET_OFFSETS) -> DataFrame:
    """By topic, partition and bucket: how many records, and their checksum.

    ``salt``: another one for each run. Text, since a number would be compiled into the code, anew for each run.
    """
    return records.groupBy(*_PLACE, f.expr(f"offset div {width}").alias("bucket")).agg(
        f.count(f.lit(1)).alias("records"), f.bit_xor(_checksum(salt, fields)).alias("checksum")
    )


def _checksum(salt: str, fields: Sequence[str]) -> Column:
    """xxhash64 goes on from column to column and leaves NULLs out, so which ones are NULL is a column as well."""
    nulls = reduce(add, (f.col(name).isNull().cast("int") * (1 << at) for at, name in enumerate(fields)), f.lit(0))
    columns = [f.lit(salt), f.col("offset"), nulls, *(f.col(name) for name in fields)]
    if "headers" in fields:
        # Of headers: how many, and which of their values are NULL, in the place of which the salt stands.
        values = f.array_join(f.col("headers.value").cast("array<string>"), "\0", salt)
        columns += [f.coalesce(f.size("headers"), f.lit(-1)), values]
    return f.xxhash64(*columns)


def buckets(left: DataFrame, right: DataFrame) -> DataFrame:
    """Checksums of both sides, side by side: the columns of :data:`BUCKETS_SCHEMA`."""
    ours = left.withColumnsRenamed({"records": "left_records", "checksum": "left_checksum"})
    theirs = right.withColumnsRenamed({"records": "right_records", "checksum": "right_checksum"})
    same = f.col("left_records").eqNullSafe(f.col("right_records")) & f.col("left_checksum").eqNullSafe(
        f.col("right_checksum")
    )
    return ours.join(theirs, [*_PLACE, "bucket"], "full_outer").select(
        *(*_PLACE, "bucket"),
        *(f.coalesce(name, f.lit(0)).alias(name) for name in ("left_records", "right_records")),
        (~same).alias("differs"),
    )


def first_buckets(compared: DataFrame, froms: DataFrame, number: int) -> DataFrame:
    """Of each partition some buckets that differ, the first ones from a bucket on: topic, partition, bucket.

    ``froms``: topic, partition, from_bucket; other partitions are left out.
    """
    order = Window.partitionBy(*_PLACE).orderBy("bucket")
    found = differing(compared, froms).withColumn("nth", f.row_number().over(order))
    return found.where(f.col("nth") <= number).select(*_PLACE, "bucket")


def differing(compared: DataFrame, froms: DataFrame) -> DataFrame:
    """The buckets that differ, from a bucket of each partition on."""
    return compared.where("differs").join(f.broadcast(froms), list(_PLACE)).where("bucket >= from_bucket")


def differences(left: DataFrame, right: DataFrame, fields: Sequence[str] = FIELDS) -> DataFrame:
    """Records of either side, compared exactly: the columns of :data:`DIFFERENCES_SCHEMA`, one row for each field."""
    both = _side(left, "left", fields).join(_side(right, "right", fields), [*_PLACE, "offset"], "full_outer")
    found = [
        f.when(f.col("in_left").isNull(), MISSING_LEFT),
        f.when(f.col("in_right").isNull(), MISSING_RIGHT),
        *(
            f.when(
                f.col("in_left") & f.col("in_right") & ~f.col(f"left_{name}").eqNullSafe(f.col(f"right_{name}")),
                f"{name} differs" if name != "headers" else "headers differ",
            )
            for name in fields
        ),
    ]
    return both.select(*_PLACE, "offset", f.explode(f.array_compact(f.array(*found))).alias("finding"))


def _side(records: DataFrame, side: str, fields: Sequence[str]) -> DataFrame:
    return records.select(
        *(*_PLACE, "offset"), f.lit(True).alias(f"in_{side}"), *(f.col(name).alias(f"{side}_{name}") for name in fields)
    )


def latest(records: DataFrame, ends: DataFrame, salt: str, fields: Sequence[str] = FIELDS) -> DataFrame:
    """The latest record of each key before an end: its offset, whether it is a tombstone, checksums of its fields.

    ``ends``: topic, partition, end. What comes from there on says which keys the cleaner may have taken something of
    (``superseded``). Records without a key are left out as the cleaner leaves them out.
    """
    before = f.when(f.col("offset") < f.col("end"), f.col("offset"))
    compared = [name for name in fields if name != "key"]
    return (
        records.where(f.col("key").isNotNull())
        .join(f.broadcast(ends), list(_PLACE))
        .groupBy(*_PLACE, "key")
        .agg(
            f.max(before).alias("offset"),
            f.max(f.col("offset") >= f.col("end")).alias("superseded"),
            f.max_by(f.col("value").isNull(), before).alias("tombstone"),
            *(f.max_by(_checksum(salt, [name]), before).alias(name) for name in compared),
        )
    )


def latest_differences(left: DataFrame, right: DataFrame, fields: Sequence[str] = FIELDS) -> DataFrame:
    """Latest records of keys compared: the columns of :data:`DIFFERENCES_SCHEMA`.

    A key whose latest record is a tombstone counts as one that is not there. What a side misses of a key that it has
    again further on its cleaner may have taken.
    """
    compared = [name for name in fields if name != "key"]
    columns = ("offset", "superseded", "tombstone", *compared)
    sides = [
        side_of.select(*_PLACE, "key", *(f.col(name).alias(f"{side}_{name}") for name in columns))
        for side, side_of in (("left", left), ("right", right))
    ]
    both = sides[0].join(sides[1], [*_PLACE, "key"], "full_outer")
    offsets = {side: f.coalesce(f"{side}_offset", f.lit(-1)) for side in ("left", "right")}
    live = reduce(or_, (~f.coalesce(f"{side}_tombstone", f.lit(True)) for side in ("left", "right")))
    may_be_gone = {side: f.coalesce(f"{side}_superseded", f.lit(False)) for side in ("left", "right")}
    same_offset = offsets["left"] == offsets["right"]
    found = [
        f.when((offsets["left"] < offsets["right"]) & ~may_be_gone["left"], MISSING_LEFT),
        f.when((offsets["right"] < offsets["left"]) & ~may_be_gone["right"], MISSING_RIGHT),
        *(
            f.when(
                same_offset & ~f.col(f"left_{name}").eqNullSafe(f.col(f"right_{name}")),
                f"{name} differs" if name != "headers" else "headers differ",
            )
            for name in compared
        ),
    ]
    return both.where(live).select(
        *_PLACE,
        f.greatest(*offsets.values()).alias("offset"),
        f.explode(f.array_compact(f.array(*found))).alias("finding"),
    )


def summary(differences: DataFrame, starts: DataFrame) -> DataFrame:
    """Findings by partition: how many records, the first and the last. ``starts``: topic, partition, start.

    What is below a log's start by now was deleted while it was read.
    """
    return (
        differences.join(f.broadcast(starts), list(_PLACE))
        .where("offset >= start")
        .groupBy(*_PLACE, "finding")
        .agg(
            f.min("offset").alias("first_offset"),
            f.max("offset").alias("last_offset"),
            f.count(f.lit(1)).alias("records"),
        )
    )
