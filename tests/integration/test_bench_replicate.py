"""``isthmus bench replicate`` runs through, over real brokers, proxies and MirrorMaker 2; its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus_bench.bench_cli import bench_app
from isthmus_bench.contestants import LINK, MIRROR, TUNED
from isthmus_bench.small_load import KINDS

pytestmark = [pytest.mark.brokers, pytest.mark.suite("bench")]


def test_a_quick_run(tmp_path: Path) -> None:
    markdown = tmp_path / "report.md"
    arguments = ["replicate", "--quick", "-o", "json", "--markdown", str(markdown)]
    result = CliRunner().invoke(bench_app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [each["contestant"] for each in report["catch_up"]] == [LINK, MIRROR, TUNED]
    for each in report["catch_up"]:
        assert each["catch_up"]["mb_per_s"] > 0
        assert each["resident_mb"] > 0
    assert [(each["contestant"], each["rate"]) for each in report["lags"]] == [
        (LINK, 500),
        (MIRROR, 500),
        (TUNED, 500),
    ]
    for each in report["lags"]:
        assert each["lag"]["records_per_s"] > 0
    assert [(each["contestant"], each["partitions"]) for each in report["idle"]] == [(LINK, 20), (MIRROR, 20)]
    assert [(each["kind"], each["brokers"]) for each in report["small"]] == [(kind, 1) for kind in KINDS]
    for each in report["small"]:
        assert min(each["small"][rate] for rate in ("written_per_s", "written_by_one_per_s", "copied_per_s")) > 0
    assert len(report["verdicts"]) == 7
    assert f"| {LINK} |" in markdown.read_text()
    assert "round 1 of 1" in result.stderr
