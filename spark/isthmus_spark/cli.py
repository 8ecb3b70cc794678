"""``isthmus spark``: jobs over captured traffic, on this machine; elsewhere through spark-submit (docs/spark.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus_spark import compact_command, link_commands
from isthmus_spark.anomalies import cli as anomalies_command
from isthmus_spark.audit import command as audit_command
from isthmus_spark.command import (
    EXIT_CODES,
    CaptureArgument,
    CheckOption,
    MasterOption,
    OutputOption,
    ReportOption,
    Rows,
    example,
    run,
    say,
    started,
    table_lines,
)
from isthmus_spark.tree import command as tree_command

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Jobs over captured traffic and topics. They need the extra `spark` (pip install isthmus[spark]) and Java 17.",
)


@app.command(epilog=example("latency"))
def latency(
    capture: CaptureArgument, report: ReportOption = None, master: MasterOption = None, output: OutputOption = "table"
) -> None:
    """How long requests took, by API, client, namespace and proxy, and where the time went."""
    from isthmus_spark.jobs import latency as job
    from isthmus_spark.reports import latency_report

    def result(events: DataFrame) -> DataFrame:
        return job.latency(events).orderBy("dimension", "value", "api")

    run("latency", capture, result, job.COLUMNS, latency_report, report, master, output, _latency_lines)


@app.command(epilog=example("rejections"))
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

    found = run(
        "rejections", capture, job.rejections, job.COLUMNS, rejections_report, report, master, output, table_lines
    )
    raise typer.Exit(int(check and bool(found)))


@app.command(epilog=example("hot"))
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

    found = run("hot", capture, job.hot, job.COLUMNS, hot_report, report, master, output, table_lines)
    raise typer.Exit(int(check and bool(found)))


@app.command("exactly-once", epilog=example("exactly-once", "--other b:9092 --topic orders-=A.orders-"))
def exactly_once(
    capture: CaptureArgument,
    other: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The other cluster: what was acked is to be there, too.")
    ] = None,
    other_config: Annotated[
        Path | None, typer.Option(help="A file of Kafka client properties for --other.", exists=True)
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(metavar="PREFIX", help="With --other: HERE, or HERE=THERE. Repeatable (default: all topics)."),
    ] = None,
    report: ReportOption = None,
    master: MasterOption = None,
    output: OutputOption = "table",
    check: CheckOption = False,
) -> None:
    """Batches of idempotent and transactional producers that are stored twice, out of order, or missing elsewhere."""
    from isthmus_spark.audit.admin import AuditError
    from isthmus_spark.connector import ConnectorError
    from isthmus_spark.jobs import exactly_once as job
    from isthmus_spark.other_side import ends_of_other_side
    from isthmus_spark.reports import exactly_once_report

    if (topic or other_config) and other is None:
        raise typer.BadParameter("--topic and --other-config belong to --other")
    names = {here: there if equals else here for here, equals, there in (each.partition("=") for each in topic or ())}

    def result(events: DataFrame) -> DataFrame:
        ends = None if other is None else ends_of_other_side(events, other, other_config, names)
        return job.exactly_once(events, ends)

    kafka, page = other is not None, exactly_once_report
    try:
        found = run(
            "exactly-once", capture, result, job.COLUMNS, page, report, master, output, table_lines, kafka=kafka
        )
    except (AuditError, ConnectorError) as error:
        say(f"isthmus: {error}")
        raise typer.Exit(1) from None
    raise typer.Exit(int(check and bool(found)))


app.command("anomalies", epilog=anomalies_command.EPILOG)(anomalies_command.anomalies)
app.command("audit", epilog=audit_command.EPILOG)(audit_command.audit)
app.command("tree", epilog=tree_command.EPILOG)(tree_command.tree)
app.command("lag-and-states", epilog=example("lag-and-states"))(link_commands.lag_and_states)
app.command("sync", epilog=example("sync", "--rtt-ms 20 --quorum 'ANY 1 (5, 20)'"))(link_commands.sync)
app.command(epilog=compact_command.EPILOG)(compact_command.compact)


report_app = typer.Typer(rich_markup_mode=None)


@report_app.command(epilog="\b\nExample:\n  isthmus report /var/lib/isthmus/capture --to reports\n\n" + EXIT_CODES)
def report(
    capture: CaptureArgument,
    to: Annotated[Path, typer.Option("--to", help="The directory that the reports are written into.")],
    master: MasterOption = None,
) -> None:
    """Make all reports of captured traffic: one page each, data beside them as Parquet; `index.html` leads to them."""
    from isthmus_spark.all_reports import make_all

    with started("report", capture, master) as spark:
        for page, found in make_all(spark, capture, to):
            typer.echo(f"{page}  {found}")


def _latency_lines(rows: Rows) -> Iterator[str]:
    for row in rows:
        yield (
            f"{row['dimension']:<10} {row['value'] or '-':<28} {row['api']:<22} {row['requests']:>9} "
            f"p50 {row['p50_us'] / 1000:8.2f}  p99 {row['p99_us'] / 1000:8.2f}  max {row['max_us'] / 1000:8.2f} ms"
        )
