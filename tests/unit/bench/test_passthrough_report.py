"""The benchmark's arithmetic and tables, on numbers made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus_bench.bench_cli import markdown_lines, table_lines
from isthmus_bench.load import Target
from isthmus_bench.passthrough import (
    DIRECT,
    FETCH,
    GIVEN_BACK_MIN,
    HOOK,
    IDLE_BYTES_MAX,
    LIST,
    LIST_CPU_US_MAX,
    NO_PLUGINS,
    PROXY,
    RELAY,
    SMALL,
    TLS,
    WORKLOADS,
    CarriedFigure,
    Figure,
    IdleFigure,
    Path,
    Plan,
    Report,
    Sample,
    beside_figures,
    figures_of,
    hook_verdicts,
    idle_figure,
    list_verdict,
    median_of,
    pairs_beside,
    verdicts_of,
)

MB = 1_000_000


def sample(cpu_us: float | None, requests_per_s: float = 1000.0) -> Sample:
    share = None if cpu_us is None else 0.5
    return Sample(requests_per_s, 1.0, 50.0, 99.0, 150.0, cpu_us, None if cpu_us is None else 0.1, share, 0.2)


def test_a_sample_is_made_of_what_the_load_generator_says() -> None:
    said = {
        "requests": 1000,
        "seconds": 2.0,
        "cpu_seconds": 0.05,
        "load_cpu_seconds": 0.5,
        "request_bytes": 200,
        "answer_bytes": 50,
        "p50_us": 10.0,
        "p99_us": 20.0,
        "p999_us": 30.0,
    }
    got = Sample.of(said)
    assert got == Sample(500.0, 0.125, 10.0, 20.0, 30.0, pytest.approx(50.0), pytest.approx(200.0), 0.025, 0.25)
    assert Sample.of({**said, "cpu_seconds": None}).cpu_us is None


def test_ratios_are_formed_within_a_round_before_the_median() -> None:
    samples = {
        ("w", RELAY): [sample(10.0), sample(100.0), sample(20.0)],  # the machine was busy in the second round
        ("w", PROXY): [sample(14.0), sample(140.0), sample(40.0)],
        ("w", "direct"): [sample(None)] * 3,
    }
    floors = {RELAY: RELAY, PROXY: RELAY, "direct": RELAY}
    by_path = {figure.path: figure for figure in figures_of(samples, floors)}
    assert by_path[RELAY].cpu_ratio == 1.0
    assert by_path[PROXY].cpu_ratio == pytest.approx(1.4)
    assert by_path[PROXY].sample.cpu_us == 40.0
    assert by_path["direct"].cpu_ratio is None
    assert by_path["direct"].sample.cpu_us is None


def test_versions_are_compared_round_by_round() -> None:
    paths = [Path(name, Target("h", 1, "t"), 1, "t") for name in (RELAY, PROXY, HOOK)]
    paths += [Path(f"{PROXY} of old ({n})", Target("h", 1, "t"), 1, "t", beside=PROXY) for n in (1, 2)]
    first, second = (path.name for path in paths if path.beside)
    assert pairs_beside(paths) == [(PROXY, first), (PROXY, second), (second, first)]
    samples = {
        ("w", RELAY): [sample(10.0)] * 3,
        ("w", PROXY): [sample(11.0), sample(100.0, 500.0), sample(13.0)],  # the machine was busy in the second round
        ("w", first): [sample(10.0), sample(100.0, 500.0), sample(10.0)],
        ("w", second): [sample(10.0), sample(80.0), sample(10.0)],
        ("other", RELAY): [sample(10.0)],
    }
    own, of_second, noise = beside_figures(samples, pairs_beside(paths))
    assert (own.workload, own.path, own.other) == ("w", PROXY, first)
    assert own.cpu_ratio == pytest.approx(1.1)
    assert own.cpu_quartiles == (pytest.approx(1.0), pytest.approx(1.3))
    assert (own.requests_ratio, own.p50_ratio) == (1.0, 1.0)
    assert of_second.cpu_ratio == pytest.approx(1.25)
    assert (noise.path, noise.other, noise.cpu_ratio) == (second, first, 1.0)
    (once,) = beside_figures({each: rounds[:1] for each, rounds in samples.items()}, [(PROXY, first)])
    assert once.cpu_quartiles == (once.cpu_ratio, once.cpu_ratio)


def test_medians_are_taken_field_by_field() -> None:
    got = median_of([sample(1.0, 5.0), sample(3.0, 1.0), sample(2.0, 9.0)])
    assert (got.cpu_us, got.requests_per_s) == (2.0, 5.0)


def test_tls_paths_are_compared_with_the_relay_that_ends_tls() -> None:
    plain = Path(PROXY, Target("h", 1, "t"), 1, "f")
    tls = Path(PROXY + TLS, Target("h", 1, "t", "ca"), 1, "f")
    assert (plain.floor, tls.floor) == (RELAY, RELAY + TLS)
    fetch = next(each for each in WORKLOADS if each.fetches)
    assert tls.target_of(fetch) == Target("h", 1, "f", "ca")
    assert tls.target_of(WORKLOADS[0]) is tls.target


def test_memory_of_idle_connections() -> None:
    got = idle_figure(PROXY, 100, before=70 * MB, opened=72 * MB, closed=int(70.5 * MB), again=72 * MB)
    assert (got.bytes_each, got.given_back, got.bytes_each_again) == (20_000.0, 0.75, 0.0)
    grown = idle_figure(PROXY, 100, before=70 * MB, opened=72 * MB, closed=72 * MB, again=73 * MB)
    assert (grown.given_back, grown.bytes_each_again) == (0.0, 10_000.0)
    free = idle_figure(PROXY, 100, before=70 * MB, opened=70 * MB, closed=70 * MB, again=70 * MB)
    assert (free.bytes_each, free.given_back) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("small", "fetch", "each", "back", "met"),
    [
        (1.5, 1.3, IDLE_BYTES_MAX, GIVEN_BACK_MIN, [True, True, True, True, True]),
        (1.51, 1.31, IDLE_BYTES_MAX + 1, GIVEN_BACK_MIN - 0.01, [False, False, False, False, False]),
    ],
)
def test_targets(small: float, fetch: float, each: float, back: float, met: list[bool]) -> None:
    figures = [
        Figure(SMALL[0], PROXY, sample(1.0), small),
        Figure(SMALL[0], NO_PLUGINS, sample(1.0), 9.0),
        Figure(SMALL[0], PROXY + TLS, sample(1.0), 9.0),
        Figure(FETCH, PROXY, sample(1.0), fetch),
        Figure("another", PROXY, sample(1.0), 9.0),
        Figure(LIST, PROXY, sample(LIST_CPU_US_MAX if met[0] else LIST_CPU_US_MAX + 1), 9.0),
        Figure(LIST, RELAY, sample(LIST_CPU_US_MAX + 1), 1.0),
    ]
    idle = [IdleFigure(PROXY, 10, 1, each, back, 0.0), IdleFigure(RELAY, 10, 1, 1e9, 0.0, 0.0)]
    assert [verdict.met for verdict in verdicts_of(figures, idle)] == met


@pytest.mark.parametrize(("p50_us", "met"), [(75.0, True), (75.1, False)])
def test_a_list_comes_about_as_soon_as_from_a_broker(p50_us: float, met: bool) -> None:
    through = replace(sample(1.0), p50_us=p50_us)
    figures = [
        Figure(LIST, DIRECT, sample(None), None),
        Figure(LIST, PROXY, through, 9.0),
        Figure("x", PROXY, through, 1),
    ]
    assert list_verdict(figures).met is met


@pytest.mark.parametrize(("ratio", "met"), [(1.375, True), (1.4, False)])
def test_a_hook_costs_nothing_where_there_is_none(ratio: float, met: bool) -> None:
    figures = [Figure(FETCH, PROXY, sample(10.0), 1.25), Figure(FETCH, HOOK, sample(99.0), ratio)]
    (verdict,) = hook_verdicts([*figures, Figure(SMALL[0], HOOK, sample(99.0), 9.0)])
    assert verdict.met is met
    assert list(hook_verdicts(figures[:1])) == []


def test_the_workloads_that_targets_speak_of_are_there() -> None:
    assert {*SMALL, FETCH} <= {workload.name for workload in WORKLOADS}
    for broker in ("kafka", "canned"):
        assert {workload.name for workload in Plan.quick(broker, "4.3.0").workloads} & {*SMALL}  # type: ignore[arg-type]


def test_tables_show_every_figure_and_what_is_missing() -> None:
    figures = [Figure(SMALL[0], "direct", sample(None), None), Figure(SMALL[0], PROXY, sample(12.34), 1.333)]
    idle = [IdleFigure(PROXY, 1000, 70 * MB, 4096.0, 0.5, 0.0)]
    carried = [CarriedFigure(PROXY, 5000, "", 100 * MB, sample(15.0))]
    report = Report("canned", "a machine", 3, 0.5, figures, idle, carried, verdicts_of(figures, idle))
    lines = list(table_lines(report))
    row = next(line.split() for line in lines if line.startswith("proxy") and "12.3" in line)
    assert row[1:] == ["1,000", "1.0", "50", "99", "150", "12.3", "0.100", "1.33", "50%", "20%"]
    assert any(line.startswith("direct") and " - " in line for line in lines)
    assert any("5000" in line and "100.0" in line for line in lines)
    assert any("4.0" in line and "50%" in line for line in lines)
    marked = [line for line in markdown_lines(report) if line.startswith("|")]
    assert all(line.endswith("|") for line in marked)
    assert report.as_dict()["figures"][1]["cpu_ratio"] == 1.333
