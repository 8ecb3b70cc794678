"""A Spark session with what the jobs need."""

from __future__ import annotations

import os
import sys
from typing import Final

from pyspark.sql import SparkSession

from isthmus_spark.source import register

MEMORY: Final = "2g"


def session(name: str, master: str | None = None, **settings: str) -> SparkSession:
    """The session of a job. ``master``: None takes what spark-submit says, or this machine's cores."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(name)
    if master is not None or "SPARK_ENV_LOADED" not in os.environ:
        builder = builder.master(master or "local[*]")
    wanted = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": MEMORY,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "8",
        **settings,
    }
    for key, value in wanted.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark
