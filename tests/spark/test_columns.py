"""Each job over captured events says which columns it reads: no other one, and none too many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from isthmus_spark.anomalies import job as anomalies
from isthmus_spark.blocks import LINK_SCHEMA, SCHEMA
from isthmus_spark.jobs import exactly_once, hot, latency, link_states, rejections, sync

pytestmark = pytest.mark.brokers  # a JVM as well


class Job(NamedTuple):
    run: Callable[[DataFrame], Any]
    columns: Sequence[str]
    schema: pa.Schema = SCHEMA


def sync_job(events: DataFrame) -> None:
    sync.measured(events)
    scenario = sync.Scenario("20 ms", (20_000,), 1)
    sync.replay(events, [scenario], sync.constant_append(events.sparkSession, 500), 20_000)


def sync_links(links: DataFrame) -> None:
    sync.append_times(links)
    sync.real_links(links)


def states_of_links(seen: DataFrame) -> None:
    link_states.pieces(empty(seen.sparkSession, LINK_SCHEMA, link_states.COLUMNS), seen)


JOBS = {
    "anomalies": Job(anomalies.anomalies, anomalies.COLUMNS),
    "exactly-once": Job(exactly_once.exactly_once, exactly_once.COLUMNS),
    "hot": Job(hot.hot, hot.COLUMNS),
    "latency": Job(latency.latency, latency.COLUMNS),
    "rejections": Job(rejections.rejections, rejections.COLUMNS),
    "sync": Job(sync_job, sync.COLUMNS),
    "sync, links": Job(sync_links, sync.LINK_COLUMNS, LINK_SCHEMA),
    "lag-and-states": Job(link_states.pieces, link_states.COLUMNS, LINK_SCHEMA),
    "lag-and-states, other events": Job(states_of_links, link_states.SEEN),
}


def empty(spark: SparkSession, schema: pa.Schema, columns: Sequence[str]) -> DataFrame:
    return spark.createDataFrame([], from_arrow_schema(pa.schema([schema.field(name) for name in columns])))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_needs_the_columns_that_it_says(name: str, spark: SparkSession) -> None:
    job = JOBS[name]
    assert len(set(job.columns)) == len(job.columns)
    job.run(empty(spark, job.schema, job.columns))  # to plan it is enough to have each column looked up
    for left_out in job.columns:
        with pytest.raises(AnalysisException, match=f"`{left_out}` cannot be resolved"):
            job.run(empty(spark, job.schema, [each for each in job.columns if each != left_out]))
