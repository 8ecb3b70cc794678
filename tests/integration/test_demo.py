"""The demo tells the truth: both clusters are real, the source is killed, and what was acked is at the target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus_bench.demo import reversal as reversals
from isthmus_bench.demo.disaster import MEASURED, WRITTEN_MIN

pytestmark = pytest.mark.brokers


def run(directory: Path, *options: str) -> dict[str, Any]:
    """What the demo says at its end. It leaves nothing behind."""
    temporary = directory / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", "demo", "-o", "json", *options],
        cwd=directory,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # kio imports Hypothesis where that is installed, which makes its folder.
    assert {each.name for each in directory.iterdir()} <= {"tmp", ".hypothesis"}, "it leaves something behind"
    assert not list(temporary.glob("isthmus-*")), "it leaves something behind"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def told(directory: Path, *options: str) -> dict[str, Any]:
    """The same of a demo of a link."""
    found = run(directory, "--records", "3000", "--no-report", *options)
    assert (found["equal"], found["write_refused"], found["records_consumed"]) == (True, True, 3_000)
    assert found["report"] is None
    return found


@pytest.mark.one_in_ci("stories", of="the first steps of a user")
def test_every_acked_record_survives_its_cluster(tmp_path: Path) -> None:
    found = told(tmp_path)
    failover = found["failover"]
    assert failover["acked"] == failover["found"] >= 2 * MEASURED + WRITTEN_MIN
    assert failover["missing"] == 0
    assert failover["written_at"]["offset"] > 0
    for mode in ("asynchronous", "synchronous"):
        assert 0 < found["latencies"][mode]["p50_ms"] <= found["latencies"][mode]["p99_ms"]


@pytest.mark.one_in_ci("stories", of="the first steps of a user")
def test_an_application_is_moved_there_and_back(tmp_path: Path) -> None:
    found = told(tmp_path, "--reverse")
    reversal = found["reversal"]
    assert (found["failover"], reversal["lost"], reversal["doubled"], len(reversal["gaps_ms"])) == (None, 0, 0, 2)
    assert reversal["acked"] >= 2 * MEASURED + 4 * reversals.WRITTEN_MIN


@pytest.mark.one_in_ci("stories", of="the first steps of a user")
def test_every_message_gets_to_every_cluster_of_a_tree(tmp_path: Path) -> None:
    found = run(tmp_path, "--tree", "--records", "500")
    assert (found["records"], found["lost"], found["doubled"], found["killed"]) == (1_500, 0, 0, "proxy-1")
    ways = {
        (each["origin"], each["cluster"]): (each["way"], each["messages"], each["times"]) for each in found["copies"]
    }
    assert len(ways) == len(found["copies"]) == 9
    assert {(messages, times) for _, messages, times in ways.values()} == {(500, "1")}
    assert ways["cluster-2", "cluster-1"][0] == "cluster-2 > level 4 > cluster-1"
    assert ways["cluster-3", "cluster-2"][0] == "cluster-3 > level 8 > cluster-1 > level 4 > cluster-2"
    assert ways["cluster-3", "cluster-3"][0] == "cluster-3"
