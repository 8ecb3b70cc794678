"""``isthmus bench audit``: what it judges, and that it runs, on few records."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from isthmus_bench.audit_speed import Figure, verdicts_of


def figure(records: int, seconds: float) -> Figure:
    return Figure(records, seconds, 1.0, 1.0, 3, 1.0)


def test_the_target_is_judged_where_most_is_read() -> None:
    assert verdicts_of([figure(1_000_000, 9.0), figure(4_000_000, 8.0)])[0].met is True
    [verdict] = verdicts_of([figure(1_000_000, 1.0), figure(4_000_000, 11.0)])
    assert verdict.met is False
    assert verdict.measured == pytest.approx(363_636, abs=1)


@pytest.mark.brokers
@pytest.mark.suite("bench")
def test_the_command_measures() -> None:
    command = [sys.executable, "-m", "isthmus", "bench", "audit", "--quick", "--records", "5000", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [figure] = report["figures"]
    assert figure["records"] == 4000, "whole batches"
    assert figure["per_s"] == figure["records"] / figure["seconds"]
    assert figure["spark_cpu_s"] > 0
    assert report["verdicts"][0]["measured"] == figure["per_s"]
