"""A Spark session that audits two clusters as often as it is asked to: a child of ``isthmus bench audit``."""

from __future__ import annotations

import json
import sys
import time

from pyspark.sql import functions as f

from isthmus_spark.audit.admin import Cluster
from isthmus_spark.audit.plan import Asked
from isthmus_spark.audit.run import audit
from isthmus_spark.session import session


def main() -> None:
    """Lines with a ``topic`` on standard input; for each, on standard output, what it took and what was found."""
    cores, *servers = sys.argv[1:]
    spark = session("isthmus-bench-audit", f"local[{cores}]", kafka=True)
    left, right = (Cluster(spark, each, {}) for each in servers)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        began = time.monotonic()
        audited = audit(spark, left, right, Asked([json.loads(line)["topic"]]))
        records = audited.partitions.agg(f.sum("left_records"), f.sum("right_records")).collect()[0]
        findings = audited.findings.count()
        seconds = time.monotonic() - began
        print(json.dumps({"seconds": seconds, "records": list(records), "findings": findings}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
