"""How long requests took, and where: in the proxy, at the broker, behind a gate.

One pass counts requests in logarithmic buckets, so narrow that a percentile is at most one percent off. All else is
made of those counts, so it costs nothing however much traffic there was.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from isthmus_spark.jobs.buckets import bucket, percentile, ranked
from isthmus_spark.jobs.names import api_name

PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
DIMENSIONS: Final = ("api", "client_id", "namespace", "proxy")
KEYS: Final = ("cluster", "api", "client_id", "namespace", "proxy")

COLUMNS: Final = (
    *("cluster", "proxy", "namespace", "client_id", "api_key", "part", "error_code"),
    *("proxy_us", "broker_us", "gate_us"),
)
"""Of events, all that is needed."""

SCHEMA: Final = (
    "dimension string, value string, api string, requests bigint, errors bigint, "
    "p50_us double, p90_us double, p95_us double, p99_us double, p999_us double, max_us bigint, "
    "proxy_share double, broker_share double, gate_share double"
)


def latency(events: DataFrame) -> DataFrame:
    """By API, and by API and client, namespace, proxy: percentiles of the whole time, and the shares of it.

    ``events``: captured traffic. Requests that the proxy answered itself, or that got no answer, are not in it. The
    result has the columns of :data:`SCHEMA`; ``value`` is what the dimension is for these requests.
    """
    buckets = histogram(events)
    # Each bucket counts once for each dimension. One data frame for all of them, so that traffic is read once.
    dimensions = f.array(
        *(
            f.struct(
                f.lit(name).alias("dimension"),
                (f.lit("all") if name == "api" else f.coalesce(f.col(name), f.lit(""))).alias("value"),
            )
            for name in DIMENSIONS
        )
    )
    counted = buckets.withColumn("of", f.explode(dimensions)).select(
        *("of.*", "api", "bucket", "requests", "errors", "max_us", "proxy_us", "broker_us", "gate_us")
    )
    return _percentiles(counted)


def histogram(events: DataFrame) -> DataFrame:
    """How many requests took how long: by :data:`KEYS` and bucket."""
    total = (f.col("proxy_us") + f.col("broker_us") + f.col("gate_us")).cast("bigint")
    answered = events.where((f.col("part") == 0) & (f.col("broker_us") >= 0))
    counted = answered.select(
        *(f.col(each) for each in KEYS if each != "api"),
        "api_key",
        bucket(total).alias("bucket"),
        total.alias("total_us"),
        *("proxy_us", "broker_us", "gate_us", "error_code"),
    )
    summed = counted.groupBy(*(each for each in KEYS if each != "api"), "api_key", "bucket").agg(
        f.count(f.lit(1)).alias("requests"),
        f.sum((f.col("error_code") > 0).cast("bigint")).alias("errors"),
        f.max("total_us").alias("max_us"),
        *(f.sum(each).alias(each) for each in ("proxy_us", "broker_us", "gate_us")),
    )
    # Named here, for a name costs more than a number in each event.
    return summed.withColumn("api", api_name(f.col("api_key"))).drop("api_key")


def _percentiles(buckets: DataFrame) -> DataFrame:
    keys = ("dimension", "value", "api")
    summed = buckets.groupBy(*keys, "bucket").agg(
        *(f.sum(each).alias(each) for each in ("requests", "errors", "proxy_us", "broker_us", "gate_us")),
        f.max("max_us").alias("max_us"),
    )
    total = f.sum("proxy_us") + f.sum("broker_us") + f.sum("gate_us")
    return (
        ranked(summed, keys)
        .groupBy(*keys)
        .agg(
            f.sum("requests").alias("requests"),
            f.sum("errors").alias("errors"),
            *(percentile(share).alias(f"{name}_us") for name, share in PERCENTILES.items()),
            f.max("max_us").alias("max_us"),
            *(
                (f.sum(f"{name}_us") / f.nullif(total, f.lit(0))).alias(f"{name}_share")
                for name in ("proxy", "broker", "gate")
            ),
        )
    )
