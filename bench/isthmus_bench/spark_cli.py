"""``isthmus bench spark``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.output import CliError, Output, OutputOption
from isthmus_bench.command import carry_out, in_tables


def spark(
    rows: Annotated[
        list[int] | None,
        typer.Option("--rows", min=1, help="May be repeated (default: 1, 3, 10 and 30 million)."),
    ] = None,
    cores: Annotated[
        list[int] | None, typer.Option("--cores", min=1, help="May be repeated (default: 1 and 2).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Runs up to 20 million rows; more are read once.")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--in", exists=True, help="Where traffic is written, and deleted (default: the system's /tmp)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only to see that it works.")] = False,
    html: Annotated[
        Path | None, typer.Option("--report", help="Write a page with a plot into this file, and JSON beside it.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables into this file, too.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure how the wall time of the latency job grows with rows and cores, on generated traffic.

    Needs the extra `spark`, Java 17 and 125 bytes of disk for each row. Takes about five minutes. Exit code 1 if a
    target is missed (not with --quick).
    """
    try:
        from isthmus_bench import spark_report
        from isthmus_bench import spark_scale as measured
        from isthmus_bench.captured import GeneratorError
        from isthmus_bench.children import ChildFailed
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'isthmus[spark]'"
        raise CliError("EXTRA_MISSING", message, output=output) from None

    chosen: dict[str, Any] = {
        "rows": tuple(rows) if rows else None,
        "cores": tuple(dict.fromkeys(cores)) if cores else None,
        "rounds": rounds,
        "directory": directory,
    }
    plan = measured.Plan((10_000, 30_000, 100_000), rounds=1, warm_ups=0) if quick else measured.Plan()
    plan = replace(plan, **{name: value for name, value in chosen.items() if value is not None})

    def measure(say: measured.Say) -> measured.Report:
        report = measured.run(plan, say)
        if html is not None:
            html.write_text(spark_report.page(report))
            html.with_suffix(".json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        return report

    carry_out(
        measure,
        (ChildFailed, GeneratorError, OSError, measured.NoRoom),
        *in_tables(spark_report.headline, spark_report.tables),
        markdown=markdown,
        output=output,
        judged=not quick,
    )
