"""Plots over time, as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby, pairwise
from typing import Final

from isthmus_spark.report import COLOURS, label

_LEFT: Final = 300
_WIDE: Final = 720
_LANE: Final = 22
_HIGH: Final = 160
_STATE_WIDE: Final = 110
_NAME_WIDE: Final = 330
_ROW: Final = 18
_TICKS: Final = 4

Stretch = tuple[datetime, datetime, str]
"""From, to, state."""
Point = tuple[datetime, float | None]
"""When, and how much; None: not known."""


class _Time:
    """Where a moment is, from left to right."""

    def __init__(self, moments: Sequence[datetime]) -> None:
        self._first, self._last = min(moments), max(moments)
        self._seconds = (self._last - self._first).total_seconds() or 1.0

    def x(self, moment: datetime) -> float:
        return _LEFT + _WIDE * (moment - self._first).total_seconds() / self._seconds

    def axis(self, y: int) -> list[str]:
        out = []
        for tick in range(_TICKS + 1):
            moment = self._first + (self._last - self._first) * tick / _TICKS
            anchor = "end" if tick == _TICKS else "middle" if tick else "start"
            text = moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S" if tick in (0, _TICKS) else "%H:%M:%S")
            out.append(f'<text x="{self.x(moment):.1f}" y="{y}" text-anchor="{anchor}">{text}</text>')
        return out


def lanes(rows: Mapping[str, Sequence[Stretch]], colours: Mapping[str, str]) -> str:
    """A lane for each name, its stretches in the colours of their states; with a legend of those that occur."""
    moments = [moment for stretches in rows.values() for begun, ended, _ in stretches for moment in (begun, ended)]
    if not moments:
        return ""
    time = _Time(moments)
    occur = {state for stretches in rows.values() for _, _, state in stretches}
    legend = [(state, colour) for state, colour in colours.items() if state in occur]
    out, top = _legend(legend, _STATE_WIDE)
    for number, (name, stretches) in enumerate(rows.items()):
        y = top + _LANE * number
        out.append(label(name, _LEFT - 8, y + 13, _LEFT - 8, "end"))
        for state, same in groupby(stretches, lambda each: each[2]):
            together = list(same)
            for run in _touching(together):
                begin, wide = time.x(run[0][0]), time.x(run[-1][1]) - time.x(run[0][0])
                out.append(
                    f'<rect x="{begin:.1f}" y="{y}" width="{max(wide, 1):.1f}" height="16" '
                    f'fill="{colours.get(state, "#000")}"><title>{escape(state)}</title></rect>'
                )
    return _svg(top + _LANE * len(rows) + 20, [*out, *time.axis(top + _LANE * len(rows) + 14)])


def lines(rows: Mapping[str, Sequence[Point]], unit: str) -> str:
    """A line for each name, with holes where a value is not known."""
    moments = [moment for points in rows.values() for moment, _ in points]
    most = max((value for points in rows.values() for _, value in points if value is not None), default=0.0)
    if not moments or not most:
        return ""
    time = _Time(moments)
    legend = [(name, COLOURS[at % len(COLOURS)]) for at, name in enumerate(rows)]
    out, top = _legend(legend, _NAME_WIDE)
    for share in (0.0, 0.5, 1.0):
        y = top + 10 + _HIGH * (1 - share)
        out.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDE}" y1="{y}" y2="{y}" stroke="#dde3ea"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{most * share:,.6g} {escape(unit)}</text>')
    for points, (_, colour) in zip(rows.values(), legend, strict=True):
        for known, run in groupby(points, lambda each: each[1] is not None):
            if known:
                each = [
                    f"{time.x(moment):.1f},{top + 10 + _HIGH * (1 - (value or 0) / most):.1f}" for moment, value in run
                ]
                path = " ".join(each * 2 if len(each) == 1 else each)  # one alone is a dot
                out.append(
                    f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linecap="round"/>'
                )
    return _svg(top + _HIGH + 40, [*out, *time.axis(top + _HIGH + 30)])


def _legend(names: Sequence[tuple[str, str]], wide: int) -> tuple[list[str], int]:
    """Names with their colours, as many in a row as fit; and where it ends."""
    out = []
    in_row = (_LEFT + _WIDE) // wide
    for at, (name, colour) in enumerate(names):
        x, y = wide * (at % in_row), 2 + _ROW * (at // in_row)
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        out.append(label(name, x + 17, y + 11, wide - 25))
    return out, 6 + _ROW * (1 + (len(names) - 1) // in_row)


def _svg(high: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_LEFT + _WIDE + 20} {high}" width="100%" role="img">{"".join(parts)}</svg>'


def _touching(stretches: Sequence[Stretch]) -> list[list[Stretch]]:
    """Split where there is a hole between two."""
    runs = [[stretches[0]]]
    for before, each in pairwise(stretches):
        if each[0] > before[1]:
            runs.append([])
        runs[-1].append(each)
    return runs
