"""Operations: work that goes on behind a request, followed to its end."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from isthmus.admin_requests import OPERATION_WAIT_S
from isthmus.cli.client import Admin
from isthmus.cli.output import Output, shows_progress

if TYPE_CHECKING:
    from rich.progress import Progress

REDRAW_S: Final = 0.5


def follow(admin: Admin, operation: dict[str, Any], what: str, output: Output, cancel: bool) -> dict[str, Any]:
    """The result of an operation, its progress shown where somebody looks. Raises CliError where it failed.

    ``cancel``: an interrupted command stops the operation, too.
    """
    try:
        operation = _followed(admin, operation, what, output)
    except KeyboardInterrupt:
        if cancel:
            admin.delete(f"/v1/operations/{operation['id']}")
        raise
    if operation["state"] == "failed":
        raise admin.error(operation["error"]["code"], operation["error"]["message"])
    result: dict[str, Any] = operation["result"]
    return result


def _followed(admin: Admin, operation: dict[str, Any], what: str, output: Output) -> dict[str, Any]:
    """Wait for the operation's end, showing its progress where somebody looks."""
    looked_at = shows_progress(output)
    with _progress() if looked_at else nullcontext() as progress:
        bar = progress.add_task(what, total=None) if progress else None
        for last in admin.progress(operation, REDRAW_S if looked_at else OPERATION_WAIT_S):
            if progress is not None and bar is not None:
                progress.update(bar, completed=last["done"], total=last["total"])
    return last


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
