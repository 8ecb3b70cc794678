"""The command ``isthmus``.

Commands are loaded when they are called, so that ``isthmus status`` does not wait for what ``isthmus bench`` needs.
Those of other components and distributions come from the entry point group ``isthmus.commands``: the entry point's name
is the command's, its object a ``typer.Typer`` or a function that Typer can take. One that does not load is an error of
that command alone.
"""

from __future__ import annotations

from isthmus.cli.root import app

__all__ = ("app", "main")


def main() -> None:
    """The entry point of the command line; ends the process with one of the documented codes."""
    app(prog_name="isthmus")
