"""Pages of benchmarks: one HTML document that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1b1f; --dim: #6a6a72; --rule: #dcdce2; --page: #fff;
  --c0: #4c78a8; --c1: #54a24b; --c2: #e8871e; --c3: #d62728; --c4: #8a5fbf; --c5: #9d755d; --c6: #b79bd8;
  --c7: #c9b09f }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6ea; --dim: #9c9ca6; --rule: #3a3a42; --page: #17171b } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem } h3 { font-size: 1rem; margin: 1.8rem 0 .3rem }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; margin: .5rem 0 }
th, td { padding: .15rem .7rem .15rem 0; text-align: right; border-bottom: 1px solid var(--rule) }
th:first-child, td:first-child { text-align: left } th { color: var(--dim); font-weight: 600 }
table.words td { text-align: left } td.missed { color: var(--c3); font-weight: 600 } td.open { color: var(--dim) }
svg { width: 100%; max-width: 44rem } .label { font-size: 11px; fill: var(--dim) } .grid { stroke: var(--rule) }
polyline { fill: none; stroke-width: 1.8 } .key { display: inline-block; margin-right: 1.1rem; font-size: .85rem }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem }
"""


def page_of(title: str, parts: Iterable[str], lines: int) -> str:
    """A document of these parts, with colours for so many lines in its plots."""
    head = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title>",
        "<meta name='viewport' content='width=device-width'>",
        f"<style>{_STYLE}{_colours(lines)}</style>",
    ]
    return "\n".join([*head, *parts, "</html>\n"])


def _colours(lines: int) -> str:
    return "\n".join(
        f".s{index} polyline {{ stroke: var(--c{index}) }} .s{index} circle {{ fill: var(--c{index}) }} "
        f".k{index} i {{ background: var(--c{index}) }}"
        for index in range(lines)
    )


def key(colour: int, title: str) -> str:
    """What a colour stands for."""
    return f"<span class='key k{colour}'><i></i>{escape(title)}</span>"


_CLASSES: Final = {"NO": " class='missed'", "not measured": " class='open'"}


def html_table(title: str, heads: list[str], rows: list[list[str]], words: bool = False) -> str:
    """A table below its title. ``words``: its cells are not numbers."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f"<td{_CLASSES.get(cell, '')}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    named = f"<h2>{escape(title)}</h2>" if title else ""
    return f"{named}<table{' class=words' if words else ''}><tr>{head}</tr>{body}</table>"
