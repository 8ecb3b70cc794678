"""What commands over captured traffic have in common: options, a session, events, a result with its report."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from isthmus_spark.report import Report

CaptureArgument = Annotated[
    Path, typer.Argument(help="The directory with captured traffic, of any number of proxies.", exists=True)
]
ReportOption = Annotated[Path | None, typer.Option("--report", help="Write a page, and Parquet beside it.")]
MasterOption = Annotated[str | None, typer.Option("--master", help="Spark's master (default: this machine's cores).")]
OutputOption = Annotated[str, typer.Option("-o", "--output", help="How to print the result: table or json.")]
EXIT_CODES: Final = "\b\nExit codes:\n  0  done\n  1  failed, or there are findings (--check)\n  2  wrong usage\n"
CheckOption = Annotated[bool, typer.Option("--check", help="Exit with 1 if there are findings.")]

Rows = list[dict[str, Any]]


def example(job: str, options: str = "") -> str:
    command = " ".join(
        filter(None, ("isthmus spark", job, "/var/lib/isthmus/capture", options, f"--report {job}.html"))
    )
    return f"\b\nExample:\n  {command}\n\n{EXIT_CODES}"


def run(
    name: str,
    capture: Path,
    job: Callable[[DataFrame], DataFrame],
    columns: Sequence[str],
    page: Callable[[Rows, Mapping[str, str]], Report],
    report: Path | None,
    master: str | None,
    output: str,
    lines: Callable[[Rows], Iterator[str]],
    kafka: bool = False,
) -> Rows:
    """``columns``: what the job needs of events; ``kafka``: it asks clusters, too."""
    with started(name, capture, master, kafka) as spark:
        rows = made(spark, capture, job(captured(spark, capture, columns)), page, report)
    if output == "json":
        typer.echo(json.dumps(rows, indent=2, default=str))
    else:
        for line in lines(rows):
            typer.echo(line)
    return rows


@contextmanager
def started(name: str, capture: Path, master: str | None, kafka: bool = False) -> Iterator[SparkSession]:
    from pyspark.errors import PySparkException

    from isthmus_spark.session import session

    began = time.monotonic()
    say(f"starting Spark, reading {capture}")
    spark = session(f"isthmus-{name}", master, kafka=kafka)
    try:
        yield spark
    except PySparkException as error:
        reason = ours(error)
        if reason is None:
            raise
        say(f"error: {reason}")
        raise typer.Exit(1) from None
    finally:
        spark.stop()
    say(f"done in {time.monotonic() - began:.1f} s")


def ours(error: Exception) -> str | None:
    """What an error of Spark's says of an error of ours in an executor, or None."""
    found = re.findall(
        r"^(?:isthmus_spark\.\w+\.(?:DamagedFile|NewerFormat)|FileNotFoundError): (.*)$", str(error), re.M
    )
    return found[-1] if found else None


def captured(spark: SparkSession, capture: Path, columns: Sequence[str], events: str = "requests") -> DataFrame:
    """``columns``: what is needed of events. ``events``: requests or links."""
    from isthmus_spark.events import events as events_below

    return events_below(spark, capture, columns, events)


def made(
    spark: SparkSession,
    capture: Path,
    result: DataFrame,
    page: Callable[[Rows, Mapping[str, str]], Report],
    report: Path | None,
) -> Rows:
    """The rows of a result, which is small; with a page and Parquet if there is to be a report."""
    result = result.cache()
    rows = rows_of(result)
    if report is not None:
        page(rows, {"capture": str(capture), "Spark": spark.version}).write(report)
        written(result, report)
    result.unpersist()
    return rows


def rows_of(result: DataFrame) -> Rows:
    """Of a small result."""
    return [row.asDict() for row in result.collect()]


def written(result: DataFrame, report: Path, name: str = "") -> None:
    """Write a result beside its report, as Parquet: here, not where Spark's executors are."""
    import pyarrow.parquet as pq

    path = report.with_suffix(".parquet")
    path = path.with_stem(f"{path.stem}-{name}") if name else path
    pq.write_table(result.toArrow(), path)


def table_lines(rows: Rows) -> Iterator[str]:
    if not rows:
        yield "nothing found"
        return
    heads = list(rows[0])
    cells: list[Sequence[str]] = [heads, *([cell(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(heads))]
    for line in cells:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
