"""``isthmus bench scale`` runs through, over real brokers and proxies; its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.java_steps import java_compiles
from typer.testing import CliRunner

from isthmus_bench.bench_cli import bench_app
from isthmus_bench.kafka import DEFAULT_VERSION

pytestmark = [pytest.mark.brokers, pytest.mark.suite("bench")]


def test_a_quick_run(tmp_path: Path) -> None:
    if not java_compiles(DEFAULT_VERSION):
        pytest.skip("the AdminClient that links are compared with needs a JDK")
    markdown = tmp_path / "report.md"
    arguments = ["scale", "--quick", "-o", "json", "--markdown", str(markdown)]
    result = CliRunner().invoke(bench_app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [(each["topics"], each["partitions"]) for each in report["figures"]] == [(10, 30), (20, 60)]
    for figure in report["figures"]:
        assert all(value > 0 for value in (*figure.pop("restart").values(), *figure.values())), figure
    assert len(report["verdicts"]) == 8
    assert "| 20 | 60 |" in markdown.read_text()
    assert "20 topics: attached in" in result.stderr
    assert "rolling restart" in markdown.read_text()
