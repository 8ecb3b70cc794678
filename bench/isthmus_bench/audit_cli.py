"""``isthmus bench audit``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.output import CliError, Output, OutputOption
from isthmus_bench.command import carry_out, in_tables


def audit(
    records: Annotated[
        list[int] | None,
        typer.Option("--records", min=1, help="Of each side; may be repeated (default: 1 and 4 million)."),
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Audits of each; figures are medians.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only to see that it works.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables into this file, too.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure how many records a second `isthmus spark audit` compares, on two embedded clusters with equal topics.

    Needs the extra `spark` and Java 17. Takes about two minutes. Exit code 1 if the target is missed (not with
    --quick).
    """
    try:
        import pyspark  # noqa: F401

        from isthmus_bench import audit_speed as measured
        from isthmus_bench.children import ChildFailed
        from isthmus_bench.kafka import EmbeddedKafkaError
        from isthmus_bench.load import LoadError
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'isthmus[spark]'"
        raise CliError("EXTRA_MISSING", message, output=output) from None

    plan = measured.Plan((20_000,), rounds=1, warm_ups=0) if quick else measured.Plan()
    plan = replace(
        plan,
        records=tuple(dict.fromkeys(records)) if records else plan.records,
        rounds=rounds or plan.rounds,
    )
    carry_out(
        lambda say: measured.run(plan, say),
        (ChildFailed, EmbeddedKafkaError, LoadError, OSError),
        *in_tables(measured.headline, measured.tables),
        markdown=markdown,
        output=output,
        judged=not quick,
    )
