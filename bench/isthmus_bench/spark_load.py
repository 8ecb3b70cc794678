"""A Spark session that runs the latency job as often as it is asked to: a child of ``isthmus bench spark``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from isthmus_spark.events import events
from isthmus_spark.jobs.latency import COLUMNS, latency
from isthmus_spark.session import session


def main() -> None:
    """Lines with a ``directory`` on standard input; for each, on standard output, what it took."""
    spark = session("isthmus-bench-spark", f"local[{sys.argv[1]}]")
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        began = time.monotonic()
        rows = latency(events(spark, Path(json.loads(line)["directory"]), COLUMNS)).collect()
        seconds = time.monotonic() - began
        requests = sum(row.requests for row in rows if row.dimension == "api")
        print(json.dumps({"seconds": seconds, "requests": requests}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
