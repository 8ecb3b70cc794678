"""Where the topics of captured producers end at the other cluster: what was acked beyond that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from isthmus_spark.audit.admin import AuditError, Cluster, properties_file
from isthmus_spark.jobs.exactly_once import batches

ENDS_SCHEMA: Final = "topic string, partition int, end bigint"


def ends_of_other_side(
    events: DataFrame, servers: str, config: Path | None = None, names: Mapping[str, str] | None = None
) -> DataFrame:
    """The columns of :data:`ENDS_SCHEMA`, with names as they were captured. Raises AuditError.

    ``names``: prefixes here, and what they are there (the same where none is given). A topic or partition that the
    other cluster does not have ends at 0.
    """
    spark = events.sparkSession
    acked = batches(events).select("topic", "partition").distinct().where(f.col("topic").isNotNull())
    places = {(row["topic"], row["partition"]) for row in acked.collect()}
    chosen = sorted((names or {"": ""}).items(), key=lambda each: -len(each[0]))
    mapped: dict[tuple[str, int], tuple[str, int]] = {}
    for topic, partition in places:
        here = next((prefix for prefix, _ in chosen if topic.startswith(prefix)), None)
        if here is not None:
            mapped[topic, partition] = dict(chosen)[here] + topic.removeprefix(here), partition
    if not mapped:
        raise AuditError("no acked batch of a producer with an id was captured of these topics: see --topic")
    with Cluster(spark, servers, properties_file(spark, config) if config else {}) as other:
        known = other.topics()
        there = {place for place in mapped.values() if place[1] < known.get(place[0], 0)}
        ends = other.ends(there, committed=False)
    rows = [(*place, ends.get(named, 0)) for place, named in sorted(mapped.items())]
    return spark.createDataFrame(rows, ENDS_SCHEMA)
