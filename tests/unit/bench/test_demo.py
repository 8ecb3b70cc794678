"""The demo's verdict: what it counts as lost, and how it ends then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isthmus_bench.demo import clients, command, demo_app, disaster
from isthmus_bench.demo.clients import Place
from isthmus_bench.demo.telling import Telling

FAILED_OVER: Mapping[str, Any] = {"missing": 0, "written_at": {"partition": 0, "offset": 3}}
RESULT: Mapping[str, Any] = {"equal": True, "write_refused": True, "failover": FAILED_OVER, "reversal": None}


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, 0),
        ({"failover": None}, 0),  # it was kept
        ({"equal": False}, 1),
        ({"write_refused": False}, 1),
        ({"failover": {**FAILED_OVER, "missing": 1}}, 1),
        ({"failover": {**FAILED_OVER, "written_at": None}}, 1),
        ({"failover": None, "reversal": {"lost": 0, "doubled": 0}}, 0),
        ({"failover": None, "reversal": {"lost": 1, "doubled": 0}}, 1),
        ({"failover": None, "reversal": {"lost": 0, "doubled": 1}}, 1),
    ],
)
def test_the_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], code: int) -> None:
    monkeypatch.setattr(command.Demo, "run", lambda demo: {**RESULT, **changed})
    done = CliRunner().invoke(demo_app, ["-o", "json"])
    assert done.exit_code == code, done.output
    assert json.loads(done.stdout) == {**RESULT, **changed}


def test_the_report_goes_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Path | None] = []

    def run(demo: Any) -> Mapping[str, Any]:
        pages.append(demo._report)
        return RESULT

    monkeypatch.setattr(command.Demo, "run", run)
    for arguments in ([], ["--report", "x.html"], ["--no-report"]):
        assert CliRunner().invoke(demo_app, [*arguments, "-o", "json"]).exit_code == 0
    assert pages == [Path("demo-report.html"), Path("x.html"), None]


def test_a_demo_that_was_not_kept_cannot_be_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "cache_directory", lambda: tmp_path)
    done = CliRunner().invoke(demo_app, ["--stop"])
    assert "no demo was kept" in str(done.exception)


ACKED: Mapping[Place, bytes] = {(0, 7): b"a", (0, 8): b"b", (1, 7): b"c"}


@pytest.mark.parametrize(
    ("there", "missing", "more"),
    [
        (ACKED, 0, 0),
        ({**ACKED, (1, 8): b"not acked"}, 0, 1),
        ({(0, 7): b"a", (0, 8): b"b"}, 1, 0),
        ({**ACKED, (0, 8): b"c", (1, 7): b"b"}, 2, 2),  # two records have changed places
    ],
)
def test_an_acked_record_counts_at_the_offset_of_its_ack_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: dict[Place, bytes],
    missing: int,
    more: int,
) -> None:
    claim = {"topic": "t", "partition": 0, "end": 9, "in_sync_until_ms": 1_760_000_000_000, "message": ""}

    async def read_from(bootstrap: str, starts: Mapping[int, int]) -> dict[Place, bytes]:
        return there

    async def write_once(bootstrap: str, value: bytes) -> tuple[Place | None, str | None]:
        return (0, 9), None

    monkeypatch.setattr(clients, "read_from", read_from)
    monkeypatch.setattr(clients, "write_once", write_once)
    monkeypatch.setattr(disaster.Failover, "_kill", lambda *_: 0.0)
    monkeypatch.setattr(disaster.Failover, "_fail_over", lambda *_: {"namespaces": [{"claims": [claim]}]})
    proxy: Any = type("Proxy", (), {"url": "http://b", "bootstrap": "b:1"})()
    cluster: Any = None
    found = disaster.Failover(Telling(quiet=False), "a-to-b", (cluster, proxy), proxy).run(dict(ACKED), {0: 7, 1: 7})
    assert (found["acked"], found["missing"], found["not_acked_but_there"]) == (3, missing, more)
    said = capsys.readouterr().out
    assert f"3 acked, {3 - missing} found at their offsets, {missing} MISSING" in said
    assert said.count("MISSING: partition") == missing
    assert "all that A acked until 2025-10-09T08:53:20+00:00 is here" in said
