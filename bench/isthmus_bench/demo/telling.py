"""How the demo tells its story."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

INDENT: Final = " " * 11


class Telling:
    """Tells the story on standard output; with ``-o json`` on standard error."""

    def __init__(self, quiet: bool) -> None:
        self._err = quiet
        self._started = time.monotonic()
        self._step = 0

    def step(self, text: str) -> None:
        self._step += 1
        typer.echo(f"\n[{time.monotonic() - self._started:5.1f} s] {self._step}. {text}", err=self._err)

    def line(self, text: str) -> None:
        typer.echo(f"{INDENT}{text}", err=self._err)

    def end(self) -> None:
        typer.echo(f"\n[{time.monotonic() - self._started:5.1f} s] done", err=self._err)

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar on standard error, where that is a terminal; yields what advances it."""
        columns = (TextColumn(INDENT + "{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda count: bar.update(task, advance=count)
