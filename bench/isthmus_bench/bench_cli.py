"""``isthmus bench``: benchmarks, as a command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from isthmus.cli.output import EXIT_CODES, Output, OutputOption, example
from isthmus_bench import tables as table_text
from isthmus_bench.audit_cli import audit
from isthmus_bench.capture_cli import capture
from isthmus_bench.captured_cli import captured
from isthmus_bench.command import carry_out
from isthmus_bench.replicate_cli import replicate
from isthmus_bench.reverse_cli import reverse
from isthmus_bench.scale_cli import scale
from isthmus_bench.spark_cli import spark
from isthmus_bench.sync_cli import sync
from isthmus_bench.tables import Table, number, text_lines
from isthmus_bench.tree_cli import tree

if TYPE_CHECKING:
    from isthmus_bench.passthrough import Report, Sample

bench_app: Final = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Benchmarks: what the proxy costs and does, beside what it is compared with.",
    epilog=example("isthmus bench passthrough", "isthmus bench replicate --quick -o json"),
)
bench_app.command(
    epilog=example("isthmus bench replicate", "isthmus bench replicate --rounds 3 --no-mirror-maker -o json")
    + EXIT_CODES
)(replicate)
bench_app.command(
    epilog=example("isthmus bench tree", "isthmus bench tree --rounds 1 --no-mirror-maker -o json") + EXIT_CODES
)(tree)
bench_app.command(
    epilog=example("isthmus bench reverse", "isthmus bench reverse --rtt 0 --rtt 20 --rtt 100 --rounds 5 -o json")
    + EXIT_CODES
)(reverse)
bench_app.command(
    epilog=example("isthmus bench scale", "isthmus bench scale --topics 200 --topics 400 -o json") + EXIT_CODES
)(scale)
bench_app.command(
    epilog=example(
        "isthmus bench sync --report sync.html",
        "isthmus bench sync --rtt 0 --rtt 2 --rtt 20 --rtt 100",
        "isthmus bench sync --scenario proxied --scenario async --load open-500 --rounds 1 -o json",
    )
    + EXIT_CODES
)(sync)
bench_app.command(
    epilog=example(
        "isthmus bench captured --events 10000000 --to /tmp/captured",
        "isthmus bench captured --events 100000 --plant --to /tmp/captured -o json",
    )
    + EXIT_CODES
)(captured)
bench_app.command(
    epilog=example(
        "isthmus bench spark --report scale.html",
        "isthmus bench spark --rows 1000000 --rows 100000000 --cores 4 --in /data -o json",
    )
    + EXIT_CODES
)(spark)
bench_app.command(
    epilog=example("isthmus bench audit", "isthmus bench audit --records 10000000 --rounds 1 -o json") + EXIT_CODES
)(audit)
bench_app.command(
    epilog=example("isthmus bench capture", "isthmus bench capture --rate 8000 --rounds 5 -o json") + EXIT_CODES
)(capture)


@bench_app.callback()
def _bench() -> None:
    """Benchmarks: what the proxy costs and does, beside what it is compared with."""


@bench_app.command(
    epilog=example(
        "isthmus bench passthrough",
        "isthmus bench passthrough --broker canned --no-tls --rounds 40 --seconds 0.15 --beside ../old --beside ../old",
    )
    + EXIT_CODES
)
def passthrough(
    broker: Annotated[
        Literal["kafka", "canned"],
        typer.Option("--broker", help="Real brokers and `isthmus proxy`, or canned answers and the sessions alone."),
    ] = "kafka",
    version: Annotated[str | None, typer.Option("--version", help="Kafka's version (default: the newest).")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds; figures are medians.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0.05, help="Of each measurement.")] = None,
    idle: Annotated[int | None, typer.Option("--idle", min=1, help="Idle connections for memory.")] = None,
    connections: Annotated[int | None, typer.Option("--connections", min=1, help="At rest under load.")] = None,
    tls: Annotated[bool, typer.Option("--tls/--no-tls", help="Also with TLS on the client's leg.")] = True,
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            "--beside", help="A checkout of another version, measured in the same turns; twice for the noise."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only to see that it works.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables into this file, too.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure direct, a bare byte relay and the proxy in one run: requests/s, MB/s, latency, CPU, memory.

    Takes about five minutes. Exit code 1 if a target is missed (not with --quick).
    """
    from dataclasses import replace

    from isthmus_bench import passthrough as measured
    from isthmus_bench.children import ChildFailed
    from isthmus_bench.kafka import DEFAULT_VERSION, EmbeddedKafkaError
    from isthmus_bench.load import LoadError
    from isthmus_bench.proxies import ProxyFailed

    if beside and broker != "canned":
        raise typer.BadParameter("versions are compared with --broker canned", param_hint="--beside")
    chosen: dict[str, Any] = {
        "rounds": rounds,
        "seconds": seconds,
        "idle_connections": idle,
        "carried_connections": connections,
    }
    plan = measured.Plan.quick(broker, version or DEFAULT_VERSION) if quick else measured.Plan(broker)
    plan = replace(plan, version=version or DEFAULT_VERSION, tls=tls, beside=tuple(beside or ()))
    plan = replace(plan, **{name: value for name, value in chosen.items() if value is not None})
    carry_out(
        lambda say: measured.run(plan, say),
        (ChildFailed, EmbeddedKafkaError, LoadError, ProxyFailed),
        table_lines,
        markdown_lines,
        markdown=markdown,
        output=output,
        judged=not quick,
    )


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    for workload in dict.fromkeys(figure.workload for figure in report.figures):
        heads = [
            "path",
            "requests/s",
            "MB/s",
            "p50 us",
            "p99 us",
            "p99.9 us",
            "CPU us",
            "CPU ns/B",
            "of relay",
            "core",
            "load",
        ]
        rows = [
            [figure.path, *_cells(figure.sample), number(figure.cpu_ratio, 2), *_shares(figure.sample)]
            for figure in report.figures
            if figure.workload == workload
        ]
        yield workload, heads, rows
    if report.beside:
        heads = ["workload", "path", "beside", "CPU", "quartiles", "requests/s", "p50"]
        rows = [
            [
                each.workload,
                each.path,
                each.other,
                number(each.cpu_ratio, 2),
                " to ".join(number(quartile, 2) for quartile in each.cpu_quartiles),
                number(each.requests_ratio, 2),
                number(each.p50_ratio, 2),
            ]
            for each in report.beside
        ]
        yield "Beside other versions: ratios of each round", heads, rows
    heads = ["path", "connections", "KB each", "given back", "KB more again", "process MB"]
    rows = [
        [
            each.path,
            str(each.connections),
            number(each.bytes_each / 1024, 1),
            f"{each.given_back:.0%}",
            number(each.bytes_each_again / 1024, 1),
            number(each.resident_bytes / 1e6, 1),
        ]
        for each in report.idle
    ]
    yield "Idle connections", heads, rows
    heads = [
        "path",
        "at rest",
        "process MB",
        "requests/s",
        "MB/s",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "CPU us",
        "CPU ns/B",
    ]
    rows = [
        [each.path, str(each.connections), number(each.resident_bytes / 1e6, 1), *_cells(each.sample)]
        for each in report.carried
    ]
    yield "Produce 1 x 100 B on 10 connections, others at rest", heads, rows
    heads = ["target", "limit", "measured", "met"]
    rows = [
        [each.target, number(each.limit, 2), number(each.measured, 2), "yes" if each.met else "NO"]
        for each in report.verdicts
    ]
    yield "Targets", heads, rows


def table_lines(report: Report) -> Iterator[str]:
    """For a terminal."""
    heads = (
        f"broker: {report.broker}",
        f"machine: {report.machine}; medians of {report.rounds} rounds of {report.seconds} s",
    )
    return text_lines(heads, tables(report))


def markdown_lines(report: Report) -> Iterator[str]:
    """For a document."""
    head = f"Broker: {report.broker}. {report.machine}. Medians of {report.rounds} rounds of {report.seconds} s."
    return table_text.markdown_lines(head, tables(report))


def _cells(sample: Sample) -> list[str]:
    return [
        number(sample.requests_per_s, 0),
        number(sample.mb_per_s, 1),
        number(sample.p50_us, 0),
        number(sample.p99_us, 0),
        number(sample.p999_us, 0),
        number(sample.cpu_us, 1),
        number(sample.cpu_ns_per_byte, 3),
    ]


def _shares(sample: Sample) -> list[str]:
    return ["-" if share is None else f"{share:.0%}" for share in (sample.cpu_share, sample.load_share)]
