"""``isthmus bench captured``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.output import CliError, Output, OutputOption, show


def captured(
    to: Annotated[Path, typer.Option("--to", help="The directory to write into, new or empty.")],
    events: Annotated[int, typer.Option("--events", min=1, help="How many, about 125 bytes each.")] = 1_000_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed makes the same events.")] = 1,
    plant: Annotated[
        bool,
        typer.Option(
            "--plant", help="With a duplicate, a gap, a slow broker and writes to a follower topic, and say where."
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write captured traffic of three proxies, to measure and try Spark jobs with: capture files, as proxies do.

    Needs numpy, of the extra `spark`. 10^8 events take 13 GB. Jobs find nothing in it but what is planted.
    """
    try:
        from isthmus_bench.captured import GeneratorError, generate
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'isthmus[spark]'"
        raise CliError("EXTRA_MISSING", message, output=output) from None

    started = time.monotonic()

    def say(what: str) -> None:
        typer.echo(f"[{time.monotonic() - started:5.1f} s] {what}", err=True)

    try:
        written = generate(to, events, seed, plant, say)
    except (GeneratorError, OSError) as error:
        raise CliError("NOT_WRITTEN", str(error), output=output) from None
    show(written.as_dict(), output, _lines)


def _lines(written: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{written['events']:,} events in {written['files']} files, {written['bytes'] / 1e9:.2f} GB, "
        f"{written['seconds']:.1f} s"
    )
    for planted in written["planted"]:
        where = ", ".join(f"{name} {value}" for name, value in planted.items() if name != "what")
        yield f"planted: {planted['what']}: {where}"
