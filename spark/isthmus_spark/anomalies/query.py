"""The query: events in, alerts out, until it is asked to end."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from py4j.java_gateway import JavaClass
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from isthmus_spark.anomalies.alerts import Alerts, AlertsError, Record
from isthmus_spark.anomalies.checkpoint import Checkpoint
from isthmus_spark.anomalies.job import COLUMNS, SHARDS, WATERMARK, anomalies
from isthmus_spark.anomalies.limits import Limits
from isthmus_spark.anomalies.metrics import Metrics
from isthmus_spark.kafka_events import OPTIONS, events
from isthmus_spark.source import FORMAT as CAPTURE

ALERT_FORMAT: Final = 1
RECORDS_MAX: Final = 200_000
"""In one batch: when it has to catch up, it does so in steps."""
SETTINGS: Final = {
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.python.worker.reuse": "true",
}
"""Of the session: no batch without events, plans that are made once."""


class QueryError(Exception):
    """The query has failed; says why."""


@dataclass(frozen=True, slots=True)
class FromKafka:
    settings: Mapping[str, str]
    """Of Kafka's clients, ``bootstrap.servers`` at least."""
    topic: str
    records_max: int = RECORDS_MAX

    @property
    def about(self) -> dict[str, str]:
        return {"source": "topic", "topic": self.topic}

    def stream(self, spark: SparkSession, starting: str) -> DataFrame:
        options = {**OPTIONS, **{f"kafka.{name}": value for name, value in self.settings.items()}}
        own = {"subscribe": self.topic, "startingOffsets": starting, "maxOffsetsPerTrigger": str(self.records_max)}
        return events(spark.readStream.format("kafka").options(**options, **own).load(), columns=COLUMNS)


@dataclass(frozen=True, slots=True)
class FromFiles:
    directory: str

    @property
    def about(self) -> dict[str, str]:
        return {"source": "files"}

    def stream(self, spark: SparkSession, starting: str) -> DataFrame:
        reader = spark.readStream.format(CAPTURE).option("columns", ",".join(COLUMNS)).option("starting", starting)
        return reader.load(self.directory)


@dataclass(frozen=True, slots=True)
class ToKafka:
    settings: Mapping[str, str]
    topic: str


class Ending:
    """Has a query end soon. ``ask`` may be called from any thread; a signal's handler takes one of its own."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.asked = False

    def ask(self) -> None:
        self.asked = True
        self.event.set()


@dataclass(slots=True)
class Query:
    """One run of it. ``told``: is called with each alert that was written. ``say``: takes a line of progress."""

    spark: SparkSession
    source: FromKafka | FromFiles
    to: ToKafka
    directory: str
    """Of the checkpoint."""
    told: Callable[[dict[str, Any]], None]
    say: Callable[[str], None]
    ending: Ending = field(default_factory=Ending)
    limits: Limits = field(default_factory=Limits)
    watermark: str = WATERMARK
    shards: int = SHARDS
    starting: str = "latest"
    trigger: str | None = "0 seconds"
    """None: what there is now, and then it ends."""
    metrics: Metrics = field(init=False)
    _running: threading.Lock = field(default_factory=threading.Lock)
    _failed: AlertsError | None = None

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.say)

    def run(self) -> None:
        """Until it ends. Raises QueryError, AlertsError, CheckpointError."""
        about = {**self.source.about, "alerts": self.to.topic, "shards": self.shards}
        checkpoint = Checkpoint(self.spark, self.directory, about)
        alerts = Alerts(self.spark, self.to.settings, self.to.topic, checkpoint.query, self.say, self.ending.event)
        try:
            alerts.open(checkpoint.last_planned())
            self._run(checkpoint.query, alerts)
        finally:
            alerts.close()

    def _local_checkpoint(self) -> None:
        """On a local disk, without a process that sets each file's mode: 80 ms of a batch."""
        jvm: Any = self.spark._jvm
        manager = jvm.org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager
        if re.match(r"(file:|(?!\w+:))", self.directory) and isinstance(manager, JavaClass):
            self.spark.conf.set("spark.sql.streaming.checkpointFileManagerClass", manager._fqn)

    def _run(self, name: str, alerts: Alerts) -> None:
        self._local_checkpoint()
        self.spark.conf.set("spark.sql.shuffle.partitions", self.shards)
        found = anomalies(self.source.stream(self.spark, self.starting), self.limits, self.watermark, self.shards)
        writer = found.writeStream.queryName(name).option("checkpointLocation", self.directory).outputMode("append")
        writer = writer.foreachBatch(lambda frame, batch: self._batch(alerts, frame, batch))
        self.spark.streams.addListener(self.metrics)
        trigger: dict[str, Any] = {"processingTime": self.trigger} if self.trigger else {"availableNow": True}
        query = writer.trigger(**trigger).start()
        self.say(f"{name} runs; alerts go to topic {self.to.topic}")
        errors: list[PySparkException] = []

        def watch() -> None:
            try:
                query.awaitTermination()
            except PySparkException as error:
                errors.append(error)
            finally:
                self.ending.event.set()

        watching = threading.Thread(target=watch, name="watch", daemon=True)
        watching.start()
        self.ending.event.wait()
        with self._running:  # the batch that runs is ended first
            query.stop()
        watching.join()
        self.spark.streams.removeListener(self.metrics)
        if not self.ending.asked and self._failed is not None:
            raise self._failed
        if not self.ending.asked and errors:
            raise QueryError(_reason(str(errors[0]))) from errors[0]

    def _batch(self, alerts: Alerts, frame: DataFrame, batch: int) -> None:
        with self._running:
            # Also if its alerts are there already: this makes the state that comes with them.
            rows = frame.collect()
            made = [_alert(row) for row in sorted(rows)]
            try:
                new = alerts.write(batch, [Record(_key(alert), json.dumps(alert).encode()) for alert in made])
            except AlertsError as error:
                self._failed = error
                raise
            for alert in made if new else ():
                self.metrics.written(alert["rule"])
                self.told(alert)


def _alert(row: Row) -> dict[str, Any]:
    return {
        "format": ALERT_FORMAT,
        "rule": row["rule"],
        "subject": json.loads(row["subject"]),
        "window_us": [_us(row["window_from"]), _us(row["window_to"])],
        "measured": row["measured"],
        "limit": row["limit"],
        "unit": row["unit"],
        "requests": row["requests"],
        "facts": json.loads(row["facts"]),
        "advice": row["advice"],
        "first_us": _us(row["first"]),
        "last_us": _us(row["last"]),
        "detected_us": time.time_ns() // 1000,
    }


def _us(time_: datetime) -> int:
    return round(time_.replace(tzinfo=UTC).timestamp() * 1_000_000)


def _key(alert: Mapping[str, Any]) -> bytes:
    """Alerts about one subject stay in their order."""
    return f"{alert['rule']} {json.dumps(alert['subject'])}".encode()


_DATA_LOST: Final = "offsets out of range|DATA_LOSS|data loss|KAFKA_DATA_LOSS"


def _reason(text: str) -> str:
    """The query's failure without its plan and the calls it came through; of a loss, what to do."""
    lines = text.split("=== Streaming Query ===")[0].splitlines()
    lines = [line.strip() for line in lines if line.strip() and not re.match(r"\s+(at |File |\^)", line)]
    said = "\n".join(lines if len(lines) <= 8 else [*lines[:3], "...", *lines[-4:]])
    if re.search(_DATA_LOST, text, re.IGNORECASE):
        said += "\nRecords were deleted before they were read: raise the topic's retention.ms, and begin anew in a new "
        said += "checkpoint directory; what was deleted is not judged."
    return said
