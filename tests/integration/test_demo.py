"""The demo tells the truth: both clusters are real, the source is killed, and what was acked is at the target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus_bench.demo.disaster import MEASURED, WRITTEN_MIN

pytestmark = pytest.mark.brokers


@pytest.mark.one_in_ci("stories", of="the first steps of a user")
def test_every_acked_record_survives_its_cluster(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", "demo", "--records", "3000", "-o", "json", "--no-report"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["write_refused"], found["records_consumed"]) == (True, True, 3_000)
    failover = found["failover"]
    assert failover["acked"] == failover["found"] >= 2 * MEASURED + WRITTEN_MIN
    assert failover["missing"] == 0
    assert failover["written_at"]["offset"] > 0
    for mode in ("asynchronous", "synchronous"):
        assert 0 < found["latencies"][mode]["p50_ms"] <= found["latencies"][mode]["p99_ms"]
    assert found["report"] is None
    # kio imports Hypothesis where that is installed, which makes its folder.
    assert {each.name for each in tmp_path.iterdir()} <= {"tmp", ".hypothesis"}, "it leaves something behind"
    assert not list(temporary.glob("isthmus-*")), "it leaves something behind"
