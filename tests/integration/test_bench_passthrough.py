"""``isthmus bench passthrough`` runs through, over real brokers and real proxies; its figures mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus_bench.bench_cli import bench_app
from isthmus_bench.passthrough import DIRECT, HOOK, LIST, NO_PLUGINS, PROXY, RELAY, TLS

REAL = [pytest.mark.brokers, pytest.mark.suite("bench")]
REPOSITORY = Path(__file__).parents[2]
CANNED = pytest.mark.one_in_ci("stories", "bench", of="commands of jobs")


@pytest.mark.parametrize("broker", [pytest.param("canned", marks=CANNED), pytest.param("kafka", marks=REAL)])
def test_a_quick_run(broker: str, tmp_path: Path) -> None:
    markdown = tmp_path / "report.md"
    arguments = ["passthrough", "--quick", "--broker", broker, "-o", "json", "--markdown", str(markdown)]
    if broker == "canned":
        arguments += ["--beside", str(REPOSITORY)]
    result = CliRunner().invoke(bench_app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    between = {RELAY, NO_PLUGINS, PROXY}
    between |= {name + TLS for name in between} | {HOOK}
    other = {f"{name} of {REPOSITORY.name} (1)": name for name in (PROXY, HOOK)} if broker == "canned" else {}
    between |= set(other)
    assert {figure["path"] for figure in report["figures"]} == {DIRECT, *between}
    assert {figure["path"] for figure in report["figures"] if figure["workload"] == LIST} == {DIRECT, RELAY, PROXY}
    for figure in report["figures"]:
        assert figure["sample"]["requests_per_s"] > 0
        assert (figure["sample"]["cpu_us"] or 0) > 0 or figure["path"] == DIRECT
        assert (figure["cpu_ratio"] == 1) == (figure["path"] in (RELAY, RELAY + TLS))
    assert {each["path"] for each in report["idle"]} == between
    assert {each["path"] for each in report["carried"]} == {RELAY, PROXY, PROXY + TLS}
    assert [each["connections"] for each in report["carried"]] == [100, 100, 100]
    assert len(report["verdicts"]) == (7 if broker == "kafka" else 6)
    assert {each["other"]: each["path"] for each in report["beside"]} == other
    assert "| proxy |" in markdown.read_text()
    assert "round 1 of 1" in result.stderr
