"""A Spark session with what the jobs need."""

from __future__ import annotations

import os
import sys
from typing import Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from isthmus_spark.connector import connector_jars
from isthmus_spark.source import register

MEMORY: Final = "2g"

_OWN: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": MEMORY,
    "spark.sql.shuffle.partitions": "8",
}
"""Where no spark-submit says how it is to be."""
_PACKAGES: Final = tuple(SparkContext.PACKAGE_EXTENSIONS)


def session(name: str, master: str | None = None, *, kafka: bool = False, **settings: str) -> SparkSession:
    """The session of a job. ``master``: None takes what spark-submit says, or this machine's cores.

    ``kafka``: with the jars of Spark's Kafka connector; spark-submit has them by its own ``--packages`` or ``--jars``.
    Raises ConnectorError if they cannot be had.
    """
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    builder = SparkSession.builder.appName(name)
    wanted = {"spark.sql.session.timeZone": "UTC"}
    if not submitted:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        master = master or "local[*]"
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        wanted |= _OWN
        if kafka:
            wanted["spark.jars"] = ",".join(map(str, connector_jars()))
    if master is not None:
        builder = builder.master(master)
    # A wheel of --py-files is a zip file as good as others; without this, executors do not look into it.
    SparkContext.PACKAGE_EXTENSIONS = (*_PACKAGES, ".whl")
    wanted |= settings
    for key, value in wanted.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark
