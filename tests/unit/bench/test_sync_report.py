"""The synchronous benchmark's targets, tables, plots and page, on numbers made by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from isthmus_bench.svg import line_plot, log_ticks
from isthmus_bench.sync import java_said
from isthmus_bench.sync_cli import LOAD_NAMES, SCENARIO_NAMES
from isthmus_bench.sync_environment import broker_settings
from isthmus_bench.sync_figures import DEPTH_ONE, Figure, Missing, Report, Verdict, WanFigure, figure_of, verdicts_of
from isthmus_bench.sync_plan import (
    ASYNC,
    BESIDE,
    BESIDE_STANDSTILL,
    LOADS,
    PROXIED,
    SCENARIOS,
    SYNC,
    Plan,
    connections_for,
)
from isthmus_bench.sync_report import page, tables
from isthmus_bench.tables import text_lines
from isthmus_bench.wan import RoundTrips, swapped

FIGURE = Figure(20.0, SYNC, "depth-1", 500, 47.0, 21.0, 22.0, 25.0, 30.0, 31.0, None, {"brokers": 0.2, "load": 0.1}, 3)
MACHINE = {
    "cores": "2",
    "idle cores": "polling",
    "cores of each site": "1 and 1",
    "memory": "4 GiB",
    "kernel": "Linux 6",
    "Python": "3.11",
}


def judged(*figures: Figure) -> dict[str, Verdict]:
    return {each.target: each for each in verdicts_of(figures)}


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert {each.met for each in judged().values()} == {None}
    assert {each.met for each in judged(replace(FIGURE, rtt_ms=2.0)).values()} == {None}  # targets are for 20 ms


@pytest.mark.parametrize(("p50_ms", "met"), [(21.5, True), (21.6, False)])
def test_the_median_may_be_a_round_trip_and_a_bit(p50_ms: float, met: bool) -> None:
    verdict = judged(replace(FIGURE, p50_ms=p50_ms))["synchronous, depth 1, one connection: p50, ms"]
    assert (verdict.limit, verdict.measured, verdict.met) == (21.5, p50_ms, met)


def test_a_busy_loop_and_a_java_producer_have_limits_of_their_own() -> None:
    got = judged(
        replace(FIGURE, load="open-2000", p50_ms=22.9),
        replace(FIGURE, load="java-linger-0", p50_ms=29.0),
        replace(FIGURE, load="open-5000-8p", per_s=4_940.0),
    )
    assert got["synchronous, 2,000 requests/s: p50, ms"].met is True
    assert got["synchronous, Java producer, linger.ms=0, 500 records/s: p50, ms"].met is False
    assert got["synchronous, 5,000 requests/s, 8 partitions: answered a second"].met is False


@pytest.mark.parametrize(
    ("load", "ours", "theirs", "met"),
    [("depth-5", 21.0, 107.0, True), ("depth-5", 21.0, 21.0, False), ("depth-1", 21.4, 21.0, True)],
)
def test_a_link_shall_be_ahead_of_a_stretched_cluster(load: str, ours: float, theirs: float, met: bool) -> None:
    title = next(each.title for each in LOADS if each.name == load)
    got = judged(
        replace(FIGURE, load=load, p50_ms=ours, p99_ms=ours + 100),
        replace(FIGURE, scenario="stretched-2", load=load, p50_ms=theirs + 20),
        replace(FIGURE, scenario="stretched-3-default", load=load, p50_ms=theirs),  # the best one counts
    )
    assert got[f"synchronous against the best stretched, {title}: p50, ms"].met is met
    assert got[f"synchronous against the best stretched, {title}: p99, ms"].met is False


def test_an_asynchronous_link_adds_next_to_nothing() -> None:
    got = judged(replace(FIGURE, scenario=PROXIED, p50_ms=1.0), replace(FIGURE, scenario=ASYNC, p50_ms=1.3))
    verdict = got["asynchronous link, depth 1, one connection: added to the p50, ms"]
    assert verdict.measured == pytest.approx(0.3)
    assert verdict.met is False


@pytest.mark.parametrize(("p50_ms", "p99_ms", "met"), [(0.25, 2.5, [True, True]), (0.35, 3.1, [False, False])])
def test_a_standstill_of_the_other_side_does_not_move_other_namespaces(
    p50_ms: float, p99_ms: float, met: list[bool]
) -> None:
    got = judged(
        replace(FIGURE, scenario=BESIDE, load="open-500", p50_ms=0.1, p99_ms=1.0),
        replace(FIGURE, scenario=BESIDE_STANDSTILL, load="open-500", p50_ms=p50_ms, p99_ms=p99_ms),
    )
    target = "another namespace, the link's other side stands still: added to the {}, ms"
    assert [got[target.format(name)].met for name in ("p50", "p99")] == met


def test_figures_are_medians_over_the_rounds() -> None:
    names = ("requests", "per_s", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms", "late_p99_ms")
    said = [{**dict.fromkeys(names, value), "cpu": {"brokers": value}} for value in (3.0, 1.0, 2.0)]
    got = figure_of(20.0, SYNC, "open-500", said)
    assert (got.per_s, got.p999_ms, got.late_p99_ms, got.cpu, got.rounds) == (2.0, 2.0, 2.0, {"brokers": 2.0}, 3)


def test_what_a_java_producer_does_not_tell_stays_open() -> None:
    printed = (
        "2501 records sent, 500.1 records/sec (0.49 MB/sec), 9.1 ms avg latency, 300.0 ms max latency.\n"
        "3000 records sent, 499.8 records/sec (0.49 MB/sec), 8.12 ms avg latency, 310.00 ms max latency, "
        "7 ms 50th, 11 ms 95th, 150 ms 99th, 305 ms 99.9th.\n"
        "2500 steady state records sent, 499.9 records/sec (0.49 MB/sec), 7.30 ms avg latency, 21.00 ms max latency, "
        "7 ms 50th, 9 ms 95th, 12 ms 99th, 20 ms 99.9th.\n"
    )
    said = java_said(printed)
    assert said == {"requests": 2500, "per_s": 499.9, "max_ms": 21, "p50_ms": 7, "p99_ms": 12, "p999_ms": 20}
    got = figure_of(20.0, SYNC, "java-stock", [{**said, "cpu": {}}])
    assert (got.p90_ms, got.late_p99_ms, got.p99_ms) == (None, None, 12)
    with pytest.raises(ValueError, match="no figures"):
        java_said("ERROR")


def test_a_packet_comes_back_to_who_sent_it() -> None:
    packet = bytes(12) + b"near" + b"far " + b"the rest"
    assert swapped(packet) == bytes(12) + b"far " + b"near" + b"the rest"
    assert swapped(swapped(packet)) == packet


def test_a_stretched_cluster_with_default_buffers_has_kafkas() -> None:
    big = {each.name: broker_settings(each) for each in SCENARIOS}
    assert "socket.send.buffer.bytes" not in big["stretched-2-default"]
    assert "replica.socket.receive.buffer.bytes" in big["stretched-3"]
    assert {name: each["min.insync.replicas"] for name, each in big.items() if "stretched" not in name} == {
        "direct": "1", "proxied": "1", "async": "1", "sync": "1", "beside": "1", "beside-standstill": "1"
    }  # fmt: skip
    assert {each["min.insync.replicas"] for name, each in big.items() if "stretched" in name} == {"2"}


def test_connections_grow_with_rate_and_round_trip() -> None:
    assert connections_for(100, 0) == 8
    assert connections_for(500, 20) == 50
    assert connections_for(2_000, 20) == 200
    assert connections_for(5_000, 100) == 900


def test_options_and_reports_name_everything_once() -> None:
    for every in (SCENARIOS, LOADS):
        assert len({each.name for each in every}) == len({each.title for each in every}) == len(every)
    assert ", ".join(each.name for each in SCENARIOS) == SCENARIO_NAMES
    assert ", ".join(each.name for each in LOADS) == LOAD_NAMES
    plan = Plan()
    assert plan.shape(LOADS[1], 20.0).depth == 5
    longer = [each.name for each in LOADS if plan.shape(each, 20.0).seconds > plan.seconds]
    assert longer == list(DEPTH_ONE)
    assert set(Plan.quick("4.3.0").scenarios) < set(plan.scenarios)


def test_ticks_surround_the_values() -> None:
    assert log_ticks(20.4, 107.0) == [20.0, 50.0, 100.0, 200.0]
    assert log_ticks(1.0, 1.0) == [1.0, 2.0]
    assert log_ticks(0.03, 0.4) == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5])


def test_a_plot_is_well_formed_and_leaves_gaps_out() -> None:
    plot = ElementTree.fromstring(
        line_plot(("p50", "p<90"), {"a & b": (0, [1.0, 10.0]), "c": (1, [None, 5.0]), "d": (2, [0.0, 5.0])}, "ms")
    )
    lines = plot.findall(".//polyline")
    assert [len(each.attrib["points"].split()) for each in lines] == [2, 1, 1]
    assert len(plot.findall(".//circle")) == 4
    (first, last) = (each.split(",") for each in lines[0].attrib["points"].split())
    assert float(first[0]) < float(last[0])
    assert float(first[1]) > float(last[1])  # more is higher
    assert ElementTree.fromstring(line_plot(("p50",), {}, "ms")).tag == "svg"


def report_of(*figures: Figure) -> Report:
    wan = WanFigure(20.0, RoundTrips(20.1, 20.3, 21.0), 40.0)
    missing = [Missing(None, SYNC, None, "<none> yet"), Missing(20.0, "stretched-3", "open-2000", "it fell over")]
    return Report(MACHINE, "4.3.0", 3, 5.0, [wan], list(figures), missing, list(verdicts_of(figures)))


def test_a_page_needs_nothing_else() -> None:
    text = page(report_of(FIGURE, replace(FIGURE, scenario="stretched-2", p99_ms=107.25)))
    assert text.count("<svg") == 1
    assert not re.search(r"src=|href=|url\(|@import", text)
    assert "&lt;none&gt; yet" in text
    assert "it fell over" in text
    assert "107.25" in text
    assert "not measured" in text
    assert "20.30" in text  # what the WAN took


def test_tables_tell_the_same() -> None:
    lines = "\n".join(text_lines(["head"], tables(report_of(FIGURE))))
    assert "RTT 20 ms: depth 1, one connection" in lines
    assert "RF 2, min ISR 2" in lines
    assert "4 MiB" in lines
    assert "it fell over" in lines
    assert "not measured" in lines


def test_a_report_is_data_too() -> None:
    data = report_of(FIGURE).as_dict()
    assert data["figures"][0]["p999_ms"] == 30.0
    assert data["wans"][0]["measured"]["p99_ms"] == 20.3
    assert {each["name"] for each in data["scenarios"]} == {each.name for each in SCENARIOS}
