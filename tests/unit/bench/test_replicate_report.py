"""The replication benchmark's arithmetic and tables, on numbers made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus_bench.contestants import LINK, MIRROR, TUNED
from isthmus_bench.replicate import (
    IDLE_CORE_MAX,
    CatchUp,
    IdleFigure,
    Lag,
    Plan,
    Report,
    Small,
    SmallFigure,
    Turn,
    catch_up_figures,
    catch_up_of,
    lag_figures,
    medians,
    verdicts_of,
)
from isthmus_bench.replicate_cli import tables

CATCH_UP = CatchUp(first_record_s=0.4, records_per_s=1000.0, mb_per_s=100.0, cpu_ms_per_mb=8.0, cpu_share=0.8)
LAG = Lag(records_per_s=500.0, p50_ms=1.0, p99_ms=10.0, max_ms=20.0, ack_p50_ms=0.2, cpu_share=0.05)


def turn(mb_per_s: float = 100.0, cpu_ms_per_mb: float = 8.0, resident_mb: float = 150.0, **lag: float) -> Turn:
    catch_up = replace(CATCH_UP, mb_per_s=mb_per_s, cpu_ms_per_mb=cpu_ms_per_mb)
    return Turn(catch_up, {rate: replace(LAG, **lag) for rate in (500, 5_000)}, resident_mb)


def test_a_catch_up_is_measured_once_it_is_warm() -> None:
    samples = [
        (10.0, 0, 5.0),
        (12.0, 100, 6.0),  # the first records, slowly
        (13.0, 400, 7.0),  # a quarter is there: from here
        (14.0, 1000, 7.5),
        (15.0, 1600, 8.0),
    ]
    got = catch_up_of(9.0, samples, 1600, 1000)
    assert got.first_record_s == 3.0
    assert got.records_per_s == 600.0
    assert got.mb_per_s == pytest.approx(0.6)
    assert got.cpu_ms_per_mb == pytest.approx(1000 / 1.2)
    assert got.cpu_share == pytest.approx(0.5)


def test_a_catch_up_that_was_over_between_two_looks_has_figures() -> None:
    got = catch_up_of(9.0, [(10.0, 0, 5.0), (10.5, 16, 5.1)], 16, 1000)
    assert (got.first_record_s, got.records_per_s) == (1.5, 32.0)
    at_once = catch_up_of(9.0, [(10.0, 16, 5.0)], 16, 1000)
    assert (at_once.first_record_s, at_once.records_per_s, at_once.cpu_share) == (1.0, 0.0, 0.0)


def test_ratios_are_formed_within_a_round_before_the_median() -> None:
    turns = {
        LINK: [turn(100.0, 4.0), turn(10.0, 40.0), turn(90.0, 4.0)],  # the machine was busy in the second round
        TUNED: [turn(50.0, 8.0), turn(5.0, 80.0), turn(100.0, 8.0)],
    }
    figures = {figure.contestant: figure for figure in catch_up_figures(turns)}
    assert figures[LINK].speed_ratio == 2.0
    assert figures[LINK].cpu_ratio == 0.5
    assert figures[LINK].catch_up.mb_per_s == 90.0
    assert (figures[TUNED].speed_ratio, figures[TUNED].cpu_ratio) == (1.0, 1.0)


def test_without_mirror_maker_there_are_no_ratios() -> None:
    (figure,) = catch_up_figures({LINK: [turn()]})
    assert (figure.speed_ratio, figure.cpu_ratio) == (None, None)


def test_medians_are_taken_field_by_field() -> None:
    got = medians([replace(LAG, p50_ms=value, p99_ms=-value) for value in (3.0, 1.0, 2.0)])
    assert (got.p50_ms, got.p99_ms, got.max_ms) == (2.0, -2.0, 20.0)


@pytest.mark.parametrize(("met", "factor"), [(True, 0.99), (False, 1.0)])
def test_targets(met: bool, factor: float) -> None:
    lags = [
        *lag_figures({LINK: [turn(p50_ms=3.0 * factor, p99_ms=15.0 * factor)]}, [500]),
        *lag_figures({LINK: [turn(p99_ms=50.0 * factor)], MIRROR: [turn(p99_ms=1e6)]}, [5_000]),
    ]
    turns = {
        LINK: [turn(100.0, 8.0 * factor, 200.0 * factor)],
        MIRROR: [turn(resident_mb=1e6)],
        TUNED: [turn(100.0 * factor, 8.0, 1e6)],
    }
    figures = [
        replace(figure, catch_up=replace(figure.catch_up, first_record_s=factor)) for figure in catch_up_figures(turns)
    ]
    idle = [IdleFigure(LINK, 1000, 0.005 + IDLE_CORE_MAX * factor, 0.005), IdleFigure(MIRROR, 1000, 1.0, None)]
    verdicts = list(verdicts_of(figures, lags, idle))
    assert [verdict.met for verdict in verdicts] == [met] * 8


def test_a_plan_fills_the_partitions_alike() -> None:
    assert Plan(backlog_mb=1, partitions=4).batches == 15
    assert Plan.quick("4.3.0").batches * 4 * 16 * 1024 <= Plan.quick("4.3.0").backlog_mb * 1_000_000


def test_tables_show_every_figure_and_what_is_missing() -> None:
    turns = {LINK: [turn(120.0, 4.0)], TUNED: [turn(100.0)]}
    catch_up, lags = catch_up_figures(turns), lag_figures(turns, [500, 5_000])
    idle = [IdleFigure(LINK, 1000, 0.0151, 0.001), IdleFigure(MIRROR, 1000, 0.5, None)]
    small = [SmallFigure("plain", 3, Small(4000.0, 400.0, 3000.0, 0.05))]
    report = Report("m", "b", 1, 512, 4, catch_up, lags, idle, small, list(verdicts_of(catch_up, lags, idle)))
    shown = {title: rows for title, _, rows in tables(report)}
    assert shown["Catch-up of a backlog"][0] == [
        LINK, "120.0", "1,000", "4.00", "80%", "1.20", "0.50", "0.40", "150"
    ]  # fmt: skip
    assert shown["Lag at 500 records/s"] == shown["Lag at 5,000 records/s"]
    assert shown["Lag at 500 records/s"][1] == [TUNED, "500", "1.00", "10.00", "20.0", "0.20", "5.0%"]
    assert shown["Idle partitions"] == [[LINK, "1000", "1.51%", "0.10%"], [MIRROR, "1000", "50.00%", "-"]]
    assert shown["Small batches of one partition"] == [["plain", "3", "4,000", "400", "3,000", "75%", "0.050"]]
    assert ["catch-up against tuned MirrorMaker's, MB/s", "> 1.00", "1.200", "yes"] in shown["Targets"]
    assert report.as_dict()["catch_up"][0]["speed_ratio"] == 1.2
