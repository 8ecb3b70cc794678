"""Where load is uneven or wasteful: hot partitions, small batches, churn, retries; with the setting to change."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from isthmus_spark.jobs.names import RETRIABLE

PRODUCE: Final = 0
SKEW_MIN: Final = 3.0
"""A partition that has so many times the mean of its topic's is hot."""
SMALL_BYTES: Final = 4096
SMALL_REQUESTS_MIN: Final = 100
"""Batches below this size, of a producer that has sent so many, are small."""
CHURN_REQUESTS_MAX: Final = 20
CHURN_SESSIONS_MIN: Final = 20
"""So many connections of one client with so few requests each are churn."""
RETRY_SHARE_MIN: Final = 0.01

SCHEMA: Final = (
    "finding string, cluster string, namespace string, subject string, measured double, limit double, advice string"
)


COLUMNS: Final = (
    *("cluster", "proxy", "namespace", "client_id", "topic", "session", "api_key", "part", "partition"),
    *("error_code", "batches", "batch_bytes"),
)
"""Of events, all that is needed."""


def hot(events: DataFrame) -> DataFrame:
    """Findings, the columns of :data:`SCHEMA`; ``measured`` against ``limit`` in the finding's own unit."""
    produced = events.where((f.col("api_key") == PRODUCE) & (f.col("topic").isNotNull()))
    return (
        skew(produced)
        .unionByName(small_batches(produced))
        .unionByName(churn(events))
        .unionByName(retries(produced))
        .orderBy("finding", f.desc("measured"))
    )


def skew(produced: DataFrame) -> DataFrame:
    """Partitions that get many times the mean of their topic, by bytes. A topic of one partition has no mean."""
    sizes = (
        produced.where(f.col("error_code") == 0)
        .groupBy("cluster", "namespace", "topic", "partition")
        .agg(f.sum("batch_bytes").alias("bytes"))
    )
    of_topic = Window.partitionBy("cluster", "namespace", "topic")
    ratio = f.col("bytes") / f.avg("bytes").over(of_topic)
    found = sizes.withColumn("ratio", ratio).where(f.col("ratio") >= SKEW_MIN)
    subject = f.concat_ws("-", "topic", f.col("partition").cast("string"))
    advice = "Its keys are uneven: add to the key what spreads it, or use more partitions and the default partitioner."
    return _found(found, "hot partition (times the mean)", subject, f.col("ratio"), SKEW_MIN, advice)


def small_batches(produced: DataFrame) -> DataFrame:
    """Producers whose batches are small although they send many."""
    sizes = (
        produced.where((f.col("error_code") == 0) & (f.col("batches") > 0))
        .groupBy("cluster", "namespace", "client_id")
        .agg(f.sum("batch_bytes").alias("bytes"), f.sum("batches").alias("batches"))
    )
    mean = f.col("bytes") / f.col("batches")
    found = sizes.withColumn("mean", mean).where(
        (f.col("mean") < SMALL_BYTES) & (f.col("batches") >= SMALL_REQUESTS_MIN)
    )
    advice = "Raise linger.ms (5 to 20) and batch.size: fewer, larger requests cost brokers and proxies less."
    return _found(found, "small batches (bytes)", f.col("client_id"), f.col("mean"), float(SMALL_BYTES), advice)


def churn(events: DataFrame) -> DataFrame:
    """Clients that connect again and again for a few requests."""
    sessions = events.where(f.col("part") == 0).groupBy("cluster", "namespace", "client_id", "proxy", "session")
    by_client = (
        sessions.agg(f.count(f.lit(1)).alias("requests"))
        .groupBy("cluster", "namespace", "client_id")
        .agg(f.count(f.lit(1)).alias("sessions"), f.avg("requests").alias("requests"))
    )
    found = by_client.where((f.col("sessions") >= CHURN_SESSIONS_MIN) & (f.col("requests") <= CHURN_REQUESTS_MAX))
    advice = "Keep one client for the life of the process; a connection costs more than the requests on it."
    subject, sessions_of = f.col("client_id"), f.col("sessions").cast("double")
    return _found(found, "connection churn (connections)", subject, sessions_of, float(CHURN_SESSIONS_MIN), advice)


def retries(produced: DataFrame) -> DataFrame:
    """Producers of whose batches many are answered with an error that they try again."""
    by_client = produced.groupBy("cluster", "namespace", "client_id").agg(
        f.avg(f.col("error_code").isin(*RETRIABLE).cast("double")).alias("share")
    )
    found = by_client.where(f.col("share") >= RETRY_SHARE_MIN)
    advice = "See which code: leaders that move (brokers that restart), too few in-sync replicas, or a link in doubt."
    return _found(found, "retried batches (share)", f.col("client_id"), f.col("share"), RETRY_SHARE_MIN, advice)


def _found(found: DataFrame, finding: str, subject: Column, measured: Column, limit: float, advice: str) -> DataFrame:
    return found.select(
        f.lit(finding).alias("finding"),
        *("cluster", "namespace"),
        f.coalesce(subject, f.lit("")).alias("subject"),
        measured.cast("double").alias("measured"),
        f.lit(limit).alias("limit"),
        f.lit(advice).alias("advice"),
    )
