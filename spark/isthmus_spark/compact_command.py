"""``isthmus spark compact``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from isthmus_spark.command import CaptureArgument, MasterOption, OutputOption, say, started

EPILOG: Final = (
    "\b\nExamples:\n  isthmus spark compact /var/lib/isthmus/capture --to /var/lib/isthmus/compacted --delete "
    "--keep-days 30\n"
    "  isthmus spark latency /var/lib/isthmus          # reads what is compacted, and what is not\n\n"
    "\b\nExit codes:\n  0  done\n  1  failed; nothing was lost, and the same command goes on\n  2  wrong usage\n"
)


def compact(
    capture: CaptureArgument,
    to: Annotated[Path, typer.Option("--to", help="The directory of Parquet; the same one each time.")],
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete block files that are in Parquet and on the disk.")
    ] = False,
    keep_days: Annotated[
        int | None, typer.Option(help="Delete Parquet of hours that ended so many days ago.", min=1)
    ] = None,
    keep_bytes: Annotated[
        int | None, typer.Option(help="Delete the oldest hours of Parquet, until there is no more than that.", min=1)
    ] = None,
    master: MasterOption = None,
    output: OutputOption = "table",
) -> None:
    """Take sealed block files over into Parquet, by date, hour and namespace; all jobs read both.

    Only what was not taken over before. It can be killed at any moment: no event is lost or there twice, and the same
    command goes on. What is not to be kept goes first, so never what this run takes over.
    """
    from isthmus_spark import compaction
    from isthmus_spark.blocks import DamagedFile, NewerFormat
    from isthmus_spark.parquet import write_parquet
    from isthmus_spark.retention import Keep

    keep = None if keep_days is None and keep_bytes is None else Keep(keep_days, keep_bytes)
    with started("compact", capture, master) as spark:

        def write(kind: str, files: Sequence[Path], directory: Path) -> None:
            write_parquet(spark, kind, files, directory)

        try:
            result = compaction.compact(capture, to, write, say, delete=delete, keep=keep)
        except (compaction.CompactionError, DamagedFile, NewerFormat, OSError) as error:
            say(f"error: {error}")
            raise typer.Exit(1) from None
    if output == "json":
        typer.echo(json.dumps(asdict(result), indent=2))
        return
    typer.echo(
        f"{result.events:,} events of {result.files} files in {result.batches} batches: "
        f"{result.block_bytes / 1e6:,.1f} MB became {result.parquet_bytes / 1e6:,.1f} MB"
    )
    typer.echo(f"{result.already} files were in Parquet before, {result.deleted} were deleted")
    if keep is not None:
        typer.echo(
            f"{result.expired.files} files of Parquet with {result.expired.bytes / 1e6:,.1f} MB were not to be kept"
        )
    if result.gone:
        typer.echo(
            f"{result.gone} files were deleted by somebody else before they were read: see keep_bytes of capture"
        )
