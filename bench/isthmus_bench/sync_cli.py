"""``isthmus bench sync``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from isthmus.cli.output import Output, OutputOption
from isthmus_bench.command import carry_out, in_tables

# Written out, so that --help need not load what measures.
SCENARIO_NAMES: Final = (
    "direct, proxied, async, sync, beside, beside-standstill, stretched-2, stretched-3, stretched-2-default, "
    "stretched-3-default"
)
LOAD_NAMES: Final = (
    "depth-1, depth-5, depth-5-8p, open-100, open-500, open-2000, open-100-8p, open-500-8p, open-2000-8p, "
    "open-5000-8p, java-linger-0, java-stock, commit, transaction"
)


def sync(
    rtt: Annotated[
        list[float] | None,
        typer.Option("--rtt", min=0, help="Round trip of the WAN, ms; may be repeated (default: 20)."),
    ] = None,
    scenarios: Annotated[
        list[str] | None, typer.Option("--scenario", help=f"May be repeated (default: all): {SCENARIO_NAMES}.")
    ] = None,
    loads: Annotated[
        list[str] | None, typer.Option("--load", help=f"May be repeated (default: all): {LOAD_NAMES}.")
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="Kafka's version (default: the newest).")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds; figures are medians.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=0.1, help="Of each load; three times as long of depth-1 and commit."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only to see that it works.")] = False,
    html: Annotated[
        Path | None, typer.Option("--report", help="Write a page with plots into this file, and JSON beside it.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables into this file, too.")] = None,
    awake: Annotated[
        bool,
        typer.Option(
            "--cores-awake/--cores-asleep",
            help="Keep idle cores from sleeping, as idle=poll would; what an idle virtual machine takes to wake up is "
            "in the figures otherwise.",
        ),
    ] = True,
    sites_apart: Annotated[
        bool,
        typer.Option(
            "--sites-apart/--sites-mixed",
            help="Give each site half of the cores, as machines of their own would be; mixed, the kernel chooses.",
        ),
    ] = True,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure what an ack costs that means both sites have it: links and a stretched cluster over a WAN, in one run.

    Latency from the median to p99.9, and CPU. Takes about 75 minutes for each --rtt. The WAN needs root, or
    CAP_NET_ADMIN. Exit code 1 if a target is missed (not with --quick; targets are for --rtt 20).
    """
    import json
    from dataclasses import replace

    from httpx import HTTPError

    from isthmus_bench import sync as measured
    from isthmus_bench import sync_report
    from isthmus_bench.children import ChildFailed
    from isthmus_bench.kafka import DEFAULT_VERSION, EmbeddedKafkaError
    from isthmus_bench.load import LoadError
    from isthmus_bench.proxies import ProxyFailed
    from isthmus_bench.sync_figures import Report
    from isthmus_bench.sync_plan import LOADS, SCENARIOS, Plan

    _known("--scenario", scenarios, [each.name for each in SCENARIOS])
    _known("--load", loads, [each.name for each in LOADS])
    chosen: dict[str, Any] = {
        "rtts_ms": tuple(rtt) if rtt else None,
        "scenarios": tuple(scenarios) if scenarios else None,
        "loads": tuple(loads) if loads else None,
        "rounds": rounds,
        "seconds": seconds,
    }
    version = version or DEFAULT_VERSION
    plan = Plan.quick(version) if quick else Plan(version)
    plan = replace(
        plan,
        awake=awake,
        sites_apart=sites_apart,
        **{name: value for name, value in chosen.items() if value is not None},
    )

    def measure(say: measured.Say) -> Report:
        report = measured.run(plan, say)
        if html is not None:
            html.write_text(sync_report.page(report))
            html.with_suffix(".json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        return report

    carry_out(
        measure,
        (ChildFailed, EmbeddedKafkaError, HTTPError, LoadError, OSError, ProxyFailed),
        *in_tables(sync_report.headline, sync_report.tables),
        markdown=markdown,
        output=output,
        judged=not quick,
    )


def _known(option: str, names: list[str] | None, known: list[str]) -> None:
    """Raises BadParameter."""
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
