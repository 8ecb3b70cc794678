"""Plots over time: what is drawn where."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

from isthmus_spark.plots import lanes, lines

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


def test_stretches_of_one_state_are_one_and_holes_stay() -> None:
    stretches = [(at(0), at(1), "good"), (at(1), at(2), "good"), (at(2), at(3), "bad"), (at(4), at(10), "bad")]
    svg = ElementTree.fromstring(lanes({"a & b": stretches}, {"good": "#0f0", "bad": "#f00", "other": "#00f"}))
    drawn = [(each.get("fill"), each.get("x"), each.get("width")) for each in svg.iter("rect") if each.get("y") == "24"]
    assert drawn == [("#0f0", "300.0", "144.0"), ("#f00", "444.0", "72.0"), ("#f00", "588.0", "432.0")]
    texts = [each.text for each in svg.iter("text")]
    assert texts[:3] == ["good", "bad", "a & b"]
    assert texts[3] == "2026-01-01 00:00:00"


def test_a_line_has_holes_where_nothing_is_known() -> None:
    points = [(at(0), 0.0), (at(1), 5.0), (at(2), None), (at(3), 10.0)]
    svg = ElementTree.fromstring(lines({"lag": points}, "s"))
    assert [each.get("points") for each in svg.iter("polyline")] == [
        "300.0,194.0 540.0,114.0",
        "1020.0,34.0 1020.0,34.0",
    ]
    assert [each.text for each in svg.iter("text")][1:4] == ["0 s", "5 s", "10 s"]


def test_nothing_is_drawn_of_nothing() -> None:
    assert lanes({}, {}) == lines({}, "s") == lines({"lag": [(at(0), 0.0)]}, "s") == ""
