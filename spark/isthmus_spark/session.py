"""A Spark session with what the jobs need."""

from __future__ import annotations

import os
import sys
from typing import Final

from pyspark.sql import SparkSession

from isthmus_spark.connector import connector_jars
from isthmus_spark.source import register

MEMORY: Final = "2g"


def session(name: str, master: str | None = None, *, kafka: bool = False, **settings: str) -> SparkSession:
    """The session of a job. ``master``: None takes what spark-submit says, or this machine's cores.

    ``kafka``: with the jars of Spark's Kafka connector; spark-submit has them by its own ``--packages`` or ``--jars``.
    Raises ConnectorError if they cannot be had.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(name)
    submitted = "SPARK_ENV_LOADED" in os.environ
    if master is not None or not submitted:
        builder = builder.master(master or "local[*]")
    wanted = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": MEMORY,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "8",
        **({"spark.jars": ",".join(map(str, connector_jars()))} if kafka and not submitted else {}),
        **settings,
    }
    for key, value in wanted.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark
