"""Times counted in logarithmic buckets, so narrow that a percentile made of the counts is at most one percent off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

BASE: Final = 1.02
"""Of the buckets: the middle of one is at most 1 % from all that is in it."""


def bucket(time_us: Column) -> Column:
    """The bucket of a time."""
    return f.floor(f.log(f.greatest(time_us, f.lit(1))) / f.log(f.lit(BASE))).cast("int")


def middle_us() -> Column:
    """Of column ``bucket``: what stands for all times in it."""
    return f.pow(f.lit(BASE), f.col("bucket") + f.lit(0.5))


def ranked(buckets: DataFrame, keys: Sequence[str], count: str = "requests") -> DataFrame:
    """Counts by ``keys`` and ``bucket``, with ``upto`` (so many are in it or below) and ``all`` of the same keys."""
    whole = Window.partitionBy(*keys)
    return buckets.select(
        "*",
        f.sum(count).over(whole.orderBy("bucket")).alias("upto"),
        f.sum(count).over(whole).alias("all"),
    )


def percentile(share: float, max_us: str = "max_us") -> Column:
    """Aggregates :func:`ranked` counts; no more than the longest time that was seen."""
    reached = f.when(f.col("upto") >= f.ceil(f.col("all") * share), middle_us())
    return f.least(f.min(reached), f.max(max_us)).cast("double")
