"""Ranges of offsets as data frames, through Spark's Kafka source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from isthmus_spark.audit.admin import Cluster, Place

Range = tuple[int, int]
"""From an offset to another, which is not in it."""

# A consumer waits at the end of what it fetches, and its default of 500 records a poll costs half of the throughput.
_QUICK: Final = {"kafka.fetch.max.wait.ms": "10", "kafka.max.poll.records": "5000"}
TASKS_FOR_EACH_CORE: Final = 2
SPLIT_OFFSETS: Final = 200_000
"""So many offsets are worth more tasks than there are partitions: each has a consumer to set up."""


def read(spark: SparkSession, cluster: Cluster, ranges: Mapping[Place, Range], committed: bool) -> DataFrame:
    """The records of some partitions, in parts if there are many records in few partitions.

    What is deleted meanwhile is left out silently: see where the logs begin afterwards.
    """
    partitions: dict[str, list[int]] = {}
    for topic, partition in ranges:
        partitions.setdefault(topic, []).append(partition)
    starts, ends = (
        {topic: {str(each): ranges[topic, each][at] for each in numbers} for topic, numbers in partitions.items()}
        for at in (0, 1)
    )
    options = {
        **_QUICK,
        **{f"kafka.{name}": value for name, value in cluster.properties.items()},
        "kafka.isolation.level": "read_committed" if committed else "read_uncommitted",
        "assign": json.dumps(partitions),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
        "includeHeaders": "true",
        "failOnDataLoss": "false",
    }
    tasks = TASKS_FOR_EACH_CORE * spark.sparkContext.defaultParallelism
    if len(ranges) < tasks and sum(end - start for start, end in ranges.values()) >= SPLIT_OFFSETS:
        options["minPartitions"] = str(tasks)
    return spark.read.format("kafka").options(**options).load()


def read_parts(spark: SparkSession, cluster: Cluster, parts: Mapping[Place, list[Range]], committed: bool) -> DataFrame:
    """The records of several ranges of each partition: the source takes one of each at a time."""
    rounds = max(len(each) for each in parts.values())
    frames = [
        read(spark, cluster, {place: each[at] for place, each in parts.items() if at < len(each)}, committed)
        for at in range(rounds)
    ]
    return union(frames)


def union(frames: Sequence[DataFrame]) -> DataFrame:
    """Of the same columns."""
    return reduce(DataFrame.unionAll, frames)


def joined(ranges: list[Range]) -> list[Range]:
    """Rising ranges, those that touch made one."""
    found: list[Range] = []
    for start, end in ranges:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
