"""One Spark session for all tests of jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from isthmus_bench.demo.report import QUICK_SPARK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Of every Spark of these tests, also of commands: none lives long enough for the compiler that takes twice the CPU.
os.environ.setdefault("SPARK_SUBMIT_OPTS", " ".join(QUICK_SPARK))


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """With the Kafka connector if any test that was collected asks for it, and if it can be had."""
    from isthmus_spark.connector import ConnectorError, connector_jars
    from isthmus_spark.session import session

    wanted = any("spark_kafka" in getattr(item, "fixturenames", ()) for item in request.session.items)
    try:
        kafka = wanted and bool(connector_jars())
    except ConnectorError:
        kafka = False  # spark_kafka says why
    small = {"spark.sql.shuffle.partitions": "1"}
    spark = session("tests", "local[2]", kafka=kafka, **small)
    yield spark
    spark.stop()


@pytest.fixture
def spark_kafka(spark: SparkSession) -> SparkSession:
    """The session, whose Kafka connector has to be there."""
    from isthmus_spark.connector import connector_jars

    connector_jars()
    return spark
