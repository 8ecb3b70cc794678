"""``isthmus spark``: jobs over captured traffic, on this machine; elsewhere through spark-submit (docs/spark.md)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Jobs over captured traffic. They need the extra `spark` (pip install isthmus[spark]) and Java 17.",
)

EXAMPLES: Final = "\b\nExample:\n  isthmus spark latency /var/lib/isthmus/capture --report latency.html\n"
CaptureArgument = Annotated[Path, typer.Argument(help="The directory with captured traffic.", exists=True)]
ReportOption = Annotated[Path | None, typer.Option("--report", help="Write a page, and Parquet beside it.")]
MasterOption = Annotated[str | None, typer.Option("--master", help="Spark's master (default: this machine's cores).")]
OutputOption = Annotated[str, typer.Option("-o", "--output", help="How to print the result: table or json.")]


@app.callback()
def _root() -> None:
    pass


@app.command(epilog=EXAMPLES)
def latency(
    capture: CaptureArgument, report: ReportOption = None, master: MasterOption = None, output: OutputOption = "table"
) -> None:
    """How long requests took, by API, client, namespace and proxy, and where the time went."""
    from isthmus_spark.jobs import latency as job
    from isthmus_spark.reports import latency_report
    from isthmus_spark.session import session
    from isthmus_spark.source import FORMAT

    began = time.monotonic()
    _say(f"starting Spark, reading {capture}")
    spark = session("isthmus-latency", master)
    try:
        events = spark.read.format(FORMAT).load(str(capture))
        result = job.latency(events).orderBy("dimension", "value", "api").cache()
        rows: list[dict[str, Any]] = [row.asDict() for row in result.collect()]
        if report is not None:
            latency_report(rows, {"capture": str(capture), "Spark": spark.version}).write(report)
            result.coalesce(1).write.mode("overwrite").parquet(str(report.with_suffix(".parquet")))
    finally:
        spark.stop()
    requests = sum(row["requests"] for row in rows if row["dimension"] == "api")
    _say(f"{requests} requests in {time.monotonic() - began:.1f} s")
    if output == "json":
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(
            f"{row['dimension']:<10} {row['value'] or '-':<28} {row['api']:<22} {row['requests']:>9} "
            f"p50 {row['p50_us'] / 1000:8.2f}  p99 {row['p99_us'] / 1000:8.2f}  max {row['max_us'] / 1000:8.2f} ms"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
