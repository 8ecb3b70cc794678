"""What commands print, and how they end.

Results go to standard output, as a table for people or as JSON or YAML with the field names of REST. Errors and
progress go to standard error: one line ``error: message (CODE)``, with ``-o json`` a JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Final

import typer


class Exit(IntEnum):
    """How a command ends."""

    OK = 0
    FAILED = 1
    """It was refused or failed, or its verdict is negative (``verify``, ``proxy --check``)."""
    USAGE = 2
    NOT_REACHABLE = 3
    """There is no proxy at the URL (or, for ``proxy --check``, no broker at the bootstrap servers)."""


EXIT_CODES: Final = (
    "\b\nExit codes:\n"
    "  0  done\n"
    "  1  refused, failed, or the verdict is negative\n"
    "  2  wrong usage\n"
    "  3  proxy (or broker) not reachable\n"
)


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="How to print the result.", show_choices=True)]


class CliError(Exception):
    """Ends a command. ``code`` is a constant for programs, ``message`` one line for people."""

    def __init__(
        self,
        code: str,
        message: str,
        exit_code: Exit = Exit.FAILED,
        output: Output = Output.TABLE,
        error_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.exit_code = exit_code
        self.output = output
        self.error_code = error_code

    def show(self) -> None:
        """Print it to standard error."""
        if self.output is Output.JSON:
            number = {} if self.error_code is None else {"error_code": self.error_code}
            typer.echo(json.dumps({**number, "code": self.code, "message": self.message}), err=True)
        else:
            typer.echo(f"error: {self.message} ({self.code})", err=True)


def example(*lines: str) -> str:
    """The part of a command's help that shows how it is used."""
    head = "Example" if len(lines) == 1 else "Examples"
    return "\b\n" + head + ":\n" + "".join(f"  {line}\n" for line in lines) + "\n"


def show(value: Any, output: Output, table: Callable[[Any], Iterable[str]]) -> None:
    """Print a result. ``table`` makes the lines for people."""
    if output is Output.JSON:
        typer.echo(json.dumps(value, indent=2))
    elif output is Output.YAML:
        import yaml

        typer.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), nl=False)
    else:
        for line in table(value):
            typer.echo(line)


def columns(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Rows below their heads, aligned by spaces alone, so that lines can be searched and cut."""
    cells = [list(heads), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def fields(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    """Names and values, one pair a line."""
    pairs = [(name, _cell(value)) for name, value in pairs]
    width = max(len(name) for name, _ in pairs)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in pairs]


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, list | tuple):
        return ",".join(str(each) for each in value) or "-"
    return str(value)


def prefix_cell(prefix: str) -> str:
    """A prefix for people; the empty one must be seen."""
    return prefix or '""'


def shows_progress(output: Output) -> bool:
    """Whether somebody is looking."""
    return output is Output.TABLE and sys.stderr.isatty()
