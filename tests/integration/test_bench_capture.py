"""``isthmus bench capture``: what it judges, and that it runs; its figures mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus_bench.bench_cli import bench_app
from isthmus_bench.capture_cost import Sample, verdicts_of


def samples(*cpu_us: float, p999_us: float = 1000.0) -> list[Sample]:
    return [Sample(each, 100.0, 200.0, (p999_us, 9000.0, 0.0)) for each in cpu_us]


def test_what_is_added_is_taken_round_by_round() -> None:
    cpu, tail = verdicts_of(samples(20.0, 40.0, 30.0), samples(21.0, 41.5, 39.0, p999_us=1050.0))
    assert (cpu.measured, cpu.met) == (1.5, True)
    assert (tail.measured, tail.met) == (1.05, True)
    cpu, tail = verdicts_of(samples(20.0), samples(22.5, p999_us=1200.0))
    assert (cpu.met, tail.met) == (False, False)


@pytest.mark.brokers
@pytest.mark.suite("bench")
def test_a_quick_run(tmp_path: Path) -> None:
    markdown = tmp_path / "report.md"
    arguments = [
        "capture",
        "--quick",
        "--cores-asleep",
        "--rate",
        "500",
        "--rounds",
        "2",
        "-o",
        "json",
        "--markdown",
        str(markdown),
    ]
    result = CliRunner().invoke(bench_app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["captured_bytes"] > 0
    assert report["rate"] == 500
    for sample in (*report["off"], *report["on"]):
        assert sample["cpu_us"] > 0
        (p999_us,) = sample["p999_us"]
        assert 0 < sample["p50_us"] <= sample["p99_us"] <= p999_us
    assert len(report["off"]) == len(report["on"]) == 2
    assert "| with capture |" in markdown.read_text()
