"""``isthmus bench reverse`` runs through, over real brokers and proxies; its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus_bench.bench_cli import bench_app
from isthmus_bench.reverse import FAILOVER, FAILOVER_MANY, KINDS, PROMOTE

pytestmark = [pytest.mark.brokers, pytest.mark.suite("bench")]


def test_a_quick_run(tmp_path: Path) -> None:
    markdown = tmp_path / "report.md"
    arguments = ["reverse", "--quick", "--many", "20", "-o", "json", "--markdown", str(markdown)]
    result = CliRunner().invoke(bench_app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    figures = {each["kind"]: each for each in report["figures"]}
    assert list(figures) == [*(kind.name for kind in KINDS), PROMOTE, FAILOVER, FAILOVER_MANY]
    for kind in KINDS:
        there, back = figures[kind.name]["moves"]
        for move in (there, back):
            assert 0 < move["pause_s"] < move["until_held_s"] + move["pause_s"]
            assert move["records_per_s"] > 0
            assert (move["announced_s"] is not None) is kind.transactional
            assert (move["client_s"] is not None) is kind.told
    for kind in (FAILOVER, FAILOVER_MANY):
        (move,) = figures[kind]["moves"]
        assert move["pause_s"] > move["waits_s"] > 0
    assert figures[FAILOVER_MANY]["partitions"] == 20
    assert len(report["verdicts"]) == 9
    assert "| reverse, synchronous |" in markdown.read_text()
    assert "warming up" in result.stderr
