"""``isthmus spark``: jobs over captured traffic, on this machine; elsewhere through spark-submit (docs/spark.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus_spark.audit import command as audit_command
from isthmus_spark.terminal import EXIT_CODES, CheckOption, MasterOption, OutputOption, ReportOption, Rows
from isthmus_spark.terminal import lines as _lines
from isthmus_spark.terminal import say as _say

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from isthmus_spark.report import Report

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Jobs over captured traffic and topics. They need the extra `spark` (pip install isthmus[spark]) and Java 17.",
)

CaptureArgument = Annotated[
    Path, typer.Argument(help="The directory with captured traffic, of any number of proxies.", exists=True)
]


def _example(job: str) -> str:
    return f"\b\nExample:\n  isthmus spark {job} /var/lib/isthmus/capture --report {job}.html\n\n{EXIT_CODES}"


@app.command(epilog=_example("latency"))
def latency(
    capture: CaptureArgument, report: ReportOption = None, master: MasterOption = None, output: OutputOption = "table"
) -> None:
    """How long requests took, by API, client, namespace and proxy, and where the time went."""
    from isthmus_spark.jobs import latency as job
    from isthmus_spark.reports import latency_report

    def result(events: DataFrame) -> DataFrame:
        return job.latency(events).orderBy("dimension", "value", "api")

    _run("latency", capture, result, latency_report, report, master, output, _latency_lines, job.COLUMNS)


@app.command(epilog=_example("rejections"))
def rejections(
    capture: CaptureArgument,
    report: ReportOption = None,
    master: MasterOption = None,
    output: OutputOption = "table",
    check: CheckOption = False,
) -> None:
    """Who was refused what: writes to follower topics and reserved namespaces, missing access, fenced producers."""
    from isthmus_spark.jobs import rejections as job
    from isthmus_spark.reports import rejections_report

    found = _run("rejections", capture, job.rejections, rejections_report, report, master, output, _lines)
    raise typer.Exit(int(check and bool(found)))


@app.command(epilog=_example("hot"))
def hot(
    capture: CaptureArgument,
    report: ReportOption = None,
    master: MasterOption = None,
    output: OutputOption = "table",
    check: CheckOption = False,
) -> None:
    """Where load is uneven or wasteful: hot partitions, small batches, connection churn, retries."""
    from isthmus_spark.jobs import hot as job
    from isthmus_spark.reports import hot_report

    found = _run("hot", capture, job.hot, hot_report, report, master, output, _lines)
    raise typer.Exit(int(check and bool(found)))


@app.command("exactly-once", epilog=_example("exactly-once"))
def exactly_once(
    capture: CaptureArgument,
    report: ReportOption = None,
    master: MasterOption = None,
    output: OutputOption = "table",
    check: CheckOption = False,
) -> None:
    """Batches of idempotent and transactional producers that are stored twice, or out of order."""
    from isthmus_spark.jobs import exactly_once as job
    from isthmus_spark.reports import exactly_once_report

    found = _run("exactly-once", capture, job.exactly_once, exactly_once_report, report, master, output, _lines)
    raise typer.Exit(int(check and bool(found)))


app.command("audit", epilog=audit_command.EPILOG)(audit_command.audit)

report_app = typer.Typer(rich_markup_mode=None)


@report_app.command(epilog="\b\nExample:\n  isthmus report /var/lib/isthmus/capture --to reports\n\n" + EXIT_CODES)
def report(
    capture: CaptureArgument,
    to: Annotated[Path, typer.Option("--to", help="The directory that the reports are written into.")],
    master: MasterOption = None,
) -> None:
    """Make all reports of captured traffic: one page each, data beside them as Parquet."""
    from isthmus_spark import reports
    from isthmus_spark.jobs import exactly_once, hot, rejections
    from isthmus_spark.jobs import latency as latency_job

    jobs: dict[str, tuple[Callable[[DataFrame], DataFrame], Callable[[Rows, Mapping[str, str]], Report]]] = {
        "latency": (latency_job.latency, reports.latency_report),
        "rejections": (rejections.rejections, reports.rejections_report),
        "hot": (hot.hot, reports.hot_report),
        "exactly-once": (exactly_once.exactly_once, reports.exactly_once_report),
    }
    with _spark("report", capture, master) as spark:
        events = _events(spark, capture)
        for name, (job, page) in jobs.items():
            rows = _made(spark, capture, job(events), page, to / f"{name}.html")
            typer.echo(f"{to / name}.html  {len(rows)} rows")


def _run(
    name: str,
    capture: Path,
    job: Callable[[DataFrame], DataFrame],
    page: Callable[[Rows, Mapping[str, str]], Report],
    report: Path | None,
    master: str | None,
    output: str,
    lines: Callable[[Rows], Iterator[str]],
    columns: Sequence[str] = (),
) -> Rows:
    with _spark(name, capture, master) as spark:
        rows = _made(spark, capture, job(_events(spark, capture, columns)), page, report)
    if output == "json":
        typer.echo(json.dumps(rows, indent=2, default=str))
    else:
        for line in lines(rows):
            typer.echo(line)
    return rows


@contextmanager
def _spark(name: str, capture: Path, master: str | None) -> Iterator[SparkSession]:
    from isthmus_spark.session import session

    began = time.monotonic()
    _say(f"starting Spark, reading {capture}")
    spark = session(f"isthmus-{name}", master)
    try:
        yield spark
    finally:
        spark.stop()
    _say(f"done in {time.monotonic() - began:.1f} s")


def _events(spark: SparkSession, capture: Path, columns: Sequence[str] = ()) -> DataFrame:
    """``columns``: all that is needed of events; empty: all."""
    from isthmus_spark.source import FORMAT

    reader = spark.read.format(FORMAT)
    return (reader.option("columns", ",".join(columns)) if columns else reader).load(str(capture))


def _made(
    spark: SparkSession,
    capture: Path,
    result: DataFrame,
    page: Callable[[Rows, Mapping[str, str]], Report],
    report: Path | None,
) -> Rows:
    """The rows of a result, which is small; with a page and Parquet if there is to be a report."""
    result = result.cache()
    rows = [row.asDict() for row in result.collect()]
    if report is not None:
        page(rows, {"capture": str(capture), "Spark": spark.version}).write(report)
        result.coalesce(1).write.mode("overwrite").parquet(str(report.with_suffix(".parquet")))
    result.unpersist()
    return rows


def _latency_lines(rows: Rows) -> Iterator[str]:
    for row in rows:
        yield (
            f"{row['dimension']:<10} {row['value'] or '-':<28} {row['api']:<22} {row['requests']:>9} "
            f"p50 {row['p50_us'] / 1000:8.2f}  p99 {row['p99_us'] / 1000:8.2f}  max {row['max_us'] / 1000:8.2f} ms"
        )
