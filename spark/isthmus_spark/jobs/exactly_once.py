"""What became of idempotent and transactional batches: stored twice, out of order, or acked and not on the other side.

An acked batch has a producer id, epoch, sequence and base offset. One that was sent again has the same, so two base
offsets for one sequence are a batch that is stored twice, and a later sequence below an earlier one is out of order.
What was not captured (sampling, dropped notes) is no finding: gaps between sequences are counted and not judged.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

SCHEMA: Final = (
    "finding string, cluster string, topic string, partition int, producer_id bigint, producer_epoch smallint, "
    "base_sequence int, base_offset bigint, records int, other_offset bigint, client_id string, time timestamp"
)
COLUMNS: Final = (
    *("time", "cluster", "client_id", "topic", "partition", "api_key", "error_code"),
    *("records", "producer_id", "producer_epoch", "base_sequence", "base_offset"),
)
"""Of events, all that is needed."""
PRODUCE: Final = 0
DUPLICATE, REORDERED, MISSING = "stored twice", "out of order", "acked and missing on the other side"
_PRODUCER: Final = ("cluster", "topic", "partition", "producer_id", "producer_epoch")


def batches(events: DataFrame) -> DataFrame:
    """Acked batches of producers with ids; one that was acked several times at one offset once."""
    acked = events.where(
        (f.col("api_key") == PRODUCE)
        & (f.col("error_code") == 0)
        & (f.col("producer_id") >= 0)
        & (f.col("base_offset") >= 0)
        & (f.col("records") > 0)
    )
    return acked.groupBy(*_PRODUCER, "base_sequence", "base_offset").agg(
        f.max("records").alias("records"), f.min("client_id").alias("client_id"), f.min("time").alias("time")
    )


def exactly_once(events: DataFrame, ends: DataFrame | None = None) -> DataFrame:
    """Findings, none of them if all is well: the columns of :data:`SCHEMA`.

    ``ends``: topic, partition, end of what the other cluster has (names as at the source), if that is to be compared.
    ``other_offset``: where the same batch stands as well, or the earlier one that stands behind it, or the other
    side's end.
    """
    acked = batches(events)
    same = Window.partitionBy(*_PRODUCER, "base_sequence").orderBy("base_offset")
    twice = acked.withColumn("other_offset", f.lag("base_offset").over(same)).where("other_offset is not null")
    # A sequence wraps after 2^31 records: offsets that grow while it falls by half of that are no finding.
    order = Window.partitionBy(*_PRODUCER).orderBy("base_sequence", "base_offset")
    before = f.lag("base_offset").over(order)
    once = acked.withColumn("nth", f.row_number().over(same)).where("nth = 1").drop("nth")
    reordered = (
        once.withColumn("other_offset", before)
        .withColumn("sequence_before", f.lag("base_sequence").over(order))
        .where(
            (f.col("base_offset") < f.col("other_offset"))
            & (f.col("sequence_before") < f.col("base_sequence"))
            & (f.col("base_sequence") - f.col("sequence_before") < 2**30)
        )
        .drop("sequence_before")
    )
    found = _named(twice, DUPLICATE).unionByName(_named(reordered, REORDERED))
    if ends is not None:
        known = ends.select("topic", "partition", f.col("end").alias("other_offset"))
        missing = acked.join(f.broadcast(known), ["topic", "partition"]).where(
            f.col("base_offset") + f.col("records") > f.col("other_offset")
        )
        found = found.unionByName(_named(missing, MISSING))
    return found


def _named(found: DataFrame, finding: str) -> DataFrame:
    return found.select(
        f.lit(finding).alias("finding"),
        *_PRODUCER,
        *("base_sequence", "base_offset", "records", "other_offset", "client_id", "time"),
    )
