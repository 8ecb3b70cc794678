"""One Spark session for all tests of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from isthmus_spark.session import session

    spark = session("tests", "local[2]", **{"spark.sql.shuffle.partitions": "2"})
    yield spark
    spark.stop()
