"""Reports of benchmarks as text: tables for a terminal, and the same for a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from isthmus.cli.output import columns

Table = tuple[str, list[str], list[list[str]]]
"""Title, heads, rows."""


def text_lines(heads: Iterable[str], tables: Iterable[Table]) -> Iterator[str]:
    """For a terminal, below lines that say what was measured."""
    yield from heads
    for title, names, rows in tables:
        yield ""
        yield title
        yield from columns(names, rows)


def markdown_lines(head: str, tables: Iterable[Table]) -> Iterator[str]:
    """For a document."""
    yield head
    for title, names, rows in tables:
        yield ""
        yield f"**{title}**"
        yield ""
        yield "| " + " | ".join(names) + " |"
        yield "|---" + "|--:" * (len(names) - 1) + "|"
        for row in rows:
            yield "| " + " | ".join(row) + " |"


def number(value: float | None, digits: int) -> str:
    """``-`` for what was not measured."""
    return "-" if value is None else f"{value:,.{digits}f}"
