"""Plots as inline SVG: lines over named places on the x axis, a logarithmic y axis. Colours come from the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 300
LEFT: Final = 56
RIGHT: Final = 12
TOP: Final = 10
BOTTOM: Final = 26
POINT: Final = 2.6


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade, from the last that is not above ``low`` to the first that is not below ``high``."""
    steps = (1, 2, 5)
    begin, end = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [step * 10.0**decade for decade in range(begin, end + 1) for step in steps]
    first = max(index for index, tick in enumerate(every) if tick <= low * (1 + 1e-9))
    last = min(index for index, tick in enumerate(every) if tick >= high * (1 - 1e-9))
    return every[first : max(last, first + 1) + 1]


def line_plot(places: Sequence[str], series: Mapping[str, tuple[int, Sequence[float | None]]], unit: str) -> str:
    """An SVG element. ``series``: by title the number of its colour, and a value for each place, or None.

    A value of 0, which has no place, is left out. Lines have the classes ``s0``, ``s1``, ..., texts and
    grid ``label`` and ``grid``.
    """
    values = [value for _, line in series.values() for value in line if value]
    ticks = log_ticks(min(values), max(values)) if values else [1.0, 10.0]
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])

    def x(index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / len(places)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(value)) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="label" x="{LEFT - 6}" y="{at}" dy="4" text-anchor="end">{tick:g} {unit}</text>')
    for index, place in enumerate(places):
        parts.append(
            f'<text class="label" x="{x(index):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(place)}</text>'
        )
    for title, (colour, line) in series.items():
        points = [(x(index), y(value)) for index, value in enumerate(line) if value]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<g class="s{colour}"><title>{escape(title)}</title><polyline points="{path}"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{POINT}"/>' for a, b in points]
        parts.append("</g>")
    parts.append("</svg>")
    return "".join(parts)
