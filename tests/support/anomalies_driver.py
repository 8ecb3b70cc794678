"""Runs the query of anomalies in a process of its own, which kills itself at a point: ``python -m`` this, with JSON.

planned     the batch is in the checkpoint, nothing of it has run
judged      its alerts and its state are made
open        its alerts are with the brokers, the transaction is open
committed   the transaction is committed, the process does not know it
written     the alerts are counted and told, the checkpoint does not know it
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import DataFrame

from isthmus_spark.anomalies.alerts import Alerts, Record
from isthmus_spark.anomalies.query import SETTINGS, FromKafka, Query, ToKafka
from isthmus_spark.session import session

POINTS = ("planned", "judged", "open", "committed", "written")


def die_at(point: str, nth: int, how: str) -> None:
    """Patch the classes: the nth time a batch with alerts comes to the point, it dies."""
    count = 0

    def reached() -> None:
        nonlocal count
        count += 1
        if count == nth:
            # The driver alone, or with its JVM.
            os.kill(os.getpid() if how == "driver" else -os.getpgid(0), signal.SIGKILL)

    batch, write, transact = Query._batch, Alerts.write, Alerts._transact

    class Dying:
        def __init__(self, producer: Any) -> None:
            self._producer = producer

        def __getattr__(self, name: str) -> Any:
            if name == "commitTransaction":
                reached()
            return getattr(self._producer, name)

    def patched_batch(self: Query, alerts: Alerts, frame: DataFrame, number: int) -> None:
        if point == "planned":
            reached()
        batch(self, alerts, frame, number)
        if point == "written":
            reached()

    def patched_write(self: Alerts, number: int, records: Sequence[Record]) -> bool:
        if point == "judged" and records:
            reached()
        return write(self, number, records)

    def patched_transact(self: Alerts, number: int, records: Sequence[Record]) -> None:
        if point == "open" and not isinstance(self._producer, Dying):
            self._producer = Dying(self._producer)
        transact(self, number, records)
        if point == "committed":
            reached()

    patched: dict[str, tuple[type, Callable[..., Any]]] = {
        "_batch": (Query, patched_batch),
        "write": (Alerts, patched_write),
        "_transact": (Alerts, patched_transact),
    }
    for name, (owner, function) in patched.items():
        setattr(owner, name, function)


def main() -> None:
    told = json.loads(sys.argv[1])
    if told["point"]:
        die_at(told["point"], told["nth"], told["how"])
    spark = session("anomalies", "local[2]", kafka=True, **SETTINGS)
    source = FromKafka({"bootstrap.servers": told["servers"]}, told["topic"], told["records_max"])
    Query(
        spark,
        source,
        ToKafka({"bootstrap.servers": told["servers"]}, told["alerts"]),
        told["checkpoint"],
        lambda alert: print(json.dumps(alert), flush=True),
        lambda text: print(text, file=sys.stderr, flush=True),
        shards=2,
        starting="earliest",
        trigger=None,
    ).run()
    spark.stop()


if __name__ == "__main__":
    main()
