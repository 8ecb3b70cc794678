"""What Prometheus is shown of a query: what this process read and wrote. Counters begin at 0 when it is started."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from pyspark.sql.streaming.listener import StreamingQueryListener

from isthmus_spark.kafka_events import COUNTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

_PREFIX: Final = "isthmus_anomalies"


class Metrics(StreamingQueryListener):
    """Counts alerts as they are written, and takes the rest from the query's progress."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.registry = CollectorRegistry()
        self._alerts = self._counter("alerts", "Alerts that were written, by rule; none is counted twice.", "rule")
        self._events = self._counter("read", "Events or records that were read.")
        self._malformed = self._counter("malformed", "Records that are no events.")
        self._newer = self._counter("newer", "Records of a newer format, which were left out.")
        self._done = self._gauge("last_batch_timestamp_seconds", "When the last batch with events was done.")
        self._took = self._gauge("last_batch_seconds", "How long it took.")
        self._behind = self._gauge(
            "behind_records", "Records that the partition most behind had not been read of then."
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{_PREFIX}_{name}", text, registry=self.registry)

    def serve(self, port: int) -> None:
        """Raises OSError."""
        start_http_server(port, registry=self.registry)

    def written(self, rule: str) -> None:
        self._alerts.labels(rule).inc()

    # ---- of the query ----

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        if not progress.numInputRows:
            return
        self._events.inc(progress.numInputRows)
        self._done.set(time.time())
        self._took.set(progress.durationMs.get("triggerExecution", 0) / 1000)
        for source in progress.sources:
            behind = source.metrics.get("maxOffsetsBehindLatest") if source.metrics else None
            if behind is not None:
                self._behind.set(float(behind))
        counts: Any = progress.observedMetrics.get(COUNTS)
        if counts is not None:
            self._malformed.inc(counts["malformed"])
            self._newer.inc(counts["newer"])
            if counts["malformed"]:
                self._say(f"{counts['malformed']} records are no events")
            if counts["newer"]:
                self._say(f"{counts['newer']} records have a newer format: upgrade Isthmus here")

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass
