"""``isthmus spark lag-and-states`` and ``isthmus spark sync``: jobs over what was captured of links."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

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
    from isthmus_spark.jobs.sync import Scenario

_TROUBLES_MAX: Final = 1000
DEFAULT_RTTS_MS: Final = (5.0, 20.0, 80.0)


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

    seen = captured(spark, capture, link_states.SEEN)
    pieces = link_states.pieces(captured(spark, capture, link_states.COLUMNS, "links"), seen).cache()
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


def sync(
    capture: CaptureArgument,
    rtt_ms: Annotated[
        list[float] | None,
        typer.Option(
            "--rtt-ms", help="One link of this round trip; again for another scenario (default: 5, 20, 80).", min=0
        ),
    ] = None,
    quorum: Annotated[
        list[str] | None,
        typer.Option("--quorum", help="Several links by their round trips: 'ANY 1 (5, 20)', 'ALL (5, 20)'."),
    ] = None,
    append_ms: Annotated[
        float | None, typer.Option("--append-ms", help="What an append takes there (default: as captured).", min=0)
    ] = None,
    real_rtt_ms: Annotated[
        float | None,
        typer.Option("--real-rtt-ms", help="The round trip when it was captured (default: as captured).", min=0),
    ] = None,
    report: ReportOption = None,
    master: MasterOption = None,
    output: OutputOption = "table",
) -> None:
    """What synchronous mode costs, and would cost with other round trips and quorums: captured arrivals, replayed."""
    from isthmus_spark.jobs.sync import Scenario
    from isthmus_spark.jobs.sync import quorum as parsed
    from isthmus_spark.sync_report import NO_APPENDS

    rtts = rtt_ms or ([] if quorum else list(DEFAULT_RTTS_MS))
    try:
        scenarios = [Scenario(f"{each:g} ms", (round(1000 * each),), 1) for each in rtts]
        scenarios += [parsed(each) for each in quorum or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--quorum") from None
    with started("sync", capture, master) as spark:
        found = make_sync(spark, capture, report, scenarios, append_ms, real_rtt_ms)
    if output == "json":
        typer.echo(json.dumps(found, indent=2, default=str))
        return
    for title, rows in found.items():
        typer.echo(f"{title.replace('_', ' ')}:")
        for line in [NO_APPENDS] if rows is None else table_lines(rows):
            typer.echo(f"  {line}")


def make_sync(
    spark: SparkSession,
    capture: Path,
    report: Path | None,
    scenarios: Sequence[Scenario] | None = None,
    append_ms: float | None = None,
    real_rtt_ms: float | None = None,
) -> dict[str, Rows | None]:
    """``measured``, ``what_if``, ``calibration``, with a page and Parquet; None: nothing is known of appends."""
    from isthmus_spark.jobs import sync as job
    from isthmus_spark.sync_report import sync_report

    if scenarios is None:
        scenarios = [job.Scenario(f"{each:g} ms", (round(1000 * each),), 1) for each in DEFAULT_RTTS_MS]
    events = captured(spark, capture, job.COLUMNS)
    links = captured(spark, capture, job.LINK_COLUMNS, "links").cache()
    measured = job.measured(events).cache()
    found: dict[str, Rows | None] = {"measured": rows_of(measured), "what_if": None, "calibration": None}
    results = {"measured": measured}
    appends = job.append_times(links) if append_ms is None else job.constant_append(spark, round(1000 * append_ms))
    appends = appends.cache()  # it is asked for each link of a scenario
    if not appends.isEmpty():
        real = job.real_links(links) if real_rtt_ms is None else round(1000 * real_rtt_ms)
        stats = job.replay(events, scenarios, appends, real).cache()
        what_if = job.what_if(stats, scenarios).orderBy("dimension", "value", "api")
        results |= {"": what_if, "calibration": job.calibration(stats)}
        found |= {"what_if": rows_of(what_if), "calibration": rows_of(results["calibration"])}
    if report is not None:
        about = {"capture": str(capture), "Spark": spark.version}
        sync_report(found["measured"] or [], found["what_if"], found["calibration"] or [], about).write(report)
        for name, result in results.items():
            written(result, report, name)
    links.unpersist()
    return found
