"""``isthmus verify``: are both sides of a link equal?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from isthmus.cli.client import DEFAULT_URL, Admin, UrlOption
from isthmus.cli.output import EXIT_CODES, Exit, Output, OutputOption, columns, example, show, shows_progress

if TYPE_CHECKING:
    from rich.progress import Progress

REDRAW_S: Final = 0.5
WAIT_S: Final = 20.0
"""How long the proxy may wait for the end before it answers, when nobody looks at the progress."""

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog=example("isthmus verify a-to-b", "isthmus verify a-to-b -o json") + EXIT_CODES)
def verify(
    name: Annotated[str, typer.Argument(help="The link's name.")],
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read both sides of a link up to a snapshot and compare record by record; exits with 1 if they are not equal.

    A partition that could not be compared is not equal.
    """
    with Admin(url, output) as admin:
        operation = admin.post(f"/v1/links/{quote(name, safe='')}/verify")
        try:
            operation = _followed(admin, operation, output)
        except KeyboardInterrupt:
            admin.delete(f"/v1/operations/{operation['id']}")
            raise
        if operation["state"] == "failed":
            raise admin.error(operation["error"]["code"], operation["error"]["message"])
    report = operation["result"]
    show(report, output, _lines)
    raise typer.Exit(Exit.OK if report["equal"] else Exit.FAILED)


def _followed(admin: Admin, operation: dict[str, Any], output: Output) -> dict[str, Any]:
    """Wait for the operation's end, showing its progress where somebody looks."""
    looked_at = shows_progress(output)
    with _progress() if looked_at else nullcontext() as progress:
        bar = progress.add_task(f"comparing {operation['target']}", total=None) if progress else None
        while operation["state"] == "running":
            operation = admin.get(f"/v1/operations/{operation['id']}", wait_s=REDRAW_S if looked_at else WAIT_S)
            if progress is not None and bar is not None:
                progress.update(bar, completed=operation["done"], total=operation["total"])
    return operation


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield from columns(
        ("TOPIC", "REMOTE_TOPIC", "PARTITION", "EQUAL", "FROM", "TO", "RECORDS", "DIFFERENCE"),
        (
            (
                each["topic"],
                each["remote_topic"],
                each["partition"],
                each["equal"],
                each["compared_from"],
                each["compared_to"],
                each["records"],
                each["difference"],
            )
            for each in report["partitions"]
        ),
    )
    verdict = "equal" if report["equal"] else "NOT equal"
    yield f"{report['link_name']}: {verdict}, {report['records']} records compared in {report['seconds']:.1f} s"
