"""``isthmus bench replicate``, and its report as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.output import Output, OutputOption
from isthmus_bench.command import carry_out, in_tables
from isthmus_bench.tables import Table, number

if TYPE_CHECKING:
    from isthmus_bench.replicate import CatchUpFigure, Contest, LagFigure, Report, Verdict


def replicate(
    version: Annotated[str | None, typer.Option("--version", help="Kafka's version (default: the newest).")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds; figures are medians.")] = None,
    backlog: Annotated[int | None, typer.Option("--backlog-mb", min=1, help="What is to be caught up, MB.")] = None,
    partitions: Annotated[int | None, typer.Option("--partitions", min=1, help="Of the topics copied.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0.1, help="Of each measurement of lag.")] = None,
    idle: Annotated[int | None, typer.Option("--idle", min=1, help="Idle partitions.")] = None,
    mirror_maker: Annotated[
        bool, typer.Option("--mirror-maker/--no-mirror-maker", help="Also MirrorMaker 2, default and tuned.")
    ] = True,
    small_only: Annotated[bool, typer.Option("--small-batches-only", help="Nothing but small batches.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Only to see that it works.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables into this file, too.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure a link beside MirrorMaker 2 in one run: catch-up, lag, CPU, memory, time to the first record.

    Also how many small batches a second of one partition it copies. Takes about fifteen minutes. Exit code 1 if a
    target is missed (not with --quick).
    """
    from dataclasses import replace

    from httpx import HTTPError

    from isthmus_bench import replicate as measured
    from isthmus_bench.children import ChildFailed
    from isthmus_bench.contestants import LINK
    from isthmus_bench.kafka import DEFAULT_VERSION, EmbeddedKafkaError
    from isthmus_bench.load import LoadError
    from isthmus_bench.proxies import ProxyFailed

    chosen: dict[str, Any] = {
        "rounds": rounds,
        "backlog_mb": backlog,
        "partitions": partitions,
        "lag_s": seconds,
        "idle_partitions": idle,
        "contestants": () if small_only else None if mirror_maker else (LINK,),
    }
    version = version or DEFAULT_VERSION
    plan = measured.Plan.quick(version) if quick else measured.Plan(version)
    plan = replace(plan, **{name: value for name, value in chosen.items() if value is not None})
    carry_out(
        lambda say: measured.run(plan, say),
        (ChildFailed, EmbeddedKafkaError, HTTPError, LoadError, ProxyFailed),
        *in_tables(measured_line, tables),
        markdown=markdown,
        output=output,
        judged=not quick,
    )


def measured_line(report: Contest) -> str:
    """On what, and how much."""
    return (
        f"{report.broker}; {report.machine}; medians of {report.rounds} rounds; {report.partitions} partitions, "
        f"a backlog of {report.backlog_mb} MB in batches of 16 x 1 KB"
    )


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    yield from contest_tables(report.catch_up, report.lags)
    heads = ["idle", "partitions", "core", "without them"]
    rows = [
        [
            each.contestant,
            str(each.partitions),
            f"{each.cpu_share:.2%}",
            "-" if each.without is None else f"{each.without:.2%}",
        ]
        for each in report.idle
    ]
    yield "Idle partitions", heads, rows
    heads = ["small batches/s", "brokers", "written by several", "by one", "copied", "of written", "CPU ms/batch"]
    rows = [
        [
            each.kind,
            str(each.brokers),
            number(each.small.written_per_s, 0),
            number(each.small.written_by_one_per_s, 0),
            number(each.small.copied_per_s, 0),
            f"{each.small.copied_per_s / each.small.written_per_s:.0%}",
            number(each.small.cpu_ms_per_batch, 3),
        ]
        for each in report.small
    ]
    yield "Small batches of one partition", heads, rows
    yield targets_table(report.verdicts)


def contest_tables(catch_up: Sequence[CatchUpFigure], lags: Sequence[LagFigure]) -> Iterator[Table]:
    """What each contestant did."""
    heads = ["catch-up", "MB/s", "records/s", "CPU ms/MB", "core", "of tuned: MB/s", "CPU", "first record s", "MB"]
    rows = [
        [
            each.contestant,
            number(each.catch_up.mb_per_s, 1),
            number(each.catch_up.records_per_s, 0),
            number(each.catch_up.cpu_ms_per_mb, 2),
            f"{each.catch_up.cpu_share:.0%}",
            number(each.speed_ratio, 2),
            number(each.cpu_ratio, 2),
            number(each.catch_up.first_record_s, 2),
            number(each.resident_mb, 0),
        ]
        for each in catch_up
    ]
    yield "Catch-up of a backlog", heads, rows
    heads = ["lag", "records/s", "p50 ms", "p99 ms", "max ms", "ack p50 ms", "core"]
    for rate in dict.fromkeys(each.rate for each in lags):
        rows = [
            [
                each.contestant,
                number(each.lag.records_per_s, 0),
                number(each.lag.p50_ms, 2),
                number(each.lag.p99_ms, 2),
                number(each.lag.max_ms, 1),
                number(each.lag.ack_p50_ms, 2),
                f"{each.lag.cpu_share:.1%}",
            ]
            for each in lags
            if each.rate == rate
        ]
        yield f"Lag at {rate:,} records/s", heads, rows


def targets_table(verdicts: Sequence[Verdict]) -> Table:
    """Limits, and what was measured."""
    heads = ["target", "limit", "measured", "met"]
    rows = [
        [
            each.target,
            ("> " if each.least else "< ") + number(each.limit, 2),
            number(each.measured, 3),
            "yes" if each.met else "NO",
        ]
        for each in verdicts
    ]
    return "Targets", heads, rows
