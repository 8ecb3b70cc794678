"""``isthmus bench capture``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.output import Output, OutputOption
from isthmus_bench import capture_cost as measured
from isthmus_bench.children import ChildFailed
from isthmus_bench.command import carry_out, in_tables
from isthmus_bench.kafka import EmbeddedKafkaError
from isthmus_bench.load import LoadError
from isthmus_bench.proxies import ProxyFailed


def capture(
    rate: Annotated[int | None, typer.Option("--rate", min=1, help="Requests a second (default: 2,000).")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds; figures are medians.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0.1, help="Of CPU time, each time.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only to see that it works.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables into this file, too.")] = None,
    awake: Annotated[
        bool, typer.Option("--cores-awake/--cores-asleep", help="Keep idle cores from sleeping, as idle=poll would.")
    ] = True,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure what capture costs a proxy: CPU of an event, and the tail of latency, with it and without in turns.

    On an embedded broker. Takes five minutes. Exit code 1 if a target is missed (not with --quick).
    """
    plan = measured.Plan(rounds=1, seconds=0.5, tail_s=1.0, settle_s=0.5, warm_max=1) if quick else measured.Plan()
    chosen: dict[str, Any] = {"rate": rate, "rounds": rounds, "seconds": seconds}
    plan = replace(plan, awake=awake, **{name: value for name, value in chosen.items() if value is not None})
    carry_out(
        lambda say: measured.run(plan, say),
        (ChildFailed, EmbeddedKafkaError, LoadError, ProxyFailed),
        *in_tables(measured.headline, measured.tables),
        markdown=markdown,
        output=output,
        judged=not quick,
    )
