"""``isthmus bench tree`` runs through, over real brokers, proxies and MirrorMaker 2; its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus_bench.bench_cli import bench_app
from isthmus_bench.contestants import TREE, TREE_AT_LEAST_ONCE, TUNED

pytestmark = [pytest.mark.brokers, pytest.mark.suite("bench")]


def test_a_quick_run(tmp_path: Path) -> None:
    markdown = tmp_path / "report.md"
    result = CliRunner().invoke(
        bench_app, ["tree", "--quick", "-o", "json", "--markdown", str(markdown)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    contestants = [TREE, TREE_AT_LEAST_ONCE, TUNED]
    assert [each["contestant"] for each in report["catch_up"]] == contestants
    for each in report["catch_up"]:
        assert each["catch_up"]["mb_per_s"] > 0
    assert [(each["contestant"], each["rate"]) for each in report["lags"]] == [(each, 500) for each in contestants]
    for each in report["lags"]:
        assert each["lag"]["records_per_s"] > 0
    for each in report["header"]:
        assert min(each["apart_us"], each["objects_us"]) > 0
    assert len(report["verdicts"]) == 3
    assert f"| {TREE} |" in markdown.read_text()
    assert "round 1 of 1" in result.stderr
