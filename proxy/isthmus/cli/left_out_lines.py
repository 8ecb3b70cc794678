"""What a link leaves out, as the command line prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isthmus.cli.output import columns


def left_out_lines(left_out: list[dict[str, Any]], more: int = 0) -> Iterator[str]:
    """Names of the source that are not replicated; nothing where there are none."""
    if not left_out:
        return
    yield ""
    yield "not replicated, although a namespace's prefix covers it:"
    yield from columns(("TYPE", "NAME", "REASON"), ((each["type"], each["name"], each["reason"]) for each in left_out))
    if more:
        yield f"and {more} more"
