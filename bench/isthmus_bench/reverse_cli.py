"""``isthmus bench reverse``, and its report as tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.output import Output, OutputOption
from isthmus_bench.command import carry_out, in_tables
from isthmus_bench.tables import Table, number

if TYPE_CHECKING:
    from isthmus_bench.reverse import Report


def reverse(
    rtt: Annotated[
        list[float] | None,
        typer.Option("--rtt", min=0, help="Round trip of the WAN, ms; may be repeated (default: 0 and 20)."),
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="Kafka's version (default: the newest).")] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="There and back, of each kind; the slowest counts.")
    ] = None,
    rate: Annotated[int | None, typer.Option("--rate", min=500, help="Records a second (default: 2,000).")] = None,
    many: Annotated[
        int | None, typer.Option("--many", min=0, help="Partitions to fail over at once; 0: none (default: 1,000).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only to see that it works.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables into this file, too.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure for how long nobody can write while another cluster takes over: reversed, promoted, failed over.

    By producers that are connected to both clusters; what a client takes to move stands apart. It takes four minutes.
    A WAN needs root, or CAP_NET_ADMIN. Exit code 1 if a target is missed (not with --quick).
    """
    from dataclasses import replace

    from httpx import HTTPError

    from isthmus_bench import reverse as measured
    from isthmus_bench.children import ChildFailed
    from isthmus_bench.kafka import DEFAULT_VERSION, EmbeddedKafkaError
    from isthmus_bench.load import LoadError
    from isthmus_bench.proxies import ProxyFailed

    chosen: dict[str, Any] = {
        "rtts_ms": tuple(rtt) if rtt else None,
        "rounds": rounds,
        "records_per_s": rate,
        "many": many,
    }
    version = version or DEFAULT_VERSION
    plan = measured.Plan.quick(version) if quick else measured.Plan(version)
    plan = replace(plan, **{name: value for name, value in chosen.items() if value is not None})
    carry_out(
        lambda say: measured.run(plan, say),
        (ChildFailed, EmbeddedKafkaError, HTTPError, LoadError, OSError, ProxyFailed),
        *in_tables(headline, tables),
        markdown=markdown,
        output=output,
        judged=not quick,
    )


def headline(report: Report) -> str:
    """What was measured on what, in one line."""
    host = report.machine
    return (
        f"Kafka {report.version}; {host['cores']} cores, Python {host['Python']}, load average at the end "
        f"{host['load average at the end']}; {report.records_per_s:,} records/s; what a client takes to move is apart"
    )


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    from isthmus_bench.sync_report import verdict_rows

    for rtt_ms in dict.fromkeys(each.rtt_ms for each in report.figures):
        figures = [each for each in report.figures if each.rtt_ms == rtt_ms]
        heads = [
            "taken over by",
            "partitions",
            "times",
            "pause s, median",
            "max",
            "waits for s",
            "since announced s, max",
            "until held s, median",
            "command s, median",
            "records/s before",
            "after",
            "client moves s, median",
            "max",
        ]
        rows = [
            [
                each.kind,
                str(each.partitions),
                str(len(each.moves)),
                number(each.median(lambda move: move.pause_s), 3),
                number(each.worst(lambda move: move.pause_s), 3),
                number(each.worst(lambda move: move.waits_s), 3),
                number(each.worst(lambda move: move.announced_s), 3),
                number(each.median(lambda move: move.until_held_s), 3),
                number(each.median(lambda move: move.command_s), 3),
                number(each.median(lambda move: move.records_per_s), 0),
                number(each.median(lambda move: move.after_per_s), 0),
                number(each.median(lambda move: move.client_s), 3),
                number(each.worst(lambda move: move.client_s), 3),
            ]
            for each in figures
        ]
        yield f"RTT {rtt_ms:g} ms", heads, rows
    yield "Targets", ["target", "limit", "measured", "met"], verdict_rows(report.verdicts)
