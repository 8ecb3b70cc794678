"""``isthmus bench sync`` runs through, over real brokers, proxies and a WAN; its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.wan import RTT_MS
from typer.testing import CliRunner

from isthmus_bench.bench_cli import bench_app
from isthmus_bench.sync_plan import ASYNC, DIRECT, LOADS, PROXIED, SYNC
from isthmus_bench.wan import Wan


def test_a_wan_takes_its_round_trip(wan: Wan) -> None:
    taken = wan.round_trips(20)
    assert RTT_MS - 0.1 <= taken.p50_ms < 2 * RTT_MS, "each way is delayed by half of it, once"
    stats = wan.stats()
    assert stats["packets"] >= 40
    assert wan.stats()["packets"] == 0


@pytest.mark.brokers
@pytest.mark.suite("bench")
def test_a_quick_run(wan: Wan, tmp_path: Path) -> None:
    html, markdown = tmp_path / "report.html", tmp_path / "report.md"
    arguments = ["sync", "--quick", "-o", "json", "--report", str(html), "--markdown", str(markdown)]
    for load in ("depth-1", "open-500-8p", "java-linger-0", "commit", "transaction"):
        arguments += ["--load", load]
    result = CliRunner().invoke(bench_app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    measured = {DIRECT, PROXIED, ASYNC, SYNC, "stretched-2", "stretched-3"}
    assert not report["missing"], result.stderr
    figures = {(each["scenario"], each["load"]): each for each in report["figures"]}
    assert {scenario for scenario, _ in figures} == measured
    assert len(figures) == 5 * len(measured)
    for (scenario, load), figure in figures.items():
        assert load == "java-linger-0" or figure["p50_ms"] > 0  # whole milliseconds there
        assert figure["p50_ms"] <= figure["p99_ms"] <= figure["p999_ms"] <= figure["max_ms"]
        if scenario.startswith("stretched"):  # an ack takes a round trip, a transaction several
            assert figure["p50_ms"] >= (8.0 if load == "transaction" else 1.9)
    assert figures[PROXIED, "depth-1"]["cpu"]["proxies"] > 0
    assert 1.9 <= report["wans"][0]["measured"]["p50_ms"] < 4.0
    assert json.loads(html.with_suffix(".json").read_text()) == report
    assert html.read_text().count("<svg") == 5
    assert "| direct broker |" in markdown.read_text()
    assert "RTT 2 ms, round 1 of 1" in result.stderr


def test_unknown_loads_are_named_with_those_that_there_are() -> None:
    result = CliRunner().invoke(bench_app, ["sync", "--load", "nonsense"])
    assert result.exit_code == 2
    assert LOADS[0].name in result.stderr
