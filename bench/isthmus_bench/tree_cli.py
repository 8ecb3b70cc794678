"""``isthmus bench tree``, and its report as tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.output import Output, OutputOption
from isthmus_bench.command import carry_out, in_tables
from isthmus_bench.replicate_cli import contest_tables, measured_line, targets_table
from isthmus_bench.tables import Table, number

if TYPE_CHECKING:
    from isthmus_bench.tree import Report


def tree(
    version: Annotated[str | None, typer.Option("--version", help="Kafka's version (default: the newest).")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds; figures are medians.")] = None,
    backlog: Annotated[int | None, typer.Option("--backlog-mb", min=1, help="What is to be caught up, MB.")] = None,
    partitions: Annotated[int | None, typer.Option("--partitions", min=1, help="Of the topics.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0.1, help="Of each measurement of lag.")] = None,
    mirror_maker: Annotated[
        bool, typer.Option("--mirror-maker/--no-mirror-maker", help="Also MirrorMaker 2, tuned.")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Only to see that it works.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables into this file, too.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure distribution over a tree beside MirrorMaker 2 in one run: catch-up, lag, CPU, memory.

    Exactly once and at least once, and what the header of each record costs. Takes about six minutes. Exit code 1 if a
    target is missed (not with --quick).
    """
    from dataclasses import replace

    from httpx import HTTPError

    from isthmus_bench import tree as measured
    from isthmus_bench.children import ChildFailed
    from isthmus_bench.contestants import TREE, TREE_AT_LEAST_ONCE
    from isthmus_bench.kafka import DEFAULT_VERSION, EmbeddedKafkaError
    from isthmus_bench.load import LoadError
    from isthmus_bench.proxies import ProxyFailed

    chosen: dict[str, Any] = {
        "rounds": rounds,
        "backlog_mb": backlog,
        "partitions": partitions,
        "lag_s": seconds,
        "contestants": None if mirror_maker else (TREE, TREE_AT_LEAST_ONCE),
    }
    version = version or DEFAULT_VERSION
    plan = measured.Plan.quick(version) if quick else measured.Plan.usual(version)
    contest = replace(plan.contest, **{name: value for name, value in chosen.items() if value is not None})
    plan = replace(plan, contest=contest)
    carry_out(
        lambda say: measured.run(plan, say),
        (ChildFailed, EmbeddedKafkaError, HTTPError, LoadError, ProxyFailed),
        *in_tables(measured_line, tables),
        markdown=markdown,
        output=output,
        judged=not quick,
    )


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    yield from contest_tables(report.catch_up, report.lags)
    heads = ["header of a record of 1 KB", "records", "CPU us", "of a core at 50,000/s", "as objects, CPU us"]
    rows = [
        [
            each.compression,
            str(each.records),
            number(each.apart_us, 2),
            f"{each.apart_us * 50_000 / 1e6:.0%}",
            number(each.objects_us, 2),
        ]
        for each in report.header
    ]
    yield "What the header costs", heads, rows
    yield targets_table(report.verdicts)
