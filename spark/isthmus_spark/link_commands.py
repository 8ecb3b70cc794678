"""``isthmus spark lag-and-states`` and ``isthmus spark sync``: jobs over what was captured of links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus_spark.command import (
    CaptureArgument,
    CheckOption,
    MasterOption,
    OutputOption,
    ReportOption,
    Rows,
    captured,
    rows_of,
    started,
    table_lines,
    written,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from isthmus_spark.jobs.incidents import Limits

_TROUBLES_MAX = 1000


def lag_and_states(
    capture: CaptureArgument,
    report: ReportOption = None,
    master: MasterOption = None,
    output: OutputOption = "table",
    check: CheckOption = False,
    bad_s: Annotated[float, typer.Option("--bad-s", help="A bad state for so long is an incident.")] = 1.0,
    slow_s: Annotated[float, typer.Option("--slow-s", help="Any trouble for so long is, Catching Up too.")] = 30.0,
    lag_ms: Annotated[int, typer.Option("--lag-ms", help="To lack a record of this age is.")] = 10_000,
    lag: Annotated[int | None, typer.Option("--lag", help="To lack so many offsets is (default: no limit).")] = None,
) -> None:
    """What became of each link: its partitions' states and lag over time; RTO and RPO of each incident."""
    from isthmus_spark.jobs.incidents import Limits
    from isthmus_spark.links_report import HOW_TO, NOTHING

    with started("lag-and-states", capture, master) as spark:
        found = make_lag_and_states(spark, capture, report, Limits(bad_s, slow_s, lag_ms, lag))
    if output == "json":
        typer.echo(json.dumps(found or [], indent=2, default=str))
    elif found is None:
        typer.echo(f"{NOTHING} {HOW_TO}")
    else:
        for line in table_lines(found):
            typer.echo(line)
    raise typer.Exit(int(check and bool(found)))


def make_lag_and_states(
    spark: SparkSession, capture: Path, report: Path | None, limits: Limits | None = None
) -> Rows | None:
    """The incidents, with a page and Parquet if there is to be a report; None: no link events were captured."""
    from isthmus_spark.jobs import incidents as of_links
    from isthmus_spark.jobs import link_states
    from isthmus_spark.links_report import links_report

    seen = captured(spark, capture, ("cluster", "proxy", "time"))
    pieces = link_states.pieces(captured(spark, capture, events="links"), seen).cache()
    found = of_links.incidents(pieces, limits or of_links.Limits())
    incidents = rows_of(found)
    slices = rows_of(link_states.slices(pieces)) if report or not incidents else [{}]
    if report is not None:
        timeline = link_states.timeline(pieces).cache()
        troubles = timeline.where(~timeline.state.isin(*link_states.GOOD)).orderBy("begun").limit(_TROUBLES_MAX)
        shares = rows_of(link_states.shares(timeline))
        about = {"capture": str(capture), "Spark": spark.version}
        links_report(incidents, shares, slices, rows_of(troubles), about).write(report)
        written(found, report)
        written(timeline, report, "timeline")
        timeline.unpersist()
    pieces.unpersist()
    return incidents if slices else None
