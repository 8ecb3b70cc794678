"""Reports: one HTML file each, with plots and tables inside, and what it means; nothing is fetched to look at it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Final

_NAMES: Final = ("id", "partition", "offset", "sequence", "epoch")
"""Columns of numbers that name something: as they stand in logs."""
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #1d2733 }
h1, h2, p { overflow-wrap: anywhere } .plot, .table { overflow-x: auto } .plot svg { min-width: 60em }
table { border-collapse: collapse; margin: 1em 0; width: max-content }
td, th { padding: .2em .8em; border-bottom: 1px solid #dde3ea; vertical-align: top }
td { max-width: 28em; overflow-wrap: anywhere } th { max-width: 6em; vertical-align: bottom }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } th { text-align: left; background: #f3f6f9 }
.what { background: #f3f6f9; padding: .6em 1em; border-left: 4px solid #4a78a8 } small { color: #667 }
svg text { font: 12px system-ui, sans-serif; fill: #1d2733 }
"""


@dataclass(frozen=True, slots=True)
class Link:
    """A cell that leads to another page."""

    to: str
    text: str


@dataclass(slots=True)
class Section:
    """A part of a report: what it means, a plot, a table."""

    title: str
    meaning: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    plot: str = ""


@dataclass(slots=True)
class Report:
    """One job's report."""

    title: str
    about: Mapping[str, str]
    """What was read, from when to when, and with which versions."""
    sections: list[Section] = field(default_factory=list)

    def html(self) -> str:
        parts = [f"<h1>{escape(self.title)}</h1>", "<p><small>"]
        parts.append(" · ".join(f"{escape(name)}: {escape(value)}" for name, value in self.about.items()))
        parts.append("</small></p>")
        for section in self.sections:
            parts += [f"<h2>{escape(section.title)}</h2>", f'<p class="what">{escape(section.meaning)}</p>']
            if section.plot:
                parts.append(f'<div class="plot">{section.plot}</div>')
            if section.columns:
                parts.append(_table(section.columns, section.rows))
        viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
        head = f'<meta charset="utf-8">{viewport}<title>{escape(self.title)}</title><style>{_STYLE}</style>'
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html())


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    rows = list(rows)
    numeric = [bool(rows) and all(isinstance(row[at], int | float) for row in rows) for at in range(len(columns))]
    kinds = [' class="n"' if each else "" for each in numeric]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_markup(cell, name)}</td>" for cell, kind, name in zip(row, kinds, columns, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _markup(value: Any, column: str) -> str:
    if isinstance(value, Link):
        return f'<a href="{escape(value.to)}">{escape(value.text)}</a>'
    return escape(_cell(value, column))


def _cell(value: Any, column: str) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, datetime):
        return value.isoformat(" ", "milliseconds")
    if isinstance(value, int) and column.rsplit(" ", 1)[-1] in _NAMES:
        return str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


_LETTER: Final = 7
"""So wide is a letter of a plot at most, on average."""


def label(name: str, x: float, y: float, wide: float, anchor: str = "start") -> str:
    """A text in a plot, shortened in the middle to so much room; whole where a mouse is over it."""
    letters = int(wide / _LETTER)
    shown = name if len(name) <= letters else f"{name[: letters // 2]}…{name[len(name) + 1 - letters + letters // 2 :]}"
    whole = "" if shown == name else f"<title>{escape(name)}</title>"
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(shown)}{whole}</text>'


COLOURS: Final = ("#4a78a8", "#e08a3c", "#5b9e5f", "#b0413e", "#7b6ba8", "#7a7a7a")


def bars(rows: Sequence[tuple[str, Sequence[float]]], legend: Sequence[str], unit: str) -> str:
    """Horizontal bars, each of several parts: ``rows`` are names and the lengths of their parts."""
    longest = max((sum(parts) for _, parts in rows), default=0) or 1
    sums = [f"{sum(parts):,.2f} {unit}" for _, parts in rows]
    height, left, width, right = 22 * len(rows) + 34, 220, 640, _LETTER * (2 + max(map(len, sums), default=0))
    out = [f'<svg viewBox="0 0 {left + width + right} {height}" width="100%" role="img">']
    for at, name in enumerate(legend):
        begin = left + 120 * at
        out.append(f'<rect x="{begin}" y="2" width="12" height="12" fill="{COLOURS[at % len(COLOURS)]}"/>')
        out.append(f'<text x="{begin + 17}" y="13">{escape(name)}</text>')
    for row, ((name, parts), total) in enumerate(zip(rows, sums, strict=True)):
        y, x = 24 + 22 * row, float(left)
        out.append(label(name, left - 8, y + 13, left - 8, "end"))
        for at, part in enumerate(parts):
            wide = width * part / longest
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="16" fill="{COLOURS[at % len(COLOURS)]}"/>'
            )
            x += wide
        out.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{escape(total)}</text>')
    return "".join([*out, "</svg>"])
