"""What every benchmark's command does: say how far it is, report, and end with the verdict."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import typer

from isthmus.cli.output import CliError, Exit, Output, show
from isthmus_bench.tables import Table, markdown_lines, text_lines


class Verdict(Protocol):
    @property
    def met(self) -> bool | None: ...  # None: not measured


class Report(Protocol):
    @property
    def verdicts(self) -> Sequence[Verdict]: ...

    def as_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Report)


def python_build() -> str:
    """Python's version and how it was linked: one in a shared library takes up to half as long again."""
    shared = "/libpython" in Path("/proc/self/maps").read_text()
    return f"{platform.python_version()} ({'shared library' if shared else 'static'})"


def machine() -> dict[str, str]:
    """What this runs on."""
    return {"cores": str(os.cpu_count()), "processor": platform.machine(), "Python": python_build()}


def in_tables(
    headline: Callable[[R], str], tables: Callable[[R], Iterable[Table]]
) -> tuple[Callable[[R], Iterable[str]], Callable[[R], Iterable[str]]]:
    """``text`` and ``document`` of a report that is a line and tables."""
    return (
        lambda report: text_lines([headline(report)], tables(report)),
        lambda report: markdown_lines(f"{headline(report)}.", tables(report)),
    )


def carry_out(
    measure: Callable[[Callable[[str], None]], R],
    failures: tuple[type[Exception], ...],
    text: Callable[[R], Iterable[str]],
    document: Callable[[R], Iterable[str]],
    *,
    markdown: Path | None,
    output: Output,
    judged: bool,
) -> None:
    """Measure, print the report as ``text`` or as data, and write it as a ``document`` into ``markdown``.

    ``measure`` is given where to say what it does. Its ``failures`` become an error with a message. Where the report is
    ``judged``, the exit code is 1 if a target was missed.
    """
    started = time.monotonic()

    def say(what: str) -> None:
        typer.echo(f"[{time.monotonic() - started:5.1f} s] {what}", err=True)

    try:
        report = measure(say)
    except failures as error:
        notes = getattr(error, "__notes__", [])
        raise CliError("BENCH_FAILED", "\n".join([str(error), *notes]), output=output) from None
    if markdown is not None:
        markdown.write_text("\n".join(document(report)) + "\n")
    show(report.as_dict(), output, lambda _: text(report))
    if judged and any(verdict.met is False for verdict in report.verdicts):
        raise typer.Exit(Exit.FAILED)
