"""What commands of jobs have in common: options, exit codes, tables, progress."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

ReportOption = Annotated[Path | None, typer.Option("--report", help="Write a page, and Parquet beside it.")]
MasterOption = Annotated[str | None, typer.Option("--master", help="Spark's master (default: this machine's cores).")]
OutputOption = Annotated[str, typer.Option("-o", "--output", help="How to print the result: table or json.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Exit with 1 if there are findings.")]
EXIT_CODES: Final = "\b\nExit codes:\n  0  done\n  1  failed, or there are findings (--check)\n  2  wrong usage\n"

Rows = list[dict[str, Any]]


def lines(rows: Rows) -> Iterator[str]:
    """A table."""
    if not rows:
        yield "nothing found"
        return
    heads = list(rows[0])
    cells: list[Sequence[str]] = [heads, *([_cell(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(heads))]
    for line in cells:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
