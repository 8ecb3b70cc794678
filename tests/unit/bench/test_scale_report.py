"""The scale benchmark's arithmetic and tables, on numbers made by hand."""

from __future__ import annotations

import pytest

from isthmus_bench.rolling_restart import RollingRestart
from isthmus_bench.scale import Figure, Report, growth, verdicts_of
from isthmus_bench.scale_cli import tables


def figure(topics: int, attached_s: float, verified_s: float = 1.0, restarted: bool = True) -> Figure:
    restart = RollingRestart(60, 6, 90_000, 180_000) if restarted else None
    return Figure(
        topics,
        3 * topics,
        10.0,
        12.0,
        attached_s,
        4.0,
        verified_s,
        0.5,
        0.1,
        0.8,
        1.5,
        0.3,
        0.6,
        0.9,
        120.0,
        restart,
    )


def test_growth_is_what_a_topic_takes_among_the_most_against_the_fewest() -> None:
    figures = [figure(100, 2.0), figure(200, 5.0), figure(400, 9.6)]
    assert growth(figures, lambda each: each.attached_s) == pytest.approx(1.2)
    assert growth(figures[:1], lambda each: each.attached_s) is None


def test_targets() -> None:
    verdicts = {each.target: each for each in verdicts_of([figure(100, 2.0), figure(400, 24.0, verified_s=4.0)])}
    attach = verdicts["attach of 400 topics against creating them"]
    assert (attach.measured, attach.met) == (2.0, False)
    assert verdicts["verify of 400 topics, s"].met
    assert verdicts["a new topic beside 400, s"].measured == 1.5, "the slowest counts"
    assert verdicts["of which after the source's replicas have it, s"].measured == 0.9
    assert verdicts["attach, a topic, most against fewest"].measured == pytest.approx(3.0)
    assert verdicts["verify, a topic, most against fewest"].met
    alone = {each.target: each.met for each in verdicts_of([figure(100, 2.0)])}
    assert alone["CPU to attach, a topic, most against fewest"] is None, "one size says nothing of growth"


def test_the_report_as_tables() -> None:
    figures = [figure(100, 2.0)]
    report = Report("2 cores", "Kafka 4.3.0", figures, list(verdicts_of(figures)))
    assert len(list(tables(Report("2 cores", "Kafka 4.3.0", [figure(100, 2.0, restarted=False)])))) == 3
    many, each, restart, targets = tables(report)
    assert many[2] == [
        ["100", "300", "10.0", "12.0", "2.0", "0.17", "1.0", "0.80", "1.50", "0.30", "0.60", "0.90", "120"]
    ]
    assert each[2] == [["100", "120.0", "20.0", "40.0", "10.0", "5.0", "0.100"]]
    assert restart[2] == [["100", "300", "60", "6.0", "90", "180", "20.00, 900"]]
    assert [row[-1] for row in targets[2]] == ["yes"] * 4 + ["not measured"] * 4
    assert report.as_dict()["verdicts"][0]["met"] is True
