"""Messages and their copies, told apart by all that is the same on every cluster.

A *message* is what an application produced: a record without copy flags. Its copies have the same topic, key, value,
timestamp and other headers; where clusters call topics differently, a topic is the fields of its name. Records that are
the same in all of that, produced on purpose, are counted: each cluster is to have as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from isthmus_spark.tree.document import Name, Tree

FLAGS_BYTES: Final = 8
UNREADABLE: Final = -1
"""Flags of another length, or more than one such header: the message stays where it is."""
MISSING: Final = "missing"
TWICE: Final = "there more often than produced"
ON_THE_WAY: Final = "on its way"
"""Missing, and not older than the time that copies are given."""
REFUSED: Final = "flags that cannot be read"
NO_WAY: Final = "a way that cannot be"
SEVERAL: Final = "several"
"""Produced alike on more than one cluster."""
GONE: Final = "-"
"""The message itself is not there any more."""
_IDENTITY: Final = ("topic", "identity")
_FINDING: Final = (
    *("finding", "topic", "cluster", "origin", "messages", "at.partition", "at.offset"),
    "CAST(timestamp_millis(time) AS string) AS first",
)
"""Of a message by its origin's partition and offset: the first one."""


def copies(records: DataFrame, cluster: str, header: str, name: Name | None = None) -> DataFrame:
    """What the Kafka source read of a cluster, with headers: who has what, and with which flags.

    ``name``: what topics are called there; None: the same everywhere.
    """
    headers = f.coalesce("headers", f.array())
    ours = f.filter(headers, lambda each: each["key"] == header)
    others = f.filter(headers, lambda each: each["key"] != header)
    first = f.element_at(ours, 1)["value"]
    readable = (f.size(ours) == 1) & first.isNotNull() & (f.length(first) == FLAGS_BYTES)
    read = f.conv(f.hex(first), 16, 10).cast("decimal(20,0)").cast("long")
    content = f.concat_ws(
        ":",
        _text(f.col("key")),
        _text(f.col("value")),
        f.unix_millis("timestamp").cast("string"),
        f.array_join(f.transform(others, _header), ","),
    )
    return records.select(
        f.lit(cluster).alias("cluster"),
        f.col("topic") if name is None else _shared(name).alias("topic"),
        f.sha2(content, 256).alias("identity"),
        f.when(f.size(ours) == 0, 0).when(readable, read).otherwise(UNREADABLE).alias("flags"),
        "partition",
        "offset",
        f.unix_millis("timestamp").alias("time"),
    )


def _shared(name: Name) -> Column:
    values = ((text, f.regexp_extract("topic", name.expression, group)) for text, group in name.shared)
    return f.concat(*(part for text, value in values for part in (f.lit(text), value)))


def _header(each: Column) -> Column:
    return f.concat(f.hex(each["key"].cast("binary")), f.lit("="), _text(each["value"]))


def _text(content: Column) -> Column:
    """Of bytes, which differs from NULL's and never holds a separator."""
    return f.coalesce(f.hex(content), f.lit("-"))


def messages(found: DataFrame, clusters: Sequence[str]) -> DataFrame:
    """By message: how often produced and where, which clusters have it how often, and by which flags."""
    original = f.col("flags") == 0
    return (
        found.where(f.col("flags") != UNREADABLE)
        .groupBy(*_IDENTITY)
        .agg(
            f.sum(original.cast("long")).alias("produced"),
            f.collect_set(f.when(original, f.col("cluster"))).alias("origins"),
            f.min_by(f.struct("partition", "offset"), f.when(original, f.col("time"))).alias("at"),
            f.max("time").alias("time"),
            f.collect_list(f.when(~original, f.struct("cluster", "flags"))).alias("copied"),
            f.array(
                *(
                    f.struct(
                        f.lit(name).alias("cluster"), f.sum((f.col("cluster") == name).cast("long")).alias("count")
                    )
                    for name in clusters
                )
            ).alias("there"),
        )
        .withColumn("origin", _origin(f.col("origins")))
        .withColumn("wanted", f.greatest("produced", f.lit(1)))
    )


def _origin(origins: Column) -> Column:
    size = f.size(origins)
    return f.when(size == 0, GONE).when(size == 1, f.element_at(origins, 1)).otherwise(SEVERAL)


def counted_wrongly(found: DataFrame, until_ms: int) -> DataFrame:
    """Of :func:`messages`: what clusters have too seldom or too often. ``until_ms``: what is later is on its way."""
    count = f.col("each.count")
    kind = f.when(count > f.col("wanted"), TWICE).when(f.col("time") > until_ms, ON_THE_WAY).otherwise(MISSING)
    return (
        found.withColumn("each", f.explode("there"))
        .where(count != f.col("wanted"))
        .groupBy(kind.alias("finding"), "topic", f.col("each.cluster").alias("cluster"), "origin")
        .agg(
            f.sum(f.abs(count - f.col("wanted"))).alias("messages"),
            f.min_by("at", "time").alias("at"),
            f.min("time").alias("time"),
        )
        .selectExpr(*_FINDING)
    )


def refused(found: DataFrame) -> DataFrame:
    """Of :func:`copies`: messages that stay on their cluster."""
    return (
        found.where(f.col("flags") == UNREADABLE)
        .groupBy(f.lit(REFUSED).alias("finding"), "topic", "cluster", f.col("cluster").alias("origin"))
        .agg(
            f.count(f.lit(1)).alias("messages"),
            f.min_by(f.struct("partition", "offset"), "time").alias("at"),
            f.min("time").alias("time"),
        )
        .selectExpr(*_FINDING)
    )


def ways(found: DataFrame) -> DataFrame:
    """Of :func:`messages`: how many copies came from where to where by which flags."""
    return (
        found.withColumn("each", f.explode("copied"))
        .groupBy("origin", "each.cluster", "each.flags")
        .agg(f.count(f.lit(1)).alias("messages"))
        .orderBy("origin", "cluster", "flags")
    )


def named(rows: Sequence[tuple[str, str, int, int]], tree: Tree) -> list[dict[str, object]]:
    """Rows of :func:`ways` with the levels that flags stand for; ``path`` is None where that cannot be."""
    return [
        {
            "origin": origin,
            "cluster": cluster,
            "path": _path(tree, origin, cluster, flags),
            "flags": flags,
            "messages": messages,
        }
        for origin, cluster, flags, messages in rows
    ]


def _path(tree: Tree, origin: str, cluster: str, flags: int) -> str | None:
    if origin in tree.above:
        return tree.path(origin, cluster, flags)
    ways = {way for each in tree.above if (way := tree.path(each, cluster, flags)) is not None}
    return min(ways, default=None)
