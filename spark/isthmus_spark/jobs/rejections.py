"""Who is refused what: writes to follower topics and reserved namespaces, missing access, fenced producers.

What the proxy refused is distinguished from what the broker refused by the time at the broker: there is none.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from isthmus_spark.jobs.names import RETRIABLE, api_name, error_name

SCHEMA: Final = (
    "cluster string, namespace string, refused_by string, api string, error string, topic string, group_id string, "
    "client_id string, client_address string, requests bigint, first timestamp, last timestamp, advice string"
)
COLUMNS: Final = (
    *("time", "cluster", "namespace", "client_address", "client_id", "topic", "group_id", "api_key"),
    *("response_bytes", "error_code", "broker_us"),
)
"""Of events, all that is needed."""
RESERVED: Final = 42
_ADVICE: Final = {
    42: "It writes to a topic that follows a link, or is reserved: point it at the source cluster, or promote.",
    44: "It changes a topic that follows a link, or is reserved: do that at the source, or promote first.",
    29: "It commits in a group that follows, or lacks access to the topic: see its principal's ACLs.",
    30: "It lacks access to the group: see its principal's ACLs.",
    19: "The proxy had no lease, or the topic too few in-sync replicas: see /health/ready and the brokers.",
    45: "Its sequence numbers have a gap: a batch was lost between it and the broker. See its time-outs and restarts.",
    47: "Another producer with its transactional id has taken over: each instance needs an id of its own.",
    90: "Another producer with its transactional id has taken over: each instance needs an id of its own.",
}


def rejections(events: DataFrame) -> DataFrame:
    """What was refused for good, by who asked: the columns of :data:`SCHEMA`, the most frequent first.

    Codes that clients try again by themselves are not in it, unless the proxy gave them.
    """
    by_proxy = (f.col("broker_us") < 0) & (f.col("response_bytes") >= 0)
    refused = events.where((f.col("error_code") > 0) & (by_proxy | ~f.col("error_code").isin(*RETRIABLE)))
    keys = (
        "cluster",
        "namespace",
        "refused_by",
        "api_key",
        "error_code",
        "topic",
        "group_id",
        "client_id",
        "client_host",
    )
    host = f.regexp_replace("client_address", ":[0-9]+$", "")
    found = (
        refused.withColumn("refused_by", f.when(by_proxy, "proxy").otherwise("broker"))
        .withColumn("client_host", host)
        .groupBy(*keys)
        .agg(f.count(f.lit(1)).alias("requests"), f.min("time").alias("first"), f.max("time").alias("last"))
    )
    return found.select(
        *("cluster", "namespace", "refused_by"),
        api_name(f.col("api_key")).alias("api"),
        error_name(f.col("error_code")).alias("error"),
        *("topic", "group_id", "client_id"),
        f.col("client_host").alias("client_address"),
        *("requests", "first", "last"),
        _advice(f.col("error_code")).alias("advice"),
    ).orderBy(f.desc("requests"), "first")


def _advice(code: Column) -> Column:
    texts = f.create_map(*(f.lit(each) for pair in _ADVICE.items() for each in pair))
    return f.coalesce(texts[code.cast("int")], f.lit("See the client's log for this code."))
